//! Fragments: the first one is decided on like any packet, and the others follow it, in whatever order they arrive.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use dataplane::testing::{Packet, Segment, assert_checksums, fragments, identification, reassembled};
use dataplane::{DropReason, PacketOutcome, PortIndex, tcp_flags};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proto::Mode;

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, ends, hop_limit, ip};

const ACK: u8 = tcp_flags::ACK;
const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";
const DNS: [(&str, &str); 2] = [(CLIENT, "192.0.2.101:53"), (CLIENT_V6, "[2001:db8::1:1]:53")];
const WEB: [(&str, &str); 2] = [(CLIENT, "192.0.2.100:80"), (CLIENT_V6, "[2001:db8::1:0]:80")];

fn data(len: usize) -> Vec<u8> {
    (0..=250).cycle().take(len).collect()
}

fn is_v4(frame: &[u8]) -> bool {
    frame[12..14] == [8, 0]
}

fn header_checksum_holds(frame: &[u8]) -> bool {
    let sum: u32 = frame[14..34].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    !is_v4(frame) || (sum & 0xffff) + (sum >> 16) == 0xffff
}

#[test]
fn a_datagram_goes_there_and_back_in_fragments() {
    for ((client, vip), mode) in DNS.into_iter().flat_map(|mode| [(mode, Mode::Nat), (mode, Mode::Dnat)]) {
        let mut rig = Rig::with_mode(mode);
        let question = data(3000);
        let came = fragments(&Packet::udp(client, vip).payload(&question).build(), 1400, 0x1234);
        assert_eq!(came.len(), 3);
        let left: Vec<_> = came.iter().map(|fragment| rig.forward(UPLINK, fragment)).collect();
        assert!(left.iter().all(|fragment| hop_limit(fragment) == 62 && header_checksum_holds(fragment)));
        let whole = reassembled(&left);
        assert_checksums(&whole);
        assert!(whole.ends_with(&question));
        let (snat, backend) = ends(&whole);
        assert_eq!((backend.port(), snat == client.parse().unwrap()), (5353, mode == Mode::Dnat));

        let answer = data(4000);
        let came = fragments(&Packet::udp(&backend.to_string(), &snat.to_string()).payload(&answer).build(), 1024, 7);
        let left: Vec<_> = came.iter().map(|fragment| rig.forward(CLUSTER, fragment)).collect();
        let whole = reassembled(&left);
        assert_checksums(&whole);
        assert_eq!(ends(&whole), (vip.parse().unwrap(), client.parse().unwrap()));
        assert!(whole.ends_with(&answer));
    }
}

#[test]
fn a_connection_may_send_segments_in_fragments() {
    for (client, vip) in WEB {
        let mut rig = Rig::new();
        let opened = ends(&rig.forward(UPLINK, &Packet::tcp(client, vip).build()));
        let segment = Packet::tcp(client, vip).flags(ACK).payload(&data(2000)).build();
        let left: Vec<_> = fragments(&segment, 800, 9).iter().map(|fragment| rig.forward(UPLINK, fragment)).collect();
        let whole = reassembled(&left);
        assert_checksums(&whole);
        assert_eq!(ends(&whole), opened);
    }
}

/// All permutations of `n` items.
fn orders(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let shorter = orders(n - 1);
    let insert = |order: &Vec<usize>, at: usize| [&order[..at], &[n - 1], &order[at..]].concat();
    shorter.iter().flat_map(|order| (0..n).map(move |at| insert(order, at))).collect()
}

