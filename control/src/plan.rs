//! What follows from the objects: the Services that gateways forward by, and the status of each. A function: no I/O, no
//! clock, no health.
//!
//! Invariant: a plan is what planning all Services anew would give; yet a Service that did not change is not looked at, and
//! keeps its `Arc` from one plan to the next, so that what is sent, compiled and compared is only what changed, too.
//! Deliberately not here: who gets which address (`assign`), what becomes of one Service (`build`), generations and when a
//! status is written (`publish`, `status`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use imbl::OrdMap;
use proto::{Pool, Reason, ServiceName, Services};

use crate::addresses::{Outcome, PoolUse};
use crate::checkpoint::{Checkpoint, Decided};
use crate::gateways::Gateways;
use crate::note::{Cause, Note, Remark, Subject};
use crate::policy::Policy;
use crate::selection::{Fence, Nodes};
use crate::settings::ControllerSettings;
use crate::source::Ingress;
use crate::spec::Held;
use crate::world::{Entry, World};

mod assign;
mod build;
mod lack;
mod leaving;

use assign::Assignment;
pub use build::MAGLEV_SEED;
use build::{Builder, Planned};
pub use lack::Lack;
pub use leaving::{Leaving, LeftBy};
use leaving::{leaving, strangers};

/// What gateways shall forward by, and what the objects' status shall be.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The Services that are ours, served or refused.
    pub services: Services,
    /// The pools.
    pub pools: Vec<Pool>,
    /// Every pool in figures, and why one is not used.
    pub pools_status: Arc<Vec<PoolUse>>,
    /// Services of type `LoadBalancer` that are ours.
    pub statuses: WantedStatuses,
    /// Services that are not ours, or not any more, and still hold something of ours.
    pub leaving: BTreeMap<ServiceName, Leaving>,
    /// What owners should know and were not told by the plan before.
    pub notes: Vec<Note>,
    /// When to plan again although nothing changed: an address that is kept for somebody gets free.
    pub again_at: Option<Instant>,
    /// What the next leader must not decide anew.
    pub checkpoint: Checkpoint,
    /// Services whose deleted slices do not count any more: the world may forget them.
    pub done_with_departed: Vec<ServiceName>,
    /// How many Services were planned anew, as something of them or around them changed; all others are as before.
    pub replanned: usize,
}

/// The statuses of Services; copied and compared as [`Services`] are.
pub type WantedStatuses = OrdMap<ServiceName, Arc<WantedStatus>>;

/// The status of one Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedStatus {
    /// The Service.
    pub service: ServiceName,
    /// Guard of a write; empty for manifests.
    pub uid: String,
    /// Guard of a write; empty for manifests.
    pub resource_version: String,
    /// Our group, which stands on it beside the finalizer.
    pub group: String,
    /// The addresses that it shall tell, in the order of the families.
    pub ingress: Vec<Ingress>,
    /// What the object holds.
    pub held: Held,
    /// Who else wrote its status.
    pub foreign_manager: Option<String>,
    /// Why it is not served. While it is not, its status loses what it does not hold, but gains nothing.
    pub refusal: Option<Reason>,
    /// Why it has not every address that it needs.
    pub unassigned: Option<Reason>,
    /// Whether an address of it lies in no pool.
    pub outside_pools: bool,
    /// Whether gateways are not given it yet: its finalizer comes first.
    pub is_withheld: bool,
    /// The pools that its addresses lie in, in the order of the addresses.
    pub pools: Vec<String>,
    /// Whether something that it asks for cannot be read, and what was in force stays.
    pub is_partly_unread: bool,
    /// What it lacks to have backends.
    pub lack: Lack,
    /// Whether all backends are used when none is healthy.
    pub fails_open: bool,
}

