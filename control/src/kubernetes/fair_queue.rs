//! A fair queue: round robin over namespaces, first in first out within a namespace.
//!
//! Invariant: however many values one namespace has, another waits for at most one value of each other namespace. A
//! value that is enqueued again keeps its position.

use std::hash::Hash;

use indexmap::IndexMap;

/// Values by namespace and key.
#[derive(Debug)]
pub(super) struct FairQueue<K, V> {
    /// The queue of each namespace that has values. The next namespace and the next value come first.
    namespaces: IndexMap<String, IndexMap<K, V>>,
    len: usize,
}

impl<K, V> Default for FairQueue<K, V> {
    fn default() -> Self {
        Self { namespaces: IndexMap::new(), len: 0 }
    }
}

impl<K: Eq + Hash, V> FairQueue<K, V> {
    /// Number of queued values.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Appends a value to its namespace, or replaces the value with the same key in position.
    pub(super) fn put(&mut self, namespace: &str, key: K, value: V) {
        let queue = self.namespaces.entry(namespace.to_owned()).or_default();
        self.len += usize::from(queue.insert(key, value).is_none());
    }

    /// Returns a value to the front of its namespace, unless a newer one with the same key arrived.
    pub(super) fn put_back(&mut self, namespace: &str, key: K, value: V) {
        let queue = self.namespaces.entry(namespace.to_owned()).or_default();
        if !queue.contains_key(&key) {
            queue.shift_insert(0, key, value);
            self.len += 1;
        }
    }

    /// Removes the next value whose namespace and key are ready. The namespace moves to the end.
    pub(super) fn take(&mut self, is_open: impl Fn(&str) -> bool, may_go: impl Fn(&K) -> bool) -> Option<V> {
        let mut open = self.namespaces.iter().enumerate().filter(|(_, (namespace, _))| is_open(namespace));
        let (at, position) = open.find_map(|(at, (_, queue))| Some((at, queue.keys().position(&may_go)?)))?;
        let end = self.namespaces.len() - 1;
        self.namespaces.move_index(at, end);
        self.remove_at(end, position)
    }

    /// Removes the value of a key.
    pub(super) fn remove(&mut self, namespace: &str, key: &K) -> Option<V> {
        let (at, _, queue) = self.namespaces.get_full(namespace)?;
        let position = queue.get_index_of(key)?;
        self.remove_at(at, position)
    }

    /// Removes all values of a namespace that are not kept.
    pub(super) fn clear(&mut self, namespace: &str, is_kept: impl Fn(&V) -> bool) -> Vec<V> {
        let Some(queue) = self.namespaces.get_mut(namespace) else { return Vec::new() };
        let removed: Vec<V> = queue.extract_if(.., |_, value| !is_kept(value)).map(|(_, value)| value).collect();
        if queue.is_empty() {
            self.namespaces.shift_remove(namespace);
        }
        self.len -= removed.len();
        removed
    }

    /// Removes the newest value of the longest namespace.
    pub(super) fn shed(&mut self) -> Option<V> {
        let (at, queue) = self.namespaces.values().enumerate().max_by_key(|(_, queue)| queue.len())?;
        self.remove_at(at, queue.len() - 1)
    }

    fn remove_at(&mut self, namespace: usize, position: usize) -> Option<V> {
        let (_, queue) = self.namespaces.get_index_mut(namespace)?;
        let (_, value) = queue.shift_remove_index(position)?;
        self.len -= 1;
        if queue.is_empty() {
            self.namespaces.shift_remove_index(namespace);
        }
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(queue: &mut FairQueue<u32, u32>) -> Vec<u32> {
        std::iter::from_fn(|| queue.take(|_| true, |_| true)).collect()
    }

    #[test]
    fn namespaces_take_turns_and_each_is_first_in_first_out() {
        let mut queue = FairQueue::default();
        for (namespace, key) in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 6)] {
            queue.put(namespace, key, key);
        }
        assert_eq!(all(&mut queue), [1, 4, 6, 2, 5, 3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn a_value_enqueued_again_keeps_its_position_and_a_returned_value_comes_first() {
        let mut queue = FairQueue::default();
        for key in [1, 2, 3] {
            queue.put("a", key, key);
        }
        queue.put("a", 1, 10);
        queue.put_back("a", 2, 20);
        queue.put_back("a", 7, 70);
        assert_eq!((queue.len(), all(&mut queue)), (4, vec![70, 10, 2, 3]), "of key 2 a newer one waits");
    }

    #[test]
    fn a_value_that_is_not_ready_blocks_no_other() {
        let mut queue = FairQueue::default();
        for (namespace, key) in [("a", 1), ("a", 2), ("b", 3)] {
            queue.put(namespace, key, key);
        }
        assert_eq!(queue.take(|_| true, |key| *key != 1), Some(2));
        assert_eq!(queue.take(|namespace| namespace != "a", |_| true), Some(3));
        assert_eq!(queue.take(|namespace| namespace != "a", |_| true), None);
        assert_eq!(all(&mut queue), [1]);
    }

    #[test]
    fn the_longest_namespace_loses_its_newest_value() {
        let mut queue = FairQueue::default();
        for (namespace, key) in [("a", 1), ("b", 2), ("b", 3), ("b", 4)] {
            queue.put(namespace, key, key);
        }
        assert_eq!(queue.shed(), Some(4));
        assert_eq!(queue.remove("a", &1), Some(1));
        assert_eq!(queue.clear("b", |value| *value == 3), [2]);
        assert_eq!(all(&mut queue), [3]);
    }
}
