//! Two groups of gateways on one cluster: each has a controller, a gateway and a pool of its own.

use serde_json::{Value, json};

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
