//! Addresses, ports and checksums of eight packets of IPv6: the addresses of each packet in one register.
//!
//! Not here: which packets pass (`pass`).

use super::super::nat::{self, V6_HOP_LIMIT, V6_KEY, V6_TRANSPORT};
use super::super::record::Record;
use super::checksums::updated;
use super::pass::{Found, KeysOfEight, Shapes, are_to_client};
use super::start::Starts;
use crate::flow::HotFlow;
use crate::fragment::Identifications;
use crate::wire::WireKey;
use crate::wire::processor::{Avx2, LANES, Lanes};

/// Offsets in an IPv6 header.
const TCP_CHECKSUM: usize = V6_TRANSPORT + nat::TCP_CHECKSUM;
const UDP_CHECKSUM: usize = V6_TRANSPORT + nat::UDP_CHECKSUM;

/// What is read of eight packets and of their flows.
#[derive(Clone, Copy)]
pub(in crate::forward::fast) struct ReadV6 {
    /// Bits in which the addresses of any packet differ from those of its flow: a word of all packets in each lane.
    other_addresses: Lanes,
    /// Those of the ports: a packet in each lane. All bits of both must be 0.
    other_ports: Lanes,
    seen: Lanes,
    are_to_client: Lanes,
    are_udp: Lanes,
}

impl KeysOfEight for u128 {
    type Read = ReadV6;

    #[inline(always)]
    fn read<const AT: usize>(
        avx2: Avx2,
        starts: &Starts<'_, AT, [u8; 60]>,
        shapes: &Shapes,
        records: &[Record; LANES],
        found: &Found<'_, '_, WireKey<9>>,
    ) -> ReadV6 {
        let mut other_addresses = avx2.splat(0);
        let mut other_ports = [0; LANES];
        for (lane, start) in starts.iter().enumerate() {
            let (addresses, ports) = WireKey::<9>::read_at(&start.head, V6_KEY).halves();
            let (of_flow, ports_of_flow) = found.flows[lane].key(records[lane].candidate.entry().1).halves();
            other_addresses = other_addresses | avx2.words(addresses) ^ avx2.words(of_flow);
            other_ports[lane] = ports ^ ports_of_flow;
        }
        let seen = avx2.lanes(found.flows.map(HotFlow::seen_word));
        let (are_to_client, are_udp) = (are_to_client(avx2, records), shapes.are_udp(avx2));
        ReadV6 { other_addresses, other_ports: avx2.lanes(other_ports), seen, are_to_client, are_udp }
    }

    #[inline(always)]
    fn are_of_flows(avx2: Avx2, read: &ReadV6) -> Lanes {
        (read.other_addresses | read.other_ports).equals(avx2.splat(0))
    }

    #[inline(always)]
    fn seen(read: &ReadV6) -> Lanes {
        read.seen
    }

    /// Routers never fragment them.
    #[inline(always)]
    fn identify<const AT: usize>(
        avx2: Avx2,
        _: &ReadV6,
        _: &mut Starts<'_, AT, [u8; 60]>,
        _: Lanes,
        _: &mut Identifications,
    ) -> Lanes {
        avx2.splat(0)
    }

    /// There is no checksum of the header.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower half of a word
    fn rewrite_eight<const AT: usize>(
        avx2: Avx2,
        read: &ReadV6,
        starts: &mut Starts<'_, AT, [u8; 60]>,
        found: &Found<'_, '_, WireKey<9>>,
        records: &[Record; LANES],
        _: Lanes,
    ) {
        let any_udp = read.are_udp.bits() != 0;
        let places = records.each_ref().map(|record| if any_udp && record.is_udp() { UDP_CHECKSUM } else { TCP_CHECKSUM });
        let mut checksums = [0; LANES];
        for (lane, start) in starts.iter().enumerate() {
            checksums[lane] = u32::from(u16::from_le_bytes([start.head[places[lane]], start.head[places[lane] + 1]]));
        }
        let half = avx2.splat(0xffff);
        // 0xffff is 0 in one's complement. Added, it keeps the sum above 0, as that of `nat`: both fold to the same zero.
        let sums = avx2.lanes(found.flows.map(HotFlow::checksum_change)) ^ read.are_to_client & half;
        let checksums = updated(avx2, avx2.lanes(checksums), sums + half, read.are_udp).to_array();
        for (lane, start) in starts.iter_mut().enumerate() {
            let replies = found.flows[lane].key(records[lane].candidate.entry().1.opposite());
            let (addresses, ports) = replies.halves();
            let head = &mut start.head;
            head[V6_HOP_LIMIT] = head[V6_HOP_LIMIT].wrapping_sub(1);
            head[V6_KEY..V6_KEY + 32].copy_from_slice(&avx2.words(addresses).rotated().to_bytes());
            head[V6_TRANSPORT..V6_TRANSPORT + 4].copy_from_slice(&ports.rotate_left(16).to_ne_bytes());
            head[places[lane]..places[lane] + 2].copy_from_slice(&(checksums[lane] as u16).to_le_bytes());
        }
    }

    #[inline(always)]
    fn lower_hop_limits<const AT: usize>(_: Avx2, _: &ReadV6, starts: &mut Starts<'_, AT, [u8; 60]>) {
        for start in starts {
            start.head[V6_HOP_LIMIT] = start.head[V6_HOP_LIMIT].wrapping_sub(1);
        }
    }
}
