//! Assigns roles to addresses: which of them the gateway owns, and for which of them it answers ARP and NDP.
//!
//! **Invariant:** an address that is answered without interruption, on a port that has not moved, keeps the sequence of
//! the first snapshot that answered for it.
//!
//! Not here: the announcements themselves (`icmp`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use ipnet::IpNet;
use proto::{Announce, Pool};

use super::snat::{answered_snat, is_on_link};
use crate::port::{Link, PortIndex};
use crate::snapshot::{AddressRole, AddressRoles, Announced, Config, Network, OwnedGroups, PortConfig, VipAnswers};
use crate::wire::{Address, TableHash};

/// The roles of the addresses of one family.
pub(super) fn roles<A: Address>(config: &Config, network: &Network, pools: &[Pool], vips: &[IpAddr]) -> AddressRoles<A> {
    let mut exact: HashMap<A, AddressRole, TableHash> = HashMap::default();
    let mut put = |address: IpAddr, role| A::from_ip(address).map(|address| exact.insert(address, role));
    // Broadcast addresses first, since a VIP may be one: in a network of its own (a routed pool) it is an ordinary
    // address.
    for address in prefixes(config, network).flat_map(|(_, nets)| nets).filter_map(directed_broadcast) {
        put(address, AddressRole::Broadcast);
    }
    for &vip in vips {
        put(vip, AddressRole::Vip);
    }
    for &address in config.snat.iter().chain(&config.tunnel.sources) {
        put(address, AddressRole::Snat);
    }
    // The twin's addresses last: they belong to the kernel whatever other role they have.
    for &address in config.node_port_addresses.iter().chain(&network.addresses) {
        put(address, AddressRole::Twin(port_of(config, network, address)));
    }
    for (port, of_port) in ports(config) {
        for net in &of_port.addresses {
            put(net.addr(), AddressRole::Twin(port));
        }
    }
    let ranges = pools.iter().flat_map(|pool| &pool.ranges);
    let pools = ranges.filter_map(|range| Some((A::from_ip(range.first())?, A::from_ip(range.last())?)));
    AddressRoles::new(exact, pools.collect())
}

/// The directed broadcast address of a prefix, if it has one (RFC 919; RFC 3021: prefixes of 31 bits have none).
fn directed_broadcast(net: &IpNet) -> Option<IpAddr> {
    match net {
        IpNet::V4(net) => (net.prefix_len() < 31).then(|| net.broadcast().into()),
        IpNet::V6(_) => None,
    }
}

fn ports(config: &Config) -> impl Iterator<Item = (PortIndex, &PortConfig)> {
    (0..=u8::MAX).map(PortIndex).zip(&config.ports)
}

/// The prefixes of all links, for the controller: of which networks ARP and NDP can be answered.
pub(super) fn all_prefixes(config: &Config, network: &Network) -> Vec<IpNet> {
    let mut all: Vec<IpNet> = prefixes(config, network).flat_map(|(_, nets)| nets).map(IpNet::trunc).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The prefixes of each link: first of the ports, then of the VLAN devices on them.
fn prefixes<'a>(config: &'a Config, network: &'a Network) -> impl Iterator<Item = (Link, &'a [IpNet])> {
    let of_ports = ports(config).map(|(index, port)| (index.into(), port.addresses.as_slice()));
    of_ports.chain(network.vlans.iter().map(|vlan| (vlan.link, vlan.addresses.as_slice())))
}

/// The port of a twin address: the one whose prefix contains it, otherwise the first.
fn port_of(config: &Config, network: &Network, address: IpAddr) -> PortIndex {
    let mut links = prefixes(config, network);
    links.find(|(_, nets)| is_on_link(nets, address)).map_or(PortIndex(0), |(link, _)| link.port())
}

/// Why nobody answers ARP and NDP for addresses of an `l2` pool, from the first to the last: no prefix of a port or of
/// a VLAN device contains them all (FORWARDING section 8). `None` if one does. `what` names the addresses.
pub fn unanswered<'a>(
    what: impl std::fmt::Display,
    first: IpAddr,
    last: IpAddr,
    prefixes: impl IntoIterator<Item = &'a IpNet>,
) -> Option<String> {
    let is_on_link = prefixes.into_iter().any(|net| net.contains(&first) && net.contains(&last));
    (!is_on_link).then(|| {
        format!(
            "{what} (announce: l2) lies in no port's prefix, so ARP and NDP for it are not answered; give a port or a VLAN \
             device above it an address of its subnet, or, where a router sends packets for it here, set `announce: routed`"
        )
    })
}

/// The VIPs of `routed` pools, each with the prefix by which its pool announces it.
pub(super) fn routed<'a>(pools: &'a [Pool], vips: &'a [IpAddr]) -> impl Iterator<Item = (IpAddr, IpNet)> + 'a {
    let announced = |vip: &IpAddr| {
        let mut routed = pools.iter().filter(|pool| pool.announce == Announce::Routed);
        let pool = routed.find(|pool| pool.ranges.iter().any(|range| range.contains(*vip)))?;
        Some((*vip, pool.bgp.announced(*vip)))
    };
    vips.iter().filter_map(announced)
}

/// The addresses of VIPs that no election moves, as sorted ranges: `routed` pools and addresses of node ports.
pub(super) fn unelected<A: Address>(config: &Config, pools: &[Pool]) -> Arc<[(A, A)]> {
    let routed = pools.iter().filter(|pool| pool.announce == Announce::Routed).flat_map(|pool| &pool.ranges);
    let ranges = routed.map(|range| (range.first(), range.last()));
    let all = ranges.chain(config.node_port_addresses.iter().map(|&address| (address, address)));
    let mut all: Vec<(A, A)> = all.filter_map(|(first, last)| Some((A::from_ip(first)?, A::from_ip(last)?))).collect();
    all.sort_unstable();
    all.into()
}

