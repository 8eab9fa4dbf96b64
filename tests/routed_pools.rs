//! VIPs of `routed` pools: routes in a Linux routing table, which a routing daemon redistributes.

#![allow(clippy::panic, clippy::unwrap_used, clippy::expect_used)]

mod edge;

use std::fs;

use edge::{Edge, until};
use rustix::process::Signal;

const VIP: &str = "http://192.0.2.100/";

/// Routes in table 150 with this protocol number, of both families, each as `ip route` shows it.
fn shown(edge: &Edge, protocol: &str) -> Vec<String> {
    let show = |family: &str| {
        let output = edge.run("gw", &["ip", family, "route", "show", "table", "150", "proto", protocol]);
        String::from_utf8_lossy(&output.stdout).lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>()
    };
    [show("-4"), show("-6")].concat()
}

/// Their destinations.
fn routes(edge: &Edge, protocol: &str) -> Vec<String> {
    let destination = |line: &String| line.trim_start_matches("blackhole ").split_whitespace().next().map(str::to_owned);
    shown(edge, protocol).iter().filter_map(destination).collect()
}

/// A gateway with routed VIPs and the lines `more` in its configuration; not started.
fn routed(test: &str, name: &str, more: &str) -> Option<Edge> {
    let edge = Edge::with_echo_servers(test, name, 9000)?;
    edge.configure_af_packet(more);
    let file = edge.path("sluice.yaml");
    let text = fs::read_to_string(&file).unwrap().replace("{name: default, ", "{name: default, announce: routed, ");
    fs::write(&file, text).unwrap();
    edge.script("set -e; in_ns client ip route add 192.0.2.100/32 via 192.0.2.2");
    edge.write_manifest("web.yaml", &include_str!("edge/web.yaml").replace("8080", "9000"));
    Some(edge)
}

