//! The measurement: warm-up, timing, verification.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use dataplane::{Address, Burst, DropReason, Parts, Peers, Port, Subscriber, Worker, WorkerCounters};
use proto::{Family, Mode};

use super::harness::{Harness, Memory, Rings, Side};
use super::report::{BenchError, Report};
use super::scenario::{self, SEED};
use super::traffic::{Trace, TraceKind};
use super::verify::Verifier;
use super::worker_flows::{WorkerSetup, setups};
use crate::cli::{BenchArgs, BenchFamily, BenchIo};

/// One packet in this many is kept and verified.
const SAMPLE: u32 = 1021;
/// Maximum number of packets kept.
const SAMPLES_MAX: usize = 65_536;
/// Number of flows whose replies are verified.
const REPLIES: usize = 1024;
/// Number of polls between two checks of the end of the measurement.
const POLLS_PER_LOOK: u32 = 1024;
/// Longer than the second after which a packet confirms a one-way flow (FORWARDING 2).
const ONE_WAY_AGE: Duration = Duration::from_secs(2);
const BURST: u64 = dataplane::BURST as u64;

pub(super) fn measure<A: Address>(options: &BenchArgs) -> Result<Report, BenchError> {
    match options.io {
        BenchIo::Mem if options.workers > 1 => together::<A>(options),
        BenchIo::Mem => alone::<A, _>(options, Memory::new()),
        BenchIo::Ring if options.workers > 1 => Err(BenchError::Dpdk("--io ring measures one worker; take --io mem".into())),
        BenchIo::Ring => alone::<A, _>(options, Rings::new()?),
    }
}

fn alone<A: Address, H: Harness>(options: &BenchArgs, harness: H) -> Result<Report, BenchError> {
    let setup = setups(options, A::FAMILY).pop().ok_or(BenchError::Core(options.core))?;
    run::<A, _>(options, harness, setup)
}

/// Measures several workers at once, each with its own ports and flows; adds up their packets.
fn together<A: Address>(options: &BenchArgs) -> Result<Report, BenchError> {
    let reports = std::thread::scope(|scope| {
        let measure = |(core, setup): (usize, WorkerSetup)| {
            scope.spawn(move || {
                if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
                    return Err(BenchError::Core(core));
                }
                run::<A, _>(options, Memory::new(), setup)
            })
        };
        let threads: Vec<_> = (options.core..).zip(setups(options, A::FAMILY)).map(measure).collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<Result<Vec<_>, _>>()
    })?;
    reports.into_iter().reduce(Report::and).ok_or(BenchError::Core(options.core))
}

fn run<A: Address, H: Harness>(
    options: &BenchArgs,
    mut harness: H,
    setup: WorkerSetup<<H::Port as Port>::Buffer>,
) -> Result<Report, BenchError> {
    let Some(ports) = harness.ports() else { return Err(BenchError::Dpdk("no ports".into())) };
    match options.mode.of_services() {
        None => floor(options, A::FAMILY, harness, ports, setup),
        Some(mode) => gateway(options, (mode, A::FAMILY), harness, ports, setup),
    }
}

/// Measures a worker that only swaps MAC addresses between two ports.
fn floor<H: Harness>(
    options: &BenchArgs,
    family: Family,
    mut harness: H,
    ports: [H::Port; 2],
    setup: WorkerSetup<<H::Port as Port>::Buffer>,
) -> Result<Report, BenchError> {
    let [mut uplink, mut cluster] = ports;
    let trace = Trace::new(options, family, TraceKind::Ack, 1, &setup.flows);
    let mut poll = |_: u64| {
        let mut burst = Burst::new();
        uplink.receive(&mut burst);
        for buffer in &mut burst {
            let bytes = dataplane::Buffer::bytes_mut(buffer);
            if let Some((ethernet, _)) = dataplane::wire::take_mut::<dataplane::wire::Ethernet>(bytes) {
                std::mem::swap(&mut ethernet.destination, &mut ethernet.source);
            }
        }
        cluster.transmit(&mut burst);
        cluster.release(&mut burst);
    };
    setup.start.wait();
    let timed = time(options, &mut harness, &trace, &mut poll, &Clock::real());
    Ok(timed.report(options, &WorkerCounters::default(), 0))
}

