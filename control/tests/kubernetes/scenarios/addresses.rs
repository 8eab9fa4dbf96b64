//! Which address a Service gets and keeps.

use serde_json::{Value, json};

use crate::installation::Installation;
use crate::user::{User, wait_for};

pub async fn a_restarted_controller_changes_no_address(user: &User) {
    let installation = Installation::start(user).await;
    for name in ["first", "second"] {
        user.add(name, &json!({})).await;
        user.wait_for_ingress(name).await;
    }
    let before = user.ingress("second").await;
    user.delete_service("first").await;
    user.wait_until_deleted("first").await;
    installation.stop().await;
    let installation = Installation::start(user).await;
    installation.wait_until_served(user, "second", 1).await;
    assert_eq!(user.ingress("second").await, before);
}

pub async fn a_requested_address_is_assigned(user: &User) {
    let _installation = Installation::start(user).await;
    let annotations = json!({"sluice.dev/addresses": "192.0.2.150"});
    user.add("annotated", &json!({"metadata": {"annotations": annotations}})).await;
    user.add("field", &json!({"spec": {"loadBalancerIP": "192.0.2.151"}})).await;
    assert_eq!(user.wait_for_address("annotated").await, "192.0.2.150");
    assert_eq!(user.wait_for_address("field").await, "192.0.2.151");
}

pub async fn a_renamed_service_gets_the_address_that_it_names(user: &User) {
    let installation = Installation::start(user).await;
    let request = json!({"metadata": {"annotations": {"sluice.dev/addresses": "192.0.2.150"}}});
    user.add("web", &request).await;
    assert_eq!(user.wait_for_address("web").await, "192.0.2.150");
    user.delete_service("web").await;
    // The reservation of its former name would last for ten minutes.
    user.add("web2", &request).await;
    assert_eq!(user.wait_for_address("web2").await, "192.0.2.150");
    installation.wait_until_served(user, "web2", 1).await;
}

pub async fn an_unreadable_request_gets_no_other_address(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "192.0.2.300"}}})).await;
    assert_eq!(user.wait_for_condition("web", "AddressAssigned", "False").await, "Refused");
    let note = user.wait_for_event("web", "Refused").await.note.unwrap();
    assert!(note.contains("192.0.2.300") && note.contains("no other address is given"), "{note}");
    assert!(user.ingress("web").await.is_null());
    user.annotate("web", "sluice.dev/addresses", "192.0.2.150").await;
    assert_eq!(user.wait_for_address("web").await, "192.0.2.150");
    installation.wait_until_served(user, "web", 1).await;
}

pub async fn the_older_service_gets_a_contested_address(user: &User) {
    let request = json!({"spec": {"loadBalancerIP": "192.0.2.150"}});
    user.add("older", &request).await;
    user.wait_for_a_later_second("older").await;
    // By name this Service would be first.
    user.add("a-younger", &request).await;
    let installation = Installation::start(user).await;
    assert_eq!(user.wait_for_address("older").await, "192.0.2.150");
    user.add("last", &json!({})).await;
    user.wait_for_ingress("last").await;
    assert!(user.ingress("a-younger").await.is_null());
    installation.wait_until_served(user, "older", 1).await;
}

pub async fn an_exhausted_pool_is_reported_until_it_grows(user: &User) {
    let pool = user.add_pool("small", &["198.51.100.1/32"], &json!({})).await;
    let _installation = Installation::start_with(user, |settings| settings.pools.clear()).await;
    user.add("first", &json!({})).await;
    assert_eq!(user.wait_for_address("first").await, "198.51.100.1");
    user.add("second", &json!({})).await;
    assert_eq!(user.wait_for_condition("second", "AddressAssigned", "False").await, "Exhausted");
    user.wait_for_event("second", "Exhausted").await;
    user.set_pool(&pool, &["198.51.100.1-198.51.100.2"]).await;
    assert_eq!(user.wait_for_address("second").await, "198.51.100.2");
    assert_eq!(user.wait_for_address("first").await, "198.51.100.1");
}

pub async fn a_changed_or_deleted_pool_changes_no_address(user: &User) {
    let pool = user.add_pool("edited", &["198.51.100.0/28"], &json!({})).await;
    let installation = Installation::start_with(user, |settings| settings.pools.clear()).await;
    user.add("web", &json!({})).await;
    let before = user.wait_for_address("web").await;
    user.set_pool(&pool, &["203.0.113.0/28"]).await;
    user.add("next", &json!({})).await;
    assert!(user.wait_for_address("next").await.starts_with("203.0.113."));
    assert_eq!(user.wait_for_address("web").await, before);
    user.delete_pool(&pool).await;
    user.set_backends("web", 2).await;
    let received = installation.wait_until_served(user, "web", 2).await;
    assert!(received.removed.is_empty(), "{:?}", received.removed);
    user.wait_for_reason("web", "AddressAssigned", "True OutsidePools").await;
    assert_eq!(user.wait_for_address("web").await, before);
}

