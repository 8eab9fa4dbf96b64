//! Rows about services, backends and workers for operators: pure functions of the published data and the
//! counters.
//!
//! Invariant: the names are those of DESIGN section 8, and a backend has one row per service and protocol, however many
//! of its ports it serves: TCP may fail where UDP works.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use dataplane::snapshot::{FrontendView, PortView, RemovedBackends, ServiceView, Views};
use dataplane::{DropReason, WorkerCounters};
use proto::{LimitKind, Protocol, ServiceLimit, ServiceName, v1};
use smallvec::SmallVec;

use crate::agent::backend_health::{Causes, Subject};
use crate::agent::served::BackendCounts;
use crate::fleet::service_limits::SNAT_PORTS_PER_SECOND;
use crate::worker_threads::Load;

/// Reasons of conditions that a gateway sees by itself.
const NO_ENDPOINTS: &str = "NoEndpoints";
const NO_HEALTHY_BACKEND: &str = "NoHealthyBackend";

/// The counters of all workers, in their order.
pub(crate) type Workers = [Arc<WorkerCounters>];

/// A backend of one service.
pub(crate) struct BackendRow {
    pub(crate) draining: bool,
    pub(crate) healthy: bool,
    pub(crate) weight: u16,
    /// Its slots of counters, which ports share.
    slots: SmallVec<[u32; 2]>,
}

/// The backends of a service, by protocol. A backend of several ports is healthy if it is healthy on all of them, and
/// draining if it drains on all of them.
pub(crate) fn rows(service: &ServiceView) -> BTreeMap<(SocketAddr, Protocol), BackendRow> {
    let mut rows = BTreeMap::new();
    let of_ports = service.ports.iter().flat_map(|port| port.backends.iter().map(move |backend| (port.protocol, backend)));
    for (protocol, backend) in of_ports {
        let new = || BackendRow { draining: true, healthy: true, weight: backend.weight, slots: SmallVec::new() };
        let row = rows.entry((backend.address, protocol)).or_insert_with(new);
        row.draining &= backend.draining;
        row.healthy &= backend.healthy;
        if !row.slots.contains(&backend.id.slot) {
            row.slots.push(backend.id.slot);
        }
    }
    rows
}

impl BackendRow {
    /// Which probe of the backend fails for this service, and what it found. Empty for a healthy
    /// backend.
    pub(crate) fn reason(&self, service: &ServiceView, address: SocketAddr, protocol: Protocol, causes: &Causes) -> String {
        if self.healthy {
            return String::new();
        }
        causes
            .get(&Subject { service: Arc::clone(&service.name), protocol, address })
            .map(ToString::to_string)
            .unwrap_or_default()
    }

    /// What was counted, over protocols and workers.
    fn traffic(&self, workers: &Workers) -> v1::BackendTraffic {
        let mut traffic = v1::BackendTraffic::default();
        for (worker, &slot) in workers.iter().flat_map(|worker| self.slots.iter().map(move |slot| (worker, slot))) {
            traffic.packets_to_backend += worker.sum_of(slot, |counters| counters.packets(false));
            traffic.packets_to_clients += worker.sum_of(slot, |counters| counters.packets(true));
            traffic.bytes_to_backend += worker.sum_of(slot, |counters| counters.bytes(false));
            traffic.bytes_to_clients += worker.sum_of(slot, |counters| counters.bytes(true));
            traffic.new_flows += worker.sum_of(slot, |counters| counters.new_flows.get());
            traffic.failed_connections += worker.sum_of(slot, |counters| counters.failed.get());
            traffic.reset_connections += worker.sum_of(slot, |counters| counters.reset.get());
        }
        traffic
    }

    /// One of its counters, summed over protocols and workers.
    pub(crate) fn sum(&self, workers: &Workers, of: fn(&WorkerCounters, u32) -> u64) -> u64 {
        self.slots.iter().map(|slot| workers.iter().map(|worker| of(worker, *slot)).sum::<u64>()).sum()
    }
}

