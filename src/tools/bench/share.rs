//! The part of one of several workers in a measurement: its view of the snapshots and of the others, and its flows. Each gets
//! the packets of its own flows, as a card with RSS delivers them; whose they are is found out all the same.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use dataplane::steering::{Steering, Towards, WorkerId};
use dataplane::{Compiler, Health, Peers, PortQueues, Publisher, Subscriber, Tuple, WorkerCounters};
use proto::Family;

use super::harness::Slot;
use super::{SEED, scenario};
use crate::cli::{BenchArgs, BenchMode};

/// What a worker is made with.
pub(super) struct Share<B = Slot> {
    pub(super) subscriber: Subscriber,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) peers: Option<Peers<B>>,
    pub(super) flows: Flows,
    pub(super) start: Start,
}

/// Where workers wait for each other before they are timed. One that fails before counts as there.
pub(super) struct Start(Arc<AtomicU8>);

impl Start {
    /// Waits for the others.
    pub(super) fn wait(self) {
        let missing = Arc::clone(&self.0);
        drop(self);
        while missing.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The flows of a worker.
#[derive(Clone)]
pub(super) struct Flows {
    steering: Arc<Steering>,
    /// By what the packets of clients find their owner.
    towards: Towards,
    me: WorkerId,
}

impl Flows {
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

/// The shares of all workers.
pub(super) fn shares<B>(options: &BenchArgs, family: Family) -> Vec<Share<B>> {
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
    let towards = if options.mode == BenchMode::Dnat { Towards::FrontendOfAddress } else { Towards::Frontend };
    let missing = Arc::new(AtomicU8::new(options.workers));
    let share = |(((subscriber, counters), peers), me)| Share {
        subscriber,
        counters,
        peers,
        flows: Flows { steering: steering.clone(), towards, me: WorkerId(me) },
        start: Start(missing.clone()),
    };
    subscribers.into_iter().zip(counters).zip(peers).zip(0..options.workers).map(share).collect()
}
