//! The state of a controller as the admin API shows it, and the changes of overrides.
//!
//! Invariant: an override is validated, then stored, and only then confirmed.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use k8s_openapi::jiff::Timestamp;
use proto::trouble::{Memory, Trouble};
use proto::{Announce, ServiceName, State, v1};
use tokio::sync::watch;
use tonic::{Code, Status};

use super::caller::Caller;
use super::flows_left::{FlowsLeft, PlannedState};
use super::gateway_rows::{self, KnownGateways, seconds, written};
use super::names::{self, NameError, Names};
use crate::gateways::fleet_queries::Fleet;
use crate::gateways::listener::KeyCertificates;
use crate::gateways::programming::Programming;
use crate::gateways::publish::Published;
use crate::gateways::registry::{Gateway, Gateways};
use crate::kubernetes::StatusWriter;
use crate::kubernetes::activity::ApiActivity;
use crate::kubernetes::lease::{Leader, Leadership};
use crate::kubernetes::recorder::{RecordedNote, Recorder};
use crate::plan::WantedStatuses;
use crate::plan::addresses::PoolUse;
use crate::status::conditions::shortcomings;
use crate::status::pools::PoolsReport;
use crate::store::override_editor::{ChangeError, OverrideEditor, OverridesState};
use crate::store::overrides::OverrideStoreError;
use crate::world::overrides::{Author, DrainTarget, Overrides, TooManyOverrides, Weight};
use crate::world::planned_drains::PlannedDrains;
use objects::Condition;
use objects::note::{Cause, Note};

/// Timeout of storing an override, after which the client learns that the result is unknown. Shorter than the timeout
/// of `sluicectl`.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum length of the name of an operator, in characters.
const BY_CHARS_MAX: usize = 253;

/// State of a controller for the admin API.
#[derive(Clone, Debug)]
pub struct View {
    /// The newest state; `None` before the first one, and while the controller does not lead.
    pub states: watch::Receiver<Option<Arc<Published>>>,
    /// The gateways.
    pub gateways: watch::Receiver<Gateways>,
    /// The gateways of the group that have an object.
    pub known_gateways: watch::Receiver<Arc<KnownGateways>>,
    /// The names of all nodes.
    pub nodes: watch::Receiver<Arc<BTreeSet<String>>>,
    /// The drains of the newest state.
    pub drains: watch::Receiver<Arc<PlannedDrains>>,
    /// Usage figures of the pools.
    pub pools: watch::Receiver<PoolsReport>,
    /// The statuses of the last plan.
    pub wanted: watch::Receiver<WantedStatuses>,
    /// Manual overrides.
    pub editor: OverrideEditor,
    /// Gateways that answer requests.
    pub fleet: Fleet,
    /// Recent notes for owners of objects.
    pub recorder: Arc<Recorder>,
    /// Whether this controller leads; only the leader knows the state of the group.
    pub leadership: watch::Receiver<Leadership>,
    /// Durations of plans and of changes.
    pub programming: Programming,
    /// Counts of requests to the API server.
    pub activity: Arc<ApiActivity>,
    /// The queue of status writes; `None` while this controller does not lead, and without an API server.
    pub status_writer: watch::Receiver<Option<Arc<StatusWriter>>>,
    /// Troubles of the group.
    pub troubles: watch::Receiver<Vec<Trouble>>,
    /// Since when troubles last that only a request for all of them finds.
    pub found_by_requests: Arc<Mutex<Memory>>,
    /// The certificates that this controller shows.
    pub certificates: Vec<KeyCertificates>,
}

impl View {
    /// Succeeds if this controller leads.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` with the address of the leader, if it does not lead.
    pub fn leads(&self) -> Result<(), Status> {
        let why = match &*self.leadership.borrow() {
            Leadership::Leading { .. } => return Ok(()),
            Leadership::Following(None) => "and does not know the leader yet; ask again in a moment".to_owned(),
            Leadership::Following(Some(Leader { identity, address })) => {
                let at = address.as_ref().map(|address| format!(" ({address})")).unwrap_or_default();
                format!("{identity}{at} does; ask there, by the admin socket of that controller")
            }
        };
        Err(Status::failed_precondition(format!("this controller does not lead, {why}")))
    }

