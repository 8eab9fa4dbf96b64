//! Metrics of workers: packets, flows, and how busy they are.
//!
//! Invariant: ratios are over a window of at least [`WINDOW`], however many clients ask, so that one client does not
//! shorten the window of another.
//! Not here: measuring the load (`worker_threads`).

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use control::metrics::{MetricFamily, MetricWriter, SizeCounts};
use dataplane::{Inboxes, WorkerCounters};

use crate::worker_threads::{BURST_SIZES, Load, LoadReading};

/// Window of ratios: from one to two of these, or to the time between two requests if that is longer.
const WINDOW: Duration = Duration::from_secs(10);

const BUSY_RATIO: MetricFamily =
    MetricFamily::gauge("sluice_worker_busy", "ratio", "Share of the last 10 s or more that a worker spent on packets, 0 to 1.");
const CYCLES_PER_PACKET: MetricFamily = MetricFamily::gauge(
    "sluice_worker",
    "cycles_per_packet",
    "Cycles of the time stamp counter per packet in the last 10 s or more; 0 without packets.",
);
const FLOWS: MetricFamily = MetricFamily::gauge("sluice_worker", "flows", "Flows in the tables of a worker.");
const FLOWS_PEAK: MetricFamily =
    MetricFamily::gauge("sluice_worker_peak", "flows", "Highest number of flows of a worker since its start.");
const POLL_PACKETS: MetricFamily =
    MetricFamily::sizes("sluice_worker_poll", "packets", "Packets that a poll found, of polls that found any.");
const FLOWS_LIMIT: MetricFamily =
    MetricFamily::gauge("sluice_worker_flows_limit", "", "Flows that a worker has room for (key flows.maxPerWorker).");
const STALLED: MetricFamily =
    MetricFamily::gauge("sluice_worker_stalled", "", "1 while a worker has not polled its ports for 2 s or longer.");
const HELD: MetricFamily = MetricFamily::gauge(
    "sluice_worker_held",
    "packets",
    "Packets that wait for a next hop, or for the first fragment of their datagram.",
);

const HELD_PEAK: MetricFamily =
    MetricFamily::gauge("sluice_worker_peak_held", "packets", "Highest number of held packets since the start of the worker.");
const SNAT_PORTS: MetricFamily = MetricFamily::gauge(
    "sluice_worker_snat_ports",
    "",
    "SNAT ports that flows of a worker hold, each counted once for every target that it is used towards.",
);
const SNAT_PORTS_PEAK: MetricFamily =
    MetricFamily::gauge("sluice_worker_peak_snat_ports", "", "Highest number of SNAT ports since the start of the worker.");
const QUEUED: MetricFamily =
    MetricFamily::gauge("sluice_worker_queued", "bursts", "Groups of up to 8 packets from other workers that wait for this one.");

type OfLoad = fn(&LoadReading) -> u64;
type OfCounters = fn(&WorkerCounters) -> u64;

/// What is counted by the threads.
const OF_LOADS: [(MetricFamily, OfLoad); 5] = [
    (MetricFamily::counter("sluice_worker", "polls", "Polls of all ports by a worker."), |load| load.polls),
    (MetricFamily::counter("sluice_worker_busy", "polls", "Polls that found a packet."), |load| load.busy_polls),
    (MetricFamily::counter("sluice_worker_polled", "packets", "Packets that polls found."), |load| load.packets),
    (MetricFamily::counter("sluice_worker", "cycles", "Cycles of the time stamp counter, sleep included."), |load| load.cycles),
    (MetricFamily::counter("sluice_worker_busy", "cycles", "Cycles in polls that found a packet."), |load| load.busy_cycles),
];

/// What is counted by the engine.
const OF_WORKERS: [(MetricFamily, OfCounters); 16] = [
    (MetricFamily::counter("sluice_worker_received", "packets", "Packets received from ports and twins."), |of| {
        of.received.get()
    }),
    (
        MetricFamily::counter(
            "sluice_worker_transmitted",
            "packets",
            "Packets that ports accepted, or that were passed to twins.",
        ),
        |of| of.transmitted.get(),
    ),
    (MetricFamily::counter("sluice_worker_handed_in", "packets", "Packets from other workers."), |of| of.handed_in.get()),
    (MetricFamily::counter("sluice_worker_handed_out", "packets", "Packets handed to other workers."), |of| of.handed_out.get()),
    (
        MetricFamily::counter("sluice_worker_originated", "packets", "Packets that the gateway made without a received one."),
        |of| of.originated.get(),
    ),
    (
        MetricFamily::counter("sluice_worker_replied", "packets", "Received packets that became an answer, such as to ARP."),
        |of| of.replies.get(),
    ),
    (MetricFamily::counter("sluice_worker_hit", "packets", "Packets of known flows."), |of| of.hits.get()),
    (MetricFamily::counter("sluice_worker_missed", "packets", "Packets without a flow."), |of| of.misses.get()),
    (MetricFamily::counter("sluice_worker_new", "flows", "Flows created."), |of| of.new_flows.get()),
    (MetricFamily::counter("sluice_worker_reclaimed", "flows", "Unconfirmed flows that yielded to new ones."), |of| {
        of.reclaimed.get()
    }),
    (MetricFamily::counter("sluice_worker_ended_on_request", "flows", "Flows that operators ended."), |of| {
        of.ended_on_request.get()
    }),
    (MetricFamily::counter("sluice_snat_port_reused_early", "", "SNAT ports reused before they had rested."), |of| {
        of.snat_port_reused_early.get()
    }),
    (
        MetricFamily::counter(
            "sluice_proxy_headers_sent",
            "",
            "PROXY headers sent to backends: the first one of each connection, and that of each datagram.",
        ),
        |of| of.proxy_headers_sent.get(),
    ),
    (
        MetricFamily::counter(
            "sluice_proxy_headers_again",
            "",
            "PROXY headers that were repeated, because the backend had not acknowledged them.",
        ),
        |of| of.proxy_headers_again.get(),
    ),
    (
        MetricFamily::counter(
            "sluice_proxy_headers_refused",
            "",
            "Connections that a backend ended after its PROXY header without having sent any data.",
        ),
        |of| of.proxy_headers_refused.get(),
    ),
    (
        MetricFamily::counter(
            "sluice_sctp_hidden",
            "addresses",
            "Further addresses of SCTP peers in INIT and INIT ACK that became padding, so that associations have one path.",
        ),
        |of| of.sctp_hidden_addresses.get(),
    ),
];

