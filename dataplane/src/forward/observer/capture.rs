//! A running capture: copies of packets, before and after they were forwarded, with their outcome, on their way from a
//! worker to the agent (docs/internals/decisions/0053).
//!
//! The agent reserves all memory: batches of copies, which travel filled to the agent and empty back. A worker that has
//! no empty batch drops copies and counts them, never packets.
//!
//! **Invariant:** a worker neither allocates nor waits for a capture, and copies at most [`COPIES_PER_SECOND`] packets
//! a second. It observes packets in half of its idle time at most, and besides in one burst of 1,024.
//!
//! Not here: the observation of a packet (`worker::observed`), and the output for operators (the agent).

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arrayvec::ArrayVec;
use crossbeam_queue::ArrayQueue;

use super::outcome::{PacketFlow, PacketOutcome};
use crate::flow::Shift;
use crate::port::{BURST, PacketFilter, PortIndex};
use crate::stats::Counter;

/// Maximum number of packets that one worker copies in a second. A copy with all that belongs to it takes about 1 us,
/// so this is 2 % of a core.
pub const COPIES_PER_SECOND: u32 = 20_000;
/// Copies that a worker may make at once after a pause.
const COPIES_AT_ONCE: u64 = 2_000;
/// Batches of one worker: 32 x 64 packets, a tenth of a second at full rate.
pub const CAPTURE_BATCHES: usize = 32;
/// Packets of a batch.
const PACKETS: usize = 64;
/// Frames that a packet may leave as: its first fragment, a burst of others, and 5 resets.
const FRAMES: usize = 1 + BURST + 5;
/// Frames that were sent, of a batch.
const BATCH_FRAMES: usize = 4 * PACKETS;
/// Bytes of copies in a batch: 64 packets of 1,000 bytes, twice. With 32 batches 4 MiB for each worker while it
/// captures.
const BATCH_BYTES: usize = 128 * 1024;
/// Bytes of copies of one packet: the largest frame that ports receive, 9,728 bytes, and its fragments, twice over.
const PACKET_BYTES: usize = 32 * 1024;
/// Time that the observation of a packet counts for, ns: measured 350 without and 1,000 with a copy.
const OBSERVATION_NS: u64 = 500;
/// Maximum number of packets of a burst that are observed: the first ones. With copies they take 64 us, in which 640
/// packets arrive at 10 million a second: less than the 1,024 descriptors of a receive queue.
const OBSERVED_OF_BURST: usize = 64;
/// A poll that finds at most so many packets counts as idle: more of them would cost little more.
const IDLE_PACKETS: usize = 4;
/// Observation takes at most one part in this many of the idle time of a worker.
const IDLE_PARTS: u64 = 2;
/// Idle time that may be saved up for looks, ns: 20,000 packets.
const SAVED_NS_MAX: u64 = 10_000_000;
/// Full bursts in a row that are observed, see [`OBSERVED_OF_BURST`].
const FULL_BURSTS: u32 = 1;
/// Of the bursts of a worker without idle time one in this many is observed: 32 us in 2 ms or more.
const BUSY_BURSTS: u32 = 1024;
/// A batch is handed over at the latest after this time.
const BATCH_AGE_NS: u64 = 2_000_000;

/// How a packet came to the worker that reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketSource {
    /// From the worker's queue of the port.
    Port,
    /// From another worker, which received it.
    Worker,
    /// It waited until its next hop was resolved.
    Waited,
    /// From the kernel, which sends it through the port's Linux twin.
    Linux,
}

/// The relation of a packet to flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowUse {
    /// It has no flow.
    None,
    /// It belongs to a known flow.
    Known,
    /// It began a flow.
    New,
}

/// The end of an observed packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservedEnd {
    /// The final outcome.
    Outcome(PacketOutcome),
    /// It waits for its next hop to be resolved, or for the first fragment of its datagram.
    Waits,
}

/// Source, destination and protocol number of a packet; the ports are 0 where there are none.
pub type PacketEnds = (SocketAddr, SocketAddr, u8);

