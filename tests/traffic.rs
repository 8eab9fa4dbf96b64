//! Traffic of a production edge, by real programs through `sluiced`: DNS queries, downloads over a link with a small
//! MTU, hairpin connections, and connections that survive changes of a router.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use std::collections::BTreeSet;
use std::fs;

use edge::{Edge, REQUEST_S, ServiceManifest, until};

const VIP: &str = "http://192.0.2.100/";
const VIP_V6: &str = "http://[2001:db8::1:0]/";
/// VIP of the Service that a test creates.
const ADDRESS: &str = "192.0.2.110";

#[test]
fn dns_queries_work_over_udp_and_tcp() {
    let Some(mut edge) = Edge::with_af_packet("dig over UDP and TCP", "dig") else { return };
    let _servers = ["b11", "b12", "b13"].map(|n| edge.start_script(n, "dns_server.py", &["5353", n]));
    edge.write_manifest(
        "dns.yaml",
        &ServiceManifest { protocols: &["UDP", "TCP"], port: 53, target_port: 5353, ..ServiceManifest::default() }.yaml(),
    );
    edge.start();
    let dig = |transport: &str| {
        let at = format!("@{ADDRESS}");
        let output = edge.run("client", &["dig", &at, "+short", "+tries=1", "+time=20", transport, "who.example", "TXT"]);
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().trim_matches('"').to_owned())
    };
    for transport in ["+notcp", "+tcp"] {
        until("the first answer", || dig(transport));
        let servers: BTreeSet<_> = (0..40).map(|n| dig(transport).unwrap_or_else(|| panic!("{transport}: query {n}"))).collect();
        assert_eq!(servers, ["b11", "b12", "b13"].map(str::to_owned).into(), "{transport}");
    }
    edge.assert_account();
}

#[test]
fn ipv6_vips_are_reachable_behind_a_switch_with_mld_snooping() {
    let Some(mut edge) = Edge::new("a switch that snoops MLD", "mld") else { return };
    // The switch sends MLD queries, and forwards packets for a group only to ports that reported membership.
    edge.script(
        "set -e; ip netns add $id-snoop; in_ns snoop sysctl -qw net.ipv6.conf.default.accept_dad=0
         in_ns snoop ip link add switch type bridge mcast_snooping 1 mcast_querier 1 mcast_query_response_interval 100
         in_ns snoop ip link set switch up
         cable client eth1 snoop client; cable gw uplink1 snoop gw
         for port in client gw; do in_ns snoop ip link set $port master switch; done
         in_ns client ip addr flush dev eth0; in_ns client ip link set eth0 down
         in_ns client ip addr add 192.0.2.10/24 dev eth1; in_ns client ip -6 addr add 2001:db8::10/64 dev eth1 nodad",
    );
    edge.configure("net_af_packet0,iface=uplink1", "net_af_packet1,iface=cluster0", "");
    edge.write_demo_manifests();
    edge.start();
    let memberships = || String::from_utf8_lossy(&edge.run("snoop", &["bridge", "mdb", "show"]).stdout).into_owned();
    until("the switch knows the membership in the group of the VIP", || {
        memberships().lines().any(|line| line.contains("port gw grp ff02::1:ff01:0 ")).then_some(())
    });
    until("an answer over IPv6", || edge.curl(VIP_V6));
    edge.assert_all_servers_answer(VIP_V6);
    fs::remove_file(edge.path("manifests/web.yaml")).unwrap();
    until("the membership ends with the Service", || (!memberships().contains("ff02::1:ff01:0")).then_some(()));
    edge.assert_account();
}

