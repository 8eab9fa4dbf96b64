//! Flow records: the packets and bytes that flows have carried, and the queue by which their starts and ends leave a
//! worker.
//!
//! A table without a recorder has no meters. With one, each flow has a meter beside its entry, 32 bytes, which each of
//! its packets writes; and its start, its end and, once in [`ACTIVE_TIMEOUT`], its traffic so far are put into a queue
//! (docs/internals/decisions/0055-flow-records.md).
//!
//! **Invariant:** a full queue costs records, which are counted, never packets.
//!
//! Not here: formats of records, and who reads them.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use zerocopy::{AllocError, FromZeros};

use crate::flow::entry::FlowView;
use crate::flow::state::{Direction, FlowState};
use crate::stats::Counter;
use crate::wire::{Transport, sctp_chunk, tcp_flags};

/// A flow that lives longer than this gets a record each time it has passed, while it carries packets.
pub const ACTIVE_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// A flow also gets a record if it carried this many packets in one direction: half of what a meter can count.
const PACKETS_MAX: u32 = 1 << 31;

/// Meters hold times in units of 2^20 ns, about 1 ms, modulo 2^32: 52 days. An interval ends after [`ACTIVE_TIMEOUT`].
const TIME_SHIFT: u32 = 20;

/// The time in these units.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // modulo 2^32
const fn metered_time(now_ns: u64) -> u32 {
    (now_ns >> TIME_SHIFT) as u32
}

/// A time of a meter, completed by the present, ns: the same at any time within 52 days.
const fn complete(time: u32, now_ns: u64) -> u64 {
    let elapsed = metered_time(now_ns).wrapping_sub(time);
    (now_ns >> TIME_SHIFT).saturating_sub(elapsed as u64) << TIME_SHIFT
}

/// The traffic of a flow since its start or its last record, by [`Direction`].
#[derive(Clone, Copy, Debug, FromZeros)]
#[repr(C, align(32))]
pub(crate) struct Meter {
    octets: [u64; 2],
    packets: [u32; 2],
    /// The start of the interval.
    first: u32,
    /// The last packet.
    last: u32,
}

impl Meter {
    /// A meter that starts now.
    const fn starting(now_ns: u64) -> Self {
        let now = metered_time(now_ns);
        Self { octets: [0; 2], packets: [0; 2], first: now, last: now }
    }

    #[inline(always)]
    fn count(&mut self, direction: Direction, packet_len: u16, now: u32) {
        self.octets[direction as usize] += u64::from(packet_len);
        self.packets[direction as usize] = self.packets[direction as usize].wrapping_add(1);
        self.last = now;
    }
}

/// The meters of the flows of a table, by position; none without a recorder.
pub(crate) struct Meters<'a> {
    meters: &'a mut [Meter],
    now: u32,
}

impl<'a> Meters<'a> {
    #[inline(always)]
    pub(super) fn of(recorder: Option<&'a mut Recorder>) -> Self {
        match recorder {
            Some(recorder) => Self { meters: &mut recorder.meters, now: metered_time(recorder.now_ns) },
            None => Self { meters: &mut [], now: 0 },
        }
    }

    /// Counts a forwarded packet of a flow, of this many bytes from its IP header on.
    #[inline(always)]
    pub(crate) fn count(&mut self, index: usize, direction: Direction, packet_len: u16) {
        if let Some(meter) = self.meters.get_mut(index) {
            meter.count(direction, packet_len, self.now);
        }
    }
}

/// Why a flow has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlowEnd {
    /// Both sides closed it.
    Fin,
    /// A side reset it.
    Rst,
    /// It was silent for longer than its limit.
    Idle,
    /// Its backend is gone, or had no more time to drain.
    Drained,
    /// Another flow of the same client took its place.
    Replaced,
    /// It yielded to a new flow, for want of memory or of SNAT ports.
    Reclaimed,
    /// The gateway ended. A flow that the next process takes over starts again there.
    Stopped,
    /// An operator ended it.
    Requested,
}