/// The frontends of a port, as text.
fn frontends(port: &PortView) -> Vec<String> {
    port.frontends.iter().map(|address| format!("{} {address}", port.protocol)).collect()
}

/// Why the gateway does not serve a Service, or what it lacks, and the sentence that says so; empty texts: neither.
pub(crate) fn reason(service: &ServiceView) -> (&str, &str) {
    let BackendCounts { backends, healthy } = BackendCounts::from(service);
    match &service.refusal {
        Some(refusal) => (refusal.reason.as_str(), &refusal.message),
        None if backends == 0 => (NO_ENDPOINTS, "The gateway has no backend of the Service that takes new connections"),
        None if healthy == 0 => {
            (NO_HEALTHY_BACKEND, "The gateway finds no healthy backend of the Service: all fail their probes")
        }
        None => ("", ""),
    }
}

/// The row of a service; its backends are those that are not draining.
pub(crate) fn service(gateway: &str, service: &ServiceView) -> v1::ServiceStatus {
    let BackendCounts { backends, healthy } = BackendCounts::from(service);
    let (reason, message) = reason(service);
    let app_protocols = |port: &PortView| {
        let spoken = port.app_protocol.iter().flat_map(|spoken| frontends(port).into_iter().map(|f| (f, spoken.clone())));
        spoken.collect::<Vec<_>>()
    };
    let proxy_protocols = |port: &PortView| {
        let versions =
            port.proxy_protocol.iter().flat_map(|version| frontends(port).into_iter().map(|f| (f, version.to_string())));
        versions.collect::<Vec<_>>()
    };
    v1::ServiceStatus {
        namespace: service.name.namespace.clone(),
        name: service.name.name.clone(),
        frontends: service.ports.iter().flat_map(frontends).collect(),
        mode: service.mode.as_str().to_owned(),
        target: service.target.as_str().to_owned(),
        scheduler: service.scheduler.as_str().to_owned(),
        backends,
        healthy,
        reason: reason.to_owned(),
        message: message.to_owned(),
        app_protocols: service.ports.iter().flat_map(app_protocols).collect(),
        gateway: gateway.to_owned(),
        drops: BTreeMap::new(),
        traffic: Vec::new(),
        fails_open: service.ports.iter().flat_map(|port| &port.backends).any(|backend| backend.accepts_new && !backend.healthy),
        proxy_protocols: service.ports.iter().flat_map(proxy_protocols).collect(),
    }
}

/// The row of a service that is served, with what it lacks.
pub(super) fn limited(row: v1::ServiceStatus, limits: &[ServiceLimit]) -> v1::ServiceStatus {
    let of_service = |limit: &&ServiceLimit| limit.service.namespace == row.namespace && limit.service.name == row.name;
    let mut of_service = limits.iter().filter(of_service).peekable();
    match of_service.peek().filter(|_| row.reason.is_empty()) {
        None => row,
        Some(first) => {
            let reason = match first.kind {
                LimitKind::SnatPorts => {
                    format!("{}: over {SNAT_PORTS_PER_SECOND} new flows/s to a backend", first.kind.as_str())
                }
                kind => kind.as_str().to_owned(),
            };
            let texts: Vec<&str> = of_service.map(|limit| limit.text.as_str()).collect();
            v1::ServiceStatus { reason, message: texts.join("; "), ..row }
        }
    }
}

/// The rows of the frontends of a service, with what they counted.
pub(super) fn frontend_rows(gateway: &str, service: &ServiceView, workers: &Workers) -> Vec<v1::FrontendStatus> {
    let status = |frontend: &FrontendView| {
        let totals = frontend.counters.totals(workers);
        v1::FrontendStatus {
            service: service.name.to_string(),
            frontend: format!("{} {}", frontend.protocol, frontend.address),
            port: frontend.port.into(),
            flows: totals.flows,
            new_flows: totals.new_flows,
            packets_to_backends: totals.packets_to_backends,
            packets_to_clients: totals.packets_to_clients,
            bytes_to_backends: totals.bytes_to_backends,
            bytes_to_clients: totals.bytes_to_clients,
            failed_connections: totals.failed,
            reset_connections: totals.reset,
            gateway: gateway.to_owned(),
        }
    };
    service.frontends.iter().map(status).collect()
}

