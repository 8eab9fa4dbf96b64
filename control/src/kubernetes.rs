//! The Kubernetes source: Services, EndpointSlices and Nodes are followed by watches, and `services/status` is written back.
//!
//! **Invariant.** Trouble with the API server is said once per cause and never withdraws anything: what was last heard
//! stays in force until the server says otherwise.
//!
//! Deliberately not here: what an object means (`spec`), what is written and when (`plan`, `status`), and who may lead
//! (`lease`).

use kube::api::{PatchParams, PostParams};
use proto::limits::FIELD_MANAGER;

mod client;
mod edge_gateways;
mod election;
mod events;
mod follow;
mod held;
mod outage;
mod pace;
mod pools;
mod release;
mod secret;
mod status;
mod turns;
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

/// Every object that we create or replace says that it was us.
pub(crate) fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// As [`post_params`], for patches.
pub(crate) fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}
