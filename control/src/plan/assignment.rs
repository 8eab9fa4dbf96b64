//! Assignment of addresses and node ports: the part of a plan that considers all Services together.
//!
//! Invariant: it runs again only when one of its inputs has changed; a change of an endpoint never triggers it.
//! Deliberately not here: the allocation itself (`addresses`, `externals`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use imbl::OrdMap;
use proto::limits::{LOAD_BALANCER_CLASS, SERVICES_MAX};
use proto::{Pool, Protocol, Reason, Refusal, ServiceName};

use crate::config::settings::ControllerSettings;
use crate::gateways::registry::Gateways;
use crate::plan::addresses::{Allocation, Allocations, Claim, OtherInstallation, PoolUse, Rules};
use crate::plan::externals;
use crate::plan::forbidden::Forbidden;
use crate::plan::pools::{PoolState, Pools};
use crate::plan::selection::Fence;
use crate::plan::tenure::{OtherHolder, Ownership, held_by_others, holders};
use crate::world::checkpoint::{Checkpoint, Decided};
use crate::world::{Labels, Revisions, World};
use objects::note::{Cause, Note, Remark, Subject};
use objects::{Candidate, ServiceObject};
use reports::GatewayReports;

mod reports;

/// The last assignment and its inputs.
#[derive(Clone, Debug, Default)]
pub(super) struct Assignment {
    /// Result for each of our Services.
    pub(super) outcomes: BTreeMap<ServiceName, Allocation>,
    /// The pools in use.
    pub(super) pools: Arc<Pools>,
    /// Addresses that must not become VIPs.
    pub(super) forbidden: Arc<Forbidden>,
    /// VIPs outside every pool, of ours and of other groups, in order.
    pub(super) outside_pools: Arc<Vec<IpAddr>>,
    /// Pools as sent to gateways.
    pub(super) gateway_pools: Arc<Vec<Pool>>,
    /// Those that a previous leader sent, until the first plan is made.
    former_pools: Arc<Vec<Pool>>,
    /// Usage figures of every pool.
    pub(super) uses: Arc<Vec<PoolUse>>,
    /// Addresses that Services request, that their statuses contain, or that a previous leader allocated.
    named: BTreeSet<IpAddr>,
    pub(super) allocations: Allocations,
    gateways: GatewayReports,
    /// Decisions of a previous leader, until the first plan is made.
    pub(super) recalled: OrdMap<ServiceName, Arc<Decided>>,
    /// Revisions of the objects and of the gateways' reports for which the last assignment was computed.
    decided_for: Option<(Revisions, u64)>,
    /// Revision of the world that was examined last.
    seen: u64,
    /// Pools that are not in use, each with the reason.
    conflicts: BTreeMap<String, String>,
    /// Pools that are not in use because they name no class.
    classless: BTreeSet<String>,
}

/// Result of an update.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AssignmentUpdate {
    /// The assignment was computed again; usually most results are unchanged.
    pub(super) is_decided: bool,
    /// The set of addresses that must not be backends has changed.
    pub(super) fence_moved: bool,
}

impl Assignment {
    /// Records the reports of the connected gateways. Returns true if they may change the assignment. `now_s` is the Unix
    /// time, seconds, if it is known.
    pub(super) fn follow_gateways(&mut self, gateways: &Gateways, (now, now_s): (Instant, Option<u64>)) -> bool {
        self.gateways.follow(gateways, self.allocations.waits_for_gateways(now), now_s)
    }

    /// The gateways that serve node ports, for the next leader.
    pub(super) const fn node_port_gateways(&self) -> Option<&Arc<BTreeSet<String>>> {
        self.gateways.node_ports.as_ref()
    }

    /// Whether any gateway serves node ports, or may do so.
    pub(super) fn serves_node_ports(&self, settings: &ControllerSettings) -> bool {
        self.gateways.serve_node_ports(settings)
    }

    /// Starts from the decisions of a previous leader.
    pub(super) fn recall(&mut self, checkpoint: &Checkpoint, now: Instant) {
        self.recalled = checkpoint.services.clone();
        self.former_pools = Arc::clone(&checkpoint.pools);
        self.allocations.recall(&checkpoint.reserved, now);
        self.gateways.recall(checkpoint);
    }

