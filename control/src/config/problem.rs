//! The problems of a configuration file with their locations.

use std::fmt;
use std::path::PathBuf;

/// A location in a configuration file: the line, and the key as a path such as `ports[0].mtu`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// Counted from 1; 0 for problems without a line (a command-line flag, a file that cannot be read).
    pub line: usize,
    /// Path of the key; empty for the file as a whole.
    pub key: String,
}

/// A value with its location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located<T> {
    /// Its line and key.
    pub location: Location,
    /// The value.
    pub value: T,
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Line and key.
    pub location: Location,
    /// What was found, what was expected and what to do; without the location.
    pub message: String,
}

/// An invalid configuration file with all its problems, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Invalid {
    /// The file.
    pub file: PathBuf,
    /// At least one.
    pub problems: Vec<Problem>,
}

impl Invalid {
    /// An error about the file as a whole.
    #[must_use]
    pub fn whole(file: PathBuf, message: String) -> Self {
        Self { file, problems: vec![Problem { location: Location { line: 0, key: String::new() }, message }] }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{}:", self.file.display())?;
            if problem.location.line > 0 {
                write!(f, "{}:", problem.location.line)?;
            }
            if !problem.location.key.is_empty() {
                write!(f, " key `{}`:", problem.location.key)?;
            }
            write!(f, " {}", problem.message)?;
        }
        Ok(())
    }
}
