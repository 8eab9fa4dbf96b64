//! Allocation of VIPs to Services (CONTROL section 6).
//!
//! Invariants: no two Services hold the same (address, protocol, port). Two Services hold the same address only if both
//! share it. A Service keeps its addresses, whatever happens to pools, nodes and gateways, until it asks for another
//! one. No other Service gets a freed address before every gateway that may forward it has removed it. For ten minutes
//! automatic choice leaves it to its last holder, unless nothing else is free; a request by name gets it at once. A new
//! Service with `RequireDualStack` holds both families or none (decision 120). Time is an argument. Deliberately not
//! here: writing addresses to objects, and `externalIPs`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proto::{Family, Pool, Reason, Refusal, ServiceName};

use crate::plan::pools::{OutsideAddress, Pools};
use crate::world::checkpoint::Reserved;
use objects::PoolSpec;
use objects::note::{Cause, Remark};

mod account;
mod adoption;
mod claim;
mod freed;
mod holders;
mod search;

pub use account::{Figures, PoolUse};
pub use claim::{AbsentGateway, Allocation, Claim, FamilyAddress, OtherInstallation, Rules, absence};
pub use freed::FREED_ADDRESS_KEPT;

use claim::refuses;
use freed::Freed;
use holders::Holders;
use search::{IndexedPool, Search, is_buggy};

/// Addresses tried under one sharing key for one Service. If none fits, the Service gets an address that it does not
/// share.
const SHARED_TRIED_MAX: usize = 256;

/// Retry interval for a Service that waits until gateways have removed an address, in case no gateway report triggers
/// it.
const WAITING_RETRY: Duration = Duration::from_secs(1);
/// The same after [`LONG_WAIT`]: a gateway is away, and may be for a day.
const LONG_WAIT_RETRY: Duration = Duration::from_secs(60);
const LONG_WAIT: Duration = Duration::from_secs(10);

/// All allocated and reserved addresses.
#[derive(Clone, Debug, Default)]
pub struct Allocations {
    holders: Holders,
    freed: Freed,
    /// When to retry at the latest, because a Service waits for a freed address that gateways have not removed yet.
    waits_until: Option<Instant>,
    /// Since when a Service waits for such an address, if one did in the last assignment.
    waits_since: Option<Instant>,
    /// Whether addresses were assigned before: until then, what a Service no longer claims was never recorded as held.
    has_assigned: bool,
}

impl Allocations {
    /// Allocates addresses to all claims: first those that a claim holds, then those in its status, then those that it
    /// requests, then any free address; in each round the older Service comes first. Addresses without a claim are
    /// freed. A request for an address that gateways may still forward waits, and nobody else gets the address.
    pub fn assign(&mut self, claims: &[Claim], rules: Rules<'_>) -> BTreeMap<ServiceName, Allocation> {
        self.freed.expire(rules.now, rules.reached);
        let waited_since = self.waits_since.filter(|_| self.waits_until.take().is_some());
        self.waits_since = waited_since;
        self.release_unclaimed(claims, rules.now);
        let mut order: Vec<&Claim> = claims.iter().collect();
        order.sort_by_key(|claim| (claim.created_s, &claim.service));
        let mut outcomes: Vec<Allocation> = vec![Allocation::default(); order.len()];
        self.recheck(&order, &mut outcomes, rules);
        self.adopt_all(&order, &mut outcomes, rules);
        self.has_assigned = true;
        self.settle_disputes(&order, &mut outcomes, rules);
        // Automatic choice of the second family takes no address that another Service names.
        let named = order.iter().flat_map(|claim| &claim.requested).copied();
        let mut beside_named = Search::beside(named.collect());
        // An exchange frees an address, which another Service may request.
        let mut is_freed = true;
        while std::mem::take(&mut is_freed) {
            for claim in &order {
                is_freed |= self.grant(claim, rules, &mut beside_named);
            }
        }
        let mut search = Search::default();
        for (claim, outcome) in order.iter().zip(&mut outcomes) {
            self.refuse_requests(claim, rules, &mut search, outcome);
        }
        for (claim, outcome) in order.iter().zip(&mut outcomes) {
            self.fill(claim, rules, &mut search, outcome);
            self.report(claim, rules, &mut search, outcome);
        }
        order.iter().map(|claim| claim.service.clone()).zip(outcomes).collect()
    }

