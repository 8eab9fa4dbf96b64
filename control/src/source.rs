//! What a source of objects tells the controller, and what it is asked to write back. Two sources exist: a directory
//! of manifests and a Kubernetes API server.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Namespace, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use proto::{Protocol, ServiceName};

use crate::checkpoint::Checkpoint;
use crate::crd::AddressPool;
use crate::note::Note;
use crate::overrides::Overrides;
use crate::spec::{Condition, ConditionType};

/// A change of the objects. A source sends every `*Replaced` before anything is planned, and again after a relist.
#[derive(Clone, Debug)]
pub enum Change {
    /// All Services there are.
    ServicesReplaced(Vec<Service>),
    /// All EndpointSlices there are.
    SlicesReplaced(Vec<EndpointSlice>),
    /// All Nodes there are.
    NodesReplaced(Vec<Node>),
    /// All Namespaces there are.
    NamespacesReplaced(Vec<Namespace>),
    /// All `AddressPool`s there are. None where the kind is not known: pools may stand in the configuration alone.
    PoolsReplaced(Vec<AddressPool>),
    /// The gateways that were ever seen, and the addresses that each uses itself: told once, at the start.
    GatewaysReplaced(BTreeMap<String, Vec<IpAddr>>),
    /// What a leader before us decided: told once, at the start.
    CheckpointReplaced(Box<Checkpoint>),
    /// A Service appeared or changed.
    ServiceApplied(Box<Service>),
    /// An EndpointSlice appeared or changed.
    SliceApplied(Box<EndpointSlice>),
    /// A Node appeared or changed.
    NodeApplied(Box<Node>),
    /// A Namespace appeared or changed.
    NamespaceApplied(Box<Namespace>),
    /// An `AddressPool` appeared or changed.
    PoolApplied(Box<AddressPool>),
    /// A Service is gone.
    ServiceDeleted(ServiceName),
    /// An EndpointSlice is gone: namespace and name of the slice.
    SliceDeleted(ServiceName),
    /// A Node is gone: its name.
    NodeDeleted(String),
    /// A Namespace is gone: its name.
    NamespaceDeleted(String),
    /// An `AddressPool` is gone: its name.
    PoolDeleted(String),
    /// What operators set by hand, all of it.
    OverridesReplaced(Box<Overrides>),
    /// Something that the owner of an object should know, such as that it cannot be read.
    Noted(Note),
}

/// What of a Service's object is to change, and the object version that this was decided on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusWrite {
    /// The Service.
    pub service: ServiceName,
    /// Guard: the object's uid. Empty for manifests.
    pub uid: String,
    /// Guard: the object's resourceVersion. Empty for manifests.
    pub resource_version: String,
    /// The addresses, in the order of `ipFamilies`. Empty clears them; none leaves them.
    pub ingress: Option<Vec<Ingress>>,
    /// The conditions that change; none as value takes one away.
    pub conditions: BTreeMap<ConditionType, Option<Condition>>,
    /// Whether our finalizer shall be there; none leaves it as it is.
    pub finalizer: Option<bool>,
    /// The group that shall stand there. Empty takes it away; none leaves it.
    pub group: Option<String>,
}

/// One entry of `status.loadBalancer.ingress`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ingress {
    /// The VIP.
    pub ip: IpAddr,
    /// `Proxy` where nodes do not see the VIP as destination, else `VIP`.
    pub ip_mode: IpMode,
    /// The ports of the Service, in its order.
    pub ports: Vec<PortStatus>,
}

/// One entry of `status.loadBalancer.ingress[].ports`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PortStatus {
    /// At the VIP.
    pub port: u16,
    /// Of the port.
    pub protocol: Protocol,
    /// Why it is not served, as the API has it: `sluice.dev/REASON`.
    pub error: Option<Cow<'static, str>>,
}

impl Ingress {
    /// An entry that says nothing of ports.
    #[must_use]
    pub const fn new(ip: IpAddr, ip_mode: IpMode) -> Self {
        Self { ip, ip_mode, ports: Vec::new() }
    }

    /// Whether both tell clients and nodes the same, whatever they say of ports.
    #[must_use]
    pub fn leads_as(&self, other: &Self) -> bool {
        (self.ip, self.ip_mode) == (other.ip, other.ip_mode)
    }
}

/// Kubernetes' `ipMode` (KEP-1860).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IpMode {
    /// Traffic reaches the node with the VIP as destination.
    Vip,
    /// Traffic reaches the node or pod with another destination.
    Proxy,
}

impl IpMode {
    /// As the API writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vip => "VIP",
            Self::Proxy => "Proxy",
        }
    }
}