/// The addresses for which the gateway answers ARP and NDP, and since which snapshot.
#[derive(Debug, Default)]
pub(super) struct AnnouncedAddresses {
    since: BTreeMap<(Link, IpAddr), u64>,
    /// Addresses of groups that another gateway has taken.
    lost: BTreeMap<(Link, IpAddr), u64>,
    /// The previous [`Network::moves`].
    moves: Vec<u64>,
    /// The previous [`VipAnswers::defended`].
    defended: BTreeMap<IpAddr, u64>,
    /// The previous [`VipAnswers::defended_groups`].
    defended_groups: BTreeMap<u8, u64>,
    /// Messages about VIPs that no port can answer for.
    pub(super) problems: Vec<String>,
}

impl AnnouncedAddresses {
    /// Updates the answered addresses: SNAT addresses, tunnel sources that are not an address of a port, VIPs of `l2`
    /// pools, and the addresses of ports without twin. A port without link answers for nothing, so that all of its
    /// addresses count as new when the link returns; on a port that has moved they count as new at once. VIPs that are
    /// not among `answers` are left out, and so are SNAT addresses that belong to VIP groups of other gateways.
    pub(super) fn update(
        &mut self,
        config: &Config,
        pools: &[Pool],
        vips: &[IpAddr],
        network: &Network,
        answers: &VipAnswers,
        sequence: u64,
    ) -> Announced {
        self.problems.clear();
        let mut now: Vec<(Link, IpAddr)> = Vec::new();
        let holding = |address: IpAddr| {
            let of_links = prefixes(config, network).filter(move |(_, nets)| is_on_link(nets, address));
            of_links.map(move |(link, _)| (link, address))
        };
        let is_of_link =
            |address: &IpAddr| prefixes(config, network).any(|(_, nets)| nets.iter().any(|net| net.addr() == *address));
        let tunnel_sources = config.tunnel.sources.iter().filter(|address| !is_of_link(address));
        for &address in answered_snat(config, answers).chain(tunnel_sources) {
            now.extend(holding(address));
        }
        for (index, port) in ports(config).filter(|(_, port)| !port.twin) {
            now.extend(port.addresses.iter().map(|net| (index.into(), net.addr())));
            let links = network.vlans.iter().filter(|vlan| vlan.link.port() == index);
            now.extend(links.flat_map(|vlan| vlan.addresses.iter().map(|net| (vlan.link, net.addr()))));
        }
        let l2: Vec<_> = pools.iter().filter(|pool| pool.announce == Announce::L2).collect();
        let answered = answers.among(vips);
        for &vip in vips {
            let Some(pool) = l2.iter().find(|pool| pool.ranges.iter().any(|range| range.contains(vip))) else { continue };
            if answered.binary_search(&vip).is_ok() {
                now.extend(holding(vip));
            }
            let nets = prefixes(config, network).flat_map(|(_, nets)| nets);
            self.problems.extend(unanswered(format_args!("VIP {vip} of pool {}", pool.name), vip, vip, nets));
        }
        now.retain(|(link, _)| !network.down.contains(&link.port()));
        let mut since: BTreeMap<_, _> = now.into_iter().map(|key| (key, sequence)).collect();
        let of_claimed_groups = self.of_claimed_groups(config, vips, answers);
        let moves_of = |moves: &[u64], port: PortIndex| moves.get(usize::from(port.0)).copied().unwrap_or(0);
        for (key, since) in &mut since {
            let is_claimed = self.defended.get(&key.1) != answers.defended.get(&key.1);
            let has_moved = is_claimed
                || of_claimed_groups.contains(&key.1)
                || moves_of(&self.moves, key.0.port()) != moves_of(&network.moves, key.0.port());
            if let Some(&before) = self.since.get(key).filter(|_| !has_moved) {
                *since = before;
            }
        }
        let is_elected = |address: &IpAddr| vips.binary_search(address).is_ok() || config.snat.contains(address);
        let is_lost = |(link, address): &(Link, IpAddr)| {
            answers.groups.is_some() && !network.down.contains(&link.port()) && is_elected(address)
        };
        let newly = self.since.keys().filter(|key| !since.contains_key(key)).map(|key| (*key, sequence));
        self.lost.extend(newly);
        self.lost.retain(|key, _| !since.contains_key(key) && is_lost(key));
        self.moves.clone_from(&network.moves);
        self.defended.clone_from(&answers.defended);
        self.defended_groups.clone_from(&answers.defended_groups);
        self.since = since;
        Announced::new(self.since.iter().map(|(&(link, address), &since)| (link, address, since)))
    }

    /// The addresses of groups that another gateway has taken.
    pub(super) fn lost(&self) -> Announced {
        Announced::new(self.lost.iter().map(|(&(link, address), &since)| (link, address, since)))
    }

    /// The addresses of groups that were defended since the last update.
    fn of_claimed_groups(&self, config: &Config, vips: &[IpAddr], answers: &VipAnswers) -> BTreeSet<IpAddr> {
        let is_claimed = |group: &u8| self.defended_groups.get(group) != answers.defended_groups.get(group);
        let claimed = answers.defended_groups.keys().filter(|group| is_claimed(group)).fold(0, |bits, group| bits | 1 << group);
        let Some(groups) = answers.groups.filter(|_| claimed != 0) else { return BTreeSet::new() };
        let of_groups = VipAnswers { groups: Some(OwnedGroups { owned: claimed, ..groups }), ..VipAnswers::default() };
        of_groups.among(vips).into_iter().chain(answered_snat(config, &of_groups).copied()).collect()
    }
}
