//! Several workers over memory ports: each flow stays on one of them whichever queue its packets arrive on, nothing is
//! lost, and the account balances for each worker and in sum (FORWARDING 5, DESIGN 3.5).

mod cards;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use dataplane::testing::{Packet, Segment, arp_request, fragments};
use dataplane::workers::Steering;
use dataplane::{Burst, DropReason, FROM_LINUX_BURSTS, MemoryBuffer, tcp_flags};
use proto::{Mode, Scheduler, Service};

use crate::rig::{self, CLUSTER, UPLINK, ends, network, state};
use crate::team::{Delivery, SEED, Team, card, clients};

#[test]
fn each_flow_is_on_one_worker_whatever_queues_its_packets_come_by() {
    for workers in [2, 3] {
        let mut team = Team::in_turn(workers);
        team.settle();
        let clients = clients(600);
        for flags in [tcp_flags::SYN, tcp_flags::ACK, tcp_flags::ACK] {
            team.exchange(&clients, flags);
        }
        assert_eq!(team.sum(|c| c.new_flows.get()), 600, "one flow for each client");
        let flows: Vec<u64> = team.counters.iter().map(|c| c.flows.get()).collect();
        assert!(flows.iter().all(|n| *n > 600 / u64::from(workers) - 80), "all workers take part: {flows:?}");
        assert_eq!(team.sum(|c| c.hits.get()), 5 * 600);
        assert!(team.sum(|c| c.handed_in.get()) > 0);
    }
}

#[test]
fn no_packet_overtakes_a_shorter_one_of_its_flow_on_the_way_to_its_owner() {
    let mut team = Team::in_turn(2);
    team.settle();
    let pair = |n: u16| {
        let datagram = Packet::udp(&format!("198.51.100.7:{}", 1024 + n), "192.0.2.101:53");
        [4, 100].map(|bytes| datagram.clone().payload(&vec![7; bytes]).build())
    };
    let frames: Vec<_> = (0..50).flat_map(pair).collect();
    team.workers[0].port_mut(UPLINK).unwrap().arriving.extend(frames.iter().map(|frame| MemoryBuffer::new(frame, 1)));
    team.poll();
    let sent = team.sent(CLUSTER);
    assert_eq!(sent.len(), 100);
    assert!(team.sum(|c| c.handed_in.get()) > 30);
    let mut begun = HashSet::new();
    for frame in &sent {
        assert_eq!(begun.insert(ends(frame)), frame.len() < 100, "the longer packet is the second of its flow");
    }
}

#[test]
fn packets_that_a_full_hand_over_queue_refuses_are_dropped_and_counted() {
    let mut team = Team::in_turn(2);
    team.settle();
    let frames: Vec<_> = (0..20_000_u32)
        .map(|n| Packet::udp(&format!("198.51.{}.{}:{}", n / 250 % 250, n % 250 + 1, 1024 + n), "192.0.2.101:53").build())
        .collect();
    for frame in &frames {
        team.workers[0].port_mut(UPLINK).unwrap().arriving.push_back(MemoryBuffer::new(frame, 1));
    }
    while team.workers[0].poll(team.now) > 0 {} // worker 1 does not poll meanwhile
    let full = team.drops(DropReason::HandoverFull);
    assert!((5_900..6_500).contains(&full), "half of each burst is the other's, in about eight of the 512 elements: {full}");
    team.poll();
    let account = team.counters[1].account();
    assert_eq!((account.received, account.handed_in), (0, team.counters[0].handed_out.get()));
    assert!((3_500..=4_096).contains(&account.handed_in), "{account:?}");
}

#[test]
fn fragments_among_other_packets_leave_room_in_the_queue_for_both() {
    let mut team = Team::in_turn(2);
    team.settle();
    for n in 0..1000_u16 {
        let from = format!("198.51.{}.{}:{}", n / 250, n % 250 + 1, 1024 + n);
        let whole = Packet::udp(&from, "192.0.2.101:53");
        let first = Packet { fragmentation: 0x2000, identification: n, ..whole.clone() }.payload(&[7; 8]);
        let arriving = [whole.build(), first.build()].map(|frame| MemoryBuffer::new(&frame, 1));
        team.workers[0].port_mut(UPLINK).unwrap().arriving.extend(arriving);
    }
    while team.workers[0].poll(team.now) > 0 {} // worker 1 does not poll meanwhile
    assert!(team.counters[0].handed_out.get() > 900);
    assert_eq!(team.drops(DropReason::HandoverFull), 0, "in elements of one packet each they would find no room");
    team.poll();
}

