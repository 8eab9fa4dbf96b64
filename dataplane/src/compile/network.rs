//! Routes and next hops of a snapshot, out of what Linux knows.
//!
//! A next hop keeps its slot while anything names it: a route, a neighbour, or a backend on-link. The epoch grows when
//! routes change or a slot becomes free, so that flows look again.

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use ipnet::IpNet;
use prefix_trie::PrefixMap;

use crate::flow::UNRESOLVED;
use crate::hash::TableHash;
use crate::snapshot::{Exit, NextHop, NextHopKey, Routes, Way};
use crate::{Mac, Network, PortConfig, PortIndex, Route};

/// What is new of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    Nothing,
    /// Neighbours came, went or moved. The ways to targets are the same.
    Neighbours,
    /// The ways to targets are to be looked up again.
    Routes,
}

/// What routes are made from, kept for comparison, and the routes.
#[derive(Debug)]
pub(super) struct Ways {
    ports: Arc<[PortConfig]>,
    network: Network,
    macs: HashMap<NextHopKey, Mac, TableHash>,
    routes: Routes,
    free: Vec<u32>,
    /// Slots that routes name.
    routers: BTreeSet<u32>,
    /// What snapshots share, while nothing changes.
    shared: Option<Arc<Routes>>,
}

impl Ways {
    /// Connected prefixes only.
    pub(super) fn new(ports: Arc<[PortConfig]>) -> Self {
        let routes = Routes {
            epoch: 0,
            v4: Arc::default(),
            v6: Arc::default(),
            next_hops: Vec::new(),
            exits: Vec::new(),
            slots: HashMap::default(),
        };
        let mut ways = Self {
            ports,
            network: Network::default(),
            macs: HashMap::default(),
            routes,
            free: Vec::new(),
            routers: BTreeSet::new(),
            shared: None,
        };
        ways.rebuild_routes();
        ways
    }

    /// Takes over what Linux knows now. When there is news, [`Ways::forget`] is due after it was acted on.
    pub(super) fn follow(&mut self, network: &Network) -> News {
        if self.network == *network {
            return News::Nothing;
        }
        self.shared = None;
        let routes_changed = self.network.routes != network.routes;
        self.network = network.clone();
        self.macs = network.neighbours.iter().map(|n| ((n.port, n.address), n.mac)).collect();
        if routes_changed {
            self.rebuild_routes();
        }
        let keys: Vec<NextHopKey> = self.network.neighbours.iter().map(|n| (n.port, n.address)).collect();
        for key in keys {
            self.slot(key);
        }
        for hop in self.routes.next_hops.iter_mut().flatten() {
            hop.mac = self.macs.get(&(hop.port, hop.address)).copied();
        }
        if routes_changed { News::Routes } else { News::Neighbours }
    }

    fn rebuild_routes(&mut self) {
        let mut routes = self.network.routes.clone();
        routes.sort_unstable();
        let known: HashSet<IpNet> = routes.iter().map(|route| route.to.trunc()).collect();
        for (port, config) in (0..=u8::MAX).map(PortIndex).zip(self.ports.iter()) {
            let connected = config.addresses.iter().map(IpNet::trunc).filter(|to| !known.contains(to));
            routes.extend(connected.map(|to| Route { to, via: None, port }));
        }
        let (mut v4, mut v6) = (PrefixMap::new(), PrefixMap::new());
        // The first of several routes to one prefix stays: inserted last.
        for route in routes.iter().rev() {
            let way = Way { via: route.via.map(|via| self.slot((route.port, via))), port: route.port };
            match route.to {
                IpNet::V4(to) => drop(v4.insert(to, way)),
                IpNet::V6(to) => drop(v6.insert(to, way)),
            }
        }
        self.routers = v4.values().chain(v6.values()).filter_map(|way: &Way| way.via).collect();
        (self.routes.v4, self.routes.v6) = (Arc::new(v4), Arc::new(v6));
        self.routes.epoch = self.routes.epoch.wrapping_add(1).max(1);
    }

