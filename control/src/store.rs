//! What outlives a controller: the checkpoint of its decisions, and what operators set by hand.
//!
//! Deliberately not here: what either holds (`world`).

pub mod checkpoints;
pub mod override_editor;
pub mod overrides;
