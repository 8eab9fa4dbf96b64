//! Two real TCP state machines (smoltcp's) talk through the gateway over a bad network: packets are lost, repeated and
//! overtaken on all four ways. What each end receives is what the other has sent, and the backend's stream begins with the
//! header once.
//!
//! `SLUICE_SHIFT_SEEDS=N` plays as many connections; `SLUICE_SHIFT_FIRST=N` begins with that one.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use dataplane::{Config, FlowLimits, PortConfig};
use proto::{Family, Mode, ProxyProtocol};
use smoltcp::iface::{self, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{self, Device, DeviceCapabilities, Medium};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

use super::bridge::{Kind, MILLISECOND, Seg, header, set_proxy_protocol};
use crate::rig::{self, CLUSTER, Rig, UPLINK};

const SYN: u8 = 2;
const ACK: u8 = 16;
/// Number of connections where the environment asks for none: less than 30 s in a debug build.
const SEEDS: u64 = 160;
/// A connection that takes longer is stuck: ten times the longest waits that smoltcp doubles, and more.
const GIVEN_UP: u64 = 3_000_000;

/// Splitmix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }
}

/// A link of IP packets with an end of the gateway.
#[derive(Default)]
struct Wire {
    received: VecDeque<Vec<u8>>,
    sent: Vec<Vec<u8>>,
    mtu: usize,
}

struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

struct Sending<'w>(&'w mut Vec<Vec<u8>>);

