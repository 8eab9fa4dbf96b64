//! The state directory, and the directory in memory that replaces it while it cannot be written.
//!
//! Invariant: a file that the state directory does not take, because its disk is full, read-only or broken, is written to
//! the other one, and the log says so. It outlives the process, not the machine. Whoever reads looks at both, and the
//! newest valid file counts. Not here: what is in files, and which is the newest.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use control::store::files::{self, PRIVATE, Survives};

/// Mode of directories that only their owner may enter.
const PRIVATE_DIR: u32 = 0o700;
/// Name of the directory in memory, within that which systemd makes for the unit.
const IN_MEMORY: &str = "state";

/// Both directories.
#[derive(Clone, Debug)]
pub struct StateDirs {
    disk: PathBuf,
    memory: Option<PathBuf>,
    /// Whether the last write to the disk failed. All clones share it.
    is_failing: Arc<AtomicBool>,
}

impl StateDirs {
    /// The state directory `disk`. Under systemd, `RUNTIME_DIRECTORY` names a directory in memory.
    #[must_use]
    pub fn new(disk: &Path) -> Self {
        let runtime = env::var_os("RUNTIME_DIRECTORY").and_then(|all| env::split_paths(&all).next());
        Self::with_runtime(disk, runtime.as_deref())
    }

    /// The state directory `disk` and a runtime directory in memory, if there is one.
    #[must_use]
    pub fn with_runtime(disk: &Path, runtime: Option<&Path>) -> Self {
        let memory = runtime.filter(|runtime| runtime.is_absolute()).map(|runtime| runtime.join(IN_MEMORY));
        Self { disk: disk.to_owned(), memory, is_failing: Arc::default() }
    }

    /// The state directory.
    #[must_use]
    pub fn disk(&self) -> &Path {
        &self.disk
    }

    /// Where a file of this name may be.
    pub fn paths(&self, name: &str) -> impl Iterator<Item = PathBuf> {
        [Some(&self.disk), self.memory.as_ref()].into_iter().flatten().map(|dir| dir.join(name)).collect::<Vec<_>>().into_iter()
    }

    /// Replaces the file `name`: mode 0600 in a directory of mode 0700, complete before it gets its name. If the disk does
    /// not take it, it is written to memory. After an error, the former files are left.
    ///
    /// # Errors
    /// That of the disk, if no directory takes the file.
    pub fn replace<'a>(&self, name: &str, survives: Survives, parts: impl Iterator<Item = &'a [u8]> + Clone) -> io::Result<()> {
        let Err(error) = write(&self.disk, name, survives, parts.clone()) else {
            if self.is_failing.swap(false, Ordering::Relaxed) {
                tracing::info!(dir = %self.disk.display(), "the state directory can be written again");
            }
            // The file in memory is older now. If it stays, its age says so.
            let _ = self.memory.as_ref().map(|dir| files::remove(&dir.join(name)));
            return Ok(());
        };
        let Some(memory) = &self.memory else { return Err(error) };
        if self.replace_in_memory(name, parts).is_err() {
            return Err(error);
        }
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                dir = %self.disk.display(), %error, memory = %memory.display(),
                "the state directory cannot be written; its files are kept in memory and outlive a restart, not the machine"
            );
        }
        Ok(())
    }

    /// As [`StateDirs::replace`], in memory alone: the file ends with the others there.
    ///
    /// # Errors
    /// If there is no directory in memory, or it does not take the file or has too little room; the log says so.
    pub fn replace_in_memory<'a>(&self, name: &str, parts: impl Iterator<Item = &'a [u8]> + Clone) -> io::Result<()> {
        let memory = self.memory.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let replace = || {
            create_private(memory)?;
            let room = rustix::fs::statvfs(memory)?;
            has_room(parts.clone().map(|part| part.len() as u64).sum(), room.f_bavail.saturating_mul(room.f_frsize))?;
            // Syncing memory makes nothing last.
            write(memory, name, Survives::Process, parts)
        };
        replace().inspect_err(|error| {
            tracing::warn!(dir = %memory.display(), %error, "the runtime directory cannot be written");
        })
    }

    /// Whether the newest file of this name is in memory: a write that the disk takes removes it there.
    #[must_use]
    pub fn is_in_memory(&self, name: &str) -> bool {
        self.memory.as_ref().is_some_and(|dir| dir.join(name).exists())
    }

    /// Removes the files of this name.
    ///
    /// # Errors
    /// The file that cannot be removed, and why.
    pub fn remove(&self, name: &str) -> Result<(), (PathBuf, io::Error)> {
        let removed = self.paths(name).map(|path| files::remove(&path).map_err(|error| (path, error)));
        removed.collect::<Vec<_>>().into_iter().collect()
    }

    /// Removes what a process that was killed while it wrote has left of the files `names`: as large as the files, it
    /// could take the room that they need.
    pub fn remove_temporary(&self, names: &[&str]) {
        for path in names.iter().flat_map(|name| self.paths(name)).map(|path| files::temporary(&path)) {
            if let Err(error) = files::remove(&path) {
                tracing::warn!(path = %path.display(), %error, "a temporary file of an earlier process cannot be removed");
            }
        }
    }
}

