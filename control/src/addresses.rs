//! Who holds which VIP.
//!
//! Invariants: no address has two holders; what a Service holds it keeps, whatever happens to pools, as long as it asks
//! for nothing else; an address that is freed stays with its last holder's name for ten minutes. Time is an argument.
//! Deliberately not here: sharing an address among Services, and writing it anywhere.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proto::{Family, Reason, Refusal, ServiceName};

use crate::externals::Externals;
use crate::note::{Cause, Remark};
use crate::settings::ControllerSettings;
use crate::spec::PoolSpec;

/// How long a freed address waits for its last holder to come back.
pub const FREED_ADDRESS_KEPT: Duration = Duration::from_secs(600);
/// Addresses looked at for one Service before giving up. More than 65,536 Services, as many freed addresses and the
/// reserved ones together can never be in the way; a pool that lies in a huge Service CIDR can.
const SEARCH_MAX: usize = 262_144;

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
    /// Addresses it asks for.
    pub requested: Vec<IpAddr>,
    /// Pool it asks for.
    pub pool: Option<String>,
    /// What its status holds.
    pub in_status: Vec<IpAddr>,
    /// Whether that was written by us: then it counts outside the pools, too.
    pub status_is_ours: bool,
}

/// What a Service got.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// In the order of the families.
    pub addresses: Vec<IpAddr>,
    /// Why it got less than it needs.
    pub refusal: Option<Refusal>,
    /// What its owner should know, although it is served.
    pub note: Option<Remark>,
    /// What it got of its `externalIPs`.
    pub externals: Externals,
    /// Its node ports are not listened on: its namespace is not selected for that.
    pub withholds_node_ports: bool,
}

/// All holders.
#[derive(Clone, Debug, Default)]
pub struct Allocations {
    held: BTreeMap<ServiceName, Vec<IpAddr>>,
    holders: BTreeMap<IpAddr, ServiceName>,
    freed: BTreeMap<IpAddr, Freed>,
}

#[derive(Clone, Debug)]
struct Freed {
    by: ServiceName,
    until: Instant,
}

impl Allocations {
    /// Gives every claim what it can have: what it holds, then what its status holds, then what it asks for, then
    /// anything free; the older one first in each round. What no claim names any more is freed.
    pub fn assign(&mut self, claims: &[Claim], settings: &ControllerSettings, now: Instant) -> BTreeMap<ServiceName, Outcome> {
        self.freed.retain(|_, freed| freed.until > now);
        self.release_what_nobody_claims(claims, now);
        let mut order: Vec<&Claim> = claims.iter().collect();
        order.sort_by_key(|claim| (claim.created_s, &claim.service));
        for claim in &order {
            self.adopt(claim, settings);
        }
        let mut outcomes: BTreeMap<ServiceName, Outcome> = BTreeMap::new();
        for claim in &order {
            outcomes.insert(claim.service.clone(), self.request(claim, settings, now));
        }
        let mut search = Search::new(settings);
        for claim in &order {
            if let Some(outcome) = outcomes.get_mut(&claim.service) {
                self.fill(claim, settings, &mut search, outcome);
            }
        }
        outcomes
    }

