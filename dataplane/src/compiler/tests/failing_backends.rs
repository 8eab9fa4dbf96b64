//! Tests of backends that fail their probes: which take new flows, and how long their flows go on.

use proto::Probe;

use super::*;

#[test]
fn failing_backends_get_no_new_flows_until_all_fail() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    let before = chosen(&rig.compile(), "192.0.2.100", 80);
    rig.health.failing.insert((Protocol::Tcp, TWO[0].parse().unwrap()));
    let snapshot = rig.compile();
    assert_eq!(addresses(&chosen(&snapshot, "192.0.2.100", 80)), TWO[1..]);
    let failing = snapshot.backend(before[&TWO[0].parse().unwrap()]).unwrap();
    assert!(!failing.accepts_new && !failing.removed, "its flows go on");
    rig.health.failing.insert((Protocol::Tcp, TWO[1].parse().unwrap()));
    let snapshot = rig.compile();
    assert_eq!(addresses(&chosen(&snapshot, "192.0.2.100", 80)), TWO, "fail open");
    let problems = ["default/web tcp 80: every IPv4 backend (2) fails its probes; all are used (fail open)"];
    assert_eq!(snapshot.problems(), problems);
    assert_eq!(rig.compile().problems(), problems, "also while nothing changes");
    rig.change("web", |service| service.health.fail_open = false);
    let snapshot = rig.compile();
    assert!(chosen(&snapshot, "192.0.2.100", 80).is_empty() && snapshot.problems().is_empty());
    rig.change("web", |service| service.health.probe = Probe::None);
    assert_eq!(
        addresses(&chosen(&rig.compile(), "192.0.2.100", 80)),
        TWO,
        "a service without a probe ignores the probes of others"
    );
    rig.health.failing.clear();
    assert_eq!(chosen(&rig.compile(), "192.0.2.100", 80), before);
}

#[test]
fn flows_of_a_failing_backend_end_after_the_drain_timeout_unless_it_returns_or_all_fail() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    let [one, two] = TWO.map(|text| (Protocol::Tcp, text.parse().unwrap()));
    let ids = chosen(&rig.compile(), "192.0.2.100", 80);
    let id = ids[&one.1];
    let at = |rig: &mut Rig, seconds: u64, failing: &[(Protocol, std::net::SocketAddr)]| {
        rig.now_ns = seconds * SECOND_NS;
        rig.health.failing = failing.iter().copied().collect();
        rig.compile()
    };
    let goes_on = |snapshot: &Snapshot| snapshot.backend(id).is_some();
    assert!(goes_on(&at(&mut rig, 1, &[one])));
    assert_eq!(rig.compiler.next_due_ns(), Some(301 * SECOND_NS));
    assert!(goes_on(&at(&mut rig, 200, &[])), "it returned in time");
    assert_eq!(rig.compiler.next_due_ns(), None);
    assert!(goes_on(&at(&mut rig, 201, &[one])) && goes_on(&at(&mut rig, 400, &[one, two])));
    assert_eq!(rig.compiler.next_due_ns(), None, "all fail, and all are used");
    assert!(goes_on(&at(&mut rig, 900, &[one, two])) && goes_on(&at(&mut rig, 901, &[one])));
    assert_eq!(rig.compiler.next_due_ns(), Some(1201 * SECOND_NS), "from when the other is used instead");
    assert!(goes_on(&at(&mut rig, 1200, &[one])));
    let snapshot = at(&mut rig, 1201, &[one]);
    assert!(!goes_on(&snapshot) && snapshot.backend(ids[&two.1]).is_some());
    let shown = &view(&snapshot, 0).ports[0].backends[0];
    assert_eq!((shown.address, shown.healthy, shown.id.slot), (one.1, false, id.slot), "it is still listed");
    assert_eq!(rig.compiler.next_due_ns(), None);
    assert_eq!(at(&mut rig, 5000, &[one]).backend(shown.id).map(|backend| backend.address), Some(one.1), "once only");
    let returned = chosen(&at(&mut rig, 6000, &[]), "192.0.2.100", 80);
    assert_eq!(addresses(&returned), TWO, "it takes flows again");
    rig.change("web", |service| (service.health.fail_open, service.drain_timeout) = (false, Duration::ZERO));
    let snapshot = at(&mut rig, 7000, &[one, two]);
    assert!(returned.values().all(|id| snapshot.backend(*id).is_none()), "no drain, and no fail open");
}

#[test]
fn replies_of_a_failing_backend_of_dnat_begin_no_flow_after_its_drain() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    rig.change("web", |service| service.mode = Mode::Dnat);
    rig.health.failing = [(Protocol::Tcp, TWO[0].parse().unwrap())].into();
    let front = |snapshot: &Snapshot| snapshot.dnat_frontend(v4("10.0.0.11"), 6, 8080).map(|front| front.is_some());
    assert_eq!(front(&rig.compile()), Some(true));
    rig.now_ns += 300 * SECOND_NS;
    assert_eq!(front(&rig.compile()), Some(false));
    rig.health.failing.clear();
    assert_eq!(front(&rig.compile()), Some(true));
}

#[test]
fn a_backend_that_fails_for_one_service_stays_usable_for_others() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    rig.put(service("also", "192.0.2.101", &TWO));
    rig.change("web", |service| service.health.probe = Probe::None);
    rig.compile();
    let failing = [(Protocol::Tcp, TWO[0].parse().unwrap())];
    Arc::make_mut(&mut rig.health.failing_for).insert(ServiceName::new("default", "web"), failing.into());
    let snapshot = rig.compile();
    assert_eq!(addresses(&chosen(&snapshot, "192.0.2.100", 80)), TWO[1..]);
    assert_eq!(addresses(&chosen(&snapshot, "192.0.2.101", 80)), TWO);
    Arc::make_mut(&mut rig.health.failing_for).clear();
    assert_eq!(addresses(&chosen(&rig.compile(), "192.0.2.100", 80)), TWO);
}

#[test]
fn where_backends_are_unhealthy_at_first_each_is_used_once_it_has_passed_a_probe() {
    let mut rig = Rig::new();
    rig.put(service("web", "192.0.2.100", &TWO));
    rig.change("web", |service| service.health.initial = proto::InitialHealth::Unhealthy);
    assert_eq!(addresses(&chosen(&rig.compile(), "192.0.2.100", 80)), TWO, "fail open");
    rig.change("web", |service| service.health.fail_open = false);
    assert!(chosen(&rig.compile(), "192.0.2.100", 80).is_empty());
    let proven = (Protocol::Tcp, TWO[1].parse().unwrap());
    Arc::make_mut(&mut rig.health.proven_for).insert(ServiceName::new("default", "other"), [proven].into());
    assert!(chosen(&rig.compile(), "192.0.2.100", 80).is_empty(), "of another service");
    Arc::make_mut(&mut rig.health.proven_for).insert(ServiceName::new("default", "web"), [proven].into());
    assert_eq!(addresses(&chosen(&rig.compile(), "192.0.2.100", 80)), TWO[1..]);
    Arc::make_mut(&mut rig.health.failing_for).insert(ServiceName::new("default", "web"), [proven].into());
    assert!(chosen(&rig.compile(), "192.0.2.100", 80).is_empty(), "it fails since");
    Arc::make_mut(&mut rig.health.failing_for).clear();
    rig.change("web", |service| service.health.probe = Probe::None);
    assert_eq!(addresses(&chosen(&rig.compile(), "192.0.2.100", 80)), TWO, "nothing is probed");
}
