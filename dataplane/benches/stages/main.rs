//! The work whose instructions `make bench-guard` counts: one stage of the engine, many bursts of it, inside
//! [`measured`]. Counts of a simulated processor repeat exactly, unlike times.
//!
//! `stages list` prints the stages; `stages NAME` runs one and prints how many packets `measured` handled, or how many
//! news of flows. It fails if any of them did not end as the stage defines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a wrong stage must stop the count")]

mod gateway;
mod mixed;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dataplane::flow::{FlowMode, FlowReplica, FlowState, ReplicaEvent};
use dataplane::testing::{Packet, Segment};
use dataplane::wire::checksum;
use dataplane::{
    BURST, Buffer, Burst, Config, FlowLimits, Link, Mac, MemoryBuffer, Neighbour, Network, PortConfig, PortIndex, Route, TagKind,
    Tunnel, Vlan, VlanLink, tcp_flags,
};
use ipnet::IpNet;
use proto::limits::MAGLEV_HASH_VERSION;
use proto::{Backend, BackendState, Family, Generation, MaglevSpec, Mode, Protocol, Service, ServiceName, ServicePort, State};

use gateway::{BURSTS, CLUSTER, Gateway, UPLINK, answer, ip};

/// News of partners that a worker takes in one poll.
const NEWS_PER_POLL: usize = 32;
/// Flows that exist before the measurement.
const FLOWS: u16 = 1024;
const VIP: [&str; 2] = ["192.0.2.100", "2001:db8::1:0"];

/// A stage and what it measures.
#[derive(Clone, Copy)]
struct Stage {
    name: &'static str,
    mode: Mode,
    family: Family,
    kind: Kind,
    way: Way,
}

/// The way to backends and clients.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    OnLink,
    /// Backends are behind this many routers.
    Routers(u8),
    /// Both sides are VLANs.
    Tagged,
    /// Clients are behind a router, as most are, and with them all addresses that begin with the same half.
    RoutedClients,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Packets of clients in existing flows.
    ToBackend,
    /// The same without "do not fragment".
    MayFragment,
    /// Packets of backends in existing flows.
    ToClient,
    /// Each packet creates a flow.
    New,
    /// News of own flows for partners, and news of partners, without packets. The polls that they take count.
    Told,
    Shadow(News),
    /// Packets of all kinds in each burst, see [`mixed`].
    Mixed,
}

/// What a partner tells.
#[derive(Clone, Copy, PartialEq, Eq)]
enum News {
    /// A flow that this gateway did not know.
    Begun,
    /// A flow that it knows.
    Again,
    /// The end of a flow that it knows.
    Ended,
}

const fn stage(name: &'static str, mode: Mode, family: Family, kind: Kind) -> Stage {
    Stage { name, mode, family, kind, way: Way::OnLink }
}

const fn nat_by(name: &'static str, way: Way, kind: Kind) -> Stage {
    Stage { way, ..stage(name, Mode::Nat, Family::V4, kind) }
}

