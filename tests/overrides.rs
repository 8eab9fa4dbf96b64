//! Manual overrides, from the admin API to packets. A drained backend keeps its connections and gets no new ones; a
//! weight moves new connections; both can be reverted. Flows are listed, and explanations agree with them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::BTreeSet;

use edge::{Edge, until};
use proto::v1::{
    DrainRequest, ExplainRequest, Explanation, ListBackendsRequest, ListFlowsRequest, ListOverridesRequest, SetWeightRequest,
    UndrainRequest,
};

const ADDRESS: &str = "192.0.2.100:80";
const BY: &str = "test";

/// State and weight of a backend, as the gateway reports them.
fn backend(edge: &Edge, address: &str) -> Option<(String, u32)> {
    let answer = edge.admin(async |mut client| client.list_backends(ListBackendsRequest::default()).await.ok())?.into_inner();
    let found = answer.backends.into_iter().find(|backend| backend.service == "demo/web" && backend.address == address)?;
    Some((found.state, found.weight))
}

fn wait_for_backend(edge: &Edge, address: &str, state: &str, weight: u32) {
    until(&format!("{address} is {state} at {weight}"), || {
        backend(edge, address).filter(|now| *now == (state.to_owned(), weight))
    });
}

/// The servers of 40 new connections.
fn servers_of_new_connections(edge: &Edge) -> BTreeSet<String> {
    (0..40).map(|n| edge.connect(ADDRESS).unwrap_or_else(|| panic!("connection {n}")).server.clone()).collect()
}

fn explain(edge: &Edge, client: &str, packet: &str) -> Explanation {
    let request = ExplainRequest {
        gateway: String::new(),
        protocol: "tcp".to_owned(),
        source: client.to_owned(),
        destination: ADDRESS.to_owned(),
        packet: packet.to_owned(),
        port: String::new(),
    };
    edge.admin(async |mut client| client.explain(request).await.ok()).expect("an explanation").into_inner()
}

/// The established flows are listed once each and explained as they are. A new flow does not go to the drained backend.
fn assert_explained(edge: &Edge, flows_min: usize, drained: &str) {
    let request = ListFlowsRequest { service: "demo/web".to_owned(), state: "established".to_owned(), ..Default::default() };
    let page = edge.admin(async |mut client| client.list_flows(request).await.ok()).expect("flows").into_inner();
    let clients: BTreeSet<_> = page.flows.iter().map(|flow| flow.client.as_str()).collect();
    assert!(clients.len() == page.flows.len() && clients.len() >= flows_min, "{page:?}");
    for flow in page.flows.iter().take(10) {
        let explained = explain(edge, &flow.client, "");
        let rewrite = explained.rewrite.as_ref().unwrap();
        assert_eq!((explained.verdict.as_str(), explained.flow_effect.as_str()), ("forward", "continues"), "{explained:?}");
        assert_eq!((&rewrite.source, &rewrite.destination), (&flow.snat, &flow.backend), "{explained:?}");
    }
    let client = page.flows[0].client.parse::<std::net::SocketAddr>().unwrap();
    let explained = explain(edge, &std::net::SocketAddr::new(client.ip(), 9).to_string(), "first");
    assert_eq!((explained.verdict.as_str(), explained.flow_effect.as_str()), ("forward", "begins"), "{explained:?}");
    let why_not: Vec<_> = explained.backends.iter().map(|one| (one.address.as_str(), one.why_not.as_str())).collect();
    assert!(why_not.contains(&(drained, "draining")), "{explained:?}");
    assert_ne!(explained.rewrite.unwrap().destination, drained);
}

#[test]
fn a_drained_backend_keeps_its_connections_and_a_backend_of_weight_0_gets_no_new_ones() {
    let Some(mut edge) = Edge::with_echo_servers("drains and weights by hand", "ovr", 9000) else { return };
    edge.write_manifest("web.yaml", &include_str!("edge/web.yaml").replace("8080", "9000"));
    edge.start();
    until("the first connection", || edge.connect(ADDRESS));
    let mut connections: Vec<_> = (0..40).map(|n| edge.connect(ADDRESS).unwrap_or_else(|| panic!("connection {n}"))).collect();
    assert!(connections.iter().any(|connection| connection.server == "b12"));

    let drain = DrainRequest { target: "10.0.0.12:9000".to_owned(), by: BY.to_owned() };
    edge.admin(async |mut client| client.drain(drain).await.ok()).expect("a drain");
    wait_for_backend(&edge, "10.0.0.12:9000", "draining", 1);
    assert_eq!(servers_of_new_connections(&edge), ["b11", "b13"].map(str::to_owned).into());
    connections.iter_mut().for_each(|connection| connection.assert_alive("while its backend drains"));
    assert_explained(&edge, connections.len(), "10.0.0.12:9000");

    let weight = SetWeightRequest {
        service: "demo/web".to_owned(),
        backend: "10.0.0.11:9000".to_owned(),
        weight: Some(0),
        by: BY.to_owned(),
    };
    edge.admin(async |mut client| client.set_weight(weight).await.ok()).expect("a weight");
    wait_for_backend(&edge, "10.0.0.11:9000", "active", 0);
    assert_eq!(servers_of_new_connections(&edge), ["b13".to_owned()].into());

    let undrain = UndrainRequest { target: "10.0.0.12:9000".to_owned() };
    edge.admin(async |mut client| client.undrain(undrain).await.ok()).expect("the end of a drain");
    wait_for_backend(&edge, "10.0.0.12:9000", "active", 1);
    assert_eq!(servers_of_new_connections(&edge), ["b12", "b13"].map(str::to_owned).into());
    connections.iter_mut().for_each(|connection| connection.assert_alive("after all of it"));
    edge.assert_account();
}

