//! Modes `dsr`, `ipip` and `gue`: backends answer their clients directly.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dataplane::testing::{
    Packet, Segment, arp_request, assert_checksums, neighbour_solicitation, segment_size, with_segment_size,
};
use dataplane::{Compiler, Config, DropReason, Link, PacketOutcome, Route, TagKind, Tunnel, Vlan, VlanLink, tcp_flags};
use proto::{Mode, Reason, Service, ServiceName};

use crate::rig::{self, CLUSTER, CLUSTER_MAC, Rig, SECOND, UPLINK, UPLINK_MAC, backend_mac, ip};

const ACK: u8 = tcp_flags::ACK;
const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";
const VIP: &str = "192.0.2.100:80";
const VIP_V6: &str = "[2001:db8::1:0]:80";
const TUNNELS: [Mode; 2] = [Mode::Ipip, Mode::Gue];

/// A decapsulated packet, read by fixed offsets, with every checksum computed in full.
struct Opened {
    source: IpAddr,
    destination: IpAddr,
    class: u8,
    dont_fragment: bool,
    identification: u16,
    flow_label: u32,
    /// UDP source and destination port, and the checksum field.
    udp: Option<(u16, u16, u16)>,
    /// The inner packet after an Ethernet header with its own EtherType.
    inner: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn open(frame: &[u8]) -> Opened {
    assert_checksums(frame);
    let packet = &frame[14..];
    let is_v4 = frame[12..14] == [8, 0];
    let (head, protocol, class, len) = if is_v4 {
        assert_eq!((packet[0], packet[8]), (0x45, 64));
        (20, packet[9], packet[1], usize::from(word(packet, 2)))
    } else {
        assert_eq!(packet[7], 64);
        (40, packet[6], (word(packet, 0) >> 4 & 0xff) as u8, 40 + usize::from(word(packet, 4)))
    };
    assert_eq!(packet.len(), len, "nothing behind the packet");
    let address = |at: usize| match is_v4 {
        true => IpAddr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap()),
        false => IpAddr::from(<[u8; 16]>::try_from(&packet[at..at + 16]).unwrap()),
    };
    let (source, destination) = if is_v4 { (address(12), address(16)) } else { (address(8), address(24)) };
    let udp = (protocol == 17).then(|| {
        assert_eq!(usize::from(word(packet, head + 4)), len - head, "length of the UDP datagram");
        (word(packet, head), word(packet, head + 2), word(packet, head + 6))
    });
    let inner = &packet[head + if udp.is_some() { 8 } else { 0 }..];
    let inner_is_v4 = inner[0] >> 4 == 4;
    assert!(udp.is_some() || protocol == if inner_is_v4 { 4 } else { 41 });
    let ether_type: [u8; 2] = if inner_is_v4 { [8, 0] } else { [0x86, 0xdd] };
    Opened {
        source,
        destination,
        class,
        dont_fragment: is_v4 && packet[6] == 0x40,
        identification: if is_v4 { word(packet, 4) } else { 0 },
        flow_label: if is_v4 { 0 } else { u32::from(packet[1] & 15) << 16 | u32::from(word(packet, 2)) },
        udp,
        inner: [&frame[..12], &ether_type, inner].concat(),
    }
}

/// A gateway whose services `web` and `dns` have this mode and, on request, backends of the other family.
fn gateway(mode: Mode, crossed: bool) -> Rig {
    let mut rig = Rig::with_mode(mode);
    for name in ["web", "dns"] {
        change(&mut rig, name, |service| {
            for port in &mut service.ports {
                for backend in &mut port.backends {
                    let last = rig::last_byte(backend.address.ip());
                    let address = match backend.address.is_ipv4() {
                        true if crossed => ip(&format!("fd00::{last}")),
                        false if crossed => ip(&format!("10.0.0.{last:x}")),
                        _ => backend.address.ip(),
                    };
                    backend.address = SocketAddr::new(address, port.port);
                }
            }
        });
    }
    // The tables that were replaced here are no longer asked.
    rig.now += 7200 * SECOND;
    rig.publish();
    rig
}

