//! The task that follows backends and keeps their history on disk.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{BackendHistories, HistoryFile, now_s};
use crate::agent::backend_health::Causes;
use crate::agent::served::Served;
use crate::agent::supervisor::Failure;

/// Least time between two looks; the first state of 100,000 backends takes about 100 ms.
const FOLLOWED_EVERY: Duration = Duration::from_millis(200);
/// Least time between two writes; a process that is killed forgets what is newer.
const SAVED_EVERY: Duration = Duration::from_secs(60);

/// The task. Cloned for each start.
#[derive(Clone, Debug)]
pub struct HistoryKeeper {
    /// The backends as the newest snapshot has them.
    pub served: watch::Receiver<Served>,
    /// Why backends fail.
    pub causes: watch::Receiver<Causes>,
    /// Output.
    pub histories: BackendHistories,
    /// Where they are kept.
    pub file: HistoryFile,
}

impl HistoryKeeper {
    /// Keeps `histories` current.
    ///
    /// # Errors
    /// If a source has ended.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { mut served, mut causes, histories, file } = self;
        let mut writes = interval(SAVED_EVERY);
        writes.set_missed_tick_behavior(MissedTickBehavior::Delay);
        served.mark_changed();
        loop {
            tokio::select! {
                changed = served.changed() => changed?,
                changed = causes.changed() => changed?,
                _ = writes.tick() => {
                    let (file, histories) = (file.clone(), histories.clone());
                    tokio::task::spawn_blocking(move || file.save(&histories)).await?;
                    continue;
                }
            }
            let now = served.borrow_and_update().clone();
            let causes = causes.borrow_and_update().clone();
            // Before the first complete state all backends would be removed.
            if now.ready {
                histories.follow(&now.services, &causes, now_s());
            }
            sleep(FOLLOWED_EVERY).await;
        }
    }
}
