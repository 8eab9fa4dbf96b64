//! What the gateway tells the controller of itself: whether it is ready, how many backends of each service are healthy, what
//! it refuses, and which generation it forwards by.
//!
//! Invariant: the first report of a stream holds all services, later ones what differs from what was reported before; a
//! report or an acknowledgement is made when the stream takes it, so that a slow controller gets the newest and nothing is queued.
//! Deliberately not here: health itself, which is applied where it is found out (`compile_loop`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dataplane::snapshot::{ServiceView, Views};
use imbl::ordmap::DiffItem;
use proto::convert::reported_refusal;
use proto::v1::watch_request::Message;
use proto::{Generation, Refusal, ServiceName, v1};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::agent::served::{Counts, Served};

/// Shortest time between two reports: conditions of Services change every 30 s at most, and people look once a second.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// A report without news says that the gateway is there.
const AT_LEAST_EVERY: Duration = Duration::from_secs(10);

/// What reports are made from.
#[derive(Clone, Debug)]
pub struct Facts {
    /// What the workers were given.
    pub served: watch::Receiver<Served>,
    /// The generation that every worker forwards by; none before the first.
    pub reached: watch::Receiver<Option<Generation>>,
}

/// What was reported on one stream.
#[derive(Debug, Default)]
struct Reported {
    ready: bool,
    services: Views,
    told: BTreeMap<Arc<ServiceName>, Told>,
}

/// What is told of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told {
    counts: Counts,
    refusal: Option<Refusal>,
}

/// Reports and acknowledges on one stream until it is gone. What is refused of a generation is reported before the generation
/// is acknowledged: else the controller would take the service for served.
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
            changed = facts.served.changed() => {
                if changed.is_err() {
                    return;
                }
                has_news = true;
                continue;
            }
            changed = facts.reached.changed() => {
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
        permit.send(Message::Report(report));
        silent_until = now + AT_LEAST_EVERY;
    }
}

/// Acknowledges the newest generation, and before that reports what is refused otherwise than reported. False: the stream is gone.
async fn acknowledge(
    reported: &mut Reported,
    facts: &Facts,
    acknowledged: &mut watch::Receiver<Option<Generation>>,
    messages: &mpsc::Sender<Message>,
) -> bool {
    let Ok(mut permit) = messages.reserve().await else { return false };
    // Before what is served is looked at: that is then of this generation or a later one.
    let Some(generation) = acknowledged.borrow_and_update().clone() else { return true };
    if reported.refuses_otherwise(&facts.served.borrow().services)
        && let Some(report) = reported.news(&mut facts.clone())
    {
        permit.send(Message::Report(report));
        permit = match messages.reserve().await {
            Ok(permit) => permit,
            Err(_) => return false,
        };
    }
    permit.send(Message::Acknowledge((&generation).into()));
    true
}

/// What is told of a service, without what an operator sees beside it.
fn told(view: &ServiceView) -> Told {
    Told { counts: Counts::from(view), refusal: view.refusal.clone() }
}

impl Reported {
    /// Whether any service is refused now that was not, or for another reason, or the other way round. What did not change is
    /// not looked at.
    fn refuses_otherwise(&self, services: &Views) -> bool {
        self.services.diff(services).any(|item| match item {
            DiffItem::Add(name, view) | DiffItem::Update { new: (name, view), .. } => {
                self.told.get(name).and_then(|told| told.refusal.as_ref()) != view.refusal.as_ref()
            }
            DiffItem::Remove(..) => false,
        })
    }

