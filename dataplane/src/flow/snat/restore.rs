//! The SNAT ports of the process before: which of them rest, and pools in the state in which they were.
//!
//! **Invariant:** a port that a restored flow holds is not handed out, and a port that rested goes on resting.
//!
//! Not here: how ports reach the next process (`forward::worker`).

use zerocopy::FromZeros;

use super::{PAGE_PORTS, Pool, PoolId, SMALL_POOL_PORTS, SnatPorts, SnatTarget, account_of};
use crate::flow::tick::{Tick, Ticks};
use crate::wire::Address;

/// A port that is not free: held by a flow, or resting for this long.
pub(crate) type UsedPort = (u16, Option<Ticks>);

impl SnatPorts {
    /// Passes each port that has not rested long enough to `each`, with its pool and how long it has rested.
    pub(crate) fn resting(&self, now: Tick, mut each: impl FnMut(PoolId, u16, Ticks)) {
        for (index, pool) in (0..self.pools_high_water).zip(&self.pools) {
            let id = PoolId(u32::from(pool.generation) << PoolId::INDEX_BITS | index);
            let (mut page, mut at) = (pool.head, usize::from(pool.head_at));
            for _ in 0..pool.resting {
                let Some(ports) = page.checked_sub(1).and_then(|page| self.pages.get(page as usize)) else { break };
                let age = now.since(ports.freed[at]);
                if age < self.rest {
                    each(id, ports.ports[at], age);
                }
                at += 1;
                if at == PAGE_PORTS {
                    (page, at) = (ports.next, 0);
                }
            }
        }
    }

    /// Takes over the ports of a pool, which must be unused so far. `used` has each port once, sorted. Returns false, and
    /// changes nothing, if a port is not in this worker's share or there is no room.
    ///
    /// A pool hands out ports in order, so free ports between used ones become rested ones.
    pub(crate) fn adopt<A: Address>(
        &mut self,
        id: PoolId,
        target: &SnatTarget<A>,
        snat: A,
        used: &[UsedPort],
        now: Tick,
    ) -> bool {
        let Some(pool) = self.pools.get(id.index()) else { return false };
        if pool.high_water != 0 {
            return false;
        }
        let place = self.share.place(target.address, target.port, snat);
        let (mut found, mut high_water, mut queue) = (0, 0_u32, Vec::new());
        while found < used.len() {
            if high_water == u32::from(self.share.count) {
                return false;
            }
            let port = self.share.port::<A>(high_water, place);
            high_water += 1;
            match used.binary_search_by_key(&port, |(port, _)| *port) {
                Ok(at) => {
                    found += 1;
                    queue.extend(used[at].1.map(|age| (age, port)));
                }
                Err(_) => queue.push((self.rest, port)),
            }
        }
        let account = account_of(target.protocol);
        let held = self.held[usize::from(account)] + high_water;
        let limit = if high_water < SMALL_POOL_PORTS { (self.common_limit / 2).saturating_mul(3) } else { self.common_limit };
        if held > limit {
            return false;
        }
        self.held[usize::from(account)] = held;
        self.pools[id.index()] = Pool { place, account, high_water, generation: id.generation(), ..Pool::new_zeroed() };
        self.in_use += high_water;
        self.pools_high_water = self.pools_high_water.max((id.0 & ((1 << PoolId::INDEX_BITS) - 1)) + 1);
        queue.sort_by_key(|(age, _)| std::cmp::Reverse(*age));
        for (age, port) in queue {
            self.release(id, port, Tick(now.0.wrapping_sub(age.0)));
        }
        true
    }
}
