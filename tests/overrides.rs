//! Manual overrides, from the admin API to packets. A drained backend keeps its connections and gets no new ones; a
//! weight moves new connections; both can be reverted. Flows are listed, and explanations agree with them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::BTreeSet;

use edge::{Edge, until};
use proto::v1::{
    DrainRequest, ExplainRequest, Explanation, ListBackendsRequest, ListFlowsRequest, SetWeightRequest, UndrainRequest,
};

const ADDRESS: &str = "192.0.2.100:80";
const BY: &str = "test";

/// State and weight of a backend, as the gateway reports them.
fn backend(edge: &Edge, address: &str) -> Option<(String, u32)> {
    let answer = edge.admin(async |mut client| client.list_backends(ListBackendsRequest {}).await.ok())?.into_inner();
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
