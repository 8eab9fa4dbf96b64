//! Key `logs` of both programs.

use serde::Serialize;

use super::section::Section;

/// How log lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// A table for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// The least severe level that is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the names say it")]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// Its name, as configuration and `tracing`'s filters write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// What is logged, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Logs {
    /// Key `logs.format`.
    pub format: LogFormat,
    /// Key `logs.level`.
    pub level: LogLevel,
}

impl Logs {
    /// Reads key `logs`.
    pub fn take(top: &mut Section<'_>) -> Self {
        let mut section = top.section("logs");
        let levels = [LogLevel::Error, LogLevel::Warn, LogLevel::Info, LogLevel::Debug, LogLevel::Trace];
        let logs = Self {
            format: section.one_of("format", &[LogFormat::Text, LogFormat::Json], LogFormat::default()),
            level: section.one_of("level", &levels, LogLevel::default()),
        };
        section.finish();
        logs
    }
}
