//! The Kubernetes source, from an API server to packets: a Service gets an address and answers there, follows changes
//! of the cluster, and keeps answering while the API server is unreachable.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../control/tests/api_server/mod.rs"]
mod api_server;
mod edge;

use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use api_server::{ApiServer, Availability, Kind, WatchEnd};
use edge::{Edge, until};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// A network with an API server in the gateway's namespace, reachable only over loopback, as the source of the gateway.
fn prepare(test: &str, name: &str) -> Option<(Runtime, Edge, ApiServer)> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let edge = Edge::new(test, name)?;
    let api = edge.in_namespace("gw", || runtime.block_on(ApiServer::start()));
    api.write_kubeconfig(&edge.path("kubeconfig"));
    configure(&edge);
    Some((runtime, edge, api))
}

/// Replaces the manifests by the API server as the source.
fn configure(edge: &Edge) {
    edge.configure_af_packet("");
    let text = fs::read_to_string(edge.path("sluice.yaml")).unwrap();
    let source =
        |line: &str| if line.starts_with("manifests:") { "kubernetes: {kubeconfig: kubeconfig}" } else { line }.to_owned();
    let lines: Vec<_> = text.lines().map(source).collect();
    fs::write(edge.path("sluice.yaml"), lines.join("\n")).unwrap();
}

fn endpoints(servers: &[u8]) -> Value {
    let endpoint = |n: &u8| json!({"addresses": [format!("10.0.0.{n}")], "conditions": {"ready": true}});
    servers.iter().map(endpoint).collect()
}

fn create(api: &ApiServer, name: &str, servers: &[u8]) {
    let spec = json!({
        "type": "LoadBalancer", "loadBalancerClass": "sluice.dev/gateway", "selector": {"app": "web"},
        "ports": [{"port": 80, "targetPort": 8080}],
    });
    api.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "demo"}, "spec": spec}));
    let slice = json!({
        "metadata": {"name": format!("{name}-1"), "namespace": "demo", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}], "endpoints": endpoints(servers),
    });
    api.create(Kind::EndpointSlice, slice);
}

/// The URL of a Service, once its status contains an address.
fn url(api: &ApiServer, name: &str) -> String {
    until("the address is written to the status", || {
        let service = api.get(Kind::Service, "demo", name)?;
        Some(format!("http://{}/", service["status"]["loadBalancer"]["ingress"][0]["ip"].as_str()?))
    })
}

/// The servers that answer 40 requests, none of which may fail.
fn answers(edge: &Edge, url: &str) -> BTreeSet<String> {
    (0..40).map(|n| edge.curl(url).unwrap_or_else(|| panic!("request {n} failed; drops {:?}", edge.drops()))).collect()
}

/// The BPF program that tc runs for every arriving packet. It drops silently, as a cut cable does.
const DROP_ALL: &str = "1,6 0 0 2";

