//! One Service of ours: how far gateways are with it, what its object should hold, and what has to be written for that.
//!
//! Invariant: a write says only what differs from the object, as far as that is known: our own write to a version of it
//! counts more than the version itself.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::Reason;
use tokio::time::Instant;

use super::conditions::{Progress, address_assigned, backends_healthy, is_refused_by_gateways, programmed, refused_by_gateways};
use super::view::View;
use crate::note::{Cause, Remark};
use crate::plan::WantedStatus;
use crate::source::{Ingress, IpMode, StatusWrite};
use crate::spec::{Condition, ConditionType, Held};

/// A gateway that is slow, or that nobody repairs, holds the status up no longer than this after the first one.
pub(super) const SLOW_GATEWAY_WAITED_FOR: Duration = Duration::from_secs(2);
/// Rewrites of what somebody else wrote, per Service and wish: two controllers must not wear out the API server.
pub(super) const REWRITES_MAX: usize = 3;
/// The time that they are counted in; after it the Service is tried again.
pub(super) const REWRITES_WITHIN: Duration = Duration::from_secs(600);
/// How often `BackendsHealthy` of one Service may change.
const HEALTH_PACE: Duration = Duration::from_secs(30);
/// Gateways dial again within seconds of a restart, theirs or ours: so long a programmed Service is not called otherwise.
pub(super) const ABSENCE_TOLERATED: Duration = Duration::from_secs(30);

/// What is to be done for one Service.
#[derive(Debug, Default)]
pub(super) struct Decision {
    /// What is to be written now.
    pub(super) write: Option<StatusWrite>,
    /// What its owner should know.
    pub(super) remarks: Vec<Remark>,
    /// When it may be due without anything happening.
    pub(super) wake_at: Option<Instant>,
    /// Whether gateways may change what is due.
    pub(super) waits_for_gateways: bool,
}

#[derive(Debug)]
pub(super) struct Item {
    pub(super) wanted: Arc<WantedStatus>,
    gate: Gate,
    written: Option<Written>,
    rewritten_at: Vec<Instant>,
    contested_until: Option<Instant>,
    health_changed_at: Option<Instant>,
    retry_at: Option<Instant>,
}

/// Whether gateways forward as the Service asks.
#[derive(Clone, Copy, Debug)]
struct Gate {
    /// The generation that they must have reached.
    counter: u64,
    first_reached_at: Option<Instant>,
    is_passed: bool,
}

/// A write, and what the object holds after it.
#[derive(Debug)]
struct Written {
    write: StatusWrite,
    after: Held,
}

impl Gate {
    fn new(counter: u64, wanted: &WantedStatus) -> Self {
        let was_programmed = wanted.held.conditions.get(&ConditionType::Programmed).is_some_and(|condition| condition.holds);
        let is_passed = was_programmed && wanted.held.ingress == wanted.ingress;
        Self { counter, first_reached_at: None, is_passed }
    }

    fn look(&mut self, view: &View<'_>, now: Instant) {
        let first = self.first_reached_at.filter(|_| view.gateways.any_reached(self.counter));
        self.first_reached_at = first.or_else(|| view.gateways.any_reached(self.counter).then_some(now));
        let waited_enough = self.first_reached_at.is_some_and(|first| now >= first + SLOW_GATEWAY_WAITED_FOR);
        self.is_passed |= waited_enough || view.gateways.all_reached(self.counter);
    }
}

impl Item {
    pub(super) fn new(wanted: Arc<WantedStatus>, counter: u64) -> Self {
        Self {
            gate: Gate::new(counter, &wanted),
            wanted,
            written: None,
            rewritten_at: Vec::new(),
            contested_until: None,
            health_changed_at: None,
            retry_at: None,
        }
    }

    /// Takes in a newer plan. Gateways are not asked again for what they may already have reached.
    pub(super) fn renew(&mut self, wanted: Arc<WantedStatus>, counter: u64) {
        let asked = |w: &WantedStatus| (w.uid.clone(), w.ingress.clone(), w.refusal.is_none(), w.is_withheld);
        if asked(&self.wanted) != asked(&wanted) {
            self.gate = Gate::new(counter, &wanted);
            self.rewritten_at.clear();
            self.contested_until = None;
        }
        self.wanted = wanted;
    }

