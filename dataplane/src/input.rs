//! What the agent knows and a snapshot is compiled from: configuration, network, health. Plain values.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;
use proto::{Protocol, ServiceName};

use crate::Link;

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
    /// TCP, one side's FIN seen (RFC 5382 REQ-5: at least 4 minutes).
    pub tcp_half_closed: Duration,
    /// TCP, the FINs of both sides or a RST seen.
    pub tcp_closing: Duration,
    /// TCP in a one-way mode, where only the client is seen.
    pub tcp_one_way: Duration,
    /// UDP streams: the client has sent again after the first reply.
    pub udp: Duration,
    /// UDP single exchanges: answered, and the client has not sent since.
    pub udp_exchange: Duration,
    /// UDP, not answered yet.
    pub udp_unreplied: Duration,
    /// SCTP.
    pub sctp: Duration,
    /// How long a Maglev table that was replaced still finds the backends of packets without a flow (FORWARDING 4, 11).
    pub table_grace: Duration,
}

impl FlowLimits {
    /// The longest time that a flow may be silent, of services without an idle timeout of their own.
    #[must_use]
    pub fn longest_idle(&self) -> Duration {
        let Self { tcp_established, tcp_opening, tcp_half_closed, tcp_closing, tcp_one_way, .. } = *self;
        let Self { udp, udp_exchange, udp_unreplied, sctp, .. } = *self;
        let tcp = [tcp_established, tcp_opening, tcp_half_closed, tcp_closing, tcp_one_way];
        tcp.into_iter().chain([udp, udp_exchange, udp_unreplied, sctp]).fold(Duration::ZERO, Duration::max)
    }
}

impl Default for FlowLimits {
    /// DESIGN section 7, key `flows`.
    fn default() -> Self {
        Self {
            max_per_worker: 1 << 20,
            tcp_established: Duration::from_secs(7200),
            tcp_opening: Duration::from_secs(30),
            tcp_half_closed: Duration::from_secs(300),
            tcp_closing: Duration::from_secs(10),
            tcp_one_way: Duration::from_secs(900),
            udp: Duration::from_secs(120),
            udp_exchange: Duration::from_secs(10),
            udp_unreplied: Duration::from_secs(30),
            sctp: Duration::from_secs(3600),
            table_grace: Duration::from_secs(60),
        }
    }
}

/// GUE's registered port (draft-ietf-intarea-gue).
pub const GUE_PORT: u16 = 6080;

/// What tunnels look like from outside (FORWARDING section 12).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Outer source addresses of both families. A family without one uses the address of the port that it leaves by.
    pub sources: Vec<IpAddr>,
    /// Outer UDP destination port of mode `gue`.
    pub gue_destination_port: u16,
}

impl Default for Tunnel {
    fn default() -> Self {
        Self { sources: Vec::new(), gue_destination_port: GUE_PORT }
    }
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
    /// Tunnels of modes `ipip` and `gue`.
    pub tunnel: Tunnel,
}

/// A route of Linux's tables main and local that leaves by one of our ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route {
    /// Destinations.
    pub to: IpNet,
    /// Next hop; none: the destination is on-link.
    pub via: Option<IpAddr>,
    /// The link.
    pub link: Link,
    /// Its share among the routes to the same destination, 1 to 256.
    pub weight: u16,
}

/// A neighbour that Linux knows the Ethernet address of and holds for usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Neighbour {
    /// The link it is reached by.
    pub link: Link,
    /// Its IP address.
    pub address: IpAddr,
    /// Its Ethernet address.
    pub mac: Mac,
}

/// A VLAN device of Linux above the twin of a port, which is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VlanLink {
    /// The link; its frames carry tags.
    pub link: Link,
    /// Largest IP packet, bytes.
    pub mtu: u16,
    /// Its addresses with the prefixes that are on-link.
    pub addresses: Vec<IpNet>,
}

/// What Linux knows of the network, as far as it concerns our ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Routes, in any order, without duplicates of (to, via, link). Several to one destination are used side by side, each
    /// flow by one of them (ECMP).
    pub routes: Vec<Route>,
    /// Destinations of blackhole, unreachable and prohibit routes: there is no way to them, whatever wider routes say.
    pub unreachable: Vec<IpNet>,
    /// Usable neighbours, in any order.
    pub neighbours: Vec<Neighbour>,
    /// The links of a port beside its untagged frames, ordered, each once. What is on others is unknown here.
    pub vlans: Vec<VlanLink>,
    /// Every address that Linux holds on the twins and the VLAN devices above them, beyond the configured ones too.
    pub addresses: Vec<IpAddr>,
    /// Ethernet addresses of ports whose devices came after the start, or came back; they replace the configured ones.
    pub macs: Vec<(PortIndex, Mac)>,
    /// Ports whose Linux twin takes frames for other stations too: an interface with an Ethernet address of its own stands
    /// on it, it is in a bridge, or somebody listens.
    pub promiscuous: Vec<PortIndex>,
    /// Ports without link. What they answer for is announced again when they have it back.
    pub down: Vec<PortIndex>,
    /// How often each port has moved to another cable (a bond to another member), by port; beyond the end: never. What it
    /// answers for is announced again after each move, so that switches learn where it is now.
    pub moves: Vec<u64>,
}

/// Which backends are failing their probes. What is not in it is usable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Backends by protocol and address that fail for every service that has them and asks for probes.
    pub failing: HashSet<(Protocol, SocketAddr)>,
    /// Those that fail for one service alone: what was asked depends on its VIP, or on its endpoints there.
    pub failing_for: BTreeMap<ServiceName, HashSet<(Protocol, SocketAddr)>>,
}
