//! The operations of `Lanes` by instructions of x86-64 with AVX2.
//!
//! **Invariant:** no function of this module is called where the processor lacks AVX2, but [`detect`].
#![allow(unsafe_code)]
#![allow(clippy::cast_possible_wrap, clippy::cast_sign_loss, clippy::cast_possible_truncation)] // bits

use std::arch::x86_64::{
    __m128i, __m256i, _mm256_add_epi32, _mm256_add_epi64, _mm256_and_si256, _mm256_blend_epi16, _mm256_blend_epi32,
    _mm256_blendv_epi8, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmpeq_epi32, _mm256_cmpgt_epi32,
    _mm256_extracti128_si256, _mm256_min_epu32, _mm256_movemask_ps, _mm256_mul_epu32, _mm256_or_si256, _mm256_permute4x64_epi64,
    _mm256_set_m128i, _mm256_set1_epi32, _mm256_setr_epi8, _mm256_setr_epi32, _mm256_shuffle_epi8, _mm256_slli_epi32,
    _mm256_slli_epi64, _mm256_srli_epi32, _mm256_srli_epi64, _mm256_sub_epi32, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64,
    _mm256_unpacklo_epi32, _mm256_unpacklo_epi64, _mm256_xor_si256,
};

/// One for each of eight lanes.
type Array = [u32; 8];
pub(super) type Words = __m256i;
pub(super) type RowBytes = __m128i;

pub(super) fn detect() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2")
}

/// An instruction of AVX2.
macro_rules! avx2 {
    ($instruction:expr) => {
        // SAFETY: the invariant of the module. None of the instructions reads memory.
        unsafe { $instruction }
    };
}

#[inline(always)]
pub(super) fn of([a, b, c, d, e, f, g, h]: Array) -> Words {
    avx2!(_mm256_setr_epi32(a as i32, b as i32, c as i32, d as i32, e as i32, f as i32, g as i32, h as i32))
}

#[inline(always)]
pub(super) fn of_bytes(bytes: [u8; 32]) -> Words {
    zerocopy::transmute!(bytes)
}

#[inline(always)]
pub(super) fn to_bytes(words: Words) -> [u8; 32] {
    zerocopy::transmute!(words)
}

#[inline(always)]
pub(super) fn to_array(words: Words) -> Array {
    zerocopy::transmute!(words)
}

#[inline(always)]
pub(super) fn splat(value: u32) -> Words {
    avx2!(_mm256_set1_epi32(value as i32))
}

/// Operations on two words of each lane that are one instruction.
macro_rules! operations {
    ($($operation:ident: $instruction:ident,)*) => {$(
        #[inline(always)]
        pub(super) fn $operation(a: Words, b: Words) -> Words {
            avx2!($instruction(a, b))
        }
    )*};
}

operations! {
    and: _mm256_and_si256,
    or: _mm256_or_si256,
    xor: _mm256_xor_si256,
    add: _mm256_add_epi32,
    sub: _mm256_sub_epi32,
    equals: _mm256_cmpeq_epi32,
    exceeds: _mm256_cmpgt_epi32,
    min: _mm256_min_epu32,
}

/// The sums of the lanes with even numbers, and those of the others.
pub(super) type SumWords = [__m256i; 2];

#[inline(always)]
pub(super) fn wide_sums() -> SumWords {
    [splat(0); 2]
}

#[inline(always)]
fn upper(words: Words) -> Words {
    avx2!(_mm256_srli_epi64::<32>(words))
}

#[inline(always)]
fn products(a: Words, b: Words) -> SumWords {
    avx2!([_mm256_mul_epu32(a, b), _mm256_mul_epu32(upper(a), upper(b))])
}

#[inline(always)]
pub(super) fn plus_product([even, odd]: SumWords, a: Words, b: Words) -> SumWords {
    let [of_even, of_odd] = products(a, b);
    avx2!([_mm256_add_epi64(even, of_even), _mm256_add_epi64(odd, of_odd)])
}

#[inline(always)]
pub(super) fn halves([even, odd]: SumWords) -> [Words; 2] {
    const ODD: i32 = 0b1010_1010;
    let lower = avx2!(_mm256_blend_epi32::<ODD>(even, _mm256_slli_epi64::<32>(odd)));
    [lower, avx2!(_mm256_blend_epi32::<ODD>(upper(even), odd))]
}

#[inline(always)]
pub(super) fn product(a: Words, b: Words) -> [Words; 2] {
    halves(products(a, b))
}

