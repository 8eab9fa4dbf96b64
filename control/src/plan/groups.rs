//! Services that ask for a group of gateways which does not serve them, or not yet: what their owners are told.
//!
//! Invariant: of several groups one tells the owner, namely the one that serves what names no group, or the one that
//! waits. Deliberately not here: which group serves a Service (`ownership`).

use std::collections::{BTreeMap, BTreeSet};

use objects::note::{Cause, Remark, quoted};
use objects::{Candidate, Kind};
use proto::limits::{GATEWAY_GROUP_ANNOTATION, GROUP_ANNOTATION};
use proto::{Reason, ServiceName};

use crate::config::settings::{ControllerSettings, Source};
use crate::plan::message::shortened;
use crate::world::World;

/// Maximum number of groups named in a message.
const NAMED_MAX: usize = 8;

/// Services that no group serves, or that another group still holds, each with the remark for its owner.
#[derive(Clone, Debug, Default)]
pub(super) struct Unserved {
    /// They ask for a group without gateways.
    pub(super) without_group: BTreeMap<ServiceName, Remark>,
    /// They are for our group, and another one has marked them. A move takes seconds, so their owners are told only
    /// when it lasts.
    pub(super) not_released: BTreeMap<ServiceName, Remark>,
}

impl Unserved {
    pub(super) fn of(world: &World, settings: &ControllerSettings) -> Self {
        let mut all = Self::default();
        let groups: BTreeSet<&str> = world.gateways().values().map(|gateway| gateway.group.as_str()).collect();
        for candidate in world.services().values().map(|entry| &entry.candidate) {
            if candidate.kind == Kind::ClusterIp || !is_of_our_class(candidate, settings) {
                continue;
            }
            if let Some(remark) = without_group(candidate, &groups, settings) {
                all.without_group.insert(candidate.name.clone(), remark);
            } else if let Some(remark) = not_released(candidate, settings) {
                all.not_released.insert(candidate.name.clone(), remark);
            }
        }
        all
    }
}

/// NodePort Services have no class.
fn is_of_our_class(candidate: &Candidate, settings: &ControllerSettings) -> bool {
    candidate.kind == Kind::NodePort || candidate.class.as_ref() == Some(&settings.load_balancer_class)
}

/// The remark on a Service whose group has no gateway. Without the kind `EdgeGateway` no group is known.
fn without_group(candidate: &Candidate, groups: &BTreeSet<&str>, settings: &ControllerSettings) -> Option<Remark> {
    let asked = candidate.gateway_group.as_deref()?;
    let is_one_installation = matches!(settings.source, Source::Manifests { .. });
    let is_told_by_us = settings.ownership.serves_unassigned && (is_one_installation || !groups.is_empty());
    if !is_told_by_us || asked == settings.group || groups.contains(asked) {
        return None;
    }
    let known: BTreeSet<String> = groups.iter().copied().chain([settings.group.as_str()]).map(str::to_owned).collect();
    let known = shortened(&known.into_iter().collect::<Vec<_>>(), NAMED_MAX, ", ", " and ");
    let text = format!(
        "not served: annotation {GATEWAY_GROUP_ANNOTATION} asks for group {}, of which no gateway has ever been seen; \
         expected one of {known}, or no annotation",
        quoted(asked)
    );
    Some(Remark::new(Cause::Reason(Reason::NoGateway), text))
}

fn not_released(candidate: &Candidate, settings: &ControllerSettings) -> Option<Remark> {
    let by = candidate.held.group.as_deref().filter(|by| *by != settings.group)?;
    if candidate.kind != Kind::LoadBalancer || !settings.is_of_our_group(candidate.gateway_group.as_deref()) {
        return None;
    }
    let (group, by) = (&settings.group, quoted(by));
    let text = if candidate.gateway_group.is_some() {
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
    Some(Remark::new(Cause::Reason(Reason::Conflict), text))
}
