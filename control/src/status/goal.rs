//! The content that the object of a Service shall have in a state: addresses with their ports, conditions, finalizer and
//! group; and what its owner is told about a change of it.
//!
//! Invariant: a published address is removed only if the plan takes it from the Service. A programmed Service stays
//! programmed while gateways apply a change, and for a grace time without gateways.
//! Deliberately not here: the states (`plan::service_life`), why gateways do not forward (`plan::unserved`), and the texts
//! of conditions (`conditions`).

use std::borrow::Cow;
use std::time::Duration;

use proto::Reason;
use proto::limits::ANNOTATION_PREFIX;
use tokio::time::Instant;

use super::conditions::{self, address_assigned, is_refused_by_gateways, not_served, refused_by_gateways};
use crate::plan::WantedStatus;
use crate::plan::service_life::{GatewaysView, LifeState, PlannedObject};
use crate::plan::unserved::{NotForwarded, by_gateways};
use objects::note::{Cause, Remark};
use objects::status::{Ingress, IpMode, PortStatus, StatusWrite};
use objects::{Condition, ConditionType, OwnedParts};

/// Minimum time between two changes of `BackendsHealthy` of one Service.
const HEALTH_CHANGE_INTERVAL: Duration = Duration::from_secs(30);
/// Grace time for EndpointSlices, which are created after their Service and updated after its ports. What is missing
/// longer is reported.
pub(super) const SLICES_AWAITED: Duration = Duration::from_secs(2);
/// Longest wait for the reports of the other gateways, once one finds no healthy backend.
pub(super) const REPORTS_AWAITED: Duration = Duration::from_secs(2);
/// Grace time for gateways to reconnect after a restart of either side. Until then a programmed Service stays
/// programmed.
pub(super) const ABSENCE_TOLERATED: Duration = Duration::from_secs(30);
/// Error of a port that is not served, in the API's format.
const PORT_NOT_MATCHED: &str = "sluice.dev/NoMatchingPort";

/// What is due in a state.
#[derive(Debug, Default)]
pub(super) struct LifeStep {
    /// The write that is due now.
    pub(super) write: Option<StatusWrite>,
    /// Notes for its owner.
    pub(super) remarks: Vec<Remark>,
    /// Notes for its owner once the server accepted the write.
    pub(super) remarks_of_write: Vec<Remark>,
    /// When it may become due without any event.
    pub(super) again_at: Option<Instant>,
    /// Whether reports of gateways may change what is due.
    pub(super) waits_for_gateways: bool,
}

impl LifeStep {
    pub(super) fn wake_by(&mut self, at: Instant) {
        self.again_at = self.again_at.into_iter().chain([at]).min();
    }
}

/// Whether gateways find healthy backends, as far as they have reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BackendHealth {
    /// No gateway has reported on backends of the present Service.
    #[default]
    Unknown,
    /// A gateway finds a healthy one.
    Some,
    /// None does, since then; other gateways have not reported yet.
    NoneSoFar(Instant),
    /// None of them does.
    None,
}

/// Times that matter for the conditions of a Service.
#[derive(Debug, Default)]
pub(super) struct Timers {
    /// Since when it lacks endpoints or matching ports.
    missing_since: Option<Instant>,
    health: BackendHealth,
    health_changed_at: Option<Instant>,
    /// Its value before the last write, which is restored if that write turns out to be stale.
    health_changed_before: Option<Instant>,
}

impl Timers {
    /// Records what a plan finds missing.
    pub(super) fn follow(&mut self, claim: &PlannedObject, now: Instant) {
        let is_missing = matches!(claim, PlannedObject::Ours(wanted) if wanted.missing.is_any());
        self.missing_since = is_missing.then(|| self.missing_since.unwrap_or(now));
    }

    /// Records the reports of gateways. Those of gateways that knew no backend do not count, because they are older than
    /// the first backend.
    pub(super) fn observe(&mut self, wanted: &WantedStatus, view: &GatewaysView<'_>) {
        let reports = view.gateways.iter().map(|gateway| gateway.health.get(&wanted.object.name).filter(|one| one.backends > 0));
        let reports: Vec<_> = reports.collect();
        let finds_none = reports.iter().flatten().count();
        self.health = if reports.iter().flatten().any(|one| one.healthy > 0) {
            BackendHealth::Some
        } else if finds_none == 0 {
            BackendHealth::Unknown
        } else if finds_none == reports.len() {
            BackendHealth::None
        } else if let BackendHealth::NoneSoFar(since) = self.health {
            if view.now >= since + REPORTS_AWAITED { BackendHealth::None } else { self.health }
        } else if self.health == BackendHealth::None {
            BackendHealth::None
        } else {
            BackendHealth::NoneSoFar(view.now)
        };
    }

    /// Records a write, and when it changes `BackendsHealthy`, if it does.
    pub(super) fn is_written(&mut self, health_changed_at: Option<Instant>) {
        self.health_changed_before = self.health_changed_at;
        self.health_changed_at = health_changed_at.or(self.health_changed_at);
    }

    /// The last write did not apply.
    pub(super) const fn write_was_stale(&mut self) {
        self.health_changed_at = self.health_changed_before;
    }
}

