//! The account of a run: every packet that was fed left, was dropped for a named reason, or is held; and was a hit or a
//! miss. Otherwise the figures would mean nothing.
//!
//! Not here: the contents of packets (`verify`).

use dataplane::{DropReason, WorkerCounters};

use super::error::BenchError;
use super::harness::Traffic;

/// Counters of a worker at a moment, or what they counted in a time.
#[derive(Clone, Debug, Default)]
pub(super) struct CounterReading {
    pub(super) received: u64,
    pub(super) hits: u64,
    pub(super) misses: u64,
    pub(super) new_flows: u64,
    drops: Vec<u64>,
}

impl CounterReading {
    /// Packets received, where there is no worker.
    pub(super) fn received(received: u64) -> Self {
        Self { received, ..Self::default() }
    }

    pub(super) fn of(counters: &WorkerCounters) -> Self {
        Self {
            received: counters.received.get(),
            hits: counters.hits.get(),
            misses: counters.misses.get(),
            new_flows: counters.new_flows.get(),
            drops: DropReason::ALL.iter().map(|reason| counters.drops(*reason).get()).collect(),
        }
    }

    /// Adds what was counted from one reading to another.
    pub(super) fn add(&mut self, from: &Self, to: &Self) {
        self.received += to.received - from.received;
        self.hits += to.hits - from.hits;
        self.misses += to.misses - from.misses;
        self.new_flows += to.new_flows - from.new_flows;
        self.drops.resize(to.drops.len(), 0);
        let before = from.drops.iter().copied().chain(std::iter::repeat(0));
        for (sum, (to, from)) in self.drops.iter_mut().zip(to.drops.iter().zip(before)) {
            *sum += to - from;
        }
    }

    /// Number of drops.
    pub(super) fn dropped(&self) -> u64 {
        self.drops.iter().sum()
    }

    /// Checks that nothing was dropped; otherwise the figures would include packets that cost nothing.
    pub(super) fn expect_no_drops(&self) -> Result<(), BenchError> {
        let named: Vec<String> = self.named().into_iter().map(|(reason, n)| format!("{n} as {reason}")).collect();
        if named.is_empty() { Ok(()) } else { Err(BenchError::Dropped(named.join(", "))) }
    }

    /// Drops by reason, if there were any.
    pub(super) fn named(&self) -> Vec<(String, u64)> {
        let drops = DropReason::ALL.iter().zip(&self.drops).filter(|(_, n)| **n > 0);
        drops.map(|(reason, n)| (reason.as_str().to_owned(), *n)).collect()
    }
}

/// What all workers counted and all harnesses saw, in the end.
#[derive(Clone, Debug, Default)]
pub(super) struct FinalAccount {
    pub(super) received: u64,
    originated: u64,
    pub(super) transmitted: u64,
    pub(super) dropped: u64,
    pub(super) held: u64,
    hits: u64,
    misses: u64,
    traffic: Vec<Traffic>,
}

impl FinalAccount {
    /// Adds a worker and its harness.
    ///
    /// # Errors
    /// The worker's own account does not close, or the two differ.
    pub(super) fn add(&mut self, counters: &WorkerCounters, traffic: Traffic) -> Result<(), BenchError> {
        let account = counters.account();
        if !account.closes() {
            return Err(BenchError::Account(format!("the account of a worker does not close: {account:?}")));
        }
        expect("packets that a worker received", account.received, "fed into its ports", traffic.fed)?;
        expect("packets that a worker transmitted", account.transmitted, "that left its ports", traffic.transmitted)?;
        self.received += account.received;
        self.originated += account.originated;
        self.transmitted += account.transmitted;
        self.dropped += account.dropped;
        self.held += account.held;
        self.hits += counters.hits.get();
        self.misses += counters.misses.get();
        self.traffic.push(traffic);
        Ok(())
    }

    /// Checks that every packet is accounted for.
    ///
    /// # Errors
    /// Which are not.
    pub(super) fn close(&self) -> Result<(), BenchError> {
        let ended = self.transmitted + self.dropped + self.held;
        expect("packets fed or made by the engine", self.received + self.originated, "transmitted, dropped or held", ended)?;
        expect("packets fed", self.received, "hits and misses", self.hits + self.misses)?;
        let buffers: Option<Vec<_>> = self.traffic.iter().map(|traffic| traffic.buffers).collect();
        let Some(buffers) = buffers else { return Ok(()) };
        let taken = self.received + buffers.iter().map(|buffers| buffers.allocated).sum::<u64>();
        let back = self.transmitted + buffers.iter().map(|buffers| buffers.released).sum::<u64>();
        expect("buffers that the engine got", taken, "given back or held", back + self.held)
    }
}

/// Compares two counts that must be equal.
pub(super) fn expect(what: &str, count: u64, other: &str, other_count: u64) -> Result<(), BenchError> {
    if count == other_count {
        return Ok(());
    }
    Err(BenchError::Account(format!("{what}: {count}; {other}: {other_count}")))
}

#[cfg(test)]
mod tests {
    use super::super::harness::Buffers;
    use super::*;

    #[test]
    fn a_packet_that_is_lost_or_counted_twice_is_noticed() {
        let counted = |received, transmitted, held| {
            let counters = WorkerCounters::default();
            counters.received.add(received);
            counters.hits.add(received);
            counters.transmitted.add(transmitted);
            counters.held.set(held);
            counters
        };
        let closes = |counters: &WorkerCounters, fed, transmitted, released| {
            let mut account = FinalAccount::default();
            let buffers = Some(Buffers { allocated: 0, released });
            account.add(counters, Traffic { fed, transmitted, buffers }).and_then(|()| account.close())
        };
        closes(&counted(5, 4, 1), 5, 4, 0).unwrap();
        assert!(closes(&counted(5, 4, 0), 5, 4, 0).is_err(), "the engine forgets one");
        assert!(closes(&counted(5, 5, 0), 6, 5, 0).is_err(), "one is fed and not received");
        assert!(closes(&counted(5, 5, 0), 5, 4, 0).is_err(), "one is transmitted and does not leave");
        assert!(closes(&counted(5, 5, 0), 5, 5, 1).is_err(), "one is given back twice");
        let counters = counted(5, 4, 0);
        counters.drops(DropReason::NoFlow).add(1);
        closes(&counters, 5, 4, 1).unwrap();
        assert!(closes(&counters, 5, 4, 0).is_err(), "the buffer of a dropped packet is lost");
        counters.misses.add(1);
        assert!(closes(&counters, 5, 4, 1).is_err(), "a packet is a hit and a miss");
    }
}
