//! Why a request to the admin API failed, and what to do.
//!
//! Not here: which failure of the transport means which of them (`client`, `client::tls`).

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tonic::Code;

/// Timeout of an answer; the API answers from memory.
pub(in crate::client) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request to a gateway or a controller failed, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket does not exist.
    #[error(
        "found no socket {0}; is its program (sluiced or sluice-controller) running here? `admin.listen` of its configuration names \
         the socket: give it as --server unix:PATH"
    )]
    Missing(PathBuf),
    /// Permission denied.
    #[error(
        "cannot open the socket {0}: permission denied; run sluicectl with sudo, or, as a member of group sluice, use the read-only \
         socket beside it (-view in its name, by default --server unix:/run/sluice/admin-view.sock)"
    )]
    Permission(PathBuf),
    /// No process listens on the socket.
    #[error(
        "no process listens on {0}: its program (sluiced or sluice-controller) ended without removing it; start it again (`systemctl \
         status sluiced` says why it ended)"
    )]
    Refused(PathBuf),
    /// The socket cannot be opened for another reason.
    #[error("cannot open the socket {path}: {error}; expected the admin socket of a sluiced or sluice-controller")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// Over TCP both sides show certificates.
    #[error("https:// needs certificates: give --ca, --cert and --key, or set SLUICE_CA, SLUICE_CERT and SLUICE_KEY")]
    NoCertificates,
    /// Our own certificates cannot be used.
    #[error("{0}")]
    Certificates(String),
    /// There is no connection over TCP.
    #[error("cannot ask {server}: {problem}")]
    Tls {
        /// The server.
        server: String,
        /// What happened, and what to do.
        problem: String,
    },
    /// Another program listens there.
    #[error("what listens on {server} is not the admin API of sluice ({detail}); give an address of `admin.listen` as --server")]
    Foreign {
        /// The server.
        server: String,
        /// Its answer.
        detail: String,
    },
    /// The connection broke after an answer.
    #[error("the program behind {server} has stopped; start it (sluiced or sluice-controller) and repeat this command")]
    Gone {
        /// The server.
        server: String,
    },
    /// No answer came in time.
    #[error("the program behind {server} gave no answer within {} s; look at its log", ANSWER_TIMEOUT.as_secs())]
    Silent {
        /// The server.
        server: String,
    },
    /// The server refused to answer.
    #[error("{server} answered: {message}")]
    Answer {
        /// The server.
        server: String,
        /// Why, as gRPC says it.
        code: Code,
        /// Its message.
        message: String,
    },
}

impl ClientError {
    /// Whether an option, or what the server was asked for, is wrong.
    pub(crate) const fn is_usage(&self) -> bool {
        matches!(self, Self::NoCertificates | Self::Certificates(_) | Self::Answer { code: Code::InvalidArgument, .. })
    }

    /// Whether the same request fails again, whatever the server does meanwhile.
    pub(crate) const fn is_final(&self) -> bool {
        self.is_usage() || matches!(self, Self::Answer { code: Code::NotFound | Code::PermissionDenied, .. })
    }
}

/// An error with its causes: tonic's own text is "transport error".
pub(in crate::client) fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| (**cause).source()).map(ToString::to_string);
    std::iter::once(error.to_string()).chain(causes).collect::<Vec<_>>().join(": ")
}
