//! When each target is probed next. A new target gets its own moment within its first interval, so that a thousand new
//! backends are not a burst; from then on it is probed every interval, counted from the start of the probe before.
//!
//! Invariant: a target waits here or its probe is under way, never both.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use super::Target;
use super::target::Targets;

/// Targets that wait for their next probe, and those whose probe is under way.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    due: BTreeSet<(Instant, Target)>,
    waiting: HashMap<Target, Instant>,
    under_way: HashSet<Target>,
    spread: RandomState,
}

impl Schedule {
    /// Schedules what is new in `targets` and forgets what is not in it.
    pub(super) fn follow(&mut self, targets: &Targets, now: Instant) {
        let gone: Vec<_> = self.waiting.keys().filter(|target| !targets.contains_key(target)).copied().collect();
        for target in gone {
            self.take(target);
        }
        for (target, check) in targets {
            if !self.waiting.contains_key(target) && !self.under_way.contains(target) {
                self.wait(*target, now + phase(self.spread.hash_one(target), check.interval));
            }
        }
    }

    /// When the next probe is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A target whose probe is due; it counts as under way until [`Schedule::finished`].
    pub(super) fn start(&mut self, now: Instant) -> Option<Target> {
        let (at, target) = *self.due.first()?;
        if at > now {
            return None;
        }
        self.take(target);
        self.under_way.insert(target);
        Some(target)
    }

    /// The probe of `target` is over; the next one is due at `next`, none when the target is not followed any more.
    pub(super) fn finished(&mut self, target: Target, next: Option<Instant>) {
        self.under_way.remove(&target);
        if let Some(at) = next {
            self.wait(target, at);
        }
    }

    fn wait(&mut self, target: Target, at: Instant) {
        self.waiting.insert(target, at);
        self.due.insert((at, target));
    }

    fn take(&mut self, target: Target) {
        if let Some(at) = self.waiting.remove(&target) {
            self.due.remove(&(at, target));
        }
    }
}

/// A part of `interval`, from none to all of it, by 32 bits of `random`.
fn phase(random: u64, interval: Duration) -> Duration {
    interval.mul_f64((random >> 32) as f64 / 2f64.powi(32))
}

#[cfg(test)]
mod tests {
    use proto::{HealthCheck, Protocol};

    use super::super::target::targets;
    use super::super::target::tests::{service, state};
    use super::*;

    fn many(count: u8) -> Targets {
        let addresses: Vec<String> = (0..count).map(|i| format!("10.0.0.{i}:80")).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        targets(&state(vec![service("web", Protocol::Tcp, &addresses, HealthCheck::default())]), &[])
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
        schedule.follow(&Targets::new(), now);
        assert_eq!(schedule.next(), None);
        schedule.finished(target, None);
        assert_eq!(schedule.next(), None);
    }

    #[test]
    fn a_phase_is_always_within_the_interval() {
        assert_eq!(phase(0, Duration::from_secs(1)), Duration::ZERO);
        assert!(phase(u64::MAX, Duration::from_secs(1)) <= Duration::from_secs(1));
    }
}
