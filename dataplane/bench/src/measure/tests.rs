//! Tests of the measurement: each bit is checked, and a faulty harness is noticed.
//!
//! Not here: whole runs, which `tests/bench.rs` does.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use dataplane::Buffer;
use dataplane::tcp_flags::{FIN, SYN};
use proto::Mode;

use super::*;
use crate::args::{BenchArgs, FrameSize};
use crate::error::BenchError;
use crate::frame::{Content, Piece};
use crate::harness::{Harness, Pace};
use crate::trace::Trace;

fn no_listing(_: ListedWorker) -> FlowPages {
    panic!("no test here lists flows")
}

fn scenario(args: &[&str]) -> Scenario {
    let bench = BenchArgs::parsed(args);
    scenario::validate(&bench).unwrap();
    Scenario::new(&bench)
}

/// A run whose packets are verified by `verifiers`.
struct TestRun {
    scenario: Scenario,
    verifiers: Mutex<Option<Verifiers>>,
    account: Mutex<FinalAccount>,
}

impl TestRun {
    fn new(args: &[&str]) -> Self {
        let scenario = scenario(args);
        let verifiers = Mutex::new(Verifiers::new(&scenario));
        Self { scenario, verifiers, account: Mutex::default() }
    }

    fn bench(&self) -> Bench<'_> {
        let (rate, list) = (CycleRate::measure(), no_listing);
        Bench { scenario: &self.scenario, rate, verifiers: &self.verifiers, account: &self.account, list }
    }

    fn memory(&self) -> Memory {
        Memory::new(256, 1, trace::pattern(&self.scenario.parts[0]), SEED).unwrap()
    }

    /// The only worker with all flows, before it has opened any.
    fn with_session<H: Harness, T>(
        &self,
        harness: &mut H,
        run: impl FnOnce(&mut Session<'_, H, Worker<H::Port>>, &[PartFlows]) -> T,
    ) -> T {
        let bench = self.bench();
        let setup: WorkerSetup<<H::Port as Port>::Buffer> = setups(&self.scenario).pop().unwrap();
        let flows: Vec<_> = self.scenario.parts.iter().map(|part| setup.flows.arriving(part)).collect();
        let worker = bench.worker(harness.ports().unwrap(), (setup.subscriber, setup.counters, setup.peers)).unwrap();
        let clock = WorkerClock::still(bench.rate);
        let mut session = Session { bench: &bench, harness, engine: worker, meeting: &setup.meeting, clock };
        run(&mut session, &flows)
    }
}

/// Opens flows, feeds this many packets of what is measured, and gives the verifiers and all packets that left.
fn sent(args: &[&str], frames: u64) -> (Verifiers, Vec<(Side, Vec<u8>)>) {
    let run = TestRun::new(args);
    let mut packets = Vec::new();
    run.with_session(&mut run.memory(), |session, flows| {
        session.open(flows).unwrap();
        let sides = run.scenario.sides();
        session.harness.begin(Feeding { sides, frames: Some(frames), keep_one_in: 1 });
        while !session.harness.has_ended() {
            session.poll();
        }
        let keep = |side, bytes: &[u8]| {
            packets.push((side, bytes.to_vec()));
            Ok(())
        };
        session.harness.take_kept(keep).unwrap();
    });
    (run.verifiers.into_inner().unwrap().unwrap(), packets)
}

/// The first packet of each side.
fn first_of_sides(packets: Vec<(Side, Vec<u8>)>) -> Vec<(Side, Vec<u8>)> {
    let first = |side| packets.iter().find(|packet| packet.0 == side).cloned();
    Side::BOTH.into_iter().filter_map(first).collect()
}

/// Expects that a packet is right, and wrong with any other bit. The gateway chooses the identification of a fragment of
/// IPv6 whose addresses it rewrites, and no checksum covers it.
fn assert_each_bit_is_checked(verifiers: &mut Verifiers, side: Side, bytes: &[u8], what: &str) {
    let checked = verifiers.checked;
    verifiers.verify(side, Stage::Ack, bytes).unwrap();
    assert_eq!(verifiers.checked, checked + 1);
    let frame = crate::frame::read(bytes).unwrap();
    let is_rewritten = frame.destination.0.is_ipv6() && frame.piece.is_some() && frame.hop.identification != 0x1234;
    let fragment_header_at = 54 + if frame.vlan.is_some() { 4 } else { 0 };
    let is_chosen = |byte| is_rewritten && (fragment_header_at + 4..fragment_header_at + 8).contains(&byte);
    for bit in (0..(frame.data_at() + frame.data_len) * 8).filter(|bit| !is_chosen(bit / 8)) {
        let mut changed = bytes.to_vec();
        changed[bit / 8] ^= 1 << (bit % 8);
        let found = verifiers.verify(side, Stage::Ack, &changed);
        assert!(found.is_err(), "{what}, {side:?}: bit {} of byte {} changed", bit % 8, bit / 8);
    }
}

