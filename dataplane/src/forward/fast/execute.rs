//! Writes packets of flows by their plans, one at a time; then each is counted, metered and observed, in one place.
//!
//! **Invariant:** a packet that its buffer has no room for stays, and its bytes up to the end of the packet are unchanged:
//! only padding behind it may be gone.
//!
//! Not here: what is to be done (`plan`), the bytes of each operation (`rewrite`), and eight packets at a time (`eight`).

use super::plan::{Plan, operation};
use crate::flow::{BackendId, Direction, FlowMode, HotFlow, HotFlows};
use crate::forward::decide::{FlowFamily, FlowTables};
use crate::forward::engine::Engine;
use crate::forward::observer::{Observe, PacketFlow, PacketOutcome};
use crate::forward::rewrite::outers::OuterFamily;
use crate::forward::rewrite::translate::{NewIdentification, TranslatedEight};
use crate::forward::rewrite::{InnerPacket, Outer, encapsulate};
use crate::fragment::Identifications;
use crate::port::{Port, PortIndex};
use crate::snapshot::{ClientExits, Exit, Snapshot};
use crate::stats::{BackendCounters, COUNTER_SLOTS};
use crate::wire::plain::head::Head;
use crate::wire::{Address, Buffer, Shape, Tuple, TupleKey, WireKey};

/// What packets read of the flows of both families.
pub(super) struct HotTables<'t> {
    pub(super) v4: HotFlows<'t, WireKey<3>>,
    pub(super) v6: HotFlows<'t, WireKey<9>>,
}

impl<'t> HotTables<'t> {
    /// With the meters of flows, if these are wanted.
    #[inline(always)]
    pub(super) fn of(tables: &'t mut FlowTables, metered: bool) -> Self {
        Self { v4: tables.v4.hot_parts(metered), v6: tables.v6.hot_parts(metered) }
    }
}

/// A family whose packets are planned and executed.
pub(super) trait ExecutedFamily: FlowFamily + TranslatedEight + OuterFamily {
    /// The flows of the family.
    fn hot<'h, 't>(tables: &'h mut HotTables<'t>) -> &'h mut HotFlows<'t, Self::Key>;
    /// The exit towards the client with the source address of a key, if that can be known without the flow.
    fn exit_to_client<'s>(exits: ClientExits<'s>, to_backend: &Self::Key) -> Option<&'s Exit>;
}

impl ExecutedFamily for u32 {
    #[inline(always)]
    fn hot<'h, 't>(tables: &'h mut HotTables<'t>) -> &'h mut HotFlows<'t, WireKey<3>> {
        &mut tables.v4
    }

    #[inline(always)]
    fn exit_to_client<'s>(exits: ClientExits<'s>, to_backend: &WireKey<3>) -> Option<&'s Exit> {
        exits.get(to_backend.source())
    }
}

impl ExecutedFamily for u128 {
    #[inline(always)]
    fn hot<'h, 't>(tables: &'h mut HotTables<'t>) -> &'h mut HotFlows<'t, WireKey<9>> {
        &mut tables.v6
    }

    /// The flow has it in the same line as the key.
    #[inline(always)]
    fn exit_to_client<'s>(_: ClientExits<'s>, _: &WireKey<9>) -> Option<&'s Exit> {
        None
    }
}

/// What the execution of plans needs.
pub(super) struct Executor<'e, O> {
    pub(super) snapshot: &'e Snapshot,
    pub(super) tables: HotTables<'e>,
    pub(super) counters: &'e [BackendCounters; COUNTER_SLOTS],
    pub(super) identifications: &'e mut Identifications,
    pub(super) observer: &'e mut O,
}

/// The executor of a worker.
#[inline(always)]
pub(super) fn executor<'e, P: Port, O: Observe<P::Buffer>>(
    engine: &'e mut Engine<P, O>,
    snapshot: &'e Snapshot,
) -> Executor<'e, O> {
    Executor {
        snapshot,
        tables: HotTables::of(&mut engine.flows.tables, O::METERS),
        counters: engine.output.counters.all_slots(),
        identifications: &mut engine.identifications,
        observer: &mut engine.output.observer,
    }
}