    /// Assigns again if an input changed or `is_due` is set. `now_s` is the Unix time, seconds, if it is known.
    pub(super) fn update(
        &mut self,
        world: &World,
        settings: &ControllerSettings,
        is_due: bool,
        (now, now_s): (Instant, Option<u64>),
    ) -> AssignmentUpdate {
        let (revisions, reports) = (world.revisions(), self.gateways.revision);
        let before = self.decided_for.replace((revisions, reports));
        let is_due = is_due || self.is_contested(world, settings);
        self.seen = world.revision();
        if before == Some((revisions, reports)) && !is_due {
            return AssignmentUpdate::default();
        }
        let (mut has_moved, mut is_concerned) = (before.is_none(), false);
        if before.is_none_or(|(before, _)| before.pools != revisions.pools) {
            let pools = Pools::of(settings, world.pools());
            has_moved |= pools != *self.pools;
            self.pools = Arc::new(pools);
        }
        let of_forbidden = |of: Revisions| (of.nodes, of.gateways);
        if before.is_none_or(|(before, of_reports)| (of_forbidden(before), of_reports) != (of_forbidden(revisions), reports)) {
            self.gateways.note_listed(world, &settings.group);
            let profiles = self.gateways.profiles(world, settings);
            let forbidden = Forbidden::new(&profiles, world.nodes().values(), &settings.cluster_cidrs);
            has_moved |= !forbidden.fences_as(&self.forbidden);
            is_concerned = forbidden.nodes_differing(&self.forbidden).any(|address| self.concerns(address, settings));
            self.forbidden = Arc::new(forbidden);
        }
        let only_nodes = before.is_some_and(|(before, of_reports)| {
            of_reports == reports && Revisions { nodes: revisions.nodes, ..before } == revisions
        });
        if only_nodes && !has_moved && !is_concerned && !is_due {
            return AssignmentUpdate::default();
        }
        let outside_before = Arc::clone(&self.outside_pools);
        self.decide(world, settings, (now, now_s));
        AssignmentUpdate { is_decided: true, fence_moved: has_moved || self.outside_pools != outside_before }
    }

    /// Whether another installation has published an address that one of ours holds, since this was last asked.
    fn is_contested(&self, world: &World, settings: &ControllerSettings) -> bool {
        let changed = world.changed_since(self.seen).filter_map(|name| world.services().get(name));
        let mut of_others = changed.map(|entry| &entry.candidate.object).filter(|one| one.held.is_of_another(&settings.group));
        of_others.any(|one| one.held.ingress.iter().any(|ingress| self.allocations.is_held_beside(&one.name, ingress.ip)))
    }

    /// Whether another owner of this address matters for any Service.
    fn concerns(&self, address: IpAddr, settings: &ControllerSettings) -> bool {
        let is_named = self.named.contains(&address) || self.outside_pools.binary_search(&address).is_ok();
        let mut externals = settings.ownership.external_ips_allowed.iter();
        is_named || self.pools.holding(address).is_some() || externals.any(|net| net.contains(&address))
    }

    /// New notes for owners of pools.
    pub(super) fn new_notes_on_pools(&mut self) -> Vec<Note> {
        let conflict = |pool: &PoolState| Some((pool.name.clone(), pool.conflict.clone()?));
        let conflicts: BTreeMap<String, String> = self.pools.states().iter().filter_map(conflict).collect();
        let is_new = |(name, why): &(&String, &String)| self.conflicts.get(*name) != Some(*why);
        let mut notes: Vec<Note> = conflicts.iter().filter(is_new).map(conflict_note).collect();
        self.conflicts = conflicts;
        let classless: BTreeSet<String> = self.pools.classless().cloned().collect();
        notes.extend(classless.difference(&self.classless).map(|name| classless_note(name)));
        self.classless = classless;
        notes
    }

    /// Current problems of pools.
    pub(super) fn notes_on_pools(&self) -> impl Iterator<Item = Note> {
        self.conflicts.iter().map(conflict_note)
    }

    /// The claim of a Service that another installation serves: no other Service gets its addresses, while they lie in
    /// pools of ours or one of ours has them. `None` if none does.
    fn claim_of_other(&self, other: &OtherHolder<'_>) -> Option<Claim> {
        let name = &other.object.name;
        let is_ours = |address: IpAddr| self.pools.holding(address).is_some() || self.allocations.is_held_beside(name, address);
        let claim = claim_to_keep(other.object, is_ours);
        let is_proven = other.is_proven && claim.in_status.iter().all(|address| self.pools.elsewhere(*address).is_some());
        let of_another = Some(if is_proven { OtherInstallation::Proven } else { OtherInstallation::Alleged });
        (!claim.in_status.is_empty()).then_some(Claim { of_another, ..claim })
    }

