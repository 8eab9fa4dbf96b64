//! What becomes of a packet: the verdict, the bytes that leave, and what captures and explanations say about it.
//! Deliberately not here: the choice of a backend (`services`), and what depends on earlier packets (`flows`).

#![allow(clippy::unwrap_used, clippy::panic)]

mod arbitrary;
mod bursts;
mod capture;
mod eight;
mod errors;
mod explain;
mod fast_way;
mod fragments;
mod frames;
mod mss;
mod options;
mod order;
#[path = "../rig/mod.rs"]
mod rig;
#[path = "../team/mod.rs"]
mod team;
mod verdicts;
mod vlans;
