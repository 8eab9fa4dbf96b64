//! ARP (RFC 826) and neighbour discovery (RFC 4861): requests for an address, the answers to them, and announcements.
//!
//! Not here: which addresses the gateway answers for.

use std::net::IpAddr;

use zerocopy::network_endian::{U16, U32, U128};

use crate::wire::{
    Address, Arp, Buffer, Ethernet, Extension, Headers, LinkLayerOption, Mac, NeighbourMessage, NetworkHeader, Transport,
    checksum, ether_type, icmpv6, is_group_address, neighbour, protocol, take, take_mut, transport_bytes,
    written_transport_offset,
};

/// Bytes of an advertisement with its one option.
const ADVERTISEMENT_BYTES: u16 = 32;
/// Bytes of a solicitation without options.
const SOLICITATION_BYTES: u16 = 24;
/// Bytes of an ARP frame, padded to Ethernet's minimum.
const ARP_FRAME_BYTES: usize = 60;
/// All nodes on the link (RFC 4291 section 2.7.1).
const ALL_NODES: u128 = 0xff02 << 112 | 1;
/// The Ethernet address of all nodes (RFC 2464 section 7).
const ALL_NODES_MAC: Mac = Mac([0x33, 0x33, 0, 0, 0, 1]);
/// The prefix of solicited-node multicast addresses, without the 24 bits of an address (RFC 4291 section 2.7.1).
const SOLICITED_NODES: u128 = 0xff02 << 112 | 0x1_ff << 24;

/// The address that an ARP frame requests. `None` for replies, for announcements of the sender's own address, and for
/// frames to groups other than broadcast (RFC 826 sends requests to broadcast, RFC 1122 section 2.3.2.1 to one
/// station).
#[must_use]
pub fn arp_question(frame: &[u8]) -> Option<u32> {
    let (ethernet, packet) = take::<Ethernet>(frame)?;
    if ethernet.is_group() && !ethernet.is_broadcast() {
        return None;
    }
    let (arp, _) = take::<Arp>(packet)?;
    let target = arp.target_address.get();
    (arp.operation.get() == Arp::REQUEST && target != arp.sender_address.get()).then_some(target)
}

/// The address that the sender of an ARP frame says to have, and its Ethernet address. `None` for probes, which have no
/// sender's address (RFC 5227 section 2.1.1).
#[must_use]
pub fn arp_claim(frame: &[u8]) -> Option<(u32, Mac)> {
    let (_, packet) = take::<Ethernet>(frame)?;
    let (arp, _) = take::<Arp>(packet)?;
    let address = arp.sender_address.get();
    (address != 0).then_some((address, Mac(arp.sender_mac)))
}

/// The address that an ARP probe asks for without saying who asks (RFC 5227 section 2.1.1), and the Ethernet address of
/// its sender; `None` for any other frame.
#[must_use]
pub fn arp_probe(frame: &[u8]) -> Option<(u32, Mac)> {
    let target = arp_question(frame)?;
    let (arp, _) = take::<Arp>(take::<Ethernet>(frame)?.1)?;
    (arp.sender_address.get() == 0).then_some((target, Mac(arp.sender_mac)))
}

/// The address that a neighbour advertisement is about, and the Ethernet address of its sender; `None` for any other
/// packet, or one that came through a router.
#[must_use]
pub fn neighbour_claim<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<(u128, Mac)> {
    let is_advertisement = matches!(headers.transport, Transport::Icmp { kind: icmpv6::NEIGHBOUR_ADVERTISEMENT, code: 0 });
    if !is_advertisement || headers.tuple.protocol != protocol::ICMPV6 || headers.hop_limit != icmpv6::NEIGHBOUR_HOP_LIMIT {
        return None;
    }
    let (message, _) = take::<NeighbourMessage>(transport_bytes(frame, headers)?)?;
    Some((message.target.get(), Mac(take::<Ethernet>(frame)?.0.source)))
}

/// Turns an ARP request into the reply that its target has `mac`. Returns false when the frame is no request.
#[must_use]
pub fn arp_reply(buffer: &mut impl Buffer, mac: Mac) -> bool {
    arp_question(buffer.bytes()).is_some() && write_arp_reply(buffer.bytes_mut(), mac).is_some()
}

