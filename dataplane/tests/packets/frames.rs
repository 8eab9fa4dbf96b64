//! Ethernet addresses, invalid source addresses, and padding after a packet in its frame (FORWARDING 1, 8 and 9).

use std::net::{Ipv6Addr, SocketAddr};

use dataplane::testing::{Packet, Segment, arp_request, assert_checksums, fragments, neighbour_solicitation};
use dataplane::{DropReason, Link, Mac, PacketOutcome, PortIndex, TagKind, Vlan, VlanLink, tcp_flags};
use proto::Mode;

use crate::rig::{CLUSTER, Rig, UPLINK, UPLINK_MAC, ends, ip, mac_of};

const ACK: u8 = tcp_flags::ACK;
const SYN: u8 = tcp_flags::SYN;
const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";
const VIP: &str = "192.0.2.100:80";
const VIP_V6: &str = "[2001:db8::1:0]:80";
const DNS: &str = "192.0.2.101:53";
const OTHER_STATION: Mac = Mac([2, 0, 0, 0, 0xaa, 0x77]);
const BROADCAST: Mac = Mac([0xff; 6]);
const MULTICAST: Mac = Mac([1, 0, 0x5e, 0, 0, 1]);
const MODES: [Mode; 5] = [Mode::Nat, Mode::Dnat, Mode::Dsr, Mode::Ipip, Mode::Gue];

fn to(mac: Mac, frame: &[u8]) -> Vec<u8> {
    [&mac.0, &frame[6..]].concat()
}

fn from(mac: Mac, frame: &[u8]) -> Vec<u8> {
    [&frame[..6], &mac.0, &frame[12..]].concat()
}

fn with_tag(frame: &[u8]) -> Vec<u8> {
    [&frame[..12], &[0x81, 0, 0, 100], &frame[12..]].concat()
}

fn v6(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

/// Frames that the gateway forwards, answers or passes to the kernel when they are sent to its port, or to a group.
fn frames() -> Vec<(&'static str, Vec<u8>)> {
    let large = Packet { fragmentation: 0, ..Packet::udp(CLIENT, DNS) }.payload(&[7; 2000]).build();
    vec![
        ("a SYN to a VIP", Packet::tcp(CLIENT, VIP).build()),
        ("a SYN to a VIP over IPv6", Packet::tcp(CLIENT_V6, VIP_V6).build()),
        ("mid-stream without a flow", Packet::tcp(CLIENT, VIP).flags(ACK).build()),
        ("a datagram", Packet::udp(CLIENT, DNS).build()),
        ("a fragment", fragments(&large, 800, 7).remove(0)),
        ("an INIT", Packet::sctp(CLIENT, VIP).build()),
        ("a closed port", Packet::tcp(CLIENT, "192.0.2.100:81").build()),
        ("ping", Packet::echo_request("198.51.100.7", "192.0.2.100").build()),
        ("a node port", Packet::tcp(CLIENT, "192.0.2.2:30080").build()),
        ("a packet for another address", Packet::tcp(CLIENT, "203.0.113.9:80").build()),
        ("a packet with a tag", with_tag(&Packet::tcp(CLIENT, VIP).build())),
        ("ARP for a VIP", arp_request([192, 0, 2, 10].into(), [192, 0, 2, 100].into())),
        ("a neighbour solicitation for a VIP", neighbour_solicitation(v6("2001:db8::10"), v6("2001:db8::1:0")).build()),
        ("a frame without IP", [&Packet::tcp(CLIENT, VIP).build()[..12], &[0x88, 0xcc, 1, 2, 3]].concat()),
        ("a frame that the parser rejects", Packet::tcp("127.0.0.1:5", VIP).build()),
    ]
}

#[test]
fn a_frame_for_another_station_is_neither_forwarded_nor_answered_nor_passed_to_the_kernel() {
    for (sentence, frame) in frames() {
        let mut rig = Rig::new();
        let outcome = rig.put(UPLINK, &to(OTHER_STATION, &frame));
        assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::NotOurMac)), "{sentence}");
        rig.settle_nothing_sent();
        assert!(rig.to_linux(UPLINK).is_empty(), "{sentence}");
    }
}

