//! Reports to the controller: whether the gateway is ready, its number of flows, the number of healthy backends of each
//! service, refused services, its part in the fleet, and the applied generation.
//!
//! Invariant: the first report of a stream contains all services, later ones the differences. A report or an
//! acknowledgement is composed when the stream can take it, so that a slow controller gets the newest one and nothing
//! is queued. Deliberately not here: health itself, which this gateway applies by itself (`compile_loop`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dataplane::WorkerCounters;
use dataplane::snapshot::{ServiceView, Views};
use imbl::ordmap::DiffItem;
use ipnet::IpNet;
use proto::convert::{prefixes, reported_refusal};
use proto::v1::watch_request::Message;
use proto::{FleetStatus, Generation, ServiceName, v1};
use tokio::sync::watch::error::RecvError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::agent::served::{BackendCounts, Served};

/// Minimum time between two reports: conditions of Services change at most every 30 s, and people look once a second.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// Heartbeat interval: a report without changes shows that the gateway is alive.
const AT_LEAST_EVERY: Duration = Duration::from_secs(10);

/// Inputs of reports.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The newest published snapshot data.
    pub served: watch::Receiver<Served>,
    /// The generation that every worker has applied; `None` before the first.
    pub applied: watch::Receiver<Option<Generation>>,
    /// Its part in the fleet, which wakes only at news.
    pub fleet: watch::Receiver<FleetStatus>,
    /// The counters of the workers.
    pub workers: Vec<Arc<WorkerCounters>>,
}

impl Facts {
    /// The report with the newest figures: flows of all workers, and the part in the fleet.
    fn with_figures(&self, report: v1::Report) -> v1::Report {
        let flows = self.workers.iter().map(|worker| worker.flows.get()).sum();
        v1::Report { flows, fleet: Some((&*self.fleet.borrow()).into()), ..report }
    }

    async fn changed(&mut self) -> Result<(), RecvError> {
        tokio::select! {
            changed = self.served.changed() => changed,
            changed = self.applied.changed() => changed,
            changed = self.fleet.changed() => changed,
        }
    }
}

/// Values already reported on one stream.
#[derive(Debug, Default)]
struct Reported {
    ready: bool,
    fleet: FleetStatus,
    services: Views,
    /// The networks of its links; `None`: not reported yet.
    prefixes: Option<Arc<[IpNet]>>,
    sent: BTreeMap<Arc<ServiceName>, v1::ServiceHealth>,
}

/// Reports and acknowledges on one stream until it is closed. New and refused services are reported before their
/// generation is acknowledged: the controller would otherwise count refused ones as served, and would write the health of
/// new ones to their objects separately.
pub(super) async fn run(
    mut facts: Facts,
    mut acknowledged: watch::Receiver<Option<Generation>>,
    messages: mpsc::Sender<Message>,
) {
    let mut reported = Reported::default();
    let (mut has_news, mut not_before, mut silent_until) = (true, Instant::now(), Instant::now() + AT_LEAST_EVERY);
    loop {
        let mut is_due = false;
        tokio::select! {
            () = messages.closed() => return,
            changed = acknowledged.changed() => {
                if changed.is_err() || !acknowledge(&mut reported, &facts, &mut acknowledged, &messages).await {
                    return;
                }
                continue;
            }
            changed = facts.changed() => {
                if changed.is_err() {
                    return;
                }
                has_news = true;
                continue;
            }
            () = sleep_until(not_before), if has_news => {}
            () = sleep_until(silent_until), if !has_news => is_due = true,
        }
        let Ok(permit) = messages.reserve().await else { return };
        let news = reported.news(&mut facts);
        has_news = false;
        let now = Instant::now();
        let report = match news {
            Some(report) => {
                not_before = now + AT_MOST_EVERY;
                report
            }
            None if is_due => v1::Report { ready: reported.ready, ..v1::Report::default() },
            None => continue,
        };
        permit.send(Message::Report(facts.with_figures(report)));
        silent_until = now + AT_LEAST_EVERY;
    }
}

