//! Transfer of the flows of a gateway from the process before, and to the next one.
//!
//! Invariant: a state on disk is used like one from a controller only if the process that has just ended had it from a
//! controller itself. A chain of restarts without a controller does not make an old state current. Flows of the process
//! before are put back to disk if not every worker has restored its own.
//!
//! Not here: the file (`flow_file`), and what workers save and restore (`dataplane`).

mod flow_file;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dataplane::SavedFlows;
use proto::{GatewayState, Origin};
use tokio::task::JoinHandle;

use crate::agent::persist::StateFile;
use crate::agent::persist::directories::StateDirs;
use crate::agent::persist::sealed::Moment;
use crate::worker_threads::Worker;
pub(super) use flow_file::{FLOWS, FlowFile};

/// The last process has just ended if flows were saved at most this long ago.
const RESTART_WITHIN: Duration = Duration::from_secs(30);

/// The flows of the process before, and those for the next one.
#[derive(Debug)]
pub(super) struct FlowTransfer {
    dirs: StateDirs,
    seed: u64,
    /// Flows of the process before, until all workers have restored them.
    waiting: Arc<Mutex<Option<Arc<SavedFlows>>>>,
    /// Number of workers.
    workers: usize,
    /// What workers that have ended saved.
    pub(super) saved: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl FlowTransfer {
    /// For a gateway with these directories, seed and number of workers, after a process that left `flows`.
    pub(super) fn new(dirs: StateDirs, seed: u64, workers: usize, flows: Option<Arc<SavedFlows>>) -> Self {
        Self { dirs, seed, waiting: Arc::new(Mutex::new(flows)), workers, saved: Arc::default() }
    }

    /// The directories of the gateway's files.
    pub(super) const fn dirs(&self) -> &StateDirs {
        &self.dirs
    }

    /// The seed of the workers' hashes.
    pub(super) const fn seed(&self) -> u64 {
        self.seed
    }

    /// Flows of the process before, unless all workers have restored them.
    pub(super) fn waiting(&self) -> Option<Arc<SavedFlows>> {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clone();
        waiting.filter(|flows| (flows.report().workers() as usize) < self.workers)
    }

    /// Logs what became of the flows once all workers have restored theirs, and releases their memory.
    pub(super) fn log_restored(&self) -> Option<JoinHandle<()>> {
        let (flows, waiting, workers) = (self.waiting()?, Arc::clone(&self.waiting), self.workers);
        Some(tokio::spawn(async move {
            flow_file::log_restored(flows, workers).await;
            waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
        }))
    }

    /// After a start that failed: puts flows that still wait back for the next process.
    pub(super) fn put_back(&self) {
        if let Some(flows) = self.waiting()
            && let Err(error) = FlowFile::new(self.dirs.clone()).put_back(&flows)
        {
            tracing::error!(dir = %self.dirs.disk().display(), %error, "the flows of the last process cannot be put back");
        }
    }

    /// Stops the workers and writes their flows to disk for the next process. `is_confirmed`: the state on disk is from a
    /// controller that sent it to this process.
    pub(super) fn save(&self, workers: Vec<Worker>, is_confirmed: bool) {
        let start = Instant::now();
        let file = FlowFile::new(self.dirs.clone());
        Worker::stop_all(workers);
        let stop_ms = start.elapsed().as_millis();
        let parts = std::mem::take(&mut *self.saved.lock().unwrap_or_else(PoisonError::into_inner));
        let written = match self.waiting() {
            // The workers that have restored saved only their own part.
            Some(flows) => file.put_back(&flows),
            None => file.write(self.seed, is_confirmed, &parts),
        };
        let (bytes, write_ms) = (parts.iter().map(Vec::len).sum::<usize>(), start.elapsed().as_millis() - stop_ms);
        match written {
            Ok(()) => tracing::info!(bytes, stop_ms, write_ms, "the flows are saved for the next process"),
            Err(error) => {
                let dir = self.dirs.disk().display();
                tracing::error!(%dir, %error, "the flows cannot be saved; a restart breaks connections of mode nat");
            }
        }
    }
}

/// An unpredictable seed, from the standard library's hash keys, which come from the random source of the system.
pub(super) fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

/// Whether the process that left these flows has just ended.
pub(super) fn is_restart(flows: Option<&SavedFlows>) -> bool {
    flows.is_some_and(|flows| Duration::from_nanos(flows.age_ns()) <= RESTART_WITHIN)
}

/// What the gateway begins with before a controller is connected.
#[derive(Clone, Debug, Default)]
pub(super) struct FirstState {
    /// The state, if there is one.
    pub(super) state: Option<GatewayState>,
    /// Whether the gateway is drained.
    pub(super) draining: bool,
}

/// The state on disk, after a process that left these flows.
pub(super) fn first_state(file: &StateFile, max_age: Duration, flows: Option<&SavedFlows>) -> FirstState {
    let saved = file.load_at_start(Moment::now(), max_age);
    let draining = saved.as_ref().is_some_and(|saved| saved.draining);
    FirstState { state: saved.map(|saved| state_after(flows, saved.state)), draining }
}

/// The state on disk after a process that left these flows.
fn state_after(flows: Option<&SavedFlows>, state: GatewayState) -> GatewayState {
    let is_current = is_restart(flows) && flows.is_some_and(SavedFlows::is_confirmed);
    let origin = if is_current && state.origin == Origin::Disk { Origin::LastProcess } else { state.origin };
    GatewayState { origin, ..state }
}

#[cfg(test)]
mod tests {
    use dataplane::SavedAt;

