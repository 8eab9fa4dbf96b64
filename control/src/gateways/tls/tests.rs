//! Tests: certificates as operators create them, and the errors for invalid ones.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
    date_time_ymd,
};

use rustls::pki_types::CertificateDer;

use super::*;

/// An authority.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        // Each authority has a unique name.
        params.distinguished_name.push(DnType::CommonName, format!("sluice {:02x?}", &key.public_key_raw()[..8]));
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// A certificate for these URIs.
    pub(crate) fn issue(&self, uris: &[&str]) -> Material {
        self.issue_until(uris, 4000)
    }

    /// A certificate that is valid until the start of a year.
    pub(crate) fn issue_until(&self, uris: &[&str], year: i32) -> Material {
        self.issue_with(uris, |params| params.not_after = date_time_ymd(year, 1, 1))
    }

    /// A certificate that is valid for this long after 1970.
    pub(crate) fn issue_until_unix(&self, uris: &[&str], unix: std::time::Duration) -> Material {
        self.issue_with(uris, |params| params.not_after = date_time_ymd(1970, 1, 1) + unix)
    }

    /// The certificate of a server of the admin API at this address.
    pub(crate) fn issue_server(&self, address: std::net::IpAddr) -> Material {
        self.issue_with(&[], |params| params.subject_alt_names = vec![SanType::IpAddress(address)])
    }

    /// The certificate of an operator.
    pub(crate) fn issue_operator(&self, name: &str, organizations: &[&str], until_year: i32) -> Material {
        self.issue_with(&[], |params| {
            params.not_after = date_time_ymd(until_year, 1, 1);
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, name);
            for organization in organizations {
                params.distinguished_name.push(DnType::OrganizationName, *organization);
            }
        })
    }

    fn issue_with(&self, uris: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Material {
        let mut params = CertificateParams::default();
        params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Material {
            from: "tls.crt".to_owned(),
            ca: self.pem.clone().into_bytes(),
            certificate: certificate.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
        }
    }
}

fn error_of<T>(result: Result<T, TlsError>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn valid_certificates_are_accepted_and_the_group_comes_from_the_gateways_certificate() {
    let authority = Authority::new();
    acceptance(&authority.issue(&["sluice://east/controller", "https://example.com/x"]), "east").unwrap();
    let (_, group) = client_config(&authority.issue(&["sluice://east/edge-1"]), "edge-1").unwrap();
    assert_eq!(group, "east");
    // One certificate for an embedded controller and its gateway.
    let both = authority.issue(&["sluice://east/controller", "sluice://east/edge-1"]);
    acceptance(&both, "east").unwrap();
    client_config(&both, "edge-1").unwrap();
}

#[test]
fn a_certificate_that_the_peer_would_refuse_is_an_error_with_the_reason() {
    let (authority, other) = (Authority::new(), Authority::new());
    let controller = ["sluice://east/controller"];
    let of_other = Material { ca: other.pem.clone().into_bytes(), ..authority.issue(&controller) };
    let with_other_key = Material { key: authority.issue(&controller).key, ..authority.issue(&controller) };
    let rows = [
        (authority.issue_until(&controller, 2020), "would be refused: invalid peer certificate: certificate expired"),
        (of_other, "would be refused: invalid peer certificate: UnknownIssuer"),
        (with_other_key, "would be refused: keys may not be consistent"),
        (
            authority.issue(&["sluice://west/controller"]),
            "is for sluice://west/controller; expected the URI SAN sluice://east/controller",
        ),
        (authority.issue(&[]), "is for none; expected the URI SAN sluice://east/controller"),
        (Material { key: b"x".to_vec(), ..authority.issue(&controller) }, "key holds"),
        (Material { ca: Vec::new(), ..authority.issue(&controller) }, "ca holds no certificate; expected"),
    ];
    for (material, expected) in rows {
        let error = error_of(acceptance(&material, "east"));
        assert!(error.starts_with("tls.crt: ") && error.contains(expected), "{expected}: {error}");
    }
    let expired = authority.issue_until(&["sluice://east/edge-1"], 2020);
    assert!(error_of(client_config(&expired, "edge-1")).contains("certificate expired"));
    let error = error_of(client_config(&authority.issue(&["sluice://east/edge-2"]), "edge-1"));
    assert!(error.contains("is for sluice://east/edge-2; expected the URI SAN sluice://GROUP/edge-1"), "{error}");
}

#[test]
fn a_certificate_is_accepted_until_it_expires_by_the_authority_that_first_accepted_it() {
    use rustls::pki_types::pem::PemObject as _;
    let (authority, other) = (Authority::new(), Authority::new());
    let gateways = acceptance(&authority.issue(&["sluice://east/controller"]), "east").unwrap().clients;
    let credential = |of: &Authority, year| {
        let material = of.issue_until(&["sluice://east/edge-1"], year);
        Credential::new(&[CertificateDer::from_pem_slice(&material.certificate).unwrap()], Arc::clone(&gateways))
    };
    let in_2030 = UnixTime::since_unix_epoch(std::time::Duration::from_secs(1_893_456_000 + 1));
    let good = credential(&authority, 4000);
    good.check(in_2030).unwrap();
    assert_eq!(good.names(), [Identity::new("east", "edge-1")]);
    let error = credential(&authority, 2030).check(in_2030).unwrap_err().to_string();
    assert!(error.contains("certificate expired"), "{error}");
    assert!(credential(&other, 4000).check(in_2030).is_err());
    assert!(Credential::new(&[], gateways).check(in_2030).is_err(), "an empty chain is refused");
}

#[test]
fn a_key_is_never_printed() {
    let material = Authority::new().issue(&["sluice://east/controller"]);
    assert_eq!(format!("{material:?}"), "Material(tls.crt)");
}

/// Runs the commands of the page. Skipped if openssl is missing.
#[test]
fn the_documented_commands_make_certificates_that_are_accepted() {
    if std::process::Command::new("openssl").arg("version").output().is_err() {
        println!("skipped: there is no openssl");
        return;
    }
    let page = include_str!("../../../../docs/guide/controllers.md");
    let commands = page.split("```sh\n").find(|block| block.starts_with("openssl req -x509")).unwrap();
    let commands = commands.split("```").next().unwrap();
    let (authority, each) = commands.split_once("name=controller").unwrap();
    let (_, each) = each.split_once('\n').unwrap();
    let dir = tempfile::tempdir().unwrap();
    let script = format!("{authority}\nfor name in controller edge-1; do\n{each}\ndone\n");
    let output = std::process::Command::new("sh").args(["-ec", &script]).current_dir(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let material = |name: &str| Material {
        from: name.to_owned(),
        ca: read("ca.crt"),
        certificate: read(&format!("{name}.crt")),
        key: read(&format!("{name}.key")),
    };
    acceptance(&material("controller"), "east").unwrap();
    let (_, group) = client_config(&material("edge-1"), "edge-1").unwrap();
    assert_eq!(group, "east");
}
