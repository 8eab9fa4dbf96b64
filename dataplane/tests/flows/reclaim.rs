//! Which flows yield when memory or SNAT ports run out (FORWARDING 3), and how both sides of an ended connection learn
//! of it (FORWARDING 2).

use dataplane::testing::{Packet, assert_checksums, fragments};
use dataplane::{DropReason, PacketOutcome, PortIndex, tcp_flags};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, ends};

const ACK: u8 = tcp_flags::ACK;
const RST: u8 = tcp_flags::RST;
const SYN: u8 = tcp_flags::SYN;
const VIP: &str = "192.0.2.100:80";
const VIP6: &str = "[2001:db8::1:0]:80";

fn client(n: u32) -> String {
    format!("198.51.{}.{}:{}", 100 + n / 50_000, n / 200 % 250 + 1, 2000 + n % 200)
}

fn syn(n: u32) -> Vec<u8> {
    Packet::tcp(&client(n), VIP).numbers(70_000 + n, 0).build()
}

fn data(from: &str, to: &str) -> Vec<u8> {
    Packet::tcp(from, to).flags(ACK).numbers(5_000, 6_000).payload(b"data").build()
}

/// Flags, sequence and acknowledgement number of a TCP frame.
fn segment(frame: &[u8]) -> (u8, u32, u32) {
    assert_checksums(frame);
    let tcp = if frame[12..14] == [8, 0] { 34 } else { 54 };
    let number = |at: usize| u32::from_be_bytes(frame[tcp + at..tcp + at + 4].try_into().unwrap());
    (frame[tcp + 13], number(4), number(8))
}

fn establish(rig: &mut Rig, client: &str, vip: &str) -> (std::net::SocketAddr, std::net::SocketAddr) {
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(client, vip).build()));
    rig.forward(CLUSTER, &Packet::tcp(&backend.to_string(), &snat.to_string()).flags(SYN | ACK).build());
    rig.forward(UPLINK, &Packet::tcp(client, vip).flags(ACK).build());
    (snat, backend)
}

fn age(rig: &mut Rig, seconds: u64) {
    for _ in 0..seconds * 4 {
        rig.now += SECOND / 4;
        rig.worker.poll(rig.now);
    }
}

/// Puts in a frame that makes another flow yield; returns its outcome and what leaves at a port.
fn put_and_watch(rig: &mut Rig, at: PortIndex, frame: &[u8], out: PortIndex) -> (Option<PacketOutcome>, Vec<Vec<u8>>) {
    (rig.put(at, frame), rig.sent(out))
}

#[test]
fn in_a_full_table_the_oldest_opening_flow_yields_and_its_backend_is_reset() {
    let mut rig = Rig::with_flows(8);
    establish(&mut rig, "198.51.100.7:1", VIP);
    let first: Vec<_> = (0..7).map(|n| ends(&rig.forward(UPLINK, &syn(n)))).collect();
    let (outcome, sent) = put_and_watch(&mut rig, UPLINK, &syn(7), CLUSTER);
    assert_eq!((outcome, sent.len()), (Some(PacketOutcome::Forward(CLUSTER)), 2));
    assert_eq!((ends(&sent[0]), segment(&sent[0])), (first[0], (RST, 70_001, 0)), "the reset goes before the new SYN");
    assert_eq!(segment(&sent[1]).0, SYN);
    assert_eq!((rig.counters.flows.get(), rig.counters.reclaimed.get()), (8, 1));
    assert_eq!(
        rig.put(UPLINK, &data(&client(0), VIP)),
        Some(PacketOutcome::Drop(DropReason::NoFlow)),
        "its client gets a reset, too"
    );
    let old = Packet::tcp("198.51.100.7:1", VIP).flags(ACK).build();
    assert_eq!(rig.put(UPLINK, &old), Some(PacketOutcome::Forward(CLUSTER)));
}

