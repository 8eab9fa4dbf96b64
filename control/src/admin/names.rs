//! Resolution of names of backends, nodes, gateways and Services in requests of operators.
//!
//! Invariant: the error for an unknown name lists the existing ones; the error for an ambiguous name says how to
//! qualify it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use objects::text;
use proto::convert::service_name;
use proto::{Service, ServiceName, State};

use crate::world::overrides::{DrainTarget, Overrides};

/// Maximum number of names listed in an answer, which also has the number of further ones.
const LISTED_MAX: usize = 20;

/// All named things.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    /// Names of gateways: connected, disconnected or drained.
    pub(super) gateways: BTreeSet<String>,
    /// Names of nodes.
    pub(super) nodes: BTreeSet<String>,
}

/// Why a name cannot be resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NameError {
    #[error("{found:?} is neither a gateway ({gateways}) nor a node ({nodes}); a backend is ADDRESS:PORT or ADDRESS")]
    Unknown { found: String, gateways: String, nodes: String },
    #[error("there is no {kind} {found:?}; there are: {existing}")]
    Missing { kind: &'static str, found: String, existing: String },
    #[error("no Service has a backend {found}; there are: {backends}")]
    NoBackend { found: String, backends: String },
    #[error("{0:?} is the name of a gateway and of a node; write gateway/{0} or node/{0}")]
    Both(String),
    #[error("{found} is not drained; drained are: {drained}")]
    NotDrained { found: String, drained: String },
    #[error("Services of several namespaces are called {found:?}: {services}; write namespace/name")]
    SeveralServices { found: String, services: String },
    #[error("{service} has no backend {found}; it has: {backends}")]
    NotOfService { service: ServiceName, found: String, backends: String },
    #[error("{0:?} is no backend; expected ADDRESS:PORT, as `sluicectl backends` shows it")]
    NoAddress(String),
    #[error("no weight is set for {found} of {service}; weights are set for: {weights}")]
    NoWeight { service: String, found: String, weights: String },
}

/// Resolves the target of a drain.
pub(super) fn to_drain(text: &str, names: &Names, state: &State) -> Result<DrainTarget, NameError> {
    let what = if text.contains('/') { text.parse().map_err(|_| unknown(text, names))? } else { by_bare_name(text, names)? };
    let all_backends = || backends(state.services.values());
    match &what {
        DrainTarget::Gateway(name) if !names.gateways.contains(name) => Err(missing("gateway", name, &names.gateways)),
        DrainTarget::Node(name) if !names.nodes.contains(name) => Err(missing("node", name, &names.nodes)),
        DrainTarget::Backend(address) if !all_backends().any(|backend| backend == *address) => Err(no_backend(text, state)),
        DrainTarget::Address(address) if !all_backends().any(|backend| backend.ip() == *address) => Err(no_backend(text, state)),
        _ => Ok(what),
    }
}

/// Resolves the target of an undrain. The target may no longer exist.
pub(super) fn to_undrain(text: &str, overrides: &Overrides) -> Result<DrainTarget, NameError> {
    let is_meant = |what: &&DrainTarget| match what {
        _ if what.to_string() == text => true,
        DrainTarget::Gateway(name) | DrainTarget::Node(name) => name == text,
        DrainTarget::Backend(address) => text.parse() == Ok(*address),
        DrainTarget::Address(address) => text.parse() == Ok(*address),
    };
    let mut meant = overrides.drains().keys().filter(is_meant);
    match (meant.next(), meant.next()) {
        (Some(what), None) => Ok(what.clone()),
        (Some(_), Some(_)) => Err(NameError::Both(text.to_owned())),
        (None, _) => Err(NameError::NotDrained { found: text.to_owned(), drained: listed(overrides.drains().keys()) }),
    }
}

