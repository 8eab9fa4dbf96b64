//! The slots of targets, towards which SNAT ports are used: they must stay the same from one snapshot to the next.
//!
//! **Invariant:** a slot is reassigned only after its target has rested, and then with another generation.
//!
//! Not here: the slots of backends (`backend_drain`).

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use proto::limits::SNAT_PORT_REST;
use proto::{Mode, Protocol};

use crate::flow::{TARGETS_MAX, TargetSlot, UNRESOLVED};
use crate::snapshot::BackendTable;
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
    /// Unused targets, in the order of `free_since_ns`. One that is used again stays in the queue until its turn.
    free: VecDeque<(u64, u32)>,
}

impl Targets {
    /// The targets of the backends in a table, in their slots. All other slots rest from now on.
    pub(super) fn taken_over(table: &BackendTable, before: &Self, slots: u32, now_ns: u64) -> Self {
        let nowhere = Reach { next_hop: UNRESOLVED, snat: false, on_link: false, tunnel_source: false, device: None };
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
    pub(super) fn acquire(&mut self, key: TargetKey, reach: Reach, now_ns: u64) -> Option<TargetSlot> {
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

    pub(super) fn release(&mut self, slot: TargetSlot, now_ns: u64) {
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

    /// Looks up again how every target is reached. Returns true when the set of modes that can reach any of them changed,
    /// or the device by which Linux sends to it although packets cannot.
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
