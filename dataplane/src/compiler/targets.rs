//! The slots of targets, towards which SNAT ports are used: they must stay the same from one snapshot to the next.
//!
//! **Invariant:** a slot is reassigned only after its target has rested, and then with another generation. A target
//! that no flow ever used does not rest. A namespace that replaces a backend may end the rest of its own targets.
//!
//! Not here: the slots of backends (`backend_drain`), and how many slots a namespace gets (`room`).

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use proto::limits::SNAT_PORT_REST;
use proto::{Mode, Protocol};

use crate::flow::{BackendId, TARGETS_MAX, TargetSlot, UNRESOLVED};
use crate::snapshot::BackendTable;
use crate::wire::TableHash;

/// Identifies a backend within its service, and a target in general.
pub(super) type TargetKey = (Protocol, SocketAddr);

/// A target keeps its slot for this long after its last backend: workers sweep the flows within one minute, then their
/// SNAT ports rest for another.
const TARGET_REST_NS: u64 = 2 * nanoseconds(SNAT_PORT_REST);

/// A slot is reassigned at most this often. The generations of targets and of backends, of which there are fewer, then
/// repeat only after a rest.
pub(super) const SLOT_HOLD_NS: u64 = TARGET_REST_NS / BackendId::GENERATIONS as u64;
const _: () = assert!(BackendId::GENERATIONS <= TargetSlot::GENERATIONS as u32);

/// How many of its slots are looked at when a namespace gives one up.
pub(super) const LOOKED_AT: usize = 64;

/// Saturates at 584 years.
#[allow(clippy::cast_possible_truncation)] // compared first
pub(super) const fn nanoseconds(duration: Duration) -> u64 {
    if duration.as_nanos() > u64::MAX as u128 { u64::MAX } else { duration.as_nanos() as u64 }
}

/// How far a target without backends is from being replaced.
#[derive(Clone, Debug)]
enum Rest {
    /// Backends use it.
    None,
    /// Its flows may still be there, and its SNAT ports rest: a place of this namespace.
    Until(u64, Arc<str>),
    /// Its slot is free since then. If no flow ever used the target, the slot keeps its generation.
    Over { since_ns: u64, unused: bool },
}

#[derive(Clone, Debug)]
struct TargetEntry {
    key: TargetKey,
    slot: TargetSlot,
    users: u32,
    /// Whether a flow may have used it.
    was_used: bool,
    acquired_ns: u64,
    rest: Rest,
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
    /// The device by which Linux sends to it, if packets of the gateway cannot take that.
    pub(super) device: Option<u32>,
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
    /// Slots whose targets rest, by the end of the rest.
    resting: BTreeSet<(u64, u32)>,
    /// Slots whose targets rest, by namespace and the end of the rest.
    resting_of: BTreeSet<(Arc<str>, u64, u32)>,
    /// Slots to reassign, the one that became free first before the others.
    free: BTreeSet<(u64, u32)>,
}

impl Targets {
    /// The targets of the backends in a table, in their slots. All other slots rest from now on; they are places of no
    /// namespace.
    pub(super) fn taken_over(table: &BackendTable, before: &Self, slots: u32, now_ns: u64) -> Self {
        let nowhere = Reach { next_hop: UNRESOLVED, snat: false, on_link: false, tunnel_source: false, device: None };
        let over = Rest::Over { since_ns: now_ns.saturating_add(TARGET_REST_NS), unused: false };
        let resting =
            |entry: &TargetEntry| TargetEntry { users: 0, was_used: true, rest: over.clone(), reach: nowhere, ..entry.clone() };
        let mut targets = Self { entries: before.entries.iter().map(resting).collect(), ..Self::default() };
        for backend in (0..slots).filter_map(|slot| table.in_slot(slot)) {
            let (slot, key) = (backend.target, (backend.protocol, backend.address));
            let Some(entry) = targets.entries.get_mut(slot.index as usize) else { continue };
            (entry.key, entry.slot, entry.users, entry.rest) = (key, slot, entry.users + 1, Rest::None);
            targets.slots.insert(key, slot.index);
        }
        for (entry, slot) in targets.entries.iter().zip(0..) {
            if entry.users > 0 {
                count_hop(&mut targets.hops, None, Some(nowhere.next_hop));
                continue;
            }
            targets.slots.entry(entry.key).or_insert(slot);
            targets.free.insert((now_ns.saturating_add(TARGET_REST_NS), slot));
        }
        targets
    }

    /// The slot of a target, for one more user; `None` when none is free. The second value is the namespace whose place
    /// the target was, because it rested.
    pub(super) fn acquire(&mut self, key: TargetKey, reach: Reach, now_ns: u64) -> Option<(TargetSlot, Option<Arc<str>>)> {
        if let Some(&slot) = self.slots.get(&key) {
            let entry = &mut self.entries[slot as usize];
            let hop_before = (entry.users > 0).then_some(entry.reach.next_hop);
            (entry.users, entry.reach) = (entry.users + 1, reach);
            count_hop(&mut self.hops, hop_before, Some(reach.next_hop));
            let slot = entry.slot;
            return Some((slot, self.end_rest(slot.index)));
        }
        let new = |slot| TargetEntry { key, slot, users: 1, was_used: false, acquired_ns: now_ns, rest: Rest::None, reach };
        let slot = match self.take_free(now_ns) {
            Some(index) => {
                let old = &mut self.entries[index as usize];
                if self.slots.get(&old.key) == Some(&index) {
                    self.slots.remove(&old.key);
                }
                let unused = matches!(old.rest, Rest::Over { unused: true, .. });
                *old = new(if unused { old.slot } else { old.slot.next() });
                old.slot
            }
            None => {
                let index = u32::try_from(self.entries.len()).ok().filter(|&index| index < TARGETS_MAX)?;
                let slot = TargetSlot { index, generation: 0 };
                self.entries.push(new(slot));
                slot
            }
        };
        self.slots.insert(key, slot.index);
        count_hop(&mut self.hops, None, Some(reach.next_hop));
        Some((slot, None))
    }

