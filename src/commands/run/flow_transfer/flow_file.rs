//! The file of the flows of a gateway between two processes.
//!
//! It is `flows` in the state directory, mode 0600, replaced by a rename and not synced to disk: it need not survive the
//! machine. Invariant: a file is used once. It is removed before any of its flows is, so that a file that ends the
//! process cannot do so twice. Deliberately not here: its format and checks ([`dataplane::SavedFlows`]).

use std::error::Error;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use control::store::files::Survives;
use dataplane::{FlowFate, SavedAt, SavedFlows};

use crate::agent::persist::STATE;
use crate::agent::persist::directories::StateDirs;
use crate::agent::persist::sealed::uptime;
use crate::worker_threads::now_ns;

/// Name of the file.
pub(in crate::commands::run) const FLOWS: &str = "flows";
/// Interval at which [`log_restored`] looks whether the workers are done.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The file.
#[derive(Clone, Debug)]
pub(in crate::commands::run) struct FlowFile {
    dirs: StateDirs,
}

impl FlowFile {
    /// The file in these directories; it may not exist.
    #[must_use]
    pub(in crate::commands::run) const fn new(dirs: StateDirs) -> Self {
        Self { dirs }
    }

    /// The flows of the process before, if there are any that can be used; otherwise the log says why. The file stays
    /// until [`FlowFile::remove`].
    #[must_use]
    pub(in crate::commands::run) fn read(&self) -> Option<Arc<SavedFlows>> {
        let now = match uptime() {
            Ok(now) => now,
            Err(error) => {
                tracing::warn!(%error, "it is unknown whether the machine has started since the last process; connections of mode nat break");
                return None;
            }
        };
        let found: Vec<_> = self.dirs.paths(FLOWS).filter_map(|path| Some((read(&path, now).transpose()?, path))).collect();
        if found.iter().all(|(read, _)| read.is_err()) {
            for (unusable, path) in &found {
                let error = unusable.as_ref().err().map(ToString::to_string).unwrap_or_default();
                tracing::warn!(path = %path.display(), error, "the flows of the last process are not used; connections of mode nat break");
            }
        }
        found.into_iter().filter_map(|(read, _)| read.ok()).min_by_key(SavedFlows::age_ns).map(Arc::new)
    }

    /// Removes the file, whether it was usable or not.
    pub(in crate::commands::run) fn remove(&self) {
        if let Err((path, error)) = self.dirs.remove(FLOWS) {
            tracing::warn!(path = %path.display(), %error, "saved flows cannot be removed; remove the file, or it is read again at the next start");
        }
    }

    /// Replaces the file by these parts, each of which a worker saved. `is_confirmed`: a controller sent this process its
    /// state. If memory has the state and no room for the flows, they confirm nothing.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(in crate::commands::run) fn write(&self, seed: u64, is_confirmed: bool, parts: &[Vec<u8>]) -> io::Result<()> {
        let now = uptime()?;
        let write = |is_confirmed| {
            let header = SavedFlows::header(seed, is_confirmed, now, parts);
            self.replace(is_confirmed, [header.as_slice()].into_iter().chain(parts.iter().map(Vec::as_slice)))
        };
        if self.goes_to_memory(is_confirmed) { write(true).or_else(|_| write(false)) } else { write(is_confirmed) }
    }

    /// Replaces the file by flows that were read from it and not used, at least not by all workers.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(in crate::commands::run) fn put_back(&self, flows: &SavedFlows) -> io::Result<()> {
        self.replace(flows.is_confirmed(), [flows.bytes()].into_iter())
    }

    fn replace<'a>(&self, is_confirmed: bool, bytes: impl Iterator<Item = &'a [u8]> + Clone) -> io::Result<()> {
        if self.goes_to_memory(is_confirmed) {
            return self.dirs.replace_in_memory(FLOWS, bytes);
        }
        self.dirs.replace(FLOWS, Survives::Process, bytes)
    }

    /// Whether flows belong into memory: those that confirm a state which memory alone has. On disk they would outlive
    /// it and confirm the older one there.
    fn goes_to_memory(&self, is_confirmed: bool) -> bool {
        is_confirmed && self.dirs.is_in_memory(STATE)
    }
}

/// The flows in a file, if there is one, or why they cannot be used.
fn read(path: &Path, now: SavedAt) -> Result<Option<SavedFlows>, Box<dyn Error>> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read?,
    };
    Ok(Some(SavedFlows::read(bytes, now, now_ns())?))
}

