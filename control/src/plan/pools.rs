//! The pools in use: those of the configuration, and the `AddressPool` objects that overlap no other pool.
//!
//! Invariant: no address lies in two pools. If two pools overlap, the younger one is not used at all; the configuration
//! counts as older than any object. Deliberately not here: allocation.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use proto::AddressRange;

use kube::core::{Selector, SelectorExt as _};
use objects::PoolSpec;
use objects::crd::AddressPool;
use objects::pool::range_of;

/// Maximum number of pools: with 128 ranges each, 131,072 ranges, which every gateway receives with each change of a pool.
const POOLS_MAX: usize = 1024;

/// All pools of an installation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pools {
    /// Ordered by priority.
    used: Vec<PoolSpec>,
    /// Ranges of the pools in use by their first address, with the index of the pool.
    ranges: BTreeMap<IpAddr, (AddressRange, usize)>,
    states: Vec<PoolState>,
}

/// One pool, in use or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolState {
    /// Its name.
    pub name: String,
    /// Whether it is an `AddressPool` object rather than part of the configuration.
    pub is_object: bool,
    /// Its addresses as written by the user.
    pub addresses: Vec<String>,
    /// Why it is not in use.
    pub clash: Option<String>,
}

impl Pools {
    /// The pools of an installation of this class: the configured ones, which must not overlap, and the objects that `selector`
    /// selects.
    #[must_use]
    pub fn of(
        configured: &[PoolSpec],
        objects: &BTreeMap<String, AddressPool>,
        (class, selector): (&str, &Selector),
        cluster_cidrs: &[IpNet],
    ) -> Self {
        let cidrs = cluster_cidrs.iter().filter_map(|net| Some((range_of(net)?, format!("{net} of clusterCIDRs"))));
        let mut taken = Taken { names: BTreeMap::new(), ranges: BTreeMap::new(), foreign: cidrs.collect() };
        let mut all = Self::default();
        for spec in configured {
            taken.take(spec, false);
            let addresses = spec.ranges.iter().map(ToString::to_string).collect();
            all.states.push(PoolState { name: spec.name.clone(), is_object: false, addresses, clash: None });
            all.used.push(spec.clone());
        }
        let ours = |pool: &&AddressPool| {
            let labels = pool.metadata.labels.clone().unwrap_or_default();
            pool.spec.load_balancer_class.as_deref().is_none_or(|named| named == class) && selector.matches(&labels)
        };
        let mut objects: Vec<&AddressPool> = objects.values().filter(ours).collect();
        objects
            .sort_by_key(|pool| (pool.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second()), &pool.metadata.name));
        let mut by_name = BTreeMap::new();
        for pool in objects {
            let admitted = match PoolSpec::try_from(pool) {
                Err(error) => Err(error.to_string()),
                Ok(_) if all.used.len() + by_name.len() >= POOLS_MAX => {
                    Err(format!("there are more than {POOLS_MAX} pools, and this is one of the youngest; merge some"))
                }
                Ok(spec) => taken.clash(&spec).map_or(Ok(spec), Err),
            };
            let clash = admitted.as_ref().err().cloned();
            let (name, addresses) = (pool.metadata.name.clone().unwrap_or_default(), pool.spec.addresses.clone());
            all.states.push(PoolState { name, is_object: true, addresses, clash });
            if let Ok(spec) = admitted {
                taken.take(&spec, true);
                by_name.insert(spec.name.clone(), spec);
            }
        }
        all.used.extend(by_name.into_values());
        // The sort is stable: pools of equal priority keep their order, configuration first, then objects by name.
        all.used.sort_by_key(|pool| (pool.priority == 0, pool.priority));
        all.index();
        all
    }

    fn index(&mut self) {
        let ranges = self.used.iter().enumerate().flat_map(|(index, pool)| pool.ranges.iter().map(move |range| (*range, index)));
        self.ranges = ranges.map(|(range, index)| (range.first(), (range, index))).collect();
    }

    /// The pools in use, ordered by priority.
    pub fn iter(&self) -> impl Iterator<Item = &PoolSpec> {
        self.used.iter()
    }

    /// The pool in use at an index.
    #[must_use]
    pub(super) fn at(&self, index: usize) -> Option<&PoolSpec> {
        self.used.get(index)
    }

    /// All pools, in use or not: configured ones, then objects by age.
    #[must_use]
    pub fn states(&self) -> &[PoolState] {
        &self.states
    }

    /// Index of the pool in use that contains an address.
    #[must_use]
    pub(super) fn position_of(&self, address: IpAddr) -> Option<usize> {
        let (_, (range, index)) = self.ranges.range(..=address).next_back()?;
        range.contains(address).then_some(*index)
    }

    /// The pool in use that contains an address.
    #[must_use]
    pub fn holding(&self, address: IpAddr) -> Option<&PoolSpec> {
        self.at(self.position_of(address)?)
    }

    /// Whether any pool selects namespaces by label.
    #[must_use]
    pub fn select_namespaces(&self) -> bool {
        self.used.iter().any(|pool| !pool.namespaces.selects_all())
    }

    /// Their names, for a message.
    #[must_use]
    pub(super) fn names(&self) -> String {
        let names: Vec<_> = self.used.iter().map(|pool| format!("pool {} ({})", pool.name, pool.ranges_text())).collect();
        if names.is_empty() { "nothing, for there is no pool".to_owned() } else { shortened(&names) }
    }
}

/// Maximum number of items in a message.
fn shortened(items: &[String]) -> String {
    const NAMED_MAX: usize = 5;
    let rest = items.len().saturating_sub(NAMED_MAX);
    let named = items[..items.len() - rest].join(", ");
    if rest == 0 { named } else { format!("{named} and {rest} more") }
}

/// Ranges of earlier pools.
struct Taken {
    /// Name, and whether it is an object.
    names: BTreeMap<String, bool>,
    /// By first address; they do not overlap.
    ranges: BTreeMap<IpAddr, (AddressRange, String)>,
    /// Addresses that no pool may contain, with a description.
    foreign: Vec<(AddressRange, String)>,
}

impl Taken {
    fn take(&mut self, spec: &PoolSpec, is_object: bool) {
        self.names.insert(spec.name.clone(), is_object);
        self.ranges.extend(spec.ranges.iter().map(|range| (range.first(), (*range, format!("pool {}", spec.name)))));
    }

    fn clash(&self, spec: &PoolSpec) -> Option<String> {
        let name = &spec.name;
        if self.names.contains_key(name) {
            return Some(format!(
                "the configuration has a pool {name} too, and its pools come first; give this one another name"
            ));
        }
        spec.ranges.iter().find_map(|range| {
            let nearest = self.ranges.range(..=range.last()).next_back().map(|(_, taken)| taken);
            let mut clashing = nearest.into_iter().chain(&self.foreign).filter(|(other, _)| other.overlaps(range));
            let (other, whose) = clashing.next()?;
            Some(format!(
                "{range} of pool {name} overlaps {other} of {whose}, which is older; an address belongs to one pool, take {range} or the overlap out of one of them"
            ))
        })
    }
}
