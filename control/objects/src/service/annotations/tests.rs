//! Reading of annotations.

use proto::{AffinityScope, Mode, Probe, Target};

use super::*;

fn read(pairs: &[(&str, &str)]) -> Result<ServiceSpec, SpecError> {
    super::read(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(), None)
}

fn aws(name: &str) -> String {
    format!("service.beta.kubernetes.io/aws-load-balancer-{name}")
}

fn ranges_of(key: &str, value: &str) -> Result<Option<Vec<IpNet>>, SpecError> {
    annotated_source_ranges(&[(key.to_owned(), value.to_owned())].into())
}

#[test]
fn no_annotations_request_nothing() {
    assert_eq!(read(&[("example.com/other", "x")]), Ok(ServiceSpec::default()));
}

#[test]
fn our_annotation_wins_over_an_alias_and_the_difference_is_noted() {
    let wishes =
        read(&[("metallb.universe.tf/loadBalancerIPs", "192.0.2.9"), ("sluice.dev/addresses", "192.0.2.8, 2001:db8::8")]);
    let wishes = wishes.unwrap();
    assert_eq!(wishes.addresses, ["192.0.2.8".parse::<IpAddr>().unwrap(), "2001:db8::8".parse().unwrap()]);
    assert_eq!(wishes.notes.len(), 1, "{:?}", wishes.notes);
}

#[test]
fn an_internal_load_balancer_is_requested_by_our_values_and_those_of_aws_only() {
    let aws = |name: &str, value: &str| read(&[(&aws(name), value)]).map(|wishes| wishes.internal);
    let rows = [("scheme", "internal", true), ("scheme", "internet-facing", false), ("internal", "true", true)];
    for (name, value, expected) in rows.into_iter().chain([("internal", "0.0.0.0/0", true), ("internal", "false", false)]) {
        assert_eq!(aws(name, value), Ok(expected), "{name}: {value}");
    }
    let error = aws("scheme", "intern").unwrap_err().to_string();
    assert!(error.contains("aws-load-balancer-scheme") && error.contains("expected internal or internet-facing"), "{error}");
}

#[test]
fn an_exchange_of_the_address_is_requested_by_true() {
    assert!(read(&[("sluice.dev/readdress", "true")]).unwrap().readdress);
    let wishes = read(&[("sluice.dev/readdress", "yes")]).unwrap();
    assert!(!wishes.readdress && wishes.notes.len() == 1, "{:?}", wishes.notes);
}

#[test]
fn every_alias_of_an_address_request_is_read() {
    let keys = [
        "metallb.io/loadBalancerIPs",
        "metallb.universe.tf/loadBalancerIPs",
        "lbipam.cilium.io/ips",
        "io.cilium/lb-ipam-ips",
        "kube-vip.io/loadbalancerIPs",
    ];
    for key in keys {
        assert_eq!(read(&[(key, "192.0.2.9")]).unwrap().addresses, ["192.0.2.9".parse::<IpAddr>().unwrap()], "{key}");
    }
    assert_eq!(read(&[("metallb.io/address-pool", "edge")]).unwrap().pool.as_deref(), Some("edge"));
}

#[test]
fn every_annotation_of_others_that_counts_as_read_is() {
    for key in foreign::READ {
        let is_read = |value| read(&[(key, value)]) != Ok(ServiceSpec::default());
        assert!(is_read("false") || is_read("true") || ranges_of(key, "192.0.2.0/24") != Ok(None), "{key}");
    }
}

