//! Random packets of a stranger off the path, injected into random genuine exchanges: what both ends receive is what they
//! receive in the exchange alone, apart from the stranger's packets that are passed on, and the gateway sends them nothing
//! of its own.
//!
//! The stranger knows all addresses and ports, but neither sequence numbers nor verification tags. What a backend has ended
//! itself is not part of the exchanges: a SYN or INIT then begins anew, whoever sends it (FORWARDING 2).

use std::net::SocketAddr;

use dataplane::sctp_chunk::{
    ABORT, COOKIE_ACK, COOKIE_ECHO, DATA, ERROR, HEARTBEAT, HEARTBEAT_ACK, INIT, INIT_ACK, SACK, SHUTDOWN_ACK, SHUTDOWN_COMPLETE,
};
use dataplane::testing::{Packet, Segment};
use dataplane::{PacketOutcome, PortIndex, tcp_flags};
use proptest::prelude::*;
use proto::{BackendState, Mode, ServiceName};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK};

const ACK: u8 = tcp_flags::ACK;
const FIN: u8 = tcp_flags::FIN;
const PSH: u8 = tcp_flags::PSH;
const SYN: u8 = tcp_flags::SYN;

/// Those in which more depends on the flow come more often.
const MODES: [Mode; 8] = [Mode::Nat, Mode::Nat, Mode::Nat, Mode::Dnat, Mode::Dnat, Mode::Dsr, Mode::Ipip, Mode::Gue];
/// Client, VIP of TCP and SCTP, VIP of UDP, and the SNAT address.
const FAMILIES: [[&str; 4]; 2] = [
    ["198.51.100.7:5555", "192.0.2.100:80", "192.0.2.101:53", "10.0.0.3"],
    ["[2001:db8:1::7]:5555", "[2001:db8::1:0]:80", "[2001:db8::1:1]:53", "fd00::3"],
];
const CLIENT_TAG: u32 = 0x0102_0304;
const BACKEND_TAG: u32 = 0xb2b2_0001;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

/// What an end of an exchange sends: TCP flags and numbers, a datagram, or an SCTP chunk with its tag and initiate tag.
#[derive(Clone, Copy, Debug)]
enum Sends {
    Tcp(u8, u32, u32),
    Udp,
    Sctp(u8, u32, u32),
}

/// A packet of the stranger.
#[derive(Clone, Copy, Debug)]
struct Spoofed {
    origin: Origin,
    /// TCP flags, or the number of a chunk, of which the upper bit is its flag T.
    kind: u8,
    numbers: (u32, u32),
}

#[derive(Clone, Copy, Debug)]
enum Origin {
    /// In the name of the client.
    Client,
    /// In the name of the backend, to what it knows as the client.
    Backend,
    /// To a SNAT port.
    ToSnat(u16),
    /// From another client.
    Other(u16),
}

/// One step of an exchange: how long all were silent before, and what the stranger sends then.
#[derive(Clone, Debug)]
struct Step {
    silence: u8,
    spoofed: Vec<Spoofed>,
}

fn packet(from: SocketAddr, to: SocketAddr, sends: Sends) -> Packet {
    let (text_from, text_to) = (from.to_string(), to.to_string());
    match sends {
        Sends::Tcp(flags, sequence, acknowledgement) => {
            let segment = Segment::Tcp { ports: [from.port(), to.port()], flags, sequence, acknowledgement };
            Packet::between(from.ip(), to.ip(), segment).payload(if flags & PSH == 0 { b"" } else { b"0123456789" })
        }
        Sends::Udp => Packet::udp(&text_from, &text_to).payload(b"a question or its answer"),
        Sends::Sctp(chunk, tag, initiate) => {
            let mut packet = Packet::sctp(&text_from, &text_to).chunk(tag, chunk);
            if matches!(chunk, INIT | INIT_ACK) {
                packet.payload[4..8].copy_from_slice(&initiate.to_be_bytes());
            }
            packet
        }
    }
}

