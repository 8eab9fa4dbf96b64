//! What tunnels look like from outside: their source addresses (FORWARDING 12).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proto::Family;

use crate::{Config, PortConfig, PortIndex};

/// Outer source addresses by family and port.
#[derive(Clone, Debug)]
pub(crate) struct Tunnels {
    v4: Box<[Box<[Ipv4Addr]>]>,
    v6: Box<[Box<[Ipv6Addr]>]>,
}

impl Tunnels {
    /// The configured sources of a family serve every port; without any, a port's first address of the family does.
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
        }
    }

    /// Whether there is a source of the family for tunnels that leave by this port; without a port (no route), by any.
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
}
