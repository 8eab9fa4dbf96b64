//! `sluiced bench`: the package `bench`, with the listings of this gateway's admin API.

use std::io;
use std::sync::atomic::Ordering;

use bench::{BenchArgs, BenchError, FlowPages, ListedWorker};

use crate::worker_threads::inquiries::{FlowPosition, Inquiries};

/// Flows of a page, as `sluicectl flows` asks for them.
const PAGE: usize = 1000;

/// Measures, and prints the report.
///
/// # Errors
/// See [`bench::run`]; or `out` cannot be written.
pub fn run(args: &BenchArgs, out: &mut impl io::Write) -> Result<(), BenchError> {
    let report = bench::run(args, list_flows)?;
    bench::print(&report, args.output, out)
}

fn list_flows(ListedWorker { mailbox, explainer, snapshots }: ListedWorker) -> FlowPages {
    let inquiries = Inquiries::new(vec![mailbox], explainer, snapshots);
    let mut position = FlowPosition::FIRST;
    Box::new(move |listed| {
        let count = |_: usize, _: &_| {
            listed.fetch_add(1, Ordering::Relaxed);
            true
        };
        // While packets are verified the worker does not poll, and gives no answer.
        position = inquiries.flows(position, PAGE, count).ok().flatten().unwrap_or(FlowPosition::FIRST);
    })
}
