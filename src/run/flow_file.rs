//! The file in which the flows of a gateway wait for the next process.
//!
//! It is `flows` in the state directory, mode 0600, replaced by a rename and not synced to disk: it need not survive the
//! machine. Invariant: a file is used once. It is removed before any of its flows is, so that a file that ends the
//! process cannot do so twice. Deliberately not here: its format and checks ([`dataplane::SavedFlows`]).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dataplane::{FlowFate, SavedAt, SavedFlows};
use rustix::time::{ClockId, clock_gettime};

use crate::agent::persist;
use crate::worker_threads::now_ns;

/// Name of the file.
pub(super) const FLOWS: &str = "flows";
/// The kernel's number of the present boot, 32 hexadecimal digits with hyphens.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Interval at which [`log_restored`] looks whether the workers are done.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The file.
#[derive(Clone, Debug)]
pub(super) struct FlowFile {
    dir: PathBuf,
}

impl FlowFile {
    /// The file in `dir`; it may not exist.
    #[must_use]
    pub(super) fn in_dir(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    fn path(&self) -> PathBuf {
        self.dir.join(FLOWS)
    }

    /// The flows of the process before, if there are any that can be used; otherwise the log says why. The file stays
    /// until [`FlowFile::remove`].
    #[must_use]
    pub(super) fn read(&self) -> Option<Arc<SavedFlows>> {
        let path = self.path();
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the flows of the last process cannot be read; connections of mode nat break");
                return None;
            }
        };
        let now = match saved_at() {
            Ok(now) => now,
            Err(error) => {
                tracing::warn!(%error, "it is unknown whether the machine has started since the last process; connections of mode nat break");
                return None;
            }
        };
        match SavedFlows::read(bytes, now, now_ns()) {
            Ok(saved) => Some(Arc::new(saved)),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the flows of the last process are not used; connections of mode nat break");
                None
            }
        }
    }

    /// Removes the file, whether it was usable or not.
    pub(super) fn remove(&self) {
        let path = self.path();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %path.display(), %error, "saved flows cannot be removed; remove the file, or it is read again at the next start");
            }
            _ => {}
        }
    }

    /// Replaces the file by these parts, each of which a worker saved. `is_confirmed`: a controller sent this process its
    /// state.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(super) fn write(&self, seed: u64, is_confirmed: bool, parts: &[Vec<u8>]) -> io::Result<()> {
        let header = SavedFlows::header(seed, is_confirmed, saved_at()?, parts);
        self.replace([header.as_slice()].into_iter().chain(parts.iter().map(Vec::as_slice)))
    }

    /// Replaces the file by flows that were read from it and not used, at least not by all workers.
    ///
    /// # Errors
    /// The error of the operating system.
    pub(super) fn put_back(&self, flows: &SavedFlows) -> io::Result<()> {
        self.replace([flows.bytes()].into_iter())
    }

    fn replace<'a>(&self, bytes: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
        persist::replace(&self.dir, FLOWS, bytes, |_| Ok(()))
    }
}

/// Logs what became of saved flows once all workers have taken theirs, and releases their memory.
pub(super) async fn log_restored(saved: Arc<SavedFlows>, workers: usize) {
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

/// Now, for the next process or by the last one.
fn saved_at() -> io::Result<SavedAt> {
    let now = clock_gettime(ClockId::Boottime);
    let boottime_ns = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
    let text = fs::read_to_string(BOOT_ID)?.replace('-', "");
    let number = u128::from_str_radix(text.trim(), 16).map_err(io::Error::other)?;
    Ok(SavedAt { boot: number.to_be_bytes(), boottime_ns })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_is_written_is_read_by_the_next_process_once_and_by_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = FlowFile::in_dir(&dir.path().join("state"));
        assert!(file.read().is_none());
        // A worker without flows: five empty sections.
        let parts = [vec![0; 40], vec![0; 40]];
        fs::create_dir(dir.path().join("state")).unwrap();
        fs::write(dir.path().join("state/flows.new"), "left by a process that was killed").unwrap();
        file.write(42, true, &parts).unwrap();
        let saved = file.read().unwrap();
        assert_eq!((saved.seed(), saved.is_confirmed(), saved.flows()), (42, true, 0));
        file.remove();
        file.put_back(&saved).unwrap();
        assert_eq!(file.read().unwrap().bytes(), saved.bytes());
        assert_eq!(fs::metadata(file.path()).unwrap().permissions().mode() & 0o777, 0o600);
        file.write(42, false, &parts).unwrap();
        assert!(!file.read().unwrap().is_confirmed());
        file.remove();
        file.remove();
        assert!(file.read().is_none());
        fs::write(file.path(), "something else").unwrap();
        assert!(file.read().is_none());
    }

    #[test]
    fn flows_that_cannot_be_saved_leave_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = FlowFile::in_dir(dir.path());
        // No file can take the name of a directory.
        fs::create_dir_all(file.path().join("taken")).unwrap();
        file.write(42, true, &[vec![0; 40]]).unwrap_err();
        assert!(!dir.path().join("flows.new").exists());
    }

    #[test]
    fn the_kernel_tells_which_boot_it_is() {
        assert_ne!(saved_at().unwrap().boot, [0; 16]);
    }
}
