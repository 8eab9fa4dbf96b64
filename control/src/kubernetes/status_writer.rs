//! The queue of status writes: the newest one per Service, round robin over namespaces, in order of arrival within a
//! namespace, limited by the rate limit.
//!
//! Invariant: a write is retried until the server accepts it or knows a newer version of the object, or a newer write
//! replaces it. A write that the server refuses, by admission for example, is retried with growing delays without end,
//! and its owner is told once. A Service whose writes fail, or a namespace with slow admission webhooks, delays no
//! other. Notes about a write are recorded once the server accepted it. Nothing is remembered of a Service whose write
//! is answered. Enqueuing never blocks.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use proto::ServiceName;
use tokio::sync::Notify;
use tracing::debug;

use super::backoff::Backoff;
use super::fair_queue::FairQueue;
use super::rate_limit::RateLimit;
use crate::kubernetes::api_error::Retry;
use crate::kubernetes::client::Cluster;
use crate::kubernetes::recorder::Recorder;
use crate::kubernetes::status_patch::{PatchOutcome, StatusError, patch};
use objects::note::{Cause, Note, Remark, Subject};
use objects::status::StatusWrite;

/// Maximum number of concurrent writes: 100 a second with answers after 160 ms.
const IN_FLIGHT_MAX: usize = 16;
/// Maximum number of concurrent writes in one namespace.
const IN_FLIGHT_OF_NAMESPACE_MAX: usize = 4;

/// Queued writes.
#[derive(Debug, Default)]
pub struct StatusWriter {
    waiting: Mutex<FairQueue<ServiceName, Pending>>,
    /// Services with a write that was queued since the last look: their back-off is shortened.
    changed: Mutex<HashSet<ServiceName>>,
    /// The writes that were answered, and whether the server accepted each.
    answers: Mutex<Vec<(StatusWrite, bool)>>,
    added: Notify,
    answered: Notify,
    recorder: Arc<Recorder>,
}

/// A write, and the notes to record once the server accepted it.
#[derive(Debug)]
struct Pending {
    write: StatusWrite,
    notes: Vec<Note>,
}

/// State of the sender.
struct Sending {
    of_server: Retry,
    of_some: Retry,
    backoff: Backoff<ServiceName>,
    rate_limit: RateLimit,
    /// Nothing is sent before this time.
    rests_until: Instant,
    /// Services with a write in progress, and their number per namespace.
    busy: HashSet<ServiceName>,
    busy_namespaces: HashMap<String, usize>,
}

impl StatusWriter {
    /// A queue that records notes of accepted writes.
    #[must_use]
    pub fn new(recorder: Arc<Recorder>) -> Self {
        Self { recorder, ..Self::default() }
    }

    /// Enqueues a write. It replaces a queued one for the same Service, whose notes are dropped.
    pub fn write(&self, write: StatusWrite, notes: Vec<Note>) {
        let service = write.service.clone();
        lock(&self.changed).insert(service.clone());
        lock(&self.waiting).put(&service.namespace, service.clone(), Pending { write, notes });
        self.added.notify_one();
    }

    /// Number of queued writes, without those in progress.
    #[must_use]
    pub fn waiting(&self) -> usize {
        lock(&self.waiting).len()
    }

    /// Waits until a write is answered.
    pub async fn answered(&self) {
        self.answered.notified().await;
    }

    /// The writes that were answered since this was last called, and whether the server accepted each.
    #[must_use]
    pub fn take_answers(&self) -> Vec<(StatusWrite, bool)> {
        std::mem::take(&mut *lock(&self.answers))
    }

    /// Sends writes while it is polled.
    pub async fn run(&self, cluster: &Cluster) {
        let mut sending = Sending::new(cluster);
        let mut in_flight = FuturesUnordered::new();
        loop {
            let now = Instant::now();
            let next_at = sending.rate_limit.next_at(now).max(sending.rests_until);
            let may_send = in_flight.len() < IN_FLIGHT_MAX && next_at <= now;
            std::mem::take(&mut *lock(&self.changed)).iter().for_each(|service| sending.backoff.shorten(service, now));
            if let Some(pending) = may_send.then(|| self.next(&sending, now)).flatten() {
                sending.begins(&pending.write.service, now);
                in_flight.push(async move {
                    let result = patch(&cluster.client, &pending.write).await;
                    (pending, result, now.elapsed())
                });
                continue;
            }
            let paced = [next_at].into_iter().filter(|at| *at > now);
            let wake_at = sending.backoff.first_over(now).into_iter().chain(paced).min();
            tokio::select! {
                Some((pending, result, took)) = in_flight.next() => {
                    cluster.activity.status_writes.get_or_create(&[("result", name_of(&result))]).inc();
                    cluster.activity.status_write_duration.observe(took.as_secs_f64());
                    self.settle(&mut sending, pending, result, took);
                }
                () = self.added.notified() => {}
                () = tokio::time::sleep_until(wake_at.unwrap_or(now).into()), if wake_at.is_some() => {}
            }
        }
    }

