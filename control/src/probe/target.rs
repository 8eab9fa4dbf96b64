//! Which targets a state asks to probe. A target is where a TCP connection is tried; its key is the address alone, since
//! TCP connections are the one kind of probe.
//!
//! Backends share targets (services with the same backends, or with one health check port), and a backend may depend on
//! several targets (services that disagree on the port): it fails while any of them fails.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use proto::{BackendState, Family, HealthCheck, Probe, Protocol, Service, ServicePort, State};

/// The backends that a target speaks for.
pub type Backends = BTreeSet<(Protocol, SocketAddr)>;

/// All targets of a state.
pub type Targets = BTreeMap<SocketAddr, Check>;

/// How a target is probed, and for whom. Services that share it and differ get the strictest of their settings: the
/// smallest interval, timeout and `fall`, the largest `rise`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Time between the starts of two probes.
    pub interval: Duration,
    /// A probe that takes longer has failed.
    pub timeout: Duration,
    /// Passed probes in a row that end a failure.
    pub rise: u32,
    /// Failed probes in a row that make one.
    pub fall: u32,
    /// The backends that fail with it.
    pub backends: Backends,
}

impl Check {
    fn new(health: &HealthCheck) -> Self {
        Self {
            interval: health.interval,
            timeout: health.timeout,
            rise: health.rise,
            fall: health.fall,
            backends: Backends::new(),
        }
    }

    fn tighten(&mut self, health: &HealthCheck) {
        self.interval = self.interval.min(health.interval);
        self.timeout = self.timeout.min(health.timeout);
        self.rise = self.rise.max(health.rise);
        self.fall = self.fall.min(health.fall);
    }
}

/// The targets of `state`, for a gateway that serves node ports on `node_port_addresses`. Draining backends take no new
/// flows, and a port that listens nowhere takes none at all, so nobody asks how those are.
#[must_use]
pub fn targets(state: &State, node_port_addresses: &[IpAddr]) -> Targets {
    let mut targets = Targets::new();
    for service in state.services.values() {
        for port in service.ports.iter().filter(|port| is_probed(service, port) && listens(port, node_port_addresses)) {
            for backend in port.backends.iter().filter(|b| b.state == BackendState::Active) {
                let probe_port = service.health.port.unwrap_or(backend.address.port());
                let target = SocketAddr::new(backend.address.ip(), probe_port);
                let check = targets.entry(target).or_insert_with(|| Check::new(&service.health));
                check.tighten(&service.health);
                check.backends.insert((port.protocol, backend.address));
            }
        }
    }
    targets
}

/// Only a TCP frontend's own port says something about it; UDP and SCTP need a health check port.
fn is_probed(service: &Service, port: &ServicePort) -> bool {
    service.health.probe == Probe::Tcp && (port.protocol == Protocol::Tcp || service.health.port.is_some())
}

fn listens(port: &ServicePort, node_port_addresses: &[IpAddr]) -> bool {
    let serves_node_ports = || node_port_addresses.iter().any(|&address| Family::of(address) == port.family);
    !port.vips.is_empty() || (port.node_port.is_some() && serves_node_ports())
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use proto::{Backend, MaglevSpec, ServiceName};

    use super::*;

    pub(crate) fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    pub(crate) fn service(name: &str, protocol: Protocol, backends: &[&str], health: HealthCheck) -> Service {
        let backend = |text: &&str| Backend { address: address(text), weight: 1, state: BackendState::Active };
        Service {
            health,
            ..Service::new(
                ServiceName::new("default", name),
                vec![ServicePort {
                    name: String::new(),
                    protocol,
                    family: Family::V4,
                    vips: vec!["192.0.2.100".parse().unwrap()],
                    port: 80,
                    node_port: None,
                    maglev: MaglevSpec { size: 251, seed: 0, hash_version: 1 },
                    backends: backends.iter().map(backend).collect(),
                }],
            )
        }
    }

    pub(crate) fn state(services: Vec<Service>) -> State {
        let services = services.into_iter().map(|s| (s.name.clone(), Arc::new(s))).collect();
        State { services, ..State::default() }
    }

    #[test]
    fn services_share_a_target_under_the_strictest_settings() {
        let slow = HealthCheck { interval: Duration::from_secs(9), fall: 1, rise: 1, ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &["10.0.0.1:80", "10.0.0.2:80"], HealthCheck::default());
        let also = service("also", Protocol::Tcp, &["10.0.0.1:80"], slow);
        let targets = targets(&state(vec![web, also]), &[]);
        assert_eq!(targets.len(), 2);
        let shared = &targets[&address("10.0.0.1:80")];
        assert_eq!((shared.interval, shared.rise, shared.fall), (Duration::from_secs(1), 2, 1));
        assert_eq!(shared.backends.len(), 1);
    }

    #[test]
    fn udp_is_probed_only_at_a_health_check_port() {
        let plain = service("dns", Protocol::Udp, &["10.0.0.1:53"], HealthCheck::default());
        assert!(targets(&state(vec![plain]), &[]).is_empty());
        let port = HealthCheck { port: Some(8080), ..HealthCheck::default() };
        let probed = targets(&state(vec![service("dns", Protocol::Udp, &["10.0.0.1:53"], port)]), &[]);
        assert_eq!(probed[&address("10.0.0.1:8080")].backends, Backends::from([(Protocol::Udp, address("10.0.0.1:53"))]));
    }

    #[test]
    fn nobody_asks_without_a_probe_or_for_a_draining_backend() {
        let none = HealthCheck { probe: Probe::None, ..HealthCheck::default() };
        let mut draining = service("b", Protocol::Tcp, &["10.0.0.2:80"], HealthCheck::default());
        draining.ports[0].backends[0].state = BackendState::Draining;
        assert!(targets(&state(vec![service("a", Protocol::Tcp, &["10.0.0.1:80"], none), draining]), &[]).is_empty());
    }

    #[test]
    fn a_node_port_is_probed_only_where_the_gateway_serves_its_family() {
        let mut web = service("web", Protocol::Tcp, &["10.0.0.1:80"], HealthCheck::default());
        (web.ports[0].vips, web.ports[0].node_port) = (Vec::new(), Some(30_080));
        let state = state(vec![web]);
        let probed = |addresses: &[&str]| {
            let addresses: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
            targets(&state, &addresses).len()
        };
        assert_eq!([probed(&[]), probed(&["2001:db8::2"]), probed(&["192.0.2.2"])], [0, 0, 1]);
    }
}
