//! Tests: each kind of trouble, by what is seen and the line that it gives.

use std::collections::BTreeMap;

use super::*;
use crate::v1;

const NOW_S: u64 = 1_800_000_000;

fn gateway() -> ObservedGateway {
    let account = v1::Account { flows: 10, flows_max: 1000, ..Default::default() };
    let status = v1::GetStatusResponse {
        gateway: "edge-1".into(),
        ready: true,
        controller_connected: true,
        accounts: vec![account],
        ..Default::default()
    };
    let port = v1::PortStatus { name: "uplink".into(), link: "up".into(), ..Default::default() };
    let session = v1::SessionStatus {
        protocol: "bgp".into(),
        peer: "192.0.2.1".into(),
        status: "up".into(),
        state: "Established".into(),
        ..Default::default()
    };
    let partner = v1::PartnerStatus { name: "edge-2".into(), in_sync: true, lag_ms: Some(3), ..Default::default() };
    ObservedGateway {
        status,
        ports: vec![port],
        fleet: v1::GatewayStatus { sessions: vec![session], partners: vec![partner], ..Default::default() },
        targets_held: 5,
        targets_limit: 100,
        recent: Recent { seconds: 60, busy_percent: vec![40], ..Recent::default() },
        ..ObservedGateway::default()
    }
}

fn group() -> ObservedGroup {
    let gateway = |name: &str| v1::GatewayStatus {
        name: name.into(),
        version: "0.1.0".into(),
        ready: true,
        generation: "1/4".into(),
        ..Default::default()
    };
    let vip = v1::VipStatus {
        vip: "192.0.2.100".into(),
        pool: "default".into(),
        announce: "l2".into(),
        group: Some(3),
        gateways: vec!["edge-1".into()],
        services: vec!["default/web".into()],
        ..Default::default()
    };
    let pool = v1::PoolStatus {
        name: "default".into(),
        total: "20".into(),
        used: "1".into(),
        available: "19".into(),
        ..Default::default()
    };
    ObservedGroup {
        starting: None,
        gateways: vec![gateway("edge-1"), gateway("edge-2")],
        silent: Vec::new(),
        vips: vec![vip],
        pools: vec![pool],
        newest: Some(4),
    }
}

/// A gateway and a group of which all is well.
fn well() -> Observed {
    let service =
        v1::ServiceStatus { namespace: "default".into(), name: "web".into(), backends: 3, healthy: 3, ..Default::default() };
    let certificate =
        ObservedCertificate { key: "controller.tls".into(), until_s: Some(i64::try_from(NOW_S).unwrap() + 86_400 * 90) };
    Observed {
        now_s: NOW_S,
        gateway: Some(gateway()),
        services: vec![service],
        unhealthy: Vec::new(),
        flapping: BTreeMap::new(),
        certificates: vec![certificate],
        group: Some(group()),
    }
}

/// What is found after a change, as `severity word object: cause`.
fn after(change: impl FnOnce(&mut Observed)) -> Vec<String> {
    let mut observed = well();
    change(&mut observed);
    let line = |trouble: Trouble| {
        let Facts { severity, word, .. } = trouble.kind.facts();
        format!("{} {word} {}: {}", severity.as_str(), trouble.object, trouble.cause)
    };
    find(&observed).into_iter().map(line).collect()
}

fn of_gateway(change: impl FnOnce(&mut ObservedGateway)) -> Vec<String> {
    after(|all| change(all.gateway.as_mut().unwrap()))
}

fn of_group(change: impl FnOnce(&mut ObservedGroup)) -> Vec<String> {
    after(|all| change(all.group.as_mut().unwrap()))
}

fn of_service(change: impl FnOnce(&mut v1::ServiceStatus)) -> Vec<String> {
    after(|all| change(&mut all.services[0]))
}

fn certificate(left_s: Option<i64>) -> Vec<String> {
    after(|all| all.certificates[0].until_s = left_s.map(|left_s| i64::try_from(NOW_S).unwrap() + left_s))
}

#[test]
fn nothing_is_found_where_all_is_well() {
    assert_eq!(after(|_| ()), Vec::<String>::new());
    assert_eq!(find(&Observed::default()), [], "nothing is known");
}

