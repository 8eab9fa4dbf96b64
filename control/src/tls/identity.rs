//! Who a certificate is for: its URI SANs of scheme `sluice`.

use std::fmt;

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// The name of every controller of a group; no gateway may have it.
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
    /// Of a group and a name.
    #[must_use]
    pub fn new(group: &str, name: &str) -> Self {
        Self { group: group.to_owned(), name: name.to_owned() }
    }

    /// Several, for a message.
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

/// Everyone that a certificate is for. Whether it may be believed is another matter.
#[must_use]
pub fn identities(certificate: &CertificateDer<'_>) -> Vec<Identity> {
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    certificate.valid_uri_names().filter_map(Identity::parse).collect()
}
