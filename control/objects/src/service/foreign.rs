//! Annotations of other load balancers that sluice does not read. Owners get a remark, so that no user who
//! migrates relies on an annotation without effect.
//!
//! Invariant: every annotation with a prefix listed here is either read elsewhere (`READ`), written by its own
//! controller (`WRITTEN_BACK`), refused because it changes who may connect or what a backend receives, or named in a
//! remark.

use std::collections::BTreeMap;

use super::error::SpecError;
use crate::note::{Cause, Remark};

/// Prefixes of the annotations of other products.
const FAMILIES: [&str; 12] = [
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
];
/// Annotations that the module `annotations` reads, refuses or reports.
pub(super) const READ: [&str; 28] = [
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
    "service.beta.kubernetes.io/aws-load-balancer-proxy-protocol",
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
        if let Some(remedy) = refused(key, value) {
            return Err(SpecError::unsupported(&format!("annotation {key}"), value, remedy));
        }
        if READ.contains(&key.as_str()) || WRITTEN_BACK.contains(&key.as_str()) {
            continue;
        }
        let advice = EQUIVALENTS.iter().find(|(theirs, _)| theirs == key).map(|(_, ours)| format!("; use sluice.dev/{ours}"));
        let text = format!("annotation {key} has no effect here{}", advice.unwrap_or_default());
        remarks.push(Remark::new(Cause::AnnotationIgnored, text));
    }
    Ok(remarks)
}

/// Advice for an annotation that must not be ignored.
fn refused(key: &str, value: &str) -> Option<&'static str> {
    let value = value.trim();
    let aws = key.strip_prefix("service.beta.kubernetes.io/aws-load-balancer-");
    match (key, aws) {
        (_, Some("ssl-cert" | "ssl-ports")) if !value.is_empty() => Some("let the backends end TLS, and remove it"),
        (_, Some("security-groups" | "security-group-prefix-lists")) if !value.is_empty() => {
            Some("say who may connect by spec.loadBalancerSourceRanges, and remove it")
        }
        (_, Some("target-group-attributes")) if says_true(value, "proxy_protocol_v2.enabled") => Some("remove the attribute"),
        ("service.cilium.io/src-ranges-policy", _) if value != "allow" => Some("source ranges only allow here; remove it"),
        _ => None,
    }
}

/// Whether a list `a=b,c=d` contains `key=true`.
fn says_true(list: &str, key: &str) -> bool {
    let mut pairs = list.split(',').filter_map(|pair| pair.split_once('='));
    pairs.any(|(name, value)| name.trim() == key && value.trim().eq_ignore_ascii_case("true"))
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

    #[test]
    fn annotations_that_change_who_may_connect_or_what_a_backend_receives_are_refused() {
        let aws = |name: &str| format!("service.beta.kubernetes.io/aws-load-balancer-{name}");
        let rows = [
            (aws("ssl-cert"), "arn:aws:acm:1", true),
            (aws("ssl-ports"), "443", true),
            (aws("ssl-cert"), " ", false),
            (aws("security-groups"), "sg-1", true),
            (aws("target-group-attributes"), "a.b=c, proxy_protocol_v2.enabled=True", true),
            (aws("target-group-attributes"), "proxy_protocol_v2.enabled=false", false),
            ("service.cilium.io/src-ranges-policy".to_owned(), "deny", true),
            ("service.cilium.io/src-ranges-policy".to_owned(), "allow", false),
        ];
        for (key, value, expected) in rows {
            let answer = of(&key, value);
            assert_eq!(answer.is_err(), expected, "{key} {value}: {answer:?}");
            assert!(answer.err().is_none_or(|error| error.contains(&key) && error.contains(value)));
        }
    }
}
