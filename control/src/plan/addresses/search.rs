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
    /// Addresses that Services request by name and get once gateways have removed them.
    pub(super) awaited: BTreeSet<IpAddr>,
    /// Addresses that were found and not used.
    returned: BTreeMap<(usize, Family), Vec<IpAddr>>,
}

impl<'a> Search<'a> {
    /// One that leaves out the addresses that Services request by name.
    pub(super) fn beside(awaited: BTreeSet<IpAddr>) -> Self {
        Self { awaited, ..Self::default() }
    }

    /// The next free address of a pool.
    pub(super) fn next(
        &mut self,
        (index, pool): IndexedPool<'a>,
        family: Family,
        is_free: impl Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let is_usable = |address: &IpAddr| {
            let is_left_out = (pool.avoid_buggy_ips && is_buggy(*address)) || self.awaited.contains(address);
            !is_left_out && is_free(*address)
        };
        let returned = self.returned.entry((index, family)).or_default();
        if let Some(place) = returned.iter().position(is_usable) {
            return Some(returned.remove(place));
        }
        let rest = self.rest.entry((index, family)).or_insert_with(|| {
            let ranges = pool.ranges.iter().filter(move |range| range.family() == family);
            Box::new(ranges.flat_map(AddressRange::addresses))
        });
        rest.take(SEARCH_MAX).find(is_usable)
    }

    /// Offers an address to the next Service that looks for one.
    pub(super) fn give_back(&mut self, of: (usize, Family), address: IpAddr) {
        self.without_reserved.remove(&of);
        self.returned.entry(of).or_default().push(address);
    }
}

/// Whether some networks treat it as a network or broadcast address regardless of the prefix.
pub(super) fn is_buggy(address: IpAddr) -> bool {
    matches!(address, IpAddr::V4(v4) if matches!(v4.octets()[3], 0 | 255))
}
