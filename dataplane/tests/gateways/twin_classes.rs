//! Traffic that a flood of strays must not keep from the kernel: answers to its requests and probes, and routing
//! protocols.

use dataplane::testing::{Packet, Segment, arp_request};
use dataplane::{DropReason, PacketOutcome, PortIndex, tcp_flags};

use crate::rig::{CLUSTER, Rig, SECOND, UPLINK, ip};

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
        ("BGP", Packet::tcp("10.0.0.9:179", "10.0.0.2:40001").flags(tcp_flags::ACK).build(), linux),
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
