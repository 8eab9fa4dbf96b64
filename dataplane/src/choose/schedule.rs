//! The schedulers: how a frontend chooses the backend of a new flow (FORWARDING 1.4).
//!
//! Hash-based schedulers give the same result on all workers and gateways. The others keep their state in the frontend,
//! separate for each worker and allocated by the compiler, so a choice allocates nothing. All schedulers are
//! deterministic.
//!
//! Not here: which backends take new flows (the others have weight 0), and source ranges.

use std::sync::Arc;

use proto::Scheduler;

use super::loads::{Loads, Measure};
use super::robin::Robin;
use crate::flow::{BackendId, Tick};
use crate::stats::{FrontendNumberSet, WorkerCounters};
use crate::wire::{Address, Tuple, TupleHash};

/// The worker and the time of a choice: its inputs besides the frontend and the packet.
#[derive(Clone, Copy, Debug)]
pub struct Chooser {
    /// Index of the worker. Schedulers that count flows or rotate do so per worker.
    pub worker: usize,
    /// Current time.
    pub now: Tick,
    /// Whether the choice is only asked for: neither the scheduler nor affinity remembers it.
    pub is_trial: bool,
}

/// The part of a packet that is hashed to find its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HashedBy {
    /// The whole tuple.
    Tuple,
    /// The client's address without its port.
    Source,
    /// The frontend's address.
    Destination,
}

impl HashedBy {
    /// The hashed part for a scheduler. With affinity it is always the client's address (FORWARDING 10).
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

/// The scheduler of a frontend with its state.
#[derive(Debug)]
pub(crate) enum Schedule {
    /// By the Maglev table.
    Hash,
    /// Weighted round robin.
    Turns(Robin),
    /// By the number of flows.
    Loads(Loads),
}

impl Schedule {
    /// The state of this scheduler for these backends and weights, whose flows are counted by these numbers. `before`
    /// is the state of the frontend's previous version.
    pub(crate) fn new(
        scheduler: Scheduler,
        backends: &[(BackendId, u16)],
        counters: &Arc<[Arc<WorkerCounters>]>,
        numbers: &Arc<FrontendNumberSet>,
        before: Option<&Self>,
    ) -> Self {
        if let Some(measure) = Measure::of(scheduler) {
            return Self::Loads(Loads::new(measure, backends, counters, numbers));
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
