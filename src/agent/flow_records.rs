//! The export of flow records: from the queues of workers to a collector, or to a file.
//!
//! Invariant: at most [`QUEUE_RECORDS`] records of a worker wait. A target that is slow or away costs records, which are
//! counted, never packets or memory. Its failure is logged once, and its recovery once.
//!
//! Not here: metering (`dataplane`), and the two formats.

mod ipfix;
mod json_lines;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use dataplane::Snapshot;
use dataplane::flow::{FlowEvent, FlowRecord, FlowRecords};
use tokio_util::sync::CancellationToken;

use super::inquiries::Inquiries;
use super::supervisor::Failure;
use crate::settings::RecordTarget;
use crate::worker_threads::now_ns;
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

/// A record with what the agent knows of it.
struct KnownRecord {
    record: FlowRecord,
    worker: usize,
    /// The backend's address and port, and its Service; none of a backend that is gone.
    backend: Option<(std::net::SocketAddr, String)>,
    /// Start and end of the interval, ms since 1970.
    start_ms: u64,
    end_ms: u64,
}

/// The present, and the offset from the monotonic clock of workers to the time since 1970.
#[derive(Clone, Copy)]
struct WallClock {
    offset_ns: u128,
    monotonic_ns: u64,
}

impl WallClock {
    /// Smaller differences of the offset do not count, so that all records of a flow have the same start.
    const STEP_NS: u128 = 100_000_000;

    fn now() -> Self {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let monotonic_ns = now_ns();
        Self { offset_ns: unix.as_nanos().saturating_sub(monotonic_ns.into()), monotonic_ns }
    }

    /// The present, by the same offset unless the clock was set.
    fn follow(&mut self, now: Self) {
        let is_set = now.offset_ns.abs_diff(self.offset_ns) >= Self::STEP_NS;
        *self = Self { offset_ns: if is_set { now.offset_ns } else { self.offset_ns }, ..now };
    }

    /// ms since 1970.
    fn ms_at(self, monotonic_ns: u64) -> u64 {
        u64::try_from((self.offset_ns + u128::from(monotonic_ns)) / 1_000_000).unwrap_or(u64::MAX)
    }

    /// s since 1970, until 2106 (RFC 7011 section 3.1).
    fn seconds(self) -> u32 {
        u32::try_from((self.offset_ns + u128::from(self.monotonic_ns)) / 1_000_000_000).unwrap_or(u32::MAX)
    }
}

impl KnownRecord {
    fn new(record: FlowRecord, worker: usize, snapshot: &Snapshot, clock: WallClock) -> Self {
        let backend = snapshot.backend(record.flow.backend);
        Self {
            record,
            worker,
            backend: backend.map(|backend| (backend.address, backend.service.to_string())),
            start_ms: clock.ms_at(record.start_ns),
            end_ms: clock.ms_at(record.end_ns),
        }
    }

    /// The backend. In one-way modes a flow does not know its port.
    fn backend(&self) -> std::net::SocketAddr {
        match &self.backend {
            Some((address, _)) if !self.record.flow.mode.is_two_way() => *address,
            _ => self.record.flow.backend_address,
        }
    }
}

/// Where records go.
enum Target {
    Collector(Collector),
    File(LinesFile),
}

