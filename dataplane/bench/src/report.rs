//! The report of a measurement: its figures, how they are printed, and why there are none.

use std::io::{self, Write};

use dataplane::BURST;
use proto::Mode;
use serde::Serialize;

use super::account::{CounterReading, FinalAccount};
use super::error::BenchError;
use super::scenario::{self, Scenario};
use super::timing::{CycleRate, PollTimes};
use crate::args::{BenchDirection, BenchFamily, BenchIo, BenchProtocol, BenchState, FrameSize, ReportFormat};

/// What was measured. Field names are part of the contract (DESIGN section 8).
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// As asked for; `mix` with `--mix`.
    pub mode: &'static str,
    /// As asked for; `mix` with `--mix`.
    pub family: &'static str,
    /// As asked for.
    pub io: &'static str,
    /// As asked for.
    pub workers: u32,
    /// As asked for.
    pub flows: u32,
    /// Of all parts of the traffic.
    pub services: u32,
    /// As asked for.
    pub backends: u32,
    /// As asked for.
    pub protocol: &'static str,
    /// As asked for.
    pub state: &'static str,
    /// As asked for, or what the other options ask for.
    pub direction: &'static str,
    /// As asked for: bytes, or `imix`.
    pub size: String,
    /// As asked for.
    pub df: bool,
    /// Whether frames carry a VLAN tag, with `--mix` some.
    pub vlan: bool,
    /// Next hops of equal cost, at most.
    pub ecmp: u8,
    /// As asked for; 0 over rings, which have DPDK's.
    pub buffers: u32,
    /// Packets measured.
    pub packets: u64,
    /// Time they took, s.
    pub seconds: f64,
    /// Million packets a second.
    pub mpps: f64,
    /// Time a packet.
    pub ns_per_packet: f64,
    /// Time a packet of the same harness alone, in the same run; included in `ns_per_packet`.
    pub floor_ns: f64,
    /// In mode `none`: what the memory of the machine allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_line: Option<LineTimes>,
    /// With `--handover`: time a packet when each arrives at its owner, in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without_handover_ns: Option<f64>,
    /// TSC cycles per packet.
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
    /// Time of one poll of a burst of [`BURST`]: the median.
    pub p50_ns: u64,
    /// Its 99th percentile.
    pub p99_ns: u64,
    /// Its 99.9th percentile.
    pub p999_ns: u64,
    /// With `--latency`: from the arrival of a packet until it left, at several loads.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub latency: Vec<LoadLatency>,
    /// With `--listing`: its cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listing: Option<ListingCost>,
    /// Packets that left and were checked in full.
    pub verified: u64,
    /// Packets of the whole run, with warm-up: received by the workers.
    pub received: u64,
    /// Of the whole run: transmitted.
    pub transmitted: u64,
    /// Of the whole run: dropped.
    pub dropped: u64,
    /// Held by the workers at the end.
    pub held: u64,
    /// Drops by reason, if there were any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub drop_reasons: Vec<(String, u64)>,
}

/// The cost of a listing of all flows, medians of slices that alternate.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ListingCost {
    /// Time a packet while flows are listed.
    pub ns_per_packet: f64,
    /// Time a packet in the slices between.
    pub without_ns: f64,
    /// Flows that are listed in a second.
    pub flows_per_second: f64,
}

/// The time for a random cache line of a table of 64 MB.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LineTimes {
    /// Each line is fetched 32 lines ahead of its use, ns.
    pub fetched_ahead_ns: f64,
    /// The next line depends on the one before, ns.
    pub dependent_ns: f64,
}

/// The latency at a load.
#[derive(Clone, Debug, Serialize)]
pub struct LoadLatency {
    /// Percentage of the rate that the worker reaches when every burst is full.
    pub load_percent: u8,
    /// Million packets a second that arrive.
    pub mpps: f64,
    /// Packets measured.
    pub packets: u64,
    /// Mean number of packets in a burst that was not empty.
    pub packets_per_burst: f64,
    /// Time from a packet's arrival until it left: the median.
    pub p50_ns: u64,
    /// Its 99th percentile.
    pub p99_ns: u64,
    /// Its 99.9th percentile.
    pub p999_ns: u64,
    /// Packets that found a full receive queue, so that they never arrived.
    pub missed: u64,
}

/// What one or more workers measured.
pub(super) struct Measured {
    pub(super) times: PollTimes,
    pub(super) counted: CounterReading,
    pub(super) floor_ns: f64,
    pub(super) reused_early: u64,
    pub(super) latency: Vec<LoadLatency>,
    pub(super) listing: Option<ListingCost>,
}

impl Measured {
    /// Nothing yet.
    pub(super) fn none(rate: CycleRate) -> Self {
        let (times, counted) = (PollTimes::new(rate), CounterReading::default());
        Self { times, counted, floor_ns: f64::INFINITY, reused_early: 0, latency: Vec::new(), listing: None }
    }

    /// Adds what was counted between two readings.
    pub(super) fn count(&mut self, from: &CounterReading, to: &CounterReading) {
        self.times.packets += to.received - from.received;
        self.counted.add(from, to);
    }

