//! The columns of each view: what they are called, how wide they are, and the value of a row, from which both its text
//! and its order follow.
//!
//! Not here: sorting, and drawing.

use std::borrow::Cow;
use std::cmp::Ordering;

use proto::v1;

use super::figures::{BackendFigures, DropFigures, Figures, GatewayFigures, PortFigures, ServiceFigures, Tone, WorkerFigures};
use super::number;
use super::rate::{History, Rate};

/// A list of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Services,
    Backends,
    Flows,
    Workers,
    Drops,
    Ports,
    Gateways,
    Heaviest,
}

impl View {
    pub(super) const ALL: [Self; 8] =
        [Self::Services, Self::Backends, Self::Flows, Self::Workers, Self::Drops, Self::Ports, Self::Gateways, Self::Heaviest];

    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::Services => "Services",
            Self::Backends => "Backends",
            Self::Flows => "Flows",
            Self::Workers => "Workers",
            Self::Drops => "Drops",
            Self::Ports => "Ports",
            Self::Gateways => "Gateways",
            Self::Heaviest => "Top",
        }
    }

    /// The column by which it is sorted at first.
    pub(super) const fn first_sort(self) -> &'static str {
        match self {
            Self::Services | Self::Backends | Self::Gateways => "PKT/s",
            Self::Flows => "CLIENT",
            Self::Heaviest => "BIT/s",
            Self::Workers => "WORKER",
            Self::Drops => "DROP/s",
            Self::Ports => "PORT",
        }
    }

    /// Its rows.
    pub(super) fn table(self, figures: &Figures) -> &dyn Table {
        match self {
            Self::Services => &figures.services,
            Self::Backends => &figures.backends,
            Self::Flows => &figures.flows,
            Self::Workers => &figures.workers,
            Self::Drops => &figures.drops,
            Self::Ports => &figures.ports,
            Self::Gateways => &figures.gateways,
            Self::Heaviest => &figures.heaviest,
        }
    }
}

/// The rows that are shown, if not all. Empty: all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Scope {
    pub(super) gateway: String,
    /// `namespace/name`
    pub(super) service: String,
    pub(super) backend: String,
}

impl Scope {
    fn has(&self, gateway: &str, service: &str) -> bool {
        (self.gateway.is_empty() || self.gateway == gateway) && (self.service.is_empty() || self.service == service)
    }
}

/// The value of a cell.
pub(super) enum Value<'a> {
    Text(Cow<'a, str>),
    State(&'a str, Tone),
    Count(u64),
    Seconds(u64),
    Rate(Rate),
    Share(Rate),
    /// How many of how many.
    Part(u32, u32),
    History(&'a History),
}

impl<'a> From<&'a String> for Value<'a> {
    fn from(text: &'a String) -> Self {
        Self::Text(Cow::Borrowed(text))
    }
}

impl Value<'_> {
    /// Its text; a history is as wide as its column.
    pub(super) fn text(&self, columns: usize) -> Cow<'_, str> {
        let or_unknown = |rate: &Rate, text: fn(f64) -> String| rate.map_or_else(|| "-".to_owned(), text);
        match self {
            Self::Text(text) => Cow::Borrowed(text),
            Self::State(text, _) => Cow::Borrowed(text),
            Self::Count(count) => number::count(*count).into(),
            Self::Seconds(seconds) => number::duration(*seconds).into(),
            Self::Rate(rate) => or_unknown(rate, number::rate).into(),
            Self::Share(share) => or_unknown(share, number::percent).into(),
            Self::Part(some, all) => format!("{some}/{all}").into(),
            Self::History(history) => history.bars(columns).into(),
        }
    }

    /// Words, as they can be searched for.
    pub(super) fn words(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::State(text, _) => Some(text),
            _ => None,
        }
    }

    /// What the value is sorted by: numbers; of a part the rest.
    fn number(&self) -> f64 {
        match self {
            Self::Count(number) | Self::Seconds(number) => *number as f64,
            Self::Rate(rate) | Self::Share(rate) => rate.unwrap_or(-1.0),
            Self::Part(some, all) => f64::from(all.saturating_sub(*some)),
            Self::Text(_) | Self::State(..) | Self::History(_) => 0.0,
        }
    }

    pub(super) fn compare(&self, other: &Self) -> Ordering {
        match (self.words(), other.words()) {
            (Some(one), Some(other)) => one.cmp(other),
            _ => self.number().total_cmp(&other.number()),
        }
    }
}

/// A column of rows of one kind.
pub(super) struct Column<R: 'static> {
    pub(super) title: &'static str,
    pub(super) width: u16,
    /// Whether its text stands at the right, and is sorted from high to low at first.
    pub(super) is_number: bool,
    value: fn(&R) -> Value<'_>,
}