#[test]
fn small_bursts_are_received_as_fast_as_they_arrive() {
    let mut team = Team::in_turn(2);
    team.settle();
    for n in 0..100_u16 {
        let frame = Packet::udp(&format!("198.51.100.7:{}", 1024 + n), "192.0.2.101:53").build();
        team.workers[0].port_mut(UPLINK).unwrap().arriving.push_back(MemoryBuffer::new(&frame, 1));
        team.workers[0].poll(team.now);
    }
    let waiting = team.counters[0].handed_out.get();
    assert!(waiting > 30, "{waiting} bursts of one packet");
    team.workers[1].poll(team.now);
    assert_eq!(team.counters[1].handed_in.get(), waiting, "in one turn");
    team.poll();
}

#[test]
fn a_worker_without_a_transmit_queue_has_its_packets_sent_by_one_that_has() {
    let mut team = Team::new(Steering::own_hash(2, SEED), Delivery::InTurn, 1);
    team.settle();
    team.exchange(&clients(200), tcp_flags::SYN);
    team.exchange(&clients(200), tcp_flags::ACK);
    assert_eq!(team.counters[1].transmitted.get(), 0, "worker 1 sends nothing itself");
    assert!(team.counters[1].hits.get() > 100, "and forwards its part");
}

#[test]
fn an_icmp_error_reaches_the_owner_of_its_flow() {
    let mut team = Team::in_turn(3);
    team.settle();
    let clients = clients(60);
    let frames: Vec<_> = clients.iter().map(|(from, to)| Packet::tcp(from, to).build()).collect();
    team.put(UPLINK, &frames);
    let sent = team.sent(CLUSTER);
    let errors = sent.iter().map(|frame| {
        let (snat, backend) = ends(frame);
        let (kind, code) = if snat.is_ipv4() { (3, 1) } else { (1, 3) };
        let about = Segment::Icmp { kind, code, rest: 0 };
        Packet::between(backend.ip(), snat.ip(), about).payload(&frame[14..]).build()
    });
    let errors: Vec<_> = errors.collect();
    for _ in 0..3 {
        team.put(CLUSTER, &errors);
    }
    assert_eq!(team.sent(UPLINK).len(), 3 * clients.len(), "each client gets the error, whichever queue it arrived on");
}

#[test]
fn an_error_of_a_router_inside_a_tunnel_reaches_the_owner_of_the_flow_inside() {
    for mode in [Mode::Ipip, Mode::Gue] {
        let mut state = state();
        for (_, service) in state.services.clone() {
            // Round robin: only the owner of the flow knows the backend.
            let changed = Service { mode, scheduler: Scheduler::RoundRobin, ..Service::clone(&service) };
            state.services.insert(service.name.clone(), Arc::new(changed));
        }
        let mut team = Team::serving(state, Steering::own_hash(3, SEED), Delivery::InTurn, 3);
        team.settle();
        let opening: Vec<_> = clients(60).iter().map(|(from, to)| Packet::tcp(from, to).build()).collect();
        team.put(UPLINK, &opening);
        let about = |frame: &Vec<u8>| {
            let (source, _) = ends(frame);
            let (router, kind, code) = if source.is_ipv4() { ("10.0.0.99", 3, 1) } else { ("fd00::99", 1, 0) };
            let segment = Segment::Icmp { kind, code, rest: 0 };
            Packet::between(rig::ip(router), source.ip(), segment).payload(&frame[14..]).build()
        };
        let errors: Vec<_> = team.sent(CLUSTER).iter().map(about).collect();
        assert_eq!(errors.len(), 60);
        team.put(CLUSTER, &errors);
        let mut destinations: Vec<_> = team.sent(UPLINK).iter().map(|frame| ends(frame).1.ip().to_string()).collect();
        let mut expected: Vec<_> =
            clients(60).iter().map(|(from, _)| from.parse::<SocketAddr>().unwrap().ip().to_string()).collect();
        destinations.sort_unstable();
        expected.sort_unstable();
        assert_eq!(destinations, expected, "{mode}");
    }
}

