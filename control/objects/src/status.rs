//! The content that the controller writes into a Service object: addresses, conditions, the finalizer and the group.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::jiff::Timestamp;
use proto::{Protocol, ServiceName};

/// Changes of a Service object, and the object version for which they were decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusWrite {
    /// The Service.
    pub service: ServiceName,
    /// Guard: the object's uid. Empty for manifests.
    pub uid: String,
    /// Guard: the object's resourceVersion. Empty for manifests.
    pub resource_version: String,
    /// The addresses, in the order of `ipFamilies`. Empty clears them; `None` keeps them.
    pub ingress: Option<Vec<Ingress>>,
    /// The conditions that change; a value of `None` removes one.
    pub conditions: BTreeMap<ConditionType, Option<Condition>>,
    /// Whether our finalizer is added or removed; `None` keeps it.
    pub finalizer: Option<bool>,
    /// The group. Empty removes it; `None` keeps it.
    pub group: Option<String>,
}

/// One entry of `status.loadBalancer.ingress`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ingress {
    /// The VIP.
    pub ip: IpAddr,
    /// `Proxy` if nodes do not see the VIP as destination, else `VIP`.
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
    /// Why it is not served, in the API's format: `sluice.dev/REASON`.
    pub error: Option<Cow<'static, str>>,
}

impl Ingress {
    /// An entry without ports.
    #[must_use]
    pub const fn new(ip: IpAddr, ip_mode: IpMode) -> Self {
        Self { ip, ip_mode, ports: Vec::new() }
    }

    /// Whether both mean the same for clients and nodes, ignoring ports.
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
    /// Its name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vip => "VIP",
            Self::Proxy => "Proxy",
        }
    }
}

/// The conditions that sluice writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ConditionType {
    /// The Service has every address that it needs.
    AddressAssigned,
    /// Gateways forward for it.
    Programmed,
    /// At least one gateway has a healthy backend.
    BackendsHealthy,
}

impl ConditionType {
    /// The complete set.
    pub const ALL: [Self; 3] = [Self::AddressAssigned, Self::Programmed, Self::BackendsHealthy];

    /// Its `type`.
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
    /// Whether it holds. A condition that is neither true nor false is not written.
    pub holds: bool,
    /// One word.
    pub reason: Cow<'static, str>,
    /// A message that, apart from names of pools and of gateways that refuse it, is the same for every Service. Details
    /// of one Service are in Events.
    pub message: Cow<'static, str>,
    /// When `holds` last changed; `None` means when it is written.
    pub since: Option<Timestamp>,
}

impl Condition {
    /// A condition that begins now.
    #[must_use]
    pub const fn new(holds: bool, reason: &'static str, message: &'static str) -> Self {
        Self { holds, reason: Cow::Borrowed(reason), message: Cow::Borrowed(message), since: None }
    }

    /// A condition with a message that contains names.
    #[must_use]
    pub const fn naming(holds: bool, reason: &'static str, message: String) -> Self {
        Self { holds, reason: Cow::Borrowed(reason), message: Cow::Owned(message), since: None }
    }

    /// Whether both are equal, ignoring their times.
    #[must_use]
    pub fn says_the_same(&self, other: &Self) -> bool {
        self.holds == other.holds && self.reason == other.reason && self.message == other.message
    }
}
