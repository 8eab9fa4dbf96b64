//! What of Services' objects is ours, and when it is written: addresses, conditions, the finalizer.
//!
//! Invariant: an address whose traffic does not pass the VIP on to nodes (`ipMode: Proxy`) is told to the world once
//! every connected gateway that is not drained forwards for it, or 2 s after the first does. What is there is never cleared because gateways
//! leave. A Service that leaves is let go by gateways first. Somebody else who writes the same status is overwritten at
//! most `REWRITES_MAX` times in `REWRITES_WITHIN`.
//! Deliberately not here: which addresses, and why a Service is not served (`plan`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use proto::ServiceName;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::gateways::Gateways;
use crate::kubernetes::StatusWriter;
use crate::manifests::StatusFiles;
use crate::notebook::Notebook;
use crate::plan::{Leaving, WantedStatuses};
use crate::source::StatusWrite;

mod conditions;
mod departure;
mod item;
mod queue;
mod view;

use queue::Queue;

/// A status file that could not be written is tried again after this time.
const RETRY: Duration = Duration::from_secs(5);

/// Where statuses are written.
#[derive(Debug)]
pub enum StatusSink {
    /// Files beside manifests.
    Files(StatusFiles),
    /// `services/status` of a Kubernetes API, through a queue that repeats and paces.
    Kubernetes(Arc<StatusWriter>),
}

/// The statuses that one plan wants.
#[derive(Clone, Debug, Default)]
pub struct Statuses {
    /// Counter of the generation that gateways forward by for them.
    pub counter: u64,
    /// All Services of type `LoadBalancer` that are ours.
    pub wanted: WantedStatuses,
    /// Those that are not, or not any more, and still hold something of ours.
    pub leaving: BTreeMap<ServiceName, Leaving>,
}

/// Writes what is wanted, when it is due, until the sender of `statuses` is gone.
pub async fn write_statuses(
    mut statuses: watch::Receiver<Option<Arc<Statuses>>>,
    mut gateways: watch::Receiver<Gateways>,
    mut sink: StatusSink,
    notebook: Arc<Notebook>,
) {
    let mut queue = Queue::new(Instant::now());
    loop {
        let newest = statuses.borrow_and_update().clone();
        if let Some(newest) = newest {
            queue.take_in(&newest, Instant::now());
            sink.forget_all_but(&newest.wanted);
        }
        let connected = gateways.borrow_and_update().clone();
        let now = Instant::now();
        queue.see(&connected, now);
        for due in queue.due(&connected, now, |write| sink.has_written(write)) {
            if due.write.as_ref().is_some_and(|write| !sink.write(write)) {
                due.write.iter().for_each(|write| queue.failed(&write.service, Instant::now() + RETRY));
                continue;
            }
            due.notes.iter().for_each(|note| notebook.tell(note, Some(&due.uid)));
            // Files are written here; other tasks get their turn between two.
            tokio::task::yield_now().await;
        }
        let wake_at = queue.next_due();
        tokio::select! {
            changed = statuses.changed() => if changed.is_err() { return },
            changed = gateways.changed() => if changed.is_err() { return },
            () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
        }
    }
}

impl StatusSink {
    /// Whether it is written, or will be without our doing.
    fn write(&mut self, write: &StatusWrite) -> bool {
        match self {
            Self::Files(files) => match files.write(write) {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(service = %write.service, %error, "status file not written; trying again");
                    false
                }
            },
            Self::Kubernetes(writer) => {
                writer.write(write.clone());
                true
            }
        }
    }

    /// Whether the object has had the status of `write`. Nobody else writes status files.
    fn has_written(&self, write: &StatusWrite) -> bool {
        match self {
            Self::Files(_) => false,
            Self::Kubernetes(writer) => writer.has_written(write),
        }
    }

    /// A Service that is gone has no status. In a cluster that went with the Service.
    fn forget_all_but(&mut self, services: &WantedStatuses) {
        if let Self::Files(files) = self {
            files.forget_all_but(|name| services.contains_key(name));
        }
    }
}

#[cfg(test)]
mod tests;
