//! How long changes of endpoints take until every worker of every gateway forwards by them.
//!
//! Invariant: the number of changes under way is bounded. Only clocks of this process are used: a change begins when
//! the planner receives it, and ends with the last acknowledgement.
//! Not here: names of metrics (`metrics`).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::watch;

use super::registry::Gateways;

/// Upper bounds of durations, in seconds: a plan of one Service takes a millisecond; a minute is an outage.
const SECONDS: [f64; 15] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Maximum number of changes under way, the newest ones: 20 plans a second for 50 s.
const UNDER_WAY_MAX: usize = 1_000;

/// Durations of plans, and of changes until they are in force. Copies share them.
#[derive(Clone, Debug)]
pub struct Programming {
    /// Durations of plans, in seconds.
    pub plans: Histogram,
    /// Durations from a changed EndpointSlice until all workers forward by it, in seconds.
    pub changes: Histogram,
    /// Counters of generations with a change of endpoints, and when it was received; oldest first.
    under_way: Arc<Mutex<VecDeque<(u64, Instant)>>>,
}

impl Default for Programming {
    fn default() -> Self {
        Self { plans: Histogram::new(SECONDS), changes: Histogram::new(SECONDS), under_way: Arc::default() }
    }
}

impl Programming {
    /// Forgets the changes under way: the counters of generations begin again.
    pub fn begin_term(&self) {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Records that a generation is published whose oldest change of endpoints was received at `since`.
    pub fn published(&self, counter: u64, since: Instant) {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if under_way.len() >= UNDER_WAY_MAX {
            under_way.pop_front();
        }
        under_way.push_back((counter, since));
    }

    /// Ends the changes that all gateways have applied. While none is connected, changes wait for nobody and are
    /// forgotten.
    pub fn acknowledged(&self, gateways: &Gateways, now: Instant) {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if gateways.reached_by_all().is_none() {
            under_way.clear();
        }
        while let Some((counter, since)) = under_way.front().copied()
            && gateways.all_reached(counter)
        {
            under_way.pop_front();
            self.changes.observe(now.saturating_duration_since(since).as_secs_f64());
        }
    }

    /// Follows the acknowledgements while it is polled and `gateways` has a sender.
    pub async fn follow(&self, mut gateways: watch::Receiver<Gateways>) {
        while gateways.changed().await.is_ok() {
            self.acknowledged(&gateways.borrow_and_update(), Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::registry::Connection;
    use super::*;

    #[test]
    fn a_change_ends_with_the_last_acknowledgement() {
        let (programming, now) = (Programming::default(), Instant::now());
        let gateways = watch::Sender::new(Gateways::default());
        let open = |name| Connection::open(&gateways, name, "0.1.0", Vec::new());
        let (one, two) = (open("edge-1"), open("edge-2"));
        programming.published(1, now);
        programming.published(2, now + Duration::from_secs(1));
        one.acknowledge(2);
        two.acknowledge(1);
        programming.acknowledged(&gateways.borrow(), now + Duration::from_secs(2));
        assert_eq!((programming.changes.count(), programming.changes.sum()), (1, 2.0));
        two.acknowledge(2);
        programming.acknowledged(&gateways.borrow(), now + Duration::from_secs(4));
        assert_eq!((programming.changes.count(), programming.changes.sum()), (2, 5.0));
    }

    #[test]
    fn a_change_that_no_gateway_waits_for_is_not_counted() {
        let (programming, now) = (Programming::default(), Instant::now());
        let gateways = watch::Sender::new(Gateways::default());
        programming.published(1, now);
        programming.acknowledged(&gateways.borrow(), now);
        let one = Connection::open(&gateways, "edge-1", "0.1.0", Vec::new());
        one.acknowledge(1);
        programming.acknowledged(&gateways.borrow(), now + Duration::from_secs(600));
        assert_eq!(programming.changes.count(), 0);
    }
}
