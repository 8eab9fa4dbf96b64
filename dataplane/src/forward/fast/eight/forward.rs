//! The third loop of the fast way for eight packets at a time: a group with a packet that does not pass goes through
//! the loop for one packet at a time.
//!
//! Not here: how eight packets are checked and rewritten (`translate`).

use super::super::follow::{FastFamily, Translated};
use super::super::progress::Passed;
use super::super::record::Record;
use super::super::rewrite::{Forwarding, Rewritten};
use crate::forward::observer::Observe;
use crate::wire::Buffer;
use crate::wire::processor::{Avx2, LANES, Vectorised};

/// What the loop needs, which is compiled for packets of the kinds in the set `KINDS`, see [`Translated`].
pub(in crate::forward::fast) struct ForwardByEight<'e, 'p, A: FastFamily, O, B, const KINDS: u8> {
    pub(in crate::forward::fast) forwarding: Forwarding<'e, A, O>,
    pub(in crate::forward::fast) part: &'p mut [B],
    pub(in crate::forward::fast) records: &'p mut [Record],
    /// What became of the packets before.
    pub(in crate::forward::fast) passed: Passed,
}

impl<A: Rewritten, O: Observe<B>, B: Buffer, const KINDS: u8> Vectorised for ForwardByEight<'_, '_, A, O, B, KINDS> {
    type Output = Passed;

    #[inline(always)]
    fn run(self, avx2: Avx2) -> Passed {
        let Self { mut forwarding, part, records, mut passed } = self;
        let ((groups, rest), (of_groups, of_rest)) = (part.as_chunks_mut(), records.as_chunks_mut());
        let mut position = 0;
        for (group, records) in groups.iter_mut().zip(of_groups) {
            if !A::eight::<B, O, Translated<KINDS>>(&mut forwarding, avx2, (group, records), &mut passed) {
                forwarding.each_in_place::<_, Translated<KINDS>>((group, records, position), &mut passed);
            }
            position += LANES;
        }
        forwarding.each_in_place::<_, Translated<KINDS>>((rest, of_rest, position), &mut passed);
        passed
    }
}
