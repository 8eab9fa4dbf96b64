//! Verdicts, as rows of a sentence, the frame that arrives, and its outcome.

use std::net::SocketAddr;

use dataplane::testing::{Packet, Segment, arp_request, assert_checksums, neighbour_solicitation};
use dataplane::{DropReason, Mac, Neighbour, PacketOutcome, PortIndex, Route, tcp_flags};
use proto::{Family, ServiceName};

use crate::rig::{self, BACKENDS, CLUSTER, CLUSTER_MAC, ROUTER_MAC, Rig, UPLINK, UPLINK_MAC, backend_mac, ends, ip};

const ACK: u8 = tcp_flags::ACK;
const RST: u8 = tcp_flags::RST;
const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";

struct Row {
    sentence: &'static str,
    port: PortIndex,
    frame: Vec<u8>,
    outcome: PacketOutcome,
}

fn row(sentence: &'static str, port: PortIndex, frame: Vec<u8>, outcome: PacketOutcome) -> Row {
    Row { sentence, port, frame, outcome }
}

fn check(rows: Vec<Row>) {
    for Row { sentence, port, frame, outcome } in rows {
        let mut rig = Rig::new();
        assert_eq!(rig.put(port, &frame), Some(outcome), "{sentence}");
    }
}

#[test]
fn packets_for_frontends_are_forwarded_and_others_are_not() {
    let forward = PacketOutcome::Forward(CLUSTER);
    let reply = PacketOutcome::Reply(UPLINK);
    let linux = PacketOutcome::Linux(UPLINK);
    check(vec![
        row("a SYN to a VIP's port", UPLINK, Packet::tcp(CLIENT, "192.0.2.100:80").build(), forward),
        row("a SYN to a VIP's port over IPv6", UPLINK, Packet::tcp(CLIENT_V6, "[2001:db8::1:0]:80").build(), forward),
        row("a datagram to a VIP's port", UPLINK, Packet::udp(CLIENT, "192.0.2.101:53").build(), forward),
        row("a datagram over IPv6", UPLINK, Packet::udp(CLIENT_V6, "[2001:db8::1:1]:53").build(), forward),
        row("a SYN to a node port", UPLINK, Packet::tcp(CLIENT, "192.0.2.2:30080").build(), forward),
        row("a SYN to a closed port of a VIP", UPLINK, Packet::tcp(CLIENT, "192.0.2.100:81").build(), reply),
        row("a datagram to a closed port of a VIP", UPLINK, Packet::udp(CLIENT, "192.0.2.100:81").build(), reply),
        row("a SYN to the UDP frontend", UPLINK, Packet::tcp(CLIENT, "192.0.2.101:53").build(), reply),
        row("ping to a VIP", UPLINK, Packet::echo_request("198.51.100.7", "192.0.2.100").build(), reply),
        row("ping to a VIP over IPv6", UPLINK, Packet::echo_request("2001:db8:1::7", "2001:db8::1:0").build(), reply),
        row(
            "ping to the SNAT address",
            CLUSTER,
            Packet::echo_request("10.0.0.11", "10.0.0.3").build(),
            PacketOutcome::Reply(CLUSTER),
        ),
        row("ping to the twin", UPLINK, Packet::echo_request("198.51.100.7", "192.0.2.2").build(), linux),
        row("a SYN to a closed port of the twin", UPLINK, Packet::tcp(CLIENT, "192.0.2.2:22").build(), linux),
        row("a packet for another address", UPLINK, Packet::tcp(CLIENT, "203.0.113.9:80").build(), linux),
        row("multicast", UPLINK, Packet::udp(CLIENT, "224.0.0.5:89").build(), linux),
    ]);
}

