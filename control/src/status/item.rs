//! The status of one Service: the progress of gateways, the desired content of its object, and the write that leads
//! there.
//!
//! Invariant: a write contains only differences from the known content of the object. After our own write to a version,
//! the content that we wrote counts, not that version.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use proto::limits::ANNOTATION_PREFIX;
use proto::{Reason, ServiceName};
use tokio::time::Instant;

use super::conditions::{self, address_assigned, is_refused_by_gateways, not_served, refused_by_gateways};
use crate::gateways::registry::Gateways;
use crate::plan::WantedStatus;
use objects::note::{Cause, Remark};
use objects::status::{Ingress, IpMode, PortStatus, StatusWrite};
use objects::{Condition, ConditionType, OwnedParts};

/// Longest delay of a status by slow or broken gateways, after the first gateway applied the generation.
pub(super) const SLOW_GATEWAY_WAITED_FOR: Duration = Duration::from_secs(2);
/// Maximum number of rewrites of a foreign status, per Service and desired status: two controllers that overwrite each
/// other must not overload the API server.
pub(super) const REWRITES_MAX: usize = 3;
/// Window in which these rewrites are counted. After it, sluice tries again.
pub(super) const REWRITES_WITHIN: Duration = Duration::from_secs(600);
/// Minimum time between two changes of `BackendsHealthy` of one Service.
const HEALTH_CHANGE_INTERVAL: Duration = Duration::from_secs(30);
/// Grace time for EndpointSlices, which are created after their Service and updated after its ports. What is missing
/// longer is reported.
pub(super) const SLICES_AWAITED: Duration = Duration::from_secs(2);
/// Error of a port that is not served, in the API's format.
const PORT_NOT_MATCHED: &str = "sluice.dev/NoMatchingPort";
/// Grace time for gateways to reconnect after a restart of either side. Until then a programmed Service stays
/// programmed.
pub(super) const ABSENCE_TOLERATED: Duration = Duration::from_secs(30);

/// The connected gateways at one time.
#[derive(Clone, Copy, Debug)]
pub(super) struct GatewaysView<'a> {
    pub(super) gateways: &'a Gateways,
    /// Since when no gateway is connected; `None` while one is.
    pub(super) absent_since: Option<Instant>,
    pub(super) now: Instant,
}

impl GatewaysView<'_> {
    /// Whether any gateway reports a healthy backend of a Service; `None` if no gateway has reported yet. Reports of
    /// gateways that knew no backend do not count, because they are older than the first backend.
    pub(super) fn has_healthy_backend(&self, service: &ServiceName) -> Option<bool> {
        let reports = self.gateways.iter().filter_map(|gateway| gateway.health.get(service));
        let reports = reports.filter(|health| health.backends > 0);
        reports.map(|health| health.healthy > 0).reduce(|one, other| one || other)
    }
}

/// Pending work for one Service.
#[derive(Debug, Default)]
pub(super) struct Decision {
    /// The write that is due now.
    pub(super) write: Option<StatusWrite>,
    /// Notes for its owner.
    pub(super) remarks: Vec<Remark>,
    /// Notes for its owner once the server accepted the write.
    pub(super) remarks_of_write: Vec<Remark>,
    /// When it may become due without any event.
    pub(super) wake_at: Option<Instant>,
    /// Whether reports of gateways may change what is due.
    pub(super) waits_for_gateways: bool,
}

impl Decision {
    fn wake_by(&mut self, at: Instant) {
        self.wake_at = self.wake_at.into_iter().chain([at]).min();
    }
}

#[derive(Debug)]
pub(super) struct Item {
    pub(super) wanted: Arc<WantedStatus>,
    rollout: Rollout,
    /// Boxed, since most Services need no write at a start.
    written: Option<Box<Written>>,
    rewritten_at: Vec<Instant>,
    contested_until: Option<Instant>,
    health_changed_at: Option<Instant>,
    /// Its value before the last write, which is restored if that write turns out to be stale.
    health_changed_before: Option<Instant>,
    /// Since when it lacks endpoints or matching ports.
    missing_since: Option<Instant>,
    retry_at: Option<Instant>,
}

/// Whether gateways forward the Service as requested.
#[derive(Clone, Copy, Debug)]
struct Rollout {
    /// The generation that they must have applied.
    counter: u64,
    first_reached_at: Option<Instant>,
    is_done: bool,
}

