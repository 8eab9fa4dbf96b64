//! Inquiries to the workers: their flows page by page, explanations of packets, the captures that they run, and the flows
//! that they end.
//!
//! Invariant: a worker does a bounded amount of work for them in a poll and in 2 ms: at most [`INQUIRIES_MAX`] inquiries
//! of [`FLOWS_PER_INQUIRY`] flows, so half a million flows a second, whoever asks and in however many pages. One
//! request is served at a time, so at most one snapshot is held. Flows end at [`ENDS_PER_SECOND`] in all.
//! Deliberately not here: how a worker answers (`dataplane::forward`), and text for operators (`admin`).

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use dataplane::flow::{Flow, FlowView, FlowWatch, Tick};
use dataplane::forward::{
    About, ENDS_PER_INQUIRY, EndedFlow, ExplainError, ExplainedPacket, Explainer, Explanation, FLOWS_PER_INQUIRY, FamilyInquiry,
    FlowEnds, INQUIRIES_MAX, Inquired, Inquiry, Mailbox, WorkerCapture,
};
use dataplane::snapshot::SnapshotReader;
use dataplane::{Address, Snapshot};
use proto::Family;

/// Entries of a table that an inquiry visits.
const ENTRIES: u32 = 64;
const _: () = assert!(ENTRIES as usize == FLOWS_PER_INQUIRY);
/// How long a worker may take to answer. It answers after the current poll, or after the doorbell has woken it.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// Time between two looks for an answer.
const LOOK: Duration = Duration::from_micros(50);
/// Minimum duration of a round of a listing, [`INQUIRIES_MAX`] inquiries.
const ROUND: Duration = Duration::from_millis(2);
/// Rounds of one page: 64 x 1,024 flows, 128 ms, well below the timeout of a client.
const ROUNDS_MAX: u32 = 64;

/// Flows that end in a second. Each end of a connection is sent a RST, of which a network of clients or backends gets
/// 1,000 a second (`dataplane::icmp`): more would not be sent.
pub const ENDS_PER_SECOND: u64 = 800;
/// Time between two inquiries that end flows: 40 ms.
const END_ROUND: Duration = Duration::from_micros(1_000_000 * ENDS_PER_INQUIRY as u64 / ENDS_PER_SECOND);

/// A worker gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("worker {worker} gave no answer within {} ms; `sluicectl ports` and the log say whether it runs", ANSWER_TIMEOUT.as_millis())]
pub struct NoAnswer {
    /// The worker.
    pub worker: usize,
}

/// A position in the listing of all flows: by worker, then family, then position in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowPosition {
    /// The worker.
    pub worker: usize,
    /// The family.
    pub family: Family,
    /// The position in its table.
    pub entry: u32,
}

impl FlowPosition {
    /// The first one.
    pub const FIRST: Self = Self { worker: 0, family: Family::V4, entry: 0 };

    /// Where the next table begins.
    const fn next_table(self) -> Self {
        match self.family {
            Family::V4 => Self { family: Family::V6, entry: 0, ..self },
            Family::V6 => Self { worker: self.worker + 1, family: Family::V4, entry: 0 },
        }
    }
}

/// Asks the workers of a gateway.
#[derive(Debug)]
pub struct Inquiries {
    /// Of each worker, in their order.
    mailboxes: Vec<Arc<Mailbox>>,
    snapshots: SnapshotReader,
    asking: Mutex<Asking>,
}

#[derive(Debug)]
struct Asking {
    explainer: Explainer,
    /// Number of the last inquiry.
    last: u64,
    /// When the next round of a listing may begin, of whichever request.
    next_round: Instant,
    /// When the next flows may end, of whichever request.
    next_ends: Instant,
}

impl Inquiries {
    /// Of workers with these mailboxes, in their order.
    #[must_use]
    pub fn new(mailboxes: Vec<Arc<Mailbox>>, explainer: Explainer, snapshots: SnapshotReader) -> Self {
        let now = Instant::now();
        Self { mailboxes, snapshots, asking: Mutex::new(Asking { explainer, last: 0, next_round: now, next_ends: now }) }
    }

