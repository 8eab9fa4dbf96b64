//! What Services say to the other product, and whether we read it.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Service;
use proto::limits::LOAD_BALANCER_CLASS;

use super::objects::Found;
use super::{ConvertError, Product};

/// Prefixes of annotations that the product reads or writes.
const fn prefixes(product: Product) -> &'static [&'static str] {
    match product {
        Product::Metallb => &["metallb.io/", "metallb.universe.tf/"],
        Product::Cilium => &["lbipam.cilium.io/", "io.cilium/lb-ipam-", "service.cilium.io/"],
    }
}

/// What to do about an annotation that has a prefix of [`prefixes`]; nothing where we read it, or nobody needs it.
fn advice(key: &str) -> Option<&'static str> {
    let ending = key.split_once('/').map_or(key, |(_, ending)| ending);
    Some(match key {
        "lbipam.cilium.io/ips" | "lbipam.cilium.io/sharing-key" => return None,
        // Ports of one address are told apart here whatever pods stand behind them.
        "lbipam.cilium.io/sharing-permit-different-pods" => return None,
        "lbipam.cilium.io/sharing-cross-namespace" => "write `sluice.dev/sharing-namespaces` with the same value",
        "io.cilium/lb-ipam-ips" => "write `sluice.dev/addresses` with the same value",
        "io.cilium/lb-ipam-sharing-key" => "write `sluice.dev/sharing-key` with the same value",
        "io.cilium/lb-ipam-sharing-cross-namespace" => "write `sluice.dev/sharing-namespaces` with the same value",
        "service.cilium.io/lb-algorithm" => "`sluice.dev/scheduler` chooses the scheduler; `maglev` is the default",
        "service.cilium.io/forwarding-mode" => {
            "no effect: it is about nodes; `sluice.dev/mode` says how gateways deliver, and `dsr` there needs nodes on the link"
        }
        "service.cilium.io/src-ranges-policy" => {
            "no effect: `loadBalancerSourceRanges` always lists who may connect; a list of who may not has no equivalent"
        }
        _ if key.starts_with("metallb.") => match ending {
            "loadBalancerIPs" | "address-pool" | "allow-shared-ip" => return None,
            // Written by MetalLB.
            "ip-allocated-from-pool" => return None,
            _ => "no equivalent",
        },
        _ => "no equivalent",
    })
}

/// Notes about the Services among `found`.
pub(super) fn notes(product: Product, found: &[Found], notes: &mut Vec<String>) -> Result<(), ConvertError> {
    let mut without_class = Vec::new();
    let mut sharers: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for object in found.iter().filter(|object| object.is("", "Service")) {
        let service: Service = object.typed()?;
        let spec = service.spec.unwrap_or_default();
        if spec.type_.as_deref() != Some("LoadBalancer") {
            continue;
        }
        let title = object.title();
        for (key, value) in service.metadata.annotations.iter().flatten() {
            let is_theirs = prefixes(product).iter().any(|prefix| key.starts_with(prefix));
            if let Some(advice) = advice(key).filter(|_| is_theirs) {
                notes.push(format!("{}: {title}: annotation {key}: {advice}", object.place));
            }
            if is_theirs && key.ends_with("/allow-shared-ip") {
                let namespace = service.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
                sharers.entry(value.clone()).or_default().insert(namespace);
            }
        }
        match spec.load_balancer_class {
            None => without_class.push(title),
            Some(class) if class == LOAD_BALANCER_CLASS => {}
            Some(class) => notes.push(format!(
                "{}: {title}: class {class} stays while the type is LoadBalancer: either `kubernetes.loadBalancerClass: {class}` once \
                 nobody else serves that class, or type ClusterIP and back to LoadBalancer with class {LOAD_BALANCER_CLASS}, which gives \
                 the address up in between: ask for it by `sluice.dev/addresses` first",
                object.place
            )),
        }
    }
    for (key, namespaces) in sharers.into_iter().filter(|(_, namespaces)| namespaces.len() > 1) {
        let namespaces = namespaces.into_iter().collect::<Vec<_>>().join(", ");
        notes.push(format!(
            "Services of {namespaces} share an address under the key {key:?}: give the pool `allowCrossNamespaceSharing: true`"
        ));
    }
    if let [first, ..] = without_class.as_slice() {
        notes.push(format!(
            "{} Services of type LoadBalancer have no class ({first}, ...): `kubernetes.claimClassless` takes them over as they are; \
             a class cannot be added to them",
            without_class.len()
        ));
    }
    Ok(())
}