/// A write, and the content of the object after it.
#[derive(Debug)]
struct Written {
    write: StatusWrite,
    after: OwnedParts,
}

impl Rollout {
    fn new(counter: u64, wanted: &WantedStatus) -> Self {
        let was_programmed = wanted.held.conditions.get(&ConditionType::Programmed).is_some_and(|condition| condition.holds);
        let is_done = was_programmed && have_same_addresses(&wanted.held.ingress, &wanted.ingress);
        Self { counter, first_reached_at: None, is_done }
    }

    fn update(&mut self, view: &GatewaysView<'_>) {
        let first = self.first_reached_at.filter(|_| view.gateways.any_reached(self.counter));
        self.first_reached_at = first.or_else(|| view.gateways.any_reached(self.counter).then_some(view.now));
        let waited_enough = self.first_reached_at.is_some_and(|first| view.now >= first + SLOW_GATEWAY_WAITED_FOR);
        self.is_done |= waited_enough || view.gateways.all_reached(self.counter);
    }
}

impl Item {
    pub(super) fn new(wanted: Arc<WantedStatus>, counter: u64, now: Instant) -> Self {
        Self {
            rollout: Rollout::new(counter, &wanted),
            missing_since: wanted.missing.is_any().then_some(now),
            wanted,
            written: None,
            rewritten_at: Vec::new(),
            contested_until: None,
            health_changed_at: None,
            health_changed_before: None,
            retry_at: None,
        }
    }

    /// Records a newer plan. The required generation stays if the Service did not change for gateways.
    pub(super) fn renew(&mut self, wanted: Arc<WantedStatus>, counter: u64, now: Instant) {
        self.missing_since = wanted.missing.is_any().then_some(self.missing_since.unwrap_or(now));
        let asked = |w: &WantedStatus| (w.uid.clone(), w.refusal.is_none(), w.is_withheld);
        if asked(&self.wanted) != asked(&wanted) || !have_same_addresses(&self.wanted.ingress, &wanted.ingress) {
            self.rollout = Rollout::new(counter, &wanted);
            self.rewritten_at.clear();
            self.contested_until = None;
        }
        self.wanted = wanted;
    }

