//! The slots of backends, and their drain: a removed backend keeps its slot until the drain has ended, so that flows
//! that hold the slot find it.
//!
//! **Invariant:** a slot is reassigned only after its backend has drained, and then with another generation. A flow
//! whose slot has another generation has no backend: it is over. Where there is no room for another backend, drains in
//! its namespace end early: those without flows, and those of the backends that its Service replaces.
//!
//! Not here: the targets that SNAT ports are used towards (`targets`), and how much room there is (`room`).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use proto::limits::DRAIN_TIMEOUT;
use proto::{Mode, ServiceName};

use super::room::{NoRoom, Room};
use super::targets::{LOOKED_AT, Reach, SLOT_HOLD_NS, TargetKey, Targets, nanoseconds};
use crate::flow::{BACKEND_SLOTS, BackendId, Tick, Ticks, UNRESOLVED};
use crate::snapshot::{Backend, BackendTable, RemovedBackend, RemovedBackends, TargetUse};
use crate::stats::WorkerCounters;
use crate::wire::TableHash;

/// Workers have taken a snapshot after this time: a removed backend that had no flow until then gets none.
const UNUSED_AFTER_NS: u64 = nanoseconds(Duration::from_secs(1));

/// A removed backend with flows that may continue.
#[derive(Debug)]
struct Draining {
    since_ns: u64,
    until_ns: u64,
    slot: u32,
}

/// Counts of a slot by which a use is noticed.
#[derive(Clone, Copy, Debug)]
struct SlotUse {
    added_ns: u64,
    /// The count of workers when the backend was added.
    counted: u64,
}

/// The backends of all services.
#[derive(Debug)]
pub(super) struct Backends {
    pub(super) table: BackendTable,
    pub(super) targets: Targets,
    pub(super) room: Room,
    counters: Arc<[Arc<WorkerCounters>]>,
    /// Of each slot, as the next field.
    uses: Vec<SlotUse>,
    /// Generation of the next backend in each slot.
    generations: Vec<u32>,
    free: Vec<u32>,
    draining: HashMap<(Arc<ServiceName>, TargetKey), Draining, TableHash>,
    /// The ends of drains and their slots.
    drains: BTreeSet<(u64, u32)>,
    /// The ends of drains and their slots, by service.
    drains_of: BTreeSet<(Arc<ServiceName>, u64, u32)>,
    /// The namespace in which this compilation has looked for backends without flows in vain.
    without_unused: Option<String>,
    /// Slots whose drains ended early, with their services.
    pub(super) freed_early: Vec<(Arc<ServiceName>, u32)>,
    /// The keys of `draining`, for snapshots.
    pub(super) removed: RemovedBackends,
}

fn removed(service: &Arc<ServiceName>, (protocol, address): TargetKey) -> RemovedBackend {
    RemovedBackend { service: service.clone(), address, protocol }
}

impl Backends {
    /// No backends, in a gateway with room for `limit` on workers with these counters.
    pub(super) fn new(limit: u32, counters: Arc<[Arc<WorkerCounters>]>) -> Self {
        Self {
            table: BackendTable::default(),
            targets: Targets::default(),
            room: Room::new(limit),
            counters,
            uses: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            draining: HashMap::default(),
            drains: BTreeSet::new(),
            drains_of: BTreeSet::new(),
            without_unused: None,
            freed_early: Vec::new(),
            removed: RemovedBackends::new(),
        }
    }

    /// Takes over the backends of a finished table in their slots, as if all had been removed: a backend that is added
    /// again keeps its slot, the others drain. `before` may be half-finished; only the ends of drains and the set of
    /// slots are taken from it.
    pub(super) fn taken_over(mut table: BackendTable, before: &Self, now_ns: u64) -> Self {
        let slots = u32::try_from(before.generations.len()).unwrap_or(u32::MAX);
        let targets = Targets::taken_over(&table, &before.targets, slots, now_ns);
        let mut new = Self { targets, ..Self::new(before.room.limit(), before.counters.clone()) };
        (new.generations, new.uses) = (before.generations.clone(), before.uses.clone());
        // Half-finished, these may be shorter. A use that nobody knows of is taken for one.
        new.uses.resize(new.generations.len(), SlotUse { added_ns: now_ns, counted: u64::MAX });
        for slot in 0..slots {
            let Some(backend) = table.in_slot(slot) else {
                new.free.push(slot);
                continue;
            };
            new.generations[slot as usize] = backend.generation;
            let key = (backend.service.clone(), (backend.protocol, backend.address));
            let until_ns = before.draining.get(&key).filter(|before| before.slot == slot).map(|before| before.until_ns);
            let until_ns = until_ns.unwrap_or_else(|| now_ns.saturating_add(nanoseconds(DRAIN_TIMEOUT)));
            new.room.take(&key.0.namespace);
            new.drain(key.0, key.1, Draining { since_ns: now_ns, until_ns, slot });
            table.update(
                slot,
                |_| true,
                |backend| {
                    (backend.removed, backend.accepts_new, backend.next_hop) = (true, false, UNRESOLVED);
                },
            );
        }
        Self { table, ..new }
    }

