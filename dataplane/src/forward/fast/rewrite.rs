//! The third loop of the fast way: checks packets against their flows (`follow`), rewrites them, and counts them.
//!
//! **Invariant:** a packet whose bytes cannot be rewritten is left unchanged.
//!
//! Not here: checksums (`nat`) and outer headers (`outer`, `forward::rewrite`).

use super::eight::{Copied, ForwardByEight};
use super::follow::{
    All, Direct, EVERY_KIND, FastFamily, Follow, ForwardLoop, GROUPS, InPlaceScope, IntoTunnels, PacketHead, Passage, Rewrites,
    Scope, TAGS, Translated,
};
use super::nat;
use super::outer::{self, OuterFields};
use super::progress::{Passed, Progress};
use super::record::{HEAD_V4, HEAD_V6, Record, UNTAGGED};
use crate::flow::{BackendId, Candidate, Direction, FlowMode, HotFlow, HotFlows};
use crate::forward::engine::Engine;
use crate::forward::observer::{Observe, PacketFlow, PacketOutcome};
use crate::forward::rewrite::{InnerPacket, Outer, bytes_of_same_sum, encapsulate};
use crate::fragment::Identifications;
use crate::port::{BURST, Port, PortIndex};
use crate::processor::{Avx2, LANES};
use crate::snapshot::{Exit, Snapshot, Tunnels};
use crate::stats::{BackendCounters, COUNTER_SLOTS};
use crate::wire::{Buffer, Ipv4, Ipv6, TupleKey, WireKey};

/// How the packets of a family are rewritten.
pub(super) trait Rewritten: FastFamily {
    /// Replaces addresses and ports by those of packets in the opposite direction to `replies`, and the identification if
    /// there is another one, decrements the hop limit, and updates all checksums.
    fn rewrite(head: &mut Self::Head, replies: &Self::Key, is_udp: bool, identification: Option<u16>);
    /// Decrements the hop limit only.
    fn lower_hop_limit(head: &mut Self::Head);

    /// Whether eight packets may be rewritten at a time, by [`Rewritten::eight`].
    const BY_EIGHT: bool;
    /// Forwards eight packets, or leaves them as they are and returns false.
    fn eight<B: Buffer, O: Observe<B>, S: InPlaceScope>(
        forwarding: &mut Forwarding<'_, Self, O>,
        avx2: Avx2,
        group: (&mut [B; LANES], &mut [Record; LANES]),
        passed: &mut Passed,
    ) -> bool
    where
        Self: Sized;

    /// Whether routers fragment packets that permit it.
    const ROUTERS_FRAGMENT: bool;
    /// The IP header of an outer packet, bytes.
    const HEADER: usize;
    /// The outer source address of a tunnel, see [`Tunnels::ends`].
    type Source;
    fn tunnel_source(tunnels: &Tunnels, port: PortIndex, entropy: u32) -> Option<Self::Source>;
    /// The [`bytes_of_same_sum`] of a packet; `None` if there are none but outer headers need them.
    fn inner_sum(head: &Self::Head) -> Option<[u8; 8]>;
    /// Writes the outer headers before a packet to the source of a key, see `outer`.
    fn write_outer(frame: &mut [u8], source: Self::Source, to: &Self::Key, fields: &OuterFields) -> Option<()>;
}

impl Rewritten for u32 {
    #[inline(always)]
    fn rewrite(head: &mut [u8; HEAD_V4], replies: &WireKey<3>, is_udp: bool, identification: Option<u16>) {
        nat::rewrite_v4(head, replies, is_udp, identification);
    }

    #[inline(always)]
    fn lower_hop_limit(head: &mut [u8; HEAD_V4]) {
        nat::lower_ttl(head);
    }

    const BY_EIGHT: bool = true;

    #[inline(always)]
    fn eight<B: Buffer, O: Observe<B>, S: InPlaceScope>(
        forwarding: &mut Forwarding<'_, u32, O>,
        avx2: Avx2,
        group: (&mut [B; LANES], &mut [Record; LANES]),
        passed: &mut Passed,
    ) -> bool {
        forwarding.eight::<B, S>(avx2, group, passed)
    }

