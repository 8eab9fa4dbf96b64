//! Captures for `sluicectl capture` and `sluicectl trace`: workers are armed, their copies are streamed to the client, and
//! workers are disarmed when the client goes away.
//!
//! Invariant: one capture runs at a time. It ends with its client or with the gateway, and a client that is too slow
//! loses copies, which the workers count. The program of a filter comes from outside and is checked before a worker runs
//! it.
//! Deliberately not here: the compiler of filters, which is in `sluicectl` (docs/internals/decisions/0053), and the copies
//! themselves (`dataplane::forward`).

mod message;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control::admin::Caller;
use dataplane::forward::{CaptureQueue, WorkerCapture};
use dataplane::port::{FilterInstruction, PacketFilter};
use proto::v1;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::worker_threads;
use crate::worker_threads::inquiries::Inquiries;
use message::Naming;

/// Maximum and default length of a copy: more than a frame can have.
const SNAP_BYTES_MAX: u32 = 65_535;
/// Time between two looks for copies. A worker fills a batch of 64 packets in 3 ms at most.
const LOOK: Duration = Duration::from_millis(2);
/// Maximum time between two replies, which tell the client how much was seen.
const PROGRESS: Duration = Duration::from_millis(250);
/// How long a capture waits for the end of another one. The other's client may have gone away an instant ago, and the
/// gateway learns it from the connection.
const WAIT_FOR_END: Duration = Duration::from_secs(2);
/// Replies that wait for the client.
const REPLIES: usize = 16;
/// Bytes of frames after which a reply is sent; clients accept 4 MiB.
const REPLY_BYTES: usize = 1 << 20;

/// What a stream of replies carries.
pub(super) type Reply = Result<v1::CaptureReply, Status>;

/// The captures of a gateway.
#[derive(Debug)]
pub struct Captures {
    inquiries: Arc<Inquiries>,
    /// Its only permit is that of the capture that runs.
    place: Arc<Semaphore>,
    /// Who began the last capture.
    last_caller: Mutex<String>,
    shutdown: CancellationToken,
}

/// The only capture; the next one may begin when this is dropped.
pub(super) struct Place {
    captures: Arc<Captures>,
    caller: String,
    _permit: OwnedSemaphorePermit,
}

/// A capture that runs.
struct Running {
    queues: Vec<Arc<CaptureQueue>>,
    naming: Naming,
    expression: String,
    place: Place,
}

impl Captures {
    /// Captures of the workers that these inquiries reach.
    #[must_use]
    pub fn new(inquiries: Arc<Inquiries>) -> Self {
        let place = Arc::new(Semaphore::new(1));
        Self { inquiries, place, last_caller: Mutex::default(), shutdown: CancellationToken::new() }
    }

    /// Ends the one that runs, and lets none begin.
    pub fn end(&self) {
        self.shutdown.cancel();
    }

    /// The place of a capture, when no other one runs. Waits [`WAIT_FOR_END`] for the end of another one.
    ///
    /// # Errors
    /// Another capture runs, or the gateway ends.
    pub(super) async fn place(self: &Arc<Self>, caller: &Caller) -> Result<Place, Status> {
        if self.shutdown.is_cancelled() {
            return Err(Status::unavailable("the gateway ends"));
        }
        let Ok(Ok(permit)) = timeout(WAIT_FOR_END, Arc::clone(&self.place).acquire_owned()).await else {
            let other = self.last_caller.lock().unwrap_or_else(PoisonError::into_inner);
            return Err(Status::resource_exhausted(format!(
                "a capture or trace of {other} runs already, and a gateway runs one at a time; end that one first"
            )));
        };
        let caller = caller.to_string();
        self.last_caller.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&caller);
        Ok(Place { captures: Arc::clone(self), caller, _permit: permit })
    }

    /// Ends a capture. Waits for workers.
    fn disarm(&self, queues: &[Arc<CaptureQueue>]) {
        queues.iter().for_each(|queue| queue.close());
        if let Err(error) = self.inquiries.exchange_captures(queues.iter().map(|_| None)) {
            // It is closed, so the worker looks at no packet; the next capture takes its place.
            tracing::warn!(%error, "a worker keeps the memory of a capture");
        }
    }
}

