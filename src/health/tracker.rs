//! The health of every target: results in, failing backends out.
//!
//! A target starts healthy and becomes unhealthy after `fall` consecutive failed probes; `rise` consecutive passed ones
//! make it healthy again. A target from a state on disk starts unproven, until its first passed probe (CONTROL section
//! 2). A result for a removed target changes nothing.
//!
//! What the process before has saved is taken over with its counts: a target that failed then stays out until it has
//! passed as often as a return takes, whatever the state is from.
//!
//! A target to which no port leads fails whatever its results are, from the next look at the routes on, and has its
//! results back as soon as one does.
//!
//! Flapping is damped: a target that fails again within [`super::history::STEADY_AFTER`] of its return needs twice as
//! many passed probes as the last time, up to 2^[`super::history::DOUBLINGS_MAX`] times `rise`. Once it has stayed healthy
//! for that time, `rise` counts again. Damping belongs to the services that ask a target: it ends when none of them asks
//! any longer, also if another service begins to in the same change. What the process before has saved is of targets
//! alone: a service that asks one of them under the same settings takes its damping over, also if it was created during
//! the restart and the services that asked before are gone. What is known of no target of the first state that has
//! targets or is current is forgotten.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use imbl::HashSet;
use proto::{InitialHealth, Origin};
use tokio::time::Instant;

use super::history::{HealthChange, History, SavedHealth};
use super::target::{Changes, Subjects};
use super::{Question, Target};
use crate::agent::backend_health::{Causes, Health, Subject};

/// Why a backend is not used that its service wants proven first.
const UNPROVEN: &str = "no probe has passed yet";
/// Why a backend fails that no port leads to.
const NO_ROUTE: &str = "no route by a port";

#[derive(Debug)]
struct FollowedTarget {
    subjects: Subjects,
    history: History,
    /// Whether the last probe passed and it is not failing.
    passing: bool,
    /// Whether packets to its backend leave by a port.
    routed: bool,
    /// Whether it failed when the process before ended, and has not returned since.
    failed_before: bool,
}

/// What is asked of a subject, whatever the settings.
type SubjectQuestion = (Subject, SocketAddr, Option<IpAddr>, Question);

fn asked(subject: &Subject, target: &Target) -> SubjectQuestion {
    (subject.clone(), target.address, target.behind_vip, target.question.clone())
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
    targets: HashMap<Target, FollowedTarget>,
    /// The targets of each backend.
    dependence: HashMap<Subject, BTreeSet<Target>>,
    health: Health,
    causes: Causes,
    unpublished: Unpublished,
    before: Health,
    saved: SavedHealth,
    /// Whether the targets of a state have taken over what was known before.
    has_begun: bool,
    from_disk: bool,
    /// Number of targets that pass and are a precedent for others ([`Target::needs_precedent`]).
    precedents: usize,
}

impl HealthTracker {
    /// A tracker without targets. `before` is the last output of an earlier tracker of this process, and `saved` what the
    /// process before knew: targets that failed start as failing, and proven ones stay proven, so that a restart neither
    /// sends flows to dead backends nor cuts off healthy ones.
    #[must_use]
    pub fn resuming(before: Health, saved: SavedHealth) -> Self {
        Self { before, saved, ..Self::default() }
    }

    /// Whether the targets of a state have taken over what was known before.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// All targets with what their results say, for the next process.
    pub fn histories(&self) -> impl Iterator<Item = (&Target, &History)> {
        self.targets.iter().map(|(target, followed)| (target, &followed.history))
    }