#[test]
fn troubles_of_a_gateway() {
    let grown = |reason: &str, packets| [(reason.to_owned(), packets)].into();
    let rows = [
        (of_gateway(|all| all.status.ready = false), "critical not-ready Gateway edge-1: no complete state has arrived"),
        (
            of_gateway(|all| all.status.state_expired = true),
            "critical state-expired Gateway edge-1: no controller has confirmed the state for longer than `maxStateAge`",
        ),
        (
            of_gateway(|all| all.status.controller_connected = false),
            "warning controller-away Gateway edge-1: no controller is connected: changes of Services and endpoints do not arrive",
        ),
        (of_gateway(|all| all.status.draining = true), "notice drained Gateway edge-1: it is drained"),
        (
            of_gateway(|all| all.status.accounts[0].stalled = true),
            "critical worker-stalled Worker 0: it has not polled its ports for 2 s or longer",
        ),
        (
            of_gateway(|all| all.status.accounts[0].flows = 901),
            "warning flow-table-nearly-full Worker 0: 901 of 1000 flows (`flows.maxPerWorker`)",
        ),
        (
            of_gateway(|all| all.recent.busy_percent = vec![40, 97]),
            "warning worker-busy Worker 1: it spends 97 % of its time on packets",
        ),
        (of_gateway(|all| all.ports[0].link = "down".into()), "critical port-down Port uplink: it has no link"),
        (
            of_gateway(|all| (all.ports[0].link, all.ports[0].reason) = ("failed".into(), "no driver".into())),
            "critical port-down Port uplink: it has failed: no driver",
        ),
        (
            of_gateway(|all| all.recent.missed = grown("uplink", 7)),
            "warning packets-missed Port uplink: 7 packets found its receive queue full within 60 s",
        ),
        (
            of_gateway(|all| all.recent.drops = grown("snat_exhausted", 1)),
            "critical snat-exhausted Drop reason snat_exhausted: 1 packet within 60 s",
        ),
        (
            of_gateway(|all| all.recent.drops = grown("no_route", 61)),
            "warning drops Drop reason no_route: 61 packets within 60 s",
        ),
        (
            of_gateway(|all| all.recent.failures = grown("probe", 1)),
            "warning task-fails Task probe: it failed 1 time within 60 s",
        ),
        (
            of_gateway(|all| all.targets_held = 76),
            "warning targets-scarce Gateway edge-1: 76 of 100 places for backends are held (`limits.targets`)",
        ),
        (
            of_gateway(|all| all.reload.failure = "f.yaml:3: unknown key".into()),
            "warning reload-failed Configuration: the last reload changed nothing: f.yaml:3: unknown key",
        ),
        (
            of_gateway(|all| all.reload.at_next_start = vec!["ports".into(), "workers".into()]),
            "warning restart-needed Configuration: these keys of the file are not in effect: ports, workers",
        ),
    ];
    for (found, expected) in rows {
        assert_eq!(found, [expected]);
    }
    for (reason, packets) in [("no_route", 60), ("unknown_vip", 1_000_000)] {
        assert_eq!(of_gateway(|all| all.recent.drops = grown(reason, packets)), Vec::<String>::new(), "{reason}");
    }
    let just_started = |packets| {
        let drops = grown("neighbour_unresolved", packets);
        of_gateway(|all| all.recent = Recent { seconds: 2, drops, ..Recent::default() })
    };
    assert_eq!(just_started(3), Vec::<String>::new(), "some drops of a start");
    assert_eq!(just_started(61), ["warning drops Drop reason neighbour_unresolved: 61 packets within 2 s"]);
}

#[test]
fn troubles_of_a_gateway_in_its_fleet() {
    let duplicate = || v1::DuplicateStatus { vip: "192.0.2.100".into(), station: "02:00:00:00:00:09".into() };
    let rows = [
        (
            of_gateway(|all| (all.fleet.sessions[0].status, all.fleet.sessions[0].state) = ("down".into(), "Active".into())),
            "warning session-down Session bgp 192.0.2.1: the routing daemon says: Active",
        ),
        (
            of_gateway(|all| all.fleet.duplicates = vec![duplicate()]),
            "critical vip-duplicate VIP 192.0.2.100: station 02:00:00:00:00:09 announces it, too",
        ),
        (
            of_gateway(|all| all.fleet.unfit = "no link".into()),
            "warning unfit Gateway edge-1: it leaves its VIPs to others: no link",
        ),
        (
            of_gateway(|all| all.recent.election_restarts = 1),
            "warning election-restarts Gateway edge-1: it gave up its VIPs 1 time within 60 s",
        ),
        (
            of_gateway(|all| (all.fleet.partners[0].in_sync, all.fleet.partners[0].lag_ms) = (false, None)),
            "warning partner-behind Partner edge-2: it lacks flows of this gateway: it is not reached",
        ),
    ];
    for (found, expected) in rows {
        assert_eq!(found, [expected]);
    }
    assert_eq!(of_gateway(|all| all.fleet.sessions[0].status = "disabled".into()), Vec::<String>::new());
}

