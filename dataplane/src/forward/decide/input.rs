//! The input of a decision: a packet, and the context with the flows that the decision may change.
//!
//! Not here: the results of a decision (`verdict`).

use super::verdict::Changes;
use crate::choose::Chooser;
use crate::flow::{Candidate, FlowEnd, FlowIndex, FlowTable, IdleLimits, SnatPorts, Tick};
use crate::forward::rewrite::Reset;
use crate::forward::rewrite::translate::Translated;
use crate::port::{Link, PortIndex};
use crate::snapshot::Snapshot;
use crate::stats::{CounterSlot, WorkerCounters};
use crate::wire::{Address, Headers, Parsed};

/// The flow table of the other family: both families share `maxPerWorker`.
#[derive(Debug)]
pub(crate) enum OtherFlows<'a> {
    /// IPv4.
    V4(&'a mut FlowTable<u32>),
    /// IPv6.
    V6(&'a mut FlowTable<u128>),
}

/// A packet as the decision sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet<'a, A> {
    /// Its headers.
    pub headers: &'a Headers<A>,
    /// [`FlowTable::hash`] of its tuple.
    pub hash: u64,
    /// [`FlowTable::candidate`] of that.
    pub candidate: Candidate,
    /// The link on which it arrived.
    pub in_link: Link,
}

/// What a decision depends on besides the packet: the snapshot, the time, the flows of one worker and family, and the
/// resources for new ones.
#[derive(Debug)]
pub(crate) struct DecisionContext<'a, 's, A: Address> {
    /// The snapshot.
    pub snapshot: &'s Snapshot,
    /// The time.
    pub now: Tick,
    /// The table.
    pub table: &'a mut FlowTable<A>,
    /// The flow table of the other family.
    pub others: OtherFlows<'a>,
    /// SNAT ports of both families.
    pub ports: &'a mut SnatPorts,
    /// The idle limits.
    pub limits: &'a IdleLimits,
    /// The counts of flows by which Services share the table; `None` in a trial, where no Service has a share.
    pub counters: Option<&'a WorkerCounters>,
    /// The changes that the decision made, for the counters.
    pub changes: &'a mut Changes,
    /// Number of flows that may still be created; both families share it.
    pub room: u32,
    /// Index of the worker that owns the flows.
    pub worker: usize,
    /// Whether the decision is only asked for (`explain`): nothing that workers share may change.
    pub is_trial: bool,
    /// Buffers for resets.
    pub reset_buffers: ResetBuffers<'a>,
}

/// Reserves a buffer for a reset that leaves by this port; false when there is none.
pub(crate) struct ResetBuffers<'a>(pub &'a mut dyn FnMut(PortIndex) -> bool);

impl std::fmt::Debug for ResetBuffers<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ResetBuffers")
    }
}

impl<A: Address> DecisionContext<'_, '_, A> {
    /// Queues a reset, if there is a buffer for it; otherwise it is not sent, and its receiver times out by itself. Returns
    /// whether it is queued.
    #[cold]
    pub(super) fn queue_reset(&mut self, reset: Reset) -> bool {
        let is_queued = !self.changes.resets.is_full() && (self.reset_buffers.0)(reset.exit.port);
        if is_queued {
            self.changes.resets.push(reset);
        }
        is_queued
    }

    /// What schedulers need to know.
    #[inline]
    pub(super) fn chooser(&self) -> Chooser {
        Chooser { worker: self.worker, now: self.now, is_trial: self.is_trial }
    }
}

/// Ends a flow and lets its SNAT port rest. Returns where it was counted.
pub(super) fn end<A: Address>(context: &mut DecisionContext<'_, '_, A>, index: FlowIndex, why: FlowEnd) -> CounterSlot {
    let flow = context.table.remove(index, why);
    if let Some(lease) = flow.snat_lease() {
        context.ports.release(lease.pool, lease.port, context.now);
    }
    context.room += 1;
    flow.counter_slot()
}

/// The flow tables of both families.
#[derive(Debug)]
pub(in crate::forward) struct FlowTables {
    pub(in crate::forward) v4: FlowTable<u32>,
    pub(in crate::forward) v6: FlowTable<u128>,
}

impl FlowTables {
    /// Sets the present.
    pub(in crate::forward) fn set_time(&mut self, now: Tick) {
        self.v4.set_time(now);
        self.v6.set_time(now);
    }

    /// Number of flows that other gateways own, as the last sweep counted them; 0 where flows are not replicated.
    pub(in crate::forward) fn shadows(&self) -> u32 {
        self.v4.shadows() + self.v6.shadows()
    }

    /// Sets the time of records, monotonic ns.
    pub(in crate::forward) fn set_recorder_time(&mut self, now_ns: u64) {
        self.v4.set_recorder_time(now_ns);
        self.v6.set_recorder_time(now_ns);
    }
}

/// The flows of a worker, and what they share.
#[derive(Debug)]
pub(in crate::forward) struct WorkerFlows {
    pub(in crate::forward) tables: FlowTables,
    /// SNAT ports of both families.
    pub(in crate::forward) ports: SnatPorts,
    /// Maximum number of flows of both families.
    pub(in crate::forward) max_flows: u32,
    pub(in crate::forward) limits: IdleLimits,
}

impl WorkerFlows {
    /// Number of flows.
    pub(in crate::forward) fn len(&self) -> u32 {
        self.tables.v4.len() + self.tables.v6.len()
    }

    /// Number of flows that may still be created.
    pub(in crate::forward) fn room(&self) -> u32 {
        self.max_flows.saturating_sub(self.len())
    }

    /// The flow table of a family.
    #[inline(always)]
    pub(in crate::forward) fn table<A: FlowFamily>(&mut self) -> &mut FlowTable<A> {
        A::split(&mut self.tables).0
    }

    /// The flow table of a family, and the idle limits.
    #[inline(always)]
    pub(in crate::forward) fn table_and_limits<A: FlowFamily>(&mut self) -> (&mut FlowTable<A>, &IdleLimits) {
        (A::split(&mut self.tables).0, &self.limits)
    }
}

/// A family with a flow table.
pub(in crate::forward) trait FlowFamily: Translated {
    /// The flow table of the family.
    fn table(tables: &FlowTables) -> &FlowTable<Self>;
    /// The flow table of the family, and that of the other.
    fn split(tables: &mut FlowTables) -> (&mut FlowTable<Self>, OtherFlows<'_>);
    /// The headers of a packet, if it is of this family.
    fn headers(packet: Parsed) -> Option<Headers<Self>>;
}

impl FlowFamily for u32 {
    fn table(tables: &FlowTables) -> &FlowTable<Self> {
        &tables.v4
    }

    #[inline(always)]
    fn split(tables: &mut FlowTables) -> (&mut FlowTable<u32>, OtherFlows<'_>) {
        (&mut tables.v4, OtherFlows::V6(&mut tables.v6))
    }

    fn headers(packet: Parsed) -> Option<Headers<Self>> {
        if let Parsed::V4(headers) = packet { Some(headers) } else { None }
    }
}

impl FlowFamily for u128 {
    fn table(tables: &FlowTables) -> &FlowTable<Self> {
        &tables.v6
    }

    #[inline(always)]
    fn split(tables: &mut FlowTables) -> (&mut FlowTable<u128>, OtherFlows<'_>) {
        (&mut tables.v6, OtherFlows::V4(&mut tables.v4))
    }

    fn headers(packet: Parsed) -> Option<Headers<Self>> {
        if let Parsed::V6(headers) = packet { Some(headers) } else { None }
    }
}
