//! Who may connect, and which backend a new flow gets.

#![allow(clippy::unwrap_used)]

mod rig;

use std::collections::BTreeSet;
use std::sync::Arc;

use dataplane::testing::Packet;
use dataplane::{DropReason, Fate};
use proto::{Scheduler, Service, ServiceName};
use rig::{CLUSTER, Rig, UPLINK, ends, last_byte};

/// Changes a service of the rig's.
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

/// The last byte of the backend's address that a new flow of this client gets.
fn backend_of(rig: &mut Rig, client: &str, vip: &str) -> u8 {
    let sent = rig.forward(UPLINK, &Packet::tcp(client, vip).build());
    last_byte(ends(&sent).1.ip())
}

#[test]
fn only_clients_inside_the_source_ranges_may_connect() {
    let ranges = |prefixes: &[&str]| Some(prefixes.iter().map(|p| p.parse().unwrap()).collect());
    let (v4, v6) = ("192.0.2.100:80", "[2001:db8::1:0]:80");
    let denied = Some(Fate::Drop(DropReason::SourceRange));
    let allowed = Some(Fate::Forward(CLUSTER));
    type Row<'a> = (&'a str, &'a [&'a str], &'a str, &'a str, Option<Fate>);
    let rows: [Row<'_>; 7] = [
        ("a client inside", &["198.51.100.0/24"], "198.51.100.7:5555", v4, allowed),
        ("one outside", &["198.51.101.0/24"], "198.51.100.7:5555", v4, denied),
        ("one inside the second", &["10.0.0.0/8", "198.51.100.7/32"], "198.51.100.7:5555", v4, allowed),
        ("a client of a family that has no range", &["198.51.100.0/24"], "[2001:db8:1::7]:5555", v6, denied),
        ("one inside, of IPv6", &["2001:db8:1::/64"], "[2001:db8:1::7]:5555", v6, allowed),
        ("a family with a prefix of length 0", &["0.0.0.0/0"], "198.51.100.7:5555", v4, allowed),
        ("any client, with ranges that hold nobody", &[], "198.51.100.7:5555", v4, denied),
    ];
    for (sentence, prefixes, client, vip, fate) in rows {
        let mut rig = with("web", |service| service.source_ranges = ranges(prefixes));
        assert_eq!(rig.put(UPLINK, &Packet::tcp(client, vip).build()), fate, "{sentence}");
    }
    let mut rig = with("node-port", |service| service.source_ranges = ranges(&["10.0.0.0/8"]));
    assert_eq!(
        rig.put(UPLINK, &Packet::tcp("198.51.100.7:5555", "192.0.2.2:30080").build()),
        allowed,
        "never asked of node ports"
    );
}

#[test]
fn a_flow_goes_on_when_its_client_is_no_longer_inside() {
    let mut rig = Rig::new();
    let client = "198.51.100.7:5555";
    assert_eq!(rig.put(UPLINK, &Packet::tcp(client, "192.0.2.100:80").build()), Some(Fate::Forward(CLUSTER)));
    change(&mut rig, "web", |service| service.source_ranges = Some(vec!["10.0.0.0/8".parse().unwrap()]));
    rig.publish();
    assert_eq!(
        rig.put(UPLINK, &Packet::tcp(client, "192.0.2.100:80").build()),
        Some(Fate::Forward(CLUSTER)),
        "its flow is known"
    );
    let other = Packet::tcp("198.51.100.7:5556", "192.0.2.100:80").build();
    assert_eq!(rig.put(UPLINK, &other), Some(Fate::Drop(DropReason::SourceRange)), "a new one is not");
}

#[test]
fn a_local_frontend_without_backends_is_silent_where_another_refuses() {
    for (local, fate) in [(false, Fate::Reply(UPLINK)), (true, Fate::Drop(DropReason::NoLocalBackend))] {
        let mut rig = with("web", |service| {
            service.local = local;
            service.ports.iter_mut().for_each(|port| port.backends.clear());
        });
        assert_eq!(rig.put(UPLINK, &Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").build()), Some(fate));
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
