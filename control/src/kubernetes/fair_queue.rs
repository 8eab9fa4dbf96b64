//! A fair queue: round robin over namespaces, first in first out within a namespace.
//!
//! Invariant: however many values one namespace has, another waits for at most one value of each other namespace. A value
//! that is enqueued again keeps its position.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;

/// Values by namespace and key.
#[derive(Debug)]
pub(super) struct Turns<K, V> {
    /// Namespaces with queued values, the next one first.
    order: VecDeque<String>,
    lanes: HashMap<String, Lane<K, V>>,
    /// Sequence number for values at the end; it grows.
    last: i64,
    /// Sequence number for values at the front; it falls.
    first: i64,
    len: usize,
}

#[derive(Debug)]
struct Lane<K, V> {
    waiting: BTreeMap<i64, (K, V)>,
    places: HashMap<K, i64>,
}

impl<K, V> Default for Turns<K, V> {
    fn default() -> Self {
        Self { order: VecDeque::new(), lanes: HashMap::new(), last: 0, first: 0, len: 0 }
    }
}

impl<K, V> Default for Lane<K, V> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), places: HashMap::new() }
    }
}

impl<K: Clone + Eq + Hash, V> Turns<K, V> {
    /// Number of queued values.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Appends a value to its namespace, or replaces the value with the same key in place.
    pub(super) fn put(&mut self, namespace: &str, key: K, value: V) {
        self.last += 1;
        let place = self.place(namespace, &key).unwrap_or(self.last);
        self.insert(namespace, place, key, value);
    }

    /// Returns a value to the front of its namespace, unless a newer one with the same key arrived.
    pub(super) fn put_back(&mut self, namespace: &str, key: K, value: V) {
        if self.place(namespace, &key).is_none() {
            self.first -= 1;
            self.insert(namespace, self.first, key, value);
        }
    }

    /// Removes the next value whose namespace and key are ready.
    pub(super) fn take(&mut self, is_open: impl Fn(&str) -> bool, may_go: impl Fn(&K) -> bool) -> Option<V> {
        let mut found = None;
        for (at, namespace) in self.order.iter().enumerate().filter(|(_, namespace)| is_open(namespace)) {
            let waiting = self.lanes.get(namespace).map(|lane| &lane.waiting).into_iter().flatten();
            if let Some((place, _)) = waiting.into_iter().find(|(_, (key, _))| may_go(key)) {
                found = Some((at, *place));
                break;
            }
        }
        let (at, place) = found?;
        // The namespace moves to the end.
        let namespace = self.order.remove(at)?;
        self.order.push_back(namespace.clone());
        self.remove_at(&namespace, place)
    }

    /// Removes the value of a key.
    pub(super) fn remove(&mut self, namespace: &str, key: &K) -> Option<V> {
        let place = self.place(namespace, key)?;
        self.remove_at(namespace, place)
    }

    /// Removes all values of a namespace that are not kept.
    pub(super) fn clear(&mut self, namespace: &str, is_kept: impl Fn(&V) -> bool) -> Vec<V> {
        let Some(lane) = self.lanes.get(namespace) else { return Vec::new() };
        let places: Vec<i64> = lane.waiting.iter().filter(|(_, (_, value))| !is_kept(value)).map(|(place, _)| *place).collect();
        places.into_iter().filter_map(|place| self.remove_at(namespace, place)).collect()
    }

    /// Removes the newest value of the longest namespace.
    pub(super) fn shed(&mut self) -> Option<V> {
        let (namespace, lane) = self.lanes.iter().max_by_key(|(_, lane)| lane.waiting.len())?;
        let (namespace, place) = (namespace.clone(), *lane.waiting.last_key_value()?.0);
        self.remove_at(&namespace, place)
    }

    fn place(&self, namespace: &str, key: &K) -> Option<i64> {
        self.lanes.get(namespace)?.places.get(key).copied()
    }

    fn insert(&mut self, namespace: &str, place: i64, key: K, value: V) {
        if !self.lanes.contains_key(namespace) {
            self.order.push_back(namespace.to_owned());
            self.lanes.insert(namespace.to_owned(), Lane::default());
        }
        let Some(lane) = self.lanes.get_mut(namespace) else { return };
        lane.places.insert(key.clone(), place);
        self.len += usize::from(lane.waiting.insert(place, (key, value)).is_none());
    }

    fn remove_at(&mut self, namespace: &str, place: i64) -> Option<V> {
        let lane = self.lanes.get_mut(namespace)?;
        let (key, value) = lane.waiting.remove(&place)?;
        lane.places.remove(&key);
        self.len -= 1;
        if lane.waiting.is_empty() {
            self.lanes.remove(namespace);
            self.order.retain(|one| one != namespace);
        }
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(turns: &mut Turns<u32, u32>) -> Vec<u32> {
        std::iter::from_fn(|| turns.take(|_| true, |_| true)).collect()
    }

    #[test]
    fn namespaces_take_turns_and_within_one_the_first_that_came_goes_first() {
        let mut turns = Turns::default();
        for (namespace, key) in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 6)] {
            turns.put(namespace, key, key);
        }
        assert_eq!(all(&mut turns), [1, 4, 6, 2, 5, 3]);
        assert_eq!(turns.len(), 0);
    }

    #[test]
    fn what_is_put_again_keeps_its_place_and_what_is_put_back_comes_first() {
        let mut turns = Turns::default();
        for key in [1, 2, 3] {
            turns.put("a", key, key);
        }
        turns.put("a", 1, 10);
        turns.put_back("a", 2, 20);
        turns.put_back("a", 7, 70);
        assert_eq!((turns.len(), all(&mut turns)), (4, vec![70, 10, 2, 3]), "of key 2 a newer one waits");
    }

    #[test]
    fn what_may_not_go_keeps_nobody_else() {
        let mut turns = Turns::default();
        for (namespace, key) in [("a", 1), ("a", 2), ("b", 3)] {
            turns.put(namespace, key, key);
        }
        assert_eq!(turns.take(|_| true, |key| *key != 1), Some(2));
        assert_eq!(turns.take(|namespace| namespace != "a", |_| true), Some(3));
        assert_eq!(turns.take(|namespace| namespace != "a", |_| true), None);
        assert_eq!(all(&mut turns), [1]);
    }

    #[test]
    fn the_namespace_that_asks_most_loses_its_newest() {
        let mut turns = Turns::default();
        for (namespace, key) in [("a", 1), ("b", 2), ("b", 3), ("b", 4)] {
            turns.put(namespace, key, key);
        }
        assert_eq!(turns.shed(), Some(4));
        assert_eq!(turns.remove("a", &1), Some(1));
        assert_eq!(turns.clear("b", |value| *value == 3), [2]);
        assert_eq!(all(&mut turns), [3]);
    }
}
