//! Conditions of a Service. Their messages are the same for all Services and contain no counts and no names except
//! those of pools and of gateways that refuse the Service: every write to a Service goes to every kube-proxy, so
//! details of one Service belong in Events.

use std::collections::BTreeSet;

use proto::{Reason, Refusal};

use crate::plan::WantedStatus;
use objects::Condition;
use objects::note::Cause;

/// Prefix of a message that names the gateways which do not serve a Service.
const NOT_SERVED_BY: &str = "Not served, or not wholly, by gateway ";
/// Maximum number of gateways named in a message; a group has about a dozen.
const GATEWAYS_NAMED_MAX: usize = 12;

/// `sluice.dev/Programmed`: all gateways forward for the Service as requested.
pub(super) const PROGRAMMED: Condition = Condition::new(true, "Programmed", "Gateways forward for it.");
/// As [`PROGRAMMED`], but a setting cannot be parsed.
pub(super) const PARTLY_PROGRAMMED: Condition = Condition::new(
    true,
    Cause::AnnotationIgnored.as_str(),
    "Gateways forward for it; a setting that it requests cannot be parsed and has no effect; the Event names it.",
);
/// As [`PROGRAMMED`], but a part is refused, such as a port whose backends are all refused.
pub(super) const PARTLY_REFUSED: Condition = Condition::new(
    true,
    Reason::Refused.as_str(),
    "Gateways forward for it, apart from what is refused of it; the Event names that.",
);
/// `sluice.dev/Programmed`: some gateways have not applied the Service yet.
pub(super) const PENDING: Condition = Condition::new(false, "Pending", "Gateways do not forward for it yet.");

/// `sluice.dev/BackendsHealthy`: a gateway has a healthy backend.
pub(super) const HEALTHY: Condition = Condition::new(true, "Healthy", "Gateways find healthy backends.");
/// `sluice.dev/BackendsHealthy`: no backend accepts new connections.
pub(super) const NO_ENDPOINTS: Condition =
    Condition::new(false, Cause::NoEndpoints.as_str(), "It has no endpoint that takes new connections.");
/// `sluice.dev/BackendsHealthy`: there are endpoints, but none has the ports of the Service.
pub(super) const NO_MATCHING_PORT: Condition = Condition::new(
    false,
    Cause::NoMatchingPort.as_str(),
    "No EndpointSlice has a port that it asks for; the Event names those that they have.",
);
/// `sluice.dev/BackendsHealthy`: no backend passes its probes.
pub(super) const NONE_HEALTHY: Condition =
    Condition::new(false, Cause::NoHealthyBackend.as_str(), "No gateway finds a healthy backend: all fail their probes.");

/// Message of a Service that requires two families and has one.
const PARTLY_ASSIGNED: &str =
    "Served at the address of one family; the address of the other family is missing; the Event has the reason.";

/// `sluice.dev/AddressAssigned`.
pub(super) fn address_assigned(wanted: &WantedStatus) -> Condition {
    match wanted.unassigned {
        Some(reason) if wanted.refusal.is_some() => not_served(reason),
        Some(reason) => Condition::new(false, reason.as_str(), PARTLY_ASSIGNED),
        None if wanted.outside_pools => Condition::new(
            true,
            Reason::OutsidePools.as_str(),
            "It keeps an address outside of the pools that it may use; the Event names it.",
        ),
        None => {
            let plural = if wanted.pools.len() == 1 { "" } else { "s" };
            let text = format!("It has every address that it needs, of pool{plural} {}.", wanted.pools.join(", "));
            Condition::naming(true, "Assigned", text)
        }
    }
}

/// `sluice.dev/Programmed` of a Service that all gateways serve as planned.
pub(super) const fn programmed(wanted: &WantedStatus) -> Condition {
    if wanted.is_partly_refused {
        PARTLY_REFUSED
    } else if wanted.is_partly_unread {
        PARTLY_PROGRAMMED
    } else {
        PROGRAMMED
    }
}

/// A condition that does not hold for this reason.
pub(super) const fn not_served(reason: Reason) -> Condition {
    Condition::new(false, reason.as_str(), sentence(reason))
}

/// `sluice.dev/Programmed` of a Service that gateways refuse, wholly or in part. The message names them and their
/// reason, because only they know it.
pub(super) fn refused_by_gateways(gateways: &BTreeSet<&str>, refusal: &Refusal) -> Condition {
    let names: Vec<_> = gateways.iter().take(GATEWAYS_NAMED_MAX).copied().collect();
    let more = if gateways.len() > names.len() { " and others" } else { "" };
    let message = format!("{NOT_SERVED_BY}{}{more}: {}", names.join(", "), refusal.message);
    Condition { message: message.into(), ..Condition::new(false, refusal.reason.as_str(), "") }
}

/// Whether the condition is one of [`refused_by_gateways`].
pub(super) fn is_refused_by_gateways(condition: &Condition) -> bool {
    !condition.holds && condition.message.starts_with(NOT_SERVED_BY)
}

const fn sentence(reason: Reason) -> &'static str {
    match reason {
        Reason::NoGateway => "No gateway is connected to the controller.",
        Reason::ForeignStatusWriter => "Another program keeps writing its status; the Event names it.",
        Reason::OutsidePools => "It asks for an address that lies in no pool.",
        Reason::Unsupported => "It requests a setting that this version does not support; the Event names it.",
        Reason::Refused => "It requests something that cannot be served; the Event has the reason.",
        Reason::NoEligibleNode => "No node is eligible for its traffic; the Event has the reason.",
        Reason::Conflict => "Another Service holds what it requests; the Event names it.",
        Reason::AddressReleasing => "The requested address is being released; gateways may still forward it.",
        Reason::Exhausted => "No address is left for it.",
    }
}
