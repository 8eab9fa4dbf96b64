//! From objects to Services and statuses, one plan after another.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::{core::v1::Service as ServiceObject, discovery::v1::EndpointSlice};
use proptest::prelude::*;
use proto::{Family, GatewayProfile, HealthCheck, Mode, Reason, Scheduler, Service, Target};
use serde_json::{Value, json};

use super::service_life::STATUS_WAITED_FOR;
use super::*;
use crate::config::settings::{Defaults, Listen, MaglevSeed, OwnershipRules, Source};
use crate::gateways::registry::Connection;
use crate::world::change::{Change, KnownGateway};
use objects::PoolSpec;
use objects::status::{Ingress, IpMode, PortStatus};

mod earlier_backends;
mod failover;
mod groups;
mod health_checks;
mod leaders;
mod proxy_protocol;
mod refused_backends;
mod requests;
mod unknown_words;

/// Settings with one pool, 192.0.2.100-199.
pub(crate) fn settings() -> ControllerSettings {
    let ranges = vec!["192.0.2.100-192.0.2.199".parse().unwrap()];
    ControllerSettings {
        listen: Listen::default(),
        group: "default".to_owned(),
        source: Source::Manifests { dir: "/nonexistent".into(), status_dir: "/nonexistent".into() },
        load_balancer_class: "sluice.dev/gateway".to_owned(),
        ownership: OwnershipRules::default(),
        defaults: Defaults { mode: Mode::Nat, scheduler: Scheduler::Maglev, drain_timeout: Duration::from_secs(300) },
        health: HealthCheck::default(),
        backends_allowed: None,
        cluster_cidrs: Vec::new(),
        pools: vec![PoolSpec::new("default", ranges)],
        profile: GatewayProfile { serves_node_ports: Some(true), ..GatewayProfile::default() },
        maglev_seed: MaglevSeed::default(),
        lock_dir: None,
    }
}

fn service(name: &str, spec: Value) -> Value {
    let mut object = json!({"metadata": {"name": name, "namespace": "shop"},
        "spec": {"type": "LoadBalancer", "loadBalancerClass": "sluice.dev/gateway", "ports": [{"port": 80}]}});
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    object
}

fn apply(world: &mut World, object: Value) {
    world.apply(Change::ServiceApplied(Box::new(serde_json::from_value::<ServiceObject>(object).unwrap().into())));
}

fn endpoints(world: &mut World, of: &str, addresses: &[String]) {
    let list: Vec<Value> = addresses.iter().map(|address| json!({"addresses": [address]})).collect();
    let family = if addresses.iter().any(|a| a.contains(':')) { "IPv6" } else { "IPv4" };
    let labels =
        json!({"kubernetes.io/service-name": of, "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"});
    let object = json!({"metadata": {"name": format!("{of}-{family}"), "namespace": "shop", "labels": labels},
        "addressType": family, "ports": [{"port": 8080}], "endpoints": list});
    world.apply(Change::SliceApplied(Box::new(serde_json::from_value::<EndpointSlice>(object).unwrap().into())));
}

fn named(name: &str) -> ServiceName {
    ServiceName::new("shop", name)
}

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

/// The ingress status of a Service with one port, TCP 80.
fn ingress(ip: &str) -> Ingress {
    let port = PortStatus { port: 80, protocol: proto::Protocol::Tcp, error: None };
    Ingress { ports: vec![port], ..Ingress::new(ip.parse().unwrap(), IpMode::Proxy) }
}

#[test]
fn a_service_of_our_class_is_served_at_an_address_of_the_pool() {
    let mut world = World::default();
    apply(&mut world, service("web", json!({})));
    endpoints(&mut world, "web", &texts(&["10.0.0.1", "10.0.0.2"]));
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let planned = &plan.services[&named("web")];
    assert_eq!(planned.refusal, None);
    assert_eq!(planned.ports[0].vips, ["192.0.2.100".parse::<IpAddr>().unwrap()]);
    assert_eq!(planned.ports[0].backends.len(), 2);
    assert_eq!(planned.ports[0].maglev.size, 509);
    let ingress = ingress("192.0.2.100");
    assert_eq!(plan.statuses[&named("web")].ingress, [ingress]);
}

#[test]
fn services_of_other_classes_and_of_none_are_not_ours() {
    let mut world = World::default();
    apply(&mut world, service("other", json!({"loadBalancerClass": "example.com/lb"})));
    apply(&mut world, service("classless", json!({"loadBalancerClass": null})));
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    assert!(plan.services.is_empty() && plan.statuses.is_empty());
}

