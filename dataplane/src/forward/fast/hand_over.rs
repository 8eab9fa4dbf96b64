//! Packets that other workers own. What the first loops found out about a packet tells its owner too, so it is handed
//! over without a second look at its headers.
//!
//! **Invariant:** the owner is that which the slow path would find, and a packet is checked at most once against the
//! queue that it came by.
//!
//! Not here: the owner function and the queues (`workers`); packets that the first loop did not recognise, and those of
//! which a tag of the index looked like that of a flow (`forward::sort`).

use super::follow::{FastFamily, PacketHead};
use super::record::Record;
use crate::flow::Candidate;
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::sort::{check_plain, other_owner};
use crate::port::{Arrival, Origin, Port, PortIndex};
use crate::snapshot::Snapshot;
use crate::wire::{Address, Buffer, Ethernet, Tuple, TupleKey};
use crate::workers::{HandoverTask, Peers, WorkerId};

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
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
        let owner = match record.family() {
            _ if record.candidate != Candidate::NONE => None,
            Record::V4 => self.owner_of::<u32>(snapshot, arrival, &buffer, record),
            Record::V6 => self.owner_of::<u128>(snapshot, arrival, &buffer, record),
            _ => None,
        };
        let Some(owner) = owner else { return Some(buffer) };
        self.egress.hand_over(owner, HandoverTask::Decide, arrival, buffer, &mut self.tally);
        None
    }

    fn owner_of<A: FastFamily>(
        &mut self,
        snapshot: &Snapshot,
        arrival: Arrival,
        buffer: &P::Buffer,
        record: &Record,
    ) -> Option<WorkerId> {
        let tuple = A::key(A::Head::of(buffer.bytes(), record.shape.network_offset.into())?).tuple(record.protocol());
        let owner = self.other_owner(snapshot, arrival, record, &tuple)?;
        self.check_queue(arrival, buffer, record, &tuple);
        Some(owner)
    }

    /// The other worker that owns the flow of a recognised packet; `None` if this one does.
    #[inline(always)]
    pub(super) fn other_owner<A: Address>(
        &mut self,
        snapshot: &Snapshot,
        arrival: Arrival,
        record: &Record,
        tuple: &Tuple<A>,
    ) -> Option<WorkerId> {
        other_owner(self.peers_for(arrival)?, snapshot, arrived_at(record), (tuple, record.hash))
    }

    /// Compares the queue that a packet came by with its owner: for packets that are not left in the burst.
    #[inline(always)]
    pub(super) fn check_queue<A: Address>(&mut self, arrival: Arrival, buffer: &P::Buffer, record: &Record, tuple: &Tuple<A>) {
        if let Some(peers) = self.peers_for(arrival) {
            check_plain(peers, arrived_at(record), buffer, tuple);
        }
    }

    /// The other workers, if packets that arrived so may be theirs.
    #[inline(always)]
    fn peers_for(&mut self, arrival: Arrival) -> Option<&mut Peers<P::Buffer>> {
        self.egress.peers.as_mut().filter(|_| arrival.origin == Origin::Port)
    }
}

/// The port by which a packet came, and its bytes of VLAN tags.
fn arrived_at(record: &Record) -> (PortIndex, u16) {
    (record.link.port(), u16::from(record.shape.network_offset).saturating_sub(Ethernet::BYTES))
}
