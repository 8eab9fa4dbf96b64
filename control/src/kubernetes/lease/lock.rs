//! File locks that tell controllers on the same machine whether another one still runs.
//!
//! Invariant: a controller locks a file named after its identity before that identity appears in a Lease, and holds the
//! lock until its process ends; only then the kernel releases it (flock(2)). Whoever acquires the lock of such a file
//! has proved that its owner has stopped writing. Requests of a killed process that the kernel still sends are
//! harmless, because every write names the version of the object that it replaces. A file from another boot or another
//! machine proves nothing.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Identifies the boot of this machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const PREFIX: &str = "controller-";
const SUFFIX: &str = ".lock";

/// The lock of one controller, and the directory with those of others.
#[derive(Debug)]
pub(super) struct ProcessLock {
    dir: PathBuf,
    own: PathBuf,
    boot: String,
    /// Locked while it is open.
    _file: File,
}

impl ProcessLock {
    /// Acquires the lock of `identity` in `dir`, a local directory, which is created if it is missing.
    ///
    /// # Errors
    /// If the file cannot be created and locked there.
    pub(super) fn take(dir: &Path, identity: &str) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let boot = fs::read_to_string(BOOT_ID)?;
        let own = path(dir, identity).ok_or(io::ErrorKind::InvalidFilename)?;
        // The file gets its name only after it is locked.
        let unnamed = own.with_extension("new");
        let mut file = File::create(&unnamed)?;
        file.try_lock()?;
        file.write_all(boot.as_bytes())?;
        fs::rename(&unnamed, &own)?;
        Ok(Self { dir: dir.to_owned(), own, boot, _file: file })
    }

    /// Whether the lock proves that the controller of `identity`, another one, has ended.
    #[must_use]
    pub(super) fn has_ended(&self, identity: &str) -> bool {
        path(&self.dir, identity).is_some_and(|path| self.is_left(&path))
    }

    /// Removes the files of controllers that have ended. They are useless once this one leads.
    pub(super) fn remove_left(&self) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_lock = name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
            if is_lock && self.is_left(&entry.path()) {
                // Another controller may have removed it already.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn is_left(&self, path: &Path) -> bool {
        let Some(mut file) = File::open(path).ok().filter(|_| path != self.own) else { return false };
        let mut boot = String::new();
        let is_of_this_start = file.read_to_string(&mut boot).is_ok() && boot == self.boot;
        is_of_this_start && !matches!(file.try_lock(), Err(TryLockError::WouldBlock | TryLockError::Error(_)))
    }
}

/// The file of a controller. Its identity comes from a Lease and is therefore untrusted.
fn path(dir: &Path, identity: &str) -> Option<PathBuf> {
    let is_name = !identity.is_empty() && !identity.contains(['/', '\0']);
    is_name.then(|| dir.join(format!("{PREFIX}{identity}{SUFFIX}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lock_released_on_this_machine_since_its_boot_proves_an_end() {
        let dir = tempfile::tempdir().unwrap();
        let one = ProcessLock::take(dir.path(), "one").unwrap();
        let two = ProcessLock::take(dir.path(), "two").unwrap();
        assert!(!two.has_ended("one") && !two.has_ended("two") && !two.has_ended("three"));
        assert!(!two.has_ended("") && !two.has_ended("../one"));
        drop(one);
        assert!(two.has_ended("one") && two.has_ended("one"));
        fs::write(dir.path().join("controller-elsewhere.lock"), "another boot").unwrap();
        assert!(!two.has_ended("elsewhere"));
        two.remove_left();
        assert!(!two.has_ended("one"));
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["controller-elsewhere.lock", "controller-two.lock"]);
    }
}
