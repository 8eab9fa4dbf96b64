//! Who holds which VIP (CONTROL section 6).
//!
//! Invariants: no two Services hold one (address, protocol, port), and two hold one address only where both share it;
//! what a Service holds it keeps, whatever happens to pools, as long as it asks for nothing else; an address that is
//! freed stays with its last holder's name for ten minutes unless nothing else is free, and from others until every
//! connected gateway has taken it out. Time is an argument.
//! Deliberately not here: writing addresses anywhere, and `externalIPs`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proto::{Announce, Family, Reason, Refusal, ServiceName};

use crate::checkpoint::Reserved;
use crate::externals::Externals;
use crate::note::{Cause, Remark};
use crate::spec::PoolSpec;
use crate::world::Labels;

mod account;
mod adoption;
mod forbidden;
mod freed;
mod holders;
mod placement;
mod pools;
mod reserved;
mod search;
mod sharing;

pub use account::{Figures, PoolUse};
pub use forbidden::Forbidden;
pub use freed::FREED_ADDRESS_KEPT;
pub use pools::{Pools, Standing};
pub use sharing::{Namespaces, Sharing};

use freed::Freed;
use holders::{Holders, Port};
use pools::refuses;
use search::{Search, is_buggy};
use sharing::Terms;

/// Addresses under one sharing key that are looked at for one Service: beyond that it gets one of its own.
const SHARED_LOOKED_AT_MAX: usize = 256;

/// Somebody who waits for gateways to take an address out is looked at again this often, should no report of theirs tell.
const WAITING_LOOKED_AT: Duration = Duration::from_secs(1);

/// What one Service wants.
#[derive(Clone, Debug)]
pub struct Claim {
    /// The Service.
    pub service: ServiceName,
    /// Creation time; none for manifests, whose order is their name.
    pub created_s: Option<i64>,
    /// Families in order. Empty: it cannot be served, but keeps what it holds.
    pub families: Vec<Family>,
    /// Whether it does without its second family.
    pub second_family_optional: bool,
    /// Where it listens.
    pub ports: Vec<Port>,
    /// Whether and with whom it shares its addresses.
    pub sharing: Option<Sharing>,
    /// Addresses it asks for.
    pub requested: Vec<IpAddr>,
    /// Pool it asks for.
    pub pool: Option<String>,
    /// Whether it asks for an address of a pool that is marked internal.
    pub internal: bool,
    /// Whether it wants another address for one that lies elsewhere than it asks for.
    pub readdress: bool,
    /// Its labels.
    pub labels: Labels,
    /// Those of its namespace.
    pub namespace_labels: Labels,
    /// What its status holds.
    pub in_status: Vec<IpAddr>,
    /// Whether that was written by us: then it counts outside the pools, too.
    pub status_is_ours: bool,
    /// Who else wrote its status.
    pub status_writer: Option<String>,
    /// What a leader before us gave it.
    pub recalled: Vec<IpAddr>,
}

impl Claim {
    /// Of a Service that asks for nothing, but keeps what it holds.
    #[must_use]
    pub const fn of_nothing(service: ServiceName) -> Self {
        Self {
            service,
            created_s: None,
            families: Vec::new(),
            second_family_optional: false,
            ports: Vec::new(),
            sharing: None,
            requested: Vec::new(),
            pool: None,
            internal: false,
            readdress: false,
            labels: Labels::new(),
            namespace_labels: Labels::new(),
            in_status: Vec::new(),
            status_is_ours: false,
            status_writer: None,
            recalled: Vec::new(),
        }
    }

    fn terms(&self) -> Terms {
        Terms { namespace: self.service.namespace.clone(), sharing: self.sharing.clone() }
    }

    /// Whether what it asks for could be read.
    const fn is_readable(&self) -> bool {
        !self.families.is_empty()
    }
}

/// What a Service got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// In the order of the families.
    pub addresses: Vec<IpAddr>,
    /// Why it got less than it needs.
    pub refusal: Option<Refusal>,
    /// What its owner should know, although it is served.
    pub notes: Vec<Remark>,
    /// What it got of its `externalIPs`.
    pub externals: Externals,
    /// Its node ports are not listened on: its namespace is not selected for that.
    pub withholds_node_ports: bool,
}

/// What addresses are given by.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// Where they come from.
    pub pools: &'a Pools,
    /// What none of them is.
    pub forbidden: &'a Forbidden,
    /// Counter of the state that all connected gateways forward by; none where none is connected.
    pub reached: Option<u64>,
    /// The time.
    pub now: Instant,
}

