//! Echo replies (RFC 792, RFC 4443 section 4.2): the request sent back with its data, options and identification.

use proto::Family;

use crate::checksum::{apply, word_delta};
use crate::wire::{Ethernet, Icmp, Ipv4, Ipv6, icmpv4, icmpv6, take_mut};
use crate::{Address, Buffer, Headers, Transport};

use super::HOP_LIMIT;

/// Turns an echo request into the reply. False when it is none.
#[must_use]
pub fn echo_reply<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>) -> bool {
    let (request, reply) = match A::FAMILY {
        Family::V4 => (icmpv4::ECHO_REQUEST, icmpv4::ECHO_REPLY),
        Family::V6 => (icmpv6::ECHO_REQUEST, icmpv6::ECHO_REPLY),
    };
    let is_request = matches!(headers.transport, Transport::Icmp { kind, code: 0 } if kind == request);
    is_request && turn(buffer.bytes_mut(), headers, request, reply).is_some()
}

/// All views are taken before the first byte is written.
fn turn<A: Address>(frame: &mut [u8], headers: &Headers<A>, request: u8, reply: u8) -> Option<()> {
    let (head, message) = frame.split_at_mut_checked(usize::from(headers.transport_offset))?;
    let (icmp, _) = take_mut::<Icmp>(message)?;
    let (ethernet, packet) = take_mut::<Ethernet>(head)?;
    match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(packet)?;
            let before = u16::from_be_bytes([ip.ttl, ip.protocol]);
            let after = u16::from_be_bytes([HOP_LIMIT, ip.protocol]);
            // Swapping the addresses changes no sum.
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
    ethernet.turn();
    icmp.kind = reply;
    let delta = word_delta(u16::from_be_bytes([request, 0]), u16::from_be_bytes([reply, 0]));
    icmp.checksum.set(apply(icmp.checksum.get(), delta));
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::tests::{Bytes, v4, v6};
    use crate::testing::{OUR_MAC, PEER_MAC, Packet, Segment};

    /// The reply built from nothing.
    fn expected(request: &Packet, kind: u8) -> Vec<u8> {
        let segment = Segment::Icmp { kind, code: 0, rest: 0x0007_0001 };
        Packet {
            source: request.destination,
            destination: request.source,
            source_mac: OUR_MAC,
            destination_mac: PEER_MAC,
            hop_limit: 64,
            segment,
            ..request.clone()
        }
        .build()
    }

    #[test]
    fn an_echo_request_becomes_its_reply() {
        for hop_limit in [1, 63, 64, 255] {
            let mut request = Packet::echo_request("198.51.100.7", "192.0.2.100").hop_limit(hop_limit);
            request.padding = 4;
            request.options = vec![1, 1, 1, 0];
            let mut buffer = Bytes::new(request.build());
            let headers = v4(&buffer.frame);
            assert!(echo_reply(&mut buffer, &headers));
            assert_eq!(buffer.frame, expected(&request, 0));

            let request = Packet::echo_request("2001:db8::7", "2001:db8::100").hop_limit(hop_limit);
            let mut buffer = Bytes::new(request.build());
            let headers = v6(&buffer.frame);
            assert!(echo_reply(&mut buffer, &headers));
            assert_eq!(buffer.frame, expected(&request, 129));
        }
    }

    #[test]
    fn what_is_no_echo_request_stays_what_it_is() {
        let code = Segment::Icmp { kind: 8, code: 1, rest: 0 };
        for packet in [
            Packet::tcp("198.51.100.7:5555", "192.0.2.100:80"),
            Packet { segment: code, ..Packet::echo_request("198.51.100.7", "192.0.2.100") },
        ] {
            let mut buffer = Bytes::new(packet.build());
            let headers = v4(&buffer.frame);
            assert!(!echo_reply(&mut buffer, &headers));
            assert_eq!(buffer.frame, packet.build());
        }
    }
}
