//! "Who has this address?", asked by ARP (RFC 826) or neighbour discovery (RFC 4861), and the answer "I".

use zerocopy::network_endian::{U16, U32, U128};

use crate::checksum;
use crate::wire::{Arp, Ethernet, Extension, LinkLayerOption, NeighbourMessage, icmpv6, neighbour, protocol, take, take_mut};
use crate::{Buffer, Headers, Mac, Transport};

use super::{NetworkHeader, is_group_address, transport_bytes, written_transport_offset};

/// Hop limit of neighbour discovery: a packet that came through a router cannot have it (RFC 4861 section 7.1).
const NEIGHBOUR_HOP_LIMIT: u8 = 255;
/// Bytes of an advertisement with the one option it carries.
const ADVERTISEMENT_BYTES: u16 = 32;

/// An ARP request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpQuestion {
    /// The address asked for.
    pub target: u32,
    /// Who asks; 0 in a probe (RFC 5227 section 2.1.1).
    pub sender: u32,
}

/// What an ARP frame asks. None for replies, and for announcements of the sender's own address.
#[must_use]
pub fn arp_question(frame: &[u8]) -> Option<ArpQuestion> {
    let (_, packet) = take::<Ethernet>(frame)?;
    let (arp, _) = take::<Arp>(packet)?;
    let question = ArpQuestion { target: arp.target_address.get(), sender: arp.sender_address.get() };
    (arp.operation.get() == Arp::REQUEST && question.target != question.sender).then_some(question)
}

/// Turns an ARP request into the reply that its target has `mac`. False when it is none.
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

/// The address that a valid neighbour solicitation asks for (RFC 4861 section 7.1.1). None for anything else.
#[must_use]
pub fn neighbour_question(frame: &[u8], headers: &Headers<u128>) -> Option<u128> {
    let is_solicitation = matches!(headers.transport, Transport::Icmp { kind: icmpv6::NEIGHBOUR_SOLICITATION, code: 0 });
    if !is_solicitation || headers.hop_limit != NEIGHBOUR_HOP_LIMIT {
        return None;
    }
    let bytes = transport_bytes(frame, headers)?;
    let (message, mut options) = take::<NeighbourMessage>(bytes)?;
    while !options.is_empty() {
        // Kind and length; the length counts its own 2 bytes, and 0 is forbidden (RFC 4861 section 4.6).
        let (option, _) = take::<Extension>(options)?;
        options = options.get(usize::from(option.units) * 8..).filter(|_| option.units > 0)?;
    }
    let tuple = &headers.tuple;
    let pseudo = checksum::pseudo_sum(tuple.source, tuple.destination, protocol::ICMPV6, bytes.len());
    let target = message.target.get();
    (checksum::finish(pseudo + checksum::sum(bytes)) == 0 && !is_group_address(target)).then_some(target)
}

/// Turns a neighbour solicitation into the advertisement that its target has `mac`: solicited, override. False when it
/// is none, or the buffer has no room for the option.
#[must_use]
pub fn neighbour_advertisement(buffer: &mut impl Buffer, headers: &Headers<u128>, mac: Mac) -> bool {
    let Some(target) = neighbour_question(buffer.bytes(), headers) else { return false };
    buffer.resize(written_transport_offset::<u128>() + usize::from(ADVERTISEMENT_BYTES))
        && write_advertisement(buffer.bytes_mut(), headers.tuple.source, target, mac).is_some()
}

fn write_advertisement(frame: &mut [u8], asker: u128, target: u128, mac: Mac) -> Option<()> {
    let message = frame.get_mut(written_transport_offset::<u128>()..)?;
    let (advertisement, option) = take_mut::<NeighbourMessage>(message)?;
    *advertisement = NeighbourMessage {
        kind: icmpv6::NEIGHBOUR_ADVERTISEMENT,
        code: 0,
        checksum: U16::ZERO,
        flags: U32::new(neighbour::SOLICITED | neighbour::OVERRIDE),
        target: U128::new(target),
    };
    *take_mut::<LinkLayerOption>(option)?.0 = LinkLayerOption { kind: neighbour::TARGET_LINK_LAYER, units: 1, mac: mac.0 };
    let pseudo = checksum::pseudo_sum(target, asker, protocol::ICMPV6, message.len());
    let checksum = checksum::finish(pseudo + checksum::sum(message));
    take_mut::<NeighbourMessage>(message)?.0.checksum.set(checksum);
    let ip = NetworkHeader {
        source: target,
        destination: asker,
        protocol: protocol::ICMPV6,
        traffic_class: 0,
        hop_limit: NEIGHBOUR_HOP_LIMIT,
        payload_len: ADVERTISEMENT_BYTES,
    };
    let (ethernet, packet) = take_mut::<Ethernet>(frame)?;
    ethernet.destination = ethernet.source;
    ethernet.source = mac.0;
    ip.write(packet)?;
    Some(())
}
