//! The plan of one Service: its ports and backends, its status, and the order of the steps of a mode change.
//!
//! Invariant: a Service that cannot be served is refused as a whole, without ports. A Service whose plan is unchanged
//! keeps its `Arc`. Deliberately not here: addresses (`addresses`), and the choice of Services to plan again (`plan`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use imbl::OrdMap;
use proto::limits::{
    KUBE_PROXY_HEALTH_PORT, MAGLEV_ENTRIES_AT_CREATION, MAGLEV_ENTRIES_AT_LEAST, MAGLEV_HASH_VERSION, MAGLEV_SIZES,
};
use proto::{
    EarlierBackends, Family, HealthCheck, MaglevSpec, Mode, NodesAt, Probe, Reason, Refusal, Service, ServiceName, ServicePort,
    Target,
};

use crate::config::settings::ControllerSettings;
use crate::plan::addresses::Allocation;
use crate::plan::policy::Policy;
use crate::plan::selection::nodes::Nodes;
use crate::plan::selection::{DeletedSlices, Fence, MissingBackends, Selection, select};
use crate::world::checkpoint::{Decided, InForce, TableKey};
use crate::world::{ServiceEntry, World};
use objects::note::{self, Cause, Remark};
use objects::service::{SpecError, Unread};
use objects::status::{Ingress, IpMode, PortStatus};
use objects::text::shortened;
use objects::{Candidate, Kind, OwnedParts, PortSpec, ServiceSpec, SliceSpec};

/// Seed of the Maglev tables of installations that have drawn none, and of `replay`: the fractional digits of the golden
/// ratio. It is no secret, so that anybody can choose tuples that all meet one backend, but it must never change, because
/// an update of the controller would then move flows of stateless modes.
pub const MAGLEV_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// How long a new mode or a new Service waits for the status or finalizer that must be written first. The limit keeps
/// an API server that is unavailable or refuses the write from blocking an owner's change for ever.
pub(super) const STATUS_WAITED_FOR: Duration = Duration::from_secs(10);

/// The statuses of Services; copied and compared as [`proto::Services`] are.
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
    /// Our group, written to the object together with the finalizer.
    pub group: String,
    /// Desired addresses, in family order.
    pub ingress: Vec<Ingress>,
    /// What the object contains now.
    pub held: Arc<OwnedParts>,
    /// Another program that wrote the status.
    pub status_writer: Option<String>,
    /// Another program that wrote the rest of the object.
    pub object_writer: Option<String>,
    /// Whether another program wrote the addresses of the status.
    pub is_foreign: bool,
    /// Why it is not served. Until it is, addresses that it does not hold are removed from its status and none are
    /// added.
    pub refusal: Option<Reason>,
    /// Why it lacks an address that it requires; it is served at those in `ingress`, if any.
    pub unassigned: Option<Reason>,
    /// Whether it lacks the address of a family that it prefers, but does not require.
    pub lacks_preferred_family: bool,
    /// Whether one of its addresses lies outside every pool.
    pub outside_pools: bool,
    /// Whether it is withheld from gateways until its finalizer is written.
    pub is_withheld: bool,
    /// The pools of its addresses, in the order of the addresses.
    pub pools: Vec<String>,
    /// Whether a setting of it cannot be parsed, so that the previous value stays in force.
    pub is_partly_unread: bool,
    /// Whether a part of it is refused, such as a port whose backends are all refused, while the rest is served.
    pub is_partly_refused: bool,
    /// Whether backends do not see the client's address, although the Service asks for it.
    pub loses_client_address: bool,
    /// Why it has no backends.
    pub missing: MissingBackends,
    /// Whether all backends are used if none is healthy (fail open).
    pub fails_open: bool,
}

impl WantedStatus {
    /// The addresses that the status shall have.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.ingress.iter().map(|ingress| ingress.ip)
    }
}

