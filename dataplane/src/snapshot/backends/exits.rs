//! The exits of steady backends by slot: all that a hit needs of a backend, and of its next hop, in half a cache line.
//!
//! A change copies a chunk of 4,096, so that hits need one step more than in one array, and a change little of what
//! copying 3.2 MB for 100,000 backends would take. All chunks have the same length, unlike those of `Pieces`, and there
//! is one for every slot: a hit checks no bound.
//!
//! **Invariant:** those of a finished snapshot are made from its backends and routes.
//!
//! Not here: when they are made again (`backends`).

use std::array;
use std::sync::{Arc, LazyLock};

use crate::flow::{BACKEND_SLOTS, BackendId};
use crate::snapshot::Exit;
use crate::stats::FrontendNumber;
use crate::wire::processor::prefetch_at;

/// Exits per chunk: 128 KiB.
const CHUNK: usize = 4096;
type ExitChunk = [Exit; CHUNK];
/// Chunks for all slots, so that the slot of a flow needs no check.
const CHUNKS: usize = BACKEND_SLOTS / CHUNK;
/// The chunk of slots that were never set.
static UNSET: LazyLock<Arc<ExitChunk>> = LazyLock::new(|| Arc::new([Exit::NOWHERE; CHUNK]));

/// The exits of all backends.
#[derive(Clone, Debug)]
pub(crate) struct BackendExits {
    /// By slot; [`Exit::NOWHERE`] of a backend that is not steady ([`super::Backend::is_steady`]): packets of its flows
    /// leave the fast path.
    chunks: [Arc<ExitChunk>; CHUNKS],
    /// Number of chunks up to the last slot that was set.
    used: usize,
}

impl Default for BackendExits {
    fn default() -> Self {
        Self { chunks: array::from_fn(|_| Arc::clone(&UNSET)), used: 0 }
    }
}

impl BackendExits {
    /// Changes the exits of some slots to these.
    pub(super) fn set(&mut self, exits: impl Iterator<Item = (u32, Exit)>) {
        for (slot, exit) in exits {
            let (chunk, place) = (slot as usize / CHUNK, slot as usize % CHUNK);
            self.used = self.used.max(chunk + 1);
            if self.chunks[chunk][place] != exit {
                Arc::make_mut(&mut self.chunks[chunk])[place] = exit;
            }
        }
    }

    /// Whether they have several times the size of a first-level cache.
    pub(super) fn are_many(&self) -> bool {
        self.used > 1
    }

    /// As hits look them up.
    #[inline(always)]
    pub(super) fn by_flow(&self) -> ExitsOfFlows<'_> {
        ExitsOfFlows(&self.chunks)
    }
}

/// The exits of backends, by the words that flows have for these.
#[derive(Clone, Copy)]
pub(crate) struct ExitsOfFlows<'s>(&'s [Arc<ExitChunk>; CHUNKS]);

impl<'s> ExitsOfFlows<'s> {
    /// The exit towards a backend, by [`BackendId::packed_with`]; [`Exit::NOWHERE`] with the backend in it while that
    /// is not known. `None` of a backend that is over or not steady.
    #[inline(always)]
    pub(crate) fn get(self, word: u32) -> Option<&'s Exit> {
        let backend = BackendId::without_frontend(word);
        let slot = BackendId::slot_of(backend) as usize;
        let exit = &self.0[slot / CHUNK][slot % CHUNK];
        exit.is_of(backend).then_some(exit)
    }

    /// Prefetches the exit towards a backend.
    #[inline(always)]
    pub(crate) fn prefetch(self, word: u32) {
        let slot = BackendId::slot_of(BackendId::without_frontend(word)) as usize;
        prefetch_at(&*self.0[slot / CHUNK], slot % CHUNK);
    }
}

const _: () = assert!(Exit::BACKEND_FLAGS < 1 << FrontendNumber::BITS);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::{Link, PortIndex};
    use crate::wire::Mac;

    fn word(slot: u32, generation: u32) -> u32 {
        BackendId { slot, generation }.packed_with(FrontendNumber::new(3))
    }

    #[test]
    fn a_backend_is_found_in_its_slot_by_its_generation_alone() {
        let exit = Exit::new(Link::from(PortIndex(1)), 1500, Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
        let of = |slot, generation| exit.towards(BackendId::without_frontend(word(slot, generation)), false);
        let mut exits = BackendExits::default();
        assert!(exits.by_flow().get(word(0, 1)).is_none() && !exits.are_many());
        let last = u32::try_from(CHUNK).unwrap();
        exits.set([(0, of(0, 1)), (last, of(last, 7))].into_iter());
        assert!(exits.are_many());
        for (slot, generation, is_found) in [(0, 1, true), (0, 2, false), (1, 1, false), (last, 7, true), (2 * last, 7, false)] {
            let found = exits.by_flow().get(word(slot, generation));
            assert_eq!(found.map(|exit| exit.mtu), is_found.then_some(1500), "{slot} {generation}");
        }
        let before = exits.clone();
        exits.set([(0, Exit::NOWHERE)].into_iter());
        assert!(exits.by_flow().get(word(0, 1)).is_none() && before.by_flow().get(word(0, 1)).is_some());
        assert!(Arc::ptr_eq(&exits.chunks[1], &before.chunks[1]), "only the chunk of the change is copied");
    }
}
