//! Usage figures of pools: how many addresses each one has, and how many are free.

use std::net::IpAddr;

use proto::{AddressRange, Family};

use super::search::is_buggy;
use super::{Allocations, Rules};
use crate::plan::pools::PoolState;
use objects::PoolSpec;

/// Usage figures of one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolUse {
    /// The pool.
    pub state: PoolState,
    /// Figures of each of its families; empty if the pool is not in use.
    pub families: Vec<(Family, Figures)>,
    /// The disconnected gateways that may still forward freed addresses of it. It is empty where none waits for gateways.
    pub awaited: Vec<String>,
}

/// Usage figures of one family of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// The complete set.
    pub total: u128,
    /// Addresses held by Services.
    pub used: u128,
    /// Available addresses.
    pub available: u128,
    /// Those among them that nobody gets yet, because gateways may still forward them for their former Services.
    pub awaiting: u128,
}

impl PoolUse {
    /// Families of which no Service gets an address now, each with the number of those that wait for gateways.
    pub fn exhausted(&self) -> impl Iterator<Item = (Family, u128)> {
        let all_wait = self.families.iter().filter(|(_, figures)| figures.available == figures.awaiting);
        all_wait.map(|(family, figures)| (*family, figures.awaiting))
    }

    /// Number of freed addresses that wait for gateways.
    #[must_use]
    pub fn awaiting(&self) -> u128 {
        self.families.iter().map(|(_, figures)| figures.awaiting).fold(0, u128::saturating_add)
    }

    /// One figure as text for people. A dual-stack pool shows one per family, because families cannot replace each
    /// other.
    #[must_use]
    pub fn text_of(&self, figure: impl Fn(&Figures) -> u128) -> String {
        match self.families.as_slice() {
            [] => 0.to_string(),
            [(_, figures)] => figure(figures).to_string(),
            several => several.iter().map(|(family, of)| format!("{} {family}", figure(of))).collect::<Vec<_>>().join(", "),
        }
    }
}

impl Allocations {
    /// Usage figures of every pool. While a pool waits for a gateway that is away, or has nothing but addresses that wait,
    /// they are made again when gateways report.
    #[must_use]
    pub fn account(&mut self, rules: Rules<'_>) -> Vec<PoolUse> {
        let uses = self.uses(rules);
        let waits = |one: &PoolUse| one.exhausted().any(|(_, awaiting)| awaiting > 0) || !one.awaited.is_empty();
        if uses.iter().any(waits) {
            self.wait(rules.now);
        }
        uses
    }

    fn uses(&self, rules: Rules<'_>) -> Vec<PoolUse> {
        let pools = rules.pools;
        let of_pool = |pool: &PoolSpec| {
            [Family::V4, Family::V6].into_iter().filter_map(|family| Some((family, self.figures(pool, family, rules)?))).collect()
        };
        let of_state = |state: &PoolState| {
            let used = pools.iter().find(|pool| pool.name == state.name && state.conflict.is_none());
            let one = PoolUse { state: state.clone(), families: used.map(of_pool).unwrap_or_default(), awaited: Vec::new() };
            let awaiting = || {
                let ranges = used.filter(|_| one.awaiting() > 0).into_iter().flat_map(|pool| &pool.ranges);
                let freed = ranges.flat_map(|range| self.freed.forwarded_within(range.first(), range.last(), rules.reached));
                freed.filter(|address| !self.holders.is_held(*address))
            };
            PoolUse { awaited: self.freed.awaited(rules.absent, awaiting), ..one.clone() }
        };
        pools.states().iter().map(of_state).collect()
    }

    /// Figures of one family of a pool in use; `None` if the pool has no range of it.
    fn figures(&self, pool: &PoolSpec, family: Family, rules: Rules<'_>) -> Option<Figures> {
        let forbidden = rules.forbidden;
        let ranges = || pool.ranges.iter().filter(|range| range.family() == family);
        ranges().next()?;
        let held = || ranges().flat_map(|range| self.holders.within(range.first(), range.last()));
        let is_counted = |address: &IpAddr| !(pool.avoid_buggy_ips && is_buggy(*address));
        let never = ranges().flat_map(|range| forbidden.within(range.first(), range.last()));
        let never = never.filter(|address| is_counted(address) && !self.holders.is_held(*address));
        let freed = ranges().flat_map(|range| self.freed.forwarded_within(range.first(), range.last(), rules.reached));
        let is_left = |address: &IpAddr| is_counted(address) && !self.holders.is_held(*address) && !forbidden.contains(*address);
        let awaiting = wide(freed.filter(is_left).count());
        let unavailable = held().filter(is_counted).count() + never.count();
        let total = ranges().map(|range| count(range, pool.avoid_buggy_ips)).fold(0, u128::saturating_add);
        let available = total.saturating_sub(wide(unavailable));
        Some(Figures { total, used: wide(held().count()), available, awaiting: awaiting.min(available) })
    }
}

fn wide(count: usize) -> u128 {
    u128::try_from(count).unwrap_or(u128::MAX)
}

/// Number of addresses in a range, without those that end in .0 or .255 if the pool avoids them.
fn count(range: &AddressRange, avoids_buggy: bool) -> u128 {
    let (IpAddr::V4(first), IpAddr::V4(last), true) = (range.first(), range.last(), avoids_buggy) else { return range.count() };
    debug_assert_eq!(range.family(), Family::V4);
    // From 0.0.0.0 to `n`, both included.
    let buggy = |n: u32| u128::from(n / 256) * 2 + if n % 256 == 255 { 2 } else { 1 };
    let (first, last) = (u32::from(first), u32::from(last));
    let below = first.checked_sub(1).map_or(0, buggy);
    range.count() - (buggy(last) - below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dual_stack_pool_has_figures_per_family_and_is_exhausted_by_one() {
        let figures = |available| Figures { total: 10, used: 10 - available, available, awaiting: 0 };
        let mut pool = PoolUse { families: vec![(Family::V4, figures(0)), (Family::V6, figures(7))], ..PoolUse::default() };
        assert_eq!(pool.text_of(|figures| figures.available), "0 IPv4, 7 IPv6");
        assert_eq!(pool.exhausted().collect::<Vec<_>>(), [(Family::V4, 0)]);
        pool.families.pop();
        assert_eq!(pool.text_of(|figures| figures.total), "10");
    }

    #[test]
    fn avoided_addresses_are_not_counted() {
        let rows = [
            ("192.0.2.0/24", 254),
            ("192.0.2.0-192.0.2.0", 0),
            ("192.0.2.255-192.0.3.0", 0),
            ("192.0.2.1-192.0.2.254", 254),
            ("10.0.0.0/8", 16_777_216 - 131_072),
            ("2001:db8::/120", 256),
        ];
        for (range, expected) in rows {
            assert_eq!(count(&range.parse().unwrap(), true), expected, "{range}");
        }
        assert_eq!(count(&"192.0.2.0/24".parse().unwrap(), false), 256);
    }
}