/// Formatted as `used of total`, and the condition `Conflict`.
fn usage(status: &Value) -> String {
    let conflict = status["conditions"].as_array().into_iter().flatten().find(|one| one["type"] == "Conflict");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let conflict = conflict.map(|one| text(&one["status"])).unwrap_or_default();
    format!("{} of {}, {conflict}", text(&status["used"]), text(&status["total"]))
}

pub async fn a_pool_provides_addresses_and_shows_its_usage(user: &User) {
    let installation = Installation::start(user).await;
    let pool = user.add_pool("edge", &["203.0.113.0/30"], &json!({"autoAssign": false})).await;
    let wait_for_usage = async |name: &str, wanted: &str| {
        wait_for("the pool's status", async || user.pool_status(name).await, |status| usage(status) == wanted).await
    };
    wait_for_usage(&pool, "0 of 4, False").await;
    user.add("web", &json!({"metadata": {"annotations": {"sluice.dev/address-pool": pool}}})).await;
    assert_eq!(user.wait_for_address("web").await, "203.0.113.0");
    let status = wait_for_usage(&pool, "1 of 4, False").await;
    assert_eq!(status["available"], "3");
    user.wait_for_a_later_second("web").await;
    let younger = user.add_pool("younger", &["203.0.113.3-203.0.113.9"], &json!({})).await;
    let status = wait_for_usage(&younger, "0 of 0, True").await;
    let message = status["conditions"][0]["message"].as_str().unwrap();
    assert!(message.contains(&format!("of pool {pool}")) && message.contains(&younger), "{message}");
    user.delete_pool(&pool).await;
    wait_for_usage(&younger, "0 of 7, False").await;
    assert_eq!(user.wait_for_address("web").await, "203.0.113.0");
    installation.wait_until_served(user, "web", 1).await;
}

/// Condition of a pool: `STATUS: message`.
fn pool_condition(status: &Value, kind: &str) -> String {
    let found = status["conditions"].as_array().into_iter().flatten().find(|one| one["type"] == kind);
    found.map_or_else(String::new, |one| format!("{}: {}", one["status"].as_str().unwrap(), one["message"].as_str().unwrap()))
}

pub async fn an_l2_pool_tells_which_gateways_cannot_announce_it(user: &User) {
    let installation = Installation::start_with(user, |settings| settings.pools.clear()).await;
    let pool = user.add_pool("link", &["198.51.100.0/28"], &json!({"announce": "l2"})).await;
    user.add("web", &json!({})).await;
    user.wait_for_ingress("web").await;
    let announceable = async |wanted: &str| {
        let poll = async || pool_condition(&user.pool_status(&pool).await, "Announceable");
        wait_for("condition Announceable", poll, |found| found.starts_with(wanted)).await
    };
    installation.gateway().report_links(&["192.0.2.0/24"]);
    let message = announceable("False").await;
    assert!(message.contains(&format!("gateway {} cannot answer ARP and NDP", user.gateway)), "{message}");
    user.wait_for_reason("web", "Programmed", "False Refused").await;
    installation.gateway().report_links(&["192.0.2.0/24", "198.51.100.0/24"]);
    announceable("True").await;
    user.wait_for_reason("web", "Programmed", "True Programmed").await;
}

pub async fn a_pool_tells_which_gateways_its_freed_addresses_wait_for(user: &User) {
    let pool = user.add_pool("small", &["198.51.100.1/32"], &json!({})).await;
    let installation = Installation::start_with(user, |settings| settings.pools.clear()).await;
    user.add("first", &json!({})).await;
    installation.wait_until_served(user, "first", 1).await;
    let exhausted = async |wanted: &str| {
        let poll = async || pool_condition(&user.pool_status(&pool).await, "Exhausted");
        wait_for("condition Exhausted", poll, |found| found.contains(wanted)).await
    };
    exhausted("True: no IPv4 address is left").await;
    installation.gateway().vanish();
    user.delete_service("first").await;
    user.wait_until_deleted("first").await;
    let message = exhausted("1 freed address waits").await;
    assert!(message.contains(&format!("; not connected: {} (delete the EdgeGateway", user.gateway)), "{message}");
    installation.gateway().return_to_controller();
    exhausted("False: ").await;
    user.add("second", &json!({})).await;
    assert_eq!(user.wait_for_address("second").await, "198.51.100.1");
}

