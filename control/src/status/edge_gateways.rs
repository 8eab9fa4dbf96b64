//! Status of gateways in the cluster: one `EdgeGateway` object for each gateway that is or recently was connected.
//!
//! Invariant: only objects of our own group are written, and one that the server refuses delays no other. The object of a
//! disconnected gateway remains, not ready, for `RETENTION`; one of a connected gateway that was deleted is created again.
//! A change of a figure, such as a lag, is written with the next refresh, and the number of Services alone at most every
//! `COUNT_INTERVAL`. If the CRD is not installed, sluice only checks for it again from time to time. A new leader reads the
//! addresses of all gateways from these objects, also of disconnected ones, so that no Service gets one. Deliberately not
//! here: which gateways are connected (`gateways`).

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, Patch};
use kube::runtime::watcher::Event;
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use super::accepted;
use super::fleet_notes::GatewayUids;
use super::gateway_conditions;
use crate::gateways::publish::Published;
use crate::gateways::registry::Gateways;
use crate::kubernetes::{ApiError, Cluster, Retry, WatchedGateways, patch_params, post_params};
use crate::world::change::{Change, KnownGateway, LAST_SEEN_AGE_MAX};
use objects::crd::{
    EdgeGateway, EdgeGatewayPartner, EdgeGatewaySession, EdgeGatewaySpec, EdgeGatewayStatus, GATEWAY_ADDRESSES_MAX,
};
use objects::text;
use proto::FleetStatus;

/// Interval of updates of connected gateways, and so the maximum age of LAST-SEEN.
const REFRESH_INTERVAL: Duration = LAST_SEEN_AGE_MAX;
/// Debounce time of other changes, so that a restart of the fleet causes a few writes per gateway. The objects lag by
/// this time and the time of writing, 2 s at most.
const DEBOUNCE: Duration = Duration::from_secs(1);
/// Interval of writes for the number of Services alone, which every new Service changes for every gateway.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
/// Wait after a failed write of one object, and after one that the server refuses: a policy or the name is at fault.
const FAILED_RETRY: Duration = Duration::from_secs(1);
const REFUSED_RETRY: Duration = REFRESH_INTERVAL;
/// Wait before the kind is looked up again if it is not installed.
const KIND_LOOKUP_INTERVAL: Duration = Duration::from_secs(10);
/// How long the object of a disconnected gateway remains: a repaired machine comes back to its addresses.
const RETENTION: SignedDuration = SignedDuration::from_hours(30 * 24);
/// Values of `status.ready`.
const READY: &str = "True";
const NOT_READY: &str = "False";
/// Fields that are removed when a gateway no longer reports them.
const OF_FLEET: [&str; 8] =
    ["vipGroups", "ownedGroups", "takeovers", "partners", "lagMs", "shadowFlows", "sessionsUp", "sessions"];

/// Updates the objects while it is polled, and sends the gateways of all groups to the planner: their addresses are no
/// VIPs, and Services may ask for their groups.
pub async fn show_gateways(
    cluster: &Cluster,
    group: &str,
    mut gateways: watch::Receiver<Gateways>,
    mut states: watch::Receiver<Option<Arc<Published>>>,
    uids: &watch::Sender<GatewayUids>,
    changes: mpsc::Sender<Change>,
) {
    let mut fleet = EdgeGateways {
        api: Api::all(cluster.client.clone()),
        group,
        uids,
        objects: BTreeMap::new(),
        listed: None,
        postponed: BTreeMap::new(),
        written: BTreeMap::new(),
        is_old_kind_told: false,
    };
    let mut watched = pin!(WatchedGateways::new(cluster).events());
    let mut retry = Retry::new("list, watch, create, delete edgegateways.sluice.dev and patch their status", &cluster.server);
    let (mut sent, mut is_listed) = (None, false);
    let mut due = Instant::now();
    loop {
        let connected = shown(&gateways.borrow_and_update());
        let services = served(&states.borrow_and_update());
        if is_listed && Instant::now() >= due {
            let known = fleet.known(&connected);
            if sent.as_ref() != Some(&known) {
                // The planner may have ended.
                let _ = changes.send(Change::GatewaysReplaced(known.clone())).await;
                sent = Some(known);
            }
            due = match fleet.show(&connected, services).await {
                Ok(next) => {
                    retry.succeeded();
                    next
                }
                Err(outage) => Instant::now() + retry.failed(outage, Instant::now()),
            };
        }
        let soon = Instant::now() + DEBOUNCE;
        tokio::select! {
            event = watched.next() => match event {
                Some(Ok(event)) => if fleet.take(event, &mut is_listed) { due = due.min(soon) },
                Some(Err(ApiError::Failing { code: 404, .. })) => {
                    (is_listed, due) = (false, soon);
                    fleet.objects.clear();
                    if sent.as_ref() != Some(&BTreeMap::new()) {
                        let _ = changes.send(Change::GatewaysReplaced(BTreeMap::new())).await;
                        sent = Some(BTreeMap::new());
                    }
                    tokio::time::sleep(KIND_LOOKUP_INTERVAL).await;
                }
                Some(Err(outage)) => tokio::time::sleep(retry.failed(outage, Instant::now())).await,
                None => std::future::pending().await,
            },
            Ok(()) = gateways.changed() => if shown(&gateways.borrow_and_update()) != connected { due = due.min(soon) },
            Ok(()) = states.changed() => if served(&states.borrow_and_update()) != services { due = due.min(soon) },
            () = tokio::time::sleep_until(due.into()), if is_listed => {}
        }
    }
}

