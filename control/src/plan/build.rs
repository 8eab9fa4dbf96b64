//! The plan of one Service: its ports and backends, its status, and the order of the steps of a mode change.
//!
//! Invariant: a Service that cannot be served is refused as a whole, without ports. A Service whose plan is unchanged keeps
//! its `Arc`. Deliberately not here: addresses (`addresses`), and the choice of Services to plan again (`plan`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use imbl::OrdMap;
use proto::limits::{MAGLEV_ENTRIES_AT_CREATION, MAGLEV_ENTRIES_AT_LEAST, MAGLEV_HASH_VERSION, MAGLEV_SIZES};
use proto::{Family, HealthCheck, MaglevSpec, NodesAt, Reason, Refusal, Service, ServiceName, ServicePort, Target};

use crate::config::settings::ControllerSettings;
use crate::plan::addresses::Allocation;
use crate::plan::policy::Policy;
use crate::plan::selection::nodes::Nodes;
use crate::plan::selection::{Departed, Fence, MissingBackends, Selection, select};
use crate::world::World;
use crate::world::checkpoint::{Decided, TableKey};
use objects::note::{self, Cause, Remark};
use objects::status::{Ingress, IpMode, PortStatus};
use objects::{Candidate, Kind, OwnedParts, PortSpec, ServiceSpec, SliceSpec};

/// Seed of every Maglev table: the fractional digits of the golden ratio. It is not a secret, but it must never change,
/// because an update of the controller would then move flows of stateless modes.
pub const MAGLEV_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// How long a new mode or a new Service waits for the status or finalizer that must be written first. The limit keeps an
/// API server that is unavailable or refuses the write from blocking an owner's change for ever.
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
    pub held: OwnedParts,
    /// Another field manager that wrote the status.
    pub foreign_manager: Option<String>,
    /// Why it is not served. Until it is, addresses that it does not hold are removed from its status and none are added.
    pub refusal: Option<Reason>,
    /// Why it lacks an address.
    pub unassigned: Option<Reason>,
    /// Whether one of its addresses lies outside every pool.
    pub outside_pools: bool,
    /// Whether it is withheld from gateways until its finalizer is written.
    pub is_withheld: bool,
    /// The pools of its addresses, in the order of the addresses.
    pub pools: Vec<String>,
    /// Whether a setting of it cannot be parsed, so that the previous value stays in force.
    pub is_partly_unread: bool,
    /// Why it has no backends.
    pub missing: MissingBackends,
    /// Whether all backends are used if none is healthy (fail open).
    pub fails_open: bool,
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
    /// Until when the previous `policy` stays in force, while the status must be written first.
    pub(super) held_until: Option<Instant>,
    /// Until when it is withheld from gateways, while its finalizer must be written first.
    pub(super) withheld_until: Option<Instant>,
    /// Its deleted slices, and when each deletion was noticed.
    pub(super) departed: BTreeMap<ServiceName, Instant>,
    /// When the first of them stops counting, if any still counts.
    pub(super) departed_until: Option<Instant>,
}

/// Maximum number of remarks on one Service: one per slice and port could be thousands.
const REMARKS_MAX: usize = 32;

impl Planned {
    /// When its plan may change even if its inputs do not.
    pub(super) fn again_at(&self) -> Option<Instant> {
        [self.held_until, self.withheld_until, self.departed_until].into_iter().flatten().min()
    }

    /// Whether it has deleted slices that no longer count.
    pub(super) fn has_done_with_departed(&self) -> bool {
        !self.departed.is_empty() && self.departed_until.is_none()
    }

    /// Whether the status was planned from this version of the object.
    pub(super) fn status_is_of(&self, candidate: &Candidate) -> bool {
        self.status.as_ref().is_none_or(|status| {
            status.resource_version == candidate.resource_version && status.uid == candidate.uid && status.held == candidate.held
        })
    }
}

