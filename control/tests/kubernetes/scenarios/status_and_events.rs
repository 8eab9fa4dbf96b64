//! What owners of Services see: conditions, Events, and the status of each port.

use std::time::{Duration, Instant};

use futures::future::join_all;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::installation::Installation;
use crate::user::{User, is_about, wait_for};

/// Counts only Services whose slice reached the gateway within the grace time, since a busy machine may need longer.
pub async fn a_new_service_causes_no_warning(user: &User) {
    const GRACE_TIME: Duration = Duration::from_secs(2);
    let installation = Installation::start_reporting(user).await;
    installation.wait_for_state("a first message", |received| received.messages > 0).await;
    user.add_ready_pod("shop", "10.0.0.11").await;
    let mut in_time = Vec::new();
    for number in 0..60 {
        let name = format!("web-{number}");
        let start = Instant::now();
        user.add_without_slice(&name, &json!({"spec": {"selector": {"app": "shop"}}})).await;
        // At this time the controller has planned the Service without endpoints.
        user.wait_for_condition(&name, "AddressAssigned", "True").await;
        installation.wait_until_served(user, &name, 1).await;
        if start.elapsed() < GRACE_TIME {
            in_time.push(name);
        }
        if in_time.len() == 6 {
            break;
        }
    }
    assert!(!in_time.is_empty(), "no slice reached the gateway within {GRACE_TIME:?}");
    for name in &in_time {
        assert_eq!(user.wait_for_condition(name, "BackendsHealthy", "True").await, "Healthy");
        user.wait_for_event(name, "Programmed").await;
    }
    let mut warnings = user.events().await;
    warnings.retain(|event| event.type_.as_deref() == Some("Warning") && in_time.iter().any(|name| is_about(event, name)));
    assert!(warnings.is_empty(), "{warnings:#?}");
    user.end_pod("shop").await;
}

pub async fn missing_backends_have_distinct_reasons(user: &User) {
    let _installation = Installation::start_reporting(user).await;
    user.add_without_slice("none", &json!({})).await;
    // The slice is created first: otherwise it could arrive after two seconds, and change what was reported until then.
    user.add_slice("other", &json!([{"port": 8080, "protocol": "TCP", "name": "web"}])).await;
    user.add_without_slice("other", &json!({})).await;
    assert_eq!(user.wait_for_condition("none", "BackendsHealthy", "False").await, "NoEndpoints");
    assert_eq!(user.wait_for_condition("other", "BackendsHealthy", "False").await, "NoMatchingPort");
    let none = user.wait_for_event("none", "NoEndpoints").await.note.unwrap();
    let other = user.wait_for_event("other", "NoMatchingPort").await.note.unwrap();
    assert!(other.contains("http (tcp 80)") && other.contains("web (tcp 8080)"), "{other}");
    assert!(none.contains("no endpoint"), "{none}");
    user.change_slice("other", &json!({"ports": [{"port": 8080, "protocol": "TCP", "name": "http"}]})).await;
    user.wait_for_condition("other", "BackendsHealthy", "True").await;
}

pub async fn every_port_is_in_the_status(user: &User) {
    let _installation = Installation::start(user).await;
    let port = |name: &str, port: u16| json!({"name": name, "port": port, "targetPort": 8080});
    user.add("web", &json!({"spec": {"ports": [port("http", 80), port("admin", 9090)]}})).await;
    let ports = async || user.ingress("web").await[0]["ports"].clone();
    let is_refused = |ports: &Value| ports[1]["error"].is_string();
    let error = json!("sluice.dev/NoMatchingPort");
    let expected = json!([{"port": 80, "protocol": "TCP"}, {"port": 9090, "protocol": "TCP", "error": error}]);
    assert_eq!(wait_for("an error", &ports, is_refused).await, expected);
    let both = json!([{"port": 8080, "protocol": "TCP", "name": "http"}, {"port": 8081, "protocol": "TCP", "name": "admin"}]);
    user.change_slice("web", &json!({"ports": both})).await;
    wait_for("no error", &ports, |ports| !is_refused(ports)).await;
}

/// Creates more Services at once than the controller can report by Events in some seconds, then one that cannot be
/// served.
pub async fn a_refusal_is_reported_before_routine_events(user: &User) {
    let _installation = Installation::start_with(user, |settings| {
        settings.pools[0].ranges = vec!["192.0.2.100-192.0.3.199".parse().unwrap()];
    })
    .await;
    let nothing = json!({});
    for round in 0..4 {
        let names: Vec<String> = (0..40).map(|number| format!("web-{round}-{number}")).collect();
        join_all(names.iter().map(|name| user.add_without_slice(name, &nothing))).await;
        for name in &names {
            user.wait_for_condition(name, "AddressAssigned", "True").await;
        }
        let refused = format!("refused-{round}");
        user.add_without_slice(&refused, &json!({"metadata": {"annotations": {"sluice.dev/addresses": "203.0.113.9"}}})).await;
        user.wait_for_event(&refused, "OutsidePools").await;
        let all = wait_for(
            "the Events of the last",
            async || user.events().await,
            |all| all.iter().any(|event| is_about(event, names.last().unwrap())),
        )
        .await;
        let warning = all.iter().find(|event| event.reason.as_deref() == Some("OutsidePools")).unwrap();
        let version = |event: &Event| event.resource_version().unwrap().parse::<u64>().unwrap();
        let time = |event: &Event| event.event_time.as_ref().unwrap().0;
        if all.iter().any(|event| time(event) < time(warning) && version(event) > version(warning)) {
            return;
        }
    }
    panic!("no Warning was written before a routine Event with an earlier time");
}

pub async fn a_typing_error_interrupts_no_traffic(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({"metadata": {"annotations": {"sluice.dev/addresses": "192.0.2.150"}}})).await;
    installation.wait_until_served(user, "web", 1).await;
    assert_eq!(user.wait_for_address("web").await, "192.0.2.150");
    user.annotate("web", "sluice.dev/addresses", "192.0.2.1500").await;
    user.annotate("web", "sluice.dev/health-check", "http").await;
    let note = user.wait_for_event("web", "AnnotationIgnored").await.note.unwrap();
    assert!(note.contains("sluice.dev/"), "{note}");
    user.wait_for_reason("web", "Programmed", "True AnnotationIgnored").await;
    assert_eq!(user.wait_for_address("web").await, "192.0.2.150");
    let received = installation.wait_until_served(user, "web", 1).await;
    assert!(received.removed.is_empty(), "{:?}", received.removed);
}