fn change(rig: &mut Rig, name: &str, change: impl FnOnce(&mut Service)) {
    let name = ServiceName::new("default", name);
    let mut service = Service::clone(&rig.state.services[&name]);
    change(&mut service);
    rig.state.services.insert(name, Arc::new(service));
    rig.publish();
}

fn last_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(a) => a.octets()[3],
        IpAddr::V6(a) => format!("{:x}", a.octets()[15]).parse().unwrap(),
    }
}

/// The packet with its hop limit decremented.
fn one_hop_on(packet: &Packet) -> Vec<u8> {
    Packet { hop_limit: packet.hop_limit - 1, padding: 0, ..packet.clone() }.build()
}

#[test]
fn dsr_changes_macs_and_the_hop_limit_and_nothing_else() {
    for (client, vip) in [(CLIENT, VIP), (CLIENT_V6, VIP_V6)] {
        let mut rig = gateway(Mode::Dsr, false);
        for packet in [Packet::tcp(client, vip), Packet::tcp(client, vip).flags(ACK).payload(b"data")] {
            let sent = rig.forward(UPLINK, &packet.build());
            assert_eq!(sent[12..], one_hop_on(&packet)[12..]);
            assert_eq!(&sent[6..12], &CLUSTER_MAC.0);
            assert!(rig::BACKENDS.iter().any(|n| sent[..6] == backend_mac(*n).0));
        }
        assert_eq!(rig.counters.flows.get(), 1);
    }
}

#[test]
fn tunnels_carry_every_pair_of_families_to_the_backend_that_dsr_would_choose() {
    for (mode, crossed) in TUNNELS.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        for (client, vip) in [(CLIENT, VIP), (CLIENT_V6, VIP_V6)] {
            let mut rig = gateway(mode, crossed);
            for mut packet in [Packet::tcp(client, vip), Packet::tcp(client, vip).flags(ACK).payload(b"data")] {
                packet.padding = 3;
                let sent = rig.forward(UPLINK, &packet.build());
                let Opened { source, destination, udp, inner, dont_fragment, flow_label, .. } = open(&sent);
                assert_eq!(inner[14..], one_hop_on(&packet)[14..], "{mode} {crossed}");
                assert_checksums(&inner);
                assert_eq!(&sent[..6], &backend_mac(last_of(destination)).0);
                assert_eq!(source, ip(if source.is_ipv4() { "10.0.0.2" } else { "fd00::2" }), "the port's address");
                assert_eq!(source.is_ipv4(), packet.source.is_ipv4() != crossed);
                assert_eq!((dont_fragment, flow_label != 0), (source.is_ipv4(), source.is_ipv6()));
                match udp {
                    None => assert_eq!(mode, Mode::Ipip),
                    Some((from, to, checksum)) => {
                        assert_eq!((mode, to, from >= 49_152), (Mode::Gue, 6080, true));
                        assert_eq!(checksum == 0, source.is_ipv4(), "RFC 6935: 0 only by agreement with the far end");
                    }
                }
            }
        }
    }
}

#[test]
fn udp_goes_through_tunnels_whole() {
    for mode in TUNNELS {
        let mut rig = gateway(mode, false);
        let mut packet = Packet::udp(CLIENT, "192.0.2.101:53").payload(b"?");
        let Segment::Udp { checksum, .. } = &mut packet.segment else { unreachable!() };
        *checksum = false;
        assert_eq!(open(&rig.forward(UPLINK, &packet.build())).inner[14..], one_hop_on(&packet)[14..]);
    }
}

#[test]
fn dscp_and_ecn_are_copied_to_the_outer_header_and_stay_inside() {
    for (mode, class) in TUNNELS.into_iter().flat_map(|mode| [0xb8, 0x01, 0x02, 0x03].map(|class| (mode, class))) {
        for (crossed, client, vip) in [(false, CLIENT, VIP), (true, CLIENT, VIP), (false, CLIENT_V6, VIP_V6)] {
            let mut frame = Packet::tcp(client, vip).build();
            if frame[12..14] == [8, 0] {
                frame[15] = class;
                let checksum = dataplane::wire::checksum::word_delta(0x4500, 0x4500 | u16::from(class));
                let checksum = dataplane::wire::checksum::apply(word(&frame, 24), checksum).to_be_bytes();
                frame[24..26].copy_from_slice(&checksum);
            } else {
                (frame[14], frame[15]) = (0x60 | class >> 4, class << 4);
            }
            let opened = open(&gateway(mode, crossed).forward(UPLINK, &frame));
            assert_eq!(opened.class, class);
            assert_eq!(opened.inner[14..16], frame[14..16]);
        }
    }
}

