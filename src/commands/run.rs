//! `sluiced run`: starts a gateway and stops it at the end.
//!
//! Invariant: privileges that the configuration does not need are given up before the first thread starts. All threads
//! except workers stay off the workers' cores, if there are other cores. tokio starts before DPDK, so that no thread
//! inherits EAL's CPU mask. A resource that is unavailable at the start is an error. Later failures end only a task, and
//! workers continue.

mod channels;
mod claim;
mod election;
mod embedded_controller;
mod flow_transfer;
mod network;
mod privileges;
mod probes;
mod stop;
mod watchdog;
mod wiring;
mod workers;

use std::sync::Arc;

use control::config::logging;
use control::controller::{ControllerError, Running};
use control::gateways::socket::{ListenError, listen};
use dataplane::forward::{Explainer, Mailbox};
use dataplane::{Compiler, Peers, Publisher, WorkerCounters};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::admin::metrics::WorkerLoads;
use crate::admin::{Captures, ControllerAccess, FleetSources, Sources, StateSources, Watches, WorkerSources};
use crate::agent::backend_history::{HISTORY, HistoryFile};
use crate::agent::compile_loop::SnapshotPipeline;
use crate::agent::persist::directories::{StateDirs, create_private};
use crate::agent::persist::{self, StateFile};
use crate::agent::supervisor::{Supervisor, Tasks};
use crate::netlink::VipRoutes;
use crate::ports::{Ports, PortsError, WorkerPorts};
use crate::settings::reload::Reload;
use crate::settings::{Settings, StateSource};
use crate::worker_threads::inquiries::Inquiries;
use crate::worker_threads::{self, Load};
use channels::Channels;
use claim::{Claim, ClaimError};
use flow_transfer::{FlowFile, FlowTransfer};
use stop::{Leaving, Stop};
use watchdog::Watchdog;
use wiring::Wiring;
use workers::{FlowOutlets, WorkerParts, WorkerStart, WorkersError};

/// This program's version.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Threads for tasks: one for quick tasks, another for long ones.
const AGENT_THREADS: usize = 2;