const fn words<R>(title: &'static str, width: u16, value: fn(&R) -> Value<'_>) -> Column<R> {
    Column { title, width, is_number: false, value }
}

const fn number<R>(title: &'static str, width: u16, value: fn(&R) -> Value<'_>) -> Column<R> {
    Column { title, width, is_number: true, value }
}

/// A row of a view.
pub(super) trait TableRow: Sized + 'static {
    /// The first one takes the room that is left.
    const COLUMNS: &'static [Column<Self>];

    /// Identifies it from one sample to the next.
    fn key(&self) -> String;

    fn is_in(&self, _: &Scope) -> bool {
        true
    }

    /// More about it, in a line.
    fn detail(&self) -> String {
        String::new()
    }
}

/// The rows of a view, of whichever kind.
pub(super) trait Table {
    fn len(&self) -> usize;
    fn columns(&self) -> usize;
    /// Title, width in characters, whether it is of numbers.
    fn column(&self, column: usize) -> (&'static str, u16, bool);
    fn value(&self, row: usize, column: usize) -> Value<'_>;
    fn key(&self, row: usize) -> String;
    fn is_in(&self, row: usize, scope: &Scope) -> bool;
    fn detail(&self, row: usize) -> String;

    /// Whether a word of the row has the text, which is in lower case.
    fn has(&self, row: usize, text: &str) -> bool {
        (0..self.columns()).any(|column| self.value(row, column).words().is_some_and(|of| of.to_lowercase().contains(text)))
    }
}

impl<R: TableRow> Table for Vec<R> {
    fn len(&self) -> usize {
        self.len()
    }

    fn columns(&self) -> usize {
        R::COLUMNS.len()
    }

    fn column(&self, column: usize) -> (&'static str, u16, bool) {
        let Column { title, width, is_number, .. } = R::COLUMNS[column];
        (title, width, is_number)
    }

    fn value(&self, row: usize, column: usize) -> Value<'_> {
        (R::COLUMNS[column].value)(&self[row])
    }

    fn key(&self, row: usize) -> String {
        self[row].key()
    }

    fn is_in(&self, row: usize, scope: &Scope) -> bool {
        self[row].is_in(scope)
    }

    fn detail(&self, row: usize) -> String {
        self[row].detail()
    }
}

impl TableRow for ServiceFigures {
    const COLUMNS: &'static [Column<Self>] = &[
        words("SERVICE", 18, |row| (&row.name).into()),
        words("GATEWAY", 12, |row| (&row.status.gateway).into()),
        words("STATE", 8, |row| Value::State(row.state, row.tone)),
        number("UP", 7, |row| Value::Part(row.status.healthy, row.status.backends)),
        number("FLOWS", 6, |row| Value::Count(row.traffic.flows)),
        number("NEW/s", 6, |row| Value::Rate(row.traffic.new_flows)),
        number("PKT/s", 6, |row| Value::Rate(row.traffic.packets)),
        number("BIT/s", 6, |row| Value::Rate(row.traffic.bits)),
        number("DROP/s", 7, |row| Value::Rate(row.drops)),
        words("HISTORY", 8, |row| Value::History(&row.history)),
        number("FAIL/s", 7, |row| Value::Rate(row.traffic.failed)),
        words("MODE", 5, |row| (&row.status.mode).into()),
    ];

    fn key(&self) -> String {
        format!("{} {}", self.status.gateway, self.name)
    }

    fn is_in(&self, scope: &Scope) -> bool {
        scope.has(&self.status.gateway, &self.name)
    }

    fn detail(&self) -> String {
        let v1::ServiceStatus { frontends, mode, scheduler, reason, message, drops, .. } = &self.status;
        if !reason.is_empty() {
            return format!("{}: {reason}: {message}", self.name);
        }
        let more = if frontends.len() > 2 { format!(" +{}", frontends.len() - 2) } else { String::new() };
        let frontends = frontends.iter().take(2).map(String::as_str).collect::<Vec<_>>().join(", ");
        let mut drops: Vec<_> = drops.iter().map(|(reason, packets)| (*packets, reason)).collect();
        drops.sort_unstable_by(|a, b| b.cmp(a));
        let drops = drops.iter().take(3).map(|(packets, reason)| format!("{reason} {}", number::count(*packets)));
        let drops = drops.collect::<Vec<_>>().join(", ");
        let drops = if drops.is_empty() { "none".to_owned() } else { drops };
        format!("{frontends}{more}; {mode}, {scheduler}; drops: {drops}")
    }
}

