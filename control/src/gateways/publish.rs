//! The published state, its generation, and a log of recent changes.
//!
//! Invariant: within an epoch the counter grows by one with every state that differs from the previous one. A connected
//! gateway always gets the difference to the newest state; nothing is queued for a slow one. A changed set of nodes is
//! sent by itself, without the Services that name it, unless the gateway does not support sets.

use std::collections::BTreeSet;
use std::sync::Arc;

use imbl::Vector;
use imbl::ordmap::DiffItem;
use proto::convert;
use proto::{Generation, NodeSets, Pool, Service, ServiceName, Services, State, v1};

/// Maximum number of changed names in the log. A gateway that missed fewer changes gets only those. 65,536 names of
/// about 100 bytes are 7 MB; beyond that a comparison by content hashes is as good.
const NAMES_MAX: usize = 65_536;

/// A published state and the recent changes that led to it.
#[derive(Clone, Debug, Default)]
pub struct Published {
    /// The state.
    pub state: Arc<State>,
    /// Shared with previous states, as the Services are.
    log: Vector<Step>,
    /// Number of names in the log.
    names: usize,
    /// The sets of nodes that Services name.
    node_sets: NodeSets,
    /// Counter of the last state in which one of them changed.
    node_sets_changed: u64,
    /// Number of Services that gateways are to serve, those not refused.
    served: usize,
}

#[derive(Clone, Debug)]
struct Step {
    counter: u64,
    changed: Arc<[ServiceName]>,
}

impl Published {
    /// The first state of an epoch.
    #[must_use]
    pub fn first(epoch: String, services: Services, pools: Vec<Pool>) -> Self {
        let generation = Generation { epoch, counter: 1 };
        let state = State { generation, services, pools };
        let served = state.services.values().filter(|service| is_served(service)).count();
        Self { node_sets: state.node_sets(), node_sets_changed: 1, state: Arc::new(state), served, ..Self::default() }
    }

    /// The next state, unless nothing changed.
    #[must_use]
    pub fn next(&self, services: Services, pools: Vec<Pool>) -> Option<Self> {
        let node_sets = self.newer_sets(&services);
        let are_others = node_sets != self.node_sets;
        let is_told_by_sets = |item: &DiffItem<'_, '_, ServiceName, Arc<Service>>| {
            let DiffItem::Update { old: (_, old), new: (_, new) } = item else { return false };
            are_others && old.with_sets(&node_sets).is_some_and(|with| with == ***new)
        };
        let items = self.state.services.diff(&services).filter(|item| !is_told_by_sets(item));
        let changed: Arc<[ServiceName]> = items.map(|item| name(&item).clone()).collect();
        if changed.is_empty() && !are_others && pools == self.state.pools {
            return None;
        }
        let counter = self.state.generation.counter + 1;
        let generation = Generation { epoch: self.state.generation.epoch.clone(), counter };
        let mut log = self.log.clone();
        let mut names = self.names + changed.len();
        log.push_back(Step { counter, changed });
        // Entries count as well, because a change of pools alone has no names.
        while names + log.len() > NAMES_MAX {
            names -= log.pop_front().map_or(0, |step| step.changed.len());
        }
        let node_sets_changed = if are_others { counter } else { self.node_sets_changed };
        let served = self.served_with(&services);
        Some(Self { state: Arc::new(State { generation, services, pools }), log, names, node_sets, node_sets_changed, served })
    }

    /// Number of Services that gateways are to serve, those not refused.
    #[must_use]
    pub const fn served(&self) -> usize {
        self.served
    }

    /// The same with `services` instead of the current ones, by those that differ.
    fn served_with(&self, services: &Services) -> usize {
        let count = |service: &Arc<Service>| usize::from(is_served(service));
        self.state.services.diff(services).fold(self.served, |served, item| match item {
            DiffItem::Add(_, new) => served + count(new),
            DiffItem::Remove(_, old) => served - count(old),
            DiffItem::Update { old: (_, old), new: (_, new) } => served - count(old) + count(new),
        })
    }

    /// The sets that `services` name, merged into the current ones.
    fn newer_sets(&self, services: &Services) -> NodeSets {
        let mut sets = self.node_sets.clone();
        for item in self.state.services.diff(services) {
            let (DiffItem::Add(_, new) | DiffItem::Update { new: (_, new), .. }) = item else { continue };
            for set in new.node_sets() {
                if sets.get(&set.name) != Some(set) {
                    sets.insert(set.name.clone(), Arc::clone(set));
                }
            }
        }
        sets
    }

    /// The full state, for a gateway with or without support for sets of nodes.
    #[must_use]
    pub fn full(&self, knows_sets: bool) -> v1::WatchResponse {
        if knows_sets { convert::full(&self.state) } else { convert::full(&self.state.listed()) }
    }

