//! Freed addresses: each is reserved for its former holders, and no other Service gets it before every gateway that may
//! forward it has removed it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proto::ServiceName;
use proto::limits::SERVICES_MAX;

use super::AbsentGateway;
use crate::world::checkpoint::Reserved;

/// How long a freed address stays reserved for its last holder.
pub const FREED_ADDRESS_KEPT: Duration = Duration::from_secs(600);
/// Maximum number of reserved addresses: as many as Services can hold in both families. Beyond it, those that expire
/// first are released early.
const FREED_MAX: usize = 2 * SERVICES_MAX;

/// Reservations that expire within this time end together, so that thousands of deletions do not cause as many plans.
const EXPIRY_BATCH: Duration = Duration::from_secs(1);

/// The complete set.
#[derive(Clone, Debug, Default)]
pub(super) struct Freed {
    /// Former holders of each address.
    of: BTreeMap<IpAddr, BTreeMap<ServiceName, Reservation>>,
    /// Former addresses of each Service.
    by: BTreeMap<ServiceName, BTreeSet<IpAddr>>,
    /// Ordered by expiry.
    pub(super) reservations: BTreeSet<Reserved>,
    /// Addresses that the next published state omits for the first time.
    unpublished: Vec<(IpAddr, ServiceName)>,
    /// Grows with every change.
    pub(super) revision: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Reservation {
    until: Instant,
    /// Counter of the first state without it; `None` until that state exists.
    gone_in: Option<u64>,
}

impl Reservation {
    /// Whether every connected gateway has removed the address; `reached` as in [`Freed::expire`].
    fn is_removed(&self, reached: Option<u64>) -> bool {
        reached.is_none_or(|reached| self.gone_in.is_some_and(|counter| counter <= reached))
    }
}

impl Freed {
    /// Reserves `address`, which `service` gave up.
    pub(super) fn put(&mut self, address: IpAddr, service: &ServiceName, now: Instant) {
        self.remove(address, service);
        while self.reservations.len() >= FREED_MAX
            && let Some(first) = self.reservations.first().cloned()
        {
            self.remove(first.address, &first.service);
        }
        self.put_until(address, service, now + FREED_ADDRESS_KEPT);
    }

    /// Reserves `address` with the given expiry, as a previous leader did.
    pub(super) fn put_until(&mut self, address: IpAddr, service: &ServiceName, until: Instant) {
        self.revision += 1;
        self.of.entry(address).or_default().insert(service.clone(), Reservation { until, gone_in: None });
        self.by.entry(service.clone()).or_default().insert(address);
        self.reservations.insert(Reserved { until, address, service: service.clone() });
        self.unpublished.push((address, service.clone()));
    }

    /// Ends a reservation: `service` holds `address` again, or the reservation expired.
    pub(super) fn remove(&mut self, address: IpAddr, service: &ServiceName) {
        let Some(holders) = self.of.get_mut(&address) else { return };
        let Some(kept) = holders.remove(service) else { return };
        self.revision += 1;
        if holders.is_empty() {
            self.of.remove(&address);
        }
        remove_from(&mut self.by, service, &address);
        self.reservations.remove(&Reserved { until: kept.until, address, service: service.clone() });
    }

    /// Ends reservations that have expired and whose addresses every connected gateway has removed. `reached` is the
    /// counter of the state that all of them have applied; `None` if no gateway is connected.
    pub(super) fn expire(&mut self, now: Instant, reached: Option<u64>) {
        let is_removed = |one: &&Reserved| {
            self.of.get(&one.address).and_then(|holders| holders.get(&one.service)).is_some_and(|kept| kept.is_removed(reached))
        };
        let expired = self.reservations.iter().take_while(|one| one.until <= now);
        for one in expired.filter(is_removed).cloned().collect::<Vec<_>>() {
            self.remove(one.address, &one.service);
        }
    }

    /// Records that the state with this counter contains none of the addresses given up so far.
    pub(super) fn published(&mut self, counter: u64) {
        for (address, service) in std::mem::take(&mut self.unpublished) {
            if let Some(kept) = self.of.get_mut(&address).and_then(|holders| holders.get_mut(&service)) {
                kept.gone_in.get_or_insert(counter);
            }
        }
    }

    /// When the next reservations end. Also of those that have expired, but not for so long yet: a plan that is made meanwhile
    /// need not end them.
    pub(super) fn next_expiry(&self, now: Instant) -> Option<Instant> {
        self.reservations.iter().map(|one| one.until + EXPIRY_BATCH).find(|end| *end > now)
    }

    /// Whether any reservation has expired and waits only for gateways.
    pub(super) fn waits_for_gateways(&self, now: Instant) -> bool {
        self.reservations.first().is_some_and(|one| one.until <= now)
    }

    /// All reservations of `address`, to restore them if another Service does not get it after all.
    pub(super) fn reservations_of(&self, address: IpAddr) -> BTreeMap<ServiceName, Reservation> {
        self.of.get(&address).cloned().unwrap_or_default()
    }

