//! What follows from the objects: the Services that gateways forward by, and the status of each. A function: no I/O, no
//! clock, no health.
//!
//! Invariant: a Service that did not change keeps its `Arc` from one plan to the next, so that what is sent, compiled
//! and compared is only what changed.
//! Deliberately not here: generations and when a status is written (`publish`, `status`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::limits::{MAGLEV_ENTRIES_AT_CREATION, MAGLEV_ENTRIES_AT_LEAST, MAGLEV_HASH_VERSION, MAGLEV_SIZES, SERVICES_MAX};
use proto::{Family, HealthCheck, MaglevSpec, Pool, Protocol, Reason, Refusal, Service, ServiceName, ServicePort, Target};

use crate::addresses::{Allocations, Claim, Outcome};
use crate::policy::Policy;
use crate::selection::{Fence, NodeChoice, Selection, select};
use crate::settings::ControllerSettings;
use crate::source::{Ingress, IpMode, StatusWrite};
use crate::spec::{Candidate, Kind, PortSpec, ServiceSpec, SliceSpec};
use crate::world::World;

/// Seed of every Maglev table: the fractional digits of the golden ratio. It is no secret; it must only never change, or
/// an update of the controller would move flows of stateless modes.
pub const MAGLEV_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// A mode waits this long for the status that must come before it: an API server that refuses the write, or is away, does
/// not keep an owner's change from the gateways for ever.
const STATUS_WAITED_FOR: Duration = Duration::from_secs(10);

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

/// A sentence about one Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Which.
    pub service: ServiceName,
    /// What, and what to do.
    pub text: String,
}

/// What the next plan needs of this one.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    allocations: Allocations,
    outcomes: BTreeMap<ServiceName, Outcome>,
    services_revision: Option<u64>,
    outside_pools: Vec<IpAddr>,
    planned: BTreeMap<ServiceName, Planned>,
}

#[derive(Clone, Debug)]
struct Planned {
    revision: u64,
    outcome: Outcome,
    service: Arc<Service>,
    status: Option<Arc<WantedStatus>>,
    notes: Vec<String>,
    tables: BTreeMap<TableKey, u32>,
    /// Of the nodes that it was planned with; none where nodes do not matter.
    nodes_revision: Option<u64>,
    /// What gateways forward by.
    policy: Policy,
    /// While the status must come first: until when `policy` is the one of before.
    held_until: Option<Instant>,
}

type TableKey = (Protocol, u16, Family);

/// Plans for `world`. `memory` is that of the plan before, with the same settings.
pub fn plan(world: &World, settings: &ControllerSettings, memory: &mut Memory, now: Instant) -> Plan {
    let outside_before = std::mem::take(&mut memory.outside_pools);
    let some_address_is_free_again = memory.allocations.next_expiry().is_some_and(|expiry| expiry <= now);
    if memory.services_revision != Some(world.services_revision()) || some_address_is_free_again {
        memory.outcomes = assign(world, settings, &mut memory.allocations, now);
        memory.services_revision = Some(world.services_revision());
    }
    memory.outside_pools = memory.allocations.outside_pools(settings);
    let fence = Fence::new(settings, &memory.outside_pools);
    let fence_moved = memory.outside_pools != outside_before;

    let mut plan = Plan { pools: settings.pools.clone(), again_at: memory.allocations.next_expiry(), ..Plan::default() };
    memory.planned.retain(|name, _| memory.outcomes.contains_key(name));
    for (name, entry) in world.services() {
        let Some(outcome) = memory.outcomes.get(name) else { continue };
        let before = memory.planned.get(name);
        let nodes_are_kept = |old: &Planned| old.nodes_revision.is_none_or(|revision| revision == world.nodes_revision());
        let is_kept = |old: &Planned| {
            let hold_is_over = old.held_until.is_some_and(|until| until <= now);
            let unchanged = old.revision == entry.revision && old.outcome == *outcome && nodes_are_kept(old);
            unchanged && !fence_moved && !hold_is_over
        };
        if !before.is_some_and(|old| is_kept(old) && old.status_is_of(&entry.candidate)) {
            let candidate = &entry.candidate;
            let policy = Policy::of(candidate.wanted.as_ref().ok(), candidate.kind, &settings.defaults);
            let builder = Builder { candidate, outcome, settings, fence: &fence, world, policy, ip_mode: policy.ip_mode };
            let one = builder.build_in_turn(entry.revision, before, now);
            let is_new = |text: &&String| !before.is_some_and(|old| old.notes.contains(text));
            plan.notes.extend(one.notes.iter().filter(is_new).map(|text| Note { service: name.clone(), text: text.clone() }));
            memory.planned.insert(name.clone(), one);
        }
    }
    let planned = &memory.planned;
    plan.again_at = planned.values().filter_map(|one| one.held_until).chain(plan.again_at).min();
    plan.services = planned.iter().map(|(name, one)| (name.clone(), Arc::clone(&one.service))).collect();
    plan.statuses = planned.iter().filter_map(|(name, one)| Some((name.clone(), Arc::clone(one.status.as_ref()?)))).collect();
    plan
}