/// Measures a worker of a gateway whose services have one mode.
fn gateway<H: Harness>(
    options: &BenchArgs,
    (mode, family): (Mode, Family),
    mut harness: H,
    ports: [H::Port; 2],
    setup: WorkerSetup<<H::Port as Port>::Buffer>,
) -> Result<Report, BenchError> {
    let WorkerSetup { subscriber, counters, peers, flows: own, start } = setup;
    let mut worker = worker(options, family, ports, (subscriber, counters, peers))?;
    let counters = worker.counters().clone();
    let mut clock = if options.new_flows || options.flood { Clock::simulated(options) } else { Clock::real() };
    let mut poll = |now_ns: u64| {
        worker.poll(now_ns);
    };
    let mut verifier = Verifier::new(options, mode, family);
    let trace = if options.new_flows || options.flood {
        // Twice as many tuples as live flows, so that each is new again when it is next used.
        let twice = BenchArgs { flows: options.flows.saturating_mul(2), ..options.clone() };
        Trace::new(&twice, family, TraceKind::Syn, 1, &own)
    } else {
        let syns = Trace::new(options, family, TraceKind::Syn, 2, &own);
        let acks = Trace::new(options, family, TraceKind::Ack, 1, &own);
        let mut opened = pass(options, &mut harness, &syns, &mut poll, &clock);
        opened.extend(pass(options, &mut harness, &acks, &mut poll, &clock));
        opened.iter().try_for_each(|frame| verifier.at_backend(frame))?;
        clock.skip(ONE_WAY_AGE);
        acks
    };
    // For one-way flows this is the third packet, which confirms them.
    pass(options, &mut harness, &trace, &mut poll, &clock);
    start.wait();
    let before = CounterReading::of(&counters);
    let timed = time(options, &mut harness, &trace, &mut poll, &clock);
    let counted = before.until(&counters);
    if !(options.new_flows || options.flood) {
        counted.expect_no_drops()?;
    }
    timed.samples.iter().try_for_each(|frame| verifier.at_backend(frame))?;
    if mode.is_two_way() {
        check_replies(&mut harness, &mut verifier, &mut poll, &clock)?;
    }
    if verifier.checked == 0 {
        return Err(BenchError::Wrong("nothing left the engine at all".into()));
    }
    Ok(counted.into(timed.report(options, &counters, verifier.checked)))
}

fn worker<P: Port>(
    options: &BenchArgs,
    family: Family,
    ports: [P; 2],
    (subscriber, counters, peers): (Subscriber, Arc<WorkerCounters>, Option<Peers<P::Buffer>>),
) -> Result<Worker<P>, BenchError> {
    Ok(Worker::new(Parts {
        ports: ports.into_iter().map(|port| (port, None)).collect(),
        subscriber,
        limits: scenario::config(options, family).flows,
        counters,
        neighbour_requests: Arc::new(ArrayQueue::new(64)),
        seed: SEED,
        peers,
        observer: (),
    })?)
}

/// The clock of the worker.
struct Clock {
    start: Instant,
    /// Simulated time per poll, in ns.
    poll_ns: Option<u64>,
    polls: std::cell::Cell<u64>,
    /// Its lead over real time, in ns.
    ahead_ns: u64,
}

impl Clock {
    fn real() -> Self {
        Self { start: Instant::now(), poll_ns: None, polls: std::cell::Cell::new(0), ahead_ns: 0 }
    }

    /// With new flows, the time is scaled so that nine tenths of the table fill up during the 30 s of a flow's opening
    /// state and the 9 s until the sweep removes it. In a flood, time stands still.
    fn simulated(options: &BenchArgs) -> Self {
        let poll_ns = if options.flood { 0 } else { 39_000_000_000 * BURST / (u64::from(options.flows) * 9 / 10).max(1) };
        Self { poll_ns: Some(poll_ns), ..Self::real() }
    }

    fn now_ns(&self) -> u64 {
        self.polls.set(self.polls.get() + 1);
        match self.poll_ns {
            Some(poll_ns) => self.polls.get() * poll_ns,
            None => nanos(self.start.elapsed()) + self.ahead_ns,
        }
    }

