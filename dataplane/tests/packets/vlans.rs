//! VLANs: the treatment of frames with tags, and the tags with which they leave. The gateway has its VIPs' clients on
//! VLAN 100 of the uplink and its backends on VLAN 7.200 (QinQ) of the cluster port.

use std::net::IpAddr;

use dataplane::testing::{Packet, Segment, arp_request, assert_checksums};
use dataplane::{Config, DropReason, Link, Neighbour, PacketOutcome, PortIndex, Route, TagKind, Vlan, VlanLink, tcp_flags};
use proto::Mode;

use crate::rig::{self, BACKENDS, CLUSTER, ROUTER_MAC, Rig, UPLINK, backend_mac, ends, ip};

const CLIENT: &str = "198.51.100.7:5555";
const VIP: &str = "192.0.2.100:80";
/// 802.1Q, priority 5, VLAN 100.
const CLIENTS: &[u8] = &[0x81, 0, 0xa0, 100];
/// 802.1ad, VLAN 7, then 802.1Q, VLAN 200.
const BACKEND_TAGS: &[u8] = &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 200];

/// The frame with these tags after its addresses.
fn with(tags: &[u8], frame: &[u8]) -> Vec<u8> {
    [&frame[..12], tags, &frame[12..]].concat()
}

/// The frame without these tags, which it must have.
fn without(tags: &[u8], frame: &[u8]) -> Vec<u8> {
    assert_eq!(&frame[12..12 + tags.len()], tags, "tags");
    [&frame[..12], &frame[12 + tags.len()..]].concat()
}

fn clients() -> Link {
    Link::new(UPLINK, Vlan::NONE.with(TagKind::Customer, 100).unwrap())
}

fn backends() -> Link {
    Link::new(CLUSTER, Vlan::NONE.with(TagKind::Service, 7).unwrap().with(TagKind::Customer, 200).unwrap())
}

/// The rig with all its addresses on VLANs.
fn vlan_rig() -> Rig {
    vlan_rig_with(rig::config(1024))
}

fn vlan_rig_with(config: Config) -> Rig {
    let mut rig = Rig::with_config(config);
    rig.state = rig::state();
    let link_of = |port| if port == UPLINK { clients() } else { backends() };
    let network = &mut rig.network;
    *network = rig::network();
    network.routes.iter_mut().for_each(|route| route.link = link_of(route.link.port()));
    network.neighbours.iter_mut().for_each(|neighbour| neighbour.link = link_of(neighbour.link.port()));
    let vlan = |link, net: &str| VlanLink { link, mtu: 1400, addresses: vec![net.parse().unwrap()] };
    network.vlans = vec![vlan(clients(), "192.0.2.2/24"), vlan(backends(), "10.0.0.2/24")];
    rig.publish();
    rig
}

fn syn() -> Vec<u8> {
    Packet::tcp(CLIENT, VIP).build()
}

#[test]
fn a_flow_from_vlan_to_vlan_leaves_with_the_tags_of_its_exit() {
    let mut rig = vlan_rig();
    let out = rig.forward(UPLINK, &with(CLIENTS, &syn()));
    let out = without(BACKEND_TAGS, &out);
    assert_checksums(&out);
    let (snat, backend) = ends(&out);
    assert_eq!((snat.ip(), backend.port()), (ip("10.0.0.3"), 8080));
    let reply = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK).build();
    let back = rig.forward(CLUSTER, &with(BACKEND_TAGS, &reply));
    // The priority belongs to the link on which a packet arrived, and is not forwarded.
    let back = without(&[0x81, 0, 0, 100], &back);
    assert_checksums(&back);
    assert_eq!(ends(&back), (VIP.parse().unwrap(), CLIENT.parse().unwrap()));
    assert_eq!(back[..6], ROUTER_MAC.0);
    // The same by the existing flow.
    let ack = Packet::tcp(CLIENT, VIP).flags(tcp_flags::ACK).build();
    assert_eq!(ends(&without(BACKEND_TAGS, &rig.forward(UPLINK, &with(CLIENTS, &ack)))), (snat, backend));
}

