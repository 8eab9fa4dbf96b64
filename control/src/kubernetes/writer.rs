//! The queue of status writes: the newest per Service, sent one after another, no more than 20 in any second.
//!
//! **Invariant.** A write is sent until the server has decided about it, and never again after that: an equal one is
//! dropped until the object or the wish changes. A Service whose writes fail waits alone. Handing one over never waits.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use proto::ServiceName;
use proto::limits::SERVICES_MAX;
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::outage::{Outage, WAIT_MAX, WAIT_MIN};
use super::{Cluster, Outcome, StatusError, Trouble, patch};
use crate::source::StatusWrite;

/// Writes in any [`PACED_BY`]: every write of a Service goes to every kube-proxy (CONTROL section 5).
const WRITES_MAX: usize = 20;
/// The time that they are counted in. A new Service takes two writes, and is not to wait for those of a few others.
const PACED_BY: Duration = Duration::from_secs(1);

/// Writes that wait to be sent.
#[derive(Debug, Default)]
pub struct StatusWriter {
    waiting: Mutex<BTreeMap<ServiceName, StatusWrite>>,
    /// The last one of each Service, if the server took it.
    written: Mutex<HashMap<ServiceName, StatusWrite>>,
    came: Notify,
}

impl StatusWriter {
    /// Hands a write over; it takes the place of one for the same Service that was not sent yet.
    pub fn write(&self, write: StatusWrite) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(write.service.clone(), write);
        self.came.notify_one();
    }

    /// Whether the server took `write`, and was sent no other for its Service since.
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

    /// Sends writes for as long as it is polled.
    pub async fn run(&self, cluster: &Cluster) {
        let mut of_server = Trouble::new("patch services/status", &cluster.server);
        let mut of_some = Trouble::new("patch services/status of some Services", &cluster.server);
        let mut held = Held::default();
        let mut decided = HashMap::new();
        let mut pace = Pace::default();
        loop {
            let Some(write) = self.next(&held, Instant::now()) else {
                tokio::select! {
                    () = self.came.notified() => {}
                    () = held.first_over() => {}
                }
                continue;
            };
            if decided.get(&write.service) == Some(&write) {
                held.0.remove(&write.service);
                continue;
            }
            tokio::time::sleep(pace.wait(Instant::now())).await;
            pace.count(Instant::now());
            let wait = match patch(&cluster.client, &write).await {
                Err(StatusError::Later(outage)) => {
                    let now = Instant::now();
                    held.hold(&write.service, now);
                    self.put_back(write);
                    if concerns_all(&outage) {
                        of_server.met(outage, now)
                    } else {
                        of_server.over();
                        of_some.met(outage, now);
                        Duration::ZERO
                    }
                }
                result => {
                    held.0.remove(&write.service);
                    of_server.over();
                    if held.0.is_empty() {
                        of_some.over();
                    }
                    tell(&write, &result);
                    self.remember(&write, result == Ok(Outcome::Written));
                    // Deleted Services leave entries behind; starting anew costs one harmless write each.
                    if decided.len() >= SERVICES_MAX {
                        decided.clear();
                    }
                    decided.insert(write.service.clone(), write);
                    Duration::ZERO
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    fn next(&self, held: &Held, now: Instant) -> Option<StatusWrite> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let name = waiting.keys().find(|name| !held.holds(name, now))?.clone();
        waiting.remove(&name)
    }

    /// A newer one that came meanwhile wins.
    fn put_back(&self, write: StatusWrite) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).entry(write.service.clone()).or_insert(write);
    }
}

/// When the newest writes were sent.
#[derive(Debug, Default)]
struct Pace(VecDeque<Instant>);

impl Pace {
    /// How long the next one waits.
    fn wait(&self, now: Instant) -> Duration {
        let oldest = self.0.front().filter(|_| self.0.len() >= WRITES_MAX);
        oldest.map_or(Duration::ZERO, |sent| (*sent + PACED_BY).saturating_duration_since(now))
    }

    fn count(&mut self, now: Instant) {
        if self.0.len() >= WRITES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }
}

/// Services whose writes failed, until when each is left alone, and how long that is. Each of them has a write waiting.
#[derive(Debug, Default)]
struct Held(HashMap<ServiceName, (Instant, Duration)>);

impl Held {
    /// The wait doubles with every failure in a row.
    fn hold(&mut self, service: &ServiceName, now: Instant) {
        let wait = self.0.get(service).map_or(WAIT_MIN, |(_, wait)| (*wait * 2).min(WAIT_MAX));
        self.0.insert(service.clone(), (now + wait, wait));
    }

    fn holds(&self, service: &ServiceName, now: Instant) -> bool {
        self.0.get(service).is_some_and(|(until, _)| *until > now)
    }

    /// Waits until one may be tried again; for ever when there is none.
    async fn first_over(&self) {
        match self.0.values().map(|(until, _)| *until).min() {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    }
}

/// Whether another Service's write would meet the same now. A refusal (403) or an error (500) may be of one Service: an
/// admission webhook decides by object.
fn concerns_all(outage: &Outage) -> bool {
    match outage {
        Outage::Unauthorized(_) | Outage::Busy { .. } | Outage::Unreachable(_) | Outage::Senseless(_) => true,
        Outage::Forbidden(_) | Outage::Expired(_) | Outage::Failing { .. } => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_writes_go_at_once_and_the_next_ones_as_the_second_passes() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        for number in 0..20 {
            assert_eq!(pace.wait(now), Duration::ZERO);
            pace.count(now + Duration::from_millis(number));
        }
        assert_eq!(pace.wait(now), PACED_BY);
        assert_eq!(pace.wait(now + PACED_BY), Duration::ZERO);
        pace.count(now + PACED_BY);
        assert_eq!(pace.wait(now + PACED_BY), Duration::from_millis(1));
    }
}