    /// Advances the time at once. Simulated time does not change.
    fn skip(&mut self, time: Duration) {
        self.ahead_ns += nanos(time);
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Keeps a sample of packets.
#[derive(Default)]
struct Sample {
    /// Number of packets to skip before the next one is kept.
    skip: u32,
    kept: Vec<Vec<u8>>,
}

impl Sample {
    #[inline]
    fn see(&mut self, frame: &[u8]) {
        match self.skip.checked_sub(1) {
            Some(skip) => self.skip = skip,
            None => self.keep(frame),
        }
    }

    #[cold]
    fn keep(&mut self, frame: &[u8]) {
        self.skip = SAMPLE - 1;
        if self.kept.len() < SAMPLES_MAX {
            self.kept.push(frame.to_vec());
        }
    }
}

/// Feeds one burst, polls once, collects all packets.
#[inline]
fn step<H: Harness>(harness: &mut H, trace: &Trace, poll: &mut impl FnMut(u64), clock: &Clock, sample: &mut Sample) {
    let mut left = BURST;
    harness.feed(Side::Uplink, || {
        left = left.checked_sub(1)?;
        Some(trace.next())
    });
    poll(clock.now_ns());
    harness.drain(Side::Cluster, |frame| sample.see(frame));
    harness.drain(Side::Uplink, |_| {});
}

/// Feeds every frame of the trace once.
fn pass<H: Harness>(
    options: &BenchArgs,
    harness: &mut H,
    trace: &Trace,
    poll: &mut impl FnMut(u64),
    clock: &Clock,
) -> Vec<Vec<u8>> {
    let mut sample = Sample::default();
    for _ in 0..u64::from(options.flows).min(trace.len() as u64).div_ceil(BURST) {
        step(harness, trace, poll, clock, &mut sample);
    }
    sample.kept
}

/// Result of the timing.
struct Timing {
    polls: u64,
    elapsed: Duration,
    cycles: u64,
    /// Number of polls by their time in ns; the last bucket has all longer ones.
    histogram: Vec<u32>,
    samples: Vec<Vec<u8>>,
}

const HISTOGRAM_NS: usize = 100_000;

fn time<H: Harness>(options: &BenchArgs, harness: &mut H, trace: &Trace, poll: &mut impl FnMut(u64), clock: &Clock) -> Timing {
    let mut sample = Sample::default();
    let mut histogram = vec![0u32; HISTOGRAM_NS + 1];
    let limit = Duration::from_secs(u64::from(options.seconds));
    let mut polls = 0;
    let ns_per_cycle = ns_per_cycle();
    let start = Instant::now();
    let first = dpdk_sys::cycles();
    let mut last = first;
    while start.elapsed() < limit {
        for _ in 0..POLLS_PER_LOOK {
            step(harness, trace, poll, clock, &mut sample);
            let now = dpdk_sys::cycles();
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)] // bounded by min
            let ns = ((now - last) as f64 * ns_per_cycle) as usize;
            if let Some(bucket) = histogram.get_mut(ns.min(HISTOGRAM_NS)) {
                *bucket += 1;
            }
            last = now;
        }
        polls += u64::from(POLLS_PER_LOOK);
    }
    Timing { polls, elapsed: start.elapsed(), cycles: last - first, histogram, samples: sample.kept }
}

/// TSC rate measured over 20 ms, because it is unknown without DPDK.
#[allow(clippy::cast_precision_loss)]
fn ns_per_cycle() -> f64 {
    let (start, first) = (Instant::now(), dpdk_sys::cycles());
    while start.elapsed() < Duration::from_millis(20) {}
    start.elapsed().as_nanos() as f64 / (dpdk_sys::cycles() - first) as f64
}

impl Timing {
    fn percentile_ns(&self, thousandths: u64) -> u64 {
        let wanted = self.polls * thousandths / 1000;
        let mut passed = 0;
        for (ns, count) in self.histogram.iter().enumerate() {
            passed += u64::from(*count);
            if passed >= wanted {
                return ns as u64;
            }
        }
        HISTOGRAM_NS as u64
    }

    #[allow(clippy::cast_precision_loss)] // counts stay below 2^53
    fn report(&self, options: &BenchArgs, counters: &WorkerCounters, verified: u64) -> Report {
        let packets = self.polls * BURST;
        let seconds = self.elapsed.as_secs_f64();
        Report {
            mode: options.mode.of_services().map_or("none", Mode::as_str),
            family: if options.family == BenchFamily::V4 { "v4" } else { "v6" },
            io: if options.io == BenchIo::Mem { "mem" } else { "ring" },
            workers: options.workers.into(),
            flows: options.flows,
            services: options.services,
            backends: options.backends,
            packets,
            seconds,
            mpps: packets as f64 / seconds / 1e6,
            ns_per_packet: seconds * 1e9 / packets as f64,
            cycles_per_packet: self.cycles as f64 / packets as f64,
            hits: 0,
            misses: 0,
            new_flows: 0,
            drops: 0,
            snat_port_reused_early: counters.snat_port_reused_early.get(),
            p50_ns: self.percentile_ns(500),
            p99_ns: self.percentile_ns(990),
            p999_ns: self.percentile_ns(999),
            verified,
            drop_reasons: Vec::new(),
        }
    }
}

