//! Ownership: which Services are ours, and which parts of them (CONTROL section 4).
//!
//! Invariant: a Service of another class, or that asks for another group of gateways, is never ours. A Service that
//! another installation has marked by its group annotation is not ours before that one has released it: its gateways may
//! forward for it, also without their controller. A Service without class is not ours if a cloud controller holds it by
//! its finalizer. A Service without class that was ours stays ours until it is released, even if the rules no longer
//! claim it.

use kube::core::SelectorExt;

use crate::config::settings::ControllerSettings;
use crate::world::World;
use objects::{Candidate, Kind};

/// The parts of one Service that are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ownership {
    /// It gets addresses, and sluice writes its status.
    pub addresses: bool,
    /// Its node ports are served.
    pub node_ports: bool,
    /// Its `externalIPs` are served, if they are allowed.
    pub external_ips: bool,
}

impl Ownership {
    /// The parts of `candidate` that are ours.
    #[must_use]
    pub fn of(candidate: &Candidate, world: &World, settings: &ControllerSettings) -> Self {
        let rules = &settings.ownership;
        if !settings.is_of_our_group(candidate.gateway_group.as_deref()) {
            return Self::default();
        }
        let has_external_ips = candidate.wanted.as_ref().map_or(true, |spec| !spec.external_ips.is_empty());
        let external_ips = has_external_ips && !rules.external_ips_allowed.is_empty();
        match candidate.kind {
            Kind::LoadBalancer => {
                let addresses = owns_load_balancer(candidate, world, settings);
                Self { addresses, node_ports: false, external_ips: external_ips && addresses }
            }
            Kind::NodePort => {
                let selected = &rules.node_port_namespaces;
                let node_ports = selected.selects_all() || selected.matches(&world.namespace_labels(&candidate.name.namespace));
                // Of a Service that cannot be parsed only the node ports can be served.
                Self { addresses: false, node_ports, external_ips: external_ips && candidate.wanted.is_ok() }
            }
            Kind::ClusterIp => Self { external_ips, ..Self::default() },
        }
    }

    /// The same, but node ports count only where a gateway serves them.
    #[must_use]
    pub const fn with_node_ports(self, are_served: bool) -> Self {
        Self { node_ports: self.node_ports && are_served, ..self }
    }

    /// Whether any part of it is ours.
    #[must_use]
    pub const fn is_any(self) -> bool {
        self.addresses || self.node_ports || self.external_ips
    }
}

fn owns_load_balancer(candidate: &Candidate, world: &World, settings: &ControllerSettings) -> bool {
    let is_of_another = candidate.held.is_of_another(&settings.group);
    if let Some(class) = &candidate.class {
        return *class == settings.load_balancer_class && !is_of_another;
    }
    // Another installation that claims Services without class came first.
    if candidate.is_held_by_cloud || is_of_another {
        return false;
    }
    let claim = &settings.ownership.classless;
    let is_claimed = || {
        claim.enabled
            && claim.services.matches(&candidate.labels)
            && claim.namespaces.matches(&world.namespace_labels(&candidate.name.namespace))
    };
    candidate.is_held_by(&settings.group) || is_claimed()
}

#[cfg(test)]
mod tests {
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
        Ownership::of(&Candidate::try_from(&service).unwrap(), &world(), &settings)
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
}
