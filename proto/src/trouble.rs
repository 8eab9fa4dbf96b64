//! Troubles: what is not as it should be with a gateway or a group of gateways, as one pure function of what they show.
//!
//! Invariant: [`find`] looks at nothing but its argument, so that `sluicectl status`, the status page and the metrics of a
//! gateway agree. The worst comes first, and the number of troubles is bounded.
//! Not here: who looks, and when (`sluiced`, `control`), and since when a trouble lasts ([`Memory`] alone knows that).

mod gateway;
mod group;
mod kind;
mod memory;
mod services;

use std::collections::BTreeMap;

use crate::v1;

pub use kind::{Facts, Kind, Severity};
pub use memory::Memory;

/// Maximum number of troubles of one kind; the others are one line. A node that fails may concern every Service.
const OF_A_KIND_MAX: usize = 50;

/// A trouble.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Its kind.
    pub kind: Kind,
    /// What it is about: "Service default/web".
    pub object: String,
    /// What was found.
    pub cause: String,
    /// Since when it lasts, seconds since 1970.
    pub since_s: u64,
}

impl Trouble {
    /// A gateway that has just started.
    #[must_use]
    pub fn starting(gateway: &str, now_s: u64) -> Self {
        let (object, cause) = (format!("Gateway {gateway}"), "it starts".to_owned());
        Self { kind: Kind::NotReady, object, cause, since_s: now_s }
    }
}

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
    /// Connected and disconnected gateways.
    pub gateways: Vec<v1::GatewayStatus>,
    /// Gateways that gave no answer, and why.
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

/// Collects troubles.
#[derive(Debug)]
struct Findings {
    now_s: u64,
    found: Vec<Trouble>,
}

impl Findings {
    fn add(&mut self, kind: Kind, object: impl Into<String>, cause: impl Into<String>) {
        self.add_since(self.now_s, kind, object, cause);
    }

    fn add_since(&mut self, since_s: u64, kind: Kind, object: impl Into<String>, cause: impl Into<String>) {
        self.found.push(Trouble { kind, object: object.into(), cause: cause.into(), since_s });
    }
}

/// All troubles, the worst first, then by object.
#[must_use]
pub fn find(observed: &Observed) -> Vec<Trouble> {
    let mut findings = Findings { now_s: observed.now_s, found: Vec::new() };
    if let Some(of_gateway) = &observed.gateway {
        gateway::look(of_gateway, &mut findings);
    }
    gateway::look_at_certificates(&observed.certificates, &mut findings);
    services::look(&observed.services, &observed.unhealthy, &mut findings);
    for (backend, turns) in &observed.flapping {
        findings.add(
            Kind::BackendFlaps,
            format!("Backend {backend}"),
            format!("its health changed {turns} times within 10 minutes"),
        );
    }
    if let Some(of_group) = &observed.group {
        group::look(of_group, &mut findings);
    }
    let mut found = findings.found;
    found.sort_by(|one, other| order(one).cmp(&order(other)));
    bounded(found, observed.now_s)
}

/// The worst first. Kinds are declared in the order of what they do to clients.
fn order(trouble: &Trouble) -> (Severity, Kind, &str) {
    (trouble.kind.facts().severity, trouble.kind, &trouble.object)
}

/// At most [`OF_A_KIND_MAX`] of a kind, with the number of the others.
fn bounded(found: Vec<Trouble>, now_s: u64) -> Vec<Trouble> {
    let mut all = Vec::with_capacity(found.len());
    for of_kind in found.chunk_by(|one, other| one.kind == other.kind) {
        all.extend(of_kind.iter().take(OF_A_KIND_MAX).cloned());
        if of_kind.len() > OF_A_KIND_MAX {
            let others = of_kind.len() - OF_A_KIND_MAX;
            let (kind, object) = (of_kind[0].kind, format!("{others} others"));
            all.push(Trouble { kind, object, cause: "as those above".to_owned(), since_s: now_s });
        }
    }
    all
}

#[cfg(test)]
mod tests;