    /// Follows changed targets. Existing targets keep their health, also under other settings. Only the backends of these
    /// targets are visited.
    pub fn follow(&mut self, changes: Changes, origin: Origin) {
        let mut affected = BTreeSet::new();
        let has_new = changes.iter().any(|(target, subjects)| subjects.is_some() && !self.targets.contains_key(target));
        let mut left = HashMap::new();
        for (target, new) in &changes {
            let Some(old) = self.targets.get(target) else { continue };
            for subject in &old.subjects {
                if has_new && new.as_ref().is_none_or(|new| !new.contains(subject)) {
                    left.insert(asked(subject, target), old.history.clone());
                }
                affected.insert(subject.clone());
            }
            let was_precedent = old.passing && target.needs_precedent();
            for subject in self.targets[target].subjects.clone() {
                self.forget(&subject, target);
            }
            if new.is_none() {
                self.targets.remove(target);
                affected.extend(self.count_precedent(was_precedent, false));
            }
        }
        let from_disk = !origin.is_current();
        if from_disk != self.from_disk {
            self.from_disk = from_disk;
            self.health.proven.clear();
            self.unpublished.health = true;
            affected.extend(self.dependence.keys().cloned());
        }
        for (target, subjects) in changes.into_iter().filter_map(|(target, subjects)| Some((target, subjects?))) {
            for subject in &subjects {
                self.dependence.entry(subject.clone()).or_default().insert(target.clone());
                affected.insert(subject.clone());
            }
            if let Some(followed) = self.targets.get_mut(&target) {
                let asks_still = |old: &Subject| subjects.iter().any(|new| new.service == old.service);
                if !followed.subjects.iter().any(asks_still) {
                    followed.history.forget_flapping();
                }
                followed.subjects = subjects;
                continue;
            }
            let left = subjects.iter().find_map(|subject| left.remove(&asked(subject, &target)));
            let saved = self.saved.of(&target).filter(|_| left.is_none()).cloned();
            let failed_before = saved.as_ref().is_some_and(|saved| saved.failing);
            // Meanwhile the address may be another tenant's, which a probe that passed before says nothing of.
            let saved = saved.map(|saved| History { proven: saved.proven && !from_disk, ..saved });
            let history = left.or(saved).unwrap_or_else(|| self.first(&subjects));
            self.targets.insert(target, FollowedTarget { subjects, history, passing: false, routed: true, failed_before });
        }
        // A state that is current has all targets that are wanted; later ones are new.
        if !self.targets.is_empty() || origin.is_current() {
            (self.before, self.saved, self.has_begun) = (Health::default(), SavedHealth::default(), true);
        }
        affected.iter().for_each(|subject| self.recompute(subject));
    }

