//! ICMP errors of routers inside tunnels of modes `ipip` and `gue`: the client gets an error about the packet that it
//! sent.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use dataplane::testing::{Packet, Segment, assert_checksums};
use dataplane::{DropReason, Mac, Neighbour, PacketOutcome, Tunnel, tcp_flags};
use proto::{Mode, Service, ServiceName};

use crate::rig::{self, CLUSTER, ROUTER_MAC, Rig, SECOND, UPLINK, UPLINK_MAC, ip};

const ACK: u8 = tcp_flags::ACK;
const CLIENT: &str = "198.51.100.7:5555";
const CLIENT_V6: &str = "[2001:db8:1::7]:5555";
const VIP: &str = "192.0.2.100:80";
const VIP_V6: &str = "[2001:db8::1:0]:80";

/// Modes, whether the tunnel has the other family than the packet, client and VIP: all combinations.
const TUNNELS: [(Mode, bool, &str, &str); 8] = [
    (Mode::Ipip, false, CLIENT, VIP),
    (Mode::Ipip, true, CLIENT, VIP),
    (Mode::Ipip, false, CLIENT_V6, VIP_V6),
    (Mode::Ipip, true, CLIENT_V6, VIP_V6),
    (Mode::Gue, false, CLIENT, VIP),
    (Mode::Gue, true, CLIENT, VIP),
    (Mode::Gue, false, CLIENT_V6, VIP_V6),
    (Mode::Gue, true, CLIENT_V6, VIP_V6),
];

/// A gateway whose service `web` has this mode and, on request, backends of the other family.
fn gateway(mode: Mode, crossed: bool) -> Rig {
    let mut rig = Rig::with_mode(mode);
    change(&mut rig, |service| {
        for backend in service.ports.iter_mut().flat_map(|port| &mut port.backends) {
            let last = rig::last_byte(backend.address.ip());
            let address = match backend.address.is_ipv4() {
                true if crossed => ip(&format!("fd00::{last}")),
                false if crossed => ip(&format!("10.0.0.{last:x}")),
                _ => backend.address.ip(),
            };
            backend.address = SocketAddr::new(address, backend.address.port());
        }
    });
    rig
}

fn change(rig: &mut Rig, change: impl FnOnce(&mut Service)) {
    let name = ServiceName::new("default", "web");
    let mut service = Service::clone(&rig.state.services[&name]);
    change(&mut service);
    rig.state.services.insert(name, Arc::new(service));
    rig.publish();
}

/// Type, code and second word of an error of the outer family.
type Numbers = (u8, u8, u32);

fn too_big(is_v4: bool, mtu: u32) -> Numbers {
    if is_v4 { (3, 4, mtu) } else { (2, 0, mtu) }
}

/// Addresses of the outer packet in a frame.
fn outer(frame: &[u8]) -> (IpAddr, IpAddr) {
    let (source, destination) = rig::ends(frame);
    (source.ip(), destination.ip())
}

/// An error of a router in the cluster about the packet in `frame`, of which it quotes this many bytes.
fn error(frame: &[u8], (kind, code, rest): Numbers, quoted: usize) -> Packet {
    let (source, _) = outer(frame);
    let router = ip(if source.is_ipv4() { "10.0.0.99" } else { "fd00::99" });
    let packet = &frame[14..];
    Packet::between(router, source, Segment::Icmp { kind, code, rest }).payload(&packet[..quoted.min(packet.len())])
}

/// The error that a client gets, read at fixed offsets.
#[derive(Debug, PartialEq)]
struct ClientError {
    from: IpAddr,
    to: IpAddr,
    numbers: Numbers,
    quote: Vec<u8>,
}

