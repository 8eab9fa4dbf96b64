//! Totals of all Services and backends, and the rates by which Services are ordered.
//!
//! Invariant: a reading is at least [`FRESH`] after the last one. Rates are over at least [`WINDOW`], and the same for
//! every client, so that the order of Services does not jump at each request.
//! Not here: the rows of Services (`document`).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dataplane::WorkerCounters;
use dataplane::snapshot::{ServiceView, Views};
use proto::ServiceName;
use serde::Serialize;

use crate::admin::tables::{BackendRow, Workers, rows};

/// Time for which a reading serves all clients.
const FRESH: Duration = Duration::from_secs(1);
/// Least window of the rates by which Services are ordered.
const WINDOW: Duration = Duration::from_secs(5);

/// Traffic of a backend, of a Service or of all, over all workers. Counters are totals; bytes count from the IP header on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct TrafficCounts {
    pub(super) packets_to_backends: u64,
    pub(super) packets_to_clients: u64,
    pub(super) bytes_to_backends: u64,
    pub(super) bytes_to_clients: u64,
    /// Present flows.
    pub(super) flows: u64,
    pub(super) new_flows: u64,
    pub(super) failed_connections: u64,
    pub(super) reset_connections: u64,
}

impl TrafficCounts {
    pub(super) fn of(row: &BackendRow, workers: &Workers) -> Self {
        let sum = |of: fn(&WorkerCounters, u32) -> u64| row.sum(workers, of);
        Self {
            packets_to_backends: sum(|worker, slot| worker.sum_of(slot, |of| of.packets(false))),
            packets_to_clients: sum(|worker, slot| worker.sum_of(slot, |of| of.packets(true))),
            bytes_to_backends: sum(|worker, slot| worker.sum_of(slot, |of| of.bytes(false))),
            bytes_to_clients: sum(|worker, slot| worker.sum_of(slot, |of| of.bytes(true))),
            flows: sum(WorkerCounters::flows_of),
            new_flows: sum(|worker, slot| worker.sum_of(slot, |of| of.new_flows.get())),
            failed_connections: sum(|worker, slot| worker.sum_of(slot, |of| of.failed.get())),
            reset_connections: sum(|worker, slot| worker.sum_of(slot, |of| of.reset.get())),
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.packets_to_backends += other.packets_to_backends;
        self.packets_to_clients += other.packets_to_clients;
        self.bytes_to_backends += other.bytes_to_backends;
        self.bytes_to_clients += other.bytes_to_clients;
        self.flows += other.flows;
        self.new_flows += other.new_flows;
        self.failed_connections += other.failed_connections;
        self.reset_connections += other.reset_connections;
    }

    const fn packets(&self) -> u64 {
        self.packets_to_backends + self.packets_to_clients
    }
}

/// Sums over all Services.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Totals {
    /// When the counters were read, on the clock of the document, in milliseconds.
    at_ms: u64,
    services: u64,
    /// Services that are not served, or have no backend or an unhealthy one.
    services_with_trouble: u64,
    /// Backends of each Service, without draining ones.
    backends: u64,
    backends_unhealthy: u64,
    backends_draining: u64,
    #[serde(flatten)]
    traffic: TrafficCounts,
}

/// The figures at one time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FigureCounters {
    pub(super) packets_to_backends: u64,
    pub(super) packets_to_clients: u64,
    pub(super) bytes: u64,
    pub(super) drops: u64,
    pub(super) flows: u64,
    pub(super) healthy: u64,
}

/// What Services are ordered by.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rank {
    pub(super) packets: u64,
    /// Packets a second.
    pub(super) rate: f64,
    pub(super) has_trouble: bool,
}

/// The newest reading.
#[derive(Debug, Default)]
pub(super) struct Reading {
    pub(super) totals: Totals,
    pub(super) ranks: HashMap<Arc<ServiceName>, Rank>,
    read_at: Option<Duration>,
    /// Packets of Services at the beginning of the window.
    since: HashMap<Arc<ServiceName>, u64>,
    since_at: Duration,
}

/// Whether an operator should look at a Service.
pub(super) fn has_trouble(service: &ServiceView, backends: u64, healthy: u64) -> bool {
    service.refusal.is_some() || healthy < backends || backends == 0
}

impl Reading {
    /// A reading with nothing but ranks.
    #[cfg(test)]
    pub(super) fn of_ranks(ranks: HashMap<Arc<ServiceName>, Rank>) -> Self {
        Self { ranks, ..Self::default() }
    }

    /// Reads again unless the last reading is fresh; `now` is the time since a fixed point.
    pub(super) fn refresh(&mut self, now: Duration, services: &Views, workers: &Workers) {
        if self.read_at.is_some_and(|at| now.saturating_sub(at) < FRESH) {
            return;
        }
        let is_first = self.read_at.replace(now).is_none();
        self.totals = Totals { at_ms: milliseconds(now), services: services.len() as u64, ..Totals::default() };
        let ranks = services.values().map(|service| (Arc::clone(&service.name), self.totals.count(service, workers)));
        let mut ranks: HashMap<_, _> = ranks.collect();
        let window = now.saturating_sub(self.since_at);
        let turns = !is_first && window >= WINDOW;
        for (name, rank) in &mut ranks {
            rank.rate = match self.since.get(name) {
                Some(before) if turns => rank.packets.saturating_sub(*before) as f64 / window.as_secs_f64(),
                _ => self.ranks.get(name).map_or(0.0, |rank| rank.rate),
            };
        }
        if turns || is_first {
            self.since = ranks.iter().map(|(name, rank)| (Arc::clone(name), rank.packets)).collect();
            self.since_at = now;
        }
        self.ranks = ranks;
    }
}

impl Totals {
    /// What lines are drawn of, with what the workers count beside: their drops and flows.
    pub(super) const fn figures(&self, drops: u64, flows: u64) -> FigureCounters {
        let TrafficCounts { packets_to_backends, packets_to_clients, bytes_to_backends, bytes_to_clients, .. } = self.traffic;
        let (bytes, healthy) = (bytes_to_backends + bytes_to_clients, self.backends - self.backends_unhealthy);
        FigureCounters { packets_to_backends, packets_to_clients, bytes, drops, flows, healthy }
    }

    /// Adds a Service, and returns what it is ordered by, without its rate.
    fn count(&mut self, service: &ServiceView, workers: &Workers) -> Rank {
        let (mut traffic, mut backends, mut healthy) = (TrafficCounts::default(), 0, 0);
        for row in rows(service).values() {
            traffic.add(&TrafficCounts::of(row, workers));
            self.backends_draining += u64::from(row.draining);
            backends += u64::from(!row.draining);
            healthy += u64::from(!row.draining && row.healthy);
        }
        let has_trouble = has_trouble(service, backends, healthy);
        self.services_with_trouble += u64::from(has_trouble);
        self.backends += backends;
        self.backends_unhealthy += backends - healthy;
        self.traffic.add(&traffic);
        Rank { packets: traffic.packets(), rate: 0.0, has_trouble }
    }
}

/// Whole milliseconds.
pub(super) fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
