//! `sluicectl capture` and `sluicectl trace` of a real gateway: tshark reads what one writes, the other shows a new flow, a
//! known flow and a drop, and neither outlives its gateway.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use edge::{Edge, ServiceManifest, built_program, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const WEB: &str = "http://192.0.2.100/";
/// A Service whose source ranges do not have the client.
const FORBIDDEN: &str = "http://192.0.2.110:90/";

/// `sluicectl` with a capture or a trace, which has begun.
struct Following {
    child: Option<Child>,
    notes: BufReader<ChildStderr>,
}

impl Following {
    fn begin(edge: &Edge, arguments: &[&str]) -> Self {
        let mut child = sluicectl(edge, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut notes = BufReader::new(child.stderr.take().unwrap());
        let mut first = String::new();
        notes.read_line(&mut first).unwrap();
        assert_eq!(first, "capturing on uplink, cluster, linux-uplink, linux-cluster; Ctrl-C ends it\n");
        Self { child: Some(child), notes }
    }

    /// Ends it as Ctrl-C does, and returns its output and its notes.
    fn interrupt(self) -> (Output, String) {
        kill_process(Pid::from_child(self.child.as_ref().unwrap()), Signal::INT).unwrap();
        self.ended()
    }

    /// Waits until it has ended.
    fn ended(mut self) -> (Output, String) {
        let output = self.child.take().unwrap().wait_with_output().unwrap();
        let mut notes = String::new();
        self.notes.read_to_string(&mut notes).unwrap();
        (output, notes)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn sluicectl(edge: &Edge, arguments: &[&str]) -> Command {
    let mut command = Command::new(built_program("sluicectl", "sluicectl"));
    command.arg("--server").arg(format!("unix:{}", edge.path("admin.sock").display())).args(arguments);
    command
}

fn forbidden() -> String {
    let spec = "loadBalancerSourceRanges: [203.0.113.0/24]";
    ServiceManifest { name: "forbidden", spec, ..ServiceManifest::default() }.yaml()
}

/// A request that is dropped.
fn try_forbidden(edge: &Edge) {
    let output = edge.run("client", &["curl", "-s", "--max-time", "1", FORBIDDEN]);
    assert!(!output.status.success(), "the client is in no source range");
}

#[test]
fn packets_are_captured_for_wireshark_and_traced_stage_by_stage() {
    let Some(mut edge) = Edge::new("sluicectl capture and trace", "cap") else { return };
    // With two cores one worker receives all packets, and hands those of the other worker's flows over.
    let cores = std::thread::available_parallelism().unwrap().get().min(2);
    let cores: Vec<usize> = (0..cores).collect();
    edge.configure_on(&cores, "net_af_packet0,iface=uplink0,qpairs=1", "net_af_packet1,iface=cluster0,qpairs=1", "");
    edge.write_demo_manifests();
    edge.write_manifest("forbidden.yaml", &forbidden());
    edge.start();
    edge.assert_all_servers_answer(WEB);
    until("the Service with source ranges", || edge.service("forbidden"));
    assert_wireshark_reads_the_capture(&edge);
    assert_stages_are_traced(&edge);
    assert_a_bad_filter_is_explained(&edge);
    edge.assert_account();

    let running = Following::begin(&edge, &["trace", "icmp"]);
    let second = sluicectl(&edge, &["capture", "-w", "/dev/null"]).output().unwrap();
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && error.contains("a gateway runs one at a time"), "{error}");
    assert_eq!(edge.stop(false), Some(0), "it does not wait for the client: {}", edge.log());
    let (output, notes) = running.ended();
    let is_told = notes.contains("the gateway ends") || notes.contains("has stopped; start it");
    assert!(!output.status.success() && is_told, "{notes}");
    let log = edge.log();
    assert!(log.contains("a capture begins") && log.contains("uid 0"), "who looked at packets: {log}");
}

fn assert_wireshark_reads_the_capture(edge: &Edge) {
    let file = edge.path("web.pcapng");
    let capture = Following::begin(edge, &["capture", "tcp", "port", "80", "or", "port", "90", "-w", file.to_str().unwrap()]);
    assert!(edge.curl(WEB).is_some());
    try_forbidden(edge);
    edge.run("client", &["ping", "-c1", "-W1", "192.0.2.100"]);
    let (output, notes) = capture.interrupt();
    assert!(output.status.success() && notes.contains("the workers looked at"), "{notes}");
    let fields = ["frame.interface_name", "frame.packet_flags_direction", "frame.comment", "ip.dst", "tcp.dstport", "icmp.type"];
    let mut tshark = Command::new("tshark");
    tshark.args(["-n", "-r"]).arg(&file).args(["-T", "fields", "-E", "separator=|"]);
    fields.iter().for_each(|field| {
        tshark.args(["-e", field]);
    });
    let read = tshark.output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let text = String::from_utf8_lossy(&read.stdout).into_owned();
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split('|').collect()).collect();
    // tshark 4.0 writes the direction as 0x00000001, later versions as 1.
    let direction = |row: &[&str]| u32::from_str_radix(row[1].trim_start_matches("0x"), 16).unwrap();
    let has = |interface: &str, way: u32, destination: &str, port: &str, words: &[&str]| {
        rows.iter().any(|row| {
            (row[0], direction(row), row[3], row[4]) == (interface, way, destination, port)
                && words.iter().all(|word| row[2].contains(word))
        })
    };
    let new = ["verdict=forward", "service=demo/web", "backend=10.0.0.1", "flow=new"];
    let known = ["verdict=forward", "service=demo/web", "backend=10.0.0.1", "flow=known"];
    assert!(has("uplink", 1, "192.0.2.100", "80", &new), "a SYN arrives: {text}");
    assert!((11..=13).any(|n| has("cluster", 2, &format!("10.0.0.{n}"), "8080", &new)), "it leaves: {text}");
    assert!(has("uplink", 1, "192.0.2.100", "80", &known), "a later packet: {text}");
    assert!(rows.iter().any(|row| row[0] == "cluster" && direction(row) == 1 && row[3] == "10.0.0.3"), "a reply: {text}");
    let dropped = ["verdict=drop", "reason=source_range", "service=demo/forbidden"];
    assert!(has("uplink", 1, "192.0.2.110", "90", &dropped), "a drop: {text}");
    assert!(rows.iter().all(|row| row[5].is_empty()), "the ping does not match: {text}");
}

fn assert_stages_are_traced(edge: &Edge) {
    let trace = Following::begin(edge, &["trace", "-o", "json", "host 192.0.2.10 and tcp"]);
    assert!(edge.curl(WEB).is_some());
    try_forbidden(edge);
    let (output, notes) = trace.interrupt();
    assert!(output.status.success(), "{notes}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let packets: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let find = |flow: &str, verdict: &str, port: &str| {
        let is = |packet: &&Value| packet["flow"] == flow && packet["verdict"] == verdict && packet["in"] == port;
        packets.iter().find(is).unwrap_or_else(|| panic!("{flow} {verdict} {port}: {text}"))
    };
    let new = find("new", "forward", "uplink");
    assert_eq!((&new["service"], &new["frontend"]), (&"demo/web".into(), &"192.0.2.100:80".into()));
    assert_eq!((&new["sent"][0]["out"], &new["sent"][0]["destination"]), (&"cluster".into(), &new["backend"]));
    let reply = find("known", "forward", "cluster");
    assert_eq!((&reply["sent"][0]["out"], &reply["sent"][0]["source"]), (&"uplink".into(), &"192.0.2.100:80".into()));
    assert_eq!(find("none", "drop", "uplink")["reason"], "source_range");

    let trace = Following::begin(edge, &["trace", "--count", "1", "src host 192.0.2.10 and tcp[tcpflags] & tcp-syn != 0"]);
    assert!(edge.curl(WEB).is_some());
    let (output, notes) = trace.ended();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("  flow      new, frontend 192.0.2.100:80 of demo/web, backend 10.0.0.1"), "{text}");
    assert!(text.contains("  verdict   forward\n  sent      by cluster: tcp 10.0.0.3:"), "{text}");
    assert!(notes.starts_with("1 packets traced"), "{notes}");
}

fn assert_a_bad_filter_is_explained(edge: &Edge) {
    let bad = sluicectl(edge, &["capture", "-w", "/dev/null", "tcp prot 80"]).output().unwrap();
    let error = String::from_utf8_lossy(&bad.stderr).into_owned();
    assert_eq!(bad.status.code(), Some(2), "{error}");
    assert!(error.contains("\"tcp prot 80\" is not valid: ") && error.contains("syntax error"), "{error}");
}