fn check_each_bit(args: &[&str]) {
    let args = [&["--flows", "12"], args].concat();
    let (mut verifiers, packets) = sent(&args, 2 * BURST as u64);
    let packets = first_of_sides(packets);
    assert_eq!(packets.len(), scenario(&args).sides().len(), "{args:?}");
    for (side, bytes) in packets {
        assert_each_bit_is_checked(&mut verifiers, side, &bytes, &args.join(" "));
    }
}

#[test]
fn each_bit_of_what_leaves_is_checked() {
    for mode in Mode::ALL.iter().map(|mode| mode.as_str()) {
        for protocol in ["tcp", "udp"] {
            let args = ["--mode", mode, "--protocol", protocol];
            check_each_bit(&args);
            check_each_bit(&[&args[..], &["--family", "v6"]].concat());
            check_each_bit(&[&args[..], &["--vlan"]].concat());
            check_each_bit(&[&args[..], &["--vlan", "--family", "v6"]].concat());
            check_each_bit(&[&args[..], &["--no-df", "--size", "200"]].concat());
        }
    }
}

/// The kind of a packet of `--mix`.
fn kind(packet: &crate::frame::FrameFields, is_reply: bool) -> &'static str {
    match (packet.piece, packet.content) {
        (Some(Piece::First), _) => "first fragment",
        (Some(Piece::Later), _) => "later fragment",
        (_, Content::Tcp { flags, .. }) if flags & SYN != 0 => "SYN",
        (_, Content::Tcp { flags, .. }) if flags & FIN != 0 => "FIN",
        _ if is_reply => "reply",
        _ => "packet of a client",
    }
}

/// 64,000 packets are one turn of the order. All of them are right, each kind of each part is among them as often as it
/// should be, and of one packet of each kind and part each bit is checked.
#[test]
fn a_mix_has_its_shares_of_all_kinds_and_each_bit_of_them_is_checked() {
    let args = ["--mix", "--flows", "2000"];
    let (parts, (mut verifiers, packets)) = (scenario(&args).parts, sent(&args, 64_000));
    assert_eq!(packets.len(), 64_000, "some did not leave");
    let (mut counts, mut identifications) = (BTreeMap::new(), BTreeMap::new());
    // All of them first: a changed packet may claim to be the first of a flow.
    for (side, bytes) in &packets {
        verifiers.verify(*side, Stage::Ack, bytes).unwrap();
    }
    for (side, bytes) in packets {
        let frame = crate::frame::read(&bytes).unwrap();
        let flow = crate::traffic::flow_of(frame.content);
        let part = parts.iter().position(|part| part.flows.contains(&flow) || part.short_flows.contains(&flow)).unwrap();
        match frame.piece {
            Some(Piece::First) => drop(identifications.insert(flow, frame.hop.identification)),
            // The first of a datagram at the beginning has left before.
            Some(Piece::Later) => {
                assert!(identifications.get(&flow).is_none_or(|first| *first == frame.hop.identification), "{frame:?}");
            }
            None => {}
        }
        let kind = kind(&frame, frame.source == parts[part].frontend(flow));
        let count: &mut usize = counts.entry((part, kind)).or_default();
        *count += 1;
        if *count == 1 {
            assert_each_bit_is_checked(&mut verifiers, side, &bytes, &format!("{kind} of {:?}", parts[part]));
        }
    }
    for (number, part) in parts.iter().enumerate() {
        let count = |kind| counts.get(&(number, kind)).copied().unwrap_or(0);
        let of_100 = 64_000 / 20 / 100 * part.share as usize;
        let rare = ["SYN", "FIN", "first fragment", "later fragment"].map(count);
        assert_eq!(rare, [of_100, of_100, of_100 / 2, of_100 / 2], "{part:?}");
        let replies = if part.is_two_way() { 97 * of_100 / 2 } else { 0 };
        assert_eq!([count("reply"), count("packet of a client")], [replies, 97 * of_100 - replies], "{part:?}");
    }
}