/// Drops of packets to the frontends of a service, by reason; those that occurred.
pub(super) fn drops_of(service: &ServiceView) -> BTreeMap<String, u64> {
    let counts = DropReason::ALL.iter().map(|reason| (reason.as_str().to_owned(), service.drops.sum(*reason)));
    counts.filter(|(_, packets)| *packets > 0).collect()
}

/// Which backends are listed, and what of them.
#[derive(Debug, Default)]
pub(super) struct BackendQuery {
    with_traffic: bool,
    /// Only these addresses; without any, all.
    addresses: HashSet<IpAddr>,
}

impl TryFrom<&v1::ListBackendsRequest> for BackendQuery {
    type Error = String;

    fn try_from(request: &v1::ListBackendsRequest) -> Result<Self, String> {
        let address = |text: &String| text.parse().map_err(|_| format!("addresses: found {text:?}, expected IP addresses"));
        let addresses = request.addresses.iter().map(address).collect::<Result<_, _>>()?;
        Ok(Self { with_traffic: request.counters, addresses })
    }
}

impl BackendQuery {
    fn includes(&self, address: SocketAddr) -> bool {
        self.addresses.is_empty() || self.addresses.contains(&address.ip())
    }
}

/// The rows of a service's backends.
pub(super) fn backends(
    gateway: &str,
    service: &ServiceView,
    workers: &Workers,
    causes: &Causes,
    query: &BackendQuery,
) -> Vec<v1::BackendStatus> {
    let status = |((address, protocol), row): ((SocketAddr, Protocol), BackendRow)| v1::BackendStatus {
        service: service.name.to_string(),
        address: address.to_string(),
        state: if row.draining { "draining" } else { "active" }.to_owned(),
        healthy: row.healthy,
        weight: row.weight.into(),
        flows: row.sum(workers, WorkerCounters::flows_of),
        gateway: gateway.to_owned(),
        reason: row.reason(service, address, protocol, causes),
        protocol: protocol.to_string(),
        traffic: query.with_traffic.then(|| row.traffic(workers)),
        ..v1::BackendStatus::default()
    };
    rows(service).into_iter().filter(|((address, _), _)| query.includes(*address)).map(status).collect()
}

/// Rows of a service's backends that fail their probes and do not drain, without flows.
pub(super) fn unhealthy<'a>(
    gateway: &str,
    service: &'a ServiceView,
    causes: &'a Causes,
) -> impl Iterator<Item = v1::BackendStatus> {
    let status = |((address, protocol), row): ((SocketAddr, Protocol), BackendRow)| v1::BackendStatus {
        service: service.name.to_string(),
        address: address.to_string(),
        gateway: gateway.to_owned(),
        reason: row.reason(service, address, protocol, causes),
        protocol: protocol.to_string(),
        ..v1::BackendStatus::default()
    };
    rows(service).into_iter().filter(|(_, row)| !row.healthy && !row.draining).map(status)
}

