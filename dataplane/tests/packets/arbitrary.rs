//! Arbitrary input in arbitrary order: the worker does not panic, its account balances after every poll, no packet
//! leaves for a VIP or a pool address, and no packet for an address of the engine goes to the kernel.

use std::net::IpAddr;
use std::sync::Arc;

use dataplane::testing::{Packet, Segment, arp_request, fragments, neighbour_solicitation};
use dataplane::{Burst, DropReason, Mac, MemoryBuffer, PortIndex};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proto::{BackendState, Mode, Protocol, ServiceName, ServicePort, State};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, backend_mac, ends, ip};

/// Addresses with a meaning for the gateway of the rig, and some without.
const V4: [&str; 13] = [
    "192.0.2.100",
    "192.0.2.101",
    "192.0.2.119",
    "10.0.0.3",
    "192.0.2.2",
    "10.0.0.2",
    "10.0.0.11",
    "10.0.0.12",
    "192.0.2.10",
    "192.0.2.77",
    "198.51.100.7",
    "224.0.0.5",
    "255.255.255.255",
];
const V6: [&str; 12] = [
    "2001:db8::1:0",
    "2001:db8::1:1",
    "2001:db8::1:ffff",
    "fd00::3",
    "2001:db8::2",
    "fd00::2",
    "fd00::11",
    "fd00::12",
    "2001:db8::77",
    "2001:db8:1::7",
    "ff02::1",
    "::",
];
const PORTS: [u16; 8] = [0, 53, 80, 1024, 1025, 5353, 8080, 30080];

/// An event at the gateway.
#[derive(Clone, Debug)]
enum Step {
    Arrives(PortIndex, Vec<u8>),
    FromLinux(PortIndex, Vec<u8>),
    /// A datagram in fragments of this many units of 8 bytes. One of them is left out; the order starts there.
    Fragments(PortIndex, Vec<u8>, usize, Index),
    /// A router on the path of a packet sent earlier reports an ICMP error about it to its sender, quoting this many
    /// bytes.
    Error(Index, PortIndex, u8, usize),
    /// The receiver of a packet sent earlier answers it, with these TCP flags.
    Answered(Index, PortIndex, u8),
    Passes(u64),
    Changes(Change),
    /// Ports accept this many frames per poll.
    Room(usize),
}

