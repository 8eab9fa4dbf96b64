//! The harness in memory: two ports that make each received burst from a trace, and take back what is transmitted.
//!
//! **Invariant:** every buffer is free, or in the engine. So the packets fed are those transmitted, released and held;
//! [`Traffic`] counts them beside the engine's own account.
//!
//! A burst of frames is written when the engine receives it, into the burst of buffers that has been free for the longest.
//! With more buffers than the second-level cache holds, each fetches its lines from the third, as after a card's DMA.
//!
//! Not here: frames (`trace`).

use std::cell::RefCell;
use std::rc::Rc;

use dataplane::{Buffer, Burst, Port};

use super::super::error::BenchError;
use super::super::scenario::Side;
use super::super::trace::{Pattern, Trace};
use super::arrivals::{Arrivals, Latencies, Pace};
use super::buffer::{FrameBuffer, FreeBuffers};
use super::sample::Sampler;
use super::{Buffers, Feeding, Harness, Traffic};

/// Two ports and what is between them.
#[derive(Debug)]
struct Wire {
    free: FreeBuffers,
    traces: [Option<Trace>; 2],
    /// The side that has its turn; none: no packets arrive.
    turn: Option<Side>,
    /// With a pace: both sides have what has arrived, in every poll.
    arrivals: Option<Arrivals>,
    sampler: Sampler,
    fed: u64,
    transmitted: u64,
    buffers: Buffers,
}

impl Wire {
    #[inline(always)]
    fn receive(&mut self, side: Side, burst: &mut Burst<FrameBuffer>) {
        if self.arrivals.is_some() {
            return self.receive_arrived(side, burst);
        }
        if self.turn != Some(side) {
            return;
        }
        let Some(trace) = &mut self.traces[side as usize] else { return };
        self.free.take(trace.next_count(), burst);
        trace.fill(burst);
        self.fed += burst.len() as u64;
    }

    #[cold]
    fn receive_arrived(&mut self, side: Side, burst: &mut Burst<FrameBuffer>) {
        let (Some(_), Some(arrivals), Some(trace)) = (self.turn, &mut self.arrivals, &mut self.traces[side as usize]) else {
            return;
        };
        self.free.take(trace.next_count().min(arrivals.waiting(side)), burst);
        trace.fill(burst);
        arrivals.receive(side, burst);
        self.fed += burst.len() as u64;
    }

    #[inline(always)]
    fn transmit(&mut self, side: Side, burst: &mut Burst<FrameBuffer>) {
        self.transmitted += burst.len() as u64;
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.transmit(burst);
        }
        self.sampler.see(side, burst, FrameBuffer::bytes);
        self.free.put(burst);
    }
}

/// A port in memory.
#[derive(Debug)]
pub(crate) struct WirePort {
    wire: Rc<RefCell<Wire>>,
    side: Side,
}

impl Port for WirePort {
    type Buffer = FrameBuffer;

    #[inline]
    fn receive(&mut self, burst: &mut Burst<FrameBuffer>) {
        self.wire.borrow_mut().receive(self.side, burst);
    }

    #[inline]
    fn transmit(&mut self, burst: &mut Burst<FrameBuffer>) {
        self.wire.borrow_mut().transmit(self.side, burst);
    }

    fn allocate(&mut self) -> Option<FrameBuffer> {
        let mut wire = self.wire.borrow_mut();
        let buffer = wire.free.allocate()?;
        wire.buffers.allocated += 1;
        Some(buffer)
    }

    fn release(&mut self, burst: &mut Burst<FrameBuffer>) {
        let mut wire = self.wire.borrow_mut();
        wire.buffers.released += burst.len() as u64;
        wire.free.put(burst);
    }
}

/// The harness of one worker.
#[derive(Debug)]
pub(crate) struct Memory {
    wire: Rc<RefCell<Wire>>,
    sides: &'static [Side],
    turns: usize,
    /// Number of fed packets at which feeding ends.
    until: u64,
}

impl Memory {
    /// A harness with `buffers` buffers. `workers` may exchange theirs.
    pub(crate) fn new(buffers: usize, workers: usize, pattern: Pattern, seed: u64) -> Result<Self, BenchError> {
        let free = FreeBuffers::new(buffers, workers, pattern)?;
        let (sampler, buffers) = (Sampler::new(seed), Buffers::default());
        let wire = Wire { free, traces: [None, None], turn: None, arrivals: None, sampler, fed: 0, transmitted: 0, buffers };
        Ok(Self { wire: Rc::new(RefCell::new(wire)), sides: &[], turns: 0, until: 0 })
    }
}

impl Harness for Memory {
    type Port = WirePort;
    const WAITS: bool = false;

    fn ports(&mut self) -> Option<[WirePort; 2]> {
        Some(Side::BOTH.map(|side| WirePort { wire: Rc::clone(&self.wire), side }))
    }

    fn give_back(&mut self, _: [WirePort; 2]) {}

    fn load(&mut self, side: Side, trace: Trace) {
        self.wire.borrow_mut().traces[side as usize] = Some(trace);
    }

    fn begin(&mut self, feeding: Feeding) {
        let mut wire = self.wire.borrow_mut();
        wire.sampler.keep_one_in(feeding.keep_one_in);
        self.sides = feeding.sides;
        self.until = feeding.frames.map_or(u64::MAX, |frames| wire.fed.saturating_add(frames));
    }

    fn pace(&mut self, pace: Option<Pace>) {
        self.wire.borrow_mut().arrivals = pace.map(Arrivals::new);
    }

    fn take_latencies(&mut self) -> Latencies {
        self.wire.borrow_mut().arrivals.as_mut().map(|arrivals| std::mem::take(&mut arrivals.latencies)).unwrap_or_default()
    }

    #[inline]
    fn turn(&mut self, now: u64) {
        let mut wire = self.wire.borrow_mut();
        if let Some(arrivals) = &mut wire.arrivals {
            arrivals.turn(now, self.sides);
        }
        self.turns += 1;
        if self.turns >= self.sides.len() {
            self.turns = 0;
        }
        wire.turn = if wire.fed < self.until { self.sides.get(self.turns).copied() } else { None };
    }

    fn end(&mut self) {
        self.until = 0;
    }

    fn has_ended(&mut self) -> bool {
        self.wire.borrow().fed >= self.until
    }

    fn is_full(&self) -> bool {
        self.wire.borrow().sampler.is_full()
    }

    fn take_kept(&mut self, see: impl FnMut(Side, &[u8]) -> Result<(), BenchError>) -> Result<(), BenchError> {
        self.wire.borrow_mut().sampler.take(see)
    }

    fn traffic(&self) -> Traffic {
        let wire = self.wire.borrow();
        Traffic { fed: wire.fed, transmitted: wire.transmitted, buffers: Some(wire.buffers) }
    }
}
