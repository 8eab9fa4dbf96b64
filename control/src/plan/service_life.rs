//! The life of a Service: the phases in which gateways get it or not, the states in which its object is, and the
//! transitions between them.
//!
//! Invariant: two pure functions decide, and nothing else. [`Phase::next`] says what gateways get; it follows from the
//! object, its allocation, the phase before and the time. `LifeState::planned` and `LifeState::observed` say where the
//! Service stands then; that follows from the phase, the acknowledgements of gateways and the time. The table of
//! transitions stands in docs/internals/service-life.md, and a test walks it. A Service without a state is unclaimed or
//! released.
//! Deliberately not here: why a Service is not served (`unserved`), and what is written to its object (`status::life`).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use imbl::OrdMap;
use objects::status::{Ingress, IpMode};
use objects::{ConditionType, ServiceObject};
use proto::{Reason, ServiceName};
use tokio::time::Instant;

use crate::gateways::registry::Gateways;
use crate::plan::selection::MissingBackends;
use crate::plan::tenure::Cleanup;

/// How long gateways wait for what must be written to the object first: the finalizer of a new Service, or the status of
/// a new mode. The limit keeps an API server that is unavailable or refuses the write from blocking an owner's change for
/// ever.
pub(crate) const STATUS_WAITED_FOR: Duration = Duration::from_secs(10);
/// Longest delay of a status by slow or broken gateways, after the first gateway applied the generation.
pub(crate) const SLOW_GATEWAY_WAITED_FOR: Duration = Duration::from_secs(2);

/// What gateways get of a Service that is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing: its object is marked by the finalizer first, so that its deletion is not missed; at most until then.
    Marking {
        /// The end of the wait.
        until: std::time::Instant,
    },
    /// The Service without ports, so that they can tell this reason.
    Refused(Reason),
    /// The Service as planned.
    Given {
        /// Until when the mode before stays in force: a node accepts packets for a VIP only once the status tells it to.
        turns_at: Option<std::time::Instant>,
    },
}

impl Phase {
    /// Gateways get the Service as planned, and nothing waits.
    pub(crate) const GIVEN: Self = Self::Given { turns_at: None };

    /// The phase after a plan that allocates these addresses, and refuses the Service for this reason, if it does. `before`
    /// is that of the last plan, and `turns` tells that the plan changes a mode in which nodes do not see the VIP to one in
    /// which they do.
    #[must_use]
    pub fn next(
        before: Option<Self>,
        object: &ServiceObject,
        allocated: &[IpAddr],
        refusal: Option<Reason>,
        turns: bool,
        now: std::time::Instant,
    ) -> Self {
        if let Some(reason) = refusal {
            return Self::Refused(reason);
        }
        let is_ours = |ingress: &&Ingress| allocated.contains(&ingress.ip);
        let mut published = object.held.ingress.iter().filter(is_ours);
        let waits_until =
            |begun: Option<std::time::Instant>| Some(begun.unwrap_or(now + STATUS_WAITED_FOR)).filter(|until| *until > now);
        // No finalizer, and no node that reads the status.
        let is_manifest = object.uid.is_empty();
        if let Some(Self::Given { turns_at }) = before {
            let is_told = is_manifest || !published.any(|ingress| ingress.ip_mode == IpMode::Proxy);
            return Self::Given { turns_at: waits_until(turns_at).filter(|_| turns && !is_told) };
        }
        let begun = if let Some(Self::Marking { until }) = before { Some(until) } else { None };
        // A Service whose status already has an address is served.
        let is_marked = object.held.finalizer || published.next().is_some();
        let needs_none = is_manifest || !object.is_load_balancer || is_marked;
        match waits_until(begun).filter(|_| !needs_none) {
            Some(until) => Self::Marking { until },
            None => Self::GIVEN,
        }
    }

    /// When time alone may change it.
    pub(super) const fn ends_at(self) -> Option<std::time::Instant> {
        match self {
            Self::Marking { until } => Some(until),
            Self::Given { turns_at } => turns_at,
            Self::Refused(_) => None,
        }
    }

    /// Whether the mode before stays in force.
    pub(crate) const fn is_turning(self) -> bool {
        matches!(self, Self::Given { turns_at: Some(_) })
    }
}

/// The statuses of Services; copied and compared as [`proto::Services`] are.
pub type WantedStatuses = OrdMap<ServiceName, Arc<WantedStatus>>;

