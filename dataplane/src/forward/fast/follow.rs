//! The third loop of the fast way: whether the flow of a packet lets it pass, and where it leaves.
//!
//! **Invariant:** a packet that passes changes nothing of its flow but the time of the last packet.
//!
//! Not here: the bytes of packets.

use super::record::{HEAD_V4, HEAD_V6, Record};
use crate::flow::{Direction, FlowMode, FlowTable, HotFlows, Tick, Ticks, is_plain_number};
use crate::forward::decide::FlowFamily;
use crate::port::{BURST, Burst};
use crate::snapshot::{Routes, Snapshot};
use crate::wire::{Buffer, TupleKey, WireKey};

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
    type Head;

    /// The head of the packet at an offset of a frame.
    fn head(frame: &[u8], offset: u8) -> Option<&Self::Head>;
    /// As [`FastFamily::head`], to be changed.
    fn head_mut(frame: &mut [u8], offset: u8) -> Option<&mut Self::Head>;
    /// The addresses and ports in a head.
    fn key(head: &Self::Head) -> Self::Key;
}

impl FastFamily for u32 {
    const RECORD: u8 = Record::V4;
    type Head = [u8; HEAD_V4];

    #[inline(always)]
    fn head(frame: &[u8], offset: u8) -> Option<&Self::Head> {
        frame.get(usize::from(offset)..)?.first_chunk()
    }

    #[inline(always)]
    fn head_mut(frame: &mut [u8], offset: u8) -> Option<&mut Self::Head> {
        frame.get_mut(usize::from(offset)..)?.first_chunk_mut()
    }

    #[inline(always)]
    fn key(head: &Self::Head) -> WireKey<3> {
        let mut key = [0; 12];
        key.copy_from_slice(&head[12..24]);
        WireKey::<3>::read(key)
    }
}

impl FastFamily for u128 {
    const RECORD: u8 = Record::V6;
    type Head = [u8; HEAD_V6];

    #[inline(always)]
    fn head(frame: &[u8], offset: u8) -> Option<&Self::Head> {
        frame.get(usize::from(offset)..)?.first_chunk()
    }

    #[inline(always)]
    fn head_mut(frame: &mut [u8], offset: u8) -> Option<&mut Self::Head> {
        frame.get_mut(usize::from(offset)..)?.first_chunk_mut()
    }

    #[inline(always)]
    fn key(head: &Self::Head) -> WireKey<9> {
        let mut key = [0; 36];
        key.copy_from_slice(&head[8..44]);
        WireKey::<9>::read(key)
    }
}

impl Follow<'_> {
    /// The third loop, for the packets of one family. Those that do not pass are left, and with them later packets of the
    /// same flow and direction, which must not overtake them. Flows are told apart by some bits of the hash.
    #[inline(never)]
    pub(super) fn burst<A: FastFamily, B: Buffer>(
        self,
        table: &mut FlowTable<A>,
        burst: &Burst<B>,
        records: &mut [Record; BURST],
    ) {
        let mut flows = table.hot_parts();
        let routes = self.snapshot.routes();
        let mut left: u64 = 0;
        for (buffer, record) in burst.iter().zip(records) {
            if record.family() != A::RECORD {
                continue;
            }
            let flow = 1 << (record.hash & 63);
            if left & flow != 0 || self.packet::<A>(&mut flows, routes, buffer.bytes(), record).is_none() {
                left |= flow;
                record.leave();
            }
        }
    }

    /// Decides on one packet, and stores how it leaves.
    #[inline(always)]
    fn packet<A: FastFamily>(
        self,
        flows: &mut HotFlows<'_, A::Key>,
        routes: &Routes,
        frame: &[u8],
        record: &mut Record,
    ) -> Option<()> {
        let (index, direction) = record.candidate.entry();
        // The index may be that of no flow, and nothing but a check tells.
        let flow = flows.flows.get(index)?;
        let is_plain = is_plain_number(flow.state_number(), record.signal(), direction);
        if *flow.key(direction) != A::key(A::head(frame, record.network_offset)?)
            || !is_plain
            || !flow.is_seen_within(self.shortest, self.now)
        {
            return None;
        }
        let backend = flow.backend();
        let spot = self.snapshot.backends.spot(backend)?;
        let slot = match direction {
            Direction::ToBackend => routes.slot_of(spot.next_hop(), record.hash),
            Direction::ToClient if routes.arrives_from(spot.next_hop(), record.link) => {
                flows.route_to_client(index, routes.epoch)
            }
            Direction::ToClient => return None,
        };
        let exit = routes.exit(slot)?;
        if record.packet_len > exit.mtu || flow.mode() == FlowMode::Dsr && !spot.is_on_link() {
            return None;
        }
        (record.exit, record.backend) = (slot, backend);
        flows.flows.get_mut(index)?.see(self.now);
        Some(())
    }
}

/// The addresses and ports with which a packet of a two-way flow leaves.
#[inline(always)]
pub(super) fn sent_key<K: TupleKey>(keys: impl Fn(Direction) -> K, direction: Direction) -> K {
    keys(direction.opposite()).reversed()
}
