//! Eight words of 32 bits, one for each of eight packets, in the lanes of a vector register.
//!
//! **Invariant:** [`Lanes`], [`Row`] and [`WideSums`] exist only where the processor has AVX2: they are made from
//! [`Avx2`], which only [`Avx2::detect`] returns, or from other lanes.
//!
//! Not here: what the words mean (`wire::plain`, `forward::rewrite`).

use std::ops::{Add, BitAnd, BitOr, BitXor, Sub};

use super::Compare;
#[cfg(not(target_arch = "x86_64"))]
use super::portable as words;
#[cfg(target_arch = "x86_64")]
use super::x86 as words;

/// Number of lanes.
pub(crate) const LANES: usize = 8;

/// Evidence that the processor has the instruction sets AVX2, BMI1 and BMI2.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

/// Work to be compiled for a processor with AVX2.
pub(crate) trait Vectorised {
    /// Its result.
    type Output;
    /// Does it. To be inlined always, otherwise it is compiled for any processor.
    fn run(self, avx2: Avx2) -> Self::Output;
}

impl Avx2 {
    /// Whether this processor has it.
    pub(crate) fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        return words::detect().then_some(Self(()));
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// Runs work that is compiled for AVX2.
    #[inline(always)]
    #[cfg(target_arch = "x86_64")]
    #[allow(unsafe_code)]
    pub(crate) fn run<V: Vectorised>(self, work: V) -> V::Output {
        #[target_feature(enable = "avx2,bmi1,bmi2")]
        fn for_avx2<V: Vectorised>(work: V) -> V::Output {
            work.run(Avx2(()))
        }
        // SAFETY: this value tells that the processor has these instruction sets.
        unsafe { for_avx2(work) }
    }

    /// Runs work.
    #[inline(always)]
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn run<V: Vectorised>(self, work: V) -> V::Output {
        work.run(self)
    }

    /// Eight words.
    #[inline(always)]
    pub(crate) fn lanes(self, values: [u32; LANES]) -> Lanes {
        Lanes(words::of(values))
    }

    /// Eight words from 32 bytes.
    #[inline(always)]
    pub(crate) fn words(self, bytes: [u8; 32]) -> Lanes {
        Lanes(words::of_bytes(bytes))
    }

    /// Sums that are 0.
    #[inline(always)]
    pub(crate) fn wide_sums(self) -> WideSums {
        WideSums(words::wide_sums())
    }

    /// Eight times the same word.
    #[inline(always)]
    pub(crate) fn splat(self, value: u32) -> Lanes {
        Lanes(words::splat(value))
    }

    /// The columns of a table of eight rows of four words.
    #[inline(always)]
    pub(crate) fn columns(self, rows: [[u8; 16]; LANES]) -> [Lanes; 4] {
        words::columns(rows).map(Lanes)
    }
}

impl Compare for Avx2 {
    #[inline(always)]
    fn matching(self, words: &[u32; 16], pattern: u32, mask: u32) -> u32 {
        let (pattern, mask) = (self.splat(pattern), self.splat(mask));
        let [a, b, c, d, e, f, g, h, second @ ..] = *words;
        let first = self.lanes([a, b, c, d, e, f, g, h]);
        let [first, second] = [first, self.lanes(second)].map(|words| u32::from((words & mask).equals(pattern).bits()));
        second << LANES | first
    }
}

/// Eight words. Lane 0 is the lowest bit of a mask.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes(words::Words);

impl Lanes {
    /// The words.
    #[inline(always)]
    pub(crate) fn to_array(self) -> [u32; LANES] {
        words::to_array(self.0)
    }

    /// The words as 32 bytes.
    #[inline(always)]
    pub(crate) fn to_bytes(self) -> [u8; 32] {
        words::to_bytes(self.0)
    }

    /// All ones in the lanes in which the words are equal.
    #[inline(always)]
    pub(crate) fn equals(self, other: Self) -> Self {
        Self(words::equals(self.0, other.0))
    }

    /// All ones in the lanes in which the word is greater than the other; of words below 2^31.
    #[inline(always)]
    pub(crate) fn exceeds(self, other: Self) -> Self {
        Self(words::exceeds(self.0, other.0))
    }

    /// The smaller word of each lane.
    #[inline(always)]
    pub(crate) fn min(self, other: Self) -> Self {
        Self(words::min(self.0, other.0))
    }

    /// The lower and the upper halves of the products.
    #[inline(always)]
    pub(crate) fn product(self, other: Self) -> [Self; 2] {
        words::product(self.0, other.0).map(Self)
    }

    /// The words moved left by some bits.
    #[inline(always)]
    pub(crate) fn left<const BITS: i32>(self) -> Self {
        Self(words::left::<BITS>(self.0))
    }

    /// The words moved right by some bits.
    #[inline(always)]
    pub(crate) fn right<const BITS: i32>(self) -> Self {
        Self(words::right::<BITS>(self.0))
    }

    /// The number in network byte order in the lower half of each word.
    #[inline(always)]
    pub(crate) fn lower_number(self) -> Self {
        Self(words::lower_number(self.0))
    }

    /// The number in network byte order in the upper half of each word.
    #[inline(always)]
    pub(crate) fn upper_number(self) -> Self {
        Self(words::upper_number(self.0))
    }

    /// The words with their halves exchanged.
    #[inline(always)]
    pub(crate) fn exchanged(self) -> Self {
        Self(words::exchanged(self.0))
    }

    /// The last four words, and the first four behind them.
    #[inline(always)]
    pub(crate) fn rotated(self) -> Self {
        Self(words::rotated(self.0))
    }

