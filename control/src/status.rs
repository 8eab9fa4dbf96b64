//! Status of Services: which addresses, conditions and finalizers sluice writes, and when.
//!
//! Invariant: an address of mode `ipMode: Proxy` is published in the status once every connected gateway that is not
//! drained forwards for it, or 2 s after the first one does. A published address is never removed because gateways
//! disconnect. Gateways stop serving a Service before its finalizer is removed. Each Service has a life (`life`), which
//! decides what is due.
//! Deliberately not here: the choice of addresses, and why a Service is not served (`plan`).

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::gateways::registry::Gateways;
use crate::kubernetes::recorder::Recorder;
use crate::kubernetes::{ApiError, StatusWriter};
use crate::manifests::StatusFiles;
use crate::plan::WantedStatuses;
use objects::note::Note;
use objects::status::StatusWrite;

pub(crate) mod backend_notes;
pub(crate) mod conditions;
mod dispute;
pub mod edge_gateways;
pub mod fleet_notes;
mod gateway_conditions;
mod goal;
mod life;
pub mod pools;
mod queue;
pub mod release;

use queue::Queue;
pub use queue::Statuses;

/// Retry interval for a status file that could not be written.
const RETRY: Duration = Duration::from_secs(5);

/// Destination of statuses.
#[derive(Debug)]
pub enum StatusSink {
    /// Files beside manifests.
    Files(StatusFiles),
    /// `services/status` of a Kubernetes API, through a rate-limited queue that retries.
    Kubernetes(Arc<StatusWriter>),
}

/// Writes desired statuses when they are due, until the sender of `statuses` is dropped.
pub async fn write_statuses(
    mut statuses: watch::Receiver<Option<Arc<Statuses>>>,
    mut gateways: watch::Receiver<Gateways>,
    mut sink: StatusSink,
    recorder: Arc<Recorder>,
) {
    let mut queue = Queue::new(Instant::now());
    loop {
        let newest = statuses.borrow_and_update().clone();
        if let Some(newest) = newest {
            queue.set_plan(&newest, Instant::now());
            sink.forget_all_but(&newest.wanted);
        }
        let connected = gateways.borrow_and_update().clone();
        let now = Instant::now();
        queue.set_gateways(&connected, now);
        for due in queue.due(&connected, now) {
            due.notes.iter().for_each(|note| recorder.record(note, Some(&due.uid)));
            match due.write {
                Some(write) if !sink.write(&write, due.notes_of_write, &recorder) => {
                    queue.failed(&write.service, Instant::now() + RETRY);
                }
                Some(write) if matches!(sink, StatusSink::Files(_)) => queue.answered(&write, true),
                _ => {}
            }
            // Files are written in this task, so it yields to other tasks between two of them.
            tokio::task::yield_now().await;
        }
        let wake_at = queue.next_due();
        // An answer makes nothing due by itself: the object that it changed follows.
        let has_ended = loop {
            tokio::select! {
                changed = statuses.changed() => break changed.is_err(),
                changed = gateways.changed() => break changed.is_err(),
                () = sink.answers() => {}
                () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => break false,
            }
            sink.take_answers().iter().for_each(|(write, is_accepted)| queue.answered(write, *is_accepted));
        };
        if has_ended {
            return;
        }
        sink.take_answers().iter().for_each(|(write, is_accepted)| queue.answered(write, *is_accepted));
    }
}

impl StatusSink {
    /// Returns whether the status is written, or queued for writing. `notes` are reported once it is written.
    fn write(&mut self, write: &StatusWrite, notes: Vec<Note>, recorder: &Recorder) -> bool {
        match self {
            Self::Files(files) => match waiting(|| files.write(write)) {
                Ok(()) => {
                    notes.iter().for_each(|note| recorder.record(note, Some(&write.uid)));
                    true
                }
                Err(error) => {
                    tracing::warn!(service = %write.service, %error, "status file not written; trying again");
                    false
                }
            },
            Self::Kubernetes(writer) => {
                writer.write(write.clone(), notes);
                true
            }
        }
    }

    /// Waits for answers of the server. Only sluice writes status files, so nobody disputes them.
    async fn answers(&self) {
        match self {
            Self::Files(_) => std::future::pending().await,
            Self::Kubernetes(writer) => writer.answered().await,
        }
    }

    /// The writes that the server answered, and whether it accepted each.
    fn take_answers(&self) -> Vec<(StatusWrite, bool)> {
        match self {
            Self::Files(_) => Vec::new(),
            Self::Kubernetes(writer) => writer.take_answers(),
        }
    }

    /// Removes the status file of a deleted Service. In a cluster the status disappears with the Service.
    fn forget_all_but(&mut self, services: &WantedStatuses) {
        if let Self::Files(files) = self {
            files.forget_all_but(|name| services.contains_key(name));
        }
    }
}

/// Does what waits for a disk; other tasks of this thread go on elsewhere meanwhile.
fn waiting<T>(work: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// The result of a write. It is accepted even if its answer cannot be decoded; an answer with one of `settled_codes`
/// makes it unnecessary.
fn accepted<T>(answer: kube::Result<T>, settled_codes: &[u16]) -> Result<(), ApiError> {
    match answer {
        Ok(_) | Err(kube::Error::SerdeError(_)) => Ok(()),
        Err(kube::Error::Api(status)) if settled_codes.contains(&status.code) => Ok(()),
        Err(error) => Err(ApiError::from(&error)),
    }
}

#[cfg(test)]
mod tests;
