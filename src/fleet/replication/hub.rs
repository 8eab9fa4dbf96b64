//! The shared state of the sessions of a gateway: keys, batches that were sent, sessions by their datagrams, and the
//! state of each partner.
//!
//! **Invariant:** a lock is held for a few lines, never while something is awaited. Not here: the sessions themselves.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dataplane::{OwnedGroups, Tunables, VipAnswers};
use proto::{GroupKey, Membership};
use tokio::net::UdpSocket;
use tokio::sync::{Semaphore, mpsc, watch};

use super::agreement::Agreement;
use super::exchange::ReplicaExchange;
use super::seal::{Identity, KEYS_MAX, KeyId, SessionId, identifier, session_of};
use super::sent::SentBatches;
use crate::worker_threads::inquiries::Inquiries;

/// Datagrams that wait for a session: 1,024 of 1.4 KB are 1.4 MB. What does not fit is asked for again.
const DATAGRAMS_WAITING_MAX: usize = 1024;

/// A partner whose session has ended may know flows that this gateway lacks for this time more: it may own a group of VIPs
/// until its lease ends and another election is over. It may also take one over, and is dialling again.
pub(super) const PARTNER_LEFT: Duration = Duration::from_secs(5);
/// How long a group of VIPs that this gateway has lost is copied: another gateway may take it over that does not know its
/// flows, because it began to follow this one only now.
const LOST_GROUPS_COPIED: Duration = Duration::from_secs(5);

/// The groups of VIPs that this gateway owns, and when it lost others.
#[derive(Debug, Default)]
struct GroupHistory {
    /// Bit n: it owns group n.
    owned: u64,
    lost_at: BTreeMap<u32, Instant>,
}

impl GroupHistory {
    fn note(&mut self, owned: u64, now: Instant) {
        let lost = self.owned & !owned;
        self.lost_at.extend((0..u64::BITS).filter(|group| lost >> group & 1 == 1).map(|group| (group, now)));
        self.owned = owned;
    }

    /// Those that it owns, or has lost just now.
    fn recent(&self, now: Instant) -> u64 {
        let lost = self.lost_at.iter().filter(|(_, at)| now.saturating_duration_since(**at) < LOST_GROUPS_COPIED);
        lost.fold(self.owned, |groups, (group, _)| groups | 1 << group)
    }
}

/// A partner that follows this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FollowerProgress {
    /// Whether it has a complete copy.
    pub(super) is_in_sync: bool,
    /// It has every batch before this one.
    pub(super) acknowledged: u64,
}

/// The state of a partner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PartnerState {
    /// Its name.
    pub(super) name: Option<String>,
    /// `None` while it does not follow this gateway.
    pub(super) follows: Option<FollowerProgress>,
    /// When it ceased to follow this gateway.
    pub(super) left_at: Option<Instant>,
    /// Whether this gateway has a complete copy of its flows, and follows them.
    pub(super) is_followed: bool,
    /// Whether the last attempt to follow it has failed.
    pub(super) has_failed: bool,
}

impl PartnerState {
    /// Whether it has all flows that were sent in batches before number `head`. One that does not follow this gateway has
    /// nothing to wait for, unless its session ended a moment ago: it dials again.
    fn has_until(&self, head: u64, now: Instant) -> bool {
        let has_left = self.left_at.is_none_or(|at| now.saturating_duration_since(at) >= PARTNER_LEFT);
        self.follows.map_or(has_left, |follower| follower.is_in_sync && follower.acknowledged >= head)
    }
}

/// The keys of the group, the preferred one first.
#[derive(Debug)]
struct GroupKeys {
    keys: Vec<GroupKey>,
    /// Whether they are those of a file, which an operator changes.
    are_of_file: bool,
}

impl GroupKeys {
    /// The keys of the file, if they are those of a file.
    fn set(&mut self, keys: &[GroupKey]) {
        if self.are_of_file {
            self.keys = keys.to_vec();
        }
    }

    /// A new key of the controller. The one before it is kept, because others get the new one a moment earlier or later.
    fn take(&mut self, key: GroupKey) {
        if self.keys.first() != Some(&key) {
            self.keys.retain(|known| *known != key);
            self.keys.insert(0, key);
            self.keys.truncate(KEYS_MAX);
        }
    }

    /// Whether a session that began by this key goes on: an operator who takes a key out of the file no longer trusts it. A
    /// controller that starts makes another key, which says nothing about the last one.
    fn accept(&self, key: KeyId) -> bool {
        !self.are_of_file || self.keys.iter().any(|known| identifier(known) == key)
    }
}