    const ROUTERS_FRAGMENT: bool = true;
    const HEADER: usize = Ipv4::BYTES as usize;
    type Source = [u8; 4];

    #[inline(always)]
    fn tunnel_source(tunnels: &Tunnels, port: PortIndex, entropy: u32) -> Option<[u8; 4]> {
        tunnels.source_v4(port, entropy)
    }

    #[inline(always)]
    fn inner_sum(_: &[u8; HEAD_V4]) -> Option<[u8; 8]> {
        Some([0; 8])
    }

    #[inline(always)]
    fn write_outer(frame: &mut [u8], source: [u8; 4], to: &WireKey<3>, fields: &OuterFields) -> Option<()> {
        outer::write_v4(frame, source, to.source(), fields)
    }
}

impl Rewritten for u128 {
    #[inline(always)]
    fn rewrite(head: &mut [u8; HEAD_V6], replies: &WireKey<9>, is_udp: bool, _: Option<u16>) {
        nat::rewrite_v6(head, replies, is_udp);
    }

    #[inline(always)]
    fn lower_hop_limit(head: &mut [u8; HEAD_V6]) {
        nat::lower_hop_limit(head);
    }

    const BY_EIGHT: bool = false;

    #[inline(always)]
    fn eight<B: Buffer, O: Observe<B>, S: InPlaceScope>(
        _: &mut Forwarding<'_, u128, O>,
        _: Avx2,
        _: (&mut [B; LANES], &mut [Record; LANES]),
        _: &mut Passed,
    ) -> bool {
        false
    }

    const ROUTERS_FRAGMENT: bool = false;
    const HEADER: usize = Ipv6::BYTES as usize;
    type Source = [u8; 16];

    #[inline(always)]
    fn tunnel_source(tunnels: &Tunnels, port: PortIndex, entropy: u32) -> Option<[u8; 16]> {
        tunnels.source_v6(port, entropy)
    }

    #[inline(always)]
    fn inner_sum(head: &[u8; HEAD_V6]) -> Option<[u8; 8]> {
        bytes_of_same_sum(head)
    }

    #[inline(always)]
    fn write_outer(frame: &mut [u8], source: [u8; 16], to: &WireKey<9>, fields: &OuterFields) -> Option<()> {
        outer::write_v6(frame, source, to.source(), fields)
    }
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// The third loop, for the packets of one family in a part of a burst, except those at the positions that are bits of
    /// `openings`. It consists of three: one for packets that are rewritten where they are, one for packets into tunnels,
    /// and one for all others. Most packets of a part probably need the same as those of the part before.
    #[inline(always)]
    pub(super) fn forward_part<A: Rewritten>(
        &mut self,
        follow: &Follow<'_>,
        part: &mut [P::Buffer],
        (records, openings): (&mut [Record], u32),
        progress: &mut Progress,
    ) {
        let others = match progress.most[A::FAMILY as usize] {
            ForwardLoop::Translated => self.forward_translated::<A>(follow, part, records, progress),
            ForwardLoop::Direct if progress.kinds & (GROUPS | TAGS) == 0 => {
                self.forward_in_place::<A, Direct<0>>(follow, part, records, progress)
            }
            ForwardLoop::Direct => self.forward_in_place::<A, Direct<EVERY_KIND>>(follow, part, records, progress),
            ForwardLoop::IntoTunnels | ForwardLoop::Others => first_positions(part.len()),
        };
        if others != 0 {
            self.forward_rest::<A>(follow, (part, records), (others, openings), progress);
        }
    }

    /// The third loop for packets whose addresses and ports are rewritten, by the copy of it for the kinds of packets that
    /// there may be.
    #[inline(always)]
    fn forward_translated<A: Rewritten>(
        &mut self,
        follow: &Follow<'_>,
        part: &mut [P::Buffer],
        records: &mut [Record],
        progress: &mut Progress,
    ) -> u32 {
        match progress.kinds {
            0 => self.forward_copy::<A, 0>(follow, part, records, progress),
            1 => self.forward_copy::<A, 1>(follow, part, records, progress),
            2 => self.forward_copy::<A, 2>(follow, part, records, progress),
            3 => self.forward_copy::<A, 3>(follow, part, records, progress),
            4 => self.forward_copy::<A, 4>(follow, part, records, progress),
            5 => self.forward_copy::<A, 5>(follow, part, records, progress),
            6 => self.forward_copy::<A, 6>(follow, part, records, progress),
            _ => self.forward_copy::<A, EVERY_KIND>(follow, part, records, progress),
        }
    }

