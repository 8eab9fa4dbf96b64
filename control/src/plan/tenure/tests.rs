//! Tenure by the signs of a Service, and the parts of one that are served.

use k8s_openapi::api::core::v1::{Namespace, Service};
use kube::core::Selector;
use serde_json::{Value, json};

use super::*;
use crate::config::settings::ClaimClassless;
use crate::plan::tests::settings;
use crate::world::change::Change;

fn world() -> World {
    let namespace = |name: &str, team: &str| -> Namespace {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {"team": team}}})).unwrap()
    };
    let mut world = World::default();
    world.apply(Change::NamespacesReplaced(vec![namespace("shop", "edge"), namespace("lab", "core")]));
    world
}

fn of(metadata: Value, spec: Value, rules: impl FnOnce(&mut ControllerSettings)) -> Ownership {
    let mut object =
        json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": {"ports": [{"port": 80, "nodePort": 30080}]}});
    let merge = |into: &mut Value, from: Value| into.as_object_mut().unwrap().extend(from.as_object().unwrap().clone());
    merge(&mut object["metadata"], metadata);
    merge(&mut object["spec"], spec);
    object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.100"}]}});
    let service: Service = serde_json::from_value(object).unwrap();
    let mut settings = settings();
    rules(&mut settings);
    Ownership::of(&Candidate::try_from(&service).unwrap(), &world(), &settings, true)
}

fn selector(key: &'static str, value: &'static str) -> Selector {
    Selector::from_iter([(key, value)])
}

#[test]
fn a_load_balancer_is_ours_by_class_or_if_services_without_class_are_claimed() {
    let claim = |namespaces: Selector, services: Selector| Some(ClaimClassless { enabled: true, namespaces, services });
    let all = || claim(Selector::default(), Selector::default());
    let ours = || json!("sluice.dev/gateway");
    let cloud = json!({"finalizers": ["service.kubernetes.io/load-balancer-cleanup"]});
    let before = json!({"finalizers": ["sluice.dev/load-balancer-cleanup"]});
    let fields = json!({"f:status": {"f:loadBalancer": {"f:ingress": {}}}});
    let status = json!([{"manager": "sluice", "operation": "Update", "subresource": "status", "fieldsV1": fields}]);
    let marked = |group: &str| json!({"finalizers": ["sluice.dev/load-balancer-cleanup"], "managedFields": status.clone(), "annotations": {"sluice.dev/group": group}});
    let written = json!({"managedFields": status});
    let both = json!({"finalizers": ["service.kubernetes.io/load-balancer-cleanup"], "managedFields": status});
    let rows = [
        ("of our class", json!({}), ours(), None, true),
        ("of another class", json!({}), json!("example.com/lb"), all(), false),
        ("without class", json!({}), json!(null), None, false),
        ("without class, all claimed", json!({}), json!(null), all(), true),
        ("of a claimed namespace", json!({}), json!(null), claim(selector("team", "edge"), Selector::default()), true),
        ("of another namespace", json!({}), json!(null), claim(selector("team", "core"), Selector::default()), false),
        (
            "by its name",
            json!({}),
            json!(null),
            claim(selector("kubernetes.io/metadata.name", "shop"), Selector::default()),
            true,
        ),
        (
            "of claimed labels",
            json!({"labels": {"lb": "ours"}}),
            json!(null),
            claim(Selector::default(), selector("lb", "ours")),
            true,
        ),
        (
            "of other labels",
            json!({"labels": {"lb": "x"}}),
            json!(null),
            claim(Selector::default(), selector("lb", "ours")),
            false,
        ),
        ("held by a cloud", cloud.clone(), json!(null), all(), false),
        ("of our class, whoever holds it", cloud, ours(), None, true),
        ("no longer claimed, with our finalizer", before, json!(null), None, true),
        ("no longer claimed, with our status", written, json!(null), None, true),
        ("with our status, but held by a cloud", both, json!(null), None, false),
        ("no longer claimed, with our group", marked("default"), json!(null), None, true),
        ("with the finalizer of another group", marked("other"), json!(null), None, false),
        ("of another group, all claimed", marked("other"), json!(null), all(), false),
        ("of our class, with the finalizer of another group", marked("other"), ours(), None, false),
    ];
    for (sentence, metadata, class, classless, expected) in rows {
        let spec = json!({"type": "LoadBalancer", "loadBalancerClass": class});
        let set = |settings: &mut ControllerSettings| settings.ownership.classless = classless.unwrap_or_default();
        assert_eq!(of(metadata, spec, set).addresses, expected, "{sentence}");
    }
}

#[test]
fn a_service_belongs_to_the_group_that_it_asks_for_once_no_other_group_holds_it() {
    // What it asks for, its mark, whether this group serves what names none.
    let rows = [
        ("names none", None, None, true, true),
        ("names none, and this group serves only what names it", None, None, false, false),
        ("names this group", Some("default"), None, false, true),
        ("names this group, with blanks", Some(" default "), None, false, true),
        ("names another group", Some("east"), None, true, false),
        ("names no group that can exist", Some("East!"), None, true, false),
        ("a blank name is none", Some(" "), None, true, true),
        ("names this group and is marked by it", Some("default"), Some("default"), false, true),
        ("moves here, and the other group has not released it", Some("default"), Some("east"), true, false),
        ("moved away, whoever marked it", Some("east"), Some("default"), true, false),
        ("names none, marked by another group, with an address of our pool", None, Some("east"), true, false),
    ];
    for (sentence, asked, marked, serves, expected) in rows {
        let annotations = json!({"sluice.dev/gateway-group": asked, "sluice.dev/group": marked});
        let annotations: serde_json::Map<_, _> =
            annotations.as_object().unwrap().clone().into_iter().filter(|(_, value)| !value.is_null()).collect();
        let spec = json!({"type": "LoadBalancer", "loadBalancerClass": "sluice.dev/gateway"});
        let rules = |settings: &mut ControllerSettings| settings.ownership.serves_unassigned = serves;
        assert_eq!(of(json!({"annotations": annotations}), spec, rules).addresses, expected, "{sentence}");
    }
    let node_port = |asked: &str, serves: bool| {
        let metadata = json!({"annotations": {"sluice.dev/gateway-group": asked}});
        let rules = |settings: &mut ControllerSettings| settings.ownership.serves_unassigned = serves;
        of(metadata, json!({"type": "NodePort"}), rules).node_ports
    };
    assert!(node_port("default", false) && node_port("", true));
    assert!(!node_port("", false) && !node_port("east", true), "of every type");
}

