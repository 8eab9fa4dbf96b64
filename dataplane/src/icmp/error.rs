//! Construction of ICMP errors about a received packet (RFC 792, RFC 1812 section 4.3, RFC 4443 section 3), and of
//! errors about a packet inside a tunnel from errors about the tunnel packet (RFC 2003 section 4, RFC 2473 section 8).
//!
//! Not here: whether an error may be sent.

use std::ops::Range;

use proto::Family;
use zerocopy::network_endian::{U16, U32};

use crate::snapshot::Exit;
use crate::wire::checksum::{HOP_DELTA, apply};
use crate::wire::{
    Address, Buffer, Ethernet, Headers, Icmp, Ipv4, Ipv6, Mac, NetworkHeader, Tuple, checksum, ether_type_of, icmpv4, icmpv6,
    network_len, protocol, take_mut, turn_link, written_transport_offset,
};

/// Maximum length of an IPv4 packet with an error, bytes (RFC 1812 section 4.3.2.3).
const IPV4_LEN_MAX: u16 = 576;
/// Maximum length of an IPv6 packet with an error, bytes: the smallest MTU of IPv6 (RFC 4443 section 2.4 c).
const IPV6_LEN_MAX: u16 = 1280;
/// Internetwork control, DSCP 48, which RFC 1812 section 4.3.2.5 requires for errors.
const TRAFFIC_CLASS: u8 = 0xc0;

/// The error to report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpError {
    /// The port is closed.
    PortUnreachable,
    /// There is no route to the destination.
    HostUnreachable,
    /// The hop limit was exceeded.
    TimeExceeded,
    /// The packet does not fit and must not be fragmented; for IPv4 only about packets with "don't fragment".
    TooBig {
        /// Largest IP packet that would fit, bytes (RFC 1191, RFC 8201); at least 1280 for IPv6. 0, for IPv4 only:
        /// unknown.
        mtu: u16,
    },
}

/// Turns a packet into an ICMP error about it, sent from `source` and the port with this `mac` to the packet's sender.
/// It quotes as much of the packet as the RFCs allow. Check [`super::answer::may_answer`] first. Returns false when the
/// buffer has no room for the longer packet.
#[must_use]
pub fn icmp_error<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>, source: A, error: IcmpError, mac: Mac) -> bool {
    let head_len = network_len::<A>() + Icmp::BYTES;
    let quoted_len = usize::from(headers.packet_len).min(quoted_len_max::<A>());
    let quoted_from = usize::from(headers.network_offset);
    let quoted = quoted_from..quoted_from + quoted_len;
    let quoted_to = usize::from(Ethernet::BYTES + head_len);
    let (frame_len, answer_len) = (buffer.bytes().len(), quoted_to + quoted_len);
    if quoted.end > frame_len || !buffer.resize(frame_len.max(answer_len)) {
        return false;
    }
    buffer.bytes_mut().copy_within(quoted, quoted_to);
    buffer.resize(answer_len) && write(buffer.bytes_mut(), headers.tuple.source, source, error, mac).is_some()
}

/// Number of bytes of a packet that an error may quote.
pub(super) const fn quoted_len_max<A: Address>() -> usize {
    let packet_len_max = match A::FAMILY {
        Family::V4 => IPV4_LEN_MAX,
        Family::V6 => IPV6_LEN_MAX,
    };
    (packet_len_max - network_len::<A>() - Icmp::BYTES) as usize
}

