//! TLS of probes: any certificate, or valid ones of authorities that this machine trusts.
//!
//! The machine's certificates are those of its certificate store, or of SSL_CERT_FILE and SSL_CERT_DIR. Sessions are not
//! resumed, because a resumed one shows no certificate, and an expired one would pass. Nor would it save much: three
//! fifths of the instructions of a probe are the key exchange, which TLS 1.3 repeats when it resumes.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WantsClientCert, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{ActiveKeyExchange, CryptoProvider, SupportedKxGroup};
use rustls::ffdhe_groups::FfdheGroup;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ConfigBuilder, DigitallySignedStruct, Error, NamedGroup, ProtocolVersion,
    RootCertStore, SignatureScheme, WantsVerifier,
};
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
    /// The same, naming one more group ([`NamedGroupOnly`]).
    any_of_more_groups: Result<Arc<ClientConfig>, String>,
    machine: Mutex<Trusted>,
}

impl Default for TlsClients {
    fn default() -> Self {
        let any = |provider| {
            let verifier = Arc::new(AnyCertificate);
            builder(Arc::new(provider)).map(|builder| finish(builder.dangerous().with_custom_certificate_verifier(verifier)))
        };
        let mut more = rustls::crypto::ring::default_provider();
        more.kx_groups.push(&NamedGroupOnly);
        Self { any: any(rustls::crypto::ring::default_provider()), any_of_more_groups: any(more), machine: Mutex::default() }
    }
}

/// A handshake that failed.
pub(super) struct TlsFailure {
    /// The outcome of the probe.
    pub(super) outcome: Outcome,
    /// Whether [`TlsClients::connect_naming_more_groups`] may succeed.
    pub(super) may_succeed_otherwise: bool,
}

impl TlsClients {
    /// Makes a TLS connection over `stream`. The certificate must be for `host`, which may have a port, or for `ip`.
    pub(super) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        trust: Trust,
        host: Option<&str>,
        ip: IpAddr,
    ) -> Result<TlsStream<S>, TlsFailure> {
        let config = match trust {
            Trust::Any => self.any.clone(),
            Trust::Machine => self.machine().await,
        };
        let connected = shake_hands(config, stream, host, ip).await;
        connected.map_err(|failure| TlsFailure {
            may_succeed_otherwise: failure.may_succeed_otherwise && trust == Trust::Any,
            ..failure
        })
    }

    /// As [`TlsClients::connect`] with any certificate, after a server that found nothing in common.
    pub(super) async fn connect_naming_more_groups<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        host: Option<&str>,
        ip: IpAddr,
    ) -> Result<TlsStream<S>, TlsFailure> {
        shake_hands(self.any_of_more_groups.clone(), stream, host, ip).await
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

async fn shake_hands<S: AsyncRead + AsyncWrite + Unpin>(
    config: Result<Arc<ClientConfig>, String>,
    stream: S,
    host: Option<&str>,
    ip: IpAddr,
) -> Result<TlsStream<S>, TlsFailure> {
    let config = config.map_err(|why| TlsFailure { outcome: Outcome::NotAsked(why), may_succeed_otherwise: false })?;
    let connected = TlsConnector::from(config).connect(server_name(host, ip), stream).await;
    connected.map_err(|error| {
        let alert = innermost(&error).downcast_ref::<Error>();
        let may_succeed_otherwise = matches!(alert, Some(Error::AlertReceived(AlertDescription::HandshakeFailure)));
        let outcome = Outcome::Failed(format!("failed the TLS handshake: {}", cause_of(&error)));
        TlsFailure { outcome, may_succeed_otherwise }
    })
}

/// P-521 as a name alone: OpenSSL shows a certificate with such a key by TLS 1.2 only to a client that names the group,
/// and then exchanges keys by another one that the client prefers. A server that wants to exchange keys by P-521 itself
/// is one that no probe can talk to, so this is for a second attempt.
#[derive(Debug)]
struct NamedGroupOnly;

impl SupportedKxGroup for NamedGroupOnly {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        Err(Error::General("a key exchange by P-521, which probes cannot make".to_owned()))
    }

    fn ffdhe_group(&self) -> Option<FfdheGroup<'static>> {
        None
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::secp521r1
    }

    fn usable_for_version(&self, version: ProtocolVersion) -> bool {
        version == ProtocolVersion::TLSv1_2
    }
}

/// A client that trusts the authorities of this machine.
fn trusted() -> Result<Arc<ClientConfig>, String> {
    let found = rustls_native_certs::load_native_certs();
    let (mut roots, listed) = (RootCertStore::empty(), found.certs.iter().cloned().collect());
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(format!(
            "this machine trusts no authority (/etc/ssl/certs, SSL_CERT_FILE, SSL_CERT_DIR), install ca-certificates{why}"
        ));
    }
    trusting(roots, listed)
}

