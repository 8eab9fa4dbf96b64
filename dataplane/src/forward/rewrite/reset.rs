//! Resets: TCP RST in answer to a segment that belongs to no connection, SCTP ABORT and SHUTDOWN COMPLETE in answer to
//! a packet that belongs to no association (RFC 9260 section 8.4), and RSTs and bare ACKs that no packet turns into.
//!
//! Not here: whether a packet gets a reset, and rate limits.

use std::net::{IpAddr, SocketAddr};

use zerocopy::IntoBytes;
use zerocopy::network_endian::{U16, U32};

use crate::snapshot::Exit;
use crate::wire::{
    Address, Buffer, Chunk, Ethernet, Headers, Mac, NetworkHeader, Sctp, Tcp, Transport, Tuple, checksum, crc32c, ether_type_of,
    network_len, protocol, sctp_chunk, take, take_mut, tcp_flags, transport_bytes, turn_link, written_transport_offset,
};

/// A TCP RST to send that no packet turns into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reset {
    /// Source address and port, as the receiver knows the sender.
    pub source: SocketAddr,
    /// Destination address and port.
    pub destination: SocketAddr,
    /// The sequence number that its receiver expects next.
    pub sequence: u32,
    /// The acknowledgement number; `None` if the flag ACK is not set.
    pub acknowledgement: Option<u32>,
    /// How it leaves.
    pub exit: Exit,
}

impl Reset {
    pub(crate) fn new<A: Address>(tuple: Tuple<A>, sequence: u32, acknowledgement: Option<u32>, exit: Exit) -> Self {
        Self {
            source: SocketAddr::new(tuple.source.ip(), tuple.source_port),
            destination: SocketAddr::new(tuple.destination.ip(), tuple.destination_port),
            sequence,
            acknowledgement,
            exit,
        }
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
    turn_link(frame, mac).map(drop)
}

/// Writes the segment after an existing Ethernet header.
fn write_segment<A: Address>(frame: &mut [u8], source: A, destination: A, mut tcp: Tcp) -> Option<()> {
    let pseudo = checksum::pseudo_sum(source, destination, protocol::TCP, usize::from(Tcp::BYTES));
    tcp.checksum.set(checksum::finish(pseudo + checksum::sum(tcp.as_bytes())));
    let transport = frame.get_mut(written_transport_offset::<A>()..)?;
    *take_mut::<Tcp>(transport)?.0 = tcp;
    NetworkHeader::new(source, destination, protocol::TCP, Tcp::BYTES).write(take_mut::<Ethernet>(frame)?.1)?;
    Some(())
}

/// Writes a RST into an empty buffer. Returns false when there is no room for it.
#[must_use]
pub fn write_reset(buffer: &mut impl Buffer, reset: &Reset) -> bool {
    let flags = if reset.acknowledgement.is_some() { tcp_flags::RST | tcp_flags::ACK } else { tcp_flags::RST };
    write_flags(buffer, reset, flags)
}

/// Writes an ACK without data into an empty buffer, with the addresses and numbers of a RST. A receiver to which the
/// sequence number means nothing answers by an ACK with its own numbers (RFC 9293 section 3.10.7.4). Returns false when
/// there is no room for it.
#[must_use]
pub fn write_probe(buffer: &mut impl Buffer, probe: &Reset) -> bool {
    write_flags(buffer, probe, tcp_flags::ACK)
}

fn write_flags(buffer: &mut impl Buffer, reset: &Reset, flags: u8) -> bool {
    match (reset.source.ip(), reset.destination.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => write_new(buffer, u32::from(from), u32::from(to), reset, flags),
        (IpAddr::V6(from), IpAddr::V6(to)) => write_new(buffer, u128::from(from), u128::from(to), reset, flags),
        _ => false,
    }
}

fn write_new<A: Address>(buffer: &mut impl Buffer, source: A, destination: A, reset: &Reset, flags: u8) -> bool {
    let tcp = Tcp {
        source_port: U16::new(reset.source.port()),
        destination_port: U16::new(reset.destination.port()),
        sequence: U32::new(reset.sequence),
        acknowledgement: U32::new(reset.acknowledgement.unwrap_or(0)),
        data_offset: 5 << 4,
        flags,
        window: U16::ZERO,
        checksum: U16::ZERO,
        urgent: U16::ZERO,
    };
    if !buffer.resize(usize::from(Ethernet::BYTES + network_len::<A>() + Tcp::BYTES)) {
        return false;
    }
    let frame = buffer.bytes_mut();
    let Some((ethernet, _)) = take_mut::<Ethernet>(frame) else { return false };
    let (destination_mac, source_mac) = (reset.exit.destination_mac().0, reset.exit.source_mac().0);
    *ethernet = Ethernet { destination: destination_mac, source: source_mac, ether_type: U16::new(ether_type_of::<A>()) };
    write_segment(frame, source, destination, tcp).is_some()
}

/// The error cause "stale cookie" of an ERROR chunk (RFC 9260 section 3.3.10.3).
const STALE_COOKIE: u16 = 3;

/// The only chunk of an answer, and the tag that it is sent under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChunkAnswer {
    kind: u8,
    flags: u8,
    tag: u32,
}