fn write_arp_reply(frame: &mut [u8], mac: Mac) -> Option<()> {
    let (ethernet, packet) = take_mut::<Ethernet>(frame)?;
    let (arp, _) = take_mut::<Arp>(packet)?;
    ethernet.destination = ethernet.source;
    ethernet.source = mac.0;
    arp.operation.set(Arp::REPLY);
    std::mem::swap(&mut arp.sender_address, &mut arp.target_address);
    arp.target_mac = arp.sender_mac;
    arp.sender_mac = mac.0;
    Some(())
}

/// The address that a valid neighbour solicitation requests (RFC 4861 section 7.1.1); `None` for any other packet.
#[must_use]
pub fn neighbour_question(frame: &[u8], headers: &Headers<u128>) -> Option<u128> {
    let is_solicitation = matches!(headers.transport, Transport::Icmp { kind: icmpv6::NEIGHBOUR_SOLICITATION, code: 0 });
    // A frame to a group must carry a packet to a group (RFC 2464 section 7).
    let goes_astray = headers.group_frame && !is_group_address(headers.tuple.destination);
    if !is_solicitation || headers.hop_limit != icmpv6::NEIGHBOUR_HOP_LIMIT || goes_astray {
        return None;
    }
    let bytes = transport_bytes(frame, headers)?;
    let (message, mut options) = take::<NeighbourMessage>(bytes)?;
    let (asks_for_itself, target) = (headers.tuple.source == 0, message.target.get());
    if asks_for_itself && headers.tuple.destination != SOLICITED_NODES | target & 0xff_ffff {
        return None;
    }
    while !options.is_empty() {
        // Kind and length. The length counts its own 2 bytes, and 0 is forbidden (RFC 4861 section 4.6).
        let (option, _) = take::<Extension>(options)?;
        if asks_for_itself && option.next_header == neighbour::SOURCE_LINK_LAYER {
            return None;
        }
        options = options.get(usize::from(option.units) * 8..).filter(|_| option.units > 0)?;
    }
    let tuple = &headers.tuple;
    let pseudo = checksum::pseudo_sum(tuple.source, tuple.destination, protocol::ICMPV6, bytes.len());
    (checksum::finish(pseudo + checksum::sum(bytes)) == 0 && !is_group_address(target)).then_some(target)
}

/// Turns a neighbour solicitation into the advertisement that its target has `mac`: solicited, override. A node that
/// checks whether an address is free has no address to answer to; the answer that the address is taken goes to all
/// nodes (RFC 4862 section 5.4.3, RFC 4861 section 7.2.4). Returns false when the packet is no solicitation, or the
/// buffer has no room for the option.
#[must_use]
pub fn neighbour_advertisement(buffer: &mut impl Buffer, headers: &Headers<u128>, mac: Mac) -> bool {
    let Some(target) = neighbour_question(buffer.bytes(), headers) else { return false };
    let (destination, flags) = match headers.tuple.source {
        0 => (ALL_NODES, 0),
        asker => (asker, neighbour::SOLICITED),
    };
    buffer.resize(written_transport_offset::<u128>() + usize::from(ADVERTISEMENT_BYTES))
        && write_advertisement(buffer.bytes_mut(), destination, flags, target, mac).is_some()
        && turn(buffer.bytes_mut(), mac, destination == ALL_NODES)
}

/// Addresses the frame to its sender, or to all nodes.
fn turn(frame: &mut [u8], mac: Mac, to_all: bool) -> bool {
    let Some((ethernet, _)) = take_mut::<Ethernet>(frame) else { return false };
    ethernet.destination = if to_all { ALL_NODES_MAC.0 } else { ethernet.source };
    ethernet.source = mac.0;
    true
}

/// The station that sends a valid neighbour solicitation, and its Ethernet address; `None` for one that checks whether
/// an address is free.
#[must_use]
pub fn neighbour_asker(frame: &[u8], headers: &Headers<u128>) -> Option<(u128, Mac)> {
    let (ethernet, _) = take::<Ethernet>(frame)?;
    (headers.tuple.source != 0).then_some((headers.tuple.source, Mac(ethernet.source)))
}

