//! Draining of the gateway, and VIPs without usable backends: which VIPs of `routed` pools are announced to routers, and
//! how.
//!
//! Invariant: a drain here only withdraws routes. First routers are asked to prefer other gateways, then the routes go.
//! Packets that still arrive are forwarded, so that routers have time to converge.
//!
//! Not here: the routes (`netlink`), and VIPs of `l2` pools, which other gateways take by election (`fleet::election`);
//! without one, ARP for them is still answered, because no other gateway would.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::agent::served::Served;
use crate::agent::supervisor::Failure;
use crate::agent::watch::send_if_changed;
use crate::netlink::Announcement;
use crate::settings::WithoutBackends;

/// Longest time for which routers are asked to prefer other gateways: BGP needs milliseconds to seconds.
const DEMOTED_MAX: Duration = Duration::from_secs(5);

/// Longest time for which a VIP whose backends recover waits for the rest of them: more than the default `rise` of probes
/// takes, spread over their interval. Announced with the first backend, the VIP would draw connections whose backends are
/// about to pass their probes, too, and send them to the first one.
const RECOVERY_MAX: Duration = Duration::from_secs(5);

/// How VIPs are announced.
#[derive(Clone, Copy, Debug)]
pub struct AnnouncePolicy {
    /// What becomes of VIPs without usable backends.
    pub without_backends: WithoutBackends,
    /// Time for which a gateway that drains forwards before it ends.
    pub drain_on_stop: Duration,
}

impl AnnouncePolicy {
    /// How long a drain asks routers to prefer other gateways before it withdraws the routes: a quarter of the drain, so
    /// that most of it is left for what still arrives afterwards.
    #[must_use]
    pub fn demoted_for(&self) -> Duration {
        (self.drain_on_stop / 4).min(DEMOTED_MAX)
    }
}

/// The task that decides which VIPs are announced. Cloned for each start.
#[derive(Clone, Debug)]
pub struct GatewayDrain {
    /// How VIPs are announced.
    pub policy: AnnouncePolicy,
    /// VIPs of `routed` pools, and the prefix by which each is announced.
    pub routed: watch::Receiver<BTreeMap<IpAddr, IpNet>>,
    /// The services with their backends.
    pub served: watch::Receiver<Served>,
    /// Whether the gateway was drained by hand.
    pub draining: watch::Receiver<bool>,
    /// Cancelled when the gateway is about to end.
    pub terminating: CancellationToken,
    /// Output.
    pub announced: watch::Sender<Announcement>,
}

impl GatewayDrain {
    /// The prefixes to announce while the gateway does not drain. A prefix of several VIPs stands while one of them is to be
    /// announced.
    fn prefixes(&mut self, recovery: &mut Recovery) -> BTreeSet<IpNet> {
        let routed = self.routed.borrow_and_update();
        let served = self.served.borrow_and_update();
        if self.policy.without_backends == WithoutBackends::Keep || routed.is_empty() {
            return routed.values().copied().collect();
        }
        let usable = served.usable_frontends();
        recovery.follow(usable.into_iter().filter(|vip| routed.contains_key(vip)), &served.impaired_frontends());
        routed.iter().filter(|(vip, _)| recovery.has_returned(vip)).map(|(_, prefix)| *prefix).collect()
    }
}

/// The VIPs with usable backends, and when each that did not have any before is announced at the latest.
#[derive(Debug, Default)]
struct Recovery(BTreeMap<IpAddr, Instant>);

impl Recovery {
    /// Notes which VIPs have usable backends now. Those that are impaired wait for their other backends.
    fn follow(&mut self, usable: impl Iterator<Item = IpAddr>, impaired: &BTreeSet<IpAddr>) {
        let now = Instant::now();
        let at = |vip| match self.0.get(&vip) {
            Some(at) if impaired.contains(&vip) => *at,
            Some(at) => now.min(*at),
            None if impaired.contains(&vip) => now + RECOVERY_MAX,
            None => now,
        };
        self.0 = usable.map(|vip| (vip, at(vip))).collect();
    }

    fn has_returned(&self, vip: &IpAddr) -> bool {
        self.0.get(vip).is_some_and(|at| *at <= Instant::now())
    }

    /// When the next VIP is announced.
    fn next(&self) -> Option<Instant> {
        self.0.values().filter(|at| **at > Instant::now()).min().copied()
    }
}

