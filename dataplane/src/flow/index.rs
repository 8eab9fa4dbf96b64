//! The index of flows by tuple hash: buckets of one cache line with fifteen words, each a position and a tag of the
//! hash.
//!
//! A key lives in its home bucket or, when that is full, in one other bucket that follows from home and tag. Keys are
//! moved between their two buckets to make room (cuckoo hashing with large buckets, which in theory fits at a load
//! above 99 %; the table stays at or below 83 %). The tag has the bits that positions leave: eleven with a million
//! flows, five with the most that there may be, so that one search in a hundred, or in two, compares a wrong key too.
//!
//! **Invariant:** a bucket counts the keys that have it as home and live elsewhere, so a lookup touches a second line
//! only when one of them may be the wanted key.
//!
//! Not here: keys. The caller compares them; the tag alone determines the other bucket of a key.

use arrayvec::ArrayVec;
use zerocopy::FromZeros;

use crate::wire::processor::{self, AnyProcessor, Avx2, Compare, Lanes, SetBits};

const WAYS: usize = 15;
/// Maximum number of buckets searched for room. Even at 90 % load the second level (30 x 15 slots) lacks room in one
/// case in 10^20; the bound limits time, not memory.
const SEARCH_MAX: usize = 512;
/// Keys that the table is sized for, in tenths of a bucket: 83 % of its slots. Then one key in 26 lives away from its
/// home; with 90 % it is one in 16.
const TENTHS_PER_BUCKET: usize = 124;

/// One cache line. 0 marks an empty slot, so zeroed memory is an empty index.
#[derive(Debug, FromZeros)]
#[repr(C, align(64))]
struct Bucket {
    /// Fifteen slots, each with a tag in the upper bits and a position in the lower bits. In the last word: one bit for
    /// each slot whose key lives here away from its home, and above them the number of keys that have this home and
    /// live in their other bucket.
    words: [u32; WAYS + 1],
}

/// Bits of the slots in a set of slots.
const SLOTS: u32 = (1 << WAYS) - 1;
/// The lowest bit of the number of keys that live elsewhere.
const AWAY: u32 = 1 << WAYS;

impl Bucket {
    /// The words that equal `pattern` where `mask` has ones, as bits. The last word, which is no slot, takes part:
    /// callers that compare keys need not care.
    #[inline(always)]
    fn matching(&self, pattern: u32, mask: u32) -> u32 {
        processor::matching(&self.words, pattern, mask)
    }

    /// The first slot with this word.
    #[inline(always)]
    fn slot_of(&self, word: u32) -> Option<usize> {
        let equal = self.matching(word, u32::MAX) & SLOTS;
        (equal != 0).then_some(equal.trailing_zeros() as usize)
    }

    fn put(&mut self, slot: usize, word: u32, guest: bool) {
        self.words[slot] = word;
        self.words[WAYS] = self.words[WAYS] & !(1 << slot) | u32::from(guest) << slot;
    }

    fn is_guest(&self, slot: usize) -> bool {
        self.words[WAYS] >> slot & 1 == 1
    }

    /// Whether a key with this home lives elsewhere.
    #[inline(always)]
    fn has_away(&self) -> bool {
        self.words[WAYS] >= AWAY
    }

    fn count_away(&mut self, joins: bool, leaves: bool) {
        self.words[WAYS] = self.words[WAYS] + u32::from(joins) * AWAY - u32::from(leaves) * AWAY;
    }
}

/// A bucket reached in the search for room, and the move that leads to it.
#[derive(Clone, Copy)]
struct Step {
    bucket: usize,
    /// Index of the previous step and the slot of its bucket to empty; `None` for the key's own two buckets.
    from: Option<(usize, usize)>,
}

/// A slot of a bucket, or none of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IndexSlot {
    bucket: u32,
    /// [`WAYS`] if it is none.
    slot: u32,
}

impl IndexSlot {
    /// No slot of any bucket.
    #[allow(clippy::cast_possible_truncation)] // fifteen
    pub(crate) const NONE: Self = Self { bucket: 0, slot: WAYS as u32 };
}

/// The position of a key, as far as its home bucket shows it.
pub(super) enum Guess {
    /// At this position, if anywhere.
    At(u32),
    /// In its other bucket, if anywhere.
    Away,
    Nowhere,
}