/// Use of a worker's tables.
const TABLES: [(MetricFamily, OfCounters); 6] = [
    (FLOWS, |of| of.flows.get()),
    (FLOWS_PEAK, |of| of.flows_peak.get()),
    (SNAT_PORTS, |of| of.snat_ports.get()),
    (SNAT_PORTS_PEAK, |of| of.snat_ports_peak.get()),
    (HELD, |of| of.held.get()),
    (HELD_PEAK, |of| of.held_peak.get()),
];

/// The load of each worker, and past readings.
#[derive(Debug)]
pub struct WorkerLoads {
    loads: Vec<Arc<Load>>,
    queues: Vec<Inboxes>,
    flows_max: u64,
    window: Mutex<Window>,
}

/// Polls by number of packets.
fn poll_sizes(load: &LoadReading) -> SizeCounts {
    let bounds = (0..BURST_SIZES - 1).map(|size| f64::from(1_u32 << size)).chain([f64::INFINITY]);
    SizeCounts { sum: load.packets, buckets: bounds.zip(load.bursts).collect() }
}

/// Two past readings of all workers; ratios are since the older one.
#[derive(Debug)]
struct Window {
    since: Vec<LoadReading>,
    next: Vec<LoadReading>,
    next_at: Instant,
}

impl Window {
    /// The readings from which ratios are counted, at `now` with the present ones.
    fn since(&mut self, now: Instant, present: &[LoadReading]) -> &[LoadReading] {
        if now.saturating_duration_since(self.next_at) >= WINDOW {
            self.since = std::mem::replace(&mut self.next, present.to_vec());
            self.next_at = now;
        }
        &self.since
    }
}

impl WorkerLoads {
    /// For workers in their order, each with room for `flows_max` flows. `queues` is empty if there is only one.
    #[must_use]
    pub fn new(loads: Vec<Arc<Load>>, queues: Vec<Inboxes>, flows_max: u32) -> Self {
        let none = vec![LoadReading::default(); loads.len()];
        let window = Window { since: none.clone(), next: none, next_at: Instant::now() };
        Self { loads, queues, flows_max: flows_max.into(), window: Mutex::new(window) }
    }

    pub(super) fn any_stalled(&self) -> bool {
        self.loads.iter().any(|load| load.is_stalled())
    }

    /// The present readings of all workers, in their order.
    pub(super) fn read(&self) -> Vec<LoadReading> {
        self.loads.iter().map(|load| load.read()).collect()
    }

    /// Flows that each worker has room for.
    pub(super) const fn flows_max(&self) -> u64 {
        self.flows_max
    }

    pub(super) fn write(&self, writer: &mut MetricWriter<'_>, counters: &[Arc<WorkerCounters>]) -> fmt::Result {
        let present = self.read();
        let recent: Vec<_> = {
            let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
            let since = window.since(Instant::now(), &present);
            present.iter().zip(since).map(|(present, since)| present.since(*since)).collect()
        };
        let label = |worker: usize| [("worker", worker)];
        writer.gauges(&BUSY_RATIO, recent.iter().enumerate().map(|(at, load)| (label(at), load.busy_ratio())))?;
        let cycles = recent.iter().enumerate().map(|(at, load)| (label(at), load.cycles_per_packet().unwrap_or(0.0)));
        writer.gauges(&CYCLES_PER_PACKET, cycles)?;
        for (family, value) in &OF_LOADS {
            writer.counters(family, present.iter().enumerate().map(|(at, load)| (label(at), value(load))))?;
        }
        for (family, value) in &OF_WORKERS {
            writer.counters(family, counters.iter().enumerate().map(|(at, of)| (label(at), value(of))))?;
        }
        for (family, value) in &TABLES {
            writer.gauges(family, counters.iter().enumerate().map(|(at, of)| (label(at), value(of))))?;
        }
        writer.gauges(&QUEUED, self.queues.iter().enumerate().map(|(at, queue)| (label(at), queue.len() as u64)))?;
        writer.histograms(&POLL_PACKETS, present.iter().enumerate().map(|(at, load)| (label(at), poll_sizes(load))))?;
        writer.gauges(&FLOWS_LIMIT, (0..counters.len()).map(|at| (label(at), self.flows_max)))?;
        writer.gauges(&STALLED, self.loads.iter().enumerate().map(|(at, load)| (label(at), u64::from(load.is_stalled()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_clients_do_not_shorten_the_window_of_each_other() {
        let reading = |cycles| vec![LoadReading { cycles, ..LoadReading::default() }];
        let start = Instant::now();
        let mut window = Window { since: reading(0), next: reading(0), next_at: start };
        // Each second, as if two clients asked every 2 s.
        for second in 1..60 {
            let since = window.since(start + Duration::from_secs(second), &reading(second))[0].cycles;
            let length = second - since;
            assert!(length <= 2 * WINDOW.as_secs() && length >= second.min(WINDOW.as_secs()), "{length} s at {second} s");
        }
    }
}
