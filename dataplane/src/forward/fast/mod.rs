//! The fast path: packets of live flows that change nothing but their bytes, which are almost all, and SYNs that open
//! connections as most do. Short stages over parts of a burst, each with few values to keep in registers: recognise packets
//! and prefetch the lines of tags of their flows (`recognise`); prefetch the flows (here); plan each packet by its flow
//! (`hits`) and write it (`eight`, `execute`); open flows of connections (`open`); send the packets, or hand them to
//! the workers that own them (`hand_over`).
//!
//! What the fast path takes: IPv4 without options and IPv6 without extension headers, TCP or UDP, sent to the port's
//! own address, with up to two VLAN tags; in any mode, in either direction. It leaves every other packet in the burst,
//! unchanged: one that ends or changes a flow, or begins one otherwise than most SYNs do, needs an answer, fragments,
//! a new route, or a longer look. A packet whose flow and direction had an earlier packet left in the same burst is
//! left too, and so is a packet behind one that it does not recognise between the same addresses (`unrecognised`): all packets
//! keep their order within a flow. A packet that it recognises without a flow here goes to the worker that owns it; where
//! a quarter of the last burst or more were of other workers, packets go there before flows are looked up.
//!
//! **Invariant:** whatever it forwards, the slow path would forward as the same bytes by the same port
//! (`tests/packets/fast_way.rs`, `tests/flows/openings.rs`). A flow is only in the table of the worker that owns it, so
//! a packet that is found here needs no steering.
//!
//! Not here: what happens to the packets that are left (`burst`).

mod eight;
mod execute;
mod hand_over;
mod hits;
mod open;
mod plan;
mod recognise;
pub(super) mod state;
mod turns;
mod unrecognised;

use std::cell::Cell;

use super::engine::Engine;
use super::observer::Observe;
use super::sort::Ingress;
use crate::flow::{BackendId, Candidate, CandidateSearch, Tick};
use crate::forward::decide::FlowTables;
use crate::port::{Arrival, Burst, Origin, Port, PortIndex};
use crate::snapshot::Snapshot;
use crate::stats::WorkerCounters;
use crate::wire::plain::head;
use crate::wire::processor::{AnyProcessor, Avx2, Compare, LANES, SetBits, Vectorised, prefetch_at};
use crate::wire::{Address, Buffer, Shape, TupleKey};
use eight::ForwardPart;
use execute::{HotTables, executor};
use hand_over::{has_fragmented, keep_or_hand_over, keep_own, leave_fragmented, may_be_of_others};
use hits::{Hit, Hits};
use open::{Openings, open_part};
use plan::Plan;
use recognise::Recognition;
use state::LastBurst;
use turns::{PARTS_MAX, Turns};
use unrecognised::UnrecognisedAddresses;

/// If at least one part in this many of a burst belonged to other workers, the owners of the next one's packets are computed
/// before their flows are looked up.
const OTHERS_PART: usize = 4;

/// What the stages over a burst have come to so far.
struct Progress<'s> {
    recognition: Recognition<'s>,
    unrecognised: UnrecognisedAddresses,
    openings: Openings<'s>,
    /// Flows, by [`Plan::flow_bit`], of which a packet was left: later packets must not overtake it.
    left: u64,
    /// By part, the positions of packets that may be found in another line of tags.
    away: [u32; PARTS_MAX],
}

