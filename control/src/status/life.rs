//! One step of the life of a Service: what is written to its object and reported to its owner, and when to look again.
//!
//! Invariant: what is due follows from the life, the plan, the gateways and the time alone. A write contains only
//! differences from the known content of the object: after our own write to a version, the content that we wrote counts,
//! not that version.
//! Deliberately not here: the states, and what gateways get (`plan::service_life`), and the content of the object (`goal`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::conditions;
use super::dispute::{self, Dispute};
use super::goal::{LifeStep, Situation, Timers, remarks};
use crate::plan::service_life::{GatewaysView, LifeState, PlannedObject};
use crate::plan::{Cleanup, LeftBy, WantedStatus};
use objects::status::StatusWrite;
use objects::{Condition, ConditionType, OwnedParts, ServiceObject};

/// Longest time that a deletion waits for gateways.
pub(super) const GATEWAYS_WAITED_FOR: Duration = Duration::from_secs(10);
/// Time for the installation of the Service's class, which needs at most `GATEWAYS_WAITED_FOR`; three times that.
pub(super) const OTHERS_WAITED_FOR: Duration = Duration::from_secs(30);

/// The last write, and the content of the object after it.
#[derive(Debug)]
struct Sent {
    write: StatusWrite,
    after: OwnedParts,
    is_accepted: bool,
}

/// A Service that sluice writes to: its state, and what is remembered of it.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) claim: PlannedObject,
    pub(super) state: LifeState,
    /// Boxed, since most Services need no write at a start.
    sent: Option<Box<Sent>>,
    dispute: Dispute,
    timers: Timers,
    retry_at: Option<Instant>,
}

impl Life {
    /// A life that begins with a plan.
    pub(super) fn new(claim: PlannedObject, counter: u64, now: Instant) -> Self {
        let state = LifeState::planned(None, &claim, counter, now);
        let (dispute, mut timers) = (Dispute::default(), Timers::default());
        timers.follow(&claim, now);
        Self { claim, state, sent: None, dispute, timers, retry_at: None }
    }

    /// The same for an object that was released before.
    pub(super) fn after_release(self, before: Option<Dispute>) -> Self {
        Self { dispute: before.filter(|_| matches!(self.claim, PlannedObject::Left(_))).unwrap_or(self.dispute), ..self }
    }

    /// What outlives it, with the uid of its object: how often it was released, unless it is deleted.
    pub(super) fn released(self) -> Option<(String, Dispute)> {
        match &self.claim {
            PlannedObject::Left(cleanup) if !cleanup.left.is_deleted => Some((cleanup.left.uid.clone(), self.dispute)),
            _ => None,
        }
    }

    /// Records a newer plan of the same object.
    pub(super) fn plan(&mut self, claim: PlannedObject, counter: u64, now: Instant) {
        let state = LifeState::planned(Some((self.state, &self.claim)), &claim, counter, now);
        if state != self.state {
            self.dispute = Dispute::default();
        }
        self.timers.follow(&claim, now);
        (self.state, self.claim) = (state, claim);
    }

    /// Records the server's answer to a write.
    pub(super) fn answered(&mut self, write: &StatusWrite, is_accepted: bool) {
        if let Some(sent) = self.sent.as_deref_mut().filter(|sent| sent.write == *write) {
            sent.is_accepted = is_accepted;
        }
    }

    /// Records that a write could not be queued.
    pub(super) fn failed(&mut self, retry_at: Instant) {
        if matches!(self.claim, PlannedObject::Left(_)) {
            self.dispute.was_not_sent();
        }
        self.sent = None;
        self.retry_at = Some(retry_at);
    }

    /// What is due now; a write counts as sent.
    pub(super) fn step(&mut self, view: &GatewaysView<'_>) -> LifeStep {
        if let Some(at) = self.retry_at.filter(|at| *at > view.now) {
            return LifeStep { again_at: Some(at), ..LifeStep::default() };
        }
        self.state = self.state.observed(view);
        match &self.claim {
            PlannedObject::Ours(wanted) => self.serve(&Arc::clone(wanted), view),
            PlannedObject::Left(cleanup) => self.withdraw(&cleanup.clone(), view),
        }
    }