    fn decide(&mut self, world: &World, settings: &ControllerSettings, (now, now_s): (Instant, Option<u64>)) {
        let serves_node_ports = self.serves_node_ports(settings);
        let owned = |candidate| (candidate, Ownership::of(candidate, world, settings, serves_node_ports));
        let entries = world.services().values().map(|entry| owned(&entry.candidate));
        let mut ours: Vec<(&Candidate, Ownership)> = entries.filter(|(_, owned)| owned.is_any()).collect();
        ours.sort_by_key(|(candidate, _)| (candidate.object.created_s, &candidate.object.name));
        let too_many = ours.split_off(ours.len().min(SERVICES_MAX));
        let (select_namespaces, select_services) = (self.pools.select_namespaces(), self.pools.select_services());
        let labels = |one: &Candidate| if select_services { one.labels.clone() } else { Labels::new() };
        let of_namespace =
            |one: &Candidate| if select_namespaces { world.namespace_labels(&one.object.name.namespace) } else { Labels::new() };
        let wants = ours.iter().filter(|(_, owned)| owned.addresses).map(|(candidate, _)| *candidate);
        let mut claims = Vec::with_capacity(ours.len());
        claims.extend(wants.map(|one| claim(one, labels(one), of_namespace(one))));
        for claim in claims.iter_mut().filter(|_| !self.recalled.is_empty()) {
            claim.recalled = self.recalled.get(&claim.service).map(|decided| decided.addresses.clone()).unwrap_or_default();
        }
        // Our finalizer proves that it was ours.
        let is_kept = |left: &ServiceObject, address| left.status_is_ours || self.pools.holding(address).is_some();
        let of_deleted = holders(world, settings).map(|left| claim_to_keep(left, |address| is_kept(left, address)));
        let mut unserved: Vec<Claim> = of_deleted.collect();
        let claimed: BTreeSet<&ServiceName> = claims.iter().chain(&unserved).map(|claim| &claim.service).collect();
        let others: Vec<OtherHolder<'_>> = held_by_others(world, settings).collect();
        let of_others = others.iter().filter(|other| other.is_held && !claimed.contains(&other.object.name));
        let of_others: Vec<Claim> = of_others.filter_map(|other| self.claim_of_other(other)).collect();
        unserved.extend(of_others);
        claims.extend(unserved.iter().cloned());
        self.named =
            claims.iter().flat_map(|claim| [&claim.requested, &claim.in_status, &claim.recalled]).flatten().copied().collect();
        let (pools, forbidden) = (Arc::clone(&self.pools), Arc::clone(&self.forbidden));
        let reach = self.gateways.reach(now_s);
        let rules = Rules { pools: &pools, forbidden: &forbidden, reached: reach.counter, absent: &reach.absent, now };
        let claimed: BTreeSet<&ServiceName> = claims.iter().map(|claim| &claim.service).collect();
        let forgotten = self.recalled.iter().filter(|(service, _)| !claimed.contains(service));
        self.allocations.free_forgotten(forgotten.map(|(service, decided)| (service, &decided.addresses[..])), now);
        let mut outcomes = self.allocations.assign(&claims, rules);
        // A Service that is being deleted keeps its addresses but is no longer served; one of another group never was.
        unserved.iter().for_each(|claim| drop(outcomes.remove(&claim.service)));
        let mut node_ports: BTreeMap<(Protocol, u16), &ServiceName> = BTreeMap::new();
        for (candidate, _) in ours.iter().filter(|(_, owned)| owned.node_ports) {
            outcomes.insert(candidate.object.name.clone(), take_node_ports(candidate, &mut node_ports));
        }
        let outside = self.allocations.outside(&pools, &std::mem::take(&mut self.former_pools));
        // Another writer of a status could name any address there.
        let of_others = others.iter().map(|other| other.object).filter(|object| object.status_is_ours);
        let of_others = of_others.flat_map(|object| &object.held.ingress).map(|ingress| ingress.ip);
        let of_others = of_others.filter(|address| pools.holding(*address).is_none());
        let mut outside_pools: BTreeSet<IpAddr> = outside.iter().map(|(address, _)| *address).chain(of_others).collect();
        let known_vips: Vec<IpAddr> = outside_pools.iter().copied().collect();
        let fence = Fence { settings, pools: &pools, forbidden: &forbidden, vips_outside_pools: &known_vips };
        let externals = externals::assign(ours.iter().map(|(candidate, _)| *candidate), &fence);
        let external_ips: BTreeSet<IpAddr> = externals.iter().flat_map(|one| &one.addresses).copied().collect();
        for ((candidate, owned), externals) in ours.into_iter().zip(externals) {
            let outcome = outcomes.entry(candidate.object.name.clone()).or_default();
            outcome.withholds_node_ports = !owned.node_ports;
            if !owned.addresses && !owned.node_ports && externals.addresses.is_empty() {
                outcome.refusal = externals.refusal();
            }
            outcome.externals = externals;
        }
        for (candidate, _) in too_many {
            let message = format!("there are more than {SERVICES_MAX} Services, and this is one of the youngest; remove some");
            outcomes.insert(candidate.object.name.clone(), Allocation::refused(Refusal { reason: Reason::Exhausted, message }));
        }
        outside_pools.extend(external_ips);
        self.outside_pools = Arc::new(outside_pools.into_iter().collect());
        self.outcomes = outcomes;
        let gateway_pools = pools.for_gateways(&outside);
        if *self.gateway_pools != gateway_pools {
            self.gateway_pools = Arc::new(gateway_pools);
        }
        self.uses = Arc::new(self.allocations.account(rules));
    }
}

