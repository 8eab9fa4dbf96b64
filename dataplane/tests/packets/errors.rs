//! ICMP errors about packets of flows: they reach the sender of the packet, and quote it as that sender sent it.

use std::net::{IpAddr, SocketAddr};

use dataplane::testing::{Packet, Segment, assert_checksums, fragments};
use dataplane::{DropReason, PacketOutcome, PortIndex, tcp_flags};
use proptest::prelude::*;
use proto::Mode;

use crate::rig::{self, CLUSTER, Rig, SECOND, UPLINK, ends, hop_limit, ip};

const ACK: u8 = tcp_flags::ACK;

/// A client, its frontend, a router towards the client, and one towards the backends. TCP and UDP in both families.
struct FlowMode {
    client: &'static str,
    vip: &'static str,
    far: &'static str,
    near: &'static str,
    snat: &'static str,
}

const V4: FlowMode =
    FlowMode { client: "198.51.100.7:5555", vip: "192.0.2.100:80", far: "203.0.113.1", near: "10.0.0.99", snat: "10.0.0.3" };
const V4_UDP: FlowMode = FlowMode { vip: "192.0.2.101:53", ..V4 };
const V6: FlowMode = FlowMode {
    client: "[2001:db8:1::7]:5555",
    vip: "[2001:db8::1:0]:80",
    far: "2001:db8:9::1",
    near: "fd00::99",
    snat: "fd00::3",
};
const V6_UDP: FlowMode = FlowMode { vip: "[2001:db8::1:1]:53", ..V6 };
const WAYS: [FlowMode; 4] = [V4, V4_UDP, V6, V6_UDP];

impl FlowMode {
    fn is_tcp(&self) -> bool {
        self.vip.ends_with("80")
    }

    fn packet(&self, from: &str, to: &str, flags: u8) -> Packet {
        let packet = if self.is_tcp() { Packet::tcp(from, to).flags(flags) } else { Packet::udp(from, to) };
        packet.payload(b"some data that is longer than eight bytes")
    }

    /// Opens a flow; returns its SNAT address and port and its backend.
    fn open(&self, rig: &mut Rig) -> (SocketAddr, SocketAddr) {
        ends(&rig.forward(UPLINK, &self.packet(self.client, self.vip, tcp_flags::SYN).build()))
    }
}

/// Types, codes and second words of errors: unreachable, too big, time exceeded, parameter problem.
fn errors(is_v4: bool) -> [(u8, u8, u32); 4] {
    if is_v4 { [(3, 1, 0), (3, 4, 1300), (11, 0, 0), (12, 0, 9 << 24)] } else { [(1, 0, 0), (2, 0, 1300), (3, 0, 0), (4, 1, 40)] }
}

/// An error from `source` about the IP packet `packet`, of which it quotes `quoted` bytes.
fn error(source: &str, destination: IpAddr, numbers: (u8, u8, u32), packet: &[u8], quoted: usize) -> Packet {
    let (kind, code, rest) = numbers;
    let packet = &packet[14..];
    Packet::between(ip(source), destination, Segment::Icmp { kind, code, rest }).payload(&packet[..quoted.min(packet.len())])
}

/// The quote of an error that leaves.
fn quote(frame: &[u8]) -> &[u8] {
    if frame[12..14] == [8, 0] { &frame[42..] } else { &frame[62..] }
}

fn addresses(frame: &[u8]) -> (IpAddr, IpAddr) {
    let (source, destination) = ends(frame);
    (source.ip(), destination.ip())
}