impl Planned {
    /// Whether the status was planned for this version of the object.
    fn status_is_of(&self, candidate: &Candidate) -> bool {
        self.status.as_ref().is_none_or(|status| {
            let write = &status.write;
            write.resource_version == candidate.resource_version
                && write.uid == candidate.uid
                && status.current == candidate.ingress
        })
    }
}

/// Whether a Service is ours: by class, and a class cannot be said for type `NodePort`.
fn is_ours(candidate: &Candidate, settings: &ControllerSettings) -> bool {
    match candidate.kind {
        Kind::NodePort => true,
        Kind::LoadBalancer => candidate.class.as_deref() == Some(&settings.load_balancer_class),
    }
}

/// Addresses and node ports for all Services that are ours.
fn assign(
    world: &World,
    settings: &ControllerSettings,
    allocations: &mut Allocations,
    now: Instant,
) -> BTreeMap<ServiceName, Outcome> {
    let entries = world.services().values().map(|entry| &entry.candidate);
    let mut ours: Vec<&Candidate> = entries.filter(|candidate| is_ours(candidate, settings)).collect();
    ours.sort_by_key(|candidate| (candidate.created_s, &candidate.name));
    let too_many = ours.split_off(ours.len().min(SERVICES_MAX));
    let claims: Vec<Claim> = ours.iter().filter(|c| c.kind == Kind::LoadBalancer).map(|c| claim(c)).collect();
    let mut outcomes = allocations.assign(&claims, settings, now);
    let mut node_ports: BTreeMap<(Protocol, u16), &ServiceName> = BTreeMap::new();
    for candidate in ours.iter().filter(|c| c.kind == Kind::NodePort) {
        outcomes.insert(candidate.name.clone(), take_node_ports(candidate, &mut node_ports));
    }
    for candidate in too_many {
        let message = format!("there are more than {SERVICES_MAX} Services, and this is one of the youngest; remove some");
        let refusal = Some(Refusal { reason: Reason::Exhausted, message });
        outcomes.insert(candidate.name.clone(), Outcome { refusal, ..Outcome::default() });
    }
    outcomes
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

fn status(candidate: &Candidate, outcome: &Outcome, ip_mode: IpMode, service: &Service) -> WantedStatus {
    let ingress = outcome.addresses.iter().map(|&ip| Ingress { ip, ip_mode }).collect();
    let write = StatusWrite {
        service: candidate.name.clone(),
        uid: candidate.uid.clone(),
        resource_version: candidate.resource_version.clone(),
        ingress,
    };
    let foreign_manager = candidate.foreign_manager.clone();
    WantedStatus { write, current: candidate.ingress.clone(), foreign_manager, served: service.refusal.is_none() }
}

struct Builder<'a> {
    candidate: &'a Candidate,
    outcome: &'a Outcome,
    settings: &'a ControllerSettings,
    fence: &'a Fence<'a>,
    world: &'a World,
    policy: Policy,
    /// What the status shall say.
    ip_mode: IpMode,
}

