//! The mixed stage: what a gateway with one port sees. Every burst holds packets of all modes, both families and both
//! directions, to backends on the link, behind four routers and in a VLAN, of clients behind a router with and without
//! a VLAN tag, one client for each flow. Two packets in a hundred are a SYN or a FIN, one is a fragment.
//!
//! The shares of modes, families, directions, tags and rare packets are those of `sluiced bench --mix`, which measures time
//! and checks bytes (docs/internals/decisions/0170-a-run-of-bench-has-parts.md).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use dataplane::testing::{Packet, Segment, fragments};
use dataplane::{
    BURST, Burst, Config, FlowLimits, Link, Mac, MemoryBuffer, Neighbour, Network, PortConfig, Route, TagKind, Tunnel, Vlan,
    VlanLink, tcp_flags,
};
use ipnet::IpNet;
use proto::limits::MAGLEV_HASH_VERSION;
use proto::{Backend, BackendState, Family, Generation, MaglevSpec, Mode, Protocol, Service, ServiceName, ServicePort, State};

use crate::gateway::{BURSTS, Gateway, UPLINK, answer, ip};

/// The services of twenty flows: 60 % `nat`, each other mode 10 %; 60 % IPv4.
const SERVICES: [(Mode, Family, u8); 10] = [
    (Mode::Nat, Family::V4, 8),
    (Mode::Nat, Family::V6, 4),
    (Mode::Dnat, Family::V4, 1),
    (Mode::Dnat, Family::V6, 1),
    (Mode::Dsr, Family::V4, 1),
    (Mode::Dsr, Family::V6, 1),
    (Mode::Ipip, Family::V4, 1),
    (Mode::Ipip, Family::V6, 1),
    (Mode::Gue, Family::V4, 1),
    (Mode::Gue, Family::V6, 1),
];
/// Flows that exist before the measurement and carry data.
const FLOWS: usize = 1024;
/// Packets of the measurement.
const PACKETS: usize = BURSTS * BURST;
/// Packets of which one is a SYN, one a FIN and one a fragment.
const RARE: usize = 100;
/// Backends of a service: a third on the link, a third behind routers, a third in a VLAN.
const BACKENDS: u8 = 24;
const ROUTERS: u8 = 4;
/// The VLANs of backends and of clients.
const VLANS: [u16; 2] = [101, 102];
/// The flags of packets between SYN and FIN.
const ACK: u8 = tcp_flags::ACK;

/// A flow: the number of its service, and of itself.
#[derive(Clone, Copy)]
struct MixedFlow {
    service: u8,
    number: u16,
}

impl MixedFlow {
    fn new(number: usize) -> Self {
        let turns = (0_u8..).zip(SERVICES).flat_map(|(service, (.., flows))| (0..flows).map(move |_| service));
        Self { service: turns.clone().cycle().nth(number % 20).unwrap(), number: u16::try_from(number).unwrap() }
    }

    const fn mode(self) -> Mode {
        SERVICES[self.service as usize].0
    }

    const fn family(self) -> Family {
        SERVICES[self.service as usize].1
    }

    const fn is_tagged(self) -> bool {
        self.number % 4 == 3
    }

    fn packet(self, flags: u8) -> Packet {
        let segment = Segment::Tcp { ports: [1024 + self.number, 80], flags, sequence: 1, acknowledgement: 2 };
        Packet::between(client(self.family(), self.is_tagged(), self.number), vip(self.service), segment)
    }

    /// A packet of the client.
    fn frame(self, flags: u8) -> MemoryBuffer {
        self.arriving(self.packet(flags).build())
    }

    /// The two fragments of a packet.
    fn fragments(self, identification: u32) -> [MemoryBuffer; 2] {
        let mut packet = self.packet(ACK).payload(&[7; 28]);
        packet.fragmentation = 0;
        let frames = fragments(&packet.build(), 24, identification);
        frames.into_iter().map(|frame| self.arriving(frame)).collect::<Vec<_>>().try_into().unwrap()
    }

    /// A frame on the link of its client.
    fn arriving(self, mut frame: Vec<u8>) -> MemoryBuffer {
        frame.resize(frame.len().max(60), 0);
        if self.is_tagged() {
            frame.splice(12..12, (0x8100 << 16 | u32::from(VLANS[1])).to_be_bytes());
        }
        MemoryBuffer::new(&frame, 0)
    }
}

