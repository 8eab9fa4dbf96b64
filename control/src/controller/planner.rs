//! The planner: the task of a leader that turns changes of objects into states for gateways and statuses of Services.
//!
//! Invariant: nothing is planned before the source has listed every kind of object once.
//! Deliberately not here: how a plan is made (`plan`), and who leads (`controller`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use objects::note::{Note, Subject};
use proto::{Announce, Generation};
use tokio::sync::watch;
use tokio::time::Instant;

use super::debounce::{LastPlans, collect_burst};
use super::watched_world::WatchedWorld;
use crate::admin::KnownGateways;
use crate::config::settings::ControllerSettings;
use crate::gateways::programming::Programming;
use crate::gateways::publish::Published;
use crate::gateways::registry::Gateways;
use crate::healthz::{HEARTBEAT_INTERVAL, Heartbeat};
use crate::kubernetes::recorder::Recorder;
use crate::plan::addresses::PoolUse;
use crate::plan::externals::DisallowedExternalIps;
use crate::plan::{Memory, WantedStatuses, plan};
use crate::status::Statuses;
use crate::status::pools::PoolsReport;
use crate::world::World;
use crate::world::checkpoint::Checkpoint;
use crate::world::planned_drains::PlannedDrains;

/// Interval at which current notes are checked; a note is repeated when it is due.
const NOTE_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// What the planners of all terms of leadership share with other tasks.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) settings: ControllerSettings,
    pub(super) states: watch::Sender<Option<Arc<Published>>>,
    pub(super) gateways: watch::Sender<Gateways>,
    /// The gateways of the group that have an object.
    pub(super) known: watch::Sender<Arc<KnownGateways>>,
    /// The names of all nodes.
    pub(super) nodes: watch::Sender<Arc<BTreeSet<String>>>,
    /// The drains of the newest state.
    pub(super) drains: watch::Sender<Arc<PlannedDrains>>,
    pub(super) recorder: Arc<Recorder>,
    pub(super) pools: watch::Sender<PoolsReport>,
    pub(super) checkpoints: watch::Sender<Checkpoint>,
    pub(super) heartbeat: Heartbeat,
    pub(super) programming: Programming,
    /// The statuses of the last plan, for the admin API.
    pub(super) wanted: watch::Sender<WantedStatuses>,
}

/// The planner of one term.
pub(super) struct Planner {
    pub(super) shared: Shared,
    pub(super) epoch: String,
    pub(super) statuses: watch::Sender<Option<Arc<Statuses>>>,
}

impl Planner {
    /// Plans until the source ends.
    pub(super) async fn run(self, WatchedWorld { world, changes }: &mut WatchedWorld) {
        let mut memory = Memory::default();
        let (mut again_at, mut last_plans) = (None, LastPlans::default());
        // Changes that arrived during a plan count from its start.
        let mut waiting_since: Option<Instant> = None;
        let mut disallowed = DisallowedExternalIps::default();
        let mut note_checks = tokio::time::interval(NOTE_CHECK_INTERVAL);
        let (mut beats, beating) = (tokio::time::interval(HEARTBEAT_INTERVAL), self.shared.heartbeat.start());
        let mut gateways = self.shared.gateways.subscribe();
        gateways.mark_changed();
        loop {
            beating.beat();
            tokio::select! {
                _ = beats.tick() => continue,
                change = changes.recv() => match change {
                    Some(change) => world.apply(change),
                    None => return,
                },
                // Their own addresses must not become VIPs, and addresses that they still forward must not be
                // allocated.
                Ok(()) = gateways.changed() => {
                    if !memory.follow_gateways(&gateways.borrow_and_update(), Instant::now().into_std()) {
                        continue;
                    }
                }
                () = tokio::time::sleep_until(again_at.unwrap_or_else(Instant::now)), if again_at.is_some() => {}
                _ = note_checks.tick() => {
                    memory.current_notes().iter().for_each(|note| self.shared.recorder.repeat(note, uid(world, note).as_deref()));
                    continue;
                }
            }
            let received_at = waiting_since.take().unwrap_or_else(Instant::now);
            collect_burst(changes, world, last_plans).await;
            self.shared.recorder.end(world.ending_namespaces());
            self.shared.recorder.forget(&world.take_deleted());
            world.take_notes().iter().for_each(|note| self.shared.recorder.record(note, uid(world, note).as_deref()));
            if world.is_complete() {
                disallowed.log_new(world, &self.shared.settings);
                let started = Instant::now();
                let slices_changed_at = world.take_slices_changed().then(|| received_at.into_std());
                again_at = self.plan(world, &mut memory, received_at, slices_changed_at);
                self.shared.programming.plans.observe(started.elapsed().as_secs_f64());
                last_plans.made(slices_changed_at.is_some());
                waiting_since = (!changes.is_empty()).then_some(started);
            }
        }
    }

