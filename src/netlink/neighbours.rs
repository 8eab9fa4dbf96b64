//! Decides which neighbours Linux is asked to resolve, and builds the requests. Pure: the time is an argument.
//!
//! Next hops in use are *managed*: Linux keeps probing them (since 5.16; an older kernel ignores the flag, and each
//! repeated request probes). On-link clients are requested once. Our managed neighbours carry a protocol number, so
//! that the next process recognises them after a crash.
//!
//! Invariant: a permanent entry is never touched. (Measured on Linux 6.18: a request would make a permanent entry
//! temporary; a reachable entry keeps its address and state.)

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use dataplane::{Link, Mac};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourMessage};
use netlink_packet_route::route::RouteProtocol;

/// Protocol number of our managed neighbours and addresses, as `ip neigh` and `ip address` show it; also the default of
/// the routes that we announce.
pub(crate) const OUR_PROTOCOL: u8 = 150;
/// Maximum number of requests for clients that Linux may have open at a time (FORWARDING section 7).
pub(super) const PENDING_MAX: usize = 512;
/// Linux gives up after three probes, one a second.
const PENDING_TIME: Duration = Duration::from_secs(3);
/// Minimum time before a resolved neighbour is requested again (FORWARDING section 7).
const AGAIN: Duration = Duration::from_secs(30);
/// Time before a next hop that Linux does not show as managed is requested again: half of the 30 s for which Linux
/// considers a neighbour reachable.
const MANAGED_AGAIN: Duration = Duration::from_secs(15);
/// Maximum number of remembered requests: those of [`AGAIN`] at 500 new clients a second.
const REMEMBERED_MAX: usize = 16_384;

/// A neighbour: its link and address.
pub(super) type NeighbourKey = (Link, IpAddr);

/// Linux's entry for a neighbour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NeighbourEntry {
    /// Ethernet address, while Linux considers it usable.
    pub(super) mac: Option<Mac>,
    /// Permanent, added by the operator or another program. Never touched: a request would make it temporary.
    pub(super) permanent: bool,
    /// Linux keeps probing it.
    pub(super) managed: bool,
    /// It carries our protocol number.
    pub(super) ours: bool,
}

/// What a request asks Linux to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// Resolve the neighbour and keep it resolved.
    Manage,
    /// Let the entry age like any other.
    Release,
    /// Resolve the neighbour once.
    Resolve,
}

/// The request for a neighbour on an interface, to be sent with NLM_F_CREATE and NLM_F_REPLACE.
pub(super) fn message(kind: RequestKind, index: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = address.into();
    message.header.ifindex = index;
    message.header.flags = NeighbourFlags::Use;
    message.attributes.push(NeighbourAttribute::Destination(address.into()));
    // Without the flag the kernel clears it.
    if kind == RequestKind::Manage {
        message.attributes.push(NeighbourAttribute::Protocol(RouteProtocol::Other(OUR_PROTOCOL)));
        message.attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
    }
    message
}

/// Times of the last requests.
#[derive(Debug, Default)]
pub(super) struct NeighbourRequests {
    managed: BTreeMap<NeighbourKey, Instant>,
    resolved: BTreeMap<NeighbourKey, Instant>,
    next_sweep: Option<Instant>,
}

impl NeighbourRequests {
    /// The requests due so that exactly the wanted neighbours are managed by us.
    pub(super) fn next_hops(
        &mut self,
        now: Instant,
        wanted: &BTreeSet<NeighbourKey>,
        entries: &BTreeMap<NeighbourKey, NeighbourEntry>,
    ) -> Vec<(RequestKind, NeighbourKey)> {
        let entry = |key: &NeighbourKey| entries.get(key).copied().unwrap_or_default();
        // A request is fulfilled once Linux shows the entry as managed. If Linux loses the entry later, it is requested
        // at once.
        let open = |key: &NeighbourKey, last: &Instant| {
            wanted.contains(key) && !entry(key).managed && now.saturating_duration_since(*last) < MANAGED_AGAIN
        };
        self.managed.retain(|key, last| open(key, last));
        let mut requests = Vec::new();
        for key in wanted {
            let entry = entry(key);
            if !entry.permanent && !entry.managed && !self.managed.contains_key(key) {
                self.managed.insert(*key, now);
                requests.push((RequestKind::Manage, *key));
            }
        }
        let unwanted = entries.iter().filter(|(key, e)| e.managed && e.ours && !wanted.contains(key));
        requests.extend(unwanted.map(|(key, _)| (RequestKind::Release, *key)));
        requests
    }

