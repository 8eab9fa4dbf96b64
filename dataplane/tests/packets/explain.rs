//! An explanation agrees with the wire: each packet is explained first, twice, then sent, and what happens to it is
//! what the explanation said. The explanations change nothing, otherwise schedulers, affinity and ports would differ.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::flow::{FlowLimits, FlowMode};
use dataplane::forward::{ExplainError, ExplainedPacket, Explainer, Explanation, FlowEffect, Outcome, PacketKind, TunnelEnds};
use dataplane::testing::{Packet, Segment};
use dataplane::workers::Steering;
use dataplane::{Config, DropReason, Link, PacketOutcome, PortIndex, tcp_flags};
use proto::{BackendState, Mode, Protocol, Scheduler, Service, ServiceName};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, config, ends, ip, network, state};

/// Packets that are explained, over all tests.
const PACKETS: usize = 10_000;

/// A generator that repeats its numbers in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ mixed >> 31) % limit as u64).unwrap()
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Behind a router, on the link, refused by source ranges; of the gateway, a backend, a VIP, and of none.
const CLIENTS: [[&str; 2]; 10] = [
    ["198.51.100.7", "2001:db8:1::7"],
    ["198.51.100.8", "2001:db8:1::8"],
    ["198.51.100.9", "2001:db8:1::9"],
    ["192.0.2.10", "2001:db8::ffff"],
    ["203.0.113.5", "2001:db8:7::5"],
    ["192.0.2.2", "2001:db8::2"],
    ["10.0.0.11", "fd00::11"],
    ["192.0.2.100", "2001:db8::1:0"],
    ["169.254.1.1", "fe80::1"],
    ["127.0.0.1", "::1"],
];
/// Two services, an unused address of a pool, a SNAT address, an address of a port, a backend, and an address elsewhere.
const SERVERS: [[&str; 2]; 7] = [
    ["192.0.2.100", "2001:db8::1:0"],
    ["192.0.2.101", "2001:db8::1:1"],
    ["192.0.2.119", "2001:db8::1:9"],
    ["10.0.0.3", "fd00::3"],
    ["192.0.2.2", "2001:db8::2"],
    ["10.0.0.12", "fd00::12"],
    ["198.51.100.200", "2001:db8:1::200"],
];

fn explainer() -> Explainer {
    Explainer::new(Steering::own_hash(1, 7), 7)
}

fn explain(rig: &mut Rig, packet: &ExplainedPacket, explainer: &mut Explainer) -> Explanation {
    let snapshot = rig.publisher.current();
    explainer.explain(packet, &snapshot, |_, inquired| Ok::<_, Infallible>(rig.ask(inquired))).unwrap()
}

/// The packet that the explanation is about.
fn built(packet: &ExplainedPacket, kind: PacketKind) -> Packet {
    let ports = [packet.source.port(), packet.destination.port()];
    let is_first = kind == PacketKind::First;
    let flags = if is_first { tcp_flags::SYN } else { tcp_flags::ACK };
    let segment = match packet.protocol {
        Protocol::Tcp => Segment::Tcp { ports, flags, sequence: 1000, acknowledgement: 0 },
        Protocol::Udp => Segment::Udp { ports, checksum: true },
        Protocol::Sctp => Segment::Sctp { ports, tag: u32::from(!is_first) },
    };
    let sent = Packet::between(packet.source.ip(), packet.destination.ip(), segment);
    match packet.protocol {
        Protocol::Sctp if is_first => sent.payload(&[1, 0, 0, 20, 1, 2, 3, 4, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 9]),
        Protocol::Sctp => sent.payload(&[0, 3, 0, 20, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]),
        _ => sent,
    }
}

