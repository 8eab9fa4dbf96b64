//! The system calls of Linux that need `unsafe`: interfaces, taps, memory in huge pages, and programs that end with
//! this process.
//!
//! Invariant: each `unsafe` block says why it is sound. Not here: DPDK (`dpdk-sys`), and system calls that `rustix` has.

pub mod interface;
pub mod memory;
pub mod process;
pub mod tap;
