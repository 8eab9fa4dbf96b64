//! The note of a confirmed SCTP flow, in place of its neighbours in the yield lists.
//!
//! **Invariant:** a note has [`AssociationNote::BITS`] bits: two links of the lists have room for it.
//!
//! Not here: where notes stand (`yield_order`), and when they change (`table`).

use crate::flow::entry::Flow;
use crate::flow::tick::Tick;
use crate::wire::Address;
use crate::wire::protocol::SCTP;

/// The note of a confirmed SCTP flow. It stands where other flows have their neighbours in the yield lists, which a
/// confirmed flow does not have: the words of [`Storage`](super::Storage) have its tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::flow) struct AssociationNote(u64);

impl AssociationNote {
    /// Bits of a note. The lower 32 say since when the backend does not answer (0: it does).
    pub(in crate::flow) const BITS: u32 = 33;
    const PROVEN: u64 = 1 << 32;

    /// The note of a flow; `None` of one that has none.
    #[inline]
    pub(in crate::flow) fn of<A: Address>(flow: &Flow<A>) -> Option<Self> {
        let unanswered = flow.unanswered_since.map_or(0, |since| since.0.max(1));
        Self::is_for(flow).then(|| Self(u64::from(unanswered) | if flow.tags.proven { Self::PROVEN } else { 0 }))
    }

    /// Whether a flow has a note.
    #[inline]
    pub(in crate::flow) fn is_for<A: Address>(flow: &Flow<A>) -> bool {
        flow.protocol == SCTP && flow.state.is_confirmed()
    }

    /// The note in these bits.
    pub(in crate::flow) const fn of_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The bits to keep.
    pub(in crate::flow) const fn bits(self) -> u64 {
        self.0
    }

    /// Completes the flow.
    #[allow(clippy::cast_possible_truncation)] // the lower half
    pub(in crate::flow) fn complete<A: Address>(self, flow: &mut Flow<A>) {
        flow.unanswered_since = (self.0 as u32 != 0).then_some(Tick(self.0 as u32));
        flow.tags.proven = self.0 & Self::PROVEN != 0;
    }
}
