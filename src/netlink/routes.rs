//! Routes by destination and metric, in Linux's order.
//!
//! Invariant: for each destination the lowest metric is used, and of one metric the first route, with all its next
//! hops. Only next hops by our links are kept. Not here: which interface is a link.

use std::collections::BTreeMap;
use std::net::IpAddr;

use dataplane::{Link, Route};
use ipnet::IpNet;
use smallvec::SmallVec;

/// Maximum number of followed routes: today's full IPv4 table has about a million (FORWARDING section 7).
pub(super) const ROUTES_MAX: usize = 1_048_576;

/// One next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextHop {
    /// Address of the next hop; none: on-link.
    pub(super) via: Option<IpAddr>,
    /// Link to it.
    pub(super) link: Link,
    /// Its share, 1 to 256.
    pub(super) weight: u16,
}

impl NextHop {
    /// Whether the other has the same address and link, with any weight.
    fn is_same(&self, other: &Self) -> bool {
        (self.via, self.link) == (other.via, other.link)
    }
}

/// The next hops of one route without duplicates; empty for a blackhole, unreachable or prohibited destination. Nearly
/// every route has one, which needs no allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NextHops(SmallVec<[NextHop; 1]>);

impl NextHops {
    /// No next hop: the destination is unreachable.
    pub(super) fn none() -> Self {
        Self(SmallVec::new())
    }

    /// These next hops without duplicates. None if there are none.
    pub(super) fn new(hops: impl IntoIterator<Item = NextHop>) -> Option<Self> {
        let mut unique = SmallVec::<[NextHop; 1]>::new();
        for hop in hops {
            if !unique.iter().any(|other| other.is_same(&hop)) {
                unique.push(hop);
            }
        }
        (!unique.is_empty()).then_some(Self(unique))
    }

    /// The next hops that are not among `other`. None if nothing remains.
    fn without(&self, other: &Self) -> Option<Self> {
        if self == other {
            return None;
        }
        if self.0.is_empty() {
            return Some(self.clone());
        }
        Self::new(self.0.iter().copied().filter(|hop| !other.0.iter().any(|gone| gone.is_same(hop))))
    }
}

/// Position of a new route among those of the same destination and metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InsertPosition {
    /// It replaces them.
    Replace,
    /// Before them.
    First,
    /// After them.
    Last,
}

/// The routes of one destination and metric in their order, without duplicates. Linux uses the first.
type Alternatives = SmallVec<[NextHops; 1]>;

/// The routes by our links.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Routes {
    by_destination: BTreeMap<(IpNet, u32), Alternatives>,
    excess: u64,
}

impl Routes {
    /// Inserts a route; `route` is none if it has no next hop by our links. True if anything changed.
    pub(super) fn insert(&mut self, to: IpNet, metric: u32, route: Option<NextHops>, position: InsertPosition) -> bool {
        let key = (to, metric);
        let old = self.by_destination.get(&key);
        if old.is_none() && route.is_some() && self.by_destination.len() >= ROUTES_MAX {
            self.excess += 1;
            return false;
        }
        let mut new = old.cloned().unwrap_or_default();
        match (position, route) {
            (InsertPosition::Replace, route) => new = route.into_iter().collect(),
            (InsertPosition::First, Some(route)) => {
                new.retain(|other| *other != route);
                new.insert(0, route);
            }
            (InsertPosition::Last, Some(route)) if !new.contains(&route) => new.push(route),
            _ => {}
        }
        self.set(key, new)
    }

    /// Removes a route, or only these next hops of it if no route has exactly them. True if anything changed.
    pub(super) fn remove(&mut self, to: IpNet, metric: u32, route: Option<&NextHops>) -> bool {
        let (key, Some(route)) = ((to, metric), route) else { return false };
        let Some(old) = self.by_destination.get(&key) else { return false };
        let mut new = old.clone();
        new.retain(|other| other != route);
        if new.len() == old.len() {
            // Parts of different routes may become equal.
            new.clear();
            for rest in old.iter().filter_map(|other| other.without(route)) {
                if !new.contains(&rest) {
                    new.push(rest);
                }
            }
        }
        self.set(key, new)
    }

    fn set(&mut self, key: (IpNet, u32), new: Alternatives) -> bool {
        if self.by_destination.get(&key).map_or(&[][..], |old| old) == new.as_slice() {
            return false;
        }
        if new.is_empty() {
            self.by_destination.remove(&key);
        } else {
            self.by_destination.insert(key, new);
        }
        true
    }

    /// The route in use to each destination.
    fn best(&self) -> impl Iterator<Item = (IpNet, &NextHops)> {
        let mut last = None;
        self.by_destination.iter().filter_map(move |(&(to, _), routes)| {
            routes.first().filter(|_| last.replace(to) != Some(to)).map(|first| (to, first))
        })
    }

    /// The routes in use, one for each next hop.
    pub(super) fn used(&self) -> impl Iterator<Item = Route> {
        self.best()
            .flat_map(|(to, hops)| hops.0.iter().map(move |&NextHop { via, link, weight }| Route { to, via, link, weight }))
    }

    /// The unreachable destinations.
    pub(super) fn unreachable(&self) -> impl Iterator<Item = IpNet> {
        self.best().filter(|(_, hops)| hops.0.is_empty()).map(|(to, _)| to)
    }

    /// Whether there are several routes with this destination and metric.
    pub(super) fn are_several(&self, to: IpNet, metric: u32) -> bool {
        self.by_destination.get(&(to, metric)).is_some_and(|routes| routes.len() > 1)
    }

