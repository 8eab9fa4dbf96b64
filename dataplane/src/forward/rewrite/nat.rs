//! Rewriting by a flow: changes MACs, addresses, ports, hop limit and checksums of a packet.
//!
//! **Invariant:** a rewrite is all or nothing. Checksums equal those of a full computation, and a wrong checksum stays
//! wrong.
//!
//! Not here: whether and how to rewrite, and whether the hop limit allows another hop; that was decided before.

use proto::Family;
use zerocopy::network_endian::U32;

use super::translate::{NewIdentification, Translated};
use crate::flow::{Direction, Flow};
use crate::snapshot::Exit;
use crate::wire::checksum::{Deltas, apply, delta, difference, word_delta};
use crate::wire::{
    Address, Ethernet, Headers, Ipv4, Mac, Sctp, Tcp, Transport, Tuple, TupleKey, Udp, crc32c, forward_header, take_mut,
};

/// The new fields of a packet, and the differences that they make to its checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewrite<A> {
    /// New source address.
    pub source: A,
    /// New destination address.
    pub destination: A,
    /// New source port.
    pub source_port: u16,
    /// New destination port.
    pub destination_port: u16,
    /// Differences between the packet's old addresses and ports and these.
    pub deltas: Deltas,
    /// MAC of the outgoing port.
    pub source_mac: Mac,
    /// MAC of the next hop.
    pub destination_mac: Mac,
}

/// Rewrites a packet of TCP, UDP or SCTP; `headers` are those that `parse` found in `frame`. The hop limit must be at
/// least 2; otherwise the sender gets an error instead. Packets of other transports, and frames that do not match
/// `headers`, are not changed.
pub(in crate::forward) fn whole<A: Translated>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) {
    let _ = match headers.transport {
        Transport::Sctp { .. } => try_sctp(frame, headers, rewrite),
        _ => try_nat(frame, headers, rewrite),
    };
}

fn try_nat<A: Translated>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) -> Option<()> {
    let network_offset = usize::from(headers.network_offset);
    let network_len = usize::from(headers.transport_offset).checked_sub(network_offset)?;
    let (is_udp, transport_len) = match headers.transport {
        Transport::Tcp { .. } => (false, Tcp::BYTES),
        Transport::Udp => (true, Udp::BYTES),
        _ => return None,
    };
    let (link, packet) = frame.split_at_mut_checked(network_offset)?;
    let (network, transport) = packet.split_at_mut_checked(network_len)?;
    if network_len < A::NETWORK || transport.len() < usize::from(transport_len) {
        return None;
    }
    take_mut::<Ethernet>(link)?.0.set_addresses(rewrite.source_mac, rewrite.destination_mac);
    let Rewrite { source, destination, source_port, destination_port, .. } = *rewrite;
    let sent = A::Key::of(&Tuple { source, destination, source_port, destination_port, protocol: headers.tuple.protocol });
    let arrived = A::Key::of(&headers.tuple);
    let change = || difference(arrived.sum(), sent.sum()).into();
    A::translate(network, transport, &sent.reversed(), change, is_udp, NewIdentification(None));
    Some(())
}

/// Rewrites an SCTP packet; only its headers are read. The verification tag stays: both ends know it.
#[inline(never)]
pub(super) fn try_sctp<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) -> Option<()> {
    let network_offset = usize::from(headers.network_offset);
    let network_len = headers.transport_offset.checked_sub(headers.network_offset)?;
    let sctp_len = headers.packet_len.checked_sub(network_len)?;
    let (link, packet) = frame.split_at_mut_checked(network_offset)?;
    let (network, transport) = packet.split_at_mut_checked(usize::from(network_len))?;
    let (ethernet, _) = take_mut::<Ethernet>(link)?;
    let (sctp, _) = take_mut::<Sctp>(transport)?;
    forward_header(network, rewrite.source, rewrite.destination, rewrite.deltas.l3)?;
    ethernet.set_addresses(rewrite.source_mac, rewrite.destination_mac);
    let (old, new) = ([sctp.source_port.get(), sctp.destination_port.get()], [rewrite.source_port, rewrite.destination_port]);
    let change = crc32c::difference(old, new, sctp_len);
    sctp.source_port.set(rewrite.source_port);
    sctp.destination_port.set(rewrite.destination_port);
    sctp.checksum.set(sctp.checksum.get() ^ change);
    Some(())
}

