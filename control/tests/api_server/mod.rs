//! A small API server over loopback HTTP, for tests only. To clients that list, watch and write the kinds of `kind.rs`
//! it behaves like a recorded kube-apiserver 1.36.2.
//!
//! **Invariant.** It answers unknown requests with 501, so that no test depends on something that only this server
//! does. Its cache of roles is empty at the start, like that of a real server: see `accounts`. Deliberately not here:
//! other resources, selectors other than for one name, JSON patches, server-side apply, admission that changes objects,
//! and controllers; admission refuses the objects that a test names. Two controllers are simulated: one empties namespaces, the other makes EndpointSlices for the Pods that a Service
//! selects. Where there are no Pods, tests write EndpointSlices.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod accounts;
mod clock;
mod http;
mod item_texts;
mod kind;
mod list;
mod managed_fields;
mod merge;
mod objects;
mod request;
mod responses;
mod service;
mod slice_controller;
mod store;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use serde_json::{Value, json};
use tokio::net::TcpListener;

use accounts::Accounts;
#[allow(unused_imports)] // used by some tests only
pub use accounts::{ADMIN, Account, Attributes, Grant};
use clock::Clock;
pub use kind::Kind;
use store::{Change, ObjectKey, Part, Store};

/// A received request.
#[derive(Clone, Debug)]
pub struct LoggedRequest {
    pub at: Instant,
    /// Empty if the server does not know the user.
    pub user: String,
    /// `None` if the server does not know the path.
    pub attributes: Option<Attributes>,
    pub method: String,
    pub path: String,
    pub query: String,
    pub content_type: String,
    pub body: String,
}

impl LoggedRequest {
    pub fn is_watch(&self) -> bool {
        self.query.split('&').any(|pair| pair == "watch=1" || pair == "watch=true")
    }
}

/// An error that some requests get instead of their response.
#[derive(Clone, Debug)]
pub enum Fault {
    /// 429 in plain text, with Retry-After.
    TooMany { retry_after_s: u32 },
    /// 503 in plain text, with Retry-After, as during start-up.
    Starting { retry_after_s: u32 },
    /// 401: the token is no longer valid.
    Unauthorized,
    /// 403 from RBAC.
    Forbidden,
    /// 500 with a Status.
    Internal,
    /// 410 with a Status.
    Expired,
    /// 404 in plain text, as from a proxy that does not know the path.
    PageNotFound,
    /// 409 with a Status, as after a concurrent write.
    Conflict,
    /// 422 with a Status with this message.
    Invalid(String),
}

/// A fault, and the requests that get it instead of their response.
#[derive(Clone, Debug)]
pub struct FaultRule {
    pub fault: Fault,
    /// Number of requests that still get it.
    pub times: usize,
    pub method: &'static str,
    pub path_contains: &'static str,
    pub watch: bool,
}

/// How open watches end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchEnd {
    /// With a last chunk, as at the timeout.
    Complete,
    /// Without a last chunk, as when the server is killed.
    Aborted,
    /// With an `ERROR` event of code 410.
    Expired,
}

/// Whether the server answers requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// It answers.
    Up,
    /// It closes every connection at once.
    Down,
    /// It keeps existing connections open and never answers on them again, as behind a broken link.
    Silent,
}

struct Shared {
    store: Mutex<Store>,
    revision: tokio::sync::watch::Sender<u64>,
    watch_end: tokio::sync::watch::Sender<Option<WatchEnd>>,
    bookmarks: tokio::sync::watch::Sender<()>,
    /// Kinds whose events wait.
    held_back: Mutex<BTreeSet<Kind>>,
    availability: tokio::sync::watch::Sender<Availability>,
    /// Number of connections that are served.
    connections: tokio::sync::watch::Sender<usize>,
    accounts: Mutex<Accounts>,
    not_installed: Mutex<BTreeSet<Kind>>,
    /// Objects whose writes admission refuses, with its message.
    refused: Mutex<BTreeMap<(Kind, String), String>>,
    faults: Mutex<Vec<FaultRule>>,
    log: Mutex<Vec<LoggedRequest>>,
    /// When the last event of each kind was handed to the connection of a watch, which sends it at once.
    events_sent: Mutex<BTreeMap<Kind, SystemTime>>,
}

