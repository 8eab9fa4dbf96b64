//! `sluiced bench`: measures the forwarding engine without a NIC. The worker is that of the gateway, and so are the
//! ports over DPDK's rings. Frames come from a
//! trace of all flows in random order; a random one in a hundred of the transmitted packets is verified in full, and
//! every packet is accounted for.
//!
//! Figures of `--io mem` include the engine and the harness, which writes each frame into a buffer; those of `--io ring`
//! the engine and DPDK's buffers and rings. The floor is the same harness around a loop that only swaps Ethernet
//! addresses; each run measures it beside.

mod account;
mod args;
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

pub use args::{BenchArgs, BenchDirection, BenchFamily, BenchIo, BenchMode, BenchProtocol, BenchState, FrameSize, ReportFormat};
pub use error::BenchError;
pub use measure::{FlowPages, ListFlows, ListedWorker};
pub use report::{Report, print};
use scenario::Scenario;

/// Runs a measurement. `list` lists flows for `--listing`.
///
/// # Errors
/// If options contradict each other, a core or DPDK is unavailable, or a packet is wrong or not accounted for.
pub fn run(options: &BenchArgs, list: ListFlows) -> Result<Report, BenchError> {
    scenario::validate(options)?;
    if !core_affinity::set_for_current(core_affinity::CoreId { id: options.core }) {
        return Err(BenchError::Core(options.core));
    }
    let report = measure::measure(&Scenario::new(options), list)?;
    if !options.handover {
        return Ok(report);
    }
    let without = measure::measure(&Scenario::new(&BenchArgs { handover: false, ..options.clone() }), list)?;
    Ok(Report { without_handover_ns: Some(without.ns_per_packet), ..report })
}