#[test]
fn troubles_of_services() {
    let because = |reason: &'static str| {
        move |all: &mut v1::ServiceStatus| (all.reason, all.message) = (reason.to_owned(), "why".to_owned())
    };
    let rows = [
        (of_service(|all| all.healthy = 0), "critical no-healthy-backend Service default/web: all 3 backends are unhealthy"),
        (
            of_service(|all| (all.healthy, all.fails_open, all.reason) = (0, true, "NoHealthyBackend".into())),
            "critical fail-open Service default/web: all 3 backends are unhealthy",
        ),
        (of_service(|all| all.healthy = 2), "warning some-unhealthy Service default/web: 1 of 3 backends are unhealthy"),
        (
            of_service(|all| (all.backends, all.healthy) = (0, 0)),
            "warning no-endpoints Service default/web: it has no backend that takes new connections",
        ),
        (of_service(because("NoMatchingPort")), "warning no-endpoints Service default/web: NoMatchingPort: why"),
        (of_service(because("Exhausted")), "critical not-served Service default/web: Exhausted: why"),
        (
            of_service(because("SnatPortsShort: over 1075 new flows/s")),
            "warning limited Service default/web: SnatPortsShort: over 1075 new flows/s: why",
        ),
        (of_service(because("AnnotationIgnored")), "warning not-as-asked Service default/web: AnnotationIgnored: why"),
    ];
    for (found, expected) in rows {
        assert_eq!(found, [expected]);
    }
    let flapping = after(|all| all.flapping = [("tcp 10.0.0.1:80 of default/web".to_owned(), 7)].into());
    let expected = "warning backend-flaps Backend tcp 10.0.0.1:80 of default/web: its health changed 7 times within 10 minutes";
    assert_eq!(flapping, [expected]);
    let backend = |address: &str, reason: &str| v1::BackendStatus {
        service: "default/web".into(),
        address: address.into(),
        protocol: "tcp".into(),
        reason: reason.into(),
        ..Default::default()
    };
    let named = after(|all| {
        all.services[0].healthy = 0;
        let addresses = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"];
        all.unhealthy =
            addresses.map(|address| backend(address, "refused")).into_iter().chain([backend("10.0.0.9:80", "")]).collect();
        all.unhealthy[3].service = "default/other".into();
    });
    let expected = "critical no-healthy-backend Service default/web: all 3 backends are unhealthy: tcp 10.0.0.1:80: refused; \
        tcp 10.0.0.2:80: refused; +1";
    assert_eq!(named, [expected]);
    let once = after(|all| {
        all.services[0].healthy = 0;
        all.unhealthy =
            vec![backend("10.0.0.1:80", "tcp 10.0.0.1:80 refused"), backend("10.0.0.2:80", "tcp 10.0.0.2:8080 refused")];
    });
    assert!(once[0].ends_with(": tcp 10.0.0.1:80 refused; tcp 10.0.0.2:80: tcp 10.0.0.2:8080 refused"), "{once:?}");
}

