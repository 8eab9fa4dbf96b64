//! Troubles of Services and their backends, as a gateway serves them.

use std::collections::BTreeMap;

use super::findings::Findings;
use super::kind::Kind;
use crate::{LimitKind, Reason, v1};

/// Reasons of Services without backends.
const WITHOUT_BACKENDS: [&str; 2] = ["NoEndpoints", "NoMatchingPort"];
/// Unhealthy backends of a Service that a cause names.
const NAMED_MAX: usize = 2;

pub(super) fn look(services: &[v1::ServiceStatus], unhealthy: &[v1::BackendStatus], found: &mut Findings) {
    let mut of_service: BTreeMap<&str, Vec<&v1::BackendStatus>> = BTreeMap::new();
    for backend in unhealthy {
        of_service.entry(&backend.service).or_default().push(backend);
    }
    for service in services {
        let name = format!("{}/{}", service.namespace, service.name);
        let failing = of_service.get(name.as_str()).map_or(&[][..], Vec::as_slice);
        look_at_service(service, &format!("Service {name}"), failing, found);
    }
}

fn look_at_service(service: &v1::ServiceStatus, object: &str, failing: &[&v1::BackendStatus], found: &mut Findings) {
    let reason = service.reason.as_str();
    let says = || if service.message.is_empty() { reason.to_owned() } else { format!("{reason}: {}", service.message) };
    if reason.parse::<Reason>().is_ok() {
        found.add(Kind::NotServed, object, says());
    } else if service.backends == 0 || WITHOUT_BACKENDS.contains(&reason) {
        let why = if reason.is_empty() { "it has no backend that takes new connections".to_owned() } else { says() };
        found.add(Kind::NoEndpoints, object, why);
        return;
    } else if LimitKind::ALL.iter().any(|kind| reason.starts_with(kind.as_str())) {
        found.add(Kind::Limited, object, says());
    } else if !reason.is_empty() && reason != "NoHealthyBackend" {
        found.add(Kind::NotAsAsked, object, says());
    }
    let (backends, healthy) = (service.backends, service.healthy);
    if healthy < backends {
        let kind = match (healthy, service.fails_open) {
            (0, true) => Kind::FailOpen,
            (0, false) => Kind::NoHealthyBackend,
            _ => Kind::SomeUnhealthy,
        };
        let count = if healthy == 0 { format!("all {backends}") } else { format!("{} of {backends}", backends - healthy) };
        found.add(kind, object, format!("{count} backends are unhealthy{}", causes(failing)));
    }
}

/// `: tcp 10.0.0.1:80: connection refused; …; +3`.
fn causes(failing: &[&v1::BackendStatus]) -> String {
    let named = failing.iter().filter(|backend| !backend.reason.is_empty()).take(NAMED_MAX);
    let text = |backend: &v1::BackendStatus| {
        let target = format!("{} {}", backend.protocol, backend.address);
        // A probe of the backend's own port names it.
        let says_so = backend.reason.strip_prefix(&target).is_some_and(|rest| rest.starts_with([' ', ':']));
        if says_so { backend.reason.clone() } else { format!("{target}: {}", backend.reason) }
    };
    let mut texts: Vec<_> = named.map(|backend| text(backend)).collect();
    let others = failing.len() - texts.len();
    if others > 0 && !texts.is_empty() {
        texts.push(format!("+{others}"));
    }
    if texts.is_empty() { String::new() } else { format!(": {}", texts.join("; ")) }
}
