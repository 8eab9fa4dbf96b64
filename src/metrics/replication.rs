//! Metrics of the replication of flows to partners.
//!
//! Not here: the replication (`agent::fleet::replication`).

use std::fmt;
use std::time::Duration;

use control::metrics::{MetricFamily, MetricWriter};
use prometheus_client::metrics::gauge::ConstGauge;

use crate::agent::fleet::replication::{PartnerStatus, ReplicaExchange, ReplicationStatus};

const PARTNERS: MetricFamily = MetricFamily::gauge(
    "sluice_fleet_partners",
    "",
    "Partners (key fleet.listen), by whether they have all flows of this gateway.",
);
const FOLLOWED: MetricFamily =
    MetricFamily::gauge("sluice_fleet_followed_partners", "", "Partners whose flows this gateway has a copy of and follows.");
const LAG: MetricFamily =
    MetricFamily::gauge("sluice_fleet_lag", "seconds", "Age of the oldest news of flows that a partner lacks, of the slowest.");
const SHADOWS: MetricFamily = MetricFamily::gauge("sluice_shadow_flows", "", "Flows of partners that this gateway keeps.");
const REPLICAS: MetricFamily =
    MetricFamily::counter("sluice_flow", "replicas", "News of flows between workers and partners, by what became of it.");
const BATCHES: MetricFamily =
    MetricFamily::counter("sluice_flow_replica", "batches", "Batches of news to partners, by what became of them.");
const COPIES: MetricFamily =
    MetricFamily::counter("sluice_flow_replica", "copies", "Complete copies of all flows, to and from partners.");

/// The states of partners.
fn state(partner: &PartnerStatus) -> &'static str {
    match (partner.is_in_sync, partner.lag) {
        (true, _) => "in_sync",
        (false, Some(_)) => "behind",
        (false, None) => "unreached",
    }
}

/// Writes them.
pub(super) fn write(writer: &mut MetricWriter<'_>, status: &ReplicationStatus, exchange: &ReplicaExchange) -> fmt::Result {
    let in_state = |wanted| status.partners.iter().filter(|partner| state(partner) == wanted).count() as u64;
    writer.gauges(&PARTNERS, ["in_sync", "behind", "unreached"].map(|wanted| ([("state", wanted)], in_state(wanted))))?;
    writer.gauge(&FOLLOWED, exchange.followed())?;
    let lag = status.partners.iter().filter_map(|partner| partner.lag).max().unwrap_or(Duration::ZERO);
    writer.metric(&LAG, &ConstGauge::new(lag.as_secs_f64()))?;
    writer.gauge(&SHADOWS, exchange.shadow_flows())?;
    for (family, outcomes) in
        [(&REPLICAS, &exchange.outcomes()[..]), (&BATCHES, &exchange.batches()), (&COPIES, &exchange.copies())]
    {
        writer.counters(family, outcomes.iter().map(|(outcome, count)| ([("outcome", *outcome)], *count)))?;
    }
    Ok(())
}
