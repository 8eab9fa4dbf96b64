//! Conditions of a Service. Their messages are the same for all Services and contain no counts and no names except
//! those of pools and of gateways that refuse the Service: every write to a Service goes to every kube-proxy, so
//! details of one Service belong in Events.

use std::collections::BTreeSet;

use proto::{Reason, Refusal};

use crate::plan::WantedStatus;
use crate::plan::service_life::{Limitation, Shortfall};
use objects::Condition;
use objects::note::{Cause, Remark};

/// Prefix of a message that names the gateways which do not serve a Service.
const NOT_SERVED_BY: &str = "Not served, or not wholly, by gateway ";
/// Maximum number of gateways named in a message; a group has about a dozen.
const GATEWAYS_NAMED_MAX: usize = 12;

/// `sluice.dev/Programmed`: all gateways forward for the Service as requested.
pub(super) const PROGRAMMED: Condition = Condition::new(true, "Programmed", "Gateways forward for the Service.");
/// As [`PROGRAMMED`], but a setting cannot be parsed.
pub(super) const PARTLY_PROGRAMMED: Condition = Condition::new(
    true,
    Cause::AnnotationIgnored.as_str(),
    "Gateways forward for the Service. The value of an annotation is not valid and has no effect; the Event names it.",
);
/// As [`PROGRAMMED`], but a part is refused, such as a port whose backends are all refused.
pub(super) const PARTLY_REFUSED: Condition = Condition::new(
    true,
    Reason::Refused.as_str(),
    "Gateways forward for the Service, except for the part that is refused; the Event names it.",
);
/// As [`PROGRAMMED`], but backends do not see the client's address that the Service asks for.
pub(super) const CLIENT_ADDRESS_LOST: Condition = Condition::new(
    true,
    "Programmed",
    "Gateways forward for the Service. Backends see an address of the gateway instead of the client's: mode nat rewrites it \
     even under externalTrafficPolicy: Local; modes dnat, dsr, ipip and gue keep it.",
);
/// `sluice.dev/Programmed`: some gateways have not applied the Service yet.
pub(super) const PENDING: Condition = Condition::new(false, "Pending", "Gateways do not forward for the Service yet.");

/// `sluice.dev/BackendsHealthy`: a gateway has a healthy backend.
pub(super) const HEALTHY: Condition = Condition::new(true, "Healthy", "Gateways find healthy backends.");
/// `sluice.dev/BackendsHealthy`: no backend accepts new connections.
pub(super) const NO_ENDPOINTS: Condition =
    Condition::new(false, Cause::NoEndpoints.as_str(), "The Service has no endpoint that takes new connections.");
/// `sluice.dev/BackendsHealthy`: there are endpoints, but none has the ports of the Service.
pub(super) const NO_MATCHING_PORT: Condition = Condition::new(
    false,
    Cause::NoMatchingPort.as_str(),
    "No EndpointSlice has a port that the Service names; the Event lists the ports that they have.",
);
/// `sluice.dev/BackendsHealthy`: no backend passes its probes.
pub(super) const NONE_HEALTHY: Condition =
    Condition::new(false, Cause::NoHealthyBackend.as_str(), "No gateway finds a healthy backend: all fail their probes.");

/// `sluice.dev/AddressAssigned`: one of its addresses lies outside every pool that it may use.
const OUTSIDE_POOLS: Condition = Condition::new(
    true,
    Reason::OutsidePools.as_str(),
    "The Service keeps an address outside of the pools that it may use; the Event names the address.",
);
/// Message of a Service that requires two families and has one.
const PARTLY_ASSIGNED: &str =
    "Served at the address of one family; the address of the other family is missing; the Event has the reason.";

/// `sluice.dev/AddressAssigned`.
pub(super) fn address_assigned(wanted: &WantedStatus) -> Condition {
    let is_refused = wanted.refusal().is_some();
    let plural = if wanted.pools.len() == 1 { "" } else { "s" };
    let pools = || format!("from pool{plural} {}", wanted.pools.join(", "));
    match wanted.shortfall {
        Some(Shortfall::Lacks(reason)) if is_refused => not_served(reason),
        Some(Shortfall::Lacks(reason)) => Condition::new(false, reason.as_str(), PARTLY_ASSIGNED),
        Some(Shortfall::OutsidePools) => OUTSIDE_POOLS,
        Some(Shortfall::LacksPreferredFamily) => {
            let text = format!("Served at the address of one family, {}; the Service does not require the other.", pools());
            Condition::naming(true, "Assigned", text)
        }
        None => Condition::naming(true, "Assigned", format!("Every address is assigned, {}.", pools())),
    }
}

/// `sluice.dev/Programmed` of a Service that all gateways serve as planned.
pub(super) fn programmed(wanted: &WantedStatus) -> Condition {
    wanted.limitations.first().map_or(PROGRAMMED, |worst| limited(*worst))
}

