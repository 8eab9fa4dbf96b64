//! The signals that end a gateway, and how it leaves the network.
//!
//! SIGTERM and SIGINT drain it: routers send elsewhere before it stops. SIGUSR2 ends it for a restart: its routes stay
//! without it, because the next process goes on with the same flows. If the configuration is invalid by then, the next
//! start fails, so the gateway drains. SIGUSR2 during a drain ends the drain. A second signal otherwise ends the process at
//! once.
//!
//! Not here: when routers are asked to prefer others (`fleet::gateway_drain`), and single routes (`netlink`).

use std::sync::Arc;
use std::time::Duration;

use control::config::logging;
use control::healthz::systemd;
use dataplane::WorkerCounters;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::netlink::{Announcement, VipRoutes};
use crate::settings::Settings;
use crate::settings::reload::Reload;

/// Exit code after a second signal.
const ENDED_AT_ONCE: i32 = 1;
/// A drain ends early once there have been no flows for this long: routers send nothing any more.
const NO_FLOWS_FOR: Duration = Duration::from_secs(3);
/// Interval at which a drain counts the flows.
const COUNT_EVERY: Duration = Duration::from_millis(100);

/// What ends a gateway.
#[derive(Clone, Debug, Default)]
pub(super) struct Stop {
    /// Cancelled when the gateway is to end.
    pub(super) shutdown: CancellationToken,
    /// It ends for a restart: the next process is expected at once.
    pub(super) is_restart: CancellationToken,
    /// The next process has its routes elsewhere, so this one leaves it none.
    pub(super) moves_routes: CancellationToken,
    /// Cancelled when a restart is asked for during a drain.
    pub(super) drain_cut_short: CancellationToken,
}

/// What a gateway that leaves the network needs.
pub(super) struct Leaving<'a> {
    /// What routers are to learn.
    pub(super) announced: &'a watch::Sender<Announcement>,
    /// Cancelled at the beginning.
    pub(super) terminating: &'a CancellationToken,
    /// The routes to VIPs.
    pub(super) routes: &'a VipRoutes,
    /// The counters of the workers.
    pub(super) workers: &'a [Arc<WorkerCounters>],
}

impl Stop {
    /// Follows the signals of the process. `reload` knows the configuration of the next start.
    pub(super) fn on_signals(&self, reload: Arc<Reload>) -> std::io::Result<()> {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut restart = signal(SignalKind::user_defined2())?;
        let stop = self.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => stop.end("SIGINT"),
                _ = terminate.recv() => stop.end("SIGTERM"),
                _ = restart.recv() => stop.end_for_restart(&reload),
            }
            loop {
                tokio::select! {
                    _ = interrupt.recv() => break,
                    _ = terminate.recv() => break,
                    _ = restart.recv() => stop.end_for_restart(&reload),
                }
            }
            tracing::warn!("second signal: exiting at once; the next start cleans up");
            logging::flush();
            std::process::exit(ENDED_AT_ONCE);
        });
        Ok(())
    }

    /// After SIGUSR2: ends the gateway for a restart, if the next start will find a valid configuration.
    fn end_for_restart(&self, reload: &Reload) {
        match tokio::task::block_in_place(|| reload.check()) {
            Ok(_) if self.shutdown.is_cancelled() => {
                tracing::info!("a restart was asked for: the drain ends, and the flows are saved");
                return self.drain_cut_short.cancel();
            }
            Ok(next) => {
                if !next.keeps_routes {
                    self.moves_routes.cancel();
                }
                self.is_restart.cancel();
            }
            Err(errors) => {
                tracing::error!(%errors, "the configuration is invalid and the next start will fail: draining as after SIGTERM");
            }
        }
        if !self.shutdown.is_cancelled() {
            self.end("SIGUSR2");
        }
    }

    /// Drains: lets other gateways take its VIPs of `l2` pools, asks routers to prefer other gateways, withdraws the routes
    /// to VIPs and, if there were any, waits until routers have converged. `handed_over` ends when others have the VIPs.
    pub(super) async fn leave(&self, settings: &Settings, leaving: Leaving<'_>, handed_over: impl Future<Output = ()>) {
        let Leaving { announced, terminating, routes, workers } = leaving;
        let (start, mut announced) = (Instant::now(), announced.subscribe());
        let is_announced = !announced.borrow_and_update().prefixes.is_empty();
        terminating.cancel();
        let withdrawn = async {
            if is_announced {
                let withdrawn =
                    timeout(settings.drain_on_stop, announced.wait_for(|announcement| announcement.prefixes.is_empty()));
                let _ = self.drain_cut_short.run_until_cancelled(withdrawn).await;
            }
        };
        let handed_over = self.drain_cut_short.run_until_cancelled(handed_over);
        let _ = tokio::join!(withdrawn, handed_over);
        withdraw_routes(routes, settings).await;
        if is_announced {
            let wait = settings.drain_on_stop.saturating_sub(start.elapsed());
            tracing::info!(?wait, "routes to VIPs are withdrawn; packets that still arrive are forwarded");
            let _ = self.drain_cut_short.run_until_cancelled(drain(wait, workers)).await;
        }
    }

    /// At the end of the process: leaves the routes to the next process if this is a restart, otherwise withdraws what is
    /// left of them.
    pub(super) async fn end_routes(&self, routes: &VipRoutes, settings: &Settings) {
        if !self.is_restart.is_cancelled() || self.moves_routes.is_cancelled() {
            withdraw_routes(routes, settings).await;
        } else if let Err(error) = routes.leave_to_next_process().await {
            tracing::warn!(%error, "routes to VIPs end with this process; routers send here again once the next one serves");
        }
    }

    fn end(&self, signal: &str) {
        let is_restart = self.is_restart.is_cancelled();
        tracing::info!(signal, is_restart, "stopping; SIGINT or SIGTERM now ends the gateway at once");
        systemd::stopping(if is_restart { "saves flows for the next process" } else { "stops" });
        self.shutdown.cancel();
    }
}