/// The last plan of a Service.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) revision: u64,
    pub(super) outcome: Allocation,
    pub(super) service: Arc<Service>,
    pub(super) status: Option<Arc<WantedStatus>>,
    pub(super) notes: Vec<Remark>,
    pub(super) tables: BTreeMap<TableKey, u32>,
    /// Revision of the nodes that it was planned with; `None` if its backends are not nodes.
    pub(super) nodes_revision: Option<u64>,
    /// The Service as sent to gateways.
    pub(super) policy: Policy,
    /// The words in force, of the last plan that served the Service.
    pub(super) in_force: Option<InForce>,
    /// Until when the previous `policy` stays in force, while the status must be written first.
    pub(super) held_until: Option<Instant>,
    /// Until when it is withheld from gateways, while its finalizer must be written first.
    pub(super) withheld_until: Option<Instant>,
    /// Its deleted slices, and when each deletion was noticed.
    pub(super) deleted_slices: BTreeMap<ServiceName, Instant>,
    /// When the first of them stops counting, if any still counts.
    pub(super) deleted_slices_until: Option<Instant>,
}

/// Maximum number of ports named in a message.
const PORTS_NAMED_MAX: usize = 8;
/// Maximum number of remarks on one Service: one per slice and port could be thousands.
const REMARKS_MAX: usize = 32;

impl Planned {
    /// When its plan may change even if its inputs do not.
    pub(super) fn again_at(&self) -> Option<Instant> {
        [self.held_until, self.withheld_until, self.deleted_slices_until].into_iter().flatten().min()
    }

    /// Whether it has deleted slices that no longer count.
    pub(super) fn has_done_with_deleted_slices(&self) -> bool {
        !self.deleted_slices.is_empty() && self.deleted_slices_until.is_none()
    }

    /// Whether a new plan from these inputs would be the same.
    pub(super) fn is_current(&self, inputs: &Inputs<'_>, entry: &ServiceEntry, outcome: &Allocation) -> bool {
        let candidate = &entry.candidate;
        let has_same_nodes = self.nodes_revision.is_none_or(|revision| revision == inputs.world.revisions().nodes);
        let has_expired = self.again_at().is_some_and(|until| until <= inputs.now);
        let is_same = self.revision == entry.revision && self.outcome == *outcome && has_same_nodes;
        let is_of_this_version = self.status.as_ref().is_none_or(|status| {
            status.resource_version == candidate.resource_version && status.uid == candidate.uid && status.held == candidate.held
        });
        is_same && is_of_this_version && !inputs.fence_moved && !has_expired
    }
}

/// Inputs shared by the plans of all Services.
pub(super) struct Inputs<'a> {
    pub(super) world: &'a World,
    pub(super) settings: &'a ControllerSettings,
    pub(super) fence: &'a Fence<'a>,
    /// Whether the fence differs from that of the previous plan.
    pub(super) fence_moved: bool,
    pub(super) nodes: &'a Nodes,
    /// The seed of all Maglev tables.
    pub(super) maglev_seed: u64,
    pub(super) now: Instant,
    /// Unix time, seconds, if the time of day is known.
    pub(super) unix_s: Option<u64>,
}

/// The inputs of the plan of one Service.
#[derive(Clone, Copy)]
pub(super) struct ServiceBuilder<'a> {
    inputs: &'a Inputs<'a>,
    candidate: &'a Candidate,
    revision: u64,
    outcome: &'a Allocation,
    before: Option<&'a Planned>,
    /// Decisions of a previous leader.
    recalled: Option<&'a Decided>,
    policy: Policy,
    /// The words in force before.
    in_force: Option<InForce>,
    /// `ipMode` of the desired status, also while gateways still use the previous policy.
    ip_mode: IpMode,
}