/// The rows of backends that their service no longer lists for a protocol, while they have flows.
pub(super) fn removed_backends(
    gateway: &str,
    removed: &RemovedBackends,
    services: &Views,
    workers: &Workers,
    query: &BackendQuery,
) -> Vec<v1::BackendStatus> {
    type Key<'a> = (&'a Arc<ServiceName>, SocketAddr, Protocol);
    let mut slots: BTreeMap<Key<'_>, SmallVec<[u32; 2]>> = BTreeMap::new();
    for (backend, slot) in removed.iter().filter(|(backend, _)| query.includes(backend.address)) {
        slots.entry((&backend.service, backend.address, backend.protocol)).or_default().push(*slot);
    }
    let is_listed = |(service, address, protocol): Key<'_>| {
        let ports = services.get(service).into_iter().flat_map(|view| &view.ports).filter(|port| port.protocol == protocol);
        ports.flat_map(|port| &port.backends).any(|backend| backend.address == address)
    };
    let row = |(key, slots): (Key<'_>, SmallVec<[u32; 2]>)| {
        let (service, address, protocol) = key;
        let row = BackendRow { draining: true, healthy: false, weight: 0, slots };
        let flows = row.sum(workers, WorkerCounters::flows_of);
        (flows > 0 && !is_listed(key)).then(|| v1::BackendStatus {
            service: service.to_string(),
            address: address.to_string(),
            protocol: protocol.to_string(),
            state: "removed".to_owned(),
            flows,
            gateway: gateway.to_owned(),
            reason: "its Service no longer lists it; its flows may end by themselves until drain-timeout is over".to_owned(),
            traffic: query.with_traffic.then(|| row.traffic(workers)),
            ..v1::BackendStatus::default()
        })
    };
    slots.into_iter().filter_map(row).collect()
}

/// One row per drop reason and worker, including those with a count of 0, so that a reader sees all names.
pub(super) fn drops(gateway: &str, workers: &Workers) -> Vec<v1::DropCount> {
    let all = (0..).zip(workers).flat_map(|(worker, counters)| DropReason::ALL.iter().map(move |r| (worker, counters, *r)));
    let count = |(worker, counters, reason): (u32, &Arc<WorkerCounters>, DropReason)| v1::DropCount {
        reason: reason.as_str().to_owned(),
        worker,
        packets: counters.drops(reason).get(),
        gateway: gateway.to_owned(),
    };
    all.map(count).collect()
}

