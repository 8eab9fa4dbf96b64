//! The room for backends and their targets, which all Services share, and the share of each namespace.
//!
//! A backend of a Service takes one place until its drain has ended, and a target that rests takes one more.
//!
//! **Invariants:** no more places are held than there are. While more than three quarters are held, a namespace grows
//! only up to its share of all but a reserve, or while it holds less than an eighth of what is free: however much the
//! others want, a namespace that holds little finds room.
//!
//! Not here: the backends and targets that hold the places (`backend_drain`, `targets`).

pub(super) mod waiting;

use hashbrown::HashMap;
use proto::Service;

use crate::wire::TableHash;

/// A namespace.
#[derive(Clone, Copy, Debug, Default)]
struct Holding {
    held: u32,
    /// Number of backends that its Services list, on each of their ports.
    wanted: u64,
}

impl Holding {
    fn demand(&self) -> u64 {
        self.wanted.max(self.held.into())
    }
}

/// Why there is no place for one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom {
    /// Places in all.
    limit: u32,
    /// Whether places are left, for namespaces that hold few.
    is_share: bool,
}

impl NoRoom {
    /// The message for the owner of a Service in this namespace. Without counts that change all the time: it becomes a
    /// condition.
    pub(super) fn message(self, namespace: &str) -> String {
        let Self { limit, is_share } = self;
        let why = if is_share {
            format!("namespace {namespace} has its share of the gateway's {limit} targets (`limits.targets`), which are scarce")
        } else {
            format!("all of the gateway's {limit} targets (`limits.targets`) are taken")
        };
        format!("some backends are not used: {why}; they are tried again as targets become free")
    }
}

/// The places of all namespaces.
#[derive(Debug)]
pub(super) struct Room {
    limit: u32,
    held: u32,
    namespaces: HashMap<String, Holding, TableHash>,
    /// The share of a namespace that wants more, until anybody wants more or less.
    share: Option<u32>,
    /// How often a place became free.
    released: u64,
}

impl Room {
    pub(super) fn new(limit: u32) -> Self {
        Self { limit, held: 0, namespaces: HashMap::default(), share: None, released: 0 }
    }

    /// Places beyond a lower limit stay with those who hold them.
    pub(super) fn set_limit(&mut self, limit: u32) {
        (self.limit, self.share) = (limit, None);
        self.released += 1;
    }

    pub(super) const fn limit(&self) -> u32 {
        self.limit
    }

    pub(super) const fn released(&self) -> u64 {
        self.released
    }

    /// Counts what a Service wants.
    pub(super) fn want(&mut self, service: &Service) {
        let wanted = wanted(service);
        self.holding(&service.name.namespace).wanted += wanted;
        self.share = None;
    }

    /// No longer counts what a Service wanted.
    pub(super) fn want_no_more(&mut self, service: &Service) {
        let wanted = wanted(service);
        let holding = self.holding(&service.name.namespace);
        holding.wanted = holding.wanted.saturating_sub(wanted);
        self.share = None;
        self.forget_unused(&service.name.namespace);
    }

    /// Takes a place, whether it may or not.
    pub(super) fn take(&mut self, namespace: &str) {
        self.holding(namespace).held += 1;
        self.held += 1;
    }

    /// Gives a place back.
    pub(super) fn give(&mut self, namespace: &str) {
        let holding = self.holding(namespace);
        holding.held = holding.held.saturating_sub(1);
        self.held = self.held.saturating_sub(1);
        self.released += 1;
        self.forget_unused(namespace);
    }

    /// Whether a namespace may take one more place.
    pub(super) fn may_take(&mut self, namespace: &str) -> Result<(), NoRoom> {
        let held = self.namespaces.get(namespace).map_or(0, |holding| holding.held);
        let free = self.limit.saturating_sub(self.held);
        let holds_little = u64::from(held) * 8 < u64::from(free);
        let may = free > self.limit / 4 || holds_little || (free > self.reserve() && held < self.share());
        may.then_some(()).ok_or(NoRoom { limit: self.limit, is_share: free > 0 })
    }

    /// The refusal when no slot can be reassigned yet.
    pub(super) const fn none_free(&self) -> NoRoom {
        NoRoom { limit: self.limit, is_share: false }
    }

    /// The last places are for namespaces that hold few of them.
    const fn reserve(&self) -> u32 {
        self.limit / 16
    }

    /// The share of a namespace that wants more, by max-min fairness: namespaces that want less leave the rest to the
    /// others, and a namespace that holds more than its share keeps it.
    fn share(&mut self) -> u32 {
        if let Some(share) = self.share {
            return share;
        }
        let mut all: Vec<(u64, u64)> = self.namespaces.values().map(|of| (of.demand(), of.held.into())).collect();
        let mut places_left = u64::from(self.limit - self.reserve());
        let mut share = level(&mut all, places_left);
        // Each round some more keep what they hold, so there are few.
        loop {
            let kept: u64 = all.extract_if(.., |(_, held)| *held > share).map(|(_, held)| held).sum();
            if kept == 0 {
                break;
            }
            places_left = places_left.saturating_sub(kept);
            share = level(&mut all, places_left);
        }
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        self.share = Some(share);
        share
    }

