//! What the gateway tells the controller of itself: whether it is ready, and how many backends of each service are healthy.
//!
//! Invariant: the first report of a stream holds all services, later ones what differs from what was reported before; a
//! report is made when the stream takes it, so that a slow controller gets the newest and nothing is queued.
//! Deliberately not here: health itself, which is applied where it is found out (`compile_loop`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use dataplane::snapshot::Views;
use imbl::ordmap::DiffItem;
use proto::v1::watch_request::Message;
use proto::{Generation, ServiceName, v1};
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

use super::served::{Counts, Served};

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
    counts: BTreeMap<Arc<ServiceName>, Counts>,
}

/// Reports on one stream until it is gone.
pub(super) async fn run(mut facts: Facts, messages: mpsc::Sender<Message>) {
    let mut reported = Reported::default();
    let mut is_due = false;
    loop {
        let Ok(permit) = messages.reserve().await else { return };
        let served = facts.served.borrow_and_update().clone();
        let is_ready = served.ready && facts.reached.borrow_and_update().is_some();
        match reported.news(&served.services, is_ready) {
            Some(report) => {
                permit.send(Message::Report(report));
                tokio::select! {
                    () = messages.closed() => return,
                    () = sleep(AT_MOST_EVERY) => {}
                }
            }
            None if is_due => permit.send(Message::Report(v1::Report { ready: is_ready, ..v1::Report::default() })),
            None => drop(permit),
        }
        is_due = false;
        tokio::select! {
            () = messages.closed() => return,
            () = sleep(AT_LEAST_EVERY) => is_due = true,
            changed = facts.served.changed() => if changed.is_err() { return },
            changed = facts.reached.changed() => if changed.is_err() { return },
        }
    }
}

impl Reported {
    /// What is not reported yet; nothing of it, none. What did not change is not looked at.
    fn news(&mut self, services: &Views, ready: bool) -> Option<v1::Report> {
        let (mut changed, mut removed) = (Vec::new(), Vec::new());
        for item in self.services.diff(services) {
            match item {
                DiffItem::Add(name, view) | DiffItem::Update { new: (name, view), .. } => {
                    let counts = Counts::from(&**view);
                    if self.counts.insert(Arc::clone(name), counts) != Some(counts) {
                        let Counts { backends, healthy } = counts;
                        changed.push(v1::ServiceHealth { service: name.to_string(), backends, healthy });
                    }
                }
                DiffItem::Remove(name, _) => {
                    self.counts.remove(name);
                    removed.push(name.to_string());
                }
            }
        }
        self.services = services.clone();
        let is_news = ready != self.ready || !changed.is_empty() || !removed.is_empty();
        self.ready = ready;
        is_news.then_some(v1::Report { ready, services: changed, removed })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dataplane::snapshot::ServiceView;
    use tokio::time::{Instant, timeout};

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
        v1::ServiceHealth { service: format!("default/{name}"), backends: 2, healthy }
    }

    #[test]
    fn first_everything_is_reported_and_then_what_differs() {
        let mut reported = Reported::default();
        assert_eq!(reported.news(&Views::new(), false), None);
        let [a, b] = [service("a", true), service("b", true)];
        let first = reported.news(&views(&[Arc::clone(&a), Arc::clone(&b)]), true).unwrap();
        assert_eq!((first.ready, first.services, first.removed.len()), (true, vec![health("a", 1), health("b", 1)], 0));
        assert_eq!(reported.news(&views(&[Arc::clone(&a), service("b", true)]), true), None, "another view of the same");
        let second = reported.news(&views(&[service("a", false)]), true).unwrap();
        assert_eq!((second.services, second.removed), (vec![health("a", 0)], vec!["default/b".to_owned()]));
        let third = reported.news(&views(&[service("a", false)]), false).unwrap();
        assert_eq!((third.ready, third.services.len()), (false, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn reports_come_at_most_once_a_second_the_last_is_the_newest_and_silence_is_broken_every_ten() {
        let (served, served_in) = watch::channel(Served::default());
        let (reached, reached_in) = watch::channel(None);
        let (sender, mut messages) = mpsc::channel(1);
        let task = tokio::spawn(run(Facts { served: served_in, reached: reached_in }, sender));
        reached.send_replace(Some(Generation::default()));
        let started = Instant::now();
        for step in 0..100 {
            served.send_replace(Served { ready: true, services: views(&[service("a", step % 2 == 0)]) });
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