/// Puts an error in, and reads the error that the client gets.
fn client_error(rig: &mut Rig, error: &[u8]) -> ClientError {
    assert_eq!(rig.put(CLUSTER, error), Some(PacketOutcome::Reply(UPLINK)));
    let mut sent = rig.sent(UPLINK);
    assert_eq!((sent.len(), rig.sent(CLUSTER).len()), (1, 0));
    let frame = sent.remove(0);
    assert_checksums(&frame);
    assert_eq!((&frame[..6], &frame[6..12]), (&ROUTER_MAC.0[..], &UPLINK_MAC.0[..]));
    assert_eq!(rig::hop_limit(&frame), 64);
    let (from, to) = outer(&frame);
    let at = if frame[12..14] == [8, 0] { 34 } else { 54 };
    assert!(frame.len() <= 14 + if at == 34 { 576 } else { 1280 });
    let rest = u32::from_be_bytes(frame[at + 4..at + 8].try_into().unwrap());
    ClientError { from, to, numbers: (frame[at], frame[at + 1], rest), quote: frame[at + 8..].to_vec() }
}

fn address(text: &str) -> IpAddr {
    text.parse::<SocketAddr>().unwrap().ip()
}

/// A packet of a flow, and the frame that carried it to its backend.
fn carried(rig: &mut Rig, client: &str, vip: &str, payload: &[u8]) -> (Packet, Vec<u8>) {
    rig.forward(UPLINK, &Packet::tcp(client, vip).build());
    let packet = Packet::tcp(client, vip).flags(ACK).payload(payload);
    let sent = rig.forward(UPLINK, &packet.build());
    (packet, sent)
}

#[test]
fn a_client_gets_the_mtu_of_the_tunnel_of_its_packets() {
    for (mode, crossed, client, vip) in TUNNELS {
        let mut rig = gateway(mode, crossed);
        let (packet, sent) = carried(&mut rig, client, vip, &[7; 1300]);
        let outer_len = sent.len() - packet.build().len();
        let inner_is_v4 = packet.source.is_ipv4();
        let enough = outer_len + if inner_is_v4 { 28 } else { 48 };
        for quoted in [enough, enough + 1, 200, 548, 1232] {
            let about = error(&sent, too_big(outer(&sent).0.is_ipv4(), 1400), quoted);
            let longest = if inner_is_v4 { 548 } else { 1232 };
            let expected = ClientError {
                from: address(vip),
                to: address(client),
                numbers: too_big(inner_is_v4, u32::try_from(1400 - outer_len).unwrap()),
                quote: packet.build()[14..][..longest.min(quoted - outer_len)].to_vec(),
            };
            assert_eq!(
                client_error(&mut rig, &Packet { padding: 5, ..about }.build()),
                expected,
                "{mode} {crossed} {vip} {quoted}"
            );
        }
    }
}

#[test]
fn a_packet_lost_inside_a_tunnel_is_reported_as_host_unreachable() {
    for (mode, crossed, client, vip) in TUNNELS {
        let mut rig = gateway(mode, crossed);
        let (packet, sent) = carried(&mut rig, client, vip, b"data");
        let numbers: &[Numbers] = if outer(&sent).0.is_ipv4() {
            &[(3, 0, 0), (3, 1, 0), (3, 2, 0), (3, 3, 0), (3, 13, 0), (11, 0, 0), (11, 1, 0)]
        } else {
            &[(1, 0, 0), (1, 3, 0), (1, 4, 0), (3, 0, 0), (3, 1, 0)]
        };
        for &numbers in numbers {
            let expected = ClientError {
                from: address(vip),
                to: address(client),
                numbers: if packet.source.is_ipv4() { (3, 1, 0) } else { (1, 3, 0) },
                quote: packet.build()[14..].to_vec(),
            };
            assert_eq!(client_error(&mut rig, &error(&sent, numbers, 1000).build()), expected, "{mode} {crossed} {numbers:?}");
        }
    }
}

#[test]
fn the_mtu_that_a_client_gets_is_at_least_the_minimum_of_its_family() {
    for (mode, crossed, client, vip) in TUNNELS {
        let mut rig = gateway(mode, crossed);
        let (packet, sent) = carried(&mut rig, client, vip, b"data");
        let outer_is_v4 = outer(&sent).0.is_ipv4();
        let least = if packet.source.is_ipv4() { 68 } else { 1280 };
        for reported_mtu in [1, 68] {
            let numbers = client_error(&mut rig, &error(&sent, too_big(outer_is_v4, reported_mtu), 1000).build()).numbers;
            assert_eq!(numbers, too_big(packet.source.is_ipv4(), least), "{mode} {crossed} {reported_mtu}");
        }
        // A router older than RFC 1191 gives no MTU; an IPv4 client guesses.
        let least = if packet.source.is_ipv4() { 0 } else { 1280 };
        let numbers = client_error(&mut rig, &error(&sent, too_big(outer_is_v4, 0), 1000).build()).numbers;
        assert_eq!(numbers, too_big(packet.source.is_ipv4(), least), "{mode} {crossed}");
    }
}