    /// Restores reservations that ended since [`Self::reservations_of`].
    pub(super) fn restore(&mut self, address: IpAddr, reservations: BTreeMap<ServiceName, Reservation>) {
        for (service, kept) in reservations {
            self.by.entry(service.clone()).or_default().insert(address);
            self.reservations.insert(Reserved { until: kept.until, address, service: service.clone() });
            self.of.entry(address).or_default().insert(service, kept);
        }
    }

    /// Former addresses of the Services of a namespace that a gateway may still forward; an address may occur twice.
    pub(super) fn forwarded_of(&self, namespace: &str, reached: Option<u64>) -> impl Iterator<Item = IpAddr> {
        let first = ServiceName::new(namespace, "");
        let of_namespace = self.by.range(first.clone()..).take_while(move |(name, _)| name.namespace == first.namespace);
        let of_namespace = of_namespace.filter(move |_| reached.is_some());
        of_namespace.flat_map(move |(name, addresses)| {
            let is_forwarded = move |address: &&IpAddr| {
                let kept = self.of.get(*address).and_then(|holders| holders.get(name));
                kept.is_some_and(|kept| !kept.is_removed(reached))
            };
            addresses.iter().filter(is_forwarded).copied()
        })
    }

    /// Drops all reservations of `address`.
    pub(super) fn forget(&mut self, address: IpAddr) {
        let names: Vec<ServiceName> = self.of.get(&address).into_iter().flatten().map(|(name, _)| name.clone()).collect();
        names.iter().for_each(|name| self.remove(address, name));
    }

    /// The address freed first among those that are `wanted` and that every connected gateway has removed.
    pub(super) fn oldest(&self, reached: Option<u64>, wanted: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
        let is_removed = |address| self.of.get(&address).is_some_and(|of| of.values().all(|kept| kept.is_removed(reached)));
        self.reservations.iter().map(|one| one.address).find(|address| wanted(*address) && is_removed(*address))
    }

    /// The Service for which `address` is reserved, unless `service` may have it again; `reached` as in [`Freed::expire`].
    pub(super) fn reserved_for_other(
        &self,
        address: IpAddr,
        service: &ServiceName,
        reached: Option<u64>,
    ) -> Option<&ServiceName> {
        let holders = self.of.get(&address)?;
        if holders.contains_key(service) { forwarded_beside(holders, service, reached) } else { holders.keys().next() }
    }

    /// A former holder of `address`, other than `service`, for which a gateway may still forward it; `reached` as in
    /// [`Freed::expire`].
    pub(super) fn forwarded_for_other(
        &self,
        address: IpAddr,
        service: &ServiceName,
        reached: Option<u64>,
    ) -> Option<&ServiceName> {
        forwarded_beside(self.of.get(&address)?, service, reached)
    }

    /// Former addresses of `service`, lowest first.
    pub(super) fn before(&self, service: &ServiceName) -> impl Iterator<Item = IpAddr> {
        self.by.get(service).into_iter().flatten().copied()
    }

    /// Reserved addresses from `first` to `last`, both included, that a gateway may still forward; `reached` as in
    /// [`Freed::expire`].
    pub(super) fn forwarded_within(&self, first: IpAddr, last: IpAddr, reached: Option<u64>) -> impl Iterator<Item = IpAddr> {
        let range = reached.is_some().then(|| self.of.range(first..=last)).into_iter().flatten();
        let of_gateways = range.filter(move |(_, holders)| holders.values().any(|kept| !kept.is_removed(reached)));
        of_gateways.map(|(address, _)| *address)
    }

    /// The names of those gateways that may still forward one of these addresses for a former holder.
    pub(super) fn awaited<I: Iterator<Item = IpAddr>>(&self, absent: &[AbsentGateway], addresses: impl Fn() -> I) -> Vec<String> {
        let may_forward = |gateway: &&AbsentGateway| {
            let mut holders = addresses().filter_map(|address| self.of.get(&address)).flat_map(BTreeMap::values);
            holders.any(|kept| !kept.is_removed(Some(gateway.acknowledged)))
        };
        absent.iter().filter(may_forward).map(|gateway| gateway.name.clone()).collect()
    }

    /// Reserved addresses from `first` to `last`, both included.
    pub(super) fn within(&self, first: IpAddr, last: IpAddr) -> impl Iterator<Item = IpAddr> {
        self.of.range(first..=last).map(|(address, _)| *address)
    }
}

/// A holder other than `service` for which a gateway may still forward an address. `None`, too, if one may forward it for
/// both: they shared it, and `service` returns to what it had.
fn forwarded_beside<'a>(
    holders: &'a BTreeMap<ServiceName, Reservation>,
    service: &ServiceName,
    reached: Option<u64>,
) -> Option<&'a ServiceName> {
    if holders.get(service).is_some_and(|own| !own.is_removed(reached)) {
        return None;
    }
    holders.iter().find(|(name, kept)| *name != service && !kept.is_removed(reached)).map(|(name, _)| name)
}

/// Removes a value of a key, and the key with its last value.
pub(super) fn remove_from<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: &K, value: &V) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(value);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}
