//! The hash functions of the engine: multiply two words of 64 bits and fold the product by exclusive-or. The hash by which
//! flows of IPv4 are found multiplies words of 32 bits.
//!
//! **Invariant:** the same seed and tuple give the same hash on every machine and in every version with the same
//! `MAGLEV_HASH_VERSION`, because gateways must agree on the backend of a client.
//!
//! The flow table uses a secret seed against chosen tuples. A key hides each factor before each multiplication, so no
//! sender can choose a factor of 0.
//!
//! Not here: the hash of network cards (`workers`).

use std::hash::{BuildHasher, Hasher};

use super::address::{Address, Tuple, TupleKey};
use crate::wire::processor::{Avx2, Lanes};

/// Multiplies and folds the halves of the product.
#[inline]
#[allow(clippy::cast_possible_truncation)] // the two halves of the product
const fn fold(a: u64, b: u64) -> u64 {
    let product = (a as u128) * (b as u128);
    (product as u64) ^ ((product >> 64) as u64)
}

/// One step of SplitMix64 (Steele, Lea, Flood 2014), which derives keys from a seed.
pub(crate) const fn split_mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A keyed hash of tuples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TupleHash {
    keys: [u64; 5],
}

impl TupleHash {
    /// The hash function of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        let a = split_mix(seed);
        let b = split_mix(a);
        let c = split_mix(b);
        let d = split_mix(c);
        Self { keys: [a, b, c, d, split_mix(d)] }
    }

    /// The hash of one tuple. The two directions of a flow hash differently.
    #[must_use]
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // the two halves of an address
    pub fn hash<A: Address>(&self, tuple: &Tuple<A>) -> u64 {
        let [k0, k1, k2, k3, k4] = self.keys;
        let rest = u64::from(tuple.source_port) << 32 | u64::from(tuple.destination_port) << 16 | u64::from(tuple.protocol);
        let (source, destination) = (tuple.source.wide(), tuple.destination.wide());
        let addresses = if A::BYTES == 4 {
            (source as u64) << 32 | destination as u64
        } else {
            let s = fold(source as u64 ^ k0, (source >> 64) as u64 ^ k1);
            s.rotate_left(32) ^ fold(destination as u64 ^ k1, (destination >> 64) as u64 ^ k0)
        };
        fold(fold(addresses ^ k2, rest ^ k3) ^ k4, k2)
    }

    /// The hash of addresses and ports as they stand in a packet, by which flows are found. It depends on the byte order
    /// of the machine, and differs from [`TupleHash::hash`]. That of IPv4 consists of products of 32 bits, of which a
    /// vector register computes several at once. After one multiplication alone the lower bits of consecutive ports would
    /// be an arithmetic progression, in which many may be equal.
    #[must_use]
    #[inline(always)]
    pub fn hash_key<K: TupleKey>(&self, key: &K, protocol: u8) -> u64 {
        let [k0, k1, k2, k3, k4] = self.keys;
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let (addresses, ports) = key.words();
        let addresses = match *addresses {
            [source, destination] => return self.hash_short([source, destination, ports], protocol),
            [a, b, c, d, e, f, g, h] => {
                fold(pair(a, b) ^ k0, pair(c, d) ^ k1).rotate_left(32) ^ fold(pair(e, f) ^ k1, pair(g, h) ^ k0)
            }
            _ => 0,
        };
        fold(fold(addresses ^ k2, pair(ports, protocol.into()) ^ k3) ^ k4, k2)
    }

    /// [`TupleHash::hash_key`] of IPv4.
    #[inline(always)]
    fn hash_short(&self, [source, destination, ports]: [u32; 3], protocol: u8) -> u64 {
        let [k0, k1, k2, k3, ..] = self.keys.map(halves);
        let product = |[a, b]: [u32; 2], [k, l]: [u32; 2]| halves(u64::from(a ^ k) * u64::from(b ^ l));
        let [lower, upper] = product([source, destination], k0);
        let both = product([lower ^ ports, upper ^ u32::from(protocol)], k1);
        let [lower, upper] = [k2, k3].map(|keys| product(both, keys)).map(|[a, b]| a ^ b);
        u64::from(upper) << 32 | u64::from(lower)
    }

    /// The same of eight packets: the lower and the upper halves.
    #[inline(always)]
    pub(crate) fn hash_eight(&self, avx2: Avx2, [source, destination, ports]: [Lanes; 3], protocol: Lanes) -> [Lanes; 2] {
        let [k0, k1, k2, k3, ..] = self.keys;
        let [lower, upper] = product_of_eight(avx2, [source, destination], k0);
        let both = product_of_eight(avx2, [lower ^ ports, upper ^ protocol], k1);
        let ([a, b], [c, d]) = (product_of_eight(avx2, both, k2), product_of_eight(avx2, both, k3));
        [a ^ b, c ^ d]
    }
}

/// The halves of the products of eight pairs of words that the halves of a key hide.
#[inline(always)]
fn product_of_eight(avx2: Avx2, [a, b]: [Lanes; 2], key: u64) -> [Lanes; 2] {
    let [lower, upper] = halves(key);
    (a ^ avx2.splat(lower)).product(b ^ avx2.splat(upper))
}