#[test]
fn reserved_ipv4_addresses_are_unicast_but_for_the_broadcast_address() {
    // 240.0.0.0/4, as a client, towards Linux, in answers and as a backend.
    let forward = PacketOutcome::Forward(CLUSTER);
    check(vec![
        row("a SYN of a client", UPLINK, Packet::tcp("240.0.0.1:5555", "192.0.2.100:80").build(), forward),
        row("the last of them", UPLINK, Packet::tcp("255.255.255.254:5555", "192.0.2.100:80").build(), forward),
        row("a closed port", UPLINK, Packet::tcp("240.0.0.1:5555", "192.0.2.100:81").build(), PacketOutcome::Reply(UPLINK)),
        row("to Linux", UPLINK, Packet::tcp("240.0.0.1:5555", "192.0.2.2:22").build(), PacketOutcome::Linux(UPLINK)),
    ]);
    let mut rig = Rig::new();
    let backend: SocketAddr = "240.0.0.11:8080".parse().unwrap();
    rig.change_service(&ServiceName::new("default", "web"), |service| {
        service.ports.iter_mut().filter(|port| port.family == Family::V4).for_each(|port| {
            port.backends.truncate(1);
            port.backends[0].address = backend;
        });
    });
    let link = CLUSTER.into();
    rig.network.routes.push(Route { to: "240.0.0.0/24".parse().unwrap(), via: None, link, weight: 1 });
    rig.network.neighbours.push(Neighbour { link, address: backend.ip(), mac: Mac([2, 0, 0, 0, 1, 11]) });
    rig.publish();
    let (snat, to) = ends(&rig.forward(UPLINK, &Packet::tcp(CLIENT, "192.0.2.100:80").build()));
    assert_eq!(to, backend);
    let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK).build();
    assert_eq!(ends(&rig.forward(CLUSTER, &answer)).1, CLIENT.parse().unwrap());
}

#[test]
fn neighbour_discovery_that_came_through_a_router_is_dropped() {
    let mut rig = Rig::new();
    let asked = |hop_limit| {
        let solicitation = neighbour_solicitation("2001:db8::ffff".parse().unwrap(), "2001:db8::1:0".parse().unwrap());
        solicitation.hop_limit(hop_limit).build()
    };
    assert_eq!(rig.put(UPLINK, &asked(254)), Some(PacketOutcome::Drop(DropReason::Malformed)), "for a VIP");
    assert_eq!(rig.put(UPLINK, &asked(255)), Some(PacketOutcome::Reply(UPLINK)));
    for (kind, payload) in [(133, 0), (134, 8), (135, 16), (136, 16), (137, 32)] {
        let segment = Segment::Icmp { kind, code: 0, rest: 0 };
        let message = Packet::between(ip("2001:db8:1::7"), ip("2001:db8::2"), segment).payload(&vec![0; payload]);
        let linux = PacketOutcome::Linux(UPLINK);
        for (hop_limit, outcome) in [(57, PacketOutcome::Drop(DropReason::Malformed)), (255, linux)] {
            assert_eq!(rig.put(UPLINK, &message.clone().hop_limit(hop_limit).build()), Some(outcome), "{kind} {hop_limit}");
        }
    }
    let anonymous = Packet::between(ip("::"), ip("ff02::2"), Segment::Icmp { kind: 133, code: 0, rest: 0 });
    let anonymous = Packet { destination_mac: Mac([0x33, 0x33, 0, 0, 0, 2]), ..anonymous };
    let outcome = rig.put(UPLINK, &anonymous.clone().hop_limit(64).build());
    assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::Malformed)), "without an address");
    assert_eq!(rig.put(UPLINK, &anonymous.hop_limit(255).build()), Some(PacketOutcome::Linux(UPLINK)));
}

