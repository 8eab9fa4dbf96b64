//! The stage of a burst that determines each packet's owner and hands over packets of other workers. It runs only with
//! more than one worker.
//!
//! Not here: the owner function and the queues (`workers`).

use std::mem;

use arrayvec::ArrayVec;

use super::{Kind, Lookup, Sorted};
use crate::fragment::{Datagram, Fragment, Part};
use crate::icmp::{Inner, Quote, TunnelQuote};
use crate::port::{Arrival, BURST, Burst, Origin, Port, PortIndex};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::Tally;
use crate::wire::{Address, Buffer, Headers, Transport, Tuple, network_len};
use crate::workers::{Egress, HandoverTask, Observer, Peers, Steering, WorkerId};

/// Bytes of VLAN tags that every card can parse: one tag.
const TAG_BYTES_PLAIN: u16 = 4;

/// Keeps this worker's packets in the burst, in order, and hands the others to their owners.
#[inline(never)]
pub(crate) fn steer<P: Port>(
    egress: &mut Egress<P>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &mut Burst<P::Buffer>,
    sorted: &mut Sorted,
    tally: &mut Tally,
) {
    let Some(peers) = &mut egress.peers else { return };
    let me = peers.me();
    let mut tasks = tasks(peers, snapshot, arrival, burst, sorted);
    if arrival.origin == Origin::Port {
        keep_behind_fragments(peers, arrival.now_ns, burst, sorted, &mut tasks);
    }
    if tasks.iter().all(|(owner, _)| *owner == me) {
        return;
    }
    let Sorted { kinds, v4, v6 } = mem::take(sorted);
    let (mut v4, mut v6) = (v4.into_iter(), v6.into_iter());
    for ((buffer, kind), (owner, task)) in mem::take(burst).into_iter().zip(kinds).zip(tasks) {
        let is_mine = owner == me;
        match kind {
            Kind::V4 => sorted.v4.extend(v4.next().filter(|_| is_mine)),
            Kind::V6 | Kind::Solicitation => sorted.v6.extend(v6.next().filter(|_| is_mine)),
            Kind::Arp | Kind::Tagged | Kind::Other | Kind::Foreign | Kind::Bad(_) => {}
        }
        if is_mine {
            burst.push(buffer);
            sorted.kinds.push(kind);
        } else {
            egress.hand_over(owner, task, arrival, buffer, tally);
        }
    }
}

/// The owner of each packet, or the worker that determines its owner. Packets without an owner stay with the worker
/// that received them: ARP, neighbour discovery, echo and other protocols, and packets with VLAN tags, which return
/// here without them.
fn tasks<B: Buffer>(
    peers: &mut Peers<B>,
    snapshot: &Snapshot,
    arrival: Arrival,
    burst: &Burst<B>,
    sorted: &Sorted,
) -> ArrayVec<(WorkerId, HandoverTask), BURST> {
    let (me, steering, proof) = steering_at(peers, (arrival.link.port(), arrival.tags.bytes()));
    let mut proof = proof.filter(|_| arrival.origin == Origin::Port);
    let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
    let task = |(buffer, kind): (&B, &Kind)| {
        let task = match kind {
            Kind::V4 => v4.next().and_then(|lookup| task(steering, &mut proof, me, snapshot, buffer, lookup)),
            Kind::V6 => v6.next().and_then(|lookup| task(steering, &mut proof, me, snapshot, buffer, lookup)),
            Kind::Solicitation => v6.next().and(None),
            Kind::Arp | Kind::Tagged | Kind::Other | Kind::Foreign | Kind::Bad(_) => None,
        };
        task.unwrap_or((me, HandoverTask::Decide))
    };
    burst.iter().zip(&sorted.kinds).map(task).collect()
}

/// Which worker does what with a packet of a transport protocol with ports, with a fragment of one, or with an ICMP
/// error about one.
fn task<A: Address, B: Buffer>(
    steering: &Steering,
    proof: &mut Option<&mut Observer>,
    me: WorkerId,
    snapshot: &Snapshot,
    buffer: &B,
    lookup: &Lookup<A>,
) -> Option<(WorkerId, HandoverTask)> {
    let tuple = &lookup.headers.tuple;
    let is_spread_by_cards = match lookup.headers.transport {
        Transport::Tcp { .. } | Transport::Udp => true,
        // Few cards hash SCTP ports; the others would appear refuted.
        Transport::Sctp { .. } => false,
        Transport::Icmp { .. } => return Some((owner_of_error(steering, snapshot, buffer, lookup)?, HandoverTask::Decide)),
        Transport::Fragment => return Some((meeting(steering, snapshot, buffer, lookup)?, HandoverTask::Meet)),
        Transport::Other => return None,
    };
    let proof = if is_spread_by_cards && is_plain(&lookup.headers) { proof.as_deref_mut() } else { None };
    Some((owner(steering, proof, me, snapshot, buffer, (tuple, lookup.hash)), HandoverTask::Decide))
}

