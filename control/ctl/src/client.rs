//! The client of the admin API, and its errors with advice.

mod error;
mod tls;

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use proto::limits::MESSAGE_BYTES_MAX;
use proto::v1::admin_client::AdminClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use objects::scalar::url::{HostPort, ServerUrl};

pub use error::ClientError;
use error::{ANSWER_TIMEOUT, chain};
use tls::CertificateFiles;

/// A server to ask. Over TCP it needs our certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    /// A socket of this machine.
    Unix(PathBuf),
    /// TCP with TLS.
    Https(HostPort, Option<CertificateFiles>),
}

impl Server {
    /// The server of a URL, with the certificates if all three files are given.
    pub(crate) fn new(url: &ServerUrl, ca: Option<&PathBuf>, cert: Option<&PathBuf>, key: Option<&PathBuf>) -> Self {
        let files = match (ca, cert, key) {
            (Some(ca), Some(cert), Some(key)) => Some(CertificateFiles { ca: ca.clone(), cert: cert.clone(), key: key.clone() }),
            _ => None,
        };
        match url {
            ServerUrl::Unix(path) => Self::Unix(path.clone()),
            ServerUrl::Https(server) => Self::Https(server.clone(), files),
        }
    }

    /// The server in messages.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Unix(path) => path.display().to_string(),
            Self::Https(server, _) => server.to_string(),
        }
    }
}

impl ClientError {
    /// Translates an error status of the API of `server`, depending on whether it has `answered` before.
    pub(super) fn from_status(server: &Server, status: &Status, answered: bool) -> Self {
        let server = server.name();
        // Only errors of the transport have a source; answers of a gateway are text.
        match (status.code(), status.source()) {
            (Code::DeadlineExceeded | Code::Cancelled, _) => Self::Silent { server },
            (_, Some(_)) if answered => Self::Gone { server },
            (_, Some(cause)) => Self::Foreign { server, detail: chain(cause) },
            (Code::Unimplemented, None) => Self::Foreign { server, detail: "it does not support the request".to_owned() },
            (code, None) => {
                let message = if status.message().is_empty() { code.description() } else { status.message() };
                Self::Answer { server, code, message: message.to_owned() }
            }
        }
    }
}

/// Connects to the admin API.
///
/// # Errors
/// If no HTTP/2 server listens there, or a certificate is refused.
pub(super) async fn connect(server: &Server) -> Result<AdminClient<Channel>, ClientError> {
    let path = match server {
        Server::Unix(path) => path,
        Server::Https(server, files) => {
            let files = files.as_ref().ok_or(ClientError::NoCertificates)?;
            return Ok(AdminClient::new(tls::connect(server, files).await?));
        }
    };
    // The transport hides why a socket cannot be opened, so this opens it once before.
    drop(UnixStream::connect(path).await.map_err(|error| socket_error(path, error))?);
    let foreign = |error: tonic::transport::Error| ClientError::Foreign { server: server.name(), detail: chain(&error) };
    let endpoint = Endpoint::from_shared(ServerUrl::Unix(path.clone()).to_string()).map_err(foreign)?;
    let channel = endpoint.connect_timeout(ANSWER_TIMEOUT).timeout(ANSWER_TIMEOUT).connect().await.map_err(foreign)?;
    Ok(AdminClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
}

/// Connects, sends one request and returns the answer.
///
/// # Errors
/// If the server refuses the request, or does not answer.
pub(super) async fn ask<T>(
    server: &Server,
    request: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<T>, Status>,
) -> Result<T, ClientError> {
    let answer = request(connect(server).await?).await;
    answer.map(Response::into_inner).map_err(|status| ClientError::from_status(server, &status, false))
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
