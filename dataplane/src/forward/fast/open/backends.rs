//! What new flows need of the backends that they are sent to, kept by each worker from one flow to the next: it is one
//! line of memory, and whether packets may be sent to the backend at all is checked once a snapshot.
//!
//! **Invariant:** what is kept of a backend is what the present snapshot says of it.
//!
//! Not here: the next hop's Ethernet address and link, which the exits of the snapshot have.

use proto::Family;

use crate::flow::{BackendId, TargetSlot};
use crate::forward::decide::backend_address;
use crate::snapshot::Snapshot;
use crate::wire::Address;

/// Backends that are kept, by the lower bits of their slots: 4,096 * 64 bytes.
const KEPT: usize = 4096;

/// What a new flow needs of its backend.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct OpeningBackend {
    /// The snapshot that it was looked up in.
    sequence: u64,
    /// [`BackendId::packed`]; 0 if there is none.
    id: u32,
    family: Family,
    /// The backend's port.
    pub(super) port: u16,
    /// See [`crate::snapshot::Backend::next_hop`].
    pub(super) next_hop: u32,
    /// The pool key of its SNAT ports.
    pub(super) target: TargetSlot,
    /// [`Address::wide`] of its address.
    address: u128,
}

const _: () = assert!(size_of::<OpeningBackend>() == 64);

impl OpeningBackend {
    const NONE: Self = Self {
        sequence: 0,
        id: 0,
        family: Family::V4,
        port: 0,
        next_hop: 0,
        target: TargetSlot { index: 0, generation: 0 },
        address: 0,
    };

    /// Its address.
    #[inline(always)]
    pub(super) fn address<A: Address>(&self) -> A {
        A::from_wide(self.address)
    }

    /// `None` if it is gone, of the other family, or at an address at which packets to it would return to the gateway.
    fn of<A: Address>(snapshot: &Snapshot, id: BackendId) -> Option<Self> {
        let backend = snapshot.backend(id)?;
        let address: A = backend_address(snapshot, backend).ok()?;
        Some(Self {
            sequence: snapshot.sequence(),
            id: id.packed(),
            family: A::FAMILY,
            port: backend.address.port(),
            next_hop: backend.next_hop,
            target: backend.target,
            address: address.wide(),
        })
    }
}

/// The backends of new flows of a worker.
#[derive(Debug)]
pub(in crate::forward::fast) struct OpeningBackends(Box<[OpeningBackend; KEPT]>);

impl OpeningBackends {
    pub(in crate::forward::fast) fn new() -> Self {
        let kept = vec![OpeningBackend::NONE; KEPT].into_boxed_slice();
        // There are as many as asked for.
        Self(kept.try_into().unwrap_or_else(|_| unreachable!()))
    }

    /// What new flows need of a backend; `None` if the loop takes no packets for it.
    #[inline(always)]
    pub(super) fn get<A: Address>(&mut self, snapshot: &Snapshot, id: BackendId) -> Option<&OpeningBackend> {
        let kept = &mut self.0[id.slot as usize % KEPT];
        let is_it = kept.sequence == snapshot.sequence() && kept.id == id.packed() && kept.family == A::FAMILY;
        if !is_it {
            look_up::<A>(kept, snapshot, id)?;
        }
        Some(kept)
    }
}

#[cold]
#[inline(never)]
fn look_up<A: Address>(kept: &mut OpeningBackend, snapshot: &Snapshot, id: BackendId) -> Option<()> {
    *kept = OpeningBackend::of::<A>(snapshot, id)?;
    Some(())
}