/// For the time of one and a half lives of a flow: SYNs open flows all the time, as many end, and the others stay.
#[test]
fn as_many_flows_of_a_mix_end_as_begin() {
    let run = TestRun::new(&["--mix", "--flows", "2000"]);
    run.with_session(&mut run.memory(), |session, flows| {
        session.open(flows).unwrap();
        let counters = Arc::clone(session.engine.counters());
        let staying: u64 = flows.iter().map(|flows| flows.staying.len() as u64).sum();
        let live = live_flows(run.scenario.room_for_short_flows());
        let before = CounterReading::of(&counters);
        for _ in 0..3 {
            session.pass(run.scenario.sides(), live * RARE_ONE_IN as u64 / 2, KEPT_ONE_IN, Stage::Ack).unwrap();
            let short = counters.flows.get() - staying;
            assert!((live / 2..=live * 3 / 2).contains(&short), "{short} flows where {live} should be live");
        }
        let mut counted = CounterReading::default();
        counted.add(&before, &CounterReading::of(&counters));
        counted.expect_no_drops().unwrap();
        assert!(counted.new_flows.abs_diff(live * 3 / 2) <= live / 50, "{counted:?}");
        assert_eq!(counted.misses, counted.new_flows, "each packet of another kind is of a known flow");
        assert_eq!(counters.snat_port_reused_early.get(), 0);
    });
}

#[test]
fn sizes_are_those_of_the_frames() {
    for (size, bytes) in [("64", [60, 60]), ("594", [590, 590]), ("1518", [1514, 1514])] {
        let (_, packets) = sent(&["--flows", "12", "--size", size], 2 * BURST as u64);
        let lens: Vec<_> = first_of_sides(packets).iter().map(|(_, bytes)| bytes.len().max(60)).collect();
        assert_eq!(lens, bytes, "{size}");
    }
    let args = ["--flows", "12", "--size", "imix", "--family", "v6", "--protocol", "udp"];
    assert_eq!(scenario(&args).options.size, FrameSize::Imix);
    sent(&args, 2 * BURST as u64);
}

/// A harness whose ports lose or change a packet in every hundredth burst, once the fault is on.
struct Faulty {
    harness: Memory,
    fault: Fault,
    is_on: Rc<Cell<bool>>,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    LosesReceived,
    LosesTransmitted,
    ChangesAByte,
}

struct FaultyPort<P> {
    port: P,
    fault: Fault,
    is_on: Rc<Cell<bool>>,
    received: u32,
    sent: u32,
}

impl<P> FaultyPort<P> {
    /// Whether it is the turn of this burst.
    fn is_turn(&self, burst: u32) -> bool {
        self.is_on.get() && burst.is_multiple_of(100)
    }
}

impl<P: Port> Port for FaultyPort<P> {
    type Buffer = P::Buffer;

    fn receive(&mut self, burst: &mut Burst<P::Buffer>) {
        self.port.receive(burst);
        self.received += u32::from(!burst.is_empty());
        if self.is_turn(self.received) && matches!(self.fault, Fault::LosesReceived) {
            burst.pop();
        }
    }

    fn transmit(&mut self, burst: &mut Burst<P::Buffer>) {
        self.sent += u32::from(!burst.is_empty());
        if self.is_turn(self.sent) {
            match self.fault {
                Fault::LosesReceived => {}
                Fault::LosesTransmitted => drop(burst.pop()),
                Fault::ChangesAByte => {
                    for buffer in burst.iter_mut() {
                        buffer.bytes_mut()[40] ^= 1;
                    }
                }
            }
        }
        self.port.transmit(burst);
    }

    fn allocate(&mut self) -> Option<P::Buffer> {
        self.port.allocate()
    }

    fn release(&mut self, burst: &mut Burst<P::Buffer>) {
        self.port.release(burst);
    }
}

impl Harness for Faulty {
    type Port = FaultyPort<<Memory as Harness>::Port>;
    const WAITS: bool = false;

    fn ports(&mut self) -> Option<[Self::Port; 2]> {
        let faulty = |port| FaultyPort { port, fault: self.fault, is_on: Rc::clone(&self.is_on), received: 0, sent: 0 };
        Some(self.harness.ports()?.map(faulty))
    }

    fn give_back(&mut self, _: [Self::Port; 2]) {}

    fn load(&mut self, side: Side, trace: Trace) {
        self.harness.load(side, trace);
    }

    fn begin(&mut self, feeding: Feeding) {
        self.harness.begin(feeding);
    }

    fn turn(&mut self, now: u64) {
        self.harness.turn(now);
    }

