//! The watchdog of workers, and the reports of the gateway to systemd.
//!
//! Invariant: systemd's watchdog is fed while every worker polls, and by a thread of its own: tasks of the agent that
//! hang do not end a gateway that forwards.
//! Not here: the messages themselves (`control::healthz::systemd`), and when a worker counts as stalled
//! (`worker_threads`).

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use control::healthz::systemd;
use proto::Generation;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::agent::served::Served;
use crate::agent::supervisor::Failure;
use crate::worker_threads::{Heartbeats, Load, OBSERVATION_INTERVAL};

/// The start counts as complete after this time even without a complete state, which only a controller can give: a
/// gateway that waits for its controller has not failed, and must not delay the boot.
const READY_AT_LATEST: Duration = Duration::from_secs(60);

/// The thread that observes workers. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Watchdog {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Observes these workers.
    pub(super) fn start(loads: Vec<Arc<Load>>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("watchdog".into()).spawn(move || observe(loads, &stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was logged, and systemd restarts the gateway.
            let _ = thread.join();
        }
    }
}

fn observe(loads: Vec<Arc<Load>>, stopped: &mpsc::Receiver<()>) {
    let feed_interval = systemd::watchdog_interval();
    let interval = feed_interval.map_or(OBSERVATION_INTERVAL, |feed| feed.min(OBSERVATION_INTERVAL));
    let mut heartbeats = Heartbeats::new(loads);
    while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        for change in heartbeats.observe() {
            if change.is_stalled {
                tracing::error!(worker = change.worker, "a worker does not poll its ports any longer; its packets are lost");
            } else {
                tracing::warn!(worker = change.worker, "the worker polls its ports again");
            }
        }
        if feed_interval.is_some() && heartbeats.all_poll() {
            systemd::feed_watchdog();
        }
    }
}

/// Tells systemd when the gateway is ready, and what it does, as that changes.
///
/// # Errors
/// If a sender is dropped.
pub(super) async fn report(
    mut served: watch::Receiver<Served>,
    mut reached: watch::Receiver<Option<Generation>>,
    mut connected: watch::Receiver<bool>,
) -> Result<(), Failure> {
    let latest = Instant::now() + READY_AT_LATEST;
    let (mut was_ready, mut told) = (false, String::new());
    loop {
        let is_complete = served.borrow_and_update().ready;
        let generation = reached.borrow_and_update().as_ref().map(|generation| generation.counter);
        let text = describe(is_complete, generation, *connected.borrow_and_update());
        let is_due = !was_ready && (is_complete || Instant::now() >= latest);
        if is_due {
            systemd::ready(&text);
            was_ready = true;
        } else if text != told {
            systemd::status(&text);
        }
        told = text;
        tokio::select! {
            changed = served.changed() => changed?,
            changed = reached.changed() => changed?,
            changed = connected.changed() => changed?,
            () = sleep_until(latest), if !was_ready => {}
        }
    }
}

fn describe(is_complete: bool, generation: Option<u64>, is_connected: bool) -> String {
    let controller = if is_connected { "a controller is connected" } else { "no controller is connected" };
    match generation {
        Some(generation) if is_complete => format!("forwards by generation {generation}; {controller}"),
        _ if is_complete => format!("forwards by the state on disk; {controller}"),
        _ => format!("has no complete state yet; {controller}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_says_by_what_the_gateway_forwards() {
        assert_eq!(describe(true, Some(7), true), "forwards by generation 7; a controller is connected");
        assert_eq!(describe(true, None, false), "forwards by the state on disk; no controller is connected");
        assert_eq!(describe(false, None, false), "has no complete state yet; no controller is connected");
        assert_eq!(describe(false, Some(7), true), "has no complete state yet; a controller is connected");
    }
}