/// A client that trusts these authorities, and servers that show one of the listed certificates as their own.
fn trusting(roots: RootCertStore, listed: HashSet<CertificateDer<'static>>) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chains = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let verifier = Arc::new(ListedCertificates { chains: chains.map_err(|error| error.to_string())?, listed });
    Ok(finish(builder(provider)?.dangerous().with_custom_certificate_verifier(verifier)))
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
    // An IPv6 address without brackets is no authority of a URL, and has no port.
    let without_port = |host: &str| host.parse::<Authority>().map_or_else(|_| host.to_owned(), |host| host.host().to_owned());
    let name = host.map(|host| without_port(host).trim_matches(['[', ']']).to_owned());
    name.and_then(|name| ServerName::try_from(name).ok()).unwrap_or_else(|| ServerName::IpAddress(ip.into()))
}

/// Accepts every certificate. Such a probe asks whether the backend answers, not who it is: kubelet does the same.
#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    /// All that TLS 1.2 and 1.3 know: nothing is verified, so nothing needs to be understood, and a server of which the
    /// key is of a kind that is not listed has no signature to offer.
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        use SignatureScheme as S;
        vec![
            S::ECDSA_NISTP256_SHA256,
            S::ECDSA_NISTP384_SHA384,
            S::ECDSA_NISTP521_SHA512,
            S::ED25519,
            S::ED448,
            S::RSA_PSS_SHA256,
            S::RSA_PSS_SHA384,
            S::RSA_PSS_SHA512,
            // RSASSA-PSS with a key of its own type (RFC 8446 section 4.2.3).
            S::Unknown(0x0809),
            S::Unknown(0x080a),
            S::Unknown(0x080b),
            S::RSA_PKCS1_SHA256,
            S::RSA_PKCS1_SHA384,
            S::RSA_PKCS1_SHA512,
            S::ML_DSA_44,
            S::ML_DSA_65,
            S::ML_DSA_87,
            S::ECDSA_SHA1_Legacy,
            S::RSA_PKCS1_SHA1,
        ]
    }
}

/// Accepts valid certificates of authorities, and those that are in the machine's store themselves. `openssl req -x509`
/// writes certificates of authorities, which no chain may end with; who puts one into the store means it.
#[derive(Debug)]
struct ListedCertificates {
    chains: Arc<WebPkiServerVerifier>,
    listed: HashSet<CertificateDer<'static>>,
}

impl ServerCertVerifier for ListedCertificates {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.chains.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            // It is within its time, which is looked at before this.
            Err(error) if is_authority(&error) && self.listed.contains(certificate) => {
                verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chains.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chains.supported_verify_schemes()
    }
}

/// Whether a certificate was refused because it is that of an authority. The variant is one of a package of rustls; it
/// has no public name, but its text is stable.
fn is_authority(error: &Error) -> bool {
    matches!(error, Error::InvalidCertificate(CertificateError::Other(other)) if format!("{other:?}").contains("CaUsedAsEndEntity"))
}

