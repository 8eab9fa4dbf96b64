//! Ethernet addresses, the Ethernet II header (IEEE 802.3 clause 3), and the ARP packet for IPv4 over Ethernet (RFC
//! 826).
//!
//! Not here: answers to ARP (`neighbours`).

use std::fmt;

use zerocopy::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::buffer::take_mut;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

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

    /// Sets both addresses.
    #[inline(always)]
    pub(crate) fn set_addresses(&mut self, source: Mac, destination: Mac) {
        self.destination = destination.0;
        self.source = source.0;
    }

    /// Turns it into the header of the answer: the destination becomes the old source, the source becomes `mac`.
    #[inline]
    pub fn turn(&mut self, mac: Mac) {
        self.destination = self.source;
        self.source = mac.0;
    }
}

/// An ARP packet with Ethernet hardware addresses and IPv4 protocol addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Arp {
    /// 1 for Ethernet.
    pub hardware_type: U16,
    /// The EtherType of the protocol.
    pub protocol_type: U16,
    /// Bytes of a hardware address.
    pub hardware_len: u8,
    /// Bytes of a protocol address.
    pub protocol_len: u8,
    /// [`Arp::REQUEST`] or [`Arp::REPLY`].
    pub operation: U16,
    /// The sender's Ethernet address.
    pub sender_mac: [u8; 6],
    /// The sender's IPv4 address; 0 in a probe (RFC 5227).
    pub sender_address: U32,
    /// In a request, the Ethernet address that is sought (ignored). In a reply, the address of the requester.
    pub target_mac: [u8; 6],
    /// The IPv4 address asked for.
    pub target_address: U32,
}

impl Arp {
    /// Operation: request for the Ethernet address of the target address.
    pub const REQUEST: u16 = 1;
    /// Operation: the sender address belongs to the sender's Ethernet address.
    pub const REPLY: u16 = 2;

    /// Whether the address types and lengths are those of this view.
    #[must_use]
    pub fn is_ipv4_over_ethernet(&self) -> bool {
        self.hardware_type.get() == 1
            && self.protocol_type.get() == ether_type::IPV4
            && self.hardware_len == 6
            && self.protocol_len == 4
    }
}

/// Turns the Ethernet header around, from `mac`, and returns the bytes after it.
pub(crate) fn turn_link(frame: &mut [u8], mac: Mac) -> Option<&mut [u8]> {
    let (ethernet, packet) = take_mut::<Ethernet>(frame)?;
    ethernet.turn(mac);
    Some(packet)
}