    /// When a freed address can next be given to somebody else.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.freed.values().map(|freed| freed.until).min()
    }

    /// Held addresses that lie in no pool.
    #[must_use]
    pub fn outside_pools(&self, settings: &ControllerSettings) -> Vec<IpAddr> {
        self.holders.keys().copied().filter(|address| pool_of(settings, *address).is_none()).collect()
    }

    fn release_what_nobody_claims(&mut self, claims: &[Claim], now: Instant) {
        let claimed: BTreeMap<&ServiceName, &Claim> = claims.iter().map(|claim| (&claim.service, claim)).collect();
        let mut freed = Vec::new();
        for (service, addresses) in &self.held {
            let families = claimed.get(service).map(|claim| &claim.families);
            let keeps = |address: &IpAddr| families.is_some_and(|f| f.is_empty() || f.contains(&Family::of(*address)));
            freed.extend(addresses.iter().filter(|address| !keeps(address)).map(|address| (service.clone(), *address)));
        }
        for (service, address) in freed {
            self.free(&service, address, now);
        }
    }

    fn free(&mut self, service: &ServiceName, address: IpAddr, now: Instant) {
        self.holders.remove(&address);
        if let Some(addresses) = self.held.get_mut(service) {
            addresses.retain(|held| *held != address);
            if addresses.is_empty() {
                self.held.remove(service);
            }
        }
        self.freed.insert(address, Freed { by: service.clone(), until: now + FREED_ADDRESS_KEPT });
    }

    fn hold(&mut self, service: &ServiceName, address: IpAddr) {
        self.freed.remove(&address);
        self.holders.insert(address, service.clone());
        self.held.entry(service.clone()).or_default().push(address);
    }

    fn held_of(&self, service: &ServiceName, family: Family) -> Option<IpAddr> {
        self.held.get(service)?.iter().copied().find(|address| Family::of(*address) == family)
    }

    /// Whether nobody else holds `address` or waits for it.
    fn is_free_for(&self, service: &ServiceName, address: IpAddr) -> bool {
        !self.holders.contains_key(&address) && self.freed.get(&address).is_none_or(|freed| freed.by == *service)
    }

    fn adopt(&mut self, claim: &Claim, settings: &ControllerSettings) {
        for &address in &claim.in_status {
            let family = Family::of(address);
            let wanted = claim.families.is_empty() || claim.families.contains(&family);
            let known = claim.status_is_ours || pool_of(settings, address).is_some();
            let usable = wanted && known && never(settings, address).is_none();
            if usable && self.held_of(&claim.service, family).is_none() && self.is_free_for(&claim.service, address) {
                self.hold(&claim.service, address);
            }
        }
    }

    /// Exchanges what the Service holds for what it asks for by name, where that can be had. Where not, a Service that
    /// already holds an address keeps it and is told.
    fn request(&mut self, claim: &Claim, settings: &ControllerSettings, now: Instant) -> Outcome {
        let mut outcome = Outcome::default();
        for &address in claim.requested.iter().filter(|_| !claim.families.is_empty()) {
            let held = self.held_of(&claim.service, Family::of(address));
            if held == Some(address) {
                continue;
            }
            match (self.refusal_of_request(claim, address, settings), held) {
                (None, held) => {
                    if let Some(old) = held {
                        self.free(&claim.service, old, now);
                    }
                    self.hold(&claim.service, address);
                }
                (Some(refusal), Some(old)) => {
                    let text = format!("{}; it keeps {old}", refusal.message);
                    outcome.note = Some(Remark::new(Cause::AddressKept, text));
                }
                (Some(refusal), None) => outcome.refusal = Some(refusal),
            }
        }
        outcome
    }

    fn refusal_of_request(&self, claim: &Claim, address: IpAddr, settings: &ControllerSettings) -> Option<Refusal> {
        let refusal = |reason, message| Some(Refusal { reason, message });
        if let Some(why) = never(settings, address) {
            return refusal(Reason::Refused, format!("address {address} is asked for, but {why}; ask for another one"));
        }
        let Some(pool) = pool_of(settings, address) else {
            let message = format!("address {address} is asked for, but lies in no pool; ask for one of {}", pools_text(settings));
            return refusal(Reason::OutsidePools, message);
        };
        if let Some(named) = claim.pool.as_deref().filter(|named| *named != pool) {
            let message =
                format!("address {address} is asked for, but lies in pool {pool}, not in {named}; remove one of both requests");
            return refusal(Reason::Refused, message);
        }
        if let Some(holder) = self.holders.get(&address) {
            return refusal(
                Reason::Conflict,
                format!("address {address} is asked for, but held by {holder}; ask for another one"),
            );
        }
        match self.freed.get(&address) {
            Some(freed) if freed.by != claim.service => {
                let message =
                    format!("address {address} is asked for, but was {}'s until now and is kept for it for 10 minutes", freed.by);
                refusal(Reason::Conflict, message)
            }
            _ => None,
        }
    }

    /// Completes what a Service needs from the pools, and says what it holds in the end.
    fn fill(&mut self, claim: &Claim, settings: &ControllerSettings, search: &mut Search, outcome: &mut Outcome) {
        if outcome.refusal.is_none() {
            for (index, &family) in claim.families.iter().enumerate() {
                if self.held_of(&claim.service, family).is_some() {
                    continue;
                }
                match self.take(claim, family, settings, search) {
                    Ok(address) => self.hold(&claim.service, address),
                    Err(_) if index > 0 && claim.second_family_optional => {}
                    Err(refusal) => outcome.refusal = Some(refusal),
                }
            }
        }
        let held = self.held.get(&claim.service).map(Vec::as_slice).unwrap_or_default();
        let rank = |address: &IpAddr| claim.families.iter().position(|family| *family == Family::of(*address));
        outcome.addresses = held.to_vec();
        outcome.addresses.sort_by_key(rank);
        let outside = outcome.addresses.iter().find(|address| pool_of(settings, **address).is_none());
        if let (Some(address), None) = (outside, &outcome.note) {
            let text = format!("address {address} lies in no pool any more; it keeps it");
            outcome.note = Some(Remark::new(Cause::Reason(Reason::OutsidePools), text));
        }
    }

    fn take(&self, claim: &Claim, family: Family, settings: &ControllerSettings, search: &mut Search) -> Result<IpAddr, Refusal> {
        let pools = settings.pools.iter().filter(|pool| claim.pool.as_ref().is_none_or(|named| *named == pool.name));
        let names: Vec<&str> = pools.map(|pool| pool.name.as_str()).collect();
        if let (Some(named), true) = (&claim.pool, names.is_empty()) {
            let message = format!("pool {named} is asked for, but does not exist; ask for one of {}", pools_text(settings));
            return Err(Refusal { reason: Reason::Refused, message });
        }
        let allowed = |address: IpAddr| pool_of(settings, address).is_some_and(|pool| names.contains(&pool));
        let mine = self.freed.iter().filter(|(_, freed)| freed.by == claim.service).map(|(address, _)| *address);
        let usable = |address: &IpAddr| Family::of(*address) == family && never(settings, *address).is_none();
        if let Some(address) = mine.filter(|address| usable(address) && allowed(*address)).min() {
            return Ok(address);
        }
        let is_free = |address: IpAddr| self.is_free_for(&claim.service, address) && never(settings, address).is_none();
        search.next(&names, family, is_free).ok_or_else(|| {
            let pools = if names.is_empty() { "no pool is configured".to_owned() } else { format!("pool {}", names.join(", ")) };
            let message = format!("no {family} address is left ({pools}); add addresses to it or remove Services");
            Refusal { reason: Reason::Exhausted, message }
        })
    }
}