#[test]
fn a_frame_from_a_group_is_dropped() {
    for (sentence, frame) in frames() {
        let mut rig = Rig::new();
        let outcome = rig.put(UPLINK, &from(MULTICAST, &frame));
        assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::NotOurMac)), "{sentence}");
        rig.settle_nothing_sent();
    }
}

#[test]
fn packets_of_a_flow_count_only_in_frames_for_the_port() {
    for mode in MODES {
        for (client, vip) in [(CLIENT, VIP), (CLIENT_V6, VIP_V6), (CLIENT, DNS)] {
            let mut rig = Rig::with_mode(mode);
            let packet =
                |flags| if vip == DNS { Packet::udp(client, vip) } else { Packet::tcp(client, vip).flags(flags) }.build();
            let sent = rig.forward(UPLINK, &packet(SYN));
            let rows =
                [(OTHER_STATION, DropReason::NotOurMac), (BROADCAST, DropReason::Malformed), (MULTICAST, DropReason::Malformed)];
            for (mac, reason) in rows {
                let outcome = rig.put(UPLINK, &to(mac, &packet(ACK)));
                assert_eq!(outcome, Some(PacketOutcome::Drop(reason)), "{mode:?}, {vip}, to {mac}");
            }
            rig.forward(UPLINK, &packet(ACK));
            if !mode.is_two_way() || vip == DNS {
                continue;
            }
            let (source, backend) = ends(&sent);
            let reply = Packet::tcp(&backend.to_string(), &source.to_string()).flags(SYN | ACK).build();
            for (mac, reason) in rows {
                let outcome = rig.put(CLUSTER, &to(mac, &reply));
                assert_eq!(outcome, Some(PacketOutcome::Drop(reason)), "{mode:?}, a reply of {backend}, to {mac}");
            }
            rig.forward(CLUSTER, &reply);
        }
    }
}

#[test]
fn an_association_counts_only_in_frames_for_the_port() {
    let mut rig = Rig::new();
    rig.forward(UPLINK, &Packet::sctp(CLIENT, VIP).build());
    let again = Packet::sctp(CLIENT, VIP).build();
    assert_eq!(rig.put(UPLINK, &to(BROADCAST, &again)), Some(PacketOutcome::Drop(DropReason::Malformed)));
    assert_eq!(rig.put(UPLINK, &to(OTHER_STATION, &again)), Some(PacketOutcome::Drop(DropReason::NotOurMac)));
    rig.forward(UPLINK, &again);
}

#[test]
fn frames_to_groups_are_accepted_only_where_a_protocol_uses_them() {
    let arp = arp_request([192, 0, 2, 10].into(), [192, 0, 2, 100].into());
    let solicitation = neighbour_solicitation(v6("2001:db8::10"), v6("2001:db8::1:0"));
    let mut to_one = solicitation.clone();
    to_one.destination = ip("2001:db8::1:0");
    let to_linux = PacketOutcome::Linux(UPLINK);
    let rows = [
        ("ARP asks all", arp.clone(), PacketOutcome::Reply(UPLINK)),
        ("ARP asks one", to(UPLINK_MAC, &arp), PacketOutcome::Reply(UPLINK)),
        ("ARP never asks another group", to(MULTICAST, &arp), to_linux),
        ("a solicitation goes to the group of the address", solicitation.build(), PacketOutcome::Reply(UPLINK)),
        ("or to one", to(UPLINK_MAC, &to_one.build()), PacketOutcome::Reply(UPLINK)),
        ("but not to one by a group", to_one.build(), PacketOutcome::Drop(DropReason::UnsupportedProtocol)),
        ("multicast is Linux's", to(MULTICAST, &Packet::udp(CLIENT, "224.0.0.5:89").build()), to_linux),
        ("as is the broadcast of the link", to(BROADCAST, &Packet::udp("192.0.2.10:68", "192.0.2.255:67").build()), to_linux),
        (
            "ping by a group is not answered",
            to(BROADCAST, &Packet::echo_request("198.51.100.7", "192.0.2.100").build()),
            PacketOutcome::Drop(DropReason::AnswerLimited),
        ),
    ];
    for (sentence, frame, outcome) in rows {
        assert_eq!(Rig::new().put(UPLINK, &frame), Some(outcome), "{sentence}");
    }
}

