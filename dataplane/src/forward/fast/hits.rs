//! Plans packets of live flows: whether the flow lets a packet leave, where to, and what is to be done with it.
//!
//! **Invariant:** a packet that is planned here changes nothing of its flow but the time of the last packet, and the slow path
//! would let it leave as the same bytes by the same port.
//!
//! Not here: the bytes of packets (`execute`).

use std::cell::Cell;

use super::execute::ExecutedFamily;
use super::plan::{Plan, operation};
use crate::flow::{Admission, ClientRoutes, Direction, FlowMode, HotFlow, HotFlows, Tick, Ticks};
use crate::snapshot::{ClientExits, Exit, Exits, ExitsOfFlows, Routes, Snapshot};
use crate::wire::plain::head::Head;
use crate::wire::{TupleKey, Udp};

/// Packets that change nothing of their flow.
static ADMISSION: Admission = Admission::of(&[FlowMode::Nat, FlowMode::Dnat, FlowMode::Dsr, FlowMode::Ipip, FlowMode::Gue]);

/// What is done with packets, by the number of the mode of their flow.
const OPERATIONS: [u8; 8] = {
    let mut operations = [operation::HOP; 8];
    operations[FlowMode::Nat as usize] |= operation::TRANSLATE;
    operations[FlowMode::Dnat as usize] |= operation::TRANSLATE;
    operations[FlowMode::Ipip as usize] |= operation::ENCAPSULATE;
    operations[FlowMode::Gue as usize] |= operation::ENCAPSULATE | operation::IN_UDP;
    operations
};

/// What is done with the packets of a flow.
#[inline(always)]
pub(super) fn operations_of<K: TupleKey>(flow: &HotFlow<K>) -> u8 {
    OPERATIONS[flow.mode_number()]
}

/// What became of a packet.
#[derive(Clone, Copy)]
pub(super) enum Hit<'s> {
    /// It leaves by this exit.
    Planned(&'s Exit),
    /// It stays: it has no flow here, may change it, or needs a longer look.
    Stays,
    /// The tag in the index was that of another flow.
    OtherFlow,
}

/// What plans depend on besides packets and flows.
#[derive(Clone, Copy)]
pub(super) struct Hits<'s> {
    snapshot: &'s Snapshot,
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

impl<'s> Hits<'s> {
    /// Sets `reads_routes` when the route that is stored for a flow is needed.
    pub(super) fn new(snapshot: &'s Snapshot, now: Tick, shortest: Ticks, reads_routes: &'s Cell<bool>) -> Self {
        let routes = snapshot.routes();
        let (backends, exits, client_exits) = (snapshot.backends.exits(), routes.exits(), routes.client_exits());
        Self { snapshot, backends, exits, routes, client_exits, reads_routes, now, shortest }
    }

    /// Plans one packet by its candidate.
    #[inline(always)]
    pub(super) fn plan<A: ExecutedFamily>(&self, flows: &mut HotFlows<'_, A::Key>, frame: &[u8], plan: &mut Plan) -> Hit<'s> {
        let (index, direction) = plan.flow.entry();
        let HotFlows { flows, routes: to_clients, .. } = flows;
        let Some(flow) = flows.get_mut(index) else { return Hit::Stays };
        let Some(head) = A::Head::of(frame, plan.head.shape.network_offset.into()) else { return Hit::Stays };
        if !A::has_key(head, flow.key(direction)) {
            return Hit::OtherFlow;
        }
        if !flow.is_seen_within(self.shortest, self.now) {
            return Hit::Stays;
        }
        let Some(exit) = self.exit::<A>(flow, *to_clients, plan) else { return Hit::Stays };
        let operations = operations_of(flow);
        let mut len = u32::from(plan.head.shape.packet_len);
        if operations & operation::TRANSLATE == 0 {
            // A router would send a packet for a VIP back to the gateway.
            if operations == operation::HOP && !exit.is_on_link() {
                return Hit::Stays;
            }
            if operations & operation::ENCAPSULATE != 0 {
                let Some(outer) = self.outer_bytes::<A>(flow, exit, operations) else { return Hit::Stays };
                len += u32::from(outer);
            }
        }
        if len > exit.mtu.into() {
            return Hit::Stays;
        }
        flow.see(self.now);
        plan.leaves(exit, operations);
        Hit::Planned(exit)
    }

    /// Bytes of the outer headers towards the backend of a flow; `None` where there can be none, or to the other family.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // at most 48
    fn outer_bytes<A: ExecutedFamily>(&self, flow: &HotFlow<A::Key>, exit: &Exit, operations: u8) -> Option<u16> {
        let has_ends =
            !A::tunnel_sources(&self.snapshot.tunnels, exit.port).is_empty() && !flow.key(Direction::ToClient).has_no_source();
        has_ends.then_some(A::NETWORK as u16 + if operations & operation::IN_UDP == 0 { 0 } else { Udp::BYTES })
    }

    /// Where a packet of a flow leaves, if it has the addresses and ports of the flow, this is not over, and the packet fits.
    /// `None` if it may change the flow or arrived where none may, or if anything is not known; [`Exit::NOWHERE`] while the next
    /// hop is not.
    #[inline(always)]
    pub(super) fn exit<A: ExecutedFamily>(
        &self,
        flow: &HotFlow<A::Key>,
        to_clients: ClientRoutes<'_>,
        plan: &Plan,
    ) -> Option<&'s Exit> {
        let (index, direction) = plan.flow.entry();
        if !ADMISSION.admits(flow.mode_and_state(), plan.head.shape.signal(), direction) {
            return None;
        }
        let backend = self.backends.get(flow.backend())?;
        let group = backend.group();
        if direction == Direction::ToBackend {
            return match group {
                Some(group) => self.exits.get(self.routes.first_choices.slot(group, plan.head.hash)),
                None => Some(backend),
            };
        }
        let arrives = match group {
            Some(group) => self.routes.first_choices.arrive_from(group, plan.link),
            None => backend.link == plan.link,
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
