//! Replication of flows between gateways: the queues between a worker and the agent.
//!
//! A gateway owns the flows whose VIP group it owns (of mode `nat`: the group of the SNAT address). It tells its partners
//! which of them last; partners keep them as *shadow flows* in their own tables, so that they forward from the first
//! packet after a takeover. No flow is marked as shadow: who owns the group decides at any time which side tells and which
//! side listens (docs/internals/decisions/0059-replicated-flows.md).
//!
//! **Invariant:** a full queue costs replicas, which are counted, never packets.
//!
//! Not here: which flows a worker tells (`forward::worker`), formats and partners (the agent).

use std::net::SocketAddr;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

use crate::flow::state::{FlowMode, FlowState};
use crate::stats::Counter;

/// A flow as gateways tell each other about it. Which backend of which Service it has follows from `frontend`, `protocol`
/// and `backend`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowReplica {
    /// Transport protocol number.
    pub protocol: u8,
    /// Mode of the flow.
    pub mode: FlowMode,
    /// State of the flow.
    pub state: FlowState,
    /// The client.
    pub client: SocketAddr,
    /// The frontend.
    pub frontend: SocketAddr,
    /// The backend's address and port as packets to it have them; in one-way modes the port is 0.
    pub backend: SocketAddr,
    /// The gateway's source towards the backend, in mode `nat`.
    pub snat: Option<SocketAddr>,
    /// Time since its last packet.
    pub idle: Duration,
}

/// News of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaEvent {
    /// It lasts, as it is described here.
    Holds(FlowReplica),
    /// It has ended.
    Ended(FlowReplica),
}

/// The queues between one worker and the agent. A copy of all flows that last is a listing by inquiries
/// (`forward::decide::inquiry`), not part of this.
#[derive(Debug)]
pub struct FlowReplication {
    after: Duration,
    outgoing: ArrayQueue<ReplicaEvent>,
    incoming: ArrayQueue<ReplicaEvent>,
    told: Counter,
    dropped: Counter,
    applied: Counter,
    refused: Counter,
    shadows: Counter,
}

impl FlowReplication {
    /// Queues with room for this many events in each direction. A flow is told once it is confirmed and older than
    /// `after`.
    #[must_use]
    pub fn new(events: usize, after: Duration) -> Self {
        Self {
            after,
            outgoing: ArrayQueue::new(events.max(1)),
            incoming: ArrayQueue::new(events.max(1)),
            told: Counter::default(),
            dropped: Counter::default(),
            applied: Counter::default(),
            refused: Counter::default(),
            shadows: Counter::default(),
        }
    }

    /// How old a flow must be before it is told.
    #[must_use]
    pub const fn after(&self) -> Duration {
        self.after
    }

    /// The oldest news of own flows, for the agent.
    #[must_use]
    pub fn take(&self) -> Option<ReplicaEvent> {
        self.outgoing.pop()
    }

    /// Gives the worker news of a partner's flow; false when there is no room. The worker applies a bounded number of
    /// events a poll, and leaves out flows of other workers: the agent gives each event to every worker.
    pub fn give(&self, event: ReplicaEvent) -> bool {
        self.incoming.push(event).is_ok()
    }

    /// Number of events that the worker told.
    #[must_use]
    pub const fn told(&self) -> &Counter {
        &self.told
    }

    /// Number of events that the worker could not tell for want of room.
    #[must_use]
    pub const fn dropped(&self) -> &Counter {
        &self.dropped
    }

    /// Number of events of partners that the worker applied.
    #[must_use]
    pub const fn applied(&self) -> &Counter {
        &self.applied
    }

    /// Number of events of partners that it could not apply: the backend is unknown, the table is full, or the flow is
    /// this gateway's own.
    #[must_use]
    pub const fn refused(&self) -> &Counter {
        &self.refused
    }

    /// Present number of shadow flows, as the sweep counted them last.
    #[must_use]
    pub const fn shadows(&self) -> &Counter {
        &self.shadows
    }
}
