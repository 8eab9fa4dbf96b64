//! Leader election: acquires and renews the Lease of the installation, or observes its holder.
//!
//! Invariant: optimistic concurrency alone decides who acquires the Lease, because every write names the version that
//! it replaces. A leader whose renewals fail steps down no later than [`RENEW_DEADLINE`] after it sent the last
//! accepted one, even while a request hangs.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use tokio::sync::watch;
use tokio::time::{sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::kubernetes::api_error::{ApiError, Retry};
use crate::kubernetes::client::{Cluster, post_params};
use crate::kubernetes::lease::{self, Leadership, LeaseCandidate, RENEW_DEADLINE, RENEW_PERIOD, RETRY_PERIOD};

/// Timeout of an attempt, which leaves time for another one before the leader must step down.
const ATTEMPT_MAX: Duration = Duration::from_secs(3);
/// Timeout for releasing the Lease at the end. Without a release the others wait until it expires.
const RELEASE_MAX: Duration = Duration::from_secs(2);

/// The Lease that this replica holds, and when its last accepted renewal was sent.
struct HeldLease {
    lease: Lease,
    renewed_at: Instant,
}

/// Result of an attempt that the server answered.
enum Answer {
    /// This replica holds the Lease, by a request sent at the start of the attempt.
    Held(Lease),
    /// The renewal conflicted with a version that is also ours: the answer to an earlier renewal was lost.
    Newer(Lease),
    /// Another replica holds it, or none does yet.
    NotOurs(Option<Lease>),
}

/// Runs the election until `stop`, then releases the Lease. Publishes the role of this replica to `leadership`.
pub async fn elect(
    cluster: &Cluster,
    mut candidate: LeaseCandidate,
    leadership: &watch::Sender<Leadership>,
    stop: CancellationToken,
) {
    let leases = Api::<Lease>::namespaced(cluster.client.clone(), &cluster.namespace);
    let mut retry = Retry::new("get, create and update leases.coordination.k8s.io", &cluster.server);
    let mut held: Option<HeldLease> = None;
    let mut answered_at = Instant::now();
    while !stop.is_cancelled() {
        let started = Instant::now();
        // An attempt at the deadline itself would end before it could be answered.
        step_down_if_due(&mut held, leadership);
        let must_stop_at = held.as_ref().map(|held| held.renewed_at + RENEW_DEADLINE);
        let attempt_ends = must_stop_at.map_or(started + ATTEMPT_MAX, |at| at.min(started + ATTEMPT_MAX));
        let attempt = timeout_at(attempt_ends.into(), attempt(&leases, &mut candidate, held.as_ref()));
        let mut wait = RETRY_PERIOD;
        match stop.run_until_cancelled(attempt).await {
            None => break,
            Some(Ok(Ok(answer))) => {
                retry.succeeded();
                answered_at = started;
                if matches!(answer, Answer::Held(_)) {
                    wait = RENEW_PERIOD;
                }
                let was_held = held.is_some();
                take(answer, (started, &candidate), &mut held, leadership);
                if held.is_some() && !was_held {
                    cluster.activity.leader_terms.inc();
                }
            }
            Some(Ok(Err(error))) => {
                cluster.activity.lease_failures.inc();
                wait = retry.failed(ApiError::from(&error), Instant::now()).min(RETRY_PERIOD);
            }
            Some(Err(_)) => {
                cluster.activity.lease_failures.inc();
                retry.failed(ApiError::Unreachable("it does not answer".to_owned()), Instant::now());
            }
        }
        step_down_if_due(&mut held, leadership);
        let is_unread = answered_at.elapsed() >= RENEW_DEADLINE;
        if held.is_none() && (is_unread || !candidate.saw_renewal(Instant::now())) {
            leadership
                .send_if_modified(|leadership| if is_unread { forget_leader(leadership) } else { forget_address(leadership) });
        }
        let fence = held.as_ref().map(|held| held.renewed_at + RENEW_DEADLINE);
        let next = fence.map_or(started + wait, |fence| fence.min(started + wait));
        stop.run_until_cancelled(sleep_until(next.into())).await;
    }
    leadership.send_replace(Leadership::Following(None));
    if let Some(held) = held {
        let (parameters, released) = (post_params(), candidate.release(&held.lease));
        let release = leases.replace(&candidate.lease, &parameters, &released);
        match tokio::time::timeout(RELEASE_MAX, release).await {
            Ok(Ok(_)) => info!("released the Lease"),
            _ => warn!("the Lease could not be released; another replica leads once it expires"),
        }
    }
}

/// Ends the leadership of a replica that could not renew in time.
fn step_down_if_due(held: &mut Option<HeldLease>, leadership: &watch::Sender<Leadership>) {
    if held.as_ref().is_some_and(|held| Instant::now() >= held.renewed_at + RENEW_DEADLINE) {
        warn!("the Lease could not be renewed for {RENEW_DEADLINE:?}; no longer leading, gateways keep their state");
        *held = None;
        leadership.send_replace(Leadership::Following(None));
    }
}

/// Stops naming a leader that may be dead, even while the API server is unreachable.
fn forget_address(leadership: &mut Leadership) -> bool {
    match leadership {
        Leadership::Following(Some(leader)) => leader.address.take().is_some(),
        Leadership::Following(None) | Leadership::Leading { .. } => false,
    }
}

/// Stops naming a leader while the Lease cannot be read: another one may have followed it.
fn forget_leader(leadership: &mut Leadership) -> bool {
    let is_named = matches!(leadership, Leadership::Following(Some(_)));
    if is_named {
        *leadership = Leadership::Following(None);
    }
    is_named
}

fn take(
    answer: Answer,
    (sent_at, candidate): (Instant, &LeaseCandidate),
    held: &mut Option<HeldLease>,
    leadership: &watch::Sender<Leadership>,
) {
    match answer {
        Answer::Held(lease) => {
            let is_new = held.is_none();
            let epoch = lease::epoch(&lease);
            *held = Some(HeldLease { lease, renewed_at: sent_at });
            if is_new {
                info!(epoch, "leading");
                leadership.send_replace(Leadership::Leading { epoch });
                candidate.leads();
            }
        }
        Answer::Newer(lease) => {
            if let Some(held) = held {
                held.lease = lease;
            }
        }
        Answer::NotOurs(lease) => {
            let leader = lease.as_ref().and_then(|lease| candidate.leader(lease, Instant::now()));
            if held.take().is_some() {
                warn!("another replica acquired the Lease; no longer leading");
            }
            let now = Leadership::Following(leader);
            leadership.send_if_modified(|was| {
                let is_news = *was != now;
                if let (true, Leadership::Following(Some(leader))) = (is_news, &now) {
                    info!(leader = leader.identity, address = leader.address.as_deref().unwrap_or_default(), "following");
                }
                *was = now;
                is_news
            });
        }
    }
}

async fn attempt(leases: &Api<Lease>, candidate: &mut LeaseCandidate, held: Option<&HeldLease>) -> Result<Answer, kube::Error> {
    if let Some(held) = held {
        match leases.replace(&candidate.lease, &post_params(), &candidate.renew(&held.lease)).await {
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            result => return result.map(Answer::Held),
        }
    }
    let Some(now) = leases.get_opt(&candidate.lease).await? else {
        // A leader whose Lease was deleted steps down first; its own next attempt creates another one.
        if held.is_some() || !candidate.may_create(Instant::now()) {
            return Ok(Answer::NotOurs(None));
        }
        return match leases.create(&post_params(), &candidate.create()).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Answer::NotOurs(None)),
            result => result.map(Answer::Held),
        };
    };
    if held.is_some_and(|held| candidate.holds(&held.lease, &now)) {
        return Ok(Answer::Newer(now));
    }
    if held.is_some() {
        return Ok(Answer::NotOurs(Some(now)));
    }
    let Some(taken) = candidate.take(&now, Instant::now()) else { return Ok(Answer::NotOurs(Some(now))) };
    match leases.replace(&candidate.lease, &post_params(), &taken).await {
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(Answer::NotOurs(None)),
        result => result.map(Answer::Held),
    }
}
