//! Freed addresses that are given before their time, because nothing else is free.

use std::net::IpAddr;

use proto::Family;

use super::pools::Pools;
use super::search::{Search, is_buggy};
use super::{Allocations, Rules};

impl Allocations {
    /// The address that was freed first, of the pools at these positions. One that a connected gateway may still forward for
    /// somebody else is given to nobody.
    pub(super) fn take_reserved(
        &self,
        family: Family,
        rules: Rules<'_>,
        admitting: &[usize],
        search: &mut Search<'_>,
    ) -> Option<IpAddr> {
        for &position in admitting {
            let Some(pool) = rules.pools.at(position).filter(|_| search.may_have_reserved(position, family)) else { continue };
            let is_free = |address: IpAddr| {
                Family::of(address) == family
                    && rules.pools.position_of(address) == Some(position)
                    && !(pool.avoid_buggy_ips && is_buggy(address))
                    && !self.holders.is_held(address)
                    && !rules.forbidden.contains(address)
            };
            match self.freed.oldest(rules.reached, is_free) {
                Some(address) => return Some(address),
                None => search.has_no_reserved(position, family),
            }
        }
        None
    }

    /// Whether any address of the pools at these positions is kept for who gave it up.
    pub(super) fn has_reserved(&self, admitting: &[usize], family: Family, pools: &Pools) -> bool {
        let ranges = admitting.iter().filter_map(|at| pools.at(*at)).flat_map(|pool| &pool.ranges);
        let mut kept =
            ranges.filter(|range| range.family() == family).flat_map(|range| self.freed.within(range.first(), range.last()));
        kept.any(|address| !self.holders.is_held(address))
    }
}
