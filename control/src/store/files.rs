//! Files that a later process reads, replaced as a whole. Both programs write every such file by [`replace`].
//!
//! Invariant: under its name a file is complete. It is written under another name, synced and renamed, so that neither
//! a full disk, nor the end of the process, nor a power cut leaves a part of it. A text that an operator's decisions
//! depend on has a copy and a last line of its own: a disk may still lose what it was told to keep, and a file that was
//! emptied or cut short is then noticed and replaced by the copy.
//!
//! Not here: the content of files.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Mode of files that only their owner may read.
pub const PRIVATE: u32 = 0o600;
/// Mode of files for everybody, as far as the umask of the process allows.
pub const READABLE: u32 = 0o666;
/// Last line of a text, a comment in every format that has one.
const END: &str = "# end of the file\n";

/// What a file must survive once it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survives {
    /// The process. Nothing waits for the disk.
    Process,
    /// A power cut: file and directory are synced.
    PowerCut,
}

/// The operating system refused to read or write a file, or its content is unusable.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read or written.
    #[error("{path}: {error}; it must be readable and writable for this process, on a disk with room (key `statusDir`)")]
    System {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// Its content is unusable, and so is that of its copy, if there is one.
    #[error("{path} is broken: {what}; correct it, or remove it to start with none")]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

/// Replaces a file by these parts. After an error it is the former one, and nothing of the new one takes room on the
/// disk; only if its directory cannot be synced, it may be either. The mode is reduced by the umask of the process.
///
/// # Errors
/// The error of the operating system.
pub fn replace<'a>(path: &Path, mode: u32, survives: Survives, parts: impl IntoIterator<Item = &'a [u8]>) -> io::Result<()> {
    let sync = match survives {
        Survives::Process => None,
        Survives::PowerCut => Some(File::sync_all),
    };
    replace_by(path, mode, parts, sync)
}

/// As [`replace`]. `sync`, if there is one, gets the complete file before it has its name, then the directory.
fn replace_by<'a>(
    path: &Path,
    mode: u32,
    parts: impl IntoIterator<Item = &'a [u8]>,
    sync: Option<impl Fn(&File) -> io::Result<()>>,
) -> io::Result<()> {
    let new = temporary(path);
    remove(&new)?;
    // Opened before the file has its name: a directory that cannot be read is an error that leaves the former file.
    let synced = sync.map(|sync| File::open(directory(path)).map(|dir| (sync, dir))).transpose()?;
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
        parts.into_iter().try_for_each(|bytes| file.write_all(bytes))?;
        synced.as_ref().map_or(Ok(()), |(sync, _)| sync(&file))?;
        fs::rename(&new, path)
    };
    if let Err(error) = write() {
        // The error of the write says more.
        let _ = fs::remove_file(&new);
        return Err(error);
    }
    synced.map_or(Ok(()), |(sync, dir)| sync(&dir))
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// Creates a directory and those above it, unless they exist, and syncs each new one into the directory that it is in.
///
/// # Errors
/// The error of the operating system.
pub fn create_dir(dir: &Path, mode: u32) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let above = directory(dir);
    if above != dir {
        create_dir(above, mode)?;
    }
    match DirBuilder::new().mode(mode).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists || !dir.is_dir() => return Err(error),
        _ => {}
    }
    // A directory may be writable and not readable for this process; then a power cut may cost the new one.
    if let Ok(above) = File::open(above) {
        above.sync_all()?;
    }
    Ok(())
}

/// Where a file is written before it gets its name. A process that was killed while it wrote leaves it.
#[must_use]
pub fn temporary(path: &Path) -> PathBuf {
    beside(path, ".new")
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(suffix);
    beside.into()
}