#[test]
fn troubles_of_a_group() {
    let silent = || v1::Silent { gateway: "edge-2".into(), reason: "it gave no answer".into() };
    let rows = [
        (
            of_group(|all| {
                all.gateways[1] =
                    v1::GatewayStatus { name: "edge-2".into(), last_seen: "2026-01-31T12:00:00Z".into(), ..Default::default() };
            }),
            "critical gateway-away Gateway edge-2: it is not connected; last seen at 2026-01-31T12:00:00Z",
        ),
        (
            of_group(|all| all.gateways[1] = v1::GatewayStatus { name: "edge-2".into(), draining: true, ..Default::default() }),
            "notice drained Gateway edge-2: it is not connected; not seen in this controller's time",
        ),
        (of_group(|all| all.silent = vec![silent()]), "critical gateway-silent Gateway edge-2: it gave no answer"),
        (
            of_group(|all| all.gateways[1].ready = false),
            "critical gateway-not-ready Gateway edge-2: its workers have no complete state",
        ),
        (
            of_group(|all| all.gateways[0].generation = "1/3".into()),
            "warning gateway-behind Gateway edge-1: its workers do not forward by the newest state",
        ),
        (
            of_group(|all| all.vips[0].gateways.clear()),
            "critical vip-unowned VIP 192.0.2.100: no gateway answers for it; it serves default/web",
        ),
        (
            of_group(|all| all.vips[0].gateways.push("edge-2".into())),
            "critical vip-owned-twice VIP 192.0.2.100: edge-1, edge-2 answer for it at once; it serves default/web",
        ),
        (
            of_group(|all| (all.pools[0].used, all.pools[0].available) = ("20".into(), "0".into())),
            "notice pool-exhausted AddressPool default: of addresses 20 are in use, 0 are available",
        ),
        (
            of_group(|all| (all.pools[0].used, all.pools[0].available) = ("20 IPv4, 3 IPv6".into(), "0 IPv4, 9 IPv6".into())),
            "notice pool-exhausted AddressPool default: of addresses 20 IPv4, 3 IPv6 are in use, 0 IPv4, 9 IPv6 are available",
        ),
        (
            of_group(|all| all.pools[0].conflict = "it overlaps pool b".into()),
            "warning pool-conflict AddressPool default: it overlaps pool b",
        ),
        (
            of_group(|all| all.pools[0].unannounced_by = vec!["edge-1".into()]),
            "warning pool-unannounced AddressPool default: edge-1 cannot answer ARP and NDP for all of its addresses",
        ),
    ];
    for (found, expected) in rows {
        assert_eq!(found, [expected]);
    }
    let starting = of_group(|all| (all.starting, all.gateways, all.vips) = (Some("it reads".into()), vec![], vec![]));
    assert_eq!(starting, ["critical controller-starting Controller: it reads"]);
    let alone = of_group(|all| (all.gateways, all.vips) = (vec![], vec![]));
    assert_eq!(alone, ["critical no-gateway Controller: no gateway is connected to it"]);
    let routed = of_group(|all| {
        (all.vips[0].announce, all.vips[0].gateways) = ("routed".into(), vec!["edge-1".into(), "edge-2".into()]);
    });
    assert_eq!(routed, Vec::<String>::new(), "routers spread packets over both");
    let elsewhere = of_group(|all| {
        all.vips[0].gateways.push("edge-2".into());
        all.pools[0].unannounced_by = vec!["edge-2".into()];
    });
    assert!(elsewhere.len() == 1 && elsewhere[0].contains("pool-unannounced"), "it is on another link: {elsewhere:?}");
    let without_election =
        of_group(|all| (all.vips[0].group, all.vips[0].gateways) = (None, vec!["edge-1".into(), "edge-2".into()]));
    assert_eq!(without_election, Vec::<String>::new());
}

#[test]
fn troubles_of_certificates() {
    let rows = [
        (None, "critical certificate-unusable Certificates controller.tls: they cannot be read"),
        (Some(0), "critical certificate-expired Certificates controller.tls: one of them has expired: connections by them fail"),
        (Some(7200), "warning certificate-expires Certificates controller.tls: one of them expires in 2 h"),
        (Some(6 * 86_400), "warning certificate-expires Certificates controller.tls: one of them expires in 6 d"),
    ];
    for (left_s, expected) in rows {
        assert_eq!(certificate(left_s), [expected]);
    }
    assert_eq!(certificate(Some(8 * 86_400)), Vec::<String>::new());
}

#[test]
fn the_worst_comes_first_and_many_of_a_kind_are_cut() {
    let mut observed = well();
    observed.gateway.as_mut().unwrap().status.draining = true;
    observed.gateway.as_mut().unwrap().ports[0].link = "down".into();
    let service = |number| v1::ServiceStatus { name: format!("web-{number:03}"), backends: 2, healthy: 1, ..Default::default() };
    observed.services = (0..300).map(service).collect();
    let found = Memory::default().settle(find(&observed), NOW_S);
    assert_eq!(found.len(), 1 + OF_A_KIND_MAX + 1 + 1);
    assert!(found[0].kind == Kind::PortDown && found[1].object == "Service /web-000", "{found:?}");
    let others = &found[OF_A_KIND_MAX + 1];
    assert_eq!(
        (others.kind, others.object.as_str(), others.cause.as_str()),
        (Kind::SomeUnhealthy, OTHERS, "250 more, as those above")
    );
    assert_eq!(found[OF_A_KIND_MAX + 2].kind, Kind::Drained);
}

