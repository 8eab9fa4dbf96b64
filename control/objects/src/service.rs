//! A parsed Service: its identity, its current status, and either its specification or the reason why it cannot be
//! served.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec as ServiceFields};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proto::limits::{ANNOTATION_PREFIX, FINALIZER, GROUP_ANNOTATION};
use proto::{AffinityScope, Family, Protocol, ProxyProtocol, ServiceName};

use crate::note::{self, Cause, Remark};
use crate::spelling;
use crate::used::UsedService;

mod affinity;
mod annotations;
mod error;
pub mod foreign;
mod owned;
mod proxy_protocol;
mod source_ranges;
mod spec;
pub(crate) mod unknown_fields;

use affinity::affinity;
pub use error::{NotServable, SpecError, Unread};
use error::{WAITS, word};
pub use owned::{OwnedParts, ServiceObject};
use source_ranges::{clients, note_denied_families};
pub use spec::{HealthSpec, Namespaces, PortSpec, ServiceSpec, Sharing};

/// Label of a Service that kube-proxy does not serve.
const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
/// Finalizer of a cloud controller.
const CLOUD_FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";

/// Kind of a Service that sluice can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Listens on load balancer addresses.
    LoadBalancer,
    /// Listens on the gateways' node port addresses.
    NodePort,
    /// Listens only on its `externalIPs`.
    ClusterIp,
}

/// A Service that may be ours: the object, and its specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The object. The wanted status shares it.
    pub object: Arc<ServiceObject>,
    /// Its kind.
    pub kind: Kind,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Whether it has the finalizer of a cloud controller, which manages it.
    pub is_held_by_cloud: bool,
    /// Its specification, or why it cannot be served.
    pub wanted: Result<ServiceSpec, SpecError>,
}

impl Candidate {
    /// Whether `other`, a newer version, has the same specification, ignoring fields that the API server changes by itself.
    #[must_use]
    pub fn asks_the_same(&self, other: &Self) -> bool {
        let (ours, theirs) = (&*self.object, &*other.object);
        let asked = |c: &Self| (c.object.created_s, c.kind, c.is_held_by_cloud, c.object.class.is_none() && c.is_held());
        // The first mark of a Service with a class is our own, or that of an installation whose Service it is anyway.
        let has_same_mark = ours.held.group == theirs.held.group || (ours.held.group.is_none() && ours.class.is_some());
        let is_same = ours.uid == theirs.uid && ours.class == theirs.class && ours.gateway_group == theirs.gateway_group;
        let is_same = is_same && self.labels == other.labels && has_same_mark;
        is_same && asked(self) == asked(other) && self.wanted == other.wanted
    }

    /// Whether it was ours before, as the installation of `group`: it has our finalizer or a status that sluice wrote,
    /// and no other group.
    #[must_use]
    pub fn is_held_by(&self, group: &str) -> bool {
        self.is_held() && !self.object.held.is_of_another(group)
    }

    /// Whether it was served by any installation: all have the same finalizer and field manager.
    fn is_held(&self) -> bool {
        self.object.held.finalizer || (self.object.status_is_ours && !self.object.held.ingress.is_empty())
    }
}

/// A Service as it was read. It takes a fraction of the object's memory, and is small itself: tens of thousands are moved
/// from list to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadService {
    /// Namespace and name.
    pub name: ServiceName,
    /// What it asks for, or why it is never served.
    pub candidate: Result<Box<Candidate>, NotServable>,
    /// The parts of ours that it has although it is no candidate.
    pub leftover: Option<Box<ServiceObject>>,
}

impl From<UsedService> for ReadService {
    fn from(service: UsedService) -> Self {
        Service::from(service).into()
    }
}

impl From<Service> for ReadService {
    fn from(service: Service) -> Self {
        let ObjectMeta { namespace, name, .. } = &service.metadata;
        let name = ServiceName::new(namespace.as_deref().unwrap_or("default"), name.as_deref().unwrap_or_default());
        Self {
            name,
            candidate: Candidate::try_from(&service).map(Box::new),
            leftover: ServiceObject::left_over(&service).map(Box::new),
        }
    }
}

