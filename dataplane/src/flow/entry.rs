//! A flow as the decisions see it: both directions of a connection or exchange, and everything that a packet of it
//! needs. [`super::FlowTable`] stores it in fewer bytes.
//!
//! **Invariant:** a flow names its backend and next hop by slot, never by MAC or port, so existing flows follow changes
//! of the network.
//!
//! Not here: how flows are stored (`storage`), allocation of SNAT ports (the caller releases them when a flow ends),
//! and what ends a flow.

use std::net::SocketAddr;

use zerocopy::FromZeros;

use super::snat::{PoolId, SnatLease, TARGETS_MAX};
use super::state::{Direction, FlowMode, FlowState, Shift};
use super::tick::{Tick, Ticks};
use crate::stats::{COUNTED_BACKENDS, CounterSlot, FrontendNumber};
use crate::wire::{Address, Transport, Tuple};

/// A backend in the snapshots: its slot, and which of the slot's successive backends it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromZeros)]
#[repr(C)]
pub struct BackendId {
    /// Position in the snapshot's table of backends, below 2^17.
    pub slot: u32,
    /// Changes when the slot is given to another backend; 1 to [`BackendId::GENERATIONS`].
    pub generation: u32,
}

impl BackendId {
    const GENERATION_BITS: u32 = 11;
    /// Bits of a packed backend; above them a flow has the number of its frontend.
    const PACKED_BITS: u32 = u32::BITS - FrontendNumber::BITS;
    /// Number of distinct generations of a slot. A flow of a removed backend ends at the latest when it is swept,
    /// seconds after its last packet, long before the slot has had so many others.
    pub const GENERATIONS: u32 = (1 << Self::GENERATION_BITS) - 1;

    /// The generation after this one.
    #[must_use]
    pub const fn next_generation(generation: u32) -> u32 {
        generation % Self::GENERATIONS + 1
    }

    /// A backend of the same slot that no snapshot has: that of half a round of generations ago. A slot would have to
    /// change its backend 1,023 times while a flow has this one, which is until its next packet, or 10 s.
    #[must_use]
    pub(crate) const fn gone(self) -> Self {
        Self { slot: self.slot, generation: (self.generation + Self::GENERATIONS / 2 - 1) % Self::GENERATIONS + 1 }
    }

    /// Slot and generation in one word, which is never 0.
    #[must_use]
    #[inline(always)]
    pub(crate) const fn packed(self) -> u32 {
        self.slot << Self::GENERATION_BITS | self.generation & Self::GENERATIONS
    }

    /// The backend of a word from [`BackendId::packed`] or [`BackendId::packed_with`].
    #[must_use]
    #[inline(always)]
    pub(crate) const fn unpacked(word: u32) -> Self {
        Self { slot: Self::slot_of(Self::without_frontend(word)), generation: word & Self::GENERATIONS }
    }

    /// [`BackendId::packed`], and the number of a frontend in the bits above.
    #[inline(always)]
    pub(crate) const fn packed_with(self, frontend: FrontendNumber) -> u32 {
        (frontend.get() as u32) << Self::PACKED_BITS | self.packed()
    }

    /// The frontend of a word from [`BackendId::packed_with`].
    #[inline(always)]
    pub(crate) const fn frontend_of(word: u32) -> FrontendNumber {
        FrontendNumber::new(word >> Self::PACKED_BITS)
    }

    /// Slot and generation of a word from [`BackendId::packed_with`], in the upper bits, where one shift brings them.
    /// Never 0.
    #[inline(always)]
    pub(crate) const fn without_frontend(word: u32) -> u32 {
        word << FrontendNumber::BITS
    }

    /// The slot in the result of [`BackendId::without_frontend`].
    #[inline(always)]
    pub(crate) const fn slot_of(without_frontend: u32) -> u32 {
        without_frontend >> (FrontendNumber::BITS + Self::GENERATION_BITS)
    }

    /// Where flows with a word from [`BackendId::packed_with`] are counted.
    #[inline(always)]
    pub(crate) const fn counter_slot(word: u32) -> CounterSlot {
        CounterSlot::of_index(word >> Self::GENERATION_BITS)
    }
}

