//! The outer headers of eight packets: a word of each packet in one register. Words are in the byte order of the machine.
//!
//! **Invariant:** the bytes are those of the loop for one packet at a time (`fast::outer`).
//!
//! Not here: which packets go into tunnels (`tunnels`).

use super::super::follow::PacketHead;
use super::super::outer::{self, bytes_before};
use super::super::record::{HEAD_V4, HEAD_V6};
use super::checksums::{finished, halves, sent};
use super::pass::{Eight, Found, KeysOfEight};
use super::start::{Start, Starts, starts};
use crate::flow::Direction;
use crate::snapshot::Exit;
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{Buffer, Ethernet, HOP_LIMIT, Ipv4, Ipv6, Udp, ether_type, protocol};

const LINK: usize = Ethernet::BYTES as usize;
const V4: usize = Ipv4::BYTES as usize;
const V6: usize = Ipv6::BYTES as usize;
/// Bytes before the inner packet, without and with a UDP header.
const V4_BEFORE: [usize; 2] = [bytes_before(V4, false), bytes_before(V4, true)];
const V6_BEFORE: [usize; 2] = [bytes_before(V6, false), bytes_before(V6, true)];

/// What outer headers depend on besides the packets.
pub(in crate::forward::fast) struct Tunnelled<'e, 'f, 's, A: KeysOfEight> {
    pub(super) eight: &'e Eight<A>,
    pub(super) found: &'e Found<'f, 's, A::Key>,
    /// Outer source addresses.
    pub(super) sources: &'e [A::Source; LANES],
    /// Whether they are all the same.
    pub(super) has_one_source: bool,
    /// The destination port of UDP headers.
    pub(super) gue: u16,
}

/// A family of which the outer headers of eight packets are written at a time.
pub(in crate::forward::fast) trait OutersOfEight: KeysOfEight {
    /// Writes outer headers, with a UDP header if they are to have one, before eight packets, and lowers the hop limits of
    /// these. The frames begin where the link headers will, and have the heads of the packets.
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &Tunnelled<'_, '_, '_, Self>, group: &mut [impl Buffer; LANES]);
}

impl OutersOfEight for u32 {
    #[inline(always)]
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &Tunnelled<'_, '_, '_, u32>, group: &mut [impl Buffer; LANES]) {
        if IN_UDP {
            before_v4::<{ V4_BEFORE[1] }, IN_UDP>(avx2, of, group);
        } else {
            before_v4::<{ V4_BEFORE[0] }, IN_UDP>(avx2, of, group);
        }
    }
}

#[inline(always)]
fn before_v4<const BEFORE: usize, const IN_UDP: bool>(
    avx2: Avx2,
    &Tunnelled { eight, found, sources, gue, .. }: &Tunnelled<'_, '_, '_, u32>,
    group: &mut [impl Buffer; LANES],
) {
    let Some(mut starts) = starts::<BEFORE, [u8; HEAD_V4], _>(group) else { return };
    let inner = avx2.lanes(starts.each_ref().map(|Start { head: [a, b, c, d, ..], .. }| u32::from_ne_bytes([*a, *b, *c, *d])));
    let source = avx2.lanes(sources.map(|source| u32::from_ne_bytes(source.octets())));
    let destination = avx2.lanes(found.flows.map(|flow| flow.key(Direction::ToClient).source()));
    let carried_len = carried_len::<IN_UDP>(avx2, eight.shapes.packet_lens(avx2));
    let carried = if IN_UDP { protocol::UDP } else { protocol::IPV4 };
    // Version, header length and traffic class of the inner packet.
    let start = inner.with_upper((carried_len + avx2.splat(Ipv4::BYTES.into())).lower_number().left::<16>());
    let flags = avx2.splat(outer::pair(0, Ipv4::DONT_FRAGMENT));
    let hops = avx2.splat(u32::from_ne_bytes([HOP_LIMIT, carried, 0, 0]));
    let sums = sum(avx2, [start, flags, hops, source]) + halves(avx2, destination);
    let hops = hops.with_upper(finished(avx2, sums).left::<16>());
    let rows = Lanes::rows([start, flags, hops, source]);
    for (((start, row), flow), exit) in starts.iter_mut().zip(rows).zip(found.flows).zip(found.exits) {
        write_link(&mut start.link, exit, ether_type::IPV4);
        start.link[LINK..LINK + 16].copy_from_slice(&row.bytes());
        start.link[LINK + 16..LINK + V4].copy_from_slice(&flow.key(Direction::ToClient).source().to_ne_bytes());
    }
    if IN_UDP {
        // Without checksum: the inner packet has one.
        let header = [ports(avx2, eight, gue), carried_len.lower_number()];
        write_udp(&mut starts, LINK + V4, header, avx2);
    }
    u32::lower_hop_limits(avx2, &eight.read, &mut starts);
}

impl OutersOfEight for u128 {
    #[inline(always)]
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &Tunnelled<'_, '_, '_, u128>, group: &mut [impl Buffer; LANES]) {
        if IN_UDP {
            before_v6::<{ V6_BEFORE[1] }, IN_UDP>(avx2, of, group);
        } else {
            before_v6::<{ V6_BEFORE[0] }, IN_UDP>(avx2, of, group);
        }
    }
}