/// Writes the headers before the quoted packet.
pub(super) fn write<A: Address>(frame: &mut [u8], destination: A, source: A, error: IcmpError, mac: Mac) -> Option<()> {
    let message = frame.get_mut(written_transport_offset::<A>()..)?;
    let message_len = u16::try_from(message.len()).ok()?;
    let (kind, code, rest) = numbers::<A>(error);
    *take_mut::<Icmp>(message)?.0 = Icmp { kind, code, checksum: U16::ZERO, rest: U32::new(rest) };
    let (protocol, pseudo) = match A::FAMILY {
        Family::V4 => (protocol::ICMP, 0),
        // ICMPv6 counts a pseudo header (RFC 4443 section 2.3).
        Family::V6 => (protocol::ICMPV6, checksum::pseudo_sum(source, destination, protocol::ICMPV6, usize::from(message_len))),
    };
    let checksum = checksum::finish(pseudo + checksum::sum(message));
    take_mut::<Icmp>(message)?.0.checksum.set(checksum);
    let ip = NetworkHeader::new(source, destination, protocol, message_len);
    NetworkHeader { traffic_class: TRAFFIC_CLASS, ..ip }.write(turn_link(frame, mac)?)?;
    Some(())
}

/// Type, code and the second 32-bit word of the message.
fn numbers<A: Address>(error: IcmpError) -> (u8, u8, u32) {
    match (A::FAMILY, error) {
        (Family::V4, IcmpError::PortUnreachable) => (icmpv4::UNREACHABLE, icmpv4::CODE_PORT, 0),
        (Family::V4, IcmpError::HostUnreachable) => (icmpv4::UNREACHABLE, icmpv4::CODE_HOST, 0),
        (Family::V4, IcmpError::TimeExceeded) => (icmpv4::TIME_EXCEEDED, 0, 0),
        (Family::V4, IcmpError::TooBig { mtu }) => (icmpv4::UNREACHABLE, icmpv4::CODE_FRAGMENTATION_NEEDED, mtu.into()),
        (Family::V6, IcmpError::PortUnreachable) => (icmpv6::UNREACHABLE, icmpv6::CODE_PORT, 0),
        (Family::V6, IcmpError::HostUnreachable) => (icmpv6::UNREACHABLE, icmpv6::CODE_ADDRESS, 0),
        (Family::V6, IcmpError::TimeExceeded) => (icmpv6::TIME_EXCEEDED, 0, 0),
        (Family::V6, IcmpError::TooBig { mtu }) => (icmpv6::PACKET_TOO_BIG, 0, mtu.into()),
    }
}

/// Turns the frame into an ICMP error to the sender of the inner packet, whose beginning is at `quoted`, after the
/// headers of an ICMP error and of a tunnel. The error comes from the destination of the inner packet, which has the
/// tuple `inner`, and quotes it with the hop limit that it had before the tunnel. Returns false when there are no such
/// bytes.
#[must_use]
pub fn icmp_error_about_inner<I: Address>(
    buffer: &mut impl Buffer,
    quoted: Range<usize>,
    inner: &Tuple<I>,
    error: IcmpError,
    exit: &Exit,
) -> bool {
    let quoted = quoted.start..quoted.end.min(quoted.start + quoted_len_max::<I>());
    let quoted_to = usize::from(Ethernet::BYTES + network_len::<I>() + Icmp::BYTES);
    // The headers of an error and of a tunnel precede it; they are at least as long as these.
    if quoted.end > buffer.bytes().len() || quoted_to > quoted.start || quoted.is_empty() {
        return false;
    }
    let frame_len = quoted_to + quoted.len();
    buffer.bytes_mut().copy_within(quoted, quoted_to);
    buffer.resize(frame_len) && finish(buffer.bytes_mut(), quoted_to, inner, error, exit).is_some()
}

fn finish<I: Address>(frame: &mut [u8], quoted_at: usize, inner: &Tuple<I>, error: IcmpError, exit: &Exit) -> Option<()> {
    raise_hop_limit::<I>(frame.get_mut(quoted_at..)?)?;
    write(frame, inner.source, inner.destination, error, exit.source_mac())?;
    let (ethernet, _) = take_mut::<Ethernet>(frame)?;
    ethernet.destination = exit.destination_mac().0;
    ethernet.ether_type.set(ether_type_of::<I>());
    Some(())
}

