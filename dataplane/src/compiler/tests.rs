//! Tests of the compiler, in terms that a user would notice.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use proptest::prelude::*;
use proto::limits::{MAGLEV_HASH_VERSION, SNAT_PORT_REST};
use proto::{
    Announce, Backend, BackendState, Family, MaglevSpec, NodeBackend, NodeSet, NodesAt, Protocol, Reason, Scheduler, Service,
    ServicePort, Services,
};

use super::*;
use crate::flow::FlowLimits;
use crate::flow::{BackendId, UNRESOLVED};
use crate::port::PortIndex;
use crate::snapshot::{AddressRole, NextHop, RouteTo, ServiceView};
use crate::snapshot::{Neighbour, PortConfig, Route, Tunnel};
use crate::wire::{Mac, Tuple};

const UPLINK: PortIndex = PortIndex(0);
const CLUSTER: PortIndex = PortIndex(1);
const SECOND_NS: u64 = 1_000_000_000;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn v4(text: &str) -> u32 {
    u32::from_ip(ip(text)).unwrap()
}

fn v6(text: &str) -> u128 {
    u128::from_ip(ip(text)).unwrap()
}

fn config() -> Config {
    let port = |name: &str, addresses: [&str; 2]| PortConfig {
        name: name.into(),
        mac: Mac([2, 0, 0, 0, 0, 1]),
        mtu: 1500,
        addresses: addresses.map(|a| a.parse().unwrap()).to_vec(),
        twin: true,
    };
    Config {
        ports: vec![port("uplink", ["192.0.2.2/24", "2001:db8::2/64"]), port("cluster", ["10.0.0.2/24", "fd00::2/64"])],
        snat: vec![ip("10.0.0.3"), ip("fd00::3")],
        node_port_addresses: vec![ip("192.0.2.2")],
        flows: FlowLimits { max_per_worker: 1000, ..FlowLimits::default() },
        shared_snat: false,
        targets_max: crate::flow::TARGETS_MAX,
        tunnel: Tunnel::default(),
    }
}

fn backend(address: &str) -> Backend {
    Backend { address: address.parse().unwrap(), weight: 1, state: BackendState::Active }
}

fn service(name: &str, vip: &str, backends: &[&str]) -> Service {
    Service::new(
        ServiceName::new("default", name),
        vec![ServicePort {
            vips: vec![ip(vip)],
            backends: backends.iter().map(|b| backend(b)).collect(),
            ..ServicePort::new(
                Protocol::Tcp,
                Family::of(ip(vip)),
                80,
                MaglevSpec { size: 251, seed: 1, hash_version: MAGLEV_HASH_VERSION },
            )
        }],
    )
}

struct Rig {
    compiler: Compiler,
    state: State,
    network: Network,
    health: Health,
    now_ns: u64,
}

impl Rig {
    fn new() -> Self {
        Self::with(config())
    }

    fn with(config: Config) -> Self {
        let pool = |name: &str, range: &str, announce| Pool {
            name: name.into(),
            ranges: vec![range.parse().unwrap()],
            announce,
            bgp: proto::PoolBgp::default(),
        };
        let pools = vec![
            pool("default", "192.0.2.100-192.0.2.199", Announce::L2),
            pool("far", "203.0.113.0/24", Announce::L2),
            pool("six", "2001:db8::1:0/112", Announce::Routed),
        ];
        let state = State { generation: Generation::default(), services: Services::new(), pools };
        Self { compiler: Compiler::new(config), state, network: Network::default(), health: Health::default(), now_ns: 1 }
    }

    fn put(&mut self, service: Service) {
        self.state.services.insert(service.name.clone(), Arc::new(service));
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Service)) {
        let name = ServiceName::new("default", name);
        change(Arc::make_mut(self.state.services.get_mut(&name).unwrap()));
    }

    fn compile(&mut self) -> Snapshot {
        self.compiler.compile(&self.state, &self.network, &self.health, self.now_ns)
    }
}

/// Backends that a frontend sends new flows to, by address.
fn chosen(snapshot: &Snapshot, vip: &str, port: u16) -> BTreeMap<SocketAddr, BackendId> {
    let Some(frontend) = snapshot.frontend(v4(vip), 6, port) else { return BTreeMap::new() };
    let tuples = (0..2000).map(|n| Tuple {
        source: v4("198.51.100.0") + n,
        destination: v4(vip),
        source_port: 5555,
        destination_port: port,
        protocol: 6,
    });
    let ids = tuples.filter_map(|tuple| frontend.choose_by_hash(&tuple));
    ids.map(|id| (snapshot.backend(id).unwrap().address, id)).collect()
}

