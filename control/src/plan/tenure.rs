//! Tenure: whether a Service is this installation's to serve, another one's, or nobody's any more (CONTROL section 4).
//!
//! Invariant: a Service of another class, or that asks for another group of gateways, is never ours. A Service that
//! another installation has marked by its group annotation is not ours before that one has released it: its gateways may
//! forward for it, also without their controller. A Service without class is not ours if a cloud controller holds it by
//! its finalizer; one that was ours stays ours until it is released, even if the rules no longer claim it.
//! Deliberately not here: what owners are told (`unserved`), and when the parts of a Service that is not ours any more are
//! removed (`status::life`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::core::SelectorExt;
use objects::{Candidate, Kind, ServiceObject};
use proto::ServiceName;

use crate::config::settings::ControllerSettings;
use crate::world::World;

/// How this installation stands to a Service of type `LoadBalancer`, or that was one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tenure {
    /// It serves it.
    Ours,
    /// It will serve it once another installation has released it.
    Awaited,
    /// It does not serve it, and what some installation left on it is to be removed.
    Left(LeftBy),
    /// It has nothing to do with it.
    Foreign,
}

/// Which installation may have written finalizer and conditions of a Service. All installations in a cluster write the
/// same ones, together with their group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftBy {
    /// This installation: the class or the group is ours.
    Us,
    /// This installation, by its group; another class or controller owns the addresses now.
    UsBefore,
    /// This or another installation: the Service has no class any longer, and older versions wrote no group.
    UsOrAnother,
    /// Another installation, by its class or group; or this one, if the Service had our class before.
    Another,
}

/// The signs of a Service that is not being deleted, by which its tenure is decided beside those of the object.
#[derive(Clone, Copy, Debug, Default)]
pub struct SignsOfLife {
    /// Whether a cloud controller holds it by its finalizer.
    pub is_held_by_cloud: bool,
    /// Whether the rules for Services without class select it.
    pub is_selected: bool,
}

impl Tenure {
    /// That of a Service of type `LoadBalancer`, or, without signs of life, of one that was or is being deleted.
    #[must_use]
    pub fn of(object: &ServiceObject, signs: Option<SignsOfLife>, settings: &ControllerSettings) -> Self {
        let held = &object.held;
        let is_of_another = held.is_of_another(&settings.group);
        let is_of_our_group = settings.is_of_our_group(object.gateway_group.as_deref());
        let is_of_our_class = object.class.as_ref() == Some(&settings.load_balancer_class);
        let Some(signs) = signs else {
            return match (&object.class, &held.group) {
                // Another group of our class releases it, or nobody does: that group has another name now, or is gone.
                _ if is_of_our_class && is_of_another => Self::Left(LeftBy::Another),
                (Some(_), None) if is_of_our_class && !is_of_our_group => Self::Left(LeftBy::Another),
                (Some(_), _) if is_of_our_class => Self::Left(LeftBy::Us),
                _ if is_of_another => Self::Foreign,
                (None, Some(_)) => Self::Left(LeftBy::Us),
                (None, None) => Self::Left(LeftBy::UsOrAnother),
                (Some(_), Some(_)) => Self::Left(LeftBy::UsBefore),
                (Some(_), None) => Self::Left(LeftBy::Another),
            };
        };
        let was_served = held.finalizer || (object.status_is_ours && !held.ingress.is_empty());
        let is_classless = object.class.is_none() && !signs.is_held_by_cloud;
        let is_claimed = is_of_our_class || (is_classless && (signs.is_selected || was_served));
        match (is_claimed && is_of_our_group, is_of_another) {
            (true, false) => Self::Ours,
            (true, true) if is_of_our_class => Self::Awaited,
            (_, true) => Self::Foreign,
            (false, false) if !held.has_marks() => Self::Foreign,
            (false, false) => Self::Left(match held.group {
                None => LeftBy::Another,
                // Another group waits until we have taken our address off it.
                Some(_) if !is_of_our_group && (is_classless || (is_of_our_class && !signs.is_held_by_cloud)) => LeftBy::Us,
                Some(_) => LeftBy::UsBefore,
            }),
        }
    }

    /// That of a Service of type `LoadBalancer`.
    #[must_use]
    pub fn of_candidate(candidate: &Candidate, world: &World, settings: &ControllerSettings) -> Self {
        let rules = &settings.ownership.classless;
        let is_selected = || {
            rules.enabled
                && rules.services.matches(&candidate.labels)
                && rules.namespaces.matches(&world.namespace_labels(&candidate.object.name.namespace))
        };
        let is_selected = candidate.object.class.is_none() && is_selected();
        let signs = SignsOfLife { is_held_by_cloud: candidate.is_held_by_cloud, is_selected };
        Self::of(&candidate.object, Some(signs), settings)
    }
}

/// The parts of one Service that are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ownership {
    /// It gets addresses, and sluice writes its status.
    pub addresses: bool,
    /// Its node ports are served.
    pub node_ports: bool,
    /// Its `externalIPs` are served, if they are allowed.
    pub external_ips: bool,
}

