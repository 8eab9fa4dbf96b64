//! The third loop of the fast path, over the packets of one family in a part of a burst. It consists of several: each
//! for the packets that need the same.
//!
//! **Invariant:** packets of a flow and direction behind one that is left are left too.
//!
//! Not here: what becomes of one packet (`rewrite`), or of eight (`eight`).

use std::marker::PhantomData;

use super::eight::{ForwardByEight, OutersOfEight, TunnelsByEight};
use super::follow::{
    All, Direct, EVERY_KIND, Follow, ForwardLoop, GROUPS, InPlaceScope, IntoTunnels, PacketHead, Scope, TAGS, Translated,
};
use super::progress::Progress;
use super::record::Record;
use super::rewrite::{Forwarding, Rewritten, Writer, meter};
use crate::flow::{Candidate, FlowMode, HotFlow};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::port::{Port, PortIndex};
use crate::wire::Buffer;
use crate::wire::processor::SetBits;

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// The third loop, for the packets of one family in a part of a burst, except those at the positions that are bits of
    /// `openings`. It consists of three: one for packets that are rewritten where they are, one for packets into tunnels,
    /// and one for all others. Most packets of a part probably need the same as those of the part before.
    #[inline(always)]
    pub(super) fn forward_part<A: OutersOfEight>(
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
    fn forward_translated<A: OutersOfEight>(
        &mut self,
        follow: &Follow<'_>,
        part: &mut [P::Buffer],
        records: &mut [Record],
        progress: &mut Progress,
    ) -> u32 {
        match progress.kinds {
            0 => self.forward_in_place::<A, Translated<0>>(follow, part, records, progress),
            1 => self.forward_in_place::<A, Translated<1>>(follow, part, records, progress),
            2 => self.forward_in_place::<A, Translated<2>>(follow, part, records, progress),
            3 => self.forward_in_place::<A, Translated<3>>(follow, part, records, progress),
            4 => self.forward_in_place::<A, Translated<4>>(follow, part, records, progress),
            5 => self.forward_in_place::<A, Translated<5>>(follow, part, records, progress),
            6 => self.forward_in_place::<A, Translated<6>>(follow, part, records, progress),
            _ => self.forward_in_place::<A, Translated<EVERY_KIND>>(follow, part, records, progress),
        }
    }

    /// The same for the packets at the positions that are bits of `others`, which need another loop than the first.
    #[inline(never)]
    fn forward_rest<A: OutersOfEight>(
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

    /// The third loop for packets that are rewritten where they are: eight at a time where that is possible. Returns the
    /// positions of the other packets as bits.
    #[inline(always)]
    fn forward_in_place<A: OutersOfEight, S: InPlaceScope>(
        &mut self,
        follow: &Follow<'_>,
        part: &mut [P::Buffer],
        records: &mut [Record],
        progress: &mut Progress,
    ) -> u32 {
        let Some(avx2) = self.avx2 else { return self.forward_one_by_one::<A, S>(follow, part, records, progress) };
        let (forwarding, passed) = (self.forwarding::<A>(follow), progress.passed());
        let scope = PhantomData::<S>;
        let passed = avx2.run(ForwardByEight { forwarding, part: (part, records), passed, scope });
        progress.take(&passed)
    }

    /// The same one at a time. It calls no function.
    #[inline(never)]
    fn forward_one_by_one<A: Rewritten, S: InPlaceScope>(
        &mut self,
        follow: &Follow<'_>,
        part: &mut [P::Buffer],
        records: &mut [Record],
        progress: &mut Progress,
    ) -> u32 {
        let mut passed = progress.passed();
        self.forwarding::<A>(follow).each_in_place::<_, S>((part, records, 0), &mut passed);
        progress.take(&passed)
    }

    /// Those of some positions whose packets are probably of flows in some modes. The packets of a flow have one mode.
    #[inline(never)]
    fn positions_of<A: Rewritten>(&mut self, records: &[Record], positions: u32, is_meant: fn(FlowMode) -> bool) -> u32 {
        let flows = A::split(&mut self.tables).0.hot_parts(false).flows;
        let mode = |record: &Record| flows.get(record.candidate.entry().0).map(HotFlow::mode);
        let is_one = |record: &&Record| record.family() == A::RECORD && mode(record).is_some_and(is_meant);
        let one = |at: usize| records.get(at).filter(is_one).map(|_| 1 << at);
        SetBits(positions).filter_map(one).fold(0, |all, one| all | one)
    }

    /// The third loop for packets into tunnels, at the positions that are bits of `positions`: eight at a time where that is
    /// possible. Returns those of them that it does not take, for [`Self::forward_others`].
    #[inline(never)]
    fn forward_into_tunnels<A: OutersOfEight, S: Scope>(
        &mut self,
        follow: &Follow<'_>,
        (part, records, positions): (&mut [P::Buffer], &mut [Record], u32),
        progress: &mut Progress,
    ) -> u32 {
        let Some(avx2) = self.avx2 else {
            let mut passed = progress.passed();
            self.forwarding::<A>(follow).each_into_tunnels::<_, S>((part, records, 0), positions, &mut passed);
            return progress.take(&passed);
        };
        // The others are probably in the mode of the first.
        let first = positions & positions.wrapping_neg();
        let passed = if self.positions_of::<A>(records, first, |mode| mode == FlowMode::Gue) == 0 {
            avx2.run(self.tunnels_by_eight::<false, A, S>(follow, (part, records, positions), progress))
        } else {
            avx2.run(self.tunnels_by_eight::<true, A, S>(follow, (part, records, positions), progress))
        };
        progress.take(&passed)
    }

    fn tunnels_by_eight<'e, 'p, const IN_UDP: bool, A: OutersOfEight, S: Scope>(
        &'e mut self,
        follow: &'e Follow<'e>,
        (part, records, positions): (&'p mut [P::Buffer], &'p mut [Record], u32),
        progress: &Progress,
    ) -> TunnelsByEight<'e, 'p, IN_UDP, A, O, P::Buffer, S> {
        let (forwarding, passed) = (self.forwarding::<A>(follow), progress.passed());
        TunnelsByEight { forwarding, part: (part, records), positions, passed, scope: PhantomData }
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
        Forwarding { follow: *follow, flows, counters, identifications, observer }
    }
}

/// The first positions of a part, as bits.
#[allow(clippy::cast_possible_truncation)] // of at most 32 bits
const fn first_positions(count: usize) -> u32 {
    ((1_u64 << count) - 1) as u32
}