fn view(snapshot: &Snapshot, n: usize) -> &ServiceView {
    snapshot.services().values().nth(n).unwrap()
}

fn addresses(chosen: &BTreeMap<SocketAddr, BackendId>) -> Vec<String> {
    chosen.keys().map(ToString::to_string).collect()
}

const TWO: [&str; 2] = ["10.0.0.11:8080", "10.0.0.12:8080"];

#[test]
fn nodes_of_a_set_are_backends_at_the_port_of_each_frontend() {
    let mut rig = Rig::new();
    let node = |text: &str| NodeBackend { address: ip(text), weight: 1, state: BackendState::Active };
    let set = |nodes: &[&str]| {
        let nodes = nodes.iter().map(|text| node(text)).collect();
        Arc::new(NodeSet { name: "v4".to_owned(), family: Some(Family::V4), nodes })
    };
    let mut to_nodes = |nodes: &[&str]| {
        let set = set(nodes);
        for (name, vip, port) in [("a", "192.0.2.100", 30_080), ("b", "192.0.2.101", 30_081)] {
            let mut one = service(name, vip, &[]);
            one.ports[0].nodes = Some(NodesAt { set: Arc::clone(&set), port });
            rig.put(one);
        }
        let snapshot = rig.compile();
        let of = |n| view(&snapshot, n).ports[0].backends.iter().map(|b| b.address.to_string()).collect::<Vec<_>>();
        (of(0), of(1))
    };
    let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    assert_eq!(to_nodes(&["10.0.0.11"]), (texts(&["10.0.0.11:30080"]), texts(&["10.0.0.11:30081"])));
    let both = (texts(&["10.0.0.11:30080", "10.0.0.12:30080"]), texts(&["10.0.0.11:30081", "10.0.0.12:30081"]));
    assert_eq!(to_nodes(&["10.0.0.11", "10.0.0.12"]), both);
}

#[test]
fn a_frontend_sends_new_flows_to_all_its_backends() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    let snapshot = rig.compile();
    assert!(snapshot.ready() && !rig.compiler.initial().ports().is_empty());
    assert_eq!(addresses(&chosen(&snapshot, "192.0.2.100", 80)), TWO);
    assert!(snapshot.frontend(v4("192.0.2.100"), 6, 81).is_none());
    assert!(snapshot.frontend(v4("192.0.2.100"), 17, 80).is_none());
    assert!(view(&snapshot, 0).ports[0].backends.iter().all(|b| b.accepts_new && b.healthy));
}

#[test]
fn two_services_share_a_vip_and_it_stays_when_one_of_them_goes() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    rig.put(service("tls", "192.0.2.100", &["10.0.0.13:8443"]));
    rig.change("tls", |service| service.ports[0].port = 443);
    let both = rig.compile();
    assert_eq!(addresses(&chosen(&both, "192.0.2.100", 80)), TWO);
    assert_eq!(addresses(&chosen(&both, "192.0.2.100", 443)), ["10.0.0.13:8443"]);
    assert_eq!(both.problems(), Vec::<String>::new());
    rig.state.services.remove(&ServiceName::new("default", "web"));
    let one = rig.compile();
    assert!(chosen(&one, "192.0.2.100", 80).is_empty());
    assert_eq!(addresses(&chosen(&one, "192.0.2.100", 443)), ["10.0.0.13:8443"]);
    assert_eq!(one.role(v4("192.0.2.100")), AddressRole::Vip);
    // It does not count as new either: nothing is announced again.
    assert_eq!(one.announced(), both.announced());
}

#[test]
fn node_ports_are_served_on_their_addresses_and_vips_of_ipv6_in_their_family() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    rig.change("web", |service| (service.ports[0].vips, service.ports[0].node_port) = (vec![], Some(30_080)));
    rig.put(service("six", "2001:db8::1:5", &["[fd00::11]:8080"]));
    let snapshot = rig.compile();
    assert_eq!(addresses(&chosen(&snapshot, "192.0.2.2", 30_080)), TWO);
    assert!(snapshot.frontend(v6("2001:db8::1:5"), 6, 80).is_some_and(crate::snapshot::Frontend::is_usable));
    assert_eq!(snapshot.role(v4("192.0.2.2")), AddressRole::Twin(UPLINK));
}

