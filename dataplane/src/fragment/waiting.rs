//! The queues of fragments that wait for the first one of their datagram. Each fragment is in two lists: that of all
//! waiting fragments and that of its datagram.
//!
//! **Invariant:** both lists are in the order of arrival, so the oldest fragment of all is the oldest of its datagram.
//! Insertion and removal take constant time however many wait.
//!
//! Not here: when a fragment has waited for too long.

/// Maximum number of fragments that wait on one worker: a quarter of its packet buffers.
pub(super) const PER_WORKER: usize = 1_024;

/// Index of a cell, or none.
type CellIndex = Option<u16>;

/// The fragments of one datagram.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    oldest: CellIndex,
    youngest: CellIndex,
    len: u16,
}

impl Queue {
    pub(super) const EMPTY: Self = Self { oldest: None, youngest: None, len: 0 };

    pub(super) fn len(self) -> u16 {
        self.len
    }
}

/// A cell, with the fragment that waits in it.
#[derive(Debug)]
struct Cell<T> {
    waiting: Option<T>,
    /// Next in the list of all fragments; in a free cell, the next free one.
    after: CellIndex,
    before: CellIndex,
    /// Next in the list of the datagram.
    next: CellIndex,
}

/// All waiting fragments.
#[derive(Debug)]
pub(super) struct EarlyFragments<T> {
    cells: Box<[Cell<T>]>,
    oldest: CellIndex,
    youngest: CellIndex,
    free: CellIndex,
    len: usize,
}

impl<T> EarlyFragments<T> {
    /// Empty queues with room for [`PER_WORKER`] fragments.
    pub(super) fn new() -> Self {
        let following = |n: usize| u16::try_from(n + 1).ok().filter(|next| usize::from(*next) < PER_WORKER);
        let cell = |n| Cell { waiting: None, after: following(n), before: None, next: None };
        Self { cells: (0..PER_WORKER).map(cell).collect(), oldest: None, youngest: None, free: Some(0), len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The fragment that has waited the longest.
    pub(super) fn oldest(&self) -> Option<&T> {
        self.cells.get(usize::from(self.oldest?))?.waiting.as_ref()
    }

    /// Appends a fragment to the queue of its datagram; gives it back when there is no room.
    pub(super) fn push(&mut self, queue: &mut Queue, fragment: T) -> Result<(), T> {
        let Some(index) = self.free else { return Err(fragment) };
        let cell = &mut self.cells[usize::from(index)];
        self.free = cell.after;
        *cell = Cell { waiting: Some(fragment), after: None, before: self.youngest, next: None };
        match self.youngest {
            Some(youngest) => self.cells[usize::from(youngest)].after = Some(index),
            None => self.oldest = Some(index),
        }
        self.youngest = Some(index);
        match queue.youngest {
            Some(youngest) => self.cells[usize::from(youngest)].next = Some(index),
            None => queue.oldest = Some(index),
        }
        queue.youngest = Some(index);
        queue.len += 1;
        self.len += 1;
        Ok(())
    }

    /// Takes the oldest fragment from the queue of a datagram.
    pub(super) fn pop(&mut self, queue: &mut Queue) -> Option<T> {
        let index = queue.oldest?;
        let cell = &mut self.cells[usize::from(index)];
        let (before, after) = (cell.before, cell.after);
        queue.oldest = cell.next;
        let waiting = cell.waiting.take();
        cell.after = self.free;
        self.free = Some(index);
        if queue.oldest.is_none() {
            queue.youngest = None;
        }
        queue.len -= 1;
        self.len -= 1;
        match before {
            Some(before) => self.cells[usize::from(before)].after = after,
            None => self.oldest = after,
        }
        match after {
            Some(after) => self.cells[usize::from(after)].before = before,
            None => self.youngest = before,
        }
        waiting
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// A step: the next fragment of a datagram, the release of one of its fragments, or of the oldest of all.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push(usize),
        Pop(usize),
        Oldest,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![3 => (0..4_usize).prop_map(Step::Push), 2 => (0..4_usize).prop_map(Step::Pop), 1 => Just(Step::Oldest)]
    }

    proptest! {
        #[test]
        fn lists_are_those_of_a_vector(steps in proptest::collection::vec(step(), 1..400)) {
            let (mut early, mut queues) = (EarlyFragments::new(), [Queue::EMPTY; 4]);
            let mut model: VecDeque<(usize, usize)> = VecDeque::new();
            for (n, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Push(of) => {
                        prop_assert!(early.push(&mut queues[of], (of, n)).is_ok());
                        model.push_back((of, n));
                    }
                    Step::Pop(of) => {
                        let at = model.iter().position(|(other, _)| *other == of);
                        prop_assert_eq!(early.pop(&mut queues[of]), at.and_then(|at| model.remove(at)));
                    }
                    Step::Oldest => {
                        let of = early.oldest().map(|(of, _)| *of);
                        let popped = of.and_then(|of| early.pop(&mut queues[of]));
                        prop_assert_eq!(popped, model.pop_front());
                    }
                }
                prop_assert_eq!((early.len(), early.oldest()), (model.len(), model.front()));
                for (of, queue) in queues.iter().enumerate() {
                    prop_assert_eq!(usize::from(queue.len()), model.iter().filter(|(other, _)| *other == of).count());
                }
            }
        }
    }

    #[test]
    fn every_place_is_used_and_used_again() {
        let (mut early, mut queue) = (EarlyFragments::new(), Queue::EMPTY);
        for round in 0..3 {
            for n in 0..PER_WORKER {
                assert_eq!(early.push(&mut queue, n), Ok(()), "round {round}");
            }
            assert_eq!(early.push(&mut queue, 7), Err(7));
            assert!((0..PER_WORKER).all(|n| early.pop(&mut queue) == Some(n)));
            assert_eq!((early.len(), early.pop(&mut queue)), (0, None));
        }
    }
}
