//! Health probes: targets, schedule and results. Each gateway probes for itself, and results change only its own tables
//! (CONTROL section 2).
//!
//! Invariant: each distinct target is probed once, however many services share it, and concurrent probes are limited by
//! file descriptors. Targets, schedule and health are plain values with time as an argument; only [`run`] waits, and
//! only a [`probe`] uses the network. Deliberately not here: the case that all backends of a service fail (the compiler
//! decides), and how a probe to a VIP reaches its backend (the engine sends it there).

mod prober;
mod schedule;
mod source_ports;
mod target;
mod task;
mod tracker;

pub use prober::{concurrency, probe};
pub use target::{Check, Subject, Targets, targets};
pub use task::{Findings, run};
pub use tracker::{Health, HealthTracker};

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// Kind and address of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// A TCP connection.
    Tcp(SocketAddr),
    /// kube-proxy's health check: `GET /healthz` must return 200.
    NodeHealth(SocketAddr),
    /// A TCP connection to a VIP, which this backend must accept like those of clients.
    Vip {
        /// The frontend.
        vip: SocketAddr,
        /// The probed backend.
        backend: IpAddr,
    },
}

impl Target {
    /// The backend that the source port must identify.
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

/// Result of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The target answers.
    Passed,
    /// The target does not answer; the text for the log says why.
    Failed(String),
    /// This machine could not probe; the health of the target is unknown.
    NotAsked(String),
}