fn status(builder: &ServiceBuilder<'_>, service: &Service, missing: MissingBackends) -> WantedStatus {
    let ServiceBuilder { candidate, outcome, ip_mode, fence, settings, .. } = *builder;
    let refusal = service.refusal.as_ref().map(|refusal| refusal.reason);
    let has_address = !outcome.addresses.is_empty();
    let is_outside = |remark: &Remark| remark.cause == Cause::Reason(Reason::OutsidePools);
    let spec = candidate.wanted.as_ref().ok();
    let told = |port: &PortSpec| PortStatus { port: port.port, protocol: port.protocol, error: None };
    let ports: Vec<PortStatus> = spec.iter().flat_map(|spec| &spec.ports).map(told).collect();
    let mut pools: Vec<String> = outcome.addresses.iter().filter_map(|ip| fence.pool_of(*ip)).map(str::to_owned).collect();
    pools.dedup();
    WantedStatus {
        service: candidate.name.clone(),
        uid: candidate.uid.clone(),
        resource_version: candidate.resource_version.clone(),
        group: settings.group.clone(),
        ingress: outcome.addresses.iter().map(|&ip| Ingress { ip, ip_mode, ports: ports.clone() }).collect(),
        held: candidate.held.clone(),
        foreign_manager: candidate.foreign_manager.clone(),
        refusal,
        unassigned: outcome.refusal.as_ref().map(|refusal| refusal.reason).or(refusal.filter(|_| !has_address)),
        outside_pools: outcome.notes.iter().any(is_outside),
        is_withheld: false,
        pools,
        is_partly_unread: spec.is_some_and(|spec| !spec.unread.is_empty()),
        missing,
        fails_open: service.health.fail_open,
    }
}

/// The inputs of the plan of one Service.
pub(super) struct ServiceBuilder<'a> {
    pub(super) candidate: &'a Candidate,
    pub(super) outcome: &'a Allocation,
    pub(super) settings: &'a ControllerSettings,
    pub(super) fence: &'a Fence<'a>,
    pub(super) nodes: &'a Nodes,
    pub(super) world: &'a World,
    pub(super) policy: Policy,
    /// Desired addresses of the status.
    pub(super) ip_mode: IpMode,
    /// Decisions of a previous leader.
    pub(super) recalled: Option<&'a Decided>,
}

