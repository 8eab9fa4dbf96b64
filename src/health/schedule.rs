//! The schedule of probes. The first probe of a new target is at a random time within its first interval, so that a
//! thousand new backends cause no burst. Later probes follow at the interval, counted from the start of the previous
//! probe.
//!
//! Invariant: a target is either waiting or being probed, never both.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use super::target::Changes;
use super::{Question, Target};

/// Minimum time between the starts of two probes of a target if the second is brought forward: connections that fail all
/// the time cause one probe a second, not a flood of them.
const BROUGHT_FORWARD_TO: Duration = Duration::from_secs(1);

/// Targets that wait for their next probe, and targets that are being probed.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    due: BTreeSet<(Instant, Target)>,
    waiting: HashMap<Target, Wait>,
    /// When the probes began.
    under_way: HashMap<Target, Instant>,
    spread: RandomState,
}

/// When the next probe of a target is due, and when the last one began, if there was one.
#[derive(Clone, Copy, Debug)]
struct Wait {
    until: Instant,
    last: Option<Instant>,
}

impl Schedule {
    /// Schedules new targets of which something is asked, and removes those that are gone.
    pub(super) fn follow(&mut self, changes: &Changes, now: Instant) {
        for (target, subjects) in changes {
            if subjects.is_none() {
                self.take(target);
            } else if target.question != Question::Route
                && !self.waiting.contains_key(target)
                && !self.under_way.contains_key(target)
            {
                let until = now + phase(self.spread.hash_one(target), target.settings.interval);
                self.wait(target.clone(), Wait { until, last: None });
            }
        }
    }

    /// When the next probe is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A target whose probe is due; it counts as being probed until [`Schedule::finished`].
    pub(super) fn start(&mut self, now: Instant) -> Option<Target> {
        let (_, target) = self.due.first().filter(|(at, _)| *at <= now)?.clone();
        self.take(&target);
        self.under_way.insert(target.clone(), now);
        Some(target)
    }

    /// Records the end of a probe of `target`; the next one is due at `next`. `None` if the target was removed.
    pub(super) fn finished(&mut self, target: Target, next: Option<Instant>) {
        let last = self.under_way.remove(&target);
        if let Some(until) = next {
            self.wait(target, Wait { until, last });
        }
    }

    /// Brings the next probe of a target forward to now, or to a second after the start of the last one. Returns whether
    /// it is earlier than before.
    pub(super) fn bring_forward(&mut self, target: &Target, now: Instant) -> bool {
        let Some(wait) = self.waiting.get(target).copied() else { return false };
        let until = wait.last.map_or(now, |last| now.max(last + BROUGHT_FORWARD_TO));
        if until >= wait.until {
            return false;
        }
        self.take(target);
        self.wait(target.clone(), Wait { until, ..wait });
        true
    }

    fn wait(&mut self, target: Target, wait: Wait) {
        self.waiting.insert(target.clone(), wait);
        self.due.insert((wait.until, target));
    }

    fn take(&mut self, target: &Target) {
        if let Some((target, wait)) = self.waiting.remove_entry(target) {
            self.due.remove(&(wait.until, target));
        }
    }
}

/// A random part of `interval`, by 32 bits of `random`.
fn phase(random: u64, interval: Duration) -> Duration {
    interval.mul_f64((random >> 32) as f64 / 2f64.powi(32))
}

#[cfg(test)]
mod tests {
    use proto::{HealthCheck, Protocol};

    use super::super::target::tests::{changes, service, tcp, under};
    use super::*;

    fn many(count: u8) -> Changes {
        every(Duration::from_secs(1), count)
    }

    fn every(interval: Duration, count: u8) -> Changes {
        let addresses: Vec<String> = (0..count).map(|i| format!("10.0.0.{i}:80")).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        let health = HealthCheck { interval, ..HealthCheck::default() };
        changes(vec![service("web", Protocol::Tcp, &addresses, health)])
    }

    fn none_of(changes: Changes) -> Changes {
        changes.into_keys().map(|target| (target, None)).collect()
    }

    #[test]
    fn new_targets_are_spread_over_their_first_interval() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.follow(&many(200), now);
        let mut quarters = [0; 4];
        while let Some(at) = schedule.next() {
            quarters[usize::try_from((at - now).as_millis() / 250).unwrap()] += 1;
            schedule.start(at).unwrap();
        }
        assert_eq!(quarters.iter().sum::<i32>(), 200);
        assert!(quarters.iter().all(|n| *n > 20), "{quarters:?}");
    }

    #[test]
    fn nothing_starts_early_and_a_probe_under_way_is_not_started_again() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.follow(&many(1), now);
        let at = schedule.next().unwrap();
        assert_eq!(schedule.start(at.checked_sub(Duration::from_nanos(1)).unwrap()), None);
        let target = schedule.start(at).unwrap();
        schedule.follow(&many(1), at);
        assert_eq!(schedule.next(), None);
        schedule.finished(target, Some(at + Duration::from_secs(1)));
        assert_eq!(schedule.next(), Some(at + Duration::from_secs(1)));
    }

    #[test]
    fn a_target_that_is_gone_is_not_probed_again() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.follow(&many(2), now);
        let target = schedule.start(now + Duration::from_secs(1)).unwrap();
        schedule.follow(&none_of(many(2)), now);
        assert_eq!(schedule.next(), None);
        schedule.finished(target, None);
        assert_eq!(schedule.next(), None);
    }

    #[test]
    fn a_phase_is_always_within_the_interval() {
        assert_eq!(phase(0, Duration::from_secs(1)), Duration::ZERO);
        assert!(phase(u64::MAX, Duration::from_secs(1)) <= Duration::from_secs(1));
    }

    #[test]
    fn a_shorter_interval_does_not_wait_for_the_end_of_the_long_one() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.follow(&every(Duration::from_secs(3600), 1), now);
        let target = schedule.start(schedule.next().unwrap()).unwrap();
        schedule.finished(target.clone(), Some(now + Duration::from_secs(3600)));
        schedule.follow(&[(target, None)].into(), now);
        schedule.follow(&many(1), now);
        assert!(schedule.next().unwrap() <= now + Duration::from_secs(1));
    }

    #[test]
    fn a_probe_is_brought_forward_to_a_second_after_the_last_one_at_the_earliest() {
        let (start, interval) = (Instant::now(), Duration::from_secs(30));
        let after = |seconds| start + Duration::from_secs(seconds);
        let of = |interval| under(&HealthCheck { interval, ..HealthCheck::default() }, tcp("10.0.0.0:80"));
        let target = of(interval);
        let mut schedule = Schedule::default();
        schedule.follow(&every(interval, 1), start);
        let taken = schedule.start(after(30)).unwrap();
        assert!(!schedule.bring_forward(&target, after(30)), "it is being probed");
        schedule.finished(taken, Some(after(60)));
        assert!(schedule.bring_forward(&target, after(30)));
        assert_eq!(schedule.next(), Some(after(31)));
        assert!(!schedule.bring_forward(&target, after(30)), "it is already as early as it may be");
        let taken = schedule.start(after(31)).unwrap();
        schedule.finished(taken, Some(after(61)));
        assert!(schedule.bring_forward(&target, after(50)));
        assert_eq!(schedule.next(), Some(after(50)));
        let mut fast = Schedule::default();
        fast.follow(&many(1), start);
        let taken = fast.start(after(1)).unwrap();
        fast.finished(taken, Some(after(2)));
        assert!(
            !fast.bring_forward(&of(Duration::from_secs(1)), after(1)) && fast.next() == Some(after(2)),
            "its interval is as short"
        );
    }
}