#[test]
fn node_ports_are_ours_in_the_namespaces_that_the_selector_names() {
    let node_port = || json!({"type": "NodePort"});
    assert!(of(json!({}), node_port(), |_| {}).node_ports);
    for (team, expected) in [("edge", true), ("core", false)] {
        let set = |settings: &mut ControllerSettings| settings.ownership.node_port_namespaces = selector("team", team);
        assert_eq!(of(json!({}), node_port(), set).is_any(), expected, "{team}");
    }
    let elsewhere = json!({"namespace": "unknown"});
    let set = |settings: &mut ControllerSettings| settings.ownership.node_port_namespaces = selector("team", "edge");
    assert!(!of(elsewhere, node_port(), set).is_any());
}

#[test]
fn allowed_external_ips_are_ours_for_every_type_except_for_other_classes() {
    let allow = |settings: &mut ControllerSettings| {
        settings.ownership.external_ips_allowed = vec!["203.0.113.0/24".parse().unwrap()];
    };
    let rows = [
        (json!({"type": "LoadBalancer", "loadBalancerClass": "sluice.dev/gateway"}), true),
        (json!({"type": "LoadBalancer", "loadBalancerClass": "example.com/lb"}), false),
        (json!({"type": "NodePort"}), true),
        (json!({"type": "ClusterIP"}), true),
    ];
    for (mut spec, expected) in rows {
        spec["externalIPs"] = json!(["203.0.113.7"]);
        assert_eq!(of(json!({}), spec.clone(), allow).external_ips, expected, "{spec}");
        assert!(!of(json!({}), spec.clone(), |_| {}).external_ips, "{spec}");
    }
}

#[test]
fn tenure_follows_from_class_group_marks_and_whether_the_service_remains() {
    use Tenure::{Awaited, Foreign, Left, Ours};
    let (ours, other) = (Some("sluice.dev/gateway"), Some("example.com/lb"));
    let (us, them) = (Some("default"), Some("east"));
    // Class, the group that it asks for, the group that marked it, whether it has our finalizer.
    let live = [
        ("of our class, new", ours, None, None, false, Ours),
        ("of our class and marked by us", ours, None, us, true, Ours),
        ("of our class, from before there were groups", ours, None, None, true, Ours),
        ("of our class, not released by another", ours, None, them, true, Awaited),
        ("asks for us, not released by another", ours, us, them, true, Awaited),
        ("moved to another group", ours, them, us, true, Left(LeftBy::Us)),
        ("moved to another group, from before there were groups", ours, them, None, true, Left(LeftBy::Another)),
        ("moved to another group, which has marked it", ours, them, them, true, Foreign),
        ("of another class", other, None, None, false, Foreign),
        ("of another class, marked by us", other, None, us, true, Left(LeftBy::UsBefore)),
        ("of another class, marked by another", other, None, them, true, Foreign),
        ("of another class, with a finalizer of ours or of theirs", other, None, None, true, Left(LeftBy::Another)),
        ("without class, not selected", None, None, None, false, Foreign),
        ("without class, served before", None, None, us, true, Ours),
        ("without class, served by another", None, None, them, true, Foreign),
        ("without class, moved to another group", None, them, us, true, Left(LeftBy::Us)),
    ];
    let gone = [
        ("of our class", ours, None, us, true, Left(LeftBy::Us)),
        ("of our class, from before there were groups", ours, None, None, true, Left(LeftBy::Us)),
        ("of our class, marked by another", ours, None, them, true, Left(LeftBy::Another)),
        ("of our class, for another group", ours, them, None, true, Left(LeftBy::Another)),
        ("of another class, marked by us", other, None, us, true, Left(LeftBy::UsBefore)),
        ("of another class, marked by another", other, None, them, true, Foreign),
        ("of another class, marked by none", other, None, None, true, Left(LeftBy::Another)),
        ("without class, marked by us", None, None, us, true, Left(LeftBy::Us)),
        ("without class, marked by another", None, None, them, true, Foreign),
        ("without class, marked by none", None, None, None, true, Left(LeftBy::UsOrAnother)),
    ];
    let rows = live.map(|row| (true, row)).into_iter().chain(gone.map(|row| (false, row)));
    for (is_live, (sentence, class, gateway_group, mark, finalizer, expected)) in rows {
        let unmarked: Service = serde_json::from_value(json!({"metadata": {"name": "web"}})).unwrap();
        let mut object = ServiceObject::of(&unmarked).unwrap();
        (object.class, object.gateway_group) = (class.map(str::to_owned), gateway_group.map(str::to_owned));
        (object.held.finalizer, object.held.group) = (finalizer, mark.map(str::to_owned));
        let signs = is_live.then(SignsOfLife::default);
        assert_eq!(Tenure::of(&object, signs, &settings()), expected, "{sentence}");
    }
}
