//! The states of a flow: which packets change them, and which change nothing.

mod plain;
mod shift;
mod states;
#[cfg(test)]
mod tests;

pub use plain::is_plain;
pub(crate) use plain::{Admission, UDP_SIGNAL};
pub use shift::{BackendStep, ClientStep, ClockShift, HeaderStage, LastSaid, NumberShift, SegmentHead, Shift, StreamShift};
pub(crate) use states::STATE_BITS;
pub use states::{Direction, FlowMode, FlowState, YieldClass, begins, is_mid_stream, is_opening, next_state};
