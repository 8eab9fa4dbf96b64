//! The messages that a controller sends for a changed state.

use std::collections::BTreeMap;

use imbl::ordmap::DiffItem;

use super::fields::service_name;
use crate::{State, v1};

/// The message with the whole state.
#[must_use]
pub fn full(state: &State) -> v1::WatchResponse {
    response(state, true, state.services.values().map(|s| v1::Service::from(&**s)).collect(), Vec::new())
}

/// The message that changes `from` into `to`. Shared parts are not visited.
#[must_use]
pub fn difference(from: &State, to: &State) -> v1::WatchResponse {
    let (mut changed, mut removed) = (Vec::new(), Vec::new());
    for item in from.services.diff(&to.services) {
        match item {
            DiffItem::Add(_, new) | DiffItem::Update { new: (_, new), .. } => changed.push(v1::Service::from(&**new)),
            DiffItem::Remove(name, _) => removed.push(name.to_string()),
        }
    }
    response(to, false, changed, removed)
}

/// The message that changes Services with these content hashes into `to`, for a gateway with an unknown epoch.
#[must_use]
pub fn difference_by_hashes(have: &BTreeMap<String, Vec<u8>>, to: &State) -> v1::WatchResponse {
    let all = to.services.values().map(|service| v1::Service::from(&**service));
    let changed = all.filter(|s| have.get(&format!("{}/{}", s.namespace, s.name)) != Some(&s.hash)).collect();
    let gone = |name: &&String| !service_name(name).is_ok_and(|name| to.services.contains_key(&name));
    response(to, false, changed, have.keys().filter(gone).cloned().collect())
}

fn response(state: &State, full: bool, services: Vec<v1::Service>, removed: Vec<String>) -> v1::WatchResponse {
    let pools = state.pools.iter().map(v1::Pool::from).collect();
    let generation = Some(v1::Generation::from(&state.generation));
    let node_sets = state.node_sets().values().map(|set| v1::NodeSet::from(&**set)).collect();
    v1::WatchResponse { generation, full, services, removed, pools, node_sets, ..v1::WatchResponse::default() }
}
