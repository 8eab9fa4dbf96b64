//! Two groups of gateways on one cluster, each with a controller and pools of its own.

use super::*;
use crate::plan::LeftBy;

/// The settings of an additional group, with one pool, 198.51.100.0-9.
fn east() -> ControllerSettings {
    ControllerSettings {
        group: "east".to_owned(),
        ownership: OwnershipRules { serves_unassigned: false, ..OwnershipRules::default() },
        pools: vec![PoolSpec::new("east", vec!["198.51.100.0-198.51.100.9".parse().unwrap()])],
        ..settings()
    }
}

/// A Service in the cluster that asks for a group, was marked by one, and has an address.
fn marked(name: &str, asked: Option<&str>, mark: Option<&str>, address: Option<&str>) -> Value {
    let mut object = service(name, json!({}));
    for (key, value) in [("uid", "u"), ("resourceVersion", "7")] {
        object["metadata"][key] = value.into();
    }
    object["metadata"]["annotations"] = json!({});
    for (key, value) in [("sluice.dev/gateway-group", asked), ("sluice.dev/group", mark)] {
        if let Some(value) = value {
            object["metadata"]["annotations"][key] = value.into();
        }
    }
    if mark.is_some() {
        object["metadata"]["finalizers"] = json!(["sluice.dev/load-balancer-cleanup"]);
    }
    if let Some(address) = address {
        object["status"] = json!({"loadBalancer": {"ingress": [{"ip": address, "ipMode": "Proxy"}]}});
        let fields = json!({"f:status": {"f:loadBalancer": {"f:ingress": {}}}});
        object["metadata"]["managedFields"] =
            json!([{"manager": "sluice", "operation": "Update", "subresource": "status", "fieldsV1": fields}]);
    }
    object
}

/// One controller and what it remembers.
struct Group {
    settings: ControllerSettings,
    memory: Memory,
}

impl Group {
    fn new(settings: ControllerSettings) -> Self {
        Self { settings, memory: Memory::default() }
    }

    fn plan(&mut self, world: &World) -> Plan {
        plan(world, &self.settings, &mut self.memory, Instant::now())
    }

    fn address_of(&mut self, world: &World, name: &str) -> Option<IpAddr> {
        self.plan(world).statuses.get(&named(name)).and_then(|status| Some(status.ingress.first()?.ip))
    }
}

fn ip(text: &str) -> Option<IpAddr> {
    Some(text.parse().unwrap())
}

#[test]
fn a_service_that_moves_is_released_by_the_old_group_before_the_new_one_takes_it() {
    let (mut world, mut home, mut away) = (World::default(), Group::new(settings()), Group::new(east()));
    apply(&mut world, marked("web", None, Some("default"), Some("192.0.2.100")));
    assert_eq!(home.address_of(&world, "web"), ip("192.0.2.100"));
    assert_eq!(away.address_of(&world, "web"), None);

    apply(&mut world, marked("web", Some("east"), Some("default"), Some("192.0.2.100")));
    let released = home.plan(&world);
    assert!(!released.services.contains_key(&named("web")) && !released.statuses.contains_key(&named("web")));
    assert_eq!(released.cleanups[&named("web")].by, LeftBy::Us, "its address is taken off it too");
    assert_eq!(away.address_of(&world, "web"), None, "the old group holds it");
    assert!(away.plan(&world).notes.is_empty(), "a move takes seconds");
    let lasting = away.memory.current_notes();
    assert!(lasting.iter().any(|note| note.remark.text.contains("\"default\" has not released it")), "{lasting:?}");

    apply(&mut world, marked("web", Some("east"), None, None));
    assert_eq!(away.address_of(&world, "web"), ip("198.51.100.0"));
    assert!(home.plan(&world).cleanups.is_empty() && away.memory.current_notes().is_empty());

    // And back, by removing the annotation.
    apply(&mut world, marked("web", None, Some("east"), Some("198.51.100.0")));
    assert_eq!((home.address_of(&world, "web"), away.address_of(&world, "web")), (None, None));
    apply(&mut world, marked("web", None, None, None));
    assert_eq!(home.address_of(&world, "web"), ip("192.0.2.100"), "its former address was kept for it");
}