    /// What is not reported yet; nothing of it, none. What did not change is not looked at.
    fn news(&mut self, facts: &mut Facts) -> Option<v1::Report> {
        let served = facts.served.borrow_and_update().clone();
        let ready = served.ready && facts.reached.borrow_and_update().is_some();
        let (mut changed, mut removed) = (Vec::new(), Vec::new());
        for item in self.services.diff(&served.services) {
            match item {
                DiffItem::Add(name, view) | DiffItem::Update { new: (name, view), .. } => {
                    let told = told(view);
                    if self.told.get(name) != Some(&told) {
                        let Counts { backends, healthy } = told.counts;
                        let refusal = told.refusal.as_ref().map(reported_refusal);
                        changed.push(v1::ServiceHealth { service: name.to_string(), backends, healthy, refusal });
                        self.told.insert(Arc::clone(name), told);
                    }
                }
                DiffItem::Remove(name, _) => {
                    self.told.remove(name);
                    removed.push(name.to_string());
                }
            }
        }
        self.services = served.services;
        let is_news = ready != self.ready || !changed.is_empty() || !removed.is_empty();
        self.ready = ready;
        is_news.then_some(v1::Report { ready, services: changed, removed })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::Reason;
    use tokio::time::timeout;

    use super::*;
    use crate::admin::tests::web;

    const LONG: Duration = Duration::from_secs(120);

    /// A service of two backends, one of them healthy or none.
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

    /// A service that is refused.
    fn refused(name: &str) -> Arc<ServiceView> {
        let refusal = Refusal { reason: Reason::Refused, message: "no SNAT address".to_owned() };
        Arc::new(ServiceView { refusal: Some(refusal), ..ServiceView::clone(&service(name, true)) })
    }

    /// The channels that facts come from.
    struct Gateway {
        served: watch::Sender<Served>,
        reached: watch::Sender<Option<Generation>>,
        acknowledged: watch::Sender<Option<Generation>>,
    }

    impl Gateway {
        fn new() -> (Self, Facts, watch::Receiver<Option<Generation>>) {
            let (served, served_in) = watch::channel(Served::default());
            let (reached, reached_in) = watch::channel(None);
            let (acknowledged, acknowledged_in) = watch::channel(None);
            (Self { served, reached, acknowledged }, Facts { served: served_in, reached: reached_in }, acknowledged_in)
        }

        fn serves(&self, services: &[Arc<ServiceView>]) {
            self.served.send_replace(Served { ready: true, services: views(services) });
        }
    }

    #[test]
    fn first_everything_is_reported_and_then_what_differs() {
        let (gateway, mut facts, _) = Gateway::new();
        let mut reported = Reported::default();
        assert_eq!(reported.news(&mut facts), None);
        let [a, b] = [service("a", true), service("b", true)];
        gateway.reached.send_replace(Some(Generation::default()));
        gateway.serves(&[Arc::clone(&a), Arc::clone(&b)]);
        let first = reported.news(&mut facts).unwrap();
        assert_eq!((first.ready, first.services, first.removed.len()), (true, vec![health("a", 1), health("b", 1)], 0));
        gateway.serves(&[Arc::clone(&a), service("b", true)]);
        assert_eq!(reported.news(&mut facts), None, "another view of the same");
        gateway.serves(&[service("a", false)]);
        let second = reported.news(&mut facts).unwrap();
        assert_eq!((second.services, second.removed), (vec![health("a", 0)], vec!["default/b".to_owned()]));
        gateway.reached.send_replace(None);
        let third = reported.news(&mut facts).unwrap();
        assert_eq!((third.ready, third.services.len()), (false, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_refused_is_reported_before_the_generation_is_acknowledged() {
        let (gateway, facts, acknowledged) = Gateway::new();
        let (sender, mut messages) = mpsc::channel(1);
        let task = tokio::spawn(run(facts, acknowledged, sender));
        let generation = |counter| Some(Generation { epoch: "e".to_owned(), counter });
        let forwards_by = |counter, services: &[Arc<ServiceView>]| {
            gateway.serves(services);
            gateway.reached.send_replace(generation(counter));
            gateway.acknowledged.send_replace(generation(counter));
        };
        let mut is_refused = false;
        // Faster than reports come that are of health alone.
        for counter in 1..=20 {
            forwards_by(counter, &[if counter % 3 == 0 { service("a", true) } else { refused("a") }]);
            loop {
                match timeout(LONG, messages.recv()).await.unwrap().unwrap() {
                    Message::Report(report) => {
                        report.services.iter().for_each(|told| is_refused = told.refusal.is_some());
                    }
                    Message::Acknowledge(found) => {
                        assert_eq!((found.counter, is_refused), (counter, counter % 3 != 0));
                        break;
                    }
                    Message::Hello(_) => panic!("hello is not ours to say"),
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
        gateway.reached.send_replace(Some(Generation::default()));
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