/// The index: positions by hash.
#[derive(Debug)]
pub(super) struct Index {
    buckets: Box<[Bucket]>,
    /// The bits of a word that hold the tag.
    tag_mask: u32,
}

impl Index {
    /// An empty index for `keys` keys with positions below `positions`; `None` if there is no memory for it.
    pub(super) fn new(keys: usize, positions: u32) -> Option<Self> {
        Self::with_buckets((keys * 10).div_ceil(TENTHS_PER_BUCKET).max(2), positions)
    }

    fn with_buckets(count: usize, positions: u32) -> Option<Self> {
        let buckets = <[Bucket]>::new_box_zeroed_with_elems(count).ok()?;
        // At least two values of the tag remain: none of them is 0.
        let position_bits = (u32::BITS - positions.saturating_sub(1).leading_zeros()).clamp(1, 30);
        Some(Self { buckets, tag_mask: !0 << position_bits })
    }

    /// To search for keys in their home buckets.
    #[inline(always)]
    pub(super) fn homes(&self) -> Homes<'_> {
        Homes { buckets: &self.buckets, tag_mask: self.tag_mask }
    }

    #[inline(always)]
    fn tag(&self, hash: u64) -> u32 {
        self.homes().tag(hash)
    }

    #[inline(always)]
    fn part(&self, fraction: u64) -> usize {
        self.homes().part(fraction)
    }

    #[inline(always)]
    fn home(&self, hash: u64) -> usize {
        self.homes().home(hash)
    }

    /// The other bucket of a key with this tag, in rare cases the same one. The function is its own inverse.
    #[inline]
    fn other(&self, bucket: usize, tag: u32) -> usize {
        let sum = self.part(u64::from(tag).wrapping_mul(0x5bd1_e995_9e37_79b9) >> 32);
        if sum >= bucket { sum - bucket } else { sum + self.buckets.len() - bucket }
    }

    #[inline(always)]
    pub(super) fn prefetch(&self, hash: u64) {
        processor::prefetch_at(&self.buckets, self.home(hash));
    }

    /// Prefetches the home buckets of eight keys, by the upper halves of their hashes.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // there are fewer than 2^32 buckets
    pub(super) fn prefetch_eight(&self, avx2: Avx2, upper: Lanes) {
        let [_, homes] = upper.product(avx2.splat(self.buckets.len() as u32));
        homes.to_array().into_iter().for_each(|home| processor::prefetch_at(&self.buckets, home as usize));
    }

    /// The other bucket of a key that is not in its home bucket.
    #[inline]
    fn away(&self, hash: u64) -> &Bucket {
        &self.buckets[self.other(self.home(hash), self.tag(hash))]
    }

    /// Prefetches the other bucket of a key.
    #[inline]
    pub(super) fn prefetch_away(&self, hash: u64) {
        processor::prefetch(self.away(hash));
    }

    /// The first position with a matching tag in the other bucket.
    #[inline]
    pub(super) fn candidate_away(&self, hash: u64) -> Option<u32> {
        self.homes().first(self.away(hash), self.tag(hash), AnyProcessor)
    }

    /// The position that `is_it` accepts among those with a matching tag.
    #[inline]
    pub(super) fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let (home, tag) = (self.home(hash), self.tag(hash));
        let bucket = &self.buckets[home];
        let mut in_bucket = |bucket: &Bucket| {
            let slots = SetBits(bucket.matching(tag, self.tag_mask));
            slots.map(|slot| bucket.words[slot] & !self.tag_mask).find(|&position| is_it(position))
        };
        let found = in_bucket(bucket);
        if found.is_some() || !bucket.has_away() { found } else { in_bucket(&self.buckets[self.other(home, tag)]) }
    }

    /// Room for a key in its home bucket, as long as no other key takes it. If that is full, prefetches its other
    /// bucket.
    #[inline(always)]
    pub(super) fn room_for(&self, hash: u64) -> IndexSlot {
        self.home_slot(hash, 0)
    }

    /// The slot of a key that is in the index with exactly this position, if it is in its home bucket. Otherwise
    /// prefetches its other bucket.
    #[inline(always)]
    pub(super) fn slot_of(&self, hash: u64, position: u32) -> IndexSlot {
        self.home_slot(hash, self.tag(hash) | position)
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // there are fewer than 2^32 buckets, of sixteen words
    fn home_slot(&self, hash: u64, word: u32) -> IndexSlot {
        let home = self.home(hash);
        let slot = self.buckets.get(home).and_then(|bucket| bucket.slot_of(word));
        if slot.is_none() {
            self.prefetch_away(hash);
        }
        IndexSlot { bucket: home as u32, slot: slot.unwrap_or(WAYS) as u32 }
    }

    /// Adds a key, for which [`Index::room_for`] has found this. Returns false, and changes nothing, when there is no
    /// room.
    #[must_use]
    #[inline(always)]
    pub(super) fn insert_at(&mut self, room: IndexSlot, hash: u64, position: u32) -> bool {
        let tag = self.tag(hash);
        match self.word(room) {
            // No key that lives away from its home was here last.
            Some(word) if *word == 0 => *word = tag | position,
            _ => return self.insert_away(self.home(hash), tag, position),
        }
        true
    }

    /// The word of a slot of a bucket, if it is one.
    #[inline(always)]
    fn word(&mut self, IndexSlot { bucket, slot }: IndexSlot) -> Option<&mut u32> {
        self.buckets.get_mut(bucket as usize)?.words[..WAYS].get_mut(slot as usize)
    }

    /// Adds a key whose home bucket may be full.
    #[cold]
    #[inline(never)]
    fn insert_away(&mut self, home: usize, tag: u32, position: u32) -> bool {
        let other = self.other(home, tag);
        let target = match (self.buckets[home].slot_of(0), self.buckets[other].slot_of(0)) {
            (Some(slot), _) => Some((home, slot)),
            (None, Some(slot)) => Some((other, slot)),
            (None, None) => self.make_room(home, other),
        };
        let Some((bucket, slot)) = target else { return false };
        self.buckets[bucket].put(slot, tag | position, bucket != home);
        self.buckets[home].count_away(bucket != home, false);
        true
    }

    /// Removes a key that is in the index with exactly this position.
    pub(super) fn remove(&mut self, hash: u64, position: u32) {
        self.remove_at(self.slot_of(hash, position), hash, position);
    }

    /// Removes a key at the slot that [`Index::slot_of`] has found since keys were last added.
    #[inline(always)]
    pub(super) fn remove_at(&mut self, at: IndexSlot, hash: u64, position: u32) {
        match self.word(at) {
            // At home, so it is no guest.
            Some(word) => *word = 0,
            None => self.remove_away(hash, position),
        }
    }

    /// Removes a key that lives away from its home.
    #[cold]
    #[inline(never)]
    fn remove_away(&mut self, hash: u64, position: u32) {
        let (home, tag) = (self.home(hash), self.tag(hash));
        let other = self.other(home, tag);
        if let Some(slot) = self.buckets[other].slot_of(tag | position) {
            self.buckets[other].put(slot, 0, false);
            self.buckets[home].count_away(false, true);
        }
    }

    /// Moves keys between their buckets until one of two full buckets has an empty slot. Breadth first, so that few
    /// keys are moved.
    #[cold]
    #[inline(never)] // its steps take several pages of the stack
    fn make_room(&mut self, home: usize, other: usize) -> Option<(usize, usize)> {
        let mut steps: ArrayVec<Step, SEARCH_MAX> = ArrayVec::new();
        steps.push(Step { bucket: home, from: None });
        steps.push(Step { bucket: other, from: None });
        let mut next = 0;
        while next < steps.len() {
            let bucket = steps[next].bucket;
            for slot in 0..WAYS {
                let beyond = self.other(bucket, self.buckets[bucket].words[slot] & self.tag_mask);
                if steps.is_full() {
                    return None;
                }
                if steps.iter().any(|s| s.bucket == beyond) {
                    continue;
                }
                steps.push(Step { bucket: beyond, from: Some((next, slot)) });
                if let Some(room) = self.buckets[beyond].slot_of(0) {
                    return Some(self.shift(&steps, room));
                }
            }
            next += 1;
        }
        None
    }

    /// Carries out the moves that lead to the last step, whose bucket has an empty slot. Returns the slot that was
    /// emptied last.
    fn shift(&mut self, steps: &[Step], room: usize) -> (usize, usize) {
        let mut step = steps[steps.len() - 1];
        let mut empty = (step.bucket, room);
        while let Some((before, slot)) = step.from {
            step = steps[before];
            let line = &mut self.buckets[step.bucket];
            let (word, was_guest) = (line.words[slot], line.is_guest(slot));
            line.put(slot, 0, false);
            // A key that was away moves home, a key at home moves away.
            line.count_away(!was_guest, false);
            let to = &mut self.buckets[empty.0];
            to.count_away(false, was_guest);
            to.put(empty.1, word, !was_guest);
            empty = (step.bucket, slot);
        }
        empty
    }
}

