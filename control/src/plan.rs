//! What follows from the objects: the Services that gateways forward by, and the status of each. A function: no I/O, no
//! clock, no health.
//!
//! Invariant: a plan is what planning all Services anew would give; yet a Service that did not change is not looked at, and
//! keeps its `Arc` from one plan to the next, so that what is sent, compiled and compared is only what changed, too.
//! Deliberately not here: what becomes of one Service (`build`), generations and when a status is written (`publish`, `status`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use imbl::OrdMap;
use proto::limits::SERVICES_MAX;
use proto::{Pool, Protocol, Reason, Refusal, ServiceName, Services};

use crate::addresses::{Allocations, Claim, Outcome};
use crate::externals::Giving;
use crate::note::{Cause, Note, Remark, Subject};
use crate::ownership::Ownership;
use crate::policy::Policy;
use crate::selection::Fence;
use crate::settings::ControllerSettings;
use crate::source::Ingress;
use crate::spec::{Candidate, Held, PoolSpec};
use crate::world::{Entry, World};

mod build;
mod leaving;

pub use build::MAGLEV_SEED;
use build::{Builder, Planned};
pub use leaving::{Leaving, LeftBy};
use leaving::{leaving, strangers};

/// What gateways shall forward by, and what the objects' status shall be.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The Services that are ours, served or refused.
    pub services: Services,
    /// The pools.
    pub pools: Vec<Pool>,
    /// Services of type `LoadBalancer` that are ours.
    pub statuses: WantedStatuses,
    /// Services that are not ours, or not any more, and still hold something of ours.
    pub leaving: BTreeMap<ServiceName, Leaving>,
    /// What owners should know and were not told by the plan before.
    pub notes: Vec<Note>,
    /// When to plan again although nothing changed: an address that is kept for somebody gets free.
    pub again_at: Option<Instant>,
    /// Services whose deleted slices do not count any more: the world may forget them.
    pub done_with_departed: Vec<ServiceName>,
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
}

/// What the next plan needs of this one.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    allocations: Allocations,
    outcomes: BTreeMap<ServiceName, Outcome>,
    /// Of the Services and the namespaces that `outcomes` were decided for.
    assigned_for: Option<(u64, u64)>,
    external_ips: BTreeSet<IpAddr>,
    nodes_revision: u64,
    /// VIPs that lie in no pool.
    outside_pools: Vec<IpAddr>,
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
        self.planned.iter().flat_map(of).collect()
    }
}

/// Plans for `world`. `memory` is that of the plan before, with the same settings. Unless something changed that concerns
/// all Services, only those of which anything changed are looked at.
pub fn plan(world: &World, settings: &ControllerSettings, memory: &mut Memory, now: Instant) -> Plan {
    let some_address_is_free_again = memory.allocations.next_expiry().is_some_and(|expiry| expiry <= now);
    let revisions = (world.services_revision(), world.namespaces_revision());
    let assigns = memory.assigned_for != Some(revisions) || some_address_is_free_again;
    let concerns_all = assigns || memory.nodes_revision != world.nodes_revision();
    let mut fence_moved = false;
    if assigns {
        (memory.outcomes, memory.external_ips) = assign(world, settings, &mut memory.allocations, now);
        memory.assigned_for = Some(revisions);
        let mut outside_pools = memory.allocations.outside_pools(settings);
        outside_pools.extend(&memory.external_ips);
        fence_moved = memory.outside_pools != outside_pools;
        memory.outside_pools = outside_pools;
        memory.strangers = strangers(world, settings);
    }
    let names: BTreeSet<ServiceName> = if concerns_all {
        memory.forget_all_but_outcomes();
        memory.outcomes.keys().cloned().collect()
    } else {
        world.changed_since(memory.revision).chain(&memory.waiting).cloned().collect()
    };
    (memory.revision, memory.nodes_revision) = (world.revision(), world.nodes_revision());

    let outside_pools = std::mem::take(&mut memory.outside_pools);
    let fence = Fence::new(settings, &outside_pools);
    let look = Look { world, settings, fence: &fence, fence_moved, now };
    let mut plan = Plan { pools: settings.pools.iter().map(PoolSpec::told).collect(), ..Plan::default() };
    for name in &names {
        look.at(name, memory, &mut plan);
    }
    memory.outside_pools = outside_pools;
    let waiting = memory.waiting.iter().filter_map(|name| memory.planned.get(name)?.again_at());
    plan.again_at = waiting.chain(memory.allocations.next_expiry()).min();
    (plan.services, plan.statuses) = (memory.services.clone(), memory.statuses.clone());
    plan.leaving = leaving(world, settings, &memory.strangers);
    plan
}

impl Memory {
    fn forget_all_but_outcomes(&mut self) {
        let gone = self.planned.keys().filter(|name| !self.outcomes.contains_key(*name));
        for name in gone.cloned().collect::<Vec<_>>() {
            self.planned.remove(&name);
            self.waiting.remove(&name);
            self.services.remove(&name);
            self.statuses.remove(&name);
        }
    }

    fn take(&mut self, name: &ServiceName, one: Planned) {
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
        self.planned.insert(name.clone(), one);
    }
}

