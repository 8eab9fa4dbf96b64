//! The election of the owners of VIPs: starts keepalived, sets its priorities, and follows its notifications.
//!
//! Several gateways on a link share the VIPs of `l2` pools by groups ([`proto::vip_group`]); keepalived elects the owner
//! of each group by VRRP. Workers answer for a group while its lease lasts
//! ([`VipOwnership`]), which ends with the advertisements that they let pass.
//!
//! Invariant: a gateway that was stopped begins anew. Notifications that came meanwhile are not believed, since
//! keepalived heard nobody: it is killed, what it sent is dropped, and only what a new one says counts. Whenever this
//! task ends, the gateway owns nothing.
//! Not here: VRRP itself, and the answers (`dataplane`).

mod arbitration;
mod defence;
mod departure;
mod duplicates;
mod joining;
mod keepalived;
mod priority;
mod status;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dataplane::{GroupsClaimed, LEASE_INTERVALS, Link, Network, OwnedGroups, PortIndex, VipAnswers, VipOwnership};
use proto::Arbitration;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use crate::agent::served::Served;
use crate::agent::supervisor::Failure;
use crate::agent::watch::send_if_changed;
use crate::fleet::replication::ReplicationStatus;
use crate::settings::Settings;
use crate::worker_threads::Load;
use defence::{Defence, each};
use departure::Departure;
pub use departure::handover_max;
pub use duplicates::DuplicateWatch;
use joining::{Joining, Present};
use keepalived::{Files, GroupState, Keepalived, Notification};
use priority::{Fitness, addition, rank};
pub use status::{ElectionStatus, GroupStatus, VrrpClaims};

/// How often leases and the fitness of the gateway are checked.
const TICK: Duration = Duration::from_millis(25);
/// Between the end of one keepalived and the start of the next: what the first sent has left the queues by then, several
/// polls of each worker later.
const PAUSE: Duration = Duration::from_millis(100);
/// keepalived tells the state of each group at its start; without a word for this long something is wrong.
const SILENT: Duration = Duration::from_secs(10);
/// For this long after it is fit for the first time a gateway does not hold on to its groups, so that groups spread over
/// gateways that start together.
const SETTLED: Duration = Duration::from_secs(10);

/// The task that takes part in the election. Cloned for each start.
#[derive(Clone, Debug)]
pub struct Candidacy {
    /// The configuration.
    pub settings: Arc<Settings>,
    /// The leases, which workers read.
    pub ownership: Arc<VipOwnership>,
    /// The loads of the workers.
    pub loads: Vec<Arc<Load>>,
    /// The published state.
    pub served: watch::Receiver<Served>,
    /// Ports without link, and neighbours.
    pub network: watch::Receiver<Network>,
    /// The next hops of backends and clients.
    pub next_hops: watch::Receiver<BTreeSet<(Link, IpAddr)>>,
    /// Whether the flows of partners are here.
    pub replication: watch::Receiver<ReplicationStatus>,
    /// Whether the gateway is drained.
    pub draining: watch::Receiver<bool>,
    /// What the controller decides about groups that other gateways claim, too.
    pub arbitration: watch::Receiver<Arbitration>,
    /// What VRRP gives this gateway.
    pub claimed: watch::Sender<VrrpClaims>,
    /// Cancelled when the gateway is about to end.
    pub terminating: CancellationToken,
    /// Cancelled at the end.
    pub shutdown: CancellationToken,
    /// For which VIPs the next snapshot answers.
    pub answers: watch::Sender<VipAnswers>,
    /// For operators.
    pub status: watch::Sender<ElectionStatus>,
    /// Monotonic time, ns; the workers' own.
    pub clock: fn() -> u64,
    /// When the gateway was fit for the first time, by `clock`.
    pub first_fit_ns: Option<u64>,
}

