//! Probe targets of a state. A target is an address and a question; services with equal ones share it.
//!
//! A backend may depend on several targets: services with different ports, or a probe and the answer of kube-proxy on
//! its node. It is unhealthy while any of them fails. A TCP connection to a backend's own address says the same to every
//! service. The result of any other question, and of a probe through a VIP, applies to the services that ask it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use imbl::ordmap::DiffItem;
use proto::{Backend, BackendState, Family, HealthCheck, Probe, Protocol, Service, ServiceName, ServicePort, Services};

use super::{GrpcQuestion, HttpQuestion, Question, Target, Trust};

/// A backend whose health a target determines.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Subject {
    /// The only service to which the result applies; `None` means every service with the backend.
    pub service: Option<Arc<ServiceName>>,
    /// Protocol of the frontend.
    pub protocol: Protocol,
    /// The backend.
    pub address: SocketAddr,
}

/// Settings and backends of a target. Services that share it use the strictest of their settings: the smallest
/// interval, timeout and `fall`, the largest `rise`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Time between the starts of two probes.
    pub interval: Duration,
    /// Timeout of a probe.
    pub timeout: Duration,
    /// Consecutive passed probes after which the target is healthy again.
    pub rise: u32,
    /// Consecutive failed probes after which the target is unhealthy.
    pub fall: u32,
    /// The backends that depend on it.
    pub subjects: BTreeSet<Subject>,
}

/// Targets that are new or have another check, and those that are gone.
pub type Changes = BTreeMap<Target, Option<Check>>;

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

    /// The strictest of several; `None` without any.
    fn strictest<'a>(checks: impl Iterator<Item = &'a Self>) -> Option<Self> {
        checks.cloned().reduce(|one, other| Self {
            interval: one.interval.min(other.interval),
            timeout: one.timeout.min(other.timeout),
            rise: one.rise.max(other.rise),
            fall: one.fall.min(other.fall),
            subjects: one.subjects.into_iter().chain(other.subjects).collect(),
        })
    }
}

/// The targets of a state, and the services that ask for each.
#[derive(Debug, Default)]
pub struct TargetTable {
    node_port_addresses: Vec<IpAddr>,
    services: Services,
    checks: HashMap<Target, BTreeMap<Arc<ServiceName>, Check>>,
}

impl TargetTable {
    /// An empty table, for a gateway that serves node ports on `node_port_addresses`.
    #[must_use]
    pub fn new(node_port_addresses: &[IpAddr]) -> Self {
        Self { node_port_addresses: node_port_addresses.to_vec(), ..Self::default() }
    }

    /// Replaces the services; returns what changes. Services that stay as they are cost nothing.
    pub fn follow(&mut self, services: &Services) -> Changes {
        let before = std::mem::replace(&mut self.services, services.clone());
        let mut touched = BTreeSet::new();
        for item in before.diff(services) {
            let (old, new) = match item {
                DiffItem::Add(_, new) => (None, Some(new)),
                DiffItem::Update { old: (_, old), new: (_, new) } => (Some(old), Some(new)),
                DiffItem::Remove(_, old) => (Some(old), None),
            };
            if let Some(service) = old {
                for (target, _) in self.asked_by(service) {
                    if let Some(checks) = self.checks.get_mut(&target) {
                        checks.remove(&service.name);
                    }
                    touched.insert(target);
                }
            }
            let Some(service) = new else { continue };
            let name = Arc::new(service.name.clone());
            for (target, subject) in self.asked_by(service) {
                let checks = self.checks.entry(target.clone()).or_default();
                checks.entry(Arc::clone(&name)).or_insert_with(|| Check::new(&service.health)).subjects.insert(subject);
                touched.insert(target);
            }
        }
        let changes = touched.into_iter().map(|target| {
            let check = self.checks.get(&target).and_then(|checks| Check::strictest(checks.values()));
            if check.is_none() {
                self.checks.remove(&target);
            }
            (target, check)
        });
        changes.collect()
    }

    /// Serves node ports on other addresses from now on; returns what changes. Targets that stay are among it.
    pub fn serve_node_ports_at(&mut self, addresses: &[IpAddr]) -> Changes {
        let services = self.services.clone();
        let mut changes = self.follow(&Services::new());
        self.node_port_addresses = addresses.to_vec();
        changes.extend(self.follow(&services));
        changes
    }

