//! Bytes in front of the data of a packet, data that is cut off, and the segment that carries a header alone.
//!
//! **Invariant:** a change is all or nothing. Lengths and checksums of the packet are those of its new bytes; a wrong
//! checksum stays wrong.
//!
//! Not here: which packets get them (`execution::shifted`), and addresses.

use proto::Family;
use zerocopy::IntoBytes;
use zerocopy::network_endian::{U16, U32};

use super::shift::Timestamps;
use crate::flow::LastSaid;
use crate::snapshot::Exit;
use crate::wire::checksum::{apply, apply_udp, difference, finish, pseudo_sum, sum, word_delta};
use crate::wire::{
    Address, Buffer, Ethernet, Headers, Ipv4, Ipv6, NetworkHeader, Tcp, Transport, Tuple, Udp, ether_type_of, network_len,
    protocol, take, take_mut, tcp_flags, written_transport_offset,
};

/// The flag of segments with urgent data (RFC 9293 section 3.1).
const URG: u8 = 0x20;

/// The transport header of a packet, its place in the frame, and its share in the checksum.
struct TransportHeader {
    start: usize,
    end: usize,
    is_udp: bool,
}

impl TransportHeader {
    /// `None` if it does not fit the packet, or the packet the frame.
    fn of<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<Self> {
        let start = usize::from(headers.transport_offset);
        let packet_end = usize::from(headers.network_offset) + usize::from(headers.packet_len);
        let transport = frame.get(start..packet_end)?;
        let (len, is_udp) = match headers.transport {
            Transport::Tcp { .. } => (take::<Tcp>(transport)?.0.header_len().max(Tcp::BYTES), false),
            Transport::Udp => (Udp::BYTES, true),
            _ => return None,
        };
        let len = usize::from(len);
        (len <= transport.len()).then_some(Self { start, end: start + len, is_udp })
    }

    /// The checksum in the header.
    fn checksum(&self, frame: &[u8]) -> Option<u16> {
        let transport = frame.get(self.start..self.end)?;
        if self.is_udp {
            take::<Udp>(transport).map(|(udp, _)| udp.checksum.get())
        } else {
            take::<Tcp>(transport).map(|(tcp, _)| tcp.checksum.get())
        }
    }

    /// The sum of the header and its pseudo header, without the checksum itself.
    fn sum<A: Address>(&self, frame: &[u8], headers: &Headers<A>) -> Option<u64> {
        let before = headers.transport_offset.checked_sub(headers.network_offset)?;
        let len = usize::from(headers.packet_len.checked_sub(before)?);
        let Tuple { source, destination, .. } = headers.tuple;
        let number = if self.is_udp { protocol::UDP } else { protocol::TCP };
        let header = sum(frame.get(self.start..self.end)?) - u64::from(self.checksum(frame)?);
        Some(pseudo_sum(source, destination, number, len) + header)
    }
}

/// Inserts bytes before the data of a TCP or UDP packet, which is pushed then; an urgent pointer keeps pointing at the same
/// byte. Returns the headers as they are now; `None`, and no change, when there is no room in the buffer or the packet.
pub fn prefix<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>, bytes: &[u8]) -> Option<Headers<A>> {
    let added = u16::try_from(bytes.len()).ok()?;
    let longer = Headers { packet_len: headers.packet_len.checked_add(added)?, ..*headers };
    let place = TransportHeader::of(buffer.bytes(), headers)?;
    let (checksum, before) = (place.checksum(buffer.bytes())?, place.sum(buffer.bytes(), headers)?);
    // By the checksum, so that a wrong one stays wrong.
    let data = difference(before, u64::from(!checksum));
    if !buffer.prepend(bytes.len()) {
        return None;
    }
    let frame = buffer.bytes_mut();
    frame.copy_within(bytes.len()..bytes.len() + place.end, 0);
    frame.get_mut(place.end..place.end + bytes.len())?.copy_from_slice(bytes);
    set_lengths(frame, &longer, added, true)?;
    // At an odd offset each byte of the data is in the other half of a word.
    let moved = if bytes.len().is_multiple_of(2) { data } else { data.swap_bytes() };
    let after = place.sum(frame, &longer)? + sum(bytes) + u64::from(moved);
    set_checksum(frame, &place, difference(before + u64::from(data), after))?;
    Some(longer)
}

/// Cuts off the data of a TCP segment. Returns the headers as they are now; the bytes stay in the frame, behind the packet.
pub fn cut_data<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>) -> Option<Headers<A>> {
    let frame = buffer.bytes_mut();
    let place = TransportHeader::of(frame, headers)?;
    let (checksum, before) = (place.checksum(frame)?, place.sum(frame, headers)?);
    let data = difference(before, u64::from(!checksum));
    let packet_len = u16::try_from(place.end.checked_sub(usize::from(headers.network_offset))?).ok()?;
    let shorter = Headers { packet_len, ..*headers };
    set_lengths(frame, &shorter, 0, false)?;
    let after = place.sum(frame, &shorter)?;
    set_checksum(frame, &place, difference(before + u64::from(data), after))?;
    Some(shorter)
}