/// Forwards the packets that the fast path takes; the others stay in the burst, in order.
///
/// The stages run over the parts of the burst in turn, each some turns behind the one before ([`Turns`]): while a part is
/// recognised, the tags of one before are fetched and the flows of others. So a stage finds in the cache what it needs, and
/// requests to memory spread over the work.
pub(super) fn forward_known<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    burst: &mut Burst<P::Buffer>,
) {
    let Ingress { snapshot, arrival } = at;
    let port = usize::from(arrival.link.port().0);
    let last_burst = engine.fast.last_bursts.get(port).copied().unwrap_or_default();
    let reads_routes = Cell::new(false);
    let hits = Hits::new(snapshot, Tick::at(arrival.now_ns), engine.flows.limits.shortest(), &reads_routes);
    let mut kept = std::mem::take(&mut engine.fast.plans);
    let plans = &mut *kept;
    let mut progress = Progress {
        recognition: Recognition::new(snapshot, arrival.link),
        unrecognised: UnrecognisedAddresses::none(),
        openings: Openings::new(at, engine.output.egress.peers.is_some()),
        left: 0,
        away: [0; PARTS_MAX],
    };
    let received = burst.len();
    let are_own = last_burst.has_others && may_be_of_others(&mut engine.output.egress, arrival);
    if are_own {
        keep_own(engine, at, last_burst, &mut progress.recognition, burst, plans);
    }
    let turns = Turns::new(burst.len(), snapshot.backends.are_many());
    for turn in 0..turns.count() {
        if let Some(number) = turns.recognised(turn) {
            if are_own {
                prefetch_tags(&engine.flows.tables, &plans[turns.part(number)]);
            } else {
                prefetch_ahead(last_burst, turns, number, burst);
                let range = turns.part(number);
                recognise_part(engine, arrival, &mut progress, &burst[range.clone()], &mut plans[range]);
            }
        }
        if let Some(number) = turns.located(turn) {
            let plans = &mut plans[turns.part(number)];
            let families = progress.recognition.families;
            progress.away[number] = locate(engine.fast.avx2, &engine.flows.tables, families, last_burst.reads_routes, plans);
            if O::METERS {
                prefetch_meters(&engine.flows.tables, plans);
            }
        }
        if let Some(number) = turns.located_away(turn).filter(|number| progress.away[*number] != 0) {
            locate_away(&engine.flows.tables, &mut plans[turns.part(number)], progress.away[number]);
        }
        if let Some(number) = turns.with_backends(turn) {
            prefetch_backends(&mut engine.flows.tables, &engine.output.counters, snapshot, &plans[turns.part(number)]);
        }
        if let Some(number) = turns.forwarded(turn) {
            let range = turns.part(number);
            forward_part(engine, snapshot, &hits, &mut progress, &mut burst[range.clone()], &mut plans[range]);
        }
    }
    // The first packet of each part tells what the next burst should prefetch.
    let (mut kinds, mut operations) = (0, 0);
    for Plan { shape, .. } in (0..turns.parts()).filter_map(|number| plans.get(turns.part(number).start)) {
        kinds |= shape.kind;
        operations |= shape.operations;
    }
    let plans = &plans[..burst.len()];
    let handed_over = received - burst.len() + send_known(engine, at, are_own, burst, plans);
    // They were counted as packets of known flows.
    let opened = progress.openings.opened();
    engine.output.tally.hits -= opened;
    engine.output.tally.misses += opened;
    if let Some(last_burst) = engine.fast.last_bursts.get_mut(port) {
        let has_others = match arrival.origin {
            Origin::Port => handed_over * OTHERS_PART >= received,
            Origin::OwnerUnknown | Origin::Begun | Origin::Owned => last_burst.has_others,
        };
        *last_burst = LastBurst { kinds, operations, reads_routes: reads_routes.get(), has_others };
    }
    engine.fast.plans = kept;
}

/// Recognises a part, and leaves the packets that must not overtake others.
#[inline(always)]
fn recognise_part<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    arrival: Arrival,
    progress: &mut Progress<'_>,
    part: &[P::Buffer],
    plans: &mut [Plan],
) {
    progress.recognition.part(engine.fast.avx2, &engine.flows.tables, part, plans);
    if progress.recognition.any_unrecognised {
        progress.unrecognised.hold_back(part, plans);
    }
    if has_fragmented(&mut engine.output.egress, arrival) {
        leave_fragmented(&mut engine.output.egress, plans, arrival.now_ns);
    }
}

/// Plans and writes the packets of a part that have live flows, then those that open connections.
#[inline(always)]
fn forward_part<'s, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &'s Snapshot,
    hits: &Hits<'s>,
    progress: &mut Progress<'s>,
    part: &mut [P::Buffer],
    plans: &mut [Plan],
) {
    let (avx2, left) = (engine.fast.avx2, &mut progress.left);
    let work = ForwardPart { hits, executor: executor(engine, snapshot), left, part, plans };
    let unplanned = match avx2 {
        Some(avx2) => avx2.run(work),
        None => work.one_by_one(),
    };
    if unplanned.of_other_flows != 0 {
        forward_by_search(engine, snapshot, hits, left, unplanned.of_other_flows, part, plans);
    }
    if unplanned.opening != 0 {
        open_part(engine, &mut progress.openings, left, unplanned.opening, part, plans);
    }
}