/// The copy of a frame: its bytes in the batch, and its whole length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrameCopy {
    bytes: Range<usize>,
    /// Length of the frame, bytes; the copy may be shorter.
    pub frame_len: usize,
}

/// A frame that left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentFrame {
    /// The port by which it left.
    pub port: PortIndex,
    /// It went to the kernel, through the port's Linux twin.
    pub is_to_linux: bool,
    /// The frame.
    pub copy: FrameCopy,
}

/// A packet with its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapturedPacket {
    /// Time of the worker's poll (monotonic, ns).
    pub time_ns: u64,
    /// The port on which it arrived, or whose twin the kernel sent it through.
    pub port: PortIndex,
    /// How it came to this worker.
    pub source: PacketSource,
    /// Its addresses; `None` if it is not IP, or malformed.
    pub ends: Option<PacketEnds>,
    /// The frame as it arrived.
    pub received: FrameCopy,
    /// Its flow.
    pub flow_use: FlowUse,
    /// Its flow, as it is after the packet.
    pub flow: Option<CapturedFlow>,
    /// Its end.
    pub end: ObservedEnd,
    sent: Range<usize>,
}

/// The flow of a captured packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapturedFlow {
    /// Its frontend and backend.
    pub belongs: PacketFlow,
    /// The PROXY header that its backend gets.
    pub shift: Option<Shift>,
}

/// Packets on their way to the agent.
#[derive(Debug)]
pub struct CaptureBatch {
    packets: ArrayVec<CapturedPacket, PACKETS>,
    sent: ArrayVec<SentFrame, BATCH_FRAMES>,
    bytes: Vec<u8>,
    begun_ns: u64,
}

impl CaptureBatch {
    fn new() -> Box<Self> {
        let bytes = Vec::with_capacity(BATCH_BYTES);
        Box::new(Self { packets: ArrayVec::new(), sent: ArrayVec::new(), bytes, begun_ns: 0 })
    }

    /// The packets, oldest first.
    #[must_use]
    pub fn packets(&self) -> &[CapturedPacket] {
        &self.packets
    }

    /// The frames that a packet of the batch left as.
    #[must_use]
    pub fn sent(&self, packet: &CapturedPacket) -> &[SentFrame] {
        self.sent.get(packet.sent.clone()).unwrap_or_default()
    }

    /// The bytes of a copy of the batch.
    #[must_use]
    pub fn bytes(&self, copy: &FrameCopy) -> &[u8] {
        self.bytes.get(copy.bytes.clone()).unwrap_or_default()
    }

    fn clear(&mut self) {
        self.packets.clear();
        self.sent.clear();
        self.bytes.clear();
    }

    fn has_room(&self, observation: &Observation) -> bool {
        !self.packets.is_full()
            && self.sent.remaining_capacity() >= observation.sent.len()
            && self.bytes.len() + observation.bytes.len() <= BATCH_BYTES
    }
}

/// Counts of the traffic of a worker since the beginning of the capture.
#[derive(Debug, Default)]
pub struct CaptureCounts {
    /// Packets that were observed.
    pub seen: Counter,
    /// Packets that were forwarded without observation, because the worker was busy or had made its copies.
    pub unseen: Counter,
    /// Packets that matched the filter.
    pub matched: Counter,
    /// Copies of matching packets that were dropped because the agent did not take them fast enough.
    pub lost: Counter,
}

/// The agent's end of a capture on one worker.
#[derive(Debug)]
pub struct CaptureQueue {
    filled: ArrayQueue<Box<CaptureBatch>>,
    empty: ArrayQueue<Box<CaptureBatch>>,
    /// The counts of the worker.
    pub counts: CaptureCounts,
    is_closed: AtomicBool,
}

impl CaptureQueue {
    /// The oldest batch, to be given back.
    #[must_use]
    pub fn take(&self) -> Option<Box<CaptureBatch>> {
        self.filled.pop()
    }