impl Place {
    /// Begins the capture. Waits for workers.
    ///
    /// # Errors
    /// The filter is invalid, or a worker does not answer.
    pub(super) fn begin(self, request: &v1::CaptureRequest, runtime: &Handle) -> Result<mpsc::Receiver<Reply>, Status> {
        let filter = Arc::new(filter(request)?);
        let snap_bytes = match request.snap_bytes {
            0 => SNAP_BYTES_MAX,
            bytes if bytes <= SNAP_BYTES_MAX => bytes,
            bytes => return Err(Status::invalid_argument(format!("snap_bytes: found {bytes}, expected 1 to {SNAP_BYTES_MAX}"))),
        };
        let inquiries = &self.captures.inquiries;
        let (captures, queues): (Vec<_>, Vec<_>) =
            (0..inquiries.workers()).map(|_| WorkerCapture::new(Arc::clone(&filter), snap_bytes as usize)).unzip();
        if let Err(error) = inquiries.exchange_captures(captures.into_iter().map(Some)) {
            self.captures.disarm(&queues);
            return Err(Status::unavailable(error.to_string()));
        }
        let naming = Naming::new(&inquiries.snapshot(), clock_offset_ns());
        let expression = request.expression.clone();
        tracing::info!(caller = self.caller, filter = expression, "a capture begins");
        let (replies, receiver) = mpsc::channel(REPLIES);
        runtime.spawn(run(Running { queues, naming, expression, place: self }, replies));
        Ok(receiver)
    }
}

fn filter(request: &v1::CaptureRequest) -> Result<PacketFilter, Status> {
    let narrow = |row: &v1::FilterInstruction| {
        Some(FilterInstruction {
            code: row.code.try_into().ok()?,
            jump_true: row.jump_true.try_into().ok()?,
            jump_false: row.jump_false.try_into().ok()?,
            value: row.value,
        })
    };
    let program: Option<Vec<_>> = request.filter.iter().map(narrow).collect();
    let program = program.ok_or_else(|| Status::invalid_argument("filter: found a field above its range of struct bpf_insn"))?;
    PacketFilter::new(&program).map_err(|error| Status::invalid_argument(format!("filter: {error}")))
}

/// What to add to the workers' time for the time since 1970.
fn clock_offset_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX).saturating_sub(worker_threads::now_ns())
}

/// Passes copies on until the client goes away or the gateway ends.
async fn run(running: Running, replies: mpsc::Sender<Reply>) {
    let captures = Arc::clone(&running.place.captures);
    let first = v1::CaptureReply {
        interfaces: running.naming.interfaces().to_vec(),
        packets: Vec::new(),
        progress: Some(running.progress()),
    };
    let passes = async {
        replies.send(Ok(first)).await.ok()?;
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last = Instant::now();
        loop {
            looks.tick().await;
            let packets = running.take();
            if !packets.is_empty() || last.elapsed() >= PROGRESS {
                last = Instant::now();
                for reply in running.replies(packets) {
                    replies.send(Ok(reply)).await.ok()?;
                }
            }
        }
    };
    let ended: Option<()> = tokio::select! {
        () = replies.closed() => None,
        () = captures.shutdown.cancelled() => Some(()),
        ended = passes => ended,
    };
    if ended.is_some() {
        // The workers end, too, so nobody is disarmed.
        let _ = replies.try_send(Err(Status::unavailable("the gateway ends")));
        return;
    }
    drop(replies);
    let disarmed = tokio::task::spawn_blocking(move || {
        captures.disarm(&running.queues);
        running
    });
    let Ok(running) = disarmed.await else { return };
    let v1::CaptureProgress { seen, unseen, matched, lost } = running.progress();
    let Running { place: Place { caller, .. }, expression, .. } = &running;
    tracing::info!(caller, filter = expression, seen, unseen, matched, lost, "a capture ended");
}

