//! The harness over DPDK's rings: a generator on a core of its own puts packets into the receive rings of two ports, and
//! takes them from the transmit rings.
//!
//! **Invariant:** no packet is lost: fewer are on their way than a ring holds. The time in which the worker finds no
//! packet does not count (`measure`), so a slow generator does not make the engine slow.
//!
//! Without hugepages the packets lie in many small pages: each costs a TLB miss or two, in a virtual machine 150 ns.
//!
//! Not here: frames (`trace`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dataplane::{BURST, Buffer, Burst};
use dpdk_sys::{Eal, EalConfig, Hugepages, Mempool, RingInput, RingOutput, RingPort};

use super::super::error::BenchError;
use super::super::scenario::Side;
use super::super::trace::{FrameRoom, HEAD_BYTES, Pattern, Trace};
use super::sample::Sampler;
use super::{Feeding, Harness, Traffic};
use dpdk_port::{DpdkPort, Packet, QueuePair, QueueReceiver, size_memory};

/// Slots of a ring.
const RING_SLOTS: u32 = 1024;
/// Packets on their way at most: half of what a ring holds, so that it never is full.
const ON_THEIR_WAY_MAX: u64 = RING_SLOTS as u64 / 2;
/// Packets that have not come back after this many polls of the worker do not come back: the engine dropped or holds
/// them.
const POLLS_TO_COME_BACK: u64 = 1 << 16;
/// Polls after which the worker says how many it has begun: a word at each would move a cache line between the cores.
const POLLS_PER_WORD: u64 = 256;

impl FrameRoom for Packet {
    #[inline(always)]
    fn begin(&mut self, len: u16) -> Option<&mut [u8; HEAD_BYTES]> {
        if !self.resize(HEAD_BYTES.max(len.into())) {
            return None;
        }
        self.bytes_mut().first_chunk_mut()
    }

    #[inline(always)]
    fn complete(&mut self, len: u16, from: usize, pattern: &Pattern) {
        let behind = from..usize::from(len);
        if let (Some(to), Some(from)) = (self.bytes_mut().get_mut(behind.clone()), pattern.get(behind)) {
            to.copy_from_slice(from);
        }
        let _ = self.resize(len.into()); // it gets shorter, so there is room
    }
}

/// Words between worker and generator.
#[derive(Debug, Default)]
struct Signals {
    /// The generator should end.
    end: AtomicBool,
    /// It has ended.
    has_ended: AtomicBool,
    /// See [`Harness::is_full`].
    is_full: AtomicBool,
    /// Number of polls that the worker has begun, a multiple of [`POLLS_PER_WORD`].
    polls: AtomicU64,
}

/// What the generator works on; the worker looks at it between feedings.
#[derive(Debug)]
struct Generator {
    inputs: [RingInput; 2],
    outputs: [RingOutput; 2],
    pool: Mempool,
    traces: [Option<Trace>; 2],
    sampler: Sampler,
    fed: u64,
    transmitted: u64,
}

impl Generator {
    /// Feeds as `feeding` says, and collects packets until all have come back.
    fn run(&mut self, feeding: Feeding, signals: &Signals) {
        self.sampler.keep_one_in(feeding.keep_one_in);
        let until = feeding.frames.map_or(u64::MAX, |frames| self.fed.saturating_add(frames));
        let mut turns = feeding.sides.iter().cycle();
        let mut on_their_way = 0_u64;
        let mut polls_at_move = signals.polls.load(Ordering::Acquire);
        loop {
            let ends = self.fed >= until || signals.end.load(Ordering::Relaxed);
            let mut moved = false;
            if !ends
                && on_their_way + BURST as u64 <= ON_THEIR_WAY_MAX
                && let Some(side) = turns.next()
            {
                let fed = self.feed(*side);
                on_their_way += fed;
                moved = fed > 0;
            }
            // Read first, so that what these polls have transmitted is collected.
            let polls = signals.polls.load(Ordering::Acquire);
            let collected = self.collect();
            on_their_way = on_their_way.saturating_sub(collected);
            if moved || collected > 0 {
                polls_at_move = signals.polls.load(Ordering::Acquire);
            } else {
                if polls - polls_at_move > POLLS_TO_COME_BACK {
                    on_their_way = 0;
                }
                std::thread::yield_now();
            }
            signals.is_full.store(self.sampler.is_full(), Ordering::Relaxed);
            if ends && on_their_way == 0 {
                return;
            }
        }
    }

    fn feed(&mut self, side: Side) -> u64 {
        let Some(trace) = &mut self.traces[side as usize] else { return 0 };
        let mut burst: Burst<Packet> = Burst::new();
        if !self.pool.fill(&mut burst) {
            return 0;
        }
        burst.truncate(trace.next_count());
        trace.fill(&mut burst);
        let count = burst.len() as u64;
        self.inputs[side as usize].put(&mut burst);
        let taken = count - burst.len() as u64;
        self.fed += taken;
        taken
    }

