//! Flows of which fragments were handed to another worker. All fragments of a datagram go to one worker, which finds
//! their owner by the first fragment. So a fragment takes two steps to its owner, and a whole packet one: it would
//! overtake the fragment. For a while whole packets of such flows take the two steps, too.
//!
//! **Invariant:** bounded in number and time, however many fragments come. A packet of another flow is not delayed.
//!
//! Not here: the worker that gets all fragments of a datagram ([`super::Steering::meeting`]).

use super::id::WorkerId;

/// Maximum number of flows that are remembered: 32 KiB. A newer flow replaces an older one.
const FLOWS: usize = 1024;
/// How long whole packets go the longer way after a first fragment.
const KEPT_NS: u64 = 1_000_000_000;
/// A pause in the flow in which all its packets leave the queues between workers, which hold half a millisecond. In
/// such a pause it returns to the shorter way.
const PAUSE_NS: u64 = 5_000_000;
/// How long it may take until there is such a pause. Then the flow returns without one.
const PAUSE_WITHIN_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
struct FragmentedFlow {
    /// Hash of its tuple, as flow tables compute it.
    hash: u64,
    meets_at: WorkerId,
    /// Time of the last first fragment, and of the last packet.
    fragment_ns: u64,
    packet_ns: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct FragmentedFlows {
    flows: Box<[Option<FragmentedFlow>]>,
    /// None is remembered any longer.
    until_ns: u64,
}

impl FragmentedFlows {
    pub(super) fn new() -> Self {
        Self { flows: vec![None; FLOWS].into(), until_ns: 0 }
    }

    /// Whether any flow is remembered.
    #[inline(always)]
    pub(crate) fn has_any(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }

    /// Remembers the flow with this hash, a first fragment of which goes to a worker.
    pub(crate) fn remember(&mut self, hash: u64, meets_at: WorkerId, now_ns: u64) {
        self.until_ns = now_ns.saturating_add(KEPT_NS + PAUSE_WITHIN_NS);
        if let Some(flow) = self.flows.get_mut(position(hash)) {
            *flow = Some(FragmentedFlow { hash, meets_at, fragment_ns: now_ns, packet_ns: now_ns });
        }
    }

    /// The worker to which a whole packet of a flow goes first, if fragments of the flow do.
    #[inline]
    pub(crate) fn meets_at(&self, hash: u64, now_ns: u64) -> Option<WorkerId> {
        let flow = self.flows.get(position(hash))?.filter(|flow| flow.hash == hash)?;
        let since = |then_ns: u64| now_ns.saturating_sub(then_ns);
        let is_kept = since(flow.fragment_ns) < KEPT_NS
            || since(flow.packet_ns) < PAUSE_NS && since(flow.fragment_ns) < KEPT_NS + PAUSE_WITHIN_NS;
        is_kept.then_some(flow.meets_at)
    }

    /// Notes that a whole packet of a flow goes that way.
    pub(crate) fn passed(&mut self, hash: u64, now_ns: u64) {
        if let Some(Some(flow)) = self.flows.get_mut(position(hash)) {
            flow.packet_ns = now_ns;
        }
    }
}

#[allow(clippy::cast_possible_truncation)] // a remainder
const fn position(hash: u64) -> usize {
    // The bits by which flow tables find buckets are others.
    (hash >> 32) as usize % FLOWS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_returns_to_the_shorter_way_in_a_pause_after_its_last_fragment() {
        let mut flows = FragmentedFlows::new();
        let (hash, other, start) = (7 << 32, 8 << 32, 1_000_000_000);
        assert!(!flows.has_any(start));
        flows.remember(hash, WorkerId(3), start);
        let mut now = start;
        while now < start + KEPT_NS + PAUSE_WITHIN_NS {
            assert_eq!((flows.meets_at(hash, now), flows.meets_at(other, now)), (Some(WorkerId(3)), None), "{now}");
            assert!(flows.has_any(now));
            flows.passed(hash, now);
            now += PAUSE_NS / 2;
        }
        assert_eq!((flows.meets_at(hash, now), flows.has_any(now)), (None, false), "at last without a pause");
        flows.remember(hash, WorkerId(2), now);
        assert_eq!(flows.meets_at(hash, now + KEPT_NS - 1), Some(WorkerId(2)));
        assert_eq!(flows.meets_at(hash, now + KEPT_NS), None, "there was a pause");
        flows.remember(hash + 1, WorkerId(1), now);
        assert_eq!((flows.meets_at(hash, now), flows.meets_at(hash + 1, now)), (None, Some(WorkerId(1))), "the newer one");
    }
}
