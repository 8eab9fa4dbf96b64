//! The operator that a certificate names: the common name (CN) and, by the organisation (O), the role, as Kubernetes
//! reads users and groups.

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

/// The organisation of operators who may change something.
const ADMINS: &str = "sluice:admins";
/// The organisation of operators who may look.
const VIEWERS: &str = "sluice:viewers";
/// Maximum length of a name in messages, in characters; the limit of a common name (RFC 5280, ub-common-name).
const NAME_CHARS_MAX: usize = 64;

/// What an operator may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Neither.
    None,
    /// Look.
    Look,
    /// Look and change.
    Change,
}

/// An operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operator {
    /// The common name; empty: the certificate has none.
    pub name: String,
    /// What its organisations allow.
    pub role: Role,
}

impl Operator {
    /// The operator of a certificate that has been verified.
    #[must_use]
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        let Ok((_, certificate)) = X509Certificate::from_der(certificate) else {
            return Self { name: String::new(), role: Role::None };
        };
        let subject = certificate.subject();
        // Of another encoding than RFC 5280 allows for new certificates a text counts as absent.
        let roles = subject.iter_organization().filter_map(|one| one.as_str().ok()).map(|organization| match organization {
            ADMINS => Role::Change,
            VIEWERS => Role::Look,
            _ => Role::None,
        });
        let name = subject.iter_common_name().next().and_then(|one| one.as_str().ok());
        Self { name: name.map(printable).unwrap_or_default(), role: roles.max().unwrap_or(Role::None) }
    }
}

/// A name that cannot forge a line of a log.
fn printable(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject as _;

    use super::*;
    use crate::gateways::tls::tests::Authority;

    #[test]
    fn the_organisation_is_the_role_and_the_strongest_counts() {
        let authority = Authority::new();
        let operator = |name: &str, organizations: &[&str]| {
            let material = authority.issue_operator(name, organizations, 4000);
            Operator::of(&CertificateDer::from_pem_slice(&material.certificate).unwrap())
        };
        for (organization, role) in
            [("sluice:admins", Role::Change), ("sluice:viewers", Role::Look), ("sluice:Admins", Role::None), ("", Role::None)]
        {
            assert_eq!(operator("alice", &[organization]), Operator { name: "alice".to_owned(), role }, "{organization}");
        }
        assert_eq!(operator("bob", &[]).role, Role::None);
        assert_eq!(operator("a\nb", &["sluice:viewers"]).name, "ab");
        let gateway = authority.issue(&["sluice://east/edge-1"]);
        let gateway = Operator::of(&CertificateDer::from_pem_slice(&gateway.certificate).unwrap());
        assert_eq!(gateway.role, Role::None);
        assert_eq!(Operator::of(&CertificateDer::from(vec![1])).role, Role::None);
    }
}
