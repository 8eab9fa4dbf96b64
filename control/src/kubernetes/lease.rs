//! The Lease `sluice-controller-<group>`: which replica leads.
//!
//! Invariant: clocks of different machines are never compared. A replica acquires a Lease that it has itself seen
//! unchanged for [`LEASE`], by its own clock. The holder stops at the latest [`RENEW_DEADLINE`] after it sent the last
//! accepted renewal. No other replica can have seen that renewal before it was sent, so at least 5 s lie between the
//! two: enough for clocks whose rates differ by a third, and for requests still on their way to the API server. Only a
//! holder that has provably ended on this machine (`lock`) is replaced earlier.
//! Deliberately not here: requests to the API server (`election`), and the work of a leader (`controller`).

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::ObjectMeta;

pub mod election;
mod lock;

use super::client::instance;
use lock::ProcessLock;

/// Lease duration: a Lease that was not renewed for this long may be acquired.
pub const LEASE: Duration = Duration::from_secs(15);
/// Renew deadline: a leader that cannot renew steps down this long after it sent its last renewal; two thirds of
/// [`LEASE`].
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Retry period: interval of reading another replica's Lease, and the longest time between attempts of a failed
/// renewal.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Interval of renewals, which are half of our requests at rest. A renewal that hangs leaves time for another one
/// before the leader must step down.
pub const RENEW_PERIOD: Duration = Duration::from_secs(4);
/// A leader whose renewals were not seen for this long may be dead, and gateways are no longer sent to it.
const RENEWAL_MAX_AGE: Duration = RENEW_DEADLINE;
/// Maximum duration in a Lease of another version, so that the group is not without a leader for minutes.
const LEASE_LONGEST: Duration = Duration::from_secs(60);
/// Annotation with the address of the leader, because the holder's identity is opaque.
const ADDRESS: &str = "sluice.dev/leader-address";

/// Role of this replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leadership {
    /// Another replica leads, or none does yet.
    Following(Option<Leader>),
    /// This replica leads, in this epoch.
    Leading {
        /// Epoch of its generations, unique to this term of leadership.
        epoch: String,
    },
}

/// The leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its identity in the Lease.
    pub identity: String,
    /// Address for gateways, if it publishes one.
    pub address: Option<String>,
}

/// A replica that takes part in the election.
#[derive(Clone, Debug)]
pub struct LeaseCandidate {
    /// Name of the Lease.
    pub lease: String,
    /// Unique identity of this replica.
    pub identity: String,
    /// Its address for gateways.
    pub address: Option<String>,
    seen: Option<Seen>,
    lock: Option<Arc<ProcessLock>>,
}

/// The newest version of the Lease that this replica saw, and when it first saw it.
#[derive(Clone, Debug)]
struct Seen {
    version: Option<String>,
    since: Instant,
    /// Whether it replaced an earlier version that this replica saw, so its holder was alive then.
    is_renewal: bool,
    /// Whether another replica held it.
    is_held: bool,
}

impl LeaseCandidate {
    /// A candidate of a group. Its identity is the host name, for people, and a random part that makes it unique.
    #[must_use]
    pub fn new(group: &str, address: Option<String>) -> Self {
        let identity = format!("{}_{:016x}", instance(), RandomState::new().hash_one(std::process::id()));
        Self { lease: format!("sluice-controller-{group}"), identity, address, seen: None, lock: None }
    }

    /// A candidate with a lock file in `dir`. By these files replicas on one machine see which of them have ended.
    /// Without the lock it waits for Leases to expire.
    #[must_use]
    pub fn locked_in(mut self, dir: &Path) -> Self {
        match ProcessLock::take(dir, &self.identity) {
            Ok(lock) => self.lock = Some(Arc::new(lock)),
            Err(error) => tracing::warn!(
                dir = %dir.display(), %error,
                "cannot create a lock file; after a crash on this machine the next controller waits until the Lease expires"
            ),
        }
        self
    }

    /// Removes the lock files of former leaders, which are useless once this replica leads.
    pub fn leads(&self) {
        self.lock.iter().for_each(|lock| lock.remove_left());
    }

    /// A new Lease held by this replica.
    #[must_use]
    pub fn create(&self) -> Lease {
        let metadata = ObjectMeta { name: Some(self.lease.clone()), ..ObjectMeta::default() };
        let mut lease = Lease { metadata, spec: None };
        self.hold(&mut lease, 0);
        lease
    }

