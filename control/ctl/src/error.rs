//! Errors of `sluicectl`, each with its exit code.

use std::io;
use std::path::PathBuf;

use crate::client::ClientError;
use crate::convert::ConvertError;
use crate::filter::InvalidFilter;
use crate::routing::RoutingError;

/// Why a command failed; exit code 1 unless stated otherwise.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The request failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The input of a conversion is invalid: exit code 2.
    #[error(transparent)]
    Convert(#[from] ConvertError),
    /// A configuration of a routing daemon cannot be written for this gateway: exit code 2.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The filter of a capture is invalid: exit code 2.
    #[error(transparent)]
    Filter(#[from] InvalidFilter),
    /// A capture would be printed.
    #[error(
        "a capture is no text: give a file as -w FILE, or pipe it, for example into `tshark -r -`; `sluicectl trace` prints packets"
    )]
    Terminal,
    /// A file cannot be written.
    #[error("cannot write {file}: {error}", file = file.display())]
    Written {
        /// The file.
        file: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file cannot be read.
    #[error("cannot read {0}: {1}")]
    Input(String, io::Error),
    /// Some gateways did not answer; the answers of the others were printed.
    #[error("{0}")]
    Silent(String),
    /// `top` cannot draw there.
    #[error(
        "top needs a terminal as its output, and TERM with its kind; for a file or a program: sluicectl services --watch -o json"
    )]
    NoTerminal,
    /// The output could not be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
    /// The answer could not be written in this format.
    #[error("cannot write the answer: {0}")]
    Format(String),
}