/// An address in a network of the family: `net` and `host` are its last two numbers.
fn address(networks: [&str; 2], family: Family, net: u8, host: u8) -> IpAddr {
    match family {
        Family::V4 => ip(&format!("{}.{net}.{host}", networks[0])),
        Family::V6 => ip(&format!("{}::{net:x}:{host:x}", networks[1])),
    }
}

/// The client of a flow: one in four is behind the router of a VLAN.
fn client(family: Family, is_tagged: bool, flow: u16) -> IpAddr {
    let [host, net] = flow.to_le_bytes();
    address(if is_tagged { ["198.18", "2001:db8:2"] } else { ["100.64", "2001:db8:1"] }, family, net, host)
}

/// The router to clients.
fn clients_router(family: Family, is_tagged: bool) -> IpAddr {
    if is_tagged { address(["198.51", "2001:db8:3"], family, 100, 254) } else { address(["192.0", "2001:db8"], family, 2, 254) }
}

fn vip(service: u8) -> IpAddr {
    address(["192.0", "2001:db8"], SERVICES[usize::from(service)].1, 2, 100 + service)
}

/// Backend `n` of a service.
fn backend(service: u8, n: u8) -> IpAddr {
    address(["10.0", "fd00"], SERVICES[usize::from(service)].1, 10 + service, n)
}

fn network_of(address: IpAddr, len: [u8; 2]) -> IpNet {
    IpNet::new(address, len[usize::from(address.is_ipv6())]).unwrap().trunc()
}

fn config() -> Config {
    let addresses = ["192.0.2.2/24", "10.0.0.2/16", "2001:db8::2:2/112", "fd00::2/64"];
    let port = PortConfig {
        name: "port".into(),
        mac: Mac([2, 0, 0, 0, 0xaa, 1]),
        mtu: 1500,
        addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        twin: false,
    };
    Config {
        ports: vec![port],
        snat: vec![ip("10.0.0.3"), ip("fd00::3")],
        node_port_addresses: Vec::new(),
        flows: FlowLimits { max_per_worker: 32_768, ..FlowLimits::default() },
        shared_snat: false,
        targets_max: dataplane::flow::TARGETS_MAX,
        tunnel: Tunnel::default(),
    }
}

fn network() -> Network {
    let port = Link::from(UPLINK);
    let [backends, clients] = VLANS.map(|id| Link::new(UPLINK, Vlan::NONE.with(TagKind::Customer, id).unwrap()));
    let vlan = |link, addresses: [&str; 2]| VlanLink { link, mtu: 1500, addresses: addresses.map(|a| a.parse().unwrap()).into() };
    let route = |to, via, link| Route { to, via, link, weight: 1 };
    let mut found = Network {
        vlans: vec![vlan(backends, ["10.1.0.2/24", "fd01::2/64"]), vlan(clients, ["198.51.100.2/24", "2001:db8:3::64:2/112"])],
        ..Network::default()
    };
    for family in [Family::V4, Family::V6] {
        found.routes.push(route(network_of(clients_router(family, true), [24, 112]), None, clients));
        for (link, is_tagged) in [(port, false), (clients, true)] {
            let router = clients_router(family, is_tagged);
            found.routes.push(route(network_of(client(family, is_tagged, 0), [15, 48]), Some(router), link));
            found.neighbours.push(neighbour((link, router)));
        }
        found.neighbours.extend((0..ROUTERS).map(|n| neighbour((port, router(family, n)))));
    }
    for (service, (mode, family, _)) in (0..).zip(SERVICES) {
        // A backend of mode `dsr` is on a link of the gateway.
        let are_routed = mode != Mode::Dsr;
        let (routed, tagged) = (network_of(backend(service, 8), [29, 125]), network_of(backend(service, 16), [29, 125]));
        found.routes.push(route(tagged, None, backends));
        found.routes.extend((0..ROUTERS).filter(|_| are_routed).map(|n| route(routed, Some(router(family, n)), port)));
        let on_link = (0..BACKENDS).filter(|n| !are_routed || !(8..16).contains(n));
        let at = |n| (if n >= 16 { backends } else { port }, backend(service, n));
        found.neighbours.extend(on_link.map(at).map(neighbour));
    }
    found
}

fn router(family: Family, n: u8) -> IpAddr {
    address(["10.0", "fd00"], family, 0, 100 + n)
}

const fn neighbour((link, address): (Link, IpAddr)) -> Neighbour {
    Neighbour { link, address, mac: Mac([2, 0, 0, 0, 0, 1]) }
}

