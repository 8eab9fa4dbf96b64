//! ICMP errors about packets of flows, and about tunnel packets that carried them. An error about a packet of a flow
//! goes to the sender of the quoted packet (FORWARDING 10). An error of a router inside a tunnel becomes an error to
//! the sender of the inner packet (RFC 2003 section 4, RFC 2473 section 8).
//!
//! **Invariants:** an error does not change its flow: anyone can forge one, so it neither ends a flow nor keeps it
//! alive. An error about a tunnel packet is accepted only if the gateway may have sent the quoted packet, and only on
//! the link by which that packet left.
//!
//! Not here: the bytes of errors (`icmp`).

use zerocopy::network_endian::U32;

use crate::flow::{BackendId, Direction, FlowMode, FlowTable, HeaderStage, IdleLimits, Shift, Tick};
use crate::forward::decide::{
    FlowFamily, NatForward, NoExit, OneWayTarget, Packet, Verdict, arrives_from, deliver, exit_by, exit_to_client, fits,
    refused_source,
};
use crate::forward::engine::Engine;
use crate::forward::execution::apply;
use crate::forward::execution::departure::{renumber, send_split};
use crate::forward::observer::Observe;
use crate::forward::sort::Ingress;
use crate::icmp;
use crate::icmp::error_mapping::{ErrorRewrite, QuoteShift};
use crate::icmp::{IcmpError, Inner, Quote, TunnelErrorKind, TunnelQuote};
use crate::neighbours::{Permission, UnresolvedNeighbour};
use crate::port::{Arrival, Port};
use crate::snapshot::{AddressRole, Exit, RouteTo, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Tuple, is_martian, protocol, take};

/// Processes an ICMP error about a packet of a flow, or of a tunnel that carried one. Returns the packet if it is no such
/// error.
pub(in crate::forward) fn handle_error<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    packet: &Packet<'_, A>,
) -> Option<P::Buffer> {
    let Some(quote) = Quote::of(buffer.bytes(), packet.headers) else {
        return tunnel_error(engine, at, buffer, packet);
    };
    let asked = quote.tuple.reversed();
    if let Some(verdict) = follow_one_way_error(packet, &asked, at.snapshot, engine.flows.table()) {
        engine.output.tally.hits += 1;
        apply(engine, at, buffer, packet.headers, verdict);
        return None;
    }
    let (table, limits) = engine.flows.table_and_limits();
    let followed = follow_error(packet, &quote.tuple, at.snapshot, table, limits, Tick::at(at.arrival.now_ns));
    let Some(followed) = followed else { return tunnel_error(engine, at, buffer, packet) };
    engine.output.tally.hits += 1;
    match followed {
        Ok(nat) => forward_error(engine, at.snapshot, buffer, packet.headers, &quote, nat),
        Err(none) => apply(engine, at, buffer, packet.headers, none.into()),
    }
    None
}

fn forward_error<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    mut buffer: P::Buffer,
    headers: &Headers<A>,
    quote: &Quote<A>,
    nat: NatForward<'_>,
) {
    let NatForward { flow, direction, exit } = nat;
    let flow = engine.flows.table::<A>().get(flow);
    // The error gets the source that the flow's packets have in its direction, whichever router sent it: the client
    // knows no other address, and its network may filter the addresses behind the gateway
    // (docs/internals/decisions/0009).
    let (source, destination, quoted) = match direction {
        Direction::ToBackend if flow.mode == FlowMode::Dnat => {
            (headers.tuple.source, flow.backend_address, flow.tuple(Direction::ToClient))
        }
        Direction::ToBackend => (flow.snat, flow.backend_address, flow.tuple(Direction::ToClient)),
        Direction::ToClient => (flow.vip, flow.client, flow.tuple(Direction::ToBackend)),
    };
    let (source_mac, destination_mac) = (exit.source_mac(), exit.destination_mac());
    let rewrite = ErrorRewrite { source, destination, quoted, source_mac, destination_mac };
    icmp::error_mapping::error(buffer.bytes_mut(), headers, quote, &rewrite);
    if let Some(shift) = flow.shift {
        let change = quote_shift(buffer.bytes(), quote, &shift, direction);
        icmp::error_mapping::shift(buffer.bytes_mut(), headers, quote, change);
    }
    if !headers.dont_fragment {
        renumber(&mut engine.identifications, &mut buffer, headers);
    }
    send_split(engine, snapshot, buffer, headers, &flow, nat);
}