    fn take_free(&mut self, now_ns: u64) -> Option<u32> {
        let &(since_ns, slot) = self.free.first().filter(|(since_ns, _)| *since_ns <= now_ns)?;
        self.free.remove(&(since_ns, slot));
        Some(slot)
    }

    /// The target in a slot rests no longer. Returns the namespace whose place it was.
    fn end_rest(&mut self, slot: u32) -> Option<Arc<str>> {
        match std::mem::replace(&mut self.entries[slot as usize].rest, Rest::None) {
            Rest::None => None,
            Rest::Over { since_ns, .. } => {
                self.free.remove(&(since_ns, slot));
                None
            }
            Rest::Until(until_ns, namespace) => {
                self.resting.remove(&(until_ns, slot));
                self.resting_of.remove(&(namespace.clone(), until_ns, slot));
                Some(namespace)
            }
        }
    }

    /// The namespace whose place a target is, if it rests.
    pub(super) fn rests_for(&self, key: &TargetKey) -> Option<&str> {
        match &self.entries[*self.slots.get(key)? as usize].rest {
            Rest::Until(_, namespace) => Some(namespace),
            Rest::None | Rest::Over { .. } => None,
        }
    }

    /// Takes one user from a target of a Service in this namespace. `was_used`: whether flows may have used it. Returns
    /// true when the target rests from now on, and is a place of the namespace.
    pub(super) fn release(&mut self, slot: TargetSlot, was_used: bool, namespace: &str, now_ns: u64) -> bool {
        let entry = &mut self.entries[slot.index as usize];
        entry.users -= 1;
        entry.was_used |= was_used;
        if entry.users > 0 {
            return false;
        }
        count_hop(&mut self.hops, Some(entry.reach.next_hop), None);
        if !entry.was_used {
            let since_ns = now_ns.max(entry.acquired_ns.saturating_add(SLOT_HOLD_NS));
            entry.rest = Rest::Over { since_ns, unused: true };
            self.free.insert((since_ns, slot.index));
            return false;
        }
        let (until_ns, namespace) = (now_ns.saturating_add(TARGET_REST_NS), Arc::<str>::from(namespace));
        entry.rest = Rest::Until(until_ns, namespace.clone());
        self.resting.insert((until_ns, slot.index));
        self.resting_of.insert((namespace, until_ns, slot.index));
        true
    }

    /// Frees the slots of targets that have rested, and returns the namespaces whose places they were.
    pub(super) fn expire(&mut self, now_ns: u64) -> Vec<Arc<str>> {
        let mut freed = Vec::new();
        while let Some(&(until_ns, slot)) = self.resting.first().filter(|(until_ns, _)| *until_ns <= now_ns) {
            freed.extend(self.free_now(slot, until_ns));
        }
        freed
    }

    /// Frees the slot of the target of a namespace that has rested the longest, before its time.
    pub(super) fn expire_early(&mut self, namespace: &str, now_ns: u64) -> Option<Arc<str>> {
        let first = (Arc::<str>::from(namespace), 0, 0);
        let of_namespace = self.resting_of.range(first..).take_while(|(of, ..)| **of == *namespace);
        let held = |slot: u32| self.entries[slot as usize].acquired_ns.saturating_add(SLOT_HOLD_NS) <= now_ns;
        let slot = of_namespace.map(|&(_, _, slot)| slot).take(LOOKED_AT).find(|slot| held(*slot))?;
        self.free_now(slot, now_ns)
    }

    fn free_now(&mut self, slot: u32, since_ns: u64) -> Option<Arc<str>> {
        let namespace = self.end_rest(slot);
        self.entries[slot as usize].rest = Rest::Over { since_ns, unused: false };
        self.free.insert((since_ns, slot));
        namespace
    }

    /// When the next target has rested.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.resting.first().map(|(until_ns, _)| *until_ns)
    }

    /// Number of targets that rest.
    pub(super) fn resting(&self) -> usize {
        self.resting.len()
    }

    pub(super) fn reach(&self, slot: TargetSlot) -> Reach {
        self.entries[slot.index as usize].reach
    }

    /// Looks up again how every target is reached. Returns true when the set of modes that can reach any of them
    /// changed, or the device by which Linux sends to it although packets cannot.
    pub(super) fn resolve(&mut self, mut reach: impl FnMut(SocketAddr) -> Reach) -> bool {
        let mut changed = false;
        for entry in self.entries.iter_mut().filter(|entry| entry.users > 0) {
            let now = reach(entry.key.1);
            changed |= Mode::ALL.iter().any(|&mode| now.serves(mode) != entry.reach.serves(mode));
            changed |= now.device != entry.reach.device;
            count_hop(&mut self.hops, Some(entry.reach.next_hop), Some(now.next_hop));
            entry.reach = now;
        }
        changed
    }

    /// The next hops of the targets in use.
    pub(super) fn next_hops(&self) -> impl ExactSizeIterator<Item = u32> {
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
