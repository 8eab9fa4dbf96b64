//! Lets packets leave that were decided on: rewrites and sends them, in fragments if they do not fit.
//!
//! Not here: the bytes (`rewrite`), and packets that the fast path writes (`fast::execute`).

use proto::Family;

use crate::flow::{Direction, Flow, FlowIndex};
use crate::forward::decide::{DirectForward, FlowFamily, NatForward};
use crate::forward::engine::Engine;
use crate::forward::observer::{Observe, PacketFlow, PacketOutcome};
use crate::forward::rewrite;
use crate::forward::rewrite::{InnerPacket, encapsulate, rewrite_of};
use crate::fragment::{Identifications, split};
use crate::port::{Burst, Port};
use crate::snapshot::{Exit, Snapshot};
use crate::stats::{CounterSlot, DropReason};
use crate::wire::{Address, Buffer, Headers, Ipv4, Tags, Transport, take};

/// How a packet leaves that was decided on.
struct Departure<'s> {
    exit: &'s Exit,
    /// Tags that the frame gets; none if it has those of the exit.
    tags: Tags,
    counter: CounterSlot,
    /// The flow that it is a packet of.
    metered: Option<FlowIndex>,
    direction: Direction,
    belongs: PacketFlow,
}

/// Rewrites a packet by its flow and sends it. An IPv4 packet that may be fragmented gets an identification of the
/// gateway and is fragmented if necessary; on a tagged link the tags are added.
#[inline(never)]
pub(in crate::forward) fn forward_nat<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    mut buffer: P::Buffer,
    headers: &Headers<A>,
    nat: NatForward<'_>,
) {
    let flow = engine.flows.table::<A>().get(nat.flow);
    rewrite::whole(buffer.bytes_mut(), headers, &rewrite_of(&flow, nat.direction, nat.exit));
    let hidden = rewrite::hide_addresses(buffer.bytes_mut(), headers);
    if hidden > 0 {
        engine.output.counters.sctp_hidden_addresses.add(hidden.into());
    }
    if A::FAMILY == Family::V4 && !headers.dont_fragment {
        renumber(&mut engine.identifications, &mut buffer, headers);
    }
    send_split(engine, snapshot, buffer, headers, &flow, nat);
}

/// Sends a rewritten packet, in fragments if it does not fit. Fragments after the first count as originated, since
/// the packet became the first.
pub(in crate::forward) fn send_split<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    mut buffer: P::Buffer,
    headers: &Headers<A>,
    flow: &Flow<A>,
    nat: NatForward<'_>,
) {
    let NatForward { direction, exit, flow: index } = nat;
    let mut rest = Burst::new();
    trim(&mut buffer, headers);
    if headers.packet_len > exit.mtu {
        match split(&mut buffer, usize::from(headers.network_offset), exit.mtu, || engine.output.egress.allocate(exit.port)) {
            Some(pieces) => rest = pieces,
            None => return engine.output.drop_of_service(snapshot, buffer, headers, DropReason::TooBig),
        }
    }
    let belongs = PacketFlow { vip: flow.vip.ip(), port: flow.vip_port, protocol: flow.protocol, backend: flow.backend };
    // An ICMP error concerns a flow and is not a packet of it.
    let metered = Some(index).filter(|_| !matches!(headers.transport, Transport::Icmp { .. }));
    let tags = exit.link.tags();
    let departure = Departure { exit, tags, counter: flow.counter_slot(), metered, direction, belongs };
    depart::<A, _, _>(engine, buffer, headers.packet_len, &departure);
    for piece in rest {
        engine.output.originate(exit.port, tags, piece);
    }
}

/// Lets a packet leave that was decided on and written: counts it, meters its flow, shows it to the observer and sends it.
fn depart<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    buffer: P::Buffer,
    packet_len: u16,
    departure: &Departure<'_>,
) {
    let &Departure { exit, tags, counter, metered, direction, belongs } = departure;
    engine.output.counters.forwarded(counter, direction == Direction::ToClient, packet_len);
    if O::METERS
        && let Some(index) = metered
    {
        engine.flows.table::<A>().meter(index, direction, packet_len);
    }
    engine.output.observer.observe(&buffer, PacketOutcome::Forward(exit.port), || Some(belongs));
    engine.output.send_tagged(exit.port, tags, buffer);
}

