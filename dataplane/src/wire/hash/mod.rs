//! Hashes of tuples: those of the engine, and the Toeplitz hash of network cards.

mod toeplitz;
mod tuple_hash;

pub(crate) use toeplitz::rss_keys;
pub use toeplitz::{KEY_BYTES, RETA_ENTRIES, RssKey, Toeplitz};
pub use tuple_hash::TupleHash;
pub(crate) use tuple_hash::{TableHash, split_mix};
