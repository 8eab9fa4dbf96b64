//! Packets with IPv4 options and IPv6 extension headers: the bytes between addresses and ports are forwarded unchanged,
//! and the checksums after them are correct.

use std::net::SocketAddr;

use dataplane::testing::{Packet, Segment, assert_checksums};
use dataplane::{DropReason, Mac, PacketOutcome, tcp_flags};
use proto::Mode;

use crate::rig::{BACKENDS, CLUSTER, CLUSTER_MAC, ROUTER_MAC, Rig, UPLINK, UPLINK_MAC, backend_mac, ip};

const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";
const VIP: &str = "192.0.2.100:80";
const VIP_V6: &str = "[2001:db8::1:0]:80";
/// An option of 4 bytes to be skipped, padded to 8 (RFC 8200 section 4.2).
const SKIPPED: &[u8] = &[0, 0, 0x1e, 4, 1, 2, 3, 4];

/// Packets with something before the transport header: IPv4 options, or extension headers.
fn unusual() -> Vec<(&'static str, Packet)> {
    let v4 = |options: &[u8]| Packet { options: options.to_vec(), ..Packet::tcp(CLIENT, VIP) };
    let v6 = |extensions: &[(u8, &[u8])]| {
        let extensions = extensions.iter().map(|(number, bytes)| (*number, bytes.to_vec())).collect();
        Packet { extensions, ..Packet::tcp(CLIENT_V6, VIP_V6) }
    };
    // Next header, length in units of 8 bytes without the first, type, segments left, and type-specific data (RFC 6275,
    // 6554, 8754).
    let home = [&[0, 2, 2, 0, 0, 0, 0, 0][..], &[0x20; 16]].concat();
    let rpl = [&[0, 2, 3, 0, 0, 0, 0, 0][..], &[0x33; 16]].concat();
    let segments = [&[0, 2, 4, 0, 0, 0, 0, 0][..], &[0x44; 16]].concat();
    vec![
        ("no operation", v4(&[1, 1, 1, 1])),
        ("router alert", v4(&[148, 4, 0, 0])),
        ("record route, and the end of options", v4(&[7, 7, 4, 0, 0, 0, 0, 0])),
        ("a timestamp", v4(&[68, 12, 13, 0, 0, 0, 0, 1, 0, 0, 0, 2])),
        ("40 bytes of options", v4(&[&[0x94, 4, 0, 0][..], &[1; 36]].concat())),
        ("hop-by-hop options", v6(&[(0, SKIPPED)])),
        ("destination options", v6(&[(60, SKIPPED)])),
        ("a routing header of type 2 at its end", v6(&[(43, &home)])),
        ("a routing header of type 3 at its end", v6(&[(43, &rpl)])),
        ("a segment route at its end", v6(&[(43, &segments)])),
        ("an atomic fragment header", v6(&[(44, &[0, 0, 0, 0, 0, 0, 0, 9])])),
        ("all of them", v6(&[(0, SKIPPED), (60, SKIPPED), (43, &home), (44, &[0, 0, 0, 0, 0, 0, 0, 9]), (60, SKIPPED)])),
    ]
}

/// Offset of the transport header.
fn transport_at(packet: &Packet) -> usize {
    let network_bytes = if packet.source.is_ipv4() { 20 } else { 40 };
    14 + network_bytes + packet.options.len() + packet.extensions.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
}

/// The packet as it is expected to leave, built from scratch with other ends.
fn leaving(packet: &Packet, from: SocketAddr, to: SocketAddr, macs: [Mac; 2]) -> Vec<u8> {
    let mut packet = packet.clone().hop_limit(packet.hop_limit - 1);
    let Segment::Tcp { ports, .. } = &mut packet.segment else { unreachable!("all rows are TCP") };
    *ports = [from.port(), to.port()];
    (packet.source, packet.destination) = (from.ip(), to.ip());
    [packet.source_mac, packet.destination_mac] = macs;
    packet.build()
}

