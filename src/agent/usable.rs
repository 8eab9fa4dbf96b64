//! The usable part of a state.
//!
//! Invariant: in a state from disk, a backend of target `endpoint` is used only after its probes passed. Until then it
//! is omitted, so that not even fail-open sends flows to an address that may belong to another tenant now. Backends
//! without a probe (UDP without a health check port, probe `none`), and all backends of a state that is too old, wait
//! for the controller, because a probe cannot detect that another tenant answers.

use std::sync::Arc;

use crate::agent::backend_health::{Health, Subject};
use proto::{GatewayState, Origin, Service, State, Target};

/// The part of `current` that may be used with `health`.
#[must_use]
pub fn usable(current: &GatewayState, health: &Health) -> Arc<State> {
    if current.origin.is_current() {
        return Arc::clone(&current.state);
    }
    let mut state = State::clone(&current.state);
    for service in current.state.services.values().filter(|service| service.target == Target::Endpoint) {
        let mut limited = Service::clone(service);
        let name = Arc::new(service.name.clone());
        for port in &mut limited.ports {
            let protocol = port.protocol;
            let is_proven = |address| health.proven.contains(&Subject { service: Arc::clone(&name), protocol, address });
            port.backends.retain(|backend| current.origin == Origin::Disk && is_proven(backend.address));
        }
        if limited != **service {
            state.services.insert(limited.name.clone(), Arc::new(limited));
        }
    }
    Arc::new(state)
}

#[cfg(test)]
mod tests {
    use proto::{Protocol, ServiceName};

    use super::*;
    use crate::controller_client::received::tests::{service, state};

    #[test]
    fn from_disk_only_proven_backends_are_used_and_from_the_controller_all() {
        let held = Arc::new(state("e", 1, &[service("web", &["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"])]));
        let proven = |service: &str, address: &str| Subject {
            service: Arc::new(ServiceName::new("default", service)),
            protocol: Protocol::Tcp,
            address: address.parse().unwrap(),
        };
        let proven = [proven("web", "10.0.0.2:80"), proven("web", "10.0.0.3:80"), proven("other", "10.0.0.1:80")];
        let health = Health { proven: proven.into_iter().collect(), ..Health::default() };
        let from = |origin| usable(&GatewayState { state: Arc::clone(&held), origin }, &health);
        assert!(Arc::ptr_eq(&from(Origin::Controller), &held));
        assert!(Arc::ptr_eq(&from(Origin::LastProcess), &held));
        assert!(from(Origin::Expired).services[&ServiceName::new("default", "web")].ports[0].backends.is_empty());
        let left = &from(Origin::Disk).services[&ServiceName::new("default", "web")].ports[0].backends;
        assert_eq!(left.iter().map(|b| b.address.to_string()).collect::<Vec<_>>(), ["10.0.0.2:80", "10.0.0.3:80"]);
    }

    #[test]
    fn from_disk_nodes_are_used_at_once() {
        let mut to_node = Service::clone(&service("web", &["10.0.0.1:30080"]));
        to_node.target = Target::Node;
        let held = Arc::new(state("e", 1, &[Arc::new(to_node)]));
        for origin in [Origin::Disk, Origin::Expired] {
            let known = GatewayState { state: Arc::clone(&held), origin };
            assert_eq!(usable(&known, &Health::default()), held);
        }
    }
}
