//! Many connections over a long time: none breaks while backends are added and removed, and SNAT ports are reused
//! safely.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::time::{Duration, Instant};

use edge::{Edge, ServiceManifest, until};

const ADDRESS: &str = "192.0.2.110";
/// Number of times that backends are added or removed. It takes a minute, or longer on a busy machine.
const CHANGES: u32 = 600;
const CHANGE_INTERVAL: Duration = Duration::from_millis(100);
/// Limit of retransmitted SYNs in 100,000 connections. Each time that a busy machine stands still for a second, all 64 that
/// are open at a time may be answered late; ports that are reused too early would cause thousands.
const RETRANSMITTED_SYNS_MAX: u64 = 1_000;
/// Number of changes between two reloads of the configuration, about 5 s.
const CHANGES_PER_RELOAD: u32 = 50;

/// A Service at [`ADDRESS`], port 90, with these servers on `target_port`.
fn service(target_port: u16, servers: &[u8]) -> String {
    ServiceManifest { address: ADDRESS, target_port, servers, ..ServiceManifest::default() }.yaml()
}

#[test]
fn two_hundred_connections_survive_six_hundred_changes_of_their_backends() {
    let Some(mut edge) = Edge::with_echo_servers("200 connections while backends come and go", "chu", 9000) else { return };
    edge.write_manifest("own.yaml", &service(9000, &[11, 12, 13]));
    edge.start();
    let address = format!("{ADDRESS}:90");
    until("the first connection", || edge.connect(&address));
    let mut connections: Vec<_> = (0..200).map(|n| edge.connect(&address).unwrap_or_else(|| panic!("connection {n}"))).collect();
    let start = Instant::now();
    for changes in 1..=CHANGES {
        let servers: &[u8] = if changes.is_multiple_of(2) { &[11, 12, 13] } else { &[11, 12] };
        edge.write_manifest("own.yaml", &service(9000, servers));
        if changes.is_multiple_of(CHANGES_PER_RELOAD) {
            reload(&edge, changes / CHANGES_PER_RELOAD);
        }
        // A tenth of the connections sends between two changes, so each sends about once a second.
        let group = changes as usize % 10;
        connections.iter_mut().skip(group).step_by(10).for_each(|connection| connection.assert_alive("while backends change"));
        std::thread::sleep((CHANGE_INTERVAL * changes).saturating_sub(start.elapsed()));
    }
    connections.iter_mut().for_each(|connection| connection.assert_alive("after all changes"));
    for server in ["b11", "b12", "b13"] {
        assert!(connections.iter().any(|connection| connection.server == server), "no connection is on {server}");
    }
    edge.assert_account();
}

/// Changes the last address of the default pool and reloads the configuration.
fn reload(edge: &Edge, time: u32) {
    let text = std::fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    let (before, after) = text.split_once("192.0.2.100-192.0.2.").unwrap();
    let text = format!("{before}192.0.2.100-192.0.2.{}{}", 120 + time, &after[3..]);
    std::fs::write(edge.path("sluice.yaml"), text).unwrap();
    assert_eq!(edge.reload().expect("a valid file"), "in effect: pools");
}

#[test]
fn a_reload_applies_new_pools_and_refuses_an_invalid_file() {
    let Some(mut edge) = Edge::with_af_packet("reload", "rel") else { return };
    edge.write_manifest("own.yaml", &service(8080, &[11]).replace(ADDRESS, "192.0.2.130"));
    edge.start();
    until("the address is outside the pools", || edge.service("own").filter(|s| !s.reason.is_empty()));
    let text = std::fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    let write = |text: &str| std::fs::write(edge.path("sluice.yaml"), text).unwrap();
    write(&text.replace("192.0.2.119", "192.0.2.300"));
    let refused = edge.reload().unwrap_err();
    assert!(refused.contains("pools[0].addresses[0]"), "{refused}");
    write(&text.replace("192.0.2.119", "192.0.2.139").replace("maxPerWorker: 16384", "maxPerWorker: 16385"));
    assert_eq!(edge.reload().unwrap(), "in effect: pools; restart sluiced for: flows.maxPerWorker");
    until("the Service answers", || edge.curl("http://192.0.2.130:90/"));
    edge.assert_account();
}

/// A `TcpExt` counter of a namespace.
fn tcp_counter(edge: &Edge, namespace: &str, name: &str) -> u64 {
    let text = String::from_utf8(edge.run(namespace, &["cat", "/proc/net/netstat"]).stdout).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("TcpExt:")).collect();
    let position = lines[0].split(' ').position(|word| word == name).expect(name);
    lines[1].split(' ').nth(position).unwrap().parse().unwrap()
}

#[test]
fn a_hundred_thousand_short_connections_to_one_server_reuse_no_port_too_early() {
    let test = "100,000 short connections";
    let Some(mut edge) = Edge::with_af_packet(test, "reu") else { return };
    let text = std::fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    let text = text.replace("maxPerWorker: 16384", "maxPerWorker: 262144").replace("[10.0.0.3,", "[10.0.0.3, 10.0.0.4,");
    std::fs::write(edge.path("sluice.yaml"), text).unwrap();
    edge.write_manifest("own.yaml", &service(8080, &[11]));
    edge.start();
    let url = format!("http://{ADDRESS}:90/");
    until("the first answer", || edge.curl(&url));
    let before = tcp_counter(&edge, "client", "TCPSynRetrans");
    let output = edge.run("client", &["ab", "-q", "-r", "-n", "100000", "-c", "64", "-s", "60", &url]);
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    let value = |key: &str| report.lines().find_map(|line| line.strip_prefix(key)).map(|v| v.trim().to_owned());
    assert_eq!(value("Complete requests:").as_deref(), Some("100000"), "{report}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(value("Failed requests:").as_deref(), Some("0"), "{report}");
    let again = tcp_counter(&edge, "client", "TCPSynRetrans") - before;
    assert!(again <= RETRANSMITTED_SYNS_MAX, "{again} SYNs were retransmitted; {:?}", edge.drops());
    println!("100,000 connections: {} a second", value("Requests per second:").unwrap_or_default());
    let early: u64 = edge.status().unwrap().accounts.iter().map(|account| account.snat_port_reused_early).sum();
    assert_eq!(early, 0, "SNAT ports that were reused too early");
    edge.assert_account();
}