#[test]
fn packets_that_are_never_forwarded_are_dropped_with_their_reason() {
    use DropReason as R;
    let drop = PacketOutcome::Drop;
    let mut wrong_checksum = Packet::tcp(CLIENT, "192.0.2.100:80").build();
    wrong_checksum[24] ^= 1;
    let fragment = Packet { fragmentation: 0x0010, ..Packet::echo_request("198.51.100.7", "192.0.2.101") };
    let gre = Packet::between(ip("198.51.100.7"), ip("192.0.2.100"), Segment::Other { protocol: 47 }).payload(&[0; 8]);
    let icmp_error = Packet::between(ip("198.51.100.7"), ip("192.0.2.100"), Segment::Icmp { kind: 3, code: 4, rest: 1300 });
    let to_all = Packet { destination_mac: Mac([0xff; 6]), ..Packet::tcp(CLIENT, "192.0.2.100:80") };
    check(vec![
        row("a broadcast frame with a VIP in it", UPLINK, to_all.build(), drop(R::Malformed)),
        row("a frame that is too short", UPLINK, vec![0; 13], drop(R::Malformed)),
        row("a wrong IPv4 header checksum", UPLINK, wrong_checksum, drop(R::Ipv4Checksum)),
        row("broadcast as source", UPLINK, Packet::tcp("255.255.255.255:5", "192.0.2.100:80").build(), drop(R::MartianSource)),
        row("a loopback source", UPLINK, Packet::tcp("127.0.0.1:5", "192.0.2.100:80").build(), drop(R::MartianSource)),
        row("a multicast source", UPLINK, Packet::tcp("224.0.0.1:5", "192.0.2.100:80").build(), drop(R::MartianSource)),
        row(
            "source = destination",
            UPLINK,
            Packet::tcp("192.0.2.100:80", "192.0.2.100:80").build(),
            drop(R::SameSourceDestination),
        ),
        row("a VIP as source", UPLINK, Packet::tcp("192.0.2.101:80", "192.0.2.100:80").build(), drop(R::OwnSource)),
        row("the SNAT address as source", UPLINK, Packet::tcp("10.0.0.3:80", "192.0.2.100:80").build(), drop(R::OwnSource)),
        row(
            "a VIP as source of what the SNAT address would answer",
            CLUSTER,
            Packet::tcp("192.0.2.100:80", "10.0.0.3:2000").flags(ACK).build(),
            drop(R::OwnSource),
        ),
        row(
            "a VIP as source of what Linux would route",
            UPLINK,
            Packet::tcp("192.0.2.100:80", CLIENT).build(),
            drop(R::OwnSource),
        ),
        row("no source", UPLINK, Packet::tcp("0.0.0.0:5", "192.0.2.100:80").build(), drop(R::MartianSource)),
        row("an unused address of the pool", UPLINK, Packet::tcp(CLIENT, "192.0.2.119:80").build(), drop(R::UnknownVip)),
        row("ping to it", UPLINK, Packet::echo_request("198.51.100.7", "192.0.2.119").build(), drop(R::UnknownVip)),
        row("a fragment of a ping", UPLINK, fragment.build(), drop(R::FragmentUnsupported)),
        row("GRE to a VIP", UPLINK, gre.build(), drop(R::UnsupportedProtocol)),
        row("an ICMP error about a packet of no flow", UPLINK, icmp_error.payload(&[0; 28]).build(), drop(R::IcmpUnmatched)),
        row("a RST of no flow", UPLINK, Packet::tcp(CLIENT, "192.0.2.100:80").flags(RST).build(), drop(R::NoFlow)),
        row("an ACK of no flow", UPLINK, Packet::tcp(CLIENT, "192.0.2.100:80").flags(ACK).build(), drop(R::NoFlow)),
        row(
            "an ACK of no flow to the SNAT address",
            CLUSTER,
            Packet::tcp("10.0.0.11:8080", "10.0.0.3:2000").flags(ACK).build(),
            drop(R::NoFlow),
        ),
        row(
            "a datagram of no flow to the SNAT address",
            CLUSTER,
            Packet::udp("10.0.0.11:5353", "10.0.0.3:2000").build(),
            drop(R::NoFlow),
        ),
    ]);
}

