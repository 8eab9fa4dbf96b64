//! The settings as the forwarding engine takes them.

use dataplane::{Config, Mac, Network, PortConfig, Route};
use ipnet::IpNet;

use super::{Settings, Twin};

impl Settings {
    /// The engine's configuration. `device_macs` are the devices' own Ethernet addresses, in the order of the ports; a
    /// configured one wins, and a port that is not in it gets none (00:00:00:00:00:00).
    #[must_use]
    pub fn engine(&self, device_macs: &[Mac]) -> Config {
        let macs = device_macs.iter().copied().chain(std::iter::repeat(Mac::default()));
        let ports = self.ports.iter().zip(macs).map(|(port, device)| PortConfig {
            name: port.name.clone(),
            mac: port.mac.unwrap_or(device),
            mtu: port.mtu_bytes,
            addresses: port.addresses.clone(),
            twin: port.twin == Twin::Tap,
        });
        Config {
            ports: ports.collect(),
            snat: self.snat.clone(),
            node_port_addresses: self.node_port_addresses.clone(),
            flows: self.flows.clone(),
            tunnel: self.tunnel.clone(),
        }
    }

    /// The network as key `static` describes it: for `replay`, and for ports without a twin. The prefixes of links are on-link
    /// there, unless a route says otherwise.
    #[must_use]
    pub fn fixed_network(&self) -> Network {
        let on_links = self.links.iter().flat_map(|link| link.addresses.iter().map(|net| (link.link, net.trunc())));
        let connected = on_links.filter(|(_, to)| self.routes.iter().all(|route| route.to != *to));
        let connected = connected.map(|(link, to)| Route { to, via: None, link, weight: 1 });
        let of_links = self.links.iter().flat_map(|link| &link.addresses);
        Network {
            routes: self.routes.iter().copied().chain(connected).collect(),
            neighbours: self.neighbours.clone(),
            vlans: self.links.clone(),
            addresses: self.ports.iter().flat_map(|port| &port.addresses).chain(of_links).map(IpNet::addr).collect(),
            ..Network::default()
        }
    }
}