#[test]
fn a_refused_service_is_in_the_plan_with_its_refusal_and_no_ports() {
    let mut world = World::default();
    apply(&mut world, service("web", json!({"sessionAffinity": "Cookie"})));
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let planned = &plan.services[&named("web")];
    assert_eq!(planned.refusal.as_ref().unwrap().reason, Reason::Refused);
    assert!(planned.ports.is_empty() && plan.statuses[&named("web")].refusal().is_some());
    assert!(plan.notes[0].remark.text.contains("sessionAffinity"), "{:?}", plan.notes);
}

#[test]
fn only_a_service_that_changed_is_a_new_one() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, service("a", json!({})));
    apply(&mut world, service("b", json!({})));
    endpoints(&mut world, "a", &texts(&["10.0.0.1"]));
    let first = plan(&world, &settings(), &mut memory, now);
    endpoints(&mut world, "a", &texts(&["10.0.0.2"]));
    apply(&mut world, service("c", json!({})));
    let second = plan(&world, &settings(), &mut memory, now);
    let same = |name| Arc::ptr_eq(&first.services[&named(name)], &second.services[&named(name)]);
    assert!(same("b") && !same("a"));
    assert_eq!(second.services.len(), 3);
}

#[test]
fn a_node_port_service_has_its_port_and_no_address_and_no_status() {
    let mut world = World::default();
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    apply(&mut world, service("web", json!({"type": "NodePort", "loadBalancerClass": null, "ports": ports})));
    apply(&mut world, service("web2", json!({"type": "NodePort", "loadBalancerClass": null, "ports": ports})));
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let port = &plan.services[&named("web")].ports[0];
    assert_eq!((port.node_port, port.vips.len(), port.backends.len()), (Some(30080), 0, 1));
    assert!(plan.statuses.is_empty());
    let refusal = plan.services[&named("web2")].refusal.clone().unwrap();
    assert!(refusal.reason == Reason::Conflict && refusal.message.contains("shop/web"), "{}", refusal.message);
}

#[test]
fn external_ips_are_frontends_and_never_backends() {
    let mut settings = settings();
    settings.ownership.external_ips_allowed = vec!["203.0.113.0/24".parse().unwrap()];
    settings.ownership.node_port_namespaces = kube::core::Selector::from_iter([("node-ports", "yes")]);
    let mut world = World::default();
    let none: Option<&str> = None;
    apply(&mut world, service("web", json!({"externalIPs": ["203.0.113.7"]})));
    apply(
        &mut world,
        service("inner", json!({"type": "ClusterIP", "loadBalancerClass": none, "externalIPs": ["203.0.113.8", "192.0.2.7"]})),
    );
    apply(&mut world, service("young", json!({"type": "ClusterIP", "loadBalancerClass": none, "externalIPs": ["203.0.113.7"]})));
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    let node_port = |ips: Value| json!({"type": "NodePort", "loadBalancerClass": none, "ports": ports, "externalIPs": ips});
    apply(&mut world, service("node", node_port(json!(["203.0.113.9"]))));
    apply(&mut world, service("node-only", node_port(json!([]))));
    for (of, address) in [("web", "10.0.0.1"), ("inner", "10.0.0.2"), ("node", "203.0.113.8")] {
        endpoints(&mut world, of, &texts(&[address]));
    }
    let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
    let vips =
        |name| plan.services[&named(name)].ports.iter().flat_map(|port| &port.vips).map(IpAddr::to_string).collect::<Vec<_>>();
    assert_eq!(vips("web"), ["192.0.2.100", "203.0.113.7"]);
    assert_eq!(plan.statuses[&named("web")].ingress.len(), 1, "the status has only the address of the pool");
    assert_eq!(vips("inner"), ["203.0.113.8"]);
    assert!(
        plan.notes.iter().any(|note| note.subject == Subject::Service(named("inner")) && note.remark.text.contains("192.0.2.7"))
    );
    assert_eq!(plan.statuses.len(), 1);
    let refusal = |name| plan.services[&named(name)].refusal.clone().map(|refusal| refusal.reason);
    assert_eq!(refusal("young"), Some(Reason::Conflict), "an older Service has the address and port");
    assert_eq!(refusal("node"), Some(Reason::Refused), "its only backend is a VIP");
    assert!(!plan.services.contains_key(&named("node-only")), "its namespace is not selected");
    endpoints(&mut world, "node", &texts(&["10.0.0.3"]));
    let plan = super::plan(&world, &settings, &mut Memory::default(), Instant::now());
    let port = &plan.services[&named("node")].ports[0];
    assert_eq!((port.node_port, port.vips.len()), (None, 1), "its address is served, its node port is not");
}

