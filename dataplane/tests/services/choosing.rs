//! Source ranges, and the choice of a backend for a new flow.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use dataplane::tcp_flags;
use dataplane::testing::Packet;
use dataplane::{DropReason, PacketOutcome};
use proto::{BackendState, Scheduler, Service, ServiceName};

use crate::rig::{BACKENDS, CLUSTER, Rig, SECOND, UPLINK, ends, last_byte};

/// Changes a service of the rig.
fn change(rig: &mut Rig, name: &str, change: impl FnOnce(&mut Service)) {
    let service = rig.state.services.get_mut(&ServiceName::new("default", name)).unwrap();
    change(Arc::make_mut(service));
}

fn with(name: &str, how: impl FnOnce(&mut Service)) -> Rig {
    let mut rig = Rig::new();
    change(&mut rig, name, how);
    rig.publish();
    rig
}

/// The last byte of the address of the backend that a new flow of this client gets.
fn backend_of(rig: &mut Rig, client: &str, vip: &str) -> u8 {
    let sent = rig.forward(UPLINK, &Packet::tcp(client, vip).build());
    last_byte(ends(&sent).1.ip())
}

#[test]
fn only_clients_inside_the_source_ranges_may_connect() {
    let ranges = |prefixes: &[&str]| Some(prefixes.iter().map(|p| p.parse().unwrap()).collect());
    let (v4, v6) = ("192.0.2.100:80", "[2001:db8::1:0]:80");
    let denied = Some(PacketOutcome::Drop(DropReason::SourceRange));
    let allowed = Some(PacketOutcome::Forward(CLUSTER));
    type Row<'a> = (&'a str, &'a [&'a str], &'a str, &'a str, Option<PacketOutcome>);
    let rows: [Row<'_>; 7] = [
        ("a client inside", &["198.51.100.0/24"], "198.51.100.7:5555", v4, allowed),
        ("one outside", &["198.51.101.0/24"], "198.51.100.7:5555", v4, denied),
        ("one inside the second", &["10.0.0.0/8", "198.51.100.7/32"], "198.51.100.7:5555", v4, allowed),
        ("a client of a family that has no range", &["198.51.100.0/24"], "[2001:db8:1::7]:5555", v6, denied),
        ("one inside, of IPv6", &["2001:db8:1::/64"], "[2001:db8:1::7]:5555", v6, allowed),
        ("a family with a prefix of length 0", &["0.0.0.0/0"], "198.51.100.7:5555", v4, allowed),
        ("any client, with an empty list of ranges", &[], "198.51.100.7:5555", v4, denied),
    ];
    for (sentence, prefixes, client, vip, outcome) in rows {
        let mut rig = with("web", |service| service.source_ranges = ranges(prefixes));
        assert_eq!(rig.put(UPLINK, &Packet::tcp(client, vip).build()), outcome, "{sentence}");
    }
    let mut rig = with("node-port", |service| service.source_ranges = ranges(&["10.0.0.0/8"]));
    assert_eq!(
        rig.put(UPLINK, &Packet::tcp("198.51.100.7:5555", "192.0.2.2:30080").build()),
        allowed,
        "node ports have no source ranges"
    );
}

#[test]
fn dropped_packets_are_counted_for_the_service_that_they_were_sent_to_and_stay_counted_when_it_changes() {
    let mut rig = Rig::new();
    let outside = |service: &mut Service| service.source_ranges = Some(vec!["10.0.0.0/8".parse().unwrap()]);
    change(&mut rig, "web", outside);
    rig.publish();
    for port in 1..=3 {
        rig.put(UPLINK, &Packet::tcp(&format!("198.51.100.7:{port}"), "192.0.2.100:80").build());
    }
    assert_eq!(rig.service_drops("web", DropReason::SourceRange), 3);
    change(&mut rig, "web", |service| service.source_ranges = None);
    rig.publish();
    // Mid-stream without a flow: dropped, and a reset is sent.
    rig.put(UPLINK, &Packet::tcp("198.51.100.7:9", "192.0.2.100:80").flags(tcp_flags::ACK).build());
    // For no service.
    rig.put(UPLINK, &Packet::tcp("198.51.100.7:9", "192.0.2.100:81").flags(tcp_flags::RST).build());
    assert_eq!(rig.drops(DropReason::NoFlow), 2);
    let reasons = [DropReason::SourceRange, DropReason::NoFlow];
    assert_eq!(reasons.map(|reason| rig.service_drops("web", reason)), [3, 1]);
    assert_eq!(reasons.map(|reason| rig.service_drops("dns", reason)), [0, 0]);
}

