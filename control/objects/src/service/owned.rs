//! A Service object without its specification, and the parts of it that are ours: addresses in its status, conditions,
//! the finalizer.
//!
//! Invariant: conditions and finalizers of other controllers are never treated as ours, and so never changed.
//! Deliberately not here: the desired content (`status`), and when parts are removed (the controller's
//! `status::life`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{LoadBalancerIngress, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use proto::ServiceName;
use proto::limits::{FIELD_MANAGER, FINALIZER, GATEWAY_GROUP_ANNOTATION, GROUP_ANNOTATION};

use crate::status::{Condition, ConditionType, Ingress, IpMode, PortStatus};

/// Characters that are read of the name of a group: more than a group may have.
const GROUP_CHARS_READ: usize = 80;

/// The parts of an object that are ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnedParts {
    /// `status.loadBalancer.ingress`, without entries that have no address.
    pub ingress: Vec<Ingress>,
    /// Number of entries without an address, a host name for example, which sluice never writes.
    pub ingress_without_ip: usize,
    /// Our conditions.
    pub conditions: BTreeMap<ConditionType, Condition>,
    /// Whether our finalizer is there.
    pub finalizer: bool,
    /// The group of the installation that wrote them; `None` for any installation of an older version.
    pub group: Option<String>,
}

impl OwnedParts {
    /// Parses an object.
    #[must_use]
    pub fn of(service: &Service) -> Self {
        let finalizers = service.metadata.finalizers.as_deref().unwrap_or_default();
        let (ingress, ingress_without_ip) = ingress(service);
        Self {
            ingress,
            ingress_without_ip,
            conditions: conditions(service),
            finalizer: finalizers.iter().any(|name| name == FINALIZER),
            group: service.metadata.annotations.as_ref().and_then(|annotations| annotations.get(GROUP_ANNOTATION)).cloned(),
        }
    }

    /// Whether the installation of another group wrote them.
    #[must_use]
    pub fn is_of_another(&self, group: &str) -> bool {
        self.group.as_deref().is_some_and(|named| named != group)
    }

    /// Whether both have the same `status.loadBalancer.ingress`, as far as sluice writes it.
    #[must_use]
    pub fn has_ingress_of(&self, other: &Self) -> bool {
        self.ingress == other.ingress && self.ingress_without_ip == other.ingress_without_ip
    }

    /// Whether the object has anything that only sluice writes.
    #[must_use]
    pub fn has_marks(&self) -> bool {
        self.finalizer || !self.conditions.is_empty() || self.group.is_some()
    }
}

/// The group of gateways that a Service asks for. A name that is too long for a group is cut off: it names none.
fn gateway_group(service: &Service) -> Option<String> {
    let text = service.metadata.annotations.as_ref()?.get(GATEWAY_GROUP_ANNOTATION)?.trim();
    Some(text.chars().take(GROUP_CHARS_READ).collect()).filter(|group: &String| !group.is_empty())
}

/// The addresses in the status, and the number of entries without one. The API server's default for `ipMode` is VIP.
fn ingress(service: &Service) -> (Vec<Ingress>, usize) {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let entries = status.and_then(|balancer| balancer.ingress.as_deref()).unwrap_or_default();
    let port = |port: &k8s_openapi::api::core::v1::PortStatus| {
        let error = port.error.clone().map(Cow::Owned);
        Some(PortStatus { port: u16::try_from(port.port).ok()?, protocol: port.protocol.parse().ok()?, error })
    };
    let read = |entry: &LoadBalancerIngress| {
        let ip_mode = if entry.ip_mode.as_deref() == Some("Proxy") { IpMode::Proxy } else { IpMode::Vip };
        let ports = entry.ports.iter().flatten().filter_map(port).collect();
        Some(Ingress { ip: entry.ip.as_deref()?.parse().ok()?, ip_mode, ports })
    };
    let addresses: Vec<Ingress> = entries.iter().filter_map(read).collect();
    let without_ip = entries.len() - addresses.len();
    (addresses, without_ip)
}

