//! The measurement: opens flows, times polls, verifies packets, closes the account.
//!
//! Time is measured in slices. Between them the packets that were kept are verified, which no slice includes; the first
//! polls of a slice do not count, so that caches hold again what they held before.
//!
//! **Invariant:** a run fails if a packet is wrong or not accounted for.
//!
//! Not here: harnesses, and what packets say.

mod flow_pages;
mod latency;
mod listing;
mod memory_lines;
#[cfg(test)]
mod tests;
mod traces;
mod worker_flows;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use dataplane::forward::Mailbox;
use dataplane::{BURST, Burst, Parts, Peers, Port, Subscriber, Worker, WorkerCounters};
use proto::limits::SNAT_PORT_REST;

use crate::account::{CounterReading, FinalAccount, expect};
use crate::args::{BenchIo, BenchState};
use crate::error::BenchError;
use crate::harness::{Feeding, Harness, KEPT_ONE_IN, Memory, Rings, Traffic};
use crate::report::{Measured, Report};
use crate::scenario::{self, Part, RARE_ONE_IN, SEED, Scenario, Side};
use crate::timing::{CycleRate, WorkerClock, live_flows};
use crate::trace;
use crate::traffic::Stage;
use crate::verify::Verifiers;
pub use flow_pages::{FlowPages, ListFlows, ListedWorker};
use worker_flows::{Meeting, PartFlows, WorkerSetup, setups};

/// Longest slice.
const SLICE: Duration = Duration::from_millis(250);
/// Polls at the start of a slice that do not count.
const POLLS_TO_WARM: u32 = 256;
/// Polls between two looks at the time.
const POLLS_PER_LOOK: u32 = 256;
/// Polls after the last worker has ended, for packets that were handed over.
const POLLS_TO_DRAIN: u32 = 64;
/// Longer than the second after which a packet confirms a one-way flow (FORWARDING 2).
const ONE_WAY_AGE: Duration = Duration::from_secs(2);
/// Buffers of each worker with `--handover`: so few that the queue between two workers, of 128 elements, never is full.
const BUFFERS_HANDED_OVER: u32 = 1024;
/// Packets of `--mix` before the measurement, for each flow that stays: with a million flows packets took 300 ns at first,
/// and 175 ns from the fourth million on.
const MIX_TURNS_TO_WARM: u64 = 4;
/// Longer than an unconfirmed flow lives.
const OPENING: Duration = Duration::from_secs(31);
/// Polls after which flows should have ended: a sweep visits 128 of at most 2^30 in each.
const POLLS_TO_END: u32 = 1 << 24;
/// Part of the measured time in which the floor is measured, before and after.
const FLOOR_PART: u32 = 4;

pub(super) fn measure(scenario: &Scenario, list: ListFlows) -> Result<Report, BenchError> {
    let options = &scenario.options;
    let rate = CycleRate::measure();
    let seed = |worker: usize| SEED.wrapping_add(worker as u64);
    let verifiers = Mutex::new(Verifiers::new(scenario));
    let account = Mutex::new(FinalAccount::default());
    let bench = Bench { scenario, rate, verifiers: &verifiers, account: &account, list };
    let measured = match options.io {
        BenchIo::Ring => {
            let Some(setup) = setups(scenario).pop() else { return Err(BenchError::Core(options.core)) };
            bench.run(Rings::new(options.core, scenario::second_core(options), seed(0))?, setup)?
        }
        BenchIo::Mem => {
            let threads = std::thread::scope(|scope| {
                let start = |(worker, setup): (usize, _)| {
                    let bench = &bench;
                    scope.spawn(move || {
                        let core = options.core + worker;
                        if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
                            return Err(BenchError::Core(core));
                        }
                        let Some(part) = scenario.parts.first() else { return Err(BenchError::Core(core)) };
                        let pattern = trace::pattern(part);
                        let buffers = if options.handover { options.buffers.min(BUFFERS_HANDED_OVER) } else { options.buffers };
                        let (buffers, shares) = (buffers as usize, options.workers.into());
                        bench.run(Memory::new(buffers, shares, pattern, seed(worker))?, setup)
                    })
                };
                let threads: Vec<_> = setups(scenario).into_iter().enumerate().map(start).collect();
                let joined =
                    threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
                joined.collect::<Vec<_>>()
            });
            let is_cause =
                |result: &Result<Measured, BenchError>| matches!(result, Err(error) if !matches!(error, BenchError::OtherWorker));
            let (causes, others): (Vec<_>, Vec<_>) = threads.into_iter().partition(is_cause);
            let all = causes.into_iter().chain(others).collect::<Result<Vec<_>, _>>()?;
            let Some(sum) = all.into_iter().reduce(|sum, next| sum.and(&next)) else {
                return Err(BenchError::Core(options.core));
            };
            sum
        }
    };
    let account = account.into_inner().unwrap_or_else(PoisonError::into_inner);
    account.close()?;
    if (options.new_flows || options.mix) && measured.reused_early > 0 {
        return Err(BenchError::ReusedEarly(measured.reused_early));
    }
    let verified = verifiers.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(0, |verifiers| verifiers.checked);
    if verified == 0 && scenario.has_services() {
        return Err(BenchError::Wrong("nothing left the engine at all".into()));
    }
    let report = Report::new(scenario, &measured, &account, verified);
    let is_harness_alone = !scenario.has_services();
    Ok(Report { memory_line: is_harness_alone.then(|| memory_lines::measure_lines(options.core)).transpose()?, ..report })
}