fn state() -> State {
    let service = |(number, (mode, family, _)): (u8, (Mode, Family, u8))| {
        let backend = |n| Backend {
            address: SocketAddr::new(backend(number, n), if mode.is_two_way() { 8080 } else { 80 }),
            weight: 1,
            state: BackendState::Active,
        };
        let maglev = MaglevSpec { size: 65_537, seed: 0, hash_version: MAGLEV_HASH_VERSION };
        let port = ServicePort {
            vips: vec![vip(number)],
            backends: (0..BACKENDS).map(backend).collect(),
            ..ServicePort::new(Protocol::Tcp, family, 80, maglev)
        };
        let name = ServiceName::new("bench", &format!("service-{number}"));
        (name.clone(), Arc::new(Service { mode, ..Service::new(name, vec![port]) }))
    };
    State {
        generation: Generation { epoch: "bench".into(), counter: 1 },
        services: (0..).zip(SERVICES).map(service).collect(),
        pools: Vec::new(),
    }
}

/// The gateway of the stage.
pub(crate) fn gateway() -> Gateway {
    Gateway::new(config(), &network(), &state(), None)
}

/// One packet in, and the packet that leaves.
fn pass(gateway: &mut Gateway, buffer: MemoryBuffer) -> MemoryBuffer {
    let sent = gateway.pass(Gateway::poll, UPLINK, UPLINK, [buffer].into_iter().collect());
    assert_eq!(sent.len(), 1, "a packet of a flow that is opened must be forwarded");
    sent[0].clone()
}

/// Opens a flow, and returns a later packet of its backend, if it sends through the gateway.
fn open(gateway: &mut Gateway, flow: MixedFlow) -> Option<MemoryBuffer> {
    let sent = pass(gateway, flow.frame(tcp_flags::SYN));
    if !flow.mode().is_two_way() {
        return None;
    }
    pass(gateway, answer(&sent, tcp_flags::SYN | ACK));
    pass(gateway, flow.frame(ACK));
    Some(answer(&sent, ACK))
}

/// A number that looks random: xorshift (Marsaglia 2003).
fn next_random(random: &mut u64) -> usize {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    (*random >> 32) as usize
}

/// The packets of the measurement. Each first fragment is followed by the later one, a hundred packets behind.
fn packets(replies: &[Option<MemoryBuffer>]) -> Vec<MemoryBuffer> {
    let mut random = 0x9e37_79b9_7f4a_7c15;
    let mut later = None;
    let mut unused = FLOWS + PACKETS / RARE + 1;
    let mut packet = |n: usize| {
        let flow = MixedFlow::new(next_random(&mut random) % FLOWS);
        let number = n / RARE;
        match n % RARE {
            7 => {
                unused += 1;
                MixedFlow::new(unused).frame(tcp_flags::SYN)
            }
            37 => MixedFlow::new(FLOWS + number).frame(tcp_flags::FIN | ACK),
            63 => match later.take() {
                Some(fragment) => fragment,
                None => {
                    let [first, second] = flow.fragments(u32::try_from(n).unwrap());
                    later = Some(second);
                    first
                }
            },
            _ => {
                let reply = replies[usize::from(flow.number)].as_ref().filter(|_| next_random(&mut random) & 1 == 1);
                reply.cloned().unwrap_or_else(|| flow.frame(ACK))
            }
        }
    };
    (0..PACKETS).map(&mut packet).collect()
}

/// Runs the stage; returns the number of packets counted.
pub(crate) fn run(gateway: &mut Gateway, measured: fn(&mut Gateway)) -> usize {
    // Data flows, then those that end.
    let flows: Vec<_> = (0..=FLOWS + PACKETS / RARE).map(MixedFlow::new).collect();
    let replies: Vec<_> = flows.iter().map(|flow| open(gateway, *flow)).collect();
    // A flow of one direction is confirmed by its third packet, more than a second after the first.
    gateway.now_ns += 2_000_000_000;
    for flow in flows.iter().chain(&flows) {
        pass(gateway, flow.frame(ACK));
    }
    let packets = packets(&replies);
    let burst = |packets: &[MemoryBuffer]| packets.iter().cloned().collect::<Burst<_>>();
    packets.chunks(BURST).map(|packets| gateway.pass(measured, UPLINK, UPLINK, burst(packets)).len()).sum()
}
