//! Following Services, EndpointSlices and Nodes: what the controller hears, whatever the API server does.

use std::collections::BTreeSet;
use std::time::Duration;

use control::kubernetes::{connect, follow};
use control::source::Change;
use kube::ResourceExt;
use serde_json::json;
use tokio::sync::mpsc;

use crate::api_server::{ApiServer, Cut, Fault, Kind, Presence, Trap};

/// Longer than any wait that is expected; a test that needs it has failed.
const DEADLINE: Duration = Duration::from_secs(30);

/// Kinds that are followed; each is listed once at the start.
const LISTS: usize = 5;

/// What a receiver of changes ends up knowing.
struct Follower {
    changes: mpsc::Receiver<Change>,
    services: BTreeSet<String>,
    slices: BTreeSet<String>,
    nodes: BTreeSet<String>,
    withdrawn: Vec<String>,
    lists: usize,
}

impl Follower {
    async fn start(server: &ApiServer) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        server.write_kubeconfig(file.path());
        let cluster = connect(Some(file.path())).await.unwrap();
        let (sender, changes) = mpsc::channel(16);
        tokio::spawn(async move { follow(&cluster, sender).await });
        Self {
            changes,
            services: BTreeSet::new(),
            slices: BTreeSet::new(),
            nodes: BTreeSet::new(),
            withdrawn: Vec::new(),
            lists: 0,
        }
    }

    /// Takes changes until the condition holds.
    async fn until(&mut self, what: &str, is_reached: impl Fn(&Self) -> bool) {
        let taken = tokio::time::timeout(DEADLINE, async {
            while !is_reached(self) {
                let change = self.changes.recv().await.unwrap();
                self.take(change);
            }
        });
        if taken.await.is_err() {
            panic!("{what}: still {:?} and {:?} after {DEADLINE:?}", self.services, self.slices);
        }
    }

    fn take(&mut self, change: Change) {
        match change {
            Change::ServicesReplaced(all) => {
                self.lists += 1;
                let all: BTreeSet<_> = all.iter().map(ResourceExt::name_any).collect();
                self.withdrawn.extend(self.services.difference(&all).cloned());
                self.services = all;
            }
            Change::SlicesReplaced(all) => {
                self.lists += 1;
                self.slices = all.iter().map(ResourceExt::name_any).collect();
            }
            Change::NodesReplaced(all) => {
                self.lists += 1;
                self.nodes = all.iter().map(ResourceExt::name_any).collect();
            }
            Change::NamespacesReplaced(_) | Change::PoolsReplaced(_) => self.lists += 1,
            Change::NodeApplied(object) => {
                assert!(self.lists >= LISTS, "a single change before all lists");
                self.nodes.insert(object.name_any());
            }
            Change::NamespaceApplied(_)
            | Change::NamespaceDeleted(_)
            | Change::PoolApplied(_)
            | Change::PoolDeleted(_)
            | Change::Noted(_)
            | Change::OverridesReplaced(_) => {}
            Change::NodeDeleted(name) => {
                self.nodes.remove(&name);
            }
            Change::ServiceApplied(object) => {
                assert!(self.lists >= LISTS, "a single change before all lists");
                self.services.insert(object.name_any());
            }
            Change::SliceApplied(object) => {
                assert!(self.lists >= LISTS, "a single change before all lists");
                self.slices.insert(object.name_any());
            }
            Change::ServiceDeleted(name) => {
                self.services.remove(&name.name);
                self.withdrawn.push(name.name);
            }
            Change::SliceDeleted(name) => {
                self.slices.remove(&name.name);
            }
        }
    }
}

fn add(server: &ApiServer, name: &str) {
    server.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "a"}, "spec": {"ports": [{"port": 80}]}}));
}

fn add_slice(server: &ApiServer, name: &str) {
    let slice = json!({"metadata": {"name": name, "namespace": "a"}, "addressType": "IPv4", "endpoints": null, "ports": null});
    server.create(Kind::EndpointSlice, slice);
}

fn list_fault(fault: Fault, times: usize, path_contains: &'static str) -> Trap {
    Trap { fault, times, method: "GET", path_contains, watch: false }
}

#[tokio::test]
async fn what_there_is_and_what_comes_and_goes_is_heard() {
    let server = ApiServer::start().await;
    add(&server, "first");
    add_slice(&server, "first-1");
    let mut follower = Follower::start(&server).await;
    follower.until("the lists", |f| f.services.contains("first") && f.slices.contains("first-1")).await;
    add(&server, "second");
    add_slice(&server, "second-1");
    follower.until("an added Service", |f| f.services.contains("second") && f.slices.contains("second-1")).await;
    server.create(Kind::Node, json!({"metadata": {"name": "n1"}}));
    follower.until("an added Node", |f| f.nodes.contains("n1")).await;
    server.delete(Kind::Node, "", "n1");
    follower.until("a deleted Node", |f| f.nodes.is_empty()).await;
    server.delete(Kind::Service, "a", "first");
    follower.until("a deleted Service", |f| !f.services.contains("first")).await;
    assert_eq!(follower.withdrawn, ["first"]);
}

#[tokio::test]
async fn a_list_longer_than_a_page_is_complete() {
    let server = ApiServer::start().await;
    for number in 0..1_100 {
        add(&server, &format!("s{number}"));
    }
    let mut follower = Follower::start(&server).await;
    follower.until("all pages", |f| f.services.len() == 1_100).await;
    let pages =
        server.log().iter().filter(|logged| logged.query.contains("limit=500") && logged.path.ends_with("/services")).count();
    assert_eq!(pages, 3);
}

