//! Inputs of the compiler, provided by the agent: configuration, network and health, as plain values.
//!
//! Not here: services, which the controller sends (`proto`).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use proto::{Protocol, ServiceName, vip_group};

use crate::flow::FlowLimits;
use crate::port::{Link, PortIndex};
use crate::wire::Mac;

/// A port as the engine needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Its name.
    pub name: String,
    /// Its Ethernet address.
    pub mac: Mac,
    /// MTU, bytes.
    pub mtu: u16,
    /// Addresses of its Linux twin with the prefixes that are on-link.
    pub addresses: Vec<IpNet>,
    /// Whether it has a Linux twin. Without one, the engine answers for `addresses` itself and drops packets for the
    /// kernel.
    pub twin: bool,
}

/// GUE's registered port (draft-ietf-intarea-gue).
pub const GUE_PORT: u16 = 6080;

/// The outer headers of tunnels (FORWARDING section 12).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Outer source addresses of both families. A family without one uses the address of the outgoing port.
    pub sources: Vec<IpAddr>,
    /// Outer UDP destination port of mode `gue`.
    pub gue_destination_port: u16,
}

impl Default for Tunnel {
    fn default() -> Self {
        Self { sources: Vec::new(), gue_destination_port: GUE_PORT }
    }
}

/// The configuration. While the gateway runs, only [`Tunables`] change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The ports, indexed by [`PortIndex`].
    pub ports: Vec<PortConfig>,
    /// SNAT addresses of both families.
    pub snat: Vec<IpAddr>,
    /// Whether SNAT addresses belong to VIP groups and move with them: the n-th of a family to group n. All gateways of
    /// the fleet have the same addresses in the same order. Addresses beyond the number of groups are this gateway's
    /// own. Without an election it has no effect.
    pub shared_snat: bool,
    /// Addresses on which node ports are served.
    pub node_port_addresses: Vec<IpAddr>,
    /// Flow limits.
    pub flows: FlowLimits,
    /// Room for backends of all Services, draining ones included, and for targets that rest: 1 to
    /// [`crate::flow::TARGETS_MAX`].
    pub targets_max: u32,
    /// Tunnels of modes `ipip` and `gue`.
    pub tunnel: Tunnel,
}

impl Config {
    /// The part that may change while the gateway runs.
    #[must_use]
    pub fn tunables(&self) -> Tunables {
        let Self { snat, node_port_addresses, flows, targets_max, .. } = self;
        let (snat, node_port_addresses, flows) = (snat.clone(), node_port_addresses.clone(), flows.clone());
        Tunables { snat, node_port_addresses, flows, targets_max: *targets_max }
    }
}

/// The part of the configuration that may change while the gateway runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tunables {
    /// SNAT addresses of both families: the addresses of before in the same order, then others.
    pub snat: Vec<IpAddr>,
    /// Addresses on which node ports are served.
    pub node_port_addresses: Vec<IpAddr>,
    /// Flow limits. The maximum number of flows stays that of the start, by which tables were sized.
    pub flows: FlowLimits,
    /// See [`Config::targets_max`].
    pub targets_max: u32,
}

/// A route in the kernel's tables main and local through one of the gateway's ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route {
    /// Destination prefix.
    pub to: IpNet,
    /// Next hop; `None`: the destination is on-link.
    pub via: Option<IpAddr>,
    /// The link.
    pub link: Link,
    /// Its weight among the routes to the same destination, 1 to 256.
    pub weight: u16,
}

/// A neighbour whose Ethernet address the kernel knows and regards as usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Neighbour {
    /// The link on which it is reached.
    pub link: Link,
    /// Its IP address.
    pub address: IpAddr,
    /// Its Ethernet address.
    pub mac: Mac,
}

/// A VLAN device of the kernel on the twin of a port; it is up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VlanLink {
    /// The link, whose frames carry VLAN tags.
    pub link: Link,
    /// MTU, bytes.
    pub mtu: u16,
    /// Its addresses with the prefixes that are on-link.
    pub addresses: Vec<IpNet>,
}