/// The owner of a packet with ports; `proof` is for packets that every card hashes with their ports.
fn owner<A: Address, B: Buffer>(
    steering: &Steering,
    mut proof: Option<&mut Observer>,
    me: WorkerId,
    snapshot: &Snapshot,
    buffer: &B,
    (tuple, hash): (&Tuple<A>, u64),
) -> WorkerId {
    if let Some(proof) = &mut proof {
        check_queue(steering, proof, me, buffer, tuple);
    }
    owner_by(steering, proof.is_some_and(|proof| proof.trusts()), me, snapshot, (tuple, hash))
}

/// Compares the queue that a packet came by with its owner, if it is one of those that are checked. To be called once a
/// packet.
#[inline(never)] // most ports have no queue that tells owners
fn check_queue<A: Address, B: Buffer>(steering: &Steering, proof: &mut Observer, me: WorkerId, buffer: &B, tuple: &Tuple<A>) {
    if proof.wants()
        && let Some(hash) = steering.rss_hash(tuple)
    {
        proof.look(buffer.rss_hash(), hash, steering.reta(hash as usize), me);
    }
}

/// The owner of a packet with ports, where the queue that it came by `is_proven`, or not.
#[inline(always)]
pub(in crate::forward) fn owner_by<A: Address>(
    steering: &Steering,
    is_proven: bool,
    me: WorkerId,
    snapshot: &Snapshot,
    (tuple, hash): (&Tuple<A>, u64),
) -> WorkerId {
    let towards = snapshot.packet_target(tuple);
    if is_proven && towards.is_by_tuple() { me } else { steering.owner_hashed(tuple, towards, hash) }
}

/// The inputs for the determination of owners, for packets that arrived on a port with these bytes of VLAN tags; no proof
/// where not every card can parse the tags.
fn steering_at<B>(peers: &mut Peers<B>, (port, tag_bytes): (PortIndex, u16)) -> (WorkerId, &Steering, Option<&mut Observer>) {
    let (me, steering, proof) = peers.steering(port);
    (me, steering, proof.filter(|_| tag_bytes <= TAG_BYTES_PLAIN))
}

/// The other worker that owns the flow of a plain packet that arrived `at` a port with these bytes of VLAN tags; `None` if
/// this one does. A packet that is not left for [`steer`] is to be passed to [`check_plain`] too.
#[inline(always)]
pub(in crate::forward) fn other_owner<A: Address, B: Buffer>(
    peers: &mut Peers<B>,
    snapshot: &Snapshot,
    at: (PortIndex, u16),
    of: (&Tuple<A>, u64),
) -> Option<WorkerId> {
    let (me, steering, proof) = steering_at(peers, at);
    let owner = owner_by(steering, proof.is_some_and(|proof| proof.trusts()), me, snapshot, of);
    (owner != me).then_some(owner)
}

/// Compares the queue that a plain packet came by with its owner, if it is one of those that are checked.
#[inline(always)]
pub(in crate::forward) fn check_plain<A: Address, B: Buffer>(
    peers: &mut Peers<B>,
    at: (PortIndex, u16),
    buffer: &B,
    tuple: &Tuple<A>,
) {
    let (me, steering, proof) = steering_at(peers, at);
    if let Some(proof) = proof {
        check_queue(steering, proof, me, buffer, tuple);
    }
}

/// Whether every card hashes the ports of this TCP or UDP packet: nothing stands between the IP and the transport
/// header. Any sender can send other packets, which cards hash by the addresses alone or not at all.
fn is_plain<A: Address>(headers: &Headers<A>) -> bool {
    headers.transport_offset == headers.network_offset + network_len::<A>()
}

