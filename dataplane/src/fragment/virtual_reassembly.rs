//! Datagrams that arrive in fragments: the decision on the first fragment, which the others follow, and the fragments
//! that arrived before it.
//!
//! **Invariant:** memory is reserved at construction; a lookup costs one set of [`WAYS`] entries. The oldest entry is
//! evicted: a flood of fragments shortens the time that a datagram may take, but never blocks new ones. Waiting
//! fragments leave within [`LIFE_NS`] of their arrival.
//!
//! Not here: reassembly. Fragments are forwarded as fragments.

use super::header::Datagram;
use super::waiting::{EarlyFragments, PER_WORKER, Queue};
use crate::port::Arrival;
use crate::stats::DropReason;
use crate::wire::{Address, Transport, TupleHash};
use crate::workers::WorkerId;

/// How long a datagram is remembered after its last fragment, and a fragment waits for the first one, ns. The fragments
/// of a datagram leave their sender together; at 2 s apart they would amount to 6 kbit/s.
pub(crate) const LIFE_NS: u64 = 2_000_000_000;
/// Number of datagrams in a set.
const WAYS: usize = 8;
/// Number of sets. 512 * 8 = 4,096 datagrams at once, 96 bytes each: 384 KiB.
const SETS: usize = 512;
/// Maximum number of fragments of one datagram that wait for the first one: 64 KiB at an MTU of 1,280 are 53, plus some
/// room.
pub(crate) const PER_DATAGRAM: u16 = 64;

/// The decision on a first fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaterFragments {
    /// It is forwarded like the packets with these ports.
    Follow { source_port: u16, destination_port: u16, protocol: u8, transport: Transport, identification: u32 },
    /// It was handed over to this worker, its owner.
    Elsewhere(WorkerId),
    /// It goes to the Linux kernel.
    Linux,
    /// It is dropped.
    Drop(DropReason),
}

/// The decision on a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DatagramState {
    Nothing,
    /// Only later fragments have arrived, or the first one waits for its next hop.
    Early,
    Decided(LaterFragments),
}

#[derive(Clone, Copy, Debug)]
struct DatagramEntry {
    source: u128,
    destination: u128,
    identification: u32,
    /// IPv6 has identifications of its own.
    is_v6: bool,
    protocol: u8,
    /// Fragments that wait for the first one.
    waiting: Queue,
    state: DatagramState,
    seen_ns: u64,
}

const EMPTY: DatagramEntry = DatagramEntry {
    source: 0,
    destination: 0,
    identification: 0,
    is_v6: false,
    protocol: 0,
    waiting: Queue::EMPTY,
    state: DatagramState::Nothing,
    seen_ns: 0,
};

/// The entry of a datagram, valid from one call to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(usize);

/// A fragment that waits for the first one.
#[derive(Debug)]
pub(crate) struct EarlyFragment<B> {
    pub(crate) buffer: B,
    /// How it arrived.
    pub(crate) arrival: Arrival,
    slot: Slot,
    deadline_ns: u64,
}

/// The datagrams of one worker, and the waiting fragments.
#[derive(Debug)]
pub(crate) struct Datagrams<B> {
    hash: TupleHash,
    entries: Box<[DatagramEntry]>,
    early: EarlyFragments<EarlyFragment<B>>,
}