/// Number of Services that gateways are to serve.
fn served(newest: &Option<Arc<Published>>) -> u32 {
    newest.as_ref().map_or(0, |newest| u32::try_from(newest.served()).unwrap_or(u32::MAX))
}

/// The status of each connected gateway, without `services` and `last_seen`. A gateway that reconnects may appear
/// twice.
fn shown(gateways: &Gateways) -> BTreeMap<String, EdgeGatewayStatus> {
    let mut all: BTreeMap<String, EdgeGatewayStatus> = BTreeMap::new();
    for gateway in gateways.iter() {
        let was_ready = all.get(&gateway.name).is_some_and(|other| other.ready.as_deref() == Some(READY));
        let is_ready = was_ready || (gateway.ready && gateway.acknowledged.is_some());
        let status = EdgeGatewayStatus {
            ready: Some(if is_ready { READY } else { NOT_READY }.to_owned()),
            version: Some(gateway.version.clone()),
            addresses: Some(texts(&gateway.profile.reserved())),
            next_hops: Some(texts(&gateway.profile.next_hops)),
            // It reports them some time after it connects; until then those of its object are kept.
            prefixes: Some(texts(&gateway.profile.prefixes)).filter(|prefixes| !prefixes.is_empty()),
            max_state_age_seconds: gateway.profile.max_state_age.map(|age| age.as_secs()),
            conditions: gateway_conditions::of_connected(is_ready, gateways.is_drained(&gateway.name), gateway.fleet.as_deref()),
            ..gateway.fleet.as_deref().map(of_fleet).unwrap_or_default()
        };
        all.insert(gateway.name.clone(), status);
    }
    all
}

fn texts<T: ToString>(list: &[T]) -> Vec<String> {
    list.iter().take(GATEWAY_ADDRESSES_MAX).map(ToString::to_string).collect()
}

/// The part of a gateway in the fleet.
fn of_fleet(fleet: &FleetStatus) -> EdgeGatewayStatus {
    let partners = fleet.partners.iter().map(|partner| EdgeGatewayPartner {
        name: partner.name.clone(),
        address: partner.address.clone(),
        in_sync: partner.is_in_sync,
    });
    let sessions = fleet.sessions.iter().map(|session| EdgeGatewaySession {
        protocol: session.protocol.as_str().to_owned(),
        peer: session.peer.clone(),
        status: session.health.as_str().to_owned(),
        since: text::of_time(session.since_s),
    });
    let (election, (up, all)) = (fleet.election.as_ref(), fleet.sessions_up());
    let (has_partners, has_sessions) = (!fleet.partners.is_empty(), !fleet.sessions.is_empty());
    EdgeGatewayStatus {
        vip_groups: election.map(|election| format!("{}/{}", election.owned_groups().count(), election.groups)),
        owned_groups: election.map(|election| election.owned_groups().map(i32::from).collect()),
        takeovers: election.map(|election| election.takeovers),
        partners: has_partners.then(|| partners.collect()),
        lag_ms: fleet.lag_ms(),
        shadow_flows: (has_partners || fleet.shadow_flows > 0).then_some(fleet.shadow_flows),
        sessions_up: has_sessions.then(|| format!("{up}/{all}")),
        sessions: has_sessions.then(|| sessions.collect()),
        ..EdgeGatewayStatus::default()
    }
}