#[test]
fn a_packet_that_may_be_fragmented_may_be_so_inside_a_tunnel_over_ipv4() {
    let mut rig = gateway(Mode::Ipip, false);
    let packet = Packet { fragmentation: 0, ..Packet::udp(CLIENT, "192.0.2.101:53").payload(b"?") };
    let numbers: Vec<_> = (0..2).map(|_| open(&rig.forward(UPLINK, &packet.build()))).collect();
    assert!(numbers.iter().all(|opened| !opened.dont_fragment && opened.inner[18..20] == [0x12, 0x34]));
    assert_ne!(numbers[0].identification, numbers[1].identification);
}

#[test]
fn a_packet_that_is_too_long_and_may_be_cut_goes_through_a_tunnel_in_pieces() {
    for (mode, crossed) in TUNNELS.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mut rig = gateway(mode, crossed);
        let data: Vec<u8> = (0..1472).map(|n: u16| n.to_le_bytes()[0]).collect();
        let packet = Packet { fragmentation: 0, ..Packet::udp(CLIENT, "192.0.2.101:53").payload(&data) };
        assert_eq!(rig.put(UPLINK, &packet.build()), Some(PacketOutcome::Forward(CLUSTER)));
        let pieces: Vec<_> = rig.sent(CLUSTER).iter().map(|sent| open(sent).inner).collect();
        assert_eq!(pieces.len(), 2);
        assert_eq!((word(&pieces[0], 20) & 0x2000, word(&pieces[1], 20) & 0x2000), (0x2000, 0), "more fragments");
        assert!(pieces.iter().all(|piece| rig::hop_limit(piece) == 62));
        assert_eq!([&pieces[0][34..], &pieces[1][34..]].concat(), one_hop_on(&packet)[34..]);
    }
}

#[test]
fn flows_spread_over_ports_labels_and_sources() {
    let rows = [(Mode::Gue, false), (Mode::Gue, true)];
    for (mode, crossed) in rows {
        let mut rig = gateway(mode, crossed);
        let mut seen = std::collections::HashSet::new();
        for n in 0..64 {
            let packet = Packet::tcp(&format!("198.51.100.7:{}", 2000 + n), VIP);
            let (first, again) = (open(&rig.forward(UPLINK, &packet.build())), open(&rig.forward(UPLINK, &packet.build())));
            let entropy = |o: &Opened| (o.udp.map(|(from, ..)| from), o.flow_label);
            assert_eq!(entropy(&first), entropy(&again), "one flow, one mode");
            seen.insert(entropy(&first));
        }
        assert!(seen.len() > 56, "{}", seen.len());
    }
}

#[test]
fn configured_sources_are_used_by_family_and_the_gue_port_too() {
    let mut config = rig::config(1024);
    config.tunnel = Tunnel { sources: ["10.0.0.5", "10.0.0.6", "fd00::5"].map(ip).to_vec(), gue_destination_port: 7000 };
    for (mode, crossed, expected) in [
        (Mode::Ipip, false, vec!["10.0.0.5", "10.0.0.6"]),
        (Mode::Gue, true, vec!["fd00::5"]),
        (Mode::Gue, false, vec!["10.0.0.5"]),
    ] {
        let state = gateway(mode, crossed).state.clone();
        let mut rig = Rig::with_config(config.clone());
        rig.state = state;
        rig.network = rig::network();
        rig.publish();
        let mut seen: Vec<_> = (0..40)
            .map(|n| {
                let opened = open(&rig.forward(UPLINK, &Packet::tcp(&format!("198.51.100.7:{}", 2000 + n), VIP).build()));
                assert!(opened.udp.is_none_or(|(_, to, _)| to == 7000));
                opened.source.to_string()
            })
            .collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen, expected);
    }
    let mut rig = Rig::with_config(config);
    rig.state = rig::state();
    rig.network = rig::network();
    rig.publish();
    let asked = dataplane::testing::arp_request([10, 0, 0, 11].into(), [10, 0, 0, 5].into());
    assert_eq!(
        rig.put(CLUSTER, &asked),
        Some(PacketOutcome::Reply(CLUSTER)),
        "an address of the gateway that the kernel does not have"
    );
    let ping = Packet::echo_request("10.0.0.11", "10.0.0.5").build();
    assert_eq!(rig.put(CLUSTER, &ping), Some(PacketOutcome::Reply(CLUSTER)));
}

