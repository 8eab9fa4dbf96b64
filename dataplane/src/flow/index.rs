//! The index of flows by tuple hash: buckets of one cache line with eight short tags and eight positions each.
//!
//! A key lives in its home bucket or, when that is full, in one other bucket that follows from home and tag. Keys are
//! moved between their two buckets to make room (cuckoo hashing with buckets of eight, which in theory fits at a load
//! of 99 %; the table stays at or below 87.5 %).
//!
//! **Invariant:** a bucket counts the keys that have it as home and live elsewhere, so a lookup touches a second line
//! only when one of them may be the wanted key.
//!
//! Not here: keys. The caller compares them; the tag alone determines the other bucket of a key.

use arrayvec::ArrayVec;
use zerocopy::FromZeros;

use crate::flow::prefetch;

const WAYS: usize = 8;
/// Maximum number of buckets searched for room. At 87.5 % load the second level (16 x 8 slots) lacks room in one case
/// in 10^20; the bound limits time, not memory.
const SEARCH_MAX: usize = 256;
/// Keys per bucket that the table is sized for.
const LOAD_PER_BUCKET: usize = 7;

/// The lowest bit, and the highest, of each of four tags in a word.
const ONES: u64 = 0x0001_0001_0001_0001;
const HIGHS: u64 = ONES << 15;

/// One cache line. Tag 0 marks an empty slot, so zeroed memory is an empty index.
#[derive(Debug, FromZeros)]
#[repr(C, align(64))]
struct Bucket {
    /// Four tags per word, the first in the lowest bits. They are compared four at a time; compilers do not reliably
    /// vectorise eight comparisons, nor on every processor.
    tags: [u64; 2],
    places: [u32; WAYS],
    /// Number of keys that have this home and live in their other bucket.
    away: u16,
    /// One bit per slot: the key lives here away from its home.
    guests: u8,
}

/// Slots whose tags match, as bits.
#[derive(Clone, Copy)]
struct Fitting(u64);

impl Iterator for Fitting {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        // Bits 0, 16, 32, 48 stand for slots 0 to 3, the bits next to them for slots 4 to 7.
        let bit = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(bit >> 4 | (bit & 1) << 2)
    }
}

impl Bucket {
    /// The slots whose tag matches. A slot above a match may be reported falsely once in 2^16 (a borrow of the
    /// subtraction); the caller compares keys in any case.
    #[inline]
    fn fitting(&self, tag: u16) -> Fitting {
        let zero_lanes = |word: u64| {
            let difference = word ^ ONES.wrapping_mul(u64::from(tag));
            difference.wrapping_sub(ONES) & !difference & HIGHS
        };
        Fitting(zero_lanes(self.tags[0]) >> 15 | zero_lanes(self.tags[1]) >> 14)
    }

    #[allow(clippy::cast_possible_truncation)] // one lane
    fn tag(&self, slot: usize) -> u16 {
        (self.tags[slot / 4] >> (slot % 4 * 16)) as u16
    }

    fn room(&self) -> Option<usize> {
        (0..WAYS).find(|&slot| self.tag(slot) == 0)
    }

    fn put(&mut self, slot: usize, tag: u16, place: u32, guest: bool) {
        let shift = slot % 4 * 16;
        let word = &mut self.tags[slot / 4];
        *word = *word & !(0xffff << shift) | u64::from(tag) << shift;
        self.places[slot] = place;
        self.guests = self.guests & !(1 << slot) | (u8::from(guest) << slot);
    }

    fn is_guest(&self, slot: usize) -> bool {
        self.guests >> slot & 1 == 1
    }
}

/// A bucket reached in the search for room, and the move that leads to it.
#[derive(Clone, Copy)]
struct Step {
    bucket: usize,
    /// Index of the previous step and the slot of its bucket to empty; `None` for the key's own two buckets.
    from: Option<(usize, usize)>,
}

/// The index: positions by hash.
#[derive(Debug)]
pub(super) struct Index {
    buckets: Box<[Bucket]>,
    mask: usize,
}

#[inline]
#[allow(clippy::cast_possible_truncation)] // the top bits of the hash; `at` uses the low ones
const fn tag_of(hash: u64) -> u16 {
    let tag = (hash >> 48) as u16;
    if tag == 0 { 1 } else { tag }
}

impl Index {
    /// An empty index for `keys` keys; `None` if there is no memory for it.
    pub(super) fn new(keys: usize) -> Option<Self> {
        Self::with_buckets(keys.div_ceil(LOAD_PER_BUCKET).max(2).next_power_of_two())
    }

    fn with_buckets(count: usize) -> Option<Self> {
        let buckets = <[Bucket]>::new_box_zeroed_with_elems(count).ok()?;
        Some(Self { buckets, mask: count - 1 })
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // masked
    const fn home(&self, hash: u64) -> usize {
        hash as usize & self.mask
    }

    /// The other bucket of a key with this tag. The function is its own inverse and never returns the same bucket.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // masked
    const fn other(&self, bucket: usize, tag: u16) -> usize {
        bucket ^ ((tag as u64).wrapping_mul(0x5bd1_e995_9e37_79b9) >> 20 | 1) as usize & self.mask
    }

    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch::read(&self.buckets[self.home(hash)]);
    }

