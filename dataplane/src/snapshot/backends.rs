//! Backends by slot, in chunks that successive snapshots share.
//!
//! **Invariant:** the compact form of a backend always matches the backend.
//!
//! Not here: the assignment of slots (`compiler`).

use std::net::SocketAddr;
use std::sync::Arc;

use proto::{Protocol, ServiceName};

use super::routes::GROUP;
use crate::flow::{BackendId, TargetSlot, Tick, Ticks, UNRESOLVED};
use crate::wire::processor::prefetch_at;

/// Backends per chunk: a change copies 256 x 96 B, and a table of 100,000 backends has 391 chunks.
const PIECE: usize = 256;
/// Backends whose compact forms fill a first-level cache of 32 KiB.
const MANY: usize = 4096;

/// A backend of one service.
#[derive(Clone, Debug)]
pub struct Backend {
    /// Address and port that its packets are sent to.
    pub address: SocketAddr,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The service it belongs to.
    pub service: Arc<ServiceName>,
    /// The pool key of its SNAT ports, shared with other services' backends at the same address.
    pub target: TargetSlot,
    /// Slot of its next hop, or [`crate::flow::UNRESOLVED`] without a route.
    pub next_hop: u32,
    /// Whether it is its own next hop, as mode `dsr` requires.
    pub on_link: bool,
    /// Which of the slot's successive backends it is.
    pub generation: u32,
    /// Idle timeout of its confirmed flows, if its service sets one.
    pub idle_timeout: Option<Ticks>,
    /// Whether new flows are sent to it.
    pub accepts_new: bool,
    /// It was removed; its flows may continue until the drain ends.
    pub removed: bool,
    /// Since when its probes fail; kept at its removal.
    pub failing: Option<Tick>,
}

impl Backend {
    /// Since when its probes fail while other backends are used instead; `None` where all fail and all are used.
    #[must_use]
    pub fn fails_since(&self) -> Option<Tick> {
        self.failing.filter(|_| !self.accepts_new)
    }

    /// Whether its flows continue normally: it was not removed, and no probe indicates that it does not answer.
    #[must_use]
    pub fn is_steady(&self) -> bool {
        !self.removed && self.fails_since().is_none()
    }
}

/// The fields of a backend that a hit needs, as compact as possible, so that a thousand backends stay in the L1 cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spot {
    /// [`BackendId::without_frontend`] of a backend that is steady ([`Backend::is_steady`]), otherwise 0: packets of its
    /// flows leave the fast path.
    id: u32,
    /// Slot of its next hop, with [`Spot::ON_LINK`].
    reach: u32,
}

impl Spot {
    /// Set where the backend is its own next hop. Slots of next hops are below it; numbers of groups, which have bit 31,
    /// leave it clear.
    const ON_LINK: u32 = 1 << 30;

    fn of(slot: u32, backend: &Backend) -> Self {
        let id = BackendId::without_frontend(BackendId { slot, generation: backend.generation }.packed());
        let reach = backend.next_hop & !Self::ON_LINK | if backend.on_link { Self::ON_LINK } else { 0 };
        Self { id: if backend.is_steady() { id } else { 0 }, reach }
    }

    /// Slot of its next hop, or number of the group of its next hops.
    #[inline(always)]
    pub(crate) fn next_hop(self) -> u32 {
        self.reach & !Self::ON_LINK
    }

    fn is_behind_group(self) -> bool {
        self.id != 0 && self.next_hop() & GROUP != 0 && self.next_hop() != UNRESOLVED & !Self::ON_LINK
    }

    /// Whether the backend is its own next hop.
    #[inline(always)]
    pub(crate) fn is_on_link(self) -> bool {
        self.reach & Self::ON_LINK != 0
    }
}

/// Backends, and their compact form at the same index.
#[derive(Clone, Debug)]
struct Piece {
    spots: [Spot; PIECE],
    backends: Vec<Option<Backend>>,
}

impl Piece {
    fn new() -> Self {
        Self { spots: [Spot::default(); PIECE], backends: vec![None; PIECE] }
    }

