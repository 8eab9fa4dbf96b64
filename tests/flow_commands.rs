//! What an operator does with flows: ends them, watches them begin and end, and asks for the heaviest of them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use edge::{DEADLINE, Edge, built_program, until};
use serde_json::Value;

const ADDRESS: &str = "192.0.2.100:80";

/// Sends a RST that belongs to no flow: nobody answers a RST, so it is dropped.
const RST_OF_NO_CONNECTION: &str = "
import socket, struct
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
raw.sendto(struct.pack('!HHIIBBHHH', 5555, 81, 1, 0, 0x50, 4, 0, 0, 0), ('192.0.2.100', 0))
";

/// Runs `sluicectl`; returns what it prints, and its exit code.
fn sluicectl(program: &Path, edge: &Edge, words: &str) -> (String, i32) {
    let server = format!("unix:{}", edge.path("admin.sock").display());
    let output = Command::new(program).args(["--server", &server]).args(words.split(' ')).output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), output.status.code().unwrap())
}

/// A running `sluicectl watch`, which ends with the test.
struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    fn start(program: &Path, words: &[&str]) -> Self {
        let mut child = Command::new(program).args(words).stdout(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        std::thread::spawn(move || output.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, lines }
    }

    /// The next line.
    fn next(&self) -> String {
        self.lines.recv_timeout(DEADLINE).expect("a line of the watch")
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connections that the sockets of a backend know as established.
fn established(edge: &Edge, server: &str) -> usize {
    let sockets = edge.run(server, &["ss", "-Htn", "state", "established", "sport", "=", ":9000"]).stdout;
    String::from_utf8(sockets).unwrap().lines().count()
}

#[test]
fn silent_connections_end_at_both_ends_on_request_and_those_of_other_backends_go_on() {
    let name = "silent_connections_end_at_both_ends_on_request_and_those_of_other_backends_go_on";
    let Some(mut edge) = Edge::with_echo_servers(name, "fend", 9000) else { return };
    let program = &built_program("sluicectl", "sluicectl");
    let web = include_str!("edge/web.yaml").replace("8080", "9000");
    edge.write_manifest("web.yaml", &web);
    edge.start();
    until("the first connection", || edge.connect(ADDRESS));
    let connections: Vec<_> = (0..30).map(|n| edge.connect(ADDRESS).unwrap_or_else(|| panic!("connection {n}"))).collect();
    let (ended, mut others): (Vec<_>, Vec<_>) = connections.into_iter().partition(|connection| connection.server == "b12");
    assert!(!ended.is_empty() && !others.is_empty());
    let filter = "--service demo/web --client 192.0.2.0/24 --backend 10.0.0.12 --state established";

    let (out, code) = sluicectl(program, &edge, &format!("flows end {filter}"));
    assert_eq!((out, code), (format!("{} flows match\n", ended.len()), 1), "without --yes nothing ends");
    let (out, code) = sluicectl(program, &edge, &format!("flows end {filter} --yes"));
    assert_eq!((out, code), (format!("{} flows end\n", ended.len()), 0));
    let ended_count = u32::try_from(ended.len()).unwrap();
    // Nobody has sent anything.
    for connection in ended {
        let mut socket = connection.into_socket();
        let error = socket.read(&mut [0; 16]).expect_err("its client gets a RST");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    }
    until("the backend has no connection left", || (established(&edge, "b12") == 0).then_some(()));
    others.iter_mut().for_each(|connection| connection.assert_alive("after connections of another backend were ended"));
    let (out, _) = sluicectl(program, &edge, &format!("flows {filter} -o json"));
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), Value::Array(Vec::new()));
    assert!(edge.log().contains("flows were ended on request") && edge.log().contains("caller="), "{}", edge.log());
    let metrics = edge.run("gw", &["curl", "-s", "http://127.0.0.1:9435/metrics"]).stdout;
    let metrics = String::from_utf8(metrics).unwrap();
    let counted: f64 = metrics
        .lines()
        .filter_map(|line| {
            line.strip_prefix("sluice_worker_ended_on_request_flows_total{")?.rsplit(' ').next()?.parse::<f64>().ok()
        })
        .sum();
    assert!((counted - f64::from(ended_count)).abs() < 0.5, "{counted} of {ended_count} are counted: {metrics}");
    assert!(edge.connect(ADDRESS).is_some());
    edge.assert_account();
}