/// How one run of keepalived ended.
enum Round {
    /// The gateway ends.
    Over,
    /// The leases are not to be trusted any longer.
    Lost(&'static str),
}

impl Candidacy {
    /// Takes part in the election until the gateway ends.
    ///
    /// # Errors
    /// If keepalived cannot be started, or ends.
    pub async fn run(self) -> Result<(), Failure> {
        let files = Files::new(&self.settings.state_dir);
        files.create()?;
        let mut election = ResignOnDrop(self);
        loop {
            election.0.lose_all();
            let ended = election.0.shutdown.clone();
            if ended.run_until_cancelled(election.0.wait_for_workers()).await.is_none() {
                return Ok(());
            }
            let mut priorities = PriorityUpdater::new(&election.0);
            priorities.update(&mut election.0, &files)?;
            let mut keepalived = Keepalived::start(&files, &election.0.settings)?;
            election.0.ownership.open();
            match election.0.round(&mut keepalived, &mut priorities, &files).await? {
                Round::Over => {
                    // Its last advertisements pass only while the leases are open; each ends the lease of its group.
                    keepalived.stop().await;
                    return Ok(());
                }
                Round::Lost(why) => {
                    election.0.lose_all();
                    election.0.status.send_modify(|status| status.restarts += 1);
                    tracing::warn!(why, "the gateway gives up its VIPs and stands for election again");
                }
            }
        }
    }
}

/// An election that gives up every group once it is dropped, whatever ended the task.
struct ResignOnDrop(Candidacy);

impl Drop for ResignOnDrop {
    fn drop(&mut self) {
        self.0.lose_all();
    }
}

impl Candidacy {
    fn lease_ns(&self) -> u64 {
        let advertisement = self.settings.election.advertisement * LEASE_INTERVALS;
        u64::try_from(advertisement.as_nanos()).unwrap_or(u64::MAX)
    }

    fn lose_all(&self) {
        self.ownership.close();
        self.claimed.send_modify(|claims| claims.groups = 0);
        for group in 0..self.settings.election.groups {
            self.publish(group, false);
        }
    }

    /// Publishes whether the gateway owns a group.
    fn publish(&self, group: u8, is_owner: bool) {
        let groups = self.settings.election.groups;
        self.answers.send_if_modified(|answers| {
            let owned = answers.groups.map_or(0, |groups| groups.owned);
            let owned = if is_owner { owned | 1 << group } else { owned & !(1 << group) };
            let before = answers.groups.replace(OwnedGroups { groups, owned });
            before != answers.groups
        });
        self.status.send_if_modified(|status| {
            status.groups.resize(groups.into(), GroupStatus::default());
            let Some(of_group) = status.groups.get_mut(usize::from(group)) else { return false };
            if of_group.is_owner == is_owner {
                return false;
            }
            let takeovers = of_group.takeovers + u64::from(is_owner);
            *of_group = GroupStatus { is_owner, since: Some(SystemTime::now()), takeovers };
            true
        });
    }

    /// Waits until every worker polls, and has polled again after a pause: nothing that an earlier keepalived has sent is
    /// in a queue then.
    async fn wait_for_workers(&self) {
        loop {
            let before: Vec<_> = self.loads.iter().map(|load| load.read().polls).collect();
            sleep(PAUSE).await;
            if self.loads.iter().zip(before).all(|(load, before)| load.read().polls > before + 1) {
                return;
            }
        }
    }

