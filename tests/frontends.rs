//! Traffic is counted by frontend: two ports of a Service that lead to one port of its backends, each at an external
//! address and at a node port, show their own packets, bytes and flows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::BTreeMap;

use edge::peers::request;
use edge::{Edge, ServiceManifest, until};
use proto::v1::{BackendStatus, FrontendStatus, ListBackendsRequest, ListServicesRequest};

/// An external address, to which clients have a route.
const VIP: &str = "203.0.113.10";
/// Each frontend with an address of it, and how many datagrams it gets from how many sockets.
const FRONTENDS: [(&str, &str, u64, u64); 4] = [
    ("udp 203.0.113.10:90", "203.0.113.10:90", 3, 1),
    ("udp 203.0.113.10:91", "203.0.113.10:91", 5, 2),
    ("udp node port 30090", "192.0.2.2:30090", 7, 3),
    ("udp node port 30091", "192.0.2.2:30091", 11, 1),
];
/// A datagram with its headers, and the answer, which begins with the name of the server.
const BYTES: [u64; 2] = [20 + 8 + 4, 20 + 8 + 4 + 4];

/// A Service with two ports, both on port 9000 of these servers.
fn service(servers: &[u8]) -> String {
    let ports = "ports: [{name: udp, port: 90, nodePort: 30090, protocol: UDP, targetPort: 9000}, \
                 {name: more, port: 91, nodePort: 30091, protocol: UDP, targetPort: 9000}]";
    let text = ServiceManifest { protocols: &["UDP"], servers, ..ServiceManifest::default() }.yaml();
    text.replace("type: LoadBalancer", &format!("type: NodePort\n  externalIPs: [{VIP}]"))
        .replace("loadBalancerClass: sluice.dev/gateway", ports)
        .replace("  ports: [{name: udp, port: 90, protocol: UDP, targetPort: 9000}]\n", "")
        .replace("ports: [{name: udp, port: 9000,", "ports: [{name: more, port: 9000, protocol: UDP}, {name: udp, port: 9000,")
        .replace("sluice.dev/addresses: 192.0.2.110", "sluice.dev/drain-timeout: 1s")
}

/// The frontends of the Service by name.
fn frontends(edge: &Edge) -> Option<BTreeMap<String, FrontendStatus>> {
    let list = async |mut client: proto::v1::admin_client::AdminClient<_>| {
        client.list_services(ListServicesRequest { counters: true }).await.ok()
    };
    let services = edge.admin(list)?.into_inner().services;
    let own = services.into_iter().find(|service| service.name == "own")?;
    Some(own.traffic.into_iter().map(|row| (row.frontend.clone(), row)).collect())
}

/// The backends of the Service.
fn backends(edge: &Edge) -> Option<Vec<BackendStatus>> {
    let list = async |mut client: proto::v1::admin_client::AdminClient<_>| {
        client.list_backends(ListBackendsRequest { counters: true, ..ListBackendsRequest::default() }).await.ok()
    };
    let backends = edge.admin(list)?.into_inner().backends;
    Some(backends.into_iter().filter(|backend| backend.service == "demo/own").collect())
}

/// Packets and bytes in both directions, and new flows.
fn counts(row: &FrontendStatus) -> [u64; 5] {
    [row.packets_to_backends, row.packets_to_clients, row.bytes_to_backends, row.bytes_to_clients, row.new_flows]
}

/// The same of all rows together.
fn sum(rows: impl Iterator<Item = [u64; 5]>) -> [u64; 5] {
    rows.fold([0; 5], |sum, row| std::array::from_fn(|at| sum[at] + row[at]))
}

/// The value of a series on /metrics.
fn metric(edge: &Edge, series: &str) -> Option<u64> {
    let output = edge.run("gw", &["curl", "-sf", "--max-time", edge::REQUEST_S, "http://127.0.0.1:9435/metrics"]);
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

#[test]
fn every_frontend_of_a_service_shows_its_own_traffic_and_keeps_it_when_a_backend_goes() {
    let Some(mut edge) = Edge::with_af_packet("traffic by frontend", "fro") else { return };
    edge.configure_af_packet("externalIPs: {allowed: [203.0.113.0/24]}");
    edge.run("client", &["ip", "route", "add", VIP, "via", "192.0.2.2"]);
    for server in ["b11", "b12", "b13"] {
        edge.udp_echo_server(server, 9000);
    }
    edge.write_manifest("own.yaml", &service(&[11, 12, 13]));
    edge.start();
    for (name, address, ..) in FRONTENDS {
        until(&format!("{name} answers"), || request(&edge.udp(address), "ask!"));
    }
    let before = until("every answer is counted", || {
        let rows = frontends(&edge)?;
        let is_complete = |row: &FrontendStatus| row.packets_to_backends > 0 && row.packets_to_backends == row.packets_to_clients;
        (rows.len() == FRONTENDS.len() && rows.values().all(is_complete)).then_some(rows)
    });
    for (_, address, datagrams, sockets) in FRONTENDS {
        let sockets: Vec<_> = (0..sockets).map(|_| edge.udp(address)).collect();
        for n in 0..datagrams {
            request(&sockets[usize::try_from(n).unwrap() % sockets.len()], "ask!").expect("an answer");
        }
    }
    // A client may have an answer shortly before it is counted.
    let answers = |rows: &BTreeMap<String, FrontendStatus>| rows.values().map(|row| row.packets_to_clients).sum::<u64>();
    let expected = answers(&before) + FRONTENDS.map(|(_, _, datagrams, _)| datagrams).iter().sum::<u64>();
    let after = until("every datagram is counted", || frontends(&edge).filter(|rows| answers(rows) >= expected));
    for (name, _, datagrams, sockets) in FRONTENDS {
        let (now, then) = (counts(&after[name]), counts(&before[name]));
        let [to_backends, to_clients] = BYTES.map(|bytes| bytes * datagrams);
        let expected = [datagrams, datagrams, to_backends, to_clients, sockets];
        assert_eq!(std::array::from_fn(|at| now[at] - then[at]), expected, "{name}");
        assert_eq!(after[name].port, if name.ends_with('1') { 91 } else { 90 }, "{name}");
    }
    let of_backends = |rows: Vec<BackendStatus>| {
        sum(rows
            .into_iter()
            .filter_map(|row| row.traffic)
            .map(|of| [of.packets_to_backend, of.packets_to_clients, of.bytes_to_backend, of.bytes_to_clients, of.new_flows]))
    };
    let all = sum(after.values().map(counts));
    assert_eq!(all, of_backends(backends(&edge).unwrap()), "the sum over frontends is that over backends");
    let series =
        r#"sluice_frontend_packets_total{service="demo/own",frontend="node port 30090",protocol="udp",direction="to_client"}"#;
    assert_eq!(metric(&edge, series), Some(after["udp node port 30090"].packets_to_clients));

    edge.write_manifest("own.yaml", &service(&[11]));
    until("two backends are gone", || backends(&edge).filter(|rows| rows.len() == 1));
    assert_eq!(sum(frontends(&edge).unwrap().values().map(counts)), all, "no total falls");
    edge.assert_account();
}
