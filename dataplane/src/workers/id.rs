//! Identity of workers, and the limits on their number.
//!
//! Not here: steering.

/// Maximum number of workers of a gateway: one for each core of a large processor. The queues between them stay below
/// 100 MB.
pub const WORKERS_MAX: u8 = 64;
/// Entries of the redirection table, a power of two: the smallest table of common network cards. In larger tables it is
/// repeated, so that the same bits of a hash decide.
pub const RETA_ENTRIES: usize = 128;

/// Position of a worker in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u8);
