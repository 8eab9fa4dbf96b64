//! IPv4 and IPv6 identifications that the gateway assigns: a device that merges packets of several senders under one
//! source address must keep their identifications apart (RFC 6864 section 5.3).
//!
//! IPv4 has 65,536 for a source, destination and protocol. All workers take them from there by blocks, the larger the
//! more a worker needs: with fixed shares a pair would repeat its own after 1,024 packets where there are 64 workers,
//! although the others need none. IPv6 has 2^32, of which each worker has a share.
//!
//! **Invariants:** identifications of one source, destination and protocol repeat only after all of them (IPv6: of the
//! worker's share) were taken; a block is used within a tick, or given up. They are a counter plus a keyed hash of the
//! addresses, so nobody can infer from his own identifications how many others get (RFC 7739 section 5.3).
//!
//! Not here: datagrams that must not be fragmented, which need no identification (RFC 6864 section 4.1).

use crate::flow::Tick;
use crate::wire::processor::{Avx2, LANES, Lanes};
use crate::wire::{Address, Tuple, TupleHash, TupleKey};
use crate::workers::{IDENTIFICATION_COUNTERS as COUNTERS, IdentificationBlocks};

/// The first block that a worker takes of a counter in a tick, and the largest: each further block is twice as long. A
/// worker gives up at most about as many as it used, and 64 workers hold a quarter of all at most.
const BLOCKS: [u16; 2] = [8, 256];

/// A block of which a worker assigns identifications: the next one (16 bits), the size (16 bits), the tick in which it
/// was taken (16 bits, never 0), and how many are left (16 bits).
#[derive(Clone, Copy, Debug, Default)]
struct Block(u64);

impl Block {
    const NEXT: u32 = 48;
    const SIZE: u32 = 32;
    const TICK: u32 = 16;
    /// One identification is taken.
    const ONE_LESS: u64 = (1 << Self::NEXT) - 1;

    fn taken(next: u16, size: u16, valid_from: u32) -> Self {
        let tick = u64::from(valid_from - 1);
        Self(u64::from(next) << Self::NEXT | u64::from(size) << Self::SIZE | tick | u64::from(size))
    }

    /// Whether some are left, of a block of this tick.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the tick and how many are left
    const fn is_valid(self, valid_from: u32) -> bool {
        (self.0 as u32).wrapping_sub(valid_from) < 0xffff
    }

    /// The size of the block after this one.
    #[allow(clippy::cast_possible_truncation)] // fields
    fn next_size(self, valid_from: u32) -> u16 {
        let is_of_tick = self.0 as u32 == valid_from - 1;
        let twice = ((self.0 >> Self::SIZE) as u16).saturating_mul(2);
        if is_of_tick { twice.clamp(BLOCKS[0], BLOCKS[1]) } else { BLOCKS[0] }
    }
}

/// The identifications that one worker assigns.
#[derive(Debug)]
pub(crate) struct Identifications {
    hash: TupleHash,
    shared: IdentificationBlocks,
    /// IPv4. 2,048 * 8 bytes = 16 KiB stay in a core's cache.
    blocks: Box<[Block; COUNTERS]>,
    /// The lower half of a block of this tick, of which one identification is left.
    valid_from: u32,
    /// IPv6.
    counters: Box<[u32; COUNTERS]>,
    /// Which of the shares of IPv6 is this worker's.
    worker: u64,
    /// Numbers of each worker.
    share: u64,
}

impl Identifications {
    /// For one of so many workers, which share `shared`; `seed` is secret and the same on all.
    pub(crate) fn new(seed: u64, worker: u16, workers: u16, shared: IdentificationBlocks) -> Self {
        let workers = u64::from(workers.max(1));
        let mut new = Self {
            hash: TupleHash::new(!seed),
            shared,
            blocks: Box::new([Block::default(); COUNTERS]),
            valid_from: 0,
            counters: Box::new([0; COUNTERS]),
            worker: u64::from(worker) % workers,
            share: (1 << 32) / workers,
        };
        new.set_time(Tick::default());
        new
    }

    /// Sets the present. Blocks of earlier ticks are given up: others may have taken all that come after them.
    #[inline(always)]
    pub(crate) fn set_time(&mut self, now: Tick) {
        self.valid_from = (now.0 & 0x7fff | 0x8000) << Block::TICK | 1;
    }

    /// A new identification for a datagram: 16 bits for IPv4, 32 for IPv6.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // of the hash its bits; a number is below the space, which is at most 2^32
    pub(crate) fn next<A: Address>(&mut self, source: A, destination: A, protocol: u8) -> u32 {
        let key = A::Key::of(&Tuple { source, destination, source_port: 0, destination_port: 0, protocol });
        let hash = self.hash.hash_key(&key, protocol);
        let upper = (hash >> 32) as u32;
        if A::BYTES == 4 {
            return self.count(hash as u32).wrapping_add(upper) & 0xffff;
        }
        let Some(counter) = self.counters.get_mut(hash as u32 as usize % COUNTERS) else { return 0 };
        *counter = counter.wrapping_add(1);
        (self.worker * self.share + u64::from(counter.wrapping_add(upper)) % self.share) as u32
    }

