//! The outer headers of eight packets, a word of each in one register: the wide form of `encapsulate`, for tunnels to
//! addresses of the packets' own family over an untagged link. Words are in the byte order of the machine.
//!
//! **Invariant:** the bytes are those of `encapsulate` for each of the packets.
//!
//! Not here: which packets go into tunnels (`fast::eight`).

use std::net::{Ipv4Addr, Ipv6Addr};

use super::bytes_of_same_sum;
use super::translate::{TranslatedEight, finished, halves, sent};
use crate::flow::{Direction, HotFlow};
use crate::port::PortIndex;
use crate::snapshot::{Exit, Tunnels, source_of};
use crate::wire::plain::head::{Head, HeadV4, HeadV6, Start, Starts, UNTAGGED, starts};
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{Buffer, HOP_LIMIT, Ipv4, Ipv6, Udp, ether_type, protocol};

const V4: usize = Ipv4::BYTES as usize;
const V6: usize = Ipv6::BYTES as usize;

/// Bytes before the inner packet, with an IP header of this many.
#[inline(always)]
pub(in crate::forward) const fn bytes_before(ip_header: usize, in_udp: bool) -> usize {
    UNTAGGED + ip_header + if in_udp { Udp::BYTES as usize } else { 0 }
}

/// What the outer headers of eight packets depend on.
pub(in crate::forward) struct EightOuters<'e, A: OuterFamily> {
    pub(in crate::forward) flows: [&'e HotFlow<A::Key>; LANES],
    pub(in crate::forward) read: A::Read,
    pub(in crate::forward) exits: [&'e Exit; LANES],
    /// Bytes of the inner packets.
    pub(in crate::forward) packet_lens: Lanes,
    /// The upper halves of the hashes of the packets.
    pub(in crate::forward) entropy: Lanes,
    /// Outer source addresses.
    pub(in crate::forward) sources: &'e [A::Source; LANES],
    /// Whether they are all the same.
    pub(in crate::forward) has_one_source: bool,
    /// The destination port of UDP headers.
    pub(in crate::forward) gue: u16,
}

/// A family of which the outer headers of eight packets are written at a time.
pub(in crate::forward) trait OuterFamily: TranslatedEight {
    /// An outer source address of a tunnel.
    type Source: Copy;
    /// Those of tunnels through a port, of which [`source_of`] selects one.
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Self::Source];
    /// Whether the outer checksum follows from the head of a packet, see [`bytes_of_same_sum`].
    fn has_inner_sum(head: &Self::Head) -> bool;
    /// Writes outer headers, with a UDP header if they are to have one, before eight packets, and lowers the hop limits of
    /// these. The frames begin where the link headers will, and have the heads of the packets.
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, Self>, group: &mut [impl Buffer; LANES]);
}

/// The outer source addresses of eight packets, of those of a port. Ports vary in UDP, addresses otherwise.
#[inline(always)]
pub(in crate::forward) fn sources<S: Copy>(of_port: &[S], entropy: Lanes, in_udp: bool) -> Option<[S; LANES]> {
    let mut sources = [*of_port.first()?; LANES];
    if of_port.len() > 1 && !in_udp {
        for (source, entropy) in sources.iter_mut().zip(entropy.to_array()) {
            *source = source_of(of_port, entropy)?;
        }
    }
    Some(sources)
}

/// Adds bytes before eight frames. Returns false, and leaves all as they are, if one has no room.
#[inline(always)]
pub(in crate::forward) fn prepend(group: &mut [impl Buffer; LANES], bytes: usize) -> bool {
    for lane in 0..LANES {
        if !group[lane].prepend(bytes) {
            group[..lane].iter_mut().for_each(|buffer| buffer.trim_front(bytes));
            return false;
        }
    }
    true
}

impl OuterFamily for u32 {
    type Source = Ipv4Addr;

    #[inline(always)]
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Ipv4Addr] {
        tunnels.sources_v4(port)
    }

    /// There is no outer checksum.
    #[inline(always)]
    fn has_inner_sum(_: &HeadV4) -> bool {
        true
    }

    #[inline(always)]
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u32>, group: &mut [impl Buffer; LANES]) {
        if IN_UDP {
            before_v4::<{ bytes_before(V4, true) }, IN_UDP>(avx2, of, group);
        } else {
            before_v4::<{ bytes_before(V4, false) }, IN_UDP>(avx2, of, group);
        }
    }
}

