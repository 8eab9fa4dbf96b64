//! The SCTP common header and the header that every chunk begins with (RFC 9260 section 3).

use zerocopy::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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
    /// See [`crate::sctp_chunk`].
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
