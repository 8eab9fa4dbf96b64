//! Watches of Services, EndpointSlices, Nodes, namespaces and pools: the changes that the controller receives, also
//! when the API server fails.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use control::kubernetes::{Following, follow};
use control::world::change::Change;
use kube::ResourceExt;
use objects::ReadSlice;
use serde_json::json;
use tokio::sync::mpsc;

use crate::api_server::{ApiServer, Availability, Fault, FaultRule, Kind, WatchEnd};
use crate::user::{DEADLINE, connect_to};

/// Number of watched kinds. Each is listed once at the start.
const LISTS: usize = 5;

/// The state that the received changes add up to.
struct Reflector {
    changes: mpsc::Receiver<Change>,
    services: BTreeSet<String>,
    slices: BTreeSet<String>,
    nodes: BTreeSet<String>,
    pools: BTreeSet<String>,
    /// Namespaces that are being deleted.
    terminating: BTreeSet<String>,
    /// Names of Services that were deleted, or were missing in a new list.
    deleted_services: Vec<String>,
    /// The notes for owners: object and cause.
    notes: Vec<(String, &'static str)>,
    lists: usize,
}

impl Reflector {
    async fn start(server: &ApiServer) -> Self {
        let cluster = connect_to(server).await;
        let (sender, changes) = mpsc::channel(16);
        tokio::spawn(follow(Following::new(Arc::new(cluster), sender)));
        Self {
            changes,
            services: BTreeSet::new(),
            slices: BTreeSet::new(),
            nodes: BTreeSet::new(),
            pools: BTreeSet::new(),
            terminating: BTreeSet::new(),
            deleted_services: Vec::new(),
            notes: Vec::new(),
            lists: 0,
        }
    }

    /// Applies changes until the condition holds.
    async fn until(&mut self, what: &str, is_reached: impl Fn(&Self) -> bool) {
        let applied = tokio::time::timeout(DEADLINE, async {
            while !is_reached(self) {
                let change = self.changes.recv().await.unwrap();
                self.apply(change);
            }
        });
        if applied.await.is_err() {
            panic!("{what}: still {:?} and {:?} after {DEADLINE:?}", self.services, self.slices);
        }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::ServicesReplaced(all) => {
                self.lists += 1;
                let all: BTreeSet<_> = all.into_iter().map(|service| service.name.name).collect();
                self.deleted_services.extend(self.services.difference(&all).cloned());
                self.services = all;
            }
            Change::SlicesReplaced(all) => {
                self.lists += 1;
                self.slices = all.iter().filter_map(name_of_slice).collect();
            }
            Change::NodesReplaced(all) => {
                self.lists += 1;
                self.nodes = all.iter().map(ResourceExt::name_any).collect();
            }
            Change::NamespacesReplaced(_) => self.lists += 1,
            Change::PoolsReplaced(all) => {
                self.lists += 1;
                self.pools = all.iter().map(ResourceExt::name_any).collect();
            }
            Change::NodeApplied(object) => {
                assert!(self.lists >= LISTS, "an event arrived before all lists");
                self.nodes.insert(object.name_any());
            }
            Change::NamespaceApplied(object) => {
                if object.metadata.deletion_timestamp.is_some() {
                    self.terminating.insert(object.name_any());
                }
            }
            Change::GatewaysReplaced(_)
            | Change::CheckpointReplaced(_)
            | Change::NamespaceDeleted(_)
            | Change::PoolApplied(_)
            | Change::PoolDeleted(_)
            | Change::OverridesReplaced(_) => {}
            Change::Noted(note) => self.notes.push((note.subject.to_string(), note.remark.cause.as_str())),
            Change::NodeDeleted(name) => {
                self.nodes.remove(&name);
            }
            Change::ServiceApplied(object) => {
                assert!(self.lists >= LISTS, "an event arrived before all lists");
                self.services.insert(object.name.name);
            }
            Change::SliceApplied(object) => {
                assert!(self.lists >= LISTS, "an event arrived before all lists");
                self.slices.extend(name_of_slice(&object));
            }
            Change::ServiceDeleted(name) => {
                self.services.remove(&name.name);
                self.deleted_services.push(name.name);
            }
            Change::SliceDeleted(name) => {
                self.slices.remove(&name.name);
            }
        }
    }
}