#[test]
fn a_watch_shows_flows_that_begin_and_end_and_packets_that_are_dropped() {
    let name = "a_watch_shows_flows_that_begin_and_end_and_packets_that_are_dropped";
    let Some(mut edge) = Edge::with_echo_servers(name, "fwatch", 9000) else { return };
    let program = &built_program("sluicectl", "sluicectl");
    edge.write_manifest("web.yaml", &include_str!("edge/web.yaml").replace("8080", "9000"));
    edge.start();
    until("the first connection", || edge.connect(ADDRESS));
    // Those who may only look may watch.
    let server = format!("unix:{}", edge.path("admin-view.sock").display());
    let watch = ["--server", &server, "watch", "--service", "demo/web", "-o", "json"];
    let watch = Watch::start(program, &watch);
    let mut seen = Vec::new();
    // It may take a moment until the watch begins.
    let next = |edge: &Edge| -> Value {
        let _ = edge.connect(ADDRESS);
        serde_json::from_str(&watch.next()).unwrap()
    };
    // Connections before may end first.
    let begins = loop {
        let event = next(&edge);
        if event["verdict"] == "start" {
            break event;
        }
    };
    assert_eq!(begins["destination"], ADDRESS, "{begins}");
    assert!(begins["backend"].as_str().unwrap().starts_with("10.0.0.1") && begins["service"] == "demo/web", "{begins}");
    let held = edge.connect(ADDRESS).unwrap();
    let (out, code) = sluicectl(program, &edge, "flows end --service demo/web --yes");
    assert_eq!(code, 0, "{out}");
    drop(held);
    while !seen.iter().any(|event: &Value| event["verdict"] == "end") {
        seen.push(next(&edge));
    }
    drop(watch);
    let watch = ["--server", &server, "watch", "--verdict", "drop", "-c", "1"];
    let mut watch = Watch::start(program, &watch);
    let dropped = until("a drop is shown", || {
        edge.run("client", &["python3", "-c", RST_OF_NO_CONNECTION]);
        watch.child.try_wait().unwrap()
    });
    assert!(dropped.success());
    let line = watch.next();
    assert!(line.contains(" drop "), "{line}");
    edge.assert_account();
}

#[test]
fn the_heaviest_flow_and_its_client_come_first() {
    let Some(mut edge) = Edge::with_echo_servers("the_heaviest_flow_and_its_client_come_first", "fheavy", 9000) else { return };
    let program = &built_program("sluicectl", "sluicectl");
    edge.write_manifest("web.yaml", &include_str!("edge/web.yaml").replace("8080", "9000"));
    edge.start();
    until("the first connection", || edge.connect(ADDRESS));
    let _quiet: Vec<_> = (0..5).map(|n| edge.connect(ADDRESS).unwrap_or_else(|| panic!("connection {n}"))).collect();
    let mut heavy = edge.connect(ADDRESS).unwrap();
    let rows = until("the heaviest flow is listed", || {
        for _ in 0..200 {
            heavy.assert_alive("while it is the heaviest");
        }
        let (out, code) = sluicectl(program, &edge, "flows --top 3 --service demo/web -o json");
        assert_eq!(code, 0, "{out}");
        let rows: Value = serde_json::from_str(&out).unwrap();
        let is_there = rows["flows"][0]["packets_per_second"].as_u64()? > 10;
        is_there.then_some(rows)
    });
    let (flow, client) = (&rows["flows"][0], &rows["clients"][0]);
    let socket = heavy.into_socket();
    assert_eq!(flow["client"], Value::from(socket.local_addr().unwrap().to_string()), "{rows}");
    assert_eq!(client["client"], Value::from(socket.local_addr().unwrap().ip().to_string()), "{rows}");
    assert_eq!((&flow["service"], &flow["frontend"]), (&"demo/web".into(), &ADDRESS.into()), "{rows}");
    assert!(flow["bits_per_second"].as_u64() >= Some(1), "{rows}");
    edge.assert_account();
}
