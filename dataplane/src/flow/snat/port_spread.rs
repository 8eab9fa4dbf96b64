//! The SNAT ports that direct a backend's reply to each worker, where network cards spread replies by the Toeplitz
//! hash.
//!
//! The RETA entry of a reply is the low seven bits of its hash: the bits of the reply without its destination port
//! (which a pool of ports stores), exclusive-or the bits of the port. The key is chosen so that each of the 128 ports
//! that share their upper nine bits has a different entry. So a worker has as many ports in each such block as it has
//! RETA entries, and its n-th port is found without a search.
//!
//! Not here: the allocation of ports (`ports`).

use crate::wire::{Address, RETA_ENTRIES, RssKey, Toeplitz, Tuple, rss_keys};

/// Number of ports that share their upper bits: the number of RETA entries.
const BLOCK: usize = RETA_ENTRIES;
const BLOCK_PORTS: u16 = 128;
const _: () = assert!(BLOCK == BLOCK_PORTS as usize);
/// Number of blocks of the 16-bit ports.
const BLOCKS: usize = 65_536 / BLOCK;
const MASK: u32 = BLOCK_PORTS as u32 - 1;

/// The share of ports in the RETA entry of a reply, for one family.
#[derive(Clone, Debug)]
struct PortEntries {
    /// The share of the upper bits of a port, indexed by these bits.
    upper: [u8; BLOCKS],
    /// The lower bits of a port, indexed by their share.
    lower: [u8; BLOCK],
}

impl PortEntries {
    /// `None` when two ports of a block have the same entry under this key.
    #[allow(clippy::cast_possible_truncation)] // entries and lower bits of ports are below 128
    fn new<A: Address>(toeplitz: &Toeplitz) -> Option<Self> {
        let entry = |port: usize| (toeplitz.of_destination_port::<A>(port as u16) & MASK) as u8;
        let mut lower = [u8::MAX; BLOCK];
        for bits in 0..BLOCK {
            lower[usize::from(entry(bits))] = bits as u8;
        }
        let upper = std::array::from_fn(|block| entry(block * BLOCK));
        (!lower.contains(&u8::MAX)).then_some(Self { upper, lower })
    }

    /// The port of a block that compensates `entry`, the share of the rest of the reply.
    fn port(&self, block: usize, entry: u32) -> u16 {
        let upper = self.upper.get(block).copied().unwrap_or(0);
        let lower = self.lower[((entry & MASK) ^ u32::from(upper)) as usize];
        u16::try_from(block * BLOCK).unwrap_or(0) | u16::from(lower)
    }
}

/// The assignment of ports to workers under one key.
#[derive(Clone, Debug)]
pub(crate) struct PortSpread {
    toeplitz: Toeplitz,
    v4: PortEntries,
    v6: PortEntries,
    workers: u16,
}

impl PortSpread {
    /// The first key derived from `seed` that serves both families. One key in four does, so 400 keys fail once in
    /// 10^49.
    pub(crate) fn find(seed: u64, workers: u16) -> Option<(RssKey, Self)> {
        rss_keys(seed).take(400).find_map(|key| {
            let toeplitz = Toeplitz::new(&key);
            let (v4, v6) = (PortEntries::new::<u32>(&toeplitz)?, PortEntries::new::<u128>(&toeplitz)?);
            Some((key, Self { toeplitz, v4, v6, workers }))
        })
    }

    pub(crate) fn toeplitz(&self) -> &Toeplitz {
        &self.toeplitz
    }

    /// Number of ports of a worker in each block of 128.
    pub(crate) fn ports_per_block(&self, worker: u8) -> u16 {
        BLOCK_PORTS.saturating_sub(worker.into()).div_ceil(self.workers)
    }

    /// The RETA entry of a reply without its destination port's share, which a pool of ports stores.
    #[allow(clippy::cast_possible_truncation)] // below 128
    pub(crate) fn entry_without_port<A: Address>(&self, backend: A, backend_port: u16, snat: A) -> u8 {
        let reply = Tuple { source: backend, destination: snat, source_port: backend_port, destination_port: 0, protocol: 0 };
        (self.toeplitz.hash(&reply) & MASK) as u8
    }

    /// The n-th port of a worker at or above `first`, a multiple of 128, towards a target with this entry without port.
    pub(crate) fn port<A: Address>(&self, worker: u8, first: u16, n: u32, without_port: u8) -> u16 {
        let per_block = u32::from(self.ports_per_block(worker)).max(1);
        let entry = u32::from(worker) + n % per_block * u32::from(self.workers);
        let block = usize::from(first) / BLOCK + (n / per_block) as usize;
        let entries = if A::BYTES == 4 { &self.v4 } else { &self.v6 };
        entries.port(block, entry ^ u32::from(without_port))
    }
}
