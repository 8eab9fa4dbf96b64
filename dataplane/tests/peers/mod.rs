//! Models of clients and backends on both sides of a rig, in simulated time: clients that connect, ask and get answers,
//! and backends that close first and answer each datagram. What a backend does with a tuple that it still holds was
//! measured on Linux 6.18 (FORWARDING 3 and 6): a SYN with another number on one in SYN_RECV, or any SYN on one in
//! TIME_WAIT, gets no answer.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use dataplane::testing::{Packet, Segment};
use dataplane::{PortIndex, tcp_flags};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ends};

const ACK: u8 = tcp_flags::ACK;
const FIN: u8 = tcp_flags::FIN;
const PSH: u8 = tcp_flags::PSH;
const RST: u8 = tcp_flags::RST;
const SYN: u8 = tcp_flags::SYN;

pub const MILLISECOND: u64 = 1_000_000;
/// Time from a packet of a client to its answer.
pub const ROUND_TRIP: u64 = 50 * MILLISECOND;
const TIME_WAIT: u64 = 60 * SECOND;
/// Duration of five repeated SYN-ACKs.
const SYN_RECV: u64 = 63 * SECOND;
/// Maximum number of handshakes that a backend holds (somaxconn); beyond it the backend answers with cookies and holds
/// nothing.
const BACKLOG: usize = 65_536;

/// The TCP fields of a segment.
#[derive(Clone, Copy, Debug)]
pub struct SegmentNumbers {
    pub flags: u8,
    pub sequence: u32,
    pub acknowledgement: u32,
}

pub fn segment_numbers(frame: &[u8]) -> SegmentNumbers {
    let tcp = if frame[12..14] == [8, 0] { 34 } else { 54 };
    let number = |at: usize| u32::from_be_bytes([frame[tcp + at], frame[tcp + at + 1], frame[tcp + at + 2], frame[tcp + at + 3]]);
    SegmentNumbers { flags: frame[tcp + 13], sequence: number(4), acknowledgement: number(8) }
}

pub fn frame(from: SocketAddr, to: SocketAddr, flags: u8, sequence: u32, acknowledgement: u32) -> Vec<u8> {
    let segment = Segment::Tcp { ports: [from.port(), to.port()], flags, sequence, acknowledgement };
    Packet::between(from.ip(), to.ip(), segment).build()
}

#[derive(Clone, Copy, Debug)]
enum ServerState {
    SynRecv { client: u32, until: u64 },
    Established { expects: u32 },
    TimeWait { until: u64 },
}

/// All backends: the connections that they hold, by their end and the gateway's.
#[derive(Debug, Default)]
pub struct Backends {
    held: HashMap<(SocketAddr, SocketAddr), ServerState>,
    in_syn_recv: usize,
    /// SYNs without answer, because the tuple was held.
    pub unanswered: u64,
}

/// The initial sequence number of a backend; a cookie if it holds nothing.
fn first_number(from: SocketAddr, client: u32) -> u32 {
    client.wrapping_mul(0x9e37_79b9) ^ u32::from(from.port())
}

impl Backends {
    /// Receives a packet; returns the answers.
    fn receive(&mut self, bytes: &[u8], now: u64) -> Vec<Vec<u8>> {
        let (from, to) = ends(bytes);
        let SegmentNumbers { flags, sequence, acknowledgement } = segment_numbers(bytes);
        let key = (to, from);
        let held = self.held.get(&key).copied().filter(|held| !held.is_over(now));
        if held.is_none() {
            self.forget(key);
        }
        let answer = |flags, sequence, acknowledgement| vec![frame(to, from, flags, sequence, acknowledgement)];
        let own = |client| first_number(from, client);
        match (held, flags & (SYN | ACK | RST | FIN)) {
            (None, SYN) => {
                if self.in_syn_recv < BACKLOG {
                    self.hold(key, ServerState::SynRecv { client: sequence, until: now + SYN_RECV });
                }
                answer(SYN | ACK, own(sequence), sequence.wrapping_add(1))
            }
            (Some(ServerState::SynRecv { client, .. }), SYN) if client == sequence => {
                answer(SYN | ACK, own(client), client.wrapping_add(1))
            }
            (Some(_), SYN) => {
                self.unanswered += 1;
                Vec::new()
            }
            (Some(ServerState::SynRecv { client, .. }), RST) if sequence == client.wrapping_add(1) => self.forget(key),
            (Some(ServerState::Established { expects }), RST) if sequence == expects => self.forget(key),
            (Some(ServerState::SynRecv { client, .. }), ACK) if acknowledgement == own(client).wrapping_add(1) => {
                self.hold(key, ServerState::Established { expects: sequence });
                self.serve(key, bytes, flags)
            }
            (None, ACK) if acknowledgement == own(sequence.wrapping_sub(1)).wrapping_add(1) => {
                self.hold(key, ServerState::Established { expects: sequence });
                self.serve(key, bytes, flags)
            }
            (Some(ServerState::Established { .. }), ACK) => self.serve(key, bytes, flags),
            (None, bits) if bits & RST == 0 => answer(RST, acknowledgement, 0),
            _ => Vec::new(),
        }
    }

