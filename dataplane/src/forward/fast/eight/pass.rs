//! Checks eight packets of one family at a time against their flows, and rewrites them where they are.
//!
//! **Invariant:** it forwards all eight packets, as the same bytes as the loop for one packet at a time, or leaves all eight
//! unchanged to that loop.
//!
//! Not here: addresses, ports and checksums (`keys_v4`, `keys_v6`).

use super::super::follow::{Follow, InPlaceScope, Rewrites, Scope};
use super::super::progress::{LeavingPorts, Passed};
use super::super::record::{Record, Shape, UNTAGGED, bit_of};
use super::super::rewrite::{Forwarding, Rewritten, belongs, count};
use super::start::{Starts, TAGGED, starts};
use crate::flow::{ClientRoutes, Direction, FlowMode, HotFlow, HotFlows, Meters, SeenWords, Tick, UDP_SIGNAL};
use crate::forward::observer::{Observe, PacketOutcome};
use crate::fragment::Identifications;
use crate::snapshot::Exit;
use crate::stats::{BackendCounters, COUNTER_SLOTS};
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{Buffer, TupleKey};

/// The flows of eight packets, and where these leave.
#[derive(Clone, Copy)]
pub(in crate::forward::fast) struct Found<'f, 's, K: TupleKey> {
    pub(super) flows: [&'f HotFlow<K>; LANES],
    pub(super) exits: [&'s Exit; LANES],
}

/// A family of which eight packets are compared with their flows and rewritten at a time.
pub(in crate::forward::fast) trait KeysOfEight: Rewritten {
    /// What is read of eight packets and of their flows.
    type Read: Copy;

    fn read<const AT: usize>(
        avx2: Avx2,
        starts: &Starts<'_, AT, Self::Head>,
        shapes: &Shapes,
        records: &[Record; LANES],
        found: &Found<'_, '_, Self::Key>,
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
        found: &Found<'_, '_, Self::Key>,
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
        let Some(first) = flows.first() else { return false };
        let mut found = Found { flows: [first; LANES], exits: [&Exit::NOWHERE; LANES] };
        if !find_eight::<A, S>(follow, (flows, *routes), records, *left, &mut found) {
            return false;
        }
        let Some(mut starts) = starts::<AT, _, _>(group) else { return false };
        let eight = Eight::<A>::of(avx2, follow, &starts, records, &found);
        let Eight { read, shapes, exits, .. } = &eight;
        if (eight.are_of_live_flows(avx2) & shapes.fit::<AT>(avx2, *exits, 0)).bits() != u8::MAX {
            return false;
        }
        if S::REWRITES == Rewrites::None {
            A::lower_hop_limits(avx2, read, &mut starts);
        } else {
            let changes = match S::FRAGMENTABLE {
                true => A::identify(avx2, read, &mut starts, shapes.may_fragment(avx2), identifications),
                false => avx2.splat(0),
            };
            A::rewrite_eight(avx2, read, &mut starts, &found, records, changes);
        }
        for (start, exit) in starts.iter_mut().zip(found.exits) {
            if AT == UNTAGGED {
                let _ = exit.write_addresses(&mut start.link); // it is long enough
            } else {
                exit.write_link(&mut start.link);
            }
        }
        eight.leave::<_, O>(avx2, (group, records, AT), &found, (counters, *observer, meters), ports);
        eight.see(avx2, flows, records, follow.now);
        true
    }
}

/// Finds the flows of eight packets, and where these leave. Returns false if anything but addresses, ports or age keeps one of
/// them from passing, or if a packet of such a flow is `left`.
#[inline(always)]
pub(super) fn find_eight<'f, 's, A: Rewritten, S: Scope>(
    follow: &Follow<'s>,
    (flows, routes): (&'f [HotFlow<A::Key>], ClientRoutes<'_>),
    records: &[Record; LANES],
    left: u64,
    found: &mut Found<'f, 's, A::Key>,
) -> bool {
    if left != 0 && records.iter().any(|record| left & bit_of(record.hash) != 0) {
        return false;
    }
    for (lane, record) in records.iter().enumerate() {
        let Some((flow, exit)) = find::<A, S>(follow, (flows, routes), record) else { return false };
        (found.flows[lane], found.exits[lane]) = (flow, exit);
    }
    true
}

/// What is known of eight packets.
pub(in crate::forward::fast) struct Eight<A: KeysOfEight> {
    pub(super) read: A::Read,
    pub(super) shapes: Shapes,
    /// See [`Exit::measures`].
    pub(super) exits: Lanes,
    /// Since the last packets of the flows, by [`SeenWords`].
    elapsed: Lanes,
    /// All ones where that is less than any flow lives.
    are_recent: Lanes,
}

impl<A: KeysOfEight> Eight<A> {
    #[inline(always)]
    pub(super) fn of<const AT: usize>(
        avx2: Avx2,
        follow: &Follow<'_>,
        starts: &Starts<'_, AT, A::Head>,
        records: &[Record; LANES],
        found: &Found<'_, '_, A::Key>,
    ) -> Self {
        let shapes = Shapes::of(avx2, records);
        let read = A::read(avx2, starts, &shapes, records, found);
        let exits = avx2.lanes(found.exits.map(Exit::measures));
        let elapsed = avx2.splat(SeenWords::minuend(follow.now)) - A::seen(&read);
        let limit = avx2.splat(SeenWords::below(follow.shortest));
        let are_recent = elapsed.min(limit).equals(elapsed);
        Self { read, shapes, exits, elapsed, are_recent }
    }

    /// All ones where packets have the family, addresses and ports of their flows, and these are not over.
    #[inline(always)]
    pub(super) fn are_of_live_flows(&self, avx2: Avx2) -> Lanes {
        A::are_of_flows(avx2, &self.read) & self.are_recent & self.shapes.are_of(avx2, A::RECORD)
    }

    /// All ones where flows are in a mode.
    #[inline(always)]
    pub(super) fn are_in_mode(&self, avx2: Avx2, mode: FlowMode) -> Lanes {
        (A::seen(&self.read) & avx2.splat(SeenWords::MODE)).equals(avx2.splat(SeenWords::of_mode(mode)))
    }

    /// All ones where packets leave by the port of an exit.
    #[inline(always)]
    pub(super) fn leave_by_port_of(&self, avx2: Avx2, exit: &Exit) -> Lanes {
        (self.exits & avx2.splat(Exit::PORT)).equals(avx2.splat(exit.measures() & Exit::PORT))
    }

    /// Counts packets that were rewritten and now begin at a byte of their frames, and tells by which ports they leave.
    #[inline(always)]
    pub(super) fn leave<B: Buffer, O: Observe<B>>(
        &self,
        avx2: Avx2,
        (group, records, at): (&mut [B; LANES], &mut [Record; LANES], usize),
        found: &Found<'_, '_, A::Key>,
        (counters, observer, meters): (&[BackendCounters; COUNTER_SLOTS], &mut O, &mut Meters<'_>),
        ports: &mut LeavingPorts,
    ) {
        for (record, flow) in records.iter().zip(found.flows) {
            count::<A>(counters, flow, record.candidate.entry().1, record);
        }
        let [first, ..] = found.exits;
        if self.exits.equals(avx2.splat(first.measures())).bits() == u8::MAX {
            ports.add(first.port.0);
            records.iter_mut().for_each(|record| record.shape.way = first.port.0);
        } else {
            for (record, exit) in records.iter_mut().zip(found.exits) {
                ports.add(exit.port.0);
                record.shape.way = exit.port.0;
            }
        }
        if self.shapes.any_padded(avx2) {
            truncate(group, records, at);
        }
        if O::OBSERVES || O::METERS {
            tell::<A, _, _>(group, records, found, (observer, meters));
        }
    }

    /// Marks the flows as seen now, unless they are.
    #[inline(always)]
    pub(super) fn see(&self, avx2: Avx2, flows: &mut [HotFlow<A::Key>], records: &[Record; LANES], now: Tick) {
        let are_seen_now = (self.elapsed & avx2.splat(!SeenWords::BELOW)).equals(avx2.splat(0)).bits();
        if are_seen_now != u8::MAX {
            see(flows, records, !are_seen_now, now);
        }
    }
}

/// Removes what follows packets in their frames, in which these begin `at` a byte.
#[inline(always)]
fn truncate(group: &mut [impl Buffer; LANES], records: &[Record; LANES], at: usize) {
    for (buffer, record) in group.iter_mut().zip(records) {
        buffer.truncate(at + usize::from(record.shape.packet_len));
    }
}

/// Tells the observer and the meters of packets that were forwarded.
#[inline(always)]
fn tell<A: Rewritten, B: Buffer, O: Observe<B>>(
    group: &[B; LANES],
    records: &[Record; LANES],
    found: &Found<'_, '_, A::Key>,
    (observer, meters): (&mut O, &mut Meters<'_>),
) {
    for (((buffer, record), flow), exit) in group.iter().zip(records).zip(found.flows).zip(found.exits) {
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
fn find<'f, 's, A: Rewritten, S: Scope>(
    follow: &Follow<'s>,
    (flows, routes): (&'f [HotFlow<A::Key>], ClientRoutes<'_>),
    record: &Record,
) -> Option<(&'f HotFlow<A::Key>, &'s Exit)> {
    let (index, direction) = record.candidate.entry();
    let flow = flows.get(index)?;
    if !follow.admits::<A, S>(flow, record, direction) {
        return None;
    }
    let exit = follow.exit::<A, S>(flow, routes, record)?;
    Some((flow, exit))
}

/// The [`Shape`]s of eight packets.
pub(in crate::forward::fast) struct Shapes {
    /// Bytes of the packet (bits 0 to 15), its offset (16 to 23), and where it goes.
    places: Lanes,
    /// The upper halves of hashes.
    pub(super) entropy: Lanes,
    /// What kind of packet it is (bits 0 to 7), and [`Shape::PADDED`] and [`Shape::FRAGMENTABLE`] (from 8 on).
    kinds: Lanes,
}

impl Shapes {
    #[inline(always)]
    fn of(avx2: Avx2, records: &[Record; LANES]) -> Self {
        let [_, entropy, places, kinds] = avx2.columns(records.each_ref().map(Record::row));
        Self { places, entropy, kinds }
    }

    /// Bytes of the packets.
    #[inline(always)]
    pub(super) fn packet_lens(&self, avx2: Avx2) -> Lanes {
        self.places & avx2.splat(0xffff)
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
    pub(super) fn may_fragment(&self, avx2: Avx2) -> Lanes {
        let bit = avx2.splat(u32::from(Shape::FRAGMENTABLE) << 8);
        (self.kinds & bit).equals(bit)
    }

    /// Whether bytes follow any packet in its frame.
    #[inline(always)]
    fn any_padded(&self, avx2: Avx2) -> bool {
        (self.kinds & avx2.splat(u32::from(Shape::PADDED) << 8)).equals(avx2.splat(0)).bits() != u8::MAX
    }

    /// All ones where the packet with this many `more` bytes is no longer than the MTU, and both its link header and that of
    /// its exit have `AT` bytes; by [`Exit::measures`].
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // at most eighteen
    pub(super) fn fit<const AT: usize>(&self, avx2: Avx2, exits: Lanes, more: u32) -> Lanes {
        let word = |value| avx2.splat(value);
        let too_long = (self.packet_lens(avx2) + word(more)).exceeds(exits & word(0xffff));
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