impl ServiceBuilder<'_> {
    /// Whether the finalizer must be written before gateways get the Service, so that its deletion is not missed.
    pub(super) fn build_in_turn(&self, revision: u64, before: Option<&Planned>, now: Instant) -> Planned {
        let mut planned = self.build_as_told(revision, before, now);
        planned.withheld_until = self.withhold(&planned, before, now);
        if planned.withheld_until.is_some() {
            let withheld = planned.status.map(|status| WantedStatus { is_withheld: true, ..Arc::unwrap_or_clone(status) });
            planned.status = withheld.map(Arc::new);
        }
        planned
    }

    /// Until when it is withheld from gateways, if it is. A Service whose status already has an address is never withheld.
    fn withhold(&self, planned: &Planned, before: Option<&Planned>, now: Instant) -> Option<Instant> {
        let is_given = before.is_some_and(|old| old.withheld_until.is_none() && old.service.refusal.is_none());
        let needs_none = self.candidate.uid.is_empty() || self.candidate.kind != Kind::LoadBalancer;
        let tells = |ingress: &Ingress| self.outcome.addresses.contains(&ingress.ip);
        let is_marked = self.candidate.held.finalizer || self.candidate.held.ingress.iter().any(tells);
        if is_given || needs_none || is_marked || planned.service.refusal.is_some() {
            return None;
        }
        let until = before.and_then(|old| old.withheld_until).unwrap_or(now + STATUS_WAITED_FOR);
        Some(until).filter(|until| *until > now)
    }

    /// Plans a change to a mode in which nodes see the VIP. The status is written first, because a node accepts packets for the
    /// VIP only once the status tells it to. Until the object shows the new status, gateways use the previous mode.
    fn build_as_told(&self, revision: u64, before: Option<&Planned>, now: Instant) -> Planned {
        let wanted = self.build(revision, before, now);
        let held = before.and_then(|old| Some((old.policy, self.hold(old, now)?)));
        let Some((policy, until)) = held.filter(|_| wanted.service.refusal.is_none()) else { return wanted };
        let as_before = ServiceBuilder { policy, ..*self }.build(revision, before, now);
        if as_before.service.refusal.is_some() { wanted } else { Planned { held_until: Some(until), ..as_before } }
    }

    /// Until when the previous policy is kept, if it is. For manifests there is nothing to wait for: no node reads their status.
    fn hold(&self, before: &Planned, now: Instant) -> Option<Instant> {
        let ours = |ingress: &&Ingress| self.outcome.addresses.contains(&ingress.ip);
        let is_told = !self.candidate.held.ingress.iter().filter(ours).any(|ingress| ingress.ip_mode == IpMode::Proxy);
        let turns = before.policy.ip_mode == IpMode::Proxy && self.policy.ip_mode == IpMode::Vip;
        if !turns || is_told || self.candidate.uid.is_empty() || before.service.refusal.is_some() {
            return None;
        }
        Some(before.held_until.unwrap_or(now + STATUS_WAITED_FOR)).filter(|until| *until > now)
    }

    fn build(&self, revision: u64, before: Option<&Planned>, now: Instant) -> Planned {
        let name = &self.candidate.name;
        let leaving = Departed::of(self.world, name, before.map(|old| &old.departed), now);
        let slices: Vec<&SliceSpec> = self.world.slices_of(name).chain(&leaving.counting).collect();
        let recalled = || self.recalled.map(|decided| decided.tables.clone());
        let mut tables = before.map(|old| old.tables.clone()).or_else(recalled).unwrap_or_default();
        let mut notes: Vec<Remark> = self.outcome.notes.iter().chain(&self.outcome.externals.remarks).cloned().collect();
        let served = match (&self.candidate.wanted, &self.outcome.refusal) {
            (Err(error), _) => Err(error.refusal()),
            (Ok(_), Some(refusal)) => Err(refusal.clone()),
            (Ok(spec), None) => {
                notes.extend(spec.notes.iter().chain(slices.iter().flat_map(|slice| &slice.notes)).cloned());
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
        let service = match before {
            Some(old) if *old.service == service => Arc::clone(&old.service),
            _ => Arc::new(service),
        };
        let has_status = self.candidate.kind == Kind::LoadBalancer;
        let status = has_status.then(|| Arc::new(status(self, &service, self.missing(&service, &slices))));
        let nodes_revision = (self.policy.target == Target::Node).then(|| self.world.nodes_revision());
        Planned {
            revision,
            outcome: self.outcome.clone(),
            service,
            status,
            notes,
            tables,
            nodes_revision,
            policy: self.policy,
            held_until: None,
            withheld_until: None,
            departed: leaving.since,
            departed_until: leaving.until,
        }
    }

    fn service(&self, ports: Vec<ServicePort>, refusal: Option<Refusal>) -> Service {
        let spec = self.candidate.wanted.as_ref().ok();
        Service {
            mode: self.policy.mode,
            target: self.policy.target,
            scheduler: self.policy.scheduler,
            health: self.health(spec),
            drain_timeout: spec.and_then(|spec| spec.drain_timeout).unwrap_or(self.settings.defaults.drain_timeout),
            affinity: spec.and_then(|spec| spec.affinity),
            source_ranges: spec.and_then(|spec| spec.source_ranges.clone()),
            idle_timeout: spec.and_then(|spec| spec.idle_timeout),
            local: spec.is_some_and(|spec| spec.local),
            refusal,
            ..Service::new(self.candidate.name.clone(), ports)
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
        let mut ports = Vec::new();
        let mut fenced = 0;
        let mut ineligible = None;
        for port in &spec.ports {
            for &family in &spec.families {
                let addresses = self.outcome.addresses.iter().chain(&self.outcome.externals.addresses);
                let vips: Vec<IpAddr> = addresses.copied().filter(|a| Family::of(*a) == family).collect();
                let node_port = port.node_port.filter(|_| !self.outcome.withholds_node_ports);
                if vips.is_empty() && node_port.is_none() {
                    continue;
                }
                let mut selection = self.select(spec, slices, port, family);
                // A manual override of one backend gives this port a list of its own.
                let overridden = selection.nodes.take_if(|nodes| self.world.overrides().concern(&self.candidate.name, nodes));
                selection.backends.extend(overridden.iter().flat_map(NodesAt::backends));
                self.world.overrides().apply(&self.candidate.name, slices, self.world.nodes(), &mut selection.backends);
                let count = selection.count();
                fenced += selection.fenced;
                notes.extend(selection.notes);
                ineligible = ineligible.or(selection.ineligible);
                if let Some(refusal) = self.policy.refuses_endpoints(port, &selection.backends) {
                    return Err(refusal);
                }
                let size = table(tables, (port.protocol, port.port, family), count);
                let planned = service_port(port, family, vips, size, selection.backends);
                ports.push(ServicePort { node_port, zones: selection.zones, nodes: selection.nodes, ..planned });
            }
        }
        let has_none = ports.iter().all(|port| port.backend_count() == 0);
        if has_none && let Some(message) = ineligible {
            return Err(Refusal { reason: Reason::NoEligibleNode, message });
        }
        notes.extend(ineligible.map(|text| Remark::new(Cause::Reason(Reason::NoEligibleNode), text)));
        if fenced > 0 && has_none {
            let message = "none of its backends may be reached through a gateway; each is named in the log with the reason";
            return Err(Refusal { reason: Reason::Refused, message: message.to_owned() });
        }
        Ok(ports)
    }

    /// Nothing is missing if the Service is refused, because the refusal is reported instead.
    fn missing(&self, service: &Service, slices: &[&SliceSpec]) -> MissingBackends {
        let Ok(spec) = &self.candidate.wanted else { return MissingBackends::default() };
        if service.refusal.is_some() {
            return MissingBackends::default();
        }
        let knows_endpoints = self.policy.target == Target::Endpoint;
        MissingBackends::of(service, &spec.ports, slices.iter().copied().filter(|_| knows_endpoints))
    }

    fn health(&self, spec: Option<&ServiceSpec>) -> HealthCheck {
        let Some(spec) = spec else { return self.settings.health.clone() };
        let node_health_port = spec.node_health_port.filter(|_| self.policy.target == Target::Node);
        HealthCheck { node_health_port, ..spec.health.over(&self.settings.health) }
    }

    /// The backends of one port. In tunnel modes, backends of the other family are used if this family has none.
    fn select(&self, spec: &ServiceSpec, slices: &[&SliceSpec], port: &PortSpec, family: Family) -> Selection {
        let slices = slices.iter().copied();
        let is_tunnel = self.policy.mode.is_tunnel();
        match self.policy.target {
            Target::Endpoint => {
                let own = select(slices.clone(), port, family, self.fence);
                let other = if family == Family::V4 { Family::V6 } else { Family::V4 };
                let has_none = own.backends.is_empty() && own.fenced == 0;
                if is_tunnel && has_none { select(slices, port, other, self.fence) } else { own }
            }
            Target::Node => {
                let Some(nodes) = self.nodes.of(family, is_tunnel) else { return Selection::default() };
                let port_at_nodes = self.policy.port_at_nodes(port);
                if spec.local {
                    nodes.local(slices, port, port_at_nodes, family, self.fence)
                } else {
                    nodes.all(port, port_at_nodes)
                }
            }
        }
    }
}

fn service_port(port: &PortSpec, family: Family, vips: Vec<IpAddr>, size: u32, backends: Vec<proto::Backend>) -> ServicePort {
    ServicePort {
        name: port.name.clone(),
        protocol: port.protocol,
        family,
        vips,
        port: port.port,
        node_port: port.node_port,
        maglev: MaglevSpec { size, seed: MAGLEV_SEED, hash_version: MAGLEV_HASH_VERSION },
        backends,
        nodes: None,
        zones: Vec::new(),
        app_protocol: port.app_protocol.clone(),
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
