//! The settings in the form of the forwarding engine.

use dataplane::{Config, Mac, Network, PortConfig, Route};
use ipnet::IpNet;

use super::{Settings, Twin};

impl Settings {
    /// The engine's configuration. `device_macs` are the Ethernet addresses of the devices, in the order of the ports.
    /// A configured address takes precedence; a port without any gets 00:00:00:00:00:00.
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
            shared_snat: self.replication.is_some(),
            targets_max: self.targets_max,
            tunnel: self.tunnel.clone(),
        }
    }

    /// The network that key `static` describes, for `replay` and for ports without a twin. Prefixes of links are
    /// on-link, unless a route names them.
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
            // Without any twin nothing of Linux is read.
            interfaces: self.ports.iter().all(|port| port.twin == Twin::None).then(Vec::new),
            ..Network::default()
        }
    }
}
