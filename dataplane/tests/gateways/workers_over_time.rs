//! Several workers while the gateway's inputs change: flows of each worker keep their backends whatever is published,
//! and new flows are chosen by the state of all workers.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dataplane::testing::Packet;
use dataplane::workers::{Proof, RssKind};
use dataplane::{DropReason, Mac, tcp_flags};
use proto::{Protocol, Scheduler, Service, ServiceName};

use crate::rig::{self, CLUSTER, SECOND, UPLINK, ends, ip};
use crate::team::{Team, clients};

const ACK: u8 = tcp_flags::ACK;
const FIN: u8 = tcp_flags::FIN;
const WEB: &str = "192.0.2.100:80";

type Seen = HashMap<String, (SocketAddr, SocketAddr)>;

/// Gateways of 2 and 4 workers, with cards and with frames distributed in turn.
fn teams() -> impl Iterator<Item = (String, Team)> {
    [2, 4].into_iter().flat_map(|workers| {
        let mut teams = [
            (format!("{workers} workers over cards"), Team::over_cards(workers)),
            (format!("{workers} workers, frames in turn"), Team::in_turn(workers)),
        ];
        teams.iter_mut().for_each(|(_, team)| drop(team.settle()));
        teams
    })
}

fn change(team: &mut Team, change: impl FnOnce(&mut Service)) {
    let name = ServiceName::new("default", "web");
    change(Arc::make_mut(team.state.services.get_mut(&name).unwrap()));
}

/// The number of a backend of the rig, which is the end of its address as text.
fn number(address: IpAddr) -> u8 {
    address.to_string().rsplit(['.', ':']).next().unwrap().parse().unwrap()
}

/// Keeps only these backends of the service `web`.
fn keep(team: &mut Team, backends: &[u8]) {
    let all = rig::state().services[&ServiceName::new("default", "web")].ports.clone();
    change(team, |service| {
        for (port, all) in service.ports.iter_mut().zip(all) {
            port.backends = all.backends;
            port.backends.retain(|backend| backends.contains(&number(backend.address.ip())));
        }
    });
}

fn backends(seen: &Seen) -> HashSet<u8> {
    seen.values().map(|(_, backend)| number(backend.ip())).collect()
}

/// Clients that did not exist before.
fn others(first: u16, count: u16) -> Vec<(String, &'static str)> {
    clients(first + count).split_off(first.into())
}

/// Every connection continues in both directions.
fn go_on(team: &mut Team, clients: &[(String, &str)], seen: &Seen) {
    assert_eq!(&team.towards_backends(clients, ACK), seen);
    team.answered(seen, ACK);
}

#[test]
fn connections_of_all_workers_keep_their_backends_through_every_change_of_the_snapshot() {
    for (what, mut team) in teams() {
        let all = clients(300);
        let seen = team.establish(&all);
        assert_eq!(backends(&seen), HashSet::from([11, 12, 13]), "{what}");
        keep(&mut team, &[12, 13]);
        team.publish();
        go_on(&mut team, &all, &seen);
        assert_eq!(backends(&team.towards_backends(&others(300, 60), tcp_flags::SYN)), HashSet::from([12, 13]), "{what}");
        let failing = |family: &str| (Protocol::Tcp, format!("{family}:8080").parse().unwrap());
        team.health.failing = ["10.0.0.12", "[fd00::12]"].map(failing).into();
        team.publish();
        go_on(&mut team, &all, &seen);
        assert_eq!(backends(&team.towards_backends(&others(400, 60), tcp_flags::SYN)), HashSet::from([13]), "{what}");
        keep(&mut team, &[11, 12, 13]);
        team.health.failing.clear();
        let moved = Mac([2, 9, 9, 9, 9, 9]);
        let routers: [IpAddr; 2] = [ip("192.0.2.1"), ip("2001:db8::ffff")];
        team.network.neighbours.iter_mut().filter(|n| routers.contains(&n.address)).for_each(|n| n.mac = moved);
        team.publish();
        assert_eq!(team.towards_backends(&all, ACK), seen);
        let replies: Vec<_> = seen
            .values()
            .map(|(snat, backend)| Packet::tcp(&backend.to_string(), &snat.to_string()).flags(ACK).build())
            .collect();
        team.put(CLUSTER, &replies);
        let sent = team.sent(UPLINK);
        assert_eq!((sent.len(), sent.iter().all(|frame| frame[..6] == moved.0)), (300, true), "{what}: the router moved");
        assert!(team.forwarded().iter().all(|n| *n > 0), "{what}: all workers take part");
    }
}

