//! Holders of addresses, with their ports and sharing terms.
//!
//! Invariant: no two Services hold the same (address, protocol, port), and Services hold the same address only if their
//! sharing terms agree.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use litemap::LiteMap;
use proto::{Family, Pool, ServiceName};

use super::claim::{Claim, Port, Terms};
use super::freed::remove_from;
use crate::plan::pools::{OutsideAddress, PoolRoute, Pools};
use objects::{PoolSpec, Sharing};

/// The complete set.
#[derive(Clone, Debug, Default)]
pub(super) struct Holders {
    addresses_held: BTreeMap<IpAddr, SharedAddress>,
    of: BTreeMap<ServiceName, Vec<IpAddr>>,
    /// Addresses under each sharing key.
    keys: BTreeMap<String, BTreeSet<IpAddr>>,
    /// Number of Services of a namespace that hold an address.
    namespaces: BTreeMap<String, BTreeMap<IpAddr, u32>>,
}

/// One address. Most have one holder: a `BTreeMap` has room for eleven entries as soon as it has one, which for 10,000
/// addresses would be 40 MB.
#[derive(Clone, Debug)]
struct SharedAddress {
    holders: LiteMap<ServiceName, Holder>,
    ports: LiteMap<Port, ServiceName>,
    /// The distinct sharing terms of its holders, with the number of holders of each; usually one or two.
    terms: LiteMap<Terms, u32>,
    /// How its pool was announced when it was last seen in one.
    route: Option<Arc<PoolRoute>>,
}

impl Default for SharedAddress {
    /// An address that is about to get a holder.
    fn default() -> Self {
        let (holders, ports, terms) = (LiteMap::with_capacity(1), LiteMap::with_capacity(1), LiteMap::with_capacity(1));
        Self { holders, ports, terms, route: None }
    }
}

#[derive(Clone, Debug)]
struct Holder {
    ports: Vec<Port>,
    terms: Terms,
}

impl Holders {
    /// Addresses that a Service holds.
    pub(super) fn of(&self, service: &ServiceName) -> &[IpAddr] {
        self.of.get(service).map(Vec::as_slice).unwrap_or_default()
    }

    /// The address that a Service holds in one family.
    pub(super) fn held_of(&self, service: &ServiceName, family: Family) -> Option<IpAddr> {
        self.of(service).iter().copied().find(|address| Family::of(*address) == family)
    }

    /// Services that hold an address.
    pub(super) fn services(&self) -> impl Iterator<Item = (&ServiceName, &[IpAddr])> {
        self.of.iter().map(|(service, addresses)| (service, addresses.as_slice()))
    }

    /// Held addresses from `first` to `last`, both included.
    pub(super) fn within(&self, first: IpAddr, last: IpAddr) -> impl Iterator<Item = IpAddr> {
        self.addresses_held.range(first..=last).map(|(address, _)| *address)
    }

    /// The Services that hold `address`.
    pub(super) fn sharers(&self, address: IpAddr) -> impl Iterator<Item = &ServiceName> {
        self.addresses_held.get(&address).into_iter().flat_map(|shared| shared.holders.keys())
    }

    /// Whether a Service holds `address`.
    pub(super) fn is_held(&self, address: IpAddr) -> bool {
        self.addresses_held.contains_key(&address)
    }

    /// Addresses shared under `key`.
    pub(super) fn under(&self, key: &str) -> impl Iterator<Item = IpAddr> {
        self.keys.get(key).into_iter().flatten().copied()
    }

    /// Whether the addresses of `claim` are recorded with its current ports and sharing terms.
    pub(super) fn is_recorded_as(&self, claim: &Claim) -> bool {
        let mut holders =
            self.of(&claim.service).iter().filter_map(|address| self.addresses_held.get(address)?.holders.get(&claim.service));
        holders.all(|holder| holder.ports == claim.ports && holder.terms.sharing == claim.sharing)
    }

