//! What a BGP speaker beside the gateway needs beyond the gateway's settings: peers, options, and the attributes of each
//! pool.
//!
//! Invariant: settings of a pool (`bgp`) come before options of the command line. Not here: the text of a configuration.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use clap::Args;
use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use proto::{AddressRange, Announce, Community, Pool};

/// What the gateway does not know.
#[derive(Clone, Debug, Args)]
pub struct BgpArguments {
    /// The number of the gateway's autonomous system.
    #[arg(long, value_name = "AS", value_parser = as_number)]
    pub local_as: u32,
    /// A router and its autonomous system; once for each router and family.
    #[arg(long = "peer", value_name = "ADDRESS=AS", required = true, value_parser = peer)]
    pub peers: Vec<BgpNeighbour>,
    /// The router ID. Default: the first IPv4 address of the gateway's ports.
    #[arg(long, value_name = "IPV4")]
    pub router_id: Option<Ipv4Addr>,
    /// The gateway's address towards the routers, if sessions use an interface that is not the gateway's; once for each
    /// family.
    #[arg(long = "next-hop", value_name = "ADDRESS")]
    pub next_hops: Vec<IpAddr>,
    /// A community of VIPs whose pool has none (`bgp.communities`), A:B, A:B:C or a name such as no-export; once for each.
    #[arg(long = "community", value_name = "COMMUNITY")]
    pub communities: Vec<Community>,
    /// The multi-exit discriminator (MED) of VIPs whose pool has none (`bgp.med`).
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub med: u32,
    /// Watch the routers by BFD; they must do the same.
    #[arg(long)]
    pub bfd: bool,
    /// Interval of BFD, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 300, requires = "bfd", value_parser = clap::value_parser!(u32).range(10..=60_000))]
    pub bfd_interval: u32,
    /// Print nothing, but compare with this file, which the daemon uses: exit code 1 if it was written for other pools, peers
    /// or options.
    #[arg(long, value_name = "FILE")]
    pub check: Option<PathBuf>,
    /// Number of intervals without a packet after which BFD takes a router for dead.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "bfd", value_parser = clap::value_parser!(u8).range(2..))]
    pub bfd_multiplier: u8,
}

/// A BGP neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BgpNeighbour {
    pub(super) address: IpAddr,
    pub(super) remote_as: u32,
}

impl BgpArguments {
    /// The next hop for VIPs of a family, other than the address of the session.
    pub(super) fn next_hop(&self, is_ipv4: bool) -> Option<IpAddr> {
        self.next_hops.iter().copied().find(|hop| hop.is_ipv4() == is_ipv4)
    }

    /// The attributes of VIPs whose pool has none of its own.
    pub(super) fn attributes(&self) -> Attributes {
        Attributes { communities: self.communities.clone(), med: self.med, local_pref: None }
    }

    /// The `routed` pools among `pools` whose VIPs have other attributes than the rest.
    pub(super) fn special(&self, pools: &[Pool]) -> Vec<SpecialPool> {
        let special = pools.iter().filter(|pool| pool.announce == Announce::Routed).map(|pool| SpecialPool {
            name: pool.name.clone(),
            prefixes: prefixes(&pool.ranges),
            attributes: Attributes {
                communities: if pool.bgp.communities.is_empty() { &self.communities } else { &pool.bgp.communities }.clone(),
                med: pool.bgp.med.unwrap_or(self.med),
                local_pref: pool.bgp.local_pref,
            },
        });
        special.filter(|pool| pool.attributes != self.attributes()).collect()
    }
}

/// Attributes of routes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) communities: Vec<Community>,
    pub(super) med: u32,
    pub(super) local_pref: Option<u32>,
}

/// A pool whose VIPs have attributes of their own.
#[derive(Clone, Debug)]
pub(super) struct SpecialPool {
    pub(super) name: String,
    /// Its addresses. The routes of its VIPs are these prefixes or longer ones.
    pub(super) prefixes: Vec<IpNet>,
    pub(super) attributes: Attributes,
}

fn prefixes(ranges: &[AddressRange]) -> Vec<IpNet> {
    let of_range = |range: &AddressRange| -> Vec<IpNet> {
        match (range.first(), range.last()) {
            (IpAddr::V4(first), IpAddr::V4(last)) => Ipv4Subnets::new(first, last, 0).map(IpNet::from).collect(),
            (IpAddr::V6(first), IpAddr::V6(last)) => Ipv6Subnets::new(first, last, 0).map(IpNet::from).collect(),
            // A range has one family.
            _ => Vec::new(),
        }
    };
    ranges.iter().flat_map(of_range).collect()
}

fn as_number(text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or_else(|| "expected a number from 1 to 4294967295".to_owned())
}

fn peer(text: &str) -> Result<BgpNeighbour, String> {
    let parsed = text.split_once('=').and_then(|(address, number)| {
        let remote_as = as_number(number).ok()?;
        Some(BgpNeighbour { address: address.parse().ok()?, remote_as })
    });
    parsed.ok_or_else(|| "expected ADDRESS=AS, such as 192.0.2.1=64513".to_owned())
}
