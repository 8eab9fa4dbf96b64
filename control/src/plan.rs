//! The plan: what gateways forward and what each object's status shall be, computed from the objects. A function
//! without I/O, clock or health.
//!
//! Invariant: an incremental plan equals a plan of all Services from scratch. A Service that did not change is not
//! examined and keeps its `Arc` from one plan to the next, so that only changes are sent, compiled and compared.
//! Deliberately not here: allocation of addresses (`assignment`), the plan of one Service (`build`), generations and
//! the time of status writes (`gateways::publish`, `status`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use proto::{Pool, ServiceName, Services};

use crate::config::settings::{ControllerSettings, MaglevSeed};
use crate::gateways::registry::Gateways;
use crate::plan::addresses::PoolUse;
use crate::plan::selection::Fence;
use crate::plan::selection::nodes::Nodes;
use crate::world::World;
use crate::world::checkpoint::{Checkpoint, Decided};
use objects::note::{Cause, Note, Remark, Subject};

pub mod addresses;
mod assignment;
mod build;
pub mod externals;
pub mod forbidden;
pub mod frontend;
pub mod pools;
pub mod selection;
pub mod service_life;
pub mod tenure;
pub(crate) mod unserved;

use assignment::Assignment;
pub use build::MAGLEV_SEED;
use build::{Inputs, Planned, ServiceBuilder};
use service_life::Phase;
pub use service_life::{WantedStatus, WantedStatuses};
pub use tenure::{Cleanup, LeftBy};
use tenure::{cleanups, foreign_services};
use unserved::Unserved;

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
    pub cleanups: BTreeMap<ServiceName, Cleanup>,
    /// Notes for owners that the previous plan did not contain.
    pub notes: Vec<Note>,
    /// When to plan again even if nothing changes, because a reservation of an address expires.
    pub again_at: Option<Instant>,
    /// Decisions that the next leader must keep.
    pub checkpoint: Checkpoint,
    /// Services whose deleted slices no longer count, so that the world may forget these.
    pub done_with_deleted_slices: Vec<ServiceName>,
    /// Number of Services that were planned again because they or their dependencies changed; the others are unchanged.
    pub replanned: usize,
}

/// What one plan keeps for the next.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    assignment: Assignment,
    assigned_until: Option<Instant>,
    /// Nodes as backends.
    nodes: Arc<Nodes>,
    /// Revisions of the nodes and of the overrides for which `nodes` was computed.
    nodes_for: Option<(u64, u64)>,
    /// The Services in `planned` whose backends are nodes.
    to_nodes: BTreeSet<ServiceName>,
    /// Services of type `LoadBalancer` that are not ours.
    foreign_services: Vec<ServiceName>,
    /// Services that are not ours although they ask for a group of our class.
    unserved: Unserved,
    /// Boxed, since a map of 10,000 would move and reserve much more memory than they take.
    planned: BTreeMap<ServiceName, Box<Planned>>,
    /// The revision of the world that was planned last.
    revision: u64,
    /// The Services in `planned` whose plan changes with time.
    waiting: BTreeSet<ServiceName>,
    /// The combined result of `planned`.
    services: Services,
    statuses: WantedStatuses,
    checkpoint: Checkpoint,
    /// A time and the time of day then; without it no earlier backends are recorded.
    time_of_day: Option<(Instant, SystemTime)>,
    /// Revision of the reserved addresses in `checkpoint`.
    reserved_revision: u64,
    is_recalled: bool,
}