#[test]
fn a_trouble_that_moves_up_the_list_keeps_its_beginning_and_its_grace() {
    let trouble = |number: usize| Trouble {
        kind: Kind::NoEndpoints,
        object: format!("Service default/web-{number:03}"),
        cause: "none".into(),
        since_s: NOW_S + 100,
    };
    let dated = |trouble: Trouble, since_s| Trouble { since_s, ..trouble };
    let mut memory = Memory::default();
    let first: Vec<_> = (0..=OF_A_KIND_MAX).map(|number| dated(trouble(number), NOW_S)).collect();
    assert_eq!(memory.settle(first, NOW_S), [], "they have not lasted for their grace");
    let listed = memory.settle((1..=OF_A_KIND_MAX).map(trouble).collect(), NOW_S + 100);
    assert_eq!(listed.len(), OF_A_KIND_MAX, "all have lasted, also the last, which was not listed before");
    assert!(listed.iter().all(|trouble| trouble.since_s == NOW_S), "{listed:?}");
    // A new trouble at the head of the list is no reason that an older one is not listed.
    let all = memory.settle((0..=OF_A_KIND_MAX).map(trouble).collect(), NOW_S + 100);
    assert_eq!(all, listed, "the new one has not lasted for its grace");
    let all = memory.settle((0..OF_A_KIND_MAX + 2).map(trouble).collect(), NOW_S + 200);
    assert_eq!((all.len(), all[0].since_s, all[1].since_s), (OF_A_KIND_MAX + 1, NOW_S + 100, NOW_S));
    assert_eq!((all[OF_A_KIND_MAX].object.as_str(), all[OF_A_KIND_MAX].since_s), (OTHERS, NOW_S), "the oldest of the others");
}

#[test]
fn the_page_about_troubles_lists_every_kind_in_order() {
    let page = include_str!("../../../docs/reference/troubles.md");
    let rows: Vec<_> = page.lines().filter(|line| line.starts_with("| `")).collect();
    let expected = Kind::table().iter().map(|facts| {
        let after = if facts.grace_s == 0 { "at once".to_owned() } else { format!("{} s", facts.grace_s) };
        format!("| `{}` | {} | {after} |", facts.word, facts.severity.as_str())
    });
    assert!(expected.clone().zip(&rows).all(|(expected, row)| row.starts_with(&expected)), "{rows:#?}");
    assert_eq!(expected.count(), rows.len());
}

#[test]
fn every_kind_has_its_row() {
    for (place, facts) in Kind::table().iter().enumerate() {
        assert_eq!(facts.kind as usize, place, "{}", facts.word);
        assert!(!facts.remedy.is_empty() && !facts.word.contains(' '), "{}", facts.word);
    }
    let severities = Kind::table().iter().map(|facts| facts.severity);
    assert!(severities.is_sorted(), "the worst kinds stand first");
}

#[test]
fn a_trouble_keeps_its_beginning_until_it_ends_and_counts_after_its_grace() {
    let trouble = |kind, now_s: u64| Trouble { kind, object: "Gateway edge-1".into(), cause: now_s.to_string(), since_s: now_s };
    let mut memory = Memory::default();
    let mut at =
        |kind, now_s| memory.settle(vec![trouble(kind, now_s)], now_s).into_iter().map(|trouble| trouble.since_s).collect();
    let rows: Vec<(u64, Vec<u64>)> = vec![(100, vec![]), (109, vec![]), (110, vec![100]), (400, vec![100])];
    for (now_s, expected) in rows {
        let since: Vec<u64> = at(Kind::ControllerAway, now_s);
        assert_eq!(since, expected, "{now_s}");
    }
    let since: Vec<u64> = at(Kind::PortDown, 500);
    assert_eq!(since, [500], "a link that is lost counts at once");
    let since: Vec<u64> = at(Kind::ControllerAway, 510);
    assert_eq!(since, Vec::<u64>::new(), "it had ended");
}