impl<'a> ServiceBuilder<'a> {
    pub(super) fn new(
        inputs: &'a Inputs<'a>,
        entry: &'a ServiceEntry,
        outcome: &'a Allocation,
        before: Option<&'a Planned>,
        recalled: Option<&'a Decided>,
    ) -> Self {
        let candidate = &entry.candidate;
        let is_same_object = |old: &&Planned| old.status.as_ref().is_none_or(|status| status.uid == candidate.uid);
        let recalled_words = recalled.and_then(|decided| decided.in_force);
        let in_force = before.filter(is_same_object).map_or(recalled_words, |old| old.in_force);
        let policy = Policy::of(candidate.wanted.as_ref().ok(), candidate.kind, &inputs.settings.defaults, in_force);
        let (revision, ip_mode) = (entry.revision, policy.ip_mode);
        Self { inputs, candidate, revision, outcome, before, recalled, policy, in_force, ip_mode }
    }

    /// Plans the Service. It is withheld from gateways until its finalizer is written, so that its deletion is not
    /// missed.
    pub(super) fn plan(self) -> Planned {
        let mut planned = self.plan_by_current_policy();
        planned.withheld_until = self.withheld_until(&planned);
        if planned.withheld_until.is_some() {
            let withheld = planned.status.map(|status| WantedStatus { is_withheld: true, ..Arc::unwrap_or_clone(status) });
            planned.status = withheld.map(Arc::new);
        }
        planned
    }

    /// Until when it is withheld from gateways, if it is. A Service whose status already has an address is never
    /// withheld.
    fn withheld_until(&self, planned: &Planned) -> Option<Instant> {
        let is_given = self.before.is_some_and(|old| old.withheld_until.is_none() && old.service.refusal.is_none());
        let needs_none = self.candidate.uid.is_empty() || self.candidate.kind != Kind::LoadBalancer;
        let is_allocated = |ingress: &Ingress| self.outcome.addresses().any(|address| address == ingress.ip);
        let is_marked = self.candidate.held.finalizer || self.candidate.held.ingress.iter().any(is_allocated);
        if is_given || needs_none || is_marked || planned.service.refusal.is_some() {
            return None;
        }
        self.wait_until(self.before.and_then(|old| old.withheld_until))
    }

    /// Plans a change to a mode in which nodes see the VIP. The status is written first, because a node accepts packets
    /// for the VIP only once the status tells it to. Until the object shows the new status, gateways use the previous
    /// mode.
    fn plan_by_current_policy(&self) -> Planned {
        let wanted = self.build();
        let held = self.before.and_then(|old| Some((old.policy, self.held_until(old)?)));
        let Some((policy, until)) = held.filter(|_| wanted.service.refusal.is_none()) else { return wanted };
        let as_before = Self { policy, ..*self }.build();
        if as_before.service.refusal.is_some() { wanted } else { Planned { held_until: Some(until), ..as_before } }
    }

    /// Until when the previous policy is kept, if it is. For manifests there is nothing to wait for: no node reads
    /// their status.
    fn held_until(&self, before: &Planned) -> Option<Instant> {
        let ours = |ingress: &&Ingress| self.outcome.addresses().any(|address| address == ingress.ip);
        let is_written = !self.candidate.held.ingress.iter().filter(ours).any(|ingress| ingress.ip_mode == IpMode::Proxy);
        let turns = before.policy.ip_mode == IpMode::Proxy && self.policy.ip_mode == IpMode::Vip;
        if !turns || is_written || self.candidate.uid.is_empty() || before.service.refusal.is_some() {
            return None;
        }
        self.wait_until(before.held_until)
    }

    /// The end of a wait for a write, which began now or earlier; `None` if it is over.
    fn wait_until(&self, begun: Option<Instant>) -> Option<Instant> {
        Some(begun.unwrap_or(self.inputs.now + STATUS_WAITED_FOR)).filter(|until| *until > self.inputs.now)
    }

