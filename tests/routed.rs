//! VIPs of `routed` pools: routes in a table of Linux's, for a routing daemon to redistribute.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

mod edge;

use std::fs;

use edge::{Edge, may_run, until};
use rustix::process::Signal;

const VIP: &str = "http://192.0.2.100/";

/// Destinations in table 150 by their protocol, of both families.
fn routes(edge: &Edge, protocol: &str) -> Vec<String> {
    let show = |family: &str| {
        let output = edge.run("gw", &["ip", family, "route", "show", "table", "150", "proto", protocol]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let destination = |line: &str| line.split_whitespace().nth(1).map(str::to_owned);
        text.lines().filter(|line| line.starts_with("blackhole")).filter_map(destination).collect::<Vec<_>>()
    };
    [show("-4"), show("-6")].concat()
}

/// A gateway whose VIPs are routed, with further lines in its configuration; not started.
fn routed(name: &str, more: &str) -> Edge {
    let edge = Edge::with_echo_servers(name, 9000);
    edge.configure("net_af_packet0,iface=uplink0", "net_af_packet1,iface=cluster0", more);
    let file = edge.path("sluice.yaml");
    let text = fs::read_to_string(&file).unwrap().replace("{name: default, ", "{name: default, announce: routed, ");
    fs::write(&file, text).unwrap();
    edge.script("set -e; in_ns client ip route add 192.0.2.100/32 via 192.0.2.2");
    edge.manifest("web.yaml", &include_str!("edge/web.yaml").replace("8080", "9000"));
    edge
}

#[test]
fn at_the_end_routes_go_first_and_what_still_arrives_is_forwarded_until_the_wait_is_over_or_a_second_signal_comes() {
    if !may_run("the end of a gateway with routed VIPs") {
        return;
    }
    let mut edge = routed("leave", "drainOnStop: 1h");
    edge.start();
    until("the VIPs stand in the table", || (routes(&edge, "150").len() == 2).then_some(()));
    let mut before = until("a connection", || edge.connect("192.0.2.100:80"));
    edge.signal(Signal::TERM);
    until("the routes are gone", || routes(&edge, "150").is_empty().then_some(()));
    for _ in 0..20 {
        before.assert_alive("while routers learn of it");
        edge.connect("192.0.2.100:80").expect("a new connection, too");
    }
    assert!(edge.is_running(), "{}", edge.log());
    edge.signal(Signal::TERM);
    assert_eq!(edge.ended(), Some(1), "{}", edge.log());

    let text = fs::read_to_string(edge.path("sluice.yaml")).unwrap().replace("drainOnStop: 1h", "drainOnStop: 300ms");
    fs::write(edge.path("sluice.yaml"), text).unwrap();
    edge.start();
    until("the VIPs stand in the table", || (routes(&edge, "150").len() == 2).then_some(()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let log = edge.log();
    assert!(log.contains("what routers still send is forwarded meanwhile") && log.contains("wait=300ms"), "{log}");
}

#[test]
fn a_vip_of_a_routed_pool_stands_in_the_table_while_it_is_served_and_is_not_answered_for() {
    if !may_run("routed pools") {
        return;
    }
    let mut edge = Edge::new("routed");
    edge.configure("net_af_packet0,iface=uplink0", "net_af_packet1,iface=cluster0", "drainOnStop: 100ms");
    let file = edge.path("sluice.yaml");
    let text = fs::read_to_string(&file).unwrap().replace("{name: default, ", "{name: default, announce: routed, ");
    fs::write(&file, text).unwrap();
    // What a crashed predecessor left, and what somebody else put there.
    edge.script("set -e; in_ns gw ip route add blackhole 192.0.2.119 table 150 proto 150; in_ns gw ip route add blackhole 192.0.2.118 table 150 proto 99");
    edge.manifests_of_the_demo();
    edge.start();
    let expected = ["192.0.2.100", "2001:db8::1:0"];
    until("exactly the VIPs stand in the table", || (routes(&edge, "150") == expected).then_some(()));
    assert_eq!(routes(&edge, "99"), ["192.0.2.118"]);

    let ping = edge.run("client", &["ping", "-c", "1", "-W", "1", "192.0.2.100"]);
    assert!(!ping.status.success(), "nobody answers who has it");
    edge.script("set -e; in_ns client ip route add 192.0.2.100/32 via 192.0.2.2");
    until("an answer to who was routed here", || edge.curl(VIP));
    edge.all_answer(VIP);

    fs::remove_file(edge.path("manifests/web.yaml")).unwrap();
    until("the routes go with the Service", || routes(&edge, "150").is_empty().then_some(()));
    edge.manifests_of_the_demo();
    until("and come with it", || (routes(&edge, "150") == expected).then_some(()));
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert!(routes(&edge, "150").is_empty(), "they are gone after the end");
}
