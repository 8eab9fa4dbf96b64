//! Replication of flows to partners: who they are and what they have, as operators see it.
//!
//! Not here: which flows a worker tells, and what it makes of those of partners (`dataplane`).

use std::net::SocketAddr;
use std::time::Duration;

/// A partner as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartnerStatus {
    /// Its name, once it has told it.
    pub name: Option<String>,
    /// Where it is reached.
    pub address: SocketAddr,
    /// Whether it has all flows of this gateway, as far as this gateway knows.
    pub is_in_sync: bool,
    /// How old the oldest news is that it has not acknowledged; `None` while it is not reached.
    pub lag: Option<Duration>,
}

/// The replication of flows as operators see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicationStatus {
    /// The partners, ordered by address; none without replication.
    pub partners: Vec<PartnerStatus>,
    /// Shadow flows: flows of partners that this gateway keeps.
    pub shadow_flows: u64,
    /// Whether a partner that is reached has not sent all of its flows yet. The gateway takes no VIPs meanwhile.
    pub awaits_copies: bool,
}
