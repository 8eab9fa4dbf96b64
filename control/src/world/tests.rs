//! Tests: which changes increase revisions.

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use objects::ServiceSpec;
use serde_json::{Map, Value, json};

use super::*;

fn service(name: &str, port: u16) -> Service {
    let object = serde_json::json!({"metadata": {"name": name, "namespace": "shop"},
        "spec": {"type": "LoadBalancer", "ports": [{"port": port}]}});
    serde_json::from_value(object).unwrap()
}

fn slice(name: &str, of: &str, address: &str) -> ReadSlice {
    let labels = serde_json::json!({"kubernetes.io/service-name": of,
        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"});
    let object = serde_json::json!({"metadata": {"name": name, "namespace": "shop", "labels": labels},
        "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [{"addresses": [address]}]});
    serde_json::from_value::<EndpointSlice>(object).unwrap().into()
}

fn revision(world: &World, name: &str) -> u64 {
    world.services()[&ServiceName::new("shop", name)].revision
}

#[test]
fn nothing_is_complete_before_all_lists_are_known() {
    let mut world = World::default();
    world.apply(Change::ServicesReplaced(vec![]));
    world.apply(Change::SlicesReplaced(vec![]));
    world.apply(Change::NodesReplaced(vec![]));
    world.apply(Change::NamespacesReplaced(vec![]));
    world.apply(Change::PoolsReplaced(vec![]));
    assert!(!world.is_complete());
    world.apply(Change::GatewaysReplaced(BTreeMap::new()));
    world.apply(Change::CheckpointReplaced(Box::default()));
    world.apply(Change::OverridesReplaced(Box::default()));
    assert!(world.is_complete());
}

#[test]
fn a_term_begins_with_the_objects_and_without_what_a_former_leader_read() {
    let mut world = World::default();
    world.apply(Change::ServicesReplaced(vec![service("a", 80).into()]));
    world.apply(Change::SlicesReplaced(vec![slice("a-1", "a", "10.0.0.1")]));
    world.apply(Change::NodesReplaced(vec![]));
    world.apply(Change::NamespacesReplaced(vec![]));
    world.apply(Change::PoolsReplaced(vec![]));
    let read_by_leader = |world: &mut World| {
        world.apply(Change::GatewaysReplaced(BTreeMap::new()));
        world.apply(Change::CheckpointReplaced(Box::default()));
        world.apply(Change::OverridesReplaced(Box::default()));
    };
    read_by_leader(&mut world);
    world.apply(Change::SliceDeleted(ServiceName::new("shop", "a-1")));
    assert!(world.is_complete() && world.have_slices_changed());
    world.begin_term();
    let a = ServiceName::new("shop", "a");
    let left = (world.services().len(), world.slices_of(&a).count(), world.deleted_slices_of(&a).count());
    assert_eq!((world.is_complete(), world.have_slices_changed(), left), (false, false, (1, 0, 0)));
    read_by_leader(&mut world);
    assert!(world.is_complete());
}

#[test]
fn only_the_service_whose_slice_changed_gets_a_new_revision() {
    let mut world = World::default();
    world.apply(Change::ServicesReplaced(vec![service("a", 80).into(), service("b", 80).into()]));
    let before = (revision(&world, "a"), revision(&world, "b"), world.revisions().services);
    world.apply(Change::SliceApplied(Box::new(slice("a-1", "a", "10.0.0.1"))));
    assert!(revision(&world, "a") > before.0);
    assert_eq!((revision(&world, "b"), world.revisions().services), (before.1, before.2));
}

#[test]
fn the_same_object_again_changes_nothing() {
    let mut world = World::default();
    world.apply(Change::ServicesReplaced(vec![service("a", 80).into()]));
    world.apply(Change::SlicesReplaced(vec![slice("a-1", "a", "10.0.0.1")]));
    let before = revision(&world, "a");
    let mut again = service("a", 80);
    again.metadata.resource_version = Some("9".to_owned());
    world.apply(Change::ServiceApplied(Box::new(again.into())));
    world.apply(Change::SlicesReplaced(vec![slice("a-1", "a", "10.0.0.1")]));
    assert_eq!(revision(&world, "a"), before);
    assert_eq!(world.services()[&ServiceName::new("shop", "a")].candidate.object.resource_version, "9");
}

#[test]
fn a_relist_removes_missing_objects() {
    let mut world = World::default();
    world.apply(Change::ServicesReplaced(vec![service("a", 80).into(), service("b", 80).into()]));
    world.apply(Change::SlicesReplaced(vec![slice("a-1", "a", "10.0.0.1")]));
    world.apply(Change::ServicesReplaced(vec![service("a", 80).into()]));
    world.apply(Change::SlicesReplaced(vec![]));
    assert_eq!(world.services().len(), 1);
    assert_eq!(world.slices_of(&ServiceName::new("shop", "a")).count(), 0);
}

#[test]
fn a_deleted_slice_is_kept_while_its_service_exists_until_it_is_forgotten() {
    let a = ServiceName::new("shop", "a");
    let counts = |world: &World| (world.slices_of(&a).count(), world.deleted_slices_of(&a).count());
    let mut world = World::default();
    world.apply(Change::ServicesReplaced(vec![service("a", 80).into()]));
    world.apply(Change::SlicesReplaced(vec![slice("a-1", "a", "10.0.0.1"), slice("b-1", "b", "10.0.0.9")]));
    let before = revision(&world, "a");
    world.apply(Change::SliceDeleted(ServiceName::new("shop", "a-1")));
    assert_eq!(counts(&world), (0, 1));
    assert!(revision(&world, "a") > before);
    world.apply(Change::SliceApplied(Box::new(slice("a-1", "a", "10.0.0.1"))));
    assert_eq!(counts(&world), (1, 0), "it was created again with the same name");
    world.apply(Change::SlicesReplaced(vec![slice("a-2", "a", "10.0.0.1")]));
    assert_eq!(counts(&world), (1, 1));
    world.forget_deleted_slices(std::slice::from_ref(&a));
    assert_eq!(counts(&world), (1, 0));
    world.apply(Change::SlicesReplaced(vec![]));
    world.apply(Change::ServiceDeleted(a.clone()));
    assert_eq!(counts(&world), (0, 0), "it is removed with its Service");
    assert!(world.slices.is_empty() && world.deleted_slices.is_empty(), "nothing is kept for missing Services");
}

#[test]
fn an_owner_who_expects_a_service_without_frontend_to_be_served_gets_one_note() {
    let mut world = World::default();
    let mut name = service("db", 80);
    let spec = name.spec.as_mut().unwrap();
    (spec.type_, spec.external_ips) = (Some("ExternalName".to_owned()), Some(vec!["192.0.2.9".to_owned()]));
    world.apply(Change::ServicesReplaced(vec![name.clone().into()]));
    let notes = world.take_notes();
    assert!(notes.len() == 1 && notes[0].remark.text.contains("ExternalName"), "{notes:?}");
    world.apply(Change::ServiceApplied(Box::new(name.clone().into())));
    world.apply(Change::ServicesReplaced(vec![name.clone().into()]));
    assert_eq!(world.take_notes(), []);
    world.apply(Change::ServicesReplaced(vec![]));
    world.apply(Change::ServiceApplied(Box::new(name.into())));
    assert_eq!(world.take_notes().len(), 1, "another one of that name");
}

#[test]
fn every_object_that_goes_is_told_once_also_one_that_is_never_served() {
    let mut world = World::default();
    let headless = || {
        let mut headless = service("db", 80);
        let spec = headless.spec.as_mut().unwrap();
        (spec.type_, spec.external_ips) = (Some("ExternalName".to_owned()), Some(vec!["192.0.2.9".to_owned()]));
        headless
    };
    let db = || Subject::Service(ServiceName::new("shop", "db"));
    for is_listed in [false, true] {
        world.apply(Change::ServiceApplied(Box::new(headless().into())));
        world.take_deleted();
        let gone =
            if is_listed { Change::ServicesReplaced(Vec::new()) } else { Change::ServiceDeleted(ServiceName::new("shop", "db")) };
        world.apply(gone);
        assert_eq!((world.take_deleted(), world.take_notes()), ([db()].into(), vec![]), "{is_listed}");
    }
    let node = || Node { metadata: ObjectMeta { name: Some("n".to_owned()), ..ObjectMeta::default() }, ..Node::default() };
    let namespace = || Namespace { metadata: node().metadata, ..Namespace::default() };
    let pool = || AddressPool { metadata: node().metadata, ..AddressPool::new("n", AddressPoolSpec::default()) };
    let known = || BTreeMap::from([("n".to_owned(), KnownGateway::default())]);
    let name = || ServiceName::new("shop", "n");
    let gone = [
        (Change::NodeDeleted("n".to_owned()), Subject::Node("n".to_owned())),
        (Change::NodesReplaced(Vec::new()), Subject::Node("n".to_owned())),
        (Change::NamespaceDeleted("n".to_owned()), Subject::Namespace("n".to_owned())),
        (Change::NamespacesReplaced(Vec::new()), Subject::Namespace("n".to_owned())),
        (Change::PoolDeleted("n".to_owned()), Subject::Pool("n".to_owned())),
        (Change::PoolsReplaced(Vec::new()), Subject::Pool("n".to_owned())),
        (Change::GatewaysReplaced(BTreeMap::new()), Subject::Gateway("n".to_owned())),
        (Change::SliceDeleted(name()), Subject::Slice(name())),
        (Change::SlicesReplaced(Vec::new()), Subject::Slice(name())),
    ];
    for (change, subject) in gone {
        world.apply(Change::NodeApplied(Box::new(node())));
        world.apply(Change::NamespaceApplied(Box::new(namespace())));
        world.apply(Change::PoolApplied(Box::new(pool())));
        world.apply(Change::GatewaysReplaced(known()));
        world.apply(Change::SliceApplied(Box::new(slice("n", "a", "10.0.0.1"))));
        world.apply(change);
        assert_eq!(world.take_deleted(), [subject].into());
    }
}

#[test]
fn notes_of_a_follower_end_when_their_object_is_mended_or_deleted() {
    let mut world = World::default();
    let undecodable = |name: &str, text: &str| {
        let subject = Subject::Service(ServiceName::new("shop", name));
        Change::Noted(Note { subject, remark: Remark::new(Cause::Undecodable, text.to_owned()) })
    };
    for name in ["mended", "deleted", "stays"] {
        world.apply(undecodable(name, "one"));
    }
    world.apply(undecodable("stays", "another"));
    world.apply(Change::ServiceApplied(Box::new(service("mended", 80).into())));
    world.apply(Change::ServiceDeleted(ServiceName::new("shop", "deleted")));
    world.forget_what_only_plans_need();
    let left: Vec<_> = world.take_notes().into_iter().map(|note| (note.subject.to_string(), note.remark.text)).collect();
    assert_eq!(left, [("Service shop/stays".to_owned(), "another".to_owned())]);
    for number in 0..2 * NOTED_OBJECTS_MAX {
        world.apply(undecodable(&number.to_string(), "one"));
    }
    world.forget_what_only_plans_need();
    assert_eq!(world.take_notes().len(), NOTED_OBJECTS_MAX);
}

#[test]
fn a_service_that_changes_its_type_is_removed() {
    let mut world = World::default();
    world.apply(Change::ServiceApplied(Box::new(service("a", 80).into())));
    let mut other = service("a", 80);
    other.spec.as_mut().unwrap().type_ = Some("ClusterIP".to_owned());
    world.apply(Change::ServiceApplied(Box::new(other.into())));
    assert!(world.services().is_empty());
}

#[test]
fn a_node_status_update_increases_no_revision() {
    let node = |address: &str, ready: &str| -> Box<Node> {
        let object = serde_json::json!({"metadata": {"name": "a"}, "status": {"addresses": [{"type": "InternalIP",
            "address": address}], "conditions": [{"type": "Ready", "status": ready}]}});
        Box::new(serde_json::from_value(object).unwrap())
    };
    let mut world = World::default();
    world.apply(Change::NodesReplaced(vec![*node("10.0.1.1", "True")]));
    let first = world.revisions().nodes;
    world.apply(Change::NodeApplied(node("10.0.1.1", "False")));
    assert_eq!(world.revisions().nodes, first);
    world.apply(Change::NodeApplied(node("10.0.1.2", "True")));
    assert!(world.revisions().nodes > first);
    world.apply(Change::NodeDeleted("a".to_owned()));
    assert!(world.nodes().is_empty());
}

#[test]
fn a_slice_that_moves_to_another_service_leaves_the_old_one() {
    let mut world = World::default();
    world.apply(Change::SliceApplied(Box::new(slice("x", "a", "10.0.0.1"))));
    world.apply(Change::SliceApplied(Box::new(slice("x", "b", "10.0.0.1"))));
    assert_eq!(world.slices_of(&ServiceName::new("shop", "a")).count(), 0);
    assert_eq!(world.slices_of(&ServiceName::new("shop", "b")).count(), 1);
}

fn annotate(world: &mut World, uid: &str, pairs: &[(&str, &str)]) -> ServiceSpec {
    let annotations: Map<String, Value> = pairs.iter().map(|(k, v)| (format!("sluice.dev/{k}"), (*v).into())).collect();
    let object = json!({"metadata": {"name": "a", "namespace": "shop", "uid": uid, "annotations": annotations},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
    world.apply(Change::ServiceApplied(Box::new(serde_json::from_value::<Service>(object).unwrap().into())));
    world.services()[&ServiceName::new("shop", "a")].candidate.wanted.clone().unwrap()
}

#[test]
fn a_value_that_cannot_be_parsed_leaves_the_previous_value_in_force() {
    let good = [("addresses", "192.0.2.9"), ("health-check", "none"), ("scheduler", "rr"), ("idle-timeout", "5m")];
    let bad = [("addresses", "192.0.2.900"), ("health-check", "udp"), ("scheduler", "dice"), ("idle-timeout", "5")];
    let mut world = World::default();
    let before = annotate(&mut world, "u", &good);
    // The second iteration simulates a later event of the object.
    for _ in 0..2 {
        let now = annotate(&mut world, "u", &bad);
        assert_eq!((&now.addresses, &now.health), (&before.addresses, &before.health));
        assert_eq!((now.scheduler, now.idle_timeout), (before.scheduler, before.idle_timeout));
        assert_eq!((now.unread.len(), now.notes.len()), (4, 4), "{:?}", now.notes);
    }
    assert!(annotate(&mut world, "other", &bad).addresses.is_empty(), "another Service of that name");
    annotate(&mut world, "u", &good);
    assert!(annotate(&mut world, "u", &[]).addresses.is_empty(), "removed annotations have no effect");
}

fn drained_addresses(world: &World, node: &str) -> Vec<String> {
    world.drained_nodes().addresses_of(node).map(|address| address.to_string()).collect()
}

fn slice_on(name: &str, endpoints: &[(&str, &str)]) -> ReadSlice {
    let endpoints: Vec<_> = endpoints.iter().map(|(at, node)| json!({"addresses": [at], "nodeName": node})).collect();
    let labels = json!({"kubernetes.io/service-name": "a"});
    let object = json!({"metadata": {"name": name, "namespace": "shop", "labels": labels}, "addressType": "IPv4",
        "ports": [{"port": 8080}], "endpoints": endpoints});
    serde_json::from_value::<EndpointSlice>(object).unwrap().into()
}

#[test]
fn addresses_of_a_drained_node_stay_when_its_pods_have_gone_and_move_with_the_next_pod() {
    let node = |name: &str, address: &str| {
        let status = json!({"addresses": [{"type": "InternalIP", "address": address}]});
        serde_json::from_value::<Node>(json!({"metadata": {"name": name}, "status": status})).unwrap()
    };
    let put = |world: &mut World, endpoints: &[(&str, &str)]| {
        world.apply(Change::SliceApplied(Box::new(slice_on("a-1", endpoints))));
    };
    let drain = |world: &mut World, targets: &[&str]| {
        world.apply(Change::OverridesReplaced(Box::new(overrides::tests::drained(targets))));
    };
    let mut world = World::default();
    world.apply(Change::NodesReplaced(vec![node("n1", "10.0.1.1"), node("n2", "10.0.1.2")]));
    put(&mut world, &[("10.0.0.1", "n1"), ("10.0.0.2", "n2"), ("10.0.0.3", "n1")]);
    assert!(drained_addresses(&world, "n1").is_empty());
    drain(&mut world, &["node/n1", "backend/10.0.0.2"]);
    assert_eq!(drained_addresses(&world, "n1"), ["10.0.0.1", "10.0.0.3", "10.0.1.1"]);
    assert!(drained_addresses(&world, "n2").is_empty());

    let before = Arc::clone(world.drained_nodes());
    put(&mut world, &[("10.0.0.2", "n2")]);
    world.apply(Change::NodeDeleted("n1".to_owned()));
    assert!(Arc::ptr_eq(&before, world.drained_nodes()), "flows to its pods may go on");
    put(&mut world, &[("10.0.0.2", "n2"), ("10.0.0.3", "n2"), ("10.0.0.4", "n1")]);
    assert_eq!(drained_addresses(&world, "n1"), ["10.0.0.1", "10.0.0.4", "10.0.1.1"], "10.0.0.3 is of n2 now");
    world.apply(Change::NodeApplied(Box::new(node("n1", "10.0.1.9"))));
    drain(&mut world, &["node/n1", "node/n2"]);
    assert_eq!(drained_addresses(&world, "n1"), ["10.0.0.1", "10.0.0.4", "10.0.1.1", "10.0.1.9"]);
    assert_eq!(drained_addresses(&world, "n2"), ["10.0.0.2", "10.0.0.3", "10.0.1.2"]);
    drain(&mut world, &["node/n2"]);
    assert!(drained_addresses(&world, "n1").is_empty(), "it is no longer drained");
}