    fn end(&mut self) {
        self.harness.end();
    }

    fn has_ended(&mut self) -> bool {
        self.harness.has_ended()
    }

    fn is_full(&self) -> bool {
        self.harness.is_full()
    }

    fn take_kept(&mut self, see: impl FnMut(Side, &[u8]) -> Result<(), BenchError>) -> Result<(), BenchError> {
        self.harness.take_kept(see)
    }

    fn traffic(&self) -> Traffic {
        self.harness.traffic()
    }
}

/// Opens flows, forwards packets through a faulty port, and closes the account.
fn with(fault: Fault, args: &[&str]) -> Result<(), BenchError> {
    let run = TestRun::new(args);
    let is_on = Rc::new(Cell::new(false));
    let mut harness = Faulty { harness: run.memory(), fault, is_on: Rc::clone(&is_on) };
    run.with_session(&mut harness, |session, flows| {
        session.open(flows)?;
        is_on.set(true);
        session.pass(run.scenario.sides(), 30_000, KEPT_ONE_IN, Stage::Ack)?;
        let mut account = FinalAccount::default();
        account.add(session.engine.counters(), session.harness.traffic())?;
        account.close()
    })
}

#[test]
fn a_run_with_a_faulty_port_fails() {
    for args in [&["--flows", "2000"][..], &["--mix", "--flows", "2000"]] {
        for fault in [Fault::LosesReceived, Fault::LosesTransmitted] {
            let error = with(fault, args).unwrap_err();
            assert!(matches!(error, BenchError::Account(_)), "{args:?}, {fault:?}: {error}");
        }
        let error = with(Fault::ChangesAByte, args).unwrap_err();
        assert!(matches!(error, BenchError::Wrong(_)), "{args:?}: {error}");
    }
}

/// The time is given to the harness, so that nothing here depends on the machine: a packet arrives every 1,000 cycles on
/// each side, and there is a poll every 250.
#[test]
fn a_packet_that_arrives_alone_leaves_in_the_poll_that_receives_it() {
    for mode in Mode::ALL.iter().map(|mode| mode.as_str()) {
        let run = TestRun::new(&["--flows", "64", "--mode", mode]);
        run.with_session(&mut run.memory(), |session, flows| {
            session.open(flows).unwrap();
            assert_leaves_in_its_poll(session, run.scenario.sides(), mode);
        });
    }
}

fn assert_leaves_in_its_poll<E: Polled>(session: &mut Session<'_, Memory, E>, sides: &'static [Side], mode: &str) {
    session.harness.pace(Some(Pace { from: 10_000, cycles: 1000, packets: sides.len() as u64 }));
    session.harness.begin(Feeding { sides, frames: None, keep_one_in: KEPT_ONE_IN });
    let before = session.harness.traffic();
    let mut polled = |now: u64| {
        session.harness.turn(now);
        session.engine.poll(session.clock.at(dpdk_sys::cycles())); // flows live long enough
        let Traffic { fed, transmitted, .. } = session.harness.traffic().since(before);
        (fed, transmitted)
    };
    for poll in 0..400 {
        let arrived = (poll / 4 + 1) * sides.len() as u64;
        assert_eq!(polled(10_000 + poll * 250), (arrived, arrived), "{mode}: poll {poll}");
    }
    // A poll that comes late finds full bursts; what no longer fits into the queues is missed, and nothing else.
    let (late, each) = (5_000, sides.len() as u64);
    let arrived = (100 + BURST as u64) * each;
    assert_eq!(polled(10_000 + (late - 1) * 1000), (arrived, arrived), "{mode}");
    let found = session.harness.take_latencies();
    assert_eq!((found.received, found.times.total(), found.missed), (arrived, arrived, (late - 100 - 1024) * each), "{mode}");
    assert_eq!(found.bursts, 101 * each, "{mode}");
}

#[test]
fn workers_that_hand_over_feed_equally_many_packets_of_all_flows() {
    let scenario = scenario(&["--workers", "2", "--core", "0", "--handover", "--flows", "3000"]);
    let setups = setups::<dataplane::MemoryBuffer>(&scenario);
    let of_workers: Vec<_> = setups.iter().map(|setup| setup.flows.arriving(&scenario.parts[0]).staying).collect();
    assert_eq!(of_workers[0].len(), of_workers[1].len());
    let mut all = of_workers.concat();
    assert!(all.len() > 3000, "one has more flows than the other");
    all.sort_unstable();
    all.dedup();
    assert!(all.into_iter().eq(0..3000));
}
