//! Checks eight packets of IPv4 at a time against their flows, and rewrites their addresses and ports.
//!
//! **Invariant:** it forwards all eight packets, as the same bytes as the loop for one packet at a time, or leaves all eight
//! unchanged to that loop.
//!
//! Not here: packets with tags (`rewrite`).

use super::super::follow::{Follow, InPlaceScope, PacketHead};
use super::super::nat::HOP;
use super::super::progress::Passed;
use super::super::record::{Record, StartV4, UNTAGGED};
use super::super::rewrite::{Forwarding, belongs, bit_of, count, identification};
use super::recognise::bytes_at;
use crate::flow::{ClientRoutes, Direction, HotFlow, HotFlows, Meters, SeenWords, Tick};
use crate::forward::observer::{Observe, PacketOutcome};
use crate::fragment::Identifications;
use crate::snapshot::Exit;
use crate::wire::processor::{Avx2, LANES, Lanes, Row};
use crate::wire::{Buffer, WireKey, protocol};

/// Where the bytes that are rewritten together begin: TTL, protocol, checksum, addresses and ports.
const REWRITTEN: usize = UNTAGGED + 8;
const IDENTIFICATION: usize = UNTAGGED + 4;
/// Where the TCP or UDP header begins.
const TRANSPORT: usize = UNTAGGED + 20;
const TCP_CHECKSUM: usize = TRANSPORT + 16;
const UDP_CHECKSUM: usize = TRANSPORT + 6;

/// The flow of a packet, and where it leaves.
#[derive(Clone, Copy)]
struct Found<'f, 's> {
    flow: &'f HotFlow<WireKey<3>>,
    exit: &'s Exit,
}

impl<O> Forwarding<'_, u32, O> {
    /// Forwards eight packets. Returns false, and leaves them as they are, unless all of them pass.
    #[inline(always)]
    pub(in crate::forward::fast) fn eight<B: Buffer, S: InPlaceScope>(
        &mut self,
        avx2: Avx2,
        (group, records): (&mut [B; LANES], &mut [Record; LANES]),
        Passed { left, ports, .. }: &mut Passed,
    ) -> bool
    where
        O: Observe<B>,
    {
        let Self { follow, flows: HotFlows { flows, routes, meters }, counters, observer, identifications } = self;
        if *left != 0 && records.iter().any(|record| *left & bit_of(record.hash) != 0) {
            return false;
        }
        let Some(first) = flows.first() else { return false };
        let mut found = [Found { flow: first, exit: &Exit::NOWHERE }; LANES];
        for (found, record) in found.iter_mut().zip(&*records) {
            let Some(way) = find::<S>(follow, (flows, *routes), record) else { return false };
            *found = way;
        }
        let Some(mut starts) = all(group.each_mut().map(|buffer| StartV4::of_mut(buffer.bytes_mut(), 0))) else { return false };
        let packets = Packets::of(avx2, starts.each_ref().map(|start| &**start));
        let of_flows = Flows::of(avx2, records, &found);
        let exits = avx2.lanes(found.map(|found| found.exit.measures()));
        let elapsed = avx2.splat(SeenWords::minuend(follow.now)) - of_flows.seen;
        let limit = avx2.splat(SeenWords::below(follow.shortest));
        let shapes = avx2.lanes(records.each_ref().map(|record| record.shape.measures()));
        let is_recent = elapsed.min(limit).equals(elapsed);
        if (packets.keys.equals(of_flows.same) & is_recent & fit(avx2, shapes, exits)).bits() != u8::MAX {
            return false;
        }
        let changes = if S::FRAGMENTABLE { identify_all(identifications, &mut starts, &found, records) } else { [0; LANES] };
        let EightRewritten { rows, checksums } = packets.rewritten(avx2, &of_flows, avx2.lanes(changes));
        let checksums = checksums.to_array();
        let mut any_padded = false;
        for (lane, record) in records.iter_mut().enumerate() {
            let Found { flow, exit } = found[lane];
            write(starts[lane], (rows[lane], checksums[lane]), exit, record.is_udp());
            count::<u32>(counters, flow, record.candidate.entry().1, record);
            record.shape.way = exit.port.0;
            any_padded |= record.shape.is_padded();
        }
        if exits.equals(avx2.splat(found[0].exit.measures())).bits() == u8::MAX {
            ports.add(found[0].exit.port.0);
        } else {
            found.iter().for_each(|found| ports.add(found.exit.port.0));
        }
        if any_padded {
            truncate(group, records);
        }
        if O::OBSERVES || O::METERS {
            tell(group, records, &found, (*observer, meters));
        }
        let is_seen_now = (elapsed & avx2.splat(!SeenWords::BELOW)).equals(avx2.splat(0)).bits();
        if is_seen_now != u8::MAX {
            see(flows, records, !is_seen_now, follow.now);
        }
        true
    }
}

