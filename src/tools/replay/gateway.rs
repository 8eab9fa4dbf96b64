//! One worker over memory ports, driven by the times of captured packets.
//!
//! **Invariant:** the worker's clock is that of the captures, shifted; between packets it is polled as often as its
//! bookkeeping needs, so that flows expire and held packets end as they would have.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use dataplane::{
    Belongs, Buffer, Compiler, Config, Fate, Health, MemoryBuffer, MemoryPort, Network, NoMemory, Observe, Parts, PortIndex,
    Publisher, TwinQueues, Worker, WorkerCounters,
};
use proto::{ServiceName, State};

use super::ReplayError;
use super::capture::{CaptureError, Frame};

/// Where the worker's clock begins. Any time will do that leaves room below it.
const START_NS: u64 = 1_000_000_000;
/// Time between polls while nothing arrives. The worker's own ticks are as long; finer steps would change nothing.
const STEP_NS: u64 = 1 << 27;
/// Polls without a frame sent after which the announcements of the start are over: 16 steps are 2.1 s, and they come
/// 1 s apart.
const QUIET_POLLS: u32 = 16;
/// Flows for each poll of a step: what a worker looks at in one poll (64) over the ticks in which it looks at all (64).
const FLOWS_PER_POLL: u64 = 64 * 64;
/// How long the gateway goes on after the last packet, so that held packets end: they wait 1 s for a
/// neighbour, 2 s for a first fragment.
const REST_NS: u64 = 2_000_000_000;
/// Seed of the worker's tables; it only has to be the same each time.
const SEED: u64 = 0x5eed;

/// By which side of a port a frame leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Out of the port.
    Wire,
    /// To its Linux twin.
    Twin,
}

/// Takes what leaves the gateway.
pub(super) trait Leaving {
    fn leaves(&mut self, time_ns: u64, port: PortIndex, way: Way, frame: &[u8]) -> Result<(), CaptureError>;
}

/// What became of one packet.
#[derive(Debug)]
pub(super) struct Verdict {
    /// The number it was put in with.
    pub(super) packet: u64,
    pub(super) fate: Fate,
    pub(super) flow: Option<Flow>,
}

/// The flow that a packet belongs to.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) service: Arc<ServiceName>,
    pub(super) frontend: SocketAddr,
    pub(super) backend: SocketAddr,
}

/// Writes down what the worker says.
#[derive(Debug, Default)]
struct Log(Vec<(u64, Fate, Option<Belongs>)>);

impl Observe<MemoryBuffer> for Log {
    fn observe(&mut self, buffer: &MemoryBuffer, fate: Fate, belongs: impl FnOnce() -> Option<Belongs>) {
        if buffer.id != 0 {
            self.0.push((buffer.id, fate, belongs()));
        }
    }
}

/// The gateway.
pub(super) struct Gateway {
    worker: Worker<MemoryPort, Log>,
    publisher: Publisher,
    counters: Arc<WorkerCounters>,
    twins: Vec<Option<Arc<TwinQueues<MemoryBuffer>>>>,
    verdicts: VecDeque<Verdict>,
    longest_idle_ns: u64,
    now_ns: u64,
    /// Capture time minus the worker's, once the first packet has come.
    shift_ns: Option<i128>,
}

impl Gateway {
    /// A gateway that has its state and is done with announcing.
    pub(super) fn start(config: Config, state: &State, network: &Network) -> Result<Self, NoMemory> {
        let limits = config.flows.clone();
        let longest_idle = limits.longest_idle();
        let twins: Vec<_> = config.ports.iter().map(|port| port.twin.then(|| Arc::new(TwinQueues::new()))).collect();
        let counters = Arc::new(WorkerCounters::default());
        let mut compiler = Compiler::new(config).counting(vec![counters.clone()]);
        let (mut publisher, mut subscribers) = Publisher::new(compiler.initial(), 1);
        let worker = Worker::new(Parts {
            ports: twins.iter().map(|twin| (MemoryPort::default(), twin.clone())).collect(),
            subscriber: subscribers.remove(0),
            limits,
            counters: counters.clone(),
            asks: Arc::new(ArrayQueue::new(1)),
            seed: SEED,
            peers: None,
            observer: Log::default(),
        })?;
        publisher.publish(compiler.compile(state, network, &Health::default(), START_NS));
        let mut gateway = Self {
            worker,
            publisher,
            counters,
            twins,
            verdicts: VecDeque::new(),
            longest_idle_ns: u64::try_from(longest_idle.as_nanos()).unwrap_or(u64::MAX),
            now_ns: START_NS,
            shift_ns: None,
        };
        gateway.settle();
        Ok(gateway)
    }

