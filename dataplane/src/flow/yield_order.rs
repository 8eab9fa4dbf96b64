//! Flows that may yield, oldest first: for each yield class, over all flows and per SNAT pool. They are what is
//! reclaimed when memory or ports run out (FORWARDING 3).
//!
//! Doubly linked lists in an array beside the flow entries, so a packet of a confirmed flow touches none of this
//! memory. A flow enters when it is created, changes lists with its class, and leaves when it is confirmed or ends,
//! each in constant time. 16 B per flow. Under a flood, flows are created and reclaimed in the same order, so
//! neighbours in a list are neighbours in memory.
//!
//! **Invariant:** the lists of a class contain exactly the flows of the table that yield in it.
//!
//! Not here: which class a flow yields in (`state`), and ending it.

use zerocopy::FromZeros;

use super::snat::{PoolId, SNAT_ADDRESSES_MAX, TARGETS_MAX};
use super::state::YieldClass;
use super::storage::AssociationNote;
use super::tick::Tick;
use crate::wire::processor::prefetch_at;

/// The lists that a flow can be in.
const ALL: usize = 0;
const POOL: usize = 1;

/// Bits of a position in a [`Node`].
const LINK_BITS: u32 = 26;
/// The largest number of flows of one table: positions fit, and one value means "none".
pub(super) const FLOWS_MAX: u32 = (1 << LINK_BITS) - 1;
const LINK_MASK: u64 = FLOWS_MAX as u64;
/// Bits of the time in each word of a [`Node`].
const SINCE_BITS: u32 = u64::BITS - 2 * LINK_BITS;
const SINCE_MASK: u32 = (1 << SINCE_BITS) - 1;
/// The bits of the neighbours in one list, which have a note of a flow that is in no list.
const NOTE_MASK: u64 = (1 << (2 * LINK_BITS)) - 1;
const _: () = assert!(AssociationNote::BITS <= 2 * LINK_BITS);

/// For each of its two lists, the neighbours of a flow (2 x 26 bits); and since when it is in its class, in ticks: the
/// lower 12 bits in the first word, 12 more in the second.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C, align(16))]
struct Node([u64; 2]);

/// The neighbour before or after a flow in one list.
#[derive(Clone, Copy)]
enum Side {
    Before,
    After,
}

impl Node {
    /// A node that is the youngest of its lists.
    fn youngest([all, pool]: [Option<u32>; 2], since: Tick) -> Self {
        let word = |before: Option<u32>, since: u32| {
            let since = u64::from(since & SINCE_MASK) << (2 * LINK_BITS);
            since | LINK_MASK << LINK_BITS | u64::from(before.unwrap_or(FLOWS_MAX))
        };
        Self([word(all, since.0), word(pool, since.0 >> SINCE_BITS)])
    }

    /// The neighbour's position.
    #[allow(clippy::cast_possible_truncation)] // 26 bits
    fn link<const LIST: usize>(self, side: Side) -> Option<u32> {
        let position = (self.0[LIST] >> (side as u32 * LINK_BITS) & LINK_MASK) as u32;
        (position != FLOWS_MAX).then_some(position)
    }

    fn set_link<const LIST: usize>(&mut self, side: Side, position: Option<u32>) {
        let shift = side as u32 * LINK_BITS;
        self.0[LIST] = self.0[LIST] & !(LINK_MASK << shift) | u64::from(position.unwrap_or(FLOWS_MAX)) << shift;
    }

    fn set_since(&mut self, since: Tick) {
        const LINKS: u64 = (1 << (2 * LINK_BITS)) - 1;
        for (word, part) in self.0.iter_mut().zip([since.0, since.0 >> SINCE_BITS]) {
            *word = *word & LINKS | u64::from(part & SINCE_MASK) << (2 * LINK_BITS);
        }
    }

    /// The time, completed by the present.
    #[allow(clippy::cast_possible_truncation)] // 12 bits each
    fn since(self, now: Tick) -> Tick {
        const SCALE: u32 = u32::BITS - 2 * SINCE_BITS;
        let [low, high] = self.0.map(|word| (word >> (2 * LINK_BITS)) as u32);
        let since = Tick((high << SINCE_BITS | low) << SCALE);
        Tick(now.0.wrapping_sub(Tick(now.0 << SCALE).since_scaled(since, SCALE).0))
    }
}

/// Both ends of one list: positions plus one; 0 means none.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C)]
struct ListEnds {
    oldest: u32,
    youngest: u32,
}