/// Rewrites a later fragment: MACs, addresses, hop limit. The transport checksum, which covers all fragments and the
/// addresses, is in the first fragment and is rewritten there. The hop limit must be at least 2. A frame that does not
/// match `headers` is not changed.
pub fn later_fragment<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) {
    let _ = try_later_fragment(frame, headers, rewrite);
}

fn try_later_fragment<A: Address>(frame: &mut [u8], headers: &Headers<A>, rewrite: &Rewrite<A>) -> Option<()> {
    let (link, network) = frame.split_at_mut_checked(usize::from(headers.network_offset))?;
    let (ethernet, _) = take_mut::<Ethernet>(link)?;
    forward_header(network, rewrite.source, rewrite.destination, rewrite.deltas.l3)?;
    ethernet.set_addresses(rewrite.source_mac, rewrite.destination_mac);
    Some(())
}

/// Changes the identification of a datagram or fragment. It is at `offset`, in bytes from the start of the frame: in
/// the IPv4 header, or in IPv6's fragment header. Nothing changes if that is outside the frame.
pub fn renumber<A: Address>(frame: &mut [u8], headers: &Headers<A>, offset: u16, identification: u32) {
    match A::FAMILY {
        Family::V4 => {
            let Some(network) = frame.get_mut(usize::from(headers.network_offset)..) else { return };
            let Some((ip, _)) = take_mut::<Ipv4>(network) else { return };
            let identification = (identification & 0xffff) as u16;
            ip.checksum.set(apply(ip.checksum.get(), word_delta(ip.identification.get(), identification)));
            ip.identification.set(identification);
        }
        Family::V6 => {
            if let Some((number, _)) = frame.get_mut(usize::from(offset)..).and_then(take_mut::<U32>) {
                number.set(identification);
            }
        }
    }
}