/// Plans for `world`. `memory` comes from the previous plan with the same settings. Only changed Services are examined,
/// unless a change concerns all of them.
pub fn plan(world: &World, settings: &ControllerSettings, memory: &mut Memory, now: Instant) -> Plan {
    if !std::mem::replace(&mut memory.is_recalled, true) {
        memory.assignment.recall(world.checkpoint(), now);
        memory.checkpoint.maglev_seed = world.checkpoint().maglev_seed;
    }
    let is_due = memory.assigned_until.is_some_and(|until| until <= now);
    let update = memory.assignment.update(world, settings, is_due, (now, memory.unix_s(now)));
    memory.assigned_until = memory.assignment.allocations.next_expiry(now);
    let mut notes = memory.assignment.new_notes_on_pools();
    if update.is_decided {
        memory.foreign_services = foreign_services(world, settings);
        notes.extend(memory.update_unserved(world, settings));
    }
    let mut names: BTreeSet<ServiceName> = if update.is_decided {
        memory.forget_all_but_outcomes();
        memory.assignment.outcomes.keys().cloned().collect()
    } else {
        world.changed_since(memory.revision).chain(&memory.waiting).cloned().collect()
    };
    memory.revision = world.revision();
    let nodes_for = (world.revisions().nodes, world.overrides_revision());
    let before = memory.nodes_for.replace(nodes_for);
    if before.is_none_or(|(nodes, _)| nodes != nodes_for.0) {
        names.extend(memory.to_nodes.iter().cloned());
    }
    let Assignment { pools, forbidden, outside_pools, .. } = &memory.assignment;
    let (pools, forbidden, outside_pools) = (Arc::clone(pools), Arc::clone(forbidden), Arc::clone(outside_pools));
    let fence = Fence { settings, pools: &pools, forbidden: &forbidden, vips_outside_pools: &outside_pools };
    if before != Some(nodes_for) || update.fence_moved {
        memory.nodes = Arc::new(Nodes::new(world.nodes(), &fence, world.overrides(), &memory.nodes));
    }
    let nodes = Arc::clone(&memory.nodes);
    let unix_s = memory.unix_s(now);
    let maglev_seed = match settings.maglev_seed {
        MaglevSeed::Given(seed) => seed,
        _ => memory.checkpoint.maglev_seed.unwrap_or(MAGLEV_SEED),
    };
    let fence_moved = update.fence_moved;
    let inputs = Inputs { world, settings, fence: &fence, fence_moved, nodes: &nodes, maglev_seed, now, unix_s };
    let mut plan = Plan {
        notes,
        pools: Vec::clone(&memory.assignment.gateway_pools),
        pools_status: Arc::clone(&memory.assignment.uses),
        ..Plan::default()
    };
    for name in &names {
        plan_service(name, &inputs, memory, &mut plan);
    }
    memory.assignment.recalled.clear();
    memory.record_reserved();
    memory.record_gateways();
    let waiting = memory.waiting.iter().filter_map(|name| memory.planned.get(name)?.again_at());
    plan.again_at = waiting.chain(memory.assigned_until).min();
    (plan.services, plan.statuses) = (memory.services.clone(), memory.statuses.clone());
    plan.checkpoint = memory.checkpoint.clone();
    plan.cleanups = cleanups(world, settings, &memory.foreign_services);
    plan
}

impl Memory {
    /// Current reasons why Services are not served, or are served only in part, why backends are refused, and why pools
    /// are not in use.
    #[must_use]
    pub fn current_notes(&self) -> Vec<Note> {
        let of_service = |(name, planned): (&ServiceName, &Planned)| {
            let is_lasting = |remark: &&Remark| matches!(remark.cause, Cause::Reason(_) | Cause::BackendRefused);
            planned.notes.iter().filter(is_lasting).map(|remark| note_on_service(name, remark)).collect::<Vec<_>>()
        };
        let unserved = self.unserved.without_group.iter().chain(&self.unserved.not_released);
        let unserved = unserved.map(|(name, remark)| note_on_service(name, remark));
        self.planned
            .iter()
            .map(|(name, planned)| (name, &**planned))
            .flat_map(of_service)
            .chain(self.assignment.notes_on_pools())
            .chain(unserved)
            .collect()
    }

    /// Records the reports of the connected gateways. Returns true if they require another plan.
    pub fn follow_gateways(&mut self, gateways: &Gateways, now: Instant) -> bool {
        self.assignment.follow_gateways(gateways, (now, self.unix_s(now)))
    }

    /// Sets the time of day, by which gateways are told when backends were replaced.
    pub const fn set_time_of_day(&mut self, now: Instant, time_of_day: SystemTime) {
        self.time_of_day = Some((now, time_of_day));
    }

    /// The Unix time at `now`, seconds.
    fn unix_s(&self, now: Instant) -> Option<u64> {
        let (then, time_of_day) = self.time_of_day?;
        let unix = (time_of_day + now.saturating_duration_since(then)).duration_since(UNIX_EPOCH).ok()?;
        Some(unix.as_secs())
    }

    /// Records that the last plan was published as the state with this counter, or did not change it.
    pub fn published(&mut self, counter: u64) {
        self.assignment.allocations.published(counter);
    }

