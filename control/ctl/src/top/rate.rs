//! Rates from the counters of two samples, and their history.
//!
//! Invariant: a counter that falls, because its program or backend began again, gives no rate for that interval.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Rates that are remembered: two of each column of a wide sparkline.
pub(super) const HISTORY_MAX: usize = 60;
/// Counters of a row at most.
const COUNTERS_MAX: usize = 7;

/// Change a second; `None` before the second sample, and where a counter began again.
pub(super) type Rate = Option<f64>;

/// Former rates, the oldest first.
#[derive(Clone, Debug, Default)]
pub(super) struct History(VecDeque<f32>);

impl History {
    /// Adds the newest.
    pub(super) fn push(&mut self, rate: Rate) {
        let Some(rate) = rate else { return };
        if self.0.len() == HISTORY_MAX {
            self.0.pop_front();
        }
        #[allow(clippy::cast_possible_truncation)] // A picture of eight steps.
        self.0.push_back(rate as f32);
    }

    /// The newest rates as bars, the newest at the right, scaled to the highest of them.
    pub(super) fn bars(&self, columns: usize) -> String {
        const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let shown: Vec<f32> = self.0.iter().copied().skip(self.0.len().saturating_sub(columns)).collect();
        let highest = shown.iter().copied().fold(0.0, f32::max);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // From 0 to 8.
        let bar = |rate: f32| if rate > 0.0 { BARS[((rate / highest * 8.0).ceil() as usize).clamp(1, 8)] } else { BARS[0] };
        let bars: String = shown.into_iter().map(bar).collect();
        format!("{bars:>columns$}")
    }
}

/// The last counters of a row, and its history.
#[derive(Debug, Default)]
struct Track {
    counters: [u64; COUNTERS_MAX],
    round: u64,
    history: History,
}

/// The last counters of all rows.
#[derive(Debug, Default)]
pub(super) struct Tracker {
    tracks: HashMap<String, Track>,
    round: u64,
    at: Duration,
    elapsed: Duration,
}

impl Tracker {
    /// Begins a sample, taken at this time.
    pub(super) fn begin(&mut self, at: Duration) {
        self.elapsed = at.saturating_sub(self.at);
        self.at = at;
        self.round += 1;
    }

    /// The rates of a row's counters.
    pub(super) fn rates<const N: usize>(&mut self, key: &str, counters: [u64; N]) -> [Rate; N] {
        let (round, elapsed) = (self.round, self.elapsed.as_secs_f64());
        let track = match self.tracks.get_mut(key) {
            Some(track) => track,
            None => self.tracks.entry(key.to_owned()).or_default(),
        };
        let goes_on = track.round + 1 == round && track.round > 0;
        let fell = counters.iter().zip(&track.counters).any(|(now, before)| now < before);
        let rates = std::array::from_fn(|at| {
            let is_known = goes_on && !fell && elapsed > 0.0;
            is_known.then(|| (counters[at] - track.counters[at]) as f64 / elapsed)
        });
        track.counters[..N].copy_from_slice(&counters);
        track.round = round;
        rates
    }

    /// Adds to the history of a row, and returns it.
    pub(super) fn remember(&mut self, key: &str, rate: Rate) -> History {
        let track = self.tracks.entry(key.to_owned()).or_default();
        track.round = self.round;
        track.history.push(rate);
        track.history.clone()
    }

    /// Ends a sample: forgets rows that were not in it.
    pub(super) fn end(&mut self) {
        let round = self.round;
        self.tracks.retain(|_, track| track.round == round);
    }
}

/// The sum of the rates that are known; `None` if none is.
pub(super) fn sum(rates: impl IntoIterator<Item = Rate>) -> Rate {
    rates.into_iter().flatten().fold(None, |sum, rate| Some(sum.unwrap_or(0.0) + rate))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rates of one row with these counters, a sample every 2 s; `None`: not in that sample.
    fn rates(counters: &[Option<u64>]) -> Vec<Rate> {
        let mut tracker = Tracker::default();
        let mut found = Vec::new();
        for (n, counter) in (0..).zip(counters) {
            tracker.begin(Duration::from_secs(100 + 2 * n));
            found.extend(counter.map(|counter| tracker.rates("row", [counter])[0]));
            tracker.end();
        }
        found
    }

    #[test]
    fn a_rate_needs_two_samples_in_a_row_of_a_counter_that_did_not_fall() {
        assert_eq!(rates(&[Some(10), Some(30), Some(30)]), [None, Some(10.0), Some(0.0)]);
        assert_eq!(rates(&[Some(10), Some(4), Some(6)]), [None, None, Some(1.0)], "it began again");
        assert_eq!(rates(&[Some(10), None, Some(30)]), [None, None], "it may be another one");
        assert_eq!(rates(&[Some(u64::MAX), Some(0)]), [None, None]);
        let mut tracker = Tracker::default();
        for counter in [1, 2] {
            tracker.begin(Duration::from_secs(1));
            assert_eq!(tracker.rates("row", [counter]), [None], "no time passed");
            tracker.end();
        }
        assert_eq!((sum([None, Some(1.0), Some(2.0)]), sum([None])), (Some(3.0), None));
    }

    #[test]
    fn bars_are_scaled_to_the_highest_and_stand_at_the_right() {
        let mut history = History::default();
        for rate in [8.0, 0.0, 0.1, 4.0, 8.0] {
            history.push(Some(rate));
        }
        history.push(None);
        assert_eq!((history.bars(7).as_str(), history.bars(3).as_str()), ("  █ ▁▄█", "▁▄█"));
        assert_eq!(History::default().bars(3), "   ");
    }
}
