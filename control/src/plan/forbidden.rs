//! Addresses that must not become VIPs: those of gateways and nodes, and Service CIDRs (CONTROL section 6).
//!
//! Deliberately not here: addresses that must not be backends (`selection`); nodes may be backends.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use objects::NodeSpec;

/// Forbidden addresses, each with its owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forbidden {
    gateways: BTreeMap<IpAddr, Option<String>>,
    nodes: BTreeMap<IpAddr, String>,
    cidrs: Vec<IpNet>,
}

impl Forbidden {
    /// Collects the addresses of the embedding gateway, of all gateways ever seen and of the nodes, and the Service
    /// CIDRs.
    #[must_use]
    pub fn new<'a>(
        own: &[IpAddr],
        gateways: &BTreeMap<IpAddr, String>,
        nodes: impl Iterator<Item = &'a NodeSpec>,
        cidrs: &[IpNet],
    ) -> Self {
        let named = gateways.iter().map(|(address, name)| (*address, Some(name.clone())));
        let of_node = |node: &'a NodeSpec| node.all_addresses.iter().map(|address| (*address, node.name.clone()));
        Self {
            gateways: own.iter().map(|address| (*address, None)).chain(named).collect(),
            nodes: nodes.flat_map(of_node).collect(),
            cidrs: cidrs.to_vec(),
        }
    }

    /// Why `address` must not be a VIP.
    #[must_use]
    pub fn why(&self, address: IpAddr) -> Option<String> {
        if let Some(why) = self.of_gateway(address) {
            return Some(why);
        }
        if let Some(node) = self.nodes.get(&address) {
            return Some(format!("it is the address of node {node}"));
        }
        let net = self.cidrs.iter().find(|net| net.contains(&address))?;
        Some(format!("it lies in {net} of clusterCIDRs"))
    }

    /// Why `address` belongs to a gateway and therefore must not be a backend either.
    #[must_use]
    pub fn of_gateway(&self, address: IpAddr) -> Option<String> {
        Some(match self.gateways.get(&address)? {
            Some(name) => format!("it is an address of gateway {name} itself"),
            None => "it is an address of the gateway itself".to_owned(),
        })
    }

    /// Whether both forbid the same addresses for backends.
    #[must_use]
    pub fn fences_as(&self, other: &Self) -> bool {
        self.gateways == other.gateways
    }

    /// Node addresses whose owner differs between the two sets.
    pub fn nodes_differing<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = IpAddr> {
        let lacks = |all: &'a Self, of: &'a Self| {
            all.nodes.iter().filter(|(address, name)| of.nodes.get(*address) != Some(*name)).map(|(address, _)| *address)
        };
        lacks(self, other).chain(lacks(other, self))
    }

    /// Whether `address` is forbidden.
    #[must_use]
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        let is_single = self.gateways.contains_key(&address) || self.nodes.contains_key(&address);
        is_single || self.cidrs.iter().any(|net| net.contains(&address))
    }

    /// Forbidden addresses from `first` to `last`, both included, without Service CIDRs, which no pool overlaps.
    pub(super) fn within(&self, first: IpAddr, last: IpAddr) -> impl Iterator<Item = IpAddr> {
        let nodes = self.nodes.range(first..=last).map(|(address, _)| *address);
        let gateways = self.gateways.range(first..=last).map(|(address, _)| *address);
        gateways.chain(nodes.filter(|address| !self.gateways.contains_key(address)))
    }
}