/// What a hub is made of.
#[derive(Debug)]
pub(super) struct HubParts {
    /// This gateway.
    pub(super) own: Identity,
    /// The settings of the election.
    pub(super) agreement: Agreement,
    /// The keys of a file, if there is one.
    pub(super) keys: Option<Vec<GroupKey>>,
    /// The age from which on flows are replicated.
    pub(super) after: Duration,
    /// The queues of the workers.
    pub(super) exchange: Arc<ReplicaExchange>,
    /// Lists flows.
    pub(super) inquiries: Arc<Inquiries>,
    /// The groups of VIPs that this gateway owns.
    pub(super) answers: watch::Receiver<VipAnswers>,
    /// The SNAT addresses.
    pub(super) tunables: watch::Receiver<Tunables>,
    /// The socket of all sessions.
    pub(super) socket: UdpSocket,
}

/// What the sessions share.
#[derive(Debug)]
pub(super) struct Hub {
    own: Identity,
    /// The settings of the election.
    pub(super) agreement: Agreement,
    /// The queues of the workers.
    pub(super) exchange: Arc<ReplicaExchange>,
    /// The age from which on flows are replicated.
    pub(super) after: Duration,
    /// The socket of all sessions.
    pub(super) socket: UdpSocket,
    /// Lists flows.
    pub(super) inquiries: Arc<Inquiries>,
    /// One copy is listed at a time.
    pub(super) copying: Semaphore,
    /// The number of the next batch.
    pub(super) head: watch::Sender<u64>,
    answers: watch::Receiver<VipAnswers>,
    history: Mutex<GroupHistory>,
    tunables: watch::Receiver<Tunables>,
    sent: Mutex<SentBatches>,
    keys: Mutex<GroupKeys>,
    sessions: Mutex<HashMap<SessionId, mpsc::Sender<Vec<u8>>>>,
    partner_states: Mutex<BTreeMap<SocketAddr, PartnerState>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// Of a gateway that has no session yet.
    pub(super) fn new(parts: HubParts) -> Self {
        Self {
            own: parts.own,
            agreement: parts.agreement,
            exchange: parts.exchange,
            after: parts.after,
            socket: parts.socket,
            inquiries: parts.inquiries,
            copying: Semaphore::new(1),
            head: watch::Sender::new(0),
            answers: parts.answers,
            history: Mutex::default(),
            tunables: parts.tunables,
            sent: Mutex::default(),
            keys: Mutex::new(GroupKeys { are_of_file: parts.keys.is_some(), keys: parts.keys.unwrap_or_default() }),
            sessions: Mutex::default(),
            partner_states: Mutex::default(),
        }
    }

    /// This gateway, with the digest of its present settings.
    pub(super) fn identity(&self) -> Identity {
        Identity { agreement: self.agreement.digest(&self.tunables.borrow().snat), ..self.own.clone() }
    }

    /// The keys of the group, the preferred one first.
    pub(super) fn keys(&self) -> Vec<GroupKey> {
        lock(&self.keys).keys.clone()
    }

    /// Takes the keys of the file over, as far as they are those of a file.
    pub(super) fn set_keys(&self, keys: &[GroupKey]) {
        lock(&self.keys).set(keys);
    }

    /// Takes a new key of the controller over.
    pub(super) fn take_key(&self, membership: &Membership) {
        lock(&self.keys).take(membership.key);
    }

    /// Whether a session that began by this key goes on.
    pub(super) fn accepts(&self, key: KeyId) -> bool {
        lock(&self.keys).accept(key)
    }