#[test]
fn a_node_port_service_without_addresses_is_refused_with_the_reason() {
    let mut rig = Rig::new();
    rig.put(service("four", "192.0.2.100", &TWO));
    rig.put(service("six", "2001:db8::1:5", &["[fd00::11]:8080"]));
    for name in ["four", "six"] {
        rig.change(name, |service| (service.ports[0].vips, service.ports[0].node_port) = (vec![], Some(30_080)));
    }
    let snapshot = rig.compile();
    let [(name, refusal)] = snapshot.refused() else { panic!("{:?}", snapshot.refused()) };
    assert_eq!((name.name.as_str(), refusal.reason), ("six", Reason::Refused));
    assert!(refusal.message.contains("no `nodePortAddresses`"), "{}", refusal.message);
    assert_eq!(view(&snapshot, 1).refusal.as_ref(), Some(refusal));
}

/// Addresses and slots of the removed backends.
fn removed(snapshot: &Snapshot) -> Vec<(String, u32)> {
    snapshot.removed().iter().map(|(backend, slot)| (backend.address.to_string(), *slot)).collect()
}

#[test]
fn a_removed_backend_drains_then_vanishes_and_its_slot_gets_another_generation() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    let before = chosen(&rig.compile(), "192.0.2.100", 80);
    let id = before[&TWO[0].parse().unwrap()];
    rig.change("web", |service| service.ports[0].backends.retain(|b| b.address != backend(TWO[0]).address));
    rig.now_ns = SECOND_NS;
    let snapshot = rig.compile();
    assert!(snapshot.backend(id).is_some_and(|b| b.removed && !b.accepts_new));
    assert_eq!(removed(&snapshot), [(TWO[0].to_owned(), id.slot)]);
    assert_eq!(rig.compiler.next_due_ns(), Some(301 * SECOND_NS));
    rig.change("web", |service| service.ports[0].backends.insert(0, backend(TWO[0])));
    assert_eq!(chosen(&rig.compile(), "192.0.2.100", 80), before, "a backend that returns within its drain keeps its slot");
    assert!(removed(&rig.compile()).is_empty());
    rig.change("web", |service| service.ports[0].backends.retain(|b| b.address != backend(TWO[0]).address));
    rig.compile();
    rig.now_ns = 301 * SECOND_NS;
    let snapshot = rig.compile();
    assert!(snapshot.backend(id).is_none() && removed(&snapshot).is_empty());
    assert_eq!(rig.compiler.next_due_ns(), None);
    rig.change("web", |service| service.ports[0].backends.push(backend("10.0.0.13:8080")));
    let snapshot = rig.compile();
    let next = chosen(&snapshot, "192.0.2.100", 80)[&"10.0.0.13:8080".parse().unwrap()];
    assert_eq!((next.slot, next.generation), (id.slot, id.generation + 1));
    assert!(snapshot.backend(id).is_none());
}

#[test]
fn a_listed_backend_that_drains_keeps_its_flows_until_its_drain_ends_and_can_return() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    let id = chosen(&rig.compile(), "192.0.2.100", 80)[&TWO[0].parse().unwrap()];
    let set = |rig: &mut Rig, state| rig.change("web", |service| service.ports[0].backends[0].state = state);
    rig.now_ns = SECOND_NS;
    set(&mut rig, BackendState::Draining);
    let snapshot = rig.compile();
    assert!(snapshot.backend(id).is_some_and(|b| !b.removed && !b.accepts_new));
    assert_eq!(rig.compiler.next_due_ns(), Some(301 * SECOND_NS));
    rig.now_ns = 300 * SECOND_NS;
    assert!(rig.compile().backend(id).is_some(), "other changes do not prolong it");
    rig.now_ns = 301 * SECOND_NS;
    rig.compile();
    assert!(rig.compiler.next_due_ns().is_some_and(|due_ns| due_ns <= rig.now_ns), "its slot is freed at once");
    assert!(rig.compile().backend(id).is_none());
    assert_eq!(rig.compiler.next_due_ns(), None);
    set(&mut rig, BackendState::Active);
    assert_eq!(addresses(&chosen(&rig.compile(), "192.0.2.100", 80)), TWO, "it takes flows again");
    // A drain that ends in time costs no flow, and the next one is counted from its own beginning.
    let id = chosen(&rig.compile(), "192.0.2.100", 80)[&TWO[0].parse().unwrap()];
    set(&mut rig, BackendState::Draining);
    rig.compile();
    rig.now_ns += 200 * SECOND_NS;
    set(&mut rig, BackendState::Active);
    rig.compile();
    rig.now_ns += 200 * SECOND_NS;
    set(&mut rig, BackendState::Draining);
    assert!(rig.compile().backend(id).is_some());
    assert_eq!(rig.compiler.next_due_ns(), Some(rig.now_ns + 300 * SECOND_NS));
}

