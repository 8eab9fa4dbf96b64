//! Failures and recovery: the gateway is killed, its manifests disappear, servers die.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fs;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;

use rustix::process::{Resource, Rlimit, prlimit};

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

/// Sets the number of files that the gateway may have open.
fn limit_descriptors(edge: &Edge, count: u64) {
    let limit = Rlimit { current: Some(count), maximum: Some(4096) };
    prlimit(Some(edge.pid()), Resource::Nofile, limit).unwrap();
}

fn is_open(connection: &UnixStream) -> bool {
    let mut connection = connection;
    connection.set_nonblocking(true).unwrap();
    let mut byte = [0; 256];
    loop {
        match connection.read(&mut byte) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
}

#[test]
fn idle_connections_to_the_sockets_of_the_admin_api_take_a_bounded_number_of_descriptors() {
    let Some(mut edge) = start_gateway("idle connections", "idl") else { return };
    limit_descriptors(&edge, 256);
    for socket in ["admin-view.sock", "admin.sock"] {
        let connect = |_| until("a connection", || UnixStream::connect(edge.path(socket)).ok());
        let idle: Vec<_> = (0..300).map(connect).collect();
        until("all but 32 are closed", || (idle.iter().filter(|idle| is_open(idle)).count() <= 32).then_some(()));
        let ports = until("the admin API answers", || edge.ports());
        assert!(ports.iter().all(|port| port.link == "up"), "{ports:?}");
    }
    request_all(&edge, 20);
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_gateway_without_a_free_descriptor_keeps_its_ports() {
    let Some(mut edge) = start_gateway("no descriptors", "nod") else { return };
    let carrier = |value: &str| {
        let shown = edge.run("gw", &["cat", "/sys/class/net/cluster/carrier"]);
        (String::from_utf8_lossy(&shown.stdout).trim() == value).then_some(())
    };
    limit_descriptors(&edge, 1);
    for _ in 0..3 {
        // The gateway still looks at its devices and their links.
        edge.script("in_ns gw ip link set cluster0 down");
        until("no carrier", || carrier("0"));
        edge.script("in_ns gw ip link set cluster0 up");
        until("the carrier", || carrier("1"));
    }
    until("an answer", || edge.curl(VIP));
    request_all(&edge, 20);
    limit_descriptors(&edge, 4096);
    let ports = until("the admin API answers", || edge.ports());
    assert!(ports.iter().all(|port| port.link == "up"), "{ports:?}");
    assert!(!edge.log().contains("disappeared"), "{}", edge.log());
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

/// What a gateway changes at the interface of its uplink.
fn changes(edge: &Edge) -> [String; 3] {
    let shown = |command: &[&str]| String::from_utf8(edge.run("gw", command).stdout).unwrap();
    let promiscuity = shown(&["ip", "-d", "link", "show", "uplink0"]);
    [
        filters(edge),
        shown(&["cat", "/proc/sys/net/ipv6/conf/uplink0/disable_ipv6"]),
        promiscuity.split("promiscuity ").nth(1).unwrap()[..1].to_owned(),
    ]
}

#[test]
fn a_second_gateway_over_the_same_interfaces_is_refused_and_changes_nothing() {
    let Some(mut edge) = start_gateway("a second gateway", "sec") else { return };
    edge.script("in_ns gw ip route add table 150 blackhole 192.0.2.222/32 proto 150");
    let before = changes(&edge);
    assert!(before[0].contains("pref 49021"), "{before:?}");
    let text = fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    for (name, ports) in [("same", ["uplink", "cluster"]), ("other", ["north", "south"])] {
        let text = text.replace("name: uplink", &format!("name: {}", ports[0]));
        let text = text.replace("name: cluster", &format!("name: {}", ports[1]));
        let (dir, own) = (edge.dir.path().display().to_string(), edge.path(name));
        fs::create_dir(&own).unwrap();
        fs::write(own.join("sluice.yaml"), text.replace(&dir, &own.display().to_string())).unwrap();
        let (program, file) = (env!("CARGO_BIN_EXE_sluiced"), own.join("sluice.yaml"));
        let run = edge.run("gw", &[program, "run", "--config", file.to_str().unwrap(), "--manifests", own.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout);
        assert!(!run.status.success() && said.contains("in use by another gateway"), "{said}");
        assert!(said.contains(&format!("process {}", edge.pid().as_raw_nonzero())), "{said}");
        assert_eq!(changes(&edge), before, "{name}");
    }
    let routes = edge.run("gw", &["ip", "route", "show", "table", "150"]).stdout;
    assert!(String::from_utf8_lossy(&routes).contains("192.0.2.222"), "the routes to VIPs stay");
    for _ in 0..8 {
        assert!(edge.curl(NODE_PORT).is_some(), "{}", edge.log());
    }
    request_all(&edge, 8);
    // A gateway that runs notices what another program undoes.
    edge.script("in_ns gw tc qdisc del dev uplink0 clsact");
    until("the filter is in place again", || filters(&edge).contains("pref 49021").then_some(()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert!(filters(&edge).is_empty(), "the filter is removed at the end");
}

/// The value of a metric without labels.
fn metric(edge: &Edge, name: &str) -> Option<u64> {
    let text = edge.run("gw", &["curl", "-s", "--max-time", REQUEST_S, "http://127.0.0.1:9435/metrics"]).stdout;
    let text = String::from_utf8(text).unwrap();
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[test]
fn a_log_that_nobody_reads_holds_nothing_up_and_its_lost_lines_are_counted() {
    let Some(mut edge) = Edge::with_af_packet("a log that nobody reads", "unr") else { return };
    edge.configure_af_packet("logs: {level: trace}\n");
    edge.write_demo_manifests();
    let (reader, writer) = std::io::pipe().unwrap();
    edge.spawn_logging_to(writer, &[]);
    // Every request to the admin API makes hundreds of lines of level trace.
    until("lines are lost", || metric(&edge, "sluice_log_lost_lines_total ").filter(|lost| edge.status().is_some() && *lost > 0));
    until("the gateway serves", || edge.status().filter(|status| status.ready));
    wait_for_answers(&edge);
    request_all(&edge, 20);
    let elsewhere = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "Host: attacker.example"];
    let refused = edge.run("gw", &[&elsewhere[..], &["http://127.0.0.1:9435/metrics"]].concat());
    assert_eq!(String::from_utf8_lossy(&refused.stdout), "421", "a site whose name leads here gets no metrics");
    assert_eq!(edge.stop(false), Some(0));
    drop(reader);
}

#[test]
fn the_state_directory_is_private_and_leftovers_of_a_full_disk_go_at_the_start() {
    let Some(mut edge) = Edge::with_af_packet("the state directory", "std") else { return };
    edge.write_demo_manifests();
    // Status files are within it, so several parts of the program would create it.
    let (state, file) = (edge.path("state"), edge.path("sluice.yaml"));
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("/status\n", "/state/status\n")).unwrap();
    edge.start();
    let mode = || fs::metadata(&state).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(), 0o700);
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let leftovers = ["flows.new", "state.new", "health.new"];
    for name in leftovers {
        fs::write(state.join(name), "half").unwrap();
    }
    edge.start();
    until("temporary files are gone", || leftovers.iter().all(|name| !state.join(name).exists()).then_some(()));
    assert_eq!((mode(), edge.stop(false)), (0o700, Some(0)), "{}", edge.log());
}