/// The lower and the upper half.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the lower half
const fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

/// The hash of the maps in a snapshot. Their keys come from the configuration, so it is fast and needs no secret.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TableHash;

impl BuildHasher for TableHash {
    type Hasher = FoldHasher;

    fn build_hasher(&self) -> FoldHasher {
        FoldHasher(0x243f_6a88_85a3_08d3)
    }
}

/// Folds one word after another into its state.
#[derive(Debug)]
pub(crate) struct FoldHasher(u64);

impl Hasher for FoldHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u8(&mut self, i: u8) {
        self.write_u64(i.into());
    }

    #[inline]
    fn write_u16(&mut self, i: u16) {
        self.write_u64(i.into());
    }

    #[inline]
    fn write_u32(&mut self, i: u32) {
        self.write_u64(i.into());
    }

    #[inline]
    fn write_u64(&mut self, i: u64) {
        self.0 = fold(self.0 ^ i, 0x1319_8a2e_0370_7345);
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // the two halves
    fn write_u128(&mut self, i: u128) {
        self.write_u64(i as u64);
        self.write_u64((i >> 64) as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)] // some bits of a hash
mod tests {
    use super::*;

    fn tuple<A: Address>(source: A, destination: A, port: u16) -> Tuple<A> {
        Tuple { source, destination, source_port: port, destination_port: 80, protocol: 6 }
    }

    #[test]
    fn the_hash_of_a_tuple_never_changes() {
        let hash = TupleHash::new(1);
        assert_eq!(hash.hash(&tuple(0xc633_6407_u32, 0xc000_0264, 5555)), V4_GOLDEN);
        assert_eq!(hash.hash(&tuple(0x2001_0db8_u128 << 96 | 7, 0x2001_0db8_u128 << 96 | 9, 5555)), V6_GOLDEN);
    }

    // Golden values from the description above, computed by an independent program.
    const V4_GOLDEN: u64 = 575497752678552326;
    const V6_GOLDEN: u64 = 6253244028630651996;

    #[test]
    fn neighbouring_tuples_spread_over_all_bits() {
        let hash = TupleHash::new(7);
        let mut ones = [0u32; 64];
        for i in 0..4096u32 {
            let h = hash.hash(&tuple(0x0a00_0000 + i / 64, 0xc000_0264, u16::try_from(1024 + i % 64).unwrap()));
            for (bit, count) in ones.iter_mut().enumerate() {
                *count += u32::from(h >> bit & 1 == 1);
            }
        }
        assert!(ones.iter().all(|&n| (1850..2250).contains(&n)), "{ones:?}");
    }

    #[test]
    fn keys_of_neighbouring_clients_spread_over_buckets_and_tags() {
        const CLIENTS: u32 = 1 << 16;
        for seed in 0..20 {
            let hash = TupleHash::new(seed);
            let of = |n: u32| {
                let tuple = tuple(0x0a00_0000 + n / 256, 0xc000_0264, u16::try_from(1024 + n % 256).unwrap());
                hash.hash_key(&<u32 as Address>::Key::of(&tuple), 6)
            };
            let hashes: Vec<u64> = (0..CLIENTS).map(of).collect();
            // As the index uses them: the upper half in proportion, lower bits as they are. 16 keys of each on average.
            for place in [
                |hash: u64| (((hash >> 32) * 4096) >> 32) as usize,
                |hash: u64| (hash & 4095) as usize,
                |hash: u64| (hash >> 20 & 4095) as usize,
            ] {
                let mut counts = [0_u32; 4096];
                hashes.iter().for_each(|&hash| counts[place(hash)] += 1);
                // The sum of 4,096 squares of nearly normal values, divided by their variance: 4,095 with deviation 90.
                let chi_square: f64 = counts.iter().map(|&count| (f64::from(count) - 16.0).powi(2) / 16.0).sum();
                assert!((3_600.0..4_700.0).contains(&chi_square), "seed {seed}: {chi_square}");
            }
        }
    }

    #[test]
    fn eight_keys_hash_as_one_by_one() {
        let Some(avx2) = Avx2::detect() else { return };
        let hash = TupleHash::new(7);
        for round in 0..64_u32 {
            let word = |n: u32| std::array::from_fn(|lane| split_mix(u64::from(round * 64 + n * 8) + lane as u64) as u32);
            let (key, protocols) = ([word(0), word(1), word(2)], word(3).map(|word: u32| if word & 1 == 0 { 6 } else { 17 }));
            let [lower, upper] =
                hash.hash_eight(avx2, key.map(|words| avx2.lanes(words)), avx2.lanes(protocols)).map(Lanes::to_array);
            for lane in 0..8 {
                let [source, destination, ports] = key.map(|words| words[lane]);
                let one = hash.hash_short([source, destination, ports], protocols[lane] as u8);
                assert_eq!(u64::from(upper[lane]) << 32 | u64::from(lower[lane]), one);
            }
        }
    }
}
