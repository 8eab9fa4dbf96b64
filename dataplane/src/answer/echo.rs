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
