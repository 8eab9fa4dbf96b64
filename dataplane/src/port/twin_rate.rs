//! The rate limit of packets to the kernel: a flood of packets without frontend must not overload the machine that
//! answers ARP, carries routing sessions and sends probes, nor delay that traffic.
//!
//! Each class of packets has a rate of its own that no other class can use, and may exceed it from what [`Class::Rest`]
//! leaves.
//!
//! **Invariant:** packets of unknown exchanges ([`Class::Rest`]) never take from the rate of another class.
//!
//! Not here: packets that never go to the kernel, which the decision drops.

use super::token_bucket::TokenBucket;
use super::twin::KernelExchanges;
use crate::wire::{Headers, Parsed, Transport, Tuple, icmpv6, parse};

/// ARP for IPv4 over Ethernet: offset of the operation in an untagged frame, and the operation "reply" (RFC 826).
const ARP_OPERATION: std::ops::Range<usize> = 20..22;
const ARP_REPLY: [u8; 2] = [0, 2];
/// Types of ICMPv6 that are neighbour discovery (RFC 4861 section 4).
const NEIGHBOUR_DISCOVERY: std::ops::RangeInclusive<u8> = 133..=137;
/// Protocols that routers speak over IP itself: EIGRP, OSPF, PIM, VRRP.
const ROUTING_PROTOCOLS: [u8; 4] = [88, 89, 103, 112];
/// Ports of routing protocols over TCP or UDP: BGP, RIP, RIPng, LDP, BFD (RFC 5881, 5883, 7130).
const ROUTING_PORTS: [u16; 8] = [179, 520, 521, 646, 3784, 3785, 4784, 6784];

/// Class of a packet for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Answers to the kernel's ARP and neighbour requests: without them nothing can be sent. Hosts send them only on
    /// request, so a flood of requests is not a flood of these.
    Resolution,
    /// Requests for the kernel's Ethernet addresses.
    Question,
    /// Routing protocols.
    Routing,
    /// Packets of exchanges that the kernel has begun, above all replies to probes.
    Answer,
    /// Everything else.
    Rest,
}

/// Packets per second of each class, in the order of [`Class`]. The kernel takes some 500,000 packets a second from a
/// tap on one core; a tenth of that for all classes leaves room for several workers and the other work of that core.
/// 2,000 answered requests are four /24 full of hosts; 8,000 packets of routing protocols carry 80 Mbit/s of BGP;
/// 20,000 replies are 10,000 probes of two packets each.
const PER_SECOND: [u32; 5] = [2_000, 2_000, 8_000, 20_000, 18_000];
/// The token buckets of one worker, for all its twins.
#[derive(Debug, Default)]
pub(crate) struct TwinRate {
    buckets: [TokenBucket; PER_SECOND.len()],
}

impl TwinRate {
    /// Whether one more packet of this class may go to the kernel now.
    pub(crate) fn allow(&mut self, class: Class, now_ns: u64) -> bool {
        let mut take = |class: Class| {
            let bucket = &mut self.buckets[class as usize];
            let after = bucket.after_one(now_ns, PER_SECOND[class as usize]);
            *bucket = after.unwrap_or(*bucket);
            after.is_some()
        };
        take(class) || (class != Class::Rest && take(Class::Rest))
    }
}

/// The class of a frame. `begun`: the exchanges that the kernel has begun through the port on which the frame arrived.
pub(crate) fn class(frame: &[u8], begun: &KernelExchanges) -> Class {
    match parse(frame) {
        Ok(Parsed::Arp) if frame.get(ARP_OPERATION) == Some(&ARP_REPLY) => Class::Resolution,
        Ok(Parsed::Arp) => Class::Question,
        Ok(Parsed::V4(headers)) if is_routing(&headers.tuple) => Class::Routing,
        Ok(Parsed::V6(headers)) if is_routing(&headers.tuple) => Class::Routing,
        Ok(Parsed::V4(headers)) => exchange_class(begun.knows(&headers)),
        Ok(Parsed::V6(headers)) => of_ipv6(&headers, begun),
        // Frames of VLAN devices, and protocols other than IP, among them IS-IS and the spanning tree.
        Ok(Parsed::Other) | Err(_) => Class::Rest,
    }
}

