//! Conversions of what gateways report about the fleet. Rows and words of a newer version are left out or read as the
//! nearest known ones, so that a report never fails as a whole.

use std::net::IpAddr;

use super::fields::{address, address_bytes};
use super::refusal::cut;
use crate::limits::{FLEET_ROWS_MAX, VIP_GROUPS_MAX};
use crate::{
    FleetPartner, FleetStatus, LimitKind, RoutingSession, ServiceLimit, SessionHealth, SessionProtocol, VipElection, v1,
};

impl From<&FleetStatus> for v1::FleetReport {
    fn from(status: &FleetStatus) -> Self {
        let election = status.election.as_ref().map(|election| v1::ElectionReport {
            groups: election.groups.into(),
            owned: election.owned,
            takeovers: election.takeovers,
            restarts: election.restarts,
            unfit: election.unfit.clone().unwrap_or_default(),
        });
        let duplicate =
            |(vip, station): (&IpAddr, &String)| v1::DuplicateReport { vip: address_bytes(*vip), station: station.clone() };
        let partner = |partner: &FleetPartner| v1::PartnerReport {
            name: partner.name.clone(),
            address: partner.address.clone(),
            in_sync: partner.is_in_sync,
            lag_ms: partner.lag_ms,
        };
        let session = |session: &RoutingSession| v1::SessionReport {
            protocol: session.protocol.as_str().to_owned(),
            peer: session.peer.clone(),
            status: session.health.as_str().to_owned(),
            state: session.state.clone(),
            since_s: session.since_s,
        };
        let limit = |limit: &ServiceLimit| v1::LimitReport {
            service: limit.service.to_string(),
            kind: limit.kind.as_str().to_owned(),
            text: limit.text.clone(),
        };
        Self {
            election,
            duplicates: status.duplicates.iter().take(FLEET_ROWS_MAX).map(duplicate).collect(),
            partners: status.partners.iter().take(FLEET_ROWS_MAX).map(partner).collect(),
            shadow_flows: status.shadow_flows,
            sessions: status.sessions.iter().take(FLEET_ROWS_MAX).map(session).collect(),
            limits: status.limits.iter().take(FLEET_ROWS_MAX).map(limit).collect(),
        }
    }
}

/// A report about the fleet as a controller reads it.
#[must_use]
pub fn fleet_status(message: &v1::FleetReport) -> FleetStatus {
    let election = message.election.as_ref().map(|election| VipElection {
        groups: u8::try_from(election.groups).unwrap_or(VIP_GROUPS_MAX).min(VIP_GROUPS_MAX),
        owned: election.owned,
        takeovers: election.takeovers,
        restarts: election.restarts,
        unfit: Some(cut(&election.unfit).to_owned()).filter(|why| !why.is_empty()),
    });
    let duplicate = |one: &v1::DuplicateReport| Some((address(&one.vip).ok()?, cut(&one.station).to_owned()));
    let partner = |one: &v1::PartnerReport| FleetPartner {
        name: cut(&one.name).to_owned(),
        address: cut(&one.address).to_owned(),
        is_in_sync: one.in_sync,
        lag_ms: one.lag_ms,
    };
    let session = |one: &v1::SessionReport| {
        Some(RoutingSession {
            protocol: SessionProtocol::ALL.into_iter().find(|protocol| protocol.as_str() == one.protocol)?,
            peer: cut(&one.peer).to_owned(),
            health: SessionHealth::ALL.into_iter().find(|health| health.as_str() == one.status).unwrap_or(SessionHealth::Down),
            state: cut(&one.state).to_owned(),
            since_s: one.since_s,
        })
    };
    let limit = |one: &v1::LimitReport| {
        Some(ServiceLimit {
            service: super::service_name(&one.service).ok()?,
            kind: LimitKind::ALL.into_iter().find(|kind| kind.as_str() == one.kind)?,
            text: cut(&one.text).to_owned(),
        })
    };
    FleetStatus {
        election,
        duplicates: message.duplicates.iter().take(FLEET_ROWS_MAX).filter_map(duplicate).collect(),
        partners: message.partners.iter().take(FLEET_ROWS_MAX).map(partner).collect(),
        shadow_flows: message.shadow_flows,
        sessions: message.sessions.iter().take(FLEET_ROWS_MAX).filter_map(session).collect(),
        limits: message.limits.iter().take(FLEET_ROWS_MAX).filter_map(limit).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_back_as_what_was_reported() {
        let session = |protocol, health| RoutingSession {
            protocol,
            peer: "192.0.2.1".to_owned(),
            health,
            state: "Idle".to_owned(),
            since_s: 1_769_860_800,
        };
        let status = FleetStatus {
            election: Some(VipElection { groups: 64, owned: 1 << 63, takeovers: 7, restarts: 1, unfit: Some("it ends".into()) }),
            duplicates: [("2001:db8::1".parse().unwrap(), "02:00:00:00:00:09".to_owned())].into(),
            partners: vec![FleetPartner {
                name: "edge-2".to_owned(),
                address: "192.0.2.3:9436".to_owned(),
                is_in_sync: true,
                lag_ms: Some(0),
            }],
            shadow_flows: 12,
            sessions: vec![
                session(SessionProtocol::Bgp, SessionHealth::Up),
                session(SessionProtocol::Bfd, SessionHealth::Disabled),
            ],
            limits: LimitKind::ALL
                .map(|kind| ServiceLimit { service: crate::ServiceName::new("shop", "web"), kind, text: "why".to_owned() })
                .to_vec(),
        };
        assert_eq!(fleet_status(&(&status).into()), status);
        assert_eq!(fleet_status(&(&FleetStatus::default()).into()), FleetStatus::default());
    }

    #[test]
    fn what_a_newer_version_reports_is_read_as_far_as_it_is_known() {
        let session = |protocol: &str, status: &str| v1::SessionReport {
            protocol: protocol.to_owned(),
            status: status.to_owned(),
            ..v1::SessionReport::default()
        };
        let message = v1::FleetReport {
            election: Some(v1::ElectionReport { groups: 1000, ..Default::default() }),
            duplicates: vec![v1::DuplicateReport { vip: vec![1, 2, 3], station: String::new() }],
            partners: vec![v1::PartnerReport { name: "x".repeat(10_000), ..Default::default() }; 10_000],
            sessions: vec![session("ospf", "up"), session("bgp", "half-open")],
            ..Default::default()
        };
        let read = fleet_status(&message);
        assert_eq!(read.election.unwrap().groups, VIP_GROUPS_MAX);
        assert!(read.duplicates.is_empty() && read.partners.len() == FLEET_ROWS_MAX && read.partners[0].name.len() < 1_000);
        let sessions: Vec<_> = read.sessions.iter().map(|session| (session.protocol, session.health)).collect();
        assert_eq!(sessions, [(SessionProtocol::Bgp, SessionHealth::Down)]);
    }
}