    /// The same by one copy: eight packets at a time where that is possible.
    #[inline(always)]
    fn forward_copy<A: Rewritten, const KINDS: u8>(
        &mut self,
        follow: &Follow<'_>,
        part: &mut [P::Buffer],
        records: &mut [Record],
        progress: &mut Progress,
    ) -> u32 {
        match self.avx2.filter(|_| A::BY_EIGHT && KINDS & TAGS == 0) {
            None => self.forward_in_place::<A, Translated<KINDS>>(follow, part, records, progress),
            Some(avx2) => {
                let passed = Passed { others: 0, left: progress.left, ports: progress.ports };
                let by_eight = ForwardByEight { forwarding: self.forwarding::<A>(follow), part, records, passed };
                let passed = avx2.run(Copied::<_, KINDS>(by_eight));
                progress.ports = passed.ports;
                passed.others
            }
        }
    }

    /// The same for the packets at the positions that are bits of `others`, which need another loop than the first.
    #[inline(never)]
    fn forward_rest<A: Rewritten>(
        &mut self,
        follow: &Follow<'_>,
        (part, records): (&mut [P::Buffer], &mut [Record]),
        (mut others, openings): (u32, u32),
        progress: &mut Progress,
    ) {
        let tried = progress.most[A::FAMILY as usize];
        let mut into_tunnels = match tried {
            _ if others & !openings == 0 => 0,
            ForwardLoop::Translated | ForwardLoop::Direct => self.positions_of::<A>(records, others, FlowMode::is_tunnel),
            ForwardLoop::IntoTunnels => others,
            ForwardLoop::Others => 0,
        };
        if into_tunnels != 0 {
            let tunnels = (&mut *part, &mut *records, into_tunnels);
            let left = if progress.kinds & GROUPS != 0 {
                self.forward_into_tunnels::<A, IntoTunnels<true>>(follow, tunnels, progress)
            } else {
                self.forward_into_tunnels::<A, IntoTunnels<false>>(follow, tunnels, progress)
            };
            (others, into_tunnels) = (others & !into_tunnels | left, into_tunnels & !left);
        }
        progress.most[A::FAMILY as usize] = self.most_taken_by::<A>(records, (into_tunnels, others), openings, tried);
        if others & !openings != 0 {
            self.forward_others::<A>(follow, (part, records, others & !openings), progress);
        }
    }

    /// The loop that takes or should have taken most packets of a family in a part, of which some went into tunnels, some
    /// open connections, and the others were not taken by the loop that was tried.
    fn most_taken_by<A: Rewritten>(
        &mut self,
        records: &[Record],
        (into_tunnels, others): (u32, u32),
        openings: u32,
        tried: ForwardLoop,
    ) -> ForwardLoop {
        if into_tunnels.count_ones() as usize > records.len() / 2 {
            return ForwardLoop::IntoTunnels;
        }
        let of_family = (0..).zip(records).filter(|(_, record)| record.is_of(A::RECORD)).fold(0, |all, (at, _)| all | 1 << at);
        let are_most = |positions: u32| 2 * (positions & of_family).count_ones() > u32::count_ones(of_family);
        let untaken = others & !openings;
        match tried {
            _ if of_family == 0 => tried,
            _ if are_most(into_tunnels) => ForwardLoop::IntoTunnels,
            ForwardLoop::Translated | ForwardLoop::Direct if !are_most(others | openings) => tried,
            ForwardLoop::Translated if are_most(self.positions_of::<A>(records, untaken, |mode| mode == FlowMode::Dsr)) => {
                ForwardLoop::Direct
            }
            ForwardLoop::Direct if are_most(self.positions_of::<A>(records, untaken, FlowMode::is_two_way)) => {
                ForwardLoop::Translated
            }
            _ if are_most(others | openings) => ForwardLoop::Others,
            _ => ForwardLoop::Translated,
        }
    }

