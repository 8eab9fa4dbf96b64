//! Source ranges, and the choice of a backend for a new flow.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use dataplane::tcp_flags;
use dataplane::testing::Packet;
use dataplane::{DropReason, PacketOutcome};
use proto::{AffinityScope, BackendState, Family, Mode, Protocol, Scheduler, Service, ServiceName};

use crate::rig::{BACKENDS, CLUSTER, Rig, SECOND, UPLINK, ends, last_byte, service, service_port};

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

/// The same of connections that are established.
fn backends_of_connections(rig: &mut Rig, count: u8, port: u16) -> Vec<u8> {
    let establish = |n: u8| {
        let (client, vip) = (&*format!("198.51.100.{n}:{port}"), "192.0.2.100:80");
        let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(client, vip).build()));
        let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK);
        rig.forward(CLUSTER, &answer.build());
        rig.forward(UPLINK, &Packet::tcp(client, vip).flags(tcp_flags::ACK).numbers(1_001, 1_001).build());
        last_byte(backend.ip())
    };
    (1..=count).map(establish).collect()
}

#[test]
fn with_affinity_a_client_keeps_its_backend_through_changes_for_as_long_as_it_comes_back() {
    let hour = Duration::from_secs(3600);
    for scheduler in Scheduler::ALL {
        let mut rig = with("web", |service| {
            (service.affinity, service.scheduler) = (Some(hour), *scheduler);
            service.ports.iter_mut().for_each(|port| port.backends[2].weight = 0);
        });
        let first = backends_of_connections(&mut rig, 60, 1000);
        assert_eq!(BTreeSet::from_iter(&first).len(), 2, "{scheduler}");
        change(&mut rig, "web", |service| weigh(service, [1, 1, 3]));
        rig.publish();
        for (port, minutes) in (1001..).zip([50, 50, 50]) {
            assert_eq!(backends_of_connections(&mut rig, 60, port), first, "{scheduler}");
            rig.now += minutes * 60 * SECOND;
        }
        rig.now += 20 * 60 * SECOND;
        let new_choice = backends_of_connections(&mut rig, 60, 2000);
        assert!(new_choice.iter().filter(|&&backend| backend == BACKENDS[2]).count() > 20, "{scheduler}: {new_choice:?}");
        assert_eq!(backends_of_connections(&mut rig, 60, 2001), new_choice, "{scheduler}");
    }
}

#[test]
fn with_affinity_a_client_whose_backend_takes_no_new_flows_gets_another_and_stays_there() {
    let mut rig = with("web", |service| service.affinity = Some(Duration::from_secs(3600)));
    let first = backends_of_connections(&mut rig, 60, 1000);
    change(&mut rig, "web", |service| weigh(service, [0, 1, 1]));
    rig.publish();
    let then = backends_of_connections(&mut rig, 60, 1001);
    for (first, then) in first.iter().zip(&then) {
        let stays = *first != BACKENDS[0];
        assert!(*then != BACKENDS[0] && (!stays || first == then), "{first} -> {then}");
    }
    change(&mut rig, "web", |service| weigh(service, [1, 1, 1]));
    rig.publish();
    assert_eq!(backends_of_connections(&mut rig, 60, 1002), then);
}

#[test]
fn with_affinity_two_gateways_send_a_client_to_the_same_backend() {
    let affinity = |service: &mut Service| service.affinity = Some(Duration::from_secs(60));
    let (mut one, mut other) = (with("web", affinity), with("web", affinity));
    let of_other = backends_of_clients(&mut other, 60, 2000);
    assert_eq!(backends_of_clients(&mut one, 60, 1000), of_other);
}

/// Packets of the client of a flow that begin it, and those that confirm it.
fn affinity_rows() -> Vec<(&'static str, Mode, &'static str)> {
    vec![("web", Mode::Nat, "192.0.2.100:80"), ("web", Mode::Dnat, "192.0.2.100:80"), ("web", Mode::Dsr, "192.0.2.100:80")]
        .into_iter()
        .chain([
            ("dns", Mode::Nat, "192.0.2.101:53"),
            ("dns", Mode::Dnat, "192.0.2.101:53"),
            ("dns", Mode::Dsr, "192.0.2.101:53"),
        ])
        .collect()
}

