//! Which targets a state asks to probe. A target is what is asked and where; services that ask the same share it.
//!
//! A backend may depend on several targets: services that disagree on the port, or a probe beside what kube-proxy says of
//! a node. It fails while any of them fails. What a probe through a VIP or kube-proxy's word finds holds for that service
//! alone: the same node may well serve another one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use proto::{Backend, BackendState, Family, HealthCheck, Probe, Protocol, Service, ServiceName, ServicePort, State};

use super::Target;

/// A backend that a target speaks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// The one service that it is said of; none: every service that has the backend.
    pub service: Option<Arc<ServiceName>>,
    /// Of the frontend.
    pub protocol: Protocol,
    /// The backend.
    pub address: SocketAddr,
}

/// All targets of a state.
pub type Targets = BTreeMap<Target, Check>;

/// How a target is probed, and for whom. Services that share it and differ get the strictest of their settings: the
/// smallest interval, timeout and `fall`, the largest `rise`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Time between the starts of two probes.
    pub interval: Duration,
    /// Timeout of a probe.
    pub timeout: Duration,
    /// Passed probes in a row that end a failure.
    pub rise: u32,
    /// Failed probes in a row that make one.
    pub fall: u32,
    /// The backends that fail with it.
    pub subjects: BTreeSet<Subject>,
}

impl Check {
    pub(super) fn new(health: &HealthCheck) -> Self {
        Self {
            interval: health.interval,
            timeout: health.timeout,
            rise: health.rise,
            fall: health.fall,
            subjects: BTreeSet::new(),
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
        let name = Arc::new(service.name.clone());
        for port in service.ports.iter().filter(|port| listens(port, node_port_addresses)) {
            for backend in port.all_backends().filter(|b| b.state == BackendState::Active) {
                for target in asked(service, port, &backend) {
                    let is_shared = matches!(target, Target::Tcp(_));
                    let check = targets.entry(target).or_insert_with(|| Check::new(&service.health));
                    check.tighten(&service.health);
                    check.subjects.insert(Subject {
                        service: (!is_shared).then(|| Arc::clone(&name)),
                        protocol: port.protocol,
                        address: backend.address,
                    });
                }
            }
        }
    }
    targets
}

/// What is asked about one backend of a port.
fn asked(service: &Service, port: &ServicePort, backend: &Backend) -> impl Iterator<Item = Target> {
    let (health, ip) = (&service.health, backend.address.ip());
    // Only a TCP frontend's own port says something about it; UDP and SCTP need a health check port.
    let probe = match (health.probe, health.port) {
        (Probe::None, _) => None,
        (Probe::Tcp, Some(number)) => Some(Target::Tcp(SocketAddr::new(ip, number))),
        (Probe::Tcp, None) if port.protocol != Protocol::Tcp => None,
        (Probe::Tcp, None) if service.mode.is_two_way() => Some(Target::Tcp(backend.address)),
        // The backend takes what is for the VIP, and may have nothing to say at an address of its own.
        (Probe::Tcp, None) => port.vips.first().map(|vip| Target::Vip { vip: SocketAddr::new(*vip, port.port), backend: ip }),
    };
    let node_health = health.node_health_port.map(|number| Target::NodeHealth(SocketAddr::new(ip, number)));
    probe.into_iter().chain(node_health)
}

fn listens(port: &ServicePort, node_port_addresses: &[IpAddr]) -> bool {
    let serves_node_ports = || node_port_addresses.iter().any(|&address| Family::of(address) == port.family);
    !port.vips.is_empty() || (port.node_port.is_some() && serves_node_ports())
}

#[cfg(test)]
pub(super) mod tests {
    use proto::{MaglevSpec, Mode};

    use super::*;

    pub(crate) fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    pub(crate) fn tcp(text: &str) -> Target {
        Target::Tcp(address(text))
    }

    pub(crate) fn subject(service: Option<&str>, protocol: Protocol, text: &str) -> Subject {
        let service = service.map(|name| Arc::new(ServiceName::new("default", name)));
        Subject { service, protocol, address: address(text) }
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
                    zones: Vec::new(),
                    app_protocol: None,
                    nodes: None,
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
        let shared = &targets[&tcp("10.0.0.1:80")];
        assert_eq!((shared.interval, shared.rise, shared.fall), (Duration::from_secs(1), 2, 1));
        assert_eq!(shared.subjects.len(), 1);
    }

    #[test]
    fn udp_is_probed_only_at_a_health_check_port() {
        let plain = service("dns", Protocol::Udp, &["10.0.0.1:53"], HealthCheck::default());
        assert!(targets(&state(vec![plain]), &[]).is_empty());
        let port = HealthCheck { port: Some(8080), ..HealthCheck::default() };
        let probed = targets(&state(vec![service("dns", Protocol::Udp, &["10.0.0.1:53"], port)]), &[]);
        assert_eq!(probed[&tcp("10.0.0.1:8080")].subjects, [subject(None, Protocol::Udp, "10.0.0.1:53")].into());
    }

    #[test]
    fn nobody_asks_without_a_probe_or_for_a_draining_backend() {
        let none = HealthCheck { probe: Probe::None, ..HealthCheck::default() };
        let mut draining = service("b", Protocol::Tcp, &["10.0.0.2:80"], HealthCheck::default());
        draining.ports[0].backends[0].state = BackendState::Draining;
        assert!(targets(&state(vec![service("a", Protocol::Tcp, &["10.0.0.1:80"], none), draining]), &[]).is_empty());
    }

    #[test]
    fn a_mode_that_changes_no_address_is_probed_through_its_vip_for_itself_alone() {
        let at = |name: &str, mode: Mode, health| {
            let mut service = service(name, Protocol::Tcp, &["10.0.0.1:80"], health);
            service.mode = mode;
            targets(&state(vec![service]), &[])
        };
        let vip = Target::Vip { vip: address("192.0.2.100:80"), backend: "10.0.0.1".parse().unwrap() };
        for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
            let targets = at("web", mode, HealthCheck::default());
            assert_eq!(targets.keys().collect::<Vec<_>>(), [&vip], "{mode}");
            assert_eq!(targets[&vip].subjects, [subject(Some("web"), Protocol::Tcp, "10.0.0.1:80")].into());
            let at_port = at("web", mode, HealthCheck { port: Some(9000), ..HealthCheck::default() });
            assert_eq!(at_port.keys().collect::<Vec<_>>(), [&tcp("10.0.0.1:9000")], "a port of the backend's own");
        }
        for mode in [Mode::Nat, Mode::Dnat] {
            assert!(at("web", mode, HealthCheck::default()).contains_key(&tcp("10.0.0.1:80")), "{mode}");
        }
    }

    #[test]
    fn kube_proxys_word_on_a_node_is_asked_for_beside_the_probe_and_without_one() {
        let word = Target::NodeHealth(address("10.0.0.1:31000"));
        let health = HealthCheck { node_health_port: Some(31_000), ..HealthCheck::default() };
        let both = targets(&state(vec![service("web", Protocol::Tcp, &["10.0.0.1:30080"], health.clone())]), &[]);
        assert_eq!(both.keys().collect::<Vec<_>>(), [&tcp("10.0.0.1:30080"), &word]);
        assert_eq!(both[&word].subjects, [subject(Some("web"), Protocol::Tcp, "10.0.0.1:30080")].into());
        let none = HealthCheck { probe: Probe::None, ..health };
        let alone = targets(&state(vec![service("dns", Protocol::Udp, &["10.0.0.1:30053"], none)]), &[]);
        assert_eq!(alone.keys().collect::<Vec<_>>(), [&word]);
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
