//! Packets into tunnels of one mode, eight at a time.
//!
//! **Invariant:** it forwards all eight packets, as the same bytes as the loop for one packet at a time, or leaves all eight
//! unchanged to that loop.
//!
//! Not here: which packets are of live flows (`pass`), and the bytes of outer headers (`outers`).

use super::super::follow::Scope;
use super::super::outer;
use super::super::progress::Passed;
use super::super::record::{Record, UNTAGGED};
use super::super::rewrite::{Forwarding, tunnel_source};
use super::outers::{OutersOfEight, Tunnelled};
use super::pass::{Eight, Found, find_eight};
use super::start::{all, starts};
use crate::flow::{Direction, FlowMode, HotFlow, HotFlows};
use crate::forward::observer::Observe;
use crate::snapshot::Exit;
use crate::wire::processor::{Avx2, LANES};
use crate::wire::{Buffer, TupleKey};

impl<A: OutersOfEight, O> Forwarding<'_, A, O> {
    /// Forwards eight packets into tunnels of mode `gue` or, without `IN_UDP`, of mode `ipip`. Returns false, and leaves them
    /// as they are, unless all of them pass.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // bytes of headers
    pub(super) fn eight_into_tunnels<const IN_UDP: bool, B: Buffer, S: Scope>(
        &mut self,
        avx2: Avx2,
        (group, records): (&mut [B; LANES], &mut [Record; LANES]),
        Passed { left, ports, .. }: &mut Passed,
    ) -> bool
    where
        O: Observe<B>,
    {
        let Self { follow, flows: HotFlows { flows, routes, meters }, counters, observer, .. } = self;
        let Some(first) = flows.first() else { return false };
        let mut found = Found { flows: [first; LANES], exits: [&Exit::NOWHERE; LANES] };
        if !find_eight::<A, S>(follow, (flows, *routes), records, *left, &mut found) {
            return false;
        }
        let Some(starts) = starts::<UNTAGGED, _, _>(group) else { return false };
        let eight = Eight::<A>::of(avx2, follow, &starts, records, &found);
        let (before, tunnels) = (outer::bytes_before(A::HEADER, IN_UDP), &follow.snapshot.tunnels);
        let pass = eight.are_of_live_flows(avx2)
            & eight.are_in_mode(avx2, if IN_UDP { FlowMode::Gue } else { FlowMode::Ipip })
            & eight.shapes.fit::<UNTAGGED>(avx2, eight.exits, (before - UNTAGGED) as u32)
            & eight.leave_by_port_of(avx2, found.exits[0]);
        let is_to_other_family = |flow: &&HotFlow<A::Key>| flow.key(Direction::ToClient).has_no_source();
        if pass.bits() != u8::MAX
            || eight.shapes.may_fragment(avx2).bits() != 0
            || found.flows.iter().any(is_to_other_family)
            || IN_UDP && eight.shapes.are_udp(avx2).bits() != 0 && starts.iter().any(|start| A::inner_sum(&start.head).is_none())
        {
            return false;
        }
        let of_port = A::tunnel_sources(tunnels, found.exits[0].port);
        let Some(sources) = sources(of_port, records, IN_UDP) else { return false };
        if !prepend(group, before - UNTAGGED) {
            return false;
        }
        let (sources, has_one_source, gue) = (&sources, of_port.len() == 1, tunnels.gue_destination_port);
        A::write_outers::<IN_UDP>(avx2, &Tunnelled { eight: &eight, found: &found, sources, has_one_source, gue }, group);
        eight.leave::<_, O>(avx2, (group, records, before), &found, (counters, *observer, meters), ports);
        eight.see(avx2, flows, records, follow.now);
        true
    }
}

/// Adds bytes before eight frames. Returns false, and leaves all as they are, if one has no room.
#[inline(always)]
fn prepend(group: &mut [impl Buffer; LANES], bytes: usize) -> bool {
    let Some(full) = group.iter_mut().position(|buffer| !buffer.prepend(bytes)) else { return true };
    group.iter_mut().take(full).for_each(|buffer| buffer.trim_front(bytes));
    false
}

/// The outer source addresses of eight packets, of those of a port.
#[inline(always)]
fn sources<S: Copy>(of_port: &[S], records: &[Record; LANES], in_udp: bool) -> Option<[S; LANES]> {
    match of_port {
        [one] => Some([*one; LANES]),
        _ => all(records.each_ref().map(|record| tunnel_source(of_port, record, in_udp))),
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // numbers of lanes
mod tests {
    use super::*;
    use crate::port::MemoryBuffer;

    #[test]
    fn all_frames_get_room_or_none_does() {
        let group = |full: Option<usize>| -> [MemoryBuffer; LANES] {
            std::array::from_fn(|lane| MemoryBuffer::new(&vec![lane as u8; if full == Some(lane) { 9216 } else { 60 }], 0))
        };
        for full in 0..LANES {
            let mut frames = group(Some(full));
            assert!(!prepend(&mut frames, 20));
            assert_eq!(frames, group(Some(full)));
        }
        let mut frames = group(None);
        assert!(prepend(&mut frames, 20));
        assert!(frames.iter().all(|frame| frame.bytes().len() == 80));
    }
}
