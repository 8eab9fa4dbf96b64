//! Probe targets of a state. A target is an address, a question and the settings of the probe; services in which these
//! are equal share it.
//!
//! A backend may depend on several targets: a probe, and the answer of kube-proxy on its node. It is unhealthy while any
//! of them fails. What a target finds applies to the services that ask for it under these settings, and to no other:
//! neither the port nor the thresholds that one service sets take a backend from another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use imbl::ordmap::DiffItem;
use proto::limits::KUBE_PROXY_HEALTH_PORT;
use proto::{
    Backend, BackendState, Family, HealthCheck, InitialHealth, Probe, Protocol, ProxyProtocol, Service, ServicePort, Services,
    StatusRanges,
};

use crate::agent::backend_health::Subject;

/// What is asked, where and how often, and how many results turn its health. Services that agree in all of it share the
/// probes and their results; no other Service hears of them.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// Where to. An echo request has port 0.
    pub address: SocketAddr,
    /// The backend under test if `address` is a VIP, which this backend must serve like the others.
    pub behind_vip: Option<IpAddr>,
    /// The question.
    pub question: Question,
    /// The PROXY header that is sent before it, as the backend expects one before everything.
    pub header: Option<ProxyProtocol>,
    /// As the services set it.
    pub settings: Arc<ProbeSettings>,
}

/// Saved health is found by this text: what is known of a target without header must stay known when a gateway is updated.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, behind_vip, question, header, settings } = self;
        let mut text = f.debug_struct("Target");
        text.field("address", address).field("behind_vip", behind_vip).field("question", question);
        if let Some(header) = header {
            text.field("header", header);
        }
        text.field("settings", settings).finish()
    }
}

/// How a service wants its targets probed, and which results turn their health.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProbeSettings {
    /// Time between the starts of two probes.
    pub interval: Duration,
    /// Timeout of a probe.
    pub timeout: Duration,
    /// Consecutive passed probes after which the target is healthy again.
    pub rise: u32,
    /// Consecutive failed probes after which the target is unhealthy.
    pub fall: u32,
    /// Health before the first probe.
    pub initial: InitialHealth,
}

impl From<&HealthCheck> for ProbeSettings {
    fn from(health: &HealthCheck) -> Self {
        Self { interval: health.interval, timeout: health.timeout, rise: health.rise, fall: health.fall, initial: health.initial }
    }
}

/// What a target must answer to pass.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Question {
    /// None: packets to the backend must leave by a port, as for every target.
    Route,
    /// A TCP connection is accepted.
    Tcp,
    /// An echo request is answered.
    Icmp,
    /// kube-proxy answers `GET /healthz` with 200.
    NodeHealth,
    /// A request is answered with an expected status.
    Http(Arc<HttpQuestion>),
    /// `grpc.health.v1.Health/Check` is answered with `SERVING`.
    Grpc(Arc<GrpcQuestion>),
}

/// An HTTP/1.1 request and the expected answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HttpQuestion {
    /// TLS, if it is used.
    pub tls: Option<Trust>,
    /// Path and query; begins with `/`.
    pub path: String,
    /// The host to ask for; `None` means the address.
    pub host: Option<String>,
    /// The statuses that pass.
    pub status: StatusRanges,
}

/// A query of `grpc.health.v1`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GrpcQuestion {
    /// The service to ask about; empty means the whole server.
    pub service: String,
    /// The host to ask for; `None` means the address.
    pub host: Option<String>,
}

/// The certificates that a probe accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Trust {
    /// Any.
    Any,
    /// Valid ones for the host, of an authority that this machine trusts.
    Machine,
}

impl Target {
    /// A target that is no VIP.
    #[must_use]
    pub const fn at(address: SocketAddr, question: Question, settings: Arc<ProbeSettings>) -> Self {
        Self { address, behind_vip: None, question, header: None, settings }
    }

    /// The address of the backend, to which the gateway must have a route.
    #[must_use]
    pub fn backend(&self) -> IpAddr {
        self.behind_vip.unwrap_or(self.address.ip())
    }

