//! Rate limit of status writes, each of which goes to every kube-proxy (CONTROL section 5).
//!
//! Invariant: no second has more writes than the current rate, which is between [`RATE_MIN`] and [`RATE_MAX`]. The rate
//! rises only while more than one second's writes wait and the server answers as fast as before and does not throttle.
//! Time is an argument.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Minimum rate, in writes per second. A new Service takes two writes, which should not wait for those of a few others.
pub(super) const RATE_MIN: usize = 20;
/// Maximum rate, in writes per second.
pub(super) const RATE_MAX: usize = 100;
/// Step of the rate per second.
const STEP: usize = 20;
/// Window in which writes are counted, and how long each rate is tried.
const PERIOD: Duration = Duration::from_secs(1);
/// An answer is late if it exceeds twice the usual time by this much.
const LATE_BY: Duration = Duration::from_millis(20);

/// State of the rate limit.
#[derive(Debug)]
pub(crate) struct RateLimit {
    rate: usize,
    sent: VecDeque<Instant>,
    /// Usual answer time; `None` before the first answer.
    usual: Option<Duration>,
    period_ends: Option<Instant>,
    /// Counters of the current window.
    answers: u32,
    took: Duration,
    is_throttled: bool,
}

impl Default for RateLimit {
    fn default() -> Self {
        let (sent, took) = (VecDeque::with_capacity(RATE_MAX), Duration::ZERO);
        Self { rate: RATE_MIN, sent, usual: None, period_ends: None, answers: 0, took, is_throttled: false }
    }
}

impl RateLimit {
    /// When the next write may be sent.
    pub(crate) fn next_at(&self, now: Instant) -> Instant {
        let oldest = self.sent.len().checked_sub(self.rate).and_then(|at| self.sent.get(at));
        oldest.map_or(now, |sent| (*sent + PERIOD).max(now))
    }

    /// Records that a write is sent.
    pub(crate) fn count(&mut self, now: Instant) {
        if self.sent.len() >= RATE_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back(now);
        self.period_ends.get_or_insert(now + PERIOD);
    }

    /// Records an answer after `took`, while `waiting` other writes wait.
    pub(crate) fn answered(&mut self, took: Duration, waiting: usize, now: Instant) {
        (self.answers, self.took) = (self.answers + 1, self.took + took);
        if self.period_ends.is_none_or(|ends| now < ends) {
            return;
        }
        let average = self.took / self.answers;
        let usual = *self.usual.get_or_insert(average);
        if self.is_throttled || average > 2 * usual + LATE_BY {
            self.rate = self.rate.saturating_sub(STEP).max(RATE_MIN);
        } else if waiting > self.rate {
            self.rate = (self.rate + STEP).min(RATE_MAX);
        } else if waiting < RATE_MIN {
            self.rate = RATE_MIN;
        }
        if self.rate == RATE_MIN {
            // The average moves slowly, so that a single late answer does not change it much.
            self.usual = Some((7 * usual + average) / 8);
        }
        (self.period_ends, self.answers, self.took, self.is_throttled) = (None, 0, Duration::ZERO, false);
    }

    /// Records that the server throttles or does not answer.
    pub(crate) const fn throttled(&mut self) {
        self.rate = RATE_MIN;
        self.is_throttled = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends `writes` one after another, each answered after `latency` of the rate; returns the total time.
    fn send(rate_limit: &mut RateLimit, writes: usize, start: Instant, latency: impl Fn(usize) -> Duration) -> Duration {
        let mut now = start;
        let mut under_way = VecDeque::new();
        for number in 0..writes {
            now = rate_limit.next_at(now);
            while let Some((at, took)) = under_way.pop_front_if(|(at, _): &mut (Instant, Duration)| *at <= now) {
                rate_limit.answered(took, writes - number, at);
            }
            rate_limit.count(now);
            let took = latency(rate_limit.rate);
            under_way.push_back((now + took, took));
        }
        now - start
    }

    #[test]
    fn twenty_writes_are_sent_at_once_and_the_next_ones_after_a_second() {
        let (mut rate_limit, now) = (RateLimit::default(), Instant::now());
        for number in 0..20 {
            assert_eq!(rate_limit.next_at(now), now);
            rate_limit.count(now + Duration::from_millis(number));
        }
        assert_eq!(rate_limit.next_at(now), now + PERIOD);
        assert_eq!(rate_limit.next_at(now + PERIOD), now + PERIOD);
        rate_limit.count(now + PERIOD);
        assert_eq!(rate_limit.next_at(now + PERIOD), now + PERIOD + Duration::from_millis(1));
    }

    /// Two writes for each Service of the first ten seconds, and one for each later Service, which gateways get without
    /// waiting for the finalizer.
    #[test]
    fn ten_thousand_services_have_their_statuses_within_three_minutes() {
        let (mut rate_limit, start) = (RateLimit::default(), Instant::now());
        let taken = send(&mut rate_limit, 11_000, start, |_| Duration::from_millis(15));
        assert!(taken < Duration::from_secs(180), "after {taken:?}");
        assert!(taken > Duration::from_secs(11_000 / 100 - 1), "never more than 100 a second: {taken:?}");
        let rest = start + taken + PERIOD;
        rate_limit.answered(Duration::from_millis(15), 0, rest);
        assert_eq!(rate_limit.rate, RATE_MIN, "no write waits");
    }

    #[test]
    fn a_server_that_slows_down_or_throttles_gets_twenty_writes_a_second() {
        let (mut rate_limit, start) = (RateLimit::default(), Instant::now());
        // Above 60 writes a second answers take ten times as long.
        let latency = |rate| Duration::from_millis(if rate > 60 { 150 } else { 15 });
        let taken = send(&mut rate_limit, 3_000, start, latency);
        assert!(taken > Duration::from_secs(3_000 / 80) && rate_limit.rate <= 80, "{taken:?} at {}", rate_limit.rate);
        rate_limit.throttled();
        assert_eq!(rate_limit.rate, RATE_MIN);
        rate_limit.count(start + taken + PERIOD);
        rate_limit.answered(Duration::from_millis(15), 1_000, start + taken + 3 * PERIOD);
        assert_eq!(rate_limit.rate, RATE_MIN, "not in the period of the retry");
    }
}
