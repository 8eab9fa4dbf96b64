//! The Services of these tests, and traffic to them.

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use crate::edge::peers::Connection;
use crate::edge::{Edge, until};

/// The port of the echo servers.
const ECHO: u16 = 7777;
/// Addresses of the Service `echo`.
const VIPS: [&str; 2] = ["192.0.2.110", "2001:db8::1:10"];

/// A Service of both families with TCP and UDP.
const SERVICE: &str = "apiVersion: v1
kind: Service
metadata:
  namespace: demo
  name: echo
  annotations: {sluice.dev/addresses: '192.0.2.110,2001:db8::1:10', sluice.dev/health-check: none}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
  ports: [{name: tcp, port: 7777, protocol: TCP}, {name: udp, port: 7777, protocol: UDP}]
";

/// An iperf3 server behind a VIP. It has one backend because iperf3's connections belong together.
const IPERF: &str = "apiVersion: v1
kind: Service
metadata: {namespace: demo, name: iperf, annotations: {sluice.dev/addresses: 192.0.2.111, sluice.dev/health-check: none}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ports: [{name: tcp, port: 5201, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: demo, name: iperf-1, labels: {kubernetes.io/service-name: iperf}}
addressType: IPv4
ports: [{name: tcp, port: 5201, protocol: TCP}]
endpoints: [{addresses: [10.0.0.11]}]
";

/// Writes the Services, and starts their servers.
pub(crate) fn serve(edge: &Edge) {
    let slice = |family: u8, prefix: &str| {
        format!(
            "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: echo-{family}, labels: {{kubernetes.io/service-name: echo}}}}
addressType: IPv{family}
ports: [{{name: tcp, port: 7777, protocol: TCP}}, {{name: udp, port: 7777, protocol: UDP}}]
endpoints: [{{addresses: ['{prefix}11']}}, {{addresses: ['{prefix}12']}}, {{addresses: ['{prefix}13']}}]
"
        )
    };
    edge.write_demo_manifests();
    edge.write_manifest("iperf.yaml", IPERF);
    edge.write_manifest("echo.yaml", &format!("{SERVICE}{}{}", slice(4, "10.0.0."), slice(6, "fd00::")));
    for server in ["b11", "b12", "b13"] {
        edge.echo_server_at(server, "::", ECHO);
    }
}

/// Starts the gateway, and waits until its Services answer.
pub(crate) fn start(edge: &mut Edge) {
    edge.start();
    until("the Service has its backends", || edge.healthy("demo/echo").filter(|n| *n == 12));
    until("the web servers are found healthy", || edge.healthy("demo/web").filter(|n| *n == 6));
}

/// Connections to the echo servers, over both families.
pub(crate) fn connections(edge: &Edge, count: usize) -> Vec<Connection> {
    let address = |n: usize| SocketAddr::new(VIPS[n % 2].parse().unwrap(), ECHO).to_string();
    (0..count).map(|n| until("a connection", || edge.connect(&address(n)))).collect()
}

pub(crate) fn assert_alive(connections: &mut [Connection], line: &str) {
    connections.iter_mut().for_each(|connection| connection.assert_alive(line));
}

/// Begins `count` flows of each of IPv4 and IPv6 with TCP and UDP, from ports of their own.
pub(crate) fn begin_flows(edge: &Edge, count: usize) {
    edge.in_namespace("client", || {
        for (vip, any) in VIPS.into_iter().zip(["0.0.0.0:0", "[::]:0"]) {
            let to = SocketAddr::new(vip.parse().unwrap(), ECHO);
            for _ in 0..count {
                UdpSocket::bind(any).unwrap().send_to(b"datagram", to).unwrap();
                drop(TcpStream::connect_timeout(&to, Duration::from_secs(20)));
            }
        }
    });
}

/// Moves `megabytes` from the client to a server, and as many back, by four connections each time.
pub(crate) fn stream(edge: &Edge, megabytes: u32) {
    let _server = edge.start_program("b11", &["iperf3", "-s", "--forceflush"]);
    let bytes = format!("{megabytes}M");
    for direction in [&[][..], &["-R"]] {
        let command = ["iperf3", "-c", "192.0.2.111", "-P", "4", "-J", "--connect-timeout", "60000", "-n", &bytes];
        let output = edge.run("client", &[&command, direction].concat());
        assert!(output.status.success(), "{direction:?}: {}", String::from_utf8_lossy(&output.stdout));
    }
}
