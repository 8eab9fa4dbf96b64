//! Log lines, on stderr, as key `logs` asks for them.
//!
//! `RUST_LOG` overrides the level, for a closer look without a change of the configuration. What `kube` logs about
//! failed requests is left out unless asked for: our own messages say it once per cause, with what to do.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, Logs};

/// Writes log lines from here on. A second call changes nothing.
pub fn start(logs: Logs) {
    let default = format!("{},kube_client=off,kube_runtime=off", logs.level.as_str());
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // The only failure is that somebody already writes them: a test, or an earlier call.
    let _ = match logs.format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
}
