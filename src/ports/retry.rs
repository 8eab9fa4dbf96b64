//! Delays between attempts after a failure: a device that cannot be attached, a twin that cannot be created.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio::time::Instant;

/// Delay after the first failure 1 s, doubled after each further one up to the limit.
const BACKOFF: ExponentialBuilder =
    ExponentialBuilder::new().with_min_delay(Duration::from_secs(1)).with_max_delay(MAX_DELAY).without_max_times();
const MAX_DELAY: Duration = Duration::from_secs(16);

pub(super) struct Retry {
    not_before: Option<Instant>,
    delays: ExponentialBackoff,
}

impl Default for Retry {
    fn default() -> Self {
        Self { not_before: None, delays: BACKOFF.build() }
    }
}

impl Retry {
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| at <= now)
    }

    /// Records a failure; returns the delay before the next attempt.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        let delay = self.delays.next().unwrap_or(MAX_DELAY);
        self.not_before = Some(now + delay);
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_come_less_and_less_often_up_to_a_limit() {
        let (start, mut retry) = (Instant::now(), Retry::default());
        assert!(retry.is_due(start), "the first time at once");
        let waits = [(); 7].map(|()| {
            let wait = retry.failed(start);
            assert!(!retry.is_due(start + wait - Duration::from_millis(1)) && retry.is_due(start + wait));
            wait.as_secs()
        });
        assert_eq!(waits, [1, 2, 4, 8, 16, 16, 16]);
    }
}
