//! Health checks: what the plan makes of settings, defaults and the health of nodes.

use std::time::Instant;

use proto::HealthCheck;
use serde_json::json;

use super::{addresses, annotated, apply, named, node, settings};
use crate::config::settings::ControllerSettings;
use crate::plan::{Memory, plan};
use crate::world::World;

#[test]
fn under_local_the_health_check_node_port_counts_where_nodes_are_targets() {
    let mut world = World::default();
    node(&mut world, "a", json!({}), &["10.0.1.1"]);
    let spec =
        json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": 31000, "ports": [{"port": 80, "nodePort": 30080}]});
    apply(&mut world, annotated("nodes", "nat", "node", spec.clone()));
    apply(&mut world, annotated("pods", "nat", "endpoint", spec));
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let port = |name| plan.services[&named(name)].health.node_health_port;
    assert_eq!([port("nodes"), port("pods")], [Some(31_000), None]);
    let nodes = &plan.services[&named("nodes")];
    assert!(nodes.refusal.is_none() && nodes.local && addresses(nodes).is_empty(), "no endpoint, no node");
}

#[test]
fn nodes_without_a_health_check_node_port_are_asked_by_the_port_of_kube_proxy() {
    let mut world = World::default();
    node(&mut world, "a", json!({}), &["10.0.1.1"]);
    let spec = json!({"ports": [{"port": 80, "nodePort": 30080}]});
    apply(&mut world, annotated("nodes", "nat", "node", spec.clone()));
    apply(&mut world, annotated("pods", "nat", "endpoint", spec.clone()));
    let mut unprobed = annotated("unprobed", "nat", "node", spec);
    unprobed["metadata"]["annotations"]["sluice.dev/health-check"] = json!("none");
    apply(&mut world, unprobed);
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let port = |name| plan.services[&named(name)].health.node_health_port;
    assert_eq!([port("nodes"), port("pods"), port("unprobed")], [Some(10_256), None, None]);
}

#[test]
fn a_setting_without_effect_on_the_probe_is_remarked() {
    let mut world = World::default();
    let mut web = annotated("web", "nat", "endpoint", json!({"ports": [{"port": 80}]}));
    web["metadata"]["annotations"]["sluice.dev/health-check-path"] = json!("/healthz");
    apply(&mut world, web);
    let remarks = |health: HealthCheck| {
        let settings = ControllerSettings { health, ..settings() };
        let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
        plan.notes.iter().any(|note| note.remark.text.contains("health-check-path has no effect on health check tcp"))
    };
    assert!(remarks(HealthCheck::default()));
    assert!(!remarks(HealthCheck { probe: proto::Probe::Http, ..HealthCheck::default() }), "the default is another probe");
}