/// Turns an SCTP packet into the answer of a host that has no such association. Returns false when the packet is not
/// SCTP, or one that gets no answer.
#[must_use]
pub fn sctp_abort<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>, mac: Mac) -> bool {
    let Transport::Sctp { .. } = headers.transport else { return false };
    let Some(answer) = transport_bytes(buffer.bytes(), headers).and_then(answer_to) else { return false };
    buffer.resize(usize::from(Ethernet::BYTES + network_len::<A>() + Sctp::BYTES + Chunk::BYTES))
        && write_abort(buffer.bytes_mut(), headers, answer, mac).is_some()
}

/// The rules of RFC 9260 section 8.4, in their order. The content of an INIT is not parsed: it is the only chunk of its
/// packet.
fn answer_to(packet: &[u8]) -> Option<ChunkAnswer> {
    let (sctp, mut chunks) = take::<Sctp>(packet)?;
    let (first, rest) = take::<Chunk>(chunks)?;
    let tag = sctp.tag.get();
    if first.kind == sctp_chunk::INIT {
        // The tag under which the sender expects the answer (section 3.3.2: never 0).
        let tag = take::<U32>(rest)?.0.get();
        return (tag != 0).then_some(ChunkAnswer { kind: sctp_chunk::ABORT, flags: 0, tag });
    }
    let mut kind = sctp_chunk::ABORT;
    // Each iteration consumes at least four bytes.
    while let Some((chunk, body)) = take::<Chunk>(chunks) {
        match chunk.kind {
            sctp_chunk::ABORT | sctp_chunk::SHUTDOWN_COMPLETE | sctp_chunk::COOKIE_ACK => return None,
            sctp_chunk::ERROR if take::<U16>(body).is_some_and(|(cause, _)| cause.get() == STALE_COOKIE) => return None,
            sctp_chunk::SHUTDOWN_ACK => kind = sctp_chunk::SHUTDOWN_COMPLETE,
            _ => {}
        }
        let len = usize::from(chunk.len.get()).max(usize::from(Chunk::BYTES));
        chunks = chunks.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(ChunkAnswer { kind, flags: Chunk::REFLECTED, tag })
}

fn write_abort<A: Address>(frame: &mut [u8], headers: &Headers<A>, answer: ChunkAnswer, mac: Mac) -> Option<()> {
    let tuple = &headers.tuple;
    let transport = frame.get_mut(written_transport_offset::<A>()..)?;
    let (sctp, chunk) = take_mut::<Sctp>(transport)?;
    *sctp = Sctp {
        source_port: U16::new(tuple.destination_port),
        destination_port: U16::new(tuple.source_port),
        tag: U32::new(answer.tag),
        checksum: zerocopy::little_endian::U32::ZERO,
    };
    *take_mut::<Chunk>(chunk)?.0 = Chunk { kind: answer.kind, flags: answer.flags, len: U16::new(Chunk::BYTES) };
    let checksum = crc32c::full(transport);
    take_mut::<Sctp>(transport)?.0.checksum.set(checksum);
    let ip = NetworkHeader::new(tuple.destination, tuple.source, protocol::SCTP, Sctp::BYTES + Chunk::BYTES);
    ip.write(turn_link(frame, mac)?)?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::icmp::{IcmpError, echo_reply, icmp_error};
    use crate::testing::{Bytes, v4, v6};
    use crate::testing::{OUR_MAC, PEER_MAC, Packet, Segment};
    use crate::wire::tcp_flags::{ACK, FIN, RST, SYN};

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
                let checksum = crate::wire::checksum::apply(
                    u16::from_be_bytes([expected[window + 2], expected[window + 3]]),
                    crate::wire::checksum::word_delta(0x2000, 0),
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
}
