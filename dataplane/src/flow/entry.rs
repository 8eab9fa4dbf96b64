//! The entry of a flow. One entry holds both directions of a connection or exchange, and everything that a packet of it
//! needs.
//!
//! **Invariant:** for IPv4, a hit costs two cache misses, one line of tags and one entry, both prefetched a burst
//! ahead. It writes only `last_seen`, and only when the tick changes. An entry names its backend and next hop by slot,
//! never by MAC or port, so existing flows follow changes of the network.
//!
//! Not here: allocation of SNAT ports (the caller releases them when a flow ends), and what ends a flow.

use zerocopy::FromZeros;

use super::snat::{PoolId, SnatLease};
use super::state::{Direction, FlowMode, FlowState};
use super::tick::Tick;
use crate::wire::checksum::{Deltas, delta};
use crate::wire::{Address, Transport, Tuple};

/// A backend in the snapshots: its slot, and which of the slot's successive backends it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromZeros)]
#[repr(C)]
pub struct BackendId {
    /// Position in the snapshot's table of backends.
    pub slot: u32,
    /// Increases when the slot is given to another backend.
    pub generation: u32,
}

/// Slot number of an unknown next hop.
pub const UNRESOLVED: u32 = u32::MAX;

/// One flow. 64 bytes for IPv4, 128 for IPv6. The addresses, ports and protocol are its keys and must not change once
/// it is inserted.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C, align(64))]
pub struct Flow<A: FromZeros> {
    /// The client's address.
    pub client: A,
    /// The VIP that the client sends to.
    pub vip: A,
    /// The backend's address.
    pub backend_address: A,
    /// The gateway's source address towards the backend.
    pub snat: A,
    /// The client's port.
    pub client_port: u16,
    /// The frontend's port.
    pub vip_port: u16,
    /// The backend's port.
    pub backend_port: u16,
    /// The gateway's source port towards the backend.
    pub snat_port: u16,
    /// The backend.
    pub backend: BackendId,
    /// Tick of the last packet.
    pub last_seen: Tick,
    /// The pool that `snat_port` is returned to.
    pub snat_pool: PoolId,
    /// Next hop slot towards the client, or [`UNRESOLVED`]; valid while `route_epoch` equals that of the snapshot.
    pub route_to_client: u32,
    /// The route epoch in which `route_to_client` was looked up.
    pub route_epoch: u32,
    /// Change of the IP header checksum towards the backend, in ones' complement.
    pub l3_delta: u16,
    /// Change of the transport checksum towards the backend, in ones' complement.
    pub l4_delta: u16,
    /// The sequence number of the client's SYN while the flow is opening (`nat`); a RST to the backend needs it when
    /// the flow is reclaimed (FORWARDING 3). Later see [`Flow::unanswered_since`].
    pub initial_sequence: u32,
    /// The tick in which the flow was created. For two-way TCP, once confirmed, the tick of the confirmation; in state
    /// [`FlowState::TcpAnswered`], the acknowledgement number that will confirm it.
    pub opened: u32,
    /// Transport protocol number; 0 marks a free entry.
    pub protocol: u8,
    /// State of the flow.
    pub state: FlowState,
    /// How the flow's packets reach the backend.
    pub mode: FlowMode,
    /// Number of the client's packets while the flow is unconfirmed, in one-way modes: the third one confirms. In
    /// two-way modes see [`Flow::unanswered_since`].
    pub packets: u8,
}

const _: () = assert!(size_of::<Flow<u32>>() == 64 && size_of::<Flow<u128>>() == 128);

impl<A: Address> Flow<A> {
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

    /// For a two-way flow past its opening whose backend fails its probes: the time since which the client's packets
    /// are unanswered.
    #[must_use]
    pub fn unanswered_since(&self) -> Option<Tick> {
        (self.mode.is_two_way() && self.packets > 0).then_some(Tick(self.initial_sequence))
    }

    /// Sets that time; `None` when an answer came.
    pub fn set_unanswered_since(&mut self, since: Option<Tick>) {
        self.packets = u8::from(since.is_some());
        if let Some(since) = since {
            self.initial_sequence = since.0;
        }
    }

    /// The SNAT port that the flow holds, if its mode needs one.
    #[must_use]
    pub fn snat_lease(&self) -> Option<SnatLease<A>> {
        let lease = SnatLease { address: self.snat, port: self.snat_port, pool: self.snat_pool };
        (self.mode == FlowMode::Nat).then_some(lease)
    }

    /// Whether a packet with this tuple goes in this direction of the flow. Without branches: directions alternate, and
    /// a misprediction would cost more than the whole comparison.
    #[inline(always)]
    pub(crate) fn matches(&self, tuple: &Tuple<A>, direction: Direction) -> bool {
        let of_flow = self.tuple(direction);
        (of_flow.source == tuple.source)
            & (of_flow.destination == tuple.destination)
            & (of_flow.source_port == tuple.source_port)
            & (of_flow.destination_port == tuple.destination_port)
            & (of_flow.protocol == tuple.protocol)
    }
}

/// The entry of a new flow in a two-way mode.
#[allow(clippy::too_many_arguments, reason = "an entry is made of so many")]
pub(crate) fn flow_of<A: Address>(
    tuple: &Tuple<A>,
    transport: Transport,
    mode: FlowMode,
    (backend_address, backend_port): (A, u16),
    id: BackendId,
    lease: &SnatLease<A>,
    now: Tick,
) -> Flow<A> {
    let sent = Tuple {
        source: lease.address,
        destination: backend_address,
        source_port: lease.port,
        destination_port: backend_port,
        protocol: tuple.protocol,
    };
    let Deltas { l3, l4 } = delta(tuple, &sent);
    Flow {
        client: tuple.source,
        vip: tuple.destination,
        backend_address,
        snat: lease.address,
        client_port: tuple.source_port,
        vip_port: tuple.destination_port,
        backend_port: sent.destination_port,
        snat_port: lease.port,
        backend: id,
        last_seen: now,
        snat_pool: lease.pool,
        route_to_client: UNRESOLVED,
        route_epoch: 0,
        l3_delta: l3,
        l4_delta: l4,
        initial_sequence: 0,
        opened: now.0,
        mode,
        packets: 0,
        protocol: tuple.protocol,
        state: FlowState::first(transport, mode),
    }
}
