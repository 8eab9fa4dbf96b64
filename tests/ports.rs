//! Ports whose devices come late, go and come back, and whose links flap, under a gateway that runs on.

#![allow(clippy::panic, clippy::unwrap_used)]

mod edge;

use edge::{Edge, may_run, until};

const VIP: &str = "http://192.0.2.100/";

fn link(edge: &Edge, port: &str) -> Option<String> {
    edge.ports()?.into_iter().find(|p| p.name == port).map(|p| p.link)
}

fn until_link(edge: &Edge, port: &str, expected: &str) {
    until(&format!("{port} is {expected}"), || link(edge, port).filter(|found| found == expected));
}

fn carrier(edge: &Edge, twin: &str) -> String {
    let shown = edge.run("gw", &["cat", &format!("/sys/class/net/{twin}/carrier")]);
    String::from_utf8_lossy(&shown.stdout).trim().to_owned()
}

/// A device goes when its interface has another name, and comes when it has its own again.
fn rename(edge: &Edge, from: &str, to: &str) {
    edge.script(&format!(
        "set -e; in_ns gw ip link set {from} down; in_ns gw ip link set {from} name {to}; in_ns gw ip link set {to} up"
    ));
}

#[test]
fn a_device_that_comes_late_or_goes_and_comes_back_serves_without_a_restart() {
    if !may_run("ports that come and go") {
        return;
    }
    let mut edge = Edge::new("late");
    edge.manifests_of_the_demo();
    edge.configure("net_af_packet0,iface=uplink0", "net_af_packet1,iface=cluster0", "");
    rename(&edge, "cluster0", "elsewhere0");
    edge.start();
    until_link(&edge, "uplink", "up");
    until_link(&edge, "cluster", "absent");
    assert_eq!(carrier(&edge, "cluster"), "0", "the twin is there, without carrier");
    until("the health of backends that cannot be reached", || edge.healthy("demo/web").filter(|healthy| *healthy == 0));

    for round in 0..2 {
        rename(&edge, "elsewhere0", "cluster0");
        until_link(&edge, "cluster", "up");
        until("the carrier", || (carrier(&edge, "cluster") == "1").then_some(()));
        until("backends pass their probes", || edge.healthy("demo/web").filter(|healthy| *healthy > 0));
        until("an answer", || edge.curl(VIP));
        edge.all_answer(VIP);
        if round == 0 {
            rename(&edge, "cluster0", "elsewhere0");
            until_link(&edge, "cluster", "absent");
        }
    }
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let filters = edge.run("gw", &["tc", "filter", "show", "dev", "cluster0", "ingress"]);
    assert!(filters.stdout.is_empty(), "what came late is given back, too");
}

#[test]
fn a_link_that_flaps_takes_the_twins_carrier_along_and_traffic_goes_on() {
    if !may_run("a link that flaps") {
        return;
    }
    let mut edge = Edge::new("flap");
    edge.manifests_of_the_demo();
    edge.configure("net_af_packet0,iface=uplink0", "net_af_packet1,iface=cluster0", "");
    edge.start();
    until("an answer", || edge.curl(VIP));
    for _ in 0..3 {
        edge.script("in_ns gw ip link set uplink0 down");
        until_link(&edge, "uplink", "down");
        until("no carrier", || (carrier(&edge, "uplink") == "0").then_some(()));
        edge.script("in_ns gw ip link set uplink0 up");
        until_link(&edge, "uplink", "up");
        until("the carrier", || (carrier(&edge, "uplink") == "1").then_some(()));
        until("an answer", || edge.curl(VIP));
    }
    edge.all_answer(VIP);
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}
