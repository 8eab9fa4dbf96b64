//! Setup of each of several workers: its snapshots, its view of the other workers, and its flows. A worker gets the
//! packets of its own flows, as from a NIC with RSS, and still computes their owner. With `--handover` it gets those of the
//! next worker.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use dataplane::snapshot::SnapshotReader;
use dataplane::workers::{PacketTarget, Steering, WorkerId};
use dataplane::{Compiler, Health, Peers, PortQueues, Publisher, Subscriber, Tuple, WorkerCounters};
use proto::Family;

use crate::args::{BenchArgs, BenchMode, BenchProtocol};
use crate::scenario::{self, SEED};

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

/// The flows of a worker.
#[derive(Clone)]
pub(super) struct WorkerFlows {
    steering: Arc<Steering>,
    /// The part of a client's packet that determines its owner.
    towards: PacketTarget,
    protocol: u8,
    /// The owner of the flows: the worker, or with `--handover` the next one.
    owner: WorkerId,
}

impl WorkerFlows {
    /// The flows, of those with numbers below `count`, whose packets arrive at the worker. With `--handover` as many as those
    /// of the worker with the most, some of them twice: buffers come back only while the others feed packets too.
    pub(super) fn arriving(&self, options: &BenchArgs, family: Family, count: u32) -> Vec<u32> {
        let mut of_owners = vec![0; usize::from(options.workers)];
        let mut arriving = Vec::new();
        for flow in 0..count {
            let owner = self.owner_of(options, family, flow);
            if let Some(flows) = of_owners.get_mut(usize::from(owner.0)) {
                *flows += 1;
            }
            if owner == self.owner {
                arriving.push(flow);
            }
        }
        let most = of_owners.into_iter().max().unwrap_or(0);
        if options.handover { arriving.into_iter().cycle().take(most).collect() } else { arriving }
    }

    fn owner_of(&self, options: &BenchArgs, family: Family, flow: u32) -> WorkerId {
        let ((source, source_port), vip) = (scenario::client(family, flow), scenario::vip(family, flow % options.services));
        match (source, vip) {
            (IpAddr::V4(source), IpAddr::V4(vip)) => self.owner(u32::from(source), source_port, u32::from(vip)),
            (IpAddr::V6(source), IpAddr::V6(vip)) => self.owner(u128::from(source), source_port, u128::from(vip)),
            // Both are of the same family.
            _ => WorkerId(0),
        }
    }

    fn owner<A: dataplane::Address>(&self, source: A, source_port: u16, destination: A) -> WorkerId {
        let tuple = Tuple { source, destination, source_port, destination_port: scenario::VIP_PORT, protocol: self.protocol };
        self.steering.owner(&tuple, self.towards)
    }
}

/// The setups of all workers, in their order.
pub(super) fn setups<B>(options: &BenchArgs, family: Family) -> Vec<WorkerSetup<B>> {
    let counters: Vec<_> = (0..options.workers).map(|_| Arc::new(WorkerCounters::default())).collect();
    let mut compiler = Compiler::new(scenario::config(options, family)).counting(counters.clone());
    let snapshot =
        compiler.compile(&scenario::state(options, family), &scenario::network(options, family), &Health::default(), 0);
    let (publisher, subscribers) = Publisher::new(snapshot, options.workers.into());
    let steering = Arc::new(Steering::own_hash(options.workers, SEED));
    let queues = [(); 2].map(|()| PortQueues { transmit: options.workers, rss: None });
    let peers: Vec<Option<Peers<B>>> = match options.workers {
        1 => vec![None],
        _ => Peers::all(&steering, &queues).into_iter().map(Some).collect(),
    };
    let towards = if options.mode == BenchMode::Dnat { PacketTarget::FrontendOfAddress } else { PacketTarget::Frontend };
    let protocol = if options.protocol == BenchProtocol::Tcp { 6 } else { 17 };
    let owner = |me: u8| WorkerId(if options.handover { (me + 1) % options.workers } else { me });
    let setup = |((((subscriber, counters), peers), me), meeting)| WorkerSetup {
        subscriber,
        counters,
        peers,
        flows: WorkerFlows { steering: steering.clone(), towards, protocol, owner: owner(me) },
        meeting,
        snapshots: publisher.reader(),
    };
    let meetings = Meeting::all(options.workers);
    subscribers.into_iter().zip(counters).zip(peers).zip(0..options.workers).zip(meetings).map(setup).collect()
}
