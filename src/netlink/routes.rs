//! Routes by destination and metric, in Linux's order.
//!
//! Invariant: for each destination the lowest metric is used, and of one metric the first route, with all its next
//! hops by our links. Of routes by other devices only these devices are kept: Linux's longest prefix decides, also where
//! the gateway has no link to follow it. Not here: which interface is a link.

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

/// A next hop that packets of the gateway cannot take. Several of one route may leave by one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ForeignHop {
    /// Index of the device.
    pub(super) device: u32,
    /// Address of the next hop; none: on-link.
    pub(super) via: Option<IpAddr>,
}

impl From<u32> for ForeignHop {
    fn from(device: u32) -> Self {
        Self { device, via: None }
    }
}

/// The next hops by other devices of routes to one destination with one metric.
type ForeignHops = SmallVec<[ForeignHop; 1]>;

/// The routes by our links, and what other devices have routes to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Routes {
    by_destination: BTreeMap<(IpNet, u32), Alternatives>,
    /// Destinations with routes that packets of the gateway cannot take, and their next hops.
    elsewhere: BTreeMap<(IpNet, u32), ForeignHops>,
    /// Number of next hops in `elsewhere` for each device.
    devices: BTreeMap<u32, u32>,
    excess: u64,
}

impl Routes {
    /// Notes that a route leaves by a device that is no link. A default route of such a device is ignored: the gateway
    /// uses its own. True if anything changed.
    pub(super) fn insert_elsewhere(&mut self, to: IpNet, metric: u32, hop: impl Into<ForeignHop>) -> bool {
        let (key, hop) = ((to, metric), hop.into());
        let is_new = !self.elsewhere.contains_key(&key);
        if to.prefix_len() == 0 || self.elsewhere.get(&key).is_some_and(|hops| hops.contains(&hop)) {
            return false;
        }
        if is_new && self.is_full() {
            self.excess += 1;
            return false;
        }
        self.elsewhere.entry(key).or_default().push(hop);
        *self.devices.entry(hop.device).or_insert(0) += 1;
        true
    }

    /// Forgets a route by a device that is no link. True if anything changed.
    pub(super) fn remove_elsewhere(&mut self, to: IpNet, metric: u32, hop: impl Into<ForeignHop>) -> bool {
        let hop = hop.into();
        let Some(hops) = self.elsewhere.get_mut(&(to, metric)) else { return false };
        let before = hops.len();
        hops.retain(|other| *other != hop);
        if hops.len() == before {
            return false;
        }
        if hops.is_empty() {
            self.elsewhere.remove(&(to, metric));
        }
        self.count_out(hop.device);
        true
    }

    /// Forgets all routes by devices that are no links to one destination with one metric. True if anything changed.
    pub(super) fn clear_elsewhere(&mut self, to: IpNet, metric: u32) -> bool {
        let Some(hops) = self.elsewhere.remove(&(to, metric)) else { return false };
        hops.iter().for_each(|hop| self.count_out(hop.device));
        true
    }

    fn count_out(&mut self, device: u32) {
        if let Some(count) = self.devices.get_mut(&device) {
            *count -= 1;
            if *count == 0 {
                self.devices.remove(&device);
            }
        }
    }

    /// Whether a route leaves by this device, which is no link.
    pub(super) fn leave_by(&self, device: u32) -> bool {
        self.devices.contains_key(&device)
    }

    /// The devices of routes that packets of the gateway cannot take.
    pub(super) fn devices(&self) -> impl Iterator<Item = u32> {
        self.devices.keys().copied()
    }

    /// The destinations whose route in use packets of the gateway cannot take, with its device. Of the same metric, a
    /// route by a link counts: the interface below a port often has the connected prefix of the port as well.
    pub(super) fn elsewhere(&self) -> impl Iterator<Item = (IpNet, u32)> {
        let mut last = None;
        let first = self.elsewhere.iter().filter(move |((to, _), _)| last.replace(*to) != Some(*to));
        first.filter_map(|(&(to, metric), hops)| {
            let ours = self.by_destination.range((to, 0)..=(to, metric)).next();
            ours.is_none().then(|| hops.first().map(|hop| (to, hop.device))).flatten()
        })
    }