/// It is told once: the installation of the default class may use the pool.
fn classless_note(name: &str) -> Note {
    let text = format!(
        "a pool without loadBalancerClass belongs to the installation of class {LOAD_BALANCER_CLASS}; for another one set \
         spec.loadBalancerClass"
    );
    Note { subject: Subject::Pool(name.to_owned()), remark: Remark::new(Cause::PoolOfDefaultClass, text) }
}

fn conflict_note((name, why): (&String, &String)) -> Note {
    let remark = Remark::new(Cause::Reason(Reason::Conflict), format!("the pool is not used: {why}"));
    Note { subject: Subject::Pool(name.clone()), remark }
}

/// The claim of a Service, with those labels that pools select by.
fn claim(candidate: &Candidate, labels: Labels, namespace_labels: Labels) -> Claim {
    let (object, spec) = (&candidate.object, candidate.wanted.as_ref().ok());
    let mut ports: Vec<_> = spec.iter().flat_map(|spec| &spec.ports).map(|port| (port.protocol, port.port)).collect();
    ports.sort_unstable();
    Claim {
        service: object.name.clone(),
        created_s: object.created_s,
        families: spec.map(|spec| spec.families.clone()).unwrap_or_default(),
        second_family_optional: spec.is_some_and(|spec| spec.second_family_optional),
        ports,
        sharing: spec.and_then(|spec| spec.sharing.clone()),
        requested: spec.map(|spec| spec.addresses.clone()).unwrap_or_default(),
        unread_request: spec.and_then(|spec| spec.unread_request.clone()),
        pool: spec.and_then(|spec| spec.pool.clone()),
        internal: spec.is_some_and(|spec| spec.internal),
        readdress: spec.is_some_and(|spec| spec.readdress),
        labels,
        namespace_labels,
        in_status: object.held.ingress.iter().map(|ingress| ingress.ip).collect(),
        status_is_ours: object.status_is_ours,
        of_another: None,
        status_writer: object.foreign_manager.clone(),
        recalled: Vec::new(),
    }
}

/// The claim of a Service that requests nothing and keeps these of the addresses in its status.
fn claim_to_keep(object: &ServiceObject, is_kept: impl Fn(IpAddr) -> bool) -> Claim {
    let in_status = object.held.ingress.iter().map(|ingress| ingress.ip).filter(|address| is_kept(*address)).collect();
    Claim { created_s: object.created_s, in_status, status_is_ours: true, ..Claim::new(object.name.clone()) }
}

/// The API server gives each nodePort to one Service only; for manifests this function enforces the same.
fn take_node_ports<'a>(candidate: &'a Candidate, taken: &mut BTreeMap<(Protocol, u16), &'a ServiceName>) -> Allocation {
    let ports = candidate.wanted.iter().flat_map(|spec| &spec.ports);
    let keys: Vec<_> = ports.filter_map(|port| Some((port.protocol, port.node_port?))).collect();
    if let Some((key, holder)) = keys.iter().find_map(|key| taken.get_key_value(key)) {
        let message = format!("nodePort {} {} is held by {holder}; choose another one", key.0, key.1);
        return Allocation::refused(Refusal { reason: Reason::Conflict, message });
    }
    taken.extend(keys.into_iter().map(|key| (key, &candidate.object.name)));
    Allocation::default()
}
