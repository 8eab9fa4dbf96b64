//! Maglev tables (Eisenbud et al., NSDI'16, section 3.4): which backend takes the flows of a hash value.
//!
//! **Invariant:** the same [`MaglevSpec`] and backends give the same table on every gateway and in every release with
//! the same hash version; golden tables in the tests pin it.
//!
//! Each backend visits the entries in its own order and takes the first free one at each of its turns. With weights,
//! the k-th turn of a backend comes in round `ceil(k * largest weight / weight)`; within a round, turns are ordered by
//! address and port.
//!
//! Not here: health. The caller passes the backends that may take flows.

use std::net::{IpAddr, SocketAddr};

use proto::MaglevSpec;

use super::rounds::turns;
use crate::wire::split_mix;

/// A lookup table whose entries are positions in the list of backends that it was built from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaglevTable {
    /// Empty without backends.
    entries: Box<[u16]>,
}

/// The hash that determines a backend's order of visiting entries, hash version 1: FNV-1a (64 bits) over the address in
/// network order (4 or 16 bytes) and the port (2 bytes), mixed with the seed by SplitMix64. It must never change.
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
pub(crate) const fn reduce(hash: u64, n: u32) -> u32 {
    ((hash as u128 * n as u128) >> 64) as u32
}

/// Adds two numbers modulo the size. Both are below it, and it is below 2^31.
#[inline]
fn add(a: u32, b: u32, size: u32) -> u32 {
    let sum = a + b;
    // Below the size the difference wraps to a large number.
    sum.min(sum.wrapping_sub(size))
}

/// Most entries of its order that a backend looks at together.
const WINDOW: usize = 8;

/// A backend on its way through its order: offset, offset + skip, ... modulo the (prime) size.
struct Walker {
    /// The next entry of its order. It has visited all before.
    at: u32,
    /// How far ahead the entries after that are, modulo the size: 0, skip, 2 skip, ...
    ahead: [u32; WINDOW + 1],
}

impl Walker {
    fn new(backend: SocketAddr, MaglevSpec { size, seed, .. }: MaglevSpec) -> Self {
        let hash = identity_hash(backend, seed);
        let skip = reduce(split_mix(hash), size - 1) + 1;
        let mut ahead = [0; WINDOW + 1];
        for n in 1..ahead.len() {
            ahead[n] = add(ahead[n - 1], skip, size);
        }
        Self { at: reduce(hash, size), ahead }
    }

    const fn skip(&self) -> u32 {
        self.ahead[1]
    }

    /// The first entry of its order that is free. It looks at `LOOK` entries together.
    #[inline(always)]
    fn next_free<const LOOK: usize>(&self, taken: &[u8], size: u32) -> u32 {
        let mut at = self.at;
        loop {
            let is_taken = |n: usize| u32::from(taken[at as usize + self.ahead[n] as usize]);
            let before = (0..LOOK).fold(0, |seen, n| seen | is_taken(n) << n).trailing_ones() as usize;
            if before < LOOK {
                return add(at, self.ahead[before], size);
            }
            // Not by `before`: the processor begins with the next entries before it knows that all of these are taken.
            at = add(at, self.ahead[LOOK], size);
        }
    }
}

impl MaglevTable {
    /// Builds the table for these backends, sorted by address and port, each with its weight. Weight 0 takes nothing.
    /// Backends past the 65,535th take nothing; `proto` allows 6,553.
    #[must_use]
    pub fn build(spec: MaglevSpec, backends: &[(SocketAddr, u16)]) -> Self {
        let taking: Vec<(u16, SocketAddr, u16)> =
            (0..u16::MAX).zip(backends).filter(|(_, b)| b.1 > 0).map(|(position, b)| (position, b.0, b.1)).collect();
        let [(first, ..), ..] = taking[..] else { return Self { entries: Box::new([]) } };
        if spec.size < 3 {
            return Self { entries: Box::new([first]) };
        }
        if taking.len() == 1 {
            return Self { entries: vec![first; spec.size as usize].into() };
        }
        let walkers = taking.iter().map(|&(_, address, _)| Walker::new(address, spec)).collect();
        let weights: Vec<u32> = taking.iter().map(|b| b.2.into()).collect();
        let mut entries = Filling::new(spec.size, walkers).fill(&order_of_turns(&weights, spec.size));
        if taking.len() < backends.len() {
            entries.iter_mut().for_each(|entry| *entry = taking[usize::from(*entry)].0);
        }
        Self { entries: entries.into() }
    }

    /// The position of the backend that takes the flows of this hash.
    #[must_use]
    #[inline]
    pub fn choose(&self, hash: u64) -> Option<u16> {
        self.entries.get(self.entry(hash) as usize).copied()
    }

