//! The sweep over a flow table: a few entries at a time, so that each poll of a worker stays short.
//!
//! **Invariant:** every entry is visited between two returns to the first one.
//!
//! Not here: when to sweep, and which flows end (the caller's rules).

use arrayvec::ArrayVec;

use super::flow_table::{FlowIndex, FlowTable, IndexedEntry};
use crate::flow::entry::{BackendId, Flow};
use crate::flow::index::IndexSlot;
use crate::flow::snat::PoolId;
use crate::flow::state::{Direction, FlowMode, FlowState, YieldClass};
use crate::flow::storage::{FlowEnd, HotFlow};
use crate::flow::tick::Ticks;
use crate::stats::CounterSlot;
use crate::wire::{Address, TupleKey, protocol};

/// Flows that a sweep visits together.
const SWEEP_PART: usize = 16;
/// Entries by which a sweep fetches ahead; the entries behind its end are the first of the next sweep.
const SWEEP_AHEAD: u32 = 32;

impl<A: Address> FlowTable<A> {
    /// Passes up to `entries` entries, from `start` on, to `ended`, and removes the flows for which it returns true;
    /// the callback releases their SNAT ports. Forgets routes of other epochs than `route_epoch`. Returns where to
    /// continue, 0 after the last entry.
    pub fn sweep(&mut self, start: u32, entries: u32, route_epoch: u32, ended: impl FnMut(&Flow<A>) -> bool) -> u32 {
        self.sweep_by(start, entries, route_epoch, &mut Callback(ended))
    }

    /// As [`FlowTable::sweep`], by the hot words alone for flows in a handshake, which have no route: a flow that stays
    /// costs little more than reading it in order.
    ///
    /// The lines of the index that the end of a flow changes are fetched while flows of the part before end.
    pub(crate) fn sweep_by(&mut self, start: u32, entries: u32, route_epoch: u32, by: &mut impl SweepRules<A>) -> u32 {
        let end = start.saturating_add(entries).min(self.high_water);
        let (mut next, mut parts) = (start, [ArrayVec::new(), ArrayVec::new()]);
        let [part, after] = &mut parts;
        let (mut part, mut after) = (part, after);
        self.part_of_sweep(&mut next, end, by, part);
        while !part.is_empty() {
            self.part_of_sweep(&mut next, end, by, after);
            part.iter_mut().for_each(|due| self.look_up(due));
            for due in &*part {
                if !due.is_over || !self.end_handshake(due, by) {
                    self.visit_entry(due, route_epoch, by);
                }
            }
            std::mem::swap(&mut part, &mut after);
        }
        if end < self.high_water {
            return end;
        }
        if let Some(replicator) = &mut self.storage.replicator {
            replicator.end_sweep();
        }
        0
    }

    /// The next flows, up to `end`, that end or whose whole entry must be read. Their lines of the index are
    /// prefetched.
    #[inline(always)]
    fn part_of_sweep(&self, next: &mut u32, end: u32, by: &impl SweepRules<A>, part: &mut ArrayVec<Due, SWEEP_PART>) {
        part.clear();
        while *next < end && !part.is_full() {
            let index = *next;
            *next += 1;
            self.storage.prefetch_first(index + SWEEP_AHEAD);
            let Some((flow, state)) = self.storage.hot(index).and_then(|flow| Some((flow, flow.state()?))) else { continue };
            let fate = if state.shakes_hands() { by.fate_of_handshake(flow, state) } else { Fate::Unknown };
            if fate != Fate::Stays {
                let hashes = [Direction::ToBackend, Direction::ToClient]
                    .map(|direction| self.hash_key(flow.key(direction), state.protocol()));
                hashes.iter().for_each(|hash| self.prefetch(*hash));
                self.storage.prefetch_rest(index);
                self.order.prefetch(index);
                part.push(Due { index, hashes, slots: [IndexSlot::NONE; 2], is_over: fate == Fate::Over });
            }
        }
    }

    /// Looks up where a flow that ends is in the index, and prefetches its neighbours.
    #[inline(always)]
    fn look_up(&self, due: &mut Due) {
        if due.is_over {
            due.slots = self.slots_of(due.index, due.hashes);
            self.order.prefetch_neighbours(due.index);
        }
    }

