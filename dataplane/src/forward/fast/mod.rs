//! The fast path: packets of live flows that change nothing but their bytes, which are almost all. Short loops over a
//! burst, each with few values to keep in registers: recognise packets and prefetch the lines of tags of their flows
//! (`record`); prefetch the flows; check each flow (`follow`) and rewrite the packet (`forward`, `rewrite`); create flows of
//! connections (`open`); send the packets, or hand them to the workers that own them (`hand_over`).
//!
//! What the fast path takes: IPv4 without options and IPv6 without extension headers, TCP or UDP, sent to the port's
//! own address, with up to two VLAN tags; in any mode, in either direction. It leaves every other packet in the burst,
//! unchanged: one that ends or changes a flow, or begins one otherwise than most SYNs do, needs an answer, fragments,
//! a new route, or a longer look. A packet whose flow and direction had an earlier packet left in the same burst is
//! left too, and so is a packet behind one that it does not recognise between the same addresses (`unrecognised`): all packets
//! keep their order within a flow. A packet that it recognises without a flow here goes to the worker that owns it; where
//! most packets are of other workers, they go there before flows are looked up.
//!
//! **Invariant:** whatever it forwards, the slow path would forward as the same bytes by the same port
//! (`tests/packets/fast_way.rs`, `tests/flows/openings.rs`). A flow is only in the table of the worker that owns it, so
//! a packet that is found here needs no steering.
//!
//! Not here: what happens to the packets that are left (`burst`).

mod eight;
mod follow;
mod forward;
mod hand_over;
mod nat;
mod open;
mod outer;
mod progress;
mod record;
mod rewrite;
mod turns;
mod unrecognised;

use std::cell::Cell;
use std::ops::Range;

use eight::recognise_by_eight;
pub(super) use follow::LastBurst;
use follow::{FastFamily, Follow, ForwardLoop};
pub(super) use open::OpeningBackends;
use open::openings;
use progress::Progress;
pub(super) use record::Record;
use record::{FramesSoFar, HEAD_V6, PARTS_MAX, Recognise, STAYS, UNTAGGED};
use turns::Turns;
use unrecognised::UnrecognisedAddresses;

use super::engine::Engine;
use super::observer::Observe;
use crate::flow::{BackendId, Candidate, FlowTable, Tick};
use crate::forward::decide::FlowTables;
use crate::port::{Arrival, BURST, Burst, Origin, Port, PortIndex};
use crate::snapshot::Snapshot;
use crate::wire::processor::{AnyProcessor, Avx2, Compare, SetBits, Vectorised, prefetch_at};
use crate::wire::{Address, Buffer};

/// If at least one part in this many of a burst belonged to other workers, the owners of the next one's packets are computed
/// before their flows are looked up.
const OTHERS_PART: usize = 4;