impl Builder<'_> {
    /// Towards a mode in which nodes see the VIP, the status comes first: a node takes packets for the VIP only once it is
    /// told so there. Until the object shows it, gateways go on as before.
    fn build_in_turn(&self, revision: u64, before: Option<&Planned>, now: Instant) -> Planned {
        let wanted = self.build(revision, before);
        let held = before.and_then(|old| Some((old.policy, self.hold(old, now)?)));
        let Some((policy, until)) = held.filter(|_| wanted.service.refusal.is_none()) else { return wanted };
        let as_before = Builder { policy, ..*self }.build(revision, before);
        if as_before.service.refusal.is_some() { wanted } else { Planned { held_until: Some(until), ..as_before } }
    }

    /// Until when the policy of before is kept, if it is. Of manifests the status is known to nobody who forwards.
    fn hold(&self, before: &Planned, now: Instant) -> Option<Instant> {
        let ours = |ingress: &&Ingress| self.outcome.addresses.contains(&ingress.ip);
        let is_told = !self.candidate.ingress.iter().filter(ours).any(|ingress| ingress.ip_mode == IpMode::Proxy);
        let turns = before.policy.ip_mode == IpMode::Proxy && self.policy.ip_mode == IpMode::Vip;
        if !turns || is_told || self.candidate.uid.is_empty() || before.service.refusal.is_some() {
            return None;
        }
        Some(before.held_until.unwrap_or(now + STATUS_WAITED_FOR)).filter(|until| *until > now)
    }

    fn build(&self, revision: u64, before: Option<&Planned>) -> Planned {
        let slices: Vec<&SliceSpec> = self.world.slices_of(&self.candidate.name).collect();
        let mut tables = BTreeMap::new();
        let mut notes: Vec<String> = self.outcome.note.iter().cloned().collect();
        let served = match (&self.candidate.wanted, &self.outcome.refusal) {
            (Err(error), _) => Err(error.refusal()),
            (Ok(_), Some(refusal)) => Err(refusal.clone()),
            (Ok(spec), None) => {
                notes.extend(spec.notes.iter().chain(slices.iter().flat_map(|slice| &slice.notes)).cloned());
                tables = before.map(|old| old.tables.clone()).unwrap_or_default();
                self.ports(spec, &slices, &mut tables, &mut notes)
            }
        };
        let (ports, refusal) = match served {
            Ok(ports) => (ports, None),
            Err(refusal) => {
                notes.push(format!("not served, {}: {}", refusal.reason, refusal.message));
                (Vec::new(), Some(refusal))
            }
        };
        let service = self.service(ports, refusal);
        let service = match before {
            Some(old) if *old.service == service => Arc::clone(&old.service),
            _ => Arc::new(service),
        };
        let has_status = self.candidate.kind == Kind::LoadBalancer;
        let status = has_status.then(|| Arc::new(status(self.candidate, self.outcome, self.ip_mode, &service)));
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
        notes: &mut Vec<String>,
    ) -> Result<Vec<ServicePort>, Refusal> {
        if let Some(refusal) = self.policy.refusal(spec, self.candidate.kind) {
            return Err(refusal);
        }
        let mut ports = Vec::new();
        let mut fenced = 0;
        let mut ineligible = None;
        for port in &spec.ports {
            for &family in &spec.families {
                let vips: Vec<IpAddr> = self.outcome.addresses.iter().copied().filter(|a| Family::of(*a) == family).collect();
                if vips.is_empty() && self.candidate.kind == Kind::LoadBalancer {
                    continue;
                }
                let selection = self.select(spec, slices, port, family);
                fenced += selection.fenced;
                notes.extend(selection.notes);
                ineligible = ineligible.or(selection.ineligible);
                if let Some(refusal) = self.policy.refuses_endpoints(port, &selection.backends) {
                    return Err(refusal);
                }
                let size = table(tables, (port.protocol, port.port, family), selection.backends.len());
                ports.push(service_port(port, family, vips, size, selection.backends));
            }
        }
        let has_none = ports.iter().all(|port| port.backends.is_empty());
        if has_none && let Some(message) = ineligible {
            return Err(Refusal { reason: Reason::NoEligibleNode, message });
        }
        notes.extend(ineligible);
        if fenced > 0 && has_none {
            let message = "none of its backends may be reached through a gateway; each is named in the log with the reason";
            return Err(Refusal { reason: Reason::Refused, message: message.to_owned() });
        }
        Ok(ports)
    }
}