#[test]
fn a_reply_by_another_vlan_than_the_backends_is_dropped() {
    let mut rig = vlan_rig();
    let (snat, backend) = ends(&without(BACKEND_TAGS, &rig.forward(UPLINK, &with(CLIENTS, &syn()))));
    let reply = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK).build();
    let rows: [(&str, &[u8]); 4] = [
        ("untagged", &[]),
        ("by the outer tag alone", &[0x88, 0xa8, 0, 7]),
        ("by another inner tag", &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 201]),
        ("by the same identifiers in 802.1Q tags", &[0x81, 0, 0, 7, 0x81, 0, 0, 200]),
    ];
    for (sentence, tags) in rows {
        assert_eq!(rig.put(CLUSTER, &with(tags, &reply)), Some(PacketOutcome::Drop(DropReason::SnatWrongPort)), "{sentence}");
    }
}

#[test]
fn answers_keep_the_tags_that_the_question_came_with() {
    let arp = arp_request([192, 0, 2, 1].into(), [192, 0, 2, 100].into());
    let rows: [(&str, Vec<u8>); 4] = [
        ("ARP for a VIP", arp),
        ("ping to a VIP", Packet::echo_request("198.51.100.7", "192.0.2.100").build()),
        ("a SYN to a closed port", Packet::tcp(CLIENT, "192.0.2.100:81").build()),
        ("a packet at its last hop", Packet::tcp(CLIENT, VIP).hop_limit(1).build()),
    ];
    for (sentence, frame) in rows {
        let mut rig = vlan_rig();
        assert_eq!(rig.put(UPLINK, &with(CLIENTS, &frame)), Some(PacketOutcome::Reply(UPLINK)), "{sentence}");
        let answer = without(CLIENTS, &rig.sent(UPLINK).remove(0));
        assert_eq!(answer[..6], ROUTER_MAC.0, "{sentence}");
        if frame[12..14] == [8, 0] {
            assert_checksums(&answer);
        }
    }
    let mut rig = vlan_rig();
    let mid_stream = Packet::tcp(CLIENT, VIP).flags(tcp_flags::ACK).build();
    assert_eq!(rig.put(UPLINK, &with(CLIENTS, &mid_stream)), Some(PacketOutcome::Drop(DropReason::NoFlow)));
    assert_checksums(&without(CLIENTS, &rig.sent(UPLINK).remove(0)));
}

/// The address of the VLAN, whether or not its port has one of the family too.
#[test]
fn a_backend_on_a_vlan_gets_icmp_errors_from_the_address_of_the_vlan() {
    for is_trunk in [false, true] {
        let mut config = rig::config(1024);
        if is_trunk {
            config.ports.iter_mut().for_each(|port| port.addresses.clear());
        }
        let mut rig = vlan_rig_with(config);
        rig.network.vlans[1].addresses = vec!["10.0.0.9/24".parse().unwrap()];
        rig.publish();
        rig.set_mode("web", Mode::Dnat);
        let sent = without(BACKEND_TAGS, &rig.forward(UPLINK, &with(CLIENTS, &syn())));
        let (client, backend) = rig::ends(&sent);
        let reply = Packet::tcp(&backend.to_string(), &client.to_string()).flags(tcp_flags::ACK).hop_limit(1).build();
        assert_eq!(rig.put(CLUSTER, &with(BACKEND_TAGS, &reply)), Some(PacketOutcome::Reply(CLUSTER)));
        let error = without(BACKEND_TAGS, &rig.sent(CLUSTER).remove(0));
        assert_eq!(rig::ends(&error).0.ip(), rig::ip("10.0.0.9"), "a trunk without addresses: {is_trunk}");
    }
}