#[test]
fn on_stop_routes_are_withdrawn_first_and_packets_are_forwarded_until_the_drain_ends_or_a_second_signal() {
    let Some(mut edge) = routed("stopping a gateway with routed VIPs", "leave", "drainOnStop: 1h") else { return };
    edge.start();
    until("the VIPs are in the table", || (routes(&edge, "150").len() == 2).then_some(()));
    let mut before = until("a connection", || edge.connect("192.0.2.100:80"));
    edge.signal(Signal::TERM);
    let all_have = |text: &str| {
        let routes = shown(&edge, "150");
        (routes.len() == 2 && routes.iter().all(|route| route.contains(text))).then_some(())
    };
    until("routers are asked to prefer other gateways", || all_have("metric 65535"));
    until("the routes are gone", || routes(&edge, "150").is_empty().then_some(()));
    for _ in 0..20 {
        before.assert_alive("while routers withdraw the routes");
        edge.connect("192.0.2.100:80").expect("a new connection succeeds, too");
    }
    assert!(edge.is_running(), "{}", edge.log());
    edge.signal(Signal::TERM);
    assert_eq!(edge.wait_for_exit(), Some(1), "{}", edge.log());

    let text = fs::read_to_string(edge.path("sluice.yaml")).unwrap().replace("drainOnStop: 1h", "drainOnStop: 300ms");
    fs::write(edge.path("sluice.yaml"), text).unwrap();
    edge.start();
    until("the VIPs are in the table", || (routes(&edge, "150").len() == 2).then_some(()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let log = edge.log();
    assert!(log.contains("packets that still arrive are forwarded") && log.contains("the drain is over"), "{log}");
}

#[test]
fn a_vip_of_a_routed_pool_is_in_the_table_while_it_is_served_and_gets_no_arp_replies() {
    let Some(mut edge) = Edge::new("routed pools", "routed") else { return };
    edge.configure_af_packet("drainOnStop: 100ms");
    let file = edge.path("sluice.yaml");
    let text = fs::read_to_string(&file).unwrap().replace("{name: default, ", "{name: default, announce: routed, ");
    fs::write(&file, text).unwrap();
    // A route that a crashed gateway left, and one of another program.
    edge.script("set -e; in_ns gw ip route add blackhole 192.0.2.119 table 150 proto 150; in_ns gw ip route add blackhole 192.0.2.118 table 150 proto 99");
    edge.write_demo_manifests();
    edge.start();
    let expected = ["192.0.2.100", "2001:db8::1:0"];
    until("exactly the VIPs are in the table", || (routes(&edge, "150") == expected).then_some(()));
    assert_eq!(routes(&edge, "99"), ["192.0.2.118"]);

    let ping = edge.run("client", &["ping", "-c", "1", "-W", "1", "192.0.2.100"]);
    assert!(!ping.status.success(), "no ARP reply for a routed VIP");
    edge.script("set -e; in_ns client ip route add 192.0.2.100/32 via 192.0.2.2");
    until("an answer over the route", || edge.curl(VIP));
    edge.assert_all_servers_answer(VIP);

    fs::remove_file(edge.path("manifests/web.yaml")).unwrap();
    until("the routes are withdrawn with the Service", || routes(&edge, "150").is_empty().then_some(()));
    edge.write_demo_manifests();
    until("the routes return with the Service", || (routes(&edge, "150") == expected).then_some(()));
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert!(routes(&edge, "150").is_empty(), "the routes are withdrawn when the gateway stops");
}

#[test]
fn routes_vanish_with_the_process_and_outlive_only_a_planned_restart() {
    let Some(mut edge) = routed("routes of a gateway that is killed", "killed", "drainOnStop: 100ms") else { return };
    let through = |edge: &Edge, text: &str| {
        let routes = shown(edge, "150");
        (routes.len() == 2 && routes.iter().all(|route| route.contains(text))).then_some(())
    };
    edge.start();
    until("the routes are those of this process", || through(&edge, "dev vips-150"));
    edge.stop(true);
    until("Linux removes them with the process", || shown(&edge, "150").is_empty().then_some(()));
    assert!(!edge.run("gw", &["ip", "link", "show", "vips-150"]).status.success());

    edge.start();
    until("the routes of the next process", || through(&edge, "dev vips-150"));
    edge.signal(Signal::USR2);
    assert_eq!(edge.wait_for_exit(), Some(0), "{}", edge.log());
    assert_eq!(through(&edge, "blackhole"), Some(()), "{:?}", shown(&edge, "150"));
    edge.start();
    until("the next process has replaced them by its own", || through(&edge, "dev vips-150"));

    edge.script("in_ns gw ip link del vips-150");
    until("an interface that was removed is created again", || through(&edge, "dev vips-150"));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert!(shown(&edge, "150").is_empty());
}

#[test]
fn a_vip_without_endpoints_has_no_route_unless_it_is_kept() {
    let keep = "announce: {withoutBackends: keep}\ndrainOnStop: 100ms";
    for (more, stays) in [("drainOnStop: 100ms", false), (keep, true)] {
        let Some(mut edge) = routed("VIPs without backends", "empty", more) else { return };
        edge.start();
        until("the VIPs are in the table", || (routes(&edge, "150").len() == 2).then_some(()));
        let text = include_str!("edge/web.yaml").replace("8080", "9000");
        let documents: Vec<&str> = text.split("---\n").filter(|document| !document.contains("kind: EndpointSlice")).collect();
        edge.write_manifest("web.yaml", &documents.join("---\n"));
        let has_none = |edge: &Edge| edge.service("web").filter(|service| service.backends == 0).map(drop);
        until("the Service has no backends", || has_none(&edge));
        if stays {
            assert_eq!(routes(&edge, "150").len(), 2);
        } else {
            until("the routes are withdrawn", || routes(&edge, "150").is_empty().then_some(()));
            edge.write_manifest("web.yaml", &text);
            until("the routes return with the backends", || (routes(&edge, "150").len() == 2).then_some(()));
        }
    }
}

#[test]
fn vips_of_a_pool_with_an_aggregation_length_share_a_route() {
    let Some(mut edge) = routed("aggregated routes", "aggregate", "drainOnStop: 20s") else { return };
    let file = edge.path("sluice.yaml");
    let set_bgp = |bgp: &str| {
        let pool = |line: &str| match line.strip_prefix("pools: ") {
            Some(_) => format!(
                "pools: [{{name: default, announce: routed, addresses: [192.0.2.96/27, \"2001:db8::1:0/112\"], bgp: {bgp}}}]\n"
            ),
            None => format!("{line}\n"),
        };
        fs::write(&file, fs::read_to_string(&file).unwrap().lines().map(pool).collect::<String>()).unwrap();
    };
    let put = |edge: &Edge, name: &str, addresses: &str| {
        let annotations = format!("name: {name}, annotations: {{sluice.dev/addresses: \"{addresses}\"}}}}\nspec:");
        let text = include_str!("edge/web.yaml").replace("name: web}\nspec:", &annotations);
        let text = text
            .replace("service-name: web}", &format!("service-name: {name}}}"))
            .replace("name: web-", &format!("name: {name}-"));
        edge.write_manifest(&format!("{name}.yaml"), &text.replace("8080", "9000"));
    };
    set_bgp("{aggregationLength: 28, aggregationLengthV6: 112}");
    put(&edge, "web", "192.0.2.100,2001:db8::1:7");
    put(&edge, "second", "192.0.2.101,2001:db8::1:8");
    edge.start();
    let aggregates = ["192.0.2.96/28", "2001:db8::1:0/112"];
    let expect = |edge: &Edge, what: &str, wanted: &[&str]| {
        until(what, || (routes(edge, "150") == wanted).then_some(()));
    };
    expect(&edge, "exactly the aggregates are in the table", &aggregates);
    until("an answer over the aggregate", || edge.connect("192.0.2.100:80"));

    fs::remove_file(edge.path("manifests/second.yaml")).unwrap();
    until("the other Service is gone", || edge.service("second").is_none().then_some(()));
    assert_eq!(routes(&edge, "150"), aggregates, "they stand while one of their VIPs does");

    set_bgp("{aggregationLength: 27}");
    edge.reload().unwrap();
    expect(&edge, "other lengths are in effect", &["192.0.2.96/27", "2001:db8::1:7"]);
    set_bgp("{aggregationLength: 24}");
    let refused = edge.reload().unwrap_err();
    assert!(refused.contains("pools[0].bgp.aggregationLength") && refused.contains("outside of 192.0.2.96-"), "{refused}");
    set_bgp("{aggregationLength: 28, aggregationLengthV6: 112}");
    edge.reload().unwrap();
    expect(&edge, "the aggregates are back", &aggregates);

    edge.stop(true);
    expect(&edge, "Linux removes them with the process", &[]);
    edge.start();
    expect(&edge, "the aggregates of the next process", &aggregates);
    fs::remove_file(edge.path("manifests/web.yaml")).unwrap();
    expect(&edge, "they go with their last VIP", &[]);
    put(&edge, "web", "192.0.2.100,2001:db8::1:7");
    expect(&edge, "they return with the first", &aggregates);
    edge.signal(Signal::TERM);
    until("a drain demotes them", || {
        let shown = shown(&edge, "150");
        (shown.len() == 2 && shown.iter().all(|route| route.contains("metric 65535"))).then_some(())
    });
    expect(&edge, "a drain withdraws them", &[]);
    edge.signal(Signal::TERM);
    edge.wait_for_exit();
}
