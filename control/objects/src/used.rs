//! Services and EndpointSlices as an API server sends them, decoded as far as they are used. A large cluster has tens of
//! thousands, and most of their text is of no use here: `managedFields` name every field of an object for each of its
//! writers, and every endpoint names its Pod.
//!
//! Invariant: a Service is read from this type as from the complete object, and a slice likewise. Deliberately not here: what
//! the fields mean (`service`, `endpoint_slice`).

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Service, ServiceSpec, ServiceStatus};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{FieldsV1, ManagedFieldsEntry, ObjectMeta, Time};
use kube_derive::Resource;
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::json;

/// A Service with what is used of it.
#[derive(Clone, Debug, Deserialize, Resource)]
#[serde(expecting = "a Service")]
#[resource(inherit = "Service", crates(kube_core = "kube_core"))]
pub struct UsedService {
    #[serde(default, deserialize_with = "service_metadata")]
    metadata: ObjectMeta,
    spec: Option<ServiceSpec>,
    status: Option<ServiceStatus>,
}

impl From<UsedService> for Service {
    fn from(UsedService { metadata, spec, status }: UsedService) -> Self {
        Self { metadata, spec, status }
    }
}

/// Decodes what is used of the metadata of a Service.
fn service_metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase", expecting = "the metadata of an object")]
    struct ServiceMetadata {
        name: Option<String>,
        namespace: Option<String>,
        uid: Option<String>,
        resource_version: Option<String>,
        creation_timestamp: Option<Time>,
        deletion_timestamp: Option<Time>,
        labels: Option<BTreeMap<String, String>>,
        annotations: Option<BTreeMap<String, String>>,
        finalizers: Option<Vec<String>>,
        managed_fields: Option<Vec<Writer>>,
    }
    let metadata: ServiceMetadata = Option::deserialize(deserializer)?.unwrap_or_default();
    Ok(ObjectMeta {
        name: metadata.name,
        namespace: metadata.namespace,
        uid: metadata.uid,
        resource_version: metadata.resource_version,
        creation_timestamp: metadata.creation_timestamp,
        deletion_timestamp: metadata.deletion_timestamp,
        labels: metadata.labels,
        annotations: metadata.annotations,
        finalizers: metadata.finalizers,
        managed_fields: metadata.managed_fields.map(|all| all.into_iter().map(Into::into).collect()),
        ..ObjectMeta::default()
    })
}

/// An entry of `managedFields`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an entry of managedFields")]
struct Writer {
    manager: Option<String>,
    subresource: Option<String>,
    time: Option<Time>,
    fields_v1: Option<WrittenFields>,
}

/// Whether the addresses of the status are among the fields that someone wrote.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "a set of fields")]
struct WrittenFields {
    #[serde(rename = "f:status")]
    status: Option<WrittenStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "a set of fields")]
struct WrittenStatus {
    #[serde(rename = "f:loadBalancer")]
    load_balancer: Option<WrittenLoadBalancer>,
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "a set of fields")]
struct WrittenLoadBalancer {
    #[serde(rename = "f:ingress")]
    ingress: Option<IgnoredAny>,
}

impl From<Writer> for ManagedFieldsEntry {
    fn from(Writer { manager, subresource, time, fields_v1 }: Writer) -> Self {
        let balancer = fields_v1.and_then(|fields| fields.status).and_then(|status| status.load_balancer);
        let ingress = balancer.and_then(|balancer| balancer.ingress);
        let fields_v1 = ingress.map(|_| FieldsV1(json!({"f:status": {"f:loadBalancer": {"f:ingress": {}}}})));
        Self { manager, subresource, time, fields_v1, ..Self::default() }
    }
}

/// An EndpointSlice with what is used of it.
#[derive(Clone, Debug, Deserialize, Resource)]
#[serde(rename_all = "camelCase", expecting = "an EndpointSlice")]
#[resource(inherit = "EndpointSlice", crates(kube_core = "kube_core"))]
pub struct UsedSlice {
    #[serde(default, deserialize_with = "slice_metadata")]
    pub(crate) metadata: ObjectMeta,
    pub(crate) address_type: Option<String>,
    pub(crate) ports: Option<Vec<EndpointPort>>,
    pub(crate) endpoints: Option<Vec<UsedEndpoint>>,
}

