//! The receive window: the news of a sender in its order, and its effect on a copy that arrives meanwhile.
//!
//! **Invariant:** each batch is passed on once, in order. A page of a copy changes no flow of which there was news since
//! the page was listed, so a copy brings no ended flow back. Both are bounded; what does not fit ends the session, and a
//! new one begins with a new copy. Not here: how missing batches are asked for again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};

use dataplane::flow::{FlowReplica, ReplicaEvent};

/// Batches that may be ahead of a missing one: 4,096 of 1.4 KB are 5.7 MB, 1.6 s of 100,000 records a second.
const AHEAD_MAX: u64 = 4096;
/// Flows with news that are remembered while a copy arrives: 2^18 of about 40 bytes are 10 MB. Only those since the
/// listing of the last page count, which was less than a second ago: 2^18 changes in this time.
const TOUCHED_MAX: usize = 1 << 18;

/// More does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum WindowError {
    #[error("too many batches are missing")]
    Ahead,
    #[error("too many flows have changed while a page of a copy was under way")]
    Touched,
}

/// Puts batches in order.
#[derive(Debug, Default)]
pub(super) struct BatchWindow {
    /// Number of the first batch that has not arrived; `None` before the session's first number is known.
    next: Option<u64>,
    ahead: BTreeMap<u64, Box<[u8]>>,
    /// Number of the sender's next batch, as far as known.
    head: u64,
}

impl BatchWindow {
    /// A session whose first batch has this number.
    pub(super) fn begin(&mut self, first: u64) {
        self.next.get_or_insert(first);
    }

    /// Number of the first batch that has not arrived.
    pub(super) fn next(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    /// The sender's next batch has this number.
    pub(super) fn heard(&mut self, head: u64) {
        self.head = self.head.max(head);
    }

    /// Adds a batch; one that was there before changes nothing. One that arrives before the number of the first is known
    /// counts as missing.
    pub(super) fn add(&mut self, number: u64, records: &[u8]) -> Result<(), WindowError> {
        if self.next.is_none() {
            return Ok(());
        }
        if number >= self.next().saturating_add(AHEAD_MAX) {
            return Err(WindowError::Ahead);
        }
        self.heard(number.saturating_add(1));
        if number >= self.next() {
            self.ahead.entry(number).or_insert_with(|| records.into());
        }
        Ok(())
    }

    /// The next batch in order, and its number.
    pub(super) fn take(&mut self) -> Option<(u64, Box<[u8]>)> {
        let next = self.next?;
        let records = self.ahead.remove(&next)?;
        self.next = Some(next + 1);
        Some((next, records))
    }

    /// The batches before this number that are missing, of all gaps.
    pub(super) fn missing(&self, end: u64) -> impl Iterator<Item = u64> {
        let first = self.next.unwrap_or(end);
        let end = end.min(self.head).min(first.saturating_add(AHEAD_MAX));
        (first..end).filter(|number| !self.ahead.contains_key(number))
    }

    /// Number of the sender's next batch, as far as known.
    pub(super) fn head(&self) -> u64 {
        self.head
    }
}

/// The flows of which there was news while a copy arrives.
#[derive(Debug, Default)]
pub(super) struct TouchedFlows {
    hashes: RandomState,
    /// Whether a copy arrives.
    is_copying: bool,
    /// The number of the batch with the last news, by the hash of a flow. Two flows with one hash are one in 2^64: then
    /// one misses in the copy.
    last: HashMap<u64, u64>,
    in_order: VecDeque<(u64, u64)>,
}

impl TouchedFlows {
    /// A copy begins.
    pub(super) fn begin(&mut self) {
        self.is_copying = true;
    }

    /// A copy is complete.
    pub(super) fn end(&mut self) {
        *self = Self::default();
    }

    fn hash(&self, flow: &FlowReplica) -> u64 {
        self.hashes.hash_one((flow.protocol, flow.client, flow.frontend))
    }

    /// There is news of a flow in this batch.
    pub(super) fn touch(&mut self, number: u64, event: &ReplicaEvent) -> Result<(), WindowError> {
        if !self.is_copying {
            return Ok(());
        }
        let (ReplicaEvent::Holds(flow) | ReplicaEvent::Ended(flow)) = event;
        let hash = self.hash(flow);
        self.last.insert(hash, number);
        self.in_order.push_back((number, hash));
        if self.in_order.len() > TOUCHED_MAX { Err(WindowError::Touched) } else { Ok(()) }
    }

    /// A page with this mark arrives; marks only grow.
    pub(super) fn forget_before(&mut self, mark: u64) {
        while let Some((number, hash)) = self.in_order.front().copied().filter(|(number, _)| *number < mark) {
            self.in_order.pop_front();
            if self.last.get(&hash) == Some(&number) {
                self.last.remove(&hash);
            }
        }
    }