pub(super) async fn withdraw_routes(routes: &VipRoutes, settings: &Settings) {
    if let Err(error) = routes.withdraw().await {
        tracing::warn!(%error, "routes to VIPs stay in table {}", settings.announce.table);
    }
}

/// Waits until flows have run out, `wait` at most.
pub(super) async fn drain(wait: Duration, workers: &[Arc<WorkerCounters>]) {
    let start = Instant::now();
    let mut last_flow = start;
    while start.elapsed() < wait && last_flow.elapsed() < NO_FLOWS_FOR {
        let rest = wait.saturating_sub(start.elapsed());
        sleep(COUNT_EVERY.min(rest)).await;
        if workers.iter().any(|worker| worker.flows.get() > 0) {
            last_flow = Instant::now();
        }
    }
    let flows: u64 = workers.iter().map(|worker| worker.flows.get()).sum();
    tracing::info!(flows, "the drain is over");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::reload::tests::{reload, with_file};

    #[tokio::test(flavor = "multi_thread")]
    async fn a_restart_whose_next_start_will_fail_drains() {
        // Its file is gone.
        let stop = Stop::default();
        stop.end_for_restart(&reload());
        assert_eq!((stop.shutdown.is_cancelled(), stop.is_restart.is_cancelled()), (true, false));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_restart_during_a_drain_ends_the_drain_and_brings_no_route_back() {
        let (stop, (reload, _dir)) = (Stop::default(), with_file());
        stop.end("SIGTERM");
        assert!(!stop.drain_cut_short.is_cancelled());
        stop.end_for_restart(&reload);
        assert_eq!((stop.drain_cut_short.is_cancelled(), stop.is_restart.is_cancelled()), (true, false));
        let stop = Stop::default();
        stop.end_for_restart(&reload);
        assert_eq!((stop.shutdown.is_cancelled(), stop.is_restart.is_cancelled()), (true, true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_when_there_were_no_flows_for_a_while_or_its_time_is_over() {
        let worker = Arc::new(WorkerCounters::default());
        let workers = [Arc::clone(&worker)];
        let lasts = async |wait| {
            let start = Instant::now();
            drain(Duration::from_secs(wait), &workers).await;
            start.elapsed().as_secs()
        };
        assert_eq!(lasts(10).await, 3, "no flow at all");
        assert_eq!(lasts(1).await, 1);
        worker.flows.set(1);
        assert_eq!(lasts(10).await, 10, "a flow that does not end");
        let ending = async {
            sleep(Duration::from_secs(5)).await;
            worker.flows.set(0);
        };
        let (lasted, ()) = tokio::join!(lasts(60), ending);
        assert!((8..=9).contains(&lasted), "{lasted}");
    }
}