    /// Restores the reservations of a previous leader.
    pub fn recall(&mut self, reserved: &[Reserved], now: Instant) {
        for one in reserved {
            self.freed.put_until(one.address, &one.service, one.until.min(now + FREED_ADDRESS_KEPT));
        }
    }

    /// Reserves addresses at which a previous leader served Services that claim nothing any more: gateways may still
    /// forward them. Later assignments know who held what.
    pub fn free_forgotten<'a>(&mut self, forgotten: impl Iterator<Item = (&'a ServiceName, &'a [IpAddr])>, now: Instant) {
        if !self.has_assigned {
            forgotten
                .for_each(|(service, addresses)| addresses.iter().for_each(|address| self.free_unheld(service, *address, now)));
        }
    }

    /// Reserves an address that a Service has left while there was no leader.
    fn free_unheld(&mut self, service: &ServiceName, address: IpAddr, now: Instant) {
        if !self.has_assigned && !self.freed.before(service).any(|freed| freed == address) {
            self.freed.put(address, service, now);
        }
    }

    /// The reserved addresses, and a revision that grows when they change.
    pub const fn reserved(&self) -> (u64, &BTreeSet<Reserved>) {
        (self.freed.revision, &self.freed.reservations)
    }

    /// Records that the state with this counter contains none of the addresses freed so far.
    pub fn published(&mut self, counter: u64) {
        self.freed.published(counter);
    }

    /// When to allocate again even if nothing changes: a reservation ends then.
    #[must_use]
    pub fn next_expiry(&self, now: Instant) -> Option<Instant> {
        self.freed.next_expiry(now).into_iter().chain(self.waits_until).min()
    }

    /// Whether a reservation has expired and only gateways still have to remove its address.
    #[must_use]
    pub fn waits_for_gateways(&self, now: Instant) -> bool {
        self.waits_until.is_some() || self.freed.waits_for_gateways(now)
    }

    /// Allocated addresses outside every pool, each with the route of its former pool; `former` are the pools that a
    /// previous leader sent to gateways.
    pub fn outside(&mut self, pools: &Pools, former: &[Pool]) -> Vec<OutsideAddress> {
        self.holders.outside(pools, former)
    }

    fn release_unclaimed(&mut self, claims: &[Claim], now: Instant) {
        let claimed: BTreeMap<&ServiceName, &Claim> = claims.iter().map(|claim| (&claim.service, claim)).collect();
        let mut freed = Vec::new();
        for (service, addresses) in self.holders.services() {
            let families = claimed.get(service).map(|claim| &claim.families);
            let keeps = |address: &IpAddr| families.is_some_and(|f| f.is_empty() || f.contains(&Family::of(*address)));
            freed.extend(addresses.iter().filter(|address| !keeps(address)).map(|address| (service.clone(), *address)));
        }
        for (service, address) in freed {
            self.free(&service, address, now);
        }
    }

    /// Schedules another assignment, because a Service waits for an address.
    fn wait(&mut self, now: Instant) {
        let since = *self.waits_since.get_or_insert(now);
        let is_long = now.saturating_duration_since(since) >= LONG_WAIT;
        self.waits_until = Some(now + if is_long { LONG_WAIT_RETRY } else { WAITING_RETRY });
    }

    fn free(&mut self, service: &ServiceName, address: IpAddr, now: Instant) {
        self.holders.remove(address, service);
        self.freed.put(address, service, now);
    }

    fn hold(&mut self, claim: &Claim, address: IpAddr) {
        if !self.holders.is_held(address) {
            // Nothing else was free, so the reservation of the former holder ends.
            self.freed.forget(address);
        }
        self.hold_as_before(claim, address);
    }

    /// Records a holder, and leaves the reservations of others as they are.
    fn hold_as_before(&mut self, claim: &Claim, address: IpAddr) {
        self.freed.remove(address, &claim.service);
        self.holders.add(address, claim);
    }

    /// Why other Services prevent `claim` from getting `address`: they hold it or it is reserved for them. `None` if
    /// nothing does.
    fn obstacle(&self, claim: &Claim, address: IpAddr, rules: Rules<'_>) -> Option<String> {
        if self.holders.is_held(address) {
            return self.holders.refuse(address, claim, rules.pools.holding(address));
        }
        let by = self.freed.reserved_for_other(address, &claim.service, rules.reached)?;
        Some(format!("is reserved for {by}, which freed it, for 10 minutes and until every gateway has removed it"))
    }

    /// Settles the disputes about addresses that a Service of another installation has, too. The younger one leaves the
    /// address, which the other installation does likewise, if it is proven that the other one may have it. Otherwise the
    /// owners of ours are told, and nothing changes: rights on one namespace take no address of another one.
    fn settle_disputes(&mut self, order: &[&Claim], outcomes: &mut [Allocation], rules: Rules<'_>) {
        for (place, other) in order.iter().enumerate().filter(|(_, claim)| claim.of_another.is_some()) {
            for &address in &other.in_status {
                if !self.is_held_beside(&other.service, address) {
                    continue;
                }
                let holds = |claim: &Claim| self.holders.of(&claim.service).contains(&address);
                let is_ours = |claim: &Claim| claim.of_another.is_none() && holds(claim);
                let ours: Vec<usize> = (0..order.len()).filter(|at| is_ours(order[*at])).collect();
                if ours.is_empty() {
                    continue;
                }
                let (is_proven, held_beside) = (!other.is_alleged(), holds(other));
                if !is_proven || ours.iter().any(|at| *at < place) {
                    // No gateway of ours has ever forwarded it for the other one.
                    self.holders.remove(address, &other.service);
                    let text = format!(
                        "address {address} may not work: {} has it in its status, too, and names another installation, of which \
                         no EdgeGateway and AddressPool for it is known; have its owner remove one of both Services",
                        other.service
                    );
                    let remark = Remark::new(Cause::Reason(Reason::Conflict), text);
                    ours.iter().filter(|_| !is_proven).for_each(|at| outcomes[*at].notes.push(remark.clone()));
                    continue;
                }
                for at in ours.into_iter().filter(|_| held_beside) {
                    self.free(&order[at].service, address, rules.now);
                    let text = format!(
                        "it leaves address {address}: {}, which another installation serves, has it too and is older; give \
                         both installations pools that do not overlap",
                        other.service
                    );
                    outcomes[at].notes.push(Remark::new(Cause::AddressLost, text));
                }
            }
        }
    }

    /// Whether another Service than `service` holds `address`.
    pub fn is_held_beside(&self, service: &ServiceName, address: IpAddr) -> bool {
        self.holders.sharers(address).any(|holder| holder != service)
    }

    /// Gives a new Service that needs every family an address in each, requested ones before others. If one is missing,
    /// it holds none, everything is as before, and the result has the family and the reason.
    fn complete<'a>(&mut self, claim: &Claim, rules: Rules<'a>, search: &mut Search<'a>) -> Result<(), (Family, Refusal)> {
        let (revision, mut taken) = (self.freed.revision, Vec::new());
        for &family in &claim.families {
            let requested = claim.requested.iter().copied().find(|address| Family::of(*address) == family);
            let found = match requested {
                Some(address) => self.refusal_of_request(claim, address, None, rules).map_or(Ok(address), Err),
                None => self.take(claim, family, rules, search),
            };
            match found {
                Ok(address) => {
                    taken.push((address, self.freed.reservations_of(address)));
                    self.hold(claim, address);
                }
                Err(refusal) => {
                    for (address, reservations) in taken {
                        self.holders.remove(address, &claim.service);
                        self.freed.restore(address, reservations);
                        if let Some(index) = rules.pools.index_of(address) {
                            search.give_back((index, Family::of(address)), address);
                        }
                    }
                    self.freed.revision = revision;
                    return Err((family, refusal));
                }
            }
        }
        Ok(())
    }

    /// Whether a Service gets all of its families or none.
    fn is_all_or_none(&self, claim: &Claim) -> bool {
        claim.requires_all() && self.holders.of(&claim.service).is_empty()
    }

    /// Re-checks Services whose ports or sharing terms changed, after all unchanged ones, so that a change of one
    /// Service never moves another. A Service that no longer fits beside the other holders loses its address.
    fn recheck(&mut self, order: &[&Claim], outcomes: &mut [Allocation], rules: Rules<'_>) {
        let mut rechecked = Vec::new();
        for (claim, outcome) in order.iter().zip(outcomes) {
            if claim.is_readable() && !self.holders.is_recorded_as(claim) {
                let addresses = self.holders.of(&claim.service).to_vec();
                addresses.iter().for_each(|address| self.holders.remove(*address, &claim.service));
                rechecked.push((claim, addresses, outcome));
            }
        }
        for (claim, addresses, outcome) in rechecked {
            for address in addresses {
                let pool = rules.pools.holding(address);
                match self.holders.refuse(address, claim, pool) {
                    None => self.holders.add(address, claim),
                    Some(why) => {
                        self.freed.put(address, &claim.service, rules.now);
                        let text =
                            format!("it leaves address {address}, which is {why}; ports and sharing-key must be compatible");
                        outcome.notes.push(Remark::new(Cause::AddressLost, text));
                    }
                }
            }
        }
    }

    /// The addresses that a Service requests by name and does not hold, each with the one that it holds instead.
    fn open_requests(&self, claim: &Claim) -> Vec<(IpAddr, Option<IpAddr>)> {
        let requested = claim.requested.iter().filter(|_| claim.is_readable());
        let with_held = requested.map(|address| (*address, self.holders.held_of(&claim.service, Family::of(*address))));
        with_held.filter(|(address, held)| *held != Some(*address)).collect()
    }

    /// Exchanges the addresses of a Service for those that it requests by name, if they are available. Returns whether
    /// it gave one up.
    fn grant<'a>(&mut self, claim: &Claim, rules: Rules<'a>, search: &mut Search<'a>) -> bool {
        if self.is_all_or_none(claim) {
            if claim.unread_request.is_none() && !claim.requested.is_empty() {
                // The reason is found again when nothing more can be granted.
                let _ = self.complete(claim, rules, search);
            }
            return false;
        }
        let mut is_any_freed = false;
        for (address, held) in self.open_requests(claim) {
            if self.refusal_of_request(claim, address, held, rules).is_none() {
                held.into_iter().for_each(|old| self.free(&claim.service, old, rules.now));
                is_any_freed |= held.is_some();
                self.hold(claim, address);
            }
        }
        is_any_freed
    }

    /// Reports requests that are not met. A Service that already holds an address keeps it, and its owner gets a
    /// warning.
    fn refuse_requests(&mut self, claim: &Claim, rules: Rules<'_>, search: &mut Search<'_>, outcome: &mut Allocation) {
        if let Some(why) = &claim.unread_request {
            let lacking = claim.families.iter().filter(|family| self.holders.held_of(&claim.service, **family).is_none());
            let refusal = Refusal { reason: Reason::Refused, message: format!("{why}; no other address is given instead") };
            lacking.for_each(|family| outcome.miss(*family, refusal.clone()));
        }
        for (address, held) in self.open_requests(claim) {
            let Some(refusal) = self.refusal_of_request(claim, address, held, rules) else {
                // It gets the address together with that of the other family.
                search.awaited.insert(address);
                continue;
            };
            if refusal.reason == Reason::AddressReleasing {
                search.awaited.insert(address);
                self.wait(rules.now);
            }
            self.wait_below_limit(claim, rules);
            match held {
                Some(old) => {
                    let text = format!("{}; it keeps {old}", refusal.message);
                    outcome.notes.push(Remark::new(Cause::AddressKept, text));
                }
                None => outcome.miss(Family::of(address), refusal),
            }
        }
    }

    fn refusal_of_request(&self, claim: &Claim, address: IpAddr, held: Option<IpAddr>, rules: Rules<'_>) -> Option<Refusal> {
        let refusal =
            |reason, why: String| Some(Refusal { reason, message: format!("address {address} is asked for, but {why}") });
        if let Some(why) = rules.forbidden.why(address) {
            return refusal(Reason::Refused, format!("{why}; ask for another one"));
        }
        let Some(pool) = rules.pools.holding(address) else {
            return refusal(Reason::OutsidePools, format!("lies in no pool; ask for one of {}", rules.pools.names()));
        };
        let name = &pool.name;
        if let Some(named) = claim.pool.as_ref().filter(|named| *named != name) {
            return refusal(Reason::Refused, format!("lies in pool {name}, not in {named}; remove one of both requests"));
        }
        if let Some(why) = refuses(pool, claim) {
            return refusal(Reason::Refused, format!("{why}; ask for another one"));
        }
        if pool.avoid_buggy_ips && is_buggy(address) {
            return refusal(
                Reason::Refused,
                format!("pool {name} leaves out addresses that end in .0 or .255; ask for another one"),
            );
        }
        if self.is_over_limit(claim, pool, (address, held), rules) {
            return refusal(Reason::Exhausted, self.limit_text(claim, pool, rules));
        }
        if self.holders.is_held(address) {
            let why = self.holders.refuse(address, claim, Some(pool))?;
            return refusal(Reason::Conflict, format!("{why}; ask for another one"));
        }
        let by = self.freed.forwarded_for_other(address, &claim.service, rules.reached)?;
        let why = format!(
            "gateways may still forward it for {by}, which freed it; it is given as soon as all have removed it{}",
            absence(&self.freed.awaited(rules.absent, || std::iter::once(address)))
        );
        refusal(Reason::AddressReleasing, why)
    }

    /// Whether an address, which may be `instead_of` another one, would exceed the quota of the namespace.
    fn is_over_limit(
        &self,
        claim: &Claim,
        pool: &PoolSpec,
        (address, instead_of): (IpAddr, Option<IpAddr>),
        rules: Rules<'_>,
    ) -> bool {
        let namespace = &claim.service.namespace;
        let is_held = self.holders.is_held_in(namespace, address);
        !is_held && self.has_reached_limit(namespace, pool, (Some(address), instead_of), rules.reached)
    }

    /// Whether the namespace of a claim has used up its quota of a pool.
    fn is_full_for(&self, claim: &Claim, pool: &PoolSpec, rules: Rules<'_>) -> bool {
        self.has_reached_limit(&claim.service.namespace, pool, (None, None), rules.reached)
    }

    /// Whether a namespace has used up its quota of a pool, not counting two addresses. Those that it freed count until
    /// gateways have removed them: nobody else could have them.
    fn has_reached_limit(
        &self,
        namespace: &str,
        pool: &PoolSpec,
        (new, except): (Option<IpAddr>, Option<IpAddr>),
        reached: Option<u64>,
    ) -> bool {
        let Some(max) = pool.max_per_namespace else { return false };
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        let held = self.holders.held_in(namespace, pool).filter(|address| Some(*address) != except);
        let free_of = max.saturating_sub(held.take(max).count());
        let is_of_pool = |address: &IpAddr| pool.ranges.iter().any(|range| range.contains(*address));
        let is_counted =
            |address: &IpAddr| Some(*address) != new && is_of_pool(address) && !self.holders.is_held_in(namespace, *address);
        let mut freed: BTreeSet<IpAddr> = BTreeSet::new();
        self.freed.forwarded_of(namespace, reached).filter(is_counted).any(|address| {
            freed.insert(address);
            freed.len() >= free_of
        }) || free_of == 0
    }

    /// Schedules another assignment if the namespace of a claim has freed addresses that count in its quota.
    fn wait_below_limit(&mut self, claim: &Claim, rules: Rules<'_>) {
        if self.freed.forwarded_of(&claim.service.namespace, rules.reached).next().is_some() {
            self.wait(rules.now);
        }
    }

    /// Allocates the missing addresses of a Service from the pools, apart from families in which its request is refused.
    fn fill<'a>(&mut self, claim: &Claim, rules: Rules<'a>, search: &mut Search<'a>, outcome: &mut Allocation) {
        if self.is_all_or_none(claim) {
            if !claim.families.iter().any(|family| outcome.misses(*family))
                && let Err((family, refusal)) = self.complete(claim, rules, search)
            {
                outcome.miss(family, refusal);
            }
            return;
        }
        for &family in &claim.families {
            if self.holders.held_of(&claim.service, family).is_some() || outcome.misses(family) {
                continue;
            }
            match self.take(claim, family, rules, search) {
                Ok(address) => self.hold(claim, address),
                Err(refusal) => outcome.miss(family, refusal),
            }
        }
    }

    /// Reports what a Service holds and lacks in the end, with warnings about addresses that may not work.
    fn report<'a>(&mut self, claim: &Claim, rules: Rules<'a>, search: &mut Search<'a>, outcome: &mut Allocation) {
        self.place(claim, rules, search, outcome);
        for address in outcome.addresses().collect::<Vec<_>>() {
            if let Some(why) = rules.forbidden.why(address) {
                let text = format!("address {address} may not work: {why}; ask for another one");
                outcome.notes.push(Remark::new(Cause::Reason(Reason::Conflict), text));
            }
        }
        let is_partly_held = outcome.addresses().next().is_some();
        for (family, held) in claim.families.iter().zip(&outcome.families).filter(|_| is_partly_held) {
            // Where no pool has the family, `PreferDualStack` means the one that there is.
            let is_expected = |refusal: &Refusal| claim.requires_all() || refusal.reason != Reason::Exhausted;
            if let FamilyAddress::Missing(refusal) = held
                && (is_expected(refusal) || rules.pools.have(*family))
            {
                let text = format!("no {family} address: {}; it is served without one", refusal.message);
                outcome.notes.push(Remark::new(Cause::Reason(refusal.reason), text));
            }
        }
        outcome.is_complete = !claim.requires_all() || outcome.missing().is_none();
    }

    fn take<'a>(&mut self, claim: &Claim, family: Family, rules: Rules<'a>, search: &mut Search<'a>) -> Result<IpAddr, Refusal> {
        let mut admitting = admitting(claim, rules.pools)?;
        let is_usable = |address: &IpAddr| {
            let pool = || rules.pools.holding(*address).filter(|pool| !(pool.avoid_buggy_ips && is_buggy(*address)));
            Family::of(*address) == family
                && pool().is_some_and(|pool| !self.is_over_limit(claim, pool, (*address, None), rules))
                && !rules.forbidden.contains(*address)
                && !search.awaited.contains(address)
                && self.obstacle(claim, *address, rules).is_none()
        };
        let is_admitted = |address: &IpAddr| {
            let holding = rules.pools.index_of(*address);
            admitting.iter().any(|(index, _)| Some(*index) == holding)
        };
        let before = self.freed.before(&claim.service).find(|address| is_admitted(address) && is_usable(address));
        if let Some(address) = before {
            return Ok(address);
        }
        if let Some(address) = self.shared(claim, family, rules.pools, is_usable) {
            return Ok(address);
        }
        let is_free = |address: IpAddr| {
            let is_kept = self.freed.reserved_for_other(address, &claim.service, rules.reached).is_some();
            !is_kept && !self.holders.is_held(address) && !rules.forbidden.contains(address)
        };
        let mut limit = None;
        for &(index, pool) in &admitting {
            if self.is_full_for(claim, pool, rules) {
                limit = Some(self.limit_text(claim, pool, rules));
            } else if let Some(address) = search.next((index, pool), family, is_free) {
                return Ok(address);
            }
        }
        let names: Vec<&str> = admitting.iter().map(|(_, pool)| pool.name.as_str()).collect();
        let pools = if names.is_empty() { "there is no pool".to_owned() } else { format!("pool {}", names.join(", ")) };
        admitting.retain(|(_, pool)| !self.is_full_for(claim, pool, rules));
        if let Some(address) = self.take_reserved(family, rules, &admitting, search) {
            return Ok(address);
        }
        if limit.is_some() {
            self.wait_below_limit(claim, rules);
        }
        let mut but = String::new();
        if self.reserved_in(&admitting, family).next().is_some() {
            let awaited = self.freed.awaited(rules.absent, || self.reserved_in(&admitting, family));
            but = format!(" except those that gateways may still forward for their former Services{}", absence(&awaited));
            self.wait(rules.now);
        }
        let left = || format!("no {family} address is left ({pools}){but}; add addresses to it or remove Services");
        Err(Refusal { reason: Reason::Exhausted, message: limit.unwrap_or_else(left) })
    }

    /// The address that was freed first in these pools. An address that a connected gateway may still forward for
    /// another Service is never returned.
    fn take_reserved(
        &self,
        family: Family,
        rules: Rules<'_>,
        admitting: &[IndexedPool<'_>],
        search: &mut Search<'_>,
    ) -> Option<IpAddr> {
        for &(index, pool) in admitting {
            if search.without_reserved.contains(&(index, family)) {
                continue;
            }
            let is_free = |address: IpAddr| {
                let is_of_pool = Family::of(address) == family && rules.pools.index_of(address) == Some(index);
                let is_left_out = (pool.avoid_buggy_ips && is_buggy(address)) || search.awaited.contains(&address);
                is_of_pool && !is_left_out && !self.holders.is_held(address) && !rules.forbidden.contains(address)
            };
            if let Some(address) = self.freed.oldest(rules.reached, is_free) {
                return Some(address);
            }
            search.without_reserved.insert((index, family));
        }
        None
    }

    /// The reserved addresses of these pools that no Service holds.
    fn reserved_in(&self, admitting: &[IndexedPool<'_>], family: Family) -> impl Iterator<Item = IpAddr> {
        let ranges = admitting.iter().flat_map(|(_, pool)| &pool.ranges).filter(move |range| range.family() == family);
        let kept = ranges.flat_map(|range| self.freed.within(range.first(), range.last()));
        kept.filter(|address| !self.holders.is_held(*address))
    }

    fn limit_text(&self, claim: &Claim, pool: &PoolSpec, rules: Rules<'_>) -> String {
        let (name, namespace, max) = (&pool.name, &claim.service.namespace, pool.max_per_namespace.unwrap_or_default());
        let awaited = self.freed.awaited(rules.absent, || self.freed.forwarded_of(namespace, rules.reached));
        format!(
            "namespace {namespace} has reached its limit in pool {name} (maxPerNamespace {max}); freed addresses count until \
             gateways have removed them{}; remove Services or share addresses",
            absence(&awaited)
        )
    }

    /// Reports the addresses of a Service in family order, and those that lie outside what it requests.
    fn place<'a>(&mut self, claim: &Claim, rules: Rules<'a>, search: &mut Search<'a>, outcome: &mut Allocation) {
        for address in self.holders.of(&claim.service).to_vec() {
            let Some(why) = misplaced(claim, address, rules) else { continue };
            let mut advice = "it keeps it until annotation sluice.dev/readdress is \"true\"".to_owned();
            if claim.readdress && claim.is_readable() {
                match self.take(claim, Family::of(address), rules, search) {
                    Ok(other) => {
                        self.free(&claim.service, address, rules.now);
                        self.hold(claim, other);
                        // Another Service may request it.
                        self.wait(rules.now);
                        continue;
                    }
                    Err(refusal) => advice = format!("it keeps it, because no other is available: {}", refusal.message),
                }
            }
            let text = format!("address {address} {why}; {advice}");
            if claim.internal && rules.pools.holding(address).is_some_and(|pool| !pool.internal) {
                outcome.refusal.get_or_insert(Refusal { reason: Reason::Refused, message: text });
            } else {
                outcome.notes.push(Remark::new(Cause::Reason(Reason::OutsidePools), text));
            }
        }
        outcome.settle(&claim.families, self.holders.of(&claim.service));
    }

    /// An address that other Services hold under the same sharing key and that this Service can share.
    fn shared(&self, claim: &Claim, family: Family, pools: &Pools, is_usable: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
        let key = &claim.sharing.as_ref()?.key;
        let admits = |address: &IpAddr| {
            let pool = pools.holding(*address).filter(|pool| claim.pool.as_ref().is_none_or(|named| *named == pool.name));
            pool.is_some_and(|pool| refuses(pool, claim).is_none())
        };
        let shared = self.holders.under(key).filter(|address| Family::of(*address) == family);
        shared.take(SHARED_TRIED_MAX).find(|address| is_usable(address) && admits(address))
    }
}

