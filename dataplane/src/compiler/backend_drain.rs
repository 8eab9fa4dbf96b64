//! The slots of backends, and their drain: a removed backend keeps its slot until the drain has ended, so that flows
//! that hold the slot find it.
//!
//! **Invariant:** a slot is reassigned only after its backend has drained, and then with another generation. A flow
//! whose slot has another generation has no backend: it is over.
//!
//! Not here: the targets that SNAT ports are used towards (`targets`).

use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use proto::limits::DRAIN_TIMEOUT;
use proto::{Mode, ServiceName};

use super::targets::{Reach, TargetKey, Targets, nanoseconds};
use crate::flow::{BackendId, Tick, Ticks, UNRESOLVED};
use crate::snapshot::{Backend, BackendTable, RemovedBackend, RemovedBackends};
use crate::stats::BACKEND_SLOTS;
use crate::wire::TableHash;

/// A removed backend with flows that may continue.
#[derive(Debug)]
struct Draining {
    until_ns: u64,
    slot: u32,
}

/// The backends of all services.
#[derive(Debug, Default)]
pub(super) struct Backends {
    pub(super) table: BackendTable,
    pub(super) targets: Targets,
    /// Generation of the next backend in each slot.
    generations: Vec<u32>,
    free: Vec<u32>,
    draining: HashMap<(Arc<ServiceName>, TargetKey), Draining, TableHash>,
    /// The keys of `draining`, for snapshots.
    pub(super) removed: RemovedBackends,
}

fn removed(service: &Arc<ServiceName>, (protocol, address): TargetKey) -> RemovedBackend {
    RemovedBackend { service: service.clone(), address, protocol }
}

impl Backends {
    /// Takes over the backends of a finished table in their slots, as if all had been removed: those that are added
    /// again keep their slots, the others drain. `before` may be half-finished; only the ends of drains and the set of
    /// slots are taken from it.
    pub(super) fn taken_over(mut table: BackendTable, before: &Self, now_ns: u64) -> Self {
        let slots = u32::try_from(before.generations.len()).unwrap_or(u32::MAX);
        let targets = Targets::taken_over(&table, &before.targets, slots, now_ns);
        let (mut generations, mut free, mut draining) = (before.generations.clone(), Vec::new(), HashMap::default());
        let mut removed_backends = RemovedBackends::new();
        for (slot, generation) in (0..slots).zip(&mut generations) {
            let Some(backend) = table.in_slot(slot) else {
                free.push(slot);
                continue;
            };
            *generation = backend.generation;
            let key = (backend.service.clone(), (backend.protocol, backend.address));
            let until_ns = before.draining.get(&key).filter(|before| before.slot == slot).map(|before| before.until_ns);
            let until_ns = until_ns.unwrap_or_else(|| now_ns.saturating_add(nanoseconds(DRAIN_TIMEOUT)));
            removed_backends.insert(removed(&key.0, key.1), slot);
            draining.insert(key, Draining { until_ns, slot });
            table.update(
                slot,
                |_| true,
                |backend| {
                    (backend.removed, backend.accepts_new, backend.next_hop) = (true, false, UNRESOLVED);
                },
            );
        }
        Self { table, targets, generations, free, draining, removed: removed_backends }
    }

