//! Link headers: Ethernet, ARP, and VLAN tags.

mod ethernet;
mod vlan;

pub(crate) use ethernet::turn_link;
pub use ethernet::{Arp, Ethernet, Mac, ether_type};
pub(crate) use vlan::{TAG_BYTES, Tags, behind};
pub use vlan::{TagKind, Vlan, VlanTag};
