//! What the conditions of a Service say. Their sentences are the same for all Services, without counts and names: every write
//! of a Service goes to every kube-proxy, and what is particular to one Service is told by an Event.

use proto::Reason;

use crate::plan::WantedStatus;
use crate::spec::Condition;

/// How far gateways are with a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// They forward as it asks.
    Done,
    /// Not all of them yet.
    Pending,
    /// None is connected.
    NoGateway,
    /// Somebody else keeps writing its status.
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
        None => Condition::new(true, "Assigned", "It has every address that it needs."),
    }
}

/// `sluice.dev/Programmed`.
pub(super) fn programmed(wanted: &WantedStatus, progress: Progress) -> Condition {
    if let Some(reason) = wanted.refusal {
        return Condition::new(false, reason.as_str(), sentence(reason));
    }
    match progress {
        Progress::Done => Condition::new(true, "Programmed", "Gateways forward for it."),
        Progress::Pending => Condition::new(false, "Pending", "Gateways do not forward for it yet."),
        Progress::NoGateway => Condition::new(false, Reason::NoGateway.as_str(), sentence(Reason::NoGateway)),
        Progress::Contested => Condition::new(false, Reason::ForeignStatusWriter.as_str(), sentence(Reason::ForeignStatusWriter)),
    }
}

/// `sluice.dev/BackendsHealthy`.
pub(super) fn backends_healthy(is_any: bool) -> Condition {
    if is_any {
        Condition::new(true, "Healthy", "Gateways find healthy backends.")
    } else {
        Condition::new(false, "NoHealthyBackend", "No gateway finds a healthy backend.")
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