    fn build(&self) -> Planned {
        let (name, world) = (&self.candidate.name, self.inputs.world);
        let deleted = DeletedSlices::of(world, name, self.before.map(|old| &old.deleted_slices), self.inputs.now);
        let slices: Vec<&SliceSpec> = world.slices_of(name).chain(&deleted.counting).collect();
        let recalled = || self.recalled.map(|decided| decided.tables.clone());
        let mut tables = self.before.map(|old| old.tables.clone()).or_else(recalled).unwrap_or_default();
        let mut notes: Vec<Remark> = self.outcome.notes.iter().chain(&self.outcome.externals.remarks).cloned().collect();
        let unknown_word = self.candidate.wanted.as_ref().ok().and_then(|spec| self.new_with_unknown_word(spec));
        let served = match (&self.candidate.wanted, unknown_word.as_ref().or_else(|| self.outcome.refusal())) {
            (Err(error), _) => Err(error.refusal()),
            (Ok(spec), Some(refusal)) => {
                // What could not be read may be the cause. An unknown word is the refusal itself.
                notes.extend(spec.notes.iter().filter(|_| unknown_word.is_none()).cloned());
                Err(refusal.clone())
            }
            (Ok(spec), None) => {
                notes.extend(spec.notes.iter().chain(slices.iter().flat_map(|slice| &slice.notes)).cloned());
                notes.extend(self.policy.client_address_remark(spec));
                notes.extend(spec.health.remarks(spec.health.probe.unwrap_or(self.inputs.settings.health.probe)));
                tables
                    .retain(|(protocol, port, _), _| spec.ports.iter().any(|one| (one.protocol, one.port) == (*protocol, *port)));
                self.ports(spec, &slices, &mut tables, &mut notes)
            }
        };
        notes = note::bounded(notes, REMARKS_MAX);
        let (ports, refusal) = match served {
            Ok(ports) => (ports, None),
            Err(refusal) => {
                notes.push(Remark::new(Cause::Reason(refusal.reason), refusal.message.clone()));
                (Vec::new(), Some(refusal))
            }
        };
        let service = self.service(ports, refusal);
        let service = match self.before {
            Some(old) if *old.service == service => Arc::clone(&old.service),
            _ => Arc::new(service),
        };
        let has_status = self.candidate.kind == Kind::LoadBalancer;
        let is_partly_refused =
            service.refusal.is_none() && notes.iter().any(|note| note.cause == Cause::Reason(Reason::Refused));
        let in_force = service.refusal.is_none().then(|| self.words(&service)).or(self.in_force);
        let status = has_status.then(|| Arc::new(WantedStatus { is_partly_refused, ..self.status(&service, &slices) }));
        Planned {
            revision: self.revision,
            outcome: self.outcome.clone(),
            service,
            status,
            notes,
            tables,
            nodes_revision: (self.policy.target == Target::Node).then(|| world.revisions().nodes),
            policy: self.policy,
            in_force,
            held_until: None,
            withheld_until: None,
            deleted_slices: deleted.since,
            deleted_slices_until: deleted.until,
        }
    }

    /// Why a Service is not served: an annotation of ours has an unknown word, and nothing is in force that could stay. Of
    /// a checkpoint of a version without these words, an address in the status or a table tells that gateways serve it;
    /// mode and target were never served with an unknown word then.
    fn new_with_unknown_word(&self, spec: &ServiceSpec) -> Option<Refusal> {
        let decides_path = spec.unread.contains(&Unread::Mode) || spec.unread.contains(&Unread::Target);
        let has_tables = self.recalled.is_some_and(|decided| !decided.tables.is_empty());
        let was_served = has_tables || !self.candidate.held.ingress.is_empty();
        let is_live = self.in_force.is_some() || (!decides_path && was_served);
        spec.refused_if_new.as_ref().filter(|_| !is_live).map(SpecError::refusal)
    }

    /// The words in force of a Service that is served.
    fn words(&self, service: &Service) -> InForce {
        let Policy { mode, target, scheduler, .. } = self.policy;
        let (affinity_scope, probe) = (service.affinity_scope, service.health.probe);
        InForce { mode, target, scheduler, ip_mode: self.ip_mode, affinity_scope, probe }
    }

