//! SCTP ABORT and SHUTDOWN COMPLETE in answer to a packet that belongs to no association (RFC 9260 section 8.4).

use zerocopy::network_endian::{U16, U32};

use super::{HOP_LIMIT, NetworkHeader, network_len, transport_bytes, turn_link, written_transport_offset};
use crate::wire::{Chunk, Ethernet, Sctp, protocol, take, take_mut};
use crate::{Address, Buffer, Headers, Mac, Transport, crc32c, sctp_chunk};

/// The error cause "stale cookie" of an ERROR chunk (RFC 9260 section 3.3.10.3).
const STALE_COOKIE: u16 = 3;

/// The only chunk of an answer, and the tag that it is sent under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    kind: u8,
    flags: u8,
    tag: u32,
}

/// Turns an SCTP packet into the answer of a host that has no such association. Returns false when the packet is not
/// SCTP, or one that gets no answer.
#[must_use]
pub fn sctp_abort<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>, mac: Mac) -> bool {
    let Transport::Sctp { .. } = headers.transport else { return false };
    let Some(said) = transport_bytes(buffer.bytes(), headers).and_then(answer_to) else { return false };
    buffer.resize(usize::from(Ethernet::BYTES + network_len::<A>() + Sctp::BYTES + Chunk::BYTES))
        && write(buffer.bytes_mut(), headers, said, mac).is_some()
}

/// The rules of RFC 9260 section 8.4, in their order. The content of an INIT is not parsed: it is the only chunk of its
/// packet.
fn answer_to(packet: &[u8]) -> Option<Said> {
    let (sctp, mut chunks) = take::<Sctp>(packet)?;
    let (first, rest) = take::<Chunk>(chunks)?;
    let tag = sctp.tag.get();
    if first.kind == sctp_chunk::INIT {
        // The tag under which the sender expects the answer (section 3.3.2: never 0).
        let tag = take::<U32>(rest)?.0.get();
        return (tag != 0).then_some(Said { kind: sctp_chunk::ABORT, flags: 0, tag });
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
    Some(Said { kind, flags: Chunk::REFLECTED, tag })
}

fn write<A: Address>(frame: &mut [u8], headers: &Headers<A>, said: Said, mac: Mac) -> Option<()> {
    let tuple = &headers.tuple;
    let transport = frame.get_mut(written_transport_offset::<A>()..)?;
    let (sctp, chunk) = take_mut::<Sctp>(transport)?;
    *sctp = Sctp {
        source_port: U16::new(tuple.destination_port),
        destination_port: U16::new(tuple.source_port),
        tag: U32::new(said.tag),
        checksum: zerocopy::little_endian::U32::ZERO,
    };
    *take_mut::<Chunk>(chunk)?.0 = Chunk { kind: said.kind, flags: said.flags, len: U16::new(Chunk::BYTES) };
    let checksum = crc32c::full(transport);
    take_mut::<Sctp>(transport)?.0.checksum.set(checksum);
    let ip = NetworkHeader {
        source: tuple.destination,
        destination: tuple.source,
        protocol: protocol::SCTP,
        traffic_class: 0,
        hop_limit: HOP_LIMIT,
        payload_len: Sctp::BYTES + Chunk::BYTES,
    };
    ip.write(turn_link(frame, mac)?)?;
    Some(())
}
