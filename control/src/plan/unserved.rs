//! Why a Service is not served: every cause, in the order in which it counts.
//!
//! 1. No installation serves it: [`Unserved`].
//! 2. The plan refuses it, by its object, addresses and node ports ([`by_object`]), by its policy ([`Policy::refusal`]), or
//!    by its backends ([`by_backends`]). Gateways get it without ports, with this reason.
//! 3. Gateways do not forward for it: [`by_gateways`].
//!
//! Deliberately not here: why it lacks an address (`addresses`) or a node port (`assignment`), why an object cannot be
//! parsed (package `objects`), and how its owner is told (`status`).

use std::collections::{BTreeMap, BTreeSet};

use objects::note::{Cause, Remark, quoted};
use objects::service::{SpecError, Unread};
use objects::text::shortened;
use objects::{Candidate, Kind, ServiceSpec};
use proto::limits::{GATEWAY_GROUP_ANNOTATION, GROUP_ANNOTATION};
use proto::{Reason, Refusal, ServiceName};
use tokio::time::Instant;

use crate::config::settings::{ControllerSettings, Source};
use crate::plan::addresses::Allocation;
use crate::plan::selection::source::SelectedPort;
use crate::plan::service_life::{GatewaysView, LifeState, WantedStatus};
use crate::plan::tenure::Tenure;
use crate::world::World;
use crate::world::checkpoint::{Decided, Policy};

/// Maximum number of groups named in a message.
const GROUPS_NAMED_MAX: usize = 8;
/// Maximum number of ports named in a message.
const PORTS_NAMED_MAX: usize = 8;

/// Services that no group serves, or that another group still holds, each with the remark for its owner. Of several
/// groups one tells the owner: the one that serves what names no group, or the one that waits.
#[derive(Clone, Debug, Default)]
pub(super) struct Unserved {
    /// They ask for a group without gateways.
    pub(super) without_group: BTreeMap<ServiceName, Remark>,
    /// They are for our group, and another one has marked them. A move takes seconds, so their owners are told only
    /// when it lasts.
    pub(super) not_released: BTreeMap<ServiceName, Remark>,
}

impl Unserved {
    pub(super) fn of(world: &World, settings: &ControllerSettings, serves_node_ports: bool) -> Self {
        let mut all = Self::default();
        let groups: BTreeSet<&str> = world.gateways().values().map(|gateway| gateway.group.as_str()).collect();
        for candidate in world.services().values().map(|entry| &entry.candidate) {
            let is_of_kind = match candidate.kind {
                Kind::LoadBalancer => candidate.object.class.as_ref() == Some(&settings.load_balancer_class),
                // They have no class.
                Kind::NodePort => serves_node_ports,
                Kind::ClusterIp => false,
            };
            if !is_of_kind {
                continue;
            }
            if let Some(remark) = without_group(candidate, &groups, settings) {
                all.without_group.insert(candidate.object.name.clone(), remark);
            } else if candidate.kind == Kind::LoadBalancer && Tenure::of_candidate(candidate, world, settings) == Tenure::Awaited
            {
                all.not_released.insert(candidate.object.name.clone(), not_released(candidate, settings));
            }
        }
        all
    }
}

/// The remark on a Service whose group has no gateway. Without the kind `EdgeGateway` no group is known.
fn without_group(candidate: &Candidate, groups: &BTreeSet<&str>, settings: &ControllerSettings) -> Option<Remark> {
    let asked = candidate.object.gateway_group.as_deref()?;
    let is_one_installation = matches!(settings.source, Source::Manifests { .. });
    let is_told_by_us = settings.ownership.serves_unassigned && (is_one_installation || !groups.is_empty());
    if !is_told_by_us || asked == settings.group || groups.contains(asked) {
        return None;
    }
    let known: BTreeSet<String> = groups.iter().copied().chain([settings.group.as_str()]).map(str::to_owned).collect();
    let known = shortened(known, GROUPS_NAMED_MAX, ", ", " and ");
    let text = format!(
        "not served: annotation {GATEWAY_GROUP_ANNOTATION} asks for group {}, of which no gateway has ever been seen; \
         expected one of {known}, or no annotation",
        quoted(asked)
    );
    Some(Remark::new(Cause::Reason(Reason::NoGateway), text))
}

fn not_released(candidate: &Candidate, settings: &ControllerSettings) -> Remark {
    let by = candidate.object.held.group.as_deref().unwrap_or_default();
    let (group, by) = (&settings.group, quoted(by));
    let text = if candidate.object.gateway_group.is_some() {
        format!(
            "not served by group {group} yet: group {by} has not released it (annotation {GROUP_ANNOTATION}); if that group \
             has no controller any more, stop its gateways and remove the annotation"
        )
    } else {
        format!(
            "not served by group {group}: group {by} holds it (annotation {GROUP_ANNOTATION}); only one group of a class may \
             have `serveUnassigned: true`; if that group has no controller any more, stop its gateways and remove the annotation"
        )
    };
    Remark::new(Cause::Reason(Reason::Conflict), text)
}

