//! The position of the counters of a flow and its packets: by backend and frontend.
//!
//! The frontends of a Service that lead to one backend (other ports, several VIPs, a node port) have different numbers.
//! A flow carries the number of its frontend beside its backend, so that the two are one index, and counting by
//! frontend costs a packet no further memory access (docs/internals/decisions/0066-counters-by-frontend.md).
//!
//! Not here: which frontend has which number (`compiler`).

use std::sync::atomic::{AtomicU16, Ordering};

/// Number of backends whose traffic is counted separately.
pub(crate) const COUNTED_BACKENDS: usize = 1 << BACKEND_BITS;
const BACKEND_BITS: u32 = 17;

/// Number of counter slots: of each backend 16, one for each number of a frontend. 2,097,152 * 64 bytes = 128 MiB of
/// addresses per worker, of which memory is used only for the pages that are written.
pub(crate) const COUNTER_SLOTS: usize = COUNTED_BACKENDS << FrontendNumber::BITS;

/// Distinguishes the frontends that lead to one backend: 1 to 15. 0: no present frontend, which is that of flows that
/// outlived theirs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendNumber(u8);

impl FrontendNumber {
    pub(crate) const BITS: u32 = 4;
    /// The highest number.
    pub const MAX: u8 = (1 << Self::BITS) - 1;
    /// No present frontend.
    pub const NONE: Self = Self(0);

    /// The number, of which the lowest four bits count.
    #[must_use]
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // masked
    pub const fn new(number: u32) -> Self {
        Self(number as u8 & Self::MAX)
    }

    /// As an integer.
    #[must_use]
    #[inline(always)]
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// The numbers by which flows to the backends of a Service may be counted: the numbers of its frontends, and 0. The
/// compiler changes them, schedulers read them.
#[derive(Debug)]
pub(crate) struct FrontendNumberSet(AtomicU16);

impl Default for FrontendNumberSet {
    fn default() -> Self {
        Self(AtomicU16::new(1 << FrontendNumber::NONE.0))
    }
}

impl FrontendNumberSet {
    /// Replaces the numbers.
    pub(crate) fn set(&self, numbers: impl Iterator<Item = FrontendNumber>) {
        let bits = numbers.fold(1 << FrontendNumber::NONE.0, |bits, number| bits | 1 << number.0);
        self.0.store(bits, Ordering::Relaxed);
    }

    /// The numbers.
    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = FrontendNumber> + use<> {
        let mut bits = u32::from(self.0.load(Ordering::Relaxed));
        std::iter::from_fn(move || {
            let number = (bits != 0).then(|| FrontendNumber::new(bits.trailing_zeros()));
            bits &= bits.wrapping_sub(1);
            number
        })
    }
}

/// Index of the counters of a backend and a frontend. The counters of one number are side by side, so that the numbers
/// that no Service needs use no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterSlot(u32);

impl CounterSlot {
    /// The counters of the backend in a slot, as far as flows come by the frontend with this number.
    #[must_use]
    #[inline(always)]
    pub const fn new(backend_slot: u32, frontend: FrontendNumber) -> Self {
        Self::of_index((frontend.0 as u32) << BACKEND_BITS | backend_slot & ((1 << BACKEND_BITS) - 1))
    }

    /// The number of the frontend above the slot of the backend.
    #[inline(always)]
    pub(crate) const fn of_index(index: u32) -> Self {
        Self(index & ((1 << (BACKEND_BITS + FrontendNumber::BITS)) - 1))
    }

    /// Below [`COUNTER_SLOTS`].
    #[inline(always)]
    pub(crate) const fn index(self) -> usize {
        self.0 as usize & (COUNTER_SLOTS - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_backends_and_frontends_share_a_counter_slot() {
        let numbers = || (0..=u32::from(FrontendNumber::MAX)).map(FrontendNumber::new);
        let backends = [0, 1, 255, (1 << BACKEND_BITS) - 1];
        let mut indexes: Vec<_> =
            numbers().flat_map(|number| backends.map(|slot| CounterSlot::new(slot, number).index())).collect();
        assert!(indexes.iter().all(|index| *index < COUNTER_SLOTS));
        indexes.sort_unstable();
        indexes.dedup();
        assert_eq!(indexes.len(), 16 * backends.len());
    }
}
