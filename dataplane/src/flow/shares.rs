//! Fair shares: how much of a table that many fill one of them may hold (docs/internals/decisions/0087-fair-shares.md).
//!
//! A holder may grow while it holds less than a fixed multiple of what is free. This is the dynamic threshold of
//! Choudhury and Hahne (1998): a holder that wants little is not limited, holders that want more end with equal shares,
//! and only the amount that each holds is known. Of n holders that want everything each gets `factor / (1 + n factor)`,
//! so a part of one more share stays free for the next holder.
//!
//! The ports that a client holds towards a target are counted in a cell that a secret hash chooses, so that the memory
//! is bounded however many clients there are. Two clients that share a cell share a share.
//!
//! **Invariant:** a cell counts the flows in the table with a SNAT port of a pool whose client and target fall on it.
//!
//! Not here: the flows of each Service (`stats`), and the fate of a new flow whose holder may not grow
//! (`forward::decide`).

use zerocopy::FromZeros;

use super::snat::PoolId;
use crate::wire::{Address, split_mix};

/// Of the flow table: below an eighth of free room it binds, since a Service holds at most all.
pub(crate) const FLOWS_FACTOR: u32 = 8;
/// Of the SNAT ports of a target: once three quarters are in use it binds.
pub(crate) const PORTS_FACTOR: u32 = 4;

/// Whether a holder of `held` may take more of a shared table with `free` room.
#[inline(always)]
pub(crate) const fn may_grow(held: u32, free: u32, factor: u32) -> bool {
    // The added 1 lets a holder with next to nothing compete when nothing is free.
    (held as u64) < factor as u64 * (free as u64 + 1)
}

/// Bits of the number of cells: 2^18 * 4 bytes = 1 MiB, and with 1,000 clients that hold their whole share one client
/// in 262 shares the cell of one of them.
const CELL_BITS_MAX: u32 = 18;
/// The smallest number of these bits: 16 KiB.
const CELL_BITS_MIN: u32 = 12;

/// How many SNAT ports each client holds towards each target, in one table.
#[derive(Debug)]
pub(super) struct ClientPorts {
    cells: Box<[u32]>,
    /// Odd, and secret.
    multiplier: u64,
    shift: u32,
}

impl ClientPorts {
    /// For a table of this many flows; `None` without memory.
    pub(super) fn new(flows: u32, seed: u64) -> Option<Self> {
        let bits = flows.saturating_mul(4).max(1).ilog2().clamp(CELL_BITS_MIN, CELL_BITS_MAX);
        let cells = <[u32]>::new_box_zeroed_with_elems(1 << bits).ok()?;
        Some(Self { cells, multiplier: split_mix(seed ^ 0x5a7e) | 1, shift: u64::BITS - bits })
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // at most 18 bits
    fn cell<A: Address>(&self, client: A, pool: PoolId) -> usize {
        let target = u64::from(pool.target_index()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((client.site() ^ target).wrapping_mul(self.multiplier) >> self.shift) as usize
    }

    #[inline(always)]
    fn change<A: Address>(&mut self, client: A, pool: PoolId, by: u32) {
        let cell = self.cell(client, pool);
        if let Some(cell) = self.cells.get_mut(cell).filter(|_| pool != PoolId::NONE) {
            *cell = cell.wrapping_add(by);
        }
    }

    /// Counts a port of this pool.
    #[inline(always)]
    pub(super) fn add<A: Address>(&mut self, client: A, pool: PoolId) {
        self.change(client, pool, 1);
    }

    /// Counts one less.
    #[inline(always)]
    pub(super) fn remove<A: Address>(&mut self, client: A, pool: PoolId) {
        self.change(client, pool, u32::MAX);
    }

    /// The ports that a client holds towards the target of this pool.
    pub(super) fn held<A: Address>(&self, client: A, pool: PoolId) -> u32 {
        self.cells.get(self.cell(client, pool)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::TargetSlot;

    /// The final amounts of holders with these wants in a table of `all`, if they take one piece each in turn.
    fn filled(wants: &[u32], all: u32, factor: u32) -> Vec<u32> {
        let mut held = vec![0; wants.len()];
        loop {
            let before = held.clone();
            for (held_by, want) in (0..).zip(wants) {
                let free = all - held.iter().sum::<u32>();
                if held[held_by] < *want && free > 0 && may_grow(held[held_by], free, factor) {
                    held[held_by] += 1;
                }
            }
            if held == before {
                return held;
            }
        }
    }

    #[test]
    fn holders_that_want_more_get_equal_shares_and_those_that_want_little_all_of_it() {
        for (factor, wants) in [(FLOWS_FACTOR, vec![9_000, 20, 9_000, 300]), (PORTS_FACTOR, vec![9_000, 9_000, 9_000, 5])] {
            let all = 10_000;
            let held = filled(&wants, all, factor);
            let greedy: Vec<u32> = held.iter().zip(&wants).filter(|(_, want)| **want == 9_000).map(|(held, _)| *held).collect();
            let modest: u32 = wants.iter().filter(|want| **want < 9_000).sum();
            let n = u32::try_from(greedy.len()).unwrap();
            let share = factor * (all - modest) / (1 + n * factor);
            assert!(greedy.iter().all(|held| held.abs_diff(share) <= factor), "{greedy:?} of {share}");
            assert_eq!(held.iter().sum::<u32>() - greedy.iter().sum::<u32>(), modest, "{held:?}");
        }
    }

    #[test]
    fn nobody_is_limited_while_an_eighth_of_flows_or_a_quarter_of_ports_is_free() {
        assert!(may_grow(7_000, 1_000, FLOWS_FACTOR) && may_grow(6_000, 2_000, PORTS_FACTOR));
        assert!(!may_grow(7_200, 800, FLOWS_FACTOR) && !may_grow(6_200, 1_500, PORTS_FACTOR));
    }

    #[test]
    fn clients_are_told_apart_by_address_or_by_64_bits_and_by_target() {
        let mut ports = ClientPorts::new(1 << 20, 7).unwrap();
        let pool = |target| PoolId::new(TargetSlot { index: target, generation: 3 }, 1);
        let (one, other) = (0x2001_0db8_0000_0001_u128 << 64 | 5, 0x2001_0db8_0000_0002_u128 << 64 | 5);
        (0..3).for_each(|_| ports.add(one, pool(9)));
        ports.remove(one, pool(9));
        ports.add(one, PoolId::NONE);
        assert_eq!([(one, 9), (one + 77, 9), (other, 9), (one, 8)].map(|(client, t)| ports.held(client, pool(t))), [2, 2, 0, 0]);
        let (one, other) = (0xc633_6407_u32, 0xc633_6408_u32);
        ports.add(one, pool(7));
        assert_eq!([ports.held(one, pool(7)), ports.held(other, pool(7))], [1, 0]);
    }
}
