//! Steering: which worker owns a flow. Each method is one pure function, the same for both directions of the flow
//! (FORWARDING section 5, docs/internals/decisions/0023-steering.md).
//!
//! Both methods spread packets of clients by their tuple. Replies of a `nat` backend reach the owner because the SNAT
//! port was chosen accordingly. In mode `dnat` a reply contains no address or port of the gateway, so both directions
//! are steered by the client's address.
//!
//! **Invariant:** the function does not change while the gateway runs. Whether a network card computes it correctly
//! only decides whether it is computed here.
//!
//! Not here: carrying packets to their owner ([`crate::Peers`]).

use std::sync::Arc;

use super::id::{WORKERS_MAX, WorkerId};
use super::steering_table::PacketTarget;
use crate::flow::{PortShare, PortSpread};
use crate::wire::{Address, RETA_ENTRIES, RssKey, Tuple, TupleHash, TupleKey};

/// The method that determines owners.
#[derive(Clone, Debug)]
enum OwnerHash {
    /// The engine's own hash; SNAT ports by their remainder.
    Own,
    /// The hash that network cards compute; SNAT ports by the same hash.
    Toeplitz { key: RssKey, spread: Arc<PortSpread> },
}

/// The owner function of a gateway.
#[derive(Clone, Debug)]
pub struct Steering {
    workers: u8,
    hash: TupleHash,
    owner_hash: OwnerHash,
}

impl Steering {
    /// Steering by the engine's own hash. `seed` is that of the workers' flow tables ([`crate::forward::Parts::seed`]),
    /// whose hash is reused.
    #[must_use]
    pub fn own_hash(workers: u8, seed: u64) -> Self {
        Self { workers: workers.clamp(1, WORKERS_MAX), hash: TupleHash::new(seed), owner_hash: OwnerHash::Own }
    }

    /// Steering by the Toeplitz hash with a secret key derived from `seed`, so that network cards can compute it.
    #[must_use]
    pub fn toeplitz(workers: u8, seed: u64) -> Self {
        let own = Self::own_hash(workers, seed);
        match PortSpread::find(seed, own.workers.into()) {
            Some((key, spread)) => Self { owner_hash: OwnerHash::Toeplitz { key, spread: Arc::new(spread) }, ..own },
            None => own,
        }
    }

    /// Number of workers.
    #[must_use]
    pub const fn workers(&self) -> u8 {
        self.workers
    }

    /// The key for network cards, where they take part.
    #[must_use]
    pub const fn rss_key(&self) -> Option<&RssKey> {
        match &self.owner_hash {
            OwnerHash::Own => None,
            OwnerHash::Toeplitz { key, .. } => Some(key),
        }
    }

    /// The worker of an entry of the redirection table; its receive queue has the same number.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // below the number of workers
    pub const fn reta(&self, entry: usize) -> WorkerId {
        WorkerId((entry % RETA_ENTRIES % self.workers as usize) as u8)
    }

    /// The SNAT ports that a worker may use.
    #[must_use]
    pub fn share(&self, worker: WorkerId) -> PortShare {
        match &self.owner_hash {
            OwnerHash::Own => PortShare::of_worker(worker.0.into(), self.workers.into()),
            OwnerHash::Toeplitz { spread, .. } => PortShare::spread(Arc::clone(spread), worker.0),
        }
    }

    /// The owner of a packet.
    #[must_use]
    pub fn owner<A: Address>(&self, tuple: &Tuple<A>, towards: PacketTarget) -> WorkerId {
        self.owner_hashed(tuple, towards, self.hash_of(tuple))
    }

    /// The same for a tuple whose hash under the seed is already known.
    #[must_use]
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // a remainder
    pub(crate) fn owner_hashed<A: Address>(&self, tuple: &Tuple<A>, towards: PacketTarget, hash: u64) -> WorkerId {
        match (towards, &self.owner_hash) {
            (PacketTarget::Frontend, OwnerHash::Own) => self.among_workers(hash),
            (PacketTarget::Snat, OwnerHash::Own) => WorkerId((tuple.destination_port % u16::from(self.workers)) as u8),
            (PacketTarget::Frontend | PacketTarget::Snat, OwnerHash::Toeplitz { spread, .. }) => {
                self.reta(spread.toeplitz().hash(tuple) as usize)
            }
            (PacketTarget::FrontendOfAddress, _) => self.by_address(tuple.source),
            (PacketTarget::Client, _) => self.by_address(tuple.destination),
        }
    }

    /// The Toeplitz hash of a tuple, if steering uses it.
    pub(crate) fn rss_hash<A: Address>(&self, tuple: &Tuple<A>) -> Option<u32> {
        match &self.owner_hash {
            OwnerHash::Own => None,
            OwnerHash::Toeplitz { spread, .. } => Some(spread.toeplitz().hash(tuple)),
        }
    }

    /// The worker at which the fragments of a datagram meet until their owner is known: one for all datagrams between
    /// two addresses, so that these keep their order.
    pub(crate) fn meeting<A: Address>(&self, source: A, destination: A) -> WorkerId {
        self.among_workers(self.hash_of(&Tuple { source, destination, source_port: 0, destination_port: 0, protocol: 0 }))
    }

    /// The hash by which flow tables find a tuple.
    #[inline]
    pub(crate) fn hash_of<A: Address>(&self, tuple: &Tuple<A>) -> u64 {
        self.hash.hash_key(&A::Key::of(tuple), tuple.protocol)
    }

    /// The owner of all flows of a client address.
    #[inline(never)]
    fn by_address<A: Address>(&self, client: A) -> WorkerId {
        let alone = Tuple { source: client, destination: A::default(), source_port: 0, destination_port: 0, protocol: 0 };
        self.among_workers(self.hash_of(&alone))
    }

    /// Mixes the hash once more, since flow tables use its low and high bits.
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // below the number of workers
    fn among_workers(&self, hash: u64) -> WorkerId {
        let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        WorkerId(((mixed * u64::from(self.workers)) >> 32) as u8)
    }
}