/// The owner of the flow that an ICMP error is about. The error quotes the packet as the gateway sent it; a reply to
/// that packet would come to the owner.
#[cold]
fn owner_of_error<A: Address, B: Buffer>(
    steering: &Steering,
    snapshot: &Snapshot,
    buffer: &B,
    lookup: &Lookup<A>,
) -> Option<WorkerId> {
    // For a tunnel, the flow is that of the inner packet, which carries the client's tuple.
    if let Some(quote) = TunnelQuote::of(buffer.bytes(), &lookup.headers, &snapshot.tunnels) {
        return Some(match quote.inner {
            Inner::V4(inner) => steering.owner(&inner, snapshot.packet_target(&inner)),
            Inner::V6(inner) => steering.owner(&inner, snapshot.packet_target(&inner)),
        });
    }
    let answer = Quote::of(buffer.bytes(), &lookup.headers)?.tuple.reversed();
    Some(steering.owner(&answer, snapshot.packet_target(&answer)))
}

/// The worker at which a fragment of a packet with ports meets the other fragments.
#[cold]
fn meeting<A: Address, B: Buffer>(steering: &Steering, snapshot: &Snapshot, buffer: &B, lookup: &Lookup<A>) -> Option<WorkerId> {
    let fragment = Fragment::of(buffer.bytes(), &lookup.headers).ok()?;
    let Datagram { source, destination, .. } = fragment.datagram;
    may_have_flow(&fragment, snapshot).then(|| steering.meeting(source, destination))
}

/// Sends whole packets of flows of which fragments were handed over the way that these went: through the worker where
/// fragments meet.
fn keep_behind_fragments<B: Buffer>(
    peers: &mut Peers<B>,
    now_ns: u64,
    burst: &Burst<B>,
    sorted: &Sorted,
    tasks: &mut [(WorkerId, HandoverTask)],
) {
    let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
    for ((buffer, kind), task) in burst.iter().zip(&sorted.kinds).zip(tasks) {
        match kind {
            Kind::V4 => v4.next().into_iter().for_each(|lookup| keep_behind(peers, now_ns, buffer, lookup, task)),
            Kind::V6 => v6.next().into_iter().for_each(|lookup| keep_behind(peers, now_ns, buffer, lookup, task)),
            Kind::Solicitation => drop(v6.next()),
            Kind::Arp | Kind::Tagged | Kind::Other | Kind::Foreign | Kind::Bad(_) => {}
        }
    }
}

/// The same for one packet; remembers the flow of a first fragment that is handed over.
fn keep_behind<A: Address, B: Buffer>(
    peers: &mut Peers<B>,
    now_ns: u64,
    buffer: &B,
    lookup: &Lookup<A>,
    task: &mut (WorkerId, HandoverTask),
) {
    let me = peers.me();
    match lookup.headers.transport {
        Transport::Fragment if task.0 != me => {
            let Ok(Fragment { part: Part::First(first), .. }) = Fragment::of(buffer.bytes(), &lookup.headers) else { return };
            let hash = peers.owner_function().hash_of(&first.tuple);
            peers.fragmented_flows().remember(hash, task.0, now_ns);
        }
        Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. } if peers.fragmented_flows().has_any(now_ns) => {
            let flows = peers.fragmented_flows();
            if let Some(meets_at) = flows.meets_at(lookup.hash, now_ns) {
                flows.passed(lookup.hash, now_ns);
                *task = (meets_at, HandoverTask::Meet);
            }
        }
        _ => {}
    }
}

/// The owner of a datagram, from the ports of its first fragment.
pub(crate) fn owner_of_first<A: Address>(steering: &Steering, snapshot: &Snapshot, first: &Tuple<A>) -> WorkerId {
    steering.owner(first, snapshot.packet_target(first))
}

/// Whether the datagram of a fragment may belong to a flow. Datagrams to other destinations go to the kernel fragment
/// by fragment; the kernel reassembles those that are addressed to it.
pub(in crate::forward) fn may_have_flow<A: Address>(fragment: &Fragment<A>, snapshot: &Snapshot) -> bool {
    let Datagram { source, destination, .. } = fragment.datagram;
    fragment.part != Part::Portless
        && match snapshot.role(destination) {
            AddressRole::Vip | AddressRole::Snat | AddressRole::Twin(_) => true,
            AddressRole::Elsewhere => A::of(snapshot).steering.is_backend(source),
            AddressRole::Broadcast | AddressRole::PoolUnused => false,
        }
}
