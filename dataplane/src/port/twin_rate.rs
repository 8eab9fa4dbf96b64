//! The rate limit of packets to the kernel: a flood of packets without frontend must not overload the machine that
//! answers ARP, carries routing sessions and sends probes, nor delay that traffic.
//!
//! Each class of packets has a rate of its own that no other class can use, and may exceed it from what [`Class::Rest`]
//! leaves.
//!
//! **Invariant:** packets of unknown exchanges ([`Class::Rest`]) never take from the rate of another class, and nothing
//! that a router may have passed on is in a better class unless Linux has begun its exchange or has a session with its
//! sender.
//!
//! Not here: packets that never go to the kernel, which the decision drops, and neighbour discovery that came through a
//! router, which parsing drops.

use std::net::IpAddr;

use super::kernel_exchanges::{BFD_MULTIHOP, BGP, ForeignExchange, KernelExchanges, LDP, ROUTING_PROTOCOLS};
use super::token_bucket::TokenBucket;
use crate::wire::{Address, Headers, Parsed, Transport, icmpv6, parse, protocol};

/// ARP for IPv4 over Ethernet: offset of the operation in an untagged frame, and the operation "reply" (RFC 826).
const ARP_OPERATION: std::ops::Range<usize> = 20..22;
const ARP_REPLY: [u8; 2] = [0, 2];
/// VRRP (RFC 9568).
const VRRP: u8 = 112;
/// RIP and RIPng (RFC 2453, RFC 2080).
const RIP: [u16; 2] = [520, 521];
/// BFD on one link, and on the members of an aggregate (RFC 5881, RFC 7130).
const BFD: [u16; 2] = [3784, 6784];
/// Echoes of BFD, which a peer returns to their sender (RFC 5881 section 4).
const BFD_ECHO: u16 = 3785;
/// The hop limit that a packet cannot have after a router (RFC 5082, RFC 5881 section 5, RFC 9568 section 5.1.1.3).
const HOP_LIMIT_OF_LINK: u8 = 255;

/// Class of a packet for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Answers to the kernel's ARP and neighbour requests: without them nothing can be sent. Hosts send them only on
    /// request, so a flood of requests is not a flood of these.
    Resolution,
    /// Requests for the kernel's Ethernet addresses.
    Question,
    /// BFD, which takes a session down after a few lost packets.
    Bfd,
    /// Other routing protocols.
    Routing,
    /// Packets of exchanges that the kernel has begun, above all replies to probes.
    Answer,
    /// Everything else.
    Rest,
}

/// Packets per second of each class, in the order of [`Class`]. The kernel takes some 500,000 packets a second from a
/// tap on one core; a tenth of that for all classes leaves room for several workers and the other work of that core.
/// 2,000 answered requests are four /24 full of hosts; 2,000 packets of BFD are 100 sessions of one every 50 ms; 6,000
/// packets of routing protocols carry 60 Mbit/s of BGP; 20,000 replies are 10,000 probes of two packets each.
const PER_SECOND: [u32; 6] = [2_000, 2_000, 2_000, 6_000, 20_000, 18_000];

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

/// The class of a frame, and the exchange that it begins with the kernel, if it does. `exchanges`: those of the port on
/// which the frame arrived. `is_from_link`: whether a sender with this address is on the link of that port.
pub(crate) fn class(
    frame: &[u8],
    exchanges: &KernelExchanges,
    is_from_link: impl Fn(IpAddr) -> bool,
) -> (Class, Option<ForeignExchange>) {
    match parse(frame) {
        Ok(Parsed::Arp) if frame.get(ARP_OPERATION) == Some(&ARP_REPLY) => (Class::Resolution, None),
        Ok(Parsed::Arp) => (Class::Question, None),
        Ok(Parsed::V4(headers)) => of_ip(&headers, exchanges, is_from_link),
        Ok(Parsed::V6(headers)) => match headers.transport {
            Transport::Icmp { kind: icmpv6::NEIGHBOUR_ADVERTISEMENT, .. } => (Class::Resolution, None),
            Transport::Icmp { kind, .. } if icmpv6::NEIGHBOUR_DISCOVERY.contains(&kind) => (Class::Question, None),
            _ => of_ip(&headers, exchanges, is_from_link),
        },
        // Frames of VLAN devices, and protocols other than IP, among them IS-IS and the spanning tree.
        Ok(Parsed::Other) | Err(_) => (Class::Rest, None),
    }
}

