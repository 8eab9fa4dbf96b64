//! Metrics of routing sessions and of the replication of flows.
//!
//! Invariant: a series exists for each peer and partner that is configured, at most 128. Not here: the sessions and the
//! replication (`fleet`).

use std::fmt;

use control::metrics::{MetricFamily, MetricWriter};
use proto::{FleetStatus, RoutingSession, SessionHealth, SessionProtocol};

use crate::fleet::replication::ReplicationStatus;

const BGP_UP: MetricFamily = MetricFamily::gauge(
    "sluice_bgp_session_up",
    "",
    "1 while the BGP session of the routing daemon with the peer is established.",
);
const BFD_UP: MetricFamily =
    MetricFamily::gauge("sluice_bfd_session_up", "", "1 while the BFD session of the routing daemon with the peer is up.");
const IN_SYNC: MetricFamily = MetricFamily::gauge(
    "sluice_partner_in_sync",
    "",
    "1 while the partner has all flows of this gateway, or has lacked some for less than 2 s.",
);
const LAG: MetricFamily = MetricFamily::gauge(
    "sluice_partner_lag",
    "seconds",
    "Age of the oldest change of a flow that the partner has not acknowledged; absent while it is not reached.",
);
const SHADOW_FLOWS: MetricFamily =
    MetricFamily::gauge("sluice_shadow", "flows", "Flows of partners that this gateway keeps to continue them if they die.");

/// Writes them.
pub(super) fn write(writer: &mut MetricWriter<'_>, fleet: &FleetStatus, replication: &ReplicationStatus) -> fmt::Result {
    let of = |protocol| {
        let counted = move |session: &&RoutingSession| session.protocol == protocol && session.health != SessionHealth::Disabled;
        let sample =
            |session: &RoutingSession| ([("peer", session.peer.clone())], u64::from(session.health == SessionHealth::Up));
        fleet.sessions.iter().filter(counted).map(sample)
    };
    writer.gauges(&BGP_UP, of(SessionProtocol::Bgp))?;
    writer.gauges(&BFD_UP, of(SessionProtocol::Bfd))?;
    let partners = || replication.partners.iter().map(|partner| ([("partner", partner.address.to_string())], partner));
    writer.gauges(&IN_SYNC, partners().map(|(label, partner)| (label, u64::from(partner.is_in_sync))))?;
    writer.gauges(&LAG, partners().filter_map(|(label, partner)| Some((label, partner.lag?.as_secs_f64()))))?;
    writer.gauge(&SHADOW_FLOWS, replication.shadow_flows)
}
