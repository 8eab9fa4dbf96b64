//! The clock of a worker, and the times of its polls.
//!
//! **Invariant:** the time stamp counter is read once per poll; with `--latency` once more for each burst that leaves.
//!
//! Not here: what is polled (`measure`).

use std::time::{Duration, Instant};

/// Rate of the time stamp counter.
#[derive(Clone, Copy, Debug)]
pub(super) struct CycleRate {
    ns_per_cycle: f64,
}

impl CycleRate {
    /// The number of cycles of a time.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // below 2^53
    pub(super) fn cycles(self, time: Duration) -> u64 {
        (nanos(time) as f64 / self.ns_per_cycle) as u64
    }

    /// Measures it over 20 ms, because it is unknown without DPDK.
    #[allow(clippy::cast_precision_loss)] // counts stay below 2^53
    pub(super) fn measure() -> Self {
        let (start, first) = (Instant::now(), dpdk_sys::cycles());
        while start.elapsed() < Duration::from_millis(20) {}
        Self { ns_per_cycle: start.elapsed().as_nanos() as f64 / (dpdk_sys::cycles() - first) as f64 }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // below 2^53
    #[inline]
    pub(super) fn ns(self, cycles: u64) -> u64 {
        (cycles as f64 * self.ns_per_cycle) as u64
    }
}

/// The time that a worker gets.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerClock {
    rate: CycleRate,
    /// Time at the beginning of `since`, ns.
    base_ns: u64,
    /// When real time began; none while time stands still or is simulated.
    since: Option<u64>,
    /// Simulated time per packet, ns.
    packet_ns: u64,
}

/// How long a flow lives that comes and goes: the opening state, which a FIN of the client does not change, and the time
/// until a sweep removes it.
const NEW_FLOW_LIFE: Duration = Duration::from_secs(39);
/// Part of the room that flows which come and go fill, in hundredths. The sweep visits two flows per packet, so flows live
/// for up to 56 s instead of [`NEW_FLOW_LIFE`], and their ports rest for 60 s: 1.8 ports per flow of the table.
const NEW_FLOWS_LIVE: u64 = 60;

impl WorkerClock {
    /// A clock that stands still, from some time on.
    pub(super) fn still(rate: CycleRate) -> Self {
        Self { rate, base_ns: 1_000_000_000, since: None, packet_ns: 0 }
    }

    /// From now on with real time.
    pub(super) fn run(&mut self) {
        self.since = Some(dpdk_sys::cycles());
    }

    /// From now on with a simulated time, in which flows expire as fast as they come: where one in so many packets opens
    /// one, and there is room for `room` of them.
    pub(super) fn simulate(&mut self, room: u32, opens_one_in: u64) {
        self.packet_ns = nanos(NEW_FLOW_LIFE) / (live_flows(room) * opens_one_in);
    }

    /// So many packets were handled.
    #[inline]
    pub(super) fn handled(&mut self, packets: usize) {
        self.base_ns += self.packet_ns * packets as u64;
    }

    /// Advances the time at once.
    pub(super) fn skip(&mut self, time: Duration) {
        self.base_ns += nanos(time);
    }

    /// The time of a poll that begins at this cycle, ns.
    #[inline]
    pub(super) fn at(&self, cycles: u64) -> u64 {
        match self.since {
            Some(since) => self.base_ns + self.rate.ns(cycles - since),
            None => self.base_ns,
        }
    }
}