    /// The third loop for packets that are rewritten where they are. It calls no function. Returns the positions of the
    /// other packets as bits.
    #[inline(never)]
    fn forward_in_place<A: Rewritten, S: InPlaceScope>(
        &mut self,
        follow: &Follow<'_>,
        part: &mut [P::Buffer],
        records: &mut [Record],
        progress: &mut Progress,
    ) -> u32 {
        let mut forwarding = self.forwarding::<A>(follow);
        let mut passed = Passed { others: 0, left: progress.left, ports: progress.ports };
        forwarding.each_in_place::<_, S>((part, records, 0), &mut passed);
        progress.ports = passed.ports;
        passed.others
    }

    /// Those of some positions whose packets are probably of flows in some modes. The packets of a flow have one mode.
    #[inline(never)]
    fn positions_of<A: Rewritten>(&mut self, records: &[Record], positions: u32, is_meant: fn(FlowMode) -> bool) -> u32 {
        let flows = A::split(&mut self.tables).0.hot_parts(false).flows;
        let mode = |record: &Record| flows.get(record.candidate.entry().0).map(HotFlow::mode);
        let is_one = |record: &Record| record.family() == A::RECORD && mode(record).is_some_and(is_meant);
        let all = (0..).zip(records).filter(|(_, record)| is_one(record)).fold(0, |all, (at, _)| all | 1 << at);
        all & positions
    }

    /// The third loop for packets into tunnels, at the positions that are bits of `positions`. It calls no function.
    /// Returns those of them that it does not take, for [`Self::forward_others`].
    #[inline(never)]
    fn forward_into_tunnels<A: Rewritten, S: Scope>(
        &mut self,
        follow: &Follow<'_>,
        (part, records, positions): (&mut [P::Buffer], &mut [Record], u32),
        progress: &mut Progress,
    ) -> u32 {
        let (mut flows, mut others) = (progress.left, 0);
        let mut forwarding = self.forwarding::<A>(follow);
        for (position, (buffer, record)) in part.iter_mut().zip(records).enumerate() {
            if positions >> position & 1 == 0 {
                continue;
            }
            let flow = 1 << (record.hash & 63);
            let is_next = record.family() == A::RECORD && flows & flow == 0;
            if is_next && let Some(port) = forwarding.through_tunnel::<_, S>(buffer, record) {
                record.shape.way = port;
                progress.add_port(port);
            } else {
                flows |= flow;
                others |= 1 << position;
            }
        }
        others
    }

    /// The third loop for the packets at the positions that are bits of `others`. Those that do not pass are left, and with
    /// them later packets of the same flow and direction.
    #[inline(never)]
    fn forward_others<A: Rewritten>(
        &mut self,
        follow: &Follow<'_>,
        (part, records, others): (&mut [P::Buffer], &mut [Record], u32),
        progress: &mut Progress,
    ) {
        for (position, (buffer, record)) in part.iter_mut().zip(records).enumerate() {
            if others >> position & 1 == 0 {
                continue;
            }
            if record.family() == A::RECORD {
                let flow = 1 << (record.hash & 63);
                let may_pass = progress.left & flow == 0;
                match may_pass.then(|| self.forward_one::<A>(follow, buffer, record)).flatten() {
                    Some(port) => record.shape.way = port.0,
                    None => progress.left |= flow,
                }
            }
            progress.add_port(record.shape.way);
        }
    }

    /// Decides on one packet, rewrites it and counts it. Returns the port by which it leaves; `None` if it is left.
    #[inline(always)]
    fn forward_one<A: Rewritten>(
        &mut self,
        follow: &Follow<'_>,
        buffer: &mut P::Buffer,
        record: &mut Record,
    ) -> Option<PortIndex> {
        let head = A::Head::of(buffer.bytes(), record.shape.network_offset.into())?;
        let table = A::split(&mut self.tables).0;
        if record.candidate == Candidate::NONE {
            return None;
        }
        if !table.is_at(record.candidate, &A::key(head)) {
            record.candidate = table.search_key(record.hash, &A::key(head), record.protocol())?;
        }
        let mut flows = table.hot_parts(O::METERS);
        let passage = follow.packet::<A, All>(&mut flows, None, record)?;
        let mut writer = Writer {
            snapshot: follow.snapshot,
            identifications: &mut self.identifications,
            counters: self.counters.all_slots(),
            observer: &mut self.observer,
        };
        let direction = passage.direction;
        let port = writer.packet::<A, _>(buffer, record, &passage);
        if O::METERS && port.is_some() {
            meter::<A, P::Buffer, O>(&mut flows, record, direction);
        }
        port
    }