/// The packet counters of every worker, its load, and the flows that it has room for.
pub(super) fn accounts(workers: &Workers, loads: &[Arc<Load>], flows_max: u64) -> Vec<v1::Account> {
    let of = |(worker, (counters, load)): (u32, (&Arc<WorkerCounters>, &Arc<Load>))| {
        let (account, reading) = (counters.account(), load.read());
        v1::Account {
            worker,
            received: account.received + account.handed_in,
            originated: account.originated,
            transmitted: account.transmitted + account.handed_out,
            dropped: account.dropped,
            held: account.held,
            flows: counters.flows.get(),
            snat_port_reused_early: counters.snat_port_reused_early.get(),
            handed_in: account.handed_in,
            handed_out: account.handed_out,
            cycles: reading.cycles,
            busy_cycles: reading.busy_cycles,
            flows_max,
            stalled: load.is_stalled(),
            proxy_headers_sent: counters.proxy_headers_sent.get(),
            proxy_headers_again: counters.proxy_headers_again.get(),
            proxy_headers_refused: counters.proxy_headers_refused.get(),
        }
    };
    (0..).zip(workers.iter().zip(loads)).map(of).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use dataplane::flow::BackendId;
    use dataplane::snapshot::{BackendView, FrontendAddress, RemovedBackend};
    use dataplane::{CounterSlot, FrontendCounters, FrontendNumber, ServiceNumber};
    use proto::{Family, Mode, Reason, Refusal, Scheduler, Target};

    use super::*;

    pub(crate) fn counted(slot: u32) -> CounterSlot {
        CounterSlot::new(slot, FrontendNumber::NONE)
    }

    fn backend(slot: u32, address: &str, healthy: bool, draining: bool) -> BackendView {
        let id = BackendId { slot, generation: 0 };
        BackendView { address: address.parse().unwrap(), id, weight: 1, healthy, draining, accepts_new: healthy && !draining }
    }

    fn port(frontends: &[&str], backends: Vec<BackendView>) -> PortView {
        let frontends = frontends.iter().map(|f| f.parse().unwrap()).collect();
        PortView {
            protocol: Protocol::Tcp,
            family: Family::V4,
            frontends,
            backends,
            app_protocol: Some("http".to_owned()),
            proxy_protocol: None,
        }
    }

    /// Two ports; of four backends one fails on one port and one drains.
    pub(crate) fn web() -> ServiceView {
        let [one, two] = [backend(0, "10.0.0.1:80", true, false), backend(1, "10.0.0.2:80", true, false)];
        let [failing, gone] = [backend(2, "10.0.0.2:80", false, false), backend(3, "10.0.0.9:80", true, true)];
        ServiceView {
            name: Arc::new(ServiceName::new("default", "web")),
            mode: Mode::Nat,
            target: Target::Endpoint,
            scheduler: Scheduler::Maglev,
            refusal: None,
            ports: vec![
                port(&["192.0.2.100:80", "192.0.2.2:30080"], vec![one, two]),
                port(&["192.0.2.100:443"], vec![failing, gone]),
            ],
            not_served: Vec::new(),
            frontends: [("192.0.2.100:80", 1), ("192.0.2.100:443", 2)].map(frontend).into(),
            drops: Arc::default(),
            number: ServiceNumber::default(),
        }
    }

    fn frontend((at, number): (&str, u32)) -> FrontendView {
        let at: SocketAddr = at.parse().unwrap();
        let counters = Arc::new(FrontendCounters::new(FrontendNumber::new(number)));
        FrontendView { protocol: Protocol::Tcp, address: FrontendAddress::Vip(at), port: at.port(), counters }
    }

    fn workers() -> [Arc<WorkerCounters>; 2] {
        [(); 2].map(|()| Arc::new(WorkerCounters::default()))
    }

    #[test]
    fn a_service_that_lacks_something_says_what_and_one_that_is_refused_says_why() {
        let limit = |kind, text: &str| ServiceLimit { service: ServiceName::new("default", "web"), kind, text: text.to_owned() };
        let limits = [limit(LimitKind::SnatPorts, "few ports"), limit(LimitKind::FlowShare, "its share")];
        let row = limited(service("edge-1", &web()), &limits);
        assert_eq!(row.reason, "SnatPortsShort: over 1075 new flows/s to a backend");
        assert_eq!(row.message, "few ports; its share");
        assert_eq!(limited(service("edge-1", &web()), &limits[1..]).reason, "FlowShareReached");
        let refusal = Refusal { reason: Reason::Refused, message: "no SNAT address".to_owned() };
        let refused = service("edge-1", &ServiceView { refusal: Some(refusal), ..web() });
        assert_eq!(limited(refused.clone(), &limits), refused);
        let other = ServiceView { name: std::sync::Arc::new(ServiceName::new("default", "other")), ..web() };
        assert_eq!(limited(service("edge-1", &other), &limits).reason, "");
    }

    #[test]
    fn a_service_shows_its_frontends_and_how_many_backends_are_healthy() {
        let status = service("edge-1", &web());
        assert_eq!(status.frontends, ["tcp 192.0.2.100:80", "tcp 192.0.2.2:30080", "tcp 192.0.2.100:443"]);
        assert_eq!((status.backends, status.healthy, status.reason.as_str()), (2, 1, ""));
        assert_eq!(status.app_protocols, status.frontends.iter().map(|f| (f.clone(), "http".to_owned())).collect());
    }

    #[test]
    fn a_service_that_is_not_served_says_why() {
        let refusal = Refusal { reason: Reason::Refused, message: "no SNAT address".to_owned() };
        let status = service("edge-1", &ServiceView { refusal: Some(refusal), ports: Vec::new(), ..web() });
        assert_eq!((status.reason.as_str(), status.message.as_str()), ("Refused", "no SNAT address"));
    }

    #[test]
    fn a_backend_stands_once_with_its_flows_on_all_ports_and_workers() {
        let workers = workers();
        for (slot, flows) in [(0, 3), (1, 1), (2, 5), (3, 2)] {
            workers.iter().for_each(|w| w.at(counted(slot)).flows.set(flows));
        }
        let rows = backends("edge-1", &web(), &workers, &Causes::new(), &BackendQuery::default());
        let rows: Vec<_> = rows.into_iter().map(|b| (b.address, b.state, b.healthy, b.flows)).collect();
        let expected =
            [("10.0.0.1:80", "active", true, 6), ("10.0.0.2:80", "active", false, 12), ("10.0.0.9:80", "draining", true, 4)];
        assert_eq!(rows, expected.map(|(address, state, healthy, flows)| (address.to_owned(), state.to_owned(), healthy, flows)));
    }

    #[test]
    fn tcp_and_udp_of_one_backend_are_told_apart() {
        let at = |protocol, slot, healthy| {
            let backends = vec![backend(slot, "10.0.0.53:53", healthy, false)];
            PortView { protocol, ..port(&["192.0.2.100:53"], backends) }
        };
        let dns = ServiceView { ports: vec![at(Protocol::Tcp, 0, false), at(Protocol::Udp, 1, true)], ..web() };
        let rows = backends("edge-1", &dns, &workers(), &Causes::new(), &BackendQuery::default());
        let rows: Vec<_> = rows.iter().map(|row| (&*row.protocol, &*row.address, row.healthy)).collect();
        assert_eq!(rows, [("tcp", "10.0.0.53:53", false), ("udp", "10.0.0.53:53", true)]);
        let status = service("edge-1", &dns);
        assert_eq!((status.backends, status.healthy, &*status.reason), (2, 1, ""));
    }

    #[test]
    fn a_service_without_a_usable_backend_shows_the_cause() {
        let with = |backends| service("edge-1", &ServiceView { ports: vec![port(&["192.0.2.100:80"], backends)], ..web() });
        assert_eq!(with(Vec::new()).reason, "NoEndpoints");
        assert_eq!(with(vec![backend(0, "10.0.0.1:80", true, true)]).reason, "NoEndpoints", "it drains");
        assert_eq!(with(vec![backend(0, "10.0.0.1:80", false, false)]).reason, "NoHealthyBackend");
    }

    #[test]
    fn an_unhealthy_backend_says_why_and_a_healthy_one_says_nothing() {
        let subject = |service: &str, address: &str| {
            let service = Arc::new(ServiceName::new("default", service));
            Subject { service, protocol: Protocol::Tcp, address: address.parse().unwrap() }
        };
        let reasons = |service| {
            let causes = [
                (subject(service, "10.0.0.2:80"), "GET http://10.0.0.2:80/ answered 500, expected 200-399".into()),
                (subject("web", "10.0.0.1:80"), "of a port on which it is not used".into()),
            ];
            let rows = backends("edge-1", &web(), &workers(), &causes.into_iter().collect(), &BackendQuery::default());
            rows.into_iter().map(|row| row.reason).collect::<Vec<_>>()
        };
        let why = "GET http://10.0.0.2:80/ answered 500, expected 200-399";
        assert_eq!(reasons("web"), ["", why, ""]);
        assert_eq!(reasons("other"), ["", "", ""]);
    }

    #[test]
    fn flows_of_a_backend_that_several_ports_share_count_once() {
        let shared = || vec![backend(4, "10.0.0.4:80", true, false)];
        let service =
            ServiceView { ports: vec![port(&["192.0.2.100:80"], shared()), port(&["192.0.2.101:80"], shared())], ..web() };
        let workers = workers();
        workers.iter().for_each(|worker| worker.at(counted(4)).flows.set(3));
        let rows = backends("edge-1", &service, &workers, &Causes::default(), &BackendQuery::default());
        let flows: Vec<_> = rows.into_iter().map(|backend| backend.flows).collect();
        assert_eq!(flows, [6], "of two workers");
    }

    #[test]
    fn traffic_is_counted_over_ports_and_workers_and_shown_if_asked_for() {
        let workers = workers();
        for (slot, packet_len) in [(1, 100), (2, 1_000)] {
            for worker in &workers {
                worker.forwarded(counted(slot), false, packet_len);
                worker.forwarded(counted(slot), true, 40);
                worker.at(counted(slot)).new_flows.add(3);
            }
        }
        let rows = |with_traffic| {
            let query = BackendQuery { with_traffic, ..BackendQuery::default() };
            backends("edge-1", &web(), &workers, &Causes::new(), &query)
        };
        assert!(rows(false).iter().all(|row| row.traffic.is_none()));
        let traffic = rows(true)[1].traffic.unwrap();
        let expected = v1::BackendTraffic {
            packets_to_backend: 4,
            packets_to_clients: 4,
            bytes_to_backend: 2_200,
            bytes_to_clients: 160,
            new_flows: 12,
            ..v1::BackendTraffic::default()
        };
        assert_eq!(traffic, expected);
        assert!(drops_of(&web()).is_empty());
    }

    #[test]
    fn a_frontend_shows_its_own_traffic_over_backends_and_workers() {
        let (workers, service) = (workers(), web());
        let [http, https] = [1, 2].map(FrontendNumber::new);
        service.frontends.iter().for_each(|frontend| frontend.counters.join([0, 1], &workers));
        for worker in &workers {
            worker.forwarded(CounterSlot::new(0, http), false, 100);
            worker.forwarded(CounterSlot::new(1, http), true, 40);
            worker.forwarded(CounterSlot::new(1, https), false, 1_000);
            worker.at(CounterSlot::new(1, https)).flows.add(2);
        }
        let rows = frontend_rows("edge-1", &service, &workers);
        let shown: Vec<_> = rows.iter().map(|row| (&*row.frontend, row.port, row.bytes_to_backends, row.flows)).collect();
        assert_eq!(shown, [("tcp 192.0.2.100:80", 80, 200, 0), ("tcp 192.0.2.100:443", 443, 2_000, 4)]);
        assert_eq!((rows[0].packets_to_clients, rows[0].bytes_to_clients, &*rows[0].service), (2, 80, "default/web"));
    }

    #[test]
    fn a_removed_backend_is_shown_while_it_has_flows_and_is_not_listed() {
        let removed = |service: &str, address: &str, slot: u32| {
            let service = Arc::new(ServiceName::new("default", service));
            (RemovedBackend { service, address: address.parse().unwrap(), protocol: Protocol::Tcp }, slot)
        };
        let all = [removed("web", "10.0.0.7:80", 7), removed("web", "10.0.0.1:80", 8), removed("gone", "10.0.0.7:80", 9)];
        let all: RemovedBackends = all.into_iter().chain([removed("gone", "10.0.0.6:80", 10)]).collect();
        let services = Views::unit(Arc::clone(&web().name), Arc::new(web()));
        let workers = workers();
        for slot in 7..10 {
            workers.iter().for_each(|worker| worker.at(counted(slot)).flows.set(2));
        }
        let rows = |address: Option<&str>| {
            let query =
                BackendQuery { addresses: address.map(|text| text.parse().unwrap()).into_iter().collect(), ..Default::default() };
            removed_backends("edge-1", &all, &services, &workers, &query)
        };
        assert_eq!((rows(Some("10.0.0.7")).len(), rows(Some("10.0.0.8")).len()), (2, 0));
        let rows = rows(None).into_iter().map(|row| (row.service, row.address, row.state, row.healthy, row.flows));
        let rows: Vec<_> = rows.collect();
        let row = |service: &str| (service.to_owned(), "10.0.0.7:80".to_owned(), "removed".to_owned(), false, 4);
        assert_eq!(rows, [row("default/gone"), row("default/web")]);
    }

    #[test]
    fn drops_name_every_reason_of_every_worker() {
        let workers = workers();
        workers[1].drops(DropReason::NoFlow).add(4);
        let drops = drops("edge-1", &workers);
        assert_eq!(drops.len(), 2 * DropReason::ALL.len());
        let counted: Vec<_> = drops.into_iter().filter(|d| d.packets > 0).map(|d| (d.reason, d.worker, d.packets)).collect();
        assert_eq!(counted, [("no_flow".to_owned(), 1, 4)]);
    }
}
