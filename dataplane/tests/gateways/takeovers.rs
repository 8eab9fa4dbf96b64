//! The moments after a VIP group has moved to another gateway: packets whose flows are not known there yet, connections
//! that were too young to be told, and SNAT ports that still rest
//! (docs/internals/decisions/0068-no-reset-while-a-partner-may-know.md).

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::flow::ReplicaEvent;
use dataplane::testing::Packet;
use dataplane::{DropReason, FlowFate, SavedAt, SavedFlows, tcp_flags};
use proto::{Announce, State};

use crate::fleet::{ALL, DATA, FIN, Gateway, NONE, SNAT, new_clients, take_over, take_over_now};
use crate::rig::{CLUSTER, SECOND, UPLINK, ends, ip, state};
use crate::team::clients;

/// Longer than a partner may still tell flows.
const SETTLED: u64 = 3;

/// The SNAT addresses and backends of connections or streams.
type Seen = HashSet<(SocketAddr, SocketAddr)>;

/// Opens streams of UDP, and returns the gateway's ends and the backends'.
fn open_streams(gateway: &mut Gateway, datagrams: &[Vec<u8>]) -> Seen {
    let streams = send(gateway, datagrams);
    let reply = |(snat, backend): &(SocketAddr, SocketAddr)| Packet::udp(&backend.to_string(), &snat.to_string()).build();
    let replies: Vec<_> = streams.iter().map(reply).collect();
    gateway.team.put(CLUSTER, &replies);
    gateway.team.sent(UPLINK);
    assert_eq!(send(gateway, datagrams), streams);
    streams
}

/// Sends datagrams, and returns where they left and to which backends.
fn send(gateway: &mut Gateway, datagrams: &[Vec<u8>]) -> Seen {
    gateway.team.put(UPLINK, datagrams);
    gateway.team.sent(CLUSTER).iter().map(|frame| ends(frame)).collect()
}

/// Two gateways that know of each other.
fn partners(state: &State, workers: [u8; 2]) -> [Gateway; 2] {
    let [a, b] =
        [(workers[0], 7), (workers[1], 8)].map(|(workers, seed)| Gateway::new(state.clone(), workers, false, seed, 4096));
    for gateway in [&a, &b] {
        gateway.replications.iter().for_each(|replication| replication.set_partners(true));
    }
    [a, b]
}

fn routed() -> State {
    let mut state = state();
    state.pools[0].announce = Announce::Routed;
    state
}

/// A packet of a client, and a reply of a backend, of connections that nobody knows. Returns how many RSTs they cause.
fn unknown(gateway: &mut Gateway) -> usize {
    let packet = Packet::tcp("203.0.113.9:999", "192.0.2.100:80").flags(DATA).build();
    let replies: Vec<_> =
        SNAT[..2].iter().map(|snat| Packet::tcp("10.0.0.11:8080", &format!("{snat}:5000")).flags(DATA).build()).collect();
    gateway.team.put(UPLINK, std::slice::from_ref(&packet));
    gateway.team.put(CLUSTER, &replies);
    resets(gateway)
}

/// Number of RSTs among the frames that were sent. The others announce addresses.
fn resets(gateway: &mut Gateway) -> usize {
    let frames = [UPLINK, CLUSTER].map(|port| gateway.team.sent(port)).concat();
    let is_reset = |frame: &&Vec<u8>| frame[12..14] == [8, 0] && frame[47] & tcp_flags::RST != 0;
    frames.iter().filter(is_reset).count()
}