/// Resolves a Service: `namespace/name`, or an unambiguous name.
pub(super) fn service(text: &str, state: &State) -> Result<ServiceName, NameError> {
    let full = service_name(text).ok();
    let is_meant = |name: &&ServiceName| full.as_ref().map_or(name.name == text, |full| full == *name);
    let meant: Vec<&ServiceName> = state.services.keys().filter(is_meant).collect();
    match meant.as_slice() {
        [one] => Ok((*one).clone()),
        [] => Err(missing("Service", text, state.services.keys())),
        several => Err(NameError::SeveralServices { found: text.to_owned(), services: listed(several) }),
    }
}

/// A backend of a service.
pub(super) fn backend_of(text: &str, service: &ServiceName, state: &State) -> Result<SocketAddr, NameError> {
    let address: SocketAddr = text.parse().map_err(|_| NameError::NoAddress(text.to_owned()))?;
    let all: BTreeSet<SocketAddr> = backends(state.services.get(service)).collect();
    if all.contains(&address) {
        return Ok(address);
    }
    Err(NameError::NotOfService { service: service.clone(), found: text.to_owned(), backends: listed(&all) })
}

/// Resolves a stored weight, whose Service or backend may no longer exist.
pub(super) fn weighted_backend(
    service: &str,
    backend: &str,
    overrides: &Overrides,
) -> Result<(ServiceName, SocketAddr), NameError> {
    let all = overrides.weights().iter().flat_map(|(name, of)| of.keys().map(move |address| (name, *address)));
    let is_meant = |(name, address): &(&ServiceName, SocketAddr)| {
        (name.name == service || name.to_string() == service) && backend.parse() == Ok(*address)
    };
    let found = all.clone().find(is_meant).map(|(name, address)| (name.clone(), address));
    found.ok_or_else(|| NameError::NoWeight {
        service: service.to_owned(),
        found: backend.to_owned(),
        weights: listed(all.map(|(name, address)| format!("{address} of {name}"))),
    })
}

fn by_bare_name(text: &str, names: &Names) -> Result<DrainTarget, NameError> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(DrainTarget::Backend(address));
    }
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(DrainTarget::Address(address));
    }
    match (names.gateways.contains(text), names.nodes.contains(text)) {
        (true, true) => Err(NameError::Both(text.to_owned())),
        (true, false) => Ok(DrainTarget::Gateway(text.to_owned())),
        (false, true) => Ok(DrainTarget::Node(text.to_owned())),
        (false, false) => Err(unknown(text, names)),
    }
}

fn missing<T: ToString>(kind: &'static str, found: &str, existing: impl IntoIterator<Item = T>) -> NameError {
    NameError::Missing { kind, found: found.to_owned(), existing: listed(existing) }
}

fn unknown(text: &str, names: &Names) -> NameError {
    NameError::Unknown { found: text.to_owned(), gateways: listed(&names.gateways), nodes: listed(&names.nodes) }
}

fn no_backend(text: &str, state: &State) -> NameError {
    let all: BTreeSet<SocketAddr> = backends(state.services.values()).collect();
    NameError::NoBackend { found: text.trim_start_matches("backend/").to_owned(), backends: listed(&all) }
}

/// The addresses of all backends of these Services.
fn backends<'a>(services: impl IntoIterator<Item = &'a Arc<Service>>) -> impl Iterator<Item = SocketAddr> {
    let ports = services.into_iter().flat_map(|service| &service.ports);
    ports.flat_map(|port| port.all_backends()).map(|backend| backend.address)
}

