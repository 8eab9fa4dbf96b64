//! The plan: what gateways forward and what each object's status shall be, computed from the objects. A function without
//! I/O, clock or health.
//!
//! Invariant: an incremental plan equals a plan of all Services from scratch. A Service that did not change is not examined
//! and keeps its `Arc` from one plan to the next, so that only changes are sent, compiled and compared.
//! Deliberately not here: allocation of addresses (`assignment`), the plan of one Service (`build`), generations and the time of
//! status writes (`gateways::publish`, `status`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use proto::{Pool, ServiceName, Services};

use crate::config::settings::ControllerSettings;
use crate::gateways::registry::Gateways;
use crate::plan::addresses::{Allocation, PoolUse};
use crate::plan::policy::Policy;
use crate::plan::selection::Fence;
use crate::plan::selection::nodes::Nodes;
use crate::world::checkpoint::{Checkpoint, Decided};
use crate::world::{ServiceEntry, World};
use objects::note::{Cause, Note, Remark, Subject};

pub mod addresses;
mod assignment;
mod build;
mod cleanup;
pub mod externals;
pub mod forbidden;
pub mod ownership;
pub mod policy;
pub mod pools;
pub mod selection;

use assignment::Assignment;
pub use build::{MAGLEV_SEED, WantedStatus, WantedStatuses};
use build::{Planned, ServiceBuilder};
pub use cleanup::{Cleanup, LeftBy};
use cleanup::{leaving, strangers};

/// Desired state of the gateways, and desired status of the objects.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The Services that are ours, served or refused.
    pub services: Services,
    /// The pools.
    pub pools: Vec<Pool>,
    /// Usage figures of every pool, and why a pool is not in use.
    pub pools_status: Arc<Vec<PoolUse>>,
    /// Services of type `LoadBalancer` that are ours.
    pub statuses: WantedStatuses,
    /// Services that are not ours, or no longer ours, but still carry our finalizer, conditions or addresses.
    pub leaving: BTreeMap<ServiceName, Cleanup>,
    /// Notes for owners that the previous plan did not contain.
    pub notes: Vec<Note>,
    /// When to plan again even if nothing changes, because a reservation of an address expires.
    pub again_at: Option<Instant>,
    /// Decisions that the next leader must keep.
    pub checkpoint: Checkpoint,
    /// Services whose deleted slices no longer count, so that the world may forget these.
    pub done_with_departed: Vec<ServiceName>,
    /// Number of Services that were planned again because they or their dependencies changed; the others are unchanged.
    pub replanned: usize,
}

/// What one plan keeps for the next.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    assignment: Assignment,
    assigned_until: Option<Instant>,
    nodes_revision: u64,
    /// Nodes as backends, and the revisions of the world for which they were computed.
    nodes: Arc<Nodes>,
    nodes_seen: Option<(u64, u64)>,
    /// The Services in `planned` whose backends are nodes.
    to_nodes: BTreeSet<ServiceName>,
    /// Services of type `LoadBalancer` that are not ours.
    strangers: Vec<ServiceName>,
    planned: BTreeMap<ServiceName, Planned>,
    /// The revision of the world that was planned last.
    revision: u64,
    /// The Services in `planned` whose plan changes with time.
    waiting: BTreeSet<ServiceName>,
    /// The combined result of `planned`.
    services: Services,
    statuses: WantedStatuses,
    checkpoint: Checkpoint,
    /// Revision of the reserved addresses in `checkpoint`.
    reserved_revision: u64,
    is_recalled: bool,
}

/// Plans for `world`. `memory` comes from the previous plan with the same settings. Only changed Services are examined,
/// unless a change concerns all of them.
pub fn plan(world: &World, settings: &ControllerSettings, memory: &mut Memory, now: Instant) -> Plan {
    if !std::mem::replace(&mut memory.is_recalled, true) {
        memory.assignment.recall(world.checkpoint(), now);
    }
    let is_due = memory.assigned_until.is_some_and(|until| until <= now);
    let news = memory.assignment.update(world, settings, is_due, now);
    memory.assigned_until = memory.assignment.again_at(now);
    if news.is_decided {
        memory.strangers = strangers(world, settings);
    }
    let mut names: BTreeSet<ServiceName> = if news.is_decided {
        memory.forget_all_but_outcomes();
        memory.assignment.outcomes.keys().cloned().collect()
    } else {
        world.changed_since(memory.revision).chain(&memory.waiting).cloned().collect()
    };
    if memory.nodes_revision != world.nodes_revision() {
        names.extend(memory.to_nodes.iter().cloned());
    }
    (memory.revision, memory.nodes_revision) = (world.revision(), world.nodes_revision());

    let Assignment { pools, forbidden, outside_pools, .. } = &memory.assignment;
    let (pools, forbidden, outside_pools) = (Arc::clone(pools), Arc::clone(forbidden), Arc::clone(outside_pools));
    let fence = Fence::new(settings, &pools, &forbidden, &outside_pools);
    let seen = (world.nodes_revision(), world.overrides_revision());
    if memory.nodes_seen.replace(seen) != Some(seen) || news.fence_moved {
        memory.nodes = Arc::new(Nodes::new(world.nodes(), &fence, world.overrides(), &memory.nodes));
    }
    let nodes = Arc::clone(&memory.nodes);
    let planner = ServicePlanner { world, settings, fence: &fence, fence_moved: news.fence_moved, nodes: &nodes, now };
    let mut plan = Plan {
        notes: memory.assignment.notes_on_pools(),
        pools: memory.assignment.told.clone(),
        pools_status: Arc::clone(&memory.assignment.uses),
        ..Plan::default()
    };
    for name in &names {
        planner.plan(name, memory, &mut plan);
    }
    memory.assignment.recalled.clear();
    memory.note_reserved();
    let waiting = memory.waiting.iter().filter_map(|name| memory.planned.get(name)?.again_at());
    plan.again_at = waiting.chain(memory.assigned_until).min();
    (plan.services, plan.statuses) = (memory.services.clone(), memory.statuses.clone());
    plan.checkpoint = memory.checkpoint.clone();
    plan.leaving = leaving(world, settings, &memory.strangers);
    plan
}

