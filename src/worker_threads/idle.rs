//! The idle policy of an adaptive worker: a pure function of the polls before.
//!
//! Polls follow each other while packets arrive, and for [`YIELD_AFTER`] empty polls (about 10 microseconds) longer.
//! Then the worker yields between polls, and from [`SLEEP_AFTER`] on it sleeps. Before each sleep it arms what wakes it
//! and polls once more, so that nothing that arrived in between is slept over.
//!
//! **Invariant:** a worker that only ever wakes by time still polls often enough for the sweep of its flows to take no
//! longer than that of a busy worker.
//!
//! Not here: the sleep itself (`sleep`).

use std::time::Duration;

use dataplane::{SWEEP_TICKS, SWEPT_PER_POLL};

/// Number of empty polls after which a worker yields at each further one.
const YIELD_AFTER: u32 = 64;
/// Number of empty polls after which it sleeps.
pub(super) const SLEEP_AFTER: u32 = 128;
/// Time in which the sweep visits every flow once.
const SWEEP: Duration = Duration::from_nanos(SWEEP_TICKS.nanoseconds());

/// What to do after a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Poll again.
    Poll,
    /// Give the core to another thread that wants it, and poll again.
    Yield,
    /// Arm what wakes the worker, and poll again.
    Arm,
    /// Sleep, report it to [`Idle::slept`], and poll again.
    Sleep,
}

/// The state between polls.
#[derive(Debug)]
pub(super) struct Idle {
    /// Flows that the worker has at most.
    max_flows: u64,
    empty_polls: u32,
    /// Polls that the sweep wants before the next sleep.
    owed_polls: u64,
}

impl Idle {
    /// `max_flows` per family, as the sweep counts them.
    pub(super) fn new(max_flows: u32) -> Self {
        Self { max_flows: max_flows.into(), empty_polls: 0, owed_polls: 0 }
    }

    /// The step after a poll that handled this number of packets.
    #[inline]
    pub(super) fn after_poll(&mut self, packets: usize) -> Step {
        if packets > 0 {
            (self.empty_polls, self.owed_polls) = (0, 0);
            return Step::Poll;
        }
        if self.owed_polls > 0 {
            self.owed_polls -= 1;
            return Step::Poll;
        }
        self.empty_polls = self.empty_polls.saturating_add(1);
        match self.empty_polls {
            n if n < YIELD_AFTER => Step::Poll,
            n if n < SLEEP_AFTER => Step::Yield,
            SLEEP_AFTER => Step::Arm,
            _ => Step::Sleep,
        }
    }

