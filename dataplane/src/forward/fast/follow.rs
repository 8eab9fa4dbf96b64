//! Whether the flow of a packet lets it pass, and where it leaves.
//!
//! **Invariant:** a packet that passes changes nothing of its flow but the time of the last packet.
//!
//! Not here: the bytes of packets (`rewrite`).

use std::cell::Cell;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::record::{HEAD_V4, HEAD_V6, Record};
use crate::flow::{Admission, ClientRoutes, Direction, FlowMode, HotFlow, HotFlows, Tick, Ticks};
use crate::forward::decide::FlowFamily;
use crate::snapshot::{ClientExits, Exit, Exits, ExitsOfFlows, Routes, Snapshot};
use crate::wire::{TupleKey, WireKey};

/// What the decision depends on besides packets and flows.
#[derive(Clone, Copy)]
pub(super) struct Follow<'s> {
    pub(super) snapshot: &'s Snapshot,
    backends: ExitsOfFlows<'s>,
    exits: Exits<'s>,
    routes: &'s Routes,
    client_exits: ClientExits<'s>,
    /// Whether the route that is stored for any flow was needed. Not here, so that the compiler may keep the rest in registers.
    reads_routes: &'s Cell<bool>,
    pub(super) now: Tick,
    /// No flow whose last packet is more recent is over.
    pub(super) shortest: Ticks,
}

/// A family whose packets the fast path takes.
pub(super) trait FastFamily: FlowFamily {
    /// [`Record::V4`] or [`Record::V6`].
    const RECORD: u8;
    /// The IP header and 20 bytes of the transport header.
    type Head: PacketHead;
    /// Whether keys are compared last, so that their words stay in registers until the packet is rewritten.
    const COMPARED_LAST: bool;

    /// The addresses and ports in a head.
    fn key(head: &Self::Head) -> Self::Key;
    /// Whether those in a head are those of a key.
    fn has_key(head: &Self::Head, key: &Self::Key) -> bool;
    /// The sequence number of a TCP segment.
    fn sequence(head: &Self::Head) -> u32;
    /// The exit towards the client with the source address of a key, if that can be known without the flow.
    fn exit_to_client<'s>(exits: ClientExits<'s>, to_backend: &Self::Key) -> Option<&'s Exit>;
}

/// The first bytes of a packet.
pub(super) trait PacketHead: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned {
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
        WireKey::<3>::read_at(head, 12)
    }

    /// By two branches, so that no word needs to be kept for the second.
    #[inline(always)]
    fn has_key(head: &Self::Head, key: &WireKey<3>) -> bool {
        let ((addresses, ports), (of_flow, ports_of_flow)) = (Self::key(head).halves(), key.halves());
        addresses == of_flow && ports == ports_of_flow
    }

    #[inline(always)]
    fn sequence(head: &Self::Head) -> u32 {
        u32::from_be_bytes([head[24], head[25], head[26], head[27]])
    }

    #[inline(always)]
    fn exit_to_client<'s>(exits: ClientExits<'s>, to_backend: &WireKey<3>) -> Option<&'s Exit> {
        exits.get(to_backend.source())
    }
}

impl FastFamily for u128 {
    const RECORD: u8 = Record::V6;
    type Head = [u8; HEAD_V6];
    const COMPARED_LAST: bool = false;

    #[inline(always)]
    fn key(head: &Self::Head) -> WireKey<9> {
        WireKey::<9>::read_at(head, 8)
    }

    #[inline(always)]
    fn has_key(head: &Self::Head, key: &WireKey<9>) -> bool {
        Self::key(head) == *key
    }

    #[inline(always)]
    fn sequence(head: &Self::Head) -> u32 {
        u32::from_be_bytes([head[44], head[45], head[46], head[47]])
    }

    /// The flow has it in the same line as the key.
    #[inline(always)]
    fn exit_to_client<'s>(_: ClientExits<'s>, _: &WireKey<9>) -> Option<&'s Exit> {
        None
    }
}

