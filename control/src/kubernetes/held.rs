//! Who is left alone for a while, because requests for it failed.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::Instant;

use backon::{BackoffBuilder, ExponentialBackoff};

use super::outage::{BACKOFF, WAIT_MAX};

/// Until when each is left alone, and the waits to come. Each of them has something waiting.
#[derive(Debug)]
pub(super) struct Held<K>(HashMap<K, (Instant, ExponentialBackoff)>);

impl<K> Default for Held<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Clone + Eq + Hash> Held<K> {
    /// The wait doubles with every failure in a row.
    pub(super) fn hold(&mut self, who: &K, now: Instant) {
        let (until, waits) = self.0.entry(who.clone()).or_insert_with(|| (now, BACKOFF.build()));
        *until = now + waits.next().unwrap_or(WAIT_MAX);
    }

    /// A request for it succeeded.
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

    /// When the first of those that are left alone may be tried again.
    pub(super) fn first_over(&self, now: Instant) -> Option<Instant> {
        self.0.values().map(|(until, _)| *until).filter(|until| *until > now).min()
    }
}
