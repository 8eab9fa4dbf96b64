//! The frames of a trace: one per flow, in random order. Of each frame only the bytes that differ between flows are
//! stored, 32 of IPv4 and 64 of IPv6, in one stream. The others come from a template, which stays in the nearest cache. So
//! the measurement shows the memory accesses of the engine rather than of the trace.
//!
//! **Invariant:** what [`Trace::fill`] writes is the frame that the trace was made from, but for its padding.
//!
//! Not here: what frames say (`traffic`).

use std::ops::Range;

use dataplane::{BURST, Burst, prefetch};
use proto::Family;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::error::BenchError;
use super::frame::{self, FrameFields};
use super::traffic::{self, Stage};
use crate::cli::BenchArgs;

/// A cache line of a trace. The alignment puts a large trace into huge pages, so that the harness does not measure the
/// TLB.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C, align(64))]
struct TraceLine([u8; 64]);

/// Bytes of a flow: of IPv4 from the header checksum to behind the TCP header, of IPv6 from the source address to there. The
/// frame is written up to their end for each packet; data behind is never written again.
const FLOW_V4: usize = 32;
const FLOW_V6: usize = 64;
/// Where they begin in a frame without tag.
const FLOW_AT_V4: usize = 24;
const FLOW_AT_V6: usize = 22;
const FLOW_AT_V4_TAGGED: usize = FLOW_AT_V4 + frame::TAG;
const FLOW_AT_V6_TAGGED: usize = FLOW_AT_V6 + frame::TAG;

/// How many frames ahead a trace is fetched. The processor fetches only within a page, and reads two traces in turn.
const FRAMES_AHEAD: usize = 2 * BURST;

/// Bytes at the start of a frame that are written for each packet, at most; the headers are there.
pub(super) const HEAD_BYTES: usize = 128;

/// The bytes of a frame from its start on, as far as all frames have them in common.
pub(super) type Pattern = [u8; 2048];

/// A buffer that a frame is written into.
pub(super) trait FrameRoom {
    /// The first bytes of a frame of `len` bytes, which are to be written.
    fn begin(&mut self, len: u16) -> Option<&mut [u8; HEAD_BYTES]>;

    /// Completes the frame from a position on, by what all frames have there.
    fn complete(&mut self, len: u16, from: usize, pattern: &Pattern);
}

/// The bytes that frames of one size have in common.
#[derive(Clone, Copy, Debug)]
struct Template {
    head: [u8; HEAD_BYTES],
    len: u16,
}

/// Frames in the order in which they are fed.
#[derive(Debug)]
pub(super) struct Trace {
    lines: Vec<TraceLine>,
    /// For each frame the number of its template, unless there is one only.
    sizes: Vec<u8>,
    templates: Vec<Template>,
    pattern: Box<Pattern>,
    family: Family,
    is_tagged: bool,
    frames: usize,
    next: usize,
}

impl Trace {
    /// A frame for each flow, in this order.
    pub(super) fn new(
        options: &BenchArgs,
        family: Family,
        flows: &[u32],
        frame: impl Fn(u32) -> FrameFields,
    ) -> Result<Self, BenchError> {
        let (flow_bytes, at) = match (family, options.vlan) {
            (Family::V4, false) => (FLOW_V4, FLOW_AT_V4),
            (Family::V4, true) => (FLOW_V4, FLOW_AT_V4_TAGGED),
            (Family::V6, false) => (FLOW_V6, FLOW_AT_V6),
            (Family::V6, true) => (FLOW_V6, FLOW_AT_V6_TAGGED),
        };
        let bytes = flows.len() * flow_bytes;
        let too_much = |_| BenchError::Trace(bytes);
        let mut lines = TraceLine::new_vec_zeroed(bytes.div_ceil(size_of::<TraceLine>())).map_err(too_much)?;
        let (mut sizes, mut templates, mut written) = (Vec::with_capacity(flows.len()), Vec::<Template>::new(), Vec::new());
        for (flow, stored) in flows.iter().zip(lines.as_mut_bytes().chunks_exact_mut(flow_bytes)) {
            frame(*flow).write(&mut written);
            let len = u16::try_from(written.len()).unwrap_or(u16::MAX);
            let mut head = [0; HEAD_BYTES];
            head.iter_mut().zip(&written).for_each(|(to, from)| *to = *from);
            stored.copy_from_slice(&head[at..at + flow_bytes]);
            let size = templates.iter().position(|template| template.len == len).unwrap_or_else(|| {
                templates.push(Template { head, len });
                templates.len() - 1
            });
            sizes.push(u8::try_from(size).unwrap_or(u8::MAX));
        }
        if templates.len() < 2 {
            sizes = Vec::new();
        }
        let pattern = Box::new(pattern(options, family));
        Ok(Self { lines, sizes, templates, pattern, family, is_tagged: options.vlan, frames: flows.len(), next: 0 })
    }