#[test]
fn an_error_of_the_backends_side_reaches_the_client_and_quotes_what_it_sent() {
    for mode in WAYS {
        for numbers in errors(mode.client.starts_with('1')) {
            let mut rig = Rig::new();
            let (snat, backend) = mode.open(&mut rig);
            for source in [mode.near.to_owned(), backend.ip().to_string()] {
                let sent = mode.packet(&snat.to_string(), &backend.to_string(), ACK).hop_limit(60).build();
                let came = mode.packet(mode.client, mode.vip, ACK).hop_limit(60).build();
                for quoted in [28, 36, 48, 60, 1000] {
                    let quoted = if snat.is_ipv4() { quoted } else { quoted + 20 };
                    let left = rig.forward(CLUSTER, &error(&source, snat.ip(), numbers, &sent, quoted).build());
                    assert_checksums(&left);
                    assert_eq!(quote(&left), &came[14..][..quoted.min(came.len() - 14)], "{numbers:?} {quoted}");
                    let vip: SocketAddr = mode.vip.parse().unwrap();
                    let client: SocketAddr = mode.client.parse().unwrap();
                    assert_eq!(addresses(&left), (vip.ip(), client.ip()));
                    assert_eq!(hop_limit(&left), 62);
                    let at = if snat.is_ipv4() { 34 } else { 54 };
                    assert_eq!(
                        (left[at], left[at + 1], &left[at + 4..at + 8]),
                        (numbers.0, numbers.1, &numbers.2.to_be_bytes()[..])
                    );
                }
            }
        }
    }
}

#[test]
fn an_error_of_the_clients_side_reaches_the_backend_from_the_snat_address() {
    for mode in WAYS {
        for numbers in errors(mode.client.starts_with('1')) {
            let mut rig = Rig::new();
            let (snat, backend) = mode.open(&mut rig);
            let vip: SocketAddr = mode.vip.parse().unwrap();
            let sent = mode.packet(mode.vip, mode.client, ACK).hop_limit(50).build();
            let came = mode.packet(&backend.to_string(), &snat.to_string(), ACK).hop_limit(50).build();
            for source in [mode.far.to_owned(), mode.client.parse::<SocketAddr>().unwrap().ip().to_string()] {
                let left = rig.forward(UPLINK, &error(&source, vip.ip(), numbers, &sent, 1000).build());
                assert_checksums(&left);
                assert_eq!(quote(&left), &came[14..]);
                assert_eq!(addresses(&left), (ip(mode.snat), backend.ip()));
            }
        }
    }
}

/// A large answer over UDP leaves in fragments, and a router near the client has a smaller MTU.
#[test]
fn an_error_about_a_first_fragment_reaches_the_backend_and_one_about_a_later_fragment_does_not() {
    for mode in [V4_UDP, V6_UDP] {
        let mut rig = Rig::new();
        let (snat, backend) = mode.open(&mut rig);
        let vip: SocketAddr = mode.vip.parse().unwrap();
        let parts = |from: &str, to: &str| fragments(&Packet::udp(from, to).payload(&[7; 2000]).hop_limit(50).build(), 1200, 9);
        let sent = parts(mode.vip, mode.client);
        let came = parts(&backend.to_string(), &snat.to_string());
        let numbers = errors(mode.client.starts_with('1'))[1];
        let left = rig.forward(UPLINK, &error(mode.far, vip.ip(), numbers, &sent[0], 1000).build());
        assert_checksums(&left);
        assert_eq!(quote(&left), &came[0][14..][..1000]);
        assert_eq!(addresses(&left), (ip(mode.snat), backend.ip()));
        let later = error(mode.far, vip.ip(), numbers, &sent[1], 1000).build();
        assert_eq!(rig.put(UPLINK, &later), Some(PacketOutcome::Drop(DropReason::IcmpUnmatched)));
    }
}

