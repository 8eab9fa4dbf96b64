//! Failover: what a new leader adopts, and what it does not change.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proto::{GatewayProfile, Reason, Service};
use serde_json::{Value, json};

use super::{addresses, apply, endpoints, named, service, settings, stored, texts};
use crate::config::settings::{ControllerSettings, MaglevSeed};
use crate::gateways::registry::{Connection, Gateways};
use crate::plan::{LeftBy, MAGLEV_SEED, Memory, Plan, plan};
use crate::world::World;
use crate::world::change::{Change, KnownGateway};
use crate::world::checkpoint::{Checkpoint, Reserved};
use objects::PoolSpec;
use objects::crd::AddressPool;
use objects::note::{Cause, Note};

/// The Service as an API server has it while it is being deleted: our finalizer is on it, and this address in its
/// status.
fn going(name: &str, address: &str) -> Value {
    let mut object = stored("nat", "7", "Proxy");
    object["metadata"]["name"] = name.into();
    object["metadata"]["finalizers"] = json!(["sluice.dev/load-balancer-cleanup"]);
    object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    object["status"]["loadBalancer"]["ingress"][0]["ip"] = address.into();
    object
}

#[test]
fn a_new_leader_keeps_the_address_of_a_service_that_is_being_deleted_until_it_is_deleted() {
    let mut settings = settings();
    settings.pools = vec![PoolSpec::new("default", vec!["192.0.2.100".parse().unwrap()])];
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, going("old", "192.0.2.100"));
    apply(&mut world, service("web", json!({})));
    let first = plan(&world, &settings, &mut memory, now);
    assert_eq!(first.services[&named("web")].refusal.as_ref().map(|refusal| refusal.reason), Some(Reason::Exhausted));
    assert!(!first.services.contains_key(&named("old")) && first.cleanups.contains_key(&named("old")));
    assert_eq!(first.pools_status[0].families[0].1.used, 1);
    world.apply(Change::ServiceDeleted(named("old")));
    let second = plan(&world, &settings, &mut memory, now);
    assert_eq!(second.services[&named("web")].ports.len(), 1, "{:?}", second.services[&named("web")].refusal);
    // An address outside our pools that another program wrote is not adopted.
    let mut foreign = going("foreign", "198.18.0.1");
    foreign["metadata"]["managedFields"] = Value::Null;
    apply(&mut world, foreign);
    let third = plan(&world, &settings, &mut memory, now);
    assert_eq!(third.pools.len(), 1, "{:?}", third.pools);
}

#[test]
fn addresses_of_disconnected_gateways_and_nodes_are_never_vips_and_those_of_gateways_never_backends() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    let away = ["192.0.2.100", "10.0.0.9"].map(|text| text.parse().unwrap()).to_vec();
    world.apply(Change::GatewaysReplaced(
        [("edge-1".to_owned(), KnownGateway { profile: away.into(), ..KnownGateway::default() })].into(),
    ));
    let list = json!([{"type": "InternalIP", "address": "10.0.1.1"}, {"type": "InternalIP", "address": "192.0.2.101"},
        {"type": "ExternalIP", "address": "192.0.2.102"}]);
    let node = json!({"metadata": {"name": "n"}, "status": {"addresses": list}});
    world.apply(Change::NodeApplied(Box::new(serde_json::from_value(node).unwrap())));
    let gateways = tokio::sync::watch::Sender::new(Gateways::default());
    let connection = Connection::open(&gateways, "edge-2", "", vec!["192.0.2.103".parse().unwrap()]);
    memory.follow_gateways(&gateways.borrow(), now);
    drop(connection);
    memory.follow_gateways(&gateways.borrow(), now);
    apply(&mut world, service("web", json!({})));
    endpoints(&mut world, "web", &texts(&["10.0.0.1", "10.0.0.9", "10.0.1.1"]));
    let plan = plan(&world, &settings(), &mut memory, now);
    let web = &plan.services[&named("web")];
    assert_eq!(web.ports[0].vips, ["192.0.2.104".parse::<IpAddr>().unwrap()]);
    assert_eq!(addresses(web), ["10.0.0.1:8080", "10.0.1.1:8080"]);
    assert!(plan.notes.iter().any(|note| note.remark.text.contains("address of gateway edge-1")), "{:?}", plan.notes);
}

