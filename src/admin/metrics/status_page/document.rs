//! The document `/status.json`. Its fields are described in docs/reference/status-page.md.
//!
//! Invariant: its size is bounded, whatever is served: at most [`LIMIT_MAX`](super::query::LIMIT_MAX) Services, each
//! with [`MEMBERS_MAX`] backends and [`FRONTENDS_MAX`] frontends, and one Service with [`OPEN_MEMBERS_MAX`] backends.
//! Not here: which parameters there are (`query`), and sums over all Services (`reading`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dataplane::snapshot::{ServiceView, Views};
use objects::text::of_time;
use proto::trouble::Trouble;
use proto::{FleetStatus, Protocol, v1};
use serde::Serialize;

use super::lines::{FigureLines, StatusLines};
use super::query::{ServiceOrder, StatusQuery};
use super::reading::{Rank, Reading, Totals, TrafficCounts, milliseconds};
use super::{Sources, WorkerLoads};
use crate::admin::tables::{BackendRow, reason, rows, service};
use crate::agent::backend_health::Subject;

/// Backends of a Service in the list.
const MEMBERS_MAX: usize = 4;
/// Backends of the Service that is asked for.
const OPEN_MEMBERS_MAX: usize = 256;
const FRONTENDS_MAX: usize = 8;
/// Events, where no Service is asked for. Of a Service all are shown that are kept, of 1,000 in all.
const EVENTS_MAX: usize = 50;
/// Services of the picture.
const PICTURED: usize = 6;
/// Heaviest flows, and clients.
const HEAVIEST_SHOWN: usize = 5;

/// What the page shows.
#[derive(Debug, Serialize)]
pub(super) struct StatusDocument {
    gateway: String,
    version: String,
    /// Time since the gateway began to listen; times of the document are on this clock.
    at_ms: u64,
    ready: bool,
    draining: bool,
    controller_connected: bool,
    /// Whether the state is older than `maxStateAge`.
    state_expired: bool,
    /// Counter of the state by which every worker forwards; 0 before the first.
    generation: u64,
    /// The worst first.
    troubles: Vec<TroubleRow>,
    fleet: FleetRow,
    totals: Totals,
    workers: Vec<WorkerRow>,
    ports: Vec<PortRow>,
    /// Those that have occurred.
    drops: BTreeMap<String, u64>,
    tasks: Vec<TaskRow>,
    /// Number of Services that match the search.
    matched: usize,
    services: Vec<ServiceRow>,
    /// The first of them by trouble, then by rate.
    picture: Vec<ServiceRow>,
    /// The last 3 minutes of the figures.
    lines: FigureLines,
    /// Flows and clients with most traffic in the last second.
    heaviest_flows: Vec<v1::HeavyTraffic>,
    heaviest_clients: Vec<v1::HeavyTraffic>,
    /// The Service that was asked for.
    service: Option<ServiceRow>,
    events: Vec<EventRow>,
    /// Why there are no events.
    events_missing: Option<String>,
}

/// As `sluicectl status` lists it.
#[derive(Debug, Serialize)]
struct TroubleRow {
    severity: &'static str,
    kind: &'static str,
    object: String,
    cause: String,
    since: String,
    remedy: &'static str,
}

/// The part of the gateway in the fleet.
#[derive(Debug, Serialize)]
struct FleetRow {
    groups_owned: usize,
    /// 0: without an election.
    groups: u8,
    partners: usize,
    partners_in_sync: usize,
    shadow_flows: u64,
    /// Routing sessions without those that are switched off.
    sessions: usize,
    sessions_up: usize,
}

#[derive(Debug, Serialize)]
struct WorkerRow {
    worker: usize,
    /// From ports and Linux, without packets of other workers.
    received_packets: u64,
    transmitted_packets: u64,
    dropped_packets: u64,
    flows: u64,
    flows_limit: u64,
    /// Cycles of the time stamp counter, and those spent on packets.
    cycles: u64,
    busy_cycles: u64,
}