impl Memory {
    /// Current reasons why Services are not served, or are served only in part.
    #[must_use]
    pub fn standing(&self) -> Vec<Note> {
        let of = |(name, one): (&ServiceName, &Planned)| {
            let subject = Subject::Service(name.clone());
            let standing = one.notes.iter().filter(|remark| matches!(remark.cause, Cause::Reason(_)));
            standing.map(|remark| Note { subject: subject.clone(), remark: remark.clone() }).collect::<Vec<_>>()
        };
        self.planned.iter().flat_map(of).chain(self.assignment.standing_on_pools()).collect()
    }

    /// Records the reports of the connected gateways. Returns true if they require another plan.
    pub fn follow_gateways(&mut self, gateways: &Gateways, now: Instant) -> bool {
        self.assignment.follow_gateways(gateways, now)
    }

    /// Records that the last plan was published as the state with this counter, or did not change it.
    pub fn published(&mut self, counter: u64) {
        self.assignment.published(counter);
    }

    fn forget_all_but_outcomes(&mut self) {
        let gone = self.planned.keys().filter(|name| !self.assignment.outcomes.contains_key(*name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.planned.remove(&name);
            self.waiting.remove(&name);
            self.to_nodes.remove(&name);
            self.services.remove(&name);
            self.statuses.remove(&name);
            self.checkpoint.remove(&name);
        }
    }

    fn note_reserved(&mut self) {
        if let Some((revision, reserved)) = self.assignment.reserved_since(self.reserved_revision) {
            self.reserved_revision = revision;
            self.checkpoint.reserved = Arc::new(reserved);
            self.checkpoint.revision += 1;
        }
    }

    fn take(&mut self, name: &ServiceName, one: Planned) {
        let decided = Decided { addresses: one.outcome.addresses.clone(), tables: one.tables.clone() };
        self.checkpoint.put(name, decided);
        if one.withheld_until.is_some() {
            self.services.remove(name);
        } else if self.services.get(name).is_none_or(|old| !Arc::ptr_eq(old, &one.service)) {
            self.services.insert(name.clone(), Arc::clone(&one.service));
        }
        match &one.status {
            Some(status) => drop(self.statuses.insert(name.clone(), Arc::clone(status))),
            None => drop(self.statuses.remove(name)),
        }
        if one.again_at().is_some() {
            self.waiting.insert(name.clone())
        } else {
            self.waiting.remove(name)
        };
        if one.nodes_revision.is_some() {
            self.to_nodes.insert(name.clone())
        } else {
            self.to_nodes.remove(name)
        };
        self.planned.insert(name.clone(), one);
    }
}

/// Inputs shared by the plans of single Services.
struct ServicePlanner<'a> {
    world: &'a World,
    settings: &'a ControllerSettings,
    fence: &'a Fence<'a>,
    fence_moved: bool,
    nodes: &'a Nodes,
    now: Instant,
}

impl ServicePlanner<'_> {
    /// Plans one Service again if its plan may have changed.
    fn plan(&self, name: &ServiceName, memory: &mut Memory, plan: &mut Plan) {
        let Some(entry) = self.world.services().get(name) else { return };
        let Some(outcome) = memory.assignment.outcomes.get(name) else {
            // Not ours: no traffic goes to its endpoints, so its deleted slices do not matter.
            let has_departed = self.world.departed_slices_of(name).next().is_some();
            return plan.done_with_departed.extend(has_departed.then(|| name.clone()));
        };
        let before = memory.planned.get(name);
        let candidate = &entry.candidate;
        if before.is_some_and(|old| self.keeps(old, entry, outcome) && old.status_is_of(candidate)) {
            return;
        }
        let &Self { world, settings, fence, nodes, now, .. } = self;
        let policy = Policy::of(candidate.wanted.as_ref().ok(), candidate.kind, &settings.defaults);
        let recalled = memory.assignment.recalled.get(name).cloned();
        let (recalled, ip_mode) = (recalled.as_deref(), policy.ip_mode);
        let builder = ServiceBuilder { candidate, outcome, settings, fence, nodes, world, policy, ip_mode, recalled };
        let one = builder.build_in_turn(entry.revision, before, now);
        let is_new = |remark: &&Remark| !before.is_some_and(|old| old.notes.contains(remark));
        let note = |remark: &Remark| Note { subject: Subject::Service(name.clone()), remark: remark.clone() };
        plan.notes.extend(one.notes.iter().filter(is_new).map(note));
        plan.replanned += 1;
        plan.done_with_departed.extend(one.has_done_with_departed().then(|| name.clone()));
        memory.take(name, one);
    }

    fn keeps(&self, old: &Planned, entry: &ServiceEntry, outcome: &Allocation) -> bool {
        let nodes_are_kept = old.nodes_revision.is_none_or(|revision| revision == self.world.nodes_revision());
        let wait_is_over = old.again_at().is_some_and(|until| until <= self.now);
        let unchanged = old.revision == entry.revision && old.outcome == *outcome && nodes_are_kept;
        unchanged && !self.fence_moved && !wait_is_over
    }
}

#[cfg(test)]
pub(crate) mod tests;
