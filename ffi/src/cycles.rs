//! The time stamp counter.

use crate::raw;

/// Cycles of the time stamp counter. For their rate see [`crate::Eal::cycles_per_second`].
#[inline]
#[must_use]
pub fn cycles() -> u64 {
    // SAFETY: reads a register.
    unsafe { raw::sluice_rdtsc() }
}
