//! The client of the admin API, and its errors with advice.

mod error;
mod tls;

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use proto::limits::MESSAGE_BYTES_MAX;
use proto::v1::admin_client::AdminClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use objects::scalar;

pub use error::ClientError;
use error::{ANSWER_TIMEOUT, chain};
use tls::CertificateFiles;

/// The URL of an admin API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerUrl {
    /// `unix:PATH`.
    Unix(PathBuf),
    /// `https://HOST:PORT`, without the brackets of an IPv6 address.
    Https(String, u16),
}

/// A server to ask. Over TCP it needs our certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    /// A socket of this machine.
    Unix(PathBuf),
    /// Host and port.
    Https(String, u16, Option<CertificateFiles>),
}

impl FromStr for ServerUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected unix:PATH or https://HOST:PORT";
        if let Some(rest) = text.strip_prefix("https://") {
            let (host, port) = rest.rsplit_once(':').ok_or(EXPECTED)?;
            let port = port.parse().ok().filter(|port| *port > 0).ok_or(EXPECTED)?;
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let is_host = |host: &str| rustls::pki_types::ServerName::try_from(host).is_ok();
            return match bare {
                Some(bare) if bare.contains(':') && is_host(bare) => Ok(Self::Https(bare.to_owned(), port)),
                None if !host.contains(':') && is_host(host) => Ok(Self::Https(host.to_owned(), port)),
                _ => Err(EXPECTED.to_owned()),
            };
        }
        if text.starts_with("http://") {
            return Err("over TCP the admin API has TLS only; write https://HOST:PORT".to_owned());
        }
        if !text.starts_with("unix:") {
            return Err(EXPECTED.to_owned());
        }
        let here = std::env::current_dir().map_err(|error| format!("the current directory cannot be read: {error}"))?;
        scalar::socket(text, &here).map(Self::Unix)
    }
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
            ServerUrl::Https(host, port) => Self::Https(host.clone(), *port, files),
        }
    }

    /// The server in messages.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Unix(path) => path.display().to_string(),
            Self::Https(host, port, _) => format!("{host}:{port}"),
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
        Server::Https(host, port, files) => {
            let files = files.as_ref().ok_or(ClientError::NoCertificates)?;
            return Ok(AdminClient::new(tls::connect(host, *port, files).await?));
        }
    };
    // The transport hides why a socket cannot be opened, so this opens it once before.
    drop(UnixStream::connect(path).await.map_err(|error| socket_error(path, error))?);
    let foreign = |error: tonic::transport::Error| ClientError::Foreign { server: server.name(), detail: chain(&error) };
    let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).map_err(foreign)?;
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
