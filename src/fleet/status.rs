//! The part of this gateway in the fleet as one value, which reports, metrics and the status page show.
//!
//! Invariant: receivers wake only at news. Lag and shadow flows change all the time, so they are stored silently.
//! Not here: the election, replication and sessions themselves.

use std::time::Duration;

use proto::{FleetPartner, FleetStatus, RoutingSession, ServiceLimit, VipElection};
use tokio::sync::watch;
use tokio::time::sleep;

use super::election::ElectionStatus;
use super::replication::ReplicationStatus;
use crate::agent::supervisor::Failure;

/// Minimum time between two looks: a takeover changes one group after the other.
const LOOK_PERIOD: Duration = Duration::from_millis(100);

/// The task that keeps the part of this gateway in the fleet current. Cloned for each start.
#[derive(Clone, Debug)]
pub struct FleetMonitor {
    /// The election of the owners of VIPs.
    pub election: watch::Receiver<ElectionStatus>,
    /// The replication of flows.
    pub replication: watch::Receiver<ReplicationStatus>,
    /// The sessions of the routing daemon.
    pub sessions: watch::Receiver<Vec<RoutingSession>>,
    /// Services that get less than they ask for.
    pub limits: watch::Receiver<Vec<ServiceLimit>>,
    /// Output.
    pub fleet: watch::Sender<FleetStatus>,
}

impl FleetMonitor {
    /// Keeps `fleet` current.
    ///
    /// # Errors
    /// If a source has ended.
    pub async fn run(mut self) -> Result<(), Failure> {
        loop {
            let election = self.election.borrow_and_update().clone();
            let replication = self.replication.borrow_and_update().clone();
            let sessions = self.sessions.borrow_and_update().clone();
            let limits = self.limits.borrow_and_update().clone();
            let now = FleetStatus { limits, ..status(&election, &replication, sessions) };
            self.fleet.send_if_modified(|before| {
                let is_news = now.without_figures() != before.without_figures();
                *before = now;
                is_news
            });
            tokio::select! {
                changed = self.election.changed() => changed?,
                changed = self.replication.changed() => changed?,
                changed = self.sessions.changed() => changed?,
                changed = self.limits.changed() => changed?,
            }
            sleep(LOOK_PERIOD).await;
        }
    }
}

fn status(election: &ElectionStatus, replication: &ReplicationStatus, sessions: Vec<RoutingSession>) -> FleetStatus {
    let owned = (0_u32..).zip(&election.groups).filter(|(_, group)| group.is_owner);
    let vips = (!election.groups.is_empty()).then(|| VipElection {
        groups: u8::try_from(election.groups.len()).unwrap_or(u8::MAX),
        owned: owned.fold(0, |all, (number, _)| all | 1 << number),
        takeovers: election.groups.iter().map(|group| group.takeovers).sum(),
        restarts: election.restarts,
        unfit: election.unfit.map(str::to_owned),
    });
    let partner = |partner: &super::replication::PartnerStatus| FleetPartner {
        name: partner.name.clone().unwrap_or_else(|| partner.address.to_string()),
        address: partner.address.to_string(),
        is_in_sync: partner.is_in_sync,
        lag_ms: partner.lag.map(|lag| u64::try_from(lag.as_millis()).unwrap_or(u64::MAX)),
    };
    FleetStatus {
        election: vips,
        duplicates: election.duplicates.iter().map(|(vip, station)| (*vip, station.to_string())).collect(),
        partners: replication.partners.iter().map(partner).collect(),
        shadow_flows: replication.shadow_flows,
        sessions,
        limits: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use dataplane::Mac;
    use tokio::time::timeout;

    use super::super::election::GroupStatus;
    use super::super::replication::PartnerStatus;
    use super::*;

    const LONG: Duration = Duration::from_secs(120);

    fn partner(lag_ms: u64) -> ReplicationStatus {
        let address = "192.0.2.3:9436".parse().unwrap();
        let partner = PartnerStatus { name: None, address, is_in_sync: true, lag: Some(Duration::from_millis(lag_ms)) };
        ReplicationStatus { partners: vec![partner], shadow_flows: lag_ms, ..ReplicationStatus::default() }
    }

    #[test]
    fn owned_groups_are_bits_and_takeovers_are_summed() {
        let group = |is_owner, takeovers| GroupStatus { is_owner, takeovers, since: None };
        let election = ElectionStatus {
            groups: vec![group(true, 2), group(false, 1), group(true, 4)],
            unfit: Some("it is drained"),
            duplicates: [("192.0.2.100".parse().unwrap(), Mac([2, 0, 0, 0, 0, 9]))].into(),
            ..ElectionStatus::default()
        };
        let status = status(&election, &partner(5), Vec::new());
        let vips = status.election.clone().unwrap();
        assert_eq!((vips.groups, vips.owned, vips.takeovers, vips.unfit.as_deref()), (3, 0b101, 7, Some("it is drained")));
        assert_eq!(status.duplicates.values().collect::<Vec<_>>(), ["02:00:00:00:00:09"]);
        assert_eq!((status.partners[0].name.as_str(), status.lag_ms()), ("192.0.2.3:9436", Some(5)));
        assert_eq!(super::status(&ElectionStatus::default(), &partner(5), Vec::new()).election, None);
    }

    #[tokio::test(start_paused = true)]
    async fn readers_wake_at_news_and_see_the_newest_figures() {
        let (election, replication, sessions) = (watch::Sender::default(), watch::Sender::default(), watch::Sender::default());
        let limits = watch::Sender::<Vec<ServiceLimit>>::default();
        let (fleet, mut seen) = watch::channel(FleetStatus::default());
        let task = FleetMonitor {
            election: election.subscribe(),
            replication: replication.subscribe(),
            sessions: sessions.subscribe(),
            limits: limits.subscribe(),
            fleet,
        };
        let task = tokio::spawn(task.run());
        replication.send_replace(partner(1));
        timeout(LONG, seen.changed()).await.unwrap().unwrap();
        seen.borrow_and_update();
        for lag_ms in 2..40 {
            replication.send_replace(partner(lag_ms));
            sleep(LOOK_PERIOD).await;
        }
        sleep(2 * LOOK_PERIOD).await;
        assert!(!seen.has_changed().unwrap(), "lag is no news");
        assert_eq!(seen.borrow().lag_ms(), Some(39));
        election.send_modify(|status: &mut ElectionStatus| {
            status.groups = vec![GroupStatus { is_owner: true, takeovers: 1, since: None }];
        });
        timeout(LONG, seen.changed()).await.unwrap().unwrap();
        seen.borrow_and_update();
        let limit = |text: &str| ServiceLimit {
            service: proto::ServiceName::new("shop", "web"),
            kind: proto::LimitKind::FlowShare,
            text: text.to_owned(),
        };
        limits.send_replace(vec![limit("1 of 2 flows")]);
        timeout(LONG, seen.changed()).await.unwrap().unwrap();
        seen.borrow_and_update();
        limits.send_replace(vec![limit("2 of 2 flows")]);
        sleep(2 * LOOK_PERIOD).await;
        assert!(!seen.has_changed().unwrap(), "figures are no news");
        assert_eq!(seen.borrow().limits, [limit("2 of 2 flows")]);
        drop((election, replication, sessions));
        assert!(timeout(LONG, task).await.unwrap().unwrap().is_err());
    }
}