    /// Whether its failure counts only while another node passes the same question. Port 10256 belongs to kube-proxy by
    /// default, but the cluster may have closed it or have another proxy.
    #[must_use]
    pub fn needs_precedent(&self) -> bool {
        self.question == Question::NodeHealth && self.address.port() == KUBE_PROXY_HEALTH_PORT
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address;
        match &self.question {
            Question::Route => write!(f, "route to {}", address.ip())?,
            Question::Tcp => write!(f, "tcp {address}")?,
            Question::Icmp => write!(f, "ping {}", address.ip())?,
            Question::NodeHealth => write!(f, "GET http://{address}/healthz")?,
            Question::Http(asked) => {
                let scheme = if asked.tls.is_some() { "https" } else { "http" };
                write!(f, "GET {scheme}://{address}{}", asked.path)?;
            }
            Question::Grpc(asked) if asked.service.is_empty() => write!(f, "grpc.health.v1 {address}")?,
            Question::Grpc(asked) => write!(f, "grpc.health.v1 {address} ({})", asked.service)?,
        }
        self.behind_vip.map_or(Ok(()), |backend| write!(f, " at {backend}"))?;
        self.header.map_or(Ok(()), |version| write!(f, " with PROXY {version}"))
    }
}

/// Result of a probe. The texts continue a sentence that begins with the target: "answered 500, expected 200-399".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The target answers.
    Passed,
    /// The target does not answer as expected, and why.
    Failed(String),
    /// This machine could not probe; the health of the target is unknown.
    NotAsked(String),
}

/// The backends that depend on a target.
pub type Subjects = BTreeSet<Subject>;

/// Targets that are new or have other subjects, and those that are gone.
pub type Changes = BTreeMap<Target, Option<Subjects>>;

