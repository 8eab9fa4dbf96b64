//! The traffic of one frontend of a Service, over its backends and all workers.
//!
//! Workers count by backend and frontend. A frontend remembers its backends, and the counts of backends that are gone,
//! so that its totals do not fall when a backend goes.
//!
//! **Invariants:** a frontend begins at 0, whatever its slots counted before. Of two frontends with one number at most
//! one has the same backend.
//!
//! Not here: the counters of workers (`counters`), and which number a frontend has (`compiler`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::counter_slot::{CounterSlot, FrontendNumber};
use super::counters::{BackendCounters, WorkerCounters, not_negative};

/// The counts of a frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrontendTotals {
    /// Packets towards backends.
    pub packets_to_backends: u64,
    /// Packets towards clients.
    pub packets_to_clients: u64,
    /// Bytes of the packets towards backends, from their network headers on.
    pub bytes_to_backends: u64,
    /// Bytes of the packets towards clients.
    pub bytes_to_clients: u64,
    /// Present flows.
    pub flows: u64,
    /// Flows ever created.
    pub new_flows: u64,
    /// Two-way connections (TCP, SCTP) whose time ended before both sides had confirmed them.
    pub failed: u64,
    /// Confirmed TCP connections that a RST ended.
    pub reset: u64,
}

impl FrontendTotals {
    fn of(counters: &BackendCounters) -> Self {
        Self {
            packets_to_backends: counters.packets(false),
            packets_to_clients: counters.packets(true),
            bytes_to_backends: counters.bytes(false),
            bytes_to_clients: counters.bytes(true),
            flows: counters.flows.get(),
            new_flows: counters.new_flows.get(),
            failed: counters.failed.get(),
            reset: counters.reset.get(),
        }
    }

    /// The counts of both, combined by `of`.
    fn with(&self, other: &Self, of: fn(u64, u64) -> u64) -> Self {
        Self {
            packets_to_backends: of(self.packets_to_backends, other.packets_to_backends),
            packets_to_clients: of(self.packets_to_clients, other.packets_to_clients),
            bytes_to_backends: of(self.bytes_to_backends, other.bytes_to_backends),
            bytes_to_clients: of(self.bytes_to_clients, other.bytes_to_clients),
            flows: of(self.flows, other.flows),
            new_flows: of(self.new_flows, other.new_flows),
            failed: of(self.failed, other.failed),
            reset: of(self.reset, other.reset),
        }
    }
}

/// The backends of a frontend.
#[derive(Debug, Default)]
struct Members {
    /// Their slots, sorted.
    slots: Vec<u32>,
    /// The counts of backends that are gone, less the counts of their slots before: to be added modulo 2^64.
    others: FrontendTotals,
}

/// The traffic of one frontend.
#[derive(Debug)]
pub struct FrontendCounters {
    number: FrontendNumber,
    /// Written by the compiler, read by whoever shows the totals; no worker needs it.
    members: Mutex<Members>,
}

impl FrontendCounters {
    /// A frontend without backends.
    #[must_use]
    pub fn new(number: FrontendNumber) -> Self {
        Self { number, members: Mutex::default() }
    }

    /// The number by which its flows are counted.
    #[must_use]
    pub const fn number(&self) -> FrontendNumber {
        self.number
    }

    /// Adds backends by their slots. Backends that it has already stay as they are.
    pub fn join(&self, slots: impl IntoIterator<Item = u32>, workers: &[Arc<WorkerCounters>]) {
        let mut members = self.members();
        for slot in slots {
            if let Err(index) = members.slots.binary_search(&slot) {
                workers.iter().for_each(|worker| worker.prepare(slot, self.number));
                let before = FrontendTotals { flows: 0, ..self.counted(slot, workers) };
                members.others = members.others.with(&before, u64::wrapping_sub);
                members.slots.insert(index, slot);
            }
        }
    }

    /// Removes a backend whose slot is free. Its counts stay in the totals.
    pub(crate) fn leave(&self, slot: u32, workers: &[Arc<WorkerCounters>]) {
        let mut members = self.members();
        if let Ok(index) = members.slots.binary_search(&slot) {
            let counted = FrontendTotals { flows: 0, ..self.counted(slot, workers) };
            members.others = members.others.with(&counted, u64::wrapping_add);
            members.slots.remove(index);
        }
    }

    /// The slots of its backends.
    pub(crate) fn slots(&self) -> Vec<u32> {
        self.members().slots.clone()
    }

    /// How many of these backends it has.
    pub(crate) fn shared(&self, slots: &[u32]) -> usize {
        let members = self.members();
        slots.iter().filter(|slot| members.slots.binary_search(slot).is_ok()).count()
    }

    /// The backends among these that it does not have.
    pub(crate) fn missing(&self, slots: &[u32]) -> Vec<u32> {
        let members = self.members();
        slots.iter().copied().filter(|slot| members.slots.binary_search(slot).is_err()).collect()
    }

    /// Its counts since it was added.
    #[must_use]
    pub fn totals(&self, workers: &[Arc<WorkerCounters>]) -> FrontendTotals {
        let members = self.members();
        let counts = members.slots.iter().map(|slot| self.counted(*slot, workers));
        let totals = counts.fold(members.others, |sum, counts| sum.with(&counts, u64::wrapping_add));
        FrontendTotals { flows: not_negative(totals.flows), ..totals }
    }

    fn counted(&self, slot: u32, workers: &[Arc<WorkerCounters>]) -> FrontendTotals {
        let counts = workers.iter().map(|worker| FrontendTotals::of(worker.at(CounterSlot::new(slot, self.number))));
        counts.fold(FrontendTotals::default(), |sum, counts| sum.with(&counts, u64::wrapping_add))
    }

    /// A panic in between leaves at worst one backend uncounted.
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counters are equal only to themselves.
impl PartialEq for FrontendCounters {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for FrontendCounters {}

#[cfg(test)]
mod tests {
    use super::*;

    fn packets(frontend: &FrontendCounters, workers: &[Arc<WorkerCounters>]) -> u64 {
        frontend.totals(workers).packets_to_backends
    }

    #[test]
    fn totals_begin_at_0_and_do_not_fall_when_a_backend_goes() {
        let workers = [(); 2].map(|()| Arc::new(WorkerCounters::default()));
        let number = FrontendNumber::new(3);
        let [frontend, other] = [number, FrontendNumber::new(4)].map(FrontendCounters::new);
        let send = |worker: usize, slot| workers[worker].forwarded(CounterSlot::new(slot, number), false, 100);
        send(0, 9);
        frontend.join([9, 5], &workers);
        other.join([9, 5], &workers);
        assert_eq!(frontend.totals(&workers), FrontendTotals::default(), "the slot counted for another backend");
        (0..4).for_each(|_| send(0, 9));
        (0..3).for_each(|_| send(1, 5));
        frontend.join([5, 9], &workers);
        assert_eq!((packets(&frontend, &workers), packets(&other, &workers)), (7, 0));
        workers[0].at(CounterSlot::new(9, number)).flows.add(2);
        assert_eq!(frontend.totals(&workers).flows, 2);
        frontend.leave(9, &workers);
        send(0, 9);
        assert_eq!((packets(&frontend, &workers), frontend.totals(&workers).flows), (7, 0), "the slot is another's now");
        frontend.join([9], &workers);
        send(0, 9);
        let totals = frontend.totals(&workers);
        assert_eq!((totals.packets_to_backends, totals.bytes_to_backends, totals.packets_to_clients), (8, 800, 0));
    }
}
