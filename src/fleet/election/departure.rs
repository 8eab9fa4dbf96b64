//! The departure of a drained gateway: it gives its groups of VIPs away one after another.
//!
//! So switches and clients learn of a few VIPs at a time, and the load of the new owners grows in steps. The next group
//! follows when another gateway has taken the one before.
//!
//! Invariant: a group that nobody takes delays the others by [`handover_max`], and is never held back again.
//! Not here: priorities (`priority`), and the end of a gateway, which gives all groups away at once.

use std::time::Duration;

/// Intervals of advertisements that a gateway waits for another one to take a group: others need four.
const HANDOVER_INTERVALS: u32 = 10;
/// Longest wait for another gateway, whatever the interval: long before systemd ends the process.
const HANDOVER_MAX: Duration = Duration::from_secs(5);

/// How long a gateway waits for others to take what it gives away, at this interval of advertisements.
pub fn handover_max(advertisement: Duration) -> Duration {
    (advertisement * HANDOVER_INTERVALS).min(HANDOVER_MAX)
}

/// The groups that the gateway has given away, or tried to.
#[derive(Debug, Default)]
pub(super) struct Departure {
    /// As bits.
    given: u64,
    /// The group that another gateway should take now, and since when, ns.
    current: Option<(u8, u64)>,
}

impl Departure {
    /// Begins with the next of the groups in `owned` (bits), if another gateway has taken the one before.
    pub(super) fn update(&mut self, owned: u64, now_ns: u64, wait_max: Duration) {
        let is_taken = |group: u8| owned & 1 << group == 0;
        let is_over = self
            .current
            .is_none_or(|(group, since_ns)| is_taken(group) || Duration::from_nanos(now_ns.saturating_sub(since_ns)) >= wait_max);
        if !is_over {
            return;
        }
        if let Some((group, _)) = self.current.filter(|(group, _)| !is_taken(*group)) {
            tracing::warn!(group, ?wait_max, "no other gateway has taken the group of VIPs; the next one follows");
        }
        let left = owned & !self.given;
        self.current = (left != 0).then(|| (u8::try_from(left.trailing_zeros()).unwrap_or(u8::MAX), now_ns));
        if let Some((group, _)) = self.current {
            self.given |= 1 << group;
            tracing::info!(group, "the gateway is drained and gives a group of VIPs away");
        }
    }

    /// Whether the gateway leaves this group to others.
    pub(super) const fn gives(&self, group: u8) -> bool {
        self.given & 1 << group != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(1000);

    /// Updates at these milliseconds with the groups that are still owned; the groups given away after each.
    fn given(steps: &[(u64, u64)]) -> Vec<u64> {
        let mut departure = Departure::default();
        let step = |(at_ms, owned): &(u64, u64)| {
            departure.update(*owned, at_ms * 1_000_000, WAIT);
            (0..64).filter(|group| departure.gives(*group)).map(|group| 1 << group).sum()
        };
        steps.iter().map(step).collect()
    }

    #[test]
    fn groups_are_given_away_one_after_another() {
        let steps = [(0, 0b1101), (500, 0b1101), (600, 0b1100), (700, 0b1100), (800, 0b1000), (900, 0)];
        assert_eq!(given(&steps), [0b1, 0b1, 0b101, 0b101, 0b1101, 0b1101]);
        assert_eq!(given(&[(0, 1 << 63), (1, 0)]), [1 << 63; 2], "the last group");
    }

    #[test]
    fn a_group_that_nobody_takes_does_not_hold_up_the_others() {
        assert_eq!(given(&[(0, 0b11), (999, 0b11), (1000, 0b11), (2000, 0b11)]), [0b1, 0b1, 0b11, 0b11]);
        assert_eq!(given(&[(0, 0b1), (1000, 0b1), (1500, 0b11)]), [0b1, 0b1, 0b11], "one that it gets meanwhile follows");
    }

    #[test]
    fn the_wait_follows_the_interval_and_is_bounded() {
        let of = |ms| handover_max(Duration::from_millis(ms)).as_millis();
        assert_eq!([of(100), of(200), of(1000)], [1000, 2000, 5000]);
    }
}
