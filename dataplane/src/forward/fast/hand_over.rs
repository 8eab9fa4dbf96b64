//! Hands packets over to the workers that own them. What the recognition found out about a packet tells its owner too, so it
//! needs no second look at its headers: before flows are looked up where a quarter or more of the last burst were of other
//! workers ([`keep_own`]), otherwise if no flow was found ([`keep_or_hand_over`]).
//!
//! **Invariant:** the owner is that which the slow path would find, and a packet is compared at most once here with the
//! queue that it came by.
//!
//! Not here: the owner function and the queues (`workers`); packets that are not recognised, and those of which a tag of the
//! index looked like that of a flow (`forward::sort`).

use std::mem;

use super::plan::Plan;
use super::recognise::Recognition;
use super::state::LastBurst;
use super::turns::PART_MAX;
use super::unrecognised::UnrecognisedAddresses;
use crate::flow::Candidate;
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::sort::Ingress;
use crate::forward::sort::{observe_plain, other_owner};
use crate::port::{Arrival, BURST, Burst, Origin, Port};
use crate::wire::plain::head::{PlainFamily, UNTAGGED, tuple_at};
use crate::wire::{Address, Buffer, Shape, Tuple};
use crate::workers::{Egress, HandoverTask, Peers, WorkerId};

/// Whether packets that arrived so may be of other workers.
#[inline(always)]
pub(super) fn may_be_of_others<P: Port>(egress: &mut Egress<P>, arrival: Arrival) -> bool {
    peers_for(egress, arrival).is_some()
}

/// Whether fragments of some flows met at other workers, of packets that arrived so.
#[inline(always)]
pub(super) fn has_fragmented<P: Port>(egress: &mut Egress<P>, arrival: Arrival) -> bool {
    peers_for(egress, arrival).is_some_and(|peers| peers.fragmented_flows().has_any(arrival.now_ns))
}

/// Leaves the packets of such flows: they go the way of the fragments.
#[inline(never)]
pub(super) fn leave_fragmented<P: Port>(egress: &mut Egress<P>, plans: &mut [Plan], now_ns: u64) {
    let Some(peers) = &mut egress.peers else { return };
    let flows = peers.fragmented_flows();
    for plan in plans.iter_mut().filter(|plan| plan.shape.family() != 0) {
        if flows.meets_at(plan.hash, now_ns).is_some() {
            plan.shape = Shape::UNKNOWN;
        }
    }
}

/// Recognises the packets of a burst, and hands those of other workers over before anything else is done for them. So
/// what is left in the burst, in order, and its plans are packets of this worker, but for those behind one that was not
/// recognised: they must not overtake it.
#[inline(never)]
pub(super) fn keep_own<'s, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'s>,
    last_burst: LastBurst,
    recognition: &mut Recognition<'s>,
    burst: &mut Burst<P::Buffer>,
    plans: &mut [Plan],
) {
    recognition.prefetches_tags = false;
    last_burst.prefetch(&burst[..burst.len().min(PART_MAX)]);
    for start in (0..burst.len()).step_by(PART_MAX) {
        let [end, next_end] = [1, 2].map(|parts| burst.len().min(start + parts * PART_MAX));
        last_burst.prefetch(&burst[end..next_end]);
        recognition.part(engine.fast.avx2, &engine.flows.tables, &burst[start..end], &mut plans[start..end]);
    }
    if recognition.any_unrecognised {
        UnrecognisedAddresses::none().hold_back(burst, plans);
    }
    if has_fragmented(&mut engine.output.egress, at.arrival) {
        leave_fragmented(&mut engine.output.egress, &mut plans[..burst.len()], at.arrival.now_ns);
    }
    let owners = other_owners(&mut engine.output.egress, at, burst, plans);
    let mut kept = 0;
    for ((number, buffer), owner) in mem::take(burst).into_iter().enumerate().zip(owners) {
        match owner {
            None => {
                plans[kept] = plans[number];
                kept += 1;
                burst.push(buffer);
            }
            Some(owner) => engine.output.hand_over(owner, HandoverTask::Decide, at.arrival, buffer),
        }
    }
}

