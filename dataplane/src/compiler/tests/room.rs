//! The room for backends and their targets: who gets it, and that it comes back.

use super::*;
use crate::stats::{CounterSlot, FrontendNumber};

const LIMIT: u32 = 64;

/// A gateway with room for this many targets, and one worker, which counts here.
fn rig(limit: u32) -> (Rig, Arc<WorkerCounters>) {
    let counters = Arc::new(WorkerCounters::default());
    let config = Config { targets_max: limit, ..config() };
    let mut rig = Rig::with(config.clone());
    rig.compiler = Compiler::new(config).counting(vec![counters.clone()]);
    (rig, counters)
}

/// A Service of a namespace with backends 10.`net`.x.y:80, numbered `first` and on.
fn of(namespace: &str, name: &str, vip: u8, net: u8, backends: std::ops::Range<u32>) -> Service {
    let addresses: Vec<String> = backends.map(|n| format!("10.{net}.{}.{}:80", n / 250, n % 250 + 1)).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let mut service = service(name, &format!("192.0.2.{vip}"), &addresses);
    service.name.namespace = namespace.into();
    service
}

/// Backends of a Service that take new flows.
fn served(snapshot: &Snapshot, namespace: &str, name: &str) -> Vec<SocketAddr> {
    let view = &snapshot.services()[&ServiceName::new(namespace, name)];
    view.ports[0].backends.iter().filter(|b| b.accepts_new).map(|b| b.address).collect()
}

fn refusal(snapshot: &Snapshot, namespace: &str, name: &str) -> Option<(Reason, String)> {
    let refused = snapshot.refused().iter().find(|(of, _)| *of == ServiceName::new(namespace, name));
    refused.map(|(_, refusal)| (refusal.reason, refusal.message.clone()))
}

/// As if a flow of the backend had been there.
fn use_backend(snapshot: &Snapshot, counters: &WorkerCounters, address: &str) {
    let (address, all) = (address.parse().unwrap(), (0..200).filter_map(|slot| Some((slot, snapshot.backends.in_slot(slot)?))));
    for (slot, _) in all.filter(|(_, backend)| backend.address == address) {
        counters.at(CounterSlot::new(slot, FrontendNumber::new(1))).new_flows.add(1);
    }
}

/// Compiles whenever the compiler wants to, until this time.
fn run_until(rig: &mut Rig, until_ns: u64) -> Snapshot {
    let mut compilations = 0;
    while let Some(due_ns) = rig.compiler.next_due_ns().filter(|due_ns| *due_ns <= until_ns) {
        rig.now_ns = rig.now_ns.max(due_ns);
        rig.compile();
        compilations += 1;
        assert!(compilations < 1000, "the compiler is due all the time");
    }
    rig.now_ns = until_ns;
    rig.compile()
}

#[test]
fn a_service_refused_for_want_of_targets_is_tried_again_as_they_become_free() {
    let (mut rig, _) = rig(LIMIT);
    rig.put(of("a", "large", 100, 1, 0..40));
    rig.put(of("a", "late", 101, 2, 0..30));
    let full = rig.compile();
    let (reason, message) = refusal(&full, "a", "late").expect("60 of 64 for one namespace");
    assert_eq!((reason, served(&full, "a", "late").len()), (Reason::Exhausted, 20));
    assert!(message.contains("namespace a has its share of the gateway's 64 targets (`limits.targets`)"), "{message}");
    let held = full.target_use();
    assert_eq!((held.limit, held.listed, held.refused_services), (LIMIT, 60, 1));

    // Nobody changes the waiting Service, and no other one later.
    rig.state.services.remove(&ServiceName::new("a", "large"));
    let now_ns = rig.now_ns;
    let later = run_until(&mut rig, now_ns + 310 * SECOND_NS);
    assert_eq!((served(&later, "a", "late").len(), refusal(&later, "a", "late")), (30, None));
    assert_eq!((later.target_use().listed, later.target_use().refused_services), (30, 0));
    assert_eq!(rig.compiler.next_due_ns(), None, "nothing waits any longer");
}

