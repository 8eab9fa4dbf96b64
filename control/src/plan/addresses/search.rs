//! Search for free addresses. It walks each pool once per assignment, however many Services need an address, because
//! nothing becomes free within one assignment.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proto::{AddressRange, Family};

use crate::plan::pools::Pools;

/// Addresses examined for one Service before the search fails. Held and reserved addresses of 65,536 Services in two
/// families, and those of gateways and nodes, are fewer than this.
const SEARCH_MAX: usize = 524_288;

/// Position of the walk in each pool.
pub(super) struct Search<'a> {
    pools: &'a Pools,
    walks: BTreeMap<(usize, Family), Walk<'a>>,
    /// Pools without any reserved address that could be allocated.
    without_reserved: BTreeSet<(usize, Family)>,
}

/// The remaining addresses of a pool.
type Walk<'a> = Box<dyn Iterator<Item = IpAddr> + 'a>;

impl<'a> Search<'a> {
    pub(super) const fn new(pools: &'a Pools) -> Self {
        Self { pools, walks: BTreeMap::new(), without_reserved: BTreeSet::new() }
    }

    /// Whether a pool may have a reserved address that could be allocated.
    pub(super) fn may_have_reserved(&self, position: usize, family: Family) -> bool {
        !self.without_reserved.contains(&(position, family))
    }

    /// Records that a pool has none; within one assignment this does not change.
    pub(super) fn has_no_reserved(&mut self, position: usize, family: Family) {
        self.without_reserved.insert((position, family));
    }

    /// The next free address of a pool.
    pub(super) fn next(&mut self, position: usize, family: Family, is_free: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
        let pool = self.pools.at(position)?;
        let walk = self.walks.entry((position, family)).or_insert_with(|| {
            let ranges = pool.ranges.iter().filter(move |range| range.family() == family);
            Box::new(ranges.flat_map(AddressRange::addresses))
        });
        for _ in 0..SEARCH_MAX {
            let address = walk.next()?;
            if !(pool.avoid_buggy_ips && is_buggy(address)) && is_free(address) {
                return Some(address);
            }
        }
        None
    }
}

/// Whether some networks treat it as a network or broadcast address regardless of the prefix.
pub(super) fn is_buggy(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(v4) if matches!(v4.octets()[3], 0 | 255))
}
