//! Single exchanges and streams of UDP: how long they live, which of them yield, what happens to their ports, and what
//! a client notices when its backend fails (FORWARDING 2 and 3).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dataplane::testing::Packet;
use dataplane::{DropReason, PacketOutcome};
use proto::{Mode, Protocol, Service, ServiceName};

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, ends};

const DNS: &str = "192.0.2.101:53";
const DNS_V6: &str = "[2001:db8::1:1]:53";

fn client(n: u32) -> String {
    format!("198.51.{}.{}:{}", 100 + n / 50_000, n / 200 % 250 + 1, 2000 + n % 200)
}

/// A client with a port of its own: many clients, none of which has a large share.
fn alone(n: u32) -> String {
    format!("{}:2000", std::net::Ipv4Addr::from(0x0b00_0000 + n))
}

/// Forwards a client's datagram; returns its source as the backend sees it, and the backend.
fn ask(rig: &mut Rig, client: &str) -> (SocketAddr, SocketAddr) {
    let vip = if client.starts_with('[') { DNS_V6 } else { DNS };
    ends(&rig.forward(UPLINK, &Packet::udp(client, vip).payload(b"?").build()))
}

/// A backend's datagram.
fn reply((snat, backend): (SocketAddr, SocketAddr)) -> Vec<u8> {
    Packet::udp(&backend.to_string(), &snat.to_string()).payload(b"!").build()
}

/// The backend answers, and the client gets it.
fn answer(rig: &mut Rig, seen: (SocketAddr, SocketAddr), client: &str) {
    assert_eq!(ends(&rig.forward(CLUSTER, &reply(seen))).1.to_string(), client);
}

/// A single exchange.
fn exchange(rig: &mut Rig, client: &str) -> (SocketAddr, SocketAddr) {
    let seen = ask(rig, client);
    answer(rig, seen, client);
    seen
}

/// A stream.
fn stream(rig: &mut Rig, client: &str) -> (SocketAddr, SocketAddr) {
    let seen = exchange(rig, client);
    assert_eq!(exchange(rig, client), seen, "one flow");
    seen
}

fn idle(rig: &mut Rig, seconds: u64) {
    for _ in 0..seconds * 4 {
        rig.now += SECOND / 4;
        rig.worker.poll(rig.now);
    }
}

fn change(rig: &mut Rig, change: impl FnOnce(&mut Service)) {
    let name = ServiceName::new("default", "dns");
    change(Arc::make_mut(rig.state.services.get_mut(&name).unwrap()));
    rig.publish();
}

/// From now on the probes of exactly these backends fail.
fn fail(rig: &mut Rig, backends: &[SocketAddr]) {
    rig.health.failing = backends.iter().map(|backend| (Protocol::Udp, *backend)).collect();
    rig.publish();
}

fn fails(rig: &mut Rig, seen: (SocketAddr, SocketAddr)) {
    fail(rig, &[seen.1]);
}

#[test]
fn a_single_exchange_with_a_well_known_port_lives_half_a_minute_and_a_stream_two() {
    for modes in [Mode::Nat, Mode::Dnat] {
        let mut rig = Rig::with_mode(modes);
        exchange(&mut rig, "198.51.100.7:1");
        stream(&mut rig, "198.51.100.7:2");
        idle(&mut rig, 29);
        assert_eq!(rig.counters.flows.get(), 2, "{modes}");
        idle(&mut rig, 12);
        assert_eq!(rig.counters.flows.get(), 1, "{modes}: the exchange has ended");
        idle(&mut rig, 75);
        assert_eq!(rig.counters.flows.get(), 1, "{modes}: the stream lives");
        idle(&mut rig, 20);
        assert_eq!(rig.counters.flows.get(), 0, "{modes}");
    }
}

/// A server of SIP answers at once that it tries, and later that somebody has picked up the phone; RFC 4787 REQ-5.
#[test]
fn a_server_that_answers_at_once_and_again_later_reaches_its_client_for_two_minutes() {
    for mode in [Mode::Nat, Mode::Dnat] {
        let mut rig = Rig::with_mode(mode);
        change(&mut rig, |service| service.ports.iter_mut().for_each(|port| port.port = 5060));
        let client = "198.51.100.7:1";
        let seen = ends(&rig.forward(UPLINK, &Packet::udp(client, "192.0.2.101:5060").payload(b"INVITE").build()));
        rig.now += SECOND / 10;
        answer(&mut rig, seen, client);
        for pause in [11, 119] {
            idle(&mut rig, pause);
            answer(&mut rig, seen, client);
        }
        idle(&mut rig, 131);
        assert_eq!(rig.counters.flows.get(), 0, "{mode}");
    }
}

