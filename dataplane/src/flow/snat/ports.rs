//! The state of the SNAT ports of one worker: pools that hand out unused ports in order and queue freed ports, oldest
//! first.
//!
//! **Invariants:** every operation takes constant time at any utilisation. A freed port rests for [`SNAT_PORT_REST`]
//! unless no other port is left, which is counted. Memory is reserved at construction, and only needed pages are
//! touched.
//!
//! Where memory is the limit, ports of TCP and ports of other protocols are accounted separately: a flood of datagrams,
//! whose ports all rest, takes none from connections.
//!
//! Not here: the owner of a port. The flow holds the lease and releases it.

use proto::limits::SNAT_PORT_REST;
use zerocopy::{AllocError, FromZeros};

use super::lease::{PoolId, SNAT_ADDRESSES_MAX, SnatAddress, SnatLease, SnatTarget, TARGETS_MAX, TargetSlot};
use super::port_share::PortShare;
use crate::flow::tick::{Tick, Ticks};
use crate::wire::processor;
use crate::wire::{Address, protocol};

pub(super) const PAGE_PORTS: usize = 10;
/// Index of the last port of a page.
const PAGE_LAST: u16 = 9;
const _: () = assert!(PAGE_LAST as usize + 1 == PAGE_PORTS);
/// Index of the port of a page with which the next page is fetched.
const FETCH_NEXT_AT: u16 = PAGE_LAST - 1;
/// A pool that has handed out fewer ports may still grow when the worker's common limit is reached.
pub(super) const SMALL_POOL_PORTS: u32 = 256;

/// Freed ports of one pool, in order, 6.4 B per port. One cache line.
#[derive(Debug, FromZeros)]
#[repr(C, align(64))]
pub(super) struct Page {
    pub(super) freed: [Tick; PAGE_PORTS],
    pub(super) ports: [u16; PAGE_PORTS],
    /// The next page, plus one.
    pub(super) next: u32,
}

const _: () = assert!(size_of::<Page>() == 64);

/// One pool; zeroed memory is an empty pool.
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C)]
pub(super) struct Pool {
    /// First and last page of the queue, plus one; 0 means none.
    pub(super) head: u32,
    pub(super) tail: u32,
    /// Ports below this number were handed out at least once.
    pub(super) high_water: u32,
    /// Number of ports in the queue.
    pub(super) resting: u32,
    /// Index of the oldest port in the head page.
    pub(super) head_at: u16,
    /// Number of ports in the tail page.
    pub(super) tail_at: u16,
    /// See [`PortShare::entry`]; set when the first port is taken, as are the next two.
    pub(super) entry: u8,
    /// The account of its ports: an index of [`SnatPorts::held`].
    pub(super) account: u8,
    /// Generation of its target.
    pub(super) generation: u16,
}

const _: () = assert!(size_of::<Pool>() == 24);

/// Accounts of the memory for resting ports: TCP, and all other protocols.
pub(super) const ACCOUNTS: u8 = 2;

pub(super) const fn account_of(transport: u8) -> u8 {
    if transport == protocol::TCP { 0 } else { 1 }
}

/// The best port that a pool can offer.
pub(super) enum Offer {
    /// The oldest freed port, fully rested.
    Rested,
    /// A port that was never used.
    Fresh,
    /// The oldest freed port, which has rested for this long only.
    Early(Ticks),
    Nothing,
}

/// The addresses in order, starting at `start` (modulo their number).
pub(super) fn from<A>(addresses: &[SnatAddress<A>], start: usize) -> impl Iterator<Item = &SnatAddress<A>> {
    let split = start % addresses.len().max(1);
    addresses[split..].iter().chain(&addresses[..split])
}

/// The SNAT ports of one worker.
#[derive(Debug)]
pub struct SnatPorts {
    pub(super) share: PortShare,
    pub(super) rest: Ticks,
    pub(super) pools: Vec<Pool>,
    pub(super) pages: Vec<Page>,
    /// Head of the list of free pages, plus one.
    pub(super) free_page: u32,
    /// Pages below this position were used at least once.
    pub(super) pages_high_water: u32,
    /// Pools below this position were used at least once.
    pub(super) pools_high_water: u32,
    /// Ports handed out or resting, over all pools of an account.
    pub(super) held: [u32; ACCOUNTS as usize],
    /// See [`SnatPorts::new`].
    pub(super) common_limit: u32,
    pub(super) reused_early: u64,
    pub(super) in_use: u32,
}