    fn drain(&mut self, service: Arc<ServiceName>, key: TargetKey, draining: Draining) {
        self.removed.insert(removed(&service, key), draining.slot);
        self.drains.insert((draining.until_ns, draining.slot));
        self.drains_of.insert((service.clone(), draining.until_ns, draining.slot));
        self.draining.insert((service, key), draining);
    }

    fn end_drain(&mut self, service: &Arc<ServiceName>, key: TargetKey) -> Option<Draining> {
        let draining = self.draining.remove(&(service.clone(), key))?;
        self.removed.remove(&removed(service, key));
        self.drains.remove(&(draining.until_ns, draining.slot));
        self.drains_of.remove(&(service.clone(), draining.until_ns, draining.slot));
        Some(draining)
    }

    /// Adds a backend: in the slot in which it drains, or in a new one. With `makes_room`, where there is none, drains
    /// and rests in its namespace end early: of backends without flows, and of one that the service no longer lists.
    /// This reads the flows of many backends.
    pub(super) fn add(
        &mut self,
        service: &Arc<ServiceName>,
        key: TargetKey,
        makes_room: bool,
        now_ns: u64,
        reach: impl FnOnce(SocketAddr) -> Reach,
    ) -> Result<BackendId, NoRoom> {
        if let Some(Draining { slot, .. }) = self.end_drain(service, key) {
            self.table.update(slot, |_| true, |backend| backend.removed = false);
            // Flows of it may have been ended since.
            let generation = self.table.in_slot(slot).map_or(0, |backend| backend.generation);
            return Ok(BackendId { slot, generation });
        }
        let namespace = &service.namespace;
        if self.targets.rests_for(&key) != Some(namespace)
            && let Err(no_room) = self.room.may_take(namespace)
            && !(makes_room && self.make_room(service, now_ns))
        {
            return Err(no_room);
        }
        self.add_new(service, key, now_ns, reach(key.1)).ok_or_else(|| self.room.none_free())
    }