/// All holders.
#[derive(Clone, Debug, Default)]
pub struct Allocations {
    holders: Holders,
    freed: Freed,
    /// Somebody waits for a freed address that gateways have not taken out yet: when to look again at the latest.
    waits_until: Option<Instant>,
}

impl Allocations {
    /// Gives every claim what it can have: what it holds, then what its status holds, then what it asks for, then
    /// anything free; the older one first in each round. What no claim names any more is freed.
    pub fn assign(&mut self, claims: &[Claim], rules: Rules<'_>) -> BTreeMap<ServiceName, Outcome> {
        self.freed.expire(rules.now, rules.reached);
        self.waits_until = None;
        self.release_what_nobody_claims(claims, rules.now);
        let mut order: Vec<&Claim> = claims.iter().collect();
        order.sort_by_key(|claim| (claim.created_s, &claim.service));
        let mut outcomes: Vec<Outcome> = vec![Outcome::default(); order.len()];
        self.reseat(&order, &mut outcomes, rules);
        self.adopt_all(&order, &mut outcomes, rules);
        for (claim, outcome) in order.iter().zip(&mut outcomes) {
            self.request(claim, rules, outcome);
        }
        let mut search = Search::new(rules.pools);
        for (claim, outcome) in order.iter().zip(&mut outcomes) {
            self.fill(claim, rules, &mut search, outcome);
        }
        order.iter().map(|claim| claim.service.clone()).zip(outcomes).collect()
    }

    /// Keeps freed addresses that a leader before us kept.
    pub fn recall(&mut self, reserved: &[Reserved], now: Instant) {
        for one in reserved {
            self.freed.put_until(one.address, &one.service, one.until.min(now + FREED_ADDRESS_KEPT));
        }
    }

    /// The freed addresses that are kept, and a number that grows when they change.
    pub fn reserved(&self) -> (u64, impl Iterator<Item = Reserved>) {
        let reserved = |(until, address, service): &(Instant, IpAddr, ServiceName)| Reserved {
            address: *address,
            service: service.clone(),
            until: *until,
        };
        (self.freed.revision(), self.freed.iter().map(reserved))
    }

    /// What was freed so far is not in the state with this counter.
    pub fn published(&mut self, counter: u64) {
        self.freed.published(counter);
    }

    /// When to look again, although nothing changes: a freed address can be given to somebody else then.
    #[must_use]
    pub fn next_expiry(&self, now: Instant) -> Option<Instant> {
        self.freed.next_expiry(now).into_iter().chain(self.waits_until).min()
    }

    /// Whether a freed address waits for nothing but gateways to take it out.
    #[must_use]
    pub fn waits_for_gateways(&self, now: Instant) -> bool {
        self.waits_until.is_some() || self.freed.waits_for_gateways(now)
    }

    /// Held addresses that lie in no pool, and how routers learned of each as long as it did.
    pub fn outside(&mut self, pools: &Pools) -> Vec<(IpAddr, Option<Announce>)> {
        self.holders.outside(pools)
    }

    /// Every pool in figures.
    #[must_use]
    pub fn account(&self, pools: &Pools, forbidden: &Forbidden) -> Vec<PoolUse> {
        account::account(pools, &self.holders, forbidden)
    }

