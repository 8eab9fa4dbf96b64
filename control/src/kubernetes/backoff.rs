//! Backoff per key after failed requests.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Instant;

use backon::{BackoffBuilder, ExponentialBackoff};

use super::api_error::{BACKOFF, WAIT_MAX};

/// Per key: the end of its backoff and the delays that follow. Each key has pending work.
#[derive(Debug)]
pub(super) struct Backoff<K>(HashMap<K, (Instant, ExponentialBackoff)>);

impl<K> Default for Backoff<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> Backoff<K> {
    /// Records a failure; the delay doubles with every consecutive one.
    pub(super) fn failed(&mut self, who: &K, now: Instant) {
        let (until, waits) = self.0.entry(who.clone()).or_insert_with(|| (now, BACKOFF.build()));
        *until = now + waits.next().unwrap_or(WAIT_MAX);
    }

    /// Records a success.
    pub(super) fn succeeded<Q: Eq + Hash + ?Sized>(&mut self, who: &Q)
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
