//! The netlink follower: routes, neighbours, VLAN devices, and membership in multicast groups.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr};
use std::process::Command;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use dataplane::{Link, Mac, Network, PortIndex, Route, TagKind, Vlan};
use ipnet::IpNet;
use sluice::agent::compile_loop::AnsweredAddresses;
use sluice::netlink::{NetlinkFollower, REQUESTS_MAX};
use tokio::sync::watch;

use crate::skip::skip;
use crate::{DEADLINE, Namespace, PEER_MAC, TWIN_MAC, Twin, arp, config, ethernet, until};

/// Runs `body` with the netlink follower of the twin `uplink`.
async fn with_follower(body: impl AsyncFnOnce(Follower)) {
    let (network, seen) = watch::channel(Network::default());
    let (next_hops, followed) = watch::channel(BTreeSet::new());
    let (answered, listened) = watch::channel(AnsweredAddresses::default());
    let requests = Arc::new(ArrayQueue::new(REQUESTS_MAX));
    let ports = vec!["uplink".to_owned()];
    let task = NetlinkFollower { ports, next_hops: followed, answered: listened, requests: requests.clone(), network };
    tokio::select! {
        outcome = task.run() => panic!("the follower ended: {outcome:?}"),
        () = body(Follower { seen, next_hops, answered, requests }) => {}
    }
}

struct Follower {
    seen: watch::Receiver<Network>,
    next_hops: watch::Sender<BTreeSet<(Link, IpAddr)>>,
    answered: watch::Sender<AnsweredAddresses>,
    requests: Arc<ArrayQueue<(Link, IpAddr)>>,
}

impl Follower {
    async fn until(&mut self, what: &str, condition: impl FnMut(&Network) -> bool) {
        let waited = tokio::time::timeout(DEADLINE, self.seen.wait_for(condition)).await.map(|seen| drop(seen.unwrap()));
        let mut seen = self.seen.borrow().clone();
        let routes = seen.routes.len();
        seen.routes.truncate(20);
        assert!(waited.is_ok(), "timeout: {what}: {routes} routes, {seen:?}");
    }
}

fn route(to: &str, via: Option<&str>) -> Route {
    Route { to: to.parse().unwrap(), via: via.map(|via| via.parse().unwrap()), link: PortIndex(0).into(), weight: 1 }
}

#[test]
fn routes_addresses_and_neighbours_are_followed() {
    let Some(namespace) = Namespace::new("routes addresses and neighbours are followed", "follow") else { return };
    namespace.enter(async || {
        let _twin = Twin::open(&config(&["192.0.2.2/24", "2001:db8::2/64"])).await;
        namespace.ip("route add default via 192.0.2.1 dev uplink");
        namespace.ip("link add other type veth peer name another");
        namespace.ip("link set another up");
        namespace.ip("link set other up");
        namespace.ip("route add 203.0.113.0/24 dev other");
        with_follower(async |mut follower| {
            let here = ["192.0.2.2", "2001:db8::2"].map(|a| a.parse::<IpAddr>().unwrap());
            follower.until("the addresses are known", |n| here.iter().all(|a| n.addresses.contains(a))).await;
            for route in [route("0.0.0.0/0", Some("192.0.2.1")), route("192.0.2.0/24", None), route("2001:db8::/64", None)] {
                assert!(follower.seen.borrow().routes.contains(&route), "{route:?}");
            }
            let other = "203.0.113.0/24".parse::<IpNet>().unwrap();
            follower.until("the route of the other is known", |n| n.elsewhere.iter().any(|(to, _)| *to == other)).await;
            assert_eq!(follower.seen.borrow().routes.len(), 3, "no routes of other interfaces: {:?}", follower.seen.borrow());
            let new = [route("198.51.100.0/24", Some("192.0.2.7")), route("2001:db8:7::/48", Some("2001:db8::7"))];
            namespace.ip("route add 198.51.100.0/24 via 192.0.2.7");
            namespace.ip("route add 2001:db8:7::/48 via 2001:db8::7");
            follower.until("the new routes are known", |n| new.iter().all(|r| n.routes.contains(r))).await;
            namespace.ip("route replace 198.51.100.0/24 via 192.0.2.8");
            follower.until("the route is replaced", |n| n.routes.contains(&route("198.51.100.0/24", Some("192.0.2.8")))).await;
            namespace.ip("route del 198.51.100.0/24");
            namespace.ip("route del 2001:db8:7::/48");
            follower.until("the routes are gone", |n| n.routes.len() == 3).await;
            for mac in ["02:00:00:00:00:01", "02:00:00:00:00:02"] {
                namespace.ip(&format!("neigh replace 192.0.2.1 dev uplink lladdr {mac} nud permanent"));
                follower.until(mac, |n| n.neighbours.iter().any(|n| n.mac.to_string() == mac)).await;
            }
            namespace.ip("neigh del 192.0.2.1 dev uplink");
            follower.until("the neighbour is gone", |n| n.neighbours.is_empty()).await;
        })
        .await;
    });
}