/// Why a gateway did not start, or did not end cleanly.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The asynchronous runtime could not be created.
    #[error("threads cannot be started: {0}")]
    Runtime(#[source] std::io::Error),
    /// A socket is in use or cannot be created.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Another gateway has an interface.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// A port, a twin or memory is unavailable.
    #[error(transparent)]
    Ports(#[from] PortsError),
    /// A worker could not be started.
    #[error(transparent)]
    Workers(#[from] WorkersError),
    /// The embedded controller could not be started.
    #[error(transparent)]
    Controller(#[from] ControllerError),
}

/// The privileges that a gateway keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privileges {
    /// Those that its configuration needs.
    Needed,
    /// All that it was started with.
    All,
}

/// Runs a gateway until SIGINT or SIGTERM, or SIGUSR2 before a restart. A second signal, if it is not SIGUSR2, ends the
/// process at once, by exit code 1.
///
/// # Errors
/// If a resource is unavailable at the start; see [`RunError`].
pub fn run(settings: &Settings, reload: Reload, privileges: Privileges) -> Result<(), RunError> {
    // First: others create directories of theirs within it, and it with them.
    if let Err(error) = create_private(&settings.state_dir) {
        tracing::warn!(dir = %settings.state_dir.display(), %error, "the state directory cannot be created");
    }
    if privileges == Privileges::Needed {
        for (mechanism, error) in privileges::drop_unneeded(settings) {
            tracing::warn!(mechanism, error, "some privileges stay, because the kernel refuses to take them");
        }
    }
    worker_threads::keep_off(&settings.cores);
    logging::write_from_thread().map_err(RunError::Runtime)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(AGENT_THREADS)
        .thread_name("agent")
        .enable_all()
        .build()
        .map_err(RunError::Runtime)?;
    runtime.block_on(run_gateway(settings, Arc::new(reload)))
}

async fn run_gateway(settings: &Settings, reload: Arc<Reload>) -> Result<(), RunError> {
    let stop = Stop::default();
    stop.on_signals(Arc::clone(&reload)).map_err(RunError::Runtime)?;
    reload_on_signal(Arc::clone(&reload)).map_err(RunError::Runtime)?;
    // A socket in use is an error now: another gateway runs here. The server listens again once everything is ready.
    drop(listen(&settings.admin_listen.unix).await?);
    // Held until the interfaces are given back. Without them, nothing here is of this process.
    let _interfaces = Claim::interfaces(&settings.ports)?;
    let table = Claim::route_table(settings.announce.table);
    if let Err(error) = &table {
        tracing::warn!(%error, "two gateways with `routed` pools need tables of their own: `announce.routeTable`");
    }
    let ended = start_and_serve(settings, &reload, &stop).await;
    if ended.is_err() && table.is_ok() {
        // Nobody forwards what routers send because of the routes that the process before may have left.
        stop::withdraw_routes(&VipRoutes::new(settings.announce), settings).await;
    }
    ended
}

async fn start_and_serve(settings: &Settings, reload: &Arc<Reload>, stop: &Stop) -> Result<(), RunError> {
    let dirs = StateDirs::new(&settings.state_dir);
    dirs.remove_temporary(&[persist::STATE, flow_transfer::FLOWS, probes::HEALTH, HISTORY]);
    let file = FlowFile::new(dirs.clone());
    let flows = file.read();
    // With the same seed, the same workers own the flows.
    let seed = flows.as_ref().map_or_else(flow_transfer::seed, |flows| flows.seed());
    let (ports, worker_ports) = match Ports::open(settings, seed, &stop.shutdown).await {
        Err(PortsError::Stopped) => return Ok(()),
        opened => opened?,
    };
    file.remove();
    let transfer = FlowTransfer::new(dirs, seed, worker_ports.len(), flows);
    let flows = transfer.waiting();
    let is_restart = flow_transfer::is_restart(flows.as_deref());
    let state_file = StateFile::new(transfer.dirs().clone());
    let first = flow_transfer::first_state(&state_file, settings.max_state_age, flows.as_deref());
    drop(flows);
    let gateway = RunningGateway {
        settings,
        ports: &ports,
        transfer: &transfer,
        reload,
        stop,
        channels: Channels::new(settings, first),
        outlets: FlowOutlets::new(settings, worker_ports.len()),
        routes: VipRoutes::new(settings.announce),
        is_restart,
        shutdown: CancellationToken::new(),
    };
    let served = gateway.serve(worker_ports).await;
    drop(gateway);
    if served.is_err() {
        transfer.put_back();
    }
    stop.shutdown.cancel();
    ports.close().await;
    served
}

/// SIGHUP reloads the configuration, as `systemctl reload` requires.
fn reload_on_signal(reload: Arc<Reload>) -> std::io::Result<()> {
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            let reload = Arc::clone(&reload);
            match tokio::task::spawn_blocking(move || reload.reload()).await {
                Ok(Ok(reloaded)) => tracing::info!(summary = %reloaded, "the configuration was reloaded"),
                Ok(Err(errors)) => tracing::error!(%errors, "the configuration is invalid; nothing was changed"),
                Err(error) => tracing::error!(%error, "the configuration could not be reloaded"),
            }
        }
    });
    Ok(())
}

/// A gateway whose ports are open.
struct RunningGateway<'a> {
    settings: &'a Settings,
    ports: &'a Ports,
    transfer: &'a FlowTransfer,
    reload: &'a Arc<Reload>,
    stop: &'a Stop,
    channels: Channels,
    outlets: FlowOutlets,
    routes: VipRoutes,
    /// Whether the process before has just ended.
    is_restart: bool,
    /// Ends the tasks, later than `stop`: after a signal, forwarding and its tasks continue for a while.
    shutdown: CancellationToken,
}

