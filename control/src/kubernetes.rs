//! The Kubernetes source: Services, EndpointSlices and Nodes are followed by watches, and `services/status` is written back.
//!
//! **Invariant.** Trouble with the API server is said once per cause and never withdraws anything: what was last heard
//! stays in force until the server says otherwise.
//!
//! Deliberately not here: what an object means (`spec`), what is written and when (`plan`, `status`), and who may lead
//! (`lease`).

mod client;
mod edge_gateways;
mod election;
mod events;
mod follow;
mod outage;
mod pools;
mod release;
mod secret;
mod status;
mod writer;

pub use client::{Cluster, ConnectError, connect, instance};
pub use edge_gateways::show_gateways;
pub use election::elect;
pub use events::{EventWriter, REPEATED_AFTER};
pub use follow::follow;
pub use outage::{Outage, Trouble};
pub use pools::{PoolsTold, write_pools};
pub use release::{Extent, ReleaseError, delete_gateways, nobody_leads, release};
pub use secret::FollowedSecret;
pub use status::{Outcome, StatusError, patch};
pub use writer::StatusWriter;
