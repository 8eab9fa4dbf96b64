//! Troubles of this gateway: the task that looks for them, and what `sluicectl status`, the metrics and the status page
//! show of them.
//!
//! Invariant: a look costs one pass over Services only after they have changed, and nothing here is on the way of a
//! packet. Not here: what a trouble is (`proto::trouble`), and what an embedded controller sees (`control::admin`).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use control::admin::{combine, fleet_row, observed_certificates, trouble_messages};
use control::gateways::listener::KeyCertificates;
use proto::trouble::{Memory, Observed, ObservedGateway, Recent, Trouble, find};
use proto::v1;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Status;

use super::api::{ControllerAccess, Sources};
use super::tables;
use crate::agent::backend_health::Subject;
use crate::agent::backend_history::{BackendHistories, now_s};
use crate::agent::supervisor::Failure;

/// How often the gateway looks. Reading the counters of ports may take a driver a millisecond.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Samples of counters that are kept: growth is seen over the last minute.
const SAMPLES: usize = 31;

/// The task that looks for troubles. Cloned for each start.
#[derive(Clone)]
pub struct TroubleMonitor {
    /// What it looks at.
    pub sources: Sources,
    /// The certificates that the gateway shows, without those of an embedded controller.
    pub certificates: Vec<KeyCertificates>,
    /// Output.
    pub troubles: watch::Sender<Vec<Trouble>>,
}

/// Counters at one time.
#[derive(Clone, Debug, Default)]
struct Sample {
    at: Duration,
    drops: BTreeMap<String, u64>,
    missed: BTreeMap<String, u64>,
    failures: BTreeMap<String, u64>,
    election_restarts: u64,
    /// Cycles of each worker, and busy ones.
    cycles: Vec<(u64, u64)>,
}

/// Services with trouble, and their unhealthy backends, as of the last change.
#[derive(Debug, Default)]
struct ServiceRows {
    services: Vec<v1::ServiceStatus>,
    unhealthy: Vec<v1::BackendStatus>,
}

impl TroubleMonitor {
    /// Keeps `troubles` current.
    ///
    /// # Errors
    /// Never; it ends with the gateway.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { mut sources, certificates, troubles } = self;
        let (start, mut ticks) = (tokio::time::Instant::now(), interval(LOOK_EVERY));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut memory, mut samples, mut rows) = (Memory::default(), VecDeque::new(), None);
        loop {
            ticks.tick().await;
            let (mut gateway, sample) = look(&sources, start.elapsed());
            samples.push_back(sample);
            if samples.len() > SAMPLES {
                samples.pop_front();
            }
            gateway.recent = recent(&samples);
            let rows = service_rows(&mut sources, &mut rows);
            let now_s = now_s();
            let observed = Observed {
                now_s,
                gateway: Some(gateway),
                services: rows.services.clone(),
                unhealthy: rows.unhealthy.clone(),
                flapping: flapping(&sources.histories, now_s),
                certificates: observed_certificates(&certificates),
                group: None,
            };
            troubles.send_replace(memory.settle(find(&observed), now_s));
        }
    }
}

/// What the gateway shows now, without what has grown, and its counters.
fn look(sources: &Sources, at: Duration) -> (ObservedGateway, Sample) {
    let (status, ports) = (sources.status(), (sources.ports)());
    let fleet = v1::GatewayStatus { draining: status.draining, ..fleet_row(&sources.fleet.status.borrow()) };
    let mut sample = Sample {
        at,
        missed: ports.iter().map(|port| (port.name.clone(), port.rx_missed)).collect(),
        failures: status.tasks.iter().map(|task| (task.name.clone(), task.restarts)).collect(),
        election_restarts: fleet.election_restarts,
        cycles: status.accounts.iter().map(|account| (account.cycles, account.busy_cycles)).collect(),
        ..Sample::default()
    };
    for v1::DropCount { reason, packets, .. } in sources.drops().drops.into_iter().filter(|drop| drop.packets > 0) {
        *sample.drops.entry(reason).or_default() += packets;
    }
    let targets = sources.served.borrow().target_use;
    let gateway = ObservedGateway {
        status,
        ports,
        fleet,
        targets_held: u64::from(targets.listed) + u64::from(targets.draining) + u64::from(targets.resting),
        targets_limit: targets.limit.into(),
        reload: sources.reload.outcome(),
        recent: Recent::default(),
    };
    (gateway, sample)
}

