//! The state of a worker, in parts: flows, outputs, neighbours, datagrams, limits of answers, what the fast path keeps. The
//! stages are functions over the engine, or over the part that they need.
//!
//! Not here: the stages (`fast`, `burst`, `execution`, `related`), and what becomes of a packet that leaves (`output`).

use super::decide::WorkerFlows;
use super::fast::state::FastPath;
use super::observer::WorkerCapture;
use super::output::Output;
use crate::fragment::{Datagrams, Identifications};
use crate::icmp::AnswerLimiter;
use crate::neighbours::WorkerNeighbours;
use crate::port::Port;

/// The state of a worker.
pub(super) struct Engine<P: Port, O> {
    pub(super) output: Output<P, O>,
    pub(super) flows: WorkerFlows,
    pub(super) neighbours: WorkerNeighbours<P::Buffer>,
    pub(super) datagrams: Datagrams<P::Buffer>,
    pub(super) identifications: Identifications,
    pub(super) limiter: AnswerLimiter,
    pub(super) fast: FastPath,
    /// The capture that runs, if any.
    pub(super) capture: Option<Box<WorkerCapture>>,
    /// Whether there is a capture or a watch.
    pub(super) is_looked_at: bool,
}

impl<P: Port, O> Engine<P, O> {
    /// Number of packets that wait: for a neighbour, or for the first fragment of their datagram.
    pub(super) fn held(&self) -> usize {
        self.neighbours.queue.len() + self.datagrams.waiting()
    }

    /// Publishes the counts of the poll.
    pub(super) fn publish_counters(&mut self) {
        let (held, Output { tally, counters, .. }) = (self.held(), &mut self.output);
        tally.publish(counters);
        counters.set_use(self.flows.len().into(), self.flows.ports.in_use().into(), held as u64);
    }
}