    fn service(&self, ports: Vec<ServicePort>, refusal: Option<Refusal>) -> Service {
        let spec = self.candidate.wanted.as_ref().ok();
        let settings = self.inputs.settings;
        let kept = |what| self.in_force.filter(|_| spec.is_some_and(|spec| spec.unread.contains(&what)));
        let mut health = spec.map_or_else(
            || settings.health.clone(),
            |spec| HealthCheck { node_health_port: self.node_health_port(spec), ..spec.health.over(&settings.health) },
        );
        health.probe = kept(Unread::Probe).map_or(health.probe, |kept| kept.probe);
        let kept_scope = kept(Unread::AffinityScope).map(|kept| kept.affinity_scope);
        Service {
            mode: self.policy.mode,
            target: self.policy.target,
            scheduler: self.policy.scheduler,
            health,
            drain_timeout: spec.and_then(|spec| spec.drain_timeout).unwrap_or(settings.defaults.drain_timeout),
            affinity: spec.and_then(|spec| spec.affinity),
            affinity_scope: kept_scope.or(spec.and_then(|spec| spec.affinity_scope)).unwrap_or_default(),
            source_ranges: spec.and_then(|spec| spec.source_ranges.clone()),
            idle_timeout: spec.and_then(|spec| spec.idle_timeout),
            local: spec.is_some_and(|spec| spec.local),
            refusal,
            ..Service::new(self.candidate.name.clone(), ports)
        }
    }

    /// Where nodes report their health. Without a `healthCheckNodePort` kube-proxy answers for the whole node, unless it
    /// is not kube-proxy that serves the Service, or the owner wants no probes.
    fn node_health_port(&self, spec: &ServiceSpec) -> Option<u16> {
        let is_probed = spec.health.probe.unwrap_or(self.inputs.settings.health.probe) != Probe::None;
        let of_the_node = (spec.proxy_name.is_none() && is_probed).then_some(KUBE_PROXY_HEALTH_PORT);
        spec.node_health_port.or(of_the_node).filter(|_| self.policy.target == Target::Node)
    }

    fn status(&self, service: &Service, slices: &[&SliceSpec]) -> WantedStatus {
        let Self { candidate, outcome, ip_mode, inputs, .. } = *self;
        let refusal = service.refusal.as_ref().map(|refusal| refusal.reason);
        let has_address = outcome.addresses().next().is_some();
        let is_outside = |remark: &Remark| remark.cause == Cause::Reason(Reason::OutsidePools);
        let spec = candidate.wanted.as_ref().ok();
        let port = |port: &PortSpec| PortStatus { port: port.port, protocol: port.protocol, error: None };
        let ports: Vec<PortStatus> = spec.iter().flat_map(|spec| &spec.ports).map(port).collect();
        let mut pools: Vec<String> =
            outcome.addresses().filter_map(|ip| inputs.fence.pools.holding(ip)).map(|pool| pool.name.clone()).collect();
        pools.dedup();
        // A refusal is reported instead of missing backends.
        let missing = spec.filter(|_| refusal.is_none()).map(|spec| {
            let knows_endpoints = self.policy.target == Target::Endpoint;
            MissingBackends::of(service, &spec.ports, slices.iter().copied().filter(|_| knows_endpoints))
        });
        WantedStatus {
            service: candidate.name.clone(),
            uid: candidate.uid.clone(),
            resource_version: candidate.resource_version.clone(),
            group: inputs.settings.group.clone(),
            ingress: outcome.addresses().map(|ip| Ingress { ip, ip_mode, ports: ports.clone() }).collect(),
            held: Arc::clone(&candidate.held),
            status_writer: candidate.foreign_manager.clone(),
            object_writer: candidate.object_manager.clone(),
            is_foreign: !candidate.status_is_ours && !candidate.held.ingress.is_empty(),
            refusal,
            unassigned: outcome
                .refusal()
                .or_else(|| outcome.missing().filter(|_| !outcome.is_complete))
                .map(|refusal| refusal.reason)
                .or(refusal.filter(|_| !has_address)),
            lacks_preferred_family: has_address && outcome.is_complete && outcome.missing().is_some(),
            outside_pools: outcome.notes.iter().any(is_outside),
            is_withheld: false,
            pools,
            is_partly_unread: spec.is_some_and(|spec| !spec.unread.is_empty()),
            is_partly_refused: false,
            loses_client_address: spec.is_some_and(|spec| self.policy.loses_client_address(spec)),
            missing: missing.unwrap_or_default(),
            fails_open: service.health.fail_open,
        }
    }

