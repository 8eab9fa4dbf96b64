//! Backoff per key after failed requests.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use super::outage::{WAIT_MAX, WAIT_MIN};

/// Per key: the end of its backoff and the current delay. Each key has pending work.
#[derive(Debug)]
pub(super) struct Held<K>(HashMap<K, (Instant, Duration)>);

impl<K> Default for Held<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> Held<K> {
    /// Records a failure; the delay doubles with every consecutive one.
    pub(super) fn hold(&mut self, who: &K, now: Instant) {
        let wait = self.0.get(who).map_or(WAIT_MIN, |(_, wait)| (*wait * 2).min(WAIT_MAX));
        self.0.insert(who.clone(), (now + wait, wait));
    }

    /// Records a success.
    pub(super) fn release<Q: Eq + Hash + ?Sized>(&mut self, who: &Q)
    where
        K: Borrow<Q>,
    {
        self.0.remove(who);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn holds<Q: Eq + Hash + ?Sized>(&self, who: &Q, now: Instant) -> bool
    where
        K: Borrow<Q>,
    {
        self.0.get(who).is_some_and(|(until, _)| *until > now)
    }

    /// When the first backoff ends.
    pub(super) fn first_over(&self, now: Instant) -> Option<Instant> {
        self.0.values().map(|(until, _)| *until).filter(|until| *until > now).min()
    }
}
