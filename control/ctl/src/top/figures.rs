//! What is shown: the rows of every view with their rates, made of the newest sample and the counters of the one before.
//!
//! Not here: which rows are shown in which order (`model`), and how (`columns`, `draw`).

use std::collections::{BTreeMap, HashMap};

use proto::v1;

use super::rate::{History, Rate, Tracker, sum};
use super::sample::{FlowSample, HeaviestSample, Sample};

/// How much attention a row needs; its words say the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tone {
    #[default]
    Plain,
    Notice,
    Alarm,
}

/// Traffic of a backend, of a Service or of all.
#[derive(Clone, Debug, Default)]
pub(super) struct Traffic {
    /// Both directions, a second.
    pub(super) packets: Rate,
    /// Both directions, from the IP header on, a second.
    pub(super) bits: Rate,
    pub(super) new_flows: Rate,
    pub(super) failed: Rate,
    pub(super) reset: Rate,
    pub(super) flows: u64,
}

impl Traffic {
    fn add(&mut self, other: &Self) {
        self.packets = sum([self.packets, other.packets]);
        self.bits = sum([self.bits, other.bits]);
        self.new_flows = sum([self.new_flows, other.new_flows]);
        self.failed = sum([self.failed, other.failed]);
        self.reset = sum([self.reset, other.reset]);
        self.flows += other.flows;
    }
}

#[derive(Clone, Debug)]
pub(super) struct ServiceFigures {
    pub(super) status: v1::ServiceStatus,
    /// `namespace/name`
    pub(super) name: String,
    pub(super) state: &'static str,
    pub(super) tone: Tone,
    pub(super) traffic: Traffic,
    pub(super) drops: Rate,
    pub(super) history: History,
}

#[derive(Clone, Debug)]
pub(super) struct BackendFigures {
    pub(super) status: v1::BackendStatus,
    pub(super) state: &'static str,
    pub(super) tone: Tone,
    pub(super) traffic: Traffic,
    pub(super) history: History,
}

#[derive(Clone, Debug)]
pub(super) struct WorkerFigures {
    pub(super) account: v1::Account,
    /// Share of its time, 0 to 1.
    pub(super) busy: Rate,
    pub(super) received: Rate,
    pub(super) transmitted: Rate,
    pub(super) dropped: Rate,
    pub(super) handed_in: Rate,
    pub(super) history: History,
}

#[derive(Clone, Debug)]
pub(super) struct DropFigures {
    pub(super) gateway: String,
    pub(super) reason: String,
    pub(super) packets: u64,
    /// Packets by worker.
    pub(super) workers: Vec<(u32, u64)>,
    pub(super) rate: Rate,
    pub(super) history: History,
}

#[derive(Clone, Debug)]
pub(super) struct PortFigures {
    pub(super) status: v1::PortStatus,
    pub(super) receive_packets: Rate,
    pub(super) transmit_packets: Rate,
    pub(super) receive_bits: Rate,
    pub(super) transmit_bits: Rate,
    pub(super) missed: Rate,
    pub(super) errors: Rate,
    pub(super) history: History,
}

#[derive(Clone, Debug)]
pub(super) struct GatewayFigures {
    pub(super) status: v1::GatewayStatus,
    pub(super) state: &'static str,
    pub(super) tone: Tone,
    pub(super) traffic: Traffic,
    pub(super) history: History,
}

/// Sums over all Services, and drops of all workers.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) traffic: Traffic,
    pub(super) drops: Rate,
    /// Of packets, bits, new flows, drops, flows.
    pub(super) histories: [History; 5],
}

#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) status: v1::GetStatusResponse,
    pub(super) totals: Totals,
    pub(super) services: Vec<ServiceFigures>,
    pub(super) backends: Vec<BackendFigures>,
    pub(super) flows: Vec<v1::FlowStatus>,
    pub(super) flow_sample: Option<FlowSample>,
    pub(super) heaviest: Vec<v1::HeavyTraffic>,
    pub(super) heaviest_sample: Option<HeaviestSample>,
    pub(super) workers: Vec<WorkerFigures>,
    pub(super) drops: Vec<DropFigures>,
    pub(super) ports: Vec<PortFigures>,
    pub(super) gateways: Vec<GatewayFigures>,
    pub(super) gateways_refusal: Option<String>,
    pub(super) silent: Vec<v1::Silent>,
    /// Whether rows come from more than one gateway.
    pub(super) of_several: bool,
}

