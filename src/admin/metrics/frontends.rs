//! Metrics of the frontends of Services.
//!
//! Invariant: the first [`SERIES_MAX`] frontends, in the order of Services and of their ports, have series. A frontend is
//! a VIP and a port, or a node port at all addresses for node ports, so that their number does not depend on clients.
//! Not here: the counters (`dataplane::stats`).

use std::fmt;
use std::sync::Arc;

use control::metrics::{MetricFamily, MetricWriter};
use dataplane::snapshot::Views;
use dataplane::{FrontendTotals, WorkerCounters};

use super::backends::SERIES_MAX;

const PACKETS: MetricFamily =
    MetricFamily::counter("sluice_frontend", "packets", "Packets forwarded for a frontend of a Service, by direction.");
const BYTES: MetricFamily = MetricFamily::counter("sluice_frontend", "bytes", "Bytes of these packets, from the IP header on.");
const FLOWS: MetricFamily = MetricFamily::gauge("sluice_frontend", "flows", "Flows of a frontend of a Service.");
const NEW_FLOWS: MetricFamily =
    MetricFamily::counter("sluice_frontend_new", "flows", "Flows created for a frontend of a Service.");
const FAILED: MetricFamily = MetricFamily::counter(
    "sluice_frontend_failed",
    "connections",
    "Connections to a frontend (TCP, SCTP) whose time ended before both sides had confirmed them.",
);
const RESET: MetricFamily = MetricFamily::counter(
    "sluice_frontend_reset",
    "connections",
    "Confirmed TCP connections to a frontend that a RST of either side ended.",
);
const OMITTED: MetricFamily =
    MetricFamily::gauge("sluice_metrics_omitted", "frontends", "Frontends without metrics, because there are more than 10,000.");

/// A frontend, with its labels; cheap to copy for each metric.
struct FrontendSeries {
    service: Arc<str>,
    frontend: Arc<str>,
    protocol: Arc<str>,
    totals: FrontendTotals,
}

impl FrontendSeries {
    fn labels(&self) -> [(&'static str, Arc<str>); 3] {
        let Self { service, frontend, protocol, .. } = self;
        [("service", Arc::clone(service)), ("frontend", Arc::clone(frontend)), ("protocol", Arc::clone(protocol))]
    }
}

/// Writes the metrics of the frontends of all Services.
pub(super) fn write(writer: &mut MetricWriter<'_>, services: &Views, workers: &[Arc<WorkerCounters>]) -> fmt::Result {
    let all = || services.values().flat_map(|service| service.frontends.iter().map(move |frontend| (service, frontend)));
    let series = all().take(SERIES_MAX).map(|(service, frontend)| FrontendSeries {
        service: service.name.to_string().into(),
        frontend: frontend.address.to_string().into(),
        protocol: frontend.protocol.as_str().into(),
        totals: frontend.counters.totals(workers),
    });
    let series: Vec<_> = series.collect();
    let counted = |of: fn(&FrontendTotals) -> u64| series.iter().map(move |one| (one.labels(), of(&one.totals)));
    let directed = |of: fn(&FrontendTotals) -> [u64; 2]| {
        series.iter().flat_map(move |one| {
            let [to_backend, to_client] = of(&one.totals);
            [("to_backend", to_backend), ("to_client", to_client)].map(|(direction, count)| {
                let [service, frontend, protocol] = one.labels();
                ([service, frontend, protocol, ("direction", direction.into())], count)
            })
        })
    };
    writer.counters(&PACKETS, directed(|of| [of.packets_to_backends, of.packets_to_clients]))?;
    writer.counters(&BYTES, directed(|of| [of.bytes_to_backends, of.bytes_to_clients]))?;
    writer.gauges(&FLOWS, counted(|of| of.flows))?;
    writer.counters(&NEW_FLOWS, counted(|of| of.new_flows))?;
    writer.counters(&FAILED, counted(|of| of.failed))?;
    writer.counters(&RESET, counted(|of| of.reset))?;
    writer.gauge(&OMITTED, all().count().saturating_sub(SERIES_MAX) as u64)
}
