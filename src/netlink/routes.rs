//! Routes by destination and metric, as Linux orders them.
//!
//! Invariant: per destination, the lowest metric counts, and of one metric the route that stands first, with all its next
//! hops. Only next hops by our interfaces are kept. Deliberately not here: which interface is ours.

use std::collections::BTreeMap;
use std::net::IpAddr;

use dataplane::{Link, Route};
use ipnet::IpNet;

/// Routes followed, at most: today's full IPv4 table (about a million) fits (FORWARDING section 7).
pub(super) const ROUTES_MAX: usize = 1_048_576;

/// One way to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hop {
    /// Next hop; none: on-link.
    pub(super) via: Option<IpAddr>,
    /// By which link.
    pub(super) link: Link,
    /// Its share, 1 to 256.
    pub(super) weight: u16,
}

/// Where one route leads: to its next hops side by side, or nowhere. Nearly always one next hop; a list would cost an
/// allocation for each route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path {
    /// None: a blackhole, an unreachable or a prohibited destination.
    first: Option<Hop>,
    rest: Box<[Hop]>,
}

impl Path {
    pub(super) fn nowhere() -> Self {
        Self { first: None, rest: Box::new([]) }
    }

    /// By these next hops, each once. None without any.
    pub(super) fn by(hops: impl IntoIterator<Item = Hop>) -> Option<Self> {
        let mut hops = hops.into_iter();
        let first = hops.next()?;
        let mut rest: Vec<Hop> = Vec::new();
        for hop in hops {
            if !std::iter::once(&first).chain(&rest).any(|known| (known.via, known.link) == (hop.via, hop.link)) {
                rest.push(hop);
            }
        }
        Some(Self { first: Some(first), rest: rest.into() })
    }

    fn hops(&self) -> impl Iterator<Item = Hop> {
        self.first.into_iter().chain(self.rest.iter().copied())
    }

    /// Without the next hops of another. None when nothing is left.
    fn without(&self, other: &Self) -> Option<Self> {
        if self == other {
            return None;
        }
        if self.first.is_none() {
            return Some(self.clone());
        }
        Self::by(self.hops().filter(|hop| !other.hops().any(|gone| (gone.via, gone.link) == (hop.via, hop.link))))
    }
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

/// The routes of one destination and metric, in their order. Linux uses the first.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Standing {
    first: Path,
    rest: Vec<Path>,
}

impl Standing {
    fn all(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    fn collect(mut paths: impl Iterator<Item = Path>) -> Option<Self> {
        let first = paths.next()?;
        let mut rest = Vec::new();
        for path in paths {
            if path != first && !rest.contains(&path) {
                rest.push(path);
            }
        }
        Some(Self { first, rest })
    }
}

/// The routes by our ports.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Routes {
    by_destination: BTreeMap<(IpNet, u32), Standing>,
    excess: u64,
}

impl Routes {
    /// Takes a route in; none: one that leads by no port of ours. True if anything changed.
    pub(super) fn insert(&mut self, to: IpNet, metric: u32, path: Option<Path>, place: Place) -> bool {
        let key = (to, metric);
        let old = self.by_destination.get(&key);
        if old.is_none() && path.is_some() && self.by_destination.len() >= ROUTES_MAX {
            self.excess += 1;
            return false;
        }
        let new = {
            let standing = old.into_iter().flat_map(Standing::all).cloned();
            match place {
                Place::Only => Standing::collect(path.into_iter()),
                Place::First => Standing::collect(path.into_iter().chain(standing)),
                Place::Last => Standing::collect(standing.chain(path)),
            }
        };
        self.put(key, new)
    }

    /// Takes a route out, or, where only some of a route's next hops are named, these. True if anything changed.
    pub(super) fn remove(&mut self, to: IpNet, metric: u32, path: Option<&Path>) -> bool {
        let (key, Some(path)) = ((to, metric), path) else { return false };
        let Some(old) = self.by_destination.get(&key) else { return false };
        let new = if old.all().any(|standing| standing == path) {
            Standing::collect(old.all().filter(|standing| *standing != path).cloned())
        } else {
            Standing::collect(old.all().filter_map(|standing| standing.without(path)))
        };
        self.put(key, new)
    }

    fn put(&mut self, key: (IpNet, u32), new: Option<Standing>) -> bool {
        if self.by_destination.get(&key) == new.as_ref() {
            return false;
        }
        match new {
            Some(standing) => self.by_destination.insert(key, standing),
            None => self.by_destination.remove(&key),
        };
        true
    }