#[tokio::test]
async fn a_watch_that_expires_leads_to_a_new_list_and_loses_nothing() {
    let server = ApiServer::start().await;
    add(&server, "old");
    let mut follower = Follower::start(&server).await;
    follower.until("the lists", |f| f.lists == LISTS).await;
    server.set_presence(Presence::Away).await;
    add(&server, "meanwhile");
    server.delete(Kind::Service, "a", "old");
    server.compact();
    server.set_presence(Presence::There).await;
    follower.until("what happened meanwhile", |f| f.services.contains("meanwhile") && !f.services.contains("old")).await;
}

#[tokio::test]
async fn a_watch_that_ends_is_resumed_where_it_was() {
    let server = ApiServer::start().await;
    let mut follower = Follower::start(&server).await;
    follower.until("the lists", |f| f.lists == LISTS).await;
    for (cut, name) in [(Cut::Clean, "clean"), (Cut::Abort, "abort"), (Cut::Expired, "expired")] {
        server.cut_watches(cut);
        add(&server, name);
        follower.until(name, |f| f.services.contains(name)).await;
    }
    assert!(follower.withdrawn.is_empty());
}

#[tokio::test]
async fn a_list_that_is_expired_or_refused_for_a_while_is_repeated() {
    let server = ApiServer::start().await;
    add(&server, "web");
    for fault in [Fault::Expired, Fault::Internal, Fault::TooMany { retry_after_s: 1 }, Fault::Forbidden] {
        server.trap(list_fault(fault, 1, "/services"));
    }
    server.trap(list_fault(Fault::Forbidden, 1, "/endpointslices"));
    let mut follower = Follower::start(&server).await;
    follower.until("the list after the refusals", |f| f.lists == LISTS && f.services.contains("web")).await;
}

#[tokio::test]
async fn a_server_that_asks_to_be_left_alone_is() {
    let server = ApiServer::start().await;
    server.trap(list_fault(Fault::TooMany { retry_after_s: 2 }, 1, "/services"));
    let mut follower = Follower::start(&server).await;
    let start = std::time::Instant::now();
    follower.until("the lists", |f| f.lists == LISTS).await;
    assert!(start.elapsed() >= Duration::from_millis(1_900), "asked again after {:?}", start.elapsed());
}

#[tokio::test]
async fn a_watch_refused_as_expired_leads_to_a_new_list() {
    let server = ApiServer::start().await;
    server.trap(Trap { fault: Fault::Expired, times: 1, method: "GET", path_contains: "/services", watch: true });
    let mut follower = Follower::start(&server).await;
    follower.until("a second list of Services", |f| f.lists > LISTS).await;
}

#[tokio::test]
async fn slices_that_may_not_be_listed_hold_everything_back_until_they_may() {
    let server = ApiServer::start().await;
    add(&server, "web");
    server.trap(list_fault(Fault::Forbidden, usize::MAX, "/endpointslices"));
    let mut follower = Follower::start(&server).await;
    follower.until("the Services", |f| f.services.contains("web")).await;
    add(&server, "later");
    server.release_traps();
    follower.until("both", |f| f.lists >= LISTS && f.services.contains("later")).await;
}

#[tokio::test]
async fn an_object_that_cannot_be_decoded_is_skipped_and_the_others_are_heard() {
    let server = ApiServer::start().await;
    server
        .put_raw(Kind::Service, json!({"metadata": {"name": "odd", "namespace": "a", "uid": "1"}, "spec": {"ports": "eighty"}}));
    add(&server, "even");
    let mut follower = Follower::start(&server).await;
    follower.until("the good one", |f| f.services.contains("even")).await;
    server.put_raw(Kind::Service, json!({"metadata": {"name": "even", "namespace": "a", "uid": "2"}, "spec": {"ports": 7}}));
    add(&server, "third");
    follower.until("the one after the bad one", |f| f.services.contains("third")).await;
    server.compact();
    server.cut_watches(Cut::Expired);
    add(&server, "fourth");
    follower.until("the one after the new list", |f| f.services.contains("fourth")).await;
    assert!(follower.withdrawn.is_empty(), "{:?}", follower.withdrawn);
    assert!(follower.services.contains("even") && !follower.services.contains("odd"));
}

#[tokio::test]
async fn a_server_that_is_away_at_the_start_and_later_withdraws_nothing() {
    let server = ApiServer::start().await;
    add(&server, "web");
    server.set_presence(Presence::Away).await;
    let mut follower = Follower::start(&server).await;
    server.set_presence(Presence::There).await;
    follower.until("the lists", |f| f.services.contains("web")).await;
    server.set_presence(Presence::Away).await;
    server.set_presence(Presence::There).await;
    add(&server, "next");
    follower.until("the one after the outage", |f| f.services.contains("next")).await;
    assert!(follower.withdrawn.is_empty());
}

#[tokio::test]
async fn a_connection_that_died_silently_is_noticed_within_20_seconds() {
    let server = ApiServer::start().await;
    let mut follower = Follower::start(&server).await;
    follower.until("the lists", |f| f.lists == LISTS).await;
    let watches = || server.log().iter().filter(|logged| logged.is_watch()).count();
    let opened = watch_count_reaches(&watches, LISTS).await;
    server.set_presence(Presence::Silent).await;
    let start = std::time::Instant::now();
    // New connections are answered; those from before stay silent for ever.
    add(&server, "web");
    server.set_presence(Presence::There).await;
    follower.until("the change during the silence", |f| f.services.contains("web")).await;
    assert!(start.elapsed() < Duration::from_secs(20), "noticed after {:?}", start.elapsed());
    assert!(watches() > opened);
}

async fn watch_count_reaches(count: &impl Fn() -> usize, wanted: usize) -> usize {
    let reached = tokio::time::timeout(DEADLINE, async {
        while count() < wanted {
            tokio::task::yield_now().await;
        }
    });
    reached.await.unwrap();
    count()
}
