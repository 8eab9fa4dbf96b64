//! The export of flow records: from the queues of workers to a collector, or to a file.
//!
//! Invariant: at most `QUEUE_RECORDS` records of a worker wait. A target that is slow or away costs records, which are
//! counted, never packets or memory. Its failure is logged once, and its recovery once.
//!
//! Not here: metering (`dataplane`), and the two formats.

mod enriched_record;
mod ipfix;
mod json_lines;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataplane::flow::FlowRecords;
use tokio_util::sync::CancellationToken;

use crate::agent::supervisor::Failure;
use crate::settings::RecordTarget;
use crate::worker_threads::inquiries::Inquiries;
use enriched_record::{EnrichedRecord, WallClock};
use ipfix::Collector;
use json_lines::LinesFile;

/// Records of a worker that may wait: 16,384 x 208 B = 3.4 MB. At [`EXPORT_EVERY`] they are 160,000 a second.
const QUEUE_RECORDS: usize = 16_384;
/// Interval at which waiting records are exported.
const EXPORT_EVERY: Duration = Duration::from_millis(100);
/// Records that are formatted together.
const BATCH: usize = 1_024;
/// A target that failed counts as working again after this time without a failure.
const RECOVERED_AFTER: Duration = Duration::from_secs(10);

/// What the workers record, and what became of it.
#[derive(Debug, Default)]
pub struct FlowExport {
    queues: Vec<Arc<FlowRecords>>,
    exported: AtomicU64,
    lost: AtomicU64,
}

impl FlowExport {
    /// For this number of workers; without a target nothing is recorded.
    #[must_use]
    pub fn new(target: Option<&RecordTarget>, workers: usize) -> Self {
        let workers = if target.is_some() { workers } else { 0 };
        Self { queues: (0..workers).map(|_| Arc::new(FlowRecords::new(QUEUE_RECORDS))).collect(), ..Self::default() }
    }

    /// The queue of a worker; none when nothing is recorded.
    #[must_use]
    pub fn queue(&self, worker: usize) -> Option<&Arc<FlowRecords>> {
        self.queues.get(worker)
    }

    /// Numbers of records by what became of them: sent or written, lost for want of room in a queue, lost because the
    /// target failed.
    #[must_use]
    pub fn outcomes(&self) -> [(&'static str, u64); 3] {
        let full = self.queues.iter().map(|queue| queue.dropped().get()).sum();
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [("exported", of(&self.exported)), ("queue_full", full), ("target_failed", of(&self.lost))]
    }
}

/// Where records go.
enum Sink {
    Collector(Collector),
    File(LinesFile),
}

impl Sink {
    /// Exports the records of one worker. Returns how many were lost, and why.
    async fn export(&mut self, records: &[EnrichedRecord], clock: WallClock) -> (usize, Option<std::io::Error>) {
        match self {
            Self::Collector(collector) => collector.send(records, clock).await,
            Self::File(file) => match file.append(records).await {
                Ok(()) => (0, None),
                Err(error) => (records.len(), Some(error)),
            },
        }
    }
}

/// Whether the target works, for the log.
#[derive(Default)]
struct SinkHealth {
    failed: Option<Instant>,
}

impl SinkHealth {
    /// Notes what became of records. Returns a line for the log: it fails (`Err`), or works again.
    fn note(&mut self, error: Option<std::io::Error>, now: Instant) -> Option<Result<(), std::io::Error>> {
        match (error, self.failed) {
            (Some(error), before) => {
                self.failed = Some(now);
                before.is_none().then_some(Err(error))
            }
            (None, Some(failed)) if now.saturating_duration_since(failed) >= RECOVERED_AFTER => {
                self.failed = None;
                Some(Ok(()))
            }
            (None, _) => None,
        }
    }
}

/// The task that exports flow records. Cloned for each start.
#[derive(Clone, Debug)]
pub struct FlowExporter {
    /// This gateway's name.
    pub gateway: String,
    /// Key `flowRecords.to`.
    pub target: RecordTarget,
    /// The queues of the workers.
    pub export: Arc<FlowExport>,
    /// The snapshot that names Services.
    pub inquiries: Arc<Inquiries>,
    /// Cancelled at the end: what is left is exported.
    pub shutdown: CancellationToken,
}

impl FlowExporter {
    /// Exports what workers record until `shutdown`, and then what is left.
    ///
    /// # Errors
    /// None; its type is that of a task.
    pub async fn run(self) -> Result<(), Failure> {
        let Self { gateway, target, export, inquiries, shutdown } = self;
        let mut sink = match &target {
            RecordTarget::Ipfix(at) => Sink::Collector(Collector::new(at.clone(), export.queues.len())),
            RecordTarget::File(path) => Sink::File(LinesFile::new(path.clone(), gateway)),
        };
        let mut health = SinkHealth::default();
        let mut clock = WallClock::now();
        let mut is_last = false;
        while !is_last {
            is_last = shutdown.run_until_cancelled(tokio::time::sleep(EXPORT_EVERY)).await.is_none();
            clock.follow(WallClock::now());
            for (worker, queue) in export.queues.iter().enumerate() {
                // One turn takes at most what fits into the queue, so that every worker has its turn.
                for _ in 0..QUEUE_RECORDS / BATCH {
                    let snapshot = inquiries.snapshot();
                    let taken = std::iter::from_fn(|| queue.take()).take(BATCH);
                    let records: Vec<_> = taken.map(|record| EnrichedRecord::new(record, worker, &snapshot, clock)).collect();
                    drop(snapshot);
                    if records.is_empty() {
                        break;
                    }
                    let (lost, error) = sink.export(&records, clock).await;
                    export.lost.fetch_add(lost as u64, Ordering::Relaxed);
                    export.exported.fetch_add((records.len() - lost) as u64, Ordering::Relaxed);
                    match health.note(error, Instant::now()) {
                        Some(Err(error)) => {
                            tracing::warn!(%target, %error, "flow records are lost; sluice_flow_records_total counts them");
                        }
                        Some(Ok(())) => tracing::info!(%target, "flow records arrive again"),
                        None => {}
                    }
                }
            }
            if let Sink::Collector(collector) = &mut sink {
                // The next record reports a failure.
                let _ = collector.refresh(clock).await;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    #[test]
    fn a_failing_target_is_logged_once_and_so_is_its_recovery() {
        let mut health = SinkHealth::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let refused = || Some(Error::from(ErrorKind::ConnectionRefused));
        assert!(health.note(None, at(0)).is_none());
        assert!(matches!(health.note(refused(), at(1)), Some(Err(_))));
        // A refusal is reported one message late, so that single messages seem to arrive.
        for second in 2..60 {
            let error = if second % 2 == 0 { None } else { refused() };
            assert!(health.note(error, at(second)).is_none(), "second {second}");
        }
        assert!(health.note(None, at(60)).is_none(), "too early");
        assert!(matches!(health.note(None, at(69)), Some(Ok(()))));
        assert!(health.note(None, at(70)).is_none());
        assert!(matches!(health.note(refused(), at(71)), Some(Err(_))));
    }

    #[test]
    fn nothing_is_recorded_without_a_target() {
        let export = FlowExport::new(None, 4);
        assert!(export.queue(0).is_none());
        assert_eq!(export.outcomes().map(|(_, records)| records), [0; 3]);
    }
}
