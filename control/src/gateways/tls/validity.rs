//! How long certificates last.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use x509_parser::parse_x509_certificate;

use super::material::Material;

/// From when until when certificates are valid, s since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// When our certificate begins to be valid.
    pub from_s: i64,
    /// When the first certificate of our chain ends, or the last one of the authorities if that is earlier.
    pub until_s: i64,
}

impl Validity {
    /// That of a material; `None` if a part of it is no certificate.
    #[must_use]
    pub fn of(material: &Material) -> Option<Self> {
        Self::of_texts(&material.ca, &material.certificate)
    }

    /// That of authorities and a chain in PEM format; `None` if a part of them is no certificate.
    pub(crate) fn of_texts(ca: &[u8], certificate: &[u8]) -> Option<Self> {
        let (chain, authorities) = (validities(certificate)?, validities(ca)?);
        let first_of_chain = chain.iter().map(|one| one.until_s).min()?;
        let last_authority = authorities.iter().map(|one| one.until_s).max()?;
        Some(Self { from_s: chain.first()?.from_s, until_s: first_of_chain.min(last_authority) })
    }
}

/// That of each certificate.
fn validities(pem: &[u8]) -> Option<Vec<Validity>> {
    let certificate = |der: CertificateDer<'_>| {
        let (_, parsed) = parse_x509_certificate(&der).ok()?;
        let validity = parsed.validity();
        Some(Validity { from_s: validity.not_before.timestamp(), until_s: validity.not_after.timestamp() })
    };
    CertificateDer::pem_slice_iter(pem).map(|der| certificate(der.ok()?)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::Authority;
    use super::*;

    #[test]
    fn the_certificate_that_ends_first_counts_and_of_authorities_the_last() {
        let authority = Authority::new();
        let uris = ["sluice://east/edge-1"];
        let early = authority.issue_until_unix(&uris, Duration::from_secs(2_000_000_000));
        let late = authority.issue(&uris);
        assert_eq!(Validity::of(&early).unwrap().until_s, 2_000_000_000);
        let chain = Material { certificate: [late.certificate.clone(), early.certificate.clone()].concat(), ..late.clone() };
        assert_eq!(Validity::of(&chain).unwrap().until_s, 2_000_000_000);
        // The old authority of a rotation.
        let rotated = Material { ca: [early.certificate.clone(), late.ca.clone()].concat(), ..late.clone() };
        assert!(Validity::of(&rotated).unwrap().until_s > 4_000_000_000);
        let ended = Material { ca: early.certificate, ..late.clone() };
        assert_eq!(Validity::of(&ended).unwrap().until_s, 2_000_000_000);
        assert_eq!(Validity::of(&Material { ca: b"x".to_vec(), ..late }), None);
    }
}
