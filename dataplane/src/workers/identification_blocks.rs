//! Identifications of IPv4 that workers have in common: each takes blocks of them as it needs them, so that a busy worker
//! is not confined to a share (RFC 6864).
//!
//! **Invariant:** a worker touches this once a block, never once a packet.
//!
//! Not here: the identifications of packets (`fragment`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of counters. Pairs of addresses that share a counter only use it up faster. 2,048 * 4 bytes = 8 KiB.
pub(crate) const IDENTIFICATION_COUNTERS: usize = 2_048;

/// For each counter, where the next block begins, modulo 2^16.
#[derive(Clone, Debug)]
pub(crate) struct IdentificationBlocks(Arc<[AtomicU32; IDENTIFICATION_COUNTERS]>);

impl Default for IdentificationBlocks {
    fn default() -> Self {
        Self(Arc::new([const { AtomicU32::new(0) }; IDENTIFICATION_COUNTERS]))
    }
}

impl IdentificationBlocks {
    /// Takes a block of this many. Returns its first number.
    pub(crate) fn take(&self, counter: usize, size: u16) -> u16 {
        let next = self.0.get(counter % IDENTIFICATION_COUNTERS);
        #[allow(clippy::cast_possible_truncation)] // modulo 2^16
        next.map_or(0, |next| next.fetch_add(size.into(), Ordering::Relaxed) as u16)
    }
}
