//! How a frontend chooses among its backends for a new flow (FORWARDING 1.4).
//!
//! Those that go by a hash agree on all workers and gateways. Deliberately not here: which backends take new flows at
//! all (the compiler leaves the others out), and source ranges.

use proto::Scheduler;

use crate::tick::Tick;
use crate::{Address, Tuple, TupleHash};

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
    pub(crate) const fn of(scheduler: Scheduler) -> Self {
        match scheduler {
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
