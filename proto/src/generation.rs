//! Generations: versions of the state by which a gateway forwards.

use std::fmt;

/// A version of the state that a controller serves: the epoch of the leader, and a counter that only grows within the
/// epoch. Generations of different epochs are not ordered (CONTROL section 1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Generation {
    /// The uid and transitions of the Lease; without a Lease, the start time of the controller in ms. Empty: none yet.
    pub epoch: String,
    /// Grows by one with every change of the state.
    pub counter: u64,
}

impl Generation {
    /// Whether it is this one or a later one of the same epoch, so that who has it has this one too.
    #[must_use]
    pub fn includes(&self, earlier: &Self) -> bool {
        self.epoch == earlier.epoch && self.counter >= earlier.counter
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch, self.counter)
    }
}
