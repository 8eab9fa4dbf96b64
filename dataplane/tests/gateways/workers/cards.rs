//! Workers over network cards that spread packets by RSS, as they should or not: what each kind of packets proves, and
//! that no card leads a packet away from its flow, whatever it does and whenever it changes.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::testing::{Packet, Rss};
use dataplane::wire::RssKey;
use dataplane::workers::{Proof, Refuted, RssKind, Steering};
use dataplane::{DropReason, tcp_flags};
use proptest::prelude::*;
use proto::{Mode, Service, State};

use crate::rig::{CLUSTER, UPLINK, ends, state};
use crate::team::{Delivery, SEED, Team, card, clients};

const TCP: [RssKind; 2] = [RssKind::TcpV4, RssKind::TcpV6];
const UDP: [RssKind; 2] = [RssKind::UdpV4, RssKind::UdpV6];
const V4: [RssKind; 2] = [RssKind::TcpV4, RssKind::UdpV4];
const V6: [RssKind; 2] = [RssKind::TcpV6, RssKind::UdpV6];
/// Connections and exchanges of each kind.
const OF_EACH_KIND: u16 = 24;

/// A connection, or an exchange over UDP, and how its packets look at the backend.
struct Talk {
    kind: RssKind,
    from: String,
    to: &'static str,
    /// The gateway's end and the backend's.
    seen: Option<(SocketAddr, SocketAddr)>,
}

impl Talk {
    fn new(kind: RssKind, n: u16) -> Self {
        let (is_v4, is_tcp) = (V4.contains(&kind), TCP.contains(&kind));
        let from = match is_v4 {
            true => format!("198.51.100.{}:{}", n % 200 + 1, 2000 + n),
            false => format!("[2001:db8:1::{}]:{}", n % 200 + 1, 2000 + n),
        };
        let to = match (is_v4, is_tcp) {
            (true, true) => "192.0.2.100:80",
            (false, true) => "[2001:db8::1:0]:80",
            (true, false) => "192.0.2.101:53",
            (false, false) => "[2001:db8::1:1]:53",
        };
        Self { kind, from, to, seen: None }
    }

    fn packet(&self, from: &str, to: &str, flags: u8) -> Vec<u8> {
        if TCP.contains(&self.kind) { Packet::tcp(from, to).flags(flags).build() } else { Packet::udp(from, to).build() }
    }

    /// The client sends a packet, which reaches the same backend as all before by the same address and port.
    fn send_to_backend(&mut self, team: &mut Team, flags: u8) {
        team.put(UPLINK, &[self.packet(&self.from, self.to, flags)]);
        let sent: Vec<_> = team.sent(CLUSTER).iter().map(|frame| ends(frame)).collect();
        let expected = self.seen.or(sent.first().copied());
        assert_eq!((sent.first().copied(), sent.len()), (expected, 1), "{:?}: {} reaches its backend", self.kind, self.from);
        assert_eq!(team.sent(UPLINK).len(), 0, "{:?}: nothing answers {}", self.kind, self.from);
        self.seen = expected;
    }

    /// The backend sends a packet, which reaches the client.
    fn send_to_client(&self, team: &mut Team, flags: u8) {
        let (gateway, backend) = self.seen.unwrap();
        team.put(CLUSTER, &[self.packet(&backend.to_string(), &gateway.to_string(), flags)]);
        let sent: Vec<_> = team.sent(UPLINK).iter().map(|frame| ends(frame).1.to_string()).collect();
        assert_eq!(sent, [self.from.as_str()], "{:?}: the answer reaches its client", self.kind);
        assert_eq!(team.sent(CLUSTER).len(), 0, "{:?}: nothing answers {backend}", self.kind);
    }

    fn open(&mut self, team: &mut Team) {
        self.send_to_backend(team, tcp_flags::SYN);
        self.send_to_client(team, tcp_flags::SYN | tcp_flags::ACK);
        self.send_to_backend(team, tcp_flags::ACK);
    }
}

/// Talks of these kinds, opened one after another, with numbers from `first` on.
fn opened(team: &mut Team, kinds: &[RssKind], first: u16, count: u16) -> Vec<Talk> {
    let mut talks: Vec<_> = (first..first + count)
        .flat_map(|n| kinds.iter().map(move |kind| (*kind, n)))
        .map(|(kind, n)| Talk::new(kind, n))
        .collect();
    talks.iter_mut().for_each(|talk| talk.open(team));
    talks
}