fn name_of_slice(ReadSlice(slice): &ReadSlice) -> Option<String> {
    slice.as_ref().map(|slice| slice.name.name.clone()).ok()
}

fn add(server: &ApiServer, name: &str) {
    server.create(Kind::Service, json!({"metadata": {"name": name, "namespace": "a"}, "spec": {"ports": [{"port": 80}]}}));
}

fn add_slice(server: &ApiServer, name: &str) {
    let metadata = json!({"name": name, "namespace": "a", "labels": {"kubernetes.io/service-name": "web"}});
    let slice = json!({"metadata": metadata, "addressType": "IPv4", "endpoints": null, "ports": null});
    server.create(Kind::EndpointSlice, slice);
}

fn list_fault(fault: Fault, times: usize, path_contains: &'static str) -> FaultRule {
    FaultRule { fault, times, method: "GET", path_contains, watch: false }
}

#[tokio::test]
async fn existing_added_and_deleted_objects_are_received() {
    let server = ApiServer::start().await;
    add(&server, "first");
    add_slice(&server, "first-1");
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.services.contains("first") && f.slices.contains("first-1")).await;
    add(&server, "second");
    add_slice(&server, "second-1");
    reflector.until("an added Service", |f| f.services.contains("second") && f.slices.contains("second-1")).await;
    server.create(Kind::Node, json!({"metadata": {"name": "n1"}}));
    reflector.until("an added Node", |f| f.nodes.contains("n1")).await;
    server.delete(Kind::Node, "", "n1");
    reflector.until("a deleted Node", |f| f.nodes.is_empty()).await;
    server.delete(Kind::Service, "a", "first");
    reflector.until("a deleted Service", |f| !f.services.contains("first")).await;
    assert_eq!(reflector.deleted_services, ["first"]);
}

#[tokio::test]
async fn a_list_longer_than_a_page_is_complete() {
    let server = ApiServer::start().await;
    for number in 0..1_100 {
        add(&server, &format!("s{number}"));
    }
    let mut reflector = Reflector::start(&server).await;
    reflector.until("all pages", |f| f.services.len() == 1_100).await;
    let pages =
        server.log().iter().filter(|logged| logged.query.contains("limit=500") && logged.path.ends_with("/services")).count();
    assert_eq!(pages, 3);
}

/// Number of requests for a list of Services.
fn lists_of_services(server: &ApiServer) -> usize {
    server.log().iter().filter(|logged| logged.path.ends_with("/services") && !logged.is_watch()).count()
}

#[tokio::test]
async fn a_list_restarts_after_an_expired_page() {
    let server = ApiServer::start().await;
    for number in 0..600 {
        add(&server, &format!("s{number}"));
    }
    server.compact_before_next_page();
    let mut reflector = Reflector::start(&server).await;
    reflector.until("all Services", |f| f.services.len() == 600).await;
    assert_eq!(lists_of_services(&server), 4, "two pages, of which the second expired, and two new ones");
}

#[tokio::test]
async fn a_watch_resumes_from_its_last_bookmark() {
    let server = ApiServer::start().await;
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    let watches = || server.log().iter().filter(|logged| logged.is_watch()).count();
    watch_count_reaches(&watches, LISTS).await;
    let listed = lists_of_services(&server);
    // The versions of the lists expire. A watch that got the bookmark with the newer version needs no new list.
    server.compact_and_bookmark();
    server.end_watches(WatchEnd::Complete);
    add(&server, "next");
    reflector.until("the change after it", |f| f.services.contains("next")).await;
    assert_eq!((lists_of_services(&server), reflector.lists), (listed, LISTS));
}

#[tokio::test]
async fn a_missing_kind_delays_nothing_and_is_found_once_it_is_installed() {
    let server = ApiServer::start().await;
    server.set_installed(Kind::AddressPool, false);
    add(&server, "web");
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    add(&server, "next");
    reflector.until("changes", |f| f.services.contains("next")).await;
    server.set_installed(Kind::AddressPool, true);
    server.create(Kind::AddressPool, json!({"metadata": {"name": "p"}, "spec": {"addresses": ["192.0.2.0/24"]}}));
    reflector.until("the pool", |f| f.pools.contains("p")).await;
}