    /// Connected and recently disconnected gateways, and those that have an object.
    ///
    /// # Errors
    /// [`View::leads`].
    pub fn list_gateways(&self) -> Result<v1::ListGatewaysResponse, Status> {
        self.leads()?;
        let epoch = self.state().map(|state| state.generation.epoch.clone());
        let gateways = self.gateways.borrow();
        let (pools, known) = (self.pools.borrow(), self.known_gateways.borrow());
        Ok(v1::ListGatewaysResponse { gateways: gateway_rows::gateways(&gateways, &pools.uses, &known, epoch.as_deref()) })
    }

    /// Every VIP, with the gateways that answer for it or announce it.
    ///
    /// # Errors
    /// See [`View::leads`]; also before all objects are listed.
    pub fn list_vips(&self) -> Result<v1::ListVipsResponse, Status> {
        let state = self.complete()?;
        Ok(v1::ListVipsResponse { vips: gateway_rows::vips(&state, &self.gateways.borrow()) })
    }

    /// The pools that VIPs are taken from.
    ///
    /// # Errors
    /// See [`View::leads`]; also before all objects are listed.
    pub fn list_pools(&self) -> Result<v1::ListPoolsResponse, Status> {
        self.complete()?;
        let gateways = self.gateways.borrow();
        let status = |pool: &PoolUse| v1::PoolStatus {
            name: pool.state.name.clone(),
            addresses: pool.state.addresses.clone(),
            total: pool.text_of(|figures| figures.total),
            used: pool.text_of(|figures| figures.used),
            available: pool.text_of(|figures| figures.available),
            conflict: pool.state.conflict.clone().unwrap_or_default(),
            unannounced_by: gateways
                .pool_unannounced_by(&pool.state.addresses)
                .into_iter()
                .flatten()
                .map(str::to_owned)
                .collect(),
            awaiting: pool.text_of(|figures| figures.awaiting),
            awaited: pool.awaited.clone(),
        };
        Ok(v1::ListPoolsResponse { pools: self.pools.borrow().uses.iter().map(status).collect() })
    }

    /// Adds to the rows of Services what their conditions tell: a gateway does not know which annotation is unknown, or
    /// which address lies outside of the pools. What several say is in `message`, each after its reason.
    pub fn add_causes(&self, rows: &mut [v1::ServiceStatus]) {
        let wanted = self.wanted.borrow();
        for row in rows {
            let Some(wanted) = wanted.get(&ServiceName::new(&row.namespace, &row.name)) else { continue };
            shortcomings(wanted).into_iter().for_each(|cause| add_cause(row, cause));
        }
    }

    /// Recent notes for owners of objects, oldest first.
    ///
    /// # Errors
    /// [`View::leads`].
    pub fn list_events(&self) -> Result<v1::ListEventsResponse, Status> {
        self.leads()?;
        let event = |RecordedNote { time, note: Note { subject, remark } }: RecordedNote| v1::EventStatus {
            time: written(time),
            r#type: if remark.cause.is_ordinary() { "Normal" } else { "Warning" }.to_owned(),
            reason: remark.cause.as_str().to_owned(),
            object: subject.to_string(),
            message: remark.text,
        };
        Ok(v1::ListEventsResponse { events: self.recorder.newest().into_iter().map(event).collect() })
    }

    /// Manual overrides, with the flows that are left at what is drained.
    ///
    /// # Errors
    /// If they are not known.
    pub async fn list_overrides(&self) -> Result<v1::ListOverridesResponse, Status> {
        let (overrides, gateways) = (self.overrides()?, self.gateways.borrow().clone());
        let epoch = self.state().map(|state| state.generation.epoch.clone());
        let planned = PlannedState { epoch, drains: Arc::clone(&self.drains.borrow()) };
        let left = FlowsLeft::ask(&self.fleet, &gateways, &overrides, planned).await;
        Ok(v1::ListOverridesResponse { overrides: rows(&overrides, &left), silent: left.silent })
    }

