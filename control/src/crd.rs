//! The kinds that sluice adds to a cluster: `AddressPool`, which operators write, and `EdgeGateway`, which shows them the
//! gateways.
//!
//! Invariant: additive only within v1beta1; a field that was ever served keeps its name and meaning.
//! Deliberately not here: which values are legal together (`spec::pool`), and who writes their status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How routers learn of the addresses of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AnnounceKind {
    /// By ARP and neighbour discovery.
    #[default]
    L2,
    /// By routes that a routing daemon on the gateway announces.
    Routed,
}

/// Addresses that load balancer addresses are taken from.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(group = "sluice.dev", version = "v1beta1", kind = "AddressPool", plural = "addresspools", status = "AddressPoolStatus")]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolSpec {
    /// CIDRs, ranges FIRST-LAST and single addresses of both families.
    pub addresses: Vec<String>,
    /// Whether Services that ask for neither pool nor address may get one of these. Default true.
    #[serde(default = "yes")]
    pub auto_assign: bool,
    /// Leave out IPv4 addresses that end in .0 or .255: some networks drop them.
    #[serde(default)]
    pub avoid_buggy_ips: bool,
    /// Pools of a lower number are used first; of equal ones the first by name. 0, the default, comes last.
    #[serde(default)]
    pub priority: u32,
    /// Namespaces whose Services may have one of these addresses; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Services that may have one of these addresses; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_selector: Option<LabelSelector>,
    /// Addresses that one namespace may hold; none: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_per_namespace: Option<u32>,
    /// Only the installation of this class uses the pool; none: every one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_balancer_class: Option<String>,
    /// How routers learn of the addresses.
    #[serde(default)]
    pub announce: AnnounceKind,
    /// Whether Services of different namespaces may share an address under MetalLB's sharing key alone.
    #[serde(default)]
    pub allow_cross_namespace_sharing: bool,
}

const fn yes() -> bool {
    true
}

/// What became of a pool. Counts are strings: a /64 has more addresses than a JSON number can tell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolStatus {
    /// Addresses in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<String>,
    /// Addresses that Services hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<String>,
    /// Addresses that a Service could have now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available: Option<String>,
    /// `Conflict`: the pool is not used, because of what its message says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A gateway of an installation, as its controller last saw it. Nobody but the controller writes it.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(group = "sluice.dev", version = "v1beta1", kind = "EdgeGateway", plural = "edgegateways", status = "EdgeGatewayStatus")]
#[serde(rename_all = "camelCase")]
pub struct EdgeGatewaySpec {
    /// The group, which is the installation, that it belongs to.
    pub group: String,
}

/// What a gateway says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EdgeGatewayStatus {
    /// `True` while it is connected and forwards by the newest state; else `False`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<String>,
    /// Services that it serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<u32>,
    /// Version of its program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// When it was last connected, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<String>,
}
