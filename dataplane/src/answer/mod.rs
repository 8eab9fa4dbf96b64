//! Answers: functions that turn a received packet in place into the answer to it: ARP, neighbour discovery, echo, TCP
//! reset, SCTP abort and ICMP errors (FORWARDING section 8).
//!
//! **Invariant:** a function that returns `false` has changed nothing. Newly written headers have correct checksums and
//! a fresh hop limit.
//!
//! Not here: whether an address belongs to the gateway, and how many answers are allowed ([`crate::AnswerLimiter`]).

mod abort;
mod echo;
mod error;
mod neighbour;
mod reset;
mod tunnel;

pub use abort::sctp_abort;
pub use echo::echo_reply;
pub use error::{IcmpError, icmp_error};
pub use neighbour::{announcement, arp_question, arp_reply, neighbour_advertisement, neighbour_question};
pub use reset::{tcp_reset, write_reset};
pub use tunnel::icmp_error_about_inner;

use proto::Family;
use zerocopy::network_endian::{U16, U32, U128};

use crate::checksum;
use crate::wire::{Ethernet, Ipv4, Ipv6, icmpv4, icmpv6, take_mut};
use crate::{Address, Buffer, Headers, Mac, Transport, sctp_chunk, tcp_flags};

/// Hop limit of packets that the engine originates (RFC 1700: the recommended default).
const HOP_LIMIT: u8 = 64;

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

/// Turns a TCP segment or SCTP packet without connection into the answer that resets it, from the port with this `mac`.
/// Returns false when it gets no answer.
#[must_use]
pub fn reset<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>, mac: Mac) -> bool {
    match headers.transport {
        Transport::Sctp { .. } => sctp_abort(buffer, headers, mac),
        _ => tcp_reset(buffer, headers, mac),
    }
}

/// Whether an address is multicast (RFC 1112, RFC 4291 section 2.7) or, in IPv4, in 240/4, which contains broadcast.
pub(crate) fn is_group_address<A: Address>(address: A) -> bool {
    match A::FAMILY {
        Family::V4 => address.wide() >> 28 >= 0xe,
        Family::V6 => address.wide() >> 120 == 0xff,
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

/// The IP header of a packet that the engine writes.
struct NetworkHeader<A> {
    source: A,
    destination: A,
    protocol: u8,
    /// DSCP and ECN.
    traffic_class: u8,
    hop_limit: u8,
    /// Bytes after the header.
    payload_len: u16,
}

/// Bytes of the header that [`NetworkHeader::write`] writes.
const fn network_len<A: Address>() -> u16 {
    match A::FAMILY {
        Family::V4 => Ipv4::BYTES,
        Family::V6 => Ipv6::BYTES,
    }
}

impl<A: Address> NetworkHeader<A> {
    /// Writes the header at the start of `bytes` and returns the bytes after it.
    fn write<'a>(&self, bytes: &'a mut [u8]) -> Option<&'a mut [u8]> {
        match A::FAMILY {
            Family::V4 => {
                let (ip, rest) = take_mut::<Ipv4>(bytes)?;
                *ip = self.ipv4();
                Some(rest)
            }
            Family::V6 => {
                let (ip, rest) = take_mut::<Ipv6>(bytes)?;
                *ip = self.ipv6();
                Some(rest)
            }
        }
    }

    /// RFC 6864 section 4.1 allows identification 0 with "don't fragment" for a datagram that is never fragmented.
    fn ipv4(&self) -> Ipv4 {
        let narrow = |address: A| U32::new((address.wide() & 0xffff_ffff) as u32);
        let mut ip = Ipv4 {
            version_ihl: Ipv4::PLAIN,
            traffic_class: self.traffic_class,
            total_len: U16::new(Ipv4::BYTES.saturating_add(self.payload_len)),
            identification: U16::ZERO,
            fragmentation: U16::new(Ipv4::DONT_FRAGMENT),
            ttl: self.hop_limit,
            protocol: self.protocol,
            checksum: U16::ZERO,
            source: narrow(self.source),
            destination: narrow(self.destination),
        };
        ip.checksum.set(checksum::finish(checksum::sum(zerocopy::IntoBytes::as_bytes(&ip))));
        ip
    }

    fn ipv6(&self) -> Ipv6 {
        Ipv6 {
            version_class_label: U32::new(Ipv6::PLAIN | u32::from(self.traffic_class) << 20),
            payload_len: U16::new(self.payload_len),
            next_header: self.protocol,
            hop_limit: self.hop_limit,
            source: U128::new(self.source.wide()),
            destination: U128::new(self.destination.wide()),
        }
    }
}

