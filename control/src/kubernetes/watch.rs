//! List and watch of Services, EndpointSlices and Nodes, with a new list when the resource version has expired. Every
//! replica watches; [`Following::reach_newest`] tells a new leader when it has seen all that its predecessor wrote.
//!
//! Invariant: `*Replaced` of every kind is sent before any single change. Nothing is withdrawn because of an error,
//! neither of the server nor in decoding an object.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::ListParams;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use proto::ServiceName;
use serde::de::DeserializeOwned;
use tokio::sync::{Barrier, mpsc, watch};
use tokio::task::JoinSet;
use tracing::{info, warn};

mod decoding;

use decoding::DecodedObject;

use super::client::{LONG_WATCH_SECONDS, WATCH_SECONDS};
use crate::kubernetes::api_error::{ApiError, Retry, truncated};
use crate::kubernetes::client::Cluster;
use crate::world::change::{Change, KnownGateway};
use objects::crd::{AddressPool, EdgeGateway};
use objects::note::{Cause, Note, Remark, Subject};
use objects::{ReadService, ReadSlice, UsedService, UsedSlice};

/// Signal of short watches that the server was unreachable. Long watches, which may hang on the same server, then
/// restart.
type Alarm = watch::Sender<()>;

/// Interval at which a missing kind is looked up again.
const KIND_LOOKUP_INTERVAL: Duration = Duration::from_secs(10);

/// Longest wait of a new leader for events of Services that it has not seen. Events come within milliseconds; a watch that
/// brings none for this long is silent, and is replaced within 20 s.
const NEWEST_MAX: Duration = Duration::from_secs(5);

/// Longest wait between two attempts to list the gateways, before which nothing is planned.
const GATEWAYS_WAIT_MAX: Duration = Duration::from_secs(10);

/// A watched kind of object.
trait WatchedKind: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static {
    /// The name of the kind in URLs.
    const RESOURCE: &'static str;
    /// The required rights in RBAC terms.
    const RIGHTS: &'static str;
    /// Whether the CRD may be missing. Until it is installed, there are no objects.
    const IS_OPTIONAL: bool = false;
    /// Whether it changes so rarely that long watches suffice. At rest, most of our requests are watches.
    const IS_QUIET: bool = false;
    /// Whether a new leader waits for the newest version of its objects, which hold what the former leader decided.
    const TELLS_NEWEST: bool = false;

    /// What is kept of an object from when it is decoded.
    type Read: From<Self> + Clone + Debug + Send + 'static;
    /// The change that replaces all objects.
    const REPLACED: fn(Vec<Self::Read>) -> Change;
    /// The change that adds or replaces one object.
    const APPLIED: fn(Box<Self::Read>) -> Change;
    /// The change that deletes an object.
    const DELETED: fn(ServiceName) -> Change;
    /// The object of a note.
    const SUBJECT: fn(ServiceName) -> Subject;
}

impl WatchedKind for UsedService {
    const RESOURCE: &'static str = "services";
    const RIGHTS: &'static str = "list and watch services";
    const TELLS_NEWEST: bool = true;
    type Read = ReadService;
    const REPLACED: fn(Vec<Self::Read>) -> Change = Change::ServicesReplaced;
    const APPLIED: fn(Box<Self::Read>) -> Change = Change::ServiceApplied;
    const DELETED: fn(ServiceName) -> Change = Change::ServiceDeleted;
    const SUBJECT: fn(ServiceName) -> Subject = Subject::Service;
}

impl WatchedKind for UsedSlice {
    const RESOURCE: &'static str = "endpointslices";
    const RIGHTS: &'static str = "list and watch endpointslices.discovery.k8s.io";
    type Read = ReadSlice;
    const REPLACED: fn(Vec<Self::Read>) -> Change = Change::SlicesReplaced;
    const APPLIED: fn(Box<Self::Read>) -> Change = Change::SliceApplied;
    const DELETED: fn(ServiceName) -> Change = Change::SliceDeleted;
    const SUBJECT: fn(ServiceName) -> Subject = Subject::Slice;
}