#[test]
fn prefixes_by_other_devices_are_elsewhere_whatever_happens_to_these_devices() {
    let Some(namespace) = Namespace::new("prefixes by other devices are elsewhere", "elsewhere") else { return };
    namespace.enter(async || {
        let _twin = Twin::open(&config(&["192.0.2.2/24", "2001:db8::2/64"])).await;
        namespace.ip("link add over0 type veth peer name under0");
        namespace.ip("link set under0 up");
        namespace.ip("link set over0 up");
        namespace.ip("route add default dev over0");
        namespace.ip("route add 10.244.1.0/24 dev over0");
        namespace.ip("route add 198.51.100.0/24 dev uplink metric 10");
        with_follower(async |mut follower| {
            // Destinations, each with the name of its device, of those that the test makes.
            let elsewhere = |n: &Network| {
                let by = |(to, device): &(IpNet, u32)| format!("{to} {}", n.devices[device]);
                let ours = |text: &String| ["10.244", "198.51", "fd00:244", "203.0.113.7/"].iter().any(|to| text.starts_with(to));
                n.elsewhere.iter().map(by).filter(ours).collect::<Vec<_>>()
            };
            follower.until("the route is known", |n| elsewhere(n) == ["10.244.1.0/24 over0"]).await;
            assert!(follower.seen.borrow().routes.iter().all(|route| route.to.prefix_len() > 0), "no default route of ours");
            namespace.ip("route add fd00:244::/64 dev over0");
            namespace.ip("addr add 203.0.113.7/24 dev over0");
            let more = ["10.244.1.0/24 over0", "203.0.113.7/32 over0", "fd00:244::/64 over0"];
            follower.until("a route of IPv6 and an address are known", |n| elsewhere(n) == more).await;
            // With the last address of a device Linux removes its IPv4 routes, without a message.
            namespace.ip("addr del 203.0.113.7/24 dev over0");
            follower.until("only the route of IPv6 is left", |n| elsewhere(n) == ["fd00:244::/64 over0"]).await;
            namespace.ip("route del fd00:244::/64 dev over0");
            follower.until("it is gone", |n| elsewhere(n).is_empty()).await;
            namespace.ip("route add 10.244.1.0/24 dev over0");
            follower.until("the first route is back", |n| elsewhere(n) == ["10.244.1.0/24 over0"]).await;
            namespace.ip("route add 198.51.100.0/24 dev over0 metric 5");
            follower.until("a lower metric wins", |n| elsewhere(n).len() == 2 && n.routes.len() == 2).await;
            namespace.ip("route replace 198.51.100.0/24 dev uplink metric 5");
            follower.until("the route is ours again", |n| elsewhere(n).len() == 1 && n.routes.len() == 3).await;
            namespace.ip("link set over0 down");
            follower.until("its routes went with it, although Linux sends no message", |n| elsewhere(n).is_empty()).await;
        })
        .await;
    });
}