/// Removes what follows packets in their frames.
#[inline(always)]
fn truncate(group: &mut [impl Buffer; LANES], records: &[Record; LANES]) {
    for (buffer, record) in group.iter_mut().zip(records).filter(|(_, record)| record.shape.is_padded()) {
        buffer.truncate(UNTAGGED + usize::from(record.shape.packet_len));
    }
}

/// Tells the observer and the meters of packets that were forwarded.
#[inline(always)]
fn tell<B: Buffer, O: Observe<B>>(
    group: &[B; LANES],
    records: &[Record; LANES],
    found: &[Found<'_, '_>; LANES],
    (observer, meters): (&mut O, &mut Meters<'_>),
) {
    for ((buffer, record), Found { flow, exit }) in group.iter().zip(records).zip(found) {
        observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<u32>(flow, record)));
        if O::METERS {
            let (index, direction) = record.candidate.entry();
            meters.count(index, direction, record.shape.packet_len);
        }
    }
}

/// Gives packets that may be fragmented other identifications. Returns what that adds to the sums of their headers.
#[inline(always)]
fn identify_all(
    identifications: &mut Identifications,
    starts: &mut [&mut StartV4; LANES],
    found: &[Found<'_, '_>; LANES],
    records: &[Record; LANES],
) -> [u32; LANES] {
    let mut changes = [0; LANES];
    for (lane, record) in records.iter().enumerate().filter(|(_, record)| record.shape.may_fragment()) {
        let replies = found[lane].flow.key(record.candidate.entry().1.opposite());
        changes[lane] = identify(starts[lane], identification::<u32>(identifications, replies, record));
    }
    changes
}

/// Marks the flows of some packets as seen.
#[inline(never)]
fn see(flows: &mut [HotFlow<WireKey<3>>], records: &[Record; LANES], lanes: u8, now: Tick) {
    for (_, record) in (0..).zip(records).filter(|(lane, _)| lanes >> lane & 1 != 0) {
        if let Some(flow) = flows.get_mut(record.candidate.entry().0) {
            flow.see(now);
        }
    }
}

/// Gives a packet another identification. Returns what that adds to the sum of its header.
#[inline(always)]
fn identify(start: &mut StartV4, identification: Option<u16>) -> u32 {
    let place = start[IDENTIFICATION..].first_chunk_mut();
    let Some((place, new)) = place.zip(identification.map(u16::to_be_bytes)) else { return 0 };
    let old = std::mem::replace(place, new);
    u32::from(!u16::from_le_bytes(old)) + u32::from(u16::from_le_bytes(new))
}

/// Writes what changes of a packet.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the lower half of a word
fn write(start: &mut StartV4, (row, checksum): (Row, u32), exit: &Exit, is_udp: bool) {
    let _ = start[REWRITTEN..].first_chunk_mut().map(|bytes| *bytes = row.bytes()); // it is long enough
    let place = if is_udp { UDP_CHECKSUM } else { TCP_CHECKSUM };
    let _ = start[place..].first_chunk_mut().map(|bytes| *bytes = (checksum as u16).to_le_bytes()); // likewise
    let _ = exit.write_addresses(start); // likewise
}

/// The flow of a packet and where it leaves, unless anything but addresses, ports or age keeps the packet from passing.
#[inline(always)]
fn find<'f, 's, S: InPlaceScope>(
    follow: &Follow<'s>,
    (flows, routes): (&'f [HotFlow<WireKey<3>>], ClientRoutes<'_>),
    record: &Record,
) -> Option<Found<'f, 's>> {
    let (index, direction) = record.candidate.entry();
    let flow = flows.get(index)?;
    if !record.is_of(Record::V4) || !follow.admits::<u32, S>(flow, record, direction) {
        return None;
    }
    let exit = follow.exit::<u32, S>(flow, routes, record)?;
    Some(Found { flow, exit })
}

/// All values, or none.
#[inline(always)]
fn all<T>(values: [Option<T>; LANES]) -> Option<[T; LANES]> {
    let [a, b, c, d, e, f, g, h] = values;
    Some([a?, b?, c?, d?, e?, f?, g?, h?])
}

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

