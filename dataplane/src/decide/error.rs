//! ICMP errors about packets of flows: each goes to the one who sent the packet (FORWARDING 10).
//!
//! **Invariant:** an error changes nothing of its flow. Anybody can forge one, so it neither ends a flow nor keeps it.

use super::{Obstacle, Packet, Passage, Stop, arrives_from, exit_by, exit_to_client, fits, refused_source};
use crate::flow::{Direction, FlowTable, IdleLimits};
use crate::snapshot::Snapshot;
use crate::tick::Tick;
use crate::{Address, Tuple};

/// The way on of an ICMP error about a packet with the tuple `quoted`. The direction is that of the error: the packet it
/// tells of went the other way.
///
/// # Errors
/// There is no flow that such a packet could be of, or what is in the error's way.
pub fn follow_error<'s, A: Address>(
    packet: &Packet<'_, A>,
    quoted: &Tuple<A>,
    snapshot: &'s Snapshot,
    table: &mut FlowTable<A>,
    limits: &IdleLimits,
    now: Tick,
) -> Result<Passage<'s>, Obstacle<'s>> {
    let headers = packet.headers;
    // An error goes to the source of the packet that it tells of (RFC 1812 section 4.3.2.4), and never comes from us.
    let is_possible = quoted.source == headers.tuple.destination
        && !headers.group_frame
        && refused_source(headers.tuple.source, snapshot).is_none();
    if !is_possible {
        return Err(Obstacle::NoFlow);
    }
    let back = quoted.reversed();
    let hash = table.hash(&back);
    let (index, direction) = table.search(hash, &back).ok_or(Obstacle::NoFlow)?;
    let flow = table.get_mut(index);
    let backend = snapshot.backend(flow.backend).ok_or(Obstacle::NoFlow)?;
    if limits.is_over(flow.state, backend.idle_timeout, flow.last_seen, now) {
        return Err(Obstacle::NoFlow);
    }
    let exit = match direction {
        Direction::ToBackend => exit_by(snapshot, backend.next_hop, hash),
        Direction::ToClient if !arrives_from(snapshot, backend.next_hop, packet.in_link) => Err(Stop::WrongPort),
        Direction::ToClient => exit_to_client(snapshot, flow),
    };
    match exit.and_then(|exit| fits(packet, exit)) {
        Ok(exit) => Ok(Passage { flow: index, direction, exit }),
        Err(stop) => Err(Obstacle::Known(stop)),
    }
}
