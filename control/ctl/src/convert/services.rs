//! Annotations of Services for the other product, and whether sluice reads them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Service;
use proto::limits::LOAD_BALANCER_CLASS;

use super::input::{ConvertError, Found};
use objects::service::{foreign, proxy_headers};

/// MetalLB's sharing key, which applies to all namespaces.
const SHARING: [&str; 2] = ["metallb.io/allow-shared-ip", "metallb.universe.tf/allow-shared-ip"];

/// Notes about Services among `found`.
pub(super) fn notes(found: &[Found], notes: &mut Vec<String>) -> Result<(), ConvertError> {
    let (mut without_class, mut local) = (Vec::new(), Vec::new());
    let mut sharers: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for object in found.iter().filter(|object| object.is("", "Service")) {
        let service: Service = object.typed()?;
        let spec = service.spec.unwrap_or_default();
        if spec.type_.as_deref() != Some("LoadBalancer") {
            continue;
        }
        let annotations = service.metadata.annotations.unwrap_or_default();
        match foreign::remarks(&annotations) {
            Ok(remarks) => {
                notes.extend(remarks.iter().map(|remark| object.note(format_args!(": {}", remark.text))));
                let headers = proxy_headers(&annotations, &spec);
                notes.extend(headers.err().map(|refusal| object.note(format_args!(" will not be served: {refusal}"))));
            }
            Err(refusal) => notes.push(object.note(format_args!(" will not be served: {refusal}"))),
        }
        if let Some(key) = SHARING.iter().find_map(|name| annotations.get(*name)) {
            let namespace = service.metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
            sharers.entry(key.clone()).or_default().insert(namespace);
        }
        if spec.external_traffic_policy.as_deref() == Some("Local") {
            local.push(object.title());
        }
        match spec.load_balancer_class {
            None => without_class.push(object.title()),
            Some(class) if class == LOAD_BALANCER_CLASS => {}
            Some(class) => notes.push(object.note(format_args!(
                ": class {class} stays while the type is LoadBalancer: either `kubernetes.loadBalancerClass: {class}` once \
                 no other program serves that class, and the same `loadBalancerClass` on the pools, or type ClusterIP and \
                 back to LoadBalancer with class {LOAD_BALANCER_CLASS}, which gives the address up in between: ask for it by \
                 `sluice.dev/addresses` first"
            ))),
        }
    }
    for (key, namespaces) in sharers.into_iter().filter(|(_, namespaces)| namespaces.len() > 1) {
        let namespaces = namespaces.into_iter().collect::<Vec<_>>().join(", ");
        notes.push(format!(
            "Services of {namespaces} share an address under the key {key:?}: give the pool `allowCrossNamespaceSharing: true`"
        ));
    }
    if let [first, ..] = local.as_slice() {
        notes.push(format!(
            "{} Services of type LoadBalancer have externalTrafficPolicy: Local ({first}, ...): in mode nat, the default, their \
             backends see an address of the gateway instead of the client's. Set annotation sluice.dev/mode, or defaults.mode, \
             to dnat (replies of backends must pass the gateway), or to dsr, ipip or gue (backends must take packets for the VIP), or \
             let sluice.dev/proxy-protocol send it in a PROXY header (backends must expect one)",
            local.len()
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