/// The state with all services in a mode.
fn all_in(mode: Mode) -> State {
    let mut state = state();
    for (_, service) in state.services.clone() {
        state.services.insert(service.name.clone(), Arc::new(Service { mode, ..Service::clone(&service) }));
    }
    state
}

fn over(mode: Mode, steering: &Steering, card: Rss) -> Team {
    let mut team = Team::serving(all_in(mode), steering.clone(), Delivery::Card(card), steering.workers());
    team.settle();
    team
}

/// Another key than that of the workers.
fn other_key(steering: &Steering) -> RssKey {
    let mut key = *steering.rss_key().unwrap();
    key.reverse();
    key
}

/// The card with the table of a card that leads each hash to another worker.
fn with_other_table(card: &Rss, workers: u8) -> Rss {
    Rss { reta: card.reta.iter().map(|queue| (queue + 1) % workers).collect(), ..card.clone() }
}

/// Whether a proof of a kind says so, and each other one that too few packets of its queue were compared.
fn are(team: &Team, kind: RssKind, expected: Proof) -> bool {
    let read = team.proofs_of(kind);
    read.contains(&expected) && read.iter().all(|proof| *proof == expected || matches!(proof, Proof::Observing { .. }))
}

/// A packet of each talk, all together, and the answers.
fn all_go_on(team: &mut Team, talks: &[Talk]) {
    let ack = |talk: &Talk, from: &str, to: &str| talk.packet(from, to, tcp_flags::ACK);
    team.put(UPLINK, &talks.iter().map(|talk| ack(talk, &talk.from, talk.to)).collect::<Vec<_>>());
    let at_backends: HashSet<_> = team.sent(CLUSTER).iter().map(|frame| ends(frame)).collect();
    let lost = talks.iter().filter(|talk| talk.seen.is_none_or(|seen| !at_backends.contains(&seen))).count();
    assert_eq!((lost, at_backends.len()), (0, talks.len()), "each reaches its backend");
    let answer = |talk: &Talk| talk.seen.map(|(gateway, backend)| ack(talk, &backend.to_string(), &gateway.to_string()));
    team.put(CLUSTER, &talks.iter().filter_map(answer).collect::<Vec<_>>());
    let mut at_clients: Vec<_> =
        team.sent(UPLINK).iter().map(|frame| (ends(frame).1.to_string(), ends(frame).0.to_string())).collect();
    let mut clients: Vec<_> = talks.iter().map(|talk| (talk.from.clone(), talk.to.to_owned())).collect();
    at_clients.sort_unstable();
    clients.sort_unstable();
    assert!(at_clients == clients, "each answer reaches its client, and nothing else does");
}

#[test]
fn with_a_card_that_is_proven_right_nothing_is_handed_over() {
    let mut team = Team::over_cards(2);
    team.settle();
    let clients = clients(600);
    for flags in [tcp_flags::SYN, tcp_flags::ACK] {
        team.exchange(&clients, flags);
    }
    assert!(TCP.iter().all(|kind| team.proofs_of(*kind) == [Proof::Proven; 4]));
    assert!(UDP.iter().all(|kind| team.proofs_of(*kind) == [Proof::Observing { agreed: 0 }; 4]), "no such packet came");
    assert_eq!(team.sum(|c| c.handed_out.get()), 0);
    let forwarded = team.forwarded();
    assert!(forwarded.iter().all(|n| *n > 800), "{forwarded:?}");
}

#[test]
fn each_packet_counts_once_towards_the_proof_of_its_queue() {
    let mut team = Team::over_cards(2);
    team.settle();
    let agreed = |team: &Team| -> u16 {
        let of = |proof: Proof| if let Proof::Observing { agreed } = proof { agreed } else { panic!("{proof:?}") };
        team.proofs[0].iter().flat_map(|proof| RssKind::ALL.map(|kind| of(proof.read(kind)))).sum()
    };
    let before = agreed(&team);
    let datagram = |n: u16| {
        let long = Packet::udp(&format!("198.51.100.8:{}", 3000 + n), "192.0.2.101:53").payload(&[7; 32]);
        long.build()
    };
    let syn = |n: u16| Packet::tcp(&format!("198.51.100.9:{}", 3000 + n), "192.0.2.100:80").flags(tcp_flags::SYN).build();
    for frames in [(0..20).map(datagram).collect::<Vec<_>>(), (0..20).map(syn).collect()] {
        team.put(UPLINK, &frames);
        assert_eq!(team.sent(CLUSTER).len(), 20);
    }
    assert_eq!(agreed(&team) - before, 40);
}

