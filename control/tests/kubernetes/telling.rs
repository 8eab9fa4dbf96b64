//! What the owner of a Service sees on the object and in Events, and what remains on a Service that is released.

use std::process::Command;
use std::time::{Duration, Instant};

use control::config::settings::Listen;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use objects::crd::EdgeGateway;
use serde_json::{Value, json};

use crate::api_server::{ApiServer, Fault, Kind, Trap};
use crate::installation::Installation;
use crate::user::{User, reached};

const FINALIZER: &str = "sluice.dev/load-balancer-cleanup";

async fn start() -> (ApiServer, User) {
    let server = ApiServer::start().await;
    let user = User::of_test_server(&server).await;
    (server, user)
}

/// `STATUS REASON` of a condition; `None` if it is absent.
fn condition(service: &Value, kind: &str) -> Option<String> {
    let all = service["status"]["conditions"].as_array()?;
    let found = all.iter().find(|condition| condition["type"] == format!("sluice.dev/{kind}"))?;
    Some(format!("{} {}", found["status"].as_str()?, found["reason"].as_str()?))
}

fn has_finalizer(service: &Value) -> bool {
    service["metadata"]["finalizers"].as_array().is_some_and(|all| all.contains(&json!(FINALIZER)))
}

/// Waits until a condition has this status and reason.
async fn says(user: &User, name: &str, kind: &str, wanted: &str) -> Value {
    let look = async || user.service(name).await;
    reached(&format!("{kind} {wanted}"), look, |service| condition(service, kind).as_deref() == Some(wanted)).await
}

async fn events(user: &User, name: &str) -> Vec<Event> {
    let events = Api::<Event>::namespaced(user.cluster.client.clone(), &user.namespace);
    let all = events.list(&ListParams::default()).await.unwrap().items;
    let is_about = |event: &Event| event.regarding.as_ref().is_some_and(|object| object.name.as_deref() == Some(name));
    all.into_iter().filter(is_about).collect()
}

/// Waits for an Event with a reason.
async fn event_comes(user: &User, name: &str, reason: &str) -> Event {
    let of_reason = |all: &Vec<Event>| all.iter().find(|event| event.reason.as_deref() == Some(reason)).cloned();
    let all = reached(&format!("an Event {reason}"), async || events(user, name).await, |all| of_reason(all).is_some()).await;
    of_reason(&all).unwrap()
}

