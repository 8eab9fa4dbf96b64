//! Tests of the measurement: each bit is checked, and a faulty harness is noticed.
//!
//! Not here: whole runs, which `tests/bench.rs` does.

use dataplane::Buffer;

use super::*;
use crate::args::FrameSize;
use crate::error::BenchError;
use crate::harness::{Harness, Pace};

fn no_listing(_: ListedWorker) -> FlowPages {
    panic!("no test here lists flows")
}

fn options(args: &[&str]) -> BenchArgs {
    let bench = BenchArgs::parsed(args);
    scenario::validate(&bench).unwrap();
    bench
}

fn memory(options: &BenchArgs, family: Family) -> Memory {
    Memory::new(256, 1, trace::pattern(options, family), SEED).unwrap()
}

/// Opens flows and gives the verifier and one packet of each side that is measured.
fn sent<A: Address>(options: &BenchArgs) -> (Verifier, Vec<(Side, Vec<u8>)>) {
    let mode = options.mode.of_services().unwrap();
    let verifier = Mutex::new(Some(Verifier::new(options, mode, A::FAMILY, options.flows)));
    let account = Mutex::new(FinalAccount::default());
    let bench = Bench {
        options,
        family: A::FAMILY,
        rate: CycleRate::measure(),
        verifier: &verifier,
        account: &account,
        list: no_listing,
    };
    let mut harness = memory(options, A::FAMILY);
    let setup = setups(options, A::FAMILY).pop().unwrap();
    let flows: Vec<u32> = (0..options.flows).collect();
    let worker = bench.worker(harness.ports().unwrap(), (setup.subscriber, setup.counters, setup.peers)).unwrap();
    let clock = WorkerClock::still(bench.rate);
    let mut session = Session { bench: &bench, harness: &mut harness, engine: worker, meeting: &setup.meeting, clock };
    session.open(mode, &flows).unwrap();
    let sides = traffic::sides(options);
    session.harness.begin(Feeding { sides, frames: Some(2 * BURST as u64), keep_one_in: 1 });
    while !session.harness.has_ended() {
        session.poll();
    }
    let mut packets = Vec::new();
    let mut keep = |side, bytes: &[u8]| {
        if packets.iter().all(|(other, _)| *other != side) {
            packets.push((side, bytes.to_vec()));
        }
        Ok(())
    };
    session.harness.take_kept(&mut keep).unwrap();
    (verifier.into_inner().unwrap().unwrap(), packets)
}

fn check_each_bit<A: Address>(args: &[&str]) {
    let options = options(&[&["--flows", "12"], args].concat());
    let (mut verifier, packets) = sent::<A>(&options);
    assert_eq!(packets.len(), traffic::sides(&options).len(), "{args:?}");
    for (side, bytes) in packets {
        let checked = verifier.checked;
        verifier.verify(side, Stage::Ack, &bytes).unwrap();
        assert_eq!(verifier.checked, checked + 1);
        let frame = crate::frame::read(&bytes).unwrap();
        for bit in 0..(frame.data_at() + frame.data_len) * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let found = verifier.verify(side, Stage::Ack, &changed);
            assert!(found.is_err(), "{args:?}, {side:?}: bit {} of byte {} changed", bit % 8, bit / 8);
        }
    }
}

#[test]
fn each_bit_of_what_leaves_is_checked() {
    for mode in Mode::ALL.iter().map(|mode| mode.as_str()) {
        for protocol in ["tcp", "udp"] {
            let args = ["--mode", mode, "--protocol", protocol];
            check_each_bit::<u32>(&args);
            check_each_bit::<u128>(&[&args[..], &["--family", "v6"]].concat());
            check_each_bit::<u32>(&[&args[..], &["--vlan"]].concat());
            check_each_bit::<u128>(&[&args[..], &["--vlan", "--family", "v6"]].concat());
            check_each_bit::<u32>(&[&args[..], &["--no-df", "--size", "200"]].concat());
        }
    }
}

#[test]
fn sizes_are_those_of_the_frames() {
    for (size, bytes) in [("64", [60, 60]), ("594", [590, 590]), ("1518", [1514, 1514])] {
        let options = options(&["--flows", "12", "--size", size]);
        let (_, packets) = sent::<u32>(&options);
        let lens: Vec<_> = packets.iter().map(|(_, bytes)| bytes.len().max(60)).collect();
        assert_eq!(lens, bytes, "{size}");
    }
    let options = options(&["--flows", "12", "--size", "imix", "--family", "v6", "--protocol", "udp"]);
    assert_eq!(options.size, FrameSize::Imix);
    sent::<u128>(&options);
}

