//! The client of the admin API, and its errors with advice.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::limits::MESSAGE_BYTES_MAX;
use proto::v1::admin_client::AdminClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

/// Timeout of an answer; the API answers from memory.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a request to a gateway failed, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket does not exist.
    #[error(
        "found no socket {0}; is sluiced running here? `admin.listen` of its configuration says where, give it as --server unix:PATH"
    )]
    Missing(PathBuf),
    /// Permission denied.
    #[error("may not open the socket {0}: permission denied; run sluicectl as the user of sluiced, or with sudo")]
    Permission(PathBuf),
    /// No process listens on the socket.
    #[error(
        "no process listens on {0}: sluiced ended without removing it; start sluiced (`systemctl status sluiced` says why it ended)"
    )]
    Refused(PathBuf),
    /// The socket cannot be opened for another reason.
    #[error("cannot open the socket {path}: {error}; expected the admin socket of a sluiced")]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// Another program listens there.
    #[error("what listens on {path} is no sluice admin API ({detail}); give the socket of `admin.listen` as --server unix:PATH")]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// Its answer.
        detail: String,
    },
    /// The connection broke after an answer.
    #[error("the gateway behind {path} has stopped; start sluiced and repeat this command")]
    Gone {
        /// The socket.
        path: PathBuf,
    },
    /// No answer came in time.
    #[error("the gateway behind {path} gave no answer within {} s; look at its log", ANSWER_TIMEOUT.as_secs())]
    Silent {
        /// The socket.
        path: PathBuf,
    },
    /// The gateway refused to answer.
    #[error("the gateway behind {path} answered: {message}")]
    Answer {
        /// The socket.
        path: PathBuf,
        /// Its message.
        message: String,
    },
}

impl ClientError {
    /// Translates an error status of the API at `path`, depending on whether it has `answered` before.
    pub(super) fn from_status(path: &Path, status: &Status, answered: bool) -> Self {
        let path = path.to_owned();
        // Only errors of the transport have a source; answers of a gateway are text.
        match (status.code(), status.source()) {
            (Code::DeadlineExceeded | Code::Cancelled, _) => Self::Silent { path },
            (_, Some(_)) if answered => Self::Gone { path },
            (_, Some(cause)) => Self::Foreign { path, detail: chain(cause) },
            (Code::Unimplemented, None) => Self::Foreign { path, detail: "it does not support the request".to_owned() },
            (code, None) if status.message().is_empty() => Self::Answer { path, message: code.description().to_owned() },
            (_, None) => Self::Answer { path, message: status.message().to_owned() },
        }
    }
}

/// An error with its causes: tonic's own text is "transport error".
fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| (**cause).source()).map(ToString::to_string);
    std::iter::once(error.to_string()).chain(causes).collect::<Vec<_>>().join(": ")
}

/// Connects to the admin API.
///
/// # Errors
/// If no HTTP/2 server listens there.
pub(super) async fn connect(path: &Path) -> Result<AdminClient<Channel>, ClientError> {
    // The transport hides why a socket cannot be opened, so this opens it once before.
    drop(UnixStream::connect(path).await.map_err(|error| socket_error(path, error))?);
    let foreign = |error: tonic::transport::Error| ClientError::Foreign { path: path.to_owned(), detail: chain(&error) };
    let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).map_err(foreign)?;
    let channel = endpoint.connect_timeout(ANSWER_TIMEOUT).timeout(ANSWER_TIMEOUT).connect().await.map_err(foreign)?;
    Ok(AdminClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
}

/// Connects, sends one request and returns the answer.
///
/// # Errors
/// If the server refuses the request, or does not answer.
pub(super) async fn ask<T>(
    path: &Path,
    request: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<T>, Status>,
) -> Result<T, ClientError> {
    let answer = request(connect(path).await?).await;
    answer.map(Response::into_inner).map_err(|status| ClientError::from_status(path, &status, false))
}

fn socket_error(path: &Path, error: io::Error) -> ClientError {
    let path = path.to_owned();
    match error.kind() {
        io::ErrorKind::NotFound => ClientError::Missing(path),
        io::ErrorKind::PermissionDenied => ClientError::Permission(path),
        io::ErrorKind::ConnectionRefused => ClientError::Refused(path),
        _ => ClientError::Socket { path, error },
    }
}
