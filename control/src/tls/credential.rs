//! The certificate that a gateway showed: whom it is for, and for how long it counts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::{CertificateError, Error};

use super::identity::{Identity, identities};

/// A stream outlives its certificate by at most this. Each check verifies two signatures, about 0.2 ms: a group of 64
/// gateways costs 0.3 % of a core.
const CHECKED_EVERY: Duration = Duration::from_secs(5);

/// A certificate with its chain, and what verified it in the handshake.
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
    /// Of a chain that `verifier` accepted, the certificate itself first.
    #[must_use]
    pub fn new(chain: &[CertificateDer<'_>], verifier: Arc<dyn ClientCertVerifier>) -> Self {
        let names = chain.first().map(identities).unwrap_or_default().into();
        Self { names, chain: chain.iter().map(|one| one.clone().into_owned()).collect(), verifier }
    }

    /// All that it is for.
    #[must_use]
    pub fn names(&self) -> &[Identity] {
        &self.names
    }

    /// Whether the handshake would accept it at `now`, by the authority that it was accepted by.
    ///
    /// # Errors
    /// Why not: it, or what leads from it to the authority, has expired.
    pub fn check(&self, now: UnixTime) -> Result<(), Error> {
        let none = || Error::InvalidCertificate(CertificateError::BadEncoding);
        let (certificate, intermediates) = self.chain.split_first().ok_or_else(none)?;
        self.verifier.verify_client_cert(certificate, intermediates, now).map(drop)
    }

    /// Waits until it is accepted no more, and says why.
    pub async fn expired(&self) -> Error {
        loop {
            if let Err(error) = self.check(UnixTime::now()) {
                return error;
            }
            tokio::time::sleep(CHECKED_EVERY).await;
        }
    }
}