impl Running {
    /// The packets that the workers have handed over, oldest first.
    fn take(&self) -> Vec<v1::CapturedPacket> {
        let mut packets = Vec::new();
        for (worker, queue) in (0..).zip(&self.queues) {
            while let Some(batch) = queue.take() {
                let snapshot = self.place.captures.inquiries.snapshot();
                packets.extend(batch.packets().iter().map(|packet| self.naming.message(worker, &batch, packet, &snapshot)));
                queue.give_back(batch);
            }
        }
        packets.sort_by_key(|packet| packet.time_ns);
        packets
    }

    /// The replies with these packets; at least one.
    fn replies(&self, packets: Vec<v1::CapturedPacket>) -> Vec<v1::CaptureReply> {
        let mut replies = vec![v1::CaptureReply { progress: Some(self.progress()), ..Default::default() }];
        let mut bytes = 0;
        for packet in packets {
            let frames = packet.received.iter().chain(&packet.sent);
            bytes += frames.map(|frame| frame.bytes.len()).sum::<usize>();
            if bytes > REPLY_BYTES {
                bytes = 0;
                replies.push(v1::CaptureReply { progress: Some(self.progress()), ..Default::default() });
            }
            if let Some(reply) = replies.last_mut() {
                reply.packets.push(packet);
            }
        }
        replies
    }

    fn progress(&self) -> v1::CaptureProgress {
        let mut sum = v1::CaptureProgress::default();
        for counts in self.queues.iter().map(|queue| &queue.counts) {
            sum.seen += counts.seen.get();
            sum.unseen += counts.unseen.get();
            sum.matched += counts.matched.get();
            sum.lost += counts.lost.get();
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::{Code, Request};

    fn captures() -> Arc<Captures> {
        Arc::new(Captures::new(Arc::new(crate::worker_threads::inquiries::tests::without_workers())))
    }

    async fn begin(captures: &Arc<Captures>, request: &v1::CaptureRequest) -> Result<mpsc::Receiver<Reply>, Status> {
        let caller = Caller::seeing_packets(&Request::new(())).unwrap();
        captures.place(&caller).await?.begin(request, &Handle::current())
    }

    #[tokio::test(start_paused = true)]
    async fn one_capture_runs_at_a_time_and_ends_with_its_client() {
        let captures = captures();
        let mut client = begin(&captures, &v1::CaptureRequest::default()).await.unwrap();
        let first = client.recv().await.unwrap().unwrap();
        assert_eq!(first.progress, Some(v1::CaptureProgress::default()));
        let refused = begin(&captures, &v1::CaptureRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(refused.message().contains("one at a time"), "{refused}");
        drop(client);
        // The next one waits for the end of this one.
        let mut client = begin(&captures, &v1::CaptureRequest::default()).await.unwrap();
        captures.end();
        let last = async { while let Some(Ok(_)) = client.recv().await {} };
        timeout(Duration::from_secs(30), last).await.unwrap();
        let refused = begin(&captures, &v1::CaptureRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
    }

    #[tokio::test]
    async fn a_filter_that_is_no_bounded_program_is_refused() {
        let row = |code, jump_true, value| v1::FilterInstruction { code, jump_true, jump_false: 0, value };
        let rows = [
            (vec![row(5, 0, u32::MAX), row(6, 0, 1)], "instruction 0 of the filter jumps behind its end"),
            (vec![row(6, 256, 1)], "found a field above its range"),
            (vec![row(6, 0, 1); 1025], "has 1025 instructions, at most 1024 are allowed"),
        ];
        for (filter, expected) in rows {
            let request = v1::CaptureRequest { filter, ..Default::default() };
            let refused = begin(&captures(), &request).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert!(refused.message().contains(expected), "{refused}");
        }
        let request = v1::CaptureRequest { snap_bytes: 65_536, ..Default::default() };
        let refused = begin(&captures(), &request).await.unwrap_err();
        assert!(refused.message().contains("expected 1 to 65535"), "{refused}");
    }
}
