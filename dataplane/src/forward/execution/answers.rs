//! Answers: turns packets into ARP, neighbour discovery, echo, error and reset answers within the rate limit
//! (FORWARDING 8), and originates RSTs that no packet turns into (FORWARDING 2 and 3). Each of those counts as
//! originated: its cause is the end of another packet.
//!
//! **Invariant:** nothing is answered before the first complete state.
//!
//! Not here: the decision to answer an IP packet, and the bytes of answers (`neighbours`, `icmp`, `rewrite`).

use arrayvec::ArrayVec;

use super::linux::give_to_linux;
use crate::forward::decide::{Answer, RESETS_MAX};
use crate::forward::engine::Engine;
use crate::forward::observer::Observe;
use crate::forward::output::Output;
use crate::forward::rewrite;
use crate::forward::rewrite::Reset;
use crate::forward::sort::Ingress;
use crate::icmp::{self, IcmpError};
use crate::neighbours::{self, Permission, UnresolvedNeighbour, VipClaim, VipOwnership};
use crate::port::{Arrival, Link, Port};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Mac};

/// Answers ARP. Answers to ARP and neighbour discovery have no rate limit (docs/internals/decisions/0013).
pub(in crate::forward) fn arp<P: Port, O: Observe<P::Buffer>>(engine: &mut Engine<P, O>, at: Ingress<'_>, mut buffer: P::Buffer) {
    let asked = neighbours::arp_question(buffer.bytes());
    if let Some((vip, mac)) = neighbours::arp_claim(buffer.bytes()) {
        note_claim(&engine.neighbours.ownership, at, vip, mac, false);
    } else if let Some((vip, mac)) = neighbours::arp_probe(buffer.bytes()).filter(|_| engine.neighbours.ownership.is_elected()) {
        // Of the gateway that has given the address up, which it may have announced.
        note_claim(&engine.neighbours.ownership, at, vip, mac, true);
    }
    let Some(permission) = asked.and_then(|target| may_answer_for(&engine.neighbours.ownership, at, target)) else {
        return give_to_linux(&mut engine.output, at, buffer);
    };
    let told = neighbours::arp_claim(buffer.bytes())
        .filter(|&(sender, mac)| has_moved(at.snapshot, at.arrival.link, sender, mac))
        .and_then(|_| {
            let frame = buffer.bytes();
            for_linux(&mut engine.output, at.snapshot, at.arrival.link, |copy| {
                let fits = copy.resize(frame.len());
                copy.bytes_mut().iter_mut().zip(frame).for_each(|(to, from)| *to = *from);
                fits
            })
        });
    if neighbours::arp_reply(&mut buffer, at.snapshot.port(at.arrival.link.port()).mac) {
        engine.output.answer(at.arrival.link.port(), at.arrival.tags, permission, buffer);
    } else {
        engine.output.drop(buffer, DropReason::Malformed);
    }
    tell_linux(&mut engine.output, at, told);
}

/// A frame for Linux, besides the answer to a question.
#[cold]
fn for_linux<P: Port, O: Observe<P::Buffer>>(
    output: &mut Output<P, O>,
    snapshot: &Snapshot,
    link: Link,
    write: impl FnOnce(&mut P::Buffer) -> bool,
) -> Option<P::Buffer> {
    if !snapshot.port(link.port()).twin {
        return None;
    }
    let mut copy = output.egress.allocate(link.port())?;
    if write(&mut copy) {
        return Some(copy);
    }
    output.egress.discard(copy);
    None
}

/// Passes a frame of [`for_linux`] on: Linux updates or probes its entry for the sender by its own rules, within
/// the rate of questions. The frame counts as originated.
fn tell_linux<P: Port, O: Observe<P::Buffer>>(output: &mut Output<P, O>, at: Ingress<'_>, copy: Option<P::Buffer>) {
    if let Some(copy) = copy {
        output.tally.originated += 1;
        give_to_linux(output, at, copy);
    }
}