    /// `is_taken` tells whether the server took a write.
    pub(super) fn decide(&mut self, view: &View<'_>, now: Instant, is_taken: &impl Fn(&StatusWrite) -> bool) -> Decision {
        if let Some(at) = self.retry_at.filter(|at| *at > now) {
            return Decision { wake_at: Some(at), ..Decision::default() };
        }
        if !self.gate.is_passed && !self.wanted.is_withheld {
            self.gate.look(view, now);
        }
        let mut decision = Decision::default();
        if self.contested_until.is_some_and(|until| until <= now) {
            self.contested_until = None;
            self.rewritten_at = vec![now];
        }
        if self.contested_until.is_some() && self.written.as_ref().is_some_and(|written| is_taken(&written.write)) {
            return Decision { wake_at: self.contested_until, ..Decision::default() };
        }
        let known = self.known().clone();
        let mut goal = self.goal(&known, view, now, &mut decision);
        if self.is_overwritten(&known, &goal, is_taken) {
            self.rewritten_at.retain(|at| now < *at + REWRITES_WITHIN);
            if let Some(first) = self.rewritten_at.first().filter(|_| self.rewritten_at.len() >= REWRITES_MAX) {
                self.contested_until = Some(*first + REWRITES_WITHIN);
                decision.remarks.push(self.contested());
                goal = self.goal(&known, view, now, &mut decision);
            } else {
                self.rewritten_at.push(now);
            }
        }
        let wakes = [decision.wake_at, self.contested_until, self.slow_gateway_at()];
        decision.wake_at = wakes.into_iter().flatten().min();
        decision.waits_for_gateways = !self.gate.is_passed || view.gateways.is_refused(&self.wanted.service);
        decision.write = self.difference(&known, goal, &mut decision.remarks, now);
        decision
    }

    /// A write that was handed over may still fail, where nobody repeats it for us.
    pub(super) fn failed(&mut self, retry_at: Instant) {
        self.written = None;
        self.retry_at = Some(retry_at);
    }

    fn slow_gateway_at(&self) -> Option<Instant> {
        self.gate.first_reached_at.filter(|_| !self.gate.is_passed).map(|first| first + SLOW_GATEWAY_WAITED_FOR)
    }

    /// What the object holds, as far as we know.
    fn known(&self) -> &Held {
        let wanted = &self.wanted;
        let is_of_this_version = |w: &&Written| w.write.uid == wanted.uid && w.write.resource_version == wanted.resource_version;
        self.written.as_ref().filter(is_of_this_version).map_or(&wanted.held, |written| &written.after)
    }

    /// What the object should hold.
    fn goal(&self, known: &Held, view: &View<'_>, now: Instant, decision: &mut Decision) -> Held {
        let wanted = &self.wanted;
        let mut goal = Held { finalizer: !wanted.uid.is_empty(), ..known.clone() };
        if !wanted.uid.is_empty() && self.contested_until.is_none() {
            goal.group = Some(wanted.group.clone());
        }
        let is_new = |ingress: &&Ingress| !known.ingress.contains(ingress);
        let waits = wanted.ingress.iter().filter(is_new).any(|ingress| ingress.ip_mode == IpMode::Proxy);
        if wanted.refusal.is_some() {
            goal.ingress.retain(|old| wanted.ingress.iter().any(|new| new.ip == old.ip));
        } else if self.contested_until.is_none() && (self.gate.is_passed || !waits) {
            goal.ingress.clone_from(&wanted.ingress);
        }
        set(&mut goal, ConditionType::AddressAssigned, address_assigned(wanted));
        if let Some(progress) = self.progress(known, view, now, decision) {
            let refusal = view.gateways.refusal(&wanted.service, self.gate.counter).filter(|_| progress == Progress::Done);
            let condition = match &refusal {
                Some((gateways, refusal)) => refused_by_gateways(gateways, refusal),
                None => programmed(wanted, progress),
            };
            let said = known.conditions.get(&ConditionType::Programmed);
            if let (Some((_, refusal)), false) = (&refusal, said.is_some_and(|said| said.says_the_same(&condition))) {
                decision.remarks.push(Remark::new(Cause::Reason(refusal.reason), condition.message.clone()));
            }
            set(&mut goal, ConditionType::Programmed, condition);
        }
        if wanted.refusal.is_some() {
            goal.conditions.remove(&ConditionType::BackendsHealthy);
        } else if let Some(is_any) = self.health(known, view, now, decision) {
            set(&mut goal, ConditionType::BackendsHealthy, backends_healthy(is_any));
        }
        goal
    }

    /// None: what the object says stays. What is programmed stays so while gateways take a change, and for a while without them.
    fn progress(&self, known: &Held, view: &View<'_>, now: Instant, decision: &mut Decision) -> Option<Progress> {
        let said = known.conditions.get(&ConditionType::Programmed);
        let was_programmed = said.is_some_and(|condition| condition.holds);
        if self.wanted.refusal.is_some() {
            return Some(Progress::Pending);
        }
        if self.contested_until.is_some() {
            return Some(Progress::Contested);
        }
        if let Some(absent_since) = view.absent_since {
            let tolerated_until = absent_since + ABSENCE_TOLERATED;
            if was_programmed && now < tolerated_until {
                decision.wake_at = decision.wake_at.into_iter().chain([tolerated_until]).min();
                return None;
            }
            return Some(Progress::NoGateway);
        }
        if self.gate.is_passed {
            return Some(Progress::Done);
        }
        let waited_for_gateways =
            said.is_some_and(|said| said.reason == Reason::NoGateway.as_str() || is_refused_by_gateways(said));
        (!was_programmed && !waited_for_gateways).then_some(Progress::Pending)
    }