fn pools_text(settings: &ControllerSettings) -> String {
    let pool = |pool: &PoolSpec| {
        let ranges: Vec<String> = pool.ranges.iter().map(ToString::to_string).collect();
        format!("pool {} ({})", pool.name, ranges.join(", "))
    };
    settings.pools.iter().map(pool).collect::<Vec<_>>().join(", ")
}

fn pool_of(settings: &ControllerSettings, address: IpAddr) -> Option<&str> {
    let pool = settings.pools.iter().find(|pool| pool.ranges.iter().any(|range| range.contains(address)));
    pool.map(|pool| pool.name.as_str())
}

/// Why `address` is never a VIP.
fn never(settings: &ControllerSettings, address: IpAddr) -> Option<String> {
    if settings.reserved.contains(&address) {
        return Some("it is an address of the gateway itself".to_owned());
    }
    let net = settings.cluster_cidrs.iter().find(|net| net.contains(&address))?;
    Some(format!("it lies in {net} of clusterCIDRs"))
}

/// Walks each pool's addresses once, however many Services want one: within one assignment nothing becomes free.
struct Search {
    ranges: Vec<RangeWalk>,
}

struct RangeWalk {
    pool: String,
    family: Family,
    rest: Box<dyn Iterator<Item = IpAddr>>,
}

impl Search {
    fn new(settings: &ControllerSettings) -> Self {
        let ranges = settings.pools.iter().flat_map(|pool| pool.ranges.iter().map(move |range| (pool, range)));
        let walk = |(pool, range): (&PoolSpec, &proto::AddressRange)| RangeWalk {
            pool: pool.name.clone(),
            family: range.family(),
            rest: Box::new(range.addresses()),
        };
        Self { ranges: ranges.map(walk).collect() }
    }