/// The other workers that get the packets of a burst, up to the first that was not recognised.
#[inline(always)]
fn other_owners<P: Port>(
    egress: &mut Egress<P>,
    at: Ingress<'_>,
    burst: &[P::Buffer],
    plans: &[Plan],
) -> [Option<WorkerId>; BURST] {
    let mut owners = [None; BURST];
    let known = burst.iter().zip(plans).take_while(|(_, plan)| plan.shape.family() != 0);
    let known = owners.iter_mut().zip(known);
    match peers_for(egress, at.arrival) {
        Some(peers) if !peers.looks_at_queue(at.arrival.link.port()) => {
            for (owner, (buffer, plan)) in known {
                *owner = match plan.shape.family() {
                    Shape::V4 => other_owner_of::<u32, _>(peers, at, buffer, plan),
                    _ => other_owner_of::<u128, _>(peers, at, buffer, plan),
                };
            }
        }
        _ => known.for_each(|(owner, (buffer, plan))| *owner = owner_of_packet(egress, at, buffer, plan)),
    }
    owners
}

/// Hands a recognised packet that has no flow here to the worker that owns it. Returns the packet if that is this one,
/// or if it takes a longer look to tell.
#[inline(never)]
pub(super) fn keep_or_hand_over<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    buffer: P::Buffer,
    plan: &Plan,
) -> Option<P::Buffer> {
    let owner = if plan.flow == Candidate::NONE { owner_of_packet(&mut engine.output.egress, at, &buffer, plan) } else { None };
    let Some(owner) = owner else { return Some(buffer) };
    engine.output.hand_over(owner, HandoverTask::Decide, at.arrival, buffer);
    None
}

/// The other worker that gets a packet; `None` for one of this worker, or one that was not recognised.
#[inline(always)]
fn owner_of_packet<P: Port>(egress: &mut Egress<P>, at: Ingress<'_>, buffer: &P::Buffer, plan: &Plan) -> Option<WorkerId> {
    match plan.shape.family() {
        Shape::V4 => owner_of_plain::<u32, _>(egress, at, buffer, plan),
        Shape::V6 => owner_of_plain::<u128, _>(egress, at, buffer, plan),
        _ => None,
    }
}

#[inline(always)]
fn owner_of_plain<A: PlainFamily, P: Port>(
    egress: &mut Egress<P>,
    at: Ingress<'_>,
    buffer: &P::Buffer,
    plan: &Plan,
) -> Option<WorkerId> {
    let tuple = tuple_of::<A>(buffer, plan)?;
    let owner = owner_elsewhere(egress, at, plan, &tuple)?;
    observe_queue(egress, at.arrival, buffer, plan, &tuple);
    Some(owner)
}

/// The other worker that owns the flow of a recognised packet; `None` if this one does.
#[inline(never)] // so that a single worker does not pay for it
pub(super) fn owner_elsewhere<A: Address, P: Port>(
    egress: &mut Egress<P>,
    at: Ingress<'_>,
    plan: &Plan,
    tuple: &Tuple<A>,
) -> Option<WorkerId> {
    other_owner(peers_for(egress, at.arrival)?, at.snapshot, tuple, plan.hash)
}

/// Compares the queue that a packet came by with its owner, if its kind is not proven yet: for packets that are not left
/// in the burst.
#[inline(always)]
pub(super) fn observe_queue<A: Address, P: Port>(
    egress: &mut Egress<P>,
    arrival: Arrival,
    buffer: &P::Buffer,
    plan: &Plan,
    tuple: &Tuple<A>,
) {
    if let Some(peers) = peers_for(egress, arrival) {
        let tag_bytes = usize::from(plan.shape.network_offset).saturating_sub(UNTAGGED);
        observe_plain(peers, plan.link.port(), tag_bytes, buffer, tuple);
    }
}

/// The other workers, if packets that arrived so may be theirs.
#[inline(always)]
fn peers_for<P: Port>(egress: &mut Egress<P>, arrival: Arrival) -> Option<&mut Peers<P::Buffer>> {
    egress.peers.as_mut().filter(|_| arrival.origin == Origin::Port)
}

/// Addresses, ports and protocol of a recognised packet.
#[inline(always)]
fn tuple_of<A: PlainFamily>(buffer: &impl Buffer, plan: &Plan) -> Option<Tuple<A>> {
    tuple_at(buffer.bytes(), plan.shape.network_offset.into(), plan.shape.protocol())
}

/// The other worker that owns the flow of a recognised packet; `None` if this one does.
#[inline(always)]
fn other_owner_of<A: PlainFamily, B: Buffer>(peers: &Peers<B>, at: Ingress<'_>, buffer: &B, plan: &Plan) -> Option<WorkerId> {
    other_owner(peers, at.snapshot, &tuple_of::<A>(buffer, plan)?, plan.hash)
}