/// What is read of the flows of eight packets.
struct Flows {
    /// Keys of packets in the direction of each packet.
    same: Keys,
    /// Those of packets in the other direction.
    opposite: Keys,
    /// See [`HotFlow::seen_word`].
    seen: Lanes,
}

impl Flows {
    #[inline(always)]
    fn of(avx2: Avx2, records: &[Record; LANES], found: &[Found<'_, '_>; LANES]) -> Self {
        let halves = found.map(|Found { flow, .. }| {
            let ([a, b, c], [d, e, f]) = (flow.key(Direction::ToBackend).all(), flow.key(Direction::ToClient).all());
            [[a, b, c, d], [e, f, flow.backend(), flow.seen_word()]]
        });
        let [a, b, c, d] = avx2.columns(halves.map(|[half, _]| zerocopy::transmute!(half)));
        let [e, f, _, seen] = avx2.columns(halves.map(|[_, half]| zerocopy::transmute!(half)));
        let to_backend = Keys { source: a, destination: b, ports: c };
        let to_client = Keys { source: d, destination: e, ports: f };
        let directions = records.each_ref().map(|record| record.candidate.entry().1 as u32);
        let is_to_client = avx2.lanes(directions).exceeds(avx2.splat(0));
        let same = to_backend.or_where(is_to_client, to_client);
        Self { same, opposite: to_client.or_where(is_to_client, to_backend), seen }
    }
}

/// All ones for packets that are at most as long as the MTU, if neither they nor their links have tags; by
/// `Shape::measures` and [`Exit::measures`].
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // fourteen
fn fit(avx2: Avx2, packets: Lanes, exits: Lanes) -> Lanes {
    let word = |value| avx2.splat(value);
    let too_long = (packets & word(0xffff)).exceeds(exits & word(0xffff));
    let tagged = (packets ^ word((UNTAGGED as u32) << 16)) & word(0xff << 16);
    let becomes_tagged = (exits ^ word((UNTAGGED as u32) << 24)) & word(0xff << 24);
    (too_long | tagged | becomes_tagged).equals(word(0))
}

/// What is read of eight packets.
struct Packets {
    /// TTL, protocol and checksum.
    hops: Lanes,
    keys: Keys,
    /// The checksums of TCP or UDP, in the lower halves.
    checksums: Lanes,
    /// All ones where the packet is of UDP.
    is_udp: Lanes,
}

/// Eight packets afterwards.
struct EightRewritten {
    /// The bytes from [`REWRITTEN`] on.
    rows: [Row; LANES],
    /// The checksums of TCP or UDP, in the lower halves.
    checksums: Lanes,
}

impl Packets {
    #[inline(always)]
    fn of(avx2: Avx2, starts: [&StartV4; LANES]) -> Self {
        let [hops, source, destination, ports] = avx2.columns(starts.map(bytes_at::<REWRITTEN>));
        let [of_udp, _, _, of_tcp] = avx2.columns(starts.map(bytes_at::<{ TRANSPORT + 4 }>));
        let is_udp = (hops & avx2.splat(0xff00)).equals(avx2.splat(u32::from(protocol::UDP) << 8));
        let checksums = (of_tcp & avx2.splat(0xffff)).or_where(is_udp, of_udp.right::<16>());
        Self { hops, keys: Keys { source, destination, ports }, checksums, is_udp }
    }

