//! `sluiced bench`: measures the forwarding engine without a NIC. The worker is that of the gateway. Frames come from a
//! trace of all flows in random order, and a sample of the transmitted packets is verified field by field.
//!
//! Figures of `--io mem` include the engine and the copy of each frame into a buffer; those of `--io ring` also DPDK's
//! buffers and rings. Mode `none` measures the harness alone: a loop that only swaps MAC addresses.

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

/// Runs a measurement.
///
/// # Errors
/// If the core or DPDK is unavailable, or a transmitted packet is wrong.
pub fn run(options: &BenchArgs) -> Result<Report, BenchError> {
    if !core_affinity::set_for_current(core_affinity::CoreId { id: options.core }) {
        return Err(BenchError::Core(options.core));
    }
    match options.family {
        BenchFamily::V4 => measure::measure::<u32>(options),
        BenchFamily::V6 => measure::measure::<u128>(options),
    }
}
