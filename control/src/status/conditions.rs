//! Conditions of a Service. Their messages are the same for all Services and contain no counts and no names except those of
//! pools and of gateways that refuse the Service: every write to a Service goes to every kube-proxy, so details of one
//! Service belong in Events.

use std::collections::BTreeSet;

use proto::{Reason, Refusal};

use crate::plan::WantedStatus;
use objects::Condition;
use objects::note::Cause;

/// Prefix of a message that names the gateways which do not serve a Service.
const NOT_SERVED_BY: &str = "Not served, or not wholly, by gateway ";
/// Maximum number of gateways named in a message; a group has about a dozen.
const GATEWAYS_NAMED_MAX: usize = 12;

/// Progress of the gateways with a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All forward it as requested.
    Done,
    /// Some have not applied it yet.
    Pending,
    /// None is connected.
    NoGateway,
    /// Another controller keeps writing its status.
    Contested,
}

/// `sluice.dev/AddressAssigned`.
pub(super) fn address_assigned(wanted: &WantedStatus) -> Condition {
    match wanted.unassigned {
        Some(reason) => Condition::new(false, reason.as_str(), sentence(reason)),
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

/// `sluice.dev/Programmed`.
pub(super) fn programmed(wanted: &WantedStatus, progress: Progress) -> Condition {
    if let Some(reason) = wanted.refusal {
        return Condition::new(false, reason.as_str(), sentence(reason));
    }
    match progress {
        Progress::Done if wanted.is_partly_unread => {
            let text =
                "Gateways forward for it; something that it asks for cannot be read and has no effect, the Event names it.";
            Condition::new(true, Cause::AnnotationIgnored.as_str(), text)
        }
        Progress::Done => Condition::new(true, "Programmed", "Gateways forward for it."),
        Progress::Pending => Condition::new(false, "Pending", "Gateways do not forward for it yet."),
        Progress::NoGateway => Condition::new(false, Reason::NoGateway.as_str(), sentence(Reason::NoGateway)),
        Progress::Contested => Condition::new(false, Reason::ForeignStatusWriter.as_str(), sentence(Reason::ForeignStatusWriter)),
    }
}

/// `sluice.dev/Programmed` of a Service that gateways refuse, wholly or in part. The message names them and their reason,
/// because only they know it.
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

/// Health of the backends of a Service as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backends {
    /// A gateway has a healthy backend.
    Healthy,
    /// No backend accepts new connections.
    NoEndpoints,
    /// There are endpoints, but none has the ports of the Service.
    NoMatchingPort,
    /// No backend passes its probes.
    NoneHealthy,
}

/// `sluice.dev/BackendsHealthy`.
pub(super) fn backends_healthy(backends: Backends) -> Condition {
    let unhealthy = |cause: Cause, text| Condition::new(false, cause.as_str(), text);
    match backends {
        Backends::Healthy => Condition::new(true, "Healthy", "Gateways find healthy backends."),
        Backends::NoEndpoints => unhealthy(Cause::NoEndpoints, "It has no endpoint that takes new connections."),
        Backends::NoMatchingPort => unhealthy(
            Cause::NoMatchingPort,
            "No EndpointSlice has a port that it asks for; the Event names those that they have.",
        ),
        Backends::NoneHealthy => unhealthy(Cause::NoHealthyBackend, "No gateway finds a healthy backend: all fail their probes."),
    }
}

const fn sentence(reason: Reason) -> &'static str {
    match reason {
        Reason::NoGateway => "No gateway is connected to the controller.",
        Reason::ForeignStatusWriter => "Somebody else keeps writing its status; the Event names the writer.",
        Reason::OutsidePools => "It asks for an address that lies in no pool.",
        Reason::Unsupported => "It asks for what this version does not support; the Event names it.",
        Reason::Refused => "It asks for what cannot be served; the Event says why.",
        Reason::NoEligibleNode => "No node may take its traffic; the Event says why.",
        Reason::Conflict => "Another Service holds what it asks for; the Event names it.",
        Reason::Exhausted => "No address is left for it.",
    }
}
