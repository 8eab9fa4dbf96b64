//! The TCP header without options (RFC 9293 section 3.1), the UDP header (RFC 768), and SCTP's common header and chunk
//! header (RFC 9260 section 3).
//!
//! Not here: TCP options, and chunks of SCTP beyond their header.

use zerocopy::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The fixed 20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Tcp {
    /// Source port.
    pub source_port: U16,
    /// Destination port.
    pub destination_port: U16,
    /// Sequence number of the first byte.
    pub sequence: U32,
    /// Next sequence number expected from the other side; valid when the flag ACK is set.
    pub acknowledgement: U32,
    /// Data offset in 32-bit words (4 bits) and reserved (4 bits).
    pub data_offset: u8,
    /// See [`super::headers::tcp_flags`].
    pub flags: u8,
    /// Receive window.
    pub window: U16,
    /// One's complement over pseudo header and segment.
    pub checksum: U16,
    /// Urgent pointer.
    pub urgent: U16,
}

impl Tcp {
    /// Bytes of the header without options.
    pub const BYTES: u16 = 20;

    /// Bytes of the header with options; 0 to 60.
    #[inline]
    #[must_use]
    pub fn header_len(&self) -> u16 {
        u16::from(self.data_offset >> 4) * 4
    }
}

/// The options of a TCP header: their kinds (IANA's registry; RFC 9293, 2018, 7323, 8684 and 7413), and where each stands.
pub mod tcp_option {
    use std::ops::Range;

    use super::Tcp;

    /// The end of the options.
    pub const END: u8 = 0;
    /// Padding of one byte.
    pub const NO_OPERATION: u8 = 1;
    /// The maximum segment size, 4 bytes in all.
    pub const MAXIMUM_SEGMENT_SIZE: u8 = 2;
    /// The scale of windows, 3 bytes in all.
    pub const WINDOW_SCALE: u8 = 3;
    /// Selective acknowledgements: 2 bytes, and 8 a block.
    pub const SACK: u8 = 5;
    /// Timestamps, 10 bytes in all.
    pub const TIMESTAMPS: u8 = 8;
    /// Multipath TCP.
    pub const MULTIPATH: u8 = 30;
    /// TCP Fast Open.
    pub const FAST_OPEN: u8 = 34;

    /// The bytes of the next option that has a length, kind and length included, from an offset in a TCP header on; the
    /// first one is found from [`Tcp::BYTES`] on. `None` at the end of the options, or if it does not fit the header.
    #[must_use]
    pub fn next(header: &[u8], mut at: usize) -> Option<Range<usize>> {
        loop {
            match *header.get(at)? {
                END => return None,
                NO_OPERATION => at += 1,
                _ => {
                    let len = usize::from(*header.get(at + 1)?);
                    return (len >= 2 && at + len <= header.len()).then_some(at..at + len);
                }
            }
        }
    }

    /// The bytes of each option that has a length, kind and length included, in a TCP header.
    pub fn all(header: &[u8]) -> impl Iterator<Item = Range<usize>> {
        let from = |at| next(header, at);
        std::iter::successors(from(Tcp::BYTES.into()), move |option| from(option.end))
    }
}

/// The header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Udp {
    /// Source port.
    pub source_port: U16,
    /// Destination port.
    pub destination_port: U16,
    /// Bytes of header and data.
    pub len: U16,
    /// One's complement over pseudo header and datagram. 0 means that none was computed; a computed 0 is sent as
    /// 0xffff.
    pub checksum: U16,
}

impl Udp {
    /// Bytes of the header.
    pub const BYTES: u16 = 8;
}

/// The common header, 12 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Sctp {
    /// Source port.
    pub source_port: U16,
    /// Destination port.
    pub destination_port: U16,
    /// Verification tag: the value that the receiver chose for its peer; 0 with INIT.
    pub tag: U32,
    /// CRC32c over the packet with this field set to 0. Unlike every other field it is little-endian (RFC 9260 appendix
    /// A).
    pub checksum: zerocopy::little_endian::U32,
}

/// The header of a chunk, 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Chunk {
    /// See [`super::headers::sctp_chunk`].
    pub kind: u8,
    /// Meaning depends on the kind.
    pub flags: u8,
    /// Bytes of the chunk including this header, without the up to three bytes of padding after it.
    pub len: U16,
}

impl Sctp {
    /// Bytes of the common header.
    pub const BYTES: u16 = 12;
}

impl Chunk {
    /// Bytes of the chunk header.
    pub const BYTES: u16 = 4;
    /// Flag T of ABORT and SHUTDOWN COMPLETE: the sender has no association and reflects the tag that it received
    /// (section 8.5.1).
    pub const REFLECTED: u8 = 0x01;
}