#[test]
fn a_flow_continues_when_its_client_leaves_the_source_ranges() {
    let mut rig = Rig::new();
    let client = "198.51.100.7:5555";
    assert_eq!(rig.put(UPLINK, &Packet::tcp(client, "192.0.2.100:80").build()), Some(PacketOutcome::Forward(CLUSTER)));
    change(&mut rig, "web", |service| service.source_ranges = Some(vec!["10.0.0.0/8".parse().unwrap()]));
    rig.publish();
    assert_eq!(
        rig.put(UPLINK, &Packet::tcp(client, "192.0.2.100:80").build()),
        Some(PacketOutcome::Forward(CLUSTER)),
        "its flow is known"
    );
    let other = Packet::tcp("198.51.100.7:5556", "192.0.2.100:80").build();
    assert_eq!(rig.put(UPLINK, &other), Some(PacketOutcome::Drop(DropReason::SourceRange)), "a new one is not");
}

#[test]
fn a_local_frontend_without_backends_is_silent_where_another_refuses() {
    for (local, outcome) in [(false, PacketOutcome::Reply(UPLINK)), (true, PacketOutcome::Drop(DropReason::NoLocalBackend))] {
        let mut rig = with("web", |service| {
            service.local = local;
            service.ports.iter_mut().for_each(|port| port.backends.clear());
        });
        assert_eq!(rig.put(UPLINK, &Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").build()), Some(outcome));
    }
}

#[test]
fn by_source_hash_a_client_has_one_backend_and_clients_have_all() {
    let mut rig = with("web", |service| service.scheduler = Scheduler::SourceHash);
    let mut all = BTreeSet::new();
    for client in 1..40 {
        let of_client: BTreeSet<u8> =
            (0..4).map(|n| backend_of(&mut rig, &format!("198.51.100.{client}:{}", 5000 + n), "192.0.2.100:80")).collect();
        assert_eq!(of_client.len(), 1, "client {client}");
        all.extend(of_client);
    }
    assert_eq!(all.len(), 3);
}

#[test]
fn by_destination_hash_a_frontend_has_one_backend() {
    let mut rig = with("web", |service| service.scheduler = Scheduler::DestinationHash);
    let all: BTreeSet<u8> = (1..40).map(|n| backend_of(&mut rig, &format!("198.51.100.{n}:5000"), "192.0.2.100:80")).collect();
    assert_eq!(all.len(), 1);
}

/// How many of `count` new flows each backend gets.
fn shares(rig: &mut Rig, count: u16, first_port: u16) -> [u16; 3] {
    let mut shares = [0; 3];
    for port in first_port..first_port + count {
        let backend = backend_of(rig, &format!("198.51.100.7:{port}"), "192.0.2.100:80");
        shares[usize::from(backend - BACKENDS[0])] += 1;
    }
    shares
}

fn weigh(service: &mut Service, weights: [u16; 3]) {
    for port in &mut service.ports {
        port.backends.iter_mut().zip(weights).for_each(|(backend, weight)| backend.weight = weight);
    }
}

#[test]
fn in_turn_each_backend_gets_its_weight_of_every_cycle_and_one_that_drains_nothing() {
    let mut rig = with("web", |service| {
        service.scheduler = Scheduler::RoundRobin;
        weigh(service, [1, 2, 3]);
    });
    assert_eq!(shares(&mut rig, 60, 1000), [10, 20, 30]);
    change(&mut rig, "web", |service| {
        service.ports.iter_mut().for_each(|port| port.backends[2].state = BackendState::Draining);
    });
    rig.publish();
    assert_eq!(shares(&mut rig, 60, 2000), [20, 40, 0]);
}

#[test]
fn by_connections_a_backend_that_returns_catches_up_with_the_others() {
    let mut rig = with("web", |service| {
        service.scheduler = Scheduler::LeastConnections;
        weigh(service, [1, 1, 0]);
    });
    assert_eq!(shares(&mut rig, 40, 1000), [20, 20, 0]);
    change(&mut rig, "web", |service| weigh(service, [1, 1, 1]));
    rig.publish();
    assert_eq!(shares(&mut rig, 20, 2000), [0, 0, 20]);
    assert_eq!(shares(&mut rig, 30, 3000), [10, 10, 10]);
}

#[test]
fn by_expected_delay_or_idleness_weights_decide() {
    for (scheduler, first) in [(Scheduler::ShortestExpectedDelay, [0, 0, 4]), (Scheduler::NeverQueue, [1, 1, 2])] {
        let mut rig = with("web", |service| {
            service.scheduler = scheduler;
            weigh(service, [1, 1, 8]);
        });
        assert_eq!(shares(&mut rig, 4, 1000), first, "{scheduler}");
        let more = shares(&mut rig, 56, 2000);
        let flows = [0, 1, 2].map(|n| first[n] + more[n]);
        assert!((5..=7).contains(&flows[0]) && (5..=7).contains(&flows[1]), "{scheduler}: {flows:?}");
    }
}

/// The backends of new flows of the clients 198.51.100.1 and up.
fn backends_of_clients(rig: &mut Rig, count: u8, port: u16) -> Vec<u8> {
    (1..=count).map(|n| backend_of(rig, &format!("198.51.100.{n}:{port}"), "192.0.2.100:80")).collect()
}

#[test]
fn with_affinity_a_client_keeps_its_backend_through_changes_for_as_long_as_it_comes_back() {
    let hour = Duration::from_secs(3600);
    for scheduler in Scheduler::ALL {
        let mut rig = with("web", |service| {
            (service.affinity, service.scheduler) = (Some(hour), *scheduler);
            service.ports.iter_mut().for_each(|port| port.backends[2].weight = 0);
        });
        let first = backends_of_clients(&mut rig, 60, 1000);
        assert_eq!(BTreeSet::from_iter(&first).len(), 2, "{scheduler}");
        change(&mut rig, "web", |service| weigh(service, [1, 1, 3]));
        rig.publish();
        for (port, minutes) in (1001..).zip([50, 50, 50]) {
            assert_eq!(backends_of_clients(&mut rig, 60, port), first, "{scheduler}");
            rig.now += minutes * 60 * SECOND;
        }
        rig.now += 20 * 60 * SECOND;
        let new_choice = backends_of_clients(&mut rig, 60, 2000);
        assert!(new_choice.iter().filter(|&&backend| backend == BACKENDS[2]).count() > 20, "{scheduler}: {new_choice:?}");
        assert_eq!(backends_of_clients(&mut rig, 60, 2001), new_choice, "{scheduler}");
    }
}

#[test]
fn with_affinity_a_client_whose_backend_takes_no_new_flows_gets_another_and_stays_there() {
    let mut rig = with("web", |service| service.affinity = Some(Duration::from_secs(3600)));
    let first = backends_of_clients(&mut rig, 60, 1000);
    change(&mut rig, "web", |service| weigh(service, [0, 1, 1]));
    rig.publish();
    let then = backends_of_clients(&mut rig, 60, 1001);
    for (first, then) in first.iter().zip(&then) {
        let stays = *first != BACKENDS[0];
        assert!(*then != BACKENDS[0] && (!stays || first == then), "{first} -> {then}");
    }
    change(&mut rig, "web", |service| weigh(service, [1, 1, 1]));
    rig.publish();
    assert_eq!(backends_of_clients(&mut rig, 60, 1002), then);
}

#[test]
fn with_affinity_two_gateways_send_a_client_to_the_same_backend() {
    let affinity = |service: &mut Service| service.affinity = Some(Duration::from_secs(60));
    let (mut one, mut other) = (with("web", affinity), with("web", affinity));
    let of_other = backends_of_clients(&mut other, 60, 2000);
    assert_eq!(backends_of_clients(&mut one, 60, 1000), of_other);
}