#[test]
fn the_backends_of_a_deleted_service_drain_and_its_vip_is_unused() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    let snapshot = rig.compile();
    let id = chosen(&snapshot, "192.0.2.100", 80)[&TWO[0].parse().unwrap()];
    assert_eq!(snapshot.role(v4("192.0.2.100")), AddressRole::Vip);
    rig.state.services.clear();
    let snapshot = rig.compile();
    assert!(snapshot.backend(id).is_some_and(|b| b.removed));
    assert!(snapshot.frontend(v4("192.0.2.100"), 6, 80).is_none());
    assert_eq!(snapshot.role(v4("192.0.2.100")), AddressRole::PoolUnused);
}

#[test]
fn a_target_is_shared_by_services_and_keeps_its_slot_until_flows_and_ports_have_rested() {
    let mut rig = Rig::new();
    rig.put(service("one", "192.0.2.100", &TWO[..1]));
    rig.put(service("two", "192.0.2.101", &TWO[..1]));
    let target = |snapshot: &Snapshot, vip: &str| {
        let id = *chosen(snapshot, vip, 80).values().next().unwrap();
        (id.slot, snapshot.backend(id).unwrap().target)
    };
    let snapshot = rig.compile();
    let (one, two) = (target(&snapshot, "192.0.2.100"), target(&snapshot, "192.0.2.101"));
    assert!(one.0 != two.0 && one.1 == two.1);
    rig.state.services.clear();
    rig.compile();
    rig.now_ns += 300 * SECOND_NS;
    rig.compile();
    rig.put(service("other", "192.0.2.102", &TWO[1..]));
    assert_ne!(target(&rig.compile(), "192.0.2.102").1, one.1, "it rests");
    rig.put(service("again", "192.0.2.103", &TWO[..1]));
    assert_eq!(target(&rig.compile(), "192.0.2.103").1, one.1, "and still belongs to its target");
    rig.state.services.remove(&ServiceName::new("default", "again"));
    rig.compile();
    rig.now_ns += 300 * SECOND_NS;
    rig.compile();
    rig.now_ns += 2 * targets::nanoseconds(SNAT_PORT_REST);
    rig.put(service("late", "192.0.2.104", &["10.0.0.14:8080"]));
    assert_eq!(target(&rig.compile(), "192.0.2.104").1, one.1.next(), "it belongs to another target, with the next generation");
}

fn neighbour(port: PortIndex, address: &str, last: u8) -> Neighbour {
    Neighbour { link: port.into(), address: ip(address), mac: Mac([2, 0, 0, 0, 0, last]) }
}

fn route(to: &str, via: Option<&str>, port: PortIndex) -> Route {
    Route { to: to.parse().unwrap(), via: via.map(ip), link: port.into(), weight: 1 }
}