#[test]
fn a_next_hop_of_any_gateway_is_no_vip_and_may_be_a_backend() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    let hop = |text: &str| [text.parse::<IpAddr>().unwrap()];
    let profile = GatewayProfile::new(hop("192.0.2.100"), hop("10.0.0.9"));
    world.apply(Change::GatewaysReplaced([("edge-1".to_owned(), KnownGateway { profile, ..KnownGateway::default() })].into()));
    let gateways = tokio::sync::watch::Sender::new(Gateways::default());
    let profile = GatewayProfile::new(hop("192.0.2.101"), [hop("10.0.0.8"), hop("192.0.2.102")].concat());
    let _connection = Connection::open(&gateways, "edge-2", "", profile);
    memory.follow_gateways(&gateways.borrow(), now);
    apply(&mut world, service("web", json!({})));
    endpoints(&mut world, "web", &texts(&["10.0.0.8", "10.0.0.9", "192.0.2.101"]));
    let plan = plan(&world, &settings(), &mut memory, now);
    let web = &plan.services[&named("web")];
    assert_eq!(web.ports[0].vips, ["192.0.2.103".parse::<IpAddr>().unwrap()]);
    assert_eq!(addresses(web), ["10.0.0.8:8080", "10.0.0.9:8080"]);
}

#[test]
fn without_node_port_addresses_on_any_gateway_node_port_services_are_not_ours() {
    let mut settings = settings();
    settings.profile.serves_node_ports = Some(false);
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    apply(&mut world, service("web", json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 30080}]})));
    let first = plan(&world, &settings, &mut memory, now);
    assert!(first.services.is_empty() && first.notes.is_empty() && memory.current_notes().is_empty(), "{:?}", first.notes);
    let gateways = tokio::sync::watch::Sender::new(Gateways::default());
    let serving = GatewayProfile { serves_node_ports: Some(true), ..GatewayProfile::default() };
    let _connection = Connection::open(&gateways, "edge-1", "", serving);
    assert!(memory.follow_gateways(&gateways.borrow(), now));
    let second = plan(&world, &settings, &mut memory, now);
    assert_eq!(second.services.keys().collect::<Vec<_>>(), [&named("web")]);
    // The next leader serves them before any gateway has connected.
    world.apply(Change::CheckpointReplaced(Box::new(second.checkpoint)));
    assert_eq!(plan(&world, &settings, &mut Memory::default(), now).services.len(), 1);
}

#[test]
fn a_freed_address_waits_for_a_gateway_that_is_not_connected_until_its_object_is_deleted() {
    let mut settings = settings();
    settings.pools[0].ranges = vec!["192.0.2.100".parse().unwrap()];
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    memory.set_time_of_day(now, std::time::SystemTime::now());
    let known = |names: &[&str]| {
        let known = KnownGateway { group: "default".to_owned(), ..KnownGateway::default() };
        Change::GatewaysReplaced(names.iter().map(|name| ((*name).to_owned(), known.clone())).collect())
    };
    world.apply(known(&["edge-1", "edge-2"]));
    let gateways = tokio::sync::watch::Sender::new(Gateways::default());
    let (one, two) =
        (Connection::open(&gateways, "edge-1", "", Vec::new()), Connection::open(&gateways, "edge-2", "", Vec::new()));
    let mut run = |world: &World, counter: u64, connections: &[&Connection]| {
        connections.iter().for_each(|connection| connection.acknowledge(counter - 1));
        memory.follow_gateways(&gateways.borrow(), now);
        let plan = plan(world, &settings, &mut memory, now);
        memory.published(counter);
        plan
    };
    apply(&mut world, service("old", json!({})));
    run(&world, 1, &[&one, &two]);
    // edge-2 is cut off just before the Service is deleted.
    two.acknowledge(1);
    drop(two);
    world.apply(Change::ServiceDeleted(named("old")));
    apply(&mut world, service("new", json!({})));
    run(&world, 2, &[&one]);
    for counter in 3..6 {
        let plan = run(&world, counter, &[&one]);
        let refusal = plan.services[&named("new")].refusal.as_ref().unwrap();
        assert!(refusal.message.contains("not connected: edge-2 (delete the EdgeGateway"), "{}", refusal.message);
    }
    world.apply(known(&["edge-1"]));
    assert_eq!(run(&world, 6, &[&one]).services[&named("new")].ports.len(), 1);
}

