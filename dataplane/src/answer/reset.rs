//! TCP resets in answer to a segment that belongs to no connection.

use crate::checksum;
use crate::wire::{Ethernet, Tcp, protocol, take, take_mut};
use crate::{Address, Buffer, Headers, Transport, tcp_flags};
use zerocopy::IntoBytes;
use zerocopy::network_endian::{U16, U32};

use super::{HOP_LIMIT, NetworkHeader, network_len, transport_bytes, turn_link, written_transport_offset};

/// Turns a TCP segment into the reset that answers it (RFC 9293 section 3.10.7.1). False when it is no TCP or a reset.
#[must_use]
pub fn tcp_reset<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>) -> bool {
    let Some(tcp) = reset_of(buffer.bytes(), headers) else { return false };
    buffer.resize(usize::from(Ethernet::BYTES + network_len::<A>() + Tcp::BYTES))
        && write(buffer.bytes_mut(), headers, tcp).is_some()
}

/// The header of the answer, without its checksum.
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

/// The sequence number after the segment: its data, and one each for SYN and FIN.
fn sequence_after<A: Address>(tcp: &Tcp, headers: &Headers<A>) -> u32 {
    let head_len = (headers.transport_offset - headers.network_offset).saturating_add(tcp.header_len());
    let data_len = u32::from(headers.packet_len.saturating_sub(head_len));
    let controls = u32::from(tcp.flags & tcp_flags::SYN != 0) + u32::from(tcp.flags & tcp_flags::FIN != 0);
    tcp.sequence.get().wrapping_add(data_len).wrapping_add(controls)
}

fn write<A: Address>(frame: &mut [u8], headers: &Headers<A>, mut tcp: Tcp) -> Option<()> {
    let ip = NetworkHeader {
        source: headers.tuple.destination,
        destination: headers.tuple.source,
        protocol: protocol::TCP,
        traffic_class: 0,
        hop_limit: HOP_LIMIT,
        payload_len: Tcp::BYTES,
    };
    let pseudo = checksum::pseudo_sum(ip.source, ip.destination, ip.protocol, usize::from(Tcp::BYTES));
    tcp.checksum.set(checksum::finish(pseudo + checksum::sum(tcp.as_bytes())));
    let transport = frame.get_mut(written_transport_offset::<A>()..)?;
    *take_mut::<Tcp>(transport)?.0 = tcp;
    ip.write(turn_link(frame)?)?;
    Some(())
}