    /// Changes the entry of a slot, and its compact form with it. Returns the compact forms before and now.
    fn change(&mut self, slot: u32, change: impl FnOnce(&mut Option<Backend>)) -> [Spot; 2] {
        let place = slot as usize % PIECE;
        let backend = &mut self.backends[place];
        change(backend);
        let now = backend.as_ref().map_or_else(Spot::default, |backend| Spot::of(slot, backend));
        [std::mem::replace(&mut self.spots[place], now), now]
    }
}

/// What hits need of all backends.
#[derive(Clone, Copy)]
pub(crate) struct Spots<'s>(&'s [Arc<Piece>]);

impl Spots<'_> {
    /// As [`BackendTable::get`], for a hit, by [`BackendId::packed_with`]; `None` also for a backend that is not steady.
    #[inline(always)]
    pub(crate) fn get(self, word: u32) -> Option<Spot> {
        let id = BackendId::without_frontend(word);
        let slot = BackendId::slot_of(id) as usize;
        let spot = self.0.get(slot / PIECE)?.spots[slot % PIECE];
        (spot.id == id).then_some(spot)
    }
}

/// Backends by slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct BackendTable {
    pieces: Vec<Arc<Piece>>,
    /// Number of steady backends behind groups of next hops.
    behind_groups: u32,
}

impl BackendTable {
    /// The backend that still has this slot.
    pub(crate) fn get(&self, id: BackendId) -> Option<&Backend> {
        self.in_slot(id.slot).filter(|backend| backend.generation == id.generation)
    }

    /// See [`Spots::get`].
    #[inline(always)]
    pub(crate) fn spot(&self, word: u32) -> Option<Spot> {
        self.spots().get(word)
    }

    /// What hits need of all backends.
    #[inline(always)]
    pub(crate) fn spots(&self) -> Spots<'_> {
        Spots(&self.pieces)
    }

    /// Whether their compact forms exceed the first-level cache.
    #[inline]
    pub(crate) fn are_many(&self) -> bool {
        self.pieces.len() > MANY / PIECE
    }

    /// Whether any steady backend is behind a group of next hops.
    #[inline]
    pub(crate) fn any_behind_groups(&self) -> bool {
        self.behind_groups > 0
    }

    fn count(&mut self, [before, now]: [Spot; 2]) {
        self.behind_groups = self.behind_groups + u32::from(now.is_behind_group()) - u32::from(before.is_behind_group());
    }

    /// Prefetches the compact form of the backend in a slot.
    #[inline(always)]
    pub(crate) fn prefetch(&self, slot: usize) {
        if let Some(piece) = self.pieces.get(slot / PIECE) {
            prefetch_at(&piece.spots, slot % PIECE);
        }
    }

    /// Stores a backend in a slot, or clears the slot.
    pub(crate) fn set(&mut self, slot: u32, backend: Option<Backend>) {
        let piece = slot as usize / PIECE;
        while self.pieces.len() <= piece {
            self.pieces.push(Arc::new(Piece::new()));
        }
        let spots = Arc::make_mut(&mut self.pieces[piece]).change(slot, |place| *place = backend);
        self.count(spots);
    }

    /// Changes the backend of a slot, if there is one and it `differs`. The chunk is copied only then.
    pub(crate) fn update(&mut self, slot: u32, differs: impl Fn(&Backend) -> bool, change: impl FnOnce(&mut Backend)) {
        let Some(piece) = self.pieces.get_mut(slot as usize / PIECE) else { return };
        if piece.backends[slot as usize % PIECE].as_ref().is_some_and(differs) {
            let spots = Arc::make_mut(piece).change(slot, |place| {
                if let Some(backend) = place {
                    change(backend);
                }
            });
            self.count(spots);
        }
    }

    /// All backends, each with its slot.
    pub(crate) fn all(&self) -> impl Iterator<Item = (BackendId, &Backend)> {
        let backends = self.pieces.iter().flat_map(|piece| &piece.backends);
        (0..).zip(backends).filter_map(|(slot, backend)| {
            let backend = backend.as_ref()?;
            Some((BackendId { slot, generation: backend.generation }, backend))
        })
    }

    /// The backend in a slot, whatever its generation.
    pub(crate) fn in_slot(&self, slot: u32) -> Option<&Backend> {
        self.pieces.get(slot as usize / PIECE)?.backends.get(slot as usize % PIECE)?.as_ref()
    }
}
