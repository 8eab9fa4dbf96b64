//! Inquiries of the agent about a worker's flows and SNAT ports, and the mailbox that carries them
//! (docs/internals/decisions/0047). The mailbox carries captures and watches to the worker, and flows that
//! operators end, too.
//!
//! The agent allocates an inquiry with room for its answer, and the worker fills it in between two polls and returns it.
//!
//! **Invariant:** a worker answers at most one inquiry per poll and visits at most [`FLOWS_PER_INQUIRY`] flows for it. It
//! waits for nobody, allocates nothing, and changes no flow but those that it is asked to end, at most
//! [`ENDS_PER_INQUIRY`]. A flow keeps its position for its whole life, so a listing by position has every flow that lives
//! throughout exactly once.
//!
//! Not here: what the agent makes of an answer (`explain`, and `sluicectl flows`), and how a flow ends (`worker`).

use std::net::SocketAddr;
use std::sync::Arc;

use arrayvec::ArrayVec;
use crossbeam_queue::ArrayQueue;

use super::input::FlowTables;
use crate::flow::{BackendId, Flow, FlowTable, FlowWatch, LeaseOffer, PoolId, SnatPorts, SnatTarget, Tick, YieldClass};
use crate::forward::observer::WorkerCapture;
use crate::port::{Doorbell, Link};
use crate::snapshot::Snapshot;
use crate::wire::{Address, Tuple};

/// Maximum number of flows that an answer visits: 64 entries of at most 108 bytes, which are read in order.
pub const FLOWS_PER_INQUIRY: usize = 64;
/// Flows that the worker ends for one inquiry: two frames for each are half a burst.
pub const ENDS_PER_INQUIRY: usize = 32;
/// Inquiries that may wait for a worker at once.
pub const INQUIRIES_MAX: usize = 16;

/// The subject of an inquiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About<A> {
    /// The flow of packets with this tuple, in either direction.
    Flow(Tuple<A>),
    /// The SNAT lease that a new flow towards this target by this link would get. `start`: which address is tried first.
    Lease {
        /// The target.
        target: SnatTarget<A>,
        /// The link towards it.
        link: Link,
        /// The VIP of the flow.
        vip: A,
        /// See [`SnatPorts::allocate`].
        start: usize,
    },
    /// The flows from this position of the table on.
    Flows {
        /// The position; 0 at first.
        from: u32,
    },
}

/// An inquiry about one family, with its answer.
#[derive(Debug)]
pub struct FamilyInquiry<A: Address> {
    /// Its subject.
    pub about: About<A>,
    /// Answer: the flows.
    pub flows: ArrayVec<Flow<A>, FLOWS_PER_INQUIRY>,
    /// Answer to [`About::Flows`]: the position of the flows after these; `None` at the end of the table.
    pub next: Option<u32>,
    /// Answer to [`About::Lease`].
    pub offer: Option<LeaseOffer<A>>,
}

impl<A: Address> FamilyInquiry<A> {
    /// An inquiry without answer.
    #[must_use]
    pub const fn new(about: About<A>) -> Self {
        Self { about, flows: ArrayVec::new_const(), next: None, offer: None }
    }
}

/// A flow that an operator ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedFlow {
    /// Transport protocol number.
    pub protocol: u8,
    /// The client.
    pub client: SocketAddr,
    /// The frontend.
    pub frontend: SocketAddr,
    /// The backend: a flow that has begun anew meanwhile, to another one, goes on.
    pub backend: BackendId,
}

/// The flows to end, and how many of them the worker has ended.
#[derive(Debug, Default)]
pub struct FlowEnds {
    /// The flows.
    pub flows: ArrayVec<EndedFlow, ENDS_PER_INQUIRY>,
    /// Answer: how many the worker has ended, or ends with their next packet. Flows that another gateway owns, and those
    /// that have ended meanwhile, do not count.
    pub ended: u32,
}

/// What is asked for, flows by family.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // one allocation for an inquiry, by the agent
pub enum Inquired {
    /// IPv4.
    V4(FamilyInquiry<u32>),
    /// IPv6.
    V6(FamilyInquiry<u128>),
    /// The capture that the worker shall run, or none; the answer is the one that it ran before.
    Capture(Option<Box<WorkerCapture>>),
    /// Flows that the worker shall end.
    End(FlowEnds),
    /// The watch that the worker shall write to, or none; the answer is the one before.
    Watch(Option<Arc<FlowWatch>>),
}

/// An inquiry with its answer.
#[derive(Debug)]
pub struct Inquiry {
    /// Chosen by the agent, to recognise the answer.
    pub id: u64,
    /// The subject, and the answer to it.
    pub inquired: Inquired,
    /// Answer: the time of the worker (monotonic, ns).
    pub now_ns: u64,
    /// Answer: how many more flows the worker may have.
    pub room: u32,
    /// Answer: whether a flow yields when there is no room.
    pub yields: bool,
}

