//! How long to wait before trying again: twice as long each time, up to a limit, less a random part, so that a hundred
//! gateways do not come back to one controller at the same moment.

use std::time::Duration;

/// Waits that grow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Waits between half of `first` and `longest`.
    pub(super) const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The next wait: between half of the current step and all of it, by the lowest 16 bits of `random`.
    pub(super) fn wait(&mut self, random: u64) -> Duration {
        let step = self.next;
        self.next = (step * 2).min(self.longest);
        let part = (random & 0xffff) as f64 / 65_535.0;
        step.mul_f64(0.5 + part / 2.0)
    }

    /// Starts from the first step again.
    pub(super) const fn reset(&mut self) {
        self.next = self.first;
    }
}

/// A number that no other process repeats, for [`Backoff::wait`].
pub(super) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_start_again() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(500));
        assert_eq!([u64::MAX; 5].map(|r| backoff.wait(r)), [ms(100), ms(200), ms(400), ms(500), ms(500)]);
        assert_eq!(backoff.wait(0), ms(250));
        backoff.reset();
        assert_eq!(backoff.wait(0), ms(50));
    }
}