#[test]
fn a_sender_learns_the_largest_packet_that_fits_into_a_tunnel() {
    let rows = [
        (Mode::Dsr, false, CLIENT, VIP, 1500),
        (Mode::Ipip, false, CLIENT, VIP, 1480),
        (Mode::Ipip, true, CLIENT, VIP, 1460),
        (Mode::Gue, false, CLIENT, VIP, 1472),
        (Mode::Gue, true, CLIENT, VIP, 1452),
        (Mode::Ipip, false, CLIENT_V6, VIP_V6, 1460),
        (Mode::Gue, true, CLIENT_V6, VIP_V6, 1472),
    ];
    for (mode, crossed, client, vip, mtu) in rows {
        let mut rig = gateway(mode, crossed);
        let head = if client == CLIENT { 40 } else { 60 };
        let of_len = |len: usize| Packet::tcp(client, vip).flags(ACK).payload(&vec![7; len - head]).build();
        assert!(rig.forward(UPLINK, &of_len(mtu)).len() <= 1514, "{mode} {mtu}");
        assert_eq!(rig.put(UPLINK, &of_len(mtu + 1)), Some(PacketOutcome::Reply(UPLINK)), "{mode} {mtu} {crossed} {vip}");
        let answer = rig.sent(UPLINK).remove(0);
        assert_checksums(&answer);
        let reported_mtu = if head == 40 { word(&answer, 40) } else { word(&answer, 60) };
        assert_eq!(usize::from(reported_mtu), mtu, "{mode}");
    }
}

#[test]
fn a_syn_announces_what_its_client_announced() {
    // It limits what the server sends, which bypasses the gateway; what enters the tunnel is limited by the server's
    // SYN-ACK.
    for (mode, crossed) in [(Mode::Dsr, false), (Mode::Ipip, false), (Mode::Ipip, true), (Mode::Gue, false), (Mode::Gue, true)] {
        for (client, vip) in [(CLIENT, VIP), (CLIENT_V6, VIP_V6)] {
            let mut rig = gateway(mode, crossed);
            let syn = with_segment_size(&Packet::tcp(client, vip), 9_000);
            let sent = rig.forward(UPLINK, &syn);
            let inner = if mode == Mode::Dsr { sent } else { open(&sent).inner };
            assert_checksums(&inner);
            assert_eq!(segment_size(&inner), Some(9_000), "{mode} {vip}");
        }
    }
}

#[test]
fn a_hop_limit_that_ends_here_is_answered() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let dying = Packet::tcp(CLIENT, VIP).hop_limit(1).build();
        assert_eq!(gateway(mode, false).put(UPLINK, &dying), Some(PacketOutcome::Reply(UPLINK)));
    }
}