    fn serve(&mut self, wanted: &WantedStatus, view: &GatewaysView<'_>) -> LifeStep {
        let mut step = LifeStep::default();
        if self.is_stale() {
            self.timers.write_was_stale();
        }
        self.timers.observe(wanted, view);
        self.dispute.resume(view.now);
        if self.dispute.is_left_alone(view.now) && self.sent.as_ref().is_some_and(|sent| sent.is_accepted) {
            return LifeStep { again_at: self.dispute.left_alone_until(), ..step };
        }
        let mut goal = self.goal(wanted, view, &mut step);
        if self.is_overwritten(&goal) && !self.dispute.rewrites(view.now) {
            step.remarks.push(dispute::remark(wanted, self.known(), &goal));
            goal = self.goal(wanted, view, &mut step);
        }
        let wakes = [step.again_at, self.dispute.left_alone_until(), self.state.again_at()];
        step.again_at = wakes.into_iter().flatten().min();
        // Whether gateways can announce an address depends on links, which examine every life (`queue`).
        let is_refused = view.gateways.is_refused(&wanted.object.name);
        step.waits_for_gateways = matches!(self.state, LifeState::Programming { .. }) || is_refused;
        self.write(wanted, goal, &mut step, view.now);
        step
    }

    fn goal(&self, wanted: &WantedStatus, view: &GatewaysView<'_>, step: &mut LifeStep) -> OwnedParts {
        let is_left_alone = self.dispute.is_left_alone(view.now);
        let (known, published) = (self.known(), self.published());
        Situation { wanted, state: self.state, known, published, view, timers: &self.timers, is_left_alone }.goal(step)
    }

    /// Sends the differences from the known content, if there are any.
    fn write(&mut self, wanted: &WantedStatus, mut goal: OwnedParts, step: &mut LifeStep, now: Instant) {
        let known = self.known();
        keep_times(known, &mut goal);
        if is_same(known, &goal) {
            return;
        }
        // A queued write is replaced by the next one to the same version, so that one must contain all changes.
        let object = &wanted.object;
        let base = if object.uid.is_empty() { known } else { &object.held };
        let write = StatusWrite {
            service: object.name.clone(),
            uid: object.uid.clone(),
            resource_version: object.resource_version.clone(),
            ingress: (!base.has_ingress_of(&goal)).then(|| goal.ingress.clone()),
            conditions: changed(base, &goal),
            finalizer: (base.finalizer != goal.finalizer).then_some(goal.finalizer),
            group: (base.group != goal.group).then(|| goal.group.clone().unwrap_or_default()),
        };
        let of_health = |held: &OwnedParts| held.conditions.get(&ConditionType::BackendsHealthy).cloned();
        let is_change = of_health(known).zip(of_health(&goal)).is_some_and(|(old, new)| !old.says_the_same(&new));
        // Notes cover the whole difference from this version, because those of the replaced write were never reported.
        step.remarks_of_write.extend(remarks(wanted, base, &goal));
        // Content of another program that the first write replaces is a rewrite, too.
        if self.sent.is_none() && write.ingress.is_some() && wanted.object.is_status_foreign() {
            self.dispute.rewrites(now);
        }
        self.timers.is_written(is_change.then_some(now));
        step.write = Some(write.clone());
        self.sent = Some(Box::new(Sent { write, after: goal, is_accepted: false }));
    }

    /// Removes our parts once gateways have let go, or after the time that deletions wait.
    fn withdraw(&mut self, cleanup: &Cleanup, view: &GatewaysView<'_>) -> LifeStep {
        let LifeState::Withdrawing { counter, since, was_ours } = self.state else { return LifeStep::default() };
        let (left, known) = (&cleanup.left, self.known());
        // Addresses of another class belong to another installation.
        let may_be_ours = !matches!(cleanup.by, LeftBy::Another | LeftBy::UsBefore);
        let has_our_addresses = left.is_load_balancer && may_be_ours && !known.ingress.is_empty();
        if !known.has_marks() && !has_our_addresses {
            return LifeStep::default();
        }
        let deadline = match cleanup.by {
            LeftBy::Another if !was_ours => left.is_deleted.then_some(since + OTHERS_WAITED_FOR),
            _ => Some(since + GATEWAYS_WAITED_FOR),
        };
        let is_ours = was_ours || matches!(cleanup.by, LeftBy::Us | LeftBy::UsBefore);
        let has_gone = view.absent_since.is_some() || view.gateways.all_reached(counter);
        let is_over = deadline.is_some_and(|at| at <= view.now);
        let may_go = is_over || (is_ours && has_gone && view.is_fleet_heard());
        if !may_go {
            let heard_at = view.heard_at.filter(|at| is_ours && *at > view.now);
            let again_at = deadline.into_iter().chain(heard_at).min();
            return LifeStep { again_at, waits_for_gateways: true, ..LifeStep::default() };
        }
        // A removal that the server did not accept is no dispute, and nobody adds a finalizer to an object that is deleted.
        let was_left_alone = self.dispute.is_left_alone(view.now);
        if !left.is_deleted && !self.is_stale() && !self.dispute.rewrites(view.now) {
            let remarks = if was_left_alone { Vec::new() } else { vec![dispute::returning_marks()] };
            return LifeStep { again_at: self.dispute.left_alone_until(), remarks, ..LifeStep::default() };
        }
        let known = self.known();
        let write = removal(left, known, has_our_addresses);
        // Nothing is reported about an object that is deleted.
        let remarks_of_write = if left.is_deleted { Vec::new() } else { vec![conditions::released()] };
        let ingress = if has_our_addresses { Vec::new() } else { known.ingress.clone() };
        let after = OwnedParts { ingress, ..OwnedParts::default() };
        self.sent = Some(Box::new(Sent { write: write.clone(), after, is_accepted: false }));
        LifeStep { write: Some(write), remarks_of_write, ..LifeStep::default() }
    }

