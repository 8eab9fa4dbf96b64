//! Changes of objects, as a source sends them to the controller. There are two sources: a directory of manifests and a
//! Kubernetes API server.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Namespace, Node};
use objects::crd::{AddressPool, EdgeGateway};
use objects::note::Note;
use objects::{ReadService, ReadSlice};
use proto::ServiceName;

use crate::world::checkpoint::Checkpoint;
use crate::world::overrides::Overrides;

/// A gateway, as its `EdgeGateway` object shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownGateway {
    /// Its group.
    pub group: String,
    /// The addresses that it uses itself.
    pub addresses: Vec<IpAddr>,
}

impl From<&EdgeGateway> for KnownGateway {
    fn from(object: &EdgeGateway) -> Self {
        let addresses = object.status.iter().filter_map(|status| status.addresses.as_ref()).flatten();
        Self { group: object.spec.group.clone(), addresses: addresses.filter_map(|text| text.parse().ok()).collect() }
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
    fn group_and_addresses_of_a_gateway_come_from_its_object() {
        let addresses = Some(vec!["192.0.2.2".to_owned(), "no address".to_owned()]);
        let mut object = EdgeGateway::new("edge-1", EdgeGatewaySpec { group: "east".to_owned() });
        object.status = Some(EdgeGatewayStatus { addresses, ..EdgeGatewayStatus::default() });
        let expected = KnownGateway { group: "east".to_owned(), addresses: vec!["192.0.2.2".parse().unwrap()] };
        assert_eq!(KnownGateway::from(&object), expected);
    }
}