    /// The targets of a service with a backend of each. Draining backends, and backends of ports without frontends, are
    /// not probed, because they get no new flows.
    fn asked_by(&self, service: &Service) -> Vec<(Target, Subject)> {
        let name = Arc::new(service.name.clone());
        let question = Question::of(&service.health);
        let mut asked = Vec::new();
        for port in service.ports.iter().filter(|port| listens(port, &self.node_port_addresses)) {
            for backend in port.all_backends().filter(|backend| backend.state == BackendState::Active) {
                for target in targets(service, question.as_ref(), port, &backend) {
                    let is_of_all = target.question == Question::Tcp && target.behind_vip.is_none();
                    let service = (!is_of_all).then(|| Arc::clone(&name));
                    asked.push((target, Subject { service, protocol: port.protocol, address: backend.address }));
                }
            }
        }
        asked
    }
}

impl Question {
    /// The question of a health check; `None` if there is none.
    fn of(health: &HealthCheck) -> Option<Self> {
        let path = health.path.as_deref().unwrap_or_default();
        let http = |tls| {
            let path = format!("/{}", path.strip_prefix('/').unwrap_or(path));
            Self::Http(Arc::new(HttpQuestion { tls, path, host: health.host.clone(), status: health.status.clone() }))
        };
        match health.probe {
            Probe::None => None,
            Probe::Tcp => Some(Self::Tcp),
            Probe::Icmp => Some(Self::Icmp),
            Probe::Http => Some(http(None)),
            Probe::Https => Some(http(Some(if health.tls_verify { Trust::Machine } else { Trust::Any }))),
            Probe::Grpc => {
                let service = path.strip_prefix('/').unwrap_or(path).to_owned();
                Some(Self::Grpc(Arc::new(GrpcQuestion { service, host: health.host.clone() })))
            }
        }
    }
}

