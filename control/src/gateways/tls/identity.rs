//! Identities in a certificate: its URI SANs of scheme `sluice`.

use std::fmt;

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// The name of every controller of a group, which no gateway may have.
pub const CONTROLLER: &str = "controller";

/// `sluice://<group>/<name>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The group of gateways.
    pub group: String,
    /// The gateway, or [`CONTROLLER`].
    pub name: String,
}

impl Identity {
    /// The identity of a name in a group.
    #[must_use]
    pub fn new(group: &str, name: &str) -> Self {
        Self { group: group.to_owned(), name: name.to_owned() }
    }

    /// Formats several identities for a message.
    #[must_use]
    pub fn list(all: &[Self]) -> String {
        all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    fn parse(uri: &str) -> Option<Self> {
        let (group, name) = uri.strip_prefix("sluice://")?.split_once('/')?;
        let is_part = |text: &str| !text.is_empty() && !text.contains(['/', '?', '#', '%']);
        (is_part(group) && is_part(name)).then(|| Self::new(group, name))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sluice://{}/{}", self.group, self.name)
    }
}

/// All identities in a certificate. This does not verify the certificate.
#[must_use]
pub fn identities(certificate: &CertificateDer<'_>) -> Vec<Identity> {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    certificate.valid_uri_names().filter_map(Identity::parse).collect()
}