impl WatchedKind for Node {
    const RESOURCE: &'static str = "nodes";
    const RIGHTS: &'static str = "list and watch nodes";
    const IS_QUIET: bool = true;
    type Read = Self;
    const REPLACED: fn(Vec<Self::Read>) -> Change = Change::NodesReplaced;
    const APPLIED: fn(Box<Self::Read>) -> Change = Change::NodeApplied;
    const DELETED: fn(ServiceName) -> Change = |name| Change::NodeDeleted(name.name);
    const SUBJECT: fn(ServiceName) -> Subject = |name| Subject::Node(name.name);
}

impl WatchedKind for Namespace {
    const RESOURCE: &'static str = "namespaces";
    const RIGHTS: &'static str = "list and watch namespaces";
    const IS_QUIET: bool = true;
    type Read = Self;
    const REPLACED: fn(Vec<Self::Read>) -> Change = Change::NamespacesReplaced;
    const APPLIED: fn(Box<Self::Read>) -> Change = Change::NamespaceApplied;
    const DELETED: fn(ServiceName) -> Change = |name| Change::NamespaceDeleted(name.name);
    const SUBJECT: fn(ServiceName) -> Subject = |name| Subject::Namespace(name.name);
}

impl WatchedKind for AddressPool {
    const RESOURCE: &'static str = "addresspools";
    const RIGHTS: &'static str = "list and watch addresspools.sluice.dev";
    const IS_OPTIONAL: bool = true;
    const IS_QUIET: bool = true;
    type Read = Self;
    const REPLACED: fn(Vec<Self::Read>) -> Change = Change::PoolsReplaced;
    const APPLIED: fn(Box<Self::Read>) -> Change = Change::PoolApplied;
    const DELETED: fn(ServiceName) -> Change = |name| Change::PoolDeleted(name.name);
    const SUBJECT: fn(ServiceName) -> Subject = |name| Subject::Pool(name.name);
}

/// What the tasks share that follow one kind each.
pub struct Following {
    cluster: Arc<Cluster>,
    changes: mpsc::Sender<Change>,
    /// Reached when all kinds are listed for the first time.
    all_listed: Barrier,
    alarm: Alarm,
    /// The highest resource version of a Service whose change was sent since the last list.
    newest_service: watch::Sender<u64>,
}

impl Following {
    /// Changes of the objects of `cluster` are sent to `changes`.
    #[must_use]
    pub fn new(cluster: Arc<Cluster>, changes: mpsc::Sender<Change>) -> Arc<Self> {
        let (all_listed, alarm, newest_service) = (Barrier::new(5), Alarm::default(), watch::Sender::default());
        Arc::new(Self { cluster, changes, all_listed, alarm, newest_service })
    }

    /// Begins a term of leadership: sends the gateways of all groups once every status that a former leader wrote was
    /// sent. Nothing is planned before, so that nobody else may send gateways until this has ended.
    pub async fn begin_term(&self) {
        self.reach_newest().await;
        let known = known_gateways(&self.cluster).await;
        // The planner may have ended.
        let _ = self.changes.send(Change::GatewaysReplaced(known)).await;
    }

    /// Waits until the newest version of every Service was sent, as the API server has them now. The list has only metadata.
    /// Resource versions of one kind are numbers that grow (Kubernetes says so since 1.35, and etcd always did).
    async fn reach_newest(&self) {
        let api: Api<UsedService> = Api::all(self.cluster.client.clone());
        let mut retry = Retry::new("list the metadata of services", &self.cluster.server);
        let newest = loop {
            match api.list_metadata(&ListParams::default()).await {
                Ok(list) => break list.items.iter().map(version_of).max().unwrap_or_default(),
                Err(error) => tokio::time::sleep(retry.failed(ApiError::from(&error), Instant::now())).await,
            }
        };
        retry.succeeded();
        let mut seen = self.newest_service.subscribe();
        let has_seen = async { seen.wait_for(|seen| *seen >= newest).await.map(drop) };
        if tokio::time::timeout(NEWEST_MAX, has_seen).await.is_err() {
            let seen = *self.newest_service.borrow();
            warn!(newest, seen, "the watch of services lags behind the API server; planning with what it has brought so far");
        }
    }
}