/// The parts of an index that the search in home buckets reads, to be kept in registers.
#[derive(Clone, Copy)]
pub(super) struct Homes<'i> {
    buckets: &'i [Bucket],
    tag_mask: u32,
}

impl Homes<'_> {
    /// The tag of a hash, in the bits where words have it; never 0.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // the lower bits of the hash; `home` uses the upper ones
    fn tag(self, hash: u64) -> u32 {
        (hash as u32 & self.tag_mask).max(self.tag_mask & self.tag_mask.wrapping_neg())
    }

    /// A number below that of the buckets, in proportion to a fraction of 2^32.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // below the number of buckets
    fn part(self, fraction: u64) -> usize {
        ((fraction * self.buckets.len() as u64) >> 32) as usize
    }

    #[inline(always)]
    fn home(self, hash: u64) -> usize {
        self.part(hash >> 32)
    }

    /// The first position with a matching tag in the home bucket: a guess that is good enough for a prefetch.
    #[inline(always)]
    pub(super) fn candidate(self, hash: u64, compare: impl Compare) -> Guess {
        let Some(bucket) = self.buckets.get(self.home(hash)) else { return Guess::Nowhere };
        match self.first(bucket, self.tag(hash), compare) {
            Some(position) => Guess::At(position),
            None if bucket.has_away() => Guess::Away,
            None => Guess::Nowhere,
        }
    }

    #[inline(always)]
    fn first(self, bucket: &Bucket, tag: u32, compare: impl Compare) -> Option<u32> {
        let matching = compare.matching(&bucket.words, tag, self.tag_mask);
        let word = bucket.words.get(matching.trailing_zeros() as usize)?;
        Some(word & !self.tag_mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::split_mix;

    #[test]
    fn a_bucket_is_a_cache_line() {
        assert_eq!(size_of::<Bucket>(), 64);
    }

    #[test]
    fn ninety_seven_percent_of_all_slots_fill_and_every_key_is_found_and_removed() {
        // An even and an odd number of buckets, and tags of few bits.
        for (buckets, positions) in [(4096, 1 << 16), (4095, 1 << 16), (1021, 1 << 26)] {
            let mut index = Index::with_buckets(buckets, positions).unwrap();
            let keys: Vec<(u64, u32)> =
                (0..u32::try_from(buckets * WAYS * 97 / 100).unwrap()).map(|i| (split_mix(u64::from(i)), i)).collect();
            for &(hash, position) in &keys {
                assert!(index.insert_at(index.room_for(hash), hash, position), "no room for key {position} of {}", keys.len());
            }
            for &(hash, position) in &keys {
                assert_eq!(index.find(hash, |p| p == position), Some(position));
            }
            for &(hash, position) in &keys {
                index.remove(hash, position);
                assert_eq!(index.find(hash, |p| p == position), None);
            }
            assert!(index.buckets.iter().all(|b| b.words == [0; WAYS + 1]));
        }
    }

    #[test]
    fn keys_of_one_hash_fill_two_buckets_and_then_are_refused() {
        let mut index = Index::with_buckets(64, 64).unwrap();
        let hash = split_mix(42);
        assert_ne!(index.home(hash), index.other(index.home(hash), index.tag(hash)));
        let taken = (0..40).filter(|&position| index.insert_at(index.room_for(hash), hash, position)).count();
        assert_eq!(taken, 2 * WAYS);
        assert_eq!(index.find(hash, |p| p == 29), Some(29));
        assert_eq!(index.find(hash, |p| p == 30), None);
    }

    #[test]
    fn the_other_bucket_of_the_other_bucket_is_the_first() {
        for buckets in [2, 3, 64, 1021] {
            let index = Index::with_buckets(buckets, 1 << 20).unwrap();
            for n in 0..1000 {
                let (bucket, tag) = (n % buckets, index.tag(split_mix(n as u64)));
                assert_eq!(index.other(index.other(bucket, tag), tag), bucket);
            }
        }
    }
}