#[derive(Debug, Serialize)]
struct PortRow {
    name: String,
    link: String,
    speed_mbps: Option<u32>,
    receive_packets: u64,
    receive_bytes: u64,
    transmit_packets: u64,
    transmit_bytes: u64,
    missed_packets: u64,
    errors: u64,
}

#[derive(Debug, Serialize)]
struct TaskRow {
    name: String,
    restarts: u64,
    last_failure: String,
}

#[derive(Debug, Serialize)]
struct ServiceRow {
    /// `namespace/name`.
    name: String,
    frontends: Vec<String>,
    frontends_total: usize,
    mode: String,
    target: String,
    scheduler: String,
    /// Without draining ones.
    backends: u32,
    healthy: u32,
    /// Whether the gateway refuses it, so that it forwards nothing for it.
    refused: bool,
    /// Why it is not served, or what it lacks; empty: neither.
    reason: String,
    message: String,
    #[serde(flatten)]
    traffic: TrafficCounts,
    /// Packets a second in the last 3 minutes, the newest last; of Services in the list.
    line: VecDeque<Option<f32>>,
    /// Some backends, those with trouble first, then those with most flows.
    members: Vec<MemberRow>,
    members_total: usize,
}

#[derive(Debug, Serialize)]
struct MemberRow {
    address: String,
    protocol: String,
    healthy: bool,
    draining: bool,
    weight: u16,
    /// Which probe fails and what it found; empty for a healthy backend.
    reason: String,
    /// Since when it is as it is; empty: not known.
    since: String,
    #[serde(flatten)]
    traffic: TrafficCounts,
}

#[derive(Debug, Serialize)]
struct EventRow {
    time: String,
    #[serde(rename = "type")]
    kind: String,
    reason: String,
    object: String,
    message: String,
}

/// What is known of Services: sums and order, the last minutes, and the Services themselves.
#[derive(Clone, Copy)]
pub(super) struct Known<'a> {
    pub(super) reading: &'a Reading,
    pub(super) lines: &'a StatusLines,
    pub(super) services: &'a Views,
}

/// Makes the document at `now`.
pub(super) fn make(
    query: &StatusQuery,
    now: Duration,
    known: &Known<'_>,
    sources: &Sources,
    workers: &WorkerLoads,
) -> StatusDocument {
    let Known { reading, lines, services } = *known;
    let status = sources.status();
    let found = find(query, query.order, reading, services);
    let row = |view: &ServiceView, members| service_row(view, members, sources);
    let listed = |view: &ServiceView| ServiceRow { line: lines.of_service(&view.name), ..row(view, MEMBERS_MAX) };
    let by_trouble = find(query, ServiceOrder::Trouble, reading, services);
    let heaviest = v1::ListHeaviestRequest { service: query.service.clone().unwrap_or_default(), ..Default::default() };
    let heaviest = sources.watches.newest_heaviest(&heaviest, HEAVIEST_SHOWN);
    let asked = |name: &String| services.values().find(|view| view.name.to_string() == *name);
    let (events, events_missing) = match sources.controller.view().and_then(|view| view.list_events()) {
        Ok(listed) => (event_rows(listed.events, query), None),
        Err(status) => (Vec::new(), Some(status.message().to_owned())),
    };
    StatusDocument {
        gateway: status.gateway,
        version: status.version,
        at_ms: milliseconds(now),
        ready: status.ready,
        draining: status.draining,
        controller_connected: status.controller_connected,
        state_expired: status.state_expired,
        generation: status.generation.map_or(0, |generation| generation.counter),
        troubles: sources.troubles.borrow().iter().map(TroubleRow::from).collect(),
        fleet: FleetRow::from(&*sources.fleet.status.borrow()),
        totals: reading.totals,
        workers: worker_rows(&status.accounts, workers),
        ports: (sources.ports)().into_iter().map(PortRow::from).collect(),
        drops: drops(sources),
        tasks: status.tasks.into_iter().map(TaskRow::from).collect(),
        matched: found.len(),
        services: found.iter().take(query.limit).map(|view| listed(view)).collect(),
        picture: by_trouble.iter().take(PICTURED).map(|view| row(view, MEMBERS_MAX)).collect(),
        lines: lines.figures.clone(),
        heaviest_flows: heaviest.flows,
        heaviest_clients: heaviest.clients,
        service: query.service.as_ref().and_then(asked).map(|view| row(view, OPEN_MEMBERS_MAX)),
        events,
        events_missing,
    }
}

