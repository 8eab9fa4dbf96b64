//! Several workers: which worker owns a flow (steering), whether network cards steer alike, and the hand-over of
//! packets. Each worker's outputs are here too.
//!
//! Not here: the forwarding of a packet.

mod egress;
mod fragmented_flows;
mod handover;
mod id;
mod identification_blocks;
mod rss_proof;
mod steering;
mod steering_table;

pub(crate) use egress::{Egress, EgressPort};
pub(crate) use handover::{HandoverTask, PACKETS_PER_TURN};
pub use handover::{Inboxes, Peers, PortQueues};
pub use id::{WORKERS_MAX, WorkerId};
pub(crate) use identification_blocks::{IDENTIFICATION_COUNTERS, IdentificationBlocks};
pub(crate) use rss_proof::Observer;
pub use rss_proof::{Proof, Refuted, RssKind, RssProof};
pub use steering::Steering;
pub use steering_table::PacketTarget;
pub(crate) use steering_table::SteeringTable;
