//! The watchdog of workers, and the reports of the gateway to systemd.
//!
//! Invariant: systemd's watchdog is fed by a thread of its own while every worker polls and the agent runs its tasks. An
//! agent that stands still follows no change of endpoints, routes or health, and only a restart helps; a single task that
//! hangs ends nothing. As for workers, observations are counted, not time: a pause of the machine stalls nobody.
//! Not here: the messages themselves (`control::healthz::systemd`), and when a worker counts as stalled
//! (`worker_threads`).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use control::healthz::systemd;
use proto::Generation;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

use crate::agent::served::Served;
use crate::agent::supervisor::Failure;
use crate::worker_threads::{Heartbeats, Load, OBSERVATION_INTERVAL};

/// The start counts as complete after this time even without a complete state, which only a controller can give: a
/// gateway that waits for its controller has not failed, and must not delay the boot.
const READY_AT_LATEST: Duration = Duration::from_secs(60);

/// Interval of the agent's beats.
const BEAT_INTERVAL: Duration = Duration::from_millis(250);
/// Observations without a beat after which the agent counts as stalled: 10 s, in which it may compile a large state.
const AGENT_STALLED_AFTER: u32 = 20;

/// The thread that observes workers and the agent. Dropping this ends it.
#[derive(Debug)]
pub(super) struct Watchdog {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    beating: AbortHandle,
}

impl Watchdog {
    /// Observes these workers, and the runtime of the calling task.
    pub(super) fn start(loads: Vec<Arc<Load>>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let beats = Arc::new(AtomicU64::new(0));
        let beating = tokio::spawn(beat(Arc::clone(&beats))).abort_handle();
        let agent = AgentPulse { beats, seen: 0, silent: 0 };
        let thread = thread::Builder::new().name("watchdog".into()).spawn(move || observe(loads, agent, &stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread), beating })
    }
}

/// Counts, as a task like any other of the agent.
async fn beat(beats: Arc<AtomicU64>) {
    loop {
        beats.fetch_add(1, Ordering::Relaxed);
        sleep(BEAT_INTERVAL).await;
    }
}

/// The beats of the agent, as the thread sees them.
struct AgentPulse {
    beats: Arc<AtomicU64>,
    seen: u64,
    /// Observations since the last beat.
    silent: u32,
}

impl AgentPulse {
    /// Observes the agent, and returns whether that changed whether it runs, and whether it runs.
    fn observe(&mut self) -> (bool, bool) {
        let before = self.silent >= AGENT_STALLED_AFTER;
        let beats = self.beats.load(Ordering::Relaxed);
        self.silent = if beats == self.seen { self.silent.saturating_add(1) } else { 0 };
        self.seen = beats;
        let is_stalled = self.silent >= AGENT_STALLED_AFTER;
        (is_stalled != before, !is_stalled)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.beating.abort();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was logged, and systemd restarts the gateway.
            let _ = thread.join();
        }
    }
}

fn observe(loads: Vec<Arc<Load>>, mut agent: AgentPulse, stopped: &mpsc::Receiver<()>) {
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
        let (has_changed, agent_runs) = agent.observe();
        match (has_changed, agent_runs) {
            (true, false) => tracing::error!("the agent does not run its tasks any longer; workers forward by the last snapshot"),
            (true, true) => tracing::warn!("the agent runs its tasks again"),
            (false, _) => {}
        }
        if feed_interval.is_some() && agent_runs && heartbeats.all_poll() {
            systemd::feed_watchdog();
        }
    }
}

/// The task that reports readiness and status to systemd. Cloned for each start.
#[derive(Clone, Debug)]
pub(super) struct SystemdReport {
    /// The newest published snapshot data.
    pub(super) served: watch::Receiver<Served>,
    /// The generation that every worker has applied.
    pub(super) applied: watch::Receiver<Option<Generation>>,
    /// Whether a controller is connected.
    pub(super) connected: watch::Receiver<bool>,
}

impl SystemdReport {
    /// Tells systemd when the gateway is ready, and what it does, as that changes.
    ///
    /// # Errors
    /// If a sender is dropped.
    pub(super) async fn run(self) -> Result<(), Failure> {
        let Self { mut served, mut applied, mut connected } = self;
        let latest = Instant::now() + READY_AT_LATEST;
        let (mut was_ready, mut reported) = (false, String::new());
        loop {
            let is_complete = served.borrow_and_update().ready;
            let generation = applied.borrow_and_update().as_ref().map(|generation| generation.counter);
            let text = describe(is_complete, generation, *connected.borrow_and_update());
            let is_due = !was_ready && (is_complete || Instant::now() >= latest);
            if is_due {
                systemd::ready(&text);
                was_ready = true;
            } else if text != reported {
                systemd::status(&text);
            }
            reported = text;
            tokio::select! {
                changed = served.changed() => changed?,
                changed = applied.changed() => changed?,
                changed = connected.changed() => changed?,
                () = sleep_until(latest), if !was_ready => {}
            }
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
    fn an_agent_without_beats_is_stalled_until_it_beats_again() {
        let mut agent = AgentPulse { beats: Arc::default(), seen: 0, silent: 0 };
        let beats = Arc::clone(&agent.beats);
        for _ in 0..3 {
            for _ in 1..AGENT_STALLED_AFTER {
                assert_eq!(agent.observe(), (false, true));
            }
            beats.fetch_add(1, Ordering::Relaxed);
        }
        assert_eq!(agent.observe(), (false, true));
        for _ in 1..AGENT_STALLED_AFTER {
            assert_eq!(agent.observe(), (false, true));
        }
        assert_eq!(agent.observe(), (true, false));
        assert_eq!(agent.observe(), (false, false), "it is reported once");
        beats.fetch_add(1, Ordering::Relaxed);
        assert_eq!(agent.observe(), (true, true));
    }

    #[test]
    fn the_status_says_by_what_the_gateway_forwards() {
        assert_eq!(describe(true, Some(7), true), "forwards by generation 7; a controller is connected");
        assert_eq!(describe(true, None, false), "forwards by the state on disk; no controller is connected");
        assert_eq!(describe(false, None, false), "has no complete state yet; no controller is connected");
        assert_eq!(describe(false, Some(7), true), "has no complete state yet; a controller is connected");
    }
}
