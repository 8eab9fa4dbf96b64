//! Addresses, ports and checksums of eight packets of IPv4: a word of each packet in one register.
//!
//! Not here: which packets pass (`pass`).

use super::super::nat::{self, HOP, V4_IDENTIFICATION, V4_TRANSPORT, V4_TTL};
use super::super::record::Record;
use super::checksums::{changed, finished, updated};
use super::pass::{Found, KeysOfEight, Shapes, are_to_client};
use super::start::Starts;
use crate::flow::Direction;
use crate::fragment::Identifications;
use crate::wire::WireKey;
use crate::wire::processor::{Avx2, LANES, Lanes};

/// Offsets in an IPv4 header. TTL, protocol, checksum, addresses and ports are rewritten together.
const REWRITTEN: usize = V4_TTL;
const TCP_CHECKSUM: usize = V4_TRANSPORT + nat::TCP_CHECKSUM;
const UDP_CHECKSUM: usize = V4_TRANSPORT + nat::UDP_CHECKSUM;

/// Addresses and ports as they stand in packets.
#[derive(Clone, Copy)]
struct Keys {
    source: Lanes,
    destination: Lanes,
    ports: Lanes,
}

impl Keys {
    /// Those of another key where a mask has all ones.
    #[inline(always)]
    fn or_where(self, mask: Lanes, other: Self) -> Self {
        Self {
            source: self.source.or_where(mask, other.source),
            destination: self.destination.or_where(mask, other.destination),
            ports: self.ports.or_where(mask, other.ports),
        }
    }

    /// Those of packets in the opposite direction.
    #[inline(always)]
    fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source, ports: self.ports.exchanged() }
    }

    #[inline(always)]
    fn equals(self, other: Self) -> Lanes {
        self.source.equals(other.source) & self.destination.equals(other.destination) & self.ports.equals(other.ports)
    }
}

/// What is read of eight packets and of their flows.
#[derive(Clone, Copy)]
pub(in crate::forward::fast) struct ReadV4 {
    packets: Packets,
    flows: Flows,
}

/// What is read of the flows.
#[derive(Clone, Copy)]
struct Flows {
    /// Keys of packets in the direction of each packet.
    same: Keys,
    /// Those of packets in the other direction.
    opposite: Keys,
    seen: Lanes,
}

impl Flows {
    #[inline(always)]
    fn of(avx2: Avx2, records: &[Record; LANES], found: &Found<'_, '_, WireKey<3>>) -> Self {
        let halves = found.flows.map(|flow| {
            let ([a, b, c], [d, e, f]) = (flow.key(Direction::ToBackend).all(), flow.key(Direction::ToClient).all());
            [[a, b, c, d], [e, f, flow.backend(), flow.seen_word()]]
        });
        let [a, b, c, d] = avx2.columns(halves.map(|[half, _]| zerocopy::transmute!(half)));
        let [e, f, _, seen] = avx2.columns(halves.map(|[_, half]| zerocopy::transmute!(half)));
        let to_backend = Keys { source: a, destination: b, ports: c };
        let to_client = Keys { source: d, destination: e, ports: f };
        let is_to_client = are_to_client(avx2, records);
        let same = to_backend.or_where(is_to_client, to_client);
        Self { same, opposite: to_client.or_where(is_to_client, to_backend), seen }
    }
}

/// What is read of the packets.
#[derive(Clone, Copy)]
struct Packets {
    /// TTL, protocol and checksum.
    hops: Lanes,
    keys: Keys,
    /// The checksums of TCP or UDP, in the lower halves.
    checksums: Lanes,
    /// All ones where the packet is of UDP.
    is_udp: Lanes,
}

impl Packets {
    #[inline(always)]
    fn of<const AT: usize>(avx2: Avx2, starts: &Starts<'_, AT, [u8; 40]>, shapes: &Shapes) -> Self {
        let [hops, source, destination, ports] = avx2.columns(starts.each_ref().map(|start| start.bytes_at(AT + REWRITTEN)));
        let [of_udp, _, _, of_tcp] = avx2.columns(starts.each_ref().map(|start| start.bytes_at(AT + V4_TRANSPORT + 4)));
        let is_udp = shapes.are_udp(avx2);
        let checksums = (of_tcp & avx2.splat(0xffff)).or_where(is_udp, of_udp.right::<16>());
        Self { hops, keys: Keys { source, destination, ports }, checksums, is_udp }
    }