/// The packets that a loop takes. What a loop does not take, it needs no registers for.
pub(super) trait Scope {
    /// Those of flows in some modes that change nothing of their flow.
    const ADMISSION: &'static Admission;
    /// Whether those from and to behind groups of next hops are among them.
    const GROUPS: bool;
    /// Whether addresses and ports of all of them are rewritten, of some or of none.
    const REWRITES: Rewrites;
}

/// The packets of a loop that leaves them where they are in their buffers.
pub(super) trait InPlaceScope: Scope {
    /// Whether those with VLAN tags, or to a link with them, are among them.
    const TAGS: bool;
    /// Whether those that get other identifications, since routers may fragment them, are among them.
    const FRAGMENTABLE: bool;
}

/// See [`Scope::REWRITES`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rewrites {
    All,
    Some,
    None,
}

/// Packets whose addresses and ports are rewritten. All untagged ones that must not be fragmented, with one next hop; and
/// those of the kinds in the set of [`GROUPS`], [`TAGS`] and [`FRAGMENTABLE`].
pub(super) struct Translated<const KINDS: u8>;

/// Packets to backends that accept the VIP, likewise.
pub(super) struct Direct<const KINDS: u8>;

/// Packets into tunnels; with `GROUPS_TOO` also those to behind groups of next hops.
pub(super) struct IntoTunnels<const GROUPS_TOO: bool>;

/// All packets.
pub(super) struct All;

/// See [`Scope::GROUPS`].
pub(super) const GROUPS: u8 = 1;
/// See [`InPlaceScope::TAGS`].
pub(super) const TAGS: u8 = 2;
/// See [`InPlaceScope::FRAGMENTABLE`].
pub(super) const FRAGMENTABLE: u8 = 4;

/// All of them.
pub(super) const EVERY_KIND: u8 = GROUPS | TAGS | FRAGMENTABLE;

static TRANSLATED: Admission = Admission::of(&[FlowMode::Nat, FlowMode::Dnat]);
static DIRECT: Admission = Admission::of(&[FlowMode::Dsr]);
static INTO_TUNNELS: Admission = Admission::of(&[FlowMode::Ipip, FlowMode::Gue]);
static ALL: Admission = Admission::of(&[FlowMode::Nat, FlowMode::Dnat, FlowMode::Dsr, FlowMode::Ipip, FlowMode::Gue]);

impl<const KINDS: u8> Scope for Translated<KINDS> {
    const ADMISSION: &'static Admission = &TRANSLATED;
    const GROUPS: bool = KINDS & GROUPS != 0;
    const REWRITES: Rewrites = Rewrites::All;
}

impl<const KINDS: u8> InPlaceScope for Translated<KINDS> {
    const TAGS: bool = KINDS & TAGS != 0;
    const FRAGMENTABLE: bool = KINDS & FRAGMENTABLE != 0;
}

impl<const KINDS: u8> Scope for Direct<KINDS> {
    const ADMISSION: &'static Admission = &DIRECT;
    const GROUPS: bool = KINDS & GROUPS != 0;
    const REWRITES: Rewrites = Rewrites::None;
}

impl<const KINDS: u8> InPlaceScope for Direct<KINDS> {
    const TAGS: bool = KINDS & TAGS != 0;
    const FRAGMENTABLE: bool = false; // identifications stay
}

impl<const GROUPS_TOO: bool> Scope for IntoTunnels<GROUPS_TOO> {
    const ADMISSION: &'static Admission = &INTO_TUNNELS;
    const GROUPS: bool = GROUPS_TOO;
    const REWRITES: Rewrites = Rewrites::None;
}

impl Scope for All {
    const ADMISSION: &'static Admission = &ALL;
    const GROUPS: bool = true;
    const REWRITES: Rewrites = Rewrites::Some;
}