#[test]
fn fragments_in_any_order_leave_as_those_in_order() {
    for (client, vip) in DNS {
        let came = fragments(&Packet::udp(client, vip).payload(&data(4 * 512)).build(), 512, 77);
        assert_eq!(came.len(), 5);
        for order in orders(came.len()) {
            let mut rig = Rig::new();
            for &n in &order {
                rig.put(UPLINK, &came[n]);
            }
            let left = rig.sent(CLUSTER);
            assert_eq!(left.len(), came.len(), "{order:?}");
            assert_checksums(&reassembled(&left));
            assert_eq!(rig.counters.held.get(), 0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn fragments_of_several_datagrams_with_duplicates_are_kept_apart(
        sizes in vec(1_usize..2500, 1..4), shuffle in vec((any::<Index>(), any::<Index>()), 0..30), twice in vec(any::<Index>(), 0..4),
        v6: bool,
    ) {
        let vip = DNS[usize::from(v6)].1;
        let client = |n: usize| if v6 { format!("[2001:db8:1::7]:{}", 5000 + n) } else { format!("198.51.100.7:{}", 5000 + n) };
        let mut came: Vec<(usize, Vec<u8>)> = Vec::new();
        for (n, size) in sizes.iter().enumerate() {
            let packet = Packet::udp(&client(n), vip).payload(&vec![u8::try_from(n).unwrap(); *size + 600]).build();
            came.extend(fragments(&packet, 600, 40 + u32::try_from(n).unwrap()).into_iter().map(|fragment| (n, fragment)));
        }
        for which in &twice {
            came.push(came[which.index(came.len())].clone());
        }
        for (a, b) in shuffle {
            let (a, b) = (a.index(came.len()), b.index(came.len()));
            came.swap(a, b);
        }
        let mut rig = Rig::new();
        for (_, fragment) in &came {
            rig.put(UPLINK, fragment);
        }
        let left = rig.sent(CLUSTER);
        prop_assert_eq!(left.len(), came.len());
        let numbers: BTreeSet<u32> = left.iter().map(|fragment| identification(fragment)).collect();
        prop_assert_eq!(numbers.len(), sizes.len(), "a number for each datagram");
        for number in numbers {
            let of_one: Vec<_> = left.iter().filter(|fragment| identification(fragment) == number).cloned().collect();
            let whole = reassembled(&of_one);
            assert_checksums(&whole);
            let payload = &whole[if v6 { 62 } else { 42 }..];
            prop_assert!(payload.iter().all(|byte| *byte == payload[0]), "of one datagram alone");
            prop_assert_eq!(payload.len(), sizes[usize::from(payload[0])] + 600);
        }
    }
}

#[test]
fn datagrams_of_several_clients_never_share_an_identification() {
    let mut rig = Rig::new();
    let mut numbers = BTreeSet::new();
    for n in 0..200 {
        // All use the same identification, as independent clients may.
        let client = format!("198.51.{}.{}:5555", 100 + n / 100, 1 + n % 100);
        let packet = Packet::udp(&client, "192.0.2.101:53").payload(&data(1000)).build();
        let left: Vec<_> = fragments(&packet, 800, 5).iter().map(|fragment| rig.forward(UPLINK, fragment)).collect();
        numbers.insert((ends(&left[0]).1, identification(&reassembled_head(&left))));
    }
    assert_eq!(numbers.len(), 200);
}

/// The head of the packet reassembled from the fragments of one datagram.
fn reassembled_head(fragments: &[Vec<u8>]) -> Vec<u8> {
    assert_checksums(&reassembled(fragments));
    fragments[0].clone()
}

#[test]
fn a_packet_that_may_be_fragmented_gets_an_identification_and_others_keep_their_own() {
    let mut rig = Rig::new();
    let packet = |fragmentation| Packet { fragmentation, identification: 5, ..Packet::udp(CLIENT, "192.0.2.101:53") };
    let whole = |rig: &mut Rig, port, packet: Packet| {
        let left = rig.forward(port, &packet.build());
        assert_checksums(&left);
        left
    };
    let first = whole(&mut rig, UPLINK, packet(0));
    let second = whole(&mut rig, UPLINK, packet(0));
    assert_ne!(identification(&first), identification(&second));
    assert_eq!(identification(&whole(&mut rig, UPLINK, packet(0x4000))), 5);
    let (snat, backend) = ends(&first);
    let answer = Packet { fragmentation: 0, identification: 5, ..Packet::udp(&backend.to_string(), &snat.to_string()) };
    let (a, b) = (whole(&mut rig, CLUSTER, answer.clone()), whole(&mut rig, CLUSTER, answer));
    assert_ne!(identification(&a), identification(&b));
}

#[test]
fn a_packet_that_does_not_fit_and_may_be_fragmented_leaves_in_fragments() {
    let mut rig = Rig::new();
    let packet = Packet { fragmentation: 0, ..Packet::udp(CLIENT, "192.0.2.101:53").payload(&data(4000)) };
    let originated = rig.counters.originated.get();
    assert_eq!(rig.put(UPLINK, &packet.build()), Some(PacketOutcome::Forward(CLUSTER)));
    let left = rig.sent(CLUSTER);
    assert_eq!(left.iter().map(|piece| piece.len() - 14).collect::<Vec<_>>(), [1500, 1500, 1068]);
    assert!(left.iter().all(|piece| header_checksum_holds(piece) && hop_limit(piece) == 62));
    let whole = reassembled(&left);
    assert_checksums(&whole);
    assert_eq!(rig.counters.originated.get(), originated + 2, "the packet became the first piece");
    rig.assert_account();
    // The reverse direction, and fragments that exceed the MTU themselves.
    let (snat, backend) = ends(&whole);
    let answer = Packet { fragmentation: 0, ..Packet::udp(&backend.to_string(), &snat.to_string()).payload(&data(2500)) };
    rig.put(CLUSTER, &answer.build());
    assert_checksums(&reassembled(&rig.sent(UPLINK)));
    for fragment in fragments(&answer.build(), 1600, 4) {
        rig.put(CLUSTER, &fragment);
    }
    let left = rig.sent(UPLINK);
    assert_eq!(left.len(), 3);
    assert_checksums(&reassembled(&left));
    let options = Packet { options: vec![1; 4], ..packet };
    assert_eq!(rig.put(UPLINK, &options.build()), Some(PacketOutcome::Drop(DropReason::TooBig)));
    let other = Packet { source: "198.51.100.9".parse().unwrap(), ..options };
    assert_eq!(rig.put(UPLINK, &other.build()), Some(PacketOutcome::Drop(DropReason::TooBig)));
    assert_eq!(rig.counters.flows.get(), 1, "a packet that cannot be forwarded creates no flow");
}

#[test]
fn fragments_that_come_before_the_first_wait_for_it_and_no_longer() {
    let mut rig = Rig::new();
    let came = fragments(&Packet::udp(CLIENT, "192.0.2.101:53").payload(&data(2000)).build(), 800, 3);
    assert_eq!(rig.put(UPLINK, &came[1]), None);
    assert_eq!(rig.put(UPLINK, &came[2]), None);
    assert_eq!(rig.counters.held.get(), 2);
    rig.assert_account();
    rig.now += 2 * SECOND;
    rig.worker.poll(rig.now);
    assert_eq!((rig.drops(DropReason::FragmentTimeout), rig.counters.held.get()), (2, 0));
    // The first one is forwarded alone; waiting for the others is up to the receiver.
    assert_eq!(rig.put(UPLINK, &came[0]), Some(PacketOutcome::Forward(CLUSTER)));
}

#[test]
fn too_many_early_fragments_are_dropped_with_their_reason() {
    let mut rig = Rig::new();
    let came = fragments(&Packet::udp(CLIENT, "192.0.2.101:53").payload(&data(8 * 80)).build(), 8, 3);
    for fragment in &came[1..65] {
        assert_eq!(rig.put(UPLINK, fragment), None);
    }
    assert_eq!(rig.put(UPLINK, &came[65]), Some(PacketOutcome::Drop(DropReason::FragmentTableFull)));
    rig.put(UPLINK, &came[0]);
    assert_eq!(rig.sent(CLUSTER).len(), 65);
}

#[test]
fn a_first_fragment_that_waits_for_its_neighbour_keeps_the_others_waiting() {
    let mut rig = Rig::new();
    rig.network.neighbours.retain(|n| n.link == UPLINK.into());
    rig.publish();
    let came = fragments(&Packet::udp(CLIENT, "192.0.2.101:53").payload(&data(2000)).build(), 800, 3);
    for n in [1, 0, 2] {
        assert_eq!(rig.put(UPLINK, &came[n]), None);
    }
    assert_eq!(rig.counters.held.get(), 3);
    rig.network = rig::network();
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    rig.publisher.publish(snapshot);
    rig.worker.poll(rig.now);
    assert_checksums(&reassembled(&rig.sent(CLUSTER)));
    assert_eq!(rig.counters.held.get(), 0);
}

struct Row {
    sentence: &'static str,
    port: PortIndex,
    frames: Vec<Vec<u8>>,
    fates: Vec<PacketOutcome>,
}

fn check(rows: Vec<Row>) {
    for Row { sentence, port, frames, fates } in rows {
        let mut rig = Rig::new();
        let found: Vec<_> = frames.iter().map(|frame| rig.put(port, frame)).collect();
        assert_eq!(found, fates.into_iter().map(Some).collect::<Vec<_>>(), "{sentence}");
    }
}

#[test]
fn later_fragments_share_the_verdict_of_the_first() {
    use DropReason as R;
    let drop = |reason| vec![PacketOutcome::Drop(reason); 2];
    let udp = |from: &str, to: &str| fragments(&Packet::udp(from, to).payload(&data(1000)).build(), 800, 1);
    let tcp = |from: &str, to: &str, flags| fragments(&Packet::tcp(from, to).flags(flags).payload(&data(1000)).build(), 800, 1);
    let echo = |from: &str, to: &str| fragments(&Packet::echo_request(from, to).payload(&data(1000)).build(), 800, 1);
    let row = |sentence, port, frames, fates| Row { sentence, port, frames, fates };
    check(vec![
        row("for an unused address", UPLINK, udp(CLIENT, "192.0.2.119:53"), drop(R::UnknownVip)),
        row(
            "for a closed port",
            UPLINK,
            udp(CLIENT, "192.0.2.101:54"),
            vec![PacketOutcome::Reply(UPLINK), PacketOutcome::Drop(R::AnswerLimited)],
        ),
        row("TCP of no flow", UPLINK, tcp(CLIENT, "192.0.2.100:80", ACK), drop(R::NoFlow)),
        row("to a SNAT address without flow", CLUSTER, udp("10.0.0.11:5353", "10.0.0.3:2000"), drop(R::NoFlow)),
        row("from a VIP", UPLINK, udp("192.0.2.100:5", "192.0.2.101:53"), drop(R::OwnSource)),
        row("ping in fragments", UPLINK, echo("198.51.100.7", "192.0.2.100"), drop(R::FragmentUnsupported)),
        row("ping in fragments over IPv6", UPLINK, echo("2001:db8:1::7", "2001:db8::1:0"), drop(R::FragmentUnsupported)),
        row("ping of the twin in fragments", UPLINK, echo("198.51.100.7", "192.0.2.2"), vec![PacketOutcome::Linux(UPLINK); 2]),
        row("for the twin", UPLINK, udp(CLIENT, "192.0.2.2:53"), vec![PacketOutcome::Linux(UPLINK); 2]),
        row("for a node port", UPLINK, tcp(CLIENT, "192.0.2.2:30080", tcp_flags::SYN), vec![PacketOutcome::Forward(CLUSTER); 2]),
        row("for another address", UPLINK, udp(CLIENT, "203.0.113.9:53"), vec![PacketOutcome::Linux(UPLINK); 2]),
        row("IPsec for the twin", UPLINK, ipsec("198.51.100.7", "192.0.2.2"), vec![PacketOutcome::Linux(UPLINK); 2]),
        row("IPsec for the twin over IPv6", UPLINK, ipsec("2001:db8:1::7", "2001:db8::2"), vec![PacketOutcome::Linux(UPLINK); 2]),
        row("IPsec for a VIP over IPv6", UPLINK, ipsec("2001:db8:1::7", "2001:db8::1:0"), drop(R::FragmentUnsupported)),
        row(
            "the last alone, for another address",
            UPLINK,
            udp(CLIENT, "203.0.113.9:53")[1..].to_vec(),
            vec![PacketOutcome::Linux(UPLINK)],
        ),
        row(
            "the last hop",
            UPLINK,
            hops(&Packet::udp(CLIENT, "192.0.2.101:53"), 1),
            vec![PacketOutcome::Reply(UPLINK), PacketOutcome::Drop(R::AnswerLimited)],
        ),
    ]);
}

/// ESP (RFC 4303) in two fragments.
fn ipsec(from: &str, to: &str) -> Vec<Vec<u8>> {
    let mut frame = Packet::echo_request(from, to).payload(&data(1000)).build();
    let protocol_at = if is_v4(&frame) { 23 } else { 20 };
    frame[protocol_at] = 50;
    fragments(&frame, 800, 1)
}

#[test]
fn later_fragments_of_a_protocol_without_ports_wait_for_the_first_and_go_where_it_goes() {
    let mut rig = Rig::new();
    let came = ipsec("2001:db8:1::7", "2001:db8::2");
    assert_eq!(rig.put(UPLINK, &came[1]), None, "only the first one tells the protocol");
    assert_eq!(rig.put(UPLINK, &came[0]), Some(PacketOutcome::Linux(UPLINK)));
    assert_eq!(rig.to_linux(UPLINK).len(), 2);
    rig.assert_account();
}

fn hops(packet: &Packet, hop_limit: u8) -> Vec<Vec<u8>> {
    fragments(&packet.clone().payload(&data(1000)).hop_limit(hop_limit).build(), 800, 1)
}

#[test]
fn fragments_that_hide_their_ports_are_malformed() {
    let bad = |frame: Vec<u8>| (vec![frame], vec![PacketOutcome::Drop(DropReason::Malformed)]);
    let row = |sentence, (frames, fates)| Row { sentence, port: UPLINK, frames, fates };
    let tcp = Packet::tcp(CLIENT, "192.0.2.100:80").payload(&data(64)).build();
    let udp = Packet::udp(CLIENT, "192.0.2.101:53").payload(&data(64)).build();
    let tcp_v6 = Packet::tcp(CLIENT_V6, "[2001:db8::1:0]:80").payload(&data(64)).build();
    let chain = vec![(44, vec![0, 0, 0, 1, 0, 0, 0, 9]), (60, vec![0, 1, 1, 4, 0, 0, 0, 0])];
    let cut_chain = Packet {
        extensions: chain,
        ..Packet::between(ip("2001:db8:1::7"), ip("2001:db8::1:1"), Segment::Other { protocol: 17 })
    };
    let twice = Packet {
        extensions: vec![(44, vec![0, 0, 0, 1, 0, 0, 0, 9]), (44, vec![0, 0, 0, 1, 0, 0, 0, 9])],
        ..Packet::udp(CLIENT_V6, "[2001:db8::1:1]:53")
    };
    let empty = Packet {
        fragmentation: 0x2010,
        ..Packet::between(ip("198.51.100.7"), ip("192.0.2.101"), Segment::Other { protocol: 17 })
    };
    let not_eights = Packet { fragmentation: 0x2000, ..Packet::udp(CLIENT, "192.0.2.101:53").payload(b"odd") };
    let too_long = Packet { fragmentation: 0x1fff, ..Packet::udp(CLIENT, "192.0.2.101:53").payload(&data(64)) };
    check(vec![
        row("a first fragment without all of TCP's header", bad(fragments(&tcp, 16, 1)[0].clone())),
        row("a second one with the rest of it", bad(fragments(&tcp, 8, 1)[1].clone())),
        row("a third one with the rest of it", bad(fragments(&tcp, 8, 1)[2].clone())),
        row("a second one with the rest of it, over IPv6", bad(fragments(&tcp_v6, 16, 1)[1].clone())),
        row("an IPv6 chain that goes on in the next fragment", bad(cut_chain.build())),
        row("a fragment of a fragment", bad(twice.build())),
        row("no data", bad(empty.build())),
        row("a first one that ends within eight bytes", bad(not_eights.build())),
        row("an end beyond the longest datagram", bad(too_long.build())),
        Row {
            sentence: "UDP's header alone is whole",
            port: UPLINK,
            frames: vec![fragments(&udp, 8, 1)[0].clone()],
            fates: vec![PacketOutcome::Forward(CLUSTER)],
        },
    ]);
}

#[test]
fn a_reused_identification_follows_the_newer_exchange() {
    let mut rig = Rig::new();
    let datagram = |port: u16| {
        let packet = Packet::udp(&format!("198.51.100.7:{port}"), "192.0.2.101:53").payload(&data(1000)).build();
        fragments(&packet, 800, 5)
    };
    let mut sources = BTreeSet::new();
    for port in [5555, 5556, 5557] {
        let left: Vec<_> = datagram(port).iter().map(|fragment| rig.forward(UPLINK, fragment)).collect();
        let whole = reassembled(&left);
        assert_checksums(&whole);
        let (snat, _): (SocketAddr, _) = ends(&whole);
        sources.insert((snat, identification(&left[0])));
    }
    assert_eq!(sources.len(), 3);
}

#[test]
fn fragments_by_a_wrong_port_are_not_let_in() {
    let mut rig = Rig::new();
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::udp(CLIENT, "192.0.2.101:53").build()));
    let forged = fragments(&Packet::udp(&backend.to_string(), &snat.to_string()).payload(&data(1000)).build(), 800, 1);
    for fragment in &forged {
        assert_eq!(rig.put(UPLINK, fragment), Some(PacketOutcome::Drop(DropReason::SnatWrongPort)));
    }
}

#[test]
fn fragments_that_a_backend_of_mode_dnat_sends_without_a_flow_go_to_the_kernel() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    let mut came = fragments(&Packet::udp("10.0.0.11:4000", "198.51.100.7:53").payload(&data(2000)).build(), 800, 1);
    assert_eq!(rig.put(CLUSTER, &came.remove(1)), None, "it may be of a flow");
    for fragment in came {
        rig.put(CLUSTER, &fragment);
    }
    assert_eq!(rig.to_linux(CLUSTER).len(), 3);
}

