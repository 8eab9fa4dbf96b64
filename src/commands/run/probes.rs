//! The probe task, and the transfer of health from the process before, and to the next one.
//!
//! Health is the file `health` in the state directory, mode 0600, replaced by a rename and not synced to disk. It is used
//! once: it is removed when targets have taken it over, so that it does not count again after a crash. A process that
//! ends before that leaves it. Not here: what is probed and when, and the format of the file (`health`).

use std::fs;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use control::store::files::Survives;
use dataplane::{RouteLookup, Tunables, WorkerCounters};
use proto::GatewayState;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::agent::persist::directories::StateDirs;
use crate::agent::persist::sealed::Moment;
use crate::agent::served::Served;
use crate::agent::supervisor::Failure;
use crate::health::{self, ConnectionWatch, Findings, ProbeInputs, Prober, SavedHealth};

/// Name of the file.
pub(super) const HEALTH: &str = "health";
/// How long the end of a gateway waits for the task: 100,000 targets take about 200 ms.
const SAVED_WITHIN: Duration = Duration::from_secs(2);

/// What the task finds, and how it is asked to end.
#[derive(Clone, Debug, Default)]
pub(super) struct ProbeResults {
    /// Its output.
    pub(super) findings: Findings,
    /// Cancelled once targets have taken over what was saved of them.
    taken_over: CancellationToken,
    /// Cancelled when the gateway is about to end.
    terminating: CancellationToken,
}

/// The task that probes backends. Cloned for each start.
#[derive(Clone, Debug)]
pub(super) struct ProbeTask {
    /// The state as used in this gateway's zone.
    pub(super) state: watch::Receiver<Option<GatewayState>>,
    /// The routes of the newest snapshot.
    pub(super) routes: watch::Receiver<Option<RouteLookup>>,
    /// The configuration as far as it changes.
    pub(super) tunables: watch::Receiver<Tunables>,
    /// The backends as the newest snapshot has them.
    pub(super) served: watch::Receiver<Served>,
    /// The counters of the workers.
    pub(super) workers: Vec<Arc<WorkerCounters>>,
    /// The health that the process before has left, for the first run alone: later ones begin with what the run before
    /// found.
    pub(super) saved: Arc<Mutex<SavedHealth>>,
    /// Output.
    pub(super) results: ProbeResults,
}

impl ProbeTask {
    /// Probes until the state is closed.
    ///
    /// # Errors
    /// Never.
    pub(super) async fn run(self) -> Result<(), Failure> {
        let Self { state, routes, tunables, served, workers, saved, results } = self;
        let ProbeResults { findings, taken_over, terminating } = results;
        let (prober, newest) = (Prober::default(), routes.clone());
        let probe = |target, source_port| {
            let (prober, routes) = (&prober, newest.borrow().clone());
            async move {
                let interfaces = routes.as_ref().map_or(&[][..], RouteLookup::interfaces);
                prober.probe_by(interfaces, target, source_port).await
            }
        };
        let saved = std::mem::take(&mut *saved.lock().unwrap_or_else(PoisonError::into_inner));
        let connections = ConnectionWatch::new(served, workers);
        let inputs = ProbeInputs { state, routes, tunables, connections, saved, taken_over, terminating };
        health::run(probe, inputs, &findings, health::concurrency(descriptors())).await;
        Ok(())
    }
}

impl ProbeResults {
    /// Reads the health that the process before has left in `dirs`, and removes its file once targets have taken it over.
    pub(super) fn read_saved(&self, dirs: &StateDirs) -> Arc<Mutex<SavedHealth>> {
        let saved = read(dirs);
        let (taken_over, dirs) = (self.taken_over.clone(), dirs.clone());
        tokio::spawn(async move {
            taken_over.cancelled().await;
            if let Err((path, error)) = dirs.remove(HEALTH) {
                tracing::warn!(path = %path.display(), %error, "the saved health of backends cannot be removed; it counts again after a crash");
            }
        });
        Arc::new(Mutex::new(saved))
    }

