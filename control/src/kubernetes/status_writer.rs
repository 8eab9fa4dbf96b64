//! The queue of status writes: the newest one per Service, round robin over namespaces, in order of arrival within a
//! namespace, limited by the rate limit.
//!
//! Invariant: a write is retried until the server accepts or rejects it, and is not sent again after that: an equal
//! write is dropped until the object or the desired status changes. A Service whose writes fail, or a namespace with
//! slow admission webhooks, delays no other. Notes about a write are recorded once the server accepted it. Enqueuing
//! never blocks.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use proto::ServiceName;
use proto::limits::SERVICES_MAX;
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::backoff::Backoff;
use super::fair_queue::FairQueue;
use super::rate_limit::RateLimit;
use crate::kubernetes::api_error::Retry;
use crate::kubernetes::client::Cluster;
use crate::kubernetes::recorder::Recorder;
use crate::kubernetes::status_patch::{PatchOutcome, StatusError, patch};
use objects::note::Note;
use objects::status::StatusWrite;

/// Maximum number of concurrent writes: 100 a second with answers after 160 ms.
const IN_FLIGHT_MAX: usize = 16;
/// Maximum number of concurrent writes in one namespace.
const IN_FLIGHT_OF_NAMESPACE_MAX: usize = 4;

/// Queued writes.
#[derive(Debug, Default)]
pub struct StatusWriter {
    waiting: Mutex<FairQueue<ServiceName, Pending>>,
    /// The last accepted write of each Service.
    written: Mutex<HashMap<ServiceName, StatusWrite>>,
    added: Notify,
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
    /// The writes that the server accepted or rejected.
    decided: HashMap<ServiceName, StatusWrite>,
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
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.put(&service.namespace, service.clone(), Pending { write, notes });
        drop(waiting);
        self.added.notify_one();
    }

    /// Number of queued writes, without those in progress.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether the server accepted `write` and no other write for its Service followed.
    pub fn has_written(&self, write: &StatusWrite) -> bool {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).get(&write.service) == Some(write)
    }

    fn remember(&self, write: &StatusWrite, is_written: bool) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.remove(&write.service);
        if written.len() >= SERVICES_MAX {
            written.clear();
        }
        if is_written {
            written.insert(write.service.clone(), write.clone());
        }
    }

    /// Sends writes while it is polled.
    pub async fn run(&self, cluster: &Cluster) {
        let mut sending = Sending::new(cluster);
        let mut in_flight = FuturesUnordered::new();
        loop {
            let now = Instant::now();
            let next_at = sending.rate_limit.next_at(now).max(sending.rests_until);
            let may_send = in_flight.len() < IN_FLIGHT_MAX && next_at <= now;
            if let Some(pending) = may_send.then(|| self.next(&sending, now)).flatten() {
                if sending.is_news(&pending.write, now) {
                    in_flight.push(async move {
                        let result = patch(&cluster.client, &pending.write).await;
                        (pending, result, now.elapsed())
                    });
                }
                continue;
            }
            let paced = [next_at].into_iter().filter(|at| *at > now);
            let wake_at = sending.backoff.first_over(now).into_iter().chain(paced).min();
            tokio::select! {
                Some((pending, result, took)) = in_flight.next() => {
                    cluster.activity.status_writes.get_or_create(&[("result", name_of(&result))]).inc();
                    cluster.activity.status_write_duration.observe(took.as_secs_f64());
                    self.answered(&mut sending, pending, result, took);
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
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take(is_open, may_go)
    }

    fn answered(&self, sending: &mut Sending, pending: Pending, result: Result<PatchOutcome, StatusError>, took: Duration) {
        let (now, service) = (Instant::now(), pending.write.service.clone());
        sending.ends(&service);
        match result {
            Err(StatusError::Later(outage)) => {
                sending.backoff.failed(&service, now);
                // A newer write that arrived in the meantime wins.
                let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
                waiting.put_back(&service.namespace, service.clone(), pending);
                drop(waiting);
                if !outage.concerns_all() {
                    sending.of_server.succeeded();
                    sending.of_some.failed(outage, now);
                } else if sending.rests_until <= now {
                    // Of all concurrent writes, only the first failure is logged.
                    sending.rate_limit.throttled();
                    sending.rests_until = now + sending.of_server.failed(outage, now);
                }
            }
            result => {
                let waiting = self.waiting();
                sending.rate_limit.answered(took, waiting, now);
                sending.backoff.succeeded(&service);
                sending.of_server.succeeded();
                if sending.backoff.is_empty() {
                    sending.of_some.succeeded();
                }
                log(&pending.write, &result);
                let is_written = result == Ok(PatchOutcome::Written);
                if is_written {
                    pending.notes.iter().for_each(|note| self.recorder.record(note, Some(&pending.write.uid)));
                }
                self.remember(&pending.write, is_written);
                sending.decide(pending.write);
            }
        }
    }
}

impl Sending {
    fn new(cluster: &Cluster) -> Self {
        Self {
            of_server: Retry::new("patch services/status", &cluster.server),
            of_some: Retry::new("patch services/status of some Services", &cluster.server),
            backoff: Backoff::default(),
            decided: HashMap::new(),
            rate_limit: RateLimit::default(),
            rests_until: Instant::now(),
            busy: HashSet::new(),
            busy_namespaces: HashMap::new(),
        }
    }

    /// Returns whether the write still has to be sent, and marks it as in progress if so.
    fn is_news(&mut self, write: &StatusWrite, now: Instant) -> bool {
        let service = &write.service;
        if self.decided.get(service) == Some(write) {
            self.backoff.succeeded(service);
            return false;
        }
        self.rate_limit.count(now);
        self.busy.insert(service.clone());
        *self.busy_namespaces.entry(service.namespace.clone()).or_default() += 1;
        true
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

    fn decide(&mut self, write: StatusWrite) {
        // Deleted Services leave entries behind. Clearing all costs one harmless write per Service.
        if self.decided.len() >= SERVICES_MAX {
            self.decided.clear();
        }
        self.decided.insert(write.service.clone(), write);
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

fn log(write: &StatusWrite, result: &Result<PatchOutcome, StatusError>) {
    match result {
        Ok(PatchOutcome::Written) => debug!(service = %write.service, "status written"),
        Ok(PatchOutcome::Stale) => {
            debug!(service = %write.service, "the Service changed before its status was written; deciding again")
        }
        Ok(PatchOutcome::Gone) => debug!(service = %write.service, "the Service was deleted before its status was written"),
        Err(error) => warn!("{error}"),
    }
}
