//! Traffic that a flood of strays must not keep from the kernel: answers to its requests and probes, and routing
//! protocols.

use dataplane::testing::{Packet, Segment, arp_request};
use dataplane::{DropReason, Mac, PacketOutcome, PortIndex, tcp_flags};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, backend_mac, ip};

/// The kernel's probe of a backend from the twin's address.
const PROBE: (&str, &str) = ("10.0.0.2:40000", "10.0.0.11:8080");

/// One second of strays, a thousand every millisecond.
fn flood(rig: &mut Rig, port: PortIndex, stray: &[u8]) {
    for _ in 0..1000 {
        rig.now += SECOND / 1000;
        for _ in 0..1000 {
            rig.put(port, stray);
        }
        rig.to_linux(port);
    }
}

/// As many strays at once as exhaust the rate of strays.
fn exhaust(rig: &mut Rig, stray: &[u8]) {
    (0..2500).for_each(|_| _ = rig.put(UPLINK, stray));
    rig.to_linux(UPLINK);
}

fn answer() -> Packet {
    Packet::tcp(PROBE.1, PROBE.0).flags(tcp_flags::SYN | tcp_flags::ACK)
}

fn arp_reply() -> Vec<u8> {
    let mut reply = arp_request("10.0.0.11".parse().unwrap(), "10.0.0.2".parse().unwrap());
    reply[21] = 2;
    reply
}

#[test]
fn under_a_flood_of_strays_the_kernel_gets_what_it_needs_and_no_more_strays() {
    let stray = Packet::tcp("203.0.113.9:5", "10.0.0.2:22").build();
    let mut rig = Rig::new();
    rig.send_from_linux(CLUSTER, &Packet::tcp(PROBE.0, PROBE.1).build());
    rig.sent(CLUSTER);
    let before = rig.counters.account().transmitted;
    flood(&mut rig, CLUSTER, &stray);
    let passed = rig.counters.account().transmitted - before;
    assert!((18_000..=18_000 + 1_800).contains(&passed), "{passed} of a million strays");
    let ospf = Packet::between(ip("10.0.0.9"), ip("224.0.0.5"), Segment::Other { protocol: 89 }).payload(&[0; 24]);
    let bgp = Packet::tcp("10.0.0.11:179", "10.0.0.2:40001").flags(tcp_flags::ACK);
    let linux = PacketOutcome::Linux(CLUSTER);
    let rows = [
        ("one more stray", stray, PacketOutcome::Drop(DropReason::TwinRate)),
        ("the answer to Linux's probe", answer().build(), linux),
        (
            "a packet that only looks like one",
            Packet::tcp("10.0.0.12:8080", PROBE.0).flags(tcp_flags::ACK).build(),
            PacketOutcome::Drop(DropReason::TwinRate),
        ),
        ("the answer to the kernel's ARP request", arp_reply(), linux),
        ("BGP", Packet { source_mac: backend_mac(11), ..bgp }.build(), linux),
        ("BFD", Packet::udp("10.0.0.9:49152", "10.0.0.2:3784").hop_limit(255).build(), linux),
        ("OSPF", ospf.build(), linux),
    ];
    for (sentence, frame, outcome) in rows {
        assert_eq!(rig.put(CLUSTER, &frame), Some(outcome), "{sentence}");
    }
}

#[test]
fn a_storm_of_questions_does_not_keep_answers_out() {
    let mut rig = Rig::new();
    flood(&mut rig, CLUSTER, &arp_request("10.0.0.77".parse().unwrap(), "10.0.0.2".parse().unwrap()));
    flood(&mut rig, CLUSTER, &arp_request("10.0.0.78".parse().unwrap(), "10.0.0.2".parse().unwrap()));
    assert_eq!(rig.put(CLUSTER, &arp_reply()), Some(PacketOutcome::Linux(CLUSTER)));
}

/// Numbers of frames of 20 of each peer that reach Linux while 40 strays come every millisecond, after a burst that exhausts
/// all rates.
fn of_twenty<'f>(rig: &mut Rig, stray: &[u8], peers: impl Iterator<Item = &'f Vec<u8>> + Clone) -> Vec<usize> {
    exhaust(rig, stray);
    let mut passed: Vec<_> = peers.clone().map(|_| 0).collect();
    for _ in 0..20 {
        rig.now += SECOND / 200;
        (0..200).for_each(|_| _ = rig.put(UPLINK, stray));
        for (frame, passed) in peers.clone().zip(&mut passed) {
            *passed += usize::from(rig.put(UPLINK, frame) == Some(PacketOutcome::Linux(UPLINK)));
        }
        rig.to_linux(UPLINK);
    }
    passed
}