/// The cause of a failed exchange by TLS in words, with what to change where these alone do not tell.
pub(super) fn cause_of(error: &(dyn std::error::Error + 'static)) -> String {
    let innermost = innermost(error);
    match innermost.downcast_ref::<Error>() {
        Some(error) if is_authority(error) => {
            "invalid peer certificate: it is that of an authority (CA:TRUE), use one without, or put it into the machine's store"
                .to_owned()
        }
        Some(Error::AlertReceived(AlertDescription::CertificateRequired)) => {
            "the server demands a client certificate, and probes have none".to_owned()
        }
        _ => innermost.to_string(),
    }
}

/// The error at the end of a chain of causes, which says what happened.
pub(super) fn innermost<'e>(error: &'e (dyn std::error::Error + 'static)) -> &'e (dyn std::error::Error + 'static) {
    let mut innermost = error;
    loop {
        // An I/O error does not name what it wraps as its cause, but the cause of that.
        let wrapped = innermost.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        let wrapped = wrapped.map(|inner| inner as &(dyn std::error::Error + 'static));
        match wrapped.or_else(|| innermost.source()) {
            Some(cause) => innermost = cause,
            None => return innermost,
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::server::WebPkiClientVerifier;
    use tokio_rustls::TlsAcceptor;

    use super::super::http_request::{self, Request};
    use super::super::prober::tests::failure;
    use super::*;

    /// A certificate for shop.example, valid until the end of this year, and a client that has it in its store.
    fn certificate(until: i32, is_ca: IsCa) -> (Arc<ServerConfig>, TlsClients) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["shop.example".to_owned()]).unwrap();
        params.is_ca = is_ca;
        (params.not_before, params.not_after) = (date_time_ymd(2000, 1, 1), date_time_ymd(until, 12, 31));
        let certificate = params.self_signed(&key).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions().unwrap();
        let server = server.with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let trusted = trusting(roots, [certificate.der().clone()].into()).unwrap();
        let machine = Mutex::new(Some((Instant::now(), Ok(trusted))));
        (Arc::new(server), TlsClients { machine, ..TlsClients::default() })
    }

    async fn handshake(until: i32, trust: Trust, host: Option<&str>) -> Result<(), Outcome> {
        shake_hands_with(certificate(until, IsCa::NoCa), trust, host).await
    }

    async fn shake_hands_with(
        (server, clients): (Arc<ServerConfig>, TlsClients),
        trust: Trust,
        host: Option<&str>,
    ) -> Result<(), Outcome> {
        let (near, far) = tokio::io::duplex(64 * 1024);
        let accepted = TlsAcceptor::from(server).accept(far);
        let connected = clients.connect(near, trust, host, "10.0.0.1".parse().unwrap());
        tokio::join!(async { drop(accepted.await) }, connected).1.map(drop).map_err(|failure| failure.outcome)
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

    #[tokio::test]
    async fn a_self_signed_certificate_of_an_authority_passes_if_it_is_in_the_store_itself() {
        let authority = || IsCa::Ca(BasicConstraints::Unconstrained);
        let shop = Some("shop.example");
        assert_eq!(shake_hands_with(certificate(2900, authority()), Trust::Machine, shop).await, Ok(()));
        for (until, host, why) in [(2001, shop, "expired"), (2900, Some("other.example"), "not valid for name")] {
            let why_not = failure(shake_hands_with(certificate(until, authority()), Trust::Machine, host).await.unwrap_err());
            assert!(why_not.contains(why), "{why_not}");
        }
        let ((server, _), (_, clients)) = (certificate(2900, authority()), certificate(2900, authority()));
        let why_not = failure(shake_hands_with((server, clients), Trust::Machine, shop).await.unwrap_err());
        assert!(why_not.contains("UnknownIssuer") || why_not.contains("CA:TRUE"), "{why_not}");
    }

    #[tokio::test]
    async fn a_server_that_demands_a_client_certificate_is_said_to_do_so() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["shop.example".to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build().unwrap();
        let server = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let server = server.with_client_cert_verifier(clients).with_single_cert(vec![certificate.der().clone()], key).unwrap();
        let (near, far) = tokio::io::duplex(64 * 1024);
        let accepted = TlsAcceptor::from(Arc::new(server)).accept(far);
        let asked = async {
            let probes = TlsClients::default();
            let stream = probes.connect(near, Trust::Any, None, "10.0.0.1".parse().unwrap()).await.ok().unwrap();
            let request = Request { authority: "shop.example", path: "/", status: &proto::StatusRanges::default() };
            http_request::ask(stream, &request).await
        };
        let why = failure(tokio::join!(async { drop(accepted.await) }, asked).1);
        assert_eq!(why, "gave no HTTP answer: the server demands a client certificate, and probes have none");
    }

    #[test]
    fn a_certificate_of_an_authority_is_refused_in_words() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["shop.example".to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chains = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let name = ServerName::try_from("shop.example").unwrap();
        let refused = chains.verify_server_cert(certificate.der(), &[], &name, &[], UnixTime::now()).unwrap_err();
        assert!(cause_of(&refused).contains("CA:TRUE"), "{refused}");
    }

    #[tokio::test]
    async fn the_second_attempt_exchanges_keys_by_a_group_that_it_has() {
        let (server, clients) = certificate(2900, IsCa::NoCa);
        let (near, far) = tokio::io::duplex(64 * 1024);
        let accepted = TlsAcceptor::from(server).accept(far);
        let connected = clients.connect_naming_more_groups(near, None, "10.0.0.1".parse().unwrap());
        assert!(tokio::join!(async { drop(accepted.await) }, connected).1.is_ok());
    }

    #[test]
    fn where_nothing_is_verified_keys_of_every_kind_are_asked_for() {
        let schemes = AnyCertificate.supported_verify_schemes();
        for scheme in [SignatureScheme::ECDSA_NISTP521_SHA512, SignatureScheme::ED448, SignatureScheme::RSA_PSS_SHA256] {
            assert!(schemes.contains(&scheme), "{scheme:?}");
        }
        let ring = rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes();
        assert!(ring.iter().all(|scheme| schemes.contains(scheme)), "those that can be verified are among them");
    }

    #[test]
    fn the_cause_of_a_failure_is_the_innermost_one() {
        let alert = Error::AlertReceived(AlertDescription::CertificateRequired);
        let io = std::io::Error::new(std::io::ErrorKind::InvalidData, alert);
        let status = tonic::Status::from_error(Box::new(io));
        assert_eq!(cause_of(&status), "the server demands a client certificate, and probes have none");
        let io = std::io::Error::other(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
        assert_eq!(cause_of(&io), "connection reset");
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