#[test]
fn sharing_is_read_from_our_annotations_or_those_of_others() {
    let shares = |pairs: &[(&str, &str)]| {
        let wishes = read(pairs).unwrap();
        let sharing = wishes.sharing.map(|sharing| (sharing.key, sharing.is_metallb, sharing.namespaces));
        (sharing, wishes.notes.len())
    };
    let named = |names: &[&str]| Namespaces::Named(names.iter().map(|name| (*name).to_owned()).collect());
    let of = |is_metallb, namespaces| Some(("k".to_owned(), is_metallb, namespaces));
    let rows: [(&[(&str, &str)], _); 8] = [
        (&[("sluice.dev/sharing-key", " k ")], (of(false, named(&[])), 0)),
        (&[("metallb.io/allow-shared-ip", "k")], (of(true, named(&[])), 0)),
        (&[("metallb.universe.tf/allow-shared-ip", "k")], (of(true, named(&[])), 0)),
        (
            &[("lbipam.cilium.io/sharing-key", "k"), ("lbipam.cilium.io/sharing-cross-namespace", "*")],
            (of(false, Namespaces::All), 0),
        ),
        (&[("sluice.dev/sharing-key", "k"), ("metallb.io/allow-shared-ip", "l")], (of(false, named(&[])), 1)),
        (&[("sluice.dev/sharing-key", "k"), ("sluice.dev/sharing-namespaces", "b, a")], (of(false, named(&["a", "b"])), 0)),
        (&[("sluice.dev/sharing-key", "k"), ("sluice.dev/sharing-namespaces", "A_b")], (of(false, named(&[])), 1)),
        (&[("sluice.dev/sharing-namespaces", "*")], (None, 1)),
    ];
    for (pairs, expected) in rows {
        assert_eq!(shares(pairs), expected, "{pairs:?}");
    }
    let long = "k".repeat(SHARING_KEY_CHARS_MAX + 1);
    assert_eq!(shares(&[("sluice.dev/sharing-key", &long)]), (None, 1));
}

#[test]
fn mode_target_and_scheduler_are_read_by_our_names_and_those_of_ipvs() {
    let wishes = read(&[("sluice.dev/mode", " dsr"), ("sluice.dev/target", "Node"), ("sluice.dev/scheduler", "wlc")]).unwrap();
    let expected = (Some(Mode::Dsr), Some(Target::Node), Some(Scheduler::LeastConnections));
    assert_eq!((wishes.mode, wishes.target, wishes.scheduler), expected);
    for known in Scheduler::ALL {
        assert_eq!(read(&[("sluice.dev/scheduler", known.as_str())]).unwrap().scheduler, Some(*known));
    }
}

#[test]
fn an_invalid_value_that_decides_who_may_connect_is_an_error() {
    let rows = [(SOURCE_RANGES, "10.0.0.0/8,"), (SOURCE_RANGES, "10.0.0.0/8,10.0.0.300/32")];
    for (key, value) in rows {
        let error = read(&[(key, value)]).err().or_else(|| ranges_of(key, value).err()).unwrap();
        assert!(error.to_string().contains(key), "{error}");
        assert_eq!(error.refusal().reason, proto::Reason::Refused);
    }
}

#[test]
fn source_ranges_of_the_annotation_are_trimmed_and_an_empty_one_is_ignored() {
    let ranges = ranges_of(SOURCE_RANGES, " 10.1.2.3/8 ,2001:db8::/32").unwrap().unwrap();
    assert_eq!(ranges, ["10.0.0.0/8".parse::<IpNet>().unwrap(), "2001:db8::/32".parse().unwrap()]);
    assert_eq!(ranges_of(SOURCE_RANGES, " "), Ok(None));
}

#[test]
fn the_scope_of_session_affinity_is_read() {
    for (value, scope) in [("port", AffinityScope::Port), (" Service ", AffinityScope::Service)] {
        let read = read(&[("sluice.dev/session-affinity-scope", value)]).unwrap();
        assert_eq!((read.affinity_scope, read.notes), (Some(scope), vec![]), "{value}");
    }
}

#[test]
fn an_idle_timeout_is_read_in_our_units_and_in_seconds() {
    for (key, value) in
        [("sluice.dev/idle-timeout", "1h"), ("service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout", "3600")]
    {
        assert_eq!(read(&[(key, value)]).unwrap().idle_timeout, Some(Duration::from_secs(3600)), "{key}");
    }
}