/// Records for the packets of one burst.
pub(super) fn records() -> Vec<Record> {
    vec![Record::left(); BURST]
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// Forwards the packets that the fast path takes; the others stay in the burst, in order.
    ///
    /// The loops run over the parts of the burst in turn, each some turns behind the one before ([`Turns`]): while a part is
    /// recognised, the tags of one before are fetched and the flows of others. So a loop finds in the cache what it needs, and
    /// requests to memory spread over the work.
    pub(super) fn forward_known(&mut self, snapshot: &Snapshot, arrival: Arrival, burst: &mut Burst<P::Buffer>) {
        let port = usize::from(arrival.link.port().0);
        let last_burst = self.last_bursts.get(port).copied().unwrap_or_default();
        let mut records = std::mem::take(&mut self.records);
        let reads_routes = Cell::new(false);
        let follow = Follow::new(snapshot, (Tick::at(arrival.now_ns), self.limits.shortest()), &reads_routes);
        let (recognise, mut frames) = (Recognise::new(snapshot, arrival.link), FramesSoFar::nothing());
        let (received, has_fragmented) = (burst.len(), self.has_fragmented(arrival));
        let of_all = (last_burst.has_others && self.may_be_of_others(arrival))
            .then(|| self.keep_own((snapshot, arrival, last_burst), (recognise, &mut frames), burst, &mut records));
        let turns = Turns::new(burst.len(), snapshot.backends.are_many());
        let (mut kinds, mut progress, mut away) =
            (of_all.map_or(0, |all| all.kinds), Progress::new(snapshot, last_burst), [0; PARTS_MAX]);
        let (mut opening_v4, mut opening_v6, mut unrecognised) = (None, None, UnrecognisedAddresses::none());
        for turn in 0..turns.count() {
            match (turns.recognised(turn), of_all) {
                (None, _) => {}
                (Some(part), None) => {
                    let parts = [part.clone(), turns.part(turn + 1)];
                    kinds |= self.recognise_part(last_burst, (recognise, &mut frames), (burst, &mut records), parts);
                    if frames.any_unrecognised {
                        unrecognised.hold_back(&burst[part.clone()], &mut records[part.clone()]);
                    }
                    if has_fragmented {
                        self.leave_fragmented(&mut records[part], arrival.now_ns);
                    }
                }
                (Some(part), Some(_)) => prefetch_tags(&self.tables, &records[part]),
            }
            let families = kinds & Record::FAMILY;
            if families == 0 {
                continue;
            }
            self.locate_parts((turns, turn), (families, last_burst.reads_routes), &mut records, &mut away);
            if let Some(part) = turns.with_backends(turn) {
                self.prefetch_backends(snapshot, &records[part], families);
            }
            let Some(range) = turns.forwarded(turn) else { continue };
            let (part, records) = (&mut burst[range.clone()], &mut records[range]);
            progress.note(frames.any_tagged, frames.any_fragmentable());
            let openings = if kinds & Record::SYN != 0 { openings(records) } else { 0 };
            // Most packets of a part without any flow here are of other workers.
            if self.egress.peers.is_some() && openings == 0 && records.iter().all(|record| record.candidate == Candidate::NONE) {
                progress.leave(records);
                continue;
            }
            if families != Record::V6 {
                self.forward_part::<u32>(&follow, part, (records, openings), &mut progress);
                self.open_part::<u32>((snapshot, arrival), &mut opening_v4, part, (records, openings), &mut progress);
            }
            if families != Record::V4 {
                self.forward_part::<u128>(&follow, part, (records, openings), &mut progress);
                self.open_part::<u128>((snapshot, arrival), &mut opening_v6, part, (records, openings), &mut progress);
            }
        }
        let (len, kinds) = (burst.len(), kinds & Record::FAMILY);
        let is_tagged = of_all.map_or_else(|| Record::ends_tagged(&records[..len]), |all| all.is_tagged);
        let mut handed_over = received - len;
        if kinds != 0 && len > 0 {
            handed_over += self.send_known((snapshot, arrival, of_all.is_some()), (burst, &records), progress.only_port());
            // They were counted as packets of known flows.
            self.tally.hits -= progress.opened;
            self.tally.misses += progress.opened;
        }
        if let Some(last_burst) = self.last_bursts.get_mut(port) {
            let has_others = match arrival.origin {
                Origin::Port => handed_over * OTHERS_PART >= received,
                Origin::OwnerUnknown | Origin::Begun | Origin::Owned => last_burst.has_others,
            };
            *last_burst = progress.end((kinds, is_tagged), reads_routes.get(), has_others);
        }
        self.records = records;
    }

    /// The second loop, over the parts whose turn it is, and the look into other lines of tags.
    #[inline(always)]
    fn locate_parts(
        &self,
        (turns, turn): (Turns, usize),
        (families, with_routes): (u8, bool),
        records: &mut [Record],
        away: &mut [u32; PARTS_MAX],
    ) {
        if let Some(number) = turns.located(turn) {
            let records = &mut records[turns.part(number)];
            away[number] = locate(&self.tables, (self.avx2, with_routes), records, families);
            if O::METERS {
                prefetch_meters(&self.tables, records);
            }
        }
        if let Some(number) = turns.located_away(turn).filter(|number| away[*number] != 0) {
            locate_away(&self.tables, &mut records[turns.part(number)], away[number]);
        }
    }

    /// The first loop over the first of two parts, whose frames are prefetched before; those of the second part now. Returns the
    /// kinds of its packets together.
    #[inline(always)]
    fn recognise_part(
        &self,
        last_burst: LastBurst,
        (recognise, frames): (Recognise<'_>, &mut FramesSoFar),
        (burst, records): (&Burst<P::Buffer>, &mut [Record]),
        [part, next]: [Range<usize>; 2],
    ) -> u8 {
        if part.start == 0 {
            prefetch_frames(&burst[part.clone()], last_burst);
        }
        prefetch_frames(&burst[next], last_burst);
        let (tables, part) = (&self.tables, (&burst[part.clone()], &mut records[part]));
        match self.avx2 {
            Some(avx2) => recognise_by_eight(avx2, last_burst, recognise, (tables, frames), part),
            None => recognise.burst(tables, frames, part),
        }
    }

    /// Prefetches what is known of the backends of the probable flows, and their counters. Of packets of two families, those
    /// of IPv4 first.
    #[inline(never)]
    fn prefetch_backends(&mut self, snapshot: &Snapshot, records: &[Record], families: u8) {
        if families != Record::V6 {
            self.prefetch_backends_of::<u32>(snapshot, records, families);
        }
        if families != Record::V4 {
            self.prefetch_backends_of::<u128>(snapshot, records, families);
        }
    }

    /// The same of one family.
    #[inline(always)]
    fn prefetch_backends_of<A: FastFamily>(&mut self, snapshot: &Snapshot, records: &[Record], families: u8) {
        let (exits, counters) = (snapshot.backends.exits(), self.counters.all_slots());
        let flows = A::split(&mut self.tables).0.hot_parts(false).flows;
        for record in records {
            if families != A::RECORD && !record.is_of(A::RECORD) {
                continue;
            }
            if let Some(flow) = flows.get(record.candidate.entry().0) {
                prefetch_at(counters, BackendId::counter_slot(flow.backend()).index());
                exits.prefetch(flow.backend());
            }
        }
    }

    /// Sends what was rewritten, hands over what other workers own, and keeps the rest in the burst. Returns the number of
    /// packets that were handed over.
    fn send_known(
        &mut self,
        (snapshot, arrival, are_own): (&Snapshot, Arrival, bool),
        (burst, records): (&mut Burst<P::Buffer>, &[Record]),
        only_port: Option<PortIndex>,
    ) -> usize {
        match only_port {
            Some(port) => {
                self.tally.hits += burst.len() as u64;
                self.egress.send_burst(port, burst, &mut self.tally);
                0
            }
            None => self.send_some((snapshot, arrival, are_own), burst, records),
        }
    }

    #[inline(never)]
    fn send_some(
        &mut self,
        (snapshot, arrival, are_own): (&Snapshot, Arrival, bool),
        burst: &mut Burst<P::Buffer>,
        records: &[Record],
    ) -> usize {
        let mut may_hand_over = self.egress.peers.is_some() && !are_own;
        let (mut rest, mut sent, all) = (Burst::new(), 0, burst.len());
        for (buffer, record) in burst.drain(..).zip(records) {
            // Later packets must not overtake one whose flow is not known yet.
            may_hand_over &= record.shape.way != STAYS || record.family() != 0;
            match record.shape.way {
                STAYS if may_hand_over => rest.extend(self.keep_or_hand_over(snapshot, arrival, buffer, record)),
                STAYS => rest.push(buffer),
                port => {
                    sent += 1;
                    self.egress.send(PortIndex(port), buffer, &mut self.tally);
                }
            }
        }
        self.tally.hits += sent as u64;
        *burst = rest;
        all - sent - burst.len()
    }
}

/// Prefetches the first cache line of each frame, which a network card or another worker wrote. The headers of IPv6 packets
/// end in the second one. Outer headers are written into the line before.
#[inline(always)]
fn prefetch_frames<B: Buffer>(burst: &[B], last_burst: LastBurst) {
    burst.iter().for_each(|buffer| buffer.prefetch(0));
    if last_burst.families & Record::V6 != 0 {
        burst.iter().for_each(|buffer| buffer.prefetch(END_V6));
    }
    if last_burst.most.contains(&ForwardLoop::IntoTunnels) {
        burst.iter().for_each(|buffer| buffer.prefetch(-1));
    }
}

/// The last byte of an untagged frame that the fast path reads of IPv6.
#[allow(clippy::cast_possible_wrap)] // far below 2^31
const END_V6: isize = (UNTAGGED + HEAD_V6 - 1) as isize;

/// The second loop: finds the probable flow of each packet, and prefetches it, perhaps with the route to the client.
/// `families` has at least those of the records. Returns the positions, as bits, of those that may be found in another line
/// of tags, which is prefetched.
fn locate(tables: &FlowTables, (avx2, with_routes): (Option<Avx2>, bool), records: &mut [Record], families: u8) -> u32 {
    match (families, avx2) {
        (Record::V4, Some(avx2)) => avx2.run(Locate { table: &tables.v4, with_routes, records }),
        (Record::V6, Some(avx2)) => avx2.run(Locate { table: &tables.v6, with_routes, records }),
        (Record::V4, None) => locate_all(&tables.v4, with_routes, records),
        (Record::V6, None) => locate_all(&tables.v6, with_routes, records),
        _ => locate_mixed(tables, records),
    }
}

/// The second loop for records of one family, on a processor with AVX2.
struct Locate<'a, A: Address> {
    table: &'a FlowTable<A>,
    with_routes: bool,
    records: &'a mut [Record],
}