#[test]
fn dsr_is_only_for_backends_on_link() {
    let behind_router = |rig: &mut Rig| {
        let via = |to: &str, via: &str| Route { to: to.parse().unwrap(), via: Some(ip(via)), link: CLUSTER.into(), weight: 1 };
        rig.network.routes.extend([10, 11, 12, 13].map(|n| via(&format!("10.0.0.{n}/32"), "10.0.0.11")));
        rig.network.routes.retain(|route| route.to.to_string() != "10.0.0.11/32");
    };
    let mut rig = gateway(Mode::Dsr, false);
    let clients: Vec<String> = (0..30).map(|n| format!("198.51.100.7:{}", 2000 + n)).collect();
    clients.iter().for_each(|client| drop(rig.forward(UPLINK, &Packet::tcp(client, VIP).build())));
    behind_router(&mut rig);
    rig.publish();
    let fates: Vec<_> = clients.iter().map(|c| rig.put(UPLINK, &Packet::tcp(c, VIP).flags(ACK).build()).unwrap()).collect();
    assert!(fates.contains(&PacketOutcome::Drop(DropReason::VipLoop)), "flows to those behind the router");
    rig.sent(CLUSTER);
    for client in &clients {
        let sent = rig.forward(UPLINK, &Packet::tcp(&client.replace(".7:", ".8:"), VIP).build());
        assert_eq!(&sent[..6], &backend_mac(11).0, "new flows only to the one that is on-link");
    }
    change(&mut rig, "web", |service| {
        service.ports.truncate(1);
        service.ports[0].backends.remove(0);
    });
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    let refused: Vec<_> = snapshot.refused().iter().filter(|(name, _)| name.name == "web").collect();
    assert!(matches!(refused[..], [(_, refusal)] if refusal.reason == Reason::Refused && refusal.message.contains("dsr")));
}

#[test]
fn a_tunnel_needs_an_address_of_the_backends_family_and_no_other_mode_does() {
    let without_v6 = |mode| {
        let rig = gateway(mode, true);
        let mut config = Config { snat: Vec::new(), ..rig::config(1024) };
        config.ports.iter_mut().for_each(|port| port.addresses.retain(|net| net.addr().is_ipv4()));
        Compiler::new(config).compile(&rig.state, &rig.network, &rig.health, 0)
    };
    for mode in TUNNELS {
        let snapshot = without_v6(mode);
        let (_, refusal) = snapshot.refused().iter().find(|(name, _)| name.name == "web").unwrap();
        assert_eq!(refusal.reason, Reason::Refused);
        assert!(refusal.message.contains("tunnel.sources"), "{}", refusal.message);
    }
    assert!(without_v6(Mode::Dsr).refused().iter().all(|(name, _)| name.name == "node-port"));
}

#[test]
fn a_tunnel_to_an_address_of_the_gateway_is_refused() {
    let mut rig = gateway(Mode::Ipip, false);
    change(&mut rig, "web", |service| service.ports[0].backends[0].address = "192.0.2.101:80".parse().unwrap());
    change(&mut rig, "web", |service| service.ports[0].backends.truncate(1));
    assert_eq!(rig.put(UPLINK, &Packet::tcp(CLIENT, VIP).build()), Some(PacketOutcome::Drop(DropReason::VipLoop)));
}

#[test]
fn packets_without_room_for_a_flow_are_forwarded_by_hash() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let state = gateway(mode, false).state.clone();
        let (mut small, mut large) = (Rig::with_flows(2), Rig::with_flows(1024));
        for rig in [&mut small, &mut large] {
            rig.state = state.clone();
            rig.publish();
        }
        for n in 0..40 {
            for flags in [tcp_flags::SYN, ACK] {
                let packet = Packet::tcp(&format!("198.51.100.7:{}", 2000 + n), VIP).flags(flags).build();
                assert_eq!(small.forward(UPLINK, &packet)[..6], large.forward(UPLINK, &packet)[..6], "{mode} {n}");
            }
        }
        assert_eq!((small.counters.flows.get(), large.counters.flows.get()), (2, 40));
    }
}

#[test]
fn established_flows_stay_when_backends_come_and_go() {
    let mut rig = gateway(Mode::Dsr, false);
    let clients: Vec<String> = (0..60).map(|n| format!("198.51.100.7:{}", 2000 + n)).collect();
    let to = |rig: &mut Rig, client: &str, flags| rig.forward(UPLINK, &Packet::tcp(client, VIP).flags(flags).build())[5];
    let before: Vec<u8> = clients.iter().map(|client| to(&mut rig, client, tcp_flags::SYN)).collect();
    change(&mut rig, "web", |service| {
        service.ports[0].backends.remove(0);
    });
    let after: Vec<u8> = clients.iter().map(|client| to(&mut rig, client, ACK)).collect();
    assert_eq!(before, after, "those on the removed backend drain");
}