#[tokio::test]
async fn a_service_that_is_served_says_so_by_conditions_and_events() {
    let (_server, user) = start().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    let service = says(&user, "web", "Programmed", "True Programmed").await;
    assert_eq!(condition(&service, "AddressAssigned").as_deref(), Some("True Assigned"));
    assert!(has_finalizer(&service) && !service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    let told = event_comes(&user, "web", "AddressAssigned").await;
    assert!(told.note.unwrap().contains("192.0.2.100"));
    assert_eq!(told.regarding.unwrap().uid.as_deref(), service["metadata"]["uid"].as_str(), "`kubectl describe` finds it");
    assert_eq!(event_comes(&user, "web", "Programmed").await.type_.as_deref(), Some("Normal"));
}

#[tokio::test]
async fn a_service_that_is_not_served_says_why() {
    let (_server, user) = start().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({"metadata": {"annotations": {"sluice.dev/proxy-protocol": "v2"}}})).await;
    let service = says(&user, "web", "Programmed", "False Unsupported").await;
    assert!(service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    let told = event_comes(&user, "web", "Unsupported").await;
    assert_eq!((told.type_.as_deref(), told.action.as_deref()), (Some("Warning"), Some("Serve")));
    assert!(told.note.unwrap().contains("proxy-protocol"));
    user.change("web", &json!({"metadata": {"annotations": {"sluice.dev/proxy-protocol": null}}})).await;
    says(&user, "web", "Programmed", "True Programmed").await;
    installation.serves(&user, "web", 1).await;
}

#[tokio::test]
async fn without_a_gateway_a_service_has_no_ingress_and_shows_the_reason() {
    let (_server, user) = start().await;
    let apart = Listen::unix(user.directory().join("apart.sock"));
    let installation = Installation::start_with(&user, |settings| settings.listen = apart).await;
    user.add("web", &json!({})).await;
    let service = says(&user, "web", "Programmed", "False NoGateway").await;
    assert!(service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    assert_eq!(condition(&service, "AddressAssigned").as_deref(), Some("True Assigned"));
    installation.stop().await;
}

#[tokio::test]
async fn gateways_are_given_a_service_once_it_has_its_finalizer_or_after_ten_seconds() {
    let (server, user) = start().await;
    let installation = Installation::start(&user).await;
    installation.gives("a first message", |given| given.messages > 0).await;
    server.trap(Trap { fault: Fault::Forbidden, times: usize::MAX, method: "PATCH", path_contains: "/status", watch: false });
    let start = Instant::now();
    user.add("web", &json!({})).await;
    installation.serves(&user, "web", 1).await;
    assert!(start.elapsed() >= Duration::from_secs(9), "after {:?}", start.elapsed());
    server.release_traps();
    user.ingress_comes("web").await;
}

#[tokio::test]
async fn a_finalizer_that_somebody_took_away_comes_back() {
    let (_server, user) = start().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    says(&user, "web", "Programmed", "True Programmed").await;
    user.change("web", &json!({"metadata": {"finalizers": null}})).await;
    reached("the finalizer", async || user.service("web").await, has_finalizer).await;
}

#[tokio::test]
async fn a_deleted_service_loses_our_fields_and_keeps_the_finalizers_of_others() {
    let (_server, user) = start().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({"metadata": {"finalizers": ["example.com/other"]}})).await;
    says(&user, "web", "Programmed", "True Programmed").await;
    user.delete_service("web").await;
    let look = async || user.service("web").await;
    let service = reached("a Service without our fields", look, |service| !has_finalizer(service)).await;
    assert_eq!(service["metadata"]["finalizers"], json!(["example.com/other"]));
    assert_eq!(service["status"]["conditions"].as_array().map_or(0, Vec::len), 0, "{service}");
    assert!(service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    installation.withdraws(&user, "web").await;
}

#[tokio::test]
async fn a_service_that_moves_to_another_class_through_another_type_is_released() {
    let (_server, user) = start().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    says(&user, "web", "Programmed", "True Programmed").await;
    user.change("web", &json!({"spec": {"type": "ClusterIP"}})).await;
    let look = async || user.service("web").await;
    let is_free = |service: &Value| !has_finalizer(service) && condition(service, "Programmed").is_none();
    reached("a Service without our fields", &look, is_free).await;
    event_comes(&user, "web", "Released").await;
    installation.withdraws(&user, "web").await;
    user.change("web", &json!({"spec": {"type": "LoadBalancer", "loadBalancerClass": "example.com/other"}})).await;
    user.add("next", &json!({})).await;
    says(&user, "next", "Programmed", "True Programmed").await;
    assert!(is_free(&look().await), "it belongs to another controller");
}

#[tokio::test]
async fn two_writers_of_one_status_do_not_go_on_for_ever() {
    let (server, user) = start().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    says(&user, "web", "Programmed", "True Programmed").await;
    let services = Api::<Service>::namespaced(user.cluster.client.clone(), &user.namespace);
    let rival = PatchParams { field_manager: Some("rival".to_owned()), ..PatchParams::default() };
    let theirs = json!([{"ip": "203.0.113.9", "ipMode": "VIP"}]);
    let write = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": theirs}}}));
    let ours = user.ingress("web").await;
    for _ in 0..3 {
        services.patch_status("web", &rival, &write).await.unwrap();
        reached("our address to be restored", async || user.ingress("web").await, |ingress| *ingress == ours).await;
    }
    services.patch_status("web", &rival, &write).await.unwrap();
    let service = says(&user, "web", "Programmed", "False ForeignStatusWriter").await;
    assert_eq!(service["status"]["loadBalancer"]["ingress"], theirs);
    let told = event_comes(&user, "web", "ForeignStatusWriter").await;
    assert!(told.note.as_ref().unwrap().contains("rival"), "{told:?}");
    let count = || server.log().iter().filter(|logged| logged.method == "PATCH" && logged.path.ends_with("/web/status")).count();
    let before = count();
    services.patch_status("web", &rival, &Patch::Merge(json!({"status": {"conditions": null}}))).await.unwrap();
    user.add("next", &json!({})).await;
    says(&user, "next", "Programmed", "True Programmed").await;
    assert_eq!(count(), before + 1, "only the write of the rival");
}

#[tokio::test]
async fn a_namespace_that_rejects_events_blocks_no_events_elsewhere() {
    let (server, user) = start().await;
    let _installation = Installation::start(&user).await;
    server.trap(Trap {
        fault: Fault::Forbidden,
        times: usize::MAX,
        method: "POST",
        path_contains: "/namespaces/a/events",
        watch: false,
    });
    let refused = json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}});
    for name in ["one", "two", "three", "four"] {
        user.add_alone(name, &refused).await;
    }
    let posts = || server.log().iter().filter(|logged| logged.path.contains("/namespaces/a/events")).count();
    reached("refused Events", async || posts(), |count| *count >= 2).await;
    let annotations = &refused["metadata"]["annotations"];
    let metadata = json!({"name": "web", "namespace": "b", "annotations": annotations});
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": user.class(), "ports": [{"port": 80}]});
    server.create(Kind::Service, json!({"metadata": metadata, "spec": spec}));
    reached("an Event in the other namespace", async || server.list(Kind::Event, "b").len(), |count| *count > 0).await;
    assert!(posts() < 32, "Events of the first namespace must be retried and not be dropped yet: {}", posts());
}

