//! The queues between workers and sessions, and totals.
//!
//! **Invariant:** at most [`QUEUE_EVENTS`] events of a worker wait in each direction. Not here: sessions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataplane::flow::{FlowReplication, ReplicaEvent};
use tokio::sync::watch;

use crate::settings::Replication;

/// Events of a worker that may wait in each direction: 16,384 of 152 B are 2.5 MB. They are taken every 10 ms, so up to
/// 1.6 million a second.
const QUEUE_EVENTS: usize = 16_384;

/// What workers and sessions give each other, and how much.
#[derive(Debug, Default)]
pub struct ReplicaExchange {
    queues: Vec<Arc<FlowReplication>>,
    pub(super) batches_sent: AtomicU64,
    pub(super) batches_repaired: AtomicU64,
    pub(super) batches_lost: AtomicU64,
    pub(super) copies_sent: AtomicU64,
    pub(super) copies_received: AtomicU64,
    pub(super) followed: AtomicU64,
    /// Partners have all flows that were sent until then.
    pub(super) arrived: watch::Sender<Option<Instant>>,
}

impl ReplicaExchange {
    /// For this number of workers; without settings nothing is replicated.
    #[must_use]
    pub fn new(settings: Option<&Replication>, workers: usize) -> Self {
        let queue = |after: Duration| Arc::new(FlowReplication::new(QUEUE_EVENTS, after));
        let queues = settings.iter().flat_map(|settings| (0..workers).map(|_| queue(settings.after)));
        Self { queues: queues.collect(), ..Self::default() }
    }

    /// The queues of a worker; none when nothing is replicated.
    #[must_use]
    pub fn queue(&self, worker: usize) -> Option<&Arc<FlowReplication>> {
        self.queues.get(worker)
    }

    /// Numbers of events by what became of them.
    #[must_use]
    pub fn outcomes(&self) -> [(&'static str, u64); 4] {
        let sum = |count: fn(&FlowReplication) -> u64| self.queues.iter().map(|queue| count(queue)).sum::<u64>();
        [
            ("told", sum(|queue| queue.sent().get())),
            ("dropped", sum(|queue| queue.dropped().get())),
            ("applied", sum(|queue| queue.applied().get())),
            ("refused", sum(|queue| queue.refused().get())),
        ]
    }

    /// Numbers of batches by what became of them: sent, sent again because a partner missed them, no longer kept when a
    /// partner asked for them.
    #[must_use]
    pub fn batches(&self) -> [(&'static str, u64); 3] {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [("sent", of(&self.batches_sent)), ("repaired", of(&self.batches_repaired)), ("lost", of(&self.batches_lost))]
    }

    /// Numbers of complete copies: sent and received.
    #[must_use]
    pub fn copies(&self) -> [(&'static str, u64); 2] {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [("sent", of(&self.copies_sent)), ("received", of(&self.copies_received))]
    }

    /// Number of partners whose flows this gateway has a copy of and follows.
    #[must_use]
    pub fn followed(&self) -> u64 {
        self.followed.load(Ordering::Relaxed)
    }

    /// The time until which partners have everything that this gateway sent; `None` before it was first looked at. A
    /// partner whose session has just ended is waited for.
    #[must_use]
    pub fn arrived(&self) -> watch::Receiver<Option<Instant>> {
        self.arrived.subscribe()
    }

    /// Present number of shadow flows.
    #[must_use]
    pub fn shadow_flows(&self) -> u64 {
        self.queues.iter().map(|queue| queue.shadows().get()).sum()
    }

    /// Sets whether a partner may know flows that the workers do not.
    pub(super) fn set_partners(&self, has_partners: bool) {
        self.queues.iter().for_each(|queue| queue.set_partners(has_partners));
    }

    /// Events that workers could not report, since a queue was full.
    pub(super) fn dropped(&self) -> u64 {
        self.queues.iter().map(|queue| queue.dropped().get()).sum()
    }

    /// Events that workers report, until their queues are empty, or as much as fits into them once.
    pub(super) fn events(&self) -> impl Iterator<Item = ReplicaEvent> {
        self.queues.iter().flat_map(|queue| std::iter::from_fn(move || queue.take()).take(QUEUE_EVENTS))
    }

    /// Gives news to every worker: each keeps its own flows. Waits while a queue is full.
    pub(super) async fn give(&self, events: &[ReplicaEvent]) {
        for queue in &self.queues {
            for event in events {
                while !queue.give(*event) {
                    tokio::time::sleep(FULL).await;
                }
            }
        }
    }
}

/// Wait for room in the queue of a worker.
const FULL: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::super::record::tests::flow;
    use super::*;

    #[tokio::test]
    async fn news_is_given_to_every_worker_and_nothing_without_settings() {
        let exchange = ReplicaExchange::new(None, 4);
        assert!(exchange.queue(0).is_none());
        exchange.give(&[ReplicaEvent::Holds(flow(1))]).await;
        assert_eq!((exchange.events().count(), exchange.shadow_flows()), (0, 0));
        let exchange = ReplicaExchange::new(Some(&Replication::default()), 2);
        assert!(exchange.queue(1).is_some() && exchange.queue(2).is_none());
        assert_eq!(exchange.queue(0).unwrap().after(), Duration::from_secs(1));
        // Nobody takes what is given: the third does not fit.
        let all = vec![ReplicaEvent::Holds(flow(1)); QUEUE_EVENTS + 1];
        exchange.give(&all[1..]).await;
        assert!(tokio::time::timeout(Duration::from_millis(20), exchange.give(&all)).await.is_err());
    }
}
