//! Neighbour solicitations and advertisements (RFC 4861 sections 4.3, 4.4 and 4.6.1).

use zerocopy::network_endian::{U16, U32, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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
