//! ICMP errors about packets of shifted flows: they quote what their receiver has sent.

use dataplane::tcp_flags::{ACK, PSH};
use dataplane::testing::{Packet, Segment, assert_checksums};
use proto::Family;

use super::bridge::{Bridge, Kind};
use crate::rig::{CLUSTER, UPLINK};

/// An error of a router behind the gateway about a packet that left for the backend, whose next link has this MTU.
fn too_big(frame: &[u8], router: &str, mtu: u32, quoted: usize) -> Vec<u8> {
    let is_v4 = frame[12..14] == [8, 0];
    let source = if is_v4 {
        std::net::IpAddr::from(<[u8; 4]>::try_from(&frame[26..30]).unwrap())
    } else {
        <[u8; 16]>::try_from(&frame[22..38]).unwrap().into()
    };
    let (kind, code) = if is_v4 { (3, 4) } else { (2, 0) };
    let segment = Segment::Icmp { kind, code, rest: mtu };
    Packet::between(router.parse().unwrap(), source, segment).payload(&frame[14..14 + quoted]).build()
}

#[test]
fn a_quoted_number_is_the_clients() {
    for kind in Kind::all() {
        let is_v4 = kind.family == Family::V4;
        let (router, network_len) = if is_v4 { ("10.0.0.11", 20) } else { ("fd00::11", 40) };
        for quoted in [network_len + 8, network_len + 40] {
            let mut bridge = Bridge::new(kind);
            bridge.open(&[]);
            let first = bridge.of_client(ACK | PSH, 0, 0).with_data(&[b'x'; 1300]);
            let sent = bridge.client_sends(&first);
            let with_header = sent.to_backend[0].clone();
            let taken = bridge.of_backend(ACK, 0, bridge.h());
            bridge.backend_sends(&taken);
            let later = bridge.client_sends(&bridge.of_client(ACK | PSH, 1300, 0).with_data(&[b'y'; 1300]));
            let h = u16::try_from(bridge.h()).unwrap();
            // A segment that carried the header may be as much shorter.
            let rows = [(with_header, 0, 1400 - h), (later.to_backend[0].clone(), 1300, 1400)];
            for (frame, sequence, mtu) in rows {
                // Routers are behind the link of the backend.
                let error = too_big(&frame, router, 1400, quoted);
                let sent = bridge.put(CLUSTER, &error);
                let frame = &sent.to_client[0];
                assert_checksums(frame);
                let message = 14 + network_len;
                let field = |at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().unwrap());
                assert_eq!(field(message + 4) & 0xffff, u32::from(mtu), "{kind:?}: MTU");
                let number = field(message + 8 + network_len + 4);
                assert_eq!(number, bridge.first().wrapping_add(sequence), "{kind:?}: quoted {quoted}");
            }
        }
    }
}

#[test]
fn the_mtu_for_datagrams_leaves_room_for_their_header() {
    let mut bridge = Bridge::new(Kind::V2);
    let question = Packet::udp(&bridge.client.to_string(), "192.0.2.101:53").payload(&[b'x'; 1300]);
    let frame = bridge.put(UPLINK, &question.build()).to_backend.remove(0);
    let sent = bridge.put(CLUSTER, &too_big(&frame, "10.0.0.11", 1200, 28));
    assert_checksums(&sent.to_client[0]);
    assert_eq!(sent.to_client[0][40..42], (1200 - 28_u16).to_be_bytes());
}
