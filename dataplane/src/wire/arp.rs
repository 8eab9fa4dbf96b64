//! The ARP packet for IPv4 over Ethernet (RFC 826). Who answers it is decided in the module that answers ARP.

use super::ether_type;
use zerocopy::network_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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