/// The lists of one table.
#[derive(Debug)]
pub(super) struct Order {
    nodes: Box<[Node]>,
    all: OfClasses,
    /// 2^20 x 20 B, of which only used pages are touched.
    pools: Box<[OfPool]>,
}

/// The flows that hold ports of one pool.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C)]
struct OfPool {
    lists: OfClasses,
    /// Number of flows in the lists.
    flows: u32,
}

/// One list per class.
type OfClasses = [ListEnds; YieldClass::ALL.len()];

impl Order {
    /// Lists for this many flows; `None` without memory for them.
    pub(super) fn new(flows: usize) -> Option<Self> {
        let pools = TARGETS_MAX as usize * SNAT_ADDRESSES_MAX as usize;
        Some(Self {
            nodes: <[Node]>::new_box_zeroed_with_elems(flows).ok()?,
            all: OfClasses::new_zeroed(),
            pools: <[OfPool]>::new_box_zeroed_with_elems(pools).ok()?,
        })
    }

    /// Prefetches the place of a flow in its lists.
    #[inline(always)]
    pub(super) fn prefetch(&self, index: u32) {
        prefetch_at(&self.nodes, index as usize);
    }

    /// Prefetches the neighbours of a flow in the list of its pool, which its removal changes. Its neighbours among all
    /// flows are most often beside it.
    #[inline(always)]
    pub(super) fn prefetch_neighbours(&self, index: u32) {
        let Some(node) = self.nodes.get(index as usize) else { return };
        for side in [Side::Before, Side::After] {
            prefetch_at(&self.nodes, (node.0[POOL] >> (side as u32 * LINK_BITS) & LINK_MASK) as usize);
        }
    }

    /// Keeps bits of a flow that is in no list, in place of its neighbours in that of all flows.
    pub(super) fn set_note(&mut self, index: u32, note: u64) {
        let word = &mut self.nodes[index as usize].0[ALL];
        *word = *word & !NOTE_MASK | note & NOTE_MASK;
    }

    /// The bits that were kept last.
    pub(super) fn note(&self, index: u32) -> u64 {
        self.nodes[index as usize].0[ALL] & NOTE_MASK
    }

    /// Records the time at which a flow entered its class, or was confirmed.
    pub(super) fn set_since(&mut self, index: u32, now: Tick) {
        self.nodes[index as usize].set_since(now);
    }

    /// The time at which a flow entered its class, or was confirmed. At most 13 days before `now`.
    pub(super) fn since(&self, index: u32, now: Tick) -> Tick {
        self.nodes[index as usize].since(now)
    }

    /// Adds a flow to a class, now; `pool` is that of its SNAT port, if it has one.
    #[inline(always)]
    pub(super) fn push(&mut self, index: u32, class: YieldClass, pool: Option<PoolId>, now: Tick) {
        let mut before = [None; 2];
        before[ALL] = append::<ALL>(&mut self.nodes, &mut self.all[class as usize], index);
        if let Some(pool) = pool.and_then(|pool| self.pools.get_mut(pool.index())) {
            before[POOL] = append::<POOL>(&mut self.nodes, &mut pool.lists[class as usize], index);
            pool.flows += 1;
        }
        self.nodes[index as usize] = Node::youngest(before, now);
    }

    /// Removes a flow from a class: it was confirmed, changed its class or ended.
    #[inline(always)]
    pub(super) fn remove(&mut self, index: u32, class: YieldClass, pool: Option<PoolId>) {
        unlink::<ALL>(&mut self.nodes, &mut self.all[class as usize], index);
        if let Some(pool) = pool.and_then(|pool| self.pools.get_mut(pool.index())) {
            unlink::<POOL>(&mut self.nodes, &mut pool.lists[class as usize], index);
            pool.flows -= 1;
        }
    }

    /// The flow that has been in this class the longest.
    pub(super) fn oldest(&self, class: YieldClass) -> Option<u32> {
        self.all[class as usize].oldest.checked_sub(1)
    }

    /// The flow that entered this class last.
    pub(super) fn youngest(&self, class: YieldClass) -> Option<u32> {
        self.all[class as usize].youngest.checked_sub(1)
    }

    /// The flow that entered the class of this one before it.
    pub(super) fn before(&self, index: u32) -> Option<u32> {
        self.nodes[index as usize].link::<ALL>(Side::Before)
    }

