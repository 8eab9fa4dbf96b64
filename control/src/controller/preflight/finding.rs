//! One line about something that a configuration names.

use std::fmt;

/// What was found about something that a configuration names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// All is well.
    Ok,
    /// A fact to know.
    Note,
    /// It is not on this machine.
    Unseen,
    /// It works, and may not do what is expected of it.
    Warning,
    /// It cannot work.
    Fault,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// The key that names what was looked at.
    pub key: &'static str,
    /// What was found, and what to do.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Note | Level::Unseen => "note",
            Level::Warning => "warning",
            Level::Fault => "error",
        };
        write!(f, "{level}: {}: {}", self.key, self.text)
    }
}

impl Finding {
    /// A finding about a key.
    pub fn new(level: Level, key: &'static str, text: impl Into<String>) -> Self {
        Self { level, key, text: text.into() }
    }
}