#[test]
fn headers_before_the_ports_are_forwarded_in_both_directions() {
    for (sentence, request) in unusual() {
        let v4 = request.source.is_ipv4();
        let mut rig = Rig::new();
        let sent = rig.forward(UPLINK, &request.build());
        if v4 {
            assert_checksums(&sent);
        }
        let at = transport_at(&request);
        let snat = SocketAddr::new(ip(if v4 { "10.0.0.3" } else { "fd00::3" }), u16::from_be_bytes([sent[at], sent[at + 1]]));
        let backend_of = |n: u8| SocketAddr::new(ip(&if v4 { format!("10.0.0.{n}") } else { format!("fd00::{n}") }), 8080);
        let n = BACKENDS.into_iter().find(|n| sent[..6] == backend_mac(*n).0).unwrap();
        assert_eq!(sent, leaving(&request, snat, backend_of(n), [CLUSTER_MAC, backend_mac(n)]), "{sentence}");

        let mut reply = request.clone().flags(tcp_flags::SYN | tcp_flags::ACK).payload(b"welcome");
        let Segment::Tcp { ports, .. } = &mut reply.segment else { unreachable!("all rows are TCP") };
        *ports = [8080, snat.port()];
        (reply.source, reply.destination) = (backend_of(n).ip(), snat.ip());
        let (vip, client) = (if v4 { VIP } else { VIP_V6 }, if v4 { CLIENT } else { CLIENT_V6 });
        let expected = leaving(&reply, vip.parse().unwrap(), client.parse().unwrap(), [UPLINK_MAC, ROUTER_MAC]);
        assert_eq!(rig.forward(CLUSTER, &reply.build()), expected, "back: {sentence}");
    }
}

#[test]
fn modes_that_keep_ports_forward_them_too() {
    for (sentence, request) in unusual() {
        let mut rig = Rig::with_mode(Mode::Dsr);
        let sent = rig.forward(UPLINK, &request.build());
        let n = BACKENDS.into_iter().find(|n| sent[..6] == backend_mac(*n).0).unwrap();
        let ends = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (from, to) = if request.source.is_ipv4() { (CLIENT, VIP) } else { (CLIENT_V6, VIP_V6) };
        assert_eq!(sent, leaving(&request, ends(from), ends(to), [CLUSTER_MAC, backend_mac(n)]), "dsr: {sentence}");
    }
}

#[test]
fn routes_that_a_sender_wrote_are_not_followed() {
    let routed = |kind: u8, left: u8| {
        let bytes = [&[0, 2, kind, left, 0, 0, 0, 0][..], &[0x44; 16]].concat();
        Packet { extensions: vec![(43, bytes)], ..Packet::tcp(CLIENT_V6, VIP_V6) }.build()
    };
    let v4 = |options: &[u8]| Packet { options: options.to_vec(), ..Packet::tcp(CLIENT, VIP) }.build();
    let rows = [
        ("loose source route", v4(&[131, 7, 4, 10, 0, 0, 11, 0]), DropReason::SourceRoute),
        ("strict source route behind others", v4(&[1, 137, 7, 4, 10, 0, 0, 11]), DropReason::SourceRoute),
        ("an option without length", v4(&[7, 0, 0, 0]), DropReason::Malformed),
        ("an option longer than the header", v4(&[7, 9, 4, 0]), DropReason::Malformed),
        ("routing header type 0, at its end too", routed(0, 0), DropReason::SourceRoute),
        // Its checksum covers an address that is not in the IPv6 header yet, so no frontend can accept it.
        ("routing header type 2 with a hop left", routed(2, 1), DropReason::UnsupportedProtocol),
        ("routing header type 3 with a hop left", routed(3, 1), DropReason::UnsupportedProtocol),
        ("a segment route with a hop left", routed(4, 1), DropReason::UnsupportedProtocol),
    ];
    for (sentence, frame, reason) in rows {
        let mut rig = Rig::new();
        assert_eq!(rig.put(UPLINK, &frame), Some(PacketOutcome::Drop(reason)), "{sentence}");
    }
}