impl Target {
    /// Exports the records of one worker. Returns how many were lost, and why.
    async fn export(&mut self, records: &[KnownRecord], clock: WallClock) -> (usize, Option<std::io::Error>) {
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
struct TargetHealth {
    failed: Option<Instant>,
}

impl TargetHealth {
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

/// Exports what workers record until `ended`, and then what is left.
///
/// # Errors
/// None; its type is that of a task.
pub async fn run(
    gateway: String,
    target: RecordTarget,
    export: Arc<FlowExport>,
    inquiries: Arc<Inquiries>,
    ended: CancellationToken,
) -> Result<(), Failure> {
    let mut open = match &target {
        RecordTarget::Ipfix { host, port } => Target::Collector(Collector::new(host.clone(), *port, export.queues.len())),
        RecordTarget::File(path) => Target::File(LinesFile::new(path.clone(), gateway)),
    };
    let mut health = TargetHealth::default();
    let mut clock = WallClock::now();
    let mut is_last = false;
    while !is_last {
        is_last = ended.run_until_cancelled(tokio::time::sleep(EXPORT_EVERY)).await.is_none();
        clock.follow(WallClock::now());
        for (worker, queue) in export.queues.iter().enumerate() {
            // One turn takes at most what fits into the queue, so that every worker has its turn.
            for _ in 0..QUEUE_RECORDS / BATCH {
                let snapshot = inquiries.snapshot();
                let taken = std::iter::from_fn(|| queue.take()).take(BATCH);
                let records: Vec<_> = taken.map(|record| KnownRecord::new(record, worker, &snapshot, clock)).collect();
                drop(snapshot);
                if records.is_empty() {
                    break;
                }
                let (lost, error) = open.export(&records, clock).await;
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
        if let Target::Collector(collector) = &mut open {
            // What fails is told by the next record.
            let _ = collector.refresh(clock).await;
        }
    }
    Ok(())
}

/// The words of a record: its event, and the reason of its end.
const fn words(event: FlowEvent) -> (&'static str, &'static str) {
    match event {
        FlowEvent::Start => ("start", ""),
        FlowEvent::Interim => ("interim", ""),
        FlowEvent::End(why) => ("end", why.as_str()),
    }
}

#[cfg(test)]
mod tests_record {
    use dataplane::BackendId;
    use dataplane::flow::{FlowMode, FlowState, FlowTraffic, FlowView, Ticks};

    use super::*;

    /// A record of a flow in mode `nat`.
    pub(super) fn record(event: FlowEvent) -> KnownRecord {
        let flow = FlowView {
            protocol: 6,
            client: "192.0.2.10:40000".parse().unwrap(),
            frontend: "192.0.2.100:80".parse().unwrap(),
            backend: BackendId::default(),
            backend_address: "10.0.0.11:8080".parse().unwrap(),
            snat: Some("10.0.0.3:1025".parse().unwrap()),
            mode: FlowMode::Nat,
            state: FlowState::TcpClosing,
            age: Ticks(0),
            idle: Ticks(0),
        };
        let record = FlowRecord {
            event,
            flow,
            to_backend: FlowTraffic { packets: 6, octets: 500 },
            to_client: FlowTraffic { packets: 4, octets: 100_000 },
            start_ns: 0,
            end_ns: 0,
        };
        let backend = Some((flow.backend_address, "default/web".to_owned()));
        KnownRecord { record, worker: 1, backend, start_ms: 1_700_000_000_000, end_ms: 1_700_000_002_500 }
    }

    /// A record of a flow in mode `gue`.
    pub(super) fn one_way(event: FlowEvent) -> KnownRecord {
        let mut known = record(event);
        known.record.flow.mode = FlowMode::Gue;
        (known.record.flow.snat, known.record.to_client) = (None, FlowTraffic::default());
        known.record.flow.backend_address.set_port(0);
        known.backend = Some(("10.0.0.12:80".parse().unwrap(), "default/web".to_owned()));
        known
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::*;

    #[test]
    fn a_failing_target_is_logged_once_and_so_is_its_recovery() {
        let mut health = TargetHealth::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let refused = || Some(Error::from(ErrorKind::ConnectionRefused));
        assert!(health.note(None, at(0)).is_none());
        assert!(matches!(health.note(refused(), at(1)), Some(Err(_))));
        // A refusal is told one message late, so that single messages seem to arrive.
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
    fn times_of_workers_become_times_since_1970() {
        let mut clock = WallClock { offset_ns: 1_700_000_000_000_000_000, monotonic_ns: 5_000_000_000 };
        assert_eq!((clock.ms_at(4_998_500_000), clock.seconds()), (1_700_000_004_998, 1_700_000_005));
        clock.follow(WallClock { offset_ns: clock.offset_ns + 99_999_999, monotonic_ns: 6_000_000_000 });
        assert_eq!((clock.ms_at(4_998_500_000), clock.seconds()), (1_700_000_004_998, 1_700_000_006), "the same start");
        clock.follow(WallClock { offset_ns: clock.offset_ns - 3_600_000_000_000, monotonic_ns: 7_000_000_000 });
        assert_eq!(clock.ms_at(4_998_500_000), 1_699_996_404_998, "the clock was set");
        let export = FlowExport::new(None, 4);
        assert!(export.queue(0).is_none(), "nothing is recorded without a target");
    }
}