fn of_ip<A: Address>(
    headers: &Headers<A>,
    exchanges: &KernelExchanges,
    is_from_link: impl Fn(IpAddr) -> bool,
) -> (Class, Option<ForeignExchange>) {
    if let Some(class) = routing_class(headers, exchanges, is_from_link) {
        return (class, None);
    }
    match exchanges.knows(headers) {
        Ok(()) => (Class::Answer, None),
        Err(heard) => (Class::Rest, (headers.transport == Transport::Udp).then_some(heard)),
    }
}

/// The class of a packet of a routing protocol whose sender is trusted: it is on the link, or a peer of Linux's
/// daemons.
fn routing_class<A: Address>(
    headers: &Headers<A>,
    exchanges: &KernelExchanges,
    is_from_link: impl Fn(IpAddr) -> bool,
) -> Option<Class> {
    let (tuple, hop_limit) = (&headers.tuple, headers.hop_limit);
    let no_router_passed_it = hop_limit == HOP_LIMIT_OF_LINK;
    let is_from_link = || is_from_link(tuple.source.ip()) || stays_on_link(tuple.destination.ip());
    match tuple.protocol {
        protocol::UDP if BFD.contains(&tuple.destination_port) => no_router_passed_it.then_some(Class::Bfd),
        // The peer has passed the echo on once.
        protocol::UDP if tuple.destination_port == BFD_ECHO => {
            (hop_limit >= HOP_LIMIT_OF_LINK - 1 && is_from_link()).then_some(Class::Bfd)
        }
        protocol::UDP if tuple.destination_port == BFD_MULTIHOP => exchanges.has_session(headers).then_some(Class::Bfd),
        protocol::UDP if RIP.contains(&tuple.destination_port) || tuple.destination_port == LDP => {
            is_from_link().then_some(Class::Routing)
        }
        protocol::TCP if [tuple.source_port, tuple.destination_port].iter().any(|port| [BGP, LDP].contains(port)) => {
            (no_router_passed_it || exchanges.has_session(headers) || is_from_link()).then_some(Class::Routing)
        }
        VRRP => no_router_passed_it.then_some(Class::Routing),
        protocol if ROUTING_PROTOCOLS.contains(&protocol) => {
            (is_from_link() || exchanges.has_session(headers)).then_some(Class::Routing)
        }
        _ => None,
    }
}