    /// The lower half of each word, and the upper half of the other one.
    #[inline(always)]
    pub(crate) fn with_upper(self, other: Self) -> Self {
        Self(words::with_upper(self.0, other.0))
    }

    /// The words of the other lanes where `mask` has all ones, these where it is 0.
    #[inline(always)]
    pub(crate) fn or_where(self, mask: Self, other: Self) -> Self {
        Self(words::or_where(self.0, mask.0, other.0))
    }

    /// The highest bit of each lane, as the bits of a number.
    #[inline(always)]
    pub(crate) fn bits(self) -> u8 {
        words::bits(self.0)
    }

    /// The rows of a table of four columns.
    #[inline(always)]
    pub(crate) fn rows(columns: [Self; 4]) -> [Row; LANES] {
        words::rows(columns.map(|column| column.0)).map(Row)
    }
}

/// Operators that work on each lane.
macro_rules! operators {
    ($($(#[$doc:meta])* $operator:ident::$method:ident: $operation:ident,)*) => {$(
        $(#[$doc])*
        impl $operator for Lanes {
            type Output = Self;

            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Self(words::$operation(self.0, other.0))
            }
        }
    )*};
}

operators! {
    BitAnd::bitand: and,
    BitOr::bitor: or,
    BitXor::bitxor: xor,
    /// Sums wrap.
    Add::add: add,
    /// Differences wrap.
    Sub::sub: sub,
}

/// Eight sums of 64 bits, which wrap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WideSums(words::SumWords);

impl WideSums {
    /// The sums, each with the product of two words added.
    #[inline(always)]
    pub(crate) fn plus_product(self, a: Lanes, b: Lanes) -> Self {
        Self(words::plus_product(self.0, a.0, b.0))
    }

    /// The lower and the upper halves of the sums.
    #[inline(always)]
    pub(crate) fn halves(self) -> [Lanes; 2] {
        words::halves(self.0).map(Lanes)
    }
}

/// Sixteen bytes of a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row(words::RowBytes);

impl Row {
    /// The bytes.
    #[inline(always)]
    pub(crate) fn bytes(self) -> [u8; 16] {
        words::row_bytes(self.0)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use proptest::prelude::*;

    use super::super::portable;
    use super::*;

    /// A word, or one of the extremes.
    fn word() -> impl Strategy<Value = u32> {
        prop_oneof![3 => any::<u32>(), 1 => prop::sample::select(vec![0, 1, 0xffff, 0x1_0000, 0x7fff_ffff, 0x8000_0000, u32::MAX])]
    }

    fn words() -> impl Strategy<Value = [u32; LANES]> {
        prop::array::uniform8(word())
    }

    /// Whether the lanes of a result are those that [`portable`] defines.
    fn same(result: Lanes, defined: portable::Words) -> Result<(), TestCaseError> {
        prop_assert_eq!(result.to_array(), portable::to_array(defined));
        Ok(())
    }

    proptest! {
        #[test]
        fn operations_are_as_defined(values in words(), others in words(), equal in any::<u8>(), one in word()) {
            let Some(avx2) = Avx2::detect() else { return Ok(()) };
            let others: [u32; LANES] = std::array::from_fn(|lane| if equal >> lane & 1 == 1 { values[lane] } else { others[lane] });
            let (a, b, x, y) = (avx2.lanes(values), avx2.lanes(others), portable::of(values), portable::of(others));
            same(avx2.splat(one), portable::splat(one))?;
            same(a & b, portable::and(x, y))?;
            same(a | b, portable::or(x, y))?;
            same(a ^ b, portable::xor(x, y))?;
            same(a + b, portable::add(x, y))?;
            same(a - b, portable::sub(x, y))?;
            same(a.equals(b), portable::equals(x, y))?;
            same(a.exceeds(b), portable::exceeds(x, y))?;
            same(a.min(b), portable::min(x, y))?;
            for (half, defined) in a.product(b).into_iter().zip(portable::product(x, y)) {
                same(half, defined)?;
            }
            same(a.left::<9>(), portable::left::<9>(x))?;
            same(a.right::<9>(), portable::right::<9>(x))?;
            same(a.lower_number(), portable::lower_number(x))?;
            same(a.upper_number(), portable::upper_number(x))?;
            same(a.exchanged(), portable::exchanged(x))?;
            same(a.rotated(), portable::rotated(x))?;
            let sums = avx2.wide_sums().plus_product(a, b).plus_product(b, b).plus_product(a, a);
            let defined = [[x, y], [y, y], [x, x]].into_iter().fold(portable::wide_sums(), |sums, [a, b]| portable::plus_product(sums, a, b));
            for (half, defined) in sums.halves().into_iter().zip(portable::halves(defined)) {
                same(half, defined)?;
            }
            prop_assert_eq!(a.to_bytes(), portable::to_bytes(x));
            same(avx2.words(a.to_bytes()), portable::of_bytes(portable::to_bytes(x)))?;
            same(a.with_upper(b), portable::with_upper(x, y))?;
            same(a.or_where(a.equals(b), b ^ a), portable::or_where(x, portable::equals(x, y), portable::xor(y, x)))?;
            prop_assert_eq!(a.bits(), portable::bits(x));
        }

        #[test]
        fn rows_and_columns_are_as_defined(rows in any::<[[u8; 16]; LANES]>()) {
            let Some(avx2) = Avx2::detect() else { return Ok(()) };
            let (columns, defined) = (avx2.columns(rows), portable::columns(rows));
            columns.into_iter().zip(defined).try_for_each(|(column, defined)| same(column, defined))?;
            prop_assert_eq!(Lanes::rows(columns).map(Row::bytes), portable::rows(defined).map(portable::row_bytes));
            prop_assert_eq!(portable::rows(defined), rows);
        }
    }
}