#[tokio::test]
async fn a_deleted_namespace_removes_its_services_once_its_pods_have_ended() {
    let server = ApiServer::start().await;
    add(&server, "web");
    add_slice(&server, "web-1");
    server.create(Kind::Pod, json!({"metadata": {"name": "p", "namespace": "a"}, "spec": {"nodeName": "n1"}}));
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    server.delete(Kind::Namespace, "", "a");
    reflector.until("the deletion of the namespace", |f| f.terminating.contains("a")).await;
    assert!(reflector.services.contains("web"), "Services stay while a Pod is ending");
    server.end_pod("a", "p");
    reflector.until("nothing is left", |f| f.services.is_empty() && f.slices.is_empty()).await;
}

#[tokio::test]
async fn a_wrong_clock_of_the_server_has_no_effect() {
    let server = ApiServer::start().await;
    server.set_time("2099-01-01T00:00:00Z");
    add(&server, "web");
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS && f.services.contains("web")).await;
    server.set_time("1999-01-01T00:00:00Z");
    add(&server, "next");
    reflector.until("an added Service", |f| f.services.contains("next")).await;
    server.delete(Kind::Service, "a", "web");
    reflector.until("a deleted Service", |f| !f.services.contains("web")).await;
}

#[tokio::test]
async fn a_server_restart_with_retry_after_withdraws_nothing() {
    let server = ApiServer::start().await;
    add(&server, "web");
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    server.set_availability(Availability::Down).await;
    server.compact();
    for watch in [false, true] {
        let fault = Fault::Starting { retry_after_s: 1 };
        server.inject(FaultRule { fault, times: LISTS, method: "GET", path_contains: "/api", watch });
    }
    server.set_availability(Availability::Up).await;
    add(&server, "next");
    reflector.until("the Service after the restart", |f| f.services.contains("next")).await;
    assert!(reflector.deleted_services.is_empty(), "{:?}", reflector.deleted_services);
}

#[tokio::test]
async fn a_token_that_expires_and_is_renewed_withdraws_nothing() {
    let server = ApiServer::start().await;
    add(&server, "web");
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    for watch in [false, true] {
        server.inject(FaultRule { fault: Fault::Unauthorized, times: LISTS, method: "GET", path_contains: "/api", watch });
    }
    server.end_watches(WatchEnd::Aborted);
    add(&server, "next");
    reflector.until("the Service after the renewal", |f| f.services.contains("next")).await;
    assert!(reflector.deleted_services.is_empty(), "{:?}", reflector.deleted_services);
}

#[tokio::test]
async fn an_expired_watch_causes_a_new_list_and_loses_no_change() {
    let server = ApiServer::start().await;
    add(&server, "old");
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    server.set_availability(Availability::Down).await;
    add(&server, "meanwhile");
    server.delete(Kind::Service, "a", "old");
    server.compact();
    server.set_availability(Availability::Up).await;
    reflector.until("the changes during the outage", |f| f.services.contains("meanwhile") && !f.services.contains("old")).await;
}

#[tokio::test]
async fn a_watch_that_ends_is_resumed_at_its_version() {
    let server = ApiServer::start().await;
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    for (cut, name) in [(WatchEnd::Complete, "clean"), (WatchEnd::Aborted, "abort"), (WatchEnd::Expired, "expired")] {
        server.end_watches(cut);
        add(&server, name);
        reflector.until(name, |f| f.services.contains(name)).await;
    }
    assert!(reflector.deleted_services.is_empty());
}

#[tokio::test]
async fn lists_are_retried_after_errors() {
    let server = ApiServer::start().await;
    add(&server, "web");
    for fault in [Fault::Expired, Fault::Internal, Fault::TooMany { retry_after_s: 1 }, Fault::Forbidden] {
        server.inject(list_fault(fault, 1, "/services"));
    }
    server.inject(list_fault(Fault::Forbidden, 1, "/endpointslices"));
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the list after the refusals", |f| f.lists == LISTS && f.services.contains("web")).await;
}