    /// Adds a backend: in the slot in which it drains, or in a new one. `None` when there is no room for its target, or
    /// when there are already as many backends as flows can be counted for.
    pub(super) fn add(
        &mut self,
        service: &Arc<ServiceName>,
        key: TargetKey,
        now_ns: u64,
        reach: impl FnOnce(SocketAddr) -> Reach,
    ) -> Option<BackendId> {
        if let Some(Draining { slot, .. }) = self.draining.remove(&(service.clone(), key)) {
            self.removed.remove(&removed(service, key));
            self.table.update(slot, |_| true, |backend| backend.removed = false);
            return self.table.in_slot(slot).map(|backend| BackendId { slot, generation: backend.generation });
        }
        if self.free.is_empty() && self.generations.len() >= BACKEND_SLOTS {
            return None;
        }
        let reach = reach(key.1);
        let target = self.targets.acquire(key, reach, now_ns)?;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.generations.push(1);
            u32::try_from(self.generations.len() - 1).unwrap_or(u32::MAX)
        });
        let generation = self.generations[slot as usize];
        let (protocol, address) = key;
        let (service, Reach { next_hop, on_link, .. }) = (service.clone(), reach);
        let backend = Backend {
            address,
            protocol,
            service,
            target,
            next_hop,
            on_link,
            generation,
            idle_timeout: None,
            accepts_new: false,
            removed: false,
            failing: None,
        };
        self.table.set(slot, Some(backend));
        Some(BackendId { slot, generation })
    }

    /// Whether packets of a mode can be sent to the backend.
    pub(super) fn serves(&self, id: BackendId, mode: Mode) -> bool {
        self.table.get(id).is_some_and(|backend| self.targets.reach(backend.target).serves(mode))
    }

    /// The device by which Linux sends to the backend, if packets of the gateway cannot take that.
    pub(super) fn device_to(&self, id: BackendId) -> Option<u32> {
        self.table.get(id).and_then(|backend| self.targets.reach(backend.target).device)
    }

    /// Sets what the backend's service decides about it, at `now`.
    pub(super) fn set_policy(&mut self, id: BackendId, accepts_new: bool, failing: bool, idle_timeout: Option<Ticks>, now: Tick) {
        let policy = |backend: &Backend| (accepts_new, failing.then(|| backend.failing.unwrap_or(now)), idle_timeout);
        let differs = |backend: &Backend| (backend.accepts_new, backend.failing, backend.idle_timeout) != policy(backend);
        let change = |backend: &mut Backend| (backend.accepts_new, backend.failing, backend.idle_timeout) = policy(backend);
        self.table.update(id.slot, differs, change);
    }

    /// Ends the flows of a backend that stays: it gets another generation, as if it had been removed, drained and added.
    pub(super) fn end_flows(&mut self, id: BackendId) -> BackendId {
        let next = BackendId { generation: BackendId::next_generation(id.generation), ..id };
        let is_it = |backend: &Backend| backend.generation == id.generation;
        self.table.update(id.slot, is_it, |backend| backend.generation = next.generation);
        next
    }

    /// Removes a backend that its service no longer lists: it drains.
    pub(super) fn remove(&mut self, id: BackendId, until_ns: u64) {
        self.table.update(id.slot, |_| true, |backend| (backend.removed, backend.accepts_new) = (true, false));
        if let Some(Backend { service, protocol, address, .. }) = self.table.get(id) {
            let key = (service.clone(), (*protocol, *address));
            self.removed.insert(removed(service, key.1), id.slot);
            self.draining.insert(key, Draining { until_ns, slot: id.slot });
        }
    }

    /// Frees the slots of backends whose drain has ended, and returns them with their services. The next backends in
    /// them get other generations.
    pub(super) fn expire(&mut self, now_ns: u64) -> Vec<(Arc<ServiceName>, u32)> {
        let mut freed = Vec::new();
        for ((service, key), over) in self.draining.extract_if(|_, draining| draining.until_ns <= now_ns) {
            self.removed.remove(&removed(&service, key));
            if let Some(backend) = self.table.in_slot(over.slot) {
                self.targets.release(backend.target, now_ns);
                self.generations[over.slot as usize] = BackendId::next_generation(backend.generation);
            }
            self.table.set(over.slot, None);
            self.free.push(over.slot);
            freed.push((service, over.slot));
        }
        freed
    }

    /// When the next drain ends.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.draining.values().map(|draining| draining.until_ns).min()
    }

    /// Updates the next hop of every backend to that of its target.
    pub(super) fn follow_targets(&mut self) {
        for slot in 0..u32::try_from(self.generations.len()).unwrap_or(u32::MAX) {
            let Some(target) = self.table.in_slot(slot).map(|backend| backend.target) else { continue };
            let Reach { next_hop, on_link, .. } = self.targets.reach(target);
            let differs = |backend: &Backend| (backend.next_hop, backend.on_link) != (next_hop, on_link);
            self.table.update(slot, differs, |backend| (backend.next_hop, backend.on_link) = (next_hop, on_link));
        }
    }
}