/// Reports new services and changed refusals, then acknowledges the newest generation. Returns false if the stream is closed.
async fn acknowledge(
    reported: &mut Reported,
    facts: &Facts,
    acknowledged: &mut watch::Receiver<Option<Generation>>,
    messages: &mpsc::Sender<Message>,
) -> bool {
    let Ok(mut permit) = messages.reserve().await else { return false };
    // Read before the services, which then belong to this generation or a later one.
    let Some(generation) = acknowledged.borrow_and_update().clone() else { return true };
    if reported.is_awaited(&facts.served.borrow())
        && let Some(report) = reported.news(&mut facts.clone())
    {
        permit.send(Message::Report(facts.with_figures(report)));
        permit = match messages.reserve().await {
            Ok(permit) => permit,
            Err(_) => return false,
        };
    }
    permit.send(Message::Acknowledge((&generation).into()));
    true
}

/// The report of a service, without the details for operators.
fn service_health(view: &ServiceView) -> v1::ServiceHealth {
    let BackendCounts { backends, healthy } = BackendCounts::from(view);
    let refusal = view.refusal.as_ref().map(reported_refusal);
    v1::ServiceHealth { service: view.name.to_string(), backends, healthy, refusal }
}

impl Reported {
    /// Whether the networks have changed. Before the first snapshot none are known.
    fn lacks_prefixes_of(&self, served: &Served) -> bool {
        !served.prefixes.is_empty() && self.prefixes.as_ref() != Some(&served.prefixes)
    }

    /// Whether a service is new, a refusal was added, changed or removed, or the networks have changed. Unchanged services
    /// are not examined.
    fn is_awaited(&self, served: &Served) -> bool {
        self.lacks_prefixes_of(served)
            || self.services.diff(&served.services).any(|item| match item {
                DiffItem::Add(..) => true,
                DiffItem::Update { new: (name, view), .. } => {
                    self.sent.get(name).and_then(|sent| sent.refusal.clone()) != view.refusal.as_ref().map(reported_refusal)
                }
                DiffItem::Remove(..) => false,
            })
    }