#[test]
fn in_mode_dnat_the_backend_gets_errors_from_the_router_itself() {
    let mut rig = Rig::with_mode(Mode::Dnat);
    let (client, backend) = V4.open(&mut rig);
    let sent = V4.packet(V4.vip, V4.client, ACK).hop_limit(50).build();
    let came = V4.packet(&backend.to_string(), &client.to_string(), ACK).hop_limit(50).build();
    let left = rig.forward(UPLINK, &error(V4.far, ip("192.0.2.100"), (3, 4, 1300), &sent, 1000).build());
    assert_checksums(&left);
    assert_eq!((quote(&left), addresses(&left)), (&came[14..], (ip(V4.far), backend.ip())));
    // An error about a packet to the backend is sent to the client's own address.
    let sent = V4.packet(&client.to_string(), &backend.to_string(), ACK).hop_limit(50).build();
    let came = V4.packet(V4.client, V4.vip, ACK).hop_limit(50).build();
    let left = rig.forward(CLUSTER, &error(V4.near, client.ip(), (3, 4, 1300), &sent, 1000).build());
    assert_checksums(&left);
    assert_eq!((quote(&left), addresses(&left)), (&came[14..], (ip("192.0.2.100"), client.ip())));
}

struct Row {
    sentence: &'static str,
    port: PortIndex,
    frame: Vec<u8>,
    outcome: PacketOutcome,
}

#[test]
fn errors_without_a_flow_and_possibly_forged_ones_are_not_forwarded() {
    use DropReason as R;
    let unreachable = (3, 1, 0);
    let mut rig = Rig::new();
    let (snat, backend) = V4.open(&mut rig);
    let vip = ip("192.0.2.100");
    let about = |from: &str, to: &str| V4.packet(from, to, ACK).build();
    let sent = about(&snat.to_string(), &backend.to_string());
    let reply = about(V4.vip, V4.client);
    let later_fragment = Packet { fragmentation: 0x0010, ..V4.packet(&snat.to_string(), &backend.to_string(), ACK) }.build();
    let gre = Packet { segment: Segment::Other { protocol: 47 }, ..V4.packet(V4.vip, V4.client, ACK) }.build();
    let row = |sentence, port, packet: Packet, outcome| Row { sentence, port, frame: packet.build(), outcome };
    let drop = PacketOutcome::Drop;
    let rows = [
        row(
            "a tuple that has no flow",
            CLUSTER,
            error(V4.near, snat.ip(), unreachable, &about("10.0.0.3:1", "10.0.0.11:8080"), 100),
            drop(R::IcmpUnmatched),
        ),
        row(
            "sent to another than the quoted sender",
            CLUSTER,
            error(V4.near, vip, unreachable, &sent, 100),
            drop(R::IcmpUnmatched),
        ),
        row("a later fragment", CLUSTER, error(V4.near, snat.ip(), unreachable, &later_fragment, 100), drop(R::IcmpUnmatched)),
        row("a quote cut before the ports", CLUSTER, error(V4.near, snat.ip(), unreachable, &sent, 27), drop(R::IcmpUnmatched)),
        row("a protocol without ports", UPLINK, error(V4.far, vip, unreachable, &gre, 100), drop(R::IcmpUnmatched)),
        row("a redirect", UPLINK, error(V4.far, vip, (5, 1, 0), &reply, 100), drop(R::IcmpUnmatched)),
        row("source quench", UPLINK, error(V4.far, vip, (4, 0, 0), &reply, 100), drop(R::IcmpUnmatched)),
        row("a VIP as source", UPLINK, error("192.0.2.101", vip, unreachable, &reply, 100), drop(R::OwnSource)),
        row(
            "of the backend's side by the client's port",
            UPLINK,
            error(V4.near, snat.ip(), unreachable, &sent, 100),
            drop(R::SnatWrongPort),
        ),
        row("its last hop", UPLINK, error(V4.far, vip, unreachable, &reply, 100).hop_limit(1), drop(R::AnswerLimited)),
        row(
            "for the twin, about what Linux sent",
            UPLINK,
            error(V4.far, ip("192.0.2.2"), unreachable, &about("192.0.2.2:40000", V4.client), 100),
            PacketOutcome::Linux(UPLINK),
        ),
    ];
    for Row { sentence, port, frame, outcome } in rows {
        assert_eq!(rig.put(port, &frame), Some(outcome), "{sentence}");
    }
    // None of these had an effect.
    assert!(matches!(rig.put(UPLINK, &about(V4.client, V4.vip)), Some(PacketOutcome::Forward(CLUSTER))));
}