/// The backends (by the last byte of the MAC) that receive mid-stream packets of 60 clients through a gateway without
/// their flows, and the backends that received their SYNs `before`.
struct MidStream {
    rig: Rig,
    clients: Vec<String>,
    before: Vec<u8>,
}

impl MidStream {
    fn new(mode: Mode) -> Self {
        let mut rig = gateway(mode, false);
        let clients: Vec<String> = (0..60).map(|n| format!("198.51.100.7:{}", 2000 + n)).collect();
        let before = clients.iter().map(|c| rig.forward(UPLINK, &Packet::tcp(c, VIP).build())[5]).collect();
        // The flows are lost, the snapshot is kept.
        let mut other = gateway(mode, false);
        other.publish();
        Self { rig: other, clients, before }
    }

    fn to(&mut self, flags: u8) -> Vec<u8> {
        let rig = &mut self.rig;
        self.clients.iter().map(|c| rig.forward(UPLINK, &Packet::tcp(c, VIP).flags(flags).build())[5]).collect()
    }
}

#[test]
fn mid_stream_packets_go_by_the_table_before_for_the_grace_and_syns_by_the_new_one() {
    for mode in [Mode::Dsr, Mode::Ipip] {
        let mut now = MidStream::new(mode);
        change(&mut now.rig, "web", |service| service.ports[0].backends.truncate(2));
        assert_eq!(now.to(ACK), now.before, "a backend that drains included");
        let mut syns = MidStream::new(mode);
        change(&mut syns.rig, "web", |service| service.ports[0].backends.truncate(2));
        assert!(!syns.to(tcp_flags::SYN).contains(&13));
        let mut late = MidStream::new(mode);
        change(&mut late.rig, "web", |service| service.ports[0].backends.truncate(2));
        late.rig.now += 61 * SECOND;
        assert!(!late.to(ACK).contains(&13), "after the grace of a removed backend");
    }
}

#[test]
fn a_table_that_grew_is_remembered_too() {
    let mut now = MidStream::new(Mode::Ipip);
    change(&mut now.rig, "web", |service| service.ports[0].maglev.size = 65_537);
    assert_eq!(now.to(ACK), now.before);
}

#[test]
fn mid_stream_packets_leave_backends_that_are_gone_or_failing() {
    let mut gone = MidStream::new(Mode::Dsr);
    change(&mut gone.rig, "web", |service| service.drain_timeout = Duration::ZERO);
    change(&mut gone.rig, "web", |service| service.ports[0].backends.truncate(2));
    gone.rig.publish();
    let after = gone.to(ACK);
    assert!(!after.contains(&13));
    assert!(gone.before.iter().zip(&after).all(|(before, after)| before == after || *before == 13), "the others stay");
    let mut failing = MidStream::new(Mode::Dsr);
    failing.rig.health.failing.insert((proto::Protocol::Tcp, "10.0.0.13:80".parse().unwrap()));
    failing.rig.publish();
    assert!(!failing.to(ACK).contains(&13));
}

#[test]
fn a_mid_stream_packet_confirms_nothing_and_a_reset_makes_no_flow() {
    let mut rig = gateway(Mode::Dsr, false);
    rig.forward(UPLINK, &Packet::tcp(CLIENT, VIP).flags(tcp_flags::RST).build());
    assert_eq!(rig.counters.flows.get(), 0);
    rig.forward(UPLINK, &Packet::tcp(CLIENT, VIP).flags(ACK).build());
    assert_eq!(rig.counters.flows.get(), 1);
    rig.now += 45 * SECOND;
    rig.settle();
    assert_eq!(rig.counters.flows.get(), 0, "the limit of one that is not confirmed is 30 s");
}

