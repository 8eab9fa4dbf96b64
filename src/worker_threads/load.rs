//! The load of a worker: its polls, packets and cycles since its start, and whether it is stalled.
//!
//! Not here: who finds a worker stalled (`heartbeat`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Number of sizes by which polls are counted: up to 1, 2, 4, ... 128 packets, and more.
pub const BURST_SIZES: usize = 9;

/// Counters of a worker since its start, and whether it is stalled. Counters have one writer, so plain stores suffice;
/// a reader may see counters of different polls.
#[derive(Debug, Default)]
pub struct Load {
    polls: AtomicU64,
    busy_polls: AtomicU64,
    packets: AtomicU64,
    cycles: AtomicU64,
    busy_cycles: AtomicU64,
    bursts: [AtomicU64; BURST_SIZES],
    /// Written by the observer of heartbeats, and only when it changes.
    stalled: AtomicBool,
}

/// A reading of [`Load`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReading {
    /// Polls.
    pub polls: u64,
    /// Polls that handled a packet.
    pub busy_polls: u64,
    /// Packets handled.
    pub packets: u64,
    /// Cycles of the time stamp counter, sleep included.
    pub cycles: u64,
    /// Cycles in polls that handled a packet.
    pub busy_cycles: u64,
    /// Polls by number of packets: 1, 2, 3 to 4, 5 to 8 and so on; the last one has all larger ones.
    pub bursts: [u64; BURST_SIZES],
}

impl Load {
    /// The current counters.
    #[must_use]
    pub fn read(&self) -> LoadReading {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LoadReading {
            polls: get(&self.polls),
            busy_polls: get(&self.busy_polls),
            packets: get(&self.packets),
            cycles: get(&self.cycles),
            busy_cycles: get(&self.busy_cycles),
            bursts: self.bursts.each_ref().map(get),
        }
    }

    /// Whether the worker does not poll.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    pub(super) fn mark_stalled(&self, is_stalled: bool) {
        self.stalled.store(is_stalled, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn count(&self, packets: usize, cycles: u64) {
        add(&self.polls, 1);
        add(&self.cycles, cycles);
        if packets > 0 {
            add(&self.busy_polls, 1);
            add(&self.packets, packets as u64);
            add(&self.busy_cycles, cycles);
            // The logarithm, rounded up.
            let size = (usize::BITS - (packets - 1).leading_zeros()) as usize;
            add(&self.bursts[size.min(BURST_SIZES - 1)], 1);
        }
    }

    pub(super) fn rested(&self, cycles: u64) {
        add(&self.cycles, cycles);
    }
}

/// Adds to the counters; only for the one writer.
#[inline]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

impl LoadReading {
    /// The difference to an earlier reading.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        Self {
            polls: self.polls.saturating_sub(earlier.polls),
            busy_polls: self.busy_polls.saturating_sub(earlier.busy_polls),
            packets: self.packets.saturating_sub(earlier.packets),
            cycles: self.cycles.saturating_sub(earlier.cycles),
            busy_cycles: self.busy_cycles.saturating_sub(earlier.busy_cycles),
            bursts: std::array::from_fn(|size| self.bursts[size].saturating_sub(earlier.bursts[size])),
        }
    }

    /// Share of the time spent on packets, 0 to 1.
    #[must_use]
    pub fn busy_ratio(self) -> f64 {
        if self.cycles == 0 { 0.0 } else { self.busy_cycles as f64 / self.cycles as f64 }
    }

    /// Cycles per packet; `None` without packets.
    #[must_use]
    pub fn cycles_per_packet(self) -> Option<f64> {
        (self.packets > 0).then(|| self.busy_cycles as f64 / self.packets as f64)
    }
}