    /// Drains a backend, a node or a gateway.
    ///
    /// # Errors
    /// If nothing has that name, or storing fails.
    pub async fn drain(&self, request: v1::DrainRequest, caller: &Caller) -> Result<v1::ChangeResponse, Status> {
        let state = self.complete()?;
        let what = names::to_drain(&request.target, &self.names(), &state).map_err(not_found)?;
        let set_by = author(&request.by);
        let is_new = |all: &mut Overrides| {
            let is_new = !all.drains().contains_key(&what);
            all.drain(what.clone(), set_by.clone()).map(|()| is_new)
        };
        let is_new = self.change(is_new).await?;
        tracing::info!(%what, by = set_by.by, %caller, is_new, "drained");
        let summary = if is_new { format!("{what} is drained") } else { format!("{what} was drained already") };
        Ok(v1::ChangeResponse { summary, notes: notes(&what, &state, &self.gateways.borrow()), target: what.to_string() })
    }

    /// Removes a drain.
    ///
    /// # Errors
    /// If it is not drained, or storing fails.
    pub async fn undrain(&self, request: v1::UndrainRequest, caller: &Caller) -> Result<v1::ChangeResponse, Status> {
        let what = names::to_undrain(&request.target, &*self.overrides()?).map_err(not_found)?;
        self.change(|all| Ok(all.undrain(&what))).await?;
        tracing::info!(%what, %caller, "no longer drained");
        Ok(v1::ChangeResponse { summary: format!("{what} is no longer drained"), ..v1::ChangeResponse::default() })
    }

    /// Sets or removes the weight of a backend.
    ///
    /// # Errors
    /// If there is no such Service or backend, or storing fails.
    pub async fn set_weight(&self, request: v1::SetWeightRequest, caller: &Caller) -> Result<v1::ChangeResponse, Status> {
        let Some(weight) = request.weight else { return self.unset_weight(&request, caller).await };
        let weight = u16::try_from(weight)
            .map_err(|_| Status::invalid_argument(format!("found weight {weight}, expected 0 to {}", u16::MAX)))?;
        let state = self.complete()?;
        let service = names::service(&request.service, &state).map_err(not_found)?;
        let backend = names::backend_of(&request.backend, &service, &state).map_err(not_found)?;
        let set = Weight { weight, author: author(&request.by) };
        self.change(|all| all.set_weight(service.clone(), backend, set.clone())).await?;
        tracing::info!(%service, %backend, weight, by = set.author.by, %caller, "weight override set");
        let summary = format!("{backend} of {service} has weight {weight}");
        Ok(v1::ChangeResponse { summary, ..v1::ChangeResponse::default() })
    }

    async fn unset_weight(&self, request: &v1::SetWeightRequest, caller: &Caller) -> Result<v1::ChangeResponse, Status> {
        let (service, backend) =
            names::weighted_backend(&request.service, &request.backend, &*self.overrides()?).map_err(not_found)?;
        self.change(|all| Ok(all.unset_weight(&service, backend))).await?;
        tracing::info!(%service, %backend, %caller, "weight override removed");
        let summary = format!("{backend} of {service} has its own weight");
        Ok(v1::ChangeResponse { summary, ..v1::ChangeResponse::default() })
    }

    /// The overrides in effect.
    fn overrides(&self) -> Result<Arc<Overrides>, Status> {
        self.leads()?;
        match self.editor.state() {
            OverridesState::Loaded(overrides) => Ok(overrides),
            OverridesState::NotLeading => Err(status(ChangeError::NotLeading)),
            OverridesState::Unreadable(why) => Err(status(ChangeError::Unreadable(why))),
        }
    }

    async fn change<T>(&self, change: impl Fn(&mut Overrides) -> Result<T, TooManyOverrides>) -> Result<T, Status> {
        match tokio::time::timeout(CHANGE_TIMEOUT, self.editor.change(change)).await {
            Ok(done) => done.map_err(status),
            Err(_) => Err(Status::unavailable(
                "the storage of overrides does not answer, so the result is unknown; check it by `sluicectl overrides`",
            )),
        }
    }

