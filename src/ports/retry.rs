//! Waits between attempts at what failed: a device that cannot be attached, a twin that cannot be made.

use std::time::Duration;

use tokio::time::Instant;

/// Wait after the first failure, doubled after each further one up to the limit.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(16);

pub(super) struct Retry {
    not_before: Option<Instant>,
    wait: Duration,
}

impl Retry {
    pub(super) const fn new() -> Self {
        Self { not_before: None, wait: FIRST_WAIT }
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| at <= now)
    }

    /// Notes a failure; how long no further attempt is due.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        let wait = self.wait;
        self.not_before = Some(now + wait);
        self.wait = (wait * 2).min(LONGEST_WAIT);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_come_less_and_less_often_up_to_a_limit() {
        let (start, mut retry) = (Instant::now(), Retry::new());
        assert!(retry.is_due(start), "the first time at once");
        let waits = [(); 7].map(|()| {
            let wait = retry.failed(start);
            assert!(!retry.is_due(start + wait - Duration::from_millis(1)) && retry.is_due(start + wait));
            wait.as_secs()
        });
        assert_eq!(waits, [1, 2, 4, 8, 16, 16, 16]);
    }
}