    /// The differences to the last report; `None` if there are none. Unchanged services are not examined.
    fn news(&mut self, facts: &mut Facts) -> Option<v1::Report> {
        let served = facts.served.borrow_and_update().clone();
        let ready = served.ready && facts.applied.borrow_and_update().is_some();
        let (mut changed, mut removed) = (Vec::new(), Vec::new());
        for item in self.services.diff(&served.services) {
            match item {
                DiffItem::Add(name, view) | DiffItem::Update { new: (name, view), .. } => {
                    let new = service_health(view);
                    if self.sent.get(name) != Some(&new) {
                        changed.push(new.clone());
                        self.sent.insert(Arc::clone(name), new);
                    }
                }
                DiffItem::Remove(name, _) => {
                    self.sent.remove(name);
                    removed.push(name.to_string());
                }
            }
        }
        let lacks_prefixes = self.lacks_prefixes_of(&served);
        self.services = served.services;
        let links = lacks_prefixes.then(|| v1::Links { prefixes: prefixes(&served.prefixes) });
        self.prefixes = Some(served.prefixes);
        let fleet = facts.fleet.borrow_and_update().without_figures();
        let is_news = ready != self.ready || fleet != self.fleet || links.is_some() || !changed.is_empty() || !removed.is_empty();
        (self.ready, self.fleet) = (ready, fleet);
        is_news.then_some(v1::Report { ready, services: changed, removed, links, ..v1::Report::default() })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::{FleetPartner, Reason, Refusal, VipElection};
    use tokio::time::timeout;

    use super::*;
    use crate::admin::api::tests::web;

    const LONG: Duration = Duration::from_secs(120);

    /// A service with two backends, of which one or none is healthy.
    fn service(name: &str, one_is_healthy: bool) -> Arc<ServiceView> {
        let mut view = ServiceView { name: Arc::new(ServiceName::new("default", name)), ..web() };
        view.ports[0].backends[0].healthy = one_is_healthy;
        Arc::new(view)
    }

    fn views(services: &[Arc<ServiceView>]) -> Views {
        services.iter().map(|view| (Arc::clone(&view.name), Arc::clone(view))).collect()
    }

    fn health(name: &str, healthy: u32) -> v1::ServiceHealth {
        v1::ServiceHealth { service: format!("default/{name}"), backends: 2, healthy, refusal: None }
    }

    /// A refused service.
    fn refused(name: &str) -> Arc<ServiceView> {
        let refusal = Refusal { reason: Reason::Refused, message: "no SNAT address".to_owned() };
        Arc::new(ServiceView { refusal: Some(refusal), ..ServiceView::clone(&service(name, true)) })
    }

    /// The input channels.
    struct Gateway {
        served: watch::Sender<Served>,
        applied: watch::Sender<Option<Generation>>,
        fleet: watch::Sender<FleetStatus>,
        acknowledged: watch::Sender<Option<Generation>>,
    }

    impl Gateway {
        fn new() -> (Self, Facts, watch::Receiver<Option<Generation>>) {
            let (served, served_in) = watch::channel(Served::default());
            let (applied, applied_in) = watch::channel(None);
            let (fleet, fleet_in) = watch::channel(FleetStatus::default());
            let (acknowledged, acknowledged_in) = watch::channel(None);
            (
                Self { served, applied, fleet, acknowledged },
                Facts { served: served_in, applied: applied_in, fleet: fleet_in, workers: Vec::new() },
                acknowledged_in,
            )
        }

        fn serves(&self, services: &[Arc<ServiceView>]) {
            self.served.send_replace(Served { ready: true, services: views(services), ..Served::default() });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn networks_are_reported_before_the_generation_is_acknowledged_and_again_when_they_change() {
        let (gateway, facts, acknowledged) = Gateway::new();
        let (sender, mut messages) = mpsc::channel(1);
        let task = tokio::spawn(run(facts, acknowledged, sender));
        for (counter, nets) in [(1, vec!["192.0.2.0/24"]), (2, vec!["192.0.2.0/24", "2001:db8::/64"])] {
            let nets: Vec<IpNet> = nets.into_iter().map(|net| net.parse().unwrap()).collect();
            gateway.served.send_replace(Served { ready: true, prefixes: nets.clone().into(), ..Served::default() });
            let generation = Generation { epoch: "e".to_owned(), counter };
            gateway.applied.send_replace(Some(generation.clone()));
            gateway.acknowledged.send_replace(Some(generation));
            let mut reported = Vec::new();
            loop {
                match timeout(LONG, messages.recv()).await.unwrap().unwrap() {
                    Message::Report(report) => reported.extend(report.links),
                    Message::Acknowledge(_) => break,
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(reported, [v1::Links { prefixes: prefixes(&nets) }]);
        }
        drop(gateway);
        timeout(LONG, task).await.unwrap().unwrap();
    }

    #[test]
    fn first_everything_is_reported_and_then_what_differs() {
        let (gateway, mut facts, _) = Gateway::new();
        let mut reported = Reported::default();
        assert_eq!(reported.news(&mut facts), None);
        let [a, b] = [service("a", true), service("b", true)];
        gateway.applied.send_replace(Some(Generation::default()));
        gateway.serves(&[Arc::clone(&a), Arc::clone(&b)]);
        let first = reported.news(&mut facts).unwrap();
        assert_eq!((first.ready, first.services, first.removed.len()), (true, vec![health("a", 1), health("b", 1)], 0));
        gateway.serves(&[Arc::clone(&a), service("b", true)]);
        assert_eq!(reported.news(&mut facts), None, "another view of the same");
        gateway.serves(&[service("a", false)]);
        let second = reported.news(&mut facts).unwrap();
        assert_eq!((second.services, second.removed), (vec![health("a", 0)], vec!["default/b".to_owned()]));
        gateway.applied.send_replace(None);
        let third = reported.news(&mut facts).unwrap();
        assert_eq!((third.ready, third.services.len()), (false, 0));
    }

    #[test]
    fn a_takeover_is_news_and_lag_comes_with_the_next_report() {
        let (gateway, mut facts, _) = Gateway::new();
        let mut reported = Reported::default();
        let partner = |lag_ms| FleetPartner { name: "edge-2".into(), address: "a".into(), is_in_sync: true, lag_ms };
        gateway.fleet.send_replace(FleetStatus { partners: vec![partner(Some(3))], ..FleetStatus::default() });
        assert!(reported.news(&mut facts).is_some());
        gateway.fleet.send_modify(|fleet| fleet.partners = vec![partner(Some(4))]);
        assert_eq!(reported.news(&mut facts), None);
        gateway.fleet.send_modify(|fleet| fleet.election = Some(VipElection { groups: 16, owned: 1, ..Default::default() }));
        let news = reported.news(&mut facts).unwrap();
        let report = facts.with_figures(news);
        let fleet = proto::convert::fleet_status(&report.fleet.unwrap());
        assert_eq!((fleet.lag_ms(), fleet.election.unwrap().owned), (Some(4), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn the_health_of_a_new_service_is_reported_before_its_generation_is_acknowledged() {
        let (gateway, facts, acknowledged) = Gateway::new();
        let (sender, mut messages) = mpsc::channel(1);
        let task = tokio::spawn(run(facts, acknowledged, sender));
        let (mut all, mut known) = (Vec::new(), 0);
        // Faster than reports that contain only changed health.
        for counter in 1..=20 {
            all.push(service(&format!("s{counter}"), true));
            gateway.serves(&all);
            let generation = Some(Generation { epoch: "e".to_owned(), counter });
            gateway.applied.send_replace(generation.clone());
            gateway.acknowledged.send_replace(generation);
            loop {
                match timeout(LONG, messages.recv()).await.unwrap().unwrap() {
                    Message::Report(report) => known += report.services.len(),
                    Message::Acknowledge(found) => {
                        assert_eq!((found.counter, known), (counter, all.len()));
                        break;
                    }
                    Message::Hello(_) | Message::Claims(_) => panic!("that is not ours to say"),
                }
            }
        }
        drop(gateway);
        timeout(LONG, task).await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_refused_is_reported_before_the_generation_is_acknowledged() {
        let (gateway, facts, acknowledged) = Gateway::new();
        let (sender, mut messages) = mpsc::channel(1);
        let task = tokio::spawn(run(facts, acknowledged, sender));
        let generation = |counter| Some(Generation { epoch: "e".to_owned(), counter });
        let forwards_by = |counter, services: &[Arc<ServiceView>]| {
            gateway.serves(services);
            gateway.applied.send_replace(generation(counter));
            gateway.acknowledged.send_replace(generation(counter));
        };
        let mut is_refused = false;
        // Faster than reports that contain only health.
        for counter in 1..=20 {
            forwards_by(counter, &[if counter % 3 == 0 { service("a", true) } else { refused("a") }]);
            loop {
                match timeout(LONG, messages.recv()).await.unwrap().unwrap() {
                    Message::Report(report) => {
                        report.services.iter().for_each(|service| is_refused = service.refusal.is_some());
                    }
                    Message::Acknowledge(found) => {
                        assert_eq!((found.counter, is_refused), (counter, counter % 3 != 0));
                        break;
                    }
                    Message::Hello(_) | Message::Claims(_) => panic!("that is not ours to say"),
                }
            }
        }
        drop(gateway);
        timeout(LONG, task).await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn reports_come_at_most_once_a_second_the_last_is_the_newest_and_silence_is_broken_every_ten() {
        let (gateway, facts, acknowledged) = Gateway::new();
        let (sender, mut messages) = mpsc::channel(1);
        let task = tokio::spawn(run(facts, acknowledged, sender));
        gateway.applied.send_replace(Some(Generation::default()));
        let started = Instant::now();
        for step in 0..100 {
            gateway.serves(&[service("a", step % 2 == 0)]);
            tokio::time::sleep(Duration::from_millis(35)).await;
        }
        let (mut reports, mut without_news) = (Vec::new(), 0);
        while started.elapsed() < 4 * AT_LEAST_EVERY {
            let message = timeout(LONG, messages.recv()).await.unwrap();
            let Some(Message::Report(report)) = message else { panic!("no report") };
            assert!(report.ready);
            if report.services.is_empty() { without_news += 1 } else { reports.push(report.services) }
        }
        assert_eq!(reports.last(), Some(&vec![health("a", 0)]));
        assert!(reports.len() <= 6, "{} reports in 3.5 s", reports.len());
        assert!((3..=4).contains(&without_news), "{without_news} signs of life in 40 s");
        drop(messages);
        timeout(LONG, task).await.unwrap().unwrap();
    }
}