    /// The Lease with this replica as holder, if it may acquire it: it has no holder, its holder did not renew in time,
    /// or has ended. To be called with every version that is seen, and the time after it was seen.
    #[must_use]
    pub fn take(&mut self, lease: &Lease, now: Instant) -> Option<Lease> {
        let version = lease.metadata.resource_version.clone();
        let (since, is_renewal) = match &self.seen {
            Some(seen) if seen.version == version => (seen.since, seen.is_renewal),
            seen => (now, seen.is_some()),
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.unwrap_or_default();
        let is_held = !holder.is_empty() && holder != self.identity;
        self.seen = Some(Seen { version, since, is_renewal, is_held });
        let lease_duration =
            Duration::from_secs(u64::try_from(spec.lease_duration_seconds.unwrap_or_default()).unwrap_or_default());
        let is_over = now.duration_since(since) >= lease_duration.clamp(LEASE, LEASE_LONGEST);
        let has_ended = || {
            let has_ended = self.lock.as_ref().is_some_and(|lock| lock.has_ended(&holder));
            if has_ended {
                tracing::info!(holder, "the holder of the Lease ended on this machine; acquiring it");
            }
            has_ended
        };
        // The Lease already has our identity if the answer to our acquisition was lost.
        if !(holder.is_empty() || holder == self.identity || is_over || has_ended()) {
            return None;
        }
        let mut taken = lease.clone();
        self.hold(&mut taken, spec.lease_transitions.unwrap_or_default().wrapping_add(1));
        Some(taken)
    }

    /// Whether this replica may create a Lease that is missing. One that was held when it was last seen was deleted by
    /// somebody: its holder notices only at its next renewal, and leads until then.
    #[must_use]
    pub fn may_create(&self, now: Instant) -> bool {
        self.seen.as_ref().is_none_or(|seen| !seen.is_held || now.duration_since(seen.since) >= LEASE)
    }

    /// The holder of the Lease that [`LeaseCandidate::take`] saw last, with its address as long as it is known to be
    /// alive. A holder that was never seen to renew, or not recently, has no address.
    #[must_use]
    pub fn leader(&self, lease: &Lease, now: Instant) -> Option<Leader> {
        let leader = holder(lease)?;
        Some(Leader { address: leader.address.filter(|_| self.saw_renewal(now)), ..leader })
    }

    /// Whether the Lease changed recently.
    #[must_use]
    pub fn saw_renewal(&self, now: Instant) -> bool {
        self.seen.as_ref().is_some_and(|seen| seen.is_renewal && now.duration_since(seen.since) < RENEWAL_MAX_AGE)
    }

    /// The renewed Lease of this replica.
    #[must_use]
    pub fn renew(&self, held: &Lease) -> Lease {
        let mut lease = held.clone();
        lease.spec.get_or_insert_default().renew_time = Some(MicroTime(Timestamp::now()));
        lease
    }

    /// The released Lease, which the next replica can acquire at once.
    #[must_use]
    pub fn release(&self, held: &Lease) -> Lease {
        let mut lease = held.clone();
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        lease.metadata.annotations.get_or_insert_default().remove(ADDRESS);
        lease
    }

    /// Whether `lease` is a newer version of our own Lease, because the answer to a renewal was lost.
    #[must_use]
    pub fn holds(&self, held: &Lease, lease: &Lease) -> bool {
        lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_ref()) == Some(&self.identity) && epoch(held) == epoch(lease)
    }

    fn hold(&self, lease: &mut Lease, transitions: i32) {
        let now = Some(MicroTime(Timestamp::now()));
        let duration_s = i32::try_from(LEASE.as_secs()).unwrap_or(i32::MAX);
        lease.spec = Some(LeaseSpec {
            acquire_time: now.clone(),
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(duration_s),
            lease_transitions: Some(transitions),
            renew_time: now,
            ..lease.spec.take().unwrap_or_default()
        });
        let annotations: &mut BTreeMap<_, _> = lease.metadata.annotations.get_or_insert_default();
        match &self.address {
            Some(address) => _ = annotations.insert(ADDRESS.to_owned(), address.clone()),
            None => _ = annotations.remove(ADDRESS),
        }
    }
}

/// The epoch of the holder: the uid of the Lease and its number of transitions. Acquisition is guarded by the resource
/// version, so no two terms of leadership have the same epoch.
#[must_use]
pub fn epoch(lease: &Lease) -> String {
    let transitions = lease.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or_default();
    format!("{}-{transitions}", lease.metadata.uid.as_deref().unwrap_or_default())
}

