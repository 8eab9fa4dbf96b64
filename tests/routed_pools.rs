//! VIPs of `routed` pools: routes in a Linux routing table, which a routing daemon redistributes.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

mod edge;

use std::fs;

use edge::{Edge, until};
use rustix::process::Signal;

const VIP: &str = "http://192.0.2.100/";

/// Destinations in table 150 with this protocol number, of both families.
fn routes(edge: &Edge, protocol: &str) -> Vec<String> {
    let show = |family: &str| {
        let output = edge.run("gw", &["ip", family, "route", "show", "table", "150", "proto", protocol]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let destination = |line: &str| line.split_whitespace().nth(1).map(str::to_owned);
        text.lines().filter(|line| line.starts_with("blackhole")).filter_map(destination).collect::<Vec<_>>()
    };
    [show("-4"), show("-6")].concat()
}

/// A gateway with routed VIPs and the lines `more` in its configuration; not started.
fn routed(test: &str, name: &str, more: &str) -> Option<Edge> {
    let edge = Edge::with_echo_servers(test, name, 9000)?;
    edge.configure_af_packet(more);
    let file = edge.path("sluice.yaml");
    let text = fs::read_to_string(&file).unwrap().replace("{name: default, ", "{name: default, announce: routed, ");
    fs::write(&file, text).unwrap();
    edge.script("set -e; in_ns client ip route add 192.0.2.100/32 via 192.0.2.2");
    edge.write_manifest("web.yaml", &include_str!("edge/web.yaml").replace("8080", "9000"));
    Some(edge)
}

#[test]
fn on_stop_routes_are_withdrawn_first_and_packets_are_forwarded_until_the_drain_ends_or_a_second_signal() {
    let Some(mut edge) = routed("stopping a gateway with routed VIPs", "leave", "drainOnStop: 1h") else { return };
    edge.start();
    until("the VIPs are in the table", || (routes(&edge, "150").len() == 2).then_some(()));
    let mut before = until("a connection", || edge.connect("192.0.2.100:80"));
    edge.signal(Signal::TERM);
    until("the routes are gone", || routes(&edge, "150").is_empty().then_some(()));
    for _ in 0..20 {
        before.assert_alive("while routers withdraw the routes");
        edge.connect("192.0.2.100:80").expect("a new connection succeeds, too");
    }
    assert!(edge.is_running(), "{}", edge.log());
    edge.signal(Signal::TERM);
    assert_eq!(edge.wait_for_exit(), Some(1), "{}", edge.log());

    let text = fs::read_to_string(edge.path("sluice.yaml")).unwrap().replace("drainOnStop: 1h", "drainOnStop: 300ms");
    fs::write(edge.path("sluice.yaml"), text).unwrap();
    edge.start();
    until("the VIPs are in the table", || (routes(&edge, "150").len() == 2).then_some(()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let log = edge.log();
    assert!(log.contains("packets that still arrive are forwarded") && log.contains("wait=300ms"), "{log}");
}

#[test]
fn a_vip_of_a_routed_pool_is_in_the_table_while_it_is_served_and_gets_no_arp_replies() {
    let Some(mut edge) = Edge::new("routed pools", "routed") else { return };
    edge.configure_af_packet("drainOnStop: 100ms");
    let file = edge.path("sluice.yaml");
    let text = fs::read_to_string(&file).unwrap().replace("{name: default, ", "{name: default, announce: routed, ");
    fs::write(&file, text).unwrap();
    // A route that a crashed gateway left, and one of another program.
    edge.script("set -e; in_ns gw ip route add blackhole 192.0.2.119 table 150 proto 150; in_ns gw ip route add blackhole 192.0.2.118 table 150 proto 99");
    edge.write_demo_manifests();
    edge.start();
    let expected = ["192.0.2.100", "2001:db8::1:0"];
    until("exactly the VIPs are in the table", || (routes(&edge, "150") == expected).then_some(()));
    assert_eq!(routes(&edge, "99"), ["192.0.2.118"]);

    let ping = edge.run("client", &["ping", "-c", "1", "-W", "1", "192.0.2.100"]);
    assert!(!ping.status.success(), "no ARP reply for a routed VIP");
    edge.script("set -e; in_ns client ip route add 192.0.2.100/32 via 192.0.2.2");
    until("an answer over the route", || edge.curl(VIP));
    edge.assert_all_servers_answer(VIP);

    fs::remove_file(edge.path("manifests/web.yaml")).unwrap();
    until("the routes are withdrawn with the Service", || routes(&edge, "150").is_empty().then_some(()));
    edge.write_demo_manifests();
    until("the routes return with the Service", || (routes(&edge, "150") == expected).then_some(()));
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert!(routes(&edge, "150").is_empty(), "the routes are withdrawn when the gateway stops");
}