impl SnatPorts {
    /// Reserves memory for the ports of a worker with at most this many flows.
    ///
    /// Ports in use take no memory, resting ports do: up to twice as many as there may be flows, in pools of any size,
    /// and half as many again in pools of fewer than 256 ports, so that a new target finds some; both for TCP, and once
    /// more for the other protocols. Past that, ports are reused early. Pages: a queue of n ports takes at most n / 10
    /// + 2.
    ///
    /// [`AllocError`] when there is no address space for it.
    pub fn new(flows: u32, share: PortShare) -> Result<Self, AllocError> {
        let pools = TARGETS_MAX * u32::from(SNAT_ADDRESSES_MAX);
        // At least two small pools; otherwise resting ports of a few flows would leave a target without any.
        let common_limit = flows.saturating_mul(2).max(2 * SMALL_POOL_PORTS);
        let limit = (common_limit / 2).saturating_mul(3).saturating_mul(ACCOUNTS.into());
        let pages = limit / 10 + 2 * pools.min(limit);
        Ok(Self {
            share,
            rest: SNAT_PORT_REST.into(),
            pools: Pool::new_vec_zeroed(pools as usize)?,
            pages: Page::new_vec_zeroed(pages as usize)?,
            free_page: 0,
            pages_high_water: 0,
            pools_high_water: 0,
            held: [0; ACCOUNTS as usize],
            common_limit,
            reused_early: 0,
            in_use: 0,
        })
    }

    /// Hands out ports from another one of the share on. To be called before the first one is handed out.
    pub(crate) fn start_at(&mut self, random: u64) {
        self.share = self.share.clone().starting_at(random);
    }

    /// Allocates a port towards `target` from one of `addresses`, tried in order from `start` (modulo their number): a
    /// rested port, otherwise one that was never used. `None` if there is neither.
    #[inline(always)]
    pub fn allocate_rested<A: Address>(
        &mut self,
        target: SnatTarget<A>,
        addresses: &[SnatAddress<A>],
        start: usize,
        now: Tick,
    ) -> Option<SnatLease<A>> {
        // Most often the first address has one.
        let first = addresses.get(start).and_then(|address| self.rested(&target, address, now));
        first.or_else(|| self.rested_of_any(target, addresses, start, now))
    }

    #[inline(never)]
    fn rested_of_any<A: Address>(
        &mut self,
        target: SnatTarget<A>,
        addresses: &[SnatAddress<A>],
        start: usize,
        now: Tick,
    ) -> Option<SnatLease<A>> {
        from(addresses, start).find_map(|address| self.rested(&target, address, now))
    }

    /// The port of a pool that has rested the longest, if it has rested for long enough.
    #[inline(always)]
    pub(crate) fn take_rested(&mut self, pool: PoolId, now: Tick) -> Option<u16> {
        self.age_of_oldest(pool, now).is_some_and(|age| age >= self.rest).then(|| self.take_oldest(pool))
    }

    /// Prefetches the port of a pool that has rested the longest.
    #[inline(always)]
    pub(crate) fn prefetch_oldest(&self, pool: PoolId) {
        if let Some(pool) = self.pools.get(pool.index()) {
            self.prefetch_page(pool.head);
        }
    }

    /// Prefetches a page by its number plus one. 0 is no page: the line before the first one is prefetched.
    #[inline(always)]
    fn prefetch_page(&self, page: u32) {
        processor::prefetch_at(&self.pages, (page as usize).wrapping_sub(1));
    }

    /// Allocates a port of one address: a rested one, otherwise one that was never used.
    #[inline(always)]
    fn rested<A: Address>(
        &mut self,
        target: &SnatTarget<A>,
        &SnatAddress { address, index }: &SnatAddress<A>,
        now: Tick,
    ) -> Option<SnatLease<A>> {
        let pool = PoolId::new(target.slot, index);
        let port = self.take_rested(pool, now).or_else(|| self.take_unused(pool, target, address))?;
        Some(SnatLease { address, port, pool })
    }

    /// As [`SnatPorts::allocate_rested`], but falls back to the port that has rested the longest. `None` when all ports
    /// are in use.
    pub fn allocate<A: Address>(
        &mut self,
        target: SnatTarget<A>,
        addresses: &[SnatAddress<A>],
        start: usize,
        now: Tick,
    ) -> Option<SnatLease<A>> {
        if let Some(lease) = self.allocate_rested(target, addresses, start, now) {
            return Some(lease);
        }
        let age = |pool| match self.offer(pool, target.protocol, now) {
            Offer::Early(age) => Some(age),
            _ => None,
        };
        let pools = from(addresses, start).map(|&SnatAddress { address, index }| (address, PoolId::new(target.slot, index)));
        let (_, address, pool) = pools
            .filter_map(|(address, pool)| Some((age(pool)?, address, pool)))
            .reduce(|best, next| if next.0 > best.0 { next } else { best })?;
        self.reused_early += 1;
        Some(SnatLease { address, port: self.take_oldest(pool), pool })
    }