/// Removes a file; one that does not exist is no error.
///
/// # Errors
/// The error of the operating system.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The text of a file that [`write_text`] wrote, or an older version without copy and last line; `None` without a file.
/// An unusable file is moved aside and replaced by its copy, with an error in the log. A file without the last line
/// counts as cut short if it is the beginning of its copy; otherwise an older version or a person wrote it, and it is
/// used.
///
/// # Errors
/// If the file cannot be read, or neither it nor its copy is usable.
pub(super) fn read_text<E: ToString>(path: &Path, check: impl Fn(&str) -> Result<(), E>) -> Result<Option<String>, FileError> {
    let system = |error| FileError::System { path: path.to_owned(), error };
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(system)?,
    };
    let copy = fs::read(beside(path, ".last")).ok();
    // The text, and whether it has its last line.
    let checked = |bytes: &[u8]| {
        let text = std::str::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
        if text.trim().is_empty() {
            return Err("it is empty".to_owned());
        }
        let (content, has_end) = text.strip_suffix(END).map_or((text, false), |content| (content, true));
        check(content).map(|()| (content.to_owned(), has_end)).map_err(|error| error.to_string())
    };
    let what = match (checked(&bytes), &copy) {
        (Ok((_, false)), Some(copy)) if copy.starts_with(&bytes) => {
            format!("it is cut short: its last line is not {:?}", END.trim_end())
        }
        (Ok((text, has_end)), copy) => {
            if !has_end && copy.is_some() {
                tracing::warn!(
                    path = %path.display(), last_line = END.trim_end(),
                    "a file without its last line is used: it is no part of its copy, so an older version or a person wrote it"
                );
            }
            return Ok(Some(text));
        }
        (Err(what), _) => what,
    };
    let Some((text, true)) = copy.and_then(|copy| checked(&copy).ok()) else {
        return Err(FileError::Broken { path: path.to_owned(), what });
    };
    restore(path, &text, &what);
    Ok(Some(text))
}

/// Replaces a broken file by the text of its copy. The name is never without a file, which would mean none: if the disk
/// is full, or the process ends here, the next one finds the broken file and its copy again.
fn restore(path: &Path, text: &str, what: &str) {
    let moved = beside(path, ".broken");
    tracing::error!(
        path = %path.display(), what, moved = %moved.display(),
        "a file is broken and was moved aside; its last good copy is used"
    );
    let restored = remove(&moved)
        .and_then(|()| fs::hard_link(path, &moved))
        .and_then(|()| replace(path, READABLE, Survives::PowerCut, [text.as_bytes(), END.as_bytes()]));
    if let Err(error) = restored {
        tracing::error!(path = %path.display(), %error, "a broken file cannot be replaced by its copy");
    }
}