/// Explains a packet, sends it, and compares. Returns the explanation and what left by which port.
fn check(rig: &mut Rig, packet: &ExplainedPacket, explainer: &mut Explainer) -> (Explanation, Option<Vec<u8>>) {
    let flows = rig.counters.flows.get();
    let first = explain(rig, packet, explainer);
    let said = explain(rig, packet, explainer);
    assert!(rig.counters.flows.get() <= flows, "an explanation begins no flow");
    assert_eq!((first.outcome, first.leaves), (said.outcome, said.leaves), "an explanation changes nothing: {packet:?}");
    let sent = rig.sent(UPLINK).len() + rig.sent(CLUSTER).len();
    assert_eq!(sent, 0, "an explanation sends nothing");
    let happened = rig.put(said.link.port(), &built(packet, said.kind).build());
    let belongs = rig.worker.observer_mut().0.first().and_then(|(_, belongs)| *belongs);
    let context = format!("{packet:?} at {}: {said:?}, and then {happened:?}", rig.now);
    let (mut by_uplink, mut by_cluster) = (rig.sent(UPLINK), rig.sent(CLUSTER));
    for port in [UPLINK, CLUSTER] {
        rig.to_linux(port);
    }
    let limited = happened == Some(PacketOutcome::Drop(DropReason::AnswerLimited));
    let mut left = None;
    match said.outcome {
        Outcome::Forward => {
            let leaves = said.leaves.unwrap();
            assert_eq!(happened, Some(PacketOutcome::Forward(leaves.link.port())), "{context}");
            assert_eq!(belongs.unwrap().backend, leaves.backend, "{context}");
            let sent = if leaves.link.port() == UPLINK { &mut by_uplink } else { &mut by_cluster };
            let frame = sent.pop().unwrap();
            assert_eq!(frame[..6], leaves.mac.0, "{context}");
            let (source, destination) = ends(&frame);
            match leaves.tunnel {
                None => assert_eq!((source, destination), (leaves.source, leaves.destination), "{context}"),
                Some(TunnelEnds { source: from, destination: to, ports: None }) => {
                    assert_eq!((source.ip(), destination.ip()), (from, to), "{context}")
                }
                Some(TunnelEnds { source: from, destination: to, ports: Some((source_port, port)) }) => {
                    let outer = (SocketAddr::new(from, source_port), SocketAddr::new(to, port));
                    assert_eq!((source, destination), outer, "{context}");
                }
            }
            left = Some(frame);
        }
        Outcome::Wait(..) => assert_eq!(happened, None, "{context}"),
        Outcome::Linux(link) => assert_eq!(happened, Some(PacketOutcome::Linux(link.port())), "{context}"),
        Outcome::RefusedByReset | Outcome::RefusedByIcmp | Outcome::OtherIcmp => {
            assert!(limited || matches!(happened, Some(PacketOutcome::Reply(_))), "{context}");
        }
        Outcome::Reset(reason) | Outcome::Drop(reason) => {
            assert!(happened == Some(PacketOutcome::Drop(reason)), "{context}");
        }
    }
    (said, left)
}

/// A random packet: of a client, or the reply to one that was forwarded.
fn packet(numbers: &mut Numbers, answers: &[ExplainedPacket]) -> ExplainedPacket {
    if !answers.is_empty() && numbers.below(3) == 0 {
        return numbers.one(answers);
    }
    let family = numbers.below(2);
    let client = if numbers.below(4) > 0 { numbers.below(4) } else { numbers.below(CLIENTS.len()) };
    let (protocol, server, port) = match numbers.below(8) {
        0..3 => (Protocol::Tcp, 0, 80),
        3..5 => (Protocol::Udp, 1, 53),
        5 => (Protocol::Sctp, 0, 80),
        _ => (
            numbers.one(&[Protocol::Tcp, Protocol::Udp, Protocol::Sctp]),
            numbers.below(SERVERS.len()),
            numbers.one(&[53, 80, 8080, 30080, 5353]),
        ),
    };
    let source_port =
        if numbers.below(10) == 0 { numbers.one(&[80, 53, 8080]) } else { 5000 + u16::try_from(numbers.below(12)).unwrap() };
    ExplainedPacket {
        protocol,
        source: SocketAddr::new(ip(CLIENTS[client][family]), source_port),
        destination: SocketAddr::new(ip(SERVERS[server][family]), port),
        kind: numbers.one(&[None, None, Some(PacketKind::First), Some(PacketKind::Later)]),
        link: numbers.one(&[None, None, None, Some(Link::from(UPLINK)), Some(Link::from(CLUSTER))]),
    }
}