impl Builder<'_> {
    fn health(&self, spec: Option<&ServiceSpec>) -> HealthCheck {
        let Some(spec) = spec else { return self.settings.health.clone() };
        let node_health_port = spec.node_health_port.filter(|_| self.policy.target == Target::Node);
        HealthCheck { node_health_port, ..spec.health.over(&self.settings.health) }
    }

    /// The backends of one port. Inside a tunnel's packets a backend of the other family does as well, where there is none
    /// of this one.
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
                let choice = NodeChoice { nodes: self.world.nodes(), local: spec.local, is_tunnel };
                choice.select(slices, port, self.policy.port_at_nodes(port), family, self.fence)
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
    }
}

/// The size of one table: chosen when it gets its first backends, it only grows.
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
pub(crate) mod tests {
    use std::path::PathBuf;

    use proto::{Mode, Scheduler};
    use serde_json::{Value, json};

    use super::*;
    use crate::settings::{Defaults, Source};
    use crate::source::Change;

    /// Settings with one pool, 192.0.2.100-199.
    pub(crate) fn settings() -> ControllerSettings {
        let ranges = vec!["192.0.2.100-192.0.2.199".parse().unwrap()];
        ControllerSettings {
            listen: PathBuf::from("/nonexistent/config.sock"),
            group: "default".to_owned(),
            source: Source::Manifests { dir: PathBuf::from("/nonexistent"), status_dir: PathBuf::from("/nonexistent") },
            load_balancer_class: "sluice.dev/gateway".to_owned(),
            defaults: Defaults { mode: Mode::Nat, scheduler: Scheduler::Maglev, drain_timeout: Duration::from_secs(300) },
            health: HealthCheck::default(),
            backends_allowed: None,
            cluster_cidrs: Vec::new(),
            pools: vec![Pool { name: "default".to_owned(), ranges, announce: proto::Announce::L2 }],
            reserved: Vec::new(),
        }
    }

    fn service(name: &str, spec: Value) -> Value {
        let mut object = json!({"metadata": {"name": name, "namespace": "shop"},
            "spec": {"type": "LoadBalancer", "loadBalancerClass": "sluice.dev/gateway", "ports": [{"port": 80}]}});
        for (key, value) in spec.as_object().unwrap() {
            object["spec"][key] = value.clone();
        }
        object
    }

    fn apply(world: &mut World, object: Value) {
        world.apply(Change::ServiceApplied(Box::new(serde_json::from_value(object).unwrap())));
    }

    fn endpoints(world: &mut World, of: &str, addresses: &[String]) {
        let list: Vec<Value> = addresses.iter().map(|address| json!({"addresses": [address]})).collect();
        let family = if addresses.iter().any(|a| a.contains(':')) { "IPv6" } else { "IPv4" };
        let object = json!({"metadata": {"name": format!("{of}-{family}"), "namespace": "shop",
            "labels": {"kubernetes.io/service-name": of}}, "addressType": family, "ports": [{"port": 8080}], "endpoints": list});
        world.apply(Change::SliceApplied(Box::new(serde_json::from_value(object).unwrap())));
    }

