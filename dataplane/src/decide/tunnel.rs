//! ICMP errors of routers inside a tunnel: the sender of the inner packet is told (RFC 2003 section 4, RFC 2473 section 8).
//!
//! **Invariant:** an error is believed only about a packet that we may have sent, from the side that it was sent to. As of
//! any error, nothing of a flow is changed by it.

use super::{Packet, Stop, Verdict, arrives_from, exit_by, refused_source, stopped};
use crate::flow::{BackendId, FlowTable, Way};
use crate::held::Awaited;
use crate::parse::is_martian;
use crate::quote::TunnelQuote;
use crate::snapshot::{Exit, Place, RouteTo, Snapshot};
use crate::{Address, Tuple};

/// The way to the client that is told of an error about a packet that `quote` shows, and which carried a packet with the
/// tuple `inner`. None: we sent no such packet.
///
/// # Errors
/// What happens to the error instead.
pub fn follow_tunnel_error<'s, A: Address, I: Address>(
    packet: &Packet<'_, A>,
    quote: &TunnelQuote<A>,
    inner: &Tuple<I>,
    snapshot: &'s Snapshot,
    table: &FlowTable<I>,
) -> Option<Result<&'s Exit, Verdict<'s>>> {
    let headers = packet.headers;
    let is_possible = quote.source == headers.tuple.destination
        && !headers.group_frame
        && refused_source(headers.tuple.source, snapshot).is_none()
        // What Linux sends through a tunnel, a probe, is its own.
        && snapshot.place(inner.source) == Place::Elsewhere
        && !is_martian(inner.source);
    if !is_possible {
        return None;
    }
    let hash = table.hash(inner);
    let known = table.search(hash, inner).map(|(index, _)| table.get(index));
    let (way, id) = match known {
        Some(flow) => (flow.way, flow.backend),
        None => by_hash(inner, snapshot)?,
    };
    let backend = snapshot.backend(id)?;
    if way != quote.way || backend.address.ip() != quote.destination.ip() {
        return None;
    }
    if !arrives_from(snapshot, backend.next_hop, packet.in_link) {
        return Some(Err(stopped(Stop::WrongPort)));
    }
    let exit = match snapshot.route(inner.source) {
        RouteTo::NextHop(next_hop) => exit_by(snapshot, next_hop, hash),
        RouteTo::Unresolved { link } => Err(Stop::Unresolved(Awaited { link, address: inner.source.ip() })),
        RouteTo::None => Err(Stop::NoRoute),
    };
    Some(exit.map_err(stopped))
}

/// Where a packet goes that found no room for a flow (FORWARDING 3).
fn by_hash<I: Address>(inner: &Tuple<I>, snapshot: &Snapshot) -> Option<(Way, BackendId)> {
    let frontend = snapshot.frontend(inner.destination, inner.protocol, inner.destination_port)?;
    if !frontend.allows(inner.source) {
        return None;
    }
    Some((frontend.way(), frontend.choose_by_hash(inner)?))
}
