//! What a gateway says about itself: its addresses, its links, and how long it uses a state that nobody confirms.
//!
//! Deliberately not here: what follows for VIPs and backends (the controller's `plan::forbidden`).

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

/// Longest prefixes with edges, bits. On a /31 (RFC 3021) and a /127 (RFC 6164) every address is a host.
const EDGES_V4: u8 = 30;
const EDGES_V6: u8 = 126;

/// What a gateway says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayProfile {
    /// Addresses of its ports, links, SNAT, tunnels and node ports, in order: neither VIPs nor backends.
    pub own: Vec<IpAddr>,
    /// Its next hops that are none of these, in order: no VIPs, but a router may be a backend.
    pub next_hops: Vec<IpAddr>,
    /// Prefixes of its ports and VLAN devices; none before its first report, and of an earlier version.
    pub prefixes: Vec<IpNet>,
    /// Whether it serves node ports; `None`: an earlier version, which does not say.
    pub serves_node_ports: Option<bool>,
    /// How long it uses a state that no controller confirms; `None`: [`crate::limits::MAX_STATE_AGE`].
    pub max_state_age: Option<Duration>,
}

impl GatewayProfile {
    /// A gateway with these addresses of its own and these next hops, in any order.
    #[must_use]
    pub fn new(own: impl IntoIterator<Item = IpAddr>, next_hops: impl IntoIterator<Item = IpAddr>) -> Self {
        let own = in_order(own);
        let next_hops = in_order(next_hops).into_iter().filter(|address| own.binary_search(address).is_err()).collect();
        Self { own, next_hops, ..Self::default() }
    }

    /// The addresses of its links' networks that no host has.
    pub fn edges(&self) -> impl Iterator<Item = LinkEdge> {
        self.prefixes.iter().flat_map(edges)
    }

    /// The addresses that are never VIPs, in order.
    #[must_use]
    pub fn reserved(&self) -> Vec<IpAddr> {
        in_order(self.own.iter().chain(&self.next_hops).copied())
    }
}

/// An address of a network that no host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEdge {
    /// The address.
    pub address: IpAddr,
    /// The network.
    pub net: IpNet,
    what: &'static str,
}

impl fmt::Display for LinkEdge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} of {}", self.what, self.net)
    }
}

/// The first and the last address of an IPv4 network, and the first one of an IPv6 network (RFC 4291, section 2.6.1).
fn edges(net: &IpNet) -> Vec<LinkEdge> {
    let net = net.trunc();
    let edge = |address, what| LinkEdge { address, net, what };
    match net {
        IpNet::V4(_) if net.prefix_len() <= EDGES_V4 => {
            vec![edge(net.network(), "network address"), edge(net.broadcast(), "broadcast address")]
        }
        IpNet::V6(_) if net.prefix_len() <= EDGES_V6 => vec![edge(net.network(), "subnet-router anycast address")],
        _ => Vec::new(),
    }
}

impl From<Vec<IpAddr>> for GatewayProfile {
    /// A gateway with these addresses of its own, of which no more is known.
    fn from(own: Vec<IpAddr>) -> Self {
        Self::new(own, [])
    }
}

fn in_order(addresses: impl IntoIterator<Item = IpAddr>) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = addresses.into_iter().collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_the_gateway_is_no_next_hop() {
        let [a, b, c] = ["192.0.2.1", "192.0.2.2", "192.0.2.3"].map(|text| text.parse::<IpAddr>().unwrap());
        let profile = GatewayProfile::new([c, a, a], [b, c]);
        assert_eq!((&profile.own[..], &profile.next_hops[..]), (&[a, c][..], &[b][..]));
        assert_eq!(profile.reserved(), [a, b, c]);
    }
}
