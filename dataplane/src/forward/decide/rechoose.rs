//! When a packet of the client leaves its flow and a new backend is chosen (FORWARDING 2).
//!
//! An existing TCP connection continues to a draining backend, and to one whose probes fail, until the drain is over:
//! only a SYN can choose another. UDP can do so at any packet, but a stream must not leave a backend that answers, whatever its probes
//! report.
//!
//! Anyone can send a SYN in the name of a client. On a flow that its backend has not ended it goes to that backend, by the
//! same SNAT port, and the backend answers it as RFC 9293 section 3.10.7.4 says: the engine, which keeps no sequence
//! numbers, cannot tell whose it is.
//!
//! **Invariant:** of two-way flows that were answered, only those move whose backend has ended them or takes no new ones,
//! and whose client has sent for [`IN_VAIN`] without an answer.
//!
//! Not here: the choice itself.

use std::time::Duration;

use crate::flow::{Flow, FlowState, Tick, Ticks, YieldClass, begins};
use crate::snapshot::Backend;
use crate::wire::{Address, Transport};

/// How long a client sends without an answer, while the backend fails its probes, before its next packet chooses
/// another backend: as long as TCP waits before it repeats a SYN (RFC 6298 section 2).
const IN_VAIN: Duration = Duration::from_secs(1);

/// Whether a packet of the client starts a new flow in place of this one.
pub(super) fn rechooses<A: Address>(flow: &mut Flow<A>, transport: Transport, backend: &Backend, now: Tick) -> bool {
    let is_over = if begins(transport) {
        begins_anew(flow.state, backend)
    } else {
        !matches!(transport, Transport::Tcp { .. } | Transport::Sctp { .. }) && backend.removed
    };
    is_over || is_in_vain(flow, transport, backend, now)
}

/// Whether a SYN on a flow begins another one: its backend has ended it, or was removed, or takes no new flows while only
/// packets of the client, or none but its SYNs, say that there is nothing left to go on with.
pub(in crate::forward) fn begins_anew(state: FlowState, backend: &Backend) -> bool {
    let is_unanswered = matches!(state, FlowState::TcpOpening | FlowState::TcpOneWayNew | FlowState::SctpOpening);
    let may_leave = is_unanswered || state.is_ended_by_client();
    state.is_ended_by_backend() || backend.removed || may_leave && !backend.accepts_new
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
