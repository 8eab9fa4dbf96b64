//! Flow records from a gateway with real clients and servers: lines of JSON, and IPFIX that `nfcapd` of nfdump collects.
//!
//! The kernel of the client is the witness: its counters of packets to and from a frontend hold the lengths of IP packets,
//! as flow records do. Offloads are off, so its packets are those on the wire. A packet that a busy machine loses between
//! the gateway and the client is in only one of the two, so one download of several must agree exactly.

#![allow(clippy::unwrap_used, clippy::panic)]

mod edge;

use std::fs;
use std::ops::Range;
use std::process::{Child, Command, Stdio};

use edge::{Edge, ServiceManifest, skip, until};
use serde_json::Value;

const WEB: &str = "192.0.2.100";
const UDP: &str = "192.0.2.110";
/// Bytes of the file that is downloaded.
const FILE_BYTES: u64 = 1_000_000;
/// The client's ports, one for each download: for lines, and for the collector. A port rests after its connection.
const LINES_PORTS: Range<u16> = 21_001..21_005;
const COLLECTOR_PORTS: Range<u16> = 21_011..21_015;
const COLLECTOR: &str = "ipfix://127.0.0.1:4739";

/// Writes the configuration with this target and short limits.
fn configure(edge: &Edge, to: &str) {
    edge.configure_af_packet(&format!("flowRecords: {{to: \"{to}\"}}\n"));
    let text = fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    let short = text.replace("{maxPerWorker: 16384}", "{maxPerWorker: 16384, tcpReset: 10s, udpUnreplied: 10s}");
    assert_ne!(short, text);
    fs::write(edge.path("sluice.yaml"), short).unwrap();
}

/// Counts in the client's kernel what it sends and receives by each of the ports.
fn count_packets(edge: &Edge) {
    let rules = LINES_PORTS.chain(COLLECTOR_PORTS).map(|port| {
        format!(
            "add counter c t out{port}; add counter c t in{port}; \
             add rule inet t o ip daddr {WEB} tcp sport {port} counter name out{port}; \
             add rule inet t i ip saddr {WEB} tcp dport {port} counter name in{port}; "
        )
    });
    let rules: String = rules.map(|rules| rules.replace("counter c t", "counter inet t")).collect();
    let table = "add table inet t; add chain inet t o { type filter hook output priority 0; }; \
                 add chain inet t i { type filter hook input priority 0; }; ";
    edge.script(&format!("in_ns client nft '{table}{rules}'"));
}

/// Packets and bytes that the client's kernel has counted: sent and received.
fn counted(edge: &Edge, port: u16) -> [(u64, u64); 2] {
    ["out", "in"].map(|way| {
        let text = edge.script(&format!("in_ns client nft -j list counter inet t {way}{port}"));
        let found: Value = serde_json::from_str(&text).unwrap();
        let counter = found["nftables"].as_array().unwrap().iter().find_map(|entry| entry.get("counter")).unwrap();
        (counter["packets"].as_u64().unwrap(), counter["bytes"].as_u64().unwrap())
    })
}

/// Downloads the file once from each port. Other processes have none of these ports in this namespace.
fn download(edge: &Edge, ports: Range<u16>) {
    for port in ports {
        let url = format!("http://{WEB}/file");
        let local = port.to_string();
        let output =
            edge.run("client", &["curl", "-s", "--max-time", edge::REQUEST_S, "--local-port", &local, "-o", "/dev/null", &url]);
        assert!(output.status.success(), "port {port}: {output:?}");
    }
}

/// Asserts that the records of each download hold the file, and that some agree exactly with the client's kernel.
/// `recorded` gives packets and bytes to the backend and to the client.
fn assert_agree(edge: &Edge, ports: Range<u16>, recorded: impl Fn(u16) -> [(u64, u64); 2]) {
    let rows: Vec<_> = ports.map(|port| (recorded(port), counted(edge, port))).collect();
    for ([(_, to_backend), (_, to_client)], [(_, sent), (_, received)]) in &rows {
        assert!(*to_client >= FILE_BYTES && to_client >= received && to_backend <= sent, "{rows:?}");
    }
    assert!(rows.iter().any(|(recorded, counted)| recorded == counted), "none agrees exactly: {rows:?}");
}

