//! Metrics of the election of the owners of VIPs, and of stations that announce the same VIPs.
//!
//! Not here: the election (`fleet::election`).

use std::fmt;

use control::metrics::{MetricFamily, MetricWriter};
use prometheus_client::metrics::counter::ConstCounter;

use crate::fleet::election::ElectionStatus;

const OWNED: MetricFamily = MetricFamily::gauge("sluice_vip_group_owned", "", "1 while this gateway owns the group of VIPs.");
const TAKEOVERS: MetricFamily =
    MetricFamily::counter("sluice_vip_group", "takeovers", "How often this gateway has taken over the group of VIPs.");
const UNFIT: MetricFamily = MetricFamily::gauge(
    "sluice_vip_election_unfit",
    "",
    "1 while this gateway leaves its VIPs to others; 0 without an election.",
);
const JOINING: MetricFamily = MetricFamily::gauge(
    "sluice_vip_election_joining",
    "",
    "1 while this gateway waits for a state, for neighbours or for flows of its partners before it takes VIPs.",
);
const RESTARTS: MetricFamily = MetricFamily::counter(
    "sluice_vip_election",
    "restarts",
    "How often this gateway has given up its VIPs because it was stopped, overloaded, or without a link.",
);
const DUPLICATES: MetricFamily =
    MetricFamily::gauge("sluice_vip_duplicates", "", "VIPs that another station announces, without an election.");
const CLAIMS: MetricFamily =
    MetricFamily::counter("sluice_vip", "claims", "Announcements of VIPs of this gateway by another station.");

const CONTESTED: MetricFamily = MetricFamily::gauge(
    "sluice_vip_groups_contested",
    "",
    "Groups of VIPs that this gateway and another one claim, because they do not hear each other's VRRP.",
);

/// Writes them.
pub(super) fn write(writer: &mut MetricWriter<'_>, status: &ElectionStatus) -> fmt::Result {
    let groups = || (0_u32..).zip(&status.groups);
    writer.gauges(&OWNED, groups().map(|(number, group)| ([("group", number)], u64::from(group.is_owner))))?;
    writer.counters(&TAKEOVERS, groups().map(|(number, group)| ([("group", number)], group.takeovers)))?;
    writer.gauge(&UNFIT, u64::from(status.unfit.is_some()))?;
    writer.gauge(&JOINING, u64::from(status.is_joining))?;
    writer.metric(&RESTARTS, &ConstCounter::new(status.restarts))?;
    writer.gauge(&DUPLICATES, status.duplicates.len() as u64)?;
    writer.metric(&CLAIMS, &ConstCounter::new(status.claims))?;
    writer.gauge(&CONTESTED, status.contested.count_ones().into())
}
