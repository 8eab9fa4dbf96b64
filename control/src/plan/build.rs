//! The plan of one Service: what gateways get of it, and the status that its object shall have.
//!
//! Invariant: a Service that cannot be served is refused as a whole, without ports. A Service whose plan is unchanged
//! keeps its `Arc`. Deliberately not here: addresses (`addresses`), frontends (`frontend`) and their backends
//! (`selection`), why a Service is not served (`unserved`), what gateways get when (`service_life`), and the choice of
//! Services to plan again (`plan`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use proto::limits::{MAGLEV_ENTRIES_AT_CREATION, MAGLEV_ENTRIES_AT_LEAST, MAGLEV_HASH_VERSION, MAGLEV_SIZES};
use proto::{EarlierBackends, MaglevSpec, Mode, Reason, Refusal, Service, ServicePort, Target};

use crate::config::settings::ControllerSettings;
use crate::plan::addresses::Allocation;
use crate::plan::frontend::{Frontend, FrontendPort};
use crate::plan::selection::nodes::Nodes;
use crate::plan::selection::source::{BackendSource, SelectedPort};
use crate::plan::selection::{DeletedSlices, Fence, MissingBackends};
use crate::plan::service_life::{Limitation, Phase, Shortfall, WantedStatus};
use crate::plan::unserved;
use crate::world::checkpoint::{Decided, Policy, TableKey};
use crate::world::{ServiceEntry, World};
use objects::note::{self, Cause, Remark};
use objects::status::{Ingress, IpMode, PortStatus};
use objects::{Kind, PortSpec, ServiceObject, ServiceSpec};

/// Seed of the Maglev tables of installations that have drawn none, and of `replay`: the fractional digits of the golden
/// ratio. It is no secret, so that anybody can choose tuples that all meet one backend, but it must never change, because
/// an update of the controller would then move flows of stateless modes.
pub const MAGLEV_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// Maximum number of remarks on one Service: one per slice and port could be thousands.
const REMARKS_MAX: usize = 32;

/// The last plan of a Service.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    /// The object, the revision of the Service and the allocation that it was planned for.
    object: Arc<ServiceObject>,
    pub(super) revision: u64,
    pub(super) outcome: Allocation,
    /// Revision of the nodes that it was planned with; `None` if its backends are not nodes.
    pub(super) nodes_revision: Option<u64>,
    pub(super) phase: Phase,
    /// The Service as sent to gateways.
    pub(super) service: Arc<Service>,
    pub(super) status: Option<Arc<WantedStatus>>,
    pub(super) notes: Vec<Remark>,
    pub(super) tables: BTreeMap<TableKey, u32>,
    /// The policy of the last plan that served the Service, with the `ipMode` that the status shall have.
    pub(super) in_force: Option<Policy>,
    /// Its deleted slices, without their content.
    pub(super) deleted_slices: DeletedSlices,
}

impl Planned {
    /// When its plan may change even if its inputs do not.
    pub(super) fn again_at(&self) -> Option<Instant> {
        self.phase.ends_at().into_iter().chain(self.deleted_slices.until).min()
    }

    /// Whether a new plan from these inputs would be the same.
    pub(super) fn is_current(&self, inputs: &Inputs<'_>, entry: &ServiceEntry, outcome: &Allocation) -> bool {
        let has_same_nodes = self.nodes_revision.is_none_or(|revision| revision == inputs.world.revisions().nodes);
        let has_expired = self.again_at().is_some_and(|until| until <= inputs.now);
        let is_same = self.revision == entry.revision && Arc::ptr_eq(&self.object, &entry.candidate.object);
        is_same && self.outcome == *outcome && has_same_nodes && !inputs.fence_moved && !has_expired
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
    pub(super) inputs: &'a Inputs<'a>,
    pub(super) entry: &'a ServiceEntry,
    pub(super) outcome: &'a Allocation,
    pub(super) before: Option<&'a Planned>,
    /// Decisions of a previous leader.
    pub(super) recalled: Option<&'a Decided>,
}

impl ServiceBuilder<'_> {
    /// Plans the Service. While a change to a mode in which nodes see the VIP waits for the status, gateways use the mode
    /// before.
    pub(super) fn plan(self) -> Planned {
        let (candidate, in_force) = (&self.entry.candidate, self.in_force());
        let policy = Policy::of(candidate.wanted.as_ref().ok(), candidate.kind, self.inputs.settings, in_force);
        let wanted = self.build(policy);
        let was_hidden = |old: &Planned| old.in_force.is_some_and(|policy| policy.ip_mode == IpMode::Proxy);
        let turns = self.before.is_some_and(|old| old.phase.is_turning() || was_hidden(old)) && policy.ip_mode == IpMode::Vip;
        let refusal = wanted.service.refusal.as_ref().map(|refusal| refusal.reason);
        let (before, allocated) = (self.before.map(|old| old.phase), self.outcome.addresses().collect::<Vec<_>>());
        let phase = Phase::next(before, &candidate.object, &allocated, refusal, turns, self.inputs.now);
        let kept = in_force.filter(|_| phase.is_turning());
        let as_before = kept.map(|Policy { mode, target, scheduler, .. }| Policy { mode, target, scheduler, ..policy });
        match as_before.map(|policy| self.build(policy)).filter(|planned| planned.service.refusal.is_none()) {
            Some(as_before) => as_before.in_phase(phase),
            None if phase.is_turning() => wanted,
            None => wanted.in_phase(phase),
        }
    }