#[tokio::test]
async fn a_deleted_namespace_gets_no_events() {
    let (server, user) = start().await;
    let installation = Installation::start(&user).await;
    let names: Vec<String> = (0..6).map(|number| format!("web-{number}")).collect();
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": user.class(), "ports": [{"port": 80}]});
    for name in &names {
        server.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "b"}, "spec": spec}));
    }
    // Three Events per Service: it has an address, gateways forward it, and it has no endpoints.
    reached("all Events", async || server.list(Kind::Event, "b").len(), |count| *count == 18).await;
    server.create(Kind::Pod, json!({"metadata": {"name": "p", "namespace": "b"}, "spec": {"nodeName": "n1"}}));
    let before = server.log().len();
    server.delete(Kind::Namespace, "", "b");
    server.end_pod("b", "p");
    installation.gives("the withdrawal of all Services", |given| given.services.is_empty()).await;
    let is_there = async || server.get(Kind::Namespace, "", "b").is_some();
    reached("the end of the namespace", is_there, |is_there| !is_there).await;
    user.add_alone("web", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}})).await;
    event_comes(&user, "web", "OutsidePools").await;
    let asked = server.log().split_off(before);
    let told: Vec<_> = asked.iter().filter(|logged| logged.path.contains("/namespaces/b/events")).collect();
    assert!(told.is_empty(), "the namespace accepts no Events: {told:?}");
}

#[tokio::test]
async fn a_connected_gateway_is_shown_in_the_cluster() {
    let (_server, user) = start().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.ingress_comes("web").await;
    let gateways = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let look = async || gateways.get_opt("edge-1").await.unwrap().filter(|object| object.status.is_some());
    let object = reached("an EdgeGateway", look, Option::is_some).await.unwrap();
    let status = object.status.unwrap();
    assert_eq!((object.spec.group, status.version.as_deref()), (user.group(), Some("test")));
    assert!(status.last_seen.is_some() && status.ready.is_some(), "{status:?}");
}

