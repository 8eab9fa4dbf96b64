//! Heartbeats of workers: a worker whose polls do not advance is stalled.
//!
//! Invariant: a pause of the whole program or machine stalls no worker, because observations are counted, not time.
//! An idle worker polls too: it sleeps for 20 ms at most ([`Sleep::LONGEST`](super::Sleep::LONGEST)).
//! Not here: what follows from a stall (`commands::run::watchdog`).

use std::sync::Arc;
use std::time::Duration;

use super::load::Load;

/// The longest time between two observations.
pub const OBSERVATION_INTERVAL: Duration = Duration::from_millis(500);
/// Observations without a poll after which a worker counts as stalled: 2 s, the time of 100 sleeps.
const STALLED_AFTER: u32 = 4;

/// The heartbeats of all workers.
#[derive(Debug)]
pub struct Heartbeats {
    workers: Vec<Pulse>,
}

#[derive(Debug)]
struct Pulse {
    load: Arc<Load>,
    polls: u64,
    /// Observations since the last poll.
    silent: u32,
}

/// A worker has stalled, or polls again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StallChange {
    /// The worker.
    pub worker: usize,
    /// Whether it is stalled now.
    pub is_stalled: bool,
}

impl Heartbeats {
    /// Of workers in their order.
    #[must_use]
    pub fn new(loads: Vec<Arc<Load>>) -> Self {
        Self { workers: loads.into_iter().map(|load| Pulse { polls: load.read().polls, load, silent: 0 }).collect() }
    }

    /// Observes every worker, marks its load, and returns what has changed.
    pub fn observe(&mut self) -> Vec<StallChange> {
        let mut changes = Vec::new();
        for (worker, pulse) in self.workers.iter_mut().enumerate() {
            let polls = pulse.load.read().polls;
            pulse.silent = if polls == pulse.polls { pulse.silent.saturating_add(1) } else { 0 };
            pulse.polls = polls;
            let is_stalled = pulse.silent >= STALLED_AFTER;
            if is_stalled != pulse.load.is_stalled() {
                pulse.load.mark_stalled(is_stalled);
                changes.push(StallChange { worker, is_stalled });
            }
        }
        changes
    }

    /// Whether every worker polls.
    #[must_use]
    pub fn all_poll(&self) -> bool {
        self.workers.iter().all(|pulse| !pulse.load.is_stalled())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_without_polls_is_stalled_until_it_polls_again_and_others_are_not() {
        let loads: Vec<_> = (0..2).map(|_| Arc::new(Load::default())).collect();
        let mut heartbeats = Heartbeats::new(loads.clone());
        for _ in 1..STALLED_AFTER {
            loads[0].count(0, 1);
            assert_eq!((heartbeats.observe(), heartbeats.all_poll()), (vec![], true));
        }
        loads[0].count(1, 1);
        assert_eq!(heartbeats.observe(), [StallChange { worker: 1, is_stalled: true }]);
        assert!(!heartbeats.all_poll() && loads[1].is_stalled() && !loads[0].is_stalled());
        loads[0].count(1, 1);
        assert_eq!((heartbeats.observe(), heartbeats.all_poll()), (vec![], false), "it is reported once");
        loads.iter().for_each(|load| load.count(0, 1));
        assert_eq!(heartbeats.observe(), [StallChange { worker: 1, is_stalled: false }]);
        assert!(heartbeats.all_poll());
    }
}