    /// None: what the object says stays.
    fn health(&self, known: &Held, view: &View<'_>, now: Instant, decision: &mut Decision) -> Option<bool> {
        let is_any = view.has_healthy_backend(&self.wanted.service)?;
        let said = known.conditions.get(&ConditionType::BackendsHealthy).map(|condition| condition.holds);
        let may_change_at = self.health_changed_at.map(|at| at + HEALTH_PACE).filter(|at| *at > now);
        match may_change_at {
            Some(at) if said != Some(is_any) => {
                decision.wake_at = decision.wake_at.into_iter().chain([at]).min();
                None
            }
            _ => Some(is_any),
        }
    }

    /// Whether somebody else took away what we had written, and what we would write again.
    fn is_overwritten(&self, known: &Held, goal: &Held, is_taken: &impl Fn(&StatusWrite) -> bool) -> bool {
        let Some(written) = &self.written else { return false };
        let is_newer = written.write.uid == self.wanted.uid && written.write.resource_version != self.wanted.resource_version;
        is_newer && !is_same(known, goal) && is_same(&written.after, goal) && is_taken(&written.write)
    }

    fn contested(&self) -> Remark {
        let manager = self.wanted.foreign_manager.as_deref().unwrap_or("unknown");
        let text = format!(
            "{manager:?} keeps writing its status, too; expected one writer. Its status is left alone for 10 minutes: stop the \
             other writer, or give the Service another class"
        );
        Remark::new(Cause::Reason(Reason::ForeignStatusWriter), text)
    }

    /// What makes `goal` of what is known. Remembered as written.
    fn difference(&mut self, known: &Held, goal: Held, remarks: &mut Vec<Remark>, now: Instant) -> Option<StatusWrite> {
        if is_same(known, &goal) {
            return None;
        }
        // A write that waits to be sent is replaced by the next one to the same version, which therefore says all.
        let base = if self.wanted.uid.is_empty() { known } else { &self.wanted.held };
        let write = StatusWrite {
            service: self.wanted.service.clone(),
            uid: self.wanted.uid.clone(),
            resource_version: self.wanted.resource_version.clone(),
            ingress: (base.ingress != goal.ingress).then(|| goal.ingress.clone()),
            conditions: changed(base, &goal),
            finalizer: (base.finalizer != goal.finalizer).then_some(goal.finalizer),
            group: (base.group != goal.group).then(|| goal.group.clone().unwrap_or_default()),
        };
        for (kind, condition) in &goal.conditions {
            if known.conditions.get(kind).map(|old| old.holds) != Some(condition.holds) {
                remarks.extend(self.remark(*kind, condition));
                if *kind == ConditionType::BackendsHealthy {
                    self.health_changed_at = Some(now);
                }
            }
        }
        self.written = Some(Written { write: write.clone(), after: goal });
        Some(write)
    }

    /// What a change of a condition is worth telling. Refusals are told by the plan, in their own words.
    fn remark(&self, kind: ConditionType, condition: &Condition) -> Option<Remark> {
        match (kind, condition.holds) {
            (ConditionType::AddressAssigned, true) => {
                let addresses: Vec<_> = self.wanted.ingress.iter().map(|ingress| ingress.ip.to_string()).collect();
                Some(Remark::new(Cause::AddressAssigned, format!("it has {}", addresses.join(" and "))))
            }
            (ConditionType::Programmed, true) => Some(Remark::new(Cause::Programmed, "gateways forward for it")),
            (ConditionType::BackendsHealthy, false) => {
                let text = "no gateway finds a healthy backend; all of them are used until one is (fail open)";
                Some(Remark::new(Cause::NoHealthyBackend, text))
            }
            _ => None,
        }
    }
}

/// Sets a condition; its time stays while it holds, or does not hold, as before.
fn set(held: &mut Held, kind: ConditionType, mut condition: Condition) {
    condition.since = held.conditions.get(&kind).filter(|old| old.holds == condition.holds).and_then(|old| old.since);
    held.conditions.insert(kind, condition);
}

fn changed(known: &Held, goal: &Held) -> BTreeMap<ConditionType, Option<Condition>> {
    let says_so = |kind| match (known.conditions.get(&kind), goal.conditions.get(&kind)) {
        (Some(old), Some(new)) => old.says_the_same(new),
        (old, new) => old.is_none() && new.is_none(),
    };
    let kinds = ConditionType::ALL.into_iter().filter(|kind| !says_so(*kind));
    kinds.map(|kind| (kind, goal.conditions.get(&kind).cloned())).collect()
}

/// Whether two are the same but for times.
fn is_same(one: &Held, other: &Held) -> bool {
    let has_same_marks = one.finalizer == other.finalizer && one.group == other.group;
    one.ingress == other.ingress && has_same_marks && changed(one, other).is_empty()
}
