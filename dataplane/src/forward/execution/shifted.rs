//! Packets of shifted flows: the header goes to the backend with a packet of the client or by itself, and numbers change
//! in both directions.
//!
//! **Invariants:** a header leaves as one segment, or one datagram, and is never cut. What leaves besides packets that
//! arrived counts as originated, and an acknowledgement that goes to nobody as a drop.
//!
//! Not here: when the header leaves and which numbers change (`flow::state`), and bytes (`rewrite`).

use super::answers::reply;
use super::departure::forward_nat;
use crate::flow::{BackendStep, ClientStep, Direction, Flow, FlowState, HeaderStage, SegmentHead, Shift};
use crate::forward::decide::{Answer, FlowFamily, NatForward, exit_by};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::rewrite::{
    HeaderSegment, ProxyHeader, Reset, Timestamps, cut_data, prefix, proxy_header, remove_sack, remove_unshiftable,
    renumber_segment, segment_head, shrink_window, timestamps, window_scale, write_header_segment, write_reset,
};
use crate::forward::sort::Ingress;
use crate::port::Port;
use crate::snapshot::Exit;
use crate::stats::DropReason;
use crate::wire::{Buffer, Headers, Transport, tcp_flags};

/// Forwards a packet of a shifted flow.
pub(super) fn forward_shifted<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    headers: &Headers<A>,
    nat: NatForward<'_>,
) {
    let flow = engine.flows.table::<A>().get(nat.flow);
    match (flow.shift, headers.transport, nat.direction) {
        (Some(shift), Transport::Tcp { .. }, direction) => {
            let Some(head) = segment_head(buffer.bytes(), headers) else {
                return engine.output.drop_of_service(at.snapshot, buffer, headers, DropReason::Malformed);
            };
            let packet = ShiftedPacket { flow: &flow, shift, head, nat, headers };
            match direction {
                Direction::ToBackend => to_backend(engine, at, buffer, packet),
                Direction::ToClient => to_client(engine, at, buffer, packet),
            }
        }
        (Some(shift), Transport::Udp, Direction::ToBackend) => datagram(engine, at, buffer, headers, nat, &flow, &shift),
        _ => forward_nat(engine, at.snapshot, buffer, headers, nat),
    }
}

/// A segment of a shifted flow.
struct ShiftedPacket<'p, 's, A> {
    flow: &'p Flow<A>,
    shift: Shift,
    head: SegmentHead,
    nat: NatForward<'s>,
    headers: &'p Headers<A>,
}

/// Milliseconds of the clock of packets, which wrap after 49 days.
#[allow(clippy::cast_possible_truncation)] // only differences count
const fn milliseconds(now_ns: u64) -> u32 {
    (now_ns / 1_000_000) as u32
}

fn to_backend<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    mut buffer: P::Buffer,
    packet: ShiftedPacket<'_, '_, A>,
) {
    let ShiftedPacket { flow, mut shift, head, nat, headers } = packet;
    if head.flags & tcp_flags::SYN != 0 {
        remove_unshiftable(buffer.bytes_mut(), headers);
        let cut = if head.data_len > 0 { cut_data(&mut buffer, headers) } else { None };
        return forward_nat(engine, at.snapshot, buffer, cut.as_ref().unwrap_or(headers), nat);
    }
    let before = shift.stage();
    let version = shift.version();
    let header = || proxy_header(version, &flow.tuple(Direction::ToBackend));
    let has_room = usize::from(headers.packet_len) + usize::from(shift.header_len()) <= usize::from(nat.exit.mtu);
    let mut step = shift.of_client(&head, has_room, milliseconds(at.arrival.now_ns));
    let mut longer = None;
    if step == ClientStep::Prefixed {
        longer = prefix(&mut buffer, headers, &header());
        if longer.is_none() {
            step = ClientStep::BehindHeader;
        }
    }
    if flow.shift != Some(shift) {
        engine.flows.table::<A>().set_shift(nat.flow, shift);
    }
    match step {
        ClientStep::Prefixed => count_header(engine, before),
        ClientStep::BehindHeader => {
            let stamps = timestamps(buffer.bytes(), headers);
            if send_header(engine, flow, &shift, stamps, &header(), nat.exit) {
                count_header(engine, before);
            }
        }
        ClientStep::Twice => send_reset(engine, flow, &head, nat.exit),
        ClientStep::Unchanged | ClientStep::Shifted => {}
    }
    if matches!(step, ClientStep::BehindHeader | ClientStep::Shifted | ClientStep::Twice) {
        renumber_segment(buffer.bytes_mut(), headers, &shift.numbers(), Direction::ToBackend);
    }
    forward_nat(engine, at.snapshot, buffer, longer.as_ref().unwrap_or(headers), nat);
}