    fn forwarding<'e, A: Rewritten>(&'e mut self, follow: &'e Follow<'e>) -> Forwarding<'e, A, O> {
        let (flows, counters) = (A::split(&mut self.tables).0.hot_parts(O::METERS), self.counters.all_slots());
        let (identifications, observer) = (&mut self.identifications, &mut self.observer);
        Forwarding { follow, flows, counters, identifications, observer }
    }
}

/// The first positions of a part, as bits; at most those of a burst.
#[allow(clippy::cast_possible_truncation)] // of at most 32 bits
const fn first_positions(count: usize) -> u32 {
    ((1_u64 << count) - 1) as u32
}

const _: () = assert!(BURST <= 32);

/// The bit of a hash in [`Progress::left`].
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the lower six bits
fn bit_of(hash: u64) -> u64 {
    // As a rotation, so that compilers do not compute it ahead for packets that need only a test of the bit.
    1_u64.rotate_left((hash & 63) as u32)
}

/// What rewriting a packet anywhere needs.
struct Writer<'e, O> {
    snapshot: &'e Snapshot,
    identifications: &'e mut Identifications,
    counters: &'e [BackendCounters; COUNTER_SLOTS],
    observer: &'e mut O,
}

impl<O> Writer<'_, O> {
    /// Rewrites a packet and counts it. Returns the port by which it leaves; `None` if it is left, unchanged.
    #[inline(always)]
    fn packet<A: Rewritten, B: Buffer>(
        &mut self,
        buffer: &mut B,
        record: &Record,
        &Passage { flow, direction, exit }: &Passage<'_, '_, A::Key>,
    ) -> Option<PortIndex>
    where
        O: Observe<B>,
    {
        if flow.mode().is_tunnel() {
            let backend = flow.key(Direction::ToClient).tuple(record.protocol()).source;
            into_tunnel::<A>(self.snapshot, self.identifications, buffer, record, (flow.mode(), backend), exit)?;
        } else {
            let head = framed::<A>(buffer, exit, record)?;
            match flow.mode() {
                FlowMode::Dsr => A::lower_hop_limit(head),
                _ => {
                    let replies = flow.key(direction.opposite());
                    let identification = identification::<A>(self.identifications, replies, record);
                    A::rewrite(head, replies, record.is_udp(), identification);
                }
            }
            buffer.truncate(exit.link_bytes() + usize::from(record.shape.packet_len));
        }
        count::<A>(self.counters, flow, direction, record);
        self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<A>(flow, record)));
        Some(exit.port)
    }
}

/// What the third loop needs of the engine.
pub(super) struct Forwarding<'e, A: FastFamily, O> {
    pub(super) follow: &'e Follow<'e>,
    pub(super) flows: HotFlows<'e, A::Key>,
    pub(super) counters: &'e [BackendCounters; COUNTER_SLOTS],
    pub(super) identifications: &'e mut Identifications,
    pub(super) observer: &'e mut O,
}

