//! Services that are not ours, or no longer ours, but still carry our finalizer, conditions or addresses.
//!
//! Deliberately not here: when these are removed (`status::finalizer`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use proto::ServiceName;

use crate::config::settings::ControllerSettings;
use crate::plan::ownership::Ownership;
use crate::world::World;
use objects::{Candidate, Kind, Leftover};

/// A Service that is not ours, or no longer ours, but still carries our finalizer, conditions or addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cleanup {
    /// The object.
    pub left: Arc<Leftover>,
    /// Which installation may have written them.
    pub by: LeftBy,
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

/// Services of type `LoadBalancer` that are not ours.
pub(super) fn foreign_services(world: &World, settings: &ControllerSettings) -> Vec<ServiceName> {
    let candidates = world.services().values().map(|entry| &entry.candidate);
    candidates
        .filter(|c| c.kind == Kind::LoadBalancer && !Ownership::of(c, world, settings).addresses)
        .map(|c| c.name.clone())
        .collect()
}

/// All Services from which something must be removed.
pub(super) fn cleanups(
    world: &World,
    settings: &ControllerSettings,
    foreign_services: &[ServiceName],
) -> BTreeMap<ServiceName, Cleanup> {
    let group = settings.group.as_str();
    let leftovers = world.leftovers().iter().filter_map(|(name, left)| Some((name.clone(), left_by(left, settings)?, left)));
    let mut cleanups: BTreeMap<ServiceName, Cleanup> =
        leftovers.map(|(name, by, left)| (name, Cleanup { by, left: Arc::clone(left) })).collect();
    let candidates = foreign_services.iter().filter_map(|name| world.services().get(name)).map(|entry| &entry.candidate);
    let marked = candidates.filter(|candidate| candidate.held.has_marks() && !candidate.held.is_of_another(group));
    cleanups.extend(marked.map(|candidate| {
        let left = Arc::new(Leftover::from(&**candidate));
        let by = match candidate.held.group {
            Some(_) if has_moved(candidate, settings) => LeftBy::Us,
            Some(_) => LeftBy::UsBefore,
            None => LeftBy::Another,
        };
        (candidate.name.clone(), Cleanup { left, by })
    }));
    cleanups
}

/// Whether a Service that was ours would be ours, if it did not ask for another group of gateways, which waits until we
/// have taken our address off it.
fn has_moved(candidate: &Candidate, settings: &ControllerSettings) -> bool {
    let is_of_our_class = candidate.class.as_ref().is_none_or(|class| *class == settings.load_balancer_class);
    is_of_our_class && !candidate.is_held_by_cloud && !settings.is_of_our_group(candidate.gateway_group.as_deref())
}

/// Which installation wrote it; `None` if another one did, which removes it itself.
fn left_by(left: &Leftover, settings: &ControllerSettings) -> Option<LeftBy> {
    let is_of_our_class = left.class.as_ref().is_some_and(|class| *class == settings.load_balancer_class);
    let is_of_our_group = settings.is_of_our_group(left.gateway_group.as_deref());
    match (left.class.as_deref(), &left.held.group) {
        // Another group of our class releases it, or nobody does: that group has another name now, or is gone.
        _ if is_of_our_class && left.held.is_of_another(&settings.group) => Some(LeftBy::Another),
        (Some(_), None) if is_of_our_class && !is_of_our_group => Some(LeftBy::Another),
        (Some(_), _) if is_of_our_class => Some(LeftBy::Us),
        _ if left.held.is_of_another(&settings.group) => None,
        (None, Some(_)) => Some(LeftBy::Us),
        (None, None) => Some(LeftBy::UsOrAnother),
        (Some(_), Some(_)) => Some(LeftBy::UsBefore),
        (Some(_), None) => Some(LeftBy::Another),
    }
}

/// A Service that another installation has marked, with the addresses of its status.
pub(super) struct OtherHolder<'a> {
    pub(super) service: &'a ServiceName,
    pub(super) created_s: Option<i64>,
    pub(super) addresses: Vec<IpAddr>,
    /// Whether sluice wrote that status. Anybody else could name any address there.
    pub(super) is_published: bool,
}

/// Services that other installations have marked.
pub(super) fn held_by_others<'a>(world: &'a World, settings: &'a ControllerSettings) -> impl Iterator<Item = OtherHolder<'a>> {
    let services = world.services().values().map(|entry| &*entry.candidate);
    let services = services.map(|one| (&one.name, one.created_s, &*one.held, one.status_is_ours));
    let deleted = world.leftovers().values().filter(|left| left.holds_addresses());
    let all = services.chain(deleted.map(|left| (&left.name, left.created_s, &left.held, left.status_is_ours)));
    let others = all.filter(|(_, _, held, _)| held.is_of_another(&settings.group));
    others.map(|(service, created_s, held, is_published)| {
        let addresses = held.ingress.iter().map(|ingress| ingress.ip).collect();
        OtherHolder { service, created_s, addresses, is_published }
    })
}

/// VIPs of other groups of gateways: the addresses that sluice wrote into the statuses of Services with their marks.
/// Another writer of a status could name any address there.
pub(super) fn vips_of_others(world: &World, settings: &ControllerSettings) -> impl Iterator<Item = IpAddr> {
    let services = world.services().values().map(|entry| &entry.candidate).filter(|one| one.status_is_ours);
    let deleted = world.leftovers().values().filter(|left| left.status_is_ours);
    let all = services.map(|one| &*one.held).chain(deleted.map(|left| &left.held));
    let others = all.filter(|held| held.is_of_another(&settings.group));
    others.flat_map(|held| held.ingress.iter().map(|ingress| ingress.ip))
}

/// Services that are being deleted and keep their addresses until gateways have removed them. The deletion may have
/// begun before this controller started.
pub(super) fn holders<'a>(world: &'a World, settings: &'a ControllerSettings) -> impl Iterator<Item = &'a Leftover> {
    let are_ours = |left: &&Leftover| matches!(left_by(left, settings), Some(LeftBy::Us | LeftBy::UsOrAnother));
    world.leftovers().values().map(Arc::as_ref).filter(|left| left.holds_addresses()).filter(are_ours)
}