    fn ports(
        &self,
        spec: &ServiceSpec,
        slices: &[&SliceSpec],
        tables: &mut BTreeMap<TableKey, u32>,
        notes: &mut Vec<Remark>,
    ) -> Result<Vec<ServicePort>, Refusal> {
        if let Some(refusal) = self.policy.refusal(spec, self.candidate.kind) {
            return Err(refusal);
        }
        let (name, world) = (&self.candidate.name, self.inputs.world);
        let mut ports = Vec::new();
        let mut fenced = Vec::new();
        let mut ineligible = None;
        for port in &spec.ports {
            for &family in &spec.families {
                let addresses = self.outcome.addresses().chain(self.outcome.externals.addresses.iter().copied());
                let vips: Vec<IpAddr> = addresses.filter(|a| Family::of(*a) == family).collect();
                let node_port = port.node_port.filter(|_| !self.outcome.withholds_node_ports);
                if vips.is_empty() && node_port.is_none() {
                    continue;
                }
                let mut selection = self.select(spec, slices, port, family);
                // With a manual override of one backend this port gets a separate list.
                let overridden = selection.nodes.take_if(|nodes| world.overrides().concern(name, nodes));
                selection.backends.extend(overridden.iter().flat_map(NodesAt::backends));
                let count = selection.count();
                world.overrides().apply(name, slices, world.nodes(), &mut selection.backends);
                fenced
                    .extend((selection.fenced > 0 && count == 0).then(|| format!("{} {} ({family})", port.protocol, port.port)));
                notes.extend(selection.notes);
                ineligible = ineligible.or(selection.ineligible);
                if let Some(refusal) = self.policy.refuses_endpoints(port, &selection.backends) {
                    return Err(refusal);
                }
                let size = table(tables, (port.protocol, port.port, family), count);
                let new = ServicePort {
                    name: port.name.clone(),
                    protocol: port.protocol,
                    family,
                    vips,
                    port: port.port,
                    node_port,
                    maglev: MaglevSpec { size, seed: self.inputs.maglev_seed, hash_version: MAGLEV_HASH_VERSION },
                    backends: selection.backends,
                    nodes: selection.nodes,
                    zones: selection.zones,
                    app_protocol: port.app_protocol.clone(),
                    earlier: Vec::new(),
                };
                ports.push(ServicePort { earlier: self.earlier(&new), ..new });
            }
        }
        let has_none = ports.iter().all(|port| port.backend_count() == 0);
        if has_none && let Some(message) = ineligible {
            return Err(Refusal { reason: Reason::NoEligibleNode, message });
        }
        notes.extend(ineligible.map(|text| Remark::new(Cause::Reason(Reason::NoEligibleNode), text)));
        if fenced.is_empty() {
            return Ok(ports);
        }
        let why = "none of its backends may be reached through a gateway; another Event names each with the reason";
        if has_none {
            return Err(Refusal { reason: Reason::Refused, message: format!("The Service is not served: {why}") });
        }
        // It comes first, because the last remarks are omitted if there are too many.
        let text = format!("Port {} is not served: {why}", shortened(&fenced, PORTS_NAMED_MAX, ", port ", ", and "));
        notes.insert(0, Remark::new(Cause::Reason(Reason::Refused), text));
        Ok(ports)
    }