    /// Releases a port that the backend has no memory of: it need not rest and is used next.
    pub fn release_clean(&mut self, pool: PoolId, port: u16, now: Tick) {
        let rested = Tick(now.0.wrapping_sub(self.rest.0));
        let Some(&Pool { head, head_at, generation, .. }) = self.pools.get(pool.index()) else { return };
        if head == 0 || generation != pool.generation() {
            return self.release(pool, port, rested);
        }
        let (page, at) = match head_at.checked_sub(1) {
            Some(at) => (head - 1, at),
            None => {
                // A page is always free, see the sum in `new`.
                let Some(page) = self.take_page() else { return };
                self.pages[page as usize].next = head;
                (page, PAGE_LAST)
            }
        };
        let pool = &mut self.pools[pool.index()];
        (pool.head, pool.head_at) = (page + 1, at);
        pool.resting += 1;
        self.in_use -= 1;
        let page = &mut self.pages[page as usize];
        (page.ports[usize::from(at)], page.freed[usize::from(at)]) = (port, rested);
    }

    /// Releases a port; its rest starts.
    pub fn release(&mut self, pool: PoolId, port: u16, now: Tick) {
        let Some(&Pool { tail, tail_at, generation, .. }) = self.pools.get(pool.index()) else { return };
        if generation != pool.generation() {
            self.in_use -= 1; // its pool now belongs to another target
            return;
        }
        let full = tail == 0 || usize::from(tail_at) == PAGE_PORTS;
        // A page is always free, see the sum in `new`.
        let Some(page) = (if full { self.take_page() } else { Some(tail - 1) }) else { return };
        let pool = &mut self.pools[pool.index()];
        if full {
            match tail {
                0 => (pool.head, pool.head_at) = (page + 1, 0),
                _ => self.pages[tail as usize - 1].next = page + 1,
            }
            (pool.tail, pool.tail_at) = (page + 1, 0);
        }
        let at = usize::from(pool.tail_at);
        pool.tail_at += 1;
        pool.resting += 1;
        self.in_use -= 1;
        let page = &mut self.pages[page as usize];
        (page.ports[at], page.freed[at]) = (port, now);
    }

    /// Visits up to `pools` pools from `start` on, and frees the memory of pools whose ports are all free and rested.
    /// Returns where to continue, 0 after the last pool.
    pub fn sweep(&mut self, start: u32, pools: u32, now: Tick) -> u32 {
        let end = start.saturating_add(pools).min(self.pools_high_water);
        for index in start.min(end) as usize..end as usize {
            let pool = &self.pools[index];
            if pool.resting == 0 || pool.resting < pool.high_water {
                continue;
            }
            // The youngest port has rested, so all have.
            let tail = &self.pages[pool.tail as usize - 1];
            if now.since(tail.freed[usize::from(pool.tail_at) - 1]) >= self.rest {
                let generation = pool.generation; // otherwise ports still held from an older generation would be returned to it
                self.empty(index, Pool { generation, ..Pool::new_zeroed() });
            }
        }
        if end == self.pools_high_water { 0 } else { end }
    }

    /// Frees the memory of a pool and replaces the pool. The chain of pages is freed in one piece.
    fn empty(&mut self, index: usize, new: Pool) {
        let old = std::mem::replace(&mut self.pools[index], new);
        if let Some(tail) = old.tail.checked_sub(1) {
            self.pages[tail as usize].next = self.free_page;
            self.free_page = old.head;
        }
        self.held[usize::from(old.account)] -= old.high_water;
    }

    /// Number of ports that were reused before they had rested. Monotonic.
    #[must_use]
    pub const fn reused_early(&self) -> u64 {
        self.reused_early
    }

    /// Number of ports that flows hold.
    #[must_use]
    pub const fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Ports of a pool that flows hold.
    #[inline(always)]
    fn held_of(&self, id: PoolId) -> u32 {
        let pool = self.pools.get(id.index()).filter(|pool| pool.generation == id.generation());
        pool.map_or(0, |pool| pool.high_water - pool.resting)
    }