/// A Service that is ours at one time.
pub(super) struct Situation<'a> {
    pub(super) wanted: &'a WantedStatus,
    pub(super) state: LifeState,
    /// The content of the object once the last write is accepted.
    pub(super) known: &'a OwnedParts,
    /// The content that the object has for certain.
    pub(super) published: &'a OwnedParts,
    pub(super) view: &'a GatewaysView<'a>,
    pub(super) timers: &'a Timers,
    /// Whether another program keeps changing the object.
    pub(super) is_left_alone: bool,
}

impl Situation<'_> {
    pub(super) fn goal(&self, step: &mut LifeStep) -> OwnedParts {
        let (wanted, published) = (self.wanted, self.published);
        // A write that still waits may be replaced, so only published addresses are kept.
        let mut goal = OwnedParts {
            ingress: published.ingress.clone(),
            ingress_without_ip: published.ingress_without_ip,
            ..self.known.clone()
        };
        if !wanted.object.uid.is_empty() && !self.is_left_alone {
            (goal.finalizer, goal.group) = (true, Some(wanted.group.clone()));
        }
        let is_new = |ingress: &&Ingress| !published.ingress.iter().any(|old| old.leads_as(ingress));
        let waits = wanted.ingress.iter().filter(is_new).any(|ingress| ingress.ip_mode == IpMode::Proxy);
        if wanted.refusal().is_some() {
            goal.ingress.retain(|old| wanted.ingress.iter().any(|new| new.ip == old.ip));
            goal.ingress_without_ip = 0;
        } else if !self.is_left_alone && (self.is_serving() || !waits) {
            goal.ingress.clone_from(&wanted.ingress);
            goal.ingress_without_ip = 0;
        }
        if !self.is_left_alone {
            self.set_ports(&mut goal, step);
        }
        goal.conditions.insert(ConditionType::AddressAssigned, address_assigned(wanted));
        if let Some(condition) = self.programmed(step) {
            goal.conditions.insert(ConditionType::Programmed, condition);
        }
        if wanted.refusal().is_some() {
            goal.conditions.remove(&ConditionType::BackendsHealthy);
        } else if let Some(condition) = self.backends_healthy(step) {
            goal.conditions.insert(ConditionType::BackendsHealthy, condition);
        }
        goal
    }

    const fn is_serving(&self) -> bool {
        matches!(self.state, LifeState::Serving { .. })
    }

    /// Reports for each port of each of our addresses whether it is served. If the Service cannot be parsed, its ports
    /// are unknown, and those in the status are used.
    fn set_ports(&self, goal: &mut OwnedParts, step: &mut LifeStep) {
        let wanted = self.wanted;
        let is_settled = self.is_grace_over(step);
        for entry in &mut goal.ingress {
            let Some(ours) = wanted.ingress.iter().find(|ours| ours.ip == entry.ip) else { continue };
            if !ours.ports.is_empty() {
                entry.ports.clone_from(&ours.ports);
            }
            let old_ports = self.known.ingress.iter().find(|old| old.ip == entry.ip).map_or(&[][..], |old| &old.ports);
            for port in &mut entry.ports {
                let is_reported =
                    old_ports.iter().any(|old| old.error.as_deref() == Some(PORT_NOT_MATCHED) && is_same_port(old, port));
                let is_unmatched = wanted.missing.unmatched.contains(&(port.protocol, port.port)) && (is_settled || is_reported);
                let refused = wanted.refusal().map(|reason| Cow::Owned(format!("{ANNOTATION_PREFIX}{}", reason.as_str())));
                port.error = refused.or(is_unmatched.then_some(Cow::Borrowed(PORT_NOT_MATCHED)));
            }
        }
    }

    /// Whether the grace time for slices is over.
    fn is_grace_over(&self, step: &mut LifeStep) -> bool {
        let Some(due) = self.timers.missing_since.map(|since| since + SLICES_AWAITED) else { return false };
        if due > self.view.now {
            step.wake_by(due);
        }
        due <= self.view.now
    }

    /// `None` keeps the condition of the object.
    fn programmed(&self, step: &mut LifeStep) -> Option<Condition> {
        let old = self.known.conditions.get(&ConditionType::Programmed);
        let was_programmed = old.is_some_and(|condition| condition.holds);
        let (gateways, refusal) = match by_gateways(self.wanted, self.state, self.view) {
            Some(NotForwarded::Refused(reason)) => return Some(not_served(reason)),
            _ if self.is_left_alone => return Some(not_served(Reason::ForeignStatusWriter)),
            None => return Some(conditions::programmed(self.wanted)),
            Some(NotForwarded::NoGateway(since)) => {
                let tolerated_until = since + ABSENCE_TOLERATED;
                if was_programmed && self.view.now < tolerated_until {
                    step.wake_by(tolerated_until);
                    return None;
                }
                return Some(not_served(Reason::NoGateway));
            }
            Some(NotForwarded::Pending) => {
                let waited_for_gateways =
                    old.is_some_and(|old| old.reason == Reason::NoGateway.as_str() || is_refused_by_gateways(old));
                return (!was_programmed && !waited_for_gateways).then_some(conditions::PENDING);
            }
            Some(NotForwarded::ByGateways(gateways, refusal)) => (gateways, refusal),
        };
        let condition = refused_by_gateways(&gateways, &refusal);
        if !old.is_some_and(|old| old.says_the_same(&condition)) {
            step.remarks_of_write.push(Remark::new(Cause::Reason(refusal.reason), condition.message.clone()));
        }
        Some(condition)
    }

    /// `None` keeps the condition of the object.
    fn backends_healthy(&self, step: &mut LifeStep) -> Option<Condition> {
        let missing = &self.wanted.missing;
        let condition = if missing.is_whole {
            if !self.is_grace_over(step) {
                return None;
            }
            if missing.unmatched.is_empty() { conditions::NO_ENDPOINTS } else { conditions::NO_MATCHING_PORT }
        } else {
            match self.timers.health {
                BackendHealth::Unknown => return None,
                BackendHealth::Some => conditions::HEALTHY,
                BackendHealth::NoneSoFar(since) => {
                    step.wake_by(since + REPORTS_AWAITED);
                    return None;
                }
                BackendHealth::None => conditions::NONE_HEALTHY,
            }
        };
        let old = self.known.conditions.get(&ConditionType::BackendsHealthy);
        let may_change_at = self.timers.health_changed_at.map(|at| at + HEALTH_CHANGE_INTERVAL);
        if let Some(at) = may_change_at.filter(|at| *at > self.view.now)
            && !old.is_some_and(|old| old.says_the_same(&condition))
        {
            step.wake_by(at);
            return None;
        }
        Some(condition)
    }
}

