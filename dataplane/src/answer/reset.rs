//! TCP resets: in answer to a segment that belongs to no connection, and those that no packet turns into.

use std::net::IpAddr;

use proto::Family;

use crate::checksum;
use crate::decide::Reset;
use crate::wire::{Ethernet, Tcp, ether_type, protocol, take, take_mut};
use crate::{Address, Buffer, Headers, Mac, Transport, tcp_flags};
use zerocopy::IntoBytes;
use zerocopy::network_endian::{U16, U32};

use super::{HOP_LIMIT, NetworkHeader, network_len, transport_bytes, turn_link, written_transport_offset};

/// Turns a TCP segment into the reset that answers it (RFC 9293 section 3.10.7.1). Returns false when the packet is not
/// TCP, or is a reset.
#[must_use]
pub fn tcp_reset<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>, mac: Mac) -> bool {
    let Some(tcp) = reset_of(buffer.bytes(), headers) else { return false };
    buffer.resize(usize::from(Ethernet::BYTES + network_len::<A>() + Tcp::BYTES))
        && write(buffer.bytes_mut(), headers, tcp, mac).is_some()
}

/// The TCP header of the answer, without its checksum.
fn reset_of<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<Tcp> {
    let Transport::Tcp { flags } = headers.transport else { return None };
    if flags & tcp_flags::RST != 0 {
        return None;
    }
    let (tcp, _) = take::<Tcp>(transport_bytes(frame, headers)?)?;
    let (sequence, acknowledgement, flags) = if flags & tcp_flags::ACK != 0 {
        (tcp.acknowledgement, U32::ZERO, tcp_flags::RST)
    } else {
        (U32::ZERO, U32::new(sequence_after(tcp, headers)), tcp_flags::RST | tcp_flags::ACK)
    };
    Some(Tcp {
        source_port: tcp.destination_port,
        destination_port: tcp.source_port,
        sequence,
        acknowledgement,
        data_offset: 5 << 4,
        flags,
        window: U16::ZERO,
        checksum: U16::ZERO,
        urgent: U16::ZERO,
    })
}

/// The sequence number after the segment: its data, plus one each for SYN and FIN.
fn sequence_after<A: Address>(tcp: &Tcp, headers: &Headers<A>) -> u32 {
    let head_len = (headers.transport_offset - headers.network_offset).saturating_add(tcp.header_len());
    let data_len = u32::from(headers.packet_len.saturating_sub(head_len));
    let controls = u32::from(tcp.flags & tcp_flags::SYN != 0) + u32::from(tcp.flags & tcp_flags::FIN != 0);
    tcp.sequence.get().wrapping_add(data_len).wrapping_add(controls)
}

fn write<A: Address>(frame: &mut [u8], headers: &Headers<A>, tcp: Tcp, mac: Mac) -> Option<()> {
    write_segment(frame, headers.tuple.destination, headers.tuple.source, tcp)?;
    turn_link(frame, mac).map(|_| ())
}

/// Writes the segment after an existing Ethernet header.
fn write_segment<A: Address>(frame: &mut [u8], source: A, destination: A, mut tcp: Tcp) -> Option<()> {
    let ip = NetworkHeader {
        source,
        destination,
        protocol: protocol::TCP,
        traffic_class: 0,
        hop_limit: HOP_LIMIT,
        payload_len: Tcp::BYTES,
    };
    let pseudo = checksum::pseudo_sum(ip.source, ip.destination, ip.protocol, usize::from(Tcp::BYTES));
    tcp.checksum.set(checksum::finish(pseudo + checksum::sum(tcp.as_bytes())));
    let transport = frame.get_mut(written_transport_offset::<A>()..)?;
    *take_mut::<Tcp>(transport)?.0 = tcp;
    ip.write(take_mut::<Ethernet>(frame)?.1)?;
    Some(())
}

/// Writes a RST into an empty buffer. Returns false when there is no room for it.
#[must_use]
pub fn write_reset(buffer: &mut impl Buffer, reset: &Reset) -> bool {
    match (reset.source.ip(), reset.destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => write_anew(buffer, u32::from(from), u32::from(to), reset),
        (IpAddr::V6(from), IpAddr::V6(to)) => write_anew(buffer, u128::from(from), u128::from(to), reset),
        _ => false,
    }
}

