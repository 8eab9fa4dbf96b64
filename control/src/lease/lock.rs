//! Locks by which controllers of one machine know which of them still run.
//!
//! Invariant: a controller has the lock of a file that is named by its identity from before anybody can read that identity in
//! a Lease until its process has ended; only then the kernel gives the lock away (flock(2)). Who gets the lock of
//! such a file has proved that its owner writes nothing any more. What the kernel may still send for a process that was killed
//! names the version of the object that it saw, as all writes do.
//! A file of another start of the system, or of another machine, proves nothing.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

/// Says which start of which machine this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const PREFIX: &str = "controller-";
const SUFFIX: &str = ".lock";

/// The lock of one controller, and where those of others are.
#[derive(Debug)]
pub(super) struct ProcessLock {
    dir: PathBuf,
    own: PathBuf,
    boot: String,
    /// Locked for as long as it is open.
    _file: File,
}

impl ProcessLock {
    /// Takes the lock of `identity` in `dir`, a directory of this machine, which is made where it is missing.
    ///
    /// # Errors
    /// When the file cannot be made and locked there.
    pub(super) fn take(dir: &Path, identity: &str) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let boot = fs::read_to_string(BOOT_ID)?;
        let own = path(dir, identity).ok_or(io::ErrorKind::InvalidFilename)?;
        // Nobody finds it before it is locked.
        let unnamed = own.with_extension("new");
        let mut file = File::create(&unnamed)?;
        file.try_lock()?;
        file.write_all(boot.as_bytes())?;
        fs::rename(&unnamed, &own)?;
        Ok(Self { dir: dir.to_owned(), own, boot, _file: file })
    }

    /// Whether it is proved that the controller of `identity`, which is not this one, has ended.
    #[must_use]
    pub(super) fn has_ended(&self, identity: &str) -> bool {
        path(&self.dir, identity).is_some_and(|path| self.is_left(&path))
    }

    /// Removes the files of those that have ended: what they prove is of use to nobody once this one leads.
    pub(super) fn remove_left(&self) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_lock = name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX));
            if is_lock && self.is_left(&entry.path()) {
                // Another controller may have removed it.
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

/// The file of a controller. An identity comes from a Lease, where anybody may have written it.
fn path(dir: &Path, identity: &str) -> Option<PathBuf> {
    let is_name = !identity.is_empty() && !identity.contains(['/', '\0']);
    is_name.then(|| dir.join(format!("{PREFIX}{identity}{SUFFIX}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lock_that_was_let_go_on_this_machine_since_it_started_proves_an_end() {
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