#[test]
fn each_kind_of_packets_is_proven_apart_and_what_a_card_does_not_hash_costs_the_others_nothing() {
    let steering = Steering::toeplitz(2, SEED);
    let (right, wrong_key) = (card(&steering), other_key(&steering));
    let rows: [(_, Rss, &[RssKind], Refuted); 6] = [
        ("it hashes IPv4 only", right.clone().with_key(None, &V6), &V6, Refuted::NoHash),
        ("it hashes IPv6 only", right.clone().with_key(None, &V4), &V4, Refuted::NoHash),
        ("it hashes TCP only", right.clone().with_key(None, &UDP), &UDP, Refuted::NoHash),
        ("another key for IPv6", right.clone().with_key(Some(wrong_key), &V6), &V6, Refuted::OtherHash),
        ("another key for UDP over IPv4", right.clone().with_key(Some(wrong_key), &V4[1..]), &V4[1..], Refuted::OtherHash),
        ("another table", with_other_table(&right, 2), &RssKind::ALL, Refuted::OtherQueue),
    ];
    for (sentence, card, refuted, why) in rows {
        let mut team = over(Mode::Nat, &steering, card);
        let proven: Vec<_> = RssKind::ALL.into_iter().filter(|kind| !refuted.contains(kind)).collect();
        let mut talks = opened(&mut team, &proven, 0, 200);
        assert_eq!(team.sum(|c| c.handed_out.get()), 0, "{sentence}: the card leads all others to their workers");
        talks.extend(opened(&mut team, refuted, 200, 200));
        all_go_on(&mut team, &talks);
        for kind in RssKind::ALL {
            let expected = if refuted.contains(&kind) { Proof::Refuted(why) } else { Proof::Proven };
            assert!(are(&team, kind, expected), "{sentence}: {kind:?} {:?}", team.proofs_of(kind));
        }
        let flows: Vec<u64> = team.counters.iter().map(|c| c.flows.get()).collect();
        assert!(flows.iter().all(|n| *n > 300), "{sentence}: flows of all kinds are spread over the workers: {flows:?}");
    }
}

#[test]
fn a_kind_that_a_device_does_not_offer_is_not_observed() {
    let steering = Steering::toeplitz(2, SEED);
    let mut team = over(Mode::Nat, &steering, card(&steering).with_key(None, &UDP));
    team.proofs.iter().flat_map(|port| port.iter()).for_each(|proof| proof.restart(&TCP));
    opened(&mut team, &RssKind::ALL, 0, 200);
    assert!(TCP.iter().all(|kind| team.proofs_of(*kind) == [Proof::Proven; 4]));
    assert!(UDP.iter().all(|kind| team.proofs_of(*kind) == [Proof::NotOffered; 4]));
}