/// The parts of the engine before its workers run.
struct Engine {
    workers: Vec<WorkerParts>,
    counters: Vec<Arc<WorkerCounters>>,
    inquiries: Arc<Inquiries>,
    pipeline: SnapshotPipeline,
}

/// Workers that run.
struct WatchedWorkers {
    workers: Vec<worker_threads::Worker>,
    loads: Vec<Arc<Load>>,
    watchdog: Watchdog,
}

impl RunningGateway<'_> {
    /// Runs the gateway until `stop`.
    async fn serve(&self, worker_ports: Vec<WorkerPorts>) -> Result<(), RunError> {
        let inboxes = worker_ports.iter().filter_map(|worker| worker.peers.as_ref().map(Peers::inboxes)).collect();
        let Engine { workers, counters, inquiries, pipeline } = self.engine(worker_ports);
        let running = self.start_controller().await?;
        let WatchedWorkers { workers, loads, watchdog } = match self.start_watched(workers) {
            Ok(watched) => watched,
            Err(error) => {
                self.shutdown.cancel();
                embedded_controller::stopped(running).await;
                return Err(error);
            }
        };
        let restored = self.transfer.log_restored();
        let mut supervisor = Supervisor::new(self.shutdown.clone());
        let flows_max = self.settings.flows.max_per_worker;
        let view = WorkerSources { counters, loads: loads.clone(), flows_max: flows_max.into(), inquiries };
        let sources = self.sources(view, supervisor.tasks());
        let election_shutdown = self.shutdown.child_token();
        let wiring = Wiring {
            settings: self.settings,
            channels: &self.channels,
            ports: self.ports,
            dirs: self.transfer.dirs(),
            sources: &sources,
            outlets: &self.outlets,
            loads: Arc::new(WorkerLoads::new(loads, inboxes, flows_max)),
            routes: &self.routes,
            is_restart: self.is_restart,
            election_shutdown: &election_shutdown,
            shutdown: &self.shutdown,
        };
        wiring.start(&mut supervisor, running, pipeline);
        let (name, cores, admin) = (&self.settings.name, &self.settings.cores, &self.settings.admin_listen.unix);
        tracing::info!(name, ?cores, admin = %admin.display(), "the gateway runs");
        self.stop.shutdown.cancelled().await;
        self.leave(&sources.workers.counters).await;
        election::resign(&election_shutdown, self.channels.fleet.answers.subscribe()).await;
        self.channels.health.save(self.transfer.dirs()).await;
        drop(watchdog);
        self.transfer.save(workers, *self.channels.is_persisted.borrow());
        // Flows come first: they need the room on disk, and what is left of the time for a stop.
        HistoryFile::new(self.transfer.dirs().clone()).save(&self.channels.health.findings.histories);
        restored.iter().for_each(|restored| restored.abort());
        // The controller ends last, because the other tasks use its state until now. It releases its Lease.
        self.shutdown.cancel();
        supervisor.finished().await;
        // Now that the task that adds routes has ended.
        self.stop.end_routes(&self.routes, self.settings).await;
        Ok(())
    }

    fn engine(&self, worker_ports: Vec<WorkerPorts>) -> Engine {
        let counters: Vec<_> = worker_ports.iter().map(|_| Arc::new(WorkerCounters::default())).collect();
        let compiler = Compiler::new(self.settings.engine(&self.ports.macs())).counting(counters.clone());
        let (publisher, subscribers) = Publisher::new(compiler.initial(), worker_ports.len());
        let doorbell = |worker: &WorkerPorts| worker.bell.as_ref().map(|bell| Arc::clone(bell.doorbell()));
        let publisher = publisher.waking(worker_ports.iter().filter_map(doorbell).collect());
        let mailboxes: Vec<_> = worker_ports.iter().map(|worker| Arc::new(Mailbox::new(doorbell(worker)))).collect();
        let explainer = Explainer::new(self.ports.steering().clone(), self.transfer.seed());
        let inquiries = Arc::new(Inquiries::new(mailboxes.clone(), explainer, publisher.reader()));
        let parts = worker_ports.into_iter().zip(subscribers).zip(counters.iter().zip(mailboxes));
        let workers = parts.map(|((ports, subscriber), (counters, mailbox))| WorkerParts {
            ports,
            subscriber,
            counters: Arc::clone(counters),
            mailbox,
        });
        let workers = workers.collect();
        Engine { workers, counters, inquiries, pipeline: SnapshotPipeline { compiler, publisher } }
    }

    /// Starts the embedded controller, if there is one.
    async fn start_controller(&self) -> Result<Option<Running>, ControllerError> {
        let has_state = self.channels.controller.state.borrow().is_some();
        match &self.settings.source {
            StateSource::Embedded(controller, _) => {
                embedded_controller::start((**controller).clone(), &self.shutdown, has_state).await
            }
            StateSource::Remote(..) => Ok(None),
        }
    }

    fn start_watched(&self, parts: Vec<WorkerParts>) -> Result<WatchedWorkers, RunError> {
        let workers = self.start_workers(parts)?;
        let loads: Vec<_> = workers.iter().map(|worker| Arc::clone(worker.load())).collect();
        let watchdog = Watchdog::start(loads.clone()).map_err(RunError::Runtime)?;
        Ok(WatchedWorkers { workers, loads, watchdog })
    }

    fn start_workers(&self, parts: Vec<WorkerParts>) -> Result<Vec<worker_threads::Worker>, WorkersError> {
        let start = WorkerStart {
            settings: self.settings,
            eal: self.ports.eal(),
            ownership: &self.channels.fleet.ownership,
            neighbour_requests: &self.channels.network.neighbour_requests,
            outlets: &self.outlets,
            transfer: self.transfer,
        };
        start.start(parts)
    }

    /// What operators see.
    fn sources(&self, workers: WorkerSources, tasks: Tasks) -> Sources {
        let Channels { controller, snapshots, fleet, health, .. } = &self.channels;
        Sources {
            gateway: self.settings.name.clone(),
            version: VERSION.to_owned(),
            state: StateSources {
                current: controller.state.subscribe(),
                applied: snapshots.applied.subscribe(),
                connected: controller.connected.subscribe(),
                draining: controller.draining.subscribe(),
            },
            served: snapshots.served.subscribe(),
            causes: health.findings.causes.subscribe(),
            histories: health.findings.histories.clone(),
            troubles: self.channels.troubles.subscribe(),
            fleet: FleetSources {
                election: fleet.election.subscribe(),
                replication: fleet.replication.subscribe(),
                status: fleet.status.subscribe(),
            },
            controller: match &self.settings.source {
                StateSource::Remote(urls, _) => ControllerAccess::Remote(urls.iter().map(ToString::to_string).collect()),
                StateSource::Embedded(..) => ControllerAccess::Embedded(controller.view.subscribe()),
            },
            tasks,
            captures: Arc::new(Captures::new(Arc::clone(&workers.inquiries))),
            watches: Arc::new(Watches::new(&self.settings.name, Arc::clone(&workers.inquiries))),
            workers,
            ports: self.ports.read_ports(self.settings.name.clone()),
            reload: Arc::clone(self.reload),
        }
    }

    /// Leaves the network, unless the next process goes on at once.
    async fn leave(&self, workers: &[Arc<WorkerCounters>]) {
        if self.stop.is_restart.is_cancelled() {
            return;
        }
        let leaving = Leaving {
            announced: &self.channels.announced,
            terminating: &self.channels.terminating,
            routes: &self.routes,
            workers,
        };
        let answers = self.channels.fleet.answers.subscribe();
        let handed_over = election::hand_over(self.settings, answers, self.outlets.exchange.arrived());
        self.stop.leave(self.settings, leaving, handed_over).await;
    }
}
