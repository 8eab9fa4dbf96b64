//! PROXY headers to real servers: nginx and haproxy over HTTP and TLS, Postfix, where the server speaks first, and a UDP
//! server. Packets are lost on both sides of the gateway; each connection ends as one to the same server without headers,
//! and the servers log the address of the client.
//!
//! `SLUICE_PROXY_CONNECTIONS` is the number of connections to each port, of 1 MB each way; without it they are few and
//! small.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use edge::{Edge, Program, skip, until};

/// The client's addresses, and those that backends see without a header.
const CLIENT: [&str; 2] = ["198.51.100.10", "2001:db8:7::10"];
const GATEWAY: [&str; 2] = ["10.0.0.3", "fd00::3"];
/// Timeout of a connection, in seconds: with a fifth of the packets lost a SYN may take 127 s.
const CONNECTION_S: &str = "600";
/// How long a client waits for a datagram before it sends it again.
const DATAGRAM_WAIT: std::time::Duration = std::time::Duration::from_millis(200);

/// A server program of the test.
#[derive(Clone, Copy)]
struct Server {
    name: &'static str,
    program: &'static str,
    /// The last octet of its address.
    backend: u8,
    version: &'static str,
    start: &'static str,
    /// Ports of its Service, each with the schema of a URL, its target port with a header and the one without.
    ports: &'static [ServerPort],
}

struct ServerPort {
    scheme: &'static str,
    with: u16,
    without: u16,
}

const HTTP_AND_TLS: &[ServerPort] =
    &[ServerPort { scheme: "http", with: 8081, without: 9081 }, ServerPort { scheme: "https", with: 8443, without: 9443 }];

const SERVERS: [Server; 3] = [
    Server {
        name: "nginx",
        program: "nginx",
        backend: 11,
        version: "v2",
        start: "start_nginx_with_headers",
        ports: HTTP_AND_TLS,
    },
    Server {
        name: "haproxy",
        program: "haproxy",
        backend: 12,
        version: "v1",
        start: "start_haproxy_with_headers",
        ports: HTTP_AND_TLS,
    },
    Server {
        name: "postfix",
        program: "postfix",
        backend: 13,
        version: "v2",
        start: "start_postfix_with_headers",
        ports: &[ServerPort { scheme: "smtp", with: 2525, without: 2526 }],
    },
];

impl Server {
    /// Its VIPs, by its position.
    fn vips(&self) -> [String; 2] {
        [format!("192.0.2.{}", 100 + self.backend), format!("2001:db8::1:{}", self.backend)]
    }

    /// Its Service, whose ports have the numbers of their target ports, with more annotations.
    fn service(&self, annotations: &str) -> String {
        let all: Vec<_> = self.ports.iter().flat_map(|port| [port.with, port.without]).collect();
        let with: Vec<_> = self.ports.iter().map(|port| port.with.to_string()).collect();
        let annotations = format!(
            "sluice.dev/proxy-protocol: {}, sluice.dev/proxy-protocol-ports: '{}', {annotations}",
            self.version,
            with.join(",")
        );
        dual_stack_service(&Manifest {
            name: self.name,
            vips: self.vips(),
            protocol: "TCP",
            ports: &all,
            backend: self.backend,
            annotations: &annotations,
        })
    }

    /// The lines of its log about one port, as "ADDRESS".
    fn logged(&self, edge: &Edge, port: u16) -> Vec<String> {
        let text = fs::read_to_string(edge.path(&format!("b{}/log", self.backend))).unwrap_or_default();
        let of_line = |line: &str| -> Option<String> {
            if self.name == "postfix" {
                let (_, address) = line.split_once("connect from unknown[")?;
                let is_of_port = line.contains(&format!("postfix/{port}/")) && !line.contains("disconnect");
                return is_of_port.then(|| address.split(']').next().unwrap_or_default().to_owned());
            }
            let mut words = line.split(' ');
            let address = words.next()?;
            (words.next() == Some(&port.to_string())).then(|| address.to_owned())
        };
        text.lines().filter_map(of_line).collect()
    }
}

struct Manifest<'a> {
    name: &'a str,
    vips: [String; 2],
    protocol: &'a str,
    ports: &'a [u16],
    backend: u8,
    annotations: &'a str,
}

