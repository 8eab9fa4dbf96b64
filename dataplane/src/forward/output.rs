//! The ends of packets: sent, handed over, answered, or dropped. Each is counted and shown to the observer once.
//!
//! **Invariant:** every packet that enters leaves by exactly one counted verdict.
//!
//! Not here: which end a packet comes to (`decide`), the bytes that it leaves with (`rewrite`), packets that the fast path
//! sends, and those for the kernel (`execution::linux`).

use std::sync::Arc;

use super::decide::WorkerFlows;
use super::flow_transfer::{Owned, ReceivingFlows};
use super::observer::{Observe, PacketOutcome, Watching};
use crate::neighbours::Permission;
use crate::port::{Arrival, Port, PortIndex, TwinRate};
use crate::snapshot::{Exit, Snapshot};
use crate::stats::{DropReason, Tally, WorkerCounters};
use crate::wire::{Address, Headers, Tags};
use crate::workers::{Egress, HandoverTask, WorkerId};

/// The outputs of a worker, with its counters.
pub(super) struct Output<P: Port, O> {
    /// Index of the worker within the gateway, from 0.
    pub(super) worker: usize,
    pub(super) egress: Egress<P>,
    /// The rate of packets to the kernel.
    pub(super) twin_rate: TwinRate,
    pub(super) tally: Tally,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) observer: O,
    /// The watch, while somebody watches.
    pub(super) watching: Option<Watching>,
}

impl<P: Port, O> Output<P, O> {
    /// The packets that this worker owns.
    pub(super) fn owned(&self) -> Owned<'_> {
        self.egress.peers.as_ref().map(|peers| (peers.owner_function(), peers.me()))
    }

    /// The flows of this worker, which receives others.
    pub(super) fn receiving<'e>(&'e self, flows: &'e mut WorkerFlows) -> ReceivingFlows<'e> {
        ReceivingFlows { flows, counters: &self.counters, owned: self.owned() }
    }
}

impl<P: Port, O: Observe<P::Buffer>> Output<P, O> {
    /// Sends a packet, with tags.
    pub(super) fn send_tagged(&mut self, port: PortIndex, tags: Tags, buffer: P::Buffer) {
        self.egress.send_tagged(port, tags, buffer, &mut self.tally);
    }

    /// Sends a packet that did not arrive: its cause is the end of another, or it is a piece of one.
    pub(super) fn originate(&mut self, port: PortIndex, tags: Tags, buffer: P::Buffer) {
        self.tally.originated += 1;
        self.send_tagged(port, tags, buffer);
    }

    /// Sends a packet that `write` writes into an empty buffer, by an exit. Returns false when there is no buffer, or
    /// nothing was written.
    pub(super) fn originate_by(&mut self, exit: &Exit, write: impl FnOnce(&mut P::Buffer) -> bool) -> bool {
        let Some(mut buffer) = self.egress.allocate(exit.port) else { return false };
        if !write(&mut buffer) {
            self.egress.discard(buffer);
            return false;
        }
        self.originate(exit.port, exit.link.tags(), buffer);
        true
    }

    /// Hands a packet to another worker.
    pub(super) fn hand_over(&mut self, worker: WorkerId, task: HandoverTask, arrival: Arrival, buffer: P::Buffer) {
        self.egress.hand_over(worker, task, arrival, buffer, &mut self.tally);
    }

    /// Sends an answer, which a packet became.
    pub(super) fn answer(&mut self, port: PortIndex, tags: Tags, permission: Permission, buffer: P::Buffer) {
        self.observer.observe(&buffer, PacketOutcome::Reply(port), || None);
        self.tally.replies += 1;
        permission.send(&mut self.egress, port, tags, buffer, &mut self.tally);
    }

    /// Drops a packet and counts the reason.
    pub(super) fn drop(&mut self, buffer: P::Buffer, reason: DropReason) {
        self.count_drop(&buffer, reason);
        self.egress.discard(buffer);
    }

    /// Drops a packet and counts the reason, also for the service that it was sent to, if any.
    pub(super) fn drop_of_service<A: Address>(
        &mut self,
        snapshot: &Snapshot,
        buffer: P::Buffer,
        headers: &Headers<A>,
        reason: DropReason,
    ) {
        self.count_service_drop(snapshot, headers, reason);
        self.drop(buffer, reason);
    }

    /// Counts a dropped packet, whose buffer has another use.
    pub(super) fn count_drop(&mut self, buffer: &P::Buffer, reason: DropReason) {
        self.observer.observe(buffer, PacketOutcome::Drop(reason), || None);
        if let Some(watching) = &self.watching {
            watching.dropped(reason, buffer);
        }
        self.tally.drop(reason);
    }

    /// Counts a dropped packet for the service that it was sent to, if any.
    pub(super) fn count_service_drop<A: Address>(&self, snapshot: &Snapshot, headers: &Headers<A>, reason: DropReason) {
        let tuple = &headers.tuple;
        if let Some(frontend) = snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port) {
            frontend.drops.count(self.worker, reason);
            if reason == DropReason::SnatShare {
                frontend.drops.note_client(self.worker, tuple.source.site(), A::FAMILY == proto::Family::V6);
            }
        }
    }
}
