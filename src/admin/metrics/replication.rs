//! Metrics of the replication of flows to partners.
//!
//! Not here: the replication (`fleet::replication`), and partners (`fleet`).

use std::fmt;

use control::metrics::{MetricFamily, MetricWriter};

use crate::fleet::replication::ReplicaExchange;

const FOLLOWED: MetricFamily =
    MetricFamily::gauge("sluice_fleet_followed_partners", "", "Partners whose flows this gateway has a copy of and follows.");
const REPLICAS: MetricFamily =
    MetricFamily::counter("sluice_flow", "replicas", "News of flows between workers and partners, by what became of it.");
const BATCHES: MetricFamily =
    MetricFamily::counter("sluice_flow_replica", "batches", "Batches of news to partners, by what became of them.");
const COPIES: MetricFamily =
    MetricFamily::counter("sluice_flow_replica", "copies", "Complete copies of all flows, to and from partners.");

/// Writes them.
pub(super) fn write(writer: &mut MetricWriter<'_>, exchange: &ReplicaExchange) -> fmt::Result {
    writer.gauge(&FOLLOWED, exchange.followed())?;
    for (family, outcomes) in
        [(&REPLICAS, &exchange.outcomes()[..]), (&BATCHES, &exchange.batches()[..]), (&COPIES, &exchange.copies()[..])]
    {
        writer.counters(family, outcomes.iter().map(|(outcome, count)| ([("outcome", *outcome)], *count)))?;
    }
    Ok(())
}