/// What the next plan needs of this one.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    assignment: Assignment,
    assigned_until: Option<Instant>,
    nodes_revision: u64,
    /// As Services are sent to them, and the world's revisions that they were looked at for.
    nodes: Arc<Nodes>,
    nodes_seen: Option<(u64, u64)>,
    /// Of `planned`, those whose backends are nodes.
    to_nodes: BTreeSet<ServiceName>,
    /// Services of type `LoadBalancer` that are not ours.
    strangers: Vec<ServiceName>,
    planned: BTreeMap<ServiceName, Planned>,
    /// The world's revision that it was planned for.
    revision: u64,
    /// Of `planned`, those that come out otherwise with time.
    waiting: BTreeSet<ServiceName>,
    /// What `planned` comes to.
    services: Services,
    statuses: WantedStatuses,
    checkpoint: Checkpoint,
    /// Of the reserved addresses in `checkpoint`.
    reserved_revision: u64,
    is_recalled: bool,
}

impl Memory {
    /// Why Services are not served, or not as they should be, at this time.
    #[must_use]
    pub fn standing(&self) -> Vec<Note> {
        let of = |(name, one): (&ServiceName, &Planned)| {
            let subject = Subject::Service(name.clone());
            let standing = one.notes.iter().filter(|remark| matches!(remark.cause, Cause::Reason(_)));
            standing.map(|remark| Note { subject: subject.clone(), remark: remark.clone() }).collect::<Vec<_>>()
        };
        self.planned.iter().flat_map(of).chain(self.assignment.standing_on_pools()).collect()
    }
}

/// Plans for `world`. `memory` is that of the plan before, with the same settings. Unless something changed that concerns
/// all Services, only those of which anything changed are looked at.
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
    let look = Look { world, settings, fence: &fence, fence_moved: news.fence_moved, nodes: &nodes, now };
    let mut plan = Plan {
        notes: memory.assignment.notes_on_pools(),
        pools: memory.assignment.told.clone(),
        pools_status: Arc::clone(&memory.assignment.uses),
        ..Plan::default()
    };
    for name in &names {
        look.at(name, memory, &mut plan);
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
    /// Takes in what the connected gateways say. True when it is time for another plan because of that.
    pub fn follow_gateways(&mut self, gateways: &Gateways, now: Instant) -> bool {
        self.assignment.follow_gateways(gateways, now)
    }

    /// The last plan became the state with this counter, or changed nothing of it.
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

/// What each Service is looked at with.
struct Look<'a> {
    world: &'a World,
    settings: &'a ControllerSettings,
    fence: &'a Fence<'a>,
    fence_moved: bool,
    nodes: &'a Nodes,
    now: Instant,
}

impl Look<'_> {
    /// Plans one Service anew, if it may come out otherwise than before.
    fn at(&self, name: &ServiceName, memory: &mut Memory, plan: &mut Plan) {
        let Some(entry) = self.world.services().get(name) else { return };
        let Some(outcome) = memory.assignment.outcomes.get(name) else {
            // Not ours: nobody is sent to its endpoints, whether their slices are deleted or not.
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
        let builder = Builder { candidate, outcome, settings, fence, nodes, world, policy, ip_mode, recalled };
        let one = builder.build_in_turn(entry.revision, before, now);
        let is_new = |remark: &&Remark| !before.is_some_and(|old| old.notes.contains(remark));
        let note = |remark: &Remark| Note { subject: Subject::Service(name.clone()), remark: remark.clone() };
        plan.notes.extend(one.notes.iter().filter(is_new).map(note));
        plan.replanned += 1;
        plan.done_with_departed.extend(one.has_done_with_departed().then(|| name.clone()));
        memory.take(name, one);
    }

    fn keeps(&self, old: &Planned, entry: &Entry, outcome: &Outcome) -> bool {
        let nodes_are_kept = old.nodes_revision.is_none_or(|revision| revision == self.world.nodes_revision());
        let wait_is_over = old.again_at().is_some_and(|until| until <= self.now);
        let unchanged = old.revision == entry.revision && old.outcome == *outcome && nodes_are_kept;
        unchanged && !self.fence_moved && !wait_is_over
    }
}

#[cfg(test)]
pub(crate) mod tests;