    /// The entry of this hash.
    #[must_use]
    #[inline]
    pub fn entry(&self, hash: u64) -> u32 {
        reduce(hash, self.size())
    }

    /// Number of entries.
    #[must_use]
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // MaglevSpec's size is 32 bits
    pub fn size(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The entries: positions of backends.
    #[must_use]
    pub fn entries(&self) -> &[u16] {
        &self.entries
    }
}

/// The order of turns, which the caller repeats. With equal weights it is one round, with others it fills a table of this
/// size.
fn order_of_turns(weights: &[u32], size: u32) -> Vec<u16> {
    let heaviest = weights.iter().copied().max().unwrap_or(1);
    if weights.iter().all(|&weight| weight == heaviest) {
        return turns(weights, 1);
    }
    // In r rounds there are at least r * sum / heaviest - n turns, since each of the n backends loses less than one to
    // rounding.
    let sum: u64 = weights.iter().copied().map(u64::from).sum();
    let wanted = u64::from(size) + weights.len() as u64;
    let rounds = (wanted * u64::from(heaviest)).div_ceil(sum);
    turns(weights, u32::try_from(rounds).unwrap_or(u32::MAX))
}

/// A table under construction.
struct Filling {
    walkers: Vec<Walker>,
    entries: Vec<u16>,
    /// Whether each entry is taken, 0 or 1. Twice, one after the other, so that no window wraps.
    taken: Vec<u8>,
    free: usize,
    size: u32,
}

impl Filling {
    fn new(size: u32, walkers: Vec<Walker>) -> Self {
        let free = size as usize;
        Self { walkers, entries: vec![0; free], taken: vec![0; 2 * free], free, size }
    }

    /// Takes turns in this order, again and again, until every entry is taken.
    fn fill(mut self, turns: &[u16]) -> Vec<u16> {
        let size = self.size as usize;
        // The processor cannot predict at which entry of its order a backend finds a free one, and mispredictions cost the
        // most: a backend looks at several entries together, at more of them when fewer are free. For the last f free
        // entries, testing each of them costs f tests instead of size / f.
        let rest = self.turns::<2>(turns, turns, size * 3 / 4);
        let rest = self.turns::<4>(turns, rest, size * 3 / 8);
        let rest = self.turns::<WINDOW>(turns, rest, size.isqrt());
        self.last_turns(rest.iter().chain(turns.iter().cycle()));
        self.entries
    }

    /// Takes turns until so many entries are free: the rest of this order, then all of it again and again. Returns the
    /// rest after that.
    fn turns<'a, const LOOK: usize>(&mut self, all: &'a [u16], mut rest: &'a [u16], free: usize) -> &'a [u16] {
        let Self { walkers, entries, taken, size, .. } = self;
        let (entries, taken) = (&mut entries[..*size as usize], &mut taken[..2 * *size as usize]);
        while self.free > free {
            let next = if rest.is_empty() { all } else { rest };
            let (next, later) = next.split_at(next.len().min(self.free - free));
            for &backend in next {
                let walker = &mut walkers[usize::from(backend)];
                let at = walker.next_free::<LOOK>(taken, *size);
                walker.at = add(at, walker.skip(), *size);
                let at = at as usize;
                (entries[at], taken[at], taken[at + entries.len()]) = (backend, 1, 1);
            }
            self.free -= next.len();
            rest = later;
        }
        rest
    }

    /// The turns for the last free entries. The distance of an entry along a backend's order is (entry - position) / skip
    /// modulo the size. As a fraction of the size, in units of 2^-64, that is one multiplication, which is rounded by less
    /// than `size` < 2^20 units; an entry is at least 2^44 units wide.
    fn last_turns<'a>(&mut self, turns: impl Iterator<Item = &'a u16>) {
        let (modulus, width) = (Modulus::new(self.size), u64::MAX / u64::from(self.size));
        let mut free: Vec<u32> = (0..self.size).zip(&self.taken).filter(|(_, taken)| **taken == 0).map(|(at, _)| at).collect();
        let mut scales = vec![None; self.walkers.len()];
        for &backend in turns {
            let walker = &mut self.walkers[usize::from(backend)];
            let scale = *scales[usize::from(backend)].get_or_insert_with(|| fraction(modulus.inverse(walker.skip()), self.size));
            let here = u64::from(walker.at).wrapping_mul(scale);
            let distance = |at: u32| u64::from(at).wrapping_mul(scale).wrapping_sub(here).wrapping_add(width / 2);
            let Some((nearest, _)) = free.iter().enumerate().min_by_key(|&(_, &at)| distance(at)) else { return };
            let at = free.swap_remove(nearest);
            self.entries[at as usize] = backend;
            walker.at = add(at, walker.skip(), self.size);
        }
    }
}