#[test]
fn a_flood_of_later_fragments_holds_a_bounded_number_and_new_datagrams_get_through() {
    let mut rig = Rig::new();
    let junk = |n: u32| {
        let client = format!("198.51.{}.{}:5555", 100 + n / 250 % 100, 1 + n % 250);
        fragments(&Packet::udp(&client, "192.0.2.101:53").payload(&data(1000)).build(), 800, n).remove(1)
    };
    for n in 0..20_000 {
        rig.arrive(UPLINK, &junk(n), 1);
    }
    while rig.worker.poll(rig.now) > 0 {}
    assert!(rig.counters.held.get() <= 1024);
    rig.assert_account();
    // In order and in reverse order, while the flood continues.
    for (n, reverse) in [(1, false), (2, true)] {
        let mut came = fragments(&Packet::udp(CLIENT, "192.0.2.101:53").payload(&data(3000)).build(), 800, n);
        if reverse {
            came.reverse();
        }
        rig.sent(CLUSTER);
        for (i, fragment) in (0..).zip(&came) {
            rig.put(UPLINK, &junk(30_000 + 10 * n + i));
            rig.put(UPLINK, fragment);
        }
        assert_checksums(&reassembled(&rig.sent(CLUSTER)));
    }
    rig.now += 2 * SECOND;
    rig.worker.poll(rig.now);
    assert_eq!(rig.counters.held.get(), 0);
}

#[test]
fn a_later_fragment_that_arrives_after_the_fin_does_not_reopen_a_one_way_connection() {
    for (client, vip) in WEB {
        let mut rig = Rig::with_mode(Mode::Dsr);
        let segment = |flags: u8, sequence: u32| Packet::tcp(client, vip).flags(flags).numbers(sequence, 77);
        rig.forward(UPLINK, &segment(tcp_flags::SYN, 5_000_000).build());
        for _ in 0..3 {
            rig.now += SECOND;
            rig.forward(UPLINK, &segment(ACK, 5_000_001).build());
        }
        let long = segment(ACK, 5_000_001).payload(&data(1500)).build();
        let parts = fragments(&long, 1024, 9);
        assert_eq!(parts.len(), 2);
        rig.forward(UPLINK, &parts[0]);
        rig.forward(UPLINK, &segment(ACK | tcp_flags::FIN, 5_001_501).build());
        rig.forward(UPLINK, &parts[1]);
        // Half closed: five minutes; open: fifteen.
        for _ in 0..64 {
            rig.now += 6 * SECOND;
            rig.worker.poll(rig.now);
        }
        rig.settle();
        assert_eq!(rig.counters.flows.get(), 0, "{client}");
    }
}
