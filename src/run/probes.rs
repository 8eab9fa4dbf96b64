//! The task that probes backends, and the health of these on its way from the process before, and to the next one.
//!
//! Health is the file `health` in the state directory, mode 0600, replaced by a rename and not synced to disk. It stays
//! when it has been read: it says itself how old it is, and the next process replaces it. Not here: what is probed and
//! when, and the format of the file (`agent::probe`).

use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use dataplane::{RouteLookup, Tunables, WorkerCounters};
use proto::GatewayState;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::agent::persist;
use crate::agent::probe::{self, ConnectionWatch, Findings, ProbeInputs, Prober, SavedHealth};
use crate::agent::served::Served;
use crate::agent::supervisor::{Failure, Supervisor};

/// Name of the file.
pub(super) const HEALTH: &str = "health";
/// How long the end of a gateway waits for the task: 100,000 targets take about 200 ms.
const SAVED_WITHIN: Duration = Duration::from_secs(2);

/// What the task follows.
#[derive(Clone, Debug)]
pub(super) struct ProbeSources {
    /// The state as used in this gateway's zone.
    pub(super) known: watch::Receiver<Option<GatewayState>>,
    /// The routes of the newest snapshot.
    pub(super) routes: watch::Receiver<Option<RouteLookup>>,
    /// The configuration as far as it changes.
    pub(super) tunables: watch::Receiver<Tunables>,
    /// The backends as the newest snapshot has them.
    pub(super) served: watch::Receiver<Served>,
    /// The counters of the workers.
    pub(super) workers: Vec<Arc<WorkerCounters>>,
}

/// What the task finds, and how it is told that the gateway ends.
#[derive(Clone, Debug, Default)]
pub(super) struct ProbeResults {
    /// Its output.
    pub(super) findings: Findings,
    ends: CancellationToken,
}

/// Keeps the task running. It begins with the health that the process before has left in `dir`.
pub(super) fn supervise(supervisor: &mut Supervisor, sources: ProbeSources, results: ProbeResults, dir: &Path) {
    // For the first run alone: later ones begin with what the one before found.
    let saved = Arc::new(Mutex::new(read(dir)));
    supervisor.run("probe", (sources, results, saved), |(sources, ProbeResults { findings, ends }, saved)| async move {
        let ProbeSources { known, routes, tunables, served, workers } = sources;
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
        let inputs = ProbeInputs { known, routes, tunables, connections, saved, ends };
        probe::run(probe, inputs, &findings, probe::concurrency(descriptors())).await;
        Ok::<_, Failure>(())
    });
}

impl ProbeResults {
    /// Writes the health of all targets for the next process. Called when the gateway ends; the task goes on.
    pub(super) async fn save(&self, dir: &Path) {
        let mut saved = self.findings.saved.subscribe();
        self.ends.cancel();
        let bytes = match timeout(SAVED_WITHIN, saved.wait_for(Option::is_some)).await {
            Ok(Ok(saved)) => saved.clone(),
            _ => None,
        };
        let written =
            bytes.map_or_else(|| Err(io::Error::other("the task that probes does not answer")), |bytes| write(dir, &bytes));
        match written {
            Ok(()) => tracing::debug!("the health of backends is saved for the next process"),
            Err(error) => {
                let dir = dir.display();
                tracing::error!(%dir, %error, "the health of backends cannot be saved; the next process uses all until they fail");
            }
        }
    }
}

/// The health that the process before has saved, if it is of use; otherwise the log says why.
fn read(dir: &Path) -> SavedHealth {
    let path = dir.join(HEALTH);
    let path_text = path.display();
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %path_text, %error, "the health of backends cannot be read; all are used until they fail");
            }
            return SavedHealth::default();
        }
    };
    match SavedHealth::decode(&bytes, Instant::now(), SystemTime::now()) {
        Ok(saved) => {
            tracing::info!(targets = saved.len(), "the health of backends goes on from the last process");
            saved
        }
        Err(error) => {
            tracing::info!(path = %path_text, %error, "the health of the last process is not used");
            SavedHealth::default()
        }
    }
}

fn write(dir: &Path, bytes: &[u8]) -> io::Result<()> {
    persist::replace(dir, HEALTH, [bytes].into_iter(), |_| Ok(()))
}

/// Maximum number of file descriptors of this process.
fn descriptors() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn health_is_written_for_its_owner_only_and_what_is_no_health_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        assert!(read(&state).is_empty());
        fs::create_dir(&state).unwrap();
        fs::write(state.join("health.new"), "left by a process that was killed").unwrap();
        write(&state, b"something else").unwrap();
        assert_eq!(fs::metadata(state.join("health")).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(read(&state).is_empty() && !state.join("health.new").exists());
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_does_not_answer_holds_up_no_end() {
        let dir = tempfile::tempdir().unwrap();
        ProbeResults::default().save(dir.path()).await;
        assert!(!dir.path().join("health").exists());
    }
}
