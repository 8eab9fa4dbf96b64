//! The lines that `prepare` prints.

use std::fmt;

/// What was found or done about one need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PrepareStep {
    /// It was as it must be.
    Kept(String),
    /// It was changed.
    Done(String),
    /// It could not be changed: why, and what to do.
    Failed(String),
}

impl fmt::Display for PrepareStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kept(text) => write!(f, "ok       {text}"),
            Self::Done(text) => write!(f, "done     {text}"),
            Self::Failed(text) => write!(f, "failed   {text}"),
        }
    }
}
