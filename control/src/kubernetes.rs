//! The Kubernetes API: watches Services, EndpointSlices and Nodes, and writes `services/status`.
//!
//! Invariant: an API server error is logged once per cause and never withdraws anything. The last known objects stay in
//! force until the server changes them.
//! Deliberately not here: parsing objects (`objects`), and what is written and when (`plan`, `status`).

pub mod activity;
pub(crate) mod api_error;
mod backoff;
mod client;
mod events;
mod fair_queue;
pub mod lease;
mod rate_limit;
pub mod recorder;
mod status_patch;
mod status_writer;
mod watch;

pub use api_error::{ApiError, Retry};
pub use client::{Cluster, ConnectError, connect, instance};
pub(crate) use client::{patch_params, post_params};
pub use events::{EventWriter, REPEATED_AFTER};
pub(crate) use rate_limit::RateLimit;
pub use status_patch::{PatchOutcome, StatusError, patch};
pub use status_writer::StatusWriter;
pub use watch::{Following, WatchedGateways, follow};
