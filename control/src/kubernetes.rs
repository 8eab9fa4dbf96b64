//! The Kubernetes API: watches Services, EndpointSlices and Nodes, and writes `services/status`.
//!
//! Invariant: an API server error is logged once per cause and never withdraws anything. The last known objects stay in
//! force until the server changes them.
//! Deliberately not here: parsing objects (`objects`), and what is written and when (`plan`, `status`).

use kube::api::{PatchParams, PostParams};
use proto::limits::FIELD_MANAGER;

mod backoff;
mod client;
mod events;
mod fair_queue;
pub mod lease;
pub(crate) mod outage;
mod rate_limit;
pub mod recorder;
mod status_patch;
mod status_writer;
mod watch;

pub use client::{Cluster, ConnectError, connect, instance};
pub use events::{EventWriter, REPEATED_AFTER};
pub use outage::{Outage, Trouble};
pub use status_patch::{Outcome, StatusError, patch};
pub use status_writer::StatusWriter;
pub use watch::follow;

/// Parameters of create and replace requests, with our field manager.
pub(crate) fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// As [`post_params`], for patches.
pub(crate) fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}
