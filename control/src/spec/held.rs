//! What of a Service's object is ours: addresses in its status, conditions, the finalizer; and Services that are no
//! candidates any more and still hold some of it.
//!
//! Invariant: conditions and finalizers of others are never read as ours, and so never changed.
//! Deliberately not here: what the object should hold (`status`), and when something is taken from it (`status::leaving`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use k8s_openapi::jiff::Timestamp;
use proto::ServiceName;
use proto::limits::{FIELD_MANAGER, FINALIZER, GROUP_ANNOTATION};

use super::service::{Candidate, ingress};
use crate::source::Ingress;

/// The conditions that sluice writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ConditionType {
    /// The Service has every address that it needs.
    AddressAssigned,
    /// Gateways forward for it.
    Programmed,
    /// At least one gateway finds at least one backend healthy.
    BackendsHealthy,
}

impl ConditionType {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::AddressAssigned, Self::Programmed, Self::BackendsHealthy];

    /// As it stands in `type`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AddressAssigned => "sluice.dev/AddressAssigned",
            Self::Programmed => "sluice.dev/Programmed",
            Self::BackendsHealthy => "sluice.dev/BackendsHealthy",
        }
    }
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Whether it holds. What is neither true nor false is not said.
    pub holds: bool,
    /// One word.
    pub reason: Cow<'static, str>,
    /// One sentence, but for the names of pools and of gateways that refuse it the same for every Service: what is particular to
    /// one is told by an Event.
    pub message: Cow<'static, str>,
    /// Since when `holds` is as it is; none: since it is written.
    pub since: Option<Timestamp>,
}

impl Condition {
    /// A condition as it should be from now on.
    #[must_use]
    pub const fn new(holds: bool, reason: &'static str, message: &'static str) -> Self {
        Self { holds, reason: Cow::Borrowed(reason), message: Cow::Borrowed(message), since: None }
    }

    /// The same with a sentence that names something.
    #[must_use]
    pub const fn naming(holds: bool, reason: &'static str, message: String) -> Self {
        Self { holds, reason: Cow::Borrowed(reason), message: Cow::Owned(message), since: None }
    }

    /// Whether both say the same, whenever they began to.
    #[must_use]
    pub fn says_the_same(&self, other: &Self) -> bool {
        self.holds == other.holds && self.reason == other.reason && self.message == other.message
    }
}

/// What of an object is ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// `status.loadBalancer.ingress`, entries without an address left out.
    pub ingress: Vec<Ingress>,
    /// Our conditions.
    pub conditions: BTreeMap<ConditionType, Condition>,
    /// Whether our finalizer is there.
    pub finalizer: bool,
    /// The group of the installation that wrote all this; none: an older version of any.
    pub group: Option<String>,
}

impl Held {
    /// Reads an object.
    #[must_use]
    pub fn of(service: &Service) -> Self {
        let finalizers = service.metadata.finalizers.as_deref().unwrap_or_default();
        Self {
            ingress: ingress(service),
            conditions: conditions(service),
            finalizer: finalizers.iter().any(|name| name == FINALIZER),
            group: service.metadata.annotations.as_ref().and_then(|annotations| annotations.get(GROUP_ANNOTATION)).cloned(),
        }
    }

    /// Whether the installation of another group wrote it.
    #[must_use]
    pub fn is_of_another(&self, group: &str) -> bool {
        self.group.as_deref().is_some_and(|named| named != group)
    }

    /// Whether the object carries anything that only we write.
    #[must_use]
    pub fn has_marks(&self) -> bool {
        self.finalizer || !self.conditions.is_empty() || self.group.is_some()
    }
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

/// Whether our field manager wrote the addresses of the status: a condition of ours beside addresses of somebody else proves
/// nothing. And another manager of the status: the one that wrote the addresses, else the one that wrote last.
#[must_use]
pub(super) fn writers(service: &Service) -> (bool, Option<String>) {
    let entries = service.metadata.managed_fields.iter().flatten();
    let of_status = entries.filter(|entry| entry.subresource.as_deref() == Some("status"));
    let (ours, others): (Vec<_>, Vec<_>) = of_status.partition(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER));
    let last = others.into_iter().max_by_key(|entry| (wrote_addresses(entry), entry.time.as_ref().map(|time| time.0)));
    (ours.into_iter().any(wrote_addresses), last.and_then(|entry| entry.manager.clone()))
}