#[test]
fn when_the_slot_of_a_target_is_given_to_another_replies_still_come_to_the_worker_of_their_flow() {
    for workers in [2, 4] {
        let mut team = Team::over_cards(workers);
        keep(&mut team, &[11]);
        team.publish();
        let all = clients(400);
        let seen = team.establish(&all);
        let proofs = [RssKind::TcpV4, RssKind::TcpV6].map(|kind| team.proofs_of(kind)).concat();
        assert!(!proofs.iter().any(|proof| matches!(proof, Proof::Refuted(_))) && proofs.contains(&Proof::Proven));
        assert_eq!(team.sum(|c| c.handed_out.get()), 0);
        // Backend 11 drains and is removed, and the slots of its targets are free; the workers had no time to sweep
        // their tables.
        keep(&mut team, &[12]);
        for seconds in [0, 301, 130] {
            team.now += seconds * SECOND;
            team.offer();
            team.poll();
        }
        keep(&mut team, &[12, 13]);
        let sequence = team.offer();
        let new = others(400, 400);
        let before: Vec<u64> = team.counters.iter().map(|c| c.new_flows.get()).collect();
        let second = team.towards_backends(&new, tcp_flags::SYN);
        assert!(team.publisher.reached(sequence));
        assert_eq!(backends(&second), HashSet::from([12, 13]));
        team.answered(&second, tcp_flags::SYN | ACK);
        assert_eq!(team.sum(|c| c.handed_out.get()), 0, "{workers} workers: no reply came to another worker");
        let made: Vec<u64> = team.counters.iter().zip(before).map(|(c, before)| c.new_flows.get() - before).collect();
        assert!(made.iter().all(|n| *n > 0), "all workers take part: {made:?}");
        // The remaining packets of the first connections get a RST, and release no port to the other target.
        let (client, vip) = &all[0];
        team.put(UPLINK, &[Packet::tcp(client, vip).flags(ACK).build()]);
        assert_eq!(team.drops(DropReason::NoFlow), 1, "{:?}", seen[client]);
        team.now += 20 * SECOND;
        let third = team.towards_backends(&others(800, 200), tcp_flags::SYN);
        let both: HashSet<_> = second.values().chain(third.values()).collect();
        assert_eq!(both.len(), 600, "no two flows look the same to a backend");
        team.sent(UPLINK);
    }
}

#[test]
fn a_client_with_affinity_has_one_backend_on_all_workers_and_keeps_it_when_endpoints_change() {
    for (what, mut team) in teams() {
        keep(&mut team, &[11, 12]);
        change(&mut team, |service| service.affinity = Some(Duration::from_secs(600)));
        team.publish();
        let connections = |first: u16| -> Vec<(String, &str)> {
            (0..40).flat_map(|n| (0..8).map(move |port| (format!("198.51.100.{}:{}", n + 1, first + port), WEB))).collect()
        };
        let by_client = |seen: Seen| {
            let mut chosen: HashMap<IpAddr, HashSet<IpAddr>> = HashMap::new();
            for (client, (_, backend)) in seen {
                let client: SocketAddr = client.parse().unwrap();
                chosen.entry(client.ip()).or_default().insert(backend.ip());
            }
            assert!(chosen.values().all(|backends| backends.len() == 1), "{what}: one backend a client");
            chosen
        };
        let first = by_client(team.establish(&connections(2000)));
        assert_eq!(first.values().flatten().collect::<HashSet<_>>().len(), 2, "{what}: both backends have clients");
        assert!(team.counters.iter().all(|c| c.new_flows.get() > 0), "{what}: all workers take part");
        keep(&mut team, &[11, 12, 13]);
        team.publish();
        assert_eq!(by_client(team.establish(&connections(3000))), first, "{what}");
        keep(&mut team, &[12, 13]);
        team.publish();
        let moved = by_client(team.towards_backends(&connections(4000), tcp_flags::SYN));
        let gone = ip("10.0.0.11");
        for (client, backends) in &first {
            assert_eq!(&moved[client] == backends, !backends.contains(&gone), "{what}: only clients of what is gone move");
        }
    }
}

#[test]
fn least_connections_counts_the_flows_of_all_workers_and_those_that_were_there_before_a_change() {
    for (what, mut team) in teams() {
        keep(&mut team, &[11, 12]);
        change(&mut team, |service| service.scheduler = Scheduler::LeastConnections);
        team.publish();
        let flows_of = |seen: &Seen| {
            let mut flows = [0_i64; 3];
            seen.values().for_each(|(_, backend)| flows[usize::from(number(backend.ip()) - 11)] += 1);
            flows
        };
        let v4: Vec<_> = clients(1600).into_iter().filter(|(client, _)| !client.starts_with('[')).collect();
        let (old, new) = v4.split_at(400);
        let first = team.establish(old);
        let [a, b, c] = flows_of(&first);
        assert_eq!((a + b, c), (400, 0));
        assert!((a - b).abs() <= 8, "{what}: {a} and {b}");
        assert!(team.forwarded().iter().all(|n| *n > 0), "{what}: all workers take part");
        keep(&mut team, &[11, 12, 13]);
        team.publish();
        let catching_up = team.establish(&new[..160]);
        let [a, b, c] = flows_of(&catching_up);
        assert!(c >= 150, "{what}: the new backend catches up: {a}, {b}, {c}");
        let after = team.establish(&new[160..260]);
        let all: Seen = first.into_iter().chain(catching_up).chain(after).collect();
        let flows = flows_of(&all);
        assert!(flows.iter().max().unwrap() - flows.iter().min().unwrap() <= 8, "{what}: {flows:?}");
        // The connections of one backend end on whatever worker they are.
        let of_11: Vec<_> = v4.iter().filter(|(c, _)| all.get(c).is_some_and(|(_, b)| number(b.ip()) == 11)).collect();
        for (client, vip) in &of_11 {
            let (snat, backend) = all[client];
            team.put(UPLINK, &[Packet::tcp(client, vip).flags(FIN | ACK).build()]);
            team.put(CLUSTER, &[Packet::tcp(&backend.to_string(), &snat.to_string()).flags(FIN | ACK).build()]);
        }
        for _ in 0..5 {
            team.settle();
        }
        let [a, b, c] = flows_of(&team.establish(&new[300..400]));
        assert!(a >= 90, "{what}: an idle backend is chosen: {a}, {b}, {c}");
    }
}