    /// Answers a question: `b` keeps the connection, any other byte closes it.
    fn serve(&mut self, key: (SocketAddr, SocketAddr), bytes: &[u8], flags: u8) -> Vec<Vec<u8>> {
        if flags & PSH == 0 {
            return Vec::new();
        }
        let (from, to) = ends(bytes);
        let SegmentNumbers { sequence, acknowledgement, .. } = segment_numbers(bytes);
        let keep = bytes.last() == Some(&b'b');
        let held = if keep {
            ServerState::Established { expects: sequence.wrapping_add(1) }
        } else {
            ServerState::TimeWait { until: u64::MAX }
        };
        self.hold(key, held);
        let flags = if keep { ACK | PSH } else { ACK | PSH | FIN };
        let ports = [to.port(), from.port()];
        let segment = Segment::Tcp { ports, flags, sequence: acknowledgement, acknowledgement: sequence.wrapping_add(1) };
        vec![Packet::between(to.ip(), from.ip(), segment).payload(b"!").build()]
    }

    /// Connections that closed at this moment rest from now on.
    fn rest(&mut self, key: (SocketAddr, SocketAddr), now: u64) {
        if let Some(ServerState::TimeWait { until }) = self.held.get_mut(&key) {
            *until = (*until).min(now + TIME_WAIT);
        }
    }

    fn hold(&mut self, key: (SocketAddr, SocketAddr), held: ServerState) {
        self.forget(key);
        self.in_syn_recv += usize::from(matches!(held, ServerState::SynRecv { .. }));
        self.held.insert(key, held);
    }

    fn forget(&mut self, key: (SocketAddr, SocketAddr)) -> Vec<Vec<u8>> {
        let old = self.held.remove(&key);
        self.in_syn_recv -= usize::from(matches!(old, Some(ServerState::SynRecv { .. })));
        Vec::new()
    }
}

impl ServerState {
    fn is_over(self, now: u64) -> bool {
        match self {
            Self::SynRecv { until, .. } | Self::TimeWait { until } => until <= now,
            Self::Established { .. } => false,
        }
    }
}

/// One genuine connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    first: u32,
    next: (u32, u32),
    asks: u8,
    /// Number of answers received.
    pub answers: u32,
    /// Whether it was reset.
    pub broken: bool,
}

/// A gateway between clients and backends.
pub struct World {
    pub rig: Rig,
    pub backends: Backends,
    pub connections: HashMap<SocketAddr, Connection>,
    /// Number of answers for each client that sent a datagram.
    pub datagrams: HashMap<SocketAddr, u32>,
    vip: SocketAddr,
    /// Frames in transit from clients, by their time of arrival.
    under_way: VecDeque<(u64, Vec<u8>)>,
}

impl World {
    pub fn new(rig: Rig, vip: &str) -> Self {
        let vip = vip.parse().unwrap();
        let (connections, datagrams) = (HashMap::new(), HashMap::new());
        Self { rig, backends: Backends::default(), connections, datagrams, vip, under_way: VecDeque::new() }
    }

    /// A client sends a datagram, which is answered once.
    pub fn ask_by_datagram(&mut self, client: SocketAddr, to: SocketAddr) {
        self.datagrams.entry(client).or_insert(0);
        self.arrive(UPLINK, [datagram(client, to)]);
    }

