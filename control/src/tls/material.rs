//! Certificates and keys as they stand in files and Secrets: PEM.

use std::io;
use std::path::PathBuf;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::settings::CertificateFiles;

/// PEM texts, and where they are from.
#[derive(Clone, PartialEq, Eq)]
pub struct Material {
    /// Where they are from, for messages.
    pub from: String,
    /// The authority that both sides' certificates are of; several while it is changed.
    pub ca: Vec<u8>,
    /// Our certificate, and what leads from it to the authority.
    pub certificate: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
}

impl std::fmt::Debug for Material {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Material({})", self.from)
    }
}

/// Why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{path}: {error}; expected a PEM file that this process may read")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A part is no PEM, or has not what it should.
    #[error("{from}: {part} holds {found}; expected {expected} as PEM")]
    Broken {
        /// Where it is from.
        from: String,
        /// `ca`, `cert` or `key`.
        part: &'static str,
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// It is for somebody else.
    #[error("{from}: the certificate is for {found}; expected the URI SAN {expected}: issue it with that name")]
    Name {
        /// Where it is from.
        from: String,
        /// The SAN that is needed.
        expected: String,
        /// The SANs of ours that it has.
        found: String,
    },
    /// The other side would refuse it: expired, of another authority, for another use, or with another key.
    #[error("{from}: the certificate would be refused: {error}; renew it, with the authority of `ca` and its own key")]
    Unusable {
        /// Where it is from.
        from: String,
        /// What is wrong.
        error: rustls::Error,
    },
    /// There is no cluster to read a Secret from.
    #[error("Secret {0} cannot be read: the source is no cluster; name files")]
    NoCluster(String),
    /// They were never read so far.
    #[error("Secret {0} was not read yet")]
    NotYet(String),
}

/// What texts hold; the chain is not empty.
pub(super) struct Parsed {
    pub roots: RootCertStore,
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl Material {
    /// Reads files.
    ///
    /// # Errors
    /// The first that cannot be read.
    pub async fn read(files: &CertificateFiles) -> Result<Self, TlsError> {
        let read = async |path: &PathBuf| {
            tokio::fs::read(path).await.map_err(|error| TlsError::Unreadable { path: path.clone(), error })
        };
        let (ca, certificate, key) = (read(&files.ca).await?, read(&files.cert).await?, read(&files.key).await?);
        Ok(Self { from: files.cert.display().to_string(), ca, certificate, key })
    }

    pub(super) fn parse(&self) -> Result<Parsed, TlsError> {
        const CERTIFICATES: &str = "one or more certificates";
        let broken = |part, expected, found| TlsError::Broken { from: self.from.clone(), part, found, expected };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca).map_err(|found| broken("ca", CERTIFICATES, found))? {
            roots.add(certificate).map_err(|error| broken("ca", CERTIFICATES, error.to_string()))?;
        }
        let chain = certificates(&self.certificate).map_err(|found| broken("cert", CERTIFICATES, found))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key);
        let key = key.map_err(|error| broken("key", "one private key", error.to_string()))?;
        Ok(Parsed { roots, chain, key })
    }
}

/// At least one.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|error| error.to_string())?;
    if all.is_empty() { Err("no certificate".to_owned()) } else { Ok(all) }
}