#[test]
fn a_service_keeps_its_address_when_its_pool_moves_with_it() {
    let (mut world, mut home, mut away) = (World::default(), Group::new(settings()), Group::new(east()));
    let pool = |group: Option<&str>| pool("shared", &["203.0.113.0/28"], group, "2026-01-01T00:00:00Z");
    world.apply(Change::PoolsReplaced(vec![pool(None)]));
    apply(&mut world, marked("web", None, Some("default"), Some("203.0.113.1")));
    assert_eq!(home.address_of(&world, "web"), ip("203.0.113.1"));
    world.apply(Change::PoolsReplaced(vec![pool(Some("east"))]));
    assert_eq!(home.address_of(&world, "web"), ip("203.0.113.1"), "a pool edit renumbers nobody");

    // Nobody else gets it meanwhile.
    let mut other = marked("other", Some("east"), None, None);
    other["metadata"]["annotations"]["sluice.dev/addresses"] = "203.0.113.1".into();
    apply(&mut world, other);
    let refused = away.plan(&world).services[&named("other")].refusal.clone().unwrap();
    assert!(refused.reason == Reason::Conflict && refused.message.contains("shop/web"), "{refused:?}");

    apply(&mut world, marked("web", Some("east"), Some("default"), Some("203.0.113.1")));
    assert_eq!((home.address_of(&world, "web"), away.address_of(&world, "web")), (None, None));
    apply(&mut world, marked("web", Some("east"), None, None));
    assert_eq!(away.address_of(&world, "web"), ip("203.0.113.1"));
}

#[test]
fn a_service_that_moves_back_with_its_pool_waits_until_the_old_group_has_released_it() {
    let (mut world, mut home, mut away) = (World::default(), Group::new(settings()), Group::new(east()));
    let pool = |group: Option<&str>| pool("shared", &["203.0.113.0/28"], group, "2026-01-01T00:00:00Z");
    world.apply(Change::PoolsReplaced(vec![pool(Some("east"))]));
    apply(&mut world, marked("web", Some("east"), Some("east"), Some("203.0.113.1")));
    assert_eq!((home.address_of(&world, "web"), away.address_of(&world, "web")), (None, ip("203.0.113.1")));
    world.apply(Change::PoolsReplaced(vec![pool(None)]));
    apply(&mut world, marked("web", None, Some("east"), Some("203.0.113.1")));
    assert_eq!((home.address_of(&world, "web"), away.address_of(&world, "web")), (None, None), "two owners of one VIP");
    assert_eq!(away.plan(&world).cleanups[&named("web")].by, LeftBy::Us);
    let lasting = home.memory.current_notes();
    assert!(lasting.iter().any(|note| note.remark.text.contains("group \"east\" holds it")), "{lasting:?}");
    apply(&mut world, marked("web", None, None, None));
    assert_eq!((home.address_of(&world, "web"), away.address_of(&world, "web")), (ip("203.0.113.1"), None));
}

#[test]
fn of_two_groups_that_serve_what_names_none_the_first_keeps_the_service() {
    let both = [settings(), ControllerSettings { group: "east".to_owned(), ..settings() }];
    let mut groups = both.map(|settings| Group::new(ControllerSettings { pools: Vec::new(), ..settings }));
    let mut world = World::default();
    world.apply(Change::PoolsReplaced(vec![pool("shared", &["203.0.113.0/28"], None, "2026-01-01T00:00:00Z")]));
    for (mark, owner) in [("default", 0), ("east", 1)] {
        apply(&mut world, marked("web", None, Some(mark), Some("203.0.113.1")));
        assert_eq!(groups[owner].address_of(&world, "web"), ip("203.0.113.1"), "{mark} has marked it");
        let other = &mut groups[1 - owner];
        assert_eq!(other.address_of(&world, "web"), None, "{mark} has marked it");
        let told = other.memory.current_notes();
        assert!(told.iter().any(|note| note.remark.text.contains("`serveUnassigned: true`")), "{told:?}");
    }
}

#[test]
fn a_renamed_group_serves_its_services_at_their_addresses_once_the_mark_of_the_former_name_is_gone() {
    let (mut world, mut renamed) = (World::default(), Group::new(ControllerSettings { group: "west".to_owned(), ..settings() }));
    apply(&mut world, marked("web", None, Some("default"), Some("192.0.2.107")));
    assert_eq!(renamed.address_of(&world, "web"), None, "nothing tells a former name from another group");
    apply(&mut world, marked("web", None, None, Some("192.0.2.107")));
    assert_eq!(renamed.address_of(&world, "web"), ip("192.0.2.107"));
}

fn pool(name: &str, addresses: &[&str], group: Option<&str>, created: &str) -> objects::crd::AddressPool {
    let spec = json!({"addresses": addresses, "gatewayGroup": group});
    let metadata = json!({"name": name, "creationTimestamp": created});
    let object = json!({"apiVersion": "sluice.dev/v1beta1", "kind": "AddressPool", "metadata": metadata, "spec": spec});
    serde_json::from_value(object).unwrap()
}