#[test]
fn a_health_check_is_read_in_our_units_and_in_seconds() {
    let wishes = read(&[
        ("sluice.dev/health-check", "tcp"),
        ("sluice.dev/health-check-interval", "2s"),
        ("sluice.dev/health-check-port", "9000"),
        ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-timeout", "3"),
        ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold", "4"),
        ("sluice.dev/drain-timeout", "10m"),
    ])
    .unwrap();
    let expected = HealthSpec {
        probe: Some(Probe::Tcp),
        port: Some(9000),
        interval: Some(Duration::from_secs(2)),
        timeout: Some(Duration::from_secs(3)),
        fall: Some(4),
        ..HealthSpec::default()
    };
    assert_eq!((wishes.health, wishes.drain_timeout), (expected, Some(Duration::from_secs(600))));
}

#[test]
fn what_a_probe_requests_is_read_from_our_annotations_and_those_of_aws() {
    let expected = HealthSpec {
        probe: Some(Probe::Https),
        path: Some("/healthz?full=1".to_owned()),
        status: Some("200-299,404".parse().unwrap()),
        ..HealthSpec::default()
    };
    let ours = [("", "https"), ("-path", "/healthz?full=1"), ("-status", "200-299,404")];
    let ours = ours.map(|(name, value)| (format!("sluice.dev/health-check{name}"), value.to_owned()));
    assert_eq!(super::read(&ours.into(), None).unwrap().health, expected);
    let theirs = [("protocol", "HTTPS"), ("path", "/healthz?full=1"), ("success-codes", "200-299,404")];
    let theirs = theirs.map(|(name, value)| (aws(&format!("healthcheck-{name}")), value.to_owned()));
    assert_eq!(super::read(&theirs.into(), None).unwrap().health, expected);
    let more = read(&[("sluice.dev/health-check-host", "shop.example:8443"), ("sluice.dev/health-check-tls-verify", "True")]);
    let more = more.unwrap();
    assert_eq!((more.health.host.as_deref(), more.health.tls_verify), (Some("shop.example:8443"), Some(true)));
    for probe in Probe::ALL {
        assert_eq!(read(&[("sluice.dev/health-check", probe.as_str())]).unwrap().health.probe, Some(*probe));
    }
}

#[test]
fn settings_without_effect_on_a_probe_are_named() {
    let keys = ["path", "host", "status", "tls-verify", "port"];
    let all = keys.iter().zip(["/a", "b", "200", "true", "80"]);
    let all = all.map(|(key, value)| (format!("sluice.dev/health-check-{key}"), value.to_owned())).collect();
    let health = super::read(&all, None).unwrap().health;
    let rows: [(Probe, &[&str]); 6] = [
        (Probe::Tcp, &["path", "host", "status", "tls-verify"]),
        (Probe::Http, &["tls-verify"]),
        (Probe::Https, &[]),
        (Probe::Grpc, &["status", "tls-verify"]),
        (Probe::Icmp, &keys),
        (Probe::None, &keys),
    ];
    for (probe, expected) in rows {
        let named: Vec<_> = health.remarks(probe).map(|remark| remark.text).collect();
        assert_eq!(named.len(), expected.len(), "{named:?}");
        assert!(named.iter().zip(expected).all(|(text, name)| text.contains(&format!("health-check-{name} "))), "{named:?}");
    }
}

