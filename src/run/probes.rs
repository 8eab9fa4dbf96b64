//! The task that probes backends.
//!
//! Not here: what is probed and when (`agent::probe`).

use std::sync::Arc;

use dataplane::{RouteLookup, Tunables, WorkerCounters};
use proto::GatewayState;
use tokio::sync::watch;

use crate::agent::probe::{self, ConnectionWatch, Findings, ProbeInputs, Prober};
use crate::agent::served::Served;
use crate::agent::supervisor::{Failure, Supervisor};

/// What the task follows.
#[derive(Clone, Debug)]
pub(super) struct ProbeSources {
    /// The state as used in this gateway's zone.
    pub(super) known: watch::Receiver<Option<GatewayState>>,
    /// The routes of the newest snapshot.
    pub(super) routes: watch::Receiver<Option<RouteLookup>>,
    /// The configuration as far as it changes.
    pub(super) tunables: watch::Receiver<Tunables>,
    /// The backends as the newest snapshot has them.
    pub(super) served: watch::Receiver<Served>,
    /// The counters of the workers.
    pub(super) workers: Vec<Arc<WorkerCounters>>,
}

/// Keeps the task running.
pub(super) fn supervise(supervisor: &mut Supervisor, sources: ProbeSources, findings: Findings) {
    supervisor.run("probe", (sources, findings), |(sources, findings)| async move {
        let ProbeSources { known, routes, tunables, served, workers } = sources;
        let (prober, newest) = (Prober::default(), routes.clone());
        let probe = |target, source_port| {
            let (prober, routes) = (&prober, newest.borrow().clone());
            async move {
                let interfaces = routes.as_ref().map_or(&[][..], RouteLookup::interfaces);
                prober.probe_by(interfaces, target, source_port).await
            }
        };
        let inputs = ProbeInputs { known, routes, tunables, connections: ConnectionWatch::new(served, workers) };
        probe::run(probe, inputs, &findings, probe::concurrency(descriptors())).await;
        Ok::<_, Failure>(())
    });
}

/// Maximum number of file descriptors of this process.
fn descriptors() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}