    /// The packets with other addresses and ports; `changes` is what else has changed in the sums of their headers. A UDP
    /// checksum of 0 means "none" and stays; a computed 0 is sent as 0xffff (RFC 768).
    #[inline(always)]
    fn rewritten(&self, avx2: Avx2, flows: &Flows, changes: Lanes) -> EightRewritten {
        let (old, new) = (self.keys, flows.opposite.reversed());
        let (zero, half, ones) = (avx2.splat(0), avx2.splat(0xffff), avx2.splat(u32::MAX));
        let finished = |sum: Lanes| {
            let folded = |sum: Lanes| (sum & half) + sum.right::<16>();
            folded(folded(sum)) ^ half
        };
        let halves = |word: Lanes| (word & half) + word.right::<16>();
        let addresses = halves(new.source) + halves(new.destination) + halves(old.source ^ ones) + halves(old.destination ^ ones);
        let of_header = finished(addresses + changes + (self.hops ^ ones).right::<16>() + avx2.splat(HOP.into()));
        let hops = (self.hops - avx2.splat(1)).with_upper(of_header.left::<16>());
        let ports = halves(new.ports) + halves(old.ports ^ ones);
        let computed = finished(addresses + ports + (self.checksums ^ half));
        let sent = computed.or_where(computed.equals(zero), half);
        let of_udp = sent.or_where(self.checksums.equals(zero), zero);
        let checksums = computed.or_where(self.is_udp, of_udp);
        EightRewritten { rows: Lanes::rows([hops, new.source, new.destination, new.ports]), checksums }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::nat;
    use super::*;
    use crate::wire::split_mix;

    /// A packet with any addresses, ports and checksums.
    fn start(number: u64, is_udp: bool) -> StartV4 {
        let word = |at: u64| split_mix(number << 8 | at).to_le_bytes();
        let bytes: [[u8; 8]; 7] = std::array::from_fn(|at| word(at as u64));
        let mut start = *bytes.as_flattened().first_chunk::<{ size_of::<StartV4>() }>().unwrap();
        start[REWRITTEN] |= 2; // more than one hop
        start[REWRITTEN + 1] = if is_udp { protocol::UDP } else { protocol::TCP };
        start
    }

    fn checksum_at(is_udp: bool) -> usize {
        if is_udp { UDP_CHECKSUM } else { TCP_CHECKSUM }
    }

    fn set_checksum(start: &mut StartV4, is_udp: bool, checksum: u16) {
        start[checksum_at(is_udp)..][..2].copy_from_slice(&checksum.to_be_bytes());
    }

    fn checksum(start: &StartV4, is_udp: bool) -> u16 {
        let at = checksum_at(is_udp);
        u16::from_be_bytes([start[at], start[at + 1]])
    }

    fn one_by_one(mut start: StartV4, replies: &WireKey<3>, is_udp: bool) -> StartV4 {
        nat::rewrite_v4(start.last_chunk_mut().unwrap(), replies, is_udp, None);
        start
    }

    fn by_eight(avx2: Avx2, mut starts: [StartV4; LANES], replies: &[WireKey<3>; LANES]) -> [StartV4; LANES] {
        let packets = Packets::of(avx2, starts.each_ref());
        let word = |at: usize| avx2.lanes(replies.map(|key| key.all()[at]));
        let opposite = Keys { source: word(0), destination: word(1), ports: word(2) };
        let flows = Flows { same: packets.keys, opposite, seen: avx2.splat(0) };
        let EightRewritten { rows, checksums } = packets.rewritten(avx2, &flows, avx2.splat(0));
        for (lane, start) in starts.iter_mut().enumerate() {
            let is_udp = start[REWRITTEN + 1] == protocol::UDP;
            let before = *start;
            write(start, (rows[lane], checksums.to_array()[lane]), &Exit::NOWHERE, is_udp);
            start[..12].copy_from_slice(&before[..12]);
        }
        starts
    }

    #[test]
    fn eight_packets_are_rewritten_as_one_by_one_whatever_their_checksums() {
        let Some(avx2) = Avx2::detect() else { return };
        let mut sent_for_zero = 0;
        for round in 0..500_u64 {
            let is_udp = |lane: usize| (lane as u64 + round).is_multiple_of(2);
            let replies: [WireKey<3>; LANES] =
                std::array::from_fn(|lane| WireKey::<3>::read_at(&start(1 << 40 | round << 8 | lane as u64, false), 20));
            let starts: [StartV4; LANES] = std::array::from_fn(|lane| {
                let mut start = start(round << 8 | lane as u64, is_udp(lane));
                set_checksum(&mut start, is_udp(lane), 1);
                let changed = checksum(&one_by_one(start, &replies[lane], is_udp(lane)), is_udp(lane));
                // The checksum that becomes 0: what the change takes away, of 16 bits in one's complement.
                let becomes_zero = u16::try_from((1 + 0xffff - u32::from(changed)) % 0xffff).unwrap();
                let old = match lane / 2 {
                    0 => 0,
                    1 => u16::MAX,
                    2 => {
                        if becomes_zero == 0 {
                            u16::MAX
                        } else {
                            becomes_zero
                        }
                    }
                    _ => u16::try_from(split_mix(round) & 0xffff).unwrap(),
                };
                set_checksum(&mut start, is_udp(lane), old);
                start
            });
            let expected: [StartV4; LANES] = std::array::from_fn(|lane| one_by_one(starts[lane], &replies[lane], is_udp(lane)));
            assert_eq!(by_eight(avx2, starts, &replies), expected, "round {round}");
            let is_sent_for_zero = |&lane: &usize| is_udp(lane) && checksum(&expected[lane], true) == u16::MAX;
            sent_for_zero += (4..6).filter(is_sent_for_zero).count();
        }
        assert!(sent_for_zero >= 400, "{sent_for_zero} computed checksums of 0");
    }
}