impl FlowEnd {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Fin => "fin",
            Self::Rst => "rst",
            Self::Idle => "idle",
            Self::Drained => "drained",
            Self::Replaced => "replaced",
            Self::Reclaimed => "reclaimed",
            Self::Stopped => "stopped",
            Self::Requested => "requested",
        }
    }
}

/// The event of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowEvent {
    /// The flow has started.
    Start,
    /// The flow goes on: its traffic in the interval.
    Interim,
    /// The flow has ended: its traffic since the last record.
    End(FlowEnd),
}

/// Traffic of one direction of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowTraffic {
    /// Forwarded packets.
    pub packets: u32,
    /// Bytes of these IP packets, headers included.
    pub octets: u64,
}

/// The start, a part or the end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRecord {
    /// Its event.
    pub event: FlowEvent,
    /// The flow.
    pub flow: FlowView,
    /// Towards the backend, since `start_ns`.
    pub to_backend: FlowTraffic,
    /// Towards the client; 0 in one-way modes.
    pub to_client: FlowTraffic,
    /// Start of the flow, or of the interval since its last record (monotonic, ns), rounded down to 1.05 ms.
    pub start_ns: u64,
    /// The last packet (monotonic, ns), rounded down to 1.05 ms.
    pub end_ns: u64,
}

/// The records of one worker on their way to the agent: one writer, one reader.
#[derive(Debug)]
pub struct FlowRecords {
    queue: ArrayQueue<FlowRecord>,
    written: Counter,
    dropped: Counter,
}

impl FlowRecords {
    /// A queue with room for this many records.
    #[must_use]
    pub fn new(records: usize) -> Self {
        Self { queue: ArrayQueue::new(records.max(1)), written: Counter::default(), dropped: Counter::default() }
    }

    /// The oldest record.
    #[must_use]
    pub fn take(&self) -> Option<FlowRecord> {
        self.queue.pop()
    }

    /// Number of records that were put in.
    #[must_use]
    pub const fn written(&self) -> &Counter {
        &self.written
    }

    /// Number of records for which there was no room.
    #[must_use]
    pub const fn dropped(&self) -> &Counter {
        &self.dropped
    }

    /// Puts a record in, or drops it when there is no room. Half of the room is for flows that were confirmed, so that
    /// a flood of forged ones does not displace their records.
    fn put(&self, record: FlowRecord, is_confirmed: bool) {
        let may_enter = is_confirmed || self.queue.len() < self.queue.capacity().div_ceil(2);
        if may_enter && self.queue.push(record).is_ok() {
            self.written.add(1);
        } else {
            self.dropped.add(1);
        }
    }
}

/// The recorder of one table.
#[derive(Debug)]
pub(crate) struct Recorder {
    records: Arc<FlowRecords>,
    meters: Box<[Meter]>,
    /// The way in which each flow that closes is being closed.
    closed_by: Box<[ClosedBy]>,
    now_ns: u64,
}

/// The way in which a flow is being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromZeros)]
#[repr(u8)]
enum ClosedBy {
    /// It is open.
    Nothing,
    /// It is open, and began at another gateway.
    NothingHere,
    Fin,
    Rst,
}

impl ClosedBy {
    const fn of(transport: Transport) -> Self {
        match transport {
            Transport::Tcp { flags } if flags & tcp_flags::RST != 0 => Self::Rst,
            Transport::Tcp { flags } if flags & tcp_flags::FIN != 0 => Self::Fin,
            Transport::Sctp { chunk: sctp_chunk::ABORT } => Self::Rst,
            Transport::Sctp { chunk: sctp_chunk::SHUTDOWN_ACK | sctp_chunk::SHUTDOWN_COMPLETE } => Self::Fin,
            _ => Self::Nothing,
        }
    }
}

impl Recorder {
    /// For a table with room for this many flows; [`AllocError`] when there is no memory for it.
    pub(super) fn new(flows: usize, records: Arc<FlowRecords>) -> Result<Self, AllocError> {
        let meters = <[Meter]>::new_box_zeroed_with_elems(flows)?;
        Ok(Self { records, meters, closed_by: <[ClosedBy]>::new_box_zeroed_with_elems(flows)?, now_ns: 0 })
    }

