//! Each mode with real clients and servers in both families: which server answers, and which client address it sees.
//! The kernel of a test may lack tunnel devices, so `edge/tunnel_end.py` decapsulates on the nodes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use edge::{Edge, Program, node_manifest, until};

const VIP: &str = "192.0.2.110";
const VIP_V6: &str = "2001:db8::1:10";
const CLIENT: &str = "192.0.2.10";
const CLIENT_V6: &str = "2001:db8::10";

/// The demo's servers as a Service of this mode, at the VIPs of this test. Clients connect to `port`.
fn endpoints(mode: &str, port: u16) -> String {
    let slice = |family: u8, addresses: &str| {
        format!(
            "---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{namespace: demo, name: web-{family}, labels: {{kubernetes.io/service-name: web}}}}
addressType: IPv{family}
ports: [{{name: http, protocol: TCP, port: 8080}}, {{name: echo, protocol: TCP, port: 9000}}]
endpoints: [{addresses}]
"
        )
    };
    let v4 = [11, 12, 13].map(|n| format!("{{addresses: [10.0.0.{n}]}}")).join(", ");
    let v6 = [11, 12, 13].map(|n| format!("{{addresses: ['fd00::{n}']}}")).join(", ");
    format!("{}{}{}", service(mode, "endpoint", "RequireDualStack", "[IPv4, IPv6]", port), slice(4, &v4), slice(6, &v6))
}

fn service(mode: &str, target: &str, policy: &str, families: &str, port: u16) -> String {
    let addresses = match families {
        "[IPv4]" => VIP.to_owned(),
        "[IPv6]" => VIP_V6.to_owned(),
        _ => format!("{VIP},{VIP_V6}"),
    };
    format!(
        "apiVersion: v1
kind: Service
metadata:
  namespace: demo
  name: web
  annotations: {{sluice.dev/mode: {mode}, sluice.dev/target: {target}, sluice.dev/addresses: '{addresses}'}}
spec:
  type: LoadBalancer
  loadBalancerClass: sluice.dev/gateway
  ipFamilyPolicy: {policy}
  ipFamilies: {families}
  ports:
    - {{name: http, port: {port}, targetPort: 8080}}
    - {{name: echo, port: 9000}}
"
    )
}

/// Three Nodes. Each has this address with its number in place of `N`.
fn nodes(address: &str) -> String {
    [11, 12, 13].map(|n| node_manifest(&format!("node-{n}"), &address.replace('N', &n.to_string()))).concat()
}

/// A client reaches every server at `address`, and the servers see the client's address.
fn assert_served(edge: &Edge, address: &str, client: &str) {
    let url = format!("http://{address}/");
    until("the first answer", || edge.curl(&url));
    edge.assert_all_servers_answer(&url);
    let seen = edge.curl(&format!("{url}client")).expect("an answer");
    assert_eq!(seen, client, "the address that the server sees");
}

/// Full-sized segments reach the server, which returns them.
fn assert_full_segments_pass(edge: &Edge) {
    let mut connection = edge.connect(&format!("{VIP}:9000")).expect("a connection");
    connection.assert_alive(&"x".repeat(50_000));
}

/// Probes detect a running server that clients' packets no longer reach, while the other servers stay healthy, and
/// detect its recovery. No request fails before, meanwhile or afterwards.
fn assert_probes_detect_a_lost_server(edge: &Edge, fail: impl FnOnce(), recover: impl FnOnce()) {
    // Each server counts for two ports in two families, except port 9000 over IPv6: nothing listens there, and the
    // server itself refuses a probe to the VIP.
    let healthy = |count: usize| until("the probes agree", || edge.healthy("demo/web").filter(|found| *found == count));
    healthy(9);
    fail();
    healthy(6);
    for url in [format!("http://{VIP}:8080/"), format!("http://[{VIP_V6}]:8080/")] {
        for n in 0..20 {
            let server = edge.curl(&url).unwrap_or_else(|| panic!("{url}: request {n} failed; drops {:?}", edge.drops()));
            assert_ne!(server, "b12");
        }
    }
    assert_eq!(edge.healthy("demo/web"), Some(6), "the other servers pass their probes");
    recover();
    healthy(9);
    edge.assert_all_servers_answer(&format!("http://{VIP}:8080/"));
}

/// Starts a tunnel end on each node.
fn tunnel_ends(edge: &Edge) -> Vec<Program> {
    edge.script(". tests/edge/direct.sh; for n in 11 12 13; do make_tunnel_device $n; done");
    ["b11", "b12", "b13"].map(|node| tunnel_end(edge, node)).into()
}

