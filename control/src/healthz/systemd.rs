//! Messages to systemd (`sd_notify(3)`), for units of `Type=notify`: ready, reloading, stopping, status, watchdog.
//!
//! Invariant: without systemd (variable `NOTIFY_SOCKET`) nothing happens. A message that cannot be sent is a warning,
//! because the program does its work without systemd.
//! Not here: HTTP probes (`healthz`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sd_notify::{NotifyState, notify, watchdog_enabled};
use tokio::time::{MissedTickBehavior, interval};

use super::{Pages as _, Probes};
use crate::kubernetes::lease::Leadership;

/// Messages to the watchdog in the time after which systemd restarts the program: some may be late.
const FEEDS: u32 = 4;
/// Interval of a timer that nothing depends on, where there is no watchdog.
const NO_WATCHDOG: Duration = Duration::from_secs(60);

/// Whether systemd started this program as a unit of `Type=notify`.
#[must_use]
pub fn listens() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// The interval at which [`feed_watchdog`] is to be called; `None` without `WatchdogSec=` in the unit.
#[must_use]
pub fn watchdog_interval() -> Option<Duration> {
    watchdog_enabled().map(|limit| limit / FEEDS).filter(|interval| !interval.is_zero())
}

/// Whether [`ready`] was called.
static IS_READY: AtomicBool = AtomicBool::new(false);

/// The start is complete, and `systemctl status` shows this text.
pub fn ready(status: &str) {
    IS_READY.store(true, Ordering::Relaxed);
    send(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// `systemctl status` shows this text.
pub fn status(text: &str) {
    send(&[NotifyState::Status(text)]);
}

/// The program begins to stop. From here on systemd expects no more messages for the watchdog.
pub fn stopping(status: &str) {
    send(&[NotifyState::Stopping, NotifyState::Status(status)]);
}

/// The program works. Without this message for `WatchdogSec=` systemd restarts it.
pub fn feed_watchdog() {
    send(&[NotifyState::Watchdog]);
}

/// A reload of the configuration, which ends when this is dropped. One before the start is complete is not announced,
/// since its end would announce the start.
#[derive(Debug)]
pub struct Reloading {
    is_announced: bool,
}

impl Reloading {
    /// A reload begins.
    #[must_use]
    pub fn begin() -> Self {
        let is_announced = IS_READY.load(Ordering::Relaxed);
        if is_announced {
            send(&[NotifyState::Reloading]);
        }
        Self { is_announced }
    }
}

impl Drop for Reloading {
    fn drop(&mut self) {
        if self.is_announced {
            send(&[NotifyState::Ready]);
        }
    }
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = notify(states) {
        tracing::warn!(%error, ?states, "a message to systemd cannot be sent");
    }
}

/// Reports a controller until the task is dropped: ready, who leads, and to the watchdog while its planner works.
pub async fn report_controller(probes: Probes) {
    let mut leadership = probes.leadership.clone();
    ready(&describe(&leadership.borrow_and_update()));
    let feed_interval = watchdog_interval();
    let mut tick = interval(feed_interval.unwrap_or(NO_WATCHDOG));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut may_change = true;
    loop {
        tokio::select! {
            _ = tick.tick() => {
                if feed_interval.is_some() && probes.live().is_ok() {
                    feed_watchdog();
                }
            }
            changed = leadership.changed(), if may_change => match changed {
                Ok(()) => status(&describe(&leadership.borrow_and_update())),
                // With manifests the leader is the same for ever.
                Err(_) => may_change = false,
            }
        }
    }
}

fn describe(leadership: &Leadership) -> String {
    match leadership {
        Leadership::Leading { .. } => "leads".to_owned(),
        Leadership::Following(Some(leader)) => format!("follows; {} leads", leader.identity),
        Leadership::Following(None) => "follows; the leader is not known".to_owned(),
    }
}
