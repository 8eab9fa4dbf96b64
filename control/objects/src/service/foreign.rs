//! Annotations of other load balancers that sluice does not read. Owners get a remark, so that no user who
//! migrates relies on an annotation without effect.
//!
//! Invariant: every annotation with a prefix listed here is either read elsewhere (`READ`, `INTERNAL`, those for the PROXY
//! protocol), written by its own controller (`WRITTEN_BACK`), refused because it changes who may connect or what a backend
//! receives (`REFUSED`), or named in a remark.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::Value;

use super::error::SpecError;
use super::proxy_protocol::{self, Reading};
use crate::note::{Cause, Remark, quoted};

/// Prefixes of the annotations of other products.
const FAMILIES: [&str; 33] = [
    "metallb.io/",
    "metallb.universe.tf/",
    "lbipam.cilium.io/",
    "io.cilium/lb-ipam-",
    "service.cilium.io/",
    "service.beta.kubernetes.io/aws-load-balancer-",
    "kube-vip.io/",
    "purelb.io/",
    "loxilb.io/",
    "eip.openelb.kubesphere.io/",
    "lb.kubesphere.io/",
    "protocol.openelb.kubesphere.io/",
    "loadbalancer.openstack.org/",
    "service.beta.kubernetes.io/openstack-internal-load-balancer",
    "service.beta.kubernetes.io/do-loadbalancer-",
    "service.beta.kubernetes.io/scw-loadbalancer-",
    "load-balancer.hetzner.cloud/",
    "service.beta.kubernetes.io/linode-loadbalancer-",
    "service.beta.kubernetes.io/vultr-loadbalancer-",
    "service.beta.kubernetes.io/azure-",
    "networking.gke.io/load-balancer-",
    "networking.gke.io/internal-load-balancer-",
    "cloud.google.com/load-balancer-type",
    "cloud.google.com/l4-rbs",
    "cloud.google.com/network-tier",
    "service.beta.kubernetes.io/alibaba-cloud-loadbalancer-",
    ALIBABA_OLD,
    "service.beta.kubernetes.io/oci-load-balancer-",
    "oci-network-load-balancer.oraclecloud.com/",
    "oci.oraclecloud.com/load-balancer-type",
    "oci.oraclecloud.com/loadbalancer-policy",
    "oci.oraclecloud.com/oci-",
    "oci.oraclecloud.com/security-rule-management-mode",
];
/// Prefix that Alibaba's annotations had until 2019. Its controller reads both.
const ALIBABA_OLD: &str = "service.beta.kubernetes.io/alicloud-loadbalancer-";
/// Annotations that the module `annotations` reads, refuses or reports.
pub(super) const READ: [&str; 27] = [
    "metallb.io/loadBalancerIPs",
    "metallb.io/address-pool",
    "metallb.io/allow-shared-ip",
    "metallb.universe.tf/loadBalancerIPs",
    "metallb.universe.tf/address-pool",
    "metallb.universe.tf/allow-shared-ip",
    "lbipam.cilium.io/ips",
    "lbipam.cilium.io/sharing-key",
    "lbipam.cilium.io/sharing-cross-namespace",
    "io.cilium/lb-ipam-ips",
    "io.cilium/lb-ipam-sharing-key",
    "io.cilium/lb-ipam-sharing-cross-namespace",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-port",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-path",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-success-codes",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-timeout",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-healthy-threshold",
    "service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold",
    "service.beta.kubernetes.io/aws-load-balancer-connection-draining-enabled",
    "service.beta.kubernetes.io/aws-load-balancer-connection-draining-timeout",
    "service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout",
    "service.beta.kubernetes.io/aws-load-balancer-scheme",
    "service.beta.kubernetes.io/aws-load-balancer-internal",
    "service.beta.kubernetes.io/load-balancer-source-ranges",
    "kube-vip.io/loadbalancerIPs",
];
/// Annotations that controllers write, not owners.
const WRITTEN_BACK: [&str; 8] = [
    "metallb.io/ip-allocated-from-pool",
    "metallb.universe.tf/ip-allocated-from-pool",
    "kube-vip.io/vipHost",
    "kube-vip.io/requestedIP",
    "purelb.io/allocated-by",
    "purelb.io/allocated-from",
    "purelb.io/announcing-IPv4",
    "purelb.io/announcing-IPv6",
];
/// Replacements to use instead, if there are any.
const EQUIVALENTS: [(&str, &str); 18] = [
    ("purelb.io/addresses", "addresses"),
    ("purelb.io/service-group", "address-pool"),
    ("purelb.io/allow-shared-ip", "sharing-key"),
    ("loxilb.io/staticIP", "addresses"),
    ("loxilb.io/poolSelect", "address-pool"),
    ("loxilb.io/lbmode", "mode"),
    ("loxilb.io/epselect", "scheduler"),
    ("loxilb.io/timeout", "idle-timeout"),
    ("loxilb.io/liveness", "health-check"),
    ("loxilb.io/probetype", "health-check"),
    ("loxilb.io/probeport", "health-check-port"),
    ("loxilb.io/probetimeout", "health-check-interval"),
    ("eip.openelb.kubesphere.io/v1alpha1", "addresses"),
    ("eip.openelb.kubesphere.io/v1alpha2", "address-pool"),
    ("service.cilium.io/forwarding-mode", "mode"),
    ("service.cilium.io/lb-algorithm", "scheduler"),
    ("service.beta.kubernetes.io/aws-load-balancer-private-ipv4-addresses", "addresses"),
    ("service.beta.kubernetes.io/aws-load-balancer-target-group-attributes", "drain-timeout"),
];

