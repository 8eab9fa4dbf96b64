//! Events that the API server rejects.

use serde_json::json;

use crate::api_server::{Fault, FaultRule, Kind};
use crate::installation::Installation;
use crate::user::{User, wait_for};

#[tokio::test]
async fn a_namespace_that_rejects_events_blocks_no_events_elsewhere() {
    let (server, user) = User::with_test_server().await;
    let _installation = Installation::start(&user).await;
    server.inject(FaultRule {
        fault: Fault::Forbidden,
        times: usize::MAX,
        method: "POST",
        path_contains: "/namespaces/a/events",
        watch: false,
    });
    let refused = json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}});
    for name in ["one", "two", "three", "four"] {
        user.add_without_slice(name, &refused).await;
    }
    let posts = || server.log().iter().filter(|logged| logged.path.contains("/namespaces/a/events")).count();
    wait_for("refused Events", async || posts(), |count| *count >= 2).await;
    let annotations = &refused["metadata"]["annotations"];
    let metadata = json!({"name": "web", "namespace": "b", "annotations": annotations});
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": user.class(), "ports": [{"port": 80}]});
    server.create(Kind::Service, json!({"metadata": metadata, "spec": spec}));
    wait_for("an Event in the other namespace", async || server.list(Kind::Event, "b").len(), |count| *count > 0).await;
    assert!(posts() < 32, "Events of the first namespace must be retried and not be dropped yet: {}", posts());
}

#[tokio::test]
async fn a_deleted_namespace_gets_no_events() {
    let (server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    let names: Vec<String> = (0..6).map(|number| format!("web-{number}")).collect();
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": user.class(), "ports": [{"port": 80}]});
    for name in &names {
        server.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "b"}, "spec": spec}));
    }
    // Three Events per Service: it has an address, gateways forward it, and it has no endpoints.
    wait_for("all Events", async || server.list(Kind::Event, "b").len(), |count| *count == 18).await;
    server.create(Kind::Pod, json!({"metadata": {"name": "p", "namespace": "b"}, "spec": {"nodeName": "n1"}}));
    let before = server.log().len();
    server.delete(Kind::Namespace, "", "b");
    server.end_pod("b", "p");
    installation.wait_for_state("the withdrawal of all Services", |received| received.services.is_empty()).await;
    let is_there = async || server.get(Kind::Namespace, "", "b").is_some();
    wait_for("the end of the namespace", is_there, |is_there| !is_there).await;
    user.add_without_slice("web", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}})).await;
    user.wait_for_event("web", "OutsidePools").await;
    let requests = server.log().split_off(before);
    let sent: Vec<_> = requests.iter().filter(|logged| logged.path.contains("/namespaces/b/events")).collect();
    assert!(sent.is_empty(), "the namespace accepts no Events: {sent:?}");
}