#[inline(always)]
fn before_v4<const BEFORE: usize, const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u32>, group: &mut [impl Buffer; LANES]) {
    let Some(mut starts) = starts::<BEFORE, HeadV4, _>(group) else { return };
    let inner = avx2.lanes(starts.each_ref().map(|Start { head: [a, b, c, d, ..], .. }| u32::from_ne_bytes([*a, *b, *c, *d])));
    let source = avx2.lanes(of.sources.map(|source| u32::from_ne_bytes(source.octets())));
    let destination = avx2.lanes(of.flows.map(|flow| flow.key(Direction::ToClient).source()));
    let carried_len = carried_len::<IN_UDP>(avx2, of.packet_lens);
    let carried = if IN_UDP { protocol::UDP } else { protocol::IPV4 };
    // Version, header length and traffic class of the inner packet.
    let start = inner.with_upper((carried_len + avx2.splat(Ipv4::BYTES.into())).lower_number().left::<16>());
    let flags = avx2.splat(pair(0, Ipv4::DONT_FRAGMENT));
    let hops = avx2.splat(u32::from_ne_bytes([HOP_LIMIT, carried, 0, 0]));
    let sums = sum(avx2, [start, flags, hops, source]) + halves(avx2, destination);
    let hops = hops.with_upper(finished(avx2, sums).left::<16>());
    let rows = Lanes::rows([start, flags, hops, source]);
    for (lane, start) in starts.iter_mut().enumerate() {
        let destination = of.flows[lane].key(Direction::ToClient).source();
        write_link(&mut start.link, of.exits[lane], ether_type::IPV4);
        start.link[UNTAGGED..UNTAGGED + 16].copy_from_slice(&rows[lane].bytes());
        start.link[UNTAGGED + 16..UNTAGGED + V4].copy_from_slice(&destination.to_ne_bytes());
    }
    if IN_UDP {
        // Without checksum: the inner packet has one.
        write_udp(&mut starts, UNTAGGED + V4, [ports(avx2, of.entropy, of.gue), carried_len.lower_number()], avx2);
    }
    u32::lower_hop_limits(avx2, &of.read, &mut starts);
}

impl OuterFamily for u128 {
    type Source = Ipv6Addr;

    #[inline(always)]
    fn tunnel_sources(tunnels: &Tunnels, port: PortIndex) -> &[Ipv6Addr] {
        tunnels.sources_v6(port)
    }

    #[inline(always)]
    fn has_inner_sum(head: &HeadV6) -> bool {
        bytes_of_same_sum(head).is_some()
    }

    #[inline(always)]
    fn write_outers<const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u128>, group: &mut [impl Buffer; LANES]) {
        if IN_UDP {
            before_v6::<{ bytes_before(V6, true) }, IN_UDP>(avx2, of, group);
        } else {
            before_v6::<{ bytes_before(V6, false) }, IN_UDP>(avx2, of, group);
        }
    }
}

