//! Connections to a controller, over a unix socket or over TCP with TLS.
//!
//! Invariant: over TCP nothing is sent to a peer that is not a controller of the gateway's own group.
//! Deliberately not here: which controller to dial, and when (`controller_client`).

use std::io;
use std::sync::Arc;
use std::time::Duration;

use control::config::settings::CertificateFiles;
use control::gateways::listener::chain;
use control::gateways::tls::{self, Material, TlsError};
use http::Uri;
use hyper_util::rt::TokioIo;
use objects::scalar::url::{HostPort, ServerUrl};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of keep-alive pings. A dead connection is noticed within twice this time, 20 s (CONTROL section 8).
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Why a connection to a controller failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    /// Our own certificates are unusable.
    #[error(transparent)]
    Certificates(#[from] TlsError),
    /// The URL needs TLS, but no certificates are configured.
    #[error("it needs certificates; name them by `controller.tls`")]
    NoCertificates,
    /// No answer, or the peer is not a controller of our group.
    #[error("{0}")]
    Connect(String),
}

/// A channel to the controller at `url`, and our group if our certificate has it.
///
/// # Errors
/// See [`DialError`].
pub(super) async fn dial(
    url: &ServerUrl,
    gateway: &str,
    certificates: Option<&CertificateFiles>,
) -> Result<(Channel, Option<String>), DialError> {
    let failed = |error: tonic::transport::Error| DialError::Connect(chain(&error));
    match url {
        ServerUrl::Unix(_) => {
            let endpoint = with_keep_alive(Endpoint::from_shared(url.to_string()).map_err(failed)?);
            Ok((endpoint.connect().await.map_err(failed)?, None))
        }
        ServerUrl::Https(server) => {
            let files = certificates.ok_or(DialError::NoCertificates)?;
            let (config, group) = tls::client_config(&Material::read(files).await?, gateway)?;
            let (config, to) = (Arc::new(config), server.clone());
            let connector = tower::service_fn(move |_: Uri| connect(Arc::clone(&config), to.clone()));
            // With the scheme https tonic would set up its own TLS.
            let endpoint = with_keep_alive(Endpoint::from_static("http://controller"));
            Ok((endpoint.connect_with_connector(connector).await.map_err(failed)?, Some(group)))
        }
    }
}

fn with_keep_alive(endpoint: Endpoint) -> Endpoint {
    endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
}

async fn connect(config: Arc<ClientConfig>, server: HostPort) -> io::Result<TokioIo<tokio_rustls::client::TlsStream<TcpStream>>> {
    let stream = TcpStream::connect((server.host(), server.port())).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::try_from(server.host().to_owned()).map_err(io::Error::other)?;
    Ok(TokioIo::new(TlsConnector::from(config).connect(name, stream).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_controller_over_tcp_is_not_dialled_without_certificates() {
        let url = ServerUrl::Https(HostPort::new("127.0.0.1", 1).unwrap());
        assert!(matches!(dial(&url, "edge-1", None).await, Err(DialError::NoCertificates)));
    }
}
