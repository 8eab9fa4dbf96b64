//! Probes of backends that answer from the VIP (FORWARDING 12): Linux sends them to the VIP, from a port that stands for
//! the backend under test ([`proto::ProbeTags`]), and they go the way that clients' packets go there.

use super::one_way::{Delivery, delivery};
use super::{Packet, Stop, Verdict};
use crate::flow::Way;
use crate::snapshot::{Place, RouteTo, Snapshot};
use crate::{Address, Transport};

/// The way of a packet that Linux sends to a VIP. None: it is no probe.
pub fn follow_probe<'s, A: Address>(packet: &Packet<'_, A>, snapshot: &'s Snapshot) -> Option<Result<Delivery<'s>, Stop>> {
    let tuple = &packet.headers.tuple;
    let under_test = *snapshot.probe_tags.get(&tuple.source_port)?;
    let frontend = snapshot.frontend(tuple.destination, tuple.protocol, tuple.destination_port)?;
    let is_under_test =
        |id| snapshot.backend(id).filter(|backend| backend.address.ip() == under_test).map(|backend| (id, backend));
    let backend = frontend.backends.iter().copied().find_map(is_under_test)?;
    is_one_way(frontend.way()).then(|| delivery(packet, tuple, frontend.way(), backend, snapshot))
}

/// Whether a packet answers a probe: it comes from a frontend of such a mode to one of the ports that stand for backends.
pub(super) fn is_reply<A: Address>(packet: &Packet<'_, A>, snapshot: &Snapshot) -> bool {
    let tuple = &packet.headers.tuple;
    matches!(packet.headers.transport, Transport::Tcp { .. } | Transport::Udp)
        && !packet.headers.group_frame
        && snapshot.probe_tags.contains_key(&tuple.destination_port)
        && matches!(snapshot.place(tuple.destination), Place::Twin(_))
        && snapshot.frontend(tuple.source, tuple.protocol, tuple.source_port).is_some_and(|frontend| is_one_way(frontend.way()))
}

/// Where the answer to a probe goes: to the twin that the probe came from. Linux sends to the VIP by one link, the backend
/// answers by its own way to the gateway, often by another; there a strict `rp_filter` would drop it.
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
