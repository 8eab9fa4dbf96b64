//! A parsed EndpointSlice.

use std::net::IpAddr;

use k8s_openapi::api::discovery::v1::{EndpointPort, EndpointSlice};
use proto::{Family, Protocol, ServiceName};

use crate::note::{self, Cause, Remark};
use crate::used::{UsedEndpoint, UsedSlice};

const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";
const MANAGED_BY_LABEL: &str = "endpointslice.kubernetes.io/managed-by";
/// Kubernetes' own controllers of slices, which create a deleted slice again.
const MANAGERS: [&str; 2] = ["endpointslice-controller.k8s.io", "endpointslicemirroring-controller.k8s.io"];

/// Some or all endpoints of one Service and family. An unused slice has none, and a remark with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceSpec {
    /// Namespace and name of the slice.
    pub name: ServiceName,
    /// The Service that it belongs to.
    pub service: ServiceName,
    /// The family of all its addresses.
    pub family: Family,
    /// Whether a controller of Kubernetes manages it and replaces it after a deletion.
    pub is_managed: bool,
    /// Ports with a number.
    pub ports: Vec<SlicePort>,
    /// Endpoints with a valid address.
    pub endpoints: Vec<EndpointSpec>,
    /// Remarks about omitted parts.
    pub notes: Vec<Remark>,
}

/// A port of every endpoint of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// Matches the name of the Service's port.
    pub name: String,
    /// Matches the protocol of the Service's port.
    pub protocol: Protocol,
    /// Port number at the endpoint.
    pub port: u16,
}

/// An endpoint and its conditions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSpec {
    /// Its first address; the API uses no other.
    pub address: IpAddr,
    /// Unset counts as true.
    pub ready: bool,
    /// Unset counts as true.
    pub serving: bool,
    /// Unset counts as false.
    pub terminating: bool,
    /// Its node.
    pub node: Option<Box<str>>,
    /// Zones in its hints.
    pub zones: Box<[Box<str>]>,
}

/// Why a slice cannot be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum SliceError {
    /// No name.
    #[error("an EndpointSlice without metadata.name")]
    Unnamed,
    /// No Service.
    #[error("EndpointSlice {0} has no label {SERVICE_NAME_LABEL} and so belongs to no Service")]
    NoService(ServiceName),
}

/// An EndpointSlice as it is used, or why it cannot be. It takes a fraction of the object's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadSlice(pub Result<SliceSpec, SliceError>);

impl From<UsedSlice> for ReadSlice {
    fn from(slice: UsedSlice) -> Self {
        Self(SliceSpec::try_from(slice))
    }
}

impl From<EndpointSlice> for ReadSlice {
    fn from(slice: EndpointSlice) -> Self {
        UsedSlice::from(slice).into()
    }
}

impl TryFrom<UsedSlice> for SliceSpec {
    type Error = SliceError;

    fn try_from(slice: UsedSlice) -> Result<Self, SliceError> {
        let metadata = &slice.metadata;
        let namespace = metadata.namespace.as_deref().unwrap_or("default");
        let name = ServiceName::new(namespace, metadata.name.as_deref().ok_or(SliceError::Unnamed)?);
        let label = |key: &str| metadata.labels.as_ref().and_then(|labels| labels.get(key));
        let service = label(SERVICE_NAME_LABEL).ok_or_else(|| SliceError::NoService(name.clone()))?;
        let service = ServiceName::new(namespace, service);
        let is_managed = label(MANAGED_BY_LABEL).is_some_and(|manager| MANAGERS.contains(&manager.as_str()));
        let unused = |why: String| {
            let notes = vec![Remark::new(Cause::SliceIgnored, format!("EndpointSlice {name} is not used: {why}"))];
            let (name, service) = (name.clone(), service.clone());
            Self { name, service, family: Family::V4, is_managed, ports: Vec::new(), endpoints: Vec::new(), notes }
        };
        if label(HEADLESS_LABEL).is_some() {
            return Ok(unused(format!("its label {HEADLESS_LABEL} says that its Service is headless")));
        }
        let family = match slice.address_type.as_deref().unwrap_or_default() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            other => return Ok(unused(format!("its addressType is {other}; expected IPv4 or IPv6"))),
        };
        let mut notes = Vec::new();
        let mut ports = Vec::new();
        for entry in slice.ports.iter().flatten() {
            match port(entry) {
                Ok(port) => ports.push(port),
                Err(why) => {
                    let called = entry.name.as_deref().filter(|name| !name.is_empty()).unwrap_or("without name");
                    let text = format!("EndpointSlice {name}: port {called} is left out: {why}");
                    notes.push(Remark::new(Cause::SlicePortIgnored, text));
                }
            }
        }
        let listed = slice.endpoints.unwrap_or_default();
        let mut endpoints = Vec::with_capacity(listed.len());
        for entry in listed {
            match endpoint(entry, family) {
                Ok(endpoint) => endpoints.push(endpoint),
                Err(found) => {
                    let found = note::quoted(&found);
                    let text = format!("EndpointSlice {name}: endpoint {found} is left out: it is no {family} address");
                    notes.push(Remark::new(Cause::EndpointIgnored, text));
                }
            }
        }
        Ok(Self { service, name, family, is_managed, ports, endpoints, notes })
    }
}