    /// Plans and publishes; returns when to plan again. The first of the planned changes was received at `received_at`, and
    /// at `slices_changed_at` if it is one of EndpointSlices.
    fn plan(
        &self,
        world: &mut World,
        memory: &mut Memory,
        received_at: Instant,
        slices_changed_at: Option<std::time::Instant>,
    ) -> Option<Instant> {
        let now = Instant::now().into_std();
        memory.set_time_of_day(now, SystemTime::now());
        let plan = plan(world, &self.shared.settings, memory, now);
        plan.notes.iter().for_each(|note| self.shared.recorder.record(note, uid(world, note).as_deref()));
        self.publish_to_operators(world);
        replace_if(&self.shared.checkpoints, |old| old.revision != plan.checkpoint.revision, || plan.checkpoint.clone());
        world.forget_deleted_slices(&plan.done_with_deleted_slices);
        self.publish_pools(world, &plan.pools_status);
        let l2 = plan.pools.iter().filter(|pool| pool.announce == Announce::L2).flat_map(|pool| pool.ranges.iter().copied());
        Gateways::serve_l2(&self.shared.gateways, &l2.collect::<Vec<_>>());
        let before = self.shared.states.borrow().clone();
        let next = match &before {
            None => Some(Published::first(self.epoch.clone(), plan.services, plan.pools)),
            Some(before) => before.next(plan.services, plan.pools),
        };
        if let (Some(next), Some(_), Some(since)) = (&next, &before, slices_changed_at) {
            self.shared.programming.published(next.state.generation.counter, since);
        }
        let newest = match (next, before) {
            (Some(next), _) => Arc::new(next),
            (None, Some(before)) => before,
            (None, None) => return plan.again_at.map(Instant::from_std),
        };
        let generation = &newest.state.generation;
        memory.published(generation.counter);
        self.shared.wanted.send_replace(plan.statuses.clone());
        let statuses = Statuses { counter: generation.counter, wanted: plan.statuses, cleanups: plan.cleanups };
        let is_new = |old: &Option<Arc<Published>>| old.as_ref().is_none_or(|old| !Arc::ptr_eq(old, &newest));
        replace_if(&self.shared.states, is_new, || Some(Arc::clone(&newest)));
        self.publish_drains(world, generation);
        let (services, plan_us) = (newest.state.services.len(), received_at.elapsed().as_micros());
        tracing::debug!(%generation, services, replanned = plan.replanned, plan_us, "planned");
        self.statuses.send_replace(Some(Arc::new(statuses)));
        plan.again_at.map(Instant::from_std)
    }

    /// Examines pool objects only if they or the usage figures have changed.
    fn publish_pools(&self, world: &World, uses: &Arc<Vec<PoolUse>>) {
        let revision = world.revisions().pools;
        let is_other = |old: &PoolsReport| old.revision != revision || (!Arc::ptr_eq(&old.uses, uses) && old.uses != *uses);
        let report = || PoolsReport { uses: Arc::clone(uses), revision, objects: Arc::new(world.pools().clone()) };
        replace_if(&self.shared.pools, is_other, report);
    }

    /// Gateways learn that they are drained before they get the state that was planned with the drain.
    fn publish_to_operators(&self, world: &World) {
        Gateways::drain(&self.shared.gateways, world.overrides().drained_gateways());
        let of_group = world.gateways().iter().filter(|(_, gateway)| gateway.group == self.shared.settings.group);
        let known: KnownGateways = of_group.map(|(name, gateway)| (name.clone(), gateway.last_seen_s)).collect();
        replace_if(&self.shared.known, |old| **old != known, || Arc::new(known.clone()));
        let nodes = || world.nodes().keys();
        replace_if(&self.shared.nodes, |old| !old.iter().eq(nodes()), || Arc::new(nodes().cloned().collect()));
    }

    /// Operators learn of drains once they are published.
    fn publish_drains(&self, world: &World, published: &Generation) {
        self.shared.drains.send_if_modified(|drains| {
            let news = drains.after(world.overrides(), world.drained_nodes(), published);
            let are_others = news.is_some();
            if let Some(news) = news {
                *drains = Arc::new(news);
            }
            are_others
        });
    }
}

/// Replaces the value of a channel and notifies its receivers if the old value is `outdated`.
fn replace_if<T>(channel: &watch::Sender<T>, outdated: impl FnOnce(&T) -> bool, new: impl FnOnce() -> T) {
    channel.send_if_modified(|value| {
        let is_outdated = outdated(value);
        if is_outdated {
            *value = new();
        }
        is_outdated
    });
}

/// The uid of the object of a note, if it is known.
fn uid(world: &World, note: &Note) -> Option<String> {
    match &note.subject {
        Subject::Service(name) => Some(world.services().get(name)?.candidate.object.uid.clone()).filter(|uid| !uid.is_empty()),
        Subject::Pool(name) => world.pools().get(name)?.metadata.uid.clone(),
        // For nodes the kubelet uses the name as uid, and kubectl searches for it.
        Subject::Node(name) => Some(name.clone()),
        Subject::Slice(_) | Subject::Namespace(_) | Subject::Gateway(_) => None,
    }
}