/// n / size in units of 2^-64, rounded down; n is less than the size.
#[allow(clippy::cast_possible_truncation)] // less than 2^64
const fn fraction(n: u32, size: u32) -> u64 {
    (((n as u128) << 64) / size as u128) as u64
}

/// A prime modulus.
#[derive(Clone, Copy)]
struct Modulus {
    n: u32,
    /// 2^64 / n, rounded up, so that a quotient takes one multiplication instead of a division. Exact for factors below
    /// n while n^3 < 2^64 (Granlund, Montgomery 1994); the largest size, 655,373, is below 2^20.
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

    /// The inverse of a, which is a^(n - 2) by Fermat's little theorem.
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

    /// The pseudo code of the paper (Pseudocode 1), with turns skipped by weight: turn k of a backend is due in round
    /// ceil(k * largest / weight).
    fn paper(spec: MaglevSpec, backends: &[(SocketAddr, u16)]) -> Vec<u16> {
        let m = u64::from(spec.size);
        let orders: Vec<_> = backends.iter().map(|b| Walker::new(b.0, spec)).collect();
        let permutation =
            |i: usize, j: u64| usize::try_from((u64::from(orders[i].at) + j * u64::from(orders[i].skip())) % m).unwrap();
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

    #[test]
    fn large_and_weighted_tables_of_version_1_never_change() {
        let mut four = backends(4);
        (four[1].1, four[2].1, four[3].1) = (0, 5, 3);
        assert_eq!(MaglevTable::build(spec(23, 1), &four).entries(), GOLDEN_23_WEIGHTED);
        let mut thousand = backends(1000);
        let digest = |list: &[(SocketAddr, u16)]| {
            let table = MaglevTable::build(spec(65_537, 42), list);
            let bytes = table.entries().iter().flat_map(|entry| entry.to_be_bytes());
            // FNV-1a.
            bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
        };
        assert_eq!(digest(&thousand), GOLDEN_DIGESTS[0]);
        thousand.iter_mut().zip((0..7).cycle()).for_each(|(backend, weight)| backend.1 = weight);
        assert_eq!(digest(&thousand), GOLDEN_DIGESTS[1]);
    }

    // Golden values from the description in this file, computed by an independent program.
    const GOLDEN_23: [u16; 23] = [0, 1, 0, 1, 0, 1, 1, 2, 2, 2, 1, 1, 0, 0, 0, 2, 1, 2, 0, 2, 2, 1, 0];
    const GOLDEN_23_WEIGHTED: [u16; 23] = [0, 2, 2, 3, 2, 2, 2, 2, 2, 2, 3, 3, 2, 2, 0, 3, 2, 2, 2, 3, 2, 3, 3];
    const GOLDEN_DIGESTS: [u64; 2] = [7583838526286813527, 18299893274918925981];
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
    fn the_loss_of_one_of_a_thousand_backends_changes_on_average_at_most_seven_permille_of_the_entries() {
        // Its own entries included. Single losses may change a few entries more.
        let mut changed = Vec::new();
        for seed in 0..5 {
            let all = backends(1000);
            let before = MaglevTable::build(spec(65_537, seed), &all);
            for gone in [0, 250, 499, 999] {
                let mut rest = all.clone();
                rest[gone].1 = 0;
                let after = MaglevTable::build(spec(65_537, seed), &rest);
                let differs = |&(b, a): &(&u16, &u16)| b != a;
                changed.push(before.entries().iter().zip(after.entries()).filter(differs).count());
            }
        }
        let most = changed.iter().max().unwrap();
        assert!(changed.iter().sum::<usize>() * 1000 <= 65_537 * 7 * changed.len(), "{changed:?}");
        assert!(most * 1000 <= 65_537 * 8, "{changed:?}");
    }

    #[test]
    fn the_largest_tables_equal_those_of_the_paper() {
        let largest = backends(6553);
        assert_eq!(MaglevTable::build(spec(655_373, 3), &largest).entries(), paper(spec(655_373, 3), &largest));
        let mut uneven = backends(100);
        uneven.iter_mut().zip((1..).step_by(600)).for_each(|(backend, weight)| backend.1 = weight);
        assert_eq!(MaglevTable::build(spec(65_537, 3), &uneven).entries(), paper(spec(65_537, 3), &uneven));
        // The light backend has one turn, in the last of 65,535 rounds.
        let (heavy, light) = (backends(2)[0].0, backends(2)[1].0);
        let two = [(heavy, u16::MAX), (light, 1)];
        assert_eq!(MaglevTable::build(spec(65_537, 3), &two).entries(), paper(spec(65_537, 3), &two));
    }

    #[test]
    fn shares_follow_weights_and_weight_0_takes_nothing() {
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
        fn the_table_equals_that_of_the_paper(
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
