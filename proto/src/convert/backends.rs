//! The backends of ports: listed, or the nodes of a set to which many ports refer.
//!
//! Invariant: a port refers to an existing set, of its own family except with a tunnel, and lists no backends besides.

use std::net::SocketAddr;
use std::sync::Arc;

use super::error::ConvertError;
use super::fields::{self, address_bytes, address_of, family_number, port};
use crate::{Backend, BackendState, Family, NodeBackend, NodeSet, NodeSets, NodesAt, ZoneBackends, limits, v1};

impl From<&NodeSet> for v1::NodeSet {
    fn from(set: &NodeSet) -> Self {
        let family = set.family.map_or(0, family_number);
        let node = |node: &NodeBackend| v1::Node {
            address: address_bytes(node.address),
            weight: node.weight.into(),
            draining: node.state == BackendState::Draining,
        };
        Self { name: set.name.clone(), family, nodes: set.nodes.iter().map(node).collect() }
    }
}

/// Converts a node set.
///
/// # Errors
/// When the message is not a valid set.
pub fn node_set(message: v1::NodeSet) -> Result<NodeSet, ConvertError> {
    let family = if message.family == 0 { None } else { Some(fields::family(message.family)?) };
    check_count(message.nodes.len())?;
    let node = |node: &v1::Node| {
        let (weight, state) = share(node.weight, node.draining)?;
        Ok(NodeBackend { address: address_of(family, &node.address)?, weight, state })
    };
    let nodes: Vec<NodeBackend> = message.nodes.iter().map(node).collect::<Result<_, _>>()?;
    match nodes.windows(2).find(|pair| pair[0].address >= pair[1].address) {
        Some(pair) => Err(ConvertError::NodeOrder(pair[1].address)),
        None => Ok(NodeSet { name: message.name, family, nodes }),
    }
}

/// The valid sets of a message, and the errors of the others. A set that equals the one in `before` keeps its `Arc`.
pub fn node_sets(messages: Vec<v1::NodeSet>, before: &NodeSets) -> (NodeSets, Vec<ConvertError>) {
    let (mut sets, mut errors) = (NodeSets::new(), Vec::new());
    for message in messages {
        match node_set(message) {
            Ok(set) => {
                let same = before.get(&set.name).filter(|old| ***old == set).cloned();
                let set = same.unwrap_or_else(|| Arc::new(set));
                sets.insert(set.name.clone(), set);
            }
            Err(error) => errors.push(error),
        }
    }
    (sets, errors)
}

fn check_count(backends: usize) -> Result<(), ConvertError> {
    if backends > limits::BACKENDS_PER_PORT_MAX { Err(ConvertError::TooManyBackends(backends)) } else { Ok(()) }
}

/// The weight and state of a backend or node.
fn share(weight: u32, draining: bool) -> Result<(u16, BackendState), ConvertError> {
    let state = if draining { BackendState::Draining } else { BackendState::Active };
    Ok((u16::try_from(weight).map_err(|_| ConvertError::Weight(weight))?, state))
}

/// The nodes to which a port refers; `family` is the required one, if any.
pub(super) fn nodes_at(
    message: &v1::ServicePort,
    family: Option<Family>,
    sets: &NodeSets,
) -> Result<Option<NodesAt>, ConvertError> {
    let name = &message.node_set;
    if name.is_empty() {
        return Ok(None);
    }
    if !message.backends.is_empty() {
        return Err(ConvertError::NodeSetBesideBackends(name.clone()));
    }
    let set = sets.get(name).ok_or_else(|| ConvertError::NodeSetUnknown(name.clone()))?;
    match family.filter(|family| set.family != Some(*family)) {
        Some(family) => Err(ConvertError::NodeSetFamily { name: name.clone(), family }),
        None => Ok(Some(NodesAt { set: Arc::clone(set), port: port("port at nodes", message.port_at_nodes)? })),
    }
}

/// The backends of one zone; `count` is the number of backends of the port.
pub(super) fn of_zone(message: v1::ZoneBackends, count: usize) -> Result<ZoneBackends, ConvertError> {
    let v1::ZoneBackends { zone, backends } = message;
    let is_index = |index: &u32| usize::try_from(*index).is_ok_and(|index| index < count);
    if backends.is_empty() || !backends.iter().all(is_index) || backends.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(ConvertError::ZoneBackends(zone));
    }
    Ok(ZoneBackends { zone, backends })
}