    /// The policy in force before: of the same object, or of the same name under a previous leader.
    fn in_force(&self) -> Option<Policy> {
        let before = self.before.filter(|old| old.object.uid == self.entry.candidate.object.uid);
        before.map_or(self.recalled.and_then(|decided| decided.in_force), |old| old.in_force)
    }

    fn build(&self, policy: Policy) -> Planned {
        let Inputs { world, settings, fence, nodes, now, .. } = *self.inputs;
        let candidate = &self.entry.candidate;
        let (object, spec) = (&candidate.object, candidate.wanted.as_ref().ok());
        let mut deleted_slices = DeletedSlices::of(world, &object.name, self.before.map(|old| &old.deleted_slices), now);
        let counting = std::mem::take(&mut deleted_slices.counting);
        let slices = world.slices_of(&object.name).chain(&counting).collect();
        let local = spec.is_some_and(|spec| spec.local);
        let source = BackendSource { service: &object.name, slices, local, world, nodes, fence };
        let frontend = Frontend::of(candidate, self.outcome, policy, settings);
        let recalled = || self.recalled.map(|decided| decided.tables.clone());
        let mut tables = self.before.map(|old| old.tables.clone()).or_else(recalled).unwrap_or_default();
        let mut notes: Vec<Remark> = self.outcome.notes.iter().chain(&self.outcome.externals.remarks).cloned().collect();
        let in_force = self.in_force();
        let unknown_word = unserved::by_unknown_word(candidate, in_force, self.recalled);
        // What could not be read may be the cause of a refusal. An unknown word is the refusal itself.
        notes.extend(spec.filter(|_| unknown_word.is_none()).iter().flat_map(|spec| &spec.notes).cloned());
        let served = unserved::by_object(candidate, unknown_word.as_ref(), self.outcome)
            .and_then(|spec| self.ports(spec, &frontend, &source, &mut tables, &mut notes));
        notes = note::bounded(notes, REMARKS_MAX);
        let (ports, refusal) = match served {
            Ok(ports) => (ports, None),
            Err(refusal) => {
                notes.push(Remark::new(Cause::Reason(refusal.reason), refusal.message.clone()));
                (Vec::new(), Some(refusal))
            }
        };
        let service = frontend.service(ports, refusal);
        let service = match self.before {
            Some(old) if *old.service == service => Arc::clone(&old.service),
            _ => Arc::new(service),
        };
        let phase = service.refusal.as_ref().map_or(Phase::GIVEN, |refusal| Phase::Refused(refusal.reason));
        let has_status = candidate.kind == Kind::LoadBalancer;
        Planned {
            object: Arc::clone(object),
            revision: self.entry.revision,
            outcome: self.outcome.clone(),
            nodes_revision: (policy.target == Target::Node).then(|| world.revisions().nodes),
            phase,
            status: has_status.then(|| Arc::new(self.status(&service, policy, phase, &source, &notes))),
            notes,
            tables,
            in_force: if service.refusal.is_none() { Some(policy) } else { in_force },
            deleted_slices,
            service,
        }
    }

