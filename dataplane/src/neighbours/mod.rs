//! Neighbours on a link: ARP and neighbour discovery, announcements of VIPs, the leases of VIPs that gateways elect
//! owners of, and the packets that wait until a neighbour is resolved.
//!
//! Not here: the decision to answer a question (`forward::execution::answers`), and the neighbours that Linux has resolved
//! (`snapshot`).

mod announcements;
mod arp_ndp;
mod neighbour_queue;
mod vip_ownership;
mod worker_neighbours;

pub(crate) use announcements::Announcements;
pub use arp_ndp::{
    announcement, arp_claim, arp_probe, arp_question, arp_reply, neighbour_advertisement, neighbour_asker, neighbour_claim,
    neighbour_question, probe, solicitation,
};
pub(crate) use neighbour_queue::QueuedPacket;
pub use neighbour_queue::{NeighbourRequest, UnresolvedNeighbour};
pub(crate) use vip_ownership::Permission;
pub use vip_ownership::{GroupsClaimed, LEASE_INTERVALS, VipClaim, VipOwnership};
pub(crate) use worker_neighbours::WorkerNeighbours;