#[test]
fn nobody_gets_a_rst_while_a_partner_may_still_tell_the_flow() {
    let [mut a, mut b] = partners(&state(), [1, 1]);
    a.own(ALL);
    a.pass(SETTLED);
    assert_eq!(unknown(&mut b), 0);
    assert_eq!((b.team.drops(DropReason::NoFlow), b.team.drops(DropReason::FlowAwaited)), (3, 0), "another gateway owns it");
    assert_eq!(unknown(&mut a), 3, "it has owned everything for long");
    take_over_now(&mut a, &mut b);
    assert_eq!((unknown(&mut b), b.team.drops(DropReason::FlowAwaited)), (0, 3));
    b.pass(1);
    assert_eq!((unknown(&mut b), b.team.drops(DropReason::FlowAwaited)), (0, 6));
    b.pass(SETTLED);
    assert_eq!((unknown(&mut b), b.team.drops(DropReason::FlowAwaited)), (3, 6), "now nobody can know it");
    // A group that stays is not affected by another one that moves.
    a.own_now(0b01);
    b.own_now(0b10);
    assert_eq!(unknown(&mut b), 1 + usize::from(proto::vip_group(ip("192.0.2.100"), 2) == 1));
}

#[test]
fn without_a_partner_and_for_vips_that_no_election_moves_a_rst_comes_at_once() {
    let mut alone = Gateway::small(7);
    alone.own_now(ALL);
    assert_eq!((unknown(&mut alone), alone.team.drops(DropReason::FlowAwaited)), (3, 0));
    let [_, mut routed] = partners(&routed(), [1, 1]);
    routed.own_now(ALL);
    let packet = Packet::tcp("203.0.113.9:999", "192.0.2.100:80").flags(DATA).build();
    routed.team.put(UPLINK, std::slice::from_ref(&packet));
    assert_eq!((resets(&mut routed), routed.team.drops(DropReason::FlowAwaited)), (1, 0));
}

#[test]
fn connections_that_were_too_young_to_be_told_go_on_after_a_planned_takeover() {
    for workers in [[1, 1], [2, 3]] {
        let [mut a, mut b] = partners(&state(), workers);
        a.own(ALL);
        a.pass(SETTLED);
        let clients = clients(60);
        let seen = a.team.establish(&clients);
        assert_eq!(a.sent(), []);
        take_over_now(&mut a, &mut b);
        // Packets are faster than news.
        let data: Vec<_> = clients.iter().map(|(from, to)| Packet::tcp(from, to).flags(DATA).build()).collect();
        b.team.put(UPLINK, &data);
        assert_eq!(resets(&mut b), 0);
        assert_eq!(b.team.drops(DropReason::FlowAwaited), 60);
        (0..8).for_each(|_| a.team.poll());
        let events = a.sent();
        assert_eq!(events.len(), 60, "all at once");
        b.receive(&events);
        assert_eq!(b.count(|replication| replication.refused().get()), 0);
        assert_eq!(b.team.towards_backends(&clients, DATA), seen, "the client repeats its packet");
        b.team.answered(&seen, DATA);
        // They are the flows of the new owner, which tells how they end.
        b.team.abort(&clients);
        b.pass(30);
        a.receive(&b.sent());
        a.pass(1);
        // Where two workers have a half each, one of them hears of no end.
        assert!(workers != [1, 1] || (a.flows(), b.flows()) == (0, 0));
    }
}

/// The groups move one shortly after the other, and the worker is busy meanwhile.
#[test]
fn news_that_waits_when_the_next_group_is_taken_over_is_applied() {
    let [mut a, mut b] = partners(&state(), [1, 1]);
    a.own(ALL);
    a.pass(SETTLED);
    let clients = clients(60);
    let seen = a.team.establish(&clients);
    b.team.now = b.team.now.max(a.team.now);
    a.own_now(0b10);
    let events = a.sent();
    assert_eq!(events.len(), 60, "of both groups");
    b.own_now(0b01);
    assert!(events.iter().all(|event| b.replications[0].give(*event)));
    a.own_now(NONE);
    b.own_now(ALL);
    assert_eq!(b.count(|replication| replication.refused().get()), 0);
    assert_eq!(b.team.towards_backends(&clients, DATA), seen);
}