#[test]
fn both_sides_of_a_dnat_flow_come_to_the_worker_of_the_client() {
    let mut state = state();
    for (_, service) in state.services.clone() {
        state.services.insert(service.name.clone(), Arc::new(Service { mode: Mode::Dnat, ..Service::clone(&service) }));
    }
    let cards = Steering::toeplitz(3, SEED);
    let card = Delivery::Card(card(&cards));
    for (steering, delivery) in [(Steering::own_hash(3, SEED), Delivery::InTurn), (cards, card)] {
        let mut team = Team::serving(state.clone(), steering, delivery, 3);
        team.settle();
        let clients = clients(400);
        for flags in [tcp_flags::SYN, tcp_flags::ACK, tcp_flags::ACK] {
            team.exchange(&clients, flags);
        }
        assert_eq!((team.sum(|c| c.new_flows.get()), team.sum(|c| c.hits.get())), (400, 5 * 400));
        assert!(team.counters.iter().all(|c| c.flows.get() > 60), "all workers take part");
    }
}

#[test]
fn fragments_meet_and_follow_the_first_to_its_owner() {
    let mut team = Team::in_turn(3);
    team.settle();
    let mut frames = Vec::new();
    for n in 0..60_u16 {
        let (from, to) = match n % 2 {
            0 => (format!("198.51.100.{}:{}", n + 1, 2000 + n), "192.0.2.101:53"),
            _ => (format!("[2001:db8:1::{}]:{}", n + 1, 2000 + n), "[2001:db8::1:1]:53"),
        };
        let packet = Packet { fragmentation: 0, ..Packet::udp(&from, to).payload(&[7; 2000]) };
        let mut parts = fragments(&packet.build(), 800, n.into());
        parts.rotate_left(usize::from(n) % 3); // the first comes first, second or last
        frames.extend(parts);
    }
    let count = frames.len();
    team.put(UPLINK, &frames);
    assert_eq!(team.sent(CLUSTER).len(), count, "every fragment leaves");
    assert_eq!(team.sum(|c| c.new_flows.get()), 60, "one flow for each datagram");
    let dropped: u64 = team.counters.iter().map(|c| c.account().dropped).sum();
    assert_eq!(dropped, 0);
}

#[test]
fn one_worker_announces_and_any_answers() {
    let mut team = Team::in_turn(2);
    let announced = team.settle();
    let mut alone = rig::Rig::before_state(64);
    (alone.state, alone.network) = (state(), network());
    assert_eq!(announced.len(), alone.publish_and_watch().len(), "as many announcements as from one worker");

    let question = arp_request("192.0.2.1".parse().unwrap(), "192.0.2.100".parse().unwrap());
    team.put(UPLINK, &[question.clone(), question]);
    assert_eq!(team.sent(UPLINK).len(), 2);
    assert!(team.counters.iter().all(|counters| counters.replies.get() == 1), "whoever receives it answers");
}

#[test]
fn packets_of_the_kernel_leave_in_order_by_one_worker() {
    let mut team = Team::in_turn(2);
    team.settle();
    let frame = |n: usize| Packet::udp(&format!("192.0.2.2:{n}"), "198.51.100.7:9").build();
    for n in 0..FROM_LINUX_BURSTS {
        let burst = Burst::from_iter([MemoryBuffer::new(&frame(n), 0)]);
        assert!(team.twins[0].from_linux.push(burst).is_ok());
    }
    team.poll();
    assert_eq!(team.sent(UPLINK), (0..FROM_LINUX_BURSTS).map(frame).collect::<Vec<_>>());
    assert!(team.counters.iter().any(|counters| counters.received.get() == 0), "one worker takes them all");
}