/// Remarks about annotations of other products.
///
/// # Errors
/// If one of them changes who may connect or what a backend receives.
pub fn remarks(annotations: &BTreeMap<String, String>) -> Result<Vec<Remark>, SpecError> {
    let mut remarks = Vec::new();
    for (key, value) in annotations.iter().filter(|(key, _)| FAMILIES.iter().any(|family| key.starts_with(family))) {
        let present = present_name(key);
        if let Some(remedy) = refused(&present, value) {
            return Err(SpecError::unsupported(&format!("annotation {key}"), value, remedy));
        }
        let reading = proxy_protocol::reading(key, value);
        if READ.contains(&key.as_str()) || WRITTEN_BACK.contains(&key.as_str()) || reading == Reading::All {
            continue;
        }
        if let Some((_, internal, public)) = INTERNAL.iter().find(|(theirs, ..)| *theirs == present) {
            let value = value.trim();
            if ![internal, public, &""].iter().any(|known| value.eq_ignore_ascii_case(known)) {
                let found = quoted(value);
                let text =
                    format!("annotation {key}: found {found}, expected {internal} or {public}; it asks for no internal pool");
                remarks.push(Remark::new(Cause::AnnotationIgnored, text));
            }
            continue;
        }
        let advice = EQUIVALENTS.iter().find(|(theirs, _)| theirs == key).map(|(_, ours)| format!("; use sluice.dev/{ours}"));
        let but = if reading == Reading::Part { " but for its PROXY protocol" } else { "" };
        let text = format!("annotation {key} has no effect here{but}{}", advice.unwrap_or_default());
        remarks.push(Remark::new(Cause::AnnotationIgnored, text));
    }
    Ok(remarks)
}

/// Annotations by which an internal load balancer is asked for, with the values that ask for it and for a public one.
const INTERNAL: [(&str, &str, &str); 10] = [
    ("service.beta.kubernetes.io/azure-load-balancer-internal", "true", "false"),
    ("networking.gke.io/load-balancer-type", "Internal", "External"),
    ("cloud.google.com/load-balancer-type", "Internal", "External"),
    ("service.beta.kubernetes.io/openstack-internal-load-balancer", "true", "false"),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-address-type", "intranet", "internet"),
    ("service.beta.kubernetes.io/oci-load-balancer-internal", "true", "false"),
    ("oci-network-load-balancer.oraclecloud.com/internal", "true", "false"),
    ("service.beta.kubernetes.io/do-loadbalancer-network", "INTERNAL", "EXTERNAL"),
    ("service.beta.kubernetes.io/scw-loadbalancer-private", "true", "false"),
    ("load-balancer.hetzner.cloud/disable-public-network", "true", "false"),
];

/// Whether an annotation of another product asks for an internal load balancer.
pub(super) fn asks_for_internal(annotations: &BTreeMap<String, String>) -> bool {
    annotations.iter().any(|(key, value)| {
        let key = present_name(key);
        INTERNAL.iter().any(|(theirs, wanted, _)| *theirs == key && value.trim().eq_ignore_ascii_case(wanted))
    })
}