/// Sends a packet as it is, or encapsulated.
pub(in crate::forward) fn forward_direct<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    mut buffer: P::Buffer,
    headers: &Headers<A>,
    direct: &DirectForward<'_>,
) {
    let &DirectForward { backend, frontend, port, protocol, exit, outer, flow } = direct;
    let mtu = outer.map_or(exit.mtu, |outer| outer.mtu);
    let mut rest = Burst::new();
    if headers.packet_len > mtu {
        match split(&mut buffer, usize::from(headers.network_offset), mtu, || engine.output.egress.allocate(exit.port)) {
            Some(pieces) => rest = pieces,
            None => return engine.output.drop_of_service(snapshot, buffer, headers, DropReason::TooBig),
        }
    }
    if !prepare_direct(&mut engine.identifications, &mut buffer, headers, direct) {
        rest.into_iter().for_each(|piece| engine.output.egress.discard(piece));
        return engine.output.drop_of_service(snapshot, buffer, headers, DropReason::TooBig);
    }
    // Outer headers begin with the tags of the link.
    let tags = if outer.is_some() { Tags::NONE } else { exit.link.tags() };
    let belongs = PacketFlow { vip: headers.tuple.destination.ip(), port, protocol, backend };
    let counter = CounterSlot::new(backend.slot, frontend);
    let departure = Departure { exit, tags, counter, metered: flow, direction: Direction::ToBackend, belongs };
    depart::<A, _, _>(engine, buffer, headers.packet_len, &departure);
    for mut piece in rest {
        if prepare_direct(&mut engine.identifications, &mut piece, headers, direct) {
            engine.output.originate(exit.port, tags, piece);
        } else {
            engine.output.egress.discard(piece);
        }
    }
}

/// Prepares a packet, or a fragment of it, for sending. Returns false when there is no room for the headers of a
/// tunnel.
fn prepare_direct<A: Address>(
    identifications: &mut Identifications,
    buffer: &mut impl Buffer,
    headers: &Headers<A>,
    direct: &DirectForward<'_>,
) -> bool {
    let exit = direct.exit;
    let Some(outer) = direct.outer else {
        trim(buffer, headers);
        rewrite::hop(buffer.bytes_mut(), headers, exit);
        return true;
    };
    let identification = outer.identification(!headers.dont_fragment, headers.tuple.protocol, identifications);
    let len = buffer.bytes().len().saturating_sub(usize::from(headers.network_offset));
    let packet_len = u16::try_from(len).map_or(headers.packet_len, |len| headers.packet_len.min(len));
    let inner = InnerPacket { network_offset: headers.network_offset, packet_len, identification };
    encapsulate::<A>(buffer, inner, &outer, exit)
}

/// Removes the bytes after the packet from its frame; with them it might exceed the MTU of its outgoing link.
#[inline(always)]
fn trim<A: Address>(buffer: &mut impl Buffer, headers: &Headers<A>) {
    let frame_len = usize::from(headers.network_offset) + usize::from(headers.packet_len);
    if buffer.bytes().len() > frame_len {
        let _ = buffer.resize(frame_len); // it gets shorter, so there is room
    }
}

/// Gives an IPv4 packet that may be fragmented on its way an identification of the gateway (RFC 6864 section 5.3).
/// It is chosen by the packet's addresses, so this follows the rewrite.
#[cold]
pub(in crate::forward) fn renumber<A: Address>(
    identifications: &mut Identifications,
    buffer: &mut impl Buffer,
    headers: &Headers<A>,
) {
    let frame = buffer.bytes_mut();
    let Some((source, destination, protocol)) = ends(frame, headers) else { return };
    let identification = identifications.next(source, destination, protocol);
    rewrite::renumber(frame, headers, 0, identification);
}

/// Source, destination and protocol of an IPv4 packet.
fn ends<A: Address>(frame: &[u8], headers: &Headers<A>) -> Option<(A, A, u8)> {
    let (ip, _) = take::<Ipv4>(frame.get(usize::from(headers.network_offset)..)?)?;
    Some((A::from_wide(ip.source.get().into()), A::from_wide(ip.destination.get().into()), ip.protocol))
}