/// The pools from which a claim may get an address.
fn admitting<'a>(claim: &Claim, pools: &'a Pools) -> Result<Vec<IndexedPool<'a>>, Refusal> {
    let asked_for = |pool: &PoolSpec| match &claim.pool {
        Some(named) => *named == pool.name,
        // An internal pool serves only Services that request an internal address or the pool by name.
        None => pool.auto_assign && (claim.internal || !pool.internal),
    };
    let mut found = Vec::new();
    let mut refusal = None;
    for (index, pool) in pools.iter().enumerate().filter(|(_, pool)| asked_for(pool)) {
        match refuses(pool, claim) {
            None => found.push((index, pool)),
            Some(why) => refusal = refusal.or(Some(why)),
        }
    }
    let refused = |message| Err(Refusal { reason: Reason::Refused, message });
    match (&claim.pool, refusal) {
        _ if !found.is_empty() => Ok(found),
        (Some(named), Some(why)) => refused(format!("pool {named} is asked for, but {why}; ask for another one")),
        (Some(named), None) => {
            let conflict = pools.states().iter().find(|pool| pool.name == *named).and_then(|found| found.conflict.clone());
            let why = conflict.map_or_else(|| "does not exist".to_owned(), |conflict| format!("is not used: {conflict}"));
            refused(format!("pool {named} is asked for, but {why}; ask for one of {}", pools.names()))
        }
        (None, Some(why)) => refused(format!("no pool gives it an address: {why}")),
        (None, None) => Ok(found),
    }
}

/// Why a Service would not get the address that it holds today. A changed pool selector never moves a Service.
fn misplaced(claim: &Claim, address: IpAddr, rules: Rules<'_>) -> Option<String> {
    let Some(pool) = rules.pools.holding(address) else { return Some("is no longer in any pool".to_owned()) };
    if let Some(named) = claim.pool.as_ref().filter(|named| **named != pool.name) {
        return Some(format!("lies in pool {}, and pool {named} is asked for", pool.name));
    }
    refuses(pool, claim).filter(|_| claim.readdress || claim.internal).map(|why| format!("would not be given to it: {why}"))
}

#[cfg(test)]
mod property;
#[cfg(test)]
pub(crate) mod tests;