#[test]
fn a_pool_belongs_to_one_group_and_no_address_to_pools_of_two() {
    let mut world = World::default();
    world.apply(Change::PoolsReplaced(vec![
        pool("a", &["203.0.113.0/28"], Some("east"), "2026-01-01T00:00:00Z"),
        pool("b", &["203.0.113.8-203.0.113.20"], None, "2026-01-02T00:00:00Z"),
        pool("c", &["203.0.113.32/28"], None, "2026-01-03T00:00:00Z"),
        pool("d", &["203.0.113.40"], Some("east"), "2026-01-04T00:00:00Z"),
        pool("e", &["203.0.113.64/28"], Some("west"), "2026-01-05T00:00:00Z"),
    ]));
    let used = |settings: &ControllerSettings| {
        let pools = pools::Pools::of(settings, world.pools());
        let conflicts: Vec<_> =
            pools.states().iter().filter(|pool| pool.conflict.is_some()).map(|pool| pool.name.clone()).collect();
        (pools.iter().map(|pool| pool.name.clone()).collect::<Vec<_>>(), conflicts)
    };
    assert_eq!(used(&settings()), (texts(&["default", "c"]), texts(&["b"])));
    assert_eq!(used(&east()), (texts(&["east", "a"]), texts(&["d"])));
}

#[test]
fn the_owner_of_a_service_learns_that_nobody_serves_its_group() {
    let (mut world, mut home, mut away) = (World::default(), Group::new(settings()), Group::new(east()));
    let known = |groups: &[&str]| {
        let gateways = groups.iter().map(|group| {
            let gateway = KnownGateway { group: (*group).to_owned(), ..KnownGateway::default() };
            (format!("edge-{group}"), gateway)
        });
        Change::GatewaysReplaced(gateways.collect())
    };
    for group in [&mut home, &mut away] {
        group.settings.source = Source::Kubernetes { kubeconfig: None, namespace: None };
    }
    world.apply(known(&["default", "east"]));
    apply(&mut world, marked("web", Some("west"), None, None));
    apply(&mut world, marked("api", Some("east"), None, None));
    let mut theirs = marked("theirs", Some("west"), None, None);
    theirs["spec"]["loadBalancerClass"] = "example.com/lb".into();
    apply(&mut world, theirs);
    let told = home.plan(&world).notes;
    assert_eq!(told.len(), 1, "{told:?}");
    let text = &told[0].remark.text;
    assert!(text.contains("asks for group \"west\"") && text.contains("one of default, east"), "{text}");
    assert!(away.plan(&world).notes.is_empty(), "one group tells the owner");
    assert!(home.plan(&world).notes.is_empty(), "once");
    assert_eq!(home.memory.current_notes().len(), 1, "the Event is repeated");
    world.apply(known(&["default", "east", "west"]));
    home.plan(&world);
    assert!(home.memory.current_notes().is_empty());
}

#[test]
fn a_deleted_service_of_another_group_of_our_class_is_left_to_it_first() {
    let mut world = World::default();
    for (name, mark) in [("ours", "default"), ("theirs", "east")] {
        let mut going = marked(name, None, Some(mark), Some("192.0.2.100"));
        going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        apply(&mut world, going);
    }
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let by: Vec<_> = plan.cleanups.iter().map(|(name, cleanup)| (name.name.as_str(), cleanup.by)).collect();
    assert_eq!(by, [("ours", LeftBy::Us), ("theirs", LeftBy::Another)]);
}

#[test]
fn an_address_that_another_installation_gave_is_not_given_again_though_pools_of_two_classes_overlap() {
    let (mut world, mut home) = (World::default(), Group::new(ControllerSettings { pools: Vec::new(), ..settings() }));
    let mut theirs = pool("theirs", &["203.0.113.0/28"], None, "2026-01-01T00:00:00Z");
    theirs.spec.load_balancer_class = Some("example.com/other".to_owned());
    world.apply(Change::PoolsReplaced(vec![theirs, pool("ours", &["203.0.113.0/28"], None, "2026-01-02T00:00:00Z")]));
    let mut other = marked("other", None, Some("east"), Some("203.0.113.0"));
    other["spec"]["loadBalancerClass"] = "example.com/other".into();
    apply(&mut world, other);
    apply(&mut world, marked("web", None, None, None));
    assert_eq!(home.address_of(&world, "web"), ip("203.0.113.1"));
}

#[test]
fn a_pool_that_selects_services_gives_addresses_to_those_with_its_labels() {
    let mut world = World::default();
    for (name, tier) in [("web", "public"), ("db", "private")] {
        let mut object = service(name, json!({}));
        object["metadata"]["labels"] = json!({"tier": tier});
        apply(&mut world, object);
    }
    let mut public = PoolSpec::new("public", vec!["198.51.100.0-198.51.100.9".parse().unwrap()]);
    public.services = [("tier".to_owned(), "public".to_owned())].into_iter().collect();
    let settings = ControllerSettings { pools: vec![public], ..settings() };
    let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
    assert_eq!(plan.statuses[&named("web")].ingress, [ingress("198.51.100.0")]);
    assert_eq!(plan.services[&named("db")].refusal.as_ref().unwrap().reason, Reason::Refused);
}
