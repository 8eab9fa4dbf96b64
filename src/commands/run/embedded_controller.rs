//! The controller that runs in the process of a gateway: its start, its restarts, its end.
//!
//! Not here: what it does (`control`).

use std::sync::{Arc, Mutex, PoisonError};

use control::admin::View;
use control::config::settings::ControllerSettings;
use control::controller::{self, ControllerError, Running};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::agent::supervisor::Failure;

/// Starts the embedded controller. If a state on disk is usable, a failure is retried later, so that the gateway
/// starts.
pub(super) async fn start(
    settings: ControllerSettings,
    shutdown: &CancellationToken,
    has_state: bool,
) -> Result<Option<Running>, ControllerError> {
    match controller::start(settings, shutdown.child_token()).await {
        Ok(running) => Ok(Some(running)),
        // A socket of another process is an error: it is neither replaced nor followed.
        Err(error) if has_state && !matches!(error, ControllerError::Listen(_)) => {
            tracing::error!(%error, "the controller cannot start; the state on disk is served until it can");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Waits for the controller to end after its cancellation.
pub(super) async fn stopped(running: Option<Running>) {
    if let Some(running) = running
        && let Err(error) = running.stopped().await
    {
        tracing::warn!(%error, "the controller ended with an error");
    }
}

/// The task that runs the controller that was started already; after a failure or a change of settings, it starts a new
/// one. Gateways keep their state in the meantime. A reload has the manifests read again. Cloned for each start.
#[derive(Clone)]
pub(super) struct EmbeddedController {
    /// The controller that was started already, until the first run takes it.
    pub(super) first: Arc<Mutex<Option<Running>>>,
    /// Its settings as they change.
    pub(super) settings: watch::Receiver<Option<ControllerSettings>>,
    /// How often the configuration was reloaded.
    pub(super) reloads: watch::Receiver<u64>,
    /// Output: what it knows, for operators.
    pub(super) view: watch::Sender<Option<View>>,
    /// Cancelled at the end.
    pub(super) shutdown: CancellationToken,
}

impl EmbeddedController {
    /// Runs until `shutdown`.
    ///
    /// # Errors
    /// If the controller cannot be started, or ends by itself.
    pub(super) async fn run(self) -> Result<(), Failure> {
        let Self { first, mut settings, mut reloads, view, shutdown } = self;
        let mut first = first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut recorder = None;
        loop {
            let child = shutdown.child_token();
            let now = settings.borrow_and_update().clone();
            let running = match (first.take(), now) {
                (Some(running), _) => running,
                (None, Some(now)) => controller::start_after(now, child.clone(), recorder.as_deref()).await?,
                (None, None) => return Ok(()),
            };
            view.send_replace(Some(running.view.clone()));
            recorder = Some(Arc::clone(&running.view.recorder));
            let (restart, reread) = (running.shutdown(), Arc::clone(&running.reread));
            let mut stopped = std::pin::pin!(running.stopped());
            loop {
                tokio::select! {
                    ended = &mut stopped => return Ok(ended?),
                    changed = settings.changed() => break changed?,
                    changed = reloads.changed() => changed.map(|()| reread.notify_one())?,
                }
            }
            restart.cancel();
            stopped.await?;
        }
    }
}