#[test]
fn an_error_about_a_node_port_flow_does_not_go_to_the_kernel() {
    let mut rig = Rig::new();
    let mode = FlowMode { vip: "192.0.2.2:30080", ..V4 };
    let (_, backend) = ends(&rig.forward(UPLINK, &Packet::tcp(mode.client, mode.vip).build()));
    let about = Packet::tcp(mode.vip, mode.client).flags(ACK).build();
    let left = rig.forward(UPLINK, &error(mode.far, ip("192.0.2.2"), (3, 4, 1300), &about, 28).build());
    assert_eq!(addresses(&left).1, backend.ip());
}

#[test]
fn an_error_neither_ends_a_flow_nor_keeps_it() {
    let mut rig = Rig::new();
    let (snat, backend) = V4_UDP.open(&mut rig);
    let sent = V4_UDP.packet(&snat.to_string(), &backend.to_string(), ACK).build();
    let error = error(V4.near, snat.ip(), (3, 3, 0), &sent, 28).build();
    // A minute after its last packet an unanswered flow ends, whatever errors came meanwhile.
    for _ in 0..59 {
        rig.now += SECOND;
        assert_eq!(rig.put(CLUSTER, &error), Some(PacketOutcome::Forward(UPLINK)));
    }
    rig.now += 2 * SECOND;
    assert_eq!(rig.put(CLUSTER, &error), Some(PacketOutcome::Drop(DropReason::IcmpUnmatched)));
}

#[test]
fn an_error_waits_for_its_next_hop_as_any_packet() {
    let mut rig = Rig::new();
    let (_, backend) = V4.open(&mut rig);
    rig.network.neighbours.retain(|n| n.address != backend.ip());
    rig.publish();
    let about = V4.packet(V4.vip, V4.client, ACK).build();
    let error = error(V4.far, ip("192.0.2.100"), (3, 4, 1300), &about, 28).build();
    assert_eq!(rig.put(UPLINK, &error), None);
    assert_eq!(rig.counters.held.get(), 1);
    rig.network = rig::network();
    let snapshot = rig.compiler.compile(&rig.state, &rig.network, &rig.health, rig.now);
    rig.publisher.publish(snapshot);
    rig.worker.poll(rig.now);
    assert_eq!(addresses(&rig.sent(CLUSTER).pop().unwrap()).1, backend.ip());
}

#[test]
fn udp_without_checksum_is_quoted_without_checksum() {
    let mut rig = Rig::new();
    let (snat, backend) = V4_UDP.open(&mut rig);
    let mut packet = V4_UDP.packet(&snat.to_string(), &backend.to_string(), 0);
    let Segment::Udp { checksum, .. } = &mut packet.segment else { unreachable!() };
    *checksum = false;
    let left = rig.forward(CLUSTER, &error(V4.near, snat.ip(), (3, 3, 0), &packet.build(), 100).build());
    assert_checksums(&left);
    assert_eq!(&quote(&left)[26..28], &[0, 0]);
}

/// Quoted bytes of an SCTP packet: the ports alone, ports and part of the tag, the whole common header, more, and
/// everything.
const SCTP_QUOTED: [usize; 5] = [8, 11, 12, 20, 1000];