    /// Writes the health of all targets for the next process. Called when the gateway ends; the task goes on.
    pub(super) async fn save(&self, dirs: &StateDirs) {
        let mut saved = self.findings.saved.subscribe();
        self.terminating.cancel();
        let bytes = match timeout(SAVED_WITHIN, saved.wait_for(Option::is_some)).await {
            Ok(Ok(saved)) => saved.clone(),
            _ => None,
        };
        let written = match bytes {
            Some(bytes) if bytes.is_empty() => Ok(()),
            Some(bytes) => dirs.replace(HEALTH, Survives::Process, [&bytes[..]].into_iter()),
            None => Err(io::Error::other("the task that probes does not answer")),
        };
        match written {
            Ok(()) => tracing::debug!("the health of backends is saved for the next process"),
            Err(error) => {
                let dir = dirs.disk().display();
                tracing::error!(%dir, %error, "the health of backends cannot be saved; the next process uses all until they fail");
            }
        }
    }
}

/// The newest health that the process before has saved, if it is of use; otherwise the log says why.
fn read(dirs: &StateDirs) -> SavedHealth {
    let moment = Moment::now();
    let (mut newest, mut unread, mut unused) = (None::<SavedHealth>, None, None);
    for path in dirs.paths(HEALTH) {
        match fs::read(&path).map(|bytes| SavedHealth::decode(&bytes, Instant::now(), moment)) {
            Ok(Ok(saved)) => {
                let is_newer = |newest: &SavedHealth| match (saved.written(), newest.written()) {
                    (Some(saved), Some(newest)) => moment.is_newer(&saved, &newest),
                    (saved, _) => saved.is_some(),
                };
                if newest.as_ref().is_none_or(is_newer) {
                    newest = Some(saved);
                }
            }
            Ok(Err(error)) => unused = Some((path, error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => unread = Some((path, error)),
        }
    }
    if let Some(saved) = newest {
        tracing::info!(targets = saved.len(), "the health of backends goes on from the last process");
        return saved;
    }
    if let Some((path, error)) = unread {
        tracing::warn!(path = %path.display(), %error, "the health of backends cannot be read; all are used until they fail");
    }
    if let Some((path, error)) = unused {
        tracing::info!(path = %path.display(), %error, "the health of the last process is not used");
    }
    SavedHealth::default()
}

/// Maximum number of file descriptors of this process.
fn descriptors() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn results(bytes: &[u8]) -> ProbeResults {
        let results = ProbeResults::default();
        results.findings.saved.send_replace(Some(bytes.into()));
        results
    }

    fn health(targets: u32) -> Vec<u8> {
        health::saved_health(targets, Moment::now())
    }

    #[tokio::test]
    async fn health_is_written_for_its_owner_only_and_what_is_no_health_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let dirs = StateDirs::with_runtime(&state, None);
        assert!(read(&dirs).is_empty());
        fs::create_dir(&state).unwrap();
        fs::write(state.join("health.new"), "left by a process that was killed").unwrap();
        results(&health(2)).save(&dirs).await;
        assert_eq!(read(&dirs).len(), 2);
        assert_eq!(fs::metadata(state.join("health")).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!state.join("health.new").exists());
        results(b"").save(&dirs).await;
        assert_eq!(read(&dirs).len(), 2, "a process without a state leaves it");
        fs::write(state.join("health"), "something else").unwrap();
        assert!(read(&dirs).is_empty());
        fs::write(state.join("health"), "").unwrap();
        assert!(read(&dirs).is_empty());
    }

    #[tokio::test]
    async fn health_that_the_disk_does_not_take_is_kept_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk");
        fs::write(&disk, "no directory").unwrap();
        let dirs = StateDirs::with_runtime(&disk, Some(dir.path()));
        results(&health(3)).save(&dirs).await;
        fs::remove_file(&disk).unwrap();
        fs::create_dir(&disk).unwrap();
        fs::write(disk.join("health"), "").unwrap();
        assert_eq!(read(&dirs).len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_does_not_answer_holds_up_no_end() {
        let dir = tempfile::tempdir().unwrap();
        ProbeResults::default().save(&StateDirs::with_runtime(dir.path(), None)).await;
        assert!(!dir.path().join("health").exists());
    }
}