pub async fn services_with_one_sharing_key_share_an_address(user: &User) {
    let installation = Installation::start(user).await;
    let sharing = |name: &str, port: u16| {
        let ports = json!([{"name": name, "port": port, "targetPort": 8080}]);
        json!({"metadata": {"annotations": {"sluice.dev/sharing-key": "web"}}, "spec": {"ports": ports}})
    };
    user.add("plain", &sharing("http", 80)).await;
    let shared = user.wait_for_address("plain").await;
    user.add("secure", &sharing("http", 443)).await;
    assert_eq!(user.wait_for_address("secure").await, shared);
    user.add("other", &sharing("http", 80)).await;
    assert_ne!(user.wait_for_address("other").await, shared, "the port is taken");
    user.delete_service("plain").await;
    installation.wait_until_withdrawn(user, "plain").await;
    assert_eq!(user.wait_for_address("secure").await, shared);
}

pub async fn a_foreign_address_is_not_adopted(user: &User) {
    let installation = Installation::start(user).await;
    user.add("lowest", &json!({})).await;
    user.wait_for_ingress("lowest").await;
    let mut before = Vec::new();
    for name in ["outside", "loopback", "claimant", "holder"] {
        user.add(name, &json!({})).await;
        before.push((name, user.wait_for_address(name).await));
        user.wait_for_a_later_second(name).await;
    }
    let holders = before[3].1.clone();
    // Otherwise the lowest free address could be the correct one by chance.
    user.delete_service("lowest").await;
    user.wait_until_deleted("lowest").await;
    user.wait_for_checkpoint(&format!("{}/holder {holders}", user.namespace)).await;
    installation.stop().await;
    user.write_address("outside", "198.18.0.1").await;
    user.write_address("loopback", "127.0.0.1").await;
    user.write_address("claimant", &holders).await;
    let installation = Installation::start(user).await;
    for (name, address) in before {
        wait_for(&format!("the address of {name}"), async || user.wait_for_address(name).await, |found| *found == address).await;
        user.wait_for_condition(name, "Programmed", "True").await;
        installation.wait_until_served(user, name, 1).await;
    }
    for (name, why) in [("outside", "198.18.0.1"), ("loopback", "127.0.0.0/8"), ("claimant", "held by")] {
        let note = user.wait_for_event(name, "AddressLost").await.note.unwrap();
        assert!(note.contains(why), "{note}");
    }
}

pub async fn an_address_is_not_reused_until_its_service_is_deleted(user: &User) {
    user.add_pool("small", &["198.51.100.1/32"], &json!({})).await;
    let installation = Installation::start_with(user, |settings| settings.pools.clear()).await;
    user.add("old", &json!({})).await;
    let address = user.wait_for_address("old").await;
    installation.stop().await;
    user.delete_service("old").await;
    user.add("next", &json!({})).await;
    let installation = Installation::start_with(user, |settings| settings.pools.clear()).await;
    assert_eq!(user.wait_for_address("next").await, address);
    assert!(!user.has_service("old").await, "its address was allocated again before it was released");
    installation.wait_until_served(user, "next", 1).await;
}

pub async fn a_reserved_address_is_used_when_no_other_is_free(user: &User) {
    user.add_pool("small", &["198.51.100.1-198.51.100.2"], &json!({})).await;
    let installation = Installation::start_with(user, |settings| settings.pools.clear()).await;
    for name in ["first", "second"] {
        user.add(name, &json!({})).await;
        user.wait_for_ingress(name).await;
    }
    for name in ["second", "first"] {
        user.delete_service(name).await;
        user.wait_until_deleted(name).await;
        installation.wait_until_withdrawn(user, name).await;
    }
    // It is reserved for its last holder, but nothing else is free. The address that was freed first is used first.
    user.add("third", &json!({})).await;
    assert_eq!(user.wait_for_address("third").await, "198.51.100.2");
    user.add("first", &json!({})).await;
    assert_eq!(user.wait_for_address("first").await, "198.51.100.1");
}

pub async fn a_restarted_controller_keeps_table_sizes_and_reservations(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    user.add("old", &json!({})).await;
    let freed = user.wait_for_address("old").await;
    user.set_backends("web", 3).await;
    installation.wait_until_served(user, "web", 3).await;
    user.set_backends("web", 1).await;
    let web = user.full_name("web");
    let size = |received: &crate::gateway::ReceivedState| received.services[&web].ports[0].maglev_size;
    assert_eq!(size(&installation.wait_until_served(user, "web", 1).await), 1021);
    user.delete_service("old").await;
    user.wait_until_deleted("old").await;
    user.wait_for_checkpoint(&format!("reserved {freed} ")).await;
    user.wait_for_checkpoint("tcp/80/IPv4=1021").await;
    installation.stop().await;
    let installation = Installation::start(user).await;
    assert_eq!(size(&installation.wait_until_served(user, "web", 1).await), 1021);
    user.add("other", &json!({})).await;
    assert_ne!(user.wait_for_address("other").await, freed, "it is reserved");
    user.add("old", &json!({})).await;
    assert_eq!(user.wait_for_address("old").await, freed);
}