    /// The first position with a matching tag in the home bucket only: a guess that is good enough for a prefetch.
    #[inline]
    pub(super) fn candidate(&self, hash: u64) -> Option<u32> {
        let bucket = &self.buckets[self.home(hash)];
        bucket.fitting(tag_of(hash)).next().map(|slot| bucket.places[slot])
    }

    /// The position that `is_it` accepts among those with a matching tag.
    #[inline]
    pub(super) fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let (home, tag) = (self.home(hash), tag_of(hash));
        let bucket = &self.buckets[home];
        let mut in_bucket = |bucket: &Bucket| bucket.fitting(tag).map(|slot| bucket.places[slot]).find(|&place| is_it(place));
        let found = in_bucket(bucket);
        if found.is_some() || bucket.away == 0 { found } else { in_bucket(&self.buckets[self.other(home, tag)]) }
    }

    /// Adds a key. Returns false, and changes nothing, when there is no room.
    #[must_use]
    pub(super) fn insert(&mut self, hash: u64, place: u32) -> bool {
        let (home, tag) = (self.home(hash), tag_of(hash));
        if let Some(slot) = self.buckets[home].room() {
            self.buckets[home].put(slot, tag, place, false);
            return true;
        }
        let other = self.other(home, tag);
        let target = match self.buckets[other].room() {
            Some(slot) => Some((other, slot)),
            None => self.make_room(home, other),
        };
        let Some((bucket, slot)) = target else { return false };
        self.buckets[bucket].put(slot, tag, place, bucket == other);
        self.buckets[home].away += u16::from(bucket == other);
        true
    }

    /// Removes a key that is in the index with exactly this position.
    pub(super) fn remove(&mut self, hash: u64, place: u32) {
        let (home, tag) = (self.home(hash), tag_of(hash));
        for bucket in [home, self.other(home, tag)] {
            let line = &mut self.buckets[bucket];
            let Some(slot) = (0..WAYS).find(|&slot| line.tag(slot) == tag && line.places[slot] == place) else { continue };
            line.put(slot, 0, 0, false);
            self.buckets[home].away -= u16::from(bucket != home);
            return;
        }
    }

    /// Moves keys between their buckets until one of two full buckets has an empty slot. Breadth first, so that few
    /// keys are moved.
    fn make_room(&mut self, home: usize, other: usize) -> Option<(usize, usize)> {
        let mut steps: ArrayVec<Step, SEARCH_MAX> = ArrayVec::new();
        steps.push(Step { bucket: home, from: None });
        steps.push(Step { bucket: other, from: None });
        let mut next = 0;
        while next < steps.len() {
            let bucket = steps[next].bucket;
            for slot in 0..WAYS {
                let beyond = self.other(bucket, self.buckets[bucket].tag(slot));
                if steps.is_full() {
                    return None;
                }
                if steps.iter().any(|s| s.bucket == beyond) {
                    continue;
                }
                steps.push(Step { bucket: beyond, from: Some((next, slot)) });
                if let Some(room) = self.buckets[beyond].room() {
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
            let (tag, place, was_guest) = (line.tag(slot), line.places[slot], line.is_guest(slot));
            line.put(slot, 0, 0, false);
            // A key that was away moves home, a key at home moves away.
            line.away += u16::from(!was_guest);
            let to = &mut self.buckets[empty.0];
            to.away -= u16::from(was_guest);
            to.put(empty.1, tag, place, !was_guest);
            empty = (step.bucket, slot);
        }
        empty
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
        let mut index = Index::with_buckets(4096).unwrap();
        let keys: Vec<(u64, u32)> = (0..4096 * 8 * 97 / 100).map(|i| (split_mix(u64::from(i)), i)).collect();
        for &(hash, place) in &keys {
            assert!(index.insert(hash, place), "no room for key {place} of {}", keys.len());
        }
        for &(hash, place) in &keys {
            assert_eq!(index.find(hash, |p| p == place), Some(place));
        }
        for &(hash, place) in &keys {
            index.remove(hash, place);
            assert_eq!(index.find(hash, |p| p == place), None);
        }
        assert!(index.buckets.iter().all(|b| b.away == 0 && b.guests == 0 && b.tags == [0; 2]));
    }

    #[test]
    fn keys_of_one_hash_fill_two_buckets_and_then_are_refused() {
        let mut index = Index::with_buckets(64).unwrap();
        let taken = (0..20).filter(|&place| index.insert(42, place)).count();
        assert_eq!(taken, 16);
        assert_eq!(index.find(42, |p| p == 15), Some(15));
        assert_eq!(index.find(42, |p| p == 16), None);
    }
}
