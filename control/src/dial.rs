//! How a gateway reaches a controller: over a unix socket, or over TCP with TLS.
//!
//! Invariant: nothing is sent over TCP to who is not a controller of the gateway's own group (`tls`).
//! Deliberately not here: which controller to dial, and when (`agent::config_client`).

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use crate::gateways::tls::{self, Material, TlsError};
use crate::settings::CertificateFiles;
use objects::scalar;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A controller that does not answer pings is given up within twice this, 20 s as everywhere (CONTROL section 8).
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Where a controller is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerUrl {
    /// `unix:PATH`.
    Unix(PathBuf),
    /// `https://HOST:PORT`.
    Https {
        /// A name or an address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

impl ControllerUrl {
    /// Parses one; a relative path is taken from `base`.
    ///
    /// # Errors
    /// What is expected instead, as the end of a message after "found X, ".
    pub fn parse(text: &str, base: &Path) -> Result<Self, String> {
        if text.starts_with("unix:") { scalar::socket(text, base).map(Self::Unix) } else { text.parse() }
    }
}

impl FromStr for ControllerUrl {
    type Err = String;

    /// Parses `https://HOST:PORT`: what a leader may say of itself to another machine.
    fn from_str(text: &str) -> Result<Self, String> {
        let error = || "expected https://HOST:PORT".to_owned();
        let (host, port) = text.strip_prefix("https://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(error)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(error)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_right = match bare {
            Some(bare) => matches!(bare.parse(), Ok(IpAddr::V6(_))),
            None => !host.contains(':') && ServerName::try_from(host).is_ok(),
        };
        if is_right { Ok(Self::Https { host: bare.unwrap_or(host).to_owned(), port }) } else { Err(error()) }
    }
}

impl fmt::Display for ControllerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Https { host, port } if host.contains(':') => write!(f, "https://[{host}]:{port}"),
            Self::Https { host, port } => write!(f, "https://{host}:{port}"),
        }
    }
}

/// Why a controller cannot be spoken to.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Our own certificates are no good.
    #[error(transparent)]
    Certificates(#[from] TlsError),
    /// There is a URL with TLS, and no certificates for it.
    #[error("it needs certificates; name them by `controller.tls`")]
    NoCertificates,
    /// Nobody answers, or not the right one.
    #[error("{0}")]
    Connect(String),
}

/// A channel to the controller at `url`, and our group, as far as our certificate says it.
///
/// # Errors
/// See [`DialError`].
pub async fn dial(
    url: &ControllerUrl,
    gateway: &str,
    certificates: Option<&CertificateFiles>,
) -> Result<(Channel, Option<String>), DialError> {
    let failed = |error: tonic::transport::Error| DialError::Connect(chain(&error));
    match url {
        ControllerUrl::Unix(_) => {
            let endpoint = alive(Endpoint::from_shared(url.to_string()).map_err(failed)?);
            Ok((endpoint.connect().await.map_err(failed)?, None))
        }
        ControllerUrl::Https { host, port } => {
            let files = certificates.ok_or(DialError::NoCertificates)?;
            let (config, group) = tls::client_config(&Material::read(files).await?, gateway)?;
            let (config, to) = (Arc::new(config), (host.clone(), *port));
            let connector = tower::service_fn(move |_: Uri| connect(Arc::clone(&config), to.clone()));
            // The scheme would have tonic look for TLS of its own.
            let endpoint = alive(Endpoint::from_static("http://controller"));
            Ok((endpoint.connect_with_connector(connector).await.map_err(failed)?, Some(group)))
        }
    }
}

fn alive(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
}

async fn connect(
    config: Arc<ClientConfig>,
    (host, port): (String, u16),
) -> io::Result<TokioIo<tokio_rustls::client::TlsStream<TcpStream>>> {
    let stream = TcpStream::connect((host.as_str(), port)).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::try_from(host).map_err(io::Error::other)?;
    Ok(TokioIo::new(TlsConnector::from(config).connect(name, stream).await?))
}

/// An error with its causes: tonic's own text is "transport error". Some of them repeat their cause.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string);
    let join = |text: String, cause: String| if text.ends_with(&cause) { text } else { format!("{text}: {cause}") };
    causes.fold(error.to_string(), join)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_read_back_as_they_are_written() {
        let base = Path::new("/etc/sluice");
        for text in ["unix:/run/a.sock", "https://192.0.2.1:9443", "https://[2001:db8::1]:9443", "https://controller.example:1"] {
            assert_eq!(ControllerUrl::parse(text, base).unwrap().to_string(), text);
        }
        for text in [
            "",
            "192.0.2.1:9",
            "http://a:1",
            "https://a",
            "https://a:0",
            "https://a:1/x",
            "https://2001:db8::1:9",
            "https://[a]:1",
            "unix:",
        ] {
            assert!(ControllerUrl::parse(text, base).is_err(), "{text}");
        }
        assert!("unix:/run/a.sock".parse::<ControllerUrl>().is_err(), "a path of another machine");
    }
}