    /// A client opens a connection. It sends `b` to stay connected, or any other byte.
    pub fn connect(&mut self, client: SocketAddr, first: u32, asks: u8) {
        self.connections.insert(client, Connection { first, next: (0, 0), asks, answers: 0, broken: false });
        let syn = frame(client, self.vip, SYN, first, 0);
        self.arrive(UPLINK, [syn]);
    }

    /// A connected client asks again.
    pub fn ask_again(&mut self, client: SocketAddr) {
        let Connection { next: (sequence, acknowledgement), asks, .. } = self.connections[&client];
        let question = question(client, self.vip, sequence, acknowledgement, asks);
        self.arrive(UPLINK, [question]);
    }

    /// A client sends one more datagram; returns its source as the backend sees it, and the backend.
    pub fn end_of_stream(&mut self, client: SocketAddr, to: SocketAddr) -> (SocketAddr, SocketAddr) {
        let seen = ends(&self.rig.forward(UPLINK, &datagram(client, to)));
        self.rig.forward(CLUSTER, &datagram(seen.1, seen.0));
        seen
    }

    /// Frames arrive at a port now.
    pub fn arrive(&mut self, port: PortIndex, frames: impl IntoIterator<Item = Vec<u8>>) {
        frames.into_iter().for_each(|frame| self.rig.arrive(port, &frame, 0));
    }

    /// Lets time pass and processes all packets in transit.
    pub fn pass(&mut self, ns: u64) {
        self.rig.now += ns;
        let now = self.rig.now;
        while self.under_way.front().is_some_and(|(at, _)| *at <= now) {
            let frame = self.under_way.pop_front().map(|(_, frame)| frame);
            self.arrive(UPLINK, frame);
        }
        for _ in 0..1_000 {
            self.rig.worker.observer_mut().0.clear();
            if self.rig.worker.poll(now) == 0 {
                return;
            }
            for bytes in self.rig.sent(CLUSTER) {
                let (from, to) = ends(&bytes);
                let answers = if is_tcp(&bytes) { self.backends.receive(&bytes, now) } else { vec![datagram(to, from)] };
                self.backends.rest((to, from), now);
                self.arrive(CLUSTER, answers);
            }
            for bytes in self.rig.sent(UPLINK) {
                self.client_receives(&bytes);
            }
        }
        panic!("packets loop");
    }

    fn client_receives(&mut self, bytes: &[u8]) {
        let (vip, client) = ends(bytes);
        if !is_tcp(bytes) {
            if let Some(answers) = self.datagrams.get_mut(&client) {
                *answers += 1;
            }
            return;
        }
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let SegmentNumbers { flags, sequence, acknowledgement } = segment_numbers(bytes);
        let answer = if flags & RST != 0 {
            connection.broken = true;
            return;
        } else if flags & SYN != 0 && acknowledgement == connection.first.wrapping_add(1) {
            connection.next = (acknowledgement.wrapping_add(1), sequence.wrapping_add(1));
            let handshake = frame(client, vip, ACK, acknowledgement, sequence.wrapping_add(1));
            let question = question(client, vip, acknowledgement, sequence.wrapping_add(1), connection.asks);
            vec![handshake, question]
        } else if flags & PSH != 0 {
            connection.answers += 1;
            let more = u32::from(flags & FIN != 0);
            connection.next = (acknowledgement, sequence.wrapping_add(1 + more));
            let flags = if more == 1 { ACK | FIN } else { ACK };
            vec![frame(client, vip, flags, acknowledgement, sequence.wrapping_add(1 + more))]
        } else {
            return;
        };
        let at = self.rig.now + ROUND_TRIP;
        self.under_way.extend(answer.into_iter().map(|frame| (at, frame)));
    }
}

pub fn datagram(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    Packet::between(from.ip(), to.ip(), Segment::Udp { ports: [from.port(), to.port()], checksum: true }).build()
}

fn is_tcp(frame: &[u8]) -> bool {
    frame[if frame[12..14] == [8, 0] { 23 } else { 20 }] == 6
}

fn question(client: SocketAddr, vip: SocketAddr, sequence: u32, acknowledgement: u32, asks: u8) -> Vec<u8> {
    let ports = [client.port(), vip.port()];
    let segment = Segment::Tcp { ports, flags: ACK | PSH, sequence, acknowledgement };
    Packet::between(client.ip(), vip.ip(), segment).payload(&[asks]).build()
}
