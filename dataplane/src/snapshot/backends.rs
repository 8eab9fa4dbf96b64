//! Backends by slot, in pieces that successive snapshots share.

use std::net::SocketAddr;
use std::sync::Arc;

use proto::{Protocol, ServiceName};

use crate::flow::BackendId;
use crate::snat::TargetSlot;

/// Backends in a piece: a change copies 256 x 72 B, and a table of 100,000 backends has 391 pieces.
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
    /// Whether new flows are sent to it.
    pub accepts_new: bool,
    /// It is gone; its flows may go on until the drain is over.
    pub removed: bool,
}

/// Backends by slot.
#[derive(Clone, Debug, Default)]
pub(crate) struct BackendTable {
    pieces: Vec<Arc<Vec<Option<Backend>>>>,
}

impl BackendTable {
    #[inline]
    pub(crate) fn get(&self, id: BackendId) -> Option<&Backend> {
        let slot = id.slot as usize;
        let backend = self.pieces.get(slot / PIECE)?.get(slot % PIECE)?.as_ref()?;
        (backend.generation == id.generation).then_some(backend)
    }

    /// Puts a backend into a slot, or empties it.
    pub(crate) fn set(&mut self, slot: u32, backend: Option<Backend>) {
        let slot = slot as usize;
        while self.pieces.len() <= slot / PIECE {
            self.pieces.push(Arc::new(vec![None; PIECE]));
        }
        Arc::make_mut(&mut self.pieces[slot / PIECE])[slot % PIECE] = backend;
    }

    /// Changes the backend of a slot, if there is one. Copies only if `change` differs from what is there.
    pub(crate) fn update(&mut self, slot: u32, differs: impl Fn(&Backend) -> bool, change: impl FnOnce(&mut Backend)) {
        let slot = slot as usize;
        let Some(piece) = self.pieces.get_mut(slot / PIECE) else { return };
        if piece[slot % PIECE].as_ref().is_some_and(differs)
            && let Some(backend) = &mut Arc::make_mut(piece)[slot % PIECE]
        {
            change(backend);
        }
    }

    /// The backend in a slot, whichever it is.
    pub(crate) fn in_slot(&self, slot: u32) -> Option<&Backend> {
        self.pieces.get(slot as usize / PIECE)?.get(slot as usize % PIECE)?.as_ref()
    }
}
