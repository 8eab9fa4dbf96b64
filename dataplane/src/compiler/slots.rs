//! Slots of backends and targets, which must stay the same from one snapshot to the next.
//!
//! **Invariant:** a slot is reassigned only after its backend has drained, or its target has rested, and then with
//! another generation.
//!
//! Not here: which backends a service has.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use proto::limits::{DRAIN_TIMEOUT, SNAT_PORT_REST};
use proto::{Mode, Protocol, ServiceName};

use crate::flow::{BackendId, TARGETS_MAX, TargetSlot, Tick, Ticks, UNRESOLVED};
use crate::snapshot::{Backend, BackendTable};
use crate::stats::BACKEND_SLOTS;
use crate::wire::TableHash;

/// Identifies a backend within its service, and a target in general.
pub(super) type TargetKey = (Protocol, SocketAddr);

/// A target keeps its slot for this long after its last backend: workers sweep the flows within one minute, then their
/// SNAT ports rest for another.
const TARGET_REST_NS: u64 = 2 * nanoseconds(SNAT_PORT_REST);

/// Saturates at 584 years.
#[allow(clippy::cast_possible_truncation)] // compared first
pub(super) const fn nanoseconds(duration: Duration) -> u64 {
    if duration.as_nanos() > u64::MAX as u128 { u64::MAX } else { duration.as_nanos() as u64 }
}

#[derive(Debug)]
struct TargetEntry {
    key: TargetKey,
    slot: TargetSlot,
    users: u32,
    free_since_ns: u64,
    reach: Reach,
}

/// How a target is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach {
    /// Slot of the next hop, or [`crate::flow::UNRESOLVED`].
    pub(super) next_hop: u32,
    /// Whether there is a SNAT address for its link.
    pub(super) snat: bool,
    /// Whether it is its own next hop. True while it has no route, which may still come.
    pub(super) on_link: bool,
    /// Whether there is an outer source address for tunnels to it.
    pub(super) tunnel_source: bool,
}

impl Reach {
    /// Whether packets of a mode can be sent to the target.
    pub(super) const fn serves(self, mode: Mode) -> bool {
        match mode {
            Mode::Nat => self.snat,
            Mode::Dnat => true,
            Mode::Dsr => self.on_link,
            Mode::Ipip | Mode::Gue => self.tunnel_source,
        }
    }
}

/// The targets, by which SNAT ports are pooled.
#[derive(Debug, Default)]
pub(super) struct Targets {
    entries: Vec<TargetEntry>,
    slots: HashMap<TargetKey, u32, TableHash>,
    /// Number of targets in use for each next hop.
    hops: HashMap<u32, u32, TableHash>,
    /// Unused targets, in the order of `free_since_ns`. One that is used again stays in the queue until its turn.
    free: VecDeque<(u64, u32)>,
}

impl Targets {
    /// The targets of the backends in a table, in their slots. All other slots rest from now on.
    fn taken_over(table: &BackendTable, before: &Self, slots: u32, now_ns: u64) -> Self {
        let nowhere = Reach { next_hop: UNRESOLVED, snat: false, on_link: false, tunnel_source: false };
        let resting = |entry: &TargetEntry| TargetEntry { users: 0, free_since_ns: now_ns, reach: nowhere, ..*entry };
        let mut targets = Self { entries: before.entries.iter().map(resting).collect(), ..Self::default() };
        for backend in (0..slots).filter_map(|slot| table.in_slot(slot)) {
            let (slot, key) = (backend.target, (backend.protocol, backend.address));
            let Some(entry) = targets.entries.get_mut(slot.index as usize) else { continue };
            (entry.key, entry.slot, entry.users) = (key, slot, entry.users + 1);
            targets.slots.insert(key, slot.index);
        }
        for (entry, slot) in targets.entries.iter().zip(0..) {
            if entry.users > 0 {
                count_hop(&mut targets.hops, None, Some(nowhere.next_hop));
            } else if !targets.slots.contains_key(&entry.key) {
                targets.slots.insert(entry.key, slot);
                targets.free.push_back((now_ns, slot));
            }
        }
        targets
    }

    /// The slot of a target, for one more user; `None` when [`TARGETS_MAX`] are in use or resting.
    fn acquire(&mut self, key: TargetKey, reach: Reach, now_ns: u64) -> Option<TargetSlot> {
        if let Some(&slot) = self.slots.get(&key) {
            let entry = &mut self.entries[slot as usize];
            let hop_before = (entry.users > 0).then_some(entry.reach.next_hop);
            (entry.users, entry.reach) = (entry.users + 1, reach);
            count_hop(&mut self.hops, hop_before, Some(reach.next_hop));
            return Some(entry.slot);
        }
        let entry = |slot| TargetEntry { key, slot, users: 1, free_since_ns: 0, reach };
        let slot = match self.rested(now_ns) {
            Some(index) => {
                let old = &mut self.entries[index as usize];
                self.slots.remove(&old.key);
                *old = entry(old.slot.next());
                old.slot
            }
            None => {
                let index = u32::try_from(self.entries.len()).ok().filter(|&index| index < TARGETS_MAX)?;
                let slot = TargetSlot { index, generation: 0 };
                self.entries.push(entry(slot));
                slot
            }
        };
        self.slots.insert(key, slot.index);
        count_hop(&mut self.hops, None, Some(reach.next_hop));
        Some(slot)
    }

    /// The slot that has been free the longest, if it has rested.
    fn rested(&mut self, now_ns: u64) -> Option<u32> {
        while let Some(&(since, slot)) = self.free.front() {
            let entry = &self.entries[slot as usize];
            let is_free = entry.users == 0 && entry.free_since_ns == since;
            if is_free && now_ns < since.saturating_add(TARGET_REST_NS) {
                return None;
            }
            self.free.pop_front();
            if is_free {
                return Some(slot);
            }
        }
        None
    }

