//! Certificates: whether the pair matches, the authority issued it, it has the name that its peers expect, and how long
//! it lasts.

use k8s_openapi::jiff::Timestamp;

use super::finding::{Finding, Level};
use crate::config::settings::CertificateFiles;
use crate::gateways::tls::{self, Material, TlsError, Validity};

/// Remaining time below which certificates should have been renewed, s: two weeks, or a third of their whole time if
/// that is less, which is when cert-manager renews.
const SOON_S: i64 = 14 * 86_400;

/// Who shows the certificate.
#[derive(Clone, Copy, Debug)]
pub enum Bearer<'a> {
    /// A controller of this group.
    Controller(&'a str),
    /// The gateway of this name.
    Gateway(&'a str),
    /// The admin API.
    AdminServer,
}

pub(super) async fn examine(key: &'static str, files: &CertificateFiles, bearer: Bearer<'_>) -> Finding {
    let read = match bearer {
        Bearer::AdminServer => Material::read_guarded(files).await,
        Bearer::Controller(_) | Bearer::Gateway(_) => Material::read(files).await,
    };
    match read {
        Ok(material) => judge(key, &material, bearer, Timestamp::now().as_second()),
        Err(TlsError::Unreadable { path, error }) => {
            Finding::new(Level::Unseen, key, format!("{}: {error}; not checked on this machine", path.display()))
        }
        Err(error) => Finding::new(Level::Fault, key, error.to_string()),
    }
}

/// The finding about a material at `now_s` since 1970.
fn judge(key: &'static str, material: &Material, bearer: Bearer<'_>, now_s: i64) -> Finding {
    let validity = Validity::of(material);
    if let Some(validity) = validity.filter(|validity| validity.until_s <= now_s) {
        let text = format!("{}: expired at {}; renew it", material.from, time(validity.until_s));
        return Finding::new(Level::Fault, key, text);
    }
    let usable = match bearer {
        Bearer::Controller(group) => tls::acceptance(material, group).map(drop),
        Bearer::Gateway(name) => tls::client_config(material, name).map(drop),
        Bearer::AdminServer => tls::operator_acceptance(material).map(drop),
    };
    match (usable, validity) {
        (Err(error), _) => Finding::new(Level::Fault, key, error.to_string()),
        (Ok(()), Some(validity)) => {
            let left_s = validity.until_s - now_s;
            let whole_s = validity.until_s.saturating_sub(validity.from_s);
            let until = format!("{}: valid until {}", material.from, time(validity.until_s));
            if left_s < SOON_S.min(whole_s / 3) {
                return Finding::new(Level::Warning, key, format!("{until}, for {} more h; renew it", left_s / 3_600));
            }
            Finding::new(Level::Ok, key, until)
        }
        (Ok(()), None) => Finding::new(Level::Warning, key, format!("{}: its validity cannot be read", material.from)),
    }
}

/// A time in UTC.
fn time(unix_s: i64) -> String {
    Timestamp::from_second(unix_s).map_or_else(|_| "a time out of range".to_owned(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::gateways::tls::tests::Authority;

    const NOW_S: i64 = 1_800_000_000;

    #[test]
    fn each_wrong_certificate_has_its_line() {
        let (authority, other) = (Authority::new(), Authority::new());
        let controller = ["sluice://east/controller"];
        let until = |days: u64| {
            let unix = u64::try_from(NOW_S).unwrap() + days * 86_400;
            authority.issue_until_unix(&controller, Duration::from_secs(unix))
        };
        let good = authority.issue(&controller);
        let rows = [
            (good.clone(), Level::Ok, "tls.crt: valid until 4000-01-01T00:00:00Z"),
            (until(13), Level::Warning, "for 312 more h; renew it"),
            (until(15), Level::Ok, "valid until 2027-01-30T08:00:00Z"),
            (authority.issue_until(&controller, 2020), Level::Fault, "expired at 2020-01-01T00:00:00Z; renew it"),
            (Material { ca: other.issue(&controller).ca, ..good.clone() }, Level::Fault, "UnknownIssuer"),
            (Material { key: other.issue(&controller).key, ..good.clone() }, Level::Fault, "keys may not be consistent"),
            (authority.issue(&["sluice://west/controller"]), Level::Fault, "expected the URI SAN sluice://east/controller"),
            (Material { certificate: b"x".to_vec(), ..good }, Level::Fault, "cert holds no certificate"),
        ];
        for (material, level, expected) in rows {
            let found = judge("tls", &material, Bearer::Controller("east"), NOW_S);
            assert!(found.level == level && found.text.contains(expected), "{expected}: {found}");
        }
        let gateway = authority.issue(&["sluice://east/edge-1"]);
        assert_eq!(judge("tls", &gateway, Bearer::Gateway("edge-1"), NOW_S).level, Level::Ok);
        assert!(judge("tls", &gateway, Bearer::Gateway("edge-2"), NOW_S).text.contains("sluice://GROUP/edge-2"));
    }

    #[tokio::test]
    async fn files_that_are_not_here_are_not_checked() {
        let files = CertificateFiles { ca: "/nonexistent/ca".into(), cert: "c".into(), key: "k".into() };
        let found = examine("tls", &files, Bearer::AdminServer).await;
        assert_eq!(found.level, Level::Unseen);
        assert!(found.to_string().starts_with("note: tls: /nonexistent/ca: "), "{found}");
    }
}