/// A flow as far as anybody can take it who only sends in the name of the client, or whole. Returns the Ethernet address
/// of its backend.
fn affine_flow(rig: &mut Rig, (mode, vip): (Mode, &str), client: &str, is_confirmed: bool) -> Vec<u8> {
    let is_udp = vip.ends_with(":53");
    let packet = |flags: u8| match is_udp {
        true => Packet::udp(client, vip).payload(b"a question").build(),
        false => Packet::tcp(client, vip).flags(flags).build(),
    };
    let first = rig.forward(UPLINK, &packet(tcp_flags::SYN));
    if !mode.is_two_way() {
        rig.forward(UPLINK, &packet(tcp_flags::ACK));
        rig.now += if is_confirmed { 2 * SECOND } else { 0 };
        rig.forward(UPLINK, &packet(tcp_flags::ACK));
        return first[..6].to_vec();
    }
    if is_confirmed || is_udp {
        let (snat, backend) = ends(&first);
        let (from, to) = (backend.to_string(), snat.to_string());
        let answer = match is_udp {
            true => Packet::udp(&from, &to).payload(b"an answer"),
            false => Packet::tcp(&from, &to).flags(tcp_flags::SYN | tcp_flags::ACK).numbers(1_000, 1_001),
        };
        rig.forward(CLUSTER, &answer.build());
    }
    if is_confirmed {
        rig.forward(UPLINK, &packet(tcp_flags::ACK));
    }
    first[..6].to_vec()
}

#[test]
fn with_affinity_clients_are_remembered_whose_flows_are_confirmed_and_no_others() {
    for (service, mode, vip) in affinity_rows() {
        for is_confirmed in [true, false] {
            let mut rig = with(service, |service| {
                (service.affinity, service.mode) = (Some(Duration::from_secs(3600)), mode);
                weigh(service, [1, 1, 0]);
            });
            if !mode.is_two_way() {
                rig.set_backend_ports();
                rig.publish();
            }
            let backends = |rig: &mut Rig, port: u16, is_confirmed: bool| -> Vec<Vec<u8>> {
                (1..=40).map(|n| affine_flow(rig, (mode, vip), &format!("198.51.100.{n}:{port}"), is_confirmed)).collect()
            };
            let first = backends(&mut rig, 1000, is_confirmed);
            change(&mut rig, service, |service| weigh(service, [1, 1, 3]));
            rig.publish();
            let then = backends(&mut rig, 2000, false);
            assert_eq!(first == then, is_confirmed, "{service} in mode {mode}, confirmed: {is_confirmed}");
        }
    }
}

/// A service with four ports of UDP and TCP over three addresses, each with its own port there, in both families.
fn with_ports(how: impl FnOnce(&mut Service)) -> (Rig, Vec<&'static str>) {
    let mut rig = Rig::new();
    let port = |protocol, family, vip, port, target| service_port(protocol, family, &[vip], port, None, target);
    let (v4, v6) = ("192.0.2.103", "2001:db8::1:3");
    let mut ports = Vec::new();
    for (family, vip) in [(Family::V4, v4), (Family::V6, v6)] {
        ports.push(port(Protocol::Udp, family, vip, 500, 1500));
        ports.push(port(Protocol::Udp, family, vip, 4500, 5500));
        ports.push(port(Protocol::Tcp, family, vip, 3389, 3389));
        ports.push(port(Protocol::Udp, family, vip, 3389, 3389));
    }
    // The sizes of tables may differ, as those of ports with different histories do.
    ports[1].maglev.size = 2039;
    let (name, service) = service("vpn", ports);
    rig.state.services.insert(name, service);
    change(&mut rig, "vpn", how);
    rig.publish();
    let at = vec!["192.0.2.103:500", "192.0.2.103:4500", "192.0.2.103:3389", "[2001:db8::1:3]:500", "[2001:db8::1:3]:3389"];
    (rig, at)
}

/// The last byte of the address of the backend that a new flow of a client gets; with `is_confirmed` the flow is.
fn backend_at(rig: &mut Rig, protocol: Protocol, (n, port): (u8, u16), vip: &str, is_confirmed: bool) -> u8 {
    let client = if vip.starts_with('[') { format!("[2001:db8:1::{n:x}]:{port}") } else { format!("198.51.100.{n}:{port}") };
    let packet = |from: &str, to: &str, flags: u8| match protocol {
        Protocol::Udp => Packet::udp(from, to).payload(b"some data").build(),
        _ => Packet::tcp(from, to).flags(flags).numbers(1_000 + u32::from(flags == tcp_flags::ACK), 1_001).build(),
    };
    let (snat, backend) = ends(&rig.forward(UPLINK, &packet(&client, vip, tcp_flags::SYN)));
    if is_confirmed {
        rig.forward(CLUSTER, &packet(&backend.to_string(), &snat.to_string(), tcp_flags::SYN | tcp_flags::ACK));
        rig.forward(UPLINK, &packet(&client, vip, tcp_flags::ACK));
    }
    last_byte(backend.ip())
}

