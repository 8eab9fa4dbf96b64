//! Draining of the gateway: it announces the VIPs of `routed` pools to routers, and none while it is drained or about
//! to end.
//!
//! Invariant: a drain here only withdraws routes. Packets that still arrive are forwarded, so that routers have time to
//! converge. Not here: VIPs of `l2` pools, which other gateways take by election (`agent::election`); without one, ARP for
//! them is still answered, because no other gateway would.

use std::collections::BTreeSet;
use std::net::IpAddr;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::supervisor::Failure;
use crate::watch::send_if_changed;

/// Announces `routed` unless `draining` or `leaving`.
///
/// # Errors
/// If a sender is dropped.
pub async fn run(
    mut routed: watch::Receiver<BTreeSet<IpAddr>>,
    mut draining: watch::Receiver<bool>,
    leaving: CancellationToken,
    announced: watch::Sender<BTreeSet<IpAddr>>,
) -> Result<(), Failure> {
    let mut was_draining = false;
    loop {
        let is_draining = *draining.borrow_and_update();
        let is_leaving = leaving.is_cancelled();
        let vips = if is_draining || is_leaving { BTreeSet::new() } else { routed.borrow_and_update().clone() };
        if std::mem::replace(&mut was_draining, is_draining) != is_draining {
            let what = if is_draining { "drained: routes to VIPs are withdrawn" } else { "no longer drained" };
            tracing::warn!(is_draining, "{what}");
        }
        send_if_changed(&announced, vips);
        tokio::select! {
            changed = routed.changed() => changed?,
            changed = draining.changed() => changed?,
            () = leaving.cancelled(), if !is_leaving => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const LONG: Duration = Duration::from_secs(120);

    #[tokio::test]
    async fn a_drained_gateway_announces_nothing_until_it_is_not_and_one_that_leaves_nothing_any_more() {
        let (routed, routed_in) = watch::channel(BTreeSet::new());
        let (draining, draining_in) = watch::channel(false);
        let (announced, mut seen) = watch::channel(BTreeSet::new());
        let leaving = CancellationToken::new();
        tokio::spawn(run(routed_in, draining_in, leaving.clone(), announced));
        let vips = |list: &[&str]| list.iter().map(|text| text.parse::<IpAddr>().unwrap()).collect::<BTreeSet<_>>();
        routed.send_replace(vips(&["192.0.2.100"]));
        timeout(LONG, seen.wait_for(|all| *all == vips(&["192.0.2.100"]))).await.unwrap().unwrap();
        draining.send_replace(true);
        timeout(LONG, seen.wait_for(BTreeSet::is_empty)).await.unwrap().unwrap();
        routed.send_replace(vips(&["192.0.2.100", "192.0.2.101"]));
        draining.send_replace(false);
        timeout(LONG, seen.wait_for(|all| all.len() == 2)).await.unwrap().unwrap();
        leaving.cancel();
        timeout(LONG, seen.wait_for(BTreeSet::is_empty)).await.unwrap().unwrap();
    }
}