#[test]
fn a_connection_goes_there_and_back_with_every_field_rewritten() {
    for (client, vip, snat) in [(CLIENT, "192.0.2.100:80", "10.0.0.3"), (CLIENT_V6, "[2001:db8::1:0]:80", "fd00::3")] {
        let mut rig = Rig::new();
        let sent = rig.forward(UPLINK, &Packet::tcp(client, vip).payload(b"hello").build());
        assert_checksums(&sent);
        assert_eq!(&sent[6..12], &CLUSTER_MAC.0);
        let (source, destination) = rig::ends(&sent);
        assert_eq!(source.ip(), ip(snat));
        assert!(source.port() >= 1024);
        assert_eq!(destination.port(), 8080);
        let last = rig::last_byte(destination.ip());
        let backend = BACKENDS
            .into_iter()
            .find(|n| last == if destination.is_ipv4() { *n } else { u8::from_str_radix(&n.to_string(), 16).unwrap() });
        assert_eq!(&sent[0..6], &backend_mac(backend.unwrap()).0);
        assert_eq!(rig::hop_limit(&sent), 62);

        let reply = Packet::tcp(&destination.to_string(), &source.to_string()).flags(tcp_flags::SYN | ACK).payload(b"world");
        let back = rig.forward(CLUSTER, &reply.build());
        assert_checksums(&back);
        assert_eq!(rig::ends(&back), (vip.parse().unwrap(), client.parse().unwrap()));
        assert_eq!((&back[0..6], &back[6..12]), (&ROUTER_MAC.0[..], &UPLINK_MAC.0[..]));
        assert!(back.ends_with(b"world"));
    }
}

#[test]
fn a_flow_keeps_its_backend_and_others_spread_over_all() {
    let mut rig = Rig::new();
    let mut seen = std::collections::HashSet::new();
    for n in 0..60 {
        let client = format!("198.51.100.7:{}", 2000 + n);
        let first = rig::ends(&rig.forward(UPLINK, &Packet::tcp(&client, "192.0.2.100:80").build()));
        let again = rig::ends(&rig.forward(UPLINK, &Packet::tcp(&client, "192.0.2.100:80").flags(ACK).build()));
        assert_eq!(first, again);
        seen.insert(first.1);
    }
    assert_eq!(seen.len(), 3);
}

#[test]
fn a_udp_checksum_of_zero_stays_zero_over_ipv4() {
    let mut rig = Rig::new();
    let mut packet = Packet::udp(CLIENT, "192.0.2.101:53");
    let Segment::Udp { checksum, .. } = &mut packet.segment else { unreachable!() };
    *checksum = false;
    let sent = rig.forward(UPLINK, &packet.build());
    assert_eq!(&sent[40..42], &[0, 0]);
    assert_checksums(&sent);
}

#[test]
fn a_reply_on_the_wrong_port_is_not_let_in() {
    let mut rig = Rig::new();
    let (snat, backend) = rig::ends(&rig.forward(UPLINK, &Packet::tcp(CLIENT, "192.0.2.100:80").build()));
    let forged = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK);
    assert_eq!(rig.put(UPLINK, &forged.build()), Some(PacketOutcome::Drop(DropReason::SnatWrongPort)));
}