/// Forwards packets of which a tag of the index looked like that of another flow.
#[cold]
#[inline(never)]
fn forward_by_search<'s, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &'s Snapshot,
    hits: &Hits<'s>,
    left: &mut u64,
    positions: u32,
    part: &mut [P::Buffer],
    plans: &mut [Plan],
) {
    for position in SetBits(positions) {
        let (buffer, plan) = (&mut part[position], &mut plans[position]);
        let (frame, offset, protocol) = (buffer.bytes(), plan.shape.network_offset.into(), plan.shape.protocol());
        let found = match plan.shape.family() {
            Shape::V4 => head::tuple_at::<u32>(frame, offset, protocol)
                .and_then(|tuple| engine.flows.tables.v4.search_key(plan.hash, &TupleKey::of(&tuple), protocol)),
            _ => head::tuple_at::<u128>(frame, offset, protocol)
                .and_then(|tuple| engine.flows.tables.v6.search_key(plan.hash, &TupleKey::of(&tuple), protocol)),
        };
        let hit = match found.filter(|_| *left & plan.flow_bit() == 0) {
            None => Hit::Stays,
            Some(found) => {
                plan.flow = found;
                match plan.shape.family() {
                    Shape::V4 => executor(engine, snapshot).forward::<u32, _>(hits, buffer, plan),
                    _ => executor(engine, snapshot).forward::<u128, _>(hits, buffer, plan),
                }
            }
        };
        *left |= if matches!(hit, Hit::Planned(_)) { 0 } else { plan.flow_bit() };
    }
}

/// Prefetches what is known of the backends of the probable flows, and their counters.
#[inline(never)]
fn prefetch_backends(tables: &mut FlowTables, counters: &WorkerCounters, snapshot: &Snapshot, plans: &[Plan]) {
    let (exits, counters) = (snapshot.backends.exits(), counters.all_slots());
    let tables = HotTables::of(tables, false);
    for plan in plans {
        let (index, _) = plan.flow.entry();
        let backend = match plan.shape.family() {
            Shape::V4 => tables.v4.flows.get(index).map(|flow| flow.backend()),
            _ => tables.v6.flows.get(index).map(|flow| flow.backend()),
        };
        if let Some(backend) = backend {
            prefetch_at(counters, BackendId::counter_slot(backend).index());
            exits.prefetch(backend);
        }
    }
}

/// Sends what was written, hands over what other workers own, and keeps the rest in the burst. Returns the number of
/// packets that were handed over. `are_own`: no packet is of another worker.
fn send_known<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    are_own: bool,
    burst: &mut Burst<P::Buffer>,
    plans: &[Plan],
) -> usize {
    match plans.first().filter(|first| first.is_planned() && leave_alike(plans, first.shape.port)) {
        Some(first) => {
            engine.output.tally.hits += burst.len() as u64;
            engine.output.egress.send_burst(PortIndex(first.shape.port), burst, &mut engine.output.tally);
            0
        }
        None => send_some(engine, at, are_own, burst, plans),
    }
}

#[inline(never)]
fn send_some<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    are_own: bool,
    burst: &mut Burst<P::Buffer>,
    plans: &[Plan],
) -> usize {
    let mut may_hand_over = engine.output.egress.peers.is_some() && !are_own;
    let (mut rest, mut sent, all) = (Burst::new(), 0, burst.len());
    for (buffer, plan) in burst.drain(..).zip(plans) {
        // Later packets must not overtake one whose flow is not known yet.
        may_hand_over &= plan.is_planned() || plan.shape.family() != 0;
        if plan.is_planned() {
            sent += 1;
            engine.output.egress.send(PortIndex(plan.shape.port), buffer, &mut engine.output.tally);
        } else if may_hand_over {
            rest.extend(keep_or_hand_over(engine, at, buffer, plan));
        } else {
            rest.push(buffer);
        }
    }
    engine.output.tally.hits += sent as u64;
    *burst = rest;
    all - sent - burst.len()
}

/// Whether all packets leave by a port. Without an early end, which would take a branch for each packet.
#[inline(always)]
fn leave_alike(plans: &[Plan], port: u8) -> bool {
    let differs = |differs: u8, plan: &Plan| differs | plan.shape.port ^ port;
    let (groups, rest) = plans.as_chunks::<LANES>();
    let of_groups = groups.iter().fold(0, |all, group| group.iter().fold(all, differs));
    rest.iter().fold(of_groups, differs) == 0
}

/// Prefetches the frames of the part after the one that is recognised now; of the first part these too.
#[inline(always)]
fn prefetch_ahead<B: Buffer>(last_burst: LastBurst, turns: Turns, number: usize, burst: &[B]) {
    if number == 0 {
        last_burst.prefetch(&burst[turns.part(number)]);
    }
    last_burst.prefetch(&burst[turns.part(number + 1)]);
}