#[test]
fn the_icmp_error_of_a_router_towards_the_client_reaches_the_backend_as_it_is() {
    for (mode, known) in [Mode::Dsr, Mode::Ipip, Mode::Gue].into_iter().flat_map(|mode| [(mode, true), (mode, false)]) {
        let mut rig = gateway(mode, false);
        let wanted = rig.forward(UPLINK, &Packet::tcp(CLIENT, VIP).build())[..6].to_vec();
        if !known {
            rig = gateway(mode, false);
        }
        let reply = Packet::tcp(VIP, CLIENT).flags(ACK).payload(&[0; 100]).build();
        let error = Packet::between(ip("198.51.100.1"), ip("192.0.2.100"), Segment::Icmp { kind: 3, code: 4, rest: 1300 });
        let error = error.payload(&reply[14..14 + 28]);
        let sent = rig.forward(UPLINK, &error.build());
        let inner = if mode == Mode::Dsr { sent.clone() } else { open(&sent).inner };
        assert_eq!(inner[14..], one_hop_on(&error)[14..], "{mode}");
        assert_eq!(sent[..6], wanted, "{mode}");
    }
}

#[test]
fn fragments_go_to_the_backend_of_the_first_as_they_are() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let mut rig = gateway(mode, false);
        let whole = Packet::udp(CLIENT, "192.0.2.101:53").payload(&[7; 40]).build();
        let part = |from: usize, to: usize, more: bool| {
            let offset = u16::try_from(from / 8).unwrap() | if more { 0x2000 } else { 0 };
            let segment = Segment::Other { protocol: 17 };
            let packet = Packet::between(ip("198.51.100.7"), ip("192.0.2.101"), segment).payload(&whole[34 + from..34 + to]);
            Packet { fragmentation: offset, ..packet }
        };
        let parts = [part(0, 24, true), part(24, 48, false)];
        let sent: Vec<_> = parts.iter().map(|part| rig.forward(UPLINK, &part.build())).collect();
        for (sent, part) in sent.iter().zip(&parts) {
            let inner = if mode == Mode::Dsr { sent.clone() } else { open(sent).inner };
            assert_eq!(inner[14..], one_hop_on(part)[14..], "{mode}");
        }
        assert_eq!(sent[0][..6], sent[1][..6]);
    }
}

#[test]
fn a_probe_to_the_vip_reaches_the_backend_of_its_source_port_and_its_answer_reaches_the_kernel() {
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let mut rig = gateway(mode, false);
        rig.compiler.probe_by([(61_000, ip("10.0.0.12")), (61_001, ip("10.0.0.13"))].into_iter().collect());
        rig.publish();
        for (port, last) in [(61_000, 12), (61_001, 13)] {
            let probe = Packet::tcp(&format!("10.0.0.2:{port}"), VIP);
            rig.send_from_linux(CLUSTER, &probe.build());
            let sent = rig.sent(CLUSTER).remove(0);
            assert_eq!(sent[..6], backend_mac(last).0, "{mode}");
            let inner = if mode == Mode::Dsr { sent.clone() } else { open(&sent).inner };
            assert_eq!(inner[14..], one_hop_on(&probe)[14..], "{mode}");
            // The VIP is in the uplink's subnet, so the kernel sends to it there, and would accept answers there.
            let answer = Packet::tcp(VIP, &format!("10.0.0.2:{port}")).flags(tcp_flags::SYN | ACK).build();
            assert_eq!(rig.put(CLUSTER, &answer), Some(PacketOutcome::Linux(UPLINK)));
            assert_eq!(rig.to_linux(UPLINK), [[&UPLINK_MAC.0, &answer[6..]].concat()], "{mode}");
        }
        let loops = rig.drops(DropReason::VipLoop);
        rig.send_from_linux(CLUSTER, &Packet::tcp("10.0.0.2:61002", VIP).build());
        assert_eq!(rig.drops(DropReason::VipLoop), loops + 1, "a port that stands for none");
        let strays = [
            ("a port that stands for none", Packet::tcp(VIP, "10.0.0.2:40000")),
            ("none of Linux's addresses", Packet::tcp(VIP, "10.0.0.77:61000")),
            ("no frontend", Packet::tcp("192.0.2.100:81", "10.0.0.2:61000")),
        ];
        for (sentence, stray) in strays {
            let stray = stray.flags(tcp_flags::SYN | ACK).build();
            assert_eq!(rig.put(CLUSTER, &stray), Some(PacketOutcome::Drop(DropReason::OwnSource)), "{sentence}");
        }
        assert_eq!(rig.counters.flows.get(), 0, "probes make no flows");
    }
}