#[test]
fn a_slot_of_a_next_hop_survives_its_mac_and_old_flows_look_again_when_routes_change() {
    let mut rig = Rig::new();
    rig.network.routes = vec![route("0.0.0.0/0", Some("192.0.2.1"), UPLINK), route("10.1.0.0/16", Some("10.0.0.9"), CLUSTER)];
    rig.network.neighbours = vec![neighbour(UPLINK, "192.0.2.1", 1), neighbour(UPLINK, "192.0.2.50", 50)];
    let snapshot = rig.compile();
    let RouteTo::NextHop(router) = snapshot.route(v4("198.51.100.7")) else { panic!("no router") };
    let mac = |snapshot: &Snapshot, slot| snapshot.next_hop(slot).and_then(|hop: &NextHop| hop.mac);
    assert_eq!(mac(&snapshot, router), Some(Mac([2, 0, 0, 0, 0, 1])));
    assert!(matches!(snapshot.route(v4("192.0.2.50")), RouteTo::NextHop(slot) if slot != router));
    assert_eq!(snapshot.route(v4("192.0.2.51")), RouteTo::Unresolved { link: UPLINK.into() }, "connected, and not known yet");
    assert_eq!(snapshot.route(v6("2001:db9::1")), RouteTo::None);
    assert!(snapshot.resolves(UPLINK.into(), ip("192.0.2.50")) && !snapshot.resolves(CLUSTER.into(), ip("10.0.0.9")));
    assert_eq!(snapshot.managed_next_hops(), [(UPLINK.into(), ip("192.0.2.1")), (CLUSTER.into(), ip("10.0.0.9"))]);

    rig.network.neighbours[0].mac = Mac([2, 0, 0, 0, 0, 99]);
    let moved = rig.compile();
    assert_eq!((mac(&moved, router), moved.route_epoch()), (Some(Mac([2, 0, 0, 0, 0, 99])), snapshot.route_epoch()));
    rig.network.routes[0].via = Some(ip("192.0.2.50"));
    let rerouted = rig.compile();
    assert!(rerouted.route_epoch() > moved.route_epoch());
    assert_eq!(rerouted.route(v4("198.51.100.7")), rerouted.route(v4("192.0.2.50")));
    rig.network.neighbours.clear();
    let lost = rig.compile();
    assert_eq!(lost.route_epoch(), rerouted.route_epoch(), "flows that held the old router's slot find no exit there");
    assert!(lost.exit(router).is_none());
    assert!(matches!(lost.route(v4("198.51.100.7")), RouteTo::NextHop(slot) if mac(&lost, slot).is_none()));
}

#[test]
fn changing_neighbours_make_flows_look_up_again_only_where_a_slot_is_reassigned() {
    let mut rig = Rig::new();
    rig.network.routes = vec![route("0.0.0.0/0", Some("192.0.2.1"), UPLINK)];
    let mut holders = BTreeMap::new();
    let mut first = None;
    for n in 0..2000_u32 {
        // Every third one stays: it is already present when the next one comes.
        let present = [n, n.saturating_sub(1), n / 3 * 3].map(|n| format!("192.0.{}.{}", 2 + n / 200, 2 + n % 200));
        rig.network.neighbours = present.iter().map(|address| neighbour(UPLINK, address, 9)).collect();
        let snapshot = rig.compile();
        for address in &present {
            let slot = (0_u32..).find(|&slot| snapshot.next_hop(slot).is_some_and(|hop| hop.address == ip(address))).unwrap();
            let holder = holders.entry((snapshot.route_epoch(), slot)).or_insert_with(|| address.clone());
            assert_eq!(holder, address, "slot {slot} is one neighbour's in epoch {}", snapshot.route_epoch());
            assert!(slot < 600, "slots are used again");
        }
        first = first.or(Some(snapshot.route_epoch()));
    }
    let grown = rig.compile().route_epoch() - first.unwrap();
    assert!((1..20).contains(&grown), "2,000 that came and went, in groups of 256: {grown}");
}

#[test]
fn backends_follow_routes_and_on_link_ones_are_their_own_next_hop() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &["10.0.0.11:8080", "10.1.0.5:8080"]));
    let snapshot = rig.compile();
    let ids = chosen(&snapshot, "192.0.2.100", 80);
    let next = |snapshot: &Snapshot, address: &str| snapshot.backend(ids[&address.parse().unwrap()]).unwrap().next_hop;
    assert_eq!(next(&snapshot, "10.1.0.5:8080"), UNRESOLVED);
    let on_link = next(&snapshot, "10.0.0.11:8080");
    assert_eq!(snapshot.next_hop(on_link), Some(&NextHop { link: CLUSTER.into(), mac: None, address: ip("10.0.0.11") }));
    assert_eq!(snapshot.managed_next_hops(), [(CLUSTER.into(), ip("10.0.0.11"))]);
    rig.network.routes = vec![route("10.1.0.0/16", Some("10.0.0.9"), CLUSTER)];
    rig.network.neighbours = vec![neighbour(CLUSTER, "10.0.0.11", 11)];
    let snapshot = rig.compile();
    assert_eq!(snapshot.next_hop(next(&snapshot, "10.1.0.5:8080")).map(|hop| hop.address), Some(ip("10.0.0.9")));
    assert_eq!(next(&snapshot, "10.0.0.11:8080"), on_link);
    assert!(snapshot.resolves(CLUSTER.into(), ip("10.0.0.11")));
}