/// Restores the hop limit that [`crate::forward::rewrite::encapsulate`] decremented. No packet of the gateway had 255.
fn raise_hop_limit<I: Address>(packet: &mut [u8]) -> Option<()> {
    match I::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(packet)?;
            if let Some(ttl) = ip.ttl.checked_add(1) {
                ip.ttl = ttl;
                ip.checksum.set(apply(ip.checksum.get(), !HOP_DELTA));
            }
        }
        Family::V6 => {
            let (ip, _) = take_mut::<Ipv6>(packet)?;
            ip.hop_limit = ip.hop_limit.saturating_add(1);
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Bytes, v4, v6};
    use crate::testing::{OUR_MAC, PEER_MAC, Packet, Segment, assert_checksums};

    const OURS: u32 = 0xc000_0202;
    const OURS6: u128 = 0x2001_0db8 << 96 | 2;
    const ALL: [IcmpError; 4] =
        [IcmpError::PortUnreachable, IcmpError::HostUnreachable, IcmpError::TimeExceeded, IcmpError::TooBig { mtu: 1400 }];

    /// The error built from scratch, except for the traffic class, which is set by hand.
    fn expected(about: &Packet, source: std::net::IpAddr, numbers: (u8, u8, u32), quoted_len_max: usize) -> Vec<u8> {
        let (kind, code, rest) = numbers;
        let unpadded = Packet { padding: 0, ..about.clone() }.build();
        let mut error = Packet::between(source, about.source, Segment::Icmp { kind, code, rest })
            .payload(&unpadded[14..unpadded.len().min(14 + quoted_len_max)])
            .hop_limit(64);
        (error.source_mac, error.destination_mac, error.identification) = (OUR_MAC, PEER_MAC, 0);
        let mut frame = error.build();
        if source.is_ipv4() {
            frame[15] = 0xc0;
            let checksum = checksum::apply(u16::from_be_bytes([frame[24], frame[25]]), checksum::word_delta(0x4500, 0x45c0));
            frame[24..26].copy_from_slice(&checksum.to_be_bytes());
        } else {
            frame[14] = 0x6c;
        }
        assert_checksums(&frame);
        frame
    }

    proptest! {
        #[test]
        fn an_error_quotes_as_much_as_fits(payload_len in 0_usize..1500, padding in 0_usize..10) {
            let mut packet = Packet::udp("198.51.100.7:5555", "192.0.2.100:53").payload(&vec![b'q'; payload_len]);
            packet.padding = padding;
            for (error, numbers) in ALL.into_iter().zip([(3, 3, 0), (3, 1, 0), (11, 0, 0), (3, 4, 1400)]) {
                let mut buffer = Bytes::new(packet.build());
                let headers = v4(&buffer.frame);
                prop_assert!(icmp_error(&mut buffer, &headers, OURS, error, OUR_MAC));
                prop_assert_eq!(&buffer.frame, &expected(&packet, OURS.ip(), numbers, 548));
                prop_assert!(buffer.frame.len() <= 14 + 576);
            }
            let mut packet = Packet::udp("[2001:db8::7]:5555", "[2001:db8::100]:53").payload(&vec![b'q'; payload_len]);
            packet.padding = padding;
            for (error, numbers) in ALL.into_iter().zip([(1, 4, 0), (1, 3, 0), (3, 0, 0), (2, 0, 1400)]) {
                let mut buffer = Bytes::new(packet.build());
                let headers = v6(&buffer.frame);
                prop_assert!(icmp_error(&mut buffer, &headers, OURS6, error, OUR_MAC));
                prop_assert_eq!(&buffer.frame, &expected(&packet, OURS6.ip(), numbers, 1232));
                prop_assert!(buffer.frame.len() <= 14 + 1280);
            }
        }
    }

    #[test]
    fn a_buffer_without_room_keeps_its_packet() {
        let frame = Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").build();
        let mut buffer = Bytes { room: frame.len() + 27, frame: frame.clone() };
        assert!(!icmp_error(&mut buffer, &v4(&frame), OURS, IcmpError::TimeExceeded, OUR_MAC));
        assert_eq!(buffer.frame, frame);
        buffer.room += 1;
        assert!(icmp_error(&mut buffer, &v4(&frame), OURS, IcmpError::TimeExceeded, OUR_MAC));
    }
}