impl Ownership {
    /// The parts of `candidate` that are ours. Node ports count only where a gateway `serves_node_ports`.
    #[must_use]
    pub fn of(candidate: &Candidate, world: &World, settings: &ControllerSettings, serves_node_ports: bool) -> Self {
        let rules = &settings.ownership;
        if !settings.is_of_our_group(candidate.object.gateway_group.as_deref()) {
            return Self::default();
        }
        let has_external_ips = candidate.wanted.as_ref().map_or(true, |spec| !spec.external_ips.is_empty());
        let external_ips = has_external_ips && !rules.external_ips_allowed.is_empty();
        match candidate.kind {
            Kind::LoadBalancer => {
                let addresses = Tenure::of_candidate(candidate, world, settings) == Tenure::Ours;
                Self { addresses, node_ports: false, external_ips: external_ips && addresses }
            }
            Kind::NodePort => {
                let selected = &rules.node_port_namespaces;
                let is_selected =
                    selected.selects_all() || selected.matches(&world.namespace_labels(&candidate.object.name.namespace));
                // Of a Service that cannot be parsed only the node ports can be served.
                let external_ips = external_ips && candidate.wanted.is_ok();
                Self { addresses: false, node_ports: serves_node_ports && is_selected, external_ips }
            }
            Kind::ClusterIp => Self { external_ips, ..Self::default() },
        }
    }

    /// Whether any part of it is ours.
    #[must_use]
    pub const fn is_any(self) -> bool {
        self.addresses || self.node_ports || self.external_ips
    }
}

/// A Service that is not ours, or no longer ours, but still carries our finalizer, conditions or addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cleanup {
    /// The object.
    pub left: Arc<ServiceObject>,
    /// Which installation may have written them.
    pub by: LeftBy,
}

/// Services of type `LoadBalancer` that are not ours.
pub(super) fn foreign_services(world: &World, settings: &ControllerSettings) -> Vec<ServiceName> {
    let candidates = world.services().values().map(|entry| &entry.candidate).filter(|one| one.kind == Kind::LoadBalancer);
    let foreign = candidates.filter(|one| Tenure::of_candidate(one, world, settings) != Tenure::Ours);
    foreign.map(|one| one.object.name.clone()).collect()
}

/// All Services from which something must be removed.
pub(super) fn cleanups(
    world: &World,
    settings: &ControllerSettings,
    foreign_services: &[ServiceName],
) -> BTreeMap<ServiceName, Cleanup> {
    let left_by = |tenure| if let Tenure::Left(by) = tenure { Some(by) } else { None };
    let leftovers = world.leftovers().iter().filter_map(|(name, left)| {
        let by = left_by(Tenure::of(left, None, settings))?;
        Some((name.clone(), Cleanup { left: Arc::clone(left), by }))
    });
    let candidates = foreign_services.iter().filter_map(|name| Some((name, &*world.services().get(name)?.candidate)));
    let candidates = candidates.filter(|(_, candidate)| candidate.object.held.has_marks());
    let candidates = candidates.filter_map(|(name, candidate)| {
        let by = left_by(Tenure::of_candidate(candidate, world, settings))?;
        Some((name.clone(), Cleanup { left: Arc::clone(&candidate.object), by }))
    });
    leftovers.chain(candidates).collect()
}

/// A Service that another installation has marked.
pub(super) struct OtherHolder<'a> {
    pub(super) object: &'a ServiceObject,
    /// Whether sluice wrote that status and the installation has gateways with an `EdgeGateway`.
    pub(super) is_proven: bool,
    /// Whether gateways may still forward for it: it is being served, or deleted.
    pub(super) is_held: bool,
}

/// Services that other installations have marked.
pub(super) fn held_by_others<'a>(world: &'a World, settings: &'a ControllerSettings) -> impl Iterator<Item = OtherHolder<'a>> {
    let services = world.services().values().map(|entry| (&*entry.candidate.object, true));
    let left = world.leftovers().values().map(|left| (&**left, left.holds_addresses()));
    let others = services.chain(left).filter(|(one, _)| one.held.is_of_another(&settings.group));
    let groups: BTreeSet<&str> = world.gateways().values().map(|gateway| gateway.group.as_str()).collect();
    others.map(move |(object, is_held)| {
        let has_gateways = object.held.group.as_deref().is_some_and(|group| groups.contains(group));
        OtherHolder { object, is_proven: object.status_is_ours && has_gateways, is_held }
    })
}

/// Services that are being deleted and keep their addresses until gateways have removed them. The deletion may have
/// begun before this controller started.
pub(super) fn holders<'a>(world: &'a World, settings: &'a ControllerSettings) -> impl Iterator<Item = &'a ServiceObject> {
    let are_ours =
        |left: &&ServiceObject| matches!(Tenure::of(left, None, settings), Tenure::Left(LeftBy::Us | LeftBy::UsOrAnother));
    world.leftovers().values().map(Arc::as_ref).filter(|left| left.holds_addresses()).filter(are_ours)
}

#[cfg(test)]
mod tests;
