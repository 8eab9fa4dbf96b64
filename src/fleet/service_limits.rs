//! Services at their limits: which Service or client uses up its share, and where SNAT ports run short.
//!
//! Invariant: at most [`FLEET_ROWS_MAX`] limits are reported. A limit that has not occurred for `REPORTED_FOR` is no longer
//! reported. Not here: the limits themselves (`dataplane`), and how they are shown (`status`, `admin`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use dataplane::snapshot::{ServiceView, Views};
use dataplane::{DropReason, WorkerCounters};
use proto::limits::{FLEET_ROWS_MAX, SNAT_PORT_FIRST, SNAT_PORT_LAST, SNAT_PORT_REST};
use proto::{LimitKind, ServiceLimit, ServiceName};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::agent::served::Served;
use crate::agent::supervisor::Failure;
use crate::agent::watch::send_if_changed;

/// How often counters are read: 10,000 Services take about a millisecond.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long a limit is reported after it occurred last, so that a load that comes and goes is reported once.
const REPORTED_FOR: Duration = Duration::from_secs(300);

/// New flows a second to one backend for which the ports of one SNAT address suffice: 64,512 / 60 s.
pub(crate) const SNAT_PORTS_PER_SECOND: u64 = (SNAT_PORT_LAST - SNAT_PORT_FIRST + 1) as u64 / SNAT_PORT_REST.as_secs();

/// How often each kind of limit has occurred to a Service.
type Occurred = [u64; LimitKind::ALL.len()];

/// The counters of workers, and room for flows of each.
#[derive(Clone, Debug)]
pub struct WorkerRoom {
    /// The counters.
    pub workers: Vec<Arc<WorkerCounters>>,
    /// Flows that all of them have room for.
    pub flows_max: u64,
}

/// Limits that occurred before, and those that are reported.
#[derive(Debug, Default)]
struct Limits {
    /// By Service, as far as anything occurred.
    before: BTreeMap<Arc<ServiceName>, Occurred>,
    reported: BTreeMap<(Arc<ServiceName>, LimitKind), (Instant, String)>,
}

/// The task that watches for Services at their limits. Cloned for each start.
#[derive(Clone, Debug)]
pub struct LimitMonitor {
    /// The Services, with their counters.
    pub served: watch::Receiver<Served>,
    /// The room of the workers.
    pub room: WorkerRoom,
    /// Output.
    pub limits: watch::Sender<Vec<ServiceLimit>>,
}

impl LimitMonitor {
    /// Keeps `limits` current.
    ///
    /// # Errors
    /// Never; it ends with the gateway.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { served, room, limits } = self;
        let mut ticks = interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut known = Limits::default();
        loop {
            ticks.tick().await;
            let services = served.borrow().services.clone();
            send_if_changed(&limits, known.look(&services, &room, Instant::now()));
        }
    }
}

fn occurred(service: &ServiceView) -> Occurred {
    LimitKind::ALL.map(|kind| match kind {
        LimitKind::FlowShare => service.drops.sum(DropReason::FlowShare),
        LimitKind::SnatShare => service.drops.sum(DropReason::SnatShare),
        LimitKind::SnatPorts => service.drops.reused_early() + service.drops.sum(DropReason::SnatExhausted),
    })
}

impl Limits {
    /// The limits to report now.
    fn look(&mut self, services: &Views, room: &WorkerRoom, now: Instant) -> Vec<ServiceLimit> {
        self.before.retain(|name, _| services.contains_key(name));
        self.reported.retain(|(name, _), (until, _)| *until > now && services.contains_key(name));
        for service in services.values() {
            let occurred = occurred(service);
            if occurred == Occurred::default() {
                continue;
            }
            let before = self.before.insert(Arc::clone(&service.name), occurred).unwrap_or_default();
            for ((kind, count), before) in LimitKind::ALL.into_iter().zip(occurred).zip(before) {
                let key = (Arc::clone(&service.name), kind);
                if count > before && (self.reported.len() < FLEET_ROWS_MAX || self.reported.contains_key(&key)) {
                    self.reported.insert(key, (now + REPORTED_FOR, text(service, kind, count - before, room)));
                }
            }
        }
        let reported = self.reported.iter();
        reported
            .map(|((service, kind), (_, text))| ServiceLimit {
                service: ServiceName::clone(service),
                kind: *kind,
                text: text.clone(),
            })
            .collect()
    }
}