#[test]
fn what_follows_a_quote_is_not_quoted_again() {
    // RFC 4884: 128 bytes of the packet, then an extension; the length is in units of 4 bytes, or of 8 over IPv6.
    for (mode, crossed, client, vip) in TUNNELS {
        let mut rig = gateway(mode, crossed);
        let (packet, sent) = carried(&mut rig, client, vip, &[7; 1000]);
        let outer_len = sent.len() - packet.build().len();
        let numbers = if outer(&sent).0.is_ipv4() { (11, 0, 32 << 16) } else { (3, 0, 16 << 24) };
        let mut error = error(&sent, numbers, 128);
        error.payload.extend([0x20, 0, 0, 0, 0, 8, 1, 1, 0xde, 0xad, 0xbe, 0xef]);
        assert_eq!(client_error(&mut rig, &error.build()).quote, packet.build()[14..][..128 - outer_len]);
        // A short packet is padded to 128 bytes.
        let (packet, sent) = carried(&mut rig, client, vip, b"data");
        error = self::error(&sent, numbers, 128);
        error.payload.resize(128, 0);
        error.payload.extend([0x20, 0, 0, 0, 0, 8, 1, 1, 0xde, 0xad, 0xbe, 0xef]);
        assert_eq!(client_error(&mut rig, &error.build()).quote, packet.build()[14..]);
    }
}

#[test]
fn a_quote_that_is_too_short_reaches_no_client() {
    for (sources, expected) in [
        (vec![], PacketOutcome::Linux(CLUSTER)),
        (["10.0.0.5", "fd00::5"].map(ip).to_vec(), PacketOutcome::Drop(DropReason::IcmpUnmatched)),
    ] {
        for (mode, crossed, client, vip) in TUNNELS {
            let state = gateway(mode, crossed).state.clone();
            let mut rig = Rig::with_config(dataplane::Config {
                tunnel: Tunnel { sources: sources.clone(), ..Tunnel::default() },
                ..rig::config(64)
            });
            (rig.state, rig.network) = (state, rig::network());
            rig.publish();
            let (packet, sent) = carried(&mut rig, client, vip, b"data");
            let enough = sent.len() - packet.build().len() + if packet.source.is_ipv4() { 28 } else { 48 };
            let numbers = too_big(outer(&sent).0.is_ipv4(), 1400);
            assert_eq!(rig.put(CLUSTER, &error(&sent, numbers, enough - 1).build()), Some(expected), "{mode} {crossed} {vip}");
            client_error(&mut rig, &error(&sent, numbers, enough).build());
        }
    }
}