/// The list of addresses is atomic: it has one writer, the last that changed it.
fn wrote_addresses(entry: &ManagedFieldsEntry) -> bool {
    entry.fields_v1.as_ref().is_some_and(|fields| fields.0.pointer("/f:status/f:loadBalancer/f:ingress").is_some())
}

/// A Service that is no candidate, because it is being deleted or of another type, and still holds what is ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// Its name.
    pub name: ServiceName,
    /// Guard of a write.
    pub uid: String,
    /// Guard of a write.
    pub resource_version: String,
    /// `spec.loadBalancerClass`; the server takes it away together with the type.
    pub class: Option<String>,
    /// Whether its type is `LoadBalancer`: only then may a status hold addresses.
    pub is_load_balancer: bool,
    /// Whether it is being deleted.
    pub is_deleted: bool,
    /// Creation time, seconds since 1970.
    pub created_s: Option<i64>,
    /// Whether our field manager wrote its addresses.
    pub status_is_ours: bool,
    /// What it holds.
    pub held: Held,
}

impl Leftover {
    /// Reads an object, if there is something of ours on it and it asks for no load balancer any more.
    #[must_use]
    pub fn of(service: &Service) -> Option<Self> {
        let metadata = &service.metadata;
        let fields = service.spec.as_ref();
        let is_load_balancer = fields.and_then(|fields| fields.type_.as_deref()) == Some("LoadBalancer");
        let is_deleted = metadata.deletion_timestamp.is_some();
        let held = Held::of(service);
        let status_is_ours = writers(service).0;
        let is_ours = held.has_marks() || (!held.ingress.is_empty() && status_is_ours);
        if !is_ours || (is_load_balancer && !is_deleted) {
            return None;
        }
        Some(Self {
            name: ServiceName::new(metadata.namespace.as_deref().unwrap_or("default"), metadata.name.as_deref()?),
            uid: metadata.uid.clone()?,
            resource_version: metadata.resource_version.clone()?,
            class: fields.and_then(|fields| fields.load_balancer_class.clone()),
            is_load_balancer,
            is_deleted,
            created_s: metadata.creation_timestamp.as_ref().map(|time| time.0.as_second()),
            status_is_ours,
            held,
        })
    }

    /// Whether it keeps its addresses from others: it is being deleted, and our finalizer on it says that gateways may still
    /// forward for it.
    #[must_use]
    pub fn holds_addresses(&self) -> bool {
        self.is_deleted && self.is_load_balancer && self.held.finalizer && !self.held.ingress.is_empty()
    }
}

impl From<&Candidate> for Leftover {
    /// A Service of type `LoadBalancer` that is somebody else's.
    fn from(candidate: &Candidate) -> Self {
        Self {
            name: candidate.name.clone(),
            uid: candidate.uid.clone(),
            resource_version: candidate.resource_version.clone(),
            class: candidate.class.clone(),
            is_load_balancer: true,
            is_deleted: false,
            created_s: candidate.created_s,
            status_is_ours: candidate.status_is_ours,
            held: candidate.held.clone(),
        }
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
    fn only_what_is_ours_is_read() {
        let finalizers = json!({"finalizers": ["example.com/other", "sluice.dev/load-balancer-cleanup"]});
        let held = Held::of(&service("LoadBalancer", &finalizers, &["sluice.dev/Programmed", "example.com/Ready"]));
        assert!(held.finalizer && held.has_marks());
        assert_eq!(held.conditions.keys().collect::<Vec<_>>(), [&ConditionType::Programmed]);
        let held = Held::of(&service("LoadBalancer", &json!({"finalizers": ["example.com/other"]}), &["example.com/Ready"]));
        assert_eq!(held, Held::default());
    }

    #[test]
    fn what_is_left_on_a_service_that_is_deleted_or_changed_its_type_is_seen() {
        let ours = json!({"finalizers": ["sluice.dev/load-balancer-cleanup"]});
        let deleted = json!({"finalizers": ["sluice.dev/load-balancer-cleanup"], "deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert_eq!(Leftover::of(&service("LoadBalancer", &ours, &[])), None, "it is a candidate");
        assert!(Leftover::of(&service("LoadBalancer", &deleted, &[])).unwrap().is_deleted);
        assert!(Leftover::of(&service("ClusterIP", &json!({}), &["sluice.dev/Programmed"])).is_some());
        assert!(Leftover::of(&service("NodePort", &ours, &[])).is_some());
        assert_eq!(Leftover::of(&service("ClusterIP", &json!({}), &["example.com/Ready"])), None);
    }
}