fn text(service: &ServiceView, kind: LimitKind, dropped: u64, room: &WorkerRoom) -> String {
    let seconds = LOOK_EVERY.as_secs();
    match kind {
        LimitKind::FlowShare => {
            let held: u64 = room.workers.iter().map(|worker| u64::from(worker.flows_of_service(service.number))).sum();
            format!(
                "{dropped} of its new flows were dropped within {seconds} s: it has its share of the flow tables, {held} of {} flows; \
                 raise flows.maxPerWorker, or shorten idle limits",
                room.flows_max
            )
        }
        LimitKind::SnatShare => {
            let mut clients: Vec<_> = service.drops.limited_clients().map(site).collect();
            clients.sort_unstable();
            clients.dedup();
            format!(
                "{dropped} of its new flows were dropped within {seconds} s: clients have their share of the SNAT ports of a backend, \
                 most of which are in use, {} among them; add an address under snat.addresses, or backends",
                clients.first().map_or_else(String::new, Clone::clone)
            )
        }
        LimitKind::SnatPorts => {
            let (ports, rest) = (u32::from(SNAT_PORT_LAST - SNAT_PORT_FIRST) + 1, SNAT_PORT_REST.as_secs());
            format!(
                "SNAT ports are used again before they have rested for {rest} s, or all are in use: for each {} new flows a second to \
                 one backend ({ports} ports / {rest} s) it takes an address under snat.addresses",
                SNAT_PORTS_PER_SECOND
            )
        }
    }
}

/// A client as shares count them.
fn site(client: IpAddr) -> String {
    match client {
        IpAddr::V4(_) => client.to_string(),
        IpAddr::V6(_) => format!("{client}/64"),
    }
}

#[cfg(test)]
mod tests {
    use dataplane::ServiceDrops;

    use super::*;
    use crate::admin::api::tests::web;

    #[test]
    fn a_limit_is_told_with_who_has_it_and_from_which_rate_and_no_longer_once_it_does_not_occur() {
        let drops = Arc::new(ServiceDrops::new(2));
        let service = Arc::new(ServiceView { drops: Arc::clone(&drops), ..web() });
        let services: Views = std::iter::once((Arc::clone(&service.name), service)).collect();
        let room = WorkerRoom { workers: vec![Arc::default()], flows_max: 1000 };
        let (mut limits, start) = (Limits::default(), Instant::now());
        assert_eq!(limits.look(&services, &room, start), []);
        drops.count_for_tests(0, DropReason::FlowShare);
        drops.count_for_tests(1, DropReason::SnatShare);
        drops.count_for_tests(1, DropReason::SnatExhausted);
        let reported = limits.look(&services, &room, start);
        let kinds: Vec<_> = reported.iter().map(|limit| (limit.service.to_string(), limit.kind)).collect();
        assert_eq!(kinds, LimitKind::ALL.map(|kind| ("default/web".to_owned(), kind)));
        assert!(
            reported[0].text.contains("1 of its new flows") && reported[0].text.contains("of 1000 flows"),
            "{}",
            reported[0].text
        );
        assert!(
            reported[2].text.contains("each 1075 new flows a second to one backend (64512 ports / 60 s)"),
            "{}",
            reported[2].text
        );
        assert_eq!(limits.look(&services, &room, start + REPORTED_FOR / 2), reported, "it is reported for a while");
        assert_eq!(limits.look(&services, &room, start + REPORTED_FOR), []);
        drops.count_for_tests(0, DropReason::FlowShare);
        assert_eq!(limits.look(&services, &room, start + REPORTED_FOR).len(), 1);
        assert_eq!(limits.look(&Views::new(), &room, start + REPORTED_FOR), [], "the Service is gone");
    }
}
