//! The loops of the fast path for eight packets at a time, on processors with AVX2: what most packets need, by vector
//! instructions. Packets that need more are left to the other loops.
//!
//! Not here: the instructions (`processor`).

mod checksums;
mod forward;
mod headers;
mod keys_v4;
mod keys_v6;
mod outers;
mod pass;
mod recognise;
mod start;
mod tunnels;

pub(super) use forward::{ForwardByEight, TunnelsByEight};
pub(super) use outers::OutersOfEight;
pub(super) use recognise::recognise_by_eight;
