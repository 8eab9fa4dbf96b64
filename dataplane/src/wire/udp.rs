//! The UDP header (RFC 768).

use zerocopy::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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
