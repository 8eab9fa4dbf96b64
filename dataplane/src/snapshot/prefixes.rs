//! Longest prefix match: the value of the longest prefix that contains an address.
//!
//! The prefixes are cut into ranges without overlaps, sorted by their first addresses. The upper bits of an address
//! select a few of them, and a binary search among those finds its range: a lookup among a million IPv4 prefixes reads
//! about six lines of memory, among a few prefixes one.
//!
//! **Invariant:** the first range begins at address 0, so every address is in a range.
//!
//! Not here: the meaning of the values (`routes`).

use crate::wire::Address;

/// Maximum number of bits by which ranges are selected: 64 K numbers of 4 bytes.
const SELECT_BITS_MAX: u32 = 16;

/// A prefix with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix<A, T> {
    /// Any address in it.
    pub(crate) address: A,
    /// Number of bits that its addresses have in common.
    pub(crate) len: u8,
    /// Its value.
    pub(crate) value: T,
}

/// Values by prefix.
#[derive(Clone, Debug)]
pub(crate) struct Prefixes<A, T> {
    /// For each value of the upper bits of an address, the first range that begins with it or after it; at the end the
    /// number of ranges.
    selected: Box<[u32]>,
    /// Number of lower bits that do not select.
    shift: u32,
    /// First addresses of the ranges.
    firsts: Box<[A]>,
    /// Values of the ranges, `None` where no prefix is.
    values: Box<[Option<T>]>,
}

impl<A: Address, T: Copy + PartialEq> Default for Prefixes<A, T> {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

/// Bits of an address.
#[allow(clippy::cast_possible_truncation)] // 32 or 128
const fn bits<A: Address>() -> u32 {
    A::BYTES as u32 * 8
}

impl<A: Address, T: Copy> Prefix<A, T> {
    /// The first and the last address.
    fn ends(&self) -> (u128, u128) {
        let rest = bits::<A>().saturating_sub(self.len.into());
        let mask = if rest >= u128::BITS { u128::MAX } else { (1 << rest) - 1 };
        (self.address.wide() & !mask, self.address.wide() | mask)
    }
}

impl<A: Address, T: Copy + PartialEq> Prefixes<A, T> {
    /// Of equal prefixes the last one counts.
    pub(crate) fn new(mut prefixes: Vec<Prefix<A, T>>) -> Self {
        prefixes.sort_by_key(|prefix| (prefix.ends().0, prefix.len));
        let mut ranges = Ranges { ranges: vec![(0, None)] };
        // The prefixes that contain the present one: their last addresses and values.
        let mut around: Vec<(u128, T)> = Vec::new();
        for prefix in &prefixes {
            let (first, last) = prefix.ends();
            while let Some((ended, _)) = around.pop_if(|(last, _)| *last < first) {
                ranges.begin(ended + 1, around.last().map(|(_, value)| *value));
            }
            around.push((last, prefix.value));
            ranges.begin(first, Some(prefix.value));
        }
        let end = u128::MAX >> (u128::BITS - bits::<A>());
        while let Some((ended, _)) = around.pop() {
            if ended < end {
                ranges.begin(ended + 1, around.last().map(|(_, value)| *value));
            }
        }
        Self::of_ranges(&ranges.ranges)
    }

    fn of_ranges(ranges: &[(u128, Option<T>)]) -> Self {
        let select_bits = ranges.len().ilog2().min(SELECT_BITS_MAX).min(bits::<A>());
        let shift = bits::<A>() - select_bits;
        let first_of = |upper: u32| ranges.partition_point(|(first, _)| shift < u128::BITS && first >> shift < upper.into());
        let number = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
        let selected = (0..1 << select_bits).map(|upper| number(first_of(upper))).chain([number(ranges.len())]).collect();
        Self {
            selected,
            shift,
            firsts: ranges.iter().map(|(first, _)| A::from_wide(*first)).collect(),
            values: ranges.iter().map(|(_, value)| *value).collect(),
        }
    }

    /// The value of the longest prefix that contains the address.
    #[inline]
    pub(crate) fn get(&self, address: A) -> Option<T> {
        *self.values.get(self.range_of(address)?)?
    }

    /// As [`Prefixes::get`], with the first and the last address around this one for which the value counts.
    pub(crate) fn get_range(&self, address: A) -> Option<((A, A), T)> {
        let range = self.range_of(address)?;
        let last = match self.firsts.get(range + 1) {
            Some(next) => next.wide().checked_sub(1)?,
            None => u128::MAX >> (u128::BITS - bits::<A>()),
        };
        Some(((*self.firsts.get(range)?, A::from_wide(last)), (*self.values.get(range)?)?))
    }

