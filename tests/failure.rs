//! Failures and recovery: the gateway is killed, its manifests disappear, servers die.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;

use edge::{Edge, REQUEST_S, until};

const VIP: &str = "http://192.0.2.100/";
const NODE_PORT: &str = "http://192.0.2.2:30080/";

/// Starts a gateway that serves the demo's Services.
fn start_gateway(test: &str, name: &str) -> Option<Edge> {
    let mut edge = Edge::with_af_packet(test, name)?;
    edge.write_demo_manifests();
    edge.start();
    wait_for_answers(&edge);
    Some(edge)
}

fn wait_for_answers(edge: &Edge) {
    for url in [VIP, NODE_PORT] {
        until("an answer", || edge.curl(url));
    }
}

/// Sends requests, none of which may fail, and returns the servers that answered.
fn request_all(edge: &Edge, count: usize) -> Vec<String> {
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
fn a_killed_gateway_restarts_despite_its_leftover_filters_and_sockets() {
    let Some(mut edge) = start_gateway("a killed gateway", "kil") else { return };
    edge.script("in_ns gw ip route add 198.51.100.0/24 via 192.0.2.10 dev uplink");
    let twin = |edge: &Edge| edge.run("gw", &["cat", "/sys/class/net/uplink/ifindex"]).stdout;
    let route = |edge: &Edge| edge.run("gw", &["ip", "route", "show", "198.51.100.0/24", "dev", "uplink"]).stdout;
    let before = twin(&edge);
    assert!(!before.is_empty() && !route(&edge).is_empty());

    for _ in 0..2 {
        assert_eq!(edge.stop(true), None, "killed");
        assert!(!filters(&edge).is_empty(), "the filter of the killed gateway still exists");
        assert!(edge.path("admin.sock").exists() && edge.path("config.sock").exists(), "and so do its sockets");
        edge.start();
        wait_for_answers(&edge);
        request_all(&edge, 20);
        edge.assert_account();
    }
    assert_eq!(twin(&edge), before, "the twin was not recreated");
    assert!(!route(&edge).is_empty(), "its routes still exist");

    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert_eq!(filters(&edge), "", "the only filter is removed");
    let left: Vec<_> = fs::read_dir(edge.path("dpdk")).map(Iterator::collect).unwrap_or_default();
    assert!(left.is_empty(), "no DPDK directory is left: {left:?}");
    for socket in ["admin.sock", "config.sock"] {
        assert!(!edge.path(socket).exists(), "{socket} is left");
    }
}

#[test]
fn without_its_manifests_a_restarted_gateway_serves_its_saved_state_to_servers_that_pass_probes() {
    let Some(mut edge) = start_gateway("a restart without manifests", "man") else { return };
    until("the state is on disk", || edge.path("state/state").exists().then_some(()));
    assert_eq!(edge.stop(false), Some(0));
    edge.script("stop_server 13");
    let (manifests, away) = (edge.path("manifests"), edge.path("away"));
    fs::rename(&manifests, &away).unwrap();

    edge.spawn();
    until("the gateway serves from the saved state", || {
        edge.status().filter(|status| status.ready && !status.controller_connected)
    });
    until("two servers pass their probes in both families", || (edge.healthy("demo/web")? == 4).then_some(()));
    assert_eq!(request_all(&edge, 40), ["b11", "b12"], "no request goes to the server that has not passed a probe");
    until("the log says what is wrong", || edge.log().contains("create it, or correct `manifests`").then_some(()));

    // In a state from a controller, a backend without a probe result is usable. Wait until the probes have failed.
    let fails_probes =
        |log: &str, target: &str| log.lines().any(|line| line.contains("fails its probes") && line.contains(target));
    until("the probes of the dead server fail", || {
        let log = edge.log();
        (fails_probes(&log, "10.0.0.13:8080") && fails_probes(&log, "[fd00::13]:8080")).then_some(())
    });
    fs::rename(&away, &manifests).unwrap();
    until("the manifests are followed again", || edge.status().filter(|status| status.controller_connected));
    assert_eq!(request_all(&edge, 40), ["b11", "b12"]);
    edge.script("start_server 13");
    until("all servers pass their probes", || (edge.healthy("demo/web")? == 6).then_some(()));
    assert_eq!(request_all(&edge, 60).len(), 3);
    edge.assert_account();
}

#[test]
fn an_unhealthy_server_gets_no_requests_until_it_recovers() {
    let Some(edge) = start_gateway("servers that die", "hea") else { return };
    until("all servers are healthy", || (edge.healthy("demo/web")? == 6).then_some(()));
    edge.script("stop_server 12");
    until("the server is unhealthy", || (edge.healthy("demo/web")? == 4).then_some(()));
    assert_eq!(request_all(&edge, 60), ["b11", "b13"], "no request fails");

    edge.script("stop_server 11; stop_server 13");
    until("all servers are unhealthy", || (edge.healthy("demo/web")? == 0).then_some(()));
    for _ in 0..10 {
        // Exit code 28 would be curl's timeout.
        let refused = edge.run("client", &["curl", "-s", "--max-time", REQUEST_S, VIP]);
        assert_eq!(
            refused.status.code(),
            Some(7),
            "if all are unhealthy all are used, so that a server's refusal reaches the client"
        );
    }

    edge.script("start_server 12");
    until("the server is healthy again", || (edge.healthy("demo/web")? == 2).then_some(()));
    assert_eq!(request_all(&edge, 20), ["b12"]);
    edge.assert_account();
}