/// The targets of one backend of a port.
fn targets(
    service: &Service,
    question: Option<&Question>,
    port: &ServicePort,
    backend: &Backend,
) -> impl Iterator<Item = Target> + use<> {
    let (health, ip) = (&service.health, backend.address.ip());
    let at = |number: u16, question: &Question| Target::at(SocketAddr::new(ip, number), question.clone());
    let probe = question.and_then(|question| match (question, health.port) {
        (Question::Icmp, _) => Some(at(0, question)),
        (_, Some(number)) => Some(at(number, question)),
        // Nothing says that TCP is served at the port of another protocol; only an owner who names a protocol over TCP.
        (Question::Tcp, None) if port.protocol != Protocol::Tcp => None,
        (_, None) if service.mode.is_two_way() || port.protocol != Protocol::Tcp => Some(at(backend.address.port(), question)),
        // The backend accepts packets for the VIP and may not listen at its own address.
        (_, None) => port
            .vips
            .first()
            .map(|vip| Target { behind_vip: Some(ip), ..Target::at(SocketAddr::new(*vip, port.port), question.clone()) }),
    });
    let node_health = health.node_health_port.map(|number| at(number, &Question::NodeHealth));
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
        Target::at(address(text), Question::Tcp)
    }

    pub(crate) fn node_health(text: &str) -> Target {
        Target::at(address(text), Question::NodeHealth)
    }

    pub(crate) fn subject(service: Option<&str>, protocol: Protocol, text: &str) -> Subject {
        let service = service.map(|name| Arc::new(ServiceName::new("default", name)));
        Subject { service, protocol, address: address(text) }
    }

    pub(crate) fn service(name: &str, protocol: Protocol, backends: &[&str], health: HealthCheck) -> Service {
        let backend = |text: &&str| Backend { address: address(text), weight: 1, state: BackendState::Active };
        let maglev = MaglevSpec { size: 251, seed: 0, hash_version: 1 };
        let port = ServicePort {
            vips: vec!["192.0.2.100".parse().unwrap()],
            backends: backends.iter().map(backend).collect(),
            ..ServicePort::new(protocol, Family::V4, 80, maglev)
        };
        Service { health, ..Service::new(ServiceName::new("default", name), vec![port]) }
    }

    pub(crate) fn services(all: Vec<Service>) -> Services {
        all.into_iter().map(|service| (service.name.clone(), Arc::new(service))).collect()
    }

    /// The targets of some services as the changes from none.
    pub(crate) fn changes(all: Vec<Service>) -> Changes {
        TargetTable::default().follow(&services(all))
    }

    fn keys(changes: &Changes) -> Vec<String> {
        changes.keys().map(ToString::to_string).collect()
    }

    #[test]
    fn services_share_a_target_under_the_strictest_settings() {
        let slow = HealthCheck { interval: Duration::from_secs(9), fall: 1, rise: 1, ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &["10.0.0.1:80", "10.0.0.2:80"], HealthCheck::default());
        let also = service("also", Protocol::Tcp, &["10.0.0.1:80"], slow);
        let changes = changes(vec![web, also]);
        assert_eq!(changes.len(), 2);
        let shared = changes[&tcp("10.0.0.1:80")].as_ref().unwrap();
        assert_eq!((shared.interval, shared.rise, shared.fall), (Duration::from_secs(1), 2, 1));
        assert_eq!(shared.subjects.len(), 1);
    }

    #[test]
    fn a_change_of_one_service_touches_its_targets_and_no_others() {
        let slow = HealthCheck { interval: Duration::from_secs(9), ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &["10.0.0.1:80"], HealthCheck::default());
        let also = |backends: &[&str]| service("also", Protocol::Tcp, backends, slow.clone());
        let mut table = TargetTable::default();
        let first = services(vec![web, also(&["10.0.0.1:80", "10.0.0.2:80"])]);
        assert_eq!(table.follow(&first).len(), 2);
        assert!(table.follow(&first).is_empty());
        let mut second = first.clone();
        second.insert(ServiceName::new("default", "also"), Arc::new(also(&["10.0.0.3:80"])));
        let changes = table.follow(&second);
        assert_eq!(keys(&changes), ["tcp 10.0.0.1:80", "tcp 10.0.0.2:80", "tcp 10.0.0.3:80"]);
        assert!(changes[&tcp("10.0.0.2:80")].is_none());
        assert_eq!(changes[&tcp("10.0.0.1:80")].as_ref().unwrap().interval, Duration::from_secs(1), "web still asks");
        second.remove(&ServiceName::new("default", "web"));
        assert!(table.follow(&second)[&tcp("10.0.0.1:80")].is_none());
    }

    #[test]
    fn each_protocol_of_a_probe_has_its_question() {
        let of = |health| keys(&changes(vec![service("web", Protocol::Tcp, &["10.0.0.1:80"], health)]));
        let check = |probe| HealthCheck { probe, ..HealthCheck::default() };
        let with_path = |probe, path: &str| HealthCheck { path: Some(path.to_owned()), ..check(probe) };
        for (health, expected) in [
            (check(Probe::Tcp), "tcp 10.0.0.1:80"),
            (check(Probe::Http), "GET http://10.0.0.1:80/"),
            (with_path(Probe::Http, "healthz?a=b"), "GET http://10.0.0.1:80/healthz?a=b"),
            (HealthCheck { port: Some(81), ..with_path(Probe::Https, "/healthz") }, "GET https://10.0.0.1:81/healthz"),
            (check(Probe::Grpc), "grpc.health.v1 10.0.0.1:80"),
            (with_path(Probe::Grpc, "/shop.Cart"), "grpc.health.v1 10.0.0.1:80 (shop.Cart)"),
            (HealthCheck { port: Some(81), ..check(Probe::Icmp) }, "ping 10.0.0.1"),
        ] {
            assert_eq!(of(health), [expected]);
        }
    }

    #[test]
    fn the_answer_to_a_question_other_than_tcp_is_for_the_services_that_ask_it() {
        let http = |path: &str| HealthCheck { probe: Probe::Http, path: Some(path.to_owned()), ..HealthCheck::default() };
        let of = |name, health| service(name, Protocol::Tcp, &["10.0.0.1:80"], health);
        let all = vec![of("a", http("/x")), of("b", http("/x")), of("c", http("/y")), of("d", HealthCheck::default())];
        let subjects = |name: Option<&str>| subject(name, Protocol::Tcp, "10.0.0.1:80");
        let found: Vec<_> = changes(all).into_values().map(|check| check.unwrap().subjects).collect();
        let expected = [[subjects(None)].into(), [subjects(Some("a")), subjects(Some("b"))].into(), [subjects(Some("c"))].into()];
        assert_eq!(found, expected);
    }

    #[test]
    fn udp_is_probed_by_tcp_at_a_health_check_port_by_http_and_by_ping() {
        let of = |health| {
            let changes = changes(vec![service("dns", Protocol::Udp, &["10.0.0.1:53"], health)]);
            let subjects = changes.values().flatten().flat_map(|check| &check.subjects);
            assert!(subjects.clone().all(|subject| subject.protocol == Protocol::Udp));
            keys(&changes)
        };
        assert!(of(HealthCheck::default()).is_empty());
        assert_eq!(of(HealthCheck { port: Some(8080), ..HealthCheck::default() }), ["tcp 10.0.0.1:8080"]);
        assert_eq!(of(HealthCheck { probe: Probe::Http, ..HealthCheck::default() }), ["GET http://10.0.0.1:53/"]);
        assert_eq!(of(HealthCheck { probe: Probe::Icmp, ..HealthCheck::default() }), ["ping 10.0.0.1"]);
    }

    #[test]
    fn nobody_asks_without_a_probe_or_for_a_draining_backend() {
        let none = HealthCheck { probe: Probe::None, ..HealthCheck::default() };
        let mut draining = service("b", Protocol::Tcp, &["10.0.0.2:80"], HealthCheck::default());
        draining.ports[0].backends[0].state = BackendState::Draining;
        assert!(changes(vec![service("a", Protocol::Tcp, &["10.0.0.1:80"], none), draining]).is_empty());
    }

    #[test]
    fn a_mode_that_changes_no_address_is_probed_through_its_vip_for_itself_alone() {
        let at = |mode: Mode, health| {
            let mut service = service("web", Protocol::Tcp, &["10.0.0.1:80"], health);
            service.mode = mode;
            changes(vec![service])
        };
        for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
            for (probe, text) in [
                (Probe::Tcp, "tcp 192.0.2.100:80 at 10.0.0.1"),
                (Probe::Http, "GET http://192.0.2.100:80/ at 10.0.0.1"),
                (Probe::Https, "GET https://192.0.2.100:80/ at 10.0.0.1"),
                (Probe::Grpc, "grpc.health.v1 192.0.2.100:80 at 10.0.0.1"),
                (Probe::Icmp, "ping 10.0.0.1"),
            ] {
                let changes = at(mode, HealthCheck { probe, ..HealthCheck::default() });
                assert_eq!(keys(&changes), [text], "{mode}");
                let check = changes.into_values().next().flatten().unwrap();
                assert_eq!(check.subjects, [subject(Some("web"), Protocol::Tcp, "10.0.0.1:80")].into());
            }
            let at_port = at(mode, HealthCheck { port: Some(9000), ..HealthCheck::default() });
            assert_eq!(keys(&at_port), ["tcp 10.0.0.1:9000"], "a port of the backend's own");
        }
        for mode in [Mode::Nat, Mode::Dnat] {
            assert_eq!(keys(&at(mode, HealthCheck::default())), ["tcp 10.0.0.1:80"], "{mode}");
        }
    }

    #[test]
    fn kube_proxys_word_on_a_node_is_asked_for_beside_the_probe_and_without_one() {
        let word = node_health("10.0.0.1:31000");
        let health = HealthCheck { node_health_port: Some(31_000), ..HealthCheck::default() };
        let both = changes(vec![service("web", Protocol::Tcp, &["10.0.0.1:30080"], health.clone())]);
        assert_eq!(keys(&both), ["tcp 10.0.0.1:30080", "GET http://10.0.0.1:31000/healthz"]);
        let subjects = &both[&word].as_ref().unwrap().subjects;
        assert_eq!(*subjects, [subject(Some("web"), Protocol::Tcp, "10.0.0.1:30080")].into());
        let none = HealthCheck { probe: Probe::None, ..health };
        let alone = changes(vec![service("dns", Protocol::Udp, &["10.0.0.1:30053"], none)]);
        assert_eq!(alone.keys().collect::<Vec<_>>(), [&word]);
    }

    #[test]
    fn a_node_port_is_probed_only_where_the_gateway_serves_its_family() {
        let mut web = service("web", Protocol::Tcp, &["10.0.0.1:80"], HealthCheck::default());
        (web.ports[0].vips, web.ports[0].node_port) = (Vec::new(), Some(30_080));
        let services = services(vec![web]);
        let probed = |addresses: &[&str]| {
            let addresses: Vec<IpAddr> = addresses.iter().map(|a| a.parse().unwrap()).collect();
            TargetTable::new(&addresses).follow(&services).len()
        };
        assert_eq!([probed(&[]), probed(&["2001:db8::2"]), probed(&["192.0.2.2"])], [0, 0, 1]);
        let mut table = TargetTable::new(&[]);
        table.follow(&services);
        let mut asked =
            |addresses: &[IpAddr]| -> Vec<bool> { table.serve_node_ports_at(addresses).values().map(Option::is_some).collect() };
        let address = ["192.0.2.2".parse().unwrap()];
        assert_eq!([asked(&address), asked(&address), asked(&[]), asked(&[])], [vec![true], vec![true], vec![false], vec![]]);
    }
}
