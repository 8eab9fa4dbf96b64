//! Certificates and keys from files and Secrets, in PEM format.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::settings::CertificateFiles;

/// PEM texts and their origin.
#[derive(Clone, PartialEq, Eq)]
pub struct Material {
    /// Their origin, for messages.
    pub from: String,
    /// The authority of the certificates of both sides; several during its rotation.
    pub ca: Vec<u8>,
    /// Our certificate and its chain up to the authority.
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
        /// Its error.
        error: io::Error,
    },
    /// Everybody on the machine may use the key.
    #[error("{path}: the key has mode {mode:04o}, so every user of this machine may {}; chmod o-rwx it, or set `defaultMode: 0400` of its Secret", if mode & 0o004 == 0 { "replace it" } else { "read it" })]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A part is not PEM, or lacks the expected content.
    #[error("{from}: {part} holds {found}; expected {expected} as PEM")]
    Broken {
        /// Its origin.
        from: String,
        /// `ca`, `cert` or `key`.
        part: &'static str,
        /// What was found.
        found: String,
        /// What was expected.
        expected: &'static str,
    },
    /// It has another identity.
    #[error("{from}: the certificate is for {found}; expected the URI SAN {expected}: issue it with that name")]
    Name {
        /// Its origin.
        from: String,
        /// The required SAN.
        expected: String,
        /// Its SANs of scheme `sluice`.
        found: String,
    },
    /// The peer would refuse it: expired, another authority, another purpose, or another key.
    #[error("{from}: the certificate would be refused: {error}; renew it, with the authority of `ca` and its own key")]
    Unusable {
        /// Its origin.
        from: String,
        /// What is wrong.
        error: rustls::Error,
    },
    /// A Secret is configured, but there is no cluster.
    #[error("Secret {0} cannot be read: the source is no cluster; configure files")]
    NoCluster(String),
    /// The Secret has not been read yet.
    #[error("Secret {0} was not read yet")]
    NotYet(String),
}

/// Parsed texts; the chain is not empty.
pub(super) struct Parsed {
    pub roots: RootCertStore,
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl Material {
    /// Reads files.
    ///
    /// # Errors
    /// For the first file that cannot be read.
    pub async fn read(files: &CertificateFiles) -> Result<Self, TlsError> {
        in_background(files, Self::read_now).await
    }

    /// The same, while this thread waits.
    pub(in crate::gateways) fn read_now(files: &CertificateFiles) -> Result<Self, TlsError> {
        let read = |path: &PathBuf| fs::read(path).map_err(|error| TlsError::Unreadable { path: path.clone(), error });
        let (ca, certificate, key) = (read(&files.ca)?, read(&files.cert)?, read(&files.key)?);
        Ok(Self { from: files.cert.display().to_string(), ca, certificate, key })
    }

    /// Reads files, and refuses a key that every user of the machine may read or replace.
    ///
    /// # Errors
    /// For the first file that cannot be read, or the exposed key.
    pub async fn read_guarded(files: &CertificateFiles) -> Result<Self, TlsError> {
        in_background(files, Self::read_guarded_now).await
    }

    /// The same, while this thread waits.
    pub(in crate::gateways) fn read_guarded_now(files: &CertificateFiles) -> Result<Self, TlsError> {
        let material = Self::read_now(files)?;
        let metadata = fs::metadata(&files.key);
        let metadata = metadata.map_err(|error| TlsError::Unreadable { path: files.key.clone(), error })?;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o006 != 0 {
            return Err(TlsError::Exposed { path: files.key.clone(), mode });
        }
        Ok(material)
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

/// Reads files in a thread for that.
async fn in_background(
    files: &CertificateFiles,
    read: fn(&CertificateFiles) -> Result<Material, TlsError>,
) -> Result<Material, TlsError> {
    let (files, path) = (files.clone(), files.cert.clone());
    let read = tokio::task::spawn_blocking(move || read(&files)).await;
    read.unwrap_or_else(|error| Err(TlsError::Unreadable { path, error: io::Error::other(error) }))
}

/// At least one.
fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let all = all.map_err(|error| error.to_string())?;
    if all.is_empty() { Err("no certificate".to_owned()) } else { Ok(all) }
}