fn conditions(service: &Service) -> BTreeMap<ConditionType, Condition> {
    let list = service.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let read = |kind: ConditionType| {
        let found = list.iter().find(|condition| condition.type_ == kind.as_str())?;
        let condition = Condition {
            holds: found.status == "True",
            reason: Cow::Owned(found.reason.clone()),
            message: Cow::Owned(found.message.clone()),
            since: Some(found.last_transition_time.0),
        };
        Some((kind, condition))
    };
    ConditionType::ALL.into_iter().filter_map(read).collect()
}

/// Who wrote an object, by its managed fields.
#[derive(Debug, Default, PartialEq, Eq)]
struct Writers {
    /// Whether our field manager wrote the addresses of the status. A condition of ours beside foreign addresses proves
    /// nothing.
    status_is_ours: bool,
    /// Another manager of the status: the one that wrote the addresses, else the one that wrote last.
    of_status: Option<String>,
    /// Another manager of the rest, the one that wrote last: who removes a field leaves no other trace.
    of_object: Option<String>,
}

/// The writers of an object.
#[must_use]
fn writers(service: &Service) -> Writers {
    let time = |entry: &ManagedFieldsEntry| entry.time.as_ref().map(|time| time.0);
    let is_ours = |entry: &&ManagedFieldsEntry| entry.manager.as_deref() == Some(FIELD_MANAGER);
    let is_of_status = |entry: &&ManagedFieldsEntry| entry.subresource.as_deref() == Some("status");
    let (ours, others): (Vec<_>, Vec<_>) = service.metadata.managed_fields.iter().flatten().partition(is_ours);
    let (of_status, of_object): (Vec<_>, Vec<_>) = others.into_iter().partition(is_of_status);
    let of_status = of_status.into_iter().max_by_key(|entry| (wrote_addresses(entry), time(entry)));
    let of_object = of_object.into_iter().max_by_key(|entry| time(entry));
    Writers {
        status_is_ours: ours.iter().filter(|entry| is_of_status(entry)).any(|entry| wrote_addresses(entry)),
        of_status: of_status.and_then(|entry| entry.manager.clone()),
        of_object: of_object.and_then(|entry| entry.manager.clone()),
    }
}

/// The list of addresses is atomic: its only writer is the last manager that changed it.
fn wrote_addresses(entry: &ManagedFieldsEntry) -> bool {
    entry.fields_v1.as_ref().is_some_and(|fields| fields.0.pointer("/f:status/f:loadBalancer/f:ingress").is_some())
}

/// A Service object without its specification: its identity, whose it may be, and the parts of it that are ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceObject {
    /// Its name.
    pub name: ServiceName,
    /// Guard of a write; empty for manifests.
    pub uid: String,
    /// Guard of a write; empty for manifests.
    pub resource_version: String,
    /// Creation time, seconds since 1970; none for manifests.
    pub created_s: Option<i64>,
    /// `spec.loadBalancerClass`; the server removes it together with the type.
    pub class: Option<String>,
    /// The group of gateways that it asks for.
    pub gateway_group: Option<String>,
    /// Whether its type is `LoadBalancer`; only then may a status contain addresses.
    pub is_load_balancer: bool,
    /// Whether it is being deleted.
    pub is_deleted: bool,
    /// Addresses in its status, conditions, finalizer and group.
    pub held: OwnedParts,
    /// Whether our field manager wrote the addresses of its status.
    pub status_is_ours: bool,
    /// Another field manager of its status: the one that wrote the addresses, else the one that wrote last.
    pub foreign_manager: Option<String>,
    /// Another field manager of the rest of the object, the one that wrote last.
    pub object_manager: Option<String>,
}

impl ServiceObject {
    /// Reads an object; `None` if it has no name.
    #[must_use]
    pub fn of(service: &Service) -> Option<Self> {
        let metadata = &service.metadata;
        let fields = service.spec.as_ref();
        let Writers { status_is_ours, of_status: foreign_manager, of_object: object_manager } = writers(service);
        Some(Self {
            name: ServiceName::new(metadata.namespace.as_deref().unwrap_or("default"), metadata.name.as_deref()?),
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            created_s: metadata.creation_timestamp.as_ref().map(|time| time.0.as_second()),
            class: fields.and_then(|fields| fields.load_balancer_class.clone()),
            gateway_group: gateway_group(service),
            is_load_balancer: fields.and_then(|fields| fields.type_.as_deref()) == Some("LoadBalancer"),
            is_deleted: metadata.deletion_timestamp.is_some(),
            held: OwnedParts::of(service),
            status_is_ours,
            foreign_manager,
            object_manager,
        })
    }

