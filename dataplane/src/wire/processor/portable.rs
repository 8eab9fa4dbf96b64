//! The operations of `Lanes` without vector instructions: the definition of each, and what other processors
//! than x86-64 compile. They never run there, since no AVX2 is detected; the tests compare the others with them.
#![allow(clippy::cast_possible_truncation)] // halves of products

use std::array::from_fn;

pub(super) type Words = [u32; 8];
pub(super) type RowBytes = [u8; 16];

pub(super) fn of(values: [u32; 8]) -> Words {
    values
}

pub(super) fn of_bytes(bytes: [u8; 32]) -> Words {
    from_fn(|lane| u32::from_le_bytes(from_fn(|byte| bytes[4 * lane + byte])))
}

pub(super) fn to_bytes(words: Words) -> [u8; 32] {
    from_fn(|byte| words[byte / 4].to_le_bytes()[byte % 4])
}

pub(super) fn to_array(words: Words) -> [u32; 8] {
    words
}

pub(super) fn splat(value: u32) -> Words {
    [value; 8]
}

pub(super) fn and(a: Words, b: Words) -> Words {
    from_fn(|lane| a[lane] & b[lane])
}

pub(super) fn or(a: Words, b: Words) -> Words {
    from_fn(|lane| a[lane] | b[lane])
}

pub(super) fn xor(a: Words, b: Words) -> Words {
    from_fn(|lane| a[lane] ^ b[lane])
}

pub(super) fn add(a: Words, b: Words) -> Words {
    from_fn(|lane| a[lane].wrapping_add(b[lane]))
}

pub(super) fn sub(a: Words, b: Words) -> Words {
    from_fn(|lane| a[lane].wrapping_sub(b[lane]))
}

/// All ones, or 0.
fn mask(is_so: bool) -> u32 {
    u32::from(is_so).wrapping_neg()
}

pub(super) fn equals(a: Words, b: Words) -> Words {
    from_fn(|lane| mask(a[lane] == b[lane]))
}

pub(super) fn exceeds(a: Words, b: Words) -> Words {
    from_fn(|lane| mask(a[lane].cast_signed() > b[lane].cast_signed()))
}

pub(super) fn min(a: Words, b: Words) -> Words {
    from_fn(|lane| a[lane].min(b[lane]))
}

pub(super) type SumWords = [u64; 8];

pub(super) fn wide_sums() -> SumWords {
    [0; 8]
}

pub(super) fn plus_product(sums: SumWords, a: Words, b: Words) -> SumWords {
    from_fn(|lane| sums[lane].wrapping_add(u64::from(a[lane]) * u64::from(b[lane])))
}

pub(super) fn halves(sums: SumWords) -> [Words; 2] {
    [sums.map(|sum| sum as u32), sums.map(|sum| (sum >> 32) as u32)]
}

pub(super) fn product(a: Words, b: Words) -> [Words; 2] {
    halves(plus_product(wide_sums(), a, b))
}

pub(super) fn left<const BITS: i32>(words: Words) -> Words {
    words.map(|word| word << BITS)
}

pub(super) fn right<const BITS: i32>(words: Words) -> Words {
    words.map(|word| word >> BITS)
}

pub(super) fn lower_number(words: Words) -> Words {
    words.map(|word| (word & 0xffff).swap_bytes() >> 16)
}

pub(super) fn upper_number(words: Words) -> Words {
    words.map(|word| word.swap_bytes() & 0xffff)
}

pub(super) fn exchanged(words: Words) -> Words {
    words.map(|word| word.rotate_left(16))
}

pub(super) fn rotated([a, b, c, d, e, f, g, h]: Words) -> Words {
    [e, f, g, h, a, b, c, d]
}

pub(super) fn with_upper(words: Words, other: Words) -> Words {
    from_fn(|lane| words[lane] & 0xffff | other[lane] & 0xffff_0000)
}

pub(super) fn or_where(words: Words, mask: Words, other: Words) -> Words {
    from_fn(|lane| words[lane] & !mask[lane] | other[lane] & mask[lane])
}

pub(super) fn bits(words: Words) -> u8 {
    (0..).zip(words).fold(0, |bits, (lane, word)| bits | (word >> 31) << lane) as u8
}

pub(super) fn columns(rows: [[u8; 16]; 8]) -> [Words; 4] {
    let word = |row: &[u8; 16], column: usize| u32::from_le_bytes(from_fn(|byte| row[4 * column + byte]));
    from_fn(|column| rows.map(|row| word(&row, column)))
}

pub(super) fn rows(columns: [Words; 4]) -> [RowBytes; 8] {
    from_fn(|lane| {
        let words: [[u8; 4]; 4] = from_fn(|column| columns[column][lane].to_le_bytes());
        from_fn(|byte| words[byte / 4][byte % 4])
    })
}

pub(super) fn row_bytes(row: RowBytes) -> [u8; 16] {
    row
}