#[test]
fn a_datagram_may_be_answered_within_a_minute() {
    let mut rig = Rig::new();
    let seen = ask(&mut rig, "198.51.100.7:1");
    idle(&mut rig, 59);
    answer(&mut rig, seen, "198.51.100.7:1");
}

#[test]
fn replies_alone_keep_an_exchange_and_make_no_stream_of_it() {
    let mut rig = Rig::new();
    let seen = exchange(&mut rig, "198.51.100.7:1");
    for _ in 0..6 {
        idle(&mut rig, 8);
        answer(&mut rig, seen, "198.51.100.7:1");
    }
    idle(&mut rig, 41);
    assert_eq!(rig.counters.flows.get(), 0);
}

#[test]
fn in_one_way_modes_the_third_packet_makes_a_stream_when_a_second_has_passed() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let mut rig = Rig::with_mode(mode);
        for (from, gap) in [("198.51.100.7:1", 0), ("198.51.100.7:2", 2 * SECOND)] {
            let datagram = Packet::udp(from, DNS).build();
            for pause in [0, 0, gap] {
                rig.now += pause;
                rig.forward(UPLINK, &datagram);
            }
        }
        idle(&mut rig, 72);
        assert_eq!(rig.counters.flows.get(), 1, "{mode}: what came at once ends as what was not answered");
    }
}

#[test]
fn the_idle_timeout_of_a_service_is_that_of_all_its_datagrams() {
    for mode in [Mode::Nat, Mode::Dnat, Mode::Dsr] {
        let mut rig = Rig::with_mode(mode);
        change(&mut rig, |service| service.idle_timeout = Some(Duration::from_secs(600)));
        ask(&mut rig, "198.51.100.7:1");
        let mut begun = 1;
        if mode.is_two_way() {
            exchange(&mut rig, "198.51.100.7:2");
            stream(&mut rig, "198.51.100.7:3");
            begun = 3;
        }
        idle(&mut rig, 595);
        assert_eq!(rig.counters.flows.get(), begun, "{mode}");
        change(&mut rig, |service| service.idle_timeout = Some(Duration::from_secs(3)));
        idle(&mut rig, 12);
        assert_eq!(rig.counters.flows.get(), 0, "{mode}");
        ask(&mut rig, "198.51.100.7:1");
        rig.now += 4 * SECOND;
        ask(&mut rig, "198.51.100.7:1");
        assert_eq!(rig.counters.new_flows.get(), begun + 2, "{mode}: by a shorter one the next packet begins a flow");
    }
}

