//! What troubles are found in: messages as the admin API tells them, and what has grown between two looks.

use std::collections::BTreeMap;

use crate::v1;

/// The certificates of a key of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedCertificate {
    /// The key.
    pub key: String,
    /// Until when they are valid, seconds since 1970; `None`: they cannot be read.
    pub until_s: Option<i64>,
}

/// What the last reload of the configuration has left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReloadOutcome {
    /// Why nothing was taken over; empty: the file was valid.
    pub failure: String,
    /// Keys that differ and need a restart.
    pub at_next_start: Vec<String>,
}

/// What has grown within the last minutes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recent {
    /// The time in seconds; 0 if nothing is known yet.
    pub seconds: u64,
    /// Dropped packets by reason.
    pub drops: BTreeMap<String, u64>,
    /// Packets that ports lost because a receive queue was full, by port.
    pub missed: BTreeMap<String, u64>,
    /// Failures of tasks, by task.
    pub failures: BTreeMap<String, u64>,
    /// How often the gateway gave up its VIPs because it was stopped or overloaded.
    pub election_restarts: u64,
    /// Busy time of each worker, in percent.
    pub busy_percent: Vec<u64>,
}

/// What a gateway shows of itself.
#[derive(Clone, Debug, Default)]
pub struct ObservedGateway {
    /// Its state and its workers.
    pub status: v1::GetStatusResponse,
    /// Its ports.
    pub ports: Vec<v1::PortStatus>,
    /// Its part in the fleet.
    pub fleet: v1::GatewayStatus,
    /// Places for targets that are held, of so many; 0 of 0: not known.
    pub targets_held: u64,
    /// Places for targets.
    pub targets_limit: u64,
    /// The last reload.
    pub reload: ReloadOutcome,
    /// What has grown.
    pub recent: Recent,
}

/// What the leader of a group of gateways knows.
#[derive(Clone, Debug, Default)]
pub struct ObservedGroup {
    /// Why not all is known yet; `None`: all objects are read, and gateways had time to connect.
    pub starting: Option<String>,
    /// Connected and disconnected gateways.
    pub gateways: Vec<v1::GatewayStatus>,
    /// Gateways that cannot be asked, and why.
    pub silent: Vec<v1::Silent>,
    /// VIPs.
    pub vips: Vec<v1::VipStatus>,
    /// Pools.
    pub pools: Vec<v1::PoolStatus>,
    /// Counter of the generation that gateways should have by now; `None`: not known.
    pub newest: Option<u64>,
}

/// What troubles are found in. What is not known is empty.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Now, seconds since 1970.
    pub now_s: u64,
    /// A gateway.
    pub gateway: Option<ObservedGateway>,
    /// Services as a gateway serves them.
    pub services: Vec<v1::ServiceStatus>,
    /// Their unhealthy backends.
    pub unhealthy: Vec<v1::BackendStatus>,
    /// Backends that changed often between healthy and unhealthy, as `tcp 10.0.0.1:80 of default/web`, and how often.
    pub flapping: BTreeMap<String, usize>,
    /// Certificates.
    pub certificates: Vec<ObservedCertificate>,
    /// The group.
    pub group: Option<ObservedGroup>,
}