/// Processes an ICMP error about a tunnel packet. Returns the packet if it is no such error.
fn tunnel_error<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    packet: &Packet<'_, A>,
) -> Option<P::Buffer> {
    let Some(quote) = TunnelQuote::of(buffer.bytes(), packet.headers, &at.snapshot.tunnels) else {
        return Some(buffer);
    };
    let followed = match &quote.inner {
        Inner::V4(inner) => follow_tunnel_error(packet, &quote, inner, at.snapshot, &engine.flows.tables.v4),
        Inner::V6(inner) => follow_tunnel_error(packet, &quote, inner, at.snapshot, &engine.flows.tables.v6),
    };
    let Some(followed) = followed else { return Some(buffer) };
    engine.output.tally.hits += 1;
    match (followed, &quote.inner) {
        (Err(none), _) => apply(engine, at, buffer, packet.headers, none.into()),
        (Ok(exit), Inner::V4(inner)) => report_to_client(engine, at.arrival, buffer, &quote, inner, exit),
        (Ok(exit), Inner::V6(inner)) => report_to_client(engine, at.arrival, buffer, &quote, inner, exit),
    }
    None
}

fn report_to_client<A: Address, I: Address, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    arrival: Arrival,
    mut buffer: P::Buffer,
    quote: &TunnelQuote<A>,
    inner: &Tuple<I>,
    exit: &Exit,
) {
    let (asker, now_ns) = (inner.source, arrival.now_ns);
    let (error, allowed) = match quote.trouble {
        TunnelErrorKind::TooBig { mtu } => (IcmpError::TooBig { mtu }, engine.limiter.allow_too_big(asker, now_ns)),
        TunnelErrorKind::Unreachable => (IcmpError::HostUnreachable, engine.limiter.allow(asker, now_ns)),
    };
    let written = allowed && icmp::icmp_error_about_inner(&mut buffer, quote.inner_range.clone(), inner, error, exit);
    if !written {
        return engine.output.drop(buffer, DropReason::AnswerLimited);
    }
    engine.output.answer(exit.port, exit.link.tags(), Permission::Always, buffer);
}

/// What an error in this direction about a packet of a shifted flow says that its receiver knows otherwise.
fn quote_shift<A: Address>(frame: &[u8], quote: &Quote<A>, shift: &Shift, direction: Direction) -> QuoteShift {
    if direction == Direction::ToBackend {
        return QuoteShift::default(); // nothing is inserted into what backends send
    }
    let inserted = u16::from(shift.header_len());
    if quote.tuple.protocol != protocol::TCP {
        return QuoteShift { sequence: None, inserted };
    }
    let sequence = frame.get(quote.transport_offset + 4..).and_then(take::<U32>).map(|(sequence, _)| sequence.get());
    let is_first = shift.stage() != HeaderStage::Settled && sequence == Some(shift.first());
    QuoteShift {
        sequence: sequence.map(|sequence| shift.numbers().client.to_sender(sequence)),
        inserted: if is_first { inserted } else { 0 },
    }
}

/// Forwarding of an ICMP error about a packet with the tuple `quoted`. The direction is that of the error: the quoted
/// packet went the other way. `None`: there is no flow of the quoted packet.
///
/// # Errors
/// What happens to the error instead.
fn follow_error<'s, A: Address>(
    packet: &Packet<'_, A>,
    quoted: &Tuple<A>,
    snapshot: &'s Snapshot,
    table: &mut FlowTable<A>,
    limits: &IdleLimits,
    now: Tick,
) -> Option<Result<NatForward<'s>, NoExit>> {
    let headers = packet.headers;
    // An error goes to the source of the quoted packet (RFC 1812 section 4.3.2.4), and never comes from the gateway.
    let is_possible = quoted.source == headers.tuple.destination
        && !headers.group_frame
        && refused_source(headers.tuple.source, snapshot).is_none();
    if !is_possible {
        return None;
    }
    let back = quoted.reversed();
    let hash = table.hash(&back);
    let (index, direction) = table.search(hash, &back)?;
    let mut flow = table.get(index);
    let backend = snapshot.backend(flow.backend)?;
    if limits.is_flow_over(&flow, backend.idle_timeout, false, now) {
        return None;
    }
    let exit = match direction {
        Direction::ToBackend => exit_by(snapshot, backend.next_hop, hash),
        Direction::ToClient if !arrives_from(snapshot, backend.next_hop, packet.in_link) => {
            Err(NoExit::Dropped(DropReason::SnatWrongPort))
        }
        Direction::ToClient => exit_to_client(snapshot, &mut flow),
    };
    table.set(index, &flow);
    Some(exit.and_then(|exit| fits(packet, exit)).map(|exit| NatForward { flow: index, direction, exit }))
}