/// The Services that match the search, in the order that is asked for.
fn find<'a>(query: &StatusQuery, order: ServiceOrder, reading: &Reading, services: &'a Views) -> Vec<&'a Arc<ServiceView>> {
    let rank = |view: &ServiceView| reading.ranks.get(&view.name).copied().unwrap_or_default();
    let is_wanted = |view: &ServiceView| matches(view, &query.search) && (!query.only_trouble || rank(view).has_trouble);
    let mut found: Vec<_> = services.values().filter(|view| is_wanted(view)).collect();
    // Rates are not negative, so their bits are in the order of their values.
    let by_rate = |Rank { rate, packets, .. }: Rank| Reverse((rate.to_bits(), packets));
    match order {
        ServiceOrder::Name => {} // as they are kept
        ServiceOrder::Rate => found.sort_by_cached_key(|view| by_rate(rank(view))),
        ServiceOrder::Trouble => found.sort_by_cached_key(|view| (!rank(view).has_trouble, by_rate(rank(view)))),
    }
    found
}

/// Whether the text is part of a name, an address, or the reason of the row.
fn matches(view: &ServiceView, search: &str) -> bool {
    let is_in = |text: String| text.to_lowercase().contains(search);
    search.is_empty()
        || is_in(view.name.to_string())
        || is_in(reason(view).0.to_owned())
        || view.ports.iter().flat_map(|port| &port.frontends).any(|address| is_in(address.to_string()))
        || view.ports.iter().flat_map(|port| &port.backends).any(|backend| is_in(backend.address.to_string()))
}

fn service_row(view: &ServiceView, members_max: usize, sources: &Sources) -> ServiceRow {
    let status = service(&sources.gateway, view);
    let rows = rows(view);
    let mut all: Vec<_> = rows.iter().map(|(at, row)| (at, row, TrafficCounts::of(row, &sources.workers.counters))).collect();
    let mut traffic = TrafficCounts::default();
    all.iter().for_each(|(_, _, of)| traffic.add(of));
    all.sort_by_key(|(_, row, of)| (row.healthy && !row.draining, Reverse(of.flows)));
    // In the order of addresses, so that lines stay where they are.
    all.truncate(members_max);
    all.sort_by_key(|(at, row, _)| (row.healthy && !row.draining, **at));
    let causes = sources.causes.borrow();
    let subject =
        |(at, protocol): &(SocketAddr, Protocol)| Subject { service: Arc::clone(&view.name), protocol: *protocol, address: *at };
    let subjects: Vec<_> = all.iter().map(|(at, ..)| subject(at)).collect();
    let since = sources.histories.since_s(&subjects).into_iter().map(|since_s| since_s.map(of_time).unwrap_or_default());
    let member =
        |(((address, protocol), row, traffic), since): ((&(SocketAddr, Protocol), &BackendRow, TrafficCounts), String)| {
            MemberRow {
                address: address.to_string(),
                protocol: protocol.to_string(),
                healthy: row.healthy,
                draining: row.draining,
                weight: row.weight,
                reason: row.reason(view, *address, *protocol, &causes),
                since,
                traffic,
            }
        };
    let frontends_total = status.frontends.len();
    ServiceRow {
        name: view.name.to_string(),
        frontends: status.frontends.into_iter().take(FRONTENDS_MAX).collect(),
        frontends_total,
        mode: status.mode,
        target: status.target,
        scheduler: status.scheduler,
        backends: status.backends,
        healthy: status.healthy,
        refused: view.refusal.is_some(),
        reason: status.reason,
        message: status.message,
        traffic,
        line: VecDeque::new(),
        members: all.into_iter().zip(since).map(member).collect(),
        members_total: rows.len(),
    }
}