#[test]
fn each_address_has_one_role() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    rig.network.addresses = vec![ip("192.0.2.77")];
    let snapshot = rig.compile();
    let rows = [
        ("192.0.2.100", AddressRole::Vip),
        ("192.0.2.101", AddressRole::PoolUnused),
        ("192.0.2.200", AddressRole::Elsewhere),
        ("192.0.2.99", AddressRole::Elsewhere),
        ("10.0.0.3", AddressRole::Snat),
        ("10.0.0.2", AddressRole::Twin(CLUSTER)),
        ("192.0.2.77", AddressRole::Twin(UPLINK)),
        ("8.8.8.8", AddressRole::Elsewhere),
    ];
    for (address, role) in rows {
        assert_eq!(snapshot.role(v4(address)), role, "{address}");
    }
    assert_eq!(snapshot.role(v6("2001:db8::1:7")), AddressRole::PoolUnused);
    assert_eq!(rig.compiler.initial().role(v4("10.0.0.3")), AddressRole::Snat);
}

#[test]
fn arp_is_answered_for_vips_in_a_ports_subnet_for_snat_addresses_and_for_ports_without_twin() {
    let mut config = config();
    config.ports[1].twin = false;
    let mut rig = Rig::with(config);
    rig.put(service("web", "192.0.2.100", &TWO));
    let first = rig.compile();
    rig.put(service("far", "203.0.113.5", &TWO));
    rig.put(service("more", "192.0.2.101", &TWO));
    let snapshot = rig.compile();
    let rows = [
        (UPLINK, "192.0.2.100", true),
        (UPLINK, "192.0.2.102", false),
        (CLUSTER, "192.0.2.100", false),
        (CLUSTER, "10.0.0.3", true),
        (CLUSTER, "10.0.0.2", true),
        (UPLINK, "192.0.2.2", false),
        (UPLINK, "203.0.113.5", false),
    ];
    for (port, address, answers) in rows {
        assert_eq!(snapshot.answers_for(port.into(), v4(address)), answers, "{address} on {port:?}");
    }
    assert!(
        matches!(snapshot.problems(), [problem] if problem.contains("VIP 203.0.113.5 of pool far")),
        "{:?}",
        snapshot.problems()
    );
    let since = |address: &str| snapshot.announced().iter().find(|(_, a, _)| *a == ip(address)).map(|&(.., since)| since);
    assert_eq!((since("192.0.2.100"), since("192.0.2.101")), (Some(first.sequence()), Some(snapshot.sequence())));
}

#[test]
fn answered_addresses_count_as_new_when_their_port_has_moved_to_another_cable() {
    let mut rig = Rig::with(config());
    let first = rig.compile().sequence();
    let since = |snapshot: &Snapshot, address: &str| {
        snapshot.announced().iter().find(|(_, a, _)| *a == ip(address)).map(|&(.., since)| since)
    };
    let before = rig.compile();
    assert_eq!(since(&before, "10.0.0.3"), since(&before, "fd00::3"));
    assert!(since(&before, "10.0.0.3") <= Some(first), "nothing has changed");
    for moves in [1, 2] {
        rig.network.moves = vec![0, moves];
        let moved = rig.compile();
        assert_eq!(since(&moved, "10.0.0.3"), Some(moved.sequence()), "move {moves}");
        assert_eq!(since(&rig.compile(), "10.0.0.3"), Some(moved.sequence()), "once for each move");
    }
    let last = since(&rig.compile(), "10.0.0.3");
    rig.network.moves = vec![1, 2];
    assert_eq!(since(&rig.compile(), "10.0.0.3"), last, "the other port has moved");
}