impl<O> Executor<'_, O> {
    /// Writes one packet. `None`: its buffer has no room.
    #[inline(always)]
    pub(super) fn one<A: ExecutedFamily, B: Buffer>(&mut self, buffer: &mut B, plan: &Plan, exit: &Exit) -> Option<()>
    where
        O: Observe<B>,
    {
        let (index, direction) = plan.flow.entry();
        let flow = A::hot(&mut self.tables).flows.get(index)?;
        let shape = plan.shape;
        if shape.operations & operation::ENCAPSULATE != 0 {
            into_tunnel::<A>(self.snapshot, self.identifications, buffer, plan, exit, flow)?;
        } else {
            let (network, transport) = A::parts(framed::<A>(buffer, exit, shape.network_offset.into())?);
            if shape.operations & operation::TRANSLATE == 0 {
                A::lower_hop_limit(network);
            } else {
                let replies = flow.key(direction.opposite());
                let identification = identification(self.identifications, replies, shape);
                let change = || flow.change_of_sum(direction);
                A::translate(network, transport, replies, change, shape.is_udp(), identification);
            }
            if shape.is_padded() {
                buffer.truncate(exit.link_bytes() + usize::from(shape.packet_len));
            }
        }
        count(self.counters, flow, direction, shape.packet_len);
        self.show::<A, B>(buffer, plan);
        Some(())
    }

    /// Meters the flow of a packet that was written and shows it to the observer.
    #[inline(always)]
    pub(super) fn show<A: ExecutedFamily, B: Buffer>(&mut self, buffer: &B, plan: &Plan)
    where
        O: Observe<B>,
    {
        let (index, direction) = plan.flow.entry();
        let HotFlows { flows, meters, .. } = A::hot(&mut self.tables);
        let Some(flow) = flows.get(index) else { return };
        if O::METERS {
            meters.count(index, direction, plan.shape.packet_len);
        }
        self.observer.observe(buffer, PacketOutcome::Forward(PortIndex(plan.shape.port)), || {
            let Tuple { destination, destination_port: port, protocol, .. } =
                flow.key(Direction::ToBackend).tuple(plan.shape.protocol());
            Some(PacketFlow { vip: destination.ip(), port, protocol, backend: BackendId::unpacked(flow.backend()) })
        });
    }
}

/// Counts a packet that leaves.
#[inline(always)]
pub(super) fn count<K: TupleKey>(
    counters: &[BackendCounters; COUNTER_SLOTS],
    flow: &HotFlow<K>,
    direction: Direction,
    packet_len: u16,
) {
    if let Some(counters) = counters.get(BackendId::counter_slot(flow.backend()).index()) {
        counters.forwarded(direction == Direction::ToClient, packet_len);
    }
}

/// The new identification of a packet that may be fragmented on its way: the gateway's own, since packets of many clients
/// have one source (RFC 6864 section 5.3). It is sent in the opposite direction to `replies`.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // of IPv4 16 bits
fn identification<K: TupleKey<Address: Address>>(
    identifications: &mut Identifications,
    replies: &K,
    shape: Shape,
) -> NewIdentification {
    NewIdentification(shape.may_fragment().then(|| {
        let Tuple { source, destination, protocol, .. } = replies.tuple(shape.protocol());
        identifications.next(destination, source, protocol) as u16
    }))
}

/// Puts the link header of the exit before the packet at an offset. Returns the head of the packet.
#[inline(always)]
fn framed<'b, A: ExecutedFamily>(buffer: &'b mut impl Buffer, exit: &Exit, offset: usize) -> Option<&'b mut A::Head> {
    let wanted = exit.link_bytes();
    match wanted.checked_sub(offset) {
        Some(0) => {}
        // A received frame has room for tags.
        Some(more) => buffer.prepend(more).then_some(())?,
        None => buffer.trim_front(offset - wanted),
    }
    let frame = buffer.bytes_mut();
    exit.write_link(frame);
    A::Head::of_mut(frame, wanted)
}

/// Encapsulates a packet towards the backend of its flow.
#[inline(never)]
fn into_tunnel<A: ExecutedFamily>(
    snapshot: &Snapshot,
    identifications: &mut Identifications,
    buffer: &mut impl Buffer,
    plan: &Plan,
    exit: &Exit,
    flow: &HotFlow<A::Key>,
) -> Option<()> {
    let shape = plan.shape;
    let backend = flow.key(Direction::ToClient).tuple(shape.protocol()).source.ip();
    let mode = if shape.operations & operation::IN_UDP == 0 { FlowMode::Ipip } else { FlowMode::Gue };
    let outer = Outer::towards(backend, mode, exit, plan.hash, &snapshot.tunnels)?;
    let identification = outer.identification(shape.may_fragment(), shape.protocol(), identifications);
    let inner = InnerPacket { network_offset: shape.network_offset.into(), packet_len: shape.packet_len, identification };
    encapsulate::<A>(buffer, inner, &outer, exit).then_some(())
}
