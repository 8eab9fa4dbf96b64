//! Health of backends, as the compile loop takes it from probes.
//!
//! Not here: the probes and their results (`health`), and what workers do with a failing backend (`dataplane`).

use std::net::SocketAddr;
use std::sync::Arc;

use imbl::HashSet;
use proto::{Protocol, ServiceName};

/// A backend of a service, whose health probes determine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// The service.
    pub service: Arc<ServiceName>,
    /// Protocol of the frontend.
    pub protocol: Protocol,
    /// The backend.
    pub address: SocketAddr,
}

/// Health of backends; a copy costs nothing. A backend in neither set is usable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Backends with at least one failing target.
    pub failing: HashSet<Subject>,
    /// Backends whose targets have all passed a probe, where that counts: in a state from disk, and in services whose
    /// backends are unhealthy at first.
    pub proven: HashSet<Subject>,
}

/// Why a backend fails: the target, and what its last failed probe found.
pub type Causes = imbl::HashMap<Subject, Arc<str>>;