    fn release(&mut self, slot: TargetSlot, now_ns: u64) {
        let entry = &mut self.entries[slot.index as usize];
        entry.users -= 1;
        if entry.users == 0 {
            entry.free_since_ns = now_ns;
            count_hop(&mut self.hops, Some(entry.reach.next_hop), None);
            self.free.push_back((now_ns, slot.index));
        }
    }

    pub(super) fn reach(&self, slot: TargetSlot) -> Reach {
        self.entries[slot.index as usize].reach
    }

    /// Looks up again how every target is reached. Returns true when the set of modes that can reach any of them
    /// changed.
    pub(super) fn resolve(&mut self, mut reach: impl FnMut(SocketAddr) -> Reach) -> bool {
        let mut changed = false;
        for entry in self.entries.iter_mut().filter(|entry| entry.users > 0) {
            let now = reach(entry.key.1);
            changed |= Mode::ALL.iter().any(|&mode| now.serves(mode) != entry.reach.serves(mode));
            count_hop(&mut self.hops, Some(entry.reach.next_hop), Some(now.next_hop));
            entry.reach = now;
        }
        changed
    }

    /// The next hops of the targets in use.
    pub(super) fn next_hops(&self) -> impl Iterator<Item = u32> {
        self.hops.keys().copied()
    }
}

/// Moves a target from one next hop to another in the counts.
fn count_hop(hops: &mut HashMap<u32, u32, TableHash>, from: Option<u32>, to: Option<u32>) {
    if from == to {
        return;
    }
    if let Some(to) = to {
        *hops.entry(to).or_insert(0) += 1;
    }
    if let Some(Entry::Occupied(mut of)) = from.map(|from| hops.entry(from)) {
        *of.get_mut() -= 1;
        if *of.get() == 0 {
            of.remove();
        }
    }
}

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
}

impl Backends {
    /// Takes over the backends of a finished table in their slots, as if all had been removed: those that are added
    /// again keep their slots, the others drain. `before` may be half-finished; only the ends of drains and the set of
    /// slots are taken from it.
    pub(super) fn taken_over(mut table: BackendTable, before: &Self, now_ns: u64) -> Self {
        let slots = u32::try_from(before.generations.len()).unwrap_or(u32::MAX);
        let targets = Targets::taken_over(&table, &before.targets, slots, now_ns);
        let (mut generations, mut free, mut draining) = (before.generations.clone(), Vec::new(), HashMap::default());
        for (slot, generation) in (0..slots).zip(&mut generations) {
            let Some(backend) = table.in_slot(slot) else {
                free.push(slot);
                continue;
            };
            *generation = backend.generation;
            let key = (backend.service.clone(), (backend.protocol, backend.address));
            let until_ns = before.draining.get(&key).filter(|before| before.slot == slot).map(|before| before.until_ns);
            let until_ns = until_ns.unwrap_or_else(|| now_ns.saturating_add(nanoseconds(DRAIN_TIMEOUT)));
            draining.insert(key, Draining { until_ns, slot });
            table.update(
                slot,
                |_| true,
                |backend| {
                    (backend.removed, backend.accepts_new, backend.next_hop) = (true, false, UNRESOLVED);
                },
            );
        }
        Self { table, targets, generations, free, draining }
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
        let (service, next_hop) = (service.clone(), reach.next_hop);
        let backend = Backend {
            address,
            protocol,
            service,
            target,
            next_hop,
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

    /// Sets what the backend's service decides about it, at `now`.
    pub(super) fn set_policy(&mut self, id: BackendId, accepts_new: bool, failing: bool, idle_timeout: Option<Ticks>, now: Tick) {
        let policy = |backend: &Backend| (accepts_new, failing.then(|| backend.failing.unwrap_or(now)), idle_timeout);
        let differs = |backend: &Backend| (backend.accepts_new, backend.failing, backend.idle_timeout) != policy(backend);
        let change = |backend: &mut Backend| (backend.accepts_new, backend.failing, backend.idle_timeout) = policy(backend);
        self.table.update(id.slot, differs, change);
    }

    /// Removes a backend that its service no longer lists: it drains.
    pub(super) fn remove(&mut self, id: BackendId, until_ns: u64) {
        self.table.update(id.slot, |_| true, |backend| (backend.removed, backend.accepts_new) = (true, false));
        if let Some(Backend { service, protocol, address, .. }) = self.table.get(id) {
            let key = (service.clone(), (*protocol, *address));
            self.draining.insert(key, Draining { until_ns, slot: id.slot });
        }
    }

    /// Frees the slots of backends whose drain has ended. The next backends in them get other generations.
    pub(super) fn expire(&mut self, now_ns: u64) {
        for (_, over) in self.draining.extract_if(|_, draining| draining.until_ns <= now_ns) {
            if let Some(backend) = self.table.in_slot(over.slot) {
                self.targets.release(backend.target, now_ns);
                self.generations[over.slot as usize] = backend.generation.wrapping_add(1).max(1);
            }
            self.table.set(over.slot, None);
            self.free.push(over.slot);
        }
    }

    /// When the next drain ends.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.draining.values().map(|draining| draining.until_ns).min()
    }

    /// Updates the next hop of every backend to that of its target.
    pub(super) fn follow_targets(&mut self) {
        for slot in 0..u32::try_from(self.generations.len()).unwrap_or(u32::MAX) {
            let Some(target) = self.table.in_slot(slot).map(|backend| backend.target) else { continue };
            let next_hop = self.targets.reach(target).next_hop;
            self.table.update(slot, |backend| backend.next_hop != next_hop, |backend| backend.next_hop = next_hop);
        }
    }
}
