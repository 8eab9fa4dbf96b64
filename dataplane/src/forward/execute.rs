//! Writes packets of flows by their plans: eight at a time where neighbours are of one family, at one offset, and get the same
//! operations; else one at a time. Then each is counted, metered and observed, in one place.
//!
//! **Invariant:** eight packets at a time leave as the same bytes as one at a time (`tests/packets/eight.rs`). A packet that
//! its buffer has no room for stays, unchanged.
//!
//! Not here: what is to be done (`plan`), and the bytes of each operation (`rewrite`).

use super::observer::{Observe, PacketFlow, PacketOutcome};
use super::plan::{Plan, operation};
use super::rewrite::outers::{self, EightOuters, OuterFamily};
use super::rewrite::translate::{EightOfFlows, NewIdentification, TranslatedEight};
use super::rewrite::{InnerPacket, Outer, encapsulate};
use crate::flow::{BackendId, Direction, FlowMode, HotFlow, HotFlows};
use crate::forward::decide::{FlowFamily, FlowTables};
use crate::fragment::Identifications;
use crate::snapshot::{ClientExits, Exit, Snapshot};
use crate::stats::{BackendCounters, COUNTER_SLOTS};
use crate::wire::head::{Head, Start, TAGGED, UNTAGGED, starts};
use crate::wire::processor::{Avx2, LANES, Lanes, Vectorised};
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

/// The packets of a part of a burst, to be written by their plans.
pub(super) struct ExecutePart<'e, 'p, 's, B, O> {
    pub(super) executor: Executor<'e, O>,
    pub(super) part: &'p mut [B],
    pub(super) plans: &'p mut [Plan<'s>],
}

impl<B: Buffer, O: Observe<B>> Vectorised for ExecutePart<'_, '_, '_, B, O> {
    type Output = ();

    #[inline(always)]
    fn run(self, avx2: Avx2) {
        let Self { mut executor, part, plans } = self;
        let ((groups, rest), (of_groups, of_rest)) = (part.as_chunks_mut(), plans.as_chunks_mut());
        for (group, plans) in groups.iter_mut().zip(of_groups) {
            if !executor.eight(avx2, group, plans) {
                executor.each(group, plans);
            }
        }
        executor.each(rest, of_rest);
    }
}

