//! Packets that are never forwarded (FORWARDING 9): those in frames to groups, and those from invalid or link-local
//! addresses.
//!
//! Not here: checks of a frame or header by itself, which `parse` does.

use super::verdict::Verdict;
use crate::flow::FlowTable;
use crate::forward::decide::{Packet, frontend_of, no_frontend};
use crate::snapshot::{Place, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Transport, is_link_local};

/// The verdict on a packet in a frame to a group. A packet for a frontend, or of a flow, has a unicast address and is
/// dropped (RFC 1812 section 5.3.4).
#[cold]
pub(super) fn in_group_frame<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot, table: &FlowTable<A>) -> Verdict<'static> {
    let has_ports = matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp | Transport::Sctp { .. });
    let is_of_flow = || table.search(packet.hash, &packet.headers.tuple).is_some();
    if has_ports && (frontend_of(packet, snapshot).is_some() || is_of_flow()) {
        return Verdict::Drop(DropReason::Malformed);
    }
    no_frontend(packet, snapshot)
}

/// Why packets from this address are not forwarded; `None` if they are (FORWARDING 9).
pub(crate) fn refused_source<A: Address>(source: A, snapshot: &Snapshot) -> Option<DropReason> {
    match snapshot.place(source) {
        Place::Elsewhere if !is_link_local(source) => None,
        Place::Elsewhere | Place::Broadcast => Some(DropReason::MartianSource),
        Place::Vip | Place::Snat | Place::Twin(_) | Place::PoolUnused => Some(DropReason::OwnSource),
    }
}