#[test]
fn an_invalid_value_of_a_harmless_setting_is_noted_and_recorded_as_unread() {
    for (key, value, what) in [
        ("sluice.dev/addresses", "192.0.2.300", Some(Unread::Addresses)),
        ("sluice.dev/addresses", "192.0.2.1,192.0.2.2,192.0.2.3", Some(Unread::Addresses)),
        ("sluice.dev/health-check", "telepathy", Some(Unread::Probe)),
        ("service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol", "UDP", Some(Unread::Probe)),
        ("sluice.dev/health-check-path", "/a b", Some(Unread::HealthPath)),
        ("sluice.dev/health-check-path", "/\u{e4}", Some(Unread::HealthPath)),
        ("sluice.dev/health-check-host", "a/b", Some(Unread::HealthHost)),
        ("sluice.dev/health-check-status", "2xx", Some(Unread::HealthStatus)),
        ("sluice.dev/health-check-tls-verify", "maybe", Some(Unread::TlsVerify)),
        ("sluice.dev/health-check-interval", "1ms", Some(Unread::Interval)),
        ("sluice.dev/health-check-rise", "0", Some(Unread::Rise)),
        ("sluice.dev/health-check-port", "70000", Some(Unread::HealthPort)),
        ("sluice.dev/drain-timeout", "soon", Some(Unread::DrainTimeout)),
        ("sluice.dev/mode", "teleport", Some(Unread::Mode)),
        ("sluice.dev/target", "moon", Some(Unread::Target)),
        ("sluice.dev/ip-mode", "hostname", Some(Unread::IpMode)),
        ("sluice.dev/scheduler", "dice", Some(Unread::Scheduler)),
        ("sluice.dev/idle-timeout", "0s", Some(Unread::IdleTimeout)),
        ("sluice.dev/session-affinity-scope", "node", Some(Unread::AffinityScope)),
        ("sluice.dev/adresses", "192.0.2.1", None),
    ] {
        let wishes = read(&[(key, value)]).unwrap();
        assert_eq!(wishes.notes.len(), 1, "{key}: {:?}", wishes.notes);
        assert!(wishes.notes[0].text.contains(key), "{:?}", wishes.notes);
        let words = ["mode", "target", "scheduler", "ip-mode", "session-affinity-scope", "health-check"]
            .map(|name| format!("sluice.dev/{name}"));
        let refusal = wishes.refused_if_new.as_ref().map(ToString::to_string);
        assert_eq!(refusal.is_some_and(|text| text.contains(value)), words.contains(&key.to_owned()), "{key}");
        let (notes, unread, unread_request) = (wishes.notes.clone(), what.into_iter().collect(), wishes.unread_request.clone());
        assert_eq!(unread_request.is_some(), what == Some(Unread::Addresses), "{key}: {unread_request:?}");
        let refused_if_new = wishes.refused_if_new.clone();
        assert_eq!(wishes, ServiceSpec { notes, unread, unread_request, refused_if_new, ..ServiceSpec::default() });
    }
}

#[test]
fn an_unknown_annotation_has_the_most_similar_known_one_in_its_note() {
    for (key, advice) in [
        ("mod", "did you mean sluice.dev/mode?"),
        ("helth-check", "did you mean sluice.dev/health-check?"),
        ("colour", "check its spelling"),
    ] {
        let notes = read(&[(&format!("sluice.dev/{key}"), "nat")]).unwrap().notes;
        assert_eq!(notes[0].text, format!("annotation sluice.dev/{key} is unknown and has no effect; {advice}"));
    }
}

#[test]
fn an_address_by_dhcp_is_one_of_a_pool() {
    let wishes = read(&[("kube-vip.io/loadbalancerIPs", "0.0.0.0")]).unwrap();
    assert_eq!((wishes.addresses.len(), wishes.unread.len(), wishes.notes.len()), (0, 0, 1));
}

#[test]
fn a_value_of_256_kib_is_truncated_in_messages_so_that_the_advice_fits() {
    let long = "x".repeat(256 * 1024);
    for key in ["addresses", "address-pool", "sharing-key", "sharing-namespaces", "scheduler", "health-check", "idle-timeout"] {
        let wishes = read(&[(&format!("sluice.dev/{key}"), &long)]).unwrap();
        assert!(
            wishes.notes[0].text.len() < 400 && [STAYS, WAITS].iter().any(|end| wishes.notes[0].text.ends_with(end)),
            "{key}: {:?}",
            wishes.notes
        );
        assert!(wishes.pool.is_none() && wishes.sharing.is_none());
    }
    let refused = read(&[("sluice.dev/mode", &long)]).unwrap().refused_if_new.unwrap().to_string();
    assert!(refused.len() < 400 && refused.ends_with("gue"), "{refused}");
    let differing = read(&[("sluice.dev/addresses", "192.0.2.1"), ("metallb.io/loadBalancerIPs", &long)]).unwrap();
    assert!(differing.notes[0].text.len() < 400, "{:?}", differing.notes);
}

