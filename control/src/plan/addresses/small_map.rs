//! A map of few entries, usually one: a sorted vector. A `BTreeMap` has room for eleven entries as soon as it has one, which
//! for 10,000 addresses with one Service each is 40 MB.
//!
//! Deliberately not here: maps that may become large, since each insertion moves all later entries.

/// Entries in the order of their keys, each key once.
#[derive(Clone, Debug)]
pub(super) struct SmallMap<K, V>(Vec<(K, V)>);

impl<K, V> Default for SmallMap<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Ord, V> SmallMap<K, V> {
    /// Where a key is, or where it belongs.
    fn position(&self, key: &K) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| known.cmp(key))
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.position(key).ok().map(|at| &self.0[at].1)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.position(key).ok().map(|at| &mut self.0[at].1)
    }

    /// Sets the value of a key.
    pub(super) fn insert(&mut self, key: K, value: V) {
        match self.position(&key) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => {
                if self.0.is_empty() {
                    self.0.reserve_exact(1);
                }
                self.0.insert(at, (key, value));
            }
        }
    }

    /// Removes a key. Returns its value.
    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        self.position(key).ok().map(|at| self.0.remove(at).1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The keys in order.
    pub(super) fn keys(&self) -> impl Iterator<Item = &K> {
        self.0.iter().map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0..20_u8, any::<u8>(), any::<bool>()), 0..100)) {
            let (mut small, mut map) = (SmallMap::default(), BTreeMap::new());
            for (key, value, is_insertion) in steps {
                if is_insertion {
                    small.insert(key, value);
                    map.insert(key, value);
                } else {
                    prop_assert_eq!(small.remove(&key), map.remove(&key));
                }
                prop_assert!(small.keys().eq(map.keys()));
                prop_assert_eq!(small.is_empty(), map.is_empty());
                prop_assert_eq!(small.get(&key), map.get(&key));
                prop_assert_eq!(small.get_mut(&key), map.get_mut(&key));
            }
        }
    }
}