/// A run, as all its workers see it.
struct Bench<'o> {
    scenario: &'o Scenario,
    rate: CycleRate,
    /// None in mode `none`.
    verifiers: &'o Mutex<Option<Verifiers>>,
    account: &'o Mutex<FinalAccount>,
    list: ListFlows,
}

impl Bench<'_> {
    /// Measures one worker.
    fn run<H: Harness>(&self, mut harness: H, setup: WorkerSetup<<H::Port as Port>::Buffer>) -> Result<Measured, BenchError> {
        let options = &self.scenario.options;
        let flows: Vec<PartFlows> = self.scenario.parts.iter().map(|part| setup.flows.arriving(part)).collect();
        if flows.iter().any(|flows| flows.first().is_empty()) {
            return Err(BenchError::Options("a worker has no flows: take more --flows"));
        }
        for side in Side::BOTH {
            if let Some(trace) = self.clients_trace(&flows, PartFlows::first, Stage::Ack, 1)? {
                harness.load(side, trace);
            }
        }
        let before = self.floor(&mut harness, &setup.meeting)?;
        if !self.scenario.has_services() {
            return Ok(before);
        }
        let seen = harness.traffic();
        let WorkerSetup { subscriber, counters, peers, meeting, snapshots, .. } = setup;
        let Some(ports) = harness.ports() else { return Err(BenchError::Dpdk("no ports".into())) };
        let mailbox = Arc::new(Mailbox::new(None));
        let worker = self.worker(ports, (subscriber, counters, peers))?.answering(Arc::clone(&mailbox));
        let clock = WorkerClock::still(self.rate);
        let mut session = Session { bench: self, harness: &mut harness, engine: worker, meeting: &meeting, clock };
        let stage = session.open(&flows)?;
        let counters = Arc::clone(session.engine.counters());
        let mut measured = match options.snat_load {
            Some(_) => session.time_batches(&counters, &flows)?,
            None => session.time(Duration::from_secs(options.seconds.into()), stage)?,
        };
        if options.latency {
            measured.latency = session.latency(stage)?;
        }
        if options.listing {
            measured.listing = Some(session.listing(mailbox, snapshots, stage)?);
        }
        let traffic = harness.traffic().since(seen);
        self.account.lock().unwrap_or_else(PoisonError::into_inner).add(&counters, traffic)?;
        if options.workers == 1 {
            let Measured { counted, times, .. } = &measured;
            expect("packets measured", times.packets, "hits and misses among them", counted.hits + counted.misses)?;
        }
        if !self.scenario.comes_and_goes() {
            measured.counted.expect_no_drops()?;
        }
        let after = self.floor(&mut harness, &meeting)?;
        let reused_early = counters.snat_port_reused_early.get();
        // With `--mix` the harness has more sources of frames once short flows have begun, so the floor is that of after.
        let is_after = options.mix && after.floor_ns.is_finite();
        let floor_ns = if is_after { after.floor_ns } else { before.floor_ns.min(after.floor_ns) };
        Ok(Measured { floor_ns, reused_early, ..measured })
    }

    fn worker<P: Port>(
        &self,
        ports: [P; 2],
        (subscriber, counters, peers): (Subscriber, Arc<WorkerCounters>, Option<Peers<P::Buffer>>),
    ) -> Result<Worker<P>, BenchError> {
        Ok(Worker::new(Parts {
            ports: ports.into_iter().map(|port| (port, None)).collect(),
            subscriber,
            limits: scenario::config(self.scenario).flows,
            counters,
            neighbour_requests: Arc::new(ArrayQueue::new(64)),
            seed: SEED,
            peers,
            observer: (),
        })?)
    }

    /// Measures a worker that only swaps Ethernet addresses: the harness alone. Infinite time if the gateway has the
    /// ports.
    fn floor<H: Harness>(&self, harness: &mut H, meeting: &Meeting) -> Result<Measured, BenchError> {
        let Some(ports) = harness.ports() else { return Ok(Measured::none(self.rate)) };
        let before = harness.traffic();
        let clock = WorkerClock::still(self.rate);
        let engine = Swap { ports, received: 0 };
        let mut session = Session { bench: self, harness, engine, meeting, clock };
        let all = Duration::from_secs(self.scenario.options.seconds.into());
        let wanted = if self.scenario.has_services() { all / FLOOR_PART } else { all };
        let measured = session.time(wanted, None)?;
        let Session { engine, harness, .. } = session;
        harness.give_back(engine.ports);
        let Traffic { fed, transmitted, .. } = harness.traffic().since(before);
        expect("packets fed", fed, "that left", transmitted)?;
        Ok(Measured { floor_ns: measured.times.ns_per_packet(), ..measured })
    }

    fn verifiers(&self) -> MutexGuard<'_, Option<Verifiers>> {
        self.verifiers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is polled: the worker of a gateway, or the harness alone.
