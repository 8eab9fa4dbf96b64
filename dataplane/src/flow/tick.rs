//! Coarse time for flows and SNAT ports, in 32 instead of 64 bits.
//!
//! A tick is 2^27 ns, about 134 ms. 2^32 ticks are 18 years, so times at most 9 years apart compare correctly, across
//! the wrap too; the longest limit (2 h) is 53,645 ticks. Durations are rounded up plus one tick, since the first tick
//! may be almost over.
//!
//! **Invariant:** a limit never ends early, and at most 268 ms late.
//!
//! Not here: reading a clock.

use std::time::Duration;

use zerocopy::{FromZeros, Immutable};

const TICK_SHIFT: u32 = 27;

/// A point in time, in ticks of the monotonic clock, modulo 2^32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromZeros, Immutable)]
#[repr(transparent)]
pub struct Tick(pub u32);

/// A duration in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticks(pub u32);

impl Tick {
    /// The tick that `now_ns` (monotonic nanoseconds) falls in.
    #[must_use]
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // modulo 2^32 is what a tick is
    pub const fn at(now_ns: u64) -> Self {
        Self((now_ns >> TICK_SHIFT) as u32)
    }

    /// The time from `earlier` to `self`; 0 if `earlier` is later (a clock read on another core).
    #[must_use]
    #[inline]
    pub const fn since(self, earlier: Self) -> Ticks {
        self.since_scaled(earlier, 0)
    }

    /// As [`Tick::since`] for points in time whose ticks are shifted to the left by `shift` bits: times of fewer bits,
    /// which compare correctly if they are at most half of their range apart (13 days for 24 bits).
    #[must_use]
    #[inline(always)]
    pub(crate) const fn since_scaled(self, earlier: Self, shift: u32) -> Ticks {
        let difference = self.0.wrapping_sub(earlier.0);
        if difference > u32::MAX / 2 { Ticks(0) } else { Ticks(difference >> shift) }
    }
}

impl Ticks {
    /// The duration in nanoseconds.
    #[must_use]
    pub const fn nanoseconds(self) -> u64 {
        (self.0 as u64) << TICK_SHIFT
    }
}

impl From<Duration> for Ticks {
    /// Rounds up and adds one tick; durations above 9 years become 9 years.
    fn from(duration: Duration) -> Self {
        let ticks = (duration.as_nanos() >> TICK_SHIFT) + 2;
        Self(u32::try_from(ticks).unwrap_or(u32::MAX).min(u32::MAX / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_difference_is_right_across_the_wrap() {
        assert_eq!(Tick(3).since(Tick(u32::MAX - 1)), Ticks(5));
        assert_eq!(Tick(u32::MAX).since(Tick(u32::MAX)), Ticks(0));
        assert_eq!(Tick(5).since(Tick(6)), Ticks(0), "a clock that is a little behind is no difference");
    }

    #[test]
    fn a_limit_in_ticks_holds_two_hours() {
        assert_eq!(Ticks::from(Duration::from_secs(7200)), Ticks(53_646));
        assert_eq!(Ticks::from(Duration::MAX), Ticks(u32::MAX / 2));
    }

    proptest! {
        #[test]
        fn a_limit_never_ends_early_nor_more_than_two_ticks_late(start in any::<u64>(), limit_ms in 0u64..10_000_000) {
            let start = start >> 1;
            let limit = Ticks::from(Duration::from_millis(limit_ms));
            let ends = |at: u64| Tick::at(at).since(Tick::at(start)) >= limit;
            let due = start + limit_ms * 1_000_000;
            prop_assert!(!ends(due.saturating_sub(1).max(start)));
            prop_assert!(ends(due + (2 << TICK_SHIFT)));
        }
    }
}
