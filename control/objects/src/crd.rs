//! The kinds that sluice adds to a cluster: `AddressPool`, which operators write, and `EdgeGateway`, which shows them the
//! gateways.
//!
//! Invariant: additive only within v1beta1; a field that was ever served keeps its name and meaning. What the API server
//! refuses by the schema, the controller refuses too (`pool`): manifests have no API server.
//! Deliberately not here: which values are legal together (`pool`), and who writes their status.

mod schema;

pub use schema::{
    ADDRESS_CHARS_MAX, ADDRESSES_MAX, CLASS_CHARS_MAX, COMMUNITIES_MAX, GATEWAY_ADDRESSES_MAX, PER_NAMESPACE_MAX, PRIORITY_MAX,
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube_core::CustomResourceExt as _;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How routers learn the addresses of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AnnounceKind {
    /// By ARP and neighbour discovery.
    #[default]
    L2,
    /// By routes that a routing daemon on the gateway announces.
    Routed,
}

/// How routing daemons announce the addresses of a pool by BGP.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BgpSpec {
    /// Communities of their routes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub communities: Vec<String>,
    /// Multi-exit discriminator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub med: Option<u32>,
    /// Local preference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_pref: Option<u32>,
    /// Length of the prefixes by which IPv4 addresses are announced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aggregation_length: Option<u32>,
    /// The same for IPv6.
    #[serde(default, rename = "aggregationLengthV6", skip_serializing_if = "Option::is_none")]
    pub aggregation_length_v6: Option<u32>,
}

/// A pool of load balancer addresses.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "kube_core"),
    group = "sluice.dev",
    version = "v1beta1",
    kind = "AddressPool",
    plural = "addresspools",
    shortname = "apool",
    doc = "Addresses that sluice gives to Services of type LoadBalancer.",
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
#[schemars(extend("x-kubernetes-validations" = schema::pool_rules()))]
pub struct AddressPoolSpec {
    /// CIDRs, ranges FIRST-LAST and single addresses of both families.
    #[schemars(schema_with = "schema::addresses")]
    pub addresses: Vec<String>,
    /// Whether Services that request neither a pool nor an address may get one of these addresses. Default true.
    #[serde(default = "yes")]
    pub auto_assign: bool,
    /// Leave out IPv4 addresses that end in .0 or .255: some networks drop them.
    #[serde(default, rename = "avoidBuggyIPs")]
    pub avoid_buggy_ips: bool,
    /// Pools with a lower number are used first; 0, the default, comes last. Pools of equal priority: those of the
    /// configuration first, in its order, then the others by name.
    #[serde(default)]
    #[schemars(range(min = 0, max = 65535), extend("format" = "int32"))]
    pub priority: u32,
    /// Namespaces whose Services may get one of these addresses; unset means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::selector")]
    pub namespace_selector: Option<LabelSelector>,
    /// Services that may get one of these addresses; unset means all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::selector")]
    pub service_selector: Option<LabelSelector>,
    /// Maximum number of addresses per namespace; unset means no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65536), extend("format" = "int32"))]
    pub max_per_namespace: Option<u32>,
    /// Only the installation of this class uses the pool; unset means that of the default class, `sluice.dev/gateway`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::class")]
    pub load_balancer_class: Option<String>,
    /// The group of gateways that uses the pool; unset means the group that serves what names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::gateway_group")]
    pub gateway_group: Option<String>,
    /// How routers learn the addresses.
    #[serde(default)]
    pub announce: AnnounceKind,
    /// How routing daemons announce the addresses by BGP; with `announce: routed` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::bgp")]
    pub bgp: Option<BgpSpec>,
    /// Whether Services of different namespaces may share an address under MetalLB's sharing key alone.
    #[serde(default)]
    pub allow_cross_namespace_sharing: bool,
    /// Whether these addresses are internal. Services that request an internal load balancer get addresses only from internal
    /// pools; other Services get one only if they request the pool or the address.
    #[serde(default)]
    pub internal: bool,
}

const fn yes() -> bool {
    true
}

/// Status of a pool. Counts are strings, because a /64 has more addresses than a JSON number can represent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolStatus {
    /// Addresses in the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<String>,
    /// Addresses held by Services.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<String>,
    /// Available addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub available: Option<String>,
    /// `Conflict`: the pool is not used, for the reason in the message. `Exhausted`: no address is available. `Announceable`, of
    /// l2 pools: every gateway can answer ARP and NDP for the addresses; the message names those that cannot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
}

