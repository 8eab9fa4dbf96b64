//! What the agent knows and a snapshot is compiled from: configuration, network, health. Plain values.

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use proto::Protocol;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Position of a port in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortIndex(pub u8);

/// A port as the engine needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Its name.
    pub name: String,
    /// Its Ethernet address.
    pub mac: Mac,
    /// Largest IP packet, bytes.
    pub mtu: u16,
    /// Addresses of its Linux twin with the prefixes that are on-link.
    pub addresses: Vec<IpNet>,
    /// Whether it has a Linux twin. Without one, the engine answers for `addresses` itself and drops what is for Linux.
    pub twin: bool,
}

/// Idle times after which a flow ends, and how many there may be (DESIGN section 7, key `flows`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLimits {
    /// Flows of both families together, per worker.
    pub max_per_worker: u32,
    /// TCP, both sides have spoken.
    pub tcp_established: Duration,
    /// TCP, SYN seen.
    pub tcp_opening: Duration,
    /// TCP, FIN or RST seen.
    pub tcp_closing: Duration,
    /// UDP, answered.
    pub udp: Duration,
    /// UDP, not answered yet.
    pub udp_unreplied: Duration,
}

/// What does not change while the gateway runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The ports; [`PortIndex`] counts them.
    pub ports: Vec<PortConfig>,
    /// SNAT addresses of both families.
    pub snat: Vec<IpAddr>,
    /// Addresses that node ports are served on.
    pub node_port_addresses: Vec<IpAddr>,
    /// Flow limits.
    pub flows: FlowLimits,
}

/// A route of Linux's tables main and local that leaves by one of our ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route {
    /// Destinations.
    pub to: IpNet,
    /// Next hop; none: the destination is on-link.
    pub via: Option<IpAddr>,
    /// The port.
    pub port: PortIndex,
}

/// A neighbour that Linux knows the Ethernet address of and holds for usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Neighbour {
    /// The port it is reached by.
    pub port: PortIndex,
    /// Its IP address.
    pub address: IpAddr,
    /// Its Ethernet address.
    pub mac: Mac,
}

/// What Linux knows of the network, as far as it concerns our ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Routes, in any order, without duplicates of (to, port).
    pub routes: Vec<Route>,
    /// Usable neighbours, in any order.
    pub neighbours: Vec<Neighbour>,
    /// Every address that Linux holds on the twins, beyond the configured ones too.
    pub addresses: Vec<IpAddr>,
    /// Ports without link. What they answer for is announced again when they have it back.
    pub down: Vec<PortIndex>,
}

/// Which targets are failing their probes. What is not in it is usable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Backends by protocol and address, in the key of the service they fail for being shared by all services.
    pub failing: HashSet<(Protocol, SocketAddr)>,
}
