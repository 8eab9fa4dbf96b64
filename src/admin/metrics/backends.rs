//! Metrics of Services and their backends.
//!
//! Invariant: a backend of a Service has one series of each metric, however many ports of the Service lead to it. The
//! first [`SERIES_MAX`] backends, in the order of Services and addresses, have series; sums of the others would fall when
//! a backend goes, which a counter may not.
//! Not here: the counters (`dataplane::stats`).

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use control::metrics::{MetricFamily, MetricWriter};
use dataplane::snapshot::{ServiceView, TargetUse, Views};
use dataplane::{BackendCounters, DropReason, WorkerCounters};
use proto::Protocol;

use crate::agent::served::BackendCounts;

/// Maximum number of backends with series, and of Services: 11 series a backend are 110,000, about 13 MB a scrape.
pub(super) const SERIES_MAX: usize = 10_000;

const PACKETS: MetricFamily =
    MetricFamily::counter("sluice", "packets", "Packets forwarded for a backend of a Service, by direction.");
const BYTES: MetricFamily = MetricFamily::counter("sluice", "bytes", "Bytes of these packets, from the IP header on.");
const FLOWS: MetricFamily = MetricFamily::gauge("sluice", "flows", "Flows of a backend of a Service.");
const NEW_FLOWS: MetricFamily = MetricFamily::counter("sluice_new", "flows", "Flows created for a backend of a Service.");
const FAILED: MetricFamily = MetricFamily::counter(
    "sluice_failed",
    "connections",
    "Connections of modes with replies (TCP, SCTP) whose time ended before both sides had confirmed them.",
);
const RESET: MetricFamily =
    MetricFamily::counter("sluice_reset", "connections", "Confirmed TCP connections that a RST of either side ended.");
const HEALTHY: MetricFamily = MetricFamily::gauge("sluice_backend_healthy", "", "1 while the probes of a backend pass.");
const DRAINING: MetricFamily =
    MetricFamily::gauge("sluice_backend_draining", "", "1 while a backend takes no new flows and will be removed.");
const WEIGHT: MetricFamily = MetricFamily::gauge("sluice_backend_weight", "", "Weight of a backend.");
const OMITTED: MetricFamily =
    MetricFamily::gauge("sluice_metrics_omitted", "backends", "Backends without metrics, because there are more than 10,000.");
const OMITTED_SERVICES: MetricFamily =
    MetricFamily::gauge("sluice_metrics_omitted", "services", "Services without metrics, because there are more than 10,000.");
const SERVICE_BACKENDS: MetricFamily =
    MetricFamily::gauge("sluice_service", "backends", "Backends of a Service without draining ones.");
const SERVICE_HEALTHY: MetricFamily = MetricFamily::gauge(
    "sluice_service_healthy",
    "backends",
    "Backends of a Service that are healthy on all their ports, without draining ones.",
);
const SERVICE_REFUSED: MetricFamily =
    MetricFamily::gauge("sluice_service_refused", "", "1 for each Service that is not served, or only in part, with the reason.");

const SERVICE_DROPS: MetricFamily = MetricFamily::counter(
    "sluice_service",
    "drops",
    "Dropped packets to the frontends of a Service, by reason; those that occurred.",
);

const TARGETS: MetricFamily = MetricFamily::gauge(
    "sluice",
    "targets",
    "Room for backends of all Services that is held: by listed ones, by removed ones that drain, by targets that rest.",
);
const TARGETS_LIMIT: MetricFamily =
    MetricFamily::gauge("sluice_targets_limit", "", "Room for backends of all Services (key limits.targets).");
const TARGETS_REFUSED: MetricFamily = MetricFamily::gauge(
    "sluice_targets_refused",
    "services",
    "Services some of whose backends are not used, because there is no room for them.",
);

/// Writes how much of the room for backends is held.
pub(super) fn write_targets(writer: &mut MetricWriter<'_>, held: TargetUse) -> fmt::Result {
    let states = [("listed", held.listed), ("draining", held.draining), ("resting", held.resting)];
    writer.gauges(&TARGETS, states.into_iter().map(|(state, count)| ([("state", state)], u64::from(count))))?;
    writer.gauge(&TARGETS_LIMIT, u64::from(held.limit))?;
    writer.gauge(&TARGETS_REFUSED, u64::from(held.refused_services))
}

/// A backend of a Service, with its labels.
struct BackendSeries {
    service: Arc<str>,
    protocol: Protocol,
    address: Arc<str>,
    slot: u32,
    healthy: bool,
    draining: bool,
    weight: u16,
}