impl<A: Rewritten, O> Forwarding<'_, A, O> {
    /// Forwards those packets of a part, from a position on, that can be rewritten where they are.
    #[inline(always)]
    pub(super) fn each_in_place<B: Buffer, S: InPlaceScope>(
        &mut self,
        (part, records, position): (&mut [B], &mut [Record], usize),
        passed: &mut Passed,
    ) where
        O: Observe<B>,
    {
        let (mut left, mut others, mut ports) = (passed.left, 0, passed.ports);
        for (position, (buffer, record)) in (position..).zip(part.iter_mut().zip(records)) {
            let is_next = record.is_of(A::RECORD) && left >> (record.hash & 63) & 1 == 0;
            if is_next && let Some(port) = self.in_place::<_, S>(buffer, record) {
                record.shape.way = port;
                ports.add(port);
            } else {
                // Of a packet that is not recognised, the flow is not known.
                left |= if record.is_of(A::RECORD) { bit_of(record.hash) } else { 0 };
                others |= 1 << position;
            }
        }
        *passed = Passed { others: passed.others | others, left, ports };
    }

    /// Decides on one packet that can be rewritten where it is, rewrites it and counts it. Returns the port by which it
    /// leaves; `None` if it does not pass or needs a call, unchanged.
    #[inline(always)]
    fn in_place<B: Buffer, S: InPlaceScope>(&mut self, buffer: &mut B, record: &Record) -> Option<u8>
    where
        O: Observe<B>,
    {
        if !S::TAGS && usize::from(record.shape.network_offset) != UNTAGGED {
            return None;
        }
        let offset = if S::TAGS { record.shape.network_offset.into() } else { UNTAGGED };
        let (link, packet) = buffer.bytes_mut().split_at_mut_checked(offset)?;
        let head = A::Head::of_mut(packet, 0)?;
        let Passage { flow, direction, exit } = self.follow.packet::<A, S>(&mut self.flows, Some(head), record)?;
        if offset != exit.link_bytes() {
            return None;
        }
        if S::REWRITES == Rewrites::None {
            A::lower_hop_limit(head);
        } else {
            let replies = flow.key(direction.opposite());
            let is_fragmentable = S::FRAGMENTABLE && record.shape.may_fragment();
            let identification = if is_fragmentable { identification::<A>(self.identifications, replies, record) } else { None };
            A::rewrite(head, replies, record.is_udp(), identification);
        }
        if S::TAGS {
            exit.write_link(link);
        } else {
            let _ = exit.write_addresses(link); // a link header without tags has room for them
        }
        if record.shape.is_padded() {
            buffer.truncate(offset + usize::from(record.shape.packet_len));
        }
        count::<A>(self.counters, flow, direction, record);
        self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<A>(flow, record)));
        meter::<A, B, O>(&mut self.flows, record, direction);
        Some(exit.port.0)
    }

    /// As [`Forwarding::in_place`], for a packet into a tunnel to an address of its own family, over an untagged link.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // some bits of a hash
    fn through_tunnel<B: Buffer, S: Scope>(&mut self, buffer: &mut B, record: &Record) -> Option<u8>
    where
        O: Observe<B>,
    {
        let offset = usize::from(record.shape.network_offset);
        let head = A::Head::of(buffer.bytes(), offset)?;
        let Passage { flow, direction, exit } = self.follow.packet::<A, S>(&mut self.flows, Some(head), record)?;
        let (is_udp, entropy, to) = (flow.mode() == FlowMode::Gue, (record.hash >> 32) as u32, flow.key(Direction::ToClient));
        let tunnels = &self.follow.snapshot.tunnels;
        let source = A::tunnel_source(tunnels, exit.port, if is_udp { 0 } else { entropy })?;
        let before = outer::bytes_before(A::HEADER, is_udp);
        let is_too_long = usize::from(record.shape.packet_len) + before - UNTAGGED > usize::from(exit.mtu);
        if is_too_long || exit.link_bytes() != UNTAGGED || record.shape.may_fragment() || to.has_no_source() {
            return None;
        }
        let inner_sum = if is_udp { A::inner_sum(head)? } else { [0; 8] };
        if !buffer.prepend(before.checked_sub(offset)?) {
            return None;
        }
        let fields = OuterFields {
            packet_len: record.shape.packet_len,
            ports: is_udp.then_some([0xc000 | (entropy >> 18) as u16, tunnels.gue_destination_port]),
            flow_label: entropy & 0xf_ffff,
            inner_sum,
        };
        let frame = buffer.bytes_mut();
        exit.write_addresses(frame)?;
        A::write_outer(frame, source, to, &fields)?;
        // Not earlier: a short datagram has the length of a head by its padding only.
        if record.shape.is_padded() {
            buffer.truncate(before + usize::from(record.shape.packet_len));
        }
        count::<A>(self.counters, flow, direction, record);
        self.observer.observe(buffer, PacketOutcome::Forward(exit.port), || Some(belongs::<A>(flow, record)));
        meter::<A, B, O>(&mut self.flows, record, direction);
        Some(exit.port.0)
    }
}