#[test]
fn a_namespace_that_gets_the_label_has_its_services_served() {
    let mut settings = settings();
    settings.ownership.classless.enabled = true;
    settings.ownership.classless.namespaces = kube::core::Selector::from_iter([("team", "edge")]);
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, service("web", json!({"loadBalancerClass": null})));
    assert!(plan(&world, &settings, &mut memory, now).services.is_empty());
    let namespace = |labels: Value| serde_json::from_value(json!({"metadata": {"name": "shop", "labels": labels}})).unwrap();
    world.apply(Change::NamespaceApplied(Box::new(namespace(json!({"team": "edge"})))));
    assert_eq!(plan(&world, &settings, &mut memory, now).services.len(), 1);
    world.apply(Change::NamespaceApplied(Box::new(namespace(json!({})))));
    assert!(plan(&world, &settings, &mut memory, now).services.is_empty(), "nothing of ours was written yet");
}

#[test]
fn endpoints_of_a_deleted_slice_count_until_it_is_created_again_or_two_seconds_have_passed() {
    let (mut world, mut memory, start) = (World::default(), Memory::default(), Instant::now());
    let after = |ms| start + Duration::from_millis(ms);
    apply(&mut world, service("web", json!({})));
    endpoints(&mut world, "web", &texts(&["10.0.0.1", "10.0.0.2"]));
    let deleted = |world: &mut World| world.apply(Change::SliceDeleted(named("web-IPv4")));
    let mut backends = |world: &mut World, ms| {
        let plan = plan(world, &settings(), &mut memory, after(ms));
        world.forget_deleted_slices(&plan.done_with_deleted_slices);
        (addresses(&plan.services[&named("web")]).join(" ").replace("10.0.0.", "").replace(":8080", ""), plan.again_at)
    };
    assert_eq!(backends(&mut world, 0), ("1 2".to_owned(), None));
    deleted(&mut world);
    assert_eq!(backends(&mut world, 100), ("1 2".to_owned(), Some(after(2100))));
    // Created again without the second pod: the old slice counts only for that pod.
    let recreated = json!({"metadata": {"name": "web-new", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": false}},
        {"addresses": ["10.0.0.3"]}]});
    world.apply(Change::SliceApplied(Box::new(serde_json::from_value::<EndpointSlice>(recreated).unwrap().into())));
    assert_eq!(backends(&mut world, 1100), ("2 3".to_owned(), Some(after(2100))), "an existing slice takes precedence");
    assert_eq!(backends(&mut world, 2100), ("3".to_owned(), None));
    assert_eq!(backends(&mut world, 9000), ("3".to_owned(), None));
    // The slice is created and deleted again: the two seconds restart.
    endpoints(&mut world, "web", &texts(&["10.0.0.4"]));
    assert_eq!(backends(&mut world, 9100).0, "3 4");
    deleted(&mut world);
    assert_eq!(backends(&mut world, 9200), ("3 4".to_owned(), Some(after(11_200))));
    assert_eq!(backends(&mut world, 11_200), ("3".to_owned(), None));
}

#[test]
fn endpoints_removed_from_their_slice_and_deleted_services_disappear_at_once() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, service("web", json!({})));
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    plan(&world, &settings(), &mut memory, now);
    endpoints(&mut world, "web", &[]);
    let emptied = plan(&world, &settings(), &mut memory, now);
    assert!(addresses(&emptied.services[&named("web")]).is_empty());
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    world.apply(Change::SliceDeleted(named("web-IPv4")));
    world.apply(Change::ServiceDeleted(named("web")));
    apply(&mut world, service("web", json!({"sessionAffinity": "ClientIP"})));
    let again = plan(&world, &settings(), &mut memory, now);
    assert!(addresses(&again.services[&named("web")]).is_empty(), "another Service of that name has none of its endpoints");
}

#[test]
fn both_families_have_their_own_backends() {
    let mut settings = settings();
    settings.pools[0].ranges.push("2001:db8::1:0/112".parse().unwrap());
    let mut world = World::default();
    apply(&mut world, service("web", json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]})));
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    endpoints(&mut world, "web", &texts(&["fd00::1", "fd00::2"]));
    let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
    let ports = &plan.services[&named("web")].ports;
    let seen: Vec<_> = ports.iter().map(|port| (port.family, port.vips.len(), port.backends.len())).collect();
    assert_eq!(seen, [(Family::V6, 1, 2), (Family::V4, 1, 1)]);
}

