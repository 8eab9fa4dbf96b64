//! The parts of a burst, and when each stage of the fast path works on each of them: a part is recognised first, and the other
//! stages follow it at a distance of one turn or more, in which the memory arrives that they need.
//!
//! Not here: what the stages do.

use std::ops::Range;

use crate::port::BURST;
use crate::wire::processor::LANES;

/// Maximum number of packets in a part. Positions in it are bits of a `u32`.
pub(super) const PART_MAX: usize = 32;
/// Maximum number of parts of a burst: by whole vectors, no part is smaller.
pub(super) const PARTS_MAX: usize = BURST / LANES;
const _: () = assert!(PART_MAX <= u32::BITS as usize && PART_MAX.is_multiple_of(LANES));

/// Turns from the recognition of a part to the look into the lines of tags, which arrive.
const LOCATE: usize = 1;
/// To the look into the other line of tags of packets that were not found in the first one, which arrives.
const LOCATE_AWAY: usize = 2;
/// To planning and writing: the flows of those arrive too. With many backends these are fetched in this turn, and packets are
/// planned and written one turn later.
const FORWARD: usize = 3;
// No stage works on a part before the one that it reads the result of.
const _: () = assert!(0 < LOCATE && LOCATE < LOCATE_AWAY && LOCATE_AWAY < FORWARD);

/// See the module.
#[derive(Clone, Copy)]
pub(super) struct Turns {
    len: usize,
    part_len: usize,
    parts: usize,
    has_many_backends: bool,
}

impl Turns {
    /// For a burst of `len` packets.
    pub(super) fn new(len: usize, has_many_backends: bool) -> Self {
        // Equal parts of at most `PART_MAX`, but for whole vectors, and at least two: while one part is worked on, the memory
        // arrives that others need.
        let part_len = len.div_ceil(len.div_ceil(PART_MAX).max(2)).next_multiple_of(LANES).max(LANES);
        Self { len, part_len, parts: len.div_ceil(part_len), has_many_backends }
    }

    /// Number of parts.
    pub(super) fn parts(self) -> usize {
        self.parts
    }

    /// Number of turns.
    pub(super) fn count(self) -> usize {
        self.parts + FORWARD + usize::from(self.has_many_backends)
    }

    /// The number of the part that is recognised in a turn.
    #[inline(always)]
    pub(super) fn recognised(self, turn: usize) -> Option<usize> {
        self.at(turn, 0)
    }

    /// The number of the part whose flows are located in a turn.
    #[inline(always)]
    pub(super) fn located(self, turn: usize) -> Option<usize> {
        self.at(turn, LOCATE)
    }

    /// The same of flows that are away from home.
    #[inline(always)]
    pub(super) fn located_away(self, turn: usize) -> Option<usize> {
        self.at(turn, LOCATE_AWAY)
    }

    /// The part of which backends are fetched in a turn.
    #[inline(always)]
    pub(super) fn with_backends(self, turn: usize) -> Option<usize> {
        self.at(turn, FORWARD).filter(|_| self.has_many_backends)
    }

    /// The part that is forwarded in a turn.
    #[inline(always)]
    pub(super) fn forwarded(self, turn: usize) -> Option<usize> {
        self.at(turn, FORWARD + usize::from(self.has_many_backends))
    }

    /// The positions of the packets of a part in the burst.
    #[inline(always)]
    pub(super) fn part(self, number: usize) -> Range<usize> {
        (number * self.part_len).min(self.len)..((number + 1) * self.part_len).min(self.len)
    }

    #[inline(always)]
    fn at(self, turn: usize, turns: usize) -> Option<usize> {
        turn.checked_sub(turns).filter(|number| *number < self.parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_works_on_each_packet_once_and_on_none_before_the_stage_before() {
        for (len, has_many_backends) in (0..=BURST).flat_map(|len| [(len, false), (len, true)]) {
            let turns = Turns::new(len, has_many_backends);
            let (mut recognised, mut located, mut away, mut fetched, mut forwarded) = (0, 0, 0, 0, 0);
            for turn in 0..turns.count() {
                let follow = |done: &mut usize, number: Option<usize>| {
                    if let Some(part) = number.map(|number| turns.part(number)) {
                        assert_eq!(part.start, *done, "{len} packets, turn {turn}");
                        *done = part.end;
                    }
                };
                follow(&mut recognised, turns.recognised(turn));
                follow(&mut located, turns.located(turn));
                follow(&mut away, turns.located_away(turn));
                follow(&mut fetched, turns.with_backends(turn));
                follow(&mut forwarded, turns.forwarded(turn));
                assert!(recognised >= located && located >= away && away >= forwarded, "{len} packets, turn {turn}");
            }
            assert_eq!([recognised, located, away, forwarded], [len; 4]);
            assert_eq!(fetched, if has_many_backends { len } else { 0 });
        }
    }
}
