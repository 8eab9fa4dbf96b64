//! Services that wait for room: some of their backends found no place, and are tried again as places become free.
//!
//! **Invariant:** every service that waits is tried again, [`BATCH`] at a time and in turn, within
//! [`AT_LEAST_EVERY_NS`] for each batch, and within [`AT_MOST_EVERY_NS`] of a place that became free. Nothing that
//! changes all the time has them tried more often.
//!
//! Not here: the namespace that gets a place (the module above).

use std::collections::BTreeSet;
use std::ops::Bound;

use proto::ServiceName;

/// Compiling 1,000 services of ten backends again takes about 10 ms.
const BATCH: usize = 1024;
const AT_MOST_EVERY_NS: u64 = 1_000_000_000;
/// Flows may have ended by then, or other namespaces want less.
const AT_LEAST_EVERY_NS: u64 = 10_000_000_000;

/// The services, and when they were tried.
#[derive(Debug, Default)]
pub(in crate::compiler) struct Waiting {
    services: BTreeSet<ServiceName>,
    /// The last one of the batch before.
    last: Option<ServiceName>,
    tried_ns: u64,
    /// How often places had become free when the last of them was tried.
    seen: u64,
}

impl Waiting {
    /// A service waits, or does no longer.
    pub(in crate::compiler) fn set(&mut self, service: &ServiceName, waits: bool) {
        if !waits {
            self.services.remove(service);
        } else if !self.services.contains(service) {
            self.services.insert(service.clone());
        }
    }

    /// Number of services that wait.
    pub(in crate::compiler) fn len(&self) -> usize {
        self.services.len()
    }

    /// The services to try now. `released`: how often places have become free.
    pub(in crate::compiler) fn take_due(&mut self, released: u64, now_ns: u64) -> Vec<ServiceName> {
        if self.services.is_empty() {
            (self.last, self.seen) = (None, released);
            return Vec::new();
        }
        if now_ns < self.due_ns(released) {
            return Vec::new();
        }
        self.tried_ns = now_ns;
        let after = self.last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let batch: Vec<_> = self.services.range::<ServiceName, _>((after, Bound::Unbounded)).take(BATCH).cloned().collect();
        self.last = batch.last().cloned().filter(|_| batch.len() == BATCH);
        if self.last.is_none() {
            self.seen = released;
        }
        batch
    }

    fn due_ns(&self, released: u64) -> u64 {
        let is_more = released != self.seen || self.last.is_some();
        self.tried_ns.saturating_add(if is_more { AT_MOST_EVERY_NS } else { AT_LEAST_EVERY_NS })
    }

    /// When services are tried again. `released`: how often places have become free; `rested_ns`: when the next one
    /// does.
    pub(in crate::compiler) fn next_due_ns(&self, released: u64, rested_ns: Option<u64>) -> Option<u64> {
        let soon_ns = self.tried_ns.saturating_add(AT_MOST_EVERY_NS);
        let rested_ns = rested_ns.map_or(u64::MAX, |rested_ns| rested_ns.max(soon_ns));
        (!self.services.is_empty()).then(|| self.due_ns(released).min(rested_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn all_are_tried_in_turn_when_a_place_becomes_free_and_after_a_while_without() {
        let mut waiting = Waiting::default();
        let names: Vec<_> = (0..1500).map(|n| ServiceName::new("default", &format!("s{n:04}"))).collect();
        names.iter().for_each(|name| waiting.set(name, true));
        let first = waiting.take_due(7, 100 * SECOND_NS);
        assert_eq!(waiting.next_due_ns(7, None), Some(101 * SECOND_NS), "the others");
        assert!(waiting.take_due(7, 100 * SECOND_NS + 1).is_empty(), "once a second");
        let second = waiting.take_due(7, 101 * SECOND_NS);
        assert_eq!([first, second].concat(), names);
        assert_eq!(waiting.next_due_ns(7, Some(105 * SECOND_NS)), Some(105 * SECOND_NS));
        assert_eq!(waiting.next_due_ns(7, Some(3)), Some(102 * SECOND_NS), "not all the time");
        assert_eq!(waiting.next_due_ns(7, None), Some(111 * SECOND_NS));
        assert_eq!(waiting.take_due(8, 102 * SECOND_NS).len(), BATCH, "a place has become free");
        names.iter().for_each(|name| waiting.set(name, false));
        assert_eq!((waiting.next_due_ns(9, None), waiting.len()), (None, 0));
    }
}
