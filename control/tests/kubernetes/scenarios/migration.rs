//! Services that come from another load balancer (docs/guide/migration.md).

use serde_json::{Value, json};

use super::ownership::claim_classless;
use crate::installation::Installation;
use crate::user::{User, wait_for};

/// In the middle of the pool, so that it is not allocated by chance.
const ADDRESS: &str = "192.0.2.177";

pub async fn an_address_of_another_controller_is_kept(user: &User) {
    user.add("web", &json!({"spec": {"loadBalancerClass": null}})).await;
    // Simulates MetalLB, which serves Services without a class.
    user.write_address("web", ADDRESS).await;
    let installation = Installation::start_with(user, |settings| claim_classless(user, settings)).await;
    let received = installation.wait_until_served(user, "web", 1).await;
    let address: std::net::Ipv4Addr = ADDRESS.parse().unwrap();
    assert_eq!(received.services[&user.full_name("web")].ports[0].vips, [address.octets().to_vec()]);
    let ports = json!([{"port": 80, "protocol": "TCP"}]);
    let is_ours = |ingress: &Value| *ingress == json!([{"ip": ADDRESS, "ipMode": "Proxy", "ports": ports}]);
    wait_for("our status with the same address", async || user.ingress("web").await, is_ours).await;
}
