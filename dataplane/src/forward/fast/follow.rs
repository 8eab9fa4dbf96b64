//! The third loop of the fast way: whether the flow of a packet lets it pass, and where it leaves.
//!
//! **Invariant:** a packet that passes changes nothing of its flow but the time of the last packet.
//!
//! Not here: the bytes of packets.

use super::record::{HEAD_V4, HEAD_V6, Record};
use crate::flow::{Candidate, Direction, FlowMode, FlowTable, HotFlows, Tick, Ticks, is_plain_number};
use crate::forward::decide::FlowFamily;
use crate::snapshot::{Routes, Snapshot};
use crate::wire::{Buffer, WireKey};

/// What the decision depends on besides packets and flows.
#[derive(Clone, Copy)]
pub(super) struct Follow<'s> {
    pub(super) snapshot: &'s Snapshot,
    pub(super) now: Tick,
    /// No flow whose last packet is more recent is over.
    pub(super) shortest: Ticks,
}

/// A family whose packets the fast way takes.
pub(super) trait FastFamily: FlowFamily {
    /// [`Record::V4`] or [`Record::V6`].
    const RECORD: u8;
    /// The IP header and 20 bytes of the transport header.
    type Head: PacketHead;

    /// The addresses and ports in a head.
    fn key(head: &Self::Head) -> Self::Key;
    /// The sequence number of a TCP segment.
    fn sequence(head: &Self::Head) -> u32;
}

/// The first bytes of a packet.
pub(super) trait PacketHead: Sized {
    /// The head of the packet at an offset of a frame; `None` if it is shorter.
    fn of(frame: &[u8], offset: usize) -> Option<&Self>;
    /// As [`PacketHead::of`], to be changed.
    fn of_mut(frame: &mut [u8], offset: usize) -> Option<&mut Self>;
}

impl<const BYTES: usize> PacketHead for [u8; BYTES] {
    #[inline(always)]
    fn of(frame: &[u8], offset: usize) -> Option<&Self> {
        frame.get(offset..)?.first_chunk()
    }

    #[inline(always)]
    fn of_mut(frame: &mut [u8], offset: usize) -> Option<&mut Self> {
        frame.get_mut(offset..)?.first_chunk_mut()
    }
}

impl FastFamily for u32 {
    const RECORD: u8 = Record::V4;
    type Head = [u8; HEAD_V4];

    #[inline(always)]
    fn key(head: &Self::Head) -> WireKey<3> {
        let mut key = [0; 12];
        key.copy_from_slice(&head[12..24]);
        WireKey::<3>::read(key)
    }

    #[inline(always)]
    fn sequence(head: &Self::Head) -> u32 {
        u32::from_be_bytes([head[24], head[25], head[26], head[27]])
    }
}

impl FastFamily for u128 {
    const RECORD: u8 = Record::V6;
    type Head = [u8; HEAD_V6];

    #[inline(always)]
    fn key(head: &Self::Head) -> WireKey<9> {
        let mut key = [0; 36];
        key.copy_from_slice(&head[8..44]);
        WireKey::<9>::read(key)
    }

    #[inline(always)]
    fn sequence(head: &Self::Head) -> u32 {
        u32::from_be_bytes([head[44], head[45], head[46], head[47]])
    }
}

impl Follow<'_> {
    /// The third loop, for the packets of one family. Those that do not pass are left, and with them later packets of the
    /// same flow and direction, which must not overtake them. Flows are told apart by some bits of the hash.
    #[inline(never)]
    pub(super) fn burst<A: FastFamily, B: Buffer>(
        self,
        table: &mut FlowTable<A>,
        burst: &[B],
        records: &mut [Record],
        left: &mut u64,
    ) {
        let routes = self.snapshot.routes();
        let mut flows = table.hot_parts();
        for (buffer, record) in burst.iter().zip(records) {
            if record.family() != A::RECORD {
                continue;
            }
            let flow = 1 << (record.hash & 63);
            let mut passes = self.packet::<A>(&mut flows, routes, buffer.bytes(), record);
            if passes == Err(Stop::OtherFlow) {
                search(table, buffer.bytes(), record);
                flows = table.hot_parts();
                passes = self.packet::<A>(&mut flows, routes, buffer.bytes(), record);
            }
            if passes.is_err() || *left & flow != 0 {
                *left |= flow;
                record.leave();
            }
        }
    }

    /// Decides on one packet of its candidate, and stores how it leaves.
    #[inline(always)]
    fn packet<A: FastFamily>(
        self,
        flows: &mut HotFlows<'_, A::Key>,
        routes: &Routes,
        frame: &[u8],
        record: &mut Record,
    ) -> Result<(), Stop> {
        let (index, direction) = record.candidate.entry();
        // The index may be that of no flow, and nothing but a check tells.
        let HotFlows { flows, routes: to_clients } = flows;
        let flow = flows.get_mut(index).ok_or(Stop::OtherFlow)?;
        let head = A::Head::of(frame, record.network_offset.into()).ok_or(Stop::Left)?;
        if *flow.key(direction) != A::key(head) {
            return Err(Stop::OtherFlow);
        }
        let is_plain = is_plain_number(flow.state_number(), record.signal(), direction);
        if !is_plain || !flow.is_seen_within(self.shortest, self.now) {
            return Err(Stop::Left);
        }
        let backend = flow.backend();
        let spot = self.snapshot.backends.spot(backend).ok_or(Stop::Left)?;
        let slot = match direction {
            Direction::ToBackend => routes.slot_of(spot.next_hop(), record.hash),
            Direction::ToClient if routes.arrives_from(spot.next_hop(), record.link) => to_clients.slot(index, routes.epoch),
            Direction::ToClient => return Err(Stop::Left),
        };
        let exit = routes.exit(slot).ok_or(Stop::Left)?;
        if record.packet_len > exit.mtu || flow.mode() == FlowMode::Dsr && !spot.is_on_link() {
            return Err(Stop::Left);
        }
        (record.exit, record.backend) = (slot, backend);
        flow.see(self.now);
        Ok(())
    }
}

/// Why a packet does not pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// Its candidate is another flow, or none.
    OtherFlow,
    /// It is left.
    Left,
}

/// Searches for the flow of a packet whose candidate is of another one, with the same tag: one packet in a hundred.
#[cold]
#[inline(never)]
fn search<A: FastFamily>(table: &FlowTable<A>, frame: &[u8], record: &mut Record) {
    if record.candidate == Candidate::NONE {
        return;
    }
    let key = A::Head::of(frame, record.network_offset.into()).map(A::key);
    let found = key.and_then(|key| table.search_key(record.hash, &key, record.protocol()));
    record.candidate = found.unwrap_or(Candidate::NONE);
}