#[test]
fn a_promiscuous_twin_gets_frames_for_other_stations_unless_they_are_for_the_engine() {
    let not_ours = PacketOutcome::Drop(DropReason::NotOurMac);
    let to_linux = PacketOutcome::Linux(UPLINK);
    let rows = [
        ("a packet for another address", Packet::tcp(CLIENT, "203.0.113.9:80").build(), to_linux),
        ("with a tag", with_tag(&Packet::tcp(CLIENT, "203.0.113.9:80").build()), to_linux),
        ("a closed port of the twin", Packet::tcp(CLIENT, "192.0.2.2:22").build(), to_linux),
        ("multicast to one", Packet::udp(CLIENT, "224.0.0.5:89").build(), to_linux),
        ("an ARP reply", arp_request([192, 0, 2, 10].into(), [192, 0, 2, 77].into()), to_linux),
        ("a packet for a VIP", Packet::tcp(CLIENT, VIP).build(), not_ours),
        ("with a tag", with_tag(&Packet::tcp(CLIENT, VIP).build()), not_ours),
        ("for a node port", Packet::tcp(CLIENT, "192.0.2.2:30080").build(), not_ours),
        ("for the SNAT address", Packet::tcp(CLIENT, "10.0.0.3:2000").build(), not_ours),
        ("for an unused address of the pool", Packet::tcp(CLIENT, "192.0.2.119:80").build(), not_ours),
        ("a frame that the parser rejects", Packet::tcp("127.0.0.1:5", "203.0.113.9:80").build(), not_ours),
    ];
    for (sentence, frame, outcome) in rows {
        let mut rig = Rig::new();
        rig.network.promiscuous = vec![UPLINK];
        rig.publish();
        let frame = to(OTHER_STATION, &frame);
        assert_eq!(rig.put(UPLINK, &frame), Some(outcome), "{sentence}");
        let got = rig.to_linux(UPLINK);
        assert_eq!(got, if outcome == to_linux { vec![frame.clone()] } else { vec![] }, "{sentence}, bit for bit");
        assert_eq!(rig.put(CLUSTER, &frame), Some(not_ours), "{sentence}, at the other port");
        rig.network.promiscuous.clear();
        rig.publish();
        assert_eq!(rig.put(UPLINK, &frame), Some(not_ours), "{sentence}, when the twin is no longer promiscuous");
    }
}

#[test]
fn a_port_whose_device_appeared_with_another_address_accepts_frames_for_that() {
    let mut rig = Rig::new();
    rig.forward(UPLINK, &Packet::tcp(CLIENT, VIP).build());
    rig.network.macs = vec![(UPLINK, OTHER_STATION)];
    rig.publish();
    let ack = Packet::tcp(CLIENT, VIP).flags(ACK).build();
    assert_eq!(rig.put(UPLINK, &ack), Some(PacketOutcome::Drop(DropReason::NotOurMac)));
    rig.forward(UPLINK, &to(OTHER_STATION, &ack));
}

/// A SYN from a source address to the frontend of its family.
fn syn_from(source: &str) -> Packet {
    let source = ip(source);
    let vip = if source.is_ipv4() { VIP } else { VIP_V6 };
    let from = SocketAddr::new(source, 5555).to_string();
    Packet::tcp(&from, vip)
}

