//! Packets that other workers own. What the first loops found out about a packet tells its owner too, so it is handed
//! over without a second look at its headers: before flows are looked up where most packets are of other workers
//! ([`Engine::keep_own`]), otherwise if no flow was found ([`Engine::keep_or_hand_over`]).
//!
//! **Invariant:** the owner is that which the slow path would find, and a packet is compared at most once here with the
//! queue that it came by.
//!
//! Not here: the owner function and the queues (`workers`); packets that the first loop did not recognise, and those of
//! which a tag of the index looked like that of a flow (`forward::sort`).

use std::mem;

use super::follow::{FastFamily, LastBurst, PacketHead};
use super::record::{FramesSoFar, PART_MAX, Recognise, Record};
use super::unrecognised::UnrecognisedAddresses;
use crate::flow::Candidate;
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::sort::{observe_plain, other_owner};
use crate::port::{Arrival, BURST, Burst, Origin, Port, PortIndex};
use crate::snapshot::Snapshot;
use crate::wire::{Address, Buffer, Ethernet, Tuple, TupleKey};
use crate::workers::{HandoverTask, Peers, WorkerId};

/// What a burst was before packets of other workers were taken out.
#[derive(Clone, Copy)]
pub(super) struct RecognisedBurst {
    /// The kinds of all packets together.
    pub(super) kinds: u8,
    /// Whether the last packet was recognised and had one VLAN tag.
    pub(super) is_tagged: bool,
}

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// Whether packets that arrived so may be of other workers.
    #[inline(always)]
    pub(super) fn may_be_of_others(&mut self, arrival: Arrival) -> bool {
        self.peers_for(arrival).is_some()
    }

    /// Whether fragments of some flows met at other workers, of packets that arrived so.
    #[inline(always)]
    pub(super) fn has_fragmented(&mut self, arrival: Arrival) -> bool {
        self.peers_for(arrival).is_some_and(|peers| peers.fragmented_flows().has_any(arrival.now_ns))
    }

    /// Leaves the packets of such flows: they go the way of the fragments.
    #[inline(never)]
    pub(super) fn leave_fragmented(&mut self, records: &mut [Record], now_ns: u64) {
        let Some(peers) = &mut self.egress.peers else { return };
        let flows = peers.fragmented_flows();
        for record in records.iter_mut().filter(|record| record.family() != 0) {
            if flows.meets_at(record.hash, now_ns).is_some() {
                record.leave();
            }
        }
    }

    /// Recognises the packets of a burst, and hands those of other workers over before anything else is done for them. So
    /// what is left in the burst, in order, and its records are packets of this worker, but for those behind one that was not
    /// recognised: they must not overtake it.
    #[inline(never)]
    pub(super) fn keep_own(
        &mut self,
        (snapshot, arrival, last_burst): (&Snapshot, Arrival, LastBurst),
        (recognise, frames): (Recognise<'_>, &mut FramesSoFar),
        burst: &mut Burst<P::Buffer>,
        records: &mut [Record],
    ) -> RecognisedBurst {
        let (mut kinds, recognise) = (0, recognise.without_tags());
        for start in (0..burst.len()).step_by(PART_MAX) {
            let [end, next_end] = [1, 2].map(|parts| burst.len().min(start + parts * PART_MAX));
            kinds |= self.recognise_part(last_burst, (recognise, frames), (burst, records), [start..end, end..next_end]);
        }
        if frames.any_unrecognised {
            UnrecognisedAddresses::none().hold_back(burst, records);
        }
        if self.has_fragmented(arrival) {
            let received = burst.len();
            self.leave_fragmented(&mut records[..received], arrival.now_ns);
        }
        let recognised = RecognisedBurst { kinds, is_tagged: Record::ends_tagged(&records[..burst.len()]) };
        let owners = self.other_owners(snapshot, arrival, burst, records);
        let mut kept = 0;
        for ((at, buffer), owner) in mem::take(burst).into_iter().enumerate().zip(owners) {
            match owner {
                None => {
                    records[kept] = records[at];
                    kept += 1;
                    burst.push(buffer);
                }
                Some(owner) => self.egress.hand_over(owner, HandoverTask::Decide, arrival, buffer, &mut self.tally),
            }
        }
        recognised
    }

    /// The other workers that get the packets of a burst, up to the first that was not recognised.
    #[inline(always)]
    fn other_owners(
        &mut self,
        snapshot: &Snapshot,
        arrival: Arrival,
        burst: &Burst<P::Buffer>,
        records: &[Record],
    ) -> [Option<WorkerId>; BURST] {
        let mut owners = [None; BURST];
        let known = burst.iter().zip(records).take_while(|(_, record)| record.family() != 0);
        let known = owners.iter_mut().zip(known);
        match self.peers_for(arrival) {
            Some(peers) if !peers.looks_at_queue(arrival.link.port()) => {
                for (owner, (buffer, record)) in known {
                    *owner = match record.family() {
                        Record::V4 => other_owner_of::<u32, _>(peers, snapshot, buffer, record),
                        _ => other_owner_of::<u128, _>(peers, snapshot, buffer, record),
                    };
                }
            }
            _ => known.for_each(|(owner, (buffer, record))| *owner = self.owner(snapshot, arrival, buffer, record)),
        }
        owners
    }

    /// Hands a recognised packet that has no flow here to the worker that owns it. Returns the packet if that is this one,
    /// or if it takes a longer look to tell.
    #[inline(never)]
    pub(super) fn keep_or_hand_over(
        &mut self,
        snapshot: &Snapshot,
        arrival: Arrival,
        buffer: P::Buffer,
        record: &Record,
    ) -> Option<P::Buffer> {
        let owner = if record.candidate == Candidate::NONE { self.owner(snapshot, arrival, &buffer, record) } else { None };
        let Some(owner) = owner else { return Some(buffer) };
        self.egress.hand_over(owner, HandoverTask::Decide, arrival, buffer, &mut self.tally);
        None
    }

    /// The other worker that gets a packet; `None` for one of this worker, or one that was not recognised.
    #[inline(always)]
    fn owner(&mut self, snapshot: &Snapshot, arrival: Arrival, buffer: &P::Buffer, record: &Record) -> Option<WorkerId> {
        match record.family() {
            Record::V4 => self.owner_of::<u32>(snapshot, arrival, buffer, record),
            Record::V6 => self.owner_of::<u128>(snapshot, arrival, buffer, record),
            _ => None,
        }
    }

    #[inline(always)]
    fn owner_of<A: FastFamily>(
        &mut self,
        snapshot: &Snapshot,
        arrival: Arrival,
        buffer: &P::Buffer,
        record: &Record,
    ) -> Option<WorkerId> {
        let tuple = tuple_of::<A>(buffer, record)?;
        let owner = other_owner(self.peers_for(arrival)?, snapshot, (&tuple, record.hash))?;
        self.observe_queue(arrival, buffer, record, &tuple);
        Some(owner)
    }

    /// The other worker that owns the flow of a recognised packet; `None` if this one does.
    #[inline(never)] // so that a single worker does not pay for it
    pub(super) fn other_owner<A: Address>(
        &mut self,
        snapshot: &Snapshot,
        arrival: Arrival,
        record: &Record,
        tuple: &Tuple<A>,
    ) -> Option<WorkerId> {
        other_owner(self.peers_for(arrival)?, snapshot, (tuple, record.hash))
    }

    /// Compares the queue that a packet came by with its owner, if its kind is not proven yet: for packets that are not left
    /// in the burst.
    #[inline(always)]
    pub(super) fn observe_queue<A: Address>(&mut self, arrival: Arrival, buffer: &P::Buffer, record: &Record, tuple: &Tuple<A>) {
        if let Some(peers) = self.peers_for(arrival) {
            observe_plain(peers, arrived_at(record), buffer, tuple);
        }
    }

    /// The other workers, if packets that arrived so may be theirs.
    #[inline(always)]
    fn peers_for(&mut self, arrival: Arrival) -> Option<&mut Peers<P::Buffer>> {
        self.egress.peers.as_mut().filter(|_| arrival.origin == Origin::Port)
    }
}

/// Addresses, ports and protocol of a recognised packet.
#[inline(always)]
fn tuple_of<A: FastFamily>(buffer: &impl Buffer, record: &Record) -> Option<Tuple<A>> {
    Some(A::key(A::Head::of(buffer.bytes(), record.shape.network_offset.into())?).tuple(record.protocol()))
}

/// The other worker that owns the flow of a recognised packet; `None` if this one does.
#[inline(always)]
fn other_owner_of<A: FastFamily, B: Buffer>(
    peers: &Peers<B>,
    snapshot: &Snapshot,
    buffer: &B,
    record: &Record,
) -> Option<WorkerId> {
    other_owner(peers, snapshot, (&tuple_of::<A>(buffer, record)?, record.hash))
}

/// The port by which a packet came, and its bytes of VLAN tags.
fn arrived_at(record: &Record) -> (PortIndex, u16) {
    (record.link.port(), u16::from(record.shape.network_offset).saturating_sub(Ethernet::BYTES))
}
