//! `sluiced bench`: how fast the engine forwards, without a NIC. The worker is the one that forwards in the gateway; the
//! frames come from a trace of all flows in random order, and a sample of what leaves is checked field by field.
//!
//! Figures of `--io mem` hold the engine and the copy of each frame into a buffer; those of `--io ring` also DPDK's
//! buffers and rings. Mode `none` is the floor of the same harness: a loop that only swaps MAC addresses.

mod frame;
mod harness;
mod measure;
mod report;
mod scenario;
mod traffic;
mod verify;
mod worker_flows;

pub use report::{BenchError, Report, print};

use crate::cli::{BenchArgs, BenchFamily};

/// Measures.
///
/// # Errors
/// When the core or DPDK cannot be used, or a packet that left is wrong.
pub fn run(options: &BenchArgs) -> Result<Report, BenchError> {
    if !core_affinity::set_for_current(core_affinity::CoreId { id: options.core }) {
        return Err(BenchError::Core(options.core));
    }
    match options.family {
        BenchFamily::V4 => measure::measure::<u32>(options),
        BenchFamily::V6 => measure::measure::<u128>(options),
    }
}