#[test]
fn a_service_is_refused_only_if_all_its_backends_are_forbidden() {
    let mut world = World::default();
    apply(&mut world, service("web", json!({})));
    endpoints(&mut world, "web", &texts(&["192.0.2.150"]));
    let mut memory = Memory::default();
    let first = plan(&world, &settings(), &mut memory, Instant::now());
    assert_eq!(first.services[&named("web")].refusal.as_ref().unwrap().reason, Reason::Refused);
    assert!(first.notes.iter().any(|note| note.remark.text.contains("192.0.2.150:8080") && note.remark.text.contains("pool")));
    endpoints(&mut world, "web", &texts(&["192.0.2.150", "10.0.0.1"]));
    let second = plan(&world, &settings(), &mut memory, Instant::now());
    assert_eq!(second.services[&named("web")].refusal, None);
    assert_eq!(second.services[&named("web")].ports[0].backends.len(), 1);
}

#[test]
fn a_table_grows_and_never_shrinks_while_the_service_lives() {
    let (mut world, mut memory) = (World::default(), Memory::default());
    apply(&mut world, service("web", json!({})));
    let mut size_with = |backends: u8| {
        let addresses: Vec<String> = (1..=backends).map(|last| format!("10.0.0.{last}")).collect();
        endpoints(&mut world, "web", &addresses);
        let plan = plan(&world, &settings(), &mut memory, Instant::now());
        plan.services[&named("web")].ports[0].maglev.size
    };
    assert_eq!([0, 1, 2, 3, 10, 1, 0].map(&mut size_with), [251, 251, 251, 1021, 1021, 1021, 1021]);
}

#[test]
fn requested_settings_of_a_service_are_in_its_plan() {
    let mut world = World::default();
    let mut object = service(
        "web",
        json!({"sessionAffinity": "ClientIP", "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": ["198.51.100.0/24"]}),
    );
    object["metadata"]["annotations"] = json!({"sluice.dev/health-check": "none", "sluice.dev/drain-timeout": "1m",
        "sluice.dev/addresses": "192.0.2.177", "sluice.dev/ip-mode": "Proxy", "sluice.dev/mode": "ipip", "sluice.dev/scheduler": "sh",
        "sluice.dev/target": "endpoint", "sluice.dev/idle-timeout": "3h", "sluice.dev/session-affinity-scope": "service"});
    apply(&mut world, object);
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let planned = &plan.services[&named("web")];
    assert_eq!((&planned.refusal, planned.affinity_scope), (&None, proto::AffinityScope::Service));
    assert_eq!((planned.health.probe, planned.drain_timeout), (proto::Probe::None, Duration::from_secs(60)));
    assert_eq!((planned.mode, planned.target, planned.scheduler), (Mode::Ipip, Target::Endpoint, Scheduler::SourceHash));
    assert_eq!((planned.affinity, planned.idle_timeout), (Some(Duration::from_secs(10_800)), Some(Duration::from_secs(10_800))));
    assert_eq!((planned.local, &planned.source_ranges), (true, &Some(vec!["198.51.100.0/24".parse().unwrap()])));
    let ingress = ingress("192.0.2.177");
    assert_eq!(plan.statuses[&named("web")].ingress, [ingress]);
}

#[test]
fn a_mode_that_changes_no_port_refuses_a_service_whose_endpoints_listen_on_another() {
    let mut world = World::default();
    for (name, port) in [("same", 8080), ("other", 80)] {
        let mut object = service(name, json!({"ports": [{"port": port}]}));
        object["metadata"]["annotations"] = json!({"sluice.dev/mode": "dsr", "sluice.dev/target": "endpoint"});
        apply(&mut world, object);
        endpoints(&mut world, name, &texts(&["10.0.0.1"]));
    }
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    assert_eq!(plan.services[&named("same")].refusal, None);
    let refusal = plan.services[&named("other")].refusal.clone().unwrap();
    assert!(refusal.reason == Reason::Refused && refusal.message.contains("port 80"), "{}", refusal.message);
}

fn node(world: &mut World, name: &str, labels: Value, addresses: &[&str]) {
    let list: Vec<Value> = addresses.iter().map(|a| json!({"type": "InternalIP", "address": a})).collect();
    let object = json!({"metadata": {"name": name, "labels": labels}, "status": {"addresses": list}});
    world.apply(Change::NodeApplied(Box::new(serde_json::from_value(object).unwrap())));
}

fn annotated(name: &str, mode: &str, target: &str, spec: Value) -> Value {
    let mut object = service(name, spec);
    object["metadata"]["annotations"] = json!({"sluice.dev/mode": mode, "sluice.dev/target": target});
    object
}

fn addresses(service: &Service) -> Vec<String> {
    service.ports.iter().flat_map(|port| port.all_backends()).map(|backend| backend.address.to_string()).collect()
}