    /// Number of routes beyond [`ROUTES_MAX`] since the tables were read.
    pub(super) fn excess(&self) -> u64 {
        self.excess
    }
}

#[cfg(test)]
mod tests {
    use dataplane::PortIndex;
    use proptest::prelude::*;

    use super::*;

    fn hop(n: u8) -> NextHop {
        NextHop { via: Some(IpAddr::from([10, 0, 0, n])), link: PortIndex(n % 2).into(), weight: 1 }
    }

    fn by(hops: &[u8]) -> Option<NextHops> {
        NextHops::new(hops.iter().map(|n| hop(*n)))
    }

    fn net(n: u8) -> IpNet {
        IpNet::new(IpAddr::from([198, 51, n, 0]), 24).unwrap()
    }

    /// Last bytes of the next hops in use.
    fn used(routes: &Routes) -> Vec<u8> {
        routes.used().map(|route| if let Some(IpAddr::V4(via)) = route.via { via.octets()[3] } else { 0 }).collect()
    }

    #[test]
    fn the_lowest_metric_counts_and_its_removal_uncovers_the_next() {
        let mut routes = Routes::default();
        assert!(routes.insert(net(1), 200, by(&[2]), InsertPosition::First));
        assert!(routes.insert(net(1), 100, by(&[1]), InsertPosition::First));
        assert_eq!(used(&routes), [1]);
        assert!(routes.remove(net(1), 100, by(&[1]).as_ref()));
        assert_eq!(used(&routes), [2]);
    }

    #[test]
    fn all_next_hops_of_a_route_are_used_and_the_removal_of_one_leaves_the_rest() {
        let mut routes = Routes::default();
        routes.insert(net(1), 0, by(&[1, 2, 1]), InsertPosition::Replace);
        assert_eq!(used(&routes), [1, 2]);
        routes.remove(net(1), 0, by(&[1]).as_ref());
        assert_eq!(used(&routes), [2]);
        routes.remove(net(1), 0, by(&[2]).as_ref());
        assert!(used(&routes).is_empty());
    }

    #[test]
    fn of_several_routes_the_first_is_used_alone() {
        let mut routes = Routes::default();
        routes.insert(net(1), 0, by(&[1]), InsertPosition::First);
        assert!(routes.insert(net(1), 0, by(&[2, 4]), InsertPosition::Last));
        assert_eq!(used(&routes), [1]);
        routes.insert(net(1), 0, by(&[3]), InsertPosition::First);
        assert_eq!(used(&routes), [3]);
        assert!(!routes.insert(net(1), 0, by(&[3]), InsertPosition::First), "a repeated message changes nothing");
        routes.remove(net(1), 0, by(&[3]).as_ref());
        routes.remove(net(1), 0, by(&[1]).as_ref());
        assert_eq!(used(&routes), [2, 4]);
    }

    #[test]
    fn a_blackhole_is_an_unreachable_destination_and_ordered_by_metric_like_any_route() {
        let mut routes = Routes::default();
        routes.insert(net(1), 100, by(&[1]), InsertPosition::First);
        routes.insert(net(1), 50, Some(NextHops::none()), InsertPosition::First);
        assert_eq!((used(&routes), routes.unreachable().collect::<Vec<_>>()), (vec![], vec![net(1)]));
        routes.remove(net(1), 50, Some(&NextHops::none()));
        assert_eq!((used(&routes), routes.unreachable().count()), (vec![1], 0));
    }

    #[test]
    fn routes_beyond_the_bound_are_counted() {
        let mut routes = Routes::default();
        let host = |n: usize| IpNet::from(IpAddr::from(u32::try_from(n).unwrap().to_be_bytes()));
        for n in 0..=ROUTES_MAX {
            routes.insert(host(n), 0, by(&[1]), InsertPosition::First);
        }
        assert_eq!((routes.used().count(), routes.excess()), (ROUTES_MAX, 1));
        assert!(routes.insert(host(0), 0, by(&[2]), InsertPosition::First), "a known destination still changes");
    }

    proptest! {
        #[test]
        fn any_history_gives_what_a_plain_list_of_routes_gives(
            steps in prop::collection::vec((0u8..3, 0u32..2, 0u8..4, 0u8..4), 0..60),
        ) {
            let mut routes = Routes::default();
            let mut naive: Vec<(IpNet, u32, u8)> = Vec::new();
            for (destination, metric, which, step) in steps {
                let to = net(destination);
                let path = || by(&[which]);
                let same = |n: &(IpNet, u32, u8)| n.0 == to && n.1 == metric;
                let this = (to, metric, which);
                match step {
                    0 => { routes.remove(to, metric, path().as_ref()); naive.retain(|n| *n != this); }
                    1 => { routes.insert(to, metric, path(), InsertPosition::Replace); naive.retain(|n| !same(n)); naive.push(this); }
                    2 => { routes.insert(to, metric, path(), InsertPosition::Last); if !naive.contains(&this) { naive.push(this); } }
                    _ => { routes.insert(to, metric, path(), InsertPosition::First); naive.retain(|n| *n != this); naive.insert(0, this); }
                }
            }
            naive.sort_by_key(|n| (n.0, n.1));
            naive.dedup_by_key(|n| n.0);
            let expected: Vec<(IpNet, u8)> = naive.iter().map(|n| (n.0, n.2)).collect();
            let found: Vec<(IpNet, u8)> = routes.used().map(|route| route.to).zip(used(&routes)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