/// The number of flows that are left at what is drained.
fn left_at(edge: &Edge, name: &str) -> Option<u64> {
    let answer = edge.admin(async |mut client| client.list_overrides(ListOverridesRequest {}).await.ok())?.into_inner();
    answer.overrides.into_iter().find(|row| row.name == name)?.flows
}

#[test]
fn a_drained_node_shows_the_flows_that_are_left_until_they_have_ended_although_its_pods_are_gone() {
    let Some(mut edge) = Edge::with_echo_servers("drain of a node", "ovrnode", 9000) else { return };
    let on_node = "  - {addresses: [10.0.0.12], nodeName: worker-1}\n";
    let web = include_str!("edge/web.yaml").replace("8080", "9000").replace("  - addresses: [10.0.0.12]\n", on_node);
    edge.write_manifest("web.yaml", &web);
    let node =
        "apiVersion: v1\nkind: Node\nmetadata: {name: worker-1}\nstatus: {addresses: [{type: InternalIP, address: 10.0.9.1}]}\n";
    edge.write_manifest("node.yaml", node);
    edge.start();
    until("the first connection", || edge.connect(ADDRESS));
    let mut there: Vec<_> = (0..40).filter_map(|_| edge.connect(ADDRESS)).filter(|one| one.server == "b12").collect();
    let connections = u64::try_from(there.len()).unwrap();
    assert!(connections > 0);

    let drain = DrainRequest { target: "worker-1".to_owned(), by: BY.to_owned() };
    edge.admin(async |mut client| client.drain(drain).await.ok()).expect("a drain");
    wait_for_backend(&edge, "10.0.0.12:9000", "draining", 1);
    until("the flows at the node are shown", || left_at(&edge, "worker-1").filter(|left| *left >= connections));
    edge.write_manifest("web.yaml", &web.replace(on_node, ""));
    wait_for_backend(&edge, "10.0.0.12:9000", "removed", 0);
    until("they are still shown", || left_at(&edge, "worker-1").filter(|left| *left >= connections));
    there.iter_mut().for_each(|connection| connection.assert_alive("while its node drains"));
    drop(there);
    until("none is left", || left_at(&edge, "worker-1").filter(|left| *left == 0));
    edge.assert_account();
}

/// Flows of a backend, as the gateway reports them.
fn flows(edge: &Edge, address: &str) -> Option<u64> {
    let answer = edge.admin(async |mut client| client.list_backends(ListBackendsRequest::default()).await.ok())?.into_inner();
    Some(answer.backends.iter().filter(|b| b.service == "demo/web" && b.address == address).map(|b| b.flows).sum())
}

#[test]
fn a_drain_under_load_fails_no_request_and_shows_the_flows_that_are_left() {
    const REQUESTS: &str = "15000";
    let Some(mut edge) = Edge::with_af_packet("a drain under load", "ovrload") else { return };
    edge.write_demo_manifests();
    edge.start();
    let url = format!("http://{ADDRESS}/");
    until("the first answer", || edge.curl(&url));
    let drained = "10.0.0.12:8080";
    let reports: Vec<String> = std::thread::scope(|scope| {
        let edge = &edge;
        let load = |more: &'static str| {
            let url = &url;
            let command = move || edge.run("client", &["ab", "-q", more, "-n", REQUESTS, "-c", "16", "-s", "60", url]);
            scope.spawn(move || String::from_utf8_lossy(&command().stdout).into_owned())
        };
        // One with a connection for each request, one with connections for many.
        let loads = [load("-d"), load("-k")];
        until("the backend has flows", || flows(edge, drained).filter(|flows| *flows > 0));
        let drain = DrainRequest { target: drained.to_owned(), by: BY.to_owned() };
        edge.admin(async |mut client| client.drain(drain).await.ok()).expect("a drain");
        wait_for_backend(edge, drained, "draining", 1);
        loads.map(|load| load.join().unwrap()).into()
    });
    for report in reports {
        let value = |key: &str| report.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned());
        assert_eq!(value("Complete requests:").as_deref(), Some(REQUESTS), "{report}");
        assert_eq!(value("Failed requests:").as_deref(), Some("0"), "{report}");
    }
    until("its flows have run out", || flows(&edge, drained).filter(|flows| *flows == 0));
    edge.assert_account();
}

#[test]
fn a_drain_outlives_a_file_of_overrides_that_a_power_cut_emptied() {
    let Some(mut edge) = Edge::with_echo_servers("overrides after a power cut", "ovrcut", 9000) else { return };
    edge.write_manifest("web.yaml", &include_str!("edge/web.yaml").replace("8080", "9000"));
    edge.start();
    let drain = DrainRequest { target: "10.0.0.12:9000".to_owned(), by: BY.to_owned() };
    edge.admin(async |mut client| client.drain(drain).await.ok()).expect("a drain");
    for cut in [0, 20] {
        assert_eq!(edge.stop(true), None, "killed");
        let file = edge.path("status/overrides.yaml");
        let text = std::fs::read(&file).unwrap();
        std::fs::write(&file, &text[..cut]).unwrap();
        edge.start();
        wait_for_backend(&edge, "10.0.0.12:9000", "draining", 1);
        assert!(edge.log().contains("a file is broken and was moved aside; its last good copy is used"), "{}", edge.log());
        assert_eq!(std::fs::read(edge.path("status/overrides.yaml.broken")).unwrap().len(), cut);
        assert_eq!(std::fs::read(&file).unwrap(), text);
    }
}
