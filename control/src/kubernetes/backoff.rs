//! Backoff per key after failed requests, with jitter: keys that failed together are not tried together again.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff};

use super::api_error::{BACKOFF, WAIT_MAX, jittered};

/// Maximum delay after a refusal: 10,000 refused Services cost 33 requests a second, which the rate limit bounds further.
pub(super) const REFUSED_WAIT_MAX: Duration = Duration::from_secs(300);

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
        self.delay(who, now, WAIT_MAX);
    }

    /// Records a refusal, which lasts longer than an outage.
    pub(super) fn refused(&mut self, who: &K, now: Instant) {
        self.delay(who, now, REFUSED_WAIT_MAX);
    }

    fn delay(&mut self, who: &K, now: Instant, max: Duration) {
        let begun = || (now, BACKOFF.with_max_delay(REFUSED_WAIT_MAX).build());
        let (until, waits) = self.0.entry(who.clone()).or_insert_with(begun);
        *until = now + jittered(waits.next().unwrap_or(max).min(max));
    }

    /// Records that there is something new to try: it waits no longer than after an outage.
    pub(super) fn shorten(&mut self, who: &K, now: Instant) {
        if let Some((until, _)) = self.0.get_mut(who) {
            *until = (*until).min(now + WAIT_MAX);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_a_limit_that_is_higher_for_refusals_and_differ_between_keys() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        for _ in 0..20 {
            (0..8).for_each(|key| backoff.refused(&key, now));
            backoff.failed(&9, now);
        }
        let delay = |backoff: &Backoff<i32>, key: i32| backoff.0[&key].0 - now;
        let delays: std::collections::BTreeSet<Duration> = (0..8).map(|key| delay(&backoff, key)).collect();
        assert!(delays.len() > 1, "{delays:?}");
        assert!(delays.iter().all(|delay| (REFUSED_WAIT_MAX / 2..=REFUSED_WAIT_MAX).contains(delay)), "{delays:?}");
        assert!((WAIT_MAX / 2..=WAIT_MAX).contains(&delay(&backoff, 9)));
        backoff.shorten(&0, now);
        assert_eq!(delay(&backoff, 0), WAIT_MAX, "there is something new to try");
    }
}
