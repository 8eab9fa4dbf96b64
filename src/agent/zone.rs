//! Zone-aware routing: restricts a state to the backends that Kubernetes hints to the gateway's zone.
//!
//! Invariant: the state on disk and the state reported to controllers stay complete; only probes and workers see the
//! restricted one. A Service that did not change keeps its `Arc`.

use std::collections::BTreeMap;
use std::sync::Arc;

use imbl::ordmap::DiffItem;
use proto::{GatewayState, Service, ServiceName, Services, State};
use tokio::sync::watch;

use super::supervisor::Failure;

/// Restricts states to one zone.
#[derive(Debug)]
pub struct Zone {
    name: String,
    /// The Services of the last state, unrestricted.
    services: Services,
    /// Those of them that are restricted, in this form.
    narrowed: BTreeMap<ServiceName, Arc<Service>>,
}

impl Zone {
    /// The zone of this name.
    #[must_use]
    pub fn new(name: String) -> Self {
        Self { name, services: Services::new(), narrowed: BTreeMap::new() }
    }

    /// The state as it is used in this zone.
    pub fn narrow(&mut self, state: &Arc<State>) -> Arc<State> {
        for item in self.services.diff(&state.services) {
            let (name, before, now) = match item {
                DiffItem::Add(name, now) => (name, None, Some(now)),
                DiffItem::Update { old: (_, before), new: (name, now) } => (name, Some(before), Some(now)),
                DiffItem::Remove(name, before) => (name, Some(before), None),
            };
            let narrowed = self.narrowed.remove(name);
            let used = narrowed.as_ref().or(before).map(|service| &**service);
            if let Some(restricted) = now.and_then(|service| service.in_zone(&self.name, used)) {
                self.narrowed.insert(name.clone(), Arc::new(restricted));
            }
        }
        self.services = state.services.clone();
        if self.narrowed.is_empty() {
            return Arc::clone(state);
        }
        let mut restricted = State::clone(state);
        for (name, service) in &self.narrowed {
            restricted.services.insert(name.clone(), Arc::clone(service));
        }
        Arc::new(restricted)
    }
}

/// The task that restricts each state to the gateway's zone, until its input is closed. Cloned for each start.
#[derive(Clone, Debug)]
pub struct ZoneFilter {
    /// Key `zone`.
    pub zone: String,
    /// The current state.
    pub state: watch::Receiver<Option<GatewayState>>,
    /// Output: the state as it is used in the zone.
    pub zone_state: watch::Sender<Option<GatewayState>>,
}

impl ZoneFilter {
    /// Restricts every state, until the sender is dropped.
    ///
    /// # Errors
    /// Never.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { zone, mut state, zone_state } = self;
        let mut zone = Zone::new(zone);
        state.mark_changed();
        while state.changed().await.is_ok() {
            let now = state.borrow_and_update().clone();
            zone_state.send_replace(now.map(|now| GatewayState { state: zone.narrow(&now.state), ..now }));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proto::{BackendState, Origin, ZoneBackends};

    use super::*;
    use crate::controller_client::received::tests::{service, state};

    fn hinted(name: &str) -> Arc<Service> {
        let mut hinted = Service::clone(&service(name, &["10.0.0.1:80", "10.0.0.2:80"]));
        hinted.ports[0].zones = vec![ZoneBackends { zone: "a".to_owned(), backends: vec![1] }];
        Arc::new(hinted)
    }

    fn backends(state: &State, name: &str) -> Vec<String> {
        let port = &state.services[&ServiceName::new("default", name)].ports[0];
        port.backends.iter().map(|backend| backend.address.to_string()).collect()
    }

    #[test]
    fn services_with_hints_for_the_zone_are_narrowed_and_keep_their_arc_while_they_do_not_change() {
        let mut zone = Zone::new("a".to_owned());
        let (web, plain) = (hinted("web"), service("plain", &["10.0.0.3:80"]));
        let first = zone.narrow(&Arc::new(state("e", 1, &[Arc::clone(&web), Arc::clone(&plain)])));
        assert_eq!(
            (backends(&first, "web"), backends(&first, "plain")),
            (vec!["10.0.0.2:80".to_owned()], vec!["10.0.0.3:80".to_owned()])
        );
        let second = zone.narrow(&Arc::new(state("e", 2, &[web, service("plain", &["10.0.0.4:80"])])));
        let name = ServiceName::new("default", "web");
        assert!(Arc::ptr_eq(&first.services[&name], &second.services[&name]));
        assert!(Arc::ptr_eq(&first.services[&ServiceName::new("default", "plain")], &plain));
    }

    #[test]
    fn backends_keep_their_flows_when_hints_take_them_away() {
        let mut zone = Zone::new("a".to_owned());
        let states = |narrowed: &State| -> Vec<BackendState> {
            let port = &narrowed.services[&ServiceName::new("default", "web")].ports[0];
            port.backends.iter().map(|backend| backend.state).collect()
        };
        let plain = service("web", &["10.0.0.1:80", "10.0.0.2:80"]);
        assert_eq!(states(&zone.narrow(&Arc::new(state("e", 1, &[plain])))), [BackendState::Active; 2]);
        for counter in 2..4 {
            let hinted = Arc::new(state("e", counter, &[hinted("web")]));
            assert_eq!(states(&zone.narrow(&hinted)), [BackendState::Draining, BackendState::Active]);
        }
        let gone = Arc::new(state("e", 4, &[service("web", &["10.0.0.2:80"])]));
        assert_eq!(states(&zone.narrow(&gone)), [BackendState::Active]);
        assert_eq!(states(&zone.narrow(&Arc::new(state("e", 5, &[hinted("web")])))), [BackendState::Active]);
    }

    #[test]
    fn in_a_zone_without_hints_the_state_is_used_as_it_is() {
        let whole = Arc::new(state("e", 1, &[hinted("web")]));
        assert!(Arc::ptr_eq(&Zone::new("b".to_owned()).narrow(&whole), &whole));
    }

    #[tokio::test]
    async fn what_comes_to_be_known_is_passed_on_narrowed() {
        let (known, near) = (watch::Sender::new(None), watch::Sender::new(None));
        let mut seen = near.subscribe();
        let task = tokio::spawn(ZoneFilter { zone: "a".to_owned(), state: known.subscribe(), zone_state: near }.run());
        known.send_replace(Some(GatewayState { state: Arc::new(state("e", 1, &[hinted("web")])), origin: Origin::Disk }));
        let passed = seen.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        assert_eq!((backends(&passed.state, "web"), passed.origin), (vec!["10.0.0.2:80".to_owned()], Origin::Disk));
        drop(known);
        task.await.unwrap().unwrap();
    }
}