#[tokio::test]
async fn edge_gateways_follow_changes_of_services_and_failed_writes() {
    let (server, user) = start().await;
    server.trap(Trap { fault: Fault::Internal, times: 2, method: "PATCH", path_contains: "/edgegateways/", watch: false });
    let _installation = Installation::start(&user).await;
    let fleet = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let shown = async || fleet.get_opt("edge-1").await.unwrap().and_then(|object| object.status?.services);
    reached("a status, once the server accepts it", &shown, Option::is_some).await;
    for count in 1..=2 {
        user.add(&format!("web-{count}"), &json!({})).await;
        reached("the number of Services", &shown, |services| *services == Some(count)).await;
    }
}

/// Runs `sluice-controller` with the configuration of a user's installation.
fn sluice_controller(user: &User, arguments: &[&str]) -> (Option<i32>, String) {
    let config = user.directory().join("controller.yaml");
    let text = format!(
        "group: {}\nkubernetes: {{kubeconfig: {}, loadBalancerClass: {}, namespace: {}}}\n",
        user.group(),
        user.kubeconfig.display(),
        user.class(),
        user.namespace
    );
    std::fs::write(&config, text).unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_sluice-controller")).args(arguments).arg("--config").arg(&config).output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat();
    (output.status.code(), said)
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstall_leaves_nothing_on_services() {
    let (server, user) = start().await;
    let installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    says(&user, "web", "Programmed", "True Programmed").await;
    user.add("theirs", &json!({"metadata": {"finalizers": [FINALIZER]}, "spec": {"loadBalancerClass": "example.com/other"}}))
        .await;
    let of_another = json!({"finalizers": [FINALIZER], "annotations": {"sluice.dev/group": "another"}});
    user.add("of-another", &json!({"metadata": of_another, "spec": {"loadBalancerClass": null}})).await;
    let (code, said) = sluice_controller(&user, &["uninstall"]);
    assert!(code == Some(1) && said.contains("leads"), "{code:?} {said}");
    let fleet = Api::<EdgeGateway>::all(user.cluster.client.clone());
    reached("an EdgeGateway", async || fleet.get_opt("edge-1").await.unwrap(), Option::is_some).await;
    installation.stop().await;
    let web = user.full_name("web");
    let (code, said) = sluice_controller(&user, &["uninstall", "--dry-run"]);
    assert!(code == Some(0) && said.contains(&format!("would release Service {web}")), "{code:?} {said}");
    assert!(has_finalizer(&user.service("web").await));
    let (code, said) = sluice_controller(&user, &["release"]);
    assert!(
        code == Some(0) && said.contains("released 0 Services"),
        "Services of our own class are not released: {code:?} {said}"
    );
    // One write conflicts with another writer, and the role grants no right to get one Service.
    server.trap(Trap { fault: Fault::Conflict, times: 1, method: "PATCH", path_contains: "/services/web/status", watch: false });
    let before = server.log().len();
    let (code, said) = sluice_controller(&user, &["uninstall"]);
    assert!(code == Some(0) && said.contains(&format!("released Service {web}")), "{code:?} {said}");
    let asked = server.log().split_off(before).into_iter().filter_map(|logged| logged.asked).collect::<Vec<_>>();
    assert_eq!(asked.iter().filter(|asked| asked.resource == "services/status").count(), 2, "{asked:?}");
    assert!(!asked.iter().any(|asked| asked.resource == "services" && asked.verb == "get"), "{asked:?}");
    let service = user.service("web").await;
    assert!(!has_finalizer(&service) && service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    assert_eq!(condition(&service, "Programmed"), None);
    assert!(service["metadata"]["annotations"]["sluice.dev/group"].is_null(), "{service}");
    assert!(has_finalizer(&user.service("theirs").await), "of another class");
    assert!(has_finalizer(&user.service("of-another").await), "of another installation");
    assert!(server.get(Kind::EdgeGateway, "", "edge-1").is_none());
}