/// A genuine exchange: who sends what, and the longest silence before it in seconds.
fn script(protocol: Protocol) -> Vec<(bool, Sends, u64)> {
    let (client, backend) = (u32::MAX - 5, 0x1234_5678_u32);
    let tcp = |flags, client: u32, backend: u32| Sends::Tcp(flags, client, backend);
    let c = |n: u32| client.wrapping_add(n);
    let b = |n: u32| backend.wrapping_add(n);
    match protocol {
        Protocol::Tcp => vec![
            (true, tcp(SYN, client, 0), 0),
            (false, tcp(SYN | ACK, backend, c(1)), 3),
            (true, tcp(ACK, c(1), b(1)), 3),
            (true, tcp(ACK | PSH, c(1), b(1)), 20),
            (false, tcp(ACK, b(1), c(11)), 1),
            (false, tcp(ACK | PSH, b(1), c(11)), 200),
            (true, tcp(ACK, c(11), b(11)), 200),
            (true, tcp(ACK | PSH, c(11), b(11)), 200),
            (false, tcp(ACK | PSH, b(11), c(21)), 200),
            (true, tcp(ACK, c(21), b(21)), 200),
            (true, tcp(ACK | FIN, c(21), b(21)), 200),
            (false, tcp(ACK, b(21), c(22)), 1),
            (false, tcp(ACK | PSH, b(21), c(22)), 200),
            (true, tcp(ACK, c(22), b(31)), 1),
        ],
        Protocol::Udp => {
            [true, true, false, true, false, false, true, false].map(|from_client| (from_client, Sends::Udp, 25)).to_vec()
        }
        Protocol::Sctp => {
            let chunk = |from_client: bool, chunk: u8, silence: u64| {
                let tag = if from_client { BACKEND_TAG } else { CLIENT_TAG };
                (from_client, Sends::Sctp(chunk, tag, BACKEND_TAG), silence)
            };
            vec![
                (true, Sends::Sctp(INIT, 0, CLIENT_TAG), 0),
                chunk(false, INIT_ACK, 3),
                chunk(true, COOKIE_ECHO, 3),
                chunk(false, COOKIE_ACK, 3),
                chunk(true, DATA, 20),
                chunk(false, SACK, 1),
                chunk(true, HEARTBEAT, 200),
                chunk(false, HEARTBEAT_ACK, 1),
                chunk(false, HEARTBEAT, 200),
                chunk(true, HEARTBEAT_ACK, 1),
                chunk(true, HEARTBEAT, 200),
                chunk(false, DATA, 200),
            ]
        }
    }
}

/// The chunks that a stranger sends, the dangerous ones more often.
#[rustfmt::skip]
const CHUNKS: [u8; 16] = [
    ABORT, DATA, INIT, SHUTDOWN_COMPLETE, SHUTDOWN_ACK, COOKIE_ECHO, COOKIE_ACK, INIT_ACK, SACK, HEARTBEAT, HEARTBEAT_ACK, ERROR,
    ABORT, ABORT, ABORT, SHUTDOWN_COMPLETE,
];

impl Spoofed {
    fn sends(self, protocol: Protocol) -> Sends {
        match protocol {
            Protocol::Tcp => Sends::Tcp(self.kind & 0x1f, self.numbers.0, self.numbers.1),
            Protocol::Udp => Sends::Udp,
            Protocol::Sctp => {
                let chunk = CHUNKS[usize::from(self.kind & 0x7f) % CHUNKS.len()];
                Sends::Sctp(chunk, if chunk == INIT { 0 } else { self.numbers.0 | 1 }, self.numbers.1 | 1)
            }
        }
    }
}

/// The step at which the backend takes no new flows any more: another one is chosen for whatever has no flow. In `dnat` and
/// one-way modes nothing else shows the loss of a flow. By then flows are confirmed in all modes. From there on the stranger
/// sends neither SYN nor INIT: after a RST of the client they would begin anew (FORWARDING 2).
const DRAINS_AT: usize = 5;