/// Number of slots of backends: as many as there may be targets.
pub(crate) const BACKEND_SLOTS: usize = 1 << 17;
const _: () = assert!(BACKEND_SLOTS == TARGETS_MAX as usize && BACKEND_SLOTS == COUNTED_BACKENDS);
const _: () = assert!(BACKEND_SLOTS << BackendId::GENERATION_BITS == 1 << BackendId::PACKED_BITS);

/// Slot number of an unknown next hop.
pub const UNRESOLVED: u32 = u32::MAX;

/// Number of distinct route epochs, 1 to this one: the epoch of a flow's route is stored in 12 bits. The sweep forgets
/// routes of other epochs, so a number is used again long after the last flow that held it.
pub const ROUTE_EPOCHS: u32 = (1 << 12) - 1;

/// The verification tags of an SCTP association (RFC 9260 section 8.5), as far as they are known; a tag is never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerificationTags {
    /// The client's tag, which packets of the backend carry; 0: unknown.
    pub client: u32,
    /// The backend's tag, which packets of the client carry; 0: unknown.
    pub backend: u32,
    /// Whether the handshake has proven both tags: the backend's INIT ACK named its own tag and carried the client's,
    /// and each end has used the tag of the other. Otherwise they are the tags of the last packets, which anybody may
    /// have sent.
    pub proven: bool,
}

/// One flow. The addresses, ports and protocol are its keys and must not change once it is inserted.
#[derive(Clone, Copy, Debug)]
pub struct Flow<A> {
    /// The client's address.
    pub client: A,
    /// The VIP that the client sends to.
    pub vip: A,
    /// The backend's address; of the other family it is 0.
    pub backend_address: A,
    /// The gateway's source address towards the backend; 0 in one-way modes.
    pub snat: A,
    /// The client's port.
    pub client_port: u16,
    /// The frontend's port.
    pub vip_port: u16,
    /// The backend's port; 0 in one-way modes.
    pub backend_port: u16,
    /// The gateway's source port towards the backend; 0 in one-way modes.
    pub snat_port: u16,
    /// The backend.
    pub backend: BackendId,
    /// The frontend, for the counters.
    pub frontend: FrontendNumber,
    /// Tick of the last packet.
    pub last_seen: Tick,
    /// When the flow was created, or entered its present yield class, or was confirmed.
    pub since: Tick,
    /// The pool that `snat_port` is returned to.
    pub snat_pool: PoolId,
    /// Next hop slot towards the client, or [`UNRESOLVED`]; valid while `route_epoch` equals that of the snapshot.
    pub route_to_client: u32,
    /// The route epoch in which `route_to_client` was looked up; 0 before that. Not kept while a handshake is under
    /// way.
    pub route_epoch: u32,
    /// Two-way TCP until the handshake is over: the sequence number of the client's SYN. A RST to the backend needs it
    /// when the flow is reclaimed (FORWARDING 3).
    pub initial_sequence: u32,
    /// The number that is awaited. In state [`FlowState::TcpAnswered`] that which acknowledges the backend's SYN, once
    /// one side has sent a FIN that which acknowledges it, see `FlowState::awaits_number`.
    pub acknowledgement: u32,
    /// Two-way flows past the handshake whose backend fails its probes: since when the client's packets are unanswered.
    pub unanswered_since: Option<Tick>,
    /// SCTP: the verification tags.
    pub tags: VerificationTags,
    /// TCP and UDP in two-way modes: the PROXY header that the backend gets. Whether there is one must not change once
    /// the flow is inserted.
    pub shift: Option<Shift>,
    /// Transport protocol number.
    pub protocol: u8,
    /// State of the flow.
    pub state: FlowState,
    /// How the flow's packets reach the backend.
    pub mode: FlowMode,
    /// Number of the client's packets while the flow is unconfirmed, in one-way modes: the third one confirms.
    pub packets: u8,
}

/// The backend of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowBackend<A> {
    /// Its slot and generation.
    pub id: BackendId,
    /// Its address and port; none in one-way modes.
    pub address: A,
    /// See `address`.
    pub port: u16,
}