/// Cuts the link to the API server, or restores it.
fn cut_loopback(edge: &Edge, is_cut: bool) {
    let words = ["tc", "qdisc", if is_cut { "add" } else { "del" }, "dev", "lo", "clsact"];
    let mut commands = vec![words.to_vec()];
    if is_cut {
        commands.push(["tc", "filter", "add", "dev", "lo", "ingress", "bpf", "da", "bytecode", DROP_ALL].to_vec());
    }
    for command in commands {
        let output = edge.run("gw", &command);
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Without keep-alive and a limit on unacknowledged data, sockets notice a cut after 295 s, far beyond
/// [`edge::DEADLINE`].
#[test]
fn a_cut_link_to_the_api_server_is_noticed_and_no_service_is_withdrawn() {
    let Some((_runtime, mut edge, api)) = prepare("a cut link to the API server", "k8scut") else { return };
    create(&api, "web", &[11]);
    edge.start();
    let web = url(&api, "web");
    until("an answer", || edge.curl(&web));
    let set = |servers: &[u8]| api.update(Kind::EndpointSlice, "demo", "web-1", &json!({"endpoints": endpoints(servers)}));
    set(&[11, 12]);
    until("the change arrives; the silence starts after it", || edge.service("web").filter(|web| web.backends == 2));

    cut_loopback(&edge, true);
    let start = Instant::now();
    set(&[13]);
    until("the cut is logged", || edge.log().contains("the API server cannot be reached").then_some(()));
    println!("noticed after {:?}", start.elapsed());
    assert_eq!(answers(&edge, &web), ["b11", "b12"].map(str::to_owned).into(), "the last known state is served");
    cut_loopback(&edge, false);
    until("the change made meanwhile arrives", || edge.service("web").filter(|web| web.backends == 1));
    assert_eq!(answers(&edge, &web), ["b13"].map(str::to_owned).into());
}

#[test]
fn a_gateway_that_stops_releases_its_lease() {
    let Some((_runtime, mut edge, api)) = prepare("releasing the Lease", "lease") else { return };
    edge.start();
    let holder = || {
        let lease = api.list(Kind::Lease, "default").into_iter().next()?;
        Some(lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned())
    };
    until("the gateway holds the Lease", || holder().filter(|holder| !holder.is_empty()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert_eq!(holder().as_deref(), Some(""), "{}", edge.log());
}

#[test]
fn a_gateway_with_a_saved_state_starts_without_a_readable_kubeconfig() {
    let Some((_runtime, mut edge, api)) = prepare("an unreadable kubeconfig at boot", "boot") else { return };
    create(&api, "web", &[11]);
    edge.start();
    let web = url(&api, "web");
    until("an answer", || edge.curl(&web));
    let backend = [10, 0, 0, 11];
    let saved = || fs::read(edge.path("state/state")).is_ok_and(|state| state.windows(4).any(|window| window == backend));
    until("the state with the backend is on disk", || saved().then_some(()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());

    fs::rename(edge.path("kubeconfig"), edge.path("kubeconfig.away")).unwrap();
    edge.start();
    until("an answer from the saved state", || edge.curl(&web));
    assert!(!edge.status().unwrap().controller_connected, "{}", edge.log());
    fs::rename(edge.path("kubeconfig.away"), edge.path("kubeconfig")).unwrap();
    api.update(Kind::EndpointSlice, "demo", "web-1", &json!({"endpoints": endpoints(&[11, 12])}));
    until("the controller starts by itself", || edge.status().filter(|status| status.controller_connected));
    until("the change made meanwhile arrives", || edge.service("web").filter(|web| web.backends == 2));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_service_of_a_cluster_is_served_at_the_address_in_its_status() {
    let Some((runtime, mut edge, api)) = prepare("the Kubernetes source end to end", "k8s") else { return };
    create(&api, "web", &[11, 12]);
    edge.start();
    let web = url(&api, "web");
    until("an answer", || edge.curl(&web));
    assert_eq!(answers(&edge, &web), ["b11", "b12"].map(str::to_owned).into());

    let backends = |wanted: u32| until("the endpoints", || edge.service("web").filter(|web| web.backends == wanted));
    api.update(Kind::EndpointSlice, "demo", "web-1", &json!({"endpoints": endpoints(&[11, 12, 13])}));
    backends(3);
    assert_eq!(answers(&edge, &web).len(), 3);
    api.compact();
    api.end_watches(WatchEnd::Expired);
    api.update(Kind::EndpointSlice, "demo", "web-1", &json!({"endpoints": endpoints(&[13])}));
    backends(1);
    assert_eq!(answers(&edge, &web), ["b13"].map(str::to_owned).into());

    runtime.block_on(api.set_availability(Availability::Down));
    api.update(Kind::EndpointSlice, "demo", "web-1", &json!({"endpoints": endpoints(&[12])}));
    create(&api, "late", &[11]);
    until("the failure is logged", || edge.log().contains("the API server cannot be reached").then_some(()));
    assert_eq!(answers(&edge, &web), ["b13"].map(str::to_owned).into(), "the last known state is served");
    runtime.block_on(api.set_availability(Availability::Up));
    let late = url(&api, "late");
    assert_ne!(late, web);
    until("the new service answers", || edge.curl(&late));
    until("the change arrives", || edge.curl(&web).filter(|who| who == "b12"));

    api.delete(Kind::Service, "demo", "web");
    until("the Service is gone", || edge.service("web").is_none().then_some(()));
    assert_eq!(edge.curl(&web), None);
    assert!(edge.curl(&late).is_some(), "the other Service answers");
    edge.assert_account();
}