    /// The flows of a class, the one that has been in it the longest first; only those that hold a port of this pool,
    /// if there is one.
    pub(super) fn oldest_first(&self, class: YieldClass, pool: Option<PoolId>) -> impl Iterator<Item = u32> {
        let oldest = if let Some(pool) = pool { self.oldest_of(class, pool) } else { self.oldest(class) };
        std::iter::successors(oldest, move |index| {
            let node = self.nodes[*index as usize];
            if pool.is_some() { node.link::<POOL>(Side::After) } else { node.link::<ALL>(Side::After) }
        })
    }

    /// The flow that has been in this class the longest, among those that hold a port of this pool.
    pub(super) fn oldest_of(&self, class: YieldClass, pool: PoolId) -> Option<u32> {
        self.pools.get(pool.index())?.lists[class as usize].oldest.checked_sub(1)
    }

    /// The number of flows that yield and hold a port of this pool.
    pub(super) fn yielding(&self, pool: PoolId) -> u32 {
        self.pools.get(pool.index()).map_or(0, |pool| pool.flows)
    }
}

/// Makes a flow the youngest of a list. Returns the one before it, to be stored in its node.
#[inline(always)]
fn append<const LIST: usize>(nodes: &mut [Node], ends: &mut ListEnds, index: u32) -> Option<u32> {
    let before = ends.youngest.checked_sub(1);
    match before {
        Some(before) => nodes[before as usize].set_link::<LIST>(Side::After, Some(index)),
        None => ends.oldest = index + 1,
    }
    ends.youngest = index + 1;
    before
}

#[inline(always)]
fn unlink<const LIST: usize>(nodes: &mut [Node], ends: &mut ListEnds, index: u32) {
    let node = nodes[index as usize];
    let (before, after) = (node.link::<LIST>(Side::Before), node.link::<LIST>(Side::After));
    match before {
        Some(before) => nodes[before as usize].set_link::<LIST>(Side::After, after),
        None => ends.oldest = after.map_or(0, |after| after + 1),
    }
    match after {
        Some(after) => nodes[after as usize].set_link::<LIST>(Side::Before, before),
        None => ends.youngest = before.map_or(0, |before| before + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_oldest_is_that_of_a_vector(
            steps in proptest::collection::vec((any::<bool>(), 0u32..16, 0u32..4, any::<bool>()), 1..200),
        ) {
            let mut order = Order::new(16).unwrap();
            let mut model: Vec<(u32, YieldClass, Option<PoolId>, Tick)> = Vec::new();
            for (now, (push, index, pool, second)) in (u32::MAX - 50..=u32::MAX).chain(0..).map(Tick).zip(steps) {
                let class = YieldClass::ALL[usize::from(second)];
                match model.iter().position(|flow| flow.0 == index) {
                    None if push => {
                        let pool = (pool > 0).then_some(PoolId(pool));
                        order.push(index, class, pool, now);
                        model.push((index, class, pool, now));
                    }
                    Some(at) if !push => {
                        let (index, class, pool, _) = model.remove(at);
                        order.remove(index, class, pool);
                    }
                    _ => {}
                }
                for class in YieldClass::ALL {
                    let of = |pool: Option<PoolId>| {
                        let is_it = |flow: &&(u32, _, _, _)| flow.1 == class && (pool.is_none() || flow.2 == pool);
                        model.iter().find(is_it).map(|flow| (flow.0, flow.3))
                    };
                    let with_time = |index: Option<u32>| index.map(|index| (index, order.since(index, now)));
                    prop_assert_eq!(with_time(order.oldest(class)), of(None));
                    prop_assert!(order.oldest_first(class, None).eq(model.iter().filter(|flow| flow.1 == class).map(|flow| flow.0)));
                    let backwards = std::iter::successors(order.youngest(class), |index| order.before(*index));
                    let of_class = model.iter().rev().filter(|flow| flow.1 == class).map(|flow| flow.0);
                    prop_assert!(backwards.eq(of_class));
                    for pool in (1..4).map(PoolId) {
                        let of_pool = model.iter().filter(|flow| (flow.1, flow.2) == (class, Some(pool))).map(|flow| flow.0);
                        prop_assert!(order.oldest_first(class, Some(pool)).eq(of_pool));
                        prop_assert_eq!(order.yielding(pool) as usize, model.iter().filter(|flow| flow.2 == Some(pool)).count());
                        prop_assert_eq!(with_time(order.oldest_of(class, pool)), of(Some(pool)));
                    }
                }
            }
        }
    }
}
