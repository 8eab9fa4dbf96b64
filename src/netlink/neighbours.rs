//! Which neighbours Linux is asked to resolve, and by which message. Pure: the time is an argument.
//!
//! Next hops in use are *managed*: Linux keeps probing them (since 5.16; an older kernel ignores the flag, and then the
//! request, repeated, probes). On-link clients are asked for once. Ours carry a protocol number, so that after a crash the
//! next process knows them again.
//!
//! Invariant: a permanent entry is never touched. (Measured on Linux 6.18: a request for one would unmake it; on a
//! reachable one it keeps address and state.)

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use dataplane::Link;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage,
};
use netlink_packet_route::route::RouteProtocol;

use super::tables::Entry;

/// Marks our managed neighbours, as `ip neigh` shows it; the number of the routes we announce.
pub(crate) const OUR_PROTOCOL: u8 = 150;
/// Requests for clients that Linux may have open at a time (FORWARDING section 7).
pub(super) const PENDING_MAX: usize = 512;
/// Linux gives up after three probes, one a second.
const PENDING_TIME: Duration = Duration::from_secs(3);
/// An answered neighbour is asked for again after this, at the earliest (FORWARDING section 7).
const AGAIN: Duration = Duration::from_secs(30);
/// A next hop that Linux does not show as managed is asked for again after this: half of the 30 s that Linux holds an
/// address for reachable.
const MANAGED_AGAIN: Duration = Duration::from_secs(15);
/// Asked neighbours that are remembered: those of [`AGAIN`] at 500 new clients a second.
const ASKED_MAX: usize = 16_384;

/// A neighbour: the link and the address.
pub(super) type Key = (Link, IpAddr);

/// What a request is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Resolve it, and keep it resolved.
    Manage,
    /// Let it age like any other.
    Release,
    /// Resolve it once.
    Resolve,
}

/// The request for a neighbour on an interface, to be sent with NLM_F_CREATE and NLM_F_REPLACE.
pub(super) fn message(ask: Ask, index: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    let (family, destination) = match address {
        IpAddr::V4(ip) => (AddressFamily::Inet, NeighbourAddress::Inet(ip)),
        IpAddr::V6(ip) => (AddressFamily::Inet6, NeighbourAddress::Inet6(ip)),
    };
    message.header.family = family;
    message.header.ifindex = index;
    message.header.flags = NeighbourFlags::Use;
    message.attributes.push(NeighbourAttribute::Destination(destination));
    match ask {
        Ask::Manage => {
            message.attributes.push(NeighbourAttribute::Protocol(RouteProtocol::Other(OUR_PROTOCOL)));
            message.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
        }
        // Without the flag the kernel clears it.
        Ask::Release | Ask::Resolve => {}
    }
    message
}

/// When which neighbour was last asked for.
#[derive(Debug, Default)]
pub(super) struct Asked {
    managed: BTreeMap<Key, Instant>,
    resolved: BTreeMap<Key, Instant>,
    next_sweep: Option<Instant>,
}

impl Asked {
    /// What is to be asked so that exactly the wanted neighbours are managed by us.
    pub(super) fn next_hops(&mut self, now: Instant, wanted: &BTreeSet<Key>, entries: &BTreeMap<Key, Entry>) -> Vec<(Ask, Key)> {
        let entry = |key: &Key| entries.get(key).copied().unwrap_or_default();
        // Once Linux shows it as managed the request has served: if Linux loses it later, it is asked again at once.
        let open = |key: &Key, last: &Instant| {
            wanted.contains(key) && !entry(key).managed && now.saturating_duration_since(*last) < MANAGED_AGAIN
        };
        self.managed.retain(|key, last| open(key, last));
        let mut asks = Vec::new();
        for key in wanted {
            let standing = entry(key);
            if !standing.permanent && !standing.managed && !self.managed.contains_key(key) {
                self.managed.insert(*key, now);
                asks.push((Ask::Manage, *key));
            }
        }
        let unwanted = entries.iter().filter(|(key, e)| e.managed && e.ours && !wanted.contains(key));
        asks.extend(unwanted.map(|(key, _)| (Ask::Release, *key)));
        asks
    }

    /// Forgets when next hops were asked for: interfaces came or went, up or down, so that all are to be asked for again.
    pub(super) fn forget_next_hops(&mut self) {
        self.managed.clear();
    }