fn write_anew<A: Address>(buffer: &mut impl Buffer, source: A, destination: A, reset: &Reset) -> bool {
    let tcp = Tcp {
        source_port: U16::new(reset.source.port()),
        destination_port: U16::new(reset.destination.port()),
        sequence: U32::new(reset.sequence),
        acknowledgement: U32::new(reset.acknowledgement.unwrap_or(0)),
        data_offset: 5 << 4,
        flags: if reset.acknowledgement.is_some() { tcp_flags::RST | tcp_flags::ACK } else { tcp_flags::RST },
        window: U16::ZERO,
        checksum: U16::ZERO,
        urgent: U16::ZERO,
    };
    let ether_type = match A::FAMILY {
        Family::V4 => ether_type::IPV4,
        Family::V6 => ether_type::IPV6,
    };
    let link =
        Ethernet { destination: reset.exit.destination_mac.0, source: reset.exit.source_mac.0, ether_type: U16::new(ether_type) };
    if !buffer.resize(usize::from(Ethernet::BYTES + network_len::<A>() + Tcp::BYTES)) {
        return false;
    }
    let frame = buffer.bytes_mut();
    let Some((ethernet, _)) = take_mut::<Ethernet>(frame) else { return false };
    *ethernet = link;
    write_segment(frame, source, destination, tcp).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::tests::{Bytes, v4, v6};
    use crate::tcp_flags::{ACK, FIN, RST, SYN};
    use crate::testing::{OUR_MAC, PEER_MAC, Packet, Segment};

    fn segment(packet: Packet, new_flags: u8, new_sequence: u32, new_acknowledgement: u32) -> Packet {
        let Segment::Tcp { ports, .. } = packet.segment else { panic!("only TCP is reset") };
        let segment = Segment::Tcp { ports, flags: new_flags, sequence: new_sequence, acknowledgement: new_acknowledgement };
        Packet { segment, ..packet }
    }

    #[test]
    fn numbers_are_those_of_rfc_9293() {
        let rows = [
            ("a SYN counts as one", SYN, 1_000, 0, 0, (RST | ACK, 0, 1_001)),
            ("a SYN with data counts both", SYN, 1_000, 0, 10, (RST | ACK, 0, 1_011)),
            ("data and FIN without ACK", FIN, 1_000, 7, 3, (RST | ACK, 0, 1_004)),
            ("sequence numbers wrap", SYN, u32::MAX, 0, 2, (RST | ACK, 0, 2)),
            ("an ACK gives the number", ACK, 1_000, 77, 5, (RST, 77, 0)),
            ("a SYN-ACK too", SYN | ACK, 1_000, 78, 0, (RST, 78, 0)),
        ];
        let tuples = [("198.51.100.7:5555", "192.0.2.100:80"), ("[2001:db8::7]:5555", "[2001:db8::100]:80")];
        for (sentence, flags, sequence, acknowledgement, payload_len, (reset_flags, reset_sequence, reset_ack)) in rows {
            for (from, to) in tuples {
                let mut received =
                    segment(Packet::tcp(from, to), flags, sequence, acknowledgement).payload(&vec![b'x'; payload_len]);
                received.padding = 6;
                let mut answer = segment(Packet::tcp(to, from), reset_flags, reset_sequence, reset_ack).hop_limit(64);
                (answer.source_mac, answer.destination_mac, answer.identification) = (OUR_MAC, PEER_MAC, 0);
                let mut buffer = Bytes::new(received.build());
                let bytes = buffer.frame.clone();
                let answered = if received.source.is_ipv4() {
                    tcp_reset(&mut buffer, &v4(&bytes), OUR_MAC)
                } else {
                    tcp_reset(&mut buffer, &v6(&bytes), OUR_MAC)
                };
                let mut expected = answer.build();
                // The engine's reset has a window of 0.
                let window = expected.len() - 6;
                expected[window..window + 2].fill(0);
                let checksum = crate::checksum::apply(
                    u16::from_be_bytes([expected[window + 2], expected[window + 3]]),
                    crate::checksum::word_delta(0x2000, 0),
                );
                expected[window + 2..window + 4].copy_from_slice(&checksum.to_be_bytes());
                assert!(answered, "{sentence}");
                assert_eq!(buffer.frame, expected, "{sentence}, to {to}");
                crate::testing::assert_checksums(&buffer.frame);
            }
        }
    }

    #[test]
    fn a_reset_is_not_answered() {
        let packet = Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").flags(RST | ACK);
        let mut buffer = Bytes::new(packet.build());
        let headers = v4(&buffer.frame);
        assert!(!tcp_reset(&mut buffer, &headers, OUR_MAC));
        assert_eq!(buffer.frame, packet.build());
    }
}