impl<O> Executor<'_, O> {
    /// Writes packets one at a time.
    #[inline(never)]
    pub(super) fn each<B: Buffer>(&mut self, part: &mut [B], plans: &mut [Plan<'_>])
    where
        O: Observe<B>,
    {
        for (buffer, plan) in part.iter_mut().zip(plans) {
            if plan.is_planned() {
                let is_written = match plan.shape.family() {
                    Shape::V4 => self.one::<u32, B>(buffer, plan),
                    _ => self.one::<u128, B>(buffer, plan),
                };
                if is_written.is_none() {
                    plan.shape.port = Shape::STAYS;
                }
            }
        }
    }

    /// Writes one packet. `None`: its buffer has no room.
    #[inline(always)]
    pub(super) fn one<A: ExecutedFamily, B: Buffer>(&mut self, buffer: &mut B, plan: &Plan<'_>) -> Option<()>
    where
        O: Observe<B>,
    {
        let (index, direction) = plan.flow.entry();
        let flow = A::hot(&mut self.tables).flows.get(index)?;
        let (shape, exit) = (plan.shape, plan.exit);
        if shape.operations & operation::ENCAPSULATE != 0 {
            into_tunnel::<A>(self.snapshot, self.identifications, buffer, plan, flow)?;
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
        self.leave::<A, B>(buffer, plan);
        Some(())
    }

    /// Counts a packet that was written, meters its flow and shows it to the observer.
    #[inline(always)]
    fn leave<A: ExecutedFamily, B: Buffer>(&mut self, buffer: &B, plan: &Plan<'_>)
    where
        O: Observe<B>,
    {
        let (index, direction) = plan.flow.entry();
        let HotFlows { flows, meters, .. } = A::hot(&mut self.tables);
        let Some(flow) = flows.get(index) else { return };
        if let Some(counters) = self.counters.get(BackendId::counter_slot(flow.backend()).index()) {
            counters.forwarded(direction == Direction::ToClient, plan.shape.packet_len);
        }
        if O::METERS {
            meters.count(index, direction, plan.shape.packet_len);
        }
        self.observer.observe(buffer, PacketOutcome::Forward(plan.exit.port), || {
            let Tuple { destination, destination_port: port, protocol, .. } =
                flow.key(Direction::ToBackend).tuple(plan.shape.protocol());
            Some(PacketFlow { vip: destination.ip(), port, protocol, backend: BackendId::unpacked(flow.backend()) })
        });
    }

    /// Writes eight packets. Returns false, and leaves them as they are, unless they all leave and get the same operations.
    #[inline(always)]
    fn eight<B: Buffer>(&mut self, avx2: Avx2, group: &mut [B; LANES], plans: &[Plan<'_>; LANES]) -> bool
    where
        O: Observe<B>,
    {
        const HOP: u8 = operation::HOP;
        const TRANSLATE: u8 = HOP | operation::TRANSLATE;
        const IPIP: u8 = HOP | operation::ENCAPSULATE;
        const GUE: u8 = IPIP | operation::IN_UDP;
        let planned = EightPlans::of(avx2, plans);
        let first = plans[0].shape;
        if !planned.agree(avx2) {
            return false;
        }
        match (first.family(), first.operations, usize::from(first.network_offset)) {
            (Shape::V4, TRANSLATE, UNTAGGED) => self.in_place::<u32, UNTAGGED, true, B>(avx2, group, plans, &planned),
            (Shape::V6, TRANSLATE, UNTAGGED) => self.in_place::<u128, UNTAGGED, true, B>(avx2, group, plans, &planned),
            (Shape::V4, TRANSLATE, TAGGED) => self.in_place::<u32, TAGGED, true, B>(avx2, group, plans, &planned),
            (Shape::V6, TRANSLATE, TAGGED) => self.in_place::<u128, TAGGED, true, B>(avx2, group, plans, &planned),
            (Shape::V4, HOP, UNTAGGED) => self.in_place::<u32, UNTAGGED, false, B>(avx2, group, plans, &planned),
            (Shape::V6, HOP, UNTAGGED) => self.in_place::<u128, UNTAGGED, false, B>(avx2, group, plans, &planned),
            (Shape::V4, IPIP, UNTAGGED) => self.into_tunnels::<u32, false, B>(avx2, group, plans, &planned),
            (Shape::V6, IPIP, UNTAGGED) => self.into_tunnels::<u128, false, B>(avx2, group, plans, &planned),
            (Shape::V4, GUE, UNTAGGED) => self.into_tunnels::<u32, true, B>(avx2, group, plans, &planned),
            (Shape::V6, GUE, UNTAGGED) => self.into_tunnels::<u128, true, B>(avx2, group, plans, &planned),
            _ => false,
        }
    }

    /// Writes eight packets where they are, with link headers of `AT` bytes before and after.
    #[inline(always)]
    fn in_place<A: ExecutedFamily, const AT: usize, const TRANSLATES: bool, B: Buffer>(
        &mut self,
        avx2: Avx2,
        group: &mut [B; LANES],
        plans: &[Plan<'_>; LANES],
        planned: &EightPlans,
    ) -> bool
    where
        O: Observe<B>,
    {
        let flows = &*A::hot(&mut self.tables).flows;
        let Some(eight) = eight_of_flows(avx2, flows, plans, planned) else { return false };
        let Some(mut starts) = starts::<AT, A::Head, _>(group) else { return false };
        if TRANSLATES {
            A::translate_eight(avx2, &eight, &mut starts, self.identifications);
        } else {
            A::lower_hop_limits(avx2, &mut starts);
        }
        for (Start { link, .. }, plan) in starts.into_iter().zip(plans) {
            if AT == UNTAGGED {
                let _ = plan.exit.write_addresses(link); // it is long enough
            } else {
                plan.exit.write_link(link);
            }
        }
        self.leave_eight::<A, B>(group, plans, AT, planned.any_padded);
        true
    }

    /// Puts outer headers before eight packets.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // bytes of headers
    fn into_tunnels<A: ExecutedFamily, const IN_UDP: bool, B: Buffer>(
        &mut self,
        avx2: Avx2,
        group: &mut [B; LANES],
        plans: &[Plan<'_>; LANES],
        planned: &EightPlans,
    ) -> bool
    where
        O: Observe<B>,
    {
        let tunnels = &self.snapshot.tunnels;
        let flows = &*A::hot(&mut self.tables).flows;
        let Some(eight) = eight_of_flows(avx2, flows, plans, planned) else { return false };
        let of_port = A::tunnel_sources(tunnels, plans[0].exit.port);
        let has_sums = || plans.iter().zip(&*group).all(|(plan, buffer)| has_inner_sum::<A>(buffer, plan));
        if eight.is_renumbered.bits() != 0 || IN_UDP && eight.is_udp.bits() != 0 && !has_sums() {
            return false;
        }
        let Some(sources) = outers::sources(of_port, plans, IN_UDP) else { return false };
        let before = outers::bytes_before(A::NETWORK, IN_UDP);
        if !outers::prepend(group, before - UNTAGGED) {
            return false;
        }
        let of = EightOuters {
            flows: eight.flows,
            exits: plans.each_ref().map(|plan| plan.exit),
            packet_lens: planned.packet_lens,
            entropy: planned.entropy,
            sources: &sources,
            has_one_source: of_port.len() == 1,
            gue: tunnels.gue_destination_port,
        };
        A::write_outers::<IN_UDP>(avx2, &of, group);
        self.leave_eight::<A, B>(group, plans, before, planned.any_padded);
        true
    }

    /// Lets eight packets leave that were written and begin `at` a byte of their frames.
    #[inline(always)]
    fn leave_eight<A: ExecutedFamily, B: Buffer>(
        &mut self,
        group: &mut [B; LANES],
        plans: &[Plan<'_>; LANES],
        at: usize,
        any_padded: bool,
    ) where
        O: Observe<B>,
    {
        if any_padded {
            for (buffer, plan) in group.iter_mut().zip(plans) {
                buffer.truncate(at + usize::from(plan.shape.packet_len));
            }
        }
        for (buffer, plan) in group.iter().zip(plans) {
            self.leave::<A, B>(buffer, plan);
        }
    }
}

/// Eight plans, a word of each in one register.
struct EightPlans {
    /// Bytes of the packets (bits 0 to 15), their offsets (16 to 23) and ports (24 to 31).
    places: Lanes,
    packet_lens: Lanes,
    /// The upper halves of hashes.
    entropy: Lanes,
    /// [`Shape::kind`] (bits 0 to 7), [`Shape::PADDED`] and [`Shape::FRAGMENTABLE`] (8 to 15), and operations (16 to 23).
    kinds: Lanes,
    /// See [`Exit::measures`].
    exits: Lanes,
    /// The first packet's family and operations, and the offset of all packets that are written together.
    first: [u32; 2],
    any_padded: bool,
}

impl EightPlans {
    #[inline(always)]
    fn of(avx2: Avx2, plans: &[Plan<'_>; LANES]) -> Self {
        let [_, entropy, places, kinds] = avx2.columns(plans.each_ref().map(Plan::row));
        let exits = avx2.lanes(plans.each_ref().map(|plan| plan.exit.measures()));
        let Shape { kind, operations, network_offset, .. } = plans[0].shape;
        let first = [u32::from(kind & Shape::FAMILY) | u32::from(operations) << 16, u32::from(network_offset)];
        let padded = avx2.splat(u32::from(Shape::PADDED) << 8);
        let any_padded = (kinds & padded).equals(avx2.splat(0)).bits() != u8::MAX;
        let packet_lens = places & avx2.splat(0xffff);
        Self { places, packet_lens, entropy, kinds, exits, first, any_padded }
    }

    /// Whether the packets all leave, are of one family, get the same operations, and have link headers of the same length
    /// before and after; those into tunnels by one port.
    #[inline(always)]
    fn agree(&self, avx2: Avx2) -> bool {
        const FAMILY_AND_OPERATIONS: u32 = 0xff << 16 | Shape::FAMILY as u32;
        let [form, offset] = self.first;
        let same_form = (self.kinds & avx2.splat(FAMILY_AND_OPERATIONS)).equals(avx2.splat(form));
        let place = (self.places & avx2.splat(0xff << 16)).equals(avx2.splat(offset << 16));
        let exit = (self.exits & avx2.splat(0xff << 24)).equals(avx2.splat(offset << 24));
        let stays = (self.places & avx2.splat(0xff << 24)).equals(avx2.splat(u32::from(Shape::STAYS) << 24));
        let is_tunnel = form & u32::from(operation::ENCAPSULATE) << 16 != 0;
        let same_port = !is_tunnel || {
            let ports = self.exits & avx2.splat(Exit::PORT);
            let [port, ..] = ports.to_array();
            ports.equals(avx2.splat(port)).bits() == u8::MAX
        };
        (same_form & place & exit).bits() == u8::MAX && stays.bits() == 0 && same_port
    }

    /// All ones for packets that have some bits of a kind, or other ones from 8 on.
    #[inline(always)]
    fn have(&self, avx2: Avx2, bits: u32) -> Lanes {
        (self.kinds & avx2.splat(bits)).equals(avx2.splat(bits))
    }
}

/// The flows of eight packets.
#[inline(always)]
fn eight_of_flows<'f, K: TupleKey>(
    avx2: Avx2,
    flows: &'f [HotFlow<K>],
    plans: &[Plan<'_>; LANES],
    planned: &EightPlans,
) -> Option<EightOfFlows<'f, K>> {
    let mut of_packets = [flows.first()?; LANES];
    let mut directions = [Direction::ToBackend; LANES];
    for (lane, plan) in plans.iter().enumerate() {
        let (index, direction) = plan.flow.entry();
        (of_packets[lane], directions[lane]) = (flows.get(index)?, direction);
    }
    let is_udp = planned.have(avx2, Shape::UDP.into());
    let is_renumbered = planned.have(avx2, u32::from(Shape::FRAGMENTABLE) << 8);
    Some(EightOfFlows { flows: of_packets, directions, is_udp, is_renumbered })
}

/// Whether the outer checksum of a packet can be computed from its head.
#[inline(always)]
fn has_inner_sum<A: ExecutedFamily>(buffer: &impl Buffer, plan: &Plan<'_>) -> bool {
    A::Head::of(buffer.bytes(), plan.shape.network_offset.into()).is_some_and(|head| A::has_inner_sum(head))
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
    plan: &Plan<'_>,
    flow: &HotFlow<A::Key>,
) -> Option<()> {
    let shape = plan.shape;
    let backend = flow.key(Direction::ToClient).tuple(shape.protocol()).source.ip();
    let mode = if shape.operations & operation::IN_UDP == 0 { FlowMode::Ipip } else { FlowMode::Gue };
    let outer = Outer::towards(backend, mode, plan.exit, plan.hash, &snapshot.tunnels)?;
    let identification = outer.identification(shape.may_fragment(), shape.protocol(), identifications);
    let inner = InnerPacket { network_offset: shape.network_offset.into(), packet_len: shape.packet_len, identification };
    encapsulate::<A>(buffer, inner, &outer, plan.exit).then_some(())
}
