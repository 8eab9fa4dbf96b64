//! Addresses that must not become VIPs: those of gateways, next hops and nodes, the edges of the gateways' links, and
//! Service CIDRs (CONTROL section 6).
//!
//! Deliberately not here: addresses that must not be backends (`selection`); nodes and next hops may be backends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use proto::{GatewayProfile, LinkEdge};

use objects::NodeSpec;

/// Forbidden addresses, each with its owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forbidden {
    gateways: BTreeMap<IpAddr, Option<String>>,
    next_hops: BTreeMap<IpAddr, Option<String>>,
    edges: BTreeMap<IpAddr, LinkEdge>,
    nodes: BTreeMap<IpAddr, String>,
    cidrs: Vec<IpNet>,
}

impl Forbidden {
    /// Collects the addresses of gateways, each with its name unless it embeds this controller, those of the nodes, and
    /// the Service CIDRs.
    #[must_use]
    pub fn new<'a>(
        gateways: &[(Option<&str>, &GatewayProfile)],
        nodes: impl Iterator<Item = &'a NodeSpec>,
        cidrs: &[IpNet],
    ) -> Self {
        let of = |list: fn(&GatewayProfile) -> &[IpAddr]| -> BTreeMap<IpAddr, Option<String>> {
            let one = |(name, profile): &(Option<&str>, &GatewayProfile)| {
                let name = name.map(ToOwned::to_owned);
                list(profile).iter().map(move |address| (*address, name.clone())).collect::<Vec<_>>()
            };
            gateways.iter().flat_map(one).collect()
        };
        let of_node = |node: &'a NodeSpec| node.all_addresses.iter().map(|address| (*address, node.name.clone()));
        Self {
            gateways: of(|profile| &profile.own),
            next_hops: of(|profile| &profile.next_hops),
            edges: gateways.iter().flat_map(|(_, profile)| profile.edges()).map(|edge| (edge.address, edge)).collect(),
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
        if let Some(name) = self.next_hops.get(&address) {
            let of = name.as_ref().map_or_else(|| "the gateway".to_owned(), |name| format!("gateway {name}"));
            return Some(format!("it is a next hop of {of}"));
        }
        if let Some(edge) = self.edges.get(&address) {
            return Some(format!("it is {edge}, which is on a link of a gateway"));
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
        let of_gateways = self.gateways.contains_key(&address) || self.next_hops.contains_key(&address);
        let is_single = of_gateways || self.edges.contains_key(&address) || self.nodes.contains_key(&address);
        is_single || self.cidrs.iter().any(|net| net.contains(&address))
    }

    /// Forbidden addresses from `first` to `last`, both included, without Service CIDRs, which no pool overlaps.
    pub(super) fn within(&self, first: IpAddr, last: IpAddr) -> BTreeSet<IpAddr> {
        let of_gateways =
            self.gateways.range(first..=last).chain(self.next_hops.range(first..=last)).map(|(address, _)| *address);
        let edges = self.edges.range(first..=last).map(|(address, _)| *address);
        of_gateways.chain(edges).chain(self.nodes.range(first..=last).map(|(address, _)| *address)).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// These addresses of the embedding gateway, and of another one by name.
    pub(crate) fn forbidden(own: &[&str], other: &[&str], nodes: &[NodeSpec], cidrs: &[&str]) -> Forbidden {
        let parse = |list: &[&str]| GatewayProfile::new(list.iter().map(|text| text.parse().unwrap()), []);
        let (own, other) = (parse(own), parse(other));
        let cidrs: Vec<IpNet> = cidrs.iter().map(|text| text.parse().unwrap()).collect();
        Forbidden::new(&[(None, &own), (Some("edge-2"), &other)], nodes.iter(), &cidrs)
    }

    #[test]
    fn edges_of_links_and_next_hops_are_no_vips_and_only_the_gateways_own_addresses_are_no_backends() {
        let profile = GatewayProfile {
            prefixes: ["192.0.2.2/24", "203.0.113.2/31", "2001:db8::2/64", "2001:db8:1::/127"]
                .map(|net| net.parse().unwrap())
                .into(),
            ..GatewayProfile::new(["192.0.2.2".parse().unwrap()], ["192.0.2.1".parse().unwrap()])
        };
        let all = Forbidden::new(&[(Some("edge-2"), &profile)], [].iter(), &[]);
        let rows = [
            ("192.0.2.0", Some("network address of 192.0.2.0/24")),
            ("192.0.2.255", Some("broadcast address of 192.0.2.0/24")),
            ("192.0.2.1", Some("next hop of gateway edge-2")),
            ("192.0.2.2", Some("address of gateway edge-2 itself")),
            ("192.0.2.254", None),
            ("203.0.113.2", None),
            ("203.0.113.3", None),
            ("2001:db8::", Some("subnet-router anycast address of 2001:db8::/64")),
            ("2001:db8::ffff:ffff:ffff:ffff", None),
            ("2001:db8:1::", None),
        ];
        for (address, expected) in rows {
            let address: IpAddr = address.parse().unwrap();
            let why = all.why(address);
            assert!(why.as_deref().unwrap_or_default().contains(expected.unwrap_or_default()), "{address}: {why:?}");
            assert_eq!((why.is_some(), all.contains(address)), (expected.is_some(), expected.is_some()), "{address}");
            let is_own = expected.is_some_and(|text| text.contains("itself"));
            assert_eq!(all.of_gateway(address).is_some(), is_own, "{address}");
        }
        assert_eq!(all.within("192.0.2.0".parse().unwrap(), "192.0.2.255".parse().unwrap()).len(), 4);
    }
}
