//! The world of one source for as long as this process runs, whoever leads.
//!
//! Invariant: a follower applies every change and decides nothing. What only a leader reads (overrides, the checkpoint, the
//! gateways) counts as unknown at the start of each term, so that nothing is planned with the values of an earlier one.
//! Deliberately not here: requests to the API server (`kubernetes::Following`).

use tokio::sync::mpsc;

use crate::kubernetes::recorder::Recorder;
use crate::world::World;
use crate::world::change::Change;

/// The world, and the changes that it has not yet got.
#[derive(Debug)]
pub(super) struct WatchedWorld {
    pub(super) world: World,
    pub(super) changes: mpsc::Receiver<Change>,
}

impl WatchedWorld {
    /// An empty world.
    pub(super) fn new(changes: mpsc::Receiver<Change>) -> Self {
        Self { world: World::default(), changes }
    }

    /// Applies changes while this replica follows. Never returns while the source is watched.
    pub(super) async fn keep_current(&mut self, recorder: &Recorder) {
        while let Some(change) = self.changes.recv().await {
            self.world.apply(change);
            recorder.forget(&self.world.take_deleted());
            self.world.forget_what_only_plans_need();
        }
    }

    /// Applies what is left of an earlier term, all of whose tasks have ended.
    pub(super) fn begin_term(&mut self) {
        while let Ok(change) = self.changes.try_recv() {
            self.world.apply(change);
        }
        self.world.begin_term();
    }
}