    /// Why `claim` cannot share `address` with its holders; `None` if it can.
    pub(super) fn refuse(&self, address: IpAddr, claim: &Claim, pool: Option<&PoolSpec>) -> Option<String> {
        let shared = self.addresses_held.get(&address)?;
        let (holder, _) = shared.holders.first()?;
        let terms = claim.terms();
        if let Some(why) = shared.terms.keys().find_map(|other| terms.refuses(other, pool)) {
            return Some(format!("held by {holder} ({why})"));
        }
        let taken = claim.ports.iter().find_map(|port| Some((port, shared.ports.get(port)?)));
        taken.map(|((protocol, port), holder)| format!("held by {holder}, which has {protocol} {port} of it, too"))
    }

    /// Records `claim` as a holder of `address`.
    pub(super) fn add(&mut self, address: IpAddr, claim: &Claim) {
        let service = &claim.service;
        let shared = self.addresses_held.entry(address).or_default();
        shared.ports.extend(claim.ports.iter().map(|port| (*port, service.clone())));
        *shared.terms.entry(claim.terms()).or_default() += 1;
        shared.holders.insert(service.clone(), Holder { ports: claim.ports.clone(), terms: claim.terms() });
        self.of.entry(service.clone()).or_default().push(address);
        if let Some(sharing) = &claim.sharing {
            self.keys.entry(sharing.key.clone()).or_default().insert(address);
        }
        *self.namespaces.entry(service.namespace.clone()).or_default().entry(address).or_default() += 1;
    }

    /// Removes `service` from the holders of `address`.
    pub(super) fn remove(&mut self, address: IpAddr, service: &ServiceName) {
        let Some(shared) = self.addresses_held.get_mut(&address) else { return };
        let Some(holder) = shared.holders.remove(service) else { return };
        for port in &holder.ports {
            shared.ports.remove(port);
        }
        if is_last(shared.terms.get_mut(&holder.terms)) {
            shared.terms.remove(&holder.terms);
        }
        if let Some(Sharing { key, .. }) = holder.terms.sharing
            && !shared.terms.keys().any(|terms| terms.sharing.as_ref().is_some_and(|sharing| sharing.key == key))
        {
            remove_from(&mut self.keys, &key, &address);
        }
        if shared.holders.is_empty() {
            self.addresses_held.remove(&address);
        }
        if let Some(addresses) = self.of.get_mut(service) {
            addresses.retain(|held| *held != address);
            if addresses.is_empty() {
                self.of.remove(service);
            }
        }
        if let Some(addresses) = self.namespaces.get_mut(&service.namespace) {
            if is_last(addresses.get_mut(&address)) {
                addresses.remove(&address);
            }
            if addresses.is_empty() {
                self.namespaces.remove(&service.namespace);
            }
        }
    }

    /// The addresses of `pool` that Services of a namespace hold.
    pub(super) fn held_in(&self, namespace: &str, pool: &PoolSpec) -> impl Iterator<Item = IpAddr> {
        let addresses = self.namespaces.get(namespace);
        let within = move |range: &proto::AddressRange| {
            let held = addresses.map(|addresses| addresses.range(range.first()..=range.last()));
            held.into_iter().flatten().map(|(address, _)| *address)
        };
        pool.ranges.iter().flat_map(within)
    }

    /// Whether any Service of a namespace holds `address`.
    pub(super) fn is_held_in(&self, namespace: &str, address: IpAddr) -> bool {
        self.namespaces.get(namespace).is_some_and(|addresses| addresses.contains_key(&address))
    }

    /// Held addresses outside every pool, each with the route of its former pool, which a previous leader may have sent as
    /// one of `former`. Remembers the route of the current pool of all others.
    pub(super) fn outside(&mut self, pools: &Pools, former: &[Pool]) -> Vec<OutsideAddress> {
        let mut outside = Vec::new();
        for (address, shared) in &mut self.addresses_held {
            match pools.route_of(*address) {
                Some(route) => shared.route = Some(Arc::clone(route)),
                None => {
                    shared.route = shared.route.take().or_else(|| PoolRoute::former(*address, former));
                    outside.push((*address, shared.route.clone()));
                }
            }
        }
        outside
    }
}

/// Takes one of a number of things away. Whether it was the last one, so that the number is to be removed.
fn is_last(count: Option<&mut u32>) -> bool {
    match count {
        Some(count) if *count > 1 => {
            *count -= 1;
            false
        }
        _ => true,
    }
}