/// Writes into an empty buffer the solicitation by which the station `asker` asks for `target`, at `mac` (RFC 4861
/// section 4.3). Returns false when the buffer has no room.
#[must_use]
pub fn solicitation(buffer: &mut impl Buffer, asker: (u128, Mac), target: (u128, Mac)) -> bool {
    buffer.resize(written_transport_offset::<u128>() + usize::from(SOLICITATION_BYTES) + size_of::<LinkLayerOption>())
        && write_solicitation(buffer.bytes_mut(), asker.0, Some(asker.1), target.0, target.0).is_some()
        && write_ethernet(buffer, target.1, asker.1, ether_type::IPV6).is_some()
}

/// Writes into an empty buffer the announcement that `address` has `mac`: an ARP announcement (RFC 5227 section 2.3) or
/// an unsolicited neighbour advertisement (RFC 4861 section 7.2.6). Returns false when the buffer has no room.
#[must_use]
pub fn announcement(buffer: &mut impl Buffer, address: IpAddr, mac: Mac) -> bool {
    match address {
        IpAddr::V4(address) => write_arp_request(buffer, address.into(), address.into(), mac),
        IpAddr::V6(address) => {
            let len = written_transport_offset::<u128>() + usize::from(ADVERTISEMENT_BYTES);
            buffer.resize(len)
                && write_advertisement(buffer.bytes_mut(), ALL_NODES, 0, address.into(), mac).is_some()
                && write_ethernet(buffer, ALL_NODES_MAC, mac, ether_type::IPV6).is_some()
        }
    }
}

/// Writes into an empty buffer the question who has `address`, from a station without an address: an ARP probe (RFC
/// 5227 section 2.1.1) or a solicitation as for duplicate address detection (RFC 4862 section 5.4.2). No neighbour
/// entry follows from it. Returns false when the buffer has no room.
#[must_use]
pub fn probe(buffer: &mut impl Buffer, address: IpAddr, mac: Mac) -> bool {
    match address {
        IpAddr::V4(address) => write_arp_request(buffer, 0, address.into(), mac),
        IpAddr::V6(address) => {
            let target = u128::from(address);
            let [.., a, b, c] = address.octets();
            buffer.resize(written_transport_offset::<u128>() + usize::from(SOLICITATION_BYTES))
                && write_solicitation(buffer.bytes_mut(), 0, None, SOLICITED_NODES | target & 0xff_ffff, target).is_some()
                && write_ethernet(buffer, Mac([0x33, 0x33, 0xff, a, b, c]), mac, ether_type::IPV6).is_some()
        }
    }
}

fn write_ethernet(buffer: &mut impl Buffer, destination: Mac, source: Mac, ether_type: u16) -> Option<()> {
    let (ethernet, _) = take_mut::<Ethernet>(buffer.bytes_mut())?;
    *ethernet = Ethernet { destination: destination.0, source: source.0, ether_type: U16::new(ether_type) };
    Some(())
}

fn write_arp_request(buffer: &mut impl Buffer, sender: u32, target: u32, mac: Mac) -> bool {
    buffer.resize(ARP_FRAME_BYTES)
        && write_arp(buffer.bytes_mut(), sender, target, mac).is_some()
        && write_ethernet(buffer, Mac([0xff; 6]), mac, ether_type::ARP).is_some()
}

fn write_arp(frame: &mut [u8], sender: u32, target: u32, mac: Mac) -> Option<()> {
    frame.fill(0);
    *take_mut::<Arp>(frame.get_mut(usize::from(Ethernet::BYTES)..)?)?.0 = Arp {
        hardware_type: U16::new(1),
        protocol_type: U16::new(ether_type::IPV4),
        hardware_len: 6,
        protocol_len: 4,
        operation: U16::new(Arp::REQUEST),
        sender_mac: mac.0,
        sender_address: U32::new(sender),
        target_mac: [0; 6],
        target_address: U32::new(target),
    };
    Some(())
}

