//! Dropped packets of one service, by reason.
//!
//! **Invariant:** each worker writes only its own part, so that no two workers share a cache line.
//!
//! Not here: the counts over all services, which are those of a worker (`counters`).

use super::counters::Counter;
use super::drop_reason::{ByReason, DropReason};

/// Counts of one worker. Padded, so that no worker writes into another's cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct WorkerPart(ByReason<Counter>);

/// Drops of packets to the frontends of one service, by reason: 256 bytes per worker. They begin at 0 when the service
/// is added.
#[derive(Debug, Default)]
pub struct ServiceDrops(Box<[WorkerPart]>);

impl ServiceDrops {
    /// For this many workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self((0..workers).map(|_| WorkerPart::default()).collect())
    }

    /// Counts a packet that a worker dropped.
    pub(crate) fn count(&self, worker: usize, reason: DropReason) {
        if let Some(part) = self.0.get(worker) {
            part.0.of(reason).add(1);
        }
    }

    /// Drops for one reason, by all workers.
    #[must_use]
    pub fn sum(&self, reason: DropReason) -> u64 {
        self.0.iter().map(|part| part.0.of(reason).get()).sum()
    }
}

/// Counters are equal only to themselves.
impl PartialEq for ServiceDrops {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for ServiceDrops {}