fn write<'a>(dir: &Path, name: &str, survives: Survives, parts: impl Iterator<Item = &'a [u8]>) -> io::Result<()> {
    create_private(dir)?;
    files::replace(&dir.join(name), PRIVATE, survives, parts)
}

/// Other programs need the memory too, on most machines that of all of `/run`: a file of `needed` bytes may take half of
/// the bytes that are free.
fn has_room(needed: u64, free: u64) -> io::Result<()> {
    if needed > free / 2 {
        let reason = format!("a file of {needed} bytes needs more than half of the {free} bytes that are free");
        return Err(io::Error::new(io::ErrorKind::StorageFull, reason));
    }
    Ok(())
}

/// Creates a directory that only its owner may enter, unless there is one.
///
/// # Errors
/// The error of the operating system.
pub fn create_private(dir: &Path) -> io::Result<()> {
    files::create_dir(dir, PRIVATE_DIR)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A state directory that takes no file, because a file has its name, and a runtime directory.
    fn unwritable() -> (tempfile::TempDir, StateDirs) {
        let dir = tempfile::tempdir().unwrap();
        let (disk, runtime) = (dir.path().join("disk"), dir.path().join("run"));
        fs::write(&disk, "no directory").unwrap();
        (dir, StateDirs::with_runtime(&disk, Some(&runtime)))
    }

    fn replace(dirs: &StateDirs, content: &str) -> io::Result<()> {
        dirs.replace("file", Survives::PowerCut, [content.as_bytes()].into_iter())
    }

    #[test]
    fn a_file_that_the_disk_does_not_take_is_kept_in_memory_until_it_does() {
        let (dir, dirs) = unwritable();
        replace(&dirs, "first").unwrap();
        let [disk, memory] = dirs.paths("file").collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(memory, dir.path().join("run/state/file"));
        assert_eq!(fs::read_to_string(&memory).unwrap(), "first");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&memory), mode(memory.parent().unwrap())), (0o600, 0o700));
        fs::remove_file(dirs.disk()).unwrap();
        replace(&dirs, "second").unwrap();
        assert_eq!((fs::read_to_string(&disk).unwrap().as_str(), memory.exists()), ("second", false));
        dirs.remove("file").unwrap();
        dirs.remove("file").unwrap();
        assert!(!disk.exists());
    }

    #[test]
    fn without_a_runtime_directory_the_error_of_the_disk_is_told() {
        let (_dir, dirs) = unwritable();
        let without = StateDirs::with_runtime(dirs.disk(), None);
        assert!(replace(&without, "lost").is_err());
        assert_eq!(without.paths("file").count(), 1);
        let relative = StateDirs::with_runtime(dirs.disk(), Some(Path::new("run")));
        assert!(replace(&relative, "lost").is_err());
    }

    #[test]
    fn a_file_takes_at_most_half_of_the_memory_that_is_free() {
        assert!(has_room(50, 100).is_ok());
        let error = has_room(51, 100).unwrap_err();
        assert_eq!(error.to_string(), "a file of 51 bytes needs more than half of the 100 bytes that are free");
    }

    #[test]
    fn temporary_files_of_an_earlier_process_go() {
        let (dir, dirs) = unwritable();
        fs::create_dir_all(dir.path().join("run/state")).unwrap();
        let left = ["file.new", "flows.new", "other.new"].map(|name| dir.path().join("run/state").join(name));
        left.iter().for_each(|path| fs::write(path, "half").unwrap());
        dirs.remove_temporary(&["file", "flows"]);
        assert_eq!(left.map(|path| path.exists()), [false, false, true]);
    }
}
