//! The outer headers of tunnels: source addresses and GUE's port (FORWARDING 12).
//!
//! **Invariant:** the same entropy gives the same source while the configuration is the same.
//!
//! Not here: encapsulation.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::Family;

use super::input::{Config, PortConfig};
use crate::port::PortIndex;

/// Outer source addresses by family and port, and the outer destination port.
#[derive(Clone, Debug)]
pub(crate) struct Tunnels {
    v4: Box<[Box<[Ipv4Addr]>]>,
    v6: Box<[Box<[Ipv6Addr]>]>,
    /// UDP destination port of mode `gue`.
    pub(crate) gue_destination_port: u16,
}

/// Outer addresses of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// IPv4: source and destination, in host order.
    V4(u32, u32),
    /// IPv6: source and destination, in host order.
    V6(u128, u128),
}

impl Tunnels {
    /// Configured sources of a family serve every port; without any, a port uses its first address of the family.
    pub(crate) fn new(config: &Config) -> Self {
        let of = |port: &PortConfig, family: Family| -> Vec<IpAddr> {
            let is_of_family = |address: &IpAddr| Family::of(*address) == family;
            let configured: Vec<IpAddr> = config.tunnel.sources.iter().copied().filter(is_of_family).collect();
            let own = || port.addresses.iter().map(ipnet::IpNet::addr).find(is_of_family);
            if configured.is_empty() { own().into_iter().collect() } else { configured }
        };
        let v4 = |address| if let IpAddr::V4(address) = address { Some(address) } else { None };
        let v6 = |address| if let IpAddr::V6(address) = address { Some(address) } else { None };
        Self {
            v4: config.ports.iter().map(|port| of(port, Family::V4).into_iter().filter_map(v4).collect()).collect(),
            v6: config.ports.iter().map(|port| of(port, Family::V6).into_iter().filter_map(v6).collect()).collect(),
            gue_destination_port: config.tunnel.gue_destination_port,
        }
    }

    /// Whether there is a source of the family for tunnels through this port; without a port (no route), through any.
    pub(crate) fn serves(&self, family: Family, port: Option<PortIndex>) -> bool {
        fn any<A>(by_port: &[Box<[A]>], port: Option<PortIndex>) -> bool {
            match port {
                Some(port) => by_port.get(usize::from(port.0)).is_some_and(|sources| !sources.is_empty()),
                None => by_port.iter().any(|sources| !sources.is_empty()),
            }
        }
        match family {
            Family::V4 => any(&self.v4, port),
            Family::V6 => any(&self.v6, port),
        }
    }

    /// Whether this address is a tunnel source of any port.
    pub(crate) fn is_source(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.v4.iter().any(|sources| sources.contains(&address)),
            IpAddr::V6(address) => self.v6.iter().any(|sources| sources.contains(&address)),
        }
    }

    /// The outer addresses of a tunnel to a backend through a port, from the source that `entropy` selects; `None`
    /// without a source.
    #[inline]
    pub(crate) fn ends(&self, port: PortIndex, backend: IpAddr, entropy: u32) -> Option<Ends> {
        Some(match backend {
            IpAddr::V4(backend) => Ends::V4(source_of(self.sources_v4(port), entropy)?.into(), backend.into()),
            IpAddr::V6(backend) => Ends::V6(source_of(self.sources_v6(port), entropy)?.into(), backend.into()),
        })
    }

    /// The sources of IPv4 tunnels through a port, of which [`source_of`] selects one as [`Tunnels::ends`] does.
    #[inline(always)]
    pub(crate) fn sources_v4(&self, port: PortIndex) -> &[Ipv4Addr] {
        of_port(&self.v4, port)
    }

    /// The sources of IPv6 tunnels through a port, as [`Tunnels::sources_v4`].
    #[inline(always)]
    pub(crate) fn sources_v6(&self, port: PortIndex) -> &[Ipv6Addr] {
        of_port(&self.v6, port)
    }
}

#[inline(always)]
fn of_port<A>(by_port: &[Box<[A]>], port: PortIndex) -> &[A] {
    by_port.get(usize::from(port.0)).map_or(&[], |sources| sources)
}

/// The source that `entropy` selects; `None` if there is none.
#[inline(always)]
pub(crate) fn source_of<A: Copy>(sources: &[A], entropy: u32) -> Option<A> {
    match *sources {
        [source] => Some(source),
        _ => sources.get((entropy as usize).checked_rem(sources.len())?).copied(),
    }
}
