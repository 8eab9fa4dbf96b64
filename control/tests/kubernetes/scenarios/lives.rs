//! The life cycle of one Service: creation, changes, deletion, and outages of the API server.

use std::time::Instant;

use serde_json::json;

use crate::installation::Installation;
use crate::user::{User, reached};

pub async fn a_new_service_has_its_address(user: &User) {
    let installation = Installation::start(user).await;
    installation.gives("a first message", |given| given.messages > 0).await;
    let start = Instant::now();
    user.add("web", &json!({})).await;
    let ingress = user.ingress_comes("web").await;
    println!("an address after {:?}", start.elapsed());
    let ports = json!([{"port": 80, "protocol": "TCP"}]);
    assert_eq!(ingress, json!([{"ip": "192.0.2.100", "ipMode": "Proxy", "ports": ports}]));
    installation.serves(user, "web", 1).await;
}

pub async fn backends_come_and_go(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    for count in [1, 3, 2] {
        user.set_backends("web", count).await;
        installation.serves(user, "web", count.into()).await;
    }
    let before = user.ingress_comes("web").await;
    user.set_backends("web", 0).await;
    installation.serves(user, "web", 0).await;
    assert_eq!(user.ingress("web").await, before, "a Service without backends keeps its address");
}

pub async fn a_deleted_service_is_withdrawn(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let before = user.address_comes("web").await;
    installation.serves(user, "web", 1).await;
    user.delete_service("web").await;
    installation.withdraws(user, "web").await;
    user.service_goes("web").await;
    user.add("other", &json!({})).await;
    assert_ne!(user.address_comes("other").await, before, "it is reserved for its last holder");
    user.add("web", &json!({})).await;
    assert_eq!(user.address_comes("web").await, before);
}

pub async fn a_type_changes(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let before = user.address_comes("web").await;
    installation.serves(user, "web", 1).await;
    user.change("web", &json!({"spec": {"type": "ClusterIP"}})).await;
    installation.withdraws(user, "web").await;
    reached(
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
    assert_eq!(user.address_comes("web").await, before);
    installation.serves(user, "web", 1).await;
}

pub async fn a_mode_changes(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let web = user.full_name("web");
    let mode_comes = async |wanted: &str| {
        let is_wanted = |given: &crate::gateway::Given| given.services.get(&web).is_some_and(|service| service.mode == wanted);
        installation.gives(&format!("mode {wanted}"), is_wanted).await;
    };
    let told = async || user.ingress("web").await[0]["ipMode"].clone();
    reached("the first status", &told, |told| told == "Proxy").await;
    user.annotate("web", "sluice.dev/mode", "dnat").await;
    mode_comes("dnat").await;
    assert_eq!(told().await, "VIP", "the status must change before the gateways");
    user.annotate("web", "sluice.dev/mode", "nat").await;
    reached("the previous status", &told, |told| told == "Proxy").await;
    mode_comes("nat").await;
}

pub async fn conditions_follow_the_gateways(user: &User) {
    let mut installation = Installation::without_gateway(user, |_| {}).await;
    user.add("web", &json!({})).await;
    user.condition_comes("web", "sluice.dev/AddressAssigned", "True").await;
    assert_eq!(user.condition_comes("web", "sluice.dev/Programmed", "False").await, "NoGateway");
    installation.connect_gateway();
    user.condition_comes("web", "sluice.dev/Programmed", "True").await;
    assert!(!user.ingress("web").await.is_null());
    user.event_comes("web", "Programmed").await;
}

pub async fn a_refusal_says_why(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}})).await;
    assert_eq!(user.condition_comes("web", "sluice.dev/AddressAssigned", "False").await, "OutsidePools");
    assert_eq!(user.condition_comes("web", "sluice.dev/Programmed", "False").await, "OutsidePools");
    let note = user.event_comes("web", "OutsidePools").await;
    assert!(note.contains("203.0.113.9"), "{note}");
    user.annotate("web", "sluice.dev/addresses", "192.0.2.150").await;
    assert_eq!(user.address_comes("web").await, "192.0.2.150");
    user.condition_comes("web", "sluice.dev/Programmed", "True").await;
    installation.serves(user, "web", 1).await;
}

pub async fn the_api_server_is_away(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    let before = user.ingress_comes("web").await;
    installation.serves(user, "web", 1).await;
    user.link.cut();
    user.set_backends("web", 2).await;
    user.add("next", &json!({})).await;
    user.link.mend();
    installation.serves(user, "web", 2).await;
    user.ingress_comes("next").await;
    assert_eq!(user.ingress("web").await, before);
    let given = installation.serves(user, "next", 1).await;
    assert!(given.removed.is_empty(), "{:?}", given.removed);
}

pub async fn a_controller_starts_during_an_outage(user: &User) {
    user.add("web", &json!({})).await;
    user.link.cut();
    let installation = Installation::start(user).await;
    user.link.mend();
    installation.serves(user, "web", 1).await;
    user.ingress_comes("web").await;
}