/// What the object of a Service that is ours shall tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedStatus {
    /// The object as the plan saw it.
    pub object: Arc<ServiceObject>,
    /// Our group, written to the object together with the finalizer.
    pub group: String,
    /// What gateways get. While they get it without ports, addresses that it does not hold are removed from its status and
    /// none are added.
    pub phase: Phase,
    /// Desired addresses, in family order.
    pub ingress: Vec<Ingress>,
    /// The pools of these addresses, in their order.
    pub pools: Vec<String>,
    /// What of the addresses is not as it asks.
    pub shortfall: Option<Shortfall>,
    /// In what it is not served as it asks, the worst first.
    pub limitations: Vec<Limitation>,
    /// Why it has no backends.
    pub missing: MissingBackends,
    /// Whether all backends are used if none is healthy (fail open).
    pub fails_open: bool,
}

/// What of the addresses of a Service is not as it asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shortfall {
    /// It lacks an address that it requires; it is served at the others, if there are any.
    Lacks(Reason),
    /// One of its addresses lies outside every pool that it may use.
    OutsidePools,
    /// It lacks the address of a family that it prefers, but does not require.
    LacksPreferredFamily,
}

/// In what a Service is not served as it asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limitation {
    /// A part of it is refused, such as a port whose backends are all refused.
    PartRefused,
    /// A setting of it cannot be parsed, so that the previous value stays in force.
    Unread,
    /// Backends do not see the client's address.
    ClientAddressLost,
}

impl WantedStatus {
    /// The addresses that the status shall have.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ingress.iter().map(|ingress| ingress.ip)
    }

    /// Why it is not served, if the plan refuses it.
    #[must_use]
    pub const fn refusal(&self) -> Option<Reason> {
        if let Phase::Refused(reason) = self.phase { Some(reason) } else { None }
    }
}

/// What the plan knows of the object.
#[derive(Clone, Debug)]
pub(crate) enum PlannedObject {
    /// It is ours.
    Ours(Arc<WantedStatus>),
    /// It is not, or no longer, ours, and carries our finalizer, conditions or addresses.
    Left(Cleanup),
}

impl PlannedObject {
    /// The object as the plan saw it.
    pub(crate) fn object(&self) -> &ServiceObject {
        match self {
            Self::Ours(wanted) => &wanted.object,
            Self::Left(cleanup) => &cleanup.left,
        }
    }
}

/// The connected gateways at one time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatewaysView<'a> {
    pub(crate) gateways: &'a Gateways,
    /// Since when no gateway is connected; `None` while one is.
    pub(crate) absent_since: Option<Instant>,
    /// From when the fleet counts as heard in this term; `None` before any gateway was connected. A gateway that has not
    /// dialled again since the controller started may still forward.
    pub(crate) heard_at: Option<Instant>,
    pub(crate) now: Instant,
}

impl GatewaysView<'_> {
    pub(crate) fn is_fleet_heard(&self) -> bool {
        self.heard_at.is_some_and(|at| at <= self.now)
    }
}

/// The state of a Service. Counters are those of generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LifeState {
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
    pub(crate) fn planned(before: Option<(Self, &PlannedObject)>, claim: &PlannedObject, counter: u64, now: Instant) -> Self {
        match claim {
            PlannedObject::Ours(wanted) => match (wanted.phase, before) {
                (Phase::Refused(_), _) => Self::Refused,
                (Phase::Marking { .. }, _) => Self::Marking,
                (
                    Phase::Given { .. },
                    Some((state @ (Self::Programming { .. } | Self::Serving { .. }), PlannedObject::Ours(old))),
                ) if have_same_addresses(&old.ingress, &wanted.ingress) => state,
                // Its mark was written in this term, so gateways have not had it, whatever its conditions still say.
                (_, Some((Self::Marking, _))) => Self::Programming { counter, first_at: None },
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
    pub(crate) fn observed(self, view: &GatewaysView<'_>) -> Self {
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
    pub(crate) fn again_at(self) -> Option<Instant> {
        match self {
            Self::Programming { first_at, .. } => first_at.map(|first| first + SLOW_GATEWAY_WAITED_FOR),
            _ => None,
        }
    }
}

/// Whether gateways forwarded for it before this controller led.
fn was_serving(wanted: &WantedStatus) -> bool {
    let held = &wanted.object.held;
    let is_programmed = held.conditions.get(&ConditionType::Programmed).is_some_and(|condition| condition.holds);
    is_programmed && have_same_addresses(&held.ingress, &wanted.ingress)
}

fn have_same_addresses(one: &[Ingress], other: &[Ingress]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.leads_as(other))
}
