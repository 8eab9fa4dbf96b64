//! A watch: starts and ends of flows, drops, and a sample of packets, on their way from one worker to the agent while
//! somebody watches (docs/internals/decisions/0169).
//!
//! The agent reserves the queue. A worker writes at most [`EVENTS_PER_WINDOW`] starts and ends, and as many drops, in each
//! 10 ms; what is above that, or finds the queue full, is counted as lost. Samples that find it full are not: nobody
//! waits for a certain one.
//!
//! **Invariant:** a worker neither waits nor allocates for a watch, and a full queue costs events, never packets. Without a
//! watch no event is made.
//!
//! Not here: which packets are sampled (`forward::worker`), and who watches (the agent).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;

use super::recorder::FlowEnd;
use crate::flow::entry::FlowView;
use crate::flow::state::{Direction, FlowState};
use crate::stats::{Counter, DropReason};

/// Events on their way: the agent looks every 20 ms, in which a worker writes 200 starts and ends, 200 drops and 400
/// samples, 800 while the rate of packets rises. 4,096 of them are three times as many, 0.8 MB.
const EVENTS: usize = 4_096;
/// Starts and ends, and apart from them drops, in 10 ms: 20,000 a second in all. An event takes 0.1 us or less, so this
/// is 0.2 % of a core.
const EVENTS_PER_WINDOW: u32 = 100;
/// See [`EVENTS_PER_WINDOW`].
pub(crate) const WINDOW_NS: u64 = 10_000_000;

/// Source, destination and protocol number of a packet; the ports are 0 where there are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedEnds {
    /// Its source.
    pub source: SocketAddr,
    /// Its destination.
    pub destination: SocketAddr,
    /// Its protocol number.
    pub protocol: u8,
}

/// A packet of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledPacket {
    /// Its direction in its flow.
    pub direction: Direction,
    /// Its length from the IP header on.
    pub packet_len: u16,
    /// The packets that it stands for.
    pub stands_for: u32,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchedEvent {
    /// A flow has begun.
    Start(FlowView),
    /// A flow has ended.
    End(FlowEnd, FlowView),
    /// A packet was dropped; `None`: it is not IP, or malformed.
    Drop(DropReason, Option<WatchedEnds>),
    /// A packet of a flow.
    Packet(SampledPacket, FlowView),
}

/// An event of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// Time of the worker's poll (monotonic, ns).
    pub time_ns: u64,
    /// The event.
    pub event: WatchedEvent,
}

/// The watch of one worker: one writer, one reader.
#[derive(Debug)]
pub struct FlowWatch {
    queue: ArrayQueue<Watched>,
    wants_events: AtomicBool,
    wants_packets: AtomicBool,
    lost: Counter,
    now_ns: AtomicU64,
    flows_left: AtomicU32,
    drops_left: AtomicU32,
}

impl Default for FlowWatch {
    fn default() -> Self {
        Self {
            queue: ArrayQueue::new(EVENTS),
            wants_events: AtomicBool::new(false),
            wants_packets: AtomicBool::new(false),
            lost: Counter::default(),
            now_ns: AtomicU64::new(0),
            flows_left: AtomicU32::new(0),
            drops_left: AtomicU32::new(0),
        }
    }
}

impl FlowWatch {
    /// Whether starts, ends and drops are wanted.
    pub fn want_events(&self, are_wanted: bool) {
        self.wants_events.store(are_wanted, Ordering::Relaxed);
    }

    /// Whether a sample of packets is wanted.
    pub fn want_packets(&self, are_wanted: bool) {
        self.wants_packets.store(are_wanted, Ordering::Relaxed);
    }

    /// The oldest event.
    #[must_use]
    pub fn take(&self) -> Option<Watched> {
        self.queue.pop()
    }

    /// Number of events that were not written.
    #[must_use]
    pub const fn lost(&self) -> &Counter {
        &self.lost
    }

    pub(crate) fn wants_packets_now(&self) -> bool {
        self.wants_packets.load(Ordering::Relaxed)
    }

    /// A poll begins.
    pub(crate) fn begin_poll(&self, now_ns: u64) {
        let before = self.now_ns.load(Ordering::Relaxed);
        if before / WINDOW_NS != now_ns / WINDOW_NS {
            self.flows_left.store(EVENTS_PER_WINDOW, Ordering::Relaxed);
            self.drops_left.store(EVENTS_PER_WINDOW, Ordering::Relaxed);
        }
        self.now_ns.store(now_ns, Ordering::Relaxed);
    }

    /// A flow has begun.
    pub(super) fn started(&self, flow: FlowView) {
        if self.may_write(&self.flows_left) {
            self.write(WatchedEvent::Start(flow));
        }
    }

    /// A flow has ended, for this reason unless its sides closed it before.
    pub(super) fn ended(&self, why: FlowEnd, flow: FlowView) {
        if self.may_write(&self.flows_left) {
            let why = match flow.state {
                _ if why == FlowEnd::Reclaimed || why == FlowEnd::Requested => why,
                FlowState::TcpRefused => FlowEnd::Rst,
                state if state.is_reset() => FlowEnd::Rst,
                state if state.is_closing() || state.is_half_closed() => FlowEnd::Fin,
                _ => why,
            };
            self.write(WatchedEvent::End(why, flow));
        }
    }

    /// A packet was dropped. `ends` is called if the event is written.
    pub(crate) fn dropped(&self, reason: DropReason, ends: impl FnOnce() -> Option<WatchedEnds>) {
        if self.may_write(&self.drops_left) {
            self.write(WatchedEvent::Drop(reason, ends()));
        }
    }

    /// A packet is one of the sample.
    pub(crate) fn sampled(&self, packet: SampledPacket, flow: FlowView) {
        self.push(WatchedEvent::Packet(packet, flow));
    }

    /// Whether an event is wanted and within the rate.
    fn may_write(&self, left: &AtomicU32) -> bool {
        if !self.wants_events.load(Ordering::Relaxed) {
            return false;
        }
        let now = left.load(Ordering::Relaxed);
        left.store(now.saturating_sub(1), Ordering::Relaxed);
        if now == 0 {
            self.lost.add(1);
        }
        now > 0
    }

    fn write(&self, event: WatchedEvent) {
        if !self.push(event) {
            self.lost.add(1);
        }
    }

    /// Returns false if the queue is full.
    fn push(&self, event: WatchedEvent) -> bool {
        self.queue.push(Watched { time_ns: self.now_ns.load(Ordering::Relaxed), event }).is_ok()
    }
}
