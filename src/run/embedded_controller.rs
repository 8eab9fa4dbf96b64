//! The controller that runs in the process of a gateway: its start, its restarts, its end.
//!
//! Not here: what it does (`control`).

use std::sync::{Arc, Mutex, PoisonError};

use control::admin::View;
use control::config::settings::ControllerSettings;
use control::controller::{self, ControllerError, Running};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::agent::supervisor::{Failure, Supervisor};
use crate::settings::reload::Reload;

/// Starts the embedded controller. If a state on disk is usable, a failure is retried later, so that the gateway
/// starts.
pub(super) async fn start(
    settings: ControllerSettings,
    ended: &CancellationToken,
    has_state: bool,
) -> Result<Option<Running>, ControllerError> {
    match controller::start(settings, ended.child_token()).await {
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

/// Runs the controller that was started already; after a failure or a change of settings, starts a new one. Gateways
/// keep their state in the meantime. A reload has the manifests read again.
pub(super) fn supervise(
    supervisor: &mut Supervisor,
    reload: &Reload,
    running: Option<Running>,
    stop: &CancellationToken,
) -> watch::Receiver<Option<View>> {
    let first = Mutex::new(running);
    let (view, shown) = watch::channel(None);
    supervisor.run_to_its_end(
        "controller",
        (reload.controller(), reload.reloads(), view, stop.clone()),
        move |(settings, reloads, view, stop)| {
            let running = first.lock().unwrap_or_else(PoisonError::into_inner).take();
            run_controller(settings, reloads, running, view, stop)
        },
    );
    shown
}

async fn run_controller(
    mut settings: watch::Receiver<Option<ControllerSettings>>,
    mut reloads: watch::Receiver<u64>,
    mut first: Option<Running>,
    view: watch::Sender<Option<View>>,
    stop: CancellationToken,
) -> Result<(), Failure> {
    let mut recorder = None;
    loop {
        let child = stop.child_token();
        let now = settings.borrow_and_update().clone();
        let running = match (first.take(), now) {
            (Some(running), _) => running,
            (None, Some(now)) => controller::start_after(now, child.clone(), recorder.as_deref()).await?,
            (None, None) => return Ok(()),
        };
        view.send_replace(Some(running.view.clone()));
        recorder = Some(Arc::clone(&running.view.recorder));
        let (shutdown, reread) = (running.shutdown(), Arc::clone(&running.reread));
        let mut stopped = std::pin::pin!(running.stopped());
        loop {
            tokio::select! {
                ended = &mut stopped => return Ok(ended?),
                changed = settings.changed() => break changed?,
                changed = reloads.changed() => changed.map(|()| reread.notify_one())?,
            }
        }
        shutdown.cancel();
        stopped.await?;
    }
}
