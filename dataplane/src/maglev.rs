//! Maglev tables (Eisenbud et al., NSDI'16, section 3.4): which backend takes the flows of a hash.
//!
//! **Invariant:** the same [`MaglevSpec`] and backends give the same table on every gateway and in every release with
//! the same hash version; a committed table pins it. Each backend visits the entries in an order of its own and takes
//! the first free one when it is its turn. With weights, the k-th turn of a backend comes in round
//! `ceil(k * largest weight / weight)`; within a round, turns go by address and port. Deliberately not here: health.
//! The caller gives the backends that may take flows.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{IpAddr, SocketAddr};

use proto::MaglevSpec;

use crate::hash::split_mix;

/// No backend.
const FREE: u16 = u16::MAX;
/// A table of positions in the list of backends that it was built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaglevTable {
    /// Empty without backends.
    entries: Box<[u16]>,
}

/// What a backend's order of visiting entries follows from: hash version 1. FNV-1a (64 bits) over the address in
/// network order (4 or 16 bytes) and the port (2 bytes), mixed with the seed by SplitMix64. Never to be changed.
#[must_use]
pub fn identity_hash(backend: SocketAddr, seed: u64) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    match backend.ip() {
        IpAddr::V4(address) => eat(&address.octets()),
        IpAddr::V6(address) => eat(&address.octets()),
    }
    eat(&backend.port().to_be_bytes());
    split_mix(hash ^ split_mix(seed))
}

/// Maps the full range of a hash onto 0..n without division.
#[inline]
#[allow(clippy::cast_possible_truncation)] // below n
const fn reduce(hash: u64, n: u32) -> u32 {
    ((hash as u128 * n as u128) >> 64) as u32
}

/// The order of one backend: offset, offset + skip, ... modulo the (prime) size.
#[derive(Clone, Copy)]
struct Order {
    next: u32,
    skip: u32,
}

impl Order {
    fn new(backend: SocketAddr, spec: MaglevSpec) -> Self {
        let hash = identity_hash(backend, spec.seed);
        Self { next: reduce(hash, spec.size), skip: reduce(split_mix(hash), spec.size - 1) + 1 }
    }
}

impl MaglevTable {
    /// The table for these backends, in the order of address and port, each with its weight. Weight 0 takes nothing.
    /// Backends past the 65,535th take nothing; `proto` allows 6,553.
    #[must_use]
    pub fn build(spec: MaglevSpec, backends: &[(SocketAddr, u16)]) -> Self {
        let taking: Vec<(u16, SocketAddr, u16)> =
            (0..FREE).zip(backends).filter(|(_, b)| b.1 > 0).map(|(position, b)| (position, b.0, b.1)).collect();
        let [(first, ..), ..] = taking[..] else { return Self { entries: Box::new([]) } };
        if spec.size < 3 {
            return Self { entries: Box::new([first]) };
        }
        let orders: Vec<Order> = taking.iter().map(|&(_, address, _)| Order::new(address, spec)).collect();
        let mut filling = Filling::new(spec.size, orders);
        let heaviest = taking.iter().map(|b| b.2).max().unwrap_or(1);
        if taking.iter().all(|b| b.2 == heaviest) {
            while !filling.is_full() {
                for backend in 0..taking.len() {
                    filling.turn(backend);
                }
            }
        } else {
            weighted_turns(&mut filling, &taking, u64::from(heaviest));
        }
        Self { entries: filling.entries.iter().map(|&n| taking[usize::from(n)].0).collect() }
    }

    /// The position of the backend that takes the flows of this hash.
    #[must_use]
    #[inline]
    pub fn choose(&self, hash: u64) -> Option<u16> {
        #[allow(clippy::cast_possible_truncation)] // MaglevSpec's size is 32 bits
        let entry = reduce(hash, self.entries.len() as u32);
        self.entries.get(entry as usize).copied()
    }

    /// The entries.
    #[must_use]
    pub fn entries(&self) -> &[u16] {
        &self.entries
    }
}

/// Turns in the order of (round, backend), until the table is full.
fn weighted_turns(filling: &mut Filling, taking: &[(u16, SocketAddr, u16)], heaviest: u64) {
    let round = |turn: u64, backend: usize| (turn * heaviest).div_ceil(u64::from(taking[backend].2));
    let mut turns: BinaryHeap<_> = (0..taking.len()).map(|backend| Reverse((round(1, backend), backend, 1_u64))).collect();
    while !filling.is_full() {
        let Some(mut first) = turns.peek_mut() else { return };
        let Reverse((_, backend, turn)) = *first;
        *first = Reverse((round(turn + 1, backend), backend, turn + 1));
        drop(first);
        filling.turn(backend);
    }
}