    fn ports(
        &self,
        spec: &ServiceSpec,
        frontend: &Frontend<'_>,
        source: &BackendSource<'_>,
        tables: &mut BTreeMap<TableKey, u32>,
        notes: &mut Vec<Remark>,
    ) -> Result<Vec<ServicePort>, Refusal> {
        let policy = frontend.policy;
        notes.extend(source.slices.iter().flat_map(|slice| &slice.notes).cloned());
        notes.extend(policy.client_address_remark(spec));
        notes.extend(policy.missing_header_remark(spec));
        notes.extend(spec.health.remarks(policy.probe));
        tables.retain(|(protocol, port, _), _| spec.ports.iter().any(|one| (one.protocol, one.port) == (*protocol, *port)));
        if let Some(refusal) = policy.refusal(spec, self.entry.candidate.kind) {
            return Err(refusal);
        }
        let selected: Vec<_> = frontend.listening().map(|port| source.select(port, &policy)).collect();
        notes.extend(selected.iter().flat_map(|one| &one.selection.notes).cloned());
        // They come first, because the last remarks are omitted if there are too many.
        notes.splice(..0, unserved::by_backends(&policy, &selected)?);
        let port = |SelectedPort { port: FrontendPort { spec, family, vips, node_port }, selection, count }| {
            let size = table(tables, (spec.protocol, spec.port, family), count);
            let new = ServicePort {
                name: spec.name.clone(),
                vips,
                node_port,
                backends: selection.backends,
                nodes: selection.nodes,
                zones: selection.zones,
                app_protocol: spec.app_protocol.clone(),
                proxy_protocol: spec.proxy_protocol,
                ..ServicePort::new(
                    spec.protocol,
                    family,
                    spec.port,
                    MaglevSpec { size, seed: self.inputs.maglev_seed, hash_version: MAGLEV_HASH_VERSION },
                )
            };
            ServicePort { earlier: self.earlier(&new, policy), ..new }
        };
        Ok(selected.into_iter().map(port).collect())
    }

    /// The backends that the port had before, in modes in which a gateway may get packets of connections that began then.
    fn earlier(&self, port: &ServicePort, policy: Policy) -> Vec<EarlierBackends> {
        let is_one_way = |mode: Mode| !mode.is_two_way();
        let before = self.before.filter(|old| is_one_way(policy.mode) && is_one_way(old.service.mode));
        let key = |port: &ServicePort| (port.protocol, port.port, port.family);
        let before = before.and_then(|old| old.service.ports.iter().find(|old| key(old) == key(port)));
        before.zip(self.inputs.unix_s).map(|(before, unix_s)| port.earlier_after(before, unix_s)).unwrap_or_default()
    }

    fn status(
        &self,
        service: &Service,
        policy: Policy,
        phase: Phase,
        source: &BackendSource<'_>,
        notes: &[Remark],
    ) -> WantedStatus {
        let Self { inputs, entry, outcome, .. } = *self;
        let spec = entry.candidate.wanted.as_ref().ok();
        let is_served = service.refusal.is_none();
        let port = |port: &PortSpec| PortStatus { port: port.port, protocol: port.protocol, error: None };
        let ports: Vec<PortStatus> = spec.iter().flat_map(|spec| &spec.ports).map(port).collect();
        let mut pools: Vec<String> =
            outcome.addresses().filter_map(|ip| inputs.fence.pools.holding(ip)).map(|pool| pool.name.clone()).collect();
        pools.dedup();
        // A refusal is reported instead of missing backends.
        let missing = spec.filter(|_| is_served).map(|spec| {
            let knows_endpoints = policy.target == Target::Endpoint;
            MissingBackends::of(service, &spec.ports, source.slices.iter().copied().filter(|_| knows_endpoints))
        });
        let has = |reason| notes.iter().any(|note: &Remark| note.cause == Cause::Reason(reason));
        let limitations = [
            (is_served && has(Reason::Refused)).then_some(Limitation::PartRefused),
            spec.is_some_and(|spec| !spec.unread.is_empty()).then_some(Limitation::Unread),
            spec.is_some_and(|spec| policy.loses_client_address(spec)).then_some(Limitation::ClientAddressLost),
        ];
        WantedStatus {
            object: Arc::clone(&entry.candidate.object),
            group: inputs.settings.group.clone(),
            phase,
            ingress: outcome.addresses().map(|ip| Ingress { ip, ip_mode: policy.ip_mode, ports: ports.clone() }).collect(),
            pools,
            shortfall: shortfall(outcome, service.refusal.as_ref()),
            limitations: limitations.into_iter().flatten().collect(),
            missing: missing.unwrap_or_default(),
            fails_open: service.health.fail_open,
        }
    }
}

impl Planned {
    fn in_phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        if let Some(status) = &mut self.status {
            Arc::make_mut(status).phase = phase;
        }
        self
    }
}

/// What of its addresses is not as a Service asks; `refusal` is why it is not served.
fn shortfall(outcome: &Allocation, refusal: Option<&Refusal>) -> Option<Shortfall> {
    let has_address = outcome.addresses().next().is_some();
    let lacks = outcome.refusal().or_else(|| outcome.missing().filter(|_| !outcome.is_complete));
    let is_outside = |remark: &Remark| remark.cause == Cause::Reason(Reason::OutsidePools);
    if let Some(refusal) = lacks.or(refusal.filter(|_| !has_address)) {
        Some(Shortfall::Lacks(refusal.reason))
    } else if outcome.notes.iter().any(is_outside) {
        Some(Shortfall::OutsidePools)
    } else {
        (has_address && outcome.missing().is_some()).then_some(Shortfall::LacksPreferredFamily)
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
    use proto::{Family, Protocol};

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