    /// Finds the Services that no group serves, or that another group has not released. Returns the new notes.
    fn update_unserved(&mut self, world: &World, settings: &ControllerSettings) -> Vec<Note> {
        let mut unserved = Unserved::of(world, settings, self.assignment.serves_node_ports(settings));
        unserved.not_released.retain(|name, _| !self.assignment.outcomes.contains_key(name));
        let before = std::mem::replace(&mut self.unserved, unserved).without_group;
        let is_new = |(name, remark): &(&ServiceName, &Remark)| before.get(*name) != Some(*remark);
        let new = self.unserved.without_group.iter().filter(is_new);
        new.map(|(name, remark)| note_on_service(name, remark)).collect()
    }

    fn forget_all_but_outcomes(&mut self) {
        let unassigned = self.planned.keys().filter(|name| !self.assignment.outcomes.contains_key(*name));
        for name in unassigned.cloned().collect::<Vec<_>>() {
            self.planned.remove(&name);
            self.waiting.remove(&name);
            self.to_nodes.remove(&name);
            self.services.remove(&name);
            self.statuses.remove(&name);
            self.checkpoint.remove(&name);
        }
    }

    fn record_reserved(&mut self) {
        let (revision, reserved) = self.assignment.allocations.reserved();
        if revision != self.reserved_revision {
            self.reserved_revision = revision;
            self.checkpoint.reserved = Arc::new(reserved.iter().cloned().collect());
            self.checkpoint.revision += 1;
        }
    }

    /// Records what the next leader must know of gateways and of the pools that they have.
    fn record_gateways(&mut self) {
        if self.checkpoint.pools != self.assignment.gateway_pools {
            self.checkpoint.pools = Arc::clone(&self.assignment.gateway_pools);
            self.checkpoint.revision += 1;
        }
        let serving = self.assignment.node_port_gateways();
        if serving != self.checkpoint.node_port_gateways.as_ref() {
            self.checkpoint.node_port_gateways = serving.cloned();
            self.checkpoint.revision += 1;
        }
    }

    fn take(&mut self, name: &ServiceName, one: Planned) {
        // No flow depends on the tables of a Service that was never served.
        let tables = if one.in_force.is_some() { one.tables.clone() } else { BTreeMap::new() };
        let decided = Decided { addresses: one.outcome.addresses().collect(), tables, in_force: one.in_force };
        self.checkpoint.put(name, decided);
        if matches!(one.phase, Phase::Marking { .. }) {
            self.services.remove(name);
        } else if self.services.get(name).is_none_or(|old| !Arc::ptr_eq(old, &one.service)) {
            self.services.insert(name.clone(), Arc::clone(&one.service));
        }
        match &one.status {
            Some(status) => drop(self.statuses.insert(name.clone(), Arc::clone(status))),
            None => drop(self.statuses.remove(name)),
        }
        set_member(&mut self.waiting, name, one.again_at().is_some());
        set_member(&mut self.to_nodes, name, one.nodes_revision.is_some());
        self.planned.insert(name.clone(), Box::new(one));
    }
}

/// Adds `name` to a set or removes it.
fn set_member(set: &mut BTreeSet<ServiceName>, name: &ServiceName, is_member: bool) {
    if is_member {
        set.insert(name.clone());
    } else {
        set.remove(name);
    }
}

/// Plans one Service again if its plan may have changed.
fn plan_service(name: &ServiceName, inputs: &Inputs<'_>, memory: &mut Memory, plan: &mut Plan) {
    let Some(entry) = inputs.world.services().get(name) else { return };
    let Some(outcome) = memory.assignment.outcomes.get(name) else {
        // Not ours: no traffic goes to its endpoints, so its deleted slices do not matter.
        let has_deleted_slices = inputs.world.deleted_slices_of(name).next().is_some();
        return plan.done_with_deleted_slices.extend(has_deleted_slices.then(|| name.clone()));
    };
    let before = memory.planned.get(name).map(Box::as_ref);
    if before.is_some_and(|old| old.is_current(inputs, entry, outcome)) {
        return;
    }
    let recalled = memory.assignment.recalled.get(name).map(Arc::as_ref);
    let one = ServiceBuilder { inputs, entry, outcome, before, recalled }.plan();
    let is_new = |remark: &&Remark| !before.is_some_and(|old| old.notes.contains(remark));
    plan.notes.extend(one.notes.iter().filter(is_new).map(|remark| note_on_service(name, remark)));
    plan.replanned += 1;
    plan.done_with_deleted_slices.extend(one.deleted_slices.are_over().then(|| name.clone()));
    memory.take(name, one);
}

fn note_on_service(name: &ServiceName, remark: &Remark) -> Note {
    Note { subject: Subject::Service(name.clone()), remark: remark.clone() }
}

#[cfg(test)]
pub(crate) mod tests;