/// What tells Linux that a neighbour asks from another Ethernet address than the known one. Linux ignores solicitations
/// for addresses that it does not have, so that it gets one for an address of its own.
#[cold]
fn solicitation_by<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    snapshot: &Snapshot,
    link: Link,
    sender: u128,
    mac: Mac,
) -> Option<P::Buffer> {
    let own = snapshot.own_addresses(link).find(|own| own.is_ipv6() && snapshot.routes().is_on_link(link, *own));
    match own.and_then(u128::from_ip) {
        Some(own) => {
            let at = snapshot.port(link.port()).mac;
            for_linux(&mut engine.output, snapshot, link, |copy| neighbours::solicitation(copy, (sender, mac), (own, at)))
        }
        None => {
            engine.neighbours.ask(UnresolvedNeighbour { link, address: sender.ip() });
            None
        }
    }
}

/// Whether ARP and neighbour discovery are answered for an address: for one of a VIP group only while the gateway owns
/// the group.
fn may_answer_for<A: Address>(ownership: &VipOwnership, at: Ingress<'_>, target: A) -> Option<Permission> {
    let answers = at.snapshot.ready() && at.snapshot.answers_for(at.arrival.link, target);
    answers.then(|| ownership.may_speak_for(at.snapshot, target, at.arrival.now_ns)).flatten()
}

/// Notes that another station announces, or asks for, a VIP for which this gateway answers, or a SNAT address of a VIP
/// group.
fn note_claim<A: Address>(ownership: &VipOwnership, at: Ingress<'_>, vip: A, other: Mac, is_question: bool) {
    let is_ours = at.snapshot.ports().iter().any(|port| port.mac == other);
    let (is_movable, group) = match at.snapshot.role(vip) {
        AddressRole::Vip => (true, ownership.group_of_vip(vip.ip())),
        AddressRole::Snat => {
            let group = at.snapshot.group_of_snat(vip);
            (group.is_some(), group)
        }
        AddressRole::Twin(_) | AddressRole::Broadcast | AddressRole::PoolUnused | AddressRole::Elsewhere => (false, None),
    };
    if !is_ours && is_movable && may_answer_for(ownership, at, vip).is_some() {
        let own = at.snapshot.port(at.arrival.link.port()).mac;
        ownership.note(VipClaim { link: at.arrival.link, vip: vip.ip(), other, own }, group, is_question);
    }
}

/// The same for a neighbour advertisement.
pub(in crate::forward) fn note_advertisement<A: Address>(
    ownership: &VipOwnership,
    at: Ingress<'_>,
    frame: &[u8],
    headers: &Headers<A>,
) {
    if let Some((vip, mac)) = neighbours::neighbour_claim(frame, headers) {
        note_claim(ownership, at, vip, mac, false);
    }
}

pub(in crate::forward) fn solicited<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    mut buffer: P::Buffer,
    headers: &Headers<u128>,
) {
    let asked = neighbours::neighbour_question(buffer.bytes(), headers);
    let Some(permission) = asked.and_then(|target| may_answer_for(&engine.neighbours.ownership, at, target)) else {
        return match at.snapshot.role(headers.tuple.destination) {
            AddressRole::Elsewhere | AddressRole::Broadcast | AddressRole::Twin(_) => {
                give_to_linux(&mut engine.output, at, buffer)
            }
            AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused => {
                engine.output.drop(buffer, DropReason::UnsupportedProtocol)
            }
        };
    };
    if at.snapshot.role(headers.tuple.source) != AddressRole::Elsewhere {
        return engine.output.drop(buffer, DropReason::OwnSource);
    }
    let moved = neighbours::neighbour_asker(buffer.bytes(), headers)
        .filter(|&(who, mac)| has_moved(at.snapshot, at.arrival.link, who, mac));
    let told = moved.and_then(|(sender, mac)| solicitation_by(engine, at.snapshot, at.arrival.link, sender, mac));
    if neighbours::neighbour_advertisement(&mut buffer, headers, at.snapshot.port(at.arrival.link.port()).mac) {
        engine.output.answer(at.arrival.link.port(), at.arrival.tags, permission, buffer);
    } else {
        engine.output.drop(buffer, DropReason::Malformed);
    }
    tell_linux(&mut engine.output, at, told);
}

