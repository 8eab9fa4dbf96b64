//! Backends by slot, in chunks that successive snapshots share.
//!
//! **Invariant:** what an exit is made from always matches its backend; the exit does in a finished snapshot.
//!
//! Not here: the assignment of slots (`compiler`).

mod exits;

use std::net::SocketAddr;
use std::sync::Arc;

use exits::BackendExits;
pub(crate) use exits::ExitsOfFlows;
use proto::{Protocol, ServiceName};

use super::routes::{Exit, Routes};
use crate::flow::{BackendId, TargetSlot, Tick, Ticks};

/// Backends per chunk: a change copies 256 x 108 B, and a table of 100,000 backends has 391 chunks.
const PIECE: usize = 256;

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
    /// Idle timeout of its flows that carry data, if its service sets one.
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

/// The inputs of the exit of a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ExitSource {
    /// [`BackendId::without_frontend`] of a backend that is steady ([`Backend::is_steady`]), otherwise 0.
    backend: u32,
    /// [`Backend::next_hop`].
    next_hop: u32,
    /// [`Backend::on_link`].
    on_link: bool,
}

impl ExitSource {
    fn of(slot: u32, backend: &Backend) -> Self {
        let id = BackendId::without_frontend(BackendId { slot, generation: backend.generation }.packed());
        let id = if backend.is_steady() { id } else { 0 };
        Self { backend: id, next_hop: backend.next_hop, on_link: backend.on_link }
    }

    fn exit(self, routes: &Routes) -> Exit {
        if self.backend == 0 { Exit::NOWHERE } else { Exit::of_backend(routes, self.backend, self.next_hop, self.on_link) }
    }
}

/// Backends, and what their exits are made from, at the same index.
#[derive(Clone, Debug)]
struct Piece {
    sources: [ExitSource; PIECE],
    backends: Vec<Option<Backend>>,
}

impl Piece {
    fn new() -> Self {
        Self { sources: [ExitSource::default(); PIECE], backends: vec![None; PIECE] }
    }

    /// Changes the entry of a slot. Returns whether its exit must be made again.
    fn change(&mut self, slot: u32, change: impl FnOnce(&mut Option<Backend>)) -> bool {
        let index = slot as usize % PIECE;
        let backend = &mut self.backends[index];
        change(backend);
        let now = backend.as_ref().map_or_else(ExitSource::default, |backend| ExitSource::of(slot, backend));
        std::mem::replace(&mut self.sources[index], now) != now
    }
}

/// Backends by slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct BackendTable {
    pieces: Vec<Arc<Piece>>,
    exits: BackendExits,
    /// The routes from which the exits were made.
    routes: Option<Arc<Routes>>,
    /// Slots whose exits must be made again.
    changed: Vec<u32>,
}

impl BackendTable {
    /// The backend that still has this slot.
    pub(crate) fn get(&self, id: BackendId) -> Option<&Backend> {
        self.in_slot(id.slot).filter(|backend| backend.generation == id.generation)
    }

    /// The exits of all backends, for hits.
    #[inline(always)]
    pub(crate) fn exits(&self) -> ExitsOfFlows<'_> {
        self.exits.by_flow()
    }

    /// Whether their exits have several times the size of a first-level cache.
    #[inline]
    pub(crate) fn are_many(&self) -> bool {
        self.exits.are_many()
    }

    /// Makes exits again: of the backends that changed, or of all if these are other routes than before.
    pub(crate) fn follow(&mut self, routes: &Arc<Routes>) {
        let changed = std::mem::take(&mut self.changed);
        let exit = |slot: u32| (slot, self.pieces[slot as usize / PIECE].sources[slot as usize % PIECE].exit(routes));
        if self.routes.as_ref().is_some_and(|before| Arc::ptr_eq(before, routes)) {
            self.exits.set(changed.into_iter().map(exit));
        } else {
            let slots = (0..).take(self.pieces.len() * PIECE);
            self.exits.set(slots.map(exit));
            self.routes = Some(routes.clone());
        }
    }

    /// Stores a backend in a slot, or clears the slot.
    pub(crate) fn set(&mut self, slot: u32, backend: Option<Backend>) {
        let piece = slot as usize / PIECE;
        while self.pieces.len() <= piece {
            self.pieces.push(Arc::new(Piece::new()));
        }
        if Arc::make_mut(&mut self.pieces[piece]).change(slot, |entry| *entry = backend) {
            self.changed.push(slot);
        }
    }

    /// Changes the backend of a slot, if there is one and it `differs`. The chunk is copied only then.
    pub(crate) fn update(&mut self, slot: u32, differs: impl Fn(&Backend) -> bool, change: impl FnOnce(&mut Backend)) {
        let Some(piece) = self.pieces.get_mut(slot as usize / PIECE) else { return };
        if piece.backends[slot as usize % PIECE].as_ref().is_some_and(differs) {
            let has_changed = Arc::make_mut(piece).change(slot, |entry| {
                if let Some(backend) = entry {
                    change(backend);
                }
            });
            if has_changed {
                self.changed.push(slot);
            }
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