    pub(super) fn state(&self) -> Option<Arc<State>> {
        self.states.borrow().as_ref().map(|published| Arc::clone(&published.state))
    }

    /// The names of the connected gateways.
    pub(super) fn connected(&self) -> Vec<String> {
        let names: BTreeSet<String> = self.gateways.borrow().iter().map(|gateway| gateway.name.clone()).collect();
        names.into_iter().collect()
    }

    fn complete(&self) -> Result<Arc<State>, Status> {
        self.leads()?;
        self.state()
            .ok_or_else(|| Status::failed_precondition("this controller has not read all objects yet; ask again in a moment"))
    }

    fn names(&self) -> Names {
        let gateways = self.gateways.borrow();
        let mut all: BTreeSet<String> = gateways.iter().map(|gateway| gateway.name.clone()).collect();
        all.extend(gateways.disconnected().keys().cloned());
        all.extend(self.known_gateways.borrow().keys().cloned());
        Names { gateways: all, nodes: (**self.nodes.borrow()).clone() }
    }
}

/// Adds a cause to the row of a Service.
fn add_cause(row: &mut v1::ServiceStatus, cause: Condition) {
    let is_of_endpoints = |reason: &str| [Cause::NoEndpoints, Cause::NoMatchingPort].iter().any(|known| known.as_str() == reason);
    // The controller knows better than a gateway why there are no endpoints.
    let explains = row.reason == Cause::NoEndpoints.as_str() && is_of_endpoints(&cause.reason);
    if row.reason.is_empty() || explains {
        (row.reason, row.message) = (cause.reason.into_owned(), cause.message.into_owned());
    } else if row.reason != cause.reason {
        row.message = format!("{}; {}: {}", row.message, cause.reason, cause.message);
    }
}

