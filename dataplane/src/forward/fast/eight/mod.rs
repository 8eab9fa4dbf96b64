//! The loops of the fast way for eight packets at a time, on processors with AVX2: what most packets need, by vector
//! instructions. Packets that need more are left to the other loops.
//!
//! Not here: the instructions (`processor`).

mod forward;
mod recognise;
mod translate;

pub(super) use forward::ForwardByEight;
pub(super) use recognise::RecogniseByEight;