    /// Gives a batch back to the worker.
    pub fn give_back(&self, mut batch: Box<CaptureBatch>) {
        batch.clear();
        // There is room: the queue is as long as the number of batches.
        let _ = self.empty.push(batch);
    }

    /// The worker looks at no more packets, although it still has the capture.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }
}

/// The observation of the packet that is processed now.
#[derive(Debug)]
struct Observation {
    bytes: Vec<u8>,
    received: FrameCopy,
    sent: ArrayVec<SentFrame, FRAMES>,
    matches: bool,
}

/// The worker's end of a capture.
#[derive(Debug)]
pub struct WorkerCapture {
    filter: Arc<PacketFilter>,
    snap_bytes: usize,
    queue: Arc<CaptureQueue>,
    batch: Option<Box<CaptureBatch>>,
    observation: Observation,
    pace: Pace,
}

/// A packet that ends its observation.
#[derive(Debug)]
pub(in crate::forward) struct ObservedPacket {
    pub(in crate::forward) time_ns: u64,
    pub(in crate::forward) port: PortIndex,
    pub(in crate::forward) source: PacketSource,
    pub(in crate::forward) ends: Option<PacketEnds>,
    pub(in crate::forward) flow_use: FlowUse,
    pub(in crate::forward) flow: Option<CapturedFlow>,
    pub(in crate::forward) end: ObservedEnd,
}

impl WorkerCapture {
    /// A capture of packets of which a frame matches, as it arrived or as it left. Of each frame at most `snap_bytes`
    /// are copied. Reserves all memory.
    #[must_use]
    pub fn new(filter: Arc<PacketFilter>, snap_bytes: usize) -> (Box<Self>, Arc<CaptureQueue>) {
        let queue = Arc::new(CaptureQueue {
            filled: ArrayQueue::new(CAPTURE_BATCHES),
            empty: ArrayQueue::new(CAPTURE_BATCHES),
            counts: CaptureCounts::default(),
            is_closed: AtomicBool::new(false),
        });
        (1..CAPTURE_BATCHES).for_each(|_| queue.give_back(CaptureBatch::new()));
        let bytes = Vec::with_capacity(PACKET_BYTES);
        let observation = Observation { bytes, received: FrameCopy::default(), sent: ArrayVec::new(), matches: false };
        let batch = Some(CaptureBatch::new());
        let capture = Self { filter, snap_bytes, queue: Arc::clone(&queue), batch, observation, pace: Pace::default() };
        (Box::new(capture), queue)
    }

    /// How many packets of a burst of `packets` are observed: some of the first ones, or none.
    pub(in crate::forward) fn observes(&mut self, packets: usize, is_full: bool, now_ns: u64) -> usize {
        let some = packets.min(OBSERVED_OF_BURST);
        let observes = !self.queue.is_closed.load(Ordering::Relaxed) && self.pace.observes(some as u64, is_full, now_ns);
        let (counts, seen) = (&self.queue.counts, if observes { some } else { 0 });
        counts.seen.add(seen as u64);
        counts.unseen.add((packets - seen) as u64);
        seen
    }

    /// Begins the observation of a packet that arrived as this frame.
    pub(in crate::forward) fn received(&mut self, frame: &[u8]) {
        let observation = &mut self.observation;
        observation.bytes.clear();
        observation.sent.clear();
        observation.matches = self.filter.matches(frame);
        observation.received = copy(&mut observation.bytes, frame, self.snap_bytes);
    }

    /// A frame that is about to leave because of the packet.
    pub(in crate::forward) fn sends(&mut self, port: PortIndex, is_to_linux: bool, frame: &[u8]) {
        let observation = &mut self.observation;
        observation.matches = observation.matches || self.filter.matches(frame);
        let copy = copy(&mut observation.bytes, frame, self.snap_bytes);
        // There is room, see the constant; otherwise a frame is missing in the report.
        let _ = observation.sent.try_push(SentFrame { port, is_to_linux, copy });
    }