/// The exit towards the client that is informed of an error about the packet in `quote`, which carried a packet with
/// the tuple `inner`. `None`: the gateway sent no such packet.
///
/// # Errors
/// What happens to the error instead.
fn follow_tunnel_error<'s, A: Address, I: Address>(
    packet: &Packet<'_, A>,
    quote: &TunnelQuote<A>,
    inner: &Tuple<I>,
    snapshot: &'s Snapshot,
    table: &FlowTable<I>,
) -> Option<Result<&'s Exit, NoExit>> {
    let headers = packet.headers;
    let is_possible = quote.source == headers.tuple.destination
        && !headers.group_frame
        && refused_source(headers.tuple.source, snapshot).is_none()
        // Packets that the kernel sends through a tunnel, as probes, are its own.
        && snapshot.role(inner.source) == AddressRole::Elsewhere
        && !is_martian(inner.source);
    if !is_possible {
        return None;
    }
    let hash = table.hash(inner);
    let known = table.search(hash, inner).map(|(index, _)| table.get(index));
    let (mode, id) = match known {
        Some(flow) => (flow.mode, flow.backend),
        None => by_hash(inner, snapshot)?,
    };
    let backend = snapshot.backend(id)?;
    if mode != quote.mode || backend.address.ip() != quote.destination.ip() {
        return None;
    }
    if !arrives_from(snapshot, backend.next_hop, packet.in_link) {
        return Some(Err(NoExit::Dropped(DropReason::SnatWrongPort)));
    }
    let exit = match snapshot.route(inner.source) {
        RouteTo::NextHop(next_hop) => exit_by(snapshot, next_hop, hash),
        RouteTo::Unresolved { link } => Err(NoExit::Unresolved(UnresolvedNeighbour { link, address: inner.source.ip() })),
        RouteTo::None => Err(NoExit::Dropped(DropReason::NoRoute)),
    };
    Some(exit)
}

/// The destination of a packet that found no room for a flow (FORWARDING 3).
fn by_hash<I: Address>(inner: &Tuple<I>, snapshot: &Snapshot) -> Option<(FlowMode, BackendId)> {
    let frontend = snapshot.frontend(inner.destination, inner.protocol, inner.destination_port)?;
    if !frontend.allows(inner.source) {
        return None;
    }
    Some((frontend.mode(), frontend.choose_by_hash(inner)?))
}

/// An ICMP error about a packet that a backend sent from the VIP to its client directly. It goes unchanged to that
/// backend: by the flow of the client's packets, whose tuple is `asked`, or without one by their hash. `None`: not such
/// a mode.
fn follow_one_way_error<'s, A: Address>(
    packet: &Packet<'_, A>,
    asked: &Tuple<A>,
    snapshot: &'s Snapshot,
    table: &FlowTable<A>,
) -> Option<Verdict<'s>> {
    if asked.destination != packet.headers.tuple.destination || packet.headers.group_frame {
        return None;
    }
    let known = table.search(table.hash(asked), asked).map(|(index, _)| table.get(index));
    let to = match known {
        Some(flow) => OneWayTarget { mode: flow.mode, frontend: flow.frontend, backend: flow.backend },
        None => {
            let (destination, port) = (asked.destination, asked.destination_port);
            let (frontend, number) = snapshot.numbered_frontend(destination, asked.protocol, port)?;
            OneWayTarget { mode: frontend.mode(), frontend: number, backend: frontend.choose_by_hash(asked)? }
        }
    };
    let may_pass = refused_source(packet.headers.tuple.source, snapshot).is_none();
    (!to.mode.is_two_way() && may_pass).then(|| deliver(packet, asked, to, snapshot))
}
