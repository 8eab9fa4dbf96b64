//! Echo replies (RFC 792, RFC 4443 section 4.2): the request is sent back with its data, options and identification.
//!
//! **Invariant:** a wrong checksum stays wrong.
//!
//! Not here: which addresses the gateway answers for, and rate limits.

use proto::Family;

use crate::wire::checksum::{apply, word_delta};
use crate::wire::{Address, Buffer, Ethernet, HOP_LIMIT, Headers, Icmp, Ipv4, Ipv6, Mac, Transport, icmpv4, icmpv6, take_mut};

/// Turns an echo request into the reply, from the port with this `mac`. Returns false when the packet is no echo
/// request.
#[must_use]
pub fn echo_reply<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>, mac: Mac) -> bool {
    let (request, reply) = match A::FAMILY {
        Family::V4 => (icmpv4::ECHO_REQUEST, icmpv4::ECHO_REPLY),
        Family::V6 => (icmpv6::ECHO_REQUEST, icmpv6::ECHO_REPLY),
    };
    let is_request = matches!(headers.transport, Transport::Icmp { kind, code: 0 } if kind == request);
    is_request && turn(buffer.bytes_mut(), headers, request, reply, mac).is_some()
}

/// Takes all views before it writes the first byte.
fn turn<A: Address>(frame: &mut [u8], headers: &Headers<A>, request: u8, reply: u8, mac: Mac) -> Option<()> {
    let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    let (head, message) = frame.get_mut(..end)?.split_at_mut_checked(usize::from(headers.transport_offset))?;
    let (icmp, data) = take_mut::<Icmp>(message)?;
    let (ethernet, packet) = take_mut::<Ethernet>(head)?;
    match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(packet)?;
            let before = u16::from_be_bytes([ip.ttl, ip.protocol]);
            let after = u16::from_be_bytes([HOP_LIMIT, ip.protocol]);
            // Swapping the addresses does not change the sum.
            ip.checksum.set(apply(ip.checksum.get(), word_delta(before, after)));
            ip.ttl = HOP_LIMIT;
            std::mem::swap(&mut ip.source, &mut ip.destination);
        }
        Family::V6 => {
            let (ip, _) = take_mut::<Ipv6>(packet)?;
            ip.hop_limit = HOP_LIMIT;
            std::mem::swap(&mut ip.source, &mut ip.destination);
        }
    }
    ethernet.turn(mac);
    icmp.kind = reply;
    let delta = word_delta(u16::from_be_bytes([request, 0]), u16::from_be_bytes([reply, 0]));
    let checksum = apply(icmp.checksum.get(), delta);
    // The only message without a non-zero word: ICMPv4, which has no pseudo header, with type 0 and nothing but zeros.
    let is_all_zero = A::FAMILY == Family::V4 && checksum == 0 && icmp.rest.get() == 0 && data.iter().all(|byte| *byte == 0);
    icmp.checksum.set(if is_all_zero { 0xffff } else { checksum });
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bytes, v4, v6};
    use crate::testing::{OUR_MAC, PEER_MAC, Packet, Segment};

    /// The request turned into its reply.
    fn turned(request: &Packet) -> Packet {
        Packet {
            source: request.destination,
            destination: request.source,
            source_mac: OUR_MAC,
            destination_mac: PEER_MAC,
            hop_limit: 64,
            ..request.clone()
        }
    }

    /// The reply built from scratch.
    fn expected(request: &Packet, kind: u8) -> Vec<u8> {
        let segment = Segment::Icmp { kind, code: 0, rest: 0x0007_0001 };
        Packet { segment, ..turned(request) }.build()
    }

    #[test]
    fn an_echo_request_becomes_its_reply() {
        for hop_limit in [1, 63, 64, 255] {
            let mut request = Packet::echo_request("198.51.100.7", "192.0.2.100").hop_limit(hop_limit);
            request.padding = 4;
            request.options = vec![1, 1, 1, 0];
            let mut buffer = Bytes::new(request.build());
            let headers = v4(&buffer.frame);
            assert!(echo_reply(&mut buffer, &headers, OUR_MAC));
            assert_eq!(buffer.frame, expected(&request, 0));

            let request = Packet::echo_request("2001:db8::7", "2001:db8::100").hop_limit(hop_limit);
            let mut buffer = Bytes::new(request.build());
            let headers = v6(&buffer.frame);
            assert!(echo_reply(&mut buffer, &headers, OUR_MAC));
            assert_eq!(buffer.frame, expected(&request, 129));
        }
    }

    #[test]
    fn an_echo_of_zeros_has_the_checksum_of_a_full_computation() {
        for payload_len in [0, 1, 2, 13, 56, 1472] {
            for (source, destination, request, reply) in
                [("198.51.100.7", "192.0.2.100", 8, 0), ("2001:db8::7", "2001:db8::100", 128, 129)]
            {
                let of = |kind| Segment::Icmp { kind, code: 0, rest: 0 };
                let mut packet = Packet::echo_request(source, destination).payload(&vec![0; payload_len]);
                packet.segment = of(request);
                packet.padding = 3;
                let mut buffer = Bytes::new(packet.build());
                if reply == 0 {
                    let headers = v4(&buffer.frame);
                    assert!(echo_reply(&mut buffer, &headers, OUR_MAC));
                } else {
                    let headers = v6(&buffer.frame);
                    assert!(echo_reply(&mut buffer, &headers, OUR_MAC));
                }
                let expected = Packet { segment: of(reply), ..turned(&packet) }.build();
                assert_eq!(buffer.frame, expected, "{payload_len} zeros from {source}");
            }
        }
    }

    #[test]
    fn a_wrong_checksum_of_an_echo_stays_wrong() {
        let segment = Segment::Icmp { kind: 8, code: 0, rest: 0 };
        let packet = Packet { segment, ..Packet::echo_request("198.51.100.7", "192.0.2.100") }.payload(&[0; 8]);
        for change in [0x0001, 0x8000, 0x0800, 0xf7ff] {
            let mut frame = packet.build();
            let checksum = u16::from_be_bytes([frame[36], frame[37]]) ^ change;
            frame[36..38].copy_from_slice(&checksum.to_be_bytes());
            let mut buffer = Bytes::new(frame);
            let headers = v4(&buffer.frame);
            assert!(echo_reply(&mut buffer, &headers, OUR_MAC));
            assert_ne!(buffer.frame[36..38], [0xff, 0xff], "{change:#06x}");
        }
    }

    #[test]
    fn other_packets_are_not_changed() {
        let code = Segment::Icmp { kind: 8, code: 1, rest: 0 };
        for packet in [
            Packet::tcp("198.51.100.7:5555", "192.0.2.100:80"),
            Packet { segment: code, ..Packet::echo_request("198.51.100.7", "192.0.2.100") },
        ] {
            let mut buffer = Bytes::new(packet.build());
            let headers = v4(&buffer.frame);
            assert!(!echo_reply(&mut buffer, &headers, OUR_MAC));
            assert_eq!(buffer.frame, packet.build());
        }
    }
}