/// An endpoint of a slice.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an endpoint")]
pub(crate) struct UsedEndpoint {
    #[serde(default)]
    pub(crate) addresses: FirstAddress,
    pub(crate) conditions: Option<EndpointConditions>,
    pub(crate) node_name: Option<Box<str>>,
    pub(crate) hints: Option<EndpointHints>,
}

/// The first of some addresses, or the text that is not an address; empty without any.
#[derive(Clone, Debug)]
pub(crate) struct FirstAddress(pub(crate) Result<IpAddr, String>);

impl Default for FirstAddress {
    fn default() -> Self {
        Self(Err(String::new()))
    }
}

impl From<&str> for FirstAddress {
    fn from(text: &str) -> Self {
        Self(text.parse().map_err(|_| text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for FirstAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Addresses;

        impl<'de> Visitor<'de> for Addresses {
            type Value = FirstAddress;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "a list of addresses")
            }

            fn visit_unit<E>(self) -> Result<FirstAddress, E> {
                Ok(FirstAddress::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<FirstAddress, A::Error> {
                let first = all.next_element()?.map(|AddressText(address)| address);
                while all.next_element::<IgnoredAny>()?.is_some() {}
                Ok(first.unwrap_or_default())
            }
        }

        deserializer.deserialize_any(Addresses)
    }
}

/// An address in a list.
struct AddressText(FirstAddress);

impl<'de> Deserialize<'de> for AddressText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = AddressText;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(formatter, "an address")
            }

            fn visit_str<E>(self, text: &str) -> Result<AddressText, E> {
                Ok(AddressText(text.into()))
            }
        }

        deserializer.deserialize_str(Text)
    }
}

/// Decodes what is used of the metadata of a slice.
fn slice_metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "camelCase", expecting = "the metadata of an object")]
    struct SliceMetadata {
        name: Option<String>,
        namespace: Option<String>,
        resource_version: Option<String>,
        labels: Option<BTreeMap<String, String>>,
    }
    let SliceMetadata { name, namespace, resource_version, labels } = Option::deserialize(deserializer)?.unwrap_or_default();
    Ok(ObjectMeta { name, namespace, resource_version, labels, ..ObjectMeta::default() })
}

impl From<EndpointSlice> for UsedSlice {
    fn from(slice: EndpointSlice) -> Self {
        let EndpointSlice { metadata, address_type, ports, endpoints } = slice;
        Self {
            metadata,
            address_type: Some(address_type),
            ports,
            endpoints: Some(endpoints.into_iter().map(Into::into).collect()),
        }
    }
}