    /// Removes a flow in a handshake. Returns false if its SNAT port is of no pool of this worker: that has to rest.
    #[inline(always)]
    fn end_handshake(&mut self, due: &Due, by: &mut impl SweepRules<A>) -> bool {
        let (index, pool) = (due.index, self.storage.pool(due.index));
        let Some((flow, state)) = self.storage.hot(index).and_then(|flow| Some((flow, flow.state()?))) else { return true };
        let (mode, counted) = (flow.mode(), BackendId::counter_slot(flow.backend()));
        let has_port = mode == FlowMode::Nat;
        if has_port && pool == PoolId::NONE {
            return false;
        }
        let port = flow.key(Direction::ToClient).tuple(protocol::TCP).destination_port;
        self.storage.record_end(index, FlowEnd::Idle, self.now);
        let entry = IndexedEntry { index, is_two_way: true, hashes: due.hashes, slots: due.slots };
        self.take_out(entry, Some(YieldClass::Unconfirmed), has_port.then_some(pool));
        by.ended(mode, state, counted, has_port.then_some((pool, port)));
        true
    }

    /// Ends a flow that is over by its whole entry, or refreshes what is known of it.
    #[inline(never)]
    fn visit_entry(&mut self, &Due { index, hashes, .. }: &Due, route_epoch: u32, by: &mut impl SweepRules<A>) {
        let flow = self.get(FlowIndex(index));
        let is_shadow = self.storage.replicator.as_ref().is_some_and(|replicator| !replicator.own(&flow));
        if by.is_over(&flow, is_shadow) {
            self.storage.record_end(index, by.why(flow.backend), self.now);
            if let Some(replicator) = &mut self.storage.replicator {
                replicator.ended(index, &flow, hashes[Direction::ToClient as usize], self.now);
            }
            self.take_out_flow(index, &flow, hashes);
            let port = flow.snat_lease().map(|lease| (lease.pool, lease.port));
            by.ended(flow.mode, flow.state, flow.counter_slot(), port);
        } else {
            self.storage.record_part(index, &flow, self.now);
            if let Some(replicator) = &mut self.storage.replicator {
                replicator.visit(index, &flow, by.refresh(&flow), self.now);
            }
            self.storage.forget_route(index, &flow, route_epoch);
        }
    }
}

/// A flow that a sweep found.
struct Due {
    index: u32,
    hashes: [u64; 2],
    /// Its slots in the index, once they were looked up.
    slots: [IndexSlot; 2],
    /// It ends. Otherwise only its whole entry shows whether it does.
    is_over: bool,
}

/// What the hot words of a flow show of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It does not end, and needs nothing else from the sweep.
    Stays,
    /// It ends.
    Over,
    /// Only its whole entry shows it.
    Unknown,
}

/// Which flows a sweep ends.
pub(crate) trait SweepRules<A: Address> {
    /// Whether a flow in a handshake ends, by its hot words.
    fn fate_of_handshake(&self, flow: &HotFlow<A::Key>, state: FlowState) -> Fate;
    /// Whether a flow ends; `is_shadow`: another gateway owns it.
    fn is_over(&mut self, flow: &Flow<A>, is_shadow: bool) -> bool;
    /// How often a flow that carries packets is sent to partners; `None`: never. Asked only where flows are replicated.
    fn refresh(&self, flow: &Flow<A>) -> Option<Ticks>;
    /// Why a flow of this backend ends.
    fn why(&self, backend: BackendId) -> FlowEnd;
    /// A flow of this mode and state, which was counted there and held this SNAT port, has ended.
    fn ended(&mut self, mode: FlowMode, state: FlowState, counted: CounterSlot, port: Option<(PoolId, u16)>);
}

/// A callback as rules.
struct Callback<F>(F);

impl<A: Address, F: FnMut(&Flow<A>) -> bool> SweepRules<A> for Callback<F> {
    fn fate_of_handshake(&self, _: &HotFlow<A::Key>, _: FlowState) -> Fate {
        Fate::Unknown
    }

    fn is_over(&mut self, flow: &Flow<A>, _: bool) -> bool {
        self.0(flow)
    }

    fn refresh(&self, _: &Flow<A>) -> Option<Ticks> {
        None
    }

    fn why(&self, _: BackendId) -> FlowEnd {
        FlowEnd::Idle
    }

    fn ended(&mut self, _: FlowMode, _: FlowState, _: CounterSlot, _: Option<(PoolId, u16)>) {}
}