fn tunnel_end(edge: &Edge, node: &str) -> Program {
    edge.start_script(node, "tunnel_end.py", &["tunnel0"])
}

#[test]
fn dnat_keeps_the_client_address_and_replies_return_through_the_gateway() {
    let Some(mut edge) = Edge::with_echo_servers("mode dnat end to end", "dna", 9000) else { return };
    edge.script(
        "for n in 11 12 13; do in_ns b$n ip route add default via 10.0.0.2; in_ns b$n ip -6 route add default via fd00::2; done",
    );
    edge.write_manifest("web.yaml", &endpoints("dnat", 80));
    edge.start();
    assert_served(&edge, VIP, CLIENT);
    assert_served(&edge, &format!("[{VIP_V6}]"), CLIENT_V6);
    assert_full_segments_pass(&edge);
    edge.assert_account();
}

#[test]
fn dsr_reaches_on_link_servers_that_reply_directly_to_the_client() {
    let Some(mut edge) = Edge::with_echo_servers("mode dsr end to end", "dsr", 9000) else { return };
    edge.script(&format!(". tests/edge/direct.sh; make_direct {VIP} {VIP_V6}"));
    edge.write_manifest("web.yaml", &endpoints("dsr", 8080));
    edge.start();
    assert_served(&edge, &format!("{VIP}:8080"), CLIENT);
    assert_served(&edge, &format!("[{VIP_V6}]:8080"), CLIENT_V6);
    assert_full_segments_pass(&edge);
    let b12 = |what: &str| edge.script(&format!(". tests/edge/direct.sh; {what}_vips 12 {VIP} {VIP_V6}"));
    assert_probes_detect_a_lost_server(&edge, || drop(b12("leave")), || drop(b12("take")));
    // Without a route to the VIP Linux cannot probe. Backends do not count as failed for that.
    edge.script("in_ns gw ip route del 192.0.2.0/24 dev uplink");
    until("the log says why", || edge.log().contains("no route to the VIP").then_some(()));
    assert_eq!(edge.healthy("demo/web"), Some(9));
    edge.assert_account();
}

/// Tests a tunnel mode, first with endpoints of the VIP's family, then with Nodes that only have addresses of the other
/// one.
fn test_tunnel_mode(test: &str, name: &str, mode: &str) {
    let Some(mut edge) = Edge::with_echo_servers(test, name, 9000) else { return };
    edge.script(&format!(". tests/edge/direct.sh; make_direct {VIP} {VIP_V6}"));
    let mut ends = tunnel_ends(&edge);
    edge.write_manifest("web.yaml", &endpoints(mode, 8080));
    edge.start();
    assert_served(&edge, &format!("{VIP}:8080"), CLIENT);
    assert_served(&edge, &format!("[{VIP_V6}]:8080"), CLIENT_V6);
    assert_full_segments_pass(&edge);
    let end = std::cell::RefCell::new(&mut ends[1]);
    assert_probes_detect_a_lost_server(&edge, || end.borrow_mut().end(), || **end.borrow_mut() = tunnel_end(&edge, "b12"));
    let other_family =
        [("[IPv4]", "fd00::N", format!("{VIP}:8080"), CLIENT), ("[IPv6]", "10.0.0.N", format!("[{VIP_V6}]:8080"), CLIENT_V6)];
    for (families, node, address, client) in other_family {
        let manifest = service(mode, "node", "SingleStack", families, 8080) + &nodes(node);
        edge.write_manifest("web.yaml", &manifest);
        until("the nodes are the backends", || edge.service("web").filter(|s| s.reason.is_empty() && s.target == "node"));
        assert_served(&edge, &address, client);
    }
    let encapsulations: Vec<_> = (0..4).map(|_| ends[0].line()).collect();
    for pair in ["4in4", "6in6", "4in6", "6in4"] {
        assert!(encapsulations.contains(&format!("{mode}-{pair}")), "{pair} is not among {encapsulations:?}");
    }
    edge.assert_account();
}

#[test]
fn ipip_reaches_servers_of_all_four_family_pairs() {
    test_tunnel_mode("mode ipip end to end", "ipi", "ipip");
}

#[test]
fn gue_reaches_servers_of_all_four_family_pairs() {
    test_tunnel_mode("mode gue end to end", "gue", "gue");
}
