//! Compiles the routes and next hops of a snapshot from the kernel's tables.
//!
//! A next hop keeps its slot while anything refers to it: a route, a neighbour, or an on-link backend. The epoch
//! increases when routes change, when a port loses or regains its link, or when freed slots are about to be reused;
//! flows then look up their next hops again. A slot that was only freed has no exit, so its own flows look up again
//! anyway, and no others need to.
//!
//! **Invariant:** no flow of the current epoch holds a slot in `free`.
//!
//! Not here: reading the kernel's tables, and the choice of a group member for a flow.

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hashbrown::HashMap;
use ipnet::IpNet;
use proto::MaglevSpec;
use proto::limits::MAGLEV_HASH_VERSION;

use crate::choose::MaglevTable;
use crate::flow::{ROUTE_EPOCHS, UNRESOLVED};
use crate::port::{Link, PortIndex};
use crate::snapshot::{
    Exit, GROUP_TABLE, Group, Network, NextHop, NextHopKey, PortConfig, Prefix, Prefixes, Route, RouteTarget, Routes, VlanLink,
};
use crate::wire::{Mac, TableHash};

/// Next hops that nothing refers to are forgotten in groups of at least this many.
const EXCESS_NEXT_HOPS: usize = 1024;

/// Maximum number of distinct groups of next hops: 6 KB of tables each, 6 MB together. A gateway with full tables of
/// two providers has a few. Routes beyond the limit use their first next hop.
pub(super) const GROUPS_MAX: usize = 1024;
/// Maximum number of next hops in a group. The kernel's limit for one IPv4 route message (about 100 with all
/// attributes) is below it.
const MEMBERS_MAX: usize = 128;
/// Number of freed slots that are collected before they are reused together: changes of neighbours make all flows look
/// up again only once in that many. 64 bytes each in the tables: 16 KB.
const REUSED_TOGETHER: usize = 256;

/// The kinds of changes of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NetworkChange {
    Nothing,
    /// Neighbours were added, removed or changed. The routes to targets are the same.
    Neighbours,
    /// The routes to targets must be looked up again.
    Routes,
}

/// The inputs of the routes, kept for comparison, and the routes.
#[derive(Debug)]
pub(super) struct RouteBook {
    ports: Arc<[PortConfig]>,
    network: Network,
    macs: HashMap<NextHopKey, Mac, TableHash>,
    routes: Routes,
    /// Slots that may be reused.
    free: Vec<u32>,
    /// Slots freed in the current epoch; flows may still hold them.
    freed: Vec<u32>,
    /// Slots that routes refer to.
    routers: BTreeSet<u32>,
    /// Number of routes without a group because there are [`GROUPS_MAX`].
    ungrouped: usize,
    /// The routes that snapshots share while nothing changes.
    shared: Option<Arc<Routes>>,
}

impl RouteBook {
    /// Starts with connected prefixes only.
    pub(super) fn new(ports: Arc<[PortConfig]>) -> Self {
        let routes = Routes {
            epoch: 0,
            v4: Arc::default(),
            v6: Arc::default(),
            client_routers: Arc::default(),
            router_exits: Arc::default(),
            next_hops: Vec::new(),
            exits: Vec::new(),
            slots: HashMap::default(),
            groups: Arc::default(),
            down: Vec::new(),
            devices: Arc::default(),
            first_choices: Arc::default(),
        };
        let mut book = Self {
            ports,
            network: Network::default(),
            macs: HashMap::default(),
            routes,
            free: Vec::new(),
            freed: Vec::new(),
            routers: BTreeSet::new(),
            ungrouped: 0,
            shared: None,
        };
        book.rebuild_routes();
        book
    }

    /// The network that was taken over last.
    pub(super) fn network(&self) -> &Network {
        &self.network
    }

    /// Continues after the epoch of `before`, of whose slots none are kept: flows look up again.
    pub(super) fn follow_epoch(&mut self, before: &Routes) {
        self.routes.epoch = before.epoch;
        self.look_again();
        self.shared = None;
    }