/// A gateway whose object could not be written.
struct PostponedWrite {
    until: Instant,
    /// The message of the server, which is logged once.
    message: String,
}

struct EdgeGateways<'a> {
    api: Api<EdgeGateway>,
    group: &'a str,
    uids: &'a watch::Sender<GatewayUids>,
    /// All objects of all groups, as watched and as written.
    objects: BTreeMap<String, EdgeGateway>,
    /// The list in progress.
    listed: Option<BTreeMap<String, EdgeGateway>>,
    /// Gateways whose objects are not written for a while.
    postponed: BTreeMap<String, PostponedWrite>,
    /// The last write of each object.
    written: BTreeMap<String, WrittenStatus>,
    /// Whether the log says that the CRD is older than this program.
    is_old_kind_told: bool,
}

/// A status as it was sent, and as the server stored it: a server whose CRD is older drops fields that it does not know.
struct WrittenStatus {
    sent: EdgeGatewayStatus,
    stored: EdgeGatewayStatus,
}

impl EdgeGateways<'_> {
    /// Applies an event of the watch. Returns whether an object has gone or come, or belongs to another group now.
    fn take(&mut self, event: Event<EdgeGateway>, is_listed: &mut bool) -> bool {
        let is_news = match event {
            Event::Init => {
                self.listed = Some(BTreeMap::new());
                false
            }
            Event::InitApply(object) => {
                self.listed.get_or_insert_default().insert(object.name_any(), object);
                false
            }
            Event::InitDone => {
                self.objects = self.listed.take().unwrap_or_default();
                *is_listed = true;
                true
            }
            Event::Apply(object) => {
                let before = self.objects.insert(object.name_any(), object.clone());
                before.is_none_or(|before| before.uid() != object.uid() || before.spec != object.spec)
            }
            Event::Delete(object) => {
                let name = object.name_any();
                // The event may be older than an object that was created since.
                if self.objects.get(&name).is_some_and(|known| known.uid() == object.uid()) {
                    self.objects.remove(&name);
                }
                true
            }
        };
        if is_news {
            self.publish_uids();
        }
        is_news
    }

    fn publish_uids(&self) {
        let uid = |(name, object): (&String, &EdgeGateway)| Some((name.clone(), object.uid()?));
        self.uids.send_replace(Arc::new(self.objects.iter().filter_map(uid).collect()));
    }

    /// The gateways of all groups, also those without an object yet.
    fn known(&self, connected: &BTreeMap<String, EdgeGatewayStatus>) -> BTreeMap<String, KnownGateway> {
        let created = connected.iter().filter(|(name, _)| !self.objects.contains_key(*name)).map(|(name, shown)| {
            let object = EdgeGateway::new(name, EdgeGatewaySpec { group: self.group.to_owned() });
            (name.clone(), KnownGateway::from(&EdgeGateway { status: Some(shown.clone()), ..object }))
        });
        // The time of a gateway that is connected, here or elsewhere, is no news for the planner.
        let is_away = |name: &String, known: &KnownGateway| known.group == self.group && !connected.contains_key(name);
        let listed = self.objects.iter().map(|(name, object)| {
            let known = KnownGateway::from(object);
            (name.clone(), KnownGateway { last_seen_s: known.last_seen_s.filter(|_| is_away(name, &known)), ..known })
        });
        listed.chain(created).collect()
    }

    /// Writes what differs. Returns when to look again. An outage of the server ends the look; a refusal of one object does
    /// not.
    async fn show(&mut self, connected: &BTreeMap<String, EdgeGatewayStatus>, services: u32) -> Result<Instant, ApiError> {
        let (now, mut next) = (Timestamp::now(), Instant::now() + REFRESH_INTERVAL);
        self.postponed.retain(|name, _| connected.contains_key(name) || self.objects.contains_key(name));
        self.written.retain(|name, _| self.objects.contains_key(name));
        let gone = self.objects.iter().filter(|(name, object)| object.spec.group == self.group && !connected.contains_key(*name));
        let gone: Vec<String> = gone.map(|(name, _)| name.clone()).collect();
        for name in connected.keys().chain(&gone) {
            if let Some(held) = self.postponed.get(name).filter(|held| held.until > Instant::now()) {
                next = next.min(held.until);
                continue;
            }
            let written = match connected.get(name) {
                Some(shown) => self.show_connected(name, shown, services, now).await,
                None => self.show_disconnected(name, now).await.map(|()| None),
            };
            match written {
                Ok(again_in) => {
                    self.postponed.remove(name);
                    next = next.min(again_in.map_or(next, |wait| Instant::now() + wait));
                }
                Err(outage) if outage.concerns_all() => return Err(outage),
                Err(outage) => next = next.min(self.postpone(name, &outage)),
            }
        }
        Ok(next)
    }

    /// Leaves an object alone for a while. Returns until when.
    fn postpone(&mut self, name: &str, outage: &ApiError) -> Instant {
        let is_refused = matches!(outage, ApiError::Forbidden(_) | ApiError::Failing { code: 400 | 409 | 422, .. });
        let until = Instant::now() + if is_refused { REFUSED_RETRY } else { FAILED_RETRY };
        let message = outage.to_string();
        if self.postponed.get(name).is_none_or(|held| held.message != message) {
            warn!(gateway = name, "the EdgeGateway of this name cannot be written: {message}; trying again, others are shown");
        }
        self.postponed.insert(name.to_owned(), PostponedWrite { until, message });
        until
    }

    /// Writes the object of a connected gateway if it differs. Returns when it has to be written, if not yet.
    async fn show_connected(
        &mut self,
        name: &str,
        shown: &EdgeGatewayStatus,
        services: u32,
        now: Timestamp,
    ) -> Result<Option<Duration>, ApiError> {
        let old = match self.objects.get(name) {
            Some(old) if old.spec.group != self.group => {
                let message = format!("it belongs to group {}; give the gateway another name", old.spec.group);
                return Err(ApiError::Failing { code: 409, message });
            }
            Some(old) => old.status.as_ref().map(|stored| self.as_sent(name, stored).clone()),
            None => {
                self.create(name).await?;
                None
            }
        };
        let status = wanted(shown, old.as_ref(), services, now);
        let wait = old.as_ref().map_or(Duration::ZERO, |old| due_in(old, &status, now));
        if !wait.is_zero() {
            return Ok(Some(wait));
        }
        self.patch(name, &status).await?;
        Ok(None)
    }

    /// The status that we sent, if the server has stored this one for it.
    fn as_sent<'s>(&'s self, name: &str, stored: &'s EdgeGatewayStatus) -> &'s EdgeGatewayStatus {
        self.written.get(name).filter(|written| written.stored == *stored).map_or(stored, |written| &written.sent)
    }

    /// Remembers a write. Says once if the server dropped fields.
    fn note_written(&mut self, name: &str, sent: &EdgeGatewayStatus, written: &EdgeGateway) {
        let stored = written.status.clone().unwrap_or_default();
        let (sent_fields, stored_fields) = (json!(sent), json!(stored));
        let is_dropped = |(field, value): &(&String, &serde_json::Value)| !value.is_null() && stored_fields[*field].is_null();
        let dropped: Vec<&str> =
            sent_fields.as_object().into_iter().flatten().filter(is_dropped).map(|(field, _)| field.as_str()).collect();
        if !dropped.is_empty() && !std::mem::replace(&mut self.is_old_kind_told, true) {
            warn!(
                fields = dropped.join(", "),
                "the CRD edgegateways.sluice.dev is older than this controller: the API server drops fields; apply deploy/crds.yaml"
            );
        }
        self.written.insert(name.to_owned(), WrittenStatus { sent: sent.clone(), stored });
    }

    async fn create(&mut self, name: &str) -> Result<(), ApiError> {
        let object = EdgeGateway::new(name, EdgeGatewaySpec { group: self.group.to_owned() });
        let created = self.api.create(&post_params(), &object).await.map_err(|error| ApiError::from(&error))?;
        self.objects.insert(name.to_owned(), created);
        // Events about the gateway need it at once: those of its first takeover.
        self.publish_uids();
        Ok(())
    }

    async fn show_disconnected(&mut self, name: &str, now: Timestamp) -> Result<(), ApiError> {
        let Some(object) = self.objects.get(name) else { return Ok(()) };
        let status = object.status.clone().unwrap_or_default();
        let created = object.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let last_seen = status.last_seen.as_ref().and_then(|text| text.parse().ok()).or(created);
        if last_seen.is_some_and(|seen: Timestamp| now.duration_since(seen) > RETENTION) {
            accepted(self.api.delete(name, &DeleteParams::default()).await, &[404])?;
            self.objects.remove(name);
            return Ok(());
        }
        if status.ready.as_deref() == Some(NOT_READY) {
            return Ok(());
        }
        let conditions = gateway_conditions::of_disconnected(&status.conditions);
        let not_ready = EdgeGatewayStatus {
            ready: Some(NOT_READY.to_owned()),
            conditions: gateway_conditions::dated(conditions, &status.conditions, now),
            ..EdgeGatewayStatus::default()
        };
        self.patch(name, &not_ready).await
    }

    /// Writes a JSON merge patch, as custom resources require; fields of `status` that are `None` stay, except those of the
    /// fleet. An object that has gone is forgotten, so that the next look creates it again.
    async fn patch(&mut self, name: &str, sent: &EdgeGatewayStatus) -> Result<(), ApiError> {
        let mut status = json!(sent);
        for field in OF_FLEET {
            if status.get(field).is_none() {
                status[field] = serde_json::Value::Null;
            }
        }
        match self.api.patch_status(name, &patch_params(), &Patch::Merge(json!({"status": status}))).await {
            Ok(written) => {
                self.note_written(name, sent, &written);
                self.objects.insert(name.to_owned(), written);
                Ok(())
            }
            Err(kube::Error::Api(answer)) if answer.code == 404 => {
                self.objects.remove(name);
                Err(ApiError::Failing { code: 404, message: "it was deleted a moment ago".to_owned() })
            }
            answer => accepted(answer, &[]),
        }
    }
}