impl From<Endpoint> for UsedEndpoint {
    fn from(Endpoint { addresses, conditions, node_name, hints, .. }: Endpoint) -> Self {
        let addresses = addresses.first().map(|text| text.as_str().into()).unwrap_or_default();
        Self { addresses, conditions, node_name: node_name.map(Into::into), hints }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::Value;

    use super::*;
    use crate::{ReadService, ReadSlice};

    fn read<T: DeserializeOwned>(object: &Value) -> T {
        serde_json::from_value(object.clone()).unwrap()
    }

    /// As an API server sends it, with entries of several managers.
    fn service() -> Value {
        let addresses = json!({"f:status": {"f:loadBalancer": {"f:ingress": {}}, "f:conditions": {".": {}}}});
        json!({
            "metadata": {
                "name": "web", "namespace": "shop", "uid": "4b7e", "resourceVersion": "812", "generation": 3,
                "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": "web"},
                "annotations": {"sluice.dev/mode": "dsr", "sluice.dev/group": "edge", "example.com/other": "x"},
                "finalizers": ["sluice.dev/load-balancer-cleanup"],
                "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": "7"}],
                "managedFields": [
                    {"manager": "kubectl", "operation": "Update", "apiVersion": "v1", "time": "2026-01-01T00:00:00Z",
                        "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:ports": {"k:{\"port\":80}": {".": {}}}}}},
                    {"manager": "last", "operation": "Update", "subresource": "status", "time": "2026-01-03T00:00:00Z",
                        "fieldsV1": {"f:status": {"f:conditions": {}}}},
                    {"manager": "first", "operation": "Update", "subresource": "status", "time": "2026-01-02T00:00:00Z",
                        "fieldsV1": {"f:status": {"f:conditions": {}}}},
                    {"manager": "sluice", "operation": "Apply", "subresource": "status", "time": "2026-01-01T00:00:00Z",
                        "fieldsV1": addresses},
                ],
            },
            "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.9", "selector": {"app": "web"}, "ports": [{"name": "web", "port": 80}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1", "ipMode": "VIP"}]}},
        })
    }

    fn is_read_as_complete(object: &Value) {
        assert_eq!(ReadService::from(read::<UsedService>(object)), ReadService::from(read::<Service>(object)), "{object}");
    }

    #[test]
    fn a_service_is_read_as_from_the_complete_object() {
        let object = service();
        is_read_as_complete(&object);
        let read_one = ReadService::from(read::<UsedService>(&object)).candidate.unwrap();
        assert!(read_one.object.status_is_ours, "the last manager that wrote addresses is found");
        let changes: [fn(&mut Value); 6] = [
            |object| object["metadata"]["deletionTimestamp"] = json!("2026-01-03T00:00:00Z"),
            |object| object["metadata"]["managedFields"][3]["manager"] = json!("third"),
            |object| object["metadata"]["managedFields"][3]["fieldsV1"] = json!({"f:status": {"f:loadBalancer": null}}),
            |object| object["metadata"]["managedFields"] = Value::Null,
            |object| object["spec"]["type"] = json!("ClusterIP"),
            |object| object["metadata"] = Value::Null,
        ];
        for change in changes {
            let mut object = service();
            change(&mut object);
            is_read_as_complete(&object);
        }
    }

    #[test]
    fn a_slice_is_read_as_from_the_complete_object() {
        let object = || {
            json!({
                "metadata": {"name": "web-1", "namespace": "shop", "resourceVersion": "7", "generateName": "web-",
                    "labels": {"kubernetes.io/service-name": "web"}, "managedFields": [{"manager": "x"}]},
                "addressType": "IPv4", "ports": [{"name": "web", "port": 8080, "protocol": "TCP", "appProtocol": "http"}],
                "endpoints": [
                    {"addresses": ["10.0.0.1", "10.0.0.2"], "nodeName": "a", "zone": "z", "hostname": "web-0",
                        "conditions": {"ready": true, "serving": true, "terminating": false},
                        "hints": {"forZones": [{"name": "z"}]},
                        "targetRef": {"kind": "Pod", "name": "web-0", "namespace": "shop", "uid": "9"}},
                    {"addresses": ["fd00::1"]}, {"addresses": ["web.example.com"]}, {"addresses": []}, {"addresses": null},
                ],
            })
        };
        let changes: [fn(&mut Value); 6] = [
            |_| {},
            |object| object["addressType"] = json!("IPv6"),
            |object| object["addressType"] = Value::Null,
            |object| object["endpoints"] = Value::Null,
            |object| object["ports"] = Value::Null,
            |object| object["metadata"] = Value::Null,
        ];
        for change in changes {
            let mut object = object();
            change(&mut object);
            let complete = ReadSlice::from(read::<EndpointSlice>(&object));
            assert_eq!(ReadSlice::from(read::<UsedSlice>(&object)), complete, "{object}");
        }
    }

    #[test]
    fn what_is_of_another_type_is_an_error_and_what_is_not_used_is_not_looked_at() {
        let mut object = service();
        object["metadata"]["ownerReferences"] = json!("no list");
        assert_eq!(ReadService::from(read::<UsedService>(&object)), ReadService::from(read::<UsedService>(&service())));
        object["spec"]["ports"] = json!("no list");
        assert!(serde_json::from_value::<UsedService>(object).is_err());
        let error =
            |endpoints: Value| serde_json::from_value::<UsedSlice>(json!({"endpoints": endpoints})).unwrap_err().to_string();
        assert_eq!(error(json!([{"addresses": "10.0.0.1"}])), "invalid type: string \"10.0.0.1\", expected a list of addresses");
        assert_eq!(error(json!([{"addresses": [7]}])), "invalid type: integer `7`, expected an address");
        assert_eq!(error(json!([7])), "invalid type: integer `7`, expected an endpoint");
        assert_eq!(error(json!("no list")), "invalid type: string \"no list\", expected a sequence");
    }
}