const STAGES: [Stage; 29] = [
    stage("nat-v4", Mode::Nat, Family::V4, Kind::ToBackend),
    stage("nat-v4-reply", Mode::Nat, Family::V4, Kind::ToClient),
    nat_by("nat-v4-reply-routed", Way::RoutedClients, Kind::ToClient),
    stage("nat-v4-no-df", Mode::Nat, Family::V4, Kind::MayFragment),
    nat_by("nat-v4-ecmp", Way::Routers(4), Kind::ToBackend),
    nat_by("nat-v4-ecmp-reply", Way::Routers(4), Kind::ToClient),
    nat_by("nat-v4-vlan", Way::Tagged, Kind::ToBackend),
    nat_by("nat-v4-vlan-reply", Way::Tagged, Kind::ToClient),
    stage("nat-v6", Mode::Nat, Family::V6, Kind::ToBackend),
    stage("nat-v6-reply", Mode::Nat, Family::V6, Kind::ToClient),
    stage("dnat-v4", Mode::Dnat, Family::V4, Kind::ToBackend),
    stage("dnat-v4-reply", Mode::Dnat, Family::V4, Kind::ToClient),
    stage("dnat-v6", Mode::Dnat, Family::V6, Kind::ToBackend),
    stage("dsr-v4", Mode::Dsr, Family::V4, Kind::ToBackend),
    stage("dsr-v6", Mode::Dsr, Family::V6, Kind::ToBackend),
    stage("ipip-v4", Mode::Ipip, Family::V4, Kind::ToBackend),
    stage("ipip-v6", Mode::Ipip, Family::V6, Kind::ToBackend),
    stage("gue-v4", Mode::Gue, Family::V4, Kind::ToBackend),
    stage("gue-v6", Mode::Gue, Family::V6, Kind::ToBackend),
    stage("nat-v4-new", Mode::Nat, Family::V4, Kind::New),
    stage("nat-v6-new", Mode::Nat, Family::V6, Kind::New),
    stage("mixed", Mode::Nat, Family::V4, Kind::Mixed),
    stage("told-v4", Mode::Nat, Family::V4, Kind::Told),
    stage("told-v6", Mode::Nat, Family::V6, Kind::Told),
    stage("shadow-v4-begun", Mode::Nat, Family::V4, Kind::Shadow(News::Begun)),
    stage("shadow-v4-again", Mode::Nat, Family::V4, Kind::Shadow(News::Again)),
    stage("shadow-v4-ended", Mode::Nat, Family::V4, Kind::Shadow(News::Ended)),
    stage("shadow-v6-begun", Mode::Nat, Family::V6, Kind::Shadow(News::Begun)),
    stage("shadow-v6-ended", Mode::Nat, Family::V6, Kind::Shadow(News::Ended)),
];

fn vip(family: Family) -> IpAddr {
    ip(VIP[usize::from(family == Family::V6)])
}

fn host(family: Family, net: u8, n: u8) -> IpAddr {
    match family {
        Family::V4 => ip(&format!("10.0.{net}.{n}")),
        Family::V6 => ip(&format!("fd00::{net}:{n}")),
    }
}

/// The networks of the clients and of the cluster, with the gateway's addresses.
const NETWORKS: [[&str; 2]; 2] = [["192.0.2.2/24", "2001:db8::2/64"], ["10.0.0.2/16", "fd00::2/64"]];

/// The link of a port, and the tag of its frames.
fn link(stage: Stage, port: PortIndex) -> (Link, Option<[u8; 4]>) {
    let id = 100 + u16::from(port.0);
    match stage.way {
        Way::OnLink | Way::Routers(_) | Way::RoutedClients => (port.into(), None),
        Way::Tagged => {
            let vlan = Vlan::NONE.with(TagKind::Customer, id).unwrap();
            (Link::new(port, vlan), Some((0x8100 << 16 | u32::from(id)).to_be_bytes()))
        }
    }
}

fn config(stage: Stage) -> Config {
    let port = |name: &str, n: u8, addresses: [&str; 2]| PortConfig {
        name: name.into(),
        mac: Mac([2, 0, 0, 0, 0xaa, n]),
        mtu: 1500,
        addresses: addresses.iter().filter(|_| stage.way != Way::Tagged).map(|a| a.parse().unwrap()).collect(),
        twin: false,
    };
    Config {
        ports: vec![port("uplink", 1, NETWORKS[0]), port("cluster", 2, NETWORKS[1])],
        snat: vec![ip("10.0.0.3"), ip("fd00::3")],
        node_port_addresses: Vec::new(),
        flows: FlowLimits { max_per_worker: 32_768, ..FlowLimits::default() },
        shared_snat: false,
        targets_max: dataplane::flow::TARGETS_MAX,
        tunnel: Tunnel::default(),
    }
}