    /// Takes over ports whose Ethernet addresses have changed, and with them what packets carry.
    pub(super) fn set_ports(&mut self, ports: Arc<[PortConfig]>) {
        self.ports = ports;
        self.shared = None;
    }

    /// Takes over the kernel's current state. If anything changed, the caller must call [`RouteBook::forget`] after
    /// handling it.
    pub(super) fn follow(&mut self, network: &Network) -> NetworkChange {
        if self.network == *network {
            return NetworkChange::Nothing;
        }
        self.shared = None;
        let old = &self.network;
        let routes_changed = old.routes != network.routes
            || old.unreachable != network.unreachable
            || old.elsewhere != network.elsewhere
            || old.devices != network.devices;
        if self.routes.down != network.down {
            self.routes.down.clone_from(&network.down);
            self.look_again();
        }
        self.network = network.clone();
        self.macs = network.neighbours.iter().map(|n| ((n.link, n.address), n.mac)).collect();
        if routes_changed {
            self.rebuild_routes();
        }
        let keys: Vec<NextHopKey> = self.network.neighbours.iter().map(|n| (n.link, n.address)).collect();
        for key in keys {
            self.slot(key);
        }
        for hop in self.routes.next_hops.iter_mut().flatten() {
            hop.mac = self.macs.get(&(hop.link, hop.address)).copied();
        }
        if routes_changed { NetworkChange::Routes } else { NetworkChange::Neighbours }
    }

    fn rebuild_routes(&mut self) {
        let mut routes = self.network.routes.clone();
        routes.sort_unstable();
        let nowhere = std::mem::take(&mut self.network.unreachable);
        self.routes.devices = Arc::new(self.network.devices.clone());
        let known: HashSet<IpNet> =
            routes.iter().map(|route| route.to).chain(nowhere.iter().copied()).map(|to| to.trunc()).collect();
        for (port, config) in (0..=u8::MAX).map(PortIndex).zip(self.ports.iter()) {
            let connected = config.addresses.iter().map(IpNet::trunc).filter(|to| !known.contains(to));
            routes.extend(connected.map(|to| Route { to, via: None, link: port.into(), weight: 1 }));
        }
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        let mut put = |to: IpNet, value| match to {
            IpNet::V4(to) => v4.push(Prefix { address: to.addr().into(), len: to.prefix_len(), value }),
            IpNet::V6(to) => v6.push(Prefix { address: to.addr().into(), len: to.prefix_len(), value }),
        };
        // Of equal prefixes the last one counts: the connected prefix of a port is its own, also while its twin is down
        // and the interface below it has the prefix as well.
        for (to, device) in &self.network.elsewhere {
            put(*to, RouteTarget::Elsewhere(*device));
        }
        for to in &nowhere {
            put(*to, RouteTarget::Nowhere);
        }
        let mut groups = Groups::default();
        self.ungrouped = 0;
        for several in routes.chunk_by(|a, b| a.to == b.to) {
            let target = self.target(several, &mut groups);
            put(several[0].to, target); // a chunk is not empty
        }
        self.network.unreachable = nowhere;
        let targets = v4.iter().map(|prefix| prefix.value).chain(v6.iter().map(|prefix| prefix.value));
        self.routers = targets.filter_map(|target| if let RouteTarget::Via(slot) = target { Some(slot) } else { None }).collect();
        self.routers.extend(groups.made.iter().flat_map(|group| group.members.iter().copied()));
        (self.routes.v4, self.routes.v6, self.routes.groups) =
            (Arc::new(Prefixes::new(v4)), Arc::new(Prefixes::new(v6)), groups.made.into());
        self.routes.find_client_routers();
        self.look_again();
    }

    /// Starts a new epoch: flows look up their next hops again and stop using the slots that they held.
    fn look_again(&mut self) {
        self.free.append(&mut self.freed);
        self.routes.epoch = self.routes.epoch % ROUTE_EPOCHS + 1;
    }