    /// Number of frames that are about to leave because of the packet.
    pub(in crate::forward) fn sending(&self) -> usize {
        self.observation.sent.len()
    }

    /// The last of these frames, which is the packet itself or its last fragment: resets are sent before it.
    pub(in crate::forward) fn last_sent(&self) -> Option<(PortIndex, bool)> {
        self.observation.sent.last().map(|sent| (sent.port, sent.is_to_linux))
    }

    /// Whether the packet, or a frame that leaves because of it, matches.
    pub(in crate::forward) fn matches(&self) -> bool {
        self.observation.matches
    }

    /// The packet belongs to another worker, which reports it.
    pub(in crate::forward) fn leaves_to_owner(&self) {
        let seen = &self.queue.counts.seen;
        seen.set(seen.get().saturating_sub(1));
    }

    /// Ends the observation of a packet that matches. `is_sent`: the frames have left.
    pub(in crate::forward) fn ended(&mut self, packet: ObservedPacket, is_sent: bool) {
        let observation = &mut self.observation;
        if !is_sent {
            observation.sent.clear();
        }
        self.pace.copied();
        self.queue.counts.matched.add(1);
        if self.batch.as_ref().is_some_and(|batch| !batch.has_room(observation)) {
            self.hand_over();
        }
        if self.batch.is_none() {
            self.batch = self.queue.empty.pop();
        }
        let observation = &mut self.observation;
        let Some(batch) = self.batch.as_mut().filter(|batch| batch.has_room(observation)) else {
            return self.queue.counts.lost.add(1);
        };
        if batch.packets.is_empty() {
            batch.begun_ns = packet.time_ns;
        }
        let moved = |copy: FrameCopy| FrameCopy {
            bytes: copy.bytes.start + batch.bytes.len()..copy.bytes.end + batch.bytes.len(),
            ..copy
        };
        let received = moved(std::mem::take(&mut observation.received));
        let first = batch.sent.len();
        batch.sent.extend(observation.sent.drain(..).map(|sent| SentFrame { copy: moved(sent.copy), ..sent }));
        let sent = first..batch.sent.len();
        batch.bytes.extend_from_slice(&observation.bytes);
        let ObservedPacket { time_ns, port, source, ends, flow_use, flow, end } = packet;
        batch.packets.push(CapturedPacket { time_ns, port, source, ends, received, flow_use, flow, end, sent });
    }

    /// Ends a poll in which the worker handled this many packets. When it handled none it may sleep next.
    pub(in crate::forward) fn end_poll(&mut self, handled: usize, now_ns: u64) {
        self.pace.end_poll(handled, now_ns);
        let Some(batch) = self.batch.as_ref() else { return self.batch = self.queue.empty.pop() };
        let is_old = now_ns.saturating_sub(batch.begun_ns) >= BATCH_AGE_NS;
        if !batch.packets.is_empty() && (handled == 0 || is_old) {
            self.hand_over();
        }
    }

    /// Hands the batch over. Its place stays empty until the agent has given one back.
    fn hand_over(&mut self) {
        if let Some(batch) = self.batch.take() {
            // There is room: there are no more batches than places.
            let _ = self.queue.filled.push(batch);
        }
        self.batch = self.queue.empty.pop();
    }
}

/// Copies at most `snap_bytes` of a frame, and less if the room for one packet is used.
fn copy(bytes: &mut Vec<u8>, frame: &[u8], snap_bytes: usize) -> FrameCopy {
    let start = bytes.len();
    let len = frame.len().min(snap_bytes).min(PACKET_BYTES - start);
    bytes.extend_from_slice(&frame[..len]);
    FrameCopy { bytes: start..bytes.len(), frame_len: frame.len() }
}