    fn next(&self, sending: &Sending, now: Instant) -> Option<Pending> {
        let is_open =
            |namespace: &str| sending.busy_namespaces.get(namespace).is_none_or(|count| *count < IN_FLIGHT_OF_NAMESPACE_MAX);
        let may_go = |name: &ServiceName| !sending.backoff.holds(name, now) && !sending.busy.contains(name);
        lock(&self.waiting).take(is_open, may_go)
    }

    fn settle(&self, sending: &mut Sending, pending: Pending, result: Result<PatchOutcome, StatusError>, took: Duration) {
        let (now, service) = (Instant::now(), pending.write.service.clone());
        sending.ends(&service);
        match result {
            Err(StatusError::Later(outage)) if outage.concerns_all() => {
                sending.backoff.failed(&service, now);
                if sending.rests_until <= now {
                    // Of all concurrent writes, only the first failure is logged.
                    sending.rate_limit.throttled();
                    sending.rests_until = now + sending.of_server.failed(outage, now);
                }
                self.put_back(pending);
            }
            Err(error) => {
                sending.of_server.succeeded();
                if let StatusError::Later(outage) = &error {
                    sending.of_some.failed(outage.clone(), now);
                }
                let refusal = error.refusal();
                if refusal.is_some() {
                    sending.backoff.refused(&service, now)
                } else {
                    sending.backoff.failed(&service, now)
                }
                if let Some(text) = refusal {
                    let note = Note { subject: Subject::Service(service), remark: Remark::new(Cause::StatusRefused, text) };
                    self.recorder.record_once(&note, Some(&pending.write.uid));
                }
                self.put_back(pending);
            }
            Ok(outcome) => {
                sending.rate_limit.answered(took, self.waiting(), now);
                sending.backoff.succeeded(&service);
                sending.of_server.succeeded();
                if sending.backoff.is_empty() {
                    sending.of_some.succeeded();
                }
                log(&pending.write, outcome);
                let is_written = outcome == PatchOutcome::Written;
                if is_written {
                    pending.notes.iter().for_each(|note| self.recorder.record(note, Some(&pending.write.uid)));
                }
                lock(&self.answers).push((pending.write, is_written));
                self.answered.notify_one();
            }
        }
    }

    /// A newer write that arrived in the meantime wins.
    fn put_back(&self, pending: Pending) {
        let service = pending.write.service.clone();
        lock(&self.waiting).put_back(&service.namespace, service.clone(), pending);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sending {
    fn new(cluster: &Cluster) -> Self {
        Self {
            of_server: Retry::new("patch services/status", &cluster.server),
            of_some: Retry::new("patch services/status of some Services", &cluster.server),
            backoff: Backoff::default(),
            rate_limit: RateLimit::default(),
            rests_until: Instant::now(),
            busy: HashSet::new(),
            busy_namespaces: HashMap::new(),
        }
    }

    fn begins(&mut self, service: &ServiceName, now: Instant) {
        self.rate_limit.count(now);
        self.busy.insert(service.clone());
        *self.busy_namespaces.entry(service.namespace.clone()).or_default() += 1;
    }

    fn ends(&mut self, service: &ServiceName) {
        self.busy.remove(service);
        if let Some(count) = self.busy_namespaces.get_mut(&service.namespace) {
            *count -= 1;
            if *count == 0 {
                self.busy_namespaces.remove(&service.namespace);
            }
        }
    }
}

/// The result as metrics name it.
const fn name_of(result: &Result<PatchOutcome, StatusError>) -> &'static str {
    match result {
        Ok(PatchOutcome::Written) => "written",
        Ok(PatchOutcome::Stale) => "stale",
        Ok(PatchOutcome::Gone) => "gone",
        Err(StatusError::Refused { .. }) => "refused",
        Err(StatusError::Later(_)) => "failed",
    }
}

fn log(write: &StatusWrite, outcome: PatchOutcome) {
    let text = match outcome {
        PatchOutcome::Written => "status written",
        PatchOutcome::Stale => "the Service changed before its status was written; deciding again",
        PatchOutcome::Gone => "the Service was deleted before its status was written",
    };
    debug!(service = %write.service, "{text}");
}