/// The records (type and group) of an MLDv2 report (RFC 3810 section 5.2); empty if the frame is no report.
fn mld_report(frame: &[u8]) -> Vec<(u8, Ipv6Addr)> {
    let is_ipv6 = frame.get(12..14) == Some(&[0x86, 0xdd]);
    // The IPv6 header, the hop-by-hop option "router alert", then ICMPv6 type 143.
    if !is_ipv6 || frame[20] != 0 || frame[54] != 58 || frame[62] != 143 {
        return Vec::new();
    }
    assert_eq!(frame[38..54], Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16).octets(), "to all MLDv2 routers");
    assert_eq!((frame[21], &frame[6..12]), (1, &TWIN_MAC.0[..]), "hop limit 1, from the port's MAC address");
    let records = frame[70..].chunks_exact(20).take(u16::from_be_bytes([frame[68], frame[69]]).into());
    records.map(|record| (record[0], Ipv6Addr::from(<[u8; 16]>::try_from(&record[4..20]).unwrap()))).collect()
}

/// A general query of MLDv2 (RFC 3810 section 5.1) from fe80::1.
fn mld_query() -> Vec<u8> {
    let source = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    // Type 130, answers within 100 ms, any group, robustness 2, interval 125 s, no sources.
    let mut query = [&[130, 0, 0, 0, 0, 100, 0, 0][..], &[0; 16], &[2, 125, 0, 0]].concat();
    let checksum = dataplane::testing::transport_checksum(source.into(), all_nodes.into(), 58, &query);
    query[2..4].copy_from_slice(&checksum.to_be_bytes());
    let header = [&[0x60, 0, 0, 0, 0, 36, 0, 1][..], &source.octets(), &all_nodes.octets(), &[58, 0, 5, 2, 0, 0, 1, 0]].concat();
    ethernet(Mac([0x33, 0x33, 0, 0, 0, 1]), 0x86dd, &[&header[..], &query].concat())
}

#[test]
fn membership_in_the_groups_of_ipv6_vips_is_reported_by_mld() {
    const TEST: &str = "membership of the groups of ipv6 vips is reported";
    // Record types of RFC 3810 section 5.2.12.
    const IS_EXCLUDE: u8 = 2;
    const TO_INCLUDE: u8 = 3;
    const TO_EXCLUDE: u8 = 4;
    let Some(namespace) = Namespace::new(TEST, "mld") else { return };
    namespace.enter(async || {
        let twin = Twin::open(&config(&["2001:db8::2/64"])).await;
        let answered = |addresses: &[&str]| -> AnsweredAddresses {
            addresses.iter().map(|address| (PortIndex(0).into(), address.parse().unwrap(), 1)).collect()
        };
        let expect = async |what: &str, kind: u8, groups: &[&str]| {
            let mut missing: BTreeSet<Ipv6Addr> = groups.iter().map(|group| group.parse().unwrap()).collect();
            let fits = |frame: &[u8]| {
                let records = mld_report(frame);
                missing.retain(|group| !records.contains(&(kind, *group)));
                missing.is_empty()
            };
            twin.expect(what, fits).await;
        };
        with_follower(async |follower| {
            follower.answered.send_replace(answered(&[
                "192.0.2.100",
                "2001:db8::1:100",
                "2001:db8::1:200",
                "2001:db8:0:0:1::1:200",
            ]));
            let both = ["ff02::1:ff01:100", "ff02::1:ff01:200"];
            expect("new groups are reported", TO_EXCLUDE, &both).await;
            twin.send(mld_query());
            expect("a query is answered", IS_EXCLUDE, &both).await;
            follower.answered.send_replace(answered(&["2001:db8:0:0:1::1:200"]));
            expect("a group without addresses is left", TO_INCLUDE, &both[..1]).await;
            namespace.ip("link set uplink down");
            namespace.ip("link set uplink up");
            expect("the group is reported again after the interface was down", TO_EXCLUDE, &both[1..]).await;
        })
        .await;
        expect("the last group is left when the follower stops", TO_INCLUDE, &["ff02::1:ff01:200"]).await;
    });
}