impl TryFrom<&Service> for Candidate {
    type Error = NotServable;

    fn try_from(service: &Service) -> Result<Self, NotServable> {
        let metadata = &service.metadata;
        let object = ServiceObject::of(service).ok_or(NotServable::Unnamed)?;
        let has_finalizer = |wanted: &str| metadata.finalizers.iter().flatten().any(|finalizer| finalizer == wanted);
        let annotations = metadata.annotations.iter().flatten();
        let asks = |key: &str| key.starts_with(ANNOTATION_PREFIX) && key != GROUP_ANNOTATION;
        let is_expected = has_finalizer(FINALIZER) || annotations.into_iter().any(|(key, _)| asks(key));
        let not_ours = |why, is_expected| NotServable::NotOurs { name: object.name.clone(), why, is_expected };
        if object.is_deleted {
            return Err(not_ours("it is being deleted", false));
        }
        let empty = ServiceFields::default();
        let fields = service.spec.as_ref().unwrap_or(&empty);
        let has_external_ips = fields.external_ips.as_ref().is_some_and(|ips| !ips.is_empty());
        let kind = match fields.type_.as_deref() {
            Some("LoadBalancer") => Kind::LoadBalancer,
            Some("NodePort") => Kind::NodePort,
            Some("ExternalName") => {
                return Err(not_ours("type ExternalName has no frontend, only a name", is_expected || has_external_ips));
            }
            // An API server refuses other words, so this one is in a file. With externalIPs it would be served as ClusterIP.
            Some(other) if !["", "ClusterIP"].contains(&other) => meant_kind(other)
                .or(has_external_ips.then_some(Kind::ClusterIp))
                .ok_or_else(|| not_ours("its type is none of LoadBalancer, NodePort, ClusterIP and ExternalName", true))?,
            _ if has_external_ips => Kind::ClusterIp,
            _ if fields.cluster_ip.as_deref() == Some("None") => {
                return Err(not_ours("a headless Service (clusterIP: None) has no frontend", is_expected));
            }
            _ => return Err(not_ours("its type is neither LoadBalancer nor NodePort, and it has no externalIPs", false)),
        };
        Ok(Self {
            kind,
            labels: metadata.labels.clone().unwrap_or_default(),
            is_held_by_cloud: has_finalizer(CLOUD_FINALIZER),
            wanted: wanted(service, fields, kind),
            object: Arc::new(object),
        })
    }
}

/// The kind with a frontend of its own that a misspelt type stands for. The Service is refused, as one of this kind.
fn meant_kind(found: &str) -> Option<Kind> {
    let known = [("LoadBalancer", Kind::LoadBalancer), ("NodePort", Kind::NodePort)];
    let meant = spelling::nearest(found, ["LoadBalancer", "NodePort", "ClusterIP", "ExternalName"])?;
    known.into_iter().find_map(|(name, kind)| (name == meant).then_some(kind))
}

