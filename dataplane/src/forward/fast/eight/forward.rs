//! The third loop of the fast path for eight packets at a time: a group with a packet that does not pass goes through
//! the loop for one packet at a time.
//!
//! Not here: how eight packets are checked and rewritten (`pass`).

use std::marker::PhantomData;

use super::super::follow::{InPlaceScope, Scope};
use super::super::progress::Passed;
use super::super::record::Record;
use super::super::rewrite::Forwarding;
use super::outers::OutersOfEight;
use super::pass::KeysOfEight;
use crate::forward::observer::Observe;
use crate::wire::Buffer;
use crate::wire::processor::{Avx2, LANES, Vectorised};

/// The positions of the packets of a group.
const ALL: u32 = (1 << LANES) - 1;

/// What the loop needs, which is compiled for the packets of a scope.
pub(in crate::forward::fast) struct ForwardByEight<'e, 'p, A: KeysOfEight, O, B, S> {
    pub(in crate::forward::fast) forwarding: Forwarding<'e, A, O>,
    pub(in crate::forward::fast) part: (&'p mut [B], &'p mut [Record]),
    /// What became of the packets before.
    pub(in crate::forward::fast) passed: Passed,
    pub(in crate::forward::fast) scope: PhantomData<S>,
}

impl<A: KeysOfEight, O: Observe<B>, B: Buffer, S: InPlaceScope> Vectorised for ForwardByEight<'_, '_, A, O, B, S> {
    type Output = Passed;

    #[inline(always)]
    fn run(self, avx2: Avx2) -> Passed {
        let Self { mut forwarding, part: (part, records), mut passed, .. } = self;
        let ((groups, rest), (of_groups, of_rest)) = (part.as_chunks_mut(), records.as_chunks_mut());
        let mut position = 0;
        for (group, records) in groups.iter_mut().zip(of_groups) {
            if !forwarding.eight::<B, S>(avx2, (group, records), &mut passed) {
                forwarding.each_in_place::<_, S>((group, records, position), &mut passed);
            }
            position += LANES;
        }
        forwarding.each_in_place::<_, S>((rest, of_rest, position), &mut passed);
        passed
    }
}

/// The same for packets into tunnels, of which those of mode `gue` or, without `IN_UDP`, of mode `ipip` pass eight at a time.
pub(in crate::forward::fast) struct TunnelsByEight<'e, 'p, const IN_UDP: bool, A: OutersOfEight, O, B, S> {
    pub(in crate::forward::fast) forwarding: Forwarding<'e, A, O>,
    pub(in crate::forward::fast) part: (&'p mut [B], &'p mut [Record]),
    /// The positions in the part, as bits, of those that are meant.
    pub(in crate::forward::fast) positions: u32,
    pub(in crate::forward::fast) passed: Passed,
    pub(in crate::forward::fast) scope: PhantomData<S>,
}

impl<const IN_UDP: bool, A: OutersOfEight, O: Observe<B>, B: Buffer, S: Scope> Vectorised
    for TunnelsByEight<'_, '_, IN_UDP, A, O, B, S>
{
    type Output = Passed;

    #[inline(always)]
    fn run(self, avx2: Avx2) -> Passed {
        let Self { mut forwarding, part: (part, records), mut positions, mut passed, .. } = self;
        let ((groups, rest), (of_groups, of_rest)) = (part.as_chunks_mut(), records.as_chunks_mut());
        let mut position = 0;
        for (group, records) in groups.iter_mut().zip(of_groups) {
            let are_all_meant = positions & ALL == ALL;
            if !(are_all_meant && forwarding.eight_into_tunnels::<IN_UDP, B, S>(avx2, (group, records), &mut passed)) {
                forwarding.each_into_tunnels::<_, S>((group, records, position), positions, &mut passed);
            }
            (position, positions) = (position + LANES, positions >> LANES);
        }
        forwarding.each_into_tunnels::<_, S>((rest, of_rest, position), positions, &mut passed);
        passed
    }
}
