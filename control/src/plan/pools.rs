//! The pools in use: those of the configuration, and the `AddressPool` objects that overlap no other pool.
//!
//! Invariant: no address lies in two pools, whichever group of gateways they are for. If two pools overlap, the younger
//! one is not used at all; the configuration counts as older than any object. Only the pools that other groups have in
//! their configurations are unknown here. Pools of other classes, and those that `poolSelector` leaves out, conflict with
//! none of ours (decision 72). Deliberately not here: allocation.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use kube::core::SelectorExt as _;
use proto::limits::LOAD_BALANCER_CLASS;
use proto::{AddressRange, Announce, Family, Pool, PoolBgp};

use crate::config::settings::{ControllerSettings, Source};
use objects::PoolSpec;
use objects::crd::AddressPool;
use objects::pool::range_of;
use objects::text::shortened;

/// Maximum number of pools: with 128 ranges each, 131,072 ranges, which every gateway receives with each change of a
/// pool.
const POOLS_MAX: usize = 1024;
/// Name of the pool that gateways get for allocated addresses outside every pool: deleting a pool withdraws no address.
const OUTSIDE: &str = "outside-pools";
/// Maximum number of pools named in a message.
const NAMED_MAX: usize = 5;

/// All pools of an installation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pools {
    /// Ordered by priority.
    used: Vec<PoolSpec>,
    /// Ranges of the pools in use by their first address, with the index of the pool.
    ranges: BTreeMap<IpAddr, (AddressRange, usize)>,
    /// How each pool in `used` is announced.
    routes: Vec<Arc<PoolRoute>>,
    states: Vec<PoolState>,
    /// Pool objects that are not ours only because they name no class.
    classless: Vec<String>,
    elsewhere: PoolsElsewhere,
}

/// How gateways announce an address of a pool. An address keeps it when its pool is deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolRoute {
    /// The method.
    pub announce: Announce,
    /// How routing daemons announce it, if it is `routed`.
    pub bgp: PoolBgp,
}

impl PoolRoute {
    /// That of an address in one of the pools that a previous leader sent to gateways; `None` if it is unknown.
    pub(super) fn former(address: IpAddr, former: &[Pool]) -> Option<Arc<Self>> {
        let mut holding = former.iter().filter(|pool| pool.ranges.iter().any(|range| range.contains(address)));
        let pool = holding.next()?;
        // An address whose method was unknown to it, too, was sent with both.
        let is_known = holding.all(|other| other.announce == pool.announce);
        is_known.then(|| Arc::new(Self { announce: pool.announce, bgp: pool.bgp.clone() }))
    }
}

/// A held address outside every pool, with the route of its former pool, if that is known.
pub type OutsideAddress = (IpAddr, Option<Arc<PoolRoute>>);

/// One pool, in use or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolState {
    /// Its name.
    pub name: String,
    /// Whether it is an `AddressPool` object rather than part of the configuration.
    pub is_object: bool,
    /// Its addresses as written by the user.
    pub addresses: Vec<String>,
    /// Why it is not in use.
    pub conflict: Option<String>,
}

