//! How a packet leaves: the next hop of a backend or client, and whether the packet fits the link.
//!
//! **Invariant:** all packets of a flow in one direction take the same next hop while it is usable.
//!
//! Not here: fragmentation of packets that do not fit.

use super::input::Packet;
use super::verdict::{Answer, NoExit};
use crate::flow::{Direction, Flow};
use crate::neighbours::UnresolvedNeighbour;
use crate::port::Link;
use crate::snapshot::{Exit, NextHop, RouteTo, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Tuple, split_mix};

/// Whether packets of a backend may arrive on this link (FORWARDING 9).
#[inline]
pub(crate) fn arrives_from(snapshot: &Snapshot, next_hop: u32, link: Link) -> bool {
    match snapshot.exit(next_hop) {
        Some(exit) => exit.link == link,
        None => arrives_from_other(snapshot, next_hop, link),
    }
}

/// The same for a next hop that is not resolved, or a group.
#[cold]
fn arrives_from_other(snapshot: &Snapshot, next_hop: u32, link: Link) -> bool {
    snapshot.next_hop(next_hop).is_some_and(|hop| hop.link == link) || snapshot.any_member_by(next_hop, link)
}

/// The exit towards a next hop. `hash` is that of the flow, the same for all its packets of one direction.
#[inline]
pub(crate) fn exit_by(snapshot: &Snapshot, next_hop: u32, hash: u64) -> Result<&Exit, NoExit> {
    match snapshot.exit(next_hop) {
        Some(exit) => Ok(exit),
        None => exit_by_member(snapshot, next_hop, hash),
    }
}

/// The exit by the flow's member of a group; otherwise the next hop is not resolved.
#[cold]
fn exit_by_member(snapshot: &Snapshot, next_hop: u32, hash: u64) -> Result<&Exit, NoExit> {
    let slot = snapshot.member(next_hop, hash);
    snapshot.exit(slot).ok_or_else(|| no_exit(snapshot, slot))
}

/// The exit towards the client. The flow stores the slot of its next hop; when routes changed since, the slot is looked
/// up again, so existing flows follow the routes (FORWARDING 2).
#[inline]
pub(crate) fn exit_to_client<'s, A: Address>(snapshot: &'s Snapshot, flow: &mut Flow<A>) -> Result<&'s Exit, NoExit> {
    if flow.route_epoch == snapshot.route_epoch()
        && let Some(exit) = snapshot.exit(flow.route_to_client)
    {
        return Ok(exit);
    }
    route_to_client(snapshot, flow)
}

#[cold]
pub(super) fn route_to_client<'s, A: Address>(snapshot: &'s Snapshot, flow: &mut Flow<A>) -> Result<&'s Exit, NoExit> {
    match snapshot.route(flow.client) {
        RouteTo::NextHop(next_hop) => {
            let slot = snapshot.member(next_hop, entropy(&flow.tuple(Direction::ToBackend)));
            flow.route_to_client = slot;
            flow.route_epoch = snapshot.route_epoch();
            snapshot.exit(slot).ok_or_else(|| no_exit(snapshot, slot))
        }
        RouteTo::Unresolved { link } => Err(NoExit::Unresolved(UnresolvedNeighbour { link, address: flow.client.ip() })),
        RouteTo::None => Err(NoExit::Dropped(DropReason::NoRoute)),
    }
}

/// The neighbour towards the client of this tuple by this route, if it is not resolved: its next hop, or the client itself.
#[inline]
pub(crate) fn unresolved_client<A: Address>(
    snapshot: &Snapshot,
    route: RouteTo,
    tuple: &Tuple<A>,
) -> Option<UnresolvedNeighbour> {
    match route {
        RouteTo::NextHop(slot) if snapshot.exit(slot).is_some() => None,
        RouteTo::NextHop(next_hop) => {
            let slot = snapshot.member(next_hop, entropy(tuple));
            let hop = snapshot.next_hop(slot).filter(|_| snapshot.exit(slot).is_none())?;
            Some(UnresolvedNeighbour { link: hop.link, address: hop.address })
        }
        RouteTo::Unresolved { link } => Some(UnresolvedNeighbour { link, address: tuple.source.ip() }),
        RouteTo::None => None,
    }
}

/// The hash that chooses among the next hops towards the client of this tuple: constant for the life of the flow.
#[allow(clippy::cast_possible_truncation)] // halves are folded
fn entropy<A: Address>(tuple: &Tuple<A>) -> u64 {
    let (client, vip) = (tuple.source.wide(), tuple.destination.wide());
    let ports = u64::from(tuple.source_port) << 24 | u64::from(tuple.destination_port) << 8 | u64::from(tuple.protocol);
    split_mix(split_mix((client ^ client >> 64) as u64) ^ split_mix((vip ^ vip >> 64) as u64).rotate_left(32) ^ ports)
}

/// Why there is no exit towards this next hop.
#[cold]
fn no_exit(snapshot: &Snapshot, slot: u32) -> NoExit {
    let neighbour = |hop: &NextHop| NoExit::Unresolved(UnresolvedNeighbour { link: hop.link, address: hop.address });
    snapshot.next_hop(slot).map_or(NoExit::Dropped(DropReason::NoRoute), neighbour)
}

/// Whether the packet may leave by this exit. A packet that is too long is fragmented on its way out, if its sender
/// allows it.
#[inline]
pub(crate) fn fits<'s, A: Address>(packet: &Packet<'_, A>, exit: &'s Exit) -> Result<&'s Exit, NoExit> {
    fits_in(packet, exit.mtu).map(|()| exit)
}

/// Whether the packet may leave with this MTU, in bytes.
#[inline]
pub(super) fn fits_in<A: Address>(packet: &Packet<'_, A>, mtu: u16) -> Result<(), NoExit> {
    if packet.headers.hop_limit <= 1 {
        Err(NoExit::Refused(Answer::TimeExceeded))
    } else if packet.headers.packet_len <= mtu {
        Ok(())
    } else if packet.headers.dont_fragment {
        Err(NoExit::Refused(Answer::TooBig { mtu }))
    } else if packet.headers.has_options() {
        Err(NoExit::Dropped(DropReason::TooBig)) // such packets are not fragmented
    } else {
        Ok(())
    }
}
