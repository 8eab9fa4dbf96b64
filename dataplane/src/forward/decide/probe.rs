//! Probes of backends that answer from the VIP (FORWARDING 12): the kernel sends them to the VIP, from a source port
//! that stands for the backend under test ([`proto::ProbeTags`]), and they take the path of clients' packets.
//!
//! Not here: the probes themselves, which the gateway's agent sends.

use super::one_way::{Delivery, delivery};
use super::verdict::{Stop, Verdict};
use crate::flow::Way;
use crate::forward::decide::Packet;
use crate::snapshot::{Place, RouteTo, Snapshot};
use crate::wire::{Address, Transport};

/// Delivery of a packet that the kernel sends to a VIP; `None` if it is no probe.
pub fn follow_probe<'s, A: Address>(packet: &Packet<'_, A>, snapshot: &'s Snapshot) -> Option<Result<Delivery<'s>, Stop>> {
    let tuple = &packet.headers.tuple;
    let under_test = *snapshot.probe_tags.get(&tuple.source_port)?;
    let frontend = snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port)?;
    let is_under_test =
        |id| snapshot.backend(id).filter(|backend| backend.address.ip() == under_test).map(|backend| (id, backend));
    let backend = frontend.backends.iter().copied().find_map(is_under_test)?;
    is_one_way(frontend.way()).then(|| delivery(packet, tuple, frontend.way(), backend, snapshot))
}

/// Whether a packet is the reply to a probe: it comes from a frontend of such a mode and goes to a port that stands for
/// a backend.
pub(super) fn is_reply<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> bool {
    let tuple = &packet.headers.tuple;
    matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp)
        && !packet.headers.group_frame
        && snapshot.probe_tags.contains_key(&tuple.destination_port)
        && matches!(snapshot.place(tuple.destination), Place::Twin(_))
        && snapshot.frontend(tuple.source, tuple.protocol, tuple.source_port).is_some_and(|frontend| is_one_way(frontend.way()))
}

/// The verdict on a reply to a probe: it goes to the twin that the probe came from. The kernel sends to the VIP on one
/// link, and the backend's reply often arrives on another, where a strict `rp_filter` would drop it.
pub(super) fn answered<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> Verdict<'static> {
    match snapshot.route(packet.headers.tuple.source) {
        RouteTo::Unresolved { link } => Verdict::LinuxAt(link),
        RouteTo::NextHop(slot) => match snapshot.next_hop(snapshot.member(slot, packet.hash)) {
            Some(hop) => Verdict::LinuxAt(hop.link),
            None => Verdict::Linux,
        },
        RouteTo::None => Verdict::Linux,
    }
}

const fn is_one_way(way: Way) -> bool {
    !way.is_two_way()
}