#[test]
fn a_second_syn_with_another_number_goes_to_the_same_backend_which_is_reset_by_the_number_that_it_accepted() {
    let mut rig = Rig::with_flows(2);
    let first = ends(&rig.forward(UPLINK, &syn(1)));
    assert_eq!(ends(&rig.forward(UPLINK, &syn(1))), first, "the same SYN again is the same handshake");
    let other = Packet::tcp(&client(1), VIP).numbers(5, 0).build();
    let sent = rig.forward(UPLINK, &other);
    assert_eq!((ends(&sent), segment(&sent)), (first, (SYN, 5, 0)), "anyone can send it, and the backend knows what it is");
    let (snat, backend) = (first.0.to_string(), first.1.to_string());
    rig.forward(CLUSTER, &Packet::tcp(&backend, &snat).flags(SYN | ACK).numbers(900, 6).build());
    rig.forward(UPLINK, &Packet::tcp(&client(1), VIP).numbers(70_001, 0).build());
    rig.now += SECOND;
    rig.forward(UPLINK, &syn(2));
    let (_, sent) = put_and_watch(&mut rig, UPLINK, &syn(3), CLUSTER);
    assert_eq!((ends(&sent[0]), segment(&sent[0])), (first, (RST, 6, 0)), "it yields, and its backend forgets it");
    assert_eq!(rig.counters.reclaimed.get(), 1);
}

#[test]
fn confirmed_flows_never_yield() {
    let mut rig = Rig::with_flows(8);
    for n in 0..8 {
        establish(&mut rig, &client(n), VIP);
    }
    assert_eq!(rig.put(UPLINK, &syn(100)), Some(PacketOutcome::Drop(DropReason::FlowTableFull)));
    let fin = Packet::tcp(&client(3), VIP).flags(tcp_flags::FIN | ACK).build();
    rig.forward(UPLINK, &fin);
    assert_eq!(
        rig.put(UPLINK, &syn(100)),
        Some(PacketOutcome::Drop(DropReason::FlowTableFull)),
        "nor do they after a FIN, which may be forged"
    );
}

#[test]
fn a_flow_of_the_other_family_yields_if_it_is_older() {
    let mut rig = Rig::with_flows(4);
    for n in 0..3 {
        rig.forward(UPLINK, &Packet::tcp(&format!("[2001:db8:7::{n}]:5"), VIP6).build());
    }
    rig.now += SECOND;
    rig.forward(UPLINK, &syn(0));
    rig.now += SECOND;
    let (_, sent) = put_and_watch(&mut rig, UPLINK, &syn(1), CLUSTER);
    assert_eq!(segment(&sent[0]), (RST, 1_001, 0));
    assert!(ends(&sent[0]).1.is_ipv6());
    assert_eq!(rig.counters.flows.get(), 4);
    for n in 3..6 {
        rig.put(UPLINK, &Packet::tcp(&format!("[2001:db8:7::{n}]:5"), VIP6).build());
    }
    assert_eq!((rig.counters.flows.get(), rig.counters.reclaimed.get()), (4, 4), "the last of them took that of IPv4");
}

#[test]
fn unanswered_udp_yields_without_a_reset() {
    let mut rig = Rig::with_flows(4);
    for n in 1..=4 {
        rig.forward(UPLINK, &Packet::udp(&format!("198.51.100.{n}:5"), "192.0.2.101:53").build());
    }
    rig.forward(UPLINK, &Packet::udp("198.51.100.9:5", "192.0.2.101:53").build());
    assert_eq!((rig.counters.reclaimed.get(), rig.counters.new_flows.get()), (1, 5));
}

#[test]
fn a_fragment_makes_room_as_a_whole_packet_does() {
    let mut rig = Rig::with_flows(4);
    let first: Vec<_> = (0..4).map(|n| ends(&rig.forward(UPLINK, &syn(n)))).collect();
    let query = Packet::udp("198.51.100.9:5", "192.0.2.101:53").payload(&[7; 1600]).build();
    let came = fragments(&query, 800, 3);
    let (outcome, sent) = put_and_watch(&mut rig, UPLINK, &came[0], CLUSTER);
    assert_eq!((outcome, sent.len()), (Some(PacketOutcome::Forward(CLUSTER)), 2));
    assert_eq!((ends(&sent[0]), segment(&sent[0])), (first[0], (RST, 70_001, 0)), "the backend forgets the flow that yielded");
}

