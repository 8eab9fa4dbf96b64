//! A parsed Node: its addresses, and whether load balancers may send traffic to it.
//!
//! Deliberately not here: whether a node is ready. Kubernetes ignores this too (KEP-3458): a node without kubelet may
//! still forward, and probes find out whether it does.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use proto::Family;

/// Label that excludes a node from load balancers, unless its value means false.
const EXCLUDE_LABEL: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// Taint of a node that is about to be removed.
const DELETION_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// Relevant fields of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeSpec {
    /// Its name, which endpoints use to name their node.
    pub name: String,
    /// Its first `InternalIP` of each family.
    pub addresses: Vec<IpAddr>,
    /// Every `InternalIP` and `ExternalIP`, ordered by address. None of them may be a VIP.
    pub all_addresses: Vec<IpAddr>,
    /// Why it is excluded from load balancers.
    pub excluded: Option<String>,
}

/// Why a Node cannot be used.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("a Node without metadata.name")]
pub struct NodeError;

impl NodeSpec {
    /// Its address in a family.
    #[must_use]
    pub fn address(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| Family::of(*address) == family)
    }
}

impl TryFrom<&Node> for NodeSpec {
    type Error = NodeError;

    fn try_from(node: &Node) -> Result<Self, NodeError> {
        let name = node.metadata.name.clone().ok_or(NodeError)?;
        let listed = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
        let internal = listed.iter().filter(|entry| entry.type_ == "InternalIP");
        let mut addresses: Vec<IpAddr> = Vec::new();
        for address in internal.filter_map(|entry| entry.address.parse().ok()) {
            if !addresses.iter().any(|known| Family::of(*known) == Family::of(address)) {
                addresses.push(address);
            }
        }
        let own = listed.iter().filter(|entry| matches!(entry.type_.as_str(), "InternalIP" | "ExternalIP"));
        let mut all_addresses: Vec<IpAddr> = own.filter_map(|entry| entry.address.parse().ok()).collect();
        all_addresses.sort_unstable();
        all_addresses.dedup();
        Ok(Self { name, addresses, all_addresses, excluded: excluded(node) })
    }
}

fn excluded(node: &Node) -> Option<String> {
    if node.metadata.deletion_timestamp.is_some() {
        return Some("is being deleted".to_owned());
    }
    let label = node.metadata.labels.as_ref().and_then(|labels| labels.get(EXCLUDE_LABEL));
    if label.is_some_and(|value| !is_false(value)) {
        return Some(format!("has the label {EXCLUDE_LABEL}"));
    }
    let mut taints = node.spec.iter().filter_map(|spec| spec.taints.as_ref()).flatten();
    taints.any(|taint| taint.key == DELETION_TAINT).then(|| format!("has the taint {DELETION_TAINT}"))
}

/// The values that Kubernetes parses as false; a value that it cannot parse excludes the node.
fn is_false(value: &str) -> bool {
    matches!(value, "0" | "f" | "F" | "false" | "FALSE" | "False")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(value: Value) -> NodeSpec {
        NodeSpec::try_from(&serde_json::from_value::<Node>(value).unwrap()).unwrap()
    }

    #[test]
    fn a_node_is_reached_at_its_first_internal_address_of_each_family() {
        let list = json!([{"type": "ExternalIP", "address": "198.51.100.1"}, {"type": "Hostname", "address": "a"},
            {"type": "InternalIP", "address": "fd00::1"}, {"type": "InternalIP", "address": "10.0.0.1"},
            {"type": "InternalIP", "address": "10.0.0.2"}, {"type": "InternalIP", "address": "fd00::2"}]);
        let node = read(json!({"metadata": {"name": "a"}, "status": {"addresses": list}}));
        assert_eq!(node.address(Family::V4), Some("10.0.0.1".parse().unwrap()));
        assert_eq!(node.address(Family::V6), Some("fd00::1".parse().unwrap()));
        let all = ["10.0.0.1", "10.0.0.2", "198.51.100.1", "fd00::1", "fd00::2"].map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(node.all_addresses, all);
        assert_eq!(read(json!({"metadata": {"name": "a"}})).address(Family::V4), None);
    }

    #[test]
    fn labels_taints_and_deletion_exclude_and_readiness_does_not() {
        let label = |value: &str| json!({"metadata": {"name": "a", "labels": {EXCLUDE_LABEL: value}}});
        let tainted = |key: &str| json!({"metadata": {"name": "a"}, "spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
        let not_ready = json!([{"type": "Ready", "status": "False"}]);
        let rows = [
            (json!({"metadata": {"name": "a"}, "status": {"conditions": not_ready}}), None),
            (label("true"), Some("label")),
            (label(""), Some("label")),
            (label("no"), Some("label")),
            (label("false"), None),
            (label("0"), None),
            (tainted(DELETION_TAINT), Some("taint")),
            (tainted("node.kubernetes.io/unschedulable"), None),
            (json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}}), Some("deleted")),
        ];
        for (value, expected) in rows {
            let excluded = read(value.clone()).excluded;
            assert_eq!(excluded.is_some(), expected.is_some(), "{value}: {excluded:?}");
            assert!(excluded.is_none_or(|why| why.contains(expected.unwrap())));
        }
    }
}