#[test]
fn vlan_devices_above_the_twin_are_followed() {
    const TEST: &str = "vlan devices above the twin are followed";
    let Some(namespace) = Namespace::new(TEST, "vlan") else { return };
    namespace.enter(async || {
        let _twin = Twin::open(&config(&[])).await;
        let device = "link add link uplink name uplink.100 type vlan id 100".split(' ');
        let added = Command::new("ip").args(["-n", &namespace.name]).args(device).output().unwrap();
        if !added.status.success() {
            skip(TEST, "the kernel has no VLAN devices (8021q)");
            return;
        }
        namespace.ip("addr add 192.0.2.2/24 dev uplink.100");
        namespace.ip("link set uplink.100 up");
        with_follower(async |mut follower| {
            let link = Link::new(PortIndex(0), Vlan::NONE.with(TagKind::Customer, 100).unwrap());
            follower.until("the device is a link", |n| n.vlans.iter().any(|vlan| vlan.link == link)).await;
            let on_link = Route { link, ..route("192.0.2.0/24", None) };
            follower.until("its route uses the link", |n| n.routes.contains(&on_link)).await;
            namespace.ip("link del uplink.100");
            follower.until("the device is gone", |n| n.vlans.is_empty() && n.routes.is_empty()).await;
        })
        .await;
    });
}

#[test]
fn ipv4_routes_disappear_and_return_with_the_interface() {
    let Some(namespace) = Namespace::new("IPv4 routes disappear and return with the interface", "updown") else { return };
    namespace.enter(async || {
        let _twin = Twin::open(&config(&["192.0.2.2/24"])).await;
        with_follower(async |mut follower| {
            follower.until("the route is known", |n| n.routes == [route("192.0.2.0/24", None)]).await;
            namespace.ip("link set uplink down");
            follower.until("the route is gone, although Linux sends no message", |n| n.routes.is_empty()).await;
            namespace.ip("link set uplink up");
            follower.until("the route is back", |n| n.routes == [route("192.0.2.0/24", None)]).await;
            namespace.ip("link del uplink");
            let nothing = Network { interfaces: Some(Vec::new()), ..Network::default() };
            follower.until("everything is gone", |n| *n == nothing).await;
        })
        .await;
    });
}

#[test]
fn routes_with_several_next_hops_and_next_hop_objects_match_those_of_linux() {
    let Some(namespace) = Namespace::new("routes with several next hops match those of Linux", "several") else {
        return;
    };
    namespace.enter(async || {
        let _twin = Twin::open(&config(&["192.0.2.2/24", "2001:db8::2/64"])).await;
        with_follower(async |mut follower| {
            let (v4, v6) = ("198.51.100.0/24", "2001:db8:7::/48");
            let steps = [
                ("route add 2001:db8:7::/48 nexthop via 2001:db8::11 nexthop via 2001:db8::12", v6, Some("2001:db8::11")),
                ("route del 2001:db8:7::/48 via 2001:db8::11", v6, Some("2001:db8::12")),
                ("route replace 2001:db8:7::/48 via 2001:db8::14", v6, Some("2001:db8::14")),
                ("route add 198.51.100.0/24 via 192.0.2.1", v4, Some("192.0.2.1")),
                ("route append 198.51.100.0/24 via 192.0.2.3", v4, Some("192.0.2.1")),
                ("route replace 198.51.100.0/24 via 192.0.2.4", v4, Some("192.0.2.4")),
                ("route del 198.51.100.0/24 via 192.0.2.4", v4, Some("192.0.2.3")),
                ("route del 198.51.100.0/24 via 192.0.2.3", v4, None),
                ("route add 198.51.100.0/24 via 192.0.2.5 metric 7", v4, Some("192.0.2.5")),
                ("route add 198.51.100.0/24 via 192.0.2.6 metric 5", v4, Some("192.0.2.6")),
                ("route del 198.51.100.0/24 metric 5", v4, Some("192.0.2.5")),
                ("route del 198.51.100.0/24 metric 7", v4, None),
                ("nexthop add id 1 via 192.0.2.1 dev uplink", v4, None),
                ("route add 198.51.100.0/24 nhid 1", v4, Some("192.0.2.1")),
                ("nexthop replace id 1 via 192.0.2.9 dev uplink", v4, Some("192.0.2.9")),
                ("nexthop del id 1", v4, None),
            ];
            for (step, to, via) in steps {
                namespace.ip(step);
                let expected = via.map(|via| route(to, Some(via)));
                let to: IpNet = to.parse().unwrap();
                follower.until(step, |n| n.routes.iter().find(|r| r.to == to) == expected.as_ref()).await;
            }
        })
        .await;
    });
}