    /// `is_accepted` returns whether the server accepted a write.
    pub(super) fn decide(&mut self, view: &GatewaysView<'_>, is_accepted: &impl Fn(&StatusWrite) -> bool) -> Decision {
        let now = view.now;
        if let Some(at) = self.retry_at.filter(|at| *at > now) {
            return Decision { wake_at: Some(at), ..Decision::default() };
        }
        if !self.rollout.is_done && !self.wanted.is_withheld {
            self.rollout.update(view);
        }
        if self.was_stale(is_accepted) {
            self.health_changed_at = self.health_changed_before;
        }
        let mut decision = Decision::default();
        if self.contested_until.is_some_and(|until| until <= now) {
            self.contested_until = None;
            self.rewritten_at = vec![now];
        }
        if self.contested_until.is_some() && self.written.as_ref().is_some_and(|written| is_accepted(&written.write)) {
            return Decision { wake_at: self.contested_until, ..Decision::default() };
        }
        let known = self.known().clone();
        let mut goal = self.goal(&known, view, &mut decision);
        if self.is_overwritten(&known, &goal, is_accepted) {
            self.rewritten_at.retain(|at| now < *at + REWRITES_WITHIN);
            if let Some(first) = self.rewritten_at.first().filter(|_| self.rewritten_at.len() >= REWRITES_MAX) {
                self.contested_until = Some(*first + REWRITES_WITHIN);
                decision.remarks.push(self.contested());
                goal = self.goal(&known, view, &mut decision);
            } else {
                self.rewritten_at.push(now);
            }
        }
        let wakes = [decision.wake_at, self.contested_until, self.slow_gateway_at()];
        decision.wake_at = wakes.into_iter().flatten().min();
        decision.waits_for_gateways = !self.rollout.is_done
            || view.gateways.is_refused(&self.wanted.service)
            || view.gateways.unannounced(self.addresses()).is_some();
        decision.write = self.difference(&known, goal, &mut decision.remarks_of_write, now);
        decision
    }

    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.wanted.ingress.iter().map(|ingress| ingress.ip)
    }

    /// Records that a queued write failed and is not retried by the queue.
    pub(super) fn failed(&mut self, retry_at: Instant) {
        self.written = None;
        self.retry_at = Some(retry_at);
    }

    fn slow_gateway_at(&self) -> Option<Instant> {
        self.rollout.first_reached_at.filter(|_| !self.rollout.is_done).map(|first| first + SLOW_GATEWAY_WAITED_FOR)
    }

    /// Whether the last write was for an older version and the server rejected it.
    fn was_stale(&self, is_accepted: &impl Fn(&StatusWrite) -> bool) -> bool {
        let is_older = |written: &&Written| written.write.resource_version != self.wanted.resource_version;
        self.written.as_deref().filter(is_older).is_some_and(|written| !is_accepted(&written.write))
    }

    /// The known content of the object.
    fn known(&self) -> &OwnedParts {
        let wanted = &self.wanted;
        let is_of_this_version = |w: &&Written| w.write.uid == wanted.uid && w.write.resource_version == wanted.resource_version;
        self.written.as_deref().filter(is_of_this_version).map_or(&*wanted.held, |written| &written.after)
    }

    /// The desired content of the object.
    fn goal(&self, known: &OwnedParts, view: &GatewaysView<'_>, decision: &mut Decision) -> OwnedParts {
        let wanted = &self.wanted;
        let mut goal = OwnedParts { finalizer: !wanted.uid.is_empty(), ..known.clone() };
        if !wanted.uid.is_empty() && self.contested_until.is_none() {
            goal.group = Some(wanted.group.clone());
        }
        let is_new = |ingress: &&Ingress| !known.ingress.iter().any(|old| old.leads_as(ingress));
        let waits = wanted.ingress.iter().filter(is_new).any(|ingress| ingress.ip_mode == IpMode::Proxy);
        if wanted.refusal.is_some() {
            goal.ingress.retain(|old| wanted.ingress.iter().any(|new| new.ip == old.ip));
            goal.ingress_without_ip = 0;
        } else if self.contested_until.is_none() && (self.rollout.is_done || !waits) {
            goal.ingress.clone_from(&wanted.ingress);
            goal.ingress_without_ip = 0;
        }
        if self.contested_until.is_none() {
            self.set_ports(known, &mut goal, view.now, decision);
        }
        set(&mut goal, ConditionType::AddressAssigned, address_assigned(wanted));
        if let Some(condition) = self.programmed(known, view, decision) {
            set(&mut goal, ConditionType::Programmed, condition);
        }
        if wanted.refusal.is_some() {
            goal.conditions.remove(&ConditionType::BackendsHealthy);
        } else if let Some(condition) = self.backends_healthy(known, view, decision) {
            set(&mut goal, ConditionType::BackendsHealthy, condition);
        }
        goal
    }

    /// Reports for each port of each of our addresses whether it is served. If the Service cannot be parsed, its ports
    /// are unknown, and those in the status are used.
    fn set_ports(&self, known: &OwnedParts, goal: &mut OwnedParts, now: Instant, decision: &mut Decision) {
        let wanted = &self.wanted;
        let is_settled = self.is_grace_over(now, decision);
        for entry in &mut goal.ingress {
            let Some(ours) = wanted.ingress.iter().find(|ours| ours.ip == entry.ip) else { continue };
            if !ours.ports.is_empty() {
                entry.ports.clone_from(&ours.ports);
            }
            let old_ports = known.ingress.iter().find(|old| old.ip == entry.ip).map_or(&[][..], |old| &old.ports);
            for port in &mut entry.ports {
                let is_reported =
                    old_ports.iter().any(|old| old.error.as_deref() == Some(PORT_NOT_MATCHED) && is_same_port(old, port));
                let is_unmatched = wanted.missing.unmatched.contains(&(port.protocol, port.port)) && (is_settled || is_reported);
                let refused = wanted.refusal.map(|reason| Cow::Owned(format!("{ANNOTATION_PREFIX}{}", reason.as_str())));
                port.error = refused.or(is_unmatched.then_some(Cow::Borrowed(PORT_NOT_MATCHED)));
            }
        }
    }

    /// Whether the grace time for slices is over.
    fn is_grace_over(&self, now: Instant, decision: &mut Decision) -> bool {
        let Some(due) = self.missing_since.map(|since| since + SLICES_AWAITED) else { return false };
        if due > now {
            decision.wake_by(due);
        }
        due <= now
    }

    /// `None` keeps the condition of the object. A programmed Service stays programmed while gateways apply a change,
    /// and for a grace time without gateways.
    fn programmed(&self, known: &OwnedParts, view: &GatewaysView<'_>, decision: &mut Decision) -> Option<Condition> {
        let old = known.conditions.get(&ConditionType::Programmed);
        let was_programmed = old.is_some_and(|condition| condition.holds);
        if let Some(reason) = self.wanted.refusal {
            return Some(not_served(reason));
        }
        if self.contested_until.is_some() {
            return Some(not_served(Reason::ForeignStatusWriter));
        }
        if let Some(absent_since) = view.absent_since {
            let tolerated_until = absent_since + ABSENCE_TOLERATED;
            if was_programmed && view.now < tolerated_until {
                decision.wake_by(tolerated_until);
                return None;
            }
            return Some(not_served(Reason::NoGateway));
        }
        if !self.rollout.is_done {
            let waited_for_gateways =
                old.is_some_and(|old| old.reason == Reason::NoGateway.as_str() || is_refused_by_gateways(old));
            return (!was_programmed && !waited_for_gateways).then_some(conditions::PENDING);
        }
        let refused = view.gateways.refusal(&self.wanted.service, self.rollout.counter);
        let refused = refused.map(|(gateways, refusal)| (gateways, refusal.clone()));
        let Some((gateways, refusal)) = refused.or_else(|| view.gateways.unannounced(self.addresses())) else {
            return Some(conditions::programmed(&self.wanted));
        };
        let condition = refused_by_gateways(&gateways, &refusal);
        if !old.is_some_and(|old| old.says_the_same(&condition)) {
            let remark = Remark::new(Cause::Reason(refusal.reason), condition.message.clone());
            decision.remarks_of_write.push(remark);
        }
        Some(condition)
    }

    /// `None` keeps the condition of the object.
    fn backends_healthy(&self, known: &OwnedParts, view: &GatewaysView<'_>, decision: &mut Decision) -> Option<Condition> {
        let missing = &self.wanted.missing;
        let condition = if missing.is_whole {
            if !self.is_grace_over(view.now, decision) {
                return None;
            }
            if missing.unmatched.is_empty() { conditions::NO_ENDPOINTS } else { conditions::NO_MATCHING_PORT }
        } else if view.has_healthy_backend(&self.wanted.service)? {
            conditions::HEALTHY
        } else {
            conditions::NONE_HEALTHY
        };
        let old = known.conditions.get(&ConditionType::BackendsHealthy);
        let may_change_at = self.health_changed_at.map(|at| at + HEALTH_CHANGE_INTERVAL).filter(|at| *at > view.now);
        if let Some(at) = may_change_at
            && !old.is_some_and(|old| old.says_the_same(&condition))
        {
            decision.wake_by(at);
            return None;
        }
        Some(condition)
    }

    /// Whether another controller removed what we wrote and would write again.
    fn is_overwritten(&self, known: &OwnedParts, goal: &OwnedParts, is_accepted: &impl Fn(&StatusWrite) -> bool) -> bool {
        let Some(written) = &self.written else { return false };
        let is_newer = written.write.uid == self.wanted.uid && written.write.resource_version != self.wanted.resource_version;
        is_newer && !is_same(known, goal) && is_same(&written.after, goal) && is_accepted(&written.write)
    }

    fn contested(&self) -> Remark {
        let manager = self.wanted.foreign_manager.as_deref().unwrap_or("unknown");
        let text = format!(
            "{manager:?} keeps writing its status, too; expected one writer. Its status is left alone for 10 minutes: stop the \
             other writer, or give the Service another class"
        );
        Remark::new(Cause::Reason(Reason::ForeignStatusWriter), text)
    }

    /// The write that changes the known content to `goal`. It is recorded as written.
    fn difference(
        &mut self,
        known: &OwnedParts,
        goal: OwnedParts,
        remarks: &mut Vec<Remark>,
        now: Instant,
    ) -> Option<StatusWrite> {
        if is_same(known, &goal) {
            return None;
        }
        // A queued write is replaced by the next one to the same version, so that one must contain all changes.
        let base = if self.wanted.uid.is_empty() { known } else { &*self.wanted.held };
        let write = StatusWrite {
            service: self.wanted.service.clone(),
            uid: self.wanted.uid.clone(),
            resource_version: self.wanted.resource_version.clone(),
            ingress: (!base.has_ingress_of(&goal)).then(|| goal.ingress.clone()),
            conditions: changed(base, &goal),
            finalizer: (base.finalizer != goal.finalizer).then_some(goal.finalizer),
            group: (base.group != goal.group).then(|| goal.group.clone().unwrap_or_default()),
        };
        let of_health = ConditionType::BackendsHealthy;
        let has_changed = |old: &Condition| goal.conditions.get(&of_health).is_some_and(|new| !old.says_the_same(new));
        self.health_changed_before = self.health_changed_at;
        if known.conditions.get(&of_health).is_some_and(has_changed) {
            self.health_changed_at = Some(now);
        }
        // Notes cover the whole difference from this version, because those of the replaced write were never reported.
        remarks.extend(self.remarks(base, &goal));
        self.written = Some(Box::new(Written { write: write.clone(), after: goal }));
        Some(write)
    }

    /// The notes for a change. Refusals are reported by the plan, with their own messages.
    fn remarks(&self, base: &OwnedParts, goal: &OwnedParts) -> Vec<Remark> {
        let of =
            |held: &OwnedParts, kind| held.conditions.get(&kind).map(|condition| (condition.holds, condition.reason.clone()));
        let turns = |kind, holds| of(goal, kind).is_some_and(|now| now.0 == holds) && of(base, kind) != of(goal, kind);
        let comes = |kind| turns(kind, true) && of(base, kind).is_none_or(|before| !before.0);
        let addresses = |held: &OwnedParts| held.ingress.iter().map(|ingress| ingress.ip).collect::<Vec<_>>();
        let mut remarks = Vec::new();
        let is_assigned = of(goal, ConditionType::AddressAssigned).is_some_and(|now| now.0);
        let is_exchanged = !base.ingress.is_empty() && !goal.ingress.is_empty() && addresses(base) != addresses(goal);
        if comes(ConditionType::AddressAssigned) || (is_assigned && is_exchanged) {
            let addresses: Vec<_> = self.wanted.ingress.iter().map(|ingress| ingress.ip.to_string()).collect();
            remarks.push(Remark::new(Cause::AddressAssigned, format!("it has {}", addresses.join(" and "))));
        }
        if comes(ConditionType::Programmed) {
            remarks.push(Remark::new(Cause::Programmed, "gateways forward for it"));
        }
        if reports_unmatched_port(goal) && !reports_unmatched_port(base) {
            remarks.push(Remark::new(Cause::NoMatchingPort, self.wanted.missing.sentence.clone()));
        }
        let is_of_ports = of(goal, ConditionType::BackendsHealthy).is_some_and(|now| now.1 == Cause::NoMatchingPort.as_str());
        if turns(ConditionType::BackendsHealthy, false) && !is_of_ports {
            remarks.push(self.without_backend());
        }
        remarks
    }

    fn without_backend(&self) -> Remark {
        if self.wanted.missing.is_whole {
            let text = "no endpoint of it takes new connections: none is ready, or all are drained; connections are refused until one is";
            return Remark::new(Cause::NoEndpoints, text);
        }
        let meanwhile = if self.wanted.fails_open {
            "all of them are used until one is (health.failOpen: true)"
        } else {
            "connections are refused until one is (health.failOpen: false)"
        };
        Remark::new(Cause::NoHealthyBackend, format!("no gateway finds a healthy backend: all fail their probes; {meanwhile}"))
    }
}

fn have_same_addresses(one: &[Ingress], other: &[Ingress]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.leads_as(other))
}

fn is_same_port(one: &PortStatus, other: &PortStatus) -> bool {
    (one.port, one.protocol) == (other.port, other.protocol)
}

/// Whether a condition or a port of the object reports that no slice has one of its ports.
fn reports_unmatched_port(held: &OwnedParts) -> bool {
    let ports = held.ingress.iter().flat_map(|ingress| &ingress.ports);
    let condition = held.conditions.get(&ConditionType::BackendsHealthy);
    let is_in_condition = condition.is_some_and(|condition| condition.reason == Cause::NoMatchingPort.as_str());
    is_in_condition || ports.into_iter().any(|port| port.error.as_deref() == Some(PORT_NOT_MATCHED))
}

/// Sets a condition. Its transition time changes only with its status.
fn set(held: &mut OwnedParts, kind: ConditionType, mut condition: Condition) {
    condition.since = held.conditions.get(&kind).filter(|old| old.holds == condition.holds).and_then(|old| old.since);
    held.conditions.insert(kind, condition);
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
