//! Errors of `sluicectl`, each with its exit code.

use std::io;
use std::path::PathBuf;

use crate::client::ClientError;
use crate::convert::ConvertError;
use crate::filter::InvalidFilter;
use crate::routing::RoutingError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The request failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The input of a conversion is invalid.
    #[error(transparent)]
    Convert(#[from] ConvertError),
    /// A configuration of a routing daemon cannot be written for this gateway.
    #[error(transparent)]
    Routing(#[from] RoutingError),
    /// The filter of a capture is invalid.
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
    /// The man pages cannot be written to a directory.
    #[error("cannot write the man pages to {}: {error}; create the directory", directory.display())]
    ManPages {
        /// The directory.
        directory: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file cannot be read.
    #[error("cannot read {0}: {1}")]
    Input(String, io::Error),
    /// Some gateways did not answer; the answers of the others were printed.
    #[error("{0}")]
    Silent(String),
    /// Nothing is known of an object.
    #[error("no Service and no backend {object:?}{known}; `sluicectl backends` lists them")]
    NoHistory {
        /// The object.
        object: String,
        /// The names that there are, or nothing.
        known: String,
    },
    /// Not all is well; the screen says what.
    #[error("not well: {0}")]
    Unwell(String),
    /// A drain is not complete.
    #[error("time is over for {target}: {what}; `sluicectl overrides` shows how many")]
    FlowsLeft {
        /// What is drained.
        target: String,
        /// What is left.
        what: String,
    },
    /// Flows were counted and not ended.
    #[error("no flow was ended; --yes ends those that match then")]
    NotConfirmed,
    /// Someone has removed a drain that is waited for.
    #[error("{0} is no longer drained: someone has removed the drain")]
    Undrained(String),
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

impl CtlError {
    /// 2 for bad usage or input, 1 for a command that failed.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Routing(RoutingError::NoState(_) | RoutingError::Lags { .. }) => 1,
            Self::Convert(_) | Self::Routing(_) | Self::Filter(_) | Self::Input(..) => 2,
            Self::Client(error) if error.is_usage() => 2,
            _ => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn wrong_options_and_values_end_with_2_and_failures_with_1() {
        let answer = |code| ClientError::Answer { server: "a".to_owned(), code, message: "b".to_owned() };
        let rows = [
            (ClientError::NoCertificates, 2),
            (ClientError::Certificates("ca.pem: no such file".to_owned()), 2),
            (answer(Code::InvalidArgument), 2),
            (answer(Code::NotFound), 1),
            (answer(Code::PermissionDenied), 1),
            (answer(Code::Unavailable), 1),
            (answer(Code::FailedPrecondition), 1),
            (ClientError::Missing("/a.sock".into()), 1),
        ];
        let finals: Vec<_> = rows.iter().map(|(error, _)| error.is_final()).collect();
        assert_eq!(finals, [true, true, true, true, true, false, false, false]);
        for (error, code) in rows {
            let error = CtlError::from(error);
            assert_eq!(error.exit_code(), code, "{error}");
        }
        assert_eq!(CtlError::from(RoutingError::NoState("edge-1".to_owned())).exit_code(), 1);
        assert_eq!(CtlError::from(RoutingError::NoRouterId).exit_code(), 2);
    }
}
