//! Manifests are edited, broken and deleted while the gateway runs, and existing connections survive.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::BTreeSet;

use edge::peers::request;
use edge::{Edge, ServiceManifest, until};
use proto::v1::ListBackendsRequest;
use proto::v1::admin_client::AdminClient;

const WEB: &str = "http://192.0.2.100/";
/// VIP of the Service that each test creates; the demo's Services never get it.
const ADDRESS: &str = "192.0.2.110";

/// A Service at [`ADDRESS`] with this line in its spec and servers on port 9000.
fn echo(protocol: &str, spec: &str, servers: &[u8]) -> String {
    ServiceManifest { name: "echo", address: ADDRESS, protocols: &[protocol], spec, servers, ..ServiceManifest::default() }.yaml()
}

fn address() -> String {
    format!("{ADDRESS}:90")
}

/// Backends that their Services no longer list, with their numbers of flows.
fn removed_backends(edge: &Edge) -> Option<Vec<(String, u64)>> {
    let call = async |mut client: AdminClient<_>| client.list_backends(ListBackendsRequest::default()).await.ok();
    let backends = edge.admin(call)?.into_inner().backends.into_iter();
    Some(backends.filter(|backend| backend.state == "removed").map(|backend| (backend.address, backend.flows)).collect())
}

#[test]
fn connections_survive_changes_of_the_endpoints() {
    let Some(mut edge) = Edge::with_af_packet("endpoints that come and go", "end") else { return };
    for server in ["b11", "b12"] {
        edge.echo_server(server, 9000);
    }
    edge.write_manifest("echo.yaml", &echo("TCP", "", &[11]));
    edge.start();
    let mut old = until("the first connection", || edge.connect(&address()));
    assert_eq!(old.server, "b11");
    edge.write_manifest("echo.yaml", &echo("TCP", "", &[11, 12]));
    let mut added = until("the new endpoint is used", || edge.connect(&address()).filter(|c| c.server == "b12"));
    old.assert_alive("after an endpoint was added");
    edge.write_manifest("echo.yaml", &echo("TCP", "", &[12]));
    until("the endpoint is gone", || edge.service("echo").filter(|service| service.backends == 1));
    for _ in 0..20 {
        assert_eq!(edge.connect(&address()).unwrap().server, "b12");
    }
    old.assert_alive("after its own endpoint was removed");
    until("its flow is shown", || removed_backends(&edge).filter(|removed| removed == &[("10.0.0.11:9000".to_owned(), 1)]));
    added.assert_alive("after another endpoint was removed");
    edge.assert_account();
}

#[test]
fn an_invalid_manifest_is_logged_and_its_last_valid_content_stays_in_use() {
    let Some(mut edge) = Edge::with_af_packet("broken manifests", "yam") else { return };
    edge.write_demo_manifests();
    edge.start();
    until("the first answer", || edge.curl(WEB));
    edge.write_manifest("web.yaml", "kind: Service\nmetadata: [oops\n");
    let line =
        until("the file is named in the log", || edge.log().lines().find(|line| line.contains("web.yaml")).map(str::to_owned));
    assert!(line.contains("WARN") && line.contains("line "), "{line}");
    for _ in 0..20 {
        edge.curl(WEB).expect("the last valid content is served");
    }
    edge.write_manifest("echo.yaml", &echo("TCP", "", &[11]));
    until("other files are still read", || edge.service("echo"));
    assert!(edge.curl(WEB).is_some(), "the broken file does not affect other files");
    edge.assert_account();
}

#[test]
fn a_deleted_service_no_longer_answers() {
    let Some(mut edge) = Edge::with_af_packet("a deleted service", "del") else { return };
    edge.echo_server("b11", 9000);
    edge.write_manifest("echo.yaml", &echo("TCP", "", &[11]));
    edge.write_demo_manifests();
    edge.start();
    until("the first connection", || edge.connect(&address()));
    std::fs::remove_file(edge.path("manifests/echo.yaml")).unwrap();
    until("the Service is gone", || edge.service("echo").is_none().then_some(()));
    // A client with a neighbour entry for the VIP, and one that sends ARP requests.
    edge.script(&format!(
        "in_ns client ip neigh replace {ADDRESS} lladdr $(in_ns gw cat /sys/class/net/uplink/address) dev eth0"
    ));
    assert!(edge.connect(&address()).is_none(), "no server answers");
    assert!(edge.drops().iter().any(|(reason, _)| reason == "unknown_vip"), "{:?}", edge.drops());
    edge.script(&format!("in_ns client ip neigh del {ADDRESS} dev eth0"));
    let arping = edge.run("client", &["arping", "-c", "2", "-w", "2", "-I", "eth0", ADDRESS]);
    assert!(!arping.status.success(), "no ARP reply for the address: {}", String::from_utf8_lossy(&arping.stdout));
    assert!(edge.curl(WEB).is_some(), "other Services answer");
    edge.assert_account();
}

#[test]
fn a_service_with_unsupported_fields_is_refused_with_a_reason() {
    let Some(mut edge) = Edge::with_af_packet("unsupported fields", "uns") else { return };
    edge.echo_server("b11", 9000);
    edge.write_manifest("echo.yaml", &echo("TCP", "", &[11]));
    edge.start();
    until("the first connection", || edge.connect(&address()));
    let fields = ["externalTrafficPolicy: Nearby", "sessionAffinity: Cookie", "loadBalancerSourceRanges: [192.0.2.0/40]"];
    for field in fields {
        edge.write_manifest("echo.yaml", &echo("TCP", field, &[11]));
        let status = until("the Service is refused", || edge.service("echo").filter(|service| !service.reason.is_empty()));
        assert_eq!(status.reason, "Refused", "{field}");
        let key = field.split(':').next().unwrap();
        assert!(status.message.contains(key), "{field}: {}", status.message);
        assert!(edge.connect(&address()).is_none(), "{field}: the Service still answers");
        edge.write_manifest("echo.yaml", &echo("TCP", "", &[11]));
        until("the Service answers again", || edge.connect(&address()));
    }
    edge.assert_account();
}

#[test]
fn datagrams_reach_every_server_and_replies_come_from_the_vip() {
    let Some(mut edge) = Edge::with_af_packet("UDP", "udp") else { return };
    for server in ["b11", "b12", "b13"] {
        edge.udp_echo_server(server, 9000);
    }
    edge.write_manifest("echo.yaml", &echo("UDP", "", &[11, 12, 13]));
    edge.start();
    let mut servers = BTreeSet::new();
    let sockets: Vec<_> = (0..60).map(|_| edge.udp(&address())).collect();
    until("the first answer", || request(&sockets[0], "are you there?"));
    for socket in &sockets {
        let answer = request(socket, "who?").expect("an answer");
        let (server, text) = answer.split_once(' ').unwrap();
        assert_eq!(text, "who?");
        assert!(request(socket, "again").unwrap().starts_with(server), "a socket keeps its server");
        servers.insert(server.to_owned());
    }
    assert_eq!(servers.len(), 3, "{servers:?}");
    edge.assert_account();
}