/// What has grown between the oldest and the newest sample. Counters begin at 0 with the gateway.
fn recent(samples: &VecDeque<Sample>) -> Recent {
    let (Some(first), Some(last)) = (samples.front(), samples.back()) else { return Recent::default() };
    let grown = |of: fn(&Sample) -> &BTreeMap<String, u64>| {
        let since = |(name, now): (&String, &u64)| (name.clone(), now.saturating_sub(of(first).get(name).copied().unwrap_or(0)));
        of(last).iter().map(since).filter(|(_, grown)| *grown > 0).collect()
    };
    let busy = |((before, busy_before), (now, busy_now)): (&(u64, u64), &(u64, u64))| {
        busy_now.saturating_sub(*busy_before).saturating_mul(100).checked_div(now.saturating_sub(*before)).unwrap_or(0)
    };
    Recent {
        seconds: last.at.saturating_sub(first.at).as_secs(),
        drops: grown(|sample| &sample.drops),
        missed: grown(|sample| &sample.missed),
        failures: grown(|sample| &sample.failures),
        election_restarts: last.election_restarts.saturating_sub(first.election_restarts),
        busy_percent: first.cycles.iter().zip(&last.cycles).map(busy).collect(),
    }
}

fn flapping(histories: &BackendHistories, now_s: u64) -> BTreeMap<String, usize> {
    let text = |Subject { service, protocol, address }: Subject| format!("{protocol} {address} of {service}");
    histories.flapping(now_s).into_iter().map(|(backend, turns)| (text(backend), turns)).collect()
}

/// The rows of Services with trouble, made anew if anything about them has changed.
fn service_rows<'a>(sources: &mut Sources, known: &'a mut Option<ServiceRows>) -> &'a ServiceRows {
    // A sender that is gone changes nothing any more.
    let has_changed = [
        sources.served.has_changed().unwrap_or(false),
        sources.causes.has_changed().unwrap_or(false),
        sources.fleet.status.has_changed().unwrap_or(false),
    ];
    if has_changed.contains(&true) {
        *known = None;
    }
    known.get_or_insert_with(|| {
        let services = sources.served.borrow_and_update().services.clone();
        let causes = sources.causes.borrow_and_update().clone();
        let limits = sources.fleet.status.borrow_and_update().limits.clone();
        let mut rows = ServiceRows::default();
        for view in services.values() {
            let row = tables::limited(tables::service(&sources.gateway, view), &limits);
            if row.reason.is_empty() && row.healthy == row.backends {
                continue;
            }
            rows.services.push(row);
            rows.unhealthy.extend(tables::unhealthy(&sources.gateway, view, &causes));
        }
        rows
    })
}

impl Sources {
    /// The troubles of this gateway.
    pub(super) fn own_troubles(&self) -> v1::ListTroublesResponse {
        v1::ListTroublesResponse {
            troubles: trouble_messages(&self.troubles.borrow(), Some(&self.gateway)),
            gateways: vec![self.gateway.clone()],
            services: u32::try_from(self.served.borrow().services.len()).unwrap_or(u32::MAX),
        }
    }

    /// These and, with an embedded controller that leads, those of the group.
    pub(super) async fn all_troubles(&self) -> Result<v1::ListTroublesResponse, Status> {
        let view = match &self.controller {
            ControllerAccess::Embedded(view) => view.borrow().clone().filter(|view| view.leads().is_ok()),
            ControllerAccess::Remote(_) => None,
        };
        Ok(match view {
            None => self.own_troubles(),
            Some(view) => combine(view.list_troubles(Some(&self.gateway)).await?, self.own_troubles()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_grew_is_the_difference_of_the_oldest_and_the_newest_sample() {
        let counts = |counts: &[(&str, u64)]| counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let first = Sample {
            at: Duration::from_secs(10),
            drops: counts(&[("no_route", 5), ("no_flow", 1)]),
            election_restarts: 1,
            cycles: vec![(1_000, 100), (1_000, 0)],
            ..Sample::default()
        };
        let last = Sample {
            at: Duration::from_secs(70),
            drops: counts(&[("no_route", 9), ("no_flow", 1), ("tx_full", 2)]),
            missed: counts(&[("uplink", 0)]),
            election_restarts: 3,
            cycles: vec![(2_000, 1_050), (1_000, 0)],
            ..Sample::default()
        };
        let recent = recent(&[first, Sample::default(), last].into());
        let expected = Recent {
            seconds: 60,
            drops: counts(&[("no_route", 4), ("tx_full", 2)]),
            election_restarts: 2,
            busy_percent: vec![95, 0],
            ..Recent::default()
        };
        assert_eq!(recent, expected);
        assert_eq!(super::recent(&VecDeque::new()), Recent::default());
    }
}