    /// The result of all routes to one destination. An on-link route takes precedence over routes by routers.
    fn target(&mut self, several: &[Route], groups: &mut Groups) -> RouteTarget {
        let routers: Vec<(NextHopKey, u16)> =
            several.iter().filter_map(|route| Some(((route.link, route.via?), route.weight))).take(MEMBERS_MAX).collect();
        match (&several[0], &routers[..]) {
            (Route { via: None, link, .. }, _) => RouteTarget::OnLink(*link),
            (_, [(router, _)]) => RouteTarget::Via(self.slot(*router)),
            _ => {
                let members: Vec<(u32, u16)> = routers.iter().map(|&(router, weight)| (self.slot(router), weight)).collect();
                let number = groups.number(members, &routers);
                self.ungrouped += usize::from(number.is_none());
                number.map_or(RouteTarget::Via(self.slot(routers[0].0)), RouteTarget::Via)
            }
        }
    }

    /// A message about routes that are not used as the kernel has them.
    pub(super) fn problem(&self) -> Option<String> {
        (self.ungrouped > 0).then(|| {
            format!("{} routes by several next hops go by the first one: {GROUPS_MAX} different groups are kept", self.ungrouped)
        })
    }

    /// The slot of a next hop; assigns a free one if it has none yet.
    fn slot(&mut self, key: NextHopKey) -> u32 {
        if let Some(&slot) = self.routes.slots.get(&key) {
            return slot;
        }
        if self.free.is_empty() && self.freed.len() >= REUSED_TOGETHER {
            self.look_again();
        }
        let routes = &mut self.routes;
        let (link, address) = key;
        let hop = NextHop { link, mac: self.macs.get(&key).copied(), address };
        let slot = self.free.pop().unwrap_or_else(|| {
            routes.next_hops.push(None);
            u32::try_from(routes.next_hops.len() - 1).unwrap_or(UNRESOLVED)
        });
        routes.next_hops[slot as usize] = Some(hop);
        routes.slots.insert(key, slot);
        self.shared = None;
        slot
    }

    /// The routes, shared with a snapshot.
    pub(super) fn share(&mut self) -> Arc<Routes> {
        let (ports, vlans, routes) = (&self.ports, &self.network.vlans, &mut self.routes);
        let shared = self.shared.get_or_insert_with(|| {
            routes.exits = routes.next_hops.iter().map(|hop| exit_by(ports, vlans, hop.as_ref()?)).collect();
            routes.find_router_exits();
            routes.find_first_choices();
            Arc::new(routes.clone())
        });
        shared.clone()
    }

    /// The link of a next hop; of a group, that of its first member.
    pub(super) fn link_of(&self, next_hop: u32) -> Option<Link> {
        let slot = self.routes.members(next_hop).first().copied().unwrap_or(next_hop);
        self.routes.next_hop(slot).map(|hop| hop.link)
    }

    /// Whether the next hop in this slot is the address itself.
    pub(super) fn is_on_link(&self, address: IpAddr, next_hop: u32) -> bool {
        self.routes.next_hop(next_hop).is_some_and(|hop| hop.address == address)
    }

    /// The slot of the next hop towards a backend; an on-link backend is its own next hop.
    pub(super) fn next_hop_to(&mut self, address: IpAddr) -> u32 {
        match self.routes.target(address) {
            Some(RouteTarget::Via(next_hop)) => next_hop,
            Some(RouteTarget::OnLink(link)) => self.slot((link, address)),
            Some(RouteTarget::Nowhere | RouteTarget::Elsewhere(_)) | None => UNRESOLVED,
        }
    }

    /// The index of the device by which Linux sends to an address, if packets of the gateway cannot take it.
    pub(super) fn device_to(&self, address: IpAddr) -> Option<u32> {
        self.routes.device_to(address)
    }

    /// Why packets do not reach an address to which Linux sends by this device.
    pub(super) fn no_route(&self, address: IpAddr, device: u32) -> String {
        let name = self.routes.device_name(device);
        if self.ports.iter().any(|port| port.name == name) {
            return format!(
                "Linux's route to {address} by {name} encapsulates packets, which the gateway does not (ip route get {address})"
            );
        }
        format!(
            "Linux's route to {address} leaves by {name}, which is no port of the gateway, so that packets are dropped (no_route); \
             route it by a port, or make {name} one (ip route get {address})"
        )
    }