/// Sends every change of all kinds, until the receiver is dropped. Each kind has a task, so that large lists are decoded on
/// several cores.
pub async fn follow(following: Arc<Following>) {
    let mut kinds = JoinSet::new();
    kinds.spawn(follow_kind::<UsedService>(Arc::clone(&following)));
    kinds.spawn(follow_kind::<UsedSlice>(Arc::clone(&following)));
    kinds.spawn(follow_kind::<Node>(Arc::clone(&following)));
    kinds.spawn(follow_kind::<Namespace>(Arc::clone(&following)));
    kinds.spawn(follow_kind::<AddressPool>(Arc::clone(&following)));
    tokio::select! {
        () = following.changes.closed() => {}
        () = end_of(kinds) => {}
    }
}

/// The `EdgeGateway` objects of all groups, as the leader watches them.
pub struct WatchedGateways(Client);

impl WatchedGateways {
    /// Those of `cluster`.
    #[must_use]
    pub fn new(cluster: &Cluster) -> Self {
        Self(cluster.patient.clone())
    }

    /// The events of a list, then of a watch that is resumed for ever. The receiver waits after an error.
    pub fn events(self) -> impl Stream<Item = Result<Event<EdgeGateway>, ApiError>> {
        let config = watcher::Config::default().timeout(LONG_WATCH_SECONDS);
        watcher(Api::all(self.0), config).map(|event| event.map_err(|error| ApiError::from(&error)))
    }
}

/// Waits for all tasks. Passes the first panic of one on.
async fn end_of(tasks: JoinSet<()>) {
    tasks.join_all().await;
}

async fn follow_kind<K: WatchedKind>(following: Arc<Following>) {
    let Following { cluster, changes, all_listed, alarm, newest_service } = &*following;
    let mut retry = Retry::new(K::RIGHTS, &cluster.server);
    let mut known = KnownObjects::new();
    let mut is_first = true;
    let mut alarmed = alarm.subscribe();
    let (client, seconds) = if K::IS_QUIET { (&cluster.patient, LONG_WATCH_SECONDS) } else { (&cluster.client, WATCH_SECONDS) };
    // A round ends only when the watcher has to restart.
    loop {
        let api = Api::<DecodedObject<K, K::Read>>::all(client.clone());
        let mut events = pin!(watcher(api, watcher::Config::default().timeout(seconds)));
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                Ok(()) = alarmed.changed(), if K::IS_QUIET => None,
            };
            let Some(event) = event else { break };
            match event {
                Ok(event) => {
                    // `Init` is sent before any request, so it does not prove that the server answers.
                    if !matches!(event, Event::Init) {
                        retry.succeeded();
                    }
                    let changed = known.take(event);
                    let newest = known.newest;
                    for change in changed {
                        if changes.send(change).await.is_err() {
                            return;
                        }
                        if std::mem::take(&mut is_first) {
                            info!(server = cluster.server, "following {}", K::plural(&()));
                            all_listed.wait().await;
                        }
                    }
                    if K::TELLS_NEWEST {
                        newest_service.send_if_modified(|seen| std::mem::replace(seen, newest) != newest);
                    }
                }
                Err(watcher::Error::InitialListFailed(kube::Error::Api(status))) if K::IS_OPTIONAL && status.code == 404 => {
                    if std::mem::take(&mut is_first) {
                        info!(server = cluster.server, "the kind {} is not installed; continuing without it", K::kind(&()));
                        if changes.send((K::REPLACED)(Vec::new())).await.is_err() {
                            return;
                        }
                        all_listed.wait().await;
                    }
                    tokio::time::sleep(KIND_LOOKUP_INTERVAL).await;
                }
                Err(error) => {
                    let outage = ApiError::from(&error);
                    // The watcher relists by itself only after a 410 within the stream.
                    let must_relist = matches!((&error, &outage), (watcher::Error::WatchStartFailed(_), ApiError::Expired(_)));
                    if !K::IS_QUIET && matches!(outage, ApiError::Unreachable(_)) {
                        alarm.send_replace(());
                    }
                    cluster.activity.watch_restarts.get_or_create(&[("resource", K::RESOURCE)]).inc();
                    let wait = retry.failed(outage, Instant::now());
                    tokio::time::sleep(wait).await;
                    if must_relist {
                        break;
                    }
                }
            }
        }
    }
}