/// Logs what became of saved flows once all workers have taken theirs, and releases their memory.
pub(in crate::commands::run) async fn log_restored(saved: Arc<SavedFlows>, workers: usize) {
    let report = saved.report();
    while (report.workers() as usize) < workers {
        tokio::time::sleep(LOOK_EVERY).await;
    }
    let [restored, idle, backend_gone, port_gone, no_room, invalid] = FlowFate::ALL.map(|fate| report.count(fate));
    let age_ms = saved.age_ns() / 1_000_000;
    tracing::info!(
        flows = saved.flows(),
        restored,
        idle,
        backend_gone,
        port_gone,
        no_room,
        invalid,
        age_ms,
        "the flows of the last process go on"
    );
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Bytes of the part of a worker without flows: the lengths of seven empty sections.
    const EMPTY_PART: usize = 7 * 8;

    #[test]
    fn what_is_written_is_read_by_the_next_process_once_and_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = FlowFile::new(StateDirs::with_runtime(&dir.path().join("state"), Some(&dir.path().join("run"))));
        assert!(file.read().is_none());
        // Workers without flows.
        let parts = [vec![0; EMPTY_PART], vec![0; EMPTY_PART]];
        fs::create_dir(dir.path().join("state")).unwrap();
        fs::write(dir.path().join("state/flows.new"), "left by a process that was killed").unwrap();
        file.write(42, true, &parts).unwrap();
        let saved = file.read().unwrap();
        assert_eq!((saved.seed(), saved.is_confirmed(), saved.flows()), (42, true, 0));
        file.remove();
        file.put_back(&saved).unwrap();
        assert_eq!(file.read().unwrap().bytes(), saved.bytes());
        assert_eq!(fs::metadata(dir.path().join("state/flows")).unwrap().permissions().mode() & 0o777, 0o600);
        file.write(42, false, &parts).unwrap();
        assert!(!file.read().unwrap().is_confirmed());
        file.remove();
        file.remove();
        assert!(file.read().is_none());
        fs::write(dir.path().join("state/flows"), "something else").unwrap();
        assert!(file.read().is_none());
    }

    #[test]
    fn flows_that_cannot_be_saved_leave_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = FlowFile::new(StateDirs::with_runtime(dir.path(), None));
        // No file can take the name of a directory.
        fs::create_dir_all(dir.path().join("flows/taken")).unwrap();
        file.write(42, true, &[vec![0; EMPTY_PART]]).unwrap_err();
        assert!(!dir.path().join("flows.new").exists());
    }

    #[test]
    fn flows_that_the_disk_does_not_take_are_kept_in_memory_and_the_newest_are_used() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("state");
        let file = FlowFile::new(StateDirs::with_runtime(&disk, Some(&dir.path().join("run"))));
        let parts = [vec![0; EMPTY_PART]];
        file.write(1, true, &parts).unwrap();
        let old = fs::read(disk.join(FLOWS)).unwrap();
        fs::remove_dir_all(&disk).unwrap();
        fs::write(&disk, "no directory").unwrap();
        file.write(2, true, &parts).unwrap();
        assert_eq!(file.read().unwrap().seed(), 2);
        // As on a disk that became read-only: the flows of an earlier stop are still there.
        fs::remove_file(&disk).unwrap();
        fs::create_dir(&disk).unwrap();
        fs::write(disk.join(FLOWS), &old).unwrap();
        assert_eq!(file.read().unwrap().seed(), 2);
        fs::write(dir.path().join("run/state/flows"), "").unwrap();
        assert_eq!(file.read().unwrap().seed(), 1);
        file.remove();
        assert!(file.read().is_none() && !dir.path().join("run/state/flows").exists());
    }

    #[test]
    fn flows_that_confirm_a_state_in_memory_end_with_it_and_those_on_disk_confirm_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, memory) = (dir.path().join("state"), dir.path().join("run/state"));
        let file = FlowFile::new(StateDirs::with_runtime(&disk, Some(&dir.path().join("run"))));
        let parts = [vec![0; EMPTY_PART]];
        fs::create_dir_all(&memory).unwrap();
        fs::write(memory.join(STATE), "what the disk did not take").unwrap();
        file.write(1, true, &parts).unwrap();
        assert!(file.read().unwrap().is_confirmed() && !disk.join(FLOWS).exists());
        let saved = file.read().unwrap();
        file.remove();
        file.put_back(&saved).unwrap();
        assert!(memory.join(FLOWS).exists() && !disk.join(FLOWS).exists());
        file.write(1, false, &parts).unwrap();
        assert!(disk.join(FLOWS).exists() && !memory.join(FLOWS).exists());
        file.remove();
        // Memory takes no flows either.
        fs::create_dir_all(memory.join("flows/taken")).unwrap();
        file.write(1, true, &parts).unwrap();
        assert!(disk.join(FLOWS).exists() && !file.read().unwrap().is_confirmed());
    }
}
