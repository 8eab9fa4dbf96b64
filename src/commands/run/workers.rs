//! Start of the workers: what each gets, and the body of its thread.
//!
//! Not here: the threads (`worker_threads`), and what a worker does (`dataplane`).

use std::net::IpAddr;
use std::sync::{Arc, PoisonError};

use core_affinity::CoreId;
use crossbeam_queue::ArrayQueue;
use dataplane::flow::FlowReplication;
use dataplane::forward::Mailbox;
use dataplane::{Link, Metered, NoMemory, Observe, Parts, Port, PortIndex, Subscriber, VipOwnership, Worker, WorkerCounters};
use dpdk_port::DpdkPort;
use dpdk_sys::Eal;

use super::flow_transfer::FlowTransfer;
use crate::fleet::replication::ReplicaExchange;
use crate::flow_records::FlowExport;
use crate::ports::WorkerPorts;
use crate::settings::Settings;
use crate::worker_threads::{self, Rest, Sleep, Turn, WorkerError};

/// Why workers did not start.
#[derive(Debug, thiserror::Error)]
pub enum WorkersError {
    /// There is no memory for the flow tables.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// A thread could not be started.
    #[error(transparent)]
    Thread(#[from] WorkerError),
}

/// The queues by which workers report flows beside the packets.
pub(super) struct FlowOutlets {
    /// Flow records.
    pub(super) export: Arc<FlowExport>,
    /// Replicas for partners.
    pub(super) exchange: Arc<ReplicaExchange>,
}

impl FlowOutlets {
    /// Of this number of workers, as far as `settings` ask for records and replicas.
    pub(super) fn new(settings: &Settings, workers: usize) -> Self {
        Self {
            export: Arc::new(FlowExport::new(settings.flow_records.as_ref(), workers)),
            exchange: Arc::new(ReplicaExchange::new(settings.replication.as_ref(), workers)),
        }
    }
}

/// What one worker gets.
pub(super) struct WorkerParts {
    pub(super) ports: WorkerPorts,
    pub(super) subscriber: Subscriber,
    pub(super) counters: Arc<WorkerCounters>,
    pub(super) mailbox: Arc<Mailbox>,
}

/// What all workers get.
pub(super) struct WorkerStart<'a> {
    pub(super) settings: &'a Settings,
    pub(super) eal: Eal,
    pub(super) ownership: &'a Arc<VipOwnership>,
    pub(super) neighbour_requests: &'a Arc<ArrayQueue<(Link, IpAddr)>>,
    pub(super) outlets: &'a FlowOutlets,
    pub(super) transfer: &'a FlowTransfer,
}

/// Where a worker runs, and how it sleeps.
struct Thread {
    number: usize,
    core: CoreId,
    rest: Option<Rest>,
}

/// What a worker shares with tasks.
struct Shared {
    /// Inquiries.
    mailbox: Arc<Mailbox>,
    /// Replicas of flows; `None` without replication.
    replicas: Option<Arc<FlowReplication>>,
}

impl WorkerStart<'_> {
    /// Starts a worker on each core.
    ///
    /// # Errors
    /// If there is no memory for its tables, or its thread cannot be started.
    pub(super) fn start(&self, all: Vec<WorkerParts>) -> Result<Vec<worker_threads::Worker>, WorkersError> {
        let numbered = all.into_iter().zip(&self.settings.cores).enumerate();
        numbered.map(|(number, (parts, core))| self.start_one(number, CoreId { id: *core }, parts)).collect()
    }

    fn start_one(&self, number: usize, core: CoreId, own: WorkerParts) -> Result<worker_threads::Worker, WorkersError> {
        let WorkerPorts { ports, peers, bell } = own.ports;
        let max_flows = self.settings.flows.max_per_worker;
        let thread = Thread { number, core, rest: bell.map(|bell| Rest { bell, max_flows }) };
        let shared = Shared { mailbox: own.mailbox, replicas: self.outlets.exchange.queue(number).cloned() };
        let parts = Parts {
            ports,
            subscriber: own.subscriber,
            limits: self.settings.flows.clone(),
            counters: own.counters,
            neighbour_requests: Arc::clone(self.neighbour_requests),
            peers,
            seed: self.transfer.seed(),
            observer: (),
        };
        match self.outlets.export.queue(number) {
            None => self.spawn(thread, Worker::new(parts)?, shared),
            Some(records) => {
                let mut worker = Worker::new(parts.observed_by(Metered))?;
                worker.record(records)?;
                self.spawn(thread, worker, shared)
            }
        }
    }

    fn spawn<O>(
        &self,
        thread: Thread,
        worker: Worker<DpdkPort, O>,
        shared: Shared,
    ) -> Result<worker_threads::Worker, WorkersError>
    where
        O: Observe<<DpdkPort as Port>::Buffer> + Send + 'static,
    {
        let counters = Arc::clone(worker.counters());
        let mut originated = 0;
        let mut worker = worker.answering(shared.mailbox);
        worker.own_by(Arc::clone(self.ownership), worker_threads::now_ns);
        if let Some(replicas) = shared.replicas {
            worker.replicate(replicas);
        }
        if let Some(flows) = self.transfer.waiting() {
            worker.restore(flows);
        }
        let saved = Arc::clone(&self.transfer.saved);
        let body = move |turn: Turn<'_>| {
            match turn {
                Turn::Poll { now_ns } => return worker.poll(now_ns),
                Turn::Arm => for_each_port(&mut worker, |port| port.arm(true)),
                Turn::Sleep(sleep) => {
                    let before = std::mem::replace(&mut originated, counters.originated.get());
                    if originated != before || counters.held.get() > 0 {
                        sleep.at_most(Sleep::PENDING);
                    }
                    for_each_port(&mut worker, |port| sleep.wake_for(port));
                    worker.subscriber_mut().sleep();
                }
                // The next poll first checks for a new snapshot.
                Turn::Wake => for_each_port(&mut worker, |port| port.arm(false)),
                Turn::End => {
                    let now_ns = worker_threads::now_ns();
                    let part = worker.save(now_ns);
                    worker.record_stop(now_ns);
                    saved.lock().unwrap_or_else(PoisonError::into_inner).push(part);
                }
            }
            0
        };
        let Thread { number, core, rest } = thread;
        Ok(worker_threads::spawn(number, core, rest, Some(self.eal), body)?)
    }
}

fn for_each_port<O>(worker: &mut Worker<DpdkPort, O>, mut call: impl FnMut(&mut DpdkPort))
where
    O: Observe<<DpdkPort as Port>::Buffer>,
{
    for index in (0..=u8::MAX).map(PortIndex) {
        let Some(port) = worker.port_mut(index) else { return };
        call(port);
    }
}
