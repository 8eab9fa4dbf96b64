//! How a gateway verifies a controller: by its own authority, and by the controller name of its own group. The dialled
//! host name does not count, because controllers may be reached by any address.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, DigitallySignedStruct, Error, PeerIncompatible, RootCertStore, SignatureScheme};

use super::identity::{CONTROLLER, Identity, identities};

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

#[derive(Debug)]
pub(super) struct ControllerVerifier {
    roots: Arc<RootCertStore>,
    wanted: Identity,
    provider: Arc<CryptoProvider>,
}

impl ControllerVerifier {
    pub(super) fn new(roots: Arc<RootCertStore>, group: &str) -> Self {
        Self { roots, wanted: Identity::new(group, CONTROLLER), provider: provider() }
    }

    pub(super) fn check(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        check_server(&self.roots, certificate, intermediates, now)?;
        let found = identities(certificate);
        if found.contains(&self.wanted) {
            return Ok(());
        }
        let message =
            format!("the certificate is for {}; expected {}, a controller of our own group", Identity::list(&found), self.wanted);
        Err(Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(Arc::new(WrongName(message))))))
    }
}

/// Checks validity, purpose and authority of a server's certificate, not its name.
pub(super) fn check_server(
    roots: &RootCertStore,
    certificate: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    now: UnixTime,
) -> Result<(), Error> {
    let algorithms = provider().signature_verification_algorithms.all;
    verify_server_cert_signed_by_trust_anchor(&ParsedCertificate::try_from(certificate)?, roots, intermediates, now, algorithms)
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct WrongName(String);

impl ServerCertVerifier for ControllerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity, intermediates, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
