//! The last minutes as lines: the figures of the gateway, and the packets of each Service.
//!
//! Invariant: memory is bounded: [`POINTS`] points of each line, and lines of [`SERVICES_MAX`] Services. Points are taken
//! whether or not anybody looks, so that a page that is opened shows what was before.
//! Not here: when a point is taken (`status_page`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use proto::ServiceName;
use serde::Serialize;

use super::reading::{FigureCounters, Reading};

/// Time between two points.
pub(super) const POINT_EVERY: Duration = Duration::from_secs(2);
/// Points of a line: 3 minutes.
const POINTS: usize = 90;
/// Services with a line: 10,000 lines of 720 bytes (90 points of 8 bytes) are 7.2 MB. Of more Services, those that come first have one.
const SERVICES_MAX: usize = 10_000;

/// A line, the newest point last; `null` where nothing is known.
type RateLine = VecDeque<Option<f32>>;

/// The lines of the figures: packets, bytes and drops a second; flows and healthy backends.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct FigureLines {
    to_backends: RateLine,
    to_clients: RateLine,
    throughput: RateLine,
    flows: RateLine,
    dropped: RateLine,
    healthy: RateLine,
}

/// The lines, and the counters of their last points.
#[derive(Debug, Default)]
pub(super) struct StatusLines {
    pub(super) figures: FigureLines,
    services: HashMap<Arc<ServiceName>, (u64, RateLine)>,
    last: Option<(Duration, FigureCounters)>,
}

impl StatusLines {
    /// Takes a point at `now`, unless it is too early for one.
    pub(super) fn take(&mut self, now: Duration, figures: FigureCounters, reading: &Reading) {
        let before = self.last.filter(|(at, _)| now > *at);
        let seconds = before.map(|(at, _)| now.saturating_sub(at).as_secs_f64());
        let rate = |of: fn(&FigureCounters) -> u64| {
            let (seconds, (_, before)) = (seconds?, before?);
            Some(a_second(of(&figures).checked_sub(of(&before))?, seconds))
        };
        let lines = &mut self.figures;
        push(&mut lines.to_backends, rate(|of| of.packets_to_backends));
        push(&mut lines.to_clients, rate(|of| of.packets_to_clients));
        push(&mut lines.throughput, rate(|of| of.bytes));
        push(&mut lines.dropped, rate(|of| of.drops));
        push(&mut lines.flows, Some(figures.flows as f32));
        push(&mut lines.healthy, Some(figures.healthy as f32));
        self.services.retain(|name, _| reading.ranks.contains_key(name));
        for (name, rank) in &reading.ranks {
            if !self.services.contains_key(name) && self.services.len() >= SERVICES_MAX {
                continue;
            }
            let (packets, line) =
                self.services.entry(Arc::clone(name)).or_insert_with(|| (rank.packets, RateLine::with_capacity(POINTS)));
            let grown = rank.packets.checked_sub(*packets);
            push(line, seconds.zip(grown).map(|(seconds, grown)| a_second(grown, seconds)));
            *packets = rank.packets;
        }
        self.last = Some((now, figures));
    }

    /// The line of a Service.
    pub(super) fn of_service(&self, name: &Arc<ServiceName>) -> RateLine {
        self.services.get(name).map(|(_, line)| line.clone()).unwrap_or_default()
    }
}

/// A rate, as exact as a line needs it.
#[allow(clippy::cast_possible_truncation)] // far below the largest number
fn a_second(count: u64, seconds: f64) -> f32 {
    (count as f64 / seconds) as f32
}

/// Adds a point, rounded to what a line of 26 pixels shows.
fn push(line: &mut RateLine, value: Option<f32>) {
    if line.len() >= POINTS {
        line.pop_front();
    }
    line.push_back(value.map(|value| (value * 10.0).round() / 10.0));
}

#[cfg(test)]
mod tests {
    use super::super::reading::Rank;
    use super::*;

    #[test]
    fn a_line_has_rates_gaps_and_no_more_points_than_it_may() {
        let mut lines = StatusLines::default();
        let name = Arc::new(ServiceName::new("shop", "web"));
        let reading = |packets| {
            let rank = Rank { packets, ..Rank::default() };
            Reading::of_ranks(HashMap::from([(Arc::clone(&name), rank)]))
        };
        let counters = |packets_to_backends| FigureCounters { packets_to_backends, flows: 7, ..FigureCounters::default() };
        // It begins again in between.
        for (at, packets) in [(1, 0), (3, 20), (5, 10), (7, 50)] {
            lines.take(Duration::from_secs(at), counters(packets), &reading(packets));
        }
        let expected = [None, Some(10.0), None, Some(20.0)];
        assert_eq!(lines.figures.to_backends, expected);
        assert_eq!(lines.of_service(&name), expected);
        assert_eq!(lines.figures.flows, [Some(7.0); 4]);
        for at in 0..2 * POINTS as u64 {
            lines.take(Duration::from_secs(10 + 2 * at), counters(at), &reading(at));
        }
        assert_eq!((lines.figures.dropped.len(), lines.of_service(&name).len()), (POINTS, POINTS));
        lines.take(Duration::from_secs(9_999), counters(0), &Reading::default());
        assert!(lines.of_service(&name).is_empty(), "a Service that is gone has no line");
    }
}