/// Why a new Service is not served: an annotation of ours has an unknown word, and nothing is in force that could stay.
/// `recalled` are the decisions of a previous leader. Of a checkpoint of a version without these words, an address in the
/// status or a table tells that gateways serve it; mode and target were never served with an unknown word then.
pub(super) fn by_unknown_word(candidate: &Candidate, in_force: Option<Policy>, recalled: Option<&Decided>) -> Option<Refusal> {
    let spec = candidate.wanted.as_ref().ok()?;
    let decides_path = spec.unread.contains(&Unread::Mode) || spec.unread.contains(&Unread::Target);
    let was_served = recalled.is_some_and(|decided| !decided.tables.is_empty()) || !candidate.object.held.ingress.is_empty();
    let is_live = in_force.is_some() || (!decides_path && was_served);
    spec.refused_if_new.as_ref().filter(|_| !is_live).map(SpecError::refusal)
}

/// The specification of a Service that is served, as far as its object and its addresses decide.
///
/// # Errors
/// Why nothing of it is served.
pub(super) fn by_object<'a>(
    candidate: &'a Candidate,
    unknown_word: Option<&Refusal>,
    allocation: &Allocation,
) -> Result<&'a ServiceSpec, Refusal> {
    let spec = candidate.wanted.as_ref().map_err(SpecError::refusal)?;
    unknown_word.or_else(|| allocation.refusal()).map_or(Ok(spec), |refusal| Err(refusal.clone()))
}

/// Why nothing of a Service is served, by the backends of its ports; otherwise the reasons why parts of it are not.
///
/// # Errors
/// The refusal of the whole Service.
pub(super) fn by_backends(policy: &Policy, ports: &[SelectedPort<'_>]) -> Result<Vec<Remark>, Refusal> {
    let refused = ports.iter().find_map(|one| policy.refuses_endpoints(one.port.spec, &one.selection.backends));
    if let Some(refusal) = refused {
        return Err(refusal);
    }
    let has_none = ports.iter().all(SelectedPort::is_empty);
    let ineligible = ports.iter().find_map(|one| one.selection.ineligible.clone());
    if has_none && let Some(message) = ineligible {
        return Err(Refusal { reason: Reason::NoEligibleNode, message });
    }
    let fenced = ports.iter().filter(|one| one.is_fenced()).map(|one| &one.port);
    let fenced: Vec<String> = fenced.map(|port| format!("{} {} ({})", port.spec.protocol, port.spec.port, port.family)).collect();
    let mut partly: Vec<Remark> = Vec::new();
    if !fenced.is_empty() {
        let why = "none of its backends may be reached through a gateway; another Event names each with the reason";
        if has_none {
            return Err(Refusal { reason: Reason::Refused, message: format!("The Service is not served: {why}") });
        }
        let text = format!("Port {} is not served: {why}", shortened(&fenced, PORTS_NAMED_MAX, ", port ", ", and "));
        partly.push(Remark::new(Cause::Reason(Reason::Refused), text));
    }
    partly.extend(ineligible.map(|text| Remark::new(Cause::Reason(Reason::NoEligibleNode), text)));
    Ok(partly)
}

/// Why gateways do not forward for a Service that is ours.
#[derive(Debug)]
pub(crate) enum NotForwarded<'a> {
    /// The plan refuses it.
    Refused(Reason),
    /// No gateway is connected since then.
    NoGateway(Instant),
    /// They have not applied it yet.
    Pending,
    /// These gateways refuse it, wholly or in part, or cannot announce its addresses.
    ByGateways(BTreeSet<&'a str>, Refusal),
}

/// Why gateways do not forward for a Service in this state; `None` if all do.
pub(crate) fn by_gateways<'a>(wanted: &WantedStatus, state: LifeState, view: &GatewaysView<'a>) -> Option<NotForwarded<'a>> {
    if let Some(reason) = wanted.refusal() {
        return Some(NotForwarded::Refused(reason));
    }
    if let Some(since) = view.absent_since {
        return Some(NotForwarded::NoGateway(since));
    }
    let LifeState::Serving { counter } = state else { return Some(NotForwarded::Pending) };
    let refused = view.gateways.refusal(&wanted.object.name, counter);
    let refused = refused.map(|(gateways, refusal)| (gateways, refusal.clone()));
    let unserved = refused.or_else(|| view.gateways.unannounced(wanted.addresses()));
    unserved.map(|(gateways, refusal)| NotForwarded::ByGateways(gateways, refusal))
}