    /// `None` when there is no slot: a slot is not free while it may not be reassigned yet.
    fn add_new(&mut self, service: &Arc<ServiceName>, key: TargetKey, now_ns: u64, reach: Reach) -> Option<BackendId> {
        if self.free.is_empty() && self.generations.len() >= BACKEND_SLOTS {
            return None;
        }
        let (target, rested_for) = self.targets.acquire(key, reach, now_ns)?;
        if let Some(namespace) = rested_for {
            self.room.give(&namespace);
        }
        self.room.take(&service.namespace);
        let slot = if let Some(slot) = self.free.pop() {
            self.uses[slot as usize] = SlotUse { added_ns: now_ns, counted: self.counted(slot) };
            slot
        } else {
            // Nothing was counted in it. To read that of 100,000 slots takes long.
            self.generations.push(1);
            self.uses.push(SlotUse { added_ns: now_ns, counted: 0 });
            u32::try_from(self.generations.len() - 1).unwrap_or(u32::MAX)
        };
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

    /// Makes room for one more backend of a service within what its namespace holds.
    fn make_room(&mut self, service: &Arc<ServiceName>, now_ns: u64) -> bool {
        if self.end_rest_of(&service.namespace, now_ns) {
            return true;
        }
        let replaced = || {
            let of_service = self.drains_of.range((service.clone(), 0, 0)..).take_while(|(of, ..)| of == service);
            let slots = || of_service.clone().map(|&(_, _, slot)| slot).take(LOOKED_AT);
            let slots = || slots().filter(|slot| self.is_held(*slot, now_ns));
            slots().find(|slot| self.flows_of(*slot) == 0).or_else(|| slots().next())
        };
        // To read the flows of many backends takes long, and services of one namespace that wait are tried together.
        let is_known = self.without_unused.as_ref() == Some(&service.namespace);
        let unused = if is_known { None } else { self.without_flows(&service.namespace, now_ns) };
        let found = unused.or_else(replaced);
        if unused.is_none() {
            self.without_unused = Some(service.namespace.clone());
        }
        let Some(slot) = found else { return false };
        let rests_before = self.targets.resting();
        let freed = self.free_slot(slot, now_ns);
        self.freed_early.extend(freed);
        self.targets.resting() == rests_before || self.end_rest_of(&service.namespace, now_ns)
    }

    fn end_rest_of(&mut self, namespace: &str, now_ns: u64) -> bool {
        let freed = self.targets.expire_early(namespace, now_ns);
        freed.inspect(|namespace| self.room.give(namespace)).is_some()
    }

    /// A draining backend of a namespace that has no flows.
    fn without_flows(&self, namespace: &str, now_ns: u64) -> Option<u32> {
        let first = (Arc::new(ServiceName::new(namespace, "")), 0, 0);
        let mut of_namespace = self.drains_of.range(first..).take_while(|(of, ..)| of.namespace == *namespace).take(LOOKED_AT);
        let has_none = |service: &Arc<ServiceName>, slot: u32| {
            let key = self.table.in_slot(slot).map(|backend| (backend.protocol, backend.address));
            let since_ns = key.and_then(|key| self.draining.get(&(service.clone(), key))).map(|draining| draining.since_ns);
            since_ns.is_some_and(|since_ns| since_ns.saturating_add(UNUSED_AFTER_NS) <= now_ns)
                && self.is_held(slot, now_ns)
                && !self.counters.is_empty()
                && self.flows_of(slot) == 0
        };
        of_namespace.find(|(service, _, slot)| has_none(service, *slot)).map(|&(_, _, slot)| slot)
    }

    /// Whether a backend has had its slot for as long as it must.
    fn is_held(&self, slot: u32, now_ns: u64) -> bool {
        self.uses[slot as usize].added_ns.saturating_add(SLOT_HOLD_NS) <= now_ns
    }

    /// The present count of workers in a slot.
    fn counted(&self, slot: u32) -> u64 {
        let of_worker = |counters: &Arc<WorkerCounters>| {
            counters.sum_of(slot, |of| of.new_flows.get().wrapping_add(of.packets(false)).wrapping_add(of.packets(true)))
        };
        self.counters.iter().map(of_worker).fold(0, u64::wrapping_add)
    }

    fn flows_of(&self, slot: u32) -> u64 {
        self.counters.iter().map(|counters| counters.flows_of(slot)).sum()
    }

    /// Whether flows may have used the backend in a slot, which was removed then. Unknown without counters.
    fn was_used(&self, slot: u32, removed_ns: u64, now_ns: u64) -> bool {
        self.counters.is_empty()
            || now_ns < removed_ns.saturating_add(UNUSED_AFTER_NS)
            || self.counted(slot) != self.uses[slot as usize].counted
            || self.flows_of(slot) > 0
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

    /// Ends the flows of a backend that stays: it gets another generation, as if it had been removed, drained and
    /// added.
    pub(super) fn end_flows(&mut self, id: BackendId) -> BackendId {
        let next = BackendId { generation: BackendId::next_generation(id.generation), ..id };
        let is_it = |backend: &Backend| backend.generation == id.generation;
        self.table.update(id.slot, is_it, |backend| backend.generation = next.generation);
        next
    }

    /// Removes a backend that its service no longer lists: it drains from now until then.
    pub(super) fn remove(&mut self, id: BackendId, now_ns: u64, until_ns: u64) {
        self.table.update(id.slot, |_| true, |backend| (backend.removed, backend.accepts_new) = (true, false));
        if let Some(Backend { service, protocol, address, .. }) = self.table.get(id) {
            let (service, key) = (service.clone(), (*protocol, *address));
            self.drain(service, key, Draining { since_ns: now_ns, until_ns, slot: id.slot });
        }
    }

    /// Frees the slots of backends whose drain has ended, and returns them with their services. The next backends in
    /// them get other generations.
    pub(super) fn expire(&mut self, now_ns: u64) -> Vec<(Arc<ServiceName>, u32)> {
        self.without_unused = None;
        let rested = self.targets.expire(now_ns);
        rested.iter().for_each(|namespace| self.room.give(namespace));
        let mut freed = Vec::new();
        while let Some(&(until_ns, slot)) = self.drains.first().filter(|(until_ns, _)| *until_ns <= now_ns) {
            freed.extend(self.free_slot(slot, now_ns));
            self.drains.remove(&(until_ns, slot));
        }
        freed
    }

    /// Ends the drain in a slot, and frees the slot.
    fn free_slot(&mut self, slot: u32, now_ns: u64) -> Option<(Arc<ServiceName>, u32)> {
        let backend = self.table.in_slot(slot)?;
        let (service, key) = (backend.service.clone(), (backend.protocol, backend.address));
        let (target, generation) = (backend.target, backend.generation);
        let draining = self.end_drain(&service, key)?;
        let was_used = self.was_used(slot, draining.since_ns, now_ns);
        if !self.targets.release(target, was_used, &service.namespace, now_ns) {
            self.room.give(&service.namespace);
        }
        self.generations[slot as usize] = BackendId::next_generation(generation);
        self.table.set(slot, None);
        self.free.push(slot);
        Some((service, slot))
    }

    /// When the next drain ends.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.drains.first().map(|(until_ns, _)| *until_ns)
    }

    /// How much of the room is held.
    pub(super) fn target_use(&self, refused_services: usize) -> TargetUse {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let listed = count(self.generations.len() - self.free.len() - self.draining.len());
        let (draining, resting) = (count(self.draining.len()), count(self.targets.resting()));
        TargetUse { limit: self.room.limit(), listed, draining, resting, refused_services: count(refused_services) }
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
