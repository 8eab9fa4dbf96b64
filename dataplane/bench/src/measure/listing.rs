//! The cost of a listing of all flows, while packets arrive as fast as the worker takes them.
//!
//! A thread on another core lists all flows again and again, as the caller lists them: by the inquiries and at the pace of
//! `sluicectl flows`. Slices with and without it alternate, and the medians count: what disturbs the machine for a while
//! disturbs both.
//!
//! Not here: how a worker answers (`dataplane::forward`), and the inquiries (the caller).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dataplane::forward::{Explainer, Mailbox};
use dataplane::snapshot::SnapshotReader;
use dataplane::workers::Steering;

use super::super::error::BenchError;
use super::super::harness::Harness;
use super::super::report::{ListingCost, Measured};
use super::super::scenario::{self, SEED};
use super::super::traffic::Stage;
use super::flow_pages::{FlowPages, ListedWorker};
use super::{Polled, Session};

/// Time between two looks whether to list.
const LOOK: Duration = Duration::from_millis(1);

/// Lists the flows of a worker while a listing is wanted. Ends when it is dropped.
struct Lister {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    is_wanted: AtomicBool,
    is_over: AtomicBool,
    listed: AtomicU64,
}

impl Lister {
    /// On this core.
    ///
    /// # Errors
    /// If there is no such core, or no thread.
    fn start(core: usize, pages: FlowPages) -> Result<Self, BenchError> {
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let (pinning, is_pinned) = mpsc::channel();
        let list = move || {
            let pinned = core_affinity::set_for_current(core_affinity::CoreId { id: core });
            if pinning.send(pinned).is_ok() && pinned {
                of_thread.list(pages);
            }
        };
        let thread = Some(thread::Builder::new().name("listing".into()).spawn(list)?);
        if is_pinned.recv() == Ok(true) { Ok(Self { shared, thread }) } else { Err(BenchError::Core(core)) }
    }
}

impl Drop for Lister {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl Shared {
    fn list(&self, mut pages: FlowPages) {
        while !self.is_over.load(Ordering::Relaxed) {
            if !self.is_wanted.load(Ordering::Relaxed) {
                thread::sleep(LOOK);
                continue;
            }
            pages(&self.listed);
        }
    }
}

impl<H: Harness, E: Polled> Session<'_, H, E> {
    /// Measures with and without a listing of the flows of the worker that answers by this mailbox, in turn.
    pub(super) fn listing(
        &mut self,
        mailbox: Arc<Mailbox>,
        snapshots: SnapshotReader,
        stage: Option<Stage>,
    ) -> Result<ListingCost, BenchError> {
        let explainer = Explainer::new(Steering::own_hash(1, SEED), SEED);
        let pages = (self.bench.list)(ListedWorker { mailbox, explainer, snapshots });
        let lister = Lister::start(scenario::second_core(&self.bench.scenario.options), pages)?;
        let wanted = Duration::from_secs(self.bench.scenario.options.seconds.into());
        let (mut each, mut listed) = ([Vec::new(), Vec::new()], 0);
        let mut elapsed = Duration::ZERO;
        while elapsed < wanted {
            for (is_listed, times) in [false, true].into_iter().zip(&mut each) {
                lister.shared.is_wanted.store(is_listed, Ordering::Relaxed);
                let before = lister.shared.listed.load(Ordering::Relaxed);
                let mut slice = Measured::none(self.bench.rate);
                self.slice(&mut slice);
                if is_listed {
                    listed += lister.shared.listed.load(Ordering::Relaxed) - before;
                    elapsed += slice.times.elapsed();
                }
                times.push(slice.times.ns_per_packet());
                self.rest(stage)?;
                self.meeting.resume();
            }
        }
        let [without_ns, ns_per_packet] = each.map(median);
        #[allow(clippy::cast_precision_loss)] // counts stay below 2^53
        let flows_per_second = listed as f64 / elapsed.as_secs_f64();
        Ok(ListingCost { ns_per_packet, without_ns, flows_per_second })
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