impl Pools {
    /// The configured pools, which must not overlap, and those of `objects` that name our class or none, are for our group
    /// of gateways, and that the configuration selects by label.
    #[must_use]
    pub fn of(settings: &ControllerSettings, objects: &BTreeMap<String, AddressPool>) -> Self {
        let mut all = Self::default();
        let mut taken = TakenRanges::default();
        let cidrs = settings.cluster_cidrs.iter();
        taken.cidrs = cidrs.filter_map(|net| Some((range_of(net)?, format!("{net} of clusterCIDRs")))).collect();
        for spec in &settings.pools {
            taken.add(spec);
            let addresses = spec.ranges.iter().map(ToString::to_string).collect();
            all.states.push(PoolState { name: spec.name.clone(), addresses, ..PoolState::default() });
        }
        let (mut objects, others): (Vec<&AddressPool>, Vec<&AddressPool>) =
            objects.values().partition(|pool| is_of_our_class(pool, settings));
        let is_classless = |pool: &&&AddressPool| {
            let is_selected = settings.ownership.pools.matches(&pool.metadata.labels.clone().unwrap_or_default());
            pool.spec.load_balancer_class.is_none() && is_selected && settings.is_of_our_group(pool.spec.gateway_group.as_deref())
        };
        all.classless = others.iter().filter(is_classless).filter_map(|pool| pool.metadata.name.clone()).collect();
        let mut elsewhere: Vec<PoolSpec> = others.into_iter().filter_map(|pool| PoolSpec::try_from(pool).ok()).collect();
        objects
            .sort_by_key(|pool| (pool.metadata.creation_timestamp.as_ref().map(|time| time.0.as_second()), &pool.metadata.name));
        let mut by_name = BTreeMap::new();
        for pool in objects {
            if !settings.is_of_our_group(pool.spec.gateway_group.as_deref()) {
                // Of two groups whose pools overlap the younger pool is not used by its own controller either.
                elsewhere.extend(taken.add_if_apart(pool));
                continue;
            }
            let is_full = settings.pools.len() + by_name.len() >= POOLS_MAX;
            let admitted = match PoolSpec::try_from(pool) {
                Err(error) => Err(error.to_string()),
                Ok(_) if is_full => {
                    Err(format!("there are more than {POOLS_MAX} pools, and this is one of the youngest; merge some"))
                }
                Ok(PoolSpec { name, .. }) if settings.pools.iter().any(|configured| configured.name == name) => {
                    Err(format!("the configuration has a pool {name} too, and its pools come first; give this one another name"))
                }
                Ok(spec) => taken.overlap(&spec).map_or(Ok(spec), Err),
            };
            let conflict = admitted.as_ref().err().cloned();
            let (name, addresses) = (pool.metadata.name.clone().unwrap_or_default(), pool.spec.addresses.clone());
            all.states.push(PoolState { name, is_object: true, addresses, conflict });
            if let Ok(spec) = admitted {
                taken.add(&spec);
                by_name.insert(spec.name.clone(), spec);
            }
        }
        all.used = settings.pools.iter().cloned().chain(by_name.into_values()).collect();
        // The sort is stable: pools of equal priority keep their order, configuration first, then objects by name.
        all.used.sort_by_key(|pool| (pool.priority == 0, pool.priority));
        let route = |pool: &PoolSpec| Arc::new(PoolRoute { announce: pool.announce, bgp: pool.bgp.clone() });
        all.routes = all.used.iter().map(route).collect();
        let ranges = all.used.iter().enumerate().flat_map(|(index, pool)| pool.ranges.iter().map(move |range| (*range, index)));
        all.ranges = ranges.map(|(range, index)| (range.first(), (range, index))).collect();
        all.elsewhere = PoolsElsewhere::of(&elsewhere);
        all
    }

    /// The pools in use, ordered by priority.
    pub fn iter(&self) -> impl Iterator<Item = &PoolSpec> {
        self.used.iter()
    }

    /// All pools, in use or not: configured ones, then objects by age.
    #[must_use]
    pub fn states(&self) -> &[PoolState] {
        &self.states
    }

    /// Pool objects that are not ours because they name no class.
    pub(super) fn classless(&self) -> impl Iterator<Item = &String> {
        self.classless.iter()
    }

    /// Index of the pool in use that contains an address.
    #[must_use]
    pub(super) fn index_of(&self, address: IpAddr) -> Option<usize> {
        let (_, (range, index)) = self.ranges.range(..=address).next_back()?;
        range.contains(address).then_some(*index)
    }

    /// The pool in use that contains an address.
    #[must_use]
    pub fn holding(&self, address: IpAddr) -> Option<&PoolSpec> {
        self.used.get(self.index_of(address)?)
    }

    /// How an address in a pool in use is announced.
    #[must_use]
    pub(super) fn route_of(&self, address: IpAddr) -> Option<&Arc<PoolRoute>> {
        self.routes.get(self.index_of(address)?)
    }

    /// Whether a pool in use has any address of `range`.
    fn overlap(&self, range: AddressRange) -> bool {
        let nearest = self.ranges.range(..=range.last()).next_back();
        nearest.is_some_and(|(_, (other, _))| other.overlaps(&range))
    }

    /// Pools as sent to gateways: those in use, and the addresses `outside` every pool with the routes of their former
    /// pools. Where a pool is unknown that disappeared before this controller started, gateways use both methods.
    pub(super) fn for_gateways(&self, outside: &[OutsideAddress]) -> Vec<Pool> {
        let mut kept: Vec<(PoolRoute, BTreeSet<AddressRange>)> = Vec::new();
        for (address, route) in outside {
            let routes = match route {
                Some(route) => vec![PoolRoute::clone(route)],
                None => [Announce::L2, Announce::Routed].map(|announce| PoolRoute { announce, bgp: PoolBgp::default() }).into(),
            };
            for route in routes {
                // The aggregate stays, unless a new pool has a part of it.
                let aggregate = range_of(&route.bgp.announced(*address)).filter(|range| !self.overlap(*range));
                let lone = || Some((AddressRange::new(*address, *address).ok()?, route.bgp.clone().without_aggregation()));
                let Some((range, bgp)) = aggregate.map(|range| (range, route.bgp.clone())).or_else(lone) else { continue };
                let route = PoolRoute { bgp, ..route };
                match kept.iter_mut().find(|(other, _)| *other == route) {
                    Some((_, ranges)) => drop(ranges.insert(range)),
                    None => kept.push((route, [range].into())),
                }
            }
        }
        let kept = kept.into_iter().map(|(route, ranges)| Pool {
            name: OUTSIDE.to_owned(),
            ranges: ranges.into_iter().collect(),
            announce: route.announce,
            bgp: route.bgp,
        });
        self.used.iter().map(Pool::from).chain(kept).collect()
    }

