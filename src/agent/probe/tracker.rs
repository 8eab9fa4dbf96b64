//! The health of every target: results in, failing backends out.
//!
//! A target starts healthy and becomes unhealthy after `fall` consecutive failed probes; `rise` consecutive passed ones
//! make it healthy again. A target from a state on disk starts unproven, until its first passed probe (CONTROL section
//! 2). A result for a removed target changes nothing.
//!
//! Flapping is damped: a target that fails again within [`STEADY_AFTER`] of its return needs twice as many passed probes
//! as the last time, up to [`DAMPING_MAX`] times `rise`. Once it has stayed healthy for that time, `rise` counts again.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use imbl::HashSet;
use proto::Origin;
use tokio::time::Instant;

use super::Target;
use super::target::{Changes, Check, Subject};

/// How long a target stays healthy before its earlier failures are forgotten: as long as a drain.
const STEADY_AFTER: Duration = Duration::from_secs(300);
/// Maximum factor of `rise`: a target that flaps at the default settings is out for 32 s at a time, of 3 s that a
/// failure takes.
const DAMPING_MAX: u32 = 16;

/// Health of backends; a copy costs nothing. A backend in neither set is usable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Backends with at least one failing target.
    pub failing: HashSet<Subject>,
    /// For a state from disk: backends whose targets have all passed a probe. Empty for a controller's state, which
    /// needs no proof.
    pub proven: HashSet<Subject>,
}

/// Why a backend fails: the target, and what its last failed probe found.
pub type Causes = imbl::HashMap<Subject, Arc<str>>;

/// A change of a target's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// It became unhealthy, and needs this many passed probes to return.
    Failing(u32),
    /// It became healthy.
    Healthy,
    /// It passed its first probe after a start from disk.
    Proven,
}

#[derive(Debug)]
struct TargetHealth {
    check: Check,
    failing: bool,
    proven: bool,
    /// Whether the last probe passed and it is not failing.
    passing: bool,
    /// Consecutive results that contradict `failing`.
    contrary: u32,
    /// Factor of `rise` for the next return.
    damping: u32,
    healthy_since: Option<Instant>,
    cause: Option<Arc<str>>,
}

impl TargetHealth {
    /// Passed probes that it needs to return.
    fn rise(&self) -> u32 {
        self.check.rise.saturating_mul(self.damping)
    }

    fn turn(&mut self, now: Instant) -> HealthChange {
        self.failing = !self.failing;
        self.contrary = 0;
        if !self.failing {
            self.healthy_since = Some(now);
            return HealthChange::Healthy;
        }
        let is_flapping = self.healthy_since.is_some_and(|since| now.duration_since(since) < STEADY_AFTER);
        self.damping = if is_flapping { (self.damping * 2).min(DAMPING_MAX) } else { 1 };
        HealthChange::Failing(self.rise())
    }
}

/// What changed since it was last taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unpublished {
    /// The health of a backend.
    pub health: bool,
    /// The cause of a failure.
    pub causes: bool,
}

/// The health of all targets.
#[derive(Debug, Default)]
pub struct HealthTracker {
    targets: HashMap<Target, TargetHealth>,
    /// The targets of each backend.
    dependence: HashMap<Subject, BTreeSet<Target>>,
    health: Health,
    causes: Causes,
    unpublished: Unpublished,
    before: Health,
    from_disk: bool,
    /// Number of targets that pass and are a precedent for others ([`Target::needs_precedent`]).
    precedents: usize,
}

impl HealthTracker {
    /// A tracker without targets. `before` is the last output of an earlier tracker: targets that failed start as
    /// failing, and proven ones stay proven, so that a restart of the task neither sends flows to dead backends nor
    /// cuts off healthy ones.
    #[must_use]
    pub fn resuming(before: Health) -> Self {
        Self { before, ..Self::default() }
    }