    fn collect(&mut self) -> u64 {
        let before = self.transmitted;
        for side in Side::BOTH {
            let mut burst: Burst<Packet> = Burst::new();
            self.outputs[side as usize].take(&mut burst);
            self.transmitted += burst.len() as u64;
            self.sampler.see(side, &burst, Packet::bytes);
            dpdk_sys::release(&mut burst);
        }
        self.transmitted - before
    }
}

/// The harness over rings.
#[derive(Debug)]
pub(crate) struct Rings {
    ports: Option<[DpdkPort; 2]>,
    generator: Arc<Mutex<Generator>>,
    signals: Arc<Signals>,
    /// Number of polls that the worker has begun.
    polls: u64,
    feedings: Sender<Feeding>,
    /// Whether there is one core for worker and generator.
    shares_core: bool,
}

impl Rings {
    /// A harness whose generator runs on a core.
    pub(crate) fn new(core: usize, generator_core: usize, seed: u64) -> Result<Self, BenchError> {
        let failed = |error: dpdk_sys::Error| BenchError::Dpdk(error.to_string());
        let (pool, memory_mb) = size_memory(2, 1, 1500);
        let config = EalConfig { hugepages: Hugepages::Auto, memory_mb, node: None, devices: Vec::new(), cores: Vec::new() };
        let eal = Eal::start(&config).map_err(failed)?;
        let pool = Mempool::new(eal, &pool).map_err(failed)?;
        let uplink = RingPort::new(eal, 0, RING_SLOTS, pool).map_err(failed)?;
        let cluster = RingPort::new(eal, 1, RING_SLOTS, pool).map_err(failed)?;
        let port = |rx, tx| DpdkPort::new(QueueReceiver::fixed(QueuePair { rx: Some(rx), tx: Some(tx) }), pool);
        let generator = Arc::new(Mutex::new(Generator {
            inputs: [uplink.input, cluster.input],
            outputs: [uplink.output, cluster.output],
            pool,
            traces: [None, None],
            sampler: Sampler::new(seed),
            fed: 0,
            transmitted: 0,
        }));
        let signals = Arc::new(Signals::default());
        let (feedings, commands) = mpsc::channel();
        let (thread_generator, thread_signals) = (Arc::clone(&generator), Arc::clone(&signals));
        std::thread::spawn(move || generate(eal, generator_core, &thread_generator, &thread_signals, &commands));
        let ports = Some([port(uplink.rx, uplink.tx), port(cluster.rx, cluster.tx)]);
        Ok(Self { ports, generator, signals, polls: 0, feedings, shares_core: core == generator_core })
    }

    fn generator(&self) -> MutexGuard<'_, Generator> {
        self.generator.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The generator's thread; it ends with the harness. Without a core of its own it shares one.
fn generate(eal: Eal, core: usize, generator: &Mutex<Generator>, signals: &Signals, feedings: &Receiver<Feeding>) {
    core_affinity::set_for_current(core_affinity::CoreId { id: core });
    // Without a cache of packets it is only slower.
    let _registered = eal.register_thread();
    while let Ok(feeding) = feedings.recv() {
        generator.lock().unwrap_or_else(PoisonError::into_inner).run(feeding, signals);
        signals.has_ended.store(true, Ordering::Release);
    }
}

impl Harness for Rings {
    type Port = DpdkPort;
    const WAITS: bool = true;

    fn ports(&mut self) -> Option<[DpdkPort; 2]> {
        self.ports.take()
    }

    fn give_back(&mut self, ports: [DpdkPort; 2]) {
        self.ports = Some(ports);
    }

    fn load(&mut self, side: Side, trace: Trace) {
        self.generator().traces[side as usize] = Some(trace);
    }

    fn begin(&mut self, feeding: Feeding) {
        self.signals.end.store(false, Ordering::Relaxed);
        self.signals.is_full.store(false, Ordering::Relaxed);
        self.signals.has_ended.store(false, Ordering::Relaxed);
        if self.feedings.send(feeding).is_err() {
            self.signals.has_ended.store(true, Ordering::Relaxed); // the generator panicked: the account will not close
        }
    }

    #[inline]
    fn turn(&mut self, _: u64) {
        self.polls += 1;
        if self.polls.is_multiple_of(POLLS_PER_WORD) {
            self.signals.polls.store(self.polls, Ordering::Release);
        }
        if self.shares_core {
            std::thread::yield_now();
        }
    }

    fn end(&mut self) {
        self.signals.end.store(true, Ordering::Relaxed);
    }

    fn has_ended(&mut self) -> bool {
        self.signals.has_ended.load(Ordering::Acquire)
    }

    fn is_full(&self) -> bool {
        self.signals.is_full.load(Ordering::Relaxed)
    }

    fn take_kept(&mut self, see: impl FnMut(Side, &[u8]) -> Result<(), BenchError>) -> Result<(), BenchError> {
        self.generator().sampler.take(see)
    }

    fn traffic(&self) -> Traffic {
        let generator = self.generator();
        Traffic { fed: generator.fed, transmitted: generator.transmitted, buffers: None }
    }
}
