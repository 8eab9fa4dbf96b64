//! Backends by slot, in chunks that successive snapshots share.
//!
//! **Invariant:** the compact form of a backend always matches the backend.
//!
//! Not here: the assignment of slots (`compiler`).

use std::net::SocketAddr;
use std::sync::Arc;

use proto::{Protocol, ServiceName};

use crate::flow::{BackendId, TargetSlot, Tick, Ticks};

/// Backends per chunk: a change copies 256 x 96 B, and a table of 100,000 backends has 391 chunks.
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
pub struct Spot {
    /// Generation of the backend; 0 where there is none.
    pub generation: u32,
    /// Next hop of the backend.
    pub next_hop: u32,
    /// [`Backend::is_steady`]; if false, packets of its flows take the slow path.
    pub steady: bool,
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

    /// Changes an entry, and its compact form with it.
    fn change(&mut self, place: usize, change: impl FnOnce(&mut Option<Backend>)) {
        let backend = &mut self.backends[place];
        change(backend);
        let spot = |b: &Backend| {
            let &Backend { generation, next_hop, .. } = b;
            Spot { generation, next_hop, steady: b.is_steady() }
        };
        self.spots[place] = backend.as_ref().map_or_else(Spot::default, spot);
    }
}

/// Backends by slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct BackendTable {
    pieces: Vec<Arc<Piece>>,
}

impl BackendTable {
    /// The backend that still has this slot.
    pub(crate) fn get(&self, id: BackendId) -> Option<&Backend> {
        self.in_slot(id.slot).filter(|backend| backend.generation == id.generation)
    }

    /// As [`BackendTable::get`], for a hit.
    #[inline]
    pub(crate) fn spot(&self, id: BackendId) -> Option<&Spot> {
        let slot = id.slot as usize;
        let spot = &self.pieces.get(slot / PIECE)?.spots[slot % PIECE];
        (spot.generation == id.generation).then_some(spot)
    }

    /// Stores a backend in a slot, or clears the slot.
    pub(crate) fn set(&mut self, slot: u32, backend: Option<Backend>) {
        let slot = slot as usize;
        while self.pieces.len() <= slot / PIECE {
            self.pieces.push(Arc::new(Piece::new()));
        }
        Arc::make_mut(&mut self.pieces[slot / PIECE]).change(slot % PIECE, |place| *place = backend);
    }

    /// Changes the backend of a slot, if there is one and it `differs`. The chunk is copied only then.
    pub(crate) fn update(&mut self, slot: u32, differs: impl Fn(&Backend) -> bool, change: impl FnOnce(&mut Backend)) {
        let slot = slot as usize;
        let Some(piece) = self.pieces.get_mut(slot / PIECE) else { return };
        if piece.backends[slot % PIECE].as_ref().is_some_and(differs) {
            Arc::make_mut(piece).change(slot % PIECE, |place| {
                if let Some(backend) = place {
                    change(backend);
                }
            });
        }
    }

    /// The backend in a slot, whatever its generation.
    pub(crate) fn in_slot(&self, slot: u32) -> Option<&Backend> {
        self.pieces.get(slot as usize / PIECE)?.backends.get(slot as usize % PIECE)?.as_ref()
    }
}