/// The reply to a frame that was sent to a backend of a two-way mode.
fn reply_to(packet: &ExplainedPacket, said: &Explanation, frame: &[u8], mode: Mode) -> Option<ExplainedPacket> {
    let is_two_way = matches!(mode, Mode::Nat | Mode::Dnat);
    let (source, destination) = ends(frame);
    (is_two_way && said.leaves?.link.port() == CLUSTER).then_some(ExplainedPacket {
        source: destination,
        destination: source,
        kind: Some(PacketKind::Later),
        link: None,
        ..*packet
    })
}

/// Changes what the gateway knows: health, drains, weights, source ranges, affinity.
fn change(rig: &mut Rig, numbers: &mut Numbers, mode: Mode, scheduler: Scheduler, affinity: bool) {
    rig.state = state();
    rig.network = network();
    rig.health.failing.clear();
    for name in ["web", "dns"] {
        let name = ServiceName::new("default", name);
        let service = &rig.state.services[&name];
        let mut changed = Service { mode, scheduler, ..Service::clone(service) };
        if affinity {
            changed.affinity = Some(std::time::Duration::from_secs(20));
        }
        if numbers.below(2) == 0 {
            let ranges = ["198.51.100.0/24", "192.0.2.0/24", "2001:db8:1::/48", "2001:db8::/64"];
            changed.source_ranges = Some(ranges.map(|net| net.parse().unwrap()).to_vec());
        }
        for port in &mut changed.ports {
            for backend in &mut port.backends {
                match numbers.below(8) {
                    0 => backend.weight = 0,
                    1 => backend.weight = 3,
                    2 => backend.state = BackendState::Draining,
                    3 => drop(rig.health.failing.insert((port.protocol, backend.address))),
                    _ => {}
                }
            }
            if numbers.below(4) == 0 {
                port.backends.remove(0);
            }
            if numbers.below(12) == 0 {
                port.backends.clear();
            }
        }
        rig.state.services.insert(name, Arc::new(changed));
    }
    if !matches!(mode, Mode::Nat | Mode::Dnat) {
        rig.set_backend_ports();
    }
    rig.state.generation.counter += 1;
    rig.publish();
}

/// Sends random packets, each after its explanation. Returns how often each thing happened to a flow, and how many packets
/// were forwarded.
fn run(seed: u64, mode: Mode, scheduler: Scheduler, affinity: bool, max_flows: u32, packets: usize) -> [usize; 6] {
    let config = Config { flows: FlowLimits { max_per_worker: max_flows, ..config(max_flows).flows }, ..config(max_flows) };
    let explainer = &mut explainer();
    let (mut rig, mut numbers) = (Rig::with_config(config), Numbers(seed));
    let (mut answers, mut seen) = (Vec::new(), [0; 6]);
    for number in 0..packets {
        if number % 100 == 0 {
            change(&mut rig, &mut numbers, mode, scheduler, affinity);
        }
        rig.now += [SECOND / 4, SECOND / 4, 2 * SECOND, 12 * SECOND].get(numbers.below(24)).copied().unwrap_or(0);
        rig.worker.poll(rig.now);
        let packet = packet(&mut numbers, &answers);
        let (said, left) = check(&mut rig, &packet, explainer);
        let effects = [FlowEffect::None, FlowEffect::Continues, FlowEffect::Begins, FlowEffect::Ends, FlowEffect::Replaces];
        seen[effects.iter().position(|effect| *effect == said.effect).unwrap()] += 1;
        seen[5] += usize::from(left.is_some());
        if let Some(answer) = left.and_then(|frame| reply_to(&packet, &said, &frame, mode)) {
            answers.push(answer);
            if answers.len() > 30 {
                answers.remove(0);
            }
        }
    }
    seen
}

