//! What follows from the objects: the Services that gateways forward by, and the status of each. A function: no I/O, no
//! clock, no health.
//!
//! Invariant: a Service that did not change keeps its `Arc` from one plan to the next, so that what is sent, compiled
//! and compared is only what changed.
//! Deliberately not here: what becomes of one Service (`build`), generations and when a status is written (`publish`, `status`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use proto::limits::SERVICES_MAX;
use proto::{Pool, Protocol, Reason, Refusal, Service, ServiceName};

use crate::addresses::{Allocations, Claim, Outcome};
use crate::externals::Giving;
use crate::note::{Note, Remark, Subject};
use crate::ownership::Ownership;
use crate::policy::Policy;
use crate::selection::Fence;
use crate::settings::ControllerSettings;
use crate::source::{Ingress, StatusWrite};
use crate::spec::{Candidate, PoolSpec};
use crate::world::World;

mod build;

pub use build::MAGLEV_SEED;
use build::{Builder, Planned};

/// What gateways shall forward by, and what the objects' status shall be.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The Services that are ours, served or refused.
    pub services: BTreeMap<ServiceName, Arc<Service>>,
    /// The pools.
    pub pools: Vec<Pool>,
    /// Services of type `LoadBalancer` that are ours.
    pub statuses: BTreeMap<ServiceName, Arc<WantedStatus>>,
    /// What owners should know and were not told by the plan before.
    pub notes: Vec<Note>,
    /// When to plan again although nothing changed: an address that is kept for somebody gets free.
    pub again_at: Option<Instant>,
    /// Services whose deleted slices do not count any more: the world may forget them.
    pub done_with_departed: Vec<ServiceName>,
}

/// The status of one Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedStatus {
    /// What it should be.
    pub write: StatusWrite,
    /// What the object says.
    pub current: Vec<Ingress>,
    /// Who else wrote its status.
    pub foreign_manager: Option<String>,
    /// Whether it is served. While it is not, its status loses what it does not hold, but gains nothing.
    pub served: bool,
}

/// What the next plan needs of this one.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    allocations: Allocations,
    outcomes: BTreeMap<ServiceName, Outcome>,
    /// Of the Services and the namespaces that `outcomes` were decided for.
    assigned_for: Option<(u64, u64)>,
    external_ips: BTreeSet<IpAddr>,
    /// VIPs that lie in no pool.
    outside_pools: Vec<IpAddr>,
    planned: BTreeMap<ServiceName, Planned>,
}

/// Plans for `world`. `memory` is that of the plan before, with the same settings.
pub fn plan(world: &World, settings: &ControllerSettings, memory: &mut Memory, now: Instant) -> Plan {
    let outside_before = std::mem::take(&mut memory.outside_pools);
    let some_address_is_free_again = memory.allocations.next_expiry().is_some_and(|expiry| expiry <= now);
    let revisions = (world.services_revision(), world.namespaces_revision());
    if memory.assigned_for != Some(revisions) || some_address_is_free_again {
        (memory.outcomes, memory.external_ips) = assign(world, settings, &mut memory.allocations, now);
        memory.assigned_for = Some(revisions);
    }
    memory.outside_pools = memory.allocations.outside_pools(settings);
    memory.outside_pools.extend(&memory.external_ips);
    let fence = Fence::new(settings, &memory.outside_pools);
    let fence_moved = memory.outside_pools != outside_before;

    let mut plan = Plan {
        pools: settings.pools.iter().map(PoolSpec::told).collect(),
        again_at: memory.allocations.next_expiry(),
        ..Plan::default()
    };
    memory.planned.retain(|name, _| memory.outcomes.contains_key(name));
    for (name, entry) in world.services() {
        let Some(outcome) = memory.outcomes.get(name) else { continue };
        let before = memory.planned.get(name);
        let nodes_are_kept = |old: &Planned| old.nodes_revision.is_none_or(|revision| revision == world.nodes_revision());
        let is_kept = |old: &Planned| {
            let hold_is_over = old.again_at().is_some_and(|until| until <= now);
            let unchanged = old.revision == entry.revision && old.outcome == *outcome && nodes_are_kept(old);
            unchanged && !fence_moved && !hold_is_over
        };
        if !before.is_some_and(|old| is_kept(old) && old.status_is_of(&entry.candidate)) {
            let candidate = &entry.candidate;
            let policy = Policy::of(candidate.wanted.as_ref().ok(), candidate.kind, &settings.defaults);
            let builder = Builder { candidate, outcome, settings, fence: &fence, world, policy, ip_mode: policy.ip_mode };
            let one = builder.build_in_turn(entry.revision, before, now);
            let is_new = |remark: &&Remark| !before.is_some_and(|old| old.notes.contains(remark));
            let note = |remark: &Remark| Note { subject: Subject::Service(name.clone()), remark: remark.clone() };
            plan.notes.extend(one.notes.iter().filter(is_new).map(note));
            plan.done_with_departed.extend(one.has_done_with_departed().then(|| name.clone()));
            memory.planned.insert(name.clone(), one);
        }
    }
    let planned = &memory.planned;
    plan.again_at = planned.values().filter_map(Planned::again_at).chain(plan.again_at).min();
    plan.services = planned.iter().map(|(name, one)| (name.clone(), Arc::clone(&one.service))).collect();
    plan.statuses = planned.iter().filter_map(|(name, one)| Some((name.clone(), Arc::clone(one.status.as_ref()?)))).collect();
    plan
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
        in_status: candidate.ingress.iter().map(|ingress| ingress.ip).collect(),
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