    /// The batches that were sent.
    pub(super) fn sent(&self) -> MutexGuard<'_, SentBatches> {
        lock(&self.sent)
    }

    /// The groups of VIPs that this gateway owns.
    pub(super) fn owned(&self) -> OwnedGroups {
        self.answers.borrow().groups.unwrap_or(OwnedGroups { groups: 0, owned: 0 })
    }

    /// Notes which groups this gateway owns now.
    pub(super) fn note_owned(&self) {
        lock(&self.history).note(self.owned().owned, Instant::now());
    }

    /// The groups whose flows are copied, and which of them, as bits, this gateway has lost just now; it owns the others.
    pub(super) fn copied(&self) -> (OwnedGroups, u64) {
        let owned = self.owned();
        let recent = owned.owned | lock(&self.history).recent(Instant::now());
        (OwnedGroups { owned: recent, ..owned }, recent & !owned.owned)
    }

    /// The SNAT addresses.
    pub(super) fn snat(&self) -> Vec<IpAddr> {
        self.tunables.borrow().snat.clone()
    }

    /// Registers a session for its datagrams, until the result is dropped.
    pub(super) fn register(self: &Arc<Self>, id: SessionId) -> Registered {
        let (sender, datagrams) = mpsc::channel(DATAGRAMS_WAITING_MAX);
        lock(&self.sessions).insert(id, sender);
        Registered { hub: Arc::clone(self), id, datagrams }
    }

    /// Dispatches a datagram to its session; a datagram without a session is dropped.
    pub(super) fn dispatch(&self, datagram: &[u8]) {
        let session = session_of(datagram).and_then(|id| lock(&self.sessions).get(&id).cloned());
        if let Some(session) = session {
            // A session that cannot take it asks for it again.
            let _ = session.try_send(datagram.to_vec());
        }
    }

    /// Changes the state of a partner.
    pub(super) fn update_partner(&self, partner: SocketAddr, change: impl FnOnce(&mut PartnerState)) {
        change(lock(&self.partner_states).entry(partner).or_default());
    }

    /// The states of these partners, and of those that follow this gateway. Others are forgotten.
    pub(super) fn partner_states(&self, partners: &[SocketAddr]) -> BTreeMap<SocketAddr, PartnerState> {
        let mut partner_states = lock(&self.partner_states);
        for partner in partners {
            partner_states.entry(*partner).or_default();
        }
        partner_states.retain(|address, state| partners.contains(address) || state.follows.is_some());
        partner_states.clone()
    }

    /// Whether all partners have all flows that were sent in batches before number `head`.
    pub(super) fn have_until(&self, head: u64) -> bool {
        let now = Instant::now();
        lock(&self.partner_states).values().all(|state| state.has_until(head, now))
    }

    /// How old the oldest news is that a follower lacks.
    pub(super) fn lag(&self, acknowledged: u64) -> Duration {
        self.sent().age(acknowledged, Instant::now())
    }
}

/// A session's datagrams.
#[derive(Debug)]
pub(super) struct Registered {
    hub: Arc<Hub>,
    id: SessionId,
    /// The datagrams that name it.
    pub(super) datagrams: mpsc::Receiver<Vec<u8>>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        lock(&self.hub.sessions).remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partner_is_waited_for_while_it_lacks_news_and_for_some_seconds_after_its_session() {
        let start = Instant::now();
        let of = |is_in_sync, acknowledged| {
            let follower = FollowerProgress { is_in_sync, acknowledged };
            PartnerState { follows: Some(follower), ..PartnerState::default() }
        };
        assert!(of(true, 5).has_until(5, start));
        assert!(!of(true, 4).has_until(5, start));
        assert!(!of(false, 5).has_until(5, start), "its copy is not complete");
        let left = PartnerState { left_at: Some(start), ..PartnerState::default() };
        assert!(!left.has_until(0, start + PARTNER_LEFT - Duration::from_millis(1)));
        assert!(left.has_until(5, start + PARTNER_LEFT));
        assert!(PartnerState::default().has_until(5, start), "it has never followed this gateway");
        let again = PartnerState { left_at: Some(start), ..of(true, 5) };
        assert!(again.has_until(5, start));
    }

    #[test]
    fn sessions_end_when_their_key_leaves_the_file_and_go_on_when_a_controller_makes_others() {
        let key = |byte| GroupKey::new([byte; 32]);
        let mut of_file = GroupKeys { keys: vec![key(1)], are_of_file: true };
        assert!(of_file.accept(identifier(&key(1))));
        of_file.set(&[key(2), key(1)]);
        assert!(of_file.accept(identifier(&key(1))) && of_file.accept(identifier(&key(2))));
        of_file.set(&[key(2)]);
        assert!(!of_file.accept(identifier(&key(1))) && of_file.accept(identifier(&key(2))));
        let mut of_controller = GroupKeys { keys: Vec::new(), are_of_file: false };
        of_controller.set(&[]);
        (1..=3).for_each(|byte| of_controller.take(key(byte)));
        assert_eq!(of_controller.keys, [key(3), key(2)]);
        of_controller.take(key(2));
        assert_eq!(of_controller.keys, [key(2), key(3)], "a leader of before");
        assert!(of_controller.accept(identifier(&key(1))));
    }

    #[test]
    fn a_lost_group_is_copied_for_some_seconds() {
        let (mut history, start) = (GroupHistory::default(), Instant::now());
        let just_before = start + LOST_GROUPS_COPIED - Duration::from_millis(1);
        history.note(0b011, start);
        history.note(0b110, start);
        history.note(0b110, just_before);
        assert_eq!(history.recent(just_before), 0b111);
        assert_eq!(history.recent(start + LOST_GROUPS_COPIED), 0b110);
        history.note(0b111, start + LOST_GROUPS_COPIED);
        assert_eq!(history.recent(start + 2 * LOST_GROUPS_COPIED), 0b111, "it has come back");
    }
}
