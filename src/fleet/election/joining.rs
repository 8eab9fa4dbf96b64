//! The conditions under which a gateway that joins takes VIPs: a complete state, the neighbours that its backends are
//! behind, and the flows of its partners.
//!
//! Invariant: only the wait for a state has no end. A backend that never answers, or a partner that never sends, delays a
//! gateway but does not keep it out. What has come once is not asked for again in the same election.
//! Not here: what a gateway lacks later (`election`), and who wins (keepalived).

use std::time::Duration;

/// Longest wait for neighbours: Linux gives up a neighbour after three requests, a second apart, and tries again.
const NEIGHBOURS_AWAITED: Duration = Duration::from_secs(10);
/// For this long all neighbours must be known: routes that have just been read add next hops a moment later.
const NEIGHBOURS_SETTLED: Duration = Duration::from_millis(500);
/// Longest wait for the flows of partners: a full table of a million flows at the rate at which partners send copies.
const FLOWS_AWAITED: Duration = Duration::from_secs(60);

/// What is there now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Present {
    /// A complete state.
    pub(super) state: bool,
    /// The Ethernet address of each next hop.
    pub(super) neighbours: bool,
    /// The flows of each partner that is reached.
    pub(super) flows: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JoiningStep {
    State,
    Neighbours,
    Flows,
    Joined,
}

/// How far the gateway has come.
#[derive(Debug)]
pub(super) struct Joining {
    step: JoiningStep,
    /// When the step began, ns.
    since_ns: u64,
    /// When neighbours were missing last, ns.
    missing_ns: u64,
}

impl Joining {
    pub(super) const fn new(now_ns: u64) -> Self {
        Self { step: JoiningStep::State, since_ns: now_ns, missing_ns: now_ns }
    }

    pub(super) fn is_over(&self) -> bool {
        self.step == JoiningStep::Joined
    }

    /// Why the gateway takes no VIPs yet.
    pub(super) fn update(&mut self, present: Present, now_ns: u64) -> Option<&'static str> {
        let since = |then_ns: u64| Duration::from_nanos(now_ns.saturating_sub(then_ns));
        if !(present.state && present.neighbours) {
            self.missing_ns = now_ns;
        }
        loop {
            let (is_there, wait_max, awaited, next) = match self.step {
                JoiningStep::State => (present.state, Duration::MAX, "it has no complete state", JoiningStep::Neighbours),
                JoiningStep::Neighbours => {
                    let is_there = present.neighbours && since(self.missing_ns) >= NEIGHBOURS_SETTLED;
                    (is_there, NEIGHBOURS_AWAITED, "it waits for the neighbours of its backends", JoiningStep::Flows)
                }
                JoiningStep::Flows => {
                    (present.flows, FLOWS_AWAITED, "it waits for the flows of its partners", JoiningStep::Joined)
                }
                JoiningStep::Joined => return None,
            };
            if !is_there && since(self.since_ns) < wait_max {
                return Some(awaited);
            }
            if !is_there {
                tracing::warn!(awaited, ?wait_max, "the gateway stands for election without what it waited for");
            }
            (self.step, self.since_ns) = (next, now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Present = Present { state: false, neighbours: false, flows: false };
    const STATE: Present = Present { state: true, ..NONE };
    const NEIGHBOURS: Present = Present { neighbours: true, ..STATE };
    const ALL: Present = Present { flows: true, ..NEIGHBOURS };

    /// Updates at these milliseconds, and whether the gateway still waits after each.
    fn waits(steps: &[(u64, Present)]) -> Vec<Option<&'static str>> {
        let mut joining = Joining::new(0);
        steps.iter().map(|(at_ms, present)| joining.update(*present, at_ms * 1_000_000)).collect()
    }

    #[test]
    fn a_gateway_joins_once_it_has_everything() {
        let (state, neighbours, flows) = (
            Some("it has no complete state"),
            Some("it waits for the neighbours of its backends"),
            Some("it waits for the flows of its partners"),
        );
        let steps = [(0, NONE), (86_400_000, NONE), (86_400_100, STATE), (86_400_500, NEIGHBOURS), (86_400_600, NEIGHBOURS)];
        assert_eq!(waits(&steps), [state, state, neighbours, neighbours, flows], "only the first wait has no end");
        assert_eq!(waits(&[(0, ALL), (499, ALL), (501, ALL), (502, NONE)]), [neighbours, neighbours, None, None]);
        let flickers = [(0, ALL), (400, Present { neighbours: false, ..ALL }), (600, ALL), (901, ALL)];
        assert_eq!(waits(&flickers), [neighbours, neighbours, neighbours, None], "they must last");
    }

    #[test]
    fn a_neighbour_that_never_answers_and_a_partner_that_never_sends_keep_no_gateway_out() {
        let steps = [(0, STATE), (9_999, STATE), (10_000, STATE), (69_999, STATE), (70_000, STATE)];
        let has_joined: Vec<_> = waits(&steps).iter().map(Option::is_none).collect();
        assert_eq!(has_joined, [false, false, false, false, true]);
    }
}