/// A table that is being filled.
struct Filling {
    orders: Vec<Order>,
    entries: Vec<u16>,
    /// Bit per entry: free. 8 KB for 65,537 entries, where the entries themselves take 128 KB: it stays in L1.
    free_bits: Vec<u64>,
    free: usize,
    size: Modulus,
    /// With so few entries free, asking each of them costs less than walking on in a backend's order: f questions
    /// against size / f steps, so the root of the size.
    few_free: usize,
    /// The free entries, once they are few.
    few: Vec<u32>,
}

impl Filling {
    fn new(size: u32, orders: Vec<Order>) -> Self {
        let free = size as usize;
        Self {
            orders,
            entries: vec![FREE; free],
            free_bits: vec![u64::MAX; free.div_ceil(64)],
            free,
            size: Modulus::new(size),
            few_free: free.isqrt(),
            few: Vec::new(),
        }
    }

    fn is_full(&self) -> bool {
        self.free == 0
    }

    /// A backend takes the first free entry of its order.
    #[inline]
    fn turn(&mut self, backend: usize) {
        if self.free <= self.few_free {
            return self.turn_among_few(backend);
        }
        let Order { next: mut at, skip } = self.orders[backend];
        while self.free_bits[at as usize / 64] >> (at % 64) & 1 == 0 {
            at = advance(at, skip, self.size.n);
        }
        self.take(backend, at);
        self.orders[backend].next = advance(at, skip, self.size.n);
    }

    #[allow(clippy::cast_possible_truncation)] // a backend's position is below 65,535
    fn take(&mut self, backend: usize, at: u32) {
        self.free_bits[at as usize / 64] &= !(1 << (at % 64));
        self.entries[at as usize] = backend as u16;
        self.free -= 1;
    }

    /// The same, by asking every free entry how far along the backend's order it lies.
    #[cold]
    fn turn_among_few(&mut self, backend: usize) {
        if self.free == 0 {
            return;
        }
        if self.few.is_empty() {
            self.few = (0..self.size.n).filter(|&at| self.free_bits[at as usize / 64] >> (at % 64) & 1 == 1).collect();
        }
        let (Order { next, skip }, size) = (self.orders[backend], self.size);
        let inverse = size.inverse(skip);
        let distance = |at: u32| size.product(at + if at < next { size.n } else { 0 } - next, inverse);
        let Some((position, _)) = self.few.iter().enumerate().min_by_key(|&(_, &at)| distance(at)) else { return };
        let at = self.few.swap_remove(position);
        self.take(backend, at);
    }
}

/// (at + skip) modulo size, without a branch: below `size`, the subtraction wraps to a large number.
#[inline]
fn advance(at: u32, skip: u32, size: u32) -> u32 {
    let next = at + skip;
    next.min(next.wrapping_sub(size))
}

/// A prime to calculate by.
#[derive(Clone, Copy)]
struct Modulus {
    n: u32,
    /// 2^64 / n, rounded up: a quotient by one multiplication instead of a division, exact for factors below n as
    /// long as n^3 < 2^64 (Granlund, Montgomery 1994); the largest size, 655,373, is below 2^20.
    reciprocal: u64,
}