/// The targets of a state, and the backends that depend on each.
#[derive(Debug, Default)]
pub struct TargetTable {
    node_port_addresses: Vec<IpAddr>,
    services: Services,
    subjects: HashMap<Target, Subjects>,
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
            for (target, subject) in old.map(|service| self.asked_by(service)).into_iter().flatten() {
                if let Some(subjects) = self.subjects.get_mut(&target) {
                    subjects.remove(&subject);
                }
                touched.insert(target);
            }
            for (target, subject) in new.map(|service| self.asked_by(service)).into_iter().flatten() {
                self.subjects.entry(target.clone()).or_default().insert(subject);
                touched.insert(target);
            }
        }
        let changes = touched.into_iter().map(|target| {
            let subjects = self.subjects.get(&target).filter(|subjects| !subjects.is_empty()).cloned();
            if subjects.is_none() {
                self.subjects.remove(&target);
            }
            (target, subjects)
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
        let settings = Arc::new(ProbeSettings::from(&service.health));
        let listeners = listeners(service);
        let mut asked = Vec::new();
        for port in service.ports.iter().filter(|port| listens(port, &self.node_port_addresses)) {
            for backend in port.all_backends().filter(|backend| backend.state == BackendState::Active) {
                for target in targets(service, &listeners, question.as_ref(), &settings, port, &backend) {
                    let subject = Subject { service: Arc::clone(&name), protocol: port.protocol, address: backend.address };
                    asked.push((target, subject));
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

/// The header that each TCP listener behind a Service expects. Empty if none expects any.
fn listeners(service: &Service) -> HashMap<SocketAddr, Option<ProxyProtocol>> {
    let mut listeners = HashMap::new();
    let all_tcp = || service.ports.iter().filter(|port| port.protocol == Protocol::Tcp);
    if all_tcp().any(|port| port.proxy_protocol.is_some()) {
        for port in all_tcp() {
            for backend in port.all_backends() {
                listeners.entry(backend.address).or_insert(port.proxy_protocol);
            }
        }
    }
    listeners
}

/// The targets of one backend of a port. A backend that nothing is asked of must be reachable all the same.
fn targets(
    service: &Service,
    listeners: &HashMap<SocketAddr, Option<ProxyProtocol>>,
    question: Option<&Question>,
    settings: &Arc<ProbeSettings>,
    port: &ServicePort,
    backend: &Backend,
) -> impl Iterator<Item = Target> + use<> {
    let (health, ip) = (&service.health, backend.address.ip());
    let at_address = |address, question: &Question| Target::at(address, question.clone(), Arc::clone(settings));
    let at = |number: u16, question: &Question| at_address(SocketAddr::new(ip, number), question);
    // A probe speaks to a TCP listener, whichever port it is for. An echo request has no stream to send a header in.
    let expects = |target: Target| {
        let is_own = port.protocol == Protocol::Tcp && target.address == backend.address;
        let header = match target.question {
            Question::Icmp => None,
            _ if is_own => port.proxy_protocol,
            _ => listeners.get(&target.address).copied().flatten(),
        };
        Target { header, ..target }
    };
    let probe = question.filter(|_| health.probes(port.protocol)).and_then(|question| match (question, health.port) {
        (Question::Icmp, _) => Some(at(0, question)),
        (_, Some(number)) => Some(at(number, question)),
        (_, None) if service.mode.is_two_way() || port.protocol != Protocol::Tcp => Some(at(backend.address.port(), question)),
        // The backend accepts packets for the VIP and may not listen at its own address.
        (_, None) => {
            port.vips.first().map(|vip| Target { behind_vip: Some(ip), ..at_address(SocketAddr::new(*vip, port.port), question) })
        }
    });
    let probe = probe.map(expects);
    let node_health = health.node_health_port.map(|number| at(number, &Question::NodeHealth));
    let route = (probe.is_none() && node_health.is_none()).then(|| at(0, &Question::Route));
    probe.into_iter().chain(node_health).chain(route)
}

fn listens(port: &ServicePort, node_port_addresses: &[IpAddr]) -> bool {
    let serves_node_ports = || node_port_addresses.iter().any(|&address| Family::of(address) == port.family);
    !port.vips.is_empty() || (port.node_port.is_some() && serves_node_ports())
}

#[cfg(test)]
pub(super) mod tests {
    use proto::{MaglevSpec, Mode, ServiceName};

    use super::*;

    pub(crate) fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// A target under the default settings.
    pub(crate) fn at(address: SocketAddr, question: Question) -> Target {
        Target::at(address, question, Arc::new(ProbeSettings::from(&HealthCheck::default())))
    }

    pub(crate) fn under(health: &HealthCheck, target: Target) -> Target {
        Target { settings: Arc::new(ProbeSettings::from(health)), ..target }
    }

    pub(crate) fn tcp(text: &str) -> Target {
        at(address(text), Question::Tcp)
    }

    pub(crate) fn node_health(text: &str) -> Target {
        at(address(text), Question::NodeHealth)
    }

    pub(crate) fn subject(service: &str, protocol: Protocol, text: &str) -> Subject {
        Subject { service: Arc::new(ServiceName::new("default", service)), protocol, address: address(text) }
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
    fn services_with_the_same_question_and_settings_share_a_target() {
        let of = |name, backends: &[&str]| service(name, Protocol::Tcp, backends, HealthCheck::default());
        let changes = changes(vec![of("web", &["10.0.0.1:80", "10.0.0.2:80"]), of("also", &["10.0.0.1:80"])]);
        let subjects = |names: &[&str], address: &str| Some(names.iter().map(|n| subject(n, Protocol::Tcp, address)).collect());
        let expected = [
            (tcp("10.0.0.1:80"), subjects(&["also", "web"], "10.0.0.1:80")),
            (tcp("10.0.0.2:80"), subjects(&["web"], "10.0.0.2:80")),
        ];
        assert_eq!(changes, expected.into());
    }

    #[test]
    fn what_one_service_asks_and_when_it_gives_up_takes_no_backend_from_another() {
        let second = Duration::from_secs(1);
        let default = HealthCheck::default();
        for evil in [
            HealthCheck { port: Some(9), ..default.clone() },
            HealthCheck { rise: 3600, ..default.clone() },
            HealthCheck { fall: 1, ..default.clone() },
            HealthCheck { timeout: Duration::from_millis(10), ..default.clone() },
            HealthCheck { interval: 9 * second, ..default.clone() },
            HealthCheck { probe: Probe::Http, path: Some("/gone".to_owned()), ..default.clone() },
        ] {
            for mode in [Mode::Nat, Mode::Dsr] {
                for backend in ["10.0.0.1:80", "[fd00::1]:80"] {
                    let of = |name, health: &HealthCheck| {
                        let mut service = service(name, Protocol::Tcp, &[backend], health.clone());
                        service.mode = mode;
                        service
                    };
                    let changes = changes(vec![of("web", &default), of("evil", &evil)]);
                    let of_web = subject("web", Protocol::Tcp, backend);
                    let (mut own, mut foreign) = (0, 0);
                    for (target, subjects) in &changes {
                        let subjects = subjects.as_ref().unwrap();
                        assert_eq!(subjects.len(), 1, "{evil:?} {target}");
                        if subjects.contains(&of_web) {
                            assert_eq!(*target.settings, ProbeSettings::from(&default));
                            own += 1;
                        } else {
                            assert_eq!(*target.settings, ProbeSettings::from(&evil));
                            foreign += 1;
                        }
                    }
                    assert_eq!((own, foreign), (1, 1), "{evil:?}");
                }
            }
        }
    }

    #[test]
    fn a_change_of_one_service_touches_its_targets_and_no_others() {
        let slow = HealthCheck { interval: Duration::from_secs(9), ..HealthCheck::default() };
        let also = |backends: &[&str], health: &HealthCheck| service("also", Protocol::Tcp, backends, health.clone());
        let web = service("web", Protocol::Tcp, &["10.0.0.1:80"], HealthCheck::default());
        let mut table = TargetTable::default();
        let first = services(vec![web, also(&["10.0.0.1:80", "10.0.0.2:80"], &HealthCheck::default())]);
        assert_eq!(table.follow(&first).len(), 2);
        assert!(table.follow(&first).is_empty());
        let mut second = first.clone();
        second.insert(ServiceName::new("default", "also"), Arc::new(also(&["10.0.0.3:80"], &slow)));
        let changes = table.follow(&second);
        assert_eq!(keys(&changes), ["tcp 10.0.0.1:80", "tcp 10.0.0.2:80", "tcp 10.0.0.3:80"]);
        assert!(changes[&tcp("10.0.0.2:80")].is_none());
        assert_eq!(changes[&tcp("10.0.0.1:80")], Some([subject("web", Protocol::Tcp, "10.0.0.1:80")].into()), "web still asks");
        assert!(changes[&under(&slow, tcp("10.0.0.3:80"))].is_some());
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
    fn the_answer_to_a_question_is_for_the_services_that_ask_it() {
        let http = |path: &str| HealthCheck { probe: Probe::Http, path: Some(path.to_owned()), ..HealthCheck::default() };
        let of = |name, health| service(name, Protocol::Tcp, &["10.0.0.1:80"], health);
        let all = vec![of("a", http("/x")), of("b", http("/x")), of("c", http("/y")), of("d", HealthCheck::default())];
        let subjects = |name: &str| subject(name, Protocol::Tcp, "10.0.0.1:80");
        let found: Vec<_> = changes(all).into_values().flatten().collect();
        let expected = [[subjects("d")].into(), [subjects("a"), subjects("b")].into(), [subjects("c")].into()];
        assert_eq!(found, expected);
    }

    #[test]
    fn udp_is_probed_by_tcp_at_a_health_check_port_by_http_and_by_ping() {
        let of = |health| {
            let changes = changes(vec![service("dns", Protocol::Udp, &["10.0.0.1:53"], health)]);
            let mut subjects = changes.values().flatten().flatten();
            assert!(subjects.all(|subject| subject.protocol == Protocol::Udp));
            keys(&changes)
        };
        assert_eq!(of(HealthCheck::default()), ["route to 10.0.0.1"]);
        assert_eq!(of(HealthCheck { port: Some(8080), ..HealthCheck::default() }), ["tcp 10.0.0.1:8080"]);
        assert_eq!(of(HealthCheck { probe: Probe::Http, ..HealthCheck::default() }), ["GET http://10.0.0.1:53/"]);
        assert_eq!(of(HealthCheck { probe: Probe::Icmp, ..HealthCheck::default() }), ["ping 10.0.0.1"]);
    }

    #[test]
    fn without_a_probe_a_backend_needs_a_route_alone_and_a_draining_one_nothing() {
        let none = HealthCheck { probe: Probe::None, ..HealthCheck::default() };
        let mut draining = service("b", Protocol::Tcp, &["10.0.0.2:80"], HealthCheck::default());
        draining.ports[0].backends[0].state = BackendState::Draining;
        let changes = changes(vec![service("a", Protocol::Tcp, &["10.0.0.1:80"], none), draining]);
        assert_eq!(keys(&changes), ["route to 10.0.0.1"]);
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
                let subjects = changes.into_values().next().flatten().unwrap();
                assert_eq!(subjects, [subject("web", Protocol::Tcp, "10.0.0.1:80")].into());
            }
            let at_port = at(mode, HealthCheck { port: Some(9000), ..HealthCheck::default() });
            assert_eq!(keys(&at_port), ["tcp 10.0.0.1:9000"], "a port of the backend's own");
        }
        for mode in [Mode::Nat, Mode::Dnat] {
            assert_eq!(keys(&at(mode, HealthCheck::default())), ["tcp 10.0.0.1:80"], "{mode}");
        }
    }

    #[test]
    fn probes_of_a_port_with_a_proxy_header_send_it_to_its_listener_alone() {
        let of = |health: HealthCheck| {
            let mut web = service("web", Protocol::Tcp, &["10.0.0.1:30080"], health);
            web.ports[0].proxy_protocol = Some(ProxyProtocol::V2);
            keys(&changes(vec![web]))
        };
        let probe = |probe| HealthCheck { probe, ..HealthCheck::default() };
        for (health, expected) in [
            (probe(Probe::Tcp), "tcp 10.0.0.1:30080 with PROXY v2"),
            (probe(Probe::Http), "GET http://10.0.0.1:30080/ with PROXY v2"),
            (probe(Probe::Https), "GET https://10.0.0.1:30080/ with PROXY v2"),
            (probe(Probe::Grpc), "grpc.health.v1 10.0.0.1:30080 with PROXY v2"),
            (HealthCheck { port: Some(30_080), ..probe(Probe::Http) }, "GET http://10.0.0.1:30080/ with PROXY v2"),
            (HealthCheck { port: Some(10_254), ..probe(Probe::Http) }, "GET http://10.0.0.1:10254/"),
            (probe(Probe::Icmp), "ping 10.0.0.1"),
            (probe(Probe::None), "route to 10.0.0.1"),
        ] {
            assert_eq!(of(health), [expected]);
        }
        let node = HealthCheck { node_health_port: Some(31_000), ..HealthCheck::default() };
        assert_eq!(of(node), ["tcp 10.0.0.1:30080 with PROXY v2", "GET http://10.0.0.1:31000/healthz"]);
    }

    #[test]
    fn a_probe_sends_the_header_of_the_tcp_listener_that_it_asks() {
        let of = |ports: [(Protocol, u16, Option<ProxyProtocol>); 2], health: &HealthCheck| {
            let ports = ports.map(|(protocol, port, header)| {
                let one = service("web", protocol, &[&format!("10.0.0.1:{port}")], health.clone());
                ServicePort { port, proxy_protocol: header, ..one.ports[0].clone() }
            });
            let web = service("web", Protocol::Tcp, &[], health.clone());
            keys(&changes(vec![Service { ports: ports.into(), ..web }]))
        };
        let (tcp, udp, v2) = (Protocol::Tcp, Protocol::Udp, Some(ProxyProtocol::V2));
        let http = HealthCheck { probe: Probe::Http, ..HealthCheck::default() };
        let at_80 = HealthCheck { port: Some(80), ..HealthCheck::default() };
        for (ports, health, expected) in [
            ([(tcp, 443, v2), (udp, 443, None)], &http, vec!["GET http://10.0.0.1:443/ with PROXY v2"]),
            ([(udp, 443, None), (tcp, 443, v2)], &http, vec!["GET http://10.0.0.1:443/ with PROXY v2"]),
            ([(udp, 53, v2), (tcp, 53, None)], &http, vec!["GET http://10.0.0.1:53/"]),
            ([(udp, 53, v2), (udp, 54, v2)], &http, vec!["GET http://10.0.0.1:53/", "GET http://10.0.0.1:54/"]),
            ([(tcp, 80, v2), (tcp, 443, v2)], &at_80, vec!["tcp 10.0.0.1:80 with PROXY v2"]),
            ([(tcp, 80, None), (tcp, 443, v2)], &at_80, vec!["tcp 10.0.0.1:80"]),
            ([(tcp, 81, v2), (udp, 443, v2)], &at_80, vec!["tcp 10.0.0.1:80"]),
        ] {
            assert_eq!(of(ports, health), expected, "{ports:?}");
        }
    }

    #[test]
    fn a_target_without_header_is_known_by_the_text_that_it_had_before_headers() {
        let plain = tcp("10.0.0.1:80");
        let text = format!("{plain:?}");
        assert!(text.starts_with("Target { address: 10.0.0.1:80, behind_vip: None, question: Tcp, settings: "), "{text}");
        let with = Target { header: Some(ProxyProtocol::V1), ..plain };
        assert!(format!("{with:?}").contains("question: Tcp, header: V1, settings: "));
    }

    #[test]
    fn kube_proxys_word_on_a_node_is_asked_for_beside_the_probe_and_without_one() {
        let word = node_health("10.0.0.1:31000");
        let health = HealthCheck { node_health_port: Some(31_000), ..HealthCheck::default() };
        let both = changes(vec![service("web", Protocol::Tcp, &["10.0.0.1:30080"], health.clone())]);
        assert_eq!(keys(&both), ["tcp 10.0.0.1:30080", "GET http://10.0.0.1:31000/healthz"]);
        let subjects = both[&word].as_ref().unwrap();
        assert_eq!(*subjects, [subject("web", Protocol::Tcp, "10.0.0.1:30080")].into());
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

    #[test]
    fn a_target_is_written_as_an_operator_would_ask_it() {
        let address: SocketAddr = "10.0.0.5:8080".parse().unwrap();
        let http = |tls| {
            let (path, status) = ("/healthz".to_owned(), StatusRanges::default());
            Question::Http(Arc::new(HttpQuestion { tls, path, host: None, status }))
        };
        let grpc = |service: &str| Question::Grpc(Arc::new(GrpcQuestion { service: service.to_owned(), host: None }));
        for (question, text) in [
            (Question::Route, "route to 10.0.0.5"),
            (Question::Tcp, "tcp 10.0.0.5:8080"),
            (Question::Icmp, "ping 10.0.0.5"),
            (Question::NodeHealth, "GET http://10.0.0.5:8080/healthz"),
            (http(None), "GET http://10.0.0.5:8080/healthz"),
            (http(Some(Trust::Any)), "GET https://10.0.0.5:8080/healthz"),
            (grpc(""), "grpc.health.v1 10.0.0.5:8080"),
            (grpc("shop.Cart"), "grpc.health.v1 10.0.0.5:8080 (shop.Cart)"),
        ] {
            assert_eq!(at(address, question).to_string(), text);
        }
        let through = Target { behind_vip: Some("10.0.0.9".parse().unwrap()), ..at(address, Question::Tcp) };
        assert_eq!(through.to_string(), "tcp 10.0.0.5:8080 at 10.0.0.9");
    }

    #[test]
    fn only_the_port_of_kube_proxy_itself_needs_a_precedent() {
        let needs = |address: &str, question| at(address.parse().unwrap(), question).needs_precedent();
        assert!(needs("10.0.0.1:10256", Question::NodeHealth));
        assert!(!needs("10.0.0.1:31000", Question::NodeHealth) && !needs("10.0.0.1:10256", Question::Tcp));
    }
}