/// An exchange through a gateway.
struct Exchange {
    drains: bool,
    rig: Rig,
    protocol: Protocol,
    snat: SocketAddr,
    client: SocketAddr,
    vip: SocketAddr,
    /// The client as the backend sees it, and the backend, once a packet has told.
    seen: Option<(SocketAddr, SocketAddr)>,
}

impl Exchange {
    fn new(mode: Mode, family: [&str; 4], protocol: Protocol) -> Self {
        let [client, tcp, udp, snat] = family;
        let vip = if protocol == Protocol::Udp { udp } else { tcp };
        let snat = SocketAddr::new(snat.parse().unwrap(), 1024);
        Self {
            drains: false,
            rig: Rig::with_mode(mode),
            protocol,
            snat,
            client: client.parse().unwrap(),
            vip: vip.parse().unwrap(),
            seen: None,
        }
    }

    fn waits(&mut self, seconds: u64) {
        for _ in 0..16 {
            self.rig.now += seconds * SECOND / 16;
            self.rig.worker.poll(self.rig.now);
        }
    }

    /// An end sends a packet. Returns what leaves.
    fn says(&mut self, from_client: bool, sends: Sends) -> Option<(PortIndex, Vec<u8>)> {
        let (port, from, to) = match (from_client, self.seen) {
            (true, _) => (UPLINK, self.client, self.vip),
            (false, Some((client, backend))) => (CLUSTER, backend, client),
            (false, None) => return None,
        };
        let outcome = self.rig.put(port, &packet(from, to, sends).build());
        let Some(PacketOutcome::Forward(out)) = outcome else { panic!("{sends:?} of the client {from_client}: {outcome:?}") };
        let sent = self.rig.sent(out);
        assert_eq!(sent.len(), 1, "{sends:?}");
        if from_client {
            self.seen = Some(rig::ends(&sent[0]));
        }
        Some((out, sent[0].clone()))
    }

    /// The backend with this number at the end of its addresses takes no new flows from now on.
    fn drains(&mut self, number: u8) {
        for name in ["web", "dns"] {
            self.rig.change_service(&ServiceName::new("default", name), |service| {
                service.drain_timeout = std::time::Duration::from_secs(86_400);
                let backends = service.ports.iter_mut().flat_map(|port| &mut port.backends);
                let draining = backends.filter(|backend| rig::last_byte(backend.address.ip()) == number);
                draining.for_each(|backend| backend.state = BackendState::Draining);
            });
        }
        self.drains = true;
    }

    /// The stranger sends a packet. It is passed on or dropped; whatever else leaves is not for the two ends.
    fn is_attacked(&mut self, spoofed: Spoofed) {
        let host = |n: u16| match self.client {
            SocketAddr::V4(_) => SocketAddr::new([203, 0, 113, 7].into(), n),
            SocketAddr::V6(_) => SocketAddr::new("2001:db8:9::7".parse().unwrap(), n),
        };
        let sends = spoofed.sends(self.protocol);
        let begins = matches!(sends, Sends::Tcp(flags, ..) if flags & SYN != 0) || matches!(sends, Sends::Sctp(INIT, ..));
        match spoofed.origin {
            // Another client's flow takes the port that the exchange has without it.
            Origin::Other(_) if self.seen.is_none() => return,
            Origin::Client if self.drains && begins => return,
            _ => {}
        }
        let (seen_client, backend) = self.seen.unwrap_or((self.snat, self.snat));
        let (from, to) = match spoofed.origin {
            Origin::Client => (self.client, self.vip),
            Origin::Backend => (backend, seen_client),
            Origin::ToSnat(port) => (host(port), SocketAddr::new(self.snat.ip(), port)),
            Origin::Other(port) => (host(port), self.vip),
        };
        let mut frame = packet(from, to, sends);
        if spoofed.kind & 0x80 != 0 && self.protocol == Protocol::Sctp {
            frame.payload[1] = 1; // a reflected tag
        }
        let outcome = self.rig.put(UPLINK, &frame.build());
        let sent: Vec<_> = [UPLINK, CLUSTER].into_iter().flat_map(|port| self.rig.sent(port)).collect();
        let passed = usize::from(matches!(outcome, Some(PacketOutcome::Forward(_))));
        if passed == 1 {
            assert_eq!(sent.len(), 1, "{spoofed:?} {outcome:?}");
        }
        if self.seen.is_none() {
            return; // there is no connection yet, and a mid-stream packet is answered as by any host that knows none
        }
        for frame in &sent[passed..] {
            let (from, to) = rig::ends(frame);
            assert!(to != self.client && (to, from) != (backend, seen_client), "{spoofed:?} is answered to an end: {from} {to}");
        }
    }
}