impl<A: Address> Vectorised for Locate<'_, A> {
    type Output = u32;

    #[inline(always)]
    fn run(self, avx2: Avx2) -> u32 {
        // Two loops, of which neither looks at each packet whether it should prefetch the route.
        if self.with_routes {
            locate_by(avx2, (self.table, true), self.records)
        } else {
            locate_by(avx2, (self.table, false), self.records)
        }
    }
}

/// Prefetches the lines of tags of packets that were recognised without.
#[inline(never)]
fn prefetch_tags(tables: &FlowTables, records: &[Record]) {
    for record in records {
        match record.family() {
            Record::V4 => tables.v4.prefetch(record.hash),
            _ => tables.v6.prefetch(record.hash),
        }
    }
}

/// Prefetches the meters of the probable flows.
#[inline(never)]
fn prefetch_meters(tables: &FlowTables, records: &[Record]) {
    for record in records {
        let (index, _) = record.candidate.entry();
        match record.family() {
            Record::V4 => tables.v4.prefetch_meter(index),
            _ => tables.v6.prefetch_meter(index),
        }
    }
}

/// The same for records of one family, and of packets that are left, whose flows do not matter.
#[inline(never)]
fn locate_all<A: Address>(table: &FlowTable<A>, with_routes: bool, records: &mut [Record]) -> u32 {
    locate_by(AnyProcessor, (table, with_routes), records)
}