/// The objects known to the receiver, and the list in progress.
struct KnownObjects<K: WatchedKind> {
    names: BTreeSet<ServiceName>,
    listed: Vec<(ServiceName, K::Read)>,
    listed_undecodable: BTreeMap<ServiceName, String>,
    /// Objects that cannot be decoded now, with the reason; each is reported once.
    undecodable: BTreeMap<ServiceName, String>,
    was_listed: bool,
    /// The highest resource version in the events taken since the last list, with those of the list once it is complete.
    newest: u64,
    listed_newest: u64,
}

impl<K: WatchedKind> KnownObjects<K> {
    fn new() -> Self {
        let (listed_undecodable, undecodable) = (BTreeMap::new(), BTreeMap::new());
        let (newest, listed_newest) = (0, 0);
        Self {
            names: BTreeSet::new(),
            listed: Vec::new(),
            listed_undecodable,
            undecodable,
            was_listed: false,
            newest,
            listed_newest,
        }
    }

    /// Records the version of an object, before it is taken.
    fn note_version(&mut self, event: &Event<DecodedObject<K, K::Read>>) {
        match event {
            Event::Init => self.listed_newest = 0,
            Event::InitApply(object) => self.listed_newest = self.listed_newest.max(version_of(object)),
            // A list counts even if its versions are lower: of a server that was restored from a backup.
            Event::InitDone => self.newest = self.listed_newest,
            Event::Apply(object) | Event::Delete(object) => self.newest = self.newest.max(version_of(object)),
        }
    }

    /// The changes for the receiver that result from a watch event.
    fn take(&mut self, event: Event<DecodedObject<K, K::Read>>) -> Vec<Change> {
        self.note_version(&event);
        match event {
            Event::Init => {
                self.listed.clear();
                self.listed_undecodable.clear();
                Vec::new()
            }
            Event::InitApply(object) => {
                let name = name_of(&object);
                match object.read {
                    Ok(object) => self.listed.push((name, object)),
                    Err(error) => _ = self.listed_undecodable.insert(name, truncated(&error)),
                }
                Vec::new()
            }
            Event::InitDone => {
                let mut changes = self.take_list();
                let undecodable = std::mem::take(&mut self.listed_undecodable);
                // Objects that never were in use, whose notes are forgotten.
                let gone = self.undecodable.keys().filter(|name| !undecodable.contains_key(*name) && !self.names.contains(*name));
                changes.extend(gone.cloned().map(K::DELETED));
                self.undecodable.retain(|name, _| undecodable.contains_key(name));
                changes.extend(undecodable.into_iter().filter_map(|(name, error)| self.note(name, error)));
                changes
            }
            Event::Apply(object) => {
                let name = name_of(&object);
                match object.read {
                    Ok(object) => {
                        self.undecodable.remove(&name);
                        self.names.insert(name);
                        vec![(K::APPLIED)(Box::new(object))]
                    }
                    Err(error) => self.note(name, truncated(&error)).into_iter().collect(),
                }
            }
            Event::Delete(object) => {
                let name = name_of(&object);
                self.names.remove(&name);
                self.undecodable.remove(&name);
                vec![(K::DELETED)(name)]
            }
        }
    }

