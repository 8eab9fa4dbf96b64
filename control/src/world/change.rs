//! Changes of objects, as a source sends them to the controller. There are two sources: a directory of manifests and a
//! Kubernetes API server.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::jiff::Timestamp;
use objects::crd::{AddressPool, EdgeGateway};
use objects::note::Note;
use objects::{ReadService, ReadSlice};
use proto::{GatewayProfile, ServiceName};

use crate::world::checkpoint::Checkpoint;
use crate::world::overrides::Overrides;

/// Maximum age of LAST-SEEN in the object of a connected gateway, while the API server takes writes.
pub const LAST_SEEN_AGE_MAX: Duration = Duration::from_secs(60);

/// A gateway, as its `EdgeGateway` object shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownGateway {
    /// Its group.
    pub group: String,
    /// What it said about itself when it was last connected.
    pub profile: GatewayProfile,
    /// When it was last seen, seconds since 1970; `None`: unknown, or it is connected.
    pub last_seen_s: Option<u64>,
}

impl From<&EdgeGateway> for KnownGateway {
    fn from(object: &EdgeGateway) -> Self {
        let status = object.status.clone().unwrap_or_default();
        let addresses = |list: Option<Vec<String>>| -> Vec<IpAddr> {
            list.into_iter().flatten().filter_map(|text| text.parse().ok()).collect()
        };
        let next_hops = addresses(status.next_hops);
        let own = addresses(status.addresses).into_iter().filter(|address| !next_hops.contains(address));
        let prefixes = status.prefixes.into_iter().flatten().filter_map(|text| text.parse().ok()).collect();
        let max_state_age = status.max_state_age_seconds.map(Duration::from_secs);
        let last_seen = status.last_seen.and_then(|text| text.parse::<Timestamp>().ok());
        Self {
            group: object.spec.group.clone(),
            profile: GatewayProfile { prefixes, max_state_age, ..GatewayProfile::new(own, next_hops.iter().copied()) },
            last_seen_s: last_seen.and_then(|time| u64::try_from(time.as_second()).ok()),
        }
    }
}

/// A change of the objects. A source sends every `*Replaced` before the first plan, and again after a relist.
#[derive(Clone, Debug)]
pub enum Change {
    /// The complete list of Services.
    ServicesReplaced(Vec<ReadService>),
    /// The complete list of EndpointSlices.
    SlicesReplaced(Vec<ReadSlice>),
    /// The complete list of Nodes.
    NodesReplaced(Vec<Node>),
    /// The complete list of Namespaces.
    NamespacesReplaced(Vec<Namespace>),
    /// The complete list of `AddressPool`s. Empty if the CRD is not installed: pools may come from the configuration
    /// alone.
    PoolsReplaced(Vec<AddressPool>),
    /// All gateways ever seen, of every group, by name.
    GatewaysReplaced(BTreeMap<String, KnownGateway>),
    /// Decisions of a previous leader. Sent once, at the start.
    CheckpointReplaced(Box<Checkpoint>),
    /// A Service was added or changed.
    ServiceApplied(Box<ReadService>),
    /// An EndpointSlice was added or changed.
    SliceApplied(Box<ReadSlice>),
    /// A Node was added or changed.
    NodeApplied(Box<Node>),
    /// A Namespace was added or changed.
    NamespaceApplied(Box<Namespace>),
    /// An `AddressPool` was added or changed.
    PoolApplied(Box<AddressPool>),
    /// A Service was deleted.
    ServiceDeleted(ServiceName),
    /// An EndpointSlice was deleted: namespace and name.
    SliceDeleted(ServiceName),
    /// A Node was deleted: its name.
    NodeDeleted(String),
    /// A Namespace was deleted: its name.
    NamespaceDeleted(String),
    /// An `AddressPool` was deleted: its name.
    PoolDeleted(String),
    /// All manual overrides of operators.
    OverridesReplaced(Box<Overrides>),
    /// A note for the owner of an object, for example that it cannot be parsed.
    Noted(Note),
}

#[cfg(test)]
mod tests {
    use objects::crd::{EdgeGatewaySpec, EdgeGatewayStatus};

    use super::*;

    #[test]
    fn what_a_gateway_said_comes_from_its_object() {
        let texts = |list: &[&str]| Some(list.iter().map(|text| (*text).to_owned()).collect());
        let mut object = EdgeGateway::new("edge-1", EdgeGatewaySpec { group: "east".to_owned() });
        object.status = Some(EdgeGatewayStatus {
            addresses: texts(&["192.0.2.1", "192.0.2.2", "no address"]),
            next_hops: texts(&["192.0.2.1"]),
            prefixes: texts(&["192.0.2.2/24", "no prefix"]),
            max_state_age_seconds: Some(90),
            last_seen: Some("1970-01-01T00:01:00Z".to_owned()),
            ..EdgeGatewayStatus::default()
        });
        let profile = GatewayProfile {
            max_state_age: Some(Duration::from_secs(90)),
            prefixes: vec!["192.0.2.2/24".parse().unwrap()],
            ..GatewayProfile::new(["192.0.2.2".parse().unwrap()], ["192.0.2.1".parse().unwrap()])
        };
        let expected = KnownGateway { group: "east".to_owned(), profile, last_seen_s: Some(60) };
        assert_eq!(KnownGateway::from(&object), expected);
    }
}
