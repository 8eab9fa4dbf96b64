//! What the engine asks of the processor that safe Rust cannot say: prefetching memory before it is needed, comparing
//! sixteen words at once, and working on words of eight packets at once (`lanes`). The only unsafe code outside `ffi/`.
//!
//! Measured (docs: DESIGN section 11): a flow lookup among 1 M flows waits twice for about 130 ns for memory;
//! prefetched a burst ahead, it waits for almost nothing.
//!
//! Flows are not prefetched to be written: a hit writes only when the tick changes, and requesting ownership of every line
//! costs more than that one write. Frames are.

mod lanes;
#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use lanes::{Avx2, LANES, Lanes, Row, Vectorised};

/// Bytes of a cache line, on every processor that DPDK runs on.
const LINE_BYTES: usize = 64;

/// Prefetches all cache lines of `value`. Only a hint: it changes no state that a program can see.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    prefetch_at(std::slice::from_ref(value), 0);
}

/// The same for the value at an index of `values`. The index is not checked: of a wrong one, other memory is prefetched.
#[inline(always)]
pub fn prefetch_at<T>(values: &[T], index: usize) {
    let start = values.as_ptr().wrapping_add(index).cast::<u8>();
    for offset in (0..size_of::<T>()).step_by(LINE_BYTES) {
        line(start.wrapping_add(offset));
    }
}

/// Prefetches the cache line at any address, to be written: other cores lose it. Without that, the first write to a line that
/// another core wrote would have to ask for it again.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[inline(always)]
pub fn prefetch_to_write(address: *const u8) {
    // SAFETY: a prefetch never faults, whatever the address, and changes nothing that the program sees. Processors without the
    // instruction do nothing. No intrinsic of Rust emits it.
    unsafe { std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly)) }
}

/// Prefetches the cache line at any address, to be written.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub fn prefetch_to_write(_address: *const u8) {}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[inline(always)]
fn line(address: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch never faults, whatever the address, and reads nothing that the program sees; SSE, which has
    // the instruction, is part of x86_64.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn line(_address: *const u8) {}

/// The words that equal `pattern` where `mask` has ones, one bit for each.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[allow(clippy::cast_possible_wrap, clippy::cast_sign_loss)] // bits
#[inline(always)]
pub(crate) fn matching(words: &[u32; 16], pattern: u32, mask: u32) -> u32 {
    use std::arch::x86_64::{
        __m128i, _mm_and_si128, _mm_cmpeq_epi32, _mm_loadu_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32,
        _mm_set1_epi32,
    };
    let (quads, _) = words.as_chunks::<4>();
    // SAFETY: SSE2, which has the instructions, is part of x86_64. Each load reads the 16 bytes of a `[u32; 4]`.
    unsafe {
        let (pattern, mask) = (_mm_set1_epi32(pattern as i32), _mm_set1_epi32(mask as i32));
        let equal = |quad: &[u32; 4]| {
            let words = _mm_loadu_si128(std::ptr::from_ref(quad).cast::<__m128i>());
            _mm_cmpeq_epi32(_mm_and_si128(words, mask), pattern)
        };
        let (a, b) = (_mm_packs_epi32(equal(&quads[0]), equal(&quads[1])), _mm_packs_epi32(equal(&quads[2]), equal(&quads[3])));
        _mm_movemask_epi8(_mm_packs_epi16(a, b)) as u32
    }
}

/// The words that equal `pattern` where `mask` has ones, one bit for each.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
pub(crate) fn matching(words: &[u32; 16], pattern: u32, mask: u32) -> u32 {
    let bit = |(slot, word): (usize, &u32)| u32::from(word & mask == pattern) << slot;
    words.iter().enumerate().map(bit).fold(0, |bits, bit| bits | bit)
}

/// The positions of the bits that are set in a word, such as [`matching`] returns, lowest first.
#[derive(Clone, Copy)]
pub(crate) struct SetBits(pub(crate) u32);

impl Iterator for SetBits {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let position = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(position)
    }
}

/// How sixteen words are compared.
pub(crate) trait Compare: Copy {
    /// The words that equal `pattern` where `mask` has ones, one bit for each. `pattern` has ones only there.
    fn matching(self, words: &[u32; 16], pattern: u32, mask: u32) -> u32;
}

/// By instructions that each processor of the architecture has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnyProcessor;

impl Compare for AnyProcessor {
    #[inline(always)]
    fn matching(self, words: &[u32; 16], pattern: u32, mask: u32) -> u32 {
        matching(words, pattern, mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn matching_words_are_those_of_a_loop(words in any::<[u32; 16]>(), equal in any::<u16>(), pattern in any::<u32>(), bits in 0u32..32) {
            let mask = !0 << bits;
            let mut words = words;
            for (_, word) in words.iter_mut().enumerate().filter(|(slot, _)| equal >> slot & 1 == 1) {
                *word = *word & !mask | pattern & mask;
            }
            let expected = (0..16).filter(|&slot| words[slot] & mask == pattern & mask).fold(0, |bits, slot| bits | 1 << slot);
            prop_assert_eq!(matching(&words, pattern & mask, mask), expected);
            if let Some(avx2) = Avx2::detect() {
                prop_assert_eq!(avx2.matching(&words, pattern & mask, mask), expected);
            }
        }
    }
}