    fn named(name: &str) -> ServiceName {
        ServiceName::new("shop", name)
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn a_service_of_our_class_is_served_at_an_address_of_the_pool() {
        let mut world = World::default();
        apply(&mut world, service("web", json!({})));
        endpoints(&mut world, "web", &texts(&["10.0.0.1", "10.0.0.2"]));
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        let planned = &plan.services[&named("web")];
        assert_eq!(planned.refusal, None);
        assert_eq!(planned.ports[0].vips, ["192.0.2.100".parse::<IpAddr>().unwrap()]);
        assert_eq!(planned.ports[0].backends.len(), 2);
        assert_eq!(planned.ports[0].maglev.size, 509);
        let ingress = Ingress { ip: "192.0.2.100".parse().unwrap(), ip_mode: IpMode::Proxy };
        assert_eq!(plan.statuses[&named("web")].write.ingress, [ingress]);
    }

    #[test]
    fn services_of_other_classes_and_of_none_are_not_ours() {
        let mut world = World::default();
        apply(&mut world, service("other", json!({"loadBalancerClass": "example.com/lb"})));
        apply(&mut world, service("classless", json!({"loadBalancerClass": null})));
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        assert!(plan.services.is_empty() && plan.statuses.is_empty());
    }

    #[test]
    fn a_refused_service_is_in_the_plan_with_its_refusal_and_no_ports() {
        let mut world = World::default();
        apply(&mut world, service("web", json!({"sessionAffinity": "Cookie"})));
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        let planned = &plan.services[&named("web")];
        assert_eq!(planned.refusal.as_ref().unwrap().reason, Reason::Refused);
        assert!(planned.ports.is_empty() && !plan.statuses[&named("web")].served);
        assert!(plan.notes[0].text.contains("sessionAffinity"), "{:?}", plan.notes);
    }

    #[test]
    fn only_a_service_that_changed_is_a_new_one() {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        apply(&mut world, service("a", json!({})));
        apply(&mut world, service("b", json!({})));
        endpoints(&mut world, "a", &texts(&["10.0.0.1"]));
        let first = plan(&world, &settings(), &mut memory, now);
        endpoints(&mut world, "a", &texts(&["10.0.0.2"]));
        apply(&mut world, service("c", json!({})));
        let second = plan(&world, &settings(), &mut memory, now);
        let same = |name| Arc::ptr_eq(&first.services[&named(name)], &second.services[&named(name)]);
        assert!(same("b") && !same("a"));
        assert_eq!(second.services.len(), 3);
    }

    #[test]
    fn a_node_port_service_has_its_port_and_no_address_and_no_status() {
        let mut world = World::default();
        let ports = json!([{"port": 80, "nodePort": 30080}]);
        apply(&mut world, service("web", json!({"type": "NodePort", "loadBalancerClass": null, "ports": ports})));
        apply(&mut world, service("web2", json!({"type": "NodePort", "loadBalancerClass": null, "ports": ports})));
        endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        let port = &plan.services[&named("web")].ports[0];
        assert_eq!((port.node_port, port.vips.len(), port.backends.len()), (Some(30080), 0, 1));
        assert!(plan.statuses.is_empty());
        let refusal = plan.services[&named("web2")].refusal.clone().unwrap();
        assert!(refusal.reason == Reason::Conflict && refusal.message.contains("shop/web"), "{}", refusal.message);
    }

    #[test]
    fn both_families_have_their_own_backends() {
        let mut settings = settings();
        settings.pools[0].ranges.push("2001:db8::1:0/112".parse().unwrap());
        let mut world = World::default();
        apply(&mut world, service("web", json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"]})));
        endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
        endpoints(&mut world, "web", &texts(&["fd00::1", "fd00::2"]));
        let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
        let ports = &plan.services[&named("web")].ports;
        let seen: Vec<_> = ports.iter().map(|port| (port.family, port.vips.len(), port.backends.len())).collect();
        assert_eq!(seen, [(Family::V6, 1, 2), (Family::V4, 1, 1)]);
    }

    #[test]
    fn a_service_all_of_whose_backends_are_fenced_off_is_refused_and_one_with_some_left_is_not() {
        let mut world = World::default();
        apply(&mut world, service("web", json!({})));
        endpoints(&mut world, "web", &texts(&["192.0.2.150"]));
        let mut memory = Memory::default();
        let first = plan(&world, &settings(), &mut memory, Instant::now());
        assert_eq!(first.services[&named("web")].refusal.as_ref().unwrap().reason, Reason::Refused);
        assert!(first.notes.iter().any(|note| note.text.contains("192.0.2.150:8080") && note.text.contains("pool")));
        endpoints(&mut world, "web", &texts(&["192.0.2.150", "10.0.0.1"]));
        let second = plan(&world, &settings(), &mut memory, Instant::now());
        assert_eq!(second.services[&named("web")].refusal, None);
        assert_eq!(second.services[&named("web")].ports[0].backends.len(), 1);
    }

    #[test]
    fn a_table_grows_and_never_shrinks_while_the_service_lives() {
        let (mut world, mut memory) = (World::default(), Memory::default());
        apply(&mut world, service("web", json!({})));
        let mut size_with = |backends: u8| {
            let addresses: Vec<String> = (1..=backends).map(|last| format!("10.0.0.{last}")).collect();
            endpoints(&mut world, "web", &addresses);
            let plan = plan(&world, &settings(), &mut memory, Instant::now());
            plan.services[&named("web")].ports[0].maglev.size
        };
        assert_eq!([0, 1, 2, 3, 10, 1, 0].map(&mut size_with), [251, 251, 251, 1021, 1021, 1021, 1021]);
    }

    #[test]
    fn what_a_service_asks_for_reaches_it() {
        let mut world = World::default();
        let mut object = service(
            "web",
            json!({"sessionAffinity": "ClientIP", "externalTrafficPolicy": "Local",
            "loadBalancerSourceRanges": ["198.51.100.0/24"]}),
        );
        object["metadata"]["annotations"] = json!({"sluice.dev/health-check": "none", "sluice.dev/drain-timeout": "1m",
            "sluice.dev/addresses": "192.0.2.177", "sluice.dev/ip-mode": "Proxy", "sluice.dev/mode": "ipip",
            "sluice.dev/target": "endpoint", "sluice.dev/scheduler": "sh", "sluice.dev/idle-timeout": "3h"});
        apply(&mut world, object);
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        let planned = &plan.services[&named("web")];
        assert_eq!(planned.refusal, None);
        assert_eq!((planned.health.probe, planned.drain_timeout), (proto::Probe::None, Duration::from_secs(60)));
        assert_eq!((planned.mode, planned.target, planned.scheduler), (Mode::Ipip, Target::Endpoint, Scheduler::SourceHash));
        assert_eq!(
            (planned.affinity, planned.idle_timeout),
            (Some(Duration::from_secs(10_800)), Some(Duration::from_secs(10_800)))
        );
        assert_eq!((planned.local, &planned.source_ranges), (true, &Some(vec!["198.51.100.0/24".parse().unwrap()])));
        let ingress = Ingress { ip: "192.0.2.177".parse().unwrap(), ip_mode: IpMode::Proxy };
        assert_eq!(plan.statuses[&named("web")].write.ingress, [ingress]);
    }

    #[test]
    fn a_mode_that_changes_no_port_refuses_a_service_whose_endpoints_listen_on_another() {
        let mut world = World::default();
        for (name, port) in [("same", 8080), ("other", 80)] {
            let mut object = service(name, json!({"ports": [{"port": port}]}));
            object["metadata"]["annotations"] = json!({"sluice.dev/mode": "dsr", "sluice.dev/target": "endpoint"});
            apply(&mut world, object);
            endpoints(&mut world, name, &texts(&["10.0.0.1"]));
        }
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        assert_eq!(plan.services[&named("same")].refusal, None);
        let refusal = plan.services[&named("other")].refusal.clone().unwrap();
        assert!(refusal.reason == Reason::Refused && refusal.message.contains("port 80"), "{}", refusal.message);
    }

    fn node(world: &mut World, name: &str, labels: Value, addresses: &[&str]) {
        let list: Vec<Value> = addresses.iter().map(|a| json!({"type": "InternalIP", "address": a})).collect();
        let object = json!({"metadata": {"name": name, "labels": labels}, "status": {"addresses": list}});
        world.apply(Change::NodeApplied(Box::new(serde_json::from_value(object).unwrap())));
    }

    fn annotated(name: &str, mode: &str, target: &str, spec: Value) -> Value {
        let mut object = service(name, spec);
        object["metadata"]["annotations"] = json!({"sluice.dev/mode": mode, "sluice.dev/target": target});
        object
    }

    fn addresses(service: &Service) -> Vec<String> {
        service.ports.iter().flat_map(|port| &port.backends).map(|backend| backend.address.to_string()).collect()
    }

    #[test]
    fn nodes_take_what_is_for_the_vip_at_the_services_port_and_what_is_rewritten_at_the_node_port() {
        let mut world = World::default();
        node(&mut world, "a", json!({}), &["10.0.1.1", "fd00::1"]);
        let ports = json!([{"port": 80, "nodePort": 30080}]);
        for mode in ["nat", "dnat", "dsr", "ipip", "gue"] {
            apply(&mut world, annotated(mode, mode, "node", json!({"ports": ports})));
        }
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        for mode in ["nat", "dnat"] {
            assert_eq!(addresses(&plan.services[&named(mode)]), ["10.0.1.1:30080"], "{mode}");
        }
        for mode in ["dsr", "ipip", "gue"] {
            assert_eq!(addresses(&plan.services[&named(mode)]), ["10.0.1.1:80"], "{mode}");
        }
    }

    #[test]
    fn a_service_follows_the_nodes_and_one_to_endpoints_is_not_touched_by_them() {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        apply(&mut world, annotated("nodes", "dsr", "node", json!({})));
        apply(&mut world, service("web", json!({})));
        let first = plan(&world, &settings(), &mut memory, now);
        let refusal = first.services[&named("nodes")].refusal.clone().unwrap();
        assert!(refusal.reason == Reason::NoEligibleNode && refusal.message.contains("Node"), "{}", refusal.message);
        node(&mut world, "a", json!({}), &["10.0.1.1"]);
        let second = plan(&world, &settings(), &mut memory, now);
        assert_eq!(addresses(&second.services[&named("nodes")]), ["10.0.1.1:80"]);
        assert!(Arc::ptr_eq(&first.services[&named("web")], &second.services[&named("web")]));
        node(&mut world, "a", json!({"node.kubernetes.io/exclude-from-external-load-balancers": ""}), &["10.0.1.1"]);
        let third = plan(&world, &settings(), &mut memory, now);
        let refusal = third.services[&named("nodes")].refusal.clone().unwrap();
        assert!(refusal.message.contains("exclude-from-external-load-balancers"), "{}", refusal.message);
        assert_eq!(refusal.reason, Reason::NoEligibleNode);
    }

    #[test]
    fn under_local_kube_proxys_word_on_a_node_counts_where_nodes_are_targets() {
        let mut world = World::default();
        node(&mut world, "a", json!({}), &["10.0.1.1"]);
        let spec =
            json!({"externalTrafficPolicy": "Local", "healthCheckNodePort": 31000, "ports": [{"port": 80, "nodePort": 30080}]});
        apply(&mut world, annotated("nodes", "nat", "node", spec.clone()));
        apply(&mut world, annotated("pods", "nat", "endpoint", spec));
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        let port = |name| plan.services[&named(name)].health.node_health_port;
        assert_eq!([port("nodes"), port("pods")], [Some(31_000), None]);
        let nodes = &plan.services[&named("nodes")];
        assert!(nodes.refusal.is_none() && nodes.local && addresses(nodes).is_empty(), "no endpoint, no node");
    }

    #[test]
    fn a_tunnel_leads_to_endpoints_of_the_other_family_where_there_are_none_of_its_own() {
        let mut world = World::default();
        for mode in ["gue", "dnat"] {
            apply(&mut world, annotated(mode, mode, "endpoint", json!({"ports": [{"port": 8080}]})));
            endpoints(&mut world, mode, &texts(&["fd00::1"]));
        }
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        assert_eq!(addresses(&plan.services[&named("gue")]), ["[fd00::1]:8080"]);
        assert_eq!(plan.services[&named("gue")].ports[0].family, Family::V4);
        assert!(addresses(&plan.services[&named("dnat")]).is_empty());
    }

    #[test]
    fn of_two_families_one_may_do_without_nodes_and_that_is_noted() {
        let mut settings = settings();
        settings.pools[0].ranges.push("2001:db8::1:0/112".parse().unwrap());
        let mut world = World::default();
        node(&mut world, "a", json!({}), &["10.0.1.1"]);
        apply(&mut world, annotated("web", "dsr", "node", json!({"ipFamilyPolicy": "RequireDualStack"})));
        let plan = plan(&world, &settings, &mut Memory::default(), Instant::now());
        assert_eq!(addresses(&plan.services[&named("web")]), ["10.0.1.1:80"]);
        assert!(plan.notes.iter().any(|note| note.text.contains("no InternalIP of family IPv6")), "{:?}", plan.notes);
    }

    /// The Service as an API server has it, in this mode and with this status.
    fn stored(mode: &str, version: &str, ip_mode: &str) -> Value {
        let mut object = annotated("web", mode, "endpoint", json!({"ports": [{"port": 8080}]}));
        object["metadata"]["uid"] = "u".into();
        object["metadata"]["resourceVersion"] = version.into();
        object["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.100", "ipMode": ip_mode}]}});
        object["metadata"]["managedFields"] = json!([{"manager": "sluice", "subresource": "status"}]);
        object
    }

    #[test]
    fn towards_the_vip_the_status_comes_first_and_away_from_it_the_gateways() {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        let mut seen = |object: Value, now: Instant| {
            apply(&mut world, object);
            let plan = plan(&world, &settings(), &mut memory, now);
            (plan.services[&named("web")].mode, plan.statuses[&named("web")].write.ingress[0].ip_mode, plan.again_at)
        };
        assert_eq!(seen(stored("nat", "1", "Proxy"), now), (Mode::Nat, IpMode::Proxy, None));
        let until = now + STATUS_WAITED_FOR;
        assert_eq!(seen(stored("dsr", "2", "Proxy"), now), (Mode::Nat, IpMode::Vip, Some(until)));
        assert_eq!(seen(stored("dsr", "3", "VIP"), now), (Mode::Dsr, IpMode::Vip, None));
        assert_eq!(seen(stored("nat", "4", "VIP"), now), (Mode::Nat, IpMode::Proxy, None));
        assert_eq!(seen(stored("nat", "5", "Proxy"), now), (Mode::Nat, IpMode::Proxy, None));
        assert_eq!(seen(stored("dnat", "6", "Proxy"), now).0, Mode::Nat);
        assert_eq!(seen(stored("dnat", "6", "Proxy"), until), (Mode::Dnat, IpMode::Vip, None), "it waits no longer");
    }

    #[test]
    fn endpoints_change_while_a_mode_waits_for_its_status_and_manifests_do_not_wait() {
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        apply(&mut world, stored("nat", "1", "Proxy"));
        plan(&world, &settings(), &mut memory, now);
        apply(&mut world, stored("dsr", "2", "Proxy"));
        let first = plan(&world, &settings(), &mut memory, now);
        endpoints(&mut world, "web", &texts(&["10.0.0.1"]));
        let second = plan(&world, &settings(), &mut memory, now + STATUS_WAITED_FOR / 2);
        assert_eq!(second.services[&named("web")].mode, Mode::Nat);
        assert_eq!((addresses(&second.services[&named("web")]).len(), second.again_at), (1, first.again_at));
        let (mut world, mut memory) = (World::default(), Memory::default());
        for mode in ["nat", "dsr"] {
            let mut object = stored(mode, "", "Proxy");
            object["metadata"]["uid"] = "".into();
            apply(&mut world, object);
            let plan = plan(&world, &settings(), &mut memory, now);
            assert_eq!(plan.services[&named("web")].mode.as_str(), mode);
        }
    }

    #[test]
    fn hints_and_the_internal_policy_have_no_effect() {
        let mut world = World::default();
        apply(&mut world, service("web", json!({"internalTrafficPolicy": "Local", "trafficDistribution": "PreferSameZone"})));
        let endpoint = |last: u8, zone: &str| {
            json!({"addresses": [format!("10.0.0.{last}")], "nodeName": zone, "zone": zone,
            "hints": {"forZones": [{"name": zone}], "forNodes": [{"name": zone}]}})
        };
        let slice = json!({"metadata": {"name": "web-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [endpoint(1, "a"), endpoint(2, "b")]});
        world.apply(Change::SliceApplied(Box::new(serde_json::from_value(slice).unwrap())));
        let plan = plan(&world, &settings(), &mut Memory::default(), Instant::now());
        assert_eq!(addresses(&plan.services[&named("web")]), ["10.0.0.1:8080", "10.0.0.2:8080"]);
    }

    #[test]
    fn a_service_that_waits_for_an_address_gets_it_when_it_is_free() {
        let mut settings = settings();
        settings.pools[0].ranges = vec!["192.0.2.100".parse().unwrap()];
        let (mut world, mut memory, now) = (World::default(), Memory::default(), Instant::now());
        apply(&mut world, service("a", json!({})));
        plan(&world, &settings, &mut memory, now);
        world.apply(Change::ServiceDeleted(named("a")));
        apply(&mut world, service("b", json!({})));
        let waiting = plan(&world, &settings, &mut memory, now);
        assert_eq!(waiting.services[&named("b")].refusal.as_ref().unwrap().reason, Reason::Exhausted);
        let later = plan(&world, &settings, &mut memory, waiting.again_at.unwrap());
        assert_eq!(later.services[&named("b")].refusal, None);
    }
}
