//! The kinds that sluice adds to a cluster: `AddressPool`, which operators write, and `EdgeGateway`, which shows them the
//! gateways.
//!
//! Invariant: additive only within v1beta1; a field that was ever served keeps its name and meaning. What the API server
//! refuses by the schema, the controller refuses too (`spec::pool`): manifests have no API server.
//! Deliberately not here: which values are legal together (`spec::pool`), and who writes their status.

mod schema;

pub use schema::{ADDRESS_CHARS_MAX, ADDRESSES_MAX, CLASS_CHARS_MAX, GATEWAY_ADDRESSES_MAX, PER_NAMESPACE_MAX, PRIORITY_MAX};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, CustomResourceExt as _};
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
#[kube(
    group = "sluice.dev",
    version = "v1beta1",
    kind = "AddressPool",
    plural = "addresspools",
    status = "AddressPoolStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name": "ADDRESSES", "type": "string", "jsonPath": ".spec.addresses"}"#,
    printcolumn = r#"{"name": "TOTAL", "type": "string", "jsonPath": ".status.total"}"#,
    printcolumn = r#"{"name": "USED", "type": "string", "jsonPath": ".status.used"}"#,
    printcolumn = r#"{"name": "AVAILABLE", "type": "string", "jsonPath": ".status.available"}"#,
    printcolumn = r#"{"name": "CONFLICT", "type": "string", "jsonPath": ".status.conditions[?(@.type==\"Conflict\")].status"}"#,
    printcolumn = r#"{"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolSpec {
    /// CIDRs, ranges FIRST-LAST and single addresses of both families.
    #[schemars(schema_with = "schema::addresses")]
    pub addresses: Vec<String>,
    /// Whether Services that ask for neither pool nor address may get one of these. Default true.
    #[serde(default = "yes")]
    pub auto_assign: bool,
    /// Leave out IPv4 addresses that end in .0 or .255: some networks drop them.
    #[serde(default, rename = "avoidBuggyIPs")]
    pub avoid_buggy_ips: bool,
    /// Pools of a lower number are used first; 0, the default, comes last. Of equal ones, first those of the configuration
    /// in its order, then the others by name.
    #[serde(default)]
    #[schemars(range(min = 0, max = 65535), extend("format" = "int32"))]
    pub priority: u32,
    /// Namespaces whose Services may have one of these addresses; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::selector")]
    pub namespace_selector: Option<LabelSelector>,
    /// Services that may have one of these addresses; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::selector")]
    pub service_selector: Option<LabelSelector>,
    /// Addresses that one namespace may hold; none: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65536), extend("format" = "int32"))]
    pub max_per_namespace: Option<u32>,
    /// Only the installation of this class uses the pool; none: every one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::class")]
    pub load_balancer_class: Option<String>,
    /// How routers learn of the addresses.
    #[serde(default)]
    pub announce: AnnounceKind,
    /// Whether Services of different namespaces may share an address under MetalLB's sharing key alone.
    #[serde(default)]
    pub allow_cross_namespace_sharing: bool,
    /// Whether only clients inside reach these addresses. Services that ask for an internal load balancer get one of such a
    /// pool and of no other; all others get one of it only if they ask for the pool or the address.
    #[serde(default)]
    pub internal: bool,
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
    /// `Conflict`: the pool is not used, because of what its message says. `Exhausted`: none of its addresses is left.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A gateway of an installation, as its controller last saw it. Nobody but the controller writes it.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "sluice.dev",
    version = "v1beta1",
    kind = "EdgeGateway",
    plural = "edgegateways",
    status = "EdgeGatewayStatus",
    printcolumn = r#"{"name": "GROUP", "type": "string", "jsonPath": ".spec.group"}"#,
    printcolumn = r#"{"name": "READY", "type": "string", "jsonPath": ".status.ready"}"#,
    printcolumn = r#"{"name": "SERVICES", "type": "integer", "jsonPath": ".status.services"}"#,
    printcolumn = r#"{"name": "LAST-SEEN", "type": "date", "jsonPath": ".status.lastSeen"}"#,
    printcolumn = r#"{"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
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
    #[schemars(extend("format" = "int32"))]
    pub services: Option<u32>,
    /// Version of its program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// When it was last connected, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seen: Option<String>,
    /// Addresses that it uses itself: of its ports, next hops, SNAT and node ports. No Service gets one, and no backend may
    /// be one, also while it is not connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), inner(length(max = 39)))]
    pub addresses: Option<Vec<String>>,
}

/// The definitions of both kinds, as `kubectl apply -f -` takes them.
///
/// # Errors
/// When they cannot be written as YAML.
pub fn definitions() -> Result<String, serde_saphyr::SerializeError> {
    let [pools, gateways] = [AddressPool::crd(), EdgeGateway::crd()];
    Ok(format!("{}---\n{}", serde_saphyr::to_string(&pools)?, serde_saphyr::to_string(&gateways)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_one_that_an_api_server_knows() {
        let text = definitions().unwrap();
        let formats = text.lines().filter_map(|line| line.trim().strip_prefix("format: "));
        assert!(formats.clone().count() > 2 && formats.clone().all(|format| ["int32", "int64", "date-time"].contains(&format)));
    }

    /// After a change of a kind: `sluice-controller crds > deploy/crds.yaml`.
    #[test]
    fn the_definitions_that_are_shipped_are_those_that_the_program_prints() {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/crds.yaml");
        assert_eq!(std::fs::read_to_string(shipped).unwrap(), definitions().unwrap());
    }
}
