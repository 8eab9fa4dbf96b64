//! How many writes of statuses are sent in a second: every one of them goes to every kube-proxy (CONTROL section 5).
//!
//! Invariant: never more than the present rate in any second; the rate is between [`RATE_MIN`] and [`RATE_MAX`], and rises
//! only while more than a second's writes wait and the server answers as fast as it did, without asking to be left alone.
//! Time is an argument.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Writes in any second at rest. A new Service takes two writes, and is not to wait for those of a few others.
pub(super) const RATE_MIN: usize = 20;
/// The same while many wait.
pub(super) const RATE_MAX: usize = 100;
/// How much more, or less, a second later.
const STEP: usize = 20;
/// What writes are counted in, and how long a rate is tried.
const PERIOD: Duration = Duration::from_secs(1);
/// Answers that take so much longer than twice the usual time are late.
const LATE_BY: Duration = Duration::from_millis(20);

/// When writes were sent, and how they were answered.
#[derive(Debug)]
pub(super) struct Pace {
    rate: usize,
    sent: VecDeque<Instant>,
    /// How long answers take at rest; none before the first.
    usual: Option<Duration>,
    period_ends: Option<Instant>,
    /// Of this period.
    answers: u32,
    took: Duration,
    is_troubled: bool,
}

impl Default for Pace {
    fn default() -> Self {
        let (sent, took) = (VecDeque::with_capacity(RATE_MAX), Duration::ZERO);
        Self { rate: RATE_MIN, sent, usual: None, period_ends: None, answers: 0, took, is_troubled: false }
    }
}

impl Pace {
    /// When the next write may be sent.
    pub(super) fn next_at(&self, now: Instant) -> Instant {
        let oldest = self.sent.len().checked_sub(self.rate).and_then(|at| self.sent.get(at));
        oldest.map_or(now, |sent| (*sent + PERIOD).max(now))
    }

    /// A write is sent.
    pub(super) fn count(&mut self, now: Instant) {
        if self.sent.len() >= RATE_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back(now);
        self.period_ends.get_or_insert(now + PERIOD);
    }

    /// A write was answered after `took`, while so many others wait.
    pub(super) fn answered(&mut self, took: Duration, waiting: usize, now: Instant) {
        (self.answers, self.took) = (self.answers + 1, self.took + took);
        if self.period_ends.is_none_or(|ends| now < ends) {
            return;
        }
        let average = self.took / self.answers;
        let usual = *self.usual.get_or_insert(average);
        if self.is_troubled || average > 2 * usual + LATE_BY {
            self.rate = self.rate.saturating_sub(STEP).max(RATE_MIN);
        } else if waiting > self.rate {
            self.rate = (self.rate + STEP).min(RATE_MAX);
        } else if waiting < RATE_MIN {
            self.rate = RATE_MIN;
        }
        if self.rate == RATE_MIN {
            // Slowly, so that an answer that was late once is not the measure.
            self.usual = Some((7 * usual + average) / 8);
        }
        (self.period_ends, self.answers, self.took, self.is_troubled) = (None, 0, Duration::ZERO, false);
    }

    /// The server asks to be left alone, or does not answer.
    pub(super) const fn trouble(&mut self) {
        self.rate = RATE_MIN;
        self.is_troubled = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends `writes` one after another, each answered after what `latency` says for the rate; how long that takes.
    fn send(pace: &mut Pace, writes: usize, start: Instant, latency: impl Fn(usize) -> Duration) -> Duration {
        let mut now = start;
        let mut under_way = VecDeque::new();
        for number in 0..writes {
            now = pace.next_at(now);
            while let Some((at, took)) = under_way.pop_front_if(|(at, _): &mut (Instant, Duration)| *at <= now) {
                pace.answered(took, writes - number, at);
            }
            pace.count(now);
            let took = latency(pace.rate);
            under_way.push_back((now + took, took));
        }
        now - start
    }

    #[test]
    fn twenty_writes_go_at_once_and_the_next_ones_as_the_second_passes() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        for number in 0..20 {
            assert_eq!(pace.next_at(now), now);
            pace.count(now + Duration::from_millis(number));
        }
        assert_eq!(pace.next_at(now), now + PERIOD);
        assert_eq!(pace.next_at(now + PERIOD), now + PERIOD);
        pace.count(now + PERIOD);
        assert_eq!(pace.next_at(now + PERIOD), now + PERIOD + Duration::from_millis(1));
    }

    /// Two writes for each of those that come in the first ten seconds, and one for each of the others, which gateways are
    /// given without waiting for the finalizer any longer.
    #[test]
    fn ten_thousand_services_have_their_statuses_within_three_minutes() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let taken = send(&mut pace, 11_000, start, |_| Duration::from_millis(15));
        assert!(taken < Duration::from_secs(180), "after {taken:?}");
        assert!(taken > Duration::from_secs(11_000 / 100 - 1), "never more than 100 a second: {taken:?}");
        let rest = start + taken + PERIOD;
        pace.answered(Duration::from_millis(15), 0, rest);
        assert_eq!(pace.rate, RATE_MIN, "nobody waits any more");
    }

    #[test]
    fn a_server_that_gets_slower_or_asks_to_be_left_alone_gets_twenty_a_second() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        // Beyond 60 a second its answers take ten times as long.
        let latency = |rate| Duration::from_millis(if rate > 60 { 150 } else { 15 });
        let taken = send(&mut pace, 3_000, start, latency);
        assert!(taken > Duration::from_secs(3_000 / 80) && pace.rate <= 80, "{taken:?} at {}", pace.rate);
        pace.trouble();
        assert_eq!(pace.rate, RATE_MIN);
        pace.count(start + taken + PERIOD);
        pace.answered(Duration::from_millis(15), 1_000, start + taken + 3 * PERIOD);
        assert_eq!(pace.rate, RATE_MIN, "not in the period of the trouble");
    }
}