/// The Service is deleted while nobody leads, so that no reservation of its address is recorded.
#[test]
fn a_new_leader_waits_for_gateways_that_may_forward_the_address_of_a_service_that_has_vanished() {
    let mut settings = settings();
    settings.pools = vec![PoolSpec::new("default", vec!["192.0.2.100".parse().unwrap()])];
    let (mut world, now) = (World::default(), Instant::now());
    apply(&mut world, service("old", json!({})));
    let first = plan(&world, &settings, &mut Memory::default(), now);
    assert_eq!(first.services[&named("old")].ports.len(), 1);
    let (mut world, mut memory) = (World::default(), Memory::default());
    world.apply(Change::CheckpointReplaced(Box::new(first.checkpoint)));
    apply(&mut world, service("new", json!({})));
    let gateways = tokio::sync::watch::Sender::new(Gateways::default());
    let gateway = Connection::open(&gateways, "edge-1", "", Vec::new());
    let mut run = |counter| {
        memory.follow_gateways(&gateways.borrow(), now);
        let plan = plan(&world, &settings, &mut memory, now);
        memory.published(counter);
        plan.services[&named("new")].clone()
    };
    for counter in 1..3 {
        assert_eq!(run(counter).refusal.as_ref().map(|refusal| refusal.reason), Some(Reason::Exhausted), "edge-1 forwards it");
    }
    gateway.acknowledge(2);
    assert_eq!(run(3).refusal, None);
}

/// A pool whose VIPs are announced by BGP as one prefix.
fn routed_pool(name: &str, addresses: &[&str], bgp: Value) -> AddressPool {
    let pool = json!({"apiVersion": "sluice.dev/v1beta1", "kind": "AddressPool", "metadata": {"name": name},
        "spec": {"addresses": addresses, "announce": "routed", "bgp": bgp}});
    serde_json::from_value(pool).unwrap()
}

#[test]
fn deleting_a_pool_changes_no_route_whoever_leads() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    let settings = ControllerSettings { pools: Vec::new(), ..settings() };
    let bgp = json!({"aggregationLength": 24, "communities": ["no-export", "65000:1:2"], "med": 7});
    world.apply(Change::PoolApplied(Box::new(routed_pool("edge", &["198.51.100.0/24"], bgp))));
    apply(&mut world, service("web", json!({})));
    let before = plan(&world, &settings, &mut memory, now);
    let route = |plan: &Plan| -> Vec<_> {
        plan.pools.iter().map(|pool| (pool.ranges.clone(), pool.announce, pool.bgp.clone())).collect()
    };
    world.apply(Change::PoolDeleted("edge".to_owned()));
    let after = plan(&world, &settings, &mut memory, now);
    assert_eq!((route(&after), after.pools[0].bgp.aggregation_length), (route(&before), 24));
    // The next leader starts from the text that its predecessor wrote, before or after the pool was deleted.
    for checkpoint in [&before.checkpoint, &after.checkpoint] {
        let clock = std::time::SystemTime::now();
        let read = Checkpoint::from_texts(&checkpoint.to_texts(4, now, clock), now, clock);
        let mut successor = world.clone();
        successor.apply(Change::CheckpointReplaced(Box::new(read)));
        let next = plan(&successor, &settings, &mut Memory::default(), now);
        assert_eq!(route(&next), route(&before));
    }
    // Another pool that has a part of the prefix ends the aggregate.
    world.apply(Change::PoolApplied(Box::new(routed_pool("new", &["198.51.100.128/25"], json!({})))));
    let lone = plan(&world, &settings, &mut memory, now);
    assert_eq!(lone.pools[1].ranges, ["198.51.100.0".parse().unwrap()]);
    assert_eq!((lone.pools[1].bgp.aggregation_length, lone.pools[1].bgp.med), (32, Some(7)));
}