    /// The next number for a hash, of IPv4.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // 16 bits
    fn count(&mut self, hash: u32) -> u32 {
        let at = hash as usize % COUNTERS;
        let Some(block) = self.blocks.get_mut(at) else { return 0 };
        if !block.is_valid(self.valid_from) {
            *block = take(&self.shared, at, *block, self.valid_from);
        }
        let next = block.0 >> Block::NEXT;
        block.0 = block.0.wrapping_add(Block::ONE_LESS);
        next as u32
    }

    /// As [`Identifications::next`], for those of eight IPv4 datagrams that are bits of `wanted`, by addresses as they
    /// stand in packets. The identifications of the others are meaningless.
    #[inline(always)]
    pub(crate) fn next_of_eight(&mut self, avx2: Avx2, addresses: [Lanes; 2], protocol: Lanes, wanted: u8) -> Lanes {
        let [source, destination] = addresses;
        let [lower, upper] = self.hash.hash_eight(avx2, [source, destination, avx2.splat(0)], protocol);
        let mut counts = [0; LANES];
        for (lane, (count, hash)) in counts.iter_mut().zip(lower.to_array()).enumerate() {
            if wanted >> lane & 1 != 0 {
                *count = self.count(hash);
            }
        }
        (avx2.lanes(counts) + upper) & avx2.splat(0xffff)
    }
}

/// Takes the block after this one.
#[cold]
#[inline(never)]
fn take(shared: &IdentificationBlocks, counter: usize, block: Block, valid_from: u32) -> Block {
    let size = block.next_size(valid_from);
    Block::taken(shared.take(counter, size), size, valid_from)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;
    use crate::flow::Ticks;

    const PAIR: (u32, u32) = (0x0a00_0003, 0x0a00_000b);

    fn workers(count: u16) -> Vec<Identifications> {
        let shared = IdentificationBlocks::default();
        (0..count).map(|worker| Identifications::new(7, worker, count, shared.clone())).collect()
    }

    #[test]
    fn numbers_repeat_only_after_all_of_them() {
        let mut all = HashSet::new();
        let mut workers = workers(1);
        for _ in 0..65_536 - 256 {
            assert!(all.insert(workers[0].next(PAIR.0, PAIR.1, 17)));
        }
    }

    #[test]
    fn one_busy_worker_of_64_has_nearly_all_identifications_of_a_pair() {
        let (mut seen, mut workers) = (HashSet::new(), workers(64));
        for n in 0..60_000_u32 {
            // The others send a packet now and then.
            let worker = if n % 1_000 == 0 { 1 + n as usize / 1_000 % 63 } else { 0 };
            assert!(seen.insert(workers[worker].next(PAIR.0, PAIR.1, 17)), "packet {n}");
        }
    }

    #[test]
    fn at_64_workers_and_100_000_packets_a_second_a_pair_repeats_none_within_300_ms() {
        const WITHIN: u64 = 300_000_000;
        let (mut last, mut workers) = (std::collections::HashMap::new(), workers(64));
        for n in 0..200_000_u64 {
            let now_ns = n * 10_000;
            let worker = &mut workers[(n % 64) as usize];
            worker.set_time(Tick::at(now_ns));
            let before = last.insert(worker.next(PAIR.0, PAIR.1, 17), now_ns);
            assert!(before.is_none_or(|before| now_ns - before > WITHIN), "packet {n}");
        }
    }

    #[test]
    fn what_is_left_of_a_block_is_given_up_before_others_have_taken_all_that_come_after_it() {
        let mut workers = workers(2);
        let slow: Vec<u32> = (0..3).map(|_| workers[0].next(PAIR.0, PAIR.1, 17)).collect();
        let mut last: Vec<u32> = (0..65_536 - 8).map(|_| workers[1].next(PAIR.0, PAIR.1, 17)).collect();
        let later = Tick(Ticks::from(Duration::from_secs(1)).0);
        workers.iter_mut().for_each(|worker| worker.set_time(later));
        last.extend((0..64).map(|_| workers[1].next(PAIR.0, PAIR.1, 17)));
        let next = workers[0].next(PAIR.0, PAIR.1, 17);
        assert!(!slow.contains(&next) && !last[last.len() - 1_000..].contains(&next));
    }

    #[test]
    fn eight_at_a_time_get_the_same_numbers_as_one_by_one() {
        let Some(avx2) = Avx2::detect() else { return };
        for wanted in [0xff, 0xff, 0b0101_1001] {
            let [mut eight, mut one] = [(); 2].map(|()| workers(1).remove(0));
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
    fn numbers_of_ipv6_use_32_bits_and_differ_by_address_and_worker() {
        let [mut whole, mut other] = <[_; 2]>::try_from(workers(2)).unwrap();
        let of = |whole: &mut Identifications, last: u128| whole.next(0xfd00_u128 << 112 | 3, 0xfd00_u128 << 112 | last, 17);
        let (a, b) = (of(&mut whole, 11), of(&mut whole, 12));
        assert!(a > 0xffff || b > 0xffff, "{a} {b}");
        assert_ne!(a.abs_diff(b), 1);
        assert_eq!(of(&mut whole, 11), a + 1);
        assert!(of(&mut other, 11) >= 1 << 31 && a < 1 << 31);
    }
}