fn to_client<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    mut buffer: P::Buffer,
    packet: ShiftedPacket<'_, '_, A>,
) {
    let ShiftedPacket { flow, mut shift, head, nat, headers } = packet;
    let scale = if head.flags & tcp_flags::SYN == 0 { 0 } else { window_scale(buffer.bytes(), headers) };
    let step = shift.of_backend(&head, scale, milliseconds(at.arrival.now_ns));
    // As the flow is after this packet: the backend was first.
    let ends_first =
        matches!(flow.state, FlowState::TcpRefused | FlowState::TcpHalfClosedByBackend | FlowState::TcpResetByBackend);
    if shift.is_refusal(&head) && ends_first {
        engine.output.counters.proxy_headers_refused.add(1);
    }
    if flow.shift != Some(shift) {
        engine.flows.table::<A>().set_shift(nat.flow, shift);
    }
    match step {
        BackendStep::Consumed { is_repeated } => {
            if is_repeated {
                let stamps = timestamps(buffer.bytes(), headers);
                repeat_header(engine, at, flow, &shift, stamps);
            }
            engine.output.drop(buffer, DropReason::HeaderAwaited);
        }
        BackendStep::Passes { window_less, without_sack } => {
            if without_sack {
                remove_sack(buffer.bytes_mut(), headers);
            }
            if window_less > 0 {
                shrink_window(buffer.bytes_mut(), headers, window_less);
            }
            renumber_segment(buffer.bytes_mut(), headers, &shift.numbers(), Direction::ToClient);
            forward_nat(engine, at.snapshot, buffer, headers, nat);
        }
    }
}

/// A datagram gets its header, and leaves as one that was sent so long.
fn datagram<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    mut buffer: P::Buffer,
    headers: &Headers<A>,
    nat: NatForward<'_>,
    flow: &Flow<A>,
    shift: &Shift,
) {
    let header = proxy_header(shift.version(), &flow.tuple(Direction::ToBackend));
    let mtu = nat.exit.mtu;
    let fits = usize::from(headers.packet_len) + header.len() <= usize::from(mtu);
    if !fits && headers.dont_fragment {
        let mtu = mtu.saturating_sub(shift.header_len().into()).max(A::MTU_MIN);
        return reply(engine, at, buffer, headers, Answer::TooBig { mtu });
    }
    let longer = if fits || !headers.has_options() { prefix(&mut buffer, headers, &header) } else { None };
    let Some(longer) = longer else {
        return engine.output.drop_of_service(at.snapshot, buffer, headers, DropReason::TooBig);
    };
    engine.output.counters.proxy_headers_sent.add(1);
    forward_nat(engine, at.snapshot, buffer, &longer, nat);
}

/// Counts a header that left; `before`: when its stage was this.
fn count_header<P: Port, O: Observe<P::Buffer>>(engine: &Engine<P, O>, before: HeaderStage) {
    let counters = &engine.output.counters;
    let counter = if before == HeaderStage::Owed { &counters.proxy_headers_sent } else { &counters.proxy_headers_again };
    counter.add(1);
}

/// Sends the header by itself. Returns false when there is no buffer, or it does not fit the exit.
#[cold]
fn send_header<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    flow: &Flow<A>,
    shift: &Shift,
    stamps: Option<Timestamps>,
    header: &ProxyHeader,
    exit: &Exit,
) -> bool {
    let tuple = flow.tuple(Direction::ToClient).reversed();
    let segment = HeaderSegment { tuple, sequence: shift.first(), said: shift.last_said(), timestamps: stamps };
    engine.output.originate_by(exit, |buffer| write_header_segment(buffer, &segment, header, exit))
}

/// Sends the header again in answer to a segment of the backend with these timestamps, which says that it is missing.
#[cold]
fn repeat_header<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    flow: &Flow<A>,
    shift: &Shift,
    stamps: Option<Timestamps>,
) {
    let tuple = flow.tuple(Direction::ToBackend);
    let hash = engine.flows.table::<A>().hash(&tuple);
    let next_hop = at.snapshot.backend(flow.backend).map(|backend| backend.next_hop);
    let Some(Ok(exit)) = next_hop.map(|next_hop| exit_by(at.snapshot, next_hop, hash)) else { return };
    // The client's last timestamp that the backend knows.
    let stamps = stamps.map(|Timestamps { value, echo }| Timestamps { value: echo, echo: value });
    if send_header(engine, flow, shift, stamps, &proxy_header(shift.version(), &tuple), exit) {
        engine.output.counters.proxy_headers_again.add(1);
    }
}

/// Sends the RST of a client as it is, besides the one with shifted numbers.
#[cold]
fn send_reset<A: FlowFamily, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    flow: &Flow<A>,
    head: &SegmentHead,
    exit: &Exit,
) {
    let reset = Reset::new(flow.tuple(Direction::ToClient).reversed(), head.sequence, None, *exit);
    engine.output.originate_by(exit, |buffer| write_reset(buffer, &reset));
}