#[test]
fn without_a_snat_address_for_its_way_a_frontend_is_refused() {
    let mut config = config();
    config.snat = vec![ip("10.0.0.3"), ip("172.16.0.1")];
    let mut rig = Rig::with(config.clone());
    let snapshot = rig.compile();
    let addresses = |port| snapshot.snat::<u32>(port, 0).iter().map(|a| (a.address, a.index)).collect::<Vec<_>>();
    assert_eq!(addresses(CLUSTER.into()), [(v4("10.0.0.3"), 0), (v4("172.16.0.1"), 1)]);
    assert_eq!(addresses(UPLINK.into()), [(v4("172.16.0.1"), 1)], "an address in no prefix serves all ports");
    rig.put(service("six", "2001:db8::1:5", &["[fd00::11]:8080"]));
    let snapshot = rig.compile();
    assert!(snapshot.frontend(v6("2001:db8::1:5"), 6, 80).is_none());
    let [(name, refusal)] = snapshot.refused() else { panic!("{:?}", snapshot.refused()) };
    assert_eq!((name.name.as_str(), refusal.reason), ("six", Reason::Refused));
    assert!(refusal.message.contains("no SNAT address for IPv6"), "{}", refusal.message);
    let found = |at: &str| snapshot.refused_at(Protocol::Tcp, at.parse().unwrap()).map(|view| view.name.to_string());
    assert_eq!(found("[2001:db8::1:5]:80"), Some("default/six".to_owned()), "whoever asks for it learns why");
    assert_eq!((found("[2001:db8::1:5]:81"), found("192.0.2.100:80")), (None, None));

    config.snat = vec![ip("10.0.0.3")];
    let mut rig = Rig::with(config);
    rig.put(service("web", "192.0.2.100", &["10.0.0.11:80", "192.0.2.60:80"]));
    assert_eq!(self::addresses(&chosen(&rig.compile(), "192.0.2.100", 80)), ["10.0.0.11:80"], "the other is behind the uplink");
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    rig.change("web", |service| service.ports[0].maglev.hash_version += 1);
    let snapshot = rig.compile();
    assert!(snapshot.frontend(v4("192.0.2.100"), 6, 80).is_none());
    assert_eq!(snapshot.refused()[0].1.reason, Reason::Unsupported);
    assert!(view(&snapshot, 0).refusal.is_some());
}

#[test]
fn of_two_services_at_the_same_frontend_the_first_gets_it_and_the_other_is_reported() {
    let mut rig = Rig::new();
    rig.put(service("a", "192.0.2.100", &TWO[..1]));
    rig.put(service("b", "192.0.2.100", &TWO[1..]));
    let snapshot = rig.compile();
    assert_eq!(addresses(&chosen(&snapshot, "192.0.2.100", 80)), TWO[..1]);
    assert_eq!(snapshot.problems(), ["default/b does not get tcp 192.0.2.100:80: another service has it"]);
}

#[test]
fn services_that_did_not_change_share_their_tables() {
    let mut rig = Rig::new();
    rig.put(service("a", "192.0.2.100", &TWO));
    rig.put(service("b", "192.0.2.101", &TWO));
    let before = rig.compile();
    rig.change("b", |service| service.ports[0].backends.truncate(1));
    let after = rig.compile();
    assert!(Arc::ptr_eq(before.frontends.get(0).unwrap(), after.frontends.get(0).unwrap()));
    assert!(!Arc::ptr_eq(before.frontends.get(1).unwrap(), after.frontends.get(1).unwrap()));
    assert!(Arc::ptr_eq(&before.v4.frontends, &after.v4.frontends) && Arc::ptr_eq(&before.routes, &after.routes));
}

/// The service, port and backends after one step; `None`: it is removed.
type Wanted = Option<(usize, u16, Vec<u8>, bool)>;

fn described(snapshot: &Snapshot) -> Vec<String> {
    let description_of = |view: &ServiceView| {
        let backends = view.ports.iter().flat_map(|port| &port.backends);
        let backends: Vec<_> = backends.map(|b| (b.address, b.weight, b.healthy, b.accepts_new)).collect();
        let listens: Vec<_> = view.ports.iter().flat_map(|port| &port.frontends).collect();
        let found = |at: &&SocketAddr| {
            let IpAddr::V4(vip) = at.ip() else { return None };
            let frontend = snapshot.frontend(u32::from(vip), 6, at.port())?;
            let of = frontend.backends.iter().map(|id| snapshot.backend(*id).map(|backend| (backend.address, backend.removed)));
            Some((frontend.service.to_string(), of.collect::<Vec<_>>()))
        };
        let found: Vec<_> = listens.iter().filter_map(found).collect();
        format!("{} {:?} {:?} {listens:?} {backends:?} {found:?}", view.name, view.mode, view.refusal)
    };
    let services = snapshot.services().values().map(|view| description_of(view));
    let rest = format!("{:?} {:?} {:?}", snapshot.refused(), snapshot.problems(), snapshot.shortest_idle_timeout());
    let fronts =
        (1..10).map(|n| snapshot.dnat_frontend(v4(&format!("10.0.0.{n}")), 6, 80).map(|front| front.map(|f| (f.vip, f.port))));
    services.chain([rest, format!("{:?}", fronts.collect::<Vec<_>>())]).collect()
}

