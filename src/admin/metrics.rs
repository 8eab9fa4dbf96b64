//! The metrics and probes of a gateway (DESIGN 10), on the address of key `metrics.listen`: `/metrics`, `/livez` and
//! `/readyz`, and the status page. A gateway with an embedded controller shows that one's metrics too.
//!
//! Invariant: values are read when they are asked for, from what the admin API reads; nothing here is on the way of a
//! packet. The number of series is bounded: 10,000 backends and 10,000 Services have series of their own.
//! Not here: counting, HTTP and text formats (`control::healthz`, `control::metrics`).

mod backends;
mod election;
mod fleet;
mod frontends;
mod replication;
mod status_page;
mod workers;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use control::gateways::listener::KeyCertificates;
use control::gateways::socket::listen_tcp;
use control::healthz::{self, Pages, Unwell};
use control::metrics::{ControllerMetrics, MetricFamily, MetricWriter, TextFormat, write_certificates, write_program};
use dataplane::DropReason;
use http::request::Parts;
use http::{HeaderMap, Response};
use http_body_util::Full;
use hyper::body::Bytes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use proto::trouble::Severity;
use proto::v1;
use tokio_util::sync::CancellationToken;

use crate::admin::{ControllerAccess, Sources};
use crate::agent::supervisor::Failure;
use crate::fleet::replication::ReplicaExchange;
use crate::flow_records::FlowExport;
pub use status_page::StatusPage;
pub use workers::WorkerLoads;

const READY: MetricFamily = MetricFamily::gauge("sluice_ready", "", "1 once every worker forwards by a complete state.");
const DRAINING: MetricFamily = MetricFamily::gauge("sluice_draining", "", "1 while the gateway is drained or stops.");
const TROUBLES: MetricFamily =
    MetricFamily::gauge("sluice_troubles", "", "Troubles that the gateway sees of itself and its Services, by severity.");
const CONNECTED: MetricFamily = MetricFamily::gauge("sluice_controller_connected", "", "1 while a controller is connected.");
const STATE_EXPIRED: MetricFamily = MetricFamily::gauge(
    "sluice_state_expired",
    "",
    "1 while no controller has confirmed the state for longer than maxStateAge: only nodes are used of it.",
);
const GENERATION: MetricFamily =
    MetricFamily::gauge("sluice_snapshot_generation", "", "Counter of the newest state that every worker forwards by.");
const TASK_RESTARTS: MetricFamily =
    MetricFamily::counter("sluice_task", "restarts", "Restarts of tasks beside the workers after failures.");
const DROPS: MetricFamily = MetricFamily::counter("sluice", "drops", "Dropped packets, by reason.");
const FLOW_RECORDS: MetricFamily =
    MetricFamily::counter("sluice_flow", "records", "Records of flows (key flowRecords.to), by what became of them.");
const PORT_UP: MetricFamily = MetricFamily::gauge("sluice_port_up", "", "1 while the port's device is present and has a link.");

type OfPort = fn(&v1::PortStatus) -> u64;

/// The counters of ports.
const OF_PORTS: [(MetricFamily, OfPort); 7] = [
    (MetricFamily::counter("sluice_port_receive", "packets", "Packets that the port received."), |port| port.rx_packets),
    (MetricFamily::counter("sluice_port_receive", "bytes", "Bytes that the port received."), |port| port.rx_bytes),
    (MetricFamily::counter("sluice_port_missed", "packets", "Packets lost because a receive queue was full."), |port| {
        port.rx_missed
    }),
    (MetricFamily::counter("sluice_port_receive", "errors", "Packets received with errors, or without a free buffer."), |port| {
        port.rx_errors
    }),
    (MetricFamily::counter("sluice_port_transmit", "packets", "Packets that the port sent."), |port| port.tx_packets),
    (MetricFamily::counter("sluice_port_transmit", "bytes", "Bytes that the port sent."), |port| port.tx_bytes),
    (MetricFamily::counter("sluice_port_transmit", "errors", "Packets that the port failed to send."), |port| port.tx_errors),
];

/// What a gateway serves on `metrics.listen`.
#[derive(Clone)]
pub struct GatewayPages {
    /// What the admin API reads.
    pub sources: Sources,
    /// The load of each worker.
    pub workers: Arc<WorkerLoads>,
    /// What became of flow records.
    pub export: Arc<FlowExport>,
    /// What became of replicas of flows.
    pub exchange: Arc<ReplicaExchange>,
    /// The status page.
    pub status_page: Arc<StatusPage>,
    /// The certificates that the gateway shows, without those of an embedded controller.
    pub certificates: Vec<KeyCertificates>,
    /// Cancelled when the gateway is about to end.
    pub terminating: CancellationToken,
}

impl fmt::Debug for GatewayPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatewayPages").field("workers", &self.workers).finish_non_exhaustive()
    }
}