/// The running server. It stops when its runtime ends.
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl ApiServer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            store: Mutex::new(Store::new()),
            revision: tokio::sync::watch::Sender::new(0),
            watch_end: tokio::sync::watch::Sender::new(None),
            bookmarks: tokio::sync::watch::Sender::new(()),
            held_back: Mutex::default(),
            availability: tokio::sync::watch::Sender::new(Availability::Up),
            connections: tokio::sync::watch::Sender::new(0),
            accounts: Mutex::new(Accounts::new()),
            not_installed: Mutex::default(),
            refused: Mutex::default(),
            faults: Mutex::default(),
            log: Mutex::default(),
            events_sent: Mutex::default(),
        });
        tokio::spawn(http::serve(listener, shared.clone()));
        tokio::spawn(slice_controller::run(shared.clone()));
        let server = Self { shared, address };
        // Events about cluster-scoped objects are in this namespace.
        server.create(Kind::Namespace, json!({"metadata": {"name": "default"}}));
        server
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Writes a kubeconfig for this server with all rights.
    pub fn write_kubeconfig(&self, file: &Path) {
        self.write_kubeconfig_of(ADMIN, file);
    }

    /// Writes a kubeconfig for this server with a token.
    pub fn write_kubeconfig_of(&self, token: &str, file: &Path) {
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\nclusters: [{{name: test, cluster: {{server: \"{}\"}}}}]\n\
             users: [{{name: test, user: {{token: {token}}}}}]\n\
             contexts: [{{name: test, context: {{cluster: test, user: test}}}}]\n",
            self.url()
        );
        std::fs::write(file, text).unwrap();
    }

    /// Registers the user of a token.
    pub fn add_account(&self, token: &str, account: Account) {
        self.shared.accounts.lock().unwrap().add_account(token, account);
    }

    /// Removes a custom kind with all its objects, like the deletion of its definition, or restores it.
    pub fn set_installed(&self, kind: Kind, is_installed: bool) {
        self.shared.set_installed(kind, is_installed);
    }

    /// Lets admission refuse every write of the objects of this kind and name, like a policy with this message.
    pub fn refuse(&self, kind: Kind, name: &str, message: &str) {
        self.shared.refused.lock().unwrap().insert((kind, name.to_owned()), message.to_owned());
    }

    /// Lets admission accept them again.
    pub fn accept(&self, kind: Kind, name: &str) {
        self.shared.refused.lock().unwrap().remove(&(kind, name.to_owned()));
    }

    /// Removes the user of a token, like the end of a bound token.
    pub fn remove_account(&self, token: &str) {
        self.shared.accounts.lock().unwrap().remove_account(token);
    }

    /// Sets the server's clock; RFC 3339 with seconds.
    pub fn set_time(&self, time: &str) {
        self.change(|store| store.clock = Clock::at(time));
    }

    /// Creates an object like POST, and its namespace if there is none.
    pub fn create(&self, kind: Kind, object: Value) -> Value {
        let (namespace, _) = names(&object);
        if kind.is_namespaced() && self.get(Kind::Namespace, "", &namespace).is_none() {
            self.create(Kind::Namespace, json!({"metadata": {"name": namespace}}));
        }
        self.change(|store| store.create(kind, object, "test")).unwrap()
    }

    /// Changes spec and metadata of an object by a merge patch.
    pub fn update(&self, kind: Kind, namespace: &str, name: &str, patch: &Value) -> Value {
        self.patch(kind, namespace, name, patch, Part::Main, "test")
    }

    /// Changes the status of an object by a merge patch, as another writer.
    pub fn update_status(&self, kind: Kind, namespace: &str, name: &str, patch: &Value, manager: &str) -> Value {
        self.patch(kind, namespace, name, patch, Part::Status, manager)
    }

    fn patch(&self, kind: Kind, namespace: &str, name: &str, patch: &Value, part: Part, manager: &str) -> Value {
        let change = Change { body: patch, strategy: Some(merge::Strategy::Merge), part, manager };
        self.change(|store| store.change(&ObjectKey::new(kind, namespace, name), &change)).unwrap()
    }

    /// Deletes an object like DELETE.
    pub fn delete(&self, kind: Kind, namespace: &str, name: &str) {
        self.change(|store| store.delete(&ObjectKey::new(kind, namespace, name), true)).unwrap();
    }

    /// Ends a Pod as its kubelet does once its containers have stopped.
    pub fn end_pod(&self, namespace: &str, name: &str) {
        self.change(|store| store.delete(&ObjectKey::new(Kind::Pod, namespace, name), false)).unwrap();
    }

    /// Stores an object without validation.
    pub fn put_raw(&self, kind: Kind, object: Value) {
        self.change(|store| store.put_raw(kind, object));
    }

    /// Objects of a kind, ordered by namespace and name. An empty namespace selects all namespaces.
    pub fn list(&self, kind: Kind, namespace: &str) -> Vec<Value> {
        self.shared.store.lock().unwrap().list(kind, namespace).into_iter().cloned().collect()
    }

    /// When the object was created, on the clock of the log.
    pub fn added_at(&self, kind: Kind, namespace: &str, name: &str) -> Option<Instant> {
        self.shared.store.lock().unwrap().added_at(&ObjectKey::new(kind, namespace, name))
    }

    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.shared.store.lock().unwrap().get(&ObjectKey::new(kind, namespace, name)).ok().cloned()
    }

    /// Discards the history: watches from earlier versions are expired.
    pub fn compact(&self) {
        self.shared.store.lock().unwrap().compact();
    }

    /// Sends a bookmark to every watch that requested bookmarks.
    pub fn send_bookmarks(&self) {
        self.shared.bookmarks.send_replace(());
    }

    /// Discards the history after the first page of a list, so that the request for the second page is expired.
    pub fn compact_before_next_page(&self) {
        self.shared.store.lock().unwrap().compact_before_next_page = true;
    }

    /// Discards the history and, in the same step, sends every watch a version from which it can resume.
    pub fn compact_and_bookmark(&self) {
        let mut store = self.shared.store.lock().unwrap();
        store.compact();
        drop(store);
        self.send_bookmarks();
    }

    /// Holds back the events of a kind from all watches, or sends those that wait.
    pub fn hold_back(&self, kind: Kind, is_held: bool) {
        let mut held_back = self.shared.held_back.lock().unwrap();
        if is_held {
            held_back.insert(kind)
        } else {
            held_back.remove(&kind)
        };
        drop(held_back);
        self.shared.revision.send_modify(|_| {});
    }

    pub fn end_watches(&self, end: WatchEnd) {
        self.shared.watch_end.send_replace(Some(end));
    }

    /// Returns at once if the server is up, otherwise once no connection is served.
    pub async fn set_availability(&self, availability: Availability) {
        self.shared.availability.send_replace(availability);
        if availability != Availability::Up {
            self.shared.connections.subscribe().wait_for(|connections| *connections == 0).await.unwrap();
        }
    }

    /// The next matching requests get the fault.
    pub fn inject(&self, rule: FaultRule) {
        self.shared.faults.lock().unwrap().push(rule);
    }

    pub fn clear_faults(&self) {
        self.shared.faults.lock().unwrap().clear();
    }

    pub fn log(&self) -> Vec<LoggedRequest> {
        self.shared.log.lock().unwrap().clone()
    }

    /// When the last event of a kind was sent to a watch.
    pub fn event_sent_at(&self, kind: Kind) -> Option<SystemTime> {
        self.shared.events_sent.lock().unwrap().get(&kind).copied()
    }

    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        self.shared.change(change)
    }
}

impl Shared {
    fn set_installed(&self, kind: Kind, is_installed: bool) {
        let mut not_installed = self.not_installed.lock().unwrap();
        if is_installed {
            not_installed.remove(&kind);
        } else if not_installed.insert(kind) {
            self.change(|store| {
                let removed: Vec<_> = store.list(kind, "").into_iter().map(names).collect();
                removed.iter().for_each(|(_, name)| drop(store.delete(&ObjectKey::new(kind, "", name), false)));
            });
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store.lock().unwrap();
        let result = change(&mut store);
        store.empty_namespaces();
        let revision = store.revision();
        drop(store);
        self.revision.send_replace(revision);
        result
    }
}

fn names(object: &Value) -> (String, String) {
    let text = |field| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    (text("namespace"), text("name"))
}
