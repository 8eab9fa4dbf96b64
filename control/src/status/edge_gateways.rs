//! Status of gateways in the cluster: one `EdgeGateway` object for each gateway that is or recently was connected.
//!
//! Invariant: only objects of our own group are written. The object of a disconnected gateway remains, not ready, for
//! `RETENTION`. A change of a figure, such as a lag, is written with the next refresh. If the CRD is not installed, sluice
//! only checks for it again from time to time. A new leader reads the addresses of all gateways from these objects, also of
//! disconnected ones, so that no Service gets one. Deliberately not here: which gateways are connected (`gateways`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, ListParams, Patch};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tracing::warn;

use super::fleet_notes::GatewayUids;
use super::gateway_conditions::{self, GatewayFacts};
use super::{accepted, text_of_time};
use crate::gateways::publish::Published;
use crate::gateways::registry::Gateways;
use crate::kubernetes::{ApiError, Cluster, Retry, patch_params, post_params};
use crate::world::change::{Change, KnownGateway};
use objects::crd::{
    EdgeGateway, EdgeGatewayPartner, EdgeGatewaySession, EdgeGatewaySpec, EdgeGatewayStatus, GATEWAY_ADDRESSES_MAX,
};
use proto::FleetStatus;

/// Interval of updates of connected gateways, and so the maximum age of LAST-SEEN.
const REFRESH_INTERVAL: Duration = Duration::from_secs(60);
/// Debounce time of other changes, so that a restart of the fleet causes a few writes per gateway. The objects lag by
/// this time and the time of writing, 2 s at most.
const DEBOUNCE: Duration = Duration::from_secs(1);
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
    let fleet = EdgeGateways { api: Api::all(cluster.client.clone()), group, uids };
    let mut retry = Retry::new("list, create, delete edgegateways.sluice.dev and patch their status", &cluster.server);
    let (mut refused, mut sent) = (BTreeSet::new(), None);
    loop {
        let connected = shown(&gateways.borrow_and_update());
        let services = served(&states.borrow_and_update());
        match fleet.show(&connected, services, &mut refused).await {
            Ok(known) => {
                if sent.as_ref() != Some(&known) {
                    // The planner may have ended.
                    let _ = changes.send(Change::GatewaysReplaced(known.clone())).await;
                    sent = Some(known);
                }
            }
            Err(outage) => {
                // A failed write is retried even if nothing changes.
                tokio::time::sleep(retry.failed(outage, Instant::now())).await;
                continue;
            }
        }
        retry.succeeded();
        let changes = async {
            loop {
                tokio::select! {
                    Ok(()) = gateways.changed() => if shown(&gateways.borrow_and_update()) != connected { break },
                    Ok(()) = states.changed() => if served(&states.borrow_and_update()) != services { break },
                    else => std::future::pending().await,
                }
            }
            tokio::time::sleep(DEBOUNCE).await;
        };
        // Whichever comes first.
        let _ = tokio::time::timeout(REFRESH_INTERVAL, changes).await;
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
            prefixes: Some(texts(&gateway.profile.prefixes)),
            conditions: gateway_conditions::of_connected(GatewayFacts {
                is_ready,
                is_drained: gateways.is_drained(&gateway.name),
                fleet: gateway.fleet.as_deref(),
            }),
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
        since: text_of_time(session.since_s),
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

struct EdgeGateways<'a> {
    api: Api<EdgeGateway>,
    group: &'a str,
    uids: &'a watch::Sender<GatewayUids>,
}

