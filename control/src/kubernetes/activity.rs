//! What this process did at the API server since its start, counted for metrics.
//!
//! Invariant: each label has few values, all of them in this package.
//! Not here: names of metrics (`metrics`).

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

/// Upper bounds of the durations of requests, in seconds: from a usual PATCH to a hanging webhook.
const REQUEST_SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// A counter for each value of one label.
pub type CounterBy = Family<[(&'static str, &'static str); 1], Counter>;

/// The counts.
#[derive(Debug)]
pub struct ApiActivity {
    /// Watches that failed or had to list again, by `resource`.
    pub watch_restarts: CounterBy,
    /// Answered writes of `services/status`, by `result`.
    pub status_writes: CounterBy,
    /// Durations of these writes, in seconds from the request to its answer.
    pub status_write_duration: Histogram,
    /// Attempts to write an Event, by `result`.
    pub event_writes: CounterBy,
    /// Failed attempts to get, create or renew the Lease.
    pub lease_failures: Counter,
    /// How often this replica began to lead.
    pub leader_terms: Counter,
}

impl Default for ApiActivity {
    fn default() -> Self {
        Self {
            watch_restarts: CounterBy::default(),
            status_writes: CounterBy::default(),
            status_write_duration: Histogram::new(REQUEST_SECONDS),
            event_writes: CounterBy::default(),
            lease_failures: Counter::default(),
            leader_terms: Counter::default(),
        }
    }
}