/// The lines that were written so far.
fn lines(edge: &Edge) -> Vec<Value> {
    let text = fs::read_to_string(edge.path("records/flows.jsonl")).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// Opens a connection from the client and resets it.
const RESET: &str = "import socket, struct
s = socket.create_connection(('192.0.2.100', 80), source_address=('', 21009))
s.sendall(b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
s.recv(1000)
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
s.close()";

/// A collector in the namespace of the gateway. Dropping it ends it.
struct Collector(Child);

impl Collector {
    fn start(edge: &Edge) -> Self {
        let dir = edge.path("nfcapd");
        fs::create_dir_all(&dir).unwrap();
        let log = fs::File::create(edge.path("nfcapd.log")).unwrap();
        let child = Command::new("ip")
            .args(["netns", "exec", &edge.namespace("gw"), "nfcapd", "-p", "4739", "-b", "127.0.0.1", "-t", "3600", "-w"])
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let collector = Self(child);
        let listens = || String::from_utf8_lossy(&edge.run("gw", &["ss", "-Huln", "sport = :4739"]).stdout).contains("4739");
        until("nfcapd listens", || listens().then_some(()));
        collector
    }

    /// Ends it, and returns the flows that it has written.
    fn flows(mut self, edge: &Edge) -> Vec<Value> {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::TERM).unwrap();
        self.0.wait().unwrap();
        let output = Command::new("nfdump").args(["-q", "-o", "json", "-R"]).arg(edge.path("nfcapd")).output().unwrap();
        // nfdump prints the objects with commas between them.
        let text = format!("[{}]", String::from_utf8_lossy(&output.stdout));
        let flows: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        flows.as_array().unwrap().clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn json_lines(edge: &mut Edge) {
    configure(edge, &format!("file:{}", edge.path("records/flows.jsonl").display()));
    edge.start();
    until("the first answer", || edge.curl(&format!("http://{WEB}/")));
    until("the UDP service", || edge.service("own").filter(|service| !service.frontends.is_empty()));
    download(edge, LINES_PORTS);
    let output = edge.run("client", &["/usr/bin/python3", "-c", RESET]);
    assert!(output.status.success(), "{output:?}");
    let output = edge.run("client", &["bash", "-c", &format!("echo hello >/dev/udp/{UDP}/90")]);
    assert!(output.status.success(), "{output:?}");
    let end_of = |client: String, frontend: String| {
        lines(edge).into_iter().find(|line| {
            line["event"] == "end" && line["client"].as_str().unwrap().ends_with(&client) && line["frontend"] == frontend.as_str()
        })
    };
    let web = |port: u16| end_of(format!(":{port}"), format!("{WEB}:80"));
    for port in LINES_PORTS {
        let end = until("the end of a download", || web(port));
        assert_eq!((&end["reason"], &end["service"], &end["mode"]), (&"fin".into(), &"demo/web".into(), &"nat".into()), "{end}");
        assert!(end["backend"].as_str().unwrap().ends_with(":8080") && end["snat"].as_str().unwrap().starts_with("10.0.0.3:"));
        assert!(end["start_ms"].as_u64() <= end["end_ms"].as_u64(), "{end}");
    }
    let number = |line: &Value, key: &str| line[key].as_u64().unwrap();
    assert_agree(edge, LINES_PORTS, |port| {
        let end = web(port).unwrap();
        [("to_backend_packets", "to_backend_bytes"), ("to_client_packets", "to_client_bytes")]
            .map(|(packets, bytes)| (number(&end, packets), number(&end, bytes)))
    });
    assert_eq!(until("the end of the reset connection", || web(21_009))["reason"], "rst");
    let udp = until("the end of the datagram", || end_of(String::new(), format!("{UDP}:90")));
    assert_eq!((&udp["reason"], &udp["protocol"], number(&udp, "to_backend_packets")), (&"idle".into(), &"udp".into(), 1));
    // "hello\n" in UDP and IPv4.
    assert_eq!(number(&udp, "to_backend_bytes"), 34);
    let starts = lines(edge).into_iter().filter(|line| line["event"] == "start").count();
    assert!(starts >= LINES_PORTS.len() + 2, "{starts}");
    let text = String::from_utf8(edge.run("gw", &["curl", "-s", "http://127.0.0.1:9435/metrics"]).stdout).unwrap();
    let exported = text.lines().find_map(|line| line.strip_prefix("sluice_flow_records_total{outcome=\"exported\"} ")).unwrap();
    assert!(exported.parse::<usize>().unwrap() >= starts, "{exported}");
    assert!(text.contains("sluice_flow_records_total{outcome=\"queue_full\"} 0"), "{text}");
}

#[test]
fn records_of_downloads_agree_with_the_kernel_of_the_client() {
    let test = "flow records agree with the client's kernel and nfcapd";
    if Command::new("nfcapd").arg("-V").output().is_err() {
        return skip(test, "needs nfcapd of nfdump (.ci/install test)");
    }
    let Some(mut edge) = Edge::new(test, "rec") else { return };
    for n in [11, 12, 13] {
        fs::write(edge.path(&format!("b{n}/file")), vec![b'x'; usize::try_from(FILE_BYTES).unwrap()]).unwrap();
    }
    edge.write_demo_manifests();
    edge.write_manifest("own.yaml", &ServiceManifest { address: UDP, protocols: &["UDP"], ..ServiceManifest::default() }.yaml());
    count_packets(&edge);
    json_lines(&mut edge);

    configure(&edge, COLLECTOR);
    assert_eq!(edge.reload(), Ok("nothing can change while the gateway runs; restart sluiced for: flowRecords".to_owned()));
    edge.stop(false);
    let collector = Collector::start(&edge);
    edge.start();
    until("the first answer", || edge.curl(&format!("http://{WEB}/")));
    download(&edge, COLLECTOR_PORTS);
    // The end of the gateway ends the flows, too.
    edge.stop(false);
    let flows = collector.flows(&edge);
    let sum = |port: u16, key: &str| {
        let of_port = flows.iter().filter(|flow| flow["src_port"] == port && flow["dst4_addr"] == WEB);
        of_port.filter_map(|flow| flow[key].as_u64()).sum::<u64>()
    };
    assert_agree(&edge, COLLECTOR_PORTS, |port| {
        [("in_packets", "in_bytes"), ("out_packets", "out_bytes")].map(|(packets, bytes)| (sum(port, packets), sum(port, bytes)))
    });
}
