//! A Service that is not ours any more: what is taken from its object, and when.
//!
//! Invariant: gateways first, then the object, but never later than [`GATEWAYS_WAITED_FOR`]; a gateway that is not connected
//! is not waited for. Where another installation may have left what is there, it gets its time first.

use std::time::Duration;

use tokio::time::Instant;

use super::view::View;
use crate::plan::{Leaving, LeftBy};
use crate::source::StatusWrite;

/// A deletion waits for gateways no longer than this.
pub(super) const GATEWAYS_WAITED_FOR: Duration = Duration::from_secs(10);
/// The installation whose class the Service has takes `GATEWAYS_WAITED_FOR` at most; three times that is its chance.
pub(super) const OTHERS_WAITED_FOR: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Departure {
    leaving: Leaving,
    /// The first generation without it.
    counter: u64,
    seen_at: Instant,
    /// Whether it was ours since the controller started.
    is_remembered: bool,
    written: Option<StatusWrite>,
    retry_at: Option<Instant>,
}

impl Departure {
    pub(super) fn new(leaving: Leaving, counter: u64, seen_at: Instant, is_remembered: bool) -> Self {
        Self { leaving, counter, seen_at, is_remembered, written: None, retry_at: None }
    }

    /// Takes in a newer version of the object. What another installation holds is of interest only once it is deleted:
    /// then its time begins.
    pub(super) fn renew(&mut self, leaving: &Leaving, now: Instant) {
        if !self.leaving.left.is_deleted && leaving.left.is_deleted {
            self.seen_at = now;
        }
        self.leaving.clone_from(leaving);
    }

    /// Whether the object stays: of one that goes there is nothing to tell.
    pub(super) fn stays(&self) -> bool {
        !self.leaving.left.is_deleted
    }

    pub(super) fn is_of(&self, leaving: &Leaving) -> bool {
        self.leaving.left.uid == leaving.left.uid
    }

    /// The write, if it is due.
    pub(super) fn due(&mut self, view: &View<'_>, now: Instant) -> Option<StatusWrite> {
        let write = self.write();
        let is_written = self.written.as_ref() == Some(&write);
        if is_written || self.retry_at.is_some_and(|at| at > now) || !self.is_due(view, now) {
            return None;
        }
        self.written = Some(write.clone());
        Some(write)
    }

    /// When it is due without anything happening.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let is_written = self.written.as_ref() == Some(&self.write());
        if is_written { None } else { self.retry_at.max(self.due_at()) }
    }

    pub(super) fn failed(&mut self, retry_at: Instant) {
        self.written = None;
        self.retry_at = Some(retry_at);
    }

    fn is_due(&self, view: &View<'_>, now: Instant) -> bool {
        let is_known_as_ours = self.is_remembered || matches!(self.leaving.by, LeftBy::Us | LeftBy::UsBefore);
        let is_taken_out = view.absent_since.is_some() || view.gateways.all_reached(self.counter);
        (is_known_as_ours && is_taken_out) || self.due_at().is_some_and(|at| at <= now)
    }

    fn due_at(&self) -> Option<Instant> {
        match self.leaving.by {
            LeftBy::Us | LeftBy::UsBefore | LeftBy::Anybody => Some(self.seen_at + GATEWAYS_WAITED_FOR),
            LeftBy::Another if self.is_remembered => Some(self.seen_at + GATEWAYS_WAITED_FOR),
            LeftBy::Another if self.leaving.left.is_deleted => Some(self.seen_at + OTHERS_WAITED_FOR),
            LeftBy::Another => None,
        }
    }

    /// Addresses of another class are another's.
    fn write(&self) -> StatusWrite {
        let left = &self.leaving.left;
        let may_be_ours = !matches!(self.leaving.by, LeftBy::Another | LeftBy::UsBefore);
        let has_our_addresses = left.is_load_balancer && may_be_ours && !left.held.ingress.is_empty();
        StatusWrite {
            service: left.name.clone(),
            uid: left.uid.clone(),
            resource_version: left.resource_version.clone(),
            ingress: has_our_addresses.then(Vec::new),
            conditions: left.held.conditions.keys().map(|kind| (*kind, None)).collect(),
            finalizer: left.held.finalizer.then_some(false),
            group: left.held.group.is_some().then(String::new),
        }
    }
}