#[test]
fn a_burst_of_changes_ends_in_the_routes_of_linux() {
    let Some(namespace) = Namespace::new("a burst of changes ends in the routes of Linux", "storm") else { return };
    namespace.enter(async || {
        let _twin = Twin::open(&config(&["192.0.2.2/24"])).await;
        with_follower(async |mut follower| {
            let line = |n: u32, what: &str| {
                format!("route {what} 10.{}.{}.{}/32 via 192.0.2.{}", n >> 16, n >> 8 & 255, n & 255, n % 3 + 5)
            };
            // Far more messages than the receive buffer holds. The runtime is blocked meanwhile, so nothing reads them.
            let all: Vec<String> =
                (0..100_000).map(|n| line(n, "add")).chain((0..100_000).step_by(2).map(|n| line(n, "del"))).collect();
            let mut batch = tempfile::NamedTempFile::new().unwrap();
            batch.write_all(all.join("\n").as_bytes()).unwrap();
            namespace.ip(&format!("-batch {}", batch.path().display()));
            follower.until("half of the routes are left", |n| n.routes.len() == 50_001).await;
        })
        .await;
    });
}

#[test]
fn next_hops_in_use_are_managed_and_released_and_a_permanent_entry_is_not_changed() {
    let Some(namespace) = Namespace::new("next hops in use are managed", "managed") else {
        return;
    };
    namespace.enter(async || {
        let twin = Twin::open(&config(&["192.0.2.2/24"])).await;
        namespace.ip("neigh replace 192.0.2.5 dev uplink lladdr 02:00:00:00:00:05 nud permanent");
        with_follower(async |mut follower| {
            let key = |n: u8| (Link::from(PortIndex(0)), IpAddr::from([192, 0, 2, n]));
            follower.next_hops.send_replace(BTreeSet::from([key(1), key(5)]));
            let neighbour = |address: &str| namespace.ip(&format!("-d neigh show {address} dev uplink"));
            until("the entry of the router is managed", || neighbour("192.0.2.1").contains("managed")).await;
            twin.expect("Linux sends an ARP request for it", |f| {
                f[12..14] == [8, 6] && f[20..22] == [0, 1] && f[38..42] == [192, 0, 2, 1]
            })
            .await;
            twin.send(arp(2, [192, 0, 2, 1], [192, 0, 2, 2]));
            follower
                .until("its MAC address is known", |n| n.neighbours.iter().any(|n| n.address == key(1).1 && n.mac == PEER_MAC))
                .await;
            assert!(neighbour("192.0.2.5").contains("PERMANENT"));
            follower.next_hops.send_replace(BTreeSet::new());
            until("the entry is released", || !neighbour("192.0.2.1").contains("managed")).await;
            assert!(neighbour("192.0.2.1").contains("lladdr 02:00:00:00:bb:09"), "existing flows keep using the address");
        })
        .await;
    });
}

#[test]
fn a_client_that_a_worker_waits_for_is_resolved_once() {
    let Some(namespace) = Namespace::new("a client that a worker waits for is resolved once", "client") else { return };
    namespace.enter(async || {
        let twin = Twin::open(&config(&["192.0.2.2/24"])).await;
        with_follower(async |mut follower| {
            follower.until("the twin is known", |n| !n.addresses.is_empty()).await;
            let client = IpAddr::from([192, 0, 2, 50]);
            for _ in 0..100 {
                follower.requests.push((PortIndex(0).into(), client)).unwrap();
            }
            twin.expect("Linux sends an ARP request", |f| f[12..14] == [8, 6] && f[38..42] == [192, 0, 2, 50]).await;
            twin.send(arp(2, [192, 0, 2, 50], [192, 0, 2, 2]));
            follower
                .until("the client is known", |n| n.neighbours.iter().any(|n| n.address == client && n.mac == PEER_MAC))
                .await;
            assert!(!namespace.ip("-d neigh show dev uplink").contains("managed"));
        })
        .await;
    });
}