    /// TTL and protocol with one hop less, and the checksum with it and with other changes.
    #[inline(always)]
    fn hops_after(&self, avx2: Avx2, changes: Lanes) -> Lanes {
        let before = (self.hops ^ avx2.splat(u32::MAX)).right::<16>();
        let checksum = finished(avx2, changes + before + avx2.splat(HOP.into()));
        (self.hops - avx2.splat(1)).with_upper(checksum.left::<16>())
    }
}

impl KeysOfEight for u32 {
    type Read = ReadV4;

    #[inline(always)]
    fn read<const AT: usize>(
        avx2: Avx2,
        starts: &Starts<'_, AT, [u8; 40]>,
        shapes: &Shapes,
        records: &[Record; LANES],
        found: &Found<'_, '_, WireKey<3>>,
    ) -> ReadV4 {
        ReadV4 { packets: Packets::of(avx2, starts, shapes), flows: Flows::of(avx2, records, found) }
    }

    #[inline(always)]
    fn are_of_flows(_: Avx2, read: &ReadV4) -> Lanes {
        read.packets.keys.equals(read.flows.same)
    }

    #[inline(always)]
    fn seen(read: &ReadV4) -> Lanes {
        read.flows.seen
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower half of a word
    fn identify<const AT: usize>(
        avx2: Avx2,
        ReadV4 { packets, flows }: &ReadV4,
        starts: &mut Starts<'_, AT, [u8; 40]>,
        may_fragment: Lanes,
        identifications: &mut Identifications,
    ) -> Lanes {
        let wanted = may_fragment.bits();
        let (new, protocol) = (flows.opposite.reversed(), packets.hops.right::<8>() & avx2.splat(0xff));
        let numbers = identifications.next_of_eight(avx2, [new.source, new.destination], protocol, wanted).lower_number();
        let (mut olds, news) = ([0; LANES], numbers.to_array());
        for (lane, start) in starts.iter_mut().enumerate().filter(|(lane, _)| wanted >> lane & 1 != 0) {
            let place = &mut start.head[V4_IDENTIFICATION..V4_IDENTIFICATION + 2];
            olds[lane] = u32::from(u16::from_le_bytes([place[0], place[1]]));
            place.copy_from_slice(&(news[lane] as u16).to_le_bytes());
        }
        (numbers + (avx2.lanes(olds) ^ avx2.splat(0xffff))) & may_fragment
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower half of a word
    fn rewrite_eight<const AT: usize>(
        avx2: Avx2,
        ReadV4 { packets, flows }: &ReadV4,
        starts: &mut Starts<'_, AT, [u8; 40]>,
        _: &Found<'_, '_, WireKey<3>>,
        records: &[Record; LANES],
        changes: Lanes,
    ) {
        let (old, new) = (packets.keys, flows.opposite.reversed());
        let addresses = changed(avx2, old.source, new.source) + changed(avx2, old.destination, new.destination);
        let hops = packets.hops_after(avx2, addresses + changes);
        let sums = addresses + changed(avx2, old.ports, new.ports);
        let checksums = updated(avx2, packets.checksums, sums, packets.is_udp).to_array();
        let rows = Lanes::rows([hops, new.source, new.destination, new.ports]);
        for (start, row) in starts.iter_mut().zip(rows) {
            start.head[REWRITTEN..REWRITTEN + 16].copy_from_slice(&row.bytes());
        }
        let any_udp = packets.is_udp.bits() != 0;
        for (lane, start) in starts.iter_mut().enumerate() {
            let place = if any_udp && records[lane].is_udp() { UDP_CHECKSUM } else { TCP_CHECKSUM };
            start.head[place..place + 2].copy_from_slice(&(checksums[lane] as u16).to_le_bytes());
        }
    }

    #[inline(always)]
    fn lower_hop_limits<const AT: usize>(avx2: Avx2, read: &ReadV4, starts: &mut Starts<'_, AT, [u8; 40]>) {
        let hops = read.packets.hops_after(avx2, avx2.splat(0)).to_array();
        for (start, hops) in starts.iter_mut().zip(hops) {
            start.head[REWRITTEN..REWRITTEN + 4].copy_from_slice(&hops.to_le_bytes());
        }
    }
}
