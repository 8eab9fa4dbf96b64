//! Recorded events of a real API server about some Services and their slices, from the first to the last, through World
//! and plan.
//!
//! `fixtures/watch.ndjson` contains the events of kube-apiserver 1.36.2 in the order of their resourceVersions, reduced
//! to the fields that sluice reads. Services of type `LoadBalancer` without a class got ours.

#![allow(clippy::unwrap_used, clippy::panic)]

mod settings;

use std::collections::BTreeMap;
use std::time::Instant;

use control::config::settings::{ControllerSettings, Source};
use control::plan::{Memory, Plan, plan};
use control::world::World;
use control::world::change::Change;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use proto::limits::FINALIZER;
use proto::{Backend, BackendState, Family, ServiceName};
use serde_json::Value;
use settings::settings;

fn controller_settings() -> ControllerSettings {
    let source = Source::Kubernetes { kubeconfig: None, namespace: None };
    let cluster_cidrs = vec!["10.96.0.0/16".parse().unwrap()];
    let mut settings = ControllerSettings { cluster_cidrs, ..settings(source, &["192.0.2.0/24", "2001:db8:1::/112"]) };
    settings.profile.serves_node_ports = Some(true);
    settings
}

struct Event {
    resource_version: u64,
    change: Change,
}

fn events() -> Vec<Event> {
    include_str!("fixtures/watch.ndjson").lines().map(|line| event(serde_json::from_str(line).unwrap())).collect()
}

fn event(mut event: Value) -> Event {
    let mut object = event["object"].take();
    // As left by a controller: a new Service without its finalizer is not sent to gateways immediately.
    object["metadata"]["finalizers"] = serde_json::json!([FINALIZER]);
    let text = |key: &str| object["metadata"][key].as_str().unwrap().to_owned();
    let resource_version = text("resourceVersion").parse().unwrap();
    let name = ServiceName::new(&text("namespace"), &text("name"));
    let change = match (event["type"].as_str().unwrap(), event["kind"].as_str().unwrap()) {
        ("DELETED", "Service") => Change::ServiceDeleted(name),
        ("DELETED", _) => Change::SliceDeleted(name),
        (_, "Service") => Change::ServiceApplied(Box::new(serde_json::from_value::<Service>(object).unwrap().into())),
        _ => Change::SliceApplied(Box::new(serde_json::from_value::<EndpointSlice>(object).unwrap().into())),
    };
    Event { resource_version, change }
}

fn empty() -> World {
    let mut world = World::default();
    world.apply(Change::ServicesReplaced(Vec::new()));
    world.apply(Change::SlicesReplaced(Vec::new()));
    world.apply(Change::NodesReplaced(Vec::new()));
    world.apply(Change::NamespacesReplaced(Vec::new()));
    world.apply(Change::PoolsReplaced(Vec::new()));
    world
}

/// The plan after all events up to a resourceVersion.
fn plan_at(resource_version: u64) -> Plan {
    let mut world = empty();
    events().into_iter().filter(|event| event.resource_version <= resource_version).for_each(|event| world.apply(event.change));
    plan(&world, &controller_settings(), &mut Memory::default(), Instant::now())
}

/// IPv4 backends of a Service's port; with a `d` those that take no new flows.
fn backends(plan: &Plan, service: &str, port: &str) -> Vec<String> {
    let service = &plan.services[&ServiceName::new("rec", service)];
    let port = service.ports.iter().find(|p| p.name == port && p.family == Family::V4).unwrap();
    let text = |backend: Backend| match backend.state {
        BackendState::Active => backend.address.to_string(),
        BackendState::Draining => format!("{} d", backend.address),
    };
    port.all_backends().map(text).collect()
}

#[test]
fn each_endpoint_of_a_hand_written_slice_is_judged_alone() {
    // Before the deletion of the Service, with all of these endpoints: not ready, terminating beside ready, duplicate,
    // without port, FQDN, and empty.
    let plan = plan_at(1530);
    let expected = ["10.9.0.1:8080", "10.9.0.1:9090", "10.9.0.3:8080 d", "10.9.0.4:9090", "10.9.0.7:8080"];
    assert_eq!(backends(&plan, "lb-manual", "http"), expected);
    assert_eq!(backends(&plan, "lb-mirrored", "http"), ["10.8.0.1:8080", "10.8.0.2:8080"]);
}

#[test]
fn pods_with_different_numbers_of_a_named_port_get_their_own_number() {
    assert_eq!(backends(&plan_at(u64::MAX), "lb-named", "http"), ["10.244.1.50:8081", "10.244.2.51:8082"]);
}

#[test]
fn the_last_plan_contains_the_services_that_gateways_serve() {
    let plan = plan_at(u64::MAX);
    let names: Vec<&str> = plan.services.keys().map(|name| name.name.as_str()).collect();
    // Not in the plan: deleted Services and those of another class or type. `clusterip` became a LoadBalancer again.
    assert_eq!(names, ["clusterip", "lb-basic", "lb-mirrored", "lb-named", "lb-publish", "lb-require-dual", "nodeport"]);
    let three = |port| [format!("10.244.1.50:{port}"), format!("10.244.2.51:{port}"), format!("10.244.2.52:{port}")];
    assert_eq!(backends(&plan, "clusterip", ""), three(8080));
    assert_eq!(backends(&plan, "lb-basic", "http"), three(8088));
    assert!(backends(&plan, "nodeport", "http").is_empty());
    let service = &plan.services[&ServiceName::new("rec", "nodeport")];
    assert_eq!(service.ports[0].node_port, Some(30383));
}

#[test]
fn an_address_from_another_writer_is_not_adopted() {
    let plan = plan_at(u64::MAX);
    let status = &plan.statuses[&ServiceName::new("rec", "lb-basic")];
    assert_eq!(status.object.held.ingress[0].ip.to_string(), "203.0.113.28");
    assert!(status.ingress[0].ip.to_string().starts_with("192.0.2."), "{status:?}");
}

#[test]
fn planning_after_each_event_equals_planning_once() {
    let (mut world, mut memory, now) = (empty(), Memory::default(), Instant::now());
    let mut seen: BTreeMap<Vec<String>, u64> = BTreeMap::new();
    for event in events() {
        world.apply(event.change);
        let step = plan(&world, &controller_settings(), &mut memory, now);
        let once = plan(&world, &controller_settings(), &mut Memory::default(), now);
        assert_eq!(step.services.keys().collect::<Vec<_>>(), once.services.keys().collect::<Vec<_>>());
        for (name, service) in &step.services {
            let backends = |plan: &Plan| plan.services[name].ports.iter().map(|port| port.backends.clone()).collect::<Vec<_>>();
            assert_eq!(backends(&step), backends(&once), "{name} after {}", event.resource_version);
            assert!(service.refusal.is_none() || service.ports.is_empty());
        }
        if step.services.contains_key(&ServiceName::new("rec", "lb-basic")) {
            seen.entry(backends(&step, "lb-basic", "http")).or_insert(event.resource_version);
        }
    }
    // No backends, then up to four one after another, and fewer again as pods ended: each set was in force once.
    assert!(seen.len() >= 5, "{seen:?}");
}