/// The notes for a change from `base` to `goal`. Refusals are reported by the plan, with their own messages.
pub(super) fn remarks(wanted: &WantedStatus, base: &OwnedParts, goal: &OwnedParts) -> Vec<Remark> {
    let of = |held: &OwnedParts, kind| held.conditions.get(&kind).map(|condition| (condition.holds, condition.reason.clone()));
    let turns = |kind, holds| of(goal, kind).is_some_and(|now| now.0 == holds) && of(base, kind) != of(goal, kind);
    let comes = |kind| turns(kind, true) && of(base, kind).is_none_or(|before| !before.0);
    let addresses = |held: &OwnedParts| held.ingress.iter().map(|ingress| ingress.ip).collect::<Vec<_>>();
    let mut remarks = Vec::new();
    let is_assigned = of(goal, ConditionType::AddressAssigned).is_some_and(|now| now.0);
    let is_exchanged = !base.ingress.is_empty() && !goal.ingress.is_empty() && addresses(base) != addresses(goal);
    let is_soon_programmed = of(goal, ConditionType::Programmed).is_some_and(|now| now.0 || now.1 == conditions::PENDING.reason);
    // One Event for a new Service: that of its programming names the addresses.
    if is_assigned && (is_exchanged || (comes(ConditionType::AddressAssigned) && !is_soon_programmed)) {
        remarks.push(Remark::new(Cause::AddressAssigned, format!("Assigned {}", addresses_text(wanted))));
    }
    if comes(ConditionType::Programmed) && !is_exchanged {
        let text = format!("Gateways forward for the Service at {}", addresses_text(wanted));
        remarks.push(Remark::new(Cause::Programmed, text));
    }
    if reports_unmatched_port(goal) && !reports_unmatched_port(base) {
        remarks.push(Remark::new(Cause::NoMatchingPort, wanted.missing.sentence.clone()));
    }
    let is_of_ports = of(goal, ConditionType::BackendsHealthy).is_some_and(|now| now.1 == Cause::NoMatchingPort.as_str());
    if turns(ConditionType::BackendsHealthy, false) && !is_of_ports {
        remarks.push(without_backend(wanted));
    }
    remarks
}

/// "address 192.0.2.10 of pool default".
fn addresses_text(wanted: &WantedStatus) -> String {
    let addresses: Vec<_> = wanted.ingress.iter().map(|ingress| ingress.ip.to_string()).collect();
    let plural = |count: usize, word: &str, more: &str| if count == 1 { word.to_owned() } else { format!("{word}{more}") };
    let of_pools = match &wanted.pools[..] {
        [] => ", outside of the pools".to_owned(),
        pools => format!(" of {} {}", plural(pools.len(), "pool", "s"), pools.join(" and ")),
    };
    format!("{} {}{of_pools}", plural(addresses.len(), "address", "es"), addresses.join(" and "))
}

fn without_backend(wanted: &WantedStatus) -> Remark {
    if wanted.missing.is_whole {
        let text = "The Service has no endpoint that takes new connections: none is ready, or all are drained. Connections \
                    are refused until one is";
        return Remark::new(Cause::NoEndpoints, text);
    }
    let meanwhile = if wanted.fails_open {
        "All of them are used until one passes (health.failOpen: true)"
    } else {
        "Connections are refused until one passes (health.failOpen: false)"
    };
    let text = format!("No gateway finds a healthy backend of the Service: all fail their probes. {meanwhile}");
    Remark::new(Cause::NoHealthyBackend, text)
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