    /// Whether to ask for a client now that a packet to it waits.
    pub(super) fn client(&mut self, now: Instant, key: Key, entries: &BTreeMap<Key, Entry>) -> bool {
        let usable = |key: &Key| entries.get(key).is_some_and(|e| e.mac.is_some());
        let untouchable = entries.get(&key).is_some_and(|e| e.permanent || e.managed);
        let age = |last: &Instant| now.saturating_duration_since(*last);
        let rest = if usable(&key) { AGAIN } else { PENDING_TIME };
        if untouchable || self.resolved.get(&key).is_some_and(|last| age(last) < rest) {
            return false;
        }
        if self.next_sweep.is_none_or(|at| at <= now) {
            self.resolved.retain(|_, last| age(last) < AGAIN);
            self.next_sweep = Some(now + PENDING_TIME);
        }
        let pending = || self.resolved.iter().filter(|(key, last)| age(last) < PENDING_TIME && !usable(key)).count();
        if self.resolved.len() >= ASKED_MAX || (self.resolved.len() >= PENDING_MAX && pending() >= PENDING_MAX) {
            return false;
        }
        self.resolved.insert(key, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use dataplane::{Mac, PortIndex};

    use super::*;

    fn key(n: u16) -> Key {
        (PortIndex(0).into(), IpAddr::from([10, 0, n.to_be_bytes()[0], n.to_be_bytes()[1]]))
    }

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    const MANAGED: Entry = Entry { mac: None, permanent: false, managed: true, ours: true };

    #[test]
    fn wanted_next_hops_are_managed_once_and_again_when_linux_does_not_show_it() {
        let (start, mut asked) = (Instant::now(), Asked::default());
        let wanted = BTreeSet::from([key(1)]);
        let mut entries = BTreeMap::new();
        assert_eq!(asked.next_hops(start, &wanted, &entries), [(Ask::Manage, key(1))]);
        assert_eq!(asked.next_hops(at(start, 1), &wanted, &entries), []);
        assert_eq!(asked.next_hops(at(start, 15), &wanted, &entries), [(Ask::Manage, key(1))], "a kernel before 5.16");
        entries.insert(key(1), MANAGED);
        assert_eq!(asked.next_hops(at(start, 16), &wanted, &entries), []);
        entries.clear();
        assert_eq!(asked.next_hops(at(start, 17), &wanted, &entries), [(Ask::Manage, key(1))], "Linux lost it");
        asked.forget_next_hops();
        assert_eq!(asked.next_hops(at(start, 18), &wanted, &entries), [(Ask::Manage, key(1))], "the interface is back");
    }

    #[test]
    fn only_ours_are_released_and_permanent_ones_are_never_touched() {
        let (start, mut asked) = (Instant::now(), Asked::default());
        let entries = BTreeMap::from([
            (key(1), MANAGED),
            (key(2), Entry { ours: false, ..MANAGED }),
            (key(3), Entry { permanent: true, ..Entry::default() }),
        ]);
        assert_eq!(asked.next_hops(start, &BTreeSet::from([key(3)]), &entries), [(Ask::Release, key(1))]);
        assert!(!asked.client(start, key(3), &entries));
    }

    #[test]
    fn a_client_is_asked_for_again_after_3_s_unanswered_and_30_s_answered() {
        let (start, mut asked) = (Instant::now(), Asked::default());
        let mut entries = BTreeMap::new();
        assert!(asked.client(start, key(1), &entries));
        assert!(!asked.client(at(start, 2), key(1), &entries));
        assert!(asked.client(at(start, 3), key(1), &entries));
        entries.insert(key(1), Entry { mac: Some(Mac([2; 6])), ..Entry::default() });
        assert!(!asked.client(at(start, 32), key(1), &entries));
        assert!(asked.client(at(start, 33), key(1), &entries));
    }

    #[test]
    fn at_most_512_requests_are_pending() {
        let (start, mut asked) = (Instant::now(), Asked::default());
        let mut entries = BTreeMap::new();
        let sent = (0..600).filter(|n| asked.client(start, key(*n), &entries)).count();
        assert_eq!(sent, PENDING_MAX);
        entries.insert(key(0), Entry { mac: Some(Mac([2; 6])), ..Entry::default() });
        assert!(asked.client(start, key(900), &entries), "an answer makes room");
        assert!(!asked.client(start, key(901), &entries));
        assert!(asked.client(at(start, 3), key(901), &entries), "and so does giving up");
    }
}