/// The listed backends of a port; `family` is the required one, if any.
pub(super) fn listed(family: Option<Family>, messages: &[v1::Backend]) -> Result<Vec<Backend>, ConvertError> {
    check_count(messages.len())?;
    let backend = |message: &v1::Backend| {
        let address = SocketAddr::new(address_of(family, &message.address)?, port("backend port", message.port)?);
        let (weight, state) = share(message.weight, message.draining)?;
        Ok(Backend { address, weight, state })
    };
    let backends: Vec<Backend> = messages.iter().map(backend).collect::<Result<_, _>>()?;
    match backends.windows(2).find(|pair| pair[0].address >= pair[1].address) {
        Some(pair) => Err(ConvertError::BackendOrder(pair[1].address)),
        None => Ok(backends),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::{MaglevSpec, Protocol, Service, ServiceName, ServicePort, convert};

    fn set(nodes: &[&str]) -> NodeSet {
        let node = |text: &&str| NodeBackend { address: text.parse().unwrap(), weight: 2, state: BackendState::Draining };
        NodeSet { name: "v4".to_owned(), family: Some(Family::V4), nodes: nodes.iter().map(node).collect() }
    }

    #[test]
    fn a_set_comes_through_and_a_wrong_one_has_its_error() {
        let good = set(&["10.0.1.1", "10.0.1.2"]);
        assert_eq!(node_set((&good).into()).unwrap(), good);
        let with = |change: fn(&mut v1::NodeSet)| {
            let mut message = v1::NodeSet::from(&set(&["10.0.1.1", "10.0.1.2"]));
            change(&mut message);
            node_set(message).unwrap_err()
        };
        let last: IpAddr = "10.0.1.1".parse().unwrap();
        assert_eq!(with(|m| m.nodes.reverse()), ConvertError::NodeOrder(last));
        assert_eq!(with(|m| m.family = 5), ConvertError::Family(5));
        assert!(matches!(with(|m| m.family = 6), ConvertError::WrongFamily { .. }));
        assert_eq!(with(|m| m.nodes[0].weight = 65_536), ConvertError::Weight(65_536));
        assert_eq!(with(|m| m.nodes = vec![m.nodes[0].clone(); 6554]), ConvertError::TooManyBackends(6554));
    }

    #[test]
    fn a_port_names_a_set_that_is_there_and_of_its_family_and_lists_nothing_beside_it() {
        let named = v1::ServicePort { node_set: "v4".to_owned(), port_at_nodes: 30_080, ..v1::ServicePort::default() };
        let sets: NodeSets = [("v4".to_owned(), Arc::new(set(&["10.0.1.1"])))].into();
        let at = nodes_at(&named, Some(Family::V4), &sets).unwrap().unwrap();
        assert_eq!(at.backends().map(|b| b.address.to_string()).collect::<Vec<_>>(), ["10.0.1.1:30080"]);
        assert!(nodes_at(&named, None, &sets).is_ok(), "a tunnel leads anywhere");
        assert!(matches!(nodes_at(&named, Some(Family::V6), &sets), Err(ConvertError::NodeSetFamily { .. })));
        assert!(matches!(nodes_at(&named, None, &NodeSets::new()), Err(ConvertError::NodeSetUnknown(_))));
        let both = v1::ServicePort { backends: vec![v1::Backend::default()], ..named.clone() };
        assert!(matches!(nodes_at(&both, None, &sets), Err(ConvertError::NodeSetBesideBackends(_))));
        let nowhere = v1::ServicePort { port_at_nodes: 0, ..named };
        assert!(matches!(nodes_at(&nowhere, None, &sets), Err(ConvertError::Port { .. })));
    }

    #[test]
    fn a_full_state_carries_each_set_once_and_who_knows_none_gets_the_nodes_listed() {
        let set = Arc::new(set(&["10.0.1.1", "10.0.1.2"]));
        let port = ServicePort {
            nodes: Some(NodesAt { set: Arc::clone(&set), port: 30_080 }),
            ..ServicePort::new(Protocol::Tcp, Family::V4, 80, MaglevSpec { size: 251, seed: 0, hash_version: 1 })
        };
        let service = |name| Arc::new(Service::new(ServiceName::new("shop", name), vec![port.clone()]));
        let services = ["a", "b"].map(service).into_iter().map(|one| (one.name.clone(), one)).collect();
        let state = crate::State { services, ..crate::State::default() };
        let message = convert::full(&state);
        assert_eq!((message.node_sets.len(), message.services[0].ports[0].backends.len()), (1, 0));
        let (sets, errors) = node_sets(message.node_sets, &[("v4".to_owned(), Arc::clone(&set))].into());
        assert!(errors.is_empty() && Arc::ptr_eq(&sets["v4"], &set));
        for one in message.services {
            let name = ServiceName::new(&one.namespace, &one.name);
            assert_eq!(convert::service(one, &sets).unwrap(), *state.services[&name]);
        }
        let listed = convert::full(&state.listed());
        assert!(listed.node_sets.is_empty());
        let all: Vec<_> = listed.services.into_iter().map(|one| Service::try_from(one).unwrap()).collect();
        assert!(all.iter().all(|one| one.ports[0].backends == one.ports[0].all_backends().collect::<Vec<_>>()));
        assert_eq!(all[0].ports[0].backends.len(), 2);
    }
}