impl TableRow for BackendFigures {
    const COLUMNS: &'static [Column<Self>] = &[
        words("BACKEND", 21, |row| (&row.status.address).into()),
        words("SERVICE", 16, |row| (&row.status.service).into()),
        words("GATEWAY", 12, |row| (&row.status.gateway).into()),
        words("STATE", 9, |row| Value::State(row.state, row.tone)),
        number("FLOWS", 6, |row| Value::Count(row.traffic.flows)),
        number("NEW/s", 6, |row| Value::Rate(row.traffic.new_flows)),
        number("PKT/s", 6, |row| Value::Rate(row.traffic.packets)),
        number("BIT/s", 6, |row| Value::Rate(row.traffic.bits)),
        words("HISTORY", 8, |row| Value::History(&row.history)),
        number("FAIL/s", 7, |row| Value::Rate(row.traffic.failed)),
        number("RST/s", 6, |row| Value::Rate(row.traffic.reset)),
        number("WEIGHT", 7, |row| Value::Count(row.status.weight.into())),
        words("PROTO", 5, |row| (&row.status.protocol).into()),
    ];

    fn key(&self) -> String {
        format!("{} {} {} {}", self.status.gateway, self.status.service, self.status.protocol, self.status.address)
    }

    fn is_in(&self, scope: &Scope) -> bool {
        scope.has(&self.status.gateway, &self.status.service)
    }

    fn detail(&self) -> String {
        let v1::BackendStatus { service, address, protocol, reason, weight, .. } = &self.status;
        let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        format!("{protocol} {address} of {service}, weight {weight}, is {}{reason}", self.state)
    }
}

impl TableRow for v1::FlowStatus {
    const COLUMNS: &'static [Column<Self>] = &[
        words("CLIENT", 20, |row| (&row.client).into()),
        words("PROT", 4, |row| (&row.protocol).into()),
        words("FRONTEND", 18, |row| (&row.frontend).into()),
        words("BACKEND", 18, |row| (&row.backend).into()),
        words("STATE", 11, |row| (&row.state).into()),
        number("IDLE", 4, |row| Value::Seconds(row.idle_s)),
        number("AGE", 4, |row| Value::Seconds(row.age_s)),
        number("WORKER", 7, |row| Value::Count(row.worker.into())),
        words("MODE", 5, |row| (&row.mode).into()),
        words("SERVICE", 16, |row| (&row.service).into()),
    ];

    fn key(&self) -> String {
        format!("{} {} {} {}", self.protocol, self.client, self.frontend, self.backend)
    }

    fn detail(&self) -> String {
        let Self { protocol, client, frontend, backend, snat, state, mode, .. } = self;
        let snat = if snat.is_empty() { String::new() } else { format!(" from {snat}") };
        format!("{protocol} {client} -> {frontend} -> {backend}{snat}, {mode}, {state}")
    }
}

/// In the column of frontends, of a client.
const ALL_FLOWS: &str = "all flows";

impl TableRow for v1::HeavyTraffic {
    const COLUMNS: &'static [Column<Self>] = &[
        words("CLIENT", 20, |row| (&row.client).into()),
        words("GATEWAY", 12, |row| (&row.gateway).into()),
        words("FRONTEND", 18, |row| if row.frontend.is_empty() { Value::Text(ALL_FLOWS.into()) } else { (&row.frontend).into() }),
        words("BACKEND", 18, |row| (&row.backend).into()),
        number("PKT/s", 6, |row| Value::Rate(Some(row.packets_per_second as f64))),
        number("BIT/s", 6, |row| Value::Rate(Some(row.bits_per_second as f64))),
        words("PROT", 4, |row| (&row.protocol).into()),
        words("SERVICE", 16, |row| (&row.service).into()),
    ];

    fn key(&self) -> String {
        format!("{} {} {} {}", self.gateway, self.protocol, self.client, self.frontend)
    }

    fn is_in(&self, scope: &Scope) -> bool {
        scope.has(&self.gateway, &self.service)
    }

    fn detail(&self) -> String {
        let Self { protocol, client, frontend, backend, service, samples, .. } = self;
        let estimate = format!("estimated from {samples} packets");
        match (frontend.as_str(), service.as_str()) {
            ("", "") => format!("all flows of {client}, to several Services; {estimate}"),
            ("", service) => format!("all flows of {client}, to {service}; {estimate}"),
            (frontend, service) => format!("{protocol} {client} -> {frontend} -> {backend} of {service}; {estimate}"),
        }
    }
}