    fn holding(&mut self, namespace: &str) -> &mut Holding {
        self.namespaces.entry_ref(namespace).or_default()
    }

    fn forget_unused(&mut self, namespace: &str) {
        if self.namespaces.get(namespace).is_some_and(|holding| holding.demand() == 0) {
            self.namespaces.remove(namespace);
        }
    }
}

/// The greatest part that each may have of these places, where nobody gets more than it demands.
fn level(all: &mut [(u64, u64)], mut places: u64) -> u64 {
    all.sort_unstable();
    let mut others = all.len() as u64;
    for (demand, _) in all {
        if *demand > places / others {
            return places / others;
        }
        (places, others) = (places - *demand, others - 1);
    }
    u64::MAX
}

fn wanted(service: &Service) -> u64 {
    if service.refusal.is_some() { 0 } else { service.ports.iter().map(|port| port.backend_count() as u64).sum() }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};

    use proptest::prelude::*;
    use proto::limits::MAGLEV_HASH_VERSION;
    use proto::{Backend, BackendState, Family, MaglevSpec, Protocol, ServiceName, ServicePort};

    use super::*;

    fn wants(namespace: &str, count: u32) -> Service {
        let address = |n: u32| SocketAddr::new(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + n)), 80);
        let backend = |n| Backend { address: address(n), weight: 1, state: BackendState::Active };
        let spec = MaglevSpec { size: 251, seed: 1, hash_version: MAGLEV_HASH_VERSION };
        let port = ServicePort::new(Protocol::Tcp, Family::V4, 80, spec);
        let port = ServicePort { backends: (0..count).map(backend).collect(), ..port };
        Service::new(ServiceName::new(namespace, "web"), vec![port])
    }

    /// Takes places as long as it may, at most this many; returns how many.
    fn grow(room: &mut Room, namespace: &str, most: u32) -> u32 {
        for n in 0..most {
            if room.may_take(namespace).is_err() {
                return n;
            }
            room.take(namespace);
        }
        most
    }

    #[test]
    fn a_namespace_that_is_alone_leaves_room_for_one_that_comes() {
        let mut room = Room::new(1024);
        room.want(&wants("a", 5000));
        assert_eq!(grow(&mut room, "a", 5000), 960);
        // An eighth of the free ones each, which become fewer.
        assert_eq!(["b", "c", "d"].map(|name| grow(&mut room, name, 5000)), [8, 7, 6]);
        assert!((0..20).all(|n| grow(&mut room, &format!("n{n}"), 1) == 1));
    }

    #[test]
    fn two_that_want_everything_share_it_and_one_that_wants_little_gets_it() {
        let mut room = Room::new(1024);
        for (namespace, wanted) in [("a", 5000), ("b", 5000), ("small", 100)] {
            room.want(&wants(namespace, wanted));
        }
        // Up to three quarters anybody; a then holds more than its share, (960 - 100) / 2, and keeps it.
        assert_eq!(grow(&mut room, "a", 5000), 768);
        assert_eq!(grow(&mut room, "small", 100), 96);
        assert_eq!(grow(&mut room, "b", 5000), 96, "half of the others, but for the reserve");
        for _ in 0..600 {
            room.give("a");
        }
        assert!(room.may_take("b").is_ok(), "places became free");
    }

    #[test]
    fn the_message_says_what_is_scarce() {
        let mut room = Room::new(32);
        room.take("b");
        grow(&mut room, "a", 32);
        let message = |room: &mut Room| room.may_take("a").unwrap_err().message("a");
        let text = message(&mut room);
        assert!(text.contains("namespace a has its share of the gateway's 32 targets"), "{text}");
        while room.held < 32 {
            room.take("c");
        }
        let text = message(&mut room);
        assert!(text.contains("all of the gateway's 32 targets (`limits.targets`) are taken"), "{text}");
    }

    proptest! {
        #[test]
        fn never_more_than_all_and_a_newcomer_finds_room_beside_a_few_greedy_ones(
            limit in 256u32..4096,
            takes in prop::collection::vec((0usize..4, 1u32..2000), 1..40),
        ) {
            let mut room = Room::new(limit);
            let names = ["a", "b", "c", "d"];
            names.iter().for_each(|name| room.want(&wants(name, 4000)));
            for (who, most) in takes {
                grow(&mut room, names[who], most);
                prop_assert!(room.held <= limit);
            }
            prop_assert!(room.may_take("newcomer").is_ok(), "{room:?}");
        }
    }
}