fn network(stage: Stage) -> Network {
    let family = stage.family;
    let [uplink, cluster] = [UPLINK, CLUSTER].map(|port| link(stage, port).0);
    let routers: Vec<IpAddr> = match stage.way {
        Way::Routers(count) => (0..count).map(|n| host(family, 0, 100 + n)).collect(),
        Way::OnLink | Way::Tagged | Way::RoutedClients => Vec::new(),
    };
    let route = |router: &IpAddr| Route {
        to: IpNet::new(host(family, 1, 0), if family == Family::V4 { 24 } else { 112 }).unwrap(),
        via: Some(*router),
        link: cluster,
        weight: 1,
    };
    let backends = (0..100).map(|n| host(family, 1, n)).filter(|_| routers.is_empty());
    let of_cluster = backends.chain(routers.iter().copied()).map(|address| (cluster, address));
    // Those that open connections are behind a router too.
    let are_routed = stage.kind == Kind::New || stage.way == Way::RoutedClients;
    let clients = (0..4).map(|n| (uplink, client(stage, n).0)).filter(|_| !are_routed);
    let clients_router = are_routed.then(|| host(family, 0, 200));
    let clients_len = match family {
        Family::V4 if stage.way == Way::RoutedClients => 10,
        Family::V4 => 28,
        Family::V6 => 124,
    };
    let to_clients = clients_router.map(|router| Route {
        to: IpNet::new(client(stage, 0).0, clients_len).unwrap().trunc(),
        via: Some(router),
        link: uplink,
        weight: 1,
    });
    let neighbour = |(link, address)| Neighbour { link, address, mac: Mac([2, 0, 0, 0, 0, 1]) };
    let vlan = |(link, addresses): (Link, [&str; 2])| VlanLink {
        link,
        mtu: 1500,
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
    };
    let vlans = [uplink, cluster].into_iter().zip(NETWORKS).filter(|_| stage.way == Way::Tagged);
    let net = |addresses: [&str; 2]| addresses[usize::from(family == Family::V6)].parse::<IpNet>().unwrap().trunc();
    let on_link = vlans.clone().map(|(link, addresses)| Route { to: net(addresses), via: None, link, weight: 1 });
    Network {
        neighbours: of_cluster.chain(clients).chain(clients_router.map(|router| (uplink, router))).map(neighbour).collect(),
        routes: routers.iter().map(route).chain(on_link).chain(to_clients).collect(),
        vlans: vlans.map(vlan).collect(),
        ..Network::default()
    }
}

fn state(stage: Stage) -> State {
    let backend = |n| Backend {
        address: SocketAddr::new(host(stage.family, 1, n), if stage.mode.is_two_way() { 8080 } else { 80 }),
        weight: 1,
        state: BackendState::Active,
    };
    let port = ServicePort {
        vips: vec![vip(stage.family)],
        backends: (0..100).map(backend).collect(),
        ..ServicePort::new(
            Protocol::Tcp,
            stage.family,
            80,
            MaglevSpec { size: 65_537, seed: 0, hash_version: MAGLEV_HASH_VERSION },
        )
    };
    let name = ServiceName::new("bench", "web");
    let service = Service { mode: stage.mode, ..Service::new(name.clone(), vec![port]) };
    State {
        generation: Generation { epoch: "bench".into(), counter: 1 },
        services: [(name, Arc::new(service))].into_iter().collect(),
        pools: Vec::new(),
    }
}

/// The client of a flow: four addresses in turn.
fn client(stage: Stage, flow: u16) -> (IpAddr, u16) {
    let address = match stage.family {
        Family::V4 if stage.way == Way::RoutedClients => ip(&format!("100.64.0.{}", flow % 4)),
        Family::V4 => ip(&format!("192.0.2.{}", 10 + flow % 4)),
        Family::V6 => ip(&format!("2001:db8::{:x}", 16 + flow % 4)),
    };
    (address, 1024 + flow / 4)
}