/// Its holder, alive or not.
fn holder(lease: &Lease) -> Option<Leader> {
    let identity = lease.spec.as_ref()?.holder_identity.clone().filter(|identity| !identity.is_empty())?;
    let address = lease.metadata.annotations.as_ref().and_then(|annotations| annotations.get(ADDRESS)).cloned();
    Some(Leader { identity, address })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// As the API server stores it.
    fn kept(mut lease: Lease, version: &str) -> Lease {
        lease.metadata.uid = Some("uid".to_owned());
        lease.metadata.resource_version = Some(version.to_owned());
        lease
    }

    fn candidates() -> (LeaseCandidate, LeaseCandidate) {
        (LeaseCandidate::new("east", Some("https://192.0.2.1:9443".to_owned())), LeaseCandidate::new("east", None))
    }

    #[test]
    fn a_lease_is_acquired_only_after_15_s_without_renewal_by_our_own_clock() {
        let (one, mut two) = candidates();
        let start = Instant::now();
        let mut held = kept(one.create(), "1");
        // The clock of the other replica does not count.
        held.spec.as_mut().unwrap().renew_time = Some(MicroTime(Timestamp::UNIX_EPOCH));
        for second in 0..40 {
            held = kept(one.renew(&held), &second.to_string());
            assert!(two.take(&held, start + second * SECOND).is_none(), "after {second} s");
        }
        assert!(two.take(&held, start + 53 * SECOND).is_none());
        let taken = two.take(&held, start + 54 * SECOND).unwrap();
        assert_eq!(holder(&taken), Some(Leader { identity: two.identity, address: None }));
        assert_eq!((epoch(&held), epoch(&taken)), ("uid-0".to_owned(), "uid-1".to_owned()));
    }

    #[test]
    fn a_leader_has_an_address_only_while_its_renewals_are_seen() {
        let (one, mut two) = candidates();
        let start = Instant::now();
        let mut look = |version: &str, second: u32| {
            let held = kept(one.create(), version);
            let now = start + second * SECOND;
            assert!(two.take(&held, now).is_none());
            let leader = two.leader(&held, now).unwrap();
            assert_eq!(leader.identity, one.identity);
            leader.address.is_some()
        };
        assert!(!look("1", 0), "it may have ended long ago");
        assert!(!look("1", 2));
        assert!(look("2", 4), "its renewal was seen");
        assert!(look("2", 13));
        assert!(!look("2", 14), "it no longer leads");
        assert!(look("3", 16));
    }

    #[test]
    fn a_lease_whose_holder_has_ended_on_this_machine_is_acquired_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = candidates();
        let (one, mut two) = (one.locked_in(dir.path()), two.locked_in(dir.path()));
        let held = kept(one.create(), "1");
        assert!(two.take(&held, Instant::now()).is_none(), "it runs");
        drop(one);
        assert_eq!(epoch(&two.take(&held, Instant::now()).unwrap()), "uid-1");
        two.leads();
        assert!(two.take(&held, Instant::now()).is_none(), "a missing lock file proves nothing");
        assert!(candidates().0.locked_in(Path::new("/proc/none")).lock.is_none(), "it also works without a lock");
    }

    #[test]
    fn a_deleted_lease_is_created_at_once_only_by_those_that_saw_no_other_holder() {
        let (one, mut two) = candidates();
        let start = Instant::now();
        assert!(one.may_create(start) && two.may_create(start), "there never was one");
        let held = kept(one.create(), "1");
        assert!(two.take(&held, start).is_none());
        assert!(!two.may_create(start + 14 * SECOND), "its holder may lead until its next renewal");
        assert!(two.may_create(start + 15 * SECOND));
        assert!(two.take(&kept(one.release(&held), "2"), start + SECOND).is_some());
        assert!(two.may_create(start + SECOND), "its holder had released it");
    }

    #[test]
    fn a_new_candidate_waits_regardless_of_the_age_of_the_lease() {
        let (one, mut two) = candidates();
        let held = kept(one.create(), "7");
        assert!(two.take(&held, Instant::now()).is_none());
    }

    #[test]
    fn a_released_lease_has_no_holder_and_is_acquired_at_once() {
        let (one, mut two) = candidates();
        let held = kept(one.create(), "1");
        assert_eq!(holder(&held).unwrap().address.as_deref(), Some("https://192.0.2.1:9443"));
        let released = kept(one.release(&held), "2");
        assert_eq!(holder(&released), None);
        assert_eq!(epoch(&two.take(&released, Instant::now()).unwrap()), "uid-1");
    }

    #[test]
    fn a_lease_that_already_has_our_identity_after_a_lost_answer_is_acquired_in_a_new_epoch() {
        let (mut one, two) = candidates();
        let held = kept(one.create(), "1");
        assert_eq!(epoch(&one.take(&held, Instant::now()).unwrap()), "uid-1");
        assert!(one.holds(&held, &kept(held.clone(), "2")) && !two.holds(&held, &held));
    }
}
