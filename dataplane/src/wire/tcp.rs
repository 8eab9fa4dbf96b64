//! The TCP header (RFC 9293 section 3.1) without its options.

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
    /// See [`crate::tcp_flags`].
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
