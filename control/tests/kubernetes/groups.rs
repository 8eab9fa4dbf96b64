//! Two groups of gateways on one cluster: each has a controller, a gateway and a pool of its own.

use serde_json::{Value, json};

use crate::api_server::Kind;
use crate::installation::Installation;
use crate::user::{User, condition, has_finalizer, wait_for};

/// Asks for a group, or for none.
async fn ask_for(user: &User, name: &str, group: Option<&str>) {
    user.change(name, &json!({"metadata": {"annotations": {"sluice.dev/gateway-group": group}}})).await;
}

/// Waits until a Service is served at an address that begins so. At no time the gateways of both groups have it.
async fn wait_until_moved(user: &User, name: &str, groups: [&Installation; 2], prefix: &str) -> Value {
    let full_name = user.full_name(name);
    let look = async || {
        let holders = groups.iter().filter(|group| group.received().services.contains_key(&full_name)).count();
        assert!(holders <= 1, "two groups forward for {name}");
        user.service(name).await
    };
    let is_there = |service: &Value| {
        let address = service["status"]["loadBalancer"]["ingress"][0]["ip"].as_str().unwrap_or_default();
        address.starts_with(prefix) && condition(service, "Programmed").as_deref() == Some("True Programmed")
    };
    wait_for(&format!("{name} at {prefix}"), look, is_there).await
}

#[tokio::test]
async fn a_service_moves_between_groups_and_is_never_served_by_both() {
    let (_server, user) = User::with_test_server().await;
    let home = Installation::start(&user).await;
    let east = Installation::start_group(&user, "east", "198.51.100.0-198.51.100.9").await;
    user.add("web", &json!({})).await;
    user.add("stays", &json!({})).await;
    let service = wait_until_moved(&user, "web", [&home, &east], "192.0.2.").await;
    assert_eq!(service["metadata"]["annotations"]["sluice.dev/group"], json!(user.group()));

    ask_for(&user, "web", Some("east")).await;
    let service = wait_until_moved(&user, "web", [&home, &east], "198.51.100.").await;
    assert_eq!(service["metadata"]["annotations"]["sluice.dev/group"], "east");
    assert!(has_finalizer(&service));
    east.wait_until_served(&user, "web", 1).await;
    home.wait_until_withdrawn(&user, "web").await;
    assert!(!east.received().services.contains_key(&user.full_name("stays")), "it names no group");

    ask_for(&user, "web", None).await;
    wait_until_moved(&user, "web", [&home, &east], "192.0.2.").await;
    east.wait_until_withdrawn(&user, "web").await;

    ask_for(&user, "web", Some("east")).await;
    wait_until_moved(&user, "web", [&home, &east], "198.51.100.").await;
    user.delete_service("web").await;
    user.wait_until_deleted("web").await;
    east.wait_until_withdrawn(&user, "web").await;
}

#[tokio::test]
async fn a_service_whose_group_does_not_exist_is_released_and_its_owner_told() {
    let (_server, user) = User::with_test_server().await;
    let home = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
    ask_for(&user, "web", Some("west")).await;
    home.wait_until_withdrawn(&user, "web").await;
    let event = user.wait_for_event("web", "NoGateway").await;
    let note = event.note.unwrap();
    assert!(note.contains("asks for group \"west\"") && note.contains(&user.group()), "{note}");
    let look = async || user.service("web").await;
    let is_released = |service: &Value| !has_finalizer(service) && service["status"]["loadBalancer"]["ingress"].is_null();
    wait_for("a Service without our fields", look, is_released).await;
    ask_for(&user, "web", Some(&user.group())).await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
}

#[tokio::test]
async fn pools_of_two_groups_are_kept_apart() {
    let (_server, user) = User::with_test_server().await;
    let _home = Installation::start(&user).await;
    let east = Installation::start_group(&user, "east", "198.51.100.0").await;
    user.add_pool("of-east", &["203.0.113.8/29"], &json!({"gatewayGroup": "east"})).await;
    user.add_pool("of-none", &["203.0.113.64/29"], &json!({})).await;
    for (name, group, address) in [("home", "", "203.0.113.64"), ("away", "east", "203.0.113.8")] {
        let annotations = json!({"sluice.dev/gateway-group": group, "sluice.dev/addresses": address});
        user.add(name, &json!({"metadata": {"annotations": annotations}})).await;
        assert_eq!(user.wait_for_address(name).await, address);
    }
    east.wait_until_served(&user, "away", 1).await;
    let annotations = json!({"sluice.dev/gateway-group": "east", "sluice.dev/addresses": "203.0.113.65"});
    user.add("wrong", &json!({"metadata": {"annotations": annotations}})).await;
    user.wait_for_reason("wrong", "AddressAssigned", "False OutsidePools").await;
}

#[tokio::test]
async fn two_installations_of_two_classes_serve_each_their_own_services() {
    let (server, user) = User::with_test_server().await;
    let first = Installation::start(&user).await;
    let second = Installation::start_beside(&user, "second", "198.51.100.0-198.51.100.9").await;
    user.add("web", &json!({})).await;
    user.add_service("other", &Installation::class_beside(&user, "second")).await;
    assert!(user.wait_for_address("web").await.starts_with("192.0.2."));
    assert!(user.wait_for_address("other").await.starts_with("198.51.100."));
    first.wait_until_served(&user, "web", 1).await;
    second.wait_until_served(&user, "other", 1).await;
    let [web, other] = ["web", "other"].map(|name| user.full_name(name));
    assert!(!first.received().services.contains_key(&other) && !second.received().services.contains_key(&web));

    // A gateway that has vanished keeps what it had; admission that refuses one object concerns no other.
    second.gateway().vanish();
    server.refuse(Kind::Service, "refused", "no such Service here");
    assert!(user.try_add("refused").await.is_err_and(|message| message.contains("no such Service here")));
    user.delete_service("other").await;
    user.wait_until_deleted("other").await;
    assert_eq!(second.received().backends(&other), 1, "it cannot know that the Service is gone");
    second.gateway().return_to_controller();
    second.wait_until_withdrawn(&user, "other").await;
    server.accept(Kind::Service, "refused");
    assert_eq!(user.try_add("refused").await, Ok(()));
    user.wait_for_address("refused").await;
}

#[tokio::test]
async fn a_gateway_that_acknowledges_nothing_stays_connected_and_delays_no_address_of_a_vip_mode() {
    let (_server, user) = User::with_test_server().await;
    let home = Installation::start(&user).await;
    home.wait_for_state("a first message", |received| received.messages > 0).await;
    home.gateway().stall();
    user.add("web", &json!({"metadata": {"annotations": {"sluice.dev/mode": "dnat"}}})).await;
    user.wait_for_address("web").await;
    assert_eq!(home.received().backends(&user.full_name("web")), 0);
    home.gateway().return_to_controller();
    home.wait_until_served(&user, "web", 1).await;
}
