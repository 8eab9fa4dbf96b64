//! The first 8 bytes of ICMP (RFC 792) and ICMPv6 (RFC 4443) messages with the types and codes that the engine handles,
//! and neighbour solicitations and advertisements (RFC 4861 sections 4.3, 4.4 and 4.6.1).
//!
//! Not here: the handling of a message (`icmp`).

use zerocopy::network_endian::{U16, U32, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Types of ICMP for IPv4.
pub mod icmpv4 {
    /// Echo reply.
    pub const ECHO_REPLY: u8 = 0;
    /// Destination unreachable.
    pub const UNREACHABLE: u8 = 3;
    /// Source quench: deprecated, but still an error message (RFC 6633).
    pub const SOURCE_QUENCH: u8 = 4;
    /// Redirect.
    pub const REDIRECT: u8 = 5;
    /// Echo request.
    pub const ECHO_REQUEST: u8 = 8;
    /// Time exceeded.
    pub const TIME_EXCEEDED: u8 = 11;
    /// Parameter problem.
    pub const PARAMETER_PROBLEM: u8 = 12;
    /// Code of [`UNREACHABLE`]: host unreachable.
    pub const CODE_HOST: u8 = 1;
    /// Code of [`UNREACHABLE`]: port unreachable.
    pub const CODE_PORT: u8 = 3;
    /// Code of [`UNREACHABLE`]: fragmentation is needed and forbidden (RFC 1191).
    pub const CODE_FRAGMENTATION_NEEDED: u8 = 4;
}

/// Types of ICMPv6. Types below 128 are errors.
pub mod icmpv6 {
    /// Destination unreachable.
    pub const UNREACHABLE: u8 = 1;
    /// Packet too big.
    pub const PACKET_TOO_BIG: u8 = 2;
    /// Time exceeded.
    pub const TIME_EXCEEDED: u8 = 3;
    /// Parameter problem.
    pub const PARAMETER_PROBLEM: u8 = 4;
    /// Echo request.
    pub const ECHO_REQUEST: u8 = 128;
    /// Echo reply.
    pub const ECHO_REPLY: u8 = 129;
    /// Neighbour solicitation (RFC 4861).
    pub const NEIGHBOUR_SOLICITATION: u8 = 135;
    /// Neighbour advertisement (RFC 4861).
    pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
    /// Redirect (RFC 4861).
    pub const REDIRECT: u8 = 137;
    /// Types of neighbour discovery (RFC 4861 section 4).
    pub const NEIGHBOUR_DISCOVERY: std::ops::RangeInclusive<u8> = 133..=137;
    /// Hop limit of neighbour discovery: a packet that passed a router cannot have it (RFC 4861 section 7.1).
    pub const NEIGHBOUR_HOP_LIMIT: u8 = 255;
    /// Code of [`UNREACHABLE`]: address unreachable.
    pub const CODE_ADDRESS: u8 = 3;
    /// Code of [`UNREACHABLE`]: port unreachable.
    pub const CODE_PORT: u8 = 4;
}

/// The first 8 bytes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Icmp {
    /// Message type.
    pub kind: u8,
    /// Code within the type.
    pub code: u8,
    /// One's complement over the message; in ICMPv6 over the pseudo header too.
    pub checksum: U16,
    /// Identifier and sequence number of an echo, the MTU of "packet too big" and "fragmentation needed", 0 otherwise.
    pub rest: U32,
}

impl Icmp {
    /// Bytes of this header.
    pub const BYTES: u16 = 8;
}

/// Flags of an advertisement, and the types of the option that carries an Ethernet address.
pub mod neighbour {
    /// The advertisement answers a solicitation.
    pub const SOLICITED: u32 = 0x4000_0000;
    /// The receiver replaces its cached entry.
    pub const OVERRIDE: u32 = 0x2000_0000;
    /// Option: link-layer address of the sender.
    pub const SOURCE_LINK_LAYER: u8 = 1;
    /// Option: link-layer address of the target.
    pub const TARGET_LINK_LAYER: u8 = 2;
}

/// A solicitation or an advertisement, without options.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct NeighbourMessage {
    /// ICMPv6 type.
    pub kind: u8,
    /// Always 0.
    pub code: u8,
    /// One's complement over pseudo header and message.
    pub checksum: U16,
    /// See [`neighbour`]; 0 in a solicitation.
    pub flags: U32,
    /// The address that is solicited or advertised.
    pub target: U128,
}

/// The option that carries an Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LinkLayerOption {
    /// [`neighbour::SOURCE_LINK_LAYER`] or [`neighbour::TARGET_LINK_LAYER`].
    pub kind: u8,
    /// Length in 8-byte units, this header included; 1.
    pub units: u8,
    /// The Ethernet address.
    pub mac: [u8; 6],
}
