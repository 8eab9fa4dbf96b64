//! Release of a Service that is no longer ours: when addresses, conditions and finalizer are removed from its object.
//!
//! Invariant: gateways stop serving it first, then the object is changed, but no later than [`GATEWAYS_WAITED_FOR`].
//! Disconnected gateways do not delay it. If another installation may own the content, that one gets time to remove it
//! first.

use std::time::Duration;

use proto::ServiceName;
use tokio::time::Instant;

use super::item::GatewaysView;
use crate::plan::{Cleanup, LeftBy};
use objects::OwnedParts;
use objects::status::StatusWrite;

/// Longest time that a deletion waits for gateways.
pub(super) const GATEWAYS_WAITED_FOR: Duration = Duration::from_secs(10);
/// Time for the installation of the Service's class, which needs at most `GATEWAYS_WAITED_FOR`; three times that.
pub(super) const OTHERS_WAITED_FOR: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct FinalizerRemoval {
    cleanup: Cleanup,
    /// Counter of the first generation without it.
    counter: u64,
    seen_at: Instant,
    /// Whether it has been ours since the controller started.
    is_remembered: bool,
    written: Option<StatusWrite>,
    retry_at: Option<Instant>,
}

impl FinalizerRemoval {
    pub(super) fn new(cleanup: Cleanup, counter: u64, seen_at: Instant, is_remembered: bool) -> Self {
        Self { cleanup, counter, seen_at, is_remembered, written: None, retry_at: None }
    }

    /// Records a newer version of the object. For an object of another installation the time begins with its deletion.
    pub(super) fn renew(&mut self, cleanup: &Cleanup, now: Instant) {
        if !self.cleanup.left.is_deleted && cleanup.left.is_deleted {
            self.seen_at = now;
        }
        self.cleanup.clone_from(cleanup);
    }

    /// Whether the object remains; nothing is reported about one that is deleted.
    pub(super) fn stays(&self) -> bool {
        !self.cleanup.left.is_deleted
    }

    pub(super) fn is_of(&self, cleanup: &Cleanup) -> bool {
        self.cleanup.left.uid == cleanup.left.uid
    }

    /// The write, if it is due.
    pub(super) fn due(&mut self, view: &GatewaysView<'_>) -> Option<StatusWrite> {
        let write = self.write();
        let is_written = self.written.as_ref() == Some(&write);
        if is_written || self.retry_at.is_some_and(|at| at > view.now) || !self.is_due(view) {
            return None;
        }
        self.written = Some(write.clone());
        Some(write)
    }

    /// When it becomes due without any event.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let is_written = self.written.as_ref() == Some(&self.write());
        if is_written { None } else { self.retry_at.max(self.due_at()) }
    }

    pub(super) fn failed(&mut self, retry_at: Instant) {
        self.written = None;
        self.retry_at = Some(retry_at);
    }

    fn is_due(&self, view: &GatewaysView<'_>) -> bool {
        let is_known_as_ours = self.is_remembered || matches!(self.cleanup.by, LeftBy::Us | LeftBy::UsBefore);
        let is_removed = view.absent_since.is_some() || view.gateways.all_reached(self.counter);
        (is_known_as_ours && is_removed) || self.due_at().is_some_and(|at| at <= view.now)
    }

    fn due_at(&self) -> Option<Instant> {
        match self.cleanup.by {
            LeftBy::Us | LeftBy::UsBefore | LeftBy::UsOrAnother => Some(self.seen_at + GATEWAYS_WAITED_FOR),
            LeftBy::Another if self.is_remembered => Some(self.seen_at + GATEWAYS_WAITED_FOR),
            LeftBy::Another if self.cleanup.left.is_deleted => Some(self.seen_at + OTHERS_WAITED_FOR),
            LeftBy::Another => None,
        }
    }

    /// Addresses of another class belong to another installation.
    fn write(&self) -> StatusWrite {
        let left = &self.cleanup.left;
        let may_be_ours = !matches!(self.cleanup.by, LeftBy::Another | LeftBy::UsBefore);
        let has_our_addresses = left.is_load_balancer && may_be_ours && !left.held.ingress.is_empty();
        removal(left.name.clone(), left.uid.clone(), left.resource_version.clone(), &left.held, has_our_addresses)
    }
}

/// The write that removes our conditions, finalizer and group from an object, and its addresses if they are ours.
pub(super) fn removal(
    service: ServiceName,
    uid: String,
    resource_version: String,
    held: &OwnedParts,
    has_our_addresses: bool,
) -> StatusWrite {
    StatusWrite {
        service,
        uid,
        resource_version,
        ingress: has_our_addresses.then(Vec::new),
        conditions: held.conditions.keys().map(|kind| (*kind, None)).collect(),
        finalizer: held.finalizer.then_some(false),
        group: held.group.is_some().then(String::new),
    }
}