/// Lists the first ones and the number of the others.
fn listed<T: ToString>(all: impl IntoIterator<Item = T>) -> String {
    text::listed(all, LISTED_MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proto::{Backend, BackendState, Family, MaglevSpec, Protocol, Service, ServicePort};

    use super::*;
    use crate::world::overrides::tests::drained;

    fn state() -> State {
        let service = |namespace: &str, name: &str, backends: &[&str]| {
            let backend = |text: &&str| Backend { address: text.parse().unwrap(), weight: 1, state: BackendState::Active };
            let port = ServicePort {
                backends: backends.iter().map(backend).collect(),
                ..ServicePort::new(Protocol::Tcp, Family::V4, 80, MaglevSpec { size: 251, seed: 0, hash_version: 1 })
            };
            Arc::new(Service::new(ServiceName::new(namespace, name), vec![port]))
        };
        let all =
            [service("shop", "web", &["10.0.0.1:80"]), service("shop", "db", &["10.0.0.2:5432"]), service("test", "web", &[])];
        State { services: all.into_iter().map(|one| (one.name.clone(), one)).collect(), ..State::default() }
    }

    fn names() -> Names {
        let set = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        Names { gateways: set(&["edge-1", "both"]), nodes: set(&["worker-1", "both"]) }
    }

    #[test]
    fn known_names_resolve_and_unknown_names_list_the_known_ones() {
        let rows = [
            ("10.0.0.1:80", Ok("backend/10.0.0.1:80")),
            ("10.0.0.2", Ok("backend/10.0.0.2")),
            ("backend/10.0.0.2", Ok("backend/10.0.0.2")),
            ("edge-1", Ok("gateway/edge-1")),
            ("worker-1", Ok("node/worker-1")),
            ("node/both", Ok("node/both")),
            ("both", Err("write gateway/both or node/both")),
            ("worker-9", Err("neither a gateway (both, edge-1) nor a node (both, worker-1)")),
            ("node/edge-1", Err("there is no node \"edge-1\"; there are: both, worker-1")),
            ("10.0.0.9:80", Err("no Service has a backend 10.0.0.9:80; there are: 10.0.0.1:80, 10.0.0.2:5432")),
            ("10.0.0.1:81", Err("no Service has a backend 10.0.0.1:81")),
            ("pod/x", Err("neither a gateway")),
        ];
        for (text, expected) in rows {
            let found = to_drain(text, &names(), &state()).map(|what| what.to_string()).map_err(|error| error.to_string());
            match expected {
                Ok(expected) => assert_eq!(found.as_deref(), Ok(expected), "{text}"),
                Err(expected) => assert!(found.as_ref().is_err_and(|error| error.contains(expected)), "{text}: {found:?}"),
            }
        }
    }

    #[test]
    fn any_name_of_a_drained_target_undrains_it_even_if_it_no_longer_exists() {
        let overrides = drained(&["node/gone", "gateway/edge-1", "node/edge-1", "backend/10.0.0.7:80", "backend/10.0.0.8"]);
        for (text, expected) in [
            ("gone", "node/gone"),
            ("node/edge-1", "node/edge-1"),
            ("10.0.0.7:80", "backend/10.0.0.7:80"),
            ("10.0.0.8", "backend/10.0.0.8"),
        ] {
            assert_eq!(to_undrain(text, &overrides).unwrap().to_string(), expected);
        }
        let error = to_undrain("10.0.0.8:80", &overrides).unwrap_err().to_string();
        assert!(error.contains("10.0.0.8:80 is not drained") && error.contains("node/gone"), "{error}");
        assert!(matches!(to_undrain("edge-1", &overrides), Err(NameError::Both(_))));
        assert!(to_undrain("x", &Overrides::default()).unwrap_err().to_string().contains("drained are: none"));
    }

    #[test]
    fn a_service_is_found_by_its_full_name_or_an_unambiguous_name() {
        assert_eq!(service("shop/web", &state()).unwrap(), ServiceName::new("shop", "web"));
        assert_eq!(service("db", &state()).unwrap(), ServiceName::new("shop", "db"));
        let error = service("web", &state()).unwrap_err().to_string();
        assert!(error.contains("shop/web, test/web"), "{error}");
        assert!(service("shop/x", &state()).unwrap_err().to_string().contains("there are: shop/db, shop/web, test/web"));
        let web = ServiceName::new("shop", "web");
        assert!(backend_of("10.0.0.1:80", &web, &state()).is_ok());
        assert!(backend_of("10.0.0.2:5432", &web, &state()).unwrap_err().to_string().contains("it has: 10.0.0.1:80"));
        assert!(matches!(backend_of("10.0.0.1", &web, &state()), Err(NameError::NoAddress(_))));
    }
}