#[inline(always)]
fn before_v6<const BEFORE: usize, const IN_UDP: bool>(
    avx2: Avx2,
    &Tunnelled { eight, found, sources, has_one_source, gue }: &Tunnelled<'_, '_, '_, u128>,
    group: &mut [impl Buffer; LANES],
) {
    const CLASS: u32 = u32::from_ne_bytes([0xff, 0xf0, 0, 0]);
    let Some(mut starts) = starts::<BEFORE, [u8; HEAD_V6], _>(group) else { return };
    let [inner, hops, _, _] = avx2.columns(starts.each_ref().map(|start| start.bytes_at(BEFORE)));
    let destinations = found.flows.map(|flow| flow.key(Direction::ToClient).source());
    let carried_len = carried_len::<IN_UDP>(avx2, eight.shapes.packet_lens(avx2));
    let carried = if IN_UDP { protocol::UDP } else { protocol::IPV6 };
    // Version and traffic class of the inner packet.
    let label = eight.shapes.entropy & avx2.splat(0xf_ffff);
    let start = inner & avx2.splat(CLASS) | label.lower_number().left::<16>() | label.upper_number();
    let len = carried_len.lower_number().with_upper(avx2.splat(u32::from_ne_bytes([0, 0, carried, HOP_LIMIT])));
    if IN_UDP {
        let ports = ports(avx2, eight, gue);
        let sources = if has_one_source {
            let [a, b, c, d]: [u32; 4] = zerocopy::transmute!(sources[0].octets());
            [avx2.splat(a), avx2.splat(b), avx2.splat(c), avx2.splat(d)]
        } else {
            avx2.columns(sources.map(|source| source.octets()))
        };
        let of_outer = sum(avx2, sources) + sum(avx2, avx2.columns(destinations));
        // The length is part of the pseudo header and of the UDP header.
        let lens = carried_len.lower_number().left::<1>();
        let pseudo = lens + avx2.splat(outer::pair(0, u16::from(protocol::UDP)) >> 16);
        // Of the inner packet, see `bytes_of_same_sum`: the hop limit is one less by then.
        let protocol_and_hops = hops.right::<16>() - avx2.splat(1 << 8);
        let protocol = protocol_and_hops & avx2.splat(0xff);
        let of_inner = halves(avx2, inner) + protocol_and_hops + (protocol.left::<8>() ^ avx2.splat(0xffff));
        let checksum = sent(avx2, finished(avx2, of_outer + pseudo + halves(avx2, ports) + of_inner));
        write_udp(&mut starts, LINK + V6, [ports, carried_len.lower_number() | checksum.left::<16>()], avx2);
    }
    let rows = Lanes::rows([start, len, avx2.splat(0), avx2.splat(0)]);
    for (lane, start) in starts.iter_mut().enumerate() {
        write_link(&mut start.link, found.exits[lane], ether_type::IPV6);
        start.link[LINK..LINK + 16].copy_from_slice(&rows[lane].bytes());
        start.link[LINK + 8..LINK + 24].copy_from_slice(&sources[lane].octets());
        start.link[LINK + 24..LINK + V6].copy_from_slice(&destinations[lane]);
    }
    u128::lower_hop_limits(avx2, &eight.read, &mut starts);
}

/// The sums of the halves of four words. Without a loop or `fold`, which the compiler may compile for any processor.
#[inline(always)]
fn sum(avx2: Avx2, [a, b, c, d]: [Lanes; 4]) -> Lanes {
    halves(avx2, a) + halves(avx2, b) + halves(avx2, c) + halves(avx2, d)
}

/// Bytes of the inner packets and of the UDP headers, if there are any.
#[inline(always)]
fn carried_len<const IN_UDP: bool>(avx2: Avx2, packet_lens: Lanes) -> Lanes {
    if IN_UDP { packet_lens + avx2.splat(Udp::BYTES.into()) } else { packet_lens }
}

/// Source ports from hashes, and the destination port.
#[inline(always)]
fn ports<A: KeysOfEight>(avx2: Avx2, eight: &Eight<A>, destination: u16) -> Lanes {
    let source = eight.shapes.entropy.right::<18>() | avx2.splat(0xc000);
    source.lower_number() | avx2.splat(outer::pair(0, destination))
}

/// Writes UDP headers, of two words, at an offset of the frames.
#[inline(always)]
fn write_udp<const BEFORE: usize, H: PacketHead>(
    starts: &mut Starts<'_, BEFORE, H>,
    at: usize,
    [ports, len]: [Lanes; 2],
    avx2: Avx2,
) {
    let rows = Lanes::rows([ports, len, avx2.splat(0), avx2.splat(0)]);
    for (start, row) in starts.iter_mut().zip(rows) {
        start.link[at..at + 8].copy_from_slice(&row.bytes()[..8]);
    }
}

/// Writes the Ethernet header.
#[inline(always)]
fn write_link(before: &mut [u8], exit: &Exit, ether_type: u16) {
    let _ = exit.write_addresses(before); // it is long enough
    before[LINK - 2..LINK].copy_from_slice(&ether_type.to_be_bytes());
}