#[test]
fn unconfirmed_flows_yield_first_then_single_exchanges_and_streams_never() {
    let mut rig = Rig::with_flows(4);
    let streams = [client(1), "[2001:db8:7::2]:1".to_owned()];
    for client in &streams {
        stream(&mut rig, client);
    }
    let oldest = exchange(&mut rig, "[2001:db8:7::3]:1");
    rig.now += SECOND;
    let unanswered = ask(&mut rig, &client(4));
    // The exchange is older, and of the other family than the new packet; the unanswered flow still yields first.
    rig.now += 2 * SECOND;
    let next = exchange(&mut rig, &client(5));
    assert_eq!((rig.counters.flows.get(), rig.counters.reclaimed.get()), (4, 1));
    assert_eq!(rig.put(CLUSTER, &reply(unanswered)), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    rig.now += SECOND;
    exchange(&mut rig, &client(6));
    assert_eq!(
        rig.put(CLUSTER, &reply(oldest)),
        Some(PacketOutcome::Drop(DropReason::NoFlow)),
        "of exchanges the oldest goes first"
    );
    answer(&mut rig, next, &client(5));
    for (n, from) in [(7, client(5)), (8, client(6))] {
        stream(&mut rig, &from);
        let outcome = rig.put(UPLINK, &Packet::udp(&client(n), DNS).build());
        let full = n == 8;
        assert_eq!(outcome == Some(PacketOutcome::Drop(DropReason::FlowTableFull)), full, "client {n}: {outcome:?}");
        rig.sent(CLUSTER);
    }
    for client in &streams {
        exchange(&mut rig, client);
    }
}

#[test]
fn a_flow_that_may_still_be_answered_yields_after_an_exchange_that_is_older() {
    let mut rig = Rig::with_flows(4);
    let exchanges: Vec<_> = (0..4).map(|n| exchange(&mut rig, &client(n))).collect();
    rig.now += SECOND / 2;
    let young: Vec<_> = (4..8).map(|n| ask(&mut rig, &client(n))).collect();
    for (n, seen) in (4..8).zip(&young) {
        answer(&mut rig, *seen, &client(n));
    }
    for late in &exchanges {
        assert_eq!(rig.put(CLUSTER, &reply(*late)), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    }
    let at_once: Vec<_> = (8..12).map(|n| ask(&mut rig, &client(n))).collect();
    let kept = at_once.iter().filter(|seen| rig.put(CLUSTER, &reply(**seen)) == Some(PacketOutcome::Forward(UPLINK))).count();
    assert_eq!(kept, 1, "of one age the unanswered ones yield first");
}

#[test]
fn the_port_of_a_datagram_that_yields_rests_and_its_late_reply_is_dropped() {
    let mut rig = Rig::with_flows(32);
    for answered in [false, true] {
        let before = rig.counters.reclaimed.get();
        let mut yielded = Vec::new();
        for n in 0..60 {
            let seen = ask(&mut rig, &client(n));
            if answered {
                answer(&mut rig, seen, &client(n));
            }
            assert!(!yielded.contains(&seen), "client {n} has the port of one that yielded");
            yielded.push(seen);
        }
        assert!(rig.counters.reclaimed.get() - before >= 28);
        for late in &yielded[..28] {
            assert_eq!(rig.put(CLUSTER, &reply(*late)), Some(PacketOutcome::Drop(DropReason::NoFlow)), "{late:?}");
        }
        idle(&mut rig, 110);
    }
    assert_eq!(rig.counters.snat_port_reused_early.get(), 0);
}

#[test]
fn without_a_free_port_the_oldest_flow_yields_and_the_port_that_rested_longest_is_used_and_counted() {
    let mut rig = Rig::with_flows(250_000);
    rig.keep_backends("dns", &[11]);
    let first: Vec<_> = (0..3).map(|n| exchange(&mut rig, &alone(n))).collect();
    for n in 3..64_512 {
        ask(&mut rig, &alone(n));
    }
    rig.now += 2 * SECOND;
    let counters = rig.counters.clone();
    let counted = || (counters.reclaimed.get(), counters.snat_port_reused_early.get());
    assert_eq!(counted(), (0, 0));
    let fourth = ask(&mut rig, &alone(70_000));
    assert_eq!(counted(), (1, 1));
    assert!(!first.contains(&fourth), "the oldest that was not answered yields before any exchange");
    assert_eq!(ends(&rig.forward(CLUSTER, &reply(first[0]))).1.to_string(), alone(0), "the exchange goes on");
    // All unanswered flows are streams now.
    rig.now += 2 * SECOND;
    for n in (4..64_512).chain([70_000]) {
        stream(&mut rig, &alone(n));
    }
    let others = [ask(&mut rig, &alone(70_001)), ask(&mut rig, &alone(70_002))];
    assert_eq!(counted(), (3, 3));
    assert_eq!(others, [first[0], first[1]], "the oldest exchanges have yielded");
}

#[test]
fn a_stream_of_a_backend_that_fails_moves_to_another() {
    for mode in [Mode::Nat, Mode::Dnat] {
        let mut rig = Rig::with_mode(mode);
        for (from, is_stream) in [("198.51.100.7:1", true), ("198.51.100.8:1", false)] {
            let seen = if is_stream { stream(&mut rig, from) } else { exchange(&mut rig, from) };
            fails(&mut rig, seen);
            assert_eq!(ask(&mut rig, from), seen, "{mode}: the backend may still answer");
            rig.now += SECOND / 2;
            assert_eq!(ask(&mut rig, from), seen, "{mode}: it is given a second");
            rig.now += SECOND;
            let elsewhere = ask(&mut rig, from);
            assert_ne!(elsewhere.1, seen.1, "{mode}");
            answer(&mut rig, elsewhere, from);
            if mode == Mode::Nat {
                assert_eq!(
                    rig.put(CLUSTER, &reply(seen)),
                    Some(PacketOutcome::Drop(DropReason::NoFlow)),
                    "a late reply is dropped"
                );
            }
            fail(&mut rig, &[]);
        }
    }
}

#[test]
fn an_unanswered_datagram_goes_to_another_backend_as_soon_as_probes_fail() {
    let mut rig = Rig::new();
    let seen = ask(&mut rig, "198.51.100.7:1");
    assert_eq!(ask(&mut rig, "198.51.100.7:1"), seen);
    fails(&mut rig, seen);
    assert_ne!(ask(&mut rig, "198.51.100.7:1").1, seen.1);
    assert_eq!(rig.counters.flows.get(), 1);
}

#[test]
fn a_stream_stays_with_a_backend_that_answers_even_if_its_probes_fail() {
    let mut rig = Rig::new();
    let from = "198.51.100.7:1";
    let seen = stream(&mut rig, from);
    for _ in 0..3 {
        fails(&mut rig, seen);
        for _ in 0..10 {
            assert_eq!(ask(&mut rig, from), seen);
            rig.now += SECOND * 4 / 5;
            answer(&mut rig, seen, from);
            rig.now += SECOND * 4 / 5;
        }
        // A packet that is unanswered at the end of this period does not count in the next.
        assert_eq!(ask(&mut rig, from), seen);
        fail(&mut rig, &[]);
        rig.now += 20 * SECOND;
        assert_eq!(ask(&mut rig, from), seen);
    }
    fails(&mut rig, seen);
    assert_eq!(ask(&mut rig, from), seen, "the second begins with the first packet while it fails");
}

#[test]
fn where_all_backends_fail_and_all_are_used_nothing_moves() {
    let mut rig = Rig::new();
    let from = "198.51.100.7:1";
    let seen = stream(&mut rig, from);
    let all: Vec<_> = rig::BACKENDS.iter().map(|n| format!("10.0.0.{n}:5353").parse().unwrap()).collect();
    fail(&mut rig, &all);
    for _ in 0..5 {
        assert_eq!(ask(&mut rig, from), seen);
        rig.now += 2 * SECOND;
    }
}

#[test]
fn in_one_way_modes_the_probes_alone_move_a_stream() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let mut rig = Rig::with_mode(mode);
        let datagram = Packet::udp("198.51.100.7:1", DNS).build();
        let backend = |frame: &[u8]| frame[5]; // the last byte of the MAC that a backend of the rig has
        let first = backend(&rig.forward(UPLINK, &datagram));
        for _ in 0..3 {
            rig.now += SECOND;
            assert_eq!(backend(&rig.forward(UPLINK, &datagram)), first, "{mode}");
        }
        fail(&mut rig, &[format!("10.0.0.{first}:5353").parse().unwrap()]);
        let second = backend(&rig.forward(UPLINK, &datagram));
        assert_ne!(second, first, "{mode}");
        fail(&mut rig, &[]);
        assert_eq!(backend(&rig.forward(UPLINK, &datagram)), second, "{mode}: it has a flow there");
    }
}

