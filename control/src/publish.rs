//! The state that gateways are given, its generation, and what changed lately.
//!
//! Invariant: within an epoch the counter grows by one with every state that differs from the one before. What a
//! connected gateway is sent is always the difference to the newest state; nothing is queued for a slow one.

use std::collections::BTreeSet;
use std::sync::Arc;

use imbl::Vector;
use imbl::ordmap::DiffItem;
use proto::convert;
use proto::{Generation, Pool, ServiceName, Services, State, v1};

/// Changed names that are remembered: a gateway that was away for fewer changes gets only those. 65,536 names of about
/// 100 bytes are 7 MB; beyond that a comparison by content hashes is as good.
const NAMES_MAX: usize = 65_536;

/// One state, and the way that led to it.
#[derive(Clone, Debug, Default)]
pub struct Published {
    /// The state.
    pub state: Arc<State>,
    /// Shared with the states before, as the Services are.
    log: Vector<Step>,
    /// In the log.
    names: usize,
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
        Self { state: Arc::new(State { generation, services, pools }), ..Self::default() }
    }

    /// The next state, unless it is the same.
    #[must_use]
    pub fn next(&self, services: Services, pools: Vec<Pool>) -> Option<Self> {
        let changed: Arc<[ServiceName]> = self.state.services.diff(&services).map(|item| name(&item).clone()).collect();
        if changed.is_empty() && pools == self.state.pools {
            return None;
        }
        let counter = self.state.generation.counter + 1;
        let generation = Generation { epoch: self.state.generation.epoch.clone(), counter };
        let mut log = self.log.clone();
        let mut names = self.names + changed.len();
        log.push_back(Step { counter, changed });
        // Steps count too: a change of pools alone has no names.
        while names + log.len() > NAMES_MAX {
            names -= log.pop_front().map_or(0, |step| step.changed.len());
        }
        Some(Self { state: Arc::new(State { generation, services, pools }), log, names })
    }

    /// What a gateway that says hello is sent: what changed since the generation it has; where that is not known, what
    /// its hashes lack; without those, everything.
    #[must_use]
    pub fn answer(&self, hello: &v1::Hello) -> v1::WatchResponse {
        let Some(have) = hello.have.clone().map(Generation::from) else { return convert::full(&self.state) };
        if let Some(changes) = self.since(&have) {
            return changes;
        }
        if hello.hashes.is_empty() {
            return convert::full(&self.state);
        }
        convert::difference_by_hashes(&hello.hashes, &self.state)
    }

    /// What changed since `have`, if that is still remembered.
    #[must_use]
    pub fn since(&self, have: &Generation) -> Option<v1::WatchResponse> {
        let now = &self.state.generation;
        let first = self.log.front().map_or(now.counter + 1, |step| step.counter);
        if have.epoch != now.epoch || have.counter > now.counter || have.counter + 1 < first {
            return None;
        }
        let steps = self.log.iter().rev().take_while(|step| step.counter > have.counter);
        let names: BTreeSet<&ServiceName> = steps.flat_map(|step| step.changed.iter()).collect();
        let (there, gone): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| self.state.services.contains_key(*name));
        let services = there.iter().filter_map(|name| self.state.services.get(*name));
        Some(v1::WatchResponse {
            generation: Some(now.into()),
            full: false,
            services: services.map(|service| v1::Service::from(&**service)).collect(),
            removed: gone.iter().map(ToString::to_string).collect(),
            pools: self.state.pools.iter().map(v1::Pool::from).collect(),
            draining: false,
            more: false,
        })
    }
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

    use proto::Service;

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

    /// What a gateway does with a message.
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
    fn the_same_state_is_no_new_generation() {
        let kept = services(&[("a", 1)]);
        let first = Published::first("e".to_owned(), kept.clone(), Vec::new());
        assert!(first.next(kept, Vec::new()).is_none());
    }

    #[test]
    fn an_unknown_epoch_without_hashes_gets_everything() {
        let published = Published::first("e".to_owned(), services(&[("a", 1)]), Vec::new());
        let have = Some(v1::Generation { epoch: "other".to_owned(), counter: 1 });
        let answer = published.answer(&v1::Hello { have, ..v1::Hello::default() });
        assert!(answer.full && answer.services.len() == 1);
    }

    #[test]
    fn a_generation_from_the_future_is_not_known() {
        let published = Published::first("e".to_owned(), services(&[]), Vec::new());
        assert!(published.since(&Generation { epoch: "e".to_owned(), counter: 2 }).is_none());
        assert!(published.since(&Generation { epoch: "e".to_owned(), counter: 0 }).is_none());
        assert!(published.since(&Generation { epoch: "e".to_owned(), counter: 1 }).unwrap().services.is_empty());
    }

    proptest! {
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