/// The old owner has seen the client's SYN, and the backend's SYN-ACK before or after it lost the group; the client's
/// ACK reaches the new owner.
#[test]
fn connections_go_on_whose_handshake_a_planned_takeover_interrupts() {
    let syn_ack = tcp_flags::SYN | tcp_flags::ACK;
    for (workers, is_answered_before) in [([1, 1], true), ([1, 1], false), ([2, 3], true), ([2, 3], false)] {
        let [mut a, mut b] = partners(&state(), workers);
        a.own(ALL);
        a.pass(SETTLED);
        let clients = clients(60);
        let seen = a.team.towards_backends(&clients, tcp_flags::SYN);
        if is_answered_before {
            a.team.answered(&seen, syn_ack);
        }
        take_over_now(&mut a, &mut b);
        if !is_answered_before {
            a.team.answered(&seen, syn_ack);
        }
        (0..8).for_each(|_| a.team.poll());
        let events = a.sent();
        assert_eq!(events.len(), 60);
        b.receive(&events);
        assert_eq!(b.count(|replication| replication.refused().get()), 0);
        assert_eq!(b.team.towards_backends(&clients, tcp_flags::ACK), seen, "{workers:?} {is_answered_before}");
        assert_eq!(b.team.towards_backends(&clients, DATA), seen);
        b.team.answered(&seen, DATA);
        // Longer than a handshake may take, at the worker of each half.
        b.pass(100);
        assert_eq!(b.team.towards_backends(&clients, DATA), seen, "they are established");
        b.team.answered(&seen, DATA);
    }
}

#[test]
fn handshakes_that_are_told_end_unless_their_backend_sends() {
    let [mut a, mut b] = partners(&state(), [1, 1]);
    a.own(ALL);
    a.pass(SETTLED);
    let clients = clients(60);
    let (old, others) = clients.split_at(10);
    let seen = a.team.towards_backends(old, tcp_flags::SYN);
    a.team.answered(&seen, tcp_flags::SYN | tcp_flags::ACK);
    a.pass(SETTLED);
    let seen = a.team.towards_backends(others, tcp_flags::SYN);
    a.team.answered(&seen, tcp_flags::SYN | tcp_flags::ACK);
    a.team.towards_backends(&new_clients(20), tcp_flags::SYN);
    take_over_now(&mut a, &mut b);
    (0..8).for_each(|_| a.team.poll());
    let events = a.sent();
    assert_eq!(events.len(), 50, "neither those that were not answered nor those that are too old");
    b.receive(&events);
    assert_eq!(b.flows(), 50);
    // News of a handshake changes no flow that is confirmed.
    b.team.answered(&seen, DATA);
    b.own(NONE);
    b.receive(&events[..20]);
    assert_eq!(b.count(|replication| replication.refused().get()), 20);
    // With the seed of the old owner it begins with the same ports.
    let [mut c, _] = partners(&state(), [1, 1]);
    c.team.now = a.team.now;
    c.own_now(ALL);
    c.receive(&events);
    // Clients give up before their backends have sent anything.
    c.team.towards_backends(&others[..45], tcp_flags::RST);
    c.pass(45);
    assert_eq!(c.flows(), 0, "no backend has confirmed them");
    let syns: Vec<_> = new_clients(20).iter().map(|(from, to)| Packet::tcp(from, to).flags(tcp_flags::SYN).build()).collect();
    let again = send(&mut c, &syns);
    assert!(!again.is_empty() && seen.values().all(|ends| !again.contains(ends)), "ports rest for a minute");
    a.pass(60);
    assert_eq!(a.flows(), 0);
    assert_eq!(a.sent(), [], "no news follows");
}

#[test]
fn late_news_never_changes_a_flow_that_the_owner_knows_and_is_refused_once_it_has_settled() {
    let [mut a, mut b] = partners(&state(), [1, 1]);
    a.own(ALL);
    let clients = clients(30);
    a.team.establish(&clients);
    take_over_now(&mut a, &mut b);
    (0..8).for_each(|_| a.team.poll());
    let events = a.sent();
    assert_eq!(events.len(), 30);
    // Half of the clients have connected anew meanwhile.
    let (again, others) = clients.split_at(15);
    let seen = b.team.establish(again);
    let ended: Vec<_> = events.iter().map(|event| ReplicaEvent::Ended(*event.flow())).collect();
    b.receive(&events);
    b.receive(&ended);
    assert_eq!((b.flows(), b.count(|replication| replication.refused().get())), (30, 15 + 30));
    assert_eq!(b.team.towards_backends(again, DATA), seen, "its own flows");
    assert_eq!(b.team.towards_backends(others, DATA).len(), 15);
    let [_, mut late] = partners(&state(), [1, 1]);
    late.own(ALL);
    late.pass(SETTLED);
    late.receive(&events);
    assert_eq!((late.flows(), late.count(|replication| replication.refused().get())), (0, 30));
}

