//! The health of every target: results in, failing backends out.
//!
//! A target starts usable and fails after `fall` failed probes in a row; `rise` passed ones end that. A target known from
//! disk only starts unproven and is proven by its first passed probe (CONTROL section 2). A result for a target that is
//! not followed any more changes nothing.

use std::collections::{HashMap, HashSet};

use proto::Origin;

use super::Target;
use super::target::{Check, Subject, Targets};

/// What the probes say of backends. A backend in neither set is usable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Backends of which at least one target fails.
    pub failing: HashSet<Subject>,
    /// Under a state from disk: the backends of which every target passed a probe. Empty under a controller's state,
    /// where no proof is asked for.
    pub proven: HashSet<Subject>,
}

/// A change of a target's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It fails now.
    Failing,
    /// It does not fail any more.
    Healthy,
    /// It passed its first probe after a start from disk.
    Proven,
}

#[derive(Debug)]
struct Followed {
    check: Check,
    failing: bool,
    proven: bool,
    /// Results in a row that contradict `failing`.
    contrary: u32,
}

/// The health of all targets that are followed.
#[derive(Debug, Default)]
pub struct HealthTracker {
    targets: HashMap<Target, Followed>,
    before: Health,
    from_disk: bool,
}

impl HealthTracker {
    /// Follows nothing yet. `before` is what an earlier tracker last said: what failed then starts failing and what was
    /// proven stays so, so that a restart of the probes neither sends flows to the dead nor cuts off the living.
    #[must_use]
    pub fn resuming(before: Health) -> Self {
        Self { before, ..Self::default() }
    }

    /// Follows exactly `targets` from now on. A target that was followed keeps its health.
    pub fn follow(&mut self, mut targets: Targets, origin: Origin) {
        self.from_disk = origin != Origin::Controller;
        self.targets.retain(|target, followed| match targets.remove(target) {
            Some(check) => {
                followed.check = check;
                true
            }
            None => false,
        });
        for (target, check) in targets {
            let failing = check.subjects.iter().any(|backend| self.before.failing.contains(backend));
            let proven = check.subjects.iter().all(|backend| self.before.proven.contains(backend));
            self.targets.insert(target, Followed { check, failing, proven, contrary: 0 });
        }
        self.before = Health::default();
    }

    /// Takes a result; says whether and how the target's health turned.
    pub fn observe(&mut self, target: Target, passed: bool) -> Option<Turn> {
        let followed = self.targets.get_mut(&target)?;
        if passed && self.from_disk && !followed.proven {
            *followed = Followed { check: followed.check.clone(), failing: false, proven: true, contrary: 0 };
            return Some(Turn::Proven);
        }
        followed.proven |= passed;
        if passed != followed.failing {
            followed.contrary = 0;
            return None;
        }
        followed.contrary += 1;
        let needed = if followed.failing { followed.check.rise } else { followed.check.fall };
        if followed.contrary < needed {
            return None;
        }
        followed.failing = !followed.failing;
        followed.contrary = 0;
        Some(if followed.failing { Turn::Failing } else { Turn::Healthy })
    }

    /// How a target is probed; none when it is not followed.
    #[must_use]
    pub fn check(&self, target: Target) -> Option<&Check> {
        self.targets.get(&target).map(|followed| &followed.check)
    }