/// A gateway of an installation, as its controller last saw it. Only the controller writes it.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    crates(kube_core = "kube_core"),
    group = "sluice.dev",
    version = "v1beta1",
    kind = "EdgeGateway",
    plural = "edgegateways",
    shortname = "edgegw",
    doc = "A gateway of a sluice installation, as its controller last saw it. Only the controller writes it.",
    status = "EdgeGatewayStatus",
    printcolumn = r#"{"name": "GROUP", "type": "string", "jsonPath": ".spec.group"}"#,
    printcolumn = r#"{"name": "READY", "type": "string", "jsonPath": ".status.ready"}"#,
    printcolumn = r#"{"name": "SERVICES", "type": "integer", "jsonPath": ".status.services"}"#,
    printcolumn = r#"{"name": "VIP-GROUPS", "type": "string", "jsonPath": ".status.vipGroups"}"#,
    printcolumn = r#"{"name": "SESSIONS", "type": "string", "jsonPath": ".status.sessionsUp"}"#,
    printcolumn = r#"{"name": "LAST-SEEN", "type": "date", "jsonPath": ".status.lastSeen"}"#,
    printcolumn = r#"{"name": "AGE", "type": "date", "jsonPath": ".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct EdgeGatewaySpec {
    /// The group of its installation.
    pub group: String,
}

/// Status of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EdgeGatewayStatus {
    /// `True` while it is connected and has applied the newest state; else `False`.
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
    /// Addresses that it uses itself: of its ports, next hops, SNAT and node ports. No Service gets one of them, also while
    /// the gateway is not connected, and no backend may have one that is not in `nextHops`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), inner(length(max = 39)))]
    pub addresses: Option<Vec<String>>,
    /// Those of `addresses` that are only next hops: no Service gets one of them, but a backend may have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), inner(length(max = 39)))]
    pub next_hops: Option<Vec<String>>,
    /// Prefixes of its ports and VLAN devices: no Service gets the network or the broadcast address of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), inner(length(max = 43)))]
    pub prefixes: Option<Vec<String>>,
    /// How long it uses a state that no controller confirms (its key `maxStateAge`), seconds. Unset: it did not say, and a
    /// day is assumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub max_state_age_seconds: Option<u64>,
    /// Groups of VIPs that it owns, of how many: `5/16`. Unset without an election.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vip_groups: Option<String>,
    /// The groups of VIPs that it owns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub owned_groups: Option<Vec<i32>>,
    /// How often it has taken over a group of VIPs since its start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub takeovers: Option<u64>,
    /// The gateways to which it replicates flows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub partners: Option<Vec<EdgeGatewayPartner>>,
    /// Age of the oldest change of a flow that a partner has not acknowledged, milliseconds; at most a minute old.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub lag_ms: Option<u64>,
    /// Flows of partners that it keeps; at most a minute old.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("format" = "int64"))]
    pub shadow_flows: Option<u64>,
    /// Routing sessions that are up, of how many: `2/2`. Unset without any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sessions_up: Option<String>,
    /// The sessions of the routing daemon beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub sessions: Option<Vec<EdgeGatewaySession>>,
    /// `Ready`, `Draining`, `DuplicateVIP`; with an election `Eligible`, with partners `InSync`, with routing sessions
    /// `SessionsUp`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub conditions: Vec<Condition>,
}

/// A gateway to which another one replicates flows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EdgeGatewayPartner {
    /// Its name, or its address while the name is unknown.
    pub name: String,
    /// Where it is reached.
    pub address: String,
    /// Whether it has all flows.
    pub in_sync: bool,
}

/// A session of a routing daemon with a router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EdgeGatewaySession {
    /// `bgp` or `bfd`.
    pub protocol: String,
    /// The router.
    pub peer: String,
    /// `up`, `down`, or `disabled` by an operator of the daemon.
    pub status: String,
    /// Since when the gateway has seen it in this status, RFC 3339.
    pub since: String,
}

/// The definitions of both kinds as YAML for `kubectl apply -f -`.
///
/// # Errors
/// If they cannot be serialized as YAML.
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

    #[test]
    fn both_kinds_have_descriptions_and_short_names() {
        for (definition, short) in [(AddressPool::crd(), "apool"), (EdgeGateway::crd(), "edgegw")] {
            assert_eq!(definition.spec.names.short_names, Some(vec![short.to_owned()]));
            let schema = definition.spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap();
            let description = schema.description.unwrap_or_default();
            assert!(description.contains("sluice") && !description.contains("Auto-generated"), "{description}");
            let undescribed = |part: &str| -> Vec<String> {
                let fields = schema.properties.as_ref().unwrap()[part].properties.clone().unwrap();
                fields.into_iter().filter(|(_, field)| field.description.is_none()).map(|(name, _)| name).collect()
            };
            assert_eq!([undescribed("spec"), undescribed("status")], [Vec::<String>::new(), Vec::new()]);
        }
    }

    /// After a change of a kind: `sluice-controller crds > deploy/crds.yaml`.
    #[test]
    fn the_shipped_definitions_equal_the_printed_ones() {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/crds.yaml");
        assert_eq!(std::fs::read_to_string(shipped).unwrap(), definitions().unwrap());
    }
}
