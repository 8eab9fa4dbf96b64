//! The controller: changes from one source become plans, plans the state that gateways follow and the status that is
//! written back. `sluiced` embeds it; `sluice-controller` is nothing else.
//!
//! Invariant: nothing is planned before the source has told all Services and all slices once, and nothing that goes
//! wrong later withdraws anything.
//! Deliberately not here: leader election, and what each step decides (`plan`, `status`, `server`).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::ServiceStatus;
use proto::ServiceName;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::gateways::Gateways;
use crate::gathering::{CHANGES_WAITING_MAX, gather};
use crate::kubernetes::{self, StatusWriter};
use crate::manifests::{self, StatusFiles};
use crate::note::Note;
use crate::overrides::Desk;
use crate::overrides::store::{self, Store};
use crate::plan::{Memory, plan};
use crate::publish::Published;
use crate::server::{self, ConfigService};
use crate::settings::{ControllerSettings, Source};
use crate::socket::{self, TakenAway};
use crate::source::Change;
use crate::status::{StatusSink, Statuses, write_statuses};
use crate::world::World;

/// Why a controller does not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The socket cannot be listened on.
    #[error(transparent)]
    Listen(#[from] socket::ListenError),
    /// The status files cannot be read.
    #[error(transparent)]
    StatusFiles(#[from] manifests::StatusFileError),
    /// The manifests cannot be followed.
    #[error(transparent)]
    Manifests(#[from] manifests::FollowError),
    /// There is no client for the API server.
    #[error(transparent)]
    Kubernetes(#[from] kubernetes::ConnectError),
    /// The configuration API ended.
    #[error(transparent)]
    Serve(#[from] server::ServeError),
    /// A task panicked.
    #[error("a task of the controller failed: {0}; gateways keep their state, restart the controller")]
    Task(#[from] tokio::task::JoinError),
}

/// Starts controllers.
#[derive(Clone, Copy, Debug)]
pub struct Controller;

/// A controller at work.
#[derive(Debug)]
pub struct Running {
    /// The newest state; none before the first.
    pub states: watch::Receiver<Option<Arc<Published>>>,
    /// The connected gateways.
    pub gateways: watch::Receiver<Gateways>,
    _socket: TakenAway,
    tasks: JoinSet<Result<(), ControllerError>>,
    shutdown: CancellationToken,
}

impl Controller {
    /// Listens, and starts to follow the source. Ends when `shutdown` is cancelled.
    ///
    /// # Errors
    /// When the socket, the status directory or the client cannot be made.
    pub async fn start(settings: ControllerSettings, shutdown: CancellationToken) -> Result<Running, ControllerError> {
        // Before anything is listened on: an error here leaves nothing behind.
        let origin = Origin::open(&settings.source).await?;
        let listener = socket::listen(&settings.listen).await?;
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis().to_string();
        let (sender, changes) = mpsc::channel(CHANGES_WAITING_MAX);
        let (states, states_seen) = watch::channel(None);
        let (statuses, statuses_seen) = watch::channel(None);
        let (gateways, gateways_seen) = watch::channel(Gateways::default());
        let service = ConfigService { states: states_seen.clone(), gateways, shutdown: shutdown.clone() };
        let socket = TakenAway(settings.listen.clone());

        let mut tasks = JoinSet::new();
        let desk = Desk::new(origin.overrides(&settings));
        let (telling, to_plan, stop) = (desk.clone(), sender.clone(), shutdown.clone());
        tasks.spawn(async move {
            stop.run_until_cancelled(telling.tell(to_plan)).await;
            Ok(())
        });
        let sink = origin.start(&mut tasks, sender, &shutdown);
        tasks.spawn(async move { Ok(server::serve(listener, service).await?) });
        let seen = gateways_seen.clone();
        tasks.spawn(async move {
            write_statuses(statuses_seen, seen, sink).await;
            Ok(())
        });
        let planning = Planning { settings, epoch, states, statuses };
        let stop = shutdown.clone();
        tasks.spawn(async move {
            planning.run(changes, &stop).await;
            Ok(())
        });
        Ok(Running { states: states_seen, gateways: gateways_seen, _socket: socket, tasks, shutdown })
    }
}

impl Running {
    /// Cancelling it ends the controller.
    #[must_use]
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Waits until the controller was shut down, or a task of it failed; then the others end too.
    ///
    /// # Errors
    /// The first failure.
    pub async fn stopped(mut self) -> Result<(), ControllerError> {
        let mut result = Ok(());
        while let Some(ended) = self.tasks.join_next().await {
            let ended = ended.map_err(ControllerError::from).and_then(|ended| ended);
            // A task that ends before it should is followed by all others.
            self.shutdown.cancel();
            result = result.and(ended);
        }
        result
    }
}

/// A source that is ready to be followed.
enum Origin {
    Manifests { dir: PathBuf, files: StatusFiles, adopted: BTreeMap<ServiceName, ServiceStatus> },
    Kubernetes(kubernetes::Cluster),
}

impl Origin {
    async fn open(source: &Source) -> Result<Self, ControllerError> {
        match source {
            Source::Manifests { dir, status_dir } => {
                let (files, adopted) = StatusFiles::open(status_dir)?;
                Ok(Self::Manifests { dir: dir.clone(), files, adopted })
            }
            Source::Kubernetes { kubeconfig } => Ok(Self::Kubernetes(kubernetes::connect(kubeconfig.as_deref()).await?)),
        }
    }

    /// Where what operators set by hand is kept.
    fn overrides(&self, settings: &ControllerSettings) -> Store {
        match self {
            Self::Kubernetes(cluster) => Store::config_map(cluster, &settings.group),
            Self::Manifests { files, .. } => Store::File(files.dir().join(store::FILE)),
        }
    }

    /// Starts to follow it; the sink writes statuses to where the objects came from.
    fn start(
        self,
        tasks: &mut JoinSet<Result<(), ControllerError>>,
        changes: mpsc::Sender<Change>,
        shutdown: &CancellationToken,
    ) -> StatusSink {
        let shutdown = shutdown.clone();
        match self {
            Self::Manifests { dir, files, adopted } => {
                let may_forget = files.may_forget();
                tasks.spawn(async move {
                    let ended = shutdown.run_until_cancelled(manifests::follow(dir, adopted, may_forget, changes)).await;
                    Ok(ended.unwrap_or(Ok(()))?)
                });
                StatusSink::Files(files)
            }
            Self::Kubernetes(cluster) => {
                let writer = Arc::new(StatusWriter::default());
                let queue = Arc::clone(&writer);
                tasks.spawn(async move {
                    let both = async { tokio::join!(kubernetes::follow(&cluster, changes), queue.run(&cluster)) };
                    shutdown.run_until_cancelled(both).await;
                    Ok(())
                });
                StatusSink::Kubernetes(writer)
            }
        }
    }
}

/// The task that plans.
struct Planning {
    settings: ControllerSettings,
    epoch: String,
    states: watch::Sender<Option<Arc<Published>>>,
    statuses: watch::Sender<Option<Arc<Statuses>>>,
}

impl Planning {
    async fn run(self, mut changes: mpsc::Receiver<Change>, shutdown: &CancellationToken) {
        let (mut world, mut memory) = (World::default(), Memory::default());
        let (mut again_at, mut planned_at): (_, Option<Instant>) = (None, None);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                change = changes.recv() => match change {
                    Some(change) => world.apply(change),
                    None => return,
                },
                () = tokio::time::sleep_until(again_at.unwrap_or_else(Instant::now)), if again_at.is_some() => {}
            }
            gather(&mut changes, &mut world, planned_at).await;
            world.take_notes().iter().for_each(tell);
            if world.is_complete() {
                again_at = self.plan(&mut world, &mut memory);
                planned_at = Some(Instant::now());
            }
        }
    }

    /// Plans and publishes; returns when to do so again.
    fn plan(&self, world: &mut World, memory: &mut Memory) -> Option<Instant> {
        let plan = plan(world, &self.settings, memory, Instant::now().into_std());
        plan.notes.iter().for_each(tell);
        world.forget_departed(&plan.done_with_departed);
        let before = self.states.borrow().clone();
        let next = match &before {
            None => Some(Published::first(self.epoch.clone(), plan.services, plan.pools)),
            Some(before) => before.next(plan.services, plan.pools),
        };
        let newest = match (next, before) {
            (Some(next), _) => Arc::new(next),
            (None, Some(before)) => before,
            (None, None) => return plan.again_at.map(Instant::from_std),
        };
        let generation = &newest.state.generation;
        tracing::debug!(%generation, services = newest.state.services.len(), "planned");
        let statuses = Statuses { counter: generation.counter, wanted: plan.statuses };
        self.states.send_if_modified(|kept| {
            let is_new = kept.as_ref().is_none_or(|kept| !Arc::ptr_eq(kept, &newest));
            *kept = Some(Arc::clone(&newest));
            is_new
        });
        self.statuses.send_replace(Some(Arc::new(statuses)));
        plan.again_at.map(Instant::from_std)
    }
}

fn tell(Note { subject, remark }: &Note) {
    tracing::warn!(%subject, reason = remark.cause.as_str(), "{}", remark.text);
}