fn write_solicitation(frame: &mut [u8], source: u128, mac: Option<Mac>, destination: u128, target: u128) -> Option<()> {
    let message = frame.get_mut(written_transport_offset::<u128>()..)?;
    *take_mut::<NeighbourMessage>(message)?.0 = NeighbourMessage {
        kind: icmpv6::NEIGHBOUR_SOLICITATION,
        code: 0,
        checksum: U16::ZERO,
        flags: U32::ZERO,
        target: U128::new(target),
    };
    if let Some(mac) = mac {
        let (_, option) = take_mut::<NeighbourMessage>(message)?;
        *take_mut::<LinkLayerOption>(option)?.0 = LinkLayerOption { kind: neighbour::SOURCE_LINK_LAYER, units: 1, mac: mac.0 };
    }
    let len = u16::try_from(message.len()).ok()?;
    let pseudo = checksum::pseudo_sum(source, destination, protocol::ICMPV6, message.len());
    let checksum = checksum::finish(pseudo + checksum::sum(message));
    take_mut::<NeighbourMessage>(message)?.0.checksum.set(checksum);
    let (_, packet) = take_mut::<Ethernet>(frame)?;
    let ip = NetworkHeader::new(source, destination, protocol::ICMPV6, len);
    NetworkHeader { hop_limit: icmpv6::NEIGHBOUR_HOP_LIMIT, ..ip }.write(packet)?;
    Some(())
}