    /// The newest snapshot, to be dropped soon.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshots.current()
    }

    /// Explains a packet, and returns the snapshot of the explanation. Waits for a worker.
    ///
    /// # Errors
    /// If the worker gives no answer, or the packet's addresses are of different families.
    pub fn explain(&self, packet: &ExplainedPacket) -> Result<(Explanation, Arc<Snapshot>), ExplainError<NoAnswer>> {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let Asking { explainer, last, .. } = &mut *asking;
        let snapshot = self.snapshots.current();
        let explained = explainer.explain(packet, &snapshot, |worker, inquired| {
            let mailbox = self.mailboxes.get(worker).ok_or(NoAnswer { worker })?;
            *last += 1;
            self.ask(worker, mailbox, Inquiry::new(*last, inquired))?;
            self.answer(worker, mailbox, *last)
        })?;
        Ok((explained, snapshot))
    }

    /// Passes flows from a position on to `each` until it has taken `limit` flows (it says whether it takes one), the page
    /// has lasted long enough, or there are no more. Returns where the next page begins. Waits for workers.
    ///
    /// # Errors
    /// If a worker gives no answer.
    pub fn flows(
        &self,
        from: FlowPosition,
        limit: usize,
        mut each: impl FnMut(usize, &FlowView) -> bool,
    ) -> Result<Option<FlowPosition>, NoAnswer> {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut position, mut taken) = (from, 0);
        for _ in 0..ROUNDS_MAX {
            let Some(mailbox) = self.mailboxes.get(position.worker) else { return Ok(None) };
            thread::sleep(asking.next_round.saturating_duration_since(Instant::now()));
            asking.next_round = Instant::now() + ROUND;
            let first = asking.last + 1;
            for inquiry in (0..).take(INQUIRIES_MAX) {
                asking.last += 1;
                let entry = position.entry.saturating_add(inquiry * ENTRIES);
                self.ask(position.worker, mailbox, Inquiry::new(asking.last, about_flows(position.family, entry)))?;
            }
            let mut next = None;
            let mut is_complete = false;
            for id in first..=asking.last {
                let answer = self.answer(position.worker, mailbox, id)?;
                if is_complete {
                    continue;
                }
                next = each_flow(&answer, |flow| taken += usize::from(each(position.worker, flow)));
                is_complete = next.is_none() || taken >= limit;
            }
            position = match next {
                Some(entry) => FlowPosition { entry, ..position },
                None => position.next_table(),
            };
            if taken >= limit {
                break;
            }
        }
        Ok((position.worker < self.mailboxes.len()).then_some(position))
    }

    /// Ends flows of a worker, at [`ENDS_PER_SECOND`], and returns how many of them it has ended. Other requests go on
    /// meanwhile. Waits for the worker.
    ///
    /// # Errors
    /// If the worker gives no answer; flows before may have ended.
    pub fn end_flows(&self, worker: usize, flows: &[EndedFlow]) -> Result<u64, NoAnswer> {
        let mailbox = self.mailboxes.get(worker).ok_or(NoAnswer { worker })?;
        let mut ended = 0;
        for part in flows.chunks(ENDS_PER_INQUIRY) {
            let wait = {
                let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
                let begins = asking.next_ends.max(Instant::now());
                asking.next_ends = begins + END_ROUND;
                begins.saturating_duration_since(Instant::now())
            };
            thread::sleep(wait);
            let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
            asking.last += 1;
            let ends = FlowEnds { flows: part.iter().copied().collect(), ended: 0 };
            self.ask(worker, mailbox, Inquiry::new(asking.last, Inquired::End(ends)))?;
            if let Inquired::End(ends) = &self.answer(worker, mailbox, asking.last)?.inquired {
                ended += u64::from(ends.ended);
            }
        }
        Ok(ended)
    }

    /// Number of workers.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.mailboxes.len()
    }

    /// Gives each worker the capture that it shall run, or none, and returns those that they ran before. Waits for workers.
    ///
    /// # Errors
    /// If a worker gives no answer; workers before it have theirs.
    pub fn exchange_captures(
        &self,
        next: impl IntoIterator<Item = Option<Box<WorkerCapture>>>,
    ) -> Result<Vec<Box<WorkerCapture>>, NoAnswer> {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        let mut earlier = Vec::new();
        for ((worker, mailbox), capture) in self.mailboxes.iter().enumerate().zip(next) {
            asking.last += 1;
            self.ask(worker, mailbox, Inquiry::new(asking.last, Inquired::Capture(capture)))?;
            if let Inquired::Capture(Some(capture)) = self.answer(worker, mailbox, asking.last)?.inquired {
                earlier.push(capture);
            }
        }
        Ok(earlier)
    }

    /// Gives each worker the watch that it shall write to, or none. Waits for workers.
    ///
    /// # Errors
    /// If a worker gives no answer; workers before it have theirs.
    pub fn exchange_watches(&self, next: impl IntoIterator<Item = Option<Arc<FlowWatch>>>) -> Result<(), NoAnswer> {
        let mut asking = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        for ((worker, mailbox), watch) in self.mailboxes.iter().enumerate().zip(next) {
            asking.last += 1;
            self.ask(worker, mailbox, Inquiry::new(asking.last, Inquired::Watch(watch)))?;
            // The watch before comes back, to be freed here.
            self.answer(worker, mailbox, asking.last)?;
        }
        Ok(())
    }

    fn ask(&self, worker: usize, mailbox: &Mailbox, inquiry: Inquiry) -> Result<(), NoAnswer> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut inquiry = Box::new(inquiry);
        while let Err(refused) = mailbox.ask(inquiry) {
            // Of requests whose time was up.
            drop(mailbox.take_answer());
            if Instant::now() > deadline {
                return Err(NoAnswer { worker });
            }
            inquiry = refused;
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn answer(&self, worker: usize, mailbox: &Mailbox, id: u64) -> Result<Box<Inquiry>, NoAnswer> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            match mailbox.take_answer() {
                Some(answer) if answer.id == id => return Ok(answer),
                // Of a request whose time was up.
                Some(_) => {}
                None if Instant::now() > deadline => return Err(NoAnswer { worker }),
                None => thread::sleep(LOOK),
            }
        }
    }
}

