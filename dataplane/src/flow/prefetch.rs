//! Prefetching: requests memory from the processor before it is needed. The only unsafe code outside `ffi/`.
//!
//! Measured (docs: DESIGN section 11): a flow lookup among 1 M flows waits twice for about 130 ns for memory;
//! prefetched a burst ahead, it waits for almost nothing.
//!
//! Not here: prefetching for writing. A hit writes only when the tick changes, and requesting ownership of every line
//! costs more than that one write.

/// Bytes of a cache line, on every processor that DPDK runs on.
const LINE_BYTES: usize = 64;

/// Prefetches all cache lines of `value`. Only a hint: it changes no state that a program can see.
#[inline(always)]
pub fn read<T>(value: &T) {
    let start = std::ptr::from_ref(value).cast::<u8>();
    for offset in (0..size_of::<T>()).step_by(LINE_BYTES) {
        line(start.wrapping_add(offset));
    }
}

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