fn wanted(shown: &EdgeGatewayStatus, old: Option<&EdgeGatewayStatus>, services: u32, now: Timestamp) -> EdgeGatewayStatus {
    let last_seen = Some(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    let prefixes = shown.prefixes.clone().or_else(|| old?.prefixes.clone());
    let max_state_age_seconds = shown.max_state_age_seconds.or(old.and_then(|old| old.max_state_age_seconds));
    let old = old.map_or(&[][..], |old| &old.conditions);
    let conditions = gateway_conditions::dated(shown.conditions.clone(), old, now);
    EdgeGatewayStatus { services: Some(services), last_seen, prefixes, max_state_age_seconds, conditions, ..shown.clone() }
}

/// When an object has to be written: at once if it differs by more than figures or its LAST-SEEN is too old, later if only
/// the number of Services differs.
fn due_in(old: &EdgeGatewayStatus, new: &EdgeGatewayStatus, now: Timestamp) -> Duration {
    let without_figures = |status: &EdgeGatewayStatus| EdgeGatewayStatus {
        last_seen: None,
        lag_ms: None,
        shadow_flows: None,
        services: None,
        ..status.clone()
    };
    let seen = old.last_seen.as_ref().and_then(|text| text.parse::<Timestamp>().ok());
    let Some(age) = seen.map(|seen| now.duration_since(seen).unsigned_abs()) else { return Duration::ZERO };
    if without_figures(old) != without_figures(new) {
        return Duration::ZERO;
    }
    let interval = if old.services == new.services { REFRESH_INTERVAL } else { COUNT_INTERVAL };
    interval.saturating_sub(age)
}

#[cfg(test)]
mod tests {
    use proto::{FleetPartner, GatewayProfile, VipElection};

    use super::*;
    use crate::gateways::registry::{Connection, Report};

    #[test]
    fn a_gateway_is_ready_once_it_has_applied_a_state_and_reports_it() {
        let gateways = watch::Sender::new(Gateways::default());
        let one = Connection::open(&gateways, "edge-1", "1.0", Vec::new());
        one.acknowledge(3);
        assert_eq!(shown(&gateways.borrow())["edge-1"].ready.as_deref(), Some(NOT_READY));
        one.report(Report { ready: true, ..Report::default() });
        assert!(shown(&gateways.borrow())["edge-1"].ready.as_deref() == Some(READY));
        let _again = Connection::open(&gateways, "edge-1", "1.0", Vec::new());
        assert!(shown(&gateways.borrow())["edge-1"].ready.as_deref() == Some(READY), "it reconnects");
    }

    fn fleet_of(api: Api<EdgeGateway>, uids: &watch::Sender<GatewayUids>) -> EdgeGateways<'_> {
        let (objects, postponed, written) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        EdgeGateways { api, group: "east", uids, objects, listed: None, postponed, written, is_old_kind_told: false }
    }

    #[tokio::test]
    async fn a_server_with_an_older_kind_gets_a_status_once() {
        let patches = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counted = Arc::clone(&patches);
        let server = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let counted = Arc::clone(&counted);
            async move {
                let is_patch = request.method() == "PATCH";
                let body = request.into_body().collect_bytes().await.unwrap();
                let mut object = serde_json::from_slice::<serde_json::Value>(&body).unwrap();
                if is_patch {
                    counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    object["spec"] = json!({"group": "east"});
                    object["status"].as_object_mut().unwrap().remove("prefixes");
                }
                object["metadata"] = json!({"name": "edge-1", "uid": "a"});
                let body = kube::client::Body::from(serde_json::to_vec(&object).unwrap());
                Ok::<_, kube::Error>(http::Response::new(body))
            }
        });
        let (api, uids) = (Api::all(kube::Client::new(server, "a")), watch::Sender::default());
        let mut fleet = fleet_of(api, &uids);
        let status = |prefix: &str| EdgeGatewayStatus { prefixes: Some(vec![prefix.to_owned()]), ..EdgeGatewayStatus::default() };
        let mut count = async |prefix: &str| {
            fleet.show(&[("edge-1".to_owned(), status(prefix))].into(), 1).await.unwrap();
            assert!(fleet.is_old_kind_told);
            patches.load(std::sync::atomic::Ordering::Relaxed)
        };
        assert_eq!(count("192.0.2.0/24").await, 1);
        assert_eq!(count("192.0.2.0/24").await, 1, "it is no news that the server dropped a field");
        assert_eq!(count("198.51.100.0/24").await, 2);
    }

    #[tokio::test]
    async fn only_news_of_objects_have_gateways_looked_at_again() {
        let unreachable = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Err::<http::Response<kube::client::Body>, _>(std::io::Error::other("no server"))
        });
        let (api, uids) = (Api::all(kube::Client::new(unreachable, "a")), watch::Sender::default());
        let mut fleet = fleet_of(api, &uids);
        let object = |uid: &str, services| {
            let mut object = EdgeGateway::new("edge-1", EdgeGatewaySpec { group: "east".to_owned() });
            object.metadata.uid = Some(uid.to_owned());
            object.status = Some(EdgeGatewayStatus { services: Some(services), ..EdgeGatewayStatus::default() });
            object
        };
        let mut is_listed = false;
        let events = [
            (Event::Init, false),
            (Event::InitApply(object("a", 1)), false),
            (Event::InitDone, true),
            (Event::Apply(object("a", 2)), false),
            (Event::Apply(object("b", 2)), true),
            (Event::Delete(object("a", 2)), true),
            (Event::Delete(object("b", 2)), true),
        ];
        let known: Vec<_> = events
            .into_iter()
            .map(|(event, is_news)| {
                assert_eq!(fleet.take(event, &mut is_listed), is_news);
                fleet.objects.len()
            })
            .collect();
        assert_eq!((known, is_listed), (vec![0, 0, 1, 1, 1, 1, 0], true));
        let refused = ApiError::Failing { code: 422, message: "no".to_owned() };
        assert!(fleet.postpone("edge-1", &refused) > Instant::now() + FAILED_RETRY);
    }

    #[test]
    fn the_networks_of_an_object_last_until_its_gateway_reports_others_and_cause_no_write() {
        let gateways = watch::Sender::new(Gateways::default());
        let profile = GatewayProfile {
            prefixes: vec!["192.0.2.2/24".parse().unwrap()],
            max_state_age: Some(Duration::from_secs(90)),
            ..GatewayProfile::default()
        };
        let now = Timestamp::UNIX_EPOCH;
        let first = Connection::open(&gateways, "edge-1", "1.0", profile);
        let old = wanted(&shown(&gateways.borrow())["edge-1"], None, 5, now);
        assert_eq!(old.prefixes, Some(vec!["192.0.2.2/24".to_owned()]));
        assert_eq!(old.max_state_age_seconds, Some(90));
        drop(first);
        let _again = Connection::open(&gateways, "edge-1", "1.0", Vec::new());
        let new = wanted(&shown(&gateways.borrow())["edge-1"], Some(&old), 5, now);
        assert_eq!((&new, due_in(&old, &new, now)), (&old, REFRESH_INTERVAL));
    }

    #[test]
    fn an_object_is_written_again_if_it_differs_or_is_old() {
        let status = |address: &str| EdgeGatewayStatus {
            ready: Some(READY.to_owned()),
            addresses: Some(vec![address.to_owned()]),
            ..EdgeGatewayStatus::default()
        };
        let (now, shown) = (Timestamp::UNIX_EPOCH, status("192.0.2.2"));
        let wanted = |shown, services, now| wanted(shown, None, services, now);
        let old = wanted(&shown, 5, now);
        assert_eq!(old.last_seen.as_deref(), Some("1970-01-01T00:00:00Z"));
        assert_eq!(due_in(&old, &wanted(&shown, 5, now), now), REFRESH_INTERVAL);
        let more = wanted(&shown, 6, now);
        assert_eq!(
            due_in(&old, &more, now + Duration::from_secs(4)),
            COUNT_INTERVAL - Duration::from_secs(4),
            "a count is no news"
        );
        assert_eq!(due_in(&old, &more, now + COUNT_INTERVAL), Duration::ZERO);
        assert_eq!(due_in(&old, &wanted(&status("192.0.2.3"), 5, now), now), Duration::ZERO);
        assert_eq!(old.addresses, Some(vec!["192.0.2.2".to_owned()]));
        assert_eq!(due_in(&old, &old, now + REFRESH_INTERVAL), Duration::ZERO);
        assert_eq!(due_in(&EdgeGatewayStatus::default(), &old, now), Duration::ZERO);
    }

    #[test]
    fn a_takeover_is_written_at_once_and_lag_with_the_next_refresh() {
        let (now, gateways) = (Timestamp::UNIX_EPOCH, watch::Sender::new(Gateways::default()));
        let one = Connection::open(&gateways, "edge-1", "1.0", Vec::new());
        let status = |owned, lag_ms, old: Option<&EdgeGatewayStatus>| {
            let partner = FleetPartner { name: "edge-2".into(), address: "192.0.2.3:9436".into(), is_in_sync: true, lag_ms };
            let fleet = FleetStatus {
                election: Some(VipElection { groups: 16, owned, takeovers: 3, ..VipElection::default() }),
                partners: vec![partner],
                ..FleetStatus::default()
            };
            one.report(Report { ready: true, fleet: Some(fleet), ..Report::default() });
            wanted(&shown(&gateways.borrow())["edge-1"], old, 5, now)
        };
        let old = status(0b101, Some(4), None);
        assert_eq!((old.vip_groups.as_deref(), old.lag_ms, old.takeovers), (Some("2/16"), Some(4), Some(3)));
        assert_eq!((old.owned_groups.as_deref(), old.sessions_up.as_deref()), (Some(&[0, 2][..]), None));
        let types: Vec<_> = old.conditions.iter().map(|one| one.type_.as_str()).collect();
        assert_eq!(types, ["Ready", "Draining", "DuplicateVIP", "Eligible", "InSync"]);
        let lags = status(0b101, Some(900), Some(&old));
        assert_eq!([now, now + REFRESH_INTERVAL].map(|now| due_in(&old, &lags, now)), [REFRESH_INTERVAL, Duration::ZERO]);
        assert_eq!(due_in(&old, &status(0b1, Some(4), Some(&old)), now), Duration::ZERO);
    }
}
