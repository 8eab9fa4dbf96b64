//! When a packet of the client leaves its flow and a new backend is chosen (FORWARDING 2).
//!
//! An existing TCP connection continues to a draining backend, and to one whose probes fail, until the drain is over:
//! only a SYN can choose another. UDP can do so at any packet, but a stream must not leave a backend that answers, whatever its probes
//! report.
//!
//! **Invariant:** of two-way flows that were answered, only those move whose client has sent for [`IN_VAIN`] without an
//! answer.
//!
//! Not here: the choice itself.

use std::time::Duration;

use crate::flow::{Flow, FlowState, Segment, Tick, Ticks, YieldClass, begins};
use crate::snapshot::Backend;
use crate::wire::{Address, Transport};

/// How long a client sends without an answer, while the backend fails its probes, before its next packet chooses
/// another backend: as long as TCP waits before it repeats a SYN (RFC 6298 section 2).
const IN_VAIN: Duration = Duration::from_secs(1);

/// Whether a packet of the client starts a new flow in place of this one.
pub(super) fn rechooses<A: Address>(
    flow: &mut Flow<A>,
    transport: Transport,
    segment: Segment,
    backend: &Backend,
    now: Tick,
) -> bool {
    is_over(transport, flow.state, backend)
        || is_another_handshake(transport, segment, flow)
        || is_in_vain(flow, transport, backend, now)
}

/// A SYN on a half-closed or closed flow, a SYN that was never answered by a backend that no longer takes new flows,
/// and any SYN or UDP packet to a removed backend.
fn is_over(transport: Transport, state: FlowState, backend: &Backend) -> bool {
    let is_unanswered = matches!(state, FlowState::TcpOpening | FlowState::TcpOneWayNew | FlowState::SctpOpening);
    let unanswered_in_vain = is_unanswered && !backend.accepts_new;
    match transport {
        Transport::Tcp { .. } | Transport::Sctp { .. } => {
            let has_closed = state.is_closing() || state.is_half_closed() && state != FlowState::SctpHalfClosed;
            begins(transport) && (has_closed || unanswered_in_vain || backend.removed)
        }
        _ => backend.removed,
    }
}

/// A SYN with another number than that of the handshake in progress: the client gave up and came back from the same
/// port. The backend would not answer it while it waits for the first handshake (FORWARDING 3).
fn is_another_handshake<A: Address>(transport: Transport, segment: Segment, flow: &Flow<A>) -> bool {
    let is_under_way = matches!(flow.state, FlowState::TcpOpening | FlowState::TcpAnswered);
    is_under_way && begins(transport) && segment.sequence != flow.initial_sequence
}

/// A packet that may choose another backend, while its backend fails its probes and does not answer: it never has, or
/// not since the client first sent after the failure. In one-way modes no answers are seen, so the probes alone decide.
fn is_in_vain<A: Address>(flow: &mut Flow<A>, transport: Transport, backend: &Backend, now: Tick) -> bool {
    let may_move = begins(transport) || transport == Transport::Udp;
    let Some(failing) = backend.fails_since().filter(|_| may_move) else { return false };
    if !flow.mode.is_two_way() || flow.state.yield_class() == Some(YieldClass::Unconfirmed) {
        return true;
    }
    // A time that was stored during an earlier failure does not count.
    match flow.unanswered_since.filter(|since| failing.since(*since) == Ticks(0)) {
        Some(since) => now.since(since) >= Ticks::from(IN_VAIN),
        None => {
            flow.unanswered_since = Some(now);
            false
        }
    }
}
