//! Key `logs` of both programs, and the log lines on stderr that it asks for.
//!
//! `RUST_LOG` overrides the level, for a closer look without a change of the configuration. Messages of `kube` about
//! failed requests are off by default: our own messages report each cause once, with what to do.

use std::io::IsTerminal;

use serde::Serialize;
use std::sync::OnceLock;

use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload::Handle;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

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

/// Writes lines in one of the formats, of one level.
type Lines = Box<dyn Layer<Registry> + Send + Sync>;

/// The lines of this process, which [`change`] changes.
static LINES: OnceLock<Handle<Lines, Registry>> = OnceLock::new();

/// Writes log lines from here on. A second call changes nothing.
pub fn start(logs: Logs) {
    let (lines, handle) = reload::Layer::new(lines(logs));
    // It fails only if a subscriber is already installed, by a test or an earlier call.
    if tracing_subscriber::registry().with(lines).try_init().is_ok() {
        let _ = LINES.set(handle);
    }
}

/// Writes log lines by other settings from here on, if they are written at all.
pub fn change(logs: Logs) {
    if let Some(handle) = LINES.get() {
        // It fails only while the process ends.
        let _ = handle.reload(lines(logs));
    }
}

fn lines(logs: Logs) -> Lines {
    let default = format!("{:?},kube_client=off,kube_runtime=off", logs.level).to_lowercase();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match logs.format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
    }
}