    /// Sets the present, monotonic ns.
    pub(super) fn set_time(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
    }

    /// Prefetches the meter of a flow.
    #[inline(always)]
    pub(super) fn prefetch(&self, index: usize) {
        crate::wire::processor::prefetch_at(&self.meters, index);
    }

    /// A flow has started at a position.
    #[cold]
    pub(super) fn begin(&mut self, index: u32, flow: FlowView) {
        self.meters[index as usize] = Meter::starting(self.now_ns);
        self.closed_by[index as usize] = ClosedBy::Nothing;
        self.put(index, FlowEvent::Start, flow);
    }

    /// A flow of another gateway is known at a position. It gets records once it carries packets here.
    #[cold]
    pub(super) fn begin_elsewhere(&mut self, index: u32) {
        self.meters[index as usize] = Meter::starting(self.now_ns);
        self.closed_by[index as usize] = ClosedBy::NothingHere;
    }

    /// A packet has changed the state of a flow to this one, or left it.
    #[cold]
    pub(super) fn advance(&mut self, index: u32, state: FlowState, transport: Transport) {
        let closed_by = &mut self.closed_by[index as usize];
        match ClosedBy::of(transport) {
            _ if !state.is_closing() && !state.is_half_closed() && !state.is_reset() => *closed_by = ClosedBy::Nothing,
            // A state that closes already stays as it was closed.
            by @ (ClosedBy::Fin | ClosedBy::Rst) if *closed_by != ClosedBy::Fin || by == ClosedBy::Rst => *closed_by = by,
            _ => {}
        }
    }

    /// A record of a long interval. The next one begins with the last packet of this one. A flow that has carried
    /// nothing since has none; it ends long before times wrap, since its idle limit is at most 7 days.
    pub(super) fn look(&mut self, index: u32, flow: impl FnOnce() -> FlowView) {
        let Meter { packets, first, last, .. } = self.meters[index as usize];
        let elapsed = metered_time(self.now_ns).wrapping_sub(first);
        let is_long = u128::from(elapsed) << TIME_SHIFT >= ACTIVE_TIMEOUT.as_nanos();
        if packets != [0; 2] && (is_long || packets.iter().any(|packets| *packets >= PACKETS_MAX)) {
            self.put(index, FlowEvent::Interim, flow());
            self.meters[index as usize] = Meter { octets: [0; 2], packets: [0; 2], first: last, last };
        }
    }

    /// A flow has ended, for this reason unless its sides closed it before.
    #[cold]
    pub(super) fn end(&mut self, index: u32, why: FlowEnd, flow: FlowView) {
        if self.closed_by[index as usize] == ClosedBy::NothingHere && self.meters[index as usize].packets == [0; 2] {
            return;
        }
        let half_seen = matches!(flow.state, FlowState::TcpOneWayHalfClosed | FlowState::SctpHalfClosed);
        let has_closed = flow.state.is_closing() || flow.state.is_reset() || half_seen;
        let why = match (why, self.closed_by[index as usize]) {
            (FlowEnd::Reclaimed, _) => why,
            (_, ClosedBy::Rst) if has_closed => FlowEnd::Rst,
            (_, ClosedBy::Fin) if has_closed => FlowEnd::Fin,
            _ => why,
        };
        self.put(index, FlowEvent::End(why), flow);
    }

    fn put(&mut self, index: u32, event: FlowEvent, flow: FlowView) {
        let Meter { octets, packets, first, last } = self.meters[index as usize];
        let traffic = |direction| FlowTraffic { packets: packets[direction as usize], octets: octets[direction as usize] };
        let record = FlowRecord {
            event,
            flow,
            to_backend: traffic(Direction::ToBackend),
            to_client: traffic(Direction::ToClient),
            start_ns: complete(first, self.now_ns),
            end_ns: complete(last, self.now_ns),
        };
        self.records.put(record, flow.state.is_confirmed());
    }
}
