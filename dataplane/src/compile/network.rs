//! Routes and next hops of a snapshot, out of what Linux knows.
//!
//! A next hop keeps its slot while anything names it: a route, a neighbour, or a backend on-link. The epoch grows when
//! routes change or a slot becomes free, so that flows look again.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use ipnet::IpNet;
use prefix_trie::PrefixMap;

use crate::flow::UNRESOLVED;
use crate::hash::TableHash;
use crate::snapshot::{NextHop, NextHopKey, Routes, Way};
use crate::{Mac, Network, PortConfig, PortIndex, Route};

/// What routes are made from, kept for comparison, and the routes.
#[derive(Debug)]
pub(super) struct Ways {
    ports: Arc<[PortConfig]>,
    network: Network,
    macs: HashMap<NextHopKey, Mac, TableHash>,
    routes: Routes,
    free: Vec<u32>,
    /// What snapshots share, while nothing changes.
    shared: Option<Arc<Routes>>,
}

impl Ways {
    /// Connected prefixes only.
    pub(super) fn new(ports: Arc<[PortConfig]>) -> Self {
        let routes =
            Routes { epoch: 0, v4: Arc::default(), v6: Arc::default(), next_hops: Vec::new(), slots: HashMap::default() };
        let mut ways =
            Self { ports, network: Network::default(), macs: HashMap::default(), routes, free: Vec::new(), shared: None };
        ways.rebuild_routes();
        ways
    }

    /// Takes over what Linux knows now. True when something changed; then [`Ways::forget`] is due after all targets
    /// have been looked up again.
    pub(super) fn follow(&mut self, network: &Network) -> bool {
        if self.network == *network {
            return false;
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
        true
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
        self.shared.get_or_insert_with(|| Arc::new(self.routes.clone())).clone()
    }

    /// The port of a next hop.
    pub(super) fn port_of(&self, next_hop: u32) -> Option<PortIndex> {
        self.routes.next_hop(next_hop).map(|hop| hop.port)
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
        let mut wanted: HashSet<u32> = targets.collect();
        wanted.extend(self.routers());
        let (macs, next_hops, free) = (&self.macs, &mut self.routes.next_hops, &mut self.free);
        let before = self.routes.slots.len();
        self.routes.slots.retain(|key, slot| {
            let keep = wanted.contains(slot) || macs.contains_key(key);
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

    fn routers(&self) -> impl Iterator<Item = u32> {
        self.routes.v4.values().chain(self.routes.v6.values()).filter_map(|way| way.via)
    }

    /// Routers and the next hops of `targets`, ordered, each once.
    pub(super) fn managed(&self, targets: impl Iterator<Item = u32>) -> Arc<[(PortIndex, IpAddr)]> {
        let slots: HashSet<u32> = targets.chain(self.routers()).collect();
        let mut managed: Vec<_> =
            slots.into_iter().filter_map(|slot| self.routes.next_hop(slot)).map(|hop| (hop.port, hop.address)).collect();
        managed.sort_unstable();
        managed.into()
    }
}
