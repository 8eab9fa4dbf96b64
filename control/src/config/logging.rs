//! Key `logs` of both programs, and the log lines on stderr that it asks for.
//!
//! `RUST_LOG` overrides the level, for a closer look without a change of the configuration. Messages of `kube` about
//! failed requests are off by default: our own messages report each cause once, with what to do.
//!
//! Where stderr is the stream to systemd's journal, each line begins with its priority, so that `journalctl -p warning`
//! shows warnings.
//!
//! Once [`write_from_thread`] was called, no thread of the program waits for whoever reads stderr: lines that find no room
//! are lost, counted, and reported.

mod queue;

use std::env;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd as _;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use proto::limits::journal;
use serde::Serialize;

use objects::text::without_os_errors;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload::Handle;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

use super::section::Section;
use queue::LineQueue;

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

/// The lines that wait to be written to stderr.
static QUEUE: LineQueue = LineQueue::new();
/// Maximum time that the end of a program waits for its last lines.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// Target of messages of panics, which no filter hides.
const PANICS: &str = "panic";

/// Whether stderr is the stream to systemd's journal.
static IS_JOURNAL: LazyLock<bool> = LazyLock::new(|| {
    let stderr = io::stderr().as_fd().try_clone_to_owned().map(File::from).and_then(|file| file.metadata());
    stderr.is_ok_and(|stderr| journal::is_stream(env::var_os(journal::STREAM_VARIABLE).as_deref(), &stderr))
});

/// Writes the lines of one event to the queue, with this priority.
#[derive(Clone, Copy, Debug)]
struct PriorityWriter(u8);

impl Write for PriorityWriter {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        push(self.0, lines);
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes the writer of each event.
#[derive(Clone, Copy, Debug)]
struct ToQueue;

impl MakeWriter<'_> for ToQueue {
    type Writer = PriorityWriter;

    fn make_writer(&self) -> PriorityWriter {
        PriorityWriter(journal::INFO)
    }

    fn make_writer_for(&self, event: &Metadata<'_>) -> PriorityWriter {
        PriorityWriter(match *event.level() {
            Level::ERROR => journal::ERROR,
            Level::WARN => journal::WARNING,
            Level::INFO => journal::INFO,
            Level::DEBUG | Level::TRACE => journal::DEBUG,
        })
    }
}

fn push(priority: u8, lines: &[u8]) {
    let text = String::from_utf8_lossy(lines);
    let lines = without_os_errors(&text);
    let lines = lines.as_bytes();
    if *IS_JOURNAL {
        QUEUE.push(&journal::with_priority(priority, lines));
    } else {
        QUEUE.push(lines);
    }
}

/// Writes log lines from a thread of their own from here on, so that nobody waits for the reader of stderr. Messages of
/// panics, too, become lines of the log. Before that, lines are written by who logs: the first thread of a program gives
/// up privileges, and must not have started another one by then. No filter hides panics.
///
/// # Errors
/// If the thread cannot be started.
pub fn write_from_thread() -> io::Result<()> {
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    QUEUE.write_from_thread(stderr, |lines| {
        tracing::warn!(lines, "log lines were lost, because stderr was not read fast enough or could not be written");
    })?;
    std::panic::set_hook(Box::new(|panic| {
        let backtrace = std::backtrace::Backtrace::capture();
        let thread = std::thread::current();
        tracing::error!(target: PANICS, "thread '{}' {panic}\n{backtrace}", thread.name().unwrap_or("<unnamed>"));
    }));
    Ok(())
}

/// Waits for the last lines at the end of the program, for a second at most.
pub fn flush() {
    QUEUE.flush(FLUSH_MAX);
}

/// Number of log lines that were lost.
#[must_use]
pub fn lost_lines() -> u64 {
    QUEUE.lost()
}

/// Writes an error to stderr in order with the lines of the log, for people, whatever the format.
pub fn print(error: &str) {
    push(journal::ERROR, format!("{error}\n").as_bytes());
}

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
    let filter = filter(logs.level, env::var(EnvFilter::DEFAULT_ENV).ok());
    let lines = tracing_subscriber::fmt::layer().with_writer(ToQueue);
    match logs.format {
        LogFormat::Text => lines.with_ansi(io::stderr().is_terminal()).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_filter(filter).boxed(),
    }
}

/// What is written at this level, unless the variable `RUST_LOG` says otherwise. Messages of panics always are.
fn filter(level: LogLevel, variable: Option<String>) -> EnvFilter {
    let of_level = || EnvFilter::new(format!("{level:?},kube_client=off,kube_runtime=off").to_lowercase());
    let filter = variable.and_then(|text| EnvFilter::try_new(text).ok()).unwrap_or_else(of_level);
    match format!("{PANICS}=error").parse() {
        Ok(panics) => filter.add_directive(panics),
        Err(_) => filter,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is written of a message at level error and of one of a panic.
    fn written(variable: Option<&str>) -> String {
        let written = Written::default();
        let writer = written.clone();
        let layer = tracing_subscriber::fmt::layer().with_writer(move || writer.clone());
        let layer = layer.with_filter(filter(LogLevel::Info, variable.map(str::to_owned)));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::error!("an error");
            tracing::error!(target: PANICS, "a panic");
        });
        let bytes = written.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn no_filter_hides_panics() {
        for variable in [None, Some("info"), Some("sluice=debug"), Some("off"), Some("panic=off"), Some("[nonsense")] {
            let written = written(variable);
            assert!(written.contains("a panic"), "{variable:?}: {written}");
            let has_error = !matches!(variable, Some("sluice=debug" | "off" | "panic=off"));
            assert_eq!(written.contains("an error"), has_error, "{variable:?}: {written}");
        }
    }
}