#[test]
fn while_one_worker_does_not_poll_changes_coalesce_and_no_flow_of_any_worker_is_lost() {
    for workers in [2_u8, 4] {
        let mut team = Team::over_cards(workers);
        team.settle();
        let all = clients(400);
        let seen = team.establish(&all);
        let busy: Vec<usize> = (1..usize::from(workers)).collect();
        let mut last = 0;
        for turn in 0..12_u8 {
            // Now one backend is missing, now another; after this each is there again.
            keep(
                &mut team,
                if turn % 2 == 0 { &[11, 12, 13] } else { [&[12, 13], &[11, 13], &[11, 12]][usize::from(turn / 2) % 3] },
            );
            team.now += SECOND;
            last = team.offer();
            assert!(team.publisher.retired() <= 2);
            team.arrive(UPLINK, &all.iter().map(|(from, to)| Packet::tcp(from, to).flags(ACK).build()).collect::<Vec<_>>());
            for _ in 0..30 {
                for &worker in &busy {
                    team.workers[worker].poll(team.now);
                }
            }
            let now: HashSet<_> = team.sent(CLUSTER).iter().map(|frame| ends(frame)).collect();
            assert!(now.len() > 400 / 2 / usize::from(workers), "{} flows of the other workers go on", now.len());
            assert!(now.is_subset(&seen.values().copied().collect()), "each at its backend");
        }
        keep(&mut team, &[11, 12, 13]);
        last = last.max(team.offer());
        assert!(!team.publisher.reached(last), "one worker holds what it had");
        while !team.publisher.reached(last) {
            team.poll();
            team.publisher.advance();
        }
        assert_eq!(team.publisher.retired(), 0);
        let late: HashSet<_> = team.sent(CLUSTER).iter().map(|frame| ends(frame)).collect();
        assert!(late.is_subset(&seen.values().copied().collect()) && !late.is_empty(), "what waited for the worker came through");
        go_on(&mut team, &all, &seen);
        assert_eq!(team.sum(|c| c.flows.get()), 400);
    }
}

#[test]
fn a_backend_that_was_replaced_in_snapshots_that_a_worker_never_saw_gets_nothing_of_its_flows() {
    for workers in [2_u8, 4] {
        let mut team = Team::over_cards(workers);
        keep(&mut team, &[11]);
        team.publish();
        let all = clients(200);
        team.establish(&all);
        keep(&mut team, &[]);
        for (seconds, backends) in [(0, &[][..]), (301, &[]), (130, &[12]), (1, &[13])] {
            team.now += seconds * SECOND;
            keep(&mut team, backends);
            team.offer();
            team.publisher.advance();
        }
        // No worker has polled: of five snapshots it sees the last that found room, and then the newest.
        team.arrive(UPLINK, &all.iter().map(|(from, to)| Packet::tcp(from, to).flags(ACK).build()).collect::<Vec<_>>());
        while !team.publisher.advance() || team.workers.iter_mut().map(|worker| worker.poll(team.now)).sum::<usize>() > 0 {}
        team.poll();
        let sent = team.sent(CLUSTER);
        let resets =
            sent.iter().filter(|frame| frame[if frame[12..14] == [8, 0] { 47 } else { 67 }] & tcp_flags::RST != 0).count();
        assert_eq!(sent.len(), resets, "{workers} workers: nothing of a connection goes to another backend");
        assert!(team.drops(DropReason::NoFlow) == 200 && sent.iter().all(|frame| number(ends(frame).1.ip()) == 11));
        team.sent(UPLINK);
        let fresh = team.towards_backends(&others(200, 100), tcp_flags::SYN);
        assert_eq!(backends(&fresh), HashSet::from([13]));
        team.answered(&fresh, tcp_flags::SYN | ACK);
    }
}