#[test]
fn nodes_get_packets_for_the_vip_at_the_service_port_and_rewritten_ones_at_the_node_port() {
    let mut world = World::default();
    node(&mut world, "a", json!({}), &["10.0.1.1", "fd00::1"]);
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    for mode in ["nat", "dnat", "dsr", "ipip", "gue"] {
        apply(&mut world, annotated(mode, mode, "node", json!({"ports": ports})));
    }
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    for mode in ["nat", "dnat"] {
        assert_eq!(addresses(&plan.services[&named(mode)]), ["10.0.1.1:30080"], "{mode}");
    }
    for mode in ["dsr", "ipip", "gue"] {
        assert_eq!(addresses(&plan.services[&named(mode)]), ["10.0.1.1:80"], "{mode}");
    }
}

#[test]
fn node_changes_affect_services_with_target_node_and_no_others() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, annotated("nodes", "dsr", "node", json!({})));
    apply(&mut world, service("web", json!({})));
    let first = plan(&world, &settings(), &mut memory, now);
    let refusal = first.services[&named("nodes")].refusal.clone().unwrap();
    assert!(refusal.reason == Reason::NoEligibleNode && refusal.message.contains("Node"), "{}", refusal.message);
    node(&mut world, "a", json!({}), &["10.0.1.1"]);
    let second = plan(&world, &settings(), &mut memory, now);
    assert_eq!(addresses(&second.services[&named("nodes")]), ["10.0.1.1:80"]);
    assert!(Arc::ptr_eq(&first.services[&named("web")], &second.services[&named("web")]));
    node(&mut world, "a", json!({"node.kubernetes.io/exclude-from-external-load-balancers": ""}), &["10.0.1.1"]);
    let third = plan(&world, &settings(), &mut memory, now);
    let refusal = third.services[&named("nodes")].refusal.clone().unwrap();
    assert!(refusal.message.contains("exclude-from-external-load-balancers"), "{}", refusal.message);
    assert_eq!(refusal.reason, Reason::NoEligibleNode);
}

#[test]
fn a_tunnel_uses_endpoints_of_the_other_family_if_there_are_none_of_its_family() {
    let mut world = World::default();
    for mode in ["gue", "dnat"] {
        apply(&mut world, annotated(mode, mode, "endpoint", json!({"ports": [{"port": 8080}]})));
        endpoints(&mut world, mode, &texts(&["fd00::1"]));
    }
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    assert_eq!(addresses(&plan.services[&named("gue")]), ["[fd00::1]:8080"]);
    assert_eq!(plan.services[&named("gue")].ports[0].family, Family::V4);
    assert!(addresses(&plan.services[&named("dnat")]).is_empty());
}

#[test]
fn one_of_two_families_may_have_no_nodes_and_that_is_noted() {
    let mut settings = settings();
    settings.pools[0].ranges.push("2001:db8::1:0/112".parse().unwrap());
    let mut world = World::default();
    node(&mut world, "a", json!({}), &["10.0.1.1"]);
    apply(&mut world, annotated("web", "dsr", "node", json!({"ipFamilyPolicy": "RequireDualStack"})));
    let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
    assert_eq!(addresses(&plan.services[&named("web")]), ["10.0.1.1:80"]);
    assert!(plan.notes.iter().any(|note| note.remark.text.contains("no InternalIP of family IPv6")), "{:?}", plan.notes);
}

/// The Service as an API server has it, in this mode and with this status.
fn stored(mode: &str, version: &str, ip_mode: &str) -> Value {
    let mut object = annotated("web", mode, "endpoint", json!({"ports": [{"port": 8080}]}));
    object["metadata"]["uid"] = "u".into();
    object["metadata"]["resourceVersion"] = version.into();
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.100", "ipMode": ip_mode}]}});
    object["metadata"]["managedFields"] = json!([{"manager": "sluice", "subresource": "status",
        "fieldsV1": {"f:status": {"f:loadBalancer": {"f:ingress": {}}}}}]);
    object
}

#[test]
fn a_change_to_vip_mode_writes_the_status_first_and_a_change_from_it_the_gateways() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    let mut seen = |object: Value, now: Instant| {
        apply(&mut world, object);
        let plan = plan(&world, &settings(), &mut memory, now);
        (plan.services[&named("web")].mode, plan.statuses[&named("web")].ingress[0].ip_mode, plan.again_at)
    };
    assert_eq!(seen(stored("nat", "1", "Proxy"), now), (Mode::Nat, IpMode::Proxy, None));
    let until = now + STATUS_WAITED_FOR;
    assert_eq!(seen(stored("dsr", "2", "Proxy"), now), (Mode::Nat, IpMode::Vip, Some(until)));
    assert_eq!(seen(stored("dsr", "3", "VIP"), now), (Mode::Dsr, IpMode::Vip, None));
    assert_eq!(seen(stored("nat", "4", "VIP"), now), (Mode::Nat, IpMode::Proxy, None));
    assert_eq!(seen(stored("nat", "5", "Proxy"), now), (Mode::Nat, IpMode::Proxy, None));
    assert_eq!(seen(stored("dnat", "6", "Proxy"), now).0, Mode::Nat);
    assert_eq!(seen(stored("dnat", "6", "Proxy"), until), (Mode::Dnat, IpMode::Vip, None), "the wait is over");
}