impl Figures {
    /// The figures of a sample.
    pub(super) fn new(sample: Sample, tracker: &mut Tracker) -> Self {
        tracker.begin(sample.at);
        let of_several = sample.gateways.len() > 1 && sample.status.gateway.is_empty();
        let backends: Vec<_> = sample.backends.into_iter().map(|status| backend(status, tracker)).collect();
        let services = services(sample.services, &backends, tracker);
        let gateways = sample.gateways.into_iter().map(|status| gateway(status, &backends, tracker)).collect();
        let drops = drops(sample.drops, tracker);
        let figures = Self {
            totals: totals(&backends, &drops, tracker),
            workers: sample.status.accounts.iter().map(|account| worker(*account, tracker)).collect(),
            ports: sample.ports.into_iter().map(|status| port(status, tracker)).collect(),
            status: sample.status,
            services,
            backends,
            flows: sample.flows.as_ref().map(|flows| flows.rows.clone()).unwrap_or_default(),
            heaviest: sample.heaviest.as_ref().map(|heaviest| heaviest.rows.clone()).unwrap_or_default(),
            heaviest_sample: sample.heaviest.map(|heaviest| HeaviestSample { rows: Vec::new(), ..heaviest }),
            flow_sample: sample.flows.map(|flows| FlowSample { rows: Vec::new(), ..flows }),
            drops,
            gateways,
            gateways_refusal: sample.gateways_refusal,
            silent: sample.silent,
            of_several,
        };
        tracker.end();
        figures
    }
}

fn backend(status: v1::BackendStatus, tracker: &mut Tracker) -> BackendFigures {
    let key = format!("backend {} {} {} {}", status.gateway, status.service, status.protocol, status.address);
    let traffic = status.traffic.map_or_else(Traffic::default, |of| {
        let counters = [
            of.packets_to_backend + of.packets_to_clients,
            (of.bytes_to_backend + of.bytes_to_clients).saturating_mul(8),
            of.new_flows,
            of.failed_connections,
            of.reset_connections,
        ];
        let [packets, bits, new_flows, failed, reset] = tracker.rates(&key, counters);
        Traffic { packets, bits, new_flows, failed, reset, flows: 0 }
    });
    let traffic = Traffic { flows: status.flows, ..traffic };
    let (state, tone) = match (status.state.as_str(), status.healthy) {
        ("removed", _) => ("removed", Tone::Notice),
        ("draining", _) => ("draining", Tone::Notice),
        (_, true) => ("healthy", Tone::Plain),
        (_, false) => ("unhealthy", Tone::Alarm),
    };
    let history = tracker.remember(&key, traffic.packets);
    BackendFigures { status, state, tone, traffic, history }
}

/// Whether the reason of a Service tells no more than that it has no backend.
fn lacks_backends(status: &v1::ServiceStatus) -> bool {
    ["NoEndpoints", "NoMatchingPort", "NoHealthyBackend", "AnnotationIgnored"].contains(&&*status.reason)
}

fn services(rows: Vec<v1::ServiceStatus>, backends: &[BackendFigures], tracker: &mut Tracker) -> Vec<ServiceFigures> {
    let mut sums: HashMap<(&str, &str), Traffic> = HashMap::new();
    for backend in backends {
        sums.entry((&backend.status.gateway, &backend.status.service)).or_default().add(&backend.traffic);
    }
    let service = |status: v1::ServiceStatus| {
        let name = format!("{}/{}", status.namespace, status.name);
        let traffic = sums.get(&(status.gateway.as_str(), name.as_str())).cloned().unwrap_or_default();
        let key = format!("service {} {name}", status.gateway);
        let [drops] = tracker.rates(&key, [status.drops.values().sum()]);
        let (state, tone) = match (&status, status.healthy) {
            // A Service that is refused has no backend, for another reason than that it lacks them.
            (status, _) if !status.reason.is_empty() && status.backends == 0 && !lacks_backends(status) => {
                ("refused", Tone::Alarm)
            }
            (status, _) if status.backends == 0 => ("empty", Tone::Alarm),
            (_, 0) => ("down", Tone::Alarm),
            (status, healthy) if healthy < status.backends || !status.reason.is_empty() => ("degraded", Tone::Notice),
            _ => ("ok", Tone::Plain),
        };
        let history = tracker.remember(&key, traffic.packets);
        ServiceFigures { status, name, state, tone, traffic, drops, history }
    };
    rows.into_iter().map(service).collect()
}