#[test]
fn a_connection_stays_with_a_backend_whose_probes_fail_and_its_clients_syn_leaves_it() {
    const VIP: &str = "192.0.2.100:80";
    const SYN: u8 = dataplane::tcp_flags::SYN;
    const ACK: u8 = dataplane::tcp_flags::ACK;
    let mut rig = Rig::new();
    let from = "198.51.100.7:1";
    let seen = ends(&rig.forward(UPLINK, &Packet::tcp(from, VIP).build()));
    rig.forward(CLUSTER, &Packet::tcp(&seen.1.to_string(), &seen.0.to_string()).flags(SYN | ACK).build());
    rig.forward(UPLINK, &Packet::tcp(from, VIP).flags(ACK).build());
    rig.health.failing.insert((Protocol::Tcp, seen.1));
    rig.publish();
    let data = Packet::tcp(from, VIP).flags(ACK | dataplane::tcp_flags::PSH).payload(b"?").build();
    for _ in 0..10 {
        assert_eq!(ends(&rig.forward(UPLINK, &data)), seen, "in mid-stream there is nothing to choose");
        rig.now += SECOND;
    }
    let again = Packet::tcp(from, VIP).numbers(9, 0).build();
    assert_eq!(ends(&rig.forward(UPLINK, &again)), seen, "the backend may know better");
    rig.now += 2 * SECOND;
    assert_ne!(ends(&rig.forward(UPLINK, &again)).1, seen.1);
    assert_eq!(rig.counters.flows.get(), 1);
}
