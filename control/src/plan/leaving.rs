//! Services that are not ours, or not any more, and still hold something of ours.
//!
//! Deliberately not here: when it is taken from them (`status::departure`).

use std::collections::BTreeMap;
use std::sync::Arc;

use proto::ServiceName;

use crate::ownership::Ownership;
use crate::settings::ControllerSettings;
use crate::spec::{Kind, Leftover};
use crate::world::World;

/// A Service that is not ours, or not any more, and still holds something of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// The object.
    pub left: Arc<Leftover>,
    /// Who may have left it there.
    pub by: LeftBy,
}

/// Who may have put a finalizer and conditions on a Service: several installations in one cluster write the same, and the
/// group beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftBy {
    /// We: its class or its group is ours.
    Us,
    /// We, by its group; its addresses are of another class or controller by now.
    UsBefore,
    /// We or another installation: it has no class any more, and an older version wrote no group.
    Anybody,
    /// Another installation, by its class; or we, if it had ours before.
    Another,
}

/// Services of type `LoadBalancer` that are not ours.
pub(super) fn strangers(world: &World, settings: &ControllerSettings) -> Vec<ServiceName> {
    let candidates = world.services().values().map(|entry| &entry.candidate);
    candidates
        .filter(|c| c.kind == Kind::LoadBalancer && !Ownership::of(c, world, settings).addresses)
        .map(|c| c.name.clone())
        .collect()
}

/// Everything that something is to be taken from.
pub(super) fn leaving(world: &World, settings: &ControllerSettings, strangers: &[ServiceName]) -> BTreeMap<ServiceName, Leaving> {
    let group = settings.group.as_str();
    let leftovers = world.leftovers().iter().filter_map(|(name, left)| Some((name.clone(), left_by(left, settings)?, left)));
    let mut leaving: BTreeMap<ServiceName, Leaving> =
        leftovers.map(|(name, by, left)| (name, Leaving { by, left: Arc::clone(left) })).collect();
    let candidates = strangers.iter().filter_map(|name| world.services().get(name)).map(|entry| &entry.candidate);
    let marked = candidates.filter(|candidate| candidate.held.has_marks() && !candidate.held.is_of_another(group));
    leaving.extend(marked.map(|candidate| {
        let left = Arc::new(Leftover::from(candidate));
        let by = if candidate.held.group.is_some() { LeftBy::UsBefore } else { LeftBy::Another };
        (candidate.name.clone(), Leaving { left, by })
    }));
    leaving
}

/// Who left it; none: another installation, which sees to it itself.
fn left_by(left: &Leftover, settings: &ControllerSettings) -> Option<LeftBy> {
    match (left.class.as_deref(), &left.held.group) {
        (Some(class), _) if class == settings.load_balancer_class => Some(LeftBy::Us),
        _ if left.held.is_of_another(&settings.group) => None,
        (None, Some(_)) => Some(LeftBy::Us),
        (None, None) => Some(LeftBy::Anybody),
        (Some(_), Some(_)) => Some(LeftBy::UsBefore),
        (Some(_), None) => Some(LeftBy::Another),
    }
}

/// Services that are being deleted, and keep their addresses until gateways have taken them out: the time of their deletion
/// may have begun before ours.
pub(super) fn holders<'a>(world: &'a World, settings: &'a ControllerSettings) -> impl Iterator<Item = &'a Leftover> {
    let are_ours = |left: &&Leftover| matches!(left_by(left, settings), Some(LeftBy::Us | LeftBy::Anybody));
    world.leftovers().values().map(Arc::as_ref).filter(|left| left.holds_addresses()).filter(are_ours)
}