fn set_checksum(frame: &mut [u8], place: &TransportHeader, change: u16) -> Option<()> {
    let transport = frame.get_mut(place.start..place.end)?;
    if place.is_udp {
        let (udp, _) = take_mut::<Udp>(transport)?;
        udp.checksum.set(apply_udp(udp.checksum.get(), change));
    } else {
        let (tcp, _) = take_mut::<Tcp>(transport)?;
        tcp.checksum.set(apply(tcp.checksum.get(), change));
    }
    Some(())
}

/// Writes the length of the packet into its headers. `added`: bytes before its data; `is_pushed`: TCP delivers them now.
fn set_lengths<A: Address>(frame: &mut [u8], headers: &Headers<A>, added: u16, is_pushed: bool) -> Option<()> {
    let (head, transport) = frame.split_at_mut_checked(usize::from(headers.transport_offset))?;
    let network = head.get_mut(usize::from(headers.network_offset)..)?;
    match A::FAMILY {
        Family::V4 => {
            let (ip, _) = take_mut::<Ipv4>(network)?;
            ip.checksum.set(apply(ip.checksum.get(), word_delta(ip.total_len.get(), headers.packet_len)));
            ip.total_len.set(headers.packet_len);
        }
        Family::V6 => take_mut::<Ipv6>(network)?.0.payload_len.set(headers.packet_len.checked_sub(Ipv6::BYTES)?),
    }
    match headers.transport {
        // Bytes behind the datagram, which its length leaves out, stay outside.
        Transport::Udp => {
            let (udp, _) = take_mut::<Udp>(transport)?;
            udp.len.set(udp.len.get().saturating_add(added));
        }
        _ => {
            let (tcp, _) = take_mut::<Tcp>(transport)?;
            if is_pushed {
                tcp.flags |= tcp_flags::PSH;
            }
            if tcp.flags & URG != 0 {
                tcp.urgent.set(tcp.urgent.get().saturating_add(added));
            }
        }
    }
    Some(())
}

/// A segment whose only data is a header, as the client would have sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderSegment<A> {
    /// Addresses and ports when it leaves.
    pub tuple: Tuple<A>,
    /// Sequence number.
    pub sequence: u32,
    /// The acknowledgement number and window of the client.
    pub said: LastSaid,
    /// Timestamps, if the connection has them.
    pub timestamps: Option<Timestamps>,
}

/// Options with timestamps, as most stacks align them (RFC 7323 appendix A).
const STAMPED: [u8; 4] = [1, 1, 8, 10];
const STAMPED_LEN: u16 = 12;

/// Writes a segment with this header as its data into an empty buffer, to leave by this exit. Returns false when there is
/// no room for it, or it does not fit the exit.
#[must_use]
pub fn write_header_segment<A: Address>(
    buffer: &mut impl Buffer,
    segment: &HeaderSegment<A>,
    header: &[u8],
    exit: &Exit,
) -> bool {
    let options_len = if segment.timestamps.is_some() { STAMPED_LEN } else { 0 };
    let Ok(header_len) = u16::try_from(header.len()) else { return false };
    let transport_len = Tcp::BYTES + options_len + header_len;
    network_len::<A>() + transport_len <= exit.mtu
        && buffer.resize(written_transport_offset::<A>() + usize::from(transport_len))
        && write(buffer.bytes_mut(), segment, header, exit).is_some()
}

fn write<A: Address>(frame: &mut [u8], segment: &HeaderSegment<A>, header: &[u8], exit: &Exit) -> Option<()> {
    let Tuple { source, destination, source_port, destination_port, .. } = segment.tuple;
    let (head, transport) = frame.split_at_mut_checked(written_transport_offset::<A>())?;
    let transport_len = u16::try_from(transport.len()).ok()?;
    let (ethernet, network) = take_mut::<Ethernet>(head)?;
    let (to, from) = (exit.destination_mac().0, exit.source_mac().0);
    *ethernet = Ethernet { destination: to, source: from, ether_type: U16::new(ether_type_of::<A>()) };
    NetworkHeader::new(source, destination, protocol::TCP, transport_len).write(network)?;
    let (tcp, rest) = take_mut::<Tcp>(transport)?;
    let words = if segment.timestamps.is_some() { 8 } else { 5 };
    *tcp = Tcp {
        source_port: U16::new(source_port),
        destination_port: U16::new(destination_port),
        sequence: U32::new(segment.sequence),
        acknowledgement: U32::new(segment.said.acknowledgement),
        data_offset: words << 4,
        flags: tcp_flags::ACK | tcp_flags::PSH,
        window: U16::new(segment.said.window),
        checksum: U16::ZERO,
        urgent: U16::ZERO,
    };
    let (options, data) = rest.split_at_mut_checked(rest.len().checked_sub(header.len())?)?;
    if let Some(Timestamps { value, echo }) = segment.timestamps {
        let stamps =
            U32::new(value).as_bytes().iter().chain(U32::new(echo).as_bytes()).copied().collect::<arrayvec::ArrayVec<u8, 8>>();
        options.get_mut(..STAMPED.len())?.copy_from_slice(&STAMPED);
        options.get_mut(STAMPED.len()..)?.copy_from_slice(&stamps);
    }
    data.copy_from_slice(header);
    let checksum = finish(pseudo_sum(source, destination, protocol::TCP, transport.len()) + sum(transport));
    take_mut::<Tcp>(transport)?.0.checksum.set(checksum);
    Some(())
}
