//! Setup of each of several workers: its snapshots, its view of the other workers, and its flows. A worker gets the
//! packets of its own flows, as from a NIC with RSS, and still computes their owner. With `--handover` it gets those of the
//! next worker.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use dataplane::snapshot::SnapshotReader;
use dataplane::workers::{PacketTarget, Steering, WorkerId};
use dataplane::{Compiler, Health, Peers, PortQueues, Publisher, Subscriber, Tuple, WorkerCounters};

use crate::args::{BenchArgs, BenchMode, BenchProtocol};
use crate::scenario::{self, Part, SEED, Scenario};

/// Setup of one worker.
pub(super) struct WorkerSetup<B> {
    pub(super) subscriber: Subscriber,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) peers: Option<Peers<B>>,
    pub(super) flows: WorkerFlows,
    pub(super) meeting: Meeting,
    pub(super) snapshots: SnapshotReader,
}

/// Where workers meet: none goes on before all have come. One that failed is not waited for.
pub(super) struct Meeting(Arc<Mutex<Attendance>>);

#[derive(Debug, Default)]
struct Attendance {
    parties: usize,
    waiting: usize,
    /// Number of meetings so far.
    meetings: u64,
    is_over: bool,
    is_finished: bool,
    has_failed: bool,
}

impl Attendance {
    fn check(&mut self) {
        if self.waiting >= self.parties {
            self.waiting = 0;
            self.meetings += 1;
        }
    }
}

impl Meeting {
    fn all(parties: u8) -> Vec<Self> {
        let attendance = Arc::new(Mutex::new(Attendance { parties: parties.into(), ..Attendance::default() }));
        (0..parties).map(|_| Self(Arc::clone(&attendance))).collect()
    }