    /// Follows one keepalived to its end.
    async fn round(
        &mut self,
        keepalived: &mut Keepalived,
        priorities: &mut PriorityUpdater,
        files: &Files,
    ) -> Result<Round, Failure> {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (lease_ns, ended) = (self.lease_ns(), self.shutdown.clone());
        let mut last_ns = (self.clock)();
        let silent_until_ns = last_ns.saturating_add(u64::try_from(SILENT.as_nanos())?);
        let (mut is_notified, mut defence) = (false, Defence::default());
        loop {
            let notification = tokio::select! {
                () = ended.cancelled() => return Ok(Round::Over),
                notification = keepalived.next() => Some(notification?),
                _ = tick.tick() => None,
            };
            let now_ns = (self.clock)();
            // Before anything that has waited is believed.
            if now_ns.saturating_sub(last_ns) >= lease_ns {
                return Ok(Round::Lost("it was stopped for longer than a lease"));
            }
            last_ns = now_ns;
            if !priorities.workers_poll(now_ns, lease_ns) {
                return Ok(Round::Lost("a worker does not poll"));
            }
            if self.ownership.expired(now_ns).next().is_some() {
                return Ok(Round::Lost("no advertisement has left in time"));
            }
            is_notified |= notification.is_some();
            if !is_notified && now_ns > silent_until_ns {
                return Ok(Round::Lost("keepalived tells nothing; at level debug its messages say why"));
            }
            if let Some(notification) = notification {
                self.follow(notification, &mut defence, now_ns);
            }
            self.apply_arbitration(&mut defence, now_ns);
            if self.owns_some() && !self.is_heard() {
                return Ok(Round::Lost("others cannot hear it: its port has no link"));
            }
            let GroupsClaimed { announced, asked } = self.ownership.take_claimed_groups();
            each(asked).for_each(|group| defence.note(group, now_ns, lease_ns));
            each(announced).for_each(|group| defence.note_announcement(group, now_ns, lease_ns));
            if defence.is_due(now_ns) {
                self.answers.send_modify(|answers| defence.apply(answers, now_ns));
            }
            priorities.update(self, files)?;
        }
    }

    fn owns_some(&self) -> bool {
        self.answers.borrow().groups.is_some_and(|groups| groups.owned != 0)
    }

    /// Whether the port of the election has a link. Without one keepalived hears nobody, and takes every group.
    fn is_heard(&self) -> bool {
        let port = u8::try_from(self.settings.election.port).map(PortIndex);
        port.is_ok_and(|port| !self.network.borrow().down.contains(&port))
    }

    /// Follows keepalived. A group that is left to another gateway is not owned, whatever VRRP says.
    fn follow(&self, Notification { group, state }: Notification, defence: &mut Defence, now_ns: u64) {
        if group >= self.settings.election.groups {
            return;
        }
        let is_master = match state {
            GroupState::Master => true,
            GroupState::Other => false,
            GroupState::MasterHearsOther => return defence.note(group, now_ns, self.lease_ns()),
        };
        self.claim(|VrrpClaims { groups, rank }| {
            let groups = if is_master { groups | 1 << group } else { groups & !(1 << group) };
            VrrpClaims { groups, rank }
        });
        self.own(group, is_master && self.arbitration.borrow().yields & 1 << group == 0, now_ns);
    }

    /// Changes what is claimed.
    fn claim(&self, change: impl FnOnce(VrrpClaims) -> VrrpClaims) {
        let claims = change(*self.claimed.borrow());
        send_if_changed(&self.claimed, claims);
    }

    /// Begins or ends the lease of a group.
    fn own(&self, group: u8, is_owner: bool, now_ns: u64) {
        if is_owner {
            self.ownership.begin(group, now_ns);
        } else {
            self.ownership.end(group);
        }
        let was_owner = self.answers.borrow().groups.is_some_and(|groups| groups.has(group));
        if was_owner != is_owner {
            let what = if is_owner { "the gateway takes over a group of VIPs" } else { "another gateway owns the group of VIPs" };
            tracing::info!(group, "{what}");
        }
        self.publish(group, is_owner);
    }
}

/// The priorities of this gateway in the election, as far as keepalived has them.
struct PriorityUpdater {
    /// What is added to the priority of each group; `None` before it was written.
    written: Vec<Option<i16>>,
    /// Polls of each worker, and when they last advanced, ns.
    polls: Vec<(u64, u64)>,
    loads: Vec<Arc<Load>>,
    has_backends: bool,
    joining: Joining,
    departure: Departure,
}

impl PriorityUpdater {
    fn new(election: &Candidacy) -> Self {
        let now_ns = (election.clock)();
        let polls = election.loads.iter().map(|load| (load.read().polls, now_ns)).collect();
        let written = vec![None; election.settings.election.groups.into()];
        let has_backends = has_backends(&election.served.borrow());
        let (loads, joining) = (election.loads.clone(), Joining::new(now_ns));
        Self { written, polls, loads, has_backends, joining, departure: Departure::default() }
    }

