//! The stage of a burst that determines each packet's owner and hands over packets of other workers. It runs only with
//! more than one worker.
//!
//! **Invariant:** the owner of a packet is computed, whichever queue it came by. So a flow is only at its owner, and no
//! change of a network card leads its packets astray. Cards are only observed.
//!
//! Not here: the owner function and the queues (`workers`).

use std::mem;

use arrayvec::ArrayVec;

use super::{Ingress, Kind, Lookup, Sorted};
use crate::fragment::{Datagram, Fragment, Part};
use crate::icmp::{Inner, Quote, TunnelQuote};
use crate::port::{BURST, Burst, Origin, Port, PortIndex};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::Tally;
use crate::wire::{Address, Buffer, Headers, Parsed, Tags, Transport, Tuple, network_len, parse};
use crate::workers::{Egress, HandoverTask, Observer, Peers, RssKind, Steering, WorkerId};

/// Bytes of VLAN tags that every card can parse: one tag.
const TAG_BYTES_PLAIN: usize = 4;

/// Keeps this worker's packets in the burst, in order, and hands the others to their owners.
#[inline(never)]
pub(crate) fn steer<P: Port>(
    egress: &mut Egress<P>,
    at: Ingress<'_>,
    burst: &mut Burst<P::Buffer>,
    sorted: &mut Sorted,
    tally: &mut Tally,
) {
    let Some(peers) = &mut egress.peers else { return };
    let me = peers.me();
    let mut tasks = tasks(peers, at, burst, sorted);
    if at.arrival.origin == Origin::Port {
        keep_behind_fragments(peers, at.arrival.now_ns, burst, sorted, &mut tasks);
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
            egress.hand_over(owner, task, at.arrival, buffer, tally);
        }
    }
}

/// The owner of each packet, or the worker that determines its owner. Packets without an owner stay with the worker
/// that received them: ARP, neighbour discovery, echo and other protocols, and packets with VLAN tags, which return
/// here without them.
fn tasks<B: Buffer>(
    peers: &Peers<B>,
    at: Ingress<'_>,
    burst: &Burst<B>,
    sorted: &Sorted,
) -> ArrayVec<(WorkerId, HandoverTask), BURST> {
    let mut queue = ReceiveQueue::at(peers, at.arrival.link.port(), at.arrival.tags.bytes().into());
    queue.proof = queue.proof.filter(|_| at.arrival.origin == Origin::Port);
    let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
    let task = |(buffer, kind): (&B, &Kind)| {
        let task = match kind {
            Kind::V4 => v4.next().and_then(|lookup| task(&queue, at.snapshot, buffer, lookup)),
            Kind::V6 => v6.next().and_then(|lookup| task(&queue, at.snapshot, buffer, lookup)),
            Kind::Solicitation => v6.next().and(None),
            Kind::Arp | Kind::Tagged | Kind::Other | Kind::Foreign | Kind::Bad(_) => None,
        };
        task.unwrap_or((queue.me, HandoverTask::Decide))
    };
    burst.iter().zip(&sorted.kinds).map(task).collect()
}

/// Which worker does what with a packet of a transport protocol with ports, with a fragment of one, or with an ICMP
/// error about one.
fn task<A: Address, B: Buffer>(
    queue: &ReceiveQueue<'_>,
    snapshot: &Snapshot,
    buffer: &B,
    lookup: &Lookup<A>,
) -> Option<(WorkerId, HandoverTask)> {
    let (steering, headers) = (queue.steering, &lookup.headers);
    match headers.transport {
        Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. } => {}
        Transport::Icmp { .. } => return Some((owner_of_error(steering, snapshot, buffer, lookup)?, HandoverTask::Decide)),
        Transport::Fragment => return Some((meeting(steering, snapshot, buffer, lookup)?, HandoverTask::FindOwner)),
        Transport::Other => return None,
    }
    if is_plain(headers) {
        queue.observe(buffer, &headers.tuple);
    }
    let target = snapshot.packet_target(&headers.tuple);
    Some((steering.owner_hashed(&headers.tuple, target, lookup.hash), HandoverTask::Decide))
}