#[inline(always)]
fn locate_by<A: Address>(compare: impl Compare, (table, with_routes): (&FlowTable<A>, bool), records: &mut [Record]) -> u32 {
    let (candidates, mut away) = (table.candidates(compare, with_routes), 0);
    for (position, record) in records.iter_mut().enumerate() {
        set_candidate(record, candidates.of(record.hash), (position, &mut away));
    }
    away
}

#[inline(never)]
fn locate_mixed(tables: &FlowTables, records: &mut [Record]) -> u32 {
    let mut away = 0;
    for (position, record) in records.iter_mut().enumerate() {
        let candidate = match record.family() {
            Record::V4 => tables.v4.candidates(AnyProcessor, true).of(record.hash),
            Record::V6 => tables.v6.candidates(AnyProcessor, true).of(record.hash),
            _ => Some(Candidate::NONE),
        };
        set_candidate(record, candidate, (position, &mut away));
    }
    away
}

/// Sets the candidate of the record at a position, which becomes a bit of `away` if the candidate is.
#[inline(always)]
fn set_candidate(record: &mut Record, candidate: Option<Candidate>, (position, away): (usize, &mut u32)) {
    record.candidate = candidate.unwrap_or_else(|| {
        *away |= 1 << position;
        Candidate::AWAY
    });
}

/// The same for those at positions that [`locate`] returned, a turn later: in a full table one packet in fifteen.
#[inline(never)]
fn locate_away(tables: &FlowTables, records: &mut [Record], away: u32) {
    for position in SetBits(away) {
        let record = &mut records[position];
        record.candidate = match record.family() {
            Record::V4 => tables.v4.candidate_away(record.hash),
            _ => tables.v6.candidate_away(record.hash),
        };
    }
}
