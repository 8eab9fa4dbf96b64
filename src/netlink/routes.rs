//! Routes by destination and metric, as Linux orders them.
//!
//! Invariant: per destination, the lowest metric counts, and of one metric the next hop that stands first. Only next hops
//! by our interfaces are kept. Deliberately not here: which interface is ours.

use std::collections::BTreeMap;
use std::net::IpAddr;

use dataplane::{PortIndex, Route};
use ipnet::IpNet;

/// Routes followed, at most: today's full IPv4 table (about a million) fits (FORWARDING section 7).
pub(super) const ROUTES_MAX: usize = 1_048_576;

/// One way to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    /// Next hop; none: on-link.
    pub(super) via: Option<IpAddr>,
    /// By which port.
    pub(super) port: PortIndex,
}

/// How a new route stands to those of the same destination and metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It takes their place.
    Only,
    /// Before them.
    First,
    /// After them.
    Last,
}

/// The next hops of one destination and metric. Nearly always one; a `Vec` would cost an allocation for each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hops {
    first: Hop,
    rest: Vec<Hop>,
}

impl Hops {
    fn all(&self) -> impl Iterator<Item = Hop> {
        std::iter::once(self.first).chain(self.rest.iter().copied())
    }

    fn collect(mut hops: impl Iterator<Item = Hop>) -> Option<Self> {
        let first = hops.next()?;
        let mut rest = Vec::new();
        for hop in hops {
            if hop != first && !rest.contains(&hop) {
                rest.push(hop);
            }
        }
        Some(Self { first, rest })
    }
}

/// The routes by our ports.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Routes {
    by_destination: BTreeMap<(IpNet, u32), Hops>,
    excess: u64,
}

impl Routes {
    /// Takes a route in. True if anything changed.
    pub(super) fn insert(&mut self, to: IpNet, metric: u32, hops: &[Hop], place: Place) -> bool {
        let key = (to, metric);
        let old = self.by_destination.get(&key);
        if old.is_none() && !hops.is_empty() && self.by_destination.len() >= ROUTES_MAX {
            self.excess += 1;
            return false;
        }
        let new = {
            let standing = old.into_iter().flat_map(Hops::all);
            match place {
                Place::Only => Hops::collect(hops.iter().copied()),
                Place::First => Hops::collect(hops.iter().copied().chain(standing)),
                Place::Last => Hops::collect(standing.chain(hops.iter().copied())),
            }
        };
        self.put(key, new)
    }

    /// Takes next hops out. True if anything changed.
    pub(super) fn remove(&mut self, to: IpNet, metric: u32, hops: &[Hop]) -> bool {
        let key = (to, metric);
        let Some(old) = self.by_destination.get(&key) else { return false };
        let new = Hops::collect(old.all().filter(|hop| !hops.contains(hop)));
        self.put(key, new)
    }

    fn put(&mut self, key: (IpNet, u32), new: Option<Hops>) -> bool {
        if self.by_destination.get(&key) == new.as_ref() {
            return false;
        }
        match new {
            Some(hops) => self.by_destination.insert(key, hops),
            None => self.by_destination.remove(&key),
        };
        true
    }

    /// The route to each destination.
    pub(super) fn best(&self) -> impl Iterator<Item = Route> {
        let mut last = None;
        self.by_destination.iter().filter_map(move |(&(to, _), hops)| {
            (last.replace(to) != Some(to)).then_some(Route { to, via: hops.first.via, port: hops.first.port })
        })
    }

    /// Whether several next hops stand for this destination and metric.
    pub(super) fn is_multipath(&self, to: IpNet, metric: u32) -> bool {
        self.by_destination.get(&(to, metric)).is_some_and(|hops| !hops.rest.is_empty())
    }

    /// How many did not fit since the tables were read.
    pub(super) fn excess(&self) -> u64 {
        self.excess
    }

    /// A destination with several next hops, of which the first is taken.
    pub(super) fn first_multipath(&self) -> Option<IpNet> {
        self.by_destination.iter().find(|(_, hops)| !hops.rest.is_empty()).map(|(key, _)| key.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hop(n: u8) -> Hop {
        Hop { via: Some(IpAddr::from([10, 0, 0, n])), port: PortIndex(n % 2) }
    }

    fn net(n: u8) -> IpNet {
        IpNet::new(IpAddr::from([198, 51, n, 0]), 24).unwrap()
    }

    #[test]
    fn the_lowest_metric_counts_and_its_removal_uncovers_the_next() {
        let mut routes = Routes::default();
        assert!(routes.insert(net(1), 200, &[hop(2)], Place::First));
        assert!(routes.insert(net(1), 100, &[hop(1)], Place::First));
        assert_eq!(routes.best().map(|r| r.via).collect::<Vec<_>>(), [hop(1).via]);
        assert!(routes.remove(net(1), 100, &[hop(1)]));
        assert_eq!(routes.best().map(|r| r.via).collect::<Vec<_>>(), [hop(2).via]);
    }

    #[test]
    fn of_several_next_hops_the_first_is_taken_and_its_removal_leaves_the_rest() {
        let mut routes = Routes::default();
        routes.insert(net(1), 0, &[hop(1), hop(2)], Place::Only);
        assert_eq!(routes.first_multipath(), Some(net(1)));
        assert_eq!(routes.best().next().unwrap().via, hop(1).via);
        routes.remove(net(1), 0, &[hop(1)]);
        assert_eq!(routes.best().next().unwrap().via, hop(2).via);
        assert_eq!(routes.first_multipath(), None);
    }

    #[test]
    fn appended_routes_stand_behind_and_prepended_ones_before() {
        let mut routes = Routes::default();
        routes.insert(net(1), 0, &[hop(1)], Place::First);
        assert!(routes.insert(net(1), 0, &[hop(2)], Place::Last));
        assert_eq!(routes.best().next().unwrap().via, hop(1).via);
        routes.insert(net(1), 0, &[hop(3)], Place::First);
        assert_eq!(routes.best().next().unwrap().via, hop(3).via);
        assert!(!routes.insert(net(1), 0, &[hop(3)], Place::First), "nothing changes by hearing it twice");
    }

    proptest! {
        #[test]
        fn any_history_gives_what_a_plain_list_of_hops_gives(
            steps in prop::collection::vec((0u8..3, 0u32..2, 0u8..4, 0u8..4), 0..60),
        ) {
            let mut routes = Routes::default();
            let mut naive: Vec<(IpNet, u32, Hop)> = Vec::new();
            for (destination, metric, which, step) in steps {
                let (to, hop) = (net(destination), hop(which));
                let same = |n: &(IpNet, u32, Hop)| n.0 == to && n.1 == metric;
                match step {
                    0 => { routes.remove(to, metric, &[hop]); naive.retain(|n| !(same(n) && n.2 == hop)); }
                    1 => { routes.insert(to, metric, &[hop], Place::Only); naive.retain(|n| !same(n)); naive.push((to, metric, hop)); }
                    2 => { routes.insert(to, metric, &[hop], Place::Last); if !naive.contains(&(to, metric, hop)) { naive.push((to, metric, hop)); } }
                    _ => { routes.insert(to, metric, &[hop], Place::First); naive.retain(|n| *n != (to, metric, hop)); naive.insert(0, (to, metric, hop)); }
                }
            }
            naive.sort_by_key(|n| (n.0, n.1));
            naive.dedup_by_key(|n| n.0);
            let expected: Vec<Route> = naive.iter().map(|n| Route { to: n.0, via: n.2.via, port: n.2.port }).collect();
            prop_assert_eq!(routes.best().collect::<Vec<_>>(), expected);
        }
    }
}
