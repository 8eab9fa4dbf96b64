//! The decision: what happens to a packet. It is a function of the packet's headers, the snapshot, the flows and the
//! time; it reads no clock, touches no packet and does no I/O.
//!
//! The fast path (`forward::fast`) takes packets of known flows that are only rewritten and sent, [`follow`] others
//! that do not change their flow, [`decide`] all the rest; each leaves to the next what it does not decide
//! (docs/internals/decisions/0037). ICMP errors go by the flow of the packet that they quote (`forward::related`),
//! probes of the kernel by [`follow_probe`].
//!
//! **Invariant:** a packet for an address of the gateway is never passed to the kernel, and nothing is answered before
//! the first complete state (FORWARDING 1).
//!
//! Not here: rewriting bytes and moving packets.

mod dnat;
mod exit;
pub(super) mod explain;
mod input;
mod inquiry;
mod known;
mod local;
mod new_flow;
mod one_way;
mod rechoose;
mod reclaim;
mod verdict;

pub(super) use exit::{arrives_from, exit_by, exit_to_client, fits, unresolved_client};
pub(super) use input::{DecisionContext, FlowFamily, FlowTables, Packet, ResetBuffers, WorkerFlows};
pub(super) use inquiry::KnownFlows;
pub use inquiry::{
    About, ENDS_PER_INQUIRY, EndedFlow, FLOWS_PER_INQUIRY, FamilyInquiry, FlowEnds, INQUIRIES_MAX, Inquired, Inquiry, Mailbox,
};
pub(super) use known::{FlowMatch, Followed, follow, why_without};
pub(super) use local::refused_source;
pub(super) use new_flow::{backend_address, first_snat_address};
pub(super) use one_way::{OneWayTarget, deliver, follow_probe};
pub(super) use rechoose::begins_anew;
pub(super) use reclaim::{may_lease, reset_to_backend};
pub(super) use verdict::{Answer, Changes, DirectForward, NatForward, NoExit, RESETS_MAX, Verdict};

use local::{frontend_of, in_group_frame, no_frontend};
use new_flow::new_flow;

use crate::flow::Segment;
use crate::wire::{Address, Transport};

/// Decides on a packet that [`follow`] leaves. `found`: the flow whose state it may change.
pub(super) fn decide<'s, A: Address>(
    packet: &Packet<'_, A>,
    segment: Segment,
    found: Option<FlowMatch>,
    context: &mut DecisionContext<'_, 's, A>,
) -> Verdict<'s> {
    let snapshot = context.snapshot;
    if packet.headers.group_frame {
        return in_group_frame(packet, snapshot, context.table);
    }
    let found = found.or_else(|| known::association(packet, context.table));
    let verdict = found.and_then(|found| known::change(packet, segment, found, context));
    if let Some(verdict) = verdict {
        return verdict;
    }
    match packet.headers.transport {
        Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. } => match frontend_of(packet, snapshot) {
            Some((frontend, number)) => new_flow(packet, segment, context, frontend, number),
            None => dnat::reply(packet, context).unwrap_or_else(|| no_frontend(packet, snapshot, context.table)),
        },
        _ => no_frontend(packet, snapshot, context.table),
    }
}