    /// Number of frames that the next burst has: those up to the end of the trace at most.
    #[inline]
    pub(super) fn next_count(&self) -> usize {
        BURST.min(self.frames - self.next)
    }

    /// Writes the next frames of the trace into the buffers of a burst, which are at most [`Trace::next_count`].
    #[inline]
    pub(super) fn fill<B: FrameRoom>(&mut self, burst: &mut Burst<B>) {
        let range = self.next..self.next + burst.len();
        self.next = if range.end >= self.frames { 0 } else { range.end };
        match (self.family, self.is_tagged) {
            (Family::V4, false) => self.fill_each::<FLOW_AT_V4, FLOW_V4, B>(range, burst),
            (Family::V4, true) => self.fill_each::<FLOW_AT_V4_TAGGED, FLOW_V4, B>(range, burst),
            (Family::V6, false) => self.fill_each::<FLOW_AT_V6, FLOW_V6, B>(range, burst),
            (Family::V6, true) => self.fill_each::<FLOW_AT_V6_TAGGED, FLOW_V6, B>(range, burst),
        }
    }

    #[inline(always)]
    fn fill_each<const AT: usize, const BYTES: usize, B: FrameRoom>(&self, range: Range<usize>, burst: &mut Burst<B>) {
        let (flows, _) = self.lines.as_bytes().as_chunks::<BYTES>();
        let ahead = flows.get(range.start + FRAMES_AHEAD..range.end + FRAMES_AHEAD);
        let Some(flows) = flows.get(range.clone()) else { return };
        let flows = flows.iter().zip(ahead.unwrap_or(flows));
        if let [template] = self.templates.as_slice() {
            let template = *template;
            for (buffer, (flow, ahead)) in burst.iter_mut().zip(flows) {
                prefetch(ahead);
                write::<AT, BYTES, B>(buffer, &template, flow, &self.pattern);
            }
        } else {
            let sizes = self.sizes.get(range).unwrap_or(&[]);
            for ((buffer, (flow, ahead)), size) in burst.iter_mut().zip(flows).zip(sizes) {
                prefetch(ahead);
                if let Some(template) = self.templates.get(usize::from(*size)) {
                    write::<AT, BYTES, B>(buffer, template, flow, &self.pattern);
                }
            }
        }
    }
}

/// Writes the head of a frame: a few moves of constant length.
#[inline(always)]
fn write<const AT: usize, const BYTES: usize, B: FrameRoom>(
    buffer: &mut B,
    template: &Template,
    flow: &[u8; BYTES],
    pattern: &Pattern,
) {
    let Some(head) = buffer.begin(template.len) else { return };
    head[..AT].copy_from_slice(&template.head[..AT]);
    head[AT..AT + BYTES].copy_from_slice(flow);
    buffer.complete(template.len, AT + BYTES, pattern);
}

/// The bytes that are the same in the frames of all flows and sizes: data behind the headers.
pub(super) fn pattern(options: &BenchArgs, family: Family) -> Pattern {
    let mut bytes = [0; size_of::<Pattern>()];
    let data_at = traffic::from_client(options, family, Stage::Ack, 0).data_at();
    bytes.iter_mut().skip(data_at).enumerate().for_each(|(at, byte)| *byte = frame::pattern(at));
    bytes
}

/// Fisher-Yates shuffle with a 64-bit linear congruential generator (Knuth's MMIX): repeatable, and random enough to
/// defeat prefetching.
pub(super) fn shuffle(items: &mut [u32], seed: u64) {
    let mut random = Random(seed);
    for (i, end) in (1..items.len()).zip(2..) {
        items.swap(i, random.below(end) as usize);
    }
}

/// A sequence of random numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    /// The next number, of which the upper bits are the more random ones.
    #[inline(always)]
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0
    }

    /// A number below `end`, which is at most 2^31.
    #[allow(clippy::cast_possible_truncation)] // 31 bits
    pub(super) fn below(&mut self, end: u32) -> u32 {
        (self.next() >> 33) as u32 % end
    }
}