/// Decides which bursts are observed.
#[derive(Debug)]
struct Pace {
    /// The time at which all copies of [`COPIES_AT_ONCE`] are available again.
    full_at_ns: u64,
    /// The time of the poll, and whether the poll before was idle.
    now_ns: u64,
    was_idle: bool,
    /// Time that may be spent on looks.
    saved_ns: u64,
    /// Full bursts in a row.
    full_bursts: u32,
    /// Bursts that passed because the worker had no time.
    passed: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { full_at_ns: 0, now_ns: 0, was_idle: false, saved_ns: SAVED_NS_MAX, full_bursts: 0, passed: 0 }
    }
}

impl Pace {
    const COPY_NS: u64 = 1_000_000_000 / COPIES_PER_SECOND as u64;

    fn observes(&mut self, packets: u64, is_full: bool, now_ns: u64) -> bool {
        self.pass_time(now_ns);
        self.full_bursts = if is_full { self.full_bursts.saturating_add(1) } else { 0 };
        if self.full_at_ns.saturating_sub(now_ns) >= COPIES_AT_ONCE * Self::COPY_NS {
            return false;
        }
        let cost_ns = packets * OBSERVATION_NS;
        if self.full_bursts <= FULL_BURSTS && self.saved_ns >= cost_ns {
            self.saved_ns -= cost_ns;
            return true;
        }
        self.passed = self.passed.wrapping_add(1);
        self.passed.is_multiple_of(BUSY_BURSTS)
    }

    fn copied(&mut self) {
        self.full_at_ns = self.full_at_ns.max(self.now_ns) + Self::COPY_NS;
    }

    fn end_poll(&mut self, handled: usize, now_ns: u64) {
        self.pass_time(now_ns);
        self.was_idle = handled <= IDLE_PACKETS;
    }

    /// The time since the poll before was idle if that poll was, whether the worker slept or polled on.
    fn pass_time(&mut self, now_ns: u64) {
        let passed_ns = now_ns.saturating_sub(self.now_ns);
        if self.was_idle {
            self.saved_ns = (self.saved_ns + passed_ns / IDLE_PARTS).min(SAVED_NS_MAX);
        }
        self.now_ns = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bursts of `packets` that are observed, of this many that arrive `gap_ns` apart with an idle poll after each.
    fn observed(pace: &mut Pace, bursts: u64, packets: usize, gap_ns: u64) -> usize {
        let start = pace.now_ns;
        let mut each = |n: u64| {
            let now_ns = start + n * gap_ns;
            let observes = pace.observes(packets as u64, packets == BURST, now_ns);
            pace.end_poll(packets, now_ns);
            pace.end_poll(0, now_ns + gap_ns / 4);
            observes
        };
        (1..=bursts).filter(|n| each(*n)).count()
    }

    #[test]
    fn a_worker_with_idle_time_looks_at_all_and_a_busy_one_at_one_burst_in_1024() {
        let mut pace = Pace::default();
        assert_eq!(observed(&mut pace, 10_000, 8, 20_000), 10_000, "three quarters of 20 us are idle, a look takes 4 us");
        assert_eq!(observed(&mut pace, 102_400, BURST, 1_000), 1 + 99, "one full burst, and then one in 1,024");
        assert_eq!(observed(&mut pace, 10, 8, 20_000), 10, "the queue is empty again");
    }

    #[test]
    fn looks_take_half_of_the_idle_time() {
        let mut pace = Pace { saved_ns: 0, ..Pace::default() };
        let looks = observed(&mut pace, 100_000, 10, 4_000);
        // 3 us of 4 are idle, so 1.5 us for looks that take 5 us.
        assert!((29_500..30_500).contains(&looks), "{looks}");
    }

    #[test]
    fn copies_are_limited_per_second_with_a_short_burst() {
        let mut pace = Pace::default();
        let mut copied = 0_u32;
        for now_ns in (0..4_000_000_000_u64).step_by(10_000) {
            if pace.observes(1, false, now_ns) {
                copied += 1;
                pace.copied();
            }
            pace.end_poll(0, now_ns);
        }
        assert!((4 * COPIES_PER_SECOND..4 * COPIES_PER_SECOND + 2_100).contains(&copied), "{copied}");
    }
}