#[test]
fn an_error_about_a_packet_that_the_gateway_did_not_send_is_not_forwarded() {
    let lost = (3, 1, 0);
    let mut rig = gateway(Mode::Ipip, false);
    let (_, sent) = carried(&mut rig, CLIENT, VIP, b"data");
    let backend = rig::last_byte(outer(&sent).1);
    let quote = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = sent.clone();
        change(&mut frame);
        error(&frame, lost, 1000)
    };
    let wrong_port = PacketOutcome::Drop(DropReason::SnatWrongPort);
    let linux = PacketOutcome::Linux(CLUSTER);
    let rows = [
        ("of another backend", quote(&|frame| frame[33] = if backend == 11 { 12 } else { 11 }), linux),
        ("of a port that is no frontend", quote(&|frame| frame[57] ^= 1), linux),
        ("whose inner packet has another version", quote(&|frame| frame[34] = 0x65), linux),
        ("of another protocol", quote(&|frame| frame[23] = 47), linux),
        (
            "of GUE, to a backend of mode ipip",
            quote(&|frame| {
                frame[23] = 17;
                frame.splice(34..34, [0xc0, 0, 0x17, 0xc0, 0, 64, 0, 0]);
            }),
            linux,
        ),
        ("whose inner packet the kernel sent", quote(&|frame| frame[46..50].copy_from_slice(&[10, 0, 0, 2])), linux),
        ("whose inner source is invalid", quote(&|frame| frame[46..50].copy_from_slice(&[127, 0, 0, 1])), linux),
        ("a later fragment", quote(&|frame| frame[21] = 1), linux),
        ("a parameter problem", error(&sent, (12, 0, 0), 1000), linux),
        ("a redirect", error(&sent, (5, 1, 0), 1000), linux),
    ];
    for (sentence, packet, expected) in rows {
        assert_eq!(rig.put(CLUSTER, &packet.build()), Some(expected), "{sentence}");
    }
    assert_eq!(rig.put(UPLINK, &error(&sent, lost, 1000).build()), Some(wrong_port), "from the clients' side");
    let to_vip = Packet { destination: ip("192.0.2.100"), ..error(&sent, lost, 1000) };
    assert_eq!(
        rig.put(CLUSTER, &to_vip.build()),
        Some(PacketOutcome::Drop(DropReason::IcmpUnmatched)),
        "to another than the sender"
    );
    client_error(&mut rig, &error(&sent, lost, 1000).build());
}

#[test]
fn an_error_about_a_packet_without_a_flow_follows_its_hash() {
    for mode in [Mode::Ipip, Mode::Gue] {
        let mut rig = Rig::with_flows(1);
        rig.set_mode("web", mode);
        rig.forward(UPLINK, &Packet::tcp("198.51.100.8:1", VIP).build());
        let packet = Packet::tcp(CLIENT, VIP);
        let sent = rig.forward(UPLINK, &packet.build());
        assert_eq!(rig.counters.flows.get(), 1);
        assert_eq!(client_error(&mut rig, &error(&sent, (3, 4, 1400), 1000).build()).quote, packet.build()[14..]);
    }
}

#[test]
fn errors_to_clients_keep_to_the_rate_of_answers() {
    let mut rig = gateway(Mode::Ipip, false);
    let (_, sent) = carried(&mut rig, CLIENT, VIP, b"data");
    let error = error(&sent, (3, 4, 1400), 1000).build();
    let fates: Vec<_> = (0..200).map(|_| rig.put(CLUSTER, &error).unwrap()).collect();
    assert_eq!(fates.iter().filter(|outcome| **outcome == PacketOutcome::Reply(UPLINK)).count(), 100, "a tenth of a second's");
    assert!(fates[100..].iter().all(|outcome| *outcome == PacketOutcome::Drop(DropReason::AnswerLimited)));
}

#[test]
fn an_error_waits_until_the_client_is_found() {
    let mut rig = gateway(Mode::Gue, true);
    let (packet, sent) = carried(&mut rig, "192.0.2.77:5555", VIP, b"data");
    assert_eq!(rig.put(CLUSTER, &error(&sent, (2, 0, 1400), 1000).build()), None);
    assert_eq!(rig.counters.held.get(), 1);
    let mac = Mac([2, 0, 0, 0, 0, 77]);
    rig.network.neighbours.push(Neighbour { link: UPLINK.into(), address: ip("192.0.2.77"), mac });
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    rig.publisher.publish(snapshot);
    rig.worker.poll(rig.now);
    let frame = rig.sent(UPLINK).pop().unwrap();
    assert_checksums(&frame);
    assert_eq!((&frame[..6], &frame[42..]), (&mac.0[..], &packet.build()[14..]));
}

#[test]
fn an_error_inside_a_tunnel_neither_ends_a_flow_nor_keeps_it() {
    let mut rig = gateway(Mode::Ipip, false);
    let (_, sent) = carried(&mut rig, CLIENT, VIP, b"data");
    for _ in 0..1000 {
        rig.now += SECOND;
        client_error(&mut rig, &error(&sent, (3, 1, 0), 1000).build());
        if rig.counters.flows.get() == 0 {
            return;
        }
    }
    panic!("the flow is still there after 1,000 s");
}