    fn next(&mut self, pools: &[&str], family: Family, is_free: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
        let ranges = self.ranges.iter_mut().filter(|range| range.family == family && pools.contains(&range.pool.as_str()));
        for range in ranges {
            if let Some(address) = range.rest.by_ref().take(SEARCH_MAX).find(|address| is_free(*address)) {
                return Some(address);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::tests::settings;

    fn claim(name: &str, created_s: i64) -> Claim {
        Claim {
            service: ServiceName::new("shop", name),
            created_s: Some(created_s),
            families: vec![Family::V4],
            second_family_optional: false,
            requested: Vec::new(),
            pool: None,
            in_status: Vec::new(),
            status_is_ours: false,
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn small() -> ControllerSettings {
        let mut settings = settings();
        settings.pools[0].ranges = vec!["192.0.2.100-192.0.2.102".parse().unwrap()];
        settings
    }

    fn addresses(outcomes: &BTreeMap<ServiceName, Outcome>, name: &str) -> Vec<IpAddr> {
        outcomes[&ServiceName::new("shop", name)].addresses.clone()
    }

    fn reason(outcomes: &BTreeMap<ServiceName, Outcome>, name: &str) -> Option<Reason> {
        outcomes[&ServiceName::new("shop", name)].refusal.as_ref().map(|refusal| refusal.reason)
    }

    #[test]
    fn at_start_what_status_holds_comes_first_then_requests_then_the_rest_by_age() {
        let mut requesting = claim("requesting", 3);
        requesting.requested = vec![ip("192.0.2.101")];
        let mut holding = claim("holding", 9);
        holding.in_status = vec![ip("192.0.2.100")];
        let mut all = Allocations::default();
        let outcomes = all.assign(&[claim("oldest", 1), requesting, holding, claim("young", 5)], &small(), Instant::now());
        assert_eq!(addresses(&outcomes, "holding"), [ip("192.0.2.100")]);
        assert_eq!(addresses(&outcomes, "requesting"), [ip("192.0.2.101")]);
        assert_eq!(addresses(&outcomes, "oldest"), [ip("192.0.2.102")]);
        assert_eq!(reason(&outcomes, "young"), Some(Reason::Exhausted));
    }

    #[test]
    fn of_two_that_claim_one_address_the_older_gets_it_and_the_other_is_told() {
        let mut older = claim("older", 1);
        older.requested = vec![ip("192.0.2.100")];
        let mut younger = claim("younger", 2);
        younger.requested = vec![ip("192.0.2.100")];
        let outcomes = Allocations::default().assign(&[younger, older], &small(), Instant::now());
        assert_eq!(addresses(&outcomes, "older"), [ip("192.0.2.100")]);
        assert_eq!(reason(&outcomes, "younger"), Some(Reason::Conflict));
    }

    #[test]
    fn a_freed_address_waits_ten_minutes_for_the_same_name() {
        let (now, mut all) = (Instant::now(), Allocations::default());
        let first = addresses(&all.assign(&[claim("a", 1)], &small(), now), "a");
        all.assign(&[], &small(), now);
        let outcomes = all.assign(&[claim("b", 2), claim("c", 3), claim("d", 4)], &small(), now + FREED_ADDRESS_KEPT / 2);
        assert_eq!(reason(&outcomes, "d"), Some(Reason::Exhausted));
        let outcomes = all.assign(&[claim("b", 2), claim("c", 3), claim("a", 5)], &small(), now + FREED_ADDRESS_KEPT / 2);
        assert_eq!(addresses(&outcomes, "a"), first);
        all.assign(&[claim("b", 2), claim("c", 3)], &small(), now + FREED_ADDRESS_KEPT);
        let later = now + FREED_ADDRESS_KEPT * 2;
        assert_eq!(addresses(&all.assign(&[claim("b", 2), claim("c", 3), claim("d", 4)], &small(), later), "d"), first);
    }

    #[test]
    fn a_pool_edit_renumbers_nobody_and_says_so() {
        let mut all = Allocations::default();
        all.assign(&[claim("a", 1)], &small(), Instant::now());
        let mut edited = small();
        edited.pools[0].ranges = vec!["198.51.100.0/28".parse().unwrap()];
        let outcomes = all.assign(&[claim("a", 1)], &edited, Instant::now());
        assert_eq!(addresses(&outcomes, "a"), [ip("192.0.2.100")]);
        assert!(outcomes[&ServiceName::new("shop", "a")].note.as_ref().unwrap().cause == Cause::Reason(Reason::OutsidePools));
        assert_eq!(all.outside_pools(&edited), [ip("192.0.2.100")]);
    }

    #[test]
    fn a_status_outside_the_pools_counts_only_if_we_wrote_it() {
        let mut foreign = claim("foreign", 1);
        foreign.in_status = vec![ip("203.0.113.1")];
        let mut ours = claim("ours", 2);
        (ours.in_status, ours.status_is_ours) = (vec![ip("203.0.113.2")], true);
        let outcomes = Allocations::default().assign(&[foreign, ours], &small(), Instant::now());
        assert_eq!(addresses(&outcomes, "foreign"), [ip("192.0.2.100")]);
        assert_eq!(addresses(&outcomes, "ours"), [ip("203.0.113.2")]);
    }

    #[test]
    fn a_request_is_refused_with_its_reason() {
        let mut settings = small();
        settings.reserved = vec![ip("192.0.2.102")];
        let rows = [("203.0.113.1", Reason::OutsidePools), ("192.0.2.102", Reason::Refused)];
        for (address, expected) in rows {
            let mut asking = claim("a", 1);
            asking.requested = vec![ip(address)];
            let outcomes = Allocations::default().assign(&[asking], &settings, Instant::now());
            assert_eq!(reason(&outcomes, "a"), Some(expected), "{address}");
            assert!(addresses(&outcomes, "a").is_empty());
        }
        let mut asking = claim("a", 1);
        asking.pool = Some("nowhere".to_owned());
        assert_eq!(reason(&Allocations::default().assign(&[asking], &settings, Instant::now()), "a"), Some(Reason::Refused));
    }

    #[test]
    fn a_changed_request_moves_the_service_if_it_can_and_else_leaves_it_where_it_is() {
        let mut all = Allocations::default();
        all.assign(&[claim("a", 1), claim("b", 2)], &small(), Instant::now());
        let mut asking = claim("a", 1);
        asking.requested = vec![ip("192.0.2.101")];
        let outcomes = all.assign(&[asking.clone(), claim("b", 2)], &small(), Instant::now());
        assert_eq!(addresses(&outcomes, "a"), [ip("192.0.2.100")]);
        assert_eq!(reason(&outcomes, "a"), None);
        assert!(outcomes[&asking.service].note.as_ref().unwrap().text.contains("shop/b"));
        asking.requested = vec![ip("192.0.2.102")];
        let outcomes = all.assign(&[asking, claim("b", 2)], &small(), Instant::now());
        assert_eq!(addresses(&outcomes, "a"), [ip("192.0.2.102")]);
    }

    #[test]
    fn a_service_of_two_families_needs_both_unless_the_second_is_optional() {
        let mut both = claim("a", 1);
        both.families = vec![Family::V6, Family::V4];
        let outcomes = Allocations::default().assign(&[both.clone()], &small(), Instant::now());
        assert_eq!(reason(&outcomes, "a"), Some(Reason::Exhausted));
        let mut settings = small();
        settings.pools[0].ranges.push("2001:db8::1:0/112".parse().unwrap());
        let outcomes = Allocations::default().assign(&[both.clone()], &settings, Instant::now());
        assert_eq!(addresses(&outcomes, "a"), [ip("2001:db8::1:0"), ip("192.0.2.100")]);
        (both.families, both.second_family_optional) = (vec![Family::V4, Family::V6], true);
        assert_eq!(reason(&Allocations::default().assign(&[both], &small(), Instant::now()), "a"), None);
    }

    #[test]
    fn a_service_that_cannot_be_served_keeps_what_it_holds_and_gets_nothing_new() {
        let mut all = Allocations::default();
        all.assign(&[claim("a", 1)], &small(), Instant::now());
        let unservable = |name| Claim { families: Vec::new(), ..claim(name, 1) };
        let outcomes = all.assign(&[unservable("a"), unservable("b")], &small(), Instant::now());
        assert_eq!(addresses(&outcomes, "a"), [ip("192.0.2.100")]);
        assert!(addresses(&outcomes, "b").is_empty());
    }

    proptest! {
        #[test]
        fn no_two_services_ever_hold_one_address(steps in prop::collection::vec(
            prop::collection::btree_map(0u8..12, (0i64..4, prop::option::of(95u8..110), prop::option::of(95u8..110), any::<bool>()), 0..10), 1..12))
        {
            let (start, settings, mut all) = (Instant::now(), small(), Allocations::default());
            let mut before: BTreeMap<ServiceName, Outcome> = BTreeMap::new();
            for (step, wanted) in steps.iter().enumerate() {
                let claims: Vec<Claim> = wanted.iter().map(|(name, (created, asked, status, ours))| Claim {
                    requested: asked.map(|last| IpAddr::from([192, 0, 2, last])).into_iter().collect(),
                    in_status: status.map(|last| IpAddr::from([192, 0, 2, last])).into_iter().collect(),
                    status_is_ours: *ours,
                    ..claim(&name.to_string(), *created)
                }).collect();
                let outcomes = all.assign(&claims, &settings, start + Duration::from_secs(400) * u32::try_from(step).unwrap());
                let mut holders = BTreeMap::new();
                for (service, outcome) in &outcomes {
                    for address in &outcome.addresses {
                        prop_assert_eq!(holders.insert(*address, service.clone()), None);
                    }
                    // Nobody is moved who did not ask for it.
                    let asks = claims.iter().any(|c| c.service == *service && !c.requested.is_empty());
                    if let (Some(old), false) = (before.get(service), asks) && !old.addresses.is_empty() {
                        prop_assert_eq!(&old.addresses, &outcome.addresses);
                    }
                }
                prop_assert_eq!(&holders, &all.holders);
                before = outcomes;
            }
        }
    }
}