/// A dual-stack Service of one backend, whose ports have the numbers of their target ports.
fn dual_stack_service(manifest: &Manifest<'_>) -> String {
    let Manifest { name, vips, protocol, ports, backend, annotations } = manifest;
    let ports = |entry: &dyn Fn(u16) -> String| ports.iter().map(|port| entry(*port)).collect::<Vec<_>>().join(", ");
    let mut text = format!(
        "---
apiVersion: v1
kind: Service
metadata:
  namespace: demo
  name: {name}
  annotations: {{sluice.dev/addresses: '{}', {annotations}}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
  ports: [{}]
",
        vips.join(","),
        ports(&|port| format!("{{name: p{port}, port: {port}, protocol: {protocol}}}"))
    );
    for (family, address) in [(4, format!("10.0.0.{backend}")), (6, format!("fd00::{backend}"))] {
        write!(
            text,
            "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: {name}-{family}, labels: {{kubernetes.io/service-name: {name}}}}}
addressType: IPv{family}
ports: [{}]
endpoints: [{{addresses: ['{address}']}}]
",
            ports(&|port| format!("{{name: p{port}, port: {port}, protocol: {protocol}}}"))
        )
        .unwrap();
    }
    text
}

/// The gateway between a router with a client and the servers that are installed.
struct Bed {
    edge: Edge,
    servers: Vec<Server>,
}

impl Bed {
    fn new(test: &str, name: &str) -> Option<Self> {
        let edge = Edge::with_af_packet(test, name)?;
        let is_installed = |server: &Server| {
            let found = ["/usr/sbin", "/usr/bin"].iter().any(|folder| Path::new(folder).join(server.program).exists());
            if !found {
                let program = server.program;
                skip(&format!("{test}: {program}"), &format!("no {program} here (Debian: apt-get install {program})"));
            }
            found
        };
        let servers: Vec<_> = SERVERS.into_iter().filter(is_installed).collect();
        let start: Vec<_> = servers.iter().map(|server| server.start).collect();
        // Its end stops servers that have started, also when a later one does not start.
        let bed = Self { edge, servers };
        bed.edge.script(&format!(
            "set -e; . tests/edge/router.sh; . tests/edge/proxy_servers.sh; make_router 1500; {}",
            start.join("; ")
        ));
        Some(bed)
    }

    /// Starts the gateway with one manifest of all Services.
    fn start(&mut self, manifest: &str) {
        self.edge.write_manifest("all.yaml", manifest);
        self.edge.start();
        self.edge.script(". tests/edge/router.sh; route_to_router 192.0.2.1 2001:db8::1");
    }

    /// Loses this share of the packets in each direction: one half at each hop.
    fn lose(&self, percent: u32) {
        self.edge.script(&format!("set -e; . tests/edge/proxy_servers.sh; lose {}", percent * 10 / 2));
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.edge.script(". tests/edge/proxy_servers.sh; stop_proxy_servers");
    }
}

/// How much is sent at a rate of loss.
#[derive(Clone, Copy)]
struct Load {
    loss_percent: u32,
    connections: usize,
    bytes: usize,
}

fn loads() -> [Load; 4] {
    let wanted: Option<usize> = std::env::var("SLUICE_PROXY_CONNECTIONS").ok().map(|text| text.parse().unwrap());
    [(0, 3, 200_000), (1, 3, 200_000), (5, 3, 50_000), (20, 2, 5_000)].map(|(loss_percent, connections, bytes)| Load {
        loss_percent,
        connections: wanted.unwrap_or(connections),
        bytes: if wanted.is_some() { 1_000_000 } else { bytes },
    })
}

/// One connection of the client: what it sends, as a file of this name, and what it gets, by curl.
fn connection(edge: &Edge, scheme: &str, vip: &str, port: u16, name: &str) -> Child {
    let host = if vip.contains(':') { format!("[{vip}]") } else { vip.to_owned() };
    let file = edge.path("payload");
    let file = file.to_str().unwrap();
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &edge.namespace("client"), "curl", "-sgk", "--max-time", CONNECTION_S]);
    let written = "%{http_code} %{num_connects} %{size_upload} %{size_download} %{exitcode}\\n";
    match scheme {
        "smtp" => {
            command.args(["--mail-from", "a@example", "--mail-rcpt", "b@example", "-T", file, "-w", written]);
            command.arg(format!("smtp://{host}:{port}"));
        }
        _ => {
            command.args(["-T", file, "-o", "/dev/null", "-w", written, &format!("{scheme}://{host}:{port}/up/{name}")]);
            command.args(["--next", "-sgk", "--max-time", CONNECTION_S, "-o", "/dev/null", "-w", written]);
            command.arg(format!("{scheme}://{host}:{port}/file"));
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// What curl writes of a connection that ends well.
fn expected(scheme: &str, bytes: usize) -> Vec<String> {
    match scheme {
        "smtp" => vec![format!("250 1 {bytes} 0 0")],
        // The second request goes by the same connection.
        _ => vec![format!("201 1 {bytes} 0 0"), format!("200 0 0 {bytes} 0")],
    }
}

/// The connections to one port in both families, with what is expected of each.
struct Opened {
    server: &'static str,
    what: String,
    expected: Vec<String>,
    child: Child,
}

/// A failed test ends its clients, too.
impl Drop for Opened {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The end of the log of a server, for a message.
fn log_end(bed: &Bed, server: &str) -> String {
    let backend = SERVERS.iter().find(|known| known.name == server).map_or(0, |known| known.backend);
    let text = fs::read_to_string(bed.edge.path(&format!("b{backend}/log"))).unwrap_or_default();
    let lines: Vec<_> = text.lines().rev().take(40).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

/// Opens all connections of a load, with and without headers, and waits until each has ended as expected.
fn assert_connections_end_well(bed: &Bed, load: Load) {
    let Load { loss_percent, connections, bytes } = load;
    let mut opened = Vec::new();
    for server in &bed.servers {
        for port in server.ports {
            for (number, vip) in [port.with, port.without].into_iter().flat_map(|n| server.vips().map(|vip| (n, vip))) {
                let what = format!("{} {vip} port {number}, {loss_percent} % lost", server.name);
                // A server answers otherwise when it has a file of the name.
                let name = |n: usize| format!("{number}-{}-{loss_percent}-{n}", vip.len());
                let each = (0..connections).map(|n| Opened {
                    server: server.name,
                    what: what.clone(),
                    expected: expected(port.scheme, bytes),
                    child: connection(&bed.edge, port.scheme, &vip, number, &name(n)),
                });
                opened.extend(each);
            }
        }
    }
    for mut one in opened {
        let text = std::io::read_to_string(one.child.stdout.take().unwrap()).unwrap();
        let lines: Vec<_> = text.lines().map(|line| line.replace(" 2.0.0", "")).collect();
        let (status, drops, what) = (one.child.wait().unwrap(), bed.edge.drops(), &one.what);
        assert_eq!(lines, one.expected, "{what}: {status}; drops {drops:?}; the server's log:\n{}", log_end(bed, one.server));
    }
}

/// Every line that a server has logged since `before` is of the client, or of the gateway where no header is sent.
fn assert_logged(bed: &Bed, lines_of_connection: impl Fn(&Server) -> usize, total: usize) {
    for server in &bed.servers {
        for port in server.ports {
            for (number, addresses) in [(port.with, CLIENT), (port.without, GATEWAY)] {
                let wanted = total * lines_of_connection(server);
                let count = |logged: &[String], address: &str| logged.iter().filter(|found| *found == address).count();
                let what = format!("{} has logged {wanted} lines of each of {addresses:?} for port {number}", server.name);
                let mut last = Vec::new();
                until(&what, || {
                    let logged = server.logged(&bed.edge, number);
                    let others: Vec<_> = logged.iter().filter(|found| !addresses.contains(&found.as_str())).collect();
                    assert!(others.is_empty(), "{what}: {others:?}");
                    let counts = addresses.map(|address| count(&logged, address));
                    if last != counts {
                        println!("{what}: {counts:?}");
                        last = counts.into();
                    }
                    counts.iter().all(|count| *count == wanted).then_some(())
                });
            }
        }
    }
}

#[test]
fn connections_with_headers_end_as_those_without_and_servers_log_the_client() {
    let test = "PROXY headers under loss";
    let Some(mut bed) = Bed::new(test, "prxloss") else { return };
    // Probes are lost, too.
    let manifests: Vec<_> = bed.servers.iter().map(|server| server.service("sluice.dev/health-check: none")).collect();
    bed.start(&manifests.concat());
    let mut total = 0;
    for load in loads() {
        let payload: Vec<u8> = b"0123456789 abcdefghijklmnopqrstuvwxyz\r\n".iter().copied().cycle().take(load.bytes).collect();
        for place in ["payload", "b11/files/file", "b12/files/file"] {
            let _ = fs::write(bed.edge.path(place), &payload);
        }
        bed.lose(load.loss_percent);
        let start = std::time::Instant::now();
        assert_connections_end_well(&bed, load);
        total += load.connections;
        println!("{} % lost: {} connections a port in {:?}", load.loss_percent, load.connections, start.elapsed());
    }
    bed.lose(0);
    assert_logged(&bed, |server| if server.name == "postfix" { 1 } else { 2 }, total);
    for server in ["b11", "b12"] {
        let errors = fs::read_to_string(bed.edge.path(&format!("{server}/error.log"))).unwrap_or_default();
        assert!(!errors.contains("broken header"), "{errors}");
    }
    bed.edge.assert_account();
}

/// The port at which the UDP server expects a header, and the one at which it does not.
const DATAGRAM_PORTS: [u16; 2] = [9700, 9701];
const DATAGRAM_VIPS: [&str; 2] = ["192.0.2.118", "2001:db8::1:18"];

/// Sends a datagram until it is answered.
fn ask(socket: &UdpSocket, payload: &str) -> String {
    let mut buffer = [0; 2048];
    until(&format!("an answer to {payload}"), || {
        socket.send(payload.as_bytes()).unwrap();
        let length = socket.recv(&mut buffer).ok()?;
        let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
        // An answer to an earlier copy may come late.
        answer.ends_with(payload).then_some(answer)
    })
}

#[test]
fn each_datagram_has_a_header() {
    let Some(mut bed) = Bed::new("PROXY headers of datagrams", "prxudp") else { return };
    let ports = DATAGRAM_PORTS.map(|port| port.to_string());
    let _server: Program = bed.edge.start_script("b11", "proxy_datagrams.py", &ports.each_ref().map(String::as_str));
    bed.start(&dual_stack_service(&Manifest {
        name: "dns",
        vips: DATAGRAM_VIPS.map(str::to_owned),
        protocol: "UDP",
        ports: &DATAGRAM_PORTS,
        backend: 11,
        annotations: "sluice.dev/proxy-protocol: v2, sluice.dev/proxy-protocol-ports: 'p9700'",
    }));
    for Load { loss_percent, .. } in loads() {
        bed.lose(loss_percent);
        for (family, vip) in DATAGRAM_VIPS.into_iter().enumerate() {
            for (port, sees_client) in DATAGRAM_PORTS.into_iter().zip([true, false]) {
                let any = if family == 0 { "0.0.0.0:0" } else { "[::]:0" };
                let socket = bed.edge.in_namespace("client", || UdpSocket::bind(any).unwrap());
                socket.connect((vip, port)).unwrap();
                socket.set_read_timeout(Some(DATAGRAM_WAIT)).unwrap();
                let own = format!("{} {} ", CLIENT[family], socket.local_addr().unwrap().port());
                let seen = if sees_client { own } else { format!("{} ", GATEWAY[family]) };
                for n in 0..20 {
                    let answer = ask(&socket, &format!("request {n} of {loss_percent}"));
                    assert!(answer.starts_with(&seen), "{vip} port {port}: {answer:?}, expected {seen:?}");
                }
            }
        }
    }
    bed.edge.assert_account();
}

/// Probes with headers pass where servers expect them, and those without fail: of HTTP and TLS.
#[test]
fn probes_send_the_header_that_their_port_expects() {
    let Some(mut bed) = Bed::new("probes with PROXY headers", "prxprobe") else { return };
    let mut manifests = String::new();
    let mut probed = Vec::new();
    for server in &bed.servers {
        for (n, port) in (0..).zip(server.ports) {
            let check = match port.scheme {
                "smtp" => "tcp",
                other => other,
            };
            for (header, offset) in [(true, 0), (false, 6)] {
                let name = format!("{}-{}-{}", server.name, port.scheme, if header { "with" } else { "without" });
                let version = server.version;
                let of_header = if header { format!("sluice.dev/proxy-protocol: {version}, ") } else { String::new() };
                let last = (server.backend - 11) * 2 + n + offset;
                manifests += &dual_stack_service(&Manifest {
                    name: &name,
                    vips: [format!("192.0.2.{}", 105 + last), format!("2001:db8::1:{}", 30 + last)],
                    protocol: "TCP",
                    ports: &[port.with],
                    backend: server.backend,
                    annotations: &format!(
                        "{of_header}sluice.dev/health-check: {check}, sluice.dev/health-check-status: '200-499', \
                         sluice.dev/health-check-interval: 200ms, sluice.dev/health-check-timeout: 2s"
                    ),
                });
                // A TCP probe learns nothing of what the server thinks of it.
                let passes = header || check == "tcp";
                probed.push((name, passes));
            }
        }
    }
    bed.start(&manifests);
    for (name, passes) in &probed {
        let expected = if *passes { 2 } else { 0 };
        let service = format!("demo/{name}");
        until(&format!("{name} has {expected} healthy backends"), || {
            bed.edge.healthy(&service).filter(|healthy| *healthy == expected)
        });
    }
    until("haproxy logs a probe by the address of the gateway", || {
        let text = fs::read_to_string(bed.edge.path("b12/log")).unwrap_or_default();
        let is_there = !bed.servers.iter().any(|server| server.name == "haproxy");
        (is_there || text.lines().any(|line| line.starts_with("10.0.0.2 8081 GET"))).then_some(())
    });
    bed.edge.assert_account();
}

/// Sends a line of a protocol, and reads until `end` has come.
fn exchange(stream: &mut TcpStream, line: &str, end: &str) {
    stream.write_all(line.as_bytes()).unwrap();
    let mut text = String::new();
    while !text.contains(end) {
        let mut buffer = [0; 4096];
        let length = stream.read(&mut buffer).unwrap();
        assert_ne!(length, 0, "closed after {text:?}");
        text.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
}

/// Numbers stay shifted over a restart: one connection has exchanged data, the other has only heard the server.
#[test]
fn connections_with_headers_outlive_a_restart_of_the_gateway() {
    let Some(mut bed) = Bed::new("PROXY headers over a restart", "prxrest") else { return };
    let manifests: Vec<_> = bed.servers.iter().map(|server| server.service("sluice.dev/health-check: none")).collect();
    bed.start(&manifests.concat());
    for place in ["b11/files/file", "b12/files/file"] {
        let _ = fs::write(bed.edge.path(place), "of the file\n");
    }
    let ask_file = "GET /file HTTP/1.1\r\nHost: shop\r\n\r\n";
    let mut connections = Vec::new();
    for server in &bed.servers {
        let port = server.ports[0].with;
        for vip in server.vips() {
            let address = SocketAddr::new(vip.parse().unwrap(), port);
            let mut stream = bed.edge.in_namespace("client", || TcpStream::connect_timeout(&address, edge::DEADLINE)).unwrap();
            stream.set_read_timeout(Some(edge::DEADLINE)).unwrap();
            let (line, end) = match server.name {
                "postfix" => ("EHLO shop\r\n", "250 "),
                _ => (ask_file, "of the file\n"),
            };
            if server.name == "postfix" {
                exchange(&mut stream, "", "220 ");
            } else {
                exchange(&mut stream, line, end);
            }
            connections.push((stream, line, end));
        }
    }
    let flows = || {
        let call = async |mut client: proto::v1::admin_client::AdminClient<_>| {
            Some(client.list_flows(proto::v1::ListFlowsRequest::default()).await.ok()?.into_inner().flows)
        };
        bed.edge.admin(call).unwrap_or_default()
    };
    let taken = |flows: &[proto::v1::FlowStatus]| {
        let of_v2 = flows.iter().filter(|flow| flow.proxy_header == "taken" && [28, 52].contains(&flow.shift)).count();
        (of_v2, flows.iter().filter(|flow| flow.proxy_header == "taken").count())
    };
    let version_2 = 2 * bed.servers.iter().filter(|server| server.version == "v2").count();
    until("every header is taken", || {
        let (of_v2, all) = taken(&flows());
        (of_v2 >= version_2 && all == connections.len()).then_some(())
    });
    assert_eq!(bed.edge.stop(false), Some(0), "{}", bed.edge.log());
    bed.edge.start();
    bed.edge.script(". tests/edge/router.sh; route_to_router 192.0.2.1 2001:db8::1");
    for (mut stream, line, end) in connections {
        exchange(&mut stream, line, end);
    }
    bed.edge.assert_account();
}
