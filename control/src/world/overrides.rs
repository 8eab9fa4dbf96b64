//! Manual overrides of operators: drained backends, nodes and gateways, and weights, each with its author and time.
//!
//! Invariant: overrides change only the result of a plan. They therefore apply to all gateways alike, and removing one
//! restores what the objects say.
//! Deliberately not here: where they are stored, and whether the things that they name exist (`store`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use proto::{Backend, BackendState, NodesAt, ServiceName};

use objects::{NodeSpec, SliceSpec};

pub mod document;

/// Maximum number of overrides of one installation. With 400 bytes each they use at most half of the mebibyte that a
/// ConfigMap holds.
pub const OVERRIDES_MAX: usize = 1024;
/// Maximum length of a Kubernetes name, in bytes.
const NAME_BYTES_MAX: usize = 253;

/// The target of a drain, which gets no new flows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DrainTarget {
    /// A backend at one port, in all Services.
    Backend(SocketAddr),
    /// All backends with an address.
    Address(IpAddr),
    /// A node and every backend on it.
    Node(String),
    /// A gateway: its routes are withdrawn.
    Gateway(String),
}

/// A text that does not name a target of a drain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names nothing to drain; expected backend/ADDRESS:PORT, backend/ADDRESS, node/NAME or gateway/NAME")]
pub struct DrainTargetError(String);

impl fmt::Display for DrainTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend(address) => write!(f, "backend/{address}"),
            Self::Address(address) => write!(f, "backend/{address}"),
            Self::Node(name) => write!(f, "node/{name}"),
            Self::Gateway(name) => write!(f, "gateway/{name}"),
        }
    }
}

impl FromStr for DrainTarget {
    type Err = DrainTargetError;

    fn from_str(text: &str) -> Result<Self, DrainTargetError> {
        let error = || DrainTargetError(text.to_owned());
        let (kind, name) = text.split_once('/').ok_or_else(error)?;
        let is_name = !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains('/');
        match kind {
            "backend" => name.parse().map(Self::Backend).or_else(|_| name.parse().map(Self::Address)).map_err(|_| error()),
            "node" if is_name => Ok(Self::Node(name.to_owned())),
            "gateway" if is_name => Ok(Self::Gateway(name.to_owned())),
            _ => Err(error()),
        }
    }
}

/// Author and time of an override.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Author {
    /// Name of the author, as given by the client.
    pub by: String,
    /// Seconds since 1970.
    pub at_s: i64,
}

/// A weight that replaces that of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// Share of new flows relative to the other backends; 0 means none.
    pub weight: u16,
    /// Author and time.
    pub author: Author,
}

/// The complete set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    drains: BTreeMap<DrainTarget, Author>,
    weights: BTreeMap<ServiceName, BTreeMap<SocketAddr, Weight>>,
}

/// The maximum number of overrides is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are {OVERRIDES_MAX} drains and weights already; remove those that are no longer needed")]
pub struct TooManyOverrides;

impl Overrides {
    /// Targets of drains.
    #[must_use]
    pub const fn drains(&self) -> &BTreeMap<DrainTarget, Author> {
        &self.drains
    }

    /// The weights, by Service and backend.
    #[must_use]
    pub const fn weights(&self) -> &BTreeMap<ServiceName, BTreeMap<SocketAddr, Weight>> {
        &self.weights
    }

    /// The drained gateways.
    #[must_use]
    pub fn drained_gateways(&self) -> BTreeSet<String> {
        let gateway = |what: &DrainTarget| if let DrainTarget::Gateway(name) = what { Some(name.clone()) } else { None };
        self.drains.keys().filter_map(gateway).collect()
    }

    /// The names of the drained nodes.
    #[must_use]
    pub fn drained_node_names(&self) -> BTreeSet<&str> {
        self.drains
            .keys()
            .filter_map(|what| if let DrainTarget::Node(name) = what { Some(name.as_str()) } else { None })
            .collect()
    }

    /// Their number.
    #[must_use]
    pub fn len(&self) -> usize {
        self.drains.len() + self.weights.values().map(BTreeMap::len).sum::<usize>()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.drains.is_empty() && self.weights.is_empty()
    }

