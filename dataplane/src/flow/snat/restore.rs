//! The SNAT ports of the process before: the ports that rest, and the state of the pools.
//!
//! **Invariant:** a port that a restored flow holds is not handed out, and a port that rested goes on resting.
//!
//! Not here: how ports reach the next process (`forward::flow_transfer`).

use zerocopy::FromZeros;

use super::lease::{PoolId, SnatTarget};
use super::ports::{PAGE_PORTS, Pool, SMALL_POOL_PORTS, SnatPorts, account_of};
use crate::flow::tick::{Tick, Ticks};
use crate::wire::Address;

/// Free ports in a row after which a pool is taken to have handed out no further port: 256 connections in a row would
/// have to have ended more than a minute ago.
const GAP_MAX: u32 = 256;

/// A port that is not free: held by a flow, or resting for this long.
pub(crate) type UsedPort = (u16, Option<Ticks>);

impl SnatPorts {
    /// Passes each port that has not rested long enough to `visit`, with its pool and how long it has rested.
    pub(crate) fn resting(&self, now: Tick, mut visit: impl FnMut(PoolId, u16, Ticks)) {
        for (index, pool) in (0..self.pools_high_water).zip(&self.pools) {
            let id = PoolId(u32::from(pool.generation) << PoolId::INDEX_BITS | index);
            let (mut page, mut at) = (pool.head, usize::from(pool.head_at));
            for _ in 0..pool.resting {
                let Some(ports) = page.checked_sub(1).and_then(|page| self.pages.get(page as usize)) else { break };
                let age = now.since(ports.freed[at]);
                if age < self.rest {
                    visit(id, ports.ports[at], age);
                }
                at += 1;
                if at == PAGE_PORTS {
                    (page, at) = (ports.next, 0);
                }
            }
        }
    }

    /// Splits used ports, sorted, into the ports that this pool has handed out itself, as far as their order shows it,
    /// and the ports that partners and the process before had. Its own ports lie one after another from its first port
    /// on.
    pub(crate) fn split_by_order<A: Address>(
        &self,
        target: &SnatTarget<A>,
        snat: A,
        used: Vec<UsedPort>,
    ) -> (Vec<UsedPort>, Vec<UsedPort>) {
        let entry = self.share.entry(target.address, target.port, snat);
        let (mut is_own, mut found, mut since_last) = (vec![false; used.len()], 0, 0);
        for n in 0..u32::from(self.share.count) {
            if found == used.len() || since_last == GAP_MAX {
                break;
            }
            since_last += 1;
            let port = self.share.port::<A>(n, entry);
            if let Ok(at) = used.binary_search_by_key(&port, |(port, _)| *port) {
                (is_own[at], found, since_last) = (true, found + 1, 0);
            }
        }
        let (own, others): (Vec<_>, Vec<_>) = used.into_iter().zip(is_own).partition(|(_, is_own)| *is_own);
        let ports = |split: Vec<(UsedPort, bool)>| split.into_iter().map(|(port, _)| port).collect();
        (ports(own), ports(others))
    }

    /// Takes over the ports of a pool, which must be unused so far. `used` has each port once, sorted. Returns false,
    /// and changes nothing, if a port is not in this worker's share or there is no room.
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
        let entry = self.share.entry(target.address, target.port, snat);
        let (mut found, mut high_water, mut queue) = (0, 0_u32, Vec::new());
        while found < used.len() {
            if high_water == u32::from(self.share.count) {
                return false;
            }
            let port = self.share.port::<A>(high_water, entry);
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
        self.pools[id.index()] = Pool { entry, account, high_water, generation: id.generation(), ..Pool::new_zeroed() };
        self.in_use += high_water;
        self.pools_high_water = self.pools_high_water.max((id.0 & ((1 << PoolId::INDEX_BITS) - 1)) + 1);
        queue.sort_by_key(|(age, _)| std::cmp::Reverse(*age));
        for (age, port) in queue {
            self.release(id, port, Tick(now.0.wrapping_sub(age.0)));
        }
        true
    }
}