#[test]
fn frames_for_the_kernel_keep_their_tags_bit_for_bit() {
    let other = Packet::tcp(CLIENT, "203.0.113.9:80").build();
    let rows: [(&str, Vec<u8>); 6] = [
        ("a packet for another address on a known VLAN", with(CLIENTS, &other)),
        ("on an unknown VLAN", with(&[0x81, 0, 0, 101], &other)),
        ("behind three tags", with(&[0x81, 0, 0, 100, 0x81, 0, 0, 1, 0x81, 0, 0, 2], &other)),
        ("of the reserved VLAN 4095", with(&[0x81, 0, 0x0f, 0xff], &other)),
        ("LLDP on a VLAN", with(CLIENTS, &[&other[..12], &[0x88, 0xcc, 1, 2, 3]].concat())),
        (
            "ARP on a VLAN for an address that is not ours",
            with(CLIENTS, &arp_request([10, 9, 0, 1].into(), [10, 9, 0, 2].into())),
        ),
    ];
    for (sentence, frame) in rows {
        let mut rig = vlan_rig();
        assert_eq!(rig.put(UPLINK, &frame), Some(PacketOutcome::Linux(UPLINK)), "{sentence}");
        assert_eq!(rig.to_linux(UPLINK), [frame], "{sentence}");
    }
}

#[test]
fn a_vlan_without_a_device_in_the_kernel_is_not_served() {
    let unknown: &[u8] = &[0x81, 0, 0, 101];
    let rows: [(&str, PortIndex, Vec<u8>, DropReason); 4] = [
        ("a SYN to a VIP", UPLINK, syn(), DropReason::UnknownVip),
        (
            "a packet to an unused address of a pool",
            UPLINK,
            Packet::tcp(CLIENT, "192.0.2.119:80").build(),
            DropReason::UnknownVip,
        ),
        (
            "a packet to the SNAT address",
            CLUSTER,
            Packet::tcp("10.0.0.11:8080", "10.0.0.3:2000").build(),
            DropReason::SnatWrongPort,
        ),
        ("a packet that does not parse", UPLINK, Packet::tcp("127.0.0.1:5", VIP).build(), DropReason::MartianSource),
    ];
    for (sentence, port, frame, reason) in rows {
        let mut rig = vlan_rig();
        assert_eq!(rig.put(port, &with(unknown, &frame)), Some(PacketOutcome::Drop(reason)), "{sentence}");
    }
    let mut rig = vlan_rig();
    rig.forward(UPLINK, &with(CLIENTS, &syn()));
    rig.network.vlans.retain(|vlan| vlan.link != clients());
    rig.publish();
    let outcome = rig.put(UPLINK, &with(CLIENTS, &syn()));
    assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::UnknownVip)), "its device is gone");
}

#[test]
fn before_the_first_complete_state_only_groups_reach_the_kernel() {
    let mut rig = Rig::before_state(1024);
    assert_eq!(rig.put(UPLINK, &with(CLIENTS, &syn())), Some(PacketOutcome::Drop(DropReason::UnknownVip)));
    let group = Packet::udp(CLIENT, "224.0.0.5:89").build();
    assert_eq!(rig.put(UPLINK, &with(CLIENTS, &group)), Some(PacketOutcome::Linux(UPLINK)));
}

#[test]
fn a_tag_that_only_carries_a_priority_is_of_the_untagged_link() {
    let priority: &[u8] = &[0x81, 0, 0xe0, 0];
    let mut rig = Rig::new();
    let out = rig.forward(UPLINK, &with(priority, &syn()));
    assert_eq!(out[12..14], [8, 0], "it leaves without");
    let closed = Packet::tcp(CLIENT, "192.0.2.100:81").build();
    assert_eq!(rig.put(UPLINK, &with(priority, &closed)), Some(PacketOutcome::Reply(UPLINK)));
    without(priority, &rig.sent(UPLINK).remove(0));
}