/// The server of the pages. Cloned for each start.
#[derive(Clone, Debug)]
pub struct PagesServer {
    /// Key `metrics.listen`.
    pub address: SocketAddr,
    /// What it serves.
    pub pages: GatewayPages,
    /// Cancelled at the end.
    pub shutdown: CancellationToken,
}

impl PagesServer {
    /// Serves them until `shutdown`.
    ///
    /// # Errors
    /// If the address is in use, or is not of this machine.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { address, pages, shutdown } = self;
        let listener = listen_tcp(address).await?;
        let points = Arc::clone(&pages.status_page).take_points(pages.sources.clone());
        tokio::select! {
            () = healthz::serve(listener, pages, shutdown) => Ok(()),
            () = points => Ok(()),
        }
    }
}

impl Pages for GatewayPages {
    /// The process answers, and every worker polls. A worker that panics ends the process.
    fn live(&self) -> Result<(), Unwell> {
        if self.workers.any_stalled() { Err("a worker does not poll its ports; the log says which") } else { Ok(()) }
    }

    async fn ready(&self) -> Result<(), Unwell> {
        if self.terminating.is_cancelled() {
            Err("the gateway stops")
        } else if *self.sources.state.draining.borrow() {
            Err("the gateway is drained")
        } else if !self.sources.served.borrow().ready {
            Err("no complete state has arrived yet; the log says why")
        } else {
            Ok(())
        }
    }

    fn metrics(&self, accept: Option<&str>) -> Option<(&'static str, Result<String, fmt::Error>)> {
        let format = TextFormat::accepted(accept);
        Some((format.content_type(), format.text(self.clone())))
    }

    /// Metrics show as much of a gateway as its page does.
    fn is_addressed(&self, headers: &HeaderMap) -> bool {
        self.status_page.is_addressed_directly(headers)
    }

    fn page(&self, request: &Parts) -> Option<Response<Full<Bytes>>> {
        self.status_page.answer(request, &self.sources, &self.workers)
    }
}

impl Collector for GatewayPages {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (mut writer, sources) = (MetricWriter::new(encoder), &self.sources);
        write_program(&mut writer, "sluiced", &sources.version)?;
        let controller = match &sources.controller {
            ControllerAccess::Embedded(view) => view.borrow().clone(),
            ControllerAccess::Remote(_) => None,
        };
        let of_controller = controller.iter().flat_map(|view| &view.certificates);
        write_certificates(&mut writer, self.certificates.iter().chain(of_controller))?;
        writer.gauge(&READY, u64::from(sources.served.borrow().ready))?;
        writer.gauge(&DRAINING, u64::from(*sources.state.draining.borrow() || self.terminating.is_cancelled()))?;
        writer.gauge(&CONNECTED, u64::from(*sources.state.connected.borrow()))?;
        writer.gauge(&STATE_EXPIRED, u64::from(sources.status().state_expired))?;
        writer.gauge(&GENERATION, sources.state.applied.borrow().as_ref().map_or(0, |generation| generation.counter))?;
        let troubles = sources.troubles.borrow().clone();
        let of = |severity| troubles.iter().filter(|trouble| trouble.kind.facts().severity == severity).count() as u64;
        writer.gauges(&TROUBLES, Severity::ALL.iter().map(|severity| ([("severity", severity.as_str())], of(*severity))))?;
        election::write(&mut writer, &sources.fleet.election.borrow())?;
        replication::write(&mut writer, &self.exchange)?;
        fleet::write(&mut writer, &sources.fleet.status.borrow().clone(), &sources.fleet.replication.borrow().clone())?;
        let tasks = sources.tasks.status();
        writer.counters(&TASK_RESTARTS, tasks.iter().map(|task| ([("task", &task.name)], task.restarts)))?;
        let dropped = |reason: DropReason| sources.workers.counters.iter().map(|worker| worker.drops(reason).get()).sum();
        writer.counters(&DROPS, DropReason::ALL.iter().map(|reason| ([("reason", reason.as_str())], dropped(*reason))))?;
        self.workers.write(&mut writer, &sources.workers.counters)?;
        let outcomes = self.export.outcomes().map(|(outcome, records)| ([("outcome", outcome)], records));
        writer.counters(&FLOW_RECORDS, outcomes)?;
        let ports = (sources.ports)();
        writer.gauges(&PORT_UP, ports.iter().map(|port| ([("port", &port.name)], u64::from(port.link == "up"))))?;
        for (family, value) in &OF_PORTS {
            writer.counters(family, ports.iter().map(|port| ([("port", &port.name)], value(port))))?;
        }
        let target_use = sources.served.borrow().target_use;
        backends::write_targets(&mut writer, target_use)?;
        let services = sources.served.borrow().services.clone();
        backends::write(&mut writer, &services, &sources.workers.counters)?;
        frontends::write(&mut writer, &services, &sources.workers.counters)?;
        controller.map_or(Ok(()), |view| ControllerMetrics(view).write(&mut writer))
    }
}