fn wanted(service: &Service, fields: &ServiceFields, kind: Kind) -> Result<ServiceSpec, SpecError> {
    if let Some(other) = fields.type_.as_deref()
        && !["", "ClusterIP", "LoadBalancer", "NodePort"].contains(&other)
    {
        return Err(word("spec.type", other, "LoadBalancer, NodePort, ClusterIP or ExternalName"));
    }
    if fields.cluster_ip.as_deref() == Some("None") {
        return Err(SpecError::Headless);
    }
    let none = BTreeMap::new();
    let annotations = service.metadata.annotations.as_ref().unwrap_or(&none);
    let mut spec = annotations::read(annotations, fields.load_balancer_ip.as_deref())?;
    let is_in_cluster = service.metadata.uid.is_some();
    let (families, second_family_optional) = families(fields, is_in_cluster)?;
    if let Some(why) = misfit(&spec.addresses, &families) {
        let why = format!("{why}; ask for one address of each family in spec.ipFamilies");
        spec.notes.push(Remark::new(Cause::AnnotationIgnored, format!("{why}; {WAITS}")));
        spec.unread_request.get_or_insert(why);
        spec.unread.insert(Unread::Addresses);
        spec.addresses.clear();
    }
    let source_ranges = clients(fields, annotations::annotated_source_ranges(annotations), &mut spec.notes)?;
    note_denied_families(source_ranges.as_deref(), &families, &mut spec.notes);
    let local = is_local(fields)?;
    let labels = service.metadata.labels.as_ref();
    let affinity = affinity(fields, &mut spec.notes)?;
    if spec.affinity_scope == Some(AffinityScope::Service) && affinity.is_none() {
        let text = "annotation sluice.dev/session-affinity-scope has no effect without sessionAffinity: ClientIP; add it";
        spec.notes.push(Remark::new(Cause::AnnotationIgnored, text.to_owned()));
    }
    let mut ports = ports(fields.ports.as_deref().unwrap_or_default(), kind)?;
    proxy_protocol::apply(annotations, &mut ports, &mut spec.notes)?;
    Ok(ServiceSpec {
        families,
        second_family_optional,
        ports,
        external_ips: external_ips(fields, &mut spec.notes),
        affinity,
        source_ranges,
        local,
        node_health_port: node_health_port(fields, kind, local),
        proxy_name: labels.and_then(|labels| labels.get(PROXY_NAME_LABEL)).cloned(),
        ..spec
    })
}

/// The PROXY header of each port of a Service with these annotations, for a program that reads nothing else of it.
///
/// # Errors
/// If its ports or these annotations cannot be read.
pub fn proxy_headers(
    annotations: &BTreeMap<String, String>,
    fields: &ServiceFields,
) -> Result<Vec<Option<ProxyProtocol>>, SpecError> {
    let mut ports = ports(fields.ports.as_deref().unwrap_or_default(), Kind::LoadBalancer)?;
    proxy_protocol::apply(annotations, &mut ports, &mut Vec::new())?;
    Ok(ports.into_iter().map(|port| port.proxy_protocol).collect())
}

/// `spec.externalIPs`: the API server accepts only addresses; manifests may contain anything.
fn external_ips(fields: &ServiceFields, notes: &mut Vec<Remark>) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for text in fields.external_ips.iter().flatten() {
        match text.trim().parse() {
            Ok(address) if !addresses.contains(&address) => addresses.push(address),
            Ok(_) => {}
            Err(_) => {
                let found = note::quoted(text);
                let text = format!("spec.externalIPs: found {found}, expected an IP address; it is left out");
                notes.push(Remark::new(Cause::FieldIgnored, text));
            }
        }
    }
    addresses
}

/// kube-proxy answers there only for Services of type `LoadBalancer` with `externalTrafficPolicy: Local`.
fn node_health_port(fields: &ServiceFields, kind: Kind, local: bool) -> Option<u16> {
    let port = fields.health_check_node_port.filter(|_| local && kind == Kind::LoadBalancer)?;
    u16::try_from(port).ok().filter(|port| *port != 0)
}

/// Families in order, and whether the second is optional. In a cluster only `ipFamilies` counts: the API server knows
/// the families of the cluster, and a family that it left out has no endpoints. A manifest gets the default of a
/// dual-stack cluster, IPv4 first.
fn families(fields: &ServiceFields, is_in_cluster: bool) -> Result<(Vec<Family>, bool), SpecError> {
    let mut families = Vec::new();
    for text in fields.ip_families.as_deref().unwrap_or_default() {
        let family = match text.as_str() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            _ => return Err(word("spec.ipFamilies", text, "IPv4 or IPv6")),
        };
        if !families.contains(&family) {
            families.push(family);
        }
    }
    if families.is_empty() {
        families.push(Family::V4);
    }
    let (dual, optional) = match fields.ip_family_policy.as_deref() {
        None | Some("" | "SingleStack") => (false, false),
        Some("PreferDualStack") => (true, true),
        Some("RequireDualStack") => (true, false),
        Some(other) => return Err(word("spec.ipFamilyPolicy", other, "SingleStack, PreferDualStack or RequireDualStack")),
    };
    if dual && families.len() == 1 && !is_in_cluster {
        families.push(if families[0] == Family::V4 { Family::V6 } else { Family::V4 });
    }
    Ok((families, optional))
}

