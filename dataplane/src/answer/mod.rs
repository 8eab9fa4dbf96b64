//! Turns a received packet itself into the answer to it, in place: ARP, neighbour discovery, echo, TCP reset and ICMP
//! errors (FORWARDING section 8).
//!
//! **Invariant:** a function that says `false` has changed nothing, and the packet is still what it was. What is written
//! anew carries right checksums and a fresh hop limit. Deliberately not here: whose address it is, and how many answers
//! there may be ([`crate::AnswerLimiter`]).

mod echo;
mod error;
mod neighbour;
mod reset;

pub use echo::echo_reply;
pub use error::{IcmpError, icmp_error};
pub use neighbour::{ArpQuestion, arp_question, arp_reply, neighbour_advertisement, neighbour_question};
pub use reset::tcp_reset;

use proto::Family;
use zerocopy::network_endian::{U16, U32, U128};

use crate::checksum;
use crate::wire::{Ethernet, Ipv4, Ipv6, icmpv4, icmpv6, take_mut};
use crate::{Address, Headers, Transport, tcp_flags};

/// Hop limit of what we originate (RFC 1700: the recommended default).
const HOP_LIMIT: u8 = 64;

/// Whether a packet may be answered at all, by an echo reply, a reset or an ICMP error (RFC 1122 section 3.2.2, RFC 4443
/// section 2.4): nothing that went to more than one, and no error, reset or fragment. A first fragment could be answered,
/// but a reset or port unreachable needs the ports, which only a whole datagram shows here. ARP and neighbour
/// solicitations are asked of groups and have rules of their own.
#[must_use]
pub fn may_answer<A: Address>(headers: &Headers<A>) -> bool {
    if headers.group_frame || is_group_address(headers.tuple.destination) {
        return false;
    }
    match headers.transport {
        Transport::Tcp { flags } => flags & tcp_flags::RST == 0,
        Transport::Icmp { kind, .. } => !is_icmp_error::<A>(kind),
        Transport::Fragment => false,
        Transport::Udp | Transport::Sctp | Transport::Other => true,
    }
}

/// Multicast (RFC 1112, RFC 4291 section 2.7); in IPv4 also 240/4, which ends in broadcast.
fn is_group_address<A: Address>(address: A) -> bool {
    match A::FAMILY {
        Family::V4 => address.wide() >> 28 >= 0xe,
        Family::V6 => address.wide() >> 120 == 0xff,
    }
}

/// Messages that tell of another packet. A redirect counts as one (RFC 1122 section 3.2.2, RFC 4443 section 2.4 e.2).
fn is_icmp_error<A: Address>(kind: u8) -> bool {
    match A::FAMILY {
        Family::V4 => matches!(
            kind,
            icmpv4::UNREACHABLE | icmpv4::SOURCE_QUENCH | icmpv4::REDIRECT | icmpv4::TIME_EXCEEDED | icmpv4::PARAMETER_PROBLEM
        ),
        Family::V6 => kind < icmpv6::ECHO_REQUEST || kind == icmpv6::REDIRECT,
    }
}

/// The IP header of a packet that we write anew.
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
    /// Writes the header at the start of `bytes` and gives what follows it.
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

    /// An identification of 0 with "don't fragment" is what RFC 6864 section 4.1 allows to a datagram that is never cut.
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

/// Gives the Ethernet header the way back and the bytes after it.
fn turn_link(frame: &mut [u8]) -> Option<&mut [u8]> {
    let (ethernet, packet) = take_mut::<Ethernet>(frame)?;
    ethernet.turn();
    Some(packet)
}

/// Where the transport header of a packet that we wrote anew begins.
const fn written_transport_offset<A: Address>() -> usize {
    (Ethernet::BYTES + network_len::<A>()) as usize
}

/// The transport header and data of a parsed packet, without the frame's padding.
fn transport_bytes<'a, A: Address>(frame: &'a [u8], headers: &Headers<A>) -> Option<&'a [u8]> {
    let end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    frame.get(usize::from(headers.transport_offset)..end)
}