#[test]
fn connections_live_on_when_a_card_goes_wrong_and_when_it_is_right_again() {
    for (mode, workers) in [(Mode::Nat, 2), (Mode::Dnat, 2), (Mode::Nat, 3), (Mode::Dnat, 3)] {
        let steering = Steering::toeplitz(workers, SEED);
        let right = card(&steering);
        let faults = [
            ("no hash, all at queue 0", right.clone().with_key(None, &RssKind::ALL)),
            ("no hash over IPv6", right.clone().with_key(None, &V6)),
            ("no hash over TCP", right.clone().with_key(None, &TCP)),
            ("another key", right.clone().with_key(Some(other_key(&steering)), &RssKind::ALL)),
            ("another key over IPv6", right.clone().with_key(Some(other_key(&steering)), &V6)),
            ("another table", with_other_table(&right, workers)),
        ];
        for (sentence, fault) in faults {
            let mut team = over(mode, &steering, right.clone());
            // All kinds are proven, by other connections too.
            let mut talks = opened(&mut team, &RssKind::ALL, 0, 200);
            assert!(RssKind::ALL.iter().all(|kind| are(&team, *kind, Proof::Proven)));
            talks.truncate(usize::from(OF_EACH_KIND) * RssKind::ALL.len());
            team.delivery = Delivery::Card(fault);
            // Some begin while the card is still taken for right, and go on after it was found wrong.
            talks.extend(opened(&mut team, &RssKind::ALL, 1000, OF_EACH_KIND));
            for _ in 0..8 {
                all_go_on(&mut team, &talks);
            }
            let refuted =
                RssKind::ALL.iter().flat_map(|kind| team.proofs_of(*kind)).any(|proof| matches!(proof, Proof::Refuted(_)));
            assert!(refuted, "{sentence}: the fault is found");
            talks.extend(opened(&mut team, &RssKind::ALL, 2000, OF_EACH_KIND));
            all_go_on(&mut team, &talks);
            team.delivery = Delivery::Card(right.clone());
            all_go_on(&mut team, &talks);
            // Another device, or another member of a bond.
            team.proofs.iter().flat_map(|port| port.iter()).for_each(|proof| proof.restart(&RssKind::ALL));
            all_go_on(&mut team, &talks);
            assert_eq!(team.drops(DropReason::NoFlow), 0, "{mode}, {workers} workers, {sentence}");
            assert_eq!(team.sum(|c| c.account().dropped), 0, "{mode}, {workers} workers, {sentence}");
        }
    }
}

#[test]
fn packets_of_known_flows_are_compared_with_their_queue_too() {
    for (kinds, others) in [(V4, V6), (V6, V4)] {
        let mut team = Team::over_cards(2);
        team.settle();
        let talks = opened(&mut team, &RssKind::ALL, 0, 200);
        assert!(RssKind::ALL.iter().all(|kind| are(&team, *kind, Proof::Proven)));
        // The card leads packets to the same queues as before, and reports no hash with some.
        let Delivery::Card(card) = std::mem::replace(&mut team.delivery, Delivery::InTurn) else { panic!("over cards") };
        team.delivery = Delivery::Silent(card, kinds);
        let (flows, handed_out) = (team.sum(|c| c.new_flows.get()), team.sum(|c| c.handed_out.get()));
        for _ in 0..40 {
            all_go_on(&mut team, &talks);
        }
        assert_eq!((team.sum(|c| c.new_flows.get()), team.sum(|c| c.handed_out.get())), (flows, handed_out));
        for kind in kinds {
            assert_eq!(team.proofs_of(kind), [Proof::Refuted(Refuted::NoHash); 4], "{kind:?}");
        }
        for kind in others {
            assert!(are(&team, kind, Proof::Proven), "{kind:?}: {:?}", team.proofs_of(kind));
        }
    }
}

#[test]
fn flows_that_only_go_on_prove_their_queue() {
    let mut team = Team::over_cards(2);
    team.settle();
    let talks = opened(&mut team, &RssKind::ALL, 0, 24);
    team.proofs.iter().flat_map(|port| port.iter()).for_each(|proof| proof.restart(&RssKind::ALL));
    let agreed =
        |team: &Team| RssKind::ALL.map(|kind| team.proofs_of(kind).iter().all(|proof| *proof != Proof::Observing { agreed: 0 }));
    for _ in 0..300 {
        all_go_on(&mut team, &talks);
    }
    assert_eq!(agreed(&team), [true; 4]);
}

/// What happens next to a gateway over a card.
#[derive(Clone, Debug)]
enum Step {
    /// The card hashes the kinds with these keys: none, the right one, or another.
    Keys([Option<bool>; 4]),
    /// The card leads each hash to another worker than before.
    Table(u8),
    /// Another device comes, which offers these kinds.
    Device([bool; 4]),
    /// A connection or an exchange begins, of the kind with this number.
    Open(usize),
    /// All go on.
    GoOn,
}