#[test]
fn targets_that_no_flow_used_do_not_rest_and_others_do() {
    let (mut rig, counters) = rig(LIMIT);
    rig.put(of("a", "web", 100, 1, 0..40));
    let snapshot = rig.compile();
    for n in 1..=10 {
        use_backend(&snapshot, &counters, &format!("10.1.0.{n}:80"));
    }
    rig.state.services.remove(&ServiceName::new("a", "web"));
    rig.now_ns += SECOND_NS;
    let draining = rig.compile();
    assert_eq!((draining.target_use().listed, draining.target_use().draining), (0, 40));
    rig.now_ns += 301 * SECOND_NS;
    let drained = rig.compile();
    assert_eq!((drained.target_use().draining, drained.target_use().resting), (0, 10), "ten were used");
    rig.now_ns += 121 * SECOND_NS;
    assert_eq!(rig.compile().target_use().resting, 0);
}

#[test]
fn a_second_replacement_of_all_backends_ends_drains_without_flows() {
    let (mut rig, counters) = rig(LIMIT);
    rig.put(of("a", "web", 100, 1, 0..40));
    let snapshot = rig.compile();
    let busy = "10.1.0.1:80";
    let (slot, _) = (0..200)
        .find_map(|s| Some((s, snapshot.backends.in_slot(s)?)))
        .filter(|(_, b)| b.address == busy.parse().unwrap())
        .unwrap();
    counters.at(CounterSlot::new(slot, FrontendNumber::new(1))).flows.add(1);
    for round in 2..6 {
        rig.now_ns += 2 * SECOND_NS;
        rig.put(of("a", "web", 100, round, 0..40));
        let snapshot = rig.compile();
        let listed = served(&snapshot, "a", "web");
        assert_eq!((listed.len(), refusal(&snapshot, "a", "web")), (40, None), "round {round}");
        assert!(snapshot.removed().keys().any(|b| b.address == busy.parse().unwrap()), "its flow goes on in round {round}");
        let held = snapshot.target_use();
        assert!(held.listed + held.draining + held.resting <= LIMIT, "{held:?}");
    }
}

#[test]
fn the_replacement_of_a_backend_in_use_is_never_refused_for_lack_of_room() {
    let (mut rig, counters) = rig(LIMIT);
    for (n, namespace) in (0u8..).zip(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]) {
        rig.put(of(namespace, "greedy", 110 + n, 10 + n, 0..60));
    }
    rig.put(of("tenant", "web", 100, 1, 0..1));
    let mut snapshot = rig.compile();
    assert_eq!(served(&snapshot, "tenant", "web").len(), 1);
    // Those that want more and find nothing left.
    let total = |held: TargetUse| held.listed + held.draining + held.resting;
    assert!(total(snapshot.target_use()) >= LIMIT - 2, "{:?}", snapshot.target_use());
    for round in 1..20 {
        let old = served(&snapshot, "tenant", "web")[0];
        use_backend(&snapshot, &counters, &old.to_string());
        rig.now_ns += SECOND_NS / 10;
        rig.put(of("tenant", "web", 100, 1, round..round + 1));
        snapshot = rig.compile();
        let new = served(&snapshot, "tenant", "web");
        assert!(new.len() == 1 && new[0] != old, "round {round}: {new:?} {:?}", snapshot.target_use());
        assert!(total(snapshot.target_use()) <= LIMIT);
    }
}

#[test]
fn one_namespace_does_not_take_the_targets_of_others() {
    let (mut rig, _) = rig(LIMIT);
    for n in 0..23 {
        rig.put(of("evil", &format!("s{n}"), 110 + n, 10 + n, 0..60));
    }
    let snapshot = rig.compile();
    assert!(snapshot.target_use().listed <= LIMIT - LIMIT / 16, "{:?}", snapshot.target_use());
    rig.now_ns += SECOND_NS;
    rig.put(of("tenant", "web", 100, 1, 0..1));
    assert_eq!(served(&rig.compile(), "tenant", "web").len(), 1);
    // It makes no difference that it comes and goes.
    for round in 0..5 {
        rig.now_ns += SECOND_NS;
        for n in 0..23 {
            rig.put(of("evil", &format!("s{n}"), 110 + n, 40 + n + 23 * round, 0..60));
        }
        rig.put(of("tenant", "web", 100, 1, u32::from(round + 1)..u32::from(round + 2)));
        assert_eq!(served(&rig.compile(), "tenant", "web").len(), 1, "round {round}");
    }
}