    /// The pool of another class, group or set of labels that contains an address: a VIP of another installation, though
    /// not of ours.
    #[must_use]
    pub fn elsewhere(&self, address: IpAddr) -> Option<&str> {
        self.elsewhere.holding(address)
    }

    /// Whether any pool in use has addresses of a family.
    #[must_use]
    pub(super) fn have(&self, family: Family) -> bool {
        self.ranges.values().any(|(range, _)| range.family() == family)
    }

    /// Whether any pool selects namespaces by label.
    #[must_use]
    pub fn select_namespaces(&self) -> bool {
        self.used.iter().any(|pool| !pool.namespaces.selects_all())
    }

    /// Whether any pool selects Services by label.
    #[must_use]
    pub fn select_services(&self) -> bool {
        self.used.iter().any(|pool| !pool.services.selects_all())
    }

    /// Their names, for a message.
    #[must_use]
    pub(super) fn names(&self) -> String {
        let names: Vec<_> = self.used.iter().map(|pool| format!("pool {} ({})", pool.name, pool.ranges_text())).collect();
        if names.is_empty() { "none, because there is no pool".to_owned() } else { shortened(&names, NAMED_MAX, ", ", " and ") }
    }
}

/// Whether an object names our class or none, and has the labels of our pools.
fn is_of_our_class(pool: &AddressPool, settings: &ControllerSettings) -> bool {
    let labels = pool.metadata.labels.clone().unwrap_or_default();
    let class = pool.spec.load_balancer_class.as_deref();
    let is_of_class = class.map_or_else(|| owns_classless(settings), |class| class == settings.load_balancer_class);
    is_of_class && settings.ownership.pools.matches(&labels)
}

/// Whether pools without class are ours: they belong to the installation of the default class, so that two never give
/// one address to two Services. Manifests have one installation.
fn owns_classless(settings: &ControllerSettings) -> bool {
    settings.load_balancer_class == LOAD_BALANCER_CLASS || matches!(settings.source, Source::Manifests { .. })
}

/// The pool objects of other installations, which may overlap each other: for the first address of each range, the last
/// address of all ranges that begin there or before, and the pool that has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PoolsElsewhere(BTreeMap<IpAddr, (IpAddr, Arc<str>)>);

impl PoolsElsewhere {
    fn of(specs: &[PoolSpec]) -> Self {
        let named = specs.iter().map(|spec| (spec, Arc::<str>::from(spec.name.as_str())));
        let mut ranges: Vec<_> =
            named.flat_map(|(spec, name)| spec.ranges.iter().map(move |range| (range, name.clone()))).collect();
        ranges.sort_by_key(|(range, _)| (range.first(), range.last()));
        let mut all = BTreeMap::new();
        let mut reach: Option<(IpAddr, Arc<str>)> = None;
        for (range, name) in ranges {
            // Every IPv4 address is less than any IPv6 address, so that no range reaches into the other family.
            let reached = reach.filter(|(last, _)| *last >= range.last()).unwrap_or_else(|| (range.last(), name));
            all.insert(range.first(), reached.clone());
            reach = Some(reached);
        }
        Self(all)
    }

    fn holding(&self, address: IpAddr) -> Option<&str> {
        let (_, (last, name)) = self.0.range(..=address).next_back()?;
        (*last >= address).then_some(&**name)
    }
}

/// Ranges that a younger pool must not overlap, each with a description.
#[derive(Default)]
struct TakenRanges {
    /// Of older pools by first address; they do not overlap.
    pools: BTreeMap<IpAddr, (AddressRange, String)>,
    /// Service CIDRs.
    cidrs: Vec<(AddressRange, String)>,
}

impl TakenRanges {
    fn add(&mut self, spec: &PoolSpec) {
        self.pools.extend(spec.ranges.iter().map(|range| (range.first(), (*range, format!("pool {}", spec.name)))));
    }

    /// Adds the pool of another group of gateways, if that group can use it, and returns it.
    fn add_if_apart(&mut self, pool: &AddressPool) -> Option<PoolSpec> {
        let spec = PoolSpec::try_from(pool).ok().filter(|spec| self.overlap(spec).is_none())?;
        self.add(&spec);
        Some(spec)
    }

    fn overlap(&self, spec: &PoolSpec) -> Option<String> {
        spec.ranges.iter().find_map(|range| {
            let nearest = self.pools.range(..=range.last()).next_back().map(|(_, taken)| taken);
            let (other, whose) = nearest.into_iter().chain(&self.cidrs).find(|(other, _)| other.overlaps(range))?;
            Some(format!(
                "{range} of pool {} overlaps {other} of {whose}, which is older; an address belongs to one pool, take {range} or \
                 the overlap out of one of them",
                spec.name
            ))
        })
    }
}