/// The protocols of the frontends that [`with_ports`] returns.
const PROTOCOLS: [Protocol; 5] = [Protocol::Udp, Protocol::Udp, Protocol::Tcp, Protocol::Udp, Protocol::Tcp];

/// For each client the backends that it meets at all frontends of one family.
fn backends_at_all(rig: &mut Rig, at: &[&str], port: u16, is_confirmed: bool) -> Vec<[BTreeSet<u8>; 2]> {
    let of_client = |rig: &mut Rig, n: u8| {
        [false, true].map(|is_v6| {
            let of_family = at.iter().zip(PROTOCOLS).filter(|(vip, _)| vip.starts_with('[') == is_v6);
            of_family.map(|(vip, protocol)| backend_at(rig, protocol, (n, port), vip, is_confirmed)).collect()
        })
    };
    (1..=40).map(|n| of_client(rig, n)).collect()
}

#[test]
fn by_source_hash_a_client_has_one_backend_on_all_ports() {
    let (mut rig, at) = with_ports(|service| service.scheduler = Scheduler::SourceHash);
    let all = backends_at_all(&mut rig, &at, 1000, false);
    assert!(all.iter().flatten().all(|backends| backends.len() == 1), "{all:?}");
    assert_eq!(all.iter().flatten().flatten().collect::<BTreeSet<_>>().len(), 6, "clients have all three of each family");
    let (mut rig, at) = with_ports(|service| service.affinity = Some(Duration::from_secs(3600)));
    let all = backends_at_all(&mut rig, &at, 1000, true);
    assert!(all.iter().flatten().any(|backends| backends.len() > 1), "each port for itself: {all:?}");
}

#[test]
fn with_affinity_of_the_service_a_client_keeps_one_backend_on_all_ports() {
    for scheduler in [Scheduler::Maglev, Scheduler::SourceHash, Scheduler::LeastConnections] {
        let (mut rig, at) = with_ports(|service| {
            (service.affinity, service.affinity_scope) = (Some(Duration::from_secs(3600)), AffinityScope::Service);
            service.scheduler = scheduler;
            weigh(service, [1, 1, 0]);
        });
        // On one port, whichever comes first, then on all.
        let first: Vec<u8> = (1..=40).map(|n| backend_at(&mut rig, PROTOCOLS[0], (n, 900), at[0], true)).collect();
        change(&mut rig, "vpn", |service| weigh(service, [1, 1, 5]));
        rig.publish();
        let then = backends_at_all(&mut rig, &at, 1000, true);
        for (first, [v4, v6]) in first.iter().zip(&then) {
            assert_eq!((v4, v6.len()), (&BTreeSet::from([*first]), 1), "{scheduler}: {then:?}");
        }
        let of_v6: BTreeSet<_> = then.iter().flat_map(|[_, v6]| v6).collect();
        assert_eq!(of_v6.len(), 3, "{scheduler}: families are apart");
        // The address takes no new flows on one port: the client gets another there, and stays on the other ports.
        let is_at = |backend: &proto::Backend, n: u8| last_byte(backend.address.ip()) == n;
        change(&mut rig, "vpn", |service| {
            let tcp = service.ports.iter_mut().filter(|port| port.protocol == Protocol::Tcp);
            tcp.flat_map(|port| &mut port.backends).filter(|b| is_at(b, BACKENDS[0])).for_each(|b| b.weight = 0);
        });
        rig.publish();
        for (n, first) in (1..).zip(&first) {
            let on_tcp = backend_at(&mut rig, PROTOCOLS[2], (n, 2000), at[2], true);
            assert!(on_tcp != BACKENDS[0] && (on_tcp == *first || *first == BACKENDS[0]), "{scheduler}: client {n}");
            assert_eq!(backend_at(&mut rig, PROTOCOLS[1], (n, 2000), at[1], true), *first, "{scheduler}: client {n}");
        }
        // On none: it moves, and stays where it is when the address returns.
        let set = |rig: &mut Rig, weight: u16| {
            change(rig, "vpn", |service| {
                let all = service.ports.iter_mut().flat_map(|port| &mut port.backends);
                all.filter(|b| is_at(b, BACKENDS[0])).for_each(|b| b.weight = weight);
            });
            rig.publish();
        };
        set(&mut rig, 0);
        let moved = backends_at_all(&mut rig, &at, 3000, true);
        assert!(moved.iter().flatten().all(|one| one.len() == 1 && !one.contains(&BACKENDS[0])), "{scheduler}: {moved:?}");
        set(&mut rig, 1);
        assert_eq!(backends_at_all(&mut rig, &at, 4000, true), moved, "{scheduler}");
    }
}
