//! Key `logs` of both programs, and the log lines on stderr that it asks for.
//!
//! `RUST_LOG` overrides the level, for a closer look without a change of the configuration. Messages of `kube` about
//! failed requests are off by default: our own messages report each cause once, with what to do.

use std::io::IsTerminal;

use serde::Serialize;
use tracing_subscriber::EnvFilter;

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

/// Writes log lines from here on. A second call changes nothing.
pub fn start(logs: Logs) {
    let default = format!("{:?},kube_client=off,kube_runtime=off", logs.level).to_lowercase();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // It fails only if a subscriber is already installed, by a test or an earlier call.
    let _ = match logs.format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
}