    /// Adds a drain. An existing drain keeps its author and time.
    ///
    /// # Errors
    /// [`TooManyOverrides`].
    pub fn drain(&mut self, what: DrainTarget, author: Author) -> Result<(), TooManyOverrides> {
        if !self.drains.contains_key(&what) {
            self.has_room()?;
            self.drains.insert(what, author);
        }
        Ok(())
    }

    /// Removes a drain; returns false if there was none.
    pub fn undrain(&mut self, what: &DrainTarget) -> bool {
        self.drains.remove(what).is_some()
    }

    /// Sets a weight.
    ///
    /// # Errors
    /// [`TooManyOverrides`].
    pub fn set_weight(&mut self, service: ServiceName, backend: SocketAddr, weight: Weight) -> Result<(), TooManyOverrides> {
        if !self.weights.get(&service).is_some_and(|of| of.contains_key(&backend)) {
            self.has_room()?;
        }
        self.weights.entry(service).or_default().insert(backend, weight);
        Ok(())
    }

    /// Removes the weight of a backend; returns false if there was none.
    pub fn unset_weight(&mut self, service: &ServiceName, backend: SocketAddr) -> bool {
        let Some(of) = self.weights.get_mut(service) else { return false };
        let was_set = of.remove(&backend).is_some();
        if of.is_empty() {
            self.weights.remove(service);
        }
        was_set
    }

    fn has_room(&self) -> Result<(), TooManyOverrides> {
        if self.len() < OVERRIDES_MAX { Ok(()) } else { Err(TooManyOverrides) }
    }

    /// Applies them to the backends of one port of a Service.
    pub fn apply(
        &self,
        service: &ServiceName,
        slices: &[&SliceSpec],
        nodes: &BTreeMap<String, NodeSpec>,
        backends: &mut [Backend],
    ) {
        if self.is_empty() {
            return;
        }
        let on_drained_nodes = self.on_drained_nodes(slices, nodes);
        let weights = self.weights.get(service);
        for backend in backends {
            let address = backend.address;
            let is_drained = self.drains.contains_key(&DrainTarget::Backend(address))
                || self.drains.contains_key(&DrainTarget::Address(address.ip()))
                || on_drained_nodes.contains(&address.ip());
            if is_drained {
                backend.state = BackendState::Draining;
            }
            if let Some(set) = weights.and_then(|weights| weights.get(&address)) {
                backend.weight = set.weight;
            }
        }
    }

    /// Node addresses that are drained at every port.
    #[must_use]
    pub fn drained_nodes(&self, nodes: &BTreeMap<String, NodeSpec>) -> BTreeSet<IpAddr> {
        let single =
            self.drains.keys().filter_map(|what| if let DrainTarget::Address(address) = what { Some(*address) } else { None });
        self.on_drained_nodes(&[], nodes).into_iter().chain(single).collect()
    }

    /// Whether an override of a single backend may concern one of these backends of a Service.
    #[must_use]
    pub fn concern(&self, service: &ServiceName, nodes: &NodesAt) -> bool {
        let is_one = |what: &DrainTarget| matches!(what, DrainTarget::Backend(address) if address.port() == nodes.port);
        self.weights.contains_key(service) || self.drains.keys().any(is_one)
    }