fn worker(account: v1::Account, tracker: &mut Tracker) -> WorkerFigures {
    let key = format!("worker {}", account.worker);
    let counters = [
        account.received.saturating_sub(account.handed_in),
        account.transmitted.saturating_sub(account.handed_out),
        account.dropped,
        account.handed_in,
        account.cycles,
        account.busy_cycles,
    ];
    let [received, transmitted, dropped, handed_in, cycles, busy_cycles] = tracker.rates(&key, counters);
    let busy = cycles.zip(busy_cycles).map(|(all, busy)| if all > 0.0 { busy / all } else { 0.0 });
    let history = tracker.remember(&key, busy);
    WorkerFigures { account, busy, received, transmitted, dropped, handed_in, history }
}

/// One row for each gateway and reason; of those that occurred.
fn drops(counts: Vec<v1::DropCount>, tracker: &mut Tracker) -> Vec<DropFigures> {
    let mut rows: BTreeMap<(String, String), Vec<(u32, u64)>> = BTreeMap::new();
    for count in counts {
        rows.entry((count.gateway, count.reason)).or_default().push((count.worker, count.packets));
    }
    let row = |((gateway, reason), workers): ((String, String), Vec<(u32, u64)>)| {
        let packets = workers.iter().map(|(_, packets)| packets).sum();
        let key = format!("drop {gateway} {reason}");
        let [rate] = tracker.rates(&key, [packets]);
        let history = tracker.remember(&key, rate);
        DropFigures { gateway, reason, packets, workers, rate, history }
    };
    rows.into_iter().map(row).filter(|row| row.packets > 0).collect()
}

fn port(status: v1::PortStatus, tracker: &mut Tracker) -> PortFigures {
    let key = format!("port {} {}", status.gateway, status.name);
    let counters = [
        status.rx_packets,
        status.tx_packets,
        status.rx_bytes.saturating_mul(8),
        status.tx_bytes.saturating_mul(8),
        status.rx_missed,
        status.rx_errors.saturating_add(status.tx_errors),
    ];
    let [receive_packets, transmit_packets, receive_bits, transmit_bits, missed, errors] = tracker.rates(&key, counters);
    let history = tracker.remember(&key, sum([receive_packets, transmit_packets]));
    PortFigures { status, receive_packets, transmit_packets, receive_bits, transmit_bits, missed, errors, history }
}

fn gateway(status: v1::GatewayStatus, backends: &[BackendFigures], tracker: &mut Tracker) -> GatewayFigures {
    let mut traffic = Traffic::default();
    backends.iter().filter(|backend| backend.status.gateway == status.name).for_each(|of| traffic.add(&of.traffic));
    let (state, tone) = match (status.version.is_empty(), status.draining, status.ready) {
        (true, ..) => ("disconnected", Tone::Alarm),
        (_, true, _) => ("draining", Tone::Notice),
        (_, _, true) => ("ready", Tone::Plain),
        _ => ("not ready", Tone::Alarm),
    };
    let history = tracker.remember(&format!("gateway {}", status.name), traffic.packets);
    GatewayFigures { status, state, tone, traffic, history }
}

fn totals(backends: &[BackendFigures], drops: &[DropFigures], tracker: &mut Tracker) -> Totals {
    let mut traffic = Traffic::default();
    backends.iter().for_each(|backend| traffic.add(&backend.traffic));
    // Without any drop it is 0.
    let drops = sum(drops.iter().map(|drop| drop.rate)).or(traffic.packets.map(|_| 0.0));
    let rates = [traffic.packets, traffic.bits, traffic.new_flows, drops, Some(traffic.flows as f64)];
    let mut numbers = 0..;
    let histories = rates.map(|rate| tracker.remember(&format!("total {}", numbers.next().unwrap_or(0)), rate));
    Totals { traffic, drops, histories }
}
