//! Packets that arrive at a steady rate, whether or not the worker polls.
//!
//! **Invariant:** the latency of a packet is the time from its arrival, not from when the worker received it. So a poll
//! that takes long counts for every packet that arrives meanwhile.
//!
//! Not here: frames (`memory`), and which rates are measured (`measure::latency`).

use std::collections::VecDeque;

use super::super::scenario::Side;
use super::super::timing::Histogram;
use super::buffer::FrameBuffer;

/// Packets that wait on a side at most: the receive descriptors that DPDK's drivers have by default. Later ones are missed.
const QUEUE: usize = 1024;
/// Parts of a cycle in which arrivals are computed.
const PARTS: u64 = 256;

/// When packets arrive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// When the first one arrives, in cycles.
    pub(crate) from: u64,
    /// In this many cycles ...
    pub(crate) cycles: u64,
    /// ... this many packets arrive on all sides together; not zero.
    pub(crate) packets: u64,
}

/// What was measured of packets that arrived at a pace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Latencies {
    /// From the arrival of a packet until it was transmitted.
    pub(crate) times: Histogram,
    pub(crate) received: u64,
    /// Bursts received, not counting empty ones.
    pub(crate) bursts: u64,
    /// Packets that found a full queue.
    pub(crate) missed: u64,
}

impl Latencies {
    /// Adds those of another time.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.times.merge(&other.times);
        self.received += other.received;
        self.bursts += other.bursts;
        self.missed += other.missed;
    }
}

/// The packets that have arrived and wait, by side.
#[derive(Debug)]
pub(super) struct Arrivals {
    pace: Pace,
    /// Arrivals of the packets that wait, in cycles.
    queues: [VecDeque<u64>; 2],
    /// Arrival of the next packet, in parts of a cycle since the first.
    next: [u64; 2],
    pub(super) latencies: Latencies,
}

impl Arrivals {
    pub(super) fn new(pace: Pace) -> Self {
        let queues = [(); 2].map(|()| VecDeque::with_capacity(QUEUE));
        Self { pace, queues, next: [0; 2], latencies: Latencies::default() }
    }

    /// Lets arrive what has arrived by this cycle.
    pub(super) fn turn(&mut self, now: u64, sides: &[Side]) {
        let Some(passed) = now.checked_sub(self.pace.from).map(|cycles| cycles * PARTS) else { return };
        let gap = (self.pace.cycles * PARTS * sides.len() as u64 / self.pace.packets).max(1);
        for side in sides {
            let (queue, next) = (&mut self.queues[*side as usize], &mut self.next[*side as usize]);
            while *next <= passed && queue.len() < QUEUE {
                queue.push_back(self.pace.from + *next / PARTS);
                *next += gap;
            }
            if *next <= passed {
                let missed = (passed - *next) / gap + 1;
                *next += missed * gap;
                self.latencies.missed += missed;
            }
        }
    }

    /// Number of packets that wait on a side.
    pub(super) fn waiting(&self, side: Side) -> usize {
        self.queues[side as usize].len()
    }

    /// The worker received a burst of packets that waited.
    pub(super) fn receive(&mut self, side: Side, burst: &mut [FrameBuffer]) {
        let count = burst.len();
        self.latencies.received += count as u64;
        self.latencies.bursts += u64::from(count > 0);
        for (buffer, arrival) in burst.iter_mut().zip(self.queues[side as usize].drain(..count)) {
            buffer.set_arrival(arrival);
        }
    }

    /// The worker transmits a burst now.
    pub(super) fn transmit(&mut self, burst: &[FrameBuffer]) {
        let now = dpdk_sys::cycles();
        for arrival in burst.iter().filter_map(FrameBuffer::arrival) {
            self.latencies.times.count(now.saturating_sub(arrival));
        }
    }
}