    /// Whether every worker has polled within `limit_ns`.
    fn workers_poll(&mut self, now_ns: u64, limit_ns: u64) -> bool {
        for ((polls, since_ns), load) in self.polls.iter_mut().zip(&self.loads) {
            let now = load.read().polls;
            if now != *polls {
                (*polls, *since_ns) = (now, now_ns);
            }
        }
        self.polls.iter().all(|(_, since_ns)| now_ns.saturating_sub(*since_ns) < limit_ns)
    }

    /// Writes the priorities that have changed.
    fn update(&mut self, election: &mut Candidacy, files: &Files) -> Result<(), Failure> {
        if election.served.has_changed().unwrap_or(false) {
            self.has_backends = has_backends(&election.served.borrow_and_update());
        }
        let now_ns = (election.clock)();
        let fitness = self.fitness(election, now_ns);
        if fitness == Fitness::Fit {
            election.first_fit_ns.get_or_insert(now_ns);
        }
        election.claim(|claims| VrrpClaims { rank: rank(fitness), ..claims });
        let settled_ns = election.first_fit_ns.map(|first_ns| now_ns.saturating_sub(first_ns));
        let is_settled = settled_ns.is_some_and(|settled_ns| Duration::from_nanos(settled_ns) >= SETTLED);
        let keeps = is_settled && !election.settings.election.preempt;
        let owned = election.answers.borrow().groups.map_or(0, |groups| groups.owned);
        if fitness == Fitness::Drained {
            self.departure.update(owned, now_ns, handover_max(election.settings.election.advertisement));
        } else {
            self.departure = Departure::default();
        }
        for (group, written) in (0..).zip(&mut self.written) {
            let is_owned = owned & 1 << group != 0;
            let holds_on = fitness == Fitness::Drained && is_owned && !self.departure.gives(group);
            let addition = addition(if holds_on { Fitness::Fit } else { fitness }, keeps && is_owned);
            if written.replace(addition) != Some(addition) {
                files.add_to_priority(group, addition)?;
            }
        }
        let (unfit, is_joining) = (fitness.problem(), !self.joining.is_over());
        let is_new = election.status.send_if_modified(|status| {
            let before = (status.unfit, status.is_joining);
            (status.unfit, status.is_joining) = (unfit, is_joining);
            before != (unfit, is_joining)
        });
        if is_new {
            match unfit {
                Some(why) => tracing::warn!(why, "the gateway leaves its VIPs to others"),
                None => tracing::info!("the gateway stands for election"),
            }
        }
        Ok(())
    }

    fn fitness(&mut self, election: &Candidacy, now_ns: u64) -> Fitness {
        let joins = if self.joining.is_over() { None } else { self.joining.update(present(election), now_ns) };
        let is_drained = *election.draining.borrow();
        let problems = [
            (!election.served.borrow().ready, "it has no complete state"),
            (!election.network.borrow().down.is_empty(), "a port has no link"),
            (!self.has_backends, "no backend of any Service is healthy"),
        ];
        let problem = problems.into_iter().find_map(|(is_so, why)| is_so.then_some(why));
        match (joins, problem) {
            _ if election.terminating.is_cancelled() => Fitness::Leaves("it ends"),
            (Some(why), _) => Fitness::Joins(why),
            (None, Some(_)) if is_drained => Fitness::Leaves("it is drained"),
            (None, None) if is_drained => Fitness::Drained,
            (None, Some(why)) => Fitness::Unfit(why),
            (None, None) => Fitness::Fit,
        }
    }
}

/// What a gateway that joins has.
fn present(election: &Candidacy) -> Present {
    let network = election.network.borrow();
    let resolved: BTreeSet<_> = network.neighbours.iter().map(|neighbour| (neighbour.link, neighbour.address)).collect();
    Present {
        state: election.served.borrow().ready,
        neighbours: election.next_hops.borrow().is_subset(&resolved),
        flows: !election.replication.borrow().awaits_copies,
    }
}

/// Whether any backend is healthy; true without Services that have backends.
fn has_backends(served: &Served) -> bool {
    let mut backends = served.services.values().flat_map(|service| &service.ports).flat_map(|port| &port.backends).peekable();
    backends.peek().is_none() || backends.any(|backend| backend.healthy)
}