/// A loop of the fast path that rewrites packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ForwardLoop {
    #[default]
    Translated,
    Direct,
    IntoTunnels,
    Others,
}

/// What is remembered of one burst for the next one of its port.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::forward) struct LastBurst {
    /// The families that were recognised.
    pub(super) families: u8,
    /// Whether the route that is stored for any flow was needed, so that those of the next burst should be prefetched.
    pub(super) reads_routes: bool,
    /// Whether the last packet was recognised and had one VLAN tag.
    pub(super) is_tagged: bool,
    /// Whether many packets, of those that arrived at the port, belonged to other workers.
    pub(super) has_others: bool,
    /// For each family, the loop that took most of its packets in the last part.
    pub(super) most: [ForwardLoop; 2],
}

/// A packet that passes: its flow, the direction, and where it leaves.
pub(super) struct Passage<'f, 's, K: TupleKey> {
    pub(super) flow: &'f HotFlow<K>,
    pub(super) direction: Direction,
    pub(super) exit: &'s Exit,
}

impl<'s> Follow<'s> {
    /// Sets `reads_routes` when the route that is stored for a flow is needed.
    pub(super) fn new(snapshot: &'s Snapshot, (now, shortest): (Tick, Ticks), reads_routes: &'s Cell<bool>) -> Self {
        let routes = snapshot.routes();
        let (backends, exits, client_exits) = (snapshot.backends.exits(), routes.exits(), routes.client_exits());
        Self { snapshot, backends, exits, routes, client_exits, reads_routes, now, shortest }
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
        let is_other = |flow: &HotFlow<A::Key>| head.is_some_and(|head| !A::has_key(head, flow.key(direction)));
        if !A::COMPARED_LAST && is_other(flow) {
            return None;
        }
        if !self.admits::<A, S>(flow, record, direction) || !flow.is_seen_within(self.shortest, self.now) {
            return None;
        }
        let exit = self.exit::<A, S>(flow, *to_clients, record)?;
        if record.shape.packet_len > exit.mtu {
            return None;
        }
        if A::COMPARED_LAST && is_other(flow) {
            return None;
        }
        flow.see(self.now);
        Some(Passage { flow, direction, exit })
    }

    /// Whether the packet changes nothing of its flow, as far as state and flags tell.
    #[inline(always)]
    pub(super) fn admits<A: FastFamily, S: Scope>(&self, flow: &HotFlow<A::Key>, record: &Record, direction: Direction) -> bool {
        S::ADMISSION.admits(flow.mode_and_state(), record.signal(), direction)
    }

    /// Where a packet of a flow leaves, if it is not longer than the MTU. `None` if it arrived where none may, or if anything
    /// is not known; [`Exit::NOWHERE`] while the next hop is not.
    #[inline(always)]
    pub(super) fn exit<A: FastFamily, S: Scope>(
        &self,
        flow: &HotFlow<A::Key>,
        to_clients: ClientRoutes<'_>,
        record: &Record,
    ) -> Option<&'s Exit> {
        let (index, direction) = record.candidate.entry();
        let backend = self.backends.get(flow.backend())?;
        let group = if S::GROUPS { backend.group() } else { None };
        if direction == Direction::ToBackend {
            let may_be_direct = S::REWRITES != Rewrites::All;
            if may_be_direct && flow.mode() == FlowMode::Dsr && !backend.is_on_link() {
                return None;
            }
            return match group {
                Some(group) => self.exits.get(self.routes.first_choices.slot(group, record.hash)),
                None => Some(backend),
            };
        }
        let arrives = match group {
            Some(group) => self.routes.first_choices.arrive_from(group, record.link),
            None => backend.link == record.link,
        };
        if !arrives {
            return None;
        }
        A::exit_to_client(self.client_exits, flow.key(Direction::ToBackend)).or_else(|| {
            self.reads_routes.set(true);
            self.exits.get(to_clients.slot(flow, index, self.routes.epoch))
        })
    }
}
