//! The hash functions of the engine: multiply two words of 64 bits and fold the product by exclusive-or. The hash by
//! which flows are found multiplies words of 32 bits, of which a vector register holds several.
//!
//! **Invariant:** the same seed and tuple give the same hash on every machine and in every version with the same
//! `MAGLEV_HASH_VERSION`, because gateways must agree on the backend of a client.
//!
//! The flow table uses a secret seed against chosen tuples. A key hides each factor before each multiplication, so no
//! sender can choose a factor of 0.
//!
//! Not here: the hash of network cards (`toeplitz`).

use std::hash::{BuildHasher, Hasher};

use crate::wire::address::{Address, Tuple, TupleKey};
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
    /// For the addresses of IPv6, two words in each.
    long_keys: [u64; 4],
}

impl TupleHash {
    /// The hash function of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        let a = split_mix(seed);
        let b = split_mix(a);
        let c = split_mix(b);
        let d = split_mix(c);
        let e = split_mix(d);
        let f = split_mix(e);
        let g = split_mix(f);
        let h = split_mix(g);
        Self { keys: [a, b, c, d, e], long_keys: [f, g, h, split_mix(h)] }
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

    /// The hash of addresses and ports in wire order, by which flows are found and identifications chosen.
    /// It depends on the byte order of the machine, and differs from [`TupleHash::hash`]. It consists of products of 32
    /// bits, of which a vector register computes several at once. The products of the addresses of IPv6 are added up as
    /// by NH, which adds its keys where the other products take them by exclusive-or (Black, Halevi, Krawczyk, Krovetz,
    /// Rogaway: UMAC, 1999). After one multiplication alone the lower bits of consecutive ports would be an arithmetic
    /// progression, in which many may be equal.
    #[must_use]
    #[inline(always)]
    pub fn hash_key<K: TupleKey>(&self, key: &K, protocol: u8) -> u64 {
        let [k0, k1, k2, k3, ..] = self.keys.map(halves);
        let (addresses, ports) = key.words();
        let product = |[a, b]: [u32; 2], [k, l]: [u32; 2]| u64::from(a ^ k) * u64::from(b ^ l);
        let [lower, upper] = halves(match *addresses {
            [source, destination] => product([source, destination], k0),
            [a, b, c, d, e, f, g, h] => self.sum_of_products([[a, b], [c, d], [e, f], [g, h]]),
            _ => 0,
        });
        let both = halves(product([lower ^ ports, upper ^ u32::from(protocol)], k1));
        let [lower, upper] = [k2, k3].map(|keys| halves(product(both, keys))).map(|[a, b]| a ^ b);
        u64::from(upper) << 32 | u64::from(lower)
    }

    /// The sum of the products of pairs of words, to each of which a key is added.
    #[inline(always)]
    fn sum_of_products(&self, [a, b, c, d]: [[u32; 2]; 4]) -> u64 {
        let [k0, k1, k2, k3] = self.long_keys;
        let sum = product_of_sums(a, k0).wrapping_add(product_of_sums(b, k1));
        sum.wrapping_add(product_of_sums(c, k2)).wrapping_add(product_of_sums(d, k3))
    }

    /// The hashes of eight packets: the lower and the upper halves.
    #[inline(always)]
    pub(crate) fn hash_eight<const WORDS: usize>(&self, avx2: Avx2, key: [Lanes; WORDS], protocol: Lanes) -> [Lanes; 2] {
        const { assert!(WORDS == 3 || WORDS == 9, "a key of IPv4 or IPv6") }
        let [k0, k1, k2, k3, ..] = self.keys;
        let (addresses, ports) = (&key[..WORDS - 1], key[WORDS - 1]);
        let [lower, upper] = match *addresses {
            [source, destination] => product_of_eight(avx2, [source, destination], k0),
            _ => self.sums_of_products(avx2, addresses),
        };
        let both = product_of_eight(avx2, [lower ^ ports, upper ^ protocol], k1);
        let ([a, b], [c, d]) = (product_of_eight(avx2, both, k2), product_of_eight(avx2, both, k3));
        [a ^ b, c ^ d]
    }