impl Modulus {
    const fn new(n: u32) -> Self {
        Self { n, reciprocal: u64::MAX / n as u64 + 1 }
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // below n
    const fn product(self, a: u32, b: u32) -> u32 {
        let product = a as u64 * b as u64;
        let quotient = ((product as u128 * self.reciprocal as u128) >> 64) as u64;
        (product - quotient * self.n as u64) as u32
    }

    /// a^(n - 2), by Fermat.
    const fn inverse(self, a: u32) -> u32 {
        let (mut base, mut exponent, mut result) = (a, self.n - 2, 1);
        while exponent > 0 {
            if exponent & 1 == 1 {
                result = self.product(result, base);
            }
            base = self.product(base, base);
            exponent >>= 1;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proto::limits::{MAGLEV_HASH_VERSION, MAGLEV_SIZES};

    fn spec(size: u32, seed: u64) -> MaglevSpec {
        MaglevSpec { size, seed, hash_version: MAGLEV_HASH_VERSION }
    }

    fn backends(count: u32) -> Vec<(SocketAddr, u16)> {
        (0..count).map(|n| (SocketAddr::new(IpAddr::V4((0x0a00_000b + n).into()), 8080), 1)).collect()
    }

    /// The pseudo code of the paper (Pseudocode 1), with turns skipped by weight: a backend's turn number k is due in
    /// round ceil(k * largest / weight).
    fn paper(spec: MaglevSpec, backends: &[(SocketAddr, u16)]) -> Vec<u16> {
        let m = u64::from(spec.size);
        let orders: Vec<_> = backends.iter().map(|b| Order::new(b.0, spec)).collect();
        let permutation =
            |i: usize, j: u64| usize::try_from((u64::from(orders[i].next) + j * u64::from(orders[i].skip)) % m).unwrap();
        let largest = u64::from(backends.iter().map(|b| b.1).max().unwrap());
        let (mut next, mut turns) = (vec![0; backends.len()], vec![1; backends.len()]);
        let mut entry = vec![None; spec.size as usize];
        let mut n = 0;
        for round in 1.. {
            for i in 0..backends.len() {
                let weight = u64::from(backends[i].1);
                if weight == 0 || (turns[i] * largest).div_ceil(weight) > round {
                    continue;
                }
                turns[i] += 1;
                let mut c = permutation(i, next[i]);
                while entry[c].is_some() {
                    next[i] += 1;
                    c = permutation(i, next[i]);
                }
                entry[c] = Some(u16::try_from(i).unwrap());
                next[i] += 1;
                n += 1;
                if n == spec.size {
                    return entry.into_iter().flatten().collect();
                }
            }
        }
        Vec::new()
    }

    #[test]
    fn the_table_of_version_1_never_changes() {
        let table = MaglevTable::build(spec(23, 1), &backends(3));
        assert_eq!(table.entries(), GOLDEN_23);
        let v6: SocketAddr = "[2001:db8::1]:443".parse().unwrap();
        assert_eq!([identity_hash(v6, 0), identity_hash(backends(1)[0].0, 7)], GOLDEN_IDENTITIES);
    }

    // From the description in this file, computed by a second program.
    const GOLDEN_23: [u16; 23] = [0, 1, 0, 1, 0, 1, 1, 2, 2, 2, 1, 1, 0, 0, 0, 2, 1, 2, 0, 2, 2, 1, 0];
    const GOLDEN_IDENTITIES: [u64; 2] = [5989861451815283415, 18298812945152413433];

    #[test]
    fn shares_are_within_one_percent_when_the_table_has_a_hundred_entries_per_backend() {
        for (size, count) in [(251, 2), (1021, 10), (65_537, 655), (655_373, 6553)] {
            let table = MaglevTable::build(spec(size, 42), &backends(count));
            let mut shares = vec![0u32; count as usize];
            table.entries().iter().for_each(|&n| shares[usize::from(n)] += 1);
            let average = f64::from(size) / f64::from(count);
            let most = f64::from(*shares.iter().max().unwrap());
            assert!(most / average <= 1.01, "{size} entries, {count} backends: {most} of {average:.1}");
        }
    }

    #[test]
    fn removing_one_of_a_thousand_backends_moves_less_than_seven_permille_of_the_others() {
        let all = backends(1000);
        let before = MaglevTable::build(spec(65_537, 42), &all);
        for gone in [0, 499, 999] {
            let mut rest = all.clone();
            rest[gone].1 = 0;
            let after = MaglevTable::build(spec(65_537, 42), &rest);
            let moved = before.entries().iter().zip(after.entries()).filter(|&(&b, &a)| b != a && usize::from(b) != gone).count();
            assert!(moved * 1000 <= 65_537 * 7, "{moved} entries moved that were not of backend {gone}");
        }
    }

    #[test]
    fn weights_are_shares_and_none_take_nothing() {
        let mut three = backends(3);
        (three[0].1, three[1].1, three[2].1) = (1, 0, 3);
        let table = MaglevTable::build(spec(4093, 1), &three);
        let share = |n| table.entries().iter().filter(|&&e| e == n).count();
        assert_eq!((share(0), share(1), share(2)), (1023, 0, 3070));
        assert_eq!(MaglevTable::build(spec(4093, 1), &[]).choose(1), None);
        three.iter_mut().for_each(|b| b.1 = 0);
        assert_eq!(MaglevTable::build(spec(4093, 1), &three).choose(1), None);
    }

    #[test]
    fn hashes_choose_over_the_whole_table() {
        let table = MaglevTable::build(spec(251, 1), &backends(2));
        assert_eq!(table.choose(0), table.entries().first().copied());
        assert_eq!(table.choose(u64::MAX), table.entries().last().copied());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn the_table_is_the_papers(
            size in proptest::sample::select(&MAGLEV_SIZES[..6]),
            seed in any::<u64>(),
            count in 1u32..60,
            weights in proptest::collection::vec(0u16..5, 60),
            equal in any::<bool>(),
        ) {
            let mut list = backends(count);
            if !equal {
                list.iter_mut().zip(weights).for_each(|(b, w)| b.1 = w);
                list[0].1 = 7;
            }
            let table = MaglevTable::build(spec(size, seed), &list);
            prop_assert_eq!(table.entries(), &paper(spec(size, seed), &list)[..]);
        }
    }
}
