//! The IPv4 header (RFC 791 section 3.1) without its options.

use zerocopy::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The fixed 20 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ipv4 {
    /// Version (4 bits) and header length in 32-bit words (4 bits).
    pub version_ihl: u8,
    /// DSCP (6 bits, RFC 2474) and ECN (2 bits, RFC 3168).
    pub traffic_class: u8,
    /// Bytes of the packet, header included.
    pub total_len: U16,
    /// Identifies the datagram that a fragment belongs to.
    pub identification: U16,
    /// Reserved, don't fragment, more fragments (1 bit each), offset in 8-byte units (13 bits).
    pub fragmentation: U16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// One's complement over the header.
    pub checksum: U16,
    /// Source address.
    pub source: U32,
    /// Destination address.
    pub destination: U32,
}

impl Ipv4 {
    /// Bytes of the header without options.
    pub const BYTES: u16 = 20;
    /// [`Ipv4::version_ihl`] of a header without options.
    pub const PLAIN: u8 = 0x45;
    /// "More fragments" within [`Ipv4::fragmentation`].
    pub const MORE_FRAGMENTS: u16 = 0x2000;
    /// "Don't fragment" within [`Ipv4::fragmentation`].
    pub const DONT_FRAGMENT: u16 = 0x4000;

    /// The IP version, 4 in a valid header.
    #[inline]
    #[must_use]
    pub fn version(&self) -> u8 {
        self.version_ihl >> 4
    }

    /// Bytes of the header with options; 0 to 60.
    #[inline]
    #[must_use]
    pub fn header_len(&self) -> u16 {
        u16::from(self.version_ihl & 0x0f) * 4
    }

    /// Whether the packet is a fragment, the first or a later one: "more fragments" is set or the offset is not 0.
    #[inline]
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        self.fragmentation.get() & 0x3fff != 0
    }
}