/// What leaves, packet by packet, with these silences and the stranger's packets or without them.
fn run((mode, family, protocol): (Mode, [&str; 4], Protocol), steps: &[Step], is_attacked: bool) -> Vec<(PortIndex, Vec<u8>)> {
    let mut exchange = Exchange::new(mode, family, protocol);
    let mut received: Vec<(PortIndex, Vec<u8>)> = Vec::new();
    for (at, ((from_client, sends, silence), Step { silence: part, spoofed })) in
        script(protocol).into_iter().zip(steps).enumerate()
    {
        // Where the gateway does not hear the backend, silences before its packets would add up to more than `tcpReset`.
        let is_heard = mode == Mode::Nat || mode == Mode::Dnat || from_client;
        let silence = if is_heard { silence } else { 0 };
        // The stranger comes somewhere in the silence.
        let seconds = silence.min(1) + silence.saturating_sub(1) * u64::from(*part) / 255;
        let before = seconds * u64::from(spoofed.first().map_or(0, |first| first.kind)) / 255;
        exchange.waits(before);
        if at == DRAINS_AT {
            exchange.drains(received[0].1[5]);
        }
        if is_attacked {
            spoofed.iter().for_each(|spoofed| exchange.is_attacked(*spoofed));
        }
        exchange.waits(seconds - before);
        if is_heard {
            received.extend(exchange.says(from_client, sends));
        }
    }
    exchange.rig.assert_account();
    received
}

fn spoofed() -> impl Strategy<Value = Spoofed> {
    let origin = prop_oneof![
        6 => Just(Origin::Client),
        2 => Just(Origin::Backend),
        1 => (1024..2048_u16).prop_map(Origin::ToSnat),
        1 => any::<u16>().prop_map(|port| Origin::Other(port.max(1))),
    ];
    (origin, any::<u8>(), any::<(u32, u32)>()).prop_map(|(origin, kind, numbers)| Spoofed { origin, kind, numbers })
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let spoofed = proptest::collection::vec(spoofed(), 0..5);
    let step = (any::<u8>(), spoofed).prop_map(|(silence, spoofed)| Step { silence, spoofed });
    proptest::collection::vec(step, 16)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn spoofed_packets_change_nothing_that_the_ends_of_an_exchange_receive(
        mode in proptest::sample::select(MODES.to_vec()),
        family in proptest::sample::select(FAMILIES.to_vec()),
        protocol in proptest::sample::select(vec![Protocol::Tcp, Protocol::Udp, Protocol::Sctp]),
        steps in steps(),
    ) {
        let kind = (mode, family, protocol);
        let (alone, attacked) = (run(kind, &steps, false), run(kind, &steps, true));
        for (at, (alone, attacked)) in alone.iter().zip(&attacked).enumerate() {
            prop_assert_eq!(alone, attacked, "packet {} of {:?}", at, kind);
        }
        prop_assert_eq!(alone.len(), attacked.len());
    }
}