impl<B> Datagrams<B> {
    /// An empty table. `seed` is secret, so that no sender can choose datagrams that share a set with a victim's.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            hash: TupleHash::new(seed.rotate_left(17)),
            entries: vec![EMPTY; SETS * WAYS].into_boxed_slice(),
            early: EarlyFragments::new(),
        }
    }

    /// Number of waiting fragments.
    pub(crate) fn waiting(&self) -> usize {
        self.early.len()
    }

    /// The entry of a known datagram.
    ///
    /// The datagram is unknown: the entry that it may [`Self::take`] once no fragments wait there.
    pub(crate) fn find<A: Address>(&mut self, datagram: &Datagram<A>, now_ns: u64) -> Result<Slot, Slot> {
        let is_same = |entry: &DatagramEntry| {
            entry.state != DatagramState::Nothing
                && entry.source == datagram.source.wide()
                && entry.destination == datagram.destination.wide()
                && (entry.identification, entry.protocol) == (datagram.identification, datagram.protocol)
                && entry.is_v6 == (A::BYTES != 4)
        };
        #[allow(clippy::cast_possible_truncation)] // the lower bits suffice
        let first = self.hash.hash(&datagram.tuple()) as usize % SETS * WAYS;
        let set = &mut self.entries[first..first + WAYS];
        match set.iter().position(|entry| is_same(entry) && !is_over(entry, now_ns)) {
            Some(way) => {
                set[way].seen_ns = now_ns;
                Ok(Slot(first + way))
            }
            None => {
                let oldest = (0..WAYS).min_by_key(|&way| (set[way].state != DatagramState::Nothing, set[way].seen_ns));
                Err(Slot(first + oldest.unwrap_or(0)))
            }
        }
    }

    /// The drop reason of fragments that wait in an entry which another datagram takes.
    pub(crate) fn reason_to_go(&self, slot: Slot, now_ns: u64) -> DropReason {
        if is_over(&self.entries[slot.0], now_ns) { DropReason::FragmentTimeout } else { DropReason::FragmentTableFull }
    }

    /// Assigns an entry to a datagram.
    pub(crate) fn take<A: Address>(&mut self, slot: Slot, datagram: &Datagram<A>, now_ns: u64) {
        self.entries[slot.0] = DatagramEntry {
            source: datagram.source.wide(),
            destination: datagram.destination.wide(),
            identification: datagram.identification,
            is_v6: A::BYTES != 4,
            protocol: datagram.protocol,
            waiting: Queue::EMPTY,
            state: DatagramState::Early,
            seen_ns: now_ns,
        };
    }

    /// The decision on the first fragment, if it has arrived.
    pub(crate) fn later(&self, slot: Slot) -> Option<LaterFragments> {
        match self.entries[slot.0].state {
            DatagramState::Decided(later) => Some(later),
            DatagramState::Nothing | DatagramState::Early => None,
        }
    }

    /// Stores the decision on the first fragment.
    pub(crate) fn decide(&mut self, slot: Slot, later: LaterFragments) {
        self.entries[slot.0].state = DatagramState::Decided(later);
    }

    /// Queues a fragment. Returns one that does not fit: the fragment itself when too many of its datagram wait,
    /// otherwise the oldest of all.
    pub(crate) fn keep(&mut self, buffer: B, arrival: Arrival, slot: Slot) -> Option<B> {
        if self.entries[slot.0].waiting.len() >= PER_DATAGRAM {
            return Some(buffer);
        }
        let oldest = if self.early.len() >= PER_WORKER { self.pop() } else { None };
        let early = EarlyFragment { buffer, arrival, slot, deadline_ns: arrival.now_ns.saturating_add(LIFE_NS) };
        match self.early.push(&mut self.entries[slot.0].waiting, early) {
            Ok(()) => oldest.map(|early| early.buffer),
            Err(refused) => Some(refused.buffer), // never: the oldest made room
        }
    }

    /// Takes the next fragment that waits for the first of this datagram, in the order of arrival.
    pub(crate) fn release(&mut self, slot: Slot) -> Option<EarlyFragment<B>> {
        self.early.pop(&mut self.entries[slot.0].waiting)
    }

    /// Takes the next fragment that has waited for too long.
    pub(crate) fn expired(&mut self, now_ns: u64) -> Option<EarlyFragment<B>> {
        if self.early.oldest()?.deadline_ns > now_ns {
            return None;
        }
        self.pop()
    }

    fn pop(&mut self) -> Option<EarlyFragment<B>> {
        let slot = self.early.oldest()?.slot;
        self.release(slot)
    }
}