    /// Addresses of drained nodes and of the endpoints on them.
    fn on_drained_nodes(&self, slices: &[&SliceSpec], nodes: &BTreeMap<String, NodeSpec>) -> BTreeSet<IpAddr> {
        let names = self.drained_node_names();
        if names.is_empty() {
            return BTreeSet::new();
        }
        let own = names.iter().filter_map(|name| nodes.get(*name)).flat_map(|node| &node.addresses).copied();
        let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
        let there = endpoints.filter(|endpoint| endpoint.node.as_deref().is_some_and(|node| names.contains(node)));
        own.chain(there.map(|endpoint| endpoint.address)).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::plan::selection::tests::{endpoint, slice};

    pub(crate) fn author(by: &str) -> Author {
        Author { by: by.to_owned(), at_s: 1_700_000_000 }
    }

    pub(crate) fn drained(list: &[&str]) -> Overrides {
        let mut overrides = Overrides::default();
        for text in list {
            overrides.drain(text.parse().unwrap(), author("alice")).unwrap();
        }
        overrides
    }

    /// Backends 10.0.0.1 and 10.0.0.2, on nodes a and b, at port 8080, and node a itself: `1d` when drained.
    fn applied(overrides: &Overrides) -> String {
        let at = |last: u8, node: &str| objects::EndpointSpec { node: Some(node.into()), ..endpoint(last, "rs") };
        let slice = slice(&[("http", proto::Protocol::Tcp, 8080)], &[at(1, "a"), at(2, "b")]);
        let node = NodeSpec { name: "a".to_owned(), addresses: vec!["10.0.1.1".parse().unwrap()], ..NodeSpec::default() };
        let backend = |text: &str| Backend { address: text.parse().unwrap(), weight: 1, state: BackendState::Active };
        let mut backends = ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.1.1:8080"].map(backend);
        let nodes = BTreeMap::from([("a".to_owned(), node)]);
        overrides.apply(&ServiceName::new("shop", "web"), &[&slice], &nodes, &mut backends);
        let word =
            |backend: &Backend| format!("{}{}", backend.weight, if backend.state == BackendState::Draining { "d" } else { "" });
        backends.each_ref().map(word).join(" ")
    }

    #[test]
    fn drained_backends_get_no_new_flows_and_the_others_are_unchanged() {
        let rows: [(&str, &[&str], &str); 7] = [
            ("nothing", &[], "1 1 1"),
            ("a backend", &["backend/10.0.0.1:8080"], "1d 1 1"),
            ("another port of it", &["backend/10.0.0.1:9090"], "1 1 1"),
            ("all of an address", &["backend/10.0.0.2"], "1 1d 1"),
            ("a node: what runs there, and itself", &["node/a"], "1d 1 1d"),
            ("a node that is none", &["node/c"], "1 1 1"),
            ("a gateway", &["gateway/a"], "1 1 1"),
        ];
        for (sentence, list, expected) in rows {
            assert_eq!(applied(&drained(list)), expected, "{sentence}");
        }
    }

    #[test]
    fn a_weight_applies_to_one_backend_of_one_service_and_can_be_removed() {
        let (web, other) = (ServiceName::new("shop", "web"), ServiceName::new("shop", "other"));
        let backend = "10.0.0.2:8080".parse().unwrap();
        let weight = |weight| Weight { weight, author: author("bob") };
        let mut overrides = Overrides::default();
        overrides.set_weight(other, backend, weight(9)).unwrap();
        assert_eq!(applied(&overrides), "1 1 1");
        overrides.set_weight(web.clone(), backend, weight(7)).unwrap();
        assert_eq!(applied(&overrides), "1 7 1");
        overrides.set_weight(web.clone(), backend, weight(0)).unwrap();
        assert_eq!(applied(&overrides), "1 0 1");
        assert!(overrides.unset_weight(&web, backend) && !overrides.unset_weight(&web, backend));
        assert_eq!((applied(&overrides).as_str(), overrides.len()), ("1 1 1", 1));
    }

    #[test]
    fn overrides_are_bounded_and_the_first_author_of_a_drain_is_kept() {
        let mut overrides = drained(&["node/a"]);
        overrides.drain(DrainTarget::Node("a".to_owned()), author("bob")).unwrap();
        assert_eq!(overrides.drains()[&DrainTarget::Node("a".to_owned())].by, "alice");
        for number in 1..OVERRIDES_MAX {
            overrides.drain(DrainTarget::Node(format!("n{number}")), author("bob")).unwrap();
        }
        assert_eq!(overrides.drain(DrainTarget::Node("b".to_owned()), author("bob")), Err(TooManyOverrides));
        assert!(overrides.undrain(&DrainTarget::Node("a".to_owned())));
        overrides.drain(DrainTarget::Node("b".to_owned()), author("bob")).unwrap();
    }

    #[test]
    fn formatted_names_parse_to_the_same_targets() {
        for text in ["backend/10.0.0.1:8080", "backend/[fd00::1]:80", "backend/fd00::1", "node/a.b", "gateway/edge-1"] {
            assert_eq!(text.parse::<DrainTarget>().unwrap().to_string(), text);
        }
        for text in ["edge-1", "backend/web", "node/", "gateway/a/b", "pod/x", &format!("node/{}", "x".repeat(254))] {
            assert!(text.parse::<DrainTarget>().is_err(), "{text}");
        }
    }
}