    /// [`TupleHash::sum_of_products`] of eight packets.
    #[inline(always)]
    fn sums_of_products(&self, avx2: Avx2, words: &[Lanes]) -> [Lanes; 2] {
        let mut sums = avx2.wide_sums();
        for (&[a, b], [k, l]) in words.as_chunks().0.iter().zip(self.long_keys.map(halves)) {
            sums = sums.plus_product(a + avx2.splat(k), b + avx2.splat(l));
        }
        sums.halves()
    }
}

/// The product of two words, to each of which a half of a key is added.
#[inline(always)]
fn product_of_sums([a, b]: [u32; 2], key: u64) -> u64 {
    let [lower, upper] = halves(key);
    u64::from(a.wrapping_add(lower)) * u64::from(b.wrapping_add(upper))
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
    use zerocopy::IntoBytes;

    use super::*;
    use crate::wire::WireKey;

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

    /// Asserts that the hashes of 65,536 keys spread as random numbers do, as the index uses them: the upper half in
    /// proportion, lower bits as they are.
    fn assert_spread(seed: u64, hashes: &[u64]) {
        for bucket in [
            |hash: u64| (((hash >> 32) * 4096) >> 32) as usize,
            |hash: u64| (hash & 4095) as usize,
            |hash: u64| (hash >> 20 & 4095) as usize,
        ] {
            let mut counts = [0_u32; 4096];
            hashes.iter().for_each(|&hash| counts[bucket(hash)] += 1);
            // The sum of 4,096 squares of nearly normal values, divided by their variance: 4,095 with deviation 90. 16
            // keys of each on average.
            let chi_square: f64 = counts.iter().map(|&count| (f64::from(count) - 16.0).powi(2) / 16.0).sum();
            assert!((3_600.0..4_700.0).contains(&chi_square), "seed {seed}: {chi_square}");
        }
    }

    #[test]
    fn keys_of_neighbouring_clients_spread_over_buckets_and_tags() {
        let port = |n: u32| u16::try_from(1024 + n % 256).unwrap();
        let v4 = |n: u32| <u32 as Address>::Key::of(&tuple(0x0a00_0000 + n / 256, 0xc000_0264, port(n)));
        // Neighbours in one network, one in each of neighbouring networks, and one client of many ports.
        const NETWORK: u128 = 0x2001_0db8 << 96;
        let v6 = |source: u128, port: u16| <u128 as Address>::Key::of(&tuple(NETWORK | source, NETWORK | 0x64 << 32, port));
        for seed in 0..20 {
            let hash = TupleHash::new(seed);
            let hashes = |of: &dyn Fn(u32) -> u64| (0..1 << 16).map(of).collect::<Vec<_>>();
            assert_spread(seed, &hashes(&|n| hash.hash_key(&v4(n), 6)));
            assert_spread(seed, &hashes(&|n| hash.hash_key(&v6(u128::from(n / 256), port(n)), 6)));
            assert_spread(seed, &hashes(&|n| hash.hash_key(&v6(u128::from(n) << 64 | 1, 1024), 6)));
            assert_spread(seed, &hashes(&|n| hash.hash_key(&v6(7, n as u16), 17)));
        }
    }

    fn eight_hash_as_one_by_one<K: TupleKey, const WORDS: usize>(key: impl Fn([u32; WORDS]) -> K) {
        let Some(avx2) = Avx2::detect() else { return };
        let hash = TupleHash::new(7);
        for round in 0..64_u64 {
            let word = |n: usize| std::array::from_fn(|lane| split_mix(round << 8 | (n * 8 + lane) as u64) as u32);
            let words: [[u32; 8]; WORDS] = std::array::from_fn(word);
            let protocols = word(WORDS).map(|word: u32| if word & 1 == 0 { 6 } else { 17 });
            let [lower, upper] =
                hash.hash_eight(avx2, words.map(|words| avx2.lanes(words)), avx2.lanes(protocols)).map(Lanes::to_array);
            for lane in 0..8 {
                let one = hash.hash_key(&key(words.map(|words| words[lane])), protocols[lane] as u8);
                assert_eq!(u64::from(upper[lane]) << 32 | u64::from(lower[lane]), one);
            }
        }
    }

    #[test]
    fn eight_keys_hash_as_one_by_one() {
        eight_hash_as_one_by_one(|words: [u32; 3]| WireKey::<3>::read_at(words.as_bytes(), 0));
        eight_hash_as_one_by_one(|words: [u32; 9]| WireKey::<9>::read_at(words.as_bytes(), 0));
    }
}