#[test]
fn without_a_free_snat_port_the_oldest_opening_flow_to_the_backend_yields_its_port() {
    let mut rig = Rig::with_flows(250_000);
    let mut holders = std::collections::HashMap::new();
    let mut n = 0;
    let (frames, taken) = loop {
        let (_, sent) = put_and_watch(&mut rig, UPLINK, &syn(n), CLUSTER);
        let tuple = ends(sent.last().unwrap());
        if let Some(first) = holders.insert(tuple, n) {
            break (sent, first);
        }
        n += 1;
    };
    assert!(n >= 64_512, "all ports of one backend are in use after {n} flows");
    assert_eq!((ends(&frames[0]), segment(&frames[0])), (ends(&frames[1]), (RST, 70_001 + taken, 0)));
    assert_eq!(segment(&frames[1]), (SYN, 70_000 + n, 0));
    let backend = ends(&frames[1]).1;
    let oldest = holders.iter().filter(|(tuple, holder)| tuple.1 == backend && **holder != n).map(|(_, holder)| *holder).min();
    assert!(oldest.is_none_or(|oldest| oldest > taken), "flow {taken} was the oldest of {backend}");
    assert_eq!((rig.counters.reclaimed.get(), rig.counters.snat_port_reused_early.get()), (1, 0));
}

#[test]
fn a_port_yields_only_if_there_is_a_buffer_for_the_reset_of_its_backend() {
    let mut rig = Rig::with_flows(250_000);
    rig.keep_backends("web", &[11]);
    let first = ends(&rig.forward(UPLINK, &syn(0)));
    (1..64_512).for_each(|n| drop(rig.forward(UPLINK, &syn(n))));
    rig.now += 2 * SECOND;
    rig.worker.port_mut(CLUSTER).unwrap().is_short = true;
    for n in 0..3 {
        assert_eq!(rig.put(UPLINK, &syn(70_000 + n)), Some(PacketOutcome::Drop(DropReason::SnatExhausted)));
        assert!(rig.sent(CLUSTER).is_empty());
    }
    assert_eq!((rig.counters.reclaimed.get(), rig.counters.snat_port_reused_early.get()), (0, 0));
    rig.worker.port_mut(CLUSTER).unwrap().is_short = false;
    let (_, sent) = put_and_watch(&mut rig, UPLINK, &syn(70_000), CLUSTER);
    assert_eq!((ends(&sent[0]), segment(&sent[0])), (first, (RST, 70_001, 0)), "the oldest, which nothing has ended before");
    assert_eq!((ends(&sent[1]), segment(&sent[1]).0), (first, SYN));
}

#[test]
fn a_flow_that_makes_room_without_a_reset_lets_its_port_rest() {
    let mut rig = Rig::with_flows(4);
    rig.keep_backends("web", &[11]);
    let used: Vec<_> = (0..4).map(|n| ends(&rig.forward(UPLINK, &syn(n)))).collect();
    rig.worker.port_mut(CLUSTER).unwrap().is_short = true;
    for n in 4..12 {
        assert!(!used.contains(&ends(&rig.forward(UPLINK, &syn(n)))), "no port of a handshake that its backend may remember");
    }
    assert_eq!((rig.counters.reclaimed.get(), rig.counters.snat_port_reused_early.get()), (8, 0));
}