#[test]
fn link_local_sources_and_our_directed_broadcasts_are_never_forwarded() {
    let refused_sources = ["169.254.0.1", "169.254.255.254", "fe80::1", "febf::1", "192.0.2.255", "10.0.0.255"];
    for source in refused_sources {
        for mode in MODES {
            let mut rig = Rig::with_mode(mode);
            for flags in [SYN, ACK] {
                let outcome = rig.put(UPLINK, &syn_from(source).flags(flags).build());
                assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::MartianSource)), "{source} in mode {mode:?}");
            }
            assert_eq!(rig.counters.flows.get(), 0);
        }
    }
    let neighbours_of_those =
        ["169.253.255.255", "169.255.0.0", "fe7f::1", "fec0::1", "192.0.2.254", "192.0.3.255", "10.0.1.255"];
    for source in neighbours_of_those {
        Rig::new().forward(UPLINK, &syn_from(source).build());
    }
}

#[test]
fn directed_broadcasts_are_invalid_sources_towards_the_kernel_too_and_link_local_ones_are_valid() {
    let martian = PacketOutcome::Drop(DropReason::MartianSource);
    let rows = [
        ("a broadcast to the twin", Packet::tcp("192.0.2.255:5", "192.0.2.2:22"), martian),
        ("a broadcast source to another address", Packet::tcp("192.0.2.255:5", "203.0.113.9:80"), martian),
        ("a broadcast to a closed port of a VIP", Packet::tcp("192.0.2.255:5", "192.0.2.100:81"), martian),
        ("link-local to the twin", Packet::udp("169.254.0.1:5", "192.0.2.2:53"), PacketOutcome::Linux(UPLINK)),
        ("link-local to a group", Packet::udp("[fe80::1]:5353", "[ff02::fb]:5353"), PacketOutcome::Linux(UPLINK)),
        ("to the directed broadcast", Packet::udp("192.0.2.10:68", "192.0.2.255:67"), PacketOutcome::Linux(UPLINK)),
        (
            "discovery by a link-local neighbour",
            neighbour_solicitation(v6("fe80::1"), v6("2001:db8::1:0")),
            PacketOutcome::Reply(UPLINK),
        ),
    ];
    for (sentence, packet, outcome) in rows {
        assert_eq!(Rig::new().put(UPLINK, &packet.build()), Some(outcome), "{sentence}");
    }
}

#[test]
fn the_directed_broadcast_of_a_vlan_is_an_invalid_source() {
    let mut rig = Rig::new();
    let tag = Vlan::NONE.with(TagKind::Customer, 100).unwrap();
    let link = Link::new(UPLINK, tag);
    rig.network.vlans = vec![VlanLink { link, mtu: 1500, addresses: vec!["203.0.113.2/25".parse().unwrap()] }];
    rig.publish();
    let outcome = rig.put(UPLINK, &syn_from("203.0.113.127").build());
    assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::MartianSource)));
    rig.forward(UPLINK, &syn_from("203.0.113.255").build());
}

#[test]
fn an_icmp_error_of_a_link_local_router_is_not_forwarded() {
    for mode in [Mode::Dnat, Mode::Dsr] {
        let mut rig = Rig::with_mode(mode);
        rig.forward(UPLINK, &Packet::tcp(CLIENT_V6, VIP_V6).build());
        let about = Packet::tcp(VIP_V6, CLIENT_V6).flags(ACK).build();
        let segment = Segment::Icmp { kind: 2, code: 0, rest: 1300 };
        let error = |source| Packet::between(ip(source), ip("2001:db8::1:0"), segment.clone()).payload(&about[14..]).build();
        assert_eq!(rig.put(UPLINK, &error("fe80::1")), Some(PacketOutcome::Drop(DropReason::IcmpUnmatched)), "{mode:?}");
        rig.forward(UPLINK, &error("2001:db8:9::1"));
    }
}

