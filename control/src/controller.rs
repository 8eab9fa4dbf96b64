//! The controller. Changes from one source become plans; a plan becomes the state of the gateways and the statuses to
//! write. `sluiced` embeds the controller; `sluice-controller` consists of it.
//!
//! Invariant: nothing is planned before the source has listed all Services and slices once, and no later error
//! withdraws an address or a Service.
//!
//! Invariant: of several replicas on one cluster only the leader plans and writes, and its work ends before another one may
//! begin (`kubernetes::lease`). All of them watch, so that a new leader lists nothing; it plans once it has seen what its
//! predecessor wrote, and adopts that. Deliberately not here: election (`kubernetes::lease`), and the decisions of each step (`plan`,
//! `status`, `gateways`).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::ServiceStatus;
use proto::{GroupKey, KEY_BYTES, ServiceName};
use ring::rand::{SecureRandom as _, SystemRandom};
use tokio::sync::{Mutex, Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::admin::{View, troubles_at_start, watch_troubles};
use crate::config::settings::{Certificates, ControllerSettings, Source};
use crate::gateways::arbiter::Arbiter;
use crate::gateways::fleet_queries::Fleet;
use crate::gateways::listener::{CertificateSource, Listeners, ServerTls};
use crate::gateways::programming::Programming;
use crate::gateways::registry::Gateways;
use crate::gateways::server::{self, ConfigService};
use crate::gateways::socket::{self, SocketGuard};
use crate::gateways::tls::TlsError;
use crate::gateways::tls::secret::FollowedSecret;
use crate::healthz::{Heartbeat, Probes, STALLED_AFTER};
use crate::kubernetes::activity::ApiActivity;
use crate::kubernetes::lease::election;
use crate::kubernetes::lease::{Leadership, LeaseCandidate};
use crate::kubernetes::recorder::Recorder;
use crate::kubernetes::{self, Cluster, EventWriter, Following, StatusWriter};
use crate::manifests::{self, StatusFiles};
use crate::plan::WantedStatuses;
use crate::status::backend_notes;
use crate::status::fleet_notes::{self, GatewayUids};
use crate::status::pools::{self, PoolsReport};
use crate::status::{StatusSink, edge_gateways, write_statuses};
use crate::store::override_editor::OverrideEditor;
use crate::store::{Storage, checkpoints, overrides};
use crate::world::change::Change;
use crate::world::checkpoint::Checkpoint;
use debounce::CHANGES_WAITING_MAX;
use planner::{Planner, Shared};
use watched_world::WatchedWorld;

mod debounce;
mod planner;
pub mod preflight;
mod watched_world;

/// Why a controller did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// Listening on the socket failed.
    #[error(transparent)]
    Listen(#[from] socket::ListenError),
    /// The certificates for TCP cannot be used.
    #[error("tls: {0}")]
    Certificates(#[from] TlsError),
    /// The status files cannot be read.
    #[error(transparent)]
    StatusFiles(#[from] manifests::StatusFileError),
    /// The manifests cannot be watched.
    #[error(transparent)]
    Manifests(#[from] manifests::FollowError),
    /// The client for the API server cannot be created.
    #[error(transparent)]
    Kubernetes(#[from] kubernetes::ConnectError),
    /// The configuration API ended.
    #[error(transparent)]
    Serve(#[from] server::ServeError),
    /// The system has no random numbers.
    #[error("the system gives no random numbers, which a key for the replication of flows needs")]
    Random,
    /// A task panicked.
    #[error("a task of the controller failed: {0}; gateways keep their state, restart the controller")]
    Task(#[from] tokio::task::JoinError),
}

impl ControllerError {
    /// Whether what the configuration names is unusable (exit code 2): the kubeconfig, or the certificates of `tls`.
    #[must_use]
    pub const fn is_configuration(&self) -> bool {
        matches!(self, Self::Kubernetes(_) | Self::Certificates(_))
    }
}

/// A running controller.
#[derive(Debug)]
pub struct Running {
    /// Its state for the admin API, and the requests of operators.
    pub view: View,
    /// State for the probes of a Deployment.
    pub probes: Probes,
    /// Has the manifests read again.
    pub reread: Arc<Notify>,
    _socket: Option<SocketGuard>,
    tasks: Tasks,
    shutdown: CancellationToken,
}

type Tasks = JoinSet<Result<(), ControllerError>>;

/// Listens and starts to watch the source. Ends when `shutdown` is cancelled.
///
/// # Errors
/// If the socket, the status directory or the client cannot be created.
pub async fn start(settings: ControllerSettings, shutdown: CancellationToken) -> Result<Running, ControllerError> {
    start_after(settings, shutdown, None).await
}

/// As [`start`], in place of a controller that ran with other settings: `before` is its recorder, whose notes are kept.
///
/// # Errors
/// See [`start`].
pub async fn start_after(
    settings: ControllerSettings,
    shutdown: CancellationToken,
    before: Option<&Recorder>,
) -> Result<Running, ControllerError> {
    // Done before listening, so that an error leaves nothing behind.
    let origin = Origin::open(&settings.source).await?;
    let (listeners, socket, secret) = listen(&settings, &origin).await?;
    let (states, states_seen) = watch::channel(None);
    let (gateways, gateways_seen) = watch::channel(Gateways::default());
    let (leadership, led) = watch::channel(Leadership::Following(None));
    let (known, known_seen) = watch::channel(Arc::default());
    let (nodes, nodes_seen) = watch::channel(Arc::default());
    let (drains, drains_seen) = watch::channel(Arc::default());
    let (pools, pools_seen) = watch::channel(PoolsReport::default());
    let (wanted, wanted_seen) = watch::channel(WantedStatuses::default());
    let (checkpoints, _) = watch::channel(Checkpoint::default());
    let editor = OverrideEditor::new(origin.storage(&settings.group, overrides::FILE));
    let checkpoint_storage = origin.storage(&settings.group, checkpoints::FILE);
    let (troubles, troubles_seen) = watch::channel(troubles_at_start());
    let (fleet, programming) = (Fleet::default(), Programming::default());
    let (status_writer, status_writer_seen) = watch::channel(None);
    let recorder = Arc::new(Recorder::after(before, event_writer(&origin, before)));
    let view = View {
        states: states_seen,
        gateways: gateways_seen,
        known_gateways: known_seen,
        nodes: nodes_seen,
        drains: drains_seen,
        pools: pools_seen,
        wanted: wanted_seen,
        editor: editor.clone(),
        fleet: fleet.clone(),
        recorder: Arc::clone(&recorder),
        leadership: led.clone(),
        programming: programming.clone(),
        activity: origin.activity(),
        status_writer: status_writer_seen,
        troubles: troubles_seen,
        found_by_requests: Arc::default(),
        certificates: listeners.certificates(),
    };
    let probes = Probes {
        planner: Heartbeat::default(),
        stalled_after: STALLED_AFTER,
        leadership: led.clone(),
        states: view.states.clone(),
        editor: editor.clone(),
        tls: listeners.tcp.as_ref().map(|(_, tls)| Arc::clone(tls)),
    };
    let service = ConfigService {
        states: view.states.clone(),
        gateways: gateways.clone(),
        fleet,
        arbiter: Arbiter::default(),
        leadership: led.clone(),
        group: settings.group.clone(),
        key: group_key()?,
        shutdown: shutdown.clone(),
    };

    let mut tasks = Tasks::new();
    tasks.spawn(async move { Ok(server::serve(listeners, service).await?) });
    let heartbeat = probes.planner.clone();
    let (watching, stop) = (watch_troubles(view.clone(), troubles), shutdown.clone());
    tasks.spawn(async move { stop.run_until_cancelled(watching).await }.map(|_| Ok(())));
    let shared =
        Shared { settings, states, gateways, known, nodes, drains, recorder, pools, checkpoints, heartbeat, programming, wanted };
    let reread = Arc::new(Notify::new());
    let gateway_uids = watch::Sender::default();
    let work = Work { shared, editor, checkpoint_storage, status_writer, gateway_uids, reread: Arc::clone(&reread) };
    begin(origin, work, secret, (leadership, led), &mut tasks, &shutdown);
    Ok(Running { view, probes, reread, _socket: socket, tasks, shutdown })
}

/// What writes Events, if there is a cluster. Only the leader writes.
fn event_writer(origin: &Origin, before: Option<&Recorder>) -> Option<Arc<EventWriter>> {
    match origin {
        Origin::Manifests { .. } => None,
        Origin::Kubernetes(_) => {
            let earlier = before.and_then(Recorder::events).cloned();
            Some(earlier.unwrap_or_else(|| Arc::new(EventWriter::new(&kubernetes::instance()))))
        }
    }
}

/// A new key for the gateways. It is only in memory: each process has its own, and gateways keep the last one that they
/// got until they get another.
fn group_key() -> Result<GroupKey, ControllerError> {
    let mut bytes = [0; KEY_BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|_| ControllerError::Random)?;
    Ok(GroupKey::new(bytes))
}

/// Starts the tasks that watch the source and lead. Without a cluster this process always leads.
fn begin(
    origin: Origin,
    work: Work,
    secret: Option<FollowedSecret>,
    leadership: (watch::Sender<Leadership>, watch::Receiver<Leadership>),
    tasks: &mut Tasks,
    shutdown: &CancellationToken,
) {
    match origin {
        Origin::Manifests { dir, files, adopted } => {
            let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis().to_string();
            leadership.0.send_replace(Leadership::Leading { epoch: epoch.clone() });
            let stop = shutdown.clone();
            tasks.spawn(async move {
                let mut steps = JoinSet::new();
                let (may_forget, reread) = (files.may_forget(), Arc::clone(&work.reread));
                let (changes, received) = mpsc::channel(CHANGES_WAITING_MAX);
                let world = Arc::new(Mutex::new(WatchedWorld::new(received)));
                work.start(&mut steps, epoch, StatusSink::Files(files), (&world, &changes)).await;
                steps.spawn(async move { Ok(manifests::follow(dir, adopted, may_forget, reread, changes).await?) });
                first_to_end(&mut steps, &stop).await
            });
        }
        Origin::Kubernetes(cluster) => {
            let candidate = LeaseCandidate::new(&work.shared.settings.group, work.shared.settings.listen.advertised());
            let candidate = match &work.shared.settings.lock_dir {
                Some(dir) => candidate.locked_in(dir),
                None => candidate,
            };
            let released = CancellationToken::new();
            let (cluster, release) = (Arc::new(cluster), released.clone());
            if let Some(secret) = secret {
                let (cluster, stop) = (Arc::clone(&cluster), shutdown.clone());
                tasks.spawn(async move { stop.run_until_cancelled(secret.follow(&cluster)).await }.map(|_| Ok(())));
            }
            let (electing, (leadership, led)) = (Arc::clone(&cluster), leadership);
            tasks.spawn(async move { election::elect(&electing, candidate, &leadership, released).await }.map(Ok));
            let stop = shutdown.clone();
            tasks.spawn(async move {
                let ended = lead(&work, &cluster, led, &stop).await;
                // All work as leader has ended, so another replica may lead.
                release.cancel();
                ended
            });
        }
    }
}

/// Opens the listeners. Certificates in files must be usable now. A Secret is watched from now on, because the API
/// server may be unavailable.
async fn listen(
    settings: &ControllerSettings,
    origin: &Origin,
) -> Result<(Listeners, Option<SocketGuard>, Option<FollowedSecret>), ControllerError> {
    let (mut listeners, mut socket, mut secret) = (Listeners::default(), None, None);
    if let Some(tcp) = &settings.listen.tcp {
        let tls = match (&tcp.certificates, origin) {
            (Certificates::Files(files), _) => {
                let tls = ServerTls::new(CertificateSource::Files(files.clone()), &settings.group);
                tls.read().await?;
                tls
            }
            (Certificates::Secret(name), Origin::Kubernetes(_)) => {
                let (sender, read) = watch::channel(None);
                secret = Some(FollowedSecret { name: name.clone(), sender });
                ServerTls::new(CertificateSource::Secret(name.clone(), read), &settings.group)
            }
            (Certificates::Secret(name), Origin::Manifests { .. }) => return Err(TlsError::NoCluster(name.clone()).into()),
        };
        listeners.tcp = Some((socket::listen_tcp(tcp.address).await?, Arc::new(tls)));
    }
    if let Some(path) = &settings.listen.unix {
        listeners.unix = Some(socket::listen(path).await?);
        socket = Some(SocketGuard(path.clone()));
    }
    Ok((listeners, socket, secret))
}

/// The work of a leader, which ends with its tasks.
struct Work {
    shared: Shared,
    editor: OverrideEditor,
    checkpoint_storage: Storage,
    /// The queue of status writes of the present term.
    status_writer: watch::Sender<Option<Arc<StatusWriter>>>,
    /// The uids of `EdgeGateway` objects, for their Events.
    gateway_uids: watch::Sender<GatewayUids>,
    /// Has the manifests read again.
    reread: Arc<Notify>,
}

impl Work {
    /// Starts to plan for incoming changes and to write statuses to `sink`.
    async fn start(
        &self,
        steps: &mut Tasks,
        epoch: String,
        sink: StatusSink,
        (world, sender): (&Arc<Mutex<WatchedWorld>>, &mpsc::Sender<Change>),
    ) {
        // Before any task of this term sends a change.
        world.lock().await.begin_term();
        let (statuses, statuses_seen) = watch::channel(None);
        let shared = self.shared.clone();
        let (editor, to_plan) = (self.editor.clone(), sender.clone());
        steps.spawn(async move { editor.serve(to_plan).await }.map(Ok));
        // Decisions of an earlier term are stale.
        shared.checkpoints.send_replace(Checkpoint::default());
        shared.programming.begin_term();
        let (programming, gateways) = (shared.programming.clone(), shared.gateways.subscribe());
        steps.spawn(async move {
            programming.follow(gateways).await;
            Ok(())
        });
        let (store, newest, to_plan) = (self.checkpoint_storage.clone(), shared.checkpoints.subscribe(), sender.clone());
        let seed = shared.settings.maglev_seed;
        steps.spawn(async move {
            checkpoints::keep(store, seed, newest, to_plan).await;
            // This task ends with the planner.
            std::future::pending().await
        });
        let (gateways, recorder) = (shared.gateways.subscribe(), Arc::clone(&shared.recorder));
        steps.spawn(fleet_notes::record(gateways, statuses_seen.clone(), self.gateway_uids.subscribe(), recorder).map(Ok));
        let (gateways, recorder) = (shared.gateways.subscribe(), Arc::clone(&shared.recorder));
        steps.spawn(backend_notes::record(gateways, statuses_seen.clone(), self.gateway_uids.subscribe(), recorder).map(Ok));
        let (gateways, recorder) = (shared.gateways.subscribe(), Arc::clone(&shared.recorder));
        steps.spawn(write_statuses(statuses_seen, gateways, sink, recorder).map(Ok));
        let world = Arc::clone(world);
        steps.spawn(async move {
            Planner { shared, epoch, statuses }.run(&mut *world.lock().await).await;
            Ok(())
        });
    }
}

/// Does the work of a leader while this replica leads, until `shutdown`.
async fn lead(
    work: &Work,
    cluster: &Arc<Cluster>,
    mut leadership: watch::Receiver<Leadership>,
    shutdown: &CancellationToken,
) -> Result<(), ControllerError> {
    let (changes, received) = mpsc::channel(CHANGES_WAITING_MAX);
    let world = Arc::new(Mutex::new(WatchedWorld::new(received)));
    let following = Following::new(Arc::clone(cluster), changes.clone());
    // Ends with the process: the objects are watched in every role.
    let mut watches = Tasks::new();
    watches.spawn(kubernetes::follow(Arc::clone(&following)).map(Ok));
    loop {
        let now = leadership.borrow_and_update().clone();
        let mut steps = Tasks::new();
        if let Leadership::Leading { epoch } = &now {
            let writer = Arc::new(StatusWriter::new(Arc::clone(&work.shared.recorder)));
            work.status_writer.send_replace(Some(Arc::clone(&writer)));
            let sink = StatusSink::Kubernetes(Arc::clone(&writer));
            work.start(&mut steps, epoch.clone(), sink, (&world, &changes)).await;
            let (changes, following) = (changes.clone(), Arc::clone(&following));
            let (cluster, recorder, pools) =
                (Arc::clone(cluster), Arc::clone(&work.shared.recorder), work.shared.pools.subscribe());
            let (group, gateways, states) =
                (work.shared.settings.group.clone(), work.shared.gateways.subscribe(), work.shared.states.subscribe());
            let (uids, pool_gateways) = (work.gateway_uids.clone(), gateways.clone());
            steps.spawn(async move {
                let fleet = async {
                    // It sends the gateways to the planner, too, and nothing may be planned before all was seen.
                    following.begin_term().await;
                    edge_gateways::show_gateways(&cluster, &group, gateways, states, &uids, changes.clone()).await;
                };
                let events = async {
                    if let Some(events) = recorder.events() {
                        events.run(&cluster).await;
                    }
                };
                let pools = pools::write_pools(&cluster, pools, pool_gateways);
                tokio::join!(writer.run(&cluster), pools, events, fleet);
                Ok(())
            });
        } else {
            let (world, recorder) = (Arc::clone(&world), Arc::clone(&work.shared.recorder));
            steps.spawn(async move {
                world.lock().await.keep_current(&recorder).await;
                Ok(())
            });
        }
        let stays = async { leadership.wait_for(|newest| *newest != now).await.map(drop) };
        let ended = tokio::select! {
            biased;
            changed = stays => changed.is_err(),
            () = shutdown.cancelled() => true,
            Some(ended) = steps.join_next() => return ended?,
            Some(ended) = watches.join_next() => return ended?,
        };
        // Nothing is written after this.
        steps.shutdown().await;
        work.shared.states.send_replace(None);
        work.shared.pools.send_replace(PoolsReport::default());
        work.shared.wanted.send_replace(WantedStatuses::default());
        work.status_writer.send_replace(None);
        if ended {
            return Ok(());
        }
    }
}

/// Waits for the first task that ends, or `shutdown`, then stops the others.
async fn first_to_end(steps: &mut Tasks, shutdown: &CancellationToken) -> Result<(), ControllerError> {
    let first = shutdown.run_until_cancelled(steps.join_next()).await.flatten();
    steps.shutdown().await;
    first.unwrap_or(Ok(Ok(())))?
}

impl Running {
    /// Cancelling it ends the controller.
    #[must_use]
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Waits until the controller is shut down or one of its tasks fails, which ends the others.
    ///
    /// # Errors
    /// The first error.
    pub async fn stopped(mut self) -> Result<(), ControllerError> {
        let mut result = Ok(());
        while let Some(ended) = self.tasks.join_next().await {
            let ended = ended.unwrap_or_else(|error| Err(error.into()));
            // A task that ends early stops all others.
            self.shutdown.cancel();
            result = result.and(ended);
        }
        result
    }
}

/// A source that is ready to be watched.
enum Origin {
    Manifests { dir: PathBuf, files: StatusFiles, adopted: BTreeMap<ServiceName, ServiceStatus> },
    Kubernetes(Cluster),
}

impl Origin {
    async fn open(source: &Source) -> Result<Self, ControllerError> {
        match source {
            Source::Manifests { dir, status_dir } => {
                let (files, adopted) = StatusFiles::open(status_dir)?;
                Ok(Self::Manifests { dir: dir.clone(), files, adopted })
            }
            Source::Kubernetes { kubeconfig, namespace } => {
                let mut cluster = kubernetes::connect(kubeconfig.as_deref()).await?;
                if let Some(namespace) = namespace {
                    cluster.namespace.clone_from(namespace);
                }
                Ok(Self::Kubernetes(cluster))
            }
        }
    }

    /// What is done at the API server; without one, nothing.
    fn activity(&self) -> Arc<ApiActivity> {
        match self {
            Self::Manifests { .. } => Arc::default(),
            Self::Kubernetes(cluster) => Arc::clone(&cluster.activity),
        }
    }

    /// Where a text of this installation is stored: in ConfigMaps, or in a file of this name in the status directory.
    fn storage(&self, group: &str, file: &str) -> Storage {
        match self {
            Self::Kubernetes(cluster) => Storage::in_cluster(cluster, group),
            Self::Manifests { files, .. } => Storage::File(files.dir().join(file)),
        }
    }
}