/// Turns the packet into its answer, if the rules and the rate limit allow one (FORWARDING 8).
pub(in crate::forward) fn reply<A: Address, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    mut buffer: P::Buffer,
    headers: &Headers<A>,
    reply: Answer,
) {
    let (asker, now_ns) = (headers.tuple.source, at.arrival.now_ns);
    let allowed = icmp::may_answer(headers)
        && match reply {
            Answer::TooBig { .. } => engine.limiter.allow_too_big(asker, now_ns),
            _ => engine.limiter.allow(asker, now_ns),
        };
    let source = answer_source(at.snapshot, at.arrival.link, headers.tuple.destination).filter(|_| allowed);
    let mac = at.snapshot.port(at.arrival.link.port()).mac;
    let done = source.is_some_and(|source| match reply {
        Answer::Reset => rewrite::reset(&mut buffer, headers, mac),
        Answer::PortUnreachable => icmp::icmp_error(&mut buffer, headers, source, IcmpError::PortUnreachable, mac),
        Answer::TimeExceeded => icmp::icmp_error(&mut buffer, headers, source, IcmpError::TimeExceeded, mac),
        Answer::TooBig { mtu } => icmp::icmp_error(&mut buffer, headers, source, IcmpError::TooBig { mtu }, mac),
        Answer::Echo => icmp::echo_reply(&mut buffer, headers, mac),
    });
    if done {
        engine.output.answer(at.arrival.link.port(), at.arrival.tags, Permission::Always, buffer);
    } else {
        engine.output.drop(buffer, DropReason::AnswerLimited);
    }
}

/// Drops a packet without flow and, within the rate limit, sends a RST or ABORT back. The RST counts as originated:
/// its cause is the drop (DESIGN 3.5). It is written over the packet, which is no longer needed.
pub(in crate::forward) fn reset<A: Address, P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    at: Ingress<'_>,
    mut buffer: P::Buffer,
    headers: &Headers<A>,
    reason: DropReason,
) {
    engine.output.count_service_drop(at.snapshot, headers, reason);
    engine.output.count_drop(&buffer, reason);
    let allowed = icmp::may_answer(headers) && engine.limiter.allow(headers.tuple.source, at.arrival.now_ns);
    if allowed && rewrite::reset(&mut buffer, headers, at.snapshot.port(at.arrival.link.port()).mac) {
        engine.output.originate(at.arrival.link.port(), at.arrival.tags, buffer);
    } else {
        engine.output.egress.discard(buffer);
    }
}

/// Sends resets in these buffers; those that are answers (`limited`) within the rate limit.
#[cold]
pub(in crate::forward) fn originate<P: Port, O: Observe<P::Buffer>>(
    engine: &mut Engine<P, O>,
    arrival: Arrival,
    resets: &[Reset],
    buffers: ArrayVec<P::Buffer, RESETS_MAX>,
    limited: bool,
) {
    for (reset, mut buffer) in resets.iter().zip(buffers) {
        if limited && !engine.limiter.allow_ip(reset.destination.ip(), arrival.now_ns) {
            engine.output.egress.discard(buffer);
            continue;
        }
        if rewrite::write_reset(&mut buffer, reset) {
            engine.output.originate(reset.exit.port, reset.exit.link.tags(), buffer);
        } else {
            engine.output.egress.discard(buffer);
        }
    }
}

/// Whether a neighbour has another Ethernet address than the known one. Strangers have not: nothing is known of them.
fn has_moved<A: Address>(snapshot: &Snapshot, link: Link, sender: A, mac: Mac) -> bool {
    snapshot.role(sender) == AddressRole::Elsewhere
        && snapshot.routes().mac_of(link, sender.ip()).is_some_and(|known| known != mac)
}

/// The source address of an answer about a packet: the destination of the packet, or an address of the gateway if that
/// destination is not the gateway's (a reply of mode `dnat` to its client).
fn answer_source<A: Address>(snapshot: &Snapshot, arrived_by: Link, destination: A) -> Option<A> {
    match snapshot.role(destination) {
        AddressRole::Elsewhere | AddressRole::Broadcast => snapshot.own_addresses(arrived_by).find_map(A::from_ip),
        AddressRole::Vip | AddressRole::Snat | AddressRole::Twin(_) | AddressRole::PoolUnused => Some(destination),
    }
}