fn write_advertisement(frame: &mut [u8], destination: u128, flags: u32, target: u128, mac: Mac) -> Option<()> {
    let message = frame.get_mut(written_transport_offset::<u128>()..)?;
    let (advertisement, option) = take_mut::<NeighbourMessage>(message)?;
    *advertisement = NeighbourMessage {
        kind: icmpv6::NEIGHBOUR_ADVERTISEMENT,
        code: 0,
        checksum: U16::ZERO,
        flags: U32::new(flags | neighbour::OVERRIDE),
        target: U128::new(target),
    };
    *take_mut::<LinkLayerOption>(option)?.0 = LinkLayerOption { kind: neighbour::TARGET_LINK_LAYER, units: 1, mac: mac.0 };
    let pseudo = checksum::pseudo_sum(target, destination, protocol::ICMPV6, message.len());
    let checksum = checksum::finish(pseudo + checksum::sum(message));
    take_mut::<NeighbourMessage>(message)?.0.checksum.set(checksum);
    let ip = NetworkHeader::new(target, destination, protocol::ICMPV6, ADVERTISEMENT_BYTES);
    let (_, packet) = take_mut::<Ethernet>(frame)?;
    NetworkHeader { hop_limit: icmpv6::NEIGHBOUR_HOP_LIMIT, ..ip }.write(packet)?;
    Some(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::testing::{Bytes, v6};
    use crate::testing::{OUR_MAC, PEER_MAC, Packet, Segment, arp_request, neighbour_solicitation};

    const ASKER: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const OURS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 100);
    const ASKER6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
    const OURS6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 1, 0x100);

    #[test]
    fn an_arp_request_becomes_the_reply() {
        let mut buffer = Bytes::new(arp_request(ASKER, OURS));
        assert_eq!(arp_question(&buffer.frame), Some(OURS.into()));
        assert!(arp_reply(&mut buffer, OUR_MAC));
        let expected = [
            &PEER_MAC.0[..],
            &OUR_MAC.0,
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
            &OUR_MAC.0,
            &OURS.octets(),
            &PEER_MAC.0,
            &ASKER.octets(),
        ]
        .concat();
        assert_eq!(buffer.frame, expected);
    }

    #[test]
    fn replies_and_announcements_are_no_requests() {
        let mut reply = arp_request(ASKER, OURS);
        reply[21] = 2;
        for frame in [reply, arp_request(OURS, OURS)] {
            let mut buffer = Bytes::new(frame.clone());
            assert_eq!(arp_question(&frame), None);
            assert!(!arp_reply(&mut buffer, OUR_MAC));
            assert_eq!(buffer.frame, frame);
        }
        assert_eq!(arp_question(&arp_request(Ipv4Addr::UNSPECIFIED, OURS)), Some(OURS.into()), "a probe is a request");
    }

    #[test]
    fn a_probe_asks_for_an_address_and_makes_nobody_its_owner() {
        let mut buffer = Bytes::new(Vec::new());
        assert!(probe(&mut buffer, OURS.into(), OUR_MAC));
        assert_eq!((buffer.frame.len(), &buffer.frame[..6]), (60, &[0xff; 6][..]));
        assert_eq!((arp_probe(&buffer.frame), arp_claim(&buffer.frame)), (Some((OURS.into(), OUR_MAC)), None));
        for frame in [arp_request(ASKER, OURS), arp_request(OURS, OURS)] {
            assert_eq!(arp_probe(&frame), None);
        }
        assert!(probe(&mut buffer, OURS6.into(), OUR_MAC));
        let headers = v6(&buffer.frame);
        assert_eq!((headers.tuple.source, neighbour_question(&buffer.frame, &headers)), (0, Some(OURS6.into())));
        assert_eq!(buffer.frame[..6], [0x33, 0x33, 0xff, 1, 1, 0]);
    }

    #[test]
    fn a_solicitation_becomes_the_advertisement() {
        let mut asked_directly = neighbour_solicitation(ASKER6, OURS6);
        asked_directly.payload.truncate(16); // a unicast solicitation may come without the sender's MAC
        asked_directly.destination = OURS6.into();
        asked_directly.destination_mac = OUR_MAC;
        for solicitation in [neighbour_solicitation(ASKER6, OURS6), asked_directly] {
            let mut buffer = Bytes::new(solicitation.build());
            let headers = v6(&buffer.frame);
            assert_eq!(neighbour_question(&buffer.frame, &headers), Some(OURS6.into()));
            assert!(neighbour_advertisement(&mut buffer, &headers, OUR_MAC));
            let segment = Segment::Icmp { kind: 136, code: 0, rest: 0x6000_0000 };
            let mut expected = Packet::between(OURS6.into(), ASKER6.into(), segment)
                .payload(&[&OURS6.octets()[..], &[2, 1], &OUR_MAC.0].concat())
                .hop_limit(255);
            (expected.source_mac, expected.destination_mac) = (OUR_MAC, PEER_MAC);
            assert_eq!(buffer.frame, expected.build());
        }
    }

    #[test]
    fn a_solicitation_in_the_name_of_another_station_is_valid_and_carries_its_address() {
        let mut buffer = Bytes::new(Vec::new());
        assert!(solicitation(&mut buffer, (ASKER6.into(), PEER_MAC), (OURS6.into(), OUR_MAC)));
        let headers = v6(&buffer.frame);
        assert_eq!(neighbour_question(&buffer.frame, &headers), Some(OURS6.into()));
        assert_eq!(neighbour_asker(&buffer.frame, &headers), Some((ASKER6.into(), PEER_MAC)));
        assert_eq!(buffer.frame[..6], OUR_MAC.0);
        assert_eq!(buffer.frame[78..], [&[1, 1][..], &PEER_MAC.0].concat());
    }

    #[test]
    fn invalid_solicitations_are_no_requests() {
        let valid = || neighbour_solicitation(ASKER6, OURS6);
        let edited = |edit: fn(&mut Packet)| {
            let mut packet = valid();
            edit(&mut packet);
            packet.build()
        };
        let mut wrong_checksum = valid().build();
        wrong_checksum[56] ^= 1;
        let rows: Vec<(&str, Vec<u8>)> = vec![
            ("a code", edited(|p| p.segment = Segment::Icmp { kind: 135, code: 1, rest: 0 })),
            ("an advertisement", edited(|p| p.segment = Segment::Icmp { kind: 136, code: 0, rest: 0 })),
            ("cut short", edited(|p| p.payload.truncate(15))),
            ("an option of length 0", edited(|p| p.payload[17] = 0)),
            ("an option beyond the packet", edited(|p| p.payload[17] = 2)),
            ("a group as target", edited(|p| p.payload[0] = 0xff)),
            ("a wrong checksum", wrong_checksum),
        ];
        for (sentence, frame) in rows {
            let mut buffer = Bytes::new(frame.clone());
            let headers = v6(&frame);
            assert_eq!(neighbour_question(&frame, &headers), None, "{sentence}");
            assert!(!neighbour_advertisement(&mut buffer, &headers, OUR_MAC), "{sentence}");
            assert_eq!(buffer.frame, frame, "{sentence}");
        }
    }

    #[test]
    fn an_advertisement_that_finds_no_room_changes_nothing() {
        let mut solicitation = neighbour_solicitation(ASKER6, OURS6);
        solicitation.payload.truncate(16);
        let frame = solicitation.build();
        let mut buffer = Bytes { room: 85, frame: frame.clone() };
        assert!(!neighbour_advertisement(&mut buffer, &v6(&frame), OUR_MAC));
        assert_eq!(buffer.frame, frame);
    }
}