    /// Whether the route with this metric is in use although other devices have routes to the destination.
    fn prevails(&self, to: IpNet, metric: u32) -> bool {
        metric == 0 || self.elsewhere.range((to, 0)..(to, metric)).next().is_none()
    }

    fn is_full(&self) -> bool {
        self.by_destination.len() + self.elsewhere.len() >= ROUTES_MAX
    }

    /// Inserts a route; `route` is none if it has no next hop by our links. True if anything changed.
    pub(super) fn insert(&mut self, to: IpNet, metric: u32, route: Option<NextHops>, position: InsertPosition) -> bool {
        let key = (to, metric);
        let old = self.by_destination.get(&key);
        if old.is_none() && route.is_some() && self.is_full() {
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
        self.by_destination.iter().filter_map(move |(&(to, metric), routes)| {
            let first = routes.first().filter(|_| last.replace(to) != Some(to))?;
            self.prevails(to, metric).then_some((to, first))
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

    /// Whether there are several routes with this destination and metric, by our links or others.
    pub(super) fn are_several(&self, to: IpNet, metric: u32) -> bool {
        let ours = self.by_destination.get(&(to, metric)).map_or(0, SmallVec::len);
        ours + self.elsewhere.get(&(to, metric)).map_or(0, SmallVec::len) > 1
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

    #[test]
    fn of_routes_to_one_destination_the_lowest_metric_decides_whether_a_link_has_it() {
        let mut routes = Routes::default();
        let elsewhere = |routes: &Routes| routes.elsewhere().collect::<Vec<_>>();
        routes.insert(net(1), 100, by(&[1]), InsertPosition::First);
        assert!(routes.insert_elsewhere(net(1), 200, 7));
        assert!(!routes.insert_elsewhere(net(1), 200, 7), "a repeated message changes nothing");
        assert_eq!((used(&routes), elsewhere(&routes)), (vec![1], vec![]));
        assert!(routes.insert_elsewhere(net(1), 100, 8), "of the same metric, that of the link counts");
        assert_eq!((used(&routes), elsewhere(&routes)), (vec![1], vec![]));
        assert!(routes.insert_elsewhere(net(1), 50, 9));
        assert_eq!((used(&routes), elsewhere(&routes)), (vec![], vec![(net(1), 9)]));
        assert!(routes.remove_elsewhere(net(1), 50, 9) && !routes.leave_by(9) && routes.leave_by(7));
        routes.remove(net(1), 100, by(&[1]).as_ref());
        assert_eq!(elsewhere(&routes), [(net(1), 8)]);
        assert!(routes.clear_elsewhere(net(1), 100));
        assert_eq!(elsewhere(&routes), [(net(1), 7)]);
        assert_eq!(routes.devices().collect::<Vec<_>>(), [7]);
    }

    #[test]
    fn a_destination_stays_elsewhere_while_any_next_hop_by_the_device_is_left() {
        let mut routes = Routes::default();
        let hop = |n| ForeignHop { device: 7, via: Some(IpAddr::from([10, 9, 0, n])) };
        assert!(routes.insert_elsewhere(net(1), 100, hop(1)) && routes.insert_elsewhere(net(1), 100, hop(2)));
        assert!(routes.remove_elsewhere(net(1), 100, hop(1)));
        assert_eq!((routes.elsewhere().collect::<Vec<_>>(), routes.leave_by(7)), (vec![(net(1), 7)], true));
        assert!(routes.remove_elsewhere(net(1), 100, hop(2)));
        assert_eq!((routes.elsewhere().count(), routes.leave_by(7)), (0, false));
    }

    #[test]
    fn a_default_route_of_another_device_is_ignored() {
        let mut routes = Routes::default();
        for all in ["0.0.0.0/0", "::/0"] {
            assert!(!routes.insert_elsewhere(all.parse().unwrap(), 0, 7));
        }
        assert_eq!(routes.elsewhere().count(), 0);
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