    /// Frees the slots that no route, no neighbour and none of `targets` refers to.
    pub(super) fn forget(&mut self, targets: impl Iterator<Item = u32>) {
        let wanted = self.named(targets);
        let (macs, next_hops, freed) = (&self.macs, &mut self.routes.next_hops, &mut self.freed);
        let before = self.routes.slots.len();
        self.routes.slots.retain(|key, slot| {
            let keep = wanted[*slot as usize] || macs.contains_key(key);
            if !keep {
                next_hops[*slot as usize] = None;
                freed.push(*slot);
            }
            keep
        });
        if self.routes.slots.len() < before {
            self.shared = None;
        }
    }

    /// As [`RouteBook::forget`], once most next hops are referred to by nothing: addresses of backends come and go
    /// without any change of the network.
    pub(super) fn forget_excess(&mut self, targets: impl ExactSizeIterator<Item = u32>) {
        let most = 2 * (targets.len() + self.routers.len() + self.macs.len()) + EXCESS_NEXT_HOPS;
        if self.routes.slots.len() > most {
            self.forget(targets);
        }
    }

    /// For each slot, whether a route or one of `targets` refers to it.
    fn named(&self, targets: impl Iterator<Item = u32>) -> Vec<bool> {
        let mut named = vec![false; self.routes.next_hops.len()];
        for slot in targets.chain(self.routers.iter().copied()) {
            if let Some(named) = named.get_mut(slot as usize) {
                *named = true;
            }
        }
        named
    }

    /// Routers and the next hops of `targets`, sorted and distinct.
    pub(super) fn managed(&self, targets: impl Iterator<Item = u32>) -> Arc<[(Link, IpAddr)]> {
        let named = self.named(targets);
        let hops = self.routes.next_hops.iter().zip(named).filter_map(|(hop, named)| hop.as_ref().filter(|_| named));
        let mut managed: Vec<_> = hops.map(|hop| (hop.link, hop.address)).collect();
        managed.sort_unstable();
        managed.into()
    }
}

/// The groups of next hops that routes share.
#[derive(Default)]
struct Groups {
    made: Vec<Group>,
    numbers: HashMap<Vec<(u32, u16)>, u32, TableHash>,
}

impl Groups {
    /// The number of the group with these slots and weights; `None` when there are [`GROUPS_MAX`].
    fn number(&mut self, members: Vec<(u32, u16)>, routers: &[(NextHopKey, u16)]) -> Option<u32> {
        if let Some(&number) = self.numbers.get(&members) {
            return Some(number);
        }
        let number = Group::number(self.made.len()).filter(|_| self.made.len() < GROUPS_MAX)?;
        let spec = MaglevSpec { size: GROUP_TABLE, seed: 0, hash_version: MAGLEV_HASH_VERSION };
        // A router on two links is two next hops.
        let identities: Vec<(SocketAddr, u16)> =
            routers.iter().map(|&((link, via), weight)| (SocketAddr::new(via, link.folded()), weight.max(1))).collect();
        let table = MaglevTable::build(spec, &identities);
        self.made.push(Group { members: members.iter().map(|&(slot, _)| slot).collect(), table });
        self.numbers.insert(members, number);
        Some(number)
    }
}

/// The exit towards a next hop; `None` while its Ethernet address is unknown.
fn exit_by(ports: &[PortConfig], vlans: &[VlanLink], hop: &NextHop) -> Option<Exit> {
    let (link, destination_mac) = (hop.link, hop.mac?);
    let port = ports.get(usize::from(link.port().0))?;
    let vlan = vlans.binary_search_by_key(&link, |vlan| vlan.link).ok().map(|at| &vlans[at]);
    let mtu = vlan.map_or(port.mtu, |vlan| vlan.mtu.min(port.mtu));
    Some(Exit::new(link, mtu, port.mac, destination_mac))
}
