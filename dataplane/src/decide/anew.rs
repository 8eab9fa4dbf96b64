//! When a packet of the client's leaves its flow and chooses a backend anew (FORWARDING 2).
//!
//! TCP that has begun goes on to a draining backend, and to one whose probes fail: only a SYN can begin elsewhere. UDP can at
//! any packet, but a stream must not leave a backend that answers, whatever its probes say. **Invariant:** of two-way flows
//! that were answered, those alone move whose client has asked for [`IN_VAIN`] while no answer came.

use std::time::Duration;

use crate::flow::{Flow, FlowState, Segment, YieldClass, begins};
use crate::snapshot::Backend;
use crate::tick::{Tick, Ticks};
use crate::{Address, Transport};

/// A client that has asked for so long without an answer, while the backend fails its probes, asks another: as long as TCP
/// waits before it repeats a SYN (RFC 6298 section 2).
const IN_VAIN: Duration = Duration::from_secs(1);

/// Whether a packet of the client's begins a flow of its own, in the place of this one.
pub(super) fn chooses_anew<A: Address>(
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

/// A SYN on a flow of which a side has closed, a SYN that was never answered by a backend that takes no new flows any more,
/// and any SYN or UDP packet whose backend is gone.
fn is_over(transport: Transport, state: FlowState, backend: &Backend) -> bool {
    let is_unanswered = matches!(state, FlowState::TcpOpening | FlowState::TcpOneWayNew | FlowState::SctpOpening);
    let unanswered_in_vain = is_unanswered && !backend.accepts_new;
    match transport {
        Transport::Tcp { .. } | Transport::Sctp { .. } => {
            let has_closed = state.is_closing() || state.is_half_closed();
            begins(transport) && (has_closed || unanswered_in_vain || backend.removed)
        }
        _ => backend.removed,
    }
}

/// A SYN with another number than that of the handshake that is under way: the client gave up and came back from the same
/// port. The backend would not answer it as long as it waits for the first (FORWARDING 3).
fn is_another_handshake<A: Address>(transport: Transport, segment: Segment, flow: &Flow<A>) -> bool {
    let is_under_way = matches!(flow.state, FlowState::TcpOpening | FlowState::TcpAnswered);
    is_under_way && begins(transport) && segment.sequence != flow.initial_sequence
}

/// A packet that could go elsewhere, to a backend that fails its probes and does not answer: it never has, or has not since
/// the client asked first while it failed. In one-way modes no answer is seen, and the probes alone are believed.
fn is_in_vain<A: Address>(flow: &mut Flow<A>, transport: Transport, backend: &Backend, now: Tick) -> bool {
    let may_move = begins(transport) || transport == Transport::Udp;
    let Some(failing) = backend.fails_since().filter(|_| may_move) else { return false };
    if !flow.way.is_two_way() || flow.state.yield_class() == Some(YieldClass::Unconfirmed) {
        return true;
    }
    // What was noted while it failed another time is not about this one.
    match flow.unanswered_since().filter(|since| failing.since(*since) == Ticks(0)) {
        Some(since) => now.since(since) >= Ticks::from(IN_VAIN),
        None => {
            flow.set_unanswered_since(Some(now));
            false
        }
    }
}
