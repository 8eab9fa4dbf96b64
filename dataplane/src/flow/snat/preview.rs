//! The port that a new flow would get, found without allocating it, for `sluicectl explain`.
//!
//! **Invariant:** a preview is what [`SnatPorts::allocate`] would return at this moment.
//!
//! Not here: flows that yield for want of a port.

use zerocopy::{AllocError, FromZeros};

use super::lease::{PoolId, SnatAddress, SnatLease, SnatTarget, TargetSlot};
use super::port_share::PortShare;
use super::ports::{ACCOUNTS, Offer, Page, Pool, SnatPorts, from};
use crate::flow::tick::Tick;
use crate::wire::Address;

/// A port that is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseOffer<A> {
    /// The address and the port.
    pub lease: SnatLease<A>,
    /// Whether the port has rested for too short a time, and no better port is free.
    pub is_early: bool,
}

impl SnatPorts {
    /// The lease that [`SnatPorts::allocate`] would return; `None` when all ports are in use.
    pub(crate) fn preview<A: Address>(
        &self,
        target: SnatTarget<A>,
        addresses: &[SnatAddress<A>],
        start: usize,
        now: Tick,
    ) -> Option<LeaseOffer<A>> {
        let offers = || {
            from(addresses, start).map(|&SnatAddress { address, index }| {
                let pool = PoolId::new(target.slot, index);
                (address, pool, self.offer(pool, target.protocol, now))
            })
        };
        let rested = offers().find_map(|(address, pool, offer)| {
            let port = match offer {
                Offer::Rested => self.oldest(pool),
                Offer::Fresh => self.fresh(pool, &target, address),
                Offer::Early(_) | Offer::Nothing => return None,
            };
            Some(LeaseOffer { lease: SnatLease { address, port, pool }, is_early: false })
        });
        let early = || {
            let aged = |(address, pool, offer)| if let Offer::Early(age) = offer { Some((age, address, pool)) } else { None };
            let (_, address, pool) = offers().filter_map(aged).reduce(|best, next| if next.0 > best.0 { next } else { best })?;
            Some(LeaseOffer { lease: SnatLease { address, port: self.oldest(pool), pool }, is_early: true })
        };
        rested.or_else(early)
    }

    fn oldest(&self, pool: PoolId) -> u16 {
        let pool = &self.pools[pool.index()];
        self.pages[pool.head as usize - 1].ports[usize::from(pool.head_at)]
    }

    fn fresh<A: Address>(&self, id: PoolId, target: &SnatTarget<A>, snat: A) -> u16 {
        let pool = &self.pools[id.index()];
        if pool.high_water == 0 || pool.generation != id.generation() {
            self.share.port::<A>(0, self.share.entry(target.address, target.port, snat))
        } else {
            self.share.port::<A>(pool.high_water, pool.entry)
        }
    }
}

/// SNAT ports for trials of decisions. They are reserved once, since there are a million pools, and each trial clears
/// the changes of the trial before.
#[derive(Debug)]
pub(crate) struct TrialPorts {
    ports: SnatPorts,
    changed: Vec<PoolId>,
}

impl TrialPorts {
    /// Reserves their memory.
    ///
    /// # Errors
    /// [`AllocError`] when there is none.
    pub(crate) fn new() -> Result<Self, AllocError> {
        Ok(Self { ports: SnatPorts::new(1, PortShare::of_one(0))?, changed: Vec::new() })
    }

    /// Ports of which one is free in each pool. A trial may return the ports of flows to the pools in `held`.
    pub(crate) fn any(&mut self, held: impl Iterator<Item = PoolId>) -> &mut SnatPorts {
        let Self { ports, changed } = self;
        for pool in changed.drain(..) {
            if let Some(pool) = ports.pools.get_mut(pool.index()) {
                *pool = Pool::new_zeroed();
            }
        }
        ports.pages.iter_mut().take(ports.pages_high_water as usize).for_each(|page| *page = Page::new_zeroed());
        (ports.free_page, ports.pages_high_water, ports.pools_high_water) = (0, 0, 0);
        (ports.held, ports.in_use) = ([0; ACCOUNTS as usize], u32::MAX / 2);
        ports.share = PortShare::of_one(0);
        changed.extend(held);
        ports
    }

    /// Ports of which only that of the lease is free towards a target; without a lease, none.
    pub(crate) fn only<A: Address>(
        &mut self,
        held: impl Iterator<Item = PoolId>,
        target: TargetSlot,
        addresses: &[SnatAddress<A>],
        lease: Option<&SnatLease<A>>,
    ) -> &mut SnatPorts {
        self.any(held);
        self.ports.share = PortShare::of_one(lease.map_or(0, |lease| lease.port));
        let used_up = Pool { high_water: u32::MAX, generation: target.generation, ..Pool::new_zeroed() };
        for pool in addresses.iter().map(|address| PoolId::new(target, address.index)) {
            self.changed.push(pool);
            if lease.is_none_or(|lease| lease.pool != pool)
                && let Some(state) = self.ports.pools.get_mut(pool.index())
            {
                *state = used_up;
            }
        }
        &mut self.ports
    }

    /// Notes the pool of a port that a trial has taken.
    pub(crate) fn took(&mut self, pool: PoolId) {
        self.changed.push(pool);
    }
}