/// Replaces a text and its copy, the copy first: it is never older than the text.
///
/// # Errors
/// If one of them cannot be written. The text is the former one then; only if its directory cannot be synced, it may be
/// either.
pub(super) fn write_text(path: &Path, text: &str) -> Result<(), FileError> {
    for path in [&beside(path, ".last"), path] {
        replace(path, READABLE, Survives::PowerCut, [text.as_bytes(), END.as_bytes()])
            .map_err(|error| FileError::System { path: path.to_owned(), error })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::convert::Infallible;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    fn any(_: &str) -> Result<(), Infallible> {
        Ok(())
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_complete_file_is_synced_before_it_has_its_name_and_its_directory_after() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "former").unwrap();
        let synced = RefCell::new(Vec::new());
        let sync = |file: &File| {
            let of = file.metadata()?;
            synced.borrow_mut().push((of.is_dir(), of.ino(), fs::read_to_string(&path)?));
            Ok(())
        };
        replace_by(&path, PRIVATE, [&b"ne"[..], b"w"], Some(sync)).unwrap();
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        let expected = [(false, inode(&path), "former".to_owned()), (true, inode(dir.path()), "new".to_owned())];
        assert_eq!(*synced.borrow(), expected);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, PRIVATE);
    }

    #[test]
    fn a_write_that_fails_leaves_the_former_file_and_no_temporary_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, PRIVATE, Survives::PowerCut, [&b"former"[..]]).unwrap();
        // As on a full disk: the bytes are written, and making them last fails.
        let full = |_: &File| Err(io::ErrorKind::StorageFull.into());
        let failed = replace_by(&path, PRIVATE, [&b"more than fits"[..]], Some(full));
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(dir.path())), ("former", vec!["file".to_owned()]));
        // What a process left that was killed while it wrote.
        fs::write(temporary(&path), "half").unwrap();
        replace(&path, PRIVATE, Survives::Process, [&b"new"[..]]).unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(dir.path())), ("new", vec!["file".to_owned()]));
    }

    #[test]
    fn a_text_cut_short_anywhere_is_moved_aside_and_its_copy_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let text = "version: 1\ndrains:\n- a\n- b\n";
        write_text(&path, text).unwrap();
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(read_text(&path, any).unwrap().as_deref(), Some(text), "cut at {length}");
            assert_eq!(fs::read(beside(&path, ".broken")).unwrap(), whole[..length]);
            assert_eq!(fs::read(&path).unwrap(), whole, "the copy has replaced it");
        }
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_text(&path, any).unwrap().as_deref(), Some(text));
    }

    #[test]
    fn a_broken_text_that_cannot_be_replaced_stays_until_the_next_start_and_its_copy_is_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write_text(&path, "a\n").unwrap();
        fs::write(&path, "").unwrap();
        // Nothing can be written under the name of a directory that is not empty.
        fs::create_dir_all(temporary(&path).join("taken")).unwrap();
        for start in 0..2 {
            assert_eq!(read_text(&path, any).unwrap().as_deref(), Some("a\n"), "start {start}");
            assert_eq!(fs::read(&path).unwrap(), b"");
        }
        fs::remove_dir_all(temporary(&path)).unwrap();
        assert_eq!(read_text(&path, any).unwrap().as_deref(), Some("a\n"));
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("a\n{END}"));
    }

    #[test]
    fn a_text_that_an_older_version_wrote_beside_a_copy_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write_text(&path, "drains: []\n").unwrap();
        fs::write(&path, "drains: [a]\n").unwrap();
        assert_eq!(read_text(&path, any).unwrap().as_deref(), Some("drains: [a]\n"));
        assert_eq!(
            read_text(&path, |text| if text.contains("[a]") { Err("bad") } else { Ok(()) }).unwrap().as_deref(),
            Some("drains: []\n")
        );
    }

    #[test]
    fn a_text_that_an_operator_changed_or_removed_is_not_replaced_by_the_copy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        write_text(&path, "a\n").unwrap();
        fs::write(&path, format!("b\n{END}")).unwrap();
        assert_eq!(read_text(&path, any).unwrap().as_deref(), Some("b\n"));
        fs::remove_file(&path).unwrap();
        assert_eq!(read_text(&path, any).unwrap(), None);
    }

    #[test]
    fn a_text_of_an_older_version_is_read_and_an_empty_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "a\n").unwrap();
        assert_eq!(read_text(&path, any).unwrap().as_deref(), Some("a\n"));
        fs::write(&path, "").unwrap();
        let error = read_text(&path, any).unwrap_err().to_string();
        assert!(error.contains("file is broken: it is empty") && error.contains("remove it"), "{error}");
        assert_eq!(names(dir.path()), ["file"], "it is left for the operator");
        let error = read_text(&path, |_| Err("bad")).unwrap_err().to_string();
        assert!(error.contains("empty"), "{error}");
        fs::write(&path, "a\n").unwrap();
        let error = read_text(&path, |_| Err("bad")).unwrap_err().to_string();
        assert!(error.contains("file is broken: bad"), "{error}");
    }

    #[test]
    fn a_directory_is_created_with_those_above_it_and_an_existing_one_is_none_of_our_business() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/c");
        create_dir(&path, 0o700).unwrap();
        create_dir(&path, 0o755).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(path.join("file"), "").unwrap();
        create_dir(&path.join("file"), 0o700).unwrap_err();
    }
}
