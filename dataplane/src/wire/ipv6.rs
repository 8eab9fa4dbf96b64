//! The IPv6 header and the extension headers that are walked over (RFC 8200 sections 3 and 4).

use zerocopy::network_endian::{U16, U32, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Next header numbers that `parse` walks over. All others end the chain: AH and ESP too, since what they cover
/// cannot be rewritten.
pub mod next_header {
    /// Hop-by-hop options; only right after the IPv6 header.
    pub const HOP_BY_HOP: u8 = 0;
    /// Routing header.
    pub const ROUTING: u8 = 43;
    /// Fragment header.
    pub const FRAGMENT: u8 = 44;
    /// Destination options.
    pub const DESTINATION_OPTIONS: u8 = 60;
}

/// The fixed header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ipv6 {
    /// Version (4 bits), traffic class (8 bits), flow label (20 bits).
    pub version_class_label: U32,
    /// Bytes after this header, extension headers included.
    pub payload_len: U16,
    /// What follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// From.
    pub source: U128,
    /// To.
    pub destination: U128,
}

impl Ipv6 {
    /// Bytes of the header.
    pub const BYTES: u16 = 40;
    /// [`Ipv6::version_class_label`] of a packet without traffic class and flow label.
    pub const PLAIN: u32 = 0x6000_0000;

    /// The version; 6.
    #[inline]
    #[must_use]
    pub fn version(&self) -> u8 {
        (self.version_class_label.get() >> 28) as u8
    }
}

/// How hop-by-hop options, destination options and routing headers begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Extension {
    /// What follows this header.
    pub next_header: u8,
    /// Length in 8-byte units, without the first 8 bytes.
    pub units: u8,
}

impl Extension {
    /// Bytes of the header; 8 to 2048.
    #[inline]
    #[must_use]
    pub fn header_len(&self) -> u16 {
        (u16::from(self.units) + 1) * 8
    }
}

/// How a routing header begins (RFC 8200 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RoutingHeader {
    /// Next header and length.
    pub extension: Extension,
    /// Routing type; 0 is forbidden (RFC 5095).
    pub kind: u8,
    /// Hops still to visit before the packet is at its last destination.
    pub segments_left: u8,
}

/// The fragment header (RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FragmentHeader {
    /// What follows, in the first fragment.
    pub next_header: u8,
    /// Reserved.
    pub reserved: u8,
    /// Offset in 8-byte units (13 bits), reserved (2 bits), more fragments (1 bit).
    pub offset_more: U16,
    /// Groups the fragments of a datagram.
    pub identification: U32,
}

impl FragmentHeader {
    /// Bytes of the header.
    pub const BYTES: u16 = 8;

    /// Whether it is the only "fragment" of its datagram (RFC 6946): no offset, and none to follow.
    #[inline]
    #[must_use]
    pub fn is_atomic(&self) -> bool {
        self.offset_more.get() & 0xfff9 == 0
    }
}