/// Packets whose probable flows are found and prefetched.
struct Locate<'a> {
    tables: &'a FlowTables,
    /// The families that are among the packets.
    families: u8,
    /// Whether routes to clients are prefetched too.
    with_routes: bool,
    plans: &'a mut [Plan],
}

impl Vectorised for Locate<'_> {
    type Output = u32;

    /// Returns the positions, as bits, of those that may be found in another line of tags, which is prefetched.
    #[inline(always)]
    fn run(self, avx2: Avx2) -> u32 {
        self.by(avx2)
    }
}

impl Locate<'_> {
    #[inline(always)]
    fn by(self, compare: impl Compare) -> u32 {
        let Self { tables, families, with_routes, plans } = self;
        // In none of the stages a packet is asked whether its route should be fetched; that of IPv6 is in the line of the flow.
        let v6 = tables.v6.candidates(compare, false);
        match (families, with_routes) {
            (Shape::V4, true) => located(plans, tables.v4.candidates(compare, true)),
            (Shape::V4, false) => located(plans, tables.v4.candidates(compare, false)),
            (Shape::V6, _) => located(plans, v6),
            _ => located(plans, BothFamilies { v4: tables.v4.candidates(compare, with_routes), v6 }),
        }
    }
}

/// A search for probable flows. No closure: the compiler may keep one as a function, which is compiled for any processor.
trait Search {
    /// `None` stands for [`Candidate::AWAY`]. The flow of a packet that is not recognised does not matter.
    fn of(&self, plan: &Plan) -> Option<Candidate>;
}

impl<A: Address, C: Compare> Search for CandidateSearch<'_, A, C> {
    #[inline(always)]
    fn of(&self, plan: &Plan) -> Option<Candidate> {
        self.of_hash(plan.hash)
    }
}

/// The search for packets of both families.
struct BothFamilies<'t, C> {
    v4: CandidateSearch<'t, u32, C>,
    v6: CandidateSearch<'t, u128, C>,
}

impl<C: Compare> Search for BothFamilies<'_, C> {
    #[inline(always)]
    fn of(&self, plan: &Plan) -> Option<Candidate> {
        match plan.shape.family() {
            Shape::V4 => self.v4.of_hash(plan.hash),
            _ => self.v6.of_hash(plan.hash),
        }
    }
}

/// Sets the probable flow of each packet. Returns the positions of those that may be found in another line.
#[inline(always)]
fn located(plans: &mut [Plan], search: impl Search) -> u32 {
    let mut away = 0;
    for (position, plan) in plans.iter_mut().enumerate() {
        plan.flow = search.of(plan).unwrap_or_else(|| {
            away |= 1 << position;
            Candidate::AWAY
        });
    }
    away
}

/// Finds the probable flow of each packet and prefetches it, see [`Locate`].
#[inline(never)]
fn locate(avx2: Option<Avx2>, tables: &FlowTables, families: u8, with_routes: bool, plans: &mut [Plan]) -> u32 {
    let work = Locate { tables, families, with_routes, plans };
    match avx2 {
        Some(avx2) => avx2.run(work),
        None => work.by(AnyProcessor),
    }
}

/// The same for those at positions that [`locate`] returned, a turn later: in a full table one packet in fifteen.
#[inline(never)]
fn locate_away(tables: &FlowTables, plans: &mut [Plan], away: u32) {
    for position in SetBits(away) {
        let plan = &mut plans[position];
        plan.flow = match plan.shape.family() {
            Shape::V4 => tables.v4.candidate_away(plan.hash),
            _ => tables.v6.candidate_away(plan.hash),
        };
    }
}

/// Prefetches the lines of tags of packets that were recognised without.
#[inline(never)]
fn prefetch_tags(tables: &FlowTables, plans: &[Plan]) {
    for plan in plans {
        match plan.shape.family() {
            Shape::V4 => tables.v4.prefetch(plan.hash),
            _ => tables.v6.prefetch(plan.hash),
        }
    }
}

/// Prefetches the meters of the probable flows.
#[inline(never)]
fn prefetch_meters(tables: &FlowTables, plans: &[Plan]) {
    for plan in plans {
        let (index, _) = plan.flow.entry();
        match plan.shape.family() {
            Shape::V4 => tables.v4.prefetch_meter(index),
            _ => tables.v6.prefetch_meter(index),
        }
    }
}
