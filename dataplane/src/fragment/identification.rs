//! IPv4 and IPv6 identifications that the gateway assigns: a device that merges packets of several senders under one
//! source address must keep their identifications apart (RFC 6864 section 5.3).
//!
//! **Invariant:** identifications that one worker assigns to one source, destination and protocol repeat only after its
//! whole share; shares of workers are disjoint. They are a counter plus a keyed hash of the addresses, so nobody can
//! infer from his own identifications how many others get (RFC 7739 section 5.3).
//!
//! Not here: datagrams that must not be fragmented, which need no identification (RFC 6864 section 4.1).

use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{Address, Tuple, TupleHash, TupleKey};

/// Number of counters. Pairs of addresses that share a counter only use it up faster. 2,048 * 4 bytes = 8 KiB stay in a
/// core's cache.
const COUNTERS: usize = 2_048;

/// The identifications that one worker assigns.
#[derive(Debug)]
pub(crate) struct Identifications {
    hash: TupleHash,
    counters: Box<[u32; COUNTERS]>,
    /// Which of the shares of the numbers of each family is this worker's.
    worker: u64,
    /// Numbers of each worker.
    share_v4: u64,
    share_v6: u64,
}

impl Identifications {
    /// For one of `workers` workers; `seed` is secret and the same on all.
    pub(crate) fn new(seed: u64, worker: u16, workers: u16) -> Self {
        let workers = u64::from(workers.max(1));
        Self {
            hash: TupleHash::new(!seed),
            counters: Box::new([0; COUNTERS]),
            worker: u64::from(worker) % workers,
            share_v4: (1 << 16) / workers,
            share_v6: (1 << 32) / workers,
        }
    }

    /// A new identification for a datagram: 16 bits for IPv4, 32 for IPv6.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // of the hash its bits; a number is below the space, which is at most 2^32
    pub(crate) fn next<A: Address>(&mut self, source: A, destination: A, protocol: u8) -> u32 {
        let key = A::Key::of(&Tuple { source, destination, source_port: 0, destination_port: 0, protocol });
        let hash = self.hash.hash_key(&key, protocol);
        let share = if A::BYTES == 4 { self.share_v4 } else { self.share_v6 };
        let number = u64::from(self.count(hash as u32).wrapping_add((hash >> 32) as u32));
        (self.worker * share + within(number, share)) as u32
    }

    /// The next number of the counter for a hash.
    #[inline(always)]
    fn count(&mut self, hash: u32) -> u32 {
        let Some(counter) = self.counters.get_mut(hash as usize % COUNTERS) else { return 0 };
        *counter = counter.wrapping_add(1);
        *counter
    }

    /// As [`Identifications::next`], for those of eight IPv4 datagrams that are bits of `wanted`, by addresses as they stand
    /// in packets. The identifications of the others are meaningless.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // 16 bits
    pub(crate) fn next_of_eight(&mut self, avx2: Avx2, addresses: [Lanes; 2], protocol: Lanes, wanted: u8) -> Lanes {
        let [source, destination] = addresses;
        let [lower, upper] = self.hash.hash_eight(avx2, [source, destination, avx2.splat(0)], protocol);
        let mut counts = [0; LANES];
        for (lane, (count, hash)) in counts.iter_mut().zip(lower.to_array()).enumerate() {
            if wanted >> lane & 1 != 0 {
                *count = self.count(hash);
            }
        }
        let (numbers, share) = (avx2.lanes(counts) + upper, self.share_v4);
        let first = avx2.splat((self.worker * share) as u32);
        if share.is_power_of_two() {
            return first + (numbers & avx2.splat(share as u32 - 1));
        }
        first + avx2.lanes(numbers.to_array().map(|number| within(number.into(), share) as u32))
    }
}

/// A number below `share`. A division takes longer than all else here, and most gateways have one, two or four workers.
#[inline(always)]
const fn within(number: u64, share: u64) -> u64 {
    if share.is_power_of_two() { number & (share - 1) } else { number % share }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_repeat_only_after_all_of_the_share() {
        let mut whole = Identifications::new(7, 0, 1);
        let all: HashSet<u32> = (0..65_536).map(|_| whole.next(0x0a00_0003_u32, 0x0a00_000b, 17)).collect();
        assert_eq!(all.len(), 65_536);
    }

    #[test]
    fn workers_give_none_of_each_other() {
        let mut seen = HashSet::new();
        for worker in 0..3 {
            let mut share = Identifications::new(7, worker, 3);
            for _ in 0..65_536 / 3 {
                assert!(seen.insert(share.next(0x0a00_0003_u32, 0x0a00_000b, 17)));
            }
        }
    }

    #[test]
    fn eight_at_a_time_get_the_same_numbers_as_one_by_one() {
        let Some(avx2) = Avx2::detect() else { return };
        for (workers, wanted) in [(1, 0xff), (3, 0xff), (2, 0b0101_1001)] {
            let [mut eight, mut one] = [(); 2].map(|()| Identifications::new(7, workers - 1, workers));
            for _ in 0..100 {
                // Two of the pairs of addresses are equal.
                let (source, destination) = ([0x0a00_0003_u32; LANES], [1, 2, 3, 1, 5, 6, 7, 8_u32]);
                let words = |addresses: [u32; LANES]| avx2.lanes(addresses.map(u32::to_be));
                let numbers = eight.next_of_eight(avx2, [words(source), words(destination)], avx2.splat(17), wanted);
                for lane in (0..LANES).filter(|lane| wanted >> lane & 1 != 0) {
                    assert_eq!(numbers.to_array()[lane], one.next(source[lane], destination[lane], 17));
                }
            }
        }
    }

    #[test]
    fn numbers_of_ipv6_use_32_bits_and_differ_by_address() {
        let mut whole = Identifications::new(7, 0, 1);
        let of = |whole: &mut Identifications, last: u128| whole.next(0xfd00_u128 << 112 | 3, 0xfd00_u128 << 112 | last, 17);
        let (a, b) = (of(&mut whole, 11), of(&mut whole, 12));
        assert!(a > 0xffff || b > 0xffff, "{a} {b}");
        assert_ne!(a.abs_diff(b), 1);
        assert_eq!(of(&mut whole, 11), a + 1);
    }
}
