//! SYNs that the fast path takes begin the same flows, and leave as the same bytes, as those that the slow path takes.
//! One gateway gets each SYN as it is. Its twin gets it behind a packet of the same tuple that needs a flow, so that
//! it has to take the slow path too.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::testing::{Packet, Segment, assert_checksums};
use dataplane::{BURST, Neighbour, PacketOutcome, tcp_flags};
use proptest::prelude::*;
use proto::{Mode, Scheduler, Service, ServiceName};

use crate::rig::{self, CLUSTER, ROUTER_MAC, Rig, SECOND, UPLINK, ends, ip};

const SYN: u8 = tcp_flags::SYN;
const ACK: u8 = tcp_flags::ACK;

/// Addresses of clients: behind a router; on the link, known and unknown; of the gateway, a backend, and of none; and behind
/// a router, by the same route as those of none.
const CLIENTS: [[&str; 2]; 10] = [
    ["198.51.100.7", "2001:db8:1::7"],
    ["198.51.100.8", "2001:db8:1::8"],
    ["203.0.113.5", "2001:db8:7::5"],
    ["192.0.2.10", "2001:db8::a"],
    ["192.0.2.77", "2001:db8::77"],
    ["192.0.2.2", "2001:db8::2"],
    ["10.0.0.11", "fd00::11"],
    ["169.254.1.1", "fe80::1"],
    ["127.0.0.1", "::1"],
    ["100.64.0.7", "2000::7"],
];
/// A service, one of another protocol, an unused address of a pool, and a SNAT address.
const SERVERS: [[&str; 2]; 4] = [
    ["192.0.2.100", "2001:db8::1:0"],
    ["192.0.2.101", "2001:db8::1:1"],
    ["192.0.2.119", "2001:db8::1:9"],
    ["10.0.0.3", "fd00::3"],
];

/// A packet of a client.
#[derive(Clone, Copy, Debug)]
struct Sent {
    is_v4: bool,
    client: usize,
    port: u16,
    server: usize,
    server_port: u16,
    flags: u8,
    sequence: u32,
    hop_limit: u8,
    dont_fragment: bool,
    payload: usize,
    padding: usize,
    /// Seconds that pass before.
    after: u64,
}

fn sent() -> impl Strategy<Value = Sent> {
    let common = prop_oneof![8 => Just(SYN), 1 => any::<u8>()];
    let client = prop_oneof![6 => 0..3usize, 3 => 3..CLIENTS.len()];
    let server = prop_oneof![8 => Just(0), 1 => 1..SERVERS.len()];
    let server_port = prop_oneof![8 => Just(80), 1 => Just(81)];
    let payload = prop_oneof![8 => Just(0), 1 => 0..1600usize];
    let after = prop_oneof![6 => Just(0), 1 => Just(2), 1 => Just(45)];
    let ends = (any::<bool>(), client, server, server_port);
    (ends, common, any::<u32>(), prop_oneof![8 => Just(64), 1 => 0..3u8], any::<bool>(), payload, 0..12usize, after).prop_map(
        |((is_v4, client, server, server_port), flags, sequence, hop_limit, dont_fragment, payload, padding, after)| Sent {
            is_v4,
            client,
            port: 0,
            server,
            server_port,
            flags,
            sequence,
            hop_limit,
            dont_fragment: dont_fragment || !is_v4,
            payload,
            padding,
            after,
        },
    )
}

impl Sent {
    fn ends(&self) -> (SocketAddr, SocketAddr) {
        let family = usize::from(!self.is_v4);
        let [client, server] = [CLIENTS[self.client][family], SERVERS[self.server][family]].map(ip);
        (SocketAddr::new(client, self.port), SocketAddr::new(server, self.server_port))
    }

    fn packet(&self, flags: u8) -> Packet {
        let (client, server) = self.ends();
        let ports = [client.port(), server.port()];
        let segment = Segment::Tcp { ports, flags, sequence: self.sequence, acknowledgement: 0 };
        let mut packet = Packet::between(client.ip(), server.ip(), segment);
        packet.fragmentation = if self.dont_fragment { 0x4000 } else { 0 };
        packet.payload = vec![7; self.payload];
        (packet.hop_limit, packet.padding) = (self.hop_limit, self.padding);
        packet
    }

    /// A packet of the same tuple that needs a flow, and is dropped without an answer.
    fn stray(&self) -> Packet {
        let stray = self.packet(ACK | tcp_flags::RST);
        Packet { hop_limit: 64, fragmentation: 0x4000, payload: Vec::new(), ..stray }
    }
}

/// What a gateway is.
#[derive(Clone, Copy, Debug)]
struct Setup {
    mode: Mode,
    scheduler: Scheduler,
    max_flows: u32,
    /// The routers of the clients are not resolved.
    unresolved: bool,
    /// The MTU of the side of the backends is smaller.
    narrow: bool,
}