#[test]
fn between_a_vlan_and_a_port_without_tags_they_are_added_and_removed() {
    let mut rig = Rig::new();
    rig.network.vlans = vec![VlanLink { link: backends(), mtu: 1500, addresses: vec!["10.0.0.2/24".parse().unwrap()] }];
    for neighbour in rig.network.neighbours.iter_mut().filter(|n| n.link.port() == CLUSTER) {
        neighbour.link = backends();
    }
    rig.network.routes.iter_mut().filter(|r| r.link.port() == CLUSTER).for_each(|route| route.link = backends());
    rig.publish();
    let (snat, backend) = ends(&without(BACKEND_TAGS, &rig.forward(UPLINK, &syn())));
    let reply = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK).build();
    assert_eq!(ends(&rig.forward(CLUSTER, &with(BACKEND_TAGS, &reply))), (VIP.parse().unwrap(), CLIENT.parse().unwrap()));
}

#[test]
fn the_mtu_of_a_vlan_device_counts_without_its_tags() {
    let mut rig = vlan_rig();
    rig.forward(UPLINK, &with(CLIENTS, &syn()));
    let sized = |len: usize| Packet::tcp(CLIENT, VIP).flags(tcp_flags::ACK).payload(&vec![0; len - 40]).build();
    rig.forward(UPLINK, &with(CLIENTS, &sized(1400)));
    assert_eq!(rig.put(UPLINK, &with(CLIENTS, &sized(1401))), Some(PacketOutcome::Reply(UPLINK)));
    let answer = without(CLIENTS, &rig.sent(UPLINK).remove(0));
    assert_eq!(&answer[40..42], &1400u16.to_be_bytes(), "fragmentation needed, with the MTU of the VLAN device");
}

#[test]
fn vips_and_snat_addresses_in_a_vlans_prefix_are_announced_there_with_its_tags() {
    let mut rig = Rig::before_state(1024);
    rig.state = rig::state();
    let vlan = VlanLink { link: clients(), mtu: 1500, addresses: vec!["192.0.2.2/24".parse().unwrap()] };
    rig.network.vlans = vec![vlan];
    let sent = rig.publish_and_watch();
    let vip = [192, 0, 2, 100];
    let tag: &[u8] = &[0x81, 0, 0, 100, 8, 6];
    let announced = |frame: &&Vec<u8>| &frame[12..18] == tag && frame[32..36] == vip && frame[42..46] == vip;
    assert_eq!(sent.iter().filter(announced).count(), 3);
}

#[test]
fn the_same_address_on_two_vlans_is_two_neighbours() {
    let mut rig = vlan_rig();
    let elsewhere = Link::new(CLUSTER, Vlan::NONE.with(TagKind::Customer, 9).unwrap());
    for n in BACKENDS {
        let (address, mac) = (ip(&format!("10.0.0.{n}")), ROUTER_MAC);
        rig.network.neighbours.push(Neighbour { link: elsewhere, address, mac });
    }
    rig.publish();
    let out = rig.forward(UPLINK, &with(CLIENTS, &syn()));
    let (_, backend) = ends(&without(BACKEND_TAGS, &out));
    let IpAddr::V4(address) = backend.ip() else { panic!("IPv4") };
    assert_eq!(out[..6], backend_mac(address.octets()[3]).0);
}

#[test]
fn a_held_packet_leaves_with_tags_when_its_neighbour_is_known() {
    let mut rig = vlan_rig();
    let neighbours = rig.network.neighbours.clone();
    rig.network.neighbours.retain(|n| n.link == clients());
    rig.publish();
    assert_eq!(rig.put(UPLINK, &with(CLIENTS, &syn())), None, "it waits");
    assert!(
        rig.neighbour_requests.pop().is_some_and(|(link, _)| link == backends()),
        "the kernel is asked to resolve it on the VLAN"
    );
    rig.network.neighbours = neighbours;
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    rig.publisher.publish(snapshot);
    rig.worker.poll(rig.now);
    without(BACKEND_TAGS, &rig.sent(CLUSTER).remove(0));
}