/// `externalTrafficPolicy: Local`.
fn is_local(fields: &ServiceFields) -> Result<bool, SpecError> {
    match fields.external_traffic_policy.as_deref() {
        None | Some("" | "Cluster") => Ok(false),
        Some("Local") => Ok(true),
        Some(other) => Err(word("spec.externalTrafficPolicy", other, "Cluster or Local")),
    }
}

/// Why a Service of these families cannot have these addresses.
fn misfit(addresses: &[IpAddr], families: &[Family]) -> Option<String> {
    addresses.iter().enumerate().find_map(|(index, &address)| {
        let family = Family::of(address);
        let why = if !families.contains(&family) {
            format!("the Service has no family {family}")
        } else if addresses[..index].iter().any(|earlier| Family::of(*earlier) == family) {
            format!("another {family} address is requested too")
        } else {
            return None;
        };
        Some(format!("address {address} is asked for, but {why}"))
    })
}

fn ports(list: &[ServicePort], kind: Kind) -> Result<Vec<PortSpec>, SpecError> {
    let mut ports: Vec<PortSpec> = Vec::with_capacity(list.len());
    for (index, entry) in list.iter().enumerate() {
        let port = port(index, entry, kind)?;
        let what = ports.iter().find_map(|earlier| repeated(earlier, &port));
        if let Some(what) = what {
            return Err(SpecError::RepeatedPort { index, what });
        }
        ports.push(port);
    }
    if ports.is_empty() { Err(SpecError::NoPorts) } else { Ok(ports) }
}

fn repeated(earlier: &PortSpec, port: &PortSpec) -> Option<String> {
    if earlier.name == port.name {
        return Some(format!("the name {:?}", port.name));
    }
    if earlier.protocol != port.protocol {
        return None;
    }
    if earlier.port == port.port {
        return Some(format!("the port {} {}", port.protocol, port.port));
    }
    let node_port = port.node_port.filter(|number| earlier.node_port == Some(*number))?;
    Some(format!("the nodePort {} {node_port}", port.protocol))
}