    /// The backends that the port had before, in modes in which a gateway may get packets of connections that began then.
    fn earlier(&self, port: &ServicePort) -> Vec<EarlierBackends> {
        let is_one_way = |mode: Mode| !mode.is_two_way();
        let before = self.before.filter(|old| is_one_way(self.policy.mode) && is_one_way(old.policy.mode));
        let key = |port: &ServicePort| (port.protocol, port.port, port.family);
        let before = before.and_then(|old| old.service.ports.iter().find(|old| key(old) == key(port)));
        before.zip(self.inputs.unix_s).map(|(before, unix_s)| port.earlier_after(before, unix_s)).unwrap_or_default()
    }

    /// The backends of one port. In tunnel modes, backends of the other family are used if this family has none.
    fn select(&self, spec: &ServiceSpec, slices: &[&SliceSpec], port: &PortSpec, family: Family) -> Selection {
        let (slices, fence) = (slices.iter().copied(), self.inputs.fence);
        let is_tunnel = self.policy.mode.is_tunnel();
        match self.policy.target {
            Target::Endpoint => {
                let own = select(slices.clone(), port, family, fence);
                let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
                let has_none = own.backends.is_empty() && own.fenced == 0;
                if is_tunnel && has_none { select(slices, port, other, fence) } else { own }
            }
            Target::Node => {
                let Some(nodes) = self.inputs.nodes.of(family, is_tunnel) else { return Selection::default() };
                let port_at_nodes = self.policy.port_at_nodes(port);
                if spec.local { nodes.local(slices, port, port_at_nodes, family, fence) } else { nodes.all(port, port_at_nodes) }
            }
        }
    }
}

/// The size of one Maglev table: chosen with its first backends, afterwards it only grows.
fn table(tables: &mut BTreeMap<TableKey, u32>, key: TableKey, backends: usize) -> u32 {
    let backends = u32::try_from(backends).unwrap_or(u32::MAX);
    let enough = backends.saturating_mul(MAGLEV_ENTRIES_AT_CREATION);
    let chosen = MAGLEV_SIZES.into_iter().find(|size| *size >= enough).unwrap_or(MAGLEV_SIZES[MAGLEV_SIZES.len() - 1]);
    let size = match tables.get(&key) {
        Some(&size) if backends.saturating_mul(MAGLEV_ENTRIES_AT_LEAST) <= size => size,
        _ => chosen,
    };
    if backends > 0 {
        tables.insert(key, size);
    }
    size
}

#[cfg(test)]
mod tests {
    use proto::Protocol;

    use super::*;

    #[test]
    fn a_new_table_has_two_hundred_entries_for_each_backend_and_at_most_two_and_a_half_times_as_many_as_it_needs() {
        let new = |backends| table(&mut BTreeMap::new(), (Protocol::Tcp, 80, Family::V4), backends);
        assert_eq!(
            [1, 327, 328, 655, 656, 1310, 1311, 6553].map(new),
            [251, 65_537, 131_071, 131_071, 262_139, 262_139, 655_373, 655_373]
        );
        let wanted = |backends: u32| backends * MAGLEV_ENTRIES_AT_CREATION;
        assert!((2..3276).all(|backends| (wanted(backends)..wanted(backends) * 5 / 2).contains(&new(backends as usize))));
    }

    #[test]
    fn a_table_of_a_thousand_backends_from_before_keeps_its_size() {
        let key = (Protocol::Tcp, 80, Family::V4);
        let mut tables = BTreeMap::from([(key, 655_373)]);
        assert_eq!(table(&mut tables, key, 1000), 655_373);
        assert_eq!(table(&mut tables, key, 1001), 655_373);
    }
}