impl phy::TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let mut packet = vec![0; len];
        let result = fill(&mut packet);
        self.0.push(packet);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        Some((Received(self.received.pop_front()?), Sending(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        Some(Sending(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        (capabilities.medium, capabilities.max_transmission_unit) = (Medium::Ip, self.mtu);
        capabilities
    }
}

thread_local! {
    /// The time by which both ends stamp their segments, ms.
    static CLOCK: Cell<u64> = const { Cell::new(0) };
}

#[allow(clippy::cast_possible_truncation)] // timestamps wrap
fn stamp() -> u32 {
    CLOCK.get() as u32
}

/// One end of a connection: its stack, and what its program does.
struct End {
    wire: Wire,
    stack: Interface,
    sockets: SocketSet<'static>,
    socket: SocketHandle,
    to_send: Vec<u8>,
    sent: usize,
    received: Vec<u8>,
    expected: usize,
    /// Bytes that it waits for before it sends.
    sends_after: usize,
    /// It closes once it has sent all; otherwise once it has received all too.
    closes_early: bool,
    has_closed: bool,
}

/// What differs between the programs of two ends.
struct Program {
    to_send: Vec<u8>,
    expected: usize,
    sends_after: usize,
    closes_early: bool,
    has_stamps: bool,
}

impl End {
    fn new(address: SocketAddr, mtu: usize, sizes: &[usize], random: &mut Random, program: Program) -> Self {
        let has_stamps = program.has_stamps;
        // smoltcp fills packets without regard to timestamps.
        let mtu = if has_stamps { mtu - 12 } else { mtu };
        let mut wire = Wire { mtu, ..Wire::default() };
        let mut config = iface::Config::new(HardwareAddress::Ip);
        config.random_seed = random.next();
        let now = Instant::from_millis(i64::try_from(CLOCK.get()).unwrap());
        let mut stack = Interface::new(config, &mut wire, now);
        stack.update_ip_addrs(|addresses| addresses.push(IpCidr::new(IpAddress::from(address.ip()), 8)).unwrap());
        let gateway = if address.is_ipv4() { "198.51.100.1" } else { "2001:db8:1::1" };
        match gateway.parse().unwrap() {
            std::net::IpAddr::V4(ip) => stack.routes_mut().add_default_ipv4_route(ip).map(drop).unwrap(),
            std::net::IpAddr::V6(ip) => stack.routes_mut().add_default_ipv6_route(ip).map(drop).unwrap(),
        }
        let mut buffer = || tcp::SocketBuffer::new(vec![0; random.of(sizes)]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket.set_tsval_generator(has_stamps.then_some(stamp));
        let mut sockets = SocketSet::new(Vec::new());
        let socket = sockets.add(socket);
        let Program { to_send, expected, sends_after, closes_early, .. } = program;
        Self {
            wire,
            stack,
            sockets,
            socket,
            to_send,
            sent: 0,
            received: Vec::new(),
            expected,
            sends_after,
            closes_early,
            has_closed: false,
        }
    }

    fn state(&mut self) -> tcp::State {
        self.sockets.get::<tcp::Socket<'_>>(self.socket).state()
    }

    /// The stack and the program work until neither has anything to do now.
    fn run(&mut self, now: u64) {
        let at = Instant::from_millis(i64::try_from(now).unwrap());
        self.stack.poll(at, &mut self.wire, &mut self.sockets);
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(self.socket);
        while socket.can_recv() {
            let received = &mut self.received;
            socket.recv(|bytes| (bytes.len(), received.extend_from_slice(bytes))).unwrap();
        }
        let is_open = !matches!(socket.state(), tcp::State::Listen | tcp::State::SynSent | tcp::State::SynReceived);
        if is_open && self.received.len() >= self.sends_after && self.sent < self.to_send.len() && socket.can_send() {
            self.sent += socket.send_slice(&self.to_send[self.sent..]).unwrap();
        }
        let has_all = self.received.len() >= self.expected;
        if is_open && self.sent == self.to_send.len() && (self.closes_early || has_all) {
            socket.close();
            self.has_closed = true;
        }
        self.stack.poll(at, &mut self.wire, &mut self.sockets);
    }

    /// When its stack has something to do next.
    fn next(&mut self, now: u64) -> Option<u64> {
        let at = Instant::from_millis(i64::try_from(now).unwrap());
        self.stack.poll_at(at, &self.sockets).map(|at| u64::try_from(at.total_millis()).unwrap())
    }
}

/// The network between the gateway and both ends.
struct Network {
    loss: u64,
    duplication: u64,
    reordering: u64,
    has_sack: bool,
    /// Added to the numbers of the client's stream between client and gateway: where they wrap.
    shift: u32,
    /// Frames on their way, by time of arrival and order of departure.
    under_way: BTreeMap<(u64, u64), (Way, Vec<u8>)>,
    departed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    FromClient,
    FromBackend,
    ToClient,
    ToBackend,
}

/// The kinds of options that are changed here: SACK permitted, SACK.
fn change_options(segment: &mut Seg, has_sack: bool, shift: u32) {
    let mut at = 0;
    while at < segment.options.len() {
        let len = match segment.options[at] {
            0 => return,
            1 => 1,
            _ => usize::from(segment.options[at + 1]),
        };
        let option = &mut segment.options[at..at + len];
        match option[0] {
            4 if !has_sack => option.fill(1),
            5 => option[2..].chunks_exact_mut(4).for_each(|edge| {
                let number = u32::from_be_bytes((&*edge).try_into().unwrap());
                edge.copy_from_slice(&number.wrapping_add(shift).to_be_bytes());
            }),
            _ => {}
        }
        at += len;
    }
}

/// A packet without its Ethernet header.
fn frame_of(packet: &[u8]) -> Vec<u8> {
    let kind: &[u8] = if packet[0] >> 4 == 4 { &[8, 0] } else { &[0x86, 0xdd] };
    [&dataplane::testing::OUR_MAC.0[..], &dataplane::testing::PEER_MAC.0, kind, packet].concat()
}

/// Whether a frame is of TCP: the gateway announces its addresses too, and stacks report their groups.
fn is_tcp(frame: &[u8]) -> bool {
    match frame[12..14] {
        [8, 0] => frame[23] == 6,
        [0x86, 0xdd] => frame[20] == 6,
        _ => false,
    }
}

impl Network {
    /// Whether packets may be missed or come late.
    fn is_bad(&self) -> bool {
        self.loss > 0 || self.reordering > 0
    }

    fn depart(&mut self, now: u64, way: Way, frame: Vec<u8>, random: &mut Random) {
        let copies = 1 + u64::from(random.percent(self.duplication));
        for _ in 0..copies {
            if !random.percent(self.loss) {
                let delay = 5 + if random.percent(self.reordering) { random.below(60) } else { 0 };
                self.departed += 1;
                self.under_way.insert((now + delay, self.departed), (way, frame.clone()));
            }
        }
    }

    /// A packet of the client as the gateway gets it.
    fn of_client(&self, packet: &[u8]) -> Vec<u8> {
        let mut segment = Seg::of(&frame_of(packet));
        segment.sequence = segment.sequence.wrapping_add(self.shift);
        change_options(&mut segment, self.has_sack, 0);
        segment.packet().build()
    }

    /// A frame of the gateway as the client gets it.
    fn for_client(&self, frame: &[u8]) -> Vec<u8> {
        let mut segment = Seg::of(frame);
        if segment.flags & ACK != 0 {
            segment.acknowledgement = segment.acknowledgement.wrapping_sub(self.shift);
        }
        change_options(&mut segment, self.has_sack, 0_u32.wrapping_sub(self.shift));
        segment.packet().build()[14..].to_vec()
    }
}

fn data(len: u64, random: &mut Random) -> Vec<u8> {
    (0..len).map(|_| random.next().to_le_bytes()[0]).collect()
}

/// The gateways that are reused, by their frontends and the MTU of their ports.
type Gateways = HashMap<(bool, bool, bool, u16), Rig>;

fn gateway(kind: Kind, mtu: u16) -> Rig {
    let config = rig::config(1024);
    let ports = config.ports.iter().map(|port| PortConfig { mtu, ..port.clone() }).collect();
    // smoltcp waits up to 60 s before it repeats a packet, longer than both ends of a closed connection are waited for.
    let flows = FlowLimits { tcp_closing: Duration::from_secs(600), ..config.flows.clone() };
    let mut gateway = Rig::with_config(Config { ports, flows, ..config });
    gateway.state = rig::state();
    gateway.network = rig::network();
    gateway.keep_backends("web", &[11]);
    set_proxy_protocol(&mut gateway, kind);
    gateway
}

/// What a connection is between, and what goes both ways.
struct Plan {
    kind: Kind,
    mtu: u16,
    client: SocketAddr,
    vip: SocketAddr,
    backend: SocketAddr,
    header: Vec<u8>,
    up: Vec<u8>,
    down: Vec<u8>,
}

impl Plan {
    fn of(random: &mut Random) -> Self {
        let family = random.of(&[Family::V4, Family::V6]);
        let version = random.of(&[ProxyProtocol::V1, ProxyProtocol::V2]);
        let mode = random.of(&[Mode::Nat, Mode::Dnat]);
        let mtus: &[u16] = if family == Family::V4 { &[576, 1500, 9000] } else { &[1280, 1500, 9000] };
        let (mtu, host, port) = (random.of(mtus), random.below(250) + 1, 1024 + random.below(60_000));
        let (client, vip, backend) = match family {
            Family::V4 => (format!("198.51.100.{host}:{port}"), "192.0.2.100:80", "10.0.0.11:8080"),
            Family::V6 => (format!("[2001:db8:1::{host:x}]:{port}"), "[2001:db8::1:0]:80", "[fd00::11]:8080"),
        };
        let (client, vip, backend) = (client.parse().unwrap(), vip.parse().unwrap(), backend.parse().unwrap());
        let lengths = [0, 1, 40, 3_000, 40_000, 120_000];
        let (up, down) = (random.of(&lengths), random.of(&lengths));
        let (up, down) = (data(up, random), data(down, random));
        let kind = Kind { version, family, mode, initial: 0 };
        Self { kind, mtu, client, vip, backend, header: header(version, client, vip, true), up, down }
    }

    /// What the backend shall receive.
    fn expected(&self) -> Vec<u8> {
        [&self.header[..], &self.up].concat()
    }

    /// Which gateway it goes through.
    fn gateway(&self) -> (bool, bool, bool, u16) {
        let Kind { version, family, mode, .. } = self.kind;
        (family == Family::V4, version == ProxyProtocol::V1, mode == Mode::Nat, self.mtu)
    }
}

/// A connection under way.
struct Playing {
    random: Random,
    network: Network,
    /// The client and the backend.
    ends: [End; 2],
    /// After how many bytes of the client its numbers wrap.
    wraps: Option<u32>,
    has_begun: bool,
}

impl Playing {
    fn new(plan: &Plan, mut random: Random) -> Self {
        let has_stamps = random.percent(50);
        // A server either speaks first, or once it knows who speaks.
        let sends_after = if random.percent(50) { 0 } else { plan.header.len() };
        let early = [random.percent(50), random.percent(50)];
        let of_client =
            Program { to_send: plan.up.clone(), expected: plan.down.len(), sends_after: 0, closes_early: early[0], has_stamps };
        let expected = plan.expected().len();
        let of_server = Program { to_send: plan.down.clone(), expected, sends_after, closes_early: early[1], has_stamps };
        let network = Network {
            loss: random.of(&[0, 0, 1, 5, 20]),
            duplication: random.of(&[0, 0, 5, 30]),
            reordering: random.of(&[0, 10, 60]),
            has_sack: random.percent(70),
            shift: 0,
            under_way: BTreeMap::new(),
            departed: 0,
        };
        // smoltcp's own connections get stuck where packets are lost and windows have room for one or two, with or without
        // a header.
        let sizes: &[usize] = match (network.is_bad(), plan.mtu) {
            (true, 9000) => &[65_000, 200_000],
            (true, _) => &[9_000, 65_000, 200_000],
            _ => &[300, 600, 2_000, 9_000, 65_000, 200_000],
        };
        let mut ends = [(plan.client, of_client), (plan.backend, of_server)]
            .map(|(address, program)| End::new(address, plan.mtu.into(), sizes, &mut random, program));
        let [one, other] = &mut ends;
        other.sockets.get_mut::<tcp::Socket<'_>>(other.socket).listen(plan.backend.port()).unwrap();
        let socket = one.sockets.get_mut::<tcp::Socket<'_>>(one.socket);
        let vip = (IpAddress::from(plan.vip.ip()), plan.vip.port());
        socket.connect(one.stack.context(), vip, plan.client.port()).unwrap();
        let wraps = random.of(&[None, Some(5), Some(20), Some(60), Some(2_000), Some(30_000)]);
        Self { random, network, ends, wraps, has_begun: false }
    }

    /// Both ends do what they have to do now.
    fn run_ends(&mut self, now: u64) {
        let Self { random, network, ends, wraps, has_begun } = self;
        for (end, way) in ends.iter_mut().zip([Way::FromClient, Way::FromBackend]) {
            end.run(now);
            for packet in std::mem::take(&mut end.wire.sent) {
                let frame = frame_of(&packet);
                if !is_tcp(&frame) {
                    continue;
                }
                if way == Way::FromClient && !std::mem::replace(has_begun, true) {
                    let segment = Seg::of(&frame);
                    assert_eq!(segment.flags, SYN);
                    network.shift = wraps.map_or(0, |bytes| 0_u32.wrapping_sub(segment.sequence).wrapping_sub(bytes));
                }
                let frame = if way == Way::FromClient { network.of_client(&packet) } else { frame };
                network.depart(now, way, frame, random);
            }
        }
    }

    /// What is due arrives, and the gateway does its work.
    fn run_network(&mut self, now: u64, gateway: &mut Rig) {
        let Self { random, network, ends, .. } = self;
        while let Some(entry) = network.under_way.first_entry().filter(|entry| entry.key().0 <= now) {
            let (way, frame) = entry.remove();
            match way {
                Way::ToClient => ends[0].wire.received.push_back(network.for_client(&frame)),
                Way::ToBackend => ends[1].wire.received.push_back(frame[14..].to_vec()),
                Way::FromClient => gateway.arrive(UPLINK, &frame, 0),
                Way::FromBackend => gateway.arrive(CLUSTER, &frame, 0),
            }
        }
        gateway.now = now * MILLISECOND;
        gateway.worker.observer_mut().0.clear();
        while gateway.worker.poll(gateway.now) > 0 {}
        for (port, way) in [(UPLINK, Way::ToClient), (CLUSTER, Way::ToBackend)] {
            for frame in gateway.sent(port).into_iter().filter(|frame| is_tcp(frame)) {
                network.depart(now, way, frame, random);
            }
        }
    }

    fn is_closed(&mut self) -> bool {
        self.ends.iter_mut().all(|end| matches!(end.state(), tcp::State::Closed | tcp::State::TimeWait))
    }

    fn is_complete(&self) -> bool {
        self.ends.iter().all(|end| end.has_closed && end.received.len() >= end.expected)
    }

    /// When something happens next.
    fn next(&mut self, now: u64) -> u64 {
        if self.ends.iter().any(|end| !end.wire.received.is_empty()) {
            return now;
        }
        let of_network = self.network.under_way.first_key_value().map(|((at, _), _)| *at);
        let of_ends = self.ends.iter_mut().filter_map(|end| end.next(now));
        of_ends.chain(of_network).min().unwrap_or(now + 1_000).max(now + 1)
    }
}

/// A connection, of which everything follows from its number.
fn play(seed: u64, gateways: &mut Gateways) {
    let mut random = Random(seed);
    let plan = Plan::of(&mut random);
    let gateway = gateways.entry(plan.gateway()).or_insert_with(|| gateway(plan.kind, plan.mtu));
    CLOCK.set(gateway.now / MILLISECOND);
    let mut playing = Playing::new(&plan, random);
    let (start, mut complete_at) = (CLOCK.get(), None);
    loop {
        let now = CLOCK.get();
        if now - start >= GIVEN_UP {
            let [one, other] = playing.ends.each_mut().map(|end| (end.state(), end.sent, end.received.len(), end.expected));
            panic!("stuck: {one:?} and {other:?} (state, bytes sent, received, expected), MTU {}", plan.mtu);
        }
        playing.run_ends(now);
        // smoltcp discards a FIN that overtakes data, and repeats none once the other end has sent one.
        let mut waits = || now - *complete_at.get_or_insert(now) <= 60_000;
        if playing.is_closed() || playing.is_complete() && playing.network.is_bad() && !waits() {
            break;
        }
        playing.run_network(now, gateway);
        CLOCK.set(playing.next(now));
    }
    let ([one, other], expected) = (playing.ends, plan.expected());
    assert!(other.received.starts_with(&plan.header), "the header comes first");
    assert_eq!(other.received.len(), expected.len(), "bytes at the backend");
    assert!(other.received == expected, "the stream to the backend");
    assert_eq!(one.received.len(), plan.down.len(), "bytes at the client");
    assert!(one.received == plan.down, "the stream to the client");
    gateway.now += 5_000 * MILLISECOND;
    gateway.assert_account();
}

#[test]
fn streams_arrive_as_they_were_sent_and_the_header_once_before() {
    let number = |name: &str, otherwise| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (first, count) = (number("SLUICE_SHIFT_FIRST", 0), number("SLUICE_SHIFT_SEEDS", SEEDS));
    let mut gateways = Gateways::new();
    for seed in first..first + count {
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play(seed, &mut gateways)));
        if let Err(panic) = played {
            eprintln!("connection {seed} fails: SLUICE_SHIFT_FIRST={seed} SLUICE_SHIFT_SEEDS=1");
            gateways.drain().for_each(|(_, gateway)| std::mem::forget(gateway));
            std::panic::resume_unwind(panic);
        }
    }
}
