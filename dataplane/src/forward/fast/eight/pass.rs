//! Checks eight packets of one family at a time against their flows, and rewrites them where they are.
//!
//! **Invariant:** it forwards all eight packets, as the same bytes as the loop for one packet at a time, or leaves all eight
//! unchanged to that loop.
//!
//! Not here: addresses, ports and checksums (`keys_v4`, `keys_v6`).

use super::super::follow::{Follow, InPlaceScope, Rewrites};
use super::super::progress::Passed;
use super::super::record::{Record, Shape, UNTAGGED};
use super::super::rewrite::{Forwarding, Rewritten, belongs, bit_of, count};
use super::start::{Start, TAGGED, all};
use crate::flow::{ClientRoutes, Direction, HotFlow, HotFlows, Meters, SeenWords, Tick, UDP_SIGNAL};
use crate::forward::observer::{Observe, PacketOutcome};
use crate::fragment::Identifications;
use crate::snapshot::Exit;
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{Buffer, TupleKey};

/// The flow of a packet, and where it leaves.
#[derive(Clone, Copy)]
pub(in crate::forward::fast) struct Found<'f, 's, K: TupleKey> {
    pub(super) flow: &'f HotFlow<K>,
    pub(super) exit: &'s Exit,
}

/// The starts of eight frames.
pub(in crate::forward::fast) type Starts<'b, const AT: usize, H> = [&'b mut Start<AT, H>; LANES];

/// A family of which eight packets are compared with their flows and rewritten at a time.
pub(in crate::forward::fast) trait KeysOfEight: Rewritten {
    /// What is read of eight packets and of their flows.
    type Read: Copy;

    fn read<const AT: usize>(
        avx2: Avx2,
        starts: &Starts<'_, AT, Self::Head>,
        shapes: &Shapes,
        records: &[Record; LANES],
        found: &[Found<'_, '_, Self::Key>; LANES],
    ) -> Self::Read;

    /// All ones in all lanes if all packets have the addresses and ports of their flows.
    fn are_of_flows(avx2: Avx2, read: &Self::Read) -> Lanes;

    /// See [`HotFlow::seen_word`].
    fn seen(read: &Self::Read) -> Lanes;

    /// Gives packets that routers may fragment other identifications. Returns what that adds to the sums of their headers.
    fn identify<const AT: usize>(
        avx2: Avx2,
        read: &Self::Read,
        starts: &mut Starts<'_, AT, Self::Head>,
        may_fragment: Lanes,
        identifications: &mut Identifications,
    ) -> Lanes;

    /// Replaces addresses and ports, decrements hop limits, and updates checksums. `changes` is what other changes add to the
    /// sums of headers.
    fn rewrite_eight<const AT: usize>(
        avx2: Avx2,
        read: &Self::Read,
        starts: &mut Starts<'_, AT, Self::Head>,
        found: &[Found<'_, '_, Self::Key>; LANES],
        records: &[Record; LANES],
        changes: Lanes,
    );

    /// Decrements hop limits only.
    fn lower_hop_limits<const AT: usize>(avx2: Avx2, read: &Self::Read, starts: &mut Starts<'_, AT, Self::Head>);
}

impl<A: KeysOfEight, O> Forwarding<'_, A, O> {
    /// Forwards eight packets. Returns false, and leaves them as they are, unless all of them pass.
    #[inline(always)]
    pub(in crate::forward::fast) fn eight<B: Buffer, S: InPlaceScope>(
        &mut self,
        avx2: Avx2,
        (group, records): (&mut [B; LANES], &mut [Record; LANES]),
        passed: &mut Passed,
    ) -> bool
    where
        O: Observe<B>,
    {
        if S::TAGS && usize::from(records[0].shape.network_offset) == TAGGED {
            self.eight_at::<TAGGED, B, S>(avx2, (group, records), passed)
        } else {
            self.eight_at::<UNTAGGED, B, S>(avx2, (group, records), passed)
        }
    }

    /// The same, with link headers of `AT` bytes before and after.
    #[inline(always)]
    fn eight_at<const AT: usize, B: Buffer, S: InPlaceScope>(
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
            let Some(one) = find::<A, S>(follow, (flows, *routes), record) else { return false };
            *found = one;
        }
        let Some(mut starts) = all(group.each_mut().map(|buffer| Start::<AT, _>::of_mut(buffer.bytes_mut()))) else {
            return false;
        };
        let shapes = Shapes::of(avx2, records);
        let read = A::read(avx2, &starts, &shapes, records, &found);
        let exits = avx2.lanes(found.map(|found| found.exit.measures()));
        let elapsed = avx2.splat(SeenWords::minuend(follow.now)) - A::seen(&read);
        let limit = avx2.splat(SeenWords::below(follow.shortest));
        let is_recent = elapsed.min(limit).equals(elapsed);
        let pass = A::are_of_flows(avx2, &read) & is_recent & shapes.are_of(avx2, A::RECORD) & shapes.fit::<AT>(avx2, exits);
        if pass.bits() != u8::MAX {
            return false;
        }
        if S::REWRITES == Rewrites::None {
            A::lower_hop_limits(avx2, &read, &mut starts);
        } else {
            let changes = match S::FRAGMENTABLE {
                true => A::identify(avx2, &read, &mut starts, shapes.may_fragment(avx2), identifications),
                false => avx2.splat(0),
            };
            A::rewrite_eight(avx2, &read, &mut starts, &found, records, changes);
        }
        for (lane, record) in records.iter_mut().enumerate() {
            let Found { flow, exit } = found[lane];
            if AT == UNTAGGED {
                let _ = exit.write_addresses(&mut starts[lane].link); // it is long enough
            } else {
                exit.write_link(&mut starts[lane].link);
            }
            count::<A>(counters, flow, record.candidate.entry().1, record);
            record.shape.way = exit.port.0;
        }
        if exits.equals(avx2.splat(found[0].exit.measures())).bits() == u8::MAX {
            ports.add(found[0].exit.port.0);
        } else {
            found.iter().for_each(|found| ports.add(found.exit.port.0));
        }
        if shapes.any_padded(avx2) {
            truncate::<AT>(group, records);
        }
        if O::OBSERVES || O::METERS {
            tell::<A, _, _>(group, records, &found, (*observer, meters));
        }
        let is_seen_now = (elapsed & avx2.splat(!SeenWords::BELOW)).equals(avx2.splat(0)).bits();
        if is_seen_now != u8::MAX {
            see(flows, records, !is_seen_now, follow.now);
        }
        true
    }
}

