//! `sluiced run`: starts a gateway and stops it at the end.
//!
//! Invariant: privileges that the configuration does not need are given up before the first thread starts. All threads
//! except workers stay off the workers' cores, if there are other cores. tokio starts before DPDK, so that no thread
//! inherits EAL's CPU mask. A resource that is unavailable at the start is an error. Later failures end only a task, and
//! workers continue.

mod claim;
mod election;
mod embedded_controller;
mod fleet;
mod flow_file;
mod network;
mod passing;
mod privileges;
mod probes;
mod replication;
mod stop;
mod watchdog;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use control::config::logging;
use control::controller::ControllerError;
use control::gateways::socket::{ListenError, listen};
use control::healthz::systemd;
use core_affinity::CoreId;
use crossbeam_queue::ArrayQueue;
use dataplane::flow::FlowReplication;
use dataplane::forward::{Explainer, Mailbox};
use dataplane::{
    Compiler, Link, Metered, Network, NoMemory, Observe, Parts, Peers, Port, PortIndex, Publisher, RouteLookup, Subscriber,
    VipAnswers, VipOwnership, Worker, WorkerCounters,
};
use dpdk_port::DpdkPort;
use dpdk_sys::Eal;
use ipnet::IpNet;
use objects::scalar::url::ServerUrl;
use proto::v1::question::Query;
use proto::{Arbitration, FleetStatus, GatewayState, Generation, Membership};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::admin::metrics::{self, GatewayPages, StatusPage, WorkerLoads};
use crate::admin::{Captures, ControllerAccess, Sources, api};
use crate::agent::compile_loop::{self, AnsweredAddresses, Inputs, Outputs, SnapshotPipeline};
use crate::agent::persist::directories::{StateDirs, create_private};
use crate::agent::persist::{self, StateFile, ageing};
use crate::agent::served::Served;
use crate::agent::supervisor::{Failure, Supervisor, Tasks};
use crate::agent::zone;
use crate::controller_client::{self, ClientChannels, ClientSettings, Facts};
use crate::fleet::election::{Candidacy, ElectionStatus, VrrpClaims};
use crate::fleet::gateway_drain::{self, AnnounceInputs, AnnouncePolicy};
use crate::fleet::replication::{ReplicationInputs, ReplicationStatus};
use crate::fleet::service_limits::WorkerRoom;
use crate::flow_records;
use crate::netlink::{Announcement, FollowConfig, REQUESTS_MAX, VipRoutes, follow};
use crate::ports::{PortStates, Ports, PortsError, WorkerPorts};
use crate::settings::reload::Reload;
use crate::settings::{Replication, Settings, StateSource, Twin};
use crate::worker_threads::inquiries::Inquiries;
use crate::worker_threads::{self, Load, Rest, Sleep, Turn, WorkerError};
use claim::{Claim, ClaimError};
use flow_file::FlowFile;
use passing::FlowPassing;
use probes::{ProbeResults, ProbeSources};
use replication::FlowOutlets;
use stop::Stop;
use watchdog::Watchdog;

/// This program's version.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Threads of the agent: one for quick tasks, another for long ones.
const AGENT_THREADS: usize = 2;
/// How long routes of the last process stay after a restart while no VIP is announced.
const ROUTES_KEPT: Duration = Duration::from_secs(5);

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
    /// There is no memory for the flow tables.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// A worker could not be started.
    #[error(transparent)]
    Worker(#[from] WorkerError),
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
    runtime.block_on(gateway(settings, Arc::new(reload)))
}