    /// Forgets the requests for next hops, so that all are sent again: interfaces were added or removed, or went up or
    /// down.
    pub(super) fn forget_next_hops(&mut self) {
        self.managed.clear();
    }

    /// Whether to request a client now that a packet to it waits.
    pub(super) fn client(&mut self, now: Instant, key: NeighbourKey, entries: &BTreeMap<NeighbourKey, NeighbourEntry>) -> bool {
        let usable = |key: &NeighbourKey| entries.get(key).is_some_and(|e| e.mac.is_some());
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
        if self.resolved.len() >= REMEMBERED_MAX || (self.resolved.len() >= PENDING_MAX && pending() >= PENDING_MAX) {
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

    fn key(n: u16) -> NeighbourKey {
        (PortIndex(0).into(), IpAddr::from([10, 0, n.to_be_bytes()[0], n.to_be_bytes()[1]]))
    }

    fn at(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    const MANAGED: NeighbourEntry = NeighbourEntry { mac: None, permanent: false, managed: true, ours: true };

    #[test]
    fn wanted_next_hops_are_managed_once_and_again_when_linux_does_not_show_it() {
        let (start, mut requests) = (Instant::now(), NeighbourRequests::default());
        let wanted = BTreeSet::from([key(1)]);
        let mut entries = BTreeMap::new();
        assert_eq!(requests.next_hops(start, &wanted, &entries), [(RequestKind::Manage, key(1))]);
        assert_eq!(requests.next_hops(at(start, 1), &wanted, &entries), []);
        assert_eq!(requests.next_hops(at(start, 15), &wanted, &entries), [(RequestKind::Manage, key(1))], "a kernel before 5.16");
        entries.insert(key(1), MANAGED);
        assert_eq!(requests.next_hops(at(start, 16), &wanted, &entries), []);
        entries.clear();
        assert_eq!(requests.next_hops(at(start, 17), &wanted, &entries), [(RequestKind::Manage, key(1))], "Linux lost it");
        requests.forget_next_hops();
        assert_eq!(
            requests.next_hops(at(start, 18), &wanted, &entries),
            [(RequestKind::Manage, key(1))],
            "the interface is back"
        );
    }

    #[test]
    fn only_ours_are_released_and_permanent_ones_are_never_touched() {
        let (start, mut requests) = (Instant::now(), NeighbourRequests::default());
        let entries = BTreeMap::from([
            (key(1), MANAGED),
            (key(2), NeighbourEntry { ours: false, ..MANAGED }),
            (key(3), NeighbourEntry { permanent: true, ..NeighbourEntry::default() }),
        ]);
        assert_eq!(requests.next_hops(start, &BTreeSet::from([key(3)]), &entries), [(RequestKind::Release, key(1))]);
        assert!(!requests.client(start, key(3), &entries));
    }

    #[test]
    fn a_client_is_asked_for_again_after_3_s_unanswered_and_30_s_answered() {
        let (start, mut requests) = (Instant::now(), NeighbourRequests::default());
        let mut entries = BTreeMap::new();
        assert!(requests.client(start, key(1), &entries));
        assert!(!requests.client(at(start, 2), key(1), &entries));
        assert!(requests.client(at(start, 3), key(1), &entries));
        entries.insert(key(1), NeighbourEntry { mac: Some(Mac([2; 6])), ..NeighbourEntry::default() });
        assert!(!requests.client(at(start, 32), key(1), &entries));
        assert!(requests.client(at(start, 33), key(1), &entries));
    }

    #[test]
    fn at_most_512_requests_are_pending() {
        let (start, mut requests) = (Instant::now(), NeighbourRequests::default());
        let mut entries = BTreeMap::new();
        let sent = (0..600).filter(|n| requests.client(start, key(*n), &entries)).count();
        assert_eq!(sent, PENDING_MAX);
        entries.insert(key(0), NeighbourEntry { mac: Some(Mac([2; 6])), ..NeighbourEntry::default() });
        assert!(requests.client(start, key(900), &entries), "an answer makes room");
        assert!(!requests.client(start, key(901), &entries));
        assert!(requests.client(at(start, 3), key(901), &entries), "and so does giving up");
    }
}