    /// The answer to a gateway's hello: the changes since its generation; if the log does not reach back that far, the
    /// differences to its hashes; without hashes, the full state.
    #[must_use]
    pub fn answer(&self, hello: &v1::Hello) -> v1::WatchResponse {
        let Some(have) = hello.have.clone().map(Generation::from) else { return self.full(hello.node_sets) };
        if let Some(changes) = self.since(&have, hello.node_sets) {
            return changes;
        }
        if hello.hashes.is_empty() {
            return self.full(hello.node_sets);
        }
        if hello.node_sets {
            convert::difference_by_hashes(&hello.hashes, &self.state)
        } else {
            convert::difference_by_hashes(&hello.hashes, &self.state.listed())
        }
    }

    /// The changes since `have` if the log reaches back that far, for a gateway with or without support for sets of
    /// nodes.
    #[must_use]
    pub fn since(&self, have: &Generation, knows_sets: bool) -> Option<v1::WatchResponse> {
        let now = &self.state.generation;
        let first = self.log.front().map_or(now.counter + 1, |step| step.counter);
        if have.epoch != now.epoch || have.counter > now.counter || have.counter + 1 < first {
            return None;
        }
        let steps = self.log.iter().rev().take_while(|step| step.counter > have.counter);
        let mut names: BTreeSet<&ServiceName> = steps.flat_map(|step| step.changed.iter()).collect();
        let have_sets_changed = self.node_sets_changed > have.counter;
        if have_sets_changed && !knows_sets {
            let named = self.state.services.iter().filter(|(_, service)| service.node_sets().next().is_some());
            names.extend(named.map(|(name, _)| name));
        }
        let (present, removed): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| self.state.services.contains_key(*name));
        let services = present.iter().filter_map(|name| self.state.services.get(*name));
        let message = |service: &Arc<Service>| {
            if knows_sets { v1::Service::from(&**service) } else { v1::Service::from(&*service.listed()) }
        };
        let sets = self.node_sets.values().filter(|_| have_sets_changed && knows_sets);
        Some(v1::WatchResponse {
            generation: Some(now.into()),
            full: false,
            services: services.map(message).collect(),
            node_sets: sets.map(|set| v1::NodeSet::from(&**set)).collect(),
            removed: removed.iter().map(ToString::to_string).collect(),
            pools: self.state.pools.iter().map(v1::Pool::from).collect(),
            membership: None,
            arbitration: None,
            arbitration_only: false,
            draining: false,
            more: false,
        })
    }
}

fn is_served(service: &Service) -> bool {
    service.refusal.is_none()
}