    /// The slot of a next hop, a free one if it has none yet.
    fn slot(&mut self, key: NextHopKey) -> u32 {
        let routes = &mut self.routes;
        if let Some(&slot) = routes.slots.get(&key) {
            return slot;
        }
        let (port, address) = key;
        let hop = NextHop { port, mac: self.macs.get(&key).copied(), address };
        let slot = self.free.pop().unwrap_or_else(|| {
            routes.next_hops.push(None);
            u32::try_from(routes.next_hops.len() - 1).unwrap_or(UNRESOLVED)
        });
        routes.next_hops[slot as usize] = Some(hop);
        routes.slots.insert(key, slot);
        self.shared = None;
        slot
    }

    /// For a snapshot.
    pub(super) fn share(&mut self) -> Arc<Routes> {
        let (ports, routes) = (&self.ports, &mut self.routes);
        let shared = self.shared.get_or_insert_with(|| {
            routes.exits = routes.next_hops.iter().map(|hop| exit_by(ports, hop.as_ref()?)).collect();
            Arc::new(routes.clone())
        });
        shared.clone()
    }

    /// The port of a next hop.
    pub(super) fn port_of(&self, next_hop: u32) -> Option<PortIndex> {
        self.routes.next_hop(next_hop).map(|hop| hop.port)
    }

    /// Whether an address is its own next hop, in this slot.
    pub(super) fn is_on_link(&self, address: IpAddr, next_hop: u32) -> bool {
        self.routes.next_hop(next_hop).is_some_and(|hop| hop.address == address)
    }

    /// The slot of the next hop towards a backend; an on-link backend is its own.
    pub(super) fn next_hop_to(&mut self, address: IpAddr) -> u32 {
        match self.routes.way(address) {
            Some(Way { via: Some(slot), .. }) => slot,
            Some(Way { via: None, port }) => self.slot((port, address)),
            None => UNRESOLVED,
        }
    }

    /// Frees the slots that no route, no neighbour and none of `targets` names.
    pub(super) fn forget(&mut self, targets: impl Iterator<Item = u32>) {
        let wanted = self.named(targets);
        let (macs, next_hops, free) = (&self.macs, &mut self.routes.next_hops, &mut self.free);
        let before = self.routes.slots.len();
        self.routes.slots.retain(|key, slot| {
            let keep = wanted[*slot as usize] || macs.contains_key(key);
            if !keep {
                next_hops[*slot as usize] = None;
                free.push(*slot);
            }
            keep
        });
        if self.routes.slots.len() < before {
            self.shared = None;
            self.routes.epoch = self.routes.epoch.wrapping_add(1).max(1);
        }
    }

    /// By slot: whether a route or one of `targets` names it.
    fn named(&self, targets: impl Iterator<Item = u32>) -> Vec<bool> {
        let mut named = vec![false; self.routes.next_hops.len()];
        for slot in targets.chain(self.routers.iter().copied()) {
            if let Some(named) = named.get_mut(slot as usize) {
                *named = true;
            }
        }
        named
    }

    /// Routers and the next hops of `targets`, ordered, each once.
    pub(super) fn managed(&self, targets: impl Iterator<Item = u32>) -> Arc<[(PortIndex, IpAddr)]> {
        let named = self.named(targets);
        let hops = self.routes.next_hops.iter().zip(named).filter_map(|(hop, named)| hop.as_ref().filter(|_| named));
        let mut managed: Vec<_> = hops.map(|hop| (hop.port, hop.address)).collect();
        managed.sort_unstable();
        managed.into()
    }
}

/// How packets leave towards a next hop; none while its Ethernet address is unknown.
fn exit_by(ports: &[PortConfig], hop: &NextHop) -> Option<Exit> {
    let port = ports.get(usize::from(hop.port.0))?;
    Some(Exit { destination_mac: hop.mac?, source_mac: port.mac, mtu: port.mtu, port: hop.port })
}