#[test]
fn a_burst_of_many_vlans_is_split_and_each_packet_is_counted_once() {
    let mut rig = vlan_rig();
    rig.worker.observer_mut().0.clear();
    let frames = [
        with(CLIENTS, &syn()),
        syn(),
        with(&[0x81, 0, 0, 101], &syn()),
        with(CLIENTS, &Packet::udp(CLIENT, "192.0.2.101:53").build()),
        with(CLIENTS, &[0; 14]),
        with(&[0x81, 0], &syn()[..12]),
    ];
    for (id, frame) in (1..).zip(&frames) {
        rig.arrive(UPLINK, frame, id);
    }
    rig.worker.poll(rig.now);
    assert_eq!(rig.worker.observer_mut().0.len(), frames.len());
    assert_eq!(rig.sent(CLUSTER).len(), 3, "a VIP is served on every known link");
    assert_eq!(rig.drops(DropReason::UnknownVip), 1);
    assert_eq!(rig.drops(DropReason::Malformed), 1);
}

#[test]
fn the_kernel_cannot_send_to_a_vip_through_a_vlan_either() {
    let mut rig = vlan_rig();
    let own = Packet::between(ip("192.0.2.2"), ip("192.0.2.100"), Segment::Udp { ports: [1, 2], checksum: true }).build();
    rig.send_from_linux(UPLINK, &with(CLIENTS, &own));
    assert_eq!((rig.sent(UPLINK).len(), rig.drops(DropReason::VipLoop)), (0, 1));
    let other = with(CLIENTS, &Packet::tcp("192.0.2.2:40000", CLIENT).build());
    rig.send_from_linux(UPLINK, &other);
    assert_eq!(rig.sent(UPLINK), [other]);
}

#[test]
fn a_route_by_a_vlan_whose_neighbour_is_a_router_is_followed() {
    let mut rig = vlan_rig();
    let router = ip("10.0.0.254");
    rig.network.routes.push(Route { to: "10.0.0.8/29".parse().unwrap(), via: Some(router), link: backends(), weight: 1 });
    rig.network.neighbours.push(Neighbour { link: backends(), address: router, mac: ROUTER_MAC });
    rig.publish();
    let out = rig.forward(UPLINK, &with(CLIENTS, &syn()));
    without(BACKEND_TAGS, &out);
    assert_eq!(out[..6], ROUTER_MAC.0);
}

/// The fast path remembers the tag of the frame before.
#[test]
fn each_frame_of_a_burst_has_its_own_link() {
    let ack = Packet::tcp(CLIENT, VIP).flags(tcp_flags::ACK).build();
    let rows: [(&str, &[u8], bool); 7] = [
        ("the tag of the flow", CLIENTS, true),
        ("another priority", &[0x81, 0, 0x60, 100], true),
        ("another VLAN", &[0x81, 0, 0xa0, 101], false),
        ("another kind of tag", &[0x88, 0xa8, 0xa0, 100], false),
        ("two tags, the first one the same", &[0x81, 0, 0xa0, 100, 0x81, 0, 0, 200], false),
        ("no tag", &[], true),
        ("no EtherType", &[0, 0, 0, 0], false),
    ];
    for (sentence, tags, is_forwarded) in rows {
        let mut rig = vlan_rig();
        // An open connection: during the handshake packets take the slow path.
        let (snat, backend) = ends(&without(BACKEND_TAGS, &rig.forward(UPLINK, &with(CLIENTS, &syn()))));
        let answer = Packet::tcp(&backend.to_string(), &snat.to_string()).flags(tcp_flags::SYN | tcp_flags::ACK).build();
        rig.forward(CLUSTER, &with(BACKEND_TAGS, &answer));
        rig.forward(UPLINK, &with(CLIENTS, &ack));
        for (id, tags) in [CLIENTS, tags, CLIENTS].into_iter().enumerate() {
            rig.arrive(UPLINK, &with(tags, &ack), id as u64);
        }
        rig.worker.poll(rig.now);
        let sent = rig.sent(CLUSTER);
        assert_eq!(sent.len(), 2 + usize::from(is_forwarded), "{sentence}");
        sent.iter().for_each(|frame| assert_checksums(&without(BACKEND_TAGS, frame)));
    }
}