const fn is_over(entry: &DatagramEntry, now_ns: u64) -> bool {
    now_ns.saturating_sub(entry.seen_ns) >= LIFE_NS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(now_ns: u64) -> Arrival {
        Arrival {
            link: crate::port::PortIndex(0).into(),
            tags: crate::wire::Tags::NONE,
            now_ns,
            origin: crate::port::Origin::Port,
        }
    }

    const DROP: LaterFragments = LaterFragments::Drop(DropReason::NoFlow);

    fn datagram(identification: u32) -> Datagram<u32> {
        Datagram { source: 0xc633_6407, destination: 0xc000_0265, identification, protocol: 17 }
    }

    /// Claims an entry for a datagram; returns it and the fragments that it evicted.
    fn claim<A: Address>(datagrams: &mut Datagrams<u32>, datagram: &Datagram<A>, now_ns: u64) -> (Slot, Vec<(u32, DropReason)>) {
        datagrams.find(datagram, now_ns).map_or_else(
            |slot| {
                let reason = datagrams.reason_to_go(slot, now_ns);
                let gone = std::iter::from_fn(|| datagrams.release(slot)).map(|early| (early.buffer, reason)).collect();
                datagrams.take(slot, datagram, now_ns);
                (slot, gone)
            },
            |slot| (slot, Vec::new()),
        )
    }

    #[test]
    fn a_datagram_is_remembered_for_two_seconds_after_its_last_fragment() {
        let mut datagrams = Datagrams::<u32>::new(7);
        let (slot, _) = claim(&mut datagrams, &datagram(1), 0);
        assert_eq!(datagrams.later(slot), None);
        datagrams.decide(slot, DROP);
        let (slot, _) = claim(&mut datagrams, &datagram(1), LIFE_NS - 1);
        assert_eq!(datagrams.later(slot), Some(DROP));
        let (slot, _) = claim(&mut datagrams, &datagram(1), 2 * LIFE_NS - 2);
        assert_eq!(datagrams.later(slot), Some(DROP));
        let (slot, _) = claim(&mut datagrams, &datagram(1), 3 * LIFE_NS);
        assert_eq!(datagrams.later(slot), None);
    }

    #[test]
    fn every_field_that_identifies_a_datagram_counts() {
        let mut datagrams = Datagrams::<u32>::new(7);
        let (slot, _) = claim(&mut datagrams, &datagram(1), 0);
        datagrams.decide(slot, DROP);
        let one = datagram(1);
        let widened = Datagram {
            source: u128::from(one.source),
            destination: u128::from(one.destination),
            identification: 1,
            protocol: 17,
        };
        for other in [
            Datagram { source: 1, ..one },
            Datagram { destination: 1, ..one },
            Datagram { protocol: 6, ..one },
            Datagram { identification: 2, ..one },
        ] {
            let (slot, _) = claim(&mut datagrams, &other, 0);
            assert_eq!(datagrams.later(slot), None);
        }
        let (slot, _) = claim(&mut datagrams, &widened, 0);
        assert_eq!(datagrams.later(slot), None);
    }

    #[test]
    fn the_oldest_of_a_full_set_is_evicted_with_its_waiting_fragments() {
        let mut datagrams = Datagrams::<u32>::new(7);
        let mut gone = Vec::new();
        for n in 0..100_000_u32 {
            let (slot, went) = claim(&mut datagrams, &datagram(n), u64::from(n));
            gone.extend(went);
            if n < 10 {
                assert!(datagrams.keep(n, at(u64::from(n)), slot).is_none());
            }
        }
        gone.sort_unstable();
        let expected: Vec<_> = (0..10).map(|n| (n, DropReason::FragmentTableFull)).collect();
        assert_eq!(gone, expected);
        assert_eq!(datagrams.waiting(), 0);
    }

    /// The shortest of several measurements of the time to queue and release the maximum number of fragments of one
    /// datagram while `others` earlier ones wait.
    fn shortest_release_ns(others: u32) -> u128 {
        let mut datagrams = Datagrams::new(7);
        for n in 0..others {
            let (slot, _) = claim(&mut datagrams, &datagram(1000 + n), 0);
            assert_eq!(datagrams.keep(n, at(0), slot), None);
        }
        let (slot, _) = claim(&mut datagrams, &datagram(1), 0);
        let measure = |_| {
            let start = std::time::Instant::now();
            for n in 0..u32::from(PER_DATAGRAM) {
                assert_eq!(datagrams.keep(n, at(0), slot), None);
            }
            let released = std::iter::from_fn(|| datagrams.release(slot)).count();
            assert_eq!(released, usize::from(PER_DATAGRAM));
            start.elapsed().as_nanos()
        };
        (0..200).map(measure).min().unwrap_or(0)
    }

    #[test]
    fn releasing_a_fragment_costs_the_same_however_many_others_wait() {
        // Searching all waiting fragments would take some fifty times as long.
        let (alone, among_others) = (shortest_release_ns(0), shortest_release_ns(900));
        assert!(among_others <= 8 * alone.max(1), "{among_others} ns among 900 others, {alone} ns alone");
    }

    #[test]
    fn fragments_wait_in_order_within_bounds() {
        let mut datagrams = Datagrams::new(7);
        let (slot, _) = claim(&mut datagrams, &datagram(1), 0);
        for n in 0..u32::from(PER_DATAGRAM) {
            assert_eq!(datagrams.keep(n, at(0), slot), None);
        }
        assert_eq!(datagrams.keep(999, at(0), slot), Some(999), "64 of one datagram");
        let mut refused = Vec::new();
        for n in 1000..2000 {
            let (slot, _) = claim(&mut datagrams, &datagram(n), 1);
            refused.extend(datagrams.keep(n, at(1), slot));
        }
        assert_eq!(refused, (0..40).collect::<Vec<_>>(), "the oldest of 1,024");
        let released: Vec<u32> = std::iter::from_fn(|| datagrams.release(slot)).map(|early| early.buffer).collect();
        assert_eq!(released, (40..64).collect::<Vec<_>>());
        assert!(datagrams.expired(LIFE_NS).is_none());
        let expired: Vec<u32> = std::iter::from_fn(|| datagrams.expired(LIFE_NS + 1)).map(|early| early.buffer).collect();
        assert_eq!(expired, (1000..2000).collect::<Vec<_>>());
        assert_eq!(datagrams.waiting(), 0);
    }
}
