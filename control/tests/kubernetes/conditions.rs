//! Conditions and Events of a Service, as its owner sees them.

use control::config::settings::Listen;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::installation::Installation;
use crate::user::{User, condition, has_finalizer, is_about, wait_for};

#[tokio::test]
async fn conditions_and_events_show_that_a_service_is_served() {
    let (_server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    // Without a gateway the assignment has an Event of its own.
    installation.wait_for_state("the gateway is connected", |received| received.messages > 0).await;
    user.add("web", &json!({})).await;
    let service = user.wait_for_reason("web", "Programmed", "True Programmed").await;
    assert_eq!(condition(&service, "AddressAssigned").as_deref(), Some("True Assigned"));
    assert!(has_finalizer(&service) && !service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    let event = user.wait_for_event("web", "Programmed").await;
    let note = event.note.unwrap();
    assert_eq!(note, "Gateways forward for the Service at address 192.0.2.100 of pool default");
    assert_eq!(event.type_.as_deref(), Some("Normal"));
    assert_eq!(event.regarding.unwrap().uid.as_deref(), service["metadata"]["uid"].as_str(), "`kubectl describe` finds it");
    let about_web: Vec<_> = user.events().await.into_iter().filter(|event| is_about(event, "web")).collect();
    assert_eq!(about_web.len(), 1, "one Event for a new Service: {about_web:?}");
}

#[tokio::test]
async fn conditions_and_events_show_why_a_service_is_not_served() {
    let (_server, user) = User::with_test_server().await;
    let installation = Installation::start(&user).await;
    let annotations = json!({"sluice.dev/mode": "dsr", "sluice.dev/proxy-protocol": "v2"});
    user.add("web", &json!({"metadata": {"annotations": annotations}})).await;
    let service = user.wait_for_reason("web", "Programmed", "False Unsupported").await;
    assert!(service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    let event = user.wait_for_event("web", "Unsupported").await;
    assert_eq!((event.type_.as_deref(), event.action.as_deref()), (Some("Warning"), Some("Serve")));
    assert!(event.note.unwrap().contains("PROXY header"));
    user.change("web", &json!({"metadata": {"annotations": {"sluice.dev/mode": null}}})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    installation.wait_until_served(&user, "web", 1).await;
}

#[tokio::test]
async fn without_a_gateway_a_service_has_no_ingress_and_shows_the_reason() {
    let (_server, user) = User::with_test_server().await;
    let other_socket = Listen::unix(user.directory().join("other.sock"));
    let installation = Installation::start_with(&user, |settings| settings.listen = other_socket).await;
    user.add("web", &json!({})).await;
    let service = user.wait_for_reason("web", "Programmed", "False NoGateway").await;
    assert!(service["status"]["loadBalancer"]["ingress"].is_null(), "{service}");
    assert_eq!(condition(&service, "AddressAssigned").as_deref(), Some("True Assigned"));
    installation.stop().await;
}

#[tokio::test]
async fn a_rival_status_writer_is_reported_after_three_corrections() {
    let (server, user) = User::with_test_server().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    let services = Api::<Service>::namespaced(user.cluster.client.clone(), &user.namespace);
    let rival = PatchParams { field_manager: Some("rival".to_owned()), ..PatchParams::default() };
    let rival_ingress = json!([{"ip": "203.0.113.9", "ipMode": "VIP"}]);
    let write = Patch::Merge(json!({"status": {"loadBalancer": {"ingress": rival_ingress}}}));
    let our_ingress = user.ingress("web").await;
    for _ in 0..3 {
        services.patch_status("web", &rival, &write).await.unwrap();
        wait_for("our address to be restored", async || user.ingress("web").await, |ingress| *ingress == our_ingress).await;
    }
    services.patch_status("web", &rival, &write).await.unwrap();
    let service = user.wait_for_reason("web", "Programmed", "False ForeignStatusWriter").await;
    assert_eq!(service["status"]["loadBalancer"]["ingress"], rival_ingress);
    let event = user.wait_for_event("web", "ForeignStatusWriter").await;
    assert!(event.note.as_ref().unwrap().contains("rival"), "{event:?}");
    let count = || server.log().iter().filter(|logged| logged.method == "PATCH" && logged.path.ends_with("/web/status")).count();
    let before = count();
    services.patch_status("web", &rival, &Patch::Merge(json!({"status": {"conditions": null}}))).await.unwrap();
    user.add("next", &json!({})).await;
    user.wait_for_reason("next", "Programmed", "True Programmed").await;
    assert_eq!(count(), before + 1, "only the write of the rival");
}
