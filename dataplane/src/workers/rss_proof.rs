//! Whether a port's receive queue identifies the owner. It does only if the hash that the network card reports for live
//! packets equals the one that the engine computes over the same bytes, and the redirection table maps that hash to the
//! queue.
//!
//! Only plain packets are evidence. Of others (fragments, options, extension headers, two tags) cards hash less, so
//! their owner is always computed. A sender therefore cannot end the trust by what he sends.
//!
//! **Invariant:** trust ends with the first packet that contradicts it, and does not return while the gateway runs.
//!
//! Cost: each of the first [`PACKETS_FIRST`] plain packets is checked, later one in [`PACKETS_BETWEEN`].
//!
//! Not here: how a device is configured.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::id::WorkerId;

/// Number of packets that must agree before the queue is trusted. A wrong card agrees on all of them by chance once in
/// 2^64, if two queues are used and the hash is not even misreported.
const PACKETS_FIRST: u32 = 64;
/// Interval between checked packets afterwards.
const PACKETS_BETWEEN: u32 = 1024;

/// What refuted the trust in a port's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refuted {
    /// A plain TCP or UDP packet came without a hash.
    NoHash,
    /// A packet's hash is not the Toeplitz hash of its tuple.
    OtherHash,
    /// A packet arrived on another queue than its hash leads to.
    OtherQueue,
}

/// The state of the proof for one worker's receive queue of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// This many packets agreed, which is not enough yet.
    Observing {
        /// Number of packets.
        agreed: u32,
    },
    /// The queue identifies the owner.
    Proven,
    /// The queue does not identify the owner.
    Refuted(Refuted),
}

/// [`Proof`] as one atomic word, written by its worker and read by any thread. Padded, since neighbours belong to
/// different workers.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct RssProof(AtomicU64);

/// Bits above the count of packets.
const PROVEN: u64 = 1 << 32;
const REFUTED: u64 = 1 << 33;

impl RssProof {
    /// The current state.
    #[must_use]
    pub fn read(&self) -> Proof {
        match self.0.load(Ordering::Relaxed) {
            PROVEN => Proof::Proven,
            state if state & REFUTED != 0 => Proof::Refuted(match state & 3 {
                0 => Refuted::NoHash,
                1 => Refuted::OtherHash,
                _ => Refuted::OtherQueue,
            }),
            agreed => Proof::Observing { agreed: u32::try_from(agreed).unwrap_or(u32::MAX) },
        }
    }

    fn write(&self, proof: Proof) {
        let state = match proof {
            Proof::Observing { agreed } => agreed.into(),
            Proof::Proven => PROVEN,
            Proof::Refuted(Refuted::NoHash) => REFUTED,
            Proof::Refuted(Refuted::OtherHash) => REFUTED | 1,
            Proof::Refuted(Refuted::OtherQueue) => REFUTED | 2,
        };
        self.0.store(state, Ordering::Relaxed);
    }
}

/// The proof as its worker carries it out.
#[derive(Debug)]
pub(crate) struct Observer {
    shared: Arc<RssProof>,
    proof: Proof,
    /// Number of packets to skip before the next check.
    skip: u32,
}

impl Observer {
    pub(crate) fn new(shared: Arc<RssProof>) -> Self {
        Self { shared, proof: Proof::Observing { agreed: 0 }, skip: 0 }
    }

    /// Whether the worker that a packet arrives at is its owner.
    #[inline]
    pub(crate) fn trusts(&self) -> bool {
        self.proof == Proof::Proven
    }

    /// Whether the next packet is to be checked. Counts the packet.
    #[inline]
    pub(crate) fn wants(&mut self) -> bool {
        match self.skip.checked_sub(1) {
            Some(skip) => {
                self.skip = skip;
                false
            }
            None => !matches!(self.proof, Proof::Refuted(_)),
        }
    }

    /// Checks a packet that arrived at `here` with the hash `reported`; its tuple has the hash `computed`, which leads
    /// to `owner`.
    #[cold]
    pub(crate) fn look(&mut self, reported: Option<u32>, computed: u32, owner: WorkerId, here: WorkerId) {
        self.proof = match reported {
            None => Proof::Refuted(Refuted::NoHash),
            Some(hash) if hash != computed => Proof::Refuted(Refuted::OtherHash),
            Some(_) if owner != here => Proof::Refuted(Refuted::OtherQueue),
            Some(_) => match self.proof {
                Proof::Observing { agreed } if agreed + 1 < PACKETS_FIRST => Proof::Observing { agreed: agreed + 1 },
                _ => {
                    self.skip = PACKETS_BETWEEN - 1;
                    Proof::Proven
                }
            },
        };
        self.shared.write(self.proof);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: WorkerId = WorkerId(1);

    fn observer() -> (Observer, Arc<RssProof>) {
        let shared = Arc::new(RssProof::default());
        (Observer::new(Arc::clone(&shared)), shared)
    }

    #[test]
    fn a_queue_is_trusted_after_64_packets_that_agree() {
        let (mut observer, shared) = observer();
        for n in 0..PACKETS_FIRST {
            assert!(observer.wants() && !observer.trusts());
            assert_eq!(shared.read(), Proof::Observing { agreed: n });
            observer.look(Some(7), 7, HERE, HERE);
        }
        assert!(observer.trusts());
        assert_eq!(shared.read(), Proof::Proven);
    }

    #[test]
    fn one_packet_that_disagrees_ends_the_trust_for_good() {
        let rows =
            [(None, HERE, Refuted::NoHash), (Some(8), HERE, Refuted::OtherHash), (Some(7), WorkerId(0), Refuted::OtherQueue)];
        for (reported, owner, why) in rows {
            let (mut observer, shared) = observer();
            (0..PACKETS_FIRST).for_each(|_| observer.look(Some(7), 7, HERE, HERE));
            let passed = (0..2 * PACKETS_BETWEEN).position(|_| observer.wants()).unwrap();
            assert_eq!(passed, PACKETS_BETWEEN as usize - 1, "one packet in 1024 is lookup at");
            observer.look(reported, 7, owner, HERE);
            assert_eq!((observer.trusts(), shared.read()), (false, Proof::Refuted(why)));
            assert!(!observer.wants());
        }
    }
}