#[test]
fn a_returning_target_keeps_its_slot_while_it_rests_and_takes_no_second_place() {
    let (mut rig, counters) = rig(LIMIT);
    rig.put(of("a", "web", 100, 1, 0..1));
    let snapshot = rig.compile();
    use_backend(&snapshot, &counters, "10.1.0.1:80");
    let target = |snapshot: &Snapshot| snapshot.backends.all().map(|(_, backend)| backend.target).next().unwrap();
    let before = target(&snapshot);
    rig.state.services.clear();
    rig.compile();
    rig.now_ns += 301 * SECOND_NS;
    assert_eq!(rig.compile().target_use().resting, 1);
    rig.put(of("b", "other", 100, 1, 0..1));
    let after = rig.compile();
    assert_eq!((target(&after), after.target_use().resting, after.target_use().listed), (before, 0, 1));
}

/// Addresses on the link are next hops of their own. Nothing changes in the network.
#[test]
fn next_hops_of_backends_that_are_gone_are_forgotten() {
    let (mut rig, _) = rig(LIMIT);
    let mut next_hops = 0;
    for round in 0..100 {
        let addresses: Vec<String> = (0..40).map(|n| format!("[fd00::{round}:{n}]:80")).collect();
        rig.put(service("web", "2001:db8::1:5", &addresses.iter().map(String::as_str).collect::<Vec<_>>()));
        rig.now_ns += 400 * SECOND_NS;
        next_hops = rig.compile().routes.next_hops.len();
    }
    assert!(next_hops <= 2048, "{next_hops} for 80 backends");
}

#[test]
fn a_raised_limit_lets_waiting_services_in() {
    let (mut rig, _) = rig(LIMIT);
    rig.put(of("a", "web", 100, 1, 0..100));
    assert_eq!(served(&rig.compile(), "a", "web").len(), 60);
    let tunables = Tunables { targets_max: 256, ..rig.compiler.config.tunables() };
    rig.compiler.tune(&tunables);
    rig.now_ns += SECOND_NS;
    assert_eq!(served(&rig.compile(), "a", "web").len(), 100);
}

#[test]
fn places_are_counted_again_after_a_panic() {
    let (mut rig, _) = rig(LIMIT);
    rig.put(of("a", "web", 100, 1, 0..40));
    rig.compile();
    rig.compiler.is_whole = false;
    rig.now_ns += SECOND_NS;
    let held = rig.compile().target_use();
    assert_eq!((held.listed, held.draining, held.resting), (40, 0, 0));
    rig.put(of("a", "more", 101, 2, 0..30));
    assert_eq!(served(&rig.compile(), "a", "more").len(), 20);
}

/// An eighth of 4,792 Services of 10 or 11 endpoints, and of the room for them.
#[test]
fn many_services_whose_backends_are_replaced_again_and_again_are_all_served() {
    let (mut rig, _) = rig(131_072 / 8);
    let mut address = 0;
    for round in 0..5 {
        for n in 0..599_u16 {
            let count = 10 + u32::from(n % 2);
            let mut one = of(&format!("n{}", n % 60), &format!("s{n}"), 100, 0, 0..0);
            one.ports[0].port = 1000 + n;
            let addresses = (address..address + count).map(|n| format!("10.{}.{}.{}:80", 1 + (n >> 16), n >> 8 & 255, n & 255));
            one.ports[0].backends = addresses.map(|address| backend(&address)).collect();
            address += count;
            rig.put(one);
        }
        rig.now_ns += 10 * SECOND_NS;
        let snapshot = rig.compile();
        assert_eq!(snapshot.refused(), [], "round {round}: {:?}", snapshot.target_use());
        let held = snapshot.target_use();
        assert_eq!(held.listed, 599 * 10 + 299);
        assert!(held.listed + held.draining + held.resting <= held.limit, "{held:?}");
    }
}
