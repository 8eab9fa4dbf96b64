//! Requests for Events: what the API server rejects, and what repetitions cost.

use std::time::Duration;

use control::kubernetes::EventWriter;
use objects::note::{Cause, Note, Remark, Subject};
use proto::{Reason, ServiceName};
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
    // Two Events per Service: gateways forward for it at its address, and it has no endpoints.
    wait_for("all Events", async || server.list(Kind::Event, "b").len(), |count| *count == 12).await;
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

#[tokio::test]
async fn after_a_restart_a_repeated_event_costs_one_request() {
    let (server, user) = User::with_test_server().await;
    let note = |name: &str| Note {
        subject: Subject::Service(ServiceName::new("a", name)),
        remark: Remark::new(Cause::Reason(Reason::Refused), "as before"),
    };
    // Records notes in a controller that has just started, and counts its requests.
    let requests = async |names: &[&str]| {
        let (writer, before) = (EventWriter::new("test"), server.log().len());
        names.iter().for_each(|name| writer.record(&note(name), Some("u")));
        let is_idle = async || writer.waiting() == 0 && server.list(Kind::Event, "a").len() >= names.len();
        tokio::select! {
            () = writer.run(&user.cluster) => unreachable!("a writer never ends"),
            // The answer to the last request is awaited, too.
            () = async {
                wait_for("all Events", is_idle, |is_idle| *is_idle).await;
                tokio::time::sleep(Duration::from_millis(300)).await;
            } => {}
        }
        server.log().split_off(before).iter().filter(|logged| logged.path.contains("/events")).count()
    };
    assert_eq!(requests(&["one", "two", "three"]).await, 3, "one creation each");
    assert_eq!(requests(&["one", "two", "three"]).await, 4, "creation and conflict once, then a patch each");
    assert_eq!(requests(&["one", "two", "three", "four"]).await, 6, "an Event that is not there costs one more");
}