#[test]
fn a_quoted_sctp_packet_has_the_checksum_that_its_sender_gave_it() {
    for mode in [V4, V6] {
        let network_len = if mode.snat.contains(':') { 40 } else { 20 };
        let mut rig = Rig::new();
        let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::sctp(mode.client, mode.vip).build()));
        let chunk = |from: &str, to: &str| Packet::sctp(from, to).chunk(7, 0).hop_limit(60).build();
        let vip: SocketAddr = mode.vip.parse().unwrap();
        let (snat_text, backend_text) = (snat.to_string(), backend.to_string());
        let unreachable = errors(snat.is_ipv4())[0];
        for len in SCTP_QUOTED {
            let quoted = network_len + len;
            let came = chunk(mode.client, mode.vip);
            let error_back = error(mode.near, snat.ip(), unreachable, &chunk(&snat_text, &backend_text), quoted);
            let left = rig.forward(CLUSTER, &error_back.build());
            assert_checksums(&left);
            // A partly quoted checksum cannot be restored.
            let whole = if len < 12 { network_len + 8 } else { quoted.min(came.len() - 14) };
            assert_eq!(quote(&left)[..whole], came[14..][..whole], "{len} bytes, to the client");
            let came = chunk(&backend_text, &snat_text);
            let error_on = error(mode.far, vip.ip(), unreachable, &chunk(mode.vip, mode.client), quoted);
            let left = rig.forward(UPLINK, &error_on.build());
            assert_checksums(&left);
            assert_eq!(quote(&left)[..whole], came[14..][..whole], "{len} bytes, to the backend");
        }
    }
}

#[test]
fn the_checksum_of_sctp_in_a_quoted_fragment_is_left_alone() {
    let mut rig = Rig::new();
    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::sctp(V4.client, V4.vip).build()));
    let first = Packet { fragmentation: 0x2000, ..Packet::sctp(&snat.to_string(), &backend.to_string()).chunk(7, 0) }.build();
    let left = rig.forward(CLUSTER, &error(V4.near, snat.ip(), (11, 1, 0), &first, 1000).build());
    assert_checksums(&left);
    assert_eq!(quote(&left)[28..32], first[42..46], "the length of the packet is unknown");

    let (snat, backend) = ends(&rig.forward(UPLINK, &Packet::sctp(V6.client, V6.vip).build()));
    let whole =
        Packet::sctp(&snat.to_string(), &backend.to_string()).chunk(7, 0).payload(&[[0, 3, 0, 44].as_slice(), &[7; 40]].concat());
    let first = fragments(&whole.build(), 32, 9).remove(0);
    let left = rig.forward(CLUSTER, &error(V6.near, snat.ip(), (3, 1, 0), &first, 1000).build());
    assert_checksums(&left);
    assert_eq!(quote(&left)[56..60], first[70..74], "the same over IPv6");
}

proptest! {
    /// Whole words only, since a partly quoted checksum cannot be restored.
    #[test]
    fn a_sender_gets_its_packet_quoted_as_it_sent_it(
        payload in prop::collection::vec(any::<u8>(), 0..60), half_quoted in 14_usize..60, options in 0_usize..4, client_port: u16,
        tcp: bool, hop_limit in 2_u8..,
    ) {
        let client = format!("198.51.100.7:{client_port}");
        let vip = if tcp { V4.vip } else { V4_UDP.vip };
        let packet = |from: &str, to: &str| {
            let packet = if tcp { Packet::tcp(from, to) } else { Packet::udp(from, to) };
            Packet { options: vec![1; options * 4], ..packet.payload(&payload) }
        };
        let mut rig = Rig::new();
        let (snat, backend) = ends(&rig.forward(UPLINK, &Packet { options: vec![], ..packet(&client, vip) }.build()));
        let sent = packet(&snat.to_string(), &backend.to_string()).hop_limit(hop_limit).build();
        let came = packet(&client, vip).hop_limit(hop_limit).build();
        let quoted = (2 * half_quoted + options * 4).min((sent.len() - 14) & !1);
        let left = rig.forward(CLUSTER, &error(V4.near, snat.ip(), (3, 4, 1300), &sent, quoted).build());
        assert_checksums(&left);
        prop_assert_eq!(quote(&left), &came[14..][..quoted]);
    }
}