impl TableRow for WorkerFigures {
    const COLUMNS: &'static [Column<Self>] = &[
        number("WORKER", 7, |row| Value::Count(row.account.worker.into())),
        words("STATE", 8, |row| {
            if row.account.stalled { Value::State("stalled", Tone::Alarm) } else { Value::State("polls", Tone::Plain) }
        }),
        number("BUSY", 5, |row| Value::Share(row.busy)),
        number("RX/s", 6, |row| Value::Rate(row.received)),
        number("TX/s", 6, |row| Value::Rate(row.transmitted)),
        number("DROP/s", 7, |row| Value::Rate(row.dropped)),
        number("FLOWS", 6, |row| Value::Count(row.account.flows)),
        number("FULL", 5, |row| {
            let max = row.account.flows_max;
            Value::Share((max > 0).then(|| row.account.flows as f64 / max as f64))
        }),
        number("HAND/s", 7, |row| Value::Rate(row.handed_in)),
        words("HISTORY", 8, |row| Value::History(&row.history)),
        number("HELD", 6, |row| Value::Count(row.account.held)),
    ];

    fn key(&self) -> String {
        self.account.worker.to_string()
    }

    fn detail(&self) -> String {
        let v1::Account { worker, flows, flows_max, handed_in, handed_out, .. } = self.account;
        format!("worker {worker}: {flows} of {flows_max} flows; {handed_in} packets from other workers, {handed_out} to them")
    }
}

impl TableRow for DropFigures {
    const COLUMNS: &'static [Column<Self>] = &[
        words("REASON", 22, |row| (&row.reason).into()),
        words("GATEWAY", 12, |row| (&row.gateway).into()),
        number("DROP/s", 7, |row| Value::Rate(row.rate)),
        number("PACKETS", 8, |row| Value::Count(row.packets)),
        words("HISTORY", 20, |row| Value::History(&row.history)),
    ];

    fn key(&self) -> String {
        format!("{} {}", self.gateway, self.reason)
    }

    fn is_in(&self, scope: &Scope) -> bool {
        scope.gateway.is_empty() || scope.gateway == self.gateway
    }

    fn detail(&self) -> String {
        let workers = self.workers.iter().filter(|(_, packets)| *packets > 0);
        let workers: Vec<_> = workers.map(|(worker, packets)| format!("{worker}: {packets}")).collect();
        format!("{} packets by worker: {}", self.reason, workers.join(", "))
    }
}

impl TableRow for PortFigures {
    const COLUMNS: &'static [Column<Self>] = &[
        words("PORT", 12, |row| (&row.status.name).into()),
        words("GATEWAY", 12, |row| (&row.status.gateway).into()),
        words("LINK", 6, |row| {
            let tone = if row.status.link == "up" { Tone::Plain } else { Tone::Alarm };
            Value::State(&row.status.link, tone)
        }),
        number("RX/s", 6, |row| Value::Rate(row.receive_packets)),
        number("TX/s", 6, |row| Value::Rate(row.transmit_packets)),
        number("RXBIT/s", 8, |row| Value::Rate(row.receive_bits)),
        number("TXBIT/s", 8, |row| Value::Rate(row.transmit_bits)),
        number("MISS/s", 7, |row| Value::Rate(row.missed)),
        number("ERR/s", 6, |row| Value::Rate(row.errors)),
        words("HISTORY", 8, |row| Value::History(&row.history)),
    ];

    fn key(&self) -> String {
        format!("{} {}", self.status.gateway, self.status.name)
    }

    fn is_in(&self, scope: &Scope) -> bool {
        scope.gateway.is_empty() || scope.gateway == self.status.gateway
    }

    fn detail(&self) -> String {
        let v1::PortStatus { name, device, steering, speed_mbps, .. } = &self.status;
        let speed = speed_mbps.map_or_else(|| "speed unknown".to_owned(), |mbps| format!("{mbps} Mbit/s"));
        format!("{name}: {device}, {speed}; {steering}")
    }
}

impl TableRow for GatewayFigures {
    const COLUMNS: &'static [Column<Self>] = &[
        words("GATEWAY", 16, |row| (&row.status.name).into()),
        words("STATE", 12, |row| Value::State(row.state, row.tone)),
        number("FLOWS", 6, |row| Value::Count(row.traffic.flows.max(row.status.flows))),
        number("NEW/s", 6, |row| Value::Rate(row.traffic.new_flows)),
        number("PKT/s", 6, |row| Value::Rate(row.traffic.packets)),
        number("BIT/s", 6, |row| Value::Rate(row.traffic.bits)),
        words("HISTORY", 8, |row| Value::History(&row.history)),
        words("VERSION", 8, |row| (&row.status.version).into()),
    ];

    fn key(&self) -> String {
        self.status.name.clone()
    }

    fn detail(&self) -> String {
        let v1::GatewayStatus { name, generation, last_seen, version, .. } = &self.status;
        let generation = if generation.is_empty() { "none".to_owned() } else { generation.clone() };
        format!("{name} {version}: generation {generation}, last heard of at {last_seen}")
    }
}