trait Polled {
    /// Polls, at this time. Returns the number of packets handled.
    fn poll(&mut self, now_ns: u64) -> usize;

    /// Its counters.
    fn reading(&self) -> CounterReading;
}

impl<P: Port> Polled for Worker<P> {
    #[inline]
    fn poll(&mut self, now_ns: u64) -> usize {
        self.poll(now_ns)
    }

    fn reading(&self) -> CounterReading {
        CounterReading::of(self.counters())
    }
}

/// Sends what arrives at one port by the other, with swapped Ethernet addresses.
struct Swap<P> {
    ports: [P; 2],
    received: u64,
}

impl<P: Port> Polled for Swap<P> {
    #[inline(never)]
    fn poll(&mut self, _: u64) -> usize {
        let [uplink, cluster] = &mut self.ports;
        let handled = swap(uplink, cluster) + swap(cluster, uplink);
        self.received += handled as u64;
        handled
    }

    fn reading(&self) -> CounterReading {
        CounterReading::received(self.received)
    }
}

#[inline(always)]
fn swap<P: Port>(from: &mut P, to: &mut P) -> usize {
    let mut burst = Burst::new();
    from.receive(&mut burst);
    let count = burst.len();
    if count > 0 {
        for buffer in &mut burst {
            if let Some(head) = dataplane::Buffer::bytes_mut(buffer).first_chunk_mut() {
                swap_addresses(head);
            }
        }
        to.transmit(&mut burst);
        if !burst.is_empty() {
            to.release(&mut burst);
        }
    }
    count
}

/// The first 12 bytes of a frame with source and destination swapped, which take eight bytes and four.
#[inline(always)]
fn swap_addresses(head: &mut [u8; 12]) {
    let (start, end) =
        (u64::from_le_bytes(*head.first_chunk().unwrap_or(&[0; 8])), u64::from_le_bytes(*head.last_chunk().unwrap_or(&[0; 8])));
    // The source is the upper 48 bits of the end, the destination the lower ones of the start.
    let swapped = end >> 16 | start << 48;
    head[..8].copy_from_slice(&swapped.to_le_bytes());
    head[8..].copy_from_slice(&start.to_le_bytes()[2..6]);
}

/// One worker at its harness.
struct Session<'a, H, E> {
    bench: &'a Bench<'a>,
    harness: &'a mut H,
    engine: E,
    meeting: &'a Meeting,
    clock: WorkerClock,
}

