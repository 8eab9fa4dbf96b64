//! The queue of status writes: the newest per Service, sent one after another at a bounded rate.
//!
//! **Invariant.** A write is sent until the server has decided about it, and never again after that: an equal one is
//! dropped until the object or the wish changes. Handing one over never waits.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use proto::ServiceName;
use proto::limits::SERVICES_MAX;
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::{Cluster, Outcome, StatusError, Trouble, patch};
use crate::source::StatusWrite;

/// 20 writes a second: every write of a Service goes to every kube-proxy (CONTROL section 5).
const PACE: Duration = Duration::from_millis(50);

/// Writes that wait to be sent.
#[derive(Debug, Default)]
pub struct StatusWriter {
    waiting: Mutex<BTreeMap<ServiceName, StatusWrite>>,
    came: Notify,
}

impl StatusWriter {
    /// Hands a write over; it takes the place of one for the same Service that was not sent yet.
    pub fn write(&self, write: StatusWrite) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(write.service.clone(), write);
        self.came.notify_one();
    }

    /// Sends writes for as long as it is polled.
    pub async fn run(&self, cluster: &Cluster) {
        let mut trouble = Trouble::new("patch services/status", &cluster.server);
        let mut decided = HashMap::new();
        loop {
            let Some(write) = self.next() else {
                self.came.notified().await;
                continue;
            };
            if decided.get(&write.service) == Some(&write) {
                continue;
            }
            let wait = match patch(&cluster.client, &write).await {
                Err(StatusError::Later(outage)) => {
                    self.put_back(write);
                    trouble.met(outage, Instant::now())
                }
                result => {
                    trouble.over();
                    tell(&write, &result);
                    // Deleted Services leave entries behind; starting anew costs one harmless write each.
                    if decided.len() >= SERVICES_MAX {
                        decided.clear();
                    }
                    decided.insert(write.service.clone(), write);
                    PACE
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    fn next(&self) -> Option<StatusWrite> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_first().map(|(_, write)| write)
    }

    /// A newer one that came meanwhile wins.
    fn put_back(&self, write: StatusWrite) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).entry(write.service.clone()).or_insert(write);
    }
}

fn tell(write: &StatusWrite, result: &Result<Outcome, StatusError>) {
    match result {
        Ok(Outcome::Written) => debug!(service = %write.service, "status written"),
        Ok(Outcome::Stale) => {
            debug!(service = %write.service, "the Service changed before its status was written; deciding again")
        }
        Ok(Outcome::Gone) => debug!(service = %write.service, "the Service was deleted before its status was written"),
        Err(error) => warn!("{error}"),
    }
}
