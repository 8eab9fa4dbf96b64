//! A copy of the published snapshot's data for the admin API and reports, so that readers do not keep a snapshot alive.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use dataplane::Snapshot;
use dataplane::snapshot::{RemovedBackends, ServiceView, TargetUse, Views};
use ipnet::IpNet;
use proto::Protocol;

/// The part of a snapshot that operators see.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// Whether it was compiled from a complete state, live or persisted.
    pub ready: bool,
    /// The services, by name.
    pub services: Views,
    /// Backends with flows that continue although their Service no longer lists them.
    pub removed: RemovedBackends,
    /// How much of the room for backends and their targets is held.
    pub target_use: TargetUse,
    /// The networks in which it can answer ARP and NDP.
    pub prefixes: Arc<[IpNet]>,
}

impl From<&Snapshot> for Served {
    fn from(snapshot: &Snapshot) -> Self {
        Self {
            ready: snapshot.ready(),
            services: snapshot.services().clone(),
            removed: snapshot.removed().clone(),
            target_use: snapshot.target_use(),
            prefixes: Arc::clone(snapshot.prefixes()),
        }
    }
}

impl Served {
    /// The addresses of frontends with a backend that takes new flows. With `health.failOpen` backends that all fail do.
    #[must_use]
    pub fn usable_frontends(&self) -> BTreeSet<IpAddr> {
        let ports = self.services.values().flat_map(|service| &service.ports);
        let usable = ports.filter(|port| port.backends.iter().any(|backend| backend.accepts_new));
        usable.flat_map(|port| &port.frontends).map(SocketAddr::ip).collect()
    }

    /// The addresses of frontends with a backend that fails its probes, those that drain left out.
    #[must_use]
    pub fn impaired_frontends(&self) -> BTreeSet<IpAddr> {
        let ports = self.services.values().flat_map(|service| &service.ports);
        let impaired = ports.filter(|port| port.backends.iter().any(|backend| !backend.healthy && !backend.draining));
        impaired.flat_map(|port| &port.frontends).map(SocketAddr::ip).collect()
    }
}

/// Number of backends of a service without draining ones; each counts once for each protocol, however many ports it
/// serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendCounts {
    /// All of them.
    pub backends: u32,
    /// Backends that are healthy on all their ports of a protocol.
    pub healthy: u32,
}

/// A backend over all ports of a service and protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendState {
    /// It drains on all of them.
    pub draining: bool,
    /// It is healthy on all of them.
    pub healthy: bool,
}

/// The backends of a service by protocol.
#[must_use]
pub fn backend_states(service: &ServiceView) -> BTreeMap<(Protocol, SocketAddr), BackendState> {
    let mut all = BTreeMap::new();
    let of_ports = service.ports.iter().flat_map(|port| port.backends.iter().map(move |backend| (port.protocol, backend)));
    for (protocol, backend) in of_ports {
        let state = all.entry((protocol, backend.address)).or_insert(BackendState { draining: true, healthy: true });
        state.draining &= backend.draining;
        state.healthy &= backend.healthy;
    }
    all
}

impl From<&ServiceView> for BackendCounts {
    fn from(service: &ServiceView) -> Self {
        let all = backend_states(service);
        let count = |is: fn(&BackendState) -> bool| u32::try_from(all.values().filter(|one| is(one)).count()).unwrap_or(u32::MAX);
        Self { backends: count(|one| !one.draining), healthy: count(|one| !one.draining && one.healthy) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use dataplane::ServiceNumber;
    use dataplane::flow::BackendId;
    use dataplane::snapshot::{BackendView, PortView};
    use proto::{Family, Mode, Scheduler, ServiceName, Target};

    use super::*;

    /// A Service of namespace `default` with one port, and backends that are healthy and draining.
    pub(crate) fn view(name: &str, backends: &[(&str, bool, bool)]) -> ServiceView {
        let backend = |(slot, (address, healthy, draining)): (u32, &(&str, bool, bool))| BackendView {
            address: address.parse().unwrap(),
            id: BackendId { slot, generation: 0 },
            weight: 1,
            healthy: *healthy,
            draining: *draining,
            accepts_new: *healthy && !*draining,
        };
        let backends = (0..).zip(backends).map(backend).collect();
        let port = PortView {
            protocol: Protocol::Tcp,
            family: Family::V4,
            frontends: Vec::new(),
            backends,
            app_protocol: None,
            proxy_protocol: None,
        };
        ServiceView {
            name: Arc::new(ServiceName::new("default", name)),
            mode: Mode::Nat,
            target: Target::Endpoint,
            scheduler: Scheduler::Maglev,
            refusal: None,
            ports: vec![port],
            not_served: Vec::new(),
            frontends: Vec::new(),
            drops: Arc::default(),
            number: ServiceNumber::default(),
        }
    }
}
