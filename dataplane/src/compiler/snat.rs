//! Assignment of SNAT addresses to links: an address inside a link's prefix serves that link, an address in no prefix
//! serves all links.
//!
//! **Invariant:** an address keeps its index, its position among the SNAT addresses of its family, on every link.
//!
//! Not here: ports.

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use proto::Family;

use crate::flow::{SNAT_ADDRESSES_MAX, SnatAddress};
use crate::port::Link;
use crate::snapshot::{Config, Network, VipAnswers, snat_group};
use crate::wire::Address;

/// Indexed by port, then by VLAN link.
pub(super) type SnatByLink<A> = Arc<[Box<[SnatAddress<A>]>]>;

/// The SNAT addresses of both families.
#[derive(Clone, Debug)]
pub(super) struct SnatTables {
    pub(super) v4: SnatByLink<u32>,
    pub(super) v6: SnatByLink<u128>,
    /// The VLAN links, sorted.
    pub(super) vlans: Arc<[Link]>,
    ports: usize,
}

impl SnatTables {
    pub(super) fn new(config: &Config, network: &Network) -> Self {
        let vlans = network.vlans.iter().map(|vlan| vlan.link).collect();
        Self { v4: by_link(config, network), v6: by_link(config, network), vlans, ports: config.ports.len() }
    }

    /// Whether there is a SNAT address for backends behind this link; without a link (no route), for any link.
    pub(super) fn serves(&self, family: Family, link: Option<Link>) -> bool {
        let position = link.map(|link| match self.vlans.binary_search(&link) {
            Ok(position) => self.ports + position,
            Err(_) => usize::from(link.port().0),
        });
        match family {
            Family::V4 => any(&self.v4, position),
            Family::V6 => any(&self.v6, position),
        }
    }
}

impl SnatTables {
    /// Links on which only some VIP groups have a SNAT address, where these belong to this number of groups.
    pub(super) fn problems(&self, groups: u8, config: &Config) -> Vec<String> {
        let v4 = self.v4.iter().map(|addresses| (Family::V4, lacking(addresses, groups)));
        let v6 = self.v6.iter().map(|addresses| (Family::V6, lacking(addresses, groups)));
        let name_of = |position: usize| match position.checked_sub(self.ports).and_then(|vlan| self.vlans.get(vlan)) {
            Some(link) => {
                format!("a VLAN of port {}", config.ports.get(usize::from(link.port().0)).map_or("", |port| &port.name))
            }
            None => format!("port {}", config.ports.get(position).map_or("", |port| &port.name)),
        };
        let of_family = |all: &mut dyn Iterator<Item = (Family, Vec<u8>)>| {
            let lacking = all.enumerate().filter(|(_, (_, groups))| !groups.is_empty());
            let text = |(position, (family, groups)): (usize, (Family, Vec<u8>))| {
                format!(
                    "VIP groups {groups:?} have no {family} address of `snat.addresses` that serves {}, others have: connections of \
                     mode nat to their VIPs and backends there fail (snat_exhausted); take addresses for all groups from one \
                     prefix, or from none",
                    name_of(position)
                )
            };
            lacking.map(text).collect::<Vec<_>>()
        };
        [of_family(&mut { v4 }), of_family(&mut { v6 })].concat()
    }
}

/// The groups without one of these addresses; none if all have one, or none.
fn lacking<A>(addresses: &[SnatAddress<A>], groups: u8) -> Vec<u8> {
    let has = |group: &u8| addresses.iter().any(|snat| snat_group(snat.index, groups) == Some(*group));
    let lacking: Vec<u8> = (0..groups).filter(|group| !has(group)).collect();
    if lacking.len() < usize::from(groups) { lacking } else { Vec::new() }
}

fn any<A>(by_link: &SnatByLink<A>, position: Option<usize>) -> bool {
    match position {
        Some(position) => by_link.get(position).is_some_and(|addresses| !addresses.is_empty()),
        None => by_link.iter().any(|addresses| !addresses.is_empty()),
    }
}

/// The SNAT addresses for which this gateway answers: all, except those that belong to VIP groups of other gateways.
pub(super) fn answered_snat<'a>(config: &'a Config, answers: &VipAnswers) -> impl Iterator<Item = &'a IpAddr> {
    let owned = answers.groups.filter(|_| config.shared_snat);
    let mut next = [0_u16; 2];
    config.snat.iter().filter(move |address| {
        let next = &mut next[usize::from(address.is_ipv6())];
        let index = std::mem::replace(next, next.saturating_add(1));
        owned.is_none_or(|owned| snat_group(index, owned.groups).is_none_or(|group| owned.has(group)))
    })
}

/// Whether the address lies in one of these prefixes.
pub(super) fn is_on_link(prefixes: &[IpNet], address: IpAddr) -> bool {
    prefixes.iter().any(|net| net.contains(&address))
}

fn by_link<A: Address>(config: &Config, network: &Network) -> SnatByLink<A> {
    let of_family: Vec<(A, IpAddr)> = config.snat.iter().filter_map(|&ip| A::from_ip(ip).map(|a| (a, ip))).collect();
    let links = || {
        let of_ports = config.ports.iter().map(|port| port.addresses.as_slice());
        of_ports.chain(network.vlans.iter().map(|vlan| vlan.addresses.as_slice()))
    };
    let on_no_link: Vec<bool> = of_family.iter().map(|(_, ip)| !links().any(|nets| is_on_link(nets, *ip))).collect();
    let of_link = |nets: &[IpNet]| {
        let indexed = (0..SNAT_ADDRESSES_MAX).zip(of_family.iter().zip(&on_no_link));
        let serving = indexed.filter(|(_, ((_, ip), anywhere))| **anywhere || is_on_link(nets, *ip));
        serving.map(|(index, (&(address, _), _))| SnatAddress { address, index }).collect()
    };
    links().map(of_link).collect()
}