/// A harness one of whose ports loses a packet in a hundred bursts, or sends one twice.
struct Faulty {
    harness: Memory,
    fault: Fault,
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
    bursts: u32,
}

impl<P: Port> Port for FaultyPort<P> {
    type Buffer = P::Buffer;

    fn receive(&mut self, burst: &mut Burst<P::Buffer>) {
        self.port.receive(burst);
        self.bursts += u32::from(!burst.is_empty());
        if self.bursts % 100 == 99 && matches!(self.fault, Fault::LosesReceived) {
            burst.pop();
        }
    }

    fn transmit(&mut self, burst: &mut Burst<P::Buffer>) {
        self.bursts += 1;
        if self.bursts % 100 == 99 {
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
        let fault = self.fault;
        Some(self.harness.ports()?.map(|port| FaultyPort { port, fault, bursts: 0 }))
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

/// Opens flows through a faulty port, measures nothing, and closes the account.
fn with(fault: Fault) -> Result<(), BenchError> {
    let options = options(&["--flows", "12800"]);
    let verifier = Mutex::new(Some(Verifier::new(&options, Mode::Nat, Family::V4, options.flows)));
    let account = Mutex::new(FinalAccount::default());
    let bench = Bench {
        options: &options,
        family: Family::V4,
        rate: CycleRate::measure(),
        verifier: &verifier,
        account: &account,
        list: no_listing,
    };
    let mut harness = Faulty { harness: memory(&options, Family::V4), fault };
    let setup = setups(&options, Family::V4).pop().unwrap();
    let worker = bench.worker(harness.ports().unwrap(), (setup.subscriber, setup.counters, setup.peers)).unwrap();
    let clock = WorkerClock::still(bench.rate);
    let mut session = Session { bench: &bench, harness: &mut harness, engine: worker, meeting: &setup.meeting, clock };
    let flows: Vec<u32> = (0..options.flows).collect();
    session.harness.load(Side::Uplink, bench.clients_trace(&flows, Stage::Syn, 1).unwrap());
    session.pass(&[Side::Uplink], flows.len() as u64, KEPT_ONE_IN, Stage::Syn)?;
    let counters = Arc::clone(session.engine.counters());
    let mut account = FinalAccount::default();
    account.add(&counters, session.harness.traffic())?;
    account.close()
}

#[test]
fn a_run_with_a_faulty_port_fails() {
    for fault in [Fault::LosesReceived, Fault::LosesTransmitted] {
        let error = with(fault).unwrap_err();
        assert!(matches!(error, BenchError::Account(_)), "{fault:?}: {error}");
    }
    let error = with(Fault::ChangesAByte).unwrap_err();
    assert!(matches!(error, BenchError::Wrong(_)), "{error}");
}

/// The time is given to the harness, so that nothing here depends on the machine: a packet arrives every 1,000 cycles on
/// each side, and there is a poll every 250.
#[test]
fn a_packet_that_arrives_alone_leaves_in_the_poll_that_receives_it() {
    for mode in Mode::ALL.iter().map(|mode| mode.as_str()) {
        let options = options(&["--flows", "64", "--mode", mode]);
        let verifier = Mutex::new(Some(Verifier::new(&options, options.mode.of_services().unwrap(), Family::V4, 64)));
        let account = Mutex::new(FinalAccount::default());
        let rate = CycleRate::measure();
        let bench =
            Bench { options: &options, family: Family::V4, rate, verifier: &verifier, account: &account, list: no_listing };
        let mut harness = memory(&options, Family::V4);
        let setup = setups(&options, Family::V4).pop().unwrap();
        let worker = bench.worker(harness.ports().unwrap(), (setup.subscriber, setup.counters, setup.peers)).unwrap();
        let clock = WorkerClock::still(rate);
        let mut session = Session { bench: &bench, harness: &mut harness, engine: worker, meeting: &setup.meeting, clock };
        session.open(options.mode.of_services().unwrap(), &(0..64).collect::<Vec<_>>()).unwrap();
        let sides = traffic::sides(&options);
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
}

#[test]
fn workers_that_hand_over_feed_equally_many_packets_of_all_flows() {
    let options = options(&["--workers", "2", "--core", "0", "--handover", "--flows", "3000"]);
    let setups = setups::<dataplane::MemoryBuffer>(&options, Family::V4);
    let of_workers: Vec<_> = setups.iter().map(|setup| setup.flows.arriving(&options, Family::V4, options.flows)).collect();
    assert_eq!(of_workers[0].len(), of_workers[1].len());
    let mut all = of_workers.concat();
    assert!(all.len() > 3000, "one has more flows than the other");
    all.sort_unstable();
    all.dedup();
    assert!(all.into_iter().eq(0..3000));
}