impl<H: Harness, E: Polled> Session<'_, H, E> {
    /// Opens the flows, and loads what is to be measured. Returns the stage of its packets.
    fn open(&mut self, flows: &[PartFlows]) -> Result<Option<Stage>, BenchError> {
        let scenario = self.bench.scenario;
        let options = &scenario.options;
        let count = |of_part: fn(&PartFlows) -> &[u32]| flows.iter().map(|flows| of_part(flows).len() as u64).sum::<u64>();
        if scenario.comes_and_goes() && options.snat_load.is_none() {
            let syns = self.bench.clients_trace(flows, |flows| &flows.short, Stage::Syn, 2)?;
            self.load(Side::Uplink, syns);
            // Until as many flows end as begin.
            if options.new_flows {
                self.clock.simulate(scenario.room_for_short_flows() / u32::from(options.workers), 1);
            }
            self.pass(&[Side::Uplink], count(|flows| &flows.short) * 2, KEPT_ONE_IN, Stage::Syn)?;
            return Ok(Some(Stage::Syn));
        }
        let staying = count(|flows| &flows.staying);
        self.open_staying(flows, staying)?;
        if options.mix {
            self.fill_with_short(flows)?;
            self.pass(scenario.sides(), staying * MIX_TURNS_TO_WARM, KEPT_ONE_IN, Stage::Ack)?;
        }
        Ok(Some(Stage::Ack))
    }

    /// Opens the flows that stay, of all parts.
    fn open_staying(&mut self, flows: &[PartFlows], count: u64) -> Result<(), BenchError> {
        let (bench, scenario) = (self.bench, self.bench.scenario);
        let options = &scenario.options;
        let clients = |stage, seed| bench.clients_trace(flows, |flows| &flows.staying, stage, seed);
        let [uplink, cluster]: [&'static [Side]; 2] = match scenario.feeds(Side::Cluster) {
            Side::Uplink => [&[Side::Uplink]; 2],
            Side::Cluster => [&[Side::Uplink], &[Side::Cluster]],
        };
        self.load(Side::Uplink, clients(Stage::Syn, 2)?);
        self.pass(uplink, count, 1, Stage::Syn)?;
        if let Some(verifiers) = bench.verifiers().as_ref() {
            verifiers.check_flows()?;
        }
        let is_established = options.state == BenchState::Established;
        let of_two_ways = scenario.parts.iter().zip(flows).filter(|(part, _)| part.is_two_way());
        let replies: u64 = of_two_ways.map(|(_, flows)| flows.staying.len() as u64).sum();
        if is_established && replies > 0 {
            let answers = bench.backends_trace(flows, Stage::SynAck, 3)?;
            self.load(Side::Cluster, answers);
            self.pass(cluster, replies, KEPT_ONE_IN, Stage::SynAck)?;
        }
        self.load(Side::Uplink, clients(Stage::Ack, 1)?);
        self.pass(uplink, count, KEPT_ONE_IN, Stage::Ack)?;
        if is_established && !scenario.parts.iter().all(Part::is_two_way) {
            self.clock.skip(ONE_WAY_AGE);
            self.pass(uplink, count, KEPT_ONE_IN, Stage::Ack)?;
        }
        self.load_measured(flows)?;
        if is_established && !options.mix {
            self.pass(scenario.sides(), count, KEPT_ONE_IN, Stage::Ack)?;
            // In state opening time stands still: flows would end, or be confirmed.
            if options.snat_load.is_none() {
                self.clock.run();
            }
        }
        Ok(())
    }

    /// Opens as many of the flows that come and go as are live later, and simulates the time from then on, so that as many
    /// end as begin.
    fn fill_with_short(&mut self, flows: &[PartFlows]) -> Result<(), BenchError> {
        let room = self.bench.scenario.room_for_short_flows();
        let syns = self.bench.clients_trace(flows, |flows| flows.short_halves().1, Stage::Syn, 2)?;
        self.load(Side::Uplink, syns);
        self.clock.simulate(room, 1);
        self.pass(&[Side::Uplink], live_flows(room), KEPT_ONE_IN, Stage::Ack)?;
        self.clock.simulate(room, RARE_ONE_IN as u64);
        self.load_measured(flows)
    }

    /// Measures new flows while others hold most SNAT ports. There is room for few, so they come in batches. Between two
    /// batches, in time that does not count, the flows of the first end and their ports rest.
    fn time_batches(&mut self, counters: &WorkerCounters, flows: &[PartFlows]) -> Result<Measured, BenchError> {
        let options = &self.bench.scenario.options;
        let batch = self.bench.scenario.batch();
        let syns = self.bench.clients_trace(flows, |flows| &flows.short, Stage::Syn, 5)?;
        self.load(Side::Uplink, syns);
        let mut measured = Measured::none(self.bench.rate);
        let wanted = Duration::from_secs(options.seconds.into());
        while measured.times.elapsed() < wanted {
            self.harness.begin(Feeding { sides: &[Side::Uplink], frames: Some(batch), keep_one_in: KEPT_ONE_IN });
            (0..batch / BURST as u64 / 8).for_each(|_| self.poll()); // caches hold again what they held before
            let before = self.engine.reading();
            while !self.harness.has_ended() {
                self.timed_poll(&mut measured, dpdk_sys::cycles());
            }
            measured.count(&before, &self.engine.reading());
            self.rest(Some(Stage::Syn))?;
            self.let_end(counters)?;
        }
        Ok(measured)
    }

    /// Lets time pass until only confirmed flows are left, and the ports of the others have rested.
    fn let_end(&mut self, counters: &WorkerCounters) -> Result<(), BenchError> {
        let live = u64::from(self.bench.scenario.options.flows);
        self.clock.skip(OPENING);
        for poll in 0..POLLS_TO_END {
            if counters.flows.get() <= live {
                self.clock.skip(SNAT_PORT_REST + Duration::from_secs(1));
                self.poll();
                return Ok(());
            }
            if poll % POLLS_PER_LOOK == 0 {
                self.clock.skip(Duration::from_secs(1));
            }
            self.poll();
        }
        expect("flows after the new ones should have ended", counters.flows.get(), "those that live", live)
    }

    /// A poll that counts; it begins at this cycle. Returns when it ended.
    #[inline(always)]
    fn timed_poll(&mut self, measured: &mut Measured, begin: u64) -> u64 {
        self.harness.turn(begin);
        let handled = self.engine.poll(self.clock.at(begin));
        let end = dpdk_sys::cycles();
        self.clock.handled(handled);
        // Without packets a worker waits for the generator, or for the worker that has its buffers.
        let waits = handled == 0 && (H::WAITS || self.bench.scenario.options.handover);
        if !waits {
            measured.times.count(end - begin);
        }
        end
    }

    /// Feeds a number of frames and verifies packets that leave, one in `keep_one_in`.
    fn pass(&mut self, sides: &'static [Side], frames: u64, keep_one_in: u32, stage: Stage) -> Result<(), BenchError> {
        let until = self.harness.traffic().fed + frames;
        loop {
            let left = until.saturating_sub(self.harness.traffic().fed);
            if left == 0 {
                return self.rest(Some(stage));
            }
            self.harness.begin(Feeding { sides, frames: Some(left), keep_one_in });
            while !self.harness.has_ended() {
                self.poll();
                if self.harness.is_full() {
                    self.harness.end();
                }
                if self.meeting.has_failed() {
                    return Err(BenchError::OtherWorker);
                }
            }
            self.verify_kept(Some(stage))?;
        }
    }

    #[inline]
    fn poll(&mut self) {
        let begin = dpdk_sys::cycles();
        self.harness.turn(begin);
        let handled = self.engine.poll(self.clock.at(begin));
        self.clock.handled(handled);
    }

    /// Waits until no worker feeds and none holds a packet of another, and verifies what was kept.
    fn rest(&mut self, stage: Option<Stage>) -> Result<(), BenchError> {
        let meeting = self.meeting;
        meeting.meet(|| self.poll());
        (0..POLLS_TO_DRAIN).for_each(|_| self.poll());
        meeting.meet(|| self.poll());
        self.verify_kept(stage)?;
        meeting.meet(|| ());
        if meeting.has_failed() { Err(BenchError::OtherWorker) } else { Ok(()) }
    }

    fn verify_kept(&mut self, stage: Option<Stage>) -> Result<(), BenchError> {
        let mut guard = self.bench.verifiers();
        self.harness.take_kept(|side, bytes| match (guard.as_mut(), stage) {
            (Some(verifiers), Some(stage)) => verifiers.verify(side, stage, bytes),
            _ => Ok(()),
        })
    }

    /// Measures for a time.
    fn time(&mut self, wanted: Duration, stage: Option<Stage>) -> Result<Measured, BenchError> {
        let mut measured = Measured::none(self.bench.rate);
        loop {
            self.slice(&mut measured);
            if measured.times.elapsed() >= wanted {
                self.meeting.finish();
            }
            self.rest(stage)?;
            let is_finished = self.meeting.is_finished();
            self.meeting.meet(|| ());
            self.meeting.resume();
            self.meeting.meet(|| ());
            if is_finished {
                return Ok(measured);
            }
        }
    }

    /// Measures for [`SLICE`], or until so many packets are kept that they should be verified.
    fn slice(&mut self, measured: &mut Measured) {
        let sides = self.bench.scenario.sides();
        self.harness.begin(Feeding { sides, frames: None, keep_one_in: KEPT_ONE_IN });
        (0..POLLS_TO_WARM).for_each(|_| self.poll());
        let before = self.engine.reading();
        let start = measured.times.elapsed();
        let mut last = dpdk_sys::cycles();
        while measured.times.elapsed() - start < SLICE && !self.harness.is_full() && !self.meeting.is_over() {
            for _ in 0..POLLS_PER_LOOK {
                last = self.timed_poll(measured, last);
            }
        }
        self.meeting.end();
        measured.count(&before, &self.engine.reading());
        self.harness.end();
        while !self.harness.has_ended() {
            self.poll();
        }
    }
}