/// Turns the Ethernet header around, from `mac`, and returns the bytes after it.
fn turn_link(frame: &mut [u8], mac: Mac) -> Option<&mut [u8]> {
    let (ethernet, packet) = take_mut::<Ethernet>(frame)?;
    ethernet.turn(mac);
    Some(packet)
}

/// Offset of the transport header in a packet that the engine writes.
const fn written_transport_offset<A: Address>() -> usize {
    (Ethernet::BYTES + network_len::<A>()) as usize
}

/// The transport header and data of a parsed packet, without the frame's padding.
fn transport_bytes<'a, A: Address>(frame: &'a [u8], headers: &Headers<A>) -> Option<&'a [u8]> {
    let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    frame.get(usize::from(headers.transport_offset)..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{OUR_MAC, PEER_MAC, Packet, Segment};
    use crate::{Parsed, parse};

    /// A buffer with a capacity that the test chooses.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub(super) struct Bytes {
        pub(super) frame: Vec<u8>,
        pub(super) room: usize,
    }

    impl Bytes {
        pub(super) fn new(frame: Vec<u8>) -> Self {
            Self { frame, room: 2048 }
        }
    }

    impl Buffer for Bytes {
        fn bytes(&self) -> &[u8] {
            &self.frame
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            &mut self.frame
        }

        fn resize(&mut self, len: usize) -> bool {
            let fits = len <= self.room;
            if fits {
                self.frame.resize(len, 0xa5);
            }
            fits
        }

        fn prepend(&mut self, len: usize) -> bool {
            let fits = self.frame.len() + len <= self.room;
            if fits {
                self.frame.splice(..0, std::iter::repeat_n(0xa5, len));
            }
            fits
        }

        fn trim_front(&mut self, len: usize) {
            self.frame.drain(..len.min(self.frame.len()));
        }
    }

    pub(super) fn v4(frame: &[u8]) -> Headers<u32> {
        match parse(frame) {
            Ok(Parsed::V4(headers)) => headers,
            other => panic!("expected IPv4, found {other:?}"),
        }
    }

    pub(super) fn v6(frame: &[u8]) -> Headers<u128> {
        match parse(frame) {
            Ok(Parsed::V6(headers)) => headers,
            other => panic!("expected IPv6, found {other:?}"),
        }
    }

    #[test]
    fn answers_come_from_the_port_whatever_the_frame_was_sent_to() {
        let elsewhere = |packet: Packet| Packet { destination_mac: Mac([2, 0, 0, 0, 0, 0x77]), ..packet }.build();
        let (client, vip) = ("198.51.100.7:5555", "192.0.2.100:80");
        type Answer = fn(&mut Bytes, &Headers<u32>) -> bool;
        let error: Answer = |buffer, headers| icmp_error(buffer, headers, 1, IcmpError::TimeExceeded, OUR_MAC);
        let rows: [(&str, Packet, Answer); 4] = [
            ("RST", Packet::tcp(client, vip), |buffer, headers| reset(buffer, headers, OUR_MAC)),
            ("ABORT", Packet::sctp(client, vip), |buffer, headers| reset(buffer, headers, OUR_MAC)),
            ("time exceeded", Packet::udp(client, vip), error),
            ("echo", Packet::echo_request("198.51.100.7", "192.0.2.100"), |buffer, headers| echo_reply(buffer, headers, OUR_MAC)),
        ];
        for (sentence, packet, answer) in rows {
            let mut buffer = Bytes::new(elsewhere(packet));
            let headers = v4(&buffer.frame);
            assert!(answer(&mut buffer, &headers), "{sentence}");
            assert_eq!((&buffer.frame[..6], &buffer.frame[6..12]), (&PEER_MAC.0[..], &OUR_MAC.0[..]), "{sentence}");
        }
    }

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
            ("a redirect", icmp(137), false),
            ("a multicast frame", Packet { destination_mac: Mac([0x33, 0x33, 0, 0, 0, 1]), ..syn() }, false),
            ("a multicast address", Packet::udp("[2001:db8::7]:5", "[ff02::1]:7"), false),
            ("a later fragment", Packet { extensions: later, ..syn() }, false),
        ];
        for (sentence, packet, expected) in rows {
            assert_eq!(may_answer(&v6(&packet.build())), expected, "{sentence}");
        }
    }
}
