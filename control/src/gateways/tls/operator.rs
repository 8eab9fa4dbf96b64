//! The operator that a certificate names: the common name (CN) and, by the organisation (O), the role, as Kubernetes
//! reads users and groups.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;
use yasna::tags::{TAG_PRINTABLESTRING, TAG_UTF8STRING};
use yasna::{ASN1Result, BERReader, parse_ber};

/// The type of a common name, and that of an organisation (RFC 5280, appendix A).
const COMMON_NAME: [u64; 4] = [2, 5, 4, 3];
const ORGANIZATION: [u64; 4] = [2, 5, 4, 10];
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
        let none = Self { name: String::new(), role: Role::None };
        let Ok(certificate) = EndEntityCert::try_from(certificate) else { return none };
        let Some(attributes) = attributes(certificate.subject()) else { return none };
        let role = attributes.iter().filter(|(kind, _)| *kind == ORGANIZATION).map(|(_, text)| match text.as_str() {
            ADMINS => Role::Change,
            VIEWERS => Role::Look,
            _ => Role::None,
        });
        let role = role.max().unwrap_or(Role::None);
        let name = attributes.iter().find(|(kind, _)| *kind == COMMON_NAME);
        Self { name: name.map(|(_, text)| printable(text)).unwrap_or_default(), role }
    }
}

/// Types and texts of a subject, whose outer tag and length are cut off. `None` if it is broken.
fn attributes(subject: &[u8]) -> Option<Vec<(Vec<u64>, String)>> {
    let [high, low] = u16::try_from(subject.len()).ok()?.to_be_bytes();
    let sequence = [&[0x30, 0x82, high, low], subject].concat();
    let mut all = Vec::new();
    let attribute = |reader: BERReader<'_, '_>| {
        reader.read_sequence(|parts| {
            let kind = parts.next().read_oid()?.components().clone();
            Ok((kind, text(parts.next())?))
        })
    };
    let read = parse_ber(&sequence, |reader| {
        reader.read_sequence_of(|set| {
            set.read_set_of(|one| {
                all.push(attribute(one)?);
                Ok(())
            })
        })
    });
    read.ok().map(|()| all)
}

/// A text in the encodings that RFC 5280 allows for new certificates; of another encoding, an empty one.
fn text(value: BERReader<'_, '_>) -> ASN1Result<String> {
    match value.lookahead_tag()? {
        TAG_UTF8STRING => value.read_utf8string(),
        TAG_PRINTABLESTRING => value.read_printable_string(),
        _ => value.read_der().map(|_| String::new()),
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
