//! Flows that may yield, oldest first: for each yield class, over all flows and per SNAT pool. They are what is
//! reclaimed when memory or ports run out (FORWARDING 3).
//!
//! Doubly linked lists in an array beside the flow entries, so a packet of a confirmed flow touches none of this
//! memory. A flow enters when it is created, changes lists with its class, and leaves when it is confirmed or ends,
//! each in constant time. 20 B per flow. Under a flood, flows are created and reclaimed in the same order, so
//! neighbours in a list are neighbours in memory.
//!
//! **Invariant:** the lists of a class contain exactly the flows of the table that yield in it.
//!
//! Not here: which class a flow yields in (`state`), and ending it.

use zerocopy::FromZeros;

use super::snat::{PoolId, SNAT_ADDRESSES_MAX, TARGETS_MAX};
use super::state::YieldClass;
use super::tick::Tick;

/// Positions plus one; 0 means none.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C)]
struct OrderLink {
    before: u32,
    after: u32,
}

/// The lists that a flow can be in.
const ALL: usize = 0;
const POOL: usize = 1;

#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C)]
struct Node {
    links: [OrderLink; 2],
    since: Tick,
}

/// Both ends of one list.
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
    /// 2^20 x 16 B, of which only used pages are touched.
    pools: Box<[OfClasses]>,
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
            pools: <[OfClasses]>::new_box_zeroed_with_elems(pools).ok()?,
        })
    }

    /// Adds a flow to a class, now; `pool` is that of its SNAT port, if it has one.
    pub(super) fn push(&mut self, index: u32, class: YieldClass, pool: Option<PoolId>, now: Tick) {
        self.nodes[index as usize].since = now;
        append::<ALL>(&mut self.nodes, &mut self.all[class as usize], index);
        if let Some(ends) = pool.and_then(|pool| self.pools.get_mut(pool.index())) {
            append::<POOL>(&mut self.nodes, &mut ends[class as usize], index);
        }
    }

    /// Removes a flow from a class: it was confirmed, changed its class or ended.
    pub(super) fn remove(&mut self, index: u32, class: YieldClass, pool: Option<PoolId>) {
        unlink::<ALL>(&mut self.nodes, &mut self.all[class as usize], index);
        if let Some(ends) = pool.and_then(|pool| self.pools.get_mut(pool.index())) {
            unlink::<POOL>(&mut self.nodes, &mut ends[class as usize], index);
        }
    }

    /// The flow that has been in this class the longest, and since when.
    pub(super) fn oldest(&self, class: YieldClass) -> Option<(u32, Tick)> {
        self.first(self.all[class as usize])
    }

    /// The same among the flows that hold a port of this pool.
    pub(super) fn oldest_of(&self, class: YieldClass, pool: PoolId) -> Option<(u32, Tick)> {
        self.first(self.pools.get(pool.index())?[class as usize])
    }

    fn first(&self, ends: ListEnds) -> Option<(u32, Tick)> {
        let index = ends.oldest.checked_sub(1)?;
        Some((index, self.nodes[index as usize].since))
    }
}

fn append<const LIST: usize>(nodes: &mut [Node], ends: &mut ListEnds, index: u32) {
    nodes[index as usize].links[LIST] = OrderLink { before: ends.youngest, after: 0 };
    match ends.youngest.checked_sub(1) {
        Some(youngest) => nodes[youngest as usize].links[LIST].after = index + 1,
        None => ends.oldest = index + 1,
    }
    ends.youngest = index + 1;
}

fn unlink<const LIST: usize>(nodes: &mut [Node], ends: &mut ListEnds, index: u32) {
    let OrderLink { before, after } = nodes[index as usize].links[LIST];
    match before.checked_sub(1) {
        Some(before) => nodes[before as usize].links[LIST].after = after,
        None => ends.oldest = after,
    }
    match after.checked_sub(1) {
        Some(after) => nodes[after as usize].links[LIST].before = before,
        None => ends.youngest = before,
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
                    prop_assert_eq!(order.oldest(class), of(None));
                    for pool in (1..4).map(PoolId) {
                        prop_assert_eq!(order.oldest_of(class, pool), of(Some(pool)));
                    }
                }
            }
        }
    }
}
