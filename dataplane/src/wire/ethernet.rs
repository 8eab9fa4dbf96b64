//! The Ethernet II header (IEEE 802.3 clause 3).

use zerocopy::network_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Mac;

/// EtherTypes: the protocol that an Ethernet frame carries.
pub mod ether_type {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// ARP.
    pub const ARP: u16 = 0x0806;
    /// An IEEE 802.1Q tag follows.
    pub const VLAN: u16 = 0x8100;
    /// An IEEE 802.1ad service tag follows.
    pub const SERVICE_VLAN: u16 = 0x88a8;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Ethernet {
    /// Destination address.
    pub destination: [u8; 6],
    /// Source address.
    pub source: [u8; 6],
    /// EtherType of the payload; see [`ether_type`].
    pub ether_type: U16,
}

impl Ethernet {
    /// Bytes of the header.
    pub const BYTES: u16 = 14;

    /// Whether the destination is a group address, broadcast included: the low bit of the first byte is set.
    #[inline]
    #[must_use]
    pub fn is_group(&self) -> bool {
        self.destination[0] & 1 != 0
    }

    /// Whether the destination is the broadcast address.
    #[must_use]
    pub fn is_broadcast(&self) -> bool {
        self.destination == [0xff; 6]
    }

    /// Turns it into the header of the answer: the destination becomes the old source, the source becomes `mac`.
    #[inline]
    pub fn turn(&mut self, mac: Mac) {
        self.destination = self.source;
        self.source = mac.0;
    }
}
