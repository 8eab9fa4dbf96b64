//! What is wrong with a configuration file, and where.

use std::fmt;
use std::path::PathBuf;

/// A place in a configuration file: the line, and the key as a path such as `ports[0].mtu`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Counted from 1; 0 stands for what no line of the file caused (a command-line flag, a file that cannot be read).
    pub line: usize,
    /// Path of the key; empty for the file as a whole.
    pub key: String,
}

/// A value and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed<T> {
    /// Where the file says so.
    pub place: Place,
    /// The value.
    pub value: T,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Its path.
    pub place: Place,
    /// What was found, what was expected, what to do; without the place.
    pub message: String,
}

/// A configuration file that cannot be used, with everything that is wrong with it, in the order of the file.
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
        Self { file, problems: vec![Problem { place: Place { line: 0, key: String::new() }, message }] }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{}:", self.file.display())?;
            if problem.place.line > 0 {
                write!(f, "{}:", problem.place.line)?;
            }
            if !problem.place.key.is_empty() {
                write!(f, " key `{}`:", problem.place.key)?;
            }
            write!(f, " {}", problem.message)?;
        }
        Ok(())
    }
}
