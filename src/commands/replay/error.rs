//! The errors of `replay`.

use std::io;
use std::path::PathBuf;

use control::config::Invalid;
use dataplane::NoMemory;

use super::capture::CaptureError;

/// Why a replay failed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The configuration is invalid: exit code 2.
    #[error(transparent)]
    Settings(#[from] Invalid),
    /// A capture for a port that is not configured: exit code 2.
    #[error("--in {found}=...: expected one of the configured ports {}, found {found:?}", configured.join(", "))]
    UnknownPort {
        /// As given.
        found: String,
        /// The configured ports.
        configured: Vec<String>,
    },
    /// Two outputs have the same file name: exit code 2.
    #[error("port {port:?} and the Linux twin of port {twin:?} would write the same file {port}.pcap; rename one port")]
    SameFile {
        /// A port.
        port: String,
        /// A port whose twin has the same file name.
        twin: String,
    },
    /// The manifests cannot be listed: exit code 2.
    #[error("cannot read directory {}: {error}; --manifests names the directory of Service and EndpointSlice YAML", dir.display())]
    Manifests {
        /// Which.
        dir: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// There is no memory for the tables of the worker.
    #[error(transparent)]
    Memory(#[from] NoMemory),
    /// A capture file cannot be read (exit code 2) or written.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The output directory cannot be created.
    #[error("cannot create directory {}: {error}", dir.display())]
    Directory {
        /// Which.
        dir: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Standard output is closed.
    #[error("cannot write the verdicts: {0}")]
    Output(#[from] io::Error),
}

impl ReplayError {
    /// Whether the usage or the configuration is invalid (exit code 2), rather than the run having failed (exit code
    /// 1).
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        match self {
            Self::Settings(_) | Self::UnknownPort { .. } | Self::SameFile { .. } | Self::Manifests { .. } => true,
            Self::Capture(error) => error.is_of_input(),
            Self::Memory(_) | Self::Directory { .. } | Self::Output(_) => false,
        }
    }
}
