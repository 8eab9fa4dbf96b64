//! Which addresses are ours, and which of them we answer ARP and NDP for.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use proto::{Announce, Pool};

use super::snat::is_on_link;
use crate::hash::TableHash;
use crate::snapshot::{Place, Places};
use crate::{Address, Config, Network, PortConfig, PortIndex};

/// What an address is to us, in one family.
pub(super) fn places<A: Address>(config: &Config, network: &Network, pools: &[Pool], vips: &[IpAddr]) -> Places<A> {
    let mut exact: HashMap<A, Place, TableHash> = HashMap::default();
    let mut put = |address: IpAddr, place| A::from_ip(address).map(|address| exact.insert(address, place));
    for &vip in vips {
        put(vip, Place::Vip);
    }
    for &address in config.snat.iter().chain(&config.tunnel.sources) {
        put(address, Place::Snat);
    }
    // The twin's addresses last: whatever else they were taken for, Linux has them.
    for &address in config.node_port_addresses.iter().chain(&network.addresses) {
        put(address, Place::Twin(port_of(&config.ports, address)));
    }
    for (port, of_port) in ports(config) {
        for net in &of_port.addresses {
            put(net.addr(), Place::Twin(port));
        }
    }
    let ranges = pools.iter().flat_map(|pool| &pool.ranges);
    let mut pools: Vec<(A, A)> =
        ranges.filter_map(|range| Some((A::from_ip(range.first())?, A::from_ip(range.last())?))).collect();
    pools.sort_unstable();
    Places { exact, pools }
}

fn ports(config: &Config) -> impl Iterator<Item = (PortIndex, &PortConfig)> {
    (0..=u8::MAX).map(PortIndex).zip(&config.ports)
}

/// The port that an address of the twins belongs to: the one whose prefix holds it, else the first.
fn port_of(ports: &[PortConfig], address: IpAddr) -> PortIndex {
    let position = ports.iter().position(|port| is_on_link(port, address));
    PortIndex(position.and_then(|position| u8::try_from(position).ok()).unwrap_or(0))
}

/// The VIPs of `routed` pools.
pub(super) fn routed<'a>(pools: &'a [Pool], vips: &'a [IpAddr]) -> impl Iterator<Item = IpAddr> + 'a {
    let is_routed = |vip: &&IpAddr| {
        let mut routed = pools.iter().filter(|pool| pool.announce == Announce::Routed);
        routed.any(|pool| pool.ranges.iter().any(|range| range.contains(**vip)))
    };
    vips.iter().filter(is_routed).copied()
}

/// What we answer ARP and NDP for, and since which snapshot.
#[derive(Debug, Default)]
pub(super) struct Answers {
    since: BTreeMap<(PortIndex, IpAddr), u64>,
    /// VIPs that no port can answer for, in sentences.
    pub(super) problems: Vec<String>,
}

impl Answers {
    /// Answers for the SNAT addresses, the sources of tunnels that are no address of a port, the VIPs of `l2` pools, and the addresses of ports without twin; on a port without
    /// link for nothing, so that all of it counts as new when the link is back.
    pub(super) fn update(
        &mut self,
        config: &Config,
        pools: &[Pool],
        vips: &[IpAddr],
        down: &[PortIndex],
        sequence: u64,
    ) -> Arc<[(PortIndex, IpAddr, u64)]> {
        self.problems.clear();
        let mut now: Vec<(PortIndex, IpAddr)> = Vec::new();
        let holding = |address: IpAddr| ports(config).filter(move |(_, port)| is_on_link(port, address)).map(|(index, _)| index);
        let is_of_port =
            |address: &IpAddr| ports(config).any(|(_, port)| port.addresses.iter().any(|net| net.addr() == *address));
        let tunnel_sources = config.tunnel.sources.iter().filter(|address| !is_of_port(address));
        for &address in config.snat.iter().chain(tunnel_sources) {
            now.extend(holding(address).map(|port| (port, address)));
        }
        for (index, port) in ports(config).filter(|(_, port)| !port.twin) {
            now.extend(port.addresses.iter().map(|net| (index, net.addr())));
        }
        let l2: Vec<_> = pools.iter().filter(|pool| pool.announce == Announce::L2).collect();
        for &vip in vips {
            let Some(pool) = l2.iter().find(|pool| pool.ranges.iter().any(|range| range.contains(vip))) else { continue };
            let before = now.len();
            now.extend(holding(vip).map(|port| (port, vip)));
            if now.len() == before {
                let name = &pool.name;
                self.problems.push(format!(
                    "VIP {vip} of pool {name} (announce: l2) lies in no port's prefix, so nobody can be told where it is; \
                     give a port an address of its subnet, or set `announce: routed`"
                ));
            }
        }
        now.retain(|(port, _)| !down.contains(port));
        let mut since: BTreeMap<_, _> = now.into_iter().map(|key| (key, sequence)).collect();
        for (key, since) in &mut since {
            if let Some(&before) = self.since.get(key) {
                *since = before;
            }
        }
        self.since = since;
        self.since.iter().map(|(&(port, address), &since)| (port, address, since)).collect()
    }
}