    /// The path to each destination.
    fn best(&self) -> impl Iterator<Item = (IpNet, &Path)> {
        let mut last = None;
        self.by_destination
            .iter()
            .filter_map(move |(&(to, _), standing)| (last.replace(to) != Some(to)).then_some((to, &standing.first)))
    }

    /// The routes to each destination, one for each next hop.
    pub(super) fn used(&self) -> impl Iterator<Item = Route> {
        self.best().flat_map(|(to, path)| path.hops().map(move |Hop { via, link, weight }| Route { to, via, link, weight }))
    }

    /// The destinations that there is no way to.
    pub(super) fn unreachable(&self) -> impl Iterator<Item = IpNet> {
        self.best().filter(|(_, path)| path.first.is_none()).map(|(to, _)| to)
    }

    /// Whether several routes stand for this destination and metric.
    pub(super) fn are_several(&self, to: IpNet, metric: u32) -> bool {
        self.by_destination.get(&(to, metric)).is_some_and(|standing| !standing.rest.is_empty())
    }

    /// How many did not fit since the tables were read.
    pub(super) fn excess(&self) -> u64 {
        self.excess
    }
}

#[cfg(test)]
mod tests {
    use dataplane::PortIndex;
    use proptest::prelude::*;

    use super::*;

    fn hop(n: u8) -> Hop {
        Hop { via: Some(IpAddr::from([10, 0, 0, n])), link: PortIndex(n % 2).into(), weight: 1 }
    }

    fn by(hops: &[u8]) -> Option<Path> {
        Path::by(hops.iter().map(|n| hop(*n)))
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
        assert!(routes.insert(net(1), 200, by(&[2]), Place::First));
        assert!(routes.insert(net(1), 100, by(&[1]), Place::First));
        assert_eq!(used(&routes), [1]);
        assert!(routes.remove(net(1), 100, by(&[1]).as_ref()));
        assert_eq!(used(&routes), [2]);
    }

    #[test]
    fn all_next_hops_of_a_route_are_used_and_the_removal_of_one_leaves_the_rest() {
        let mut routes = Routes::default();
        routes.insert(net(1), 0, by(&[1, 2, 1]), Place::Only);
        assert_eq!(used(&routes), [1, 2]);
        routes.remove(net(1), 0, by(&[1]).as_ref());
        assert_eq!(used(&routes), [2]);
        routes.remove(net(1), 0, by(&[2]).as_ref());
        assert!(used(&routes).is_empty());
    }

    #[test]
    fn of_several_routes_the_first_is_used_alone() {
        let mut routes = Routes::default();
        routes.insert(net(1), 0, by(&[1]), Place::First);
        assert!(routes.insert(net(1), 0, by(&[2, 4]), Place::Last));
        assert_eq!(used(&routes), [1]);
        routes.insert(net(1), 0, by(&[3]), Place::First);
        assert_eq!(used(&routes), [3]);
        assert!(!routes.insert(net(1), 0, by(&[3]), Place::First), "nothing changes by hearing it twice");
        routes.remove(net(1), 0, by(&[3]).as_ref());
        routes.remove(net(1), 0, by(&[1]).as_ref());
        assert_eq!(used(&routes), [2, 4]);
    }

    #[test]
    fn a_blackhole_is_a_route_to_nowhere_and_stands_by_metric_like_any_other() {
        let mut routes = Routes::default();
        routes.insert(net(1), 100, by(&[1]), Place::First);
        routes.insert(net(1), 50, Some(Path::nowhere()), Place::First);
        assert_eq!((used(&routes), routes.unreachable().collect::<Vec<_>>()), (vec![], vec![net(1)]));
        routes.remove(net(1), 50, Some(&Path::nowhere()));
        assert_eq!((used(&routes), routes.unreachable().count()), (vec![1], 0));
    }

    #[test]
    fn routes_beyond_the_bound_are_counted() {
        let mut routes = Routes::default();
        let host = |n: usize| IpNet::from(IpAddr::from(u32::try_from(n).unwrap().to_be_bytes()));
        for n in 0..=ROUTES_MAX {
            routes.insert(host(n), 0, by(&[1]), Place::First);
        }
        assert_eq!((routes.used().count(), routes.excess()), (ROUTES_MAX, 1));
        assert!(routes.insert(host(0), 0, by(&[2]), Place::First), "a known destination still changes");
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
                    1 => { routes.insert(to, metric, path(), Place::Only); naive.retain(|n| !same(n)); naive.push(this); }
                    2 => { routes.insert(to, metric, path(), Place::Last); if !naive.contains(&this) { naive.push(this); } }
                    _ => { routes.insert(to, metric, path(), Place::First); naive.retain(|n| *n != this); naive.insert(0, this); }
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
