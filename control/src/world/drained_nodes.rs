//! The addresses of drained nodes and of the endpoints on them, by which the flows that are left there are counted.
//!
//! Invariant: an address stays while its node is drained, although its endpoint or the node itself is deleted: flows to
//! it may continue. An address that turns up on another node belongs to that one from then on.
//! Deliberately not here: which backends take no new flows (`overrides`), and flows (`admin`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use objects::{NodeSpec, SliceSpec};

/// Maximum number of addresses: a gateway counts flows for as many backends. Of 50 bytes each they take 6.5 MB.
const ADDRESSES_MAX: usize = 131_072;

/// Addresses by which drained nodes and what runs on them are reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainedNodes {
    names: BTreeSet<String>,
    node_of: BTreeMap<IpAddr, String>,
}

impl DrainedNodes {
    /// The addresses that belong to a drained node.
    pub fn addresses_of(&self, node: &str) -> impl Iterator<Item = IpAddr> {
        self.node_of.iter().filter(move |(_, of)| *of == node).map(|(address, _)| *address)
    }

    /// The addresses while these nodes are drained: those of other nodes are forgotten, those of new ones are collected.
    /// Where there are too many, those that are not listed any more are forgotten.
    pub(super) fn of<'a>(
        &self,
        names: &BTreeSet<&str>,
        nodes: &'a BTreeMap<String, NodeSpec>,
        slices: impl Iterator<Item = &'a SliceSpec>,
    ) -> Self {
        let kept = self.node_of.iter().filter(|(_, node)| names.contains(node.as_str()) && !self.are_too_many());
        let mut all = Self {
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            node_of: kept.map(|(address, node)| (*address, node.clone())).collect(),
        };
        if !all.names.is_empty() {
            let nodes = nodes.values().flat_map(of_node);
            nodes.chain(slices.flat_map(of_slice)).for_each(|one| all.place(one));
        }
        all
    }

    /// Whether there are more addresses than backends can have.
    pub(super) fn are_too_many(&self) -> bool {
        self.node_of.len() > ADDRESSES_MAX
    }

    /// Whether [`DrainedNodes::place`] would change anything.
    fn is_news(&self, (address, node): (IpAddr, &str)) -> bool {
        let known = self.node_of.get(&address).map(String::as_str);
        if self.names.contains(node) { known != Some(node) } else { known.is_some() }
    }

    fn place(&mut self, (address, node): (IpAddr, &str)) {
        if self.names.contains(node) {
            self.node_of.insert(address, node.to_owned());
        } else {
            self.node_of.remove(&address);
        }
    }

    /// The addresses after these were seen; `None` if they are the same, which costs a lookup for each.
    fn seeing<'a>(&self, seen: impl Iterator<Item = (IpAddr, &'a str)> + Clone) -> Option<Self> {
        if self.names.is_empty() || !seen.clone().any(|one| self.is_news(one)) {
            return None;
        }
        let mut all = self.clone();
        seen.for_each(|one| all.place(one));
        Some(all)
    }

    /// As [`DrainedNodes::seeing`], for a node.
    pub(super) fn seeing_node(&self, node: &NodeSpec) -> Option<Self> {
        self.seeing(of_node(node))
    }

    /// As [`DrainedNodes::seeing`], for a slice.
    pub(super) fn seeing_slice(&self, slice: &SliceSpec) -> Option<Self> {
        self.seeing(of_slice(slice))
    }
}

fn of_node(node: &NodeSpec) -> impl Iterator<Item = (IpAddr, &str)> + Clone {
    node.addresses.iter().map(|address| (*address, node.name.as_str()))
}

fn of_slice(slice: &SliceSpec) -> impl Iterator<Item = (IpAddr, &str)> + Clone {
    slice.endpoints.iter().filter_map(|endpoint| Some((endpoint.address, endpoint.node.as_deref()?)))
}