#[test]
fn explanations_agree_with_the_wire_in_every_mode() {
    let settings = [
        (Mode::Nat, Scheduler::Maglev, false, 4096),
        (Mode::Nat, Scheduler::RoundRobin, false, 4096),
        (Mode::Nat, Scheduler::LeastConnections, false, 4096),
        (Mode::Nat, Scheduler::Maglev, true, 4096),
        (Mode::Nat, Scheduler::Maglev, false, 6),
        (Mode::Dnat, Scheduler::Maglev, false, 4096),
        (Mode::Dnat, Scheduler::NeverQueue, false, 4096),
        (Mode::Dsr, Scheduler::Maglev, false, 4096),
        (Mode::Dsr, Scheduler::SourceHash, true, 6),
        (Mode::Ipip, Scheduler::Maglev, false, 4096),
        (Mode::Gue, Scheduler::RoundRobin, false, 4096),
        (Mode::Gue, Scheduler::Maglev, true, 4096),
    ];
    let mut ended = 0;
    for (seed, (mode, scheduler, affinity, max_flows)) in (1..).zip(settings) {
        let packets = PACKETS / settings.len() + 1;
        let [none, continues, begins, ends, replaces, forwarded] = run(seed, mode, scheduler, affinity, max_flows, packets);
        let seen = format!("{mode:?} {scheduler:?}: {:?}", [none, continues, begins, ends, replaces, forwarded]);
        assert!(none > 0 && continues > 10 && begins > 0, "{seen}");
        assert!(forwarded > packets / 5 && forwarded < packets, "{seen}");
        ended += ends + replaces;
    }
    assert!(ended > 10, "flows that had ended were met {ended} times");
}

/// A TCP packet from a client to the Service `web`; kind and link are left to the explanation.
fn tcp_to_web() -> ExplainedPacket {
    ExplainedPacket {
        protocol: Protocol::Tcp,
        source: "198.51.100.7:5555".parse().unwrap(),
        destination: "192.0.2.100:80".parse().unwrap(),
        kind: None,
        link: None,
    }
}

#[test]
fn a_packet_that_waits_for_a_neighbour_is_explained_so() {
    let mut rig = Rig::new();
    rig.network.neighbours.retain(|neighbour| neighbour.link.port() == UPLINK);
    rig.publish();
    let explainer = &mut explainer();
    let packet = tcp_to_web();
    let (said, _) = check(&mut rig, &packet, explainer);
    assert!(matches!(said.outcome, Outcome::Wait(link, _) if link.port() == CLUSTER), "{said:?}");
    assert_eq!(said.frontend.unwrap().mode, FlowMode::Nat);
}

#[test]
fn an_explanation_says_why_in_terms_of_the_frontend() {
    let mut rig = Rig::new();
    let explainer = &mut explainer();
    let packet = tcp_to_web();
    let (said, _) = check(&mut rig, &packet, explainer);
    let frontend = said.frontend.unwrap();
    let (entry, size, backend) = frontend.entry.unwrap();
    assert_eq!((frontend.service.to_string().as_str(), size, entry < size), ("default/web", 1021, true));
    assert_eq!((Some(backend), said.effect), (frontend.backend, FlowEffect::Begins));
    assert_eq!((said.kind, said.link, said.worker, said.flow), (PacketKind::First, Link::from(UPLINK), 0, None));
    let (said, _) = check(&mut rig, &packet, explainer);
    let flow = said.flow.unwrap();
    assert_eq!((said.kind, said.effect), (PacketKind::Later, FlowEffect::Continues));
    assert_eq!((flow.client, flow.frontend, flow.backend), (packet.source, packet.destination, backend));
    assert_eq!((flow.state.as_str(), flow.mode.as_str()), ("opening", "nat"));
    assert_eq!(flow.snat, said.leaves.map(|leaves| leaves.source));
}

#[test]
fn addresses_of_different_families_are_refused() {
    let mut rig = Rig::new();
    let packet = ExplainedPacket {
        protocol: Protocol::Udp,
        source: "198.51.100.7:5555".parse().unwrap(),
        destination: "[2001:db8::1:1]:53".parse().unwrap(),
        kind: None,
        link: Some(Link::from(PortIndex(0))),
    };
    let snapshot = rig.publisher.current();
    let explained = explainer().explain(&packet, &snapshot, |_, inquired| Ok::<_, Infallible>(rig.ask(inquired)));
    assert_eq!(explained.unwrap_err(), ExplainError::Families);
}
