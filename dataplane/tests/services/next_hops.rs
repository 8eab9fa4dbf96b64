//! Several next hops of one route: each flow uses one of them, keeps it while it is usable, and leaves it when it is
//! not.

use std::collections::BTreeMap;

use dataplane::testing::Packet;
use dataplane::{DropReason, Mac, Neighbour, PacketOutcome, PortIndex, Route, tcp_flags};

use crate::rig::{CLUSTER, Rig, UPLINK, ends, ip};

const VIP: &str = "192.0.2.100:80";
const ACK: u8 = tcp_flags::ACK;
/// Routers towards clients, by the last byte of address and MAC.
const ROUTERS: [u8; 3] = [61, 62, 63];
const FLOWS: u16 = 600;

/// A description of a change in the network, and the change.
type Change = (&'static str, fn(&mut Rig));

fn router_mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 2, n])
}

fn default_by(routers: &[(u8, u16)]) -> Vec<Route> {
    let to = "0.0.0.0/0".parse().unwrap();
    routers.iter().map(|&(n, weight)| Route { to, via: Some(ip(&format!("192.0.2.{n}"))), link: UPLINK.into(), weight }).collect()
}

fn neighbour(port: PortIndex, address: &str, mac: Mac) -> Neighbour {
    Neighbour { link: port.into(), address: ip(address), mac }
}

/// A gateway whose default route has these routers, each with its weight.
fn rig(routers: &[(u8, u16)]) -> Rig {
    let mut rig = Rig::with_flows(4096);
    rig.network.routes.retain(|route| route.to.prefix_len() != 0 || route.to.addr().is_ipv6());
    rig.network.routes.extend(default_by(routers));
    rig.network.neighbours.extend(ROUTERS.map(|n| neighbour(UPLINK, &format!("192.0.2.{n}"), router_mac(n))));
    rig.publish();
    rig
}

/// Opens connections; returns the packet with which the backend of each answers.
fn open(rig: &mut Rig) -> Vec<Vec<u8>> {
    let clients = (0..FLOWS).map(|n| format!("198.51.{}.{}:{}", 100 + n % 3, n % 200 + 1, 2000 + n));
    let opened = clients.map(|client| {
        let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(&client, VIP).build()));
        Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK).build()
    });
    opened.collect()
}

/// The router that each answer leaves by.
fn routers(rig: &mut Rig, answers: &[Vec<u8>]) -> Vec<Mac> {
    answers.iter().map(|answer| Mac(rig.forward(CLUSTER, answer)[..6].try_into().unwrap())).collect()
}

fn shares(routers: &[Mac]) -> BTreeMap<u8, usize> {
    let mut shares = BTreeMap::new();
    routers.iter().for_each(|mac| *shares.entry(mac.0[5]).or_default() += 1);
    shares
}

/// Makes Linux send to a prefix by a device that is no port.
fn send_elsewhere(rig: &mut Rig, prefix: &str) {
    rig.network.elsewhere.push((prefix.parse().unwrap(), 9));
    rig.network.devices.insert(9, "over0".to_owned());
    rig.publish();
}

#[test]
fn no_packet_leaves_by_a_shorter_prefix_where_linux_has_a_longer_one_by_another_device() {
    for (prefix, vip, client) in
        [("10.0.0.0/25", VIP, "198.51.100.7:5"), ("fd00::/80", "[2001:db8::1:0]:80", "[2001:db8:1::7]:5")]
    {
        let mut rig = Rig::new();
        let syn = Packet::tcp(client, vip).build();
        rig.forward(UPLINK, &syn);
        let reasons = |rig: &mut Rig| {
            let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
            snapshot.refused().iter().map(|(_, refusal)| refusal.message.clone()).collect::<Vec<_>>()
        };
        assert_eq!(reasons(&mut rig), [""; 0]);
        send_elsewhere(&mut rig, prefix);
        for frame in [&syn, &Packet::tcp(&client.replace(":5", ":6"), vip).build()] {
            assert_eq!(rig.put(UPLINK, frame), Some(PacketOutcome::Drop(DropReason::NoRoute)), "{prefix}");
        }
        let messages = reasons(&mut rig);
        assert!(
            !messages.is_empty() && messages.iter().all(|text| text.contains("leaves by over0, which is no port")),
            "{messages:?}"
        );
        rig.network.elsewhere.clear();
        rig.publish();
        rig.forward(UPLINK, &syn);
        assert_eq!(reasons(&mut rig), [""; 0], "the route has gone");
    }
}

#[test]
fn a_reply_to_a_client_behind_another_device_is_not_sent_by_the_default_route() {
    for (prefix, vip, client) in
        [("198.51.100.0/24", VIP, "198.51.100.7:5"), ("2001:db8:1::/48", "[2001:db8::1:0]:80", "[2001:db8:1::7]:5")]
    {
        let mut rig = Rig::new();
        let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(client, vip).build()));
        let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | ACK).build();
        send_elsewhere(&mut rig, prefix);
        assert_eq!(rig.put(CLUSTER, &answer), Some(PacketOutcome::Drop(DropReason::NoRoute)), "{prefix}");
        rig.network.routes.push(Route { to: prefix.parse().unwrap(), ..rig.network.routes[4] });
        rig.network.elsewhere.clear();
        rig.publish();
    }
}

