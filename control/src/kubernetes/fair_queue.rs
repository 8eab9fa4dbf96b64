//! A fair queue: round robin over namespaces, first in first out within a namespace.
//!
//! Invariant: however many values one namespace has, another waits for at most one value of each other namespace. A value
//! that is enqueued again keeps its position.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;

/// Values by namespace and key.
#[derive(Debug)]
pub(super) struct FairQueue<K, V> {
    /// Namespaces with queued values, the next one first.
    order: VecDeque<String>,
    namespaces: HashMap<String, NamespaceQueue<K, V>>,
    /// Sequence number for values at the end; it grows.
    last: i64,
    /// Sequence number for values at the front; it falls.
    first: i64,
    len: usize,
}

#[derive(Debug)]
struct NamespaceQueue<K, V> {
    waiting: BTreeMap<i64, (K, V)>,
    positions: HashMap<K, i64>,
}

impl<K, V> Default for FairQueue<K, V> {
    fn default() -> Self {
        Self { order: VecDeque::new(), namespaces: HashMap::new(), last: 0, first: 0, len: 0 }
    }
}

impl<K, V> Default for NamespaceQueue<K, V> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), positions: HashMap::new() }
    }
}

impl<K: Clone + Eq + Hash, V> FairQueue<K, V> {
    /// Number of queued values.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Appends a value to its namespace, or replaces the value with the same key in position.
    pub(super) fn put(&mut self, namespace: &str, key: K, value: V) {
        self.last += 1;
        let position = self.position(namespace, &key).unwrap_or(self.last);
        self.insert(namespace, position, key, value);
    }

    /// Returns a value to the front of its namespace, unless a newer one with the same key arrived.
    pub(super) fn put_back(&mut self, namespace: &str, key: K, value: V) {
        if self.position(namespace, &key).is_none() {
            self.first -= 1;
            self.insert(namespace, self.first, key, value);
        }
    }

    /// Removes the next value whose namespace and key are ready.
    pub(super) fn take(&mut self, is_open: impl Fn(&str) -> bool, may_go: impl Fn(&K) -> bool) -> Option<V> {
        let mut found = None;
        for (at, namespace) in self.order.iter().enumerate().filter(|(_, namespace)| is_open(namespace)) {
            let waiting = self.namespaces.get(namespace).map(|queue| &queue.waiting).into_iter().flatten();
            if let Some((position, _)) = waiting.into_iter().find(|(_, (key, _))| may_go(key)) {
                found = Some((at, *position));
                break;
            }
        }
        let (at, position) = found?;
        // The namespace moves to the end.
        let namespace = self.order.remove(at)?;
        self.order.push_back(namespace.clone());
        self.remove_at(&namespace, position)
    }

    /// Removes the value of a key.
    pub(super) fn remove(&mut self, namespace: &str, key: &K) -> Option<V> {
        let position = self.position(namespace, key)?;
        self.remove_at(namespace, position)
    }

    /// Removes all values of a namespace that are not kept.
    pub(super) fn clear(&mut self, namespace: &str, is_kept: impl Fn(&V) -> bool) -> Vec<V> {
        let Some(queue) = self.namespaces.get(namespace) else { return Vec::new() };
        let positions: Vec<i64> =
            queue.waiting.iter().filter(|(_, (_, value))| !is_kept(value)).map(|(position, _)| *position).collect();
        positions.into_iter().filter_map(|position| self.remove_at(namespace, position)).collect()
    }

    /// Removes the newest value of the longest namespace.
    pub(super) fn shed(&mut self) -> Option<V> {
        let (namespace, queue) = self.namespaces.iter().max_by_key(|(_, queue)| queue.waiting.len())?;
        let (namespace, position) = (namespace.clone(), *queue.waiting.last_key_value()?.0);
        self.remove_at(&namespace, position)
    }

    fn position(&self, namespace: &str, key: &K) -> Option<i64> {
        self.namespaces.get(namespace)?.positions.get(key).copied()
    }

    fn insert(&mut self, namespace: &str, position: i64, key: K, value: V) {
        if !self.namespaces.contains_key(namespace) {
            self.order.push_back(namespace.to_owned());
            self.namespaces.insert(namespace.to_owned(), NamespaceQueue::default());
        }
        let Some(queue) = self.namespaces.get_mut(namespace) else { return };
        queue.positions.insert(key.clone(), position);
        self.len += usize::from(queue.waiting.insert(position, (key, value)).is_none());
    }

    fn remove_at(&mut self, namespace: &str, position: i64) -> Option<V> {
        let queue = self.namespaces.get_mut(namespace)?;
        let (key, value) = queue.waiting.remove(&position)?;
        queue.positions.remove(&key);
        self.len -= 1;
        if queue.waiting.is_empty() {
            self.namespaces.remove(namespace);
            self.order.retain(|one| one != namespace);
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
    fn namespaces_take_turns_and_within_one_the_first_that_came_goes_first() {
        let mut queue = FairQueue::default();
        for (namespace, key) in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 6)] {
            queue.put(namespace, key, key);
        }
        assert_eq!(all(&mut queue), [1, 4, 6, 2, 5, 3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn what_is_put_again_keeps_its_place_and_what_is_put_back_comes_first() {
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
    fn what_may_not_go_keeps_nobody_else() {
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
    fn the_namespace_that_asks_most_loses_its_newest() {
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
