//! What dies comes back, and what lives does not notice: the gateway killed, its source gone, servers that die.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;

use edge::{Edge, REQUEST_S, may_run, until};

const VIP: &str = "http://192.0.2.100/";
const NODE_PORT: &str = "http://192.0.2.2:30080/";

/// The gateway of the demo, which serves.
fn serving(name: &str) -> Edge {
    let mut edge = Edge::new(name);
    edge.manifests_of_the_demo();
    edge.configure("net_af_packet0,iface=uplink0", "net_af_packet1,iface=cluster0", "");
    edge.start();
    serves(&edge);
    edge
}

fn serves(edge: &Edge) {
    for url in [VIP, NODE_PORT] {
        until("an answer", || edge.curl(url));
    }
}

/// Requests none of which may fail; gives who answered.
fn requests(edge: &Edge, count: usize) -> Vec<String> {
    let answer = |n| edge.curl(VIP).unwrap_or_else(|| panic!("request {n} failed; drops {:?}", edge.drops()));
    let mut answers: Vec<_> = (0..count).map(answer).collect();
    answers.sort();
    answers.dedup();
    answers
}

fn filters(edge: &Edge) -> String {
    String::from_utf8(edge.run("gw", &["tc", "filter", "show", "dev", "uplink0", "ingress"]).stdout).unwrap()
}

#[test]
fn a_killed_gateway_starts_again_over_what_it_left_behind() {
    if !may_run("a killed gateway") {
        return;
    }
    let mut edge = serving("kil");
    edge.script("in_ns gw ip route add 198.51.100.0/24 via 192.0.2.10 dev uplink");
    let twin = |edge: &Edge| edge.run("gw", &["cat", "/sys/class/net/uplink/ifindex"]).stdout;
    let route = |edge: &Edge| edge.run("gw", &["ip", "route", "show", "198.51.100.0/24", "dev", "uplink"]).stdout;
    let before = twin(&edge);
    assert!(!before.is_empty() && !route(&edge).is_empty());

    for _ in 0..2 {
        assert_eq!(edge.stop(true), None, "killed");
        assert!(!filters(&edge).is_empty(), "the filter of the killed one is there still");
        assert!(edge.path("admin.sock").exists() && edge.path("config.sock").exists(), "and so are its sockets");
        edge.start();
        serves(&edge);
        requests(&edge, 20);
        edge.assert_account();
    }
    assert_eq!(twin(&edge), before, "the twin is the one of before");
    assert!(!route(&edge).is_empty(), "and its routes stand");

    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert_eq!(filters(&edge), "", "one filter, and it is gone");
    let left: Vec<_> = fs::read_dir(edge.path("dpdk")).map(Iterator::collect).unwrap_or_default();
    assert!(left.is_empty(), "no directory of DPDK's is left: {left:?}");
    for socket in ["admin.sock", "config.sock"] {
        assert!(!edge.path(socket).exists(), "nor {socket}");
    }
}

#[test]
fn without_its_manifests_a_restarted_gateway_serves_what_it_knew_and_probes_prove() {
    if !may_run("a restart without manifests") {
        return;
    }
    let mut edge = serving("man");
    until("the state is on disk", || edge.path("state/state").exists().then_some(()));
    assert_eq!(edge.stop(false), Some(0));
    edge.script("stop_server 13");
    let (manifests, away) = (edge.path("manifests"), edge.path("away"));
    fs::rename(&manifests, &away).unwrap();

    edge.spawn();
    until("it serves from the state on disk", || edge.status().filter(|status| status.ready && !status.controller_connected));
    until("two servers are proved in both families", || (edge.healthy("demo/web")? == 4).then_some(()));
    assert_eq!(requests(&edge, 40), ["b11", "b12"], "nobody is sent to the server that no probe has proved");
    until("it says what is wrong", || edge.log().contains("make it, or correct `manifests`").then_some(()));

    // To a controller's state what no probe has judged is usable, so let them judge first.
    let judged = |log: &str, target: &str| log.lines().any(|line| line.contains("fails its probes") && line.contains(target));
    until("the dead server is known", || {
        let log = edge.log();
        (judged(&log, "10.0.0.13:8080") && judged(&log, "[fd00::13]:8080")).then_some(())
    });
    fs::rename(&away, &manifests).unwrap();
    until("the source is back", || edge.status().filter(|status| status.controller_connected));
    assert_eq!(requests(&edge, 40), ["b11", "b12"]);
    edge.script("start_server 13");
    until("all are proved", || (edge.healthy("demo/web")? == 6).then_some(()));
    assert_eq!(requests(&edge, 60).len(), 3);
    edge.assert_account();
}

#[test]
fn a_dead_server_is_left_alone_once_it_is_out_and_used_again_when_it_is_back() {
    if !may_run("servers that die") {
        return;
    }
    let edge = serving("hea");
    until("all are healthy", || (edge.healthy("demo/web")? == 6).then_some(()));
    edge.script("stop_server 12");
    until("it is out", || (edge.healthy("demo/web")? == 4).then_some(()));
    assert_eq!(requests(&edge, 60), ["b11", "b13"], "no request fails");

    edge.script("stop_server 11; stop_server 13");
    until("all are out", || (edge.healthy("demo/web")? == 0).then_some(()));
    for _ in 0..10 {
        // 28 would be curl's word for silence.
        let refused = edge.run("client", &["curl", "-s", "--max-time", REQUEST_S, VIP]);
        assert_eq!(refused.status.code(), Some(7), "all are used, so that the refusal of a server reaches the client");
    }

    edge.script("start_server 12");
    until("it is back", || (edge.healthy("demo/web")? == 2).then_some(()));
    assert_eq!(requests(&edge, 20), ["b12"]);
    edge.assert_account();
}
