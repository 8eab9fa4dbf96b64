//! The meaning of fields of Services and their slices.

use std::time::Instant;

use control::plan::selection::SLICE_KEPT;
use kube::api::{Api, DeleteParams};
use serde_json::json;

use crate::installation::Installation;
use crate::user::User;

pub async fn endpoints_of_a_deleted_slice_stay_for_two_seconds(user: &User) {
    let installation = Installation::start(user).await;
    user.add("web", &json!({})).await;
    user.set_backends("web", 3).await;
    let manager = json!({"endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"});
    user.change_slice("web", &json!({"metadata": {"labels": manager}})).await;
    installation.wait_until_served(user, "web", 3).await;
    let slices = Api::<k8s_openapi::api::discovery::v1::EndpointSlice>::namespaced(user.cluster.client.clone(), &user.namespace);
    let deleted = Instant::now();
    slices.delete("web-1", &DeleteParams::default()).await.unwrap();
    installation.wait_until_served(user, "web", 0).await;
    assert!(deleted.elapsed() >= SLICE_KEPT, "its endpoints were removed after {:?}", deleted.elapsed());
}

/// The addresses lie in no pool, not even of another installation.
pub async fn external_ips_are_served_where_they_are_allowed(user: &User) {
    let installation = Installation::start_with(user, |settings| {
        settings.ownership.external_ips_allowed = vec!["198.18.0.0/15".parse().unwrap()];
    })
    .await;
    let spec = json!({"type": "ClusterIP", "loadBalancerClass": null, "externalIPs": ["198.18.0.7", "198.51.100.7"]});
    user.add("inner", &json!({"spec": spec})).await;
    let received = installation.wait_until_served(user, "inner", 1).await;
    let port = &received.services[&user.full_name("inner")].ports[0];
    assert_eq!((&port.vips, port.node_port), (&vec![vec![198, 18, 0, 7]], 0));
    // sluice does not own the status of a Service that is no LoadBalancer, and adds no finalizer to it.
    user.add("web", &json!({})).await;
    user.wait_for_ingress("web").await;
    let service = user.service("inner").await;
    assert!(service["metadata"]["finalizers"].is_null() && service["status"]["conditions"].is_null(), "{service}");
}

pub async fn one_port_number_on_three_protocols(user: &User) {
    let installation = Installation::start(user).await;
    let port = |name: &str, protocol: &str| json!({"name": name, "port": 5060, "protocol": protocol, "appProtocol": "sip"});
    let ports = json!([port("sip-tcp", "TCP"), port("sip-udp", "UDP"), port("sip-sctp", "SCTP")]);
    user.add("sip", &json!({"spec": {"ports": ports}})).await;
    let name = user.full_name("sip");
    let has_all =
        |received: &crate::gateway::ReceivedState| received.services.get(&name).is_some_and(|service| service.ports.len() == 3);
    let received = installation.wait_for_state("three frontends", has_all).await;
    let frontends = received.services[&name].ports.iter().map(|port| (port.protocol, port.port, port.app_protocol.as_str()));
    assert_eq!(frontends.collect::<Vec<_>>(), [(6, 5060, "sip"), (17, 5060, "sip"), (132, 5060, "sip")]);
}