fn frame(stage: Stage, flow: u16, flags: u8) -> MemoryBuffer {
    let (address, port) = client(stage, flow);
    let segment = Segment::Tcp { ports: [port, 80], flags, sequence: 1, acknowledgement: 2 };
    let mut bytes = Packet::between(address, vip(stage.family), segment).build();
    bytes.resize(bytes.len().max(60), 0);
    if let (_, Some(tag)) = link(stage, UPLINK) {
        bytes.splice(12..12, tag);
    }
    MemoryBuffer::new(&bytes, 0)
}

/// The counted work: one poll.
#[inline(never)]
fn measured(gateway: &mut Gateway) {
    gateway.poll();
}

/// Bursts with one frame for each of the flows.
fn bursts(stage: Stage, flows: std::ops::Range<u16>, flags: u8) -> Vec<Burst<MemoryBuffer>> {
    let flows: Vec<u16> = flows.collect();
    flows.chunks(BURST).map(|flows| flows.iter().map(|flow| frame(stage, *flow, flags)).collect()).collect()
}

/// Packets of existing flows in one direction; returns the number of packets counted.
fn known(gateway: &mut Gateway, stage: Stage) -> usize {
    let mut replies = Vec::new();
    let mut data = bursts(stage, 0..FLOWS, tcp_flags::ACK);
    for (syns, acks) in bursts(stage, 0..FLOWS, tcp_flags::SYN).into_iter().zip(&data) {
        let sent = gateway.pass(Gateway::poll, UPLINK, CLUSTER, syns);
        assert!(sent.is_full(), "every flow of {} must be forwarded", stage.name);
        if stage.mode.is_two_way() {
            let answers = |flags| sent.iter().map(|sent| answer(sent, flags)).collect::<Burst<_>>();
            gateway.pass(Gateway::poll, CLUSTER, UPLINK, answers(tcp_flags::SYN | tcp_flags::ACK));
            gateway.pass(Gateway::poll, UPLINK, CLUSTER, acks.clone());
            replies.push(answers(tcp_flags::ACK));
        } else {
            // The third packet confirms, more than a second after the first.
            gateway.now_ns += 2_000_000_000;
            gateway.pass(Gateway::poll, UPLINK, CLUSTER, acks.clone());
            gateway.pass(Gateway::poll, UPLINK, CLUSTER, acks.clone());
        }
    }
    if stage.kind == Kind::MayFragment {
        data.iter_mut().flatten().for_each(allow_fragments);
    }
    let (from, to, packets) = match stage.kind {
        Kind::ToClient => (CLUSTER, UPLINK, replies),
        _ => (UPLINK, CLUSTER, data),
    };
    // Time has passed since the first flows were seen.
    packets.iter().for_each(|burst| drop(gateway.pass(Gateway::poll, from, to, burst.clone())));
    let all = packets.iter().cycle().take(BURSTS);
    all.map(|burst| gateway.pass(measured, from, to, burst.clone()).len()).sum()
}