/// Counters at a moment.
struct CounterReading {
    hits: u64,
    misses: u64,
    new_flows: u64,
    drops: Vec<u64>,
}

impl CounterReading {
    fn of(counters: &WorkerCounters) -> Self {
        Self {
            hits: counters.hits.get(),
            misses: counters.misses.get(),
            new_flows: counters.new_flows.get(),
            drops: DropReason::ALL.iter().map(|reason| counters.drops(*reason).get()).collect(),
        }
    }

    /// The difference to an earlier reading.
    fn until(&self, counters: &WorkerCounters) -> Self {
        let now = Self::of(counters);
        Self {
            hits: now.hits - self.hits,
            misses: now.misses - self.misses,
            new_flows: now.new_flows - self.new_flows,
            drops: now.drops.iter().zip(&self.drops).map(|(now, then)| now - then).collect(),
        }
    }

    /// Checks that all packets belong to known flows and were transmitted; otherwise the figures would include packets
    /// that cost nothing.
    fn expect_no_drops(&self) -> Result<(), BenchError> {
        let named: Vec<String> = self.named().into_iter().map(|(reason, n)| format!("{n} as {reason}")).collect();
        if named.is_empty() { Ok(()) } else { Err(BenchError::Dropped(named.join(", "))) }
    }

    /// Drops by reason, if there were any.
    fn named(&self) -> Vec<(String, u64)> {
        let drops = DropReason::ALL.iter().zip(&self.drops).filter(|(_, n)| **n > 0);
        drops.map(|(reason, n)| (reason.as_str().to_owned(), *n)).collect()
    }

    fn into(self, report: Report) -> Report {
        Report {
            hits: self.hits,
            misses: self.misses,
            new_flows: self.new_flows,
            drops: self.drops.iter().sum(),
            drop_reasons: self.named(),
            ..report
        }
    }
}

/// Sends replies of the backends of some flows, and verifies the packets that clients get.
fn check_replies<H: Harness>(
    harness: &mut H,
    verifier: &mut Verifier<'_>,
    poll: &mut impl FnMut(u64),
    clock: &Clock,
) -> Result<(), BenchError> {
    let flows: Vec<_> = verifier.flows.iter().take(REPLIES).map(|(flow, mapping)| (*flow, *mapping)).collect();
    for (flow, mapping) in &flows {
        let frame = Verifier::reply_frame(*flow, mapping);
        let mut once = Some(frame.as_slice());
        harness.feed(Side::Cluster, || once.take());
        poll(clock.now_ns());
        let mut replies = Vec::new();
        harness.drain(Side::Uplink, |frame| replies.push(frame.to_vec()));
        if replies.len() != 1 {
            return Err(BenchError::Wrong(format!("{} packets came back for one reply of flow {flow}", replies.len())));
        }
        replies.iter().try_for_each(|frame| verifier.at_client(frame))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::frame::FRAME_BYTES_V4;
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        bench: BenchArgs,
    }

    /// The packet that the gateway sends for the first flow, in this mode.
    fn sent(options: &BenchArgs, family: Family) -> Vec<u8> {
        let mut harness = Memory::new();
        let WorkerSetup { subscriber, counters, peers, flows, .. } = setups(options, family).pop().unwrap();
        let mut worker = worker(options, family, harness.ports().unwrap(), (subscriber, counters, peers)).unwrap();
        let syns = Trace::new(options, family, TraceKind::Syn, 1, &flows);
        let mut poll = |now_ns| {
            worker.poll(now_ns);
        };
        pass(options, &mut harness, &syns, &mut poll, &Clock::real()).remove(0)
    }

    #[test]
    fn each_bit_of_what_leaves_is_checked() {
        for mode in Mode::ALL {
            for family in [Family::V4, Family::V6] {
                let args = ["bench", "--mode", mode.as_str(), "--flows", "1"];
                let Command { bench: options } = clap::Parser::try_parse_from(args).unwrap();
                let frame = sent(&options, family);
                let mut verifier = Verifier::new(&options, *mode, family);
                verifier.at_backend(&frame).unwrap();
                assert_eq!(verifier.checked, 1);
                let padding = if frame.len() == FRAME_BYTES_V4 { FRAME_BYTES_V4 - 54 } else { 0 };
                for bit in 0..(frame.len() - padding) * 8 {
                    let mut changed = frame.clone();
                    changed[bit / 8] ^= 1 << (bit % 8);
                    let found = verifier.at_backend(&changed);
                    assert!(found.is_err(), "{mode}, {family:?}: bit {} of byte {} changed", bit % 8, bit / 8);
                }
            }
        }
    }
}
