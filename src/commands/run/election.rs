//! Start and end of this gateway's part in the election: first values, and the hand-over of its VIPs at the end.
//!
//! Not here: the election (`fleet::election`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane::{OwnedGroups, VipAnswers, VipOwnership};
use ipnet::IpNet;
use proto::Arbitration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::controller_client::Contender;
use crate::fleet::election::{self, ElectionStatus, VrrpClaims};
use crate::ports::ReadPorts;
use crate::settings::{Elector, Settings};

/// Longest wait for keepalived to resign; it takes a second to end.
const RESIGNED_MAX: Duration = Duration::from_secs(3);
/// Packets that clients have sent to the old owner arrive within this time.
const IN_FLIGHT: Duration = Duration::from_millis(100);
/// Workers have reported the flows that were too young before within half of this time, and packets that clients sent to
/// the old owner have arrived.
const FLOWS_SENT: Duration = Duration::from_millis(600);
/// Longest wait for partners that lack flows. A session that breaks is noticed within a second, and the
/// partner dials again within 0.4 s; it takes flows of VIPs for 2 s after it has taken these over.
const FLOWS_SENT_MAX: Duration = Duration::from_secs(3);

/// The leases at the start.
pub(super) fn ownership(settings: &Settings) -> Arc<VipOwnership> {
    let election = &settings.election;
    let advertisement_ns = u64::try_from(election.advertisement.as_nanos()).unwrap_or(u64::MAX);
    Arc::new(match election.elector {
        Elector::None => VipOwnership::default(),
        Elector::Keepalived => VipOwnership::elected(election.groups, election.first_vrid, advertisement_ns),
    })
}

/// The VIPs that the first snapshot answers for: all, or none before the election.
pub(super) fn first_answers(settings: &Settings) -> VipAnswers {
    let groups = OwnedGroups { groups: settings.election.groups, owned: 0 };
    VipAnswers { groups: (settings.election.elector == Elector::Keepalived).then_some(groups), ..VipAnswers::default() }
}

/// The status at the start: a gateway with an election joins.
pub(super) fn first_status(settings: &Settings) -> ElectionStatus {
    ElectionStatus { is_joining: settings.election.elector != Elector::None, ..ElectionStatus::default() }
}

/// The claims of this gateway for the controller; `None`: there is no election.
pub(super) fn contender(
    settings: &Settings,
    claimed: &watch::Sender<VrrpClaims>,
    arbitration: &watch::Sender<Arbitration>,
    ports: ReadPorts,
) -> Option<Contender> {
    let election = &settings.election;
    let port = settings.ports.get(election.port).filter(|_| election.elector == Elector::Keepalived)?;
    let mut prefixes: Vec<_> = port.addresses.iter().map(IpNet::trunc).collect();
    prefixes.sort_unstable();
    let prefixes: Vec<_> = prefixes.iter().map(ToString::to_string).collect();
    let link = format!("{} groups {} vrid {}", prefixes.join(" "), election.groups, election.first_vrid);
    let name = port.name.clone();
    let frames = move || ports().iter().find(|port| port.name == name).map_or(0, |port| port.rx_packets);
    Some(Contender::new(claimed.subscribe(), link, frames, arbitration.clone()))
}

/// Ends the election while workers still poll, so that keepalived resigns from what this gateway owns, and others need not
/// wait until they miss its advertisements.
pub(super) async fn resign(election: &CancellationToken, mut answers: watch::Receiver<VipAnswers>) {
    election.cancel();
    if timeout(RESIGNED_MAX, answers.wait_for(|answers| !owns_some(answers))).await.is_err() {
        tracing::warn!("keepalived does not end; others take the VIPs of this gateway when they miss its advertisements");
    }
}

fn owns_some(answers: &VipAnswers) -> bool {
    answers.groups.is_some_and(|groups| groups.owned > 0)
}

/// Waits until partners have the flows of VIPs that this gateway has just lost. `arrived`: they have all flows up to this
/// time.
async fn flows_are_received(mut arrived: watch::Receiver<Option<Instant>>) {
    let mut sent = Instant::now();
    let all = async {
        // In two steps: if the machine stands still, the workers too get some time after it.
        for _ in 0..2 {
            let next = sent + FLOWS_SENT / 2;
            let Ok(until) = arrived.wait_for(|until| until.is_some_and(|until| until >= next)).await else { return };
            sent = until.unwrap_or(next);
        }
    };
    if timeout(FLOWS_SENT_MAX, all).await.is_err() {
        let wait = FLOWS_SENT_MAX;
        tracing::warn!(?wait, "partners lack flows of the VIPs that they have taken; some connections will be reset");
    }
}

/// Waits until other gateways have taken the VIPs of this one, which is about to end, and know their flows.
pub(super) async fn hand_over(
    settings: &Settings,
    mut answers: watch::Receiver<VipAnswers>,
    arrived: watch::Receiver<Option<Instant>>,
) {
    if !owns_some(&answers.borrow_and_update()) {
        return;
    }
    let wait = election::handover_max(settings.election.advertisement);
    // The value is locked for the election as long as this result lives.
    let is_taken = timeout(wait, answers.wait_for(|answers| !owns_some(answers))).await.is_ok();
    if is_taken && settings.replication.is_some() {
        flows_are_received(arrived).await;
    } else if is_taken {
        sleep(IN_FLIGHT).await;
    } else {
        tracing::warn!(?wait, "no other gateway has taken all VIPs of this one; they are lost until it starts again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_gateway_that_ends_waits_until_partners_have_its_flows_after_it_lost_its_vips() {
        let (lost, arrived) = (Instant::now(), watch::Sender::new(Some(Instant::now())));
        let waits = async {
            let start = tokio::time::Instant::now();
            flows_are_received(arrived.subscribe()).await;
            start.elapsed()
        };
        let later = async {
            sleep(Duration::from_secs(1)).await;
            arrived.send_replace(Some(lost + FLOWS_SENT));
            sleep(Duration::from_secs(1)).await;
            arrived.send_replace(Some(lost + 2 * FLOWS_SENT));
        };
        assert_eq!(tokio::join!(waits, later).0, Duration::from_secs(2), "twice, half of it apart");
        arrived.send_replace(Some(lost));
        let start = tokio::time::Instant::now();
        flows_are_received(arrived.subscribe()).await;
        assert_eq!(start.elapsed(), FLOWS_SENT_MAX, "a partner that does not come back");
    }
}