impl Inquiry {
    /// An inquiry without answer.
    #[must_use]
    pub const fn new(id: u64, inquired: Inquired) -> Self {
        Self { id, inquired, now_ns: 0, room: 0, yields: false }
    }

    /// Fills in the answer. Flows have been ended before.
    pub(in crate::forward) fn answer(&mut self, known: &KnownFlows<'_>, capture: &mut Option<Box<WorkerCapture>>, now_ns: u64) {
        let KnownFlows { tables: FlowTables { v4, v6 }, max_flows, .. } = *known;
        let yields = |class: &YieldClass| v4.oldest(*class).is_some() || v6.oldest(*class).is_some();
        self.now_ns = now_ns;
        self.room = max_flows.saturating_sub(v4.len() + v6.len());
        self.yields = YieldClass::ALL.iter().any(yields);
        match &mut self.inquired {
            Inquired::V4(inquiry) => inquiry.answer(v4, known, Tick::at(now_ns)),
            Inquired::V6(inquiry) => inquiry.answer(v6, known, Tick::at(now_ns)),
            Inquired::Capture(next) => std::mem::swap(next, capture),
            Inquired::End(_) | Inquired::Watch(_) => {}
        }
    }
}

impl<A: Address> FamilyInquiry<A> {
    fn answer(&mut self, table: &FlowTable<A>, known: &KnownFlows<'_>, now: Tick) {
        self.flows.clear();
        match self.about {
            About::Flow(tuple) => {
                let found = table.search(table.hash(&tuple), &tuple).map(|(index, _)| table.get(index));
                self.flows.extend(found);
            }
            About::Flows { from } => self.next = table.copy_from(from, &mut self.flows),
            About::Lease { target, link, vip, start } => {
                let addresses = known.snapshot.snat(link, vip);
                let yielding = || {
                    let pools = addresses.iter().map(|address| PoolId::new(target.slot, address.index));
                    let oldest = |pool| YieldClass::ALL.iter().find_map(|class| table.oldest_of(*class, pool));
                    let lease = pools.filter_map(oldest).find_map(|(index, _)| table.get(index).snat_lease())?;
                    Some(LeaseOffer { lease, is_early: true })
                };
                self.offer = known.ports.preview(target, addresses, start, now).or_else(yielding);
            }
        }
    }
}

/// What a worker knows that inquiries are about.
pub(in crate::forward) struct KnownFlows<'a> {
    pub(in crate::forward) tables: &'a FlowTables,
    pub(in crate::forward) ports: &'a SnatPorts,
    pub(in crate::forward) snapshot: &'a Snapshot,
    pub(in crate::forward) max_flows: u32,
}

/// The mailbox of one worker.
#[derive(Debug)]
pub struct Mailbox {
    asked: ArrayQueue<Box<Inquiry>>,
    answered: ArrayQueue<Box<Inquiry>>,
    /// The worker's; `None` if it never sleeps.
    doorbell: Option<Arc<Doorbell>>,
}

impl Mailbox {
    /// An empty mailbox of a worker with this doorbell.
    #[must_use]
    pub fn new(doorbell: Option<Arc<Doorbell>>) -> Self {
        Self { asked: ArrayQueue::new(INQUIRIES_MAX), answered: ArrayQueue::new(INQUIRIES_MAX), doorbell }
    }

    /// Asks the worker, and wakes it if it sleeps.
    ///
    /// # Errors
    /// The inquiry, when [`INQUIRIES_MAX`] wait already.
    pub fn ask(&self, inquiry: Box<Inquiry>) -> Result<(), Box<Inquiry>> {
        let asked = self.asked.push(inquiry);
        if let Some(doorbell) = &self.doorbell {
            doorbell.ring();
        }
        asked
    }

    /// The oldest answer that was not taken yet.
    #[must_use]
    pub fn take_answer(&self) -> Option<Box<Inquiry>> {
        self.answered.pop()
    }

    /// Whether an inquiry waits. The worker reads this once per poll.
    #[inline(always)]
    pub(in crate::forward) fn is_asked(&self) -> bool {
        !self.asked.is_empty()
    }

    /// Lets `answer` answer the oldest inquiry, if the agent has taken earlier answers.
    #[cold]
    #[inline(never)]
    pub(in crate::forward) fn answer_one(&self, answer: impl FnOnce(&mut Inquiry)) {
        if self.answered.is_full() {
            return;
        }
        if let Some(mut inquiry) = self.asked.pop() {
            answer(&mut inquiry);
            // There is room: only this worker pushes.
            let _ = self.answered.push(inquiry);
        }
    }
}