#[test]
fn of_two_services_that_two_installations_gave_one_address_the_younger_gets_another_and_is_told() {
    for (created, keeps) in [("2026-01-01T00:00:00Z", false), ("2026-01-03T00:00:00Z", true)] {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        let mut web = service("web", json!({}));
        web["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z".into();
        apply(&mut world, web);
        let mut theirs = service("theirs", json!({"loadBalancerClass": "example.com/other"}));
        theirs["metadata"]["creationTimestamp"] = created.into();
        theirs["metadata"]["annotations"] = json!({"sluice.dev/group": "other"});
        apply(&mut world, theirs.clone());
        let vip = |plan: &Plan| plan.services[&named("web")].ports[0].vips[0].to_string();
        world.apply(gateway_of("other"));
        world.apply(Change::PoolsReplaced(vec![pool_of_another_class()]));
        assert_eq!(vip(&plan(&world, &settings(), &mut memory, now)), "192.0.2.100");
        theirs["status"]["loadBalancer"]["ingress"] = json!([{"ip": "192.0.2.100"}]);
        theirs["metadata"]["managedFields"] = json!([{"manager": "sluice", "subresource": "status",
            "fieldsV1": {"f:status": {"f:loadBalancer": {"f:ingress": {}}}}}]);
        apply(&mut world, theirs.clone());
        for _ in 0..2 {
            let second = plan(&world, &settings(), &mut memory, now);
            assert_eq!(vip(&second), if keeps { "192.0.2.100" } else { "192.0.2.101" });
            let told = |note: &Note| note.remark.cause == Cause::AddressLost && note.remark.text.contains("shop/theirs");
            assert!(keeps || second.replanned == 0 || second.notes.iter().any(told), "{:?}", second.notes);
        }
        // What another program wrote there takes no address away.
        theirs["metadata"]["managedFields"] = Value::Null;
        let mut world = World::default();
        apply(&mut world, service("web", json!({})));
        let mut memory = Memory::default();
        plan(&world, &settings(), &mut memory, now);
        apply(&mut world, theirs);
        assert_eq!(vip(&plan(&world, &settings(), &mut memory, now)), "192.0.2.100");
    }
}

fn gateway_of(group: &str) -> Change {
    let known = KnownGateway { group: group.to_owned(), ..KnownGateway::default() };
    Change::GatewaysReplaced([("edge-9".to_owned(), known)].into())
}

fn pool_of_another_class() -> AddressPool {
    let mut theirs = routed_pool("theirs", &["192.0.2.100-192.0.2.101"], Value::Null);
    theirs.spec.load_balancer_class = Some("example.com/other".to_owned());
    theirs
}

#[test]
fn a_service_that_only_alleges_another_installation_takes_no_address_away_whoever_leads() {
    let now = Instant::now();
    // Without gateways, without a pool for the address, and with both.
    for (has_gateway, has_pool) in [(false, true), (true, false), (true, true)] {
        let mut world = World::default();
        if has_gateway {
            world.apply(gateway_of("x"));
        }
        world.apply(Change::PoolsReplaced(has_pool.then(pool_of_another_class).into_iter().collect()));
        let mut web = service("web", json!({}));
        web["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z".into();
        let mut evil = service("evil", json!({"loadBalancerClass": "example.com/other"}));
        evil["metadata"]["namespace"] = "attack".into();
        evil["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
        evil["metadata"]["annotations"] = json!({"sluice.dev/group": "x"});
        let fields = json!([{"manager": "sluice", "subresource": "status",
            "fieldsV1": {"f:status": {"f:loadBalancer": {"f:ingress": {}}}}}]);
        for object in [&mut web, &mut evil] {
            object["status"]["loadBalancer"]["ingress"] = json!([{"ip": "192.0.2.100"}]);
            object["metadata"]["managedFields"] = fields.clone();
        }
        apply(&mut world, web.clone());
        let vips = |plan: &Plan| plan.services[&named("web")].ports[0].vips.clone();
        let mut memory = Memory::default();
        let before = vips(&plan(&world, &settings(), &mut memory, now));
        apply(&mut world, evil);
        let is_proven = has_gateway && has_pool;
        let second = plan(&world, &settings(), &mut memory, now);
        assert_eq!(vips(&second) == before, !is_proven);
        let told = |note: &Note| note.remark.text.contains("may not work: attack/evil has it in its status");
        assert_eq!(second.notes.iter().any(told), !is_proven, "{:?}", second.notes);
        if is_proven {
            continue;
        }
        // Nor does it when our ports change, nor under the next leader, though the status was not written yet.
        web["spec"]["ports"] = json!([{"port": 81, "protocol": "TCP"}]);
        apply(&mut world, web.clone());
        let third = plan(&world, &settings(), &mut memory, now);
        assert_eq!(vips(&third), before);
        web["status"] = Value::Null;
        apply(&mut world, web);
        world.apply(Change::CheckpointReplaced(Box::new(third.checkpoint)));
        assert_eq!(vips(&plan(&world, &settings(), &mut Memory::default(), now)), before);
    }
}

/// One change of a world of three Services and a pool of three addresses, for the decisions that survive a leader.
#[derive(Clone, Debug)]
enum Turn {
    Service { name: u8, port: u16, request: Option<u8>, shares: bool },
    Gone(u8),
    Endpoints { of: u8, count: u8 },
    Later(u64),
}

fn turn(shares: f64) -> impl Strategy<Value = Turn> {
    let name = 0u8..3;
    prop_oneof![
        3 => (name.clone(), 80u16..82, prop::option::weighted(0.3, 99u8..104), prop::bool::weighted(shares))
            .prop_map(|(name, port, request, shares)| Turn::Service { name, port, request, shares }),
        2 => name.clone().prop_map(Turn::Gone),
        4 => (name, 0u8..60).prop_map(|(of, count)| Turn::Endpoints { of, count }),
        1 => (1u64..700).prop_map(Turn::Later),
    ]
}

/// Worlds after one turn each, and the time.
struct Turns {
    world: World,
    now: Instant,
    /// The Services, by number.
    objects: BTreeMap<u8, Value>,
}

impl Turns {
    fn new() -> Self {
        Self { world: World::default(), now: Instant::now(), objects: BTreeMap::new() }
    }

    fn take(&mut self, turn: Turn) {
        match turn {
            Turn::Service { name, port, request, shares } => {
                let mut object = service(&format!("s{name}"), json!({"ports": [{"port": port}]}));
                if let Some(last) = request {
                    object["metadata"]["annotations"]["sluice.dev/addresses"] = format!("192.0.2.{last}").into();
                }
                if shares {
                    object["metadata"]["annotations"]["sluice.dev/sharing-key"] = "k".into();
                }
                self.objects.insert(name, object.clone());
                apply(&mut self.world, object);
            }
            Turn::Gone(name) => {
                self.objects.remove(&name);
                self.world.apply(Change::ServiceDeleted(named(&format!("s{name}"))));
            }
            Turn::Endpoints { of, count } => {
                let list: Vec<String> = (1..=count).map(|last| format!("10.0.{of}.{last}")).collect();
                endpoints(&mut self.world, &format!("s{of}"), &list);
            }
            Turn::Later(seconds) => self.now += Duration::from_secs(seconds),
        }
    }
}

/// The addresses of a Service in a plan.
fn vips(plan: &Plan, name: u8) -> Vec<IpAddr> {
    plan.checkpoint.services.get(&named(&format!("s{name}"))).map(|decided| decided.addresses.clone()).unwrap_or_default()
}

/// Reservations end up to a second after they expire. Plans of that second must not forget them.
#[test]
fn a_reservation_that_expires_when_a_plan_is_made_ends_a_second_later() {
    let mut settings = settings();
    settings.pools[0].ranges = vec!["192.0.2.100-192.0.2.102".parse().unwrap()];
    let (mut state, mut memory) = (Turns::new(), Memory::default());
    let asks = |name| Turn::Service { name, port: 80, request: Some(101), shares: false };
    for turn in [asks(2), Turn::Gone(2), Turn::Later(100), Turn::Later(500)] {
        state.take(turn);
        plan(&state.world, &settings, &mut memory, state.now);
    }
    assert_eq!(memory.checkpoint.reserved.len(), 1);
    assert_eq!(memory.assigned_until, Some(state.now + Duration::from_secs(1)));
    state.now += Duration::from_secs(1);
    assert!(plan(&state.world, &settings, &mut memory, state.now).checkpoint.reserved.is_empty());
}

proptest! {
    /// The same addresses, table sizes and reservations, although no status was written yet. A Service that waits for a
    /// sharer gets its address one plan later, and at once from a new leader, so here none shares.
    #[test]
    fn a_plan_after_failover_is_the_plan_before(turns in prop::collection::vec(turn(0.0), 1..24)) {
        let mut settings = settings();
        settings.pools[0].ranges = vec!["192.0.2.100-192.0.2.102".parse().unwrap()];
        let (mut state, mut memory) = (Turns::new(), Memory::default());
        for turn in turns {
            state.take(turn);
            let mut before = plan(&state.world, &settings, &mut memory, state.now);
            // Reservations end up to a second late; meanwhile only a new leader gives their addresses to others.
            if before.checkpoint.reserved.iter().any(|one| one.until <= state.now) {
                state.now += Duration::from_secs(1);
                before = plan(&state.world, &settings, &mut memory, state.now);
            }
            let mut successor = state.world.clone();
            successor.apply(Change::CheckpointReplaced(Box::new(before.checkpoint.clone())));
            let after = plan(&successor, &settings, &mut Memory::default(), state.now);
            // The message of a refusal may differ, because a new leader allocates to all Services at once.
            let of = |plan: &Plan| -> Vec<_> {
                let one = |service: &Arc<Service>| (service.ports.clone(), service.refusal.as_ref().map(|refusal| refusal.reason));
                plan.services.iter().map(|(name, service)| (name.clone(), one(service))).collect()
            };
            prop_assert_eq!(of(&before), of(&after));
            prop_assert_eq!(&before.checkpoint.services, &after.checkpoint.services);
            // Reservations that expire together end up to a second late, but a new leader does not take over expired
            // ones.
            let reserved = |plan: &Plan| -> Vec<Reserved> {
                plan.checkpoint.reserved.iter().filter(|one| one.until > state.now).cloned().collect()
            };
            prop_assert_eq!(reserved(&before), reserved(&after));
        }
    }

    /// Whether the leader died before it wrote the statuses, or before it wrote the checkpoint.
    #[test]
    fn after_failover_every_service_has_the_address_that_it_had_and_may_share(
        turns in prop::collection::vec(turn(0.7), 1..24),
        wrote_statuses in any::<bool>(),
    ) {
        let mut settings = settings();
        settings.pools[0].ranges = vec!["192.0.2.100-192.0.2.101".parse().unwrap()];
        let (mut state, mut memory, mut older) = (Turns::new(), Memory::default(), Checkpoint::default());
        for turn in turns {
            state.take(turn);
            let before = plan(&state.world, &settings, &mut memory, state.now);
            let mut successor = state.world.clone();
            for (name, object) in state.objects.iter().filter(|_| wrote_statuses) {
                let ingress = vips(&before, *name).iter().map(|vip| json!({"ip": vip})).collect::<Value>();
                let mut object = object.clone();
                object["status"]["loadBalancer"]["ingress"] = ingress;
                object["metadata"]["managedFields"] = json!([{"manager": "sluice", "subresource": "status",
                    "fieldsV1": {"f:status": {"f:loadBalancer": {"f:ingress": {}}}}}]);
                apply(&mut successor, object);
            }
            let newest = before.checkpoint.clone();
            let stored = if wrote_statuses { std::mem::replace(&mut older, newest) } else { newest };
            successor.apply(Change::CheckpointReplaced(Box::new(stored)));
            let after = plan(&successor, &settings, &mut Memory::default(), state.now);
            // One that asks for an address may get it now.
            let kept = state.objects.iter().filter(|(_, object)| object["metadata"]["annotations"]["sluice.dev/addresses"].is_null());
            for (name, _) in kept {
                let had = vips(&before, *name);
                prop_assert!(had.is_empty() || had == vips(&after, *name), "s{name}: {had:?}, {:?}", vips(&after, *name));
            }
        }
    }
}

#[test]
fn a_table_keeps_its_size_while_its_service_is_refused() {
    let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
    let addresses = |count: u8| (1..=count).map(|last| format!("10.0.0.{last}")).collect::<Vec<_>>();
    endpoints(&mut world, "web", &addresses(10));
    apply(&mut world, service("web", json!({})));
    plan(&world, &settings(), &mut memory, now);
    apply(&mut world, service("web", json!({"sessionAffinity": "Cookie"})));
    plan(&world, &settings(), &mut memory, now);
    endpoints(&mut world, "web", &addresses(1));
    apply(&mut world, service("web", json!({})));
    assert_eq!(plan(&world, &settings(), &mut memory, now).services[&named("web")].ports[0].maglev.size, 2039);
}

#[test]
fn a_status_overwritten_while_there_was_no_leader_moves_no_address() {
    let mut world = World::default();
    apply(&mut world, service("first", json!({})));
    apply(&mut world, service("web", json!({})));
    let before = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    let mut foreign = service("web", json!({}));
    foreign["status"]["loadBalancer"]["ingress"] = json!([{"ip": "192.0.2.150"}]);
    foreign["metadata"]["managedFields"] = json!([{"manager": "kubectl", "subresource": "status",
        "fieldsV1": {"f:status": {"f:loadBalancer": {"f:ingress": {}}}}}]);
    let mut world = World::default();
    apply(&mut world, foreign);
    world.apply(Change::CheckpointReplaced(Box::new(before.checkpoint)));
    let after = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    assert_eq!(after.services[&named("web")].ports[0].vips, ["192.0.2.101".parse::<IpAddr>().unwrap()]);
    let is_reported = |note: &Note| note.remark.cause == Cause::AddressLost && note.remark.text.contains("192.0.2.150");
    assert!(after.notes.iter().any(is_reported), "{:?}", after.notes);
}

#[test]
fn content_that_another_installation_wrote_is_not_removed() {
    let mut world = World::default();
    let marked = |mut object: Value, name: &str, group: &str| {
        object["metadata"]["name"] = name.into();
        object["metadata"]["annotations"] = json!({"sluice.dev/group": group});
        object
    };
    for (group, prefix) in [("default", "ours"), ("other", "theirs")] {
        let mut classless = service("x", json!({"loadBalancerClass": null}));
        classless["metadata"]["finalizers"] = json!(["sluice.dev/load-balancer-cleanup"]);
        apply(&mut world, marked(classless, &format!("{prefix}-classless"), group));
        let mut gone = going("x", "192.0.2.107");
        gone["spec"]["loadBalancerClass"] = Value::Null;
        apply(&mut world, marked(gone, &format!("{prefix}-going"), group));
        let mut retyped = service("x", json!({"type": "ClusterIP", "loadBalancerClass": null}));
        for (key, value) in [("uid", "u"), ("resourceVersion", "7")] {
            retyped["metadata"][key] = value.into();
        }
        retyped["metadata"]["finalizers"] = json!(["sluice.dev/load-balancer-cleanup"]);
        apply(&mut world, marked(retyped, &format!("{prefix}-retyped"), group));
    }
    let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
    assert_eq!(plan.services.keys().map(|name| name.name.as_str()).collect::<Vec<_>>(), ["ours-classless"]);
    let cleanups: Vec<_> = plan.cleanups.iter().map(|(name, cleanup)| (name.name.as_str(), cleanup.by)).collect();
    assert_eq!(cleanups, [("ours-going", LeftBy::Us), ("ours-retyped", LeftBy::Us)]);
    assert_eq!(plan.statuses[&named("ours-classless")].group, "default");
}

#[test]
fn the_maglev_seed_is_that_of_the_installation_for_every_leader() {
    let seed_of = |seed: MaglevSeed, stored: Option<u64>| {
        let mut world = World::default();
        apply(&mut world, service("web", json!({})));
        world.apply(Change::CheckpointReplaced(Box::new(Checkpoint { maglev_seed: stored, ..Checkpoint::default() })));
        let settings = ControllerSettings { maglev_seed: seed, ..settings() };
        let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
        assert_eq!(plan.checkpoint.maglev_seed, stored, "it is stored again for the next leader");
        plan.services[&named("web")].ports[0].maglev.seed
    };
    assert_eq!(seed_of(MaglevSeed::Kept, Some(7)), 7);
    assert_eq!(seed_of(MaglevSeed::Random, Some(7)), 7);
    assert_eq!(seed_of(MaglevSeed::Kept, None), MAGLEV_SEED, "an installation from before there were seeds");
    assert_eq!(seed_of(MaglevSeed::Given(9), Some(7)), 9);
}
