//! One worker over memory ports, driven by the times of captured packets.
//!
//! Invariant: the worker's clock is that of the captures with an offset. Between packets the worker is polled as often
//! as its timers need, so that flows expire and held packets are dropped as in a running gateway.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use dataplane::{
    Buffer, Compiler, Config, Health, MemoryBuffer, MemoryPort, Network, NoMemory, Observe, PacketFlow, PacketOutcome, Parts,
    PortIndex, Publisher, SWEPT_PER_POLL, TwinQueues, Worker, WorkerCounters,
};
use proto::{Protocol, ServiceName, State};
use serde::Serialize;

use super::capture::{CaptureError, Frame};
use super::outputs::{CaptureOutputs, OutputSide};

/// Start of the worker's clock. Any time with enough room below it will do.
const START_NS: u64 = 1_000_000_000;
/// Time between polls without packets. It equals the worker's tick; finer steps would change nothing.
const STEP_NS: u64 = 1 << 27;
/// Number of polls without a transmitted frame after which the initial announcements are over: 16 steps are 2.1 s, and
/// announcements are 1 s apart.
const QUIET_POLLS: u32 = 16;
/// Flows per poll of a step: a worker sweeps so many flows in one poll, and the whole table in 64 ticks.
const FLOWS_PER_POLL: u64 = 64 * SWEPT_PER_POLL as u64;
/// How long the gateway runs after the last packet, so that held packets get a verdict: they wait 2 s for a neighbour
/// or a first fragment. The rest leaves room for the poll that ends them.
const REST_NS: u64 = 2_500_000_000;
/// Seed of the worker's tables; it only has to be constant.
const SEED: u64 = 0x5eed;

/// The result for one packet.
#[derive(Debug)]
pub(super) struct Verdict {
    /// The number of the packet.
    pub(super) packet: u64,
    pub(super) outcome: PacketOutcome,
    pub(super) flow: Option<Flow>,
}

/// The flow that a packet belongs to.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) service: Arc<ServiceName>,
    pub(super) frontend: SocketAddr,
    pub(super) backend: SocketAddr,
}

/// Protocol, address and port that a packet is sent to.
pub(super) type Destination = (Protocol, SocketAddr);

/// A Service that the gateway does not serve, or only in part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct RefusedService {
    pub(super) service: String,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// The refused Services, by where they would be reached.
pub(super) type RefusedServices = HashMap<Destination, RefusedService>;

/// Records the observations of the worker.
#[derive(Debug, Default)]
struct Log(Vec<(u64, PacketOutcome, Option<PacketFlow>)>);

