//! Which address a Service has, and keeps.

use serde_json::json;

use crate::installation::Installation;
use crate::user::User;

pub async fn a_new_controller_renumbers_nobody(user: &User) {
    let installation = Installation::start(user).await;
    for name in ["first", "second"] {
        user.add(name, &json!({})).await;
        user.ingress_comes(name).await;
    }
    let before = user.ingress("second").await;
    user.delete_service("first").await;
    user.service_goes("first").await;
    installation.stop().await;
    let installation = Installation::start(user).await;
    installation.serves(user, "second", 1).await;
    assert_eq!(user.ingress("second").await, before);
}

pub async fn an_address_is_asked_for(user: &User) {
    let _installation = Installation::start(user).await;
    let annotations = json!({"sluice.dev/addresses": "192.0.2.150"});
    user.add("annotated", &json!({"metadata": {"annotations": annotations}})).await;
    user.add("field", &json!({"spec": {"loadBalancerIP": "192.0.2.151"}})).await;
    assert_eq!(user.address_comes("annotated").await, "192.0.2.150");
    assert_eq!(user.address_comes("field").await, "192.0.2.151");
}

pub async fn the_older_claim_wins(user: &User) {
    let asks = json!({"spec": {"loadBalancerIP": "192.0.2.150"}});
    user.add("older", &asks).await;
    user.wait_for_a_later_second("older").await;
    // By name it would come first.
    user.add("a-younger", &asks).await;
    let installation = Installation::start(user).await;
    assert_eq!(user.address_comes("older").await, "192.0.2.150");
    user.add("last", &json!({})).await;
    user.ingress_comes("last").await;
    assert!(user.ingress("a-younger").await.is_null());
    installation.serves(user, "older", 1).await;
}
