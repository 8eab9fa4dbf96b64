//! PROXY headers: what gateways get of the annotations, and what nodes are told.

use std::time::Instant;

use objects::status::IpMode;
use proto::{ProxyProtocol, Reason};
use serde_json::json;

use super::{annotated, apply, named, settings};
use crate::plan::{Memory, plan};
use crate::world::World;

#[test]
fn each_port_has_the_header_that_it_asks_for_and_nodes_do_not_take_the_vip() {
    let mut world = World::default();
    let spec = json!({"ports": [{"name": "http", "port": 80}, {"name": "metrics", "port": 9090}]});
    for (name, mode) in [("two-way", "dnat"), ("one-way", "gue"), ("plain", "dnat")] {
        let mut service = annotated(name, mode, "endpoint", spec.clone());
        if name != "plain" {
            service["metadata"]["annotations"]["sluice.dev/proxy-protocol"] = json!("v2");
            service["metadata"]["annotations"]["sluice.dev/proxy-protocol-ports"] = json!("http");
        }
        apply(&mut world, service);
    }
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let headers = |name| plan.services[&named(name)].ports.iter().map(|port| port.proxy_protocol).collect::<Vec<_>>();
    let ip_mode = |name| plan.statuses[&named(name)].ingress[0].ip_mode;
    assert_eq!((headers("two-way"), ip_mode("two-way")), (vec![Some(ProxyProtocol::V2), None], IpMode::Proxy));
    assert_eq!((headers("plain"), ip_mode("plain")), (vec![None, None], IpMode::Vip));
    let refused = plan.services[&named("one-way")].refusal.clone().unwrap();
    assert_eq!((headers("one-way"), refused.reason), (Vec::new(), Reason::Unsupported));
}
