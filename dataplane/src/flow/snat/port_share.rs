//! The share of one worker in the SNAT ports of every pool, chosen so that a backend's reply reaches the worker.
//!
//! **Invariant:** the shares of all workers are disjoint, and together hold every port.
//!
//! Not here: the state of ports (`ports`).

use std::sync::Arc;

use proto::limits::{SNAT_PORT_FIRST, SNAT_PORT_LAST};

use super::port_spread::PortSpread;
use crate::wire::Address;

/// The share of one worker in the ports of every pool.
#[derive(Clone, Debug)]
pub struct PortShare {
    pub(crate) count: u16,
    /// The position, in the order of ports, of the first one that a pool hands out.
    start: u16,
    rule: ShareRule,
}
/// The rule that selects the ports of a share.
#[derive(Clone, Debug)]
enum ShareRule {
    /// Every `stride`th port from `first` on: the remainder identifies the worker.
    Remainder { first: u16, stride: u16 },
    /// Ports whose replies hash to the worker; they differ from pool to pool.
    Spread { spread: Arc<PortSpread>, worker: u8 },
}
impl PortShare {
    /// The ports whose remainder modulo `workers` is `worker`.
    #[must_use]
    pub fn of_worker(worker: u16, workers: u16) -> Self {
        let stride = workers.max(1);
        let worker = worker % stride;
        let first = SNAT_PORT_FIRST + (worker + stride - SNAT_PORT_FIRST % stride) % stride;
        Self { count: (SNAT_PORT_LAST - first) / stride + 1, start: 0, rule: ShareRule::Remainder { first, stride } }
    }

    /// The ports whose replies network cards spread to this worker. Port ranges are whole blocks of 128.
    pub(crate) fn spread(spread: Arc<PortSpread>, worker: u8) -> Self {
        const BLOCKS: u16 = (SNAT_PORT_LAST - SNAT_PORT_FIRST) / 128 + 1;
        const { assert!(SNAT_PORT_FIRST.is_multiple_of(128) && SNAT_PORT_LAST % 128 == 127) };
        Self { count: BLOCKS * spread.ports_per_block(worker), start: 0, rule: ShareRule::Spread { spread, worker } }
    }

    /// All ports, for a gateway with one worker.
    #[must_use]
    pub fn whole() -> Self {
        Self::of_worker(0, 1)
    }

    /// This port alone.
    pub(crate) const fn of_one(port: u16) -> Self {
        Self { count: 1, start: 0, rule: ShareRule::Remainder { first: port, stride: 1 } }
    }

    /// Number of ports in each pool.
    #[must_use]
    pub const fn count(&self) -> u16 {
        self.count
    }

    /// The same ports in an order that begins at another port: `random` modulo their number. The first port follows the
    /// last.
    #[allow(clippy::cast_possible_truncation)] // a remainder
    pub(crate) fn starting_at(self, random: u64) -> Self {
        Self { start: (random % u64::from(self.count.max(1))) as u16, ..self }
    }

    /// The n-th port of a pool that keeps `entry` (see [`PortShare::entry`]).
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // n < count
    pub(crate) fn port<A: Address>(&self, n: u32, entry: u8) -> u16 {
        let (n, count) = (n + u32::from(self.start), u32::from(self.count));
        let n = if n >= count { n - count } else { n };
        match &self.rule {
            ShareRule::Remainder { first, stride } => first + stride * n as u16,
            ShareRule::Spread { spread, worker } => spread.port::<A>(*worker, SNAT_PORT_FIRST, n, entry),
        }
    }

    /// The value that a pool must store to compute its ports: the RETA entry of a reply without its destination port.
    pub(crate) fn entry<A: Address>(&self, target: A, target_port: u16, snat: A) -> u8 {
        match &self.rule {
            ShareRule::Remainder { .. } => 0,
            ShareRule::Spread { spread, .. } => spread.entry_without_port(target, target_port, snat),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn a_share_that_starts_anywhere_has_the_same_ports_in_the_same_order(
            workers in 1u16..40, worker in 0u16..40, random: u64, n in 0u32..64_512,
        ) {
            let share = PortShare::of_worker(worker, workers);
            let (moved, count) = (share.clone().starting_at(random), u32::from(share.count()));
            let start = u32::try_from(random % u64::from(count)).unwrap();
            let n = n % count;
            prop_assert_eq!(moved.port::<u32>(n, 0), share.port::<u32>((n + start) % count, 0));
            let of = |share: &PortShare| (0..count).map(|n| share.port::<u32>(n, 0)).collect::<BTreeSet<_>>();
            prop_assert_eq!(of(&moved), of(&share));
        }
    }
}
