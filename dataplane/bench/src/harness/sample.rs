//! A random one in a hundred of the packets that leave, kept for verification.
//!
//! Gaps between kept packets are random (a seeded generator), so a fault that repeats with any period is found. To keep a
//! packet costs a copy in the measured time, a hundredth of one per packet; it is verified when time does not count.
//!
//! **Invariant:** memory is bounded: when it is full, [`Sampler::is_full`] asks for a pause.
//!
//! Not here: whether a packet is right (`verify`).

use super::super::scenario::Side;
use super::super::trace::Random;

/// One packet in this many is kept, on average.
pub(crate) const KEPT_ONE_IN: u32 = 100;
/// Bytes of kept packets from which on a pause is due, and those reserved. The packets of the polls before the pause
/// fit between: a packet in 100 of 1,024 polls of 128.
const BYTES_DUE: usize = 8 << 20;
const BYTES_MAX: usize = BYTES_DUE + (4 << 20);
/// The same for the number of packets.
const PACKETS_DUE: usize = BYTES_DUE / 64;
const PACKETS_MAX: usize = BYTES_MAX / 64;

/// Keeps packets.
#[derive(Debug)]
pub(super) struct Sampler {
    random: Random,
    /// One packet in this many is kept, on average.
    one_in: u32,
    /// Number of packets to skip before the next one is kept.
    skip: usize,
    bytes: Vec<u8>,
    /// The side that each packet left by, and where it ends in `bytes`.
    kept: Vec<(Side, usize)>,
}

impl Sampler {
    pub(super) fn new(seed: u64) -> Self {
        let (bytes, kept) = (Vec::with_capacity(BYTES_MAX), Vec::with_capacity(PACKETS_MAX));
        Self { random: Random(seed), one_in: 1, skip: 0, bytes, kept }
    }

    /// From now on keeps one packet in this many.
    pub(super) fn keep_one_in(&mut self, one_in: u32) {
        self.one_in = one_in;
        self.skip = self.gap();
    }

    /// Number of packets before the next one that is kept: up to twice the mean, each number equally likely.
    fn gap(&mut self) -> usize {
        self.random.below(2 * self.one_in - 1) as usize
    }

    /// Sees the packets of a burst.
    #[inline(always)]
    pub(super) fn see<B>(&mut self, side: Side, burst: &[B], bytes: impl Fn(&B) -> &[u8]) {
        let count = burst.len();
        if self.skip < count {
            self.keep(side, burst, bytes);
        }
        self.skip -= count;
    }

    /// Keeps the packets of a burst whose turn it is.
    #[cold]
    #[inline(never)]
    fn keep<B>(&mut self, side: Side, burst: &[B], bytes: impl Fn(&B) -> &[u8]) {
        while let Some(buffer) = burst.get(self.skip) {
            self.bytes.extend_from_slice(bytes(buffer));
            self.kept.push((side, self.bytes.len()));
            self.skip += 1 + self.gap();
        }
    }

    /// Whether the kept packets should be taken.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() >= BYTES_DUE || self.kept.len() >= PACKETS_DUE
    }

    /// Passes on the kept packets, and forgets them.
    pub(super) fn take<E>(&mut self, mut see: impl FnMut(Side, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut start = 0;
        for (side, end) in self.kept.drain(..) {
            see(side, self.bytes.get(start..end).unwrap_or(&[]))?;
            start = end;
        }
        self.bytes.clear();
        Ok(())
    }
}
