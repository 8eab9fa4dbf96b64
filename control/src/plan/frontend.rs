//! A frontend: what gateways listen at, for whom, and how they forward.
//!
//! Invariant: nothing after this depends on the kind of object that asks for it. A Service yields one frontend and one
//! source of backends (`selection::source`). Deliberately not here: the addresses (`addresses`, `externals`), and why a
//! frontend is not served (`unserved`).

use std::net::IpAddr;

use objects::{Candidate, PortSpec, ServiceSpec};
use proto::limits::KUBE_PROXY_HEALTH_PORT;
use proto::{Family, HealthCheck, Probe, Refusal, Service, ServiceName, ServicePort, Target};

use crate::config::settings::ControllerSettings;
use crate::plan::addresses::Allocation;
use crate::world::checkpoint::Policy;

mod policy;

/// What gateways listen at.
#[derive(Clone, Debug)]
pub struct Frontend<'a> {
    /// The object that asks for it.
    pub owner: &'a ServiceName,
    /// Allocated addresses, then permitted `externalIPs`.
    pub addresses: Vec<IpAddr>,
    /// The families in which it listens.
    pub families: &'a [Family],
    /// The ports; none if the object cannot be parsed.
    pub ports: &'a [PortSpec],
    /// Whether it listens at node ports, too.
    pub has_node_ports: bool,
    /// How its packets are forwarded.
    pub policy: Policy,
    /// Timeouts, health checks and permitted clients, as gateways get them; without ports.
    terms: Service,
}

/// One port of a frontend in one family.
#[derive(Clone, Debug)]
pub struct FrontendPort<'a> {
    /// The port.
    pub spec: &'a PortSpec,
    /// The family.
    pub family: Family,
    /// Its addresses of this family.
    pub vips: Vec<IpAddr>,
    /// The port at the node port addresses of gateways.
    pub node_port: Option<u16>,
}

impl<'a> Frontend<'a> {
    /// The frontend of a Service.
    #[must_use]
    pub fn of(candidate: &'a Candidate, allocation: &Allocation, policy: Policy, settings: &ControllerSettings) -> Self {
        let spec = candidate.wanted.as_ref().ok();
        Self {
            owner: &candidate.object.name,
            addresses: allocation.addresses().chain(allocation.externals.addresses.iter().copied()).collect(),
            families: spec.map_or(&[], |spec| &spec.families),
            ports: spec.map_or(&[], |spec| &spec.ports),
            has_node_ports: !allocation.withholds_node_ports,
            policy,
            terms: terms(&candidate.object.name, spec, policy, settings),
        }
    }

    /// Its ports in each family in which it listens.
    pub fn listening(&self) -> impl Iterator<Item = FrontendPort<'a>> {
        let ports = self.ports.iter().flat_map(|spec| self.families.iter().map(move |family| (spec, *family)));
        let port = |(spec, family): (&'a PortSpec, Family)| FrontendPort {
            spec,
            family,
            vips: self.addresses.iter().copied().filter(|address| Family::of(*address) == family).collect(),
            node_port: spec.node_port.filter(|_| self.has_node_ports),
        };
        ports.map(port).filter(|port| !port.vips.is_empty() || port.node_port.is_some())
    }

    /// What gateways get of it.
    #[must_use]
    pub fn service(self, ports: Vec<ServicePort>, refusal: Option<Refusal>) -> Service {
        Service { ports, refusal, ..self.terms }
    }
}

fn terms(name: &ServiceName, spec: Option<&ServiceSpec>, policy: Policy, settings: &ControllerSettings) -> Service {
    let health = spec.map_or_else(
        || settings.health.clone(),
        |spec| HealthCheck { node_health_port: node_health_port(spec, policy), ..spec.health.over(&settings.health) },
    );
    Service {
        mode: policy.mode,
        target: policy.target,
        scheduler: policy.scheduler,
        health: HealthCheck { probe: policy.probe, ..health },
        drain_timeout: spec.and_then(|spec| spec.drain_timeout).unwrap_or(settings.defaults.drain_timeout),
        affinity: spec.and_then(|spec| spec.affinity),
        affinity_scope: policy.affinity_scope,
        source_ranges: spec.and_then(|spec| spec.source_ranges.clone()),
        idle_timeout: spec.and_then(|spec| spec.idle_timeout),
        local: spec.is_some_and(|spec| spec.local),
        ..Service::new(name.clone(), Vec::new())
    }
}

/// Where nodes report their health. Without a `healthCheckNodePort` kube-proxy answers for the whole node, unless it is
/// not kube-proxy that serves the Service, or the owner wants no probes.
fn node_health_port(spec: &ServiceSpec, policy: Policy) -> Option<u16> {
    let is_probed = policy.probe != Probe::None;
    let of_the_node = (spec.proxy_name.is_none() && is_probed).then_some(KUBE_PROXY_HEALTH_PORT);
    spec.node_health_port.or(of_the_node).filter(|_| policy.target == Target::Node)
}