impl EdgeGateways<'_> {
    async fn show(
        &self,
        connected: &BTreeMap<String, EdgeGatewayStatus>,
        services: u32,
        refused: &mut BTreeSet<String>,
    ) -> Result<BTreeMap<String, KnownGateway>, ApiError> {
        let now = Timestamp::now();
        let objects = match self.api.list(&ListParams::default()).await {
            Ok(list) => list.items,
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(BTreeMap::new()),
            Err(error) => return Err(ApiError::from(&error)),
        };
        let objects: BTreeMap<String, EdgeGateway> = objects.into_iter().map(|object| (object.name_any(), object)).collect();
        let uid = |(name, object): (&String, &EdgeGateway)| Some((name.clone(), object.uid()?));
        self.uids.send_replace(Arc::new(objects.iter().filter_map(uid).collect()));
        for (name, shown) in connected {
            let old = objects.get(name);
            if old.is_some_and(|old| old.spec.group != self.group) || refused.contains(name) {
                if refused.insert(name.clone()) {
                    warn!(gateway = name, "an EdgeGateway of this name belongs to another group; this gateway is not shown");
                }
                continue;
            }
            if old.is_none() && !self.create(name).await? {
                refused.insert(name.clone());
                continue;
            }
            let old = old.and_then(|old| old.status.as_ref());
            let status = wanted(shown, old, services, now);
            if old.is_none_or(|old| is_outdated(old, &status, now)) {
                self.patch(name, &status).await?;
            }
        }
        for (name, object) in
            objects.iter().filter(|(name, object)| object.spec.group == self.group && !connected.contains_key(*name))
        {
            self.show_disconnected(name, object, now).await?;
        }
        let created = connected.iter().filter(|(name, _)| !objects.contains_key(*name) && !refused.contains(*name));
        let created = created.map(|(name, shown)| {
            let object = EdgeGateway::new(name, EdgeGatewaySpec { group: self.group.to_owned() });
            (name.clone(), KnownGateway::from(&EdgeGateway { status: Some(shown.clone()), ..object }))
        });
        // The time of a gateway that is connected, here or elsewhere, is no news for the planner.
        let is_away = |name: &String, known: &KnownGateway| known.group == self.group && !connected.contains_key(name);
        let listed = objects.iter().map(|(name, object)| {
            let known = KnownGateway::from(object);
            (name.clone(), KnownGateway { last_seen_s: known.last_seen_s.filter(|_| is_away(name, &known)), ..known })
        });
        Ok(listed.chain(created).collect())
    }

    /// Returns false if the server rejects the object name.
    async fn create(&self, name: &str) -> Result<bool, ApiError> {
        let object = EdgeGateway::new(name, EdgeGatewaySpec { group: self.group.to_owned() });
        let answer = self.api.create(&post_params(), &object).await;
        // Events about the gateway need it at once: those of its first takeover.
        if let Some(uid) = answer.as_ref().ok().and_then(ResourceExt::uid) {
            self.uids.send_modify(|uids| _ = Arc::make_mut(uids).insert(name.to_owned(), uid));
        }
        match answer {
            Err(kube::Error::Api(status)) if matches!(status.code, 400 | 422) => {
                let message = crate::kubernetes::api_error::truncated(&status.message);
                warn!(gateway = name, "the API server rejects an EdgeGateway of this name: {message}; this gateway is not shown");
                Ok(false)
            }
            answer => accepted(answer, &[409]).map(|()| true),
        }
    }

    async fn show_disconnected(&self, name: &str, object: &EdgeGateway, now: Timestamp) -> Result<(), ApiError> {
        let status = object.status.clone().unwrap_or_default();
        let created = object.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let last_seen = status.last_seen.as_ref().and_then(|text| text.parse().ok()).or(created);
        if last_seen.is_some_and(|seen: Timestamp| now.duration_since(seen) > RETENTION) {
            return accepted(self.api.delete(name, &DeleteParams::default()).await, &[404]);
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
    /// fleet.
    async fn patch(&self, name: &str, status: &EdgeGatewayStatus) -> Result<(), ApiError> {
        let mut status = json!(status);
        for field in OF_FLEET {
            if status.get(field).is_none() {
                status[field] = serde_json::Value::Null;
            }
        }
        let answer = self.api.patch_status(name, &patch_params(), &Patch::Merge(json!({"status": status}))).await;
        // An object that was deleted in the meantime is created again the next time.
        accepted(answer, &[404])
    }
}

fn wanted(shown: &EdgeGatewayStatus, old: Option<&EdgeGatewayStatus>, services: u32, now: Timestamp) -> EdgeGatewayStatus {
    let last_seen = Some(now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    let old = old.map_or(&[][..], |old| &old.conditions);
    let conditions = gateway_conditions::dated(shown.conditions.clone(), old, now);
    EdgeGatewayStatus { services: Some(services), last_seen, conditions, ..shown.clone() }
}

/// Whether an object differs by more than figures, or its LAST-SEEN is too old.
fn is_outdated(old: &EdgeGatewayStatus, new: &EdgeGatewayStatus, now: Timestamp) -> bool {
    let without_figures =
        |status: &EdgeGatewayStatus| EdgeGatewayStatus { last_seen: None, lag_ms: None, shadow_flows: None, ..status.clone() };
    let seen = old.last_seen.as_ref().and_then(|text| text.parse::<Timestamp>().ok());
    let is_fresh = seen.is_some_and(|seen| now.duration_since(seen).unsigned_abs() < REFRESH_INTERVAL / 2);
    without_figures(old) != without_figures(new) || !is_fresh
}

#[cfg(test)]
mod tests {
    use proto::{FleetPartner, VipElection};

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
        assert!(!is_outdated(&old, &wanted(&shown, 5, now), now));
        assert!(is_outdated(&old, &wanted(&shown, 6, now), now));
        assert!(is_outdated(&old, &wanted(&status("192.0.2.3"), 5, now), now));
        assert_eq!(old.addresses, Some(vec!["192.0.2.2".to_owned()]));
        assert!(is_outdated(&old, &old, now + REFRESH_INTERVAL));
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
        assert!(!is_outdated(&old, &lags, now) && is_outdated(&old, &lags, now + REFRESH_INTERVAL));
        assert!(is_outdated(&old, &status(0b1, Some(4), Some(&old)), now));
    }
}