/// The kernel's view of the network, as far as it concerns the gateway's ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Routes, in any order, without duplicates of (to, via, link). Several routes to one destination are used in
    /// parallel, each flow by one of them (ECMP).
    pub routes: Vec<Route>,
    /// Destinations of blackhole, unreachable and prohibit routes: unreachable whatever less specific routes exist.
    pub unreachable: Vec<IpNet>,
    /// Destinations whose route in use leaves by a device that packets of the gateway cannot take, with the device's
    /// index: unreachable whatever less specific routes exist. None is in `routes`.
    pub elsewhere: Vec<(IpNet, u32)>,
    /// Names of the devices in `elsewhere`.
    pub devices: BTreeMap<u32, String>,
    /// Usable neighbours, in any order.
    pub neighbours: Vec<Neighbour>,
    /// The links of a port besides its untagged frames, sorted and distinct. Other VLANs are unknown.
    pub vlans: Vec<VlanLink>,
    /// All addresses of the kernel on the twins and the VLAN devices on them, including those that are not configured.
    pub addresses: Vec<IpAddr>,
    /// Ethernet addresses of ports whose devices appeared after the start, or reappeared; they replace the configured
    /// ones.
    pub macs: Vec<(PortIndex, Mac)>,
    /// Ports whose Linux twin accepts frames for other stations too: an interface with an Ethernet address of its own
    /// is on top of it, it is in a bridge, or a program captures on it.
    pub promiscuous: Vec<PortIndex>,
    /// Ports without link. The addresses that they answer for are announced again when the link returns.
    pub down: Vec<PortIndex>,
    /// How often each port has moved to another cable (a bond to another member), indexed by port; 0 past the end. The
    /// addresses that it answers for are announced again after each move, so that switches learn the new location.
    pub moves: Vec<u64>,
    /// The kernel's indices of the interfaces behind the links, ascending. `None`: the kernel's tables have not been
    /// read yet, so a route that is missing may still come.
    pub interfaces: Option<Vec<u32>>,
}

/// The groups of VIPs that this gateway owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedGroups {
    /// Number of groups, 1 to [`VIP_GROUPS_MAX`](proto::limits::VIP_GROUPS_MAX).
    pub groups: u8,
    /// Bit n: it owns group n.
    pub owned: u64,
}

impl OwnedGroups {
    /// Whether it owns the group of this VIP.
    #[must_use]
    pub fn own(self, vip: IpAddr) -> bool {
        self.has(vip_group(vip, self.groups))
    }

    /// Whether it owns this group.
    #[must_use]
    pub fn has(self, group: u8) -> bool {
        self.owned.checked_shr(group.into()).is_some_and(|owned| owned & 1 == 1)
    }
}

/// The VIPs of `l2` pools for which this gateway answers. By default all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VipAnswers {
    /// `None`: there is no election, and it owns every group.
    pub groups: Option<OwnedGroups>,
    /// VIPs that it leaves to another station that announces them.
    pub yielded: BTreeSet<IpAddr>,
    /// VIPs and SNAT addresses that another station announced although this gateway keeps them, and how often it has
    /// defended each. They are announced again when the number changes.
    pub defended: BTreeMap<IpAddr, u64>,
    /// VIP groups that another gateway advertised although this one keeps them, and how often it has defended each: the
    /// same for all addresses of a group.
    pub defended_groups: BTreeMap<u8, u64>,
}

impl VipAnswers {
    fn include(&self, vip: IpAddr) -> bool {
        self.groups.is_none_or(|groups| groups.own(vip)) && !self.yielded.contains(&vip)
    }

    /// The VIPs among `vips`.
    pub(crate) fn among(&self, vips: &[IpAddr]) -> Vec<IpAddr> {
        vips.iter().copied().filter(|&vip| self.include(vip)).collect()
    }
}

/// Backends of services. In an `Arc` a copy is free, and so is the comparison of two copies: they may name all
/// backends.
pub type BackendsByService = BTreeMap<ServiceName, HashSet<(Protocol, SocketAddr)>>;

/// The backends that fail their probes, and those that have passed one. All others are usable, if their service does
/// not want them unhealthy at first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Backends, by protocol and address, that fail for every service that lists them and probes.
    pub failing: HashSet<(Protocol, SocketAddr)>,
    /// Backends that fail for one service only: the probe depends on its VIP, or on its endpoints there.
    pub failing_for: Arc<BackendsByService>,
    /// Backends that have passed a probe of a service, where that counts ([`proto::InitialHealth::Unhealthy`]).
    pub proven_for: Arc<BackendsByService>,
}