fn step() -> impl Strategy<Value = Step> {
    let key = prop_oneof![Just(None), Just(Some(true)), Just(Some(false))];
    prop_oneof![
        1 => prop::array::uniform4(key).prop_map(Step::Keys),
        1 => (0..3_u8).prop_map(Step::Table),
        1 => any::<[bool; 4]>().prop_map(Step::Device),
        8 => (0..4_usize).prop_map(Step::Open),
        2 => Just(Step::GoOn),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn no_change_of_a_card_leads_a_packet_away_from_its_flow(
        mode in prop_oneof![Just(Mode::Nat), Just(Mode::Dnat)],
        workers in 2..=4_u8,
        are_proven: bool,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let steering = Steering::toeplitz(workers, SEED);
        let (right, wrong) = (*steering.rss_key().unwrap(), other_key(&steering));
        let mut now = card(&steering);
        let mut team = over(mode, &steering, now.clone());
        let mut talks = if are_proven { opened(&mut team, &RssKind::ALL, 0, 160) } else { Vec::new() };
        talks.truncate(40);
        let straight = now.reta.clone();
        for (n, step) in (1000..).zip(steps) {
            match step {
                Step::Keys(keys) => now.keys = keys.map(|key| key.map(|is_right| if is_right { right } else { wrong })),
                Step::Table(by) => now.reta = straight.iter().map(|queue| (queue + by) % workers).collect(),
                Step::Device(offers) => {
                    let offered: Vec<_> = RssKind::ALL.into_iter().zip(offers).filter(|(_, is)| *is).map(|(kind, _)| kind).collect();
                    team.proofs.iter().flat_map(|port| port.iter()).for_each(|proof| proof.restart(&offered));
                }
                Step::Open(kind) => {
                    let mut talk = Talk::new(RssKind::ALL[kind], n);
                    talk.open(&mut team);
                    talks.push(talk);
                }
                Step::GoOn => all_go_on(&mut team, &talks),
            }
            team.delivery = Delivery::Card(now.clone());
        }
        all_go_on(&mut team, &talks);
        prop_assert_eq!(team.sum(|c| c.account().dropped), 0);
    }
}

/// A description, and the frame from one end to the other.
type Row = (&'static str, fn(&str, &str) -> Vec<u8>);

#[test]
fn packets_that_cards_do_not_hash_neither_prove_nor_refute_and_reach_their_owner() {
    let rows: [Row; 4] = [
        ("IPv6 with destination options", |from, to| {
            Packet { extensions: vec![(60, vec![0, 0, 1, 4, 0, 0, 0, 0])], ..Packet::udp(from, to) }.build()
        }),
        ("an atomic fragment", |from, to| {
            Packet { extensions: vec![(44, vec![0, 0, 0, 0, 0, 0, 0, 9])], ..Packet::udp(from, to) }.build()
        }),
        ("IPv4 with options", |from, to| Packet { options: vec![1; 4], ..Packet::udp(from, to) }.build()),
        ("two tags", |from, to| {
            let plain = Packet::udp(from, to).build();
            [&plain[..12], &[0x88, 0xa8, 0, 0, 0x81, 0, 0, 0], &plain[12..]].concat()
        }),
    ];
    for (sentence, frame) in rows {
        let mut team = Team::over_cards(2);
        team.settle();
        team.exchange(&clients(600), tcp_flags::SYN);
        opened(&mut team, &UDP, 5000, 300);
        assert!(RssKind::ALL.iter().all(|kind| are(&team, *kind, Proof::Proven)));
        let (flows, hits) = (team.sum(|c| c.new_flows.get()), team.sum(|c| c.hits.get()));
        // The same flows as the plain packets: the frames reach them wherever they arrive.
        let clients = (0..1100_u16).map(|n| match sentence.contains("IPv4") || sentence.contains("tags") {
            true => (format!("198.51.100.{}:{}", n % 200 + 1, 2000 + n), "192.0.2.101:53"),
            false => (format!("[2001:db8:1::{}]:{}", n % 200 + 1, 2000 + n), "[2001:db8::1:1]:53"),
        });
        let clients: Vec<_> = clients.collect();
        for (n, (from, to)) in clients.iter().enumerate() {
            let frames = [Packet::udp(from, to).build(), frame(from, to)];
            let Delivery::Card(card) = &team.delivery else { panic!("over cards") };
            assert_eq!(card.queue(&frames[1]).1, None, "{sentence}");
            team.put(UPLINK, &frames);
            assert_eq!(team.sent(CLUSTER).len(), 2, "{sentence}, client {n}");
        }
        assert_eq!(team.sum(|c| c.new_flows.get()) - flows, 1100, "{sentence}: the plain packet and the other are of one flow");
        assert_eq!(team.sum(|c| c.hits.get()) - hits, 1100, "{sentence}");
        assert!(RssKind::ALL.iter().all(|kind| are(&team, *kind, Proof::Proven)), "{sentence}");
    }
}