#[test]
fn endpoints_change_while_a_mode_waits_for_its_status_and_manifests_do_not_wait() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, stored("nat", "1", "Proxy"));
    plan(&world, &settings(), &mut memory, now);
    apply(&mut world, stored("dsr", "2", "Proxy"));
    let first = plan(&world, &settings(), &mut memory, now);
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    let second = plan(&world, &settings(), &mut memory, now + STATUS_WAITED_FOR / 2);
    assert_eq!(second.services[&named("web")].mode, Mode::Nat);
    assert_eq!((addresses(&second.services[&named("web")]).len(), second.again_at), (1, first.again_at));
    let (mut world, mut memory) = (World::default(), Memory::default());
    for mode in ["nat", "dsr"] {
        let mut object = stored(mode, "", "Proxy");
        object["metadata"]["uid"] = "".into();
        apply(&mut world, object);
        let plan = plan(&world, &settings(), &mut memory, now);
        assert_eq!(plan.services[&named("web")].mode.as_str(), mode);
    }
}

#[test]
fn hints_and_the_internal_policy_have_no_effect() {
    let mut world = World::default();
    apply(&mut world, service("web", json!({"internalTrafficPolicy": "Local", "trafficDistribution": "PreferSameZone"})));
    let endpoint = |last: u8, zone: &str| {
        json!({"addresses": [format!("10.0.0.{last}")], "nodeName": zone, "zone": zone,
        "hints": {"forZones": [{"name": zone}], "forNodes": [{"name": zone}]}})
    };
    let slice = json!({"metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [endpoint(1, "a"), endpoint(2, "b")]});
    world.apply(Change::SliceApplied(Box::new(serde_json::from_value::<EndpointSlice>(slice).unwrap().into())));
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    assert_eq!(addresses(&plan.services[&named("web")]), ["10.0.0.1:8080", "10.0.0.2:8080"]);
}

#[test]
fn a_service_that_waits_for_an_address_gets_it_when_it_is_free() {
    let mut settings = settings();
    settings.pools[0].ranges = vec!["192.0.2.100".parse().unwrap()];
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    let gateways = tokio::sync::watch::Sender::new(Gateways::default());
    let connection = Connection::open(&gateways, "edge-1", "", Vec::new());
    memory.follow_gateways(&gateways.borrow(), now);
    apply(&mut world, service("a", json!({})));
    plan(&world, &settings, &mut memory, now);
    memory.published(1);
    world.apply(Change::ServiceDeleted(named("a")));
    apply(&mut world, service("b", json!({})));
    let waiting = plan(&world, &settings, &mut memory, now);
    memory.published(2);
    assert_eq!(waiting.services[&named("b")].refusal.as_ref().unwrap().reason, Reason::Exhausted);
    connection.acknowledge(2);
    assert!(memory.follow_gateways(&gateways.borrow(), now), "the gateway has removed it");
    let later = plan(&world, &settings, &mut memory, now);
    assert_eq!(later.services[&named("b")].refusal, None);
}

/// One change of a world of three Services, three nodes and a pool of three addresses.
#[derive(Clone, Debug)]
enum Step {
    Service { name: u8, mode: usize, node: bool, request: Option<u8>, port: u16 },
    Status { name: u8, version: u8, proxy: bool },
    Gone(u8),
    Endpoints { of: u8, count: u8 },
    NoEndpoints(u8),
    Node { name: u8, address: u8 },
    Later(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let name = 0u8..3;
    prop_oneof![
        3 => (name.clone(), 0usize..5, any::<bool>(), prop::option::of(99u8..104), 80u16..82)
            .prop_map(|(name, mode, node, request, port)| Step::Service { name, mode, node, request, port }),
        2 => (name.clone(), any::<u8>(), any::<bool>()).prop_map(|(name, version, proxy)| Step::Status { name, version, proxy }),
        1 => name.clone().prop_map(Step::Gone),
        4 => (name.clone(), 0u8..12).prop_map(|(of, count)| Step::Endpoints { of, count }),
        1 => name.prop_map(Step::NoEndpoints),
        1 => (0u8..3, 1u8..4).prop_map(|(name, address)| Step::Node { name, address }),
        3 => (1u64..400).prop_map(Step::Later),
    ]
}

/// The objects of a source, which sends their changes.
#[derive(Default)]
struct Objects(std::collections::BTreeMap<u8, Value>);

impl Objects {
    /// `planned`: the desired statuses of the previous plan, from which a status gets its address.
    fn take(&mut self, world: &mut World, step: &Step, planned: &WantedStatuses) {
        match *step {
            Step::Service { name, mode, node, request, port } => {
                let mut object = service(&format!("s{name}"), json!({"ports": [{"port": port, "nodePort": 30_000}]}));
                object["metadata"]["uid"] = format!("uid-{name}").into();
                object["metadata"]["annotations"] = json!({"sluice.dev/mode": Mode::ALL[mode].as_str(),
                    "sluice.dev/target": if node { "node" } else { "endpoint" }});
                if let Some(last) = request {
                    object["metadata"]["annotations"]["sluice.dev/addresses"] = format!("192.0.2.{last}").into();
                }
                if let Some(old) = self.0.remove(&name) {
                    object["status"] = old["status"].clone();
                }
                apply(world, object.clone());
                self.0.insert(name, object);
            }
            Step::Status { name, version, proxy } => {
                let Some(object) = self.0.get_mut(&name) else { return };
                let wanted = planned.get(&named(&format!("s{name}"))).and_then(|status| status.ingress.first());
                let Some(address) = wanted.map(|ingress| ingress.ip.to_string()) else { return };
                object["metadata"]["resourceVersion"] = version.to_string().into();
                let ip_mode = if proxy { "Proxy" } else { "VIP" };
                object["status"]["loadBalancer"]["ingress"] = json!([{"ip": address, "ipMode": ip_mode}]);
                apply(world, object.clone());
            }
            Step::Gone(name) => {
                self.0.remove(&name);
                world.apply(Change::ServiceDeleted(named(&format!("s{name}"))));
            }
            Step::Endpoints { of, count } => {
                let list: Vec<String> = (1..=count).map(|last| format!("10.0.{of}.{last}")).collect();
                endpoints(world, &format!("s{of}"), &list);
            }
            Step::NoEndpoints(of) => world.apply(Change::SliceDeleted(named(&format!("s{of}-IPv4")))),
            Step::Node { name, address } => node(world, &format!("n{name}"), json!({}), &[&format!("10.0.9.{address}")]),
            Step::Later(_) => {}
        }
    }
}

proptest! {
    #[test]
    fn an_incremental_plan_equals_a_plan_from_scratch(
        bursts in prop::collection::vec(prop::collection::vec(step(), 1..3), 1..24)
    ) {
        let mut settings = settings();
        settings.pools[0].ranges = vec!["192.0.2.100-192.0.2.102".parse().unwrap()];
        let (mut world, mut memory, mut now) = (World::default(), Memory::default(), Instant::now());
        let (mut objects, mut planned) = (Objects::default(), WantedStatuses::new());
        for burst in &bursts {
            for step in burst {
                objects.take(&mut world, step, &planned);
                if let Step::Later(seconds) = step {
                    now += Duration::from_secs(*seconds);
                }
            }
            let mut from_scratch = memory.clone();
            from_scratch.nodes_for = None;
            from_scratch.planned.values_mut().for_each(|one| one.revision = u64::MAX);
            let expected = plan(&world, &settings, &mut from_scratch, now);
            let found = plan(&world, &settings, &mut memory, now);
            prop_assert_eq!(&found.services, &expected.services);
            prop_assert_eq!(&found.statuses, &expected.statuses);
            prop_assert_eq!(&found.notes, &expected.notes);
            prop_assert_eq!(found.again_at, expected.again_at);
            world.forget_deleted_slices(&found.done_with_deleted_slices);
            planned = found.statuses;
            let given = memory.planned.iter().filter(|(_, one)| !matches!(one.phase, Phase::Marking { .. })).map(|(name, _)| name);
            prop_assert_eq!(found.services.keys().collect::<Vec<_>>(), given.collect::<Vec<_>>());
        }
    }
}

#[test]
fn an_added_changed_or_deleted_node_replans_only_services_with_nodes_as_backends() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    for n in 0..20 {
        let name = format!("pods-{n}");
        apply(&mut world, service(&name, json!({})));
        endpoints(&mut world, &name, &texts(&[&format!("10.0.0.{n}")]));
    }
    apply(&mut world, annotated("nodes", "dsr", "node", json!({})));
    node(&mut world, "a", json!({}), &["10.0.1.1"]);
    let mut replanned = |world: &World| {
        let plan = plan(world, &settings(), &mut memory, now);
        (plan.replanned, addresses(&plan.services[&named("nodes")]).len(), plan.services[&named("pods-0")].ports[0].vips[0])
    };
    let vip: IpAddr = "192.0.2.101".parse().unwrap();
    assert_eq!(replanned(&world), (21, 1, vip));
    node(&mut world, "b", json!({}), &["10.0.1.2"]);
    assert_eq!(replanned(&world), (1, 2, vip));
    node(&mut world, "b", json!({}), &["10.0.1.3"]);
    assert_eq!(replanned(&world), (1, 2, vip));
    world.apply(Change::NodeDeleted("b".to_owned()));
    assert_eq!(replanned(&world), (1, 1, vip));
    // A node has an address of a pool, so all addresses are assigned again.
    node(&mut world, "c", json!({}), &["192.0.2.199"]);
    replanned(&world);
    let mut asking = service("late", json!({}));
    asking["metadata"]["annotations"] = json!({"sluice.dev/addresses": "192.0.2.199"});
    apply(&mut world, asking);
    let refused = plan(&world, &settings(), &mut memory, now).services[&named("late")].refusal.clone().unwrap();
    assert!(refused.message.contains("node c"), "{}", refused.message);
    world.apply(Change::NodeDeleted("c".to_owned()));
    let served = plan(&world, &settings(), &mut memory, now);
    assert_eq!(served.services[&named("late")].refusal, None, "the address is free again");
}

#[test]
fn services_with_all_nodes_as_backends_share_one_list_except_those_with_backend_overrides() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    for name in ["a", "b", "c"] {
        apply(&mut world, annotated(name, "gue", "node", json!({})));
    }
    for n in 1..=3 {
        node(&mut world, &format!("n{n}"), json!({}), &[&format!("10.0.1.{n}")]);
    }
    let mut overrides = crate::world::overrides::tests::drained(&["node/n1"]);
    let weight = crate::world::overrides::Weight { weight: 7, author: crate::world::overrides::tests::author("alice") };
    overrides.set_weight(named("c"), "10.0.1.2:80".parse().unwrap(), weight).unwrap();
    world.apply(Change::OverridesReplaced(Box::new(overrides)));
    let first = plan(&world, &settings(), &mut memory, now);
    let port = |plan: &Plan, name| plan.services[&named(name)].ports[0].clone();
    let set = |name| port(&first, name).nodes.unwrap().set;
    assert!(Arc::ptr_eq(&set("a"), &set("b")));
    let text = |port: &proto::ServicePort| -> Vec<String> {
        let of = |b: proto::Backend| format!("{} x{} {:?}", b.address.ip(), b.weight, b.state);
        port.all_backends().map(of).collect()
    };
    assert_eq!(text(&port(&first, "a")), ["10.0.1.1 x1 Draining", "10.0.1.2 x1 Active", "10.0.1.3 x1 Active"]);
    let own = port(&first, "c");
    assert!(own.nodes.is_none() && text(&own) == ["10.0.1.1 x1 Draining", "10.0.1.2 x7 Active", "10.0.1.3 x1 Active"], "{own:?}");
    // A new node changes only the list of nodes, not the Services.
    node(&mut world, "n4", json!({}), &["10.0.1.4"]);
    let second = plan(&world, &settings(), &mut memory, now);
    assert_eq!([port(&second, "a"), port(&second, "c")].map(|port| port.backend_count()), [4, 4]);
    let before = crate::gateways::publish::Published::first("e".to_owned(), first.services, Vec::new());
    let sent = before.next(second.services, Vec::new()).unwrap().since(&before.state.generation, true).unwrap();
    assert!(sent.services.iter().map(|service| service.name.as_str()).eq(["c"]) && sent.node_sets.len() == 1);
}

#[test]
fn deleted_slices_of_a_foreign_service_are_forgotten_and_do_not_return_when_it_becomes_ours() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, service("web", json!({"loadBalancerClass": "example.com/lb"})));
    endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
    let mut backends = |world: &mut World| {
        let plan = plan(world, &settings(), &mut memory, now);
        world.forget_deleted_slices(&plan.done_with_deleted_slices);
        plan.services.get(&named("web")).map(|service| addresses(service).len())
    };
    assert_eq!(backends(&mut world), None);
    world.apply(Change::SliceDeleted(named("web-IPv4")));
    assert_eq!(backends(&mut world), None);
    assert_eq!(world.deleted_slices_of(&named("web")).count(), 0, "nothing of it is kept");
    apply(&mut world, service("web", json!({})));
    assert_eq!(backends(&mut world), Some(0));
}
