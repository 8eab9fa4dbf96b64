//! Split flows: TCP flows of mode `nat` of which one worker has the half with the client's packets, another worker the
//! half with the replies. A flow is split by a restart with other workers (`restore`), or if a partner sent it
//! (`shadow_flows`). A packet that may end such a flow, or restore it, visits both workers, so that neither half
//! outlives the other:
//!
//! - The owner of the packet applies it to its half, and the other worker decides on it.
//! - A SYN on a flow that its backend has ended ends the half of its owner, then the half of the other worker. It
//!   returns to its owner, for which it begins a new flow.
//!
//! **Invariant:** no packet is handed over more than twice, since each step follows from the owner of the packet and
//! the task.
//!
//! Not here: idle limits, which each half has for itself.

use super::shadow_flows::ReceivingFlows;
use crate::flow::{Segment, Tick, begins};
use crate::forward::decide::{FlowFamily, FlowMatch, Packet, begins_anew};
use crate::forward::sort::Ingress;
use crate::forward::sort::owner_of_first;
use crate::port::Origin;
use crate::wire::Transport;
use crate::workers::{HandoverTask, WorkerId};

/// The worker that a packet visits next, and what it does there; `None`: this worker decides on it.
pub(in crate::forward) fn visit_halves<A: FlowFamily>(
    mut of: ReceivingFlows<'_>,
    at: Ingress<'_>,
    packet: &Packet<'_, A>,
    segment: Segment,
    found: Option<FlowMatch>,
) -> Option<(WorkerId, HandoverTask)> {
    let transport = packet.headers.transport;
    let (steering, me) = of.owned.filter(|_| matches!(transport, Transport::Tcp { .. }))?;
    let table = A::table(&of.flows.tables);
    let is_half = |(index, _): &FlowMatch| table.get(*index).has_foreign_port();
    let half = found.filter(is_half);
    if half.is_none() && at.arrival.origin != Origin::Begun {
        return None;
    }
    let owner_of = |tuple| owner_of_first(steering, at.snapshot, tuple);
    let (owner, now) = (owner_of(&packet.headers.tuple), Tick::at(at.arrival.now_ns));
    if at.arrival.origin == Origin::Begun {
        if let Some((index, _)) = half {
            of.end_shadow::<A>(index, now);
        }
        return (owner != me).then_some((owner, HandoverTask::Decide));
    }
    let (index, direction) = half?;
    let flow = table.get(index);
    let other = owner_of(&flow.tuple(direction.opposite()));
    if owner != me || other == me {
        return None;
    }
    if !begins(transport) {
        of.flows.table::<A>().advance(index, transport, direction, segment, now);
        return Some((other, HandoverTask::Decide));
    }
    let is_late = flow.shift.is_some_and(|shift| shift.is_late_syn(segment.sequence));
    if is_late || !at.snapshot.backend(flow.backend).is_none_or(|backend| begins_anew(flow.state, backend)) {
        return None;
    }
    of.end_shadow::<A>(index, now);
    Some((other, HandoverTask::Begin))
}
