//! Hotplug, link flaps, deleted twins, bonds, and multipath routes, while the gateway keeps running.

#![allow(clippy::panic, clippy::unwrap_used)]

mod edge;

use std::time::Instant;

use edge::{Edge, REQUEST_S, until};

const VIP: &str = "http://192.0.2.100/";

fn link(edge: &Edge, port: &str) -> Option<String> {
    edge.ports()?.into_iter().find(|p| p.name == port).map(|p| p.link)
}

fn until_link(edge: &Edge, port: &str, expected: &str) {
    until(&format!("{port} is {expected}"), || link(edge, port).filter(|found| found == expected));
}

fn carrier(edge: &Edge, twin: &str) -> String {
    let shown = edge.run("gw", &["cat", &format!("/sys/class/net/{twin}/carrier")]);
    String::from_utf8_lossy(&shown.stdout).trim().to_owned()
}

/// Renames an interface. Its device disappears under another name, and reappears under the configured one.
fn rename(edge: &Edge, from: &str, to: &str) {
    edge.script(&format!(
        "set -e; in_ns gw ip link set {from} down; in_ns gw ip link set {from} name {to}; in_ns gw ip link set {to} up"
    ));
}

#[test]
fn a_device_that_appears_late_or_reappears_is_used_without_a_restart() {
    let Some(mut edge) = Edge::with_af_packet("ports that come and go", "late") else { return };
    edge.write_demo_manifests();
    rename(&edge, "cluster0", "elsewhere0");
    edge.start();
    until_link(&edge, "uplink", "up");
    until_link(&edge, "cluster", "absent");
    assert_eq!(carrier(&edge, "cluster"), "0", "the twin exists, without carrier");
    until("unreachable backends are unhealthy", || edge.healthy("demo/web").filter(|healthy| *healthy == 0));

    for round in 0..2 {
        rename(&edge, "elsewhere0", "cluster0");
        until_link(&edge, "cluster", "up");
        until("the carrier", || (carrier(&edge, "cluster") == "1").then_some(()));
        until("all backends pass their probes", || edge.service("web").filter(|web| web.healthy == web.backends));
        until("an answer", || edge.curl(VIP));
        edge.assert_all_servers_answer(VIP);
        if round == 0 {
            rename(&edge, "cluster0", "elsewhere0");
            until_link(&edge, "cluster", "absent");
        }
    }
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let filters = edge.run("gw", &["tc", "filter", "show", "dev", "cluster0", "ingress"]);
    assert!(filters.stdout.is_empty(), "the filter of the late device is removed, too");
}

