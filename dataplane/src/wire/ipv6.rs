//! The IPv6 header and the extension headers that the parser skips (RFC 8200 sections 3 and 4).

use zerocopy::network_endian::{U16, U32, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Next header numbers that `parse` skips. Every other number ends the chain, AH and ESP included: what they protect
/// cannot be rewritten.
pub mod next_header {
    /// Hop-by-hop options; allowed only directly after the IPv6 header.
    pub const HOP_BY_HOP: u8 = 0;
    /// Routing header.
    pub const ROUTING: u8 = 43;
    /// Fragment header.
    pub const FRAGMENT: u8 = 44;
    /// Destination options.
    pub const DESTINATION_OPTIONS: u8 = 60;
}

/// The fixed 40 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ipv6 {
    /// Version (4 bits), traffic class (8 bits), flow label (20 bits).
    pub version_class_label: U32,
    /// Bytes after this header, extension headers included.
    pub payload_len: U16,
    /// Protocol of the payload or type of the first extension header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub source: U128,
    /// Destination address.
    pub destination: U128,
}

impl Ipv6 {
    /// Bytes of the header.
    pub const BYTES: u16 = 40;
    /// [`Ipv6::version_class_label`] of a packet without traffic class and flow label.
    pub const PLAIN: u32 = 0x6000_0000;

    /// The IP version, 6 in a valid header.
    #[inline]
    #[must_use]
    pub fn version(&self) -> u8 {
        (self.version_class_label.get() >> 28) as u8
    }
}

/// The first two bytes of hop-by-hop options, destination options and routing headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Extension {
    /// Type of the header that follows.
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

/// The first four bytes of a routing header (RFC 8200 section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RoutingHeader {
    /// Next header and length.
    pub extension: Extension,
    /// Routing type; 0 is forbidden (RFC 5095).
    pub kind: u8,
    /// Hops that remain before the packet reaches its final destination.
    pub segments_left: u8,
}

/// The fragment header (RFC 8200 section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct FragmentHeader {
    /// Protocol of the datagram's payload; meaningful in the first fragment.
    pub next_header: u8,
    /// Reserved.
    pub reserved: u8,
    /// Offset in 8-byte units (13 bits), reserved (2 bits), more fragments (1 bit).
    pub offset_more: U16,
    /// Identifies the datagram that a fragment belongs to.
    pub identification: U32,
}

impl FragmentHeader {
    /// Bytes of the header.
    pub const BYTES: u16 = 8;

    /// Whether this is an atomic fragment (RFC 6946): offset 0 and no further fragment.
    #[inline]
    #[must_use]
    pub fn is_atomic(&self) -> bool {
        self.offset_more.get() & 0xfff9 == 0
    }
}