/// A worker's receive queue of a port, and what is proven of it.
struct ReceiveQueue<'a> {
    me: WorkerId,
    steering: &'a Steering,
    /// `None` where no device spreads packets by RSS, or not every card can parse the tags.
    proof: Option<&'a Observer>,
}

impl<'a> ReceiveQueue<'a> {
    /// The queue by which packets came on a port, with these bytes of VLAN tags.
    #[inline(always)]
    fn at<B>(peers: &'a Peers<B>, port: PortIndex, tag_bytes: usize) -> Self {
        let (me, steering, proof) = peers.steering(port);
        Self { me, steering, proof: proof.filter(|_| tag_bytes <= TAG_BYTES_PLAIN) }
    }

    /// Compares the queue with the owner of a plain packet, if its kind is not proven yet. To be called once a packet.
    #[inline(always)]
    fn observe<A: Address, B: Buffer>(&self, buffer: &B, tuple: &Tuple<A>) {
        if let Some(proof) = self.proof
            && let Some(kind) = RssKind::of::<A>(tuple.protocol)
            && proof.observes(kind)
        {
            self.look(proof, kind, buffer, tuple);
        }
    }

    #[inline(never)] // most ports have no device that spreads packets so
    fn look<A: Address, B: Buffer>(&self, proof: &Observer, kind: RssKind, buffer: &B, tuple: &Tuple<A>) {
        if let Some(hash) = self.steering.rss_hash(tuple) {
            proof.look(kind, buffer.rss_hash(), hash, self.steering.reta(hash as usize), self.me);
        }
    }

    /// Compares the queue with the owner of any packet, if it is a plain one.
    fn check<A: Address, B: Buffer>(&self, buffer: &B, headers: &Headers<A>) {
        let has_ports = matches!(headers.transport, Transport::Tcp { .. } | Transport::Udp);
        if let Some(proof) = self.proof
            && let Some(kind) = RssKind::of::<A>(headers.tuple.protocol)
            && has_ports
            && is_plain(headers)
        {
            self.look(proof, kind, buffer, &headers.tuple);
        }
    }
}

/// Compares one packet in many that a port receives with the queue that it came by: of flows that are known, too.
#[inline(always)]
pub(in crate::forward) fn sample_queue<B: Buffer>(peers: &mut Peers<B>, port: PortIndex, burst: &Burst<B>) {
    if let Some(buffer) = peers.sample(port, burst.len()).and_then(|at| burst.get(at)) {
        check_sampled(peers, port, buffer);
    }
}

#[cold]
#[inline(never)]
fn check_sampled<B: Buffer>(peers: &Peers<B>, port: PortIndex, buffer: &B) {
    let queue = ReceiveQueue::at(peers, port, Tags::of(buffer.bytes()).bytes().into());
    match parse(buffer.bytes()) {
        Ok(Parsed::V4(headers)) => queue.check(buffer, &headers),
        Ok(Parsed::V6(headers)) => queue.check(buffer, &headers),
        Ok(Parsed::Arp | Parsed::Other) | Err(_) => {}
    }
}

/// The other worker that owns the flow of a packet; `None` if this one does. A plain packet that is not left for [`steer`] is
/// to be passed to [`observe_plain`] too.
#[inline(always)]
pub(in crate::forward) fn other_owner<A: Address, B: Buffer>(
    peers: &Peers<B>,
    snapshot: &Snapshot,
    tuple: &Tuple<A>,
    hash: u64,
) -> Option<WorkerId> {
    let owner = peers.owner_function().owner_hashed(tuple, snapshot.packet_target(tuple), hash);
    (owner != peers.me()).then_some(owner)
}

/// Compares the queue that a plain packet came by, on a port and with these bytes of VLAN tags, with its owner, if its kind is
/// not proven yet.
#[inline(always)]
pub(in crate::forward) fn observe_plain<A: Address, B: Buffer>(
    peers: &Peers<B>,
    port: PortIndex,
    tag_bytes: usize,
    buffer: &B,
    tuple: &Tuple<A>,
) {
    ReceiveQueue::at(peers, port, tag_bytes).observe(buffer, tuple);
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
                *task = (meets_at, HandoverTask::FindOwner);
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