#[inline(always)]
pub(super) fn left<const BITS: i32>(words: Words) -> Words {
    avx2!(_mm256_slli_epi32::<BITS>(words))
}

#[inline(always)]
pub(super) fn right<const BITS: i32>(words: Words) -> Words {
    avx2!(_mm256_srli_epi32::<BITS>(words))
}

/// Each word with its bytes at these positions; 0 for a position that is negative.
#[inline(always)]
fn shuffled<const A: i8, const B: i8, const C: i8, const D: i8>(words: Words) -> Words {
    const fn at(position: i8, word: i8) -> i8 {
        if position < 0 { position } else { position + 4 * word }
    }
    macro_rules! word {
        ($n:literal, $position:ident) => {
            const { at($position, $n) }
        };
    }
    avx2!(_mm256_shuffle_epi8(
        words,
        _mm256_setr_epi8(
            word!(0, A),
            word!(0, B),
            word!(0, C),
            word!(0, D),
            word!(1, A),
            word!(1, B),
            word!(1, C),
            word!(1, D),
            word!(2, A),
            word!(2, B),
            word!(2, C),
            word!(2, D),
            word!(3, A),
            word!(3, B),
            word!(3, C),
            word!(3, D),
            word!(0, A),
            word!(0, B),
            word!(0, C),
            word!(0, D),
            word!(1, A),
            word!(1, B),
            word!(1, C),
            word!(1, D),
            word!(2, A),
            word!(2, B),
            word!(2, C),
            word!(2, D),
            word!(3, A),
            word!(3, B),
            word!(3, C),
            word!(3, D),
        )
    ))
}

#[inline(always)]
pub(super) fn lower_number(words: Words) -> Words {
    shuffled::<1, 0, -1, -1>(words)
}

#[inline(always)]
pub(super) fn upper_number(words: Words) -> Words {
    shuffled::<3, 2, -1, -1>(words)
}

#[inline(always)]
pub(super) fn exchanged(words: Words) -> Words {
    shuffled::<2, 3, 0, 1>(words)
}

#[inline(always)]
pub(super) fn rotated(words: Words) -> Words {
    avx2!(_mm256_permute4x64_epi64::<0b0100_1110>(words))
}

#[inline(always)]
pub(super) fn with_upper(words: Words, other: Words) -> Words {
    avx2!(_mm256_blend_epi16::<0b1010_1010>(words, other))
}

#[inline(always)]
pub(super) fn or_where(words: Words, mask: Words, other: Words) -> Words {
    avx2!(_mm256_blendv_epi8(words, other, mask))
}

#[inline(always)]
pub(super) fn bits(words: Words) -> u8 {
    avx2!(_mm256_movemask_ps(_mm256_castsi256_ps(words))) as u8
}

#[inline(always)]
pub(super) fn columns(rows: [[u8; 16]; 8]) -> [Words; 4] {
    let [a, b, c, d, e, f, g, h]: [__m128i; 8] = zerocopy::transmute!(rows);
    // Without a closure, which the compiler may leave as a call and compile for any processor.
    let (ae, bf) = avx2!((_mm256_set_m128i(e, a), _mm256_set_m128i(f, b)));
    let (cg, dh) = avx2!((_mm256_set_m128i(g, c), _mm256_set_m128i(h, d)));
    transposed([ae, bf, cg, dh])
}

#[inline(always)]
pub(super) fn rows(columns: [Words; 4]) -> [RowBytes; 8] {
    let [a, b, c, d] = transposed(columns);
    let lower = |words| avx2!(_mm256_castsi256_si128(words));
    let upper = |words| avx2!(_mm256_extracti128_si256::<1>(words));
    [lower(a), lower(b), lower(c), lower(d), upper(a), upper(b), upper(c), upper(d)]
}

#[inline(always)]
pub(super) fn row_bytes(row: RowBytes) -> [u8; 16] {
    zerocopy::transmute!(row)
}

/// Exchanges rows and columns in each half of four registers.
#[inline(always)]
fn transposed([a, b, c, d]: [Words; 4]) -> [Words; 4] {
    let (ab, upper_ab) = avx2!((_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)));
    let (cd, upper_cd) = avx2!((_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d)));
    avx2!([
        _mm256_unpacklo_epi64(ab, cd),
        _mm256_unpackhi_epi64(ab, cd),
        _mm256_unpacklo_epi64(upper_ab, upper_cd),
        _mm256_unpackhi_epi64(upper_ab, upper_cd),
    ])
}