fn port(entry: &EndpointPort) -> Result<SlicePort, String> {
    let protocol = match entry.protocol.as_deref() {
        None | Some("") => Protocol::Tcp,
        Some(text) => text.parse().map_err(|error: proto::ParseProtocolError| error.to_string())?,
    };
    let number = entry.port.ok_or("it has no number")?;
    let port = u16::try_from(number).ok().filter(|port| *port != 0).ok_or_else(|| format!("{number} is no port"))?;
    Ok(SlicePort { name: entry.name.clone().unwrap_or_default(), protocol, port })
}

fn endpoint(entry: UsedEndpoint, family: Family) -> Result<EndpointSpec, String> {
    let UsedEndpoint { addresses, conditions, node_name, hints } = entry;
    let address = addresses.0?;
    if Family::of(address) != family {
        return Err(address.to_string());
    }
    let conditions = conditions.unwrap_or_default();
    let zones = hints.and_then(|hints| hints.for_zones).unwrap_or_default();
    Ok(EndpointSpec {
        address,
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        node: node_name,
        zones: zones.into_iter().map(|zone| zone.name.into()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: serde_json::Value) -> Result<SliceSpec, SliceError> {
        SliceSpec::try_from(serde_json::from_value::<UsedSlice>(value).unwrap())
    }

    #[test]
    fn conditions_that_are_not_set_have_the_defaults_of_the_api() {
        let slice = read(serde_json::json!({
            "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "ports": [{"port": 8080}],
            "endpoints": [{"addresses": ["10.0.0.1"], "nodeName": "a", "hints": {"forZones": [{"name": "z"}], "forNodes": [{"name": "a"}]}},
                {"addresses": ["10.0.0.2", "10.0.0.9"], "conditions": {"ready": false}}],
        }))
        .unwrap();
        let of = |last, ready, node: Option<&str>| EndpointSpec {
            address: [10, 0, 0, last].into(),
            ready,
            serving: true,
            terminating: false,
            node: node.map(Box::from),
            zones: if last == 1 { ["z".into()].into() } else { Box::default() },
        };
        assert_eq!(slice.endpoints, [of(1, true, Some("a")), of(2, false, None)]);
        assert_eq!(slice.ports, [SlicePort { name: String::new(), protocol: Protocol::Tcp, port: 8080 }]);
        assert_eq!(slice.service, ServiceName::new("shop", "web"));
    }

    #[test]
    fn ports_without_number_and_endpoints_of_the_other_family_are_left_out_and_noted() {
        let slice = read(serde_json::json!({
            "metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv6", "ports": [{"name": "any"}, {"name": "zero", "port": 0}],
            "endpoints": [{"addresses": ["10.0.0.1"]}, {"addresses": ["web.example.com"]}, {"addresses": []}],
        }))
        .unwrap();
        assert!(slice.ports.is_empty() && slice.endpoints.is_empty());
        assert_eq!(slice.notes.len(), 5, "{:?}", slice.notes);
    }

    #[test]
    fn slices_without_service_are_errors_and_headless_and_fqdn_slices_are_empty_with_a_note() {
        let object = |labels: serde_json::Value, kind: &str| {
            read(serde_json::json!({"metadata": {"name": "a", "labels": labels}, "addressType": kind,
                "ports": [{"port": 80}], "endpoints": [{"addresses": ["10.0.0.1"]}]}))
        };
        assert!(object(serde_json::json!({}), "IPv4").is_err());
        let headless = serde_json::json!({"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""});
        let named = serde_json::json!({"kubernetes.io/service-name": "web"});
        for (labels, kind, reason) in [(headless, "IPv4", "headless"), (named, "FQDN", "FQDN")] {
            let slice = object(labels, kind).unwrap();
            assert!(slice.ports.is_empty() && slice.endpoints.is_empty());
            assert!(slice.notes[0].text.contains(reason), "{:?}", slice.notes);
        }
    }
}
