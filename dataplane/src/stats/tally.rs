//! Counts of a worker within one poll, in plain integers; they are added to its shared counters at the end of the poll.
//!
//! **Invariant:** every count reaches the shared counters exactly once.
//!
//! Not here: counts per backend, which go to the shared counters at once.

use super::counters::WorkerCounters;
use super::drop_reason::{ByReason, DropReason};

/// Counts since the last [`Tally::publish`].
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) received: u64,
    pub(crate) handed_in: u64,
    pub(crate) handed_out: u64,
    pub(crate) originated: u64,
    pub(crate) transmitted: u64,
    pub(crate) replies: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) new_flows: u64,
    pub(crate) reused_early: u64,
    pub(crate) reclaimed: u64,
    pub(crate) ended_on_request: u64,
    dropped: bool,
    drops: ByReason<u64>,
}

impl Tally {
    pub(crate) fn drop(&mut self, reason: DropReason) {
        self.drop_many(reason, 1);
    }

    pub(crate) fn drop_many(&mut self, reason: DropReason, packets: u64) {
        self.dropped = true;
        *self.drops.of_mut(reason) += packets;
    }

    /// The first reason by which more packets were dropped than at an earlier look, since the last publication.
    pub(crate) fn dropped_since(&self, before: &Self) -> Option<DropReason> {
        let counts = self.drops.all().iter().zip(before.drops.all()).zip(DropReason::ALL);
        counts.into_iter().find_map(|((now, then), reason)| (now > then).then_some(*reason))
    }

    /// Adds all counts to the shared counters and resets them.
    pub(crate) fn publish(&mut self, counters: &WorkerCounters) {
        let sums = [
            (&counters.received, self.received),
            (&counters.handed_in, self.handed_in),
            (&counters.handed_out, self.handed_out),
            (&counters.originated, self.originated),
            (&counters.transmitted, self.transmitted),
            (&counters.replies, self.replies),
            (&counters.hits, self.hits),
            (&counters.misses, self.misses),
            (&counters.new_flows, self.new_flows),
            (&counters.snat_port_reused_early, self.reused_early),
            (&counters.reclaimed, self.reclaimed),
            (&counters.ended_on_request, self.ended_on_request),
        ];
        for (counter, n) in sums {
            if n != 0 {
                counter.add(n);
            }
        }
        if self.dropped {
            for (reason, n) in DropReason::ALL.iter().zip(self.drops.all()) {
                counters.drops(*reason).add(*n);
            }
        }
        *self = Self::default();
    }
}
