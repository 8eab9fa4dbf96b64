//! TODO: docs.

mod egress;
mod handover;
mod port_share;
mod port_spread;
mod rss_proof;
mod steering;
mod steering_table;
mod toeplitz;

pub(crate) use egress::{Lane, Lanes};
pub(crate) use handover::{Errand, PACKETS_PER_TURN};
pub use handover::{Handed, Peers, PortQueues};
pub use port_share::PortShare;
pub(crate) use rss_proof::Observer;
pub use rss_proof::{Proof, Refuted, RssProof};
pub use steering::{RETA_ENTRIES, Steering, WORKERS_MAX, WorkerId};
pub(crate) use steering_table::SteeringTable;
pub use steering_table::Towards;
pub use toeplitz::{KEY_BYTES, RssKey, Toeplitz};
