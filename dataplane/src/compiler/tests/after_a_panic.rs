//! After a panic the compiler restarts with the whole state.

use std::collections::BTreeSet;

use super::*;
use crate::flow::TargetSlot;
use crate::snapshot::{BackendTable, PortView};

/// The slots of all backends that a service lists.
fn slots(snapshot: &Snapshot) -> BTreeMap<(Arc<ServiceName>, SocketAddr), (BackendId, TargetSlot)> {
    let mut slots = BTreeMap::new();
    for service in snapshot.services().values() {
        for view in service.ports.iter().flat_map(|port| &port.backends) {
            let target = snapshot.backends.get(view.id).unwrap().target;
            slots.insert((service.name.clone(), view.address), (view.id, target));
        }
    }
    slots
}

/// Backends that no service lists any longer.
fn draining(snapshot: &Snapshot) -> Vec<(SocketAddr, u32, TargetSlot)> {
    let all = (0..100).filter_map(|slot| snapshot.backends.in_slot(slot));
    all.filter(|backend| backend.removed).map(|backend| (backend.address, backend.generation, backend.target)).collect()
}

/// Addresses of the services, and which of their backends take new flows.
fn served(snapshot: &Snapshot) -> Vec<String> {
    let ports = snapshot.services().values().flat_map(|service| &service.ports);
    let backends = |port: &PortView| port.backends.iter().map(|b| (b.address, b.accepts_new)).collect::<Vec<_>>();
    ports.map(|port| format!("{:?} {:?}", port.frontends, backends(port))).collect()
}

/// Two services that share a target, reached by a router and on-link.
fn rig() -> Rig {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &["10.0.0.11:80", "10.0.0.12:80", "10.0.0.13:80"]));
    rig.put(service("dns", "192.0.2.101", &["10.0.0.11:80", "10.9.0.12:80"]));
    rig.put(service("gone", "192.0.2.102", &["10.0.0.19:80"]));
    let to = "10.9.0.0/16".parse().unwrap();
    rig.network.routes = vec![Route { to, via: Some(ip("10.0.0.250")), link: CLUSTER.into(), weight: 1 }];
    rig
}

/// A state that a panic may leave: the new network is stored but not applied, services and backends are half removed.
fn break_apart(rig: &mut Rig) {
    let compiler = &mut rig.compiler;
    compiler.is_whole = false;
    compiler.routes.follow(&rig.network);
    compiler.state = rig.state.services.clone();
    compiler.pools = Vec::new();
    compiler.services.pop_first();
    compiler.services.values_mut().for_each(|served| served.backends.clear());
    compiler.backends.table = BackendTable::default();
    compiler.last.v4.frontends = Arc::default();
}

/// Wherever the panic happened, only the slots that flows hold are taken over.
#[test]
fn after_a_panic_the_next_compilation_begins_with_the_whole_state_and_every_slot_stays() {
    let mut rig = rig();
    rig.compile();
    rig.state.services.remove(&ServiceName::new("default", "gone"));
    let before = rig.compile();
    assert_eq!(draining(&before).len(), 1);
    rig.network.routes[0].via = Some(ip("10.0.0.251"));
    rig.change("web", |web| _ = web.ports[0].backends.remove(1));
    break_apart(&mut rig);
    let after = rig.compile();

    let (old, new) = (slots(&before), slots(&after));
    assert_eq!(new.len(), old.len() - 1);
    assert!(new.iter().all(|(key, slot)| old[key] == *slot), "{old:?} {new:?}");
    let drains = draining(&after);
    assert!(drains.len() == 2 && draining(&before).iter().all(|one| drains.contains(one)), "{drains:?}");
    assert!(after.sequence() > before.sequence());
    assert_ne!(after.routes.epoch, before.routes.epoch, "flows look for their next hops again");
    let routed = new.iter().find(|((_, address), _)| address.ip() == ip("10.9.0.12")).map(|(_, (id, _))| *id).unwrap();
    let next_hop = after.routes.next_hop(after.backends.get(routed).unwrap().next_hop);
    assert_eq!(next_hop.map(|hop| hop.address), Some(ip("10.0.0.251")), "through the new router");

    // Equal to the result of a compiler that has never seen anything else.
    let mut other = Rig::new();
    (other.state, other.network) = (rig.state.clone(), rig.network.clone());
    let other = other.compile();
    assert_eq!(served(&after), served(&other));
    for address in ["192.0.2.100", "192.0.2.101", "192.0.2.102", "192.0.2.150", "10.0.0.3"] {
        assert_eq!(after.role(v4(address)), other.role(v4(address)), "{address}");
    }
}

#[test]
fn drains_end_after_a_panic_and_each_slot_is_reused_by_one_backend() {
    let mut rig = rig();
    rig.compile();
    rig.state.services.remove(&ServiceName::new("default", "gone"));
    break_apart(&mut rig);
    rig.compile();
    rig.now_ns += 400 * SECOND_NS;
    assert!(draining(&rig.compile()).is_empty());
    rig.put(service("late", "192.0.2.103", &["10.0.0.77:80"]));
    let late = slots(&rig.compile());
    let used: BTreeSet<u32> = late.values().map(|(id, _)| id.slot).collect();
    assert_eq!((used.len(), used.last()), (late.len(), Some(&5)), "six slots are enough for six backends: {late:?}");
}