/// Whether no router passes on packets to an address: the groups of one link (RFC 5771 section 4, RFC 4291 section
/// 2.7).
const fn stays_on_link(to: IpAddr) -> bool {
    match to {
        IpAddr::V4(to) => matches!(to.octets(), [224, 0, 0, _]),
        IpAddr::V6(to) => to.segments()[0] == 0xff02,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::testing::{Packet, Segment, arp_request, neighbour_solicitation};
    use crate::wire::tcp_flags;

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
        let classes = [Class::Resolution, Class::Question, Class::Bfd, Class::Routing, Class::Answer];
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

    /// The exchanges that the kernel has begun or answered before, by frames that it sent.
    fn exchanges_after(sent: &[Packet]) -> KernelExchanges {
        let exchanges = KernelExchanges::new(7);
        for packet in sent {
            let frame = packet.build();
            match parse(&frame).unwrap() {
                Parsed::V4(headers) => exchanges.sent(&frame, &headers),
                Parsed::V6(headers) => exchanges.sent(&frame, &headers),
                Parsed::Arp | Parsed::Other => unreachable!(),
            }
        }
        exchanges
    }

    /// Whether an address is in 192.0.2.0/24, 2001:db8::/64 or link-local.
    fn is_from_link(address: IpAddr) -> bool {
        ["192.0.2.", "2001:db8::", "fe80::"].iter().any(|prefix| address.to_string().starts_with(prefix))
    }

    /// The message of BGP of this type.
    fn bgp(kind: u8) -> Vec<u8> {
        [&[0xff; 16][..], &[0, 19, kind]].concat()
    }

    #[test]
    fn frames_are_classified_by_their_headers() {
        let over_ip = |from: &str, to: &str, protocol| {
            Packet::between(from.parse().unwrap(), to.parse().unwrap(), Segment::Other { protocol }).payload(&[0; 24])
        };
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
            (advertisement.payload(&[0; 16]).hop_limit(255).build(), Class::Resolution),
            (Packet::tcp("192.0.2.1:179", "192.0.2.2:40000").build(), Class::Routing),
            (Packet::tcp("[2001:db8::1]:40000", "[2001:db8::2]:179").build(), Class::Routing),
            (Packet::udp("192.0.2.1:49152", "192.0.2.2:3784").hop_limit(255).build(), Class::Bfd),
            (Packet::udp("[fe80::1]:49152", "[2001:db8::2]:3784").hop_limit(255).build(), Class::Bfd),
            (Packet::udp("192.0.2.2:49152", "192.0.2.2:3785").hop_limit(254).build(), Class::Rest),
            (Packet::udp("192.0.2.1:49152", "192.0.2.2:3785").hop_limit(254).build(), Class::Bfd),
            (over_ip("192.0.2.1", "224.0.0.5", 89).build(), Class::Routing),
            (over_ip("fe80::1", "ff02::5", 89).build(), Class::Routing),
            (over_ip("203.0.113.9", "224.0.0.5", 89).build(), Class::Routing), // a link without a prefix
            (over_ip("203.0.113.9", "224.0.1.5", 89).build(), Class::Rest),
            (over_ip("192.0.2.1", "224.0.0.18", 112).hop_limit(255).build(), Class::Routing),
            (Packet::udp("192.0.2.1:520", "224.0.0.9:520").build(), Class::Routing),
            (Packet::tcp("192.0.2.9:80", "192.0.2.2:40000").build(), Class::Rest),
            (Packet::echo_request("192.0.2.9", "192.0.2.2").build(), Class::Rest),
            (vec![0; 60], Class::Rest),
        ];
        for (frame, expected) in rows {
            assert_eq!(class(&frame, &KernelExchanges::default(), is_from_link).0, expected, "{frame:02x?}");
        }
    }

    #[test]
    fn a_stranger_is_in_no_class_of_routing_protocols() {
        let over_ip = |protocol| {
            let ends = ("203.0.113.9".parse().unwrap(), "192.0.2.2".parse().unwrap());
            Packet::between(ends.0, ends.1, Segment::Other { protocol }).payload(&[0; 24])
        };
        let udp = |port| Packet::udp("203.0.113.9:49152", &format!("192.0.2.2:{port}"));
        let mut strangers = vec![
            Packet::tcp("203.0.113.9:40000", "192.0.2.2:179"),
            Packet::tcp("203.0.113.9:179", "192.0.2.2:22"),
            Packet::tcp("[2001:db8:1::9]:40000", "[2001:db8::2]:179"),
            Packet::udp("203.0.113.9:179", "192.0.2.2:53"),
            Packet::udp("192.0.2.1:49152", "192.0.2.2:3784"), // an address of the link with another TTL is forged
            Packet::udp("[2001:db8:1::9]:49152", "[2001:db8::2]:3784"),
        ];
        strangers.extend([520, 521, 646, 3784, 3785, 4784, 6784].map(udp));
        strangers.extend([88, 89, 103, 112].map(over_ip));
        for packet in strangers {
            let packet = packet.hop_limit(57);
            let found = class(&packet.build(), &KernelExchanges::default(), is_from_link).0;
            assert_eq!(found, Class::Rest, "{packet:?}");
        }
    }

    #[test]
    fn a_peer_behind_routers_is_known_by_what_linux_sends_to_it() {
        let to = |flags| Packet::tcp("192.0.2.2:179", "203.0.113.9:40000").flags(flags);
        let from = || Packet::tcp("203.0.113.9:40000", "192.0.2.2:179").flags(tcp_flags::ACK);
        let open = Packet::tcp("192.0.2.2:40001", "203.0.113.9:179");
        let ospf = |from: &str, to: &str| {
            Packet::between(from.parse().unwrap(), to.parse().unwrap(), Segment::Other { protocol: 89 }).payload(&[0; 24])
        };
        let bfd = |from: &str, to: &str| Packet::udp(from, to);
        let answer = Packet::tcp("203.0.113.9:179", "192.0.2.2:40001").flags(tcp_flags::ACK);
        let rows = [
            ("Linux opens the session", vec![open], answer, Class::Routing),
            ("Linux answers the peer's OPEN", vec![to(tcp_flags::ACK).payload(&bgp(4))], from(), Class::Routing),
            ("Linux refuses a stranger with a NOTIFICATION", vec![to(tcp_flags::ACK).payload(&bgp(3))], from(), Class::Rest),
            ("Linux accepts the connection of a stranger", vec![to(tcp_flags::SYN | tcp_flags::ACK)], from(), Class::Rest),
            ("a virtual link of OSPF", vec![ospf("192.0.2.2", "203.0.113.9")], ospf("203.0.113.9", "192.0.2.2"), Class::Routing),
            (
                "BFD over several hops",
                vec![bfd("192.0.2.2:50000", "203.0.113.9:4784")],
                bfd("203.0.113.9:50001", "192.0.2.2:4784"),
                Class::Bfd,
            ),
        ];
        for (sentence, sent, received, expected) in rows {
            let (found, _) = class(&received.hop_limit(57).build(), &exchanges_after(&sent), is_from_link);
            assert_eq!(found, expected, "{sentence}");
        }
    }
}