    fn release_what_nobody_claims(&mut self, claims: &[Claim], now: Instant) {
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

    fn free(&mut self, service: &ServiceName, address: IpAddr, now: Instant) {
        self.holders.unseat(address, service);
        self.freed.put(address, service, now);
    }

    fn hold(&mut self, claim: &Claim, address: IpAddr, pools: &Pools) {
        self.freed.remove(address, &claim.service);
        if !self.holders.is_held(address) {
            // Nothing else was free: whoever it was kept for comes too late.
            self.freed.forget(address);
        }
        self.holders.seat(address, claim, pools.holding(address));
    }

    /// Why `claim` cannot have `address` because of others: who holds it, or waits for it. None where it can.
    fn obstacle(&self, claim: &Claim, address: IpAddr, pools: &Pools) -> Option<String> {
        if self.holders.is_held(address) {
            return self.holders.refuse(address, claim, pools.holding(address));
        }
        let by = self.freed.kept_from(address, &claim.service)?;
        Some(format!("was {by}'s until now and is kept for it for 10 minutes, and until every gateway has taken it out"))
    }

    /// Those whose ports or terms have changed sit down again, after those who sat still: nobody is moved by what another
    /// does. Who has no place any more leaves.
    fn reseat(&mut self, order: &[&Claim], outcomes: &mut [Outcome], rules: Rules<'_>) {
        let mut standing = Vec::new();
        for (claim, outcome) in order.iter().zip(outcomes) {
            if claim.is_readable() && !self.holders.is_seated_as(claim) {
                let addresses = self.holders.of(&claim.service).to_vec();
                addresses.iter().for_each(|address| self.holders.unseat(*address, &claim.service));
                standing.push((claim, addresses, outcome));
            }
        }
        for (claim, addresses, outcome) in standing {
            for address in addresses {
                let pool = rules.pools.holding(address);
                match self.holders.refuse(address, claim, pool) {
                    None => self.holders.seat(address, claim, pool),
                    Some(why) => {
                        self.freed.put(address, &claim.service, rules.now);
                        let text =
                            format!("it leaves address {address}, which is {why}; ports and sharing-key must fit together");
                        outcome.notes.push(Remark::new(Cause::AddressLost, text));
                    }
                }
            }
        }
    }

    /// Exchanges what the Service holds for what it asks for by name, where that can be had. Where not, a Service that
    /// already holds an address keeps it and is told.
    fn request(&mut self, claim: &Claim, rules: Rules<'_>, outcome: &mut Outcome) {
        for &address in claim.requested.iter().filter(|_| claim.is_readable()) {
            let held = self.holders.held_of(&claim.service, Family::of(address));
            if held == Some(address) {
                continue;
            }
            match (self.refusal_of_request(claim, address, held, rules), held) {
                (None, held) => {
                    if let Some(old) = held {
                        self.free(&claim.service, old, rules.now);
                    }
                    self.hold(claim, address, rules.pools);
                }
                (Some(refusal), Some(old)) => {
                    let text = format!("{}; it keeps {old}", refusal.message);
                    outcome.notes.push(Remark::new(Cause::AddressKept, text));
                }
                (Some(refusal), None) => outcome.refusal = Some(refusal),
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
        if self.is_over_limit(claim, pool, address, held) {
            return refusal(Reason::Exhausted, limit_text(claim, pool));
        }
        refusal(Reason::Conflict, format!("{}; ask for another one", self.obstacle(claim, address, rules.pools)?))
    }

    /// Whether one more address would be too many for the namespace.
    fn is_over_limit(&self, claim: &Claim, pool: &PoolSpec, address: IpAddr, instead_of: Option<IpAddr>) -> bool {
        let namespace = &claim.service.namespace;
        !self.holders.is_held_in(namespace, address) && self.holders.has_reached_limit(namespace, pool, instead_of)
    }

    /// Whether the namespace of a claim holds as many addresses of a pool as it may.
    fn is_full_for(&self, claim: &Claim, pool: &PoolSpec) -> bool {
        self.holders.has_reached_limit(&claim.service.namespace, pool, None)
    }

    /// Completes what a Service needs from the pools, and says what it holds in the end.
    fn fill(&mut self, claim: &Claim, rules: Rules<'_>, search: &mut Search<'_>, outcome: &mut Outcome) {
        if outcome.refusal.is_none() {
            for (index, &family) in claim.families.iter().enumerate() {
                if self.holders.held_of(&claim.service, family).is_some() {
                    continue;
                }
                match self.take(claim, family, rules, search) {
                    Ok(address) => self.hold(claim, address, rules.pools),
                    Err(_) if index > 0 && claim.second_family_optional => {}
                    Err(refusal) => outcome.refusal = Some(refusal),
                }
            }
        }
        self.place(claim, rules, search, outcome);
        for address in &outcome.addresses {
            if let Some(why) = rules.forbidden.why(*address) {
                let text = format!("address {address} may not work: {why}; ask for another one");
                outcome.notes.push(Remark::new(Cause::Reason(Reason::Conflict), text));
            }
        }
    }

    fn take(&mut self, claim: &Claim, family: Family, rules: Rules<'_>, search: &mut Search<'_>) -> Result<IpAddr, Refusal> {
        let mut admitting = admitting(claim, rules.pools)?;
        let is_usable = |address: &IpAddr| {
            let pool = || rules.pools.holding(*address).filter(|pool| !(pool.avoid_buggy_ips && is_buggy(*address)));
            Family::of(*address) == family
                && pool().is_some_and(|pool| !self.is_over_limit(claim, pool, *address, None))
                && !rules.forbidden.contains(*address)
                && self.obstacle(claim, *address, rules.pools).is_none()
        };
        let is_admitted = |address: &IpAddr| rules.pools.position_of(*address).is_some_and(|at| admitting.contains(&at));
        let mut before = self.freed.before(&claim.service);
        if let Some(address) = before.find(|address| is_admitted(address) && is_usable(address)) {
            return Ok(address);
        }
        if let Some(address) = self.shared(claim, family, rules.pools, is_usable) {
            return Ok(address);
        }
        let is_free = |address: IpAddr| {
            let is_kept = self.freed.kept_from(address, &claim.service).is_some();
            !is_kept && !self.holders.is_held(address) && !rules.forbidden.contains(address)
        };
        let mut limit = None;
        for pool in admitting.iter().filter_map(|at| Some((*at, rules.pools.at(*at)?))) {
            if self.is_full_for(claim, pool.1) {
                limit = Some(limit_text(claim, pool.1));
            } else if let Some(address) = search.next(pool.0, family, is_free) {
                return Ok(address);
            }
        }
        let names: Vec<&str> = admitting.iter().filter_map(|at| Some(rules.pools.at(*at)?.name.as_str())).collect();
        let pools = if names.is_empty() { "there is no pool".to_owned() } else { format!("pool {}", names.join(", ")) };
        admitting.retain(|at| rules.pools.at(*at).is_some_and(|pool| !self.is_full_for(claim, pool)));
        if let Some(address) = self.take_reserved(family, rules, &admitting, search) {
            return Ok(address);
        }
        let mut but = "";
        if self.has_reserved(&admitting, family, rules.pools) {
            self.waits_until = Some(rules.now + WAITING_LOOKED_AT);
            but = " but what is reserved for Services that gave it up, until every connected gateway has taken it out";
        }
        let left = || format!("no {family} address is left ({pools}){but}; add addresses to it or remove Services");
        Err(Refusal { reason: Reason::Exhausted, message: limit.unwrap_or_else(left) })
    }

    /// An address that others hold under the Service's sharing key and that it can have, too.
    fn shared(&self, claim: &Claim, family: Family, pools: &Pools, is_usable: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
        let key = &claim.sharing.as_ref()?.key;
        let admits = |address: &IpAddr| {
            let pool = pools.holding(*address).filter(|pool| claim.pool.as_ref().is_none_or(|named| *named == pool.name));
            pool.is_some_and(|pool| refuses(pool, claim).is_none())
        };
        let shared = self.holders.under(key).filter(|address| Family::of(*address) == family);
        shared.take(SHARED_LOOKED_AT_MAX).find(|address| is_usable(address) && admits(address))
    }
}

/// Positions of the pools that a claim may be given anything of.
fn admitting(claim: &Claim, pools: &Pools) -> Result<Vec<usize>, Refusal> {
    let asked_for = |pool: &PoolSpec| match &claim.pool {
        Some(named) => *named == pool.name,
        // A pool for clients inside is given to nobody who asks neither for that nor for the pool.
        None => pool.auto_assign && (claim.internal || !pool.internal),
    };
    let mut found = Vec::new();
    let mut refusal = None;
    for (at, pool) in pools.iter().enumerate().filter(|(_, pool)| asked_for(pool)) {
        match refuses(pool, claim) {
            None => found.push(at),
            Some(why) => refusal = refusal.or(Some(why)),
        }
    }
    let refused = |message| Err(Refusal { reason: Reason::Refused, message });
    match (&claim.pool, refusal) {
        _ if !found.is_empty() => Ok(found),
        (Some(named), Some(why)) => refused(format!("pool {named} is asked for, but {why}; ask for another one")),
        (Some(named), None) => {
            let clash = pools.standing().iter().find(|standing| standing.name == *named).and_then(|found| found.clash.clone());
            let why = clash.map_or_else(|| "does not exist".to_owned(), |clash| format!("is not used: {clash}"));
            refused(format!("pool {named} is asked for, but {why}; ask for one of {}", pools.names()))
        }
        (None, Some(why)) => refused(format!("no pool gives it an address: {why}")),
        (None, None) => Ok(found),
    }
}

fn limit_text(claim: &Claim, pool: &PoolSpec) -> String {
    let (name, namespace, max) = (&pool.name, &claim.service.namespace, pool.max_per_namespace.unwrap_or_default());
    format!(
        "namespace {namespace} has reached its limit in pool {name} (maxPerNamespace {max}); remove Services or share addresses"
    )
}

#[cfg(test)]
mod property;
#[cfg(test)]
pub(crate) mod tests;