/// Which values of an annotation change who may connect or what a backend receives.
#[derive(Clone, Copy)]
enum Refuses {
    /// Every value.
    All,
    /// Every value but that which the product has without the annotation, and those that switch it off.
    AllBut(&'static str),
    /// These values.
    Only(&'static [&'static str]),
    /// A JSON object with this key, unless its value is the second text, empty or `null`.
    Key(&'static str, &'static str),
}

const PRIVATE_LINK: &str = "there is no Private Link; ask for a PROXY header by sluice.dev/proxy-protocol, and remove it";
const TLS: &str = "let the backends end TLS, and remove it";
const CLIENTS: &str = "say who may connect by spec.loadBalancerSourceRanges, and remove it";
const TLS_BEHIND: &str = "nothing is encrypted on the way to the backends: let clients speak TLS with them, and remove it";
const HEADERS: &str = "headers are not inserted: let the backends do without them, and remove it";

/// Annotations that must not be ignored, with advice. A key that ends in `*` stands for all with this beginning. Names and
/// values are those of the vendors' controllers.
const REFUSED: [(&str, Refuses, &str); 45] = [
    ("service.beta.kubernetes.io/aws-load-balancer-ssl-cert", Refuses::All, TLS),
    ("service.beta.kubernetes.io/aws-load-balancer-ssl-ports", Refuses::All, TLS),
    ("service.beta.kubernetes.io/aws-load-balancer-backend-protocol", Refuses::Only(&["ssl", "https"]), TLS_BEHIND),
    ("service.beta.kubernetes.io/aws-load-balancer-security-groups", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/aws-load-balancer-extra-security-groups", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/aws-load-balancer-security-group-prefix-lists", Refuses::All, CLIENTS),
    ("service.cilium.io/src-ranges-policy", Refuses::AllBut("allow"), "source ranges only allow here; remove it"),
    ("loxilb.io/mtls-frontend-mode", Refuses::AllBut("disabled"), TLS),
    ("loxilb.io/mtls-backend-verify", Refuses::AllBut("false"), TLS_BEHIND),
    ("loadbalancer.openstack.org/x-forwarded-for", Refuses::AllBut("false"), HEADERS),
    ("loadbalancer.openstack.org/default-tls-container-ref", Refuses::All, TLS),
    ("service.beta.kubernetes.io/do-loadbalancer-allow-rules", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/do-loadbalancer-deny-rules", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/do-loadbalancer-certificate-id", Refuses::All, TLS),
    ("service.beta.kubernetes.io/do-loadbalancer-certificate-name", Refuses::All, TLS),
    ("service.beta.kubernetes.io/scw-loadbalancer-certificate-ids", Refuses::All, TLS),
    ("service.beta.kubernetes.io/scw-loadbalancer-http-backend-tls", Refuses::AllBut("false"), TLS_BEHIND),
    ("load-balancer.hetzner.cloud/http-certificates", Refuses::All, TLS),
    ("load-balancer.hetzner.cloud/certificate-type", Refuses::Only(&["managed"]), TLS),
    ("load-balancer.hetzner.cloud/http-managed-certificate-domains", Refuses::All, TLS),
    ("service.beta.kubernetes.io/linode-loadbalancer-port-*", Refuses::Key("tls-secret-name", ""), TLS),
    ("service.beta.kubernetes.io/linode-loadbalancer-firewall-id", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/linode-loadbalancer-firewall-acl", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/vultr-loadbalancer-ssl", Refuses::All, TLS),
    ("service.beta.kubernetes.io/vultr-loadbalancer-auto-ssl", Refuses::All, TLS),
    ("service.beta.kubernetes.io/vultr-loadbalancer-firewall-rules", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/vultr-loadbalancer-firewall-rules-cm", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/azure-allowed-ip-ranges", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/azure-allowed-service-tags", Refuses::All, CLIENTS),
    (
        "service.beta.kubernetes.io/azure-deny-all-except-load-balancer-source-ranges",
        Refuses::AllBut("false"),
        "source ranges deny all others here anyway; remove it",
    ),
    ("service.beta.kubernetes.io/azure-pls-proxy-protocol", Refuses::AllBut("false"), PRIVATE_LINK),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-xforwardedfor-proto", Refuses::AllBut("off"), HEADERS),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-xforwardedfor-slbport", Refuses::AllBut("off"), HEADERS),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-xforwardedfor-clientsrcport", Refuses::AllBut("off"), HEADERS),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-acl-id", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-security-group-ids", Refuses::All, CLIENTS),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-cert-id", Refuses::All, TLS),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-cacert-id", Refuses::All, TLS),
    ("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-cacert", Refuses::AllBut("off"), TLS),
    ("service.beta.kubernetes.io/oci-load-balancer-ssl-ports", Refuses::All, TLS),
    ("service.beta.kubernetes.io/oci-load-balancer-tls-secret", Refuses::All, TLS),
    ("service.beta.kubernetes.io/oci-load-balancer-tls-backendset-secret", Refuses::All, TLS_BEHIND),
    ("oci.oraclecloud.com/oci-load-balancer-rule-sets", Refuses::All, "rules for requests are not applied; remove it"),
    ("oci.oraclecloud.com/oci-network-security-groups", Refuses::All, CLIENTS),
    ("oci-network-load-balancer.oraclecloud.com/oci-network-security-groups", Refuses::All, CLIENTS),
];