/// Removes what follows packets in their frames, behind link headers of `AT` bytes.
#[inline(always)]
fn truncate<const AT: usize>(group: &mut [impl Buffer; LANES], records: &[Record; LANES]) {
    for (buffer, record) in group.iter_mut().zip(records) {
        buffer.truncate(AT + usize::from(record.shape.packet_len));
    }
}

/// Tells the observer and the meters of packets that were forwarded.
#[inline(always)]
fn tell<A: Rewritten, B: Buffer, O: Observe<B>>(
    group: &[B; LANES],
    records: &[Record; LANES],
    found: &[Found<'_, '_, A::Key>; LANES],
    (observer, meters): (&mut O, &mut Meters<'_>),
) {
    for ((buffer, record), Found { flow, exit }) in group.iter().zip(records).zip(found) {
        observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<A>(flow, record)));
        if O::METERS {
            let (index, direction) = record.candidate.entry();
            meters.count(index, direction, record.shape.packet_len);
        }
    }
}

/// Marks the flows of some packets as seen.
#[inline(never)]
fn see<K: TupleKey>(flows: &mut [HotFlow<K>], records: &[Record; LANES], lanes: u8, now: Tick) {
    for (_, record) in (0..).zip(records).filter(|(lane, _)| lanes >> lane & 1 != 0) {
        if let Some(flow) = flows.get_mut(record.candidate.entry().0) {
            flow.see(now);
        }
    }
}

/// The flow of a packet and where it leaves, unless anything but addresses, ports or age keeps the packet from passing.
#[inline(always)]
fn find<'f, 's, A: Rewritten, S: InPlaceScope>(
    follow: &Follow<'s>,
    (flows, routes): (&'f [HotFlow<A::Key>], ClientRoutes<'_>),
    record: &Record,
) -> Option<Found<'f, 's, A::Key>> {
    let (index, direction) = record.candidate.entry();
    let flow = flows.get(index)?;
    if !follow.admits::<A, S>(flow, record, direction) {
        return None;
    }
    let exit = follow.exit::<A, S>(flow, routes, record)?;
    Some(Found { flow, exit })
}

/// The [`Shape`]s of eight packets.
pub(in crate::forward::fast) struct Shapes {
    /// Bytes of the packet (bits 0 to 15), its offset (16 to 23), and where it goes.
    places: Lanes,
    /// What kind of packet it is (bits 0 to 7), and [`Shape::PADDED`] and [`Shape::FRAGMENTABLE`] (from 8 on).
    kinds: Lanes,
}

impl Shapes {
    #[inline(always)]
    fn of(avx2: Avx2, records: &[Record; LANES]) -> Self {
        let [_, _, places, kinds] = avx2.columns(records.each_ref().map(Record::row));
        Self { places, kinds }
    }

    /// All ones where the kind has all these bits.
    #[inline(always)]
    fn are_of(&self, avx2: Avx2, kind: u8) -> Lanes {
        let bits = avx2.splat(kind.into());
        (self.kinds & bits).equals(bits)
    }

    /// All ones for packets of UDP.
    #[inline(always)]
    pub(super) fn are_udp(&self, avx2: Avx2) -> Lanes {
        self.are_of(avx2, UDP_SIGNAL)
    }

    /// All ones for packets that routers may fragment.
    #[inline(always)]
    fn may_fragment(&self, avx2: Avx2) -> Lanes {
        let bit = avx2.splat(u32::from(Shape::FRAGMENTABLE) << 8);
        (self.kinds & bit).equals(bit)
    }

    /// Whether bytes follow any packet in its frame.
    #[inline(always)]
    fn any_padded(&self, avx2: Avx2) -> bool {
        (self.kinds & avx2.splat(u32::from(Shape::PADDED) << 8)).equals(avx2.splat(0)).bits() != u8::MAX
    }

    /// All ones where the packet is no longer than the MTU, and both its link header and that of its exit have `AT` bytes; by
    /// [`Exit::measures`].
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // at most eighteen
    fn fit<const AT: usize>(&self, avx2: Avx2, exits: Lanes) -> Lanes {
        let word = |value| avx2.splat(value);
        let too_long = (self.places & word(0xffff)).exceeds(exits & word(0xffff));
        let other_before = (self.places ^ word((AT as u32) << 16)) & word(0xff << 16);
        let other_after = (exits ^ word((AT as u32) << 24)) & word(0xff << 24);
        (too_long | other_before | other_after).equals(word(0))
    }
}

/// All ones for packets to the client.
#[inline(always)]
pub(super) fn are_to_client(avx2: Avx2, records: &[Record; LANES]) -> Lanes {
    avx2.lanes(records.each_ref().map(|record| record.candidate.entry().1 as u32)).equals(avx2.splat(Direction::ToClient as u32))
}