#[test]
fn a_port_that_has_not_rested_is_used_before_that_of_a_handshake_that_may_still_succeed() {
    let mut rig = Rig::with_flows(250_000);
    let keep = [11];
    rig.keep_backends("web", &keep);
    for n in 0..64_511 {
        rig.forward(UPLINK, &syn(n));
    }
    let (snat, backend) = establish(&mut rig, "203.0.113.7:1", VIP);
    rig.forward(CLUSTER, &Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::FIN | ACK).build());
    let (again, _) = ends(&rig.forward(UPLINK, &Packet::tcp("203.0.113.7:1", VIP).build()));
    assert_eq!((rig.counters.snat_port_reused_early.get(), rig.counters.reclaimed.get()), (1, 0), "{again}: the only one");
    rig.now += 2 * SECOND;
    rig.put(UPLINK, &Packet::tcp("203.0.113.8:1", VIP).build());
    assert_eq!((rig.counters.snat_port_reused_early.get(), rig.counters.reclaimed.get()), (1, 1), "two seconds are enough");
}

#[test]
fn when_the_drain_is_over_the_next_packet_of_either_side_resets_both() {
    for (from_client, v6) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut rig = Rig::new();
        let (client, vip) = if v6 { ("[2001:db8:7::7]:1", VIP6) } else { ("198.51.100.7:1", VIP) };
        let (snat, backend) = establish(&mut rig, client, vip);
        rig.keep_backends("web", &[]);
        rig.now += 298 * SECOND;
        rig.forward(UPLINK, &data(client, vip));
        rig.now += 3 * SECOND;
        rig.publish();
        let (snat, backend) = (snat.to_string(), backend.to_string());
        let (at, frame) = if from_client { (UPLINK, data(client, vip)) } else { (CLUSTER, data(&backend, &snat)) };
        let originated = rig.counters.originated.get();
        assert_eq!(rig.put(at, &frame), Some(PacketOutcome::Drop(DropReason::NoFlow)));
        let (to_client, to_backend) = (rig.sent(UPLINK), rig.sent(CLUSTER));
        assert_eq!((to_client.len(), to_backend.len()), (1, 1));
        let end = |frame: &[u8]| (ends(frame).0.to_string(), ends(frame).1.to_string());
        assert_eq!(end(&to_client[0]), (vip.to_owned(), client.to_owned()));
        assert_eq!(end(&to_backend[0]), (snat, backend));
        let (answer, onward) = ((RST, 6_000, 0), (RST | ACK, 5_000, 6_000));
        let expected = if from_client { (answer, onward) } else { (onward, answer) };
        assert_eq!((segment(&to_client[0]), segment(&to_backend[0])), expected);
        assert_eq!(rig.counters.originated.get() - originated, 2);
        assert_eq!(rig.counters.flows.get(), 0);
    }
}

