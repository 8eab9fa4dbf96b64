//! Views of protocol headers over the bytes of a frame, one protocol per file.
//!
//! **Invariant:** a view exists only over bytes that hold the whole header, so no access to it can fail. Fields are in
//! network byte order in the bytes and are read in host order. Not here: the meaning of values and the rejection of
//! invalid ones; `parse` and the modules that answer packets do both.

mod arp;
mod ethernet;
mod icmp;
mod ipv4;
mod ipv6;
mod ndp;
mod sctp;
mod tcp;
mod udp;
mod vlan;

pub use arp::Arp;
pub use ethernet::{Ethernet, ether_type};
pub use icmp::{Icmp, icmpv4, icmpv6};
pub use ipv4::Ipv4;
pub use ipv6::{Extension, FragmentHeader, Ipv6, RoutingHeader, next_header};
pub use ndp::{LinkLayerOption, NeighbourMessage, neighbour};
pub use sctp::{Chunk, Sctp};
pub use tcp::Tcp;
pub use udp::Udp;
pub use vlan::VlanTag;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// IP protocol numbers that the engine distinguishes (IPv4's protocol, IPv6's last next header).
pub mod protocol {
    /// ICMP for IPv4.
    pub const ICMP: u8 = 1;
    /// IPv4 inside IP (RFC 2003).
    pub const IPV4: u8 = 4;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// IPv6 inside IP (RFC 2473, RFC 4213).
    pub const IPV6: u8 = 41;
    /// ICMP for IPv6.
    pub const ICMPV6: u8 = 58;
    /// SCTP.
    pub const SCTP: u8 = 132;
}

/// The header at the start of `bytes` and the bytes after it; `None` when `bytes` is too short.
#[inline]
#[must_use]
pub fn take<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8]) -> Option<(&T, &[u8])> {
    T::ref_from_prefix(bytes).ok()
}

/// As [`take`], but mutable.
#[inline]
#[must_use]
pub fn take_mut<T: FromBytes + IntoBytes + KnownLayout + Unaligned>(bytes: &mut [u8]) -> Option<(&mut T, &mut [u8])> {
    T::mut_from_prefix(bytes).ok()
}