impl<A: Address> Flow<A> {
    /// A flow that begins with a packet of the client, towards a backend at this address and port, with this source
    /// address and port.
    #[must_use]
    pub fn new(
        tuple: &Tuple<A>,
        state: FlowState,
        mode: FlowMode,
        backend: FlowBackend<A>,
        lease: &SnatLease<A>,
        now: Tick,
    ) -> Self {
        Self {
            client: tuple.source,
            vip: tuple.destination,
            backend_address: backend.address,
            snat: lease.address,
            client_port: tuple.source_port,
            vip_port: tuple.destination_port,
            backend_port: backend.port,
            snat_port: lease.port,
            backend: backend.id,
            frontend: FrontendNumber::NONE,
            last_seen: now,
            since: now,
            snat_pool: lease.pool,
            route_to_client: UNRESOLVED,
            route_epoch: 0,
            initial_sequence: 0,
            acknowledgement: 0,
            unanswered_since: None,
            tags: VerificationTags::default(),
            shift: None,
            protocol: tuple.protocol,
            state,
            mode,
            packets: 0,
        }
    }

    /// The tuple of the flow's packets in one direction, as they arrive.
    #[must_use]
    #[inline]
    pub fn tuple(&self, direction: Direction) -> Tuple<A> {
        let protocol = self.protocol;
        match direction {
            Direction::ToBackend => Tuple {
                source: self.client,
                destination: self.vip,
                source_port: self.client_port,
                destination_port: self.vip_port,
                protocol,
            },
            Direction::ToClient => Tuple {
                source: self.backend_address,
                destination: self.snat,
                source_port: self.backend_port,
                destination_port: self.snat_port,
                protocol,
            },
        }
    }

    /// Where the flow and its packets are counted.
    #[must_use]
    #[inline]
    pub const fn counter_slot(&self) -> CounterSlot {
        CounterSlot::new(self.backend.slot, self.frontend)
    }

    /// The SNAT port that the flow holds, if its mode needs one.
    #[must_use]
    pub fn snat_lease(&self) -> Option<SnatLease<A>> {
        let lease = SnatLease { address: self.snat, port: self.snat_port, pool: self.snat_pool };
        (self.mode == FlowMode::Nat).then_some(lease)
    }

    /// Whether its SNAT port is not of a pool of this worker: a partner sent the flow, or another worker has the other
    /// half.
    pub(crate) fn has_foreign_port(&self) -> bool {
        self.mode == FlowMode::Nat && self.snat_pool == PoolId::NONE
    }
}

/// A flow as commands show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowView {
    /// Transport protocol number.
    pub protocol: u8,
    /// The client.
    pub client: SocketAddr,
    /// The frontend.
    pub frontend: SocketAddr,
    /// The backend.
    pub backend: BackendId,
    /// Address and port of the backend; the port is 0 in one-way modes, the address too if it is of the other family.
    pub backend_address: SocketAddr,
    /// The gateway's source towards the backend, in mode `nat`.
    pub snat: Option<SocketAddr>,
    /// Its mode.
    pub mode: FlowMode,
    /// Its state.
    pub state: FlowState,
    /// Time since it began, or since it was last confirmed or answered.
    pub age: Ticks,
    /// Time since its last packet.
    pub idle: Ticks,
    /// The PROXY header that its backend gets.
    pub shift: Option<Shift>,
}

impl FlowView {
    /// The flow as it is now.
    #[must_use]
    pub fn of<A: Address>(flow: &Flow<A>, now: Tick) -> Self {
        Self {
            protocol: flow.protocol,
            client: SocketAddr::new(flow.client.ip(), flow.client_port),
            frontend: SocketAddr::new(flow.vip.ip(), flow.vip_port),
            backend: flow.backend,
            backend_address: SocketAddr::new(flow.backend_address.ip(), flow.backend_port),
            snat: flow.snat_lease().map(|lease| SocketAddr::new(lease.address.ip(), lease.port)),
            mode: flow.mode,
            state: flow.state,
            age: now.since(flow.since),
            idle: now.since(flow.last_seen),
            shift: flow.shift,
        }
    }
}

/// A new flow in a two-way mode.
pub(crate) fn flow_of<A: Address>(
    tuple: &Tuple<A>,
    transport: Transport,
    mode: FlowMode,
    backend: FlowBackend<A>,
    lease: &SnatLease<A>,
    now: Tick,
) -> Flow<A> {
    Flow::new(tuple, FlowState::first(transport, mode), mode, backend, lease, now)
}