#[test]
fn a_server_reaches_its_own_vip() {
    let Some(mut edge) = Edge::with_af_packet("hairpin", "hai") else { return };
    edge.write_demo_manifests();
    edge.script("in_ns b12 ip route add 192.0.2.0/24 via 10.0.0.2; in_ns b12 ip -6 route add 2001:db8::/64 via fd00::2");
    edge.start();
    for url in [VIP, VIP_V6] {
        let ask = || {
            let output = edge.run("b12", &["curl", "-sg", "--max-time", REQUEST_S, url]);
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        until("the first answer", ask);
        let servers: BTreeSet<_> = (0..60).map(|n| ask().unwrap_or_else(|| panic!("{url}: request {n}"))).collect();
        assert_eq!(servers.len(), 3, "{url}: every server, including itself: {servers:?}");
    }
    edge.assert_account();
}

#[test]
fn a_download_passes_a_link_with_a_small_mtu() {
    let Some(mut edge) = Edge::with_af_packet("a path MTU of 1,300", "mtu") else { return };
    edge.script(". tests/edge/router.sh; make_router 1500");
    // Only the router's end of the link has a small MTU: the client announces a segment size that does not fit it.
    edge.script("in_ns router ip link set inside mtu 1300");
    edge.write_demo_manifests();
    let size = 5_000_000;
    for n in [11, 12, 13] {
        fs::write(edge.path(&format!("b{n}/big")), vec![b'x'; size]).unwrap();
    }
    edge.start();
    edge.script(". tests/edge/router.sh; route_to_router 192.0.2.1 2001:db8::1");
    for url in [VIP, VIP_V6] {
        until("the first answer", || edge.curl(url));
        let big = format!("{url}big");
        let output = edge.run("client", &["curl", "-sg", "--max-time", "100", "-o", "/dev/null", "-w", "%{size_download}", &big]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), size.to_string(), "{url}: {:?}", edge.drops());
    }
    edge.assert_account();
}

#[test]
fn two_hundred_connections_survive_a_new_mac_and_a_new_address_of_the_router() {
    let Some(mut edge) = Edge::with_af_packet("a router that moves", "rou") else { return };
    edge.script(". tests/edge/router.sh; make_router 1500");
    for server in ["b11", "b12", "b13"] {
        edge.echo_server(server, 9000);
    }
    edge.write_manifest("echo.yaml", &ServiceManifest::default().yaml());
    edge.start();
    edge.script(". tests/edge/router.sh; route_to_router 192.0.2.1 2001:db8::1");
    let address = format!("{ADDRESS}:90");
    until("the first connection", || edge.connect(&address));
    let mut connections: Vec<_> = (0..200).map(|n| edge.connect(&address).unwrap_or_else(|| panic!("connection {n}"))).collect();
    let moves = [
        ("before any change", "true"),
        (
            "after the router's MAC address changed",
            "in_ns router ip link set outside address 02:00:00:00:0e:01; in_ns router arping -q -A -c 2 -I outside 192.0.2.1",
        ),
        (
            "after the router's IP address changed",
            "in_ns router ip addr add 192.0.2.3/24 dev outside; in_ns router ip addr del 192.0.2.1/24 dev outside
             . tests/edge/router.sh; route_to_router 192.0.2.3 2001:db8::1
             in_ns router ip addr add 192.0.2.3/24 dev outside 2>/dev/null || true",
        ),
    ];
    for (what, code) in moves {
        edge.script(code);
        connections.iter_mut().for_each(|connection| connection.assert_alive(what));
    }
    edge.assert_account();
}

#[test]
fn sctp_associations_reach_every_server() {
    let Some(mut edge) = Edge::with_af_packet("SCTP", "sct") else { return };
    let servers = ["b11", "b12", "b13"];
    let _ends = servers.map(|n| edge.start_script(n, "sctp_peer.py", &["serve", "0.0.0.0", "9000", n]));
    edge.write_manifest("sctp.yaml", &ServiceManifest { protocols: &["SCTP"], ..ServiceManifest::default() }.yaml());
    edge.start();
    let ask = |port: &str, count: &str| {
        let script = format!("{}/tests/edge/sctp_peer.py", env!("CARGO_MANIFEST_DIR"));
        let output = edge.run("client", &["/usr/bin/python3", &script, "ask", ADDRESS, port, count]);
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    until("the first answer", || Some(ask("90", "1")).filter(|lines| lines[0].ends_with("hello 0")));
    let answers = ask("90", "40");
    for (n, answer) in answers.iter().enumerate() {
        assert!(answer.ends_with(&format!(" hello {n}")), "association {n}: {answer}; {:?}", edge.drops());
    }
    let seen: BTreeSet<_> = answers.iter().filter_map(|answer| answer.split(' ').next()).collect();
    assert_eq!(seen, servers.into(), "{answers:?}");
    assert_eq!(ask("91", "1"), ["refused"], "a closed port is answered by ABORT");
    edge.assert_account();
}