fn name<'a, V>(item: &DiffItem<'a, 'a, ServiceName, V>) -> &'a ServiceName {
    match item {
        DiffItem::Add(name, _) | DiffItem::Remove(name, _) | DiffItem::Update { new: (name, _), .. } => name,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proto::{BackendState, Family, MaglevSpec, NodeBackend, NodeSet, NodesAt, Protocol, Reason, Refusal, ServicePort};

    use proptest::prelude::*;

    use super::*;

    /// A Service that differs from others of its name by its drain time.
    pub(crate) fn service(name: &str, version: u64) -> Arc<Service> {
        Arc::new(Service {
            drain_timeout: Duration::from_secs(version),
            ..Service::new(ServiceName::new("shop", name), Vec::new())
        })
    }

    pub(crate) fn services(list: &[(&str, u64)]) -> Services {
        list.iter().map(|(name, version)| (ServiceName::new("shop", name), service(name, *version))).collect()
    }

    /// Applies a message as a gateway does.
    pub(crate) fn follow(have: &mut BTreeMap<String, u64>, message: &v1::WatchResponse) {
        if message.full {
            have.clear();
        }
        have.retain(|name, _| !message.removed.contains(name));
        have.extend(message.services.iter().map(|s| (format!("{}/{}", s.namespace, s.name), s.drain_timeout_ms / 1000)));
    }

    fn content(state: &State) -> BTreeMap<String, u64> {
        state.services.iter().map(|(name, service)| (name.to_string(), service.drain_timeout.as_secs())).collect()
    }

    #[test]
    fn an_equal_state_is_not_a_new_generation() {
        let kept = services(&[("a", 1)]);
        let first = Published::first("e".to_owned(), kept.clone(), Vec::new());
        assert!(first.next(kept, Vec::new()).is_none());
    }

    /// Services with these nodes as backends, each at its own port.
    fn to_nodes(names: &[&str], nodes: &[&str]) -> Services {
        let node = |text: &&str| NodeBackend { address: text.parse().unwrap(), weight: 1, state: BackendState::Active };
        let nodes = nodes.iter().map(node).collect();
        let set = Arc::new(NodeSet { name: "v4".to_owned(), family: Some(Family::V4), nodes });
        let service = |(port, name): (u16, &&str)| {
            let port = ServicePort {
                nodes: Some(NodesAt { set: Arc::clone(&set), port }),
                ..ServicePort::new(Protocol::Tcp, Family::V4, 80, MaglevSpec { size: 251, seed: 0, hash_version: 1 })
            };
            let name = ServiceName::new("shop", name);
            (name.clone(), Arc::new(Service::new(name, vec![port])))
        };
        (30_000..).zip(names).map(service).collect()
    }

    #[test]
    fn a_changed_set_of_nodes_is_sent_once_and_as_backends_to_gateways_without_set_support() {
        let first = Published::first("e".to_owned(), to_nodes(&["a", "b"], &["10.0.1.1"]), Vec::new());
        let have = Generation { epoch: "e".to_owned(), counter: 1 };
        let next = first.next(to_nodes(&["a", "b", "c"], &["10.0.1.1", "10.0.1.2"]), Vec::new()).unwrap();
        let changes = next.since(&have, true).unwrap();
        let names = |message: &v1::WatchResponse| message.services.iter().map(|s| s.name.clone()).collect::<Vec<_>>();
        assert_eq!((names(&changes), changes.node_sets.len(), changes.node_sets[0].nodes.len()), (vec!["c".to_owned()], 1, 2));
        let listed = next.since(&have, false).unwrap();
        assert_eq!((names(&listed).len(), listed.node_sets.len(), listed.services[0].ports[0].backends.len()), (3, 0, 2));
        assert_eq!(next.state.services[&ServiceName::new("shop", "a")].ports[0].backend_count(), 2);
        // A change without nodes contains no set.
        let mut more = next.state.services.clone();
        more.extend(services(&[("d", 1)]));
        let last = next.next(more, Vec::new()).unwrap();
        assert!(last.since(&next.state.generation, true).unwrap().node_sets.is_empty());
        assert_eq!(last.since(&have, true).unwrap().node_sets.len(), 1);
        assert!(next.next(to_nodes(&["a", "b", "c"], &["10.0.1.1", "10.0.1.2"]), Vec::new()).is_none(), "the same again");
        for knows_sets in [true, false] {
            let hello = v1::Hello { node_sets: knows_sets, ..v1::Hello::default() };
            let answer = last.answer(&hello);
            assert_eq!((answer.full, answer.services.len(), answer.node_sets.len()), (true, 4, usize::from(knows_sets)));
        }
    }

    #[test]
    fn an_unknown_epoch_without_hashes_gets_everything() {
        let published = Published::first("e".to_owned(), services(&[("a", 1)]), Vec::new());
        let have = Some(v1::Generation { epoch: "other".to_owned(), counter: 1 });
        let answer = published.answer(&v1::Hello { have, ..v1::Hello::default() });
        assert!(answer.full && answer.services.len() == 1);
    }

    #[test]
    fn a_generation_from_the_future_gets_everything() {
        let published = Published::first("e".to_owned(), services(&[]), Vec::new());
        assert!(published.since(&Generation { epoch: "e".to_owned(), counter: 2 }, true).is_none());
        assert!(published.since(&Generation { epoch: "e".to_owned(), counter: 0 }, true).is_none());
        assert!(published.since(&Generation { epoch: "e".to_owned(), counter: 1 }, true).unwrap().services.is_empty());
    }

    proptest! {
        #[test]
        fn the_number_of_served_services_follows_each_change(
            steps in prop::collection::vec(prop::collection::btree_map("[a-e]", any::<bool>(), 0..5), 1..10),
        ) {
            let refusal = || Refusal { reason: Reason::Exhausted, message: "no address is free".to_owned() };
            let mut last: Option<Published> = None;
            for step in &steps {
                let one = |(name, is_served): (&String, &bool)| {
                    let service = Service { refusal: (!is_served).then(refusal), ..(*service(name, 1)).clone() };
                    (service.name.clone(), Arc::new(service))
                };
                let now: Services = step.iter().map(one).collect();
                last = match last {
                    None => Some(Published::first("e".to_owned(), now, Vec::new())),
                    Some(before) => before.next(now, Vec::new()).or(Some(before)),
                };
                let served = step.values().filter(|is_served| **is_served).count();
                prop_assert_eq!(last.as_ref().map(Published::served), Some(served));
            }
        }

        #[test]
        fn from_any_generation_the_changes_lead_to_the_newest(
            steps in prop::collection::vec(prop::collection::btree_map("[a-e]", 1u64..4, 0..5), 1..10),
            by_hashes in any::<bool>(),
        ) {
            let mut all: Vec<Published> = Vec::new();
            let mut kept: BTreeMap<(String, u64), Arc<Service>> = BTreeMap::new();
            for step in &steps {
                let mut now = Services::new();
                for (name, version) in step {
                    let one = kept.entry((name.clone(), *version)).or_insert_with(|| service(name, *version));
                    now.insert(one.name.clone(), Arc::clone(one));
                }
                match all.last() {
                    None => all.push(Published::first("e".to_owned(), now, Vec::new())),
                    Some(last) => all.extend(last.next(now, Vec::new())),
                }
            }
            let newest = all.last().unwrap();
            for old in &all {
                let mut have = content(&old.state);
                let mut hello = v1::Hello { have: Some((&old.state.generation).into()), ..v1::Hello::default() };
                if by_hashes {
                    hello.have = Some(v1::Generation { epoch: "other".to_owned(), counter: 7 });
                    hello.hashes = old.state.services.iter().map(|(n, s)| (n.to_string(), v1::Service::from(&**s).hash)).collect();
                }
                follow(&mut have, &newest.answer(&hello));
                prop_assert_eq!(&have, &content(&newest.state));
            }
        }
    }
}
