//! TLS of probes: any certificate, or valid ones of authorities that this machine trusts.
//!
//! The machine's certificates are those of its certificate store, or of SSL_CERT_FILE and SSL_CERT_DIR. Sessions are not
//! resumed, because a resumed one shows no certificate, and an expired one would pass. Nor would it save much: three
//! fifths of the instructions of a probe are the key exchange, which TLS 1.3 repeats when it resumes.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WantsClientCert};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ConfigBuilder, DigitallySignedStruct, RootCertStore, SignatureScheme, WantsVerifier};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{Outcome, Trust};

/// How long the machine's certificates are used before they are read again: an authority that an operator adds counts
/// within a minute, at 10 ms of a core.
const TRUSTED_FOR: Duration = Duration::from_secs(60);

/// A configuration and when it was made, or why it could not be.
type Trusted = Option<(Instant, Result<Arc<ClientConfig>, String>)>;

/// The TLS clients of probes.
#[derive(Debug)]
pub(super) struct TlsClients {
    any: Result<Arc<ClientConfig>, String>,
    machine: Mutex<Trusted>,
}

impl Default for TlsClients {
    fn default() -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Arc::new(AnyCertificate(Arc::clone(&provider)));
        let any = builder(provider).map(|builder| finish(builder.dangerous().with_custom_certificate_verifier(verifier)));
        Self { any, machine: Mutex::default() }
    }
}

impl TlsClients {
    /// Makes a TLS connection over `stream`. The certificate must be for `host`, which may have a port, or for `ip`.
    /// Returns the outcome of the probe if that fails.
    pub(super) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        trust: Trust,
        host: Option<&str>,
        ip: IpAddr,
    ) -> Result<TlsStream<S>, Outcome> {
        let config = match trust {
            Trust::Any => self.any.clone(),
            Trust::Machine => self.machine().await,
        };
        let connector = TlsConnector::from(config.map_err(Outcome::NotAsked)?);
        let connected = connector.connect(server_name(host, ip), stream).await;
        connected.map_err(|error| Outcome::Failed(format!("failed the TLS handshake: {error}")))
    }

    async fn machine(&self) -> Result<Arc<ClientConfig>, String> {
        let mut machine = self.machine.lock().await;
        if let Some((_, config)) = machine.as_ref().filter(|(at, _)| at.elapsed() < TRUSTED_FOR) {
            return config.clone();
        }
        let config = tokio::task::spawn_blocking(trusted).await.unwrap_or_else(|error| Err(error.to_string()));
        *machine = Some((Instant::now(), config.clone()));
        config
    }
}

/// A client that trusts the authorities of this machine.
fn trusted() -> Result<Arc<ClientConfig>, String> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(format!(
            "this machine trusts no authority (/etc/ssl/certs, SSL_CERT_FILE, SSL_CERT_DIR), install ca-certificates{why}"
        ));
    }
    let builder = builder(Arc::new(rustls::crypto::ring::default_provider()))?;
    Ok(finish(builder.with_root_certificates(roots)))
}

fn builder(provider: Arc<CryptoProvider>) -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, String> {
    ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(|error| error.to_string())
}

fn finish(builder: ConfigBuilder<ClientConfig, WantsClientCert>) -> Arc<ClientConfig> {
    let mut config = builder.with_no_client_auth();
    config.resumption = Resumption::disabled();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Arc::new(config)
}

/// The name in the certificate.
fn server_name(host: Option<&str>, ip: IpAddr) -> ServerName<'static> {
    let without_port = |host: &str| match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() && (!name.contains(':') || name.ends_with(']')) => name.to_owned(),
        _ => host.to_owned(),
    };
    let name = host.map(|host| without_port(host).trim_matches(['[', ']']).to_owned());
    name.and_then(|name| ServerName::try_from(name).ok()).unwrap_or_else(|| ServerName::IpAddress(ip.into()))
}

/// Accepts every certificate. Such a probe asks whether the backend answers, not who it is: kubelet does the same.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair, date_time_ymd};
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use tokio_rustls::TlsAcceptor;

    use super::super::prober::tests::failure;
    use super::*;

    /// A certificate for shop.example, valid until the end of this year, and a client that trusts it.
    fn certificate(until: i32) -> (Arc<ServerConfig>, TlsClients) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["shop.example".to_owned()]).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(2000, 1, 1), date_time_ymd(until, 12, 31));
        let certificate = params.self_signed(&key).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions().unwrap();
        let server = server.with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let trusted = finish(builder(provider).unwrap().with_root_certificates(roots));
        let machine = Mutex::new(Some((Instant::now(), Ok(trusted))));
        (Arc::new(server), TlsClients { machine, ..TlsClients::default() })
    }

    async fn handshake(until: i32, trust: Trust, host: Option<&str>) -> Result<(), Outcome> {
        let (server, clients) = certificate(until);
        let (near, far) = tokio::io::duplex(64 * 1024);
        let accepted = TlsAcceptor::from(server).accept(far);
        let connected = clients.connect(near, trust, host, "10.0.0.1".parse().unwrap());
        tokio::join!(async { drop(accepted.await) }, connected).1.map(drop)
    }

    #[tokio::test]
    async fn a_certificate_counts_only_where_it_is_verified() {
        for (until, host) in [(2001, None), (2001, Some("shop.example")), (2900, Some("other.example"))] {
            assert_eq!(handshake(until, Trust::Any, host).await, Ok(()), "{until} {host:?}");
        }
        assert_eq!(handshake(2900, Trust::Machine, Some("shop.example:8443")).await, Ok(()));
        for (until, host, why) in [
            (2001, Some("shop.example"), "expired"),
            (2900, Some("other.example"), "not valid for name"),
            (2900, None, "not valid for name"),
        ] {
            let why_not = failure(handshake(until, Trust::Machine, host).await.unwrap_err());
            assert!(why_not.starts_with("failed the TLS handshake: ") && why_not.contains(why), "{why_not}");
        }
    }

    #[test]
    fn the_name_in_the_certificate_is_the_host_without_its_port_or_the_address() {
        let ip: IpAddr = "10.0.0.1".parse().unwrap();
        for (host, expected) in [
            (Some("shop.example"), "shop.example"),
            (Some("shop.example:8443"), "shop.example"),
            (Some("10.0.0.9:8443"), "10.0.0.9"),
            (Some("[fd00::1]:8443"), "fd00::1"),
            (Some("fd00::1"), "fd00::1"),
            (Some("_"), "_"),
            (Some("a b"), "10.0.0.1"),
            (None, "10.0.0.1"),
        ] {
            assert_eq!(server_name(host, ip).to_str(), expected, "{host:?}");
        }
    }
}