/// Flows that come and go and are live at the same time, where there is room for `room` of them.
pub(super) fn live_flows(room: u32) -> u64 {
    (u64::from(room) * NEW_FLOWS_LIVE / 100).max(1)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Times up to twice this many cycles have a bucket of their own; longer ones share one with times that differ by less
/// than a part in this many.
const BUCKETS_OF_A_POWER: usize = 64;
/// Buckets of all times: 2^6 for each of the powers of two above 2^6, and those below.
const BUCKETS: usize = 59 * BUCKETS_OF_A_POWER;

/// Number of times by their length, in cycles.
#[derive(Clone, Debug)]
pub(super) struct Histogram(Vec<u64>);

impl Default for Histogram {
    fn default() -> Self {
        Self(vec![0; BUCKETS])
    }
}

impl Histogram {
    /// Counts a time.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // the quotient is below 2^7
    pub(super) fn count(&mut self, cycles: u64) {
        let power = (u64::BITS - cycles.leading_zeros()).saturating_sub(BUCKETS_OF_A_POWER.ilog2() + 1);
        if let Some(count) = self.0.get_mut(power as usize * BUCKETS_OF_A_POWER + (cycles >> power) as usize) {
            *count += 1;
        }
    }

    /// Number of times.
    pub(super) fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The time that this many thousandths of the times do not exceed, in cycles.
    pub(super) fn percentile(&self, thousandths: u64) -> u64 {
        let wanted = (self.total() * thousandths).div_ceil(1000);
        let mut passed = 0;
        let within = self.0.iter().position(|count| {
            passed += count;
            passed >= wanted
        });
        let bucket = within.unwrap_or(0);
        let power = (bucket / BUCKETS_OF_A_POWER).saturating_sub(1);
        ((bucket - power * BUCKETS_OF_A_POWER) as u64) << power | ((1 << power) - 1)
    }

    /// Adds the times of another.
    pub(super) fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, count)| *sum += count);
    }
}

/// Times of polls that count.
#[derive(Debug)]
pub(super) struct PollTimes {
    rate: CycleRate,
    pub(super) workers: u32,
    pub(super) packets: u64,
    cycles: u64,
    histogram: Histogram,
}

impl PollTimes {
    pub(super) fn new(rate: CycleRate) -> Self {
        Self { rate, workers: 1, packets: 0, cycles: 0, histogram: Histogram::default() }
    }

    /// Counts a poll.
    #[inline]
    pub(super) fn count(&mut self, cycles: u64) {
        self.cycles += cycles;
        self.histogram.count(cycles);
    }

    pub(super) fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.rate.ns(self.cycles))
    }

    /// The time that this many thousandths of the polls do not exceed, ns.
    pub(super) fn percentile_ns(&self, thousandths: u64) -> u64 {
        self.rate.ns(self.histogram.percentile(thousandths))
    }

    /// Adds those of other workers at the same time.
    pub(super) fn merge(&mut self, other: &Self) {
        self.workers += other.workers;
        self.packets += other.packets;
        self.cycles += other.cycles;
        self.histogram.merge(&other.histogram);
    }

    /// Time a packet of one worker.
    #[allow(clippy::cast_precision_loss)] // counts stay below 2^53
    pub(super) fn ns_per_packet(&self) -> f64 {
        self.cycles as f64 * self.rate.ns_per_cycle / self.packets as f64
    }

    #[allow(clippy::cast_precision_loss)] // counts stay below 2^53
    pub(super) fn cycles_per_packet(&self) -> f64 {
        self.cycles as f64 / self.packets as f64
    }

    /// The time that all workers took.
    pub(super) fn seconds(&self) -> f64 {
        self.elapsed().as_secs_f64() / f64::from(self.workers)
    }

    /// Million packets a second of all workers.
    pub(super) fn mpps(&self) -> f64 {
        1e3 / self.ns_per_packet() * f64::from(self.workers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_at_most_a_64th_too_long() {
        let all = |times: &mut dyn Iterator<Item = u64>| {
            let mut histogram = Histogram::default();
            times.for_each(|cycles| histogram.count(cycles));
            histogram
        };
        for cycles in (0..5000).chain([123_456, 1 << 20, (1 << 20) - 1, 1 << 40, u64::MAX]) {
            let found = all(&mut [cycles].into_iter()).percentile(500);
            assert!(found >= cycles && found - cycles <= cycles / 64, "{cycles}: {found}");
        }
        let mut thousand = all(&mut (1..=1000));
        assert_eq!(thousand.total(), 1000);
        for (thousandths, exact) in [(1, 1), (500, 500), (990, 990), (999, 999), (1000, 1000)] {
            let found = thousand.percentile(thousandths);
            assert!((exact..=exact + exact / 64).contains(&found), "{thousandths}: {found}");
        }
        thousand.merge(&all(&mut std::iter::repeat_n(1 << 30, 9000)));
        assert!(thousand.percentile(101) >= 1 << 30);
    }
}
