//! The pass over a burst that finds each packet's owner and hands over what is another's. Runs only where there is more
//! than one worker.

use std::mem;

use arrayvec::ArrayVec;

use super::{Observer, Steering, Towards, WorkerId};
use crate::apply::Looked;
use crate::lanes::Lanes;
use crate::peers::Peers;
use crate::snapshot::{Place, Snapshot};
use crate::tally::Tally;
use crate::worker::{Kind, Sorted};
use crate::{Address, BURST, Buffer, Burst, Port, PortIndex, Quote, Transport, Tuple};

/// Leaves in the burst what is this worker's, in order, and hands the rest to its owners.
#[inline(never)]
pub(crate) fn steer<P: Port>(
    lanes: &mut Lanes<P>,
    snapshot: &Snapshot,
    in_port: PortIndex,
    burst: &mut Burst<P::Buffer>,
    sorted: &mut Sorted,
    tally: &mut Tally,
) {
    let Some(peers) = &mut lanes.peers else { return };
    let me = peers.me();
    let owners = owners(peers, snapshot, in_port, burst, sorted);
    if owners.iter().all(|owner| *owner == me) {
        return;
    }
    let Sorted { kinds, v4, v6 } = mem::take(sorted);
    let (mut v4, mut v6) = (v4.into_iter(), v6.into_iter());
    for ((buffer, kind), owner) in mem::take(burst).into_iter().zip(kinds).zip(owners) {
        let is_mine = owner == me;
        match kind {
            Kind::V4 => sorted.v4.extend(v4.next().filter(|_| is_mine)),
            Kind::V6 | Kind::Solicitation => sorted.v6.extend(v6.next().filter(|_| is_mine)),
            Kind::Arp | Kind::Other | Kind::Bad(_) => {}
        }
        if is_mine {
            burst.push(buffer);
            sorted.kinds.push(kind);
        } else {
            lanes.hand_over(owner, in_port, buffer, tally);
        }
    }
}

/// The owner of each packet. What has none is whose it came to: ARP, neighbour discovery, echo, other protocols.
fn owners<B: Buffer>(
    peers: &mut Peers<B>,
    snapshot: &Snapshot,
    in_port: PortIndex,
    burst: &Burst<B>,
    sorted: &Sorted,
) -> ArrayVec<WorkerId, BURST> {
    let (me, steering, mut proof) = peers.steering(in_port);
    let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
    let owner = |(buffer, kind): (&B, &Kind)| {
        let owner = match kind {
            Kind::V4 => v4.next().and_then(|looked| owner(steering, &mut proof, me, snapshot, buffer, looked)),
            Kind::V6 => v6.next().and_then(|looked| owner(steering, &mut proof, me, snapshot, buffer, looked)),
            Kind::Solicitation => v6.next().and(None),
            Kind::Arp | Kind::Other | Kind::Bad(_) => None,
        };
        owner.unwrap_or(me)
    };
    burst.iter().zip(&sorted.kinds).map(owner).collect()
}

/// The owner of a packet of a transport protocol with ports, or of an error about one.
fn owner<A: Address, B: Buffer>(
    steering: &Steering,
    proof: &mut Option<&mut Observer>,
    me: WorkerId,
    snapshot: &Snapshot,
    buffer: &B,
    looked: &Looked<A>,
) -> Option<WorkerId> {
    let tuple = &looked.headers.tuple;
    let is_spread_by_cards = match looked.headers.transport {
        Transport::Tcp { .. } | Transport::Udp => true,
        Transport::Sctp => false,
        Transport::Icmp { .. } => return owner_of_error(steering, snapshot, buffer, looked),
        Transport::Fragment | Transport::Other => return None,
    };
    let towards = towards(snapshot, tuple);
    if is_spread_by_cards && let Some(proof) = proof {
        if proof.wants()
            && let Some(hash) = steering.rss_hash(tuple)
        {
            proof.look(buffer.rss_hash(), hash, steering.reta(hash as usize), me);
        }
        if proof.trusts() && towards.is_by_tuple() {
            return Some(me);
        }
    }
    Some(steering.owner_hashed(tuple, towards, looked.hash))
}

/// The owner of the flow whose packet an ICMP error quotes, as we sent it: an answer to that would come to the owner.
#[cold]
fn owner_of_error<A: Address, B: Buffer>(
    steering: &Steering,
    snapshot: &Snapshot,
    buffer: &B,
    looked: &Looked<A>,
) -> Option<WorkerId> {
    let answer = Quote::of(buffer.bytes(), &looked.headers)?.tuple.reversed();
    Some(steering.owner(&answer, towards(snapshot, &answer)))
}

fn towards<A: Address>(snapshot: &Snapshot, tuple: &Tuple<A>) -> Towards {
    A::tables(snapshot).steering.towards(tuple, |address| snapshot.place(address) != Place::Elsewhere)
}
