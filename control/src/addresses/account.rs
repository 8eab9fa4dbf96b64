//! What became of each pool: how many addresses it has, and how many are left.

use std::net::IpAddr;

use proto::{AddressRange, Family};

use super::forbidden::Forbidden;
use super::holders::Holders;
use super::pools::Pools;
use super::search::is_buggy;
use crate::spec::PoolSpec;

/// One pool in figures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolUse {
    /// Its name.
    pub name: String,
    /// Whether it is an `AddressPool` object, and not of the configuration.
    pub is_object: bool,
    /// Its addresses as they were written.
    pub addresses: Vec<String>,
    /// How many it has. All figures of a pool that is not used are 0.
    pub total: u128,
    /// How many Services hold.
    pub used: u128,
    /// How many a Service could have, those included that are kept for who held them last.
    pub available: u128,
    /// Why it is not used.
    pub conflict: Option<String>,
}

impl PoolUse {
    /// Whether it is used and has nothing left.
    #[must_use]
    pub const fn is_exhausted(&self) -> bool {
        self.conflict.is_none() && self.available == 0
    }
}

/// All pools.
pub(super) fn account(pools: &Pools, holders: &Holders, forbidden: &Forbidden) -> Vec<PoolUse> {
    let of = |pool: &PoolSpec| {
        let held = || pool.ranges.iter().flat_map(|range| holders.within(range.first(), range.last()));
        let is_counted = |address: &IpAddr| !(pool.avoid_buggy_ips && is_buggy(*address));
        let never = pool.ranges.iter().flat_map(|range| forbidden.within(range.first(), range.last()));
        let never = never.filter(|address| is_counted(address) && !holders.is_held(*address));
        let gone = held().filter(is_counted).count() + never.count();
        let total = pool.ranges.iter().map(|range| count(range, pool.avoid_buggy_ips)).fold(0, u128::saturating_add);
        (total, wide(held().count()), total.saturating_sub(wide(gone)))
    };
    let figures = |name: &str| pools.iter().find(|pool| pool.name == name).map(of).unwrap_or_default();
    let one = |standing: &super::Standing| {
        let (total, used, available) = if standing.clash.is_none() { figures(&standing.name) } else { (0, 0, 0) };
        PoolUse {
            name: standing.name.clone(),
            is_object: standing.is_object,
            addresses: standing.addresses.clone(),
            total,
            used,
            available,
            conflict: standing.clash.clone(),
        }
    };
    pools.standing().iter().map(one).collect()
}

fn wide(count: usize) -> u128 {
    u128::try_from(count).unwrap_or(u128::MAX)
}

/// How many addresses a range has, those that end in .0 and .255 left out where they are avoided.
fn count(range: &AddressRange, avoids_buggy: bool) -> u128 {
    let (IpAddr::V4(first), IpAddr::V4(last), true) = (range.first(), range.last(), avoids_buggy) else { return range.count() };
    debug_assert_eq!(range.family(), Family::V4);
    // From 0.0.0.0 up to `n`, both included.
    let buggy = |n: u32| u128::from(n / 256) * 2 + if n % 256 == 255 { 2 } else { 1 };
    let (first, last) = (u32::from(first), u32::from(last));
    let below = first.checked_sub(1).map_or(0, buggy);
    range.count() - (buggy(last) - below)
}

#[cfg(test)]
mod tests {
    use super::*;

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