/// Names of a series; cheap to copy for each metric.
type Names = [(&'static str, Arc<str>); 3];

impl BackendSeries {
    fn labels(&self) -> Names {
        let protocol: Arc<str> = self.protocol.as_str().into();
        [("service", Arc::clone(&self.service)), ("backend", Arc::clone(&self.address)), ("protocol", protocol)]
    }
}

/// The backends of a Service; one that several ports lead to is healthy if it is on all, draining if it is on all.
fn series(service: &ServiceView) -> impl Iterator<Item = BackendSeries> {
    let name: Arc<str> = service.name.to_string().into();
    let mut all: BTreeMap<(SocketAddr, &str), BackendSeries> = BTreeMap::new();
    for port in &service.ports {
        for backend in &port.backends {
            let new = || BackendSeries {
                service: Arc::clone(&name),
                protocol: port.protocol,
                address: backend.address.to_string().into(),
                slot: backend.id.slot,
                healthy: true,
                draining: true,
                weight: backend.weight,
            };
            let one = all.entry((backend.address, port.protocol.as_str())).or_insert_with(new);
            one.healthy &= backend.healthy;
            one.draining &= backend.draining;
        }
    }
    all.into_values()
}

/// Writes the metrics of all Services and backends.
pub(super) fn write(writer: &mut MetricWriter<'_>, services: &Views, workers: &[Arc<WorkerCounters>]) -> fmt::Result {
    let (mut backends, mut omitted) = (Vec::new(), 0);
    for one in services.values().flat_map(|service| series(service)) {
        if backends.len() < SERIES_MAX { backends.push(one) } else { omitted += 1 }
    }
    let sum = |slot: u32, of: fn(&WorkerCounters, u32) -> u64| workers.iter().map(|worker| of(worker, slot)).sum::<u64>();
    let counted = |of: fn(&WorkerCounters, u32) -> u64| backends.iter().map(move |one| (one.labels(), sum(one.slot, of)));
    let directed = |of: fn(&BackendCounters, bool) -> u64| {
        backends.iter().flat_map(move |one| {
            [("to_backend", false), ("to_client", true)].map(|(name, is_to_client)| {
                let count = |worker: &Arc<WorkerCounters>| worker.sum_of(one.slot, |all| of(all, is_to_client));
                let [service, backend, protocol] = one.labels();
                ([service, backend, protocol, ("direction", name.into())], workers.iter().map(count).sum())
            })
        })
    };
    writer.counters(&PACKETS, directed(BackendCounters::packets))?;
    writer.counters(&BYTES, directed(BackendCounters::bytes))?;
    writer.gauges(&FLOWS, counted(WorkerCounters::flows_of))?;
    writer.counters(&NEW_FLOWS, counted(|worker, slot| worker.sum_of(slot, |of| of.new_flows.get())))?;
    writer.counters(&FAILED, counted(|worker, slot| worker.sum_of(slot, |of| of.failed.get())))?;
    writer.counters(&RESET, counted(|worker, slot| worker.sum_of(slot, |of| of.reset.get())))?;
    writer.gauges(&HEALTHY, backends.iter().map(|one| (one.labels(), u64::from(one.healthy))))?;
    writer.gauges(&DRAINING, backends.iter().map(|one| (one.labels(), u64::from(one.draining))))?;
    writer.gauges(&WEIGHT, backends.iter().map(|one| (one.labels(), u64::from(one.weight))))?;
    writer.gauge(&OMITTED, omitted)?;
    let counts = services.values().take(SERIES_MAX).map(|service| (service.name.to_string(), BackendCounts::from(&**service)));
    let counts: Vec<_> = counts.collect();
    writer.gauges(&SERVICE_BACKENDS, counts.iter().map(|(name, of)| ([("service", name)], of.backends)))?;
    writer.gauges(&SERVICE_HEALTHY, counts.iter().map(|(name, of)| ([("service", name)], of.healthy)))?;
    let refused = services.values().take(SERIES_MAX).filter_map(|service| {
        let reason = service.refusal.as_ref()?.reason.as_str().to_owned();
        Some(([("service", service.name.to_string()), ("reason", reason)], 1_u64))
    });
    writer.gauges(&SERVICE_REFUSED, refused)?;
    let drops = services.values().take(SERIES_MAX).flat_map(|service| {
        let dropped =
            DropReason::ALL.iter().map(|&reason| (reason, service.drops.sum(reason))).filter(|(_, packets)| *packets > 0);
        dropped
            .map(|(reason, packets)| ([("service", service.name.to_string()), ("reason", reason.as_str().to_owned())], packets))
    });
    writer.counters(&SERVICE_DROPS, drops)?;
    writer.gauge(&OMITTED_SERVICES, services.len().saturating_sub(SERIES_MAX) as u64)
}