    /// What the results say of backends.
    #[must_use]
    pub fn health(&self) -> Health {
        let of = |wanted: fn(&Followed) -> bool| -> HashSet<Subject> {
            self.targets.values().filter(|f| wanted(f)).flat_map(|f| f.check.subjects.iter().cloned()).collect()
        };
        if !self.from_disk {
            return Health { failing: of(|f| f.failing), proven: HashSet::new() };
        }
        let unproven = of(|f| !f.proven);
        let mut proven = of(|f| f.proven);
        proven.retain(|backend| !unproven.contains(backend));
        Health { failing: of(|f| f.failing), proven }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::{HealthCheck, Protocol};

    use super::super::target::targets;
    use super::super::target::tests::{service, state, subject, tcp};
    use super::*;

    fn one_target(rise: u32, fall: u32) -> Targets {
        let health = HealthCheck { rise, fall, ..HealthCheck::default() };
        targets(&state(vec![service("web", Protocol::Tcp, &["10.0.0.1:80"], health)]), &[])
    }

    fn backend() -> Subject {
        subject(None, Protocol::Tcp, "10.0.0.1:80")
    }

    proptest! {
        /// The model looks back over the whole history: a target turns when the last `fall` (or `rise`) results since
        /// its last turn all contradict its health.
        #[test]
        fn health_turns_after_as_many_contrary_results_in_a_row_as_configured(
            rise in 1u32..4, fall in 1u32..4, results in prop::collection::vec(any::<bool>(), 0..40),
        ) {
            let mut tracker = HealthTracker::default();
            tracker.follow(one_target(rise, fall), Origin::Controller);
            let (mut failing, mut turned_at) = (false, 0);
            for (i, passed) in results.iter().enumerate() {
                tracker.observe(tcp("10.0.0.1:80"), *passed);
                let needed = if failing { rise } else { fall } as usize;
                let since = &results[turned_at..=i];
                if since.len() >= needed && since[since.len() - needed..].iter().all(|r| *r == failing) {
                    (failing, turned_at) = (!failing, i + 1);
                }
                prop_assert_eq!(tracker.health().failing.contains(&backend()), failing);
            }
        }
    }

    #[test]
    fn a_new_target_is_used_at_once_and_leaves_after_fall_failures() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(2, 3), Origin::Controller);
        assert_eq!(tracker.health(), Health::default());
        let turns = [false; 3].map(|result| tracker.observe(tcp("10.0.0.1:80"), result));
        assert_eq!(turns, [None, None, Some(Turn::Failing)]);
    }

    #[test]
    fn from_disk_one_passed_probe_is_needed_whatever_rise_says() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(5, 1), Origin::Disk);
        assert!(tracker.health().proven.is_empty());
        assert_eq!(tracker.observe(tcp("10.0.0.1:80"), false), Some(Turn::Failing));
        assert_eq!(tracker.observe(tcp("10.0.0.1:80"), true), Some(Turn::Proven));
        assert_eq!(tracker.health(), Health { failing: HashSet::new(), proven: HashSet::from([backend()]) });
        tracker.follow(one_target(5, 1), Origin::Controller);
        assert_eq!(tracker.health(), Health::default());
    }

    #[test]
    fn a_backend_with_two_targets_needs_both() {
        let at = |port| HealthCheck { port, fall: 1, ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &["10.0.0.1:80"], at(None));
        let also = service("also", Protocol::Tcp, &["10.0.0.1:80"], at(Some(9000)));
        let mut tracker = HealthTracker::default();
        tracker.follow(targets(&state(vec![web, also]), &[]), Origin::Disk);
        tracker.observe(tcp("10.0.0.1:80"), true);
        assert!(tracker.health().proven.is_empty());
        tracker.observe(tcp("10.0.0.1:9000"), true);
        assert!(tracker.health().proven.contains(&backend()));
        tracker.observe(tcp("10.0.0.1:9000"), false);
        assert!(tracker.health().failing.contains(&backend()));
    }

    #[test]
    fn what_kube_proxy_says_of_a_node_fails_it_for_that_service_alone() {
        let local = HealthCheck { node_health_port: Some(31_000), fall: 1, rise: 1, ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &["10.0.0.1:80"], local);
        let also = service("also", Protocol::Tcp, &["10.0.0.1:80"], HealthCheck::default());
        let mut tracker = HealthTracker::default();
        tracker.follow(targets(&state(vec![web, also]), &[]), Origin::Controller);
        tracker.observe(Target::NodeHealth("10.0.0.1:31000".parse().unwrap()), false);
        assert_eq!(tracker.health().failing, HashSet::from([subject(Some("web"), Protocol::Tcp, "10.0.0.1:80")]));
    }

    #[test]
    fn what_failed_before_a_restart_of_the_probes_starts_failing() {
        let before = Health { failing: HashSet::from([backend()]), ..Health::default() };
        let mut tracker = HealthTracker::resuming(before.clone());
        tracker.follow(one_target(1, 1), Origin::Controller);
        assert_eq!(tracker.health(), before);
        assert_eq!(tracker.observe(tcp("10.0.0.1:80"), true), Some(Turn::Healthy));
    }

    #[test]
    fn what_was_proven_before_a_restart_of_the_probes_stays_so() {
        let before = Health { proven: HashSet::from([backend()]), ..Health::default() };
        let mut tracker = HealthTracker::resuming(before.clone());
        tracker.follow(one_target(1, 1), Origin::Disk);
        assert_eq!(tracker.health(), before);
    }

    #[test]
    fn a_target_keeps_its_health_over_a_change_and_loses_it_with_its_backend() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(1, 1), Origin::Controller);
        tracker.observe(tcp("10.0.0.1:80"), false);
        tracker.follow(one_target(3, 3), Origin::Controller);
        assert!(tracker.health().failing.contains(&backend()));
        tracker.follow(Targets::new(), Origin::Controller);
        assert_eq!(tracker.observe(tcp("10.0.0.1:80"), false), None);
        tracker.follow(one_target(1, 1), Origin::Controller);
        assert_eq!(tracker.health(), Health::default());
    }
}