#[test]
fn floods_from_behind_routers_keep_neither_bfd_nor_bgp_nor_neighbour_discovery_from_linux() {
    let advertisement = |from: &str, hop_limit| {
        let segment = Segment::Icmp { kind: 136, code: 0, rest: 0x6000_0000 };
        Packet::between(ip(from), ip("2001:db8::2"), segment).payload(&[0; 16]).hop_limit(hop_limit).build()
    };
    let unknown = Packet::tcp("192.0.2.77:40000", "192.0.2.2:179");
    let floods = [
        ("SYNs to BGP", Packet::tcp("203.0.113.9:40000", "192.0.2.2:179").hop_limit(57).build()),
        ("SYNs to BGP with a source of the link", Packet::tcp("192.0.2.10:40000", "192.0.2.2:179").hop_limit(57).build()),
        ("SYNs to BGP with a source of the link that nobody has", unknown.hop_limit(57).build()),
        ("advertisements", advertisement("2001:db8:1::7", 57)),
        ("BFD", Packet::udp("192.0.2.1:49152", "192.0.2.2:3784").hop_limit(254).build()),
    ];
    // The address of the neighbour stands in the frame of its router.
    let of_router = Mac([2, 0, 0, 0, 0, 1]);
    let peers = [
        ("BFD", Packet::udp("192.0.2.1:49152", "192.0.2.2:3784").hop_limit(255).build()),
        (
            "BGP",
            Packet { source_mac: of_router, ..Packet::tcp("192.0.2.1:179", "192.0.2.2:40001").flags(tcp_flags::ACK) }.build(),
        ),
        ("an advertisement", advertisement("2001:db8::ffff", 255)),
    ];
    for (flood, stray) in floods {
        let passed = of_twenty(&mut Rig::new(), &stray, peers.iter().map(|(_, frame)| frame));
        assert_eq!(passed, [20; 3], "of {:?} under a flood of {flood}", peers.each_ref().map(|(peer, _)| *peer));
    }
}

#[test]
fn a_reply_of_linux_to_a_stranger_does_not_open_a_class_for_the_stranger() {
    let stray = Packet::udp("203.0.113.9:5", "192.0.2.2:161").build();
    let reply = Packet::udp("192.0.2.2:161", "203.0.113.9:5").build();
    let mut rig = Rig::new();
    assert_eq!(rig.put(UPLINK, &stray), Some(PacketOutcome::Linux(UPLINK)));
    rig.send_from_linux(UPLINK, &reply);
    rig.sent(UPLINK);
    exhaust(&mut rig, &stray);
    assert_eq!(rig.put(UPLINK, &stray), Some(PacketOutcome::Drop(DropReason::TwinRate)));
    let mut rig = Rig::new();
    rig.send_from_linux(UPLINK, &Packet::udp("192.0.2.2:161", "203.0.113.9:5").build());
    rig.sent(UPLINK);
    exhaust(&mut rig, &Packet::udp("203.0.113.8:5", "192.0.2.2:161").build());
    assert_eq!(rig.put(UPLINK, &stray), Some(PacketOutcome::Linux(UPLINK)), "what Linux began itself is an answer");
}

#[test]
fn exchanges_that_others_begin_do_not_count_as_begun_by_the_kernel() {
    let rows = [
        ("Linux answers a stray with RST", Packet::tcp("192.0.2.2:22", "203.0.113.9:5").flags(tcp_flags::RST | tcp_flags::ACK)),
        ("Linux accepts a connection", Packet::tcp("192.0.2.2:22", "203.0.113.9:5").flags(tcp_flags::SYN | tcp_flags::ACK)),
    ];
    for (sentence, sent) in rows {
        let mut rig = Rig::new();
        rig.send_from_linux(UPLINK, &sent.build());
        rig.sent(UPLINK);
        let stray = Packet::tcp("203.0.113.9:5", "192.0.2.2:22").flags(tcp_flags::ACK).build();
        flood(&mut rig, UPLINK, &stray);
        assert_eq!(rig.put(UPLINK, &stray), Some(PacketOutcome::Drop(DropReason::TwinRate)), "{sentence}");
    }
}