/// The fields that a packet of the flow has when it leaves.
pub(crate) fn rewrite_of<A: Address>(flow: &Flow<A>, direction: Direction, exit: &Exit) -> Rewrite<A> {
    let arrived = flow.tuple(direction);
    let sent = flow.tuple(direction.opposite()).reversed();
    Rewrite {
        source: sent.source,
        destination: sent.destination,
        source_port: sent.source_port,
        destination_port: sent.destination_port,
        deltas: delta(&arrived, &sent),
        source_mac: exit.source_mac(),
        destination_mac: exit.destination_mac(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::forward::rewrite::{hop, renumber};
    use crate::snapshot::Exit;
    use crate::testing::{OUR_MAC, Packet, Segment, assert_checksums};
    use crate::wire::{Parsed, parse};

    const NEXT_MAC: Mac = Mac([0x02, 0, 0, 0, 0xbb, 0x07]);

    /// Rewrites the frame of `before` to the tuple of `after` by differences.
    fn rewritten<A: Translated>(mut frame: Vec<u8>, headers: &Headers<A>, to: Tuple<A>) -> Vec<u8> {
        let rewrite = Rewrite {
            source: to.source,
            destination: to.destination,
            source_port: to.source_port,
            destination_port: to.destination_port,
            deltas: delta(&headers.tuple, &to),
            source_mac: OUR_MAC,
            destination_mac: NEXT_MAC,
        };
        whole(&mut frame, headers, &rewrite);
        frame
    }

    /// The packet as it is after the rewrite, built from scratch.
    fn built_after(packet: &Packet, source: IpAddr, destination: IpAddr, new_ports: [u16; 2]) -> Vec<u8> {
        let mut after = packet.clone();
        (after.source, after.destination) = (source, destination);
        (after.source_mac, after.destination_mac) = (OUR_MAC, NEXT_MAC);
        after.hop_limit -= 1;
        match &mut after.segment {
            Segment::Tcp { ports, .. } | Segment::Udp { ports, .. } | Segment::Sctp { ports, .. } => *ports = new_ports,
            _ => panic!("only what has ports is rewritten"),
        }
        after.build()
    }

    fn segments() -> impl Strategy<Value = Segment> {
        prop_oneof![
            any::<([u16; 2], u8, u32, u32)>().prop_map(|(ports, flags, sequence, acknowledgement)| Segment::Tcp {
                ports,
                flags,
                sequence,
                acknowledgement
            }),
            any::<([u16; 2], bool)>().prop_map(|(ports, checksum)| Segment::Udp { ports, checksum }),
            (any::<[u16; 2]>(), 1_u32..).prop_map(|(ports, tag)| Segment::Sctp { ports, tag }),
        ]
    }

    /// Data that is also a valid SCTP chunk.
    fn payloads() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 0..1400).prop_map(|data| [&[0, 3, 0, 16][..], &data].concat())
    }

    proptest! {
        #[test]
        fn an_ipv4_rewrite_by_difference_equals_the_packet_built_from_scratch(
            old in (0x0100_0000_u32..0x7f00_0000, 1_u32..), new in any::<(u32, u32)>(), ports in any::<[u16; 2]>(),
            segment in segments(), hop_limit in 1_u8.., payload in payloads(),
        ) {
            prop_assume!(old.0 != old.1);
            let mut packet = Packet::between(old.0.ip(), old.1.ip(), segment).payload(&payload).hop_limit(hop_limit);
            packet.padding = 3;
            let frame = packet.build();
            let Ok(Parsed::V4(headers)) = parse(&frame) else { panic!("{:?}", parse(&frame)) };
            let to = Tuple { source: new.0, destination: new.1, source_port: ports[0], destination_port: ports[1], ..headers.tuple };
            prop_assert_eq!(rewritten(frame, &headers, to), built_after(&packet, new.0.ip(), new.1.ip(), ports));
        }

        #[test]
        fn an_ipv6_rewrite_by_difference_equals_the_packet_built_from_scratch(
            old in (1_u128 << 125.., 1_u128..), new in any::<(u128, u128)>(), ports in any::<[u16; 2]>(),
            segment in segments(), hop_limit in 1_u8.., payload in payloads(),
        ) {
            prop_assume!(old.0 != old.1 && old.0 >> 120 != 0xff);
            let packet = Packet::between(old.0.ip(), old.1.ip(), segment).payload(&payload).hop_limit(hop_limit);
            let frame = packet.build();
            let Ok(Parsed::V6(headers)) = parse(&frame) else { panic!("{:?}", parse(&frame)) };
            let to = Tuple { source: new.0, destination: new.1, source_port: ports[0], destination_port: ports[1], ..headers.tuple };
            prop_assert_eq!(rewritten(frame, &headers, to), built_after(&packet, new.0.ip(), new.1.ip(), ports));
        }
    }

    /// With zeros both zeros of one's complement can result, and only one of them is that of a full computation.
    #[test]
    fn every_update_over_zeros_equals_a_full_computation() {
        let segments = [
            Segment::Tcp { ports: [0, 0], flags: 0, sequence: 0, acknowledgement: 0 },
            Segment::Udp { ports: [0, 0], checksum: true },
            Segment::Udp { ports: [0, 0], checksum: false },
            Segment::Sctp { ports: [0, 0], tag: 1 },
        ];
        let ends = [(0x0100_0000_u32, 0_u32), (1 << 24, 1 << 31), (0x7eff_ffff, 0)];
        for (segment, (source, destination)) in segments.iter().flat_map(|segment| ends.map(|ends| (segment.clone(), ends))) {
            let data: &[u8] = if matches!(segment, Segment::Sctp { .. }) { &[0, 0, 0, 4, 0, 0, 0, 0] } else { &[0; 32] };
            for hop_limit in [2, 255] {
                let mut packet =
                    Packet::between(source.ip(), destination.ip(), segment.clone()).payload(data).hop_limit(hop_limit);
                (packet.identification, packet.fragmentation) = (0, 0);
                let frame = packet.build();
                let Ok(Parsed::V4(headers)) = parse(&frame) else { panic!("{:?}", parse(&frame)) };
                let same = headers.tuple;
                let zero = Tuple { source: 0, destination: 0, ..same };
                let ones = Tuple { source: !0, destination: !0, source_port: !0, destination_port: !0, ..same };
                for to in [same, zero, ones] {
                    let there = rewritten(frame.clone(), &headers, to);
                    let ports = [to.source_port, to.destination_port];
                    assert_eq!(there, built_after(&packet, to.source.ip(), to.destination.ip(), ports), "{segment:?}");
                }
                let exit = Exit::new(crate::port::PortIndex(0).into(), 1500, OUR_MAC, NEXT_MAC);
                let mut hopped = frame.clone();
                hop(&mut hopped, &headers, &exit);
                assert_eq!(hopped, built_after(&packet, source.ip(), destination.ip(), [0, 0]), "one hop less");
                for identification in [0, 1, 0xffff] {
                    let mut renumbered = frame.clone();
                    renumber(&mut renumbered, &headers, 0, identification.into());
                    assert_eq!(renumbered, Packet { identification, ..packet.clone() }.build(), "another number");
                    renumber(&mut renumbered, &headers, 0, 0);
                    assert_eq!(renumbered, frame, "and back");
                }
            }
        }
    }

    #[test]
    fn a_udp_checksum_that_becomes_zero_is_sent_as_ffff() {
        // One of all destination ports gives a sum with complement 0.
        let packet = Packet::udp("198.51.100.7:5555", "192.0.2.100:53").payload(b"?");
        let frame = packet.build();
        let Ok(Parsed::V4(headers)) = parse(&frame) else { panic!("not IPv4") };
        let checksums: Vec<u16> = (0..=u16::MAX)
            .map(|port| {
                let after = rewritten(frame.clone(), &headers, Tuple { destination_port: port, ..headers.tuple });
                u16::from_be_bytes([after[40], after[41]])
            })
            .collect();
        assert!(!checksums.contains(&0));
        assert!(checksums.contains(&0xffff));
    }

    #[test]
    fn ipv6_behind_extension_headers_is_rewritten() {
        let mut packet = Packet::tcp("[2001:db8::7]:5555", "[2001:db8::100]:80");
        packet.extensions = vec![(60, vec![0, 0, 1, 4, 0, 0, 0, 0])];
        let frame = packet.build();
        let Ok(Parsed::V6(headers)) = parse(&frame) else { panic!("not IPv6") };
        let (source, destination) = (0xfd00_u128 << 112 | 3, 0xfd00_u128 << 112 | 11);
        let to = Tuple { source, destination, source_port: 1024, destination_port: 8080, ..headers.tuple };
        assert_eq!(rewritten(frame, &headers, to), built_after(&packet, source.ip(), destination.ip(), [1024, 8080]));
    }

    #[test]
    fn a_wrong_checksum_stays_wrong_by_as_much() {
        let mut frame = Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").build();
        let Ok(Parsed::V4(headers)) = parse(&frame) else { panic!("not IPv4") };
        let to = Tuple { source: 0x0a00_0003, destination: 0x0a00_000b, source_port: 1024, destination_port: 8080, protocol: 6 };
        let right = rewritten(frame.clone(), &headers, to);
        assert_checksums(&right);
        frame[51] ^= 1;
        let wrong = rewritten(frame, &headers, to);
        assert_ne!(wrong[50..52], right[50..52]);
        assert_eq!(wrong[..50], right[..50]);

        let mut frame = Packet::sctp("198.51.100.7:5555", "192.0.2.100:80").build();
        let Ok(Parsed::V4(headers)) = parse(&frame) else { panic!("not IPv4") };
        let to = Tuple { protocol: 132, ..to };
        let right = rewritten(frame.clone(), &headers, to);
        assert_checksums(&right);
        frame[44] ^= 0x40;
        let wrong = rewritten(frame, &headers, to);
        assert_eq!(wrong[44], right[44] ^ 0x40);
        assert_eq!((&wrong[..44], &wrong[45..]), (&right[..44], &right[45..]));
    }

    #[test]
    fn headers_of_another_frame_change_nothing() {
        let long = Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").build();
        let Ok(Parsed::V4(headers)) = parse(&long) else { panic!("not IPv4") };
        let short = long[..50].to_vec();
        assert_eq!(rewritten(short.clone(), &headers, headers.tuple), short);
    }
}