    /// All ranges, with their first and last addresses, in order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = ((A, A), Option<T>)> {
        let end = A::from_wide(u128::MAX >> (u128::BITS - bits::<A>()));
        let lasts = self.firsts.iter().skip(1).map(|next| A::from_wide(next.wide() - 1)).chain([end]);
        self.firsts.iter().copied().zip(lasts).zip(self.values.iter().copied())
    }

    /// The position of the range that contains the address.
    #[inline]
    #[allow(clippy::cast_possible_truncation)] // 16 bits
    fn range_of(&self, address: A) -> Option<usize> {
        let upper = address.wide().checked_shr(self.shift).unwrap_or(0) as usize;
        let (from, to) = (*self.selected.get(upper)? as usize, *self.selected.get(upper + 1)? as usize);
        let within = self.firsts.get(from..to)?.partition_point(|first| *first <= address);
        (from + within).checked_sub(1)
    }
}

/// Ranges in order: first addresses and values. The last one has no end yet.
struct Ranges<T> {
    ranges: Vec<(u128, Option<T>)>,
}

impl<T: PartialEq> Ranges<T> {
    /// A range begins at an address that is not below that of the range before; if it is the same, it replaces that.
    fn begin(&mut self, first: u128, value: Option<T>) {
        if self.ranges.last().is_some_and(|last| last.0 == first) {
            self.ranges.pop();
        }
        if self.ranges.last().is_none_or(|last| last.1 != value) {
            self.ranges.push((first, value));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Addresses that are close to each other at the start, in the middle and at the end of the address space.
    fn address<A: Address>() -> impl Strategy<Value = A> {
        let top = bits::<A>() - 8;
        (prop_oneof![Just(0u128), Just(0xff), Just(0x7f), Just(0x0a), any::<u8>().prop_map(u128::from)], any::<u16>()).prop_map(
            move |(upper, lower)| {
                let end = if lower & 1 == 0 { u128::from(lower) } else { (1 << top) - 1 - u128::from(lower) };
                A::from_wide(upper << top | end)
            },
        )
    }

    fn agrees_with_a_search<A: Address>(prefixes: Vec<(A, u8)>, asked: &[A]) -> Result<(), TestCaseError> {
        #[allow(clippy::cast_possible_truncation)]
        let most = bits::<A>() as u8;
        let prefixes: Vec<_> = prefixes
            .into_iter()
            .zip(0u32..)
            .map(|((address, len), value)| Prefix { address, len: len % (most + 1), value })
            .collect();
        let table = Prefixes::new(prefixes.clone());
        let ends = prefixes.iter().flat_map(|prefix| {
            let (first, last) = prefix.ends();
            [first, last, first.wrapping_sub(1), last.wrapping_add(1)].map(A::from_wide)
        });
        for address in asked.iter().copied().chain(ends) {
            let contains = |prefix: &&Prefix<A, u32>| {
                let (first, last) = prefix.ends();
                (first..=last).contains(&address.wide())
            };
            let longest = prefixes.iter().filter(contains).max_by_key(|prefix| (prefix.len, prefix.value));
            prop_assert_eq!(table.get(address), longest.map(|prefix| prefix.value), "{:?}", address);
            let range = table.get_range(address);
            prop_assert_eq!(range.map(|(_, value)| value), longest.map(|prefix| prefix.value));
            if let Some(((first, last), value)) = range {
                let is_inside = |other: &A| (first.wide()..=last.wide()).contains(&other.wide());
                let ends = prefixes.iter().flat_map(|prefix| <[_; 2]>::from(prefix.ends())).map(A::from_wide);
                prop_assert!(is_inside(&address));
                prop_assert!(ends.chain([first, last]).filter(is_inside).all(|other| table.get(other) == Some(value)));
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn the_longest_prefix_is_that_of_a_search_through_all(
            v4 in proptest::collection::vec((address::<u32>(), any::<u8>()), 0..60),
            v6 in proptest::collection::vec((address::<u128>(), any::<u8>()), 0..60),
            asked_v4 in proptest::collection::vec(address::<u32>(), 0..100),
            asked_v6 in proptest::collection::vec(address::<u128>(), 0..100),
        ) {
            agrees_with_a_search(v4, &asked_v4)?;
            agrees_with_a_search(v6, &asked_v6)?;
        }
    }

    #[test]
    fn the_whole_address_space_is_a_prefix() {
        let all = Prefixes::new(vec![Prefix { address: 7u128, len: 0, value: 1 }]);
        assert_eq!([0, 1, u128::MAX].map(|address| all.get(address)), [Some(1); 3]);
        assert_eq!(Prefixes::<u32, u8>::default().get(5), None);
    }
}