    /// Whether there was news of a flow since the page was listed.
    pub(super) fn is_touched(&self, flow: &FlowReplica) -> bool {
        self.last.contains_key(&self.hash(flow))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::tests::flow;
    use super::*;

    fn missing(window: &BatchWindow) -> Vec<u64> {
        window.missing(u64::MAX).collect()
    }

    fn taken(window: &mut BatchWindow) -> Vec<u64> {
        std::iter::from_fn(|| window.take().map(|(number, _)| number)).collect()
    }

    #[test]
    fn batches_are_passed_on_in_order_and_gaps_are_named() {
        let mut window = BatchWindow::default();
        window.add(9000, b"early").unwrap();
        assert_eq!((missing(&window), window.take()), (Vec::<u64>::new(), None));
        window.begin(10);
        window.begin(99);
        assert_eq!(missing(&window), Vec::<u64>::new());
        window.heard(12);
        assert_eq!(missing(&window), [10, 11], "the last ones are known by the heartbeat");
        window.add(12, b"c").unwrap();
        window.add(10, b"a").unwrap();
        window.add(9, b"old").unwrap();
        assert_eq!((taken(&mut window), missing(&window)), (vec![10], vec![11]));
        window.add(11, b"b").unwrap();
        window.add(11, b"again").unwrap();
        assert_eq!(window.take(), Some((11, b"b"[..].into())));
        assert_eq!((taken(&mut window), missing(&window), window.next()), (vec![12], Vec::<u64>::new(), 13));
        window.add(12, b"again").unwrap();
        assert_eq!(taken(&mut window), Vec::<u64>::new());
        for number in [14, 16, 17, 20] {
            window.add(number, b"").unwrap();
        }
        assert_eq!(missing(&window), [13, 15, 18, 19], "of every gap");
        assert_eq!(window.missing(18).collect::<Vec<_>>(), [13, 15]);
    }

    #[test]
    fn no_more_is_kept_than_fits() {
        let mut window = BatchWindow::default();
        window.begin(5);
        assert_eq!(window.add(5 + AHEAD_MAX - 1, b""), Ok(()));
        assert_eq!(window.add(5 + AHEAD_MAX, b""), Err(WindowError::Ahead));
        assert_eq!(missing(&window).len() as u64, AHEAD_MAX - 1);
        let mut touched = TouchedFlows::default();
        let news = ReplicaEvent::Ended(flow(1));
        for number in 0..2 * TOUCHED_MAX as u64 {
            touched.touch(number, &news).unwrap();
        }
        touched.begin();
        for number in 0..TOUCHED_MAX as u64 {
            touched.touch(number, &news).unwrap();
        }
        assert_eq!(touched.touch(1 << 40, &news), Err(WindowError::Touched));
    }

    #[test]
    fn a_page_changes_no_flow_of_which_there_is_news_since_it_was_listed() {
        let mut touched = TouchedFlows::default();
        touched.begin();
        touched.touch(7, &ReplicaEvent::Ended(flow(1))).unwrap();
        touched.touch(8, &ReplicaEvent::Holds(flow(2))).unwrap();
        touched.touch(9, &ReplicaEvent::Ended(flow(2))).unwrap();
        touched.forget_before(7);
        assert!(touched.is_touched(&flow(1)) && touched.is_touched(&flow(2)) && !touched.is_touched(&flow(3)));
        touched.forget_before(9);
        assert!(!touched.is_touched(&flow(1)), "it was listed after its end, so it is another flow");
        assert!(touched.is_touched(&flow(2)));
        touched.end();
        assert!(!touched.is_touched(&flow(2)));
    }

    proptest! {
        /// A network that loses, repeats and reorders, and repairs by what the window says is missing.
        #[test]
        fn all_batches_arrive_once_and_in_order(first in 0..1000_u64, fates in proptest::collection::vec((0..4_u8, 0..8_usize), 1..300)) {
            let (mut window, mut under_way, mut out) = (BatchWindow::default(), Vec::new(), Vec::new());
            window.begin(first);
            let end = first + fates.len() as u64;
            for (number, (fate, position)) in (first..end).zip(&fates) {
                match fate {
                    0 => {}
                    1 => under_way.extend([number, number]),
                    _ => under_way.push(number),
                }
                // The oldest ones arrive, from a random place among the last eight.
                if under_way.len() > 8 {
                    window.add(under_way.remove(*position), &number.to_be_bytes()).unwrap();
                    out.extend(taken(&mut window));
                }
            }
            window.heard(end);
            for number in under_way {
                window.add(number, b"").unwrap();
            }
            out.extend(taken(&mut window));
            for number in missing(&window) {
                window.add(number, b"").unwrap();
            }
            out.extend(taken(&mut window));
            prop_assert_eq!(out, (first..end).collect::<Vec<_>>());
        }
    }
}