/// What each Service is looked at with.
struct Look<'a> {
    world: &'a World,
    settings: &'a ControllerSettings,
    fence: &'a Fence<'a>,
    fence_moved: bool,
    now: Instant,
}

impl Look<'_> {
    /// Plans one Service anew, if it may come out otherwise than before.
    fn at(&self, name: &ServiceName, memory: &mut Memory, plan: &mut Plan) {
        let Some((entry, outcome)) = self.world.services().get(name).zip(memory.outcomes.get(name)) else { return };
        let before = memory.planned.get(name);
        let candidate = &entry.candidate;
        if before.is_some_and(|old| self.keeps(old, entry, outcome) && old.status_is_of(candidate)) {
            return;
        }
        let &Self { world, settings, fence, now, .. } = self;
        let policy = Policy::of(candidate.wanted.as_ref().ok(), candidate.kind, &settings.defaults);
        let builder = Builder { candidate, outcome, settings, fence, world, policy, ip_mode: policy.ip_mode };
        let one = builder.build_in_turn(entry.revision, before, now);
        let is_new = |remark: &&Remark| !before.is_some_and(|old| old.notes.contains(remark));
        let note = |remark: &Remark| Note { subject: Subject::Service(name.clone()), remark: remark.clone() };
        plan.notes.extend(one.notes.iter().filter(is_new).map(note));
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

/// Addresses and node ports for all Services that are ours, and all `externalIPs` that were given.
fn assign(
    world: &World,
    settings: &ControllerSettings,
    allocations: &mut Allocations,
    now: Instant,
) -> (BTreeMap<ServiceName, Outcome>, BTreeSet<IpAddr>) {
    let owned = |candidate| (candidate, Ownership::of(candidate, world, settings));
    let entries = world.services().values().map(|entry| owned(&entry.candidate));
    let mut ours: Vec<(&Candidate, Ownership)> = entries.filter(|(_, owned)| owned.is_any()).collect();
    ours.sort_by_key(|(candidate, _)| (candidate.created_s, &candidate.name));
    let too_many = ours.split_off(ours.len().min(SERVICES_MAX));
    let claims: Vec<Claim> = ours.iter().filter(|(_, owned)| owned.addresses).map(|(candidate, _)| claim(candidate)).collect();
    let mut outcomes = allocations.assign(&claims, settings, now);
    let mut node_ports: BTreeMap<(Protocol, u16), &ServiceName> = BTreeMap::new();
    for (candidate, _) in ours.iter().filter(|(_, owned)| owned.node_ports) {
        outcomes.insert(candidate.name.clone(), take_node_ports(candidate, &mut node_ports));
    }
    let outside_pools = allocations.outside_pools(settings);
    let mut giving = Giving::new(settings, &outside_pools);
    for (candidate, owned) in ours {
        let outcome = outcomes.entry(candidate.name.clone()).or_default();
        outcome.externals = giving.give(candidate);
        outcome.withholds_node_ports = !owned.node_ports;
        if !owned.addresses && !owned.node_ports && outcome.externals.addresses.is_empty() {
            outcome.refusal = outcome.externals.refusal();
        }
    }
    for (candidate, _) in too_many {
        let message = format!("there are more than {SERVICES_MAX} Services, and this is one of the youngest; remove some");
        let refusal = Some(Refusal { reason: Reason::Exhausted, message });
        outcomes.insert(candidate.name.clone(), Outcome { refusal, ..Outcome::default() });
    }
    (outcomes, giving.given())
}

fn claim(candidate: &Candidate) -> Claim {
    let spec = candidate.wanted.as_ref().ok();
    Claim {
        service: candidate.name.clone(),
        created_s: candidate.created_s,
        families: spec.map(|spec| spec.families.clone()).unwrap_or_default(),
        second_family_optional: spec.is_some_and(|spec| spec.second_family_optional),
        requested: spec.map(|spec| spec.addresses.clone()).unwrap_or_default(),
        pool: spec.and_then(|spec| spec.pool.clone()),
        in_status: candidate.held.ingress.iter().map(|ingress| ingress.ip).collect(),
        status_is_ours: candidate.status_is_ours,
    }
}

/// The API server lets no two Services have one nodePort; nobody watches over manifests but this.
fn take_node_ports<'a>(candidate: &'a Candidate, taken: &mut BTreeMap<(Protocol, u16), &'a ServiceName>) -> Outcome {
    let ports = candidate.wanted.iter().flat_map(|spec| &spec.ports);
    let keys: Vec<_> = ports.filter_map(|port| Some((port.protocol, port.node_port?))).collect();
    if let Some((key, holder)) = keys.iter().find_map(|key| taken.get_key_value(key)) {
        let message = format!("nodePort {} {} is held by {holder}; choose another one", key.0, key.1);
        return Outcome { refusal: Some(Refusal { reason: Reason::Conflict, message }), ..Outcome::default() };
    }
    taken.extend(keys.into_iter().map(|key| (key, &candidate.name)));
    Outcome::default()
}

#[cfg(test)]
pub(crate) mod tests;
