//! Probes: which targets there are, when each is probed, and what the results say. It runs in the gateway, whose own
//! tables are all that a result changes (CONTROL section 2).
//!
//! Invariant: one probe per distinct target, however many services share it, and never more at once than file
//! descriptors allow. The targets, the schedule and the health are plain values with time as an argument; only
//! [`run`] waits, and only a [`Prober`] touches the network.
//! Deliberately not here: what happens when all backends of a service fail (the tables' compiler decides), and how a
//! probe to a VIP reaches the one backend that it is for (the engine sends it there).

mod node_health;
mod prober;
mod schedule;
mod tags;
mod target;
mod task;
mod tracker;

pub use prober::{NetworkProber, concurrency};
pub use target::{Check, Subject, Targets, targets};
pub use task::{Findings, run};
pub use tracker::{Health, HealthTracker};

use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// What is asked, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// A TCP connection.
    Tcp(SocketAddr),
    /// What kube-proxy says there: `GET /healthz` is answered by 200.
    NodeHealth(SocketAddr),
    /// A TCP connection to a VIP that this backend must take, as it takes those of clients.
    Vip {
        /// The frontend.
        vip: SocketAddr,
        /// The backend that is asked.
        backend: IpAddr,
    },
}

impl Target {
    /// The backend that the source port must stand for.
    #[must_use]
    pub const fn tagged(self) -> Option<IpAddr> {
        match self {
            Self::Vip { backend, .. } => Some(backend),
            Self::Tcp(_) | Self::NodeHealth(_) => None,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::NodeHealth(address) => write!(f, "http://{address}/healthz"),
            Self::Vip { vip, backend } => write!(f, "{vip} at {backend}"),
        }
    }
}

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
    /// Probes `target` from `source_port`, or from any, for `timeout` at most.
    fn probe(&self, target: Target, source_port: Option<u16>, timeout: Duration) -> impl Future<Output = Outcome> + Send;
}
