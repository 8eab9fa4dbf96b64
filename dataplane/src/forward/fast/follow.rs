//! Whether the flow of a packet lets it pass, and where it leaves.
//!
//! **Invariant:** a packet that passes changes nothing of its flow but the time of the last packet.
//!
//! Not here: the bytes of packets (`rewrite`).

use super::record::{HEAD_V4, HEAD_V6, Record};
use crate::flow::{Direction, FlowMode, HotFlow, HotFlows, Tick, Ticks, is_plain_number};
use crate::forward::decide::FlowFamily;
use crate::snapshot::{Exit, Exits, Routes, Snapshot, Spots};
use crate::wire::{TupleKey, WireKey};

/// What the decision depends on besides packets and flows.
pub(super) struct Follow<'s> {
    pub(super) snapshot: &'s Snapshot,
    spots: Spots<'s>,
    exits: Exits<'s>,
    routes: &'s Routes,
    now: Tick,
    /// No flow whose last packet is more recent is over.
    shortest: Ticks,
}

/// A family whose packets the fast way takes.
pub(super) trait FastFamily: FlowFamily {
    /// [`Record::V4`] or [`Record::V6`].
    const RECORD: u8;
    /// The IP header and 20 bytes of the transport header.
    type Head: PacketHead;
    /// Whether keys are compared last, so that their words stay in registers until the packet is rewritten.
    const COMPARED_LAST: bool;

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
    const COMPARED_LAST: bool = true;

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
    const COMPARED_LAST: bool = false;

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

/// The packets that a loop takes.
pub(super) trait Scope {
    /// Whether those from and to behind groups of next hops are among them: looking for the member takes registers.
    const GROUPS: bool;
    /// Whether those of flows in this mode are among them.
    fn has(mode: FlowMode) -> bool;
}

/// Packets that are rewritten where they are; with `GROUPS` also those from and to behind groups of next hops.
pub(super) struct InPlace<const GROUPS: bool>;

/// Packets into tunnels; with `GROUPS` also those to behind groups of next hops.
pub(super) struct IntoTunnels<const GROUPS: bool>;

/// All packets.
pub(super) struct All;

impl<const GROUPS: bool> Scope for InPlace<GROUPS> {
    const GROUPS: bool = GROUPS;

    #[inline(always)]
    fn has(mode: FlowMode) -> bool {
        !mode.is_tunnel()
    }
}

impl<const GROUPS: bool> Scope for IntoTunnels<GROUPS> {
    const GROUPS: bool = GROUPS;

    #[inline(always)]
    fn has(mode: FlowMode) -> bool {
        mode.is_tunnel()
    }
}

impl Scope for All {
    const GROUPS: bool = true;

    #[inline(always)]
    fn has(_: FlowMode) -> bool {
        true
    }
}

/// A packet that passes: its flow, the direction, and where it leaves.
pub(super) struct Passage<'f, 's, K: TupleKey> {
    pub(super) flow: &'f HotFlow<K>,
    pub(super) direction: Direction,
    pub(super) exit: &'s Exit,
}

impl<'s> Follow<'s> {
    pub(super) fn new(snapshot: &'s Snapshot, now: Tick, shortest: Ticks) -> Self {
        let routes = snapshot.routes();
        Self { snapshot, spots: snapshot.backends.spots(), exits: routes.exits(), routes, now, shortest }
    }

    /// Decides on one packet of its candidate; `None` if it does not pass. The head is that of the packet, to be compared
    /// with the candidate, or `None` if it was compared before. Packets pass that the [`Scope`] has.
    #[inline(always)]
    pub(super) fn packet<'f, A: FastFamily, S: Scope>(
        &self,
        flows: &'f mut HotFlows<'_, A::Key>,
        head: Option<&A::Head>,
        record: &Record,
    ) -> Option<Passage<'f, 's, A::Key>> {
        let (index, direction) = record.candidate.entry();
        let HotFlows { flows, routes: to_clients, .. } = flows;
        // The compiler cannot know that candidates are positions of flows.
        let flow = flows.get_mut(index)?;
        let is_other = |flow: &HotFlow<A::Key>| head.is_some_and(|head| *flow.key(direction) != A::key(head));
        if !S::has(flow.mode()) || !A::COMPARED_LAST && is_other(flow) {
            return None;
        }
        let is_plain = is_plain_number(flow.state_number(), record.signal(), direction);
        if !is_plain || !flow.is_seen_within(self.shortest, self.now) {
            return None;
        }
        let spot = self.spots.get(flow.backend())?;
        let next_hop = spot.next_hop();
        let slot = match direction {
            Direction::ToBackend if S::GROUPS => self.routes.slot_of(next_hop, record.hash),
            Direction::ToBackend => next_hop,
            Direction::ToClient => {
                let arrives = match self.exits.get(next_hop) {
                    Some(exit) => exit.link == record.link,
                    None => S::GROUPS && self.routes.ways.arrive_from(next_hop, record.link),
                };
                if arrives { to_clients.slot(flow, index, self.routes.epoch) } else { return None }
            }
        };
        let exit = self.exits.get(slot)?;
        if record.packet_len > exit.mtu || flow.mode() == FlowMode::Dsr && !spot.is_on_link() {
            return None;
        }
        if A::COMPARED_LAST && is_other(flow) {
            return None;
        }
        flow.see(self.now);
        Some(Passage { flow, direction, exit })
    }
}
