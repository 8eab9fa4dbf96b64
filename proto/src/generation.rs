//! Generations: which state a gateway forwards by.

use std::fmt;

/// A version of the state that a controller serves: the leader's epoch, and a counter that only grows within it.
/// Two generations of different epochs cannot be ordered (CONTROL section 1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Generation {
    /// The Lease's uid and transitions, or without a Lease the start time of the controller in ms. Empty: none yet.
    pub epoch: String,
    /// Grows by one with every change of the state.
    pub counter: u64,
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.epoch, self.counter)
    }
}