#[tokio::test]
async fn retry_after_is_obeyed() {
    let server = ApiServer::start().await;
    server.inject(list_fault(Fault::TooMany { retry_after_s: 2 }, 1, "/services"));
    let mut reflector = Reflector::start(&server).await;
    let start = std::time::Instant::now();
    reflector.until("the lists", |f| f.lists == LISTS).await;
    assert!(start.elapsed() >= Duration::from_millis(1_900), "the next request came after {:?}", start.elapsed());
}

#[tokio::test]
async fn a_watch_that_is_refused_as_expired_causes_a_new_list() {
    let server = ApiServer::start().await;
    server.inject(FaultRule { fault: Fault::Expired, times: 1, method: "GET", path_contains: "/services", watch: true });
    let mut reflector = Reflector::start(&server).await;
    reflector.until("a second list of Services", |f| f.lists > LISTS).await;
}

#[tokio::test]
async fn lists_are_incomplete_until_slices_may_be_listed() {
    let server = ApiServer::start().await;
    add(&server, "web");
    server.inject(list_fault(Fault::Forbidden, usize::MAX, "/endpointslices"));
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the Services", |f| f.services.contains("web")).await;
    add(&server, "later");
    server.clear_faults();
    reflector.until("both", |f| f.lists >= LISTS && f.services.contains("later")).await;
}

#[tokio::test]
async fn an_object_that_cannot_be_decoded_is_skipped_and_the_others_are_received() {
    let server = ApiServer::start().await;
    server
        .put_raw(Kind::Service, json!({"metadata": {"name": "odd", "namespace": "a", "uid": "1"}, "spec": {"ports": "eighty"}}));
    add(&server, "even");
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the valid object", |f| f.services.contains("even")).await;
    server.put_raw(Kind::Service, json!({"metadata": {"name": "even", "namespace": "a", "uid": "2"}, "spec": {"ports": 7}}));
    add(&server, "third");
    reflector.until("the object after the invalid one", |f| f.services.contains("third")).await;
    server.compact();
    server.end_watches(WatchEnd::Expired);
    add(&server, "fourth");
    reflector.until("the Service after the new list", |f| f.services.contains("fourth")).await;
    assert!(reflector.deleted_services.is_empty(), "{:?}", reflector.deleted_services);
    assert!(reflector.services.contains("even") && !reflector.services.contains("odd"));
    let expected = ["Service a/odd", "Service a/even"].map(|object| (object.to_owned(), "Undecodable"));
    assert_eq!(reflector.notes, expected, "one note per object, although it was listed again");
}

#[tokio::test]
async fn outages_of_the_server_withdraw_nothing() {
    let server = ApiServer::start().await;
    add(&server, "web");
    server.set_availability(Availability::Down).await;
    let mut reflector = Reflector::start(&server).await;
    server.set_availability(Availability::Up).await;
    reflector.until("the lists", |f| f.services.contains("web")).await;
    server.set_availability(Availability::Down).await;
    server.set_availability(Availability::Up).await;
    add(&server, "next");
    reflector.until("the Service after the outage", |f| f.services.contains("next")).await;
    assert!(reflector.deleted_services.is_empty());
}

#[tokio::test]
async fn a_silent_connection_is_detected_long_before_the_295_seconds_of_kube() {
    let server = ApiServer::start().await;
    let mut reflector = Reflector::start(&server).await;
    reflector.until("the lists", |f| f.lists == LISTS).await;
    let watches = || server.log().iter().filter(|logged| logged.is_watch()).count();
    watch_count_reaches(&watches, LISTS).await;
    server.set_availability(Availability::Silent).await;
    let since = server.log().len();
    // New connections are answered; the existing ones stay silent.
    add(&server, "web");
    server.set_availability(Availability::Up).await;
    reflector.until("the change during the silence", |f| f.services.contains("web")).await;
    // The short watches detect the silent server and restart the long ones.
    let kinds = || {
        let log = server.log();
        log[since..].iter().filter(|logged| logged.is_watch()).map(|logged| &logged.path).collect::<BTreeSet<_>>().len()
    };
    watch_count_reaches(&kinds, LISTS).await;
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
