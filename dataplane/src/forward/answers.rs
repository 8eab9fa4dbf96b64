//! Answers: turns packets into ARP, neighbour discovery, echo, error and reset answers within the rate limit
//! (FORWARDING 8), and originates RSTs that no packet turns into (FORWARDING 2 and 3). Each of those counts as
//! originated: its cause is the end of another packet.
//!
//! **Invariant:** nothing is answered before the first complete state.
//!
//! Not here: the decision to answer an IP packet, and the bytes of answers (`neighbours`, `icmp`, `rewrite`).

use arrayvec::ArrayVec;

use super::engine::Engine;
use super::observer::{Observe, PacketOutcome};
use super::rewrite;
use super::sort::Ingress;
use crate::forward::decide::{Answer, RESETS_MAX};
use crate::forward::rewrite::Reset;
use crate::icmp::{self, IcmpError};
use crate::neighbours::{self, Permission, UnresolvedNeighbour, VipClaim};
use crate::port::{Arrival, Link, Port};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Mac};

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// Answers ARP. Answers to ARP and neighbour discovery have no rate limit (docs/internals/decisions/0013).
    pub(super) fn arp(&mut self, at: Ingress<'_>, mut buffer: P::Buffer) {
        let asked = neighbours::arp_question(buffer.bytes());
        if let Some((vip, mac)) = neighbours::arp_claim(buffer.bytes()) {
            self.note_claim(at, vip, mac, false);
        } else if let Some((vip, mac)) = neighbours::arp_probe(buffer.bytes()).filter(|_| self.neighbours.ownership.is_elected())
        {
            // Of the gateway that has given the address up, which it may have announced.
            self.note_claim(at, vip, mac, true);
        }
        let Some(permission) = asked.and_then(|target| self.may_answer_for(at, target)) else {
            return self.give_to_linux(at, buffer);
        };
        let told = neighbours::arp_claim(buffer.bytes())
            .filter(|&(sender, mac)| has_moved(at.snapshot, at.arrival.link, sender, mac))
            .and_then(|_| {
                let frame = buffer.bytes();
                self.for_linux(at.snapshot, at.arrival.link, |copy| {
                    let fits = copy.resize(frame.len());
                    copy.bytes_mut().iter_mut().zip(frame).for_each(|(to, from)| *to = *from);
                    fits
                })
            });
        if neighbours::arp_reply(&mut buffer, at.snapshot.port(at.arrival.link.port()).mac) {
            self.answered(at.arrival, permission, buffer);
        } else {
            self.drop(buffer, DropReason::Malformed);
        }
        self.tell_linux(at, told);
    }

    /// A frame for Linux, besides the answer to a question.
    #[cold]
    fn for_linux(&mut self, snapshot: &Snapshot, link: Link, write: impl FnOnce(&mut P::Buffer) -> bool) -> Option<P::Buffer> {
        if !snapshot.port(link.port()).twin {
            return None;
        }
        let mut copy = self.egress.allocate(link.port())?;
        if write(&mut copy) {
            return Some(copy);
        }
        self.egress.discard(copy);
        None
    }

    /// Passes a frame of [`Engine::for_linux`] on: Linux updates or probes its entry for the sender by its own rules, within
    /// the rate of questions. The frame counts as originated.
    fn tell_linux(&mut self, at: Ingress<'_>, copy: Option<P::Buffer>) {
        if let Some(copy) = copy {
            self.tally.originated += 1;
            self.give_to_linux(at, copy);
        }
    }

    /// What tells Linux that a neighbour asks from another Ethernet address than the known one. Linux ignores solicitations
    /// for addresses that it does not have, so that it gets one for an address of its own.
    #[cold]
    fn solicitation_by(&mut self, snapshot: &Snapshot, link: Link, sender: u128, mac: Mac) -> Option<P::Buffer> {
        let own = snapshot.own_addresses(link).find(|own| own.is_ipv6() && snapshot.routes().is_on_link(link, *own));
        match own.and_then(u128::from_ip) {
            Some(own) => {
                let at = snapshot.port(link.port()).mac;
                self.for_linux(snapshot, link, |copy| neighbours::solicitation(copy, (sender, mac), (own, at)))
            }
            None => {
                self.neighbours.ask(UnresolvedNeighbour { link, address: sender.ip() });
                None
            }
        }
    }

    /// Whether ARP and neighbour discovery are answered for an address: for one of a VIP group only while the gateway owns
    /// the group.
    fn may_answer_for<A: Address>(&self, at: Ingress<'_>, target: A) -> Option<Permission> {
        let answers = at.snapshot.ready() && at.snapshot.answers_for(at.arrival.link, target);
        answers.then(|| self.neighbours.ownership.may_speak_for(at.snapshot, target, at.arrival.now_ns)).flatten()
    }

    /// Notes that another station announces, or asks for, a VIP for which this gateway answers, or a SNAT address of a VIP
    /// group.
    fn note_claim<A: Address>(&self, at: Ingress<'_>, vip: A, other: Mac, is_question: bool) {
        let is_ours = at.snapshot.ports().iter().any(|port| port.mac == other);
        let (is_movable, group) = match at.snapshot.role(vip) {
            AddressRole::Vip => (true, self.neighbours.ownership.group_of_vip(vip.ip())),
            AddressRole::Snat => {
                let group = at.snapshot.group_of_snat(vip);
                (group.is_some(), group)
            }
            AddressRole::Twin(_) | AddressRole::Broadcast | AddressRole::PoolUnused | AddressRole::Elsewhere => (false, None),
        };
        if !is_ours && is_movable && self.may_answer_for(at, vip).is_some() {
            let own = at.snapshot.port(at.arrival.link.port()).mac;
            self.neighbours.ownership.note(VipClaim { link: at.arrival.link, vip: vip.ip(), other, own }, group, is_question);
        }
    }

    /// The same for a neighbour advertisement.
    pub(super) fn note_advertisement<A: Address>(&self, at: Ingress<'_>, buffer: &P::Buffer, headers: &Headers<A>) {
        if let Some((vip, mac)) = neighbours::neighbour_claim(buffer.bytes(), headers) {
            self.note_claim(at, vip, mac, false);
        }
    }

    pub(super) fn solicited(&mut self, at: Ingress<'_>, mut buffer: P::Buffer, headers: &Headers<u128>) {
        let asked = neighbours::neighbour_question(buffer.bytes(), headers);
        let Some(permission) = asked.and_then(|target| self.may_answer_for(at, target)) else {
            return match at.snapshot.role(headers.tuple.destination) {
                AddressRole::Elsewhere | AddressRole::Broadcast | AddressRole::Twin(_) => self.give_to_linux(at, buffer),
                AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused => {
                    self.drop(buffer, DropReason::UnsupportedProtocol)
                }
            };
        };
        if at.snapshot.role(headers.tuple.source) != AddressRole::Elsewhere {
            return self.drop(buffer, DropReason::OwnSource);
        }
        let moved = neighbours::neighbour_asker(buffer.bytes(), headers)
            .filter(|&(who, mac)| has_moved(at.snapshot, at.arrival.link, who, mac));
        let told = moved.and_then(|(sender, mac)| self.solicitation_by(at.snapshot, at.arrival.link, sender, mac));
        if neighbours::neighbour_advertisement(&mut buffer, headers, at.snapshot.port(at.arrival.link.port()).mac) {
            self.answered(at.arrival, permission, buffer);
        } else {
            self.drop(buffer, DropReason::Malformed);
        }
        self.tell_linux(at, told);
    }

    /// Turns the packet into its answer, if the rules and the rate limit allow one (FORWARDING 8).
    pub(super) fn reply<A: Address>(&mut self, at: Ingress<'_>, mut buffer: P::Buffer, headers: &Headers<A>, reply: Answer) {
        let (asker, now_ns) = (headers.tuple.source, at.arrival.now_ns);
        let allowed = icmp::may_answer(headers)
            && match reply {
                Answer::TooBig { .. } => self.limiter.allow_too_big(asker, now_ns),
                _ => self.limiter.allow(asker, now_ns),
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
            self.answered(at.arrival, Permission::Always, buffer);
        } else {
            self.drop(buffer, DropReason::AnswerLimited);
        }
    }

    pub(super) fn answered(&mut self, arrival: Arrival, permission: Permission, buffer: P::Buffer) {
        self.observer.observe(&buffer, PacketOutcome::Reply(arrival.link.port()), || None);
        self.tally.replies += 1;
        permission.send(&mut self.egress, arrival.link.port(), arrival.tags, buffer, &mut self.tally);
    }

    /// Drops a packet without flow and, within the rate limit, sends a RST or ABORT back. The RST counts as originated:
    /// its cause is the drop (DESIGN 3.5). It is written over the packet, which is no longer needed.
    pub(super) fn reset<A: Address>(&mut self, at: Ingress<'_>, mut buffer: P::Buffer, headers: &Headers<A>, reason: DropReason) {
        self.count_service_drop(at.snapshot, headers, reason);
        self.observer.observe(&buffer, PacketOutcome::Drop(reason), || None);
        if let Some(watching) = &self.watching {
            watching.dropped(reason, &buffer);
        }
        self.tally.drop(reason);
        let allowed = icmp::may_answer(headers) && self.limiter.allow(headers.tuple.source, at.arrival.now_ns);
        if allowed && rewrite::reset(&mut buffer, headers, at.snapshot.port(at.arrival.link.port()).mac) {
            self.tally.originated += 1;
            self.egress.send_tagged(at.arrival.link.port(), at.arrival.tags, buffer, &mut self.tally);
        } else {
            self.egress.discard(buffer);
        }
    }

    /// Sends resets in these buffers; those that are answers (`limited`) within the rate limit.
    #[cold]
    pub(super) fn originate(
        &mut self,
        arrival: Arrival,
        resets: &[Reset],
        buffers: ArrayVec<P::Buffer, RESETS_MAX>,
        limited: bool,
    ) {
        for (reset, mut buffer) in resets.iter().zip(buffers) {
            if limited && !self.limiter.allow_ip(reset.destination.ip(), arrival.now_ns) {
                self.egress.discard(buffer);
                continue;
            }
            if rewrite::write_reset(&mut buffer, reset) {
                self.tally.originated += 1;
                self.egress.send_tagged(reset.exit.port, reset.exit.link.tags(), buffer, &mut self.tally);
            } else {
                self.egress.discard(buffer);
            }
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