/// The kernel may have to resolve the VIP before it can send to it, by ARP or neighbour discovery.
#[test]
fn the_kernels_request_for_a_vip_is_answered_and_never_leaves() {
    let mut rig = gateway(Mode::Ipip, false);
    let arp = |target: &str| arp_request("192.0.2.2".parse().unwrap(), target.parse().unwrap());
    let solicitation = |target: &str| {
        let mut asked = neighbour_solicitation("2001:db8::2".parse().unwrap(), target.parse().unwrap());
        asked.source_mac = UPLINK_MAC;
        asked
    };
    let again = |target: &str| {
        let mut asked = solicitation(target);
        asked.destination = ip(target);
        asked.destination_mac = UPLINK_MAC;
        asked
    };
    let questions = [arp("192.0.2.100"), solicitation("2001:db8::1:0").build(), again("2001:db8::1:0").build()];
    let replies = rig.counters.replies.get();
    for tags in [&[][..], &[0x81, 0, 0, 100]] {
        for question in &questions {
            let with = |frame: &[u8]| [&frame[..12], tags, &frame[12..]].concat();
            rig.send_from_linux(UPLINK, &with(question));
            assert!(rig.sent(UPLINK).is_empty());
            let answer = rig.to_linux(UPLINK).remove(0);
            assert_eq!((&answer[..6], &answer[6..12]), (&question[6..12], &UPLINK_MAC.0[..]));
            assert_eq!(&answer[12..12 + tags.len()], tags);
            let behind = &answer[12 + tags.len()..];
            let is_answer = if behind[..2] == [8, 6] { behind[9] == 2 } else { behind[42] == 136 };
            assert!(is_answer, "{answer:02x?}");
        }
    }
    assert_eq!(rig.counters.replies.get(), replies + 6);
    for question in [arp("192.0.2.1"), arp("192.0.2.105"), solicitation("2001:db8::ffff").build()] {
        rig.send_from_linux(UPLINK, &question);
        assert_eq!(rig.sent(UPLINK), [question], "of others");
        assert!(rig.to_linux(UPLINK).is_empty());
    }
}

#[test]
fn probes_and_their_answers_cross_a_vlan_device() {
    let mut rig = gateway(Mode::Gue, false);
    let vlan = Link::new(UPLINK, Vlan::NONE.with(TagKind::Customer, 100).unwrap());
    for route in &mut rig.network.routes {
        if route.link == UPLINK.into() {
            route.link = vlan;
        }
    }
    rig.network.vlans = vec![VlanLink { link: vlan, mtu: 1500, addresses: vec!["192.0.2.2/24".parse().unwrap()] }];
    rig.compiler.probe_by([(61_000, ip("10.0.0.12"))].into_iter().collect());
    rig.publish();
    let tagged = |frame: &[u8]| [&frame[..12], &[0x81, 0, 0, 100], &frame[12..]].concat();
    let probe = Packet::tcp("192.0.2.2:61000", VIP);
    rig.send_from_linux(UPLINK, &tagged(&probe.build()));
    assert_eq!(open(&rig.sent(CLUSTER).remove(0)).inner[14..], one_hop_on(&probe)[14..]);
    let answer = Packet::tcp(VIP, "192.0.2.2:61000").flags(tcp_flags::RST).build();
    assert_eq!(rig.put(CLUSTER, &answer), Some(PacketOutcome::Linux(UPLINK)));
    assert_eq!(rig.to_linux(UPLINK), [tagged(&[&UPLINK_MAC.0, &answer[6..]].concat())]);
    // Other packets than probes do not leave, whatever their tags.
    let loops = rig.drops(DropReason::VipLoop);
    for stray in [Packet::tcp("192.0.2.2:61001", VIP), Packet::tcp("192.0.2.2:61000", "192.0.2.110:80")] {
        rig.send_from_linux(UPLINK, &tagged(&stray.build()));
    }
    assert_eq!(rig.drops(DropReason::VipLoop), loops + 2);
    assert!(rig.sent(UPLINK).is_empty());
}