    fn with<T>(&self, action: impl FnOnce(&mut Attendance) -> T) -> T {
        action(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for the others.
    pub(super) fn meet(&self, mut meanwhile: impl FnMut()) {
        let mine = self.with(|attendance| {
            let mine = attendance.meetings;
            attendance.waiting += 1;
            attendance.check();
            mine
        });
        while self.with(|attendance| attendance.meetings == mine) {
            meanwhile();
            std::thread::yield_now();
        }
    }

    /// Ends what all do at the same time; the others see it by [`Meeting::is_over`].
    pub(super) fn end(&self) {
        self.with(|attendance| attendance.is_over = true);
    }

    /// Whether a worker has ended it.
    pub(super) fn is_over(&self) -> bool {
        self.with(|attendance| attendance.is_over)
    }

    /// Ends it for good.
    pub(super) fn finish(&self) {
        self.with(|attendance| attendance.is_finished = true);
    }

    /// Whether a worker has ended it for good.
    pub(super) fn is_finished(&self) -> bool {
        self.with(|attendance| attendance.is_finished)
    }

    /// To be called by all between two meetings, after an end.
    pub(super) fn resume(&self) {
        self.with(|attendance| (attendance.is_over, attendance.is_finished) = (false, false));
    }

    /// Whether a worker has failed, so that it does not come any more.
    pub(super) fn has_failed(&self) -> bool {
        self.with(|attendance| attendance.has_failed)
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.with(|attendance| {
            attendance.parties -= 1;
            (attendance.is_over, attendance.has_failed) = (true, true);
            attendance.check();
        });
    }
}

/// The flows of a part whose packets arrive at a worker.
pub(super) struct PartFlows {
    /// Those that stay.
    pub(super) staying: Vec<u32>,
    /// Those that come and go.
    pub(super) short: Vec<u32>,
}

impl PartFlows {
    /// Those that stay, or that come and go if none stays.
    pub(super) fn first(&self) -> &[u32] {
        if self.staying.is_empty() { &self.short } else { &self.staying }
    }

    /// With `--mix`: those that come next, and those of which some are live at the beginning.
    pub(super) fn short_halves(&self) -> (&[u32], &[u32]) {
        self.short.split_at(self.short.len() / 2)
    }
}

/// The flows of a worker.
#[derive(Clone)]
pub(super) struct WorkerFlows {
    steering: Arc<Steering>,
    workers: u8,
    /// The owner of the flows: the worker, or with `--handover` the next one.
    owner: WorkerId,
    is_handed_over: bool,
}

impl WorkerFlows {
    /// The flows of a part whose packets arrive at the worker. With `--handover` as many as those of the worker with the
    /// most, some of them twice: buffers come back only while the others feed packets too.
    pub(super) fn arriving(&self, part: &Part) -> PartFlows {
        PartFlows { staying: self.of_range(part, part.flows.clone()), short: self.of_range(part, part.short_flows.clone()) }
    }

    fn of_range(&self, part: &Part, flows: Range<u32>) -> Vec<u32> {
        let mut of_owners = vec![0; usize::from(self.workers)];
        let mut arriving = Vec::new();
        for flow in flows {
            let owner = self.owner_of(part, flow);
            if let Some(flows) = of_owners.get_mut(usize::from(owner.0)) {
                *flows += 1;
            }
            if owner == self.owner {
                arriving.push(flow);
            }
        }
        let most = of_owners.into_iter().max().unwrap_or(0);
        if self.is_handed_over { arriving.into_iter().cycle().take(most).collect() } else { arriving }
    }

    fn owner_of(&self, part: &Part, flow: u32) -> WorkerId {
        let ((source, source_port), (vip, destination_port)) = (part.client(flow), part.frontend(flow));
        let protocol = if part.protocol == BenchProtocol::Tcp { 6 } else { 17 };
        // The part of a client's packet that determines its owner.
        let towards = if part.mode == BenchMode::Dnat { PacketTarget::FrontendOfAddress } else { PacketTarget::Frontend };
        match (source, vip) {
            (IpAddr::V4(source), IpAddr::V4(vip)) => {
                let (source, destination) = (u32::from(source), u32::from(vip));
                self.steering.owner(&Tuple { source, destination, source_port, destination_port, protocol }, towards)
            }
            (IpAddr::V6(source), IpAddr::V6(vip)) => {
                let (source, destination) = (u128::from(source), u128::from(vip));
                self.steering.owner(&Tuple { source, destination, source_port, destination_port, protocol }, towards)
            }
            // Both are of the same family.
            _ => WorkerId(0),
        }
    }
}

/// The setups of all workers, in their order.
pub(super) fn setups<B>(scenario: &Scenario) -> Vec<WorkerSetup<B>> {
    let BenchArgs { workers, handover, .. } = scenario.options;
    let counters: Vec<_> = (0..workers).map(|_| Arc::new(WorkerCounters::default())).collect();
    let mut compiler = Compiler::new(scenario::config(scenario)).counting(counters.clone());
    let snapshot = compiler.compile(&scenario::state(scenario), &scenario::network(scenario), &Health::default(), 0);
    let (publisher, subscribers) = Publisher::new(snapshot, workers.into());
    let steering = Arc::new(Steering::own_hash(workers, SEED));
    let queues = [(); 2].map(|()| PortQueues { transmit: workers, rss: None });
    let peers: Vec<Option<Peers<B>>> = match workers {
        1 => vec![None],
        _ => Peers::all(&steering, &queues).into_iter().map(Some).collect(),
    };
    let owner = |me: u8| WorkerId(if handover { (me + 1) % workers } else { me });
    let setup = |((((subscriber, counters), peers), me), meeting)| WorkerSetup {
        subscriber,
        counters,
        peers,
        flows: WorkerFlows { steering: steering.clone(), workers, owner: owner(me), is_handed_over: handover },
        meeting,
        snapshots: publisher.reader(),
    };
    let meetings = Meeting::all(workers);
    subscribers.into_iter().zip(counters).zip(peers).zip(0..workers).zip(meetings).map(setup).collect()
}
