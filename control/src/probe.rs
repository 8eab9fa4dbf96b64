//! Probes: which targets there are, when each is probed, and what the results say. It runs in the gateway, whose own
//! tables are all that a result changes (CONTROL section 2).
//!
//! Invariant: one probe per distinct target, however many services share it, and never more at once than file
//! descriptors allow. The targets, the schedule and the health are plain values with time as an argument; only
//! [`run`] waits, and only a [`Prober`] touches the network.
//! Deliberately not here: what happens when all backends of a service fail (the tables' compiler decides), and probes
//! other than TCP connections.

mod schedule;
mod target;
mod task;
mod tcp;
mod tracker;

pub use target::{Backends, Check, Targets, targets};
pub use task::run;
pub use tcp::{TcpProber, concurrency};
pub use tracker::{Health, HealthTracker};

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

/// What a probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The target answers.
    Passed,
    /// The target does not answer; why, for the log.
    Failed(String),
    /// This machine could not ask; says nothing of the target.
    NotAsked(String),
}

/// Asks one target, once.
pub trait Prober {
    /// Probes `target`, for `timeout` at most.
    fn probe(&self, target: SocketAddr, timeout: Duration) -> impl Future<Output = Outcome> + Send;
}