impl GatewayDrain {
    /// Announces `routed` VIPs unless the gateway drains or is about to end.
    ///
    /// # Errors
    /// If a sender is dropped.
    pub async fn run(mut self) -> Result<(), Failure> {
        // When the routes are withdrawn, while the gateway drains.
        let mut withdrawn_at: Option<Instant> = None;
        let mut was_draining = false;
        let mut recovery = Recovery::default();
        loop {
            let (is_draining, is_terminating) = (*self.draining.borrow_and_update(), self.terminating.is_cancelled());
            if std::mem::replace(&mut was_draining, is_draining) != is_draining {
                let what = if is_draining { "drained: routes to VIPs are withdrawn" } else { "no longer drained" };
                tracing::warn!(is_draining, "{what}");
            }
            withdrawn_at = (is_draining || is_terminating)
                .then(|| withdrawn_at.unwrap_or_else(|| Instant::now() + self.policy.demoted_for()));
            let is_withdrawn = withdrawn_at.is_some_and(|at| at <= Instant::now());
            let mut prefixes = self.prefixes(&mut recovery);
            if is_withdrawn {
                prefixes.clear();
            }
            send_if_changed(&self.announced, Announcement { prefixes, is_draining: withdrawn_at.is_some() });
            let at = withdrawn_at.filter(|_| !is_withdrawn).into_iter().chain(recovery.next()).min();
            tokio::select! {
                changed = self.routed.changed() => changed?,
                changed = self.served.changed() => changed?,
                changed = self.draining.changed() => changed?,
                () = self.terminating.cancelled(), if !is_terminating => {}
                () = sleep_until(at.unwrap_or_else(Instant::now)), if at.is_some() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane::snapshot::BackendView;
    use tokio::time::timeout;

    use super::*;
    use crate::agent::served::tests::view;

    const LONG: Duration = Duration::from_secs(120);

    /// VIPs that are announced each on its own.
    fn vips(list: &[&str]) -> BTreeMap<IpAddr, IpNet> {
        list.iter().map(|text| text.parse().unwrap()).map(|vip: IpAddr| (vip, vip.into())).collect()
    }

    /// A service per VIP, whose only backend accepts new flows or does not.
    fn served(services: &[(&str, bool)]) -> Served {
        let views = services.iter().map(|(vip, accepts_new)| {
            let mut view = view(vip, &[("10.0.0.1:80", *accepts_new, false)]);
            view.ports[0].frontends = vec![format!("{vip}:80").parse().unwrap()];
            (Arc::clone(&view.name), Arc::new(view))
        });
        Served { ready: true, services: views.collect(), ..Served::default() }
    }

    /// The task with its channels.
    struct Rig {
        routed: watch::Sender<BTreeMap<IpAddr, IpNet>>,
        served: watch::Sender<Served>,
        draining: watch::Sender<bool>,
        terminating: CancellationToken,
        seen: watch::Receiver<Announcement>,
    }

    impl Rig {
        fn start(without_backends: WithoutBackends) -> Self {
            let (routed, routed_in) = watch::channel(BTreeMap::new());
            let (served, served_in) = watch::channel(Served::default());
            let (draining, draining_in) = watch::channel(false);
            let (announced, seen) = watch::channel(Announcement::default());
            let terminating = CancellationToken::new();
            let task = GatewayDrain {
                policy: AnnouncePolicy { without_backends, drain_on_stop: Duration::from_secs(10) },
                routed: routed_in,
                served: served_in,
                draining: draining_in,
                terminating: terminating.clone(),
                announced,
            };
            tokio::spawn(task.run());
            Self { routed, served, draining, terminating, seen }
        }

        async fn expect(&mut self, list: &[&str], is_draining: bool) -> Instant {
            let prefixes = list.iter().map(|text| text.parse().or_else(|_| text.parse::<IpAddr>().map(IpNet::from)).unwrap());
            let wanted = Announcement { prefixes: prefixes.collect(), is_draining };
            timeout(LONG, self.seen.wait_for(|announcement| *announcement == wanted)).await.unwrap().unwrap();
            Instant::now()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_first_asks_routers_to_prefer_others_and_then_withdraws() {
        let mut rig = Rig::start(WithoutBackends::Keep);
        rig.routed.send_replace(vips(&["192.0.2.100"]));
        rig.expect(&["192.0.2.100"], false).await;
        rig.draining.send_replace(true);
        let start = rig.expect(&["192.0.2.100"], true).await;
        rig.routed.send_replace(vips(&["192.0.2.100", "192.0.2.101"]));
        rig.expect(&["192.0.2.100", "192.0.2.101"], true).await;
        let withdrawn = rig.expect(&[], true).await;
        assert_eq!((withdrawn - start).as_millis(), 2500, "a quarter of the drain, also when something changes meanwhile");
        rig.draining.send_replace(false);
        rig.expect(&["192.0.2.100", "192.0.2.101"], false).await;
        rig.terminating.cancel();
        rig.expect(&["192.0.2.100", "192.0.2.101"], true).await;
        rig.expect(&[], true).await;
        rig.draining.send_replace(true);
        rig.draining.send_replace(false);
        rig.routed.send_replace(vips(&["192.0.2.102"]));
        tokio::time::sleep(LONG).await;
        assert!(rig.seen.borrow().prefixes.is_empty(), "nothing returns at the end");
    }

    #[tokio::test]
    async fn a_vip_without_usable_backends_is_withdrawn_unless_it_is_kept() {
        let mut rig = Rig::start(WithoutBackends::Withdraw);
        rig.routed.send_replace(vips(&["192.0.2.100", "192.0.2.101"]));
        rig.served.send_replace(served(&[("192.0.2.100", true), ("192.0.2.101", true)]));
        rig.expect(&["192.0.2.100", "192.0.2.101"], false).await;
        rig.served.send_replace(served(&[("192.0.2.100", true), ("192.0.2.101", false)]));
        rig.expect(&["192.0.2.100"], false).await;
        rig.served.send_replace(served(&[("192.0.2.100", true), ("192.0.2.101", true)]));
        rig.expect(&["192.0.2.100", "192.0.2.101"], false).await;

        let mut rig = Rig::start(WithoutBackends::Keep);
        rig.served.send_replace(served(&[("192.0.2.100", false)]));
        rig.routed.send_replace(vips(&["192.0.2.100"]));
        rig.expect(&["192.0.2.100"], false).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_vip_whose_backends_recover_waits_for_the_rest_of_them_and_not_for_ever() {
        let vip = "192.0.2.100";
        let of = |healthy: [bool; 2]| {
            let mut all = served(&[(vip, false)]);
            let mut view = (**all.services.values().next().unwrap()).clone();
            let one = view.ports[0].backends[0];
            view.ports[0].backends = healthy.map(|healthy| BackendView { healthy, accepts_new: healthy, ..one }).to_vec();
            all.services = dataplane::snapshot::Views::unit(Arc::clone(&view.name), Arc::new(view));
            all
        };
        let mut rig = Rig::start(WithoutBackends::Withdraw);
        rig.routed.send_replace(vips(&[vip]));
        rig.served.send_replace(of([true, true]));
        rig.expect(&[vip], false).await;
        rig.served.send_replace(of([true, false]));
        tokio::time::sleep(LONG).await;
        rig.expect(&[vip], false).await;
        rig.served.send_replace(of([false, false]));
        let withdrawn = rig.expect(&[], false).await;
        rig.served.send_replace(of([true, false]));
        let returned = rig.expect(&[vip], false).await;
        assert_eq!((returned - withdrawn).as_millis(), RECOVERY_MAX.as_millis(), "one backend is still missing");
        rig.served.send_replace(of([false, false]));
        let withdrawn = rig.expect(&[], false).await;
        rig.served.send_replace(of([true, false]));
        tokio::time::sleep(RECOVERY_MAX / 2).await;
        rig.served.send_replace(of([true, true]));
        let returned = rig.expect(&[vip], false).await;
        assert_eq!((returned - withdrawn).as_millis(), RECOVERY_MAX.as_millis() / 2, "all are back");
    }

    #[tokio::test(start_paused = true)]
    async fn an_aggregate_is_announced_while_one_of_its_vips_is() {
        let mut rig = Rig::start(WithoutBackends::Withdraw);
        let aggregate: IpNet = "203.0.113.0/24".parse().unwrap();
        let (first, second) = ("203.0.113.1", "203.0.113.2");
        let mut routed = vips(&["192.0.2.100"]);
        routed.extend([first, second].map(|vip| (vip.parse().unwrap(), aggregate)));
        rig.routed.send_replace(routed);
        rig.served.send_replace(served(&[("192.0.2.100", true), (first, true), (second, true)]));
        rig.expect(&["192.0.2.100", "203.0.113.0/24"], false).await;
        rig.served.send_replace(served(&[("192.0.2.100", false), (first, true), (second, false)]));
        rig.expect(&["203.0.113.0/24"], false).await;
        rig.served.send_replace(served(&[("192.0.2.100", true), (first, false), (second, false)]));
        rig.expect(&["192.0.2.100"], false).await;
        rig.served.send_replace(served(&[(second, true)]));
        rig.expect(&["203.0.113.0/24"], false).await;
        rig.draining.send_replace(true);
        rig.expect(&["203.0.113.0/24"], true).await;
        rig.expect(&[], true).await;
    }

    #[test]
    fn routers_get_a_quarter_of_the_drain_and_at_most_five_seconds() {
        let of = |drain_on_stop| AnnouncePolicy { without_backends: WithoutBackends::Keep, drain_on_stop }.demoted_for();
        let rows =
            [(Duration::ZERO, Duration::ZERO), (Duration::from_secs(10), Duration::from_millis(2500)), (LONG, DEMOTED_MAX)];
        for (drain, wanted) in rows {
            assert_eq!(of(drain), wanted);
        }
    }
}
