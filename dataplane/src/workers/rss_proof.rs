//! Whether a network card leads packets to their owners: to the receive queue of the worker that owns their flow. It does
//! only if the hash that the card reports for live packets equals the one that the engine computes over the same bytes,
//! and the redirection table maps that hash to the queue. Each kind of packets is proven apart, since cards hash some
//! kinds and not others.
//!
//! The proof is for operators and decides nothing: owners are always computed ([`super::steering`]), so a card that fails
//! costs hand-overs, and no flow.
//!
//! Only plain packets are evidence. Of others (fragments, options, extension headers, two tags) and of other protocols
//! (SCTP, ICMP, tunnels) cards hash less, or other fields. A sender therefore cannot end a proof by what he sends.
//!
//! **Invariant:** a proof ends with the first packet that contradicts it, and begins again only with another device.
//!
//! Cost: until a kind is proven, each of its packets that takes a look at the owner is checked. Of all packets of a
//! queue, those of known flows too, one in [`SAMPLED_ONE_IN`] is checked.
//!
//! Not here: how a device is configured.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::Family;

use super::id::WorkerId;
use crate::port::BURST;
use crate::wire::{Address, protocol};

/// Number of packets that must agree before a kind is proven at a queue. A wrong card agrees on all of them by chance once
/// in 2^64, if two queues are used and the hash is not even misreported.
const PACKETS_FIRST: u16 = 64;
/// One packet in this many is checked whatever flow it belongs to. A prime, so that packets of different kinds that arrive
/// in a regular order all have their turn; more than a burst holds.
const SAMPLED_ONE_IN: usize = 1021;
const _: () = assert!(SAMPLED_ONE_IN > BURST);

/// A kind of packets that cards may spread by addresses and ports. Cards offer each apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RssKind {
    /// TCP over IPv4.
    TcpV4,
    /// UDP over IPv4.
    UdpV4,
    /// TCP over IPv6.
    TcpV6,
    /// UDP over IPv6.
    UdpV6,
}

impl RssKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::TcpV4, Self::UdpV4, Self::TcpV6, Self::UdpV6];

    /// The kind of packets of a family with this protocol number; `None` for protocols that few cards hash.
    #[inline]
    pub(crate) fn of<A: Address>(protocol_number: u8) -> Option<Self> {
        match (A::FAMILY, protocol_number) {
            (Family::V4, protocol::TCP) => Some(Self::TcpV4),
            (Family::V4, protocol::UDP) => Some(Self::UdpV4),
            (Family::V6, protocol::TCP) => Some(Self::TcpV6),
            (Family::V6, protocol::UDP) => Some(Self::UdpV6),
            _ => None,
        }
    }
}

/// What refuted the proof of a kind of packets at a port's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refuted {
    /// A plain packet came without a hash.
    NoHash,
    /// A packet's hash is not the Toeplitz hash of its tuple.
    OtherHash,
    /// A packet arrived on another queue than its hash leads to.
    OtherQueue,
}

/// The state of the proof for one kind of packets at one worker's receive queue of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// The device does not offer to hash this kind; nothing is to be proven.
    NotOffered,
    /// This many packets agreed, which is not enough yet.
    Observing {
        /// Number of packets, below 64.
        agreed: u16,
    },
    /// The queue is that of the owner.
    Proven,
    /// The queue is not that of the owner.
    Refuted(Refuted),
}

/// Bits of a state in the word of [`RssProof`], and its values; below them is a count of packets.
const STATE_BITS: usize = 16;
const PROVEN: u16 = 0x100;
const NOT_OFFERED: u16 = 0x101;
const NO_HASH: u16 = 0x200;
const OTHER_HASH: u16 = 0x201;
const OTHER_QUEUE: u16 = 0x202;

impl Proof {
    const fn to_bits(self) -> u16 {
        match self {
            Self::Observing { agreed } => agreed,
            Self::Proven => PROVEN,
            Self::NotOffered => NOT_OFFERED,
            Self::Refuted(Refuted::NoHash) => NO_HASH,
            Self::Refuted(Refuted::OtherHash) => OTHER_HASH,
            Self::Refuted(Refuted::OtherQueue) => OTHER_QUEUE,
        }
    }

    const fn from_bits(bits: u16) -> Self {
        match bits {
            PROVEN => Self::Proven,
            NOT_OFFERED => Self::NotOffered,
            NO_HASH => Self::Refuted(Refuted::NoHash),
            OTHER_HASH => Self::Refuted(Refuted::OtherHash),
            OTHER_QUEUE => Self::Refuted(Refuted::OtherQueue),
            agreed => Self::Observing { agreed },
        }
    }
}

/// The [`Proof`] of each kind in one atomic word, written by its worker, and by the thread that attaches devices; read by any
/// thread. Padded, since neighbours belong to different workers. At first all kinds are to be proven.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct RssProof(AtomicU64);

impl RssProof {
    /// A proof for a device that offers to hash these kinds.
    #[must_use]
    pub fn of(offered: &[RssKind]) -> Self {
        let proof = Self::default();
        proof.restart(offered);
        proof
    }

    /// Begins the proof again, of another device, which offers to hash these kinds.
    pub fn restart(&self, offered: &[RssKind]) {
        let state = |kind: &RssKind| match offered.contains(kind) {
            true => Proof::Observing { agreed: 0 },
            false => Proof::NotOffered,
        };
        let word = RssKind::ALL.iter().fold(0, |word, kind| word | u64::from(state(kind).to_bits()) << shift(*kind));
        self.0.store(word, Ordering::Relaxed);
    }

    /// The current state of a kind.
    #[must_use]
    pub fn read(&self, kind: RssKind) -> Proof {
        state_in(self.0.load(Ordering::Relaxed), kind)
    }