fn worker_rows(accounts: &[v1::Account], workers: &WorkerLoads) -> Vec<WorkerRow> {
    let of = |(worker, (account, load)): (usize, (&v1::Account, crate::worker_threads::LoadReading))| WorkerRow {
        worker,
        received_packets: account.received - account.handed_in,
        transmitted_packets: account.transmitted - account.handed_out,
        dropped_packets: account.dropped,
        flows: account.flows,
        flows_limit: workers.flows_max(),
        cycles: load.cycles,
        busy_cycles: load.busy_cycles,
    };
    accounts.iter().zip(workers.read()).enumerate().map(of).collect()
}

/// Drops by reason, of all workers.
fn drops(sources: &Sources) -> BTreeMap<String, u64> {
    let mut drops = BTreeMap::new();
    for v1::DropCount { reason, packets, .. } in sources.drops().drops {
        if packets > 0 {
            *drops.entry(reason).or_default() += packets;
        }
    }
    drops
}

/// All events about the Service that is asked for, or the newest about what is searched for; the newest first.
fn event_rows(events: Vec<v1::EventStatus>, query: &StatusQuery) -> Vec<EventRow> {
    let object = query.service.as_ref().map(|service| format!("Service {service}"));
    let matches = |event: &v1::EventStatus| match &object {
        Some(object) => event.object == *object,
        None => {
            [&event.object, &event.reason, &event.message].into_iter().any(|text| text.to_lowercase().contains(&query.search))
        }
    };
    let row = |event: v1::EventStatus| EventRow {
        time: event.time,
        kind: event.r#type,
        reason: event.reason,
        object: event.object,
        message: event.message,
    };
    let most = if object.is_some() { usize::MAX } else { EVENTS_MAX };
    events.into_iter().rev().filter(matches).take(most).map(row).collect()
}

impl From<&Trouble> for TroubleRow {
    fn from(trouble: &Trouble) -> Self {
        let facts = trouble.kind.facts();
        Self {
            severity: facts.severity.as_str(),
            kind: facts.word,
            object: trouble.object.clone(),
            cause: trouble.cause.clone(),
            since: of_time(trouble.since_s),
            remedy: facts.remedy,
        }
    }
}

impl From<&FleetStatus> for FleetRow {
    fn from(fleet: &FleetStatus) -> Self {
        let (sessions_up, sessions) = fleet.sessions_up();
        Self {
            groups_owned: fleet.election.as_ref().map_or(0, |election| election.owned_groups().count()),
            groups: fleet.election.as_ref().map_or(0, |election| election.groups),
            partners: fleet.partners.len(),
            partners_in_sync: fleet.partners_in_sync(),
            shadow_flows: fleet.shadow_flows,
            sessions,
            sessions_up,
        }
    }
}

impl From<v1::PortStatus> for PortRow {
    fn from(port: v1::PortStatus) -> Self {
        Self {
            name: port.name,
            link: port.link,
            speed_mbps: port.speed_mbps,
            receive_packets: port.rx_packets,
            receive_bytes: port.rx_bytes,
            transmit_packets: port.tx_packets,
            transmit_bytes: port.tx_bytes,
            missed_packets: port.rx_missed,
            errors: port.rx_errors + port.tx_errors,
        }
    }
}

impl From<v1::TaskStatus> for TaskRow {
    fn from(task: v1::TaskStatus) -> Self {
        Self { name: task.name, restarts: task.restarts, last_failure: task.last_failure }
    }
}