async fn gateway(settings: &Settings, reload: Arc<Reload>) -> Result<(), RunError> {
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
    dirs.remove_temporary(&[persist::STATE, flow_file::FLOWS, probes::HEALTH]);
    let file = FlowFile::new(dirs.clone());
    let flows = file.read();
    // With the same seed, the same workers own the flows.
    let seed = flows.as_ref().map_or_else(passing::seed, |flows| flows.seed());
    let (ports, worker_ports) = match Ports::open(settings, seed, &stop.ends).await {
        Err(PortsError::Stopped) => return Ok(()),
        opened => opened?,
    };
    file.remove();
    let passing = FlowPassing::new(dirs, seed, worker_ports.len(), flows);
    let served = serve(settings, &ports, worker_ports, &passing, reload, stop).await;
    if served.is_err() {
        passing.put_back();
    }
    stop.ends.cancel();
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

/// The channels between the agent's tasks.
struct Channels {
    known: watch::Sender<Option<GatewayState>>,
    /// The state as used in this gateway's zone.
    near: watch::Sender<Option<GatewayState>>,
    connected: watch::Sender<bool>,
    /// Whether the state on disk is from a controller that sent it to this process.
    stored: watch::Sender<bool>,
    reached: watch::Sender<Option<Generation>>,
    linux: watch::Sender<Network>,
    ports: watch::Sender<PortStates>,
    network: watch::Sender<Network>,
    probed: ProbeResults,
    /// The routes of the newest snapshot.
    routes: watch::Sender<Option<RouteLookup>>,
    next_hops: watch::Sender<BTreeSet<(Link, IpAddr)>>,
    answered: watch::Sender<AnsweredAddresses>,
    routed: watch::Sender<BTreeMap<IpAddr, IpNet>>,
    announced: watch::Sender<Announcement>,
    draining: watch::Sender<bool>,
    /// Cancelled when the gateway is about to end, so that its routes are withdrawn.
    leaving: CancellationToken,
    served: watch::Sender<Served>,
    /// The VIPs that snapshots answer for.
    answers: watch::Sender<VipAnswers>,
    ownership: Arc<VipOwnership>,
    election: watch::Sender<ElectionStatus>,
    claimed: watch::Sender<VrrpClaims>,
    arbitration: watch::Sender<Arbitration>,
    /// With whom flows are replicated, as the controller says.
    membership: watch::Sender<Option<Membership>>,
    replication: watch::Sender<ReplicationStatus>,
    fleet: watch::Sender<FleetStatus>,
    neighbour_requests: Arc<ArrayQueue<(Link, IpAddr)>>,
}

impl Channels {
    /// Channels with what is known at the start.
    fn new(settings: &Settings, known: watch::Sender<Option<GatewayState>>) -> Self {
        Self {
            near: if settings.zone.is_some() { watch::Sender::new(None) } else { known.clone() },
            known,
            connected: watch::Sender::new(false),
            stored: watch::Sender::new(false),
            reached: watch::Sender::new(None),
            linux: watch::Sender::new(Network::default()),
            ports: watch::Sender::default(),
            network: watch::Sender::new(settings.fixed_network()),
            probed: ProbeResults::default(),
            routes: watch::Sender::default(),
            next_hops: watch::Sender::default(),
            answered: watch::Sender::default(),
            routed: watch::Sender::default(),
            announced: watch::Sender::default(),
            draining: watch::Sender::default(),
            leaving: CancellationToken::new(),
            served: watch::Sender::default(),
            answers: watch::Sender::new(election::first_answers(settings)),
            ownership: election::ownership(settings),
            election: election::first_status(settings),
            claimed: watch::Sender::default(),
            arbitration: watch::Sender::default(),
            membership: watch::Sender::default(),
            replication: replication::first_status(settings),
            fleet: watch::Sender::default(),
            neighbour_requests: Arc::new(ArrayQueue::new(REQUESTS_MAX)),
        }
    }
}

async fn serve(
    settings: &Settings,
    ports: &Ports,
    worker_ports: Vec<WorkerPorts>,
    passing: &FlowPassing,
    reload: &Arc<Reload>,
    stop: &Stop,
) -> Result<(), RunError> {
    let file = StateFile::new(passing.dirs().clone());
    let (seed, flows) = (passing.seed(), passing.waiting());
    let is_restart = passing::is_restart(flows.as_deref());
    let (known, draining) = passing::known_at_start(&file, settings.max_state_age, flows.as_deref());
    drop(flows);
    let channels = Channels { draining: watch::Sender::new(draining), ..Channels::new(settings, watch::Sender::new(known)) };
    let counters: Vec<_> = worker_ports.iter().map(|_| Arc::new(WorkerCounters::default())).collect();
    let compiler = Compiler::new(settings.engine(&ports.macs())).counting(counters.clone());
    let (publisher, subscribers) = Publisher::new(compiler.initial(), worker_ports.len());
    let doorbell = |worker: &WorkerPorts| worker.bell.as_ref().map(|bell| Arc::clone(bell.doorbell()));
    let publisher = publisher.waking(worker_ports.iter().filter_map(doorbell).collect());
    let mailboxes: Vec<_> = worker_ports.iter().map(|worker| Arc::new(Mailbox::new(doorbell(worker)))).collect();
    let explainer = Explainer::new(ports.steering().clone(), seed);
    let inquiries = Arc::new(Inquiries::new(mailboxes.clone(), explainer, publisher.reader()));
    let queues = worker_ports.iter().filter_map(|worker| worker.peers.as_ref().map(Peers::inboxes)).collect();
    // Ends the tasks, later than `stop`: after a signal, forwarding and its tasks continue for a while.
    let ended = CancellationToken::new();
    let has_state = channels.known.borrow().is_some();
    let running = match &settings.source {
        StateSource::Embedded(controller, _) => embedded_controller::start((**controller).clone(), &ended, has_state).await?,
        StateSource::Remote(..) => None,
    };
    let worker_parts = worker_ports.into_iter().zip(subscribers).zip(counters.iter().zip(mailboxes));
    let outlets = FlowOutlets::new(settings, counters.len());
    let workers = match start_workers(settings, ports, worker_parts, &channels, (seed, &outlets), passing) {
        Ok(workers) => workers,
        Err(error) => {
            ended.cancel();
            embedded_controller::stopped(running).await;
            return Err(error);
        }
    };
    let mut supervisor = Supervisor::new(ended.clone());
    let controller = match &settings.source {
        StateSource::Remote(urls, _) => ControllerAccess::Remote(urls.iter().map(ToString::to_string).collect()),
        StateSource::Embedded(..) => {
            ControllerAccess::Embedded(embedded_controller::supervise(&mut supervisor, reload, running, &ended))
        }
    };
    let restored = passing.log_restored();
    let loads: Vec<_> = workers.iter().map(|worker| Arc::clone(worker.load())).collect();
    let of_workers = (counters.clone(), loads.clone(), inquiries);
    let sources = sources(settings, &channels, ports, of_workers, reload, controller, supervisor.tasks());
    supervise_state(&mut supervisor, settings, &channels, &sources, passing.dirs(), SnapshotPipeline { compiler, publisher });
    replication::supervise(&mut supervisor, replication_inputs(settings, &channels, &sources, &outlets));
    let routes = VipRoutes::new(settings.announce);
    supervise_network(&mut supervisor, settings, &channels, ports);
    supervise_announcement(&mut supervisor, settings, &channels, &routes, is_restart);
    let standing = ended.child_token();
    election::supervise(&mut supervisor, candidacy(settings, &channels, loads.clone(), &standing));
    let watchdog = Watchdog::start(loads.clone()).map_err(RunError::Runtime)?;
    supervise_reports(&mut supervisor, settings, &channels, &sources);
    let loads = Arc::new(WorkerLoads::new(loads, queues, settings.flows.max_per_worker));
    let handed_over = election::hand_over(settings, channels.answers.subscribe(), outlets.exchange.arrived());
    supervise_operators(&mut supervisor, settings, sources, (loads, outlets), &channels.leaving, &ended);
    tracing::info!(name = settings.name, cores = ?settings.cores, admin = %settings.admin_listen.unix.display(), "the gateway runs");
    stop.ends.cancelled().await;
    if !stop.is_restart.is_cancelled() {
        stop.leave(settings, (&channels.announced, &channels.leaving), handed_over, &routes, &counters).await;
    }
    election::resign(&standing, channels.answers.subscribe()).await;
    channels.probed.save(passing.dirs()).await;
    drop(watchdog);
    passing.pass(workers, *channels.stored.borrow());
    restored.iter().for_each(|restored| restored.abort());
    // The controller ends last, because the other tasks use its state until now. It releases its Lease.
    ended.cancel();
    supervisor.finished().await;
    // Now that the task that adds routes has ended.
    stop.end_routes(&routes, settings).await;
    Ok(())
}

/// Starts a worker on each core.
fn start_workers<'a>(
    settings: &Settings,
    ports: &Ports,
    worker_ports: impl Iterator<Item = ((WorkerPorts, Subscriber), (&'a Arc<WorkerCounters>, Arc<Mailbox>))>,
    channels: &Channels,
    (seed, outlets): (u64, &FlowOutlets),
    passing: &FlowPassing,
) -> Result<Vec<worker_threads::Worker>, RunError> {
    let eal = ports.eal();
    let start = |(number, (((WorkerPorts { ports, peers, bell }, subscriber), (counters, mailbox)), &core))| {
        let parts = Parts {
            ports,
            subscriber,
            limits: settings.flows.clone(),
            counters: Arc::clone(counters),
            neighbour_requests: Arc::clone(&channels.neighbour_requests),
            peers,
            seed,
            observer: (),
        };
        let rest = bell.map(|bell| Rest { bell, max_flows: settings.flows.max_per_worker });
        let place = (number, CoreId { id: core });
        let shared = (mailbox, Arc::clone(&channels.ownership), outlets.exchange.queue(number).cloned());
        match outlets.export.queue(number) {
            None => start_worker(place, rest, eal, (Worker::new(parts)?, shared), passing),
            Some(records) => {
                let mut worker = Worker::new(parts.observed_by(Metered))?;
                worker.record(records)?;
                start_worker(place, rest, eal, (worker, shared), passing)
            }
        }
    };
    worker_ports.zip(&settings.cores).enumerate().map(start).collect()
}

/// What a worker shares with tasks: inquiries, leases of groups of VIPs, and queues of replicas.
type SharedParts = (Arc<Mailbox>, Arc<VipOwnership>, Option<Arc<FlowReplication>>);

fn start_worker<O>(
    (number, core): (usize, CoreId),
    rest: Option<Rest>,
    eal: Eal,
    (worker, (mailbox, ownership, replicas)): (Worker<DpdkPort, O>, SharedParts),
    passing: &FlowPassing,
) -> Result<worker_threads::Worker, RunError>
where
    O: Observe<<DpdkPort as Port>::Buffer> + Send + 'static,
{
    let counters = Arc::clone(worker.counters());
    let mut originated = 0;
    let mut worker = worker.answering(mailbox);
    worker.own_by(ownership, worker_threads::now_ns);
    if let Some(replicas) = replicas {
        worker.replicate(replicas);
    }
    if let Some(flows) = passing.waiting() {
        worker.restore(flows);
    }
    let saved = Arc::clone(&passing.saved);
    let body = move |turn: Turn<'_>| {
        match turn {
            Turn::Poll { now_ns } => return worker.poll(now_ns),
            Turn::Arm => for_each_port(&mut worker, |port| port.arm(true)),
            Turn::Sleep(sleep) => {
                let before = std::mem::replace(&mut originated, counters.originated.get());
                if originated != before || counters.held.get() > 0 {
                    sleep.at_most(Sleep::PENDING);
                }
                for_each_port(&mut worker, |port| sleep.wake_for(port));
                worker.subscriber_mut().sleep();
            }
            // The next poll first checks for a new snapshot.
            Turn::Wake => for_each_port(&mut worker, |port| port.arm(false)),
            Turn::End => {
                let now_ns = worker_threads::now_ns();
                let part = worker.save(now_ns);
                worker.record_stop(now_ns);
                saved.lock().unwrap_or_else(PoisonError::into_inner).push(part);
            }
        }
        0
    };
    Ok(worker_threads::spawn(number, core, rest, Some(eal), body)?)
}

fn for_each_port<O>(worker: &mut Worker<DpdkPort, O>, mut call: impl FnMut(&mut DpdkPort))
where
    O: Observe<<DpdkPort as Port>::Buffer>,
{
    for index in (0..=u8::MAX).map(PortIndex) {
        let Some(port) = worker.port_mut(index) else { return };
        call(port);
    }
}

/// The tasks between controller and snapshots: config client, state on disk, probes, compiler.
fn supervise_state(
    supervisor: &mut Supervisor,
    settings: &Settings,
    channels: &Channels,
    sources: &Sources,
    dirs: &StateDirs,
    pipeline: SnapshotPipeline,
) {
    let (urls, certificates, group) = match &settings.source {
        StateSource::Embedded(controller, certificates) => {
            let own = controller.listen.unix.iter().cloned().map(ServerUrl::Unix).collect();
            (own, certificates, Some(controller.group.clone()))
        }
        StateSource::Remote(urls, certificates) => (urls.clone(), certificates, None),
    };
    let client = ClientSettings {
        urls,
        certificates: certificates.clone(),
        group,
        gateway: settings.name.clone(),
        version: VERSION.to_owned(),
        profile: sources.reload.profile(),
        replication: settings.replication.as_ref().map(|replication| replication.listen),
        needs_membership: settings.replication.as_ref().is_some_and(Replication::needs_membership),
    };
    let answers = sources.clone();
    let to_client = ClientChannels {
        known: channels.known.clone(),
        connected: channels.connected.clone(),
        draining: channels.draining.clone(),
        membership: channels.membership.clone(),
        contender: election::contender(settings, &channels.claimed, &channels.arbitration, Arc::clone(&sources.ports)),
        answering: Arc::new(move |query: &Query| answers.answer(query)),
        facts: Facts {
            served: channels.served.subscribe(),
            reached: channels.reached.subscribe(),
            fleet: channels.fleet.subscribe(),
            workers: sources.workers.clone(),
        },
    };
    supervisor.run("config", (client, to_client), |(settings, channels)| controller_client::run(settings, channels));

    let inputs = (StateFile::new(dirs.clone()), channels.known.clone(), channels.connected.subscribe(), settings.max_state_age);
    supervisor.run("state age", inputs, |(file, known, connected, max_age)| ageing::run(file, known, connected, max_age));

    let (file, current) = (StateFile::new(dirs.clone()), (channels.known.subscribe(), channels.draining.subscribe()));
    let inputs = (file, current, (channels.connected.subscribe(), channels.reached.subscribe()), channels.stored.clone());
    supervisor.run("persist", inputs, |(file, current, progress, stored)| persist::run(file, current, progress, stored));

    if let Some(zone) = settings.zone.clone() {
        let inputs = (zone, channels.known.subscribe(), channels.near.clone());
        supervisor.run("zone", inputs, |(zone, known, near)| zone::run(zone, known, near));
    }

    let inputs = ProbeSources {
        known: channels.near.subscribe(),
        routes: channels.routes.subscribe(),
        tunables: sources.reload.tunables(),
        served: channels.served.subscribe(),
        workers: sources.workers.clone(),
    };
    probes::supervise(supervisor, inputs, channels.probed.clone(), dirs);

    let pipeline = Arc::new(tokio::sync::Mutex::new(pipeline));
    let inputs = Inputs {
        known: channels.near.subscribe(),
        network: channels.network.subscribe(),
        health: channels.probed.findings.health.subscribe(),
        tags: channels.probed.findings.tags.subscribe(),
        tunables: sources.reload.tunables(),
        answers: channels.answers.subscribe(),
        clock: worker_threads::now_ns,
    };
    let outputs = Outputs {
        next_hops: channels.next_hops.clone(),
        answered: channels.answered.clone(),
        routed: channels.routed.clone(),
        served: channels.served.clone(),
        routes: channels.routes.clone(),
        reached: channels.reached.clone(),
    };
    let inputs = (pipeline, inputs, outputs);
    supervisor.run("compile", inputs, |(pipeline, inputs, outputs)| compile_loop::run(pipeline, inputs, outputs));
}

/// The inputs of the replication of flows; `None`: they are not replicated.
fn replication_inputs(
    settings: &Settings,
    channels: &Channels,
    sources: &Sources,
    outlets: &FlowOutlets,
) -> Option<ReplicationInputs> {
    Some(ReplicationInputs {
        gateway: settings.name.clone(),
        settings: settings.replication.clone()?,
        election: (settings.election.groups, settings.election.first_vrid),
        exchange: Arc::clone(&outlets.exchange),
        inquiries: Arc::clone(&sources.inquiries),
        answers: channels.answers.subscribe(),
        tunables: sources.reload.tunables(),
        membership: channels.membership.subscribe(),
        state: (channels.known.subscribe(), channels.reached.subscribe()),
        status: channels.replication.clone(),
    })
}

/// What is reported of other gateways and routers; and what systemd is told, if it listens.
fn supervise_reports(supervisor: &mut Supervisor, settings: &Settings, channels: &Channels, sources: &Sources) {
    let others = (channels.election.subscribe(), channels.replication.subscribe());
    let room = WorkerRoom { workers: sources.workers.clone(), flows_max: sources.flows_max };
    let counted = (channels.served.subscribe(), room);
    fleet::supervise(supervisor, settings, channels.known.subscribe(), others, counted, channels.fleet.clone());
    if systemd::listens() {
        let inputs = (channels.served.subscribe(), channels.reached.subscribe(), channels.connected.subscribe());
        supervisor.run("systemd", inputs, |(served, reached, connected)| watchdog::report(served, reached, connected));
    }
}

/// This gateway's part in the election of the owners of VIPs.
fn candidacy(settings: &Settings, channels: &Channels, loads: Vec<Arc<Load>>, ended: &CancellationToken) -> Candidacy {
    Candidacy {
        settings: Arc::new(settings.clone()),
        ownership: Arc::clone(&channels.ownership),
        loads,
        served: channels.served.subscribe(),
        network: channels.network.subscribe(),
        next_hops: channels.next_hops.subscribe(),
        replication: channels.replication.subscribe(),
        draining: channels.draining.subscribe(),
        arbitration: channels.arbitration.subscribe(),
        claimed: channels.claimed.clone(),
        leaving: channels.leaving.clone(),
        ended: ended.clone(),
        answers: channels.answers.clone(),
        status: channels.election.clone(),
        clock: worker_threads::now_ns,
        first_fit_ns: None,
    }
}

/// The tasks for operators: flow records, metrics with probes, and the admin API. An address of metrics that is in use is tried
/// again, because forwarding does not need it.
fn supervise_operators(
    supervisor: &mut Supervisor,
    settings: &Settings,
    sources: Sources,
    (workers, FlowOutlets { export, exchange }): (Arc<WorkerLoads>, FlowOutlets),
    leaving: &CancellationToken,
    ended: &CancellationToken,
) {
    if let Some(target) = settings.flow_records.clone() {
        let inputs = (settings.name.clone(), target, Arc::clone(&export), Arc::clone(&sources.inquiries), ended.clone());
        supervisor.run_to_its_end("flow-records", inputs, |(gateway, target, export, inquiries, ended)| {
            flow_records::run(gateway, target, export, inquiries, ended)
        });
    }
    if let Some(address) = settings.metrics_listen {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let status_page = Arc::new(StatusPage::new(vec![settings.name.clone(), host]));
        let pages = GatewayPages { sources: sources.clone(), workers, export, exchange, status_page, leaving: leaving.clone() };
        let inputs = (address, pages, ended.clone());
        supervisor.run("metrics", inputs, |(address, pages, ended)| metrics::serve(address, pages, ended));
    }
    let inputs = (settings.admin_listen.clone(), sources, ended.clone());
    supervisor.run("admin", inputs, |(at, sources, ended)| api::serve(at, sources, ended.cancelled_owned()));
}

/// The tasks that follow routes and neighbours of Linux, and the hotplug task. Without any twin the network comes from
/// the configuration.
fn supervise_network(supervisor: &mut Supervisor, settings: &Settings, channels: &Channels, ports: &Ports) {
    if settings.ports.iter().any(|port| port.twin == Twin::Tap) {
        let follows = FollowConfig {
            ports: settings.ports.iter().map(|port| port.name.clone()).collect(),
            next_hops: channels.next_hops.subscribe(),
            answered: channels.answered.subscribe(),
            requests: Arc::clone(&channels.neighbour_requests),
            network: channels.linux.clone(),
        };
        supervisor.run("netlink", follows, follow);
    }
    let inputs = (ports.hotplug(), channels.ports.clone());
    supervisor.run("ports", inputs, |(hotplug, states)| async move { Ok::<_, Failure>(hotplug.run(states).await) });
    let (linux, states) = (channels.linux.subscribe(), channels.ports.subscribe());
    let inputs = (linux, states, channels.network.clone(), (settings.fixed_network(), settings.ports.clone()));
    supervisor.run("network", inputs, |(linux, states, network, fixed)| network::merge(linux, states, network, fixed));
}

/// The tasks that decide which VIPs of `routed` pools are announced, and write their routes.
fn supervise_announcement(
    supervisor: &mut Supervisor,
    settings: &Settings,
    channels: &Channels,
    routes: &VipRoutes,
    is_restart: bool,
) {
    let policy = AnnouncePolicy { without_backends: settings.without_backends, drain_on_stop: settings.drain_on_stop };
    let inputs = AnnounceInputs {
        routed: channels.routed.subscribe(),
        served: channels.served.subscribe(),
        draining: channels.draining.subscribe(),
        leaving: channels.leaving.clone(),
    };
    let inputs = (policy, inputs, channels.announced.clone());
    supervisor.run("drain", inputs, |(policy, inputs, announced)| gateway_drain::run(policy, inputs, announced));
    let inputs = (routes.clone(), channels.announced.subscribe());
    supervisor.run("announce", inputs, move |(routes, mut announced)| async move {
        if is_restart {
            // Routers go on sending while the routes that the last process left stand; no VIP within the time is right, too.
            let _ = timeout(ROUTES_KEPT, announced.wait_for(|announcement| !announcement.prefixes.is_empty())).await;
        }
        routes.announce(announced).await
    });
}

/// The inputs of the admin API, and the controller for requests of operators.
fn sources(
    settings: &Settings,
    channels: &Channels,
    ports: &Ports,
    (workers, loads, inquiries): (Vec<Arc<WorkerCounters>>, Vec<Arc<Load>>, Arc<Inquiries>),
    reload: &Arc<Reload>,
    controller: ControllerAccess,
    tasks: Tasks,
) -> Sources {
    Sources {
        gateway: settings.name.clone(),
        version: VERSION.to_owned(),
        known: channels.known.subscribe(),
        served: channels.served.subscribe(),
        causes: channels.probed.findings.causes.subscribe(),
        reached: channels.reached.subscribe(),
        connected: channels.connected.subscribe(),
        draining: channels.draining.subscribe(),
        election: channels.election.subscribe(),
        replication: channels.replication.subscribe(),
        fleet: channels.fleet.subscribe(),
        controller,
        tasks,
        workers,
        loads,
        flows_max: settings.flows.max_per_worker.into(),
        captures: Arc::new(Captures::new(Arc::clone(&inquiries))),
        inquiries,
        ports: ports.read_ports(settings.name.clone()),
        reload: Arc::clone(reload),
    }
}