    /// The worker has slept, for at most this long.
    pub(super) fn slept(&mut self, longest: Duration) {
        // An eighth more for the time that the kernel adds to the sleep, and that of the polls themselves.
        let due = u128::from(self.max_flows) * longest.as_nanos() * 9 / 8;
        let polls = due.div_ceil(SWEEP.as_nanos() * u128::from(SWEPT_PER_POLL));
        // The next empty poll arms, the one after that sleeps.
        self.empty_polls = SLEEP_AFTER - 1;
        self.owed_polls = u64::try_from(polls).unwrap_or(u64::MAX).saturating_sub(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker_threads::Sleep;

    const POLL_NS: u64 = 150;
    const YIELD_NS: u64 = 500;
    /// Both system calls, and two context switches.
    const SLEEP_COST_NS: u64 = 10_000;

    /// A worker under a simulated clock. Packets arrive at times of their own, and wake it if they can.
    struct Simulation {
        idle: Idle,
        now_ns: u64,
        busy_ns: u64,
        polls: u64,
        sleeps: u64,
        armed: bool,
        longest: Duration,
        packets_wake: bool,
    }

    impl Simulation {
        fn new(max_flows: u32, longest: Duration, packets_wake: bool) -> Self {
            let idle = Idle::new(max_flows);
            Self { idle, now_ns: 0, busy_ns: 0, polls: 0, sleeps: 0, armed: false, longest, packets_wake }
        }

        fn work(&mut self, ns: u64) {
            (self.now_ns, self.busy_ns) = (self.now_ns + ns, self.busy_ns + ns);
        }

        /// Runs until the end. Returns how long each packet waited.
        fn run(&mut self, arrivals_ns: &[u64], end_ns: u64) -> Vec<u64> {
            let mut delays = Vec::new();
            while self.now_ns < end_ns {
                let first = delays.len();
                delays.extend(arrivals_ns[first..].iter().take_while(|at| **at <= self.now_ns).map(|at| self.now_ns - at));
                self.work(POLL_NS);
                self.polls += 1;
                match self.idle.after_poll(delays.len() - first) {
                    Step::Poll => self.armed = false,
                    Step::Yield => self.work(YIELD_NS),
                    Step::Arm => self.armed = true,
                    Step::Sleep => {
                        assert!(std::mem::take(&mut self.armed), "it polls between arming and sleeping");
                        let end = self.now_ns + u64::try_from(self.longest.as_nanos()).unwrap();
                        let arrival = arrivals_ns.get(delays.len()).copied().filter(|_| self.packets_wake);
                        self.now_ns = arrival.map_or(end, |at| at.clamp(self.now_ns, end));
                        self.sleeps += 1;
                        self.work(SLEEP_COST_NS);
                        self.idle.slept(self.longest);
                    }
                }
            }
            delays
        }

        fn share(&self) -> f64 {
            self.busy_ns as f64 / self.now_ns as f64
        }
    }

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn an_idle_worker_that_packets_wake_takes_less_than_two_percent_with_any_number_of_flows() {
        for max_flows in [1, 16_384, 1 << 20, 1 << 24] {
            let mut idle = Simulation::new(max_flows, Sleep::LONGEST, true);
            assert!(idle.run(&[], 10 * SECOND_NS).is_empty());
            assert!(idle.share() < 0.02, "{max_flows} flows: {}", idle.share());
            assert!(idle.sleeps > 400, "{} sleeps in ten seconds", idle.sleeps);
        }
    }

    #[test]
    fn a_packet_after_silence_waits_for_the_wake_up_alone_or_for_the_bound_if_it_wakes_nobody() {
        let arrivals: Vec<u64> = (1..100).map(|n| n * SECOND_NS / 9).collect();
        let (wake, bound) = (Sleep::LONGEST, Sleep::POLLED);
        for (longest, packets_wake, worst_ns) in [(wake, true, 2 * SLEEP_COST_NS), (bound, false, 50_000 + 2 * SLEEP_COST_NS)] {
            let delays = Simulation::new(1 << 20, longest, packets_wake).run(&arrivals, 12 * SECOND_NS);
            assert_eq!(delays.len(), arrivals.len());
            assert!(delays.iter().all(|delay| *delay <= worst_ns), "{:?}", delays.iter().max());
        }
    }

    #[test]
    fn while_packets_arrive_within_ten_microseconds_it_only_polls() {
        let arrivals: Vec<u64> = (0..100_000).map(|n| n * 9_000).collect();
        let mut busy = Simulation::new(1 << 20, Sleep::LONGEST, true);
        busy.run(&arrivals, 900_000_000);
        assert_eq!((busy.sleeps, busy.busy_ns), (0, busy.polls * POLL_NS), "neither a sleep nor a yield");
    }

    #[test]
    fn the_sweep_of_a_sleeping_worker_takes_no_longer_than_that_of_a_busy_one() {
        for max_flows in [1 << 20, 1 << 26] {
            let mut idle = Simulation::new(max_flows, Sleep::LONGEST, true);
            idle.run(&[], 10 * SECOND_NS);
            let swept_a_second = idle.polls as f64 * f64::from(SWEPT_PER_POLL) / 10.0;
            assert!(swept_a_second >= f64::from(max_flows) / SWEEP.as_secs_f64() * 0.99, "{max_flows}: {swept_a_second}");
        }
    }

    #[test]
    fn a_packet_seen_by_the_poll_after_arming_prevents_the_sleep() {
        let mut idle = Idle::new(1);
        let steps: Vec<Step> = (0..SLEEP_AFTER).map(|_| idle.after_poll(0)).collect();
        assert_eq!(steps.last(), Some(&Step::Arm));
        assert_eq!((idle.after_poll(1), idle.after_poll(0)), (Step::Poll, Step::Poll));
    }
}
