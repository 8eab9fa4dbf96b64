//! The admin API over TCP with TLS 1.3: our certificates, and why a connection fails.
//!
//! Invariant: the server's certificate is verified with its name before anything is sent, and no key is used that every
//! user of the machine may read. Deliberately not here: the rights of a certificate, which the server decides.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::Uri;
use hyper_util::rt::TokioIo;
use objects::scalar::url::HostPort;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{AlertDescription, CertificateError, ClientConfig, Error, RootCertStore, version};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};

use super::error::{ANSWER_TIMEOUT, ClientError, chain};

/// ALPN name of HTTP/2.
const ALPN: &[u8] = b"h2";

/// PEM files of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CertificateFiles {
    /// The authority that must have issued the server's certificate.
    pub(crate) ca: PathBuf,
    /// The operator's certificate.
    pub(crate) cert: PathBuf,
    /// Its private key.
    pub(crate) key: PathBuf,
}

/// Connects to the admin API on a TCP address.
///
/// # Errors
/// If our certificates cannot be used, nobody answers there, or one side refuses the certificate of the other.
pub(super) async fn connect(to: &HostPort, files: &CertificateFiles) -> Result<Channel, ClientError> {
    let server = || to.to_string();
    let config = Arc::new(config(files).map_err(ClientError::Certificates)?);
    // The transport hides why a connection fails, so this makes one before.
    let failed = |error: io::Error| ClientError::Tls { server: server(), problem: problem(&error, to.host(), files) };
    let attempt = async {
        let mut stream = open(Arc::clone(&config), to).await?;
        // A server that refuses our certificate says so after the handshake; another one sends its settings.
        stream.read_u8().await
    };
    let silent = |_| ClientError::Silent { server: server() };
    timeout(ANSWER_TIMEOUT, attempt).await.map_err(silent)?.map_err(failed)?;
    let dialled = to.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let (config, to) = (Arc::clone(&config), dialled.clone());
        async move { open(config, &to).await.map(TokioIo::new) }
    });
    // With the scheme https tonic would set up its own TLS.
    let endpoint = Endpoint::from_static("http://admin").connect_timeout(ANSWER_TIMEOUT).timeout(ANSWER_TIMEOUT);
    let foreign = |error: tonic::transport::Error| ClientError::Foreign { server: server(), detail: chain(&error) };
    endpoint.connect_with_connector(connector).await.map_err(foreign)
}

async fn open(config: Arc<ClientConfig>, to: &HostPort) -> io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(to.host().to_owned()).map_err(io::Error::other)?;
    let stream = TcpStream::connect((to.host(), to.port())).await?;
    stream.set_nodelay(true)?;
    TlsConnector::from(config).connect(name, stream).await
}

/// TLS settings with these files. The error says which file is wrong, and what to do.
fn config(files: &CertificateFiles) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&files.ca)? {
        roots.add(certificate).map_err(|error| format!("{}: {error}; expected an authority", files.ca.display()))?;
    }
    let (roots, chain) = (Arc::new(roots), certificates(&files.cert)?);
    let key = key(&files.key)?;
    let unusable = |error: Error| {
        format!(
            "{}: the certificate would be refused: {error}; renew it, with the authority of --ca and its own key",
            files.cert.display()
        )
    };
    // The same check as in servers, whose answer says less.
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider)).build();
    let verifier = verifier.map_err(|error| format!("{}: {error}", files.ca.display()))?;
    verifier.verify_client_cert(&chain[0], &chain[1..], UnixTime::now()).map_err(unusable)?;
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&version::TLS13]).map_err(unusable)?;
    let mut config = builder.with_root_certificates(roots).with_client_auth_cert(chain, key).map_err(unusable)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(file).map_err(|error| format!("{}: {error}; expected a PEM file that you may read", file.display()))
}

/// At least one.
fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(file)?).collect();
    let found = match all {
        Ok(all) if !all.is_empty() => return Ok(all),
        Ok(_) => "no certificate".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(format!("{}: found {found}; expected one or more certificates as PEM", file.display()))
}

fn key(file: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let pem = read(file)?;
    let mode = std::fs::metadata(file).map_or(0, |metadata| metadata.permissions().mode() & 0o777);
    if mode & 0o006 != 0 {
        let advice = format!("every user of this machine may use it; chmod 600 {}", file.display());
        return Err(format!("{}: the key has mode {mode:04o}: {advice}", file.display()));
    }
    PrivateKeyDer::from_pem_slice(&pem).map_err(|error| format!("{}: {error}; expected a private key as PEM", file.display()))
}

/// Why a connection failed, and what to do.
fn problem(error: &io::Error, host: &str, files: &CertificateFiles) -> String {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match (tls, error.kind()) {
        (Some(Error::InvalidCertificate(reason)), _) => match reason {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
                "its certificate is not of the authority in {}; give the authority that issued it as --ca",
                files.ca.display()
            ),
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                format!("its certificate is not for {host} ({reason}); ask it by a name or address of its subjectAltName")
            }
            reason => format!("its certificate is not valid ({reason}); renew it there"),
        },
        (Some(Error::AlertReceived(alert)), _) => match alert {
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                "it refused our certificate: its `admin.tls.ca` holds another authority".to_owned()
            }
            alert => format!("it refused our certificate ({alert:?}); its log says why"),
        },
        (Some(Error::InvalidMessage(_)), _) => {
            "what listens there speaks no TLS; give the TCP address of `admin.listen`".to_owned()
        }
        (_, io::ErrorKind::ConnectionRefused) => {
            "no process listens there; does `admin.listen` of its configuration have this TCP address?".to_owned()
        }
        (_, io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {
            "it closed the connection; if it is a sluice, its log says why (`the certificates are unusable`)".to_owned()
        }
        _ => error.to_string(),
    }
}