    /// Changes the state of a kind. A proof that begins again meanwhile stays as it begins.
    fn change(&self, kind: RssKind, change: impl FnOnce(Proof) -> Proof) {
        let word = self.0.load(Ordering::Relaxed);
        let others = word & !(u64::from(u16::MAX) << shift(kind));
        let changed = others | u64::from(change(state_in(word, kind)).to_bits()) << shift(kind);
        if changed != word {
            let _ = self.0.compare_exchange(word, changed, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

const fn shift(kind: RssKind) -> usize {
    kind as usize * STATE_BITS
}

#[allow(clippy::cast_possible_truncation)] // the low bits
const fn state_in(word: u64, kind: RssKind) -> Proof {
    Proof::from_bits((word >> shift(kind)) as u16)
}

/// The proof as its worker carries it out.
#[derive(Debug)]
pub(crate) struct Observer {
    shared: Arc<RssProof>,
    /// Number of packets before the next one that is sampled.
    until_sample: usize,
}

impl Observer {
    pub(crate) fn new(shared: Arc<RssProof>) -> Self {
        Self { shared, until_sample: SAMPLED_ONE_IN - 1 }
    }

    /// Whether each packet of this kind is to be checked that takes a look at the owner.
    #[inline]
    pub(crate) fn observes(&self, kind: RssKind) -> bool {
        matches!(self.shared.read(kind), Proof::Observing { .. })
    }

    /// Counts the packets of a burst; the position of the one to be sampled, if one is.
    #[inline]
    pub(crate) fn sample(&mut self, packets: usize) -> Option<usize> {
        let at = self.until_sample;
        if at < packets {
            self.until_sample = at + SAMPLED_ONE_IN - packets;
            return Some(at);
        }
        self.until_sample -= packets;
        None
    }

    /// Checks a packet of this kind that arrived at `here` with the hash `reported`; its tuple has the hash `computed`, which
    /// leads to `owner`.
    #[cold]
    pub(crate) fn look(&self, kind: RssKind, reported: Option<u32>, computed: u32, owner: WorkerId, here: WorkerId) {
        self.shared.change(kind, |before| match (before, reported) {
            (Proof::NotOffered | Proof::Refuted(_), _) => before,
            (_, None) => Proof::Refuted(Refuted::NoHash),
            (_, Some(hash)) if hash != computed => Proof::Refuted(Refuted::OtherHash),
            _ if owner != here => Proof::Refuted(Refuted::OtherQueue),
            (Proof::Observing { agreed }, _) if agreed + 1 < PACKETS_FIRST => Proof::Observing { agreed: agreed + 1 },
            _ => Proof::Proven,
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HERE: WorkerId = WorkerId(1);
    const KIND: RssKind = RssKind::TcpV4;

    fn observer() -> (Observer, Arc<RssProof>) {
        let shared = Arc::new(RssProof::default());
        (Observer::new(Arc::clone(&shared)), shared)
    }

    fn prove(observer: &Observer, kind: RssKind) {
        (0..PACKETS_FIRST).for_each(|_| observer.look(kind, Some(7), 7, HERE, HERE));
    }

    #[test]
    fn a_kind_is_proven_after_64_packets_that_agree_and_no_other_kind_with_it() {
        let (observer, shared) = observer();
        for agreed in 0..PACKETS_FIRST {
            assert!(observer.observes(KIND));
            assert_eq!(shared.read(KIND), Proof::Observing { agreed });
            observer.look(KIND, Some(7), 7, HERE, HERE);
        }
        assert_eq!((shared.read(KIND), observer.observes(KIND)), (Proof::Proven, false));
        for other in [RssKind::UdpV4, RssKind::TcpV6, RssKind::UdpV6] {
            assert_eq!(shared.read(other), Proof::Observing { agreed: 0 }, "{other:?}");
        }
    }

    #[test]
    fn one_packet_that_disagrees_ends_the_proof_of_its_kind_until_another_device_comes() {
        let rows =
            [(None, HERE, Refuted::NoHash), (Some(8), HERE, Refuted::OtherHash), (Some(7), WorkerId(0), Refuted::OtherQueue)];
        for (reported, owner, why) in rows {
            let (observer, shared) = observer();
            prove(&observer, KIND);
            prove(&observer, RssKind::UdpV6);
            observer.look(KIND, reported, 7, owner, HERE);
            assert_eq!((shared.read(KIND), shared.read(RssKind::UdpV6)), (Proof::Refuted(why), Proof::Proven));
            prove(&observer, KIND);
            assert_eq!(shared.read(KIND), Proof::Refuted(why));
            shared.restart(&[KIND]);
            assert_eq!((shared.read(KIND), shared.read(RssKind::UdpV6)), (Proof::Observing { agreed: 0 }, Proof::NotOffered));
            prove(&observer, KIND);
            prove(&observer, RssKind::UdpV6);
            assert_eq!((shared.read(KIND), shared.read(RssKind::UdpV6)), (Proof::Proven, Proof::NotOffered));
        }
    }

    proptest! {
        #[test]
        fn one_packet_in_1021_is_sampled_however_they_are_spread_over_bursts(bursts in prop::collection::vec(1..=BURST, 1..400)) {
            let (mut observer, _) = observer();
            let (mut before, mut sampled) = (0, Vec::new());
            for packets in bursts {
                if let Some(at) = observer.sample(packets) {
                    prop_assert!(at < packets);
                    sampled.push(before + at);
                }
                before += packets;
            }
            let expected: Vec<usize> = (1..).map(|n| n * SAMPLED_ONE_IN - 1).take_while(|at| *at < before).collect();
            prop_assert_eq!(sampled, expected);
        }
    }
}