    /// The last write to this object, if it was to another version.
    fn sent_before(&self) -> Option<&Sent> {
        let object = self.claim.object();
        let is_older = |sent: &&Sent| sent.write.uid == object.uid && sent.write.resource_version != object.resource_version;
        self.sent.as_deref().filter(is_older)
    }

    /// Whether the last write was for an older version and the server has not accepted it.
    fn is_stale(&self) -> bool {
        self.sent_before().is_some_and(|sent| !sent.is_accepted)
    }

    /// Whether another program removed what we wrote and would write again.
    fn is_overwritten(&self, goal: &OwnedParts) -> bool {
        let sent = self.sent_before().filter(|sent| sent.is_accepted);
        sent.is_some_and(|sent| !is_same(self.known(), goal) && is_same(&sent.after, goal))
    }

    /// The last write, if it was to this version of the object.
    fn sent_now(&self) -> Option<&Sent> {
        let object = self.claim.object();
        let is_newest = |sent: &&Sent| sent.write.uid == object.uid && sent.write.resource_version == object.resource_version;
        self.sent.as_deref().filter(is_newest)
    }

    /// The content of the object once the last write is accepted.
    fn known(&self) -> &OwnedParts {
        self.sent_now().map_or_else(|| &self.claim.object().held, |sent| &sent.after)
    }

    /// The content that the object has for certain.
    fn published(&self) -> &OwnedParts {
        self.sent_now().filter(|sent| sent.is_accepted).map_or_else(|| &self.claim.object().held, |sent| &sent.after)
    }
}

/// The write that removes our conditions, finalizer and group from an object that has these parts, and its addresses if
/// they are ours.
pub(super) fn removal(object: &ServiceObject, held: &OwnedParts, has_our_addresses: bool) -> StatusWrite {
    StatusWrite {
        service: object.name.clone(),
        uid: object.uid.clone(),
        resource_version: object.resource_version.clone(),
        ingress: has_our_addresses.then(Vec::new),
        conditions: held.conditions.keys().map(|kind| (*kind, None)).collect(),
        finalizer: held.finalizer.then_some(false),
        group: held.group.is_some().then(String::new),
    }
}

/// Keeps the transition times of conditions whose status is the same.
fn keep_times(known: &OwnedParts, goal: &mut OwnedParts) {
    for (kind, condition) in &mut goal.conditions {
        let old = known.conditions.get(kind).filter(|old| old.holds == condition.holds);
        condition.since = old.and_then(|old| old.since);
    }
}

fn changed(known: &OwnedParts, goal: &OwnedParts) -> BTreeMap<ConditionType, Option<Condition>> {
    let is_unchanged = |kind| match (known.conditions.get(&kind), goal.conditions.get(&kind)) {
        (Some(old), Some(new)) => old.says_the_same(new),
        (old, new) => old.is_none() && new.is_none(),
    };
    let kinds = ConditionType::ALL.into_iter().filter(|kind| !is_unchanged(*kind));
    kinds.map(|kind| (kind, goal.conditions.get(&kind).cloned())).collect()
}

/// Whether two contents are equal apart from times.
fn is_same(one: &OwnedParts, other: &OwnedParts) -> bool {
    let has_same_marks = one.finalizer == other.finalizer && one.group == other.group;
    one.has_ingress_of(other) && has_same_marks && changed(one, other).is_empty()
}