#[inline(always)]
fn before_v6<const BEFORE: usize, const IN_UDP: bool>(avx2: Avx2, of: &EightOuters<'_, u128>, group: &mut [impl Buffer; LANES]) {
    const CLASS: u32 = u32::from_ne_bytes([0xff, 0xf0, 0, 0]);
    let Some(mut starts) = starts::<BEFORE, HeadV6, _>(group) else { return };
    let [inner, hops, _, _] = avx2.columns(starts.each_ref().map(|start| start.bytes_at(BEFORE)));
    // By loops, since the compiler may keep `map` as a call.
    let (mut destinations, mut sources) = ([[0; 16]; LANES], [[0; 16]; LANES]);
    for lane in 0..LANES {
        destinations[lane] = of.flows[lane].key(Direction::ToClient).source();
        sources[lane] = of.sources[lane].octets();
    }
    let carried_len = carried_len::<IN_UDP>(avx2, of.packet_lens);
    let carried = if IN_UDP { protocol::UDP } else { protocol::IPV6 };
    // Version and traffic class of the inner packet.
    let label = of.entropy & avx2.splat(0xf_ffff);
    let start = inner & avx2.splat(CLASS) | label.lower_number().left::<16>() | label.upper_number();
    let len = carried_len.lower_number().with_upper(avx2.splat(u32::from_ne_bytes([0, 0, carried, HOP_LIMIT])));
    if IN_UDP {
        let ports = ports(avx2, of.entropy, of.gue);
        let source = if of.has_one_source {
            let [a, b, c, d]: [u32; 4] = zerocopy::transmute!(sources[0]);
            [avx2.splat(a), avx2.splat(b), avx2.splat(c), avx2.splat(d)]
        } else {
            avx2.columns(sources)
        };
        let of_outer = sum(avx2, source) + sum(avx2, avx2.columns(destinations));
        // The length is part of the pseudo header and of the UDP header.
        let lens = carried_len.lower_number().left::<1>();
        let pseudo = lens + avx2.splat(pair(0, u16::from(protocol::UDP)) >> 16);
        // Of the inner packet, see `bytes_of_same_sum`: the hop limit is one less by then.
        let protocol_and_hops = hops.right::<16>() - avx2.splat(1 << 8);
        let protocol = protocol_and_hops & avx2.splat(0xff);
        let of_inner = halves(avx2, inner) + protocol_and_hops + (protocol.left::<8>() ^ avx2.splat(0xffff));
        let checksum = sent(avx2, finished(avx2, of_outer + pseudo + halves(avx2, ports) + of_inner));
        write_udp(&mut starts, UNTAGGED + V6, [ports, carried_len.lower_number() | checksum.left::<16>()], avx2);
    }
    let rows = Lanes::rows([start, len, avx2.splat(0), avx2.splat(0)]);
    for (lane, start) in starts.iter_mut().enumerate() {
        write_link(&mut start.link, of.exits[lane], ether_type::IPV6);
        start.link[UNTAGGED..UNTAGGED + 16].copy_from_slice(&rows[lane].bytes());
        start.link[UNTAGGED + 8..UNTAGGED + 24].copy_from_slice(&sources[lane]);
        start.link[UNTAGGED + 24..UNTAGGED + V6].copy_from_slice(&destinations[lane]);
    }
    u128::lower_hop_limits(avx2, &of.read, &mut starts);
}

/// The word of two numbers of 16 bits.
#[inline(always)]
fn pair(first: u16, second: u16) -> u32 {
    (u32::from(first) << 16 | u32::from(second)).to_be()
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
fn ports(avx2: Avx2, entropy: Lanes, destination: u16) -> Lanes {
    let source = entropy.right::<18>() | avx2.splat(0xc000);
    source.lower_number() | avx2.splat(pair(0, destination))
}

/// Writes UDP headers, of two words, at an offset of the frames.
#[inline(always)]
fn write_udp<const BEFORE: usize, H: Head>(starts: &mut Starts<'_, BEFORE, H>, at: usize, [ports, len]: [Lanes; 2], avx2: Avx2) {
    let rows = Lanes::rows([ports, len, avx2.splat(0), avx2.splat(0)]);
    for (start, row) in starts.iter_mut().zip(rows) {
        start.link[at..at + 8].copy_from_slice(&row.bytes()[..8]);
    }
}

/// Writes the Ethernet header.
#[inline(always)]
fn write_link(before: &mut [u8], exit: &Exit, ether_type: u16) {
    let _ = exit.write_addresses(before); // it is long enough
    before[UNTAGGED - 2..UNTAGGED].copy_from_slice(&ether_type.to_be_bytes());
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // numbers of lanes
mod tests {
    use super::*;
    use crate::port::MemoryBuffer;

    #[test]
    fn all_frames_get_room_or_none_does() {
        let group = |full: Option<usize>| -> [MemoryBuffer; LANES] {
            std::array::from_fn(|lane| MemoryBuffer::new(&vec![lane as u8; if full == Some(lane) { 9216 } else { 60 }], 0))
        };
        for full in 0..LANES {
            let mut frames = group(Some(full));
            assert!(!prepend(&mut frames, 20));
            assert_eq!(frames, group(Some(full)));
        }
        let mut frames = group(None);
        assert!(prepend(&mut frames, 20));
        assert!(frames.iter().all(|frame| frame.bytes().len() == 80));
    }
}