#[test]
fn in_mode_dnat_a_backend_is_not_its_own_client() {
    for (client, vip) in [("10.0.0.11:5555", VIP), ("[fd00::11]:5555", VIP_V6)] {
        let mut rig = Rig::new();
        rig.keep_backends("web", &[11]);
        rig.set_mode("web", Mode::Dnat);
        for flags in [SYN, ACK] {
            let outcome = rig.put(CLUSTER, &Packet::tcp(client, vip).flags(flags).build());
            assert_eq!(outcome, Some(PacketOutcome::Drop(DropReason::SameSourceDestination)), "{client}");
        }
        assert_eq!(rig.counters.flows.get(), 0);
        let another = client.replace("11", "12");
        rig.forward(CLUSTER, &Packet::tcp(&another, vip).build());
        // With a SNAT address the two ends differ.
        rig.set_mode("web", Mode::Nat);
        rig.forward(CLUSTER, &Packet::tcp(client, vip).build());
    }
}

/// The port by which a frame leaves, and its length.
fn len_forwarded(rig: &mut Rig, port: PortIndex, frame: &[u8]) -> usize {
    rig.forward(port, frame).len()
}

#[test]
fn padding_after_a_packet_is_not_forwarded() {
    let padded = |packet: Packet, padding| Packet { padding, ..packet }.build();
    for mode in MODES {
        let outer = match mode {
            Mode::Ipip => 20,
            Mode::Gue => 28,
            _ => 0,
        };
        for (payload, padding) in [(0, 6), (0, 7), (40, 1), (1460 - outer, 1), (1460 - outer, 200)] {
            let mut rig = Rig::with_mode(mode);
            let whole = |flags| Packet::tcp(CLIENT, VIP).flags(flags).payload(&vec![7; payload]);
            let expected = 14 + 40 + outer + payload;
            let sentence = format!("{mode:?}, {payload} bytes of data, {padding} behind them");
            let may_be_cut = Packet { fragmentation: 0, ..whole(ACK) };
            for packet in [whole(SYN), whole(ACK), may_be_cut] {
                assert_eq!(len_forwarded(&mut rig, UPLINK, &padded(packet, padding)), expected, "{sentence}");
            }
        }
    }
    let mut rig = Rig::new();
    let init = Packet::sctp(CLIENT, VIP);
    assert_eq!(len_forwarded(&mut rig, UPLINK, &padded(init.clone(), 9)), init.build().len(), "SCTP");
    let (source, backend) = ends(&rig.forward(UPLINK, &padded(Packet::tcp(CLIENT_V6, VIP_V6), 3)));
    let reply = Packet::tcp(&backend.to_string(), &source.to_string()).flags(SYN | ACK);
    let back = rig.forward(CLUSTER, &padded(reply.clone(), 5));
    assert_eq!(back.len(), reply.build().len());
    assert_checksums(&back);
    let segment = Segment::Icmp { kind: 1, code: 0, rest: 0 };
    let error = Packet::between(ip("2001:db8:9::1"), ip("2001:db8::1:0"), segment);
    let quoted = Packet::tcp(VIP_V6, CLIENT_V6).flags(ACK).build();
    let error = error.payload(&quoted[14..]);
    assert_eq!(len_forwarded(&mut rig, UPLINK, &padded(error.clone(), 11)), error.build().len(), "an ICMP error");
}

#[test]
fn padded_fragments_leave_without_padding() {
    let mut rig = Rig::new();
    let datagram = Packet { fragmentation: 0, ..Packet::udp(CLIENT, DNS) }.payload(&[7; 2000]).build();
    for fragment in fragments(&datagram, 800, 7) {
        let padded = [&fragment[..], &[0; 6]].concat();
        assert_eq!(len_forwarded(&mut rig, UPLINK, &padded), fragment.len());
    }
}

#[test]
fn every_frame_that_leaves_comes_from_the_port_that_it_leaves_by() {
    let mut rig = Rig::new();
    for (sentence, frame) in frames() {
        rig.put(UPLINK, &frame);
        for port in [UPLINK, CLUSTER] {
            for sent in rig.sent(port) {
                assert_eq!(sent[6..12], mac_of(port).0, "{sentence}");
            }
        }
    }
}
