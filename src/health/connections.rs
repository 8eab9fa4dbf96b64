//! Backends whose connections fail in a row, by the counters of the workers: their next probe is brought forward.
//!
//! The counters are those of operators, read from time to time; packets cost nothing more. Deliberately not here: a
//! verdict. Clients reset connections too, so that only a probe can tell.

use std::sync::Arc;
use std::time::Duration;

use dataplane::WorkerCounters;
use tokio::sync::watch;

use crate::agent::backend_health::Subject;
use crate::agent::served::Served;

/// How often the counters are read: 100,000 backends take about 10 ms of a core each time.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Number of failed and reset connections since the last look that suggest that a backend fails.
const RUN: u64 = 3;

/// The counts of one backend at the last look.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    generation: u32,
    failed: u64,
    new: u64,
}

/// Compares the workers' counters with those of the last look.
#[derive(Debug)]
pub struct ConnectionWatch {
    served: watch::Receiver<Served>,
    workers: Vec<Arc<WorkerCounters>>,
    /// By slot.
    seen: Vec<Seen>,
}

impl ConnectionWatch {
    /// Watches the backends that are served, by the counters of these workers.
    #[must_use]
    pub const fn new(served: watch::Receiver<Served>, workers: Vec<Arc<WorkerCounters>>) -> Self {
        Self { served, workers, seen: Vec::new() }
    }

    /// The healthy backends of which several connections failed or were reset since the last call, at least half as many
    /// as began.
    pub(super) fn suspects(&mut self) -> Vec<Subject> {
        let services = self.served.borrow().services.clone();
        let mut suspects = Vec::new();
        for service in services.values() {
            for port in &service.ports {
                for backend in port.backends.iter().filter(|backend| backend.healthy) {
                    if self.is_suspect(backend.id.slot, backend.id.generation) {
                        let service = Arc::clone(&service.name);
                        suspects.push(Subject { service, protocol: port.protocol, address: backend.address });
                    }
                }
            }
        }
        suspects
    }

    fn is_suspect(&mut self, slot: u32, generation: u32) -> bool {
        let mut now = Seen { generation, ..Seen::default() };
        for worker in &self.workers {
            now.failed += worker.sum_of(slot, |counters| counters.failed.get() + counters.reset.get());
            now.new += worker.sum_of(slot, |counters| counters.new_flows.get());
        }
        let Ok(index) = usize::try_from(slot) else { return false };
        if self.seen.len() <= index {
            self.seen.resize(index + 1, Seen::default());
        }
        let before = std::mem::replace(&mut self.seen[index], now);
        // A new backend in the slot of another one continues its counters.
        if before.generation != generation {
            return false;
        }
        let (failed, new) = (now.failed.saturating_sub(before.failed), now.new.saturating_sub(before.new));
        failed >= RUN && failed * 2 >= new
    }
}

#[cfg(test)]
mod tests {
    use dataplane::snapshot::Views;
    use dataplane::{CounterSlot, FrontendNumber};
    use proto::Protocol;

    use super::super::target::tests::subject;
    use super::*;
    use crate::agent::served::tests::view;

    /// One healthy backend, and one that fails.
    fn served() -> Served {
        let mut web = view("web", &[("10.0.0.1:80", true, false), ("10.0.0.2:80", false, false)]);
        web.ports[0].frontends = vec!["192.0.2.100:80".parse().unwrap()];
        web.ports[0].backends[1].id.slot = 2;
        Served { ready: true, services: Views::unit(Arc::clone(&web.name), Arc::new(web)), ..Served::default() }
    }

    #[test]
    fn a_run_of_failed_connections_makes_a_backend_suspect_once() {
        let workers = [(); 2].map(|()| Arc::new(WorkerCounters::default()));
        let mut watch = ConnectionWatch::new(watch::channel(served()).1, workers.to_vec());
        let [first, second] = workers.each_ref().map(|worker| worker.at(CounterSlot::new(0, FrontendNumber::NONE)));
        first.reset.add(100);
        watch.suspects();
        let found = |watch: &mut ConnectionWatch| watch.suspects().len();
        first.reset.add(2);
        assert_eq!(found(&mut watch), 0, "two are no run");
        first.reset.add(2);
        second.failed.add(1);
        assert_eq!(watch.suspects(), [subject("web", Protocol::Tcp, "10.0.0.1:80")]);
        assert_eq!(found(&mut watch), 0, "it was reported");
        first.reset.add(5);
        second.new_flows.add(11);
        assert_eq!(found(&mut watch), 0, "most connections work");
        workers[0].at(CounterSlot::new(2, FrontendNumber::NONE)).failed.add(9);
        assert_eq!(found(&mut watch), 0, "the backend fails already");
    }
}