/// Counts a packet that is forwarded.
#[inline(always)]
pub(super) fn count<A: FastFamily>(
    counters: &[BackendCounters; COUNTER_SLOTS],
    flow: &HotFlow<A::Key>,
    direction: Direction,
    record: &Record,
) {
    if let Some(counters) = counters.get(BackendId::counter_slot(flow.backend()).index()) {
        counters.forwarded(direction == Direction::ToClient, record.shape.packet_len);
    }
}

/// Counts a packet for its flow, if flows are metered.
#[inline(always)]
pub(super) fn meter<A: FastFamily, B, O: Observe<B>>(flows: &mut HotFlows<'_, A::Key>, record: &Record, direction: Direction) {
    if O::METERS {
        flows.meters.count(record.candidate.entry().0, direction, record.shape.packet_len);
    }
}

/// The flow of a packet, for observers.
pub(super) fn belongs<A: FastFamily>(flow: &HotFlow<A::Key>, record: &Record) -> PacketFlow {
    let tuple = flow.key(Direction::ToBackend).tuple(record.protocol());
    PacketFlow {
        vip: tuple.destination.ip(),
        port: tuple.destination_port,
        protocol: tuple.protocol,
        backend: BackendId::unpacked(flow.backend()),
    }
}

/// The new identification of a packet that may be fragmented on its way: the gateway's own, since packets of many clients
/// have one source (RFC 6864 section 5.3). `None` for other packets. It is sent in the opposite direction to `replies`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // of IPv4 16 bits
pub(super) fn identification<A: Rewritten>(
    identifications: &mut Identifications,
    replies: &A::Key,
    record: &Record,
) -> Option<u16> {
    if !A::ROUTERS_FRAGMENT || !record.shape.may_fragment() {
        return None;
    }
    let replies = replies.tuple(record.protocol());
    Some(identifications.next(replies.destination, replies.source, replies.protocol) as u16)
}

/// Puts the link header of the exit before a packet. Returns the head of the packet.
#[inline(always)]
pub(super) fn framed<'b, A: FastFamily>(buffer: &'b mut impl Buffer, exit: &Exit, record: &Record) -> Option<&'b mut A::Head> {
    let (offset, wanted) = (usize::from(record.shape.network_offset), exit.link_bytes());
    if wanted != offset {
        move_start(buffer, offset, wanted)?;
    }
    let frame = buffer.bytes_mut();
    exit.write_link(frame);
    A::Head::of_mut(frame, wanted)
}

/// Moves the start of a frame, so that a link header of `wanted` bytes fits before the packet at `offset`.
fn move_start(buffer: &mut impl Buffer, offset: usize, wanted: usize) -> Option<()> {
    match wanted.checked_sub(offset) {
        // A received frame has room for tags.
        Some(more) => buffer.prepend(more).then_some(()),
        None => {
            buffer.trim_front(offset - wanted);
            Some(())
        }
    }
}

/// Encapsulates a packet to a backend at an address, which is 0 where it is of the other family.
#[inline(never)]
fn into_tunnel<A: Rewritten>(
    snapshot: &Snapshot,
    identifications: &mut Identifications,
    buffer: &mut impl Buffer,
    record: &Record,
    (mode, backend): (FlowMode, A),
    exit: &Exit,
) -> Option<()> {
    if backend == A::default() {
        return None;
    }
    let outer = Outer::towards(backend.ip(), mode, exit, record.hash, &snapshot.tunnels)?;
    if record.shape.packet_len > outer.mtu {
        return None;
    }
    let identification = outer.identification(record.shape.may_fragment(), record.protocol(), identifications);
    let (network_offset, packet_len) = (record.shape.network_offset.into(), record.shape.packet_len);
    let inner = InnerPacket { network_offset, packet_len, identification };
    encapsulate::<A>(buffer, inner, &outer, exit).then_some(())
}