#[test]
fn an_outdated_shadow_breaks_no_connection_at_the_wrong_gateway() {
    let [mut a, mut b] = partners(&state(), [1, 1]);
    a.own(ALL);
    let clients = clients(6);
    let seen = a.team.establish(&clients);
    a.pass(3);
    b.receive(&a.sent());
    // Silent for two hours, and ten minutes for which packets may have been told late. The sweep has not met them yet.
    b.team.now += 8200 * SECOND;
    let data: Vec<_> = clients.iter().map(|(from, to)| Packet::tcp(from, to).flags(DATA).build()).collect();
    b.team.put(UPLINK, &data);
    let replies: Vec<_> =
        seen.values().map(|(snat, backend)| Packet::tcp(&backend.to_string(), &snat.to_string()).flags(DATA).build()).collect();
    b.team.put(CLUSTER, &replies);
    assert_eq!(resets(&mut b), 0);
    assert_eq!(b.team.drops(DropReason::NoFlow), 12, "the owner may know better");
}

/// Connections of one client to one VIP, whose flows two gateways know.
fn told_connections(a: &mut Gateway, b: &mut Gateway, count: u16) -> (Vec<(String, &'static str)>, Seen) {
    let old: Vec<_> = (0..count).map(|n| (format!("198.51.100.7:{}", 2000 + n), "192.0.2.100:80")).collect();
    let seen = a.team.establish(&old);
    a.pass(3);
    b.receive(&a.sent());
    (old, seen.into_values().collect())
}

#[test]
fn ports_of_ended_flows_of_a_partner_rest_for_a_minute() {
    // With the same seed both begin with the same ports.
    let (mut a, mut b) = (Gateway::small(7), Gateway::small(7));
    a.own(ALL);
    let (old, used) = told_connections(&mut a, &mut b, 100);
    a.team.abort(&old);
    a.pass(20);
    b.receive(&a.sent());
    assert_eq!((a.flows(), b.flows()), (0, 0));
    take_over(&mut a, &mut b);
    // 64 ports are tried for each SYN; a client repeats one that is dropped.
    let syns = |gateway: &mut Gateway, from: &str| {
        let syn = |n: u16| Packet::tcp(&format!("{from}:{}", 2000 + n), "192.0.2.100:80").flags(tcp_flags::SYN).build();
        let mut given = HashSet::new();
        for n in 0..200 {
            let sent = (0..4).find_map(|_| {
                gateway.team.put(UPLINK, &[syn(n)]);
                gateway.team.sent(CLUSTER).pop()
            });
            given.insert(ends(&sent.unwrap()));
        }
        given
    };
    let given = syns(&mut b, "203.0.113.7");
    assert_eq!((given.len(), given.intersection(&used).count()), (200, 0));
    assert_eq!(b.team.sum(|counters| counters.snat_port_reused_early.get()), 0);
    let mut c = Gateway::small(7);
    c.own(ALL);
    assert!(syns(&mut c, "203.0.113.7").intersection(&used).count() > 0, "otherwise it would have begun with them");
}

#[test]
fn a_gateway_that_replicates_goes_on_behind_the_ports_of_its_flows_after_a_restart() {
    let mut partner = Gateway::small(9);
    let mut old = Gateway::small(7);
    partner.own(ALL);
    // The ports of a partner lie anywhere in the order of this gateway.
    let (of_partner, held) = told_connections(&mut partner, &mut old, 200);
    take_over(&mut partner, &mut old);
    let own: Vec<_> = (0..900_u16).map(|n| (format!("198.51.100.8:{}", 2000 + n), "192.0.2.100:80")).collect();
    let seen = old.team.establish(&own);
    let at = |boottime_ns| SavedAt { boot: [5; 16], boottime_ns };
    let parts = [old.team.workers[0].save(old.team.now)];
    let header = SavedFlows::header(7, true, at(SECOND), &parts);
    let mut new = Gateway::small(7);
    let saved = Arc::new(SavedFlows::read([&header[..], &parts[0]].concat(), at(2 * SECOND), new.team.now).unwrap());
    new.team.workers[0].restore(Arc::clone(&saved));
    new.own(ALL);
    new.team.poll();
    assert_eq!(saved.report().count(FlowFate::Restored), 1100);
    let given: HashSet<_> = new.team.establish(&new_clients(200)).into_values().collect();
    assert_eq!(given.len(), 200, "no SYN is dropped because all ports that are tried are taken");
    assert!(given.is_disjoint(&held) && seen.values().all(|ends| !given.contains(ends)));
    assert_eq!((new.team.towards_backends(&own, DATA), new.team.towards_backends(&of_partner, DATA).len()), (seen, 200));
}

/// Seen of clients, as datagrams, as they leave, and two gateways that know them; the first one owns them.
fn told_streams(workers: [u8; 2]) -> (Vec<Vec<u8>>, Seen, [Gateway; 2]) {
    let clients = (0..20).map(|n| Packet::udp(&format!("198.51.100.{}:{}", n + 1, 4000 + n), "192.0.2.101:53"));
    let datagrams: Vec<_> = clients.map(|packet| packet.build()).collect();
    let [mut a, mut b] = partners(&state(), workers);
    a.own(ALL);
    let streams = open_streams(&mut a, &datagrams);
    a.pass(3);
    b.receive(&a.sent());
    (datagrams, streams, [a, b])
}

#[test]
fn streams_go_on_that_were_silent_for_long_and_carried_packets_just_before_a_takeover() {
    for workers in [[1, 1], [2, 3]] {
        let (datagrams, streams, [mut a, mut b]) = told_streams(workers);
        // The limit of streams is 120 s in these tests; news of packets wait for the sweep.
        let silent = 117;
        a.pass(silent - 3);
        b.pass(silent - 3);
        b.receive(&a.sent());
        assert_eq!(send(&mut a, &datagrams), streams, "{workers:?}");
        take_over(&mut a, &mut b);
        assert_eq!(send(&mut b, &datagrams), streams, "{workers:?}");
    }
}

/// A flow that was taken over lasts longer at its owner, and no longer at partners: the sweep would tell it too late.
#[test]
fn streams_go_on_that_were_taken_over_before_and_then_silent_for_even_longer() {
    for workers in [[1, 1], [2, 3]] {
        let (datagrams, streams, [mut a, mut b]) = told_streams(workers);
        take_over(&mut a, &mut b);
        assert_eq!(open_streams(&mut b, &datagrams), streams, "{workers:?}");
        for _ in 0..16 {
            a.pass(9);
            b.pass(9);
            a.receive(&b.sent());
        }
        assert_eq!(open_streams(&mut b, &datagrams), streams, "{workers:?}");
        a.receive(&b.sent());
        a.pass(7);
        b.pass(7);
        take_over(&mut b, &mut a);
        assert_eq!(send(&mut a, &datagrams), streams, "{workers:?}");
    }
}

#[test]
fn partners_learn_of_a_close_after_a_silence_that_the_new_state_would_not_outlast() {
    let [mut a, mut b] = partners(&state(), [1, 1]);
    a.own(ALL);
    let (old, _) = told_connections(&mut a, &mut b, 10);
    a.pass(400);
    b.pass(400);
    a.team.towards_backends(&old, FIN);
    let told = a.sent();
    assert_eq!(told.len(), 10);
    assert!(told.iter().all(|event| event.flow().idle < std::time::Duration::from_secs(1)), "{told:?}");
    b.receive(&told);
    assert_eq!(b.count(|replication| replication.refused().get()), 0);
}
