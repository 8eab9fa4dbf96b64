//! The status of gateways, as EdgeGateway objects show it.

use kube::Api;
use objects::crd::EdgeGateway;
use serde_json::json;

use crate::api_server::{Fault, FaultRule};
use crate::installation::Installation;
use crate::user::{User, wait_for};

#[tokio::test]
async fn a_connected_gateway_is_shown_in_the_cluster() {
    let (_server, user) = User::with_test_server().await;
    let _installation = Installation::start(&user).await;
    user.add("web", &json!({})).await;
    user.wait_for_ingress("web").await;
    let gateways = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let look = async || gateways.get_opt("edge-1").await.unwrap().filter(|object| object.status.is_some());
    let object = wait_for("an EdgeGateway", look, Option::is_some).await.unwrap();
    let status = object.status.unwrap();
    assert_eq!((object.spec.group, status.version.as_deref()), (user.group(), Some("test")));
    assert!(status.last_seen.is_some() && status.ready.is_some(), "{status:?}");
}

#[tokio::test]
async fn edge_gateways_follow_changes_of_services_and_failed_writes() {
    let (server, user) = User::with_test_server().await;
    server.inject(FaultRule { fault: Fault::Internal, times: 2, method: "PATCH", path_contains: "/edgegateways/", watch: false });
    let _installation = Installation::start(&user).await;
    let gateways = Api::<EdgeGateway>::all(user.cluster.client.clone());
    let services_shown = async || gateways.get_opt("edge-1").await.unwrap().and_then(|object| object.status?.services);
    wait_for("a status, once the server accepts it", &services_shown, Option::is_some).await;
    for count in 1..=2 {
        user.add(&format!("web-{count}"), &json!({})).await;
        wait_for("the number of Services", &services_shown, |services| *services == Some(count)).await;
    }
}
