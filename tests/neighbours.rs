//! Routes and neighbours of Linux: a prefix by a device that is no port, and a client whose Ethernet address changes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod edge;

use edge::{Edge, until};
use proto::v1::ExplainRequest;

const VIPS: [&str; 2] = ["http://192.0.2.100/", "http://[2001:db8::1:0]/"];

/// The ends of a packet of this client to which Linux sends by no port.
fn explained(edge: &Edge, client: &str) -> Option<Vec<String>> {
    let request = ExplainRequest {
        protocol: "tcp".into(),
        source: format!("{client}:5555"),
        destination: "192.0.2.100:80".into(),
        ..ExplainRequest::default()
    };
    Some(edge.admin(async |mut client| client.explain(request).await.ok())?.into_inner().no_route)
}

#[test]
fn a_prefix_by_a_device_that_is_no_port_is_named_and_no_packet_leaves_by_a_shorter_one() {
    let Some(mut edge) = Edge::with_af_packet("a prefix by a device that is no port", "over") else { return };
    edge.write_demo_manifests();
    edge.start();
    until("a request succeeds", || edge.curl(VIPS[0]));
    assert_eq!(edge.service("web").unwrap().message, "");
    // A client behind the uplink's default route, which a shorter prefix is.
    edge.script(
        "set -e; in_ns client ip addr add 198.51.100.7/32 dev lo
         in_ns client ip route replace 192.0.2.100 dev eth0 src 198.51.100.7
         in_ns gw ip route add default via 192.0.2.10 dev uplink metric 10",
    );
    until("the client is served", || edge.curl(VIPS[0]));
    edge.script(
        "set -e; in_ns gw ip link add over0 type veth peer name under0
         in_ns gw ip link set over0 up; in_ns gw ip link set under0 up; in_ns gw ip route add default dev over0 metric 1
         in_ns gw ip route add 10.0.0.11/32 dev over0; in_ns gw ip route add 198.51.100.0/24 dev over0",
    );
    let message = until("the Service names the device", || {
        edge.service("web").map(|service| service.message).filter(|message| message.contains("over0"))
    });
    assert!(message.contains("10.0.0.11 leaves by over0, which is no port"), "{message}");
    until("the explanation names it", || {
        explained(&edge, "198.51.100.7").filter(|ends| ends.contains(&"198.51.100.7 by over0".to_owned()))
    });
    let dropped = || edge.drops().into_iter().find(|(reason, _)| reason == "no_route").map_or(0, |(_, packets)| packets);
    let before = dropped();
    until("replies are dropped for want of a route", || {
        assert_eq!(edge.curl(VIPS[0]), None, "they leave by no default route");
        (dropped() > before).then_some(())
    });
    edge.script("set -e; in_ns gw ip link del over0");
    until("the Service is served whole again", || edge.service("web").filter(|service| service.message.is_empty()));
    until("requests succeed", || edge.curl(VIPS[0]));
}

#[test]
fn a_client_on_the_link_whose_ethernet_address_changes_is_served_again() {
    let Some(mut edge) = Edge::with_af_packet("a client whose address changes", "mac") else { return };
    edge.write_demo_manifests();
    edge.start();
    for url in VIPS {
        until("a request succeeds", || edge.curl(url));
    }
    edge.script(
        "set -e; in_ns client sysctl -qw net.ipv4.conf.all.arp_notify=0 net.ipv4.conf.eth0.arp_notify=0
         in_ns client ip link set eth0 address 02:00:00:00:99:20",
    );
    for url in VIPS {
        until(&format!("{url} answers the new address"), || edge.curl(url));
    }
}