    /// Applies a complete list. Objects that cannot be decoded keep their last valid version.
    fn take_list(&mut self) -> Vec<Change> {
        let (mut names, listed): (BTreeSet<_>, Vec<_>) = std::mem::take(&mut self.listed).into_iter().unzip();
        let kept: BTreeSet<_> = self.names.iter().filter(|name| self.listed_undecodable.contains_key(name)).cloned().collect();
        let was_listed = std::mem::replace(&mut self.was_listed, true);
        if !was_listed || kept.is_empty() {
            self.names = names;
            return vec![(K::REPLACED)(listed)];
        }
        names.extend(kept);
        let deleted: Vec<_> = self.names.difference(&names).cloned().map(K::DELETED).collect();
        self.names = names;
        deleted.into_iter().chain(listed.into_iter().map(|object| (K::APPLIED)(Box::new(object)))).collect()
    }

    /// The note for the owner of an object that cannot be decoded; `None` if it was reported already.
    fn note(&mut self, name: ServiceName, error: String) -> Option<Change> {
        if self.undecodable.get(&name) == Some(&error) {
            return None;
        }
        let is_known = self.names.contains(&name);
        let stays = if is_known { "its last good version stays in use" } else { "it is not used" };
        let text = format!("{stays}: expected an object of {}, found: {error}; correct the object", K::api_version(&()));
        self.undecodable.insert(name.clone(), error);
        Some(Change::Noted(Note { subject: (K::SUBJECT)(name), remark: Remark::new(Cause::Undecodable, text) }))
    }
}

fn name_of(object: &impl Resource) -> ServiceName {
    ServiceName { namespace: object.namespace().unwrap_or_default(), name: object.name_any() }
}

/// The resource version of an object; 0 if it is no number.
fn version_of(object: &impl Resource) -> u64 {
    object.resource_version().and_then(|version| version.parse().ok()).unwrap_or_default()
}