    /// Follows changed targets. Existing targets keep their health. Only the backends of these targets are visited.
    pub fn follow(&mut self, changes: Changes, origin: Origin) {
        let mut affected = BTreeSet::new();
        for (target, check) in changes {
            let old = self.targets.remove(&target);
            for subject in old.iter().flat_map(|old| &old.check.subjects) {
                self.forget(subject, &target);
                affected.insert(subject.clone());
            }
            let Some(check) = check else {
                let was_precedent = old.is_some_and(|old| old.passing) && target.needs_precedent();
                affected.extend(self.count_precedent(was_precedent, false));
                continue;
            };
            for subject in &check.subjects {
                self.dependence.entry(subject.clone()).or_default().insert(target.clone());
                affected.insert(subject.clone());
            }
            let followed = match old {
                Some(old) => TargetHealth { check, ..old },
                None => self.first(check),
            };
            self.targets.insert(target, followed);
        }
        let from_disk = !origin.is_current();
        if from_disk != self.from_disk {
            self.from_disk = from_disk;
            self.health.proven.clear();
            self.unpublished.health = true;
            affected.extend(self.dependence.keys().cloned());
        }
        self.before = Health::default();
        affected.iter().for_each(|subject| self.recompute(subject));
    }

    fn first(&self, check: Check) -> TargetHealth {
        TargetHealth {
            failing: check.subjects.iter().any(|backend| self.before.failing.contains(backend)),
            proven: check.subjects.iter().all(|backend| self.before.proven.contains(backend)),
            passing: false,
            contrary: 0,
            damping: 1,
            healthy_since: None,
            cause: None,
            check,
        }
    }

    fn forget(&mut self, subject: &Subject, target: &Target) {
        if let Some(targets) = self.dependence.get_mut(subject) {
            targets.remove(target);
            if targets.is_empty() {
                self.dependence.remove(subject);
            }
        }
    }

    /// Records a result, with the cause of a failure; returns how the health of the target changed, if it did.
    pub fn observe(&mut self, target: &Target, result: Result<(), &str>, now: Instant) -> Option<HealthChange> {
        let from_disk = self.from_disk;
        let followed = self.targets.get_mut(target)?;
        let was_precedent = followed.passing && target.needs_precedent();
        let is_new_cause = result.err().is_some_and(|cause| followed.cause.as_deref() != Some(cause));
        if let Err(cause) = result
            && is_new_cause
        {
            followed.cause = Some(cause.into());
        }
        let passed = result.is_ok();
        let change = if passed && from_disk && !followed.proven {
            (followed.failing, followed.contrary) = (false, 0);
            Some(HealthChange::Proven)
        } else if passed != followed.failing {
            followed.contrary = 0;
            None
        } else {
            followed.contrary += 1;
            let needed = if followed.failing { followed.rise() } else { followed.check.fall };
            (followed.contrary >= needed).then(|| followed.turn(now))
        };
        followed.proven |= passed;
        followed.passing = passed && !followed.failing;
        let is_precedent = followed.passing && target.needs_precedent();
        let is_told = change.is_some() || (followed.failing && is_new_cause);
        let mut affected = if is_told { followed.check.subjects.clone() } else { BTreeSet::new() };
        affected.extend(self.count_precedent(was_precedent, is_precedent));
        affected.iter().for_each(|subject| self.recompute(subject));
        change
    }

    /// Counts a target that became a precedent or no longer is one. Returns the backends for which that matters: with
    /// the first precedent the failures of other targets begin to count, with the last one they cease to.
    fn count_precedent(&mut self, was: bool, is: bool) -> BTreeSet<Subject> {
        let before = self.precedents;
        self.precedents = before + usize::from(is) - usize::from(was);
        if (before == 0) == (self.precedents == 0) {
            return BTreeSet::new();
        }
        let concerned = self.targets.iter().filter(|(target, followed)| followed.failing && target.needs_precedent());
        concerned.flat_map(|(_, followed)| followed.check.subjects.iter().cloned()).collect()
    }

    /// Evaluates the targets of one backend.
    fn recompute(&mut self, subject: &Subject) {
        let targets = self.dependence.get(subject).into_iter().flatten();
        let mut followed = targets.filter_map(|target| Some((target, self.targets.get(target)?))).peekable();
        let proven = self.from_disk && followed.peek().is_some() && followed.clone().all(|(_, followed)| followed.proven);
        let failing = followed.find(|(target, followed)| followed.failing && (self.precedents > 0 || !target.needs_precedent()));
        let (fails, cause) = (failing.is_some(), failing.and_then(|(_, followed)| followed.cause.clone()));
        self.unpublished.health |= put(&mut self.health.failing, subject, fails) | put(&mut self.health.proven, subject, proven);
        if self.causes.get(subject) != cause.as_ref() {
            self.unpublished.causes = true;
            match cause {
                Some(cause) => self.causes.insert(subject.clone(), cause),
                None => self.causes.remove(subject),
            };
        }
    }