impl Observe<MemoryBuffer> for Log {
    fn observe(&mut self, buffer: &MemoryBuffer, outcome: PacketOutcome, belongs: impl FnOnce() -> Option<PacketFlow>) {
        if buffer.id != 0 {
            self.0.push((buffer.id, outcome, belongs()));
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
    /// Capture time minus the worker's time, after the first packet.
    shift_ns: Option<i128>,
}

impl Gateway {
    /// A gateway that has its state and has sent its announcements.
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
            neighbour_requests: Arc::new(ArrayQueue::new(1)),
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

    /// The Services that the gateway refuses, wholly or in part, by where they are or would be reached.
    pub(super) fn refused(&self) -> RefusedServices {
        let snapshot = self.publisher.current();
        let mut refused = RefusedServices::new();
        for view in snapshot.services().values().filter(|view| view.refusal.is_some()) {
            let served = view.ports.iter().flat_map(|port| port.frontends.iter().map(|at| (port.protocol, *at)));
            for (protocol, at) in served.chain(view.not_served.iter().copied()) {
                let Some((view, refusal)) = snapshot.refused_at(protocol, at).and_then(|v| Some((v, v.refusal.as_ref()?))) else {
                    continue;
                };
                let (service, message) = (view.name.to_string(), refusal.message.clone());
                refused.insert((protocol, at), RefusedService { service, reason: refusal.reason.as_str(), message });
            }
        }
        for (name, refusal) in snapshot.refused() {
            tracing::warn!(subject = %name, "{}: {}", refusal.reason.as_str(), refusal.message);
        }
        refused
    }

    /// Waits for the end of the initial announcements.
    fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < QUIET_POLLS {
            self.worker.poll(self.now_ns);
            self.now_ns += STEP_NS;
            let sent: usize = (0..self.twins.len()).map(|port| self.sent(port).len()).sum();
            quiet = if sent == 0 { quiet + 1 } else { 0 };
        }
    }

    /// Advances the capture time to `time_ns`.
    pub(super) fn advance_to(&mut self, time_ns: u64, outputs: &mut CaptureOutputs) -> Result<(), CaptureError> {
        let shift_ns = *self.shift_ns.get_or_insert(i128::from(time_ns) - i128::from(self.now_ns));
        let target_ns = u64::try_from(i128::from(time_ns) - shift_ns).unwrap_or(u64::MAX);
        // After the longest idle limit and one full sweep nothing can change any longer.
        let stepped_ns = self.now_ns.saturating_add(self.longest_idle_ns).saturating_add(64 * STEP_NS).min(target_ns);
        while self.now_ns + STEP_NS < stepped_ns {
            self.now_ns += STEP_NS;
            for _ in 0..=self.counters.flows.get() / FLOWS_PER_POLL {
                self.poll(outputs)?;
            }
        }
        self.now_ns = target_ns;
        Ok(())
    }

    /// Puts one frame in at a port, for the next poll.
    pub(super) fn put(&mut self, port: PortIndex, packet: u64, frame: &Frame) {
        if let Some(port) = self.worker.port_mut(port) {
            port.arriving.push_back(MemoryBuffer::new(&frame.bytes, packet));
        }
    }

    /// Runs until no packet is held.
    pub(super) fn rest(&mut self, outputs: &mut CaptureOutputs) -> Result<(), CaptureError> {
        let end_ns = self.capture_time().saturating_add(REST_NS);
        self.advance_to(end_ns, outputs)?;
        self.poll(outputs)
    }

    /// The verdicts since the last call, in order.
    pub(super) fn verdicts(&mut self) -> impl Iterator<Item = Verdict> {
        self.verdicts.drain(..)
    }

    fn capture_time(&self) -> u64 {
        u64::try_from(i128::from(self.now_ns) + self.shift_ns.unwrap_or(0)).unwrap_or(0)
    }

    /// Processes the frames that were put in, and writes what leaves.
    pub(super) fn poll(&mut self, outputs: &mut CaptureOutputs) -> Result<(), CaptureError> {
        self.worker.poll(self.now_ns);
        let time_ns = self.capture_time();
        for (index, port) in (0..self.twins.len()).zip((0..=u8::MAX).map(PortIndex)) {
            for buffer in self.sent(index) {
                outputs.write(time_ns, port, OutputSide::Wire, buffer.bytes())?;
            }
            let Some(Some(twin)) = self.twins.get(index) else { continue };
            for buffer in std::iter::from_fn(|| twin.to_linux.pop()).flatten() {
                outputs.write(time_ns, port, OutputSide::Twin, buffer.bytes())?;
            }
        }
        let snapshot = self.publisher.current();
        for (packet, outcome, belongs) in self.worker.observer_mut().0.drain(..) {
            let flow = belongs.and_then(|belongs| {
                let backend = snapshot.backend(belongs.backend)?;
                let frontend = SocketAddr::new(belongs.vip, belongs.port);
                Some(Flow { service: backend.service.clone(), frontend, backend: backend.address })
            });
            self.verdicts.push_back(Verdict { packet, outcome, flow });
        }
        Ok(())
    }

    fn sent(&mut self, port: usize) -> Vec<MemoryBuffer> {
        let port = u8::try_from(port).ok().and_then(|port| self.worker.port_mut(PortIndex(port)));
        port.map(|port| port.sent.drain(..).collect()).unwrap_or_default()
    }
}
