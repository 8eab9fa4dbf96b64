//! The frame of a packet to explain: the shortest one of its protocol.
//!
//! Not here: parsing it, which is that of every packet (`wire`).

use std::net::IpAddr;

use proto::Protocol;

use super::explanation::{ExplainedPacket, PacketKind};
use crate::flow::Segment;
use crate::wire::checksum::{finish, sum};
use crate::wire::{HOP_LIMIT, Mac, ether_type, sctp_chunk, tcp_flags};

/// A frame between two addresses of one family. Checksums of the transport are left out: no decision depends on them.
pub(super) fn frame(packet: &ExplainedPacket, kind: PacketKind, segment: Segment, to: Mac) -> Vec<u8> {
    let &ExplainedPacket { protocol, source, destination, .. } = packet;
    let mut transport = [source.port().to_be_bytes(), destination.port().to_be_bytes()].concat();
    transport.extend(match protocol {
        Protocol::Tcp => tcp(kind, segment),
        Protocol::Udp => vec![0, 8, 0, 0],
        Protocol::Sctp => sctp(kind),
    });
    let len = u16::try_from(transport.len()).unwrap_or(u16::MAX);
    let (kind, network) = match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = vec![0x45, 0];
            header.extend((20 + len).to_be_bytes());
            header.extend([0, 0, 0x40, 0, HOP_LIMIT, protocol.number(), 0, 0]);
            header.extend([source.octets(), destination.octets()].concat());
            let checksum = finish(sum(&header)).to_be_bytes();
            header[10..12].copy_from_slice(&checksum);
            (ether_type::IPV4, header)
        }
        (source, destination) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(len.to_be_bytes());
            header.extend([protocol.number(), HOP_LIMIT]);
            for address in [source, destination] {
                let IpAddr::V6(address) = address else { continue };
                header.extend(address.octets());
            }
            (ether_type::IPV6, header)
        }
    };
    [&to.0[..], &[2, 0, 0, 0, 0, 1], &kind.to_be_bytes(), &network, &transport].concat()
}

/// What follows the ports: numbers, flags, window, checksum, urgent pointer.
fn tcp(kind: PacketKind, segment: Segment) -> Vec<u8> {
    let flags = match kind {
        PacketKind::First => tcp_flags::SYN,
        PacketKind::Later => tcp_flags::ACK,
    };
    let numbers = [segment.sequence.to_be_bytes(), segment.acknowledgement.to_be_bytes()].concat();
    [&numbers[..], &[0x50, flags, 0xff, 0xff, 0, 0, 0, 0]].concat()
}

/// What follows the ports: verification tag, checksum, and an INIT or a chunk with data.
fn sctp(kind: PacketKind) -> Vec<u8> {
    let (tag, chunk) = match kind {
        PacketKind::First => (0, sctp_chunk::INIT),
        PacketKind::Later => (1, sctp_chunk::DATA),
    };
    [&[0, 0, 0, tag, 0, 0, 0, 0, chunk, 3, 0, 20][..], &[0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]].concat()
}
