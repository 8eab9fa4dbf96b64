//! The drains of the last plan, and the generation from which each of them is in effect.
//!
//! Invariant: a drain has a counter only once a state that was planned with it is published. Deliberately not here: which
//! gateways have applied that state (`gateways::registry`).

use std::collections::BTreeMap;
use std::sync::Arc;

use proto::Generation;

use super::drained_nodes::DrainedNodes;
use super::overrides::{DrainTarget, Overrides};

/// The drains that the newest state was planned with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlannedDrains {
    /// The addresses of the drained nodes.
    nodes: Arc<DrainedNodes>,
    /// The epoch of the counters.
    epoch: String,
    /// Counter of the first generation of the epoch that was planned with the drain.
    counters: BTreeMap<DrainTarget, u64>,
}

impl PlannedDrains {
    /// The addresses of the drained nodes.
    #[must_use]
    pub fn nodes(&self) -> &DrainedNodes {
        &self.nodes
    }

    /// Counter of the first generation of the epoch that was planned with the drain; `None` before there is such a one.
    #[must_use]
    pub fn counter(&self, what: &DrainTarget, epoch: &str) -> Option<u64> {
        self.counters.get(what).copied().filter(|_| self.epoch == epoch)
    }

    /// The drains after a state was published that was planned with these overrides; `None` if they are the same.
    #[must_use]
    pub fn after(&self, overrides: &Overrides, nodes: &Arc<DrainedNodes>, published: &Generation) -> Option<Self> {
        let is_same_epoch = self.epoch == published.epoch;
        if is_same_epoch && Arc::ptr_eq(&self.nodes, nodes) && self.counters.keys().eq(overrides.drains().keys()) {
            return None;
        }
        let before = |what: &DrainTarget| self.counters.get(what).copied().filter(|_| is_same_epoch);
        let counter = |what: &DrainTarget| (what.clone(), before(what).unwrap_or(published.counter));
        let counters = overrides.drains().keys().map(counter).collect();
        Some(Self { nodes: Arc::clone(nodes), epoch: published.epoch.clone(), counters })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::overrides::tests::drained;

    #[test]
    fn a_drain_counts_from_the_first_state_of_the_epoch_that_was_planned_with_it() {
        let nodes = Arc::default();
        let at = |epoch: &str, counter| Generation { epoch: epoch.to_owned(), counter };
        let [one, other]: [DrainTarget; 2] = ["node/a", "backend/10.0.0.1:80"].map(|text| text.parse().unwrap());
        let counters = |drains: &PlannedDrains, epoch: &str| [&one, &other].map(|what| drains.counter(what, epoch));
        let none = PlannedDrains::default();
        assert_eq!(counters(&none, ""), [None, None]);
        let first = none.after(&drained(&["node/a"]), &nodes, &at("e", 3)).unwrap();
        assert_eq!(counters(&first, "e"), [Some(3), None]);
        assert_eq!(first.after(&drained(&["node/a"]), &nodes, &at("e", 4)), None);
        let second = first.after(&drained(&["node/a", "backend/10.0.0.1:80"]), &nodes, &at("e", 5)).unwrap();
        assert_eq!(counters(&second, "e"), [Some(3), Some(5)]);
        assert_eq!(counters(&second, "f"), [None, None], "gateways have acknowledged nothing of the next epoch");
        let without = second.after(&drained(&["backend/10.0.0.1:80"]), &nodes, &at("e", 6)).unwrap();
        assert_eq!(counters(&without, "e"), [None, Some(5)]);
        let next_term = without.after(&drained(&["backend/10.0.0.1:80"]), &nodes, &at("f", 1)).unwrap();
        assert_eq!(counters(&next_term, "f"), [None, Some(1)]);
    }
}
