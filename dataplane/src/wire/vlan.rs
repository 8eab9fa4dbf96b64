//! The IEEE 802.1Q tag: the bytes after the EtherTypes 0x8100 and 0x88a8.

use zerocopy::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The tag without its own EtherType.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct VlanTag {
    /// Priority (3 bits), drop eligibility (1 bit), VLAN identifier (12 bits).
    pub control: U16,
    /// EtherType of the payload after the tag.
    pub ether_type: U16,
}