fn of_ipv6(headers: &Headers<u128>, begun: &KernelExchanges) -> Class {
    match headers.transport {
        Transport::Icmp { kind: icmpv6::NEIGHBOUR_ADVERTISEMENT, .. } => Class::Resolution,
        Transport::Icmp { kind, .. } if NEIGHBOUR_DISCOVERY.contains(&kind) => Class::Question,
        _ => exchange_class(begun.knows(headers)),
    }
}

const fn exchange_class(is_known: bool) -> Class {
    if is_known { Class::Answer } else { Class::Rest }
}

fn is_routing<A>(tuple: &Tuple<A>) -> bool {
    ROUTING_PROTOCOLS.contains(&tuple.protocol)
        || ROUTING_PORTS.contains(&tuple.destination_port)
        || ROUTING_PORTS.contains(&tuple.source_port)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::testing::{Packet, Segment, arp_request, neighbour_solicitation};

    fn allowed(rate: &mut TwinRate, class: Class, from_ns: u64, per_ms: usize) -> u64 {
        (0..1000).map(|ms| (0..per_ms).filter(|_| rate.allow(class, from_ns + ms * 1_000_000)).count() as u64).sum()
    }

    #[test]
    fn the_rest_gets_a_burst_and_then_its_rate() {
        let mut rate = TwinRate::default();
        let expected = u64::from(PER_SECOND[Class::Rest as usize]);
        let at_once = (0..2 * expected).filter(|_| rate.allow(Class::Rest, 1)).count() as u64;
        assert_eq!(at_once, expected / 10, "a burst of 100 ms");
        let in_one_second = allowed(&mut rate, Class::Rest, 1, 200);
        assert!((expected - 100..=expected).contains(&in_one_second), "{in_one_second}");
    }

    #[test]
    fn a_class_has_its_own_rate_under_a_flood_of_the_rest_and_more_without() {
        let classes = [Class::Resolution, Class::Question, Class::Routing, Class::Answer];
        for (class, per_second) in classes.into_iter().zip(PER_SECOND.map(u64::from)) {
            let mut rate = TwinRate::default();
            let own = (0..1000).map(|ms| {
                let at = ms * 1_000_000;
                (0..200).for_each(|_| _ = rate.allow(Class::Rest, at));
                (0..100).filter(|_| rate.allow(class, at)).count() as u64
            });
            let own: u64 = own.sum();
            assert!(own >= per_second, "{class:?}: {own}");
            let mut rate = TwinRate::default();
            let alone = allowed(&mut rate, class, 0, 100);
            assert!(alone >= per_second + u64::from(PER_SECOND[Class::Rest as usize]), "{class:?}: {alone}");
        }
    }

    #[test]
    fn frames_are_classified_by_their_headers() {
        let begun = KernelExchanges::default();
        let ospf = Packet::between("192.0.2.1".parse().unwrap(), "224.0.0.5".parse().unwrap(), Segment::Other { protocol: 89 });
        let question = || arp_request(Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
        let solicitation = neighbour_solicitation("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap());
        let mut arp_reply = question();
        arp_reply[ARP_OPERATION].copy_from_slice(&ARP_REPLY);
        let advertisement = Segment::Icmp { kind: 136, code: 0, rest: 0 };
        let advertisement = Packet::between("fe80::1".parse().unwrap(), "2001:db8::2".parse().unwrap(), advertisement);
        let rows = [
            (question(), Class::Question),
            (arp_reply, Class::Resolution),
            (solicitation.build(), Class::Question),
            (advertisement.payload(&[0; 16]).build(), Class::Resolution),
            (Packet::tcp("192.0.2.1:179", "192.0.2.2:40000").build(), Class::Routing),
            (Packet::tcp("[2001:db8::1]:40000", "[2001:db8::2]:179").build(), Class::Routing),
            (Packet::udp("192.0.2.1:49152", "192.0.2.2:3784").build(), Class::Routing),
            (ospf.payload(&[0; 24]).build(), Class::Routing),
            (Packet::tcp("192.0.2.9:80", "192.0.2.2:40000").build(), Class::Rest),
            (Packet::echo_request("192.0.2.9", "192.0.2.2").build(), Class::Rest),
            (vec![0; 60], Class::Rest),
        ];
        for (frame, expected) in rows {
            assert_eq!(class(&frame, &begun), expected, "{frame:02x?}");
        }
    }
}
