//! Ownership: the Services that a controller serves.

use control::config::settings::ControllerSettings;
use serde_json::json;

use crate::installation::Installation;
use crate::user::User;

pub async fn services_of_others_are_left_alone(user: &User) {
    let installation = Installation::start(user).await;
    user.add_service("theirs", "example.com/other").await;
    let before = user.service("theirs").await;
    user.add("ours", &json!({})).await;
    user.wait_for_ingress("ours").await;
    let received = installation.wait_until_served(user, "ours", 1).await;
    assert_eq!(user.service("theirs").await, before, "no field of it may change");
    assert_eq!(received.services.len(), 1);
}

pub async fn classless_services_are_claimed(user: &User) {
    let classless = json!({"metadata": {"labels": {"gateway": "ours"}}, "spec": {"loadBalancerClass": null}});
    let installation = Installation::start(user).await;
    user.add("web", &classless).await;
    user.add("ours", &json!({})).await;
    user.wait_for_ingress("ours").await;
    assert!(user.ingress("web").await.is_null());
    installation.stop().await;

    let labelled = json!({"matchLabels": {"gateway": "ours"}});
    let installation = Installation::start_with(user, |settings| {
        claim_classless(user, settings);
        settings.ownership.classless.services = selector(&labelled);
    })
    .await;
    user.add("unlabelled", &json!({"spec": {"loadBalancerClass": null}})).await;
    user.wait_for_ingress("web").await;
    installation.wait_until_served(user, "web", 1).await;
    assert!(user.ingress("unlabelled").await.is_null());
}

/// Claims Services without a class in the namespace of the user.
pub fn claim_classless(user: &User, settings: &mut ControllerSettings) {
    settings.ownership.classless.enabled = true;
    settings.ownership.classless.namespaces = selector(&json!({"matchLabels": {"kubernetes.io/metadata.name": user.namespace}}));
}

fn selector(labels: &serde_json::Value) -> kube::core::Selector {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
    let labels: LabelSelector = serde_json::from_value(labels.clone()).unwrap();
    labels.try_into().unwrap()
}
