//! Backends by slot, in pieces that successive snapshots share.

use std::net::SocketAddr;
use std::sync::Arc;

use proto::{Protocol, ServiceName};

use crate::flow::BackendId;
use crate::snat::TargetSlot;
use crate::tick::{Tick, Ticks};

/// Backends in a piece: a change copies 256 x 96 B, and a table of 100,000 backends has 391 pieces.
const PIECE: usize = 256;

/// A backend of one service.
#[derive(Clone, Debug)]
pub struct Backend {
    /// Where its packets go.
    pub address: SocketAddr,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The service it belongs to.
    pub service: Arc<ServiceName>,
    /// What its SNAT ports are counted by: shared with other services' backends at the same address.
    pub target: TargetSlot,
    /// Slot of its next hop, or [`crate::flow::UNRESOLVED`] without a route.
    pub next_hop: u32,
    /// Which owner of the slot it is.
    pub generation: u32,
    /// How long its confirmed flows may be silent, if its service says.
    pub idle_timeout: Option<Ticks>,
    /// Whether new flows are sent to it.
    pub accepts_new: bool,
    /// It is gone; its flows may go on until the drain is over.
    pub removed: bool,
    /// Since when its probes fail, or did when it was removed.
    pub failing: Option<Tick>,
}

impl Backend {
    /// Since when its probes fail while others are used instead: not where all fail and all are used.
    #[must_use]
    pub fn fails_since(&self) -> Option<Tick> {
        self.failing.filter(|_| !self.accepts_new)
    }

    /// Whether its flows just go on: it is there, and nothing says that it does not answer.
    #[must_use]
    pub fn is_steady(&self) -> bool {
        !self.removed && self.fails_since().is_none()
    }
}

/// What a hit needs of a backend: as little as fits, so that a thousand backends stay in the first cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spot {
    /// The backend's; 0 where there is none.
    pub generation: u32,
    /// The backend's.
    pub next_hop: u32,
    /// [`Backend::is_steady`]; else a packet of its flows is looked at closer.
    pub steady: bool,
}

/// Backends, and the same once more as spots, each by its place in the piece.
#[derive(Clone, Debug)]
struct Piece {
    spots: [Spot; PIECE],
    backends: Vec<Option<Backend>>,
}

impl Piece {
    fn new() -> Self {
        Self { spots: [Spot::default(); PIECE], backends: vec![None; PIECE] }
    }

    /// Changes a place, and its spot with it.
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
    /// A backend that has this slot still.
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

    /// Puts a backend into a slot, or empties it.
    pub(crate) fn set(&mut self, slot: u32, backend: Option<Backend>) {
        let slot = slot as usize;
        while self.pieces.len() <= slot / PIECE {
            self.pieces.push(Arc::new(Piece::new()));
        }
        Arc::make_mut(&mut self.pieces[slot / PIECE]).change(slot % PIECE, |place| *place = backend);
    }

    /// Changes the backend of a slot, if there is one and it `differs`. Copies only then.
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
