//! Search for free addresses. It walks each pool once per assignment, however many Services need an address, because
//! nothing becomes free within one assignment.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proto::{AddressRange, Family};

use objects::PoolSpec;

/// Addresses examined for one Service before the search fails. Held and reserved addresses of 65,536 Services in two
/// families, and those of gateways and nodes, are fewer than this.
const SEARCH_MAX: usize = 524_288;

/// A pool in use, and its index.
pub(super) type IndexedPool<'a> = (usize, &'a PoolSpec);

/// The remaining addresses of each pool.
#[derive(Default)]
pub(super) struct Search<'a> {
    rest: BTreeMap<(usize, Family), Box<dyn Iterator<Item = IpAddr> + 'a>>,
    /// Pools without any reserved address that could be allocated. Within one assignment this does not change.
    pub(super) without_reserved: BTreeSet<(usize, Family)>,
}

impl<'a> Search<'a> {
    /// The next free address of a pool.
    pub(super) fn next(
        &mut self,
        (index, pool): IndexedPool<'a>,
        family: Family,
        is_free: impl Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let rest = self.rest.entry((index, family)).or_insert_with(|| {
            let ranges = pool.ranges.iter().filter(move |range| range.family() == family);
            Box::new(ranges.flat_map(AddressRange::addresses))
        });
        rest.take(SEARCH_MAX).find(|address| !(pool.avoid_buggy_ips && is_buggy(*address)) && is_free(*address))
    }
}

/// Whether some networks treat it as a network or broadcast address regardless of the prefix.
pub(super) fn is_buggy(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(v4) if matches!(v4.octets()[3], 0 | 255))
}
