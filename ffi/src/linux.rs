//! The system calls of Linux that need `unsafe`: interfaces, taps, and memory in huge pages. Nothing here calls DPDK.

pub(crate) mod interface;
pub mod memory;
pub mod process;
pub mod tap;