fn setup() -> impl Strategy<Value = Setup> {
    let scheduler = prop_oneof![5 => Just(Scheduler::Maglev), 1 => Just(Scheduler::SourceHash), 1 => Just(Scheduler::RoundRobin)];
    let max_flows = prop_oneof![2 => Just(1024), 1 => Just(5)];
    let rarely = || prop_oneof![4 => Just(false), 1 => Just(true)];
    (scheduler, max_flows, rarely(), rarely()).prop_map(|(scheduler, max_flows, unresolved, narrow)| Setup {
        mode: Mode::Nat,
        scheduler,
        max_flows,
        unresolved,
        narrow,
    })
}

impl Setup {
    fn gateway(&self) -> Rig {
        let mut config = rig::config(self.max_flows);
        if self.narrow {
            config.ports[1].mtu = 1400;
        }
        let mut rig = Rig::with_config(config);
        (rig.state, rig.network) = (rig::state(), rig::network());
        let name = ServiceName::new("default", "web");
        let web = Service { mode: self.mode, scheduler: self.scheduler, ..Service::clone(&rig.state.services[&name]) };
        rig.state.services.insert(name, Arc::new(web));
        if self.unresolved {
            rig.network.neighbours.retain(|neighbour: &Neighbour| neighbour.mac != ROUTER_MAC);
        }
        rig.publish();
        while rig.neighbour_requests.pop().is_some() {}
        rig
    }
}

/// What a gateway did with a packet, and its flows after that.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    outcome: Option<PacketOutcome>,
    to_backends: Vec<Vec<u8>>,
    to_clients: Vec<Vec<u8>>,
    asked: Vec<String>,
    /// Known packets, and flows: created, present, reclaimed.
    counts: [u64; 4],
    reused_early: u64,
}

/// Feeds frames, and returns what became of the last one, and the number of misses.
fn feed(rig: &mut Rig, frames: &[Vec<u8>]) -> (Seen, u64) {
    rig.worker.observer_mut().0.clear();
    let before = rig.counters.misses.get();
    for (frame, id) in frames.iter().zip(1..) {
        rig.arrive(UPLINK, frame, id);
    }
    rig.worker.poll(rig.now);
    let asked = std::iter::from_fn(|| rig.neighbour_requests.pop()).map(|asked| format!("{asked:?}")).collect();
    let counters = rig.counters.clone();
    let counts = [&counters.hits, &counters.new_flows, &counters.flows, &counters.reclaimed].map(|counter| counter.get());
    let reused_early = counters.snat_port_reused_early.get();
    let outcome = rig.worker.observer_mut().0.last().map(|(outcome, _)| *outcome);
    let (to_backends, to_clients) = (rig.sent(CLUSTER), rig.sent(UPLINK));
    (Seen { outcome, to_backends, to_clients, asked, counts, reused_early }, counters.misses.get() - before)
}

