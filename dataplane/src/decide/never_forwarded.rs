//! What is never forwarded (FORWARDING 9): packets in frames to groups, and from addresses that nobody has or that are of one
//! link alone. Deliberately not here: what a frame or a header says by itself, which is `parse`'s.

use super::{Packet, Verdict, frontend_of, no_frontend};
use crate::flow::FlowTable;
use crate::parse::is_link_local;
use crate::snapshot::{Place, Snapshot};
use crate::{Address, DropReason, Transport};

/// A packet in a frame to a group. One for a frontend, or of a flow, has one address in it and is dropped (RFC 1812 section
/// 5.3.4).
#[cold]
pub(super) fn in_group_frame<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot, table: &FlowTable<A>) -> Verdict<'static> {
    let has_ports = matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. });
    let is_of_flow = || table.search(packet.hash, &packet.headers.tuple).is_some();
    if has_ports && (frontend_of(packet, snapshot).is_some() || is_of_flow()) {
        return Verdict::Drop(DropReason::Malformed);
    }
    no_frontend(packet, snapshot)
}

/// Why nothing from this address is forwarded; none: it is (FORWARDING 9).
pub(super) fn refused_source<A: Address>(source: A, snapshot: &Snapshot) -> Option<DropReason> {
    match snapshot.place(source) {
        Place::Elsewhere if !is_link_local(source) => None,
        Place::Elsewhere | Place::Broadcast => Some(DropReason::MartianSource),
        Place::Vip | Place::Snat | Place::Twin(_) | Place::PoolUnused => Some(DropReason::OwnSource),
    }
}
