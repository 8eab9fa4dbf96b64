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

/// Writes the Services, and starts their servers.
pub fn serve(edge: &Edge) {
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
    edge.write_manifest("echo.yaml", &format!("{SERVICE}{}{}", slice(4, "10.0.0."), slice(6, "fd00::")));
    for server in ["b11", "b12", "b13"] {
        edge.echo_server_at(server, "::", ECHO);
    }
}

/// Starts the gateway, and waits until its Services answer.
pub fn start(edge: &mut Edge) {
    edge.start();
    until("the Service has its backends", || edge.healthy("demo/echo").filter(|n| *n == 12));
    until("the web servers are found healthy", || edge.healthy("demo/web").filter(|n| *n == 6));
}

/// Connections to the echo servers, over both families.
pub fn connections(edge: &Edge, count: usize) -> Vec<Connection> {
    let address = |n: usize| SocketAddr::new(VIPS[n % 2].parse().unwrap(), ECHO).to_string();
    (0..count).map(|n| until("a connection", || edge.connect(&address(n)))).collect()
}

pub fn assert_alive(connections: &mut [Connection], line: &str) {
    connections.iter_mut().for_each(|connection| connection.assert_alive(line));
}

/// Begins `count` flows of each of IPv4 and IPv6 with TCP and UDP, from ports of their own.
pub fn begin_flows(edge: &Edge, count: usize) {
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
