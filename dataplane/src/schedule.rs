//! How a frontend chooses among its backends for a new flow (FORWARDING 1.4).
//!
//! Those that go by a hash agree on all workers and gateways. The others keep what they know in the frontend, each worker
//! its own part, made by the compiler: a choice allocates nothing. All are deterministic. Deliberately not here: which
//! backends take new flows at all (the others have weight 0), and source ranges.

mod loads;
mod robin;
mod rounds;

use std::sync::Arc;

use proto::Scheduler;

use crate::flow::BackendId;
use crate::tick::Tick;
use crate::{Address, Tuple, TupleHash, WorkerCounters};
use loads::{Loads, Measure};
use robin::Robin;
pub(crate) use rounds::turns;

/// Who chooses, and when: what a choice needs besides the frontend and the packet.
#[derive(Clone, Copy, Debug)]
pub struct Chooser {
    /// The worker: schedulers that count or take turns do so for each worker.
    pub worker: usize,
    /// Now.
    pub now: Tick,
}

/// What of a packet is hashed where its backend follows from a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HashedBy {
    /// All of the tuple.
    Tuple,
    /// The client's address, whatever its port.
    Source,
    /// The frontend's address.
    Destination,
}

impl HashedBy {
    /// What a scheduler goes by; with affinity the client's address, whatever the scheduler (FORWARDING 10).
    pub(crate) const fn of(scheduler: Scheduler, affinity: bool) -> Self {
        match scheduler {
            _ if affinity => Self::Source,
            Scheduler::SourceHash => Self::Source,
            Scheduler::DestinationHash => Self::Destination,
            _ => Self::Tuple,
        }
    }

    #[inline]
    pub(crate) fn hash<A: Address>(self, hash: &TupleHash, tuple: &Tuple<A>) -> u64 {
        match self {
            Self::Tuple => hash.hash(tuple),
            Self::Source => hash.hash(&Tuple { source: tuple.source, ..Tuple::default() }),
            Self::Destination => hash.hash(&Tuple { destination: tuple.destination, ..Tuple::default() }),
        }
    }
}

/// How a frontend chooses.
#[derive(Debug)]
pub(crate) enum Schedule {
    /// By the Maglev table.
    Hash,
    /// In turn.
    Turns(Robin),
    /// By load.
    Loads(Loads),
}

impl Schedule {
    /// What this scheduler needs for these backends and weights. `before` is the frontend's until now.
    pub(crate) fn new(
        scheduler: Scheduler,
        backends: &[(BackendId, u16)],
        counters: &Arc<[Arc<WorkerCounters>]>,
        before: Option<&Self>,
    ) -> Self {
        if let Some(measure) = Measure::of(scheduler) {
            return Self::Loads(Loads::new(measure, backends, counters));
        }
        if scheduler != Scheduler::RoundRobin {
            return Self::Hash;
        }
        let weights: Vec<u16> = backends.iter().map(|&(_, weight)| weight).collect();
        let before = match before {
            Some(Self::Turns(robin)) => Some(robin),
            _ => None,
        };
        Self::Turns(Robin::new(&weights, counters.len().max(1), before))
    }
}