    /// That of workers at the same time: packets are added, times a packet are their mean.
    pub(super) fn and(mut self, other: &Self) -> Self {
        let (mine, theirs) = (f64::from(self.times.workers), f64::from(other.times.workers));
        self.floor_ns = (self.floor_ns * mine + other.floor_ns * theirs) / (mine + theirs);
        self.times.merge(&other.times);
        self.counted.add(&CounterReading::default(), &other.counted);
        self.reused_early += other.reused_early;
        self
    }
}

impl Report {
    pub(super) fn new(scenario: &Scenario, measured: &Measured, account: &FinalAccount, verified: u64) -> Self {
        let options = &scenario.options;
        let Measured { times, counted, floor_ns, reused_early, latency, listing } = measured;
        Self {
            mode: if options.mix { "mix" } else { options.mode.of_services().map_or("none", Mode::as_str) },
            family: match options.family {
                _ if options.mix => "mix",
                BenchFamily::V4 => "v4",
                BenchFamily::V6 => "v6",
            },
            io: if options.io == BenchIo::Mem { "mem" } else { "ring" },
            workers: options.workers.into(),
            flows: options.flows,
            services: scenario.parts.last().map_or(0, |part| part.services.end),
            backends: options.backends,
            protocol: if options.protocol == BenchProtocol::Tcp { "tcp" } else { "udp" },
            state: if options.state == BenchState::Established { "established" } else { "opening" },
            direction: match scenario::direction(options) {
                BenchDirection::ToBackend => "to-backend",
                BenchDirection::ToClient => "to-client",
                BenchDirection::Both => "both",
            },
            size: match options.size {
                FrameSize::Each(bytes) => bytes.to_string(),
                FrameSize::Imix => "imix".into(),
            },
            df: !options.no_df,
            vlan: scenario.parts.iter().any(|part| part.is_tagged),
            ecmp: scenario.parts.iter().map(|part| part.next_hops).max().unwrap_or(1),
            buffers: if options.io == BenchIo::Mem { options.buffers } else { 0 },
            packets: times.packets,
            seconds: times.seconds(),
            mpps: times.mpps(),
            ns_per_packet: times.ns_per_packet(),
            floor_ns: *floor_ns,
            memory_line: None,
            without_handover_ns: None,
            cycles_per_packet: times.cycles_per_packet(),
            hits: counted.hits,
            misses: counted.misses,
            new_flows: counted.new_flows,
            drops: counted.dropped(),
            snat_port_reused_early: *reused_early,
            p50_ns: times.percentile_ns(500),
            p99_ns: times.percentile_ns(990),
            p999_ns: times.percentile_ns(999),
            latency: latency.clone(),
            listing: *listing,
            verified,
            received: account.received,
            transmitted: account.transmitted,
            dropped: account.dropped,
            held: account.held,
            drop_reasons: counted.named(),
        }
    }
}

/// Prints a report: a line of JSON, or a few lines of text.
///
/// # Errors
/// When it cannot be written.
pub fn print(report: &Report, output: Option<ReportFormat>, out: &mut impl Write) -> Result<(), BenchError> {
    let text = match output {
        Some(ReportFormat::Json) => serde_json::to_string(report).map_err(io::Error::from)?,
        None => text(report),
    };
    Ok(writeln!(out, "{text}")?)
}

fn text(report: &Report) -> String {
    let mut text = format!(
        "{} {} {} {}, {}, over {}: {} flows, {} services, {} backends\n\
         {:.1} ns a packet, {:.1} cycles, {:.2} Mpps on {} (no NIC)\n\
         of that {:.1} ns are the harness (the floor), measured in the same run\n\
         {} packets in {:.1} s: {} hits, {} misses, {} new flows, {} drops; {} checked\n\
         a poll of {BURST}: p50 {} ns, p99 {} ns, p99.9 {} ns",
        report.mode,
        report.family,
        report.state,
        report.protocol,
        report.direction,
        report.io,
        report.flows,
        report.services,
        report.backends,
        report.ns_per_packet,
        report.cycles_per_packet,
        report.mpps,
        if report.workers == 1 { "one core".to_owned() } else { format!("{} cores", report.workers) },
        report.floor_ns,
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
    );
    for load in &report.latency {
        text.push_str(&format!(
            "\nlatency at {} % load ({:.2} Mpps, no NIC; {:.1} packets a burst): p50 {} ns, p99 {} ns, p99.9 {} ns, {} missed",
            load.load_percent, load.mpps, load.packets_per_burst, load.p50_ns, load.p99_ns, load.p999_ns, load.missed
        ));
    }
    if let Some(ListingCost { ns_per_packet, without_ns, flows_per_second }) = report.listing {
        text.push_str(&format!(
            "\nwhile {flows_per_second:.0} flows a second are listed: {ns_per_packet:.1} ns a packet, {without_ns:.1} ns in between"
        ));
    }
    if let Some(LineTimes { fetched_ahead_ns, dependent_ns }) = report.memory_line {
        text.push_str(&format!(
            "\na random cache line of 64 MB: {fetched_ahead_ns:.1} ns when it is fetched ahead, {dependent_ns:.1} ns when it depends on the one before"
        ));
    }
    if let Some(without) = report.without_handover_ns {
        text.push_str(&format!("\nevery packet arrived at another worker than its owner; {without:.1} ns when none does"));
    }
    text
}
