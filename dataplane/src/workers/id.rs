//! Identity of workers, and the limits on their number.
//!
//! Not here: steering.

/// Maximum number of workers of a gateway: one for each core of a large processor. The queues between them stay below
/// 100 MB.
pub const WORKERS_MAX: u8 = 64;

/// Position of a worker in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u8);