/// Advice for an annotation that must not be ignored.
fn refused(key: &str, value: &str) -> Option<&'static str> {
    let value = value.trim();
    let is_key = |theirs: &str| theirs.strip_suffix('*').map_or(theirs == key, |beginning| key.starts_with(beginning));
    let changes = |refuses: &Refuses| match refuses {
        Refuses::All => true,
        Refuses::AllBut(usual) => !value.eq_ignore_ascii_case(usual),
        Refuses::Only(words) => words.iter().any(|word| value.eq_ignore_ascii_case(word)),
        Refuses::Key(name, usual) => has_other(value, name, usual),
    };
    if value.is_empty() {
        return None;
    }
    REFUSED.iter().find(|(theirs, refuses, _)| is_key(theirs) && changes(refuses)).map(|(.., advice)| *advice)
}

/// The name of an annotation in the tables, which have one name of each.
fn present_name(key: &str) -> Cow<'_, str> {
    match key.strip_prefix(ALIBABA_OLD) {
        Some(name) => Cow::Owned(format!("service.beta.kubernetes.io/alibaba-cloud-loadbalancer-{name}")),
        None => Cow::Borrowed(key),
    }
}

/// Whether a JSON object has another value than `usual` for `key`. A text that is no JSON object counts if it has the key,
/// because its product may understand it.
fn has_other(object: &str, key: &str, usual: &str) -> bool {
    match serde_json::from_str::<BTreeMap<String, Value>>(object) {
        Ok(object) => match object.get(key) {
            None | Some(Value::Null) => false,
            Some(Value::String(word)) => !word.trim().is_empty() && !word.trim().eq_ignore_ascii_case(usual),
            Some(_) => true,
        },
        Err(_) => object.contains(key),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(key: &str, value: &str) -> Result<Vec<String>, String> {
        let all = [(key.to_owned(), value.to_owned())].into();
        let texts = |remarks: Vec<Remark>| remarks.into_iter().map(|remark| remark.text).collect();
        remarks(&all).map(texts).map_err(|error| error.to_string())
    }

    #[test]
    fn annotations_that_are_read_or_written_by_controllers_get_no_remark() {
        for key in READ.iter().chain(&WRITTEN_BACK).chain(&["example.com/other", "sluice.dev/mode"]) {
            assert_eq!(of(key, "x"), Ok(Vec::new()), "{key}");
        }
    }

    #[test]
    fn every_other_annotation_of_other_products_gets_a_remark_with_its_replacement() {
        for family in FAMILIES {
            let remarks = of(&format!("{family}something"), "x").unwrap();
            assert!(remarks.len() == 1 && remarks[0].contains(family) && remarks[0].ends_with("no effect here"), "{remarks:?}");
        }
        assert!(of("loxilb.io/timeout", "600").unwrap()[0].ends_with("use sluice.dev/idle-timeout"));
        for (theirs, ours) in EQUIVALENTS {
            let remarks = of(theirs, "x").unwrap();
            assert!(remarks[0].ends_with(&format!("use sluice.dev/{ours}")), "{remarks:?}");
        }
    }

    /// A row for each annotation that is refused: a value that changes something, and one that does not.
    #[test]
    fn annotations_that_change_who_may_connect_or_what_a_backend_receives_are_refused() {
        for (theirs, refuses, advice) in REFUSED {
            let key = theirs.replace('*', "443");
            let (refused, harmless) = match refuses {
                Refuses::All => ("arn:aws:acm:1", ""),
                Refuses::AllBut(usual) => ("yes", usual),
                Refuses::Only(words) => (words[0], "x"),
                Refuses::Key(..) => (r#"{"tls-secret-name": "a"}"#, r#"{"tls-secret-name": ""}"#),
            };
            let error = of(&key, refused).unwrap_err();
            assert!(error.contains(&key) && error.contains(advice), "{error}");
            for value in [harmless, " "] {
                assert!(of(&key, value).is_ok(), "{key} {value}");
            }
        }
        assert!(of("service.cilium.io/src-ranges-policy", "deny").is_err());
        let linode = |value| of("service.beta.kubernetes.io/linode-loadbalancer-port-443", value).is_ok();
        let harmless = [r#"{"tls-secret-name": " "}"#, r#"{"tls-secret-name":null}"#, r#"{"x": "tls-secret-name"}"#];
        assert!(harmless.map(linode) == [true; 3]);
        assert!([r#"{"tls-secret-name": "a""#, r#"{"tls-secret-name": 2}"#].map(linode) == [false; 2]);
        let keys: std::collections::BTreeSet<_> = REFUSED.iter().map(|(key, ..)| *key).collect();
        assert_eq!(keys.len(), REFUSED.len());
        assert!(
            keys.iter().all(|key| FAMILIES.iter().any(|family| key.starts_with(family))),
            "an annotation that is never looked at"
        );
    }

    #[test]
    fn what_is_read_of_an_annotation_for_the_proxy_protocol_has_no_remark() {
        let attributes = "service.beta.kubernetes.io/aws-load-balancer-target-group-attributes";
        for key in [attributes, "service.beta.kubernetes.io/aws-load-balancer-target-group-attributes.443"] {
            assert_eq!(of(key, "proxy_protocol_v2.enabled=true"), Ok(Vec::new()), "{key}");
        }
        let both = of(attributes, "proxy_protocol_v2.enabled=true,stickiness.enabled=true").unwrap();
        assert!(both[0].contains("no effect here but for its PROXY protocol; use sluice.dev/drain-timeout"), "{both:?}");
        assert_eq!(of("load-balancer.hetzner.cloud/uses-proxyprotocol", "true"), Ok(Vec::new()));
        let linode = |value| of("service.beta.kubernetes.io/linode-loadbalancer-port-443", value).unwrap();
        assert_eq!(linode(r#"{"proxy-protocol": "v1"}"#), [""; 0]);
        assert!(linode(r#"{"protocol": "http", "proxy-protocol": "v1"}"#)[0].contains("but for its PROXY protocol"));
        assert!(linode(r#"{"protocol": "http"}"#)[0].ends_with("no effect here"));
    }

    /// The values by which the controllers of loxilb, Hetzner and AWS switch a feature off and on.
    #[test]
    fn values_have_the_meaning_that_their_products_give_them() {
        for (key, on, off) in [
            ("loxilb.io/mtls-frontend-mode", &["optional", "required"][..], "disabled"),
            ("load-balancer.hetzner.cloud/certificate-type", &["managed"], "uploaded"),
            ("service.beta.kubernetes.io/aws-load-balancer-backend-protocol", &["ssl", "https"], "tcp"),
        ] {
            assert!(on.iter().all(|value| of(key, value).is_err()), "{key}");
            assert!(of(key, off).is_ok(), "{key}");
        }
    }

    #[test]
    fn alibabas_old_prefix_means_the_same() {
        let old = |name: &str| format!("{ALIBABA_OLD}{name}");
        let error = of(&old("acl-id"), "acl-1").unwrap_err();
        assert!(error.contains(&old("acl-id")) && error.contains(CLIENTS), "{error}");
        assert!(asks_for_internal(&[(old("address-type"), "intranet".to_owned())].into()));
        assert_eq!(of(&old("address-type"), "internet"), Ok(Vec::new()));
        assert!(of(&old("bandwidth"), "5").unwrap()[0].contains(&old("bandwidth")));
    }

    #[test]
    fn annotations_that_ask_for_an_internal_load_balancer_do_so_here() {
        let asks = |key: &str, value: &str| asks_for_internal(&[(key.to_owned(), value.to_owned())].into());
        for (key, value, public) in INTERNAL {
            assert!(asks(key, value) && asks(key, &value.to_ascii_lowercase()), "{key}");
            assert!(!asks(key, public) && !asks(key, "yes"), "{key}");
            for known in [value, public, " "] {
                assert_eq!(of(key, known), Ok(Vec::new()));
            }
            let remarks = of(key, "yes").unwrap();
            assert!(remarks.len() == 1 && remarks[0].contains("\"yes\"") && remarks[0].contains(value), "{remarks:?}");
        }
    }
}