/// A time since 1970 in UTC, to the microsecond: "2026-01-31T12:00:00.123456Z".
#[must_use]
pub fn time_text(since_epoch_ns: u64) -> String {
    format!("{:.6}", Timestamp::from_nanosecond(since_epoch_ns.into()).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// The author as named by the request, and the current time.
fn author(by: &str) -> Author {
    let by: String = by.chars().filter(|c| !c.is_control()).take(BY_CHARS_MAX).collect();
    Author { by, at_s: seconds(SystemTime::now()) }
}

fn rows(overrides: &Overrides, left: &FlowsLeft) -> Vec<v1::Override> {
    let drain = |(what, set_by): (&DrainTarget, &Author)| {
        let text = what.to_string();
        let (kind, name) = text.split_once('/').unwrap_or_default();
        let (by, at) = (set_by.by.clone(), set_by.at());
        let (kind, name, flows) = (kind.to_owned(), name.to_owned(), left.at(what));
        v1::Override { kind, name, by, at, flows, ..v1::Override::default() }
    };
    let weights = overrides.weights().iter().flat_map(|(service, of)| of.iter().map(move |one| (service, one)));
    let weight = |(service, (backend, set)): (&ServiceName, (&std::net::SocketAddr, &Weight))| v1::Override {
        kind: "weight".to_owned(),
        name: backend.to_string(),
        service: service.to_string(),
        weight: Some(set.weight.into()),
        by: set.author.by.clone(),
        at: set.author.at(),
        flows: None,
    };
    overrides.drains().iter().map(drain).chain(weights.map(weight)).collect()
}

/// Warning about an effect that a drain does not have. With an election other gateways take over all VIPs.
fn notes(what: &DrainTarget, state: &State, gateways: &Gateways) -> Vec<String> {
    let l2: Vec<&str> = state.pools.iter().filter(|pool| pool.announce == Announce::L2).map(|pool| pool.name.as_str()).collect();
    let has_election = |gateway: &Gateway| gateway.fleet.as_ref().is_some_and(|fleet| fleet.election.is_some());
    let gives_way = |name: &str| gateways.iter().any(|gateway| gateway.name == name && has_election(gateway));
    match what {
        DrainTarget::Gateway(name) if !l2.is_empty() && !gives_way(name) => vec![format!(
            "routes to VIPs of routed pools are withdrawn; for VIPs of pool {} (announce: l2) {name} still answers, because no other \
             gateway would",
            l2.join(", ")
        )],
        _ => Vec::new(),
    }
}

fn not_found(error: NameError) -> Status {
    let code = if matches!(error, NameError::NoAddress(_)) { Code::InvalidArgument } else { Code::NotFound };
    Status::new(code, error.to_string())
}

fn status(error: ChangeError) -> Status {
    let code = match &error {
        ChangeError::NotLeading | ChangeError::Unreadable(_) | ChangeError::Store(OverrideStoreError::Broken { .. }) => {
            Code::FailedPrecondition
        }
        ChangeError::Store(OverrideStoreError::Conflict) => Code::Aborted,
        ChangeError::Store(_) => Code::Unavailable,
        ChangeError::Full(_) => Code::ResourceExhausted,
    };
    Status::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use proto::{FleetStatus, Pool, PoolBgp, VipElection};

    use super::*;
    use crate::gateways::registry::{Connection, Report};

    #[test]
    fn the_reason_of_a_row_keeps_missing_endpoints_and_names_every_other_cause() {
        let cause = |cause: Cause| Condition::naming(false, cause.as_str(), format!("text of {}", cause.as_str()));
        let (none, unmatched) = (cause(Cause::NoEndpoints), cause(Cause::NoMatchingPort));
        let ignored = cause(Cause::AnnotationIgnored);
        let and_ignored = |first: &str| format!("{first}; AnnotationIgnored: text of AnnotationIgnored");
        let rows = [
            ("", vec![&ignored], "AnnotationIgnored", "text of AnnotationIgnored".to_owned()),
            ("", vec![&none, &ignored], "NoEndpoints", and_ignored("text of NoEndpoints")),
            ("NoEndpoints", vec![&none, &ignored], "NoEndpoints", and_ignored("text of NoEndpoints")),
            ("NoEndpoints", vec![&unmatched, &ignored], "NoMatchingPort", and_ignored("text of NoMatchingPort")),
            ("NoEndpoints", vec![&ignored], "NoEndpoints", and_ignored("of the gateway")),
            ("NoHealthyBackend", vec![&ignored], "NoHealthyBackend", and_ignored("of the gateway")),
        ];
        for (reason, causes, expected, text) in rows {
            let message = if reason.is_empty() { "" } else { "of the gateway" };
            let (reason, message) = (reason.to_owned(), message.to_owned());
            let mut row = v1::ServiceStatus { reason, message, ..v1::ServiceStatus::default() };
            causes.into_iter().for_each(|cause| add_cause(&mut row, cause.clone()));
            assert_eq!((row.reason.as_str(), row.message), (expected, text));
        }
    }

    #[test]
    fn a_drain_warns_of_vips_that_the_gateway_keeps_only_without_an_election() {
        let gateways = watch::Sender::new(Gateways::default());
        let connect = |name: &str, election| {
            let connection = Connection::open(&gateways, name, "", Vec::new());
            connection.report(Report { fleet: Some(FleetStatus { election, ..FleetStatus::default() }), ..Report::default() });
            connection
        };
        let _connected = [connect("elects", Some(VipElection::default())), connect("alone", None)];
        let _silent = Connection::open(&gateways, "silent", "", Vec::new());
        let ranges = vec!["192.0.2.100".parse().unwrap()];
        let pool = |announce| Pool { name: "edge".to_owned(), ranges: ranges.clone(), announce, bgp: PoolBgp::default() };
        let rows = [
            ("elects", Announce::L2, false),
            ("alone", Announce::L2, true),
            ("silent", Announce::L2, true),
            ("away", Announce::L2, true),
            ("alone", Announce::Routed, false),
        ];
        for (name, announce, warns) in rows {
            let state = State { pools: vec![pool(announce)], ..State::default() };
            let notes = notes(&DrainTarget::Gateway(name.to_owned()), &state, &gateways.borrow());
            assert_eq!(notes.iter().any(|note| note.contains("(announce: l2)") && note.contains(name)), warns, "{name}");
        }
    }
}