#[test]
fn the_carrier_of_the_twin_follows_a_flapping_link_and_traffic_resumes() {
    let Some(mut edge) = Edge::with_af_packet("a link that flaps", "flap") else { return };
    edge.write_demo_manifests();
    edge.start();
    until("an answer", || edge.curl(VIP));
    for _ in 0..3 {
        edge.script("in_ns gw ip link set uplink0 down");
        until_link(&edge, "uplink", "down");
        until("no carrier", || (carrier(&edge, "uplink") == "0").then_some(()));
        edge.script("in_ns gw ip link set uplink0 up");
        until_link(&edge, "uplink", "up");
        until("the carrier", || (carrier(&edge, "uplink") == "1").then_some(()));
        until("an answer", || edge.curl(VIP));
    }
    edge.assert_all_servers_answer(VIP);
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_deleted_twin_is_recreated_and_the_other_port_is_supervised_meanwhile() {
    let Some(mut edge) = Edge::with_af_packet("a deleted twin", "twin") else { return };
    edge.write_demo_manifests();
    edge.start();
    until("an answer", || edge.curl(VIP));
    let pings = |edge: &Edge| edge.run("client", &["ping", "-c", "1", "-W", "1", "192.0.2.2"]).status.success().then_some(());
    for _ in 0..3 {
        edge.script("in_ns gw ip link del uplink");
        until("the twin answers again", || pings(&edge));
        until("the carrier", || (carrier(&edge, "uplink") == "1").then_some(()));
    }

    // Replace the twin by an interface that the gateway must not use.
    // The gateway may recreate its twin between the two commands; then they are repeated.
    let replace = "in_ns gw ip link del uplink 2>&1; in_ns gw ip link add uplink type bridge 2>&1 && echo replaced || true";
    until("the bridge exists", || edge.script(replace).contains("replaced").then_some(()));
    until("the conflict is logged", || edge.log().contains("interface uplink exists and was not made by sluice").then_some(()));
    edge.script("in_ns gw ip link set cluster0 down");
    until_link(&edge, "cluster", "down");
    until("no carrier", || (carrier(&edge, "cluster") == "0").then_some(()));
    edge.script("in_ns gw ip link set cluster0 up");
    until("the carrier", || (carrier(&edge, "cluster") == "1").then_some(()));
    edge.script("in_ns gw ip link del uplink");
    until("the twin answers again", || pings(&edge));
    until("an answer", || edge.curl(VIP));
    assert_eq!(edge.status().unwrap().tasks.iter().map(|task| task.restarts).sum::<u64>(), 0, "no task has failed");
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

/// Number of frames that a router received on its link to the gateway.
fn routed_by(edge: &Edge, router: &str) -> u64 {
    let shown = edge.run(router, &["cat", "/sys/class/net/eth0/statistics/rx_packets"]);
    String::from_utf8_lossy(&shown.stdout).trim().parse().unwrap()
}

#[test]
fn replies_spread_over_two_routers_and_use_one_when_the_other_is_gone() {
    let Some(mut edge) = Edge::with_af_packet("a multipath route by two routers", "ecmp") else { return };
    edge.write_demo_manifests();
    // Move the client behind two routers. A switch takes its place between them and the gateway.
    edge.script(
        "set -e
         for ns in r1 r2 far; do ip netns add $id-$ns; in_ns $ns ip link set lo up; done
         in_ns client ip addr flush dev eth0
         in_ns client ip link add lan type bridge; in_ns client ip link set lan up; in_ns client ip link set eth0 master lan
         for n in 1 2; do
           cable r$n eth0 client r$n; in_ns client ip link set r$n master lan
           cable r$n eth1 far r$n
           in_ns r$n ip addr add 192.0.2.6$n/24 dev eth0; in_ns r$n ip addr add 198.51.10$n.1/24 dev eth1
           in_ns r$n sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.eth0.rp_filter=0 net.ipv4.conf.eth1.rp_filter=0
           in_ns far ip addr add 198.51.10$n.2/24 dev r$n
           in_ns r$n ip route add 203.0.113.0/24 via 198.51.10$n.2
         done
         in_ns far sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.r1.rp_filter=0 net.ipv4.conf.r2.rp_filter=0
         for n in $(seq 1 40); do in_ns far ip addr add 203.0.113.$n/32 dev lo; done
         in_ns far ip route add default via 198.51.101.1",
    );
    edge.start();
    edge.script("in_ns gw ip route add 203.0.113.0/24 nexthop via 192.0.2.61 dev uplink nexthop via 192.0.2.62 dev uplink");
    let ask = |n: u32| {
        let from = format!("203.0.113.{}", n % 40 + 1);
        let output = edge.run("far", &["curl", "-s", "--max-time", REQUEST_S, "--interface", &from, VIP]);
        output.status.success()
    };
    until("an answer", || ask(0).then_some(()));
    // Requests arrive through the first router. The second receives only replies, of about half of the flows once its
    // Ethernet address is known.
    until("the second router carries replies, too", || {
        let before = routed_by(&edge, "r2");
        for n in 0..40 {
            assert!(ask(n), "request {n}: {:?}", edge.drops());
        }
        (routed_by(&edge, "r2") - before >= 20).then_some(())
    });
    // Linux needs most of a minute to notice. Without the entry it sends an ARP request at once, which fails.
    edge.script("set -e; in_ns r2 ip link set eth0 down; in_ns gw ip neigh del 192.0.2.62 dev uplink");
    until("the first router alone carries all", || (0..20).all(ask).then_some(()));
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_bond_switches_to_its_other_member_when_the_active_one_loses_its_link() {
    let Some(mut edge) = Edge::new("a bond of two taps", "bond") else { return };
    edge.write_demo_manifests();
    let bond = "net_bonding0,mode=1,slave=(net_tap1,iface=dtap1),slave=(net_tap2,iface=dtap2)";
    edge.configure(bond, "net_af_packet1,iface=cluster0", "");
    edge.script(
        "set -e; in_ns gw ip link add br0 type bridge; in_ns gw ip link set br0 up; in_ns gw ip link set uplink0 master br0",
    );
    edge.spawn();
    until("the taps", || edge.run("gw", &["ip", "link", "show", "dtap2"]).status.success().then_some(()));
    // The driver gives the tap of the active member the bond's MAC address. The bridge would then treat frames for
    // the bond as frames for itself.
    let others = "set -e; for n in 1 2; do in_ns gw ip link set dtap$n address 02:00:00:00:dd:0$n; done";
    until("the gateway serves", || edge.status().filter(|s| s.ready));
    edge.script(&format!("{others}; for n in 1 2; do in_ns gw ip link set dtap$n master br0; done"));
    until_link(&edge, "uplink", "up");
    until("an answer", || edge.curl(VIP));
    edge.assert_all_servers_answer(VIP);

    for (round, (down, up)) in [("dtap1", "dtap2"), ("dtap2", "dtap1"), ("dtap1", "dtap2")].into_iter().enumerate() {
        edge.script(&format!("in_ns gw ip link set {up} up"));
        let start = Instant::now();
        edge.script(&format!("in_ns gw ip link set {down} down"));
        until("the other member is active", || {
            (edge.log().matches("the bond changed its active member").count() == round + 1).then_some(())
        });
        edge.script(others);
        until("an answer through the other member", || edge.curl(VIP));
        println!("{up} took over after {:?}", start.elapsed());
        assert_eq!(link(&edge, "uplink").as_deref(), Some("up"), "the bond has a link");
        edge.assert_all_servers_answer(VIP);
    }
    edge.script("in_ns gw ip link set dtap2 down");
    until_link(&edge, "uplink", "down");
    edge.script("in_ns gw ip link set dtap2 up");
    until_link(&edge, "uplink", "up");
    until("an answer", || {
        edge.script(others);
        edge.curl(VIP)
    });
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn an_802_3ad_bond_negotiates_with_its_partner_and_keeps_working_with_one_member() {
    let Some(mut edge) = Edge::new("a bond of two taps with a partner", "lacp") else { return };
    edge.write_demo_manifests();
    let bond = "net_bonding0,mode=4,slave=(net_tap1,iface=dtap1),slave=(net_tap2,iface=dtap2)";
    edge.configure(bond, "net_af_packet1,iface=cluster0", "");
    edge.script(
        "set -e; in_ns gw ip link add br0 type bridge; in_ns gw ip link set br0 up; in_ns gw ip link set uplink0 master br0",
    );
    edge.start();
    // The driver gives the taps the bond's MAC address. The bridge would then treat frames for the bond as frames for
    // itself.
    let others = "set -e; for n in 1 2; do in_ns gw ip link set dtap$n address 02:00:00:00:dd:0$n; done";
    edge.script(&format!("{others}; for n in 1 2; do in_ns gw ip link set dtap$n master br0; done"));
    let mut partner = edge.start_script("gw", "lacp.py", &["dtap1", "dtap2"]);
    let mut agreed = [partner.line(), partner.line()];
    agreed.sort();
    assert_eq!(agreed, ["in sync dtap1", "in sync dtap2"]);
    until_link(&edge, "uplink", "up");
    until("an answer", || edge.curl(VIP));
    edge.assert_all_servers_answer(VIP);
    edge.script("in_ns gw ip link set dtap1 down");
    until("an answer through the other member", || {
        edge.script(others);
        edge.curl(VIP)
    });
    edge.assert_all_servers_answer(VIP);
    edge.assert_account();
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

/// A device whose driver waits without limit when it opens it: net_pcap reads from a FIFO that nobody writes.
fn device_that_hangs(edge: &Edge) -> (std::path::PathBuf, String) {
    let (fifo, sent) = (edge.path("received.pcap"), edge.path("sent.pcap"));
    edge.script(&format!("mkfifo {}", fifo.display()));
    let device = format!("net_pcap0,rx_pcap={},tx_pcap={}", fifo.display(), sent.display());
    (fifo, device)
}

#[test]
fn a_device_whose_driver_hangs_fails_alone_and_is_used_once_the_driver_returns() {
    let Some(mut edge) = Edge::new("a device whose driver hangs", "hangs") else { return };
    edge.write_demo_manifests();
    let (fifo, device) = device_that_hangs(&edge);
    edge.configure(&device, "net_af_packet1,iface=cluster0", "");
    edge.spawn();
    until_link(&edge, "uplink", "failed");
    until_link(&edge, "cluster", "up");
    let uplink = edge.ports().unwrap().into_iter().find(|port| port.name == "uplink").unwrap();
    assert!(uplink.reason.contains("did not open it within"), "{}", uplink.reason);
    assert!(edge.log().contains("opening the port's device"), "{}", edge.log());
    until("the backends are reached by the other port", || edge.service("web").filter(|web| web.healthy == web.backends));

    // The header of a capture without packets.
    let header = [0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 1, 0, 0, 0];
    std::fs::write(fifo, header).unwrap();
    until_link(&edge, "uplink", "up");
    let reason = edge.ports().unwrap().into_iter().find(|port| port.name == "uplink").map(|port| port.reason);
    assert_eq!(reason.as_deref(), Some(""), "{}", edge.log());
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}

#[test]
fn a_gateway_stops_although_a_driver_hangs() {
    let Some(mut edge) = Edge::new("stopping while a driver hangs", "hangstop") else { return };
    edge.write_demo_manifests();
    let (_fifo, device) = device_that_hangs(&edge);
    edge.configure(&device, "net_af_packet1,iface=cluster0", "");
    // While the start waits for the driver.
    edge.spawn();
    until("the driver is called", || edge.log().contains("opening the port's device").then_some(()));
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    assert!(!edge.log().contains("the gateway runs"), "{}", edge.log());
    // And once it runs without the port.
    edge.spawn();
    until_link(&edge, "uplink", "failed");
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
}