/// A change of the gateway's inputs.
#[derive(Clone, Debug)]
enum Change {
    Service(&'static str, bool),
    Mode(&'static str, Mode),
    Backends(&'static str, u8, BackendState),
    /// A service without selector may list any address.
    StrangeBackend(&'static str),
    Health(u8, bool),
    Neighbour(u8, bool),
    Routes(bool),
    Everything,
}

fn address(v4: bool) -> impl Strategy<Value = IpAddr> {
    select(if v4 { V4.as_slice() } else { V6.as_slice() }).prop_map(ip)
}

fn segment() -> impl Strategy<Value = Segment> {
    let ports = || [select(PORTS.as_slice()), select(PORTS.as_slice())];
    prop_oneof![
        4 => (ports(), prop_oneof![Just(2_u8), Just(16), Just(18), Just(4), Just(17), any::<u8>()], any::<u32>()).prop_map(
            |(ports, flags, sequence)| Segment::Tcp { ports, flags, sequence, acknowledgement: !sequence }
        ),
        3 => (ports(), any::<bool>()).prop_map(|(ports, checksum)| Segment::Udp { ports, checksum }),
        2 => (ports(), prop_oneof![Just(0_u32), any::<u32>()]).prop_map(|(ports, tag)| Segment::Sctp { ports, tag }),
        2 => (prop_oneof![select([0, 3, 8, 11, 128, 129, 135, 136].as_slice()), any::<u8>()], any::<u8>(), any::<u32>())
            .prop_map(|(kind, code, rest)| Segment::Icmp { kind, code, rest }),
        1 => any::<u8>().prop_map(|protocol| Segment::Other { protocol }),
    ]
}

/// SCTP payloads: now and then a lone INIT.
fn chunks() -> impl Strategy<Value = Vec<u8>> {
    let chunk = (0..16_u8, any::<u8>(), vec(any::<u8>(), 16)).prop_map(|(kind, flags, body)| {
        let mut chunk = vec![kind, flags, 0, 20];
        chunk.extend(body);
        chunk
    });
    vec(chunk, 1..4).prop_map(|chunks| chunks.concat())
}

fn packet() -> impl Strategy<Value = Vec<u8>> {
    let header = any::<bool>().prop_flat_map(|v4| (address(v4), address(v4)));
    let unusual = (
        prop_oneof![3 => Just(64_u8), 1 => 0..3_u8],
        prop_oneof![3 => Just(0x4000_u16), 1 => Just(0), 1 => any::<u16>()],
        prop_oneof![5 => Just(Vec::new()), 1 => (0..10_usize).prop_flat_map(|words| vec(any::<u8>(), words * 4))],
        prop_oneof![5 => Just(Vec::new()), 1 => vec((select([0, 43, 44, 60].as_slice()), vec(0..4_u8, 8)), 1..4)],
        prop_oneof![3 => vec(any::<u8>(), 0..80), 1 => vec(any::<u8>(), 1400..1600), 2 => chunks()],
        prop_oneof![5 => Just(None), 1 => select([[0xff; 6], [1, 0, 0x5e, 0, 0, 1]].as_slice()).prop_map(Some)],
        0..8_usize,
    );
    (header, segment(), unusual).prop_map(|((source, destination), segment, unusual)| {
        let (hop_limit, fragmentation, options, extensions, payload, group, padding) = unusual;
        let mut packet = Packet {
            hop_limit,
            fragmentation,
            options,
            extensions,
            payload,
            padding,
            ..Packet::between(source, destination, segment)
        };
        if let Some(group) = group {
            packet.destination_mac = Mac(group);
        }
        packet.build()
    })
}

/// A whole datagram or segment large enough for fragments.
fn datagram() -> impl Strategy<Value = Vec<u8>> {
    let ends = any::<bool>().prop_flat_map(|v4| (address(v4), address(v4)));
    (ends, segment(), vec(any::<u8>(), 0..600)).prop_map(|((source, destination), segment, payload)| {
        Packet::between(source, destination, segment).payload(&payload).build()
    })
}

fn question() -> impl Strategy<Value = Vec<u8>> {
    let arp = (address(true), address(true)).prop_map(|(from, to)| match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => arp_request(from, to),
        _ => Vec::new(),
    });
    let solicitation = (address(false), address(false)).prop_map(|(from, to)| match (from, to) {
        (IpAddr::V6(from), IpAddr::V6(to)) => neighbour_solicitation(from, to).build(),
        _ => Vec::new(),
    });
    prop_oneof![arp, solicitation]
}

fn frame() -> impl Strategy<Value = Vec<u8>> {
    let whole = prop_oneof![6 => packet(), 1 => question()].boxed();
    let flips = vec((any::<Index>(), any::<u8>()), 1..4);
    prop_oneof![
        6 => whole.clone(),
        2 => (whole.clone(), flips).prop_map(|(mut frame, flips)| {
            for (at, value) in flips {
                *at.get_mut(&mut frame) = value;
            }
            frame
        }),
        1 => (whole, any::<Index>()).prop_map(|(mut frame, at)| {
            frame.truncate(at.index(frame.len() + 1));
            frame
        }),
        1 => vec(any::<u8>(), 0..128),
    ]
}

fn mode() -> impl Strategy<Value = Mode> {
    select(Mode::ALL.to_vec())
}

/// The state of the rig with all services in this mode.
fn state_in(mode: Mode) -> State {
    let mut state = rig::state();
    let names: Vec<_> = state.services.keys().cloned().collect();
    names.iter().for_each(|name| set_mode(&mut state, name, mode));
    state
}

fn set_mode(state: &mut State, name: &ServiceName, mode: Mode) {
    if let Some(service) = state.services.get_mut(name) {
        Arc::make_mut(service).mode = mode;
    }
}

fn change() -> impl Strategy<Value = Change> {
    let service = || select(["web", "dns", "node-port"].as_slice());
    let backend = || select(rig::BACKENDS.as_slice());
    let state = select([BackendState::Active, BackendState::Draining].as_slice());
    prop_oneof![
        (service(), any::<bool>()).prop_map(|(name, there)| Change::Service(name, there)),
        (service(), mode()).prop_map(|(name, mode)| Change::Mode(name, mode)),
        (service(), backend(), state).prop_map(|(name, n, state)| Change::Backends(name, n, state)),
        service().prop_map(Change::StrangeBackend),
        (backend(), any::<bool>()).prop_map(|(n, fails)| Change::Health(n, fails)),
        (backend(), any::<bool>()).prop_map(|(n, known)| Change::Neighbour(n, known)),
        any::<bool>().prop_map(Change::Routes),
        Just(Change::Everything),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let port = || select([UPLINK, CLUSTER].as_slice());
    prop_oneof![
        8 => (port(), frame()).prop_map(|(port, frame)| Step::Arrives(port, frame)),
        2 => (port(), frame()).prop_map(|(port, frame)| Step::FromLinux(port, frame)),
        6 => (any::<Index>(), port(), prop_oneof![Just(18_u8), Just(16), Just(17), Just(4)])
            .prop_map(|(which, port, flags)| Step::Answered(which, port, flags)),
        3 => (port(), datagram(), 1..100_usize, any::<Index>())
            .prop_map(|(port, frame, eights, first)| Step::Fragments(port, frame, eights, first)),
        3 => (any::<Index>(), port(), select([1_u8, 2, 3, 4, 11, 12].as_slice()), 0..120_usize)
            .prop_map(|(which, port, kind, quoted)| Step::Error(which, port, kind, quoted)),
        2 => prop_oneof![0..SECOND, 0..200 * SECOND, Just(7300 * SECOND)].prop_map(Step::Passes),
        3 => change().prop_map(Step::Changes),
        1 => prop_oneof![Just(usize::MAX), 0..3_usize].prop_map(Step::Room),
    ]
}

/// The destination of a frame with complete IP headers, whatever else is wrong with it.
fn destination(frame: &[u8]) -> Option<IpAddr> {
    match frame.get(12..15)? {
        [8, 0, first] if first >> 4 == 4 => frame.get(30..34).and_then(|a| <[u8; 4]>::try_from(a).ok()).map(IpAddr::from),
        [0x86, 0xdd, first] if first >> 4 == 6 => frame.get(38..54).and_then(|a| <[u8; 16]>::try_from(a).ok()).map(IpAddr::from),
        _ => None,
    }
}

struct World {
    rig: Rig,
    /// The initial mode of the services.
    mode: Mode,
    /// Whether any service has or had mode `dsr`.
    dsr: bool,
    /// Frames that left, to be answered.
    sent: Vec<Vec<u8>>,
}

impl World {
    fn apply(&mut self, step: Step) -> Result<(), TestCaseError> {
        let rig = &mut self.rig;
        match step {
            Step::Arrives(port, frame) => self.arrives(port, &frame),
            Step::FromLinux(port, frame) => {
                let mut burst = Burst::new();
                burst.push(MemoryBuffer::new(&frame, 0));
                prop_assert!(rig.twins[usize::from(port.0)].from_linux.push(burst).is_ok());
            }
            Step::Fragments(port, frame, eights, first) => {
                let mut fragments = fragments(&frame, eights * 8, 7);
                let first = first.index(fragments.len() + 1);
                fragments.rotate_left(first);
                fragments.iter().skip(1).for_each(|fragment| self.arrives(port, fragment));
            }
            Step::Error(which, port, kind, quoted) if !self.sent.is_empty() => {
                if let Some(error) = error_about(&self.sent[which.index(self.sent.len())], kind, quoted) {
                    self.arrives(port, &error);
                }
            }
            Step::Error(..) => {}
            Step::Answered(which, port, flags) if !self.sent.is_empty() => {
                let answer = answer_to(&self.sent[which.index(self.sent.len())], flags);
                self.arrives(port, &answer);
            }
            Step::Answered(..) => {}
            Step::Passes(ns) => rig.now += ns,
            Step::Changes(change) => self.changes(change),
            Step::Room(room) => {
                for port in [UPLINK, CLUSTER] {
                    rig.worker.port_mut(port).unwrap().room = room;
                }
            }
        }
        self.rig.worker.poll(self.rig.now);
        self.check()
    }

    fn arrives(&mut self, port: PortIndex, frame: &[u8]) {
        self.rig.arrive(port, frame, 1);
    }

    fn changes(&mut self, change: Change) {
        let rig = &mut self.rig;
        let name = |name: &str| ServiceName::new("default", name);
        match change {
            Change::Service(service, false) => drop(rig.state.services.remove(&name(service))),
            Change::Service(service, true) => {
                let all = state_in(self.mode).services;
                rig.state.services.insert(name(service), all[&name(service)].clone());
            }
            Change::Mode(service, mode) => {
                self.dsr |= mode == Mode::Dsr;
                set_mode(&mut rig.state, &name(service), mode);
            }
            Change::Backends(service, n, state) => each_port(&mut rig.state, &name(service), |port| {
                match port.backends.iter_mut().find(|b| rig::last_byte(b.address.ip()) == n) {
                    Some(backend) if backend.state != state => backend.state = state,
                    _ => port.backends.retain(|b| rig::last_byte(b.address.ip()) != n),
                }
            }),
            Change::StrangeBackend(service) => each_port(&mut rig.state, &name(service), |port| {
                for (backend, strange) in port.backends.iter_mut().zip(["192.0.2.119", "10.0.0.3", "192.0.2.101"]) {
                    if backend.address.is_ipv4() {
                        backend.address.set_ip(ip(strange));
                    }
                }
                port.backends.sort_by_key(|b| b.address);
            }),
            Change::Health(n, fails) => {
                let tcp = (Protocol::Tcp, format!("10.0.0.{n}:8080").parse().unwrap());
                let udp = (Protocol::Udp, format!("10.0.0.{n}:5353").parse().unwrap());
                for key in [tcp, udp] {
                    let _ = if fails { rig.health.failing.insert(key) } else { rig.health.failing.remove(&key) };
                }
            }
            Change::Neighbour(n, known) => {
                rig.network.neighbours.retain(|neighbour| neighbour.mac != backend_mac(n));
                if known {
                    let all = rig::network().neighbours;
                    rig.network.neighbours.extend(all.into_iter().filter(|neighbour| neighbour.mac == backend_mac(n)));
                }
            }
            Change::Routes(there) => rig.network.routes = if there { rig::network().routes } else { Vec::new() },
            Change::Everything => (rig.state, rig.network) = (state_in(self.mode), rig::network()),
        }
        let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
        rig.publisher.publish(snapshot);
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        let account = self.rig.counters.account();
        prop_assert!(account.closes(), "{:?}", account);
        let pools = self.rig.state.pools.clone();
        let in_pool = |address: IpAddr| pools.iter().flat_map(|pool| &pool.ranges).any(|range| range.contains(address));
        for port in [UPLINK, CLUSTER] {
            for frame in self.rig.sent(port) {
                // In mode `dsr` the VIP is still the destination, towards a backend on the link.
                let is_dsr = self.dsr && rig::BACKENDS.iter().any(|n| frame.starts_with(&backend_mac(*n).0));
                let loops = destination(&frame).is_some_and(in_pool) && !is_dsr;
                prop_assert!(!loops, "left by {:?}: {:02x?}", port, frame);
                self.sent.push(frame);
            }
            for frame in self.rig.to_linux(port) {
                let engines = |address| in_pool(address) || address == ip("10.0.0.3") || address == ip("fd00::3");
                let to = destination(&frame);
                prop_assert!(!to.is_some_and(engines), "to Linux at {:?}: {:02x?}", port, frame);
            }
        }
        let excess = self.sent.len().saturating_sub(64);
        self.sent.drain(..excess);
        Ok(())
    }

    /// After a long idle time nothing is held and no flow is left.
    fn comes_to_rest(mut self) -> Result<(), TestCaseError> {
        for _ in 0..20 {
            self.rig.now += 1000 * SECOND;
            for _ in 0..64 {
                self.rig.now += SECOND / 7;
                self.rig.worker.poll(self.rig.now);
            }
        }
        self.check()?;
        let counters = &self.rig.counters;
        prop_assert_eq!((counters.held.get(), counters.flows.get()), (0, 0));
        let of_backends: u64 = (0..64).map(|slot| counters.sum_of(slot, |of| of.flows.get())).fold(0, u64::wrapping_add);
        prop_assert_eq!(of_backends, 0, "backends are left by their flows");
        Ok(())
    }
}

fn each_port(state: &mut State, name: &ServiceName, edit: impl FnMut(&mut ServicePort)) {
    if let Some(service) = state.services.get_mut(name) {
        Arc::make_mut(service).ports.iter_mut().for_each(edit);
    }
}

/// An ICMP error about a frame, to its sender.
fn error_about(frame: &[u8], kind: u8, quoted: usize) -> Option<Vec<u8>> {
    let (source, from) = match frame.get(12..14)? {
        [8, 0] => (<[u8; 4]>::try_from(frame.get(26..30)?).ok()?.into(), ip("203.0.113.1")),
        [0x86, 0xdd] => (IpAddr::from(<[u8; 16]>::try_from(frame.get(22..38)?).ok()?), ip("2001:db8:9::1")),
        _ => return None,
    };
    let quote = &frame[14..frame.len().min(14 + quoted)];
    Some(Packet::between(from, source, Segment::Icmp { kind, code: 0, rest: 1300 }).payload(quote).build())
}

/// The frame with source and destination swapped, as its receiver would answer: TCP with these flags, SCTP with a chunk
/// derived from them.
fn answer_to(frame: &[u8], flags: u8) -> Vec<u8> {
    let transport_at = match frame.get(12..15) {
        Some([8, 0, 0x45]) => 34,
        Some([0x86, 0xdd, _]) => 54,
        _ => return frame.to_vec(),
    };
    if frame.len() < transport_at + 8 {
        return frame.to_vec();
    }
    let (source, destination) = ends(frame);
    if source.is_ipv4() != destination.is_ipv4() {
        return frame.to_vec();
    }
    let (from, to) = (destination.to_string(), source.to_string());
    let protocol = frame[if transport_at == 34 { 23 } else { 20 }];
    match protocol {
        17 => Packet::udp(&from, &to),
        132 => Packet::sctp(&from, &to).chunk(7, flags & 15),
        _ => Packet::tcp(&from, &to).flags(flags),
    }
    .build()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn in_every_mode_each_packet_is_counted_once_and_nothing_loops(mode in mode(), steps in vec(step(), 1..60)) {
        let mut rig = Rig::with_flows(32);
        rig.state = state_in(mode);
        rig.publish();
        let mut world = World { rig, mode, dsr: mode == Mode::Dsr, sent: Vec::new() };
        for step in steps {
            world.apply(step)?;
        }
        world.comes_to_rest()?;
    }

    #[test]
    fn before_the_first_state_nothing_is_answered_or_forwarded(frames in vec((select([UPLINK, CLUSTER].as_slice()), frame()), 1..60)) {
        let mut rig = Rig::before_state(32);
        for (port, frame) in frames {
            rig.now += SECOND / 100;
            rig.put(port, &frame);
            prop_assert!(rig.sent(UPLINK).is_empty() && rig.sent(CLUSTER).is_empty());
            rig.to_linux(port);
        }
        prop_assert_eq!(rig.drops(DropReason::TxFull), 0);
    }
}