/// Answers a forwarded SYN, and returns what leaves.
fn answer(rig: &mut Rig, sent: &[u8]) -> Vec<Vec<u8>> {
    let (snat, backend) = ends(sent);
    let segment = Segment::Tcp { ports: [backend.port(), snat.port()], flags: SYN | ACK, sequence: 77, acknowledgement: 1 };
    rig.put(CLUSTER, &Packet::between(backend.ip(), snat.ip(), segment).build());
    rig.sent(UPLINK)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]
    #[test]
    fn both_ways_begin_the_same_flows(setup in setup(), packets in proptest::collection::vec(sent(), 1..40)) {
        let [mut fast, mut slow] = [setup.gateway(), setup.gateway()];
        for (packet, port) in packets.into_iter().zip(2000..) {
            let packet = Sent { port, ..packet };
            for rig in [&mut fast, &mut slow] {
                rig.now += packet.after * SECOND;
                rig.worker.poll(rig.now);
            }
            let frame = packet.packet(packet.flags).build();
            let (by_fast, misses_fast) = feed(&mut fast, std::slice::from_ref(&frame));
            let (by_slow, misses_slow) = feed(&mut slow, &[packet.stray().build(), frame]);
            prop_assert_eq!(&by_fast, &by_slow, "{:?}", packet);
            if let (Some(PacketOutcome::Forward(_)), [sent]) = (by_fast.outcome, &by_fast.to_backends[..]) {
                prop_assert_eq!(misses_slow, misses_fast + 1);
                assert_checksums(sent);
                if port.is_multiple_of(2) {
                    prop_assert_eq!(answer(&mut fast, sent), answer(&mut slow, sent));
                }
            }
        }
    }

    #[test]
    fn a_burst_begins_the_flows_of_its_packets_one_by_one(
        picks in proptest::collection::vec((0u16..40, any::<bool>()), 1..=BURST),
    ) {
        let nat = Setup { mode: Mode::Nat, scheduler: Scheduler::Maglev, max_flows: 1024, unresolved: false, narrow: false };
        let [mut fast, mut slow] = [nat.gateway(), nat.gateway()];
        let syn = |(port, is_v4): (u16, bool)| {
            let to = if is_v4 { ("198.51.100.7", "192.0.2.100:80") } else { ("[2001:db8:1::7]", "[2001:db8::1:0]:80") };
            Packet::tcp(&format!("{}:{}", to.0, 2000 + port), to.1).numbers(port.into(), 0).build()
        };
        let flows: BTreeSet<_> = picks.iter().copied().collect();
        let frames: Vec<_> = picks.into_iter().map(syn).collect();
        let by_fast = feed(&mut fast, &frames).0;
        let by_slow: Vec<_> = frames.into_iter().flat_map(|frame| feed(&mut slow, &[frame]).0.to_backends).collect();
        // SYNs that the fast path leaves come last, so their SNAT ports may be others.
        prop_assert_eq!(backends(&by_fast.to_backends), backends(&by_slow));
        let snat: BTreeSet<_> = by_fast.to_backends.iter().map(|sent| ends(sent)).collect();
        prop_assert_eq!(snat.len(), flows.len());
        prop_assert_eq!(by_fast.counts, feed(&mut slow, &[]).0.counts);
    }

    /// What the fast path keeps of one SYN for the next must hold for the next one too: of other clients and to other
    /// frontends.
    #[test]
    fn a_burst_of_syns_of_all_kinds_of_clients_begins_the_flows_of_its_packets_one_by_one(
        picks in proptest::collection::vec((any::<bool>(), 0..CLIENTS.len(), 0..SERVERS.len(), any::<bool>()), 1..=BURST),
    ) {
        let nat = Setup { mode: Mode::Nat, scheduler: Scheduler::Maglev, max_flows: 1024, unresolved: false, narrow: false };
        let [mut fast, mut slow] = [nat.gateway(), nat.gateway()];
        for rig in [&mut fast, &mut slow] {
            let second = rig::service_port(proto::Protocol::Tcp, proto::Family::V4, &["192.0.2.101"], 81, None, 8081);
            let name = ServiceName::new("default", "second");
            rig.state.services.insert(name.clone(), Arc::new(Service::new(name, vec![second])));
            rig.publish();
        }
        let syn = |((is_v4, client, server, is_second), port): ((bool, usize, usize, bool), u16)| {
            let server_port = if is_second { 81 } else { 80 };
            let ends = Sent { is_v4, client, port, server, server_port, flags: SYN, sequence: port.into(), hop_limit: 64, dont_fragment: true, payload: 0, padding: 0, after: 0 };
            ends.packet(SYN).build()
        };
        let frames: Vec<_> = picks.into_iter().zip(2000..).map(syn).collect();
        let by_fast = feed(&mut fast, &frames).0;
        let by_slow: Vec<_> = frames.into_iter().flat_map(|frame| feed(&mut slow, &[frame]).0.to_backends).collect();
        prop_assert_eq!(backends(&by_fast.to_backends), backends(&by_slow));
        prop_assert_eq!(by_fast.counts, feed(&mut slow, &[]).0.counts);
    }
}

/// The backends of packets with their sequence numbers, sorted.
fn backends(sent: &[Vec<u8>]) -> Vec<(SocketAddr, [u8; 4])> {
    let sequence = |frame: &[u8]| *frame[if frame[12..14] == [8, 0] { 38 } else { 58 }..].first_chunk().unwrap();
    let mut all: Vec<_> = sent.iter().map(|frame| (ends(frame).1, sequence(frame))).collect();
    all.sort_unstable();
    all
}

/// Whether the SYN takes the fast path: it then leaves before a packet of the slow path that arrived earlier.
fn is_fast(rig: &mut Rig, syn: &Packet) -> bool {
    let slow = Packet::udp("198.51.100.9:4444", "192.0.2.101:53").build();
    rig.arrive(UPLINK, &slow, 1);
    rig.arrive(UPLINK, &syn.build(), 2);
    rig.worker.poll(rig.now);
    let sent = rig.sent(CLUSTER);
    assert_eq!(sent.len(), 2);
    ends(&sent[0]).1.port() == 8080
}

#[test]
fn a_syn_to_a_service_in_mode_nat_takes_the_fast_way() {
    let nat = Setup { mode: Mode::Nat, scheduler: Scheduler::Maglev, max_flows: 1024, unresolved: false, narrow: false };
    let rows = [
        ("a plain SYN does", nat, SYN, true),
        ("with a push", nat, SYN | tcp_flags::PSH, true),
        ("one by turns does not", Setup { scheduler: Scheduler::RoundRobin, ..nat }, SYN, false),
        ("nor one whose segment size is clamped", Setup { narrow: true, ..nat }, SYN, false),
        ("nor one in mode dnat", Setup { mode: Mode::Dnat, ..nat }, SYN, false),
    ];
    for (sentence, setup, flags, expected) in rows {
        let mut rig = setup.gateway();
        assert_eq!(is_fast(&mut rig, &Packet::tcp("198.51.100.7:1234", "192.0.2.100:80").flags(flags)), expected, "{sentence}");
    }
}

#[test]
fn a_client_on_the_link_is_asked_for_by_its_first_packet() {
    let nat = Setup { mode: Mode::Nat, scheduler: Scheduler::Maglev, max_flows: 1024, unresolved: false, narrow: false };
    let mut rig = nat.gateway();
    assert!(is_fast(&mut rig, &Packet::tcp("192.0.2.77:1234", "192.0.2.100:80")));
    assert_eq!(rig.neighbour_requests.pop(), Some((UPLINK.into(), ip("192.0.2.77"))));
}
