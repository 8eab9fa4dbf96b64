//! `sluiced bench`: measures the forwarding engine without a NIC. The worker is that of the gateway. Frames come from a
//! trace of all flows in random order; a random one in a hundred of the transmitted packets is verified in full, and
//! every packet is accounted for.
//!
//! Figures of `--io mem` include the engine and the harness, which writes each frame into a buffer; those of `--io ring`
//! the engine and DPDK's buffers and rings. The floor is the same harness around a loop that only swaps Ethernet
//! addresses; each run measures it beside.

mod account;
mod error;
mod frame;
mod harness;
mod measure;
mod report;
mod scenario;
mod timing;
mod trace;
mod traffic;
mod verify;
mod worker_flows;

pub use error::BenchError;
pub use report::{Report, print};

use crate::tools::cli::{BenchArgs, BenchFamily};

/// Runs a measurement.
///
/// # Errors
/// If options contradict each other, a core or DPDK is unavailable, or a packet is wrong or not accounted for.
pub fn run(options: &BenchArgs) -> Result<Report, BenchError> {
    scenario::validate(options)?;
    if !core_affinity::set_for_current(core_affinity::CoreId { id: options.core }) {
        return Err(BenchError::Core(options.core));
    }
    let options = &scenario::with_load(options);
    let report = measure_family(options)?;
    if !options.handover {
        return Ok(report);
    }
    let without = measure_family(&BenchArgs { handover: false, ..options.clone() })?;
    Ok(Report { without_handover_ns: Some(without.ns_per_packet), ..report })
}

fn measure_family(options: &BenchArgs) -> Result<Report, BenchError> {
    match options.family {
        BenchFamily::V4 => measure::measure::<u32>(options),
        BenchFamily::V6 => measure::measure::<u128>(options),
    }
}
