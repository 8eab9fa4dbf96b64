//! The report of a measurement: its figures, how they are printed, and why there are none.

use std::io::{self, Write};

use serde::Serialize;

use crate::cli::OutputFormat;

/// What was measured. Field names are part of the contract (DESIGN section 8).
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// As asked for.
    pub mode: &'static str,
    /// As asked for.
    pub family: &'static str,
    /// As asked for.
    pub io: &'static str,
    /// As asked for.
    pub workers: u32,
    /// As asked for.
    pub flows: u32,
    /// As asked for.
    pub services: u32,
    /// As asked for.
    pub backends: u32,
    /// Packets measured.
    pub packets: u64,
    /// Time they took, s.
    pub seconds: f64,
    /// Million packets a second.
    pub mpps: f64,
    /// Time a packet.
    pub ns_per_packet: f64,
    /// TSC cycles a packet.
    pub cycles_per_packet: f64,
    /// Packets of known flows.
    pub hits: u64,
    /// Packets without a flow.
    pub misses: u64,
    /// Flows made.
    pub new_flows: u64,
    /// Packets dropped, under any reason.
    pub drops: u64,
    /// SNAT ports taken before they had rested.
    pub snat_port_reused_early: u64,
    /// Time of one poll of a burst of 32: the median.
    pub p50_ns: u64,
    /// Its 99th percentile.
    pub p99_ns: u64,
    /// Its 99.9th percentile.
    pub p999_ns: u64,
    /// Packets that left and were checked field by field.
    pub verified: u64,
    /// Drops by reason, if there were any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drop_reasons: Vec<(String, u64)>,
}

impl Report {
    /// Two workers at the same time: packets and rates are added, times a packet are their mean, percentiles those of
    /// the slower.
    #[allow(clippy::cast_precision_loss)] // counts stay below 2^53
    pub(super) fn and(mut self, other: Self) -> Self {
        let (mine, theirs) = (self.packets as f64, other.packets as f64);
        let mean = |a: f64, b: f64| (a * mine + b * theirs) / (mine + theirs);
        self.ns_per_packet = mean(self.ns_per_packet, other.ns_per_packet);
        self.cycles_per_packet = mean(self.cycles_per_packet, other.cycles_per_packet);
        self.seconds = self.seconds.max(other.seconds);
        self.packets += other.packets;
        self.mpps += other.mpps;
        self.hits += other.hits;
        self.misses += other.misses;
        self.new_flows += other.new_flows;
        self.drops += other.drops;
        self.snat_port_reused_early += other.snat_port_reused_early;
        self.p50_ns = self.p50_ns.max(other.p50_ns);
        self.p99_ns = self.p99_ns.max(other.p99_ns);
        self.p999_ns = self.p999_ns.max(other.p999_ns);
        self.verified += other.verified;
        for (reason, count) in other.drop_reasons {
            match self.drop_reasons.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, sum)) => *sum += count,
                None => self.drop_reasons.push((reason, count)),
            }
        }
        self
    }
}

/// Why there is no figure.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The core cannot be used.
    #[error("core {0} cannot be used: it does not exist or this process may not run on it; see `taskset -p $$`")]
    Core(usize),
    /// A packet left the engine that should not have left like that.
    #[error("a transmitted packet is wrong: {0}; the figures would mean nothing")]
    Wrong(String),
    /// Packets of known flows were dropped.
    #[error("packets of known flows were dropped ({0}), where none may be; the figures would mean nothing")]
    Dropped(String),
    /// There is no memory for so many flows.
    #[error(transparent)]
    NoMemory(#[from] dataplane::NoMemory),
    /// The report cannot be written.
    #[error("cannot write the report: {0}")]
    Write(#[from] io::Error),
    /// DPDK could not be set up.
    #[error("DPDK: {0}")]
    Dpdk(String),
}

/// Prints a report: a line of JSON, or a few lines of text.
///
/// # Errors
/// When it cannot be written.
pub fn print(report: &Report, output: Option<OutputFormat>, out: &mut impl Write) -> Result<(), BenchError> {
    let text = match output {
        Some(OutputFormat::Json) => serde_json::to_string(report).map_err(io::Error::from)?,
        None => text(report),
    };
    Ok(writeln!(out, "{text}")?)
}

fn text(report: &Report) -> String {
    format!(
        "{} {} over {}: {} flows, {} services, {} backends\n\
         {:.1} ns a packet, {:.1} cycles, {:.2} Mpps on {} (no NIC)\n\
         {} packets in {:.1} s: {} hits, {} misses, {} new flows, {} drops; {} checked\n\
         a poll of 32: p50 {} ns, p99 {} ns, p99.9 {} ns",
        report.mode,
        report.family,
        report.io,
        report.flows,
        report.services,
        report.backends,
        report.ns_per_packet,
        report.cycles_per_packet,
        report.mpps,
        if report.workers == 1 { "one core".to_owned() } else { format!("{} cores", report.workers) },
        report.packets,
        report.seconds,
        report.hits,
        report.misses,
        report.new_flows,
        report.drops,
        report.verified,
        report.p50_ns,
        report.p99_ns,
        report.p999_ns
    )
}