#[test]
fn mid_stream_without_a_flow_gets_a_reset_that_counts_as_originated() {
    let mut rig = Rig::new();
    let before = rig.counters.originated.get();
    let packet = Packet::tcp(CLIENT, "192.0.2.100:80").flags(ACK).payload(b"data");
    assert_eq!(rig.put(UPLINK, &packet.build()), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    let sent = rig.sent(UPLINK);
    assert_eq!(sent.len(), 1);
    assert_checksums(&sent[0]);
    assert_eq!(rig::ends(&sent[0]), ("192.0.2.100:80".parse().unwrap(), CLIENT.parse().unwrap()));
    assert_eq!(sent[0][47] & RST, RST);
    assert_eq!(rig.counters.originated.get(), before + 1);
}

#[test]
fn the_time_to_live_and_the_mtu_are_answered() {
    let mut rig = Rig::new();
    let dying = Packet::tcp(CLIENT, "192.0.2.100:80").hop_limit(1).build();
    assert_eq!(rig.put(UPLINK, &dying), Some(PacketOutcome::Reply(UPLINK)));
    assert_eq!(rig.sent(UPLINK)[0][34], 11, "ICMP time exceeded");
    rig.forward(UPLINK, &Packet::tcp(CLIENT, "192.0.2.100:80").build());
    let large = Packet::tcp(CLIENT, "192.0.2.100:80").flags(ACK).payload(&[0; 2000]);
    assert_eq!(rig.put(UPLINK, &large.build()), Some(PacketOutcome::Reply(UPLINK)));
    let answer = rig.sent(UPLINK).remove(0);
    assert_checksums(&answer);
    assert_eq!((answer[34], answer[35]), (3, 4), "fragmentation needed");
    assert_eq!(&answer[40..42], &1500u16.to_be_bytes());
    let may_be_cut = Packet { fragmentation: 0, ..large };
    assert_eq!(rig.put(UPLINK, &may_be_cut.build()), Some(PacketOutcome::Forward(CLUSTER)));
}

#[test]
fn arp_and_neighbour_discovery_are_answered_for_our_addresses_and_otherwise_passed_to_the_kernel() {
    let rows: [(&str, PortIndex, Vec<u8>, PacketOutcome); 7] = [
        ("a VIP", UPLINK, arp_request([192, 0, 2, 10].into(), [192, 0, 2, 100].into()), PacketOutcome::Reply(UPLINK)),
        ("the SNAT address", CLUSTER, arp_request([10, 0, 0, 11].into(), [10, 0, 0, 3].into()), PacketOutcome::Reply(CLUSTER)),
        (
            "a VIP on the wrong port",
            CLUSTER,
            arp_request([10, 0, 0, 11].into(), [192, 0, 2, 100].into()),
            PacketOutcome::Linux(CLUSTER),
        ),
        ("the twin's address", UPLINK, arp_request([192, 0, 2, 10].into(), [192, 0, 2, 2].into()), PacketOutcome::Linux(UPLINK)),
        (
            "an unused pool address",
            UPLINK,
            arp_request([192, 0, 2, 10].into(), [192, 0, 2, 119].into()),
            PacketOutcome::Linux(UPLINK),
        ),
        (
            "a VIP over IPv6",
            UPLINK,
            neighbour_solicitation(v6("2001:db8::10"), v6("2001:db8::1:0")).build(),
            PacketOutcome::Reply(UPLINK),
        ),
        (
            "the twin over IPv6",
            UPLINK,
            neighbour_solicitation(v6("2001:db8::10"), v6("2001:db8::2")).build(),
            PacketOutcome::Linux(UPLINK),
        ),
    ];
    for (sentence, port, frame, outcome) in rows {
        let mut rig = Rig::new();
        assert_eq!(rig.put(port, &frame), Some(outcome), "who has {sentence}?");
        if outcome == PacketOutcome::Reply(port) {
            let mac: Mac = if port == UPLINK { UPLINK_MAC } else { CLUSTER_MAC };
            assert_eq!(&rig.sent(port)[0][6..12], &mac.0);
        }
    }
}

#[test]
fn duplicate_address_detection_of_a_gateway_address_is_answered() {
    let probe = |target: &str| neighbour_solicitation(std::net::Ipv6Addr::UNSPECIFIED, v6(target));
    let without_option = |target: &str| {
        let mut packet = probe(target);
        packet.payload.truncate(16); // a host without address must not tell its MAC (RFC 4861 section 4.3)
        packet.build()
    };
    let mut rig = Rig::new();
    assert_eq!(rig.put(UPLINK, &without_option("2001:db8::1:0")), Some(PacketOutcome::Reply(UPLINK)));
    let announcement = rig.sent(UPLINK).remove(0);
    assert_checksums(&announcement);
    assert_eq!((&announcement[..6], &announcement[6..12]), (&[0x33, 0x33, 0, 0, 0, 1][..], &UPLINK_MAC.0[..]));
    assert_eq!(announcement[22..38], v6("2001:db8::1:0").octets());
    assert_eq!(announcement[38..54], v6("ff02::1").octets(), "all nodes hear it");
    assert_eq!((announcement[54], announcement[58] & 0xe0), (136, 0x20), "an advertisement: override, not solicited");
    let mut to_one = probe("2001:db8::1:0");
    to_one.destination = ip("ff02::1");
    to_one.payload.truncate(16);
    let rows = [
        ("of another host", without_option("2001:db8::77")),
        ("the twin's", without_option("2001:db8::2")),
        ("with an option that it may not have", probe("2001:db8::1:0").build()),
        ("not to the group of the address", to_one.build()),
    ];
    for (sentence, frame) in rows {
        assert_eq!(rig.put(UPLINK, &frame), Some(PacketOutcome::Linux(UPLINK)), "{sentence}");
    }
    assert_eq!(
        rig.put(CLUSTER, &without_option("2001:db8::1:0")),
        Some(PacketOutcome::Linux(CLUSTER)),
        "a VIP on the wrong port"
    );
}

#[test]
fn answers_are_limited_except_arp_and_neighbour_discovery() {
    let questions = [
        arp_request([192, 0, 2, 10].into(), [192, 0, 2, 100].into()),
        neighbour_solicitation(v6("2001:db8::10"), v6("2001:db8::1:0")).build(),
    ];
    for frame in questions {
        let mut rig = Rig::new();
        assert!((0..2000).all(|_| rig.put(UPLINK, &frame) == Some(PacketOutcome::Reply(UPLINK))));
    }
    let frames = [
        Packet::echo_request("198.51.100.7", "192.0.2.100").build(),
        Packet::tcp(CLIENT, "192.0.2.100:81").build(),
        Packet::udp(CLIENT, "192.0.2.101:54").build(),
    ];
    for frame in frames {
        let mut rig = Rig::new();
        let fates: Vec<_> = (0..200).map(|_| rig.put(UPLINK, &frame)).collect();
        assert_eq!(fates[..100], vec![Some(PacketOutcome::Reply(UPLINK)); 100]);
        assert_eq!(fates[199], Some(PacketOutcome::Drop(DropReason::AnswerLimited)));
    }
}

#[test]
fn a_flood_to_a_closed_port_does_not_end_path_mtu_discovery_nor_the_other_way_round() {
    for (client, closed, open) in
        [(CLIENT, "192.0.2.100:81", "192.0.2.100:80"), ("[2001:db8:1::7]:5555", "[2001:db8::1:0]:81", "[2001:db8::1:0]:80")]
    {
        let mut config = rig::config(1024);
        config.ports[1].mtu = 1280;
        let mut rig = Rig::with_config(config);
        (rig.state, rig.network) = (rig::state(), rig::network());
        rig.publish();
        let flood = Packet::tcp(client, closed).build();
        let too_big = Packet::tcp(client, open).payload(&[7; 1400]).build();
        let limited = |rig: &mut Rig, frame: &[u8]| {
            (0..200).filter(|_| rig.put(UPLINK, frame) == Some(PacketOutcome::Drop(DropReason::AnswerLimited))).count()
        };
        assert_eq!(limited(&mut rig, &flood), 100, "{client}");
        for _ in 0..10 {
            assert_eq!(rig.put(UPLINK, &too_big), Some(PacketOutcome::Reply(UPLINK)), "{client}");
        }
        assert_eq!(limited(&mut rig, &too_big), 110, "{client}");
        rig.now += rig::SECOND;
        assert_eq!(limited(&mut rig, &too_big), 100, "{client}");
        assert_eq!(rig.put(UPLINK, &flood), Some(PacketOutcome::Reply(UPLINK)), "{client}");
    }
}

fn v6(text: &str) -> std::net::Ipv6Addr {
    text.parse().unwrap()
}

#[test]
fn nothing_is_answered_before_the_first_complete_state() {
    let mut rig = Rig::before_state(1024);
    rig.put(UPLINK, &arp_request([192, 0, 2, 10].into(), [192, 0, 2, 100].into()));
    rig.put(UPLINK, &Packet::tcp(CLIENT, "192.0.2.100:80").build());
    rig.put(UPLINK, &Packet::echo_request("198.51.100.7", "192.0.2.100").build());
    rig.put(CLUSTER, &Packet::tcp("10.0.0.11:8080", "10.0.0.3:2000").flags(ACK).build());
    rig.settle_nothing_sent();
}

#[test]
fn no_address_of_the_gateway_itself_answers_before_the_first_complete_state() {
    let mut config = rig::config(1024);
    config.ports[0].twin = false;
    config.tunnel.sources = vec![rig::ip("10.0.0.4")];
    config.node_port_addresses.clear();
    let rows = [
        ("echo to a SNAT address", CLUSTER, Packet::echo_request("10.0.0.11", "10.0.0.3")),
        ("TCP to a SNAT address", CLUSTER, Packet::tcp("10.0.0.11:8080", "10.0.0.3:2000").flags(ACK)),
        ("UDP to a SNAT address", CLUSTER, Packet::udp("10.0.0.11:8080", "10.0.0.3:2000")),
        ("echo to a tunnel's source", CLUSTER, Packet::echo_request("10.0.0.11", "10.0.0.4")),
        ("echo to a port without twin", UPLINK, Packet::echo_request("198.51.100.7", "192.0.2.2")),
        ("TCP to a port without twin", UPLINK, Packet::tcp(CLIENT, "192.0.2.2:80")),
        ("UDP to a port without twin", UPLINK, Packet::udp(CLIENT, "192.0.2.2:80")),
        ("the same, IPv6", UPLINK, Packet::echo_request("2001:db8:1::7", "2001:db8::2")),
    ];
    for (sentence, port, packet) in rows {
        let mut rig = Rig::with_config(config.clone());
        rig.network = rig::network();
        assert_eq!(rig.put(port, &packet.build()), Some(PacketOutcome::Drop(DropReason::UnknownVip)), "{sentence}");
        rig.settle_nothing_sent();
        rig.publish();
        let answered = !sentence.contains("UDP to a SNAT");
        rig.put(port, &packet.build());
        assert_eq!(!rig.sent(port).is_empty(), answered, "{sentence}, afterwards");
    }
}

#[test]
fn packets_of_the_kernel_leave_unless_they_are_for_a_vip() {
    let mut rig = Rig::new();
    let frame = Packet::tcp("192.0.2.2:40000", "198.51.100.7:80").build();
    rig.send_from_linux(UPLINK, &frame);
    assert_eq!(rig.sent(UPLINK), [frame]);
    rig.send_from_linux(UPLINK, &Packet::tcp("192.0.2.2:40000", "192.0.2.100:80").build());
    assert!(rig.sent(UPLINK).is_empty());
    assert_eq!(rig.drops(DropReason::VipLoop), 1);
}

#[test]
fn new_addresses_are_announced_three_times() {
    let mut rig = Rig::before_state(1024);
    rig.state = rig::state();
    rig.network = rig::network();
    let sent = rig.publish_and_watch();
    let vip = [192, 0, 2, 100];
    let announcements = sent.iter().filter(|frame| frame[12..14] == [8, 6] && frame[28..32] == vip && frame[38..42] == vip);
    assert_eq!(announcements.count(), 3);
    let advertisements = sent.iter().filter(|frame| frame[12..14] == [0x86, 0xdd] && frame[54] == 136);
    assert_eq!(advertisements.count(), 6, "two IPv6 VIPs, three times each");
}

#[test]
fn addresses_are_announced_again_when_the_link_is_back() {
    let mut rig = Rig::new();
    rig.network.down = vec![UPLINK];
    assert!(rig.publish_and_watch().is_empty());
    rig.network.down.clear();
    let sent = rig.publish_and_watch();
    let vip = [192, 0, 2, 100];
    let announcements = sent.iter().filter(|frame| frame[12..14] == [8, 6] && frame[28..32] == vip);
    assert_eq!(announcements.count(), 3);
}
