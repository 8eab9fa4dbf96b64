//! Which SNAT addresses serve which port: one inside a port's prefix serves that port, one in none serves all.

use std::net::IpAddr;
use std::sync::Arc;

use proto::Family;

use crate::snat::{SNAT_ADDRESSES_MAX, SnatAddress};
use crate::{Address, Config, PortConfig, PortIndex};

/// By port.
pub(super) type SnatByPort<A> = Arc<[Box<[SnatAddress<A>]>]>;

/// The SNAT addresses of both families.
#[derive(Clone, Debug)]
pub(super) struct SnatTables {
    pub(super) v4: SnatByPort<u32>,
    pub(super) v6: SnatByPort<u128>,
}

impl SnatTables {
    pub(super) fn new(config: &Config) -> Self {
        Self { v4: by_port(config), v6: by_port(config) }
    }

    /// Whether there is an address for backends behind this port; without a port (no route), for any.
    pub(super) fn serves(&self, family: Family, port: Option<PortIndex>) -> bool {
        fn any<A>(by_port: &SnatByPort<A>, port: Option<PortIndex>) -> bool {
            match port {
                Some(port) => by_port.get(usize::from(port.0)).is_some_and(|addresses| !addresses.is_empty()),
                None => by_port.iter().any(|addresses| !addresses.is_empty()),
            }
        }
        match family {
            Family::V4 => any(&self.v4, port),
            Family::V6 => any(&self.v6, port),
        }
    }
}

/// Whether the address is on-link on the port.
pub(super) fn is_on_link(port: &PortConfig, address: IpAddr) -> bool {
    port.addresses.iter().any(|net| net.contains(&address))
}

fn by_port<A: Address>(config: &Config) -> SnatByPort<A> {
    let of_family: Vec<(A, IpAddr)> = config.snat.iter().filter_map(|&ip| A::from_ip(ip).map(|a| (a, ip))).collect();
    let serves = |port: &PortConfig, ip: IpAddr| is_on_link(port, ip) || !config.ports.iter().any(|other| is_on_link(other, ip));
    let of_port = |port: &PortConfig| {
        let indexed = (0..SNAT_ADDRESSES_MAX).zip(&of_family).filter(|(_, (_, ip))| serves(port, *ip));
        indexed.map(|(index, &(address, _))| SnatAddress { address, index }).collect()
    };
    config.ports.iter().map(of_port).collect()
}
