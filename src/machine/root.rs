//! The files of a machine below a directory. Unreadable files count as absent.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use control::store::files::{self, Survives};

/// The directory with the machine's `/sys`, `/proc`, `/dev` and `/usr`.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// A machine below a directory; `/` is this one.
    #[must_use]
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.0
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// A file's text without the newline at its end.
    pub(crate) fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok().map(|text| text.trim_end().to_owned())
    }

    pub(crate) fn number<N: std::str::FromStr>(&self, path: &str) -> Option<N> {
        self.text(path)?.trim().parse().ok()
    }

    /// Writes a file that exists, as the kernel's files do.
    pub(crate) fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let file = self.path(path);
        let name = |error| io::Error::new(io::Error::kind(&error), format!("{}: {error}", file.display()));
        let mut opened = fs::OpenOptions::new().write(true).open(&file).map_err(name)?;
        let _ = opened.set_len(0); // a regular file, in tests: files of sysfs have no length
        opened.write_all(text.as_bytes()).map_err(name)
    }

    /// Replaces a file of ours, which survives a power cut, and creates its directory.
    pub(crate) fn replace(&self, path: &str, text: &str) -> io::Result<()> {
        let file = self.path(path);
        file.parent().map_or(Ok(()), |directory| files::create_dir(directory, 0o700))?;
        files::replace(&file, files::PRIVATE, Survives::PowerCut, [text.as_bytes()])
    }

    /// A file in the kernel's list format: `0-3,8`.
    pub(crate) fn list(&self, path: &str) -> Vec<usize> {
        self.text(path).map(|text| parse_list(&text)).unwrap_or_default()
    }

    /// Names in a directory, sorted.
    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The last path component of the target of a symbolic link.
    pub(crate) fn link(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Path::file_name(&target).and_then(|name| name.to_str()).map(str::to_owned)
    }
}

/// Parses the kernel's list format; invalid parts are skipped.
fn parse_list(text: &str) -> Vec<usize> {
    let parts = text.trim().split(',').filter_map(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    });
    parts.flatten().collect()
}

/// Formats the kernel's list format, or `none`.
pub(crate) fn show_list(numbers: &[usize]) -> String {
    if numbers.is_empty() {
        return "none".into();
    }
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let texts: Vec<String> = runs
        .map(|run| match run {
            [only] => only.to_string(),
            [first, .., last] => format!("{first}-{last}"),
            [] => String::new(),
        })
        .collect();
    texts.join(",")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A machine made of files in a temporary directory.
    pub(crate) struct Machine(tempfile::TempDir);

    impl Machine {
        /// Of (path, contents); contents that begin with `-> ` make a symbolic link.
        pub(crate) fn new(files: &[(&str, &str)]) -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            for (path, contents) in files {
                let path = machine.root().path(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                match contents.strip_prefix("-> ") {
                    Some(target) => std::os::unix::fs::symlink(target, path).unwrap(),
                    None => fs::write(path, contents).unwrap(),
                }
            }
            machine
        }

        pub(crate) fn root(&self) -> Root {
            Root::new(self.0.path())
        }
    }

    #[test]
    fn lists_read_as_the_kernel_writes_them() {
        for (text, numbers) in [("0-3,8", vec![0, 1, 2, 3, 8]), ("", vec![]), ("5", vec![5]), ("(null)", vec![])] {
            assert_eq!(parse_list(text), numbers, "{text}");
        }
        assert_eq!(show_list(&[0, 1, 2, 3, 8]), "0-3,8");
        assert_eq!(show_list(&[]), "none");
    }
}
