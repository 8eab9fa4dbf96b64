//! A table in chunks that successive snapshots share.
//!
//! **Invariant:** a change never shows in an older snapshot.
//!
//! Not here: the meaning of the entries.

use std::sync::Arc;

/// Entries per chunk: for 10,000 entries, a copy of the table takes 157 pointers and a change another 64.
const PIECE: usize = 64;

/// Entries by position.
#[derive(Clone, Debug)]
pub(crate) struct Pieces<T>(Vec<Arc<[T]>>);

impl<T> Default for Pieces<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Clone> Pieces<T> {
    pub(crate) fn new(entries: &[T]) -> Self {
        Self(entries.chunks(PIECE).map(Arc::from).collect())
    }

    #[inline]
    pub(crate) fn get(&self, position: usize) -> Option<&T> {
        self.0.get(position / PIECE)?.get(position % PIECE)
    }

    /// Replaces an existing entry. Copies its chunk if it is shared.
    pub(crate) fn set(&mut self, position: usize, entry: T) {
        let at = position % PIECE;
        let piece = self.0.get_mut(position / PIECE).filter(|piece| at < piece.len());
        if let Some(element) = piece.and_then(|piece| Arc::make_mut(piece).get_mut(at)) {
            *element = entry;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_affects_the_copy_only_and_copies_one_chunk() {
        let entries: Vec<usize> = (0..3 * PIECE + 5).collect();
        let before = Pieces::new(&entries);
        let mut after = before.clone();
        after.set(PIECE + 1, 1_000);
        after.set(entries.len(), 7);
        let all = |pieces: &Pieces<usize>| (0..=entries.len()).map(|n| pieces.get(n).copied()).collect::<Vec<_>>();
        let mut expected: Vec<Option<usize>> = entries.iter().copied().map(Some).chain([None]).collect();
        assert_eq!(all(&before), expected);
        expected[PIECE + 1] = Some(1_000);
        assert_eq!(all(&after), expected);
        let shared = before.0.iter().zip(&after.0).filter(|(a, b)| Arc::ptr_eq(a, b)).count();
        assert_eq!(shared, 3);
    }
}