proptest! {
    #[test]
    fn a_snapshot_after_changes_equals_one_compiled_from_scratch(
        batches in prop::collection::vec(prop::collection::vec((0u8..4, prop::option::weighted(0.8, (
            0usize..5, 80u16..82, prop::collection::btree_set(1u8..10, 0..4).prop_map(|all| all.into_iter().collect()), any::<bool>(),
        ))), 1..4), 1..12),
        failing in prop::collection::vec(prop::collection::vec(1u8..10, 0..3), 12),
    ) {
        let mut rig = Rig::new();
        for (batch, failing) in batches.iter().zip(&failing) {
            for (n, wanted) in batch {
                let wanted: &Wanted = wanted;
                let name = format!("s{n}");
                let Some((mode, port, backends, timeout)) = wanted else {
                    rig.state.services.remove(&ServiceName::new("default", &name));
                    continue;
                };
                let backends: Vec<String> = backends.iter().map(|last| format!("10.0.0.{last}:80")).collect();
                let backends: Vec<&str> = backends.iter().map(String::as_str).collect();
                // Two services share an address.
                let mut service = service(&name, &format!("192.0.2.{}", 100 + n / 2), &backends);
                service.ports[0].port = *port;
                service.mode = Mode::ALL[*mode];
                service.idle_timeout = timeout.then_some(Duration::from_secs(60 + u64::from(*n)));
                rig.put(service);
            }
            rig.health.failing =
                failing.iter().map(|last| (Protocol::Tcp, format!("10.0.0.{last}:80").parse().unwrap())).collect();
            rig.now_ns += SECOND_NS;
            let after = rig.compile();
            let fresh = Compiler::new(config()).compile(&rig.state, &rig.network, &rig.health, rig.now_ns);
            prop_assert_eq!(described(&after), described(&fresh));
            // Next hops of draining backends are managed, too.
            prop_assert!(fresh.managed_next_hops().iter().all(|hop| after.managed_next_hops().contains(hop)));
        }
    }
}

mod after_a_panic;
mod earlier_tables;
mod failing_backends;
mod room;
mod tables_ahead;

#[test]
fn a_route_lookup_says_which_addresses_a_port_leads_to_once_linuxs_routes_are_known() {
    let mut rig = Rig::new();
    let route =
        |to: &str, via: Option<&str>| Route { to: to.parse().unwrap(), via: via.map(ip), link: PortIndex(0).into(), weight: 1 };
    assert!(rig.compile().route_lookup().is_none(), "they are not");
    rig.network.interfaces = Some(vec![7, 9]);
    rig.network.routes =
        vec![route("10.244.0.0/16", Some("10.0.0.99")), route("fd77::/16", Some("fd00::99")), route("fd88::/64", None)];
    rig.network.unreachable = vec!["10.244.1.0/24".parse().unwrap(), "fd77:1::/32".parse().unwrap()];
    let lookup = rig.compile().route_lookup().unwrap();
    assert_eq!(lookup.interfaces(), [7, 9]);
    for (to, expected) in [
        ("10.244.2.1", true),
        ("10.244.1.1", false),
        ("10.99.0.1", false),
        ("fd77:2::1", true),
        ("fd77:1::1", false),
        ("fd88::1", true),
        ("fd99::1", false),
    ] {
        assert_eq!(lookup.has_route(ip(to)), expected, "{to}");
    }
    rig.network.neighbours = vec![Neighbour { link: PortIndex(0).into(), address: ip("10.0.0.99"), mac: Mac([2; 6]) }];
    assert!(rig.compile().route_lookup().unwrap().is_same(&lookup), "a neighbour changes no route");
    rig.network.routes.pop();
    let fewer = rig.compile().route_lookup().unwrap();
    assert!(!fewer.is_same(&lookup) && !fewer.has_route(ip("fd88::1")));
}