/// All gateways, of every group, from their objects. Waits until the API server has answered: an address of a gateway in
/// the status of a Service must not count as an address of the Service.
async fn known_gateways(cluster: &Cluster) -> BTreeMap<String, KnownGateway> {
    let api: Api<EdgeGateway> = Api::all(cluster.client.clone());
    let mut retry = Retry::new("list edgegateways.sluice.dev", &cluster.server);
    loop {
        match api.list(&ListParams::default()).await {
            Ok(list) => return list.items.iter().map(|object| (object.name_any(), KnownGateway::from(object))).collect(),
            // The kind is not installed: no gateway was ever shown.
            Err(kube::Error::Api(status)) if status.code == 404 => return BTreeMap::new(),
            Err(error) => tokio::time::sleep(retry.failed(ApiError::from(&error), Instant::now()).min(GATEWAYS_WAIT_MAX)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn a_panic_of_one_kind_ends_all() {
        let mut kinds = JoinSet::new();
        kinds.spawn(std::future::pending());
        kinds.spawn(async {});
        kinds.spawn(async { panic!("this kind fails") });
        let ended = tokio::spawn(end_of(kinds)).await;
        assert!(ended.unwrap_err().is_panic());
    }

    fn service(name: &str, ports: serde_json::Value) -> DecodedObject<UsedService, ReadService> {
        let object = json!({"metadata": {"name": name, "namespace": "a"}, "spec": {"ports": ports}});
        serde_json::from_value(object).unwrap()
    }

    fn names(changes: &[Change]) -> Vec<String> {
        let text = |change: &Change| match change {
            Change::ServicesReplaced(all) => format!("replaced by {}", all.len()),
            Change::ServiceApplied(object) => format!("applied {}", object.name.name),
            Change::ServiceDeleted(name) => format!("deleted {name}"),
            Change::Noted(note) => format!("{} of {}", note.remark.cause.as_str(), note.subject),
            other => format!("{other:?}"),
        };
        changes.iter().map(text).collect()
    }

    #[test]
    fn a_list_is_sent_as_one_change_without_undecodable_objects() {
        let mut known = KnownObjects::new();
        assert!(known.take(Event::Init).is_empty());
        known.take(Event::InitApply(service("good", json!([]))));
        known.take(Event::InitApply(service("bad", json!("no list"))));
        assert_eq!(names(&known.take(Event::InitDone)), ["replaced by 1", "Undecodable of Service a/bad"]);
    }

    #[test]
    fn an_undecodable_object_is_reported_once_and_again_after_a_valid_version() {
        let mut known = KnownObjects::new();
        known.take(Event::Init);
        known.take(Event::InitDone);
        let mut apply = |ports| names(&known.take(Event::Apply(service("web", ports))));
        assert_eq!(apply(json!("no list")), ["Undecodable of Service a/web"]);
        assert_eq!(apply(json!("no list")), [""; 0]);
        assert_eq!(apply(json!([])), ["applied web"]);
        assert_eq!(apply(json!("no list")), ["Undecodable of Service a/web"]);
        known.take(Event::Init);
        known.take(Event::InitApply(service("web", json!("no list"))));
        assert_eq!(names(&known.take(Event::InitDone)), [""; 0], "neither withdrawn nor reported again");
    }

    #[test]
    fn an_object_that_becomes_undecodable_keeps_its_last_good_version_through_a_new_list() {
        let mut known = KnownObjects::new();
        known.take(Event::Init);
        for name in ["kept", "gone", "stays"] {
            known.take(Event::InitApply(service(name, json!([]))));
        }
        known.take(Event::InitDone);
        assert_eq!(names(&known.take(Event::Apply(service("kept", json!("no list"))))), ["Undecodable of Service a/kept"]);
        known.take(Event::Init);
        known.take(Event::InitApply(service("kept", json!("no list"))));
        known.take(Event::InitApply(service("stays", json!([]))));
        assert_eq!(names(&known.take(Event::InitDone)), ["deleted a/gone", "applied stays"]);
        assert_eq!(names(&known.take(Event::Delete(service("kept", json!("no list"))))), ["deleted a/kept"]);
    }

    #[test]
    fn an_interrupted_list_has_no_effect() {
        let mut known = KnownObjects::new();
        known.take(Event::Init);
        known.take(Event::InitApply(service("first", json!([]))));
        known.take(Event::Init);
        known.take(Event::InitApply(service("second", json!([]))));
        assert_eq!(names(&known.take(Event::InitDone)), ["replaced by 1"]);
    }

    #[test]
    fn an_undecodable_object_that_is_missing_in_a_new_list_is_deleted() {
        let mut known = KnownObjects::new();
        known.take(Event::Init);
        known.take(Event::InitDone);
        known.take(Event::Apply(service("bad", json!("no list"))));
        known.take(Event::Init);
        assert_eq!(names(&known.take(Event::InitDone)), ["replaced by 0", "deleted a/bad"]);
        known.take(Event::Init);
        assert_eq!(names(&known.take(Event::InitDone)), ["replaced by 0"], "once");
    }

    #[test]
    fn a_list_of_a_server_that_was_restored_has_the_newest_version_although_it_is_lower() {
        let versioned = |version: &str| {
            let metadata = json!({"name": "web", "namespace": "a", "resourceVersion": version});
            serde_json::from_value::<DecodedObject<UsedService, ReadService>>(json!({"metadata": metadata, "spec": {}})).unwrap()
        };
        let mut known = KnownObjects::new();
        for (event, newest) in [
            (Event::Init, 0),
            (Event::InitApply(versioned("90")), 0),
            (Event::InitDone, 90),
            (Event::Apply(versioned("95")), 95),
            (Event::Init, 95),
            (Event::InitApply(versioned("40")), 95),
            (Event::InitDone, 40),
            (Event::Apply(versioned("41")), 41),
        ] {
            known.take(event);
            assert_eq!(known.newest, newest);
        }
    }
}
