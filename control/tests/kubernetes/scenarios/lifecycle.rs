//! The life cycle of one Service: creation, changes, deletion, and outages of the API server.

use std::time::Instant;

use serde_json::json;

use crate::installation::Installation;
use crate::user::{User, wait_for};

pub async fn a_new_service_has_its_address(user: &User) {
    let installation = Installation::start(user).await;
    installation.wait_for_state("a first message", |received| received.messages > 0).await;
    let start = Instant::now();
    user.add("web", &json!({})).await;
    let ingress = user.wait_for_ingress("web").await;
    println!("an address after {:?}", start.elapsed());
    let ports = json!([{"port": 80, "protocol": "TCP"}]);
    assert_eq!(ingress, json!([{"ip": "192.0.2.100", "ipMode": "Proxy", "ports": ports}]));
    installation.wait_until_served(user, "web", 1).await;
}

pub async fn added_and_removed_backends_reach_the_gateways(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    for count in [1, 3, 2] {
        user.set_backends("web", count).await;
        installation.wait_until_served(user, "web", count.into()).await;
    }
    let before = user.wait_for_ingress("web").await;
    user.set_backends("web", 0).await;
    installation.wait_until_served(user, "web", 0).await;
    assert_eq!(user.ingress("web").await, before, "a Service without backends keeps its address");
}

pub async fn a_deleted_service_is_withdrawn(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let before = user.wait_for_address("web").await;
    installation.wait_until_served(user, "web", 1).await;
    user.delete_service("web").await;
    installation.wait_until_withdrawn(user, "web").await;
    user.wait_until_deleted("web").await;
    user.add("other", &json!({})).await;
    assert_ne!(user.wait_for_address("other").await, before, "it is reserved for its last holder");
    user.add("web", &json!({})).await;
    assert_eq!(user.wait_for_address("web").await, before);
}

pub async fn a_service_changes_its_type(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let before = user.wait_for_address("web").await;
    installation.wait_until_served(user, "web", 1).await;
    user.change("web", &json!({"spec": {"type": "ClusterIP"}})).await;
    installation.wait_until_withdrawn(user, "web").await;
    wait_for(
        "a Service without our fields",
        async || user.service("web").await,
        |web| {
            web["status"]["loadBalancer"]["ingress"].is_null()
                && web["status"]["conditions"].is_null()
                && web["metadata"]["finalizers"].is_null()
        },
    )
    .await;
    user.change("web", &json!({"spec": {"type": "LoadBalancer", "loadBalancerClass": user.class()}})).await;
    assert_eq!(user.wait_for_address("web").await, before);
    installation.wait_until_served(user, "web", 1).await;
}

pub async fn a_service_changes_its_mode(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let web = user.full_name("web");
    let mode_comes = async |wanted: &str| {
        let is_wanted =
            |received: &crate::gateway::ReceivedState| received.services.get(&web).is_some_and(|service| service.mode == wanted);
        installation.wait_for_state(&format!("mode {wanted}"), is_wanted).await;
    };
    let ip_mode = async || user.ingress("web").await[0]["ipMode"].clone();
    wait_for("the first status", &ip_mode, |ip_mode| ip_mode == "Proxy").await;
    user.annotate("web", "sluice.dev/mode", "dnat").await;
    mode_comes("dnat").await;
    assert_eq!(ip_mode().await, "VIP", "the status must change before the gateways");
    user.annotate("web", "sluice.dev/mode", "nat").await;
    wait_for("the previous status", &ip_mode, |ip_mode| ip_mode == "Proxy").await;
    mode_comes("nat").await;
}

pub async fn conditions_follow_the_gateways(user: &User) {
    let mut installation = Installation::without_gateway(user, |_| {}).await;
    user.add("web", &json!({})).await;
    user.wait_for_condition("web", "AddressAssigned", "True").await;
    assert_eq!(user.wait_for_condition("web", "Programmed", "False").await, "NoGateway");
    installation.connect_gateway();
    user.wait_for_condition("web", "Programmed", "True").await;
    assert!(!user.ingress("web").await.is_null());
    user.wait_for_event("web", "Programmed").await;
}

pub async fn a_refused_service_shows_the_reason(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}})).await;
    assert_eq!(user.wait_for_condition("web", "AddressAssigned", "False").await, "OutsidePools");
    assert_eq!(user.wait_for_condition("web", "Programmed", "False").await, "OutsidePools");
    let note = user.wait_for_event("web", "OutsidePools").await.note.unwrap();
    assert!(note.contains("203.0.113.9"), "{note}");
    user.annotate("web", "sluice.dev/addresses", "192.0.2.150").await;
    assert_eq!(user.wait_for_address("web").await, "192.0.2.150");
    user.wait_for_condition("web", "Programmed", "True").await;
    installation.wait_until_served(user, "web", 1).await;
}

pub async fn the_api_server_is_unreachable(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let before = user.wait_for_ingress("web").await;
    installation.wait_until_served(user, "web", 1).await;
    user.api_proxy.cut();
    user.set_backends("web", 2).await;
    user.add("next", &json!({})).await;
    user.api_proxy.restore();
    installation.wait_until_served(user, "web", 2).await;
    user.wait_for_ingress("next").await;
    assert_eq!(user.ingress("web").await, before);
    let received = installation.wait_until_served(user, "next", 1).await;
    assert!(received.removed.is_empty(), "{:?}", received.removed);
}

pub async fn a_controller_starts_during_an_outage(user: &User) {
    user.add("web", &json!({})).await;
    user.api_proxy.cut();
    let installation = Installation::start(user).await;
    user.api_proxy.restore();
    installation.wait_until_served(user, "web", 1).await;
    user.wait_for_ingress("web").await;
}