    /// The same of a Service in a cluster that is no candidate for a load balancer, because it is being deleted or has
    /// another type, but still has parts of ours.
    #[must_use]
    pub fn left_over(service: &Service) -> Option<Self> {
        let is_left = |one: &Self| {
            let is_ours = one.held.has_marks() || (!one.held.ingress.is_empty() && one.status_is_ours);
            let is_candidate = one.is_load_balancer && !one.is_deleted;
            let is_in_cluster = !(one.uid.is_empty() || one.resource_version.is_empty());
            is_ours && is_in_cluster && !is_candidate
        };
        Self::of(service).filter(is_left)
    }

    /// Whether its addresses are not available to others: it is being deleted and still has our finalizer, so gateways
    /// may still forward for it.
    #[must_use]
    pub fn holds_addresses(&self) -> bool {
        self.is_deleted && self.is_load_balancer && self.held.finalizer && !self.held.ingress.is_empty()
    }

    /// Whether another program wrote the addresses of its status.
    #[must_use]
    pub const fn is_status_foreign(&self) -> bool {
        !self.status_is_ours && !self.held.ingress.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(kind: &str, metadata: &Value, conditions: &[&str]) -> Service {
        let mut object = json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u", "resourceVersion": "7"},
            "spec": {"type": kind}, "status": {"loadBalancer": {}}});
        for (key, value) in metadata.as_object().unwrap() {
            object["metadata"][key] = value.clone();
        }
        let condition = |kind: &&str| json!({"type": kind, "status": "True", "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        object["status"]["conditions"] = conditions.iter().map(condition).collect();
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn only_our_parts_are_read() {
        let finalizers = json!({"finalizers": ["example.com/other", "sluice.dev/load-balancer-cleanup"]});
        let held = OwnedParts::of(&service("LoadBalancer", &finalizers, &["sluice.dev/Programmed", "example.com/Ready"]));
        assert!(held.finalizer && held.has_marks());
        assert_eq!(held.conditions.keys().collect::<Vec<_>>(), [&ConditionType::Programmed]);
        let held =
            OwnedParts::of(&service("LoadBalancer", &json!({"finalizers": ["example.com/other"]}), &["example.com/Ready"]));
        assert_eq!(held, OwnedParts::default());
    }

    #[test]
    fn entries_without_an_address_are_counted() {
        let mut object = service("LoadBalancer", &json!({}), &[]);
        let list = json!([{"hostname": "lb.example.com"}, {"ip": "192.0.2.1", "ipMode": "VIP"}, {}]);
        object.status.as_mut().unwrap().load_balancer = Some(serde_json::from_value(json!({"ingress": list})).unwrap());
        let held = OwnedParts::of(&object);
        assert_eq!((&held.ingress[..], held.ingress_without_ip), (&[Ingress::new([192, 0, 2, 1].into(), IpMode::Vip)][..], 2));
        let ours_alone = OwnedParts { ingress_without_ip: 0, ..held.clone() };
        assert!(held.has_ingress_of(&held) && !held.has_ingress_of(&ours_alone));
    }

    #[test]
    fn parts_left_on_a_deleted_service_or_one_of_another_type_are_found() {
        let ours = json!({"finalizers": ["sluice.dev/load-balancer-cleanup"]});
        let deleted = json!({"finalizers": ["sluice.dev/load-balancer-cleanup"], "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(ServiceObject::left_over(&service("LoadBalancer", &ours, &[])), None, "it is a candidate");
        assert!(ServiceObject::left_over(&service("LoadBalancer", &deleted, &[])).unwrap().is_deleted);
        assert!(ServiceObject::left_over(&service("ClusterIP", &json!({}), &["sluice.dev/Programmed"])).is_some());
        assert!(ServiceObject::left_over(&service("NodePort", &ours, &[])).is_some());
        assert_eq!(ServiceObject::left_over(&service("ClusterIP", &json!({}), &["example.com/Ready"])), None);
    }
}