    /// Lets the announcements of the start pass.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < QUIET_POLLS {
            self.worker.poll(self.now_ns);
            self.now_ns += STEP_NS;
            let sent: usize = (0..self.twins.len()).map(|port| self.sent(port).len()).sum();
            quiet = if sent == 0 { quiet + 1 } else { 0 };
        }
    }

    /// Lets the time of the captures come to `time_ns`.
    pub(super) fn advance_to(&mut self, time_ns: u64, leaving: &mut impl Leaving) -> Result<(), ReplayError> {
        let shift_ns = *self.shift_ns.get_or_insert(i128::from(time_ns) - i128::from(self.now_ns));
        let target_ns = u64::try_from(i128::from(time_ns) - shift_ns).unwrap_or(u64::MAX);
        // After the longest idle limit and one round of the worker's sweep nothing is left that could change.
        let stepped_ns = self.now_ns.saturating_add(self.longest_idle_ns).saturating_add(64 * STEP_NS).min(target_ns);
        while self.now_ns + STEP_NS < stepped_ns {
            self.now_ns += STEP_NS;
            for _ in 0..=self.counters.flows.get() / FLOWS_PER_POLL {
                self.poll(leaving)?;
            }
        }
        self.now_ns = target_ns;
        Ok(())
    }

    /// Puts one frame in at a port.
    pub(super) fn put(
        &mut self,
        port: PortIndex,
        packet: u64,
        frame: &Frame,
        leaving: &mut impl Leaving,
    ) -> Result<(), ReplayError> {
        if let Some(port) = self.worker.port_mut(port) {
            port.arriving.push_back(MemoryBuffer::new(&frame.bytes, packet));
        }
        self.poll(leaving)
    }

    /// Goes on until no packet is held any more.
    pub(super) fn rest(&mut self, leaving: &mut impl Leaving) -> Result<(), ReplayError> {
        let end_ns = self.capture_time().saturating_add(REST_NS);
        self.advance_to(end_ns, leaving)?;
        self.poll(leaving)
    }

    /// The verdicts since the last question, in the order they were found.
    pub(super) fn verdicts(&mut self) -> impl Iterator<Item = Verdict> {
        self.verdicts.drain(..)
    }

    fn capture_time(&self) -> u64 {
        u64::try_from(i128::from(self.now_ns) + self.shift_ns.unwrap_or(0)).unwrap_or(0)
    }

    fn poll(&mut self, leaving: &mut impl Leaving) -> Result<(), ReplayError> {
        self.worker.poll(self.now_ns);
        let time_ns = self.capture_time();
        for (index, port) in (0..self.twins.len()).zip((0..=u8::MAX).map(PortIndex)) {
            for buffer in self.sent(index) {
                leaving.leaves(time_ns, port, Way::Wire, buffer.bytes())?;
            }
            let Some(Some(twin)) = self.twins.get(index) else { continue };
            for buffer in std::iter::from_fn(|| twin.to_linux.pop()).flatten() {
                leaving.leaves(time_ns, port, Way::Twin, buffer.bytes())?;
            }
        }
        let snapshot = self.publisher.current();
        for (packet, fate, belongs) in self.worker.observer_mut().0.drain(..) {
            let flow = belongs.and_then(|belongs| {
                let backend = snapshot.backend(belongs.backend)?;
                let frontend = SocketAddr::new(belongs.vip, belongs.port);
                Some(Flow { service: backend.service.clone(), frontend, backend: backend.address })
            });
            self.verdicts.push_back(Verdict { packet, fate, flow });
        }
        Ok(())
    }

    fn sent(&mut self, port: usize) -> Vec<MemoryBuffer> {
        let port = u8::try_from(port).ok().and_then(|port| self.worker.port_mut(PortIndex(port)));
        port.map(|port| port.sent.drain(..).collect()).unwrap_or_default()
    }
}