    fn first(&self, subjects: &Subjects) -> History {
        History {
            failing: subjects.iter().any(|backend| self.before.failing.contains(backend)),
            proven: subjects.iter().all(|backend| self.before.proven.contains(backend)),
            ..History::default()
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

    /// Records whether packets to the backend of a target leave by a port.
    pub fn set_routed(&mut self, target: &Target, routed: bool) {
        let Some(followed) = self.targets.get_mut(target).filter(|followed| followed.routed != routed) else { return };
        followed.routed = routed;
        // What it said before says nothing of other nodes now.
        let was_precedent = std::mem::replace(&mut followed.passing, false) && target.needs_precedent();
        let mut affected = followed.subjects.clone();
        affected.extend(self.count_precedent(was_precedent, false));
        affected.iter().for_each(|subject| self.recompute(subject));
    }

    /// All targets.
    pub fn targets(&self) -> impl Iterator<Item = &Target> {
        self.targets.keys()
    }

    /// Records a result, with the cause of a failure; returns how the health of the target changed, if it did.
    pub fn observe(&mut self, target: &Target, result: Result<(), &str>, now: Instant) -> Option<HealthChange> {
        let from_disk = self.from_disk;
        let followed = self.targets.get_mut(target)?;
        let was_precedent = followed.passing && target.needs_precedent();
        let history = &mut followed.history;
        let is_new_cause = result.err().is_some_and(|cause| history.cause.as_deref() != Some(cause));
        if let Err(cause) = result
            && is_new_cause
        {
            history.cause = Some(cause.into());
        }
        let passed = result.is_ok();
        let change = if passed && from_disk && !history.proven && !followed.failed_before {
            (history.failing, history.contrary) = (false, 0);
            Some(HealthChange::Proven)
        } else if passed != history.failing {
            history.contrary = 0;
            None
        } else {
            history.contrary += 1;
            let needed = if history.failing { history.rise(&target.settings) } else { target.settings.fall };
            (history.contrary >= needed).then(|| history.turn(&target.settings, now))
        };
        let is_first = passed && !history.proven && target.settings.initial == InitialHealth::Unhealthy;
        history.proven |= passed;
        followed.failed_before &= history.failing;
        followed.passing = passed && !history.failing && followed.routed;
        let is_precedent = followed.passing && target.needs_precedent();
        let is_told = change.is_some() || is_first || (followed.history.failing && is_new_cause);
        let mut affected = if is_told { followed.subjects.clone() } else { BTreeSet::new() };
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
        let concerned = self.targets.iter().filter(|(target, followed)| followed.history.failing && target.needs_precedent());
        concerned.flat_map(|(_, followed)| followed.subjects.iter().cloned()).collect()
    }

    /// Evaluates the targets of one backend.
    fn recompute(&mut self, subject: &Subject) {
        let targets = self.dependence.get(subject).into_iter().flatten();
        let mut followed = targets.filter_map(|target| Some((target, self.targets.get(target)?))).peekable();
        let is_unhealthy_at_first = |target: &Target| target.settings.initial == InitialHealth::Unhealthy;
        let at_first = followed.clone().any(|(target, _)| is_unhealthy_at_first(target) && target.question != Question::Route);
        let needs_proof = self.from_disk || at_first;
        // What no node may answer proves nothing by silence.
        let counts = |target: &Target| self.from_disk || !target.needs_precedent();
        let is_proven = |(target, of): (&Target, &FollowedTarget)| of.history.proven || !counts(target);
        let proven = needs_proof && followed.peek().is_some() && followed.clone().all(is_proven);
        let precedents = self.precedents;
        let cause_of = move |(target, followed): (&Target, &FollowedTarget)| {
            if !followed.routed {
                return Some(Some(NO_ROUTE.into()));
            }
            let counts = followed.history.failing && (precedents > 0 || !target.needs_precedent());
            counts.then(|| followed.history.cause.clone())
        };
        let failing = followed.find_map(cause_of);
        let (fails, cause) = (failing.is_some(), failing.flatten());
        let cause = cause.or_else(|| (at_first && !proven).then(|| UNPROVEN.into()));
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

    /// Whether a target is followed.
    #[must_use]
    pub fn follows(&self, target: &Target) -> bool {
        self.targets.contains_key(target)
    }

    /// The backends of a target.
    pub fn subjects_of(&self, target: &Target) -> impl Iterator<Item = &Subject> {
        self.targets.get(target).into_iter().flat_map(|followed| &followed.subjects)
    }

    /// Results of a target in a row that contradict its health, and as many as change it.
    #[must_use]
    pub fn contrary(&self, target: &Target) -> Option<(u32, u32)> {
        let history = &self.targets.get(target)?.history;
        let needed = if history.failing { history.rise(&target.settings) } else { target.settings.fall };
        Some((history.contrary, needed))
    }

    /// Whether another target of a backend says more of its health than this one: one that counts more than one that does
    /// not, then one that fails, then one whose last results contradict its health.
    #[must_use]
    pub fn is_outweighed(&self, backend: &Subject, target: &Target) -> bool {
        let weight = |target: &Target| {
            let history = &self.targets.get(target).filter(|_| self.counts(target))?.history;
            Some((history.failing, history.contrary > 0))
        };
        let own = weight(target);
        self.targets_of(backend).any(|other| weight(other) > own)
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
mod damping;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proto::{HealthCheck, Protocol};

    use super::super::history::STEADY_AFTER;
    use super::super::target::TargetTable;
    use super::super::target::tests::{changes, node_health, service, services, subject, tcp, under};
    use super::*;
    use crate::agent::persist::sealed::Moment;

    pub(super) const BACKEND: &str = "10.0.0.1:80";

    pub(super) fn one_target(rise: u32, fall: u32) -> Changes {
        let health = HealthCheck { rise, fall, ..HealthCheck::default() };
        changes(vec![service("web", Protocol::Tcp, &[BACKEND], health)])
    }

    /// The target of [`one_target`].
    pub(super) fn target(rise: u32, fall: u32) -> Target {
        under(&HealthCheck { rise, fall, ..HealthCheck::default() }, tcp(BACKEND))
    }

    pub(super) fn backend() -> Subject {
        subject("web", Protocol::Tcp, BACKEND)
    }

    pub(super) fn failing(all: &[Subject]) -> Health {
        Health { failing: all.iter().cloned().collect(), ..Health::default() }
    }

    /// Records a result of a target at the time of the call.
    pub(super) fn observe(tracker: &mut HealthTracker, target: &Target, passed: bool) -> Option<HealthChange> {
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
                tracker.observe(&target(rise, fall), if *passed { Ok(()) } else { Err("it failed") }, now);
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
            steps in prop::collection::vec((0u8..4, 0u8..3, any::<bool>()), 0..60), from_disk in any::<bool>(),
        ) {
            let health = HealthCheck { node_health_port: Some(10_256), fall: 1, rise: 1, ..HealthCheck::default() };
            let of = |n: u8| changes(vec![service("web", Protocol::Tcp, &[&format!("10.0.0.{n}:80")], health.clone())]);
            let targets_of = |n: u8| {
                [tcp(&format!("10.0.0.{n}:80")), node_health(&format!("10.0.0.{n}:10256"))].map(|target| under(&health, target))
            };
            let mut tracker = HealthTracker::default();
            for (n, step, yes) in steps {
                match step {
                    0 => {
                        let changes = of(n).into_iter().map(|(target, subjects)| (target, subjects.filter(|_| yes))).collect();
                        tracker.follow(changes, if from_disk { Origin::Disk } else { Origin::Controller });
                    }
                    1 => targets_of(n).iter().for_each(|target| _ = observe(&mut tracker, target, yes)),
                    _ => targets_of(n).iter().for_each(|target| tracker.set_routed(target, yes)),
                }
                let passing = tracker.targets.iter().filter(|(target, of)| target.needs_precedent() && of.passing).count();
                prop_assert_eq!(tracker.precedents, passing);
                for n in 0..4 {
                    let backend = subject("web", Protocol::Tcp, &format!("10.0.0.{n}:80"));
                    let all = targets_of(n).map(|target| (tracker.targets.get(&target), passing > 0 || !target.needs_precedent()));
                    let fails = all.iter().any(|(of, counts)| of.is_some_and(|of| !of.routed || (*counts && of.history.failing)));
                    let proven = from_disk && all.iter().all(|(of, _)| of.is_some_and(|of| of.history.proven));
                    prop_assert_eq!(tracker.health().failing.contains(&backend), fails);
                    prop_assert_eq!(tracker.health().proven.contains(&backend), proven);
                    prop_assert_eq!(tracker.causes().contains_key(&backend), fails);
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
        let target = target(2, 1);
        let mut fails = |why: &str| {
            tracker.observe(&target, Err(why), Instant::now());
            tracker.causes()[&backend()].to_string()
        };
        assert_eq!([fails("refused"), fails("no answer")], ["refused", "no answer"]);
        tracker.follow(changes(Vec::new()), Origin::Controller);
        tracker.follow([(target.clone(), None)].into(), Origin::Controller);
        assert!(tracker.causes().is_empty() && *tracker.health() == Health::default());
    }

    #[test]
    fn from_disk_one_passed_probe_is_needed_whatever_rise_says() {
        let mut tracker = HealthTracker::default();
        let target = target(5, 1);
        tracker.follow(one_target(5, 1), Origin::Disk);
        assert!(tracker.health().proven.is_empty());
        assert_eq!(observe(&mut tracker, &target, false), Some(HealthChange::Failing(5)));
        assert_eq!(observe(&mut tracker, &target, true), Some(HealthChange::Proven));
        assert_eq!(*tracker.health(), Health { failing: HashSet::new(), proven: HashSet::unit(backend()) });
        tracker.follow(one_target(5, 1), Origin::Controller);
        assert_eq!(*tracker.health(), Health::default());
    }

    #[test]
    fn a_backend_with_two_targets_needs_both() {
        let health = HealthCheck { node_health_port: Some(31_000), fall: 1, ..HealthCheck::default() };
        let [probe, word] = [tcp(BACKEND), node_health("10.0.0.1:31000")].map(|target| under(&health, target));
        let mut tracker = HealthTracker::default();
        tracker.follow(changes(vec![service("web", Protocol::Tcp, &[BACKEND], health)]), Origin::Disk);
        observe(&mut tracker, &probe, true);
        assert!(tracker.health().proven.is_empty());
        observe(&mut tracker, &word, true);
        assert!(tracker.health().proven.contains(&backend()));
        observe(&mut tracker, &word, false);
        assert!(tracker.health().failing.contains(&backend()));
    }

    #[test]
    fn one_service_that_gives_up_early_takes_no_backend_from_another() {
        let hasty = HealthCheck { fall: 1, rise: 100, ..HealthCheck::default() };
        let of = |name, health: &HealthCheck| service(name, Protocol::Tcp, &[BACKEND], health.clone());
        let mut tracker = HealthTracker::default();
        let both = vec![of("web", &HealthCheck::default()), of("evil", &hasty)];
        tracker.follow(changes(both), Origin::Controller);
        let hasty = under(&hasty, tcp(BACKEND));
        for passed in [false, true, true] {
            observe(&mut tracker, &tcp(BACKEND), passed);
            observe(&mut tracker, &hasty, passed);
        }
        assert_eq!(*tracker.health(), failing(&[subject("evil", Protocol::Tcp, BACKEND)]));
    }

    #[test]
    fn what_kube_proxy_says_of_a_node_fails_it_for_that_service_alone() {
        let local = HealthCheck { node_health_port: Some(31_000), fall: 1, rise: 1, ..HealthCheck::default() };
        let web = service("web", Protocol::Tcp, &[BACKEND], local.clone());
        let also = service("also", Protocol::Tcp, &[BACKEND], HealthCheck::default());
        let mut tracker = HealthTracker::default();
        tracker.follow(changes(vec![web, also]), Origin::Controller);
        observe(&mut tracker, &under(&local, node_health("10.0.0.1:31000")), false);
        assert_eq!(*tracker.health(), failing(&[subject("web", Protocol::Tcp, BACKEND)]));
    }

    #[test]
    fn the_port_of_kube_proxy_counts_only_while_some_node_answers_there() {
        let health = HealthCheck { node_health_port: Some(10_256), fall: 1, rise: 1, ..HealthCheck::default() };
        let [one, two] = [1, 2].map(|n| subject("web", Protocol::Tcp, &format!("10.0.0.{n}:80")));
        let [ask_one, ask_two] = [1, 2].map(|n| under(&health, node_health(&format!("10.0.0.{n}:10256"))));
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
        let mut tracker = HealthTracker::resuming(before.clone(), SavedHealth::default());
        tracker.follow(one_target(1, 1), Origin::Controller);
        assert_eq!(*tracker.health(), before);
        assert_eq!(observe(&mut tracker, &target(1, 1), true), Some(HealthChange::Healthy));
    }

    #[test]
    fn what_was_proven_before_a_restart_of_the_probes_stays_so() {
        let before = Health { proven: HashSet::unit(backend()), ..Health::default() };
        let mut tracker = HealthTracker::resuming(before.clone(), SavedHealth::default());
        tracker.follow(one_target(1, 1), Origin::Disk);
        assert_eq!(*tracker.health(), before);
    }

    #[test]
    fn a_target_keeps_its_health_over_a_change_and_loses_it_with_its_backend() {
        let mut tracker = HealthTracker::default();
        let mut table = TargetTable::default();
        let web = |rise, fall| {
            let health = HealthCheck { rise, fall, ..HealthCheck::default() };
            services(vec![service("web", Protocol::Tcp, &[BACKEND], health)])
        };
        tracker.follow(table.follow(&web(1, 1)), Origin::Controller);
        observe(&mut tracker, &target(1, 1), false);
        tracker.follow(table.follow(&web(3, 3)), Origin::Controller);
        assert!(tracker.health().failing.contains(&backend()));
        assert_eq!(tracker.causes()[&backend()].as_ref(), "it failed");
        tracker.follow(table.follow(&services(Vec::new())), Origin::Controller);
        assert_eq!(observe(&mut tracker, &target(3, 3), false), None);
        tracker.follow(table.follow(&web(1, 1)), Origin::Controller);
        assert_eq!(*tracker.health(), Health::default());
    }

    #[test]
    fn what_failed_before_a_restart_of_the_process_stays_out_until_it_has_passed_as_often_as_a_return_takes() {
        let target = target(2, 1);
        for origin in [Origin::Controller, Origin::LastProcess, Origin::Disk] {
            let mut last = HealthTracker::default();
            last.follow(one_target(2, 1), Origin::Controller);
            // It flaps: out, in, and out again, for which it needs four passes; one of them has been seen.
            for passed in [false, true, true, false, true] {
                observe(&mut last, &target, passed);
            }
            let time = Moment::now();
            let bytes = SavedHealth::encode(last.histories(), Instant::now(), time);
            let saved = SavedHealth::decode(&bytes, Instant::now(), time).unwrap();
            let mut tracker = HealthTracker::resuming(Health::default(), saved);
            tracker.follow(one_target(2, 1), origin);
            assert!(tracker.health().failing.contains(&backend()), "{origin:?}");
            assert_eq!(tracker.causes()[&backend()].as_ref(), "it failed");
            let turns = [true; 3].map(|passed| observe(&mut tracker, &target, passed));
            assert_eq!(turns, [None, None, Some(HealthChange::Healthy)], "{origin:?}");
            assert_eq!(tracker.health().proven.contains(&backend()), origin == Origin::Disk);
        }
    }

    #[test]
    fn what_passed_before_a_restart_of_the_process_proves_nothing_under_a_state_from_disk() {
        let mut last = HealthTracker::default();
        last.follow(one_target(1, 1), Origin::Controller);
        observe(&mut last, &target(1, 1), true);
        let time = Moment::now();
        let bytes = SavedHealth::encode(last.histories(), Instant::now(), time);
        let saved = SavedHealth::decode(&bytes, Instant::now(), time).unwrap();
        let mut tracker = HealthTracker::resuming(Health::default(), saved);
        tracker.follow(one_target(1, 1), Origin::Disk);
        assert_eq!(*tracker.health(), Health::default());
        assert_eq!(observe(&mut tracker, &target(1, 1), true), Some(HealthChange::Proven));
    }

    #[test]
    fn where_backends_are_unhealthy_at_first_one_passed_probe_proves_each_also_over_a_restart() {
        let health = HealthCheck { initial: InitialHealth::Unhealthy, node_health_port: Some(31_000), ..HealthCheck::default() };
        let [probe, word] = [tcp(BACKEND), node_health("10.0.0.1:31000")].map(|target| under(&health, target));
        let web = || changes(vec![service("web", Protocol::Tcp, &[BACKEND], health.clone())]);
        let mut tracker = HealthTracker::default();
        tracker.follow(web(), Origin::Controller);
        observe(&mut tracker, &probe, true);
        assert_eq!(*tracker.health(), Health::default());
        assert_eq!(tracker.causes()[&backend()].as_ref(), "no probe has passed yet");
        tracker.take_unpublished();
        observe(&mut tracker, &word, true);
        assert!(tracker.take_unpublished().health);
        let proven = Health { proven: HashSet::unit(backend()), ..Health::default() };
        assert!(*tracker.health() == proven && tracker.causes().is_empty());
        let time = Moment::now();
        let bytes = SavedHealth::encode(tracker.histories(), Instant::now(), time);
        let mut next = HealthTracker::resuming(Health::default(), SavedHealth::decode(&bytes, Instant::now(), time).unwrap());
        next.follow(web(), Origin::Controller);
        assert_eq!(*next.health(), proven);
        next.follow([(probe, None), (word, None)].into(), Origin::Controller);
        assert_eq!(*next.health(), Health::default());
    }

    #[test]
    fn without_a_route_a_backend_fails_and_with_one_its_results_count_again() {
        let mut tracker = HealthTracker::default();
        tracker.follow(one_target(1, 1), Origin::Controller);
        let target = target(1, 1);
        for found in [true, false] {
            observe(&mut tracker, &target, found);
            tracker.set_routed(&target, false);
            assert_eq!(tracker.causes()[&backend()].as_ref(), "no route by a port");
            assert!(tracker.health().failing.contains(&backend()));
            tracker.set_routed(&target, true);
            assert_eq!(tracker.health().failing.contains(&backend()), !found);
        }
        assert_eq!(tracker.causes()[&backend()].as_ref(), "it failed");
    }
}
