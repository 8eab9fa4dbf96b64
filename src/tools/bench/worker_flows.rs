//! Setup of each of several workers: its snapshots, its view of the other workers, and its flows. A worker gets the
//! packets of its own flows, as from a NIC with RSS, and still computes their owner.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use dataplane::workers::{PacketTarget, Steering, WorkerId};
use dataplane::{Compiler, Health, Peers, PortQueues, Publisher, Subscriber, Tuple, WorkerCounters};
use proto::Family;

use super::harness::Slot;
use super::scenario::{self, SEED};
use crate::cli::{BenchArgs, BenchMode};

/// Setup of one worker.
pub(super) struct WorkerSetup<B = Slot> {
    pub(super) subscriber: Subscriber,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) peers: Option<Peers<B>>,
    pub(super) flows: WorkerFlows,
    pub(super) start: StartBarrier,
}

/// A barrier before the timing. A worker that failed before counts as waiting.
pub(super) struct StartBarrier(Arc<AtomicU8>);

impl StartBarrier {
    /// Waits for the others.
    pub(super) fn wait(self) {
        let missing = Arc::clone(&self.0);
        drop(self);
        while missing.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

impl Drop for StartBarrier {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The flows of a worker.
#[derive(Clone)]
pub(super) struct WorkerFlows {
    steering: Arc<Steering>,
    /// The part of a client's packet that determines its owner.
    towards: PacketTarget,
    me: WorkerId,
}

impl WorkerFlows {
    /// Whether the flow with this number is the worker's.
    pub(super) fn own(&self, options: &BenchArgs, family: Family, flow: u32) -> bool {
        let ((source, source_port), vip) = (scenario::client(family, flow), scenario::vip(family, flow % options.services));
        let owner = match (source, vip) {
            (IpAddr::V4(source), IpAddr::V4(vip)) => self.owner(u32::from(source), source_port, u32::from(vip)),
            (IpAddr::V6(source), IpAddr::V6(vip)) => self.owner(u128::from(source), source_port, u128::from(vip)),
            _ => return false,
        };
        owner == self.me
    }

    fn owner<A: dataplane::Address>(&self, source: A, source_port: u16, destination: A) -> WorkerId {
        let tuple = Tuple { source, destination, source_port, destination_port: scenario::VIP_PORT, protocol: 6 };
        self.steering.owner(&tuple, self.towards)
    }
}

/// The setups of all workers, in their order.
pub(super) fn setups<B>(options: &BenchArgs, family: Family) -> Vec<WorkerSetup<B>> {
    let counters: Vec<_> = (0..options.workers).map(|_| Arc::new(WorkerCounters::default())).collect();
    let mut compiler = Compiler::new(scenario::config(options, family)).counting(counters.clone());
    let snapshot =
        compiler.compile(&scenario::state(options, family), &scenario::network(options, family), &Health::default(), 0);
    let (_, subscribers) = Publisher::new(snapshot, options.workers.into());
    let steering = Arc::new(Steering::own_hash(options.workers, SEED));
    let queues = [(); 2].map(|()| PortQueues { transmit: options.workers, rss: None });
    let peers: Vec<Option<Peers<B>>> = match options.workers {
        1 => vec![None],
        _ => Peers::all(&steering, &queues).into_iter().map(Some).collect(),
    };
    let towards = if options.mode == BenchMode::Dnat { PacketTarget::FrontendOfAddress } else { PacketTarget::Frontend };
    let missing = Arc::new(AtomicU8::new(options.workers));
    let setup = |(((subscriber, counters), peers), me)| WorkerSetup {
        subscriber,
        counters,
        peers,
        flows: WorkerFlows { steering: steering.clone(), towards, me: WorkerId(me) },
        start: StartBarrier(missing.clone()),
    };
    subscribers.into_iter().zip(counters).zip(peers).zip(0..options.workers).map(setup).collect()
}