const fn limited(limitation: Limitation) -> Condition {
    match limitation {
        Limitation::PartRefused => PARTLY_REFUSED,
        Limitation::Unread => PARTLY_PROGRAMMED,
        Limitation::ClientAddressLost => CLIENT_ADDRESS_LOST,
    }
}

/// Why a Service that is served lacks something, as its conditions tell. Health is left to gateways, which see it
/// themselves.
pub(crate) fn shortcomings(wanted: &WantedStatus) -> Vec<Condition> {
    if wanted.refusal().is_some() {
        return Vec::new();
    }
    let missing = match &wanted.missing {
        missing if !missing.unmatched.is_empty() => Some(NO_MATCHING_PORT),
        missing => missing.is_whole.then_some(NO_ENDPOINTS),
    };
    let causes = wanted.limitations.iter().filter(|one| **one != Limitation::ClientAddressLost).map(|one| limited(*one));
    let addresses = wanted.shortfall.filter(|one| *one != Shortfall::LacksPreferredFamily).map(|_| address_assigned(wanted));
    missing.into_iter().chain(causes).chain(addresses).collect()
}

/// The note on an object that is no longer ours.
pub(super) fn released() -> Remark {
    Remark::new(Cause::Released, "Gateways no longer forward for the Service; sluice removed all of its entries from the object")
}

/// A condition that does not hold for this reason.
pub(crate) const fn not_served(reason: Reason) -> Condition {
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
        Reason::ForeignStatusWriter => {
            "Another program keeps changing what sluice writes to the Service; the Event names it and the remedy."
        }
        Reason::OutsidePools => "The Service requests an address that lies in no pool; the Event names the address.",
        Reason::Unsupported => "The Service requests a setting that this version does not support; the Event names the setting.",
        Reason::Refused => "The Service has a setting that cannot be served; the Event names the setting and the remedy.",
        Reason::NoEligibleNode => "No node is eligible for the traffic of the Service; the Event has the reason.",
        Reason::Conflict => "Another Service holds the requested address, port or key; the Event names that Service.",
        Reason::AddressReleasing => "Gateways may still forward the requested address for the Service that freed it.",
        Reason::Exhausted => "No pool that the Service may use has an address left.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::selection::MissingBackends;
    use crate::plan::service_life::Phase;
    use crate::status::tests::{ingress, wanted};
    use objects::status::IpMode;

    #[test]
    fn every_cause_that_a_condition_shows_is_a_shortcoming() {
        let served = || wanted(&[ingress(1, IpMode::Vip)]);
        let reasons = |wanted: &WantedStatus| shortcomings(wanted).into_iter().map(|c| c.reason.into_owned()).collect::<Vec<_>>();
        assert_eq!(reasons(&served()), [""; 0]);
        let unmatched = || MissingBackends { unmatched: [(proto::Protocol::Tcp, 80)].into(), ..MissingBackends::default() };
        let rows = [
            ("NoEndpoints", WantedStatus { missing: MissingBackends { is_whole: true, ..Default::default() }, ..served() }),
            ("NoMatchingPort", WantedStatus { missing: unmatched(), ..served() }),
            ("Refused", WantedStatus { limitations: vec![Limitation::PartRefused], ..served() }),
            ("AnnotationIgnored", WantedStatus { limitations: vec![Limitation::Unread], ..served() }),
            ("OutsidePools", WantedStatus { shortfall: Some(Shortfall::OutsidePools), ..served() }),
            ("Exhausted", WantedStatus { shortfall: Some(Shortfall::Lacks(Reason::Exhausted)), ..served() }),
        ];
        for (expected, wanted) in rows {
            assert_eq!(reasons(&wanted), [expected]);
        }
        let limitations = vec![Limitation::Unread, Limitation::ClientAddressLost];
        let shortfall = Some(Shortfall::OutsidePools);
        let all = WantedStatus { missing: unmatched(), limitations, shortfall, ..served() };
        assert_eq!(reasons(&all), ["NoMatchingPort", "AnnotationIgnored", "OutsidePools"]);
        let refused = WantedStatus { phase: Phase::Refused(Reason::Refused), ..all };
        assert!(reasons(&refused).is_empty(), "the refusal is the reason");
    }

    #[test]
    fn messages_are_sentences_about_the_service() {
        let all = [PROGRAMMED, PARTLY_PROGRAMMED, PARTLY_REFUSED, CLIENT_ADDRESS_LOST, PENDING, HEALTHY, NO_ENDPOINTS]
            .into_iter()
            .chain([NO_MATCHING_PORT, NONE_HEALTHY, address_assigned(&wanted(&[]))])
            .chain(Reason::ALL.iter().map(|reason| not_served(*reason)));
        for condition in all {
            let message = condition.message;
            assert!(message.ends_with('.') && message.starts_with(char::is_uppercase), "{message}");
            assert!(!message.starts_with("It ") && !message.contains(" it has"), "{message}");
        }
    }
}