    use super::*;

    const SAVED_NS: u64 = 1_000_000_000_000;

    /// Flows that were saved so long ago.
    fn flows(is_confirmed: bool, age: Duration) -> SavedFlows {
        let at = |boottime_ns| SavedAt { boot: [5; 16], boottime_ns };
        let age_ns = u64::try_from(age.as_nanos()).unwrap();
        SavedFlows::read(SavedFlows::header(7, is_confirmed, at(SAVED_NS), &[]), at(SAVED_NS + age_ns), SAVED_NS).unwrap()
    }

    #[test]
    fn flows_that_no_worker_has_restored_are_put_back_whether_the_start_failed_or_the_gateway_ended_early() {
        for start_failed in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let flows = flows(true, RESTART_WITHIN);
            let bytes = flows.bytes().to_vec();
            let transfer = FlowTransfer::new(StateDirs::with_runtime(dir.path(), None), 7, 2, Some(Arc::new(flows)));
            if start_failed {
                transfer.put_back();
            } else {
                transfer.save(Vec::new(), false);
            }
            assert_eq!(std::fs::read(dir.path().join("flows")).unwrap(), bytes);
        }
        let dir = tempfile::tempdir().unwrap();
        FlowTransfer::new(StateDirs::with_runtime(dir.path(), None), 7, 2, None).put_back();
        assert!(!dir.path().join("flows").exists());
    }

    #[test]
    fn a_state_on_disk_is_current_only_after_a_process_that_had_it_from_a_controller_and_has_just_ended() {
        let origin =
            |flows: Option<&SavedFlows>, origin| state_after(flows, GatewayState { state: Arc::default(), origin }).origin;
        let (just_ended, later) = (RESTART_WITHIN, RESTART_WITHIN + Duration::from_secs(1));
        assert_eq!(origin(Some(&flows(true, just_ended)), Origin::Disk), Origin::LastProcess);
        assert_eq!(origin(Some(&flows(true, just_ended)), Origin::Expired), Origin::Expired);
        assert_eq!(origin(Some(&flows(true, later)), Origin::Disk), Origin::Disk);
        assert_eq!(origin(Some(&flows(false, just_ended)), Origin::Disk), Origin::Disk);
        assert_eq!(origin(None, Origin::Disk), Origin::Disk);
        assert!(is_restart(Some(&flows(false, just_ended))), "its routes still stand");
    }
}
