//! The certificate of a connected gateway or operator: its identities and its validity.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, Error};

use super::identity::{Identity, identities};
use super::operator::{Operator, Role};

/// Interval of checks, and so the longest time a stream outlives its certificate. Each check verifies two signatures,
/// about 0.2 ms: a group of 64 gateways costs 0.3 % of a core.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// A certificate with its chain, and the verifier of the handshake.
#[derive(Clone)]
pub struct Credential {
    names: Arc<[Identity]>,
    chain: Arc<[CertificateDer<'static>]>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({})", Identity::list(&self.names))
    }
}

impl Credential {
    /// Takes a chain that `verifier` accepted, beginning with the certificate itself.
    #[must_use]
    pub fn new(chain: &[CertificateDer<'_>], verifier: Arc<dyn ClientCertVerifier>) -> Self {
        let names = chain.first().map(identities).unwrap_or_default().into();
        Self { names, chain: chain.iter().map(|one| one.clone().into_owned()).collect(), verifier }
    }

    /// All its identities.
    #[must_use]
    pub fn names(&self) -> &[Identity] {
        &self.names
    }

    /// The operator that it names.
    #[must_use]
    pub fn operator(&self) -> Operator {
        let none = || Operator { name: String::new(), role: Role::None };
        self.chain.first().map_or_else(none, Operator::of)
    }

    /// Whether a handshake would accept it at `now`, with the authority that accepted it before.
    ///
    /// # Errors
    /// If it or an intermediate certificate has expired.
    pub fn check(&self, now: UnixTime) -> Result<(), Error> {
        let none = || Error::InvalidCertificate(CertificateError::BadEncoding);
        let (certificate, intermediates) = self.chain.split_first().ok_or_else(none)?;
        self.verifier.verify_client_cert(certificate, intermediates, now).map(drop)
    }

    /// Waits until it is no longer accepted and returns why.
    pub async fn expired(&self) -> Error {
        loop {
            if let Err(error) = self.check(UnixTime::now()) {
                return error;
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }
}
