//! Latency of packets that arrive at a steady rate.
//!
//! Loads are parts of the rate that the worker reaches in the same loop when its bursts are always full; so the time that
//! it takes to note arrivals does not change the load.
//!
//! Not here: when packets arrive (`harness`).

use std::time::Duration;

use super::super::account::CounterReading;
use super::super::error::BenchError;
use super::super::harness::{Feeding, Harness, KEPT_ONE_IN, Latencies, Pace};
use super::super::report::LoadLatency;
use super::super::traffic::Stage;
use super::{POLLS_PER_LOOK, Polled, SLICE, Session};

/// Loads that are measured, in percent.
const LOADS: [u8; 3] = [10, 50, 90];
/// The highest rate and each load take this part of the measured time.
const PART: u32 = 4;
/// Time at the start of a slice that does not count.
const WARM_UP: Duration = Duration::from_millis(20);

impl<H: Harness, E: Polled> Session<'_, H, E> {
    /// Measures it at each of the loads.
    pub(super) fn latency(&mut self, stage: Option<Stage>) -> Result<Vec<LoadLatency>, BenchError> {
        let (highest, cycles) = self.offer(1, 1, stage)?; // far more than any worker takes
        let packets = highest.times.total().max(1);
        let rate = self.bench.rate;
        let load = |percent: u8| {
            let (found, _) = self.offer(cycles * 100, packets * u64::from(percent), stage)?;
            let ns = |thousandths| rate.ns(found.times.percentile(thousandths));
            Ok(LoadLatency {
                load_percent: percent,
                mpps: ratio(packets, rate.ns(cycles)) * 1e3 * f64::from(percent) / 100.0,
                packets: found.times.total(),
                packets_per_burst: ratio(found.received, found.bursts),
                p50_ns: ns(500),
                p99_ns: ns(990),
                p999_ns: ns(999),
                missed: found.missed,
            })
        };
        LOADS.into_iter().map(load).collect()
    }

    /// Measures while this many packets arrive in so many cycles. Returns the cycles that it took, too.
    fn offer(&mut self, cycles: u64, packets: u64, stage: Option<Stage>) -> Result<(Latencies, u64), BenchError> {
        let rate = self.bench.rate;
        let (slice, warm_up) = (rate.cycles(SLICE), rate.cycles(WARM_UP));
        let wanted = rate.cycles(Duration::from_secs(self.bench.scenario.options.seconds.into()) / PART);
        let (mut sum, mut taken, mut counted) = (Latencies::default(), 0, CounterReading::default());
        let before = self.engine.reading();
        while taken < wanted {
            let from = dpdk_sys::cycles();
            self.harness.pace(Some(Pace { from, cycles, packets }));
            let sides = self.bench.scenario.sides();
            self.harness.begin(Feeding { sides, frames: None, keep_one_in: KEPT_ONE_IN });
            self.poll_for(warm_up);
            self.harness.take_latencies();
            taken += self.poll_for(slice);
            sum.merge(&self.harness.take_latencies());
            self.harness.end();
            self.harness.pace(None);
            self.rest(stage)?;
        }
        counted.add(&before, &self.engine.reading());
        counted.expect_no_drops()?;
        Ok((sum, taken))
    }

    /// Polls for so many cycles, or until so many packets are kept that they should be verified. Returns how long it took.
    fn poll_for(&mut self, cycles: u64) -> u64 {
        let start = dpdk_sys::cycles();
        loop {
            (0..POLLS_PER_LOOK).for_each(|_| self.poll());
            let passed = dpdk_sys::cycles() - start;
            if passed >= cycles || self.harness.is_full() {
                return passed;
            }
        }
    }
}

#[allow(clippy::cast_precision_loss)] // counts stay below 2^53
fn ratio(count: u64, of: u64) -> f64 {
    count as f64 / of.max(1) as f64
}