fn port(index: usize, entry: &ServicePort, kind: Kind) -> Result<PortSpec, SpecError> {
    let number = |field, found: i32| match u16::try_from(found) {
        Ok(number) if number != 0 => Ok(number),
        _ => Err(SpecError::Port { index, field, found }),
    };
    let protocol = match entry.protocol.as_deref() {
        None | Some("") => Protocol::Tcp,
        Some(text) => text.parse().map_err(|_| SpecError::Protocol { index, found: text.to_owned() })?,
    };
    let node_port = match (kind, entry.node_port) {
        (Kind::LoadBalancer | Kind::ClusterIp, _) => None,
        (Kind::NodePort, None | Some(0)) => return Err(SpecError::NodePortMissing { index }),
        (Kind::NodePort, Some(found)) => Some(number("nodePort", found)?),
    };
    let port_of_nodes = entry.node_port.filter(|found| *found != 0).map(|found| number("nodePort", found)).transpose()?;
    let name = entry.name.clone().unwrap_or_default();
    let app_protocol = entry.app_protocol.clone().filter(|text| !text.is_empty());
    let (port, proxy_protocol) = (number("port", entry.port)?, None);
    Ok(PortSpec { name, protocol, port, node_port, port_of_nodes, app_protocol, proxy_protocol })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn service(spec: &serde_json::Value) -> Service {
        serde_json::from_value(serde_json::json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": spec})).unwrap()
    }

    fn wanted_of(spec: serde_json::Value) -> Result<ServiceSpec, SpecError> {
        Candidate::try_from(&service(&spec)).unwrap().wanted
    }

    #[test]
    fn a_manifest_gets_the_defaults_of_the_api_server() {
        let wanted = wanted_of(serde_json::json!({"type": "LoadBalancer", "ports": [{"port": 80}]})).unwrap();
        assert_eq!(wanted.families, [Family::V4]);
        let (protocol, port) = (Protocol::Tcp, 80);
        let (node_port, port_of_nodes) = (None, None);
        let port =
            PortSpec { name: String::new(), protocol, port, node_port, port_of_nodes, app_protocol: None, proxy_protocol: None };
        assert_eq!(wanted.ports, [port]);
    }

    #[test]
    fn dual_stack_without_families_has_both() {
        let wanted =
            wanted_of(serde_json::json!({"type": "LoadBalancer", "ipFamilyPolicy": "PreferDualStack", "ports": [{"port": 80}]}));
        let wanted = wanted.unwrap();
        assert_eq!((wanted.families, wanted.second_family_optional), (vec![Family::V4, Family::V6], true));
    }

    #[test]
    fn a_scope_of_affinity_without_affinity_is_noted() {
        for (affinity, notes) in [("ClientIP", 0), ("None", 1)] {
            let mut object =
                service(&serde_json::json!({"type": "LoadBalancer", "sessionAffinity": affinity, "ports": [{"port": 80}]}));
            object.metadata.annotations = Some([("sluice.dev/session-affinity-scope".to_owned(), "service".to_owned())].into());
            let wanted = Candidate::try_from(&object).unwrap().wanted.unwrap();
            assert_eq!((wanted.affinity_scope, wanted.notes.len()), (Some(AffinityScope::Service), notes), "{:?}", wanted.notes);
        }
    }

    #[test]
    fn source_ranges_and_affinity_are_read() {
        let mut object = service(&serde_json::json!({"type": "LoadBalancer", "sessionAffinity": "ClientIP",
            "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000, "loadBalancerSourceRanges": ["10.0.0.0/8"],
            "ports": [{"port": 80, "nodePort": 30080, "protocol": "SCTP", "appProtocol": "example.com/x"}]}));
        object.metadata.labels = Some([("service.kubernetes.io/service-proxy-name".to_owned(), "x".to_owned())].into());
        let wanted = Candidate::try_from(&object).unwrap().wanted.unwrap();
        assert_eq!((wanted.affinity, wanted.local), (Some(Duration::from_secs(10_800)), true));
        assert_eq!(wanted.source_ranges, Some(vec!["10.0.0.0/8".parse().unwrap()]));
        assert_eq!((wanted.node_health_port, wanted.proxy_name.as_deref()), (Some(31_000), Some("x")));
        let port = &wanted.ports[0];
        assert_eq!((port.protocol, port.node_port, port.port_of_nodes), (Protocol::Sctp, None, Some(30_080)));
        assert_eq!(port.app_protocol.as_deref(), Some("example.com/x"));
    }

    #[test]
    fn a_malformed_annotation_for_source_ranges_refuses_no_service_whose_field_is_valid() {
        let spec =
            serde_json::json!({"type": "LoadBalancer", "ports": [{"port": 80}], "loadBalancerSourceRanges": ["10.0.0.0/8"]});
        let mut object = service(&spec);
        let key = "service.beta.kubernetes.io/load-balancer-source-ranges";
        object.metadata.annotations = Some([(key.to_owned(), "10.0.0.0/8,".to_owned())].into());
        let wanted = Candidate::try_from(&object).unwrap().wanted.unwrap();
        assert_eq!(wanted.source_ranges, Some(vec!["10.0.0.0/8".parse().unwrap()]));
        assert_eq!(wanted.notes.iter().map(|note| note.cause).collect::<Vec<_>>(), [Cause::AnnotationsDiffer]);
    }

    #[test]
    fn only_a_load_balancer_under_local_has_a_health_check_node_port() {
        let rows = [("LoadBalancer", "Local", Some(31_000)), ("LoadBalancer", "Cluster", None), ("NodePort", "Local", None)];
        for (kind, policy, expected) in rows {
            let spec = serde_json::json!({"type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": 31000,
                "ports": [{"port": 80, "nodePort": 30080}]});
            assert_eq!(wanted_of(spec).unwrap().node_health_port, expected, "{kind} {policy}");
        }
    }

    #[test]
    fn invalid_fields_are_refused_with_name_and_value() {
        let rows = [
            ("loadBalancerSourceRanges", serde_json::json!(["10.0.0.0/40"]), "10.0.0.0/40"),
            ("sessionAffinity", serde_json::json!("Cookie"), "Cookie"),
            ("externalTrafficPolicy", serde_json::json!("Nearby"), "Nearby"),
        ];
        for (field, value, shown) in rows {
            let mut spec = serde_json::json!({"type": "LoadBalancer", "ports": [{"port": 80}]});
            spec[field] = value;
            let refusal = wanted_of(spec).unwrap_err().refusal();
            assert_eq!(refusal.reason, proto::Reason::Refused);
            assert!(refusal.message.contains(field) && refusal.message.contains(shown), "{}", refusal.message);
        }
    }

    #[test]
    fn internal_traffic_policy_has_no_effect() {
        let with = |policy| {
            wanted_of(serde_json::json!({"type": "LoadBalancer", "internalTrafficPolicy": policy, "ports": [{"port": 80}]}))
                .unwrap()
        };
        assert_eq!(with("Local"), with("Cluster"));
    }

    #[test]
    fn a_cluster_ip_service_counts_for_its_external_ips_alone() {
        let spec = serde_json::json!({"type": "ClusterIP", "externalIPs": ["192.0.2.9", "192.0.2.9", " 2001:db8::9", "x"],
            "ports": [{"port": 80}]});
        let candidate = Candidate::try_from(&service(&spec)).unwrap();
        assert_eq!(candidate.kind, Kind::ClusterIp);
        let wanted = candidate.wanted.unwrap();
        assert_eq!(wanted.external_ips, ["192.0.2.9".parse::<IpAddr>().unwrap(), "2001:db8::9".parse().unwrap()]);
        assert_eq!((wanted.notes.len(), wanted.ports[0].node_port), (1, None));
    }

    #[test]
    fn errors_for_invalid_ports_have_the_port_and_the_reason() {
        let rows = [
            (serde_json::json!([]), "spec.ports is empty"),
            (serde_json::json!([{"port": 0}]), "spec.ports[0].port is 0"),
            (serde_json::json!([{"port": 80, "protocol": "QUIC"}]), "QUIC"),
            (serde_json::json!([{"name": "a", "port": 80}, {"name": "b", "port": 80}]), "the port tcp 80"),
            (serde_json::json!([{"port": 80}, {"port": 81}]), "the name"),
        ];
        for (ports, expected) in rows {
            let error = wanted_of(serde_json::json!({"type": "LoadBalancer", "ports": ports})).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_node_port_service_needs_its_number() {
        let error = wanted_of(serde_json::json!({"type": "NodePort", "ports": [{"port": 80}]})).unwrap_err();
        assert_eq!(error, SpecError::NodePortMissing { index: 0 });
        let wanted = wanted_of(serde_json::json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 30080}]})).unwrap();
        assert_eq!(wanted.ports[0].node_port, Some(30080));
    }

    #[test]
    fn in_a_cluster_the_families_are_those_of_the_object_and_a_manifest_gets_both() {
        let prefers = |families: &[&str]| {
            serde_json::json!({"type": "LoadBalancer", "ports": [{"port": 80}],
            "ipFamilyPolicy": "PreferDualStack", "ipFamilies": families})
        };
        let read = |spec: serde_json::Value, is_in_cluster: bool| {
            let mut object = service(&spec);
            object.metadata.uid = is_in_cluster.then(|| "u".to_owned());
            Candidate::try_from(&object).unwrap().wanted.unwrap().families
        };
        assert_eq!(read(prefers(&["IPv4"]), true), [Family::V4]);
        assert_eq!(read(prefers(&["IPv6", "IPv4"]), true), [Family::V6, Family::V4]);
        assert_eq!(read(prefers(&["IPv4"]), false), [Family::V4, Family::V6]);
        assert_eq!(read(prefers(&[]), false), [Family::V4, Family::V6]);
    }

    #[test]
    fn a_requested_address_of_another_family_is_ignored_with_a_note() {
        let spec = serde_json::json!({"type": "LoadBalancer", "loadBalancerIP": "2001:db8::1", "ports": [{"port": 80}]});
        let wanted = wanted_of(spec).unwrap();
        assert_eq!((wanted.addresses.len(), wanted.unread), (0, [Unread::Addresses].into()));
        assert!(wanted.notes[0].text.contains("no family IPv6"), "{:?}", wanted.notes);
    }

    #[test]
    fn other_types_and_headless_services_are_not_served_and_marked_if_that_is_expected() {
        let rows = [("ClusterIP", "10.96.0.1", false), ("ClusterIP", "None", true), ("ExternalName", "", true)];
        for (kind, cluster_ip, is_expected) in rows {
            let mut object =
                service(&serde_json::json!({"type": kind, "clusterIP": cluster_ip, "externalName": "db.example.com"}));
            let not_ours = |object: &Service| match Candidate::try_from(object) {
                Err(NotServable::NotOurs { is_expected, .. }) => is_expected,
                other => panic!("{other:?}"),
            };
            assert!(!not_ours(&object), "{kind}");
            object.metadata.annotations = Some([("sluice.dev/addresses".to_owned(), "192.0.2.1".to_owned())].into());
            assert_eq!(not_ours(&object), is_expected, "{kind} {cluster_ip}");
        }
        let headless =
            wanted_of(serde_json::json!({"type": "NodePort", "clusterIP": "None", "ports": [{"port": 80, "nodePort": 30080}]}));
        assert_eq!(headless, Err(SpecError::Headless));
    }

    #[test]
    fn a_misspelt_type_refuses_the_service_and_an_unknown_one_is_marked_as_expected() {
        for (found, kind) in [("Loadbalancer", Kind::LoadBalancer), ("nodePort", Kind::NodePort)] {
            let read = Candidate::try_from(&service(&serde_json::json!({"type": found, "ports": [{"port": 80}]}))).unwrap();
            assert_eq!(read.kind, kind);
            let message = read.wanted.unwrap_err().refusal().message;
            assert!(message.contains(found) && message.contains("expected LoadBalancer"), "{message}");
        }
        for found in ["ClusterIp", "Frobnicator"] {
            let spec = serde_json::json!({"type": found, "externalIPs": ["192.0.2.1"], "ports": [{"port": 80}]});
            let read = Candidate::try_from(&service(&spec)).unwrap();
            assert!(read.kind == Kind::ClusterIp && matches!(read.wanted, Err(SpecError::Word { .. })), "{:?}", read.wanted);
        }
        for found in ["Frobnicator", "ClusterIp"] {
            let error = Candidate::try_from(&service(&serde_json::json!({"type": found}))).unwrap_err();
            assert!(matches!(error, NotServable::NotOurs { is_expected: true, .. }), "{error:?}");
        }
        let plain = Candidate::try_from(&service(&serde_json::json!({"type": "", "ports": [{"port": 80}]}))).unwrap_err();
        assert!(matches!(plain, NotServable::NotOurs { is_expected: false, .. }), "{plain:?}");
    }

    #[test]
    fn a_traffic_policy_is_cluster_or_local() {
        for (text, expected) in [("Cluster", Some(false)), ("Local", Some(true)), ("Nearby", None)] {
            assert_eq!(
                is_local(&serde_json::from_value(serde_json::json!({"externalTrafficPolicy": text})).unwrap()).ok(),
                expected
            );
        }
        assert_eq!(is_local(&ServiceFields::default()), Ok(false));
    }
}
