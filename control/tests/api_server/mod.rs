//! A small API server over loopback HTTP that behaves as a recorded kube-apiserver 1.36.2 does towards a client that
//! lists, watches and patches Services, EndpointSlices and Nodes; for tests only.
//!
//! **Invariant.** What it is asked for and does not know it answers by 501, so that a test cannot rest on something that
//! only this server does. Deliberately not here: other resources, selectors, authentication, admission, and the
//! controllers that would write EndpointSlices: tests write them.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod answer;
mod http;
mod merge;
mod service;
mod store;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use store::Kind;
use store::Store;

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Logged {
    pub method: String,
    pub path: String,
    pub query: String,
    pub content_type: String,
    pub body: String,
}

impl Logged {
    pub fn is_watch(&self) -> bool {
        self.query.split('&').any(|pair| pair == "watch=1" || pair == "watch=true")
    }
}

/// An answer that some requests get instead of their own.
#[derive(Clone, Debug)]
pub enum Fault {
    /// 429 in plain text, with Retry-After.
    TooMany { retry_after_s: u32 },
    /// 403 as RBAC gives it.
    Forbidden,
    /// 500 with a Status.
    Internal,
    /// 410 with a Status.
    Expired,
    /// 409 with a Status, as when somebody else was faster.
    Conflict,
    /// 422 with a Status of this message.
    Invalid(String),
}

/// Which requests a fault is for.
#[derive(Clone, Debug)]
pub struct Trap {
    pub fault: Fault,
    /// How many requests it still catches.
    pub times: usize,
    pub method: &'static str,
    pub path_contains: &'static str,
    pub watch: bool,
}

/// How open watches end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// With a last chunk, as at the timeout.
    Clean,
    /// Without one, as when the server is killed.
    Abort,
    /// With an `ERROR` event of code 410.
    Expired,
}

/// Whether the server answers at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It answers.
    There,
    /// It closes every connection at once.
    Away,
    /// It keeps the connections there are and never answers on them again, as behind a broken link.
    Silent,
}

struct Shared {
    store: Mutex<Store>,
    revision: watch::Sender<u64>,
    cut: watch::Sender<Option<Cut>>,
    presence: watch::Sender<Presence>,
    /// Connections that are served.
    open: watch::Sender<usize>,
    traps: Mutex<Vec<Trap>>,
    log: Mutex<Vec<Logged>>,
}

/// The running server. It ends with its runtime.
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
            revision: watch::Sender::new(0),
            cut: watch::Sender::new(None),
            presence: watch::Sender::new(Presence::There),
            open: watch::Sender::new(0),
            traps: Mutex::default(),
            log: Mutex::default(),
        });
        tokio::spawn(http::serve(listener, shared.clone()));
        Self { shared, address }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Writes a kubeconfig that leads here.
    pub fn write_kubeconfig(&self, file: &Path) {
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\nclusters: [{{name: test, cluster: {{server: \"{}\"}}}}]\n\
             users: [{{name: test, user: {{token: test}}}}]\ncontexts: [{{name: test, context: {{cluster: test, user: test}}}}]\n",
            self.url()
        );
        std::fs::write(file, text).unwrap();
    }

    /// Creates an object as POST would.
    pub fn create(&self, kind: Kind, object: Value) -> Value {
        self.change(|store| store.create(kind, object)).unwrap()
    }

    /// Changes spec and metadata of an object by a merge patch.
    pub fn update(&self, kind: Kind, namespace: &str, name: &str, patch: &Value) -> Value {
        self.change(|store| store.patch(kind, namespace, name, patch, merge::Strategy::Merge, store::Part::Main)).unwrap()
    }

    pub fn delete(&self, kind: Kind, namespace: &str, name: &str) {
        self.change(|store| store.delete(kind, namespace, name)).unwrap();
    }

    /// Puts an object into the store as it is, valid or not.
    pub fn put_raw(&self, kind: Kind, object: Value) {
        self.change(|store| store.put_raw(kind, object));
    }

    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Value> {
        self.shared.store.lock().unwrap().get(kind, namespace, name).ok().cloned()
    }

    /// Forgets the history: watches from before it are expired.
    pub fn compact(&self) {
        self.shared.store.lock().unwrap().compact();
    }

    pub fn cut_watches(&self, cut: Cut) {
        self.shared.cut.send_replace(Some(cut));
    }

    /// Returns once no connection is served any more, unless the server is there.
    pub async fn set_presence(&self, presence: Presence) {
        self.shared.presence.send_replace(presence);
        if presence != Presence::There {
            self.shared.open.subscribe().wait_for(|open| *open == 0).await.unwrap();
        }
    }

    /// The next requests that match get the fault.
    pub fn trap(&self, trap: Trap) {
        self.shared.traps.lock().unwrap().push(trap);
    }

    pub fn release_traps(&self) {
        self.shared.traps.lock().unwrap().clear();
    }

    pub fn log(&self) -> Vec<Logged> {
        self.shared.log.lock().unwrap().clone()
    }

    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        self.shared.change(change)
    }
}

impl Shared {
    fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store.lock().unwrap();
        let result = change(&mut store);
        let revision = store.revision();
        drop(store);
        self.revision.send_replace(revision);
        result
    }
}