#[test]
fn an_idle_connection_that_was_not_swept_yet_is_reset_on_both_sides() {
    let mut rig = Rig::new();
    establish(&mut rig, "198.51.100.7:1", VIP);
    rig.now += 7_501 * SECOND;
    assert_eq!(rig.put(UPLINK, &data("198.51.100.7:1", VIP)), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    assert_eq!((rig.sent(UPLINK).len(), rig.sent(CLUSTER).len()), (1, 1));
}

#[test]
fn a_reset_of_a_connection_that_has_ended_is_answered_by_none() {
    let mut rig = Rig::new();
    establish(&mut rig, "198.51.100.7:1", VIP);
    rig.now += 7_501 * SECOND;
    let reset = Packet::tcp("198.51.100.7:1", VIP).flags(RST).build();
    assert_eq!(rig.put(UPLINK, &reset), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    assert_eq!((rig.sent(UPLINK).len(), rig.sent(CLUSTER).len()), (0, 0));
}

#[test]
fn an_idle_connection_whose_drain_has_ended_is_removed_without_a_reset() {
    let mut rig = Rig::new();
    establish(&mut rig, "198.51.100.7:1", VIP);
    rig.keep_backends("web", &[]);
    rig.now += 301 * SECOND;
    rig.publish();
    age(&mut rig, 12);
    assert_eq!(rig.counters.flows.get(), 0);
    assert_eq!((rig.sent(UPLINK).len(), rig.sent(CLUSTER).len()), (0, 0));
}

#[test]
fn resets_of_ended_connections_keep_to_the_rate_of_answers() {
    let mut rig = Rig::with_flows(4096);
    let client = |n: u32| format!("198.51.100.{}:{}", n / 1000 + 1, 1000 + n % 1000);
    (0..2000).for_each(|n| {
        establish(&mut rig, &client(n), VIP);
    });
    rig.keep_backends("web", &[]);
    rig.now += 294 * SECOND;
    (0..2000).for_each(|n| drop(rig.forward(UPLINK, &data(&client(n), VIP))));
    rig.now += 2 * SECOND;
    rig.publish();
    for n in 0..2000 {
        assert_eq!(rig.put(UPLINK, &data(&client(n), VIP)), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    }
    let sent = (rig.sent(UPLINK).len(), rig.sent(CLUSTER).len());
    assert_eq!(sent, (100, 100), "a tenth of a second of the rate of one network");
}

#[test]
fn udp_moves_at_once_when_its_backend_goes_and_is_refused_when_the_last_one_does() {
    let mut rig = Rig::new();
    let datagram = Packet::udp("198.51.100.7:1", "192.0.2.101:53").build();
    let (snat, backend) = ends(&rig.forward(UPLINK, &datagram));
    rig.forward(CLUSTER, &Packet::udp(&backend.to_string(), &snat.to_string()).build());
    let others: Vec<u8> = rig::BACKENDS.into_iter().filter(|n| *n != rig::last_byte(backend.ip())).collect();
    rig.keep_backends("dns", &others);
    assert_ne!(ends(&rig.forward(UPLINK, &datagram)).1, backend);
    rig.keep_backends("dns", &[]);
    assert_eq!(rig.put(UPLINK, &datagram), Some(PacketOutcome::Reply(UPLINK)));
    assert_eq!(rig.counters.flows.get(), 0);
}

/// As kube-proxy does: it deletes the entries of UDP only when an endpoint no longer serves.
#[test]
fn udp_stays_at_a_backend_that_drains_until_it_goes_or_the_drain_ends() {
    let to = |rig: &mut Rig, datagram: &[u8]| ends(&rig.forward(UPLINK, datagram)).1;
    for goes in [true, false] {
        let mut rig = Rig::new();
        let datagram = Packet::udp("198.51.100.7:1", "192.0.2.101:53").build();
        let backend = to(&mut rig, &datagram);
        let drain = |service: &mut proto::Service| {
            let backends = service.ports.iter_mut().flat_map(|port| &mut port.backends);
            backends.filter(|one| one.address == backend).for_each(|one| one.state = proto::BackendState::Draining);
        };
        rig.change_service(&proto::ServiceName::new("default", "dns"), drain);
        assert_eq!(to(&mut rig, &datagram), backend);
        assert!((2..40).all(|n| to(&mut rig, &Packet::udp(&client(n), "192.0.2.101:53").build()) != backend));
        if goes {
            let others: Vec<u8> = rig::BACKENDS.into_iter().filter(|n| *n != rig::last_byte(backend.ip())).collect();
            rig.keep_backends("dns", &others);
        } else {
            for _ in 0..31 {
                rig.now += 10 * SECOND;
                rig.publish();
            }
        }
        assert_ne!(to(&mut rig, &datagram), backend, "it is gone: {goes}");
    }
}

#[test]
fn a_deleted_service_takes_no_new_connections_and_its_old_ones_drain() {
    let mut rig = Rig::new();
    establish(&mut rig, "198.51.100.7:1", VIP);
    rig.state.services.remove(&proto::ServiceName::new("default", "web"));
    rig.state.generation.counter += 1;
    rig.publish();
    assert_eq!(rig.put(UPLINK, &data("198.51.100.7:1", VIP)), Some(PacketOutcome::Forward(CLUSTER)));
    assert_eq!(rig.put(UPLINK, &syn(1)), Some(PacketOutcome::Drop(DropReason::UnknownVip)));
    rig.now += 301 * SECOND;
    rig.publish();
    assert_eq!(rig.put(UPLINK, &data("198.51.100.7:1", VIP)), Some(PacketOutcome::Drop(DropReason::UnknownVip)));
}