const fn about_flows(family: Family, from: u32) -> Inquired {
    match family {
        Family::V4 => Inquired::V4(FamilyInquiry::new(About::Flows { from })),
        Family::V6 => Inquired::V6(FamilyInquiry::new(About::Flows { from })),
    }
}

/// Passes on the flows of an answer, and returns the entry after them.
fn each_flow(answer: &Inquiry, mut each: impl FnMut(&FlowView)) -> Option<u32> {
    fn visit<A: Address>(inquiry: &FamilyInquiry<A>, now: Tick, each: &mut impl FnMut(&FlowView)) -> Option<u32> {
        inquiry.flows.iter().for_each(|flow: &Flow<A>| each(&FlowView::of(flow, now)));
        inquiry.next
    }
    let now = Tick::at(answer.now_ns);
    match &answer.inquired {
        Inquired::V4(inquiry) => visit(inquiry, now, &mut each),
        Inquired::V6(inquiry) => visit(inquiry, now, &mut each),
        Inquired::Capture(_) | Inquired::End(_) | Inquired::Watch(_) => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use dataplane::workers::Steering;
    use dataplane::{Compiler, Config, FlowLimits, Publisher, Tunnel};

    use super::*;

    fn explainer() -> Explainer {
        Explainer::new(Steering::own_hash(1, 7), 7)
    }

    fn publisher() -> Publisher {
        let (ports, snat, node_port_addresses) = (vec![], vec![], vec![]);
        let (shared_snat, flows, tunnel) = (false, FlowLimits::default(), Tunnel::default());
        let targets_max = dataplane::flow::TARGETS_MAX;
        let config = Config { ports, snat, shared_snat, node_port_addresses, flows, targets_max, tunnel };
        Publisher::new(Compiler::new(config).initial(), 0).0
    }

    /// Of a gateway without workers.
    pub(crate) fn without_workers() -> Inquiries {
        Inquiries::new(Vec::new(), explainer(), publisher().reader())
    }

    #[test]
    fn a_worker_that_does_not_answer_is_named_and_a_late_answer_is_not_mistaken_for_another() {
        let mailbox = Arc::new(Mailbox::new(None));
        let inquiries = Inquiries::new(vec![Arc::clone(&mailbox)], explainer(), publisher().reader());
        let error = inquiries.flows(FlowPosition::FIRST, 1, |_, _| true).unwrap_err();
        assert_eq!(error, NoAnswer { worker: 0 });
        assert!(error.to_string().contains("worker 0 gave no answer within 500 ms"), "{error}");
        let error = inquiries.flows(FlowPosition::FIRST, 1, |_, _| true).unwrap_err();
        assert_eq!(error, NoAnswer { worker: 0 }, "sixteen inquiries wait, and no more are queued");
    }

    #[test]
    fn tables_are_listed_by_worker_and_family() {
        let second = FlowPosition::FIRST.next_table();
        assert_eq!((second.worker, second.family, second.entry), (0, Family::V6, 0));
        assert_eq!(second.next_table(), FlowPosition { worker: 1, ..FlowPosition::FIRST });
        assert_eq!(without_workers().flows(FlowPosition::FIRST, 10, |_, _| true), Ok(None));
    }
}