/// Clears "do not fragment" in the IPv4 header of a frame.
fn allow_fragments(buffer: &mut MemoryBuffer) {
    let frame = buffer.bytes_mut();
    let sum = checksum::apply(u16::from_be_bytes([frame[24], frame[25]]), checksum::word_delta(0x4000, 0));
    frame[20] &= !0x40;
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// Bursts of new flows.
fn new(gateway: &mut Gateway, stage: Stage) -> usize {
    let flows = u16::try_from(BURSTS * BURST).unwrap();
    bursts(stage, 0..flows, tcp_flags::SYN).into_iter().map(|burst| gateway.pass(measured, UPLINK, CLUSTER, burst).len()).sum()
}

/// Own flows, each told once.
fn told(gateway: &mut Gateway, stage: Stage) -> usize {
    let flows = u16::try_from(BURSTS * BURST).unwrap();
    for (syns, acks) in bursts(stage, 0..flows, tcp_flags::SYN).into_iter().zip(bursts(stage, 0..flows, tcp_flags::ACK)) {
        let sent = gateway.pass(Gateway::poll, UPLINK, CLUSTER, syns);
        let answers = sent.iter().map(|sent| answer(sent, tcp_flags::SYN | tcp_flags::ACK)).collect();
        gateway.pass(Gateway::poll, CLUSTER, UPLINK, answers);
        gateway.pass(Gateway::poll, UPLINK, CLUSTER, acks);
    }
    assert_eq!(gateway.replication.sent().get(), 0, "flows that were told before they were old enough");
    gateway.now_ns += 1_500_000_000;
    for _ in 0..8 * BURSTS {
        measured(gateway);
    }
    usize::try_from(gateway.replication.sent().get()).unwrap()
}

/// A flow of a partner.
fn replica(stage: Stage, flow: u16) -> FlowReplica {
    let (address, port) = client(stage, flow);
    let snat = if stage.family == Family::V4 { "10.0.0.3" } else { "fd00::3" };
    FlowReplica {
        protocol: 6,
        mode: FlowMode::Nat,
        state: FlowState::TcpEstablished,
        client: SocketAddr::new(address, port),
        frontend: SocketAddr::new(vip(stage.family), 80),
        backend: SocketAddr::new(host(stage.family, 1, (flow % 100).to_le_bytes()[0]), 8080),
        snat: Some(SocketAddr::new(ip(snat), 1024 + flow / 100)),
        idle: Duration::ZERO,
        shift: None,
    }
}

/// News of partners' flows.
fn shadows(gateway: &mut Gateway, stage: Stage, news: News) -> usize {
    let flows: Vec<u16> = (0..u16::try_from(BURSTS * BURST).unwrap()).collect();
    let apply = |gateway: &mut Gateway, poll: fn(&mut Gateway), event: fn(FlowReplica) -> ReplicaEvent| {
        let before = gateway.replication.applied().get();
        for flows in flows.chunks(NEWS_PER_POLL) {
            assert!(flows.iter().all(|flow| gateway.replication.give(event(replica(stage, *flow)))));
            poll(gateway);
        }
        usize::try_from(gateway.replication.applied().get() - before).unwrap()
    };
    if news == News::Begun {
        return apply(gateway, measured, ReplicaEvent::Holds);
    }
    apply(gateway, Gateway::poll, ReplicaEvent::Holds);
    apply(gateway, measured, if news == News::Again { ReplicaEvent::Holds } else { ReplicaEvent::Ended })
}

fn main() {
    // `cargo bench` adds flags of its own.
    let wanted = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_else(|| "list".into());
    if wanted == "list" {
        return STAGES.iter().for_each(|stage| println!("{}", stage.name));
    }
    let Some(stage) = STAGES.iter().find(|stage| stage.name == wanted) else {
        eprintln!("stages: unknown stage {wanted:?}; `stages list` prints them");
        std::process::exit(2);
    };
    let owned = match stage.kind {
        Kind::Told => Some(1),
        Kind::Shadow(_) => Some(0),
        _ => None,
    };
    let start =
        || Gateway::new(Config { shared_snat: owned.is_some(), ..config(*stage) }, &network(*stage), &state(*stage), owned);
    let mut gateway = if stage.kind == Kind::Mixed { mixed::gateway() } else { start() };
    let packets = match stage.kind {
        Kind::Mixed => mixed::run(&mut gateway, measured),
        Kind::New => new(&mut gateway, *stage),
        Kind::Told => told(&mut gateway, *stage),
        Kind::Shadow(news) => shadows(&mut gateway, *stage, news),
        _ => known(&mut gateway, *stage),
    };
    assert_eq!(packets, BURSTS * BURST, "packets of {} that were forwarded, or news that were told or applied", stage.name);
    println!("{packets}");
}