    /// What changed since the last call.
    pub const fn take_unpublished(&mut self) -> Unpublished {
        std::mem::replace(&mut self.unpublished, Unpublished { health: false, causes: false })
    }

    /// The settings of a target; `None` if it was removed.
    #[must_use]
    pub fn check(&self, target: &Target) -> Option<&Check> {
        self.targets.get(target).map(|followed| &followed.check)
    }

    /// The targets of a backend.
    pub fn targets_of(&self, subject: &Subject) -> impl Iterator<Item = &Target> {
        self.dependence.get(subject).into_iter().flatten()
    }

    /// Whether failures of this target count now.
    #[must_use]
    pub fn counts(&self, target: &Target) -> bool {
        self.precedents > 0 || !target.needs_precedent()
    }

    /// The health of backends according to the results.
    #[must_use]
    pub const fn health(&self) -> &Health {
        &self.health
    }

    /// Why the failing backends fail.
    #[must_use]
    pub const fn causes(&self) -> &Causes {
        &self.causes
    }
}

/// Makes `subject` a member of `set` or not; returns whether that changes the set.
fn put(set: &mut HashSet<Subject>, subject: &Subject, is_member: bool) -> bool {
    if set.contains(subject) == is_member {
        return false;
    }
    if is_member {
        set.insert(subject.clone())
    } else {
        set.remove(subject)
    };
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::{HealthCheck, Protocol};

    use super::super::target::tests::{changes, node_health, service, subject, tcp};
    use super::*;

    const BACKEND: &str = "10.0.0.1:80";

    fn one_target(rise: u32, fall: u32) -> Changes {
        let health = HealthCheck { rise, fall, ..HealthCheck::default() };
        changes(vec![service("web", Protocol::Tcp, &[BACKEND], health)])
    }

    fn backend() -> Subject {
        subject(None, Protocol::Tcp, BACKEND)
    }

    fn failing(all: &[Subject]) -> Health {
        Health { failing: all.iter().cloned().collect(), ..Health::default() }
    }

    /// Records a result of a target at the time of the call.
    fn observe(tracker: &mut HealthTracker, target: &Target, passed: bool) -> Option<HealthChange> {
        tracker.observe(target, if passed { Ok(()) } else { Err("it failed") }, Instant::now())
    }

    proptest! {
        /// The model examines the whole history: a target changes when the last `fall` (or `rise`) results since its
        /// last change all contradict its health. Failures are so far apart that nothing is damped.
        #[test]
        fn health_turns_after_as_many_contrary_results_in_a_row_as_configured(
            rise in 1u32..4, fall in 1u32..4, results in prop::collection::vec(any::<bool>(), 0..40),
        ) {
            let mut tracker = HealthTracker::default();
            tracker.follow(one_target(rise, fall), Origin::Controller);
            let (mut failing, mut turned_at) = (false, 0);
            let start = Instant::now();
            for (i, passed) in (0u32..).zip(&results) {
                let now = start + STEADY_AFTER * i;
                tracker.observe(&tcp(BACKEND), if *passed { Ok(()) } else { Err("it failed") }, now);
                let needed = if failing { rise } else { fall } as usize;
                let since = &results[turned_at..=i as usize];
                if since.len() >= needed && since[since.len() - needed..].iter().all(|r| *r == failing) {
                    (failing, turned_at) = (!failing, i as usize + 1);
                }
                prop_assert_eq!(tracker.health().failing.contains(&backend()), failing);
                prop_assert_eq!(tracker.causes().contains_key(&backend()), failing);
            }
        }

        /// After any sequence of changes and results, the health of each backend is that of its targets.
        #[test]
        fn the_health_of_backends_is_that_of_their_targets_whatever_came_before(
            steps in prop::collection::vec((0u8..4, any::<bool>(), any::<bool>()), 0..60), from_disk in any::<bool>(),
        ) {
            let node = |n: u8, port: u16| node_health(&format!("10.0.0.{n}:{port}"));
            let of = |n: u8| {
                let health = HealthCheck { node_health_port: Some(10_256), fall: 1, rise: 1, ..HealthCheck::default() };
                changes(vec![service("web", Protocol::Tcp, &[&format!("10.0.0.{n}:80")], health)])
            };
            let mut tracker = HealthTracker::default();
            for (n, is_change, yes) in steps {
                if is_change {
                    let changes = of(n).into_iter().map(|(target, check)| (target, check.filter(|_| yes))).collect();
                    let origin = if from_disk { Origin::Disk } else { Origin::Controller };
                    tracker.follow(changes, origin);
                } else {
                    observe(&mut tracker, &node(n, 10_256), yes);
                    observe(&mut tracker, &tcp(&format!("10.0.0.{n}:80")), yes);
                }
                let passing = tracker.targets.iter().filter(|(target, of)| target.needs_precedent() && of.passing).count();
                prop_assert_eq!(tracker.precedents, passing);
                for n in 0..4 {
                    for (service, target) in [(None, tcp(&format!("10.0.0.{n}:80"))), (Some("web"), node(n, 10_256))] {
                        let subject = subject(service, Protocol::Tcp, &format!("10.0.0.{n}:80"));
                        let of = tracker.targets.get(&target);
                        let counts = passing > 0 || !target.needs_precedent();
                        prop_assert_eq!(tracker.health().failing.contains(&subject), counts && of.is_some_and(|of| of.failing));
                        prop_assert_eq!(tracker.health().proven.contains(&subject), from_disk && of.is_some_and(|of| of.proven));
                    }
                }
            }
        }
    }

    #[test]
    fn a_new_target_is_used_at_once_and_leaves_after_fall_failures() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(2, 3), Origin::Controller);
        assert_eq!(*tracker.health(), Health::default());
        let turns = [false; 3].map(|result| observe(&mut tracker, &tcp(BACKEND), result));
        assert_eq!(turns, [None, None, Some(HealthChange::Failing(2))]);
    }

    #[test]
    fn the_cause_of_a_failure_is_the_newest_one() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(2, 1), Origin::Controller);
        let mut fails = |why: &str| {
            tracker.observe(&tcp(BACKEND), Err(why), Instant::now());
            tracker.causes()[&backend()].to_string()
        };
        assert_eq!([fails("refused"), fails("no answer")], ["refused", "no answer"]);
        tracker.follow(changes(Vec::new()), Origin::Controller);
        tracker.follow([(tcp(BACKEND), None)].into(), Origin::Controller);
        assert!(tracker.causes().is_empty() && *tracker.health() == Health::default());
    }

    #[test]
    fn a_target_that_flaps_needs_twice_as_many_passes_each_time_until_it_stays_healthy() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(2, 1), Origin::Controller);
        let (target, mut now) = (tcp(BACKEND), Instant::now());
        let mut passes_to_return = |tracker: &mut HealthTracker, healthy_for: Duration| {
            now += healthy_for;
            let Some(HealthChange::Failing(needed)) = tracker.observe(&target, Err("it failed"), now) else { panic!() };
            for passes in 1.. {
                now += Duration::from_secs(1);
                if tracker.observe(&target, Ok(()), now) == Some(HealthChange::Healthy) {
                    assert_eq!(passes, needed);
                    return needed;
                }
            }
            unreachable!()
        };
        let soon = STEADY_AFTER.checked_sub(Duration::from_secs(1)).unwrap();
        let found: Vec<u32> = (0..7).map(|_| passes_to_return(&mut tracker, soon)).collect();
        assert_eq!(found, [2, 4, 8, 16, 32, 32, 32]);
        assert_eq!(passes_to_return(&mut tracker, STEADY_AFTER), 2);
    }

    #[test]
    fn from_disk_one_passed_probe_is_needed_whatever_rise_says() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(5, 1), Origin::Disk);
        assert!(tracker.health().proven.is_empty());
        assert_eq!(observe(&mut tracker, &tcp(BACKEND), false), Some(HealthChange::Failing(5)));
        assert_eq!(observe(&mut tracker, &tcp(BACKEND), true), Some(HealthChange::Proven));
        assert_eq!(*tracker.health(), Health { failing: HashSet::new(), proven: HashSet::unit(backend()) });
        tracker.follow(one_target(5, 1), Origin::Controller);
        assert_eq!(*tracker.health(), Health::default());
    }

    #[test]
    fn a_backend_with_two_targets_needs_both() {
        let at = |port| HealthCheck { port, fall: 1, ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &[BACKEND], at(None));
        let also = service("also", Protocol::Tcp, &[BACKEND], at(Some(9000)));
        let mut tracker = HealthTracker::default();
        tracker.follow(changes(vec![web, also]), Origin::Disk);
        observe(&mut tracker, &tcp(BACKEND), true);
        assert!(tracker.health().proven.is_empty());
        observe(&mut tracker, &tcp("10.0.0.1:9000"), true);
        assert!(tracker.health().proven.contains(&backend()));
        observe(&mut tracker, &tcp("10.0.0.1:9000"), false);
        assert!(tracker.health().failing.contains(&backend()));
    }

    #[test]
    fn what_kube_proxy_says_of_a_node_fails_it_for_that_service_alone() {
        let local = HealthCheck { node_health_port: Some(31_000), fall: 1, rise: 1, ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &[BACKEND], local);
        let also = service("also", Protocol::Tcp, &[BACKEND], HealthCheck::default());
        let mut tracker = HealthTracker::default();
        tracker.follow(changes(vec![web, also]), Origin::Controller);
        observe(&mut tracker, &node_health("10.0.0.1:31000"), false);
        assert_eq!(*tracker.health(), failing(&[subject(Some("web"), Protocol::Tcp, BACKEND)]));
    }

    #[test]
    fn the_port_of_kube_proxy_counts_only_while_some_node_answers_there() {
        let health = HealthCheck { node_health_port: Some(10_256), fall: 1, rise: 1, ..HealthCheck::default() };
        let [one, two] = [1, 2].map(|n| subject(Some("web"), Protocol::Tcp, &format!("10.0.0.{n}:80")));
        let [ask_one, ask_two] = [1, 2].map(|n| node_health(&format!("10.0.0.{n}:10256")));
        let mut tracker = HealthTracker::default();
        tracker.follow(changes(vec![service("web", Protocol::Tcp, &[BACKEND, "10.0.0.2:80"], health)]), Origin::Controller);
        observe(&mut tracker, &ask_one, false);
        observe(&mut tracker, &ask_two, false);
        assert_eq!(*tracker.health(), Health::default(), "this cluster has nothing there");
        observe(&mut tracker, &ask_two, true);
        assert_eq!(*tracker.health(), failing(&[one]), "it has, and one node fails");
        observe(&mut tracker, &ask_two, false);
        assert_eq!(*tracker.health(), Health::default());
        observe(&mut tracker, &ask_one, true);
        assert_eq!(*tracker.health(), failing(&[two]));
        tracker.follow([(ask_one, None)].into(), Origin::Controller);
        assert_eq!(*tracker.health(), Health::default(), "the node that answered is gone");
    }

    #[test]
    fn what_failed_before_a_restart_of_the_probes_starts_failing() {
        let before = failing(&[backend()]);
        let mut tracker = HealthTracker::resuming(before.clone());
        tracker.follow(one_target(1, 1), Origin::Controller);
        assert_eq!(*tracker.health(), before);
        assert_eq!(observe(&mut tracker, &tcp(BACKEND), true), Some(HealthChange::Healthy));
    }

    #[test]
    fn what_was_proven_before_a_restart_of_the_probes_stays_so() {
        let before = Health { proven: HashSet::unit(backend()), ..Health::default() };
        let mut tracker = HealthTracker::resuming(before.clone());
        tracker.follow(one_target(1, 1), Origin::Disk);
        assert_eq!(*tracker.health(), before);
    }

    #[test]
    fn a_target_keeps_its_health_over_a_change_and_loses_it_with_its_backend() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(1, 1), Origin::Controller);
        observe(&mut tracker, &tcp(BACKEND), false);
        tracker.follow(one_target(3, 3), Origin::Controller);
        assert!(tracker.health().failing.contains(&backend()));
        tracker.follow([(tcp(BACKEND), None)].into(), Origin::Controller);
        assert_eq!(observe(&mut tracker, &tcp(BACKEND), false), None);
        tracker.follow(one_target(1, 1), Origin::Controller);
        assert_eq!(*tracker.health(), Health::default());
    }
}