    /// Whether flows hold three quarters of the ports of a pool: from then on clients have shares of them.
    #[inline(always)]
    pub(crate) fn is_shared(&self, pool: PoolId) -> bool {
        self.held_of(pool) > u32::from(self.share.count) / 4 * 3
    }

    /// Ports towards a target that flows hold, and all that there are.
    pub(crate) fn use_towards<A>(&self, target: TargetSlot, addresses: &[SnatAddress<A>]) -> (u32, u32) {
        let held = addresses.iter().map(|address| self.held_of(PoolId::new(target, address.index)));
        // In a trial, pools without a free port hold as many as can be.
        let held = held.fold(0, u32::saturating_add);
        let addresses = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        (held, addresses.saturating_mul(self.share.count.into()))
    }

    pub(super) fn offer(&self, id: PoolId, transport: u8, now: Tick) -> Offer {
        match self.age_of_oldest(id, now) {
            Some(age) if age >= self.rest => Offer::Rested,
            _ if self.may_grow(id, transport) => Offer::Fresh,
            Some(age) => Offer::Early(age),
            None => Offer::Nothing,
        }
    }

    /// How long the oldest freed port of a pool has rested. Ports of a previous target do not count for this one.
    #[inline(always)]
    fn age_of_oldest(&self, id: PoolId, now: Tick) -> Option<Ticks> {
        let pool = self.pools.get(id.index()).filter(|pool| pool.resting > 0 && pool.generation == id.generation())?;
        Some(now.since(self.pages[pool.head as usize - 1].freed[usize::from(pool.head_at)]))
    }

    /// Whether a pool may hand out a port that was never used.
    #[inline(always)]
    fn may_grow(&self, id: PoolId, transport: u8) -> bool {
        let Some(pool) = self.pools.get(id.index()) else { return false };
        let high_water = if pool.generation == id.generation() { pool.high_water } else { 0 };
        let held = self.held[usize::from(account_of(transport))];
        let is_small = high_water < SMALL_POOL_PORTS && held < (self.common_limit / 2).saturating_mul(3);
        high_water < u32::from(self.share.count) && (held < self.common_limit || is_small)
    }

    /// Takes the head of a non-empty queue.
    #[inline(always)]
    fn take_oldest(&mut self, pool: PoolId) -> u16 {
        let pool = &mut self.pools[pool.index()];
        let page = &mut self.pages[pool.head as usize - 1];
        let port = page.ports[usize::from(pool.head_at)];
        let next = page.next;
        pool.head_at += 1;
        pool.resting -= 1;
        self.in_use += 1;
        if pool.resting == 0 || usize::from(pool.head_at) == PAGE_PORTS {
            let emptied = pool.head;
            pool.head = page.next;
            pool.head_at = 0;
            if pool.resting == 0 {
                (pool.head, pool.tail, pool.tail_at) = (0, 0, 0);
            }
            page.next = self.free_page;
            self.free_page = emptied;
        } else if pool.head_at == FETCH_NEXT_AT {
            self.prefetch_page(next); // it was written when its ports were freed, a minute ago
        }
        port
    }

    /// Takes the next unused port of a pool, if there is one and the pool may grow.
    #[inline(never)]
    pub(crate) fn take_unused<A: Address>(&mut self, id: PoolId, target: &SnatTarget<A>, snat: A) -> Option<u16> {
        if !self.may_grow(id, target.protocol) {
            return None;
        }
        let index = id.index();
        if self.pools[index].high_water == 0 || self.pools[index].generation != id.generation() {
            let (entry, account) = (self.share.entry(target.address, target.port, snat), account_of(target.protocol));
            self.empty(index, Pool { entry, account, generation: id.generation(), ..Pool::new_zeroed() });
        }
        let pool = &mut self.pools[index];
        let port = self.share.port::<A>(pool.high_water, pool.entry);
        pool.high_water += 1;
        self.held[usize::from(pool.account)] += 1;
        self.in_use += 1;
        self.pools_high_water = self.pools_high_water.max((id.0 & ((1 << PoolId::INDEX_BITS) - 1)) + 1);
        Some(port)
    }

    fn take_page(&mut self) -> Option<u32> {
        match self.free_page.checked_sub(1) {
            Some(page) => {
                self.free_page = std::mem::take(&mut self.pages[page as usize].next);
                self.prefetch_page(self.free_page); // the one that is taken next
                Some(page)
            }
            None if (self.pages_high_water as usize) < self.pages.len() => {
                self.pages_high_water += 1;
                Some(self.pages_high_water - 1)
            }
            None => None,
        }
    }
}