#[test]
fn of_ten_thousand_unknown_annotations_a_few_are_named() {
    let many = (0..10_000).map(|number| (format!("sluice.dev/x-{number}"), String::new())).collect();
    let notes = super::read(&many, None).unwrap().notes;
    assert!(notes.len() == REMARKS_MAX && notes.last().unwrap().text.contains("9985"), "{notes:?}");
}

#[test]
fn messages_give_limits_of_durations_in_the_units_of_the_annotation() {
    let text = read(&[("sluice.dev/drain-timeout", "25h")]).unwrap().notes[0].text.clone();
    assert!(text.contains("from 0ms to 24h"), "{text}");
}

/// Our annotation and the alias of AWS, with these values.
fn beside_aws(name: &str, ours: &str, aws_name: &str, theirs: &str) -> ServiceSpec {
    read(&[(&format!("{ANNOTATION_PREFIX}{name}"), ours), (&aws(aws_name), theirs)]).unwrap()
}

#[test]
fn annotations_differ_if_they_mean_something_else_however_they_are_written() {
    let rows = [
        ("health-check", "http", "healthcheck-protocol", "HTTP", false),
        ("health-check", "http", "healthcheck-protocol", "TCP", true),
        ("health-check", "http", "healthcheck-protocol", "UDP", true),
        ("health-check-interval", "5s", "healthcheck-interval", "5", false),
        ("health-check-interval", "5s", "healthcheck-interval", "6", true),
        ("health-check-timeout", "3000ms", "healthcheck-timeout", " 3 ", false),
        ("health-check-timeout", "3s", "healthcheck-timeout", "", false),
        ("health-check-port", "080", "healthcheck-port", "80", false),
        ("health-check-status", "200-299", "healthcheck-success-codes", "200-299,404", true),
        ("idle-timeout", "1h", "connection-idle-timeout", "3600", false),
        ("drain-timeout", "1m", "connection-draining-timeout", "60", false),
        ("drain-timeout", "1m", "connection-draining-timeout", "30", true),
        ("drain-timeout", "1m", "connection-draining-enabled", "false", true),
        ("drain-timeout", "0s", "connection-draining-enabled", "False", false),
        ("drain-timeout", "1m", "connection-draining-enabled", "true", false),
    ];
    for (name, ours, aws_name, theirs, expected) in rows {
        let notes = beside_aws(name, ours, aws_name, theirs).notes;
        let causes: Vec<_> = notes.iter().map(|note| note.cause).collect();
        assert_eq!(
            causes,
            vec![Cause::AnnotationsDiffer; usize::from(expected)],
            "{name} {ours}, {aws_name} {theirs}: {notes:?}"
        );
    }
    for (theirs, expected) in [("192.0.2.8,2001:db8::8", 0), ("2001:DB8:0::8, 192.0.2.8", 0), ("192.0.2.8", 1)] {
        let pairs = [("sluice.dev/addresses", "192.0.2.8, 2001:db8::8"), ("metallb.io/loadBalancerIPs", theirs)];
        assert_eq!(read(&pairs).unwrap().notes.len(), expected, "{theirs}");
    }
}

#[test]
fn an_empty_duration_of_ours_hides_no_alias() {
    let spec = beside_aws("drain-timeout", "", "connection-draining-timeout", "30");
    assert_eq!((spec.drain_timeout, spec.notes), (Some(Duration::from_secs(30)), Vec::new()));
    let spec = beside_aws("health-check-timeout", " ", "healthcheck-timeout", "3");
    assert_eq!((spec.health.timeout, spec.notes), (Some(Duration::from_secs(3)), Vec::new()));
    let spec = beside_aws("drain-timeout", "", "connection-draining-enabled", "false");
    assert_eq!((spec.drain_timeout, spec.notes), (Some(Duration::ZERO), Vec::new()));
}

#[test]
fn without_draining_the_timeout_of_aws_counts_for_nothing() {
    let spec = read(&[(&aws("connection-draining-enabled"), "false"), (&aws("connection-draining-timeout"), "30")]).unwrap();
    assert_eq!((spec.drain_timeout, spec.notes), (Some(Duration::ZERO), Vec::new()));
}
