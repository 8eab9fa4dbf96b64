//! The states of a Service, and the transitions between them.
//!
//! Invariant: the next state follows from the state, the plan, the gateways and the time alone ([`LifeState::planned`],
//! [`LifeState::observed`]). The table of transitions stands in docs/internals/service-life.md, and a test walks it. A Service
//! without a state is unclaimed or released.
//! Deliberately not here: what is due in a state (`life`).

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::gateways::registry::Gateways;
use crate::plan::{Cleanup, WantedStatus};
use objects::note::Remark;
use objects::status::{Ingress, StatusWrite};
use objects::{ConditionType, OwnedParts};

/// Longest delay of a status by slow or broken gateways, after the first gateway applied the generation.
pub(super) const SLOW_GATEWAY_WAITED_FOR: Duration = Duration::from_secs(2);
/// Longest time that a deletion waits for gateways.
pub(super) const GATEWAYS_WAITED_FOR: Duration = Duration::from_secs(10);
/// Time for the installation of the Service's class, which needs at most `GATEWAYS_WAITED_FOR`; three times that.
pub(super) const OTHERS_WAITED_FOR: Duration = Duration::from_secs(30);
/// Time from the first gateway of a term until the fleet counts as heard: gateways dial again within it.
pub(super) const FLEET_HEARD_AFTER: Duration = Duration::from_secs(2);

/// The connected gateways at one time.
#[derive(Clone, Copy, Debug)]
pub(super) struct GatewaysView<'a> {
    pub(super) gateways: &'a Gateways,
    /// Since when no gateway is connected; `None` while one is.
    pub(super) absent_since: Option<Instant>,
    /// From when the fleet counts as heard in this term; `None` before any gateway was connected. A gateway that has not
    /// dialled again since the controller started may still forward.
    pub(super) heard_at: Option<Instant>,
    pub(super) now: Instant,
}

impl GatewaysView<'_> {
    pub(super) fn is_fleet_heard(&self) -> bool {
        self.heard_at.is_some_and(|at| at <= self.now)
    }
}

/// What the plan knows of the object.
#[derive(Clone, Debug)]
pub(super) enum PlannedObject {
    /// It is ours.
    Ours(Arc<WantedStatus>),
    /// It is not, or no longer, ours, and carries our finalizer, conditions or addresses.
    Left(Cleanup),
}

impl PlannedObject {
    /// The uid of the object; empty for manifests.
    pub(super) fn uid(&self) -> &str {
        match self {
            Self::Ours(wanted) => &wanted.uid,
            Self::Left(cleanup) => &cleanup.left.uid,
        }
    }

    pub(super) fn resource_version(&self) -> &str {
        match self {
            Self::Ours(wanted) => &wanted.resource_version,
            Self::Left(cleanup) => &cleanup.left.resource_version,
        }
    }

    /// The content of the object as the plan saw it.
    pub(super) fn held(&self) -> &OwnedParts {
        match self {
            Self::Ours(wanted) => &wanted.held,
            Self::Left(cleanup) => &cleanup.left.held,
        }
    }
}

/// The state of a Service. Counters are those of generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LifeState {
    /// Its finalizer is being written; gateways do not get it yet.
    Marking,
    /// Gateways get it since this generation; the first one applied it then.
    Programming { counter: u64, first_at: Option<Instant> },
    /// Gateways forward for it since this generation.
    Serving { counter: u64 },
    /// It is not served, and the plan has the reason.
    Refused,
    /// Gateways let go of it since this generation. `was_ours`: it was ours in this term.
    Withdrawing { counter: u64, since: Instant, was_ours: bool },
}

impl LifeState {
    /// The state after a plan that gateways get as generation `counter`. `before` is the state of the
    /// same object, and what the last plan knew of it.
    pub(super) fn planned(before: Option<(Self, &PlannedObject)>, claim: &PlannedObject, counter: u64, now: Instant) -> Self {
        match claim {
            PlannedObject::Ours(wanted) if wanted.refusal.is_some() => Self::Refused,
            PlannedObject::Ours(wanted) if wanted.is_withheld => Self::Marking,
            PlannedObject::Ours(wanted) => match before {
                Some((state @ (Self::Programming { .. } | Self::Serving { .. }), PlannedObject::Ours(old)))
                    if have_same_addresses(&old.ingress, &wanted.ingress) =>
                {
                    state
                }
                _ if was_serving(wanted) => Self::Serving { counter },
                _ => Self::Programming { counter, first_at: None },
            },
            PlannedObject::Left(cleanup) => match before {
                Some((Self::Withdrawing { counter, since, was_ours }, PlannedObject::Left(old))) => {
                    // For an object of another installation the time begins with its deletion.
                    let is_newly_deleted = !old.left.is_deleted && cleanup.left.is_deleted;
                    Self::Withdrawing { counter, since: if is_newly_deleted { now } else { since }, was_ours }
                }
                before => Self::Withdrawing { counter, since: now, was_ours: before.is_some() },
            },
        }
    }

    /// The state that gateways and time lead to.
    pub(super) fn observed(self, view: &GatewaysView<'_>) -> Self {
        let Self::Programming { counter, first_at } = self else { return self };
        let first_at = first_at.or(Some(view.now)).filter(|_| view.gateways.any_reached(counter));
        let waited_enough = first_at.is_some_and(|first| view.now >= first + SLOW_GATEWAY_WAITED_FOR);
        if waited_enough || view.gateways.all_reached(counter) {
            Self::Serving { counter }
        } else {
            Self::Programming { counter, first_at }
        }
    }

    /// When time alone may change it.
    pub(super) fn again_at(self) -> Option<Instant> {
        match self {
            Self::Programming { first_at, .. } => first_at.map(|first| first + SLOW_GATEWAY_WAITED_FOR),
            _ => None,
        }
    }
}

/// Whether gateways forwarded for it before this controller led.
fn was_serving(wanted: &WantedStatus) -> bool {
    let is_programmed = wanted.held.conditions.get(&ConditionType::Programmed).is_some_and(|condition| condition.holds);
    is_programmed && have_same_addresses(&wanted.held.ingress, &wanted.ingress)
}

fn have_same_addresses(one: &[Ingress], other: &[Ingress]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.leads_as(other))
}

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
