//! The permission to answer a packet (FORWARDING section 8). The functions that answer turn a received packet in place
//! into the answer to it: echo, ARP, neighbour discovery and ICMP errors beside this file, resets in
//! `forward::rewrite`.
//!
//! **Invariant:** an answering function that returns `false` has changed nothing. Newly written headers have correct
//! checksums and a fresh hop limit.
//!
//! Not here: whether an address belongs to the gateway, and how many answers are allowed ([`crate::AnswerLimiter`]).

use proto::Family;

use crate::wire::{Address, Headers, Transport, icmpv4, icmpv6, is_group_address, sctp_chunk, tcp_flags};

/// Whether a packet may be answered at all, by an echo reply, a reset or an ICMP error (RFC 1122 section 3.2.2, RFC
/// 4443 section 2.4): not if it was sent to a group, nor if it is an error, a reset or a fragment. A first fragment
/// could be answered, but a reset or port unreachable needs the ports, which only a whole datagram has here. ARP and
/// neighbour solicitations are sent to groups and have rules of their own.
#[must_use]
pub fn may_answer<A: Address>(headers: &Headers<A>) -> bool {
    if headers.group_frame || is_group_address(headers.tuple.destination) {
        return false;
    }
    match headers.transport {
        Transport::Tcp { flags } => flags & tcp_flags::RST == 0,
        Transport::Icmp { kind, .. } => !is_icmp_error::<A>(kind),
        Transport::Fragment => false,
        Transport::Sctp { chunk } => chunk != sctp_chunk::ABORT,
        Transport::Udp | Transport::Other => true,
    }
}

/// Whether an ICMP type is an error message about another packet. A redirect counts as one (RFC 1122 section 3.2.2, RFC
/// 4443 section 2.4 e.2).
fn is_icmp_error<A: Address>(kind: u8) -> bool {
    match A::FAMILY {
        Family::V4 => matches!(
            kind,
            icmpv4::UNREACHABLE | icmpv4::SOURCE_QUENCH | icmpv4::REDIRECT | icmpv4::TIME_EXCEEDED | icmpv4::PARAMETER_PROBLEM
        ),
        Family::V6 => kind < icmpv6::ECHO_REQUEST || kind == icmpv6::REDIRECT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Packet, Segment, v4, v6};
    use crate::wire::Mac;

    fn icmp(kind: u8) -> Packet {
        Packet { segment: Segment::Icmp { kind, code: 0, rest: 0 }, ..Packet::tcp("198.51.100.7:5", "192.0.2.100:6") }
    }

    #[test]
    fn what_may_be_answered_over_ipv4() {
        let syn = || Packet::tcp("198.51.100.7:5555", "192.0.2.100:80");
        let rows: Vec<(&str, Packet, bool)> = vec![
            ("a SYN", syn(), true),
            ("a reset", syn().flags(tcp_flags::RST), false),
            ("a reset with ACK", syn().flags(tcp_flags::RST | tcp_flags::ACK), false),
            ("a datagram", Packet::udp("198.51.100.7:5555", "192.0.2.100:53"), true),
            ("an echo request", Packet::echo_request("198.51.100.7", "192.0.2.100"), true),
            ("a timestamp request", icmp(13), true),
            ("destination unreachable", icmp(3), false),
            ("source quench", icmp(4), false),
            ("a redirect", icmp(5), false),
            ("time exceeded", icmp(11), false),
            ("parameter problem", icmp(12), false),
            ("a broadcast frame", Packet { destination_mac: Mac([0xff; 6]), ..syn() }, false),
            ("a multicast frame", Packet { destination_mac: Mac([1, 0, 0x5e, 0, 0, 1]), ..syn() }, false),
            ("a multicast address", Packet::udp("198.51.100.7:5", "224.0.0.251:5353"), false),
            ("the broadcast address", Packet::udp("198.51.100.7:68", "255.255.255.255:67"), false),
            ("a first fragment", Packet { fragmentation: 0x2000, ..syn() }, false),
            ("a later fragment", Packet { fragmentation: 0x0001, ..syn() }, false),
        ];
        for (sentence, packet, expected) in rows {
            assert_eq!(may_answer(&v4(&packet.build())), expected, "{sentence}");
        }
    }

    #[test]
    fn what_may_be_answered_over_ipv6() {
        let syn = || Packet::tcp("[2001:db8::7]:5555", "[2001:db8::100]:80");
        let icmp = |kind| Packet { segment: Segment::Icmp { kind, code: 0, rest: 0 }, ..syn() };
        let later = vec![(44, vec![0, 0, 0, 8, 0, 0, 0, 9])];
        let rows: Vec<(&str, Packet, bool)> = vec![
            ("a SYN", syn(), true),
            ("a reset", syn().flags(tcp_flags::RST), false),
            ("an echo request", icmp(128), true),
            ("an error", icmp(1), false),
            ("an error of an unknown type", icmp(127), false),
            ("a redirect", icmp(137).hop_limit(255), false),
            ("a multicast frame", Packet { destination_mac: Mac([0x33, 0x33, 0, 0, 0, 1]), ..syn() }, false),
            ("a multicast address", Packet::udp("[2001:db8::7]:5", "[ff02::1]:7"), false),
            ("a later fragment", Packet { extensions: later, ..syn() }, false),
        ];
        for (sentence, packet, expected) in rows {
            assert_eq!(may_answer(&v6(&packet.build())), expected, "{sentence}");
        }
    }
}