#[test]
fn the_connected_prefix_of_a_port_is_its_own_although_another_device_has_it_too() {
    let mut rig = Rig::new();
    rig.network.routes.retain(|route| route.to != "10.0.0.0/24".parse().unwrap());
    send_elsewhere(&mut rig, "10.0.0.0/24");
    rig.forward(UPLINK, &Packet::tcp("198.51.100.7:5", VIP).build());
}

#[test]
fn flows_spread_over_the_routers_by_weight_and_each_keeps_its_own() {
    let mut rig = rig(&[(61, 1), (62, 1), (63, 2)]);
    let answers = open(&mut rig);
    let before = routers(&mut rig, &answers);
    let found = shares(&before);
    for (router, expected) in [(61, 150), (62, 150), (63, 300)] {
        assert!(found[&router].abs_diff(expected) < 60, "{found:?}");
    }
    assert_eq!(routers(&mut rig, &answers), before);
    // Another route changes: all flows look up again, with the same result.
    rig.network.routes.push(Route { to: "203.0.113.0/24".parse().unwrap(), ..default_by(&[(61, 1)])[0] });
    rig.publish();
    assert_eq!(routers(&mut rig, &answers), before);
}

#[test]
fn a_router_that_is_removed_affects_only_its_own_flows() {
    let mut rig = rig(&ROUTERS.map(|n| (n, 1)));
    let answers = open(&mut rig);
    let before = routers(&mut rig, &answers);
    let rows: [Change; 2] = [
        ("Linux cannot resolve it any more", |rig| rig.network.neighbours.retain(|n| n.mac != router_mac(62))),
        ("the route does not name it any more", |rig| rig.network.routes.retain(|r| r.via != Some(ip("192.0.2.62")))),
    ];
    for (sentence, change) in rows {
        change(&mut rig);
        rig.publish();
        let after = routers(&mut rig, &answers);
        assert!(!after.contains(&router_mac(62)), "{sentence}");
        let others = before.iter().zip(&after).filter(|(before, _)| **before != router_mac(62));
        let (all, moved) = others.fold((0, 0), |(all, moved), (a, b)| (all + 1, moved + usize::from(a != b)));
        assert!(moved * 20 <= all, "{sentence}: {moved} of {all} others moved");
        let gained = |n| shares(&after)[&n] - shares(&before)[&n];
        assert!(gained(61) > 40 && gained(63) > 40, "{sentence}: its flows went to both");
    }
}

#[test]
fn backends_behind_several_routers_are_reached_by_all_and_may_answer_by_each() {
    let mut rig = Rig::with_flows(4096);
    let to = "10.0.0.8/29".parse().unwrap();
    for n in [71, 72] {
        rig.network.routes.push(Route { to, via: Some(ip(&format!("10.0.0.{n}"))), link: CLUSTER.into(), weight: 1 });
        rig.network.neighbours.push(neighbour(CLUSTER, &format!("10.0.0.{n}"), router_mac(n)));
    }
    rig.publish();
    let syn = |n: u16| Packet::tcp(&format!("198.51.100.7:{}", 2000 + n), VIP).build();
    let out: Vec<Mac> = (0..200).map(|n| Mac(rig.forward(UPLINK, &syn(n))[..6].try_into().unwrap())).collect();
    assert!(shares(&out).values().all(|&share| share > 60), "{:?}", shares(&out));
    let again: Vec<Mac> = (0..200).map(|n| Mac(rig.forward(UPLINK, &syn(n))[..6].try_into().unwrap())).collect();
    assert_eq!(again, out);
    let answers = open(&mut rig);
    routers(&mut rig, &answers);
    let injected = rig.put(UPLINK, &answers[0]);
    assert_eq!(injected, Some(PacketOutcome::Drop(DropReason::SnatWrongPort)), "no member of the group is reached by the uplink");
}

#[test]
fn flows_leave_a_port_that_has_no_link_and_come_back() {
    let mut rig = rig(&[(61, 1)]);
    let via = Some(ip("10.0.0.71"));
    rig.network.routes.push(Route { to: "0.0.0.0/0".parse().unwrap(), via, link: CLUSTER.into(), weight: 1 });
    rig.network.neighbours.push(neighbour(CLUSTER, "10.0.0.71", router_mac(71)));
    rig.publish();
    let answers = open(&mut rig);
    let before = routers(&mut rig, &answers);
    assert!(shares(&before).len() == 2, "{:?}", shares(&before));
    rig.network.down = vec![CLUSTER];
    rig.publish();
    assert_eq!(shares(&routers(&mut rig, &answers)).into_keys().collect::<Vec<_>>(), [61]);
    rig.network.down = vec![];
    rig.publish();
    assert_eq!(routers(&mut rig, &answers), before);
}

#[test]
fn a_blackhole_inside_a_wider_route_is_unreachable() {
    let mut rig = rig(&[(61, 1)]);
    let answers = open(&mut rig);
    rig.network.unreachable = vec!["198.51.100.0/24".parse().unwrap()];
    rig.publish();
    let fates: Vec<_> = answers[..2].iter().map(|answer| rig.put(CLUSTER, answer)).collect();
    assert_eq!(
        fates,
        [Some(PacketOutcome::Drop(DropReason::NoRoute)), Some(PacketOutcome::Forward(UPLINK))],
        "198.51.100.1 and 198.51.101.2"
    );
}
