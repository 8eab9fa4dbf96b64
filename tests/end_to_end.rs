//! Real clients and servers through `sluiced`, over each DPDK driver that works without a NIC.

#![allow(clippy::panic)]

mod edge;

use edge::{Edge, REQUEST_S, until};

const VIP: &str = "http://192.0.2.100/";
const VIP_V6: &str = "http://[2001:db8::1:0]/";
const NODE_PORT: &str = "http://192.0.2.2:30080/";

/// Clients reach LoadBalancer and NodePort Services, and ping answers, over ports of any driver.
fn assert_all_served(edge: &Edge) {
    until("the gateway serves", || edge.status().filter(|s| s.ready));
    until("the first answer", || edge.curl(VIP));
    edge.assert_all_servers_answer(VIP);
    edge.assert_all_servers_answer(NODE_PORT);
    until("the first answer over IPv6", || edge.curl(VIP_V6));
    edge.assert_all_servers_answer(VIP_V6);
    for address in ["192.0.2.100", "192.0.2.2", "2001:db8::1:0", "2001:db8::2"] {
        let ping = edge.run("client", &["ping", "-c", "2", "-i", "0.2", "-W", "2", address]);
        assert!(ping.status.success(), "ping {address}: {}", String::from_utf8_lossy(&ping.stdout));
    }
    let closed = edge.run("client", &["curl", "-s", "--max-time", REQUEST_S, "http://192.0.2.100:81/"]);
    assert_eq!(closed.status.code(), Some(7), "a closed port refuses connections");
    edge.assert_account();
}

#[test]
fn over_af_packet_every_server_answers_in_both_families() {
    let Some(mut edge) = Edge::with_af_packet("end to end over af_packet", "afp") else { return };
    edge.write_demo_manifests();
    edge.spawn();
    assert_all_served(&edge);
    assert_eq!(edge.stop(false), Some(0), "{}", edge.log());
    let filters = edge.run("gw", &["tc", "filter", "show", "dev", "uplink0", "ingress"]);
    assert!(filters.stdout.is_empty(), "the filter is removed when the gateway stops");
}

#[test]
fn over_tap_every_server_answers_in_both_families() {
    let Some(mut edge) = Edge::new("end to end over tap", "tap") else { return };
    edge.configure("net_tap0,iface=dtap0", "net_tap1,iface=dtap1", "");
    // The driver creates its taps when the gateway starts; bridges connect them to the cables.
    edge.script(
        "for n in 0 1; do in_ns gw ip link add br$n type bridge; in_ns gw ip link set br$n up; done
         in_ns gw ip link set uplink0 master br0; in_ns gw ip link set cluster0 master br1",
    );
    edge.write_demo_manifests();
    edge.spawn();
    until("the driver's taps", || edge.run("gw", &["ip", "link", "show", "dtap1"]).status.success().then_some(()));
    // The driver gives its tap the MAC address of the port. The bridge would then treat
    // frames for the port as frames for itself.
    edge.script(
        "for n in 0 1; do in_ns gw ip link set dtap$n address 02:00:00:00:dd:0$n
         in_ns gw ip link set dtap$n master br$n; in_ns gw ip link set dtap$n up; done",
    );
    assert_all_served(&edge);
}

#[test]
fn over_af_xdp_every_server_answers_in_both_families() {
    let Some(mut edge) = Edge::new("end to end over af_xdp", "xdp") else { return };
    edge.write_demo_manifests();
    edge.configure("net_af_xdp0,iface=uplink0", "net_af_xdp1,iface=cluster0", "");
    edge.spawn();
    assert_all_served(&edge);
}
