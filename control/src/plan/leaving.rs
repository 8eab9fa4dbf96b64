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

/// Who may have put a finalizer and conditions on a Service: several installations in one cluster write the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftBy {
    /// We: its class is ours.
    Us,
    /// We or another installation: it has no class any more.
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
    let by = |class: Option<&str>| match class {
        None => LeftBy::Anybody,
        Some(class) if class == settings.load_balancer_class => LeftBy::Us,
        Some(_) => LeftBy::Another,
    };
    let leftovers = world.leftovers().iter();
    let mut leaving: BTreeMap<ServiceName, Leaving> =
        leftovers.map(|(name, left)| (name.clone(), Leaving { by: by(left.class.as_deref()), left: Arc::clone(left) })).collect();
    let candidates = strangers.iter().filter_map(|name| world.services().get(name)).map(|entry| &entry.candidate);
    leaving.extend(candidates.filter(|candidate| candidate.held.has_marks()).map(|candidate| {
        let left = Arc::new(Leftover::from(candidate));
        (candidate.name.clone(), Leaving { left, by: LeftBy::Another })
    }));
    leaving
}
